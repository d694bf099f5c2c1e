"""Compile system-scope accesses without a GPU: each becomes the expected instruction."""

from helpers.hopper_compile import compile_whole

from moe_numba import simulator  # noqa: F401  before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda

from moe_numba.ptx import atomics, fence, memory, system_vectors


@cuda.jit(launch_bounds=(32, 1))
def every_access(peers, local, out):
    remote = memory.pointer_from_address(peers[cuda.threadIdx.x], local)
    a = atomics.ld_acquire_sys_s32(local, 0)
    b = atomics.ld_relaxed_sys_s32(local, 1)
    c = atomics.ld_volatile_s32(local, 2)
    d = atomics.atom_add_relaxed_sys_s32(remote, 3, a)
    atomics.red_add_relaxed_sys_s32(remote, 4, b)
    atomics.red_add_release_sys_s32(remote, 5, c)
    atomics.st_relaxed_sys_s32(remote, 6, d)
    fence.fence_acq_rel_gpu()
    memory.st_na_s32x4(remote, 8, *memory.ld_global_s32x4(local, 12))
    memory.st_na_s32x4(remote, 16, *memory.ld_nc_na_s32x4(out, 20))
    fence.fence_acq_rel_sys()
    atomics.st_release_sys_s32(remote, 7, d)
    remote[24] = a


def test_each_access_is_one_instruction():
    report = compile_whole({"": ("test_system_compile", "every_access", ["uint64*", "int32*", "int32*"])})[""]
    assert report.spilled_bytes == 0
    found = "\n".join(report.opcodes)
    assert report.count("LDG.E.STRONG.SYS") >= 3, found  # the ld.acquire, the relaxed one and the volatile one
    assert report.count("STG.E.STRONG.SYS") >= 2, found
    assert report.count("ATOMG.E.ADD.S32.STRONG.SYS") == 1 and report.count("REDG.E.ADD.S32.STRONG.SYS") == 2, found
    assert report.count("MEMBAR.ALL.GPU") == 1 and report.count("MEMBAR.ALL.SYS") == 3, found  # fences, and releases
    assert report.count("STG.E.NA.128") == 2, found
    assert report.count("LDG.E.128") == 1, found
    assert report.count("LDG.E.NA.LTC256B.128.CONSTANT") == 1, found
    assert report.count("STG.E") == 5 and not report.count("ST"), found  # pointers from addresses are global


@cuda.jit(launch_bounds=(32, 1))
def every_vector(local, out):
    a, b, c, d = system_vectors.ld_relaxed_sys_s32x4(local, 0)
    e, f, g, h = system_vectors.ld_acquire_sys_s32x4(local, 4)
    system_vectors.st_relaxed_sys_s32x4(out, 8, a + e, b + f, c + g, d + h)
    system_vectors.st_relaxed_sys_u64(out, 12, system_vectors.ld_relaxed_sys_u64(local, 14))


def test_each_vector_is_one_instruction():
    report = compile_whole({"": ("test_system_compile", "every_vector", ["int32*", "int32*"])})[""]
    found = "\n".join(report.opcodes)
    assert report.spilled_bytes == 0
    assert report.count("LDG.E.128.STRONG.SYS") == 2 and report.count("STG.E.128.STRONG.SYS") == 1, found
    assert report.count("LDG.E.64.STRONG.SYS") == 1 and report.count("STG.E.64.STRONG.SYS") == 1, found
