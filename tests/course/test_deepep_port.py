"""Our port of DeepEP's dispatch and combine: several ranks in the simulator, under many seeds and weak memory."""

import contextlib
import random
from typing import NamedTuple

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.deepep_port import combine, dispatch, launch, simulate
from moe_numba.course.deepep_port.buffer_layout import (
    ALIGNMENT,
    DeepEPConfig,
    combine_offsets,
    dispatch_offsets,
    min_buffer_bytes,
    min_ring_slots,
)
from moe_numba.course.deepep_port.polling import make_copy_row
from moe_numba.course.deepep_port.simulate import RankTimeoutError, combine_all, dispatch_all, notify_all, virtual_ranks
from moe_numba.expert_parallel import reference

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="these ranks are simulated: set MOE_NUMBA_SIMULATE=1")

CHANNELS, TOPK, EXPERTS_OF_RANK = 2, 2, 2
FP8 = torch.float8_e4m3fn


class Inputs(NamedTuple):
    """The inputs of all ranks."""

    x: list
    topk_idx: list
    topk_weights: list
    is_token_in_rank: list
    experts: int

    @property
    def num_tokens(self):
        return [len(chosen) for chosen in self.is_token_in_rank]


def make_inputs(num_tokens, seed=0, hidden=16, fp8=False, only=None, everywhere=False):
    """Draw random tokens and experts, some of them -1; on rank ``only``; or ``everywhere``, one of each rank."""
    ranks, generator = len(num_tokens), torch.Generator().manual_seed(seed)
    experts = ranks * EXPERTS_OF_RANK
    low, high = (0, experts) if only is None else (only * EXPERTS_OF_RANK, (only + 1) * EXPERTS_OF_RANK)
    topk = ranks if everywhere else TOPK
    x, topk_idx, topk_weights = [], [], []
    for tokens in num_tokens:
        values = torch.randn(tokens, hidden, generator=generator)
        # Column-major scales, as the grouped GEMM reads them.
        scales = torch.rand(hidden // 8, tokens, generator=generator).T
        x.append((values.to(FP8), scales) if fp8 else values.bfloat16())
        chosen = torch.randint(low, high, (tokens, topk), generator=generator)
        chosen = chosen.where(torch.rand(tokens, topk, generator=generator) > 0.2, -1)
        topk_idx.append(torch.arange(ranks).repeat(tokens, 1) * EXPERTS_OF_RANK if everywhere else chosen)
        topk_weights.append(torch.rand(tokens, topk, generator=generator))
    is_token_in_rank = [reference.dispatch_layout(chosen, ranks, experts)[2] for chosen in topk_idx]
    return Inputs(x, topk_idx, topk_weights, is_token_in_rank, experts)


def make_config(inputs, ring=5, chunk=2, channels=CHANNELS, warps=None, with_experts=True, fault=""):
    """Make the config of a dispatch of these inputs: small rings, which wrap around."""
    ranks, first = len(inputs.x), inputs.x[0]
    values, scales = first if isinstance(first, tuple) else (first, torch.empty(0, 0))
    topk = inputs.topk_idx[0].shape[1] if with_experts else 0
    warps = warps or (1 if ranks > 2 else 2)
    row_bytes = values.shape[1] * values.element_size()
    return DeepEPConfig(
        ranks, channels, ring, chunk, row_bytes, topk, scales.shape[1], inputs.experts, warps, fault=fault
    )


def make_combine_config(c, hidden=16, biases=0, **changes):
    c = c._replace(row_bytes=2 * hidden, scales=0, biases=biases, fault="", **changes)
    return c if "ring" in changes else c._replace(ring=min_ring_slots(c))


@contextlib.contextmanager
def world(seed, *configs, timeout_ns=0):
    with virtual_ranks(configs[0].ranks, min_buffer_bytes(*configs), timeout_ns) as ranks:
        with simulator.seed(seed), simulator.weak_memory():
            yield ranks


def bits(tensor):
    """View as bytes, so that a NaN equals itself."""
    return tensor.flatten().view(torch.uint8)


def differences(got, inputs, with_experts=True):
    """Return the results of a dispatch that differ from the reference."""
    experts = (inputs.topk_idx, inputs.topk_weights, inputs.experts) if with_experts else ()
    found = []
    for rank, (result, want) in enumerate(zip(got, reference.dispatch(inputs.x, inputs.is_token_in_rank, *experts))):
        recv_x, topk_idx, topk_weights, handle = result
        pairs = {"src_idx": (handle.recv_src_idx, want.src_idx)}
        pairs["rank_prefix"] = handle.rank_prefix_matrix, want.rank_prefix_matrix
        if isinstance(want.x, tuple):
            pairs |= {"x": (recv_x[0], want.x[0]), "scales": (recv_x[1], want.x[1])}
        else:
            pairs["x"] = recv_x, want.x
        if with_experts:
            pairs |= {"topk_idx": (topk_idx, want.topk_idx), "topk_weights": (topk_weights, want.topk_weights)}
        for name, (a, b) in pairs.items():
            if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(bits(a), bits(b)):
                found.append(f"{name} of rank {rank}")
    return found


def expected_sums(y, received, inputs, biases=None):
    """Yield combine's sums, bit for bit: biases, then rows in rank order, in float32, rounded once."""
    for rank, tokens in enumerate(inputs.num_tokens):
        total = torch.zeros(tokens, y[rank].shape[1])
        for bias in biases[rank] if biases else ():
            total += bias.float()
        for peer, at_peer in enumerate(received):
            first = int(at_peer.rank_prefix_matrix[rank - 1, peer]) if rank else 0
            rows = slice(first, int(at_peer.rank_prefix_matrix[rank, peer]))
            total[at_peer.src_idx[rows].long()] += y[peer][rows].float()
        yield total.bfloat16()


def combine_differences(got, y, inputs, weights=None, biases=None):
    """Return the results of a combine that differ from the reference."""
    received, found = reference.dispatch(inputs.x, inputs.is_token_in_rank), []
    wanted = reference.combine(y, received, inputs.num_tokens, weights, biases)
    exact = expected_sums(y, received, inputs, biases)
    for rank, ((out, out_weights), (total, total_weights), sums) in enumerate(zip(got, wanted, exact)):
        if not torch.allclose(out.double(), total, rtol=2**-8, atol=1e-5) or not torch.equal(bits(out), bits(sums)):
            found.append(f"rows of rank {rank}")
        if weights is not None and not torch.allclose(out_weights.double(), total_weights, rtol=1e-6, atol=1e-12):
            found.append(f"weights of rank {rank}")
    return found


def dispatch_and_combine(inputs, c, back, seed):
    """Run a dispatch and a combine; return what is wrong."""
    with world(seed, c, back) as ranks:
        got = dispatch_all(ranks, c, inputs.x, inputs.is_token_in_rank, inputs.topk_idx, inputs.topk_weights)
        if found := differences(got, inputs):
            return found
        y, weights = [2 * g[0] for g in got], [g[2] for g in got]
        out = combine_all(ranks, back, y, [g[3] for g in got], weights)
        return combine_differences(out, y, inputs, weights)


# right results


@pytest.mark.parametrize("num_tokens", [[13], [13, 6], [5, 0, 17], [5, 12, 9, 3]], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_dispatch_and_combine(num_tokens, seed):
    inputs = make_inputs(num_tokens, seed)
    c = make_config(inputs, ring=2)
    assert any(tokens % CHANNELS for tokens in num_tokens), "a channel has fewer tokens than the others"
    assert max(chosen.sum(dim=0).max() for chosen in inputs.is_token_in_rank) > CHANNELS * c.ring, "rings wrap around"
    assert any((chosen == -1).any() for chosen in inputs.topk_idx)
    assert dispatch_and_combine(inputs, c, make_combine_config(c), seed) == []


@pytest.mark.parametrize("num_tokens, only", [([11, 7], 1), ([0, 0], None), ([0, 9], 0), ([6, 0, 5], 1)])
def test_skewed_and_empty_ranks(num_tokens, only):
    inputs = make_inputs(num_tokens, only=only)
    c = make_config(inputs)
    assert dispatch_and_combine(inputs, c, make_combine_config(c), seed=5) == []


@pytest.mark.parametrize("channels, chunk, ring, warps", [(1, 3, 3, 1), (3, 1, 1, 2), (1, 5, 8, 3)])
def test_other_channels_chunks_and_rings(channels, chunk, ring, warps):
    inputs = make_inputs([10, 7], seed=1)
    c = make_config(inputs, ring, chunk, channels, warps)
    assert dispatch_and_combine(inputs, c, make_combine_config(c), seed=1) == []


@pytest.mark.parametrize("seed", range(6))
def test_random_inputs(seed):
    draw = random.Random(seed)
    ranks = draw.choice((1, 2, 3))
    inputs = make_inputs([draw.randrange(14) for _ in range(ranks)], seed, everywhere=draw.random() < 0.5)
    chunk = draw.randint(1, 4)
    c = make_config(inputs, chunk + draw.randrange(3), chunk, draw.randint(1, 3), draw.randint(1 + (ranks == 1), 2))
    assert dispatch_and_combine(inputs, c, make_combine_config(c), seed) == []


@pytest.mark.parametrize("hidden", [32, 560])
def test_fp8_with_column_major_scales_and_without_experts(hidden):
    """560 bytes and 70 scales are more than one iteration of a warp, and no multiple of it."""
    inputs = make_inputs([7, 4], seed=2, hidden=hidden, fp8=True)
    c = make_config(inputs, with_experts=False)
    assert inputs.x[0][1].stride() == (1, 7) and c.row_bytes == hidden
    with world(0, c) as ranks:
        got = dispatch_all(ranks, c, inputs.x, inputs.is_token_in_rank)
        assert differences(got, inputs, with_experts=False) == []
        assert got[0][1].numel() == got[0][2].numel() == 0


@pytest.mark.parametrize("hidden", [24, 1032])
def test_wide_rows(hidden):
    """1032 bf16 are more than one unrolled iteration of copy_row, and no multiple of it."""
    inputs = make_inputs([3, 4], seed=3, hidden=hidden)
    c = make_config(inputs)
    assert dispatch_and_combine(inputs, c, make_combine_config(c, hidden), seed=2) == []


@pytest.mark.parametrize("biases", [0, 1, 2])
@pytest.mark.parametrize("with_weights", [True, False])
def test_biases_are_added_first_and_the_sum_is_rounded_once(biases, with_weights):
    inputs = make_inputs([5, 8], seed=4, everywhere=True)
    inputs.is_token_in_rank[0][2], inputs.topk_idx[0][2] = False, -1  # a token that is sent to no rank
    c = make_config(inputs)
    back = make_combine_config(c, biases=biases, topk=c.topk * with_weights)
    given = [tuple(torch.randn(len(x), 16).bfloat16() for _ in range(biases)) for x in inputs.x]
    with world(biases, c, back) as ranks:
        got = dispatch_all(ranks, c, inputs.x, inputs.is_token_in_rank, inputs.topk_idx, inputs.topk_weights)
        # Magnitudes so different that another order, or a second rounding, changes the result.
        y = [(torch.randn_like(g[0].float()) * 10.0 ** (2 * r)).bfloat16() for r, g in enumerate(got)]
        weights = [g[2] for g in got] if with_weights else None
        out = combine_all(ranks, back, y, [g[3] for g in got], weights, given)
        assert combine_differences(out, y, inputs, weights, given) == []
        if not biases:
            assert not out[0][0][2].any()


def test_a_handle_can_be_reused():
    inputs = make_inputs([8, 5], seed=6)
    c = make_config(inputs, with_experts=False)
    back = make_combine_config(c)
    with world(3, c, back) as ranks:
        first = dispatch_all(ranks, c, inputs.x, inputs.is_token_in_rank)
        handles = [g[3] for g in first]
        for i in range(2):
            other = inputs._replace(x=[(x * (i + 2)).bfloat16() for x in inputs.x])
            got = dispatch_all(ranks, c, other.x, inputs.is_token_in_rank, handles=handles)
            assert differences(got, other, with_experts=False) == []
            y = [g[0] for g in got]
            for _ in range(2):  # the second run replaces the entries of send_head again
                assert combine_differences(combine_all(ranks, back, y, [g[3] for g in got]), y, inputs) == []
        for r in ranks:
            assert not r.status.any()


def test_contents_of_a_handle():
    inputs = make_inputs([9, 4], seed=7)
    c = make_config(inputs)
    with world(0, c) as ranks:
        noted = notify_all(ranks, c, inputs.is_token_in_rank, inputs.topk_idx, expert_alignment=4)
        got = dispatch_all(ranks, c, inputs.x, inputs.is_token_in_rank, inputs.topk_idx, inputs.topk_weights)
    layouts = [reference.dispatch_layout(chosen, 2, inputs.experts) for chosen in inputs.topk_idx]
    per_expert = sum(layout[1] for layout in layouts)
    for rank, (rank_prefix, channel_prefix, counter, expert_counter) in enumerate(noted):
        assert int(counter) == rank_prefix[-1, rank] == sum(layout[0][rank] for layout in layouts)
        own = per_expert[rank * EXPERTS_OF_RANK : (rank + 1) * EXPERTS_OF_RANK]
        assert expert_counter.tolist() == [-(-int(count) // 4) * 4 for count in own]
        chosen, handle = inputs.is_token_in_rank[rank], got[rank][3]
        share = -(-len(chosen) // CHANNELS)
        parts = [chosen[i * share : (i + 1) * share].int() for i in range(CHANNELS)]
        sent = torch.stack([part.sum(dim=0) for part in parts]).T
        assert channel_prefix.tolist() == sent.cumsum(dim=1).tolist() == handle.channel_prefix_matrix.tolist()
        places = torch.cat([(part.cumsum(dim=0) - 1).where(part > 0, -1) for part in parts])
        assert handle.send_head.tolist() == places.tolist()
        for other in range(2):
            prefix = got[other][3].channel_prefix_matrix[rank].tolist()
            assert handle.recv_channel_prefix_matrix[other].tolist() == [0, *prefix[:-1]]


def test_cached_notify_combine_fills_send_head():
    inputs = make_inputs([70, 3], seed=8)  # more than 32 tokens per channel
    c = make_combine_config(make_config(inputs))
    heads = torch.where(torch.rand(70, 2, generator=torch.Generator().manual_seed(0)) < 0.1, 1, -1)
    heads = torch.where(heads > 0, torch.arange(70)[:, None] % 35 // 2, -1).to(torch.int32)
    heads[40:, 1] = -1
    wanted = heads.clone()
    for channel in range(CHANNELS):
        for rank in range(2):
            following = 1 << 25
            for token in reversed(range(35 * channel, 35 * (channel + 1))):
                if heads[token, rank] < 0:
                    wanted[token, rank] = -following - 1
                else:
                    following = int(heads[token, rank])
    empty = torch.empty(0, 2, dtype=torch.int32)
    with world(0, c) as ranks:
        for _ in range(2):
            given = launch.Handle(*[None] * 5, heads), launch.Handle(*[None] * 5, empty)
            simulate.on_all(ranks, lambda r: launch.cached_notify_combine(r, c, given[r.rank]))  # noqa: B023
            assert heads.tolist() == wanted.tolist()


# wrong kernels


def fails(inputs, c, back, seeds):
    """Return whether a fault leads to a wrong result under one of the seeds."""
    return any(dispatch_and_combine(inputs, c, back, seed) for seed in seeds)


@pytest.mark.parametrize("fault", dispatch.FAULTS)
def test_a_faulty_dispatch_fails_under_some_seed(fault):
    inputs = make_inputs([12, 9], seed=9, everywhere=True)
    c = make_config(inputs, ring=2, channels=1, fault=fault)
    assert fails(inputs, c, make_combine_config(c), range(12))


@pytest.mark.parametrize("fault", [fault for fault in combine.FAULTS if fault != "short ring"])
def test_a_faulty_combine_fails_under_some_seed(fault):
    inputs = make_inputs([12, 9], seed=9, everywhere=True)
    c = make_config(inputs, ring=3, channels=1)
    back = make_combine_config(c)._replace(fault=fault)
    assert fails(inputs, c, back, range(12))


def test_missing_notify_fails():
    inputs = make_inputs([8, 5], seed=6)
    c = make_config(inputs, with_experts=False)
    other = inputs._replace(x=[2 * x for x in inputs.x])
    with world(3, c) as ranks:
        handles = [g[3] for g in dispatch_all(ranks, c, inputs.x, inputs.is_token_in_rank)]

        def again(r):
            h = handles[r.rank]
            known = h.rank_prefix_matrix, h.channel_prefix_matrix, len(h.recv_src_idx)
            return launch.dispatch(r, c, other.x[r.rank], inputs.is_token_in_rank[r.rank], *known)

        assert differences(simulate.on_all(ranks, again), other, with_experts=False)


def test_a_ring_with_one_slot_too_few_deadlocks_under_some_seed():
    inputs = make_inputs([9, 9], seed=9, everywhere=True)
    c = make_config(inputs, channels=1)
    enough = make_combine_config(c)
    reducers = enough.warps * enough.ranks - 1
    assert enough.ring == enough.chunk + reducers - 1 and reducers == 3
    short = enough._replace(ring=enough.ring - 1, fault="short ring")
    assert short.ring > short.chunk, "DeepEP accepts it"
    with pytest.raises(simulator.Deadlock, match="polls in vain(.|\n)*at send_back, combine.py"):
        for seed in range(20):
            assert dispatch_and_combine(inputs, c, short, seed) == []
    for seed in range(6):
        assert dispatch_and_combine(inputs, c, enough, seed) == []


def test_rings_that_may_deadlock_are_refused():
    inputs = make_inputs([3, 3])
    c = make_config(inputs)
    with world(0, c) as ranks:
        with pytest.raises(ValueError, match="ring is 1; it must be 2 or more"):
            dispatch_all(ranks, c._replace(ring=1), inputs.x, inputs.is_token_in_rank)
        with pytest.raises(ValueError, match="ring is 3; it must be 4 or more"):
            combine_all(ranks, c._replace(ring=3), inputs.x, [None, None])
        with pytest.raises(ValueError, match="fault is 'plain head'"):
            dispatch_all(ranks, c._replace(fault="plain head"), inputs.x, inputs.is_token_in_rank)


@pytest.mark.parametrize("part", ["x", "order", "src_idx", "topk_idx", "topk_weights", "nan"])
def test_the_checker_rejects_wrong_results(part):
    inputs = make_inputs([6, 5], seed=10)
    wanted = reference.dispatch(inputs.x, inputs.is_token_in_rank, *inputs[1:3], inputs.experts)

    def as_got(want):
        handle = launch.Handle(want.rank_prefix_matrix, None, None, want.src_idx.clone(), None, None)
        return want.x.clone(), want.topk_idx.clone(), want.topk_weights.clone(), handle

    got = [as_got(want) for want in wanted]
    assert differences(got, inputs) == []
    x, topk_idx, topk_weights, handle = got[1]
    if part == "x":
        x.view(torch.int16)[2, 3] ^= 1
    elif part == "order":
        x[[0, 1]] = x[[1, 0]]
    elif part == "src_idx":
        handle.recv_src_idx[0] += 1
    elif part == "topk_idx":
        topk_idx[0, 0] += 1
    elif part == "topk_weights":
        topk_weights[0, 0] += 0.5
    elif part == "nan":
        x[1, 1] = float("nan")
    assert len(differences(got, inputs)) == 1 and "rank 1" in differences(got, inputs)[0]


def test_the_checker_rejects_wrong_sums():
    inputs = make_inputs([6, 5], seed=10)
    received = reference.dispatch(inputs.x, inputs.is_token_in_rank, *inputs[1:3], inputs.experts)
    y, weights = [r.x for r in received], [r.topk_weights for r in received]
    sums = list(expected_sums(y, received, inputs))
    totals = [w for _, w in reference.combine(y, received, inputs.num_tokens, weights)]

    def found(change):
        out, out_weights = [s.clone() for s in sums], [t.float() for t in totals]
        change(out, out_weights)
        return combine_differences(list(zip(out, out_weights)), y, inputs, weights)

    def one_bit(out, _):
        out[1].view(torch.int16)[0, 0] ^= 1

    def unwritten(out, _):
        out[0][2, 3] = float("nan")

    def weight(_, out_weights):
        out_weights[0][0, 0] += 0.1

    assert found(lambda *_: None) == []
    assert found(one_bit) == ["rows of rank 1"]
    assert found(unwritten) == ["rows of rank 0"] and found(weight) == ["weights of rank 0"]


# timeouts


def alone(ranks, start):
    """Launch on rank 0 only; return the error message."""
    with pytest.raises(RankTimeoutError) as error:
        simulate.on_all(ranks[:1], start)
    assert ranks[0].status[6] > 0
    return str(error.value)


TIMEOUT_NS = 1_000_000  # a thousand steps of the simulator


def test_a_wait_for_a_missing_rank_times_out_and_names_it():
    inputs = make_inputs([9, 9], seed=11, everywhere=True)
    c = make_config(inputs, channels=1)
    back = make_combine_config(c)
    with world(0, c, back) as ranks:
        got = dispatch_all(ranks, c, inputs.x, inputs.is_token_in_rank, inputs.topk_idx, inputs.topk_weights)
        handles = [g[3] for g in got]
        simulate.on_all(ranks, lambda r: launch.cached_notify_combine(r, back, handles[r.rank]))
        with_timeout = [r._replace(timeout_ns=TIMEOUT_NS, status=torch.zeros_like(r.status)) for r in ranks]
        y = [g[0] for g in got]
        message = alone(with_timeout, lambda r: launch.combine(r, back, y[0], handles[0], got[0][2]))
        assert "rank 0 timed out waiting for rank 1: " in message and "(channel 0, head" in message
    with world(0, c, back) as ranks:
        known = [(m[0], m[1], int(m[2])) for m in notify_all(ranks, c, inputs.is_token_in_rank)]
        with_timeout = [r._replace(timeout_ns=TIMEOUT_NS) for r in ranks]
        arguments = inputs.x[0], inputs.is_token_in_rank[0], *known[0], inputs.topk_idx[0], inputs.topk_weights[0]
        message = alone(with_timeout, lambda r: launch.dispatch(r, c, *arguments))
        assert "rank 0 timed out waiting for rank 1: the sender" in message
    with world(0, c, timeout_ns=TIMEOUT_NS) as ranks:
        matrix = torch.zeros(2, 2, dtype=torch.int32)
        message = alone(ranks, lambda r: launch.cached_notify_dispatch(r, c, matrix))
        assert "rank 0 timed out waiting for rank 1: the rank did not reach the barrier" in message
        assert "head 1024" in message and "channel" not in message


def test_a_timeout_does_not_affect_ranks_that_arrive():
    inputs = make_inputs([6, 5], seed=12)
    c = make_config(inputs)
    with world(0, c, timeout_ns=10**12) as ranks:
        got = dispatch_all(ranks, c, inputs.x, inputs.is_token_in_rank, inputs.topk_idx, inputs.topk_weights)
        assert differences(got, inputs) == []


# buffer layout


@pytest.mark.parametrize("ranks", range(1, 9))
def test_sections_are_aligned_and_do_not_overlap(ranks):
    c = DeepEPConfig(ranks, channels=3, ring=7, row_bytes=48, topk=3, scales=5, experts=8 * ranks)
    rows = c.ring * c.channels * ranks
    at = dispatch_offsets(c)
    queues = [4 * 3 * ranks] * 4
    sizes = [4 * ranks**2, *queues, 48 * rows, 4 * rows, 24 * rows, 12 * rows, 20 * rows]
    for start, size, end in zip(at[:-1], sizes, at[1:], strict=True):
        assert start % ALIGNMENT == 0 and start + size <= end < start + size + ALIGNMENT
    at = combine_offsets(c)
    for start, size, end in zip(at[:-1], [*queues[:2], 48 * rows, 4 * rows, 12 * rows], at[1:], strict=True):
        assert start % ALIGNMENT == 0 and start + size <= end < start + size + ALIGNMENT


def test_buffer_size_of_deepeps_default_config():
    assert round(min_buffer_bytes(DeepEPConfig(8)) / 1e6) == 355
    assert min_buffer_bytes(DeepEPConfig(1, 1, 1, 1, 16, 0, experts=4096)) == 128 + 4 * 4096


def test_rows_are_whole_vectors():
    with pytest.raises(ValueError, match="row_bytes is 100; it must be a multiple of 16"):
        make_copy_row(100, None)
