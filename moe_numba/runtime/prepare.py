"""Prepared calls: the launches of a call with fixed arguments, repeated with the least host time."""

import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.runtime.context import current_stream
from moe_numba.runtime.driver_launch import Launcher, LaunchSequence
from moe_numba.runtime.recording import RecordedLaunch, recording
from moe_numba.runtime.torch_op import OPS


class PreparedCall:
    """A call whose arguments were checked and packed in advance; made by :func:`prepare`.

    Attributes
    ----------
    result
        The outputs, which every call overwrites and returns.
    """

    def __init__(self, launches: Any, result: Any, tensors: list[tuple[str, torch.Tensor]], others: tuple):
        self._launches, self.result = list(_joined(launches)), result
        self._others = others, launches.kept
        self._own_stream = (launches.device, launches.stream) if launches.stream_bound else None
        # A storage stays alive with the call, also when another one replaces it as that of its tensor.
        self._memory = [(name, t, t.untyped_storage(), t.data_ptr()) for name, t in tensors]

    def __call__(self) -> Any:
        """Launch the kernels on the current stream; return the outputs."""
        if _CHECKS_MEMORY:
            for name, tensor, _, address in self._memory:
                if tensor.data_ptr() != address:
                    raise RuntimeError(
                        f"{name} has other memory than when the call was prepared, as after {name}.data = ...: "
                        "change it in place, or prepare the call again"
                    )
        if self._own_stream is not None:
            self._check_stream(*self._own_stream)
        for launch in self._launches:
            launch()
        return self.result

    def _check_stream(self, device, stream):
        """Raise unless the current stream is the one whose workspace the call uses."""
        now = current_stream(device)
        # Stream 0, which is also the simulator's, cannot be captured.
        if now != stream or (now and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError(
                f"this call was prepared on stream {stream:#x} and uses that stream's workspace; it cannot run on "
                f"stream {now:#x} or in a capture"
            )


def prepare(function: Callable, /, *args: Any, **kwargs: Any) -> PreparedCall:
    """Execute a call of a public function once, and return it as a :class:`PreparedCall`.

    A prepared call reads the same memory and writes the same outputs each time. It neither checks arguments nor
    allocates, so it costs little more host time than the driver's launch. Change the inputs in place between calls.

    If a tensor gets other memory, by ``w.data = ...``, ``module.to(...)`` or a reload of weights, the call still reads
    the former memory, which it keeps alive. In the simulator, and with the environment variable
    ``MOE_NUMBA_CHECK_MEMORY=1``, it raises RuntimeError instead.

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
    >>> logits = torch.tensor([[0.0, 1, 2, 3]])
    >>> route = moe_numba.prepare(moe_numba.biased_grouped_topk, logits, None, topk=2)
    >>> _ = logits.copy_(torch.tensor([[3.0, 2, 1, 0]]))  # the next tokens, in place
    >>> weights, ids = route()
    >>> ids.tolist()
    [[0, 1]]
    """
    with recording() as launches:
        result = function(*args, **kwargs)
    name = getattr(function, "__name__", type(function).__name__)
    if not launches and name not in OPS:
        raise ValueError(f"function is {name}, which launched no kernel; it must be one that launches kernels")
    tensors = list(_named_tensors(_named_arguments(function, args, kwargs)))
    return PreparedCall(launches, result, tensors, (args, kwargs))


def _joined(launches):
    """Yield functions that repeat launches; one function repeats those that follow each other through the driver."""

    def device_of(launch):
        is_plain = isinstance(launch, RecordedLaunch) and isinstance(launch.launcher, Launcher)
        return launch.launcher.device if is_plain else None

    for device, group in itertools.groupby(launches, device_of):
        if device is None:
            yield from group
        else:
            yield LaunchSequence(tuple(group))


_CHECKS_MEMORY = simulator.ENABLED or os.environ.get("MOE_NUMBA_CHECK_MEMORY") == "1"


def _named_arguments(function, args, kwargs):
    """Yield the name and value of each argument, and of the parameters and buffers of a module."""
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        yield from owner.named_parameters()
        yield from owner.named_buffers()
        function = owner.forward if owner is function else function
    try:
        yield from inspect.signature(function).bind(*args, **kwargs).arguments.items()
    except (TypeError, ValueError):  # a callable without a signature
        yield from ((f"args[{i}]", arg) for i, arg in enumerate(args))
        yield from kwargs.items()


def _named_tensors(arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of named values and of the tuples, lists and dicts among them."""
    for name, value in arguments:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (tuple, list)):
            yield from _named_tensors((f"{name}[{i}]", item) for i, item in enumerate(value))
        elif isinstance(value, dict):
            yield from _named_tensors((f"{name}[{key!r}]", item) for key, item in value.items())
