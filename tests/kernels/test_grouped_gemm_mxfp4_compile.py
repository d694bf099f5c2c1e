"""Machine code of the grouped GEMM with MXFP4 weights: instructions, warnings and spills; no GPU is needed."""

import pytest

from moe_numba.grouped_gemm.config_mxfp4 import CONFIGS, Mxfp4Config, Mxfp4Layout
from moe_numba.grouped_gemm.launch_mxfp4 import MXFP4_SIGNATURE
from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.grouped_gemm.config_mxfp4 import Mxfp4Config
from moe_numba.grouped_gemm.kernel_mxfp4 import make_kernel
"""
DECODE = dict(subtile_m=16, mma_n=(16,), stages=10)
CASES = {
    "decode": DECODE,
    "prefill": CONFIGS[-1][1],
    "prefill, gather": CONFIGS[-1][1] | dict(gather=True),
    "decode, gather, masked": CONFIGS[0][1] | dict(gather=True, row_layout="masked"),
    "decode, swigluoai": DECODE | dict(activation="swigluoai", bias="bf16", gather=True),
    "prefill, all options": dict(
        **dict(subtile_m=256, mma_n=(256,), box_rows=32, stages=5, stage_units=1, overlap=False, gather=True),
        **dict(bias="bf16", scatter=True, row_weights=True),
    ),
    "four warpgroups": DECODE | dict(subtile_m=32, mma_n=(32,), stages=6, warpgroups=4),
}


@pytest.fixture(scope="module")
def reports():
    requests = {
        name: (
            f"make_kernel(Mxfp4Config(**{config}))[0]",
            MXFP4_SIGNATURE,
            Mxfp4Layout(Mxfp4Config(**config)).threads,
            True,
        )
        for name, config in CASES.items()
    }
    return compile_apart(SOURCE, requests)


@pytest.mark.parametrize("name", CASES)
def test_hopper_instructions_are_used_without_spills(name, reports):
    report, gather = reports[name], CASES[name].get("gather", False)
    for opcode in ("HGMMA", "UBLKCP", "SYNCS", "USETMAXREG", "STSM"):
        assert report.count(opcode), opcode
    assert bool(report.count("LDGSTS")) == gather  # cp.async for rows of x, which else come by TMA
    assert bool(report.count("UTMALDG")) == (not gather)
    assert report.complaints == []  # ptxas warns if it ignores setmaxnreg or serialises wgmma
    assert report.spilled_bytes == report.stack_bytes == report.count("CALL") == 0


@pytest.mark.parametrize("name", CASES)
def test_setmaxnreg_asks_for_no_more_registers_than_the_cta_has(name, reports):
    layout = Mxfp4Layout(Mxfp4Config(**CASES[name]))
    producer, consumer = sorted(set(reports[name].setmaxnreg))
    assert (producer, consumer) == layout.registers
    total = 128 * producer + 32 * layout.consumer_warps * consumer
    assert total <= reports[name].registers * layout.threads <= 65536


def test_decoding_takes_one_instruction_per_weight_and_scaling_half_of_one(reports):
    """Of the main loop: two units, 64 weights per thread."""
    report = reports["decode"]
    loops = [report.opcodes[first:last] for first, last in report.loops]
    loop = next(loop for loop in loops if sum(opcode.startswith("HGMMA") for opcode in loop) == 8)
    counts = {name: sum(opcode.split(".")[0] in names for opcode in loop) for name, names in OPERATIONS.items()}
    assert counts["scaling"] == 32 and counts["shared loads"] == 4
    assert counts["decoding"] <= 32 + 32 + 20  # ANDs, shifts, and those of scales and addresses
    assert len(loop) <= 190


OPERATIONS = {"scaling": {"HMUL2"}, "decoding": {"LOP3", "SHF", "IMAD", "PRMT"}, "shared loads": {"LDS"}}
