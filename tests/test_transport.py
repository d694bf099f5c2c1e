"""The transports: what ranks of one process, and ranks of several processes, have of one another."""

import os
import socket

import pytest
import torch
from test_buffer import NUM_BYTES, SMALL, WIDE, check_combined, check_received, make_world, right_of, send, to

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.transport import CudaIpc, LocalGroup, SymmetricMemory


def test_gather_gives_everybodys_value_in_order():
    given = LocalGroup(3).run(lambda t: [t.gather(10 * i + t.rank) for i in range(3)])
    assert given == [[[0, 1, 2], [10, 11, 12], [20, 21, 22]]] * 3


def test_results_come_in_the_order_of_the_ranks():
    assert LocalGroup(4).run(lambda t: (t.rank, t.num_ranks)) == [(rank, 4) for rank in range(4)]


def test_memory_is_zeroed_and_everybody_knows_where_it_is():
    def work(transport):
        shared = transport.allocate(4096)
        assert shared.local.dtype == torch.uint8 and shared.local.shape == (4096,) and not shared.local.any()
        addresses = shared.addresses.tolist()
        assert addresses[transport.rank] == shared.local.data_ptr() and len(set(addresses)) == 3
        shared.close()
        shared.close()  # a second time does nothing
        return addresses

    given = LocalGroup(3).run(work)
    assert given[0] == given[1] == given[2]


def test_the_error_of_a_rank_is_raised():
    def work(transport):
        if transport.rank == 1:
            raise KeyError("rank 1's own")
        transport.gather(None)

    with pytest.raises(KeyError, match="rank 1's own"):
        LocalGroup(3).run(work)


@pytest.mark.skipif(not simulator.ENABLED, reason="threads wait longer")
def test_who_waits_for_nobody_is_told_so():
    with pytest.raises(TimeoutError, match="rank 0 waits for the others"):
        LocalGroup(2).run(lambda t: t.gather(None) if t.rank == 0 else None)
    assert LocalGroup(2).run(lambda t: t.wait(lambda: False, 0.1)) == [False, False]


@pytest.mark.skipif(simulator.ENABLED, reason="in the simulator there are no GPUs")
def test_as_many_devices_as_ranks():
    with pytest.raises(ValueError, match="devices has 1 entries"):
        LocalGroup(2, devices=[0])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def work_of_a_process(rank, ranks, kind, port, rounds):
    """Dispatch and combine random worlds; every process knows all of them, and checks what it gets."""
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    group = {"symmetric": lambda: dist.group.WORLD, "ipc": lambda: CudaIpc(dist.group.WORLD)}[kind]()
    buffers = [Buffer(group, NUM_BYTES, timeout=20) for _ in range(2)]
    assert isinstance(buffers[0].transport, SymmetricMemory if kind == "symmetric" else CudaIpc)
    generator = torch.Generator().manual_seed(5)
    for i in range(rounds):
        most = int(torch.randint(1, 300, (), generator=generator))
        tokens = torch.randint(0, most + 1, (ranks,), generator=generator).tolist()
        world = make_world(tokens, i, fp8=i % 3 == 0)
        right, config, buffer = right_of(world), (SMALL, WIDE)[i % 2], buffers[i // 2 % 2]
        given = send(buffer, rank, world, config)
        check_received(given, right[rank], rank, world.experts // ranks)
        y = [torch.randn(len(r.src_idx), 64, generator=generator).bfloat16() for r in right]
        back = buffer.combine(to(buffer.transport.device, y[rank]), given[4], given[2], config=config)[:2]
        everybodys = [None] * ranks
        dist.all_gather_object(everybodys, tuple(part.cpu() for part in back))
        check_combined(everybodys, world, right, y, [r.topk_weights for r in right])
    for buffer in buffers:
        buffer.destroy()
    dist.destroy_process_group()


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", ["symmetric", "ipc"])
def test_processes(kind):
    """Random worlds, two buffers by turns, on all GPUs."""
    ranks = min(8, torch.cuda.device_count())
    torch.multiprocessing.spawn(work_of_a_process, (ranks, kind, free_port(), 40), nprocs=ranks)
