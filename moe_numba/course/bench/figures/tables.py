"""Formatting shared by the README's Markdown tables."""

import re


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
