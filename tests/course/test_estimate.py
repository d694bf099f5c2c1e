"""Estimates without a GPU: how often instructions are executed, bounds, and the comparison with recorded steps."""

from pathlib import Path

import numpy as np
import pytest

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.steps import judge_estimates
from moe_numba.course.steps.estimate import _Code, chip_of, describe_error, error_factor, estimate, judged, summary
from moe_numba.runtime.sass import disassembler

pytestmark = [
    pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1"),
    pytest.mark.skipif(not disassembler(), reason="without nvdisasm the machine code is not known"),
]
H200 = chip_of("H200")


@cuda.jit
def scale(x, y, n):
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        y[i] = x[i] * float32(2)


@cuda.jit
def double(x, y):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    y[i] = x[i] * float32(2)


@cuda.jit
def unrolled(x, y):
    i = cuda.threadIdx.x
    total = float32(0)
    for k in range(8):
        total += x[i + 32 * k]
    y[i] = total


@cuda.jit
def one_thread(x, y):
    counts = cuda.shared.array(256, int32)
    i = cuda.threadIdx.x
    counts[i] = x[i]
    cuda.syncthreads()
    if i == 0:
        total = int32(0)
        for e in range(256):
            total += counts[e]
            counts[e] = total
    cuda.syncthreads()
    y[i] = counts[i]


@cuda.jit(device=True)
def rarely(value):
    for _ in range(64):
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, 1)
    return value


@cuda.jit
def with_a_fallback(x, y):
    value = x[cuda.threadIdx.x]
    if cuda.any_sync(0xFFFFFFFF, value < float32(0)):
        value = rarely(value)
    y[cuda.threadIdx.x] = value


@cuda.jit
def increment(total):
    cuda.atomic.add(total, cuda.threadIdx.x % 8, 1)


def arrays(n, dtype=np.float32):
    return np.ones(n, dtype), np.zeros(n, dtype)


@pytest.mark.parametrize(
    "kernel, block, args, opcode, per_warp",
    [
        (scale, 64, (*arrays(64 * 13), 64 * 13), "LDG", 13),  # unrolled by 4, and a loop for the rest
        (scale, 64, (*arrays(64 * 2), 64 * 2), "LDG", 2),
        (unrolled, 32, arrays(256), "LDG", 8),  # no loop is left
        (one_thread, 256, arrays(256, np.int32), "LDS", 256 / 8 + 1),  # one warp of eight, and all of them once
    ],
)
def test_executions_of_instructions(kernel, block, args, opcode, per_warp):
    with simulator.profile("H200") as profile:
        kernel[1, block](*args)
    code = _Code(profile.kernels[0], H200, False, 0.0)
    found = sum(count for name, count in zip(code.names, code.executions, strict=True) if name == opcode)
    assert found / code.warps == pytest.approx(per_warp, rel=0.15)


def test_a_serial_loop_is_a_dependent_chain_of_one_warp():
    found = estimate(lambda: one_thread[1, 256](*arrays(256, np.int32)))
    assert found.limited_by == "dependent chain"
    # Between 256 additions and 256 times a load from shared memory, an addition and a store.
    assert 256 * 4 < found.bounds["dependent chain"] * H200.clock / 1e6 < 256 * 100
    assert found.us > found.bounds["dependent chain"] + found.bounds["launch"] - 0.01


def test_code_that_no_warp_executes_takes_no_time():
    x, y = arrays(32)
    usual = estimate(lambda: with_a_fallback[1, 32](x, y)).bounds["dependent chain"]
    slow = estimate(lambda: with_a_fallback[1, 32](-x, y)).bounds["dependent chain"]
    assert slow - usual > 64 * H200.latency["SHFL"] / H200.clock * 1e6 and usual < slow / 3


def test_bytes_of_a_sample_of_the_blocks_stand_for_all():
    n = 1 << 22
    args = arrays(n)
    found = estimate(lambda: double[n // 256, 256](*args), cold=True, blocks=8)
    dram_us = 8 * n / (H200.dram_bytes * H200.sm_count * H200.clock) * 1e6
    assert found.bounds["DRAM"] == pytest.approx(dram_us, rel=0.01)
    assert found.limited_by == "DRAM" and dram_us < found.us < 2 * dram_us
    warm = estimate(lambda: double[n // 256, 256](*args), blocks=8)
    assert "DRAM" not in warm.bounds and warm.us < found.us


def test_atomic_operations_on_one_sector_wait_for_one_another():
    found = estimate(lambda: increment[64, 256](np.zeros(8, np.int32)))
    assert found.limited_by == "atomics"
    assert found.bounds["atomics"] == pytest.approx(64 * 8 * H200.sector_us)


def test_the_table_has_bounds_the_time_and_the_error():
    found = estimate(lambda: unrolled[1, 32](*arrays(256)))
    assert "launch" in str(found) and "ALU" in str(found) and f"{found.us:.2f} us" in str(found)
    assert describe_error("H200") in str(found) and describe_error("H200") in found._repr_html_()


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(ValueError, match="gpu is 'T4', of which docs/results has no chains"):
        estimate(lambda: None, "T4")
    with pytest.raises(ValueError, match="run launched no kernel"):
        estimate(lambda: None)
    with pytest.raises(ValueError, match="lesson is '04'; it must be one of 01_gate_prompt"):
        judge_estimates.run("04")


# --- the comparison with recorded steps -----------------------------------------------------------------------------


def compared(*times):
    return [{"topic": "a", "step": "", "recorded_us": r, "estimated_us": e, "limited_by": ""} for r, e in times]


def test_the_summary_counts_near_times_and_ordered_neighbours():
    found = summary(compared((10, 12), (20, 14), (20.1, 30), (40, 41)))
    assert (found["steps"], found["within"], found["pairs"], found["ordered"]) == (4, 0.5, 2, 1.0)
    assert found["p90"] == pytest.approx(30 / 20.1)
    assert summary(compared((10, 12), (20, 11)))["ordered"] == 0


def test_the_recorded_comparison_says_how_far_times_are_off():
    rows = judged("H200")
    assert len(rows) >= 20 and f"Of {len(rows)} steps" in describe_error("H200")
    assert error_factor("H200") == summary(rows)["p90"] > 1
    page = (Path(__file__).parents[2] / "docs" / "simulator_profile.md").read_text()
    assert describe_error("H200") in page
    assert describe_error("T4") == "How far estimates are off was not judged."


def test_cells_take_the_sizes_of_the_gpu():
    source = "# %% [markdown]\n# text\n# %%\nA = 1 if SIMULATED else 2\nB = 3 if simulator.ENABLED else 4\n"
    source += 'DEVICE = "cpu" if SIMULATED else "cuda"\n# %%\nx = 5\n'
    first, second = judge_estimates.cells_of(source, kept=("B",))
    assert first.splitlines()[:2] == ["A = 2", "B = 3 if simulator.ENABLED else 4"] and "if SIMULATED" in first
    assert second.strip() == "x = 5"
