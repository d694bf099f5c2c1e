"""Direct dispatch to outputs in symmetric memory, in the simulator or on GPUs, against the reference."""

import contextlib
from functools import partial

import pytest
import torch
from helpers.expert_parallel import (
    FP8,
    HIDDEN,
    SCALE,
    SHORT_TIMEOUT,
    SMALL,
    WIDE,
    bitwise_equal,
    check_combined,
    check_received,
    exchange_on_two_ranks,
    fails_under_some_seed,
    make_inputs,
    new_output,
    reference_dispatch,
    refused,
    run,
    send,
    to_device,
)
from helpers.wrong_kernels import changed

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.ranks.rank_state import RankState
from moe_numba.expert_parallel.rings import dispatch_direct
from moe_numba.runtime.launch import current_stream


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "ranks, seed, uses_tma",
    [(1, 0, None), (2, 0, None), (2, 1, None), (3, 2, None), (4, 3, None), (2, 0, False), (3, 2, False)],
    indirect=["uses_tma"],
)
def test_dispatch_to_an_output(ranks, seed, uses_tma, fp8):
    """With counts, with a handle, with num_worst_tokens, and back with combine."""
    inputs = make_inputs([(17, 4, 9, 0)[r] * SCALE for r in range(ranks)], seed, fp8=fp8)
    right, worst = reference_dispatch(inputs), 20 * ranks * SCALE

    def work(buffer, rank):
        out = new_output(buffer, worst, fp8)
        given = send(buffer, rank, inputs, out=out)
        check_received(given, right[rank], rank, inputs.experts // ranks)
        here = given[0][0] if fp8 else given[0]
        assert here.data_ptr() == out.x.data_ptr() or not len(here)
        back = None if fp8 else buffer.combine(here, given[4], given[2], config=SMALL)[:2]
        x, config = to_device(buffer.transport.device, inputs.x[rank]), WIDE if seed else SMALL
        out.x.view(torch.uint8).fill_(77)
        again = buffer.dispatch(x, given[4], config=config, out=out)
        assert bitwise_equal(again[0], right[rank].x)
        check_received(
            send(buffer, rank, inputs, num_worst_tokens=worst, out=out),
            right[rank],
            rank,
            inputs.experts // ranks,
            worst,
        )
        out.close()
        return back

    backs = run(ranks, work, seed)
    if not fp8:
        check_combined(backs, inputs, right, [r.x for r in right], [r.topk_weights for r in right])


def test_rings_and_outputs_interleaved():
    """A handle works for both kernels, and neither kernel overwrites the results of the other."""
    inputs, other = (make_inputs([13 * SCALE, 8 * SCALE], seed) for seed in (0, 1))
    right, right_other = reference_dispatch(inputs), reference_dispatch(other)

    def work(buffer, rank):
        device, outs = buffer.transport.device, [new_output(buffer, 21 * SCALE) for _ in range(2)]
        by_rings = send(buffer, rank, inputs)
        direct = send(buffer, rank, other, out=outs[0])
        x, x_other = to_device(device, inputs.x[rank]), to_device(device, other.x[rank])
        crossed = buffer.dispatch(x, by_rings[4], config=SMALL, out=outs[1])
        back = buffer.dispatch(x_other, direct[4], config=SMALL)
        for given in (by_rings, crossed):
            assert bitwise_equal(given[0], right[rank].x) and bitwise_equal(given[4][3], right[rank].src_idx)
        for given in (direct, back):
            assert bitwise_equal(given[0], right_other[rank].x)
        for out in outs:
            out.close()

    run(2, work)


def late_reads_are_right(inputs):
    """Return whether each rank finds its rows in an output that it reads while peers start the next dispatch."""
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        out = new_output(buffer, sum(map(len, inputs.topk_idx)))
        x = to_device(buffer.transport.device, inputs.x[rank])
        handle, found = send(buffer, rank, inputs, out=out)[4], []
        for factor in (1, 2, 4):
            given = buffer.dispatch(x * factor, handle, config=SMALL, out=out)
            if not simulator.ENABLED and rank == 0:
                torch.cuda._sleep(20_000_000)  # about ten milliseconds
            found.append(given[0].clone())
        out.close()
        return [bitwise_equal(x, right[rank].x * factor) for x, factor in zip(found, (1, 2, 4), strict=True)]

    return run(2, work)


def test_an_output_is_not_overwritten_while_it_is_read():
    assert all(map(all, late_reads_are_right(make_inputs([13 * SCALE, 8 * SCALE]))))


def test_too_many_rows_are_refused_and_writes_are_clipped():
    inputs = make_inputs([9 * SCALE, 9 * SCALE], only=1)

    def work(buffer, rank):
        out = new_output(buffer, 8)
        out.num_rows = 4  # the other rows show writes beyond the capacity
        out._prepare_launches()
        out.src_idx.fill_(-7)
        buffer.transport.gather(None)
        send(buffer, rank, inputs, num_worst_tokens=4, out=out)
        if not simulator.ENABLED:
            torch.cuda.synchronize()
        if rank == 1:
            assert (out.src_idx[4:] == -7).all()
        with pytest.raises(ValueError, match="rank 1 receives .* tokens; the output has 4 rows"):
            send(buffer, rank, inputs, num_worst_tokens=4, out=out)

    run(2, work, timeout=SHORT_TIMEOUT)


def test_invalid_outputs():
    inputs = make_inputs([6], topk=2)
    fp8 = make_inputs([6], topk=2, fp8=True)

    def work(buffer, rank):
        refused(ValueError, "num_rows is 0", buffer.new_output, 0, HIDDEN)
        refused(TypeError, "dtype is torch.float16", buffer.new_output, 8, HIDDEN, torch.float16)
        refused(ValueError, "hidden is 12, which makes rows of 24 bytes", buffer.new_output, 8, 12)
        refused(ValueError, "num_scales is 1; 0 to 0", buffer.new_output, 8, HIDDEN, num_scales=1)
        refused(TypeError, "scale_dtype is torch.int8", buffer.new_output, 8, HIDDEN, scale_dtype=torch.int8)
        refused(ValueError, "num_topk is 33", buffer.new_output, 8, HIDDEN, num_topk=33)
        out, few = new_output(buffer, 8), new_output(buffer, 2)
        refused(TypeError, "out is Tensor", send, buffer, rank, inputs, out=out.x)
        refused(ValueError, "out has rows of", send, buffer, rank, fp8, out=out)
        refused(ValueError, "9 will arrive", send, buffer, rank, inputs, num_worst_tokens=9, out=out)
        handle = send(buffer, rank, inputs, out=out)[4]
        x = to_device(buffer.transport.device, inputs.x[0])
        refused(ValueError, "capacity for 2 rows", buffer.dispatch, x, handle, out=few)
        scales = buffer.new_output(8, HIDDEN, FP8, num_scales=1, num_topk=2)
        refused(ValueError, "out has 1 scales", send, buffer, rank, fp8, out=scales)
        refused(ValueError, "experts per row", send, buffer, rank, inputs, out=buffer.new_output(8, HIDDEN))
        other = Buffer(buffer.transport, 1 << 16)
        out.close()
        refused(ValueError, "was closed", send, other, rank, inputs, out=out)
        out.close()

    run(1, work)


def test_outputs_of_different_sizes_are_refused():
    """Rows would be written beyond the end of the smaller one."""

    def work(buffer, rank):
        refused(
            ValueError,
            "new_output: num_rows is 8 on rank 0 and 16 on rank 1; it must be",
            new_output,
            buffer,
            8 * (1 + rank),
        )

    run(2, work)


# Wrong kernels must be rejected


@pytest.mark.skipif(not simulator.ENABLED, reason="needs the simulator's weak memory")
def test_a_kernel_that_ends_before_its_bulk_copies_is_rejected(monkeypatch):
    wrong = changed(dispatch_direct, "pipeline.wait_all()", "pass")
    monkeypatch.setattr(dispatch_direct, "make_dispatch_direct", wrong["make_dispatch_direct"])
    assert fails_under_some_seed(partial(exchange_on_two_ranks, new_out=lambda buffer: new_output(buffer, 16)))


def only_before(runtime, has_synchronized=False, out=None):
    """No barrier after the operation."""
    if not has_synchronized:
        runtime.barrier(current_stream(runtime.transport.device.index))
    return contextlib.nullcontext()


def only_after(runtime, has_synchronized=False, out=None):
    """No barrier before the operation."""
    after = contextlib.ExitStack()
    after.callback(lambda: runtime.barrier(current_stream(runtime.transport.device.index)))
    return after


@pytest.mark.skipif(simulator.ENABLED, reason="simulated ranks do not run ahead")
@pytest.mark.parametrize("with_barriers, tokens", [(only_before, [6000, 1]), (only_after, [13 * SCALE, 8 * SCALE])])
def test_missing_barriers_are_rejected(monkeypatch, with_barriers, tokens):
    monkeypatch.setattr(RankState, "with_barriers", with_barriers)
    assert not all(map(all, late_reads_are_right(make_inputs(tokens))))
