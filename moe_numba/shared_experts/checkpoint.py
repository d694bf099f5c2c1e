"""Turn the shared experts of a DeepSeek checkpoint into routed ones, tensor by tensor.

Nothing is collected: a tensor is handed on as it comes, under another name where it belongs to a shared expert.
"""

import json
import os
import re
from pathlib import Path

from rich.progress import track

# model.layers.3.mlp.experts.17.up_proj.weight, model.layers.3.mlp.shared_experts.up_proj.weight_scale_inv
_TENSOR = re.compile(
    r"(?P<layer>(?:.*\.)?layers\.\d+\.mlp)\.(?:experts\.(?P<expert>\d+)|(?P<shared>shared_experts))"
    r"\.(?P<suffix>(?P<projection>gate|up|down)_proj\.(?:weight|weight_scale_inv))"
)


def fuse_checkpoint(weights, num_replicas=1, *, num_experts=None, n_shared_experts=None, progress=True):
    """Iterate over a checkpoint whose shared experts have become the experts after the routed ones.

    Each tensor of ``mlp.shared_experts`` is given ``num_replicas`` times, as that of experts ``num_experts``,
    ``num_experts + 1``, ...; the original is dropped. Everything else passes as it is. Where a model has several shared
    experts (DeepSeek-V2), its checkpoint holds them as one with a wider intermediate layer: they are taken apart, and
    the replicas of the first come before those of the second.

    Parameters
    ----------
    weights : iterable of (name, tensor), or path
        A path is that of a safetensors file, or of a folder of them; names and shapes are then checked before the first
        tensor is read.
    num_replicas : int
        Copies of each shared expert. They are one tensor, given several times: a loader copies it anyway.
    num_experts, n_shared_experts : int, optional
        Routed and shared experts of a layer. A folder's ``config.json`` knows them (``n_routed_experts``,
        ``n_shared_experts``); otherwise ``num_experts`` must be given, and ``n_shared_experts`` is 1 if it is not.
    progress : bool
        Show a progress bar on the terminal.

    Yields
    ------
    (str, tensor)
        At no time is more than one tensor held.

    Raises
    ------
    ValueError
        A layer has routed experts but no shared ones, or lacks a tensor of them; a shape is not that of the routed
        experts; an expert is numbered ``num_experts`` or higher. From an iterable what is missing shows at its end.
    """
    path = Path(weights) if isinstance(weights, (str, os.PathLike)) else None
    config = _config(path)
    num_experts = config.get("n_routed_experts") if num_experts is None else num_experts
    n_shared_experts = config.get("n_shared_experts", 1) if n_shared_experts is None else n_shared_experts
    if num_experts is None:
        raise ValueError("num_experts must be given, unless weights is a folder whose config.json has n_routed_experts")
    for name, value in (
        ("num_replicas", num_replicas),
        ("num_experts", num_experts),
        ("n_shared_experts", n_shared_experts),
    ):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an int of 1 or more")
    check, total = _Check(num_experts, n_shared_experts), None
    if path is None:
        weights = _checked(weights, check)
    else:
        files = _files(path)
        for name, shape in _shapes(files):
            check.see(name, shape)
        check.end()
        weights, total = _tensors(files), check.seen
    return _fuse(weights, num_replicas, num_experts, n_shared_experts, total, progress)


def _checked(weights, check):
    """The same pairs, each checked before it is given on, and all of them at the end."""
    for name, tensor in weights:
        check.see(name, tuple(tensor.shape))
        yield name, tensor
        del tensor
    check.end()


def _fuse(weights, num_replicas, num_experts, n_shared_experts, total, progress):
    for name, tensor in track(weights, "Shared experts become routed", total=total, disable=not progress):
        found = _TENSOR.fullmatch(name)
        if not found or not found["shared"]:
            yield name, tensor
            continue
        axis = _axis(found)
        width = tensor.shape[axis] // n_shared_experts
        for shared in range(n_shared_experts):
            part = tensor.narrow(axis, shared * width, width)
            for replica in range(num_replicas):
                expert = num_experts + shared * num_replicas + replica
                yield f"{found['layer']}.experts.{expert}.{found['suffix']}", part
        del tensor


def _axis(found):
    """Where a projection's matrix has the intermediate layer: gate and up make it, down takes it."""
    return 1 if found["projection"] == "down" else 0


class _Check:
    """Remembers names and shapes as they come by, and says what is wrong with them."""

    def __init__(self, num_experts, n_shared_experts):
        self.num_experts, self.n_shared_experts, self.seen = num_experts, n_shared_experts, 0
        self.routed, self.shared = {}, {}  # {layer: {suffix: shape}}

    def see(self, name, shape):
        self.seen += 1
        found = _TENSOR.fullmatch(name)
        if not found:
            return
        layer, suffix = found["layer"], found["suffix"]
        if found["shared"]:
            if shape[_axis(found)] % self.n_shared_experts:
                raise ValueError(f"{name} is {shape}; it cannot be taken apart into {self.n_shared_experts} experts")
            self.shared.setdefault(layer, {})[suffix] = shape
        else:
            if int(found["expert"]) >= self.num_experts:
                raise ValueError(f"{name} is of an expert past num_experts, which is {self.num_experts}")
            known = self.routed.setdefault(layer, {}).setdefault(suffix, shape)
            if known != shape:
                raise ValueError(f"{name} is {shape}; the layer's other experts have {known}")
        self._compare(layer, suffix, _axis(found))

    def _compare(self, layer, suffix, axis):
        routed, shared = self.routed.get(layer, {}).get(suffix), self.shared.get(layer, {}).get(suffix)
        if routed and shared:
            wanted = tuple(size * (self.n_shared_experts if i == axis else 1) for i, size in enumerate(routed))
            if shared != wanted:
                raise ValueError(
                    f"{layer}.shared_experts.{suffix} is {shared}; for {self.n_shared_experts} shared experts like the "
                    f"routed ones, {routed}, it must be {wanted}"
                )

    def end(self):
        if not self.routed:
            raise ValueError("no tensor is of a routed expert (...layers.N.mlp.experts.M...): is this DeepSeek's?")
        for layer, suffixes in self.routed.items():
            if layer not in self.shared:
                raise ValueError(f"{layer} has routed experts but no shared_experts")
            if missing := sorted(set(suffixes) - set(self.shared[layer])):
                raise ValueError(f"{layer}.shared_experts.{missing[0]} is missing")
        for layer, suffixes in self.shared.items():
            if unknown := sorted(set(suffixes) - set(self.routed.get(layer, {}))):
                raise ValueError(f"{layer} has shared_experts.{unknown[0]}, but no routed expert has its like")


def _config(path):
    file = path and path / "config.json"
    return json.loads(file.read_text()) if file and file.is_file() else {}


def _files(path):
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"weights is {path}, which is no safetensors file and no folder of them")
    return files


def _shapes(files):
    """Names and shapes, from the files' headers."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  the object is no dictionary
                yield name, tuple(opened.get_slice(name).get_shape())


def _tensors(files):
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
