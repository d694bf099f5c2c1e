"""What public functions take and give back: arrays of any library that speaks DLPack, checked with clear errors."""

import importlib

import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices


class UnsupportedDeviceError(RuntimeError):
    """The GPU lacks what a kernel needs."""


def check_device(device, capability, what):
    """Refuse a device that kernels cannot run on: the CPU beside a GPU, a GPU beside the simulator, one too old."""
    if simulator.ENABLED:
        if device.type != "cpu":
            raise ValueError(f"{what} is on {device}; in the simulator ({simulator.REASON}) it must be on the cpu")
        return
    if device.type != "cuda" and not devices.target():
        raise ValueError(f"{what} is on {device}; it must be on a CUDA GPU")
    gpu = devices.gpu_of(device)
    found = gpu.capability
    if found < capability:
        raise UnsupportedDeviceError(
            f"{gpu.name} has compute capability {found[0]}.{found[1]}; "
            f"{capability[0]}.{capability[1]} or newer is needed"
        )


def as_tensor(array, name):
    """A torch tensor over the memory of anything that speaks DLPack, in order with the caller's stream.

    ``name`` is the argument's, for the error.
    """
    if isinstance(array, torch.Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} is {type(array).__name__}; it must be a tensor, or an array that speaks DLPack")
    if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
        raise ValueError(f"{name} has strides {array.strides}; none may be negative")
    return torch.from_dlpack(array)


def check_out_tuple(out, count):
    """The tensors of an ``out`` argument, which must be so many."""
    if not isinstance(out, (tuple, list)) or len(out) != count:
        what = f"{len(out)} of them" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"out is {what}; it must be a tuple of {count} tensors")
    return [as_tensor(array, f"out[{i}]") for i, array in enumerate(out)]


def to_caller_library(tensor, like):
    """A result in the library that the caller's array came from: CuPy for CuPy, NumPy for NumPy, else torch."""
    library = type(like).__module__.partition(".")[0]
    return importlib.import_module(library).from_dlpack(tensor) if library in ("cupy", "numpy") else tensor


def check_out(name, tensor, shape, dtype, device):
    """Refuse an output that is not contiguous, or not of this shape and type on this device."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"out's {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}; "
            f"it must be contiguous {dtype} {shape} on {device}"
        )


def make_outputs(out, wanted, device, aligned=()):
    """The output tensors of a call, from its ``out`` argument.

    Parameters
    ----------
    out : None, a tensor, or a tuple of tensors
        With None new ones are made. A function of one output takes it without a tuple.
    wanted : sequence of (name, shape, dtype)
    device : torch.device
    aligned : collection of str
        Names of those that must start at a multiple of 16 bytes, as new ones do.
    """
    if out is None:
        return [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in wanted]
    results = [as_tensor(out, "out")] if len(wanted) == 1 else check_out_tuple(out, len(wanted))
    for tensor, (name, shape, dtype) in zip(results, wanted, strict=True):
        check_out(name, tensor, shape, dtype, device)
        if name in aligned:
            check_aligned(f"out's {name}", tensor)
    return results


def check_aligned(name, tensor):
    """Refuse a tensor that does not start at a multiple of 16 bytes."""
    if tensor.data_ptr() % 16:
        raise ValueError(f"{name} starts at address {tensor.data_ptr():#x}; it must be a multiple of 16")
