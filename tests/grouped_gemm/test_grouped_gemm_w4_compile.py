"""Machine code of the grouped GEMM with 4-bit weights: instructions, warnings and spills; no GPU is needed."""

import pytest
from helpers.once_per_run import once_per_run

from moe_numba.course.bench.topics.grouped_gemm_tiles.tune import candidates
from moe_numba.grouped_gemm.w4.config import CONFIGS, W4Config
from moe_numba.grouped_gemm.w4.launch import W4_SIGNATURE
from moe_numba.grouped_gemm.w4.layout import W4Layout
from moe_numba.grouped_gemm.w4.main_loop import MMA_SYNC_ROWS
from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.grouped_gemm.w4.config import W4Config
from moe_numba.grouped_gemm.w4.kernel import make_kernel
"""
DECODE = dict(subtile_m=24, mma_n=(24,), stages=9)
SMALL = dict(subtile_m=16, mma_n=(16,), stages=10)
PREFILL = dict(subtile_m=256, mma_n=(256,), box_rows=32, stages=5, stage_tiles=1, overlap=False, gather=True)
BLOCK_SCALED = dict(dtype="e4m3", x_scaling="block")
ALL_OPTIONS = dict(bias="bf16", scatter=True, row_weights=True)
CASES = {
    "decode": DECODE,
    "mma.sync": SMALL,
    "mma.sync, swigluoai": SMALL | dict(activation="swigluoai", bias="bf16", gather=True),
    "prefill": CONFIGS[-1][1],
    "prefill, gather": PREFILL,
    "decode, swigluoai": DECODE | dict(activation="swigluoai", bias="bf16", gather=True),
    "prefill, all options": PREFILL | ALL_OPTIONS,
    "decode, e4m3": SMALL | dict(dtype="e4m3", x_scaling="row"),
    "block scales": BLOCK_SCALED | dict(subtile_m=64, mma_n=(64,), box_rows=16, stages=12),
    "block scales, all options": (
        BLOCK_SCALED | dict(subtile_m=96, mma_n=(96,), box_rows=32, stages=9, overlap=False, gather=True) | ALL_OPTIONS
    ),
    "four warpgroups": DECODE | dict(subtile_m=32, mma_n=(32,), stages=6, warpgroups=4, gather=True) | ALL_OPTIONS,
    "four warpgroups, e4m3": DECODE
    | dict(dtype="e4m3", x_scaling="row", subtile_m=64, mma_n=(64,), stages=6)
    | dict(warpgroups=4, overlap=False),
    "decode, int4": SMALL | dict(weight="int4"),
    "decode, int4, groups of 64": SMALL | dict(weight="int4", group_size=64),
    "decode, int4, groups of 128": SMALL | dict(weight="int4", group_size=128),
    "four warpgroups, int4": dict(weight="int4", group_size=128, subtile_m=64, mma_n=(64,), box_rows=16, stages=6)
    | dict(warpgroups=4, overlap=False),
    "prefill, int4": dict(weight="int4", scale_dtype="f32", subtile_m=128, mma_n=(128,), box_rows=32, stages=5)
    | dict(overlap=False),
    "prefill, int4, groups of 128": dict(
        weight="int4", group_size=128, subtile_m=128, mma_n=(128,), box_rows=32, stages=4
    )
    | dict(overlap=False, gather=True)
    | ALL_OPTIONS,
}


# The table's candidates. With four warpgroups, several sizes of wgmma and overlap ptxas serialises wgmma (C7512).
CANDIDATES = candidates("mxfp4")
FOUR = {name: config for name, config in CANDIDATES.items() if config.warpgroups == 4}
SERIALISED = {name for name, config in FOUR.items() if config.subtile_m == 64 and config.overlap}
SWIGLUOAI = dict(activation="swigluoai", bias="bf16", early_weight=True)
CASES |= {name: config._asdict() for name, config in CANDIDATES.items()} | {
    f"{name}, swigluoai": config._asdict() | SWIGLUOAI for name, config in FOUR.items() if config.subtile_m <= 32
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    def compile_all():
        threads = {name: W4Layout(W4Config(**config)).threads for name, config in CASES.items()}
        requests = {
            name: (f"make_kernel(W4Config(**{config}))[0]", W4_SIGNATURE, threads[name], True)
            for name, config in CASES.items()
        }
        return compile_apart(SOURCE, requests)

    return once_per_run(tmp_path_factory, "w4-compile", compile_all)


@pytest.mark.parametrize("name", CASES)
def test_hopper_instructions_are_used_without_spills(name, reports):
    report, gathers = reports[name], CASES[name].get("gather", False)
    multiply = "QGMMA" if CASES[name].get("dtype") == "e4m3" else "HGMMA"
    if CASES[name]["subtile_m"] <= MMA_SYNC_ROWS and W4Config(**CASES[name]).scales_in_registers:
        multiply = "HMMA"
    for opcode in (multiply, "UBLKCP", "SYNCS", "USETMAXREG", "STSM"):
        assert report.count(opcode), opcode
    assert bool(report.count("LDGSTS")) == gathers != bool(report.count("UTMALDG"))  # rows of x by cp.async or by TMA
    # ptxas warns if it ignores setmaxnreg or serialises wgmma
    assert report.complaints == (["C7512"] if name in SERIALISED else [])
    assert report.spilled_bytes == report.stack_bytes == report.count("CALL") == 0


@pytest.mark.parametrize("name", CASES)
def test_setmaxnreg_asks_for_no_more_registers_than_the_cta_has(name, reports):
    layout = W4Layout(W4Config(**CASES[name]))
    producer, consumer = sorted(set(reports[name].setmaxnreg))
    assert (producer, consumer) == layout.registers
    total = 128 * producer + 32 * layout.consumer_warps * consumer
    assert total <= reports[name].registers * layout.threads <= 65536


def main_loop(report, wgmmas):
    """Return the opcodes of the loop with this number of wgmmas, those of two weight tiles, 64 weights per thread."""
    loops = [[opcode.split(".")[0] for opcode in report.opcodes[first:last]] for first, last in report.loops]
    return next(loop for loop in loops if sum(opcode in ("HGMMA", "QGMMA") for opcode in loop) == wgmmas)


# Of two tiles: wgmmas, multiplications by scales (packed bf16, or accumulators of 16 columns), shared loads, and the
# most instructions that decode and that the loop has. The latter also have those of scales and addresses.
COUNTS = {
    "decode": (8, {"HMUL2": 32, "LDS": 4}, 32 + 32 + 20, 190),
    "decode, e4m3": (4, {"FFMA": 32, "LDS": 4}, 32 + 14 + 24, 150),  # half the instructions to decode
    "decode, int4": (8, {"HFMA2": 32, "FFMA": 32, "LDS": 6}, 40 + 24, 200),
    "decode, int4, groups of 64": (8, {"HFMA2": 32, "FFMA": 16, "LDS": 4}, 40 + 20, 170),
    "decode, int4, groups of 128": (8, {"HFMA2": 32, "FFMA": 8, "LDS": 3}, 40 + 20, 160),
}
DECODING = {"LOP3", "SHF", "IMAD", "PRMT"}


@pytest.mark.parametrize("name", COUNTS)
def test_instructions_per_weight(name, reports):
    wgmmas, exact, decoding, total = COUNTS[name]
    loop = main_loop(reports[name], wgmmas)
    assert {opcode: loop.count(opcode) for opcode in exact} == exact
    assert sum(opcode in DECODING for opcode in loop) <= decoding
    assert len(loop) <= total
