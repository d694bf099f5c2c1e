"""Dispatch and combine over NVSHMEM, one process and one GPU per rank: equal to those over torch's symmetric memory."""

import pytest
import torch
from helpers.expert_parallel import (
    NUM_BYTES,
    SMALL,
    WIDE,
    bitwise_equal,
    check_received,
    make_inputs,
    new_output,
    reference_dispatch,
    send,
)
from helpers.low_latency import EXPERTS_PER_RANK, check_packed, make_round
from helpers.rank_processes import needs_nvshmem, run

from moe_numba.expert_parallel import Buffer, Nvshmem, SymmetricMemory

pytestmark = [pytest.mark.multigpu, needs_nvshmem]
HIDDEN = 1024


def make_buffers(**options):
    """Return one buffer over each transport."""
    import torch.distributed as dist

    return [Buffer(make(dist.group.WORLD), NUM_BYTES, timeout=20, **options) for make in (SymmetricMemory, Nvshmem)]


def memory_as_documented(rank, ranks):
    """Memory is zeroed, also where other memory was freed, and ranks read what their peers have written."""
    import torch.distributed as dist

    transport = Nvshmem(dist.new_group(list(range(ranks))))  # another group of the same ranks
    for i in range(3):
        shared = transport.allocate(1 << 20)
        assert shared.local.shape == (1 << 20,) and not shared.local.any()
        addresses = shared.addresses.tolist()
        assert addresses[rank] == shared.local.data_ptr() and len(set(addresses)) == ranks
        assert not any(address % 128 for address in addresses)
        shared.local.fill_(10 * i + rank)
        torch.cuda.synchronize()
        transport.gather(None)
        for peer, address in enumerate(addresses):
            assert (transport._tensor(address, 1 << 20) == 10 * i + peer).all()
        shared.close()
    with pytest.raises(ValueError, match=r"num_bytes is 4096, 4097"):
        transport.allocate(4096 + rank)


def test_memory():
    run(memory_as_documented)


def one_of_the_ranks(rank, ranks):
    """A group of a part of the ranks is refused, after all ranks have initialised NVSHMEM."""
    import torch.distributed as dist

    Nvshmem(dist.group.WORLD)
    alone = dist.new_group([0])
    if rank == 0:
        with pytest.raises(ValueError, match=f"PE 0 of {ranks}; NVSHMEM is initialised once"):
            Nvshmem(alone)


def test_a_group_of_a_part_of_the_ranks_is_refused():
    run(one_of_the_ranks)


def normal(rank, ranks):
    """Random inputs through rings and to an output, in bfloat16 and FP8."""
    buffers = make_buffers()
    assert isinstance(buffers[1].transport, Nvshmem)
    outs = [[new_output(buffer, 300 * ranks, fp8) for fp8 in (False, True)] for buffer in buffers]
    for i in range(40):
        inputs = make_inputs([(37 * i + 101 * r) % 300 for r in range(ranks)], i, fp8=i % 3 == 0)
        right, config = reference_dispatch(inputs), (SMALL, WIDE)[i % 2]
        sums = []
        for buffer, own in zip(buffers, outs, strict=True):
            given = send(buffer, rank, inputs, config, out=own[i % 3 == 0] if i % 5 < 2 else None)
            check_received(given, right[rank], rank, inputs.experts // ranks)
            y = given[0][0].bfloat16() if i % 3 == 0 else given[0].clone()
            sums.append(buffer.combine(y, given[4], given[2], config=config)[:2])
        assert bitwise_equal(*sums)
    for buffer, own in zip(buffers, outs, strict=True):
        for out in own:
            out.close()
        buffer.destroy()


def test_dispatch_and_combine():
    run(normal)


def low_latency(rank, ranks, protocol, scales):
    buffers = make_buffers(low_latency_mode=True)
    device, experts, topk = buffers[0].transport.device, EXPERTS_PER_RANK * ranks, 8
    options = dict(use_fp8=scales is not None, protocol=protocol)
    plans = [buffer.low_latency(64, HIDDEN, experts, topk, **options) for buffer in buffers]
    for i in range(40):
        world = make_round([(37 * i + 11 * r) % 65 for r in range(ranks)], i, topk, EXPERTS_PER_RANK, HIDDEN)
        x, ids, weights = (part[rank].to(device) for part in world)
        sums = []
        for plan in plans:
            got = plan.dispatch(x, ids)
            rows = got.x if scales is None else (got.x.cpu(), got.scales.cpu())
            check_packed(rows, got.counts.cpu(), (got.src_info, got.layout_range), world, rank, scales)
            y = got.x.bfloat16() if scales else got.x
            sums.append(plan.combine(y, ids, weights))
        assert bitwise_equal(*sums)
    for plan, buffer in zip(plans, buffers, strict=True):
        plan.close()
        buffer.destroy()


@pytest.mark.parametrize("protocol, scales", [("lamport", None), ("lamport", "float32"), ("flags", None)])
def test_low_latency_dispatch_and_combine(protocol, scales):
    run(low_latency, protocol, scales)


def in_graphs(rank, ranks):
    """Replay a captured low-latency pair of each transport."""
    import torch.distributed as dist

    buffers, tokens, topk = make_buffers(low_latency_mode=True), 64, 8
    device, experts = buffers[0].transport.device, EXPERTS_PER_RANK * ranks
    plans = [buffer.low_latency(tokens, HIDDEN, experts, topk) for buffer in buffers]
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(tokens, topk, dtype=torch.int64, device=device)
    weights = torch.zeros(tokens, topk, device=device)
    graphs, sums = [], []
    for plan in plans:
        plan.combine(plan.dispatch(x, ids).x, ids, weights)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sums.append(plan.combine(plan.dispatch(x, ids).x, ids, weights))
        graphs.append(graph)
    for i in range(20):
        torch.manual_seed(100 * i + rank)
        x.copy_(torch.randn(tokens, HIDDEN, device=device))
        ids.copy_(torch.randint(-1, experts, (tokens, topk), device=device))
        weights.copy_(torch.rand(tokens, topk, device=device))
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        assert bitwise_equal(*sums) and sums[0].any()
    for plan, buffer in zip(plans, buffers, strict=True):
        buffer.check(synchronize=True)
        plan.close()
        buffer.destroy()


def test_pairs_in_cuda_graphs():
    run(in_graphs)
