"""Vector loads and stores, cache hints, pointers from addresses, and programmatic dependent launch."""

import numpy as np
from numba import cuda

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, instruction


def load_nc_u32x1(pointer, index):
    """``ld.global.nc.u32``: load 4 bytes at element ``index`` of memory that is read-only during the kernel."""
    return pointer.load_vector(index, np.uint32, 1)[0]


def load_nc_u32x2(pointer, index):
    """``ld.global.nc.v2.u32``: load 8 bytes, 8-byte aligned, at element ``index`` of read-only memory."""
    return pointer.load_vector(index, np.uint32, 2)


def load_nc_u32x4(pointer, index):
    """``ld.global.nc.v4.u32``: load 16 bytes, 16-byte aligned, at element ``index`` of read-only memory."""
    return pointer.load_vector(index, np.uint32, 4)


def load_nc_u16(pointer, index):
    """``ld.global.nc.u16``: load 2 bytes at element ``index`` of read-only memory, zero-extended to 32 bits."""
    return np.uint32(pointer.load_vector(index, np.uint16, 1)[0])


load_nc_u32x1 = instruction("ld.global.nc.u32 $0, [$1];", "u32", POINTER, simulate=load_nc_u32x1)
load_nc_u32x2 = instruction("ld.global.nc.v2.u32 {$0, $1}, [$2];", "u32 x 2", POINTER, simulate=load_nc_u32x2)
load_nc_u32x4 = instruction("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", "u32 x 4", POINTER, simulate=load_nc_u32x4)
load_nc_u16 = instruction(
    "{ .reg .u16 h; ld.global.nc.u16 h, [$1]; cvt.u32.u16 $0, h; }", "u32", POINTER, simulate=load_nc_u16
)


def st_global_s32x4(pointer, index, a, b, c, d):
    """``st.global.v4.s32``: store 16 bytes, 16-byte aligned, at element ``index``."""
    pointer.store_vector(index, (a, b, c, d), np.int32)


st_global_s32x4 = instruction(
    "st.global.v4.s32 [$0], {$1, $2, $3, $4};", "void", POINTER, "s32", "s32", "s32", "s32", simulate=st_global_s32x4
)


def st_global_s32x2(pointer, index, a, b):
    """``st.global.v2.s32``: store 8 bytes, 8-byte aligned, at element ``index``."""
    pointer.store_vector(index, (a, b), np.int32)


st_global_s32x2 = instruction(
    "st.global.v2.s32 [$0], {$1, $2};", "void", POINTER, "s32", "s32", simulate=st_global_s32x2
)


def atom_add_s32(pointer, index, value):
    """``atom.global.add.s32``: add to element ``index`` atomically and return the old value."""
    return cuda.atomic.add(pointer, index, value)


atom_add_s32 = instruction("atom.global.add.s32 $0, [$1], $2;", "s32", POINTER, "s32", simulate=atom_add_s32)


def griddepcontrol_wait():
    """``griddepcontrol.wait``: wait until the prerequisite grids have completed and their writes are visible.

    A no-op unless the grid was launched with programmatic dependent launch, which starts at compute capability 9.0.
    """
    t = simulator.thread()
    t.grid.waited.add(t.block)
    if t.grid.world.races is not None:
        t.grid.world.races.wait_for_prerequisite(t)


def griddepcontrol_launch_dependents():
    """``griddepcontrol.launch_dependents``: allow the next grid in the stream to start its blocks.

    A no-op below compute capability 9.0.
    """
    t = simulator.thread()
    t.grid.allow_next(t.block)


def _no_dependent_launch():
    pass


griddepcontrol_wait = instruction(
    "griddepcontrol.wait;", "void", simulate=griddepcontrol_wait, fallback=_no_dependent_launch
)
griddepcontrol_launch_dependents = instruction(
    "griddepcontrol.launch_dependents;",
    "void",
    simulate=griddepcontrol_launch_dependents,
    fallback=_no_dependent_launch,
)


def st_shared_s32x4(array, index, a, b, c, d):
    """``st.shared.v4.s32``: store 16 bytes, 16-byte aligned, at element ``index`` of a shared array."""
    array.pointer().store_vector(index, (a, b, c, d), np.int32)


def ld_shared_s32x4(array, index):
    """``ld.shared.v4.s32``: load 16 bytes, 16-byte aligned, at element ``index`` of a shared array."""
    return array.pointer().load_vector(index, np.int32, 4)


st_shared_s32x4 = instruction(
    "st.shared.v4.s32 [$0], {$1, $2, $3, $4};", "void", SHARED, "s32", "s32", "s32", "s32", simulate=st_shared_s32x4
)
ld_shared_s32x4 = instruction("ld.shared.v4.s32 {$0, $1, $2, $3}, [$4];", "s32 x 4", SHARED, simulate=ld_shared_s32x4)


def ld_global_s32x4(pointer, index):
    """``ld.global.v4.s32``: load 16 bytes, 16-byte aligned, at element ``index``."""
    return pointer.load_vector(index, np.int32, 4)


def ld_nc_na_s32x4(pointer, index):
    """``ld.global.nc.L1::no_allocate.L2::256B.v4.s32``: load 16 bytes, 16-byte aligned.

    The load does not allocate in L1 and prefetches 256 bytes into L2. ``nc`` requires that no thread writes the memory
    during the kernel. Reading what another GPU writes concurrently is undefined even after an acquire; DeepEP does so.
    """
    return pointer.load_vector(index, np.int32, 4)


def st_na_s32x4(pointer, index, a, b, c, d):
    """``st.global.L1::no_allocate.v4.s32``: store 16 bytes, 16-byte aligned, at element ``index``, not cached in L1."""
    pointer.store_vector(index, (a, b, c, d), np.int32)


ld_global_s32x4 = instruction("ld.global.v4.s32 {$0, $1, $2, $3}, [$4];", "s32 x 4", POINTER, simulate=ld_global_s32x4)
ld_nc_na_s32x4 = instruction(
    "ld.global.nc.L1::no_allocate.L2::256B.v4.s32 {$0, $1, $2, $3}, [$4];", "s32 x 4", POINTER, simulate=ld_nc_na_s32x4
)
st_na_s32x4 = instruction(
    "st.global.L1::no_allocate.v4.s32 [$0], {$1, $2, $3, $4};",
    *("void", POINTER, "s32", "s32", "s32", "s32"),
    simulate=st_na_s32x4,
)


def pointer_from_address(address, like):
    """Convert an integer, such as the address of a peer's buffer, to a pointer of the type of ``like``.

    ``like`` is a pointer argument of the kernel. In the simulator the address must lie in a buffer registered with
    ``simulator.register``.
    """
    return simulator.ranks.pointer_at(address, like)


def _pointer_from_address():
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    def typing(typingctx, address, like):
        if not isinstance(like, types.CPointer) or not isinstance(address, types.Integer):
            return None

        def codegen(context, builder, signature, values):
            generic, i64 = context.get_value_type(signature.return_type), ir.IntType(64)
            # NVVM of CUDA 13.0 does not finish compiling loops that load vectors, in a kernel in which it sees that a
            # pointer was a number. The assembler removes the move.
            move = ir.InlineAsm(ir.FunctionType(i64, [i64]), "mov.b64 $0, $1;", "=l,l")
            moved = builder.inttoptr(builder.call(move, [values[0]]), generic.pointee.as_pointer(1))
            # Casting through the global address space makes accesses through the pointer global instead of generic.
            return builder.addrspacecast(moved, generic)

        return like(types.uint64, like), codegen

    typing.__name__, typing.__doc__ = pointer_from_address.__name__, pointer_from_address.__doc__
    return intrinsic(typing)


if not simulator.ENABLED:
    pointer_from_address = _pointer_from_address()
