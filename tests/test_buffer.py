"""Buffer: dispatch and combine between the ranks of one process, in the simulator or on GPUs, against the reference."""

import contextlib
import inspect
from typing import NamedTuple

import pytest
import torch
from wrong_kernels import changed

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, Config, reference
from moe_numba.expert_parallel.config import num_channels
from moe_numba.expert_parallel.kernels import bulk_pipeline, combine, dispatch, notify
from moe_numba.expert_parallel.kernels.buffer_layout import MAX_CHANNELS
from moe_numba.expert_parallel.kernels.token_slot import TokenSlot
from moe_numba.expert_parallel.runtime import Runtime
from moe_numba.expert_parallel.transport import LocalGroup

FP8 = torch.float8_e4m3fn
HIDDEN = 32 if simulator.ENABLED else 1024
SCALE = 1 if simulator.ENABLED else 60  # times as many tokens
SMALL = Config(2, 1, 23) if simulator.ENABLED else Config(4, 1, 32)  # rings that tokens go round many times
WIDE = Config(4, 6, 64) if simulator.ENABLED else Config(12, 6, 256)
NUM_BYTES = 1 << 16 if simulator.ENABLED else 1 << 26
IMPATIENT = 2e-3 if simulator.ENABLED else 0.5  # seconds, where a rank waits in vain


@pytest.fixture(autouse=True)
def same_every_time():
    """What new memory holds, which weak memory looks at, is the same in every run: so is what a seed does."""
    torch.use_deterministic_algorithms(simulator.ENABLED)
    yield
    torch.use_deterministic_algorithms(False)


class World(NamedTuple):
    """What all ranks bring, a list entry each."""

    x: list
    topk_idx: list
    topk_weights: list
    experts: int


def make_world(num_tokens, seed=0, hidden=HIDDEN, topk=2, experts_of_rank=2, fp8=False, only=None):
    """Random tokens and experts, -1 among them; of ``only`` one rank."""
    generator, ranks = torch.Generator().manual_seed(seed), len(num_tokens)
    experts = ranks * experts_of_rank
    low, high = (0, experts) if only is None else (only * experts_of_rank, (only + 1) * experts_of_rank)
    x, topk_idx, topk_weights = [], [], []
    for tokens in num_tokens:
        values = torch.randn(tokens, hidden, generator=generator)
        scales = torch.rand(hidden // 8, tokens, generator=generator).T  # column after column
        x.append((values.to(FP8), scales) if fp8 else values.bfloat16())
        chosen = torch.randint(low, high, (tokens, topk), generator=generator)
        topk_idx.append(chosen.where(torch.rand(tokens, topk, generator=generator) > 0.2, -1))
        topk_weights.append(torch.rand(tokens, topk, generator=generator))
    return World(x, topk_idx, topk_weights, experts)


def to(device, value):
    """On a device; strides stay as they are."""
    return tuple(to(device, v) for v in value) if isinstance(value, tuple) else value.to(device)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).cpu()


def same(given, wanted):
    """Bit for bit, so that a NaN is equal to itself."""
    if isinstance(wanted, tuple):
        return all(same(g, w) for g, w in zip(given, wanted, strict=True))
    return given.shape == wanted.shape and given.dtype == wanted.dtype and torch.equal(bits(given), bits(wanted))


@contextlib.contextmanager
def engine(seed):
    """In the simulator, an order of the threads and weak memory."""
    with contextlib.ExitStack() as stack:
        if simulator.ENABLED:
            stack.enter_context(simulator.seed(seed))
            stack.enter_context(simulator.weak_memory())
        yield


def run(ranks, work, seed=0, **options):
    """``work(buffer, rank)`` of every rank, each with a buffer."""

    def on_rank(transport):
        buffer = Buffer(transport, NUM_BYTES, **options)
        result = work(buffer, transport.rank)
        buffer.destroy()
        return result

    with engine(seed):
        return LocalGroup(ranks).run(on_rank)


def send(buffer, rank, world, config=SMALL, **options):
    """Layout and dispatch of a rank; gives what dispatch gives."""
    device = buffer.transport.device
    x, idx, weights = (to(device, part[rank]) for part in world[:3])
    per_rank, rdma, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, world.experts)
    assert rdma is None
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_expert=per_expert,
        is_token_in_rank=is_in_rank,
        topk_idx=idx,
        topk_weights=weights,
        config=config,
        **options,
    )


def right_of(world):
    """The reference's answer."""
    ranks = len(world.x)
    there = [reference.dispatch_layout(idx, ranks, world.experts)[2] for idx in world.topk_idx]
    return reference.dispatch(world.x, there, world.topk_idx, world.topk_weights, world.experts)


def check_received(given, right, rank, experts_of_rank, rows=None):
    """What one rank got; with ``rows`` the outputs are longer than what came."""
    x, idx, weights, counts, handle, _ = given
    came = len(right.src_idx)
    cut = (lambda t: t[:came]) if rows else (lambda t: t)
    assert same(tuple(map(cut, x)) if isinstance(x, tuple) else cut(x), right.x)
    assert torch.equal(cut(idx).cpu(), right.topk_idx) and torch.equal(cut(weights).cpu(), right.topk_weights)
    assert torch.equal(cut(handle[3]).cpu(), right.src_idx)
    assert torch.equal(handle[0].cpu(), right.rank_prefix_matrix)
    if rows:
        assert counts == [] and len(idx) == rows and bool((idx[came:] == -1).all())
    else:
        assert counts == [int((right.topk_idx == e).sum()) for e in range(experts_of_rank)]


def check_combined(given, world, right, y, weights, biases=None):
    """Bit for bit what adding up in float32 in the order of the ranks makes."""
    ranks = len(world.x)
    tokens = [len(idx) for idx in world.topk_idx]
    exact = reference.combine(y, right, tokens, weights, biases)
    for rank in range(ranks):
        out, out_weights = (part.cpu() for part in given[rank])
        total = torch.zeros(tokens[rank], y[0].shape[1])
        for bias in biases[rank] if biases else ():
            total += bias.float()
        for peer in range(ranks):
            first = int(right[peer].rank_prefix_matrix[rank - 1, peer]) if rank else 0
            rows = slice(first, int(right[peer].rank_prefix_matrix[rank, peer]))
            total[right[peer].src_idx[rows].long()] += y[peer][rows].float()
        assert same(out, total.bfloat16())
        torch.testing.assert_close(out.double(), exact[rank][0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(out_weights.double(), exact[rank][1], rtol=1e-6, atol=1e-6)


WORLDS = {
    "one": ([5], {}),
    "two": ([7, 9], {}),
    "three": ([4, 0, 6], {}),
    "four": ([3, 5, 2, 4], {}),
    "eight": ([3, 5, 2, 4, 1, 0, 3, 2], {}),
    "nobody": ([0, 0], {}),
    "all to one": ([8, 5], dict(only=1)),
    "scales": ([6, 3], dict(fp8=True)),
    "many experts": ([5, 4], dict(topk=5, experts_of_rank=3)),
    "narrow": ([9, 7], dict(hidden=8)),
    "long": ([2, 1], dict(hidden=2304)),  # more than a warp adds up, or carries scales of, at once
    "many scales": ([2, 1], dict(fp8=True, hidden=512)),
}


@pytest.mark.parametrize("name", [n for n in WORLDS if n != "eight" or not simulator.ENABLED])
@pytest.mark.parametrize("seed", [0, 1])
def test_there_and_back(name, seed):
    """All that dispatch gives, again with its handle, and what combine makes of it, with weights and biases."""
    num_tokens, options = WORLDS[name]
    world = make_world([SCALE * n for n in num_tokens], seed, **options)
    ranks, hidden = len(num_tokens), options.get("hidden", HIDDEN)
    right, generator = right_of(world), torch.Generator().manual_seed(seed)
    y = [torch.randn(len(r.src_idx), hidden, generator=generator).bfloat16() for r in right]
    biases = [
        tuple(torch.randn(len(idx), hidden, generator=generator).bfloat16() for _ in range(seed + 1))
        for idx in world.topk_idx
    ]

    def work(buffer, rank):
        device = buffer.transport.device
        given = send(buffer, rank, world)
        check_received(given, right[rank], rank, world.experts // ranks)
        handle, x = given[4], to(device, world.x[rank])
        again = buffer.dispatch(x, handle=handle, config=SMALL)
        assert same(to("cpu", again[0]), right[rank].x) and again[1] is None and again[3] == []
        bias = to(device, biases[rank])
        back = buffer.combine(y[rank].to(device), handle, given[2], bias if seed else bias[0], config=SMALL)
        return back[:2]

    given = run(ranks, work, seed)
    check_combined(given, world, right, y, [r.topk_weights for r in right], biases)


def test_every_token_comes_back_as_often_as_it_went():
    """Calls one after the other on one buffer, of other sizes, types and configurations; and each combine twice."""
    worlds = [
        make_world([6 * SCALE, 8 * SCALE], 0),
        make_world([3 * SCALE, 1], 1, fp8=True),
        make_world([5 * SCALE, 7 * SCALE], 2, topk=1, hidden=16),
    ]

    def work(buffer, rank):
        for i, world in enumerate([*worlds, worlds[0]]):
            config = (SMALL, WIDE)[i % 2]
            given = send(buffer, rank, world, config)
            check_received(given, right_of(world)[rank], rank, world.experts // 2)
            values = given[0][0] if isinstance(given[0], tuple) else given[0]
            x, x_home = values.float().bfloat16(), to("cpu", world.x[rank])
            x_home = (x_home[0] if isinstance(x_home, tuple) else x_home).float()
            copies = given[4][4].sum(1, keepdim=True).cpu()
            for _ in range(2):
                out = buffer.combine(x, given[4], config=config)[0]
                assert torch.equal(out.cpu(), (x_home * copies).bfloat16())

    run(2, work)


def test_two_buffers_by_turns():
    world = make_world([5 * SCALE, 6 * SCALE])
    right = right_of(world)

    def work(transport):
        buffers = [Buffer(transport, NUM_BYTES) for _ in range(2)]
        for _ in range(2):
            given = [send(buffer, transport.rank, world) for buffer in buffers]
            for each in given:
                check_received(each, right[transport.rank], transport.rank, world.experts // 2)
            backs = [b.combine(each[0], each[4], config=SMALL)[0] for b, each in zip(buffers, given, strict=True)]
            assert same(*backs)
        for buffer in buffers:
            buffer.destroy()

    with engine(3):
        LocalGroup(2).run(work)


def test_outputs_of_the_worst_size():
    """No counts come to the host; rows beyond those that came have no expert."""
    world = make_world([5 * SCALE, 4 * SCALE])
    right = right_of(world)

    def work(buffer, rank):
        given = send(buffer, rank, world, num_worst_tokens=12 * SCALE)
        check_received(given, right[rank], rank, world.experts // 2, rows=12 * SCALE)
        return buffer.combine(given[0], given[4], given[2], config=SMALL)[:2]

    y = [r.x for r in right]
    check_combined(run(2, work), world, right, y, [r.topk_weights for r in right])


def test_counts_are_rounded_up():
    world = make_world([7, 5])
    given = run(2, lambda buffer, rank: send(buffer, rank, world, expert_alignment=8)[3])
    right = right_of(world)
    assert given == [[-(-int((r.topk_idx == e).sum()) // 8) * 8 for e in range(2)] for r in right]


def test_numbers_that_name_no_expert():
    """They are as -1, however large they are."""
    world = make_world([6, 5])
    none = torch.tensor([-7, 4, 1 << 31, (1 << 32) + 1, -(1 << 33)])
    strange = world._replace(topk_idx=[idx.where(idx >= 0, none[i]) for i, idx in enumerate(world.topk_idx)])
    right = right_of(world)

    def work(buffer, rank):
        check_received(send(buffer, rank, strange), right[rank], rank, world.experts // 2)

    run(2, work)


def test_events():
    """A call that is not waited for gives an event; so does the stream itself."""
    world = make_world([5 * SCALE, 6 * SCALE])
    right = right_of(world)

    def work(buffer, rank):
        before = Buffer.capture()
        given = send(buffer, rank, world, previous_event=before, async_finish=True, allocate_on_comm_stream=True)
        given[5].current_stream_wait()
        check_received(given, right[rank], rank, world.experts // 2)
        with buffer.combine(given[0], given[4], async_finish=True, config=SMALL)[2]:
            pass
        with pytest.raises(ValueError, match="has no event"):
            buffer.combine(given[0], given[4], config=SMALL)[2].current_stream_wait()

    run(2, work)


# What goes wrong is said


def test_a_rank_that_does_not_come():
    """Those that do come raise, and say whom they waited for; and the buffer is of no more use."""
    world = make_world([4, 4, 4])

    def work(buffer, rank):
        if rank == 1:
            return
        with pytest.raises(TimeoutError, match=f"notify: rank {rank} waited for the counts of rank 1"):
            send(buffer, rank, world)
        with pytest.raises(TimeoutError, match="can no longer be used"):
            send(buffer, rank, world)

    run(3, work, timeout=IMPATIENT)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_rank_that_stops_in_between(operation):
    world = make_world([6 * SCALE, 6 * SCALE])

    def work(buffer, rank):
        given = send(buffer, rank, world)
        if rank == 0:
            if operation == "dispatch":
                buffer.dispatch(to(buffer.transport.device, world.x[rank]), handle=given[4], config=SMALL)
            else:
                buffer.combine(given[0], given[4], config=SMALL)
            if not simulator.ENABLED:
                torch.cuda.synchronize()
            with pytest.raises(TimeoutError, match=r"(dispatch|combine|barrier): rank 0.* rank 1"):
                send(buffer, rank, world)

    run(2, work, timeout=IMPATIENT)


def test_counts_that_contradict_each_other():
    world = make_world([4, 4])

    def work(buffer, rank):
        device = buffer.transport.device
        x, idx = to(device, world.x[rank]), to(device, world.topk_idx[rank])
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, world.experts)
        with pytest.raises(ValueError, match="num_tokens_per_rank has"):
            buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank + 1,
                num_tokens_per_expert=per_expert,
                is_token_in_rank=is_in_rank,
                config=SMALL,
            )

    run(2, work, timeout=IMPATIENT)


def test_more_tokens_than_the_worst_case():
    world = make_world([9, 9], only=0)

    def work(buffer, rank):
        send(buffer, rank, world, num_worst_tokens=2)
        if not simulator.ENABLED:
            torch.cuda.synchronize()
        error, match = (ValueError, "the output has 2 rows") if rank == 0 else (TimeoutError, "rank 0")
        with pytest.raises(error, match=match):
            send(buffer, rank, world)

    run(2, work, timeout=IMPATIENT)


def refused(error, match, call, *args, **kwargs):
    with pytest.raises(error, match=match):
        call(*args, **kwargs)


def test_what_is_refused():
    world = make_world([4, 4])

    def work(buffer, rank):
        device = buffer.transport.device
        x, idx, weights = (to(device, part[rank]) for part in world[:3])
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, world.experts)
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
        refused(
            TypeError, "topk_idx is torch.int32", buffer.dispatch, x, **layout, topk_idx=idx.int(), topk_weights=weights
        )
        refused(ValueError, "with a handle", buffer.dispatch, x, handle, topk_idx=idx, topk_weights=weights)
        refused(ValueError, "with a handle", buffer.dispatch, x, handle, **layout)
        refused(ValueError, "x is a tuple of 3", buffer.dispatch, (x, x, x), **layout)
        refused(TypeError, "config is 24", buffer.dispatch, x, **layout, config=24)
        refused(TypeError, "config is 24", buffer.combine, given[0], handle, config=24)
        refused(ValueError, "offset is -4", buffer.get_local_buffer_tensor, torch.int32, offset=-4)
        refused(ValueError, "is_token_in_rank has shape", buffer.dispatch, x[:2], handle)
        refused(TypeError, "tuple of 6", buffer.dispatch, x, handle[:5])
        number = handle[0][0, 0]  # a tensor without dimensions
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


def test_configurations():
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


def test_buffers_that_are_refused():
    def work(transport):
        for wrong, error in [(dict(num_nvl_bytes=100), "num_nvl_bytes is 100"), (dict(num_rdma_bytes=1), "rdma_bytes")]:
            with pytest.raises(ValueError, match=error):
                Buffer(transport, **wrong)
        refused(TypeError, "timeout is '9'", Buffer, transport, 256, timeout="9")
        for seconds in (0, -1.0, float("inf"), float("nan")):
            refused(ValueError, "timeout is", Buffer, transport, 256, timeout=seconds)

    LocalGroup(1).run(work)


def test_buffers_that_are_not_alike_are_refused():
    """Or rows would go beyond the smaller one."""

    def work(transport):
        refused(ValueError, "num_nvl_bytes is 256, 512 on the ranks", Buffer, transport, 256 * (1 + transport.rank))

    LocalGroup(2).run(work)


@pytest.mark.parametrize("seed", [0, 1])
def test_rings_of_one_row(seed):
    """A row that its sender has not announced yet must not be what it waits for."""
    ranks, tokens = (2, [9, 14]) if simulator.ENABLED else (4, [900, 1400, 1, 640])
    config = SMALL if simulator.ENABLED else Config(24, 6, 28)
    world = make_world(tokens, seed)
    right, channels = right_of(world), num_channels(config.num_sms, ranks, 2 * HIDDEN)
    stride = max(TokenSlot(HIDDEN // 2, 0, 2).stride, TokenSlot(HIDDEN // 2, 2, has_src_idx=False).stride)
    least = 2 * 4 * channels * ranks * stride

    def work(transport):
        buffer, rank = Buffer(transport, least), transport.rank
        given = send(buffer, rank, world, config)
        check_received(given, right[rank], rank, world.experts // ranks)
        out = buffer.combine(given[0], given[4], given[2], config=config)[:2]
        buffer.destroy()
        return out

    with engine(seed):
        given = LocalGroup(ranks).run(work)
    check_combined(given, world, right, [r.x for r in right], [r.topk_weights for r in right])


def test_a_handle_is_good_for_any_configuration():
    """Of its channels each is taken by some warp, however many there are."""
    world = make_world([13 * SCALE, 8 * SCALE])
    right = right_of(world)

    def work(buffer, rank):
        given = send(buffer, rank, world, WIDE)
        x = to(buffer.transport.device, world.x[rank])
        for config in (SMALL, WIDE):
            assert same(buffer.dispatch(x, given[4], config=config)[0], right[rank].x)
        return buffer.combine(given[0], given[4], given[2], config=SMALL)[:2]

    check_combined(run(2, work), world, right, [r.x for r in right], [r.topk_weights for r in right])


# Kernels that are wrong must be found out


def fails_under_some_seed(monkeypatch, module, name, fault, new_out=lambda buffer: None):
    """With one function of a kernel replaced, some seed gives a wrong result or none; dispatched into ``new_out``."""
    monkeypatch.setattr(module, name, fault)
    world = make_world([7, 9])
    right = right_of(world)

    def work(buffer, rank):
        out = new_out(buffer)
        given = send(buffer, rank, world, out=out)
        check_received(given, right[rank], rank, world.experts // 2)
        again = buffer.dispatch(world.x[rank], handle=given[4], config=SMALL, out=out)
        assert same(again[0], right[rank].x)
        return buffer.combine(right[rank].x, given[4], given[2], config=SMALL)[:2]

    for seed in range(30):
        try:
            check_combined(
                run(2, work, seed, timeout=4e-3), world, right, [r.x for r in right], [r.topk_weights for r in right]
            )
        except (AssertionError, simulator.SimulatorError, TimeoutError):
            return True
    return False


FAULTS = {
    "the last rows are announced before they are there": (dispatch, "bulk_wait_all", lambda: None),
    "the rows before are announced before they are there": (dispatch, "bulk_wait_all_but_one", lambda: None),
    "a row is overwritten before it is sent": (bulk_pipeline, "bulk_wait_read", lambda: None),
    "the receiver does not acquire": (dispatch, "ld_acquire_sys_s32", "relaxed"),
    "combine announces the last rows before they are there": (combine, "bulk_wait_all", lambda: None),
    "combine announces rows before they are there": (combine, "bulk_wait_all_but_one", lambda: None),
    "combine does not acquire": (combine, "ld_acquire_sys_s32", "relaxed"),
    "the exchange does not acquire": (notify, "ld_acquire_sys_s32", "relaxed"),
    "the exchange does not release": (notify, "st_release_sys_s32", "relaxed store"),
}


@pytest.mark.skipif(not simulator.ENABLED, reason="a GPU's memory is not weak at will")
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_found_out(monkeypatch, name):
    from moe_numba.ptx import atomics

    module, function, fault = FAULTS[name]
    known = {"relaxed": atomics.ld_relaxed_sys_s32, "relaxed store": atomics.st_relaxed_sys_s32}
    assert fails_under_some_seed(monkeypatch, module, function, known.get(fault, fault))


# Of the rows that another rank has not taken yet none may be overwritten. In the simulator no rank runs ahead.


def what_comes_to_a_late_rank(then):
    """Rank 0 sends all that it has, and again, where rows lie otherwise, before rank 1 has begun: is all right?"""
    config = Config(4, 6, 1024)  # rings that hold them all
    world = make_world([200, 1], only=1)
    right = right_of(world)[1].x
    columns = 512 if then == "shorter rows" else HIDDEN

    def work(buffer, rank):
        x = to(buffer.transport.device, world.x[rank])
        other = WIDE if then == "more channels" else config
        handles = [send(buffer, rank, world, c)[4] for c in (config, other)]
        wrong = 0
        for i in range(1, 5):
            if rank == 1:
                torch.cuda._sleep(20_000_000)  # some ten milliseconds
            first = buffer.dispatch(x * i, handles[0], config=config)[0]
            second = buffer.dispatch((x * -i)[:, :columns].contiguous(), handles[1], config=other)[0]
            if rank == 1:
                wrong += not same(first, right * i) or not same(second, (right * -i)[:, :columns])
        return wrong

    try:
        return run(2, work, timeout=3)[1] == 0
    except TimeoutError:
        return False


@pytest.mark.skipif(simulator.ENABLED, reason="where kernels run together none runs ahead")
@pytest.mark.parametrize("then", ["shorter rows", "more channels"])
def test_what_a_late_rank_has_not_taken_is_not_overwritten(then):
    assert what_comes_to_a_late_rank(then)


@pytest.mark.skipif(simulator.ENABLED, reason="where kernels run together none runs ahead")
def test_a_sender_that_does_not_wait_for_the_last_launch_is_found_out(monkeypatch):
    right, wrong = "capacity = uint32(1)", "capacity = uint32(slots)"
    assert inspect.getsource(dispatch).count(right) == 1
    monkeypatch.setattr(dispatch, "make_dispatch", changed(dispatch, right, wrong)["make_dispatch"])
    assert not what_comes_to_a_late_rank("shorter rows")


@pytest.mark.skipif(simulator.ENABLED, reason="where kernels run together none runs ahead")
def test_ranks_that_do_not_meet_where_rings_move_are_found_out(monkeypatch):
    monkeypatch.setattr(Runtime, "with_barriers_if_layout_changed", lambda *_: contextlib.nullcontext())
    assert not what_comes_to_a_late_rank("more channels")
