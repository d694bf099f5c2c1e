"""Limits of the chip: an H200's in the simulator, otherwise from the GPU's properties; notebooks use them."""

import ast
from pathlib import Path

import pytest
import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines import limits
from moe_numba.course.bench.records import code_hash
from moe_numba.runtime import device as devices

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))
GPUS = {
    # GPU: its properties, SM and memory clock in MHz, bits of the bus; data sheet: TB/s, bfloat16 and FP8 in TFLOP/s
    "T4": (devices.gpu_like((7, 5), "T4", 40), (1590, 5001, 256), (0.32, 8.1, 8.1)),
    "A100": (devices.gpu_like((8, 0), "A100", 108), (1410, 1593, 5120), (2.04, 312, 312)),
    "A10": (devices.gpu_like((8, 6), "A10", 72), (1695, 6251, 384), (0.6, 125, 125)),
    "L4": (devices.gpu_like((8, 9), "L4", 58), (2040, 6251, 192), (0.3, 121, 242)),
    "RTX PRO 6000": (devices.gpu_like((12, 0), "RTX PRO 6000", 188), (2617, 14001, 512), (1.79, 504, 1008)),
}


@pytest.mark.parametrize("name", GPUS)
def test_limits_match_data_sheets(name):
    gpu, (clock, memory_clock, bus_bits), (bandwidth, bf16, fp8) = GPUS[name]
    found = limits._from_properties(gpu, clock * 1e6, memory_clock * 1e6, bus_bits, 0.9 * bandwidth * 1e12)
    assert (found.sm_count, found.boost_clock) == (gpu.sm_count, clock * 1e6)
    assert found.hbm_bandwidth == pytest.approx(bandwidth * 1e12, rel=0.03)
    rates = bf16 * 1e12, fp8 * 1e12
    assert tuple(found.tensor_flops[n] for n in ("bfloat16", "float8_e4m3fn")) == pytest.approx(rates, rel=0.03)
    assert name in str(found) and f"{gpu.sm_count} SMs" in str(found)


@pytest.mark.parametrize(
    "capability, like", [((8, 7), (8, 6)), ((10, 3), (10, 0)), ((12, 1), (12, 0)), ((7, 0), (7, 5))]
)
def test_an_unlisted_capability_has_the_rates_of_the_one_below(capability, like):
    one, other = (
        limits._from_properties(devices.gpu_like(c), 1e9, 1e9, 256, 1e11).tensor_flops for c in (capability, like)
    )
    assert one == other


def test_the_h200s_copy_bandwidth_is_the_recorded_one():
    """The largest recorded gate is limited by its bytes, so its lower bound is bytes over bandwidth."""
    row = records.find(records.read("gate"), step="final", size={"tokens": 65536}, dtype="float32")
    assert row["bytes"] / row["floor_us"] * 1e6 == pytest.approx(limits.H200.copy_bandwidth, rel=0.02)


def test_limits_of_this_machine(device):
    found = limits.chip_limits()
    if device == "cpu":
        assert found is limits.H200 and "recorded" in str(found)
    else:
        properties = torch.cuda.get_device_properties(0)
        assert found.sm_count == properties.multi_processor_count
        assert 1e8 < found.boost_clock < 1e10 and 1e10 < found.copy_bandwidth < 1e14
        assert "measured" in str(found)


@pytest.mark.gpu
def test_the_driver_reports_clocks():
    clock, memory_clock, bus_bits = limits._clocks(0)
    assert 1e8 < clock < 1e10 and 1e8 < memory_clock < 1e11 and bus_bits % 32 == 0


def fixed_chip_numbers(text):
    """List the H200's number of SMs and its limits where a notebook's code has them in place of this GPU's."""
    nodes = [node for cell in code_hash.code_cells(text) for node in ast.walk(ast.parse(cell))]
    return [
        ast.unparse(node)
        for node in nodes
        if (isinstance(node, ast.Constant) and node.value == 132)
        or (isinstance(node, ast.ImportFrom) and any(alias.name == "H200" for alias in node.names))
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_calculate_with_this_gpus_limits(path):
    assert fixed_chip_numbers(path.read_text()) == []


@pytest.mark.parametrize("wrong", ["tiles = 1000 // 132", "from moe_numba.course.bench.baselines.limits import H200"])
def test_fixed_chip_numbers_are_found(wrong):
    assert len(fixed_chip_numbers(f"# %%\n{wrong}\n")) == 1
