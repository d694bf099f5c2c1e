"""What the compiler makes of the kernels of "A Hopper GEMM", and of changes that lose performance silently."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/06_hopper_gemm.py"
SIZES = ["int32"] * 4
STORED_BY_THREADS, STORED_BY_TMA = [TENSOR_MAP] * 2 + ["int32*"] + SIZES, [TENSOR_MAP] * 3 + SIZES
SPECIALISED = "make_gemm(produce, make_multiply(128), release_own, make_store(128), 128, 6)"
TMA = "make_gemm(produce, {}, release_own, make_tma_store(order, 256, 4), 256, 4)"
CLUSTER = "make_gemm(produce_multicast, make_multiply(256), release_both, make_tma_store(order, 256, 4), 256, 4, 2)"
KERNELS = {  # expression, signature, threads, stores to global memory
    "one stage": ("make_one_stage(make_multiply(128), make_store(128), 128)", STORED_BY_THREADS, 256, 32),
    "ring": ("make_ring(make_multiply(128), make_store(128), 128, 3)", STORED_BY_THREADS, 256, 32),
    "specialised": (SPECIALISED, STORED_BY_THREADS, 384, 32),
    "unrolled": (
        "make_gemm(produce, make_multiply(256), release_own, store_unrolled, 256, 4)",
        STORED_BY_THREADS,
        384,
        64,
    ),
    "TMA stores": (TMA.format("make_multiply(256)"), STORED_BY_TMA, 384, 4),
    "multicast": (CLUSTER, STORED_BY_TMA, 384, 4),
    "promotion": (TMA.format("make_promoting_multiply(256)"), STORED_BY_TMA, 384, 4),
}
LOOPED = "make_gemm(produce, make_multiply(256), release_own, make_store(256), 256, 4)"
MOST_COMPARES = 50


def source(right="", wrong=""):
    """Return the imports and functions of the page, with a passage replaced, and the lesson's answers."""
    text = NOTEBOOK.read_text()
    assert not right or text.count(right) == 1, right
    tree = ast.parse(text.replace(right, wrong) if right else text)
    kept = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)]
    answers = "from moe_numba.course.lessons.hopper.answers import order, produce, store_unrolled"
    return "\n\n".join([*map(ast.unparse, kept), answers])


@pytest.fixture(scope="module")
def codes():
    requests = {name: (text, signature, threads, True) for name, (text, signature, threads, _) in KERNELS.items()}
    return compile_apart(source(), requests | {"looped": (LOOPED, STORED_BY_THREADS, 384, True)})


def searches(code, stores):
    """Return what shows that accumulators, which have no index, are searched for or moved to memory."""
    counts = {
        "local memory": code.spilled_bytes + code.stack_bytes + code.count("LDL", "STL"),
        "stores": code.count("STG", "UTMASTG") - stores,
        "compares": max(code.count("ISETP") - MOST_COMPARES, 0),
    }
    return [name for name, count in counts.items() if count]


@pytest.mark.parametrize("name", KERNELS)
def test_stores_are_unrolled(name, codes):
    assert searches(codes[name], KERNELS[name][3]) == []


def test_a_store_loop_that_is_not_unrolled_is_found(codes):
    assert searches(codes["looped"], 64) == ["stores", "compares"]


@pytest.mark.parametrize("name", KERNELS)
def test_the_compiler_complains_of_nothing(name, codes):
    code, specialised = codes[name], KERNELS[name][2] == 384
    assert code.complaints == [] and code.count("CALL") == 0 and code.count("BRA.U.ANY") == 0
    assert code.setmaxnreg == ([232, 40] if specialised else [])
    assert code.count("QGMMA") == (8 if name == "promotion" else 4)
    assert code.registers == 168 if specialised else code.registers <= 128


def test_pitfalls_of_the_compiler():
    """They are those that docs/linked_cuda_cpp.md names."""
    pointers = ["uint8*", "uint8*", "int32*", *SIZES]
    requests = {
        (entry, lto): (SPECIALISED, signature, 384, lto)
        for entry, signature in (("C++ entry", STORED_BY_THREADS), ("pointers", pointers))
        for lto in (True, False)
    }
    named = {f"{entry}, {lto}": request for (entry, lto), request in requests.items()}
    right = compile_apart(source(), named)
    assert [right[name].complaints for name in named] == [[], [], [], ["C7504"]]
    assert [right[name].setmaxnreg for name in named] == [[232, 40]] * 3 + [[]]
    division = compile_apart(source("uint32(tile // uint32(tiles_m))", "uint32(tile // int64(tiles_m))"), named)
    assert all(code.count("CALL") for code in division.values())
    assert [division[name].complaints for name in named] == [[], [], [], ["C7504", "C7509"]]
    elected, by_number = "thread < 32 * MMA_WARPS + 32 and elect_sync(FULL_MASK)", "thread == 256"
    first, *_ = named
    assert compile_apart(source(elected, by_number), {first: named[first]})[first].count("BRA.U.ANY") > 0
