"""Outputs of public functions: allocated, or those of the caller's ``out`` argument after a check."""

import torch

from moe_numba.runtime.dlpack import PLAIN_TYPES, as_tensor
from moe_numba.runtime.validate import make_outputs

# torch.autograd.graph.increment_version calls it after a test of the type, which takes as long as the call.
_increment_version = torch._C._increment_version


class Outputs:
    """The outputs of calls of one shape; built once and then fast.

    Parameters
    ----------
    wanted : sequence of (name, shape, dtype, because)
        As for :func:`moe_numba.runtime.validate.make_outputs`.
    device : torch.device
    check : callable, optional
        ``check(out)`` returns the output tensors of an ``out`` argument that differs from what `wanted` allocates, or
        raises an error that says what is allowed. Default: :func:`moe_numba.runtime.validate.make_outputs`.
    aligned : collection of str
        Names of those that must start at a multiple of 16 bytes, as new ones do.
    """

    def __init__(self, wanted, device, check=None, aligned=()):
        self._check = check or (lambda out: make_outputs(out, wanted, device, aligned))
        # Without elements they hold no memory, which torch.compile's CUDA graphs would refuse. new_empty takes half the
        # time of empty, which parses more arguments.
        examples = [torch.empty(0, dtype=dtype, device=device) for _, _, dtype, _ in wanted]
        shapes = [torch.empty(shape, device="meta") for _, shape, *_ in wanted]
        self._makers = [(e.new_empty, t.shape) for e, t in zip(examples, shapes, strict=True)]
        self._expected = [(t.shape, t.stride(), e.dtype, e.device) for e, t in zip(examples, shapes, strict=True)]
        self._aligned = bool(aligned)

    def __call__(self, out):
        """Return new output tensors, or those of ``out``: a tensor, or a tuple if there are several.

        Those of ``out`` count as modified, so that a backward which needs their former contents raises torch's error.
        """
        if out is None:
            return [make(*shape) for make, shape in self._makers]
        given = (out,) if len(self._expected) == 1 else out
        if type(given) is tuple and len(given) == len(self._expected):
            for tensor, expected in zip(given, self._expected):  # noqa: B905
                if type(tensor) is not torch.Tensor or tensor.requires_grad:
                    break
                if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != expected:
                    break
                if self._aligned and tensor.data_ptr() & 15:
                    break
            else:
                _increment_version(given)  # not of inference tensors, which have no version
                return given
        tensors = self._check(out)
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad and torch.is_grad_enabled():
                name = "out" if len(tensors) == 1 else f"out[{i}]"
                raise ValueError(f"{name} requires grad, but outputs have no backward: use torch.no_grad() or detach()")
        _increment_version(tensors)
        return tensors


_MAX_REMEMBERED = 4096


def remember(cache, key, value):
    """Add an entry to a cache of what calls of a certain size need, and return it; a full cache starts again."""
    if len(cache) >= _MAX_REMEMBERED:
        cache.clear()
    cache[key] = value
    return value


def look_up(cache, key):
    """Return an entry of a cache or None, also for a key with a list: the checks that follow name the argument."""
    try:
        return cache.get(key)
    except TypeError:
        return None


def tensor_key(tensor):
    """Return what a launch plan depends on of a tensor, or None for None."""
    if tensor is None:
        return None
    if type(tensor) in PLAIN_TYPES:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, type(tensor)  # which may have no memory


def find_plan(plans, options, tensors, names):
    """Find the launch plan of a call.

    Parameters
    ----------
    plans : dict
    options : tuple
        What the plan depends on except tensors. It must have the types of numbers whose type matters, because 1, 1.0
        and True are equal.
    tensors : tuple
        The tensors of the call, arrays of other libraries and None.
    names : tuple of str
        Their names in messages.

    Returns
    -------
    plan
        None if the call needs a new plan. Then all tensors have memory.
    key
        To :func:`remember` it.
    tensors : tuple
        Without arrays of other libraries.
    """
    try:
        # `tensor_key` of each, but most are None or plain tensors: without the calls it takes a third less time.
        key = (
            options,
            *[
                t
                if t is None
                else (t.shape, t.stride(), t.dtype, t.device)
                if type(t) in PLAIN_TYPES
                else tensor_key(t)
                for t in tensors
            ],
        )
    except AttributeError:  # an array of another library
        tensors = _as_tensors(tensors, names)
        key = options, *map(tensor_key, tensors)
    try:
        return plans[key], key, tensors
    except (KeyError, TypeError):  # TypeError: a list cannot be looked up; the checks that follow name the argument
        return None, key, _as_tensors(tensors, names)


def _as_tensors(arrays, names):
    make = getattr(arrays, "_make", tuple)  # of a named tuple
    return make(a if a is None else as_tensor(a, name) for a, name in zip(arrays, names, strict=True))
