"""A layer of launches whose rows travel in the order of the experts: what one kernel then does at the same time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.course.lessons.one_kernel import kernel, kernels
from moe_numba.course.lessons.one_kernel.sizes import WARP, Sizes
from moe_numba.expert_parallel import Buffer, per_token_cast_to_fp8
from moe_numba.expert_parallel.common.buffer_layout import NUM_RANKS
from moe_numba.expert_parallel.low_latency.exchange import gpu_key
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.expert_parallel.ranks.transport import check_same_on_all_ranks
from moe_numba.expert_parallel.rings.launch_plans import Kernel, load
from moe_numba.grouped_gemm.block_scaled.config import BOX_ROWS
from moe_numba.grouped_gemm.call.plan import group_gemm
from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, THREADS
from moe_numba.moe_layer.group_by_expert.api import group_by_expert
from moe_numba.moe_layer.module import Experts
from moe_numba.moe_layer.weighted_sum.api import weighted_sum
from moe_numba.moe_layer.weights import BF16, FP8_BLOCK, shape_of
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.device import persistent_ctas
from moe_numba.runtime.launch import address
from moe_numba.runtime.tensor_map import tensor_map_template
from moe_numba.runtime.validate import check_int, check_tensor

FP8 = torch.float8_e4m3fn
MAX_WORDS = (1 << 31) - 1  # offsets in the shared memory are 32-bit integers


class ExpertOrder:
    """The experts of a layer on several ranks: dispatch in the order of the experts, two grouped GEMMs, and the sum.

    A row is sent once for each of its token's experts. Each rank adds up the rows of its own tokens, in the order of
    ``topk_ids``, in float32, and rounds once.

    Parameters
    ----------
    buffer : moe_numba.Buffer
        Its group, timeout and error messages are used, and not its rings.
    experts : Experts
        This rank's; with silu, in bfloat16 or in FP8 with block scales, without biases.
    topk, max_tokens : int
        Of a call, the same on all ranks.
    num_sms : int
        CTAs that move rows.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or differs between ranks; the message names it.
    """

    def __init__(self, buffer: Buffer, experts: Experts, topk: int, max_tokens: int, num_sms: int = 24):
        if experts.format not in (BF16, FP8_BLOCK) or experts.w13_bias is not None or not experts.activation.is_plain:
            raise ValueError("experts have another format than bfloat16 and FP8 with block scales, biases or no silu")
        runtime, hidden = buffer._runtime, shape_of(experts.w13, experts.w2, experts.format).hidden
        topk, max_tokens = check_int("topk", topk, 1), check_int("max_tokens", max_tokens, 1)
        self.num_sms, is_fp8 = check_int("num_sms", num_sms, 1), experts.format == FP8_BLOCK
        row_words, scale_words = (hidden // 4, -(-hidden // FP8_SCALE_BLOCK)) if is_fp8 else (hidden // 2, 0)
        warps = 2 if simulator.ENABLED else 8
        of_layer = buffer.group_size, len(experts.w13), hidden, topk, max_tokens
        self.sizes = Sizes(*of_layer, row_words, scale_words, warps)
        if self.sizes.words > MAX_WORDS:
            raise ValueError(
                f"max_tokens is {max_tokens}: with {buffer.group_size} ranks and topk {topk} a rank shares "
                f"{4 * self.sizes.words} bytes; {4 * MAX_WORDS} are allowed"
            )
        self.experts, self.runtime, self.transport = experts, runtime, runtime.transport
        self.rank, self.timeout, device = runtime.rank, runtime.timeout, runtime.transport.device
        check_same_on_all_ranks(self.transport, "ExpertOrder", **self.sizes._asdict())
        self.with_compilers_of_all_ranks = runtime.with_compilers_of_all_ranks
        self.shared: Any = self.transport.allocate(4 * self.sizes.words)
        local = self.shared.local.view(torch.int32)
        self.state = torch.zeros(self.sizes.state_words, dtype=torch.int32, device=device)
        self.state[NUM_RANKS] = self.sizes.ranks
        local[: self.sizes.rows].zero_()
        self._common_arguments = tuple(map(address, (local, self.shared.addresses, self.state, runtime._status)))
        self._allocate(local, is_fp8, device)
        self._kernels = {definition.make.__name__: Kernel(self, definition) for definition in self._definitions()}
        runtime.synchronize()
        self.transport.gather(None)  # before a peer writes, the memory is cleared
        load(self, list(self._kernels.values()))

    def _definitions(self):
        """Return the kernels of a call that wait for other ranks."""
        of = (self.sizes,)
        return (
            KernelDefinition(kernels.make_exchange_counts, of, kernels.COUNTS_SIGNATURE, WARP * self.sizes.ranks),
            KernelDefinition(kernels.make_push_rows, of, kernels.PUSH_SIGNATURE, WARP * self.sizes.warps),
            KernelDefinition(kernels.make_return_rows, of, kernels.RETURN_SIGNATURE, WARP * self.sizes.warps),
        )

    def _allocate(self, local, is_fp8, device):
        """Make views of the shared memory, and allocate what only this rank uses."""
        sizes = self.sizes
        section = lambda at, *shape: local[at : at + shape[0] * shape[1]].view(shape)
        rows = section(sizes.rows, sizes.capacity, sizes.row_words)
        self.x = rows.view(FP8 if is_fp8 else torch.bfloat16)
        self.x_scale = section(sizes.scales, sizes.capacity, sizes.scale_words).view(torch.float32) if is_fp8 else None
        self.back = section(sizes.back, sizes.assignments, sizes.hidden // 2).view(torch.bfloat16)
        empty = partial(torch.empty, dtype=torch.int32, device=device)
        self.lengths, self.starts = empty(sizes.experts), empty(sizes.experts + 1)
        self.places, self.done = empty(sizes.all_experts), empty(sizes.experts)
        intermediate = self.experts.w2.shape[2]
        self.activated = empty(sizes.capacity, intermediate, dtype=FP8 if is_fp8 else torch.bfloat16)
        if is_fp8:
            scales = empty(sizes.capacity, -(-intermediate // FP8_SCALE_BLOCK), dtype=torch.float32)
            self.activated = self.activated, scales
        self.rows: torch.Tensor | None = None  # of the second GEMM, which one kernel stores where they belong

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Compute the experts of this rank's tokens; parameters and result as of ``ExpertParallelMoE``."""
        out = torch.empty_like(x)
        for launch in self.launches(x, topk_weights, topk_ids, out).values():
            launch()
        if simulator.ENABLED:  # where kernels of ranks run when all of them wait
            self.runtime.synchronize()
        return out

    def launches(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor
    ) -> dict[str, Callable[[], Any]]:
        """Return {name: launch} of a call, in order; all ranks must make the same ones in the same order."""
        sizes = self.sizes
        check_tensor("x", x, dtype=torch.bfloat16, shape=("tokens", sizes.hidden))
        check_int("x's number of tokens", len(x), 0, sizes.max_tokens)
        check_tensor("topk_ids", topk_ids, dtype=(torch.int32, torch.int64), shape=(len(x), sizes.topk))
        check_tensor("topk_weights", topk_weights, dtype=torch.float32, shape=(len(x), sizes.topk))
        self.runtime.check_alive()
        routing = [
            torch.empty(size, dtype=torch.int32, device=x.device)
            for size in (sizes.all_experts, sizes.all_experts + 1, topk_ids.numel(), topk_ids.shape)
        ]
        _, first_rows, tokens_of_rows, places = routing
        launches: dict[str, Callable[[], Any]] = {}
        rows, scales = x, None
        if self.x_scale is not None:
            rows = torch.empty_like(x, dtype=FP8)
            scales = torch.empty(len(x), sizes.scale_words, dtype=torch.float32, device=x.device)
            launches["cast"] = partial(per_token_cast_to_fp8, x, out=(rows, scales))
        launches["order"] = partial(group_by_expert, topk_ids, sizes.all_experts, out=routing)
        counted = first_rows, self.lengths, self.starts, self.places, self.done
        launches["exchange counts"] = partial(self._start, "exchange_counts", 1, *counted)
        launches |= self._compute(rows, scales, tokens_of_rows, first_rows)
        launches["sum"] = partial(weighted_sum, self.back, places, topk_weights, out=out)
        return launches

    def _start(self, name, grid, *tensors):
        self._kernels[f"make_{name}"](grid, *self.runtime.pointers(*tensors))

    def _compute(self, rows, scales, tokens_of_rows, first_rows):
        """Return the launches between the exchange of counts and the sum."""
        given, scaled = self.experts, lambda name, value: {} if value is None else {name: value}
        sent = rows, scales, tokens_of_rows, first_rows, self.places
        if self.rows is None:
            self.rows = torch.empty(self.sizes.capacity, self.sizes.hidden, dtype=torch.bfloat16, device=self.x.device)
        average = max(1, self.sizes.assignments // self.sizes.experts)
        multiply = partial(group_gemm, "none" if scales is None else "block", seqlens=self.lengths)
        multiply = partial(multiply, cu_seqlens=self.starts, num_seq_per_group_avg=average)
        first = dict(
            x=self.x, weight=given.w13, **scaled("x_scale", self.x_scale), **scaled("w_scale", given.w13_scale)
        )
        activated, scale = self.activated if scales is not None else (self.activated, None)
        second = dict(x=activated, weight=given.w2, **scaled("x_scale", scale), **scaled("w_scale", given.w2_scale))
        return {
            "push rows": partial(self._start, "push_rows", self.num_sms, *sent),
            "gate and up": partial(multiply, out=self.activated, silu_and_mul=True, **first),
            "down": partial(multiply, out=self.rows, **second),
            "return rows": partial(self._start, "return_rows", self.num_sms, self.rows, self.starts),
        }

    def close(self) -> None:
        """Free the shared memory; all ranks must call it."""
        if self.shared is not None:
            self.runtime.close_memory(self.shared)
            self.shared = None


class OneKernel(ExpertOrder):
    """The same with one launch between the exchange of counts and the sum; experts in FP8 with block scales.

    Parameters as of :class:`ExpertOrder`; ``num_sms`` is the number of CTAs, which must all be resident: by default one
    for each SM, shared by the ranks of a GPU. Hidden and intermediate sizes are multiples of 128.
    """

    def __init__(self, buffer: Buffer, experts: Experts, topk: int, max_tokens: int, num_sms: int | None = None):
        if experts.format != FP8_BLOCK:
            raise ValueError(f"experts have the format {experts.format}; OneKernel needs FP8 with block scales")
        shape = shape_of(experts.w13, experts.w2, experts.format)
        if shape.hidden % FP8_SCALE_BLOCK or shape.intermediate % FP8_SCALE_BLOCK:
            raise ValueError(f"experts have the shape {shape}; hidden and intermediate must be multiples of 128")
        self.intermediate, device = shape.intermediate, buffer.transport.device
        if num_sms is None:
            sharing = buffer.transport.gather(gpu_key(device))
            num_sms = persistent_ctas(device, 1) // sharing.count(gpu_key(device))
        super().__init__(buffer, experts, topk, max_tokens, num_sms)
        self._maps = [
            tensor_map_template(tensor, box, swizzle=128, name=name)(tensor)
            for name, tensor, box in (
                ("rows", self.x, (BOX_ROWS, BLOCK_K_BYTES)),
                ("w13", experts.w13, (1, kernel.COLUMNS, BLOCK_K_BYTES)),
                ("activated", self.activated[0], (BOX_ROWS, BLOCK_K_BYTES)),
                ("w2", experts.w2, (1, kernel.COLUMNS, BLOCK_K_BYTES)),
            )
        ]

    def _definitions(self):
        pieces, one_kernel = kernel.columns_tiles(self.sizes), kernel.make_kernel(self.sizes, self.intermediate)
        counts = kernels.make_exchange_counts, (self.sizes, pieces), kernels.COUNTS_SIGNATURE, WARP * self.sizes.ranks
        constants = self.sizes, self.intermediate
        return (
            KernelDefinition(*counts),
            KernelDefinition(kernel.make_one_kernel, constants, kernel.SIGNATURE, THREADS, one_kernel[1]),
        )

    def _compute(self, rows, scales, tokens_of_rows, first_rows):
        given, (activated, scale) = self.experts, self.activated
        tensors = activated, scale, self.x_scale, given.w13_scale, given.w2_scale, self.lengths, self.starts, self.done
        tensors = *tensors, rows, scales, tokens_of_rows, first_rows, self.places
        start = self._kernels["make_one_kernel"]
        return {"one kernel": lambda: start(self.num_sms, *self._maps, *self.runtime.pointers(*tensors))}
