"""Tensor maps (``CUtensorMap``), encoded by the host: how TMA addresses a tensor.

``moe_numba.ptx.tma`` copies boxes of a tensor by its map; ``moe_numba.ptx.tensormap`` makes other maps on the device.
"""

import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.validate import check_device

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
_CACHE_SIZE = 4096
_values: dict = {}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def tensor_map(tensor, box, *, swizzle=0):
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

    Returns
    -------
    torch.Tensor
        128 bytes (uint8) on the tensor's device. Maps may be stacked: the i-th starts at byte ``128 * i``.

    Raises
    ------
    TypeError, ValueError
        If TMA cannot address the tensor or the box; names the argument, its value and what is allowed.
    """
    data = torch.frombuffer(bytearray(_bytes(tensor, box, swizzle)), dtype=torch.uint8)
    buffer = torch.empty(256, dtype=torch.uint8, device=tensor.device)
    aligned = buffer[-buffer.data_ptr() % 128 :][:128]  # a GPU's allocator aligns anyway, the CPU's does not
    return aligned.copy_(data)


class TensorMap:
    """A tensor map as an argument of ``launch``: the kernel gets a pointer to its own copy of the 128 bytes.

    Parameters as for :func:`tensor_map`.
    """

    def __init__(self, tensor, box, *, swizzle=0):
        self.value, self.device = encode_tensor_map(tensor, box, swizzle=swizzle), tensor.device


def encode_tensor_map(tensor, box, *, swizzle=0):
    """The map's 128 bytes, which a launcher takes for a tensor map; cached. Parameters as for :func:`tensor_map`."""
    if simulator.ENABLED:
        return address(tensor_map(tensor, box, swizzle=swizzle))
    key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tuple(box), swizzle
    value = _values.get(key)
    if value is None:
        if len(_values) >= _CACHE_SIZE:
            _values.clear()
        value = _values[key] = _bytes(tensor, box, swizzle)
    return value


def _bytes(tensor, box, swizzle):
    extents, strides, box = _checked(tensor, box, swizzle)
    check_device(tensor.device, (9, 0), "tensor")
    if devices.target():
        return bytes(128)
    if not simulator.ENABLED:
        return _encoded(tensor, extents, strides, box, swizzle)
    simulator.tensor_map.register(tensor)
    return simulator.tensor_map.TensorMap(
        tensor.data_ptr(), tensor.element_size(), extents, strides, box, swizzle
    ).pack()


def _checked(tensor, box, swizzle):
    """Check the arguments; return extents, strides in bytes without the innermost, and box, all innermost first."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is {type(tensor).__name__}; it must be a torch tensor")
    if tensor.dtype not in _TYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
        raise ValueError(f"tensor is {tensor.dtype}; TMA is set up here for {names}")
    if not 1 <= tensor.ndim <= 5:
        raise ValueError(f"tensor has {tensor.ndim} dimensions; TMA takes 1 to 5")
    if tensor.numel() == 0 or max(tensor.shape) > 1 << 32:
        raise ValueError(f"tensor has shape {tuple(tensor.shape)}; each extent must be 1 to 2^32")
    if tensor.data_ptr() % 16:
        raise ValueError(f"tensor starts at address {tensor.data_ptr():#x}, which is not aligned to 16 bytes")
    size = tensor.element_size()
    extents, strides = list(tensor.shape)[::-1], [stride * size for stride in tensor.stride()[::-1]]
    if extents[0] > 1 and strides[0] != size:
        raise ValueError(f"tensor has strides {tensor.stride()}; its last dimension must be contiguous")
    strides[0] = size
    for i in range(1, tensor.ndim):
        if extents[i] == 1:  # the stride has no effect, but TMA might refuse it
            strides[i] = -(-extents[i - 1] * strides[i - 1] // 16) * 16
        if strides[i] % 16 or not 0 < strides[i] < 1 << 40:
            raise ValueError(
                f"tensor has strides {tensor.stride()} of {size} bytes: that of dimension {tensor.ndim - 1 - i} is "
                f"{strides[i]} bytes, but must be a multiple of 16, positive and below 2^40"
            )
    if swizzle not in _SWIZZLES:
        raise ValueError(f"swizzle is {swizzle}; it must be 0, 32, 64 or 128 bytes")
    box = tuple(box)
    if len(box) != tensor.ndim or any(not 1 <= b <= 256 for b in box):
        raise ValueError(f"box is {box}; it must have {tensor.ndim} extents, each from 1 to 256")
    row = box[-1] * size
    if row % 16:
        raise ValueError(f"box is {box}, so that its rows have {row} bytes; they must be a multiple of 16")
    if swizzle and row != swizzle:
        raise ValueError(
            f"box is {box}, so that its rows have {row} bytes; with swizzle {swizzle} they must have those"
        )
    return extents, strides[1:], box[::-1]


def _encoded(tensor, extents, strides, box, swizzle):
    """Let the driver encode the 128 bytes."""
    import numpy as np
    from cuda.bindings import driver as cu

    with torch.cuda.device(tensor.device):
        torch.cuda.current_stream()  # makes the context current, which the driver requires
        error, described = cu.cuTensorMapEncodeTiled(
            getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[tensor.dtype]}"),
            tensor.ndim,
            tensor.data_ptr(),
            [cu.cuuint64_t(n) for n in extents],
            [cu.cuuint64_t(n) for n in strides or [16]],  # a vector has none, but the driver refuses a null pointer
            [cu.cuuint32_t(n) for n in box],
            [cu.cuuint32_t(1)] * tensor.ndim,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle]}"),
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    if error:
        raise ValueError(f"the driver refuses a tensor map of {tuple(tensor.shape)} with box {box[::-1]}: {error.name}")
    return np.array([int(word) for word in described.opaque], np.uint64).tobytes()
