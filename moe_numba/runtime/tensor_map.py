"""Tensor maps (``CUtensorMap``), encoded by the host: how TMA addresses a tensor.

``moe_numba.ptx.tma`` copies boxes of a tensor by its map; ``moe_numba.ptx.tensormap`` makes other maps on the device.
"""

from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.context import bind_context
from moe_numba.runtime.validate import check_aligned, check_device, vector_strides

__all__ = ["TensorMap", "address", "encode_tensor_map", "tensor_map"]

# ``address(tensor)`` is a device pointer to its first element: an integer, or in the simulator a checked view.
address = simulator.pointer if simulator.ENABLED else torch.Tensor.data_ptr

_TYPES = {
    torch.uint8: "UINT8",
    torch.float8_e4m3fn: "UINT8",
    torch.float8_e5m2: "UINT8",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT32",
    torch.int32: "INT32",
}
_MAX_TEMPLATES = 4096
_templates: dict = {}
_ADDRESS_BYTES = 8
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}
# A row of a swizzled box has 128 bytes anyway. With 256, an H200 reads a matrix from DRAM at 4.17 instead of 4.68 TB/s,
# and grouped GEMMs of few rows take 2 % to 7 % more time.
L2_PROMOTION = 128


class _Boxes(NamedTuple):
    """How a map divides a tensor into boxes, and how they are loaded; see :func:`tensor_map`."""

    box: tuple[int, ...]
    swizzle: int
    l2_promotion: int


def tensor_map(tensor, box, *, swizzle=0, l2_promotion=L2_PROMOTION):
    """Encode a tensor, and the box of it that one copy moves, as a tensor map in global memory.

    A copy is given the coordinates of the box's first element, innermost first. The innermost coordinate must be a
    multiple of 16 bytes; no coordinate of a store may be negative. A load fills elements outside the tensor with zeros
    and a store skips them, but a store always writes whole 16-byte vectors, also at the end of a row. The map holds the
    tensor's address and does not keep the tensor alive.

    Parameters
    ----------
    tensor : torch.Tensor
        1 to 5 dimensions, the last one contiguous; uint8, float8, float16, bfloat16, float32 or int32.
    box : tuple of int
        Elements along each dimension of the tensor, in the same order; 1 to 256 each.
    swizzle : int
        0, or 32, 64 or 128, which must be the bytes of a row of the box: in shared memory the 16-byte chunks of each
        row are permuted, so that a warp reads a column of them without bank conflicts.
    l2_promotion : int
        0, 64, 128 or 256: bytes that L2 fetches from DRAM for a smaller request of a load.

    Returns
    -------
    torch.Tensor
        128 bytes (uint8) on the tensor's device. Maps may be stacked: the i-th starts at byte ``128 * i``.

    Raises
    ------
    TypeError, ValueError
        If TMA cannot address the tensor or the box; names the argument, its value and what is allowed.
    """
    return _on_device(tensor, _encode(tensor, _Boxes(tuple(box), swizzle, l2_promotion), "tensor"))


def _on_device(tensor, encoded):
    """Return the bytes of a map as a tensor beside ``tensor``."""
    buffer = torch.empty(256, dtype=torch.uint8, device=tensor.device)
    aligned = buffer[-buffer.data_ptr() % 128 :][:128]  # a GPU's allocator aligns anyway, the CPU's does not
    return aligned.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))


class TensorMap:
    """A tensor map as an argument of ``launch``: the kernel gets a pointer to its own copy of the 128 bytes.

    Parameters as for :func:`tensor_map`.
    """

    def __init__(self, tensor, box, *, swizzle=0, l2_promotion=L2_PROMOTION):
        encoded = encode_tensor_map(tensor, box, swizzle=swizzle, l2_promotion=l2_promotion)
        self.value, self.device = encoded, tensor.device


def encode_tensor_map(tensor, box, *, swizzle=0, l2_promotion=L2_PROMOTION):
    """Return the map's 128 bytes, which a launcher takes for a tensor map. Parameters as for :func:`tensor_map`."""
    return tensor_map_template(tensor, box, swizzle=swizzle, l2_promotion=l2_promotion)(tensor)


def tensor_map_template(tensor, box, *, swizzle=0, l2_promotion=L2_PROMOTION, name="tensor"):
    """Return ``template(tensor)``: the 128 bytes of the map of another tensor of this shape, strides, dtype and device.

    The driver encodes a map once for each kind of tensor; for another address the template replaces the address, which
    takes a hundredth of the time. Parameters as for :func:`tensor_map`; ``name`` is the tensor's in messages.
    """
    boxes = _Boxes(tuple(box), swizzle, l2_promotion)
    if simulator.ENABLED:
        return lambda tensor: address(_on_device(tensor, _encode(tensor, boxes, name)))
    key = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, boxes, name
    template = _templates.get(key)
    if template is None:
        if len(_templates) >= _MAX_TEMPLATES:
            _templates.clear()
        template = _templates[key] = _make_template(tensor, boxes, name)
    return template


def _make_template(tensor, boxes, name):
    start, behind = tensor.data_ptr(), _encode(tensor, boxes, name)[_ADDRESS_BYTES:]
    # PTX (tensormap.replace) says that a map has a global address and not where; so see whether it is in front.
    moved = _encode(tensor, boxes, name, offset=1 << 20)
    if moved != (start + (1 << 20)).to_bytes(_ADDRESS_BYTES, "little") + behind:
        return lambda tensor: _encode(tensor, boxes, name)

    def template(tensor):
        start = tensor.data_ptr()
        if start & 15:
            check_aligned(name, tensor)
        return start.to_bytes(_ADDRESS_BYTES, "little") + behind

    return template


def _encode(tensor, boxes, name, offset=0):
    """Return the 128 bytes of the map of a tensor, moved by ``offset`` bytes."""
    extents, strides, boxes = _checked(name, tensor, boxes)
    check_device(tensor.device, name, (9, 0))
    if devices.target():
        return bytes(128)
    if not simulator.ENABLED:
        return _encode_by_driver(name, tensor, tensor.data_ptr() + offset, extents, strides, boxes)
    simulator.tensor_map.register(tensor)
    return simulator.tensor_map.TensorMap(
        tensor.data_ptr(), tensor.element_size(), extents, strides, boxes.box, boxes.swizzle
    ).pack()


def _checked(name, tensor, boxes):
    """Check the arguments; return extents, strides in bytes without the innermost, and boxes, all innermost first."""
    box, swizzle, l2_promotion = boxes
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; it must be a torch tensor")
    if tensor.dtype not in _TYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
        raise ValueError(f"{name} is {tensor.dtype}; TMA is set up here for {names}")
    if not 1 <= tensor.ndim <= 5:
        raise ValueError(f"{name} has {tensor.ndim} dimensions; TMA takes 1 to 5")
    if tensor.numel() == 0 or max(tensor.shape) > 1 << 32:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; each extent must be 1 to 2^32")
    check_aligned(name, tensor)
    extents, strides = list(tensor.shape)[::-1], vector_strides(name, tensor)[::-1]
    if swizzle not in _SWIZZLES:
        raise ValueError(f"swizzle is {swizzle}; it must be 0, 32, 64 or 128 bytes")
    if l2_promotion not in _PROMOTIONS:
        raise ValueError(f"l2_promotion is {l2_promotion}; it must be 0, 64, 128 or 256 bytes")
    if len(box) != tensor.ndim or any(not 1 <= b <= 256 for b in box):
        raise ValueError(f"box is {box}; it must have {tensor.ndim} extents, each from 1 to 256")
    row = box[-1] * tensor.element_size()
    if row % 16:
        raise ValueError(f"box is {box}, so that its rows have {row} bytes; they must be a multiple of 16")
    if swizzle and row != swizzle:
        raise ValueError(
            f"box is {box}, so that its rows have {row} bytes; with swizzle {swizzle} they must have those"
        )
    return extents, strides[1:], boxes._replace(box=box[::-1])


def _encode_by_driver(name, tensor, start, extents, strides, boxes):
    """Let the driver encode the 128 bytes."""
    import numpy as np
    from cuda.bindings import driver as cu

    with torch.cuda.device(tensor.device):
        bind_context(tensor.device.index or 0)  # autograd, for example, calls from a thread of its own
        error, described = cu.cuTensorMapEncodeTiled(
            getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[tensor.dtype]}"),
            tensor.ndim,
            start,
            [cu.cuuint64_t(n) for n in extents],
            [cu.cuuint64_t(n) for n in strides or [16]],  # a vector has none, but the driver refuses a null pointer
            [cu.cuuint32_t(n) for n in boxes.box],
            [cu.cuuint32_t(1)] * tensor.ndim,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[boxes.swizzle]}"),
            getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_PROMOTIONS[boxes.l2_promotion]}"),
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    if error:
        raise ValueError(
            f"the driver refuses a tensor map of {name} {tuple(tensor.shape)} with box {boxes.box[::-1]}: {error.name}"
        )
    return np.array([int(word) for word in described.opaque], np.uint64).tobytes()
