"""The package's kernels compiled by numba-cuda-mlir, without a GPU, and the corrections of that compiler.

A test of a correction that fails since "numba-cuda-mlir no longer needs it" is good news: remove the correction from
``moe_numba/runtime/mlir/corrections.py``, and its reproducer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runtime.mlir_reproducers import REPRODUCERS

from moe_numba.runtime import compilers
from moe_numba.runtime.sass import compile_apart

ROOT = Path(__file__).parents[2]
VERSION = compilers.version("numba-cuda-mlir")
needs_mlir = pytest.mark.skipif(VERSION is None, reason="numba-cuda-mlir is not installed: pip install '.[mlir]'")

SOURCE = """
from numba import cuda, float32, int32, uint8, uint64
import numpy as np
from moe_numba.gate.device_functions import make_sort_descending
from moe_numba.ptx.accumulators import make_for_each_chunk
from moe_numba.ptx.cuda_cpp import ffi
from moe_numba.ptx.cuda_cpp.wgmma import wgmma_step_m64n64k128_e4m3
from moe_numba.ptx.memory import griddepcontrol_wait, load_nc_u32x4
from moe_numba.ptx.warp import redux_sync_add_s32, uniform_array
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

sort, tile, wait = make_sort_descending(8), make_wgmma_tile(64, "e4m3"), make_wgmma_wait(64, 0)


@cuda.jit
def shared_sum(x, out):
    griddepcontrol_wait()
    out[cuda.threadIdx.x] = redux_sync_add_s32(0xFFFFFFFF, x[cuda.threadIdx.x])


@cuda.jit
def sorted_keys(x, out):
    keys = cuda.local.array(8, int32)
    i = int32(0)
    for word in load_nc_u32x4(x, 0):
        keys[i], keys[7 - i] = int32(word), i
        i += int32(1)
    sort(keys)
    out[0] = keys[0]


@cuda.jit(device=True)
def store(first, values, given):
    for value in values:
        given[0][first] = value
        first += 1


store_all = make_for_each_chunk(32, 4, store)


@cuda.jit
def multiply(map_a, out):
    smem = uniform_array(cuda.shared.array(0, uint8, 1024))
    acc = wait(tile(wgmma_descriptor(smem, 0), wgmma_descriptor(smem, 8192)))
    store_all(acc, (out, None))


@cuda.jit
def linked(x, out):
    smem, acc = cuda.shared.array(0, uint8, 1024), cuda.local.array(32, float32)
    wgmma_step_m64n64k128_e4m3(ffi.from_buffer(acc), ffi.from_buffer(smem), int32(0), int32(8192), int32(0))
    for i in range(32):
        out[i] = acc[i]
"""
POINTERS = ["int32*", "int32*"]
KERNELS = {
    "shared_sum": ("shared_sum", POINTERS, 32, False),
    "sorted_keys": ("sorted_keys", POINTERS, 32, False),
    "multiply": ("multiply", ["tensormap", "float32*"], 128, False),
    "linked": ("linked", ["uint8*", "float32*"], 128, True),
}


def test_the_compiler_is_chosen_by_name(monkeypatch):
    for name, compiler in (("", "numba-cuda"), ("numba-cuda", "numba-cuda"), ("mlir", "mlir")):
        monkeypatch.setenv(compilers.VARIABLE, name)
        assert compilers.chosen() == compiler
    monkeypatch.setenv(compilers.VARIABLE, "nvcc")
    with pytest.raises(ValueError, match="'nvcc'; allowed are numba-cuda, mlir"):
        compilers.chosen()


@pytest.fixture(scope="module")
def defects():
    """What is wrong with each reproducer, as numba-cuda-mlir is and as it is corrected."""

    def compiled(*options):
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(ROOT / "tests" / "runtime" / "mlir_reproducers.py"), *options]
        environment = os.environ | {"PYTHONPATH": paths, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return compiled(), compiled("--corrected")


@needs_mlir
@pytest.mark.parametrize("name", REPRODUCERS)
def test_corrections(name, defects):
    original, corrected = defects
    assert original[name], f"numba-cuda-mlir {VERSION} no longer needs the correction of {name!r}"
    assert not corrected[name]


@needs_mlir
def test_kernels(monkeypatch):
    """Fallbacks, starred calls, wgmma, calls from intrinsics, also with None, and CUDA C++ compile with both."""
    old = compile_apart(SOURCE, KERNELS)
    monkeypatch.setenv(compilers.VARIABLE, compilers.MLIR)
    new = compile_apart(SOURCE, KERNELS)
    for name in KERNELS:
        assert new[name].registers <= old[name].registers + 16 and not new[name].complaints
        if new[name].opcodes:
            assert new[name].count("HGMMA") == old[name].count("HGMMA")
            assert new[name].count("WARPSYNC", "CALL") == old[name].count("WARPSYNC", "CALL")
    sum_ = {"shared_sum": KERNELS["shared_sum"]}
    turing = compile_apart(SOURCE.replace("multiply(map", "_(map"), sum_, arch=(7, 5))["shared_sum"]
    if turing.opcodes:
        assert turing.count("SHFL") >= 5 and not turing.count("REDUX")
        assert new["shared_sum"].count("REDUX") == 1 and not new["shared_sum"].count("SHFL")


GATE = """
from moe_numba.gate.merged_keys import make_merged_kernel, select_lanes
from moe_numba.gate.packed_keys import PackedConfig

merged = make_merged_kernel(PackedConfig(128, 8, select_lanes(128, 8)))
"""


@needs_mlir
def test_local_arrays_of_functions_that_are_inlined_stay_in_registers(monkeypatch):
    monkeypatch.setenv(compilers.VARIABLE, compilers.MLIR)
    signature = ["uint16*", "uint16*", "float32*", "int32*", "int32", "int64", "int32", "float32", "float32"]
    merged = compile_apart(GATE, {"merged": ("merged", signature, [128, 3], False)})["merged"]
    assert merged.stack_bytes == merged.spilled_bytes == 0
