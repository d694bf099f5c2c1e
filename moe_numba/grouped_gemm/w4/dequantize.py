"""Decoding of 4-bit weights in registers: a thread's words of codes become its registers of wgmma's A operand.

How the codes are packed, and why shifts and masks decode them, is in ``packing_mxfp4.py`` and ``packing_int4.py``.
"""

from functools import cache

from numba import cuda, int32, uint32

from moe_numba.grouped_gemm.packing_int4 import HIGH_FACTOR, HIGH_NIBBLES, LOW_FACTOR, LOW_NIBBLES, MINUS_ZERO_CODE
from moe_numba.grouped_gemm.w4.packing import E4M3_FIELDS, EXPONENTS, F32_EXPONENT, FIELDS
from moe_numba.grouped_gemm.w4.weight_tiles import CODE_BYTES, TILE
from moe_numba.ptx.arithmetic import (
    fma_rn_bf16x2,
    half_bits_as_float,
    mul_rn_bf16x2_high,
    mul_rn_bf16x2_low,
    uint_as_float,
)
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


# MXFP4, scaled in bf16


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


# Without scales, which the main loop applies to the accumulators of a 32-column block


@cuda.jit(device=True)
def e4m3_fields(word):
    """Keep the bits of four e2m1 numbers that are at their places in an e4m3."""
    return uint32(word & uint32(E4M3_FIELDS))


@cuda.jit(device=True)
def decode_e4m3_block(a, b):
    """Decode the four registers of a 32-column block of MXFP4 from two words of codes."""
    a, b = uint32(a), uint32(b)
    return e4m3_fields(a), e4m3_fields(b), e4m3_fields(shl(a, 2) ^ shl(b, 3)), e4m3_fields(shl(a, 1) ^ shr(b, 2))


@cuda.jit(device=True)
def decode_low(word):
    """Decode two int4, in the low four bits of either half."""
    return fma_rn_bf16x2(uint32(word & uint32(LOW_NIBBLES)), uint32(LOW_FACTOR), uint32(MINUS_ZERO_CODE))


@cuda.jit(device=True)
def decode_high(word):
    """Decode two int4, in bits 4 to 7 of either half."""
    return fma_rn_bf16x2(uint32(word & uint32(HIGH_NIBBLES)), uint32(HIGH_FACTOR), uint32(MINUS_ZERO_CODE))


@cuda.jit(device=True)
def decode_int4_block(a, b):
    """Decode the eight registers of a 32-column block of int4 from two words of codes."""
    a, b = uint32(a), uint32(b)
    c, d = shr(a, 8), shr(b, 8)
    low = decode_low(a), decode_high(a), decode_low(c), decode_high(c)
    return low + (decode_low(b), decode_high(b), decode_low(d), decode_high(d))


# Loads from shared memory


@cache
def make_tile_address(config, layout):
    """Make ``index = tile_address(warp, stage, tile)``: of a warpgroup's weight tile in shared memory, i32."""
    first, stage_words, tiles = layout.weight_offset // 4, layout.weight_bytes // 4, config.stage_tiles
    tile_words = config.tile_bytes // 4

    @cuda.jit(device=True)
    def tile_address(warp, stage, tile):
        return int32(first + (warp >> 2) * (tiles * tile_words) + stage * stage_words + tile * tile_words)

    return tile_address


@cache
def make_load_tile(config, layout):
    """Make ``codes, scales = load_tile(smem, warp, lane, stage, tile)``: the thread's four words of codes of a tile,
    and its word of MXFP4 scales.
    """
    tile_address, code_words = make_tile_address(config, layout), CODE_BYTES // 4

    @cuda.jit(device=True)
    def load_tile(smem, warp, lane, stage, tile):
        first = tile_address(warp, stage, tile)
        codes = ld_shared_s32x4(smem.i32, int32(first + 4 * (32 * (warp & 3) + lane)))
        return codes, smem.i32[uint32(first + code_words + 8 * (warp & 3) + (lane >> 2))]

    return load_tile


@cache
def make_load_unscaled_tile(config, layout):
    """Make ``codes, factors = load_tile(smem, warp, lane, stage, tile)``: four words of codes, and four float scales.

    The scales are those of the thread's two rows in the first and in the second block of 32 columns.
    """
    return _make_load_int4(config, layout) if config.weight == "int4" else _make_load_mxfp4(config, layout)


def _make_load_mxfp4(config, layout):
    load_words = make_load_tile(config, layout)

    @cuda.jit(device=True)
    def factor(word):
        return uint_as_float(uint32(word & uint32(F32_EXPONENT)))

    @cuda.jit(device=True)
    def load_tile(smem, warp, lane, stage, tile):
        codes, scales = load_words(smem, warp, lane, stage, tile)
        word = uint32(scales)
        return codes, (factor(word), factor(shl(word, 8)), factor(shl(word, 16)), factor(rotr(word, 8)))

    return load_tile


def _make_load_int4(config, layout):
    tile_address, offset, stage_words = (
        make_tile_address(config, layout),
        layout.scale_offset // 4,
        layout.scale_bytes // 4,
    )
    group_size, is_f32, is_f16 = config.group_size, config.scale_dtype == "f32", config.scale_dtype == "f16"
    group_words = config.scale_group_bytes // 4  # of 64 rows
    warpgroup_words, lane_words = layout.scale_groups * group_words, 2 if is_f32 else 1

    @cuda.jit(device=True)
    def load_pair(smem, index):
        """Load the scales of two rows."""
        word = uint32(smem.i32[uint32(index)])
        if is_f32:
            return uint_as_float(word), smem.f32[uint32(index + 1)]
        if is_f16:
            return half_bits_as_float(word), half_bits_as_float(shr(word, 16))
        return uint_as_float(shl(word, 16)), uint_as_float(uint32(word & uint32(0xFFFF0000)))

    @cuda.jit(device=True)
    def load_tile(smem, warp, lane, stage, tile):
        codes = ld_shared_s32x4(smem.i32, int32(tile_address(warp, stage, tile) + 4 * (32 * (warp & 3) + lane)))
        first = int32(offset + stage * stage_words + (warp >> 2) * warpgroup_words)
        first = int32(first + lane_words * (8 * (warp & 3) + (lane >> 2)))
        first = int32(first + tile * TILE // group_size * group_words)
        pair = load_pair(smem, first)
        return codes, pair + (load_pair(smem, int32(first + group_words)) if group_size < TILE else pair)

    return load_tile
