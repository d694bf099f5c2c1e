"""Epilogue for FP8 results: silu(gate) * up, quantised."""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.common.constants import BLOCK_N, CONSUMER_WARPS
from moe_numba.grouped_gemm.common.epilogue_terms import ALL_CONSUMERS
from moe_numba.grouped_gemm.wgmma.config import SILU_ROW_BYTES, SILU_ROWS
from moe_numba.ptx.accumulators import make_for_each_chunk
from moe_numba.ptx.arithmetic import LOG2_E, ex2_approx, float_as_int, int_as_float, rcp_approx, uint_as_float
from moe_numba.ptx.conversions import FP8_MAX, cvt_rn_satfinite_e4m3x2_f32
from moe_numba.ptx.matrix import make_stmatrix_columns
from moe_numba.ptx.warp import FULL_MASK, redux_sync_max_s32
from moe_numba.ptx.warpgroup import bar_sync


@cache
def make_store_silu_and_mul(n, layout):
    """Make ``store_silu_and_mul(gate, up, smem, output, warp, lane, tile)``, for accumulators of ``n`` rows.

    Both consumer warpgroups write gate and up of 32 rows, rounded to bf16, to shared memory. A warp's accumulators hold
    16 columns of y, which stmatrix transposes into rows: 128 columns of gate, and behind them those of up. Then each
    warp processes one row at a time, 4 of its 128 columns per lane, so that one warp reduction finds the largest
    magnitude. The result is FP8 with one scale per row and 128 columns, or with ``scaled_y`` the given one,
    ``output.second[0]``. ``output.y`` is seen as int32, four columns each.
    """
    epilogue_offset, config, scaled_y = layout.epilogue_offset, layout.config, layout.config.scaled_y
    limited, ragged_n, limit = config.activation == "swigluoai", config.ragged_n, np.float32(config.limit)
    exponent = np.float32(-LOG2_E * config.alpha)
    stmatrix = make_stmatrix_columns(SILU_ROW_BYTES)

    @cuda.jit(device=True)
    def store_rows(first_value, gate, up, smem, output, warp, lane, tile):
        first, count = int32(2 * first_value), 2 * len(gate)  # rows: a thread has half of the accumulators of one
        bar_sync(ALL_CONSUMERS, 32 * CONSUMER_WARPS)  # all warps have read the previous rows
        offset = int32(epilogue_offset + (lane & 7) * SILU_ROW_BYTES + (lane >> 3 & 1) * 16 + warp * 32)
        stmatrix(smem.u8, offset, gate, tile.scale)
        stmatrix(smem.u8, int32(offset + 2 * BLOCK_N), up, tile.scale)
        bar_sync(ALL_CONSUMERS, 32 * CONSUMER_WARPS)  # all warps have written their columns
        for t in range(warp, count, CONSUMER_WARPS):
            if first + t < tile.rows:
                source = int32((epilogue_offset + t * SILU_ROW_BYTES) // 4 + 2 * lane)
                largest = float32(0)
                values = cuda.local.array(4, float32)
                for i in range(2):
                    gates, ups = uint32(smem.i32[source + i]), uint32(smem.i32[source + 64 + i])
                    for h in range(2):
                        g = uint_as_float(uint32(gates & uint32(0xFFFF0000)) if h else uint32(gates << uint32(16)))
                        u = uint_as_float(uint32(ups & uint32(0xFFFF0000)) if h else uint32(ups << uint32(16)))
                        if limited:
                            g = limit if g > limit else g
                            u = limit if u > limit else u
                            u = (-limit if u < -limit else u) + float32(1)
                            value = g * rcp_approx(float32(1) + ex2_approx(g * exponent)) * u
                        else:
                            value = g * rcp_approx(float32(1) + ex2_approx(g * float32(-LOG2_E))) * u
                        values[2 * i + h] = value
                        largest = max(largest, abs(value))
                if scaled_y:
                    scale = output.second[0]
                else:
                    largest = int_as_float(redux_sync_max_s32(uint32(FULL_MASK), float_as_int(largest)))
                    scale = max(largest, float32(1e-10)) * float32(1 / FP8_MAX)
                inverse = rcp_approx(scale)  # a division is a function call, before which all wgmmas must complete
                low = cvt_rn_satfinite_e4m3x2_f32(values[1] * inverse, values[0] * inverse)
                high = cvt_rn_satfinite_e4m3x2_f32(values[3] * inverse, values[2] * inverse)
                row = int64(tile.row + first + t)
                index = (row * output.n + tile.column) // 4 + lane
                if ragged_n:
                    if tile.column + 4 * lane < output.n:
                        output.y[index] = int32(uint32(low | uint32(high << uint32(16))))
                else:
                    output.y[index] = int32(uint32(low | uint32(high << uint32(16))))
                if lane == 0 and not scaled_y:
                    blocks = int32((output.n + 127) >> 7) if ragged_n else output.n >> 7
                    output.second[row * blocks + (tile.column >> 7)] = scale

    return make_for_each_chunk(n // 2, SILU_ROWS // 2, store_rows, tuples=2)
