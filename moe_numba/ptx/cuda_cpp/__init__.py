"""The other door to what Numba cannot say: device functions in CUDA C++, linked and called through pointers.

This is the way that Numba documents. A ``.cu`` file beside this one has functions that hold PTX; ``declared`` tells
Numba of them; a kernel passes arrays as pointers that ``ffi.from_buffer`` makes. A function here has the name of the
intrinsic that does the same, and its arguments in the same order, so that a kernel changes its import and wraps its
arrays:

    tensormap_replace_global_address(smem, at, pointer, index)                    # moe_numba.ptx.tensormap
    tensormap_replace_global_address(ffi.from_buffer(smem), at, pointer, index)   # moe_numba.ptx.cuda_cpp.tensormap

Pointers are to bytes (``uint8``), but for accumulators, and what is counted from them is counted in bytes. Whatever
links the kernel must link the file: ``kernel[grid, block](...)`` does that by itself. Linked while both are
intermediate code (LTO, what Numba does where it can) the call is gone. Linked from PTX it stays a call, and what it is
given lies in memory.
"""

from pathlib import Path

from moe_numba import simulator

__all__ = ["declared", "ffi", "source"]

_TYPES = {"uint8*": "CPointer(uint8)", "float32*": "CPointer(float32)"}


class _SimulatedFFI:
    """What of ``cffi.FFI`` a kernel uses."""

    @staticmethod
    def from_buffer(array):
        """The array as a pointer to its first element."""
        if not isinstance(array, simulator.Array):
            raise TypeError(f"ffi.from_buffer takes an array, but got {type(array).__name__}")
        return array.pointer()


def _make_ffi():
    if simulator.ENABLED:
        return _SimulatedFFI()
    import cffi

    return cffi.FFI()


ffi = _make_ffi()


def source(name):
    """The path of a file of device functions, as ``link=`` takes it."""
    return str(Path(__file__).with_name(f"{name}.cu"))


def declared(name, file, *operands, simulate):
    """Declare a device function of a file.

    Parameters
    ----------
    name : str
        As the file has it, ``extern "C"``. It returns an ``int``, which is 0: Numba's ``void`` is not C++'s, and a
        linker of PTX compares the two.
    file : str
        ``"tensormap"`` or ``"wgmma"``.
    *operands : str
        ``"uint8*"``, ``"float32*"`` or the name of a number's type.
    simulate : callable
        What the function means, in Python; it takes the same arguments.
    """
    if simulator.ENABLED:
        return simulate
    from numba import cuda

    signature = f"int32({', '.join(_TYPES.get(operand, operand) for operand in operands)})"
    return cuda.declare_device(name, signature, link=source(file), abi="c")
