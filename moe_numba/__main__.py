"""``python -m moe_numba doctor | stale | bench TOPIC | plot TOPIC``."""

import argparse
import sys
from pathlib import Path

README_HELP = "rewrite the table between <!-- TOPIC:begin --> and <!-- TOPIC:end --> in README.md from the record"


class UserError(Exception):
    """Something to say in one sentence, without a traceback; exit code 2."""


def main(arguments=None):
    """Run one command; the exit code is 0, 1 for a table out of date, 2 for what cannot be done here."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except UserError as error:
        print(f"moe_numba: {error}", file=sys.stderr)
        return 2


def _parser():
    parser = argparse.ArgumentParser(prog="python -m moe_numba", description="Measure, draw, and say what runs here.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say what this machine can do")
    doctor.set_defaults(run=_doctor)

    stale = commands.add_parser("stale", help="name the records and executed notebooks that are older than their code")
    stale.set_defaults(run=_stale)

    bench = commands.add_parser("bench", help="measure a topic on this GPU and write its record")
    bench.add_argument("topic", metavar="TOPIC")
    bench.add_argument("--peers", type=Path, metavar="DIR", help="a folder of other projects' kernels, measured too")
    bench.add_argument("--out", type=Path, metavar="DIR", help="write DIR/<gpu>/TOPIC.json, not docs/results/...")
    bench.add_argument("--quick", action="store_true", help="a few sizes only")
    bench.set_defaults(run=_bench)

    plot = commands.add_parser("plot", help="draw a topic's figures from its record; needs no GPU")
    plot.add_argument("topic", metavar="TOPIC")
    plot.add_argument("--gpu", default="h200", help="whose record: a folder of docs/results (h200)")
    plot.add_argument("--out", type=Path, default=Path("build/figures"), metavar="DIR", help="(build/figures)")
    plot.add_argument("--readme", action="store_true", help=README_HELP)
    plot.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the table is out of date")
    plot.set_defaults(run=_plot)
    return parser


def _doctor(options):
    from moe_numba import doctor

    print("\n".join(doctor.report()))
    return 0


def _stale(options):
    from moe_numba.course.bench import sources

    try:
        found = list(sources.stale_results())
    except FileNotFoundError as error:
        raise UserError(error) from error
    print(*found or ["no record or executed notebook is older than its code"], sep="\n")
    return int(bool(found))


def _bench(options):
    import torch

    from moe_numba import simulator
    from moe_numba.course import bench
    from moe_numba.course.bench import records, sources

    topic = _topic(options.topic)
    if simulator.ENABLED or not torch.cuda.is_available():
        raise UserError("bench needs a GPU: kernels run in the simulator here, which has no times (see `doctor`)")
    try:
        peers = bench.load_peers(options.peers) if options.peers else []
        if options.out is None:
            records.repository()  # better to fail before measuring than after
    except (ValueError, FileNotFoundError) as error:
        raise UserError(error) from error
    rows, env = topic.measure(peers, options.quick), records.environment()
    if hasattr(topic, "out_of_reach"):
        rows += records.staying(records.recorded(options.topic, records.folder(env["gpu"])), topic.out_of_reach, env)
    print_table(rows, options.topic)
    sources = sources.topic_sources(options.topic)
    print(f"written to {records.write(options.topic, rows, sources, results=options.out, env=env)}")
    return 0


def _plot(options):
    from moe_numba.course.bench import plots, records

    topic = _topic(options.topic)
    try:
        record = records.read(options.topic, options.gpu)
    except FileNotFoundError as error:
        raise UserError(error) from error
    for sentence in records.stale(record):
        print(f"out of date: {sentence}", file=sys.stderr)
    if options.readme or options.check:
        return _readme(options.topic, topic.readme_table(record), options.check)
    for name, figure in topic.figures(record).items():
        for path in plots.save(figure, options.out / f"{options.topic}-{name}"):
            print(path)
    return 0


def _topic(name):
    from moe_numba.course import bench

    try:
        return bench.topic(name)
    except ValueError as error:
        raise UserError(error) from error


def _readme(topic, table, check):
    from moe_numba.course.bench import records

    path = records.repository() / "README.md"
    try:
        old = path.read_text()
        new = replace_block(old, topic, table)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(error) from error
    if check:
        print(f"README.md's table for {topic} is " + ("up to date" if new == old else "out of date: run plot --readme"))
        return int(new != old)
    path.write_text(new)
    return 0


def replace_block(text, topic, table):
    """``text`` with ``table`` between the topic's two markers; ``ValueError`` unless each is there once, in order."""
    begin, end = f"<!-- {topic}:begin -->", f"<!-- {topic}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README.md must hold {begin} and, after it, {end}, once each")
    return f"{text[: text.index(begin)]}{begin}\n{table.strip()}\n{text[text.index(end) :]}"


def print_table(rows, title, console=None):
    """The rows of a record as a table: times in microseconds."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in ("step", "config", "size", "dtype"):
        table.add_column(name, overflow="fold")
    for name in ("kernel µs", "p10 – p90", "call µs", "floor µs", "× floor"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        kernel, call, floor = row.get("kernel_us"), row.get("call_us"), row.get("floor_us")
        table.add_row(
            row["step"],
            *(" ".join(f"{key}={value}" for key, value in row[name].items()) for name in ("config", "size")),
            row.get("dtype", ""),
            f"{kernel['median']:.2f}" if kernel else "",
            f"{kernel['p10']:.2f} – {kernel['p90']:.2f}" if kernel else "",
            f"{call['median']:.1f}" if call else "",
            f"{floor:.2f}" if floor else "",
            f"{kernel['median'] / floor:.1f}" if kernel and floor else "",
        )
    # A log file has no width: wide enough that no row is folded.
    (console or Console(width=None if sys.stdout.isatty() else 180)).print(table)


if __name__ == "__main__":
    sys.exit(main())
