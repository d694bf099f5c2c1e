"""The calls that programs written for DeepEP make, through a module named ``deep_ep`` that re-exports this package."""

import types

import torch

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, Config, EventOverlap, reference, topk_idx_t

HIDDEN = 128 if simulator.ENABLED else 1024
TOKENS, TOPK, EXPERTS_PER_RANK = (3, 2, 2) if simulator.ENABLED else (512, 8, 32)
NUM_SMS = 2 if simulator.ENABLED else 24
MODES = [(False, False), (True, True)] if simulator.ENABLED else [(p, a) for p in (False, True) for a in (False, True)]


def make_deep_ep():
    """Return a module with the names that ``deep_ep`` has for a node."""
    module = types.ModuleType("deep_ep")
    module.Buffer, module.Config, module.EventOverlap, module.topk_idx_t = Buffer, Config, EventOverlap, topk_idx_t
    return module


def make_buffer(deep_ep, group, ranks):
    """Size and make a buffer as serving engines do, with the constructor's arguments by name."""
    sizes = [0, 0]
    for config in (deep_ep.Config(NUM_SMS, 8, 256), deep_ep.Buffer.get_combine_config(ranks)):
        sizes[0] = max(sizes[0], config.get_nvl_buffer_size_hint(2 * HIDDEN, ranks))
        sizes[1] = max(sizes[1], config.get_rdma_buffer_size_hint(2 * HIDDEN, ranks))
    return deep_ep.Buffer(
        group,
        *sizes,
        low_latency_mode=False,
        num_qps_per_rank=1,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        use_fabric=False,
        explicitly_destroy=True,
        enable_shrink=False,
    )


def exchange_as_deepep_tests(deep_ep, group, rank, ranks, device):
    """Lay out, dispatch (with counts, in the worst case, with a handle) and combine in all modes, and check it.

    Each row holds the number of its source rank, so that every result is known. No tensor is made on the default
    device, which a program may have set to a GPU.
    """
    buffer, experts = make_buffer(deep_ep, group, ranks), ranks * EXPERTS_PER_RANK
    new = lambda *shape, value=0.0, dtype=torch.float32: torch.full(shape, value, dtype=dtype, device=device)
    generator = torch.Generator(device="cpu").manual_seed(rank)
    scores = torch.rand(TOKENS, experts, generator=generator, device="cpu")
    topk_idx = scores.topk(TOPK, sorted=False).indices.to(device).to(deep_ep.topk_idx_t)
    weights = new(TOKENS, TOPK, value=rank + 0.5)
    x, config = new(TOKENS, HIDDEN, value=rank, dtype=torch.bfloat16), deep_ep.Config(NUM_SMS, 8, 256)
    inputs = [x]
    if deep_ep.Buffer.is_sm90_compiled():
        scales = new(HIDDEN // 128, TOKENS, value=1.0).T  # column-major
        inputs.append((x.to(torch.float8_e4m3fn), scales))

    layout = buffer.get_dispatch_layout(topk_idx, experts)
    per_rank, between_nodes, per_expert, is_token_in_rank, _ = layout
    for given, right in zip(
        (per_rank, per_expert, is_token_in_rank), reference.dispatch_layout(topk_idx, ranks, experts), strict=True
    ):
        assert torch.equal(given, right) and between_nodes is None
    counts = buffer.transport.gather((per_rank.cpu(), per_expert.cpu()))
    from_rank = [int(c[0][rank]) for c in counts]
    local = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
    per_local_expert = sum(c[1] for c in counts)[local].tolist()
    copies = is_token_in_rank.sum(dim=1, keepdim=True)

    def values(received):
        return received[0].float() * received[1][:, :1] if isinstance(received, tuple) else received.float()

    def run(call, has_event, is_async, **arguments):
        if has_event:
            arguments["previous_event"] = buffer.capture()
        results = call(async_finish=is_async, config=config, **arguments)
        if is_async:
            results[-1].current_stream_wait()
        return results[:-1]

    for mode in MODES:
        for given in inputs:
            for with_topk in (False, True):
                arguments = dict(
                    x=given,
                    num_tokens_per_rank=per_rank,
                    is_token_in_rank=is_token_in_rank,
                    num_tokens_per_expert=per_expert,
                )
                if with_topk:
                    arguments |= dict(topk_idx=topk_idx, topk_weights=weights)
                recv_x, recv_idx, recv_weights, numbers, handle = run(buffer.dispatch, *mode, **arguments)
                rows, prefix = values(recv_x), [0, *handle[0][:, rank].tolist()]
                assert prefix[-1] == rows.size(0) == sum(from_rank) and numbers == per_local_expert
                for source in range(ranks):
                    assert (rows[prefix[source] : prefix[source + 1]] == source).all()
                if with_topk:
                    assert [int((recv_idx == e).sum()) for e in range(EXPERTS_PER_RANK)] == numbers
                    worst = ranks * TOKENS
                    again = run(buffer.dispatch, *mode, **arguments, num_worst_tokens=worst)
                    assert again[3] == [] and len(values(again[0])) == worst
                    assert torch.equal(values(again[0])[: len(rows)], rows)
                    for padded, exact in zip(again[1:3], (recv_idx, recv_weights), strict=True):
                        assert len(padded) == worst and torch.equal(padded[: len(rows)], exact)
                    assert (again[1][len(rows) :] == -1).all()
                else:
                    again = run(buffer.dispatch, *mode, x=given, handle=handle)
                    assert torch.equal(values(again[0]), rows)
                arguments = dict(x=rows.bfloat16(), handle=handle)
                if with_topk:
                    arguments["topk_weights"] = recv_weights
                combined, combined_weights = run(buffer.combine, *mode, **arguments)
                assert torch.equal(combined.float(), x.float() * copies)
                assert not with_topk or torch.equal(combined_weights, weights)

    deep_ep.Buffer.set_num_sms(NUM_SMS)
    recv_x = buffer.dispatch(x, handle=handle, config=deep_ep.Buffer.get_dispatch_config(ranks))[0]
    combined, _, event = buffer.combine(recv_x, handle, config=deep_ep.Buffer.get_combine_config(ranks))
    assert torch.equal(combined.float(), x.float() * copies) and isinstance(event, deep_ep.EventOverlap)
    buffer.destroy()


LL_HIDDEN = 512  # a multiple that the scales of UE8M0 need
LL_TOKENS, LL_TOPK, LL_EXPERTS_PER_RANK = (2, 2, 2) if simulator.ENABLED else (128, 8, 144)
LL_FORMATS = {  # of rows: the options of dispatch
    "bf16": dict(use_fp8=False),
    "fp8": dict(use_fp8=True, round_scale=False, use_ue8m0=False),
    "rounded": dict(use_fp8=True, round_scale=True, use_ue8m0=False),
    "ue8m0": dict(use_fp8=True, round_scale=True, use_ue8m0=True),
}
LL_MODES = (
    [(False, "fp8"), (True, "ue8m0")] if simulator.ENABLED else [(h, f) for h in (False, True) for f in LL_FORMATS]
)


def exchange_as_deepep_low_latency_test(deep_ep, group, rank, ranks, device):
    """Dispatch and combine in DeepEP's low-latency mode: hooks or events, row formats, zero copy, statistics; check it.

    As in `exchange_as_deepep_tests` each row holds the number of its source rank, and at its end that of its token.
    """
    experts = ranks * LL_EXPERTS_PER_RANK
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(LL_TOKENS, LL_HIDDEN, ranks, experts)
    buffer = deep_ep.Buffer(
        group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=experts // ranks,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
        allow_mnnvl=False,
        enable_shrink=False,
    )
    buffer._low_latency.num_sms = 2 if simulator.ENABLED else None
    generator = torch.Generator(device="cpu").manual_seed(rank)
    scores = torch.rand(LL_TOKENS, experts, generator=generator, device="cpu")
    topk_idx = scores.topk(LL_TOPK, dim=-1).indices.to(device).to(deep_ep.topk_idx_t)
    topk_idx[0, 1] = -1
    topk_weights = torch.rand(LL_TOKENS, LL_TOPK, generator=generator, device="cpu", dtype=torch.float32).to(device)
    x = torch.full((LL_TOKENS, LL_HIDDEN), rank - 128, dtype=torch.bfloat16, device=device)
    x[:, -128:] = torch.arange(LL_TOKENS, device=device).to(torch.bfloat16)[:, None]
    all_topk_idx = torch.stack(buffer.transport.gather(topk_idx.cpu()))
    sums = x.float() * topk_weights.masked_fill(topk_idx == -1, 0).sum(dim=1).view(-1, 1)

    def values(received):
        if not isinstance(received, tuple):
            return received.clone()
        rows, scales = received[0], received[1].new_empty(received[1].shape).copy_(received[1])  # with a stride of 1
        if scales.dtype == torch.int32:
            scales = (scales.view(torch.uint8).int() << 23).view(torch.float32)
        return (rows.float() * scales.repeat_interleave(128, dim=-1)).nan_to_num().bfloat16()

    for has_hook, row_format in LL_MODES:
        phases = dict(async_finish=not has_hook, return_recv_hook=has_hook)
        end = lambda event, hook, has_hook=has_hook: hook() if has_hook else event.current_stream_wait()
        # A scale that is the maximum / 448 makes these values exact; rounded, it leaves e4m3's 3 bits.
        close = dict(rtol=0.07 if row_format in ("rounded", "ue8m0") else 0, atol=0)
        stats = torch.zeros(LL_EXPERTS_PER_RANK, dtype=torch.int, device=device)
        received, counts, handle, event, hook = buffer.low_latency_dispatch(
            *(x, topk_idx, LL_TOKENS, experts),
            cumulative_local_expert_recv_stats=stats,
            **LL_FORMATS[row_format],
            **phases,
        )
        end(event, hook)
        rows, (src_info, layout_range) = values(received), handle[:2]
        assert torch.equal(stats, counts) and rows.shape == (LL_EXPERTS_PER_RANK, ranks * LL_TOKENS, LL_HIDDEN)
        for i, count in enumerate(counts.tolist()):
            from_rank = (all_topk_idx == rank * LL_EXPERTS_PER_RANK + i).sum(dim=(1, 2))
            assert count == from_rank.sum() and (layout_range[i] & 0xFFFFFFFF).tolist() == from_rank.tolist()
            torch.testing.assert_close(
                rows[i, :count, -128:], src_info[i, :count, None].to(rows.dtype).expand(-1, 128), **close
            )
            for source, begin in enumerate((layout_range[i] >> 32).tolist()):
                part = rows[i, begin : begin + int(from_rank[source]), :-128]
                torch.testing.assert_close(part, torch.full_like(part, source - 128), **close)
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
            out = torch.empty((LL_TOKENS, LL_HIDDEN), dtype=torch.bfloat16, device=device)
            combined, event, hook = buffer.low_latency_combine(
                *(rows, topk_idx, topk_weights, handle), use_logfmt=False, zero_copy=zero_copy, out=out, **phases
            )
            end(event, hook)
            assert combined is out
            torch.testing.assert_close(out.float(), sums, rtol=close["rtol"] + 0.01, atol=0)
    assert isinstance(event, deep_ep.EventOverlap)
    buffer.destroy()
