"""The plain push, by which dispatch and combine are measured: stores of 16 bytes into another GPU's memory."""

from numba import cuda, int64

from moe_numba.launch import address, current_stream, launcher
from moe_numba.ptx.system import ld_nc_na_s32x4, pointer_from_address, st_na_s32x4

THREADS = 1024


@cuda.jit
def _push(peers, to, source, pieces):
    theirs = pointer_from_address(peers[to], source)
    i, step = int64(cuda.grid(1)), int64(cuda.gridsize(1))
    while i < pieces:
        a, b, c, d = ld_nc_na_s32x4(source, 4 * i)
        st_na_s32x4(theirs, 4 * i, a, b, c, d)
        i += step


def push(peers, to, source, blocks):
    """Copy ``source`` to the beginning of a peer's memory.

    Parameters
    ----------
    peers : tensor [ranks], uint64
        Addresses of everybody's memory, at least as large as ``source``.
    to : int
        Whose memory is written.
    source : tensor
        Contiguous, a multiple of 16 bytes.
    blocks : int
        Of 1024 threads.
    """
    device = source.device.index or 0
    kernel = launcher(_push, ("uint64*", "int32", "int32*", "int64"), device, launch_bounds=THREADS)
    pieces = source.numel() * source.element_size() // 16
    kernel(blocks, THREADS, current_stream(device), address(peers), to, address(source), pieces)
