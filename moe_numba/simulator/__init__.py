"""Numba's CUDA simulator, grown by warps: the same kernel source runs here where no GPU is found.

This module decides, when it is imported, whether kernels run in the simulator (`ENABLED`, and why: `REASON`), and names
what the rest of the package may use. It must be imported before `numba.cuda`: Numba reads its own switch only once.

    MOE_NUMBA_SIMULATE=1    simulate, even where there is a GPU
    MOE_NUMBA_SIMULATE=0    never simulate: compile-only checks need no GPU
    NUMBA_ENABLE_CUDASIM=1  Numba's own switch, honoured where the first is not set
    MOE_NUMBA_SEED=7        the order in which simulated threads run (see `seed`)

Kernels of several GPUs run at once within `together` (see `ranks`), and hand data over as weakly as GPUs do within
`weak_memory` (see `weak`).

Copies and matrix instructions of Hopper GPUs go on by themselves, and are done when the seed will have it; what they
read and write is watched meanwhile (see `watch`).

Arithmetic is NumPy's, which differs from compiled Numba in five ways; kernels that name their types do not notice:
- A Python number takes on the type of the NumPy scalar beside it. Numba makes it int64 or float64.
- Two int32 make an int32, which wraps around. Numba makes an int64.
- `np.uint32(-1)` is an error. Compiled, it wraps around; so does `numba.uint32(-1)`, here too.
- `a * b + c` is rounded twice. The compiler may fuse it, and round once.
- `min` and `max` of a NaN and a number: a GPU gives the number, Python may give either. Compare with `x == x` instead.
"""

import ctypes
import importlib
import os
import sys

# Where each public name is defined; loaded on first use, so that a process with a GPU pays nothing for them.
_NAMES = {
    "errors": (
        "SimulatorError",
        "Deadlock",
        "MissingLane",
        "DivergentBarrier",
        "ClusterError",
        "BarrierMisuse",
        "AsyncRace",
        "MissingFence",
        "OutOfBounds",
        "Misaligned",
    ),
    "engine": ("thread", "Grid"),
    "scheduler": ("seed", "trace", "World"),
    "kernel": ("run", "Kernel"),
    "ranks": ("together", "on_rank", "register", "forget"),
    "weak": ("weak_memory",),
    "arguments": ("pointer",),
    "memory": ("Pointer", "Array"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = {
    "core": (
        *("arguments", "arithmetic", "atomic", "barrier", "cluster", "cuda_module", "engine", "errors", "floats"),
        *("kernel", "memory", "scheduler", "shared", "warp"),
    ),
    "async_": (
        *("async_copy", "fragments", "matrix", "mbarrier", "race_detector", "tensor_map", "uses_async", "wgmma"),
    ),
    "memory_model": ("ranks", "scoped", "weak", "weak_cells"),
}
_MODULES = {module: package for package, modules in _PACKAGES.items() for module in modules}
__all__ = ["ENABLED", "REASON", *_HOME]


def _gpu_is_present():
    """Ask the driver itself: importing Numba or torch to find out would fix Numba's mode, or take seconds."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def _decide():
    wish = os.environ.get("MOE_NUMBA_SIMULATE", "")
    if wish not in ("", "0", "1"):
        raise RuntimeError(f"MOE_NUMBA_SIMULATE is {wish!r}, but must be 0 or 1")
    if wish:
        return wish == "1", f"MOE_NUMBA_SIMULATE={wish}"
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return True, "NUMBA_ENABLE_CUDASIM=" + os.environ["NUMBA_ENABLE_CUDASIM"]
    return (False, "a GPU was found") if _gpu_is_present() else (True, "no GPU was found")


def _switch_numba():
    """Set Numba's own switch to our decision; it is read when `numba`, and again when `numba.cuda`, is imported."""
    cuda = sys.modules.get("numba.cuda")
    if cuda is not None and bool(cuda.config.ENABLE_CUDASIM) != ENABLED:
        loaded, wanted = ("without", "needs it") if ENABLED else ("with", "must not use it")
        raise RuntimeError(
            f"import moe_numba before numba.cuda, which was loaded {loaded} its simulator; "
            f"this process {wanted} ({REASON})"
        )
    if ENABLED or "NUMBA_ENABLE_CUDASIM" in os.environ:
        os.environ["NUMBA_ENABLE_CUDASIM"] = str(int(ENABLED))
        if "numba" in sys.modules:
            sys.modules["numba"].config.ENABLE_CUDASIM = int(ENABLED)


def __getattr__(name):
    if name in _MODULES:
        module = globals()[name] = importlib.import_module(f"{__name__}.{_MODULES[name]}.{name}")
        return module
    if name in _HOME:
        value = globals()[name] = getattr(__getattr__(_HOME[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


ENABLED, REASON = _decide()
_switch_numba()
if ENABLED:
    from moe_numba.simulator.core import arithmetic, cuda_module

    cuda_module.grow()
    arithmetic.wrap_integer_casts()
