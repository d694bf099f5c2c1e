"""Compile kernels for Hopper without a GPU; check registers, spills and instructions."""

import pytest
from helpers.machine_code import is_dependent_launch

from moe_numba.runtime.sass import compile_apart

SOURCE = """
import moe_numba
from moe_numba.align import with_gate
from moe_numba.align import counting_sort, large, medium, one_expert_per_warp, pairwise, small
from moe_numba.gate import four_tokens_per_warp, generic, merged_keys, one_token_per_warp, packed_keys
from moe_numba.gate.one_token_per_warp import GateConfig
from moe_numba.shared_experts import kernel as shared_experts
"""
# arguments after the logits and the bias
GATE = ("float32*", "int32*", "int32", "int64", "int32", "float32", "float32")


def gate(factory, experts, groups, kept, topk, dtype="float32", word_bytes=16, bounds=None):
    constants = experts, groups, kept, topk, 0, True, "sigmoid", dtype, "float32", word_bytes, word_bytes
    x = "float32*" if dtype == "float32" else "uint16*"
    return f"{factory}(GateConfig{constants})", [x, "float32*", *GATE], bounds, False


ROUTERS = {
    "deepseek_v3": gate("one_token_per_warp.make_kernel", 256, 8, 4, 8),
    "deepseek_v3_bfloat16": gate("one_token_per_warp.make_kernel", 256, 8, 4, 8, "bfloat16"),
    "deepseek_v3_float16": gate("one_token_per_warp.make_kernel", 256, 8, 4, 8, "float16"),
    "kimi_k2": gate("one_token_per_warp.make_kernel", 384, 1, 1, 8),
    "widest": gate("one_token_per_warp.make_kernel", 1024, 1, 1, 32),
    "sixteen_groups": gate("one_token_per_warp.make_kernel", 512, 16, 8, 16),
    "4_tokens": gate("four_tokens_per_warp.make_4tokens_kernel", 256, 8, 4, 8, bounds=(128, 6)),
    "4_tokens_bfloat16": gate("four_tokens_per_warp.make_4tokens_kernel", 256, 8, 4, 8, "bfloat16", bounds=(128, 6)),
}
PACKED = ["uint16*", "uint16*", *GATE]
ROUTERS |= {
    name: (f"packed_keys.make_packed_kernel(packed_keys.PackedConfig({sizes}))", PACKED, 128, False)
    for name, sizes in {
        "packed_qwen3_few_tokens": "128, 8, 32, load_bytes=8",
        "packed_qwen3_next": "512, 10, 32",
        "packed_gpt_oss_float16": "32, 4, 4, dtype='float16', renormalize=False",
        "packed_widest": "1024, 32, 32, scoring='sigmoid'",
    }.items()
}
ROUTERS |= {
    name: (f"merged_keys.make_merged_kernel(packed_keys.PackedConfig({sizes}))", PACKED, (128, 3), False)
    for name, sizes in {
        "merged_qwen3": "128, 8, 2",
        "merged_float16": "128, 8, 2, dtype='float16', renormalize=False",
        "merged_widest": "512, 8, 8, scoring='sigmoid'",
    }.items()
}
GENERIC = "generic.make_generic_kernel()", ["float32*", "float32*", *GATE, *["int32"] * 6], None, False

ALIGN = [*["int32*"] * 5, *["int32"] * 6]
CONFIG = "GateConfig(256, 8, 4, 8, 0, True, 'sigmoid', 'float32', 'float32', 16, 16)"
FUSED = ["float32*", "float32*", *GATE, *["int32*"] * 4, *["int32"] * 6]
ALIGNERS = {
    "small": ("small.make_small_kernel(False, False)", ALIGN, 128, False),
    "few": ("one_expert_per_warp.make_kernel(256, 512, 288, False, False)", ALIGN, 256, False),
    "medium": ("medium.make_medium_kernel(512, 8, 288, False, False)", ALIGN, 512, False),
    "medium_8192": ("medium.make_medium_kernel(1024, 8, 8224, True, True)", ALIGN, 1024, False),
    "large": ("large.make_large_kernel(512, 288, 8, False, False)", ["int32*", *ALIGN], 512, False),
    **{
        name: (f"counting_sort.make_counting_sort_kernel(512, {options})", [ids, *ALIGN], 512, False)
        for name, options, ids in (
            ("counting_sort", "288, 8, False, False", "int32*"),
            ("counting_sort_8192", "8224, 8, True, True", "int32*"),
            ("counting_sort_wide", "288, 8, False, False, True", "uint8*"),
        )
    },
    "pairwise": ("pairwise.make_pairwise_kernel(True, True)", ALIGN, 1024, False),
    "fused": (f"with_gate.make_kernel({CONFIG}, False, 288, False, False)", FUSED, 256, False),
}

FUSE_ROUTING = ["float32*", "int32*", "float32*", "int32*", *["int32"] * 5, "uint32", "uint32", "float32"]
SHARED = {
    f"shared_{policy}": (f"shared_experts.make_fuse_kernel({policy!r})", FUSE_ROUTING, 128, False)
    for policy in ("all", "round_robin", "random")
}


@pytest.fixture(scope="module")
def reports():
    return compile_apart(SOURCE, {**ROUTERS, "generic": GENERIC, **ALIGNERS, **SHARED})


@pytest.mark.parametrize(
    "name", ["small", "few", "medium", "large", "counting_sort", "counting_sort_wide", "pairwise", "fused"]
)
def test_alignment_uses_no_local_or_generic_memory(name, reports):
    """No stack, and no generic loads and stores."""
    report = reports[name]
    assert (
        report.spilled_bytes
        == report.stack_bytes
        == report.count("LDL")
        == report.count("STL")
        == report.count("LD")
        == report.count("ST")
        == 0
    )
    assert report.registers <= {"large": 128, "counting_sort": 128, "counting_sort_wide": 128}.get(name, 64)


@pytest.mark.parametrize("name", ["medium_8192", "counting_sort_8192"])
def test_alignment_does_not_spill_for_8192_experts(name, reports):
    assert reports[name].spilled_bytes == 0


@pytest.mark.parametrize("name, batch", [("few", 2), ("medium", 8), ("large", 8), ("counting_sort", 16), ("fused", 1)])
def test_counting_is_one_atomic_without_return(name, batch, reports):
    assert reports[name].count("ATOMS.POPC.INC.32") == batch


@pytest.mark.parametrize("name, loads", [("large", 8), ("counting_sort", 2)])
def test_counts_are_exchanged_without_fences(name, loads, reports):
    report = reports[name]
    assert report.count("LDG.E.128.STRONG.GPU") >= loads and report.count("STG.E.64.STRONG.GPU")
    assert report.count("MEMBAR") == 0


@pytest.mark.parametrize("name", ROUTERS)
def test_gate_uses_no_local_memory(name, reports):
    report = reports[name]
    assert report.spilled_bytes == report.stack_bytes == report.count("LDL") == report.count("STL") == 0
    assert report.registers <= {"widest": 168, "4_tokens": 84, "4_tokens_bfloat16": 84}.get(
        name, 168 if name.startswith("merged") else 128
    )


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_bfloat16", "deepseek_v3_float16", "kimi_k2", "4_tokens"])
def test_logits_are_loaded_with_16_byte_loads(name, reports):
    assert reports[name].count("LDG.E.128.CONSTANT") >= 2


def test_one_reduction_per_pick(reports):
    """Twice, because tokens with ties pick again."""
    for name in ("deepseek_v3", "kimi_k2"):
        assert converged(reports[name]).count("REDUX.MAX.S32") == 2 * 8


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2", "4_tokens", "packed_qwen3_next"])
def test_code_for_a_diverged_warp_is_apart(name, reports):
    """Where a warp may have diverged, the compiler adds a copy of a reduction; none lies in the way of other warps."""
    assert "WARPSYNC.COLLECTIVE" not in converged(reports[name])


def converged(report):
    """Return a kernel's instructions up to its last exit, behind which the code for diverged warps lies."""
    return report.opcodes[: len(report.opcodes) - report.opcodes[::-1].index("EXIT")]


def test_merges_load_all_logits_first(reports):
    """The loads of a row's part are all under way at once, and three CTAs still fit on an SM."""
    report = reports["merged_qwen3"]
    assert report.count("LDG.E.128.CONSTANT") == 8 and report.count("WARPSYNC.COLLECTIVE") == 0
    assert report.count("VIMNMX") <= 540


def test_redistribution_uses_16_byte_accesses(reports):
    for name in ("4_tokens", "4_tokens_bfloat16"):
        keys = [code for code in converged(reports[name]) if code.endswith(".128")]
        assert keys.count("STS.128") == keys.count("LDS.128") == 8
        assert converged(reports[name]).count("STS") == 1 and converged(reports[name]).count("LDS") == 2  # kept groups


def test_fast_special_functions(reports):
    for name in ("deepseek_v3", "4_tokens"):
        assert reports[name].count("MUFU.EX2") and reports[name].count("MUFU.RCP")


def test_dependent_launch(reports):
    """Check for griddepcontrol.wait and .launch_dependents by their SASS names."""
    for report in reports.values():
        assert is_dependent_launch(report)


def test_generic_kernel_does_not_spill(reports):
    assert reports["generic"].spilled_bytes == 0


@pytest.mark.parametrize("name", SHARED)
def test_fuse_routing_uses_few_registers(name, reports):
    assert reports[name].spilled_bytes == 0 and reports[name].registers <= 32


def test_spills_are_detected():
    """Limited to 32 registers, the same kernel spills."""
    report = compile_apart(SOURCE, {"": gate("one_token_per_warp.make_kernel", 1024, 1, 1, 8, bounds=(1024, 2))})[""]
    assert report.spilled_bytes > 0 and report.registers <= 32
