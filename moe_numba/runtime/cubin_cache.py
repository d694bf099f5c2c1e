"""A cache of machine code on disk.

An entry's key hashes everything that the code depends on: the package's sources, the kernel, its signature and the
versions of the compiler. An entry starts with a digest of its content; a damaged one is made again. Deleting files is
safe. Machine code runs with all rights of the process, so folders and files that another user could have written are
not read.

A folder that ``MOE_NUMBA_CUBINS`` names holds cubins made elsewhere, such as on a machine with a compiler that this one
lacks (``moe_numba.course.bench.records.export_cubins`` makes it). Kernels then come from it alone: one that it lacks is
an error. Its keys leave out the versions of compilers, which are not needed to load a cubin.
"""

import contextlib
import hashlib
import os
import platform
import stat
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path

from moe_numba.runtime import compilers
from moe_numba.runtime.compile import SM_90A, compile_kernel
from moe_numba.runtime.kernel_key import kernel_key

FOLDER = "MOE_NUMBA_CACHE"  # environment variable: another folder, or "0" for no cache
CUBINS = "MOE_NUMBA_CUBINS"  # environment variable: a folder of cubins made elsewhere
_DIGEST_BYTES = 32
_LOCK_S = 60.0  # a process waits for another one's compiler at most so long


def folder():
    """Return the cache folder, or None if the cache is off."""
    named = os.environ.get(FOLDER)
    if named == "0":
        return None
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "moe_numba"


def machine_code(kernel, signature, *, arch=SM_90A, link_arch=None, launch_bounds=None, cpp_entry=False):
    """Return a kernel's cubin and the name of its entry, from the cache or compiled; no GPU is needed.

    Parameters as for :func:`moe_numba.runtime.compile.compile_kernel`. Only kernels of this package are cached.
    """

    compiler = compilers.chosen()
    options = dict(arch=arch, link_arch=link_arch or arch, launch_bounds=launch_bounds, cpp_entry=cpp_entry)

    def make():
        compiled = compile_kernel(kernel, signature, **options, compiler=compiler)
        return compiled.name.encode() + b"\n" + compiled.code.code

    key = kernel_key(kernel)
    full_key = f"{key} {signature} {options}"
    if made_elsewhere := os.environ.get(CUBINS):
        path = exported_path(Path(made_elsewhere), full_key, compiler)
        entry = key and _read(path)
        if entry is None:
            raise LookupError(
                f"{made_elsewhere}, which {CUBINS} names, has no cubin of {kernel.py_func.__qualname__} by {compiler} "
                f"for {signature} and {options}: {path.name} is missing or another user can write it"
            )
    else:
        entry = make() if key is None else load_or_make(full_key, make, compiler)
    name, _, cubin = entry.partition(b"\n")
    return cubin, name.decode()


def export(kernel, signature, folder, compiler, *, arch=SM_90A, launch_bounds=None):
    """Compile a kernel into a folder that `CUBINS` may name elsewhere; return the size of the file in bytes.

    The Python there must have the same minor version: a kernel is identified by its bytecode.
    """
    options = dict(arch=arch, link_arch=arch, launch_bounds=launch_bounds, cpp_entry=False)
    path = exported_path(folder, f"{kernel_key(kernel)} {signature} {options}", compiler)
    if not path.exists():
        compiled = compile_kernel(kernel, signature, **options, compiler=compiler)
        _write(path, compiled.name.encode() + b"\n" + compiled.code.code)
    return path.stat().st_size


def exported_path(folder, key, compiler):
    """Return the file of a kernel in a folder of cubins made elsewhere."""
    return folder / f"{hashlib.sha256(f'{compiler} {key}'.encode()).hexdigest()}.cubin"


def load_or_make(key, make, compiler=compilers.DEFAULT):
    """Return the entry of ``key``, a string; on a miss call ``make()`` and store the bytes that it returns."""
    where = folder()
    if where is None or not _make_private(where):
        return make()
    path = where / f"{hashlib.sha256(f'{_origin(compiler)} {key}'.encode()).hexdigest()}.cubin"
    data = _read(path)
    if data is None:
        with _only_one_process(path):
            data = _read(path)  # another process may have made it meanwhile
            if data is None:
                data = make()
                _write(path, data)
    return data


@contextlib.contextmanager
def _only_one_process(path):
    """Hold the lock of an entry, so that other processes that need it wait for the one that makes it.

    A process that cannot have the lock in time makes the entry as well, which costs time and nothing else.
    """
    try:
        import fcntl

        lock = path.with_suffix(".lock")
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except (ImportError, OSError):
        yield
        return
    end = time.monotonic() + _LOCK_S
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.01)
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()  # before the lock is released: a process that waits for it finds the entry
        os.close(file)


def _make_private(where):
    """Make the folder if necessary; return whether it belongs to this user and no other user can write to it."""
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_private(where.stat()):
            return True
    except OSError:  # a read-only disk costs time and nothing else
        return False
    warnings.warn(
        f"the cache folder {where} belongs to another user, or others can write to it: compiled kernels are not "
        f"cached (set {FOLDER} to a folder of your own)",
        stacklevel=2,
    )
    return False


def _is_private(status):
    return os.name == "nt" or (status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _read(path):
    """Return the content of an entry, or None if it is missing, damaged, or not a private regular file."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not (stat.S_ISREG(status.st_mode) and _is_private(status)):
                return None
            entry = file.read()
    except OSError:
        return None
    digest, data = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    return data if digest == hashlib.sha256(data).digest() else None


def _write(path, data):
    """Write an entry under a temporary name and rename it, so that other processes see all of it or nothing."""
    with contextlib.suppress(OSError):  # a full disk costs time and nothing else
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(data).digest() + data)
                file.close()
                os.replace(file.name, path)
            except BaseException:  # also when interrupted
                file.close()
                os.unlink(file.name)
                raise


@cache
def _origin(compiler):
    """Return a digest of the package's sources, and the versions of what a compiler consists of."""
    from cuda.bindings import nvjitlink, nvrtc

    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh", ".h") and path.relative_to(root).parts[0] != "course":
            digest.update(path.read_bytes())
    versions = platform.python_version(), *compilers.versions(compiler).items()
    tools = nvjitlink.version(), nvrtc.nvrtcVersion()[1:]
    return " ".join(map(str, [digest.hexdigest(), compiler, *versions, *tools]))
