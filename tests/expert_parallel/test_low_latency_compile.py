"""Machine code of low-latency dispatch and combine at DeepSeek-V3's sizes; no GPU is needed."""

import pytest

from moe_numba.expert_parallel.low_latency import combine as low_latency_combine
from moe_numba.expert_parallel.low_latency import dispatch as low_latency_dispatch
from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.expert_parallel.low_latency.combine import make_low_latency_combine
from moe_numba.expert_parallel.low_latency.dispatch import make_low_latency_dispatch
from moe_numba.expert_parallel.low_latency.config import make_shape
"""
SHAPES = {  # the number of ranks and tokens, and the options of `make_shape`
    "one token": (2, 1, ""),
    "packed": (8, 128, ""),
    "flags": (8, 128, "protocol='flags'"),
    "slots": (8, 128, "expert_major=False"),
    "fp8": (8, 128, "scales='float32'"),
    "ue8m0": (8, 128, "scales='ue8m0'"),
    "fp8 in slots": (8, 128, "scales='rounded', expert_major=False"),
    "fp8 sums": (8, 128, "combines_fp8=True"),
    "fp8 sums in slots": (8, 128, "combines_fp8=True, expert_major=False"),
}


@pytest.fixture(scope="module")
def reports():
    requests = {}
    for name, (ranks, tokens, options) in SHAPES.items():
        shape = f"make_shape({ranks}, {tokens}, 7168, 8, 256, {options})"
        sends_fp8, sums_fp8 = "scales=" in options, "combines_fp8" in options
        for kernel, module in (("dispatch", low_latency_dispatch), ("combine", low_latency_combine)):
            if not (sums_fp8 if kernel == "dispatch" else sends_fp8):  # which changes nothing
                threads = (128, 2) if tokens == 1 else (448, 2) if sends_fp8 else 896
                request = f"make_low_latency_{kernel}({shape})", module.signature(), threads, False
                requests[f"{kernel} {name}"] = request
    requests["dispatch int32"] = requests["dispatch packed"][0], low_latency_dispatch.signature("int32*"), 896, False
    return compile_apart(SOURCE, requests)


def test_nothing_spills(reports):
    for name, report in reports.items():
        assert report.spilled_bytes == report.stack_bytes == 0 and not report.complaints, name
        assert report.registers <= (96 if "one token" in name else 72), name  # a CTA of 896 threads has 72 for each


def test_data_as_its_own_flag_needs_no_system_fence(reports):
    """The fences of either protocol are those of waits that time out; with flags there are more."""
    for kernel, more in (("dispatch", 1), ("combine", 2)):  # combine also posts its start
        lamport, flags = (reports[f"{kernel} {name}"].count("MEMBAR.ALL.SYS") for name in ("packed", "flags"))
        assert lamport is None or flags == lamport + more


@pytest.mark.parametrize("arch", [(7, 5), (8, 0)], ids=lambda arch: f"sm_{arch[0]}{arch[1]}")
def test_older_gpus(arch):
    """The kernels need nothing that these GPUs lack; FP8 is converted with integer instructions."""
    requests = {
        "dispatch": (
            "make_low_latency_dispatch(make_shape(4, 64, 2048, 8, 64, scales='float32'))",
            low_latency_dispatch.signature(),
            256,
            False,
        ),
        "combine": (
            "make_low_latency_combine(make_shape(4, 64, 2048, 8, 64))",
            low_latency_combine.signature(),
            256,
            False,
        ),
    }
    for name, report in compile_apart(SOURCE, requests, arch).items():
        assert report.spilled_bytes == report.stack_bytes == 0, name
