"""A cache of machine code on disk.

An entry's key hashes everything that the code depends on: the package's sources, the kernel's configuration and the
versions of the compilers. Files are added and never changed; deleting them is safe.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import tempfile
from functools import cache
from pathlib import Path

FOLDER = "MOE_NUMBA_CACHE"  # environment variable: another folder, or "0" for no cache
_COMPILERS = ("numba", "numba-cuda", "llvmlite", "cuda-core", "cuda-bindings")


def folder():
    """The cache folder, or None if the cache is off."""
    named = os.environ.get(FOLDER)
    if named == "0":
        return None
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_numba"


def load_or_make(key, make):
    """Return the entry of ``key``; on a miss call ``make()`` and store the bytes that it returns."""
    where = folder()
    if where is None or key is None:
        return make()
    path = where / f"{hashlib.sha256(f'{_origin()} {key!r}'.encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    data = make()
    with contextlib.suppress(OSError):  # a full or read-only disk costs time and nothing else
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=where, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)  # atomic: another process sees the whole file or none
    return data


@cache
def _origin():
    """A digest of the package's sources, and the compilers' versions."""
    from cuda.bindings import nvjitlink, nvrtc

    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh", ".h") and path.relative_to(root).parts[0] != "course":
            digest.update(path.read_bytes())
    versions = [platform.python_version()]
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(importlib.metadata.version(name))
    return " ".join([digest.hexdigest(), *versions, str(nvjitlink.version()), str(nvrtc.nvrtcVersion()[1:])])
