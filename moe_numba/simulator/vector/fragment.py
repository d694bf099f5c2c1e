"""Accumulators of a gang's lanes, and the matrix instructions of one warp: mma.sync, ldmatrix and stmatrix."""

import inspect

import numpy as np

from moe_numba.simulator.asynchronous import fragments, matrix
from moe_numba.simulator.asynchronous.wgmma import PendingAccumulators
from moe_numba.simulator.core.arithmetic import fma as scalar_fma
from moe_numba.simulator.core.warp import FULL_MASK
from moe_numba.simulator.vector import access, collectives, state
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.indices import take
from moe_numba.simulator.vector.numbers import Weak

ndarray = np.ndarray


class LaneFragment:
    """The accumulators of all lanes: `values[lane, i]`. A kernel sees a tuple of floats."""

    __slots__ = ("values",)

    def __init__(self, values):
        self.values = values

    def fragment_item(self, index):
        if isinstance(index, slice):
            return tuple(self.values[:, index].T)
        if type(index) is Weak or type(index) is ndarray:
            raise Unsupported("an index of accumulators that differs between lanes")
        return self.values[:, index]

    def __len__(self):
        return self.values.shape[1]

    def __iter__(self):
        return iter(np.ascontiguousarray(self.values.T))

    def __add__(self, other):
        return (*self, *other)

    def __radd__(self, other):
        return (*other, *self)


def as_matrix(values):
    """Return accumulators, floats or a float as an array [lane, i] or one that broadcasts to it."""
    if isinstance(values, PendingAccumulators):
        values._refuse()
    if isinstance(values, LaneFragment):
        return values.values
    if isinstance(values, (tuple, list)):
        return np.stack([column(v) for v in values], 1)
    return column(values)[:, None]


def column(value):
    value = collectives.spread(value)
    return (value.values if type(value) is Weak else value).astype(np.float32)


def fma(mask, total, acc, factor):
    """Return total + acc * factor, each element rounded once."""
    total, acc, factor = np.broadcast_arrays(as_matrix(total), as_matrix(acc), as_matrix(factor))
    exact = acc.astype(np.float64) * factor + total
    out = exact.astype(np.float32)
    halfway = (exact.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    halfway |= (np.abs(exact) < 1.2e-38) & (exact != 0)
    for i in zip(*halfway.nonzero()):
        out[i] = scalar_fma(acc[i], factor[i], total[i])
    return LaneFragment(out)


def fma_columns(mask, total, acc, factors):
    factors = as_matrix(factors)
    factors = factors.reshape(len(factors), -1, 1, 2).repeat(2, axis=2).reshape(len(factors), -1)
    return fma(mask, total, acc, LaneFragment(factors))


def fma_blocks(mask, total, acc, factors, width):
    factors = as_matrix(factors)
    wide = factors.reshape(len(factors), -1, 1, 2, 1)
    wide = np.broadcast_to(wide, (*wide.shape[:2], width // 8, 2, 2)).reshape(len(factors), -1)
    return fma(mask, total, acc, LaneFragment(wide))


def _rows(mask, array, index, lanes, writes, synchronise=True):
    """Return the bytes of a shared allocation, and the offsets of the 16 bytes that each of these lanes addresses."""
    if mask is not None or state.gang.size != 32:
        raise Unsupported("a matrix instruction in a part of a warp, or in several warps")
    if synchronise:
        collectives.participants(FULL_MASK, mask)
    gang, allocation = state.gang, array.allocation
    if allocation is None:
        raise Unsupported("a matrix instruction outside shared memory")
    region = array.region or access.region_of(array)
    index = collectives.spread(index)
    index = (index.values if type(index) is Weak else index).astype(np.int64)
    offset = (index * array.dtype.itemsize + (array.address - region.start))[lanes]
    size = allocation.bytes.size
    if (offset < 0).any() or (offset + 16 > size).any() or ((offset + allocation.start) % 16).any():
        raise Unsupported("a matrix row out of bounds or not aligned")
    if allocation.alignment < 16:
        raise Unsupported("a matrix row of an array that is not aligned")
    taking_part = np.zeros(32, bool)
    taking_part[lanes] = True
    row = np.zeros(32, np.int64)
    row[lanes] = offset >> 4
    entry = (region, region.start, 16, 16, row, taking_part, None)
    if writes:
        region.written = True
    (gang.log.writes if writes else gang.log.reads).append(entry)
    if allocation.detector is not None:
        gang.watch(*entry[:6], writes)
    if gang.notes is not None:
        gang.notes.matrix("stmatrix" if writes else "ldmatrix", allocation, offset, len(lanes) // 8)
    return allocation.bytes, offset[:, None] + np.arange(16)


def store(mask, array, index, registers, trans, synchronise=True):
    """stmatrix; `synchronise` is False for one directly after another."""
    count = len(registers)
    data, offsets = _rows(mask, array, index, state.gang.all_lanes[: 8 * count], True, synchronise)
    words = np.stack([register(r) for r in registers])
    matrices = np.ascontiguousarray(words).view(np.uint16).reshape(count, 8, 8)
    if trans:
        matrices = np.ascontiguousarray(matrices.swapaxes(1, 2))
    data[offsets] = matrices.reshape(8 * count, 8).view(np.uint8)


def register(value):
    """Return the uint32 registers of all lanes."""
    value = collectives.spread(value)
    return (value.values if type(value) is Weak else value).astype(np.uint32)


def load(mask, array, index, count, offsets):
    """ldmatrix."""
    registers = []
    for offset in offsets:
        data, where = _rows(mask, array, index + offset, state.gang.all_lanes[: 8 * count], False)
        registers += list(np.ascontiguousarray(data[where]).view(np.uint32).reshape(count, 32))
    return tuple(registers)


def multiply(mask, dtype, m, n, accumulators, a, b):
    """mma.sync."""
    gang = state.gang
    if mask is not None or gang.size != 32:
        raise Unsupported("a matrix instruction in a part of a warp, or in several warps")
    if len(a) != m // 4 or len(b) != n // 4 or (accumulators is not None and len(accumulators) != m * n // 32):
        raise Unsupported("mma.sync of another number of registers")
    collectives.participants(FULL_MASK, mask)
    a_tile = matrix.operand(np.stack([register(r) for r in a], 1), m // 16, 2, dtype)
    b_tile = matrix.operand(np.stack([register(r) for r in b], 1), n // 8, 1, dtype)
    row, col = matrix.accumulator_coordinates(m, n)
    total = (a_tile.reshape(-1, 8, a_tile.shape[1]) @ b_tile.T).reshape(m, n)[row, col]
    if accumulators is not None:
        total = total + as_matrix(accumulators)
    return LaneFragment(total.astype(np.float32))


def e4m3_as_f16(mask, registers, odd):
    return matrix.e4m3_as_f16([register(r) for r in registers], odd)


def bf16x2(mask, high, low):
    """cvt.rn.bf16x2.f32."""
    return _bf16_in_high_half(high) | _bf16_in_high_half(low) >> np.uint32(16)


def add_bf16x2(mask, a, b):
    """add.rn.bf16x2."""
    a, b = register(a), register(b)
    low, high = (
        (a << np.uint32(16)).view(np.float32) + (b << np.uint32(16)).view(np.float32),
        (a & np.uint32(0xFFFF0000)).view(np.float32) + (b & np.uint32(0xFFFF0000)).view(np.float32),
    )
    return bf16x2(mask, high, low)


def add_f16x2(mask, a, b):
    """add.rn.f16x2."""
    halves = [np.stack([register(x) & np.uint32(0xFFFF), register(x) >> np.uint32(16)]) for x in (a, b)]
    with np.errstate(invalid="ignore", over="ignore"):
        sums = np.add(*(half.astype(np.uint16).view(np.float16) for half in halves))
    low, high = np.where(np.isnan(sums), np.uint16(0x7FFF), sums.view(np.uint16)).astype(np.uint32)
    return high << np.uint32(16) | low


def sign_halves(mask, a):
    """prmt.b32 that replicates the signs of both halves."""
    return (register(a) >> np.uint32(15) & np.uint32(0x00010001)) * np.uint32(0xFFFF)


def mul_bf16x2(mask, a, b):
    """mul.rn.bf16x2."""
    a, b = register(a), register(b)
    with np.errstate(invalid="ignore", over="ignore"):
        low = (a << np.uint32(16)).view(np.float32) * (b << np.uint32(16)).view(np.float32)
        high = (a & np.uint32(0xFFFF0000)).view(np.float32) * (b & np.uint32(0xFFFF0000)).view(np.float32)
    return bf16x2(mask, high, low)


def _bf16_in_high_half(value):
    value = column(value)
    bits = value.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(value == value, rounded, np.uint32(0x7FFF0000))


def load_shared(function):
    """Make the version of a function that `ptx.matrix.make_load_shared(n)` made."""
    count = inspect.getclosurevars(function).nonlocals["n"] // 4

    def load(mask, array, index):
        index = collectives.spread(index)
        index = (index.values if type(index) is Weak else index).astype(np.int64)
        index = index if mask is None else index * mask
        if index.min() < 0 or (array.address + 4 * index & 4 * min(count, 4) - 1).any():
            raise Unsupported("a vector access that is not aligned or out of bounds")
        region = array.region or access.region_of(array)
        access.note_read(None, (region, array.address, 4, 4 * count, index, mask, None))
        if state.gang.notes is not None:
            for i in range(0, count, 4):
                size = 4 * min(4, count - i)
                state.gang.notes.access("load", array, region, array.address + 4 * i, 4, size, index, mask)
        return LaneFragment(take(array.array, index[:, None] + np.arange(count)))

    return load


def stmatrix_columns(function):
    """Make the version of a function that `ptx.matrix.make_stmatrix_columns(pitch)` made."""
    pitch = inspect.getclosurevars(function).nonlocals["pitch"]

    def store_columns(mask, array, offset, values, factor):
        values = as_matrix(values) * column(factor)[:, None]
        bits = np.ascontiguousarray(_bf16_in_high_half(values.reshape(-1)).reshape(values.shape).T)
        low, high = bits[0::2] >> np.uint32(16), bits[1::2]
        for j in range(len(bits) // 4):
            registers = low[2 * j] | high[2 * j], low[2 * j + 1] | high[2 * j + 1]
            store(mask, array, offset + 8 * j * pitch, registers, True, synchronise=j == 0)

    return store_columns


def stmatrix_rows(mask, array, offset, values):
    values = as_matrix(values)
    bits = np.ascontiguousarray(_bf16_in_high_half(values.reshape(-1)).reshape(values.shape).T)
    low, high = bits[0::2] >> np.uint32(16), bits[1::2]
    for j in range(len(bits) // 8):
        registers = [low[4 * j + i] | high[4 * j + i] for i in range(4)]
        store(mask, array, offset ^ 32 * j, registers, False, synchronise=j == 0)


def for_each_chunk(function):
    """Make the version of a function that `ptx.accumulators.make_for_each_chunk(count, size, body, tuples)` made."""
    outer = inspect.getclosurevars(function).nonlocals
    firsts, size, body, tuples = (outer[name] for name in ("firsts", "size", "body", "tuples"))

    def call_for_each_chunk(mask, *arguments):
        values, others = list(map(as_matrix, arguments[:tuples])), arguments[tuples:]
        for first in firsts:
            chunks = (LaneFragment(v[:, first : first + size]) for v in values)
            state.gang.engine.calls[body](mask, np.int32(first), *chunks, *others)

    return call_for_each_chunk


NAMES = {
    ("conversions", "cvt_rn_bf16x2_f32"): bf16x2,
    ("arithmetic", "add_rn_bf16x2"): add_bf16x2,
    ("arithmetic", "add_rn_f16x2"): add_f16x2,
    ("arithmetic", "sign_halves"): sign_halves,
    ("arithmetic", "mul_rn_bf16x2"): mul_bf16x2,
    ("matrix", "stmatrix_rows"): stmatrix_rows,
}
FACTORIES = {
    ("matrix", "load_shared"): load_shared,
    ("accumulators", "for_each_chunk"): for_each_chunk,
    ("matrix", "stmatrix_columns"): stmatrix_columns,
}
VERSIONS = {
    fragments.fma: fma,
    fragments.fma_columns: fma_columns,
    fragments.fma_blocks: fma_blocks,
    matrix.store: store,
    matrix.load: load,
    matrix.multiply: multiply,
    matrix.e4m3_as_f16: e4m3_as_f16,
}
