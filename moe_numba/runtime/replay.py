"""Launches of a call that later calls of the same plan repeat: only the addresses of their tensors are packed again."""

import bisect
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.driver_launch import LaunchSequence
from moe_numba.runtime.outputs import remember
from moe_numba.runtime.overlap import address_range
from moe_numba.runtime.recording import recording, recordings


def _is_replayed():
    """Whether launches go through the driver; the simulator and the compile-only mode make each call anew."""
    return not (simulator.ENABLED or devices.target())


class Replay:
    """A function that launches kernels, whose calls differ in nothing but the addresses of their tensors.

    The first call records which launches the function makes, and which tensor each of their addresses lies in. It and
    all later calls then make these launches, with the addresses of their own tensors, on the current stream. So the
    function must make the same launches for all tensors of these shapes, strides, dtypes, devices and alignments. It
    must neither allocate nor copy anything, and keep no tensor.

    Parameters
    ----------
    function : callable
        ``function(*tensors)``, tensors or None; always with the same ones that are None.
    check_alignment : callable, optional
        ``check_alignment(*tensors)`` raises for tensors whose address is not allowed, if ``function`` does not. It is
        called if one of them does not start at a multiple of 16 bytes, and where launches are not repeated.
    """

    def __init__(self, function: Callable[..., Any], check_alignment: Callable[..., Any] = lambda *_: None):
        self.function, self.check_alignment = function, check_alignment
        self._recorded: dict = {}  # alignments of the tensors -> (tensor and offset of each address, LaunchSequence)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch the kernels."""
        if recordings or not _is_replayed():
            self.check_alignment(*tensors)
            self.function(*tensors)
            return
        addresses, alignments = [t.data_ptr() for t in tensors if t is not None], None
        if functools.reduce(operator.or_, addresses) & 15:
            self.check_alignment(*tensors)
            alignments = tuple([address & 15 for address in addresses])
        found = self._recorded.get(alignments) or remember(self._recorded, alignments, self._record(tensors))
        sources, launch = found
        if launch is None:
            self.function(*tensors)
        else:
            launch([addresses[i] + offset for i, offset in sources])

    def _record(self, tensors):
        """Return (index of a tensor that is not None, offset in bytes) of each address, and the launches.

        Without launches (None) if an address is in no tensor, or the driver's tensor maps do not begin with theirs.
        """
        tensors = _without_overlap(tensors)
        with recording(executes=False) as launches:
            self.function(*tensors)
        given = (t for t in tensors if t is not None)
        ranges = sorted((*address_range(t), i) for i, t in enumerate(given))
        changing, indices = [], {}
        for i, launch in enumerate(launches):
            for j, value in launch.launcher.addresses_in(launch.values):
                start, end, tensor = ranges[bisect.bisect_right(ranges, (value, float("inf"))) - 1]
                if not start <= value < end:
                    return (), None
                source = tensor, value - start
                changing.append((i, j, indices.setdefault(source, len(indices))))
        if not launches:
            return (), None
        return tuple(indices), LaunchSequence(launches, changing, len(indices))


def _without_overlap(tensors):
    """Return tensors with the addresses of no other one: those that overlap others are replaced by new ones.

    As where an output is an input. New ones have the same shape, strides, dtype, device and alignment, but no values.
    """
    made, ranges = [], []
    for tensor in tensors:
        if tensor is not None:
            start, end = address_range(tensor)
            if any(start < e and s < end for s, e in ranges):
                tensor = _like(tensor, end - start)
                start, end = address_range(tensor)
            ranges.append((start, end))
        made.append(tensor)
    return made


def _like(tensor, num_bytes):
    memory = torch.empty(num_bytes + 32, dtype=torch.uint8, device=tensor.device)
    skipped = -memory.data_ptr() % 16 + tensor.data_ptr() % 16
    values = memory[skipped:][:num_bytes].view(tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride())
