"""Output tensors of dispatch: newly allocated tensors, or a `SymmetricOutput` to which the peers write directly."""

import itertools

import torch

from moe_numba.expert_parallel.common.buffer_layout import align_words
from moe_numba.expert_parallel.ranks.transport import check_same_on_all_ranks
from moe_numba.runtime.launch import address

_NUMBERS = itertools.count(1)


def alloc_recv_tensors(num_rows, hidden, x, scales, topk, topk_idx, topk_weights):
    """Allocate x, scales, topk_idx and topk_weights of ``num_rows`` rows like those sent; None for what is None."""
    return [
        x.new_empty(num_rows, hidden),
        None if scales is None else scales.new_empty(num_rows, scales.shape[1]),
        topk_idx.new_empty(num_rows, topk) if topk else None,
        topk_weights.new_empty(num_rows, topk) if topk else None,
    ]


class SymmetricOutput:
    """Output tensors in symmetric memory, to which all ranks of a group can write; made by ``Buffer.new_output``.

    The first rows of each tensor hold the result of the last dispatch to this output.

    Attributes
    ----------
    num_rows : int
        Capacity in rows.
    x : torch.Tensor [num_rows, hidden], bfloat16 or float8_e4m3fn
    scales : torch.Tensor [num_rows, num_scales], float32 or int32
    topk_idx, topk_weights : torch.Tensor [num_rows, num_topk], int64 or int32, and float32
    src_idx : torch.Tensor [num_rows], int32
        Index of each row's token on its source rank.
    """

    def __init__(
        self,
        runtime,
        num_rows: int,
        hidden: int,
        dtype: torch.dtype,
        num_scales: int,
        scale_dtype: torch.dtype,
        num_topk: int,
        topk_idx_dtype: torch.dtype,
    ):
        row_words, idx_words = hidden * dtype.itemsize // 4, num_topk * topk_idx_dtype.itemsize // 4
        transport = runtime.transport
        self.transport, self._runtime, self.num_rows = transport, runtime, num_rows
        counts = dict(num_rows=num_rows, hidden=hidden, num_scales=num_scales, num_topk=num_topk)
        dtypes = dict(dtype=dtype, scale_dtype=scale_dtype, topk_idx_dtype=topk_idx_dtype)
        check_same_on_all_ranks(transport, "new_output", **counts, **dtypes)
        # Identifies the output on all ranks, which may have made other outputs in other groups.
        self.number = transport.gather(next(_NUMBERS))[0]
        offsets, sizes = [0], (row_words, num_scales, idx_words, num_topk, 1)
        for words in sizes:
            offsets.append(offsets[-1] + align_words(num_rows * words))
        offsets_in_bytes = [4 * offset for offset in offsets[1:-1]]  # in bytes, of all tensors but the first
        self._shared = transport.allocate(4 * offsets[-1])
        local = self._shared.local.view(torch.int32)

        def section(i, words, dtype):
            """Return the i-th tensor, with ``words`` words per row."""
            part = local[offsets[i] : offsets[i] + num_rows * words].view(dtype)
            return part.view(num_rows, 4 * words // dtype.itemsize)

        self.x, self.scales = section(0, row_words, dtype), section(1, num_scales, scale_dtype)
        self.topk_idx, self.topk_weights = section(2, idx_words, topk_idx_dtype), section(3, num_topk, torch.float32)
        self.src_idx = section(4, 1, torch.int32).view(-1)
        self._remote, self._sizes = (address(self._shared.addresses), *offsets_in_bytes), sizes
        self._prepare_launches()

    def _prepare_launches(self):
        # What the sending kernel takes: the address of all ranks' addresses, offsets of the tensors, and the capacity.
        self.kernel_args = *self._remote, self.num_rows
        self.pointers = self._runtime.pointers(self.x, self.scales, self.topk_idx, self.topk_weights, self.src_idx)
        written = zip(self.pointers, (self.num_rows * words for words in self._sizes), strict=True)
        # Launches a barrier, on a raw stream, that poisons these tensors if it fails.
        self.barrier = self._runtime.bind_barrier(*itertools.chain(*written))

    def tensors(self, with_scales: bool, with_topk: bool) -> tuple[torch.Tensor | None, ...]:
        """Return x, scales, topk_idx, topk_weights and src_idx; None for what a dispatch does not send.

        :meta private:
        """
        topk = (self.topk_idx, self.topk_weights) if with_topk else (None, None)
        return self.x, self.scales if with_scales else None, *topk, self.src_idx

    def close(self) -> None:
        """Free the memory. All ranks must call it, and no kernel may use the memory any more."""
        if self._shared is None:
            return
        self._runtime.close_memory(self._shared)
        self._shared = self.x = self.scales = self.topk_idx = self.topk_weights = self.src_idx = None
