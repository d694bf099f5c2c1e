"""Warp-wide matrix instructions: stmatrix, ldmatrix and mma.sync."""

import functools

import numpy as np

from moe_numba.simulator.asynchronous import fragments
from moe_numba.simulator.core import floats, memory
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import SimulatorError
from moe_numba.simulator.core.shared import shared_region
from moe_numba.simulator.core.warp import aligned


def store(array, index, registers, trans):
    """Store one register per matrix from each lane, to the rows that lanes 0 to 8 * len(registers) - 1 address."""
    count = len(registers)
    what = f"stmatrix.x{count}" + ".trans" * trans

    def finish(lanes):
        words = np.array([lanes[lane][1] for lane in range(32)], np.uint32).T  # count x 32
        matrices = np.ascontiguousarray(words).view(np.uint16).reshape(count, 8, 8)
        if trans:
            matrices = np.ascontiguousarray(matrices.swapaxes(1, 2))
        if (profile := lanes[0][2].grid.world.profile) is not None:
            profile.matrix("stmatrix", [lanes[lane][0].start for lane in range(8 * count)], count)
        for lane, data in enumerate(matrices.reshape(8 * count, 8)):
            row, _, t = lanes[lane]
            row.check_access(t, writes=True)
            row.bytes[:] = data.view(np.uint8)
        return dict.fromkeys(lanes)

    row = _addressed_row(array, index, count, what)
    aligned(what, (row, [int(register) for register in registers], thread()), finish)


def _addressed_row(array, index, count, what):
    """Return the 16 bytes that a lane addresses; addresses of lanes beyond the last matrix are ignored."""
    if memory.watching:
        memory.maybe_preempt()
    return shared_region(array, index, 16, 16, what) if thread().lane < 8 * count else None


def load(array, index, count, offsets):
    """Load `count` matrices from the rows that the lanes address, once for each offset in bytes."""
    what = f"ldmatrix.x{count}"

    def finish(lanes):
        words = []
        for i in range(len(offsets)):
            if (profile := lanes[0][1].grid.world.profile) is not None:
                profile.matrix("ldmatrix", [lanes[lane][0][i].start for lane in range(8 * count)], count)
            for lane in range(8 * count):
                rows, t = lanes[lane]
                rows[i].check_access(t, writes=False)
                words.append(rows[i].bytes.view(np.uint32))
        registers = np.reshape(words, (-1, 32)).T  # lane x matrix: a row has the words of four lanes
        return {lane: tuple(registers[lane]) for lane in lanes}

    if memory.watching:
        memory.maybe_preempt()
    rows = [shared_region(array, index + offset, 16, 16, what) for offset in offsets]
    return aligned(what, (rows, thread()), finish)


def multiply(dtype, m, n, accumulators, a, b):
    """Multiply an m x n tile by `mma.sync`: 32 bytes of k, with operands in the lanes' registers."""
    what = f"mma.sync {dtype} of {m} x {n}"
    if len(a) != m // 4 or len(b) != n // 4 or (accumulators is not None and len(accumulators) != m * n // 32):
        raise SimulatorError(f"{thread()}: {what} takes {m // 4} registers of A and {n // 4} of B")

    def finish(lanes):
        order = range(32)
        a_tile = operand([lanes[lane][1] for lane in order], m // 16, 2, dtype)
        b_tile = operand([lanes[lane][2] for lane in order], n // 8, 1, dtype)
        row, column = accumulator_coordinates(m, n)
        # Eight rows at a time: BLAS would run larger products on several threads, and wait for threads that do not run.
        total = (a_tile.reshape(-1, 8, a_tile.shape[1]) @ b_tile.T).reshape(m, n)[row, column]
        if accumulators is not None:
            total = total + np.stack([fragments.as_array(lanes[lane][0]) for lane in order])
        results = total.astype(np.float32)
        return {lane: fragments.Fragment(results[lane]) for lane in order}

    return aligned(what, (accumulators, a, b), finish)


def operand(registers, parts, rows, dtype):
    """Assemble rows of 32 bytes from the lanes' registers: part, 16-byte half, group of 8 rows."""
    data = np.array(registers, np.uint32).view(np.uint8).reshape(8, 4, parts, 2, rows, 4)  # g, c, part, half, r, byte
    data = data.transpose(2, 4, 0, 3, 1, 5).reshape(parts * rows * 8, 32)
    return floats.decode(data, dtype)


@functools.cache
def accumulator_coordinates(m, n):
    """Return the rows and columns in an m x n tile of the accumulators of 32 lanes."""
    lane, i = np.arange(32)[:, None], np.arange(m * n // 32)[None, :]
    part = i // 4
    row = part // (n // 8) * 16 + i // 2 % 2 * 8 + lane // 4
    return row, part % (n // 8) * 8 + lane % 4 * 2 + i % 2


def e4m3_as_f16(registers, odd):
    """Convert bytes 1 and 3 (or 0 and 2) of each register from e4m3 to float16, 2**-8 times the number."""
    words = np.array(registers, np.uint32) << np.uint32(0 if odd else 8)
    bits = words >> np.uint32(1) & np.uint32(0x3F803F80)
    carry = bits + np.uint32(0x00800080) & np.uint32(0x40004000)
    return tuple(bits | carry | words & np.uint32(0x80008000))
