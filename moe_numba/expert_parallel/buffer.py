"""``Buffer``: dispatch and combine within a node, with DeepEP's names, arguments and return values."""

import torch

from moe_numba.expert_parallel.common.buffer_layout import MAX_ROWS
from moe_numba.expert_parallel.layout.api import get_dispatch_layout
from moe_numba.expert_parallel.low_latency.buffer import LowLatencyBuffer
from moe_numba.expert_parallel.ranks.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.rings import checks, launch_plans
from moe_numba.expert_parallel.rings.config import Config
from moe_numba.expert_parallel.rings.dispatch_call import DispatchCall
from moe_numba.expert_parallel.rings.output_buffer import SymmetricOutput
from moe_numba.runtime.validate import check_int, check_tensor


class Buffer(LowLatencyBuffer):
    """Shared memory of a group of ranks, and the exchange of tokens through it.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, or a transport
        1 to 8 ranks with one GPU each, which can access one another's memory (NVLink or PCIe within a node). For a
        process group, torch's symmetric memory provides the buffer; ``expert_parallel.transport`` has other transports.
    num_nvl_bytes : int
        Memory for rings on each rank: a positive multiple of 128, the same on all ranks; see
        ``Config.get_nvl_buffer_size_hint``. With ``low_latency_mode`` it may be 0.
    num_rdma_bytes : int
        Must be 0 without ``low_latency_mode``: there is no path between nodes. With it, it has no effect: low-latency
        calls allocate their memory.
    low_latency_mode : bool
        Allow 0 for ``num_nvl_bytes``. Low-latency calls work in any buffer.
    enable_shrink : bool
        Low-latency calls go on without ranks that are late or dead; needs ``low_latency_mode``. Otherwise they raise
        TimeoutError from the next call on.
    num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric
        DeepEP's options for other nodes. They have no effect.
    explicitly_destroy : bool
        Has no effect: call `destroy` in any case.
    comm
        Must be None: an MPI communicator cannot replace the group.
    timeout : float
        Seconds after which a wait for another rank ends in an error, on the GPU and on the host; more than 0.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid; the message names it, its value and what is allowed. ValueError also if the counts
        contradict each other, if an expert's count is negative or more than 32 times the tokens, if more rows arrive
        than an output can hold, or if the format of the rows, the number of experts or the configuration of a dispatch
        differs between ranks. All ranks raise such a difference: in the same call if its host waits for the counts,
        otherwise in the next one. Other errors that a kernel detects are raised by the next call at the latest. Calls
        have no backward: a tensor that requires grad is a ValueError in grad mode.
    TimeoutError
        A rank did not arrive: from the call that waited for its counts, otherwise from the next call.
    RuntimeError
        After `destroy`; or a dispatch whose host waits for the counts is captured in a CUDA graph.
    UnsupportedDeviceError
        A GPU cannot access the memory of another rank's GPU, or is older than compute capability 7.5.

    Notes
    -----
    All ranks must make the same calls in the same order. After an error on the GPU (a timeout, wrong counts), all ranks
    of the group abort, and every further call, and `check`, raises the error. The results of operations that had not
    ended, and of CUDA graphs that are replayed afterwards, are poisoned: every element is NaN, and every index -1.

    Combine, and dispatch with a handle, exchange no counts. If their arguments differ across ranks, they time out, or
    return wrong rows; the error names the rank and the channel that waited.

    The first call with a configuration compiles its kernels. So that no GPU waits for a compiler, the host first waits
    until all ranks have made this call, for at most ``timeout``, and then until they have compiled the kernels, for at
    most max(``timeout``, 100) seconds. `warm_up` compiles kernels in advance.

    If all GPUs have compute capability 9.0 or newer, kernels copy rows by TMA, otherwise with loads and stores. The
    results are equal. Ranks need peer access (NVLink or PCIe); they use no atomic operations between GPUs.

    Low-latency calls use the same ``timeout``. When it expires, the ranks do not abort: they mask the late rank, whose
    rows become NaN. See ``enable_shrink``, and Raises of `low_latency_dispatch`.

    After DeepEP's ``Buffer`` (its kernels within a node). The kernels are this project's own.
    """

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count the tokens that go to each rank and to each expert.

        Parameters
        ----------
        topk_idx : torch.Tensor [tokens, topk], int64 or int32
            The experts of each token; -1 is no expert.
        num_experts : int
            Experts of all ranks.
        previous_event, async_finish, allocate_on_comm_stream
            As for `dispatch`.

        Returns
        -------
        num_tokens_per_rank : torch.Tensor [num_ranks], int32
        num_tokens_per_rdma_rank : None
        num_tokens_per_expert : torch.Tensor [num_experts], int32
        is_token_in_rank : torch.Tensor [tokens, num_ranks], bool
        event : EventOverlap
        """
        self._runtime.check_alive()
        if isinstance(topk_idx, torch.Tensor):
            check_tensor("topk_idx", topk_idx, device=(self._device, "the buffer"))
        with self._runtime.streams.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            per_rank, per_expert, is_in_rank = get_dispatch_layout(topk_idx, num_experts, self.group_size)
            event = finish(topk_idx, per_rank, per_expert, is_in_rank)
        return per_rank, None, per_expert, is_in_rank, event

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: tuple[torch.Tensor, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        out: SymmetricOutput | None = None,
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        torch.Tensor | None,
        torch.Tensor | None,
        list[int],
        tuple[torch.Tensor, ...],
        EventOverlap,
    ]:
        """Send each token to the ranks that hold its experts, once to each rank.

        Parameters
        ----------
        x : torch.Tensor [tokens, hidden], bfloat16; or (values [tokens, hidden] float8_e4m3fn, scales [tokens, n])
            Rows are contiguous and a multiple of 16 bytes. Scales are float32 or int32, with any strides.
        handle : tuple, optional
            The handle of an earlier dispatch of as many tokens, to use the same layout again. The counts are then not
            exchanged; neither a layout, nor ``topk_idx`` and its weights, nor ``num_worst_tokens`` may be given.
        num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert : torch.Tensor
            From `get_dispatch_layout`; required without a handle.
        topk_idx, topk_weights : torch.Tensor [tokens, topk], int64 or int32, and float32, optional
            Experts and weights to send with the tokens.
        expert_alignment : int
            The counts in the returned list are rounded up to a multiple of this.
        num_worst_tokens : int
            If not 0, outputs have this many rows, and the host does not wait for the counts. The call can then be
            captured in a CUDA graph, or prepared. In rows beyond the received ones only ``recv_topk_idx`` is written.
            If more rows arrive, the next call raises an error.
        config : Config, optional
            Default: `get_dispatch_config`.
        previous_event : EventOverlap or EventHandle, optional
            The event that the call waits for; by default it waits for the current stream.
        async_finish : bool
            Do not make the current stream wait for the call; the returned event marks its end.
        allocate_on_comm_stream : bool
            The outputs belong to the communication stream; needs ``previous_event`` and ``async_finish``.
        out : SymmetricOutput, optional
            From `new_output`; either all ranks pass it or none. The senders write rows directly to it, without rings.
            That is faster, especially with few SMs; at most 16 SMs are used. The returned tensors are views of it,
            and the next dispatch with the same output overwrites them.

        Returns
        -------
        recv_x : as ``x``, [received, hidden]
            Ordered by source rank, then by token.
        recv_topk_idx : torch.Tensor [received, topk], of ``topk_idx``' dtype, or None
            Indices of this rank's experts, from 0; -1 where the expert is on another rank, and in padding rows.
        recv_topk_weights : torch.Tensor [received, topk], float32, or None
            0 where the expert is on another rank.
        num_recv_tokens_per_expert_list : list of int
            Empty with a handle or ``num_worst_tokens``.
        handle : tuple
            Six tensors, int32 except is_token_in_rank, which is bool. rank_prefix_matrix [num_ranks, num_ranks]: rows
            that ranks 0 to s send to rank r, at [s, r]. channel_prefix_matrix [num_ranks, channels]: rows that this
            rank sends to rank r from channels 0 to c, at [r, c]. recv_channel_prefix_matrix [num_ranks, channels]: rows
            that this rank receives from rank s from the channels before c, at [s, c]. recv_src_idx [received]: each
            row's token index on its source rank. is_token_in_rank [tokens, num_ranks]. send_head [tokens, num_ranks]:
            position of a token among its channel's rows to rank r; -1 where it is not sent.
        event : EventOverlap

        Raises
        ------
        ValueError, TypeError, TimeoutError, RuntimeError
            As listed in `Buffer`. ValueError also from `moe_numba.prepare` if the host waits for the counts.
        """
        rt, device, ranks = self._runtime, self._device, self.group_size
        rt.check_alive()
        if isinstance(x, tuple):
            checks.check_scaled_pair(x)
        x, scales = x if isinstance(x, tuple) else (x, None)
        config = self.get_dispatch_config(ranks) if config is None else config
        checks.check_config(config)
        tokens, hidden = checks.check_dispatch_input(x, scales, device)
        topk = checks.check_topk(topk_idx, topk_weights, tokens, device)
        rows = num_worst_tokens = check_int("num_worst_tokens", num_worst_tokens, 0, MAX_ROWS)
        capacity = num_worst_tokens or MAX_ROWS
        expert_alignment = check_int("expert_alignment", expert_alignment, 1, 1 << 20)
        layout = num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        if handle is None:
            if not num_worst_tokens:
                rt.check_can_wait()
            experts, channels = checks.check_layout(*layout, tokens, ranks, device), None
        else:
            if topk or rows or any(part is not None for part in layout):
                raise ValueError("with a handle no layout, topk_idx, topk_weights or num_worst_tokens may be given")
            experts, (_, channels, rows) = 1, checks.check_handle(handle, ranks, device, tokens)
        if out is not None:
            checks.check_output(out, self.transport, x, scales, topk_idx, rows)
            capacity = min(capacity, out.num_rows)
        channels, start, call = rt.cached(
            launch_plans.plan_ring_dispatch if out is None else launch_plans.plan_direct_dispatch,
            config,
            hidden,
            x.dtype,
            0 if scales is None else scales.shape[1],
            topk,
            channels,
            self._channels_per_warp,
            torch.int64 if topk_idx is None else topk_idx.dtype,
        )
        sent = x, scales, topk_idx, topk_weights
        sizes = tokens, hidden, topk, experts, expert_alignment, rows, num_worst_tokens, capacity
        with rt.streams.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            exchange = DispatchCall(*sent, layout, handle, out, *sizes)
            outputs, counts, new_handle = exchange.run(rt, channels, start, call)
            event = finish(x, scales, topk_idx, topk_weights, *layout[:2], *outputs[:4], *new_handle)
        recv_x, recv_scales, recv_topk_idx, recv_topk_weights = outputs[:4]
        recv_x = recv_x if scales is None else (recv_x, recv_scales)
        return recv_x, recv_topk_idx, recv_topk_weights, counts, new_handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows back to the ranks of their tokens, and sum each token's rows.

        Parameters
        ----------
        x : torch.Tensor [received, hidden], bfloat16
            One row per row that dispatch returned. The caller must already have applied the weights.
        handle : tuple
            From `dispatch`.
        topk_weights : torch.Tensor [received, topk], float32, optional
            Weights to sum per token.
        bias : torch.Tensor [tokens, hidden] bfloat16, or a tuple of up to two, optional
            Added to the sum.
        config, previous_event, async_finish, allocate_on_comm_stream
            As for `dispatch`.

        Returns
        -------
        combined_x : torch.Tensor [tokens, hidden], bfloat16
            Summed in float32, first the biases, then the ranks in ascending order, and rounded once.
        combined_topk_weights : torch.Tensor [tokens, topk], float32, or None
        event : EventOverlap
        """
        rt, device = self._runtime, self._device
        rt.check_alive()
        config = self.get_combine_config(self.group_size) if config is None else config
        checks.check_config(config)
        biases = checks.as_biases(bias)
        tokens, channels, rows = checks.check_handle(handle, self.group_size, device)
        hidden, topk = checks.check_combine_input(x, topk_weights, biases, rows, tokens, device)
        start = rt.cached(launch_plans.plan_combine, config, hidden, topk, channels, len(biases))
        *prefix, _, _, send_head = handle
        with rt.streams.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            out = x.new_empty(tokens, hidden)
            out_weights = None if topk_weights is None else topk_weights.new_empty(tokens, topk)
            inputs = rt.pointers(x, topk_weights, *prefix, send_head)
            outputs = rt.pointers(*(*biases, None, None)[:2], out, out_weights)
            with rt.with_barriers_if_layout_changed(True, channels):
                start(*inputs, tokens, *outputs, rows)
            event = finish(x, topk_weights, *biases, out, out_weights, *handle)
        return out, out_weights, event
