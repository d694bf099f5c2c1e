"""The accesses at system scope compile for a Hopper GPU without one, each to the machine code that it should be."""

from helpers.hopper_compile import compile_whole

from moe_numba import simulator  # noqa: F401  before numba: it chooses the engine

# isort: split
from numba import cuda

from moe_numba.ptx import atomics, fence, memory


def make_everything():
    """A kernel with one of each."""

    @cuda.jit(launch_bounds=(32, 1))
    def everything(peers, mine, out):
        theirs = memory.pointer_from_address(peers[cuda.threadIdx.x], mine)
        a = atomics.ld_acquire_sys_s32(mine, 0)
        b = atomics.ld_relaxed_sys_s32(mine, 1)
        c = atomics.ld_volatile_s32(mine, 2)
        d = atomics.atom_add_relaxed_sys_s32(theirs, 3, a)
        atomics.red_add_relaxed_sys_s32(theirs, 4, b)
        atomics.red_add_release_sys_s32(theirs, 5, c)
        atomics.st_relaxed_sys_s32(theirs, 6, d)
        fence.fence_acq_rel_gpu()
        memory.st_na_s32x4(theirs, 8, *memory.ld_global_s32x4(mine, 12))
        memory.st_na_s32x4(theirs, 16, *memory.ld_nc_na_s32x4(out, 20))
        fence.fence_acq_rel_sys()
        atomics.st_release_sys_s32(theirs, 7, d)
        theirs[24] = a

    return everything


def test_each_access_is_there():
    (report,) = compile_whole([["test_system_compile", "make_everything", [], ["uint64*", "int32*", "int32*"]]])
    assert report.spilled == 0
    found = "\n".join(report.instructions)
    assert report.count("LDG.E.STRONG.SYS") >= 3, found  # the ld.acquire, the relaxed one and the volatile one
    assert report.count("STG.E.STRONG.SYS") >= 2, found
    assert report.count("ATOMG.E.ADD.S32.STRONG.SYS") == 1 and report.count("REDG.E.ADD.S32.STRONG.SYS") == 2, found
    assert report.count("MEMBAR.ALL.GPU") == 1 and report.count("MEMBAR.ALL.SYS") == 3, found  # fences, and releases
    assert report.count("STG.E.NA.128") == 2, found
    assert report.count("LDG.E.128") == 1, found
    assert report.count("LDG.E.NA.LTC256B.128.CONSTANT") == 1, found
    assert report.count("STG.E") == 5 and not report.count("ST"), found  # a pointer from an address is a global one
