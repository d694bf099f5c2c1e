"""Machine code of the dispatch-layout kernels; no GPU is needed."""

import pytest
from helpers.machine_code import is_dependent_launch

from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.expert_parallel.layout.kernel import make_layout_kernel
"""
POINTERS = ("int64*", "int32*", "int32*", "uint8*")
SIZES = {"deepseek_v3": (256, 8, 8), "one_rank": (8, 1, 1), "three_ranks": (24, 3, 2), "largest": (1024, 8, 32)}


@pytest.fixture(scope="module")
def reports():
    requests = {n: (f"make_layout_kernel(*{s}, 1024)", (*POINTERS, "uint32"), 1024, True) for n, s in SIZES.items()}
    requests["int32"] = ("make_layout_kernel(256, 8, 8, 1024)", ("int32*", *POINTERS[1:], "uint32"), 1024, True)
    return compile_apart(SOURCE, requests)


@pytest.mark.parametrize("name", [*SIZES, "int32"])
def test_two_ctas_fit_on_an_sm(name, reports):
    report = reports[name]
    assert report.spilled_bytes == report.stack_bytes == 0 and report.registers <= 32 and not report.complaints


def test_instructions(reports):
    report = reports["deepseek_v3"]
    if report.opcodes is None:
        pytest.skip("there is no nvdisasm")
    assert report.count("LDG.E.64") == report.count("ATOMS.POPC.INC.32") == report.count("STG.E.U8") == 4
    assert report.count("UCGABAR_ARV") == report.count("UCGABAR_WAIT") == 2
    assert report.count("ST") == 1 and report.count("LD") == 0  # to the shared memory of other CTAs
    assert is_dependent_launch(report)
