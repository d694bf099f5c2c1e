"""What the records say of NVLink: rates of pushing rows to a peer, and what flags and signals cost.

Lesson 11 records them; until it has, an earlier version of lesson 12 serves. The lower bounds of all lessons on
communication come from here.
"""

import re

from moe_numba.course.bench import records

RECORD, EARLIER = "peer_ladder", "ring_buffer_dispatch_ladder"
PUSH_ROWS = 4096  # that lesson 11 pushes
STORES, BULK = "stores", "bulk copies after bulk loads"  # how rows are pushed
NOBODY, OTHER_WARPS = "nobody", "other warps of its SM"  # who writes while a thread signals


def push_gbps(ranks: int = 2, gpu: str = "h200") -> dict[tuple[str, int], float]:
    """Return the recorded rates at which each rank writes to the next one: (method, CTAs) -> GB/s; perhaps none."""
    record, found = records.recorded(RECORD, gpu), {}
    for row in records.select(record, config={"ranks": ranks}) if record else []:
        if named := re.fullmatch(r"push: (.+), (\d+) CTAs", row["step"]):
            us = row["kernel_us"]["median"]
            found[named[1], int(named[2])] = round(PUSH_ROWS * row["size"]["row_bytes"] / us / 1e3, 1)
    earlier = _earlier(ranks, gpu)
    if not found and earlier:
        for name, rate in earlier["push_gbps"].items():
            method, _, ctas = name.rpartition(": ")
            if method in (STORES, BULK):
                found[method, int(ctas)] = rate
    return found


def link_gbps(ranks: int = 2, gpu: str = "h200") -> float | None:
    """Return the best recorded push rate, in GB/s: the one lower bound for bytes over NVLink. None without a record."""
    return max(push_gbps(ranks, gpu).values(), default=None)


def one_way_us(kind: str, ranks: int = 2, gpu: str = "h200") -> float | None:
    """Return how long a flag takes to another GPU, or None if no record has it.

    ``kind`` is how it is stored: "release", or "relaxed". The time is half of a ping-pong's round trip.
    """
    if (row := _row(f"ping-pong: {kind}", ranks, gpu)) is not None:
        return round(row["kernel_us"]["median"] / (2 * row["size"]["rounds"]), 3)
    earlier = _earlier(ranks, gpu)
    return earlier["flag"]["us"] if kind == "release" and earlier and "flag" in earlier else None


def signal_ns(kind: str, who: str, ranks: int = 2, gpu: str = "h200") -> float | None:
    """Return what a signal costs, "st.relaxed" or "st.release", while ``who`` (`OTHER_WARPS`, say) writes, or None."""
    if row := _row(f"signal: {kind}, {who}", ranks, gpu):
        return round(row["kernel_us"]["median"] / row["size"]["rounds"] * 1e3)
    earlier = (_earlier(ranks, gpu) or {}).get("signal_ns", {})
    return earlier.get(f"{kind}.sys, {_EARLIER_NAMES.get(who)}")


_EARLIER_NAMES = {NOBODY: "idle", OTHER_WARPS: "busy"}


def _row(step, ranks, gpu):
    record = records.recorded(RECORD, gpu)
    return record and records.find(record, step=step, config={"ranks": ranks})


def _earlier(ranks, gpu="h200"):
    """Return the row of an earlier version of lesson 12 that has push rates and the time of a flag, or None."""
    record = records.recorded(EARLIER, gpu)
    rows = records.select(record, config={"ranks": ranks}) if record else []
    return next((row for row in rows if "push_gbps" in row), None)
