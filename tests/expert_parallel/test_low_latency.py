"""Low-latency dispatch and combine between the ranks of one process, in the simulator or on GPUs, against torch."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from helpers.expert_parallel import SMALL, Inputs, bitwise_equal, fails_under_some_seed, refused, send
from helpers.low_latency import (
    FP8_HIDDEN,
    HIDDEN,
    SHORT_TIMEOUT,
    SMS,
    check_packed,
    check_weighted_sums,
    experts_result,
    fma,
    in_fp8,
    make_round,
    run,
    synchronize,
)
from helpers.wrong_kernels import changed_maker

from moe_numba import prepare, simulator
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.low_latency import combine as low_latency_combine
from moe_numba.expert_parallel.low_latency import config as low_latency_config
from moe_numba.expert_parallel.low_latency import dispatch as low_latency_dispatch
from moe_numba.expert_parallel.low_latency import protocol as low_latency_protocol
from moe_numba.expert_parallel.low_latency import quantize as low_latency_quantize
from moe_numba.expert_parallel.low_latency.config import make_shape

PROTOCOLS = ["lamport", "flags"]
DEFAULT_PARTS = low_latency_config.default_parts
TOKENS = 4 if simulator.ENABLED else 64
SEVERAL_WARPS = 1024  # elements of a row, each part of which takes several warps
simulated = pytest.mark.skipif(not simulator.ENABLED, reason="needs the simulator's weak memory")


def counts_of(ranks, i):
    """The tokens of each rank in round i: some ranks have none, some as many as are allowed."""
    return [(TOKENS - 1, TOKENS, 0, 1)[(rank + i) % 4] for rank in range(ranks)]


def on_device(buffer, tensors):
    return [tensor.to(buffer.transport.device) for tensor in tensors]


def exchange_packed(buffer, rank, plan, inputs, fp8_sums=False):
    """One dispatch and combine with rows packed by expert; check both."""
    x, ids, weights = on_device(buffer, [part[rank] for part in inputs])
    got = plan.dispatch(x, ids)
    synchronize(buffer)
    check_packed(got.x, got.counts.cpu(), (got.src_info, got.layout_range), inputs, rank)
    y = experts_result(got.x, got.counts)
    out = plan.combine(y, ids, weights)
    synchronize(buffer)
    check_weighted_sums(out.cpu(), buffer.transport.gather(y.cpu()), inputs, rank, len(got.counts), fp8_sums)


@pytest.fixture(autouse=True)
def two_parts(monkeypatch):
    """Two CTAs share a row. By default they would be seven, most of them without a vector of these short rows."""
    if simulator.ENABLED:
        monkeypatch.setattr(low_latency_config, "default_parts", lambda max_tokens: 2)


@pytest.fixture(params=[1, 3], ids=lambda parts: f"{parts} parts")
def parts(request, monkeypatch):
    """CTAs that share a row."""
    monkeypatch.setattr(low_latency_config, "default_parts", lambda max_tokens: request.param)


@pytest.mark.parametrize("ranks, seed", [(1, 0), (2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_rows_packed_by_expert(ranks, seed, protocol):
    """Other tokens, experts and weights in every round."""

    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, HIDDEN, 2 * ranks, 2, protocol=protocol, num_sms=SMS)
        for i in range(3):
            exchange_packed(buffer, rank, plan, make_round(counts_of(ranks, i), 10 * seed + i))
        buffer.check()
        plan.close()

    run(ranks, work, seed)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_more_ctas_than_vectors_of_a_row(protocol, monkeypatch):
    """The default number of CTAs that share a row does not depend on its length."""
    monkeypatch.setattr(low_latency_config, "default_parts", DEFAULT_PARTS)
    test_rows_packed_by_expert(2, 0, protocol)


@pytest.mark.parametrize("ranks, seed", [(1, 0), (2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sums_in_fp8(ranks, seed, protocol):
    """The other ranks' sums are rounded to FP8, bit for bit as torch does, and deviate as little as is promised."""

    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, 384, 2 * ranks, 2, protocol=protocol, num_sms=SMS, use_fp8_combine=True)
        for i in range(2):
            exchange_packed(buffer, rank, plan, make_round(counts_of(ranks, i), 10 * seed + i, hidden=384), True)
        buffer.check()
        plan.close()

    run(ranks, work, seed)


@pytest.mark.parametrize("hook", [False, True])
def test_deepeps_call_with_sums_in_fp8(hook):
    """A phase that only sends has no other place for its own sums than a slot, so they are rounded to FP8, too."""

    def work(buffer, rank):
        inputs = make_round(counts_of(2, 1), 5, hidden=256)
        x, ids, weights = on_device(buffer, [part[rank] for part in inputs])
        recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, 4, use_fp8=False)
        synchronize(buffer)
        y = experts_result(recv_x, counts)
        out, _, receive = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=hook, use_fp8=True)
        if hook:
            receive()
        synchronize(buffer)
        check_weighted_sums(out.cpu(), buffer.transport.gather(y.cpu()), inputs, rank, 2, True, hook)

    run(2, work, 3)


def test_sums_in_slots_in_fp8():
    """Rows that the caller has summed are rounded to FP8; a NaN spoils the group that shares a scale with it."""

    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, 256, 4, 1, expert_major=False, use_fp8_combine=True, num_sms=SMS)
        x = (torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(rank)) * 3).bfloat16()
        x[1, 200] = float("nan")
        given, ids = on_device(buffer, (x, torch.full((TOKENS, 1), 2 * (1 - rank))))
        got = plan.dispatch(given, ids, torch.ones_like(ids).float())
        out = plan.combine(got.x, ids)
        synchronize(buffer)
        for found, sent in zip(out.cpu(), x, strict=True):
            values, scales = in_fp8(sent.float())
            assert torch.equal(found.nan_to_num(), (values * scales).bfloat16().nan_to_num())
        assert out[1, 128:].isnan().all() and not out[1, :128].isnan().any()
        plan.close()

    run(2, work, 4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_prepared_calls(ranks):
    """They read the same tensors and write the same outputs as the calls; both can alternate."""
    rounds = [make_round([2] * ranks, i) for i in range(4)]

    def work(buffer, rank):
        plan = buffer.low_latency(2, HIDDEN, 2 * ranks, 2, num_sms=SMS)
        x, ids, weights = on_device(buffer, [part[rank].clone() for part in rounds[0]])
        dispatch = prepare(plan.dispatch, x, ids)
        combine = prepare(plan.combine, plan.received.x, ids, weights)
        for i, inputs in enumerate(rounds):
            for tensor, new in zip((x, ids, weights), inputs, strict=True):
                tensor.copy_(new[rank])
            got = dispatch() if i % 2 else plan.dispatch(x, ids)
            synchronize(buffer)
            check_packed(got.x, got.counts.cpu(), (got.src_info, got.layout_range), inputs, rank)
            y = buffer.transport.gather(got.x.cpu().clone())
            out = combine() if i < 3 else plan.combine(got.x, ids, weights)
            synchronize(buffer)
            check_weighted_sums(out.cpu(), y, inputs, rank, 2)
        plan.close()

    run(ranks, work)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_several_ctas_share_a_row(protocol, parts):
    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, 128, 4, 2, protocol=protocol, num_sms=SMS + 1)
        for i in range(2):
            exchange_packed(buffer, rank, plan, make_round(counts_of(2, i), i, hidden=128))
        plan.close()

    run(2, work, 5)


@pytest.mark.parametrize(
    "topk, experts_per_rank, id_dtype",
    [(1, 1, torch.int32), (1, 1, torch.int64), (9, 3, torch.int32), (9, 3, torch.int64), (32, 40, torch.int64)],
)
def test_numbers_of_experts(topk, experts_per_rank, id_dtype):
    """Metadata of one vector and of several; tokens that name an expert repeatedly. Several warps make the sets."""

    def work(buffer, rank):
        plan = buffer.low_latency(2, SEVERAL_WARPS, 2 * experts_per_rank, topk, topk_idx_dtype=id_dtype, num_sms=SMS)
        inputs = make_round([2, 1], topk, topk, experts_per_rank, hidden=SEVERAL_WARPS, id_dtype=id_dtype)
        exchange_packed(buffer, rank, plan, inputs)
        plan.close()

    run(2, work)


@pytest.mark.parametrize("scales", [None, "float32", "rounded", "ue8m0"])
@pytest.mark.parametrize("ranks, hook", [(2, False), (3, True)])
def test_deepeps_calls(ranks, hook, scales):
    """FP8 rows equal torch's cast bit for bit; the two phases of a call may be apart; statistics add up."""
    options = dict(use_fp8=scales is not None, round_scale=scales in ("rounded", "ue8m0"), use_ue8m0=scales == "ue8m0")

    def work(buffer, rank):
        device, inputs = buffer.transport.device, make_round(counts_of(ranks, 1), 3, hidden=FP8_HIDDEN)
        x, ids, weights = on_device(buffer, [part[rank] for part in inputs])
        totals = torch.ones(2, dtype=torch.int32, device=device)
        waits = torch.zeros(ranks, dtype=torch.int64, device=device)
        for i in range(2):
            recv_x, counts, handle, _, receive = buffer.low_latency_dispatch(
                x, ids, TOKENS, 2 * ranks, totals, waits, return_recv_hook=hook, **options
            )
            assert (receive is not None) == hook
            if hook:
                receive()
                refused(RuntimeError, "called before", receive)
            synchronize(buffer)
            check_packed(recv_x, counts.cpu(), handle, inputs, rank, scales)
            y = buffer.get_next_low_latency_combine_buffer(handle)
            assert y.shape == (2, ranks * TOKENS, FP8_HIDDEN) and y.dtype == torch.bfloat16
            y.copy_(experts_result(recv_x, counts))
            for out in (None, torch.empty_like(x)):  # a handle can be used again
                combined, _, receive = buffer.low_latency_combine(
                    *(y, ids, weights, handle), False, bool(i), return_recv_hook=hook, out=out
                )
                if hook:
                    receive()
                synchronize(buffer)
                assert out is None or combined is out
                check_weighted_sums(combined.cpu(), buffer.transport.gather(y.cpu()), inputs, rank, 2)
        assert (totals.cpu() == 1 + 2 * counts.cpu()).all() and (waits >= 0).all()

    run(ranks, work, 7)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_rows_in_their_slots_equal_those_of_dispatch_and_combine(ranks, protocol):
    """Bit for bit: rows, experts, weights and sums. Normal dispatch packs the rows that have an expert."""

    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, HIDDEN, 2 * ranks, 2, expert_major=False, protocol=protocol, num_sms=SMS)
        for i in range(2):
            inputs = Inputs(*make_round(counts_of(ranks, i), i), 2 * ranks)
            x, ids, weights = on_device(buffer, [part[rank] for part in inputs[:3]])
            got, normal = plan.dispatch(x, ids, weights), send(buffer, rank, inputs)
            synchronize(buffer)
            has_row = (got.topk_idx >= 0).any(1)
            assert torch.equal(got.slot_rows[:, 0] >= 0, has_row)
            assert bitwise_equal(got.x[has_row], normal[0]) and torch.equal(got.topk_idx[has_row], normal[1])
            is_local = normal[1] >= 0
            assert bitwise_equal(got.topk_weights[has_row].where(is_local, 0), normal[2])
            y = (got.x.float() * 1.7).bfloat16()
            out = plan.combine(y, ids)
            wanted = buffer.combine(y[has_row].contiguous(), normal[4], config=SMALL)[0]
            synchronize(buffer)
            assert bitwise_equal(out, wanted)
        plan.close()

    run(ranks, work, 2)


def test_packed_rows_equal_dispatch_local_sums_and_combine():
    """Bit for bit: the experts' results are summed by torch before normal combine."""
    inputs = Inputs(*make_round([TOKENS, TOKENS - 1], 4), 4)

    def work(buffer, rank):
        x, ids, weights = on_device(buffer, [part[rank] for part in inputs[:3]])
        recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, 4, use_fp8=False)
        y = experts_result(recv_x, counts)
        out = buffer.low_latency_combine(y, ids, weights, handle)[0]
        given = send(buffer, rank, inputs)
        rows = []
        for local_ids, local_weights, row in zip(given[1].tolist(), given[2].cpu(), given[0].cpu(), strict=True):
            total = torch.zeros(HIDDEN)
            for k, expert in enumerate(local_ids):
                if expert >= 0:
                    total = fma(local_weights[k], (row.float() * (1 + expert)).bfloat16().float(), total)
            rows.append(total.bfloat16())
        rows = torch.stack(rows).to(x.device) if rows else x.new_empty(0, HIDDEN)
        wanted = buffer.combine(rows, given[4], config=SMALL)[0]
        synchronize(buffer)
        assert bitwise_equal(out, wanted)

    run(2, work)


def test_not_a_number():
    """NaNs stay NaNs, also words that equal the sentinel; the bits of all other values arrive."""
    x = torch.randn(2, HIDDEN).bfloat16()
    words = x.view(torch.int32)
    words[0, :3], words[1, 5] = torch.tensor([-1, 0x7FC00001, 0x0001FFFF]), -1

    def work(buffer, rank):
        given, ids = on_device(buffer, (x, torch.tensor([[0, 1], [1, -1]])))
        recv_x, counts, _, _, _ = buffer.low_latency_dispatch(given, ids, 2, 2, use_fp8=False)
        synchronize(buffer)
        buffer.check()
        assert counts.tolist() == [4 if rank else 2]
        if rank == 0:
            row = recv_x[0, 0].cpu()
            assert torch.equal(row.isnan(), x[0].isnan()) and bitwise_equal(row[~row.isnan()], x[0][~row.isnan()])

    run(2, work)


# Ranks that run ahead


def exchange_ahead(seed, protocol="lamport", rounds=3, hidden=HIDDEN, use_fp8_combine=False):
    """Queue two dispatches and two combines per round; a rank runs ahead as far as the kernels let it."""
    inputs = [make_round([2, 2], 100 * seed + i, hidden=hidden) for i in range(rounds)]
    generator = torch.Generator().manual_seed(seed)
    ys = [[torch.randn(2, 4, hidden, generator=generator).bfloat16() for _ in range(2)] for _ in range(rounds)]

    def work(buffer, rank):
        plan = buffer.low_latency(2, hidden, 4, 2, protocol=protocol, num_sms=SMS, use_fp8_combine=use_fp8_combine)
        dispatch, combine, results = plan._dispatch, plan._combine, []
        for (x, ids, weights), y in zip(inputs, ys, strict=True):
            x, ids, weights, y = on_device(buffer, (x[rank], ids[rank], weights[rank], y[rank]))
            received, sums = [dispatch.new_output() for _ in range(2)], [torch.zeros_like(x) for _ in range(2)]
            with buffer._streams.on_stream(None, True, False) as finish:
                for got in received:
                    got.x.zero_()
                    dispatch.launch(x, ids, None, got)
                for out in sums:
                    combine.launch(y, received[0].slot_rows, ids, weights, out)
                finish(x, ids, weights, y, *received[0], *received[1], *sums)
            results.append((received, sums))
        synchronize(buffer)
        buffer.check()
        for (received, sums), of_round, y in zip(results, inputs, ys, strict=True):
            for got in received:
                check_packed(got.x, got.counts.cpu(), (got.src_info, got.layout_range), of_round, rank)
            for out in sums:
                check_weighted_sums(out.cpu(), y, of_round, rank, 2, use_fp8_combine)
        plan.close()

    run(2, work, seed, timeout=SHORT_TIMEOUT if simulator.ENABLED else 20)


def dispatch_ahead(seed, protocol="lamport", hidden=HIDDEN):
    """Queue dispatches of rows that go to the other rank and stay in slots."""
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(2, 2, hidden, generator=generator).bfloat16() for _ in range(4)]  # [dispatch][rank]

    def work(buffer, rank):
        plan = buffer.low_latency(2, hidden, 2, 1, protocol=protocol, expert_major=False, num_sms=SMS)
        ids = torch.full((2, 1), 1 - rank, device=buffer.transport.device)
        given, weights = on_device(buffer, [x[rank] for x in xs]), torch.ones_like(ids).float()
        received = [plan._dispatch.new_output() for _ in xs]
        with buffer._streams.on_stream(None, True, False) as finish:
            for x, out in zip(given, received, strict=True):
                plan._dispatch.launch(x, ids, weights, out)
            finish(ids, weights, *given)
        synchronize(buffer)
        buffer.check()
        of_peer = slice(2 * (1 - rank), 2 * (1 - rank) + 2)
        for x, out in zip(xs, received, strict=True):
            assert bitwise_equal(out.x[of_peer].cpu(), x[1 - rank]) and (out.topk_idx[of_peer] == 0).all()
        plan.close()

    run(2, work, seed, timeout=SHORT_TIMEOUT if simulator.ENABLED else 20)


def combine_ahead(seed, protocol="lamport", hidden=HIDDEN):
    """Queue combines of rows in slots: rank 1 has all experts, and does not need anything from rank 0."""
    generator = torch.Generator().manual_seed(seed)
    ys = [torch.randn(4, hidden, generator=generator).bfloat16() for _ in range(5)]

    def work(buffer, rank):
        plan = buffer.low_latency(2, hidden, 4, 1, protocol=protocol, expert_major=False, num_sms=SMS)
        ids = torch.full((2, 1), 3, device=buffer.transport.device)
        x, *given = on_device(buffer, [ys[0][:2], *ys])
        got, sums = plan.dispatch(x, ids, torch.ones_like(ids).float()), [torch.zeros_like(x) for _ in ys]
        with buffer._streams.on_stream(None, True, False) as finish:
            for y, out in zip(given, sums, strict=True):
                plan._combine.launch(y, got.slot_rows, ids, None, out)
            finish(ids, *given, *sums)
        synchronize(buffer)
        buffer.check()
        for y, out in zip(ys, sums, strict=True):
            assert bitwise_equal(out.cpu(), y[2 * rank : 2 * rank + 2])
        plan.close()

    run(2, work, seed, timeout=SHORT_TIMEOUT if simulator.ENABLED else 20)


def test_two_combines_before_their_hooks():
    """Rank 0 sends the weights of both before rank 1, which has all experts, reads those of the first one."""

    def work(buffer, rank):
        rounds = [make_round([2, 2], seed) for seed in range(3)]
        ids = [torch.tensor([[2, 3], [3, -1]])] * 2
        x, given = rounds[0][0], on_device(buffer, [ids[rank], *(weights[rank] for _, _, weights in rounds)])
        recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(
            x[rank].to(buffer.transport.device), given[0], 2, 4, use_fp8=False
        )
        synchronize(buffer)
        y = experts_result(recv_x, counts)
        combine = partial(buffer.low_latency_combine, y, given[0])
        combine(given[1], handle, return_recv_hook=True)[2]()  # the first launch of a kernel waits for all ranks
        synchronize(buffer)
        wait_for_ranks = partial(buffer.transport.gather, None)
        if rank == 1:
            wait_for_ranks()
        sent = [combine(weights, handle, return_recv_hook=True) for weights in given[2:]]
        synchronize(buffer)
        if rank == 0:
            wait_for_ranks()
        wait_for_ranks()
        for _, _, receive in sent:
            receive()
        synchronize(buffer)
        buffer.check()
        ys = buffer.transport.gather(y.cpu())
        for (out, _, _), (_, _, weights) in zip(sent, rounds[1:], strict=True):
            check_weighted_sums(out.cpu(), ys, (x, ids, weights), rank, 2)

    run(2, work, timeout=SHORT_TIMEOUT if simulator.ENABLED else 20)


@pytest.mark.parametrize("exchange", [exchange_ahead, dispatch_ahead, combine_ahead])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_rank_that_runs_ahead(protocol, exchange):
    """Also without data races: with data as its own flag, all accesses to slots are strong.

    Only a CTA of several warps needs its barriers.
    """
    assert make_shape(2, 2, SEVERAL_WARPS, 2, 4).threads >= 64 or not simulator.ENABLED
    with simulator.races() if simulator.ENABLED else contextlib.nullcontext():
        exchange(0, protocol, hidden=SEVERAL_WARPS)
    for seed in range(1, 3):
        exchange(seed, protocol)


# Late and dead ranks


def has_living_experts(ids, ranks):
    """Return which tokens have no expert on rank 1."""
    owners = torch.where((ids >= 0) & (ids < 2 * ranks), ids // 2, -1)
    return (owners != 1).all(1)


@pytest.mark.parametrize(
    "ranks, protocol, when",
    [
        *((2, protocol, when) for protocol in PROTOCOLS for when in ("dispatch", "combine")),
        (3, PROTOCOLS[0], "combine"),
    ],
)
def test_the_others_go_on_without_a_dead_rank(ranks, protocol, when):
    """In the operation that times out tokens may be NaN; from then on only those that have an expert on rank 1."""
    inputs = [make_round([TOKENS] * ranks, i) for i in range(4)]

    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, HIDDEN, 2 * ranks, 2, protocol=protocol, num_sms=SMS)
        exchange_packed(buffer, rank, plan, inputs[0])
        for i in range(1, 4):
            if rank == 1 and (i > 1 or when == "dispatch"):
                return
            x, ids, weights = on_device(buffer, [part[rank] for part in inputs[i]])
            got = plan.dispatch(x, ids)
            if rank == 1:
                synchronize(buffer)
                return
            y = experts_result(got.x, got.counts)
            out = plan.combine(y, ids, weights).cpu()
            synchronize(buffer)
            buffer.check()
            safe = has_living_experts(inputs[i][1][rank], ranks)
            is_nan = out.isnan().all(1)
            if i > 1:
                mask = torch.zeros(ranks, dtype=torch.int32, device=x.device)
                buffer.low_latency_query_mask_buffer(mask)
                assert mask.tolist() == [int(r == 1) for r in range(ranks)]
                alone = [x if r != 1 else x[:0] for r, x in enumerate(inputs[i][0])]
                routed = [idx if r != 1 else idx[:0] for r, idx in enumerate(inputs[i][1])]
                check_packed(got.x, got.counts.cpu(), (got.src_info, got.layout_range), (alone, routed, 0), rank)
                assert torch.equal(is_nan, ~safe)
            else:
                assert is_nan[~safe].all()
            assert not out[safe & ~is_nan].isnan().any()

    run(ranks, work, timeout=1.5e-3 if simulator.ENABLED else 0.5, enable_shrink=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_timeout_is_an_error_without_enable_shrink(protocol):
    """The next call and `check` raise it; so does every call after that."""
    inputs = make_round([TOKENS, TOKENS], 0)

    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, HIDDEN, 4, 2, protocol=protocol, num_sms=SMS)
        x, ids, weights = on_device(buffer, [part[rank] for part in inputs])
        if rank == 1:
            return
        got = plan.dispatch(x, ids)
        synchronize(buffer)
        assert got.counts.tolist() == [0, 0] and (got.slot_rows.cpu() < 0).all()
        sentence = r"low_latency_dispatch: rank 0 waited for the metadata of token \d+ from rank 1, longer than"
        for call in (
            buffer.check,
            lambda: plan.dispatch(x, ids),
            lambda: plan.combine(torch.zeros_like(got.x), ids, weights),
            lambda: buffer.low_latency_dispatch(x, ids, TOKENS, 4),
        ):
            refused(TimeoutError, sentence, call)

    run(2, work, timeout=SHORT_TIMEOUT)


@pytest.mark.skipif(not simulator.ENABLED, reason="a GPU would wait for 100 seconds")
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_missing_rank_with_the_default_timeout(operation):
    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, HIDDEN, 4, 2, num_sms=SMS)
        x, ids, weights = (part[rank] for part in make_round([TOKENS, TOKENS], 0))
        for last in (False, True):
            if rank == 1 and last and operation == "dispatch":
                return
            y = plan.dispatch(x, ids).x
            if rank == 1 and last:
                return synchronize(buffer)
            plan.combine(y, ids, weights)
        buffer.check(synchronize=True)

    late = r"the function of rank 1 has ended|rank 1 is now in destroy"
    wanted = rf"rank 0 waited for .* rank 1.*, longer than 100 s \(1e\+08 of the simulator's steps\); ({late})"
    refused(TimeoutError, f"low_latency_{operation}: {wanted}", run, 2, work)


@pytest.mark.skipif(not simulator.ENABLED, reason="depends on the simulator's clock")
def test_a_timeout_that_is_too_short_for_the_kernel():
    """A step of the simulator runs one warp; the launch has more warps than the timeout has steps."""

    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, HIDDEN, 2, 2, num_sms=SMS)
        plan.dispatch(*(part[0] for part in make_round([TOKENS], 0, topk=2)[:2]))
        sentence = (
            r"from rank 0, longer than 2e-06 s \(2 of the simulator's steps\); no rank is late, the timeout is too"
        )
        refused(TimeoutError, sentence, buffer.check, synchronize=True)

    run(1, work, timeout=2e-6)


@pytest.mark.skipif(
    not simulator.ENABLED and torch.cuda.device_count() < 2, reason="ranks that share a GPU launch together"
)
def test_a_rank_in_time_again():
    """After a rank has missed a dispatch, all clean mask and buffer, and exchange again; then it misses another one."""
    inputs = [make_round([2, 2], i) for i in range(3)]

    def work(buffer, rank):
        def exchange(i):
            x, ids, weights = on_device(buffer, [part[rank] for part in inputs[i]])
            recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, 2, 4, use_fp8=False)
            y = experts_result(recv_x, counts)
            return recv_x, counts, handle, y, buffer.low_latency_combine(y, ids, weights, handle)[0]

        exchange(0)
        if rank == 0:
            exchange(1)
        synchronize(buffer)
        buffer.transport.gather(None)
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(2, HIDDEN, 4)
        recv_x, counts, handle, y, out = exchange(2)
        synchronize(buffer)
        buffer.check()
        check_packed(recv_x, counts.cpu(), handle, inputs[2], rank)
        check_weighted_sums(out.cpu(), buffer.transport.gather(y.cpu()), inputs[2], rank, 2)
        if rank == 0:  # the host sees a later timeout, too
            exchange(0)
            synchronize(buffer)
            assert buffer._low_latency.rank_mask.status[0] and buffer._low_latency.rank_mask.mask.tolist() == [0, 1]

    run(2, work, timeout=SHORT_TIMEOUT, enable_shrink=True)


@pytest.mark.parametrize("enable_shrink", [False, True])
def test_a_rank_that_does_not_clear_the_buffer(enable_shrink):
    """It is masked, and nothing waits for it again; without enable_shrink it is an error."""

    def work(buffer, rank):
        plan = buffer.low_latency(1, 8, 2, 1, num_sms=SMS)
        if rank == 0 and enable_shrink:
            plan.reset()
            assert buffer._low_latency.rank_mask.masked_ranks() == [1]
            sentence = r"waits for all ranks, but these are masked: \[1\]"
            refused(RuntimeError, sentence, buffer.low_latency, 2, 8, 2, 1)
        elif rank == 0:
            sentence = r"rank 0 waited longer than .* for ranks \[1\] to clear the buffer of low-latency calls"
            refused(TimeoutError, sentence, plan.reset)
        buffer.transport.rendezvous("the other rank's checks", 60)

    run(2, work, timeout=SHORT_TIMEOUT, enable_shrink=enable_shrink)


def test_a_masked_rank():
    """Nothing is sent to it and nothing is expected from it, until it is unmasked."""
    inputs = make_round([2, 2, 2], 5)

    def work(buffer, rank):
        x, ids, weights = on_device(buffer, [part[rank] for part in inputs])
        plan = buffer.low_latency(2, HIDDEN, 6, 2, num_sms=SMS)
        exchange_packed(buffer, rank, plan, inputs)
        if rank == 2:
            return
        buffer.low_latency_update_mask_buffer(2, True)
        got = plan.dispatch(x, ids)
        out = plan.combine(experts_result(got.x, got.counts), ids, weights).cpu()
        synchronize(buffer)
        buffer.check()
        on_rank_2 = ((inputs[1][rank] >= 4) & (inputs[1][rank] < 6)).any(1)
        assert torch.equal(out.isnan().all(1), on_rank_2) and torch.equal(out.isnan().any(1), on_rank_2)

    run(3, work, timeout=20)


# Rows that were not received


def combine_wrong_rows(protocol, expert_major, beyond):
    """Combine with row numbers on rank 0 that are ``beyond`` rows behind its last one; other ranks' tokens are right.

    Without a timeout, a token is NaN if it has an expert on rank 0.
    """
    inputs = make_round([TOKENS, TOKENS], 1)

    def work(buffer, rank):
        plan = buffer.low_latency(TOKENS, HIDDEN, 4, 2, protocol=protocol, expert_major=expert_major, num_sms=SMS)
        x, ids, weights = on_device(buffer, [part[rank] for part in inputs])
        got = plan.dispatch(x, ids, None if expert_major else weights)
        y = torch.ones(got.x.shape, dtype=torch.bfloat16, device=x.device)
        synchronize(buffer)
        if rank == 0:
            last = y.shape[:-1].numel() - 1
            got.slot_rows.masked_fill_(got.slot_rows >= 0, last + beyond)
        out = plan.combine(y, ids, weights if expert_major else None)
        buffer.check(synchronize=True)
        on_rank_0 = ((ids >= 0) & (ids < 2)).any(1)
        assert on_rank_0.any() and not on_rank_0.all()
        assert torch.equal(out.isnan().all(1), on_rank_0) and torch.equal(out.isnan().any(1), on_rank_0)
        plan.close()

    run(2, work)


@simulated
@pytest.mark.parametrize("beyond", [1, (1 << 31) - 1 - 64])
@pytest.mark.parametrize("expert_major", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_row_numbers_beyond_x(protocol, expert_major, beyond):
    combine_wrong_rows(protocol, expert_major, beyond)


@simulated
@pytest.mark.parametrize("expert_major", [True, False])
def test_a_combine_that_trusts_row_numbers_is_rejected(expert_major, monkeypatch):
    make = "make_low_latency_combine"
    wrong = changed_maker(low_latency_combine, make, low_latency_combine, "row < num_rows", "row < num_rows + 1")
    monkeypatch.setattr(low_latency_combine, make, wrong)
    with pytest.raises(simulator.OutOfBounds):
        combine_wrong_rows("lamport", expert_major, 1)


def test_a_combine_before_rows_are_received_is_refused():
    """Before the first dispatch of a pair, and before the hook of a dispatch was called."""

    def work(buffer, rank):
        inputs = make_round([TOKENS, TOKENS], 0)
        x, ids, weights = on_device(buffer, [part[rank] for part in inputs])
        plan = buffer.low_latency(TOKENS, HIDDEN, 4, 2, num_sms=SMS)
        refused(RuntimeError, "called before the first dispatch", plan.combine, plan.received.x, ids, weights)
        exchange_packed(buffer, rank, plan, inputs)
        plan.close()
        recv_x, _, handle, _, receive = buffer.low_latency_dispatch(
            x, ids, TOKENS, 4, use_fp8=False, return_recv_hook=True
        )
        refused(RuntimeError, "call the hook", buffer.low_latency_combine, recv_x, ids, weights, handle)
        receive()
        buffer.low_latency_combine(recv_x, ids, weights, handle)

    run(2, work)


@pytest.mark.skipif(not simulator.ENABLED, reason="only the simulator compares the experts, which a GPU has")
def test_a_combine_with_other_experts_than_its_dispatch_is_refused():
    """All ids that are no expert are alike. A prepared dispatch may have sent others meanwhile."""
    inputs = make_round([TOKENS, TOKENS], 0)

    def work(buffer, rank):
        x, ids, weights = (part[rank].clone() for part in inputs)
        plan = buffer.low_latency(TOKENS, HIDDEN, 4, 2, num_sms=SMS)
        y = plan.dispatch(x, ids).x
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, 4, use_fp8=False)
        other = ids.clone()
        other[1, 0] = (ids[1, 0] + 1) % 4
        same = ids.where(ids >= 0, 77)
        for combine, rows, last in ((plan.combine, y, ()), (buffer.low_latency_combine, recv_x, (handle,))):
            sentence = r"topk_idx is \[.*\] for token 1; dispatch has sent it to \[.*\], and both must be the same"
            refused(ValueError, sentence, combine, rows, other, weights, *last)
            sentence = f"topk_idx has 1 tokens; dispatch has sent {TOKENS}, and both"
            refused(ValueError, sentence, combine, rows, ids[:1], weights[:1], *last)
            combine(rows, same, weights, *last)
        again = prepare(plan.dispatch, x, ids)
        ids.copy_(other)
        again()
        plan.combine(y, ids, weights)

    run(2, work)


# Arguments

NO_HOOK = "return_recv_hook is True; it must be False in a prepared call"


def test_refused_dispatch():
    both = dict(async_finish=True, return_recv_hook=True)

    def work(buffer, rank):
        zeros = lambda *size, dtype=torch.int64: torch.zeros(size, dtype=dtype, device=buffer.transport.device)
        x, ids, eight = zeros(2, 8, dtype=torch.bfloat16), zeros(2, 2), zeros(4)
        for error, match, arguments, options in (
            (TypeError, "x is list; it must be a tensor", ([1], ids, 2, 4), {}),
            (ValueError, r"x has shape \(\); it must have two", (x[0, 0], ids, 2, 4), {}),
            (ValueError, r"topk_idx has shape \(\); it must have two", (x, ids[0, 0], 2, 4), {}),
            (TypeError, "topk_idx is torch.uint8; it must be torch.int64 or torch.int32", (x, ids.byte(), 2, 4), {}),
            (TypeError, "x is torch.float32; it must be torch.bfloat16", (x.float(), ids, 2, 4), {}),
            (ValueError, "x has 2 tokens; at most 1", (x, ids, 1, 4), {}),
            (ValueError, "num_max_dispatch_tokens_per_rank is 0", (x, ids, 0, 4), {}),
            (ValueError, "num_max_dispatch_tokens_per_rank is 65536; with 1 ranks", (x, ids, 1 << 16, 4), {}),
            (TypeError, "num_max_dispatch_tokens_per_rank is 2.5", (x, ids, 2.5, 4), {}),
            (ValueError, "num_experts is 5000", (x, ids, 2, 5000), {}),
            (ValueError, r"topk_idx has shape \(1, 2\)", (x, ids[:1], 2, 4), {}),
            (ValueError, "topk_idx' number of columns is 33", (x, zeros(2, 33), 2, 4), {}),
            (ValueError, "hidden is 8; with FP8 .* multiple of 128", (x, ids, 2, 4), dict(use_fp8=True)),
            (ValueError, "round_scale is True and use_fp8 is False", (x, ids, 2, 4), dict(round_scale=True)),
            (ValueError, "use_ue8m0 is True and round_scale is False", (x, ids, 2, 4), dict(use_ue8m0=True)),
            (TypeError, "use_fp8 is 'yes'", (x, ids, 2, 4), dict(use_fp8="yes")),
            (ValueError, "async_finish and return_recv_hook", (x, ids, 2, 4), both),
            (TypeError, "cumulative_local_expert_recv_stats is torch.int64", (x, ids, 2, 4, eight), {}),
            (ValueError, "dispatch_wait_recv_cost_stats has shape", (x, ids, 2, 4, None, eight), {}),
        ):
            refused(error, match, buffer.low_latency_dispatch, *arguments, **{"use_fp8": False, **options})
        arguments, options = (x, ids, 2, 4), dict(use_fp8=False, return_recv_hook=True)
        refused(ValueError, NO_HOOK, prepare, buffer.low_latency_dispatch, *arguments, **options)
        buffer.low_latency_dispatch(x, ids, 2, 4, use_fp8=False)  # what follows would find its exchange
        for name, sizes in (("num_max_dispatch_tokens_per_rank", (2.0, 4)), ("num_experts", (2, 4.0))):
            refused(
                TypeError,
                f"{name} is .*; it must be an int",
                buffer.low_latency_dispatch,
                x,
                ids,
                *sizes,
                use_fp8=False,
            )
        for name, sizes in (
            ("num_max_dispatch_tokens_per_rank", ("x", 8, 4)),
            ("hidden", (2, None, 4)),
            ("num_experts", (2, 8, 2.5)),
        ):
            refused(TypeError, f"{name} is .*; it must be an int", buffer.clean_low_latency_buffer, *sizes)
        refused(TypeError, "mask_status is NoneType", buffer.low_latency_query_mask_buffer, None)
        mask = zeros(2, dtype=torch.int32)
        refused(ValueError, "rank_to_mask is 1; 0 to 0", buffer.low_latency_update_mask_buffer, 1)
        refused(ValueError, "mask_status has shape", buffer.low_latency_query_mask_buffer, mask)

    run(1, work)


def test_refused_combine():
    def work(buffer, rank):
        zeros = lambda *size, dtype=torch.float32: torch.zeros(size, dtype=dtype, device=buffer.transport.device)
        x, ids, weights = zeros(2, 8, dtype=torch.bfloat16), zeros(2, 2, dtype=torch.int64), zeros(2, 2)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 2, 4, use_fp8=False)
        for error, match, arguments, options in (
            (ValueError, "use_logfmt is True; it must be False", (recv_x, ids, weights, handle), dict(use_logfmt=True)),
            (ValueError, "handle is tuple; it must be the tuple of 6", (recv_x, ids, weights, handle[:5]), {}),
            (
                ValueError,
                "handle is tuple; it must be the",
                (recv_x, ids, weights, (*handle[:2], 2.0, *handle[3:])),
                {},
            ),
            (ValueError, "x has shape", (recv_x[:1], ids, weights, handle), {}),
            (TypeError, "topk_weights is NoneType", (recv_x, ids, None, handle), {}),
            (ValueError, "topk_weights has shape", (recv_x, ids, weights[:1], handle), {}),
            (TypeError, "out is torch.float32", (recv_x, ids, weights, handle), dict(out=x.float())),
        ):
            refused(error, match, buffer.low_latency_combine, *arguments, **options)
        numbers = *handle[:5], ids[0, 0]
        refused(ValueError, "handle is tuple; it must be", buffer.get_next_low_latency_combine_buffer, numbers)
        wrong = *handle[:2], -2, *handle[3:]
        sentence = "num_max_dispatch_tokens_per_rank is -2"
        refused(ValueError, sentence, buffer.get_next_low_latency_combine_buffer, wrong)
        arguments, options = (recv_x, ids, weights, handle), dict(return_recv_hook=True)
        refused(ValueError, NO_HOOK, prepare, buffer.low_latency_combine, *arguments, **options)

    run(1, work)


def test_tensors_that_require_grad():
    """They are accepted without grad mode."""

    def work(buffer, rank):
        device = buffer.transport.device
        x, ids = torch.zeros(2, 8, device=device).bfloat16(), torch.zeros(2, 2, dtype=torch.int64, device=device)
        weights = torch.ones(2, 2, device=device)
        pair = buffer.low_latency(2, 8, 4, 2, num_sms=SMS)
        y = pair.dispatch(x, ids).x.clone()
        handle = buffer.low_latency_dispatch(x, ids, 2, 4, use_fp8=False)[2]
        wants = lambda tensor: tensor.clone().requires_grad_()
        for name, call in (
            ("x", lambda: pair.dispatch(wants(x), ids)),
            ("x", lambda: pair.combine(wants(y), ids, weights)),
            ("topk_weights", lambda: pair.combine(y, ids, wants(weights))),
            ("x", lambda: buffer.low_latency_dispatch(wants(x), ids, 2, 4, use_fp8=False)),
            ("x", lambda: buffer.low_latency_combine(wants(y), ids, weights, handle)),
            ("topk_weights", lambda: buffer.low_latency_combine(y, ids, wants(weights), handle)),
            ("out", lambda: buffer.low_latency_combine(y, ids, weights, handle, out=wants(x))),
        ):
            refused(ValueError, f"{name} requires grad; Buffer has no backward: use torch.no_grad", call)
            with torch.no_grad():
                call()
        pair.close()

    run(1, work)


def test_refused_plans():
    def work(buffer, rank):
        zeros = lambda *size, dtype=torch.float32: torch.zeros(size, dtype=dtype, device=buffer.transport.device)
        x, ids, weights = zeros(2, 8, dtype=torch.bfloat16), zeros(2, 2, dtype=torch.int64), zeros(2, 2)
        for error, match, options in (
            (ValueError, "protocol is 'ring'; it must be one of lamport, flags", dict(protocol="ring")),
            (ValueError, "hidden is 12", dict(hidden=12)),
            (TypeError, "expert_major is 2", dict(expert_major=2)),
            (ValueError, "num_sms is 0", dict(num_sms=0)),
            (TypeError, "topk_idx_dtype is torch.int16", dict(topk_idx_dtype=torch.int16)),
        ):
            refused(error, match, buffer.low_latency, 2, **dict(hidden=8, num_experts=4, num_topk=2) | options)
        packed, in_slots = (buffer.low_latency(2, 8, 4, 2, expert_major=e, num_sms=SMS) for e in (True, False))
        refused(ValueError, "expert_major True pass them to combine", packed.dispatch, x, ids, weights)
        y = in_slots.received.x
        refused(ValueError, "expert_major False pass them to dispatch", in_slots.combine, y, ids, weights)
        packed.close()
        refused(RuntimeError, "was closed", packed.dispatch, x, ids)
        in_slots.close()

    run(1, work)


def test_arguments_that_differ_between_ranks():
    def work(buffer, rank):
        (x, ids, weights), fp8 = (inputs[0] for inputs in make_round([1, 1], 0)[:3]), rank == 1
        x, ids, weights = on_device(buffer, [x, ids, weights])
        handle, number = buffer.low_latency_dispatch(x, ids, 1, 4, use_fp8=False)[2], "num_max_dispatch_tokens_per_rank"
        for sentence, call in (
            (
                f"low_latency: {number} is 2 on rank 0 and 3 on rank 1, num_experts is 4 on rank 0 and 8 on rank 1, "
                "protocol is lamport on rank 0 and flags on rank 1, use_fp8_combine is False on rank 0 and True on "
                "rank 1; they must be the same on all ranks",
                lambda: buffer.low_latency(
                    2 + rank, 128, 4 + 4 * rank, 2, protocol=PROTOCOLS[rank], use_fp8_combine=fp8
                ),
            ),
            (
                f"low_latency_dispatch: {number} is 2 on rank 0 and 4 on rank 1; it must be the same",
                lambda: buffer.low_latency_dispatch(x, ids, 2 + 2 * rank, 4, use_fp8=False),
            ),
            (
                "hidden is 8 on rank 0 and 128 on rank 1, .*columns of topk_idx.* is 2 on rank 0 and 1 on rank 1, "
                "use_fp8 is False on rank 0 and True on rank 1; they",
                lambda: buffer.low_latency_dispatch(
                    x.new_zeros(1, (8, 128)[rank]), ids[:, rank:].contiguous(), 2, 4, use_fp8=fp8
                ),
            ),
            (
                "the call is low_latency_dispatch on rank 0 and low_latency_combine on rank 1; all ranks must make the",
                lambda: (
                    buffer.low_latency_combine(x.new_zeros(2, 2, HIDDEN), ids, weights, handle)
                    if rank
                    else buffer.low_latency_dispatch(x, ids, 2, 4, use_fp8=False)
                ),
            ),
        ):
            refused(ValueError, sentence, call)

    run(2, work)


def test_no_tokens_anywhere():
    def work(buffer, rank):
        inputs = make_round([0, 0], 0)
        plan = buffer.low_latency(1, HIDDEN, 4, 2, num_sms=SMS)
        for _ in range(3):
            exchange_packed(buffer, rank, plan, inputs)
        plan.close()

    run(2, work)


def test_size_hint_and_mode():
    small, large = (Buffer.get_low_latency_rdma_size_hint(tokens, 7168, 8, 256) for tokens in (64, np.int32(128)))
    assert 2 * 2 * 8 * 64 * 14336 < small < large < 2.1 * small

    def work(transport):
        buffer = Buffer(transport, 0, 1 << 20, low_latency_mode=True)
        assert buffer.low_latency_mode and buffer.num_rdma_bytes == 1 << 20
        buffer.destroy()

    from moe_numba.expert_parallel.ranks.local_group import LocalGroup

    LocalGroup(1).run(work)


# Wrong kernels must be rejected

RESET_ROW = "st_relaxed_sys_s32x4(local, row + 4 * i, empty, empty, empty, empty)"
RESET_SUM = "st_relaxed_sys_s32x4(local, sum_row + 4 * i, empty, empty, empty, empty)"
RESET_SCALE = "st_relaxed_sys_s32(local, offset, empty)"
ALL_WORDS = "(a != SENTINEL) & (b != SENTINEL) & (c != SENTINEL) & (d != SENTINEL)"
TARGETS = "                    targets = uint32(ranks_of(expert, local_experts, num_ranks) & ~masked)\n"
EARLY = f"""{TARGETS}                    if tid < 32:
                        send_metadata(ctx, number, masked, token, part, expert)
                        fence_acq_rel_sys()
"""
BARRIER = "cuda.syncthreads()\n                                if tid == 0:\n"
WRONG = {  # the kernel, the module with the passage, the passage, what replaces it, and the protocol
    "the half of the last dispatch": (
        *("dispatch", "dispatch", "half, receiver = int32(number & 1)", "half, receiver = int32(0)", "lamport"),
    ),
    "the half of the last combine": ("combine", "combine", "int32(number & 1)", "int32(0)", "lamport"),
    "a sentinel that is not reset by dispatch": ("dispatch", "dispatch", RESET_ROW, "pass", "lamport"),
    "a sentinel that is not reset by combine": ("combine", "combine", RESET_SUM, "pass", "lamport"),
    "only one word of a vector polled": ("dispatch", "protocol", ALL_WORDS, "a != SENTINEL", "lamport"),
    "metadata before rows": ("dispatch", "dispatch", TARGETS, EARLY, "flags"),
    "metadata without a fence": ("dispatch", "dispatch", "fence_acq_rel_sys()", "pass", "flags"),
    "a flag without a fence": ("combine", "combine", "fence_acq_rel_sys()", "pass", "flags"),
    "a flag without a barrier": ("combine", "combine", BARRIER, "if tid == 0:\n", "flags"),
    "metadata without a stamp": ("dispatch", "protocol", "return (a >> shift == stamp)", "return (a == a)", "lamport"),
    "the row of the token before": ("dispatch", "dispatch", "loaded[j] = following[j]", "pass", "lamport"),
    "the experts of the token before": ("dispatch", "dispatch", "expert = next_expert", "pass", "lamport"),
    "the row of the slot before": ("combine", "combine", "loaded[j] = following[j]", "pass", "lamport"),
    "the rows of the slot before": ("combine", "combine", "row = next_row", "pass", "lamport"),
    "rows one too far": ("dispatch", "dispatch", "word, earlier, lane)", "word, earlier, lane) + 1", "lamport"),
    "slots of the last word not counted": ("dispatch", "dispatch", "word, earlier,", "word, uint32(0),", "lamport"),
}
NEED_PACKED_ROWS = {
    "metadata without a stamp",
    "the experts of the token before",
    "rows one too far",
    "slots of the last word not counted",
}
WRONG_FP8_SUMS = {  # the module with the passage, the passage, and what replaces it
    "a scale that is not reset": ("combine", RESET_SCALE, "pass"),
    "a scale that is not waited for": (
        "combine",
        "polled[first + 2] = ld_relaxed_sys_s32(local, scale)",
        "polled[first + 2] = int32(0)",
    ),
    "the scale of another group": ("quantize", "31 & ~(SUM_LANES_PER_SCALE - 1)", "0"),
    "a maximum of half of the group": ("quantize", "for step in (1, 2, 4, 8):", "for step in (1, 2, 4):"),
}


@simulated
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_rejected(name, monkeypatch):
    kernel, where, right, wrong, protocol = WRONG[name]
    modules = {"dispatch": low_latency_dispatch, "combine": low_latency_combine, "protocol": low_latency_protocol}
    make = f"make_low_latency_{kernel}"
    monkeypatch.setattr(modules[kernel], make, changed_maker(modules[kernel], make, modules[where], right, wrong))
    exchange = exchange_ahead
    if name in ("the half of the last combine", "the row of the slot before"):
        exchange = combine_ahead
    elif kernel == "dispatch" and name not in NEED_PACKED_ROWS:
        exchange = dispatch_ahead
    if protocol == "flags":
        exchange = partial(exchange, hidden=256)
    assert fails_under_some_seed(lambda seed: exchange(seed, protocol))


@simulated
@pytest.mark.parametrize("name", WRONG_FP8_SUMS)
def test_wrong_sums_in_fp8_are_rejected(name, monkeypatch):
    make = "make_low_latency_combine"
    monkeypatch.setattr(low_latency_config, "default_parts", lambda max_tokens: 1)  # a warp has two groups
    where, right, wrong = WRONG_FP8_SUMS[name]
    module = low_latency_combine if where == "combine" else low_latency_quantize
    wrong = changed_maker(low_latency_combine, make, module, right, wrong)
    monkeypatch.setattr(low_latency_combine, make, wrong)
    assert fails_under_some_seed(lambda seed: exchange_ahead(seed, hidden=256, use_fp8_combine=True))


@simulated
def test_a_combine_that_does_not_wait_for_all_ranks_is_rejected(monkeypatch):
    right = "wait_number(ctx, tid, number, STARTED, tid, int32(-1))"
    wrong = changed_maker(low_latency_combine, "make_low_latency_combine", low_latency_combine, right, "pass")
    monkeypatch.setattr(low_latency_combine, "make_low_latency_combine", wrong)
    assert fails_under_some_seed(combine_ahead)
