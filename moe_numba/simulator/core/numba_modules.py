"""Where the parts of Numba lie that this simulator builds on: Numba's own simulated `cuda` module.

It comes from numba-cuda or, where that is not installed (it has no build for macOS), from Numba itself. In a browser,
for which Numba has no build, `moe_numba/simulator/browser/site/numba` takes its place.
"""

import contextlib
import functools
import importlib
import sys
import types


def import_cuda():
    """Import `numba.cuda`, and return it."""
    with _without_cuda_core(), _without_cuda_runtime():
        return importlib.import_module("numba.cuda")


@contextlib.contextmanager
def _without_cuda_core():
    """Let empty classes stand for the two of cuda.core whose types numba-cuda registers.

    Importing cuda.core takes half a second of CPU time, and nothing that is simulated uses it.
    """
    made = {}
    if "cuda.core" not in sys.modules:
        for name, contents in {"cuda.core": "Buffer", "cuda.core.utils": "StridedMemoryView"}.items():
            made[name] = types.ModuleType(name)
            setattr(made[name], contents, type(contents, (), {}))
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


@contextlib.contextmanager
def _without_cuda_runtime():
    """Let numba-cuda ask for the version of CUDA's runtime, as it does for debug information, where none is installed.

    It could not be imported there, as the library is not found.
    """
    try:
        from cuda.bindings import runtime
    except ImportError:  # as on macOS
        yield
        return
    version, runtime.getLocalRuntimeVersion = runtime.getLocalRuntimeVersion, lambda: (0, 0)
    try:
        yield
    finally:
        runtime.getLocalRuntimeVersion = version


@functools.cache
def transfer_hints():
    """Return the module with `ArgHint`, `In`, `Out` and `InOut`."""
    return _first("numba.cuda.simulator.args", "numba.cuda.args")


@functools.cache
def numpy_support():
    """Return the module that converts Numba's types to dtypes."""
    return _first("numba.cuda.np.numpy_support", "numba.np.numpy_support")


def _first(*names):
    """Return the first of these modules that exists."""
    for name in names[:-1]:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])
