"""Measures the kernels for an older GPU beside those for this GPU, one after the other in processes of their own.

``MOE_NUMBA_ARCH``, which chooses the kernels, is read when the package is imported, so `in_process` imports it again.
Each row names the process that it is from (``run``) and, if it is the package's, the compute capability
(``config``) and the path that its kernels take there (``path``). ``torch.mm`` is measured in the same processes.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.timing import kernel_times
from moe_numba.course.bench.timing.fresh_process import call_in_process
from moe_numba.course.bench.topics.dispatch_combine import measure as dispatch_combine_measure
from moe_numba.course.bench.topics.grouped_gemm.show import (
    SETS,
    add_block_scales,
    expected_output,
    lower_bound,
    make_problem,
    random_weight,
)
from moe_numba.course.pages import gpu_support
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.api.bf16 import group_gemm_bf16
from moe_numba.grouped_gemm.api.fp8 import group_gemm_blockwise_fp8, group_gemm_pertensor_fp8
from moe_numba.runtime.compile_calls import usable_cores
from moe_numba.runtime.device import gpu_of
from moe_numba.simulator import capability as requested_capability

RANKS = 2
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DTYPES = {BF16: "bf16", FP8: "e4m3"}
FUNCTIONS = {"none": group_gemm_bf16, "tensor": group_gemm_pertensor_fp8, "block": group_gemm_blockwise_fp8}
SCALES = {"none": (), "tensor": ("y_scale",), "block": ("x_scale", "w_scale")}
LAUNCHES = 20  # of a CUDA graph
ALONE = ", alone"  # ending of a step that was not interleaved with others
DEVICE = "cpu" if simulator.ENABLED else "cuda"


class Sizes(NamedTuple):
    """Sizes of the GEMMs."""

    side: int = 8192  # m, n and k of the dense GEMM
    groups: int = 32
    n: int = 4096
    k: int = 7168
    rows: tuple[int, ...] = (1, 16, 64, 256)  # of each group


def measure(capabilities, sizes, with_exchange):
    """Return the record's rows.

    Parameters
    ----------
    capabilities : list of (major, minor)
        The compute capabilities whose kernels are measured, at most that of this GPU.
    sizes : Sizes
    with_exchange : bool
        Also measure dispatch and combine, on two GPUs.
    """
    compile_kernels(capabilities, kernel_jobs(sizes))
    _report_progress("compiled")
    rows = []
    for capability in capabilities:
        rows += in_process(capability, measure_gemm, *sizes)
        _report_progress(f"grouped GEMM, {capability}")
        if with_exchange:
            rows += in_process(capability, measure_exchange)
            _report_progress(f"dispatch and combine, {capability}")
    return rows


def _report_progress(what):
    print(f"older_gpus: {what}", file=sys.stderr, flush=True)


def in_process(capability, function, *arguments):
    """Call a function of this module in a new process that runs the kernels for a compute capability."""
    return call_in_process(function, *arguments, **{requested_capability.VARIABLE: "{}{}".format(*capability)})


def provenance(function):
    """Return the compute capability, the path of a function (see `gpu_support`), and the variable of this process."""
    gpu = gpu_of(0)
    path = next(support.path for support in gpu_support.functions(gpu) if support.name == function)
    run = f"{requested_capability.VARIABLE}={os.environ.get(requested_capability.VARIABLE, '')}"
    return {"capability": "{}.{}".format(*gpu.capability)}, path, run


# Compiling. All kernels one after another would take longer than their measurement, so processes fill the disk cache.


def kernel_jobs(sizes):
    """Return the jobs of `compile_jobs` for all kernels of the grouped GEMM that are measured.

    Those of dispatch and combine, whose ranks wait for one another, are compiled when they are measured: several
    processes that run them on the same GPUs at the same time would mostly wait.
    """
    return [(warm_up_gemm.__name__, "none", sizes.side)] + [
        (warm_up_gemm.__name__, scaling, rows) for scaling in FUNCTIONS for rows in sizes.rows
    ]


def compile_kernels(capabilities, jobs):
    """Compile kernels for all capabilities at once, with a process per core."""
    workers = max(1, usable_cores() // len(capabilities))
    parts = [part for i in range(workers) if (part := jobs[i::workers])]
    with ThreadPoolExecutor(len(capabilities) * len(parts)) as pool:
        started = [pool.submit(in_process, arch, compile_jobs, part) for arch in capabilities for part in parts]
        for process in started:
            process.result()


def compile_jobs(jobs):
    """Run each job (function, *arguments) of this module."""
    for function, *arguments in jobs:
        globals()[function](*arguments)
    return jobs


def warm_up_gemm(scaling, average):
    """Compile the kernel for groups of ``average`` rows, by a small call."""
    (problem,) = make_problems([random_weight(1, 128, 128, BF16 if scaling == "none" else FP8, DEVICE)], 1)
    problem.average = average
    group_gemm(scaling, problem)


# The grouped GEMM


def group_gemm(scaling, p):
    """Call the public function of a scaling."""
    scales = [getattr(p, name) for name in SCALES[scaling]]
    return FUNCTIONS[scaling](p.x, p.weight, p.seqlens, p.cu_seqlens, *scales, p.average, out=p.out)


def dense_mm(p):
    """Multiply the rows of the only group by ``torch.mm``."""
    return torch.mm(p.x, p.weight[0].t(), out=p.out)


def make_problems(weights, rows):
    """Return a problem for each weight, with ``rows`` rows in each group."""
    problems = [make_problem(weight, torch.full((len(weight),), rows, dtype=torch.int32)) for weight in weights]
    add_block_scales(problems)
    return problems


def measure_gemm(side, groups, n, k, rows):
    """Return the rows of the dense GEMM, beside ``torch.mm``, and of 32 groups; see `Sizes`.

    The dense GEMM and ``torch.mm`` are also timed alone: interleaved, the one that takes more power lowers the clock
    of the other.
    """
    weights = [random_weight(1, side, side, BF16, DEVICE) for _ in range(SETS)]
    found = measure_steps("none", make_problems(weights, side), {"torch.mm": dense_mm}, alone=True)
    for dtype, scalings in ((BF16, ("none",)), (FP8, ("tensor", "block"))):
        weights = [random_weight(groups, n, k, dtype, DEVICE) for _ in range(SETS)]
        for scaling in scalings:
            for count in rows:
                found += measure_steps(scaling, make_problems(weights, count))
    return found


def measure_steps(scaling, problems, others=None, alone=False):
    """Check the kernel and ``others``, ``{step: call}``, then time them interleaved; return their rows.

    With ``alone`` there is another row for each step, timed without the others.
    """
    first = problems[0]
    groups, n, k = first.weight.shape
    config, operation = {"num_groups": groups, "n": n, "k": k, "scaling": scaling}, FUNCTIONS[scaling].__name__
    steps = {"final": partial(group_gemm, scaling), **(others or {})}
    expected = expected_output(first, scaling)
    for name, step in steps.items():
        first.out.fill_(float("nan"))
        # torch may sum parts of k in bfloat16.
        if error := reference.mismatch(step(first), expected, 2.3e-3 if name == "final" else 1e-2):
            raise AssertionError(f"{name}, {operation}, {config}, {len(first.x)} rows: {error}")
    calls = {name: [partial(step, p) for p in problems] for name, step in steps.items()}
    times = kernel_times(calls, launches=LAUNCHES)
    if alone:
        for name, call in calls.items():
            times[name + ALONE] = kernel_times({name: call}, launches=LAUNCHES)[name]
    dtype, (capability, path, run) = DTYPES[first.x.dtype], provenance("grouped GEMM")
    floor_us, count, flops = lower_bound(first.seqlens, n, k, dtype)
    return [
        records.row(
            name,
            config=config | (capability if name.startswith("final") else {}),
            size={"rows": len(first.x)},
            dtype=dtype,
            kernel=times[name],
            floor_us=floor_us,
            operation=operation,
            bytes=count,
            flops=flops,
            path=path if name.startswith("final") else None,
            run=run,
        )
        for name in times
    ]


# Dispatch and combine


def measure_exchange():
    """Return the rows of dispatch and combine on two GPUs, measured as in the topic dispatch_combine."""
    rows = dispatch_combine_measure.measure([RANKS], quick=True, parts=["large"])
    capability, path, run = provenance("dispatch and combine")
    return [row | {"config": row["config"] | capability, "path": path, "run": run} for row in rows]
