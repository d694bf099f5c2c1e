"""The commands `run` and `debug`: run a Numba-CUDA program in the simulator, under one or several seeds."""

import argparse
import contextlib
import difflib
import os
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from moe_numba import simulator
from moe_numba.simulator import capability
from moe_numba.simulator.command_line import Parser, UserError, parse
from moe_numba.simulator.compiler import launched
from moe_numba.simulator.core import kernel
from moe_numba.simulator.core.settings import settings

_COMMAND = "python -m moe_numba.simulator"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the program's exit code, or 2 if it cannot start."""
    parser, commands = _parser()
    try:
        options = parse(parser, commands, sys.argv[1:] if arguments is None else arguments)
        if options.script is None:
            parser.print_help(sys.stderr)
            return 2
        _prepare(options)
        return _run_seeds(options) if options.seeds is not None else _run(options)
    except UserError as error:
        print(f"moe_numba.simulator: {error}", file=sys.stderr)
        return 2


def _parser():
    parser = Parser(
        prog=_COMMAND,
        description="Run Numba-CUDA programs without a GPU. The simulator reports data races, deadlocks, reads of "
        "uninitialised memory and accesses out of bounds with their source lines.",
        epilog=f"Example: {_COMMAND} run my_kernel.py. The program stays as it is. Kernels run in Python, so it needs "
        "small inputs.",
    )
    parser.set_defaults(script=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    summary = "run a program whose @cuda.jit kernels are simulated"
    run = commands.add_parser("run", help=summary, description=f"{summary.capitalize()}; no GPU is needed.")
    seeds = run.add_mutually_exclusive_group()
    _add_seed(seeds)
    seeds.add_argument("--seeds", type=int, metavar="N", help="run with seeds 0 to N-1 and stop at the first failure")
    run.add_argument("--report", action="store_true", help="print counters per source line at the end")
    run.add_argument(
        "--report-to", type=Path, metavar="FILE", help="write them to FILE: as JSON to .json, as a page to .html"
    )
    run.add_argument(
        "--compile", action="store_true", help="compile the launched kernels at the end, with Numba's compiler; no GPU"
    )
    _add_options(run)
    summary = "run a program under the debugger; `help` there lists its commands"
    debug = commands.add_parser("debug", help=summary, description=f"{summary.capitalize()}.")
    _add_seed(debug)
    _add_options(debug)
    run.set_defaults(debug=False)
    debug.set_defaults(debug=True, seeds=None, report=False, report_to=None, compile=False)
    return parser, {"run": run, "debug": debug}


def _add_seed(parser):
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the thread order (MOE_NUMBA_SEED, or 0)")


def _add_options(parser):
    """Add what both commands take."""
    parser.add_argument(
        "--preempt", type=float, metavar="P", help="probability that a memory access yields to another thread first"
    )
    parser.add_argument(
        "--slow-warp", type=int, metavar="N", help="warp N of each block runs only while all others wait"
    )
    parser.add_argument(
        "--races",
        action=argparse.BooleanOptionalAction,
        help="report data races, also those that change no value (MOE_NUMBA_RACES, or yes)",
    )
    parser.add_argument("--weak-memory", action="store_true", help="let stores to global memory become visible late")
    parser.add_argument("--wraparound", action="store_true", help="let computed negative indices count from the end")
    parser.add_argument("--arch", metavar="80", help="compute capability of the simulated GPU (default: 90)")
    parser.add_argument("script", type=Path, metavar="script.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="[arguments]", help="arguments of the program")


def _prepare(options):
    """Put the options into the environment, from which this process and the program's own children take them."""
    if not options.script.is_file():
        raise UserError(f"{options.script} is not a file{_programs_beside(options.script)}")
    if options.report_to is not None and not options.report_to.parent.is_dir():
        raise UserError(f"--report-to is {options.report_to}, but {options.report_to.parent} is not a folder")
    if options.seeds is not None and options.seeds < 1:
        raise UserError(f"--seeds is {options.seeds}, but must be at least 1")
    if options.preempt is not None and not 0 <= options.preempt <= 1:
        raise UserError(f"--preempt is {options.preempt}, but must lie between 0 and 1")
    if options.slow_warp is not None and options.slow_warp < 0:
        raise UserError(f"--slow-warp is {options.slow_warp}, but must be 0 or more")
    values = {
        "MOE_NUMBA_SEED": options.seed,
        "MOE_NUMBA_PREEMPT": options.preempt,
        "MOE_NUMBA_SLOW_WARP": options.slow_warp,
        "MOE_NUMBA_RACES": options.races if options.races is None else int(options.races),
        "MOE_NUMBA_WRAPAROUND": "1" if options.wraparound else None,
        "MOE_NUMBA_WEAK_MEMORY": "1" if options.weak_memory else None,
        "MOE_NUMBA_COMPILE": "1" if options.compile else None,
    }
    os.environ.setdefault("MOE_NUMBA_RACES", "1")
    os.environ |= {name: str(value) for name, value in values.items() if value is not None}
    try:
        arch = capability.parse(options.arch, "--arch") if options.arch else None
        settings.check_environment()
    except (RuntimeError, ValueError) as error:
        raise UserError(error) from error
    simulator.enable(_COMMAND, arch)


def _programs_beside(script):
    """Name the programs in the folder of a path that is none."""
    names = sorted(path.name for path in script.parent.glob("*.py"))
    if not names:
        return ""
    close = difflib.get_close_matches(script.name, names, 1)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"; did you mean {close[0]}?" if close else f"; {script.parent.resolve()} has {', '.join(names[:5])}{more}"


def _run_seeds(options):
    """Run the program once for each seed, each time in a new process."""
    for seed in range(options.seeds):
        # The other options are in the environment.
        report = ["--report"] if options.report else []
        report += ["--report-to", str(options.report_to)] if options.report_to else []
        program = [*report, str(options.script), *options.arguments]
        done = subprocess.run([sys.executable, "-m", "moe_numba.simulator", "run", "--seed", str(seed), *program])
        if done.returncode:
            print(
                f"moe_numba.simulator: seed {seed} failed with exit code {done.returncode}, after {seed} seeds that "
                f"passed; run it again with --seed {seed} instead of --seeds {options.seeds}",
                file=sys.stderr,
            )
            return done.returncode if done.returncode > 0 else 1
        os.environ["MOE_NUMBA_COMPILE"] = "0"  # once is enough
        if seed + 1 < options.seeds and (seed + 1) & seed == 0:  # after 1, 2, 4, 8, ... of them
            print(f"moe_numba.simulator: {seed + 1} of {options.seeds} seeds passed", file=sys.stderr, flush=True)
    print(f"moe_numba.simulator: {options.seeds} seeds passed", file=sys.stderr)
    return 0


def _run(options):
    """Run the program in this process as `python script.py` would."""
    report = simulator.profile() if options.report or options.report_to else contextlib.nullcontext()
    watched = simulator.debug() if options.debug else reported_while_it_runs(_say)
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)
    code = 0  # if the debugger's `quit` ends the program
    with report as profile, watched:
        code = _run_script(options.script)
    if options.report:
        print(profile)
    if options.report_to:
        simulator.write_report(profile, str(options.report_to))
        _say(f"the report is in {options.report_to}")
    sys.stdout.flush()
    refused = launched.report_launched()
    return code or int(refused > 0)


def _say(text):
    print(f"moe_numba.simulator: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def reported_while_it_runs(say: Callable[[str], object], first_s: float = 2):
    """Name the kernel that is running after 2, 4, 8, 16, ... seconds, so that a long launch is not silent."""
    ended = threading.Event()

    def watch():
        passed, wait = 0, first_s
        while not ended.wait(wait):
            passed, wait = passed + wait, passed + wait
            if (running := kernel.running) is not None:
                name, blocks, threads = running
                say(f"{passed:.0f} s: running kernel {name}, {blocks} blocks of {threads} threads")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _run_script(path):
    """Run a program to its end; return its exit code. A traceback starts with the program's own frames."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and Path(frames.tb_frame.f_code.co_filename) != path:
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames or error.__traceback__))
        return 1
    return 0
