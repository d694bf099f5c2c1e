"""``Buffer``: dispatch and combine within a node, with DeepEP's names, arguments and return values."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.common.buffer_layout import MAX_RANKS, MAX_ROWS, MAX_TOPK
from moe_numba.expert_parallel.layout.api import get_dispatch_layout
from moe_numba.expert_parallel.low_latency.config import make_shape, shape_of_options
from moe_numba.expert_parallel.low_latency.mode import LowLatencyMode
from moe_numba.expert_parallel.low_latency.pair import LowLatency
from moe_numba.expert_parallel.ranks import transport
from moe_numba.expert_parallel.ranks.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.ranks.rank_state import RankState
from moe_numba.expert_parallel.ranks.stream_order import StreamOrder
from moe_numba.expert_parallel.ranks.warm_up import warm_up
from moe_numba.expert_parallel.rings import checks, launch_plans
from moe_numba.expert_parallel.rings.config import Config
from moe_numba.expert_parallel.rings.dispatch_call import DispatchCall
from moe_numba.expert_parallel.rings.output_buffer import SymmetricOutput
from moe_numba.runtime.validate import check_flag, check_int, check_tensor

_ALIGNMENT = 128  # of the size of a buffer, in bytes, as in DeepEP


@cache
def _default_config(num_sms, num_ranks):
    return Config(num_sms, 4, 512 if num_ranks == 2 else 256)  # with more ranks longer rings are not faster


class Buffer:
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
        Seconds after which a wait for another rank ends in an error, on the GPU and on the host; more than 0. In the
        simulator a second is a million steps of the scheduler, each of which runs one warp: a kernel of many warps
        needs many. If all threads poll in vain, its clock is set forward, so that a wait for a missing rank ends soon.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid; the message names it, its value and what is allowed. ValueError also if the counts
        contradict each other, if an expert's count is negative or more than 32 times the tokens, if more rows arrive
        than an output can hold, or if the format of the rows, the number of experts or the configuration of a dispatch
        differs between ranks; in the simulator also if a layout is not that of ``topk_idx``, or if a low-latency
        combine has other experts than its dispatch. All ranks raise a difference between ranks: in the same call if its
        host waits for the counts,
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

    Examples
    --------
    Two ranks as threads of one process; under ``torchrun`` the group is one of ``torch.distributed``:

    >>> from moe_numba.expert_parallel import LocalGroup
    >>> def work(group):
    ...     buffer = moe_numba.Buffer(group, num_nvl_bytes=1 << 20)
    ...     x = torch.full((4, 64), float(group.rank), device=group.device).bfloat16()
    ...     topk_idx = torch.tensor([[0, 1], [1, 3], [2, 3], [0, 2]], device=group.device)
    ...     per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, 4)
    ...     rows, _, _, counts, handle, _ = buffer.dispatch(
    ...         x,
    ...         num_tokens_per_rank=per_rank,
    ...         num_tokens_per_expert=per_expert,
    ...         is_token_in_rank=is_in_rank,
    ...         topk_idx=topk_idx,
    ...         topk_weights=torch.ones(4, 2, device=group.device),
    ...     )
    ...     y, _, _ = buffer.combine(rows, handle)  # the sum over the ranks that a token was sent to
    ...     buffer.destroy()
    ...     return counts, y[:, 0].tolist()
    >>> LocalGroup(2).run(work)
    [([4, 4], [0.0, 0.0, 0.0, 0.0]), ([4, 4], [1.0, 2.0, 1.0, 2.0])]
    """

    num_sms = 20
    _channels_per_warp = None  # None: the best number
    _uses_tma = None  # None: if the GPUs of all ranks have TMA

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        *,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        timeout: float = 100.0,
    ):
        checks.check_group(group)
        if comm is not None:
            raise ValueError("comm is given; it must be None: an MPI communicator cannot replace the group")
        low_latency_mode = check_flag("low_latency_mode", low_latency_mode)
        enable_shrink = check_flag("enable_shrink", enable_shrink)
        if enable_shrink and not low_latency_mode:
            raise ValueError(f"enable_shrink is {enable_shrink}; only low-latency calls can go on without a rank")
        if check_int("num_rdma_bytes", num_rdma_bytes, 0) and not low_latency_mode:
            raise ValueError(f"num_rdma_bytes is {num_rdma_bytes}; it must be 0: all ranks are in one node")
        num_nvl_bytes = check_int("num_nvl_bytes", num_nvl_bytes)
        if num_nvl_bytes < (not low_latency_mode) or num_nvl_bytes % _ALIGNMENT:
            raise ValueError(f"num_nvl_bytes is {num_nvl_bytes}; it must be a positive multiple of {_ALIGNMENT}")
        checks.check_timeout(timeout)
        self.transport = group if isinstance(group, transport.Transport) else transport.SymmetricMemory(group)
        self.group, self.rank, self.group_size = group, self.transport.rank, self.transport.num_ranks
        if not 1 <= self.group_size <= MAX_RANKS:
            raise ValueError(f"the group has {self.group_size} ranks; 1 to {MAX_RANKS} are allowed")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        transport.check_same_on_all_ranks(self.transport, "Buffer", num_nvl_bytes=num_nvl_bytes)
        # Half of the memory is for the rings of dispatch, and both halves start at multiples of _ALIGNMENT.
        num_bytes = -(-num_nvl_bytes // (2 * _ALIGNMENT)) * 2 * _ALIGNMENT
        self._runtime = RankState(self.transport, num_bytes, timeout, self._uses_tma)
        self._device = self.transport.device
        self._streams = StreamOrder(self.transport)
        self._low_latency = LowLatencyMode(self._runtime, self._streams, enable_shrink)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: rows of FP8 can be dispatched on every GPU, and TMA is used where the GPUs have it."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set the number of SMs of default configurations.

        Parameters
        ----------
        new_num_sms : int
            Even, 2 to 132.

        Raises
        ------
        ValueError, TypeError
            It is something else.
        """
        cls.num_sms = Config(new_num_sms).num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Record an event on the current stream."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Return the default configuration of dispatch for ``num_ranks`` ranks."""
        return _default_config(cls.num_sms, check_int("num_ranks", num_ranks, 1, MAX_RANKS))

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Return the default configuration of combine for ``num_ranks`` ranks."""
        return cls.get_dispatch_config(num_ranks)

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
        with self._streams.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
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
            From `get_dispatch_layout`; required without a handle. They must be the layout of ``topk_idx``, which only
            the simulator checks.
        num_tokens_per_rdma_rank : None
            DeepEP's, for several nodes.
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
            if simulator.ENABLED and topk and not simulator.has_queued():
                checks.check_layout_of(topk_idx, *layout)
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
        with self._streams.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
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
        with self._streams.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            out = x.new_empty(tokens, hidden)
            out_weights = None if topk_weights is None else topk_weights.new_empty(tokens, topk)
            inputs = rt.pointers(x, topk_weights, *prefix, send_head)
            outputs = rt.pointers(*(*biases, None, None)[:2], out, out_weights)
            with rt.with_barriers_if_layout_changed(True, channels):
                start(*inputs, tokens, *outputs, rows)
            event = finish(x, topk_weights, *biases, out, out_weights, *handle)
        return out, out_weights, event

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
        return self._low_latency.dispatch(
            *(x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts),
            *(cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats),
            *(use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook),
        )

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
            That of the dispatch, which only the simulator checks.
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
        return self._low_latency.combine(
            *(x, topk_idx, topk_weights, handle, use_logfmt, async_finish, return_recv_hook),
            *(out, combine_wait_recv_cost_stats, use_fp8),
        )

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> torch.Tensor:
        """Return a tensor for the experts' results, to pass to `low_latency_combine`.

        It is the same for all handles of the same sizes; the first call allocates it. DeepEP's combine saves a copy if
        the results are there; the combine here never copies them.

        Parameters
        ----------
        handle : tuple
            From `low_latency_dispatch`.

        Returns
        -------
        torch.Tensor [local experts, num_slots, hidden], bfloat16
            ``num_slots`` is the number of ranks times ``num_max_dispatch_tokens_per_rank``.
        """
        return self._low_latency.next_combine_input(handle)

    def low_latency(
        self,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        expert_major: bool = True,
        protocol: str = "lamport",
        use_fp8_combine: bool = False,
        topk_idx_dtype: torch.dtype = torch.int64,
        num_sms: int | None = None,
        shared: bool = False,
    ) -> LowLatency:
        """Prepare low-latency dispatch and combine of one token format, with fixed outputs.

        All ranks must call it, with the same arguments. It allocates and compiles, and waits for all ranks.

        Parameters
        ----------
        num_max_dispatch_tokens_per_rank, hidden, num_experts, num_topk : int
            The most tokens of a rank, elements of a row, experts of all ranks, and experts of a token.
        use_fp8, round_scale, use_ue8m0 : bool
            As for `low_latency_dispatch`.
        expert_major : bool
            Pack received rows by expert; combine then weights them. Otherwise a row stays at [source rank][token], the
            weights travel with the tokens, and combine adds rows that the caller has weighted.
        protocol : str
            "lamport": receivers poll the data itself; a NaN may change its bits. "flags": a flag follows the data.
        use_fp8_combine : bool
            As ``use_fp8`` of `low_latency_combine`.
        topk_idx_dtype : torch.dtype
            int64 or int32.
        num_sms : int, optional
            SMs of a launch, whose CTAs must all be resident at once. By default all, shared by the ranks of a GPU.
        shared : bool
            Return the same pair for all calls with ``shared`` and these arguments, as the layers of a model need whose
            calls do not overlap. The last ``close()`` of its users, or `destroy`, frees its memory.

        Returns
        -------
        LowLatency
            Free it with ``close()``, on all ranks, before `destroy`.

        Raises
        ------
        ValueError, TypeError
            An argument is invalid, or differs between ranks.
        RuntimeError
            In a CUDA graph capture, or after `destroy`.
        """
        shape = shape_of_options(
            *(self.group_size, num_max_dispatch_tokens_per_rank, hidden, num_experts, num_topk),
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            expert_major=expert_major,
            protocol=protocol,
            use_fp8_combine=use_fp8_combine,
        )
        return self._low_latency.new_pair(shape, topk_idx_dtype, num_sms, shared)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes that low-latency dispatch and combine in bfloat16 allocate on each rank.

        They allocate memory themselves, whatever ``num_rdma_bytes`` of the buffer is. ``hidden`` counts elements of a
        row, and ``num_experts`` the experts of all ``num_ranks`` ranks, which send up to
        ``num_max_dispatch_tokens_per_rank`` tokens each.
        """
        num_ranks = check_int("num_ranks", num_ranks, 1, MAX_RANKS)
        shape = make_shape(num_ranks, num_max_dispatch_tokens_per_rank, hidden, MAX_TOPK, num_experts)
        return 4 * (shape.dispatch_words + shape.combine_words)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Wait for all ranks, and clear the memory of all low-latency calls with these sizes; all ranks must call it.

        Needed only after a timeout, together with `low_latency_clean_mask_buffer`: other sizes have other memory. It
        does not wait for ranks that are masked, and with ``enable_shrink`` it masks a rank that does not come in time.
        ``num_max_dispatch_tokens_per_rank``, ``hidden`` and ``num_experts`` are those of the calls.

        Raises
        ------
        ValueError, TypeError
            An argument is not a positive int. Sizes of which there was no call have no effect.
        TimeoutError
            A rank did not come in time, and the buffer is without ``enable_shrink``.
        """
        self._low_latency.clean(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that is masked, and 0 for each other rank.

        Parameters
        ----------
        mask_status : torch.Tensor [num_ranks], int32
        """
        self._low_latency.query_mask(mask_status)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank: nothing is sent to it, nothing waits for it, and its rows are NaN; or do so no longer.

        Parameters
        ----------
        rank_to_mask : int
        mask : bool
            False unmasks the rank.
        """
        self._low_latency.update_mask(rank_to_mask, mask)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks, and forget the timeouts that masked them."""
        self._low_latency.rank_mask.clear()

    def get_comm_stream(self) -> "torch.cuda.Stream | None":
        """Return the stream on which calls with ``async_finish`` run; None in the simulator."""
        return self._streams.comm_stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: tuple[int, ...] | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return this rank's ring memory as a tensor.

        Parameters
        ----------
        dtype : torch.dtype
        size : tuple of int, optional
            The tensor's shape; by default all of the memory behind ``offset``, flat.
        offset : int
            In bytes, a multiple of the dtype's size.
        use_rdma_buffer : bool
            Must be False: there is no memory for transfers between nodes.

        Raises
        ------
        ValueError, TypeError
            An argument is invalid, or the memory is too small for ``size``.
        RuntimeError
            After `destroy`.
        """
        self._runtime.check_alive()
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {dtype!r}; it must be a torch.dtype")
        if use_rdma_buffer:
            raise ValueError(f"use_rdma_buffer is {use_rdma_buffer}; it must be False: all ranks are in one node")
        offset = check_int("offset", offset, 0, self.num_nvl_bytes)
        if offset % dtype.itemsize:
            raise ValueError(f"offset is {offset}; it must be a multiple of {dtype.itemsize}, the size of {dtype}")
        start = 4 * self._runtime.rings_offset
        memory = self._runtime.shared.local[start + offset : start + self.num_nvl_bytes]
        memory = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        if size is None:
            return memory
        if not isinstance(size, (tuple, list)):
            raise TypeError(f"size is {size!r}; it must be a tuple of ints")
        size = tuple(check_int(f"size[{i}]", length, 0) for i, length in enumerate(size))
        count = math.prod(size)
        if count > memory.numel():
            raise ValueError(f"size is {size}; {memory.numel()} elements of {dtype} start at offset {offset}")
        return memory[:count].view(size)

    def destroy(self) -> None:
        """Free the shared memory; all ranks must call it, after their last call.

        Waits for the other ranks, at most ``timeout`` seconds. After an error on the GPU it does not wait. Memory to
        which a missing rank may still write then stays allocated.
        """
        self._low_latency.close()
        self._runtime.close()

    def check(self, synchronize: bool = False) -> None:
        """Raise the error of this buffer if an operation on the GPU has aborted, here or on a peer.

        Every other call raises that error too. A replayed CUDA graph does not, because the host does not see its
        kernels: call this after replays, or look for NaNs in their results. It reads a word in host memory and can be
        called at any time.

        Parameters
        ----------
        synchronize : bool
            Wait until the GPU has finished all work, which takes at most ``timeout`` for each operation that hangs.
            Otherwise only errors of operations that have ended are found.

        Raises
        ------
        ValueError, TimeoutError, RuntimeError
            As listed in `Buffer`.
        """
        if synchronize:
            self._runtime.synchronize()
        self._runtime.check_alive()
        self._low_latency.rank_mask.check()

    def warm_up(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int = 0,
        *,
        dtype: torch.dtype = torch.bfloat16,
        num_scales: int = 0,
        topk_idx_dtype: torch.dtype = torch.int64,
        config: Config | None = None,
        combine_config: Config | None = None,
        out: SymmetricOutput | None = None,
    ) -> None:
        """Compile and load all kernels for rows of one kind, and synchronise the ranks.

        Later calls with these arguments compile nothing. All ranks must call it, with the same arguments. It dispatches
        one token of each rank, with and without a handle, and combines it, with and without weights.

        Parameters
        ----------
        hidden : int
            Elements of a row.
        num_experts : int
            Experts of all ranks.
        num_topk : int
            Experts per token; 0 if ``topk_idx`` is not passed to dispatch.
        dtype : torch.dtype
            Of the rows of dispatch: bfloat16, or float8_e4m3fn with ``num_scales`` scales per row.
        topk_idx_dtype : torch.dtype
            Of ``topk_idx``.
        config, combine_config : Config, optional
            Of dispatch and combine; the defaults are theirs.
        out : SymmetricOutput, optional
            Warm up dispatch to this output, whose contents are overwritten, instead of dispatch through rings.

        Raises
        ------
        ValueError, TypeError, TimeoutError
            As from `dispatch`.
        """
        warm_up(self, hidden, num_experts, num_topk, dtype, num_scales, topk_idx_dtype, config, combine_config, out)

    def new_output(
        self,
        num_rows: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        num_scales: int = 0,
        num_topk: int = 0,
        scale_dtype: torch.dtype = torch.float32,
        topk_idx_dtype: torch.dtype = torch.int64,
    ) -> SymmetricOutput:
        """Allocate output tensors of dispatch to which the peers can write; all ranks must pass the same arguments.

        Parameters
        ----------
        num_rows : int
            Capacity in rows; at most ``num_ranks`` times the tokens of a rank can arrive.
        hidden : int
            Elements of a row, a multiple of 16 bytes.
        dtype : torch.dtype
            bfloat16, or float8_e4m3fn with ``num_scales`` scales of ``scale_dtype`` (float32 or int32) per row.
        num_topk : int
            Experts and weights per row; 0 to 32.
        topk_idx_dtype : torch.dtype
            int64 or int32, the dtype of the experts.

        Returns
        -------
        SymmetricOutput
            For ``dispatch(..., out=...)``. Free it with ``close()``, on all ranks.
        """
        num_rows, hidden, num_scales, num_topk = checks.check_new_output(
            num_rows, hidden, dtype, num_scales, num_topk, scale_dtype, topk_idx_dtype
        )
        return SymmetricOutput(
            self._runtime, num_rows, hidden, dtype, num_scales, scale_dtype, num_topk, topk_idx_dtype
        )
