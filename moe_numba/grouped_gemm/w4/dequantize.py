"""Decoding of MXFP4 weights in registers: a thread's words of codes become its registers of wgmma's A operand.

``packing.py`` says how codes are packed, and why shifts and masks decode them.
"""

from functools import cache

from numba import cuda, int32, uint32

from moe_numba.grouped_gemm.w4.packing import EXPONENTS, FIELDS, TILE_BYTES
from moe_numba.grouped_gemm.w4.weight_tiles import CODE_BYTES
from moe_numba.ptx.arithmetic import mul_rn_bf16x2_high, mul_rn_bf16x2_low
from moe_numba.ptx.memory import ld_shared_s32x4


@cuda.jit(device=True)
def shl(word, count):
    return uint32(word << uint32(count))


@cuda.jit(device=True)
def shr(word, count):
    return uint32(word >> uint32(count))


@cuda.jit(device=True)
def rotr(word, count):
    return uint32(shr(word, count) | shl(word, 32 - count))


@cuda.jit(device=True)
def fields(word):
    """Keep the bits of two e2m1 numbers that are at their places in a bf16."""
    return uint32(word & uint32(FIELDS))


@cuda.jit(device=True)
def decode_scaled_block(a, b, scales):
    """Decode the eight registers of a 32-column block from two words of codes.

    The low half of ``scales`` is the bf16 scale of the thread's row ``l // 4``, the high half that of eight rows below.
    """
    return (
        mul_rn_bf16x2_low(fields(a), scales),
        mul_rn_bf16x2_high(fields(shl(a, 6)), scales),
        mul_rn_bf16x2_low(fields(rotr(a, 4)), scales),
        mul_rn_bf16x2_high(fields(shl(a, 1) ^ shr(b, 6)), scales),
        mul_rn_bf16x2_low(fields(b), scales),
        mul_rn_bf16x2_high(fields(shl(b, 6)), scales),
        mul_rn_bf16x2_low(fields(rotr(b, 4)), scales),
        mul_rn_bf16x2_high(fields(shl(a, 2) ^ shl(b, 3)), scales),
    )


@cuda.jit(device=True)
def decode_scaled_tile(codes, scales):
    """Decode a tile: four words of codes and one of scales become a thread's 16 registers of A, in bf16."""
    a_0, b_0, a_1, b_1 = codes
    word = uint32(scales)
    block_0 = decode_scaled_block(uint32(a_0), uint32(b_0), uint32(word & uint32(EXPONENTS)))
    block_1 = decode_scaled_block(uint32(a_1), uint32(b_1), uint32(rotr(word, 8) & uint32(EXPONENTS)))
    return block_0 + block_1


@cache
def make_load_tile(config, layout):
    """Make ``codes, scales = load_tile(smem, warp, lane, stage, tile)``.

    It loads the thread's four words of codes of a weight tile, and its word of scales.
    """
    weight_offset, stage_words, tiles = layout.weight_offset // 4, layout.weight_bytes // 4, config.stage_tiles
    tile_words, code_words = TILE_BYTES // 4, CODE_BYTES // 4

    @cuda.jit(device=True)
    def load_tile(smem, warp, lane, stage, tile):
        first = int32(weight_offset + (warp >> 2) * (tiles * tile_words) + stage * stage_words + tile * tile_words)
        codes = ld_shared_s32x4(smem.i32, int32(first + 4 * (32 * (warp & 3) + lane)))
        return codes, smem.i32[uint32(first + code_words + 8 * (warp & 3) + (lane >> 2))]

    return load_tile
