"""Prepared calls: the launches of a call with fixed arguments, repeated with the least host time."""

from collections.abc import Callable
from typing import Any

from moe_numba.runtime.recording import recording
from moe_numba.runtime.torch_op import OPS


class PreparedCall:
    """A call whose arguments were checked and packed in advance; made by :func:`prepare`.

    Attributes
    ----------
    result
        The outputs, which every call overwrites and returns.
    """

    def __init__(self, launches: list, result: Any, arguments: tuple):
        self._launches, self.result, self._arguments = launches, result, arguments  # keeps the tensors alive

    def __call__(self) -> Any:
        """Launch the kernels on the current stream; return the outputs."""
        for launch in self._launches:
            launch()
        return self.result


def prepare(function: Callable, /, *args: Any, **kwargs: Any) -> PreparedCall:
    """Execute a call of a public function once, and return it as a :class:`PreparedCall`.

    A prepared call reads the same tensors and writes the same outputs each time. It neither checks arguments nor
    allocates, so it costs little more host time than the driver's launch. Change the inputs in place between calls.

    Parameters
    ----------
    function : a function of this package that launches kernels, such as ``biased_grouped_topk``
    *args, **kwargs
        Its arguments. Without ``out`` the outputs are allocated now, and reused by each call.

    Returns
    -------
    PreparedCall

    Raises
    ------
    ValueError
        If the call also does what is no launch of this package: it copies data, for example because ``topk_ids`` is
        not contiguous, or ``function`` launches nothing, such as ``pack_mxfp4``. Only calls of the functions that
        launch kernels may launch nothing, with empty inputs.

    Notes
    -----
    Calls run on torch's current stream and can be captured in a CUDA graph. A prepared call is not thread-safe. A
    call that uses a workspace (see Notes of ``moe_align_block_size``) raises RuntimeError on another stream than that
    on which it was prepared, and in a capture.

    Examples
    --------
    >>> route = moe_numba.prepare(moe_numba.biased_grouped_topk, logits, bias, 8)
    >>> logits.copy_(next_logits)
    >>> weights, ids = route()
    """
    with recording() as launches:
        result = function(*args, **kwargs)
    name = getattr(function, "__name__", type(function).__name__)
    if not launches and name not in OPS:
        raise ValueError(f"function is {name}, which launched no kernel; it must be one that launches kernels")
    return PreparedCall(launches, result, (args, kwargs))
