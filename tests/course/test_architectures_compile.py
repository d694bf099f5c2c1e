"""GPUs other than Hopper: the kernels of the fingerprints compile without spills."""

import pytest
from architectures import ARCHITECTURES, compile_apart
from helpers.machine_code import compiler_before

KERNELS = {
    *("biased_grouped_topk", "biased_grouped_topk_4tokens", "biased_grouped_topk_generic", "fuse_routing"),
    *("moe_align_block_size_small", "moe_align_block_size_few", "moe_align_block_size_medium"),
    "moe_align_block_size_large",
    *("moe_align_block_size_pairwise", "biased_grouped_topk_align", "get_dispatch_layout"),
    *("cast_to_fp8", "cast_back", "weighted_sum", "silu_and_mul", "group_by_expert"),
}
SPILLED_BY_CUDA_13_0 = ("gate: softmax 16384, biased_grouped_topk_4tokens", [10, 0, "a"], 32)


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: f"sm_{arch[0]}{arch[1]}")
def test_kernels_compile_without_spills(arch):
    reports = compile_apart(arch)
    spilled = [(name, link_arch, number) for name, link_arch, _, number in reports if number]
    if compiler_before(13, 5):
        spilled = [spill for spill in spilled if spill != SPILLED_BY_CUDA_13_0]
    assert not spilled
    assert {tuple(link_arch) for _, link_arch, *_ in reports} == set(ARCHITECTURES[arch])
    assert KERNELS <= {name.split(", ")[-1] for name, *_ in reports}
