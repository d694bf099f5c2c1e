"""Compiled programs kept on disk, so that the next process does not compile them again.

A program is found by what it was made from: the package's sources, its constants, and the compilers' versions. One that
was made from anything else is another program. Files are never changed, only added; to remove them is safe.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import tempfile
from functools import cache
from pathlib import Path

FOLDER = "MOE_NUMBA_CACHE"  # environment variable: another folder, or "0" for none
_COMPILERS = ("numba", "numba-cuda", "llvmlite", "cuda-core", "cuda-bindings")


def folder():
    """Where programs are kept, or None."""
    named = os.environ.get(FOLDER)
    if named == "0":
        return None
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_numba"


def load_or_make(key, make):
    """The bytes that ``make`` gives, from disk if they are there; ``key`` tells this program from the others."""
    where = folder()
    if where is None or key is None:
        return make()
    path = where / f"{hashlib.sha256(f'{_origin()} {key!r}'.encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    data = make()
    with contextlib.suppress(OSError):  # a disk that is full or read-only costs time, and nothing else
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=where, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)  # at once: another process finds all of it or nothing
    return data


@cache
def _origin():
    """The package's sources and the compilers' versions, as one string."""
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
