"""Shared by the tests of ``Buffer``: random inputs, runs on all ranks, and checks against the reference."""

import contextlib
from typing import NamedTuple

import pytest
import torch

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, Config, reference
from moe_numba.expert_parallel.ranks.local_group import LocalGroup

FP8 = torch.float8_e4m3fn
HIDDEN = 32 if simulator.ENABLED else 1024
SCALE = 1 if simulator.ENABLED else 60  # multiplies the numbers of tokens
SMALL = Config(2, 1, 23) if simulator.ENABLED else Config(4, 1, 32)  # short rings, which wrap around many times
WIDE = Config(4, 6, 64) if simulator.ENABLED else Config(12, 6, 256)
NUM_BYTES = 1 << 16 if simulator.ENABLED else 1 << 26
SHORT_TIMEOUT = 3e-3 if simulator.ENABLED else 0.5  # seconds, for waits that must time out


class Inputs(NamedTuple):
    """The inputs of all ranks, one list entry each."""

    x: list
    topk_idx: list
    topk_weights: list
    experts: int


def make_inputs(num_tokens, seed=0, hidden=HIDDEN, topk=2, experts_per_rank=2, fp8=False, only=None):
    """Draw random tokens and experts, some of them -1; with ``only`` all experts are on that rank."""
    generator, ranks = torch.Generator().manual_seed(seed), len(num_tokens)
    experts = ranks * experts_per_rank
    low, high = (0, experts) if only is None else (only * experts_per_rank, (only + 1) * experts_per_rank)
    x, topk_idx, topk_weights = [], [], []
    for tokens in num_tokens:
        values = torch.randn(tokens, hidden, generator=generator)
        scales = torch.rand(hidden // 8, tokens, generator=generator).T  # column-major
        x.append((values.to(FP8), scales) if fp8 else values.bfloat16())
        chosen = torch.randint(low, high, (tokens, topk), generator=generator)
        topk_idx.append(chosen.where(torch.rand(tokens, topk, generator=generator) > 0.2, -1))
        topk_weights.append(torch.rand(tokens, topk, generator=generator))
    return Inputs(x, topk_idx, topk_weights, experts)


def to_device(device, value):
    """Move a tensor or tuple to a device, and keep the strides."""
    return tuple(to_device(device, v) for v in value) if isinstance(value, tuple) else value.to(device)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).cpu()


def bitwise_equal(given, wanted):
    """Return whether tensors are equal bit for bit, so that a NaN equals itself."""
    if isinstance(wanted, tuple):
        return all(bitwise_equal(g, w) for g, w in zip(given, wanted, strict=True))
    return given.shape == wanted.shape and given.dtype == wanted.dtype and torch.equal(bits(given), bits(wanted))


@contextlib.contextmanager
def engine(seed):
    """Set the simulator's thread order, and enable weak memory."""
    with contextlib.ExitStack() as stack:
        if simulator.ENABLED:
            stack.enter_context(simulator.seed(seed))
            stack.enter_context(simulator.weak_memory())
        yield


def run(ranks, work, seed=0, **options):
    """Run ``work(buffer, rank)`` on every rank, each with its own buffer."""

    def on_rank(transport):
        buffer = Buffer(transport, NUM_BYTES, **options)
        result = work(buffer, transport.rank)
        buffer.destroy()
        return result

    with engine(seed):
        return LocalGroup(ranks).run(on_rank)


def send(buffer, rank, inputs, config=SMALL, **options):
    """Compute the layout and dispatch on one rank; return the result of dispatch."""
    device = buffer.transport.device
    x, idx, weights = (to_device(device, part[rank]) for part in inputs[:3])
    per_rank, rdma, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, inputs.experts)
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


def reference_dispatch(inputs):
    """Return the reference's result of a dispatch for all ranks."""
    ranks = len(inputs.x)
    is_token_in_rank = [reference.dispatch_layout(idx, ranks, inputs.experts)[2] for idx in inputs.topk_idx]
    return reference.dispatch(inputs.x, is_token_in_rank, inputs.topk_idx, inputs.topk_weights, inputs.experts)


def check_received(given, right, rank, experts_per_rank, rows=None):
    """Check what one rank received; with ``rows`` the outputs are padded to that many rows."""
    x, idx, weights, counts, handle, _ = given
    num_rows = len(right.src_idx)
    cut = (lambda t: t[:num_rows]) if rows else (lambda t: t)
    assert bitwise_equal(tuple(map(cut, x)) if isinstance(x, tuple) else cut(x), right.x)
    assert torch.equal(cut(idx).cpu(), right.topk_idx) and torch.equal(cut(weights).cpu(), right.topk_weights)
    assert torch.equal(cut(handle[3]).cpu(), right.src_idx)
    assert torch.equal(handle[0].cpu(), right.rank_prefix_matrix)
    if rows:
        assert counts == [] and len(idx) == rows and bool((idx[num_rows:] == -1).all())
    else:
        assert counts == [int((right.topk_idx == e).sum()) for e in range(experts_per_rank)]


def check_combined(given, inputs, right, y, weights, biases=None):
    """Check that the results equal bit for bit a float32 sum in rank order."""
    ranks = len(inputs.x)
    tokens = [len(idx) for idx in inputs.topk_idx]
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
        assert bitwise_equal(out, total.bfloat16())
        torch.testing.assert_close(out.double(), exact[rank][0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(out_weights.double(), exact[rank][1], rtol=1e-6, atol=1e-6)


def refused(error, match, call, *args, **kwargs):
    with pytest.raises(error, match=match):
        call(*args, **kwargs)


def exchange_on_two_ranks(seed, new_out=lambda buffer: None):
    """Dispatch with counts and with a handle, and combine; check all results."""
    inputs = make_inputs([7, 9])
    right = reference_dispatch(inputs)

    def work(buffer, rank):
        out = new_out(buffer)
        given = send(buffer, rank, inputs, out=out)
        check_received(given, right[rank], rank, inputs.experts // 2)
        again = buffer.dispatch(inputs.x[rank], handle=given[4], config=SMALL, out=out)
        assert bitwise_equal(again[0], right[rank].x)
        return buffer.combine(right[rank].x, given[4], given[2], config=SMALL)[:2]

    given = run(2, work, seed, timeout=4e-3)
    check_combined(given, inputs, right, [r.x for r in right], [r.topk_weights for r in right])


def fails_under_some_seed(exchange=exchange_on_two_ranks):
    """Return whether ``exchange(seed)`` ends with a wrong result or an error for some seed."""
    for seed in range(30):
        try:
            exchange(seed)
        except (AssertionError, simulator.SimulatorError, TimeoutError, ValueError):
            return True
    return False


def new_output(buffer, rows, fp8=False):
    """Allocate an output for the rows of ``make_inputs``."""
    return buffer.new_output(rows, HIDDEN, FP8 if fp8 else torch.bfloat16, HIDDEN // 8 if fp8 else 0, num_topk=2)
