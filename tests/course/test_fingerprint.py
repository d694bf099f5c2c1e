"""Hashes of source code and fingerprints of machine code."""

import os
import subprocess
import sys

import pytest

from moe_numba.course.bench.records import code_hash, fingerprint
from moe_numba.runtime.sass import disassembler

CODE = '''"""A module."""

import math

LIMIT = 7  # tokens


def scale(x, factor=2):
    """Multiply."""
    # Doubles x by default.
    return x * factor * LIMIT
'''


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ('"""A module."""', '"""A module with a better\ndocstring."""', False),
        ('    """Multiply."""\n', "", False),
        ("  # tokens", "", False),
        ("    # Doubles x by default.\n", "    # Doubles x.\n\n", False),
        ("x * factor * LIMIT", "(x\n        * factor * LIMIT)", False),
        ("(x, factor=2)", "(x: float, factor: float = 2) -> float", False),
        ("LIMIT = 7", "LIMIT = 8", True),
        ("factor=2", "factor=2.0", True),
        ("x * factor", "x + factor", True),
        ("import math", "import cmath", True),
    ],
)
def test_only_code_changes_the_hash_of_a_file(tmp_path, old, new, changed):
    assert old in CODE
    (tmp_path / "a.py").write_text(CODE)
    before = code_hash.hash_file(tmp_path, "a.py")
    (tmp_path / "a.py").write_text(CODE.replace(old, new))
    assert (code_hash.hash_file(tmp_path, "a.py") != before) == changed


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ("from moe_numba.course.exercises import exercise\n", False),
        ("\n# %%\nf = ...\nexercise('gate-1').check(f)\n".replace("'", '"'), False),
        ("\n# %%\nf = ...\n", True),
        ("\n# %%\nexercise('gate-1').check(f)\nx = 2\n".replace("'", '"'), True),
    ],
)
def test_exercises_do_not_change_the_hash_of_a_notebook(tmp_path, more, changed):
    hashes = []
    for text in ("", more):
        (tmp_path / "n.py").write_text(f"# %%\nx = 1\n{text}")
        hashes.append(code_hash.hash_file(tmp_path, "n.py#code"))
    assert (hashes[0] != hashes[1]) == changed


def test_jupyter_commands_change_the_hash(tmp_path):
    for text in ("%matplotlib inline\nx = 1\n", "%matplotlib agg\nx = 1\n"):
        (tmp_path / "n.py").write_text(f"# %%\n{text}")
        hashes = {code_hash.hash_file(tmp_path, "n.py#code")} | locals().get("hashes", set())
    assert len(hashes) == 2


def test_other_files_are_hashed_by_their_bytes(tmp_path):
    (tmp_path / "a.cu").write_text("// one\n")
    before = code_hash.hash_file(tmp_path, "a.cu")
    (tmp_path / "a.cu").write_text("// two\n")
    assert code_hash.hash_file(tmp_path, "a.cu") != before and code_hash.hash_file(tmp_path, "b.cu") is None


KERNELS = """
from numba import cuda, int32
from moe_numba.course.bench.records.fingerprint import fingerprint

@cuda.jit(device=True)
def add(x, i):
    return int32(x[i] + 1)

@cuda.jit(device=True)
def plus(x, i):
    return int32(x[i] + 1)

@cuda.jit
def one(x):
    x[cuda.threadIdx.x] = add(x, cuda.threadIdx.x)

@cuda.jit
def renamed(x):
    x[cuda.threadIdx.x] = plus(x, cuda.threadIdx.x)

@cuda.jit
def another_constant(x):
    x[cuda.threadIdx.x] = add(x, cuda.threadIdx.x) + 1

for kernel in (one, renamed, another_constant):
    print(fingerprint(kernel, ("int32*",), {"launch_bounds": 32}))
print(fingerprint(one, ("int32*",), {"launch_bounds": 64}))
"""


@pytest.mark.skipif(disassembler() is None, reason="nvdisasm is not installed")
def test_fingerprint_depends_on_code_and_not_on_names():
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
    code = [sys.executable, "-"]
    done = subprocess.run(code, input=KERNELS, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    one, renamed, another_constant, other_bounds = done.stdout.split()
    assert one == renamed and len({one, another_constant, other_bounds}) == 3


def test_a_kernel_that_differs_is_named():
    old, new = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "d": "4"}
    assert list(fingerprint.differences(old, new)) == ["b: differs", "c: is missing", "d: is new"]
    assert list(fingerprint.differences(old, old)) == []
