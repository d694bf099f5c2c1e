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


@pytest.fixture(scope="module")
def reports():
    return compile_apart(
        SOURCE,
        {
            f"{kernel} {protocol}": (
                f"make_low_latency_{kernel}(make_shape(8, 128, 7168, 8, 256, protocol='{protocol}'))",
                module.signature(),
                896,
                False,
            )
            for kernel, module in (("dispatch", low_latency_dispatch), ("combine", low_latency_combine))
            for protocol in ("lamport", "flags")
        },
    )


def test_data_as_its_own_flag_needs_no_system_fence(reports):
    """The fences of either protocol are those of waits that time out; with flags there are more."""
    for kernel, more in (("dispatch", 1), ("combine", 2)):  # combine also posts its start
        lamport, flags = (reports[f"{kernel} {name}"].count("MEMBAR.ALL.SYS") for name in ("lamport", "flags"))
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
