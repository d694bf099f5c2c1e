"""The plain push, by which dispatch and combine are measured: stores of 16 bytes into another GPU's memory."""

from numba import cuda, int32, int64

from moe_numba.ptx.memory import ld_nc_na_s32x4, pointer_from_address, st_na_s32x4
from moe_numba.runtime.launch import address, current_stream, launcher

THREADS = 1024


@cuda.jit
def _push(peers, rank, ranks, others, source, pieces):
    nth = int32(int32(cuda.blockIdx.x) % others)  # of the ranks that follow, by turns
    theirs = pointer_from_address(peers[int32(rank + 1 + nth) % ranks], source)
    i = int64(cuda.blockIdx.x) // others * THREADS + cuda.threadIdx.x
    step = (int64(cuda.gridDim.x) - nth + others - 1) // others * THREADS  # as many blocks as are for this one
    while i < pieces:
        a, b, c, d = ld_nc_na_s32x4(source, 4 * i)
        st_na_s32x4(theirs, 4 * (nth * pieces + i), a, b, c, d)
        i += step


def push(peers, rank, others, source, blocks):
    """Copy ``source`` into the memory of the next ranks.

    Parameters
    ----------
    peers : tensor [ranks], uint64
        Addresses of everybody's memory, ``others`` times as large as ``source``. What the rank before left lies first,
        then what the one before that left, and so on.
    rank, others : int
        Whose source it is; how many ranks get it, 1 to all others.
    source : tensor
        Contiguous, a multiple of 16 bytes.
    blocks : int
        Of 1024 threads; at least one for each that gets it.
    """
    if not 1 <= others < max(2, len(peers)) or blocks < others:
        raise ValueError(f"others is {others} and blocks {blocks}; 1 to {len(peers) - 1} ranks get it, by a block each")
    device = source.device.index or 0
    signature = ("uint64*", "int32", "int32", "int32", "int32*", "int64")
    kernel = launcher(_push, signature, device, launch_bounds=THREADS)
    pieces = source.numel() * source.element_size() // 16
    kernel(blocks, THREADS, current_stream(device), address(peers), rank, len(peers), others, address(source), pieces)
