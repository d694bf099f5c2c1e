"""Kernel of ``silu_and_mul``: each thread computes eight adjacent columns of a row, with 16-byte loads and stores."""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.ptx.arithmetic import ex2_approx, rcp_approx, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, load_nc_u32x4, st_global_s32x4

THREADS = 128
VECTOR = 8  # columns of a thread
LOG2_E = 1.4426950408889634


@cuda.jit(device=True)
def silu_and_mul_f32(gate, up):
    """Return silu(gate) * up. Below about -87 silu(gate) becomes zero, because the reciprocal flushes subnormals."""
    return gate * rcp_approx(float32(1) + ex2_approx(gate * float32(-LOG2_E))) * up


@cache
def make_silu_and_mul_kernel(columns, has_limit):
    """Make the kernel for one number of result columns; ``has_limit``: rows beyond ``num_valid_rows`` are skipped."""
    if columns < 1 or columns % VECTOR:
        raise ValueError(f"columns is {columns}; it must be a multiple of {VECTOR}")
    vectors_per_row = columns // VECTOR

    @cuda.jit
    def silu_and_mul(x, num_valid_rows, out, num_vectors):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        vector = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        row = int32(vector // uint32(vectors_per_row))
        computed = vector < uint32(num_vectors)
        if has_limit:
            computed = computed and row < num_valid_rows[0]
        if computed:
            offset = (int64(vector) + int64(row) * vectors_per_row) * VECTOR  # rows of x have twice the columns
            gates, ups = load_nc_u32x4(x, offset), load_nc_u32x4(x, offset + columns)
            results = cuda.local.array(4, int32)
            for i in range(4):
                gate, up = uint32(gates[i]), uint32(ups[i])
                low = silu_and_mul_f32(
                    uint_as_float(uint32(gate << uint32(16))), uint_as_float(uint32(up << uint32(16)))
                )
                high = silu_and_mul_f32(
                    uint_as_float(uint32(gate & uint32(0xFFFF0000))), uint_as_float(uint32(up & uint32(0xFFFF0000)))
                )
                results[i] = int32(cvt_rn_bf16x2_f32(high, low))
            st_global_s32x4(out, int64(vector) * VECTOR, results[0], results[1], results[2], results[3])

    return silu_and_mul
