"""``ExpertParallelMoE`` with gradients: the backward of dispatch is combine, and that of combine is dispatch."""

import torch


class Dispatch(torch.autograd.Function):
    """Send tokens and their routing weights to the ranks of their experts.

    A token's gradient is the sum of those of its rows on all ranks. Of its routing weights each has a gradient on the
    rank of its expert, and zeros elsewhere.
    """

    @staticmethod
    def forward(ctx, x, topk_weights, topk_ids, layer):
        received, ids, weights, handle = layer._send(x, topk_weights, topk_ids)
        ctx.layer, ctx.handle = layer, handle
        ctx.mark_non_differentiable(ids, *handle)
        return received, weights, ids, *handle

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_weights, *_):
        given = dict(topk_weights=grad_weights.contiguous()) if ctx.needs_input_grad[1] else {}
        of_x, of_weights, _ = ctx.layer.buffer.combine(grad.contiguous(), ctx.handle, config=ctx.layer.config, **given)
        return of_x, of_weights, None, None


class Combine(torch.autograd.Function):
    """Sum the rows of each token, and ``shared`` if it is not None; each row has the gradient of its token."""

    @staticmethod
    def forward(ctx, rows, shared, layer, handle):
        ctx.layer, ctx.handle = layer, handle
        return layer.buffer.combine(rows, handle, bias=shared, config=layer.config)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        of_rows, grad = None, grad.contiguous()
        if ctx.needs_input_grad[0]:
            of_rows = ctx.layer.buffer.dispatch(grad, handle=ctx.handle, config=ctx.layer.config)[0]
        return of_rows, grad if ctx.needs_input_grad[1] else None, None, None
