"""Steps of a lesson between ranks: kernels of two ranks are checked in weak memory and counted."""

from contextlib import contextmanager

import pytest
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32

from moe_numba.course.bench import records
from moe_numba.course.bench.timing.multigpu import outputs_of, settle
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Run
from moe_numba.course.steps.ranks import RankLesson
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import pointer_from_address

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="counts and weak memory are the simulator's")
GROUP = LocalGroup(2)


def make_message(store):
    @cuda.jit
    def message(peers, local, out, rank):
        thread = int32(cuda.threadIdx.x)
        if rank == 0:
            remote = pointer_from_address(peers[1], local)
            remote[64 + thread] = int32(100 + thread)
            cuda.syncthreads()
            if thread == 0:
                store(remote, 0, int32(1))
        else:
            if thread == 0:
                while ld_acquire_sys_s32(local, 0) == 0:
                    pass
            cuda.syncthreads()
            out[thread] = local[64 + thread]

    return message


def timed(version):
    @contextmanager
    def make(transport):
        shared = transport.allocate(1024)
        local, out = shared.local.view(torch.int32), torch.zeros(64, dtype=torch.int32)

        def step():
            transport.launch(version, 1, 64, shared.addresses, local, out, transport.rank)
            return out

        yield step
        settle(transport)
        shared.close()

    return make


def check(version):
    received = outputs_of(GROUP, timed(version))[1].tolist()
    return None if received == list(range(100, 164)) else f"rank 1 read {received[:4]} ..."


RUN = Run(check, lambda version: outputs_of(GROUP, timed(version)), timed)


def lesson(ranks=2):
    about = dict(config={"ranks": ranks}, size={"tokens": 64}, dtype="int32")
    return RankLesson("no_such_ladder", RUN, f"{__name__}:lesson", **about, group=GROUP)


def test_a_right_version_is_checked_and_counted():
    step = lesson().step("release", make_message(st_release_sys_s32))
    assert step.us is None and step.score.rows["all warps", "bytes, other ranks"] >= 256


def test_a_missing_order_is_found():
    with pytest.raises(WrongResult, match="race|rank 1 read"):
        lesson().step("relaxed", make_message(st_relaxed_sys_s32))


def test_times_of_virtual_ranks_are_recorded_ones():
    of = lesson()
    assert not of.is_timed and of.times("message", {"release": timed(make_message(st_release_sys_s32))}) == {}


def test_a_new_record_keeps_the_rows_of_other_numbers_of_ranks(monkeypatch):
    env = {"gpu": "NVIDIA H200", "driver": "580", "versions": {}, "commit": "2", "date": "today"}
    rows = [{"step": "release", "config": {"ranks": ranks}, "size": {}} for ranks in (2, 4)]
    record = env | {"rows": rows, "commit": "1"}
    monkeypatch.setattr(records, "recorded", lambda topic, gpu: record)
    monkeypatch.setattr(records, "environment", lambda: env)
    assert lesson().kept_rows() == [rows[1] | {"measured": {"commit": "1", "date": "today"}}]
    monkeypatch.setattr(records, "environment", lambda: env | {"driver": "590"})
    assert lesson().kept_rows() == []


def test_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="config has 4 ranks; group has 2"):
        lesson(ranks=4)
