"""Low-latency mode of a ``Buffer``: its calls, their exchanges, and the mask of late ranks."""

import torch

from moe_numba.expert_parallel.low_latency import checks
from moe_numba.expert_parallel.low_latency.config import make_shape, scales_format
from moe_numba.expert_parallel.low_latency.exchange import (
    BOTH,
    RECEIVE,
    SEND,
    LowLatencyCombine,
    LowLatencyDispatch,
    load_kernels,
)
from moe_numba.expert_parallel.low_latency.layout import LowLatencyShape
from moe_numba.expert_parallel.low_latency.pair import LowLatency
from moe_numba.expert_parallel.low_latency.rank_mask import RankMask
from moe_numba.expert_parallel.ranks.events import is_capturing
from moe_numba.expert_parallel.ranks.rank_state import RankState
from moe_numba.expert_parallel.ranks.stream_order import StreamOrder
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.validate import check_flag, check_int


class LowLatencyMode:
    """The state of a `Buffer`'s low-latency calls, and the calls themselves, whose parameters `Buffer` explains.

    Each call keeps memory of its own for every combination of sizes, dtypes and options, which its first call
    allocates. Ranks must make the same calls in the same order.

    Parameters
    ----------
    runtime : RankState
    streams : StreamOrder
    enable_shrink : bool
        Whether calls go on without ranks that are late.
    """

    def __init__(self, runtime: RankState, streams: StreamOrder, enable_shrink: bool):
        self._runtime, self._streams = runtime, streams
        self._num_ranks, self._device = runtime.num_ranks, runtime.transport.device
        self.num_sms: int | None = None  # of a launch; None: all SMs
        self.rank_mask = RankMask(runtime, not enable_shrink)
        self._exchanges: dict[tuple, LowLatencyDispatch | LowLatencyCombine] = {}
        self._combine_inputs: dict[tuple, torch.Tensor] = {}
        self._pairs: dict[tuple, LowLatency] = {}  # that callers share

    def dispatch(
        self,
        x,
        topk_idx,
        max_tokens,
        num_experts,
        expert_counts,
        wait_ns,
        use_fp8,
        round_scale,
        use_ue8m0,
        async_finish,
        return_recv_hook,
    ):
        """See `Buffer.low_latency_dispatch`."""
        self._runtime.check_alive()
        scales = scales_format(use_fp8, round_scale, use_ue8m0)
        exchange = self._exchange(LowLatencyDispatch, x, topk_idx, max_tokens, num_experts, x, scales)
        shape = exchange.shape
        checks.check_dispatch(exchange, x, topk_idx, None)
        counts = "cumulative_local_expert_recv_stats", expert_counts, torch.int32, shape.local_experts
        checks.check_statistics(*counts, self._device, ("a rank has {} experts",))
        checks.check_statistics(
            "dispatch_wait_recv_cost_stats", wait_ns, torch.int64, self._num_ranks, self._device, checks.OF_RANKS
        )
        _check_phases(async_finish, return_recv_hook)
        out = exchange.new_output()
        checks.note_experts(out.slot_rows, topk_idx)

        def launch(phase):
            exchange.launch(x, topk_idx, None, out, phase, expert_counts, wait_ns)
            checks.set_received(out.slot_rows, phase != SEND)

        event, hook = self._run(launch, async_finish, return_recv_hook, x, topk_idx, *out)
        handle = out.src_info, out.layout_range, shape.max_tokens, shape.hidden, shape.num_experts, out.slot_rows
        return (out.x if out.scales is None else (out.x, out.scales)), out.counts, handle, event, hook

    def combine(
        self, x, topk_idx, topk_weights, handle, use_logfmt, async_finish, return_recv_hook, out, wait_ns, use_fp8
    ):
        """See `Buffer.low_latency_combine`."""
        self._runtime.check_alive()
        if use_logfmt:
            raise ValueError(f"use_logfmt is {use_logfmt}; it must be False. Use use_fp8 for shorter rows")
        _, _, max_tokens, hidden, num_experts, slot_rows = checks.check_handle(handle)
        combines_fp8 = check_flag("use_fp8", use_fp8)
        exchange = self._exchange(
            LowLatencyCombine, x, topk_idx, max_tokens, num_experts, hidden, combines_fp8=combines_fp8
        )
        checks.check_combine(exchange, x, slot_rows, topk_idx, topk_weights)
        checks.check_received(slot_rows)
        checks.check_experts(slot_rows, topk_idx, num_experts)
        checks.check_statistics(
            "combine_wait_recv_cost_stats", wait_ns, torch.int64, self._num_ranks, self._device, checks.OF_RANKS
        )
        _check_phases(async_finish, return_recv_hook)
        if out is None:
            out = x.new_empty(topk_idx.shape[0], hidden)
        checks.check_combined(out, topk_idx.shape[0], hidden, self._device)

        def launch(phase):
            exchange.launch(x, slot_rows, topk_idx, topk_weights, out, phase, wait_ns)

        event, hook = self._run(launch, async_finish, return_recv_hook, x, slot_rows, topk_idx, topk_weights, out)
        return out, event, hook

    def next_combine_input(self, handle):
        """See `Buffer.get_next_low_latency_combine_buffer`."""
        _, _, max_tokens, hidden, num_experts, slot_rows = checks.check_handle(handle)
        key = max_tokens, hidden, num_experts, slot_rows.shape[1]
        tensor = self._combine_inputs.get(key)
        if tensor is None:
            checks.check_sizes(self._num_ranks, max_tokens, hidden, slot_rows.shape[1], num_experts, None)
            size = num_experts // self._num_ranks, self._num_ranks * max_tokens, hidden
            tensor = torch.zeros(size, dtype=torch.bfloat16, device=self._device)
            self._combine_inputs[key] = tensor
        return tensor

    def new_pair(self, shape: LowLatencyShape, topk_idx_dtype, num_sms, shared):
        """See `Buffer.low_latency`."""
        num_sms = None if num_sms is None else check_int("num_sms", num_sms, 1)
        key = shape, topk_idx_dtype, num_sms
        pair = self._pairs.get(key) if check_flag("shared", shared) else None
        if pair is not None and not pair.is_closed:
            pair.users += 1
            return pair
        self._check_can_allocate()
        pair = LowLatency(self._runtime, self._streams, self.rank_mask, shape, topk_idx_dtype, num_sms)
        if shared:
            self._pairs[key] = pair
        return pair

    def clean(self, max_tokens, hidden, num_experts):
        """See `Buffer.clean_low_latency_buffer`."""
        wanted = (
            check_int("num_max_dispatch_tokens_per_rank", max_tokens, 1),
            check_int("hidden", hidden, 1),
            check_int("num_experts", num_experts, 1),
        )
        for exchange in self._exchanges.values():
            shape = exchange.shape
            if (shape.max_tokens, shape.hidden, shape.num_experts) == wanted:
                exchange.reset()

    def query_mask(self, mask_status):
        """See `Buffer.low_latency_query_mask_buffer`."""
        checks.check_mask_status(mask_status, self._num_ranks, self._device)
        mask_status.copy_(self.rank_mask.mask)

    def update_mask(self, rank_to_mask, mask):
        """See `Buffer.low_latency_update_mask_buffer`."""
        rank = check_int("rank_to_mask", rank_to_mask, 0, self._num_ranks - 1)
        self.rank_mask.mask[rank] = int(check_flag("mask", mask))

    def close(self):
        """Free the shared memory of the calls; all ranks must call it."""
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()
        for pair in self._pairs.values():
            pair.users = 0
            pair.close()
        self._pairs.clear()

    def _check_can_allocate(self):
        self._runtime.check_alive()
        if is_capturing():
            raise RuntimeError(
                "the first low-latency call with new sizes allocates and waits for all ranks, and cannot be captured "
                "in a CUDA graph; make it once before the capture"
            )
        if masked := self.rank_mask.masked_ranks():
            raise RuntimeError(
                f"the first low-latency call with new sizes waits for all ranks, but these are masked: {masked}"
            )

    def _exchange(self, make, x, topk_idx, max_tokens, num_experts, hidden, scales=None, combines_fp8=False):
        """Return the exchange for these arguments; the first call makes it."""
        for name, tensor in (("x", x), ("topk_idx", topk_idx)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} is {type(tensor).__name__}; it must be a tensor")
            if tensor.dim() < 2:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have two dimensions or more")
        if not type(max_tokens) is type(num_experts) is int:  # before the look-up: 4.0 would find what was made for 4
            max_tokens = check_int("num_max_dispatch_tokens_per_rank", max_tokens)
            num_experts = check_int("num_experts", num_experts)
        self.rank_mask.check()
        hidden = x.shape[-1] if isinstance(hidden, torch.Tensor) else hidden
        topk = topk_idx.shape[-1]
        key = make, max_tokens, hidden, topk, num_experts, scales, combines_fp8, topk_idx.dtype
        try:
            return self._exchanges[key]
        except KeyError:
            shape = make_shape(
                self._num_ranks, max_tokens, hidden, topk, num_experts, scales=scales, combines_fp8=combines_fp8
            )
            checks.check_topk_idx_dtype("topk_idx", topk_idx.dtype)
            self._check_can_allocate()
            exchange = make(self._runtime, self.rank_mask, shape, topk_idx.dtype, self.num_sms)
            self._exchanges[key] = exchange
            load_kernels(exchange)
            return exchange

    def _run(self, launch, async_finish, return_recv_hook, *tensors):
        """Launch an operation, or its send phase; return its event and hook."""
        tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
        with self._streams.on_stream(None, async_finish, False) as finish:
            launch(SEND if return_recv_hook else BOTH)
            event = finish(*tensors)
        if not return_recv_hook:
            return event, None
        pending = [True]

        def hook():
            if not pending:
                raise RuntimeError("this hook was called before; it receives once")
            pending.clear()
            with self._streams.on_stream(None, False, False) as finish:
                launch(RECEIVE)
                finish(*tensors)

        return event, hook


def _check_phases(async_finish, return_recv_hook):
    if check_flag("async_finish", async_finish) and check_flag("return_recv_hook", return_recv_hook):
        raise ValueError("async_finish and return_recv_hook are both True; at most one of them is allowed")
    if return_recv_hook:
        refuse_recording("return_recv_hook is True; it must be False in a prepared call, because a hook receives once")
