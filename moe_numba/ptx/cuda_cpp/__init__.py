"""Device functions in CUDA C++ with inline PTX, as an alternative to intrinsics; the way that Numba documents.

The ``.cu`` files in this folder define the functions, ``declared`` declares them to Numba, and a kernel passes arrays
as pointers made by ``ffi.from_buffer``. A function has the name of the equivalent intrinsic and the same argument
order, so a kernel only changes its import and wraps its arrays:

    tensormap_replace_global_address(smem, offset, pointer, index)                    # moe_numba.ptx.tensormap
    tensormap_replace_global_address(ffi.from_buffer(smem), offset, pointer, index)   # moe_numba.ptx.cuda_cpp.tensormap

Pointers are to bytes (``uint8``), except for accumulators, and offsets count bytes. The kernel must be linked with the
file; ``kernel[grid, block](...)`` does so automatically. With link-time optimisation (LTO, Numba's default where
available) the call is inlined. Linked from PTX it remains a call, and its pointer arguments force data into memory.
"""

from pathlib import Path

from moe_numba import simulator

__all__ = ["declared", "ffi", "source"]

_TYPES = {"uint8*": "CPointer(uint8)", "float32*": "CPointer(float32)"}


class _SimulatedFFI:
    """The part of ``cffi.FFI`` that kernels use."""

    @staticmethod
    def from_buffer(array):
        """Return a pointer to the first element of an array."""
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
    """Return the path of a ``.cu`` file, as ``link=`` takes it."""
    return str(Path(__file__).with_name(f"{name}.cu"))


def declared(name, file, *operands, simulate):
    """Declare a device function of a file.

    Parameters
    ----------
    name : str
        Name of the ``extern "C"`` function. It returns an ``int`` 0, since Numba's ``void`` differs from C++'s and the
        PTX linker compares the two.
    file : str
        ``"tensormap"`` or ``"wgmma"``.
    *operands : str
        ``"uint8*"``, ``"float32*"`` or the name of a scalar type.
    simulate : callable
        Python implementation for the simulator, with the same arguments.
    """
    if simulator.ENABLED:
        return simulate
    from numba import cuda

    signature = f"int32({', '.join(_TYPES.get(operand, operand) for operand in operands)})"
    made = cuda.declare_device(name, signature, link=source(file), abi="c")
    made.__module__, made.link = simulate.__module__, source(file)  # Numba does not keep the path in it
    return made
