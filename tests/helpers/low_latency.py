"""Shared by the tests of low-latency dispatch and combine: rounds on all ranks, checked against torch."""

import torch

from helpers.expert_parallel import FP8, NUM_BYTES, bitwise_equal, engine
from moe_numba import simulator
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.quantise import reference

SMS = 2 if simulator.ENABLED else 20
HIDDEN = 32 if simulator.ENABLED else 1024
FP8_HIDDEN = 512
# For tests with one process per GPU: topk, most tokens of a rank, scales.
KINDS = (2, 1, None), (8, 16, None), (9, 128, None), (8, 64, "float32")
EXPERTS_PER_RANK = 8
SHORT_TIMEOUT = 4e-3 if simulator.ENABLED else 0.5


def make_round(counts, seed, topk=2, experts_per_rank=2, hidden=HIDDEN, id_dtype=torch.int64):
    """Draw the tokens, experts and weights of all ranks: repeated experts, -1, and other values that are no expert."""
    generator, experts = torch.Generator().manual_seed(seed), len(counts) * experts_per_rank
    x, ids, weights = [], [], []
    for count in counts:
        x.append(torch.randn(count, hidden, generator=generator).bfloat16())
        chosen = torch.randint(0, experts, (count, topk), generator=generator)
        invalid = torch.tensor([-1, -7, experts, (1 << 31) - 1])[torch.randint(4, (count, topk), generator=generator)]
        ids.append(chosen.where(torch.rand(count, topk, generator=generator) > 0.2, invalid).to(id_dtype))
        weights.append(torch.rand(count, topk, generator=generator))
    return x, ids, weights


def expected_rows(ids, rank, experts_per_rank):
    """Return (source rank, token) of each row of each expert of a rank, and the row of each [source][token][k]."""
    rows = [[] for _ in range(experts_per_rank)]
    where = {}
    for source, of_source in enumerate(ids):
        for token, experts in enumerate(of_source.tolist()):
            for k, expert in enumerate(experts):
                local = expert - rank * experts_per_rank
                if 0 <= local < experts_per_rank:
                    if expert not in experts[:k]:
                        where[source, token, k] = local, len(rows[local])
                        rows[local].append((source, token))
                    else:
                        where[source, token, k] = where[source, token, experts.index(expert)]
    return rows, where


def quantized(x, scales):
    """Return FP8 values and scales of tokens, as torch computes them."""
    if scales is None:
        return x, None
    values, found = reference.per_token_cast_to_fp8(x)
    if scales != "float32":
        found = torch.exp2(torch.ceil(torch.log2(found)))
        groups = x.float().view(len(x), x.shape[1] // reference.FP8_SCALE_BLOCK, reference.FP8_SCALE_BLOCK)
        values = (groups / found[:, :, None]).flatten(1).to(FP8)
    if scales == "ue8m0":
        found = (found.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return values, found


def check_packed(recv_x, counts, handle, inputs, rank, scales=None):
    """Check what one rank received, packed by expert."""
    x, ids, _ = inputs
    experts_per_rank = len(counts)
    recv_x, recv_scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    rows, _ = expected_rows(ids, rank, experts_per_rank)
    assert counts.tolist() == [len(r) for r in rows]
    sent = [quantized(part, scales) for part in x]
    for e, of_expert in enumerate(rows):
        assert handle[0][e, : len(of_expert)].tolist() == [token for _, token in of_expert]
        begins = [sum(s < source for s, _ in of_expert) for source in range(len(ids))]
        sizes = [sum(s == source for s, _ in of_expert) for source in range(len(ids))]
        assert handle[1][e].tolist() == [begin << 32 | size for begin, size in zip(begins, sizes, strict=True)]
        for i, (source, token) in enumerate(of_expert):
            assert bitwise_equal(recv_x[e, i], sent[source][0][token])
            if scales is not None:
                found, wanted = recv_scales[e, i], sent[source][1][token]
                assert torch.equal(found.cpu().view(torch.int32), wanted.view(torch.int32))


def fma(a, b, c):
    """a * b + c, rounded once to float32."""
    return (a.double() * b.double() + c.double()).float()


def in_fp8(part):
    """Return a sum [hidden], float32, in FP8 and its scales, for each element, as combine quantises it."""
    groups = part.view(-1, reference.FP8_SCALE_BLOCK)
    amax = groups.abs().amax(1, keepdim=True).clamp(min=reference.AMAX_MIN)
    amax = torch.where(groups.isnan().any(1, keepdim=True), float("nan"), amax)
    values = (groups * (amax.reciprocal() * reference.FP8_MAX)).to(FP8).float()
    return values.flatten(), (amax * (1 / reference.FP8_MAX)).expand_as(groups).flatten()


def check_weighted_sums(combined, ys, inputs, rank, experts_per_rank, fp8=False, own_in_fp8=False):
    """Check the combined tokens of a rank bit for bit: ranks' sums in bfloat16, added in rank order in float32.

    With ``fp8`` the other ranks' sums are rounded to FP8, and the result must have the precision that is promised.
    """
    x, ids, weights = inputs
    places = [expected_rows(ids, peer, experts_per_rank)[1] for peer in range(len(ys))]
    for token in range(len(x[rank])):
        total = torch.zeros(x[rank].shape[1])
        exact, bound = torch.zeros_like(total), torch.zeros_like(total)
        for peer, (y, where) in enumerate(zip(ys, places, strict=True)):
            part, found = torch.zeros_like(total), False
            for k in range(ids[rank].shape[1]):
                if (rank, token, k) in where:
                    part, found = fma(weights[rank][token, k], y[where[rank, token, k]].float(), part), True
            if found and fp8 and (peer != rank or own_in_fp8):
                values, scales = in_fp8(part)
                total = fma(values, scales, total)
                largest = scales * reference.FP8_MAX
                exact, bound = (
                    exact + part,
                    bound + torch.maximum(part.abs() / 16, largest * 2**-10 / reference.FP8_MAX),
                )
            elif found:
                total += part.bfloat16().float()
                exact, bound = exact + part, bound + part.abs() / 256
        assert bitwise_equal(combined[token], total.bfloat16())
        deviation = (combined[token].float() - exact).abs()
        assert ((deviation <= 1.01 * (bound + exact.abs() / 256)) | exact.isnan()).all()


def experts_result(recv_x, counts):
    """Return a result of the experts with the shape of packed rows: NaN where there is no row."""
    values = recv_x[0] if isinstance(recv_x, tuple) else recv_x
    y = torch.full(values.shape, float("nan"), dtype=torch.bfloat16, device=values.device)
    for e, count in enumerate(counts.tolist()):
        y[e, :count] = (values[e, :count].float() * (1 + e)).bfloat16()
    return y


def run(ranks, work, seed=0, **options):
    """Run ``work(buffer, rank)`` on every rank, each with its own low-latency buffer."""

    def on_rank(transport):
        buffer = Buffer(transport, NUM_BYTES, low_latency_mode=True, **options)
        buffer._low_latency.num_sms = SMS
        result = work(buffer, transport.rank)
        buffer.destroy()
        return result

    with engine(seed):
        return LocalGroup(ranks).run(on_rank)


def synchronize(buffer):
    """Wait until this rank's kernels have ended."""
    buffer._runtime.synchronize()
