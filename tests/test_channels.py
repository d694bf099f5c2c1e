"""How channels are dealt out: to few blocks that send and more that receive, each to one warp."""

import pytest
import torch
from numba import cuda, int32
from test_buffer import HIDDEN, SCALE, check_combined, check_received, make_world, right_of, run, same, send

from moe_numba import simulator
from moe_numba.expert_parallel import Config
from moe_numba.expert_parallel import config as configurations
from moe_numba.expert_parallel.config import senders_of
from moe_numba.expert_parallel.rings import part_of_block
from moe_numba.launch import launch


@cuda.jit
def parts(out, senders, channels, warps):
    receives, first, count = part_of_block(senders, channels, warps)
    block = int32(cuda.blockIdx.x)
    out[3 * block], out[3 * block + 1], out[3 * block + 2] = int32(1 if receives else 0), first, count


@pytest.mark.parametrize("blocks, senders, channels, warps", [
    (2, 1, 15, 15), (4, 2, 30, 15), (24, 12, 180, 15), (24, 10, 150, 15), (24, 9, 133, 15), (132, 12, 180, 15),
    (7, 2, 3, 2),
])  # fmt: skip
def test_every_channel_has_one_sender_and_one_receiver(blocks, senders, channels, warps, device):
    out = torch.full((3 * blocks,), -1, dtype=torch.int32, device=device)
    launch(parts, blocks, 1, out, senders, channels, warps)
    found = {0: [], 1: []}
    for receives, first, count in out.view(-1, 3).tolist():
        assert 0 <= count <= warps
        found[receives] += range(first, first + count)
    assert found[0] == found[1] == list(range(channels))


def test_as_many_send_as_fill_the_link():
    assert [senders_of(24, ranks) for ranks in (1, 2, 3, 4, 8)] == [12, 12, 10, 10, 9]
    assert [senders_of(sms, 8) for sms in (2, 8, 18, 20, 132)] == [1, 4, 9, 9, 9]


@pytest.fixture
def two_senders(monkeypatch):
    monkeypatch.setattr(configurations, "_FILL_THE_LINK", 1)
    senders_of.cache_clear()
    yield
    senders_of.cache_clear()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_fewer_senders_than_receivers(ranks, seed, two_senders):
    """There and back, twice with one handle; combine also with fewer multiprocessors."""
    config = Config(6, 1, 64) if simulator.ENABLED else Config(24, 6, 256)
    fewer = Config(4, 1, 64) if simulator.ENABLED else Config(12, 6, 256)
    assert senders_of(config.num_sms, ranks) == senders_of(fewer.num_sms, ranks) == 2
    world = make_world([(7, 4, 9)[r] * SCALE for r in range(ranks)], seed)
    right, generator = right_of(world), torch.Generator().manual_seed(seed)
    y = [torch.randn(len(r.src_idx), HIDDEN, generator=generator).bfloat16() for r in right]

    def work(buffer, rank):
        given = send(buffer, rank, world, config, num_worst_tokens=20 * ranks * SCALE if seed else 0)
        check_received(given, right[rank], rank, world.experts // ranks, 20 * ranks * SCALE if seed else None)
        here = y[rank].to(buffer.transport.device)
        x = here if not seed else torch.cat([here, here.new_zeros(20 * ranks * SCALE - len(here), HIDDEN)])
        backs = [buffer.combine(x, given[4], given[2], config=c)[:2] for c in (config, fewer)]
        assert same(backs[0][0], backs[1][0])
        return backs[0]

    check_combined(run(ranks, work, seed), world, right, y, [r.topk_weights for r in right])
