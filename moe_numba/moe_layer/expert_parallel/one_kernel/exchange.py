"""Memory of a rank for experts in one kernel, and the kernels that wait for other ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from moe_numba.expert_parallel.common.buffer_layout import NUM_RANKS
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.expert_parallel.ranks.rank_state import RankState
from moe_numba.expert_parallel.ranks.transport import check_same_on_all_ranks
from moe_numba.expert_parallel.rings.launch_plans import Kernel, load
from moe_numba.moe_layer.expert_parallel.one_kernel.sizes import Sizes
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.launch import address

MAX_WORDS = (1 << 31) - 1  # offsets in the shared memory are 32-bit integers


class Exchange:
    """What layers with the same sizes share: memory to which other ranks write, counters, and kernels.

    Layers of a model run one after another, so one exchange serves all of them.

    Parameters
    ----------
    runtime : RankState
    name : str
        Of the layer's class, for messages.
    sizes : Sizes
        The same on all ranks.
    intermediate : int
    definitions : sequence of KernelDefinition
        Kernels that wait for other ranks: all ranks compile them before one launches them.

    Attributes
    ----------
    x, x_scale : tensors [capacity, hidden] and [capacity, hidden / 128]
        Rows that have arrived; scales of FP8 rows, or None.
    back : tensor [max_tokens * topk, hidden], bfloat16
        Rows of this rank's tokens that have come back.
    lengths, starts : int32 tensors [experts] and [experts + 1]
        Rows that this rank's experts have in this call.
    places : int32 tensor [all experts]
        Where this rank's rows for an expert begin, in the memory of the rank that has it.
    done : int32 tensor [experts + 1]
        Counts each expert's finished tiles and, in its last element, how often CTAs have asked for another tile.
    activated, activated_scale : tensors [capacity, intermediate] and [capacity, intermediate / 128]
    users : int
        Layers.
    """

    def __init__(
        self, runtime: RankState, name: str, sizes: Sizes, intermediate: int, definitions: Sequence[KernelDefinition]
    ):
        if sizes.words > MAX_WORDS:
            raise ValueError(
                f"max_tokens is {sizes.max_tokens}: with {sizes.ranks} ranks and topk {sizes.topk} a rank shares "
                f"{4 * sizes.words} bytes; {4 * MAX_WORDS} are allowed"
            )
        check_same_on_all_ranks(runtime.transport, name, **sizes._asdict())
        self.runtime, self.sizes, self.users = runtime, sizes, 0
        self.transport, self.rank, self.timeout = runtime.transport, runtime.rank, runtime.timeout
        self.with_compilers_of_all_ranks = runtime.with_compilers_of_all_ranks
        self.shared: Any = self.transport.allocate(4 * sizes.words)
        local = self.shared.local.view(torch.int32)
        self.state = torch.zeros(sizes.state_words, dtype=torch.int32, device=self.transport.device)
        self.state[NUM_RANKS] = sizes.ranks
        local[: sizes.rows].zero_()
        self._common_arguments = tuple(map(address, (local, self.shared.addresses, self.state, runtime._status)))
        self._make_views(local, intermediate)
        self._kernels = {definition.make.__name__: Kernel(self, definition) for definition in definitions}
        runtime.synchronize()
        self.transport.gather(None)  # before a peer writes, the memory is cleared
        load(self, list(self._kernels.values()))

    def _make_views(self, local, intermediate):
        """Make views of the shared memory, and allocate what only this rank uses."""
        sizes, is_fp8 = self.sizes, self.sizes.scale_words > 0
        dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
        section = lambda at, *shape: local[at : at + shape[0] * shape[1]].view(shape)
        self.x = section(sizes.rows, sizes.capacity, sizes.row_words).view(dtype)
        self.back = section(sizes.back, sizes.assignments, sizes.hidden // 2).view(torch.bfloat16)
        empty = partial(torch.empty, dtype=torch.int32, device=self.transport.device)
        self.lengths, self.starts = empty(sizes.experts), empty(sizes.experts + 1)
        self.places, self.done = empty(sizes.all_experts), empty(sizes.experts + 1)
        self.activated, self.activated_scale = empty(sizes.capacity, intermediate, dtype=dtype), None
        self.x_scale = None
        if is_fp8:
            self.x_scale = section(sizes.scales, sizes.capacity, sizes.scale_words).view(torch.float32)
            self.activated_scale = empty(sizes.capacity, intermediate // FP8_SCALE_BLOCK, dtype=torch.float32)

    def start(self, make: str, grid: int, *tensors: torch.Tensor | None, maps: Sequence[Any] = ()) -> None:
        """Launch the kernel of a definition's ``make``, with tensor maps and, behind them, pointers to tensors."""
        self._kernels[make](grid, *maps, *self.runtime.pointers(*tensors))

    def close(self) -> None:
        """Free the shared memory; all ranks must call it."""
        if self.shared is not None:
            self.runtime.close_memory(self.shared)
            self.shared = None
