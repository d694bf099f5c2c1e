"""Bytes of a dispatch, rates and latencies from records, and the times that "Dispatch" predicts from them."""

from math import ceil, comb

from moe_numba.course.bench import link, records
from moe_numba.course.bench.link import BULK, STORES
from moe_numba.course.lessons.dispatch.sizes import (
    DIRECT_SENDERS,
    EXPERTS,
    HIDDEN,
    RANKS,
    RING_ROWS,
    SENDERS,
    TOKENS,
    TOPK,
    WARPS,
)

ROW_BYTES = 2 * HIDDEN


def rows_to_a_rank(ranks: int, tokens: int = TOKENS) -> float:
    """Return how many of a rank's tokens go to one of the ranks, on average: those with an expert there."""
    return tokens * (1 - comb(EXPERTS - EXPERTS // ranks, TOPK) / comb(EXPERTS, TOPK))


def wire_bytes(ranks: int) -> float:
    """Return the bytes that leave a rank over its link, on average."""
    return (ranks - 1) * all_bytes(ranks) / ranks


def leaving_tokens(ranks: int, tokens: int = TOKENS) -> float:
    """Return how many of a rank's tokens go to another rank at all: not all their experts are at home."""
    return tokens * (1 - comb(EXPERTS // ranks, TOPK) / comb(EXPERTS, TOPK))


def all_bytes(ranks: int) -> float:
    """Return the bytes that a rank sends, own rows included, on average."""
    return ranks * rows_to_a_rank(ranks) * ROW_BYTES


# What records say of the link


def push_gbps(ranks: int = RANKS) -> dict[tuple[str, int], float]:
    """Return recorded rates at which each rank writes to the next, (method, CTAs) -> GB/s; of 2 ranks if need be."""
    return link.push_gbps(ranks) or link.push_gbps(2)


def release_us() -> float | None:
    """Return how long a thread waits in a release while other warps of its SM write to a peer."""
    ns = link.signal_ns("st.release", link.OTHER_WARPS)
    return ns and ns / 1e3


def lower_bound_us(ranks: int = RANKS) -> float | None:
    """Return the time of the wire bytes at the best push rate."""
    best = max(push_gbps(ranks).values(), default=None)
    return best and wire_bytes(ranks) / best / 1e3


def rate(method: str, ctas: int) -> float | None:
    """Return the push rate of a method with the nearest number of CTAs, in bytes per us."""
    known = {number: gbps for (of, number), gbps in push_gbps().items() if of == method}
    return 1e3 * known[min(known, key=lambda number: abs(number - ctas))] if known else None


# Predictions, in microseconds; None where what they start from is not known


def limit_us(method: str, senders: int, copied: float) -> float | None:
    """Return the time of CTAs that copy ``copied`` bytes, or of the wire bytes on the link if that is longer."""
    one, link = rate(method, 1), rate(method, senders)
    if one is None or link is None:
        return None
    return max(copied / (senders * one), wire_bytes(RANKS) / link)


def less(before: float | None, saved: float | None) -> float | None:
    """Return a time without what a step saves."""
    return None if before is None or saved is None else before - saved


def all_sms_us() -> float | None:
    """Return the time of the wire bytes if all SMs store."""
    most = rate(STORES, 1 << 20)
    return most and wire_bytes(RANKS) / most


def team_us() -> float | None:
    """Return the time if half of the SMs send all rows with stores."""
    return limit_us(STORES, SENDERS, all_bytes(RANKS))


def head_us(before: float | None) -> float | None:
    """Return the time if no sender asks over the link for the head: a round trip per chunk, two flags long."""
    flag, chunk = link.one_way_us("release"), 24 if RANKS == 2 else 6
    return less(before, flag and ceil(rows_to_a_rank(RANKS) / SENDERS / chunk) * 2 * flag)


def one_load_us(before: float | None) -> float | None:
    """Return the time if a row is loaded once, not once for each rank that it goes to, and loads count like stores."""
    each = RANKS * rows_to_a_rank(RANKS) / TOKENS  # ranks that a token goes to
    return before and before * (1 + each) / (2 * each)


def bulk_us() -> float | None:
    """Return the time if the senders copy all rows by TMA."""
    return limit_us(BULK, SENDERS, all_bytes(RANKS))


def no_release_us(before: float | None) -> float | None:
    """Return the time if no copy warp waits in a release: one per chunk of its tokens."""
    chunk = max(1, RING_ROWS // WARPS // 4)
    release = release_us()
    return less(before, release and ceil(TOKENS / (SENDERS * WARPS) / chunk) * release)


def compare_ways() -> str | None:
    """Return a sentence that compares the recorded rates of one CTA, in bulk and with stores; None without them."""
    bulk, stores = (push_gbps().get((method, 1)) for method in (BULK, STORES))
    if bulk is None or stores is None:
        return None
    rates = f"By lesson 11's rates a CTA pushes {bulk:.0f} GB/s in bulk, and {stores:.0f} GB/s with stores."
    if bulk >= stores:
        return f"{rates} So bulk copies are faster, and they leave lanes and registers free."
    return (
        f"{rates} So this step gains nothing by the rate of its copies. It frees the lanes of a warp, which no longer "
        "load and store, and their registers. The next steps use both."
    )


def helping_us() -> float | None:
    """Return the time if the senders copy only half of the own rows."""
    own = all_bytes(RANKS) - wire_bytes(RANKS)
    return limit_us(BULK, SENDERS, wire_bytes(RANKS) + own / 2)


def launch_us() -> float | None:
    """Return the recorded time of an empty kernel in a graph."""
    record = records.recorded("align")
    row = record and records.find(record, step="empty kernel", config={"dependent": False})
    return row and row["kernel_us"]["median"]


def no_barriers_us(before: float | None) -> float | None:
    """Return the time without the clearing kernel: a launch, and two barriers of a flag each."""
    flag, launch = link.one_way_us("release"), launch_us()
    return less(before, None if flag is None or launch is None else 2 * flag + launch)


def direct_us() -> float | None:
    """Return the time of direct writes, with two barriers: a flag each."""
    flag, limit = link.one_way_us("release"), limit_us(BULK, DIRECT_SENDERS, all_bytes(RANKS))
    return None if flag is None or limit is None else limit + 2 * flag


def fp8_us(before: float | None) -> float | None:
    """Return the time if all of it is proportional to the bytes of a row: one per element, and a scale per 128."""
    return before and before * (HIDDEN + HIDDEN // 32) / ROW_BYTES
