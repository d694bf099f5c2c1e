"""Recorded times of a step: only for the code that was timed, and for the sizes of that record."""

from collections.abc import Mapping, Sequence
from typing import Any

from moe_numba.course.bench import records
from moe_numba.course.bench.records.kernel_hash import ast_hash
from moe_numba.course.steps.prediction import Judgement


def recorded_us(
    topic: str, step: str, kernels: Sequence, size: Mapping[str, Any], config: Mapping[str, Any], gpu: str = "h200"
) -> float | None:
    """Return the recorded kernel time of exactly this code at these sizes, in microseconds, or None.

    The code is the syntax trees of the kernels and of everything that they call, and the values that factories passed
    to them (`records.kernel_hash.ast_hash`). So an edit has no recorded time until it is measured.

    Parameters
    ----------
    topic : str
        Of the record, such as "align_published_ladder".
    step : str
        Of the row.
    kernels : sequence of kernels
        All that the step launches, as the page has them now; none if torch alone does the work.
    size, config : dict
        Argument -> value; the row must have the same.
    """
    row = recorded_row(topic, step, kernels, size, config, gpu)
    return row and row["kernel_us"]["median"]


def recorded_row(
    topic: str, step: str, kernels: Sequence, size: Mapping[str, Any], config: Mapping[str, Any], gpu: str = "h200"
) -> dict | None:
    """Return the row of the record that has a step's time, if it was recorded for exactly this code, or None."""
    row = _row(topic, step, size, config, gpu)
    timed = {kernel.get("ast") for kernel in row.get("kernels", ())} if row else set()
    return row if row and all(ast_hash(kernel) in timed for kernel in kernels) else None


def describe(
    topic: str, step: str, kernels: Sequence, size: Mapping[str, Any], config: Mapping[str, Any], gpu: str = "h200"
) -> str:
    """Return what a step prints of its recorded time, a sentence: also why there is none for this code.

    Then it says what the lesson's own code took, and how that was predicted.
    """
    row, us = _row(topic, step, size, config, gpu), recorded_us(topic, step, kernels, size, config, gpu)
    if us is not None:
        return f"recorded on an {gpu.upper()}: {us:.2f} us"
    if row is None:
        sizes = ", ".join(f"{name} = {value}" for name, value in (*size.items(), *config.items()))
        return f"not recorded on an {gpu.upper()} with {sizes}"
    lesson = f"the lesson's took {row['kernel_us']['median']:.2f} us on an {gpu.upper()}"
    before = row.get("after") and _row(topic, row["after"], size, config, gpu)
    if before and row.get("predicted_us") is not None:
        saving = before["kernel_us"]["median"] - row["predicted_us"]
        lesson += f"; {Judgement(*row['compared_us'], saving)}"
    return f"your version: not timed ({lesson})"


def lesson_us(
    topic: str, step: str, size: Mapping[str, Any], config: Mapping[str, Any], gpu: str = "h200"
) -> float | None:
    """Return the recorded time of a step's row at these sizes, whatever its code, in microseconds, or None."""
    row = _row(topic, step, size, config, gpu)
    return row and row["kernel_us"]["median"]


def recorded_peers(
    topic: str, name: str, size: Mapping[str, Any], config: Mapping[str, Any], gpu: str = "h200"
) -> dict[str, dict]:
    """Return {peer: row} of other projects' kernels among the rows "name: label" of a record; these have a version."""
    record = records.recorded(topic, gpu)
    rows = records.select(record, size=dict(size), config=dict(config)) if record else []
    start = f"{name}: "
    of_peers = [row for row in rows if row["step"].startswith(start) and "version" in row and "kernel_us" in row]
    return {row["step"].removeprefix(start): row for row in of_peers}


def _row(topic, step, size, config, gpu):
    record = records.recorded(topic, gpu)
    rows = records.select(record, step=step, size=dict(size), config=dict(config)) if record else []
    return next((row for row in rows if "kernel_us" in row), None)
