"""The lesson's own answers to the exercises of "Block scales"; the page goes on with them."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.lessons.block_scales.sizes import W_SCALES
from moe_numba.ptx.accumulators import make_fma_blocks
from moe_numba.ptx.arithmetic import float_as_int
from moe_numba.ptx.mbarrier import mbarrier_wait_parity
from moe_numba.ptx.memory import st_shared_s32x4


@cuda.jit(device=True)
def read_by_row(ring, at):
    thread = int32(cuda.threadIdx.x)
    row = int32(16 * (thread >> 5) + (thread >> 2 & 7))
    a, b = ring.floats[uint32(at + row)], ring.floats[uint32(at + row + 8)]
    v, w = ring.floats[uint32(at + W_SCALES)], ring.floats[uint32(at + W_SCALES + 1)]
    return a * v, b * v, a * w, b * w


fma_64 = make_fma_blocks(64, 64)


@cuda.jit(device=True)
def promote_192(acc, part, factors):
    first = fma_64(acc[:32], part[:32], factors[:2])
    return first + fma_64(acc[32:64], part[32:64], factors[2:4]) + fma_64(acc[64:], part[64:], factors[4:])


@cuda.jit(device=True)
def write_factors(ring, stage, phase, scales, row, column, k, own):
    x_index = int32(k * scales.rows + row + own)
    a, b = scales.x[x_index], scales.x[x_index + 32]
    u = scales.w[(column >> 7) * scales.k_blocks + k]
    v = scales.w[((column + 64) >> 7) * scales.k_blocks + k]
    w = scales.w[((column + 128) >> 7) * scales.k_blocks + k]
    mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
    at, none = int32(ring.scales + stage * ring.stage_floats + 4 * own), float_as_int(float32(0))
    st_shared_s32x4(ring.words, at, float_as_int(a * u), float_as_int(a * v), float_as_int(a * w), none)
    st_shared_s32x4(ring.words, int32(at + 128), float_as_int(b * u), float_as_int(b * v), float_as_int(b * w), none)
