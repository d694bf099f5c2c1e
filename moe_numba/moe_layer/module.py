"""``Experts`` and ``MoELayer``: the layer as modules of torch."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from moe_numba.gate.api import GateOptions, check_options
from moe_numba.gate.one_token_per_warp import check_groups
from moe_numba.moe_layer.fused_experts import check_fast_accum, check_format, fused_experts
from moe_numba.moe_layer.fused_moe import fused_moe
from moe_numba.moe_layer.launches import ExpertsTensors
from moe_numba.moe_layer.router import router_logits
from moe_numba.moe_layer.silu_and_mul.api import ALPHA, check_activation
from moe_numba.moe_layer.torch_stages import check_stages, route, run_experts
from moe_numba.moe_layer.weights import BF16, DTYPES, FP8_BLOCK, FP8_TENSOR, check_weights, packed_shape, shape_of
from moe_numba.moe_layer.workspace import ExpertsWorkspace
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.quantise.fp8_cast import per_token_cast_back
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.validate import check_dtype, check_flag, check_int

_TENSORS = "w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias", "a1_scale", "a2_scale"


class FixedDtypes(nn.Module):
    """A module some of whose tensors keep their dtype in ``.to(dtype)``, ``.half()``, ``.type(dtype)`` and the like.

    That also holds if a parent's method is called. Devices change as usual. Those that are float32 stay so in
    ``load_state_dict(assign=True)``, too.
    """

    def _fixed_dtypes(self) -> Collection[str]:
        """Return the names of parameters and buffers that keep their dtype."""
        return ()

    def _apply(self, fn, recurse=True):
        fixed = {id(tensor) for tensor in self._fixed().values()}

        def convert(tensor):
            if id(tensor) not in fixed:
                return fn(tensor)
            result = fn(tensor.new_empty(0))  # asks what fn does, without converting a large weight
            return fn(tensor) if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(convert, recurse)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        for name, tensor in self._fixed().items():
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.is_floating_point() and tensor.dtype == torch.float32:
                state_dict[prefix + name] = given.float()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _fixed(self):
        tensors = {name: getattr(self, name) for name in self._fixed_dtypes()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class Experts(FixedDtypes):
    """Weights of SwiGLU experts, and their computation by :func:`moe_numba.fused_experts`.

    Parameters
    ----------
    num_experts, hidden, intermediate : int
        1 to 512 experts. ``hidden`` is a multiple of 64, ``intermediate`` of 64, or of 128 with block scales;
        :func:`moe_numba.shard_experts` pads other sizes to these.
    dtype : torch.bfloat16, torch.float8_e4m3fn or torch.uint8
        Of the weights; torch.uint8 is packed MXFP4.
    device : torch.device, optional
    reference : collection of str
        Stages to compute in torch: "permute", "gate_up", "down", "sum"; "activation" with bfloat16 weights and with a
        scale per expert; "quantise" with FP8 weights.
    scaling : {"block", "tensor"}
        Of FP8 weights: a scale per 128 x 128 block, or one per expert.
    has_bias : bool
        Whether gate and up, and the experts' outputs have biases.
    activation, alpha, limit, use_fast_accum, batch_invariant
        As for :func:`moe_numba.fused_experts`.

    Attributes
    ----------
    w13 : Parameter [num_experts, 2 * intermediate, hidden]
    w2 : Parameter [num_experts, hidden, intermediate]
        In MXFP4 as :func:`moe_numba.pack_mxfp4_experts` returns them.
    w13_scale, w2_scale : Parameter [num_experts, rows / 128, columns / 128] or [num_experts], float32, or None
    w13_bias : Parameter [num_experts, 2 * intermediate] bfloat16, or None
    w2_bias : Parameter [num_experts, hidden] bfloat16, or None
    a1_scale, a2_scale : buffer of one float32, or None
        With a scale per expert: static scales of x and the activations. Assign them, as in
        ``experts.a1_scale = torch.tensor(0.02, device=device)``. Not in the state_dict.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.

    Notes
    -----
    Parameters are uninitialised: load a state_dict. They require no grad: to train bfloat16 weights, call
    ``requires_grad_()``.
    Scales, and weights in FP8 or MXFP4, keep their dtype in ``.to(dtype)``, ``.bfloat16()`` and the like, also of a
    parent module; float32 scales also in ``load_state_dict``. Weights in bfloat16, and biases, are converted.
    A call allocates its output: modules have no ``out``. For a call that allocates nothing, use
    :func:`moe_numba.fused_experts` with ``**experts.tensors``, ``**experts.activation.options``, ``out`` and
    ``workspace``.

    Examples
    --------
    >>> experts = moe_numba.moe_layer.Experts(num_experts=4, hidden=64, intermediate=64)
    >>> for parameter in experts.parameters():
    ...     _ = parameter.data.fill_(1 / 64)
    >>> ids, weights = torch.tensor([[0, 3]], dtype=torch.int32), torch.tensor([[0.5, 0.5]])
    >>> experts(torch.ones(1, 64).bfloat16(), weights, ids)[0, 0].item()  # silu(1) = 0.731
    0.73046875
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    a1_scale: torch.Tensor | None
    a2_scale: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        reference: Collection[str] = (),
        scaling: str = "block",
        has_bias: bool = False,
        activation: str = "silu",
        alpha: float = ALPHA,
        limit: float | None = None,
        use_fast_accum: bool = False,
        batch_invariant: bool = False,
    ):
        super().__init__()
        check_dtype("dtype", dtype, DTYPES)
        num_experts, hidden = check_int("num_experts", num_experts, 1), check_int("hidden", hidden, 1)
        intermediate, has_bias = check_int("intermediate", intermediate, 1), check_flag("has_bias", has_bias)
        if dtype == torch.uint8 and (hidden % 64 or intermediate % 64):
            sizes_ = f"hidden is {hidden} and intermediate {intermediate}"
            raise ValueError(f"{sizes_}; with MXFP4 weights they must be multiples of 64")
        sizes = (num_experts, 2 * intermediate, hidden), (num_experts, hidden, intermediate)
        for name, size in zip(("w13", "w2"), sizes, strict=True):
            shape = packed_shape(name, *size) if dtype == torch.uint8 else size
            setattr(self, name, _parameter(*shape, dtype=dtype, device=device))
        self.scaling, self.format = scaling, check_weights(self.w13, self.w2, scaling).format
        for name, (_, rows, columns) in zip(("w13", "w2"), sizes, strict=True):
            scales = {FP8_BLOCK: (-(-rows // FP8_SCALE_BLOCK), -(-columns // FP8_SCALE_BLOCK)), FP8_TENSOR: ()}.get(
                self.format
            )
            scale = None if scales is None else _parameter(num_experts, *scales, dtype=torch.float32, device=device)
            self.register_parameter(f"{name}_scale", scale)
            bias = _parameter(num_experts, rows, dtype=torch.bfloat16, device=device) if has_bias else None
            self.register_parameter(f"{name}_bias", bias)
        for name in ("a1_scale", "a2_scale"):
            self.register_buffer(name, None, persistent=False)
        self.activation = check_activation(activation, alpha, limit)
        check_format(self.format, self.activation, has_bias)
        self.reference = check_stages(reference, self.format)
        check_fast_accum(use_fast_accum, self.format)
        self.use_fast_accum = use_fast_accum
        self.batch_invariant = check_flag("batch_invariant", batch_invariant)

    def _fixed_dtypes(self) -> Collection[str]:
        """Return the names of scales and quantised weights, whose numbers are wrong in another dtype."""
        scales = "w13_scale", "w2_scale", "a1_scale", "a2_scale"
        return scales if self.format == BF16 else ("w13", "w2", *scales)

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The weights, scales and biases, by the names of the arguments of :func:`moe_numba.fused_experts`."""
        return {name: getattr(self, name) for name in _TENSORS}

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared: torch.Tensor | None = None,
        workspace: ExpertsWorkspace | None = None,
        x_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs [tokens, hidden], a new tensor.

        Arguments and errors are those of :func:`moe_numba.fused_experts`. With a stage in ``reference``, ``workspace``
        is not used, and x in FP8 is cast to bfloat16 first.
        """
        in_torch = self.reference - {"gate"}
        if in_torch:
            refuse_recording(f"reference has {sorted(in_torch)}, which a prepared call does not repeat")
        if in_torch and x_scale is not None:
            x, x_scale = per_token_cast_back(x, x_scale), None
        given: dict[str, Any] = dict(x=x, topk_weights=topk_weights, topk_ids=topk_ids, shared=shared) | self.tensors
        if in_torch:
            return run_experts(ExpertsTensors(**given), self.activation, self.reference, self.use_fast_accum)
        options = dict(use_fast_accum=self.use_fast_accum, batch_invariant=self.batch_invariant)
        return fused_experts(**given, **self.activation.options, **options, workspace=workspace, x_scale=x_scale)

    def workspace(self, max_tokens: int, topk: int) -> ExpertsWorkspace:
        """Return an :class:`moe_numba.ExpertsWorkspace` for calls of up to ``max_tokens`` tokens with ``topk`` experts.

        Raises
        ------
        ValueError, TypeError
            If ``max_tokens`` is not an int of 0 or more, or ``topk`` not one of 1 to 64.
        """
        return ExpertsWorkspace(max_tokens, topk, self.w13, self.w2, self.scaling)

    def extra_repr(self) -> str:
        """Describe the sizes."""
        shape, stages = shape_of(self.w13, self.w2, self.format), ""
        if self.reference:
            stages = f", reference={sorted(self.reference)}"
        sizes = f"{shape.num_experts}, hidden={shape.hidden}, intermediate={shape.intermediate}"
        activation = "" if self.activation.is_plain else f", {self.activation}"
        return f"{sizes}, format={self.format}{activation}{stages}"


class MoELayer(FixedDtypes):
    """An MoE layer on one GPU: router, gate, experts, and optionally shared experts.

    Parameters
    ----------
    num_experts, hidden, intermediate, dtype, device, scaling, has_bias, activation, alpha, limit
        As for :class:`Experts`.
    topk : int
        Experts per token, 1 to 32, as many as the gate selects.
    shared_experts : torch.nn.Module, optional
        Computes [tokens, hidden] bfloat16 from [tokens, hidden]; added to the experts' sum. It runs before the experts,
        on the same stream; that of :class:`ExpertParallelMoE` runs concurrently.
    has_correction_bias : bool
        Whether the gate adds a bias to the scores to choose experts (DeepSeek-V3, GLM-4-MoE).
    has_router_bias : bool
        Whether the router's linear layer has a bias (gpt-oss).
    renormalize, num_expert_group, topk_group, routed_scaling_factor, scoring
        As for :func:`moe_numba.fused_moe`.
    batch_invariant : bool
        Compute router and experts so that a token's result has the same bits in every batch, see
        :func:`moe_numba.fused_experts`. ``shared_experts`` must see to that themselves.
    reference : collection of str
        Stages to compute in torch instead of by a kernel: those of :class:`Experts`, and "gate".

    Attributes
    ----------
    router_weight : Parameter [num_experts, hidden], bfloat16
    router_bias : Parameter [num_experts], bfloat16, or None
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
    ``correction_bias`` stays float32 in ``.to(dtype)``, ``.bfloat16()`` and the like, also of a parent module, and in
    ``load_state_dict``: rounded, it would choose other experts. For the experts' tensors see :class:`Experts`.

    Examples
    --------
    >>> layer = moe_numba.moe_layer.MoELayer(num_experts=4, hidden=64, intermediate=64, topk=2)
    >>> for parameter in layer.parameters():
    ...     _ = parameter.data.fill_(1 / 64)
    >>> layer(torch.ones(2, 3, 64).bfloat16()).shape
    torch.Size([2, 3, 64])
    """

    correction_bias: torch.Tensor | None
    router_bias: torch.Tensor | None

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
        scaling: str = "block",
        has_bias: bool = False,
        has_router_bias: bool = False,
        activation: str = "silu",
        alpha: float = ALPHA,
        limit: float | None = None,
        batch_invariant: bool = False,
    ):
        super().__init__()
        options = scaling, has_bias, activation, alpha, limit
        self.experts = Experts(
            num_experts, hidden, intermediate, dtype, device, reference, *options, batch_invariant=batch_invariant
        )
        self.topk = check_int("topk", topk, 1, min(32, num_experts))
        self.router_weight = _parameter(num_experts, hidden, dtype=torch.bfloat16, device=device)
        has_router_bias = check_flag("has_router_bias", has_router_bias)
        router_bias = _parameter(num_experts, dtype=torch.bfloat16, device=device) if has_router_bias else None
        self.register_parameter("router_bias", router_bias)
        has_correction_bias = check_flag("has_correction_bias", has_correction_bias)
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if has_correction_bias else None
        self.register_buffer("correction_bias", bias)
        if shared_experts is not None and not isinstance(shared_experts, nn.Module):
            raise TypeError(f"shared_experts is {shared_experts!r}; it must be a torch.nn.Module")
        self.shared_experts = shared_experts
        self.gate_options: dict[str, Any] = dict(
            renormalize=renormalize,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            routed_scaling_factor=routed_scaling_factor,
            scoring=scoring,
        )
        fixed: dict[str, Any] = dict(num_fused_shared_experts=0, apply_routed_scaling_factor_on_output=True)
        check_groups(num_experts, check_options(GateOptions(topk, **self.gate_options, **fixed)))

    def _fixed_dtypes(self) -> Collection[str]:
        """Return the name of the bias by which the gate chooses experts."""
        return ("correction_bias",)

    def forward(self, x: torch.Tensor, workspace: ExpertsWorkspace | None = None) -> torch.Tensor:
        """Compute the layer.

        Parameters
        ----------
        x : tensor [..., hidden], bfloat16
        workspace : ExpertsWorkspace, optional
            Memory for the experts' intermediate results. With a stage in ``reference`` it is not used. Logits and the
            output are allocated in any case.

        Returns
        -------
        tensor of x's shape, bfloat16

        Raises
        ------
        ValueError, TypeError, moe_numba.UnsupportedDeviceError
            As from :func:`moe_numba.fused_moe`.
        """
        self._check_input(x)
        refuse_recording("a prepared call does not repeat the router's GEMM of MoELayer: prepare fused_moe")
        tokens = x.reshape(-1, x.shape[-1])
        experts = self.experts
        logits = router_logits(tokens, self.router_weight, self.router_bias, experts.batch_invariant)
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        if experts.reference:
            options = self.gate_options | dict(apply_routed_scaling_factor_on_output=True)
            weights, ids = route(logits, self.correction_bias, self.topk, options, experts.reference)
            return experts(tokens, weights, ids, shared).view(x.shape)
        options = self.gate_options | experts.tensors | experts.activation.options
        options |= dict(correction_bias=self.correction_bias, topk=self.topk, shared=shared)
        options |= dict(batch_invariant=experts.batch_invariant)
        return fused_moe(tokens, logits, **options, workspace=workspace).view(x.shape)

    def _check_input(self, x):
        """Raise for what the router's GEMM would refuse without x's name."""
        if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
            given = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"x is {given}; it must be a tensor of torch.bfloat16")
        hidden, device = self.router_weight.shape[1], self.router_weight.device
        if not x.dim() or x.shape[-1] != hidden:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; it must be [..., {hidden}], as the layer's hidden is {hidden}"
            )
        if x.device != device:
            raise ValueError(f"x is on {x.device}; it must be where the weights are, on {device}")

    def extra_repr(self) -> str:
        """Describe the gate."""
        return ", ".join([f"topk={self.topk}", *(f"{name}={value}" for name, value in self.gate_options.items())])


def _parameter(*shape, dtype, device):
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
