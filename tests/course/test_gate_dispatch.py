"""Low-latency dispatch behind the gate: the benchmark's kernels, in the simulator."""

import pytest
import torch
from helpers.low_latency import run, synchronize

from moe_numba import simulator

# isort: split
from numba import cuda

from moe_numba.course.bench.gate_dispatch import KINDS, LAYOUTS, TOPK, Step, check_equal
from moe_numba.expert_parallel.low_latency import config as low_latency_config
from moe_numba.runtime.launch import launch

EXPERTS, HIDDEN = 32, 64
pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="the benchmark itself checks the kernels on GPUs")


@pytest.fixture(autouse=True)
def two_parts(monkeypatch):
    """Two CTAs share a row. By default they would be seven, most of them without a vector of these short rows."""
    monkeypatch.setattr(low_latency_config, "default_parts", lambda max_tokens: 2)


def in_stream_of_dispatch(launch):
    """Return a launch that the simulator queues with dispatch's, so that it sees their overlap."""

    def queue(*arguments):
        with simulator.exchange():
            launch(*arguments)

    return queue


def check_steps(buffer, steps, draw):
    for _ in range(2):
        draw()
        check_equal(steps, lambda step: (step(), synchronize(buffer)))
    buffer.check()
    for step in steps.values():
        step.plan.close()


@pytest.mark.parametrize("seed, expert_major", list(enumerate(LAYOUTS.values())))
def test_gate_and_dispatch(expert_major, seed):
    """One kernel writes what two do; rows may be loaded before the wait behind the gate."""

    def work(buffer, rank):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        x, logits = torch.zeros(3, HIDDEN, dtype=torch.bfloat16), torch.zeros(3, EXPERTS)
        bias = torch.randn(EXPERTS, generator=generator)
        steps = {kind: Step(buffer, kind, x, logits, bias, expert_major, num_sms=3) for kind in KINDS}
        for step in steps.values():
            step.gate.launch = in_stream_of_dispatch(step.gate.launch)
        draw = lambda: [t.copy_(torch.randn(t.shape, generator=generator)) for t in (x, logits)]
        check_steps(buffer, steps, draw)

    with simulator.races():
        run(2, work, seed)


@cuda.jit
def write_rows(x, value, words):
    for i in range(cuda.threadIdx.x, words, 32):
        x[i] = value


def dispatch_behind_the_kernel_that_writes_the_rows(kind):
    """Run dispatch directly behind the kernel that writes its rows, and check the rows that arrive."""

    def work(buffer, rank):
        x, logits = torch.zeros(1, HIDDEN, dtype=torch.bfloat16), torch.zeros(1, EXPERTS)
        step = Step(buffer, kind, x, logits, torch.zeros(EXPERTS), False, num_sms=3)
        synchronize(buffer)  # the gate has written ids
        step.ids.copy_(torch.arange(TOPK) + EXPERTS // 2 * (1 - rank))
        words, write = x.view(torch.int32), in_stream_of_dispatch(launch)
        for value in (3, rank + 1):  # the first launch waits until all ranks have loaded the kernel
            write(write_rows, 1, 32, words, value, words.numel())
            step.plan._dispatch.launch(x, step.ids, step.weights, step.plan.received)
            synchronize(buffer)
        buffer.check()
        assert (step.plan.received.x[1 - rank].view(torch.int32) == 2 - rank).all()
        step.plan.close()

    with simulator.races():
        run(2, work)


def test_rows_may_be_of_the_kernel_before():
    dispatch_behind_the_kernel_that_writes_the_rows(KINDS[1])


def test_rows_loaded_before_the_wait_are_rejected():
    """Behind a kernel that writes rows, and not behind the gate, dispatch must not load them before it waits."""
    with pytest.raises(simulator.SimulatorError, match="griddepcontrol_wait"):
        dispatch_behind_the_kernel_that_writes_the_rows(KINDS[2])
