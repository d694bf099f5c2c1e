"""Registers of a block's threads, which `setmaxnreg` moves between its warpgroups.

A block has the registers that it was launched with: for each thread of `launch_bounds` an equal share of an SM's
65,536, rounded down to a multiple of 8. `setmaxnreg.inc` waits until other threads of the block have released enough;
if they never do, that is a deadlock.
"""

from moe_numba.simulator.core.barrier import warpgroup_arrive
from moe_numba.simulator.core.engine import thread

_REGISTERS_OF_AN_SM, _MOST_OF_A_THREAD = 65536, 256


def at_launch(block):
    """Return the number of registers that each thread of a block starts with."""
    threads, blocks = block.grid.launch_bounds or (-(-block.size // 128) * 128, 1)
    return min(_REGISTERS_OF_AN_SM // (threads * blocks) // 8 * 8, _MOST_OF_A_THREAD)


class RegisterPool:
    """The registers that no thread of a block holds, and the threads that wait for some."""

    def __init__(self, block):
        self.at_launch = at_launch(block)
        self.total = self.at_launch * block.size
        self.held = dict.fromkeys(block.threads(), self.at_launch)
        self.free, self.waiting = 0, []

    def resize(self, t, registers, what):
        """Set the number of registers of a thread; wait until there are enough."""
        request = _Request(self, t, registers, what)
        if request.missing() > 0:
            self.waiting.append(request)
            t.park(request)
            return
        self._grant(request)
        while self.waiting and self.waiting[0].missing() <= 0:
            request = self.waiting.pop(0)
            self._grant(request)
            t.grid.world.wake((request.thread,))

    def _grant(self, request):
        self.free += self.held[request.thread] - request.registers
        self.held[request.thread] = request.registers


class _Request:
    """A thread's request for a number of registers."""

    def __init__(self, pool, thread, registers, what):
        self.pool, self.thread, self.registers, self.what = pool, thread, registers, what

    def missing(self):
        """Return how many registers too few are free."""
        return self.registers - self.pool.held[self.thread] - self.pool.free

    def __str__(self):
        pool = self.pool
        wanted = pool.held | {request.thread: request.registers for request in pool.waiting}
        return (
            f"{self.what} (the block's threads want {sum(wanted.values())} registers; it was launched with "
            f"{pool.at_launch} for each of {len(wanted)} threads, {pool.total})"
        )


def setmaxnreg(direction, registers):
    """Give registers back (`dec`), or wait for more (`inc`)."""
    t, what = thread(), f"setmaxnreg.{direction} {registers}"
    warpgroup_arrive(what)
    if t.block.registers is None:
        t.block.registers = RegisterPool(t.block)
    pool = t.block.registers
    if (registers < pool.held[t]) == (direction == "dec"):
        pool.resize(t, registers, what)
