"""Distribution of tokens to channels, and of channels to the warps of sending and receiving CTAs."""

import pytest
import torch
from helpers.expert_parallel import (
    HIDDEN,
    SCALE,
    SMALL,
    bitwise_equal,
    check_combined,
    check_received,
    fails_under_some_seed,
    make_inputs,
    reference_dispatch,
    run,
    send,
    to_device,
)
from numba import cuda, int32

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, Config
from moe_numba.expert_parallel.rings import channels, dispatch
from moe_numba.expert_parallel.rings import config as configurations
from moe_numba.expert_parallel.rings.channels import channel_of, first_token, split_tokens
from moe_numba.expert_parallel.rings.config import max_warps, num_channels, num_senders
from moe_numba.runtime.launch import launch


@cuda.jit
def split_into_channels(first, channel, channels, tokens):
    for c in range(channels + 1):
        first[c] = first_token(int32(c), channels, tokens)
    each, longer = split_tokens(channels, tokens)
    for t in range(tokens):
        channel[t] = channel_of(int32(t), each, longer)


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 8, 30, 720])
def test_every_token_has_a_channel(channels, device):
    for tokens in (0, 1, 2, 7, 8, 9, 128, 721, 4096):
        first = torch.full((channels + 1,), -1, dtype=torch.int32, device=device)
        channel = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        launch(split_into_channels, 1, 1, first, channel, channels, tokens)
        lengths = first.diff()
        assert first[0] == 0 and first[-1] == tokens and (lengths >= 0).all()
        assert channel.tolist() == torch.arange(channels, device=device).repeat_interleave(lengths).tolist()
        used = lengths[lengths > 0]
        assert not tokens or used.max() <= max(4, -(-tokens // channels)) and used.max() - used.min() <= 1
        assert tokens > channels // 4 or lengths.max() <= 1, "few tokens use one channel each"
        assert tokens > channels or (lengths[-(-channels // 4) :] == 0).all(), "few tokens use the first channels"


@pytest.fixture
def four_channels_per_warp(monkeypatch):
    monkeypatch.setattr(Buffer, "_channels_per_warp", 4)


@pytest.mark.parametrize("ranks, seed", [(1, 0), (2, 0), (2, 1), (3, 2), (4, 3)])
def test_several_channels_per_warp(ranks, seed, four_channels_per_warp):
    """Dispatch, dispatch with its handle, and combine twice: each launch starts with the first channel."""
    inputs = make_inputs([(17, 4, 9, 0)[r] * SCALE for r in range(ranks)], seed)
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        given = send(buffer, rank, inputs)
        warps = max_warps(2 * HIDDEN, buffer._runtime.limits)
        assert given[4][1].shape[1] == 4 * num_senders(SMALL.num_sms, ranks) * warps
        check_received(given, right[rank], rank, inputs.experts // ranks)
        again = buffer.dispatch(to_device(buffer.transport.device, inputs.x[rank]), given[4], config=SMALL)
        assert bitwise_equal(again[0], right[rank].x)
        backs = [buffer.combine(again[0], given[4], given[2], config=SMALL)[:2] for _ in range(2)]
        assert bitwise_equal(backs[0], backs[1])
        return backs[0]

    check_combined(run(ranks, work, seed), inputs, right, [r.x for r in right], [r.topk_weights for r in right])


FAULTS = {
    "the channel counters are not reset": (dispatch, "retire_warp"),
    "progress is overwritten before it is published": (channels, "wait_published"),
}


@pytest.mark.skipif(not simulator.ENABLED, reason="only the simulator detects a hang at once")
@pytest.mark.parametrize("name", FAULTS)
def test_wrong_kernels_are_rejected(name, four_channels_per_warp, monkeypatch):
    monkeypatch.setattr(*FAULTS[name], lambda *_: None)
    assert fails_under_some_seed()


def test_few_senders_have_one_channel_per_warp():
    per_warp = [num_channels(sms, 4, 14336) // max_warps(14336) for sms in (16, 20, 24)]
    assert per_warp == [8, 4 * 10, 4 * 10]


def test_number_of_senders():
    assert [num_senders(24, ranks) for ranks in (1, 2, 3, 4, 8)] == [12, 12, 10, 10, 9]
    assert [num_senders(sms, 8) for sms in (2, 8, 18, 20, 132)] == [1, 4, 9, 9, 9]


@pytest.fixture
def two_senders(monkeypatch):
    monkeypatch.setattr(configurations, "_SATURATING_SMS", 1)
    caches = num_senders, configurations.num_channels, configurations.slots_per_ring
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("ranks, seed", [(2, 0), (3, 1), (3, 0), (2, 1)])
def test_fewer_senders_than_receivers(ranks, seed, two_senders):
    """Dispatch and combine, also with fewer SMs than dispatch."""
    config = Config(6, 1, 64) if simulator.ENABLED else Config(24, 6, 256)
    fewer = Config(4, 1, 64) if simulator.ENABLED else Config(12, 6, 256)
    assert num_senders(config.num_sms, ranks) == num_senders(fewer.num_sms, ranks) == 2
    inputs = make_inputs([(7, 4, 9)[r] * SCALE for r in range(ranks)], seed)
    right, generator = reference_dispatch(inputs), torch.Generator().manual_seed(seed)
    y = [torch.randn(len(r.src_idx), HIDDEN, generator=generator).bfloat16() for r in right]

    def work(buffer, rank):
        given = send(buffer, rank, inputs, config, num_worst_tokens=20 * ranks * SCALE if seed else 0)
        check_received(given, right[rank], rank, inputs.experts // ranks, 20 * ranks * SCALE if seed else None)
        rows = y[rank].to(buffer.transport.device)
        x = rows if not seed else torch.cat([rows, rows.new_zeros(20 * ranks * SCALE - len(rows), HIDDEN)])
        backs = [buffer.combine(x, given[4], given[2], config=c)[:2] for c in (config, fewer)]
        assert bitwise_equal(backs[0][0], backs[1][0])
        return backs[0]

    check_combined(run(ranks, work, seed), inputs, right, y, [r.topk_weights for r in right])
