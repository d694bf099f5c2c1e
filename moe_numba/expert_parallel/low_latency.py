"""Low-latency dispatch and combine for decode: one launch each, no counts, and no host in between.

`LowLatency` is a prepared exchange for one token format; ``Buffer.low_latency`` makes it.
"""

import torch

from moe_numba.expert_parallel import low_latency_checks as checks
from moe_numba.expert_parallel.kernels.low_latency_layout import LowLatencyShape
from moe_numba.expert_parallel.low_latency_exchange import (
    LowLatencyCombine,
    LowLatencyDispatch,
    LowLatencyReceived,
    RankMask,
    load_kernels,
)
from moe_numba.expert_parallel.runtime import Runtime


class LowLatency:
    """A prepared dispatch and combine of one token format, with fixed outputs; ``Buffer.low_latency`` makes it.

    Both operations are one launch on the current stream, check little, allocate nothing after their first call, and can
    be captured in a CUDA graph and replayed with other tokens, experts and weights. All ranks must make the same calls
    in the same order. Calls are not thread-safe.

    ``moe_numba.prepare(plan.dispatch, x, topk_idx)`` and ``moe_numba.prepare(plan.combine, ...)`` return calls for
    fixed tensors, which take a fifth of the time of the host. Like a CUDA graph they raise no TimeoutError: see
    ``Buffer.check``. They must run on the stream of all other calls.

    Attributes
    ----------
    received : LowLatencyReceived
        What dispatch writes; the next dispatch overwrites it.
    combined : torch.Tensor [max_tokens, hidden], bfloat16
        What combine writes.
    """

    def __init__(self, runtime: Runtime, rank_mask: RankMask, shape: LowLatencyShape, topk_idx_dtype, num_sms=None):
        self._runtime, self._rank_mask, self.shape = runtime, rank_mask, shape
        self._dispatch = LowLatencyDispatch(runtime, rank_mask, shape, topk_idx_dtype, num_sms)
        self._combine = LowLatencyCombine(runtime, rank_mask, shape, topk_idx_dtype, num_sms)
        load_kernels(self._dispatch, self._combine)
        self.received, device = self._dispatch.new_output(), runtime.transport.device
        self.combined = torch.empty(shape.max_tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        self._launch_dispatch = self._dispatch.bind(self.received)
        self._launch_combine = self._combine.bind(self.received.slot_rows, self.combined)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> LowLatencyReceived:
        """Send each token to the ranks that have its experts.

        Parameters
        ----------
        x : torch.Tensor [tokens, hidden], bfloat16
            At most ``max_tokens`` rows.
        topk_idx : torch.Tensor [tokens, topk]
            Experts; what is not an expert, such as -1, is ignored.
        topk_weights : torch.Tensor [tokens, topk], float32
            Required if rows are not packed by expert, and otherwise not allowed: combine then takes the weights.

        Returns
        -------
        LowLatencyReceived
            ``received``. Rows of ``x`` that no token fills are not written.
        """
        self._check_alive()
        exchange = self._dispatch
        checks.check_dispatch(exchange, x, topk_idx, topk_weights)
        self._launch(self._launch_dispatch, exchange, x, topk_idx, topk_weights)
        return self.received

    def combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return each token's sum of the rows in ``x``, weighted if rows are packed by expert.

        Parameters
        ----------
        x : torch.Tensor of the shape of ``received.x``, bfloat16
            The experts' results for the last dispatch.
        topk_idx : torch.Tensor [tokens, topk]
            As for the dispatch.
        topk_weights : torch.Tensor [tokens, topk], float32
            Required if rows are packed by expert, and otherwise not allowed.

        Returns
        -------
        torch.Tensor [tokens, hidden], bfloat16
            A view of ``combined``. Each rank sums its experts' rows in float32, in the order of ``topk_idx``, and
            rounds; the ranks' sums are added in rank order in float32, and rounded. A token is NaN if one of its
            experts is on a rank that did not answer in time.
        """
        self._check_alive()
        exchange = self._combine
        checks.check_combine(exchange, x, self.received.slot_rows, topk_idx, topk_weights)
        self._launch(self._launch_combine, exchange, x, topk_idx, topk_weights)
        tokens = topk_idx.shape[0]
        return self.combined if tokens == self.shape.max_tokens else self.combined[:tokens]

    def _launch(self, launch, exchange, *tensors):
        if self._runtime.continues_stream():
            launch(*exchange.changed(*tensors))
            return
        with self._runtime.on_stream(None, False, False) as finish:
            launch(*exchange.changed(*tensors))
            finish(*tensors)

    def reset(self) -> None:
        """Wait for all ranks and clear all shared state; all ranks must call it."""
        self._dispatch.reset()
        self._combine.reset()

    def close(self) -> None:
        """Free the shared memory; all ranks must call it."""
        self._dispatch.close()
        self._combine.close()

    def _check_alive(self):
        if self._dispatch.shared is None:
            raise RuntimeError("this low-latency exchange was closed")
        self._rank_mask.check()
