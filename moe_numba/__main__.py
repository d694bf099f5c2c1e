"""Command line: ``python -m moe_numba doctor | bench TOPIC | plot TOPIC | readme | stale``."""

import argparse
import inspect
import sys
import tempfile
from pathlib import Path

from moe_numba.extras import missing_extra


class UserError(Exception):
    """An error that is printed as one sentence, without a traceback; exit code 2."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        0, or 1 if something is out of date, or 2 if the command cannot run here.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (UserError, ImportError) as error:
        message = missing_extra(error, "this command") if isinstance(error, ImportError) else error
        if message is None:
            raise
        print(f"moe_numba: {message}", file=sys.stderr)
        return 2


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m moe_numba", description="Check the installation, run benchmarks and draw figures."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="report the GPU, the compiler and what can run on this machine")
    doctor.add_argument("--arch", metavar="75", help="print what runs on GPUs of another compute capability, here 7.5")
    doctor.set_defaults(run=_doctor)

    stale = commands.add_parser("stale", help="list records and executed notebooks of kernels that have changed since")
    stale.set_defaults(run=_stale)

    bench = commands.add_parser("bench", help="benchmark a topic on this GPU and write its record")
    bench.add_argument("topic", metavar="TOPIC")
    bench.add_argument("--peers", type=Path, metavar="DIR", help="also measure the kernels of other projects in DIR")
    bench.add_argument("--out", type=Path, metavar="DIR", help="write DIR/<gpu>/TOPIC.json (default: docs/results)")
    bench.add_argument("--seconds", type=int, metavar="S", help="of a topic that measures until its time is up")
    bench.add_argument("--quick", action="store_true", help="measure a few sizes only")
    bench.set_defaults(run=_bench)

    plot = commands.add_parser("plot", help="draw the figures of a record; needs no GPU")
    plot.add_argument("topic", metavar="TOPIC")
    plot.add_argument("--gpu", default="h200", help="folder of docs/results to read (default: h200)")
    plot.add_argument("--out", type=Path, default=Path("build/figures"), metavar="DIR", help="default: build/figures")
    plot.add_argument("--table", action="store_true", help="rewrite the topic's table in docs/measurements.md instead")
    plot.add_argument("--check", action="store_true", help="write nothing; exit code 1 if that table is out of date")
    plot.set_defaults(run=_plot)

    readme = commands.add_parser("readme", help="rewrite the generated blocks of README.md and docs/")
    readme.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a block is out of date")
    readme.set_defaults(run=_readme)
    return parser


def _doctor(options):
    from moe_numba import doctor
    from moe_numba.simulator.capability import KNOWN

    known = {"".join(map(str, arch)): arch for arch in KNOWN}
    if options.arch is not None and options.arch not in known:
        raise UserError(f"--arch is {options.arch}; it must be one of {', '.join(known)}")
    print("\n".join(doctor.report(known.get(options.arch))))
    return 0


def _stale(options):
    from moe_numba.course.bench.records.staleness import stale_results

    try:
        found = list(stale_results())
    except FileNotFoundError as error:
        raise UserError(error) from error
    print(*found or ["all records and executed notebooks are of the present kernels"], sep="\n")
    return int(bool(found))


def _peers_of_a_folder(names):
    """Return the peers that --peers loaded; topics measure libraries from Python packages without it."""
    return [name for name in names if not name.startswith(("NCCL", "transformers"))]


def _bench(options):
    import torch

    from moe_numba import simulator
    from moe_numba.course import bench
    from moe_numba.course.bench import records

    topic = _topic(options.topic)
    budget = {} if options.seconds is None else {"seconds": options.seconds}
    if budget and "seconds" not in inspect.signature(topic.measure).parameters:
        raise UserError(f"--seconds is {options.seconds}; {options.topic} measures all of its sizes")
    if options.out is not None:
        _make_folder(options.out)  # fail before measuring, not after
    if simulator.ENABLED or not torch.cuda.is_available():
        raise UserError("bench needs a GPU: kernels run in the simulator here, which measures no times (see `doctor`)")
    try:
        peers = bench.load_peers(options.peers) if options.peers else []
        if options.out is None:
            records.repository()  # fail before measuring, not after
    except (ValueError, FileNotFoundError) as error:
        raise UserError(error) from error
    env = records.environment()
    earlier = records.recorded(options.topic, records.folder(env["gpu"]))
    if options.out is None and not options.peers and (lost := _peers_of_a_folder(records.peers_of(earlier))):
        raise UserError(
            f"the record of {options.topic} has times of {', '.join(lost)}, which a run without them would delete: "
            "name their folder with --peers, or another folder for the record with --out"
        )
    rows = topic.measure(peers, options.quick, **budget)
    if hasattr(topic, "generate"):
        print(f"written: {topic.generate(rows, records.folder(env['gpu']))}")
    if hasattr(topic, "out_of_reach"):
        rows += records.carried_over(earlier, topic.out_of_reach, env)
    print(topic.summary(rows)) if hasattr(topic, "summary") else print_table(rows, options.topic)
    print(f"written to {records.write(options.topic, rows, results=options.out, env=env)}")
    return 0


def _plot(options):
    from moe_numba.course.bench import records
    from moe_numba.course.bench.figures import plots

    topic = _topic(options.topic)
    try:
        record = records.read(options.topic, options.gpu)
    except FileNotFoundError as error:
        raise UserError(error) from error
    for sentence in records.stale(record):
        print(f"out of date: {options.topic}: {sentence}", file=sys.stderr)
    if options.table or options.check:
        return _plot_table(options.topic, topic.readme_table(record), options.check)
    _make_folder(options.out)
    for name, figure in topic.figures(record).items():
        try:
            written = plots.save(figure, options.out / f"{options.topic}-{name}")
        except OSError as error:
            raise UserError(f"{error.filename} cannot be written: {error.strerror}") from error
        print(*written, sep="\n")
    return 0


def _make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"--out is {path}, where nothing can be written: {error.strerror}") from error


def _plot_table(topic, table, check):
    from moe_numba.course.bench import records
    from moe_numba.course.pages.readme import MEASUREMENTS, replace_block

    path = records.repository() / MEASUREMENTS
    try:
        old = path.read_text()
        new = replace_block(old, topic, table, MEASUREMENTS)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(error) from error
    if check:
        state = "up to date" if new == old else "out of date: run plot --table"
        print(f"{MEASUREMENTS}'s table for {topic} is {state}")
        return int(new != old)
    path.write_text(new)
    return 0


def _readme(options):
    from moe_numba.course.pages import readme

    try:
        changed = readme.regenerate(options.check)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(error) from error
    state = "out of date" if options.check else "rewritten"
    print(*[f"{state}: {block}" for block in changed] or ["all generated blocks are up to date"], sep="\n")
    return int(options.check and bool(changed))


def _topic(name):
    from moe_numba.course import bench

    try:
        return bench.topic(name)
    except ValueError as error:
        raise UserError(error) from error


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
