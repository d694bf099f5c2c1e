"""The lesson's own answers to the exercises of "A Hopper GEMM"; the page goes on with them."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, int64, uint8, uint32, uint64

from moe_numba.course.lessons.hopper.runs import advance, wait_for_buffer
from moe_numba.course.lessons.hopper.sizes import A_BYTES, BLOCK_K, FREE, WRITTEN
from moe_numba.ptx.accumulators import make_for_each_chunk
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.tma import tma_load_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import elect_sync


def place_of_chunk(row, chunk):
    return chunk ^ row // 2 % 4


@cuda.jit
def load_three_stages(map_x, out, boxes):
    smem, full = cuda.shared.array(3072, uint8, 1024), cuda.shared.array(3, uint64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for stage in range(3):
            mbarrier_init(full, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    for box in range(-2, boxes):
        ahead = int32(box + 2)
        if ahead < boxes and thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(full, ahead % 3, 1024)
            tma_load_2d(smem, 1024 * (ahead % 3), map_x, 0, 0, 8 * ahead, full, ahead % 3)
        if box >= 0:
            mbarrier_wait_parity(full, box % 3, uint32(box // 3 % 2))
            for i in range(thread, 1024, 64):
                out[1024 * box + i] = smem[1024 * (box % 3) + i]
            cuda.syncthreads()


@cuda.jit(device=True)
def produce(ring, map_a, map_b, row, column, k_blocks, stage, phase):
    for k in range(k_blocks):
        mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
        full, offset, at = int32(ring.full + stage), int32(stage * ring.stage_bytes), int32(k * BLOCK_K)
        mbarrier_arrive_expect_tx(ring.barriers, full, ring.stage_bytes)
        tma_load_2d(ring.smem, offset, map_a, 0, at, row, ring.barriers, full)
        tma_load_2d(ring.smem, offset + A_BYTES, map_b, 0, at, column, ring.barriers, full)
        stage, phase = advance(ring, stage, phase)
    return stage, phase


@cuda.jit(device=True)
def store_four(first, values, out, offset, pitch):
    """Store the fragment of eight columns, from accumulator ``first`` on."""
    out[offset + first] = int32(cvt_rn_bf16x2_f32(values[1], values[0]))
    out[offset + 8 * pitch + first] = int32(cvt_rn_bf16x2_f32(values[3], values[2]))


store_fours = make_for_each_chunk(128, 4, store_four)


@cuda.jit(device=True)
def store_unrolled(smem, out, acc, row, column, pitch):
    lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5 & 3)
    offset = int64(row + 16 * warp + (lane >> 2)) * pitch + ((column >> 1) + (lane & 3))
    store_fours(acc, out, offset, pitch)


@cuda.jit(device=True)
def order(place):
    if place == FREE:
        wait_for_buffer()
    if place == WRITTEN:
        fence_proxy_async_shared()
    cuda.syncwarp()
