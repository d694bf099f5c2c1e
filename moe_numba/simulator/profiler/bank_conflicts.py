"""Bank conflicts: the wavefronts in which shared memory serves one warp-level request.

Shared memory has 32 banks, each 4 bytes wide. One wavefront serves one word of every bank, to any number of lanes. An
access of 8 bytes per lane is served by half-warps and one of 16 bytes by quarter-warps, because a wavefront carries at
most 128 bytes. For loads, two of these parts share a wavefront if all pairs of lanes `n` and `n ^ 1`, or all pairs `n`
and `n ^ 2`, read the same address: this covers a broadcast to the whole warp.

Nsight Compute counts wavefronts in `l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum` and `..._op_st.sum`, and
their excess over the ideal in `l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum` and `..._op_st.sum`.
"""

import numpy as np

BANKS, WORD_BYTES = 32, 4


def count_wavefronts(addresses, size, load=True):
    """Return the wavefronts of one request and the ideal number; `addresses` maps lanes to byte addresses."""
    row, active = np.zeros((1, 32), np.int64), np.zeros((1, 32), bool)
    lanes = list(addresses)
    row[0, lanes], active[0, lanes] = list(addresses.values()), True
    wavefronts, ideal = wavefronts_of(row, active, size, load)
    return int(wavefronts[0]), int(ideal[0])


def wavefronts_of(addresses, active, size, load=True):
    """Return the wavefronts of requests and their ideal numbers.

    Parameters
    ----------
    addresses : ndarray
        Byte address of each lane, [request, 32]; any where the lane is not active.
    active : ndarray
        Of bools, [request, 32].
    size : int
        Bytes per lane. Accesses of more than 16 bytes are split into accesses of 16.
    load : bool
        Whether pairs of lanes that read the same address may share wavefronts.
    """
    wavefronts, ideal = np.zeros(len(addresses), np.int64), np.zeros(len(addresses), np.int64)
    for first in range(0, size, 16):
        width = min(16, size - first)
        lanes = 32 if width <= 4 else 16 if width <= 8 else 8
        paired = np.zeros(len(addresses), bool)
        if load and lanes < 32:
            paired = _pairs_are_equal(addresses, active, 1) | _pairs_are_equal(addresses, active, 2)
        for rows, together in ((~paired, lanes), (paired, 2 * lanes)):
            if rows.any():
                parts = active[rows].reshape(-1, together)
                own = _serialised(addresses[rows].reshape(-1, together) + first, parts, width)
                wavefronts[rows] += own.reshape(-1, 32 // together).sum(1)
                ideal[rows] += parts.any(1).reshape(-1, 32 // together).sum(1)
    return wavefronts, ideal


def _pairs_are_equal(addresses, active, bit):
    """Return for which requests all pairs of lanes n and n ^ `bit` have one address, or only one of them is active."""
    other = np.arange(32) ^ bit
    return ((addresses == addresses[:, other]) | ~active | ~active[:, other]).all(1)


def _serialised(addresses, active, size):
    """Return the largest number of distinct words in one bank, of lanes that are served together."""
    words = addresses // WORD_BYTES
    if size > WORD_BYTES:
        words = (words[:, :, None] + np.arange(size // WORD_BYTES)).reshape(len(words), -1)
        active = active.repeat(size // WORD_BYTES, axis=1)
    words = np.sort(np.where(active, words, -1), axis=1)
    new = words >= 0
    new[:, 1:] &= words[:, 1:] != words[:, :-1]
    row, column = new.nonzero()
    per_bank = np.bincount((row * BANKS + words[row, column] % BANKS).astype(np.intp), minlength=BANKS * len(words))
    return per_bank.reshape(-1, BANKS).max(1)


def count_matrices(kind, starts, matrices):
    """Count an ldmatrix or stmatrix, whose lanes address rows at `starts`, in lane order; return its bank conflicts."""
    wavefronts = 0
    for i in range(matrices):
        rows = dict(enumerate(starts[8 * i : 8 * i + 8]))
        wavefronts += count_wavefronts(rows, 16, load=False)[0]
    kind.requests += 1
    kind.lanes += 32
    kind.bytes += 128 * matrices
    kind.ideal_wavefronts += matrices
    kind.wavefronts += wavefronts
    return wavefronts - matrices
