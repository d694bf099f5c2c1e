"""What the epilogues of the Hopper kernels share: their operands and the tile that they store."""

from typing import Any, NamedTuple


class EpilogueOperands(NamedTuple):
    """The outputs of kernel.py's kernel, and what its epilogue reads."""

    y: Any
    second: Any  # another output: the scales of y in FP8, or gate and up; or None
    n: Any
    inputs: Any  # EpilogueInputs


class OutputTile(NamedTuple):
    """What a consumer needs to know of its tile; rows and columns as in y."""

    row: Any
    rows: Any
    subtile_rows: Any
    column: Any
    scale: Any  # float32, of the group; 1 if the epilogue loads it
    group: Any  # if the epilogue reads values of the group
