"""Launch plans of ``Buffer``'s operations: their kernels, and the arguments that follow from a configuration."""

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.common.buffer_layout import buffer_layout
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.expert_parallel.ranks.transport import COMPILE_LOCK, bind
from moe_numba.expert_parallel.rings import combine, dispatch, dispatch_direct, notify
from moe_numba.expert_parallel.rings.channels import RingShape
from moe_numba.expert_parallel.rings.config import (
    TOPK_IDX_POINTERS,
    make_ring_shape,
    max_warps,
    num_channels,
    num_direct_senders,
    num_senders,
)
from moe_numba.expert_parallel.rings.token_slot import TokenSlot
from moe_numba.runtime.launch import current_stream

_NOTIFY_THREADS = _BARRIER_THREADS = 64 if simulator.ENABLED else 512  # per CTA
_DTYPES = torch.bfloat16, torch.float8_e4m3fn  # as ranks exchange them, see `timeout.CALL_ARGUMENTS`


class Kernel:
    """A kernel that exchanges data with the peers; ``kernel(grid, *arguments)`` adds the `RankContext` and launches it.

    The first call compiles it. If the operation begins with `RankState.notify`, ranks whose calls differ find that out
    before one of them compiles.

    Parameters
    ----------
    runtime : RankState
    definition : KernelDefinition
        Ranks that use the kernel together have the same ``constants[0]``.
    """

    def __init__(self, runtime, definition):
        self._runtime, self.definition, self._start = runtime, definition, None
        self._context = *runtime._common_arguments, int(runtime.timeout * 1e9), runtime.rank

    @property
    def is_loaded(self):
        """Whether a call compiles nothing."""
        return self._start is not None

    def load(self):
        """Compile and load the kernel on this rank; `load` does so on all ranks."""
        wanted = self.definition
        options = dict(launch_bounds=wanted.launch_bounds, shared_bytes=wanted.shared_bytes, dependent=True)
        with COMPILE_LOCK:  # ranks that are threads make, and compile, the same kernel once
            kernel = wanted.make(*wanted.constants)
            self._start = self._runtime.transport.prepare_kernel(
                kernel, wanted.signature, self._runtime.timeout, **options
            )

    def __call__(self, grid, *arguments):
        if self._start is None:
            load(self._runtime, [self])
        self._start(grid, self.definition.block, *self._context, *arguments)

    def bind(self, grid, arguments, first, last):
        """Return ``launch(stream, *changed)``, with ``arguments[first:last]`` replaced; the kernel must be loaded."""
        context = self._context
        first, last = len(context) + first, len(context) + last
        return bind(self._start, grid, self.definition.block, (*context, *arguments), first, last)


class Launch:
    """A `Kernel` with its grid and first arguments; ``launch(*others)`` launches it on the current stream.

    The first call compiles the kernel, if nothing has. Arguments are packed into one buffer, so calls are not
    thread-safe.
    """

    def __init__(self, runtime, kernel, grid, *first):
        self._device, self._kernel, self._grid, self._first = runtime.transport.device.index or 0, kernel, grid, first
        self._runtime, self._launch = runtime, None

    @property
    def is_loaded(self):
        """Whether a call compiles nothing."""
        return self._kernel.is_loaded

    def __call__(self, *others):
        if self._launch is None:
            if not self._kernel.is_loaded:
                load(self._runtime, [self._kernel])
            first = len(self._first)
            self._launch = self._kernel.bind(self._grid, (*self._first, *others), first, first + len(others))
        self._launch(current_stream(self._device), *others)


def load(runtime, kernels):
    """Compile and load kernels, and wait until all ranks have done so.

    Each rank begins with another kernel. Processes share machine code through the cubin cache, so that ranks compile
    together, and no kernel twice.
    """
    first = runtime.rank % len(kernels)
    with runtime.with_compilers_of_all_ranks([kernel.definition.configuration for kernel in kernels]):
        for kernel in kernels[first:] + kernels[:first]:
            kernel.load()


def plan_notify(runtime):
    constants = runtime.num_ranks, _NOTIFY_THREADS
    return runtime.prepare_kernel(notify.make_notify_dispatch, constants, notify.NOTIFY_SIGNATURE, _NOTIFY_THREADS)


def plan_barrier(runtime):
    constants = (runtime.num_ranks,)
    return runtime.prepare_kernel(notify.make_barrier, constants, notify.BARRIER_SIGNATURE, _BARRIER_THREADS)


# Launch plans. Each is computed once per configuration and row format, see `RankState.cached`. Those of dispatch return
# the number of channels, a function that starts the kernel, and what `RankState.notify` compares across ranks.


def plan_ring_dispatch(
    runtime, config, hidden, dtype, scales, topk, channels, channels_per_warp, topk_idx_dtype=torch.int64
):
    """Prepare dispatch through rings."""
    slot, ranks = TokenSlot(hidden * dtype.itemsize // 4, scales, topk), runtime.num_ranks
    warps = max_warps(2 * hidden, runtime.limits)
    channels = channels or num_channels(config.num_sms, ranks, 2 * hidden, channels_per_warp, runtime.limits)
    shape, ring_words = make_ring_shape(
        config, ranks, warps, channels, slot, runtime.ring_words, dtype.itemsize, runtime.limits
    )
    signature = dispatch.signature(TOPK_IDX_POINTERS[topk_idx_dtype])
    start = runtime.prepare_kernel(dispatch.make_dispatch, (shape,), signature, shape.threads, shape.shared_bytes)
    senders = num_senders(config.num_sms, ranks)
    call = hidden, _DTYPES.index(dtype), scales, topk, shape.slots
    return (
        channels,
        runtime.prepare_launch(start, config.num_sms, senders, channels, runtime.rings_offset, ring_words),
        call,
    )


def plan_direct_dispatch(
    runtime, config, hidden, dtype, scales, topk, channels, channels_per_warp, topk_idx_dtype=torch.int64
):
    """Prepare dispatch to a `SymmetricOutput`."""
    blocks, warps = num_direct_senders(config.num_sms), max_warps(2 * hidden, runtime.limits)
    channels = channels or (channels_per_warp or 4) * blocks * warps  # four, as with rings where the link is saturated
    slot = TokenSlot(hidden * dtype.itemsize // 4, scales, topk)
    shape = RingShape(runtime.num_ranks, warps, 0, slot, runtime.limits.uses_tma)
    signature = dispatch_direct.signature(TOPK_IDX_POINTERS[topk_idx_dtype])
    start = runtime.prepare_kernel(
        dispatch_direct.make_dispatch_direct, (shape,), signature, 32 * warps, shape.shared_bytes
    )
    return channels, runtime.prepare_launch(start, blocks, channels), (hidden, _DTYPES.index(dtype), scales, topk, 0)


def plan_combine(runtime, config, hidden, topk, channels, biases):
    """Prepare combine; return a function that starts the kernel."""
    ranks, slot = runtime.num_ranks, TokenSlot(hidden // 2, topk, 0, has_src_idx=False)
    warps = max_warps(2 * hidden, runtime.limits)
    shape, ring_words = make_ring_shape(config, ranks, warps, channels, slot, runtime.ring_words, limits=runtime.limits)
    start = runtime.prepare_kernel(
        combine.make_combine, (shape, biases), combine.SIGNATURE, shape.threads, shape.shared_bytes
    )
    rings_offset = runtime.rings_offset + runtime.ring_words
    senders = num_senders(config.num_sms, ranks)
    return runtime.prepare_launch(start, config.num_sms, senders, channels, rings_offset, ring_words)


class PlannedKernels:
    """In place of a `RankState`: only lists the kernels of launch plans, for `compile_ahead`.

    Parameters
    ----------
    num_ranks : int
    num_bytes : int
        ``num_nvl_bytes`` of the buffer.
    limits : GpuLimits
        What the GPUs of all ranks have in common.
    """

    def __init__(self, num_ranks, num_bytes, limits):
        self.num_ranks, self.limits, self.definitions = num_ranks, limits, []
        self.rings_offset, self.ring_words = buffer_layout(num_ranks).rings, num_bytes // 8
        plan_notify(self)
        plan_barrier(self)

    def prepare_kernel(self, make, constants, signature, block, shared_bytes=0):
        """List a kernel."""
        self.definitions.append(KernelDefinition(make, constants, signature, block, shared_bytes))

    def prepare_launch(self, *arguments):
        """Do nothing."""

    def dispatch(
        self, config, hidden, dtype=torch.bfloat16, scales=0, topk=0, topk_idx_dtype=torch.int64, to_output=False
    ):
        """List the kernel of dispatch for rows of one kind; return the number of channels."""
        plan = plan_direct_dispatch if to_output else plan_ring_dispatch
        return plan(self, config, hidden, dtype, scales, topk, None, None, topk_idx_dtype)[0]

    def combine(self, config, hidden, topk, channels, biases=0):
        """List the kernel of combine for a handle with this number of channels."""
        plan_combine(self, config, hidden, topk, channels, biases)
