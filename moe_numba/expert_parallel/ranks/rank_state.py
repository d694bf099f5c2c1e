"""State that all calls of a ``Buffer`` share: shared memory, status, kernels and launch plans."""

import contextlib
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.common.buffer_layout import (
    ABORT_FLAG,
    MAX_CHANNELS,
    MAX_EXPERTS,
    NUM_RANKS,
    STATE_WORDS,
    buffer_layout,
)
from moe_numba.expert_parallel.common.timeout import (
    ARGUMENT_ERRORS,
    CALL_ARGUMENTS,
    CALL_MISMATCH,
    MESSAGES,
    STATUS_WORDS,
    format_seconds,
)
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.expert_parallel.ranks.events import is_capturing
from moe_numba.expert_parallel.rings.config import GpuLimits, limits_of
from moe_numba.expert_parallel.rings.launch_plans import Kernel, Launch, load, plan_barrier, plan_notify
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import address, current_stream
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.validate import check_device

_NO_BARRIERS = contextlib.nullcontext()
_ROWS_MULTIPLE = 16  # of outputs that are allocated before their rows are counted
_COMPILE_S = 100.0  # seconds that ranks wait for one another's compilers
_SCALE_DTYPES = None, torch.float32, torch.int32


class RankState:
    """A rank's memory and kernels for the exchange of tokens with its peers.

    Parameters
    ----------
    transport : see ``expert_parallel.transport``
    num_bytes : int
        Shared memory for rings.
    timeout : float
        Seconds after which a wait for another rank ends in an error.
    uses_tma : bool, optional
        Whether kernels copy rows by TMA; by default if this rank's GPU can. Without TMA if one rank cannot.
    """

    def __init__(self, transport, num_bytes, timeout, uses_tma=None):
        device = transport.device
        check_device(device, "group's device")
        self.transport, self.timeout = transport, timeout
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self.rings_offset = buffer_layout(self.num_ranks).rings  # in words
        self.ring_words = num_bytes // 8  # for the rings of dispatch, and as many for those of combine
        # A group of different GPUs uses what all of them have, so that all ranks have the same channels and slots.
        have_tma, shared_bytes = zip(*transport.gather(limits_of(gpu_of(device), uses_tma)), strict=True)
        self.limits = GpuLimits(all(have_tma), min(shared_bytes))
        self.shared = transport.allocate(4 * self.rings_offset + num_bytes)
        self._local = self.shared.local.view(torch.int32)
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        self._state[NUM_RANKS] = self.num_ranks
        # The host polls these while kernels run.
        pinned = {} if simulator.ENABLED else {"pin_memory": True}
        self._status = torch.zeros(STATUS_WORDS, dtype=torch.int32, device="cpu", **pinned)
        self._counters = torch.zeros(1 + MAX_EXPERTS, dtype=torch.int32, device="cpu", **pinned)
        self._status_view, self._counters_view = self._status.numpy(), self._counters.numpy()
        self._placeholder = torch.zeros(4, dtype=torch.int32, device=device)
        common = self._local, self.shared.addresses, self._state, self._status, self._placeholder
        *self._common_arguments, self._placeholder_ptr = map(address, common)
        self._cache, self._first_channels, self._configurations, self._rows_per_token = {}, {}, set(), 0.0
        self._counters_ptr = address(self._counters)
        self.exchanges: dict[Any, Any] = {}  # of layers: key -> further memory that ranks share
        if not simulator.ENABLED:
            torch.cuda.synchronize(device)
        transport.gather(None)
        notify, self._barrier = plan_notify(self), plan_barrier(self)
        load(self, [notify, self._barrier])  # now, because no call may make the others wait for the compiler
        self._launch_notify = Launch(self, notify, self.num_ranks + 1)
        self.barrier = self.bind_barrier(*5 * (self._placeholder_ptr, 0))

    def synchronize(self):
        """Wait until the GPU has finished all work; in the simulator, run the pending kernels."""
        if simulator.ENABLED:
            self.transport.wait(lambda: True, 0)
        else:
            torch.cuda.synchronize(self.transport.device)

    def close(self):
        """Free the shared memory; all ranks must call it."""
        if self.shared is None:
            return
        for exchange in self.exchanges.values():
            exchange.close()
        self.exchanges.clear()
        self.close_memory(self.shared)
        self.shared = self._local = None

    def close_memory(self, shared):
        """Free memory that ranks share, after all ranks have synchronised; without waiting for them after an abort."""
        self.synchronize()
        has_aborted = self._status_view[0] or (self._local is not None and self._local[ABORT_FLAG])
        shared.close(0 if has_aborted else self.timeout)

    def pointers(self, *tensors):
        """Return the addresses of tensors, and that of a placeholder for each that is None or empty."""
        placeholder = self._placeholder_ptr
        return [placeholder if tensor is None else address(tensor) or placeholder for tensor in tensors]

    def check_alive(self):
        """Raise an error if the buffer was destroyed, or if this rank has aborted."""
        if self.shared is None:
            raise RuntimeError("this buffer was destroyed")
        if not self._status_view[0]:
            return
        code, rank, channel, peer, head, tail = self._status_view[:6].tolist()
        argument, values = CALL_ARGUMENTS[channel] if code == CALL_MISMATCH else (None, None)
        if values:
            head, tail = values[head], values[tail]
        message = MESSAGES[code].format(rank=rank, channel=channel, peer=peer, head=head, tail=tail, argument=argument)
        if code in ARGUMENT_ERRORS:
            raise ValueError(f"{message}. Rank {rank} has aborted; this buffer can no longer be used")
        raise TimeoutError(
            f"{message}{self.transport.describe(peer)}. Rank {rank} has aborted after {format_seconds(self.timeout)}; "
            "this buffer can no longer be used"
        )

    def check_can_wait(self):
        """Raise if the host would wait for the GPU in a CUDA graph or in a prepared call: neither repeats that."""
        if is_capturing():
            raise RuntimeError(
                "dispatch in a CUDA graph needs num_worst_tokens or a handle, because the host cannot wait for the "
                "counts during the capture"
            )
        refuse_recording(
            "num_worst_tokens is 0; a prepared dispatch needs it or a handle, because its host does not wait for counts"
        )

    def cached(self, make, *arguments):
        """Return ``make(self, *arguments)``, computed once per set of arguments."""
        try:
            return self._cache[make, arguments]
        except KeyError:
            return self._cache.setdefault((make, arguments), make(self, *arguments))

    def prepare_kernel(self, make, constants, signature, block, shared_bytes=0):
        """Return ``start(grid, *arguments)`` of the kernel ``make(*constants)``, a `Kernel`."""
        return Kernel(self, KernelDefinition(make, constants, signature, block, shared_bytes))

    def prepare_launch(self, kernel, grid, *first):
        """Return a `Launch` of a prepared kernel."""
        return Launch(self, kernel, grid, *first)

    @contextlib.contextmanager
    def with_compilers_of_all_ranks(self, configurations):
        """Return a context in which all ranks compile the kernels of configurations; it ends when all have done so.

        Otherwise the GPUs of some ranks would wait for the compiler of another. A rank that does not come within the
        timeout is late or lost: the others do not wait for its compiler, and their kernels time out. Ranks whose call
        differs do not come here: a rank that knows that from notify does not wait for them. Nor does a captured call,
        which nothing runs.
        """
        if self._configurations.issuperset(configurations) or is_capturing():
            yield
            return
        self._configurations.update(configurations)
        name = f"first use of {configurations}"
        all_come = not self._status_view[0] and self.transport.rendezvous(name, self.timeout)
        yield
        if all_come and not self._status_view[0]:
            self.transport.rendezvous(f"{name}, compiled", max(self.timeout, _COMPILE_S))

    def notify(
        self, layout, tokens, experts, channels, alignment, num_worst_tokens, capacity, prefix, call, scales, out
    ):
        """Launch the kernel that exchanges the counts with all ranks, and computes the prefix matrices.

        Parameters
        ----------
        layout : (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        tokens, experts, channels : int
            Of this rank.
        alignment : int
            The counts per expert are rounded up to a multiple of this.
        num_worst_tokens : int
            If 0, the kernel also writes the counts that `wait_rows` waits for.
        capacity : int
            Rows of the output; if more arrive, the rank aborts.
        prefix : tensors
            rank_prefix_matrix, channel_prefix_matrix and recv_channel_prefix_matrix, which the kernel writes.
        call : tuple of int
            From the launch plan; with the next two arguments, what must be the same on all ranks.
        scales : torch.Tensor or None
        out : SymmetricOutput or None
        """
        if channels > MAX_CHANNELS or experts > MAX_EXPERTS:
            raise ValueError(
                f"{experts} experts of a rank and {channels} channels; at most {MAX_EXPERTS} and "
                f"{MAX_CHANNELS} are allowed"
            )
        waits = not num_worst_tokens
        if waits:
            self._counters_view[0] = -1  # the kernel writes it last
        *layout_pointers, rank_prefix, channel_prefix, recv_channel_prefix = self.pointers(*layout, *prefix)
        self._launch_notify(
            *layout_pointers,
            *(tokens, experts, channels, alignment, capacity),
            *(rank_prefix, channel_prefix, recv_channel_prefix),
            self._counters_ptr,
            int(waits),
            *call,
            _SCALE_DTYPES.index(None if scales is None else scales.dtype),
            0 if out is None else out.number,
        )

    def wait_rows(self, tokens):
        """Wait for the counts of `notify`; return the rows that this rank receives."""
        has_finished = lambda: self._counters_view[0] >= 0 or self._status_view[0] != 0
        if not self.transport.wait(has_finished, self.timeout + 5):
            raise TimeoutError(f"rank {self.rank}: the notify kernel did not start or did not end in time")
        self.check_alive()
        rows = int(self._counters_view[0])
        self._rows_per_token = rows / max(1, tokens)
        return rows

    def expected_rows(self, tokens):
        """Return for how many rows to allocate outputs before they are counted: 1/16 more than of the last call.

        Then only the launch follows when the counts are there. If more rows arrive, they are allocated again.
        """
        return -(-int(tokens * self._rows_per_token * 17 / 16) // _ROWS_MULTIPLE) * _ROWS_MULTIPLE

    def expert_counts(self, experts):
        """Return the tokens of each expert, after `wait_rows`."""
        return self._counters_view[1 : 1 + experts].tolist()

    def with_barriers_if_layout_changed(self, is_combine, channels, has_synchronized=False):
        """Return a context with barriers around an operation whose rings are not where the first call had them.

        The number of channels determines where an operation's rings are. While it stays that of the first call, the
        two ends of a ring agree without a barrier on when it is empty. The barrier after the operation also restores
        the usual state for captured graphs, whose execution the host does not see. With ``has_synchronized`` all ranks
        have just executed a barrier.
        """
        has_changed = self._first_channels.setdefault(is_combine, channels) != channels
        return self.with_barriers(has_synchronized) if has_changed else _NO_BARRIERS

    def with_barriers(self, has_synchronized=False, out=None):
        """Return a context with barriers around an operation; without the first if all ranks have just executed one.

        If the second one fails, it poisons ``out``, the `SymmetricOutput` that peers have written to.
        """
        device = self.transport.device.index or 0
        return _Barriers(device, self.barrier, self.barrier if out is None else out.barrier, has_synchronized)

    def bind_barrier(self, *output):
        """Return a function that launches a barrier on a raw stream; ``output`` is what the kernel then poisons."""
        return self._barrier.bind(1, output, 0, 0)


class _Barriers:
    """See `RankState.with_barriers`; a generator would take several times as long."""

    def __init__(self, device, before, after, has_synchronized):
        self._device, self._before, self._after, self._has_synchronized = device, before, after, has_synchronized

    def __enter__(self):
        if not self._has_synchronized:
            self._before(current_stream(self._device))

    def __exit__(self, error, *_):
        if error is None:
            self._after(current_stream(self._device))
