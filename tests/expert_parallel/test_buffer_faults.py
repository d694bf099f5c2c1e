"""Faults across ranks: calls that differ, lost and late peers, corrupted handles, captures, and compilers that wait."""

import contextlib

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
    check_received,
    engine,
    make_inputs,
    new_output,
    reference_dispatch,
    refused,
    run,
    send,
    to_device,
)
from helpers.wrong_kernels import changed
from numba import cuda

from moe_numba import prepare, simulator
from moe_numba.expert_parallel import Buffer, Config
from moe_numba.expert_parallel.common import poison, timeout
from moe_numba.expert_parallel.common.buffer_layout import ABORT_FLAG
from moe_numba.expert_parallel.ranks import rank_state
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.expert_parallel.ranks.rank_state import RankState
from moe_numba.expert_parallel.rings import channels, combine, dispatch, dispatch_direct, notify
from moe_numba.ptx import intrinsic

simulated = pytest.mark.skipif(not simulator.ENABLED, reason="depends on the simulator's order of events")

pytestmark = pytest.mark.intended_races("after an abort, a CTA overwrites rows that others may still write")


def synchronize():
    if not simulator.ENABLED:
        torch.cuda.synchronize()


# Calls that differ across ranks


def call(buffer, rank, inputs, **options):
    """Dispatch tokens of any kind; ``inputs`` may be without experts."""
    device = buffer.transport.device
    options = {"config": SMALL, "topk": True, "experts": inputs.experts, **options}
    experts, topk, x = options.pop("experts"), options.pop("topk"), to_device(device, inputs.x[rank])
    if scale_dtype := options.pop("scale_dtype", None):
        x = x[0], x[1].to(scale_dtype)
    idx = inputs.topk_idx[rank].to(device)
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, experts)
    given = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
    if topk:
        given |= dict(topk_idx=idx, topk_weights=inputs.topk_weights[rank].to(device))
    return buffer.dispatch(x, **given, **options)


# What the last rank does differently: inputs and options of all ranks, then of the last one, and the error.
MISMATCHES = {
    "hidden": ({}, {}, dict(hidden=2 * HIDDEN), {}, f"hidden size is ({HIDDEN} on|{2 * HIDDEN} on)"),
    "dtype": ({}, {}, dict(fp8=True), {}, "dtype is torch.*bfloat16.*float8|dtype is torch.float8.*bfloat16"),
    "scales": (dict(fp8=True), {}, dict(fp8=True, scales=1), {}, "number of x's scales per row is"),
    "dtype of the scales": (
        dict(fp8=True),
        {},
        dict(fp8=True),
        dict(scale_dtype=torch.int32),
        "dtype of x's scales is torch.(float32|int32) on rank",
    ),
    "topk_idx": ({}, {}, {}, dict(topk=False), "number of topk_idx' columns .* is [02] on"),
    "topk": ({}, {}, dict(topk=3), {}, "number of topk_idx' columns .* is [23] on"),
    "experts": ({}, {}, {}, dict(experts=12), "number of experts is"),
    "out": ({}, {}, {}, dict(out=0), "number of out .* is .* on"),
    "another out": ({}, dict(out=0), {}, dict(out=1), "number of out .* is .* on"),
    "channels": ({}, {}, {}, dict(config=Config(8, 1, 64)), "number of channels, which depends on config, is"),
    "slots": ({}, {}, {}, dict(config=Config(SMALL.num_sms, 1, 64)), "number of slots per ring, .* is"),
}


def mismatch(name, ranks, **options):
    """Dispatch on all ranks, differently on the last one; return each rank's error, or None, and its error in check."""
    of_all, options_of_all, of_last, options_of_last, _ = MISMATCHES[name]
    plain, other = (
        make_inputs([4] * ranks, **{k: v for k, v in kind.items() if k != "scales"}) for kind in (of_all, of_last)
    )
    if "scales" in of_last:
        other.x[-1] = other.x[-1][0], other.x[-1][1][:, : of_last["scales"]]

    def work(buffer, rank):
        last = rank == ranks - 1
        given = options | options_of_all | (options_of_last if last else {})
        outs = [new_output(buffer, 12 * ranks) for _ in range(2)]
        if "out" in given:
            given["out"] = outs[given["out"]]
        errors = []
        for attempt in (
            lambda: call(buffer, rank, other if last else plain, **given),
            lambda: buffer.check(synchronize=True),
        ):
            try:
                errors.append(attempt() and None)
            except (ValueError, TimeoutError) as error:
                errors.append(error)
        for out in outs:
            out.close()
        return errors

    # On a GPU long enough for a rank whose call differs to compile another layout kernel.
    return run(ranks, work, timeout=SHORT_TIMEOUT if simulator.ENABLED else 10)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MISMATCHES)
def test_calls_that_differ_across_ranks(name, ranks):
    """All ranks name the argument and both values, in that call."""
    first, later = zip(*mismatch(name, ranks), strict=True)
    for errors in (first, later):
        for error in errors:
            with pytest.raises(ValueError, match=MISMATCHES[name][-1]):
                raise error
            assert f"rank {ranks - 1}" in str(error)


@pytest.mark.parametrize("name", ["hidden", "channels"])
def test_calls_that_differ_without_a_wait_for_counts(name):
    """All ranks raise the error at the next call; here in `check`."""
    for first, later in mismatch(name, 2, num_worst_tokens=8):
        assert first is None or type(first) is ValueError
        with pytest.raises(ValueError, match=MISMATCHES[name][-1]):
            raise later


def test_a_notify_that_does_not_compare_calls_is_rejected(monkeypatch):
    wrong = changed(notify, "found != call[i] and argument < 0", "False")
    monkeypatch.setattr(notify, "make_notify_dispatch", wrong["make_notify_dispatch"])
    assert not all(type(error) is ValueError for error, _ in mismatch("experts", 2))


# Lost peers


@pytest.fixture
def unchecked(monkeypatch):
    """Calls that do not look at the status are like replays of a graph; their outputs look like stale memory."""

    def enable():
        monkeypatch.setattr(RankState, "check_alive", lambda self: None)
        zeros = torch.zeros
        monkeypatch.setattr(
            torch, "empty", lambda *size, **options: zeros(size[0] if isinstance(size[0], tuple) else size, **options)
        )

    return enable


def is_poisoned(tensor):
    """Return for each row whether all of its elements are NaN, or -1."""
    tensor = tensor.cpu()
    values = tensor.float().isnan() if tensor.dtype.is_floating_point else tensor == -1
    return values.view(len(tensor), -1).all(dim=1)


def poisoned_after_a_loss(operation, unchecked):
    """Lose rank 1 before an operation; return which rows are poisoned, and which after the same operation again.

    Each is a list with a tensor per output. Rows from rank 0 to itself may be right the first time; they are left out.
    """
    fp8, tokens = operation == "fp8", 6 * SCALE
    inputs = make_inputs([tokens, tokens], fp8=fp8)
    found = []

    def work(buffer, rank):
        out = new_output(buffer, 2 * tokens) if operation == "out" else None
        x = to_device(buffer.transport.device, inputs.x[rank])
        options = dict(out=out, num_worst_tokens=2 * tokens)
        given = send(buffer, rank, inputs, **(options if operation != "handle" else {}))
        buffer.combine(torch.zeros(len(given[4][3]), HIDDEN).bfloat16().to(x_device), given[4], config=SMALL)
        buffer.check(synchronize=True)
        if rank == 1:
            return
        unchecked()
        own = int(given[4][0][0, 0])
        with contextlib.suppress(TimeoutError):
            for first_row in (own, 0):
                if operation == "combine":
                    x_home = torch.zeros(len(given[4][3]), HIDDEN, dtype=torch.bfloat16, device=x_device)
                    outputs = buffer.combine(x_home, given[4], given[2], config=SMALL)[:2]
                    first_row = 0
                elif operation == "handle":
                    outputs = [buffer.dispatch(x, given[4], config=SMALL)[0]]
                else:
                    result = send(buffer, rank, inputs, **options)
                    values = result[0] if fp8 else (result[0],)
                    outputs = [*values, *result[1:3], result[4][3]]
                buffer.transport.wait(lambda: True, 0)
                synchronize()
                found.append([is_poisoned(output)[first_row:] for output in outputs])

    x_device = "cpu" if simulator.ENABLED else "cuda"
    run(2, work, timeout=SHORT_TIMEOUT)
    return found


OPERATIONS = ["bf16", "fp8", "out", "handle", "combine"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_outputs_are_poisoned_after_a_peer_is_lost(operation, unchecked, uses_tma):
    """Also by every later replay, at once."""
    found = poisoned_after_a_loss(operation, unchecked)
    assert len(found) == 2
    for outputs in found:
        for rows in outputs:
            assert len(rows) and rows.all()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_that_do_not_poison_are_rejected(operation, unchecked, monkeypatch):
    if not simulator.ENABLED:
        pytest.skip("compiled kernels do not look up their functions again")
    fill = poison.fill

    @cuda.jit(device=True)
    def fill_only_prefixes(pointer, count, value):
        """Without its zeros, which are no poison, later kernels would find random numbers in the prefixes."""
        if value == 0:
            fill(pointer, count, value)

    for module in (dispatch, combine, notify):
        monkeypatch.setattr(module, "fill", fill_only_prefixes)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).zero_())  # no older poison
    found = poisoned_after_a_loss(operation, unchecked)
    assert not any(outputs[0].all() for outputs in found)


def abort_in_combine(buffer, rank, inputs, **options):
    """Dispatch on both ranks, then combine on rank 0 alone."""
    given = send(buffer, rank, inputs)
    if rank == 0:
        buffer.combine(given[0], given[4], config=SMALL, **options)


def test_check_finds_an_abort_that_no_call_has_seen():
    inputs = make_inputs([6 * SCALE, 6 * SCALE])

    def work(buffer, rank):
        abort_in_combine(buffer, rank, inputs, async_finish=True)
        if rank == 0:
            if simulator.ENABLED:
                buffer.check()  # does not wait: the kernel has not run yet
            with pytest.raises(TimeoutError, match="combine: rank 0.* rank 1"):
                buffer.check(synchronize=True)
            with pytest.raises(TimeoutError, match="combine: rank 0.* rank 1"):
                buffer.check()
            with pytest.raises(TimeoutError, match="combine: rank 0.* rank 1"):
                buffer.get_dispatch_layout(to_device(buffer.transport.device, inputs.topk_idx[0]), inputs.experts)

    run(2, work, timeout=SHORT_TIMEOUT)


def test_all_ranks_learn_the_reason_of_an_abort():
    """Rank 2 waits for nothing itself: it reads the reason from the record that rank 0 wrote."""
    inputs = make_inputs([6 * SCALE, 6 * SCALE, 6 * SCALE], only=1)

    def work(buffer, rank):
        send(buffer, rank, inputs)
        buffer.transport.gather(None)
        if rank == 1:
            return None
        if rank == 0:
            with pytest.raises(TimeoutError, match="notify: rank 0 waited for the counts of rank [12]"):
                send(buffer, rank, inputs)
        buffer.transport.wait(lambda: bool(buffer._runtime._local[ABORT_FLAG]), 1000)
        with pytest.raises(TimeoutError, match="notify: rank 0 waited for the counts of rank [12]"):
            send(buffer, rank, inputs)

    run(3, work, timeout=SHORT_TIMEOUT)


def late_call(seed=0):
    """Dispatch on rank 0, and on rank 1 after rank 0 has timed out; return the error of rank 1, or None."""
    inputs = make_inputs([4, 4])

    def work(buffer, rank):
        if rank == 0:
            with pytest.raises(TimeoutError, match="rank 0 waited for the counts of rank 1"):
                send(buffer, rank, inputs)
            return None
        buffer.transport.wait(lambda: bool(buffer._runtime._local[ABORT_FLAG]), 1000)
        try:
            send(buffer, rank, inputs)
        except TimeoutError as error:
            return str(error)

    return run(2, work, seed, timeout=SHORT_TIMEOUT)[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_comes_after_the_timeout_raises_in_that_call(seed):
    assert "rank 0 waited for the counts of rank 1" in late_call(seed)


@simulated
def test_a_notify_that_ignores_an_abort_is_rejected(monkeypatch):
    monkeypatch.setattr(notify, "ld_volatile_s32", intrinsic.simulated(lambda *_: 0, ""))
    assert any(late_call(seed) is None for seed in range(10))


@simulated
def test_an_abort_that_the_peers_do_not_see_is_rejected(monkeypatch):
    at_all = "pointer_from_address(ctx.peers[r], ctx.local), ABORT_FLAG"
    monkeypatch.setattr(notify, "abort", changed(timeout, at_all, "ctx.local, ABORT_FLAG")["abort"])
    assert late_call() is None


# What rank 1 does in place of its second dispatch, and what the error of rank 0 says of it.
INSTEAD = {
    "nothing": (lambda buffer, x, given: None, "the function of rank 1 has ended"),
    "combine": (lambda buffer, x, given: buffer.combine(given[0], given[4], config=SMALL), "rank 1 is now in combine"),
    "handle": (lambda buffer, x, given: buffer.dispatch(x, given[4], config=SMALL), "rank 1 is now in dispatch"),
    "gather": (lambda buffer, x, given: buffer.transport.gather(None), "rank 1 is now in gather"),
    "low latency": (lambda buffer, x, given: buffer.low_latency(2, 8, 4, 2), "rank 1 is now in low_latency"),
}


@simulated
@pytest.mark.parametrize("weak_memory", [False, True])
@pytest.mark.parametrize("name", INSTEAD)
def test_a_missing_rank_with_the_default_timeout(name, weak_memory):
    """The clock is set forward when all threads poll in vain."""
    inputs, (instead, state) = make_inputs([4, 4]), INSTEAD[name]

    def work(transport):
        buffer = Buffer(transport, NUM_BYTES)
        given = send(buffer, transport.rank, inputs)
        if transport.rank == 1:
            return instead(buffer, inputs.x[1], given)
        sentence = f"rank 0 waited for the counts of rank 1: .*; {state}. Rank 0 has aborted after 100 s"
        if name == "handle":  # either of the two may be the first to time out
            sentence = f"{sentence}|dispatch: rank 1, channel"
        refused(TimeoutError, sentence, send, buffer, 0, inputs)
        found.append(name)

    found = []
    with engine(0) if weak_memory else contextlib.nullcontext(), contextlib.suppress(TimeoutError):  # of rank 1
        LocalGroup(2).run(work)
    assert found


@pytest.mark.parametrize("destroying", [(), (1,), (0, 1)])
def test_the_error_of_a_missing_rank_comes_first(destroying):
    """Also if it waits in `destroy`, so that the others time out before; their errors are notes."""
    inputs = make_inputs([4, 4])

    def work(transport):
        buffer = Buffer(transport, NUM_BYTES, timeout=100 if simulator.ENABLED else SHORT_TIMEOUT)
        try:
            send(buffer, transport.rank, inputs)
            if transport.rank == 1:
                raise KeyError("of rank 1")
            send(buffer, transport.rank, inputs)
        finally:
            if transport.rank in destroying:
                buffer.destroy()

    with pytest.raises(KeyError, match="of rank 1") as error:
        LocalGroup(2).run(work)
    if simulator.ENABLED:
        notes = ["rank 0 has raised TimeoutError: notify: rank 0 waited for the counts of rank 1"]
        found = getattr(error.value, "__notes__", [])
        assert [note[: len(notes[0])] for note in found] == notes * bool(destroying)


# Ends after a loss


@pytest.fixture
def waits(monkeypatch):
    """Log the longest wait of each rendezvous, by rank."""
    log = []
    for kind in LocalGroup(1).run(lambda transport: type(transport).__mro__[:1])[0]:
        before = kind.rendezvous

        def rendezvous(transport, name, seconds, before=before):
            log.append((transport.rank, name, seconds, arrived := before(transport, name, seconds)))
            return arrived

        monkeypatch.setattr(kind, "rendezvous", rendezvous)
    return log


def test_destroy_does_not_wait_after_an_abort(waits):
    """Rank 1, which has not aborted, does not wait in vain either; memory that it could write to is kept."""
    inputs, group = make_inputs([6 * SCALE, 6 * SCALE]), LocalGroup(2)

    def work(transport):
        buffer = Buffer(transport, NUM_BYTES, timeout=SHORT_TIMEOUT)
        out = new_output(buffer, 12 * SCALE)
        abort_in_combine(buffer, transport.rank, inputs)
        if transport.rank == 0:
            with pytest.raises(TimeoutError):
                buffer.check(synchronize=True)
            local = buffer._runtime.shared.local
        else:
            transport.wait(lambda: bool(buffer._runtime._local[ABORT_FLAG]), 1000)
        out.close()
        buffer.destroy()
        if transport.rank == 0:
            assert any(kept is local for kept in group.kept)

    with engine(0):
        group.run(work)
    ends = [wait for wait in waits if "close" in wait[1]]
    assert [seconds for _, _, seconds, _ in ends] == [0] * 4


@simulated
def test_destroy_waits_for_the_others_without_an_abort(waits):
    inputs = make_inputs([4, 4])
    run(2, lambda buffer, rank: send(buffer, rank, inputs) and None, timeout=7)
    assert [wait[2:] for wait in waits if "close" in wait[1]] == [(7, True)] * 2


def test_destroy_ends_although_a_peer_is_missing():
    """A rank that has not aborted waits for the timeout, and keeps its memory."""
    group = LocalGroup(2)

    def work(transport):
        buffer = Buffer(transport, NUM_BYTES, timeout=SHORT_TIMEOUT)
        if transport.rank == 0:
            buffer.destroy()
            assert len(group.kept) == 1
            transport.gather(None)
        else:
            transport.gather(None)
            buffer.destroy()

    with engine(0):
        group.run(work)


# Graphs


@simulated
def test_a_capture_that_would_wait_for_counts_is_refused(monkeypatch):
    inputs, captured = make_inputs([4, 4]), []
    monkeypatch.setattr(rank_state, "is_capturing", lambda: bool(captured))

    def work(buffer, rank):
        given = send(buffer, rank, inputs)
        captured.append(rank)
        buffer.transport.gather(None)
        with pytest.raises(RuntimeError, match="dispatch in a CUDA graph needs num_worst_tokens or a handle"):
            send(buffer, rank, inputs)
        buffer.dispatch(inputs.x[rank], given[4], config=SMALL)
        send(buffer, rank, inputs, num_worst_tokens=8)
        buffer.transport.gather(None)
        captured.clear()
        send(buffer, rank, inputs)

    run(2, work)


def test_a_prepared_call_that_would_wait_for_counts_is_refused():
    """With ``num_worst_tokens`` it exchanges new counts, with a handle new rows."""
    inputs, later = make_inputs([4 * SCALE]), make_inputs([4 * SCALE], seed=1)

    def work(buffer, rank):
        x, idx, weights = (part[0].to(buffer.transport.device, copy=True) for part in inputs[:3])
        per_rank, _, per_expert, is_in_rank, _ = layout = buffer.get_dispatch_layout(idx, inputs.experts)
        given = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
        given |= dict(topk_idx=idx, topk_weights=weights, config=SMALL)
        with pytest.raises(ValueError, match="num_worst_tokens is 0; a prepared dispatch needs it or a handle"):
            prepare(buffer.dispatch, x, **given)
        again = prepare(buffer.dispatch, x, buffer.dispatch(x, **given)[4], config=SMALL)
        worst = prepare(buffer.dispatch, x, **given, num_worst_tokens=5 * SCALE)
        for tensor, part in zip((x, idx, weights), later, strict=False):
            tensor.copy_(part[0])
        rows = again()[0]
        buffer.check(synchronize=True)
        assert bitwise_equal(rows, reference_dispatch(inputs._replace(x=later.x))[0].x)
        for tensor, new in zip(layout, buffer.get_dispatch_layout(idx, inputs.experts), strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(new)
        received = worst()
        buffer.check(synchronize=True)
        check_received(received, reference_dispatch(later)[0], 0, inputs.experts, 5 * SCALE)

    run(1, work)


@pytest.mark.gpu
def test_a_capture_on_a_gpu_that_would_wait_for_counts_is_refused():
    """The buffer works afterwards."""
    inputs = make_inputs([4 * SCALE])

    def work(buffer, rank):
        send(buffer, rank, inputs)
        x, idx = inputs.x[0].cuda(), inputs.topk_idx[0].cuda()
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, inputs.experts)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            with pytest.raises(RuntimeError, match="needs num_worst_tokens or a handle"):
                buffer.dispatch(x, **layout, config=SMALL)
        check_received(send(buffer, rank, inputs), reference_dispatch(inputs)[0], 0, inputs.experts)

    run(1, work)


# Handles with wrong numbers

TENSORS = "rank_prefix", "channel_prefix", "recv_channel_prefix", "recv_src_idx", "is_token_in_rank", "send_head"
READ = {  # what each operation reads of a handle
    "dispatch": ("rank_prefix", "channel_prefix", "recv_channel_prefix", "is_token_in_rank"),
    "out": ("rank_prefix", "channel_prefix", "is_token_in_rank"),
    "combine": ("rank_prefix", "channel_prefix", "recv_channel_prefix", "send_head"),
}
WRONG_NUMBERS = {
    "negative": lambda t: torch.full_like(t, -5),
    "lowest": lambda t: torch.full_like(t, -(1 << 31)),
    "highest": lambda t: torch.full_like(t, (1 << 31) - 1),
    "decreasing": lambda t: t.flatten().flip(0).view(t.shape) * 3 + 1,
}


def use_corrupted_handle(operation, part, wrong):
    """Use handles in which one tensor is wrong; an access out of bounds raises."""
    inputs, number = make_inputs([4, 5]), TENSORS.index(part)

    def work(buffer, rank):
        out = new_output(buffer, 32)  # fills its memory: what lies after it belongs to no buffer
        handle = send(buffer, rank, inputs)[4]
        received = len(handle[3])
        corrupted = ~handle[4] if part == "is_token_in_rank" else WRONG_NUMBERS[wrong](handle[number])
        handle = (*handle[:number], corrupted, *handle[number + 1 :])
        if operation == "combine":
            buffer.combine(torch.zeros(received, HIDDEN).bfloat16(), handle, torch.zeros(received, 2), config=SMALL)
        else:
            buffer.dispatch(inputs.x[rank], handle, config=SMALL, out=out if operation == "out" else None)
        with contextlib.suppress(TimeoutError):
            buffer.check(synchronize=True)
        out.close()

    run(2, work, timeout=4e-3)


@simulated
@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
@pytest.mark.parametrize("operation, part", [(name, part) for name, parts in READ.items() for part in parts])
def test_a_corrupted_handle_causes_no_access_out_of_bounds(operation, part, wrong):
    use_corrupted_handle(operation, part, wrong)


@simulated
@pytest.mark.parametrize("operation, part", [("dispatch", "recv_channel_prefix"), ("combine", "rank_prefix")])
def test_kernels_that_trust_prefix_matrices_are_rejected(operation, part, monkeypatch):
    monkeypatch.setattr(channels, "clamp", lambda value, most: value)
    with pytest.raises(simulator.OutOfBounds):
        for wrong in WRONG_NUMBERS:
            use_corrupted_handle(operation, part, wrong)


TRUSTING = {
    "dispatch": (dispatch, "own_rows & 1 == 0 and own_rows < max_own_rows", "own_rows & 1 == 0", "rank_prefix"),
    "out": (dispatch_direct, "selected and sent < max_rows", "selected", "rank_prefix"),
    "combine": (combine, "next_position if next_position < max_rows else int32(-1)", "next_position", "send_head"),
}


@simulated
@pytest.mark.parametrize("operation", TRUSTING)
def test_kernels_that_do_not_limit_own_rows_are_rejected(operation, monkeypatch):
    module, right, wrong, part = TRUSTING[operation]
    make = {dispatch: "make_dispatch", dispatch_direct: "make_dispatch_direct", combine: "make_combine"}[module]
    monkeypatch.setattr(module, make, changed(module, right, wrong)[make])
    with pytest.raises(simulator.OutOfBounds):
        use_corrupted_handle(operation, part, "highest")


# Compilers


@pytest.fixture
def compiled(monkeypatch):
    """Log each compilation and each launch of a kernel, as (what, kernel, rank)."""
    log = []
    kind = LocalGroup(1).run(type)[0]
    before = kind.prepare_kernel

    def prepare_kernel(transport, kernel, *arguments, **options):
        start = before(transport, kernel, *arguments, **options)
        log.append(("compile", kernel.__name__, transport.rank))

        def logged(*given):
            log.append(("launch", kernel.__name__, transport.rank))
            return start(*given)

        return logged

    monkeypatch.setattr(kind, "prepare_kernel", prepare_kernel)
    return log


def test_no_rank_launches_a_kernel_before_all_have_compiled_it(compiled):
    inputs = make_inputs([5 * SCALE, 4 * SCALE, 6 * SCALE])

    def work(buffer, rank):
        out = new_output(buffer, 15 * SCALE)
        given = send(buffer, rank, inputs)
        buffer.combine(given[0], given[4], config=SMALL)
        send(buffer, rank, inputs, out=out)
        out.close()

    run(3, work)
    for kernel in ("notify_dispatch", "barrier", "dispatch", "combine", "dispatch_direct"):
        events = [what for what, name, _ in compiled if name == kernel]
        assert events[:3] == ["compile"] * 3 and "launch" in events and "compile" not in events[3:]


def test_a_call_that_differs_is_found_before_it_is_compiled(compiled):
    """Rank 1 would compile the kernel of its own configuration, for which rank 0 does not wait."""
    inputs = make_inputs([4, 4])

    def work(buffer, rank):
        send(buffer, rank, inputs)
        with pytest.raises(ValueError, match="number of channels, which depends on config"):
            send(buffer, rank, inputs, config=WIDE if rank else SMALL)

    other = Config(8, 1, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "WIDE", other)
        run(2, work, timeout=SHORT_TIMEOUT)
    assert sorted(event for event in compiled if event[:2] == ("compile", "dispatch")) == [
        ("compile", "dispatch", rank) for rank in (0, 1)
    ]


WARM = {
    "rings": (dict(), dict()),
    "fp8": (dict(fp8=True), dict(dtype=FP8, num_scales=HIDDEN // 8)),
    "out": (dict(), dict()),
}


@pytest.mark.parametrize("name", WARM)
def test_calls_after_warm_up_compile_nothing(name, compiled):
    """The first call after it chooses the channels as if there had been none."""
    kind, options = WARM[name]
    inputs = make_inputs([5 * SCALE, 4 * SCALE], **kind)
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        out = new_output(buffer, 9 * SCALE) if name == "out" else None
        buffer.warm_up(HIDDEN, inputs.experts, 2, config=SMALL, combine_config=SMALL, out=out, **options)
        assert buffer._runtime._first_channels == {}
        compiled.clear()
        given = send(buffer, rank, inputs, out=out)
        check_received(given, right[rank], rank, inputs.experts // 2)
        x = to_device(buffer.transport.device, inputs.x[rank])
        again = buffer.dispatch(x, given[4], config=SMALL, out=out)[0]
        assert bitwise_equal(to_device("cpu", again), right[rank].x)
        rows = torch.zeros(len(given[4][3]), HIDDEN, dtype=torch.bfloat16, device=buffer.transport.device)
        for weights in (given[2], None):
            buffer.combine(rows, given[4], weights, config=SMALL)
        if out is not None:
            out.close()

    run(2, work)
    assert "launch" in {what for what, _, _ in compiled} and "compile" not in {what for what, _, _ in compiled}


def test_warm_up_refuses_invalid_arguments():
    def work(buffer, rank):
        with pytest.raises(ValueError, match="hidden is 0"):
            buffer.warm_up(0, 4)
        with pytest.raises(TypeError, match="num_experts is 2.5"):
            buffer.warm_up(HIDDEN, 2.5)

    run(1, work)
