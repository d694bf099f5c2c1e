"""Machine code of the grouped GEMM: instructions, warnings and spills; no GPU is needed."""

import pytest
from helpers.machine_code import compiler_before, main_loops
from helpers.once_per_run import once_per_run

from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig
from moe_numba.grouped_gemm.call.arguments import GemmShape
from moe_numba.grouped_gemm.call.heuristics import select_wgmma_config
from moe_numba.grouped_gemm.common.constants import THREADS
from moe_numba.grouped_gemm.common.tma_launch import signature_of
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, SharedMemoryLayout, fit_registers, select_config
from moe_numba.runtime.device import H200
from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.grouped_gemm.wgmma.config import GemmConfig
from moe_numba.grouped_gemm.wgmma.kernel import make_kernel
from moe_numba.grouped_gemm.block_scaled import kernel as kernel_block_scaled
from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig
"""


def lora_config(rows, n, k, **options):
    """Fields of the configuration that a layer of Qwen3-30B-A3B with LoRA adapters selects, with two sizes of wgmma."""
    options = dict(low_rank=True, **options)
    shape = GemmShape("none", "offsets", options.get("silu_and_mul", False), rows // 128, 128, rows, 0, n, k)
    config = select_wgmma_config(shape, True, options.get("weight_major", "k") == "k", 132)
    return config._replace(mma_n=config.mma_n[:2], **options)._asdict()


CONFIGS = {
    "decode": dict(subtile_m=16, mma_n=(16,), stages=11),
    "prefill": dict(subtile_m=144, m_subtiles=2, mma_n=(144, 128), stages=4, band_rows=3456),
    "fast": dict(subtile_m=144, m_subtiles=2, mma_n=(144, 128), stages=4, fast_accumulation=True),
    "decode, blocks": dict(scaling="block", subtile_m=16, mma_n=(16,), stages=11),
    "prefill, blocks": dict(scaling="block", subtile_m=128, m_subtiles=2, mma_n=(128,), stages=4),
    "cluster": dict(subtile_m=136, m_subtiles=2, mma_n=(136,), stages=4, cluster_size=2),
    "silu": dict(silu_and_mul=True, subtile_m=128, mma_n=(128,), stages=4),
    "silu, blocks": dict(silu_and_mul=True, scaling="block", subtile_m=64, mma_n=(64,), stages=5),
    "bf16": dict(dtype="bf16", scaling="none", subtile_m=256, mma_n=(256,), stages=4),
    "bf16, MN-major": dict(
        dtype="bf16", scaling="none", weight_major="mn", subtile_m=144, m_subtiles=2, mma_n=(144, 128), stages=4
    ),
    "decode, gather": dict(gather=True, subtile_m=16, mma_n=(16,), stages=11),
    "prefill, gather": dict(gather=True, subtile_m=144, m_subtiles=2, mma_n=(144, 128), stages=4),
    "prefill, blocks, gather": dict(gather=True, scaling="block", subtile_m=128, mma_n=(128,), stages=6),
    "silu, gather": dict(gather=True, silu_and_mul=True, subtile_m=128, mma_n=(128,), stages=4),
    "bf16, gather": dict(gather=True, dtype="bf16", scaling="none", subtile_m=144, mma_n=(144,), stages=5),
    "bias, scatter": dict(
        bias="f32", scatter=True, row_weights=True, subtile_m=144, m_subtiles=2, mma_n=(144,), stages=4
    ),
    "float32": fit_registers(
        select_config("row", "lengths", 1000)._replace(
            bias="bf16", out_dtype="f32", accumulate=True, scatter=True, row_weights=True
        )
    )._asdict(),
    "float32, blocks": dict(
        **dict(scaling="block", bias="f32", out_dtype="f32", scatter=True, row_weights=True),
        **dict(subtile_m=128, mma_n=(128,), stages=6),
    ),
    "bf16, swigluoai": dict(
        **dict(dtype="bf16", scaling="none", silu_and_mul=True, activation="swigluoai", bias="bf16"),
        **dict(subtile_m=144, mma_n=(144,), stages=4),
    ),
    "bf16, LoRA, gate and up": lora_config(32768, 768, 2048, silu_and_mul=True, stores_gate_up=True),
    "bf16, LoRA, down": lora_config(32768, 2048, 768),
    "bf16, LoRA, gradient of the activation": lora_config(131072, 768, 2048, weight_major="mn"),
    "bf16, LoRA, gradient of x, cluster": lora_config(8192, 2048, 1536, weight_major="mn"),
    "silu, ragged n": dict(silu_and_mul=True, ragged_n=True, subtile_m=128, mma_n=(128,), stages=4),
}
BLOCK_SCALED = {
    "block-scaled": dict(block_n=256, stages=3, vector_x_scale=True, vector_weight_scale=True),
    "block-scaled, 192 columns": dict(),
    "block-scaled, 128 columns": dict(block_n=128, stages=5, cluster_size=1),
    "block-scaled, masked": dict(block_n=256, stages=3, row_layout="masked", early_test=True),
    "block-scaled, silu": dict(block_n=256, stages=4, silu_and_mul=True),
    "block-scaled, silu, packed scales": dict(
        **dict(block_n=256, stages=4, silu_and_mul=True, early_test=True),
        **dict(packed_x_scale=True, packed_weight_scale=True),
    ),
    "block-scaled, gather": dict(block_n=256, stages=3, cluster_size=1, gather=True),
    "block-scaled, silu, gather": dict(block_n=256, stages=4, silu_and_mul=True, cluster_size=1, gather=True),
}
NAMES = *CONFIGS, *BLOCK_SCALED


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    requests = {}
    for name in NAMES:
        if values := CONFIGS.get(name):
            config, made = GemmConfig(**values), f"make_kernel(GemmConfig(**{values}))[0]"
        else:
            config = BlockScaledConfig(**BLOCK_SCALED[name])
            made = f"kernel_block_scaled.make_kernel(BlockScaledConfig(**{BLOCK_SCALED[name]}))[0]"
        requests[name] = made, signature_of(config), THREADS, True
    return once_per_run(tmp_path_factory, "grouped_gemm", lambda: compile_apart(SOURCE, requests))


@pytest.mark.parametrize("name", NAMES)
def test_hopper_instructions_are_used(name, reports):
    wgmma = "HGMMA" if "bf16" in name else "QGMMA"
    stores = "STS" if name.startswith("block-scaled, silu") else "STSM"  # stmatrix stores 16-bit elements
    if name.startswith("float32"):
        stores = "REDG" if "blocks" not in name else "STG"
    for opcode in (wgmma, "UTMALDG", "SYNCS", "USETMAXREG", stores):
        assert reports[name].count(opcode), opcode
    assert not reports[name].count("CALL")  # all wgmmas would have to complete before a call
    assert bool(reports[name].count("LDGSTS")) == ("gather" in name)  # cp.async


@pytest.mark.parametrize("name", NAMES)
def test_setmaxnreg_asks_for_no_more_registers_than_the_cta_has(name, reports):
    """Four producer warps release registers for eight consumer warps, which would otherwise wait forever."""
    producer, consumer = sorted(set(reports[name].setmaxnreg))
    assert registers_of(producer, consumer) <= reports[name].registers * THREADS <= 65536
    assert registers_of(24, 256) > 65536


def test_mn_major_weights_are_transposed_by_wgmma(reports):
    assert set(reports["bf16, MN-major"].wgmma_transposes) == {".tnspA"}
    assert set(reports["bf16"].wgmma_transposes) == {""}


def registers_of(producer, consumer):
    return 128 * producer + (THREADS - 128) * consumer


@pytest.mark.parametrize("name", NAMES)
def test_no_compiler_warnings(name, reports):
    """The compiler warns if it ignores setmaxnreg or serialises wgmma."""
    assert reports[name].complaints == []


@pytest.mark.parametrize("name", CONFIGS)
def test_shared_memory_is_enough(name):
    assert SharedMemoryLayout(GemmConfig(**CONFIGS[name])).bytes <= H200.shared_bytes


@pytest.mark.parametrize("name", NAMES)
def test_consumer_warps_do_not_spill(name, reports):
    """No loop with a wgmma accesses local memory."""
    if name == "prefill, gather" and compiler_before(13, 5):
        pytest.skip("the compiler of CUDA 13.0 spills 48 bytes of this kernel")
    code = reports[name]
    if name in CONFIGS and "blocks" not in name:  # with block scales producers, prologue and epilogue may spill
        # With float32 a few values are spilled that a consumer warp reads once per tile.
        assert code.spilled_bytes <= (96 if name == "float32" else 0)
    assert not any({"LDL", "STL"} & body for body in main_loops(code))
