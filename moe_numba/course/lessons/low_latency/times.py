"""Times of low-latency dispatch and combine in the record `low_latency`: series, a table, and their parts."""

from collections.abc import Iterable, Mapping
from typing import Any

from moe_numba.course.bench import records


def times_of(record: dict, step: str, ranks: int, dtype: str = "bf16") -> dict[int, float]:
    """Return {tokens: median microseconds} of a step, empty if it is not recorded for this number of ranks."""
    series = records.series(record, step=step, dtype=dtype, config={"ranks": ranks})
    return {tokens: stats["median"] for tokens, stats in series.items()}


def spread(record: dict, step: str, ranks: int, tokens: int = 1) -> dict[str, float]:
    """Return the median and the 10th and 90th percentiles of a bfloat16 step, in microseconds."""
    found = records.find(record, step=step, dtype="bf16", config={"ranks": ranks}, size={"tokens": tokens})
    if found is None:
        raise ValueError(f"the record has no step {step!r} of {ranks} ranks with {tokens} tokens")
    return found["kernel_us"]


def peer_steps(record: dict) -> dict[str, str]:
    """Return {name: step} of other projects' kernels."""
    return {step.removeprefix("peer:"): step for step in records.peers(record)}


def table(lines: Mapping[str, Mapping[Any, float]], columns: Iterable, first: str = "") -> str:
    """Format {label: {column: microseconds}} as a table in Markdown; what is missing is left empty."""
    columns = list(columns)
    heads = [first, *map(str, columns)]
    rows = [
        [label, *(records.format_us(times[name]) if name in times else "" for name in columns)]
        for label, times in lines.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---", *["---:"] * len(columns)], *rows])


def parts_of(record: dict, step: str, one_way_us: float, ranks: int = 2) -> dict[str, float]:
    """Split the time of a pair of 1 token: what one rank alone takes, two one-way latencies of NVLink, and the rest."""
    pair, alone = (spread(record, step, n)["median"] for n in (ranks, 1))
    return {"one rank alone": alone, "2 NVLink latencies": 2 * one_way_us, "rest": pair - alone - 2 * one_way_us}


def spans(parts: Mapping[str, tuple[str, float]]) -> list[tuple[str, str, float, float]]:
    """Return parts, {name: (kind, microseconds)}, one after the other, as `draw.low_latency.latency_chain` takes."""
    found, start = [], 0.0
    for name, (kind, us) in parts.items():
        found.append((name, kind, start, start + us))
        start += us
    return found
