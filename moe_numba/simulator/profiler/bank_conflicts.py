"""Bank conflicts: the wavefronts in which shared memory serves one warp-level request.

Shared memory has 32 banks, each 4 bytes wide. One wavefront serves one word of every bank, to any number of lanes. An
access of 8 bytes per lane is served by half-warps and one of 16 bytes by quarter-warps, because a wavefront carries at
most 128 bytes. For loads, two of these parts share a wavefront if all pairs of lanes `n` and `n ^ 1`, or all pairs `n`
and `n ^ 2`, read the same address: this covers a broadcast to the whole warp.

Nsight Compute counts wavefronts in `l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum` and `..._op_st.sum`, and
their excess over the ideal in `l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum` and `..._op_st.sum`.
"""

BANKS, WORD_BYTES = 32, 4


def count_wavefronts(addresses, size, load=True):
    """Return the wavefronts of one request and the ideal number.

    Parameters
    ----------
    addresses : dict
        Lane -> byte address.
    size : int
        Bytes per lane. Accesses of more than 16 bytes are split into accesses of 16.
    load : bool
        Whether pairs of lanes that read the same address may share wavefronts.
    """
    wavefronts = ideal = 0
    for first in range(0, size, 16):
        parts = _parts({lane: a + first for lane, a in addresses.items()}, min(16, size - first), load)
        wavefronts += sum(_serialised(part, min(16, size - first)) for part in parts)
        ideal += len(parts)
    return wavefronts, ideal


def _parts(addresses, size, load):
    """Return the addresses of the lanes that are served together, one list for each such part of the warp."""
    lanes = 32 if size <= 4 else 16 if size <= 8 else 8
    if load and lanes < 32 and any(_pairs_are_equal(addresses, bit) for bit in (1, 2)):
        lanes *= 2
    parts = {}
    for lane, address in addresses.items():
        parts.setdefault(lane // lanes, []).append(address)
    return list(parts.values())


def _pairs_are_equal(addresses, bit):
    return all(addresses.get(lane ^ bit, address) == address for lane, address in addresses.items())


def _serialised(addresses, size):
    """Return the largest number of distinct words in one bank."""
    words = {w for a in addresses for w in range(a // WORD_BYTES, (a + size - 1) // WORD_BYTES + 1)}
    per_bank = [0] * BANKS
    for word in words:
        per_bank[word % BANKS] += 1
    return max(per_bank)
