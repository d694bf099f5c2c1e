"""Which tensors of a call overlap in memory."""

from moe_numba.runtime.dlpack import PLAIN_TYPES


def overlaps(outs, tensors, may_be):
    """Find an output that shares memory with another one or with an input.

    Arrays of other libraries, subclasses and None are not compared.

    Parameters
    ----------
    outs : sequence of torch.Tensor
        Contiguous; what is not is refused elsewhere.
    tensors : sequence of torch.Tensor or None
        The inputs.
    may_be : sequence of bool
        For each input, whether an output may be the same tensor: of the same dtype, from the first to the last element.

    Returns
    -------
    (int, int) or None
        Index of the output, and index in ``(*tensors, *outs)`` of what it overlaps.
    """
    others = (*tensors, *outs) if len(outs) > 1 else tensors
    for i, out in enumerate(outs):
        if type(out) not in PLAIN_TYPES:
            continue
        start = out.data_ptr()
        end = start + out.nbytes
        for j, other in enumerate(others):
            if other is None or other is out and j - len(tensors) == i or type(other) not in PLAIN_TYPES:
                continue
            first = other.data_ptr()
            # Most tensors have a storage of their own, which begins after the output or ends before it.
            if first < end and first + other.untyped_storage().nbytes() > start and _end(other) > start:
                is_same = first == start and other.dtype == out.dtype and other.nbytes == out.nbytes
                if not (j < len(tensors) and may_be[j] and is_same):
                    return i, j
    return None


def address_range(tensor):
    """Return the address of a tensor's first element, and the one behind its last element."""
    return tensor.data_ptr(), _end(tensor)


def _end(tensor):
    """Return the address behind a tensor's last element; that of its first one if it has none."""
    if not tensor.numel():
        return tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
