"""Low-latency dispatch and combine for decode: one launch each, no counts, and no host synchronisation.

`LowLatency` is a prepared pair of them for one token format; ``Buffer.low_latency`` makes it.
"""

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.low_latency import checks
from moe_numba.expert_parallel.low_latency.config import formats_of, sizes_of
from moe_numba.expert_parallel.low_latency.exchange import (
    LowLatencyCombine,
    LowLatencyDispatch,
    LowLatencyReceived,
    load_kernels,
)
from moe_numba.expert_parallel.low_latency.layout import LowLatencyShape
from moe_numba.expert_parallel.low_latency.rank_mask import RankMask
from moe_numba.expert_parallel.ranks.rank_state import RankState
from moe_numba.expert_parallel.ranks.stream_order import StreamOrder
from moe_numba.expert_parallel.ranks.transport import check_same_on_all_ranks
from moe_numba.runtime.recording import current_recording


class LowLatency:
    """A prepared pair of dispatch and combine of one token format, with fixed outputs, from ``Buffer.low_latency``.

    Both operations are one launch on the current stream, check little, allocate nothing after their first call, and can
    be captured in a CUDA graph and replayed with other tokens, experts and weights. All ranks must make the same calls
    in the same order. Calls are not thread-safe.

    ``moe_numba.prepare(pair.dispatch, x, topk_idx)`` and ``moe_numba.prepare(pair.combine, ...)`` return calls for
    fixed tensors, which take a fifth of the host time. Like a CUDA graph they raise no TimeoutError: see
    ``Buffer.check``. They must run on the stream of all other calls.

    Attributes
    ----------
    received : LowLatencyReceived
        What dispatch writes; the next dispatch overwrites it.
    combined : torch.Tensor [num_max_dispatch_tokens_per_rank, hidden], bfloat16
        What combine writes.

    Examples
    --------
    >>> from moe_numba.expert_parallel import LocalGroup
    >>> def work(group):
    ...     buffer = moe_numba.Buffer(group, low_latency_mode=True)
    ...     pair = buffer.low_latency(num_max_dispatch_tokens_per_rank=2, hidden=64, num_experts=4, num_topk=2)
    ...     topk_idx = torch.tensor([[0, 1], [1, 3]], device=group.device)
    ...     received = pair.dispatch(torch.ones(2, 64, device=group.device).bfloat16(), topk_idx)
    ...     y = pair.combine(received.x, topk_idx, torch.full((2, 2), 0.5, device=group.device))
    ...     buffer.check(synchronize=True)
    ...     pair.close()
    ...     buffer.destroy()
    ...     return y[:, 0].tolist()
    >>> LocalGroup(2).run(work)
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        runtime: RankState,
        streams: StreamOrder,
        rank_mask: RankMask,
        shape: LowLatencyShape,
        topk_idx_dtype: torch.dtype,
        num_sms: int | None = None,
    ):
        self._runtime, self._streams, self._rank_mask, self.shape = runtime, streams, rank_mask, shape
        self._status = rank_mask.status.numpy().data
        options = dict(
            expert_major=shape.expert_major,
            protocol=checks.PROTOCOLS[not shape.data_is_flag],
            use_fp8_combine=shape.combines_fp8,
        )
        check_same_on_all_ranks(runtime.transport, "low_latency", **sizes_of(shape), **formats_of(shape), **options)
        self._dispatch = LowLatencyDispatch(runtime, rank_mask, shape, topk_idx_dtype, num_sms)
        self._combine = LowLatencyCombine(runtime, rank_mask, shape, topk_idx_dtype, num_sms)
        load_kernels(self._dispatch, self._combine)
        self.received, device = self._dispatch.new_output(), runtime.transport.device
        self.combined = torch.empty(shape.max_tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        self._launch_dispatch = self._dispatch.bind(self.received)
        self._launch_combine = self._combine.bind(self.received.slot_rows, self.combined)
        if simulator.ENABLED:
            self._launch_dispatch, self._launch_combine = _compare_experts(
                self._launch_dispatch, self._launch_combine, shape
            )
        self._addresses_of_tokens, self._addresses_of_results = (
            checks.make_addresses_of(shape, input_shape, topk_idx_dtype, has_weights, device, runtime.pointers(None)[0])
            for input_shape, has_weights in (
                ((), not shape.expert_major),
                (self._combine.input_shape, shape.expert_major),
            )
        )
        self._sums = {shape.max_tokens: self.combined}  # number of tokens -> what combine returns
        self._has_dispatched = False
        self.users = 1  # that share the pair, see `LowLatencyMode.new_pair`

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> LowLatencyReceived:
        """Send each token to the ranks that have its experts.

        Parameters
        ----------
        x : torch.Tensor [tokens, hidden], bfloat16
            At most ``num_max_dispatch_tokens_per_rank`` rows; contiguous, 16-byte aligned.
        topk_idx : torch.Tensor [tokens, topk], the ``topk_idx_dtype`` of ``Buffer.low_latency``
            The experts of each token; contiguous. Ids outside 0 to num_experts - 1, such as -1, are ignored.
        topk_weights : torch.Tensor [tokens, topk], float32
            Contiguous. Required if rows are not packed by expert, and otherwise not allowed: combine then takes the
            weights.

        Returns
        -------
        LowLatencyReceived
            ``received``. Rows of ``received.x`` that no token fills are not written.

        Raises
        ------
        ValueError, TypeError
            An argument is invalid, or requires grad; the message names it, its value and what is allowed.
        TimeoutError
            An earlier low-latency call has timed out, and the buffer is without ``enable_shrink``.
        RuntimeError
            After `close`.
        """
        addresses = self._addresses_of_tokens(x, topk_idx, topk_weights)
        if addresses is None or self._must_check_alive():
            self._check_alive()
            checks.check_dispatch(self._dispatch, x, topk_idx, topk_weights)
            addresses = *self._runtime.pointers(x, topk_idx, topk_weights), topk_idx.shape[0]
        self._has_dispatched = True
        self._streams.launch_on_stream(self._launch_dispatch, *addresses)
        return self.received

    def combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return each token's sum of the rows in ``x``, weighted if rows are packed by expert.

        Parameters
        ----------
        x : torch.Tensor of the shape of ``received.x``, bfloat16
            The experts' results for the last dispatch; contiguous, 16-byte aligned.
        topk_idx : torch.Tensor [tokens, topk], the ``topk_idx_dtype`` of ``Buffer.low_latency``
            That of the last dispatch, which only the simulator checks.
        topk_weights : torch.Tensor [tokens, topk], float32
            Contiguous. Required if rows are packed by expert, and otherwise not allowed.

        Returns
        -------
        torch.Tensor [tokens, hidden], bfloat16
            A view of ``combined``. Each rank sums its experts' rows in float32, in the order of ``topk_idx``, and
            rounds; the ranks' sums are added in rank order in float32, and rounded. A token is NaN if one of its
            experts is on a rank that did not answer in time. With ``use_fp8_combine`` the other ranks' sums are rounded
            to FP8: see `Buffer.low_latency_combine`.

        Raises
        ------
        ValueError, TypeError, TimeoutError, RuntimeError
            As for `dispatch`. RuntimeError also before the first dispatch.
        """
        addresses = self._addresses_of_results(x, topk_idx, topk_weights)
        if addresses is None or not self._has_dispatched or self._must_check_alive():
            self._check_alive()
            checks.check_combine(self._combine, x, self.received.slot_rows, topk_idx, topk_weights)
            if not self._has_dispatched:
                raise RuntimeError("combine was called before the first dispatch; nothing has been received")
            addresses = *self._runtime.pointers(x, topk_idx, topk_weights), topk_idx.shape[0]
        self._streams.launch_on_stream(self._launch_combine, *addresses)
        tokens = addresses[3]
        sums = self._sums.get(tokens)
        return self._sums.setdefault(tokens, self.combined[:tokens]) if sums is None else sums

    def reset(self) -> None:
        """Wait for all ranks and clear all shared state; all ranks must call it."""
        self._dispatch.reset()
        self._combine.reset()

    def close(self) -> None:
        """Free the shared memory; all ranks must call it. If several callers share the pair, the last call frees it."""
        self.users -= 1
        if self.users <= 0:
            self._dispatch.close()
            self._combine.close()

    @property
    def is_closed(self) -> bool:
        """Whether the memory was freed."""
        return self._dispatch.shared is None

    def _must_check_alive(self):
        return self._status[0] or self._dispatch.shared is None

    def _check_alive(self):
        if self.is_closed:
            raise RuntimeError("this low-latency exchange was closed")
        self._rank_mask.check()


def _compare_experts(dispatch, combine, shape):
    """Return the simulator's launches of dispatch and combine: combine raises unless it has the experts of dispatch."""
    sent, is_prepared = None, False

    def ids(topk_idx, tokens):
        return torch.from_numpy(topk_idx.array[: tokens * shape.topk].copy()).view(tokens, shape.topk)

    def launch_dispatch(stream, x, topk_idx, topk_weights, tokens):
        nonlocal sent, is_prepared
        is_prepared |= current_recording() is not None  # a prepared dispatch may send others, unseen
        sent = None if simulator.has_queued() else ids(topk_idx, tokens)  # a queued kernel may write them
        dispatch(stream, x, topk_idx, topk_weights, tokens)

    def launch_combine(stream, x, topk_idx, topk_weights, tokens):
        if not is_prepared and sent is not None:
            checks.check_same_experts(ids(topk_idx, tokens), sent, shape.num_experts)
        combine(stream, x, topk_idx, topk_weights, tokens)

    return launch_dispatch, launch_combine
