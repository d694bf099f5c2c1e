"""Machine code of notebook 04's kernels for older GPUs and for Hopper; no GPU is needed."""

import ast
import re
from pathlib import Path

import pytest

from moe_numba.course.bench.records import code_hash
from moe_numba.runtime.sass import compile_apart

TEXT = (Path(__file__).parents[2] / "notebooks" / "04_align_one_launch.py").read_text()
CONSTANTS = "HEADER", "(LAUNCHES, DONE)", "early", "make_dependent"

INPUTS, NUMBERS = ("int32*",) * 4, ("int32",) * 4
COUNTS_ALL, EXCHANGES = (*INPUTS, *NUMBERS), (*INPUTS, "int32*", *NUMBERS)
FUSED = ("float32*", "float32*", "float32*", "int32*", "int32*", "int32*", "int32*", "int32", *NUMBERS)
CONFIG = "GateConfig(256, 8, 4, 8)"
KERNELS = {
    "make_0x5(256, 1024)": ((*INPUTS, "int32*", "int32", "int32", "int32"), 1024),
    **{f"make_{n}(256, 1024)": (COUNTS_ALL, 1024) for n in ("one_launch", "unsigned", "eight_loads", "drop_bin")},
    **{f"make_{n}(256, 512)": (EXCHANGES, 512) for n in ("grid_barrier", "tagged", "packed", "overlapped")},
    **{f"make_warp_ranks(256, 512, {slots})": (EXCHANGES, 512) for slots in (1, 4)},
    "make_dependent(256, 512, 2)": (EXCHANGES, 512),
    f"make_gate({CONFIG}, 32)": (("float32*", "float32*", "float32*", "int32*", "int32"), 1024),
    "make_align(256, 1024)": (COUNTS_ALL, 1024),
    f"make_one_cta({CONFIG}, 32, 512)": (FUSED, 1024),
    f"make_cluster({CONFIG}, 8, 8, 512)": (FUSED, 256),
}
ARCHS = ((7, 5), (9, 0, "a"))


def source():
    """The notebook's imports, and the constants, functions and kernels that its kernels need."""
    nodes = []
    for node in ast.parse("\n".join(code_hash.code_cells(TEXT))).body:
        imports = isinstance(node, (ast.Import, ast.ImportFrom))
        kernel = isinstance(node, ast.FunctionDef) and node.decorator_list
        constant = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in CONSTANTS
        if imports or kernel or constant:
            nodes.append(node)
    segments = (ast.get_source_segment("\n".join(code_hash.code_cells(TEXT)), node) for node in nodes)
    decorated = (
        "".join(f"@{ast.unparse(d)}\n" for d in getattr(node, "decorator_list", ())) + segment
        for node, segment in zip(nodes, segments, strict=True)
    )
    return "\n\n".join(decorated)


@pytest.fixture(scope="module", params=ARCHS, ids=lambda arch: "sm_" + "".join(map(str, arch)))
def codes(request):
    arch = request.param
    kernels = {name: kernel for name, kernel in KERNELS.items() if "cluster" not in name or arch >= (9, 0)}
    requests = {name: (name, signature, threads, False) for name, (signature, threads) in kernels.items()}
    return arch, compile_apart(source(), requests, arch)


def test_no_kernel_spills_and_none_has_too_many_registers(codes):
    arch, found = codes
    for name, code in found.items():
        threads = KERNELS[name][1]
        assert code.spilled_bytes == 0 and code.registers * threads <= 65536, f"{name}: {code}"
        if "gate" not in name.lower():
            assert code.stack_bytes == 0, f"{name}: {code.stack_bytes} bytes of local memory"


def test_all_of_the_notebooks_kernels_are_compiled():
    made = set(re.findall(r"^def (make_\w+)\(", TEXT, re.M)) | {"make_dependent"}
    assert made - {"make_route", "make_align_ids"} == {name.partition("(")[0] for name in KERNELS}


def test_the_kernels_that_isolate_additions_and_loads_differ_in_nothing_else():
    text = re.search(r"^@cache\ndef make_drop_bin.*?^    return kernel\n", TEXT, re.M | re.S)[0]
    text = text[: text.index("        # scan\n")] + "\n    return kernel\n"
    atomic, store, load, computed = (
        ast.literal_eval(found)
        for pair in re.findall(r"^(?:ATOMIC, STORE|LOAD, HASH) = (.*)", TEXT, re.M)
        for found in re.findall(r'"[^"]*"', pair)
    )
    variants = {"additions": (atomic, atomic), "stores": (atomic, store), "no_loads": (load, computed)}
    code = source()
    for name, (old, new) in variants.items():
        assert text.count(old) == 1
        code += "\n\n" + text.replace(old, new).replace("def make_drop_bin", f"def {name}")
    found = compile_apart(
        code, {name: (f"{name}(256, 1024)", COUNTS_ALL, 1024, False) for name in variants}, (9, 0, "a")
    )
    counts = {name: tuple(made.count(op) for op in ("LDG", "ATOMS", "STS")) for name, made in found.items()}
    loads, additions, clearing = counts["additions"]
    assert (loads, additions) == (8, 8)
    assert counts["stores"] == (8, 0, clearing + 8) and counts["no_loads"] == (0, 8, clearing)
