"""wgmma: a warpgroup issues a matrix multiply-accumulate on shared memory, and waits for its results later.

It completes when the seeded scheduler chooses, and reserves its operands' memory until a warp has waited for its group.
A thread's accumulators are `PendingAccumulators` until they have been passed through that wait; reading them is an
error.
"""

import sys

import greenlet
import numpy as np

from moe_numba.simulator.asynchronous import fragments
from moe_numba.simulator.asynchronous.fragments import Fragment
from moe_numba.simulator.asynchronous.tensor_map import swizzled_address
from moe_numba.simulator.core import floats, memory
from moe_numba.simulator.core.barrier import warpgroup
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import (
    AsyncRace,
    DivergentBarrier,
    Misaligned,
    SimulatorError,
    kernel_frame,
    source_location,
)
from moe_numba.simulator.core.shared import shared_region
from moe_numba.simulator.core.warp import aligned
from moe_numba.simulator.memory_model.happens_before import AsyncOperation

_SWIZZLES = {1: 128, 2: 64, 3: 32}  # by the two highest bits of a descriptor
K_BYTES = 32  # of each row, per instruction
_ATOM_BYTES, _ATOM_ROWS = 1024, 64  # of an MN-major operand of 2-byte elements: 8 k of 64 rows, in 128 bytes each


class Wgmma:
    """One group: wgmmas along k that were issued and committed together. A unit that the scheduler runs."""

    remedy = "wait for its group first, with make_wgmma_wait"
    may_outlive_block = generic_proxy = False

    def __init__(self, what, threads):
        self.thread, self.what, self.site = threads[0], what, source_location(sys._getframe())
        self.threads = threads[::32]  # one of each warp
        self.reservations, self.done, self.waiting = [], False, []
        self.reading = AsyncOperation(what, self.remedy)
        self.world = threads[0].grid.world

    def start(self):
        self.priority, self.queued = self.world.completion_priority(), True
        self.world.schedule(self)
        self.thread.record_event("wgmma", {"what": self.what, "event": "starts"})

    def step(self, rng):
        self.done = True
        self.thread.record_event("wgmma", {"what": self.what, "event": "is done"})
        waiting, self.waiting = self.waiting, []
        self.world.wake(waiting)

    def wait(self):
        while not self.done:
            self.waiting.append(greenlet.getcurrent())
            greenlet.getcurrent().park(self)
        if self.world.races is not None:
            self.world.races.know(thread(), self.reading)
        for reservation in self.reservations:
            reservation.release()
        self.reservations = []

    def __str__(self):
        return f"{self.what}, which {self.thread} and its warpgroup issued at {self.site}, may be in flight"


class PendingAccumulators:
    """A thread's accumulators that a wgmma may still write: they may go to another wgmma, or to the wait."""

    def __init__(self, wgmma, values):
        self.wgmma, self.values = wgmma, values

    def _refuse(self, *_):
        raise AsyncRace(
            f"{thread()} reads accumulators at {source_location(sys._getframe())}, but {self.wgmma.what} issued at "
            f"{self.wgmma.site} may not have completed: pass them through make_wgmma_wait first"
        )

    __getitem__ = __iter__ = __len__ = __add__ = __array__ = _refuse


def address(array, offset):
    """Return the address field of a matrix descriptor."""
    return (shared_region(array, offset, 16, 16, "a wgmma descriptor").start & 0x3FFFF) >> 4


def wait(pending, accumulators):
    """Wait until at most `pending` of the warp's newest groups are in flight; return the accumulators, to be read."""
    t = thread()
    warp = t.block.warps[t.warp]

    def finish(lanes):
        older = warp.wgmma_groups[: len(warp.wgmma_groups) - pending]
        warp.wgmma_groups = warp.wgmma_groups[len(older) :]
        return dict.fromkeys(lanes, older)

    for wgmma in aligned(f"wgmma.wait_group {pending}", None, finish):
        wgmma.wait()
    if not isinstance(accumulators, PendingAccumulators) or accumulators.wgmma in warp.wgmma_groups:
        return accumulators
    return Fragment(accumulators.values)


def multiply(n, dtype, a, b, accumulators, steps, majors=("k", "k")):
    """Issue `steps` wgmmas along k as one group of the warpgroup; return each thread's pending accumulators.

    `a` is a descriptor, or the tuple of the thread's registers of A, four for each step.
    """
    t = thread()
    if memory.watching:
        memory.maybe_preempt()
    what = f"wgmma m64n{n} {dtype}"
    group = warpgroup(what)
    if isinstance(accumulators, tuple):
        accumulators = Fragment(np.array(accumulators, np.float32))
    if accumulators is not None and len(accumulators.values) != n // 2:
        raise SimulatorError(f"{t}: {what} takes {n // 2} accumulators, not {len(accumulators.values)}")
    descriptors, registers = (a, b), None
    if isinstance(a, tuple):
        if len(a) != 4 * steps:
            raise SimulatorError(f"{t}: {what} takes {4 * steps} registers of A, not {len(a)}")
        descriptors, registers = (b,), np.array(a, np.uint32)
    frame = kernel_frame(sys._getframe())
    value = (frame.f_code, frame.f_lineno, *descriptors), accumulators, registers
    return t.rendezvous(group, what, group.size, value, lambda values: _issue(what, n, dtype, values, steps, majors))


def _issue(what, n, dtype, values, steps, majors):
    threads = sorted(values, key=lambda t: t.thread_id)
    (code, line, *descriptors), accumulators, registers = values[threads[0]]
    for t in threads:
        (other_code, other_line, *others), *_ = values[t]
        if (other_code, other_line) != (code, line):
            raise DivergentBarrier(f"{t} and {threads[0]} reach {what} at different lines: {other_line} and {line}")
        if others != descriptors:
            raise SimulatorError(f"{t} and {threads[0]} pass different descriptors to {what}, at {code.co_name}:{line}")
    wgmma = Wgmma(what, threads)
    if registers is None:
        a_tile = operand(wgmma, descriptors[0], 64, dtype, steps, "A", majors[0])
    else:
        a_tile = register_operand([values[t][2] for t in threads], dtype)
    b_tile = operand(wgmma, descriptors[-1], n, dtype, steps, "B", majors[1])
    # Eight rows at a time: BLAS would run larger products on several threads, and wait for threads that do not run.
    total = (a_tile.reshape(8, 8, -1) @ b_tile.T).reshape(64, n)
    if accumulators is not None:
        total += fragments.gather([values[t][1].values for t in threads], n)
    results = fragments.scatter(total.astype(np.float32), n)
    wgmma.start()
    if wgmma.world.profile is not None:
        k, shared_rows = a_tile.shape[1] // steps, n + 64 * (registers is None)
        wgmma.world.profile.operation(f"wgmma m64n{n}k{k} {dtype}", shared_rows * steps * K_BYTES, count=steps)
    for t in threads[::32]:
        t.block.warps[t.warp].wgmma_groups.append(wgmma)
    return {t: PendingAccumulators(wgmma, row) for t, row in zip(threads, results)}


def register_operand(registers, dtype):
    """Decode A from the registers of 128 threads, [128, 4 * steps]: 64 rows of 32 bytes for each step."""
    data = np.ascontiguousarray(registers).view(np.uint8)
    data = data.reshape(4, 8, 4, -1, 2, 2, 4)  # warp, row of 8, lane of 4, step, 16-byte half, group of 8 rows, byte
    return floats.decode(data.transpose(0, 5, 1, 3, 4, 2, 6).reshape(64, -1), dtype)


def operand(wgmma, descriptor, rows, dtype, steps, name, major):
    """Decode the matrix that a descriptor refers to, and reserve its memory."""
    swizzle = _SWIZZLES.get(descriptor >> 62)
    what = f"operand {name} of {wgmma.what} at {wgmma.site}"
    if swizzle is None:
        raise SimulatorError(f"{wgmma.thread}: {what} has a descriptor without a swizzle, which is not simulated")
    locate = _locate_mn if major == "mn" else _locate_k
    base, addresses = locate(f"{wgmma.thread}: {what}", descriptor, swizzle, rows, steps)
    shared = wgmma.thread.block.shared
    allocation = shared.find(base, base + 1, what).allocation
    if base % (8 * swizzle) or allocation.alignment < 8 * swizzle:
        raise Misaligned(
            f"{wgmma.thread}: {what} starts at byte {base - allocation.start} of {allocation}, which is aligned to "
            f"{allocation.alignment}; both must be aligned to {8 * swizzle} bytes"
        )
    last = int(addresses.max())
    region = shared.find(base, last - last % (8 * swizzle) + 8 * swizzle, what)
    wgmma.reservations.append(allocation.race_detector().reserve(region.start, region.end, False, wgmma))
    if (races := wgmma.world.races) is not None:
        span = region.start - allocation.to_window, region.end - region.start
        for t in wgmma.threads:
            races.issue(t, wgmma.reading, *span, False, region, is_global=False)
    return floats.decode(region.bytes[swizzled_address(addresses, swizzle) - base], dtype)


def _locate_k(what, descriptor, swizzle, rows, steps):
    """Return the start of a K-major tile, and the address of each byte [rows, k] before the swizzle."""
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4  # stride: from 8 rows to the next 8
    first, size = start % swizzle, steps * K_BYTES
    if first + size > swizzle:
        raise SimulatorError(f"{what} takes bytes {first} to {first + size} of rows of {swizzle} bytes")
    base = start - first
    row, byte = np.arange(rows)[:, None], first + np.arange(size)[None, :]
    return base, base + row // 8 * stride + row % 8 * swizzle + byte


def _locate_mn(what, descriptor, swizzle, rows, steps):
    """Return the start of an MN-major tile of 2-byte elements, and the address of each byte [rows, k]."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if swizzle != 128:
        raise SimulatorError(f"{what} is MN-major with a swizzle of {swizzle} bytes; only 128 is simulated")
    for field, distance in [("stride", stride)] + [("leading-dimension", leading)] * (rows > _ATOM_ROWS):
        if distance % _ATOM_BYTES:
            raise Misaligned(
                f"{what} is MN-major and has a {field} offset of {distance} bytes in its descriptor; it must be a "
                f"multiple of {_ATOM_BYTES}"
            )
    row, byte = np.arange(rows)[:, None], np.arange(steps * K_BYTES)[None, :]
    step, k = byte // K_BYTES, byte % K_BYTES // 2  # an instruction's descriptor is two contiguous atoms further
    atom = start + step * 2 * _ATOM_BYTES + row // _ATOM_ROWS * leading + k // 8 * stride
    return start, atom + k % 8 * swizzle + row % _ATOM_ROWS * 2 + byte % 2
