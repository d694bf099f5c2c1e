"""Low-latency dispatch and combine, one process and one GPU per rank: random sizes and routing, graphs, lost ranks."""

import os
import signal
import time

import pytest
import torch
from helpers.expert_parallel import NUM_BYTES, SMALL, Inputs, bitwise_equal, send
from helpers.low_latency import EXPERTS_PER_RANK, KINDS, check_packed, make_round
from helpers.rank_processes import needs_nvshmem, run, run_to_exit

from moe_numba.expert_parallel import Buffer, CudaIpc, Nvshmem, SymmetricMemory

pytestmark = pytest.mark.multigpu
HIDDEN = 1024


def sums_of(topk_idx, topk_weights, x, ranks):
    """Return the sums of rows that experts return unchanged: by rank, in bfloat16, then in rank order."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(ranks):
        part, found = torch.zeros_like(total), torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
        for k in range(topk_idx.shape[1]):
            local = (topk_idx[:, k] // EXPERTS_PER_RANK == rank) & (topk_idx[:, k] >= 0)
            exact = topk_weights[:, k, None].double() * x.double() + part.double()
            part, found = torch.where(local[:, None], exact.float(), part), found | local[:, None]
        total += torch.where(found, part.bfloat16().float(), 0)
    return total.bfloat16()


def random_rounds(rank, ranks, rounds, protocol):
    """Random tokens, sizes and options; two buffers alternate. Experts return their rows unchanged.

    Every round draws one of 40 inputs, whose sums are known, so that the host does not wait for the GPU: ranks run
    ahead of one another. What a round receives is checked in full every 100 rounds.
    """
    import torch.distributed as dist

    buffers = [Buffer(dist.group.WORLD, NUM_BYTES, low_latency_mode=True, timeout=20) for _ in range(2)]
    device, experts = buffers[0].transport.device, EXPERTS_PER_RANK * ranks
    generator = torch.Generator().manual_seed(5)
    draw = lambda below: int(torch.randint(below, (), generator=generator))
    plans, inputs = [], []
    for topk, tokens, scales in KINDS:
        options = dict(use_fp8=scales is not None, protocol=protocol)
        plans.append([buffer.low_latency(tokens, HIDDEN, experts, topk, **options) for buffer in buffers])
        inputs.append([])
        for i in range(40):
            world = make_round([draw(tokens + 1) for _ in range(ranks)], i, topk, EXPERTS_PER_RANK, HIDDEN)
            x, ids, weights = own = [part[rank].to(device) for part in world]
            valid = ids.where((ids >= 0) & (ids < experts), -1)
            inputs[-1].append((world, own, sums_of(valid, weights, x, ranks)))
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for i in range(rounds):
        kind = draw(len(KINDS))
        plan, (world, (x, ids, weights), right) = plans[kind][draw(2)], inputs[kind][draw(40)]
        got, scales = plan.dispatch(x, ids), KINDS[kind][2]
        if scales is None:
            out = plan.combine(got.x, ids, weights)
            differs |= (out.view(torch.int16) != right.view(torch.int16)).any()
        if i % 100 == 0:
            assert not differs
            rows = got.x if scales is None else (got.x.cpu(), got.scales.cpu())
            check_packed(rows, got.counts.cpu(), (got.src_info, got.layout_range), world, rank, scales)
    for buffer in buffers:
        buffer.check(synchronize=True)
    assert not differs
    for plan in sum(plans, []):
        plan.close()
    for buffer in buffers:
        buffer.destroy()


@pytest.mark.parametrize("protocol, rounds", [("lamport", 10_000), ("flags", 2_000)])
def test_random_rounds(protocol, rounds):
    run(random_rounds, rounds, protocol)


def slots_equal_normal(rank, ranks, protocol):
    """Rows in their slots: sums equal those of normal dispatch and combine bit for bit."""
    import torch.distributed as dist

    buffer = Buffer(dist.group.WORLD, NUM_BYTES, low_latency_mode=True, timeout=20)
    device, experts = buffer.transport.device, EXPERTS_PER_RANK * ranks
    plan = buffer.low_latency(64, HIDDEN, experts, 4, expert_major=False, protocol=protocol)
    for i in range(100):
        counts = [(37 * i + 11 * r) % 65 for r in range(ranks)]
        inputs = Inputs(*make_round(counts, i, 4, EXPERTS_PER_RANK, HIDDEN), experts)
        x, ids, weights = (part[rank].to(device) for part in inputs[:3])
        got, normal = plan.dispatch(x, ids, weights), send(buffer, rank, inputs)
        has_row = got.slot_rows[:, 0] >= 0
        assert bitwise_equal(got.x[has_row], normal[0]) and torch.equal(got.topk_idx[has_row], normal[1])
        y = (got.x.float() * 1.7).bfloat16()
        out = plan.combine(y, ids)
        assert bitwise_equal(out, buffer.combine(y[has_row].contiguous(), normal[4], config=SMALL)[0])
    plan.close()
    buffer.destroy()


@pytest.mark.parametrize("protocol", ["lamport", "flags"])
def test_rows_in_their_slots_equal_those_of_dispatch_and_combine(protocol):
    run(slots_equal_normal, protocol)


def in_graphs(rank, ranks, protocol):
    """Replay a captured pair with new tokens, experts and weights, many times between two looks at the results."""
    import torch.distributed as dist

    buffer, tokens, topk = Buffer(dist.group.WORLD, low_latency_mode=True, timeout=20), 64, 8
    device, experts = buffer.transport.device, EXPERTS_PER_RANK * ranks
    plan = buffer.low_latency(tokens, HIDDEN, experts, topk, protocol=protocol)
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(tokens, topk, dtype=torch.int64, device=device)
    weights = torch.zeros(tokens, topk, device=device)

    def pair():
        return plan.combine(plan.dispatch(x, ids).x, ids, weights)

    pair()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # an odd number: halves alternate from replay to replay
            out = pair()
    for i in range(50):
        torch.manual_seed(100 * i + rank)
        x.copy_(torch.randn(tokens, HIDDEN, device=device))
        ids.copy_(torch.randint(-1, experts, (tokens, topk), device=device))
        weights.copy_(torch.rand(tokens, topk, device=device))
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert bitwise_equal(out, sums_of(ids, weights, x, ranks))
        if i % 10 == 0:
            assert bitwise_equal(pair(), sums_of(ids, weights, x, ranks)), "eager, between replays"
    buffer.check(synchronize=True)
    plan.close()
    buffer.destroy()


@pytest.mark.parametrize("protocol", ["lamport", "flags"])
def test_pairs_in_cuda_graphs(protocol):
    run(in_graphs, protocol)


TIMEOUT_S = 2  # of a wait for the rank that is lost


def prepare_graph(rank, ranks, transport, enable_shrink):
    """Return a buffer, and a captured pair with its tensors; token 0 stays on its rank."""
    buffer = Buffer(transport, low_latency_mode=True, enable_shrink=enable_shrink, timeout=TIMEOUT_S)
    device, experts = buffer.transport.device, EXPERTS_PER_RANK * ranks
    plan = buffer.low_latency(16, HIDDEN, experts, 2)
    x = torch.randn(16, HIDDEN, device=device).bfloat16()
    ids = torch.randint(experts, (16, 2), device=device)
    ids[0] = EXPERTS_PER_RANK * rank
    weights = torch.rand(16, 2, device=device)
    plan.combine(plan.dispatch(x, ids).x, ids, weights)
    torch.cuda.synchronize()
    buffer.transport.gather(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan.combine(plan.dispatch(x, ids).x, ids, weights)
    return buffer, plan, graph, out, (ids, weights, x)


def check_survivor(buffer, out, inputs, ranks):
    """Check that tokens with an expert of rank 1 are NaN, that no other is, and that only rank 1 is masked.

    Returns whether the timeout is an error.
    """
    ids = inputs[0]
    mask = torch.zeros(ranks, dtype=torch.int32, device=out.device)
    buffer.low_latency_query_mask_buffer(mask)
    assert mask.tolist() == [int(r == 1) for r in range(ranks)], mask
    on_lost = (ids // EXPERTS_PER_RANK == 1).any(1)
    assert torch.equal(out.isnan().all(1), on_lost)
    assert bitwise_equal(out[~on_lost], sums_of(*inputs, ranks)[~on_lost])
    try:
        buffer.check()
    except TimeoutError as error:
        assert "from rank 1" in str(error) or "for rank 1" in str(error)
        return True
    return False


def one_exits(rank, ranks, enable_shrink):
    """Rank 1 ends without cleaning up, in the middle of replays; the others go on, or raise, and never hang."""
    import torch.distributed as dist

    buffer, _, graph, out, inputs = prepare_graph(rank, ranks, dist.group.WORLD, enable_shrink)
    if rank == 1:
        for _ in range(100):
            graph.replay()
        os._exit(3)
    for _ in range(300):
        graph.replay()
    torch.cuda.synchronize()
    os._exit(7 if check_survivor(buffer, out, inputs, ranks) else 9)


@pytest.mark.parametrize("enable_shrink", [False, True])
def test_a_rank_that_exits(enable_shrink):
    codes = run_to_exit(one_exits, enable_shrink)
    assert codes == [3 if rank == 1 else (9 if enable_shrink else 7) for rank in range(len(codes))]


def replay_until_lost(buffer, graph, device):
    """Replay until a rank is masked: a GPU executes what a dead process gave it until the driver has ended that.

    The rank's test fails if this takes too long (`helpers.rank_processes.SECONDS`).
    """
    mask = torch.zeros(buffer.group_size, dtype=torch.int32, device=device)
    while not mask.any():
        for _ in range(20):
            graph.replay()
        buffer.low_latency_query_mask_buffer(mask)


def one_is_killed(rank, ranks, make_transport, during_replay, enable_shrink):
    """Rank 0 sends SIGKILL to rank 1, whose GPU replays, or waits; the others must neither hang nor lose their GPU.

    The memory of the dead process stays mapped: the others have stored to it, and may do so until they mask it.
    """
    import torch.distributed as dist

    buffer, plan, graph, out, inputs = prepare_graph(rank, ranks, make_transport(dist.group.WORLD), enable_shrink)
    processes = buffer.transport.gather(os.getpid())
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    buffer.transport.gather(None)
    if rank == 1:
        while True:
            if during_replay:
                graph.replay()
            else:
                time.sleep(1)
    for _ in range(200 if during_replay else 0):
        graph.replay()
    if rank == 0:
        os.kill(processes[1], signal.SIGKILL)
    replay_until_lost(buffer, graph, out.device)
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    raises = check_survivor(buffer, out, inputs, ranks)
    assert torch.equal(torch.ones(5, device=out.device).cumsum(0).cpu(), torch.arange(1.0, 6)), "the GPU computes on"
    plan.close()
    buffer.destroy()
    os._exit(7 if raises else 9)


@pytest.mark.parametrize(
    "make_transport, during_replay, enable_shrink",
    [
        (SymmetricMemory, False, False),
        (SymmetricMemory, True, True),
        (CudaIpc, False, True),
        (CudaIpc, True, False),
        pytest.param(Nvshmem, False, True, marks=needs_nvshmem),
        pytest.param(Nvshmem, True, False, marks=needs_nvshmem),
    ],
)
def test_a_rank_that_is_killed(make_transport, during_replay, enable_shrink):
    codes = run_to_exit(one_is_killed, make_transport, during_replay, enable_shrink)
    assert codes == [-signal.SIGKILL if rank == 1 else (9 if enable_shrink else 7) for rank in range(len(codes))]
