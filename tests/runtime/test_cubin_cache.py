"""Cubin cache and C++ entry of kernels with tensor maps; no GPU is needed."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from numba import cuda

from moe_numba.align import medium
from moe_numba.expert_parallel.rings import dispatch_direct, notify
from moe_numba.expert_parallel.rings.channels import RingShape
from moe_numba.expert_parallel.rings.token_slot import TokenSlot
from moe_numba.runtime import cubin_cache
from moe_numba.runtime.compile import entry_source
from moe_numba.runtime.kernel_key import kernel_key

ROOT = Path(__file__).parents[2]

# Run in its own process, because a process has either Numba's compiler or its simulator.
COMPILE_TWO_KERNELS = """
import json
from moe_numba.runtime import cubin_cache
from moe_numba.grouped_gemm.common.constants import THREADS
from moe_numba.grouped_gemm.wgmma.config import GemmConfig
from moe_numba.grouped_gemm.wgmma.kernel import make_kernel
from moe_numba.grouped_gemm.common.tma_launch import SIGNATURE
compiled, compile_kernel = [], cubin_cache.compile_kernel
cubin_cache.compile_kernel = lambda *a, **k: compiled.append(1) or compile_kernel(*a, **k)
for rows in (8, 16):
    config = GemmConfig(subtile_m=rows, mma_n=(rows,), stages=3)
    code, entry = cubin_cache.machine_code(make_kernel(config)[0], SIGNATURE, launch_bounds=THREADS)
    print(json.dumps([len(compiled), code.hex(), entry]))
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
def cache(monkeypatch, tmp_path):
    """An empty cache folder, and a fixed digest of the sources."""
    monkeypatch.setattr(cubin_cache, "_origin", lambda compiler: "these sources")
    monkeypatch.setenv(cubin_cache.FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


def entry_of(folder):
    return next(folder.iterdir())


def test_entries_are_cached_by_key_and_sources(cache, monkeypatch):
    assert cubin_cache.load_or_make("a 1", lambda: b"one") == b"one"
    assert cubin_cache.load_or_make("a 1", lambda: b"other") == b"one"
    assert cubin_cache.load_or_make("a 2", lambda: b"two") == b"two"
    monkeypatch.setattr(cubin_cache, "_origin", lambda compiler: "other sources")
    assert cubin_cache.load_or_make("a 1", lambda: b"made anew") == b"made anew"
    monkeypatch.setenv(cubin_cache.FOLDER, "0")
    assert cubin_cache.load_or_make("a 1", lambda: b"no folder") == b"no folder"
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("seconds, made", [(60.0, 1), (0.0, 2)])
def test_an_entry_that_another_process_makes_is_not_made_again(seconds, made, cache, monkeypatch):
    """File locks keep threads apart as they do processes; one that waits too long makes the entry as well."""
    monkeypatch.setattr(cubin_cache, "_LOCK_S", seconds)
    makers, both = [], threading.Barrier(2)

    def make():
        makers.append(threading.get_ident())
        time.sleep(0.1)
        return b"code"

    def load():
        both.wait()
        return cubin_cache.load_or_make("a", make)

    with ThreadPoolExecutor(2) as pool:
        assert [future.result() for future in [pool.submit(load) for _ in range(2)]] == [b"code"] * 2
    assert len(makers) == made and len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[:-1] + b"?"])
def test_a_damaged_entry_is_made_again(cache, damage):
    cubin_cache.load_or_make("a", lambda: b"good code")
    entry_of(cache).write_bytes(damage(entry_of(cache).read_bytes()))
    assert cubin_cache.load_or_make("a", lambda: b"made again") == b"made again"
    assert cubin_cache.load_or_make("a", lambda: b"unused") == b"made again"


def test_an_entry_that_others_can_write_is_not_loaded(cache):
    cubin_cache.load_or_make("a", lambda: b"good code")
    entry_of(cache).chmod(0o666)
    assert cubin_cache.load_or_make("a", lambda: b"made again") == b"made again"
    assert not entry_of(cache).stat().st_mode & 0o022


def test_a_symbolic_link_is_not_loaded(cache, tmp_path):
    cubin_cache.load_or_make("a", lambda: b"good code")
    entry = entry_of(cache)
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert cubin_cache.load_or_make("a", lambda: b"made again") == b"made again" and not entry.is_symlink()


def test_a_folder_that_others_can_write_is_not_used(cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.warns(UserWarning, match="belongs to another user, or others can write to it"):
        assert cubin_cache.load_or_make("a", lambda: b"code") == b"code"
    assert not list(cache.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(cache):
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, -1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        cubin_cache.load_or_make("a", lambda: b"code")
    assert not list(cache.iterdir())


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
def test_a_failed_write_leaves_no_temporary_file(error, cache, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(os, "replace", fail)
    if isinstance(error, OSError):
        assert cubin_cache.load_or_make("a", lambda: b"code") == b"code"
    else:
        with pytest.raises(KeyboardInterrupt):
            cubin_cache.load_or_make("a", lambda: b"code")
    assert not list(cache.iterdir())


def test_an_unusable_folder_disables_the_cache(tmp_path, monkeypatch, cache):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cubin_cache.FOLDER, str(tmp_path / "file"))
    assert cubin_cache.load_or_make("a", lambda: b"made") == b"made"


def test_the_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(cubin_cache.FOLDER, "~/kernels")
    assert cubin_cache.folder() == tmp_path / "kernels"
    monkeypatch.delenv(cubin_cache.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cubin_cache.folder() == tmp_path / "xdg" / "moe_numba"


def test_keys_tell_kernels_apart(monkeypatch):
    def key(threads, capacity):
        return kernel_key(medium.make_medium_kernel.__wrapped__(threads, 2, capacity, False, False))

    assert key(64, 128) == key(64, 128)  # two kernels of the same factory and configuration
    assert len({key(64, 128), key(64, 256), key(128, 128)}) == 3
    before = key(64, 128)
    monkeypatch.setattr(medium, "griddepcontrol_wait", medium.griddepcontrol_launch_dependents)
    assert key(64, 128) != before  # a device function was replaced
    assert kernel_key(fill) is None  # a kernel from elsewhere is not cached


@pytest.mark.parametrize("uses_tma", [True, False])
def test_keys_cover_the_functions_of_a_module_in_a_closure(uses_tma, monkeypatch):
    shape = RingShape(2, 4, 0, TokenSlot(64), uses_tma)
    key = lambda: kernel_key(dispatch_direct.make_dispatch_direct.__wrapped__(shape))
    before = key()
    assert before is not None and key() == before
    monkeypatch.setattr(shape.pipeline, "wait_all", notify.wait_flag)
    assert key() != before


@cuda.jit
def fill(out, value):
    out[cuda.threadIdx.x] = value
