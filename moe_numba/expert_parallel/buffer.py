"""``Buffer``: expert parallelism inside a host, with DeepEP's names, arguments and returns."""

import torch

from moe_numba.expert_parallel import checks, plans, transport
from moe_numba.expert_parallel.config import Config
from moe_numba.expert_parallel.dispatch_layout import get_dispatch_layout
from moe_numba.expert_parallel.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.kernels.buffer_layout import MOST_RANKS, MOST_ROWS
from moe_numba.expert_parallel.output_buffer import Output, new_parts
from moe_numba.expert_parallel.runtime import Link


class Buffer:
    """Memory that the ranks of a group share, and the exchanges of tokens through it.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, or a transport
        The ranks, 1 to 8, with a GPU each, all reachable by loads and stores (NVLink or PCIe in one host). For a
        process group torch's symmetric memory carries the buffer; ``expert_parallel.transport`` has others.
    num_nvl_bytes : int
        Memory for rows on their way, on each rank: a positive multiple of 256, the same on all; see
        ``Config.get_nvl_buffer_size_hint``.
    num_rdma_bytes : int
        0: there is no path between hosts.
    explicitly_destroy : bool
        Has no effect: call `destroy` in any case.
    timeout : float
        Seconds after which a wait for another rank ends in an error, on the GPU and on the host; more than 0.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it was and what is allowed. Also where counts contradict each other, or more rows
        came than there was room for; if the host did not wait for the counts, from the next call.
    TimeoutError
        A rank did not come: from the call that waited for its counts, else from the next one.
    RuntimeError
        After `destroy`.

    Notes
    -----
    All ranks must make the same calls in the same order. A buffer that has raised for what happened on the GPU (a rank
    that did not come, wrong counts) raises at every further call.

    After DeepEP's ``Buffer`` (its normal kernels within a node). The kernels are this project's own.
    """

    num_sms = 20
    _channels_of_a_warp = None  # the best number; notebook 06 shows what others do

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, *, explicitly_destroy=False, timeout=100.0):
        if num_rdma_bytes:
            raise ValueError(f"num_rdma_bytes is {num_rdma_bytes}; it must be 0: all ranks are in one host")
        self.transport = group if hasattr(group, "allocate") else transport.SymmetricMemory(group)
        self.group, self.rank, self.group_size = group, self.transport.rank, self.transport.num_ranks
        if not 1 <= self.group_size <= MOST_RANKS:
            raise ValueError(f"the group has {self.group_size} ranks; 1 to {MOST_RANKS} are allowed")
        if type(num_nvl_bytes) is not int or num_nvl_bytes <= 0 or num_nvl_bytes % 256:
            raise ValueError(f"num_nvl_bytes is {num_nvl_bytes!r}; it must be a positive multiple of 256")
        checks.timeout(timeout)
        self.explicitly_destroy = explicitly_destroy
        self._link = Link(self.transport, num_nvl_bytes, timeout)

    # What DeepEP's class has as well

    @staticmethod
    def set_num_sms(num_sms):
        """Multiprocessors of configurations that are not given; even."""
        Buffer.num_sms = Config(num_sms).num_sms

    @staticmethod
    def capture():
        """An event at this point of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks):
        """A good configuration of dispatch for so many ranks."""
        checks.number("num_ranks", num_ranks, 1, MOST_RANKS)
        return Config(Buffer.num_sms, 4, 512 if num_ranks == 2 else 256)  # of more ranks longer rings gain nothing

    @staticmethod
    def get_combine_config(num_ranks):
        """A good configuration of combine for so many ranks."""
        return Buffer.get_dispatch_config(num_ranks)

    def get_comm_stream(self):
        """The stream on which calls with ``async_finish`` run."""
        return self._link.comm_stream

    def get_local_buffer_tensor(self, dtype, size=None, offset=0):
        """This rank's memory for rows on their way, as a tensor.

        Parameters
        ----------
        dtype : torch.dtype
        size : tuple of int, optional
            The tensor's shape; all that there is, flat, if not given.
        offset : int
            Bytes before it, a multiple of the dtype's size.
        """
        self._link.check_alive()
        checks.number("offset", offset, 0, self._link.shared.local.numel() - 4 * self._link.rings)
        rows = self._link.shared.local[4 * self._link.rings + offset :].view(dtype)
        return rows if size is None else rows[: torch.Size(size).numel()].view(size)

    def destroy(self):
        """Give the memory back; all ranks must call it, after their last call."""
        self._link.close()

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        """Count what goes where.

        Parameters
        ----------
        topk_idx : tensor [tokens, topk], int64
            The experts of each token; -1 is no expert.
        num_experts : int
            Of all ranks.

        Returns
        -------
        num_tokens_per_rank : tensor [num_ranks], int32
        num_tokens_per_rdma_rank : None
        num_tokens_per_expert : tensor [num_experts], int32
        is_token_in_rank : tensor [tokens, num_ranks], bool
        event : EventOverlap
        """
        with self._link.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            with transport.COMPILING:
                per_rank, per_expert, is_in_rank = get_dispatch_layout(topk_idx, num_experts, self.group_size)
            event = finish(topk_idx, per_rank, per_expert, is_in_rank)
        return per_rank, None, per_expert, is_in_rank, event

    def new_output(self, num_rows, hidden, dtype=torch.bfloat16, num_scales=0, num_topk=0, scale_dtype=torch.float32):
        """Memory for what dispatch gives, to which the other ranks can write; all ranks must ask for the same.

        Parameters
        ----------
        num_rows : int
            Room for so many rows; at most ``num_ranks`` times the tokens of a rank can come.
        hidden : int
            Elements of a row, a multiple of 16 bytes.
        dtype : torch.dtype
            bfloat16, or float8_e4m3fn with ``num_scales`` scales of ``scale_dtype`` (float32 or int32) for a row.
        num_topk : int
            Experts and weights that travel with a row; 0 to 32.

        Returns
        -------
        Output
            For ``dispatch(..., out=...)``; its ``close()``, on all ranks, gives the memory back.
        """
        checks.new_output(num_rows, hidden, dtype, num_scales, num_topk, scale_dtype)
        return Output(self.transport, num_rows, hidden, dtype, num_scales, scale_dtype, num_topk)

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
        out=None,
    ):
        """Send each token to the ranks that hold its experts, once to each.

        Parameters
        ----------
        x : tensor [tokens, hidden], bfloat16; or (values [tokens, hidden] float8_e4m3fn, scales [tokens, n])
            Rows are contiguous and a multiple of 16 bytes. Scales are float32 or int32, in any strides.
        handle : tuple, optional
            What an earlier dispatch of as many tokens gave back: the same layout again. Then nothing is counted, and
            neither a layout, nor ``topk_idx`` and its weights, nor ``num_worst_tokens`` may be given.
        num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
            As from `get_dispatch_layout`; needed without a handle.
        topk_idx, topk_weights : tensors [tokens, topk], int64 and float32, optional
            What is to travel with the tokens.
        expert_alignment : int
            The counts of the list are rounded up to a multiple of this.
        num_worst_tokens : int
            Make outputs of so many rows, whatever comes, and let nothing wait on the host: then the call can be
            captured in a CUDA graph. Of rows beyond those that come only ``recv_topk_idx`` is written. An error, from
            the next call on, when more tokens come.
        config : Config, optional
        previous_event : EventOverlap, optional
            What the call waits for; the current stream, if not given.
        async_finish : bool
            Let the current stream go on; the event tells when the call is done.
        allocate_on_comm_stream : bool
            The outputs belong to the communication stream.
        out : Output, optional
            From `new_output`, and given by all ranks: rows are written there by those who send them, without rings.
            That is faster, above all with few multiprocessors; more than 16 are not used. What is returned lies in it,
            and the next dispatch that is given it overwrites that.

        Returns
        -------
        recv_x : as ``x``, [received, hidden]
            By source rank, and in it by token.
        recv_topk_idx : tensor [received, topk], int64, or None
            Numbers of this rank's experts, from 0; -1 where the expert is elsewhere, and in rows beyond what came.
        recv_topk_weights : tensor [received, topk], float32, or None
            0 where the expert is elsewhere.
        num_recv_tokens_per_expert_list : list of int
            Empty with a handle or ``num_worst_tokens``.
        handle : tuple
            All int32, but for is_token_in_rank, which is bool. rank_prefix_matrix [num_ranks, num_ranks]: rows that
            ranks 0 to s send to rank r, at [s, r]. channel_prefix_matrix [num_ranks, channels]: rows that this rank
            sends to rank r from channels 0 to c, at [r, c]. recv_channel_prefix_matrix [num_ranks, channels]: rows that
            rank s sends here from the channels before c, at [s, c]. recv_src_idx [received]: each row's token on its
            own rank. is_token_in_rank [tokens, num_ranks]. send_head [tokens, num_ranks]: which of its channel's rows
            to rank r a token is; -1 where it does not go.
        event : EventOverlap
        """
        link, at = self._link, self._link.at
        link.check_alive()
        x, scales = checks.pair(x) if isinstance(x, tuple) else (x, None)
        config = checks.config(config or self.get_dispatch_config(self.group_size))
        checks.rows(x, scales, self.transport.device)
        checks.travellers(topk_idx, topk_weights, x)
        checks.number("num_worst_tokens", num_worst_tokens, 0, MOST_ROWS)
        checks.number("expert_alignment", expert_alignment, 1, 1 << 20)
        (tokens, hidden), topk = x.shape, 0 if topk_idx is None else topk_idx.shape[1]
        if handle is None:
            checks.layout(
                num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank, tokens, self.group_size, x.device
            )
            experts, channels, recv_source = num_tokens_per_expert.shape[0] // self.group_size, None, None
        else:
            layout = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
            if topk_idx is not None or num_worst_tokens or any(part is not None for part in layout):
                raise ValueError("with a handle no layout, topk_idx, topk_weights or num_worst_tokens may be given")
            checks.handle(handle, self.group_size, x.device, tokens)
            experts, channels, recv_source = 1, handle[1].shape[1], handle[3]
        room, to_come = num_worst_tokens or MOST_ROWS, num_worst_tokens if handle is None else recv_source.shape[0]
        if out is not None:
            checks.output(out, self.transport, x, scales, topk, to_come)
            room = min(room, out.num_rows)
        channels, start = link.kept(
            plans.through_rings if out is None else plans.straight,
            config,
            hidden,
            x.dtype,
            0 if scales is None else scales.shape[1],
            topk,
            channels,
            self._channels_of_a_warp,
        )
        with link.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            # All that needs no count comes first: the rest is what a user waits for.
            new = lambda *size: torch.empty(size, dtype=torch.int32, device=x.device)
            strides = (0, 0) if scales is None else scales.stride()
            if handle is None:
                rank_prefix = new(self.group_size, self.group_size)
                channel_prefix, recv_channel_prefix = new(self.group_size, channels), new(self.group_size, channels)
                send_head = new(tokens, self.group_size)
            else:
                rank_prefix, channel_prefix, recv_channel_prefix, _, is_token_in_rank, send_head = handle
            given = (
                *(() if out is None else out.place),
                at(x),
                at(scales),
                *strides,
                at(topk_idx),
                at(topk_weights),
                at(is_token_in_rank),
                tokens,
                experts,
                at(rank_prefix),
                at(channel_prefix),
                at(recv_channel_prefix),
            )
            if handle is None:
                received, counts = link.notify(
                    num_tokens_per_rank,
                    num_tokens_per_expert,
                    is_token_in_rank,
                    tokens,
                    experts,
                    channels,
                    expert_alignment,
                    num_worst_tokens,
                    room,
                    rank_prefix,
                    channel_prefix,
                    recv_channel_prefix,
                )
            else:
                received, counts = to_come, []
            has_met = handle is None  # counting
            if out is None:
                parts = new_parts(received, x, scales, topk, recv_source)
                meetings = link.guarded(False, channels, has_met)
            else:
                parts, meetings = out.parts(scales is not None, topk > 0), link.between_meetings(has_met)
            with meetings:
                start(*given, *map(at, parts), at(send_head), received)
            if out is not None:
                parts = [part if part is None else part[:received] for part in parts]
            recv_x, recv_scales, recv_experts, recv_weights, sources = parts
            recv_source = sources if handle is None else recv_source
            handle = rank_prefix, channel_prefix, recv_channel_prefix, recv_source, is_token_in_rank, send_head
            event = finish(
                x,
                scales,
                topk_idx,
                topk_weights,
                num_tokens_per_rank,
                num_tokens_per_expert,
                recv_x,
                recv_scales,
                recv_experts,
                recv_weights,
                *handle,
            )
        recv_x = recv_x if scales is None else (recv_x, recv_scales)
        return recv_x, recv_experts, recv_weights, counts, handle, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        """Send rows back to the ranks that their tokens came from, and add up each token's.

        Parameters
        ----------
        x : tensor [received, hidden], bfloat16
            A row for each that the dispatch gave; weights are to be multiplied in already.
        handle : tuple
            The dispatch's.
        topk_weights : tensor [received, topk], float32, optional
            Added up as well.
        bias : tensor [tokens, hidden] bfloat16, or up to two of them, optional
            Added to the sum.
        config, previous_event, async_finish, allocate_on_comm_stream
            As for `dispatch`.

        Returns
        -------
        combined_x : tensor [tokens, hidden], bfloat16
            Added up in float32, the biases first, then the ranks in their order, and rounded once.
        combined_topk_weights : tensor [tokens, topk], float32, or None
        event : EventOverlap
        """
        link, at = self._link, self._link.at
        link.check_alive()
        config = checks.config(config or self.get_combine_config(self.group_size))
        biases = checks.biases(bias)
        checks.handle(handle, self.group_size, self.transport.device)
        rank_prefix, channel_prefix, recv_channel_prefix, recv_source, _, send_head = handle
        tokens = send_head.shape[0]
        checks.returning(x, topk_weights, biases, recv_source.shape[0], tokens, self.transport.device)
        hidden, topk = x.shape[1], 0 if topk_weights is None else topk_weights.shape[1]
        channels = channel_prefix.shape[1]
        start = link.kept(plans.back, config, hidden, topk, channels, len(biases))
        with link.on_stream(previous_event, async_finish, allocate_on_comm_stream) as finish:
            out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=x.device)
            out_weights = None if not topk else torch.empty(tokens, topk, dtype=torch.float32, device=x.device)
            with link.guarded(True, channels):
                start(
                    at(x),
                    at(topk_weights),
                    at(rank_prefix),
                    at(channel_prefix),
                    at(recv_channel_prefix),
                    at(send_head),
                    tokens,
                    *map(at, (*biases, None, None)[:2]),
                    at(out),
                    at(out_weights),
                )
            event = finish(x, topk_weights, *biases, out, out_weights, *handle)
        return out, out_weights, event
