"""Machine code of notebook 13's kernels, and of the package's kernels that it changes; no GPU is needed."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from helpers.once_per_run import once_per_run

from moe_numba.course.bench.records import code_hash
from moe_numba.expert_parallel.rings import combine
from moe_numba.runtime.sass import compile_apart

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "notebooks" / "13_combine.py").read_text()
CELLS = [cell for cell in code_hash.code_cells(TEXT) if "\n    @cuda.jit" in cell or "def changed(" in cell]
IMPORTS = re.search(r"^from contextlib.*?(?=^warnings)", TEXT, re.M | re.S)[0]
SUM = ("int32*", "uint8*", "int32", "int32*")
KERNELS = {
    "make_push_kernel(2, 14336)": ("int32*", "int32*", "int32*", "int32", "uint64*", "int32"),
    "make_barrier_kernel(2)": ("int32*", "uint64*", "int32", "int32", "int64", "int32*"),
    **{f"make_sum_kernel({ranks}, 3584, {n})": SUM for ranks, n in ((2, 1), (2, 2), (2, 4), (2, 8), (8, 1), (8, 2))},
}
COMBINES = [(2, 1, False), (2, 8, False), (2, 4, True), (8, 2, False)]  # ranks, vectors per row, packed
SHAPE = """
from moe_numba.expert_parallel.rings.config import Config, make_ring_shape
from moe_numba.expert_parallel.rings.token_slot import TokenSlot

def shape(ranks):
    return make_ring_shape(Config(24, 10, 256), ranks, 15, 720, TokenSlot(3584, 0, 0, has_src_idx=False), 1 << 28)[0]
"""


def constant(name):
    """The value of a constant in the notebook."""
    for node in ast.parse("\n".join(code_hash.code_cells(TEXT))).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


PATCHES = {name: [constant(name)] for name in ("NO_SUMMATION", "WAITING")}
PATCHES["WRITTEN_DOWN"] = constant("WRITTEN_DOWN")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    source = "\n".join(["import inspect", "import moe_numba", IMPORTS, *CELLS, SHAPE])
    # As the notebook launches them: without launch bounds.
    requests = {expression: (expression, signature, None, False) for expression, signature in KERNELS.items()}
    for ranks, *options in COMBINES:
        expression = f"make_channels_kernel(shape({ranks}), *{options})"
        requests[ranks, *options] = expression, combine.SIGNATURE, 512, False
    by_number = once_per_run(
        tmp_path_factory, "notebook_09", lambda: compile_apart(source, dict(enumerate(requests.values())))
    )
    return dict(zip(requests, by_number.values(), strict=True))


@pytest.mark.parametrize("expression", KERNELS)
def test_the_notebooks_kernels_fit_512_threads(expression, reports):
    assert reports[expression].registers * 512 <= 65536 and reports[expression].spilled_bytes == 0


@pytest.mark.parametrize("configuration", COMBINES, ids=str)
def test_the_notebooks_combine_kernel_does_not_spill(configuration, reports):
    report = reports[configuration]
    assert report.spilled_bytes == report.stack_bytes == 0 and not report.complaints


@pytest.mark.parametrize("changes", PATCHES.values(), ids=PATCHES)
def test_the_patched_combine_does_not_spill(changes):
    source = inspect.getsource(combine)
    for old, new in changes:
        assert source.count(old) == 1, f"notebook 13 replaces {old!r}, which must occur once in combine.py"
        source = source.replace(old, new)
    source += SHAPE
    report = compile_apart(source, {"": ("make_combine(shape(2), 0)", combine.SIGNATURE, 512, False)})[""]
    assert report.spilled_bytes == report.stack_bytes == 0 and not report.complaints


def test_all_of_the_notebooks_kernels_are_compiled():
    made = set(re.findall(r"^def (make_\w+_kernel)\(", "\n".join(CELLS), re.M))
    assert made == {expression.partition("(")[0] for expression in KERNELS} | {"make_channels_kernel"}
