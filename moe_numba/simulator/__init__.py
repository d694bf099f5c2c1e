"""CUDA simulator with warps, clusters, asynchronous copies and weak memory; runs unmodified `@cuda.jit` kernels.

It replaces the thread model of Numba's own simulator. Importing this module decides whether kernels run in the
simulator (`ENABLED`, with the reason in `REASON`). Import it before `numba.cuda`: Numba reads its own switch only once.

    MOE_NUMBA_SIMULATE=1    simulate, even if a GPU is present
    MOE_NUMBA_SIMULATE=0    never simulate; compile-only checks need no GPU
    NUMBA_ENABLE_CUDASIM=1  Numba's own switch, used if the first is not set
    MOE_NUMBA_ONLY=90       simulate a GPU of compute capability 9.0 if the GPU has another; for notebooks
    MOE_NUMBA_ARCH=80       compute capability of the simulated GPU (9.0)
    MOE_NUMBA_SEED=7        seed of the thread order (see `seed`)
    MOE_NUMBA_ENGINE=threads   run each thread in Python; `vector`: raise an error where vectors of lanes do not do;
                            `either` (the default): try vectors first
    MOE_NUMBA_PREEMPT=0.02  probability that a memory access yields to another thread first
    MOE_NUMBA_SLOW_WARP=8   this warp of each block runs only while all others wait
    MOE_NUMBA_WEAK_MEMORY=1 weak memory in all launches (see `weak_memory`)
    MOE_NUMBA_RACES=1       detect data races in all launches (see `races`)
    MOE_NUMBA_WRAPAROUND=1  let computed negative indices of arrays count from the end, as compiled Numba does
    MOE_NUMBA_COMPILE=1     compile the launched kernels at the end of the program (see `compiler.launched`)

`python -m moe_numba.simulator run script.py` runs a program in the simulator, `debug script.py` in its debugger, and
`moe_numba.simulator.pytest_plugin` a test suite. docs/simulator.md and docs/simulator_debug.md explain them.

- `together` runs the kernels of several GPUs (ranks) concurrently; see `memory_model.ranks`.
- `weak_memory` delays stores to global memory as a GPU may; see `memory_model.store_buffer`.
- `races` detects data races by happens-before, in all memory spaces; see `memory_model.happens_before`. It also reports
  reads of uninitialised memory; see `core.uninitialized` and `core.unknown`.
- `profile` counts executions, sectors, bank conflicts, collectives and barriers per source line, and follows the
  critical path of a block; see `profiler`.
- `debug` stops kernels at breakpoints, steps lanes and warps, and goes back in time; see `debugger`.
- `trace` records what happens; `write_chrome_trace` and `timeline` show it beside a GPU's time stamps; see `timelines`.
- Hopper's asynchronous copies and wgmma complete at a time chosen by the seeded scheduler. Until a thread has waited
  for them, `asynchronous.race_detector` rejects conflicting accesses to their shared memory.
- The simulated GPU has an H200's 132 SMs, and the limits per SM of its compute capability (`capability`): launch
  bounds, static, dynamic and local memory, resident blocks and cooperative launches are checked, and the registers that
  `setmaxnreg` moves. How many registers a kernel needs is not known, nor what else runs on the GPU.
- A kernel that Numba would not compile is refused if its source shows it (`core.compilable`); `run --compile` asks
  Numba's compiler at the end (`compiler`). A loop that polls with
  plain loads is an error (`core.polling`).

`vector` runs the lanes of a block, or of a warp, as NumPy vectors. Kernels with races, errors or anything that it does
not support run again with one greenlet per thread, as do all kernels under `weak_memory`, `trace`, `debug` and
preemption. `vector.launch.fallbacks` lists them with the reasons. Under `races` it accepts only kernels that
barriers order; threads execute all others and report each race.

Operators, casts and the functions of `math` are typed as Numba types them (`core.operators`, `core.conversions`,
`core.math_functions`). `core.typed_code` gives them to threads, `vector.transform` to vectors. What differs:
- `a * b + c` is rounded twice. The compiler may fuse it and round once.
- `min` and `max` of a NaN and a number: a GPU returns the number, Python may return either. Test with `x == x` instead.
- A variable's type is that of its value; Numba gives it one type in the function. docs/simulator.md lists the rest.
"""

import ctypes
import importlib
import os
import sys

from moe_numba.simulator import browser, capability, compiler  # noqa: F401  moe_numba names the compiler
from moe_numba.simulator.capability import UnsupportedInstruction

# Public names by the submodule that defines them. They load on first use, so that a process with a GPU skips the
# imports.
_EXPORTS = {
    "errors": (
        "SimulatorError",
        "CompileError",
        "Deadlock",
        "MissingLane",
        "DivergentBarrier",
        "ClusterError",
        "BarrierMisuse",
        "AsyncRace",
        "DataRace",
        "UninitializedRead",
        "MissingFence",
        "OutOfBounds",
        "Misaligned",
    ),
    "engine": ("thread",),
    "grid": ("Grid",),
    "session": ("debug",),
    "spans": ("Span", "Track", "trace_spans", "measured_spans"),
    "chrome_trace": ("write_chrome_trace", "read_chrome_trace"),
    "player": ("timeline",),
    "scheduler": ("seed", "trace", "races", "World"),
    "kernel": ("run", "Kernel"),
    "ranks": ("together", "on_rank", "exchange", "has_queued", "register", "forget"),
    "store_buffer": ("weak_memory",),
    "pointer_wrapping": ("pointer",),
    "memory": ("Pointer", "Array"),
    "collect": ("profile",),
    "report": ("Profile", "write_report"),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
_PACKAGES = {
    "core": (
        *("arithmetic", "atomic", "barrier", "cluster", "compilable", "cuda_module", "engine", "errors", "floats"),
        *("grid", "host", "kernel", "libdevice", "memory", "pointer_wrapping", "polling", "random", "registers"),
        *("scheduler", "settings", "shared", "warp"),
    ),
    "asynchronous": (
        *("async_copy", "fragments", "matrix", "mbarrier", "race_detector", "tensor_map", "uses_async", "wgmma"),
    ),
    "profiler": ("collect", "report"),
    "debugger": ("session",),
    "timelines": ("chrome_trace", "player", "spans"),
    "memory_model": ("happens_before", "ranks", "scoped_access", "store_buffer", "weak_pointers"),
}
_PACKAGE_OF = {module: package for package, modules in _PACKAGES.items() for module in modules}
_INTEGRATED_GPUS = "/dev/nvgpu", "/dev/nvhost-gpu"  # Jetson, whose older systems have no NVML
__all__ = ["ENABLED", "REASON", "UnsupportedInstruction", "enable", *_MODULE_OF]


def _gpu_is_present():
    """Return whether a GPU is visible to this process.

    NVML answers without initialising CUDA, which would not survive a fork. Importing Numba would fix its mode, and
    importing torch takes seconds.
    """
    count = _count_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return count > 0
    first = visible.split(",")[0].strip()  # CUDA ignores everything behind an invalid entry
    return first.startswith(("GPU-", "MIG-")) or (first.isdecimal() and int(first) < count)


def _count_gpus():
    try:
        return _ask_nvml(lambda nvml, count: count)
    except (OSError, AttributeError):
        return int(any(map(os.path.exists, _INTEGRATED_GPUS)))


def _newest_gpu():
    """Return the compute capability of the newest GPU, which is usually CUDA's first; (0, 0) without NVML."""

    def newest(nvml, count):
        gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0)
        found = []
        for index in range(count):
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu))
            nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
            found.append((major.value, minor.value))
        return max(found)

    try:
        return _ask_nvml(newest) or (0, 0)
    except (OSError, AttributeError):
        return 0, 0


def _ask_nvml(question):
    """Return ``question(library, number of GPUs)``, 0 if there are none."""
    nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value:
        return 0
    answer = question(nvml, count.value)
    nvml.nvmlShutdown()
    return answer


def _choose_mode():
    """Return whether to simulate, and the reason in words."""
    requested = os.environ.get("MOE_NUMBA_SIMULATE", "")
    if requested not in ("", "0", "1"):
        raise RuntimeError(f"MOE_NUMBA_SIMULATE is {requested!r}, but must be 0 or 1")
    if requested:
        return requested == "1", f"MOE_NUMBA_SIMULATE={requested}"
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return True, "NUMBA_ENABLE_CUDASIM=" + os.environ["NUMBA_ENABLE_CUDASIM"]
    if not _gpu_is_present():
        return True, "no GPU was found"
    if only := capability.only():
        for found in (capability.requested() or only, _newest_gpu()):
            if found != only:
                return True, "the kernels need compute capability {}.{}, and the GPU has {}.{}".format(*only, *found)
    return False, "a GPU was found"


def _set_numba_switch():
    """Set Numba's own switch to `ENABLED`. Numba reads it when `numba`, and again when `numba.cuda`, is imported."""
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


def _restore_row_stack():
    """Define ``numpy.row_stack`` again: numba-cuda uses the name when it is imported, and NumPy 2.5 has removed it.

    Delete this with the first numba-cuda whose ``np/arrayobj.py`` does without it; 0.30.4, the latest, does not.
    """
    import numpy as np

    if not hasattr(np, "row_stack"):
        np.row_stack = np.vstack


def __dir__():
    return sorted(__all__)


def __getattr__(name):
    if name in _PACKAGE_OF:
        module = globals()[name] = importlib.import_module(f"{__name__}.{_PACKAGE_OF[name]}.{name}")
        return module
    if name in _MODULE_OF:
        value = globals()[name] = getattr(__getattr__(_MODULE_OF[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _install():
    """Make `cuda` the simulator's."""
    from moe_numba.simulator.core import arithmetic, cuda_module, engines

    cuda_module.install()
    arithmetic.wrap_casts()

    from moe_numba.simulator.vector import launch

    engines.register(launch.run)


def enable(reason: str = "simulator.enable()", arch: tuple[int, int] | None = None) -> None:
    """Run kernels in the simulator from now on, even if there is a GPU; call it before `numba.cuda` is imported.

    Parameters
    ----------
    reason : str
        The new `REASON`, if simulation was off.
    arch : (int, int), optional
        Compute capability of the simulated GPU; child processes get it too. Call it before `moe_numba.ptx` is imported.

    Raises
    ------
    RuntimeError
        If `numba.cuda` was imported without its simulator.

    Examples
    --------
    >>> from moe_numba import simulator  # before numba.cuda
    >>> simulator.enable()
    >>> simulator.ENABLED
    True
    """
    global ENABLED, REASON
    if arch is not None:
        capability.simulate(arch)
    if not ENABLED:
        ENABLED, REASON = True, reason
        _set_numba_switch()
        _install()
    os.environ["MOE_NUMBA_SIMULATE"] = "1"


browser.install()
ENABLED, REASON = _choose_mode()
_set_numba_switch()
if ENABLED:
    _install()
else:
    _restore_row_stack()  # Numba's own simulator does not need it
