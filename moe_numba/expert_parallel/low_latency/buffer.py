"""``Buffer``'s low-latency calls, with DeepEP's names, arguments and return values."""

from collections.abc import Callable

import torch

from moe_numba.expert_parallel.low_latency import checks
from moe_numba.expert_parallel.low_latency.base import LowLatencyBase, scales_format
from moe_numba.expert_parallel.low_latency.exchange import SEND, LowLatencyCombine, LowLatencyDispatch
from moe_numba.expert_parallel.ranks.events import EventOverlap
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.validate import check_flag


class LowLatencyBuffer(LowLatencyBase):
    """The low-latency calls of `Buffer`.

    Each keeps memory of its own for every combination of sizes, dtypes and options, which its first call allocates.
    Ranks must make the same calls in the same order.
    """

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, tuple, EventOverlap, Callable[[], None] | None
    ]:
        """Send each token to the ranks of its experts, and pack the received rows by expert.

        One launch; the host waits for nothing. Can be captured in a CUDA graph after a first call with the same sizes.

        Parameters
        ----------
        x : torch.Tensor [tokens, hidden], bfloat16
            ``hidden`` is a multiple of 128 with FP8 (of 512 with ``use_ue8m0``), otherwise of 8.
        topk_idx : torch.Tensor [tokens, topk], int64 or int32
            The experts of each token; what is not an expert, such as -1, is ignored. An expert that a token names again
            shares the row.
        num_max_dispatch_tokens_per_rank : int
            The most tokens of a rank; the same on all ranks.
        num_experts : int
            Experts of all ranks.
        cumulative_local_expert_recv_stats : torch.Tensor [local experts], int32, optional
            The number of rows of each expert is added to it.
        dispatch_wait_recv_cost_stats : torch.Tensor [num_ranks], int64, optional
            The nanoseconds until the first token of each rank was there are added to it.
        use_fp8 : bool
            Cast rows to FP8 inside the kernel, with one scale per 128 elements, as `per_token_cast_to_fp8`.
        round_scale : bool
            Round scales up to powers of two.
        use_ue8m0 : bool
            Return only the exponents of the scales, four in an int32; needs ``round_scale``.
        async_finish : bool
            Do not make the current stream wait for the call; the returned event marks its end.
        return_recv_hook : bool
            Only send; the returned hook receives, once, on the stream that is current when it is called. Between the
            two no SM is in use. Not in a prepared call, which could not receive again.

        Returns
        -------
        recv_x : torch.Tensor [local experts, slots, hidden], bfloat16; or (values, scales)
            ``slots`` is the number of ranks times ``num_max_dispatch_tokens_per_rank``. The rows of an expert are
            ordered by source rank, then by token; rows beyond its count are not written. Values are float8_e4m3fn;
            scales are column-major, float32 [local experts, slots, hidden / 128] or int32 [..., hidden / 512].
        recv_count : torch.Tensor [local experts], int32
            On the GPU.
        handle : tuple
            For `low_latency_combine`: src_info [local experts, slots], each row's token on its source rank;
            layout_range [local experts, num_ranks], int64, the first row from each rank << 32 | the number of its rows;
            the most tokens; hidden; num_experts; and each slot's rows.
        event : EventOverlap
        hook : function or None

        Raises
        ------
        ValueError, TypeError
            An argument is invalid, or requires grad; the message names it, its value and what is allowed.
        TimeoutError
            An earlier low-latency call has waited for a rank longer than ``timeout``, and the buffer is without
            ``enable_shrink``. In that call, tokens that the rank was part of become NaN; no row is counted.
        RuntimeError
            After `destroy`; or the first call with these sizes is captured.

        Notes
        -----
        After DeepEP's ``Buffer.low_latency_dispatch``. DeepEP sends a row once for each expert, here it is sent once to
        each rank. Row order is deterministic.
        """
        self._runtime.check_alive()
        scales = scales_format(use_fp8, round_scale, use_ue8m0)
        exchange = self._exchange(
            LowLatencyDispatch, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, x, scales
        )
        shape, device = exchange.shape, self._device
        checks.check_dispatch(exchange, x, topk_idx, None)
        checks.check_statistics(
            "cumulative_local_expert_recv_stats",
            cumulative_local_expert_recv_stats,
            torch.int32,
            shape.local_experts,
            device,
        )
        checks.check_statistics(
            "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, torch.int64, shape.num_ranks, device
        )
        _check_phases(async_finish, return_recv_hook)
        out = exchange.new_output()

        def launch(phase):
            exchange.launch(
                x, topk_idx, None, out, phase, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
            )
            checks.set_received(out.slot_rows, phase != SEND)

        event, hook = self._run(launch, async_finish, return_recv_hook, x, topk_idx, *out)
        handle = out.src_info, out.layout_range, shape.max_tokens, shape.hidden, shape.num_experts, out.slot_rows
        return (out.x if out.scales is None else (out.x, out.scales)), out.counts, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = False,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Return each token's weighted sum of its experts' rows.

        Parameters
        ----------
        x : torch.Tensor [local experts, slots, hidden], bfloat16
            The experts' results, where `low_latency_dispatch` put the rows.
        topk_idx : torch.Tensor [tokens, topk]
            As for the dispatch.
        topk_weights : torch.Tensor [tokens, topk], float32
        handle : tuple
            From `low_latency_dispatch`. A handle may be used more than once. A token is NaN if one of its rows has a
            number in the handle that is beyond ``x``.
        use_logfmt : bool
            Must be False; ``use_fp8`` has a similar purpose.
        zero_copy : bool
            Has no effect: the kernel reads ``x`` in place, whether it is from `get_next_low_latency_combine_buffer` or
            not.
        async_finish, return_recv_hook : bool
            As for `low_latency_dispatch`.
        out : torch.Tensor [tokens, hidden], bfloat16, optional
            To write into.
        combine_wait_recv_cost_stats : torch.Tensor [num_ranks], int64, optional
            The nanoseconds until each rank had started are added to it, at least those of the receive phase.
        use_fp8 : bool
            The other ranks' sums travel in FP8, with one float32 scale per 128 elements; ``hidden`` is then a multiple
            of 128. An element of a sum deviates by at most 1/16 of it, or by 2**-10 / 448 of the largest magnitude
            (at least 1e-4) of its 128 elements if that is more. A NaN makes all 128 NaN. Not in DeepEP.

        Returns
        -------
        combined_x : torch.Tensor [tokens, hidden], bfloat16
            Each rank sums its experts' rows in float32, in the order of ``topk_idx``, and rounds to bfloat16; the
            ranks' sums are added in rank order in float32, and rounded. With ``use_fp8`` the other ranks' sums are
            rounded to FP8 instead; those of this rank, too, if a hook receives. A token is NaN if one of its experts is
            on a rank that did not answer in time.
        event : EventOverlap
        hook : function or None

        Raises
        ------
        ValueError, TypeError, TimeoutError, RuntimeError
            As from `low_latency_dispatch`. RuntimeError also if the dispatch returned a hook that was not called.

        Notes
        -----
        After DeepEP's ``Buffer.low_latency_combine``, which sends each expert's row and rounds once.
        """
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
        checks.check_statistics(
            "combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, torch.int64, self.group_size, self._device
        )
        _check_phases(async_finish, return_recv_hook)
        if out is None:
            out = x.new_empty(topk_idx.shape[0], hidden)
        checks.check_combined(out, topk_idx.shape[0], hidden, self._device)

        def launch(phase):
            exchange.launch(x, slot_rows, topk_idx, topk_weights, out, phase, combine_wait_recv_cost_stats)

        event, hook = self._run(launch, async_finish, return_recv_hook, x, slot_rows, topk_idx, topk_weights, out)
        return out, event, hook

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> torch.Tensor:
        """Return a tensor for the experts' results, to pass to `low_latency_combine`.

        It is the same for all handles of the same sizes; the first call allocates it. DeepEP's combine saves a copy if
        the results are there; the combine here never copies them.
        """
        _, _, max_tokens, hidden, num_experts, slot_rows = checks.check_handle(handle)
        key = max_tokens, hidden, num_experts, slot_rows.shape[1]
        tensor = self._combine_inputs.get(key)
        if tensor is None:
            checks.check_sizes(self.group_size, max_tokens, hidden, slot_rows.shape[1], num_experts, None)
            size = num_experts // self.group_size, self.group_size * max_tokens, hidden
            tensor = torch.zeros(size, dtype=torch.bfloat16, device=self._device)
            self._combine_inputs[key] = tensor
        return tensor


def _check_phases(async_finish, return_recv_hook):
    if check_flag("async_finish", async_finish) and check_flag("return_recv_hook", return_recv_hook):
        raise ValueError("async_finish and return_recv_hook are both True; at most one of them is allowed")
    if return_recv_hook:
        refuse_recording("return_recv_hook is True; it must be False in a prepared call, because a hook receives once")
