"""The lesson's own answers to the exercises of "The experts of a layer"; the page goes on with them."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import math

from numba import cuda, float32, int32, int64, uint32

from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import load_nc_u32x4, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt


@cuda.jit(device=True)
def position(expert):
    same = uint32(cuda.match_any_sync(FULL_MASK, expert))
    return int32(cuda.popc(same & lanemask_lt())), int32(cuda.popc(same))


@cuda.jit(device=True)
def low(word):
    return uint_as_float(uint32(uint32(word) << uint32(16)))


@cuda.jit(device=True)
def high(word):
    return uint_as_float(uint32(uint32(word) & uint32(0xFFFF0000)))


@cuda.jit(device=True)
def silu(gate):
    return gate / (float32(1) + math.exp(-gate))


@cuda.jit(device=True)
def activate_pair(gate, up):
    first, second = silu(low(gate)) * low(up), silu(high(gate)) * high(up)
    return int32(cvt_rn_bf16x2_f32(second, first))


@cuda.jit(device=True)
def activate_eight(gate_up, out, row, word, words):
    at = int64(row) * (2 * words) + word
    gate, up = load_nc_u32x4(gate_up, at), load_nc_u32x4(gate_up, at + words)
    a, b = activate_pair(gate[0], up[0]), activate_pair(gate[1], up[1])
    c, d = activate_pair(gate[2], up[2]), activate_pair(gate[3], up[3])
    st_global_s32x4(out, int64(row) * words + word, a, b, c, d)


@cuda.jit(device=True)
def sum_eight(rows, inverse, weights, out, words, topk, token, word):
    sums = cuda.local.array(8, float32)
    for i in range(8):
        sums[i] = float32(0)
    for k in range(topk):
        row, weight = inverse[token * topk + k], weights[token * topk + k]
        if row >= 0:
            a, b, c, d = load_nc_u32x4(rows, int64(row) * words + word)
            sums[0], sums[1] = cuda.fma(weight, low(a), sums[0]), cuda.fma(weight, high(a), sums[1])
            sums[2], sums[3] = cuda.fma(weight, low(b), sums[2]), cuda.fma(weight, high(b), sums[3])
            sums[4], sums[5] = cuda.fma(weight, low(c), sums[4]), cuda.fma(weight, high(c), sums[5])
            sums[6], sums[7] = cuda.fma(weight, low(d), sums[6]), cuda.fma(weight, high(d), sums[7])
    a, b = int32(cvt_rn_bf16x2_f32(sums[1], sums[0])), int32(cvt_rn_bf16x2_f32(sums[3], sums[2]))
    c, d = int32(cvt_rn_bf16x2_f32(sums[5], sums[4])), int32(cvt_rn_bf16x2_f32(sums[7], sums[6]))
    st_global_s32x4(out, int64(token) * words + word, a, b, c, d)


@cuda.jit(device=True)
def dot(x, x_at, w, w_at, words):
    lane, total = int32(cuda.threadIdx.x & 31), float32(0)
    for i in range(4 * lane, words, 128):
        x_0, x_1, x_2, x_3 = load_nc_u32x4(x, x_at + i)
        w_0, w_1, w_2, w_3 = load_nc_u32x4(w, w_at + i)
        total = cuda.fma(low(x_0), low(w_0), cuda.fma(high(x_0), high(w_0), total))
        total = cuda.fma(low(x_1), low(w_1), cuda.fma(high(x_1), high(w_1), total))
        total = cuda.fma(low(x_2), low(w_2), cuda.fma(high(x_2), high(w_2), total))
        total = cuda.fma(low(x_3), low(w_3), cuda.fma(high(x_3), high(w_3), total))
    for distance in (16, 8, 4, 2, 1):
        total = total + cuda.shfl_xor_sync(FULL_MASK, total, distance)
    return total
