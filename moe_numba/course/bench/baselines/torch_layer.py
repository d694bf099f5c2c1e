"""DeepSeek MoE layer with torch's grouped GEMMs, with separate and with fused shared experts.

Gate, alignment and routing are this package's kernels. The remaining operations are torch's, identical in both
variants. On a GPU nothing synchronises with the host, so a CUDA graph can capture a whole layer. ``Layer(...,
grouped=...)`` takes another grouped GEMM, for example ``moe_numba_grouped_gemm``.
"""

import copy
from dataclasses import dataclass

import torch

from moe_numba import biased_grouped_topk, group_gemm_bf16, moe_align_block_size
from moe_numba.course.bench.timing.launch_profile import launch_profile
from moe_numba.runtime.device import gpu_of
from moe_numba.shared_experts import reference

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0  # FP8_MAX is the largest finite value
NAMES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", FP8: "float8_e4m3fn"}
# Allowed error of a token relative to its norm. Inputs of the GEMMs are rounded to 8 significant bits in bfloat16, to 4
# in FP8.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.01, FP8: 0.08}


@dataclass(frozen=True)
class Shape:
    """Shape of one rank's part of a layer; ``moe_intermediate_size`` is the size of the rank's shard."""

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
        """Elements of one expert's three matrices."""
        return 3 * self.hidden_size * self.moe_intermediate_size


TP8 = Shape(256, 8, 7168, 256, 8, 4)  # DeepSeek-V3 with 8-way tensor parallelism: each rank has 1/8 of every expert
EP8 = Shape(32, 8, 7168, 2048)  # DeepSeek-V3 with 8-way expert parallelism: each rank has 32 whole experts
SMALL = Shape(16, 4, 64, 64, 4, 2)  # for the simulator


@dataclass(frozen=True)
class Matrices:
    """One projection of all experts, [experts, out, in]; FP8 values have one scale per row."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def first_experts(self, count):
        return Matrices(self.values[:count], None if self.scales is None else self.scales[:count])

    def exact(self, expert):
        """One expert's matrix in float64."""
        values = self.values[expert].double()
        return values if self.scales is None else values * self.scales[expert, :, None].double()


def quantise(x):
    """Quantise rows to FP8 with one scale per row, which maps the row's largest magnitude to ``FP8_MAX``."""
    scale = torch.linalg.vector_norm(x, float("inf"), dim=1, dtype=torch.float32).clamp_(min=1e-10).div_(FP8_MAX)
    return (x / scale[:, None]).to(FP8), scale


def has_grouped_gemm(gpu):
    """Return whether torch has grouped GEMMs for a GPU, in bfloat16 and FP8, that a CUDA graph can capture."""
    return gpu.hardware_capability[0] in (9, 10)


def torch_grouped_gemm(rows, scales, matrices, ends):
    """Multiply the rows ``ends[e - 1]`` to ``ends[e] - 1`` by the matrix of expert e, with torch's grouped GEMM.

    Where torch has none, a loop over the experts, which synchronises with the host.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16 and has_grouped_gemm(gpu_of(rows.device)):
        return torch._grouped_mm(rows, matrices.values.transpose(1, 2), offs=ends)
    if rows.is_cuda and rows.dtype == FP8 and has_grouped_gemm(gpu_of(rows.device)):
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
        out[part] = _dense_gemm_reference(rows[part], None if scales is None else scales[part], matrices, expert)
        start = end
    return out


def moe_numba_grouped_gemm(rows, scales, matrices, ends):
    """Grouped GEMM of this package, bfloat16 only: its FP8 GEMMs do not take one scale per weight row."""
    if rows.dtype != torch.bfloat16:
        raise TypeError(f"rows is {rows.dtype}; it must be torch.bfloat16")
    return group_gemm_bf16(rows, matrices.values, None, None, offs=ends)


def torch_dense_gemm(rows, scales, matrices, expert):
    """Multiply all rows by one expert's matrix, as a dense GEMM."""
    if rows.is_cuda and rows.dtype == FP8 and has_grouped_gemm(gpu_of(rows.device)):
        scale_a, scale_b = scales[:, None], matrices.scales[expert, None, :]
        return torch._scaled_mm(
            rows, matrices.values[expert].t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return _dense_gemm_reference(rows, scales, matrices, expert)


def _dense_gemm_reference(rows, scales, matrices, expert):
    if rows.dtype != FP8:
        return rows @ matrices.values[expert].T
    product = rows.float() @ matrices.values[expert].float().T
    return (product * scales[:, None] * matrices.scales[expert]).bfloat16()


def swiglu(gate_up):
    """Compute silu(gate) * up for rows that hold gate and up side by side."""
    gate, up = gate_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


class Layer:
    """One layer with router, routed experts and shared experts, with random weights.

    Parameters
    ----------
    shape : Shape
    dtype : torch.dtype
        Dtype of the weights: float64, float32, bfloat16 or ``FP8``. With FP8, tokens are bfloat16, quantised per row.
    device : str
    replicas : int
        Copies of each shared expert, stored as experts ``num_experts``, ...; copies of the first shared expert first.
    seed : int
    grouped : callable
        ``grouped(rows, scales, matrices, ends)``; see :func:`torch_grouped`.
    """

    def __init__(self, shape, dtype=torch.bfloat16, device="cuda", replicas=1, seed=0, grouped=torch_grouped_gemm):
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
        """Number of routed experts and of replicas of shared experts."""
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
        """Copy the layer with its weights, so that the copy's weights are not in the caches."""
        other = copy.copy(self)
        for name in ("gate_up", "down"):
            matrices = getattr(self, name)
            scales = None if matrices.scales is None else matrices.scales.clone()
            setattr(other, name, Matrices(matrices.values.clone(), scales))
        return other

    def with_grouped_gemm(self, grouped):
        """Return a layer with the same weights and another grouped GEMM."""
        other = copy.copy(self)
        other.grouped = grouped
        return other

    def tokens(self, count):
        """Return random hidden states, [count, hidden]."""
        return self._randn(count, self.shape.hidden_size).to(self.token_dtype)

    def logits(self, x):
        """Compute the router's logits in a dtype that the gate supports."""
        logits = torch.nn.functional.linear(x, self.router)
        return logits.float() if logits.dtype == torch.float64 else logits

    def choose(self, logits, shared=0, **options):
        """Run the gate with ``shared`` columns for shared experts; return (topk_weights, topk_ids)."""
        s = self.shape
        options = dict(topk=s.topk + shared, num_expert_group=s.num_expert_group, topk_group=s.topk_group) | options
        if shared:
            options |= dict(num_fused_shared_experts=shared, routed_scaling_factor=s.routed_scaling_factor)
        return biased_grouped_topk(logits, self.bias, **options)

    def route(self, x, shared=0, **options):
        """Run the router and the gate."""
        return self.choose(self.logits(x), shared, **options)

    def sort_by_expert(self, topk_ids, count):
        """Return the slots sorted by expert, and the end of each expert's slots."""
        order, expert_ids, _ = moe_align_block_size(topk_ids, 1, count)  # blocks of one row need no padding
        return order, torch.searchsorted(expert_ids, self.numbers[:count], right=True, out_int32=True)

    def quantise_if_fp8(self, x):
        """Return (rows, scales) for a GEMM: quantised if the weights are FP8, otherwise unchanged with scales None."""
        return quantise(x) if self.dtype == FP8 else (x, None)

    def gather(self, x, token):
        """Gather the rows of tokens and quantise them if the weights are FP8."""
        rows, scales = self.quantise_if_fp8(x)
        if scales is None:
            return rows.index_select(0, token), None
        return rows.view(torch.uint8).index_select(0, token).view(FP8), scales.index_select(0, token)

    def experts(self, x, topk_weights, topk_ids, count=None):
        """Compute the weighted sum over each token's experts. Ids must be in 0..count-1 (default: all experts)."""
        (tokens, topk), count = topk_ids.shape, count or self.count
        if not tokens:
            return torch.zeros_like(x)
        order, ends = self.sort_by_expert(topk_ids, count)
        weights = topk_weights.flatten().index_select(0, order)
        rows, scales = self.gather(x, order // topk)
        hidden = swiglu(self.grouped(rows, scales, self.gate_up.first_experts(count), ends))
        # Apply the routing weights to the short rows before the down projection, which is linear.
        hidden, scales = self.quantise_if_fp8(hidden)
        (hidden if scales is None else scales).mul_(weights[:, None] if scales is None else weights)
        out = self.grouped(hidden, scales, self.down.first_experts(count), ends)
        places = torch.arange(tokens * topk, dtype=torch.int32, device=x.device)
        place = torch.empty_like(places).scatter_(0, order.long(), places)  # inverse permutation of `order`
        return out.index_select(0, place).view(tokens, topk, -1).sum(1)

    def shared_experts(self, x):
        """Compute the shared experts as separate MLPs and add them up."""
        total = None
        for shared in range(self.shape.n_shared_experts):
            expert = self.shape.num_experts + shared * self.replicas
            hidden = swiglu(torch_dense_gemm(*self.quantise_if_fp8(x), self.gate_up, expert))
            out = torch_dense_gemm(*self.quantise_if_fp8(hidden), self.down, expert)
            total = out if total is None else total + out
        return total

    def separate(self, x):
        """Compute the layer before the fusion: scaled routed experts plus separate shared experts."""
        out = self.experts(x, *self.route(x), self.shape.num_experts) * self.shape.routed_scaling_factor
        return out if not self.shape.n_shared_experts else out + self.shared_experts(x)

    def fused(self, x, topk_weights, topk_ids, count=None):
        """Compute the layer after the fusion: shared experts are columns of the routing."""
        return self.experts(x, topk_weights, topk_ids, count) * self.shape.routed_scaling_factor

    def expected(self, x):
        """Compute the expected output with the reference in float64, using the gate's routing."""
        weights, ids = self.route(x)
        num_routed = self.shape.num_experts
        shared = [self._exact(num_routed + i * self.replicas) for i in range(self.shape.n_shared_experts)]
        routed = map(self._exact, range(num_routed))
        scale = self.shape.routed_scaling_factor
        return reference.forward_normal(x.double(), weights.double(), ids, routed, shared, scale)

    def _exact(self, expert):
        gate, up = self.gate_up.exact(expert).chunk(2)
        return gate, up, self.down.exact(expert)

    def count_experts(self, topk_ids):
        """Return the number of distinct experts in ``topk_ids``."""
        return int(torch.unique(topk_ids).numel())

    def bytes(self, tokens, experts):
        """Return the minimum bytes to move: the experts' weights and each token's input and output, once."""
        item = self.gate_up.values.element_size()
        each = 2 * self.shape.hidden_size * self.router.element_size()
        return experts * self.shape.expert_weights * item + tokens * each

    def flops(self, slots):
        """Return the operations of the GEMMs for ``slots`` slots: two per weight."""
        return 2 * slots * self.shape.expert_weights


def mismatch(out, expected, dtype):
    """Compare a layer's output with ``Layer.expected``; return a description of the first error, or None.

    The error of a token is relative to its norm, the error of an element to the root mean square of the token.
    """
    if out.shape != expected.shape:
        return f"the shape is {tuple(out.shape)}, not {tuple(expected.shape)}"
    if not out.numel():
        return None
    # Short vectors average over fewer rounding errors: the bound is 1.7 times as large for 32 elements, 1.05 for 7168.
    error, bound = out.double() - expected, BOUNDS[dtype] * (1 + 4 / expected.shape[1] ** 0.5)
    if not bool(torch.isfinite(error).all()):
        return f"{int((~torch.isfinite(error)).sum())} elements are not finite"
    norm = expected.norm(dim=1).clamp(min=1e-30)
    relative_error = error.norm(dim=1) / norm
    token = int(relative_error.argmax())
    if relative_error[token] > bound:
        return f"token {token} is off by {float(relative_error[token]):.2g} of its norm; {bound:.2g} is allowed"
    rms = (norm / expected.shape[1] ** 0.5)[:, None]
    max_error = float((error.abs() / rms).max())
    if max_error > 6 * bound:
        return f"an element is off by {max_error:.2g} of the root mean square; {6 * bound:.2g} is allowed"
    return None


def tile_rows(slots, experts, out, inner, dtype):
    """Return the tile height that torch's grouped GEMM chooses on Hopper by the average number of rows."""
    average = slots // experts
    if average <= 128 or out <= 128:
        return 64
    is_large = sum(size >= 2048 for size in (average, out, inner)) >= 2
    return 256 if is_large and dtype == FP8 else 128


def count_kernels(call):
    """Count the kernels that a call launches; None in the simulator."""
    profile = launch_profile(call)
    return profile and len(profile)
