"""The mask of ranks that are late or dead, of low-latency calls."""

from typing import Any

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.common.timeout import format_seconds
from moe_numba.expert_parallel.low_latency.layout import MASK_WORDS
from moe_numba.expert_parallel.low_latency.protocol import MESSAGES
from moe_numba.expert_parallel.ranks.rank_state import RankState

_STATUS_WORDS = 8


class RankMask:
    """Which ranks are late or dead, and the first reason; shared by all low-latency operations of a buffer."""

    def __init__(self, runtime: RankState, raises: bool):
        pinned: dict[str, Any] = {} if simulator.ENABLED else {"pin_memory": True}
        self._words = torch.zeros(MASK_WORDS, dtype=torch.int32, device=runtime.transport.device)
        self.mask = self._words[: runtime.num_ranks]
        self.status = torch.zeros(_STATUS_WORDS, dtype=torch.int32, device="cpu", **pinned)
        self._view, self.raises, self._timeout = self.status.numpy().data, raises, runtime.timeout
        self._transport, self._num_exchanges = runtime.transport, 0

    def count_exchange(self) -> int:
        """Return the number of another exchange."""
        self._num_exchanges += 1
        return self._num_exchanges

    def masked_ranks(self) -> list[int]:
        """Return the ranks that are masked; waits for the current stream."""
        return self.mask.nonzero().flatten().tolist()

    def check(self) -> None:
        """Raise the first timeout, unless timeouts only mark ranks."""
        if self._view[0] and self.raises:
            code, rank, peer, token = self._view[:4]
            reason = self._transport.describe(peer)
            if peer == rank:  # it sends to itself without waiting for another
                reason = "; no rank is late, the timeout is too short for this call"
            raise TimeoutError(
                f"{MESSAGES[code].format(rank=rank, peer=peer, token=token)}, longer than "
                f"{format_seconds(self._timeout)}{reason}. Rows that did not arrive are NaN; low-latency calls go on "
                "only in a buffer with enable_shrink"
            )

    def clear(self) -> None:
        """Forget all timeouts."""
        self._words.zero_()
        self.status.zero_()
