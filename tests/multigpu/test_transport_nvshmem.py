"""`Nvshmem` without GPUs: ranks are threads, and an imitation of NVSHMEM4Py has its heap in host memory.

As in NVSHMEM, initialising, allocating and freeing are collective; here they raise an error where NVSHMEM would hang.
"""

import contextlib
import ctypes
import enum
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_numba.expert_parallel import Nvshmem
from moe_numba.runtime.device import UnsupportedDeviceError

HANG_S = 1  # after which a collective call raises an error
SIZE = 1024


class Job:
    """Processes that have initialised NVSHMEM together; it is its own unique ID."""

    def __init__(self, unreachable=()):
        self.heaps, self.freed, self.unreachable = {}, Counter(), unreachable
        self._lock, self._barrier = threading.Lock(), None

    def join(self, num_pes):
        with self._lock:
            self._barrier = self._barrier or threading.Barrier(num_pes, timeout=HANG_S)
        self.barrier()

    def barrier(self):
        self._barrier.wait()


class Process:
    """What one process has of NVSHMEM4Py: the functions of ``nvshmem.core`` and of ``nvshmem.bindings``."""

    InitStatus = enum.IntEnum(
        "InitStatus", {"STATUS_NOT_INITIALIZED": 0, "STATUS_IS_INITIALIZED": 2, "STATUS_INVALID": 32767}
    )

    def __init__(self, rank=0, make_job=Job, fails=False, capacity=1 << 20):
        self.rank, self._make_job, self._fails, self._capacity = rank, make_job, fails, capacity
        self._job, self._allocations, self.environment, self.device = None, 0, None, torch.device("cpu")
        # A process has one class, which knows the process' job.
        self._transport = type("TransportOfProcess", (TransportOfThread,), {})

    def transport(self, group):
        return self._transport(self, group)

    def get_version(self):
        pass

    def get_unique_id(self):
        return self._make_job()

    def init(self, device, uid, rank, nranks, initializer_method):
        assert initializer_method == "uid"
        self.environment = {name: os.environ.get(name) for name in VARIABLES}
        uid.join(nranks)
        self._job, self._pe, self._num_pes = (None if self._fails else uid), rank, nranks

    def init_status(self):
        return self.InitStatus.STATUS_NOT_INITIALIZED if self._job is None else self.InitStatus.STATUS_IS_INITIALIZED

    def n_pes(self):
        return self._num_pes

    def my_pe(self):
        return self._pe

    def malloc(self, size):
        self._allocations += 1
        if size <= self._capacity:
            self._job.heaps[self._pe, self._allocations] = (ctypes.c_uint8 * size)(*[255] * size)
        self._job.barrier()
        return self._address(self._pe, self._allocations)

    def ptr(self, address, pe):
        is_own = {self._address(*key): key[1] for key in self._job.heaps if key[0] == self._pe}
        return 0 if (self._pe, pe) in self._job.unreachable else self._address(pe, is_own[address])

    def free(self, address):
        self._job.barrier()
        self._job.freed[address] += 1

    def num_freed(self):
        return self._job.freed.total()

    def _address(self, pe, number):
        memory = self._job.heaps.get((pe, number))
        return ctypes.addressof(memory) if memory else 0


class Group:
    """A process group of some ranks, which share a store."""

    def __init__(self, *ranks):
        self.ranks, self.store = ranks, torch.distributed.HashStore()
        self.values, self.barrier = [None] * len(ranks), threading.Barrier(len(ranks), timeout=HANG_S)


class TransportOfThread(Nvshmem):
    """An `Nvshmem` whose group is a `Group`, and whose memory is on the host."""

    def __init__(self, process, group):
        self.group, self.rank, self.num_ranks = group, group.ranks.index(process.rank), len(group.ranks)
        self.device, self._store, self._arrivals, self._num_allocations = process.device, group.store, Counter(), 0
        self._core = self._bindings = process
        self._prefix = self.gather(f"group {id(group)}")[0]
        self._pes = self._join()

    def gather(self, value):
        self.group.values[self.rank] = value
        self.group.barrier.wait()
        values = list(self.group.values)
        self.group.barrier.wait()
        return values

    def _tensor(self, address, num_bytes):
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


class Device:
    def __init__(self, index):
        pass

    def set_current(self):
        pass


VARIABLES = "NVSHMEM_DISABLE_NVLS", "NVSHMEM_REMOTE_TRANSPORT"


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr("cuda.core.Device", Device)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored after the test
        monkeypatch.delenv(name)


def run(work, *arguments):
    """Call ``work`` in one thread for each tuple of arguments; return the results, or the errors."""

    def call(*of_rank):
        try:
            return work(*of_rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(call, *arguments))


def make(processes, group):
    """Return the transports, or the errors, of a group's ranks."""
    members = [processes[rank] for rank in group.ranks]
    return run(lambda process: process.transport(group), members)


def two_transports(**options):
    return make([Process(rank, **options) for rank in range(2)], Group(0, 1))


def test_memory_is_zeroed_and_all_ranks_know_its_addresses():
    first, second = run(lambda t: t.allocate(SIZE), two_transports())
    assert first.local.shape == (SIZE,) and first.local.dtype == torch.uint8
    assert not first.local.any() and not second.local.any()
    assert first.addresses.tolist() == second.addresses.tolist() == [first.local.data_ptr(), second.local.data_ptr()]


def test_a_later_group_of_the_same_ranks_uses_the_same_pes():
    processes = [Process(rank) for rank in range(3)]
    make(processes, Group(0, 1, 2))
    transports = make(processes, Group(2, 0, 1))
    assert [t.rank for t in transports] == [0, 1, 2] and [t._core.my_pe() for t in transports] == [2, 0, 1]
    shared = run(lambda t: t.allocate(SIZE), transports)
    assert shared[0].addresses.tolist() == [s.local.data_ptr() for s in shared], "in the order of the group's ranks"


def test_groups_without_common_ranks_initialise_nvshmem_each():
    processes = [Process(rank) for rank in range(4)]
    for group in (Group(0, 1), Group(2, 3)):
        assert [t._pes for t in make(processes, group)] == [(0, 1)] * 2


@pytest.mark.parametrize(
    "groups, refused, said",
    [
        ([(0, 1, 2, 3)], (0, 1), "PE 0 of 4, PE 1 of 4"),
        ([(0, 1)], (0, 1, 2, 3), "PE 0 of 2, PE 1 of 2, none, none"),
        ([(0, 1), (2, 3)], (0, 3), "PE 0 of 2, PE 1 of 2"),  # PEs 0 and 1 of 2, but of two jobs
    ],
    ids=["a part of the PEs", "more than the PEs", "of two jobs"],
)
def test_a_group_of_other_ranks_is_refused_on_all_of_them(groups, refused, said):
    processes = [Process(rank) for rank in range(4)]
    for group in groups:
        assert all(isinstance(t, Nvshmem) for t in make(processes, Group(*group)))
    for error in make(processes, Group(*refused)):
        assert isinstance(error, ValueError) and f"in NVSHMEM: {said}; NVSHMEM is initialised once" in str(error)


def test_another_gpu_is_refused_on_all_ranks():
    processes = [Process(rank) for rank in range(2)]
    make(processes, Group(0, 1))
    processes[1].device = torch.device("meta")
    for error in make(processes, Group(0, 1)):
        assert isinstance(error, ValueError)
        assert str(error) == "device is meta on rank 1; NVSHMEM was initialised there with cpu"


@pytest.mark.parametrize("members, accepted", [((0, 1, 2, 3), True), ((0, 1), False)])
def test_an_nvshmem_initialised_elsewhere_is_used_with_all_processes_only(members, accepted):
    processes, job = [Process(rank) for rank in range(4)], Job()
    run(lambda rank: processes[rank].init(None, job, rank, len(members), "uid"), members)
    for result in make(processes, Group(*members)):
        assert isinstance(result, Nvshmem if accepted else ValueError)


def test_a_failed_initialisation_is_an_error_on_all_ranks():
    errors = make([Process(0), Process(1, fails=True)], Group(0, 1))
    assert [str(error) for error in errors] == [
        "NVSHMEM could not be initialised on ranks [1]; with NVSHMEM_DEBUG=INFO it prints the reason"
    ] * 2


@pytest.mark.parametrize(
    "given, hosts, expected",
    [
        ({}, ["a", "a"], ("1", "none")),
        ({}, ["a", "b"], ("1", None)),
        ({"NVSHMEM_DISABLE_NVLS": "0", "NVSHMEM_REMOTE_TRANSPORT": "ibrc"}, ["a", "a"], ("0", "ibrc")),
    ],
    ids=["one host", "two hosts", "set by the user"],
)
def test_environment_variables_that_are_not_set_get_values(given, hosts, expected, monkeypatch):
    class Uname:
        nodename = property(lambda self: hosts.pop())

    monkeypatch.setattr(os, "uname", Uname)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for transport in two_transports():
        assert tuple(transport._core.environment.values()) == expected


def test_different_sizes_are_refused_before_the_heap_changes():
    transports = two_transports()
    for error in run(lambda t: t.allocate(SIZE + t.rank), transports):
        assert isinstance(error, ValueError) and "num_bytes is 1024 on rank 0 and 1025 on rank 1" in str(error)
    assert not transports[0]._core._job.heaps


def test_a_full_heap_is_an_error_on_all_ranks():
    processes = [Process(0), Process(1, capacity=SIZE)]
    for error in run(lambda t: t.allocate(2 * SIZE), make(processes, Group(0, 1))):
        assert isinstance(error, MemoryError) and "2048 bytes cannot be allocated" in str(error)


def test_a_peer_on_another_node_is_an_error_on_all_ranks():
    transports = two_transports(make_job=lambda: Job(unreachable=[(1, 0)]))
    for error in run(lambda t: t.allocate(SIZE), transports):
        assert isinstance(error, UnsupportedDeviceError)
        assert "of rank 1 could access the memory of rank 0; all ranks must be on one node" in str(error)
    assert transports[0]._core.num_freed() == 2


def close(shared, delay, seconds):
    time.sleep(delay)
    shared.close(seconds)


@pytest.mark.parametrize(
    "delays, seconds, freed",
    [
        ((0, 0.1), (10, 10), True),
        ((0, 0.1), (10, 0), False),  # rank 1 announces that it has ended
        ((0.1, 0), (10, 0), False),
        ((0, 0), (0, 0), False),
        ((0, 0.2), (0.05, 10), False),  # rank 1 comes too late
    ],
)
def test_memory_is_freed_if_all_ranks_wait_for_one_another(delays, seconds, freed):
    transports = two_transports()
    shared = run(lambda t: t.allocate(SIZE), transports)
    assert run(close, shared, delays, seconds) == [None, None], "no rank hangs"
    assert transports[0]._core.num_freed() == 2 * freed
    shared[0].close()  # closing twice has no effect


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_close_ends_without_a_missing_rank(seconds):
    transports = two_transports()
    shared = run(lambda t: t.allocate(SIZE), transports)
    shared[0].close(seconds)
    assert transports[0]._core.num_freed() == 0


def test_ranks_whose_time_ends_together_decide_alike():
    transports, generator = two_transports(), random.Random(5)
    kept = 0
    for _ in range(100):
        shared = run(lambda t: t.allocate(64), transports)
        freed = transports[0]._core.num_freed()
        delays = 0, generator.uniform(0, 0.01)
        assert run(close, shared, delays, (0.005, 0.005)) == [None, None], "no rank hangs"
        kept += transports[0]._core.num_freed() == freed
    assert 0 < kept < 100, "the test has reached both decisions"


def test_a_rank_that_decides_alone_would_hang(monkeypatch):
    monkeypatch.setattr(Nvshmem, "_all_free", lambda self, name, seconds: self.rendezvous(name, seconds))
    transports = two_transports()
    shared = run(lambda t: t.allocate(SIZE), transports)
    results = run(close, shared, (0, 0), (10, 0))
    assert isinstance(results[0], threading.BrokenBarrierError)


def test_memory_is_kept_if_the_store_is_lost(monkeypatch):
    class Lost:
        def __getattr__(self, name):
            raise RuntimeError("Connection reset by peer")

    transports = two_transports()
    shared = run(lambda t: t.allocate(SIZE), transports)
    transports[0]._store = Lost()
    shared[0].close(10)
    assert transports[0]._core.num_freed() == 0


def test_the_error_without_nvshmem4py_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    with pytest.raises(ImportError, match=r"Nvshmem needs nvshmem, .*: pip install 'moe_numba\[nvshmem\]'$"):
        Nvshmem(None)
