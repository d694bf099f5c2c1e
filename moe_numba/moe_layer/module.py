"""``Experts`` and ``MoELayer``: the layer as modules of torch."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from moe_numba.moe_layer.api import fused_experts
from moe_numba.moe_layer.gate_and_experts import fused_moe
from moe_numba.moe_layer.stages import check_stages, route, run_experts
from moe_numba.moe_layer.workspace import BLOCK, FP8, ExpertsWorkspace, check_weights
from moe_numba.runtime.validate import check_int


class Experts(nn.Module):
    """Weights of SwiGLU experts, and their computation by :func:`moe_numba.fused_experts`.

    Parameters
    ----------
    num_experts, hidden, intermediate : int
        1 to 512 experts. ``hidden`` is a multiple of 64, ``intermediate`` of 64 (bfloat16) or 128 (FP8).
    dtype : torch.bfloat16 or torch.float8_e4m3fn
        Of the weights. FP8 weights have a scale per 128 x 128 block.
    device : torch.device, optional
    reference : collection of str
        Stages to compute in torch: "permute", "gate_up", "down", "sum"; "activation" with bfloat16 weights and
        "quantise" with FP8 weights.

    Attributes
    ----------
    w13 : Parameter [num_experts, 2 * intermediate, hidden]
    w2 : Parameter [num_experts, hidden, intermediate]
    w13_scale, w2_scale : Parameter [num_experts, rows / 128, columns / 128] float32, or None for bfloat16
        Parameters are uninitialised: load a state_dict. They require no grad, because the kernels have no backward.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    """

    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        reference: Collection[str] = (),
    ):
        super().__init__()
        num_experts, hidden = check_int("num_experts", num_experts, 1), check_int("hidden", hidden, 1)
        intermediate = check_int("intermediate", intermediate, 1)
        self.w13 = _parameter(num_experts, 2 * intermediate, hidden, dtype=dtype, device=device)
        self.w2 = _parameter(num_experts, hidden, intermediate, dtype=dtype, device=device)
        check_weights(self.w13, self.w2)
        for name, weight in (("w13_scale", self.w13), ("w2_scale", self.w2)):
            blocks = num_experts, *(-(-size // BLOCK) for size in weight.shape[1:])
            scale = _parameter(*blocks, dtype=torch.float32, device=device) if dtype == FP8 else None
            self.register_parameter(name, scale)
        self.reference = check_stages(reference, dtype == FP8)

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared: torch.Tensor | None = None,
        workspace: ExpertsWorkspace | None = None,
    ) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs [tokens, hidden]; see :func:`moe_numba.fused_experts`.

        With a stage in ``reference``, ``workspace`` is not used.
        """
        given = x, self.w13, self.w2, topk_weights, topk_ids, self.w13_scale, self.w2_scale, shared
        if self.reference - {"gate"}:
            return run_experts(*given, self.reference)
        return fused_experts(*given, workspace=workspace)

    def extra_repr(self) -> str:
        """Describe the sizes."""
        experts, twice, hidden = self.w13.shape
        stages = f", reference={sorted(self.reference)}" if self.reference else ""
        return f"{experts}, hidden={hidden}, intermediate={twice // 2}, dtype={self.w13.dtype}{stages}"


class MoELayer(nn.Module):
    """An MoE layer on one GPU: router, gate, experts, and optionally shared experts.

    Parameters
    ----------
    num_experts, hidden, intermediate, dtype, device
        As for :class:`Experts`.
    topk : int
        Experts per token, 1 to 32.
    shared_experts : torch.nn.Module, optional
        Computes [tokens, hidden] bfloat16 from [tokens, hidden]; added to the experts' sum.
    has_correction_bias : bool
        Whether the gate adds a bias to the scores to choose experts (DeepSeek-V3, GLM-4-MoE).
    renormalize, num_expert_group, topk_group, routed_scaling_factor, scoring
        As for :func:`moe_numba.fused_moe`.
    reference : collection of str
        Stages to compute in torch instead of by a kernel: those of :class:`Experts`, and "gate".

    Attributes
    ----------
    router_weight : Parameter [num_experts, hidden], bfloat16
    correction_bias : buffer [num_experts] float32, or None
    experts : Experts
    shared_experts : Module or None

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.

    Notes
    -----
    Logits are computed in float32, as DeepSeek-V3's router does. All weights are uninitialised: load a state_dict.
    """

    correction_bias: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        topk: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        shared_experts: nn.Module | None = None,
        has_correction_bias: bool = False,
        renormalize: bool = True,
        num_expert_group: int = 1,
        topk_group: int = 1,
        routed_scaling_factor: float | None = 1.0,
        scoring: str = "sigmoid",
        reference: Collection[str] = (),
    ):
        super().__init__()
        self.experts = Experts(num_experts, hidden, intermediate, dtype, device, reference)
        self.topk = check_int("topk", topk, 1, min(32, num_experts))
        self.router_weight = _parameter(num_experts, hidden, dtype=torch.bfloat16, device=device)
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if has_correction_bias else None
        self.register_buffer("correction_bias", bias)
        self.shared_experts = shared_experts
        self.gate_options: dict[str, Any] = dict(
            renormalize=renormalize,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            routed_scaling_factor=routed_scaling_factor,
            scoring=scoring,
        )

    def forward(self, x: torch.Tensor, workspace: ExpertsWorkspace | None = None) -> torch.Tensor:
        """Compute the layer.

        Parameters
        ----------
        x : tensor [..., hidden], bfloat16
        workspace : ExpertsWorkspace, optional
            Memory for intermediate results. With a stage in ``reference`` it is not used.

        Returns
        -------
        tensor of x's shape, bfloat16
        """
        tokens = x.reshape(-1, x.shape[-1])
        logits = nn.functional.linear(tokens.float(), self.router_weight.float())
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        experts, bias = self.experts, self.correction_bias
        if experts.reference:
            options = self.gate_options | dict(apply_routed_scaling_factor_on_output=True)
            weights, ids = route(logits, bias, self.topk, options, experts.reference)
            return experts(tokens, weights, ids, shared).view(x.shape)
        options = self.gate_options | dict(w13_scale=experts.w13_scale, w2_scale=experts.w2_scale, shared=shared)
        weights = experts.w13, experts.w2
        return fused_moe(tokens, logits, bias, *weights, self.topk, **options, workspace=workspace).view(x.shape)

    def extra_repr(self) -> str:
        """Describe the gate."""
        return ", ".join([f"topk={self.topk}", *(f"{name}={value}" for name, value in self.gate_options.items())])


def _parameter(*shape, dtype, device):
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
