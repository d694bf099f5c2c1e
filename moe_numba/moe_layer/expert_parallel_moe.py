"""``ExpertParallelMoE``: the experts of a layer on several GPUs of a node: dispatch, local experts, combine."""

import torch
from torch import nn

from moe_numba.expert_parallel import Buffer, Config
from moe_numba.moe_layer.module import Experts
from moe_numba.runtime.validate import check_int


class ExpertParallelMoE(nn.Module):
    """Experts distributed over the ranks of a :class:`moe_numba.Buffer`.

    Each rank has its own tokens and consecutive experts: rank r has the global ids r * n to (r + 1) * n - 1, where n is
    the number of its local experts, the same on all ranks. All ranks must call the layer in the same order, also a rank
    without tokens.

    Parameters
    ----------
    buffer : moe_numba.Buffer
    experts : Experts
        The local experts, without stages in torch if ``num_worst_tokens`` is not 0 and calls are captured.
    num_worst_tokens : int
        Most rows that this rank receives. If not 0, the host does not wait for the number of received rows, and a CUDA
        graph can capture the call; all ranks' tokens together always suffice. 0: the host waits.
    config : Config, optional
        Of dispatch and combine. Default: the buffer's.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.

    Notes
    -----
    The order of operations is DeepEP's: a token is sent once to each rank that has one of its experts. That rank
    computes the weighted sum of its experts, rounds it to bfloat16 and sends it back; combine adds the ranks' sums in
    float32, in the order of the ranks. Results are bit-identical from run to run.
    """

    def __init__(self, buffer: Buffer, experts: Experts, num_worst_tokens: int = 0, config: Config | None = None):
        super().__init__()
        if not isinstance(buffer, Buffer):
            raise TypeError(f"buffer is {type(buffer).__name__}; it must be a moe_numba.Buffer")
        if not isinstance(experts, Experts):
            raise TypeError(f"experts is {type(experts).__name__}; it must be a moe_numba.moe_layer.Experts")
        self.buffer, self.experts, self.config = buffer, experts, config
        self.num_worst_tokens = check_int("num_worst_tokens", num_worst_tokens, 0)

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks."""
        return len(self.experts.w13) * self.buffer.group_size

    def forward(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the experts of this rank's tokens.

        Parameters
        ----------
        x : tensor [tokens, hidden], bfloat16
        topk_weights : tensor [tokens, topk], float32
        topk_ids : tensor [tokens, topk], int32 or int64
            Global ids. One outside of 0 to num_experts - 1 adds nothing.
        shared : tensor [tokens, hidden], bfloat16, optional
            Added to the sum: the output of shared experts.

        Returns
        -------
        tensor [tokens, hidden], bfloat16
        """
        topk_ids = topk_ids.masked_fill((topk_ids < 0) | (topk_ids >= self.num_experts), -1)
        per_rank, _, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(topk_ids, self.num_experts)
        received, ids, weights, _, handle, _ = self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_in_rank,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
            num_worst_tokens=self.num_worst_tokens,
            config=self.config,
        )
        # Padding rows have the ids -1, so no expert reads what they contain.
        rows = self.experts(received, weights, ids)
        return self.buffer.combine(rows, handle, bias=shared, config=self.config)[0]

    def extra_repr(self) -> str:
        """Describe the ranks."""
        ranks = f"rank={self.buffer.rank} of {self.buffer.group_size}"
        return f"{ranks}, num_experts={self.num_experts}, num_worst_tokens={self.num_worst_tokens}"
