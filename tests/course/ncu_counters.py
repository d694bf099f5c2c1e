"""Compare the simulator's counters of ten kernels with those that Nsight Compute measures on a GPU.

    PYTHONPATH=. python tests/course/ncu_counters.py                    # needs an H200 and ncu
    PYTHONPATH=. python tests/course/ncu_counters.py --gpu A100
    PYTHONPATH=. python tests/course/ncu_counters.py --save FILE        # write what ncu prints to a file, too
    PYTHONPATH=. python tests/course/ncu_counters.py --csv FILE         # compare with what an earlier ncu printed
    PYTHONPATH=. python tests/course/ncu_counters.py --simulate         # print the simulator's counters as JSON

Requests, sectors, wavefronts and bank conflicts must be equal. Executed instructions must agree to 10 %: their estimate
is the sum over the source lines of executions in the simulator times SASS instructions of the line, so it needs the
compiler's line information (nvdisasm). The kernels have no loops, because a line of an unrolled loop has more SASS
instructions than one execution of the line takes.
"""

import argparse
import csv
import json
import os
import subprocess
import sys

import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, float64, int32

from moe_numba.course.bench import records
from moe_numba.ptx.memory import ld_global_s32x4, ld_shared_s32x4, st_global_s32x4, st_shared_s32x4
from moe_numba.runtime.launch import launch

THREADS, BLOCKS = 256, 8
SIZE = THREADS * BLOCKS


@cuda.jit
def copy(x, y):
    i = int32(cuda.grid(1))
    y[i] = x[i]


@cuda.jit
def copy_stride_8(x, y):
    i = int32(cuda.grid(1))
    y[i] = x[8 * i]


@cuda.jit
def copy_misaligned(x, y):
    i = int32(cuda.grid(1))
    y[i] = x[i + 1]


@cuda.jit
def copy_float4(x, y):
    i = int32(cuda.grid(1))
    a, b, c, d = ld_global_s32x4(x, 4 * i)
    st_global_s32x4(y, 4 * i, a, b, c, d)


@cuda.jit
def broadcast_float4(x, y):
    i = int32(cuda.grid(1))
    a, b, c, d = ld_global_s32x4(x, 4 * (i // 32))
    y[i] = a + b + c + d


@cuda.jit
def transpose(x, y):
    tile = cuda.shared.array(1024, float32)
    row, column = int32(cuda.threadIdx.x) // 32, int32(cuda.threadIdx.x) % 32
    tile[32 * row + column] = x[32 * row + column]
    cuda.syncthreads()
    y[32 * row + column] = tile[32 * column + row]


@cuda.jit
def transpose_padded(x, y):
    tile = cuda.shared.array(1056, float32)
    row, column = int32(cuda.threadIdx.x) // 32, int32(cuda.threadIdx.x) % 32
    tile[33 * row + column] = x[32 * row + column]
    cuda.syncthreads()
    y[32 * row + column] = tile[33 * column + row]


@cuda.jit
def shared_float64(x, y):
    tile = cuda.shared.array(512, float64)
    i = int32(cuda.threadIdx.x)
    tile[2 * i] = float64(x[i])
    cuda.syncthreads()
    y[i] = float32(tile[2 * (255 - i)])


@cuda.jit
def shared_float4(x, y):
    tile = cuda.shared.array(1024, int32, 16)
    i = int32(cuda.threadIdx.x)
    st_shared_s32x4(tile, 4 * i, x[i], x[i + 1], x[i + 2], x[i + 3])
    cuda.syncthreads()
    a, b, c, d = ld_shared_s32x4(tile, 8 * (i // 4))
    y[i] = a + b + c + d


@cuda.jit
def divergent_branch(x, y):
    i = int32(cuda.grid(1))
    if i % 2 == 0:
        y[i] = x[i] + float32(1)
    elif i % 4 == 1:
        y[i] = x[i + 64] * float32(3)
    y[i + 2048] = float32(1)


FLOAT, INT = torch.float32, torch.int32
# Kernel, blocks, threads, type and elements of x and y.
KERNELS = [
    (copy, BLOCKS, THREADS, FLOAT, SIZE, SIZE),
    (copy_stride_8, BLOCKS, THREADS, FLOAT, 8 * SIZE, SIZE),
    (copy_misaligned, BLOCKS, THREADS, FLOAT, SIZE + 1, SIZE),
    (copy_float4, BLOCKS, THREADS, INT, 4 * SIZE, 4 * SIZE),
    (broadcast_float4, BLOCKS, THREADS, INT, SIZE, SIZE),
    (transpose, 1, 1024, FLOAT, 1024, 1024),
    (transpose_padded, 1, 1024, FLOAT, 1024, 1024),
    (shared_float64, 1, THREADS, FLOAT, THREADS, THREADS),
    (shared_float4, 1, THREADS, INT, THREADS + 3, THREADS),
    (divergent_branch, BLOCKS, THREADS, FLOAT, SIZE + 64, 2 * SIZE),
]

_GLOBAL = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
INSTRUCTIONS = "smsp__inst_executed.sum"
# The simulator's counter -> the metrics whose sum must be equal.
EXACT = {
    "global_load_requests": [_GLOBAL.format("requests", "ld")],
    "global_load_sectors": [_GLOBAL.format("sectors", "ld")],
    "global_store_requests": [_GLOBAL.format("requests", "st")],
    "global_store_sectors": [_GLOBAL.format("sectors", "st")],
    "shared_load_wavefronts": [_WAVEFRONTS.format("ld")],
    "shared_store_wavefronts": [_WAVEFRONTS.format("st")],
    "bank_conflicts": [_CONFLICTS.format("ld"), _CONFLICTS.format("st")],
}
METRICS = [*(metric for metrics in EXACT.values() for metric in metrics), INSTRUCTIONS]
TOLERANCE = 0.1  # of the executed instructions


def launch_all(device, around):
    """Launch each kernel once; ``around(kernel)`` is a context for the launch alone, without the copies of its data."""
    for kernel, blocks, threads, dtype, *sizes in KERNELS:
        x, y = (torch.zeros(size, dtype=dtype).to(device) for size in sizes)  # no kernel runs for the zeros
        with around(kernel):
            launch(kernel, blocks, threads, x, y)


def simulated_counters(gpu):
    """Return the simulator's counters: kernel -> counter -> value, and the reason where there is no estimate."""
    with simulator.profile(gpu) as profile:
        launch_all("cpu", lambda kernel: simulator.seed(0))
    counters = {}
    for kernel in profile.kernels:
        found = {name: getattr(kernel.total, name) for name in EXACT}
        found[INSTRUCTIONS] = kernel.estimated_instructions
        found["reason"] = kernel.static.reason or "nvdisasm is missing, or the compiler gave no line information"
        counters[kernel.name] = found
    return counters


class _Measured:
    """The part of a process that ncu profiles, with `--profile-from-start off`."""

    def __init__(self, kernel):
        pass

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.profiler.start()

    def __exit__(self, *_):
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def parse_csv(text):
    """Parse what ``ncu --csv`` prints, in its long form (a row per metric) or its raw page (a column per metric).

    Lines before the header, such as ``==PROF== ...`` and the program's own, are skipped.

    Returns
    -------
    list of (str, dict)
        Kernel name and metric -> number of each launch, in order; None for a value that is no number.
    """
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID",') and '"Kernel Name"' in line), None)
    if header is None:
        raise ValueError(f"ncu printed no table; it ends with {lines[-1] if lines else 'nothing'!r}")
    launches = {}
    for row in csv.DictReader(line for line in lines[header:] if line.startswith('"')):
        if not row["ID"]:
            continue  # the raw page has a row of units
        _, metrics = launches.setdefault(int(row["ID"]), (row["Kernel Name"], {}))
        if "Metric Name" in row:
            metrics[row["Metric Name"]] = _number(row["Metric Value"])
        else:
            metrics |= {name: _number(value) for name, value in row.items() if name in METRICS}
    return [launches[i] for i in sorted(launches)]


def _number(text):
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def compare(simulated, measured):
    """Compare counters; return a list of (kernel, counter, simulated, measured, verdict).

    The verdict is "equal", "within 10 %", "DIFFERS", or "not compared: " and the reason.
    """
    names = list(simulated)
    if len(measured) != len(names):
        raise ValueError(f"ncu measured {len(measured)} launches of {len(names)} kernels")
    rows = []
    for name, (measured_name, metrics) in zip(names, measured):
        if name not in measured_name:
            raise ValueError(f"ncu measured {measured_name!r} where kernel {name!r} was expected")
        for counter, parts in EXACT.items():
            values = [metrics.get(metric) for metric in parts]
            found = None if None in values else sum(values)
            verdict = "equal" if found == simulated[name][counter] else "DIFFERS"
            rows.append((name, counter, simulated[name][counter], found, verdict))
        estimate, found = simulated[name][INSTRUCTIONS], metrics.get(INSTRUCTIONS)
        if estimate is None:
            verdict = f"not compared: {simulated[name]['reason']}"
        elif found and abs(estimate - found) <= TOLERANCE * found:
            verdict = "within 10 %"
        else:
            verdict = "DIFFERS"
        rows.append((name, INSTRUCTIONS, estimate, found, verdict))
    return rows


def _this_script(*arguments, simulate, tool=()):
    """Run this script in a process with or without the simulator; return what it prints."""
    command = [*tool, sys.executable, __file__, *arguments]
    environment = {**os.environ, "MOE_NUMBA_SIMULATE": str(int(simulate))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def measure():
    """Launch the kernels under ncu; return what it prints."""
    tool = ["ncu", "--csv", "--profile-from-start", "off", "--print-units", "base", "--metrics", ",".join(METRICS)]
    return _this_script("--launch", simulate=False, tool=tool)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="H200", help="the GPU that the kernels are compiled for")
    parser.add_argument("--save", metavar="FILE", help="write what ncu prints to a file, with the GPU and the versions")
    parser.add_argument("--csv", help="a file with what ncu printed, instead of running it")
    parser.add_argument("--simulate", action="store_true", help="print the simulator's counters as JSON")
    parser.add_argument("--launch", action="store_true", help="launch the kernels on the GPU; ncu runs this")
    options = parser.parse_args()
    if options.launch:
        launch_all("cuda", _Measured)
    elif options.simulate and simulator.ENABLED:
        print(json.dumps(simulated_counters(options.gpu)))
    else:
        text = _this_script("--simulate", "--gpu", options.gpu, simulate=True)
        if options.simulate:
            print(text, end="")
            return
        if options.csv:
            with open(options.csv, encoding="utf-8") as file:
                printed = file.read()
        else:
            printed = measure()
        if options.save:
            with open(options.save, "w", encoding="utf-8") as file:
                file.write(json.dumps(records.environment()) + "\n" + printed)
        rows = compare(json.loads(text.splitlines()[-1]), parse_csv(printed))
        for name, counter, simulated, measured, verdict in rows:
            print(f"{name:18} {counter:24} simulated {simulated!s:>8}  measured {measured!s:>10}  {verdict}")
        sys.exit(any(row[-1] == "DIFFERS" for row in rows))


if __name__ == "__main__":
    main()
