"""The public function: check, allocate, launch."""

import math
from functools import cached_property

import torch

from moe_numba import simulator
from moe_numba.align import device_functions, kernel_large, kernel_medium, kernel_small
from moe_numba.align.reference import sizes
from moe_numba.align.workspace import workspace
from moe_numba.runtime import device as devices
from moe_numba.runtime.launch import address, current_stream, launcher
from moe_numba.runtime.validate import (
    UnsupportedDeviceError,
    as_tensor,
    check_device,
    check_out_tuple,
    to_caller_library,
)

IDS = {torch.int32: "int32*", torch.int64: "int64*"}
_MOST_EXPERTS, _MOST_ELEMENTS = 8192, 1 << 30
_COUNT_LIMIT = (1 << 16) - 1  # of a block's slots, so that a count of them has 16 bits

TINY_SLOTS = kernel_small.MOST_SLOTS
FEW_SLOTS = 16384  # beyond this many slots it pays that a block counts its own alone, and the blocks exchange counts

# For few slots, up to so many: threads of a block, ids that a thread has on their way at once, and blocks.
_FEW = ((1024, 512, 2, 64), (8192, 512, 8, 64), (1 << 31, 1024, 8, 128))
# For many slots: threads of a block, slots that a thread sorts at once, and blocks at most.
_MANY = 512, 8, 128
if simulator.ENABLED:  # its threads take their turns: it gets fewer
    _FEW, _MANY = ((1 << 31, 64, 2, 3),), (64, 2, 8)

_plans = {}


def moe_align_block_size(
    topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=True, ignore_invalid_experts=False, out=None
):
    """Sort (token, choice) slots by expert, and pad each expert's to whole blocks, in one launch.

    A slot is an element of ``topk_ids``, counted in row-major order. Within an expert slots stay in ascending order,
    and every element of the outputs is defined, so that they are bit-identical from run to run.

    Parameters
    ----------
    topk_ids : tensor of int32 or int64, any shape
        The expert of each slot; what is not in 0..num_experts-1 is invalid. One that is not contiguous is copied.
    block_size : int
        Rows of a block, the tile height of the grouped GEMM that follows; 1 or more.
    num_experts : int
        Experts that ``topk_ids`` may name, 1 to 8192; with an ``expert_map`` those of all ranks.
    expert_map : tensor [num_experts] of int32 or int64, optional
        For expert parallelism: the local id of each expert, -1 for those of other ranks. ``expert_ids`` are then local.
    pad_sorted_ids : bool
        Make ``sorted_token_ids`` a whole number of blocks long.
    ignore_invalid_experts : bool
        Drop slots that are invalid, or whose expert is not on this rank. Otherwise invalid slots come first, in blocks
        of expert -1, and experts of other ranks keep their blocks, also of expert -1.
    out : (sorted_token_ids, expert_ids, num_tokens_post_pad), optional
        Contiguous int32 tensors to write into, as long as what is returned without, or longer; the call then neither
        allocates nor synchronises, but for the first one on a stream with more than 16384 slots.

    Returns
    -------
    sorted_token_ids : tensor of int32
        Slots by expert; padding, and all past the end of what is used, is ``topk_ids.numel()``. The length depends on
        shapes alone: ``numel + buckets * (block_size - 1)``, buckets being num_experts + 1 (num_experts where invalid
        slots are ignored), and ``numel * block_size`` if that is less for fewer slots than buckets.
    expert_ids : tensor of int32
        The expert of each block; -1 past the end of what is used.
    num_tokens_post_pad : tensor [1] of int32
        How much of ``sorted_token_ids`` is used, padding included.
        All in ``topk_ids``' library: torch, or CuPy through DLPack.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it was and what is allowed.
    UnsupportedDeviceError
        The GPU is older than compute capability 9.0, or has too little shared memory for so many experts.

    Notes
    -----
    SGLang's and vLLM's function of this name. It runs on torch's current stream, and can be captured in a CUDA graph
    after a call of this size has compiled its kernel. At most 8 million slots. Up to 16384 (8448 for more than 1053
    experts) the blocks share nothing. Beyond, they exchange counts through memory that is kept for each stream and each
    capture (150 KB for 256 experts).
    """
    ids = as_tensor(topk_ids, "topk_ids")
    local = None if expert_map is None else as_tensor(expert_map, "expert_map")
    _check_ints(block_size, num_experts)  # now: 16.0 would find the plan for 16, and True that for 1
    device = ids.device
    key = (
        ids.dtype,
        device,
        block_size,
        num_experts,
        local is not None and (local.dtype, local.shape, local.stride(), local.device),
        bool(ignore_invalid_experts),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan(ids, block_size, num_experts, local, bool(ignore_invalid_experts))
    shape = ids.numel(), block_size, num_experts, pad_sorted_ids, ignore_invalid_experts
    if out is None:
        tensors = empty_outputs(*shape, device)
    else:
        tensors = check_out_tuple(out, 3)
        check_outputs(tensors, *shape, device)
    if not ids.is_contiguous():
        ids = ids.contiguous()
    plan.start(ids, ids if local is None else local, tensors)
    if out is not None:
        return out
    return (
        tuple(tensors) if isinstance(topk_ids, torch.Tensor) else tuple(to_caller_library(t, topk_ids) for t in tensors)
    )


class _Plan:
    """What a call needs that types and options decide: checked once; each kernel compiled when it is first needed."""

    def __init__(self, ids, block_size, num_experts, expert_map, ignore_invalid_experts):
        if ids.dtype not in IDS:
            raise TypeError(f"topk_ids is {ids.dtype}; it must be int32 or int64")
        check_device(ids.device, (9, 0), "topk_ids")
        check_align(block_size, num_experts, expert_map, ids.device)
        self.num_experts, self.block_size, self.device = num_experts, block_size, ids.device.index or 0
        self.capacity = device_functions.capacity_for(num_experts)
        self.options = ignore_invalid_experts, expert_map is not None
        map_type = "int32*" if expert_map is None else IDS[expert_map.dtype]
        self.pointers = (IDS[ids.dtype], map_type, "int32*", "int32*", "int32*")
        self._few = {}
        self.chunk = 32 * kernel_medium.words_for(self.capacity)  # that a block of the kernel for few slots can place
        self.most_blocks = _MANY[2]
        if not simulator.ENABLED:  # all blocks of the kernel for many slots must be resident at once
            processors = devices.gpu_of(ids.device).sm_count
            self.most_blocks = min(self.most_blocks, processors)

    def _launcher(self, made, pointers, **options):
        check_shared_memory(options.get("shared_bytes", 0), self.num_experts, self.device)
        return launcher(made, (*pointers, *("int32",) * 6), self.device, dependent=True, **options)

    def few(self, numel):
        """The kernel for few slots, and threads and blocks."""
        _, threads, batch, blocks = kind = next(kind for kind in _FEW if numel <= kind[0])
        if kind not in self._few:
            made = kernel_medium.make_few_kernel(threads, batch, self.capacity, *self.options)
            shared_bytes = kernel_medium.shared_bytes(self.capacity)
            self._few[kind] = self._launcher(made, self.pointers, launch_bounds=threads, shared_bytes=shared_bytes)
        return self._few[kind], threads, blocks

    def _tiny(self, aligned):
        made = kernel_small.make_tiny_kernel(aligned, *self.options)
        return self._launcher(made, self.pointers, launch_bounds=1024)

    tiny = cached_property(lambda self: self._tiny(aligned=False))
    tiny_aligned = cached_property(lambda self: self._tiny(aligned=True))

    @cached_property
    def many(self):
        threads, per_thread, _ = _MANY
        shape = threads, self.capacity, per_thread
        made = kernel_large.make_many_kernel(*shape, *self.options)
        return self._launcher(
            made,
            (*self.pointers, "int32*"),
            launch_bounds=threads,
            shared_bytes=kernel_large.shared_bytes(*shape),
            cooperative=True,
        )

    def start(self, ids, expert_map, outputs):
        numel, shared = ids.numel(), ()
        if numel <= min(TINY_SLOTS, FEW_SLOTS):
            launch = self.tiny if outputs[0].data_ptr() % 16 else self.tiny_aligned
            threads, blocks, chunk = 32 * max(numel, 1), 1, 0
        elif numel <= FEW_SLOTS and numel <= 2 * self.most_blocks * self.chunk:
            launch, threads, blocks = self.few(numel)
            chunk = min(-(-numel // blocks), self.chunk, threads)
            blocks = -(-numel // chunk)
        else:
            launch, threads = self.many, _MANY[0]
            chunk, blocks = self._share_out(numel, threads)
            shared = (address(workspace(self.device, kernel_large.workspace_numbers(self.most_blocks, self.capacity))),)
        launch(
            blocks,
            threads,
            current_stream(self.device),
            address(ids),
            *launch_arguments(expert_map, outputs, numel, self.num_experts, self.block_size, chunk, *shared),
        )

    def _share_out(self, numel, threads):
        """Slots of a block and blocks: a block's own work shrinks with the blocks, adding up their counts grows."""
        blocks = math.isqrt(numel * 288 // (32 * self.capacity))
        blocks = max(min(blocks, self.most_blocks), 1)
        chunk = -(-numel // (blocks * threads)) * threads
        if chunk > _COUNT_LIMIT:
            chunk = -(-numel // (self.most_blocks * threads)) * threads
        if chunk > _COUNT_LIMIT:
            most = _COUNT_LIMIT // threads * threads * self.most_blocks
            raise ValueError(f"topk_ids has {numel} slots; at most {most} are allowed")
        return chunk, -(-numel // chunk)


def launch_arguments(expert_map, outputs, numel, num_experts, block_size, chunk, *shared):
    """What the kernels of this room take after the ids, in their order."""
    length, num_blocks = outputs[0].numel(), outputs[1].numel()
    pointers = address(expert_map), *map(address, outputs), *shared
    return *pointers, numel, num_experts, block_size, chunk, length, num_blocks


def _check_ints(block_size, num_experts):
    for name, value in (("block_size", block_size), ("num_experts", num_experts)):
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r}; it must be an int")


def check_align(block_size, num_experts, expert_map, device):
    """Refuse what no kernel of this room can do."""
    _check_ints(block_size, num_experts)
    for name, value, most in (("block_size", block_size, _MOST_ELEMENTS), ("num_experts", num_experts, _MOST_EXPERTS)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; 1 to {most} are allowed")
    if expert_map is None:
        return
    if expert_map.dtype not in IDS:
        raise TypeError(f"expert_map is {expert_map.dtype}; it must be int32 or int64")
    if tuple(expert_map.shape) != (num_experts,) or not expert_map.is_contiguous():
        raise ValueError(
            f"expert_map has shape {tuple(expert_map.shape)} and strides {expert_map.stride()}; "
            f"it must be contiguous and ({num_experts},), one an expert"
        )
    if expert_map.device != device:
        raise ValueError(f"expert_map is on {expert_map.device}; it must be where the ids are, on {device}")


def check_shared_memory(needed, num_experts, device):
    """Refuse so many experts where a block has less shared memory than a Hopper GPU's."""
    if simulator.ENABLED:
        return
    gpu = devices.gpu_of(device)
    if needed > gpu.shared_bytes:
        raise UnsupportedDeviceError(
            f"num_experts is {num_experts}: the kernel needs {needed} bytes of shared memory a block; "
            f"{gpu.name} has {gpu.shared_bytes}"
        )


def _sizes(numel, block_size, num_experts, *options):
    """The lengths of the three outputs; refuses what a kernel's integers cannot count."""
    length, num_blocks = sizes(numel, block_size, num_experts, *options)
    if length > _MOST_ELEMENTS:
        raise ValueError(
            f"block_size is {block_size}: with {numel} slots and {num_experts} experts sorted_token_ids would have "
            f"{length} elements; at most {_MOST_ELEMENTS} are allowed"
        )
    return length, num_blocks, 1


def empty_outputs(numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts, device):
    """New tensors for the three outputs."""
    lengths = _sizes(numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts)
    return [torch.empty(n, dtype=torch.int32, device=device) for n in lengths]


def check_outputs(tensors, numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts, device):
    """Refuse outputs that are not flat rows of int32, long enough."""
    lengths = _sizes(numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad")
    for name, tensor, needed, most in zip(names, tensors, lengths, (_MOST_ELEMENTS, _MOST_ELEMENTS, 1), strict=True):
        flat = tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
        if not flat or tensor.device != device or not needed <= tensor.numel() <= most:
            raise ValueError(
                f"out's {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}; "
                f"it must be contiguous int32 ({needed},) on {device}" + (", or longer" if most > 1 else "")
            )
