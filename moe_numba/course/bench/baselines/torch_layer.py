"""A DeepSeek MoE layer on torch's grouped GEMMs, as it is before its shared expert is folded in, and after.

The gate, the alignment and the routing are this package's kernels; between them and the GEMMs stand torch operations,
the same ones on both sides of a comparison. On a GPU nothing waits for it, so a CUDA graph can hold a whole layer.
Another grouped GEMM takes the place of torch's as ``Layer(..., grouped=...)``; this package's is ``own_grouped``.
"""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from moe_numba import biased_grouped_topk, group_gemm_bf16, moe_align_block_size, simulator
from moe_numba.shared_experts import reference

FP8, FP8_MOST = torch.float8_e4m3fn, 448.0  # the largest number of this type
NAMES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", FP8: "float8_e4m3fn"}
# How far a token's result may be from float64's, as a part of its length: what goes into the products is rounded, to 8
# significant bits in bfloat16, to 4 in FP8.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.01, FP8: 0.08}


@dataclass(frozen=True)
class Shape:
    """What one rank holds of a layer; ``moe_intermediate_size`` is the rank's share."""

    num_experts: int
    topk: int
    hidden_size: int
    moe_intermediate_size: int
    num_expert_group: int = 1
    topk_group: int = 1
    n_shared_experts: int = 1
    routed_scaling_factor: float = 2.5

    @property
    def expert_weights(self):
        """Numbers in one expert's three matrices."""
        return 3 * self.hidden_size * self.moe_intermediate_size


TP8 = Shape(256, 8, 7168, 256, 8, 4)  # DeepSeek-V3 cut into eight parts: each rank has an eighth of every expert
EP8 = Shape(32, 8, 7168, 2048)  # DeepSeek-V3 dealt to eight ranks: each has 32 whole experts, and 8 slots for a token
SMALL = Shape(16, 4, 64, 64, 4, 2)  # for the simulator; this package's grouped GEMM wants multiples of 64


def sizes():
    """What a notebook runs here: DeepSeek-V3's layer on a GPU, a small one with few tokens in the simulator."""
    if simulator.ENABLED:
        return SimpleNamespace(device="cpu", shape=SMALL, layers=1, decode=6, batch=9, prefill=12, replicas=2)
    # Four layers' weights: one after the other, none of them is still in the L2 when its turn comes again.
    return SimpleNamespace(device="cuda", shape=TP8, layers=4, decode=8, batch=64, prefill=1024, replicas=8)


@dataclass(frozen=True)
class Matrices:
    """One projection of all experts, [experts, out, in]; in FP8 with a scale for each row of each expert."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def first(self, count):
        return Matrices(self.values[:count], None if self.scales is None else self.scales[:count])

    def exact(self, expert):
        """One expert's matrix in float64."""
        values = self.values[expert].double()
        return values if self.scales is None else values * self.scales[expert, :, None].double()


def quantise(x):
    """Rows of FP8 and each row's scale, so that the largest number of a row becomes FP8's largest."""
    scale = torch.linalg.vector_norm(x, float("inf"), dim=1, dtype=torch.float32).clamp_(min=1e-10).div_(FP8_MOST)
    return (x / scale[:, None]).to(FP8), scale


def torch_grouped(rows, scales, matrices, ends):
    """Each expert's rows times its matrix: rows ``ends[e - 1]`` up to ``ends[e]`` are expert e's."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, matrices.values.transpose(1, 2), offs=ends)
    if rows.is_cuda and rows.dtype == FP8:
        return torch._scaled_grouped_mm(
            rows,
            matrices.values.transpose(1, 2),
            scales,
            matrices.scales,
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    kind = torch.bfloat16 if rows.dtype == FP8 else rows.dtype
    out, start = torch.zeros(len(rows), matrices.values.shape[1], dtype=kind, device=rows.device), 0
    for expert, end in enumerate(ends.tolist()):
        part = slice(start, end)
        out[part] = _product(rows[part], None if scales is None else scales[part], matrices, expert)
        start = end
    return out


def own_grouped(rows, scales, matrices, ends):
    """The same by this package, in bfloat16: of FP8 it takes other scales than one for each row of a matrix."""
    if rows.dtype != torch.bfloat16:
        raise TypeError(f"rows are {rows.dtype}; own_grouped takes torch.bfloat16")
    return group_gemm_bf16(rows, matrices.values, None, None, offs=ends)


def torch_dense(rows, scales, matrices, expert):
    """All rows times one expert's matrix, as a plain GEMM."""
    if rows.is_cuda and rows.dtype == FP8:
        scale_a, scale_b = scales[:, None], matrices.scales[expert, None, :]
        return torch._scaled_mm(
            rows, matrices.values[expert].t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return _product(rows, scales, matrices, expert)


def _product(rows, scales, matrices, expert):
    if rows.dtype != FP8:
        return rows @ matrices.values[expert].T
    product = rows.float() @ matrices.values[expert].float().T
    return (product * scales[:, None] * matrices.scales[expert]).bfloat16()


def swiglu(gate_up):
    """silu(gate) * up of rows that hold the two side by side."""
    gate, up = gate_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


class Layer:
    """Router, routed experts and shared experts of one layer, with random weights.

    Parameters
    ----------
    shape : Shape
    dtype : torch.dtype
        Of the weights: float64, float32, bfloat16, or ``FP8``, for which tokens are bfloat16 and rows are quantised.
    device : str
    replicas : int
        Copies of each shared expert, kept as experts ``num_experts``, ...; those of the first shared expert come first.
    seed : int
    grouped : callable
        ``grouped(rows, scales, matrices, ends)``; see :func:`torch_grouped`.
    """

    def __init__(self, shape, dtype=torch.bfloat16, device="cuda", replicas=1, seed=0, grouped=torch_grouped):
        self.shape, self.dtype, self.replicas, self.grouped = shape, dtype, replicas, grouped
        self.random = torch.Generator(device).manual_seed(seed)
        self.token_dtype = torch.bfloat16 if dtype == FP8 else dtype
        hidden, wide = shape.hidden_size, shape.moe_intermediate_size
        self.gate_up, self.down = self._matrices(2 * wide, hidden), self._matrices(hidden, wide)
        self.router = self._randn(shape.num_experts, hidden).div_(hidden**0.5).to(self.token_dtype)
        self.bias = self._randn(shape.num_experts).mul_(0.05).float()
        self.numbers = torch.arange(self.count, dtype=torch.int32, device=device)

    @property
    def count(self):
        """All experts: the routed ones and the replicas of the shared ones."""
        return self.shape.num_experts + self.shape.n_shared_experts * self.replicas

    def _randn(self, *size):
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.randn(size, generator=self.random, device=self.random.device, dtype=kind)

    def _matrices(self, rows, columns):
        routed, device = self.shape.num_experts, self.random.device
        values = torch.empty(self.count, rows, columns, dtype=self.dtype, device=device)
        scales = torch.empty(self.count, rows, device=device) if self.dtype == FP8 else None
        for expert in range(self.count):
            if expert >= routed and (expert - routed) % self.replicas:
                values[expert] = values[expert - 1]
                if scales is not None:
                    scales[expert] = scales[expert - 1]
            elif scales is not None:
                values[expert], scales[expert] = quantise(self._randn(rows, columns) * columns**-0.5)
            else:
                values[expert] = self._randn(rows, columns) * columns**-0.5
        return Matrices(values, scales)

    def clone(self):
        """The same layer in memory of its own: one more layer of a model, as far as the caches can tell."""
        other = copy.copy(self)
        for name in ("gate_up", "down"):
            own = getattr(self, name)
            scales = None if own.scales is None else own.scales.clone()
            setattr(other, name, Matrices(own.values.clone(), scales))
        return other

    def on(self, grouped):
        """The same layer, weights and all, with another grouped GEMM."""
        other = copy.copy(self)
        other.grouped = grouped
        return other

    def tokens(self, count):
        """Random hidden states, [count, hidden]."""
        return self._randn(count, self.shape.hidden_size).to(self.token_dtype)

    def logits(self, x):
        """The router's score of each token for each routed expert, in a type that the gate takes."""
        logits = torch.nn.functional.linear(x, self.router)
        return logits.float() if logits.dtype == torch.float64 else logits

    def choose(self, logits, shared=0, **options):
        """The gate: each token's routed experts, and ``shared`` columns for shared ones (topk_weights, topk_ids)."""
        s = self.shape
        options = dict(topk=s.topk + shared, num_expert_group=s.num_expert_group, topk_group=s.topk_group) | options
        if shared:
            options |= dict(num_fused_shared_experts=shared, routed_scaling_factor=s.routed_scaling_factor)
        return biased_grouped_topk(logits, self.bias, **options)

    def route(self, x, shared=0, **options):
        """Router and gate."""
        return self.choose(self.logits(x), shared, **options)

    def by_expert(self, topk_ids, count):
        """The slots in order of their experts, and where each expert's end."""
        order, expert_ids, _ = moe_align_block_size(topk_ids, 1, count)  # in blocks of one row nothing is padding
        return order, torch.searchsorted(expert_ids, self.numbers[:count], right=True, out_int32=True)

    def prepared(self, x):
        """Rows as a GEMM takes them: in FP8 with a scale for each, otherwise as they are."""
        return quantise(x) if self.dtype == FP8 else (x, None)

    def gather(self, x, token):
        """The rows of these tokens, prepared."""
        rows, scales = self.prepared(x)
        if scales is None:
            return rows.index_select(0, token), None
        return rows.view(torch.uint8).index_select(0, token).view(FP8), scales.index_select(0, token)

    def experts(self, x, topk_weights, topk_ids, count=None):
        """The weighted sum over each token's experts, which are among the first ``count`` (all); no id may be -1."""
        (tokens, topk), count = topk_ids.shape, count or self.count
        if not tokens:
            return torch.zeros_like(x)
        order, ends = self.by_expert(topk_ids, count)
        weights = topk_weights.flatten().index_select(0, order)
        rows, scales = self.gather(x, order // topk)
        hidden = swiglu(self.grouped(rows, scales, self.gate_up.first(count), ends))
        # The weight goes in here, where rows are short: what follows is linear.
        hidden, scales = self.prepared(hidden)
        (hidden if scales is None else scales).mul_(weights[:, None] if scales is None else weights)
        out = self.grouped(hidden, scales, self.down.first(count), ends)
        places = torch.arange(tokens * topk, dtype=torch.int32, device=x.device)
        place = torch.empty_like(places).scatter_(0, order.long(), places)  # where each slot went
        return out.index_select(0, place).view(tokens, topk, -1).sum(1)

    def shared_experts(self, x):
        """The shared experts as an MLP of their own; with several, their sum."""
        total = None
        for shared in range(self.shape.n_shared_experts):
            expert = self.shape.num_experts + shared * self.replicas
            hidden = swiglu(torch_dense(*self.prepared(x), self.gate_up, expert))
            out = torch_dense(*self.prepared(hidden), self.down, expert)
            total = out if total is None else total + out
        return total

    def separate(self, x):
        """The layer before: routed experts, scaled, and the shared experts' own MLP added."""
        out = self.experts(x, *self.route(x), self.shape.num_experts) * self.shape.routed_scaling_factor
        return out if not self.shape.n_shared_experts else out + self.shared_experts(x)

    def fused(self, x, topk_weights, topk_ids, count=None):
        """The layer after: shared experts are columns of the routing, their weights 1 / routed_scaling_factor."""
        return self.experts(x, topk_weights, topk_ids, count) * self.shape.routed_scaling_factor

    def right(self, x):
        """What the layer must give, in float64, by the reference; the routing is the gate's."""
        weights, ids = self.route(x)
        first = self.shape.num_experts
        shared = [self._exact(first + i * self.replicas) for i in range(self.shape.n_shared_experts)]
        routed = map(self._exact, range(first))
        scale = self.shape.routed_scaling_factor
        return reference.forward_normal(x.double(), weights.double(), ids, routed, shared, scale)

    def _exact(self, expert):
        gate, up = self.gate_up.exact(expert).chunk(2)
        return gate, up, self.down.exact(expert)

    def touched(self, topk_ids):
        """How many experts these ids name."""
        return int(torch.unique(topk_ids).numel())

    def bytes(self, tokens, experts):
        """Bytes to move at least: each of so many experts' weights, and each token in and out, once."""
        item = self.gate_up.values.element_size()
        each = 2 * self.shape.hidden_size * self.router.element_size()
        return experts * self.shape.expert_weights * item + tokens * each

    def flops(self, slots):
        """Operations of so many slots: a multiplication and an addition for each weight."""
        return 2 * slots * self.shape.expert_weights


def mismatch(out, right, dtype):
    """None, or a sentence saying what is wrong with a layer's output, compared with ``Layer.right``.

    A token's error is measured against the token's length, an element's against the elements' usual size.
    """
    if out.shape != right.shape:
        return f"the shape is {tuple(out.shape)}, not {tuple(right.shape)}"
    if not out.numel():
        return None
    # In short vectors chance counts for more: a hidden size of 32 is allowed 1.7 times as much, 7168 1.05 times.
    error, bound = out.double() - right, BOUNDS[dtype] * (1 + 4 / right.shape[1] ** 0.5)
    if not bool(torch.isfinite(error).all()):
        return f"{int((~torch.isfinite(error)).sum())} elements are no finite numbers"
    length = right.norm(dim=1).clamp(min=1e-30)
    worst = error.norm(dim=1) / length
    token = int(worst.argmax())
    if worst[token] > bound:
        return f"token {token} is off by {float(worst[token]):.2g} of its length; {bound:.2g} is allowed"
    usual = (length / right.shape[1] ** 0.5)[:, None]
    most = float((error.abs() / usual).max())
    if most > 6 * bound:
        return f"an element is off by {most:.2g} of the usual size; {6 * bound:.2g} is allowed"
    return None


def tile_rows(slots, experts, out, inside, dtype):
    """Rows of a tile of torch's grouped GEMM on Hopper, which it chooses by the average number of rows."""
    average = slots // experts
    if average <= 128 or out <= 128:
        return 64
    large = sum(size >= 2048 for size in (average, out, inside)) >= 2
    return 256 if large and dtype == FP8 else 128


def launches(call):
    """How many kernels a call starts, as a profile of the GPU sees it; None in the simulator."""
    if simulator.ENABLED:
        return None
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in e.name]
    return len(kernels)
