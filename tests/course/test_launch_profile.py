"""The kernels that a call launches: `moe_numba.course.bench.timing.launch_profile`."""

from types import SimpleNamespace

import pytest

from moe_numba import simulator
from moe_numba.course.bench.timing.launch_profile import kernels_of, launch_profile, short_name


def event(name, start, end):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_kernels_are_in_order_and_start_at_zero():
    events = [
        event(
            "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(at::TensorInfo<float>, long)",
            120.0,
            180.5,
        ),
        event("Memset (Device)", 90.0, 91.0),
        event("triton_poi_fused_add_sigmoid_0", 100.0, 107.254),
        event("Memcpy DtoD (Device -> Device)", 190.0, 200.0),
    ]
    assert kernels_of(events) == [["triton_poi_fused_add_sigmoid_0", 0.0, 7.25], ["gatherTopK", 20.0, 60.5]]
    assert kernels_of([]) == []
    last = [event("copy", 300.0, 301.0), event("triton_poi_fused_add_sigmoid_0", 310.0, 312.0)]
    assert kernels_of(events + last, calls=2) == [["copy", 0.0, 1.0], ["triton_poi_fused_add_sigmoid_0", 10.0, 2.0]]


@pytest.mark.parametrize(
    "name, short",
    [
        (
            "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::Fill>(int)",
            "elementwise_kernel_with_index",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>(float*)", "CatArrayBatchedCopy"),
        ("biased_grouped_topk_4tokens", "biased_grouped_topk_4tokens"),
    ],
)
def test_names_are_short(name, short):
    assert short_name(name) == short


@pytest.mark.skipif(not simulator.ENABLED, reason="needs the simulator")
def test_nothing_is_profiled_in_the_simulator():
    assert launch_profile(lambda: pytest.fail("must not be called")) is None


@pytest.mark.gpu
@pytest.mark.skipif(simulator.ENABLED, reason="needs a GPU")
def test_kernels_of_a_call():
    import torch

    x = torch.rand(1 << 20, device="cuda")
    kernels = launch_profile(lambda: x.sigmoid().topk(8))
    assert len(kernels) >= 2 and kernels[0][1] == 0 and all(us > 0 for *_, us in kernels)
