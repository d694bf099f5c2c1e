"""``Buffer``: dispatch and combine within a node, with DeepEP's names, arguments and return values."""

from typing import Any

import torch

from moe_numba.expert_parallel import checks, runtime, transport
from moe_numba.expert_parallel.config import Config
from moe_numba.expert_parallel.dispatch_layout import get_dispatch_layout
from moe_numba.expert_parallel.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.kernels.buffer_layout import MAX_RANKS, MAX_ROWS
from moe_numba.expert_parallel.output_buffer import SymmetricOutput, alloc_recv_tensors
from moe_numba.expert_parallel.warm_up import warm_up
from moe_numba.runtime.validate import check_int


class Buffer:
    """Shared memory of a group of ranks, and the exchange of tokens through it.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, or a transport
        1 to 8 ranks with one GPU each, which can access one another's memory (NVLink or PCIe within a node). For a
        process group, torch's symmetric memory provides the buffer; ``expert_parallel.transport`` has other transports.
    num_nvl_bytes : int
        Memory for rings on each rank: a positive multiple of 256, the same on all ranks; see
        ``Config.get_nvl_buffer_size_hint``.
    num_rdma_bytes : int
        Must be 0: there is no path between nodes.
    explicitly_destroy : bool
        Has no effect: call `destroy` in any case.
    timeout : float
        Seconds after which a wait for another rank ends in an error, on the GPU and on the host; more than 0.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid; the message names it, its value and what is allowed. ValueError also if the counts
        contradict each other, if more rows arrive than an output can hold, or if a dispatch has other rows, experts or
        configurations on another rank. All ranks raise the last one in that call if its host waits for the counts, and
        everything else at the latest in the next call.
    TimeoutError
        A rank did not arrive: from the call that waited for its counts, otherwise from the next call.
    RuntimeError
        After `destroy`; or a dispatch whose host waits for the counts is captured in a CUDA graph.

    Notes
    -----
    All ranks must make the same calls in the same order. After an error on the GPU (a timeout, wrong counts), every
    further call raises it again, and `check` does without a call. All ranks of the group abort, and the results of
    operations that had not ended, or that a CUDA graph replays, are poisoned: every element is NaN, and every index -1.

    Combine, and dispatch with a handle, exchange no counts. If their arguments differ across ranks, they time out, or
    return wrong rows; the error names the rank and the channel that waited.

    The first call with a configuration compiles its kernels. Its host waits until the other ranks have done the same,
    at most 100 seconds or ``timeout``, so that no GPU waits for a compiler. `warm_up` does that beforehand.

    After DeepEP's ``Buffer`` (its normal kernels within a node). The kernels are this project's own.
    """

    num_sms = 20
    _channels_per_warp = None  # None: the best number; notebook 06 measures others

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        *,
        explicitly_destroy: bool = False,
        timeout: float = 100.0,
    ):
        if num_rdma_bytes:
            raise ValueError(f"num_rdma_bytes is {num_rdma_bytes}; it must be 0: all ranks are in one node")
        self.transport = group if hasattr(group, "allocate") else transport.SymmetricMemory(group)
        self.group, self.rank, self.group_size = group, self.transport.rank, self.transport.num_ranks
        if not 1 <= self.group_size <= MAX_RANKS:
            raise ValueError(f"the group has {self.group_size} ranks; 1 to {MAX_RANKS} are allowed")
        if type(num_nvl_bytes) is not int or num_nvl_bytes <= 0 or num_nvl_bytes % 256:
            raise ValueError(f"num_nvl_bytes is {num_nvl_bytes!r}; it must be a positive multiple of 256")
        checks.check_timeout(timeout)
        self.explicitly_destroy = explicitly_destroy
        self._runtime = runtime.Runtime(self.transport, num_nvl_bytes, timeout)

    # DeepEP's other methods

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        """Set the number of SMs of default configurations; it must be even."""
        Buffer.num_sms = Config(num_sms).num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Record an event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the default configuration of dispatch for ``num_ranks`` ranks."""
        check_int("num_ranks", num_ranks, 1, MAX_RANKS)
        return Config(Buffer.num_sms, 4, 512 if num_ranks == 2 else 256)  # with more ranks longer rings are not faster

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return the default configuration of combine for ``num_ranks`` ranks."""
        return Buffer.get_dispatch_config(num_ranks)

    def get_comm_stream(self) -> "torch.cuda.Stream | None":
        """Return the stream on which calls with ``async_finish`` run; None in the simulator."""
        return self._runtime.comm_stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: tuple[int, ...] | None = None, offset: int = 0
    ) -> torch.Tensor:
        """Return this rank's ring memory as a tensor.

        Parameters
        ----------
        dtype : torch.dtype
        size : tuple of int, optional
            The tensor's shape; by default all of the memory, flat.
        offset : int
            In bytes, a multiple of the dtype's size.
        """
        self._runtime.check_alive()
        local, rings_offset = self._runtime.shared.local, 4 * self._runtime.rings_offset
        check_int("offset", offset, 0, local.numel() - rings_offset)
        rings = local[rings_offset + offset :].view(dtype)
        return rings if size is None else rings[: torch.Size(size).numel()].view(size)

    def destroy(self) -> None:
        """Free the shared memory; all ranks must call it, after their last call.

        Waits for the other ranks, at most ``timeout`` seconds. After an error on the GPU it does not wait. Memory to
        which a missing rank may still write then stays allocated.
        """
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

    def warm_up(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int = 0,
        *,
        dtype: torch.dtype = torch.bfloat16,
        num_scales: int = 0,
        topk_dtype: torch.dtype = torch.int64,
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
        topk_dtype : torch.dtype
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
        warm_up(self, hidden, num_experts, num_topk, dtype, num_scales, topk_dtype, config, combine_config, out)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count the tokens that go to each rank and to each expert.

        Parameters
        ----------
        topk_idx : torch.Tensor [tokens, topk], int64
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
        with self._runtime.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            with transport.COMPILE_LOCK:
                per_rank, per_expert, is_in_rank = get_dispatch_layout(topk_idx, num_experts, self.group_size)
            event = finish(topk_idx, per_rank, per_expert, is_in_rank)
        return per_rank, None, per_expert, is_in_rank, event

    def new_output(
        self,
        num_rows: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        num_scales: int = 0,
        num_topk: int = 0,
        scale_dtype: torch.dtype = torch.float32,
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

        Returns
        -------
        SymmetricOutput
            For ``dispatch(..., out=...)``. Free it with ``close()``, on all ranks.
        """
        checks.check_new_output(num_rows, hidden, dtype, num_scales, num_topk, scale_dtype)
        return SymmetricOutput(self._runtime, num_rows, hidden, dtype, num_scales, scale_dtype, num_topk)

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
        previous_event: EventOverlap | None = None,
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
        topk_idx, topk_weights : torch.Tensor [tokens, topk], int64 and float32, optional
            Experts and weights to send with the tokens.
        expert_alignment : int
            The counts in the returned list are rounded up to a multiple of this.
        num_worst_tokens : int
            If not 0, outputs have this many rows, and the host does not wait for the counts. The call can then be
            captured in a CUDA graph. In rows beyond the received ones only ``recv_topk_idx`` is written. If more rows
            arrive, the next call raises an error.
        config : Config, optional
            Default: `get_dispatch_config`.
        previous_event : EventOverlap, optional
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
        recv_topk_idx : torch.Tensor [received, topk], int64, or None
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
        """
        rt, ptr = self._runtime, self._runtime.ptr
        rt.check_alive()
        if isinstance(x, tuple):
            checks.check_scaled_pair(x)
        x, scales = x if isinstance(x, tuple) else (x, None)
        config = config or self.get_dispatch_config(self.group_size)
        checks.check_config(config)
        checks.check_dispatch_input(x, scales, self.transport.device)
        checks.check_topk(topk_idx, topk_weights, x)
        check_int("num_worst_tokens", num_worst_tokens, 0, MAX_ROWS)
        check_int("expert_alignment", expert_alignment, 1, 1 << 20)
        (tokens, hidden), topk = x.shape, 0 if topk_idx is None else topk_idx.shape[1]
        layout = num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        if handle is None:
            if not num_worst_tokens:
                rt.check_can_wait()
            checks.check_layout(*layout, tokens, self.group_size, x.device)
            assert num_tokens_per_expert is not None  # check_layout has refused None
            experts, channels, recv_src_idx = num_tokens_per_expert.shape[0] // self.group_size, None, None
        else:
            if topk_idx is not None or num_worst_tokens or any(part is not None for part in layout):
                raise ValueError("with a handle no layout, topk_idx, topk_weights or num_worst_tokens may be given")
            checks.check_handle(handle, self.group_size, x.device, tokens)
            experts, channels, recv_src_idx = 1, handle[1].shape[1], handle[3]
        known_rows = num_worst_tokens if recv_src_idx is None else recv_src_idx.shape[0]
        capacity = num_worst_tokens or MAX_ROWS
        if out is not None:
            checks.check_output(out, self.transport, x, scales, topk, known_rows)
            capacity = min(capacity, out.num_rows)
        channels, start, call = rt.cached(
            runtime.plan_ring_dispatch if out is None else runtime.plan_direct_dispatch,
            config,
            hidden,
            x.dtype,
            0 if scales is None else scales.shape[1],
            topk,
            channels,
            self._channels_per_warp,
        )
        with rt.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            # Prepare everything that needs no counts before the host waits for them.
            new = lambda *size: torch.empty(size, dtype=torch.int32, device=x.device)
            strides = (0, 0) if scales is None else scales.stride()
            prefix: Any
            if handle is None:
                prefix = new(self.group_size, self.group_size), *(new(self.group_size, channels) for _ in range(2))
                send_head = new(tokens, self.group_size)
            else:
                *prefix, _, is_token_in_rank, send_head = handle
            arguments = (
                *(() if out is None else out.kernel_args),
                ptr(x),
                ptr(scales),
                *strides,
                ptr(topk_idx),
                ptr(topk_weights),
                ptr(is_token_in_rank),
                tokens,
                experts,
                *map(ptr, prefix),
            )
            if handle is None:
                received, counts = rt.notify(
                    layout,
                    tokens,
                    experts,
                    channels,
                    expert_alignment,
                    num_worst_tokens,
                    capacity,
                    prefix,
                    call,
                    scales,
                    out,
                )
            else:
                received, counts = known_rows, []
            has_synchronized = handle is None  # notify synchronises all ranks
            outputs: Any
            if out is None:
                outputs = alloc_recv_tensors(received, x, scales, topk, recv_src_idx)
                barriers = rt.with_barriers_if_layout_changed(False, channels, has_synchronized)
            else:
                outputs = out.tensors(scales is not None, topk > 0)
                barriers = rt.with_barriers(has_synchronized, out)
            with barriers:
                start(*arguments, *map(ptr, outputs), ptr(send_head), received)
            if out is not None:
                outputs = [tensor if tensor is None else tensor[:received] for tensor in outputs]
            recv_x, recv_scales, recv_topk_idx, recv_topk_weights, src_idx = outputs
            recv_src_idx = src_idx if handle is None else recv_src_idx
            new_handle: tuple = *prefix, recv_src_idx, is_token_in_rank, send_head
            event = finish(
                x, scales, topk_idx, topk_weights, num_tokens_per_rank, num_tokens_per_expert, *outputs[:4], *new_handle
            )
        recv_x = recv_x if scales is None else (recv_x, recv_scales)
        return recv_x, recv_topk_idx, recv_topk_weights, counts, new_handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
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
        rt, ptr = self._runtime, self._runtime.ptr
        rt.check_alive()
        config = config or self.get_combine_config(self.group_size)
        checks.check_config(config)
        biases = checks.as_biases(bias)
        checks.check_handle(handle, self.group_size, self.transport.device)
        *prefix, recv_src_idx, _, send_head = handle
        tokens = send_head.shape[0]
        checks.check_combine_input(x, topk_weights, biases, recv_src_idx.shape[0], tokens, self.transport.device)
        hidden, topk = x.shape[1], 0 if topk_weights is None else topk_weights.shape[1]
        channels = prefix[1].shape[1]
        start = rt.cached(runtime.plan_combine, config, hidden, topk, channels, len(biases))
        with rt.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=x.device)
            out_weights = None if not topk else torch.empty(tokens, topk, dtype=torch.float32, device=x.device)
            with rt.with_barriers_if_layout_changed(True, channels):
                start(
                    ptr(x),
                    ptr(topk_weights),
                    *map(ptr, prefix),
                    ptr(send_head),
                    tokens,
                    *map(ptr, (*biases, None, None)[:2]),
                    ptr(out),
                    ptr(out_weights),
                    x.shape[0],
                )
            event = finish(x, topk_weights, *biases, out, out_weights, *handle)
        return out, out_weights, event
