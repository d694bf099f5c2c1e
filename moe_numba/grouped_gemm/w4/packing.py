"""Packing of MXFP4 weights into the tiles of ``weight_tiles.py``, for activations in bf16 or in FP8 (e4m3).

A tile has 2048 bytes of codes and 128 of scales. For bf16 a thread decodes two words of codes to the eight registers of
a 32-column block, for e4m3 to four registers. In both formats the bits of an e2m1 number, its sign and the other three,
have places where they are that number times a power of two, including the subnormal 0.5: with the exponent field above
them all zeros, both formats are subnormal at the same time. In bf16 these are bits 15 and 8 to 6 (times 2**-126), in
e4m3 bits 7 and 4 to 2 (times 2**-6). So decoding a register is to move bits to these places (``FIELDS``):

    bf16: a, a << 6, rotr(a, 4), (a << 1) ^ (b >> 6), b, b << 6, rotr(b, 4), (a << 2) ^ (b << 3)    each & FIELDS
    e4m3: a, b, (a << 2) ^ (b << 3), (a << 1) ^ (b >> 2)                                        each & E4M3_FIELDS

The XOR of two shifted words also has bits that belong to other registers. Packing compensates for them, which costs the
kernel nothing: 16 instructions decode 16 numbers for bf16, and eight for e4m3.

The two packings differ because the threads of a warp need other columns: for bf16 a thread has columns ``2 q``,
``2 q + 1``, ``2 q + 8`` and ``2 q + 9`` of 16 (``q`` is its lane modulo 4), for e4m3 ``4 q`` to ``4 q + 3``. x is in
shared memory as TMA wrote it, in 16-byte vectors of consecutive columns, so no order of columns serves both. To use
the bytes for bf16, an FP8 kernel would have to combine bytes of two threads' words, and fields that are seven bits
apart instead of three: at least 16 more instructions per tile, of which it now executes 70.
"""

import torch

from moe_numba.grouped_gemm.w4.weight_tiles import (
    CODE_BYTES,
    TILE,
    as_bytes,
    bf16_fragments,
    check_gate_up,
    e4m3_fragments,
    order_rows,
    pad,
    rotl,
    unpack_nibbles,
)
from moe_numba.runtime.dlpack import as_tensor, call_with_tensors
from moe_numba.runtime.validate import check_has_memory, check_tensor

SCALE_BLOCK = 32  # elements of k that share a scale
SCALE_BYTES = 128  # of a tile
TILE_BYTES = CODE_BYTES + SCALE_BYTES
FIELDS = 0x81C081C0  # sign and the low three bits of exponent and mantissa, in two bf16
E4M3_FIELDS = 0x9C9C9C9C  # the same in four e4m3
EXPONENTS = 0x7F807F80  # exponents of two bf16
F32_EXPONENT = 0x7F800000  # of a float32

# For bf16 the kernel multiplies by the bf16 with exponent byte scale + EXPONENT_OFFSET, and by 2**RESULT_EXPONENT at
# the end. So scales around 1 are in the middle of a range without overflow and without the subnormal numbers below
# 2**-126. For e4m3 it multiplies float32 sums, by the float32 with exponent byte scale + E4M3_EXPONENT_OFFSET.
EXPONENT_OFFSET, RESULT_EXPONENT = 94, 32
MIN_SCALE, MAX_SCALE, NAN_SCALE = 128 - EXPONENT_OFFSET, 254 - EXPONENT_OFFSET, 255
E4M3_EXPONENT_OFFSET = 6
MAX_E4M3_SCALE = 254 - E4M3_EXPONENT_OFFSET

ACTIVATION_DTYPES = torch.bfloat16, torch.float8_e4m3fn
E4M3_SHAPE = 136, 16  # of a tile packed for e4m3: vectors of 16 bytes, one of codes per thread and then scales


def pack_mxfp4(
    blocks: torch.Tensor,
    scales: torch.Tensor,
    gate_up: str | None = None,
    activation_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Pack MXFP4 weights for ``group_gemm_mxfp4``, once when a model is loaded.

    Parameters
    ----------
    blocks : tensor [groups, n, k / 32, 16] or [groups, n, k / 2], uint8
        Two e2m1 codes per byte, the first in the low half, as gpt-oss stores them. n and k are multiples of 32.
    scales : tensor [groups, n, k / 32], uint8
        Byte s is the scale 2**(s - 127) of 32 elements of k, and 255 is NaN, which makes them all NaN. For activations
        in bfloat16, weights are exact with scales from 2**-93 to 2**33; with a smaller scale they become zeros, and a
        larger one is refused. For float8_e4m3fn they are exact up to 2**121, and a larger one is refused.
    gate_up : {None, "interleaved", "stacked"}
        Whether the rows are those of gate and up, for ``activation``: alternating, as in gpt-oss, or first all of gate.
    activation_dtype : {torch.bfloat16, torch.float8_e4m3fn}
        dtype of the ``x`` that the weights will be multiplied with: threads need other codes for the tensor cores' FP8
        instructions than for those of bfloat16.

    Returns
    -------
    tensor [groups, ceil(n / 64), ceil(k / 64), 2176] or [groups, ceil(n / 64), ceil(k / 64), 136, 16], uint8
        For bfloat16 and for float8_e4m3fn, on the device of ``blocks``: 4.25 bits per weight. Rows and columns are
        padded with zeros to multiples of 64.

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.
    """
    if not isinstance(blocks, torch.Tensor):
        arguments = dict(blocks=blocks, scales=scales, gate_up=gate_up, activation_dtype=activation_dtype)
        return call_with_tensors(pack_mxfp4, "blocks", arguments)
    scales = as_tensor(scales, "scales")
    for name, tensor in (("blocks", blocks), ("scales", scales)):
        check_has_memory(name, tensor)
    if scales.dim() != 3:
        raise ValueError(f"scales has shape {tuple(scales.shape)}; it must be [groups, n, k / 32]")
    groups, n, k_blocks = scales.shape
    shape = (groups, n, k_blocks, 16) if blocks.dim() == 4 else (groups, n, 16 * k_blocks)
    check_tensor("blocks", blocks, dtype=torch.uint8, shape=shape)
    check_tensor("scales", scales, dtype=torch.uint8, device=(blocks.device, "blocks"))
    if n % 32 or not n or not k_blocks or not groups:
        raise ValueError(f"scales has shape {tuple(scales.shape)}; n must be a multiple of 32, and none may be 0")
    check_gate_up(gate_up, n)
    if activation_dtype not in ACTIVATION_DTYPES:
        allowed = " or ".join(map(str, ACTIVATION_DTYPES))
        raise ValueError(f"activation_dtype is {activation_dtype!r}; it must be {allowed}")
    is_e4m3 = activation_dtype == torch.float8_e4m3fn
    most = MAX_E4M3_SCALE if is_e4m3 else MAX_SCALE
    too_large = (scales > most) & (scales != NAN_SCALE)
    if bool(too_large.any()):
        value = int(scales[too_large][0])
        raise ValueError(f"scales has the byte {value}, 2**{value - 127}; it must be at most {most}, or 255")
    pack_codes, pack_scales, exponents_of = _FOR_E4M3 if is_e4m3 else _FOR_BF16
    rows, columns = -(-n // TILE), -(-k_blocks // 2)
    packed = torch.empty(groups, rows, columns, TILE_BYTES, dtype=torch.uint8, device=blocks.device)
    for group in range(groups):  # one at a time: the intermediate results take many times the memory
        codes, bytes_ = (order_rows(t, gate_up) for t in (blocks[group].reshape(n, -1), scales[group]))
        is_nan = (bytes_ == NAN_SCALE).repeat_interleave(SCALE_BLOCK, 1)
        codes = unpack_nibbles(codes).masked_fill(is_nan, 0)  # 0 * infinity is NaN
        codes = pad(codes, rows * TILE, columns * TILE).long()
        exponents = pad(exponents_of(bytes_), rows * TILE, 2 * columns).long()
        packed[group, :, :, :CODE_BYTES] = pack_codes(codes, rows, columns)
        packed[group, :, :, CODE_BYTES:] = pack_scales(exponents, rows, columns)
    return packed.unflatten(-1, E4M3_SHAPE) if is_e4m3 else packed


def _pack_codes(codes, rows, columns):
    """Pack [64 rows, 64 columns] of codes as [rows, columns, 2048] bytes, for bf16."""
    fields = bf16_fragments((codes & 8) << 12 | (codes & 7) << 6, rows, columns)
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


def _pack_e4m3_codes(codes, rows, columns):
    """Pack [64 rows, 64 columns] of codes as [rows, columns, 2048] bytes, for e4m3."""
    fields = e4m3_fragments((codes & 8) << 4 | (codes & 7) << 2, rows, columns)
    w = [sum(fields[..., i, byte] << 8 * byte for byte in range(4)) for i in range(4)]
    a, b, x, y = w  # x is (a << 2) ^ (b << 3) and y (a << 1) ^ (b >> 2): each line sets bits that were 0, in this order
    b = b | ((x ^ a << 2) & 0x10101010) >> 3
    a = a | ((x ^ b << 3) & 0x80808080) >> 2
    a = a | ((y ^ b >> 2) & 0x04040404) >> 1
    b = b | ((x ^ a << 2) & 0x08080808) >> 3
    a = a | ((x ^ b << 3) & 0x04040404) >> 2
    a = a | ((y ^ b >> 2) & 0x80808080) >> 1
    b = b | ((y ^ a << 1) & 0x18181818) << 2
    return as_bytes(torch.stack([a, b], -1).reshape(rows, columns, CODE_BYTES // 4))


def _exponents(scales):
    return torch.where(scales < MIN_SCALE, 0, scales.int() + EXPONENT_OFFSET).clamp(max=255)


def _e4m3_exponents(scales):
    return (scales.int() + E4M3_EXPONENT_OFFSET).clamp(max=255)


def _exponents_of_lanes(exponents, rows, columns):
    """Arrange [64 rows, 2 columns] as [rows, columns, warp, row of 8, 32-column block, two rows of a lane]."""
    return exponents.view(rows, 4, 2, 8, columns, 2).permute(0, 4, 1, 3, 5, 2)


def _pack_scales(exponents, rows, columns):
    """Pack [64 rows, 2 columns] of exponents as [rows, columns, 128] bytes: a word for a lane's two rows."""
    words = _exponents_of_lanes(exponents, rows, columns) << 7
    words = words[..., 0] | words[..., 1] << 16  # two bf16, for each 32-column block
    return as_bytes((words[..., 0] | rotl(words[..., 1], 8)).reshape(rows, columns, SCALE_BYTES // 4))


def _pack_e4m3_scales(exponents, rows, columns):
    """As :func:`_pack_scales`: rotated to the left by 0, 8, 16 or 24 bits, a word has an exponent of a float32."""
    words = _exponents_of_lanes(exponents, rows, columns).flatten(-2) << 23
    word = sum(rotl(words[..., i], 32 - 8 * i) if i else words[..., i] for i in range(4))
    return as_bytes(word.reshape(rows, columns, SCALE_BYTES // 4))


_FOR_BF16 = _pack_codes, _pack_scales, _exponents
_FOR_E4M3 = _pack_e4m3_codes, _pack_e4m3_scales, _e4m3_exponents
