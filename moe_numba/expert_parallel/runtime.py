"""What all calls of a ``Buffer`` have in common: shared memory, the rank's state, kernels, streams, and giving up."""

import contextlib

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.kernels import notify
from moe_numba.expert_parallel.kernels.buffer_layout import MOST_CHANNELS, MOST_EXPERTS, STATE_WORDS, regions
from moe_numba.expert_parallel.kernels.timeout import SENTENCES, STATUS_WORDS, WRONG_COUNTS
from moe_numba.expert_parallel.transport import alike
from moe_numba.runtime.launch import address, current_stream
from moe_numba.runtime.validate import check_device

_THREADS = 32 if simulator.ENABLED else 512  # of a block that counts


class Link:
    """A rank's end of the connection to all others.

    Parameters
    ----------
    transport : see ``expert_parallel.transport``
    num_bytes : int
        Shared memory for rows on their way.
    timeout : float
        Seconds that a wait for another rank may take.
    """

    def __init__(self, transport, num_bytes, timeout):
        device = transport.device
        check_device(device, (9, 0), "group's device")
        self.transport, self.timeout = transport, timeout
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self.rings = regions(self.num_ranks).rings  # where rows are on their way, in words
        self.half = num_bytes // 8  # words for the rings of dispatch, and for those of combine
        alike(transport, "num_nvl_bytes", num_bytes)
        self.shared = transport.allocate(4 * self.rings + num_bytes)
        self._mine = self.shared.local.view(torch.int32)
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        # The host reads these while kernels run.
        pinned = {} if simulator.ENABLED else {"pin_memory": True}
        self._status = torch.zeros(STATUS_WORDS, dtype=torch.int32, **pinned)
        self._counters = torch.zeros(1 + MOST_EXPERTS, dtype=torch.int32, **pinned)
        self._status_view, self._counters_view = self._status.numpy(), self._counters.numpy()
        self._nothing = torch.zeros(4, dtype=torch.int32, device=device)
        kept = self._mine, self.shared.addresses, self._state, self._status, self._nothing
        *self._common, self._at_nothing = map(address, kept)  # what every kernel takes first
        self.comm_stream = None if simulator.ENABLED else torch.cuda.Stream(device, priority=-1)
        self._last_stream, self._kept, self._usual = None, {}, {}
        if not simulator.ENABLED:
            torch.cuda.synchronize(device)
        transport.gather(None)

    def close(self):
        """Give the memory back; all ranks must call it."""
        if self.shared is None:
            return
        if not simulator.ENABLED:
            torch.cuda.synchronize(self.transport.device)
        self.transport.gather(None)
        shared, self.shared, self._mine = self.shared, None, None
        shared.close()

    def at(self, tensor):
        """What a kernel takes for a tensor, which may be None, or empty."""
        return self._at_nothing if tensor is None else address(tensor) or self._at_nothing

    def check_alive(self):
        """Raise what this rank has given up for, if it has."""
        if self.shared is None:
            raise RuntimeError("this buffer was destroyed")
        what, rank, channel, peer, head, tail = self._status_view[:6].tolist()
        if what:
            sentence = SENTENCES[what].format(rank=rank, channel=channel, peer=peer, head=head, tail=tail)
            if what in WRONG_COUNTS:
                raise ValueError(f"{sentence}. Rank {rank} gave up; this buffer is of no more use")
            raise TimeoutError(f"{sentence}. Rank {rank} gave up ({self.timeout:g} s); this buffer is of no more use")

    def kept(self, make, *arguments):
        """``make(self, *arguments)``, made once."""
        key = make, arguments
        if key not in self._kept:
            self._kept[key] = make(self, *arguments)
        return self._kept[key]

    def kernel(self, make, constants, signature, block, shared_bytes=0):
        """What starts ``make(*constants)``: ``start(grid, *arguments)``; all of these kernels take the same first."""
        ready = self.transport.ready(
            make(*constants), signature, self.timeout, launch_bounds=block, shared_bytes=shared_bytes, dependent=True
        )
        return lambda grid, *arguments: ready(
            grid, block, *self._common, int(self.timeout * 1e9), self.rank, *arguments
        )

    def notify(
        self,
        per_rank,
        per_expert,
        is_in_rank,
        tokens,
        experts,
        channels,
        alignment,
        worst,
        room,
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
    ):
        """Tell the others what comes, and learn what comes here: the number of rows, and for each expert.

        If more come than there is ``room`` for, the rank gives up. With ``worst`` the host does not wait.
        """
        if channels > MOST_CHANNELS or experts > MOST_EXPERTS:
            raise ValueError(
                f"{experts} experts of a rank and {channels} channels; at most {MOST_EXPERTS} and "
                f"{MOST_CHANNELS} are allowed"
            )
        waits = not worst
        if waits:
            self._counters_view[0] = -1  # the kernel writes it last
        self.kept(_notify)(
            self.num_ranks + 1,
            self.at(per_rank),
            self.at(per_expert),
            self.at(is_in_rank),
            tokens,
            experts,
            channels,
            alignment,
            room,
            self.at(rank_prefix),
            self.at(channel_prefix),
            self.at(recv_channel_prefix),
            address(self._counters),
            int(waits),
        )
        if not waits:
            return worst, []
        come = lambda: self._counters_view[0] >= 0 or self._status_view[0] != 0
        if not self.transport.wait(come, self.timeout + 5):
            raise TimeoutError(f"rank {self.rank}: the notify kernel did not start, or did not end, in time")
        self.check_alive()
        return int(self._counters_view[0]), self._counters_view[1 : 1 + experts].tolist()

    def guarded(self, is_combine, channels, has_met=False):
        """A context for an operation: where its rings lie otherwise than usual, all ranks meet before and after it.

        Where the rings of an operation lie follows from the number of channels. As long as it stays that of the first
        call, a ring's two ends settle between them when it is empty. A meeting afterwards, too, lets captured graphs,
        of which the host does not know when they run, take the usual case for granted. With ``has_met`` all ranks have
        just met.
        """
        unusual = self._usual.setdefault(is_combine, channels) != channels
        return self.between_meetings(has_met) if unusual else contextlib.nullcontext()

    @contextlib.contextmanager
    def between_meetings(self, has_met=False):
        """Around an operation before and after which all ranks must meet."""
        if not has_met:
            self._barrier()
        yield
        self._barrier()

    def _barrier(self):
        self.kept(_barrier)(1)

    @contextlib.contextmanager
    def on_stream(self, previous_event, async_finish, allocate_on_comm_stream):
        """Run a call on its stream, after all it must wait for; gives what makes the call's event.

        That is a function of all tensors that the call touches, so that they live as long as it needs them.
        """
        if allocate_on_comm_stream and not (async_finish and previous_event is not None):
            raise ValueError("allocate_on_comm_stream needs previous_event and async_finish")
        if simulator.ENABLED:
            # Kernels run when their ranks wait: for the event, or here.
            event = EventHandle(lambda: self.transport.wait(lambda: True, 0))
            yield lambda *_: EventOverlap(event) if async_finish else EventOverlap(event.current_stream_wait())
            return
        device, last = self.transport.device, self._last_stream
        aside = async_finish or previous_event is not None
        if not aside and last is not None and last.cuda_stream == current_stream(device.index):
            yield lambda *tensors: EventOverlap()  # nothing to wait for: the usual case, and a fast one
            return
        current = torch.cuda.current_stream(device)
        stream = self.comm_stream if aside else current
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                if last is not None and last != stream:
                    stream.wait_stream(last)
                self._last_stream = stream
            if stream == current:
                yield lambda *tensors: EventOverlap()
                return
            if previous_event is not None and previous_event.event is not None:
                with torch.cuda.stream(stream):
                    previous_event.current_stream_wait()
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


def _notify(link):
    ranks = link.num_ranks
    return link.kernel(notify.make_notify_dispatch, (ranks, _THREADS), notify.NOTIFY_SIGNATURE, _THREADS)


def _barrier(link):
    return link.kernel(notify.make_barrier, (link.num_ranks,), notify.BARRIER_SIGNATURE, 32)
