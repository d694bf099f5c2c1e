"""wgmma: asynchronous matrix multiply-accumulate by a warpgroup, with B in shared memory and A there or in registers.

One ``wgmma.mma_async`` adds A B^T to a 64 x n tile of float32, from 64 rows of A and n rows of B, 32 bytes of k each.
Each thread holds n / 2 accumulators, its fragment: ``d[4 j + 2 h + i]`` is row ``16 w + l // 4 + 8 h``, column
``8 j + 2 (l % 4) + i``, for lane l of warp w.

An operand is K-major if the k elements of a row are contiguous, and MN-major, which bf16 allows, if the rows of one k
are (its transpose lies in memory). With the 128-byte swizzle it consists of atoms of 1024 bytes, as TMA writes them:
8 rows of 128 bytes along k, or MN-major 8 values of k with 64 rows each. Source: PTX ISA, "Shared Memory Matrix
Layout".

With A in registers, a thread holds for each 32 bytes of k four registers: ``a[2 h + r]`` is bytes ``16 h + 4 (l % 4)``
to ``16 h + 4 (l % 4) + 3`` of row ``16 w + l // 4 + 8 r``, the layout of A in ``mma.sync``.

The instruction is asynchronous. Accumulators are defined, and the operands' memory may be reused, when
``make_wgmma_wait`` has waited for the instruction's group; the accumulators must be passed through that wait. Registers
of A must keep their values until then; see ``make_wgmma_wait_registers``.
All threads of a warpgroup (four consecutive warps, the first a multiple of four) must execute these instructions.
"""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.accumulators import assembly
from moe_numba.ptx.intrinsic import SHARED, factory, instruction, make_intrinsic

_TYPES = {"e4m3": ("e4m3.e4m3", 32), "bf16": ("bf16.bf16", 16)}
# What the 16 k of one bf16 instruction advance a descriptor, which counts 16 bytes: 32 bytes, or two atoms.
_K_STEP = {"k": 2, "mn": 2 * 1024 >> 4}

# Descriptor bits: swizzle mode, stride in bytes from 8 rows to the next 8, and a leading-dimension offset of 1.
_SWIZZLE_128 = 1 << 62 | (1024 >> 4) << 32 | 1 << 16
_SWIZZLE_64 = 2 << 62 | (512 >> 4) << 32 | 1 << 16


def wgmma_descriptor(array, offset):
    """Make the matrix descriptor of a tile of rows of 128 bytes with the 128-byte swizzle, as TMA writes them.

    The tile starts at element ``offset`` of ``array``, a multiple of 8 rows, aligned to 1024 bytes. Addresses in a
    descriptor count 16 bytes: ``descriptor + uint64(2)`` is 32 bytes further along k, the share of one instruction.
    """
    return np.uint64(_SWIZZLE_128 | simulator.wgmma.address(array, offset))


def wgmma_descriptor_64b(array, offset):
    """Make the matrix descriptor of a tile of rows of 64 bytes with the 64-byte swizzle, aligned to 512 bytes."""
    return np.uint64(_SWIZZLE_64 | simulator.wgmma.address(array, offset))


@factory
def make_wgmma_descriptor_mn(leading_bytes):
    """Make ``descriptor(array, offset)`` for an MN-major tile with the 128-byte swizzle, aligned to 1024 bytes.

    Atoms that follow each other along k are contiguous: a TMA box of 64 rows by any multiple of 8 k. ``leading_bytes``
    is the distance from 64 rows to the next 64, a multiple of 1024, which a tile of 64 rows does not use.
    ``descriptor + uint64(128)`` is 16 k further along.
    """
    if leading_bytes % 1024 or not 0 < leading_bytes < 1 << 18:
        raise ValueError(f"leading_bytes is {leading_bytes}; it must be a multiple of 1024 below 2^18")
    bits = 1 << 62 | (1024 >> 4) << 32 | (leading_bytes >> 4) << 16

    def wgmma_descriptor_mn(array, offset):
        return np.uint64(bits | simulator.wgmma.address(array, offset))

    return _descriptor(bits, wgmma_descriptor_mn)


def _descriptor(bits, simulate):
    template = (
        "{ .reg .b32 a; .reg .b64 d; and.b32 a, $1, 0x3FFFF; shr.u32 a, a, 4; cvt.u64.u32 d, a; "
        f"or.b64 $0, d, {bits:#x}; }}"
    )
    return instruction(template, "u64", SHARED, simulate=simulate, side_effect=False)


wgmma_descriptor = _descriptor(_SWIZZLE_128, wgmma_descriptor)
wgmma_descriptor_64b = _descriptor(_SWIZZLE_64, wgmma_descriptor_64b)


def _check(n, dtype, **majors):
    if dtype not in _TYPES or n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma takes dtype e4m3 or bf16 and n a multiple of 8 up to 256, not {dtype}, n {n}")
    for name, major in majors.items():
        if major not in _K_STEP or (major == "mn" and dtype != "bf16"):
            raise ValueError(f"{name} is {major!r}; it must be 'k', or with bf16 'mn'")
    if majors["b_major"] == "mn" and n % 64:
        raise ValueError(f"n is {n}; for an MN-major B it must be a multiple of 64")


def _wgmma(dtype, registers, a, scale_d, *majors):
    """Return one instruction with the descriptor of B in ``b``; ``majors`` are of the operands in shared memory."""
    (types, k), transposes = _TYPES[dtype], "".join(f", {int(major == 'mn')}" for major in majors)
    return (
        f"wgmma.mma_async.sync.aligned.m64n{2 * len(registers)}k{k}.f32.{types} {{{', '.join(registers)}}}, {a}, b, "
        f"{scale_d}, 1, 1{transposes if dtype == 'bf16' else ''};"
    )


@factory
def make_wgmma_tile(n, dtype, steps=4, accumulate=False, a_major="k", b_major="k", overwrite=False):
    """Make ``tile(a, b)``: ``wgmma.fence``, ``steps`` wgmmas along k and ``wgmma.commit_group`` in one assembly block.

    It returns A B^T over ``steps`` times 32 bytes of k; ``a`` and ``b`` are descriptors. With ``accumulate`` it is
    ``tile(acc, a, b)`` and adds to ``acc``. ``dtype`` is ``"e4m3"`` (32 elements of k per step) or ``"bf16"`` (16);
    ``n`` is a multiple of 8 up to 256. The results must go through ``make_wgmma_wait`` before they are read.

    With ``overwrite`` it is ``tile(old, a, b)``, whose result takes the registers of ``old``: otherwise the compiler
    may give different registers to two results that a thread does not need at the same time.

    ``a_major`` and ``b_major`` are ``"k"``, for a descriptor of ``wgmma_descriptor`` (or ``_64b``), or for bf16
    ``"mn"``, for one of ``make_wgmma_descriptor_mn``. The n of an MN-major B is a multiple of 64, so that B consists of
    whole atoms.
    """
    _check(n, dtype, a_major=a_major, b_major=b_major)

    def wgmma_tile(*arguments):
        acc, a, b = arguments if accumulate or overwrite else (None, *arguments)
        old = acc if accumulate else None
        return simulator.wgmma.multiply(n, dtype, int(a), int(b), old, steps, (a_major, b_major))

    def template(registers, a, b):
        lines = ["{ .reg .b64 a, b; wgmma.fence.sync.aligned;"]
        for step in range(steps):
            lines.append(f"add.u64 a, {a}, {_K_STEP[a_major] * step}; add.u64 b, {b}, {_K_STEP[b_major] * step};")
            lines.append(_wgmma(dtype, registers, "a", int(accumulate or step > 0), a_major, b_major))
        return " ".join([*lines, "wgmma.commit_group.sync.aligned; }"])

    return assembly(template, n // 2, 2, in_place=accumulate or overwrite, simulate=wgmma_tile)


@factory
def make_wgmma_tile_rs(n, dtype, steps=4, b_major="k"):
    """Make ``tile(acc, a, b)``, as ``make_wgmma_tile`` with ``accumulate`` and with A in registers ("RS").

    ``a`` is a tuple of ``4 * steps`` uint32, four for each step along k, and ``b`` a descriptor; ``b_major`` is as for
    ``make_wgmma_tile``. The registers of ``a`` must not change before the group has completed: pass them to
    ``make_wgmma_wait_registers``.
    """
    _check(n, dtype, b_major=b_major)

    def wgmma_tile_rs(acc, a, b):
        return simulator.wgmma.multiply(n, dtype, a, int(b), acc, steps, (None, b_major))

    def template(registers, *operands):
        # 32-bit additions leave the upper word of the descriptor in its register.
        lines = [f"{{ .reg .b64 b; .reg .b32 l, h; mov.b64 {{l, h}}, {operands[-1]}; wgmma.fence.sync.aligned;"]
        for step in range(steps):
            a, advance = ", ".join(operands[4 * step : 4 * step + 4]), f"add.u32 l, l, {_K_STEP[b_major]}; "
            lines.append(f"{advance * (step > 0)}mov.b64 b, {{l, h}};")
            lines.append(_wgmma(dtype, registers, f"{{{a}}}", 1, b_major))
        return " ".join([*lines, "wgmma.commit_group.sync.aligned; }"])

    return assembly(template, n // 2, 1, words=4 * steps, in_place=True, simulate=wgmma_tile_rs)


@factory
def make_wgmma_wait_registers(count, pending):
    """Make ``wait(a)``, ``wgmma.wait_group.sync.aligned``: wait until at most ``pending`` groups are in flight.

    ``a`` is a tuple of ``count`` uint32, the registers of A of a group that completes with this wait. Reading them here
    keeps the compiler from assigning these registers to other variables while wgmma reads them.
    """

    def wgmma_wait_registers(a):
        simulator.wgmma.wait(pending, None)

    if simulator.ENABLED:
        return wgmma_wait_registers
    from llvmlite import ir
    from numba import types

    function = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * count)
    text, constraints = f"wgmma.wait_group.sync.aligned {pending};", ",".join(["r"] * count + ["~{memory}"])
    signature = types.void(types.UniTuple(types.uint32, count))

    def codegen(context, builder, sig, values):
        registers = [builder.extract_value(values[0], i) for i in range(count)]
        asm = ir.InlineAsm(function, text, constraints, side_effect=True)
        builder.call(asm, registers, attrs=("convergent",))
        return context.get_dummy_value()

    return make_intrinsic(wgmma_wait_registers, 1, lambda *_: (signature, codegen))


@factory
def make_wgmma_wait(n, pending):
    """Make ``wait(acc)``, ``wgmma.wait_group.sync.aligned``: wait until at most ``pending`` groups are in flight.

    It returns ``acc``, which may then be read. Passing it through keeps the compiler from reading it earlier.
    """

    def wgmma_wait(acc):
        return simulator.wgmma.wait(pending, acc)

    def template(accumulators):
        return f"wgmma.wait_group.sync.aligned {pending};"

    return assembly(template, n // 2, in_place=True, simulate=wgmma_wait)
