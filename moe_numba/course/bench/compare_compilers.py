"""Time the kernels of records with both compilers, in processes that take turns on one GPU.

Usage, on a GPU, where numba-cuda-mlir is installed::

    python -m moe_numba.course.bench.compare_compilers gate align grouped_gemm --quick --out DIR

It runs ``python -m moe_numba bench TOPIC`` in a process for each compiler and round, the compilers in turn (numba-cuda,
mlir, mlir, numba-cuda), and prints each row's time with numba-cuda-mlir over that with numba-cuda: the median over the
rounds. ``DIR/compilers.json`` keeps them. With ``--read`` it only reads what an earlier run has left in DIR.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from moe_numba.runtime import compilers

LIMIT = 1.05  # a slower kernel is marked


def run(topics, out, rounds, options):
    """Measure the topics; a topic that fails with one of the compilers is reported and left out."""
    for topic in topics:
        for number in range(rounds):
            order = list(compilers.DISTRIBUTIONS)
            for compiler in order if number % 2 == 0 else reversed(order):
                command = [
                    sys.executable,
                    "-m",
                    "moe_numba",
                    "bench",
                    topic,
                    "--out",
                    str(_folder(out, compiler, number)),
                ]
                environment = os.environ | {compilers.VARIABLE: compiler}
                done = subprocess.run([*command, *options], env=environment, stdout=subprocess.DEVNULL)
                if done.returncode:
                    print(f"{topic}: round {number} failed with {compiler} (exit status {done.returncode})", flush=True)


def rows_of(out, compiler, rounds):
    """Return ``{(topic, step, config, size, dtype): [median of each round]}`` of rows that time kernels of ours."""
    found = {}
    for number in range(rounds):
        for path in sorted(_folder(out, compiler, number).glob("*/*.json")):
            record = json.loads(path.read_text())
            for row in record["rows"]:
                if "kernel_us" in row and row.get("kernels"):
                    size = {**row.get("config", {}), **row.get("size", {})}
                    key = record["topic"], row["step"], json.dumps(size), row.get("dtype", "")
                    found.setdefault(key, []).append(row["kernel_us"]["median"])
    return found


def compare(out, rounds):
    """Return ``[{"topic", "step", "size", "dtype", "numba-cuda", "mlir", "ratio"}]``, the slowest first."""
    old, new = (rows_of(out, compiler, rounds) for compiler in (compilers.DEFAULT, compilers.MLIR))
    lines = []
    for key in old.keys() & new.keys():
        before, now = statistics.median(old[key]), statistics.median(new[key])
        if before and now:
            about = dict(zip(("topic", "step", "size", "dtype"), key, strict=True))
            times = {compilers.DEFAULT: before, compilers.MLIR: now}
            lines.append(about | times | {"ratio": round(now / before, 3)})
    return sorted(lines, key=lambda line: -line["ratio"])


def _folder(out, compiler, number):
    return out / f"{compiler}-{number}"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="compare_compilers", description=__doc__.split("\n")[0])
    parser.add_argument("topics", nargs="*", metavar="TOPIC")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="measure a few sizes only")
    parser.add_argument("--read", action="store_true", help="measure nothing")
    options = parser.parse_args(argv)
    if not options.read:
        run(options.topics, options.out, options.rounds, ["--quick"] * options.quick)
    lines = compare(options.out, options.rounds)
    (options.out / "compilers.json").write_text(json.dumps(lines, indent=1))
    for line in lines:
        mark = " slower" if line["ratio"] > LIMIT else ""
        times = f"{line[compilers.DEFAULT]:.2f} -> {line[compilers.MLIR]:.2f} us"
        print(f"{line['ratio']:.3f}{mark} {line['topic']} {line['step']} {line['size']} {line['dtype']}: {times}")
    slower = sum(line["ratio"] > LIMIT for line in lines)
    print(f"{len(lines)} rows, {slower} slower than {LIMIT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
