"""``OneKernel``: the experts of a layer on several GPUs, whose rows travel in the order of the experts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, per_token_cast_to_fp8
from moe_numba.expert_parallel.low_latency.exchange import gpu_key
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.expert_parallel.ranks.events import is_capturing
from moe_numba.grouped_gemm.block_scaled.config import BOX_ROWS
from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, THREADS
from moe_numba.moe_layer.expert_parallel.one_kernel import counts, kernel
from moe_numba.moe_layer.expert_parallel.one_kernel.exchange import Exchange
from moe_numba.moe_layer.expert_parallel.one_kernel.sizes import WARP, Sizes
from moe_numba.moe_layer.group_by_expert.api import group_by_expert
from moe_numba.moe_layer.module import Experts
from moe_numba.moe_layer.weighted_sum.api import weighted_sum
from moe_numba.moe_layer.weights import BF16, FP8_BLOCK, shape_of
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.device import UnsupportedDeviceError, gpu_of, persistent_ctas
from moe_numba.runtime.tensor_map import tensor_map_template
from moe_numba.runtime.validate import check_int, check_tensor

FP8 = torch.float8_e4m3fn


class OneKernel:
    """The experts of a layer on several ranks, between two small launches in one persistent kernel.

    A row is sent once for each of its token's experts, straight to its place among the expert's rows. An expert is
    computed as soon as its rows are there, and the second GEMM stores its rows at the rank that has the token. Each
    rank adds up the rows of its own tokens, in the order of ``topk_ids``, in float32, and rounds once; so results are
    bit-identical from run to run. Launches: for FP8 the cast, the order of the rows (`group_by_expert`), the exchange
    of counts, the kernel, and the sum.

    Parameters
    ----------
    buffer : moe_numba.Buffer
        Its group, timeout and error messages are used, and not its rings.
    experts : Experts
        This rank's; with silu, in bfloat16 or in FP8 with block scales, without biases. Hidden and intermediate sizes
        are multiples of 128.
    topk, max_tokens : int
        Of a call, the same on all ranks.
    num_sms : int, optional
        CTAs of the kernel, which must all be resident: by default one for each SM, shared by the ranks of a GPU.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or differs between ranks; the message names it.
    UnsupportedDeviceError
        If the GPU is not of compute capability 9.0.

    Notes
    -----
    A rank shares ``ranks * max_tokens * topk`` rows of its format and ``max_tokens * topk`` rows of bfloat16 with the
    others, and has as many rows of the activations. Layers of a buffer with the same sizes use the same memory, so
    their calls must not overlap; on one stream they do not.
    """

    formats = FP8_BLOCK, BF16

    def __init__(self, buffer: Buffer, experts: Experts, topk: int, max_tokens: int, num_sms: int | None = None):
        check_experts(experts, self.formats, type(self).__name__)
        topk, max_tokens = check_int("topk", topk, 1), check_int("max_tokens", max_tokens, 1)
        runtime, (_, hidden, intermediate) = buffer._runtime, sizes_of(experts)
        if num_sms is None:
            num_sms = self._all_sms(buffer)
        self.num_sms, is_fp8 = check_int("num_sms", num_sms, 1), experts.format == FP8_BLOCK
        row_words, scale_words = (hidden // 4, hidden // FP8_SCALE_BLOCK) if is_fp8 else (hidden // 2, 0)
        of_layer = buffer.group_size, len(experts.w13), hidden, topk, max_tokens
        self.sizes = Sizes(*of_layer, row_words, scale_words, 2 if simulator.ENABLED else 8)
        self.experts, self.runtime, self.rank = experts, runtime, runtime.rank
        runtime.check_alive()
        if is_capturing():
            raise RuntimeError(
                "the first call of experts in one kernel allocates memory and compiles; call the layer once before a "
                "CUDA graph captures it"
            )
        key = type(self), self.sizes, intermediate
        if key not in runtime.exchanges:
            definitions = self._definitions(self.sizes, intermediate)
            runtime.exchanges[key] = Exchange(runtime, type(self).__name__, self.sizes, intermediate, definitions)
        self._key, self.exchange = key, runtime.exchanges[key]
        self.exchange.users += 1
        self._prepare()

    @staticmethod
    def _all_sms(buffer):
        device = buffer.transport.device
        sharing = buffer.transport.gather(gpu_key(device))
        return persistent_ctas(device, 1) // sharing.count(gpu_key(device))

    def _prepare(self):
        block_k = BLOCK_K_BYTES // self.exchange.x.itemsize
        boxes = (BOX_ROWS,), (1, kernel.COLUMNS), (BOX_ROWS,), (1, kernel.COLUMNS)
        self._templates = [
            tensor_map_template(tensor, (*box, block_k), swizzle=128, name=name)
            for (name, tensor), box in zip(self._mapped().items(), boxes, strict=True)
        ]

    def _mapped(self):
        """Return what TMA loads; a call asks again, since the experts' weights may lie elsewhere by then."""
        given, exchange = self.experts, self.exchange
        return dict(rows=exchange.x, w13=given.w13, activated=exchange.activated, w2=given.w2)

    def _definitions(self, sizes: Sizes, intermediate: int) -> Sequence[KernelDefinition]:
        """Return the kernels of a call that wait for other ranks."""
        check_gpu(self.runtime.transport.device)
        return kernels_of(sizes, intermediate)

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
        sizes, exchange = self.sizes, self.exchange
        check_tensor("x", x, dtype=torch.bfloat16, shape=("tokens", sizes.hidden))
        check_int("x's number of tokens", len(x), 0, sizes.max_tokens)
        check_tensor("topk_ids", topk_ids, dtype=(torch.int32, torch.int64), shape=(len(x), sizes.topk))
        check_tensor("topk_weights", topk_weights, dtype=torch.float32, shape=(len(x), sizes.topk))
        self.runtime.check_alive()
        routing = empty_routing(topk_ids, sizes.all_experts)
        _, first_rows, tokens_of_rows, places = routing
        launches: dict[str, Callable[[], Any]] = {}
        rows, scales = x, None
        if exchange.x_scale is not None:
            rows = torch.empty_like(x, dtype=FP8)
            scales = torch.empty(len(x), sizes.scale_words, dtype=torch.float32, device=x.device)
            launches["cast"] = partial(per_token_cast_to_fp8, x, out=(rows, scales))
        launches["order"] = partial(group_by_expert, topk_ids, sizes.all_experts, out=routing)
        counted = first_rows, exchange.lengths, exchange.starts, exchange.places, exchange.done
        launches["exchange counts"] = partial(exchange.start, "make_exchange_counts", 1, *counted)
        launches |= self._compute(rows, scales, tokens_of_rows, first_rows)
        launches["sum"] = partial(weighted_sum, exchange.back, places, topk_weights, out=out)
        return launches

    def _compute(self, rows, scales, tokens_of_rows, first_rows):
        """Return the launches between the exchange of counts and the sum."""
        given, exchange = self.experts, self.exchange
        tensors = exchange.activated, exchange.activated_scale, exchange.x_scale, given.w13_scale, given.w2_scale
        tensors = *tensors, exchange.lengths, exchange.starts, exchange.done
        tensors = *tensors, rows, scales, tokens_of_rows, first_rows, exchange.places
        maps = [make(tensor) for make, tensor in zip(self._templates, self._mapped().values(), strict=True)]
        return {"one kernel": partial(exchange.start, "make_one_kernel", self.num_sms, *tensors, maps=maps)}

    def close(self) -> None:
        """Free the shared memory if no other layer uses it; all ranks must call it."""
        if self._key in self.runtime.exchanges and self.exchange.users:
            self.exchange.users -= 1
            if not self.exchange.users:
                self.runtime.exchanges.pop(self._key).close()


def kernels_of(sizes: Sizes, intermediate: int) -> Sequence[KernelDefinition]:
    """Return the kernels of a call that wait for other ranks: the exchange of counts, and the one kernel."""
    pieces, (_, shared_bytes) = kernel.columns_tiles(sizes), kernel.make_kernel(sizes, intermediate)
    of_counts = (sizes, pieces), counts.COUNTS_SIGNATURE, WARP * sizes.ranks
    return (
        KernelDefinition(counts.make_exchange_counts, *of_counts),
        KernelDefinition(kernel.make_one_kernel, (sizes, intermediate), kernel.SIGNATURE, THREADS, shared_bytes),
    )


def check_gpu(device: torch.device) -> None:
    """Raise for a GPU without wgmma."""
    gpu = gpu_of(device)
    if not gpu.has_wgmma:
        found = "{} has compute capability {}.{}".format(gpu.name, *gpu.capability)
        raise UnsupportedDeviceError(f"{found}; experts in one kernel need 9.0 (wgmma): use fused=False")


def check_experts(experts: Experts, formats: Sequence[str], name: str) -> None:
    """Raise ValueError for experts that the kernels cannot compute."""
    if experts.format not in formats or experts.w13_bias is not None or not experts.activation.is_plain:
        wanted = " or ".join(formats)
        raise ValueError(f"experts have the format {experts.format}, biases or no silu; {name} needs {wanted} and silu")
    if experts.reference:
        raise ValueError(f"experts.reference is {sorted(experts.reference)}; {name} has no stages in torch")
    _, hidden, intermediate = sizes_of(experts)
    if hidden % 128 or intermediate % 128:
        raise ValueError(f"experts have hidden {hidden} and intermediate {intermediate}; both must be multiples of 128")


def sizes_of(experts: Experts) -> tuple[int, int, int]:
    """Return number, hidden and intermediate size of experts."""
    shape = shape_of(experts.w13, experts.w2, experts.format)
    return len(experts.w13), shape.hidden, shape.intermediate


def empty_routing(
    topk_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tensors for the results of `group_by_expert`."""
    empty = partial(torch.empty, dtype=torch.int32, device=topk_ids.device)
    return empty(num_experts), empty(num_experts + 1), empty(topk_ids.numel()), empty(topk_ids.shape)
