"""``unpack_mxfp4``: packed MXFP4 weights as bfloat16, for kernels that multiply bfloat16 weights.

A CTA decodes a weight tile, 64 x 64 weights, and a warp 16 rows of it. Each lane loads 16 bytes of codes and a word of
scales, and decodes them to the registers of wgmma's A operand, as the grouped GEMM does. ``stmatrix`` turns these into
rows in shared memory, whose 16-byte vectors are XORed with the row's number, so that neither it nor the loads that
follow have bank conflicts. Eight lanes then store a row of 128 bytes: whole cache lines.
"""

from functools import cache

import torch
from numba import cuda, int32, int64, uint32

from moe_numba.grouped_gemm.w4.dequantize import decode_scaled_tile
from moe_numba.grouped_gemm.w4.packing import RESULT_EXPONENT, TILE_BYTES
from moe_numba.grouped_gemm.w4.weight_tiles import CODE_BYTES, TILE
from moe_numba.ptx.arithmetic import mul_rn_bf16x2
from moe_numba.ptx.matrix import stmatrix_x4
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_nc_na_s32x4,
    ld_shared_s32x4,
    st_global_s32x4,
)
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.validate import is_fake

THREADS = 128
SIGNATURE = "int32*", "uint16*", "int32", "int32"
_TILE_WORDS, _CODE_WORDS = TILE_BYTES // 4, CODE_BYTES // 4
_WARP_ROWS = 16  # of a tile
_ROW_WORDS = TILE // 2  # of a tile's row in bfloat16
_SHARED_WORDS = TILE * _ROW_WORDS
_RESULT_SCALE = (127 + RESULT_EXPONENT << 7) * 0x10001  # two bf16


def unpack_mxfp4(packed: torch.Tensor, gate_up: str | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Decode weights that ``pack_mxfp4`` has packed, in one launch. The caller has checked the arguments.

    A fake tensor is not decoded: the result has only its shape.

    Parameters
    ----------
    packed : tensor [groups, n / 64, k / 64, 2176] or [groups, n / 64, k / 64, 136, 16], uint8
        Contiguous and 16-byte aligned, on a GPU with wgmma. Its last dimensions say whether it has gate and up.
    gate_up : {None, "interleaved", "stacked"}
        Order of the rows of gate and up in the result; None for weights without them. Both are possible for all packed
        weights: "interleaved" is what ``fused_experts`` needs for "swigluoai", "stacked" what it needs for "silu".
    out : tensor [groups, n, k], bfloat16, optional
        Contiguous and 16-byte aligned.

    Returns
    -------
    tensor [groups, n, k], bfloat16
        n and k are multiples of 64: what packing has padded is zero. Numbers are those that the grouped GEMM multiplies
        by x: exact for scales from 2**-93 to 2**33, zero with the sign of the code for smaller ones, and NaN for 255.

    Notes
    -----
    The kernel reads 17/32 bytes per weight and writes two. Lower bound of gpt-oss-20b's w13 (32 experts of 5760 x 2880)
    on an H200: 282 MB read and 1062 MB written take 0.34 ms at 4 TB/s, and its w2 half as long.
    """
    groups, row_tiles, column_tiles = packed.shape[:3]
    if out is None:
        shape = groups, TILE * row_tiles, TILE * column_tiles
        out = torch.empty(shape, dtype=torch.bfloat16, device=packed.device)
    if not is_fake(packed.device):
        kernel = make_unpack_kernel(gate_up)
        start = launcher(kernel, SIGNATURE, packed.device.index or 0, launch_bounds=THREADS, dependent=True)
        tiles = groups * row_tiles * column_tiles
        start(tiles, THREADS, None, address(packed), address(out), row_tiles, column_tiles)
    return out


@cuda.jit(device=True)
def store_columns(words, at, a, b, c, d):
    """Store 16 columns of a warp's 16 rows, which a lane has in four registers, at their final scale."""
    scale = uint32(_RESULT_SCALE)
    a, b, c, d = mul_rn_bf16x2(a, scale), mul_rn_bf16x2(b, scale), mul_rn_bf16x2(c, scale), mul_rn_bf16x2(d, scale)
    stmatrix_x4(words, at, a, b, c, d)


@cache
def make_unpack_kernel(gate_up):
    """Make the kernel for an order of the rows of gate and up, or without them (None)."""
    is_interleaved, is_stacked = gate_up == "interleaved", gate_up == "stacked"

    @cuda.jit
    def unpack_mxfp4(packed, out, row_tiles, column_tiles):
        words = cuda.shared.array(_SHARED_WORDS, int32, 16)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        tile = int32(cuda.blockIdx.x)
        row_tile = int32(uint32(tile) // uint32(column_tiles))  # of all groups
        column_tile = int32(tile - row_tile * column_tiles)
        first = int64(tile) * _TILE_WORDS
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        codes = ld_nc_na_s32x4(packed, first + 4 * int32(cuda.threadIdx.x))
        registers = decode_scaled_tile(codes, packed[first + (_CODE_WORDS + 8 * warp + (lane >> 2))])

        # Lane 8 i + j passes the address of row j of matrix i: of the rows from 8 (i % 2) on, and vector i // 2 of two.
        own = int32(warp * (_WARP_ROWS * _ROW_WORDS))
        row = int32(lane & 15)
        at = int32(own + row * _ROW_WORDS + 4 * ((lane >> 4) ^ (row & 7)))
        store_columns(words, at, registers[0], registers[1], registers[2], registers[3])
        store_columns(words, int32(at ^ 8), registers[4], registers[5], registers[6], registers[7])
        store_columns(words, int32(at ^ 16), registers[8], registers[9], registers[10], registers[11])
        store_columns(words, int32(at ^ 24), registers[12], registers[13], registers[14], registers[15])
        cuda.syncwarp()

        # Row i of the first eight, or of gate, goes to row first_row + i * step; those of the others are to_other on.
        first_row, step, to_other = int32(TILE * row_tile + _WARP_ROWS * warp), int32(1), int32(8)
        if is_interleaved:
            step, to_other = int32(2), int32(1)
        elif is_stacked:
            group, to_other = int32(uint32(row_tile) // uint32(row_tiles)), int32(TILE // 2 * row_tiles)
            first_row = int32(TILE // 2 * row_tile + _WARP_ROWS // 2 * warp + group * to_other)
        pitch, column = int64(TILE) * column_tiles, int32(TILE * column_tile + 8 * (lane & 7))
        for i in range(4):
            row = int32(4 * i + (lane >> 3))
            a, b, c, d = ld_shared_s32x4(words, int32(own + row * _ROW_WORDS + 4 * ((lane & 7) ^ (row & 7))))
            to = int64(first_row + (row & 7) * step + (row >> 3) * to_other)
            st_global_s32x4(out, to * pitch + column, a, b, c, d)

    return unpack_mxfp4
