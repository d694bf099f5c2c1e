"""The compilers that can make machine code of the package's kernels, and which one does."""

import functools
import importlib.metadata
import os
import sys

VARIABLE = "MOE_NUMBA_COMPILER"  # environment variable
DEFAULT, MLIR = "numba-cuda", "mlir"

# Distributions whose versions machine code depends on.
_COMMON = ("numba", "llvmlite", "cuda-core", "cuda-bindings")
DISTRIBUTIONS = {DEFAULT: ("numba-cuda", *_COMMON), MLIR: ("numba-cuda-mlir", *_COMMON)}


def chosen():
    """Return the compiler that `VARIABLE` names, ``"numba-cuda"`` or ``"mlir"``."""
    name = os.environ.get(VARIABLE) or DEFAULT
    if name not in DISTRIBUTIONS:
        raise ValueError(f"{VARIABLE} is {name!r}; allowed are {', '.join(DISTRIBUTIONS)}")
    return name


def version(distribution):
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(compiler):
    """Return ``{distribution: version}`` of what a compiler consists of, as far as it is installed."""
    return {name: found for name in DISTRIBUTIONS[compiler] if (found := version(name))}


@functools.cache
def missing():
    """Return what to install before kernels can be compiled and disassembled here, as a sentence, or None."""
    from moe_numba.runtime.sass import disassembler

    if sys.platform == "darwin":
        return "there is no CUDA compiler for macOS"
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for library in ("nvrtc", "nvvm", "nvJitLink"):
            load_nvidia_dynamic_lib(library)
    except (ImportError, RuntimeError):  # cuda.pathfinder's DynamicLibNotFoundError is a RuntimeError
        return "CUDA's compiler is not installed: pip install 'moe_numba[cu13]'"
    return None if disassembler() else "nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
