"""Machine code of the kernel that computes a layer's experts on several GPUs; no GPU is needed."""

import pytest
from helpers.machine_code import main_loops
from helpers.once_per_run import once_per_run

from moe_numba.grouped_gemm.common.constants import THREADS
from moe_numba.moe_layer.expert_parallel.one_kernel import kernel
from moe_numba.runtime.sass import compile_apart, disassembler

SOURCE = """
from moe_numba.moe_layer.expert_parallel.one_kernel.kernel import make_one_kernel
from moe_numba.moe_layer.expert_parallel.one_kernel.sizes import Sizes
"""
HIDDEN, INTERMEDIATE = 7168, 2048
WORDS = {"fp8": (HIDDEN // 4, HIDDEN // 128), "bf16": (HIDDEN // 2, 0)}  # of a row, and of its scales


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    make = f"make_one_kernel(Sizes(2, 32, {HIDDEN}, 8, 4096, %d, %d), {INTERMEDIATE})"
    kernels = {name: (make % words, kernel.SIGNATURE, THREADS, True) for name, words in WORDS.items()}
    return once_per_run(tmp_path_factory, "one kernel", lambda: compile_apart(SOURCE, kernels))


@pytest.mark.parametrize("name", WORDS)
def test_consumer_warps_do_not_spill(name, codes):
    """With FP8 the warps that write factors do, outside of the loops with wgmma."""
    code = codes[name]
    assert code.registers == 168 and not code.complaints
    assert code.spilled_bytes == 0 or name == "fp8"
    if not disassembler():
        pytest.skip("there is no nvdisasm")
    assert not any({"LDL", "STL"} & body for body in main_loops(code))
