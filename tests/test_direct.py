"""Dispatch straight into outputs that the ranks share, in the simulator or on GPUs, against the reference."""

import contextlib

import pytest
import torch
from test_buffer import (
    FP8,
    HIDDEN,
    IMPATIENT,
    SCALE,
    SMALL,
    WIDE,
    check_combined,
    check_received,
    fails_under_some_seed,
    make_world,
    refused,
    right_of,
    run,
    same,
    send,
    to,
)

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.kernels import dispatch_direct
from moe_numba.expert_parallel.runtime import Runtime


def new_output(buffer, rows, fp8=False):
    """For what ranks of a world send, see ``make_world``."""
    return buffer.new_output(rows, HIDDEN, FP8 if fp8 else torch.bfloat16, HIDDEN // 8 if fp8 else 0, num_topk=2)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("ranks, seed", [(1, 0), (2, 0), (2, 1), (3, 2), (4, 3)])
def test_rows_come_to_their_place(ranks, seed, fp8):
    """With counts, with a handle, for the worst case, and back by combine."""
    world = make_world([(17, 4, 9, 0)[r] * SCALE for r in range(ranks)], seed, fp8=fp8)
    right, worst = right_of(world), 20 * ranks * SCALE

    def work(buffer, rank):
        out = new_output(buffer, worst, fp8)
        given = send(buffer, rank, world, out=out)
        check_received(given, right[rank], rank, world.experts // ranks)
        here = given[0][0] if fp8 else given[0]
        assert here.data_ptr() == out.x.data_ptr() or not len(here)
        back = None if fp8 else buffer.combine(here, given[4], given[2], config=SMALL)[:2]
        x, config = to(buffer.transport.device, world.x[rank]), WIDE if seed else SMALL
        out.x.view(torch.uint8).fill_(77)
        again = buffer.dispatch(x, given[4], config=config, out=out)
        assert same(again[0], right[rank].x)
        check_received(
            send(buffer, rank, world, num_worst_tokens=worst, out=out), right[rank], rank, world.experts // ranks, worst
        )
        out.close()
        return back

    backs = run(ranks, work, seed)
    if not fp8:
        check_combined(backs, world, right, [r.x for r in right], [r.topk_weights for r in right])


def test_rings_and_outputs_by_turns():
    """A handle is good for both ways, and what came by one stays when something comes by the other."""
    world, other = (make_world([13 * SCALE, 8 * SCALE], seed) for seed in (0, 1))
    right, right_other = right_of(world), right_of(other)

    def work(buffer, rank):
        device, outs = buffer.transport.device, [new_output(buffer, 21 * SCALE) for _ in range(2)]
        by_rings = send(buffer, rank, world)
        straight = send(buffer, rank, other, out=outs[0])
        x, x_other = to(device, world.x[rank]), to(device, other.x[rank])
        crossed = buffer.dispatch(x, by_rings[4], config=SMALL, out=outs[1])
        back = buffer.dispatch(x_other, straight[4], config=SMALL)
        for given in (by_rings, crossed):
            assert same(given[0], right[rank].x) and same(given[4][3], right[rank].src_idx)
        for given in (straight, back):
            assert same(given[0], right_other[rank].x)
        for out in outs:
            out.close()

    run(2, work)


def what_is_read_late(world):
    """Whether each rank finds its own rows in an output that it reads late, when others are at the next dispatch."""
    right = right_of(world)

    def work(buffer, rank):
        out = new_output(buffer, sum(map(len, world.topk_idx)))
        x = to(buffer.transport.device, world.x[rank])
        handle, found = send(buffer, rank, world, out=out)[4], []
        for factor in (1, 2, 4):
            given = buffer.dispatch(x * factor, handle, config=SMALL, out=out)
            if not simulator.ENABLED and rank == 0:
                torch.cuda._sleep(20_000_000)  # some ten milliseconds
            found.append(given[0].clone())
        out.close()
        return [same(x, right[rank].x * factor) for x, factor in zip(found, (1, 2, 4), strict=True)]

    return run(2, work)


def test_what_is_still_read_is_not_overwritten():
    assert all(map(all, what_is_read_late(make_world([13 * SCALE, 8 * SCALE]))))


def test_too_many_rows_are_refused_and_nothing_is_written_beyond():
    world = make_world([9 * SCALE, 9 * SCALE], only=1)

    def work(buffer, rank):
        out = new_output(buffer, 8)
        out.num_rows = 4  # the others are there to see whether somebody writes to them
        out.src_idx.fill_(-7)
        buffer.transport.gather(None)
        send(buffer, rank, world, num_worst_tokens=4, out=out)
        if not simulator.ENABLED:
            torch.cuda.synchronize()
        if rank == 1:
            assert (out.src_idx[4:] == -7).all()
        error, match = (ValueError, "the output has 4 rows") if rank else (TimeoutError, "rank 0 waited for rank 1")
        with pytest.raises(error, match=match):
            send(buffer, rank, world, num_worst_tokens=4, out=out)

    run(2, work, timeout=IMPATIENT)


def test_outputs_that_are_refused():
    world = make_world([6], topk=2)
    fp8 = make_world([6], topk=2, fp8=True)

    def work(buffer, rank):
        refused(ValueError, "num_rows is 0", buffer.new_output, 0, HIDDEN)
        refused(TypeError, "dtype is torch.float16", buffer.new_output, 8, HIDDEN, torch.float16)
        refused(ValueError, "hidden is 12, which makes rows of 24 bytes", buffer.new_output, 8, 12)
        refused(ValueError, "num_scales is 1; 0 to 0", buffer.new_output, 8, HIDDEN, num_scales=1)
        refused(TypeError, "scale_dtype is torch.int8", buffer.new_output, 8, HIDDEN, scale_dtype=torch.int8)
        refused(ValueError, "num_topk is 33", buffer.new_output, 8, HIDDEN, num_topk=33)
        out, few = new_output(buffer, 8), new_output(buffer, 2)
        refused(TypeError, "out is Tensor", send, buffer, rank, world, out=out.x)
        refused(ValueError, "out has rows of", send, buffer, rank, fp8, out=out)
        refused(ValueError, "9 will arrive", send, buffer, rank, world, num_worst_tokens=9, out=out)
        handle = send(buffer, rank, world, out=out)[4]
        x = to(buffer.transport.device, world.x[0])
        refused(ValueError, "capacity for 2 rows", buffer.dispatch, x, handle, out=few)
        scales = buffer.new_output(8, HIDDEN, FP8, num_scales=1, num_topk=2)
        refused(ValueError, "out has 1 scales", send, buffer, rank, fp8, out=scales)
        refused(ValueError, "experts per row", send, buffer, rank, world, out=buffer.new_output(8, HIDDEN))
        other = Buffer(buffer.transport, 1 << 16)
        out.close()
        refused(ValueError, "was closed", send, other, rank, world, out=out)
        out.close()

    run(1, work)


def test_outputs_that_are_not_alike_are_refused():
    """Or rows would go beyond the smaller one."""

    def work(buffer, rank):
        refused(ValueError, "the argument tuple of new_output is .* on the ranks", new_output, buffer, 8 * (1 + rank))

    run(2, work)


# Kernels that are wrong must be found out


@pytest.mark.skipif(not simulator.ENABLED, reason="a GPU's memory is not weak at will")
def test_rows_that_are_on_their_way_when_the_kernel_ends_are_found_out(monkeypatch):
    assert fails_under_some_seed(
        monkeypatch, dispatch_direct, "bulk_wait_all", lambda: None, lambda buffer: new_output(buffer, 16)
    )


def only_before(runtime, has_synchronized=False):
    """No barrier after the operation."""
    if not has_synchronized:
        runtime._barrier()
    return contextlib.nullcontext()


def only_after(runtime, has_synchronized=False):
    """No barrier before the operation."""
    after = contextlib.ExitStack()
    after.callback(runtime._barrier)
    return after


@pytest.mark.skipif(simulator.ENABLED, reason="where kernels run together none runs ahead")
@pytest.mark.parametrize("with_barriers, tokens", [(only_before, [6000, 1]), (only_after, [13 * SCALE, 8 * SCALE])])
def test_ranks_that_do_not_meet_are_found_out(monkeypatch, with_barriers, tokens):
    monkeypatch.setattr(Runtime, "with_barriers", with_barriers)
    assert not all(map(all, what_is_read_late(make_world(tokens))))
