"""The experts of received tokens, and combine, which sends the first sums while the last ones are computed."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from moe_numba import simulator
from moe_numba.moe_layer.expert_parallel import kernel_sum_for_combine as kernels
from moe_numba.moe_layer.fused_experts import check_experts
from moe_numba.moe_layer.launches import ExpertsCall, ExpertsTensors, can_fuse_activation, launches_of
from moe_numba.moe_layer.workspace import ExpertsWorkspace
from moe_numba.runtime.launch import address, launcher

_SUM = "weighted_sum"  # of the launches of `fused_experts`


class SumAndCombine:
    """Computes a rank's experts, and lets the weighted sum and combine run at the same time.

    Parameters
    ----------
    buffer : moe_numba.Buffer
    experts : Experts
    config : Config
        Of combine.
    """

    def __init__(self, buffer, experts, config):
        self.buffer, self.experts, self.config = buffer, experts, config
        self._ready: torch.Tensor | None = None  # flags of the sums; between two calls all are 0
        self._loaded: set[Callable] = set()  # kernels that this GPU has executed

    def __call__(self, x, x_scale, weights, ids, handle, shared) -> torch.Tensor:
        """Return what ``buffer.combine`` returns for the experts' sums of received tokens; ``shared`` is added."""
        rows, indices = self._run_experts(x, x_scale, weights, ids)
        sums, ready = self._new_sums(rows, x.shape), self._flags(len(x), x.device)
        start, threads = prepare_sum(x.shape[1], ids.shape[1], self.buffer.group_size, x.device)
        arguments = rows, indices, weights, sums, ready, handle[0]
        _finish_earlier_launches(self.buffer)
        if start not in self._loaded:
            # A kernel's first launch may load its code and wait for the GPU, whose combine waits for this kernel. So it
            # is launched before, for no rows.
            self._launch_sum(start, threads, 0, *arguments)
            self._loaded.add(start)
        # Combine is launched first, on a stream with priority: its CTAs need SMs of their own, the others' do not.
        out, _, event = self.buffer.combine(
            sums, handle, bias=shared, config=self.config, async_finish=True, ready=ready[: len(x)]
        )
        if len(x):
            with _on_another_stream(self.buffer):
                self._launch_sum(start, threads, len(x), *arguments)
        event.current_stream_wait()
        return out

    def _run_experts(self, x, x_scale, weights, ids):
        """Compute the rows of all experts; return them, and the row of each assignment."""
        experts = self.experts
        t = ExpertsTensors(x=x, topk_weights=weights, topk_ids=ids, x_scale=x_scale, **experts.tensors)
        shape, chosen = check_experts(t, *experts.activation)
        memory = ExpertsWorkspace(*ids.shape, t.w13, t.w2, experts.scaling).intermediates(len(x))
        fuses = can_fuse_activation(t, shape.format, chosen)
        call = ExpertsCall(t, shape, chosen, fuses, False, memory)
        for name, launch in launches_of(call, memory.rows[0]).items():
            if name != _SUM and len(x):
                launch()
        return memory.rows[0], call.inverse_indices

    @staticmethod
    def _new_sums(rows, shape):
        return rows.new_empty(shape)

    def _flags(self, rows, device):
        if self._ready is None or len(self._ready) < rows:
            self._ready = torch.zeros(max(rows, 1), dtype=torch.int32, device=device)
        return self._ready

    def _launch_sum(self, start, threads, tokens, rows, *arguments):
        ranks, pointers = self.buffer.group_size, map(address, (rows, *arguments))
        start(ranks * max(1, -(-tokens // ranks)), threads, None, *pointers, self.buffer.rank, len(rows), tokens)


def prepare_sum(hidden: int, topk: int, ranks: int, device: torch.device) -> tuple[Callable, int]:
    """Return the launcher of the kernel that sums, and its number of threads."""
    vectors = hidden // kernels.VECTOR
    threads = -(-vectors // -(-vectors // kernels.THREADS) // 32) * 32
    kernel = kernels.make_sum_for_combine_kernel(hidden, topk, ranks, threads)
    return launcher(kernel, kernels.SIGNATURE, device.index or 0, launch_bounds=threads), threads


def _finish_earlier_launches(buffer):
    """In the simulator, run what is queued on this rank: `_on_another_stream` does not wait for it."""
    if simulator.ENABLED:
        buffer.transport.wait(lambda: True, 0)


@contextlib.contextmanager
def _on_another_stream(buffer) -> Iterator[None]:
    """In the simulator, let a launch run at the same time as the queued ones of its rank, as on another stream."""
    if not simulator.ENABLED:
        yield
        return
    with simulator.on_rank(buffer.group_size + buffer.rank), simulator.exchange():
        yield
