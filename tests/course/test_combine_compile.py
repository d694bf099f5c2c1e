"""What the compiler makes of the kernels of "Combine"."""

import ast
from pathlib import Path

import pytest

from moe_numba.course.lessons.combine.runs import RANKS, VECTORS
from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/13_combine.py"
PUSH = ["int32*", "int32*", "int32*", "int32", "uint64*", "int32"]
SUM = ["int32*", "uint8*", "int32", "int32*"]
RINGS = ["int32*", "uint64*", "int32", *["int32*"] * 4, *["int32"] * 4, "int32*"]
SETUP = """
from moe_numba.course.lessons.combine.answers import load_several, sum_vector, wait_rows

def of(count, load, vectors, sums=None):
    names = "counters_go_on", "head_at_sender", "signalling_warp", "bulk_send", "own_rings", "bulk_receive", "balance"
    switches = Switches(**{name: name != "own_rings" for name in names[:count]})
    return rings(switches, load, vectors, sums or sum_vector).kernel
"""
KERNELS = {  # expression, signature, threads
    "push": ("push", PUSH, 512),
    "push, then sum": ("make_sum(make_sum_token(load_one, sum_vector, 1))", SUM, 512),
    "loads in flight": ("make_sum(make_sum_token(load_several, sum_vector, VECTORS))", SUM, 512),
    "one warp per channel": ("of(0, load_one, 1)", RINGS, 512),
    "several vectors": ("of(0, load_several, VECTORS)", RINGS, 512),
    "counters go on": ("of(1, load_several, VECTORS)", RINGS, 512),
    "head at the sender": ("of(2, load_several, VECTORS)", RINGS, 512),
    "a signalling warp": ("of(3, load_several, VECTORS)", RINGS, 512),
    "bulk copies send": ("of(4, load_several, VECTORS)", RINGS, 512),
    "own rows directly": ("of(5, make_load(VECTORS, 'y'), VECTORS)", RINGS, 512),
    "bulk copies receive": ("of(6, make_load(VECTORS, 'shared memory'), VECTORS)", RINGS, 512),
    "balanced": ("of(7, make_load(VECTORS, 'shared memory'), VECTORS)", RINGS, 512),
    "packed additions": ("of(7, make_load(VECTORS, 'shared memory'), VECTORS, sum_two)", RINGS, 512),
}
MANY = {  # more vectors than lanes have registers
    "too many": ("make_sum(make_sum_token(make_load(64, 'ring'), sum_vector, 64))", SUM, 512)
}


def source():
    """Return the imports and functions of the page, and the lesson's answers."""
    body = ast.parse(NOTEBOOK.read_text()).body
    imports, functions = (
        [ast.unparse(node) for node in body if isinstance(node, kind)]
        for kind in (ast.Import | ast.ImportFrom, ast.FunctionDef)
    )
    return "\n\n".join([*imports, SETUP, *functions])


@pytest.fixture(scope="module")
def codes():
    requests = {
        name: (text, signature, threads, False) for name, (text, signature, threads) in (KERNELS | MANY).items()
    }
    return compile_apart(source(), requests)


@pytest.mark.parametrize("name", KERNELS)
def test_a_cta_of_512_threads_fits_and_nothing_is_spilled(name, codes):
    code = codes[name]
    assert code.spilled_bytes + code.stack_bytes + code.count("LDL", "STL") == 0
    assert code.registers <= 128 and code.complaints == []


def test_loads_are_in_flight_together(codes):
    opcodes = codes["loads in flight"].opcodes
    wide = [i for i, code in enumerate(opcodes) if code.startswith("LDG.E.128")]
    assert len(wide) == RANKS * VECTORS and wide[-1] < next(
        i for i, code in enumerate(opcodes) if code.startswith("FADD")
    )


def test_too_many_loads_are_found(codes):
    assert codes["too many"].spilled_bytes + codes["too many"].stack_bytes > 0
