"""Reference of packed MXFP4 weights in torch: what ``pack_mxfp4_experts`` has packed, as numbers."""

import torch

from moe_numba.grouped_gemm.w4.checks import check_packed
from moe_numba.grouped_gemm.w4.packing import EXPONENT_OFFSET, EXPONENTS, FIELDS
from moe_numba.grouped_gemm.w4.reference import E2M1
from moe_numba.grouped_gemm.w4.weight_tiles import CODE_BYTES, TILE


def unpack(packed):
    """Return a packed weight [n / 64, k / 64, 2176] of one expert as float32 [n, k]; it has no rows of gate and up."""
    check_packed("packed", packed[None], (1, "n / 64", "k / 64"), gate_up=False)
    return _unpack(packed)


def unpack_gate_up(packed, interleaved):
    """Return packed gate and up, [n / 64, k / 64, 136, 16], of one expert as float32 [n, k].

    Rows alternate between gate and up, or those of gate are first.
    """
    check_packed("packed", packed[None], (1, "n / 64", "k / 64"), gate_up=True)
    gate, up = _unpack(packed.flatten(2)).unflatten(0, (-1, 2, 8)).unbind(1)
    gate, up = gate.flatten(0, 1), up.flatten(0, 1)
    return torch.stack([gate, up], 1).flatten(0, 1) if interleaved else torch.cat([gate, up])


def _unpack(packed):
    """Return tiles [n / 64, k / 64, 2176] as float32 [n, k], rows in the packed order."""
    rows, columns, _ = packed.shape
    words = packed.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    codes, scales = words[..., : CODE_BYTES // 4], words[..., CODE_BYTES // 4 :]
    # Dimensions: tile row, tile column, warp, row of 8, lane of 4, 32-column block, and the two words of the block.
    a, b = codes.reshape(rows, columns, 4, 8, 4, 2, 2).unbind(-1)
    registers = a, a << 6, _rotr(a, 4), (a << 1) ^ (b >> 6), b, b << 6, _rotr(b, 4), (a << 2) ^ (b << 3)
    fields = torch.stack([register & FIELDS for register in registers], -1)
    halves = torch.stack([fields & 0xFFFF, fields >> 16], -1)
    code = halves >> 12 & 8 | halves >> 6 & 7
    # A register's number is (s % 2, h, r); then half of a register.
    code = code.unflatten(6, (2, 2, 2)).permute(0, 2, 8, 3, 1, 5, 6, 7, 4, 9).reshape(TILE * rows, TILE * columns)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)[code]
    exponents = torch.stack([scales & EXPONENTS, _rotr(scales, 8) & EXPONENTS], -1).view(rows, columns, 4, 8, 2)
    exponents = torch.stack([exponents & 0xFFFF, exponents >> 16], -1) >> 7  # rows of a lane: r
    exponents = exponents.permute(0, 2, 5, 3, 1, 4).reshape(TILE * rows, 2 * columns)
    factors = torch.exp2((exponents - EXPONENT_OFFSET - 127).double())
    factors = torch.where(exponents == 0, 0.0, torch.where(exponents == 255, float("nan"), factors))
    return values * factors.float().repeat_interleave(32, 1)


def _rotr(words, count):
    return (words >> count | words << 32 - count) & 0xFFFFFFFF
