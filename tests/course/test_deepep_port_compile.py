"""Machine code of our port of DeepEP's kernels at the article's sizes; no GPU is needed."""

import pytest

from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.course.deepep_port.combine import make_combine
from moe_numba.course.deepep_port.dispatch import make_dispatch
from moe_numba.course.deepep_port.notify import make_cached_notify_combine, make_cached_notify_dispatch
from moe_numba.course.deepep_port.notify import make_notify_dispatch
from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig

BF16 = DeepEPConfig(8)
FP8 = DeepEPConfig(8, row_bytes=7168, scales=56)
BACK = DeepEPConfig(8, chunk=4, biases=2)
"""
OTHERS = ("int32", "int64", "int32*")  # rank, timeout_ns, status
RANKS = ("uint64*", "uint64*", *OTHERS)
EXPERTS = ("int64*", "float32*")
NOTIFY = ("int32*", "int32*", "uint8*", "int32", *["int32*"] * 4, "int32", *RANKS)
DISPATCH = ("int32*", "float32*", "int64", "int64", *EXPERTS, "uint8*", "int32*", "int32*", "float32*", *EXPERTS)
DISPATCH += (*["int32*"] * 3, "int32", "uint64*", *OTHERS)
COMBINE = ("int32*", "float32*", *["int32*"] * 5, "float32*", "int32*", "int32*", "int32", "uint64*", *OTHERS)
REQUESTS = {
    "notify_dispatch": ("make_notify_dispatch(BF16)", NOTIFY, 128, True),
    "cached_notify_dispatch": ("make_cached_notify_dispatch(BF16)", ("int32*", *RANKS), 128, True),
    "cached_notify_combine": ("make_cached_notify_combine(BACK)", ("int32*", "int32", *RANKS), 256, True),
    "dispatch": ("make_dispatch(BF16)", DISPATCH, 768, True),
    "dispatch_fp8": ("make_dispatch(FP8)", DISPATCH, 768, True),
    "combine": ("make_combine(BACK)", COMBINE, 768, True),
}


@pytest.fixture(scope="module")
def reports():
    return compile_apart(SOURCE, REQUESTS)


@pytest.mark.parametrize("name", REQUESTS)
def test_nothing_spills(name, reports):
    """768 threads can have 80 registers each."""
    report = reports[name]
    assert report.spilled_bytes == report.stack_bytes == 0 and report.registers <= 80 and not report.complaints


@pytest.mark.parametrize("name", REQUESTS)
def test_flags_use_system_scope(name, reports):
    report = reports[name]
    if report.opcodes is None:
        pytest.skip("there is no nvdisasm")
    assert report.count("MEMBAR.ALL.SYS") and report.count("LDG.E.STRONG.SYS")  # releases, and polls
    assert report.count("LD") == report.count("ST") == 0  # peers' memory is accessed as global memory
    assert not [code for code in report.opcodes if ".F64" in code or code.startswith(("DADD", "DMUL", "DSETP"))]


@pytest.mark.parametrize("name", ["dispatch", "dispatch_fp8", "combine"])
def test_rows_are_copied_in_16_byte_vectors(name, reports):
    report = reports[name]
    if report.opcodes is None:
        pytest.skip("there is no nvdisasm")
    assert report.count("STG.E.NA.128") and report.count("STG.E.STRONG.SYS")
    assert report.count("LDG.E.128") >= 8  # from rings, which peers write: coherent loads
    assert report.count("LDG.E.NA.LTC256B.128.CONSTANT")  # from the caller's tensors
