"""Launches of a training step of ``fused_experts``: its forward pass, which keeps gate and up, and its backward.

With LoRA adapters an expert's weight is ``w + b @ a``, with a of [rank, inputs] and b of [outputs, rank]. The product
is never formed: ``z = a @ x`` is a grouped GEMM with ``rank`` columns, and ``w @ x + b @ z`` is one grouped GEMM that
multiplies a few more columns. Backwards, ``b.T @ g`` takes the place of z.
"""

from typing import Any, NamedTuple

import torch

from moe_numba.grouped_gemm.api.autograd import transposed
from moe_numba.grouped_gemm.api.bf16 import group_gemm_bf16
from moe_numba.grouped_gemm.api.k_grouped import k_grouped_gemm_bf16
from moe_numba.grouped_gemm.call.checks import has_wgmma, is_mn_major
from moe_numba.grouped_gemm.call.plan import group_gemm
from moe_numba.moe_layer.backward.activation import silu_and_mul_backward
from moe_numba.moe_layer.fused_experts import ExpertsPlan
from moe_numba.moe_layer.group_by_expert.api import group_by_expert
from moe_numba.moe_layer.launches import Adapters, ExpertsCall, ExpertsTensors, can_fuse_activation, launches_of
from moe_numba.moe_layer.permute.api import permute_tokens
from moe_numba.moe_layer.silu_and_mul.api import check_activation
from moe_numba.moe_layer.weighted_sum.api import weighted_sum
from moe_numba.moe_layer.weights import BF16, shape_of
from moe_numba.moe_layer.workspace import describe, is_permuted
from moe_numba.runtime.replay import Replay


class TrainingPlan(ExpertsPlan):
    """A plan whose launches keep gate and up, and the order of the rows, for a backward.

    ``adapters`` are those of the call; a plan is for adapters of these shapes and strides.
    """

    def __init__(self, *arguments, adapters):
        super().__init__(*arguments)
        self.is_adapted = adapters.w13_a is not None or adapters.w2_a is not None
        self.decodes = self.decodes and not self.is_adapted
        described = describe(self.shape, *self.routing)
        self.kept = *described.gate_up, *described.routing
        # With few tokens gate and up are made by functions that allocate memory.
        self.keep = self.launch_and_keep if self.decodes else Replay(self.launch_and_keep, self.check_alignment)

    def compute_and_keep(self, t, adapters):
        """Return the output, gate and up of each row, the outputs of ``group_by_expert``, and z of w13's adapter.

        The output has the bits of inference. With few tokens its kernels have no gate and up: those are computed
        again, from so few tokens. Without an adapter z has no rows.
        """
        new, rows = t.x.new_empty, self.routing[0] * self.routing[1]
        kept, out = [new(size, dtype=dtype) for size, dtype in self.kept], torch.empty_like(t.x)
        low = [None if a is None else new(rows, a.shape[1]) for a in (adapters.w13_a, adapters.w2_a)]
        adapters = adapters._replace(w13_z=low[0], w2_z=low[1])
        if self.routing[0]:
            x_rows = new(rows, self.shape.hidden) if self.is_adapted else None
            self.keep(*t, *adapters, x_rows, self.new_memory(), *kept, out)
        else:
            for tensor in kept[1:]:
                tensor.zero_()
        return out, *kept, new(0, 1) if low[0] is None else low[0]

    def launch_and_keep(self, *arguments):
        """Launch the kernels for tensors, adapters, memory of intermediate results, what is kept and the output."""
        first = len(self.names)
        t, adapters = ExpertsTensors(*arguments[:first]), Adapters(*arguments[first : first + len(Adapters._fields)])
        x_rows, buffer, gate_up, *routing, out = arguments[first + len(Adapters._fields) :]
        memory = self.intermediates(buffer)._replace(routing=tuple(routing), gate_up=(gate_up,))
        if self.is_adapted:
            memory = memory._replace(x=(x_rows,))
        options = self.shape, self.activation, self.fuses, self.decodes, memory
        call = ExpertsCall(t, *options, keeps_gate_up=True, adapters=adapters if self.is_adapted else None)
        for launch in launches_of(call, out).values():
            launch()
        if self.decodes:
            seqlens, cu_seqlens, gather, _ = memory.routing
            group_by_expert(t.topk_ids, len(t.w13), out=memory.routing)
            group_gemm_bf16(t.x, t.w13, seqlens, cu_seqlens, out=gate_up, gather_indices=gather, bias=t.w13_bias)
            if self.fuses and self.activation.interleaved:
                gate_up.copy_(gate_up.unflatten(1, (-1, 2)).mT.flatten(1))


class BackwardTensors(NamedTuple):
    """The tensors of a backward: the gradient of the output, inputs of the forward pass, and what it has kept."""

    grad: Any
    x: Any
    w13: Any
    w2: Any
    topk_weights: Any  # contiguous
    topk_ids: Any
    w13_bias: Any
    w2_bias: Any
    w13_a: Any  # of LoRA adapters, or None
    w13_b: Any
    w2_a: Any
    w2_b: Any
    gate_up: Any
    seqlens: Any
    cu_seqlens: Any
    gather_indices: Any
    inverse_indices: Any
    w13_z: Any


class _ThroughW2(NamedTuple):
    """The tensors of the launches from the gradient of the output to that of gate and up."""

    grad: Any
    w2: Any
    w2_a: Any
    w2_b: Any
    topk_weights: Any
    topk_ids: Any
    gate_up: Any
    seqlens: Any
    cu_seqlens: Any
    gather_indices: Any
    inverse_indices: Any
    biases: Any  # w2_bias in bfloat16, as the weight of a grouped GEMM of one group
    all_tokens: Any
    grad_rows: Any  # memory; None if the tokens' gradients are gathered
    u: Any
    weighted: Any
    products: Any
    low_grad: Any
    low: Any
    of_gate_up: Any  # outputs
    of_weights: Any
    of_w2: Any
    of_a: Any
    of_b: Any


class _ThroughW13(NamedTuple):
    """The tensors of the launches from the gradient of gate and up to that of x."""

    x: Any
    w13: Any
    w13_a: Any
    w13_b: Any
    seqlens: Any
    cu_seqlens: Any
    inverse_indices: Any
    of_gate_up: Any
    low: Any  # z
    rows: Any  # memory: the gradient of x by rows, and then x
    ones: Any
    low_grad: Any
    of_x: Any  # outputs
    of_w13: Any
    of_a: Any
    of_b: Any


class BackwardPlan:
    """What depends only on shapes, strides and options of a backward with tokens, and its launches.

    With the gradient g of a token's output, u = w2.T @ g for each of its assignments is one grouped GEMM, of which
    ``silu_and_mul_backward`` makes the gradients of gate, up and the routing weights, and w * a for that of w2.
    """

    def __init__(self, t, wanted, activation):
        self.wanted, self.activation = wanted, check_activation(*activation)
        tensors = ExpertsTensors(t.x, t.w13, t.w2, t.topk_weights, t.topk_ids)
        fuses = can_fuse_activation(tensors, BF16, self.activation)
        self.has_halves = not self.activation.interleaved or fuses
        self.rows, self.hidden, self.intermediate = len(t.gate_up), t.x.shape[1], t.w2.shape[2]
        self.permutes = "w2" in wanted or t.w2_a is not None or is_permuted(shape_of(t.w13, t.w2, BF16), self.rows)
        self.adds_bias = t.w2_bias is not None and "topk_weights" in wanted
        # The tokens as a single group, for the products of their gradients with all biases.
        self.all_tokens = torch.tensor([len(t.x)], dtype=torch.int32, device=t.x.device) if self.adds_bias else None
        # Elsewhere weights are transposed into new memory, which launches that are repeated cannot have.
        self.is_hopper = has_wgmma(t.x.device)
        repeated = Replay if self.is_hopper else lambda function: function
        self.through_w2 = repeated(lambda *given: self._launch_through_w2(_ThroughW2(*given)))
        self.through_w13 = repeated(lambda *given: self._launch_through_w13(_ThroughW13(*given)))

    def compute(self, t, main_grads):
        """Return the gradients that are wanted, by name; those of w13 and w2 may be float32, which are added to.

        Tensors of all rows are freed as soon as possible: the peak of memory is that of the last gradients.
        """
        bf16 = lambda *size: t.grad.new_empty(size, dtype=torch.bfloat16)
        low = lambda a: None if a is None else bf16(self.rows, a.shape[1])

        def new_like(name):
            if name in main_grads:
                return main_grads[name]
            return _empty_like(getattr(t, name)) if name in self.wanted else None

        routing, biases, products = (t.seqlens, t.cu_seqlens, t.gather_indices, t.inverse_indices), None, None
        if self.adds_bias:
            biases = t.w2_bias.bfloat16()
            if missing := -len(biases) % 16:  # a grouped GEMM's number of columns
                biases = torch.nn.functional.pad(biases, (0, 0, 0, missing))
            biases, products = biases[None], t.grad.new_empty(len(t.x), len(biases), dtype=torch.float32)
        names = "w2", "w2_a", "w2_b"
        found = dict(topk_weights=torch.empty_like(t.topk_weights)) | {name: new_like(name) for name in names}
        grad_rows = bf16(self.rows, self.hidden) if self.permutes else None
        memory = grad_rows, bf16(self.rows, self.intermediate), bf16(self.rows, self.intermediate), products
        of_gate_up = torch.empty_like(t.gate_up)
        self.through_w2(
            *(t.grad, t.w2, t.w2_a, t.w2_b, t.topk_weights, t.topk_ids, t.gate_up, *routing, biases, self.all_tokens),
            *(*memory, low(t.w2_a), low(t.w2_a), of_gate_up, found["topk_weights"], *(found[n] for n in names)),
        )
        del grad_rows, memory, products
        names = "x", "w13", "w13_a", "w13_b"
        found |= {name: new_like(name) for name in names}
        if any(found[name] is not None for name in names):
            rows = bf16(self.rows, self.hidden)
            ones = None if found["x"] is None else torch.ones_like(t.topk_weights)
            self.through_w13(
                *(t.x, t.w13, t.w13_a, t.w13_b, t.seqlens, t.cu_seqlens, t.inverse_indices, of_gate_up),
                *(t.w13_z, rows, ones, low(t.w13_a), *(found[name] for name in names)),
            )
            del rows
        if "w13_bias" in self.wanted:
            found["w13_bias"] = self._of_w13_bias(of_gate_up, t)
        if "w2_bias" in self.wanted:
            weights = _routing_matrix(t.topk_ids, t.topk_weights, len(t.w13))
            found["w2_bias"] = (weights.T @ t.grad.float()).to(t.w2_bias.dtype)
        return found

    def _launch_through_w2(self, t):
        rows, groups, low = t.grad, dict(seqlens=t.seqlens, cu_seqlens=t.cu_seqlens), {}
        if self.permutes:
            rows = permute_tokens(t.grad, t.inverse_indices, out=t.grad_rows)
        else:
            low = dict(gather_indices=t.gather_indices)
        if t.w2_a is not None:
            group_gemm_bf16(rows, t.w2_b.mT, **groups, out=t.low_grad)
            low = dict(x_low=t.low_grad, weight_low=t.w2_a.mT)
        group_gemm("none", x=rows, weight=transposed(t.w2), **groups, **low, out=t.u)
        if self.adds_bias:  # w2_bias is a part of what a routing weight multiplies
            options = dict(out=t.products, out_dtype=torch.float32)
            group_gemm_bf16(t.grad, t.biases, None, None, offs=t.all_tokens, **options)
        tensors = t.gate_up, t.u, t.inverse_indices, t.topk_weights
        bias_terms = (t.topk_ids, t.products) if self.adds_bias else None
        outputs = t.of_gate_up, t.weighted, t.of_weights
        silu_and_mul_backward(*tensors, *self.activation, self.has_halves, bias_terms, out=outputs)
        self._sum_outer_products(rows, t.weighted, groups, t.of_w2)
        self._sum_outer_products(t.low_grad, t.weighted, groups, t.of_a)
        if t.of_b is not None:
            group_gemm_bf16(t.weighted, t.w2_a, **groups, out=t.low)
            self._sum_outer_products(rows, t.low, groups, t.of_b)

    def _launch_through_w13(self, t):
        groups, low = dict(seqlens=t.seqlens, cu_seqlens=t.cu_seqlens), {}
        if t.w13_a is not None:
            group_gemm_bf16(t.of_gate_up, t.w13_b.mT, **groups, out=t.low_grad)
            low = dict(x_low=t.low_grad, weight_low=t.w13_a.mT)
        if t.of_x is not None:
            group_gemm("none", x=t.of_gate_up, weight=transposed(t.w13), **groups, **low, out=t.rows)
            weighted_sum(t.rows, t.inverse_indices, t.ones, out=t.of_x)
        if t.of_w13 is not None or t.of_a is not None:
            permute_tokens(t.x, t.inverse_indices, out=t.rows)
        self._sum_outer_products(t.of_gate_up, t.rows, groups, t.of_w13)
        self._sum_outer_products(t.low_grad, t.rows, groups, t.of_a)
        self._sum_outer_products(t.of_gate_up, t.low, groups, t.of_b)

    def _sum_outer_products(self, grad, given, groups, out):
        """Store the gradient of a weight, if it is wanted: the sum of outer products of each group's rows.

        It is added to one in float32, a main gradient.
        """
        if out is None:
            return
        a, b, out = (given, grad, out.mT) if is_mn_major(out) else (grad, given, out)
        accumulate = out.dtype == torch.float32
        if self.is_hopper:
            k_grouped_gemm_bf16(a, b, **groups, out=out, accumulate=accumulate)
        else:
            products = torch.nn.functional.grouped_mm(a.mT, b, offs=groups["cu_seqlens"][1:])
            (out.add_ if accumulate else out.copy_)(products)

    def _of_w13_bias(self, of_gate_up, t):
        """Return the sum of each group's rows: the outer products with ones, which a float32 result is added to."""
        bias, groups = t.w13_bias, dict(seqlens=t.seqlens, cu_seqlens=t.cu_seqlens)
        ones = of_gate_up.new_ones(self.rows, 8)
        out = ones.new_zeros(*bias.shape, 8, dtype=bias.dtype if self.is_hopper else torch.bfloat16)
        self._sum_outer_products(of_gate_up, ones, groups, out)
        return out[:, :, 0].to(bias.dtype)


def _empty_like(tensor):
    """Return a contiguous tensor of the same shape, or its transposed view if the tensor is one."""
    if tensor.dim() == 3 and is_mn_major(tensor):
        return tensor.new_empty(tensor.mT.shape).mT
    return tensor.new_empty(tensor.shape)


def _routing_matrix(topk_ids, weights, num_experts):
    """Return the weight of each expert for each token, [tokens, experts] in float32, added in order of the columns."""
    experts = torch.arange(num_experts, device=topk_ids.device)
    matrix = torch.zeros(len(topk_ids), num_experts, device=topk_ids.device)
    for k in range(topk_ids.shape[1]):
        matrix += (topk_ids[:, k, None] == experts) * weights[:, k, None]
    return matrix
