"""Kernels of every topic on both engines of the simulator: the same outputs, and a list of kernels that fall back."""

import pytest
import torch
from helpers.expert_parallel import NUM_BYTES, SMALL, bitwise_equal, make_inputs, send
from helpers.grouped_gemm import FUNCTIONS, SILU, inputs

import moe_numba
from moe_numba import simulator
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.local_group import LocalGroup
from moe_numba.simulator.core.scheduler import override_settings
from moe_numba.simulator.vector import launch

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests the simulator")

# Kernels that run with one greenlet per thread because the vector engine gives them up, and why. Do not add to it.
FALLBACKS = {}


@pytest.fixture(autouse=True)
def deterministic_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gate(experts=256, groups=8, kept=4, **options):
    generator = torch.Generator().manual_seed(experts)
    x, bias = torch.randn(9, experts, generator=generator), torch.randn(experts, generator=generator)
    return lambda: moe_numba.biased_grouped_topk(x, bias, 6, True, groups, kept, **options)


def align(tokens, experts=64, **options):
    ids = torch.randint(-1, experts, (tokens, 4), generator=torch.Generator().manual_seed(tokens), dtype=torch.int32)
    return lambda: moe_numba.moe_align_block_size(ids, 16, experts, **options)


def gate_align(tokens):
    x, bias = torch.randn(tokens, 64), torch.randn(64)
    return lambda: moe_numba.biased_grouped_topk_align(x, bias, 4, 16, num_expert_group=4, topk_group=2)


def grouped_gemm(functions, kind):
    arguments = inputs(n=256 if functions is SILU else 128)[kind]
    return lambda: functions[kind][0](*arguments)


def casts():
    x = torch.randn(5, 256).bfloat16()

    def call():
        quantised = moe_numba.per_token_cast_to_fp8(x)
        return *quantised, moe_numba.per_token_cast_back(*quantised)

    return call


def shared_experts():
    weights, ids = torch.rand(7, 4), torch.randint(0, 16, (7, 4), dtype=torch.int32)
    return lambda: moe_numba.fuse_routing(weights, ids, 16, 2, 2.5)


def dispatch_layout():
    idx = torch.randint(-1, 16, (50, 4))
    return lambda: moe_numba.get_dispatch_layout(idx, 16, 4)


def dispatch_and_combine(uses_tma=None):
    given = make_inputs([7, 9, 4])

    def on_rank(transport):
        buffer = Buffer(transport, NUM_BYTES)
        x, idx, weights, _, handle, _ = send(buffer, transport.rank, given)
        combined = buffer.combine(x, handle, weights, config=SMALL)[:2]
        buffer.destroy()
        return x, idx, weights, *combined

    def call():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Buffer, "_uses_tma", uses_tma)
            return [tensor for tensors in LocalGroup(3).run(on_rank) for tensor in tensors]

    return call


TOPICS = {
    "gate": gate(),
    "gate, softmax": gate(128, 1, 1, scoring="softmax"),
    "gate, many experts": gate(1024, 64, 8),
    "gate, 4 tokens": lambda: moe_numba.biased_grouped_topk(
        torch.randn(300, 256, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 256), 8, True, 8, 4
    ),
    "align, small": align(5),
    "align, medium": align(200),
    "align, large": align(1500, 256),
    "gate and align, one CTA": gate_align(3),
    "gate and align, cluster": gate_align(40),
    "shared experts": shared_experts(),
    "dispatch layout": dispatch_layout(),
    "FP8 casts": casts(),
    **{f"grouped GEMM, {kind}": grouped_gemm(FUNCTIONS, kind) for kind in FUNCTIONS},
    **{f"grouped GEMM with activation, {kind}": grouped_gemm(SILU, kind) for kind in SILU},
    "dispatch and combine": dispatch_and_combine(),
    "dispatch and combine without TMA": dispatch_and_combine(False),
}


def on_engine(name, call):
    with override_settings(engine=name):
        results = call()
    results = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(r for r in results if isinstance(r, torch.Tensor))


@pytest.mark.parametrize("topic", TOPICS)
def test_both_engines_have_the_same_outputs(topic):
    call, launch.fallbacks = TOPICS[topic], {}
    assert bitwise_equal(on_engine("either", call), on_engine("threads", call))
    assert set(launch.fallbacks) <= set(FALLBACKS), launch.fallbacks
