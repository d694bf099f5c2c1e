"""Hashes of kernels, of notebooks and of machine code."""

import json
import linecache
import os
import runpy
import subprocess
import sys

import pytest

from moe_numba.course.bench.records import code_hash, fingerprint, kernel_hash
from moe_numba.runtime.recording import Launched

CODE = '''"""A module."""

import math

from numba import cuda, float32

LIMIT = 7  # tokens


def make_scale(factor):
    @cuda.jit(device=True)
    def scale(x):
        """Multiply."""
        # By the limit.
        return x * float32(factor * LIMIT)

    return scale


def make_kernel(factor):
    scale = make_scale(factor)

    @cuda.jit
    def kernel(x):
        x[0] = math.sqrt(scale(x[0]))

    return kernel
'''
CODE_CHANGES, VALUES_CHANGE = "code", "values"


def hash_of(folder, code, factor=2, name="a"):
    """Return `ast_hash` of a kernel whose module is a file."""
    path = folder / f"{name}.py"
    path.write_text(code)
    linecache.checkcache(str(path))
    return kernel_hash.ast_hash(runpy.run_path(str(path))["make_kernel"](factor))


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ('"""A module."""', '"""A module with a better\ndocstring."""', None),
        ('        """Multiply."""\n', "", None),
        ("  # tokens", "", None),
        ("        # By the limit.\n", "        # By it.\n\n", None),
        ("x * float32(factor * LIMIT)", "(x\n            * float32(factor * LIMIT))", None),
        ("def scale(x)", "def scale(x: float) -> float", None),
        ("def make_scale", "def unused():\n    return LIMIT\n\n\ndef make_scale", None),
        ("LIMIT = 7", "LIMIT = 8", CODE_CHANGES),
        ("float32(factor", "float32(1 + factor", CODE_CHANGES),
        ("x * float32", "x + float32", CODE_CHANGES),
        ("math.sqrt", "math.sin", CODE_CHANGES),
        ("make_scale(factor)\n\n    @", "make_scale(factor + 1)\n\n    @", VALUES_CHANGE),
    ],
)
def test_only_code_and_constants_change_the_hash_of_a_kernel(tmp_path, old, new, changed):
    assert CODE.count(old) == 1
    before, after = hash_of(tmp_path, CODE), hash_of(tmp_path, CODE.replace(old, new))
    assert len(before) == 16
    assert [before[:8] != after[:8], before[8:] != after[8:]] == [changed == CODE_CHANGES, changed == VALUES_CHANGE]


def test_neither_modules_nor_lines_change_the_hash_of_a_kernel(tmp_path):
    assert hash_of(tmp_path, CODE) == hash_of(tmp_path, "\n\n" + CODE, name="another")
    assert hash_of(tmp_path, CODE)[:8] == hash_of(tmp_path, CODE, factor=3)[:8] != hash_of(tmp_path, CODE, factor=3)


def test_a_kernel_without_source_has_no_hash_of_it():
    space = {}
    exec(CODE, space)  # noqa: S102
    kernel = space["make_kernel"](2)
    with pytest.raises(OSError, match="the source of kernel is not available"):
        kernel_hash.ast_hash(kernel)
    assert kernel_hash.describe([Launched(kernel, None, {})]) == [{"name": "kernel"}]


# Instructions and their factories, a type and a number that a factory passes, and kernels of the package.
BOTH_MODES = """
import json

import moe_numba
import numpy as np
from numba import cuda, float32

from moe_numba.course.bench.records import kernel_hash
from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig
from moe_numba.course.deepep_port.notify import make_notify_dispatch
from moe_numba.expert_parallel.layout.kernel import make_layout_kernel
from moe_numba.gate.generic import make_generic_kernel
from moe_numba.moe_layer.weighted_sum.kernel import make_weighted_sum_kernel
from moe_numba.ptx.atomics import ld_acquire_sys_s32
from moe_numba.ptx.cp_async import advance
from moe_numba.ptx.matrix import stmatrix_x2_trans
from moe_numba.ptx.mma import make_ldmatrix_x4, make_mma


def make(dtype, factor):
    mma, ldmatrix = make_mma("bf16", n=16), make_ldmatrix_x4((0, 16))

    @cuda.jit
    def kernel(x):
        shared = cuda.shared.array(64, dtype)
        stmatrix_x2_trans(shared, 0, mma(ldmatrix(shared, 0)), ld_acquire_sys_s32(advance(x, 1), 0) * factor)

    return kernel


package = (
    make_layout_kernel(256, 8, 8, 256),
    make_notify_dispatch(DeepEPConfig(2)),
    make_generic_kernel(),
    make_weighted_sum_kernel(7168, 8, False),
)
kernels = make(float32, np.float32(2)), *package
print(json.dumps([[kernel_hash.ast_hash(kernel), kernel_hash.functions(kernel)] for kernel in kernels]))
functions = [function for kernel in package for function in kernel_hash.functions(kernel)]
assert kernel_hash.changed_functions(functions) == []
"""


def test_the_hash_of_a_kernel_is_the_same_in_the_simulator(tmp_path):
    found = []
    (tmp_path / "both.py").write_text(BOTH_MODES)
    for simulated in "01":
        environment = os.environ | {"MOE_NUMBA_SIMULATE": simulated, "NUMBA_ENABLE_CUDASIM": simulated}
        command = [sys.executable, str(tmp_path / "both.py")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    compiled, simulated = found
    for (one, functions), (other, same_functions) in zip(compiled, simulated, strict=True):
        assert one[:8] == other[:8] and functions == same_functions
    same = [one == other for (one, _), (other, _) in zip(compiled, simulated, strict=True)]
    assert same == [True, True, False, True, True], "only the port of DeepEP's notify runs fewer threads there"
    names = [function.split()[0] for function in compiled[0][1]]
    assert names == ["advance", "cells.make", "ld_acquire_sys_s32", "make_ldmatrix_x4", "make_mma", "stmatrix_x2_trans"]


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ("from moe_numba.course.exercises import exercise\n", False),
        ("\n# %%\nf = ...\nexercise('gate-1').check(f)\n".replace("'", '"'), False),
        ("\n# %% [markdown]\n# Better prose.\n", False),
        ("\n# %%\nf = ...\n", True),
        ("\n# %%\nexercise('gate-1').check(f)\nx = 2\n".replace("'", '"'), True),
    ],
)
def test_only_cells_that_measure_change_the_hash_of_a_notebook(more, changed):
    hashes = {code_hash.hash_cells(f"# %%\nx = 1\n{text}") for text in ("", more)}
    assert (len(hashes) > 1) == changed


def test_jupyter_commands_change_the_hash():
    hashes = {code_hash.hash_cells(f"# %%\n%matplotlib {which}\nx = 1\n") for which in ("inline", "agg")}
    assert len(hashes) == 2


KERNELS = """
import numpy as np
from numba import cuda, float32
from moe_numba.course.bench.records.kernel_hash import machine_code_hash
from moe_numba.runtime.compile import compile_kernel

TABLE = np.arange(32, dtype=np.float32)

@cuda.jit(device=True)
def add(x, i):
    return x[i] / float32(3.3) + float32(1)  # the division calls a function, so the machine code has relocations

@cuda.jit(device=True)
def plus(x, i):
    return x[i] / float32(3.3) + float32(1)

def make(table=TABLE, size=32, one=1):
    @cuda.jit
    def kernel(x):
        s, t = cuda.shared.array(size, float32), cuda.const.array_like(table)
        i = cuda.threadIdx.x
        s[i] = add(x, i)
        cuda.syncthreads()
        x[i] = s[31 - i] + t[i] * float32(one)

    return kernel

@cuda.jit
def renamed(x):
    s, t = cuda.shared.array(32, float32), cuda.const.array_like(TABLE)
    i = cuda.threadIdx.x
    s[i] = plus(x, i)
    cuda.syncthreads()
    x[i] = s[31 - i] + t[i] * float32(1)

def hash_of(kernel, bounds=32):
    code = compile_kernel(kernel, ("float32*",), launch_bounds=32).code.code
    return machine_code_hash(code, {"launch_bounds": bounds})

print(hash_of(make()), hash_of(renamed))
print(hash_of(make(TABLE + 1)), hash_of(make(size=64)), hash_of(make(one=2)), hash_of(renamed, 64))
"""


def test_a_hash_of_machine_code_depends_on_code_and_not_on_names():
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run([sys.executable, "-"], input=KERNELS, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kernel, renamed, *others = done.stdout.split()
    assert kernel == renamed and len({kernel, *others}) == 5, "a table, shared memory, a constant, launch bounds"


def hashes(**codes):
    return {name: {"code": code, "ast": "0"} for name, code in codes.items()}


def test_a_kernel_that_differs_is_named():
    old, new = hashes(a="1", b="2", c="3"), hashes(a="1", b="0", d="4")
    assert list(fingerprint.differences(old, new)) == ["b: differs", "c: is missing", "d: is new"]
    assert list(fingerprint.differences(old, old)) == []


def test_the_command_writes_and_checks_the_hashes(tmp_path, monkeypatch, capsys):
    now = hashes(**{"gate: one": "1", "align: two": "2"})
    given = []

    def compile_all(known, only):
        given.append(known)
        return {name: now[name] for name in now if name.split(":")[0] in (only or fingerprint.CASES)}

    monkeypatch.setattr(fingerprint, "compile_all", compile_all)
    monkeypatch.setattr(fingerprint, "path", lambda root=None: tmp_path / "fingerprints.json")
    assert fingerprint.main([]) == 0
    text = (tmp_path / "fingerprints.json").read_text()
    assert json.loads(text)["kernels"] == now
    assert sum('"code"' in line for line in text.splitlines()) == 2, "one line per kernel"
    assert fingerprint.main(["--check"]) == 0 and fingerprint.main(["--check", "--all"]) == 0
    assert given == [{}, now, {}]
    now["align: two"] = now["align: two"] | {"code": "0"}
    capsys.readouterr()
    assert fingerprint.main(["--check"]) == 1
    assert capsys.readouterr().out == "align: two: differs\n1 of 2 kernels differ\n"
    assert fingerprint.main(["--check", "--only", "gate"]) == 0
    monkeypatch.setattr(fingerprint, "versions", lambda: {"numba": "another"})
    assert fingerprint.main(["--check"]) == 1 and "other compilers" in capsys.readouterr().out


# The table


def test_only_kernels_with_another_source_or_launch_are_compiled(monkeypatch):
    launches = [("gate: a", "a", (), {"launch_bounds": 32}), ("gate: b", "b", (), {"launch_bounds": 64})]
    monkeypatch.setattr(fingerprint, "launches_of_cases", lambda only: iter(launches))
    monkeypatch.setattr(fingerprint, "ast_hash", lambda kernel: kernel)
    monkeypatch.setattr(fingerprint, "fingerprint", lambda kernel, *_: {"code": kernel})
    known = dict(fingerprint.compile_cases(0, 1, {}))
    assert {name: entry["code"] for name, entry in known.items()} == {"gate: a": "a", "gate: b": "b"}
    for name in known:
        known[name]["code"] = "kept"
    launches[1] = *launches[1][:3], {"launch_bounds": 128}
    found = dict(fingerprint.compile_cases(0, 1, known))
    assert {name: entry["code"] for name, entry in found.items()} == {"gate: a": "kept", "gate: b": "b"}
    parts = [dict(fingerprint.compile_cases(worker, 2, known)) for worker in (0, 1)]
    assert sorted([*parts[0], *parts[1]]) == sorted(found), "two workers share the kernels"


@pytest.mark.each_commit("no other test notices that the table is older than the kernels")
def test_the_table_has_todays_kernels():
    """``make fingerprint`` compiles what has changed."""
    command = "from moe_numba.course.bench.records import fingerprint; print(*fingerprint.outdated(), sep='\\n')"
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def entries():
    return fingerprint.read()["kernels"].items()


# Bytes. The producers, the prologue and the epilogue of block-scaled kernels spill, not their loops of wgmma
# (``test_consumer_warps_do_not_spill``); others spill values that a warp reads once per tile.
KNOWN_SPILLS = {
    "grouped_gemm: block 100 lengths": 152,
    "grouped_gemm: block 100 masked": 152,
    "grouped_gemm: block 100 offsets": 152,
    "grouped_gemm: block 1000 lengths": 64,
    "grouped_gemm: block 1000 masked": 64,
    "grouped_gemm: block 1000 offsets": 64,
    "grouped_gemm: options none 1000": 16,
    "grouped_gemm: options row 1000": 24,
    "grouped_gemm: silu block 100": 252,
    "grouped_gemm: silu block 32": 112,
    "grouped_gemm: silu block 32 gather": 40,
    "grouped_gemm: silu block 8": 112,
    "grouped_gemm: silu block 8 gather": 40,
    "grouped_gemm: silu block 1000": 252,
    "grouped_gemm: silu block 1000 masked": 252,
    "grouped_gemm: silu block 1000 offsets": 252,
    "grouped_gemm: tensor 1000 gather": 40,
    "one_kernel: one_kernel 1 fp8": 140,
    "one_kernel: one_kernel 2 fp8": 228,
    "one_kernel: one_kernel 8 fp8": 276,
}


def test_no_kernel_spills_more_than_is_known():
    spilled = {name: entry["spilled_bytes"] for name, entry in entries() if entry["spilled_bytes"]}
    assert {name: number for name, number in spilled.items() if number > KNOWN_SPILLS.get(name, 0)} == {}
    assert KNOWN_SPILLS.keys() == spilled.keys(), "what no longer spills leaves the list"


def test_ptxas_warns_of_nothing_new():
    """It serialises the wgmmas of four warpgroups with several sizes (C7512)."""
    known = dict.fromkeys(("grouped_gemm: mxfp4 32 lengths", "grouped_gemm: mxfp4 32 masked"), ["C7512"])
    known["grouped_gemm: mxfp4 32 offsets"] = ["C7512"]
    assert {name: entry["warnings"] for name, entry in entries() if entry["warnings"]} == known


def test_registers_suffice_for_a_cta():
    assert all(entry["registers"] * (entry["threads"] or 1) <= 65536 for _, entry in entries())
