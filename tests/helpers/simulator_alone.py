"""A program that needs the simulator alone: shuffles, shared memory, atomics, an mbarrier and TMA, on NumPy arrays.

It runs with numpy, numba, numba-cuda and greenlet, and fails if anything else of the package's extras is imported. With
`--as-on-macos` numba-cuda and cuda.core are hidden, too, with functions of `os` that other systems lack; with
`--without-cuda` no library of CUDA is found.
"""

import importlib
import importlib.machinery
import os
import pkgutil
import sys

import numpy as np

EXTRAS = ("torch", "cupy", "matplotlib", "rich", "safetensors", "cffi", "ml_dtypes")
AS_ON_MACOS = "--as-on-macos" in sys.argv
HIDDEN = {*EXTRAS, *(("numba_cuda", "cuda") if AS_ON_MACOS else ())}

_find_spec = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *more: (
    None if name.split(".")[0] in HIDDEN else _find_spec(name, *more)
)
if AS_ON_MACOS:
    # numba-cuda is found by a finder of its own.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]

if "--without-cuda" in sys.argv:
    from cuda import pathfinder
    from cuda.bindings import runtime

    def _not_found(*_):
        raise pathfinder.DynamicLibNotFoundError("no library of CUDA")

    runtime.getLocalRuntimeVersion = _not_found

import moe_numba  # noqa: E402
from moe_numba import simulator  # noqa: E402

# isort: split
from numba import cuda, float32, int32, uint64  # noqa: E402

import moe_numba.ptx  # noqa: E402
from moe_numba.ptx import mbarrier as bar  # noqa: E402
from moe_numba.ptx.cp_async import bulk_load  # noqa: E402

FULL = 0xFFFFFFFF


@cuda.jit
def block_sum(out, x):
    sums = cuda.shared.array(4, float32)
    i = cuda.grid(1)
    value = x[i] if i < x.size else float32(0)
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL, value, step)
    if cuda.laneid == 0:
        sums[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(out, 0, sums[0] + sums[1] + sums[2] + sums[3])


@cuda.jit
def reverse(out, x):
    tile, barrier = cuda.shared.array(32, int32, 16), cuda.shared.array(1, uint64)
    i = cuda.threadIdx.x
    if i == 0:
        bar.mbarrier_init(barrier, 0, 1)
        bar.fence_mbarrier_init()
        bar.mbarrier_arrive_expect_tx(barrier, 0, 128)
        bulk_load(tile, 0, x, 0, 128, barrier, 0)
    cuda.syncthreads()
    bar.mbarrier_wait_parity(barrier, 0, 0)
    out[i] = tile[31 - i]


def main():
    for module in pkgutil.walk_packages(moe_numba.ptx.__path__, "moe_numba.ptx."):
        importlib.import_module(module.name)

    x, total = np.arange(1000, dtype=np.float32), np.zeros(1, np.float32)
    block_sum[8, 128](total, x)
    assert total[0] == x.sum()

    numbers, out = cuda.to_device(np.arange(32, dtype=np.int32)), cuda.device_array(32, np.int32)
    simulator.run(reverse, 1, 32, [out, simulator.pointer(numbers)])
    assert (out.copy_to_host() == np.arange(32)[::-1]).all()

    with simulator.profile() as profile:
        block_sum[1, 128](cuda.InOut(total), cuda.In(x))
    assert profile["block_sum"].total.shared_store_requests == 4
    if AS_ON_MACOS:
        del os.sysconf
    assert cuda.current_context().get_memory_info().total > 0

    try:
        getattr(moe_numba, "biased_grouped_topk")  # noqa: B009 - a bare attribute would be a statement without effect
    except ImportError as error:
        print(error)
    loaded = [name for name in EXTRAS if name in sys.modules]
    assert not loaded, loaded
    assert ("numba_cuda" in sys.modules) != AS_ON_MACOS
    print("the simulator works alone")


if __name__ == "__main__":
    main()
