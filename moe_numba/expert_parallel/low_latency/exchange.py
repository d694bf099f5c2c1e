"""Parts of low-latency dispatch and combine: shared memory, state, kernels and outputs of each."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.common.timeout import format_seconds
from moe_numba.expert_parallel.low_latency import checks
from moe_numba.expert_parallel.low_latency import combine as low_latency_combine
from moe_numba.expert_parallel.low_latency import dispatch as low_latency_dispatch
from moe_numba.expert_parallel.low_latency.config import combined, dispatched, formats_of, sizes_of
from moe_numba.expert_parallel.low_latency.layout import CTA_STATE, SENTINEL, LowLatencyShape
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.expert_parallel.ranks.transport import check_same_on_all_ranks
from moe_numba.expert_parallel.rings.config import TOPK_IDX_POINTERS
from moe_numba.expert_parallel.rings.launch_plans import Kernel, load
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import address

BOTH, SEND, RECEIVE = "both", "send", "receive"  # phases of an operation
_FP8 = torch.float8_e4m3fn
_RESERVED_BYTES = 1024  # of shared memory, for each CTA


class LowLatencyReceived(NamedTuple):
    """What low-latency dispatch writes; `LowLatency.received`.

    A slot is the place of a token of another rank: there are ``num_slots``, the number of ranks times
    ``num_max_dispatch_tokens_per_rank``. The expert's rows of x are packed, or each slot has one row.

    Attributes
    ----------
    x : torch.Tensor [local experts, num_slots, hidden] if packed by expert, or [num_slots, hidden]; the rows' dtype
    scales : torch.Tensor [..., hidden / 128] float32, or [..., hidden / 512] int32, or None
        Of FP8 rows, with contiguous columns.
    counts : torch.Tensor [local experts], int32
        Rows of each expert, if packed by expert.
    topk_idx : torch.Tensor [num_slots, topk], or None
        This rank's experts from 0, or -1; None if packed by expert.
    topk_weights : torch.Tensor [num_slots, topk], float32, or None
        None if packed by expert.
    slot_rows : torch.Tensor [num_slots, topk or 1], int32
        Rows of x that a slot has; -1 is none, and -2 one that was lost in a timeout.
    src_info : torch.Tensor [local experts, num_slots], int32
        Index of each row's token on its source rank.
    layout_range : torch.Tensor [local experts, num_ranks], int64
        First row from a rank in the upper 32 bits, rows from that rank in the lower ones.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    slot_rows: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


class _Exchange:
    """One operation's shared memory, state and kernels."""

    call: str  # the method of `Buffer`

    def __init__(self, runtime, rank_mask, shape, words, sentinels, num_sms, receives_slots):
        transport, device = runtime.transport, runtime.transport.device
        self.runtime, self.transport, self.shape, self.rank_mask = runtime, transport, shape, rank_mask
        self.timeout, self.rank = runtime.timeout, runtime.rank  # for `Kernel`
        self.number = rank_mask.count_exchange()  # ranks make them in the same order
        self.with_compilers_of_all_ranks = runtime.with_compilers_of_all_ranks
        check_same_on_all_ranks(transport, self.call, **self.arguments_of(shape))
        checks.check_shape(shape, gpu_of(device).shared_bytes)
        self._sentinels = sentinels
        self.shared: Any = transport.allocate(4 * words)
        self.mask_ptr = address(rank_mask.mask)
        self.wait_ns = torch.zeros(shape.num_ranks, dtype=torch.int64, device=device)
        # At most one CTA for each part of a row that this rank sends or receives. Dispatch receives all slots and sends
        # the rank's tokens; combine receives these and sends the other ranks' slots.
        rows = shape.slots + (shape.max_tokens if receives_slots and shape.num_ranks > 1 else 0)
        items = rows * shape.parts
        sharing = [key for key in transport.gather(gpu_key(device)) if key == gpu_key(device)]
        num_sms = num_sms or max(1, gpu_of(device).sm_count // len(sharing))
        fit_in_shared = (gpu_of(device).shared_bytes + _RESERVED_BYTES) // (shape.shared_bytes + _RESERVED_BYTES)
        self.grid = min(items, num_sms * min(shape.ctas_per_sm, fit_in_shared))
        self.state = torch.zeros(CTA_STATE + 2 * self.grid, dtype=torch.int32, device=device)
        local, status = self.shared.local.view(torch.int32), rank_mask.status
        self._common_arguments = tuple(map(address, (local, self.shared.addresses, self.state, status)))
        self._kernels = {
            phase: Kernel(self, self.definition(shape, self.topk_idx_dtype, phase)) for phase in (BOTH, SEND, RECEIVE)
        }
        self.reset()

    @staticmethod
    def arguments_of(shape: LowLatencyShape) -> dict:
        """Return the call's arguments that must be the same on all ranks, by name."""
        raise NotImplementedError

    @staticmethod
    def definition(shape, topk_idx_dtype=torch.int64, phase=BOTH) -> KernelDefinition:
        """Return the kernel of a phase."""
        raise NotImplementedError

    def start(self, phase, *arguments):
        self._kernels[phase](self.grid, self.mask_ptr, *arguments)

    def _bind(self, arguments, first, last):
        return self._kernels[BOTH].bind(self.grid, (self.mask_ptr, *arguments), 1 + first, 1 + last)

    def reset(self):
        """Restore the initial state, while no rank uses the memory; all ranks that are not masked must call it."""
        self.runtime.synchronize()
        self._wait_for_ranks()
        local = self.shared.local.view(torch.int32)
        local.zero_()
        local[self._sentinels :].fill_(SENTINEL)
        self.state.zero_()
        self.runtime.synchronize()
        self._wait_for_ranks()

    def _wait_for_ranks(self):
        """Wait for the ranks that are not masked; if one is late, mask it or raise an error."""
        name, mask = f"reset of low-latency exchange {self.number}", self.rank_mask
        if self.transport.rendezvous(name, self.timeout, mask.masked_ranks()):
            return
        missing = self.transport.missing_at(name)
        if mask.raises:
            raise TimeoutError(
                f"rank {self.rank} waited longer than {format_seconds(self.timeout)} for ranks {missing} to clear the "
                f"buffer of low-latency calls{self.transport.describe(*missing)}"
            )
        mask.mask[missing] = 1

    def close(self):
        """Free the shared memory; all ranks must call it."""
        if self.shared is not None:
            self.runtime.synchronize()
            self.shared.close(0 if self.rank_mask.status[0] else self.timeout)
            self.shared = None


def load_kernels(*exchanges):
    """Compile and load the kernels of operations; all ranks must call it."""
    load(exchanges[0], [exchange._kernels[BOTH] for exchange in exchanges])


def gpu_key(device):
    """Return what ranks that share a GPU have in common."""
    return str(device) if simulator.ENABLED else str(torch.cuda.get_device_properties(device).uuid)


class LowLatencyDispatch(_Exchange):
    """Dispatch of one token format."""

    call = "low_latency_dispatch"

    def __init__(self, runtime, rank_mask, shape, topk_idx_dtype=torch.int64, num_sms=None):
        checks.check_topk_idx_dtype("topk_idx_dtype", topk_idx_dtype)
        shape, self.topk_idx_dtype = dispatched(shape), topk_idx_dtype
        self.total_counts = torch.zeros(shape.local_experts, dtype=torch.int32, device=runtime.transport.device)
        super().__init__(runtime, rank_mask, shape, shape.dispatch_words, shape.dispatch_rows, num_sms, True)

    @staticmethod
    def arguments_of(shape):  # noqa: D102
        return sizes_of(shape) | formats_of(shape)

    @staticmethod
    def definition(shape, topk_idx_dtype=torch.int64, phase=BOTH):  # noqa: D102
        make, signature = low_latency_dispatch.make_low_latency_dispatch, low_latency_dispatch.signature
        shared_bytes = 0 if phase == SEND else shape.shared_bytes
        return _definition(make, signature, dispatched(shape), topk_idx_dtype, phase, shared_bytes)

    def new_output(self) -> LowLatencyReceived:
        """Allocate output tensors."""
        shape, device = self.shape, self.transport.device
        by_expert = (shape.local_experts,) if shape.expert_major else ()
        empty = lambda *size, dtype: torch.empty(size, dtype=dtype, device=device)
        x = empty(*by_expert, shape.slots, shape.hidden, dtype=_FP8 if shape.is_fp8 else torch.bfloat16)
        scales = None
        if shape.is_fp8:
            columns, dtype = (
                (shape.num_scales // 4, torch.int32) if shape.scales == "ue8m0" else (shape.num_scales, torch.float32)
            )
            scales = empty(*by_expert, columns, shape.slots, dtype=dtype).transpose(-1, -2)
        own = () if shape.expert_major else (shape.slots, shape.topk)
        return LowLatencyReceived(
            x,
            scales,
            empty(shape.local_experts, dtype=torch.int32),
            empty(*own, dtype=self.topk_idx_dtype) if own else None,
            empty(*own, dtype=torch.float32) if own else None,
            empty(shape.slots, shape.rows_per_slot, dtype=torch.int32),
            empty(shape.local_experts, shape.slots, dtype=torch.int32),
            empty(shape.local_experts, shape.num_ranks, dtype=torch.int64),
        )

    def launch(self, x, topk_idx, topk_weights, out, phase=BOTH, total_counts=None, wait_ns=None):
        """Launch the kernel on the current stream; the arguments have been checked."""
        pointers = self.runtime.pointers
        self.start(
            phase,
            *pointers(x, topk_idx, topk_weights),
            x.shape[0],
            *self._outputs(out),
            address(self.total_counts if total_counts is None else total_counts),
            address(self.wait_ns if wait_ns is None else wait_ns),
        )

    def bind(self, out):
        """Return ``launch(stream, x, topk_idx, topk_weights, tokens)`` for these outputs; it takes addresses."""
        statistics = address(self.total_counts), address(self.wait_ns)
        return self._bind((0, 0, 0, 0, *self._outputs(out), *statistics), 0, 4)

    def _outputs(self, out):
        written = out.x, out.scales, out.topk_idx, out.topk_weights, out.slot_rows
        return self.runtime.pointers(*written, out.src_info, out.layout_range, out.counts)


class LowLatencyCombine(_Exchange):
    """Combine of one token format."""

    call = "low_latency_combine"

    def __init__(self, runtime, rank_mask, shape, topk_idx_dtype=torch.int64, num_sms=None):
        checks.check_topk_idx_dtype("topk_idx_dtype", topk_idx_dtype)
        shape, self.topk_idx_dtype = combined(shape), topk_idx_dtype
        super().__init__(runtime, rank_mask, shape, shape.combine_words, shape.combine_rows, num_sms, False)

    @staticmethod
    def arguments_of(shape):  # noqa: D102
        return sizes_of(shape) | dict(use_fp8=shape.combines_fp8)

    @staticmethod
    def definition(shape, topk_idx_dtype=torch.int64, phase=BOTH):  # noqa: D102
        make, signature = low_latency_combine.make_low_latency_combine, low_latency_combine.signature
        return _definition(make, signature, combined(shape), topk_idx_dtype, phase, 0)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of the rows to combine."""
        shape = self.shape
        return (*((shape.local_experts,) if shape.expert_major else ()), shape.slots, shape.hidden)

    def launch(self, x, slot_rows, topk_idx, topk_weights, out, phase=BOTH, wait_ns=None):
        """Launch the kernel on the current stream; the arguments have been checked."""
        self.start(
            phase,
            *self.runtime.pointers(x, slot_rows, topk_idx, topk_weights),
            topk_idx.shape[0],
            *self.runtime.pointers(out),
            address(self.wait_ns if wait_ns is None else wait_ns),
        )

    def bind(self, slot_rows, out):
        """Return ``launch(stream, x, topk_idx, topk_weights, tokens)`` for this output; it takes addresses."""
        rows, combined = self.runtime.pointers(slot_rows, out)
        launch = self._bind((0, rows, 0, 0, 0, combined, address(self.wait_ns)), 0, 5)
        return lambda stream, x, *changed: launch(stream, x, rows, *changed)


def _definition(make, signature, shape, topk_idx_dtype, phase, shared_bytes):
    phases = replace(shape, sends=phase != RECEIVE, receives=phase != SEND)
    signature_of_ids = signature(TOPK_IDX_POINTERS[topk_idx_dtype])
    return KernelDefinition(make, (phases,), signature_of_ids, shape.threads, shared_bytes, shape.ctas_per_sm)


def exchange_kernels(
    shape: LowLatencyShape, topk_idx_dtype: torch.dtype = torch.int64, phase: str = BOTH
) -> list[KernelDefinition]:
    """Return the kernels of dispatch and combine."""
    return [kind.definition(shape, topk_idx_dtype, phase) for kind in (LowLatencyDispatch, LowLatencyCombine)]
