"""A layer of launches whose rows travel in the order of the experts: what one kernel then does at the same time."""

from functools import partial

import torch

from moe_numba.course.lessons.one_kernel import kernels
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.grouped_gemm.call.plan import group_gemm
from moe_numba.moe_layer.expert_parallel.one_kernel import counts
from moe_numba.moe_layer.expert_parallel.one_kernel.layer import OneKernel
from moe_numba.moe_layer.expert_parallel.one_kernel.sizes import WARP


class LaunchesByExpert(OneKernel):
    """What `OneKernel` does in one launch, in four: rows are sent, two grouped GEMMs, and rows sent back.

    Parameters as of `OneKernel`; ``num_sms`` is the number of CTAs that move rows.
    """

    def _prepare(self):
        exchange = self.exchange
        device = exchange.x.device
        self.rows = torch.empty(self.sizes.capacity, self.sizes.hidden, dtype=torch.bfloat16, device=device)

    def _definitions(self, sizes, intermediate):
        return (
            KernelDefinition(counts.make_exchange_counts, (sizes,), counts.COUNTS_SIGNATURE, WARP * sizes.ranks),
            KernelDefinition(kernels.make_push_rows, (sizes,), kernels.PUSH_SIGNATURE, WARP * sizes.warps),
            KernelDefinition(kernels.make_return_rows, (sizes,), kernels.RETURN_SIGNATURE, WARP * sizes.warps),
        )

    def _compute(self, rows, scales, tokens_of_rows, first_rows):
        given, exchange, scaled = self.experts, self.exchange, scales is not None
        sent = rows, scales, tokens_of_rows, first_rows, exchange.places
        average = max(1, self.sizes.assignments // self.sizes.experts)
        multiply = partial(group_gemm, "block" if scaled else "none", seqlens=exchange.lengths)
        multiply = partial(multiply, cu_seqlens=exchange.starts, num_seq_per_group_avg=average)
        first, second = dict(x=exchange.x, weight=given.w13), dict(x=exchange.activated, weight=given.w2)
        activated = exchange.activated
        if scaled:
            first |= dict(x_scale=exchange.x_scale, w_scale=given.w13_scale)
            second |= dict(x_scale=exchange.activated_scale, w_scale=given.w2_scale)
            activated = exchange.activated, exchange.activated_scale
        return {
            "push rows": partial(exchange.start, "make_push_rows", self.num_sms, *sent),
            "gate and up": partial(multiply, out=activated, silu_and_mul=True, **first),
            "down": partial(multiply, out=self.rows, **second),
            "return rows": partial(exchange.start, "make_return_rows", self.num_sms, self.rows, exchange.starts),
        }
