"""Cubin cache and C++ entry of kernels with tensor maps; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_numba.runtime import cubin_cache
from moe_numba.runtime.compile import entry_source

ROOT = Path(__file__).parents[2]

# Run in its own process, because a process has either Numba's compiler or its simulator.
COMPILE_TWO_KERNELS = """
import json
from moe_numba.runtime import launch
from moe_numba.grouped_gemm.config import THREADS, GemmConfig
from moe_numba.grouped_gemm.kernel import make_kernel
from moe_numba.grouped_gemm.launch import SIGNATURE
compiled, compile_kernel = [], launch.compile_kernel
launch.compile_kernel = lambda *a, **k: compiled.append(1) or compile_kernel(*a, **k)
for rows in (8, 16):
    config = GemmConfig(subtile_m=rows, mma_n=(rows,), stages=3)
    code = launch.cached_cubin(make_kernel(config)[0], SIGNATURE, launch_bounds=THREADS, cache_key=("test", *config))
    print(json.dumps([len(compiled), code.hex()]))
"""


def compile_in_process(folder):
    """For each of two kernels: the number of compilations so far, and the cubin."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_TWO_KERNELS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", cubin_cache.FOLDER: str(folder)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_second_process_compiles_nothing(tmp_path):
    first, second = compile_in_process(tmp_path), compile_in_process(tmp_path)
    assert [row[0] for row in first] == [1, 2] and [row[0] for row in second] == [0, 0]
    assert [row[1] for row in first] == [row[1] for row in second] and first[0][1] != first[1][1]
    assert len(list(tmp_path.glob("*.cubin"))) == len(list(tmp_path.iterdir())) == 2


def test_an_entry_takes_maps_by_value():
    source = entry_source(("tensormap", "uint8*", "int32"), 384)
    assert "entry(const __grid_constant__ Map a0, const void* a1, int a2) { body(&a0, a1, a2); }" in source
    assert "void body(const void*, const void*, int);" in source and "__launch_bounds__(384, 1)" in source


@pytest.fixture
def origin(monkeypatch):
    monkeypatch.setattr(cubin_cache, "_origin", lambda: "these sources")


def test_entries_are_cached_by_key_and_sources(tmp_path, monkeypatch, origin):
    monkeypatch.setenv(cubin_cache.FOLDER, str(tmp_path / "new"))
    assert cubin_cache.load_or_make(("a", 1), lambda: b"one") == b"one"
    assert cubin_cache.load_or_make(("a", 1), lambda: b"other") == b"one"
    assert cubin_cache.load_or_make(("a", 2), lambda: b"two") == b"two"
    assert cubin_cache.load_or_make(None, lambda: b"not kept") == b"not kept"
    monkeypatch.setattr(cubin_cache, "_origin", lambda: "other sources")
    assert cubin_cache.load_or_make(("a", 1), lambda: b"made anew") == b"made anew"
    monkeypatch.setenv(cubin_cache.FOLDER, "0")
    assert cubin_cache.load_or_make(("a", 1), lambda: b"no folder") == b"no folder"
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_an_unusable_folder_disables_the_cache(tmp_path, monkeypatch, origin):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cubin_cache.FOLDER, str(tmp_path / "file"))
    assert cubin_cache.load_or_make(("a", 1), lambda: b"made") == b"made"
    monkeypatch.delenv(cubin_cache.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cubin_cache.folder() == tmp_path / "moe_numba"
