"""Host side of dispatch: allocates what it returns, exchanges counts, and launches the kernel."""

from typing import Any, NamedTuple

import torch

from moe_numba.expert_parallel.rings.output_buffer import SymmetricOutput, alloc_recv_tensors


class DispatchCall(NamedTuple):
    """A dispatch whose arguments have been checked."""

    x: torch.Tensor  # without scales
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    layout: tuple  # num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank; None with a handle
    handle: tuple | None
    out: SymmetricOutput | None
    tokens: int
    hidden: int
    topk: int
    experts: int  # of a rank
    expert_alignment: int
    rows: int  # of the outputs, 0: to be counted
    num_worst_tokens: int
    capacity: int  # if more rows arrive, the rank aborts

    @property
    def waits(self):
        """Whether the host waits for the counts."""
        return self.handle is None and not self.num_worst_tokens

    def run(self, runtime, channels, start, call):
        """Launch the kernels on the current stream; ``channels``, ``start`` and ``call`` are from the launch plan.

        Returns
        -------
        outputs : list
            Rows, scales, experts, weights and source tokens; None for what is not sent.
        counts : list of int
            Of each expert, if the host waits for them.
        handle : tuple
        """
        out, tokens, waits = self.out, self.tokens, self.waits
        prefix, src_idx, is_in_rank, send_head = self._handle(runtime.num_ranks, channels)
        if self.handle is None:  # first, so that the GPU counts while the host prepares the next launch
            limits = self.expert_alignment, self.num_worst_tokens, self.capacity
            layout = self.layout, tokens, self.experts, channels, *limits
            runtime.notify(*layout, prefix, call, self.scales, out)
        rows = self.rows
        if waits:  # the kernel starts with as many rows as there are, or as are expected
            rows = runtime.expected_rows(tokens) if out is None else self.capacity
        outputs = self._outputs(rows, src_idx)
        # Everything that needs no counts is prepared before the host waits for them: the GPU waits for the launch then.
        x, scales, topk_idx, topk_weights, in_rank, *prefix_pointers, head = runtime.pointers(
            self.x, self.scales, self.topk_idx, self.topk_weights, is_in_rank, *prefix, send_head
        )
        arguments = [
            *(() if out is None else out.kernel_args),
            *(x, scales),
            *((0, 0) if self.scales is None else self.scales.stride()),
            *(topk_idx, topk_weights, in_rank, tokens, self.experts),
            *prefix_pointers,
        ]

        def launch(outputs, rows, can_repeat):
            if out is not None:
                start(*arguments, *out.pointers, head, rows)
            else:
                start(*arguments, *runtime.pointers(*outputs), head, rows, int(can_repeat))

        # The kernel is launched before its rows are counted, so that the GPU does not wait for the host. If more rows
        # arrive than were expected, it ends at once, and is launched again; those of a `SymmetricOutput` always have
        # their place. But if the kernel is not loaded, ranks whose calls differ must find that out before they wait
        # for one another.
        counted = None
        has_place = out is not None or (rows > 0 and getattr(runtime.transport, "can_repeat", False))
        if waits and not (start.is_loaded and has_place):
            counted, expected = runtime.wait_rows(tokens), rows
            rows = counted
            if out is None and rows > expected:
                outputs = self._outputs(rows, src_idx)
        can_repeat = waits and counted is None and out is None
        with self._barriers(runtime, channels):
            launch(outputs, rows, can_repeat)
            if can_repeat:
                counted = runtime.wait_rows(tokens)
                if counted > rows:
                    outputs = self._outputs(counted, src_idx)
                    launch(outputs, counted, False)
        counts = []
        if waits:
            rows = runtime.wait_rows(tokens) if counted is None else counted
            counts = runtime.expert_counts(self.experts)
        if waits or out is not None:
            outputs = [t if t is None or t.shape[0] == rows else t[:rows] for t in outputs]
        src_idx = outputs[4] if self.handle is None else src_idx
        return outputs, counts, (*prefix, src_idx, is_in_rank, send_head)

    def _handle(self, ranks, channels):
        """Return the prefix matrices, recv_src_idx, is_token_in_rank and send_head: the handle's, or new ones."""
        if self.handle is not None:
            *prefix, src_idx, is_in_rank, send_head = self.handle
            return prefix, src_idx, is_in_rank, send_head
        new: Any = self.layout[0].new_empty
        prefix = [new(ranks, ranks), new(ranks, channels), new(ranks, channels)]
        return prefix, None, self.layout[2], new(self.tokens, ranks)

    def _outputs(self, rows, src_idx):
        if self.out is not None:
            return self.out.tensors(self.scales is not None, self.topk > 0)
        sent = self.x, self.scales, self.topk, self.topk_idx, self.topk_weights
        tensors = alloc_recv_tensors(rows, self.hidden, *sent)
        return [*tensors, self.layout[0].new_empty(rows) if self.handle is None else src_idx]

    def _barriers(self, runtime, channels):
        has_synchronized = self.handle is None  # notify synchronises all ranks
        if self.out is None:
            return runtime.with_barriers_if_layout_changed(False, channels, has_synchronized)
        return runtime.with_barriers(has_synchronized, self.out)
