"""What a public function writes into: new tensors, or the caller's, checked."""

import torch

from moe_numba.runtime.validate import as_outputs, as_tensor, check_out


def outputs_for(out, wanted, device, aligned=()):
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
    results = [as_tensor(out, "out")] if len(wanted) == 1 else as_outputs(out, len(wanted))
    for tensor, (name, shape, dtype) in zip(results, wanted, strict=True):
        check_out(name, tensor, shape, dtype, device)
        if name in aligned:
            require_aligned(f"out's {name}", tensor)
    return results


def require_aligned(name, tensor):
    """Refuse a tensor that does not start at a multiple of 16 bytes."""
    if tensor.data_ptr() % 16:
        raise ValueError(f"{name} starts at address {tensor.data_ptr():#x}; it must be a multiple of 16")
