"""Accesses at system scope: how kernels of several GPUs hand over data, each storing into the others' memory.

Data first, then a flag: *release* promises that whoever *acquires* the flag sees the data as well, also what other
threads of the block stored before a barrier with the one that releases. *Relaxed* and *volatile* promise nothing about
the accesses around them.
"""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, instruction


def ld_acquire_sys_s32(pointer, index):
    """``ld.acquire.sys.global.s32``: element ``index``; what came before the store that released it is visible now."""
    return simulator.scoped.load("ld.acquire.sys", pointer, index, acquire=True)


def ld_relaxed_sys_s32(pointer, index):
    """``ld.relaxed.sys.global.s32``: element ``index``, which threads of any GPU may write meanwhile."""
    return simulator.scoped.load("ld.relaxed.sys", pointer, index)


def ld_volatile_s32(pointer, index):
    """``ld.volatile.global.s32``: element ``index``, read anew each time; to the memory model it is relaxed."""
    return simulator.scoped.load("ld.volatile", pointer, index)


def st_release_sys_s32(pointer, index, value):
    """``st.release.sys.global.s32``: to element ``index``, after all that this thread has stored or seen."""
    simulator.scoped.store(pointer, index, value, release=True)


def st_relaxed_sys_s32(pointer, index, value):
    """``st.relaxed.sys.global.s32``: to element ``index``, undivided; in no order with other stores."""
    simulator.scoped.store(pointer, index, value)


def atom_add_relaxed_sys_s32(pointer, index, value):
    """``atom.relaxed.sys.global.add.s32``: add to element ``index``; gives what was there before."""
    return simulator.scoped.add(pointer, index, value)


def red_add_relaxed_sys_s32(pointer, index, value):
    """``red.relaxed.sys.global.add.s32``: the same where no result is needed, so that nobody waits for its way back."""
    simulator.scoped.add(pointer, index, value)


def red_add_release_sys_s32(pointer, index, value):
    """``red.release.sys.global.add.s32``: the same, after all that this thread has stored or seen."""
    simulator.scoped.add(pointer, index, value, release=True)


def fence_acq_rel_gpu():
    """``fence.acq_rel.gpu``: orders this thread's accesses before it and after it, for all threads of this GPU."""
    simulator.scoped.fence()


def fence_acq_rel_sys():
    """``fence.acq_rel.sys``: the same for all threads of all GPUs, and for the host."""
    simulator.scoped.fence()


ld_acquire_sys_s32 = instruction("ld.acquire.sys.global.s32 $0, [$1];", "s32", POINTER, simulate=ld_acquire_sys_s32)
ld_relaxed_sys_s32 = instruction("ld.relaxed.sys.global.s32 $0, [$1];", "s32", POINTER, simulate=ld_relaxed_sys_s32)
ld_volatile_s32 = instruction("ld.volatile.global.s32 $0, [$1];", "s32", POINTER, simulate=ld_volatile_s32)
st_release_sys_s32 = instruction(
    "st.release.sys.global.s32 [$0], $1;", "void", POINTER, "s32", simulate=st_release_sys_s32
)
st_relaxed_sys_s32 = instruction(
    "st.relaxed.sys.global.s32 [$0], $1;", "void", POINTER, "s32", simulate=st_relaxed_sys_s32
)
atom_add_relaxed_sys_s32 = instruction(
    "atom.relaxed.sys.global.add.s32 $0, [$1], $2;", "s32", POINTER, "s32", simulate=atom_add_relaxed_sys_s32
)
red_add_relaxed_sys_s32 = instruction(
    "red.relaxed.sys.global.add.s32 [$0], $1;", "void", POINTER, "s32", simulate=red_add_relaxed_sys_s32
)
red_add_release_sys_s32 = instruction(
    "red.release.sys.global.add.s32 [$0], $1;", "void", POINTER, "s32", simulate=red_add_release_sys_s32
)
fence_acq_rel_gpu = instruction("fence.acq_rel.gpu;", "void", simulate=fence_acq_rel_gpu)
fence_acq_rel_sys = instruction("fence.acq_rel.sys;", "void", simulate=fence_acq_rel_sys)


def ld_global_s32x4(pointer, index):
    """``ld.global.v4.s32``: 16 bytes, 16-byte aligned, from element ``index``, as four integers."""
    return pointer.load_vector(index, np.int32, 4)


def ld_nc_na_s32x4(pointer, index):
    """``ld.global.nc.L1::no_allocate.L2::256B.v4.s32``: the same, past the L1; 256 bytes come to the L2.

    ``nc`` says that nobody writes there during the kernel. To read by it what another GPU writes meanwhile is
    undefined, flags or no flags, though DeepEP does it.
    """
    return pointer.load_vector(index, np.int32, 4)


def st_na_s32x4(pointer, index, a, b, c, d):
    """``st.global.L1::no_allocate.v4.s32``: 16 bytes, 16-byte aligned, to element ``index``; the L1 keeps no copy."""
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
    """The pointer that an integer stands for, such as the address of a peer's buffer; it has the type of ``like``.

    ``like`` is a pointer that the kernel was given. In the simulator the address must lie in a buffer that
    ``simulator.register`` knows.
    """
    return simulator.ranks.at(address, like)


def _pointer_from_address():
    from numba import types
    from numba.cuda.extending import intrinsic

    def typing(typingctx, address, like):
        if not isinstance(like, types.CPointer) or not isinstance(address, types.Integer):
            return None

        def codegen(context, builder, signature, values):
            generic = context.get_value_type(signature.return_type)
            # By way of global memory, so that what the kernel reads and writes through it are global accesses.
            return builder.addrspacecast(builder.inttoptr(values[0], generic.pointee.as_pointer(1)), generic)

        return like(types.uint64, like), codegen

    typing.__name__, typing.__doc__ = pointer_from_address.__name__, pointer_from_address.__doc__
    return intrinsic(typing)


if not simulator.ENABLED:
    pointer_from_address = _pointer_from_address()
