"""The grouped GEMM's kernel: persistent blocks that each walk over the tiles of all groups.

Four warps load and eight multiply. One thread asks TMA for the tiles of weights and tokens; they go through a ring of
stages, each with a barrier that says "full" and one that says "empty". Weights have one tensor map for all groups, and
so have tokens: what a tile has beyond its group's tokens is computed and not stored. So nothing has to be prepared.
"""

from functools import cache

from numba import cuda, float32, int32, uint8, uint32, uint64

from moe_numba.grouped_gemm.constants import MULTIPLIERS, Layout
from moe_numba.grouped_gemm.mainloop import make_compute
from moe_numba.grouped_gemm.producer import SCALERS, make_load, make_scale
from moe_numba.grouped_gemm.schedule import TILE_ROWS
from moe_numba.grouped_gemm.tile_scheduler import FULL, make_scan, make_walk
from moe_numba.ptx.arithmetic import int_as_float
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4
from moe_numba.ptx.warp import uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc


@cache
def make_kernel(constants):
    """The kernel, for a grid of any number of blocks of 384 threads, and its dynamic shared memory in bytes."""
    by_turns = constants.scaling == "block" or constants.gather
    if by_turns and constants.stages < SCALERS:
        # A warp that looks at every third stage would not tell a barrier's phase from the one two further on.
        raise ValueError(f"stages is {constants.stages}; with block scaling or gather it must be {SCALERS} or more")
    if constants.gather and constants.cluster == 2:
        raise ValueError("cluster is 2; with gather it must be 1, for each block copies its own rows")
    layout = Layout(constants)
    stages, full_at, empty_at, orders_at = constants.stages, layout.full_at, layout.empty_at, layout.orders_at
    by_tensor, arrivals, cluster = constants.scaling == "tensor", 2 if by_turns else 1, constants.cluster
    first_tile, tile_step = make_walk(cluster)
    line_shift = 6 if constants.dtype == "bf16" else 7
    # Together 12 times 168, as before.
    loaders, multipliers = (56, 224) if by_turns else (40, 232) if cluster == 2 else (24, 240)
    release_registers, request_registers = make_setmaxnreg_dec(loaders), make_setmaxnreg_inc(multipliers)
    scan, load = make_scan(constants, layout), make_load(constants, layout)
    compute, scale = make_compute(constants, layout), make_scale(constants, layout)

    @cuda.jit
    def grouped_gemm(
        map_x,
        map_weight,
        y,
        y_scale,
        lengths,
        starts,
        x_scale,
        weight_scale,
        groups,
        total,
        capacity,
        n_out,
        k,
        x,
        indices,
        height,
        row_bytes,
    ):
        smem = cuda.shared.array(0, uint8, 1024)
        words = cuda.shared.array(0, int32, 1024)
        floats = cuda.shared.array(0, float32, 1024)
        bars = cuda.shared.array(0, uint64, 1024)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(bars, full_at + stage, arrivals)
                mbarrier_init(bars, empty_at + stage, MULTIPLIERS * cluster)
            fence_mbarrier_init()
        if cluster == 2:
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()
        griddepcontrol_wait()
        across = int32((n_out + TILE_ROWS - 1) >> 7)
        k_blocks = int32((k + (1 << line_shift) - 1) >> line_shift)
        tiles = scan(words, lengths, starts, groups, total, capacity, int32((across + cluster - 1) // cluster))
        if warp >= MULTIPLIERS:
            release_registers()
            if warp == MULTIPLIERS and elect_sync(FULL):  # of an elected lane the compiler knows that it is alone
                load(
                    smem,
                    words,
                    bars,
                    map_x,
                    map_weight,
                    weight_scale,
                    lengths,
                    starts,
                    groups,
                    total,
                    capacity,
                    tiles,
                    k_blocks,
                    n_out,
                )
                griddepcontrol_launch_dependents()
            if by_turns and warp > MULTIPLIERS:
                scale(
                    words,
                    floats,
                    bars,
                    warp - MULTIPLIERS - 1,
                    lane,
                    x_scale,
                    weight_scale,
                    lengths,
                    starts,
                    groups,
                    total,
                    capacity,
                    tiles,
                    k_blocks,
                    across,
                    smem,
                    x,
                    indices,
                    height,
                    row_bytes,
                    int32(k << (7 - line_shift)),
                )
        else:
            request_registers()
            stage, parity = int32(0), uint32(0)
            smem, bars, floats = uniform_array(smem), uniform_array(bars), uniform_array(floats)
            warp = uniform(warp)
            tile = first_tile()
            while tile < tiles:
                stage, parity = uniform(stage), uint32(uniform(int32(parity)))
                mbarrier_wait_parity(bars, full_at + stage, parity)
                row, counts, column, factor = ld_shared_s32x4(words, int32(orders_at + 4 * stage))
                stage, parity = compute(
                    smem,
                    words,
                    floats,
                    bars,
                    y,
                    y_scale,
                    warp,
                    lane,
                    stage,
                    parity,
                    k_blocks,
                    uniform(row),
                    uniform(int32(counts & 0xFFFF)),
                    uniform(int32(counts >> 16)),
                    column,
                    n_out,
                    int_as_float(factor) if by_tensor else float32(1),
                )
                tile = int32(tile + tile_step())
        if cluster == 2:  # the other block may still write into this one's memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return grouped_gemm, layout.bytes
