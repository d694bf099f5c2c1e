"""What the compiler makes of the grouped GEMM's kernels; no GPU is needed."""

import pytest

from moe_numba.grouped_gemm import configs
from moe_numba.grouped_gemm.constants import THREADS, Constants, Layout
from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.grouped_gemm.constants import Constants
from moe_numba.grouped_gemm.kernel import make_kernel
"""
FORMS = {
    "decode": dict(tokens=16, sizes=(16,), stages=11),
    "prefill": dict(tokens=144, parts=2, sizes=(144, 128), stages=4),
    "decode, blocks": dict(scaling="block", tokens=16, sizes=(16,), stages=11),
    "prefill, blocks": dict(scaling="block", tokens=128, parts=2, sizes=(128,), stages=4),
    "two blocks": dict(tokens=136, parts=2, sizes=(136,), stages=4, cluster=2),
    "activated": dict(activated=True, tokens=128, sizes=(128,), stages=4),
    "activated, blocks": dict(activated=True, scaling="block", tokens=64, sizes=(64,), stages=5),
    "bf16": dict(dtype="bf16", scaling="none", tokens=256, sizes=(256,), stages=4),
    "decode, gather": dict(gather=True, tokens=16, sizes=(16,), stages=11),
    "prefill, gather": dict(gather=True, tokens=144, parts=2, sizes=(144, 128), stages=4),
    "prefill, blocks, gather": dict(gather=True, scaling="block", tokens=128, sizes=(128,), stages=6),
    "activated, gather": dict(gather=True, activated=True, tokens=128, sizes=(128,), stages=4),
    "bf16, gather": dict(gather=True, dtype="bf16", scaling="none", tokens=144, sizes=(144,), stages=5),
}
SHARED_BYTES = 227 * 1024  # that a block of a Hopper GPU may have


@pytest.fixture(scope="module")
def reports():
    requests = {
        form: (f"make_kernel(Constants(**{c}))[0]", configs.SIGNATURE, THREADS, True) for form, c in FORMS.items()
    }
    return compile_apart(SOURCE, requests)


@pytest.mark.parametrize("form", FORMS)
def test_hoppers_instructions_are_used(form, reports):
    multiplication = "HGMMA" if "bf16" in form else "QGMMA"
    for wanted in (multiplication, "UTMALDG", "SYNCS", "USETMAXREG", "STSM"):  # and no call, which would stop them all
        assert reports[form].count(wanted), wanted
    assert not reports[form].count("CALL")
    assert bool(reports[form].count("LDGSTS")) == ("gather" in form)  # a copy that a thread starts by itself


@pytest.mark.parametrize("form", FORMS)
def test_the_compiler_gave_nothing_up(form, reports):
    """It says so where it ignores setmaxnreg, or lets a multiplication end before it starts the next instruction."""
    assert reports[form].complaints == []
    assert Layout(Constants(**FORMS[form])).bytes <= SHARED_BYTES


@pytest.mark.parametrize("form", FORMS)
def test_the_multiplying_warps_do_not_spill(form, reports):
    """Of what the compiler puts into local memory, nothing lies between the first multiplication and the last."""
    if "blocks" not in form:
        assert reports[form].spilled_bytes == 0
    found = [opcode.split(".")[0] for opcode in reports[form].opcodes]
    places = [i for i, opcode in enumerate(found) if opcode in ("QGMMA", "HGMMA")]
    assert not {"LDL", "STL"} & set(found[places[0] : places[-1]])
