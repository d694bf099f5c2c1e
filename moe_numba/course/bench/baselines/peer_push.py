"""Plain push, the baseline of dispatch and combine: 16-byte stores into another GPU's memory."""

from numba import cuda, int32, int64

from moe_numba.ptx.memory import ld_nc_na_s32x4, pointer_from_address, st_na_s32x4
from moe_numba.runtime.context import current_stream
from moe_numba.runtime.launch import address, launcher

THREADS = 1024


@cuda.jit
def _push(peers, rank, ranks, num_peers, source, vectors):
    nth = int32(int32(cuda.blockIdx.x) % num_peers)  # round-robin over the next ranks
    remote = pointer_from_address(peers[int32(rank + 1 + nth) % ranks], source)
    i = int64(cuda.blockIdx.x) // num_peers * THREADS + cuda.threadIdx.x
    step = (int64(cuda.gridDim.x) - nth + num_peers - 1) // num_peers * THREADS  # CTAs that push to this peer
    while i < vectors:
        a, b, c, d = ld_nc_na_s32x4(source, 4 * i)
        st_na_s32x4(remote, 4 * (nth * vectors + i), a, b, c, d)
        i += step


def push(peers, rank, others, source, blocks):
    """Copy ``source`` into the memory of the next ``others`` ranks.

    Parameters
    ----------
    peers : torch.Tensor [ranks], uint64
        Addresses of all ranks' memory, ``others`` times as large as ``source``: first the data of the previous rank,
        then that of the rank before it, and so on.
    rank, others : int
        The rank of ``source``; the number of ranks that receive it, 1 to all other ranks.
    source : torch.Tensor
        Contiguous, a multiple of 16 bytes.
    blocks : int
        CTAs of 1024 threads; at least one per receiving rank.
    """
    if not 1 <= others < max(2, len(peers)) or blocks < others:
        raise ValueError(
            f"others is {others} and blocks {blocks}; 1 to {len(peers) - 1} ranks can receive, one block each at least"
        )
    device = source.device.index or 0
    signature = ("uint64*", "int32", "int32", "int32", "int32*", "int64")
    kernel = launcher(_push, signature, device, launch_bounds=THREADS)
    vectors = source.numel() * source.element_size() // 16
    kernel(blocks, THREADS, current_stream(device), address(peers), rank, len(peers), others, address(source), vectors)
