"""Conformance of GPU and simulator: system-scope accesses; the peers are blocks of one grid."""

import contextlib

import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda

from moe_numba.ptx import atomics, memory
from moe_numba.runtime.launch import launch

MAX_POLLS = 1 << 20  # bounds polling, so that a failing test on a GPU does not hang
ROUNDS = 8


@contextlib.contextmanager
def addresses_of(*buffers):
    """Return a context with the buffers' addresses as a uint64 tensor."""
    addresses = [b.data_ptr() for b in buffers]
    if simulator.ENABLED:
        for i, buffer in enumerate(buffers):
            simulator.register(buffer, f"buffer {i}")
    try:
        yield torch.tensor(addresses, dtype=torch.uint64).to(buffers[0].device)
    finally:
        if simulator.ENABLED:
            for address in addresses:
                simulator.forget(address)


def seeded_weak_memory(seed):
    """Return a context with a seed and weak memory in the simulator; empty on a GPU."""
    stack = contextlib.ExitStack()
    if simulator.ENABLED:
        stack.enter_context(simulator.seed(seed))
        stack.enter_context(simulator.weak_memory())
    return stack


@cuda.jit
def accesses(peers, local, out):
    remote = memory.pointer_from_address(peers[1], local)
    atomics.st_relaxed_sys_s32(remote, 0, 1)
    out[0] = atomics.ld_relaxed_sys_s32(remote, 0)
    atomics.st_release_sys_s32(remote, 0, 2)
    out[1] = atomics.ld_acquire_sys_s32(remote, 0)
    out[2] = atomics.atom_add_relaxed_sys_s32(remote, 0, 40)
    out[3] = atomics.ld_volatile_s32(remote, 0)
    atomics.red_add_relaxed_sys_s32(remote, 0, -100)
    atomics.red_add_release_sys_s32(remote, 0, 1)
    out[4] = atomics.ld_volatile_s32(remote, 0)
    a, b, c, d = memory.ld_global_s32x4(local, 4)
    memory.st_na_s32x4(remote, 4, d, c, b, a)
    a, b, c, d = memory.ld_nc_na_s32x4(local, 8)
    memory.st_na_s32x4(out, 8, a, b, c, d)
    remote[1] = local[11]


def test_each_access_reads_and_writes_the_peer(device):
    local, remote = (
        torch.arange(12, dtype=torch.int32, device=device),
        torch.zeros(12, dtype=torch.int32, device=device),
    )
    out = torch.zeros(12, dtype=torch.int32, device=device)
    with addresses_of(local, remote) as peers, seeded_weak_memory(0):
        launch(accesses, 1, 1, peers, local, out)
    assert out.tolist() == [1, 2, 2, 42, -57, 0, 0, 0, 8, 9, 10, 11]
    assert remote.tolist() == [-57, 11, 0, 0, 7, 6, 5, 4, 0, 0, 0, 0]


@cuda.jit
def ping_pong(peers, local, out):
    """Two blocks alternately send each other 64 integers and then a flag; the receiver adds 1 to each."""
    rank = cuda.blockIdx.x
    receive_buffer = memory.pointer_from_address(peers[rank], local)
    remote = memory.pointer_from_address(peers[1 - rank], local)
    t = cuda.threadIdx.x
    value = t
    for i in range(ROUNDS):
        if i % 2 == rank:
            remote[16 + t] = value + 1
            cuda.syncthreads()
            if t == 0:
                atomics.st_release_sys_s32(remote, 0, i + 1)
        else:
            if t == 0:
                polls = 0
                while atomics.ld_acquire_sys_s32(receive_buffer, 0) != i + 1 and polls < MAX_POLLS:
                    polls += 1
            cuda.syncthreads()
            value = receive_buffer[16 + t] + 1
    out[64 * rank + t] = value


@pytest.mark.parametrize("seed", range(5))
def test_blocks_exchange_data_by_release_and_acquire(seed, device):
    buffers = [torch.zeros(80, dtype=torch.int32, device=device) for _ in range(2)]
    out = torch.zeros(128, dtype=torch.int32, device=device)
    with addresses_of(*buffers) as peers, seeded_weak_memory(seed):
        launch(ping_pong, 2, 64, peers, buffers[0], out)
    got = out.view(2, 64) - torch.arange(64, device=device)
    assert (got[0] == 2 * (ROUNDS - 1) + 2).all() and (got[1] == 2 * ROUNDS - 2).all(), got
