"""The compilers that can make machine code of the package's kernels, and which one does."""

import importlib.metadata
import os

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
