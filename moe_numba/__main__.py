"""Command line: ``moe-numba doctor | bench TOPIC | plot TOPIC | readme | stale``, or ``python -m moe_numba ...``."""

import argparse
import inspect
import json
import sys
import tempfile
from pathlib import Path

import moe_numba
from moe_numba.extras import missing_extra
from moe_numba.simulator.command_line import Parser, UserError, check_name, parse


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        0, or 1 if something is broken or out of date, or 2 if the command cannot run here.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, commands = _parser()
    try:
        options = parse(parser, commands, arguments)
        if options.run is None:
            parser.print_help(sys.stderr)
            return 2
        return options.run(options)
    except (UserError, ImportError) as error:
        message = missing_extra(error, "this command") if isinstance(error, ImportError) else error
        if message is None:
            raise
        print(f"moe_numba: {message}", file=sys.stderr)
        return 2


def _parser():
    from moe_numba.course.pages.topics import BENCH_TOPICS

    # The console script has a name of its own; `python -m` would show that of this file.
    prog = "python -m moe_numba" if Path(sys.argv[0]).name == "__main__.py" else None
    parser = Parser(
        prog=prog,
        description="Mixture-of-experts kernels in Numba CUDA: check this machine, measure kernels, draw the results.",
        epilog="Begin with `doctor`. To run a Numba program of your own without a GPU: python -m moe_numba.simulator",
    )
    parser.add_argument("--version", action="version", version=f"moe_numba {moe_numba.__version__}")
    parser.set_defaults(run=None)
    added = parser.add_subparsers(metavar="COMMAND", title="commands")
    commands = {}

    def command(name, run, summary, more="", clone=False):
        where = " This needs a clone of the repository." if clone else ""
        commands[name] = sub = added.add_parser(
            name,
            help=summary + (" (in a clone)" if clone else ""),
            description=f"{summary[0].upper()}{summary[1:]}.{where}\n\n{more}".strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    width = max(map(len, BENCH_TOPICS))
    topics = "topics:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in sorted(BENCH_TOPICS.items()))

    doctor = command("doctor", _doctor, "say what runs on this machine: on its GPU, or in the simulator")
    doctor.add_argument("--arch", metavar="75", help="list what runs on GPUs of another compute capability, here 7.5")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON, for scripts")

    bench = command("bench", _bench, "measure the kernels of a topic on this GPU, beside others", topics)
    bench.add_argument("topic", metavar="TOPIC")
    bench.add_argument("--peers", type=Path, metavar="DIR", help="also measure the kernels of other projects in DIR")
    bench.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write DIR/<gpu>/TOPIC.json (default: docs/results of a clone, or results)",
    )
    bench.add_argument("--seconds", type=int, metavar="S", help="of a topic that measures until its time is up")
    bench.add_argument("--quick", action="store_true", help="measure a few sizes only")

    plot = command("plot", _plot, "draw the figures of a topic from recorded times; needs no GPU", topics)
    plot.add_argument("topic", metavar="TOPIC")
    plot.add_argument(
        "--gpu", default="h200", help="the GPU that was measured, a folder of the records (default: h200)"
    )
    plot.add_argument("--out", type=Path, metavar="DIR", help="write to DIR (default: build/figures)")
    plot.add_argument(
        "--table", action="store_true", help="print the times as a Markdown table instead; --out writes DIR/TOPIC.md"
    )

    readme = command("readme", _readme, "rewrite the generated blocks of README.md and docs/", clone=True)
    readme.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a block is out of date")

    stale = command("stale", _stale, "list the results of kernels that have changed since", clone=True)
    stale.add_argument("--json", action="store_true", help='print {"record or notebook": [sentences]}, for scripts')
    return parser, commands


def _say(text):
    """Say what takes more than a moment, where it does not mix with the command's output."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def _doctor(options):
    from moe_numba import doctor
    from moe_numba.simulator.capability import KNOWN

    known = {"".join(map(str, arch)): arch for arch in KNOWN}
    if options.arch is not None and options.arch not in known:
        raise UserError(f"--arch is {options.arch}; it must be one of {', '.join(known)}")
    _say("listing the paths of the kernels" if options.arch else "compiling a small kernel")
    try:
        found = doctor.examine(known.get(options.arch))
    except ValueError as error:  # MOE_NUMBA_COMPILER
        raise UserError(error) from error
    print(json.dumps(found, indent=1) if options.json else "\n".join(doctor.describe(found)))
    return int(found.get("status") == "broken")


def _stale(options):
    from moe_numba.course.bench.records import staleness

    _say("comparing records and executed notebooks with the present kernels")
    found = {}
    try:
        for name, sentences in staleness.stale_results():
            found[name] = sentences
            if not options.json:
                print(*(f"{name}: {sentence}" for sentence in sentences), sep="\n", flush=True)
    except FileNotFoundError as error:
        raise UserError(error) from error
    if options.json:
        print(json.dumps(found, indent=1))
    elif not found:
        print("all records and executed notebooks are of the present kernels")
    return int(bool(found))


def _peers_of_a_folder(names):
    """Return the peers that --peers loaded; topics measure libraries from Python packages without it."""
    return [name for name in names if not name.startswith(("NCCL", "transformers"))]


def _bench(options):
    from moe_numba import simulator
    from moe_numba.course import bench
    from moe_numba.course.bench import records
    from moe_numba.course.bench.records import progress

    check_name("topic", options.topic, bench.topic_names())  # before anything slow is imported
    if not simulator.ENABLED:
        _say("loading torch")
    if simulator.ENABLED or not _torch_has_a_gpu():
        raise UserError("bench needs a GPU: kernels run in the simulator here, which measures no times (see `doctor`)")
    topic = bench.topic(options.topic)
    budget = {} if options.seconds is None else {"seconds": options.seconds}
    if budget and "seconds" not in inspect.signature(topic.measure).parameters:
        raise UserError(f"--seconds is {options.seconds}; {options.topic} measures all of its sizes")
    try:
        out = options.out or records.written_to()
        _make_folder(out)  # fail before measuring, not after
        peers = bench.load_peers(options.peers) if options.peers else []
    except (ValueError, FileNotFoundError) as error:
        raise UserError(error) from error
    env = records.environment()
    earlier = records.recorded(options.topic, records.folder(env["gpu"]))
    replaced = out == records.results() and not options.peers
    if replaced and (lost := _peers_of_a_folder(records.peers_of(earlier))):
        raise UserError(
            f"the record of {options.topic} has times of {', '.join(lost)}, which a run without them would delete: "
            "name their folder with --peers, or another folder for the record with --out"
        )
    _say(f"measuring {options.topic} on {env['gpu']}" + (", a few sizes" if options.quick else ": this takes minutes"))
    with progress.said():
        rows = topic.measure(peers, options.quick, **budget)
    if hasattr(topic, "generate"):
        print(f"written: {topic.generate(rows, records.folder(env['gpu']))}")
    if hasattr(topic, "out_of_reach"):
        rows += records.carried_over(earlier, topic.out_of_reach, env)
    print(topic.summary(rows)) if hasattr(topic, "summary") else print_table(rows, options.topic)
    print(f"written to {records.write(options.topic, rows, results=options.out, env=env)}")
    return 0


def _torch_has_a_gpu():
    import torch

    return torch.cuda.is_available()


def _plot(options):
    from moe_numba.course import bench
    from moe_numba.course.bench import records

    check_name("topic", options.topic, bench.topic_names())
    try:
        record = records.read(options.topic, options.gpu)
    except FileNotFoundError as error:
        raise UserError(error) from error
    is_printed = options.table and options.out is None
    out = options.out or Path("build/figures")
    if not is_printed:
        _make_folder(out)
    _say(f"drawing {options.topic} on {record['gpu']}")
    topic = bench.topic(options.topic)
    for sentence in records.stale(record):
        print(f"out of date: {options.topic}: {sentence.partition(': ')[0]}", file=sys.stderr)
    table = topic.readme_table(record) if options.table else None
    if is_printed:
        print(table)
        return 0
    try:
        if table:
            written = out / f"{options.topic}.md"
            written.write_text(f"{table}\n")
            print(written)
        else:
            _draw(topic.figures(record), out / options.topic)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}") from error
    return 0


def _draw(figures, path):
    from moe_numba.course.bench.figures import plots

    for name, figure in figures.items():
        print(*plots.save(figure, path.with_name(f"{path.name}-{name}")), sep="\n", flush=True)


def _make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"nothing can be written to {path}: {error.strerror}") from error


def _readme(options):
    _say("drawing the tables from the records")
    from moe_numba.course.pages import readme

    try:
        changed = readme.regenerate(options.check)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(error) from error
    state = "out of date" if options.check else "rewritten"
    print(*[f"{state}: {block}" for block in changed] or ["all generated blocks are up to date"], sep="\n")
    return int(options.check and bool(changed))


def print_table(rows: list[dict], title: str, console=None) -> None:
    """Print the rows of a record as a table, times in microseconds; ``console`` is a ``rich`` console."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in ("step", "config", "size", "dtype"):
        table.add_column(name, overflow="fold")
    for name in ("kernel µs", "p10 – p90", "call µs", "lower bound µs", "× bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        kernel, call, bound = row.get("kernel_us"), row.get("call_us"), row.get("floor_us")
        table.add_row(
            ": ".join(filter(None, (row.get("operation"), row["step"]))),
            *(" ".join(f"{key}={value}" for key, value in row[name].items()) for name in ("config", "size")),
            row.get("dtype", ""),
            f"{kernel['median']:.2f}" if kernel else "",
            f"{kernel['p10']:.2f} – {kernel['p90']:.2f}" if kernel else "",
            f"{call['median']:.1f}" if call else "",
            f"{bound:.2f}" if bound else "",
            f"{kernel['median'] / bound:.1f}" if kernel and bound else "",
        )
    # A log file has no width; 180 columns fold no row.
    (console or Console(width=None if sys.stdout.isatty() else 180)).print(table)


if __name__ == "__main__":
    sys.exit(main())
