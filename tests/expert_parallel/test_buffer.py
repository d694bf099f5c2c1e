"""Buffer: dispatch and combine between the ranks of one process, in the simulator or on GPUs, against the reference."""

import contextlib
import inspect
from functools import cache

import numpy as np
import pytest
import torch
from helpers.expert_parallel import (
    FP8,
    HIDDEN,
    NUM_BYTES,
    SCALE,
    SHORT_TIMEOUT,
    SMALL,
    WIDE,
    bitwise_equal,
    check_combined,
    check_received,
    engine,
    fails_under_some_seed,
    make_inputs,
    reference_dispatch,
    refused,
    run,
    send,
    to_device,
)
from helpers.wrong_kernels import changed
from numba import cuda, int32

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, Config
from moe_numba.expert_parallel.common.buffer_layout import (
    BARRIER_COUNT,
    MAX_CHANNELS,
    NOTIFY_COUNTS,
    buffer_layout,
    sent_counters,
)
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.expert_parallel.ranks.rank_state import RankState
from moe_numba.expert_parallel.rings import (
    bulk_pipeline,
    combine,
    dispatch,
    dispatch_call,
    notify,
    progress,
    register_pipeline,
)
from moe_numba.expert_parallel.rings.config import num_channels
from moe_numba.expert_parallel.rings.token_slot import TokenSlot
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32, ld_volatile_s32
from moe_numba.ptx.fence import fence_acq_rel_gpu

simulated = pytest.mark.skipif(not simulator.ENABLED, reason="needs the simulator's checks or its weak memory")


@pytest.fixture(autouse=True)
def deterministic_memory():
    """Fill new memory, so that a seed of the simulator has the same effect in every run."""
    torch.use_deterministic_algorithms(simulator.ENABLED)
    yield
    torch.use_deterministic_algorithms(False)


CASES = {
    "one rank": ([5], {}),
    "two": ([7, 9], {}),
    "three": ([4, 0, 6], {}),
    "four": ([3, 5, 2, 4], {}),
    "eight": ([3, 5, 2, 4, 1, 0, 3, 2], {}),
    "no tokens": ([0, 0], {}),
    "all to one": ([8, 5], dict(only=1)),
    "scales": ([6, 3], dict(fp8=True)),
    "many experts": ([5, 4], dict(topk=5, experts_per_rank=3)),
    "narrow": ([9, 7], dict(hidden=8)),
    "long": ([2, 1], dict(hidden=2304)),  # more than one iteration of a warp's reduction
    "many scales": ([2, 1], dict(fp8=True, hidden=512)),
}


@pytest.mark.parametrize("name", [n for n in CASES if n != "eight" or not simulator.ENABLED])
@pytest.mark.parametrize("uses_tma, seed", [(None, 0), (None, 1), (False, 0)], indirect=["uses_tma"])
def test_dispatch_and_combine(name, uses_tma, seed):
    """Results of dispatch, of a dispatch with its handle, and of combine with weights and biases."""
    num_tokens, options = CASES[name]
    inputs = make_inputs([SCALE * n for n in num_tokens], seed, **options)
    ranks, hidden = len(num_tokens), options.get("hidden", HIDDEN)
    right, generator = reference_dispatch(inputs), torch.Generator().manual_seed(seed)
    y = [torch.randn(len(r.src_idx), hidden, generator=generator).bfloat16() for r in right]
    biases = [
        tuple(torch.randn(len(idx), hidden, generator=generator).bfloat16() for _ in range(seed + 1))
        for idx in inputs.topk_idx
    ]

    def work(buffer, rank):
        device = buffer.transport.device
        given = send(buffer, rank, inputs)
        check_received(given, right[rank], rank, inputs.experts // ranks)
        handle, x = given[4], to_device(device, inputs.x[rank])
        again = buffer.dispatch(x, handle=handle, config=SMALL)
        assert bitwise_equal(to_device("cpu", again[0]), right[rank].x) and again[1] is None and again[3] == []
        bias = to_device(device, biases[rank])
        back = buffer.combine(y[rank].to(device), handle, given[2], bias if seed else bias[0], config=SMALL)
        return back[:2]

    given = run(ranks, work, seed)
    check_combined(given, inputs, right, y, [r.topk_weights for r in right], biases)


def test_consecutive_calls_with_other_sizes_dtypes_and_configs(uses_tma):
    """On one buffer; each combine runs twice and returns each token times the number of its ranks."""
    all_inputs = [
        make_inputs([6 * SCALE, 8 * SCALE], 0),
        make_inputs([3 * SCALE, 1], 1, fp8=True),
        make_inputs([5 * SCALE, 7 * SCALE], 2, topk=1, hidden=16),
    ]

    def work(buffer, rank):
        for i, inputs in enumerate([*all_inputs, all_inputs[0]]):
            config = (SMALL, WIDE)[i % 2]
            given = send(buffer, rank, inputs, config)
            check_received(given, reference_dispatch(inputs)[rank], rank, inputs.experts // 2)
            values = given[0][0] if isinstance(given[0], tuple) else given[0]
            x, x_home = values.float().bfloat16(), to_device("cpu", inputs.x[rank])
            x_home = (x_home[0] if isinstance(x_home, tuple) else x_home).float()
            copies = given[4][4].sum(1, keepdim=True).cpu()
            for _ in range(2):
                out = buffer.combine(x, given[4], config=config)[0]
                assert torch.equal(out.cpu(), (x_home * copies).bfloat16())

    run(2, work)


def test_two_buffers_interleaved():
    inputs = make_inputs([5 * SCALE, 6 * SCALE])
    right = reference_dispatch(inputs)

    def work(transport):
        buffers = [Buffer(transport, NUM_BYTES) for _ in range(2)]
        for _ in range(2):
            given = [send(buffer, transport.rank, inputs) for buffer in buffers]
            for each in given:
                check_received(each, right[transport.rank], transport.rank, inputs.experts // 2)
            backs = [b.combine(each[0], each[4], config=SMALL)[0] for b, each in zip(buffers, given, strict=True)]
            assert bitwise_equal(*backs)
        for buffer in buffers:
            buffer.destroy()

    with engine(3):
        LocalGroup(2).run(work)


def test_num_worst_tokens(uses_tma):
    """The host receives no counts; padding rows have no expert."""
    inputs = make_inputs([5 * SCALE, 4 * SCALE])
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        given = send(buffer, rank, inputs, num_worst_tokens=12 * SCALE)
        check_received(given, right[rank], rank, inputs.experts // 2, rows=12 * SCALE)
        return buffer.combine(given[0], given[4], given[2], config=SMALL)[:2]

    y = [r.x for r in right]
    check_combined(run(2, work), inputs, right, y, [r.topk_weights for r in right])


def test_expert_alignment():
    inputs = make_inputs([7, 5])
    given = run(2, lambda buffer, rank: send(buffer, rank, inputs, expert_alignment=8)[3])
    right = reference_dispatch(inputs)
    assert given == [[-(-int((r.topk_idx == e).sum()) // 8) * 8 for e in range(2)] for r in right]


def test_invalid_experts_are_ignored():
    """Values outside the range are treated as -1, however large they are."""
    inputs = make_inputs([6, 5])
    invalid = torch.tensor([-7, 4, 1 << 31, (1 << 32) + 1, -(1 << 33)])
    with_invalid = inputs._replace(topk_idx=[idx.where(idx >= 0, invalid[i]) for i, idx in enumerate(inputs.topk_idx)])
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        check_received(send(buffer, rank, with_invalid), right[rank], rank, inputs.experts // 2)

    run(2, work)


def test_events(uses_tma):
    """A call with async_finish returns an event; `capture` records one."""
    inputs = make_inputs([5 * SCALE, 6 * SCALE])
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        before = Buffer.capture()
        given = send(buffer, rank, inputs, previous_event=before, async_finish=True, allocate_on_comm_stream=True)
        given[5].current_stream_wait()
        check_received(given, right[rank], rank, inputs.experts // 2)
        with buffer.combine(given[0], given[4], async_finish=True, config=SMALL)[2]:
            pass
        with pytest.raises(ValueError, match="has no event"):
            buffer.combine(given[0], given[4], config=SMALL)[2].current_stream_wait()

    run(2, work)


def test_ranks_may_synchronise_differently_often():
    """A rank is not late because it waits for its own work, or for the host of another, more often than the others."""
    inputs = make_inputs([4, 4, 4])
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        for _ in range(3 * rank):
            buffer.get_dispatch_layout(to_device(buffer.transport.device, inputs.topk_idx[rank]), inputs.experts)
        given = send(buffer, rank, inputs)
        check_received(given, right[rank], rank, 2)
        for _ in range(2 - rank):
            buffer.check(synchronize=True)
        buffer.combine(given[0], given[4], config=SMALL, async_finish=rank == 0)
        buffer.transport.gather(None)
        buffer.check(synchronize=True)

    run(3, work)


# Errors are reported


def test_a_rank_that_does_not_dispatch():
    """The other ranks raise an error that names it, and their buffers can no longer be used."""
    inputs = make_inputs([4, 4, 4])

    def work(buffer, rank):
        if rank == 1:
            return
        with pytest.raises(TimeoutError, match="notify: rank [02] waited for the counts of rank 1"):
            send(buffer, rank, inputs)
        with pytest.raises(TimeoutError, match="can no longer be used"):
            send(buffer, rank, inputs)

    run(3, work, timeout=SHORT_TIMEOUT)


@pytest.mark.intended_races("after an abort, a CTA overwrites rows that others may still write")
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_rank_that_stops_after_dispatch(operation, uses_tma):
    inputs = make_inputs([6 * SCALE, 6 * SCALE])

    def work(buffer, rank):
        given = send(buffer, rank, inputs)
        if rank == 0:
            if operation == "dispatch":
                buffer.dispatch(to_device(buffer.transport.device, inputs.x[rank]), handle=given[4], config=SMALL)
            else:
                buffer.combine(given[0], given[4], config=SMALL)
            if not simulator.ENABLED:
                torch.cuda.synchronize()
            with pytest.raises(TimeoutError, match=r"(dispatch|combine|barrier): rank 0.* rank 1"):
                send(buffer, rank, inputs)

    run(2, work, timeout=SHORT_TIMEOUT)


def test_inconsistent_counts():
    inputs = make_inputs([4, 4])

    def work(buffer, rank):
        device = buffer.transport.device
        x, idx = to_device(device, inputs.x[rank]), to_device(device, inputs.topk_idx[rank])
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, inputs.experts)
        with pytest.raises(ValueError, match="num_tokens_per_rank has"):
            buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank + 1,
                num_tokens_per_expert=per_expert,
                is_token_in_rank=is_in_rank,
                config=SMALL,
            )

    run(2, work, timeout=SHORT_TIMEOUT)


@pytest.mark.intended_races("after an abort, several CTAs overwrite the same rows")
@pytest.mark.parametrize("options", [{}, dict(num_worst_tokens=8)])
@pytest.mark.parametrize("count", [-5, 4 * 32 + 1, (1 << 31) - 1])
def test_impossible_counts_of_experts(count, options):
    """4 tokens have at most 4 * 32 experts. All ranks raise an error, in that call or in the next one."""
    inputs = make_inputs([4, 4])

    def work(buffer, rank):
        device = buffer.transport.device
        x, idx = to_device(device, inputs.x[rank]), to_device(device, inputs.topk_idx[rank])
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, inputs.experts)
        layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=is_in_rank, config=SMALL, **options)
        per_expert[1] = 4 * 32
        buffer.dispatch(x, num_tokens_per_expert=per_expert, **layout)
        if rank == 0:
            per_expert[3] = count
        sentence = f"on rank 0 num_tokens_per_expert has {count} tokens for an expert of rank 1; it must be 0 to 128"
        with pytest.raises(ValueError, match=sentence):
            buffer.dispatch(x, num_tokens_per_expert=per_expert, **layout)
            buffer.check(synchronize=True)
        refused(ValueError, sentence, buffer.check)

    run(2, work, timeout=SHORT_TIMEOUT)


@pytest.mark.intended_races("after an abort, several CTAs overwrite the same rows")
def test_more_rows_than_num_worst_tokens():
    inputs = make_inputs([9, 9], only=0)

    def work(buffer, rank):
        send(buffer, rank, inputs, num_worst_tokens=2)
        if not simulator.ENABLED:
            torch.cuda.synchronize()
        with pytest.raises(ValueError, match="rank 0 receives .* tokens; the output has 2 rows"):
            send(buffer, rank, inputs)

    run(2, work, timeout=SHORT_TIMEOUT)


def repeated_dispatch(monkeypatch):
    """Dispatch more rows than after the last call are expected; return whether the kernel was launched again."""
    inputs, launched = make_inputs([24 * SCALE]), []

    def work(buffer, rank):
        buffer.transport.can_repeat = True
        run_before = dispatch_call.DispatchCall.run

        def run_and_count(exchange, runtime, channels, start, call):
            def started(*arguments):
                send_head, can_repeat = arguments[-3], arguments[-1]
                launched.append(can_repeat)
                if simulator.ENABLED and not can_repeat:
                    assert (send_head.array.view(np.int32) == np.iinfo(np.int32).max).all(), "written before"
                start(*arguments)

            started.is_loaded = start.is_loaded
            return run_before(exchange, runtime, channels, started, call)

        send(buffer, rank, inputs)
        buffer._runtime._rows_per_token /= 4
        with monkeypatch.context() as patch:
            patch.setattr(dispatch_call.DispatchCall, "run", run_and_count)
            given = send(buffer, rank, inputs)
        check_received(given, reference_dispatch(inputs)[rank], rank, inputs.experts)

    run(1, work)
    return launched == [1, 0]


def test_more_rows_than_expected(monkeypatch):
    assert repeated_dispatch(monkeypatch)


def test_invalid_arguments():
    inputs = make_inputs([4, 4])

    def work(buffer, rank):
        device = buffer.transport.device
        x, idx, weights = (to_device(device, part[rank]) for part in inputs[:3])
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, inputs.experts)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
        given = buffer.dispatch(x, **layout, config=SMALL)
        handle = given[4]

        refused(TypeError, "x is torch.float32", buffer.dispatch, x.float(), **layout)
        refused(ValueError, "rows of 6 bytes", buffer.dispatch, x[:, :3].contiguous(), **layout)
        refused(ValueError, "x has shape", buffer.dispatch, x[:, ::2], **layout)
        refused(TypeError, "x's scales are", buffer.dispatch, (x.to(FP8), x), **layout)
        refused(ValueError, "x's scales have shape", buffer.dispatch, (x.to(FP8), x.float()), **layout)
        refused(TypeError, "num_tokens_per_rank is NoneType", buffer.dispatch, x)
        refused(ValueError, "given together", buffer.dispatch, x, **layout, topk_idx=idx)
        refused(ValueError, "with a handle", buffer.dispatch, x, handle, topk_idx=idx, topk_weights=weights)
        refused(ValueError, "with a handle", buffer.dispatch, x, handle, **layout)
        refused(ValueError, "x is a tuple of 3", buffer.dispatch, (x, x, x), **layout)
        refused(TypeError, "config is 24", buffer.dispatch, x, **layout, config=24)
        refused(TypeError, "config is 24", buffer.combine, given[0], handle, config=24)
        refused(ValueError, "offset is -4", buffer.get_local_buffer_tensor, torch.int32, offset=-4)
        refused(TypeError, "dtype is 'f32'; it must be a torch.dtype", buffer.get_local_buffer_tensor, "f32")
        refused(TypeError, "size is 5; it must be a tuple", buffer.get_local_buffer_tensor, torch.int32, 5)
        refused(
            ValueError, r"size\[0\] is -1; it must be 0 or more", buffer.get_local_buffer_tensor, torch.int32, (-1,)
        )
        refused(
            TypeError, r"size\[1\] is 2.0; it must be an int", buffer.get_local_buffer_tensor, torch.int32, (2, 2.0)
        )
        for name in ("async_finish", "allocate_on_comm_stream"):
            refused(TypeError, f"{name} is 'yes'", buffer.combine, given[0], handle, config=SMALL, **{name: "yes"})
            refused(TypeError, f"{name} is 'yes'", buffer.get_dispatch_layout, idx, inputs.experts, **{name: "yes"})
        refused(ValueError, "x has 2 tokens; handle is from a dispatch of 4", buffer.dispatch, x[:2], handle)
        refused(TypeError, "tuple of 6", buffer.dispatch, x, handle[:5])
        number = handle[0][0, 0]  # a 0-d tensor
        refused(ValueError, "has 0 channels", buffer.dispatch, x, (handle[0], number, *handle[2:]))
        refused(ValueError, "recv_src_idx has shape", buffer.dispatch, x, (*handle[:3], number, *handle[4:]))
        refused(ValueError, "is_token_in_rank has shape", buffer.combine, given[0], (*handle[:5], number))
        refused(
            ValueError, "topk_idx has shape", buffer.dispatch, x, **layout, topk_idx=number.long(), topk_weights=weights
        )
        wide = torch.zeros(2, MAX_CHANNELS + 1, dtype=torch.int32, device=device)
        refused(ValueError, "has 1057 channels; 1 to 1056", buffer.dispatch, x, (handle[0], wide, wide, *handle[3:]))
        refused(ValueError, "allocate_on_comm_stream needs", buffer.dispatch, x, **layout, allocate_on_comm_stream=True)
        refused(ValueError, "expert_alignment is 0", buffer.dispatch, x, **layout, expert_alignment=0)
        small = Buffer(buffer.transport, 1 << 12)
        refused(ValueError, "num_nvl_bytes is too small", small.dispatch, x, **layout, config=Config(132, 6, 4096))
        small.destroy()
        refused(RuntimeError, "was destroyed", small.get_local_buffer_tensor, torch.int32)
        refused(ValueError, "x has .* rows; the handle", buffer.combine, given[0][:-1], handle)
        refused(ValueError, "bias has 3", buffer.combine, given[0], handle, bias=(x, x, x))
        refused(ValueError, "bias 0 has shape", buffer.combine, given[0], handle, bias=x[:-1])
        refused(
            TypeError,
            "topk_weights is torch.float64",
            buffer.combine,
            given[0],
            handle,
            torch.zeros(len(given[0]), 2, dtype=torch.float64, device=device),
        )

    run(2, work)


OTHER_LAYOUTS = {  # a change of the layout's tensors, and what differs first
    "of other experts": (
        lambda rank, expert, token: (rank.flip(0), expert.flip(0), token.flip(1)),
        "is_token_in_rank is",
    ),
    "of another order": (
        lambda rank, expert, token: (rank, expert, token.roll(1, 0)),
        "is_token_in_rank is .* token 0",
    ),
    "experts": (
        lambda rank, expert, token: (rank, expert.roll(1), token),
        "num_tokens_per_expert is 1 for expert 0; by topk_idx it is 2",
    ),
    "fewer experts": (lambda rank, expert, token: (rank, expert[:2], token), "is_token_in_rank is .* for token 1; by"),
    "ranks": (lambda rank, expert, token: (rank + 1, expert, token), "num_tokens_per_rank is 3 for rank 0; by"),
}


@simulated
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_a_layout_of_another_batch_is_refused(name):
    """On a GPU nothing reads the tensors before the kernel, which does not compare them."""
    change, sentence = OTHER_LAYOUTS[name]
    names = "num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"

    def work(buffer, rank):
        x, idx = torch.zeros(3, HIDDEN).bfloat16(), torch.tensor([[0, -1], [0, 1], [3, 99]])
        weights, (per_rank, _, per_expert, is_in_rank, _) = torch.ones(3, 2), buffer.get_dispatch_layout(idx, 4)
        for options in (dict(num_worst_tokens=6), {}):
            layout = dict(zip(names, change(per_rank, per_expert, is_in_rank), strict=True))
            wanted = f"{sentence}.*num_tokens_per_rank, num_tokens_per_expert and is_token_in_rank must be the layout"
            options |= dict(topk_idx=idx, topk_weights=weights, config=SMALL)
            refused(ValueError, wanted, buffer.dispatch, x, **layout, **options)

    run(2, work)


@simulated
def test_a_layout_that_is_not_computed_yet_is_not_compared():
    """Its kernel is queued behind another one of the rank."""
    inputs = make_inputs([4, 4])

    def work(buffer, rank):
        given = send(buffer, rank, inputs)
        buffer.combine(given[0], given[4], config=SMALL, async_finish=True)
        x, idx, weights = (part[rank] for part in inputs[:3])
        layout = buffer.get_dispatch_layout(idx, inputs.experts, async_finish=True)
        names = "num_tokens_per_rank", None, "num_tokens_per_expert", "is_token_in_rank"
        layout = {name: tensor for name, tensor in zip(names, layout, strict=False) if name}
        return buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights, config=SMALL)

    for rank, given in enumerate(run(2, work)):
        check_received(given, reference_dispatch(inputs)[rank], rank, 2)


def test_tensors_that_require_grad():
    """Their gradients would be lost; without grad mode, as in an autograd.Function, they are accepted."""
    inputs = make_inputs([4])

    def work(buffer, rank):
        device = buffer.transport.device
        x, idx, weights = (to_device(device, part[rank]) for part in inputs[:3])
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, inputs.experts)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
        options = dict(topk_idx=idx, config=SMALL) | layout
        rows, _, received, _, handle, _ = buffer.dispatch(x, topk_weights=weights, **options)
        wants = lambda tensor: tensor.clone().requires_grad_()
        for name, call in (
            ("x", lambda: buffer.dispatch(wants(x), topk_weights=weights, **options)),
            ("x's scales", lambda: buffer.dispatch((x.to(FP8), wants(x.float())[:, :1]), **layout, config=SMALL)),
            ("topk_weights", lambda: buffer.dispatch(x, topk_weights=wants(weights), **options)),
            ("x", lambda: buffer.combine(wants(rows), handle, config=SMALL)),
            ("topk_weights", lambda: buffer.combine(rows, handle, wants(received), config=SMALL)),
            ("bias 1", lambda: buffer.combine(rows, handle, bias=(x, wants(x)), config=SMALL)),
        ):
            refused(ValueError, f"{name} requires grad; Buffer has no backward: use torch.no_grad", call)
            with torch.no_grad():
                call()

    run(1, work)


def test_config():
    assert Config(24, 6, 28).num_max_nvl_chunked_recv_tokens == 28
    for wrong, error in [((3,), "num_sms is 3"), ((0,), "num_sms is 0"), ((134,), "num_sms is 134")]:
        with pytest.raises(ValueError, match=error):
            Config(*wrong)
    with pytest.raises(ValueError, match="recv_tokens is 27; with chunks of 6 it must be 28 or more"):
        Config(24, 6, 27)
    with pytest.raises(ValueError, match="send_tokens is 0"):
        Config(24, 0, 256)
    with pytest.raises(TypeError, match="num_sms is 2.5"):
        Config(2.5)
    hint = Config(4, 2, 64).get_nvl_buffer_size_hint(2 * HIDDEN, 2)
    assert hint % 256 == 0 and hint > 0


def test_invalid_buffer_arguments():
    def work(transport):
        for wrong, error in [(dict(num_nvl_bytes=0), "num_nvl_bytes is 0"), (dict(num_rdma_bytes=1), "rdma_bytes")]:
            with pytest.raises(ValueError, match=error):
                Buffer(transport, **wrong)
        refused(TypeError, "timeout is '9'", Buffer, transport, 256, timeout="9")
        refused(TypeError, "timeout is True", Buffer, transport, 256, timeout=True)
        for name in ("low_latency_mode", "enable_shrink"):
            refused(TypeError, f"{name} is 'no'; it must be True or False", Buffer, transport, 256, **{name: "no"})
        for seconds in (0, -1.0, float("inf"), float("nan")):
            refused(ValueError, "timeout is", Buffer, transport, 256, timeout=seconds)

    LocalGroup(1).run(work)


def test_buffers_of_different_sizes_are_refused():
    """Rows would be written beyond the end of the smaller one."""

    def work(transport):
        refused(
            ValueError,
            "num_nvl_bytes is 256 on rank 0 and 512 on rank 1",
            Buffer,
            transport,
            256 * (1 + transport.rank),
        )

    LocalGroup(2).run(work)


def exchange_through_rings_of_one_slot(seed):
    """Dispatch and combine; a sender must publish a row before it waits for that row's slot."""
    ranks, tokens = (2, [9, 14]) if simulator.ENABLED else (4, [900, 1400, 1, 640])
    config = SMALL if simulator.ENABLED else Config(24, 6, 28)
    inputs = make_inputs(tokens, seed)
    right, channels = reference_dispatch(inputs), num_channels(config.num_sms, ranks, 2 * HIDDEN)
    stride = max(TokenSlot(HIDDEN // 2, 0, 2).stride, TokenSlot(HIDDEN // 2, 2, has_src_idx=False).stride)
    least = 2 * 4 * channels * ranks * stride

    def work(transport):
        buffer, rank = Buffer(transport, least, timeout=4e-3 if simulator.ENABLED else 100), transport.rank
        given = send(buffer, rank, inputs, config)
        check_received(given, right[rank], rank, inputs.experts // ranks)
        out = buffer.combine(given[0], given[4], given[2], config=config)[:2]
        buffer.destroy()
        return out

    with engine(seed):
        given = LocalGroup(ranks).run(work)
    check_combined(given, inputs, right, [r.x for r in right], [r.topk_weights for r in right])


@pytest.mark.parametrize("uses_tma, seed", [(None, 0), (None, 1), (False, 0)], indirect=["uses_tma"])
def test_rings_of_one_slot(uses_tma, seed):
    exchange_through_rings_of_one_slot(seed)


@pytest.mark.parametrize("first", [(1 << 31) - 2, -2], ids=["int32", "uint32"])
def test_counters_wrap_around(first):
    """Sequence numbers, heads and tails start two below the number after which they wrap around."""
    all_inputs = [make_inputs([6 * SCALE, 5 * SCALE], seed) for seed in range(3)]

    def work(buffer, rank):
        runtime, layout = buffer._runtime, buffer_layout(2)
        runtime._local[layout.notify_flags : layout.counts] = first
        runtime._local[layout.ring_flags : layout.rings] = first
        runtime._state[BARRIER_COUNT] = first
        runtime._state[NOTIFY_COUNTS : NOTIFY_COUNTS + 3] = first
        runtime._state[sent_counters(False) :] = first
        runtime.synchronize()
        buffer.transport.gather(None)
        for i, inputs in enumerate(all_inputs):
            config = (SMALL, WIDE)[i % 2]  # other channels: a barrier before and after
            given = send(buffer, rank, inputs, config)
            check_received(given, reference_dispatch(inputs)[rank], rank, inputs.experts // 2)
            x, copies = inputs.x[rank].float(), given[4][4].sum(1, keepdim=True).cpu()
            assert torch.equal(buffer.combine(given[0], given[4], config=config)[0].cpu(), (x * copies).bfloat16())
        assert runtime._state[NOTIFY_COUNTS] == (first + 3 + (1 << 31)) % (1 << 32) - (1 << 31)

    run(2, work)


def test_a_handle_works_with_any_config():
    """The handle determines the number of channels; some warp takes each of them."""
    inputs = make_inputs([13 * SCALE, 8 * SCALE])
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        given = send(buffer, rank, inputs, WIDE)
        x = to_device(buffer.transport.device, inputs.x[rank])
        for config in (SMALL, WIDE):
            assert bitwise_equal(buffer.dispatch(x, given[4], config=config)[0], right[rank].x)
        return buffer.combine(given[0], given[4], given[2], config=SMALL)[:2]

    check_combined(run(2, work), inputs, right, [r.x for r in right], [r.topk_weights for r in right])


# Wrong kernels must be rejected


MAKE = {dispatch: "make_dispatch", combine: "make_combine"}


@simulated
def test_a_kernel_that_continues_with_more_rows_than_expected_is_rejected(monkeypatch):
    wrong = changed(dispatch, "can_repeat != 0 and received > num_recv_rows", "False")["make_dispatch"]
    monkeypatch.setattr(dispatch, "make_dispatch", wrong)
    with pytest.raises((AssertionError, simulator.SimulatorError)):
        repeated_dispatch(monkeypatch)


@pytest.fixture
def change(monkeypatch):
    """``change(module, right, wrong)`` replaces a passage in the source of a kernel."""

    def change(module, right, wrong):
        monkeypatch.setattr(module, MAKE[module], changed(module, right, wrong)[MAKE[module]])

    return change


@simulated
@pytest.mark.parametrize("wait", ["pipeline.wait_all()", "pipeline.wait_all_but_one()"])
@pytest.mark.parametrize("module", MAKE, ids=MAKE.values())
def test_rows_that_are_published_before_their_bulk_copies_end_are_rejected(module, wait, change):
    change(module, wait, "pass")
    assert fails_under_some_seed()


class WithoutSyncwarp:
    """The ``cuda`` module of a kernel in which the lanes of a warp do not wait for one another."""

    def __getattr__(self, name):
        return getattr(cuda, name) if name != "syncwarp" else lambda: None


FAULTS = {
    "a staging buffer is overwritten before it is stored": (bulk_pipeline, "wait_read", lambda: None),
    "dispatch polls without acquire": (dispatch, "ld_acquire_sys_s32", "relaxed"),
    "combine polls without acquire": (combine, "ld_acquire_sys_s32", "relaxed"),
    "notify polls without acquire": (notify, "ld_acquire_sys_s32", "relaxed"),
    "notify stores without release": (notify, "st_release_sys_s32", "relaxed store"),
}
FAULTS_WITHOUT_TMA = {
    "dispatch polls without acquire": (dispatch, "ld_acquire_sys_s32", "relaxed"),
    "combine polls without acquire": (combine, "ld_acquire_sys_s32", "relaxed"),
    "a tail is published without a fence": (progress, "fence_acq_rel_sys", lambda: None),
    "lanes do not wait for one another": (register_pipeline, "cuda", WithoutSyncwarp()),
}


def is_rejected(monkeypatch, module, name, fault):
    from moe_numba.ptx import atomics

    known = {"relaxed": atomics.ld_relaxed_sys_s32, "relaxed store": atomics.st_relaxed_sys_s32}
    monkeypatch.setattr(module, name, known.get(fault, fault))
    return fails_under_some_seed()


@simulated
@pytest.mark.parametrize("name", FAULTS)
def test_wrong_kernels_are_rejected(monkeypatch, name):
    assert is_rejected(monkeypatch, *FAULTS[name])


@simulated
@pytest.mark.parametrize("name", FAULTS_WITHOUT_TMA)
def test_wrong_kernels_without_tma_are_rejected(monkeypatch, name):
    monkeypatch.setattr(Buffer, "_uses_tma", False)
    assert is_rejected(monkeypatch, *FAULTS_WITHOUT_TMA[name])


@simulated
@pytest.mark.parametrize(
    "module, right, wrong",
    [
        (dispatch, "has_ring and selected and uint32(tail - head) >= capacity", "False"),
        (combine, "rows_left > 0 and uint32(tail - head) < capacity", "rows_left > 0"),
    ],
    ids=MAKE.values(),
)
def test_slots_that_are_overwritten_before_they_are_read_are_rejected(module, right, wrong, uses_tma, change):
    change(module, right, wrong)
    assert fails_under_some_seed(exchange_through_rings_of_one_slot)


@simulated
@pytest.mark.parametrize(
    "uses_tma, module, right, wrong",
    [
        (
            None,
            dispatch,
            "pipeline.fence_acquired()\n                            for s",
            "pipeline.fence_acquired()\n                            if arrived > 0:\n"
            "                                post_progress(smem_u64, progress_slot, channel, head + uint32(arrived))\n"
            "                            for s",
        ),
        (
            False,
            combine,
            "                        cuda.syncwarp()  # makes",
            "                        if has_ring and position >= 0:\n"
            "                            post_progress(smem_u64, progress_slot, channel, wanted + uint32(1))\n"
            "                        cuda.syncwarp()  # makes",
        ),
    ],
    ids=MAKE.values(),
    indirect=["uses_tma"],
)
def test_slots_that_are_released_before_they_are_read_are_rejected(module, right, wrong, uses_tma, change):
    change(module, right, wrong)
    assert fails_under_some_seed(exchange_through_rings_of_one_slot)


# Counts that a rank still reads must not be overwritten by a rank that runs ahead.

_FREE_STATE_WORD = 16


def two_notifies(make_notify):
    """Return a maker of a kernel that is like two in one stream: a rank starts the second one when its first ends.

    The second one has no tokens, and what it computes goes nowhere.
    """

    @cache
    def make(num_ranks, threads):
        notify_once = make_notify(num_ranks, threads)

        @cuda.jit
        def notify_twice(*arguments):
            notify_once(*arguments)
            state, none, computed = arguments[2], cuda.shared.array(256, int32), cuda.shared.array(256, int32)
            for i in range(cuda.threadIdx.x, 256, threads):
                none[i] = 0
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:  # wait for this rank's other CTAs
                fence_acq_rel_gpu()
                atom_add_relaxed_gpu_s32(state, _FREE_STATE_WORD, 1)
                while ld_volatile_s32(state, _FREE_STATE_WORD) < num_ranks + 1:
                    pass
                fence_acq_rel_gpu()
            cuda.syncthreads()
            inputs, outputs = (none, none, none, int32(0)), (computed, computed, computed, computed, int32(0))
            notify_once(*arguments[:6], *inputs, *arguments[10:14], *outputs, *arguments[19:])

        return notify_twice

    return make


def dispatch_after_two_notifies(seed):
    inputs = make_inputs([7, 9])
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        check_received(send(buffer, rank, inputs), right[rank], rank, inputs.experts // 2)

    run(2, work, seed)


@simulated
@pytest.mark.parametrize("seed", range(4))
def test_counts_are_not_overwritten_while_they_are_read(seed, monkeypatch):
    monkeypatch.setattr(notify, "make_notify_dispatch", two_notifies(notify.make_notify_dispatch))
    dispatch_after_two_notifies(seed)


@simulated
def test_a_single_buffer_for_counts_is_rejected(monkeypatch):
    wrong = changed(notify, "(sequence & 1)", "(sequence & 0)")["make_notify_dispatch"]
    monkeypatch.setattr(notify, "make_notify_dispatch", two_notifies(wrong))
    assert fails_under_some_seed(dispatch_after_two_notifies)


# Rows that the receiver has not consumed must not be overwritten. In the simulator the seed chooses a late rank.


def late_rank_receives_its_rows(then, seed=0):
    """Rank 0 dispatches twice, with other ring slots, before rank 1 starts: return whether rank 1's rows are right."""
    config = Config(2, 6, 28) if simulator.ENABLED else Config(4, 6, 1024)  # rings with a slot for every row
    inputs = make_inputs([9 if simulator.ENABLED else 200, 1], only=1)
    right = reference_dispatch(inputs)[1].x
    columns = HIDDEN // 2 if then == "shorter rows" else HIDDEN

    def work(buffer, rank):
        x = to_device(buffer.transport.device, inputs.x[rank])
        other = WIDE if then == "more channels" else config
        handles = [send(buffer, rank, inputs, c)[4] for c in (config, other)]
        received = []
        for i in range(1, 2 if simulator.ENABLED else 5):
            if rank == 1 and not simulator.ENABLED:
                torch.cuda._sleep(20_000_000)  # about ten milliseconds
            # In the simulator a call runs its kernels before it returns, unless the caller waits for an event.
            options = dict(async_finish=simulator.ENABLED)
            first = buffer.dispatch(x * i, handles[0], config=config, **options)
            second = buffer.dispatch((x * -i)[:, :columns].contiguous(), handles[1], config=other, **options)
            received += [(first[0], right * i), (second[0], (right * -i)[:, :columns])]
        if simulator.ENABLED:
            second[5].current_stream_wait()
        return received

    try:
        return all(bitwise_equal(*pair) for pair in run(2, work, seed, timeout=3)[1])
    except (TimeoutError, simulator.SimulatorError):
        return False


LATE_SEEDS = (5, 7) if simulator.ENABLED else (0,)  # these let rank 1 be late


@pytest.mark.parametrize("then", ["shorter rows", "more channels"])
def test_rows_of_a_late_rank_are_not_overwritten(then):
    assert all(late_rank_receives_its_rows(then, seed) for seed in LATE_SEEDS)


def test_a_sender_that_does_not_wait_for_an_empty_ring_is_rejected(monkeypatch):
    right, wrong = "capacity = uint32(1)", "capacity = uint32(slots)"
    assert inspect.getsource(dispatch).count(right) == 1
    monkeypatch.setattr(dispatch, "make_dispatch", changed(dispatch, right, wrong)["make_dispatch"])
    assert not all(late_rank_receives_its_rows("shorter rows", seed) for seed in LATE_SEEDS)


def test_missing_barriers_after_a_change_of_channels_are_rejected(monkeypatch):
    monkeypatch.setattr(RankState, "with_barriers_if_layout_changed", lambda *_: contextlib.nullcontext())
    assert not all(late_rank_receives_its_rows("more channels", seed) for seed in LATE_SEEDS)
