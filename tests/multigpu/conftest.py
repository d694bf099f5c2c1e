"""Compiles the kernels of the tests with one process per GPU, in as many processes as there are cores."""

import pytest
import torch
from helpers.deepep_calls import LL_EXPERTS_PER_RANK, LL_FORMATS, LL_HIDDEN, LL_TOKENS, LL_TOPK
from helpers.expert_parallel import FP8, HIDDEN, NUM_BYTES, SMALL, WIDE
from helpers.low_latency import EXPERTS_PER_RANK, KINDS
from helpers.rank_processes import num_ranks

from moe_numba import simulator
from moe_numba.expert_parallel import Config
from moe_numba.expert_parallel.low_latency.config import shape_of_options
from moe_numba.expert_parallel.low_latency.exchange import BOTH, RECEIVE, SEND, exchange_kernels
from moe_numba.expert_parallel.ranks.compile_ahead import compile_ahead
from moe_numba.expert_parallel.rings.config import limits_of
from moe_numba.expert_parallel.rings.launch_plans import PlannedKernels
from moe_numba.runtime.device import gpu_of

DEEPEP = Config(24, 8, 256)  # of DeepEP's tests


def kernels(ranks):
    """Return the definitions of most kernels that the tests use; the ranks compile the others."""
    found = []
    for uses_tma in (None, False):
        planned = PlannedKernels(ranks, NUM_BYTES, limits_of(gpu_of(0), uses_tma))
        for config in (SMALL, WIDE):
            for to_output in (False, True):
                for dtype, scales in ((torch.bfloat16, 0), (FP8, HIDDEN // 8)):
                    channels = planned.dispatch(config, HIDDEN, dtype, scales, 2, to_output=to_output)
                    planned.combine(config, 64, 2, channels)
        for to_output in (False, True):
            planned.combine(WIDE, HIDDEN, 4, planned.dispatch(WIDE, HIDDEN, topk=4, to_output=to_output))
        planned.combine(SMALL, HIDDEN, 0, planned.dispatch(SMALL, HIDDEN, topk=2))
        found += planned.definitions
    planned = PlannedKernels(ranks, NUM_BYTES, limits_of(gpu_of(0)))
    for topk in (0, 8):
        for dtype, scales in ((torch.bfloat16, 0), (FP8, HIDDEN // 128)):
            planned.combine(DEEPEP, HIDDEN, topk, planned.dispatch(DEEPEP, HIDDEN, dtype, scales, topk))
    found += planned.definitions
    for protocol in ("lamport", "flags"):
        for tokens, topk, options in (
            *((tokens, topk, dict(use_fp8=scales is not None)) for topk, tokens, scales in KINDS),
            (64, 4, dict(expert_major=False)),
            (64, 8, {}),
            (16, 2, {}),
        ):
            shape = shape_of_options(
                *(ranks, tokens, HIDDEN, EXPERTS_PER_RANK * ranks, topk), protocol=protocol, **options
            )
            found += exchange_kernels(shape)
    sizes = ranks, LL_TOKENS, LL_HIDDEN, ranks * LL_EXPERTS_PER_RANK, LL_TOPK
    for shape in [shape_of_options(*sizes, **options) for options in LL_FORMATS.values()]:
        for phase in (BOTH, SEND, RECEIVE):
            found += exchange_kernels(shape, phase=phase)
    return found


@pytest.fixture(scope="session", autouse=True)
def compiled():
    """Compile before the first test; the ranks would compile one kernel after another."""
    if not simulator.ENABLED and torch.cuda.device_count() > 1:
        compile_ahead(kernels(num_ranks()))
