"""What the compiler makes of notebook 06's own kernels, and of those it changes; no GPU is needed."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_numba.bench import records
from moe_numba.bench.machine_code import compile_apart
from moe_numba.expert_parallel import combine

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "notebooks" / "06_combine.py").read_text()
CELLS = [cell for cell in records.code_cells(TEXT) if "\n    @cuda.jit\n" in cell]
IMPORTS = re.search(r"^from contextlib.*?^\)$", TEXT, re.M | re.S)[0]  # up to the last of the kernels' own
SUM = ("int32*", "uint8*", "int32", "int32*")
OWN = {
    "make_push_kernel(2, 14336)": ("int32*", "int32*", "int32*", "int32", "uint64*", "int32"),
    "make_meeting(2)": ("int32*", "uint64*", "int32", "int32", "int64", "int32*"),
    **{f"make_sum_kernel({ranks}, 3584, {n})": SUM for ranks, n in ((2, 1), (2, 2), (2, 4), (2, 8), (8, 1), (8, 2))},
}
# As the notebook launches them: without launch bounds.
COMPILE = """
import json
from moe_numba.launch import compile_kernel
for expression, signature in {own!r}.items():
    print(json.dumps([expression, compile_kernel(eval(expression), signature).log]))
"""
SHAPE = """
from moe_numba.expert_parallel.config import Config, rings_for
from moe_numba.expert_parallel.regions import Record

SHAPE = rings_for(Config(24, 10, 256), {ranks}, 15, 180, Record(3584, 0, 0, source=False), 1 << 28)[0]
"""


def constant(name):
    """A constant of the notebook, as it stands there."""
    found = re.search(rf"^{name} = (.*?)(?=\n\S|\n\n)", "\n".join(records.code_cells(TEXT)) + "\n\n", re.M | re.S)
    return ast.literal_eval(found[1])


def with_pieces(n):
    return (*constant("SENT_TO_ITSELF"), (constant("AT_ONCE"), f"at_once = {n}"))


CHANGED = {  # (ranks, what is changed)
    **{f"{n} pieces, {ranks} ranks": (ranks, with_pieces(n)) for ranks, n in ((2, 1), (2, 8), (8, 2))},
    "nothing added": (2, (constant("NOTHING_ADDED"),)),
}


@pytest.fixture(scope="module")
def logs():
    program = "\n".join(["import moe_numba", IMPORTS, *CELLS, COMPILE.format(own=OWN)])
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("expression", OWN)
def test_the_notebooks_kernels_fit_512_threads(expression, logs):
    registers = max(map(int, re.findall(r"Used (\d+) registers", logs[expression])))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", logs[expression])))
    assert registers * 512 <= 65536 and spilled == 0


@pytest.mark.parametrize("ranks, changes", CHANGED.values(), ids=CHANGED)
def test_the_changed_kernels_stay_in_registers(ranks, changes):
    source = inspect.getsource(combine)
    for old, new in changes:
        assert old in source, f"notebook 06 changes {old!r}, which is not in combine.py any more"
        source = source.replace(old, new)
    source += SHAPE.format(ranks=ranks)
    report = compile_apart(source, {"": ("make_combine(SHAPE, 0)", combine.SIGNATURE, 512, False)})[""]
    assert report.spilled_bytes == report.stack_bytes == 0 and not report.complaints


def test_own_rows_are_sent_and_received():
    """What makes a rank send its rows to itself must do so at both ends."""
    (both, _), (reads, _) = constant("SENT_TO_ITSELF")
    assert both in inspect.getsource(combine.make_send) and both in inspect.getsource(combine.make_receive)
    assert inspect.getsource(combine).count(reads) == 1


def test_the_sender_that_waits_is_made_of_the_packages():
    assert constant("WAITING")[0] in inspect.getsource(combine.make_send)


def test_all_of_the_notebooks_kernels_are_compiled():
    made = set(re.findall(r"^def (make_\w+_kernel|make_meeting)\(", "\n".join(CELLS), re.M))
    assert made == {expression.partition("(")[0] for expression in OWN}
