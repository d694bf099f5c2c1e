"""What the lesson's kernel does not explain: waits for a counter, a copy of a row, and the GEMM of one warp.

The GEMM is `mma.sync`, with operands loaded from global memory: small, and far from the speed of `wgmma` and TMA,
which lessons 06 to 08 build. Rows are bfloat16, two to a word.
"""

from functools import cache
from typing import Any, NamedTuple

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.ptx.arithmetic import ex2_approx, rcp_approx
from moe_numba.ptx.atomics import ld_acquire_sys_s32
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import ld_global_s32x4, pointer_from_address, st_global_s32x4
from moe_numba.ptx.mma import make_mma

ROWS, COLUMNS, WARPS = 16, 8, 2  # of a tile of a warp; consumer warps
TILE_COLUMNS = WARPS * COLUMNS
SEND, FIRST, SECOND, RETURN = 1, 2, 4, 8  # parts of the kernel's work, as bits
CHAIN, TOGETHER = (SEND, FIRST, SECOND, RETURN), (SEND | FIRST | SECOND | RETURN,)  # launches
THREADS = 32 * (WARPS + 2)

mma = make_mma("bf16")
MINUS_LOG2_E = float32(-1.4426950408889634)


class Memory(NamedTuple):
    """What kernels know of the memory that ranks share; offsets are in words."""

    local: Any  # this rank's
    peers: Any  # addresses of all ranks'
    arrived: Any  # counts the rows of each expert that have arrived, in all calls
    returned: Any  # counts the pieces of this rank's rows that have come back, in all calls
    rows: Any  # rows of x, in the order of the experts
    origins: Any  # of each: its rank * assignments + its number among that rank's rows
    y: Any  # rows of the second GEMM that have not left yet
    back: Any  # rows that have come back, in the order in which this rank has sent them
    words: Any  # of a row
    assignments: Any  # most rows that a rank sends
    ranks: Any
    rank: Any
    experts: Any  # of each rank


@cuda.jit(device=True)
def wait_for(counters, at, count):
    """Wait until a counter has reached a number; what was stored before it was counted is visible then."""
    found = ld_acquire_sys_s32(counters, at)
    while int32(found - count) < 0:
        found = ld_acquire_sys_s32(counters, at)


@cuda.jit(device=True)
def memory_of(memory, rank):
    """Return the memory of another rank."""
    return pointer_from_address(memory.peers[rank], memory.local)


@cuda.jit(device=True)
def copy_row(to, to_at, source, source_at, words, lane):
    """Copy a row with all lanes of a warp."""
    for i in range(4 * lane, words, 4 * 32):
        a, b, c, d = ld_global_s32x4(source, source_at + i)
        st_global_s32x4(to, to_at + i, a, b, c, d)


@cuda.jit(device=True)
def word_of(words, at, valid):
    """Return a word, or 0 for a row that is not valid."""
    return uint32(words[at]) if valid else uint32(0)


@cuda.jit(device=True)
def multiply(x, x_at, rows, w, w_at, words, lane):
    """Multiply 16 rows of x, ``rows`` of them valid, by 8 rows of w: ``mma.sync``'s fragment of each lane."""
    own, c = int32(lane >> 2), int32(lane & 3)
    x_0, w_0 = int32(x_at + own * words + c), int32(w_at + own * words + c)
    x_1 = int32(x_0 + 8 * words)
    acc = (float32(0), float32(0), float32(0), float32(0))
    for k in range(0, words, 8):
        a = (
            word_of(x, x_0 + k, own < rows),
            word_of(x, x_1 + k, own + 8 < rows),
            word_of(x, x_0 + k + 4, own < rows),
            word_of(x, x_1 + k + 4, own + 8 < rows),
        )
        acc = mma(acc, a, (word_of(w, w_0 + k, True), word_of(w, w_0 + k + 4, True)))
    return acc


@cuda.jit(device=True)
def silu_and_mul(gate, up):
    """Return ``silu(gate) * up``, element by element of a lane's fragment."""
    return (
        gate[0] * rcp_approx(float32(1) + ex2_approx(gate[0] * MINUS_LOG2_E)) * up[0],
        gate[1] * rcp_approx(float32(1) + ex2_approx(gate[1] * MINUS_LOG2_E)) * up[1],
        gate[2] * rcp_approx(float32(1) + ex2_approx(gate[2] * MINUS_LOG2_E)) * up[2],
        gate[3] * rcp_approx(float32(1) + ex2_approx(gate[3] * MINUS_LOG2_E)) * up[3],
    )


@cuda.jit(device=True)
def pair(acc, half):
    """Return two columns of a lane's fragment as a word: of the lane's upper row (half 0) or lower row (half 1)."""
    low, high = (acc[2], acc[3]) if half else (acc[0], acc[1])
    return int32(cvt_rn_bf16x2_f32(high, low))


@cuda.jit(device=True)
def row_tiles(rows):
    """Return how many tiles rows fill."""
    return int32((rows + ROWS - 1) // ROWS)


@cache
def make_memory(sizes):
    """Make ``memory = shared(local, peers, rank)``, a `Memory` with the offsets of these sizes."""
    arrived, returned, rows, origins, y, back = (
        int32(at) for at in (sizes.arrived, sizes.returned, sizes.rows, sizes.origins, sizes.y, sizes.back)
    )
    words, assignments = int32(sizes.words), int32(sizes.assignments)
    ranks, experts = int32(sizes.ranks), int32(sizes.experts)

    @cuda.jit(device=True)
    def shared(local, peers, rank):
        own = int32(rank)
        return Memory(local, peers, arrived, returned, rows, origins, y, back, words, assignments, ranks, own, experts)

    return shared
