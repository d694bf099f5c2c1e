"""Packing of MXFP4 weights into the order in which the kernel of ``kernel_mxfp4.py`` reads them.

A unit is 64 rows of a weight by 64 elements of k, the A operand of four bf16 wgmmas: 16 bytes of codes for each of the
128 threads of a warpgroup, then the scales. A thread needs 16 registers of A, each with two bf16 of one row: register
``4 s + 2 h + r`` has the columns ``16 s + 8 h + 2 (l % 4)`` and the next one of row ``16 w + l // 4 + 8 r``.

In bf16, an e2m1 number times 2**-126 is its sign in bit 15 and its other three bits in bits 8 to 6: with an exponent of
0 both formats are subnormal. So decoding a register is to move bits to these places in both halves (``FIELDS``) and to
multiply by a power of two. Two words have the codes of the eight registers of a 32-column block, which have two scales.
Three registers come from either word by at most one shift and one AND, and the last two from bits of both words:

    a, a << 6, rotr(a, 4), (a << 1) ^ (b >> 6), b, b << 6, rotr(b, 4), (a << 2) ^ (b << 3)        each & FIELDS

The XOR of two shifted words also has bits that belong to other registers. Packing compensates for them, which costs the
kernel nothing: 16 instructions decode 16 numbers, and eight multiplications scale them.
"""

import torch

from moe_numba.runtime.validate import check_tensor

UNIT = 64  # rows and columns of a unit
SCALE_BLOCK = 32  # elements of k that share a scale
CODE_BYTES, SCALE_BYTES = 2048, 128
UNIT_BYTES = CODE_BYTES + SCALE_BYTES
FIELDS = 0x81C081C0  # sign and the low three bits of exponent and mantissa, in two bf16
EXPONENTS = 0x7F807F80  # exponents of two bf16

# The kernel multiplies by the bf16 with exponent byte scale + EXPONENT_OFFSET, and by 2**RESULT_EXPONENT at the end. So
# scales around 1 are in the middle of a range without overflow and without the subnormal numbers below 2**-126.
EXPONENT_OFFSET, RESULT_EXPONENT = 94, 32
MIN_SCALE, MAX_SCALE, NAN_SCALE = 128 - EXPONENT_OFFSET, 254 - EXPONENT_OFFSET, 255

GATE_UP = (None, "interleaved", "stacked")


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, gate_up: str | None = None) -> torch.Tensor:
    """Pack MXFP4 weights for ``group_gemm_mxfp4``, once when a model is loaded.

    Parameters
    ----------
    blocks : tensor [groups, n, k / 32, 16] or [groups, n, k / 2], uint8
        Two e2m1 codes per byte, the first in the low half, as gpt-oss stores them. n and k are multiples of 32.
    scales : tensor [groups, n, k / 32], uint8
        Byte s is the scale 2**(s - 127) of 32 elements of k, and 255 is NaN, which makes them all NaN. From 2**-93 to
        2**33 weights are exact; with a smaller scale they become zeros, and a larger one is refused.
    gate_up : {None, "interleaved", "stacked"}
        Whether the rows are those of gate and up, for ``activation``: alternating, as in gpt-oss, or first all of gate.

    Returns
    -------
    tensor [groups, ceil(n / 64), ceil(k / 64), 2176], uint8
        On the device of ``blocks``: 4.25 bits per weight. Rows and columns are padded with zeros to multiples of 64.

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.
    """
    if scales.dim() != 3:
        raise ValueError(f"scales has shape {tuple(scales.shape)}; it must be [groups, n, k / 32]")
    groups, n, k_blocks = scales.shape
    shape = (groups, n, k_blocks, 16) if blocks.dim() == 4 else (groups, n, 16 * k_blocks)
    check_tensor("blocks", blocks, dtype=torch.uint8, shape=shape)
    check_tensor("scales", scales, dtype=torch.uint8, device=(blocks.device, "blocks"))
    if n % 32 or not n or not k_blocks or not groups:
        raise ValueError(f"scales has shape {tuple(scales.shape)}; n must be a multiple of 32, and none may be 0")
    if gate_up not in GATE_UP:
        raise ValueError(f"gate_up is {gate_up!r}; it must be None, 'interleaved' or 'stacked'")
    if gate_up is not None and n % UNIT:
        raise ValueError(f"scales has {n} rows; with gate_up they must be a multiple of 64")
    too_large = (scales > MAX_SCALE) & (scales != NAN_SCALE)
    if bool(too_large.any()):
        value = int(scales[too_large][0])
        raise ValueError(f"scales has the byte {value}, 2**{value - 127}; it must be at most {MAX_SCALE}, or 255")
    rows, columns = -(-n // UNIT), -(-k_blocks // 2)
    packed = torch.empty(groups, rows, columns, UNIT_BYTES, dtype=torch.uint8, device=blocks.device)
    for group in range(groups):  # one at a time: the intermediate results take many times the memory
        codes, bytes_ = blocks[group].reshape(n, -1), scales[group]
        if gate_up is not None:
            codes, bytes_ = (_order_gate_up(t, gate_up) for t in (codes, bytes_))
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        codes = codes.masked_fill((bytes_ == NAN_SCALE).repeat_interleave(SCALE_BLOCK, 1), 0)  # 0 * infinity is NaN
        exponents = torch.where(bytes_ < MIN_SCALE, 0, bytes_.int() + EXPONENT_OFFSET).clamp(max=255)
        padding = (0, columns * UNIT - codes.shape[1], 0, rows * UNIT - n)
        codes = torch.nn.functional.pad(codes, padding)
        exponents = torch.nn.functional.pad(exponents, (0, 2 * columns - k_blocks, 0, rows * UNIT - n))
        packed[group, :, :, :CODE_BYTES] = _pack_codes(codes.to(torch.int64), rows, columns)
        packed[group, :, :, CODE_BYTES:] = _pack_scales(exponents.to(torch.int64), rows, columns)
    return packed


def _order_gate_up(rows, gate_up):
    """Order rows so that of 16 the first eight are of gate, and the others the rows of up that belong to them."""
    pairs = rows.unflatten(0, (-1, 2)) if gate_up == "interleaved" else rows.unflatten(0, (2, -1)).transpose(0, 1)
    return pairs.unflatten(0, (-1, 8)).transpose(1, 2).flatten(0, 2)


def _pack_codes(codes, rows, columns):
    """Pack [64 rows, 64 columns] of codes as [rows, columns, 2048] bytes."""
    # Dimensions: unit row, warp, r, row of 8, unit column, 32-column block, s % 2, h, lane of 4, half of a register.
    fields = (codes & 8) << 12 | (codes & 7) << 6
    fields = fields.view(rows, 4, 2, 8, columns, 2, 2, 2, 4, 2).permute(0, 4, 1, 3, 8, 5, 6, 7, 2, 9).flatten(6, 8)
    w = [fields[..., i, 0] | fields[..., i, 1] << 16 for i in range(8)]  # the eight registers of a 32-column block
    a, b = (w[i] | w[i + 1] >> 6 | _rotl(w[i + 2], 4) for i in (0, 4))
    x, y = w[3], w[7]  # (a << 1) ^ (b >> 6) and (a << 2) ^ (b << 3): each line sets bits that were 0, in this order
    b = b | ((y ^ a << 2) & 0x01000100) >> 3
    a = a | ((x ^ b >> 6) & 0x00400040) >> 1
    b = b | ((x ^ a << 1) & 0x01800180) << 6
    a = a | ((y ^ b << 3) & 0x80408040) >> 2
    a = a | ((x ^ b >> 6) & 0x80008000) >> 1
    b = b | ((y ^ a << 2) & 0x00800080) >> 3
    return _as_bytes(torch.stack([a, b], -1).reshape(rows, columns, CODE_BYTES // 4))


def _pack_scales(exponents, rows, columns):
    """Pack [64 rows, 2 columns] of exponents as [rows, columns, 128] bytes: a word for a lane's two rows."""
    words = exponents.view(rows, 4, 2, 8, columns, 2).permute(0, 4, 1, 3, 5, 2) << 7
    words = words[..., 0] | words[..., 1] << 16  # two bf16, for each 32-column block
    return _as_bytes((words[..., 0] | _rotl(words[..., 1], 8)).reshape(rows, columns, SCALE_BYTES // 4))


def _rotl(words, count):
    return (words << count | words >> 32 - count) & 0xFFFFFFFF


def _as_bytes(words):
    """Return 32-bit words, held in int64, as bytes."""
    return words.contiguous().view(torch.uint8).unflatten(-1, (-1, 8))[..., :4].flatten(-2)
