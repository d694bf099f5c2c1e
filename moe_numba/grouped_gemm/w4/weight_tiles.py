"""Tiles of MXFP4 weights: the order in which ``kernel.py`` reads packed weights.

A weight tile is 64 rows of a weight by 64 elements of k: the A operand of wgmmas of one warpgroup. It has 16 bytes of
codes for each of the 128 threads, so that a thread loads its codes with one instruction, and then scales; see
``packing.py``.
"""

import torch

from moe_numba.runtime.validate import check_choice

TILE = 64  # rows and columns of a weight tile
CODE_BYTES = 2048  # codes of a tile
GATE_UP = "interleaved", "stacked"


def check_gate_up(gate_up, n, name):
    """Raise if ``gate_up`` is not an order that packing knows, or if the ``n`` rows of ``name`` do not have it."""
    if gate_up is None:
        return
    check_choice("gate_up", gate_up, GATE_UP)
    if n % TILE:
        raise ValueError(f"{name} has {n} rows; with gate_up they must be a multiple of {TILE}")


def order_rows(rows, gate_up):
    """Order rows of gate and up so that of 16 the first eight are of gate, and the others those of up.

    A warp multiplies 16 rows, and a thread two of them, eight rows apart: gate and up of the same column.
    """
    if gate_up is None:
        return rows
    pairs = rows.unflatten(0, (-1, 2)) if gate_up == "interleaved" else rows.unflatten(0, (2, -1)).transpose(0, 1)
    return pairs.unflatten(0, (-1, 8)).transpose(1, 2).flatten(0, 2)


def pad(matrix, rows, columns, value=0):
    """Return a matrix of ``rows`` by ``columns``, whose new elements are ``value``."""
    return torch.nn.functional.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]), value=value)


def unpack_nibbles(codes):
    """Return [rows, 2 n] codes of [rows, n] bytes, the low half of each first."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(1)


def fragments(codes, rows, columns):
    """Arrange [64 rows, 64 columns] of codes as [rows, columns, warp, row of 8, lane of 4, block, register, half].

    A thread needs eight registers of A for each block of 32 columns, each with two bf16 of one row: register
    ``4 s + 2 h + r`` has the columns ``16 s + 8 h + 2 (l % 4)`` and the next one of row ``16 w + l // 4 + 8 r``.
    """
    # Dimensions: tile row, warp, r, row of 8, tile column, 32-column block, s, h, lane of 4, half of a register.
    codes = codes.view(rows, 4, 2, 8, columns, 2, 2, 2, 4, 2)
    return codes.permute(0, 4, 1, 3, 8, 5, 6, 7, 2, 9).flatten(6, 8)


def rotl(words, count):
    """Rotate 32-bit words, held in int64, to the left."""
    return (words << count | words >> 32 - count) & 0xFFFFFFFF


def as_bytes(words):
    """Return 32-bit words, held in int64, as bytes."""
    return words.contiguous().view(torch.uint8).unflatten(-1, (-1, 8))[..., :4].flatten(-2)
