"""One process and one GPU per rank: random inputs, CUDA graphs, a late rank, and a rank that exits."""

import os
import sys
import time

import pytest
import torch
from helpers.deepep_calls import exchange_as_deepep_low_latency_test, exchange_as_deepep_tests, make_deep_ep
from helpers.expert_parallel import (
    NUM_BYTES,
    SMALL,
    WIDE,
    check_combined,
    check_received,
    make_inputs,
    new_output,
    reference_dispatch,
    send,
    to_device,
)
from helpers.rank_processes import run, run_to_exit

from moe_numba.expert_parallel import Buffer, CudaIpc, SymmetricMemory

pytestmark = pytest.mark.multigpu
HIDDEN = 1024


def random_inputs(rank, ranks, kind, rounds, uses_tma):
    """Dispatch and combine random inputs through two alternating buffers, and check what this rank receives.

    Every process draws the inputs of all ranks. Some dispatches write to an output.
    """
    import torch.distributed as dist

    Buffer._uses_tma = uses_tma
    group = {"symmetric": lambda: dist.group.WORLD, "ipc": lambda: CudaIpc(dist.group.WORLD)}[kind]()
    buffers = [Buffer(group, NUM_BYTES, timeout=20) for _ in range(2)]
    assert isinstance(buffers[0].transport, SymmetricMemory if kind == "symmetric" else CudaIpc)
    outs = [[new_output(buffer, 300 * ranks, fp8) for fp8 in (False, True)] for buffer in buffers]
    generator = torch.Generator().manual_seed(5)
    for i in range(rounds):
        max_tokens = int(torch.randint(1, 300, (), generator=generator))
        inputs = make_inputs(
            torch.randint(0, max_tokens + 1, (ranks,), generator=generator).tolist(), i, fp8=i % 3 == 0
        )
        right, config, buffer = reference_dispatch(inputs), (SMALL, WIDE)[i % 2], buffers[i // 2 % 2]
        out = outs[i // 2 % 2][i % 3 == 0] if i % 5 < 2 else None
        given = send(buffer, rank, inputs, config, out=out)
        check_received(given, right[rank], rank, inputs.experts // ranks)
        y = [torch.randn(len(r.src_idx), 64, generator=generator).bfloat16() for r in right]
        back = buffer.combine(to_device(buffer.transport.device, y[rank]), given[4], given[2], config=config)[:2]
        if i % 10 == 0:
            gathered = [None] * ranks
            dist.all_gather_object(gathered, tuple(part.cpu() for part in back))
            check_combined(gathered, inputs, right, y, [r.topk_weights for r in right])
    for buffer, own in zip(buffers, outs, strict=True):
        for out in own:
            out.close()
        buffer.destroy()


@pytest.mark.parametrize(
    "kind, rounds, uses_tma",
    [("symmetric", 1000, None), ("ipc", 50, None), ("symmetric", 300, False), ("ipc", 50, False)],
)
def test_random_inputs(kind, rounds, uses_tma):
    run(random_inputs, kind, rounds, uses_tma)


def in_graphs(rank, ranks, to_output, uses_tma):
    """Replay a captured dispatch and combine with new tokens, with eager calls of other shapes in between."""
    import torch.distributed as dist

    Buffer._uses_tma = uses_tma
    buffer, tokens = Buffer(dist.group.WORLD, NUM_BYTES, timeout=20), 64
    device = buffer.transport.device
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    idx = torch.zeros(tokens, 4, dtype=torch.int64, device=device)
    weights = torch.zeros(tokens, 4, device=device)
    out = buffer.new_output(ranks * tokens, HIDDEN, num_topk=4) if to_output else None

    def dispatch_and_combine():
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, 8 * ranks)
        given = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_in_rank,
            topk_idx=idx,
            topk_weights=weights,
            config=WIDE,
            num_worst_tokens=ranks * tokens,
            out=out,
        )
        sums, combined_weights, _ = buffer.combine(given[0], given[4], given[2], config=WIDE)
        return sums, combined_weights, is_in_rank

    def new_tokens(i):
        torch.manual_seed(100 * i + rank)
        x.copy_(torch.randn(tokens, HIDDEN, device=device))
        idx.copy_(torch.randint(-1, 8 * ranks, (tokens, 4), device=device))
        weights.copy_(torch.rand(tokens, 4, device=device))

    def check(sums, combined_weights, is_in_rank):
        assert torch.equal(sums, (x.float() * is_in_rank.sum(1, keepdim=True)).bfloat16())
        torch.testing.assert_close(combined_weights, weights.where(idx >= 0, 0))

    new_tokens(0)
    check(*dispatch_and_combine())
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = dispatch_and_combine()
    for i in range(1, 30):
        new_tokens(i)
        graph.replay()
        torch.cuda.synchronize()
        check(*results)
        if i % 5 == 0:
            inputs = make_inputs([37 * i % 50 + r for r in range(ranks)], i, fp8=i % 2 == 0)
            for config in (WIDE, SMALL):
                given = send(buffer, rank, inputs, config)
                check_received(given, reference_dispatch(inputs)[rank], rank, inputs.experts // ranks)
    buffer.destroy()


@pytest.mark.parametrize("to_output", [False, True], ids=["rings", "output"])
def test_dispatch_and_combine_in_cuda_graphs(to_output, uses_tma):
    run(in_graphs, to_output, uses_tma)


def as_deepep(rank, ranks, exchange):
    """What DeepEP's tests set before they make a buffer: the default device and dtype, and a group of their own."""
    import torch.distributed as dist

    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda")
    sys.modules["deep_ep"] = make_deep_ep()
    import deep_ep

    device = torch.device("cuda", torch.cuda.current_device())
    exchange(deep_ep, dist.new_group(list(range(ranks))), rank, ranks, device)


@pytest.mark.parametrize("exchange", [exchange_as_deepep_tests, exchange_as_deepep_low_latency_test])
def test_calls_of_deepeps_tests(exchange):
    run(as_deepep, exchange)


def late(rank, ranks):
    """Delay one rank before dispatch or after it; the other ranks wait on the GPU and on the host."""
    import torch.distributed as dist

    buffer = Buffer(dist.group.WORLD, NUM_BYTES, timeout=20)
    inputs = make_inputs([50] * ranks)
    for i in range(2 * ranks):
        if i % ranks == rank:
            time.sleep(0.3)
        given = send(buffer, rank, inputs)
        check_received(given, reference_dispatch(inputs)[rank], rank, inputs.experts // ranks)
        if (i + 1) % ranks == rank:
            time.sleep(0.3)
        buffer.combine(given[0], given[4], config=SMALL)
    buffer.destroy()


def test_ranks_wait_for_a_late_rank():
    run(late)


def one_exits(rank, ranks, when):
    """Exit rank 1 without cleaning up; the other ranks raise TimeoutError and exit."""
    import torch.distributed as dist

    inputs = make_inputs([50] * ranks)
    warm_up = Buffer(dist.group.WORLD, NUM_BYTES, timeout=60)  # the first calls compile the kernels
    warm_up.combine((given := send(warm_up, rank, inputs))[0], given[4], config=SMALL)
    warm_up.destroy()
    buffer = Buffer(dist.group.WORLD, NUM_BYTES, timeout=2)
    given = send(buffer, rank, inputs)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os._exit(3)
    try:
        if when == "combine":
            buffer.combine(given[0], given[4], config=SMALL)
            torch.cuda.synchronize()
        send(buffer, rank, inputs)
    except TimeoutError as error:
        assert "rank 1" in str(error)
        buffer.destroy()  # does not wait for rank 1
        os._exit(7)
    os._exit(0)


@pytest.mark.parametrize("when", ["notify", "combine"])
def test_ranks_raise_timeout_errors_if_a_rank_exits(when):
    codes = run_to_exit(one_exits, when)
    assert codes == [3 if rank == 1 else 7 for rank in range(len(codes))]


def replays_after_a_loss(rank, ranks, direct):
    """Rank 1 ends; the others replay a graph, whose results are NaNs, and `check` raises the error."""
    import torch.distributed as dist

    buffer, tokens = Buffer(dist.group.WORLD, NUM_BYTES, timeout=3), 64
    device = buffer.transport.device
    x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    idx = torch.randint(8 * ranks, (tokens, 4), device=device)
    weights = torch.rand(tokens, 4, device=device)
    out = buffer.new_output(ranks * tokens, HIDDEN, num_topk=4) if direct else None
    buffer.warm_up(HIDDEN, 8 * ranks, 4, config=WIDE, combine_config=WIDE, out=out)

    def there_and_back():
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, 8 * ranks)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
        topk = dict(topk_idx=idx, topk_weights=weights)
        given = buffer.dispatch(x, **layout, **topk, config=WIDE, num_worst_tokens=ranks * tokens, out=out)
        return *given[:3], *buffer.combine(given[0], given[4], given[2], config=WIDE)[:2]

    there_and_back()
    buffer.check(synchronize=True)
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = there_and_back()
    graph.replay()
    buffer.check(synchronize=True)
    assert not any(result.isnan().any() for result in results)
    dist.barrier()
    if rank == 1:
        os._exit(3)
    time.sleep(1)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
    try:
        buffer.check()
    except TimeoutError as error:
        assert "rank 1" in str(error)
        floats = [result for result in results if result.dtype.is_floating_point]
        assert len(floats) == 4 and all(result.isnan().all() for result in floats) and (results[1] == -1).all()
        buffer.destroy()
        os._exit(7)
    os._exit(0)


@pytest.mark.parametrize("direct", [False, True], ids=["rings", "output"])
def test_replays_after_a_loss_return_nan(direct):
    codes = run_to_exit(replays_after_a_loss, direct)
    assert codes == [3 if rank == 1 else 7 for rank in range(len(codes))]


def comes_late(rank, ranks):
    """Rank 1 comes after the timeout of the others: it raises their error in that call, and all can destroy."""
    import torch.distributed as dist

    buffer, world = Buffer(dist.group.WORLD, NUM_BYTES, timeout=2), make_inputs([50] * ranks)
    send(buffer, rank, world)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(4)
    with pytest.raises(TimeoutError, match="waited for the counts of rank 1"):
        send(buffer, rank, world)
    buffer.destroy()


def test_a_rank_that_comes_after_the_timeout():
    run(comes_late)


def compiles_long(rank, ranks):
    """Rank 1 compiles for longer than the timeout; the others wait on the host."""
    import torch.distributed as dist

    buffer, world = Buffer(dist.group.WORLD, NUM_BYTES, timeout=2), make_inputs([50] * ranks)
    prepare = buffer.transport.prepare_kernel

    def prepare_late(*arguments, **options):
        start = prepare(*arguments, **options)
        time.sleep(5 * (rank == 1))
        return start

    buffer.transport.prepare_kernel = prepare_late
    for config in (SMALL, WIDE):
        given = send(buffer, rank, world, config)
        check_received(given, reference_dispatch(world)[rank], rank, world.experts // ranks)
        buffer.combine(given[0], given[4], config=config)
    buffer.check(synchronize=True)
    buffer.destroy()


def test_a_rank_that_compiles_for_long():
    run(compiles_long)
