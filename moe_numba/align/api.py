"""Public function of the alignment: checks its arguments, chooses a kernel and launches it."""

import math
from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.align import counting_sort, device_functions, large, medium, one_expert_per_warp, pairwise, small
from moe_numba.align.reference import sizes
from moe_numba.runtime import device as devices
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import (
    UnsupportedDeviceError,
    check_device,
    check_flag,
    check_int,
    check_out_tuple,
    check_tensor,
    make_outputs,
    reasons,
)
from moe_numba.runtime.workspace import workspace

MAP_TYPES = {torch.int32: "int32*", torch.int64: "int64*"}
ID_TYPES = {torch.uint8: "uint8*", torch.int16: "int16*"} | MAP_TYPES
_MAX_EXPERTS = small.DROP_BUCKET - 1
_MAX_COUNTED_EXPERTS = 8192  # beyond, shared memory cannot hold a count per expert
_MAX_ELEMENTS = (1 << 31) - 1
MAX_NARROW_ELEMENTS = 1 << 30  # beyond, the counting sort has 64-bit row numbers; all other kernels stay below

# The kernel with one expert per warp serves the numbers of slots FEW_SLOTS, up to 541 experts. Otherwise the small
# kernel serves up to SMALL_MAX_SLOTS slots, the medium kernel up to MEDIUM_MAX_SLOTS. Beyond, the exchange of counts in
# the large kernel costs less than counting all slots in every CTA. Beyond LARGE_MAX_SLOTS so many CTAs take part that a
# second exchange costs less than adding up all counts in every CTA.
FEW_SLOTS = range(17, 513)
SMALL_MAX_SLOTS = small.MAX_SLOTS
MEDIUM_MAX_SLOTS = 16384
LARGE_MAX_SLOTS, LARGE_MAX_CAPACITY = 1 << 18, 1056  # with more buckets, a CTA has no room for counters of each warp


class FewConfig(NamedTuple):
    """Launch configuration of the kernel with one expert per warp."""

    threads: int
    max_ctas: int


class MediumConfig(NamedTuple):
    """Launch configuration of the medium kernel for up to ``max_slots`` slots."""

    max_slots: int
    threads: int
    batch: int  # ids that a thread loads at once
    ctas: int


class LargeConfig(NamedTuple):
    """Launch configuration of the large kernel."""

    threads: int
    slots_per_thread: int  # per sorted tile
    max_ctas: int


_FEW_CONFIG = FewConfig(256, 1 << 31)
_MEDIUM_CONFIGS: tuple[MediumConfig, ...] = (
    MediumConfig(1024, 512, 2, 64),
    MediumConfig(8192, 512, 8, 64),
    MediumConfig(1 << 31, 1024, 8, 128),
)
# The first one whose shared memory the GPU has; all have fewer threads than the one before.
_LARGE_CONFIGS = tuple(LargeConfig(threads, 8, 128) for threads in (512, 256, 128))
if simulator.ENABLED:  # fewer threads, since the simulator runs them one after another
    _FEW_CONFIG = FewConfig(64, 3)
    _MEDIUM_CONFIGS, _LARGE_CONFIGS = (MediumConfig(1 << 31, 64, 2, 3),), (LargeConfig(64, 2, 8),)

_plans: dict = {}


@torch_op()
def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = True,
    ignore_invalid_experts: bool = False,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort (token, choice) slots by expert and pad each expert to whole blocks, in one launch.

    A slot is an element of ``topk_ids`` (an assignment in :func:`moe_numba.group_by_expert`), numbered in row-major
    order. Slots of one expert stay in ascending order. Every element of the outputs is defined, so the outputs are
    bit-identical from run to run.

    Parameters
    ----------
    topk_ids : tensor of uint8, int16, int32 or int64, any shape
        Expert of each slot. Ids outside 0..num_experts-1 are invalid. A non-contiguous tensor is copied first.
    block_size : int
        Rows per block, which is the tile height of the grouped GEMM that follows; 1 or more.
    num_experts : int
        Number of experts that ``topk_ids`` refers to; with an ``expert_map``, the experts of all ranks. 1 to 8192; up
        to 2**30 - 1 if ``topk_ids`` has at most 1024 elements.
    expert_map : tensor [num_experts] of int32 or int64, optional
        For expert parallelism: the local id of each expert, 0 to the number of local experts - 1, or -1 for experts of
        other ranks. ``expert_ids`` are then local ids. The simulator refuses other values. A GPU does not check them:
        they cause no access out of bounds here, but are stored in ``expert_ids`` as they are, and negative ones count
        as experts of other ranks. An element that int32 cannot hold counts as -1.
    pad_sorted_ids : bool
        Round the length of ``sorted_token_ids`` up to whole blocks.
    ignore_invalid_experts : bool
        Drop slots that are invalid or whose expert is on another rank. Otherwise invalid slots come first, in blocks of
        expert -1, and experts of other ranks keep their blocks, also with expert -1.
    out : (sorted_token_ids, expert_ids, num_tokens_post_pad), optional
        Contiguous int32 tensors to write into, at least as long as the returned ones would be; they must overlap
        neither an input nor each other. The call then neither allocates nor synchronises, except that the first call
        on a stream may allocate a workspace (see Notes).

    Returns
    -------
    sorted_token_ids : tensor of int32
        Slots by expert. Padding and the unused tail are ``topk_ids.numel()``. The length depends only on shapes:
        ``numel + buckets * (block_size - 1)``, where buckets is num_experts + 1 (num_experts if invalid slots are
        ignored). With fewer slots than buckets it is at most ``numel * block_size``. It may not exceed 2**31 - 1.
    expert_ids : tensor of int32
        Expert of each block; -1 in the unused tail.
    num_tokens_post_pad : tensor [1] of int32
        Used length of ``sorted_token_ids``, including padding.
        All outputs are in the library of ``topk_ids``: torch, or CuPy through DLPack.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5, or has too little shared memory for ``num_experts``.

    Notes
    -----
    Named after the function of SGLang and vLLM. The kernel runs on the caller's current stream. A CUDA graph can
    capture the call once a call of this size has compiled its kernel. Up to 16384 slots (8192 for more than 1053
    experts; fewer on GPUs with few SMs or little shared memory) the CTAs are independent. Beyond, they exchange counts
    through a workspace per stream and capture (for 256 experts 150 KB, beyond 262144 slots 600 KB).

    Examples
    --------
    Three tokens with two experts each. Blocks have 4 rows of an expert; 6, the number of slots, is padding:

    >>> topk_ids = torch.tensor([[0, 2], [2, 0], [1, 2]], dtype=torch.int32)
    >>> sorted_ids, expert_ids, num_rows = moe_numba.moe_align_block_size(topk_ids, block_size=4, num_experts=3)
    >>> sorted_ids[: num_rows.item()].tolist()
    [0, 3, 6, 6, 4, 6, 6, 6, 1, 2, 5, 6]
    >>> expert_ids[: num_rows.item() // 4].tolist()
    [0, 1, 2]
    """
    ids = topk_ids
    # Check types before the look-up: 16.0 would find the plan for 16, and True the plan for 1.
    if not (
        type(block_size) is type(num_experts) is int and type(pad_sorted_ids) is type(ignore_invalid_experts) is bool
    ):
        block_size, num_experts = check_int("block_size", block_size), check_int("num_experts", num_experts)
        pad_sorted_ids = check_flag("pad_sorted_ids", pad_sorted_ids)
        ignore_invalid_experts = check_flag("ignore_invalid_experts", ignore_invalid_experts)
    expert_map = None if expert_map is None else as_tensor(expert_map, "expert_map")
    key = ids.dtype, ids.device, block_size, num_experts, map_key(expert_map), ignore_invalid_experts
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = AlignPlan(ids, block_size, num_experts, expert_map, ignore_invalid_experts)
    if expert_map is not None and simulator.ENABLED:
        check_local_ids(expert_map)
    outputs = plan.outputs(ids.numel(), pad_sorted_ids)(out)
    if not ids.is_contiguous():
        refuse_recording(f"topk_ids has strides {ids.stride()}; for a prepared call it must be contiguous")
        ids = ids.contiguous()
    plan.launch(ids, expert_map, outputs)
    return tuple(outputs) if out is None else out


def map_key(expert_map):
    """Return the properties of an expert map that a plan depends on."""
    return expert_map is not None and (expert_map.dtype, expert_map.shape, expert_map.stride(), expert_map.device)


class AlignPlan:
    """Launch plan for given dtypes and options: arguments are checked once, kernels compiled on first use."""

    def __init__(self, ids, block_size, num_experts, expert_map, ignore_invalid_experts):
        check_tensor("topk_ids", ids, dtype=tuple(ID_TYPES))
        check_device(ids.device, "topk_ids")
        check_align_arguments(block_size, num_experts, expert_map, (ids.device, "topk_ids"))
        self.num_experts, self.block_size, self.device = num_experts, block_size, ids.device.index or 0
        gpu = devices.gpu_of(ids.device)
        self.capacity = device_functions.capacity_for(min(num_experts, _MAX_COUNTED_EXPERTS), gpu.capability)
        self.options = ignore_invalid_experts, expert_map is not None
        map_type = "int32*" if expert_map is None else MAP_TYPES[expert_map.dtype]
        self.pointers = (ID_TYPES[ids.dtype], map_type, "int32*", "int32*", "int32*")
        self.medium_slots_per_cta = 32 * medium.mask_words_for(self.capacity)
        self.medium_fits = medium.shared_bytes(self.capacity) <= gpu.shared_bytes
        fitting = (c for c in _LARGE_CONFIGS if self._large_shared_bytes(c) <= gpu.shared_bytes)
        self.large_config = next(fitting, _LARGE_CONFIGS[-1])
        self.max_large_ctas = min(self.large_config.max_ctas, gpu.sm_count)  # cooperative: all CTAs must be resident
        self.sort_config = counting_sort.config_for(self.capacity, gpu)
        self._launchers, self._launches = {}, {}
        self.outputs = AlignOutputs(block_size, num_experts, ignore_invalid_experts, ids.device)

    def _cached(self, compile_kernel, config):
        key = compile_kernel.__name__, config
        if key not in self._launchers:
            self._launchers[key] = compile_kernel(config)
        return self._launchers[key]

    def _launcher(self, kernel, *, pointers=None, **options):
        signature = (*(pointers or self.pointers), *("int32",) * 6)
        check_shared_memory(options.get("shared_bytes", 0), self.num_experts, self.device)
        return launcher(kernel, signature, self.device, dependent=True, **options)

    def _compile_small(self, _):
        return self._launcher(small.make_small_kernel(*self.options), launch_bounds=32 * small.WARPS_PER_CTA)

    def _compile_few(self, threads):
        kernel = one_expert_per_warp.make_kernel(threads, FEW_SLOTS[-1], self.capacity, *self.options)
        shared_bytes = one_expert_per_warp.shared_bytes(FEW_SLOTS[-1], self.capacity)
        return self._launcher(kernel, launch_bounds=threads, shared_bytes=shared_bytes)

    def _compile_pairwise(self, _):
        return self._launcher(pairwise.make_pairwise_kernel(*self.options), launch_bounds=1024)

    def _compile_medium(self, config):
        kernel = medium.make_medium_kernel(config.threads, config.batch, self.capacity, *self.options)
        shared_bytes = medium.shared_bytes(self.capacity)
        return self._launcher(kernel, launch_bounds=config.threads, shared_bytes=shared_bytes)

    def _large_shared_bytes(self, config):
        return large.shared_bytes(config.threads, self.capacity, config.slots_per_thread)

    def _compile_large(self, config):
        return self._launcher(
            large.make_large_kernel(config.threads, self.capacity, config.slots_per_thread, *self.options),
            pointers=(*self.pointers, "int32*"),
            launch_bounds=config.threads,
            shared_bytes=self._large_shared_bytes(config),
            cooperative=True,
        )

    def _compile_counting_sort(self, wide):
        config = self.sort_config
        shape = config.threads, self.capacity, config.slots_per_thread
        kernel = counting_sort.make_counting_sort_kernel(*shape, *self.options, wide)
        return self._launcher(kernel, pointers=(*self.pointers, "int32*"), **config.launch_options(self.capacity))

    def _small(self, numel):
        launch = self._cached(self._compile_small, "small")
        return launch, max(-(-numel // small.WARPS_PER_CTA), 1), 32 * small.WARPS_PER_CTA, 0

    def _few(self):
        threads, max_ctas = _FEW_CONFIG
        ctas = one_expert_per_warp.ctas_for(self.num_experts, threads)
        return self._cached(self._compile_few, threads), min(ctas, max_ctas), threads, 0

    def _medium(self, numel):
        config = next(config for config in _MEDIUM_CONFIGS if numel <= config.max_slots)
        slots_per_cta = min(-(-numel // config.ctas), self.medium_slots_per_cta, config.threads)
        return self._cached(self._compile_medium, config), -(-numel // slots_per_cta), config.threads, slots_per_cta

    def _pairwise(self, numel):
        if numel > pairwise.MAX_SLOTS:
            raise ValueError(
                f"num_experts is {self.num_experts}: with {numel} slots at most {_MAX_COUNTED_EXPERTS} are allowed, "
                f"with up to {pairwise.MAX_SLOTS} slots {_MAX_EXPERTS}"
            )
        return self._cached(self._compile_pairwise, "pairwise"), 1, 32 * max(-(-numel // 32), 1), 0

    def _is_medium(self, numel):
        most = min(MEDIUM_MAX_SLOTS, 2 * self.max_large_ctas * self.medium_slots_per_cta)
        return self.medium_fits and numel <= most

    def _is_large(self, numel):
        config = self.large_config
        most = min(LARGE_MAX_SLOTS, self.max_large_ctas * config.threads * config.slots_per_thread)
        return self.capacity <= LARGE_MAX_CAPACITY and numel <= most

    def _large(self, numel):
        config = self.large_config
        # More CTAs have fewer slots each, but more counts to add up.
        ctas = min(math.isqrt(numel * 288 // (32 * self.capacity)), self.max_large_ctas)
        ctas = max(ctas, -(-numel // (config.threads * config.slots_per_thread)), 1)
        slots_per_cta = max(-(-numel // (ctas * config.threads)), 1) * config.threads
        launch, words = (
            self._cached(self._compile_large, config),
            large.workspace_words(self.max_large_ctas, self.capacity),
        )
        return launch, max(-(-numel // slots_per_cta), 1), config.threads, slots_per_cta, words

    def _counting_sort(self, numel, wide):
        ctas, slots_per_cta = self.sort_config.grid(numel, self.capacity)
        words = self.sort_config.workspace_words(self.capacity)
        return self._cached(self._compile_counting_sort, wide), ctas, self.sort_config.threads, slots_per_cta, words

    def launch(self, ids, expert_map, outputs):
        """Launch the kernel for the number of slots in ``ids``."""
        sorted_token_ids, expert_ids, num_tokens_post_pad = outputs
        key = ids.numel(), sorted_token_ids.numel(), expert_ids.numel()
        launch = self._launches.get(key) or remember(self._launches, key, self._launch_for(*key))
        start, ctas, threads, workspace_words, sizes = launch
        start(
            ctas,
            threads,
            None,
            address(ids),
            address(ids if expert_map is None else expert_map),
            address(sorted_token_ids),
            address(expert_ids),
            address(num_tokens_post_pad),
            *((address(workspace(self.device, workspace_words)),) if workspace_words else ()),
            *sizes,
        )

    def _launch_for(self, numel, length, num_blocks):
        """Return launcher, CTAs, threads per CTA, size of the workspace, and the numbers that the kernel gets."""
        wide, workspace_words = max(length, num_blocks) > MAX_NARROW_ELEMENTS, 0
        if numel in FEW_SLOTS and self.capacity <= one_expert_per_warp.MAX_CAPACITY and not wide:
            start, ctas, threads, slots_per_cta = self._few()
        elif numel <= min(SMALL_MAX_SLOTS, MEDIUM_MAX_SLOTS) and not wide:
            start, ctas, threads, slots_per_cta = self._small(numel)
        elif self.num_experts > _MAX_COUNTED_EXPERTS or (numel <= pairwise.MAX_SLOTS and not self.medium_fits):
            start, ctas, threads, slots_per_cta = self._pairwise(numel)
        elif self._is_medium(numel) and not wide:
            start, ctas, threads, slots_per_cta = self._medium(numel)
        elif self._is_large(numel) and not wide:
            start, ctas, threads, slots_per_cta, workspace_words = self._large(numel)
        else:
            start, ctas, threads, slots_per_cta, workspace_words = self._counting_sort(numel, wide)
        sizes = numel, self.num_experts, self.block_size, slots_per_cta, length, num_blocks
        return start, ctas, threads, workspace_words, sizes


class AlignOutputs:
    """The three outputs of an alignment with given options."""

    def __init__(self, block_size, num_experts, ignore_invalid_experts, device):
        self._options, self._device = (block_size, num_experts, ignore_invalid_experts), device
        self._outputs = {}

    def __call__(self, numel, pad_sorted_ids):
        """Return the :class:`Outputs` for a number of slots."""
        key = numel, pad_sorted_ids
        return self._outputs.get(key) or remember(self._outputs, key, self._make(numel, pad_sorted_ids))

    def _make(self, numel, pad_sorted_ids):
        block_size, num_experts, ignore_invalid_experts = self._options
        shape = numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts
        return Outputs(
            describe_outputs(*shape),
            self._device,
            check=lambda out: make_align_outputs(check_out_tuple(out, 3), *shape, self._device),
        )


def check_align_arguments(block_size, num_experts, expert_map, place, because="num_experts is {}"):
    """Check the arguments that do not depend on the number of slots.

    ``place`` is the device and the name of the argument that is there, ``because`` the reason for ``num_experts``.
    """
    check_int("block_size", block_size, 1, _MAX_ELEMENTS)
    check_int("num_experts", num_experts, 1, _MAX_EXPERTS)
    if expert_map is not None:
        wanted = dict(shape=(num_experts,), because=(because,), device=place)
        check_tensor("expert_map", expert_map, dtype=tuple(MAP_TYPES), contiguous=True, **wanted)


def check_local_ids(expert_map):
    """Raise for values of an expert map that are neither -1 nor local ids; this reads them on the host."""
    num_local = int((expert_map >= 0).sum())
    wrong = (expert_map < -1) | (expert_map >= max(num_local, 1))
    if bool(wrong.any()):
        expert = int(wrong.nonzero()[0])
        raise ValueError(
            f"expert_map has {int(expert_map[expert])} for expert {expert}; it must be -1, or 0 to {num_local - 1}, as "
            f"{num_local} experts are local"
        )


def check_shared_memory(num_bytes, num_experts, device):
    """Raise an error if a kernel needs more shared memory than a CTA of this GPU can have."""
    gpu = devices.gpu_of(device)
    if num_bytes > gpu.shared_bytes:
        raise UnsupportedDeviceError(
            f"num_experts is {num_experts}: the kernel needs {num_bytes} bytes of shared memory per block; "
            f"{gpu.name} has {gpu.shared_bytes}, enough for fewer experts"
        )


def describe_outputs(numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts):
    """Return name, shape, dtype and reason of each output."""
    length, num_blocks = sizes(numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts)
    # Slots and lengths are int32. A symbolic length is checked when the op runs: a guard on it would recompile.
    if isinstance(length, int) and length > _MAX_ELEMENTS:
        raise ValueError(
            f"block_size is {block_size}: with {numel} slots and {num_experts} experts sorted_token_ids would have "
            f"{length} elements; at most {_MAX_ELEMENTS} are allowed"
        )
    shapes = ("sorted_token_ids", length), ("expert_ids", num_blocks), ("num_tokens_post_pad", 1)
    because = (f"topk_ids has {numel} elements, block_size is {block_size} and num_experts {num_experts}",)
    return [(name, (count,), torch.int32, () if count == 1 else because) for name, count in shapes]


def make_align_outputs(out, numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts, device):
    """Allocate the three outputs, or check the tensors in ``out``, which may be longer than needed."""
    wanted = describe_outputs(numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts)
    if out is None:
        return make_outputs(None, wanted, device)
    for tensor, (name, (needed,), _, because) in zip(out, wanted, strict=True):
        most = 1 if name == "num_tokens_post_pad" else _MAX_ELEMENTS
        flat = tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
        if not flat or tensor.device != device or not needed <= tensor.numel() <= most:
            raise ValueError(
                f"out's {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}; "
                f"it must be contiguous int32 ({needed},) on {device}"
                + (", or longer" if most > 1 else "")
                + reasons((max(tensor.numel(), needed),), (needed,), because)
            )
    return out


@register_fake(moe_align_block_size)
def fake_align(call):
    """Check the arguments of a call and return its outputs."""
    ids = call.topk_ids
    check_tensor("topk_ids", ids, dtype=tuple(ID_TYPES))
    check_device(ids.device, "topk_ids")
    check_align_arguments(call.block_size, call.num_experts, call.expert_map, (ids.device, "topk_ids"))
    shape = ids.numel(), call.block_size, call.num_experts, call.pad_sorted_ids, call.ignore_invalid_experts
    return make_align_outputs(call.out, *shape, ids.device)
