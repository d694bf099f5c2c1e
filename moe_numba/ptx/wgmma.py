"""wgmma: four warps multiply matrices that lie in shared memory, while they do something else.

One instruction adds to a 64 x n tile of float32 the product of 64 rows of A and n rows of B, 32 bytes of each (K-major:
a row's elements lie side by side). A thread holds n / 2 of the results, its fragment:
``d[4 j + 2 h + i]`` is row ``16 w + l // 4 + 8 h``, column ``8 j + 2 (l % 4) + i``, for lane l of its warp w.

The instruction only starts the work. Its results exist, and the operands' memory is free again, when
``make_wgmma_wait`` has waited for the group that it was committed to. Results must be passed through that wait.
A warpgroup is four warps, from a multiple of four on; all their lanes must come.
"""

from functools import cache

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.accumulators import assembly
from moe_numba.ptx.intrinsic import SHARED, instruction

_TYPES = {"e4m3": ("e4m3.e4m3", 32, "1, 1"), "bf16": ("bf16.bf16", 16, "1, 1, 0, 0")}

# Swizzle mode, and the bytes from 8 rows to the next 8, in the bits where a descriptor has them.
_SWIZZLE_128 = 1 << 62 | (1024 >> 4) << 32 | 1 << 16
_SWIZZLE_64 = 2 << 62 | (512 >> 4) << 32 | 1 << 16


def wgmma_descriptor(array, at):
    """Where a tile lies in shared memory: rows of 128 bytes with the 128-byte swizzle, as TMA leaves them.

    ``at`` is the element that the tile starts at, a multiple of 8 rows that are aligned to 1024 bytes. A descriptor
    counts in units of 16 bytes: ``descriptor + uint64(2)`` is 32 bytes further along the rows, one instruction's share.
    """
    return np.uint64(_SWIZZLE_128 | simulator.wgmma.address(array, at))


def wgmma_descriptor_64b(array, at):
    """The same for rows of 64 bytes with the 64-byte swizzle; 8 of them are aligned to 512 bytes."""
    return np.uint64(_SWIZZLE_64 | simulator.wgmma.address(array, at))


def _descriptor(bits, simulate):
    template = (
        "{ .reg .b32 a; .reg .b64 d; and.b32 a, $1, 0x3FFFF; shr.u32 a, a, 4; cvt.u64.u32 d, a; "
        f"or.b64 $0, d, {bits:#x}; }}"
    )
    return instruction(template, "u64", SHARED, simulate=simulate, side_effect=False)


wgmma_descriptor = _descriptor(_SWIZZLE_128, wgmma_descriptor)
wgmma_descriptor_64b = _descriptor(_SWIZZLE_64, wgmma_descriptor_64b)


def wgmma_fence():
    """``wgmma.fence.sync.aligned``: what this warp did to the accumulators' registers comes before the next wgmma."""
    simulator.wgmma.fence()


def wgmma_commit_group():
    """``wgmma.commit_group.sync.aligned``: the wgmmas that this warp started since the last one are a group."""
    simulator.wgmma.commit()


wgmma_fence = instruction("wgmma.fence.sync.aligned;", "void", simulate=wgmma_fence)
wgmma_commit_group = instruction("wgmma.commit_group.sync.aligned;", "void", simulate=wgmma_commit_group)


def _check(n, dtype):
    if dtype not in _TYPES or n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma multiplies e4m3 or bf16, n a multiple of 8 up to 256; not {dtype}, n {n}")


def _instruction(n, dtype, registers, a, b, scale_d):
    types, k, rest = _TYPES[dtype]
    return (
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{types} {{{', '.join(registers)}}}, {a}, {b}, {scale_d}, {rest};"
    )


@cache
def make_wgmma(n, dtype):
    """``wgmma(acc, a, b, scale_d)``: one instruction; gives ``acc * scale_d + A B^T``, where scale_d is 0 or 1.

    ``dtype`` is ``"e4m3"`` (32 elements of k) or ``"bf16"`` (16). It needs ``wgmma_fence`` before it, unless the
    instruction before it was a wgmma on the same accumulators, and ``wgmma_commit_group`` after it.
    """

    _check(n, dtype)

    def wgmma(acc, a, b, scale_d):
        return simulator.wgmma.multiply(n, dtype, int(a), int(b), acc if scale_d else None)

    def template(registers, a, b, scale_d):
        mma = _instruction(n, dtype, registers, a, b, "p")
        return f"{{ .reg .pred p; setp.ne.b32 p, {scale_d}, 0; {mma} }}"

    return assembly(template, n // 2, ("u64", "u64", "s32"), tied=True, simulate=wgmma)


@cache
def make_wgmma_tile(n, dtype, steps=4, accumulate=False):
    """``tile(a, b)``: fence, ``steps`` wgmmas along k and commit, in one piece, between which nothing can come.

    Gives A B^T over ``steps`` times 32 bytes of k. With ``accumulate`` it is ``tile(acc, a, b)``, and adds to ``acc``.
    """

    _check(n, dtype)

    def wgmma_tile(*arguments):
        acc, a, b = arguments if accumulate else (None, *arguments)
        return simulator.wgmma.multiply(n, dtype, int(a), int(b), acc, steps=steps, fence=True, commit=True)

    def template(registers, a, b):
        lines = ["{ .reg .b64 a, b; wgmma.fence.sync.aligned;"]
        for step in range(steps):
            lines.append(f"add.u64 a, {a}, {2 * step}; add.u64 b, {b}, {2 * step};")
            lines.append(_instruction(n, dtype, registers, "a", "b", int(accumulate or step > 0)))
        return " ".join([*lines, "wgmma.commit_group.sync.aligned; }"])

    return assembly(template, n // 2, ("u64", "u64"), tied=accumulate, simulate=wgmma_tile)


@cache
def make_wgmma_wait(n, pending):
    """``wait(acc)``, ``wgmma.wait_group.sync.aligned``: until at most ``pending`` of the newest groups are under way.

    Gives ``acc`` back, to be read: passed through, so that nothing can read it before.
    """

    def wgmma_wait(acc):
        return simulator.wgmma.wait(pending, acc)

    return assembly(
        lambda registers: f"wgmma.wait_group.sync.aligned {pending};", n // 2, tied=True, simulate=wgmma_wait
    )


@cache
def make_wgmma_wait_group(pending):
    """``wait()``: the same with no accumulators passed through, where only the operands' memory matters."""

    def wgmma_wait_group():
        simulator.wgmma.wait(pending)

    return instruction(f"wgmma.wait_group.sync.aligned {pending};", "void", simulate=wgmma_wait_group)
