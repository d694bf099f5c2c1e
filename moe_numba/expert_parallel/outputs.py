"""Memory for what dispatch gives, on every rank: those that send rows write them there, directly."""

import torch

from moe_numba.expert_parallel.regions import Record, lines


class Output:
    """Memory that every rank of a group has, and the others can write to; made by ``Buffer.new_output``.

    Attributes
    ----------
    num_rows : int
        For how many rows there is room.
    record : Record
        What a row has.
    addresses : tensor [num_ranks], uint64
        Where everybody's begins, as this rank's kernels reach it.
    begins : tuple of int
        Where in it scales, experts, weights and sources begin, in bytes; rows begin at 0.
    """

    def __init__(self, transport, num_rows, hidden, dtype, num_scales, scale_dtype, num_topk):
        row = hidden * dtype.itemsize // 4
        self.transport, self.num_rows, self.record = transport, num_rows, Record(row, num_scales, num_topk)
        begins = [0]
        for words in (row, num_scales, 2 * num_topk, num_topk, 1):
            begins.append(begins[-1] + lines(num_rows * words))
        self.begins = tuple(4 * begin for begin in begins[1:-1])
        self._shared = transport.allocate(4 * begins[-1])
        self.addresses, local = self._shared.addresses, self._shared.local.view(torch.int32)

        def section(i, words, kind):
            """The i-th section, of so many words for each row."""
            part = local[begins[i] : begins[i] + num_rows * words].view(kind)
            return part.view(num_rows, 4 * words // kind.itemsize)

        self.x, self.scales = section(0, row, dtype), section(1, num_scales, scale_dtype)
        self.topk_idx, self.topk_weights = section(2, 2 * num_topk, torch.int64), section(3, num_topk, torch.float32)
        self.src_idx = section(4, 1, torch.int32).view(-1)

    def first(self, rows, with_scales, with_topk):
        """The first so many rows: x, scales, top-k, weights and sources; None for what is not wanted."""
        parts = self.x, self.scales, self.topk_idx, self.topk_weights, self.src_idx
        wanted = True, with_scales, with_topk, with_topk, True
        return [part[:rows] if is_wanted else None for part, is_wanted in zip(parts, wanted, strict=True)]

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
