"""Source diffs of kernels, and a counter of torch operations."""

import difflib
import inspect
from collections.abc import Callable

from torch.utils._python_dispatch import TorchDispatchMode


def diff(old: Callable, new: Callable) -> None:
    """Print the lines in which two functions or kernels differ."""
    sources = [inspect.getsource(inspect.unwrap(getattr(f, "py_func", f))).splitlines() for f in (old, new)]
    changed = [line for line in difflib.unified_diff(*sources, n=0, lineterm="") if line[:2] not in ("--", "++", "@@")]
    print("\n".join(changed))


class OpCounter(TorchDispatchMode):
    """Collects the names of torch operations that compute something, without views (``names``)."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "_unsafe_view" not in str(function):
            self.names.append(str(function).removeprefix("aten.").split(".")[0])
        return function(*args, **(kwargs or {}))
