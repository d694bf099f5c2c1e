"""What the compiler makes of the kernels of "Grouped GEMM", and of changes that lose performance silently."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/07_grouped_gemm.py"
TABLES = ["float32*", *["int32*"] * 3, *["int32"] * 3]
MAPS, GROUP_MAPS, ONE_MAP = (
    [x, TENSOR_MAP, y, *TABLES] for x, y in ((TENSOR_MAP,) * 2, ("uint8*",) * 2, (TENSOR_MAP, "int32*"))
)
UPDATE = [TENSOR_MAP] * 2 + ["uint8*", "uint8*", "uint16*", *["int32*"] * 3, *["int32"] * 3]
BY_GROUP = "make_next_tile(by_group, cut)"
WITHOUT_MAPS = "make_without_maps({}, store_chunk, 96, 7)"
BY_ROWS = "make_grouped_gemm(copy_table, make_next_tile({}, cut), {}, make_multiply(128), {}, 128, 6)"
KERNELS = {  # expression, signature, stores to global memory, MMAs of a block of k
    "one map": (BY_ROWS.format("horizontal", "place_in_all", "make_store_by_warps(place_in_all, 6)"), MAPS, 2, 4),
    "a map per group": (
        BY_ROWS.format("horizontal", "place_in_group", "make_store_by_warps(place_in_group, 6)"),
        GROUP_MAPS,
        2,
        4,
    ),
    "bands": (BY_ROWS.format("in_bands", "place_in_group", "make_store_by_warps(place_in_group, 6)"), GROUP_MAPS, 2, 4),
    **{
        f"transposed, {tokens} rows": (f"make_transposed({tokens}, {stages})", GROUP_MAPS, 1, 4)
        for tokens, stages in ((16, 8), (64, 8), (96, 7), (128, 6))
    },
    "without maps": (WITHOUT_MAPS.format("make_next_tile(vertical, cut)"), ONE_MAP, 6, 4),
    "by group": (WITHOUT_MAPS.format(BY_GROUP), ONE_MAP, 6, 4),
    "even tiles": (WITHOUT_MAPS.format("make_next_tile(vertical, cut_evenly)"), ONE_MAP, 6, 4),
    "two subtiles": (f"make_two_subtiles({BY_GROUP}, store_chunk, 288, 4)", ONE_MAP, 18, 8),
}
MOST_COMPARES = 150  # a search has several hundred


def source(right="", wrong=""):
    """Return the imports and functions of the page, with a passage replaced, and the lesson's answers."""
    text = NOTEBOOK.read_text()
    assert not right or text.count(right) == 1, right
    tree = ast.parse(text.replace(right, wrong) if right else text)
    kept = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)]
    names = "count_tiles, group_of, in_bands, place_in_group, store_chunk"
    next_tiles = "next_vertical, next_horizontal = make_next_tile(vertical, cut), make_next_tile(horizontal, cut)"
    answers = f"from moe_numba.course.lessons.grouped_gemm.answers import {names}"
    return "\n\n".join([*map(ast.unparse, kept), answers, next_tiles])


@pytest.fixture(scope="module")
def codes():
    requests = {name: (text, signature, 384, True) for name, (text, signature, *_) in KERNELS.items()}
    return compile_apart(
        source(), requests | {"update": ("make_update_grouped_tma(count_tiles, 96)", UPDATE, 32, True)}
    )


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
    assert searches(codes[name], KERNELS[name][2]) == []


def test_a_store_loop_that_is_not_unrolled_is_found():
    """The loop over chunks takes a slice that depends on its index, so a thread searches for its accumulators."""
    right = "        for_each_16_rows(acc, smem, words, y, buffer, row, tile.rows, column, pitch, scale)\n"
    wrong = """        for chunk in range(tokens // 16):
            first = int32(8 * chunk)
            for i in range(8):
                y[int64(row + 2 * first + i) * pitch + column] = int32(acc[first + i])
"""
    text, signature, stores, _ = KERNELS["without maps"]
    code = compile_apart(source(right, wrong), {"looped": (text, signature, 384, True)})["looped"]
    assert "stores" in searches(code, 48) or "compares" in searches(code, 48)


@pytest.mark.parametrize("name", KERNELS)
def test_the_compiler_complains_of_nothing(name, codes):
    code = codes[name]
    assert code.complaints == [] and code.count("CALL") == 0 and code.count("BRA.U.ANY") == 0
    assert code.setmaxnreg == [232, 40] and code.registers == 168
    assert code.count("QGMMA") % KERNELS[name][3] == 0 and code.count("QGMMA") > 0


def test_a_place_outside_of_the_elected_lane_is_found():
    """The compiler does not know then that all lanes store by the same map, and adds a loop over lanes."""
    elected = "        if quarter == 0 and elect_sync(FULL_MASK):  # the elected lane alone asks for the place\n"
    place = "    map_at, row = place(y, int32(MAP_BYTES), starts, tile)\n"
    text, signature, *_ = KERNELS["transposed, 96 rows"]
    code = compile_apart(
        source(f"{elected}        {place}", f"    {place}{elected}"), {"outside": (text, signature, 384, True)}
    )["outside"]
    assert code.count("BRA.U.ANY") > 0


def test_the_kernel_that_makes_maps_changes_them_in_shared_memory(codes):
    code = codes["update"]
    assert code.complaints == [] and code.spilled_bytes == 0 and code.count("SHFL") == 5
    assert code.count("STS") > 0 and code.count("ATOMG") > 0 and code.count("UTMASTG") == 0
