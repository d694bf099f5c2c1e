"""Groups with GPUs that have no TMA: the choice of the path, peer access, and accesses to peers' memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.expert_parallel import (
    NUM_BYTES,
    SCALE,
    SHORT_TIMEOUT,
    bitwise_equal,
    check_received,
    engine,
    exchange_on_two_ranks,
    make_inputs,
    reference_dispatch,
    run,
    send,
)

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.expert_parallel.ranks import peer_access, rank_state
from moe_numba.expert_parallel.rings.config import GpuLimits
from moe_numba.runtime.device import UnsupportedDeviceError, gpu_like
from moe_numba.simulator.core import atomic
from moe_numba.simulator.core.engine import thread

simulated = pytest.mark.skipif(not simulator.ENABLED, reason="needs simulated GPUs")


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(*capabilities)`` simulates a GPU of these compute capabilities for each rank."""

    def choose(*capabilities):
        # Ranks construct their buffers in rank order, and each asks for its GPU once.
        found = iter([gpu_like(capability) for capability in capabilities])
        monkeypatch.setattr(rank_state, "gpu_of", lambda device: next(found))

    return choose


@simulated
@pytest.mark.parametrize(
    "capabilities, limits",
    [
        (((9, 0), (9, 0)), (True, 227)),
        (((12, 0), (9, 0)), (True, 99)),
        (((8, 0), (8, 0)), (False, 163)),
        (((9, 0), (8, 0)), (False, 163)),
        (((8, 9), (8, 0)), (False, 99)),
        (((9, 0), (7, 5)), (False, 64)),
    ],
)
def test_a_group_uses_what_all_of_its_gpus_have(capabilities, limits, gpus):
    gpus(*capabilities)
    inputs = make_inputs([6, 5])
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        given = send(buffer, rank, inputs)
        check_received(given, right[rank], rank, inputs.experts // 2)
        return buffer._runtime.limits

    assert run(2, work) == 2 * [GpuLimits(limits[0], 1024 * limits[1])]


@simulated
def test_ranks_with_other_limits_are_refused():
    """Rank 1 would use another number of channels; all ranks name it."""
    inputs = make_inputs([6, 5])

    def work(buffer, rank):
        if rank == 1:
            buffer._runtime.limits = GpuLimits(True, 600)  # space for one warp
        with pytest.raises(ValueError, match="the number of channels, which depends on config, is"):
            send(buffer, rank, inputs)

    run(2, work, timeout=SHORT_TIMEOUT)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_results_are_those_of_tma(fp8):
    """Dispatch and combine return the same bits on both paths; so does the handle, unless it has other channels."""
    inputs = make_inputs([7 * SCALE, 9 * SCALE], fp8=fp8)

    def work(transport):
        results = []
        for uses_tma in (None, False):
            kind = type("Buffer", (Buffer,), {"_uses_tma": uses_tma})
            buffer, rank = kind(transport, NUM_BYTES), transport.rank
            given = send(buffer, rank, inputs)
            values = given[0] if fp8 else (given[0],)
            rows = values[0].float().bfloat16()
            handle = given[4] if simulator.ENABLED else ()  # a GPU has 16 warps to a block with TMA, 7 without
            results.append((*values, *given[1:3], *handle, *buffer.combine(rows, given[4], given[2])[:2]))
            buffer.destroy()
        return bitwise_equal(*results)

    with engine(0):
        assert all(LocalGroup(2).run(work))


ON_SM_75 = """
from helpers.expert_parallel import exchange_on_two_ranks, new_output
for new_out in (lambda buffer: None, lambda buffer: new_output(buffer, 16)):
    exchange_on_two_ranks(0, new_out)
"""


@simulated
def test_the_kernels_execute_no_instruction_newer_than_sm_75():
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[1])])
    environment = os.environ | {"MOE_NUMBA_ARCH": "75", "MOE_NUMBA_SIMULATE": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", ON_SM_75], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# PCIe has no atomic operations between GPUs


def atomics_on_peers(monkeypatch):
    """Return the atomics that kernels of an exchange execute on memory of other ranks."""
    found, update = [], atomic.update

    def watched(target, index, change, *options):
        name = getattr(target, "name", "") or ""
        if name.startswith("the buffer of rank") and name.split()[4] != str(thread().grid.rank):
            found.append(name)
        return update(target, index, change, *options)

    monkeypatch.setattr(atomic, "update", watched)
    exchange_on_two_ranks(0)
    return found


@simulated
def test_no_atomics_on_memory_of_peers(monkeypatch, uses_tma):
    assert atomics_on_peers(monkeypatch) == []


@simulated
def test_atomics_on_memory_of_peers_are_found(monkeypatch):
    from moe_numba.expert_parallel.rings import progress
    from moe_numba.ptx.atomics import atom_add_relaxed_sys_s32, ld_volatile_s32

    def store_by_adding(pointer, index, value):
        atom_add_relaxed_sys_s32(pointer, index, value - ld_volatile_s32(pointer, index))

    monkeypatch.setattr(progress, "st_relaxed_sys_s32", store_by_adding)
    assert atomics_on_peers(monkeypatch)


# Peer access


@pytest.fixture
def three_gpus(monkeypatch):
    """GPUs 0 to 2, of which 0 and 2 cannot access each other's memory."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(peer_access, "_uuid", lambda index: f"GPU-{index}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: {own, peer} != {0, 2} and own != peer)


def peer_access_errors(devices, visible=3):
    """Return the error of each rank, or None."""

    def work(transport):
        transport.device = torch.device("cuda", devices[transport.rank])
        try:
            peer_access.check_peer_access(transport)
        except UnsupportedDeviceError as error:
            return str(error)

    return LocalGroup(len(devices)).run(work)


@simulated
@pytest.mark.parametrize("devices", [(0, 1), (1, 2, 1), (0, 0)])
def test_gpus_with_peer_access_are_accepted(devices, three_gpus):
    assert peer_access_errors(devices) == [None] * len(devices)


@simulated
@pytest.mark.parametrize("devices, ranks", [((0, 2), (0, 1)), ((0, 1, 2), (0, 2))])
def test_all_ranks_name_gpus_without_peer_access(devices, ranks, three_gpus):
    for error in peer_access_errors(devices):
        assert error.startswith(
            f"GPU 0 of rank {ranks[0]} cannot access GPU 2's memory, of rank {ranks[1]}; ranks exchange rows by peer"
        )


@simulated
def test_gpus_that_are_not_visible_are_not_checked(three_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(peer_access, "_uuid", lambda index: f"GPU-{2 * index}")
    transport = type("Transport", (), {"rank": 0, "device": torch.device("cuda", 0)})()
    transport.gather = lambda value: [value, "GPU-7"] if isinstance(value, str) else [value, []]
    peer_access.check_peer_access(transport)


@simulated
def test_ranks_of_one_process_name_gpus_without_peer_access(three_gpus):
    with pytest.raises(UnsupportedDeviceError, match="GPU 0 cannot access GPU 2's memory; ranks exchange rows"):
        peer_access.enable_peer_access({0, 2})
