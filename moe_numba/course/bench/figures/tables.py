"""Formatting shared by the Markdown tables of README.md and docs/."""

import re
from collections.abc import Iterable, Mapping, Sequence

from moe_numba.course.bench import records


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]], text_columns: int = 1) -> str:
    """Return a Markdown table whose first columns are text and whose other columns, numbers, are aligned right."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * text_columns + "---:|" * (len(headings) - text_columns)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, cells))} |" for cells in rows)])


def steps_with_peers(record: dict, *others: str) -> dict[str, str]:
    """Return {name: step} of the package's kernel, of other projects' kernels, and of further steps."""
    peers = {step.removeprefix("peer:"): step for step in records.peers(record)}
    return {"moe_numba": "final", **peers, **{step: step for step in others}}


def kernel_times_table(
    record: dict, heading: str, steps: Mapping[str, str], rows: Mapping[str, dict], digits: int = 2
) -> str:
    """Return a table of kernel times in microseconds, the least in each row bold, and of lower bounds.

    Parameters
    ----------
    record : dict
    heading : str
        Of the first column.
    steps : dict
        {heading: step} of the other columns. Rows without the first step are left out.
    rows : dict
        {first cell: arguments of ``records.find``}
    digits : int
        After the decimal point.
    """
    lines = []
    for label, wanted in rows.items():
        found = [records.find(record, step=step, **wanted) for step in steps.values()]
        if found[0]:
            cells = [f"{row['kernel_us']['median']:.{digits}f}" if row and "kernel_us" in row else "" for row in found]
            floor = found[0]["floor_us"]
            bound = f"{floor:.{digits}f}" if floor >= 0.01 else "< 0.01"
            lines.append([label, *(bold_best(cells) if len(cells) > 1 else cells), bound])
    return markdown_table([heading, *steps, "speed of light"], lines)


def bold_best(cells: list[str], columns: slice = slice(None)) -> list[str]:
    """Return the cells of a table row with the smallest number in bold, regardless of whose kernel it is.

    Parameters
    ----------
    cells : list of str
        A cell that does not begin with a number, such as an empty one, cannot be the best.
    columns : slice, optional
        The cells that are compared with each other. Cells that print the same number are all bold.
    """
    numbers = {}
    for i in range(*columns.indices(len(cells))):
        if found := re.match(r"\d+(\.\d+)?", cells[i]):
            numbers[i] = float(found[0])
    best = min(numbers.values(), default=None)
    return [f"**{cell}**" if numbers.get(i, -1) == best else cell for i, cell in enumerate(cells)]
