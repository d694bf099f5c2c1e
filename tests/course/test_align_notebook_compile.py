"""Machine code of notebook 03's kernels, for the oldest and the newest architecture that they run on; without a GPU."""

import ast
from pathlib import Path

import pytest

from moe_numba.course.bench.records import code_hash
from moe_numba.runtime.sass import compile_apart

TEXT = (Path(__file__).parents[2] / "notebooks" / "03_align_published.py").read_text()
MAIN = ("int32*",) * 5 + ("int32",) * 3
SORT = ("int32*", "int32*", "int32*", "int32", "int32")
VERSIONS = (
    "baseline",
    "padding",
    "plain",
    "blelloch",
    "search",
    "two_level",
    "one_pass",
    "filling_first",
    "parallel_fill",
)
KERNELS = {
    **{f"make_{version}(256)": (MAIN, 1024) for version in VERSIONS},
    "make_parallel_fill(1024)": (MAIN, 1024),
    "make_parallel_fill(128)": (("int64*", *MAIN[1:]), 1024),
    "make_small(64)": (("int32*",) * 4 + ("int32",) * 3, 64),
    "make_small_filling(64)": (("int32*",) * 4 + ("int32",) * 3, 64),
    "make_small_fill_threads(64)": (("int32*",) * 4 + ("int32",) * 3, 320),
    "make_small_row_pitch(64)": (("int32*",) * 4 + ("int32",) * 3, 320),
    "count_and_sort": (SORT[:4], 256),
    "sort_replayed": (SORT, 256),
    **{
        f"make_sort({options})": (SORT, 256)
        for options in ("", "atomic=False", "scatter=False", "spread=32", "False, False, 32")
    },
    "only_fill": (("int32*", "int32", "int32"), 1024),
    "only_fill_singly": (("int32*", "int32", "int32"), 1024),
    **{
        f"chain_of_{what}": (("int32*", "int32*", "int32"), 1024)
        for what in ("loads", "shared_loads", "shared_atomics", "shuffles", "barriers", "atomics")
    },
}


def definitions():
    """The notebook's imports, kernels, device functions and factories, without what runs them."""
    kept = ["import moe_numba", "FILL_THREADS = 256"]
    for node in ast.parse("\n".join(code_hash.code_cells(TEXT))).body:
        is_constant = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FULL"
        is_kernel = isinstance(node, ast.FunctionDef) and (node.decorator_list or node.name == "next_pow2")
        if isinstance(node, ast.Import | ast.ImportFrom) or is_constant or is_kernel:
            kept.append(ast.unparse(node))
    return "\n".join(kept)


@pytest.mark.parametrize("arch", [(7, 5), (8, 0), (9, 0, "a")], ids=str)
def test_the_notebooks_kernels_do_not_spill(arch):
    requests = {name: (name, signature, threads, False) for name, (signature, threads) in KERNELS.items()}
    codes = compile_apart(definitions(), requests, arch)
    assert {name: (c.stack_bytes, c.spilled_bytes) for name, c in codes.items()} == dict.fromkeys(KERNELS, (0, 0))
    assert all(code.registers * KERNELS[name][1] <= 65536 for name, code in codes.items())


def test_all_of_the_notebooks_kernels_are_compiled():
    tree = ast.parse("\n".join(code_hash.code_cells(TEXT)))
    made = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    device = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and "device=True" in ast.unparse(n)}
    only_simulated = {"scan_alone", "warp_scan_alone", "barriers_in_two_branches", "scan_64", "sort_aggregated"}
    compiled = {name.partition("(")[0] for name in KERNELS}
    assert made - device - only_simulated - {"code_of"} == compiled
