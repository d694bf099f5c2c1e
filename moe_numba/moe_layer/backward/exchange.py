"""``ExpertParallelMoE`` with gradients: the backward of dispatch is combine, and that of combine is dispatch."""

import torch


class Dispatch(torch.autograd.Function):
    """Send tokens and their routing weights to the ranks of their experts.

    A token's gradient is the sum of those of its rows on all ranks. Of its routing weights each has a gradient on the
    rank of its expert, and zeros elsewhere.
    """

    @staticmethod
    def forward(ctx, x, topk_weights, topk_ids, buffer, num_experts, options, handles):
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_ids, num_experts)
        received, ids, weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_in_rank,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
            **options,
        )
        handles.append(handle)
        ctx.buffer, ctx.handle, ctx.config = buffer, handle, options["config"]
        ctx.mark_non_differentiable(ids)
        return received, weights, ids

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_weights, _):
        given = dict(topk_weights=grad_weights.contiguous()) if ctx.needs_input_grad[1] else {}
        of_x, of_weights, _ = ctx.buffer.combine(grad.contiguous(), ctx.handle, config=ctx.config, **given)
        return of_x, of_weights, *(None,) * 5


class Combine(torch.autograd.Function):
    """Sum the rows of each token, and ``shared`` if it is not None; each row has the gradient of its token."""

    @staticmethod
    def forward(ctx, rows, shared, buffer, handle, config):
        ctx.buffer, ctx.handle, ctx.config = buffer, handle, config
        return buffer.combine(rows, handle, bias=shared, config=config)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad = grad.contiguous()
        of_rows = (
            ctx.buffer.dispatch(grad, handle=ctx.handle, config=ctx.config)[0] if ctx.needs_input_grad[0] else None
        )
        return of_rows, grad if ctx.needs_input_grad[1] else None, None, None, None
