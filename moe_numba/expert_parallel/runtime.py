"""State that all calls of a ``Buffer`` share: shared memory, status, kernels, launch plans and streams."""

import contextlib
from functools import partial

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.checks import check_previous_event
from moe_numba.expert_parallel.config import (
    TOPK_IDX_POINTERS,
    make_ring_shape,
    max_warps,
    num_channels,
    num_direct_senders,
    num_senders,
)
from moe_numba.expert_parallel.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.kernels import combine, dispatch, dispatch_direct, notify
from moe_numba.expert_parallel.kernels.buffer_layout import MAX_CHANNELS, MAX_EXPERTS, STATE_WORDS, buffer_layout
from moe_numba.expert_parallel.kernels.channels import RingShape
from moe_numba.expert_parallel.kernels.timeout import COUNT_ERRORS, MESSAGES, STATUS_WORDS
from moe_numba.expert_parallel.kernels.token_slot import TokenSlot
from moe_numba.expert_parallel.transport import check_same_on_all_ranks
from moe_numba.runtime.launch import address, current_stream
from moe_numba.runtime.validate import check_device

_NO_BARRIERS = contextlib.nullcontext()
_SAME_STREAM = contextlib.nullcontext(lambda *tensors: EventOverlap())  # see `Runtime.on_stream`
_NOTIFY_THREADS = 32 if simulator.ENABLED else 512  # per CTA


class Runtime:
    """A rank's memory and kernels for the exchange of tokens with its peers.

    Parameters
    ----------
    transport : see ``expert_parallel.transport``
    num_bytes : int
        Shared memory for rings.
    timeout : float
        Seconds after which a wait for another rank ends in an error.
    """

    def __init__(self, transport, num_bytes, timeout):
        device = transport.device
        check_device(device, (9, 0), "group's device")
        self.transport, self.timeout = transport, timeout
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self.rings_offset = buffer_layout(self.num_ranks).rings  # in words
        self.ring_words = num_bytes // 8  # for the rings of dispatch, and as many for those of combine
        check_same_on_all_ranks(transport, "num_nvl_bytes", num_bytes)
        self.shared = transport.allocate(4 * self.rings_offset + num_bytes)
        self._local = self.shared.local.view(torch.int32)
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        # The host polls these while kernels run.
        pinned = {} if simulator.ENABLED else {"pin_memory": True}
        self._status = torch.zeros(STATUS_WORDS, dtype=torch.int32, device="cpu", **pinned)
        self._counters = torch.zeros(1 + MAX_EXPERTS, dtype=torch.int32, device="cpu", **pinned)
        self._status_view, self._counters_view = self._status.numpy(), self._counters.numpy()
        self._placeholder = torch.zeros(4, dtype=torch.int32, device=device)
        common = self._local, self.shared.addresses, self._state, self._status, self._placeholder
        *self._common_arguments, self._placeholder_ptr = map(address, common)
        self.comm_stream = None if simulator.ENABLED else torch.cuda.Stream(device, priority=-1)
        self._last_stream, self._cache, self._first_channels = None, {}, {}
        if not simulator.ENABLED:
            torch.cuda.synchronize(device)
        transport.gather(None)

    def close(self):
        """Free the shared memory; all ranks must call it."""
        if self.shared is None:
            return
        if not simulator.ENABLED:
            torch.cuda.synchronize(self.transport.device)
        self.transport.gather(None)
        shared, self.shared, self._local = self.shared, None, None
        shared.close()

    def pointers(self, *tensors):
        """Return the addresses of tensors, and that of a placeholder for each that is None or empty."""
        placeholder = self._placeholder_ptr
        return [placeholder if tensor is None else address(tensor) or placeholder for tensor in tensors]

    def check_alive(self):
        """Raise an error if the buffer was destroyed, or if this rank has aborted."""
        if self.shared is None:
            raise RuntimeError("this buffer was destroyed")
        code, rank, channel, peer, head, tail = self._status_view[:6].tolist()
        if code:
            message = MESSAGES[code].format(rank=rank, channel=channel, peer=peer, head=head, tail=tail)
            if code in COUNT_ERRORS:
                raise ValueError(f"{message}. Rank {rank} has aborted; this buffer can no longer be used")
            raise TimeoutError(
                f"{message}. Rank {rank} has aborted after {self.timeout:g} s; this buffer can no longer be used"
            )

    def cached(self, make, *arguments):
        """Return ``make(self, *arguments)``, computed once per set of arguments."""
        try:
            return self._cache[make, arguments]
        except KeyError:
            return self._cache.setdefault((make, arguments), make(self, *arguments))

    def prepare_kernel(self, make, constants, signature, block, shared_bytes=0):
        """Compile ``make(*constants)``; return ``start(grid, *arguments)``, which adds the `RankContext` first."""
        start = self.transport.prepare_kernel(
            make(*constants), signature, self.timeout, launch_bounds=block, shared_bytes=shared_bytes, dependent=True
        )
        return lambda grid, *arguments: start(
            grid, block, *self._common_arguments, int(self.timeout * 1e9), self.rank, *arguments
        )

    def notify(self, layout, tokens, experts, channels, alignment, num_worst_tokens, capacity, prefix):
        """Exchange the counts with all ranks, and compute the prefix matrices.

        Parameters
        ----------
        layout : (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        tokens, experts, channels : int
            Of this rank.
        alignment : int
            The counts per expert are rounded up to a multiple of this.
        num_worst_tokens : int
            If not 0, the host does not wait for the counts.
        capacity : int
            Rows of the output; if more arrive, the rank aborts.
        prefix : tensors
            rank_prefix_matrix, channel_prefix_matrix and recv_channel_prefix_matrix, which the kernel writes.

        Returns
        -------
        (int, list of int)
            Rows that this rank receives and tokens of each expert; ``(num_worst_tokens, [])`` if that is not 0.
        """
        if channels > MAX_CHANNELS or experts > MAX_EXPERTS:
            raise ValueError(
                f"{experts} experts of a rank and {channels} channels; at most {MAX_EXPERTS} and "
                f"{MAX_CHANNELS} are allowed"
            )
        waits = not num_worst_tokens
        if waits:
            self._counters_view[0] = -1  # the kernel writes it last
        self.cached(plan_notify)(
            self.num_ranks + 1,
            *self.pointers(*layout),
            tokens,
            experts,
            channels,
            alignment,
            capacity,
            *self.pointers(*prefix),
            address(self._counters),
            int(waits),
        )
        if not waits:
            return num_worst_tokens, []
        has_finished = lambda: self._counters_view[0] >= 0 or self._status_view[0] != 0
        if not self.transport.wait(has_finished, self.timeout + 5):
            raise TimeoutError(f"rank {self.rank}: the notify kernel did not start or did not end in time")
        self.check_alive()
        return int(self._counters_view[0]), self._counters_view[1 : 1 + experts].tolist()

    def with_barriers_if_layout_changed(self, is_combine, channels, has_synchronized=False):
        """Return a context with barriers around an operation whose rings are not where the first call had them.

        The number of channels determines where an operation's rings are. While it stays that of the first call, the
        two ends of a ring agree without a barrier on when it is empty. The barrier after the operation also restores
        the usual state for captured graphs, whose execution the host does not see. With ``has_synchronized`` all ranks
        have just executed a barrier.
        """
        has_changed = self._first_channels.setdefault(is_combine, channels) != channels
        return self.with_barriers(has_synchronized) if has_changed else _NO_BARRIERS

    @contextlib.contextmanager
    def with_barriers(self, has_synchronized=False):
        """Launch a barrier before an operation, unless all ranks have just executed one, and another one after it."""
        if not has_synchronized:
            self._barrier()
        yield
        self._barrier()

    def _barrier(self):
        self.cached(plan_barrier)(1)

    def on_stream(self, previous_event, async_finish, allocate_on_comm_stream):
        """Return a context that runs a call on its stream, after everything it must wait for.

        It yields a function that returns the call's event. The function takes all tensors that the call uses, and keeps
        their memory from being reused too early.
        """
        last = self._last_stream
        if previous_event is None and last is not None and not (async_finish or allocate_on_comm_stream):
            if last.cuda_stream == current_stream(self.transport.device.index):
                return _SAME_STREAM
        return self._on_other_stream(previous_event, async_finish, allocate_on_comm_stream)

    @contextlib.contextmanager
    def _on_other_stream(self, previous_event, async_finish, allocate_on_comm_stream):
        previous = check_previous_event(previous_event)
        if allocate_on_comm_stream and not (async_finish and previous_event is not None):
            raise ValueError("allocate_on_comm_stream needs previous_event and async_finish")
        if simulator.ENABLED:
            # Kernels run when their ranks wait: for the event, or here.
            event = EventHandle(lambda: self.transport.wait(lambda: True, 0))
            yield lambda *_: EventOverlap(event) if async_finish else EventOverlap(event.current_stream_wait())
            return
        device, last = self.transport.device, self._last_stream
        use_comm_stream = async_finish or previous_event is not None
        current = torch.cuda.current_stream(device)
        stream = self.comm_stream if use_comm_stream else current
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                if last is not None and last != stream:
                    stream.wait_stream(last)
                self._last_stream = stream
            if stream == current:
                yield lambda *tensors: EventOverlap()
                return
            if previous is not None:
                with torch.cuda.stream(stream):
                    previous.current_stream_wait()
            else:
                stream.wait_stream(current)

            def finish(*tensors):
                event = EventHandle()
                for tensor in tensors:
                    if tensor is not None:
                        tensor.record_stream(stream)
                        tensor.record_stream(current)
                if not async_finish:
                    current.wait_event(event._event)
                return EventOverlap(event if async_finish else None)

            with torch.cuda.stream(stream):
                yield finish


def plan_notify(runtime):
    constants = runtime.num_ranks, _NOTIFY_THREADS
    return runtime.prepare_kernel(notify.make_notify_dispatch, constants, notify.NOTIFY_SIGNATURE, _NOTIFY_THREADS)


def plan_barrier(runtime):
    return runtime.prepare_kernel(notify.make_barrier, (runtime.num_ranks,), notify.BARRIER_SIGNATURE, 32)


# Launch plans. Each is computed once per configuration and row format, see `Runtime.cached`.


def plan_ring_dispatch(
    runtime, config, hidden, dtype, scales, topk, channels, channels_per_warp, topk_idx_dtype=torch.int64
):
    """Prepare dispatch through rings; return the number of channels, and a function that starts the kernel."""
    slot, ranks = TokenSlot(hidden * dtype.itemsize // 4, scales, topk), runtime.num_ranks
    channels = channels or num_channels(config.num_sms, ranks, 2 * hidden, channels_per_warp)
    shape, ring_words = make_ring_shape(
        config, ranks, max_warps(2 * hidden), channels, slot, runtime.ring_words, dtype.itemsize
    )
    signature = dispatch.signature(TOPK_IDX_POINTERS[topk_idx_dtype])
    start = runtime.prepare_kernel(dispatch.make_dispatch, (shape,), signature, shape.threads, shape.shared_bytes)
    senders = num_senders(config.num_sms, ranks)
    return channels, partial(start, config.num_sms, senders, channels, runtime.rings_offset, ring_words)


def plan_direct_dispatch(
    runtime, config, hidden, dtype, scales, topk, channels, channels_per_warp, topk_idx_dtype=torch.int64
):
    """Prepare dispatch to a `SymmetricOutput`; return the number of channels, and a function that starts the kernel."""
    blocks, warps = num_direct_senders(config.num_sms), max_warps(2 * hidden)
    channels = channels or (channels_per_warp or 4) * blocks * warps  # four, as with rings where the link is saturated
    shape = RingShape(runtime.num_ranks, warps, 0, TokenSlot(hidden * dtype.itemsize // 4, scales, topk))
    signature = dispatch_direct.signature(TOPK_IDX_POINTERS[topk_idx_dtype])
    start = runtime.prepare_kernel(
        dispatch_direct.make_dispatch_direct, (shape,), signature, 32 * warps, shape.shared_bytes
    )
    return channels, partial(start, blocks, channels)


def plan_combine(runtime, config, hidden, topk, channels, biases):
    """Prepare combine; return a function that starts the kernel."""
    ranks, slot = runtime.num_ranks, TokenSlot(hidden // 2, topk, 0, has_src_idx=False)
    shape, ring_words = make_ring_shape(config, ranks, max_warps(2 * hidden), channels, slot, runtime.ring_words)
    start = runtime.prepare_kernel(
        combine.make_combine, (shape, biases), combine.SIGNATURE, shape.threads, shape.shared_bytes
    )
    rings_offset = runtime.rings_offset + runtime.ring_words
    return partial(start, config.num_sms, num_senders(config.num_sms, ranks), channels, rings_offset, ring_words)
