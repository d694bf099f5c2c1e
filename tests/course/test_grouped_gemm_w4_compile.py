"""Machine code of the grouped GEMM with MXFP4 weights: instructions, warnings and spills; no GPU is needed."""

import pytest
from helpers.once_per_run import once_per_run

from moe_numba.course.bench.topics.grouped_gemm_tiles.tune import candidates
from moe_numba.grouped_gemm.w4.config import CONFIGS, W4Config
from moe_numba.grouped_gemm.w4.kernel import MMA_SYNC_ROWS
from moe_numba.grouped_gemm.w4.launch import W4_SIGNATURE
from moe_numba.grouped_gemm.w4.layout import W4Layout
from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.grouped_gemm.w4.config import W4Config
from moe_numba.grouped_gemm.w4.kernel import make_kernel
"""
DECODE = dict(subtile_m=24, mma_n=(24,), stages=9)
SMALL = dict(subtile_m=16, mma_n=(16,), stages=10)
PREFILL = dict(subtile_m=256, mma_n=(256,), box_rows=32, stages=5, stage_tiles=1, overlap=False, gather=True)
ALL_OPTIONS = dict(bias="bf16", scatter=True, row_weights=True)
CASES = {
    "decode": DECODE,
    "mma.sync": SMALL,
    "mma.sync, swigluoai": SMALL | dict(activation="swigluoai", bias="bf16", gather=True),
    "prefill": CONFIGS[-1][1],
    "prefill, gather": PREFILL,
    "decode, swigluoai": DECODE | dict(activation="swigluoai", bias="bf16", gather=True),
    "prefill, all options": PREFILL | ALL_OPTIONS,
    "four warpgroups": DECODE | dict(subtile_m=32, mma_n=(32,), stages=6, warpgroups=4, gather=True) | ALL_OPTIONS,
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
    multiply = "HMMA" if CASES[name]["subtile_m"] <= MMA_SYNC_ROWS else "HGMMA"
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
    return next(loop for loop in loops if loop.count("HGMMA") == wgmmas)


def test_instructions_per_weight(reports):
    loop = main_loop(reports["decode"], 8)
    assert loop.count("HMUL2") == 32 and loop.count("LDS") == 4  # multiplications by scales, of packed bf16
    assert sum(opcode in ("LOP3", "SHF", "IMAD", "PRMT") for opcode in loop) <= 32 + 32 + 22  # the last for addresses
    assert len(loop) <= 190
