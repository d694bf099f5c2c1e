"""Says on standard error what a benchmark has measured, while it runs."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

SECONDS = 2.0  # between two lines
_listeners: list[Callable[[dict], None]] = []


def report(row: dict) -> None:
    """Take note of a row of a record; `records.row` calls it with each one."""
    for listener in _listeners:
        listener(row)


@contextlib.contextmanager
def said(enabled: bool = True) -> Iterator[None]:
    """Say the size of a row that this process makes meanwhile, at most once in ``SECONDS``.

    Processes of ranks make rows of their own: one of them has it enabled.
    """
    begin = last = time.monotonic()
    rows = 0

    def say(row):
        nonlocal last, rows
        rows, now = rows + 1, time.monotonic()
        if now - last >= SECONDS:
            last = now
            size = {**row["config"], **row["size"], "dtype": row.get("dtype")}
            text = " ".join(f"{name}={value}" for name, value in size.items() if value is not None) or row["step"]
            print(f"  {now - begin:.0f} s, {rows} times: {text} ...", file=sys.stderr, flush=True)

    if enabled:
        _listeners.append(say)
    try:
        yield
    finally:
        if enabled:
            _listeners.remove(say)
