"""Memory for what dispatch gives: new tensors, or an `Output`, where those that send rows write them directly."""

import torch

from moe_numba.expert_parallel.kernels.buffer_layout import lines
from moe_numba.expert_parallel.transport import alike
from moe_numba.runtime.launch import address


def new_parts(num_rows, x, scales, topk, src_idx):
    """Memory of this rank alone, for so many rows like these: rows, scales, experts, weights and sources, or None."""
    new = lambda *size, dtype: torch.empty(size, dtype=dtype, device=x.device)
    return (
        new(num_rows, x.shape[1], dtype=x.dtype),
        None if scales is None else new(num_rows, scales.shape[1], dtype=scales.dtype),
        new(num_rows, topk, dtype=torch.int64) if topk else None,
        new(num_rows, topk, dtype=torch.float32) if topk else None,
        new(num_rows, dtype=torch.int32) if src_idx is None else src_idx,
    )


class Output:
    """Memory that every rank of a group has, and the others can write to; made by ``Buffer.new_output``.

    Attributes
    ----------
    num_rows : int
        For how many rows there is room.
    x : tensor [num_rows, hidden], bfloat16 or float8_e4m3fn
    scales : tensor [num_rows, num_scales], float32 or int32
    topk_idx, topk_weights : tensors [num_rows, num_topk], int64 and float32
    src_idx : tensor [num_rows], int32
        What the last dispatch into it gave, in the first rows.
    """

    def __init__(self, transport, num_rows, hidden, dtype, num_scales, scale_dtype, num_topk):
        row = hidden * dtype.itemsize // 4
        self.transport, self.num_rows = transport, num_rows
        asked = num_rows, hidden, str(dtype), num_scales, str(scale_dtype), num_topk
        alike(transport, "what new_output is asked for", asked)
        begins = [0]
        for words in (row, num_scales, 2 * num_topk, num_topk, 1):
            begins.append(begins[-1] + lines(num_rows * words))
        self._begins = [4 * begin for begin in begins[1:-1]]  # of all but the first
        self._shared = transport.allocate(4 * begins[-1])
        local = self._shared.local.view(torch.int32)

        def section(i, words, kind):
            """The i-th section, of so many words for each row."""
            part = local[begins[i] : begins[i] + num_rows * words].view(kind)
            return part.view(num_rows, 4 * words // kind.itemsize)

        self.x, self.scales = section(0, row, dtype), section(1, num_scales, scale_dtype)
        self.topk_idx, self.topk_weights = section(2, 2 * num_topk, torch.int64), section(3, num_topk, torch.float32)
        self.src_idx = section(4, 1, torch.int32).view(-1)

    def parts(self, with_scales, with_topk):
        """Rows, scales, experts, weights and sources; None for what is not wanted."""
        topk = (self.topk_idx, self.topk_weights) if with_topk else (None, None)
        return self.x, self.scales if with_scales else None, *topk, self.src_idx

    @property
    def place(self):
        """What the kernel of those that send must know: where everybody's is, what is where in it, and the room."""
        return address(self._shared.addresses), *self._begins, self.num_rows

    def close(self):
        """Give the memory back; all ranks must call it, and no kernel may use it any more."""
        if self._shared is None:
            return
        if self.transport.device.type == "cuda":
            torch.cuda.synchronize(self.transport.device)
        self.transport.gather(None)
        shared, self._shared = self._shared, None
        self.x = self.scales = self.topk_idx = self.topk_weights = self.src_idx = None
        shared.close()
