"""A layer of launches whose rows travel in the order of the experts: what one kernel then does at the same time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.course.lessons.one_kernel import kernels
from moe_numba.course.lessons.one_kernel.sizes import WARP, Sizes
from moe_numba.expert_parallel import Buffer, per_token_cast_to_fp8
from moe_numba.expert_parallel.common.buffer_layout import NUM_RANKS
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.expert_parallel.ranks.transport import check_same_on_all_ranks
from moe_numba.expert_parallel.rings.launch_plans import Kernel, load
from moe_numba.grouped_gemm.call.plan import group_gemm
from moe_numba.moe_layer.group_by_expert.api import group_by_expert
from moe_numba.moe_layer.module import Experts
from moe_numba.moe_layer.weighted_sum.api import weighted_sum
from moe_numba.moe_layer.weights import BF16, FP8_BLOCK, shape_of
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.launch import address
from moe_numba.runtime.validate import check_int, check_tensor

FP8 = torch.float8_e4m3fn


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
        row_words, scales = (hidden // 4, -(-hidden // FP8_SCALE_BLOCK)) if is_fp8 else (hidden // 2, 0)
        warps = 2 if simulator.ENABLED else 8
        self.sizes = Sizes(
            buffer.group_size, len(experts.w13), hidden, topk, max_tokens, row_words, scales * is_fp8, warps
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
        self._kernels = {
            make.__name__: Kernel(self, KernelDefinition(make, (self.sizes,), signature, threads))
            for make, signature, threads in (
                (kernels.make_exchange_counts, kernels.COUNTS_SIGNATURE, WARP * self.sizes.ranks),
                (kernels.make_push_rows, kernels.PUSH_SIGNATURE, WARP * self.sizes.warps),
                (kernels.make_return_rows, kernels.RETURN_SIGNATURE, WARP * self.sizes.warps),
            )
        }
        runtime.synchronize()
        self.transport.gather(None)  # before a peer writes, the memory is cleared
        load(self, list(self._kernels.values()))

    def _allocate(self, local, is_fp8, device):
        """Make views of the shared memory, and allocate what a rank has for itself."""
        sizes = self.sizes
        section = lambda at, *shape: local[at : at + shape[0] * shape[1]].view(shape)
        rows = section(sizes.rows, sizes.capacity, sizes.row_words)
        self.x = rows.view(FP8 if is_fp8 else torch.bfloat16)
        self.x_scale = section(sizes.scales, sizes.capacity, sizes.scale_words).view(torch.float32) if is_fp8 else None
        self.back = section(sizes.back, sizes.assignments, sizes.hidden // 2).view(torch.bfloat16)
        empty = partial(torch.empty, dtype=torch.int32, device=device)
        self.lengths, self.starts = empty(sizes.experts), empty(sizes.experts + 1)
        self.places = empty(sizes.all_experts)
        intermediate = self.experts.w2.shape[2]
        activated = empty(0, dtype=FP8 if is_fp8 else torch.bfloat16).new_empty(sizes.capacity, intermediate)
        scale = empty(sizes.capacity, -(-intermediate // FP8_SCALE_BLOCK), dtype=torch.float32)
        self.activated = (activated, scale) if is_fp8 else activated
        self.rows = empty(sizes.capacity, sizes.hidden, dtype=torch.bfloat16)

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Compute the experts of this rank's tokens; parameters and result as of ``ExpertParallelMoE``."""
        out = torch.empty_like(x)
        for launch in self.launches(x, topk_weights, topk_ids, out).values():
            launch()
        return out

    def launches(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor
    ) -> dict[str, Callable[[], Any]]:
        """Return {name: launch} of a call, in order; all ranks must make the same ones in the same order."""
        sizes, given = self.sizes, self.experts
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
        start = lambda name, grid, *tensors: self._kernels[f"make_{name}"](grid, *self.runtime.pointers(*tensors))
        counted = self.lengths, self.starts
        launches["exchange counts"] = partial(start, "exchange_counts", 1, first_rows, *counted, self.places)
        sent = rows, scales, tokens_of_rows, first_rows, self.places
        launches["push rows"] = partial(start, "push_rows", self.num_sms, *sent)
        average = max(1, sizes.assignments // sizes.experts)
        multiply = partial(group_gemm, "none" if scales is None else "block", seqlens=self.lengths)
        multiply = partial(multiply, cu_seqlens=self.starts, num_seq_per_group_avg=average)
        scaled = lambda name, value: {} if value is None else {name: value}
        first = dict(
            x=self.x, weight=given.w13, **scaled("x_scale", self.x_scale), **scaled("w_scale", given.w13_scale)
        )
        launches["gate and up"] = partial(multiply, out=self.activated, silu_and_mul=True, **first)
        activated, scale = self.activated if scales is not None else (self.activated, None)
        second = dict(x=activated, weight=given.w2, **scaled("x_scale", scale), **scaled("w_scale", given.w2_scale))
        launches["down"] = partial(multiply, out=self.rows, **second)
        launches["return rows"] = partial(start, "return_rows", self.num_sms, self.rows, self.starts)
        launches["sum"] = partial(weighted_sum, self.back, places, topk_weights, out=out)
        return launches

    def close(self) -> None:
        """Free the shared memory; all ranks must call it."""
        if self.shared is not None:
            self.runtime.close_memory(self.shared)
            self.shared = None
