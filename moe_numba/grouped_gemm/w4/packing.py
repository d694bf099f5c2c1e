"""Packing of MXFP4 weights into weight tiles, whose order is in ``weight_tiles.py``.

A tile has 2048 bytes of codes and 128 of scales. A thread decodes two words of codes to the eight registers of a
32-column block. The bits of an e2m1 number, its sign and the other three, have places in a bf16, bits 15 and 8 to 6,
where they are that number times 2**-126, including the subnormal 0.5: with the exponent field above them all zeros,
both formats are subnormal at the same time. So decoding a register is to move bits to these places (``FIELDS``):

    a, a << 6, rotr(a, 4), (a << 1) ^ (b >> 6), b, b << 6, rotr(b, 4), (a << 2) ^ (b << 3)    each & FIELDS

The XOR of two shifted words also has bits that belong to other registers. Packing compensates for them, which costs the
kernel nothing: 16 instructions decode 16 numbers.
"""

import torch

from moe_numba.grouped_gemm.w4.weight_tiles import (
    CODE_BYTES,
    TILE,
    as_bytes,
    check_gate_up,
    fragments,
    order_rows,
    pad,
    rotl,
    unpack_nibbles,
)
from moe_numba.runtime.dlpack import as_tensor, call_with_tensors
from moe_numba.runtime.validate import check_has_memory, check_tensor

MX_BLOCK = 32  # elements of k that share a scale
SCALE_BYTES = 128  # scales of a tile
TILE_BYTES = CODE_BYTES + SCALE_BYTES
# Last dimensions of packed weights, the bytes of a tile: without and with ``gate_up``. So the shape says how rows were
# ordered, also in slices of experts, in files and on other devices.
PLAIN_TILE, GATE_UP_TILE = (TILE_BYTES,), (TILE_BYTES // 16, 16)
FIELDS = 0x81C081C0  # sign and the low three bits of exponent and mantissa, in two bf16
EXPONENTS = 0x7F807F80  # exponents of two bf16

# The kernel multiplies by the bf16 with exponent byte scale + EXPONENT_OFFSET, and by 2**RESULT_EXPONENT at
# the end. So scales around 1 are in the middle of a range without overflow and without the subnormal numbers below
# 2**-126.
EXPONENT_OFFSET, RESULT_EXPONENT = 94, 32
MIN_SCALE, MAX_SCALE, NAN_SCALE = 128 - EXPONENT_OFFSET, 254 - EXPONENT_OFFSET, 255


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, gate_up: str | None = None) -> torch.Tensor:
    """Pack MXFP4 weights for ``group_gemm_mxfp4``, once when a model is loaded.

    Parameters
    ----------
    blocks : tensor [groups, n, k / 32, 16] or [groups, n, k / 2], uint8
        Two e2m1 codes per byte, the first in the low half, as gpt-oss stores them. n and k are multiples of 32.
    scales : tensor [groups, n, k / 32], uint8
        Byte s is the scale 2**(s - 127) of 32 elements of k, and 255 is NaN, which makes them all NaN. Weights are
        exact with scales from 2**-93 to 2**33; with a smaller scale they become zeros, and a larger one is refused.
    gate_up : {None, "interleaved", "stacked"}
        Whether the rows are those of gate and up, for ``activation``: alternating, as in gpt-oss, or first all of gate.
        Both are packed in the same order, and afterwards nothing tells which of them the rows had: see
        :func:`moe_numba.pack_mxfp4_experts` for which checkpoints have which.

    Returns
    -------
    tensor [groups, ceil(n / 64), ceil(k / 64), 2176], uint8; with ``gate_up`` [groups, n / 64, ceil(k / 64), 136, 16]
        On the device of ``blocks``: 4.25 bits per weight. Rows and columns are padded with zeros to multiples of 64.
        Both shapes have as many bytes; functions accept only the one that they need.

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.

    Examples
    --------
    >>> blocks = torch.full((1, 64, 2, 16), 0x22, dtype=torch.uint8)  # 64 x 64 codes of 1.0, two in a byte
    >>> scales = torch.full((1, 64, 2), 127, dtype=torch.uint8)  # 2**0 for each 32 elements
    >>> moe_numba.pack_mxfp4(blocks, scales).shape
    torch.Size([1, 1, 1, 2176])
    """
    if not isinstance(blocks, torch.Tensor):
        return call_with_tensors(pack_mxfp4, "blocks", dict(blocks=blocks, scales=scales, gate_up=gate_up))
    return pack_checked(blocks, scales, gate_up)


def pack_checked(blocks, scales, gate_up, names=("blocks", "scales")):
    """Check the arguments of :func:`pack_mxfp4`, of which the first two have the names of a caller's, and pack."""
    blocks_name, scales_name = names
    blocks, scales = as_tensor(blocks, blocks_name), as_tensor(scales, scales_name)
    sizes = groups, n, k_blocks = check_blocks(blocks_name, blocks)
    check_scales(scales_name, scales, blocks_name, blocks, sizes)
    check_gate_up(gate_up, n, blocks_name)
    too_large = (scales > MAX_SCALE) & (scales != NAN_SCALE)
    if bool(too_large.any()):
        value = int(scales[too_large][0])
        raise ValueError(
            f"{scales_name} has the byte {value}, 2**{value - 127}; it must be at most {MAX_SCALE}, or 255"
        )
    rows, columns = -(-n // TILE), -(-k_blocks // 2)
    packed = torch.empty(groups, rows, columns, TILE_BYTES, dtype=torch.uint8, device=blocks.device)
    for group in range(groups):  # one at a time: the intermediate results take many times the memory
        codes, bytes_ = (order_rows(t, gate_up) for t in (blocks[group].reshape(n, -1), scales[group]))
        is_nan = (bytes_ == NAN_SCALE).repeat_interleave(MX_BLOCK, 1)
        codes = unpack_nibbles(codes).masked_fill(is_nan, 0)  # 0 * infinity is NaN
        codes = pad(codes, rows * TILE, columns * TILE).long()
        exponents = pad(_exponents(bytes_), rows * TILE, 2 * columns).long()
        packed[group, :, :, :CODE_BYTES] = _pack_codes(codes, rows, columns)
        packed[group, :, :, CODE_BYTES:] = _pack_scales(exponents, rows, columns)
    return packed.unflatten(-1, GATE_UP_TILE) if gate_up else packed


def check_blocks(name, blocks):
    """Check the codes of a weight; return the groups, n, and the blocks of k."""
    check_has_memory(name, blocks)
    check_tensor(name, blocks, dtype=torch.uint8)
    columns = blocks.shape[2:]
    if not (blocks.dim() == 4 and columns[1] == 16 or blocks.dim() == 3 and columns[0] % 16 == 0):
        raise ValueError(
            f"{name} has shape {tuple(blocks.shape)}; it must be [groups, n, k / 32, 16] or [groups, n, k / 2]"
        )
    if blocks.shape[1] % 32 or not blocks.numel():
        raise ValueError(f"{name} has shape {tuple(blocks.shape)}; n must be a multiple of 32, and none may be 0")
    return *blocks.shape[:2], columns.numel() // 16


def check_scales(name, scales, blocks_name, blocks, sizes):
    """Check the scales of a weight, whose codes have been checked; ``sizes`` is what `check_blocks` returned."""
    check_has_memory(name, scales)
    of_columns = f"{blocks_name} has {MX_BLOCK * sizes[2]} columns"
    because = f"{blocks_name} has {{}} groups", f"{blocks_name} has {{}} rows per group", of_columns
    wanted = dict(shape=sizes, because=because, device=(blocks.device, blocks_name))
    check_tensor(name, scales, dtype=torch.uint8, **wanted)


def _pack_codes(codes, rows, columns):
    """Pack [64 rows, 64 columns] of codes as [rows, columns, 2048] bytes."""
    fields = fragments((codes & 8) << 12 | (codes & 7) << 6, rows, columns)
    w = [fields[..., i, 0] | fields[..., i, 1] << 16 for i in range(8)]  # the eight registers of a 32-column block
    a, b = (w[i] | w[i + 1] >> 6 | rotl(w[i + 2], 4) for i in (0, 4))
    x, y = w[3], w[7]  # (a << 1) ^ (b >> 6) and (a << 2) ^ (b << 3): each line sets bits that were 0, in this order
    b = b | ((y ^ a << 2) & 0x01000100) >> 3
    a = a | ((x ^ b >> 6) & 0x00400040) >> 1
    b = b | ((x ^ a << 1) & 0x01800180) << 6
    a = a | ((y ^ b << 3) & 0x80408040) >> 2
    a = a | ((x ^ b >> 6) & 0x80008000) >> 1
    b = b | ((y ^ a << 2) & 0x00800080) >> 3
    return as_bytes(torch.stack([a, b], -1).reshape(rows, columns, CODE_BYTES // 4))


def _exponents(scales):
    return torch.where(scales < MIN_SCALE, 0, scales.int() + EXPONENT_OFFSET).clamp(max=255)


def _pack_scales(exponents, rows, columns):
    """Pack [64 rows, 2 columns] of exponents as [rows, columns, 128] bytes: a word for a lane's two rows."""
    # Dimensions: tile row, tile column, warp, row of 8, 32-column block, two rows of a lane.
    words = exponents.view(rows, 4, 2, 8, columns, 2).permute(0, 4, 1, 3, 5, 2) << 7
    words = words[..., 0] | words[..., 1] << 16  # two bf16, for each 32-column block
    return as_bytes((words[..., 0] | rotl(words[..., 1], 8)).reshape(rows, columns, SCALE_BYTES // 4))
