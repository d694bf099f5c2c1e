"""``Buffer.warm_up``: compiles and loads the kernels of later calls."""

import torch

from moe_numba.runtime.validate import check_int


def warm_up(buffer, hidden, num_experts, num_topk, dtype, num_scales, topk_idx_dtype, config, combine_config, out):
    """Make one call of each kind with one token per rank, so that its kernels are those of later calls.

    See ``Buffer.warm_up``. All ranks are synchronised afterwards and all rings are empty, so the first later call may
    choose the number of channels as if there had been none.
    """
    for name, value in (("hidden", hidden), ("num_experts", num_experts)):
        check_int(name, value, 1)
    check_int("num_topk", num_topk, 0)
    check_int("num_scales", num_scales, 0)
    runtime, device = buffer._runtime, buffer.transport.device
    first_channels = dict(runtime._first_channels)
    x = torch.zeros(1, hidden, dtype=torch.bfloat16, device=device)
    given = x if dtype == torch.bfloat16 else (x.to(dtype), torch.zeros(1, num_scales, device=device))
    own_expert = buffer.rank * (num_experts // buffer.group_size)  # one row arrives, which every output can hold
    topk_idx = torch.full((1, max(1, num_topk)), own_expert, dtype=topk_idx_dtype, device=device)
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    topk = {}
    if num_topk:
        topk = dict(topk_idx=topk_idx, topk_weights=torch.zeros(1, num_topk, device=device))
    layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
    _, _, weights, _, handle, _ = buffer.dispatch(given, **layout, **topk, config=config, out=out)
    recv_x = buffer.dispatch(given, handle, config=config, out=out)[0]
    rows = (recv_x[0] if isinstance(recv_x, tuple) else recv_x).to(torch.bfloat16)
    for recv_weights in (weights, None) if num_topk else (None,):
        buffer.combine(rows, handle, recv_weights, config=combine_config)
    buffer.check(synchronize=True)
    buffer.transport.gather(None)
    runtime._first_channels = first_channels
