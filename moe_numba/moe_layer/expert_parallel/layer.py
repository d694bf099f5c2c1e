"""``ExpertParallelMoE``: the experts of a layer on several GPUs of a node: dispatch, local experts, combine."""

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from moe_numba.expert_parallel import Buffer, Config, get_dispatch_layout, per_token_cast_back, per_token_cast_to_fp8
from moe_numba.expert_parallel.low_latency.layout import MAX_LOCAL_EXPERTS, SCALE_GROUP
from moe_numba.expert_parallel.rings.checks import check_config
from moe_numba.expert_parallel.rings.config import TOPK_IDX_POINTERS
from moe_numba.moe_layer.backward.exchange import Combine, Dispatch
from moe_numba.moe_layer.expert_parallel.one_kernel import OneKernel
from moe_numba.moe_layer.expert_parallel.one_kernel.layer import check_experts, check_gpu, empty_routing
from moe_numba.moe_layer.group_by_expert.api import group_by_expert
from moe_numba.moe_layer.module import Experts
from moe_numba.moe_layer.weighted_sum.api import weighted_sum
from moe_numba.moe_layer.weights import BF16, FP8_BLOCK, shape_of
from moe_numba.runtime.torch_op import name_requiring_grad, wants_grad
from moe_numba.runtime.validate import check_int, check_tensor

_MAX_LOW_LATENCY_TOKENS = 1 << 20
# The layer chooses low latency for at most this many tokens of a rank. On 4 H200 a layer of DeepSeek-V3 takes 748 us
# with 512 tokens (rings 820). Memory grows with the tokens: 512 need 290 MiB on each of 8 ranks.
CHOSEN_TOKENS, CHOSEN_BYTES = 512, 512 << 20
_ID_TYPES = tuple(TOPK_IDX_POINTERS)


class ExpertParallelMoE(nn.Module):
    """Experts distributed over the ranks of a :class:`moe_numba.Buffer`.

    Each rank has its own tokens and consecutive experts: rank r has the global ids r * n to (r + 1) * n - 1, where n is
    the number of its local experts, the same on all ranks. All ranks must call the layer in the same order, including
    ranks without tokens, and with the same options. The number of tokens may differ between ranks.

    Parameters
    ----------
    buffer : moe_numba.Buffer
        Of 1 to 8 ranks. ``config.get_nvl_buffer_size_hint(2 * hidden, ranks)`` returns a sufficient ``num_nvl_bytes``.
    experts : Experts
        The local experts. If a CUDA graph captures calls, they must have no ``reference`` stages.
    num_worst_tokens : int
        Most rows that this rank receives. If not 0, the host does not wait for the number of received rows, and a CUDA
        graph can capture the call; max_tokens_per_rank * ranks is always enough. If more rows arrive, the next call
        raises a ValueError. 0: the host waits.
    config : Config, optional
        Of dispatch and combine through rings. Default: the buffer's.
    shared_experts : torch.nn.Module, optional
        Computes [tokens, hidden] bfloat16 from this rank's tokens; added to the experts' sum. On a GPU it runs on a
        stream of its own, while tokens are dispatched and experts computed. Parameters of a new module require grad:
        for inference call the layer in ``torch.no_grad()``.
    fp8_dispatch : bool
        Send tokens in FP8 with one scale per 128 elements, which halves the bytes of dispatch. Experts in FP8 with
        block scales read the received FP8 rows directly; they would otherwise quantise tokens in the same way. For
        experts in other formats, received rows are cast back to bfloat16.
    low_latency_tokens : int, optional
        If not 0, the most tokens of a rank's call: dispatch and combine are then ``buffer.low_latency``, a launch each,
        for decoding. Any buffer has them; one with ``low_latency_mode`` needs no ``num_nvl_bytes``. A CUDA graph can
        capture the call after the first one. ``num_worst_tokens`` and ``config`` are not used. 0: rings.
        By default num_worst_tokens / ranks, if these are 1 to 512 tokens, ``config`` is None, and the memory of the
        exchange is at most 512 MiB: up to this size low latency is faster. Otherwise 0. All ranks choose the same,
        as this depends on their common options only, and not on the tokens of a call. So without ``num_worst_tokens``
        it is rings: no rank knows how many tokens the others have.
    fp8_combine : bool
        With ``low_latency_tokens``: send the ranks' sums in FP8 with a scale per 128 elements, which halves the bytes
        of combine. An element of another rank's sum deviates by at most 1/16 of it, or by 2**-10 / 448 of the largest
        magnitude of its 128 elements if that is more; the sum of a token's own rank is not rounded to FP8.
    fused : bool
        Compute dispatch, both grouped GEMMs and the way back in one persistent kernel, for prompts: an expert is
        computed when its rows have arrived, and its results are stored where their tokens are. Experts in bfloat16 or
        in FP8 with block scales, with silu, without biases, on GPUs of compute capability 9.0. Tokens travel in the
        experts' format, once for each of their experts. A rank has at most num_worst_tokens / ranks tokens, which must
        not be 0; ``fp8_dispatch`` has no effect, and ``config``, ``low_latency_tokens`` and ``fp8_combine`` are not
        allowed. A CUDA graph can capture the call after the first one. On one H200 with 32 experts of DeepSeek-V3 in
        FP8 it is 6 % faster than the fastest other option with 512 tokens, and 1 to 3 % slower with 8 and 64: see
        docs/one_kernel.md.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.

    Notes
    -----
    Without ``fused`` the order of operations is DeepEP's: a token is sent once to each rank that has one of its
    experts. That rank computes the weighted sum of its experts, rounds it to bfloat16 and sends it back; combine adds
    the ranks' sums in float32, in the order of the ranks. Results are bit-identical from run to run.

    With bfloat16 weights x, ``topk_weights``, ``shared`` and the parameters have gradients, bit-identical from run to
    run. A call in which a tensor requires grad exchanges through rings, also where inference has the low-latency
    exchange or one kernel. The backward of dispatch is combine, and that of combine dispatch. So all ranks must run the
    backwards of their calls in the same order, and the same tensors must require grad on all ranks.

    Each call allocates intermediate results and its output: there is no ``workspace`` and no ``out``.

    The low-latency exchange has memory for all slots, the ranks' tokens together: two halves of each for dispatch and
    for combine, and the received rows, about 10 * hidden bytes a slot in bfloat16. Layers of a buffer with the same
    sizes and options share it. So calls of such layers must not overlap; on one stream they do not. Nor must those of
    layers with ``fused``. There a rank has memory for the rows that all tokens of all ranks send if they choose its
    experts only, that is hidden + intermediate elements for each of topk * num_worst_tokens rows, and the results of
    its own tokens.

    With ``fused`` a rank adds up the rows of a token's experts, and not the sums of ranks, in the order of
    ``topk_ids``, and rounds once.

    In ``FakeTensorMode`` a call sends nothing, and computes the experts of as many rows as a call receives: of
    ``num_worst_tokens``, of all slots, or of as many as x has.

    ``.to(dtype)`` and the like leave the experts' scales and quantised weights as they are.
    """

    def __init__(
        self,
        buffer: Buffer,
        experts: Experts,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        shared_experts: nn.Module | None = None,
        fp8_dispatch: bool = False,
        low_latency_tokens: int | None = None,
        fp8_combine: bool = False,
        fused: bool = False,
    ):
        super().__init__()
        if not isinstance(buffer, Buffer):
            raise TypeError(f"buffer is {type(buffer).__name__}; it must be a moe_numba.Buffer")
        if not isinstance(experts, Experts):
            raise TypeError(f"experts is {type(experts).__name__}; it must be a moe_numba.moe_layer.Experts")
        for name, value in dict(fp8_dispatch=fp8_dispatch, fp8_combine=fp8_combine, fused=fused).items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; it must be True or False")
        if config is not None:
            check_config(config)
        if shared_experts is not None and not isinstance(shared_experts, nn.Module):
            raise TypeError(f"shared_experts is {type(shared_experts).__name__}; it must be a torch.nn.Module")
        self.buffer, self.experts, self.config = buffer, experts, config
        self._hidden = shape_of(experts.w13, experts.w2, experts.format).hidden
        self.shared_experts, self.fp8_dispatch = shared_experts, fp8_dispatch
        self.num_worst_tokens, self.fp8_combine = check_int("num_worst_tokens", num_worst_tokens, 0), fp8_combine
        self.fused, self._has_chosen = fused, low_latency_tokens is None
        if fused:
            self._check_fused(low_latency_tokens)
            low_latency_tokens = 0
        tokens = self._choose_low_latency_tokens() if low_latency_tokens is None else low_latency_tokens
        self.low_latency_tokens = check_int("low_latency_tokens", tokens, 0, _MAX_LOW_LATENCY_TOKENS)
        if fp8_combine and not self.low_latency_tokens:
            raise ValueError("fp8_combine is True and low_latency_tokens 0; only low-latency combine sends FP8")
        self._plans: dict[Any, Any] = {}  # of low-latency exchanges, or of kernels
        self._stream: torch.cuda.Stream | None = None  # of the shared experts

    def _choose_low_latency_tokens(self):
        """Return the most tokens of a rank for the low-latency exchange, 0 for rings; the same on all ranks."""
        ranks, hidden, local = self.buffer.group_size, self._hidden, len(self.experts.w13)
        tokens = -(-self.num_worst_tokens // ranks)
        if self.config is not None or not 1 <= tokens <= CHOSEN_TOKENS or local > MAX_LOCAL_EXPERTS:
            return 0
        if hidden % SCALE_GROUP and (self.fp8_dispatch or self.fp8_combine):
            return 0
        received = 2 * hidden * (ranks + 1) * tokens  # the outputs of dispatch and combine
        exchanged = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, ranks * local)
        return tokens if exchanged + received <= CHOSEN_BYTES else 0

    def _check_fused(self, low_latency_tokens):
        """Raise if an argument does not go with ``fused``."""
        for name, value, none in (
            ("config", self.config, None),
            ("low_latency_tokens", low_latency_tokens or None, None),
            ("fp8_combine", self.fp8_combine, False),
        ):
            if value is not none:
                raise ValueError(f"{name} is {value!r} and fused True; with fused it must not be given")
        if not self.num_worst_tokens:
            raise ValueError("num_worst_tokens is 0 and fused True; with fused it must be 1 or more")
        check_gpu(self.buffer.transport.device)
        check_experts(self.experts, OneKernel.formats, "fused=True")

    @property
    def max_fused_tokens(self) -> int:
        """Most tokens of a rank's call with ``fused``."""
        return -(-self.num_worst_tokens // self.buffer.group_size)

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks."""
        return len(self.experts.w13) * self.buffer.group_size

    @property
    def receives_any_number(self) -> bool:
        """Whether the number of rows that the experts compute depends on the routing."""
        return not (self.low_latency_tokens or self.num_worst_tokens)

    def forward(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the experts of this rank's tokens.

        Arguments are checked before anything is sent.

        Parameters
        ----------
        x : tensor [tokens, hidden], bfloat16
        topk_weights : tensor [tokens, topk], float32
            Any strides, as ``topk_ids``; what is not contiguous is copied.
        topk_ids : tensor [tokens, topk], int32 or int64
            Global ids. One outside of 0 to num_experts - 1 adds nothing.
        shared : tensor [tokens, hidden], bfloat16, optional
            Added to the sum: the output of shared experts. Contiguous and 16-byte aligned without
            ``low_latency_tokens``. Not with ``shared_experts``.

        Returns
        -------
        tensor [tokens, hidden], bfloat16

        Raises
        ------
        ValueError, TypeError
            If an argument is invalid, or x has more tokens than ``low_latency_tokens`` or ``fused`` allow. ValueError
            also if an earlier
            call received more than ``num_worst_tokens`` rows, or if a tensor requires grad and there is no backward:
            with weights in other formats than bfloat16, ``fp8_dispatch``, or a buffer without ``num_nvl_bytes``.
        TimeoutError
            If a rank does not arrive within the buffer's timeout: from this call if the host waits for counts,
            otherwise from the next one.
        """
        check_tensor("x", x, shape=("tokens", self._hidden), because=("", "the experts' hidden is {}"))
        check_tensor("topk_ids", topk_ids, dtype=_ID_TYPES, shape=(len(x), "topk"), because=("x has {} rows",))
        wanted = dict(shape=topk_ids.shape, because=("topk_ids has {} rows", "topk_ids has {} columns"))
        check_tensor("topk_weights", topk_weights, dtype=torch.float32, **wanted)
        topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
        if self.shared_experts is not None:
            if shared is not None:
                raise ValueError("shared is given, but the layer has shared_experts; only one of them is allowed")
            shared = self._start_shared_experts(x)
        if shared is not None or self.shared_experts is not None:
            self._check_shared(shared, x)
        if isinstance(x, FakeTensor):
            return self._compute_fake(x, topk_ids)
        if wants_grad(chain((x, topk_weights, shared), self.parameters())):
            return self._exchange_with_gradients(x, topk_weights, topk_ids, shared)
        exchange = self._exchange_low_latency if self.low_latency_tokens else self._exchange
        exchange = self._compute_in_one_kernel if self.fused else exchange
        return exchange(x, topk_weights, topk_ids, shared)

    def _check_shared(self, shared, x):
        """Raise, before anything is sent, for what combine cannot add to the sum of ``x``'s experts."""
        name = "shared" if self.shared_experts is None else "shared_experts' result"
        is_bias = not self.low_latency_tokens  # of `Buffer.combine`
        layout = dict(contiguous=is_bias, aligned=is_bias, device=(x.device, "x"))
        wanted = dict(shape=tuple(x.shape), because=("x has {} rows", "x has {} columns"))
        check_tensor(name, shared, dtype=torch.bfloat16, **wanted, **layout)

    def _start_shared_experts(self, x):
        """Launch the shared experts concurrently with the current stream; `_wait_for_shared_experts` waits."""
        assert self.shared_experts is not None
        if not x.is_cuda:
            return self.shared_experts(x)
        self._stream = self._stream or torch.cuda.Stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return self.shared_experts(x)

    def _wait_for_shared_experts(self, x, shared):
        """Let the current stream wait for the shared experts; keep their tensors for as long as both streams run."""
        if self.shared_experts is None or not x.is_cuda:
            return
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        shared.record_stream(current)

    def _send(self, x, topk_weights, topk_ids):
        """Dispatch through rings; return rows, ids and weights that this rank received, and the handle for combine.

        Layout and dispatch ignore ids that are no expert's. Padding rows have the ids -1, so no expert reads what they
        contain.
        """
        per_rank, _, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(topk_ids, self.num_experts)
        received, ids, weights, _, handle, _ = self.buffer.dispatch(
            per_token_cast_to_fp8(x) if self.fp8_dispatch else x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_in_rank,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
            num_worst_tokens=self.num_worst_tokens,
            config=self.config,
        )
        return received, ids, weights, handle

    def _exchange(self, x, topk_weights, topk_ids, shared):
        """Dispatch, compute and combine through rings."""
        received, ids, weights, handle = self._send(x, topk_weights, topk_ids)
        rows = self.compute(received, weights, ids)
        self._wait_for_shared_experts(x, shared)
        return self.buffer.combine(rows, handle, bias=shared, config=self.config)[0]

    def _exchange_with_gradients(self, x, topk_weights, topk_ids, shared):
        """Do what `_exchange` does, with a backward; also where inference has the low-latency exchange."""
        for is_there, problem in (
            (self.experts.format != BF16, f"w13 is {self.experts.w13.dtype}; it must be torch.bfloat16"),
            (self.fp8_dispatch, "fp8_dispatch is True; it must be False"),
            (not self.buffer.num_nvl_bytes, "the buffer's num_nvl_bytes is 0; it must have rings"),
        ):
            if is_there:
                tensors = dict(x=x, topk_weights=topk_weights, shared=shared) | dict(self.named_parameters())
                name = name_requiring_grad(tensors)
                raise ValueError(f"{name} requires grad, and {problem} for a backward: use torch.no_grad() or detach()")
        received, weights, ids, *handle = Dispatch.apply(x, topk_weights, topk_ids, self)
        rows = self.compute(received, weights, ids)
        self._wait_for_shared_experts(x, shared)
        return Combine.apply(rows, shared, self, tuple(handle))

    def _exchange_low_latency(self, x, topk_weights, topk_ids, shared):
        """Dispatch, compute and combine by low-latency launches. Slots that no token fills have the ids -1."""
        if len(x) > self.low_latency_tokens:
            default = ", num_worst_tokens / ranks by default; low_latency_tokens=0 allows more" * self._has_chosen
            raise ValueError(
                f"x has {len(x)} tokens; the layer's low_latency_tokens is {self.low_latency_tokens}{default}"
            )
        plan = self._plan(topk_ids)
        slots = plan.dispatch(x, topk_ids, topk_weights)
        received = (slots.x, slots.scales) if self.fp8_dispatch else slots.x
        rows = self.compute(received, slots.topk_weights, slots.topk_idx)
        out = plan.combine(rows, topk_ids)
        self._wait_for_shared_experts(x, shared)
        return out.clone() if shared is None else out + shared

    def _compute_in_one_kernel(self, x, topk_weights, topk_ids, shared):
        """Do what `_exchange` does in one kernel."""
        if len(x) > self.max_fused_tokens:
            raise ValueError(
                f"x has {len(x)} tokens; num_worst_tokens {self.num_worst_tokens} allows {self.max_fused_tokens} "
                f"on each of {self.buffer.group_size} ranks with fused"
            )
        topk = topk_ids.shape[1]
        if topk not in self._plans:
            self._plans[topk] = OneKernel(self.buffer, self.experts, topk, self.max_fused_tokens)
        out = self._plans[topk](x, topk_weights, topk_ids)
        self._wait_for_shared_experts(x, shared)
        return out if shared is None else out + shared

    def _compute_fake(self, x, topk_ids):
        """Make the calls of a call that launch kernels of one rank, for the rows that `forward` receives."""
        ranks, topk, scales = self.buffer.group_size, topk_ids.shape[1], self._hidden // SCALE_GROUP
        if self.fused:
            if self.experts.format == FP8_BLOCK:
                per_token_cast_to_fp8(x)
            routing = empty_routing(topk_ids, self.num_experts)
            group_by_expert(topk_ids, self.num_experts, out=routing)
            rows, weights = x.new_empty(topk_ids.numel(), self._hidden), torch.empty_like(topk_ids, dtype=torch.float32)
            return weighted_sum(rows, routing[3], weights)
        if self.low_latency_tokens:
            rows = ranks * self.low_latency_tokens
            x_scale = x.new_empty(scales, rows, dtype=torch.float32).T
        else:
            rows = self.num_worst_tokens or len(x)
            get_dispatch_layout(topk_ids, self.num_experts, ranks)
            if self.fp8_dispatch:
                per_token_cast_to_fp8(x)
            x_scale = x.new_empty(rows, scales, dtype=torch.float32)
        received = x.new_empty(rows, self._hidden)
        weights, ids = x.new_empty(rows, topk, dtype=torch.float32), topk_ids.new_empty(rows, topk)
        self.compute((received.to(torch.float8_e4m3fn), x_scale) if self.fp8_dispatch else received, weights, ids)
        return torch.empty_like(x)

    def compute(self, received, weights, ids):
        """Compute the local experts of what dispatch returned.

        Parameters
        ----------
        received : tensor [rows, hidden] bfloat16; with ``fp8_dispatch`` (float8_e4m3fn, float32 [rows, hidden / 128])
        weights : tensor [rows, topk], float32
        ids : tensor [rows, topk], int32 or int64
            Local ids; -1 for experts of other ranks, and in padding rows.

        Returns
        -------
        tensor [rows, hidden], bfloat16
            Weighted sums of the local experts.
        """
        x, x_scale = received if self.fp8_dispatch else (received, None)
        if self.fp8_dispatch and self.experts.format != FP8_BLOCK:
            x, x_scale = per_token_cast_back(x, x_scale), None
        return self.experts(x, weights, ids, x_scale=x_scale)

    def _plan(self, topk_ids):
        """Return the low-latency exchange for these columns and dtype of ``topk_ids``; the first call makes it."""
        key = topk_ids.shape[1], topk_ids.dtype
        if key not in self._plans:
            formats = dict(use_fp8=self.fp8_dispatch, use_fp8_combine=self.fp8_combine)
            options = dict(expert_major=False, topk_idx_dtype=topk_ids.dtype) | formats
            sizes = self.low_latency_tokens, self._hidden, self.num_experts, topk_ids.shape[1]
            self._plans[key] = self.buffer.low_latency(*sizes, **options, shared=True)
        return self._plans[key]

    def close(self) -> None:
        """Free the memory of low latency or ``fused`` that no other layer uses; all ranks must call it.

        ``buffer.destroy`` frees the memory of all.
        """
        for plan in self._plans.values():
            plan.close()
        self._plans.clear()

    def extra_repr(self) -> str:
        """Describe the ranks."""
        ranks = f"rank={self.buffer.rank} of {self.buffer.group_size}"
        options = f"num_worst_tokens={self.num_worst_tokens}, fp8_dispatch={self.fp8_dispatch}"
        options += f", low_latency_tokens={self.low_latency_tokens}" + ", fp8_combine=True" * self.fp8_combine
        options += ", fused=True" * self.fused
        return f"{ranks}, num_experts={self.num_experts}, {options}"
