"""``fused_experts``: the experts of an MoE layer on one GPU, from routed tokens to their sums."""

from operator import itemgetter

import torch

from moe_numba.grouped_gemm.call.checks import check_gpu
from moe_numba.moe_layer.gemv.plan import uses_decode_kernels
from moe_numba.moe_layer.group_by_expert.api import check_routing
from moe_numba.moe_layer.launches import ExpertsCall, ExpertsTensors, can_fuse_activation, launches_of
from moe_numba.moe_layer.per_token_quant.api import check_scale
from moe_numba.moe_layer.silu_and_mul.api import ALPHA, check_activation
from moe_numba.moe_layer.weighted_sum.api import check_topk, contiguous_weights
from moe_numba.moe_layer.weights import (
    FP8,
    FP8_BLOCK,
    FP8_TENSOR,
    MXFP4,
    check_scaled_weights,
    check_weight_scale,
    check_wgmma,
)
from moe_numba.moe_layer.workspace import ExpertsWorkspace, Intermediates, check_workspace, num_bytes
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.outputs import Outputs, find_plan, remember
from moe_numba.runtime.recording import keep_recorded, refuse_recording
from moe_numba.runtime.replay import Replay
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_aligned, check_device, check_flag, check_tensor, make_outputs

_select_tensors = itemgetter(*ExpertsTensors._fields)
_READ_IN_VECTORS = frozenset(("x", "w13", "w2", "shared"))
_OF_X = "x has {} rows", "x has {} columns"  # reasons for the shape of x
_plans: dict = {}


@torch_op(in_place=("x", "shared"))
def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: ExpertsWorkspace | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Compute each token's experts, SwiGLU MLPs, and the weighted sum of their outputs.

    For each token: ``sum_k topk_weights[k] * w2[e] @ (silu(gate) * up)``, where e is ``topk_ids[k]`` and gate and up
    are the halves of ``w13[e] @ x``.

    Parameters
    ----------
    x : tensor [tokens, hidden], bfloat16; or float8_e4m3fn with ``x_scale``
        Contiguous, 16-byte aligned.
    w13 : tensor [experts, 2 * intermediate, hidden], bfloat16 or float8_e4m3fn
        Rows of an expert that compute gate and up, in the order that ``activation`` needs. Contiguous, 16-byte aligned;
        1 to 512 experts. ``hidden`` is a multiple of 64, ``intermediate`` of 64, or of 128 with block scales: for
        other sizes, as tensor parallelism makes them, :func:`moe_numba.shard_experts` cuts and pads the weights. In
        bfloat16 also the transposed view, ``.mT``, of a contiguous tensor, on GPUs with wgmma.
        Or MXFP4: tensor [experts, 2 * intermediate / 64, hidden / 64, 136, 16], uint8, from
        :func:`moe_numba.pack_mxfp4_experts`, on GPUs with wgmma. A tile of 64 x 64 weights has 2048 bytes of 4-bit
        codes and 128 bytes of scales. The packed order of rows is the same for both activations; ``gate_up`` of that
        function names the order of the rows that it packs.
    w2 : tensor [experts, hidden, intermediate], dtype of w13
        As w13. In MXFP4: tensor [experts, hidden / 64, intermediate / 64, 2176], uint8.
    topk_weights : tensor [tokens, topk], float32
        Any strides; what is not contiguous is copied first. ``topk`` is 1 to 64 (of the gate, and so of
        :func:`moe_numba.fused_moe`, 1 to 32).
    topk_ids : tensor [tokens, topk], int32 or int64
        Any strides; at most 2**30 elements. An id outside of 0 to experts - 1, such as -1 for an expert of another
        rank, adds nothing.
    w13_scale : tensor [experts, 2 * intermediate / 128, hidden / 128] or [experts], float32, optional
    w2_scale : tensor [experts, hidden / 128, intermediate / 128] or [experts], float32, optional
        Required for FP8 weights: the scale of each 128 x 128 block, as in DeepSeek-V3, hidden / 128 rounded up; or of
        each expert's whole weight. Contiguous. With block scales x and the activations are quantised per 128 elements
        of a row.
    shared : tensor [tokens, hidden], bfloat16, optional
        Added to the sum: the output of shared experts. Contiguous, 16-byte aligned.
    out : tensor [tokens, hidden], bfloat16, optional
        Contiguous, 16-byte aligned, to write into; it may be ``x`` or ``shared``, but must not overlap an input
        otherwise.
    workspace : ExpertsWorkspace, optional
        Memory for intermediate results. With it and ``out`` the call neither allocates nor synchronises. Without it
        the call allocates one buffer for all intermediate results, beside its output, and frees it. It is not an
        argument of the op: under torch.compile it is not used.
    w13_bias : tensor [experts, 2 * intermediate], bfloat16 or float32, optional
    w2_bias : tensor [experts, hidden], bfloat16 or float32, optional
        Added to gate and up, in the order of rows that ``activation`` needs, also with MXFP4; and to the output of each
        expert, before it is weighted. Contiguous. Not with FP8 weights.
    activation : str, optional
        "silu": ``silu(gate) * up``; the first ``intermediate`` rows of w13 compute gate, the others up.
        "swigluoai", of gpt-oss, by vLLM's name: ``(up + 1) * gate * sigmoid(alpha * gate)``; the even rows of w13
        compute gate, the odd ones up. Block scales support "silu" only.
    alpha : float, optional
        Sigmoid slope of "swigluoai"; 1.2e-38 to 1e38.
    limit : float, optional
        Clamp before the activation: gate <= ``limit``, abs(up) <= ``limit``; 1.2e-38 to 1e38. None: no clamp with
        "silu", and 7 with "swigluoai". With "silu", block scales and MXFP4 support None only.
    a1_scale, a2_scale : tensor of one float32, optional
        With a scale per expert: static per-tensor scales of x and of the activations; values beyond 448 * scale
        saturate. None: each row has its own scale, its largest magnitude divided by 448.
    x_scale : tensor [tokens, hidden / 128], float32, optional
        Scales of FP8 x, for example from dispatch between ranks: one per 128 elements of a row, hidden / 128 rounded
        up. With block scales only. Any strides.
    use_fast_accum : bool, optional
        With a scale per expert: accumulate over all of k in the tensor cores, which add FP8 products with fewer bits
        than float32, instead of per 128 elements; see :func:`group_gemm_pertensor_fp8`.
    batch_invariant : bool, optional
        Take the same launches for all numbers of tokens, so that a token's result has the same bits in every batch: the
        matrix-vector kernels for few tokens are not used, and one token takes longer.

    Returns
    -------
    tensor [tokens, hidden], bfloat16
        From the library that ``x`` is from. Empty with 0 tokens.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed. ValueError also if a
        tensor requires grad and the weights are not bfloat16, or ``out`` is given: then there is no backward.
    moe_numba.UnsupportedDeviceError
        If the GPU is older than compute capability 8.0, or has no wgmma (compute capability 9.0) and the weights need
        it: MXFP4 and transposed weights.

    Notes
    -----
    With bfloat16 weights x, the weights, biases, ``topk_weights`` and ``shared`` have gradients, bit-identical from run
    to run. For them the call keeps gate and up, of the size of ``gate_up`` in :func:`moe_numba.silu_and_mul`.

    ``topk_weights``, ``topk_ids``, ``w2``, ``a1_scale`` and ``a2_scale`` are named as in vLLM's function of this name;
    ``w13`` is its ``w1``, by the name of the layer's weight, and ``x`` its ``hidden_states``. Not supported are
    ``expert_map`` (pass -1 for experts of other ranks), ``inplace`` (pass ``out=x``), ``apply_router_weight_on_input``,
    and other activations, such as GELU.

    The first call with new sizes compiles its kernels: call once before a CUDA graph captures the call. Launches, one
    for each name:

    - bfloat16: :func:`group_by_expert`, :func:`group_gemm_silu_and_mul_bf16` of gathered rows,
      :func:`group_gemm_bf16`, :func:`weighted_sum`. On a GPU without wgmma, for transposed w13, and for "silu" with a
      limit the activation is a launch of its own: :func:`group_gemm_bf16`, then :func:`silu_and_mul`.
    - MXFP4: the same grouped GEMMs with :func:`group_gemm_silu_and_mul_mxfp4` and :func:`group_gemm_mxfp4`.
    - FP8, block scales: :func:`group_by_expert`, :func:`per_token_cast_to_fp8`,
      :func:`group_gemm_silu_and_mul_blockwise_fp8` of gathered rows, :func:`group_gemm_blockwise_fp8`,
      :func:`weighted_sum`. With ``x_scale`` nothing is cast.
    - FP8, a scale per expert: :func:`group_by_expert`, :func:`per_token_quant_fp8`, :func:`group_gemm_pertensor_fp8`
      of gathered rows, :func:`silu_and_mul_quant_fp8`, :func:`group_gemm_pertensor_fp8`, :func:`weighted_sum`. With
      both ``a1_scale`` and ``a2_scale``, at least 3 assignments, and no limit with "silu", the first grouped GEMM
      computes and quantises the activation.

    With few tokens in bfloat16, block scales or MXFP4, two launches of matrix-vector kernels replace these. The first
    computes the activations of each assignment, the second multiplies them by w2 and adds them up, weighted. All
    of these conditions must hold, and ``batch_invariant`` must be False:

    - tokens * topk is at most 64, and with more than one token at most 1.06 times (MXFP4: 1.08) the expected number of
      distinct experts;
    - the weights of the assignments take at most 256 MiB (bfloat16, more than one token) or 128 MiB (block scales,
      MXFP4): beyond that, grouped GEMMs are as fast or faster, because they read weights at a higher rate;
    - w13 and w2 are contiguous, and topk is at most 32 (bfloat16) or 16 (block scales, MXFP4);
    - with block scales: compute capability 8.9 or newer, no ``x_scale``, hidden >= 2 * intermediate, tokens * topk *
      intermediate >= 8192, and topk * intermediate <= 40960;
    - in MXFP4: hidden <= 20480, and topk * (intermediate + 256) <= 20480.

    If the mean rows per expert exceed 64 (bfloat16, and FP8 with a scale per expert), 2 (block scales) or 12 (MXFP4), x
    is permuted first: by :func:`permute_tokens`, or by the launch that casts it to FP8. Results between launches are
    bfloat16 or FP8; sums are float32.

    vLLM's and SGLang's functions quantise x and the activations with ``a1_scale`` and ``a2_scale`` if they are given,
    and otherwise with the largest magnitude of all tokens of the batch, or per token if asked to. Here it is always
    per token, which is more accurate, and does not let a token's result depend on the others of its batch.

    Results are bit-identical from run to run, and do not depend on the other tokens; their last bits may depend on the
    number of tokens, which chooses the launches, unless ``batch_invariant`` is True. Group sizes stay on the GPU, so a
    CUDA graph that captures the call can be replayed with another routing.

    Examples
    --------
    >>> x = torch.ones(2, 64, dtype=torch.bfloat16)
    >>> w13 = torch.full((4, 2 * 64, 64), 1 / 64, dtype=torch.bfloat16)  # gate and up are 1
    >>> w2 = torch.full((4, 64, 64), 1 / 64, dtype=torch.bfloat16)
    >>> ids = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
    >>> weights = torch.tensor([[0.5, 0.5], [1.0, 1.0]])
    >>> y = moe_numba.fused_experts(x, w13, w2, weights, ids)  # silu(1) = 0.731
    >>> y.shape, y[0, 0].item(), y[1, 0].item()
    (torch.Size([2, 64]), 0.73046875, 1.4609375)
    """
    given = x, w13, w2, topk_weights, topk_ids, w13_scale, w2_scale, shared
    tensors = *given, w13_bias, w2_bias, a1_scale, a2_scale, x_scale
    options = activation, alpha, limit, use_fast_accum, batch_invariant
    # 1, 1.0 and True are equal
    key = options, type(alpha), type(limit), type(use_fast_accum), type(batch_invariant)
    plan, key, t = find_plan(_plans, key, tensors, ExpertsTensors._fields)
    if plan is None:
        plan = remember(_plans, key, make_plan(ExpertsTensors(*t), *options))
    if plan.copies_weights:
        t = *t[:3], contiguous_weights(t[3]), *t[4:]
    return plan.compute(t, out, workspace)


class ExpertsPlan:
    """What depends only on shapes, dtypes, strides and options of a call, and the launches of such calls."""

    names: tuple[str, ...] = ExpertsTensors._fields  # of the tensors

    def __init__(self, t, shape, activation, use_fast_accum, batch_invariant):
        self.shape, self.activation, self.use_fast_accum = shape, activation, use_fast_accum
        self.routing = tuple(t.topk_ids.shape)
        self.fuses = can_fuse_activation(t, shape.format, activation, batch_invariant)
        few = t.x_scale is None and not batch_invariant
        self.decodes = few and uses_decode_kernels(shape, *self.routing, t.w13, t.w2)
        self.copies_weights = not t.topk_weights.is_contiguous()  # those of the routing; kernels read contiguous ones
        self.outputs = Outputs(_describe_output(t.x), t.x.device, aligned=("tensor",))
        self.memory_bytes = num_bytes(shape, *self.routing)
        self.empty = torch.empty(0, dtype=torch.uint8, device=t.x.device)
        self.replay = Replay(self.launch_in, self.check_alignment)

    def compute(self, tensors, out, workspace, launch=None):
        """Check what no plan depends on, allocate the output and memory, and launch the kernels.

        ``launch`` replaces `launch_in`, for launches that cannot be repeated.
        """
        if workspace is not None:
            check_workspace(workspace, *self.routing, self.shape)
        else:
            refuse_recording("workspace is None; a prepared call needs one, which keeps its intermediate results")
        (result,) = self.outputs(out)
        if not self.routing[0]:
            self.check_alignment(*tensors)
        else:
            memory = self.new_memory() if workspace is None else workspace.buffer
            (launch or self.replay)(*tensors, memory, result)
        return result if out is None else out

    def check_alignment(self, *arguments):
        """Raise for tensors that kernels read in vectors of 16 bytes and that do not start at such a multiple."""
        for name, tensor in zip(self.names, arguments):  # noqa: B905  memory and output follow
            if name in _READ_IN_VECTORS and tensor is not None:
                check_aligned(name, tensor)

    def new_memory(self):
        """Return a buffer for the intermediate results of a call."""
        return self.empty.new_empty(self.memory_bytes)

    def launch_in(self, *arguments):
        """Launch the kernels for tensors, a buffer for intermediate results and an output."""
        *tensors, buffer, out = arguments
        self.launch(ExpertsTensors(*tensors), self.intermediates(buffer), out)

    def intermediates(self, buffer):
        """Return the intermediate results of a call in a buffer."""
        memory = Intermediates.within(buffer, self.shape, *self.routing)
        keep_recorded(memory)
        return memory

    def launch(self, t, memory, out):
        """Launch the kernels."""
        options = self.shape, self.activation, self.fuses, self.decodes
        for launch in launches_of(ExpertsCall(t, *options, memory, self.use_fast_accum), out).values():
            launch()


def make_plan(t, activation, alpha, limit, use_fast_accum, batch_invariant, shape=None, kind=ExpertsPlan):
    """Check the arguments of a call, and return its `ExpertsPlan`, or plan of a ``kind``.

    ``shape`` is that of the experts, if weights have been checked.
    """
    shape, chosen = check_experts(t, activation, alpha, limit, shape)
    check_fast_accum(use_fast_accum, shape.format)
    return kind(t, shape, chosen, use_fast_accum, check_flag("batch_invariant", batch_invariant))


def _describe_output(x):
    return (("tensor", tuple(x.shape), torch.bfloat16, _OF_X),)


def check_experts(t, activation, alpha, limit, shape=None):
    """Check the arguments of a call; return the sizes of the experts and the activation.

    ``shape`` is that of the experts, if their weights have been checked.
    """
    dtype = torch.bfloat16 if t.x_scale is None else FP8
    check_tensor("x", t.x, dtype=dtype, shape=("tokens", "hidden"), contiguous=True)
    check_device(t.x.device, "x")
    check_gpu(t.x.device)
    shape, place = shape or check_scaled_weights(t.w13, t.w2, t.w13_scale), (t.x.device, "x")
    check_wgmma(t.w13, t.w2)
    check_tensor("w13", t.w13, device=place)
    tokens, hidden = t.x.shape
    if hidden != shape.hidden:
        raise ValueError(f"x has {hidden} columns; it must have w13's hidden, {shape.hidden}")
    check_topk("topk_ids", check_routing(t.topk_ids, shape.num_experts)[1])
    check_tensor("topk_ids", t.topk_ids, shape=(tokens, "topk"), because=_OF_X[:1], device=place)
    wanted = dict(shape=tuple(t.topk_ids.shape), because=("topk_ids has {} rows", "topk_ids has {} columns"))
    check_tensor("topk_weights", t.topk_weights, dtype=torch.float32, device=place, **wanted)
    chosen = check_activation(activation, alpha, limit)
    _check_options(t, shape, chosen, place)
    if t.shared is not None:
        wanted = dict(shape=(tokens, hidden), because=_OF_X)
        check_tensor("shared", t.shared, dtype=torch.bfloat16, contiguous=True, device=place, **wanted)
    return shape, chosen


def _check_options(t, shape, chosen, place):
    """Check scales and biases; refuse options that the format of the weights does not have."""
    for name in ("w13_scale", "w2_scale"):
        check_weight_scale(name, getattr(t, name), getattr(t, name.removesuffix("_scale")), shape.format)
        if (scale := getattr(t, name)) is not None:
            check_tensor(name, scale, device=place)
    if t.x_scale is not None:
        if shape.format != FP8_BLOCK:
            raise ValueError("x_scale is given; it is allowed only with FP8 weights that have a scale per block")
        blocks = len(t.x), -(-shape.hidden // FP8_SCALE_BLOCK)
        because = _OF_X[0], f"x has {shape.hidden} columns"
        check_tensor("x_scale", t.x_scale, dtype=torch.float32, shape=blocks, because=because, device=place)
    for name in ("a1_scale", "a2_scale"):
        if (scale := getattr(t, name)) is not None and shape.format != FP8_TENSOR:
            raise ValueError(f"{name} is given; it is allowed only with FP8 weights that have a scale per expert")
        check_scale(name, scale, place)
    experts, hidden, intermediate = shape[:3]
    for name, size, reason in (
        ("w13_bias", 2 * intermediate, "w13 has {} rows per expert"),
        ("w2_bias", hidden, "w2 has {} rows per expert"),
    ):
        if (bias := getattr(t, name)) is None:
            continue
        dtypes, because = (torch.bfloat16, torch.float32), ("w13 has {} experts", reason)
        wanted = dict(shape=(experts, size), because=because)
        check_tensor(name, bias, dtype=dtypes, contiguous=True, device=place, **wanted)
    check_format(shape.format, chosen, t.w13_bias is not None or t.w2_bias is not None)


def check_format(format_, chosen, has_bias):
    """Raise for an activation or biases that the format of the weights does not have."""
    if has_bias and format_ in (FP8_BLOCK, FP8_TENSOR):
        raise ValueError("w13_bias or w2_bias is given; with FP8 weights both must be None")
    if format_ == FP8_BLOCK and not chosen.is_plain:
        given = f"activation is {chosen.name!r}, limit {chosen.limit}"
        raise ValueError(f"{given}; with a scale per 128 x 128 block they must be 'silu' and None")
    if format_ == MXFP4 and chosen.name == "silu" and chosen.limit is not None:
        raise ValueError(f"limit is {chosen.limit}; with MXFP4 weights and 'silu' it must be None")


def check_fast_accum(use_fast_accum, format_):
    """Raise for what is not a bool, and for fast accumulation with weights without a scale per expert."""
    check_flag("use_fast_accum", use_fast_accum)
    if use_fast_accum and format_ != FP8_TENSOR:
        raise ValueError("use_fast_accum is True; it is allowed only with FP8 weights that have a scale per expert")


@register_fake(fused_experts)
def fake_experts(call, shape=None):
    """Check the arguments of a call and return its output; ``shape`` as for `check_experts`."""
    t = ExpertsTensors(*_select_tensors(vars(call)))
    shape, _ = check_experts(t, call.activation, call.alpha, call.limit, shape)
    check_fast_accum(call.use_fast_accum, shape.format)
    check_flag("batch_invariant", call.batch_invariant)
    return make_outputs(call.out, _describe_output(call.x), call.x.device)[0]
