"""Convert the shared experts of a DeepSeek checkpoint to routed experts.

Tensors are streamed one at a time. Tensors of shared experts are renamed.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from rich.progress import track

from moe_numba.runtime.validate import check_int

# model.layers.3.mlp.experts.17.up_proj.weight, model.layers.3.mlp.shared_experts.up_proj.weight_scale_inv
_TENSOR = re.compile(
    r"(?P<layer>(?:.*\.)?layers\.\d+\.mlp)\.(?:experts\.(?P<expert>\d+)|(?P<shared>shared_experts))"
    r"\.(?P<suffix>(?P<projection>gate|up|down)_proj\.(?:weight|weight_scale_inv))"
)
_OF_EXPERT = re.compile(r"(?:.*\.)?layers\.\d+\.mlp\.(?:experts\.\d+|shared_experts)\..*")


def fuse_checkpoint(
    weights: Iterable[tuple[str, torch.Tensor]] | str | os.PathLike,
    num_replicas: int = 1,
    *,
    num_experts: int | None = None,
    n_shared_experts: int | None = None,
    progress: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over a checkpoint whose shared experts are converted to experts after the routed ones.

    Each tensor of ``mlp.shared_experts`` is yielded ``num_replicas`` times, as experts ``num_experts``,
    ``num_experts + 1``, ..., instead of under its original name. All other tensors are yielded unchanged. A checkpoint
    with several shared experts (DeepSeek-V2) stores them as one with a wider intermediate layer. They are split, and
    the replicas of the first precede those of the second. Of experts, routed and shared, ``weight`` and
    ``weight_scale_inv`` of ``gate_proj``, ``up_proj`` and ``down_proj`` are supported.

    Parameters
    ----------
    weights : iterable of (name, tensor), or path
        A path names a safetensors file or a folder of them. Names and shapes are then checked before the first tensor
        is read.
    num_replicas : int
        Copies of each shared expert. The same tensor is yielded for each; loaders copy it.
    num_experts, n_shared_experts : int, optional
        Routed and shared experts per layer. The defaults are ``n_routed_experts`` and ``n_shared_experts`` of the
        folder's ``config.json``. Without it ``num_experts`` is required and ``n_shared_experts`` defaults to 1.
    progress : bool
        Show a progress bar on the terminal.

    Yields
    ------
    (str, tensor)
        At most one tensor is held at a time.

    Raises
    ------
    ValueError
        If an argument is out of range, a name occurs twice, an expert has a tensor that is not supported, a layer has
        routed experts but lacks one of ``num_experts`` or the shared ones, or one of their tensors, shapes differ from
        those of the routed experts, or an expert id is ``num_experts`` or higher. With an iterable, missing tensors are
        reported at its end.
    TypeError
        If an argument is not an int, or ``weights`` is neither a path nor an iterable of (name, tensor).
    FileNotFoundError
        If a path names neither a safetensors file nor a folder of them.

    Examples
    --------
    >>> experts = "experts.0", "experts.1", "shared_experts"
    >>> weights = [(f"model.layers.3.mlp.{name}.up_proj.weight", torch.zeros(4, 4)) for name in experts]
    >>> for name, tensor in moe_numba.fuse_checkpoint(weights, num_experts=2, n_shared_experts=1, progress=False):
    ...     print(name)
    model.layers.3.mlp.experts.0.up_proj.weight
    model.layers.3.mlp.experts.1.up_proj.weight
    model.layers.3.mlp.experts.2.up_proj.weight
    """
    path = Path(weights) if isinstance(weights, (str, os.PathLike)) else None
    if path is None and (isinstance(weights, Mapping) or not isinstance(weights, Iterable)):
        raise TypeError(f"weights is {type(weights).__name__}; it must be a path or an iterable of (name, tensor)")
    files = [] if path is None else _files(path)  # before the options: a wrong path has no config.json either
    config = _config(path)
    num_experts = config.get("n_routed_experts") if num_experts is None else num_experts
    n_shared_experts = config.get("n_shared_experts", 1) if n_shared_experts is None else n_shared_experts
    if num_experts is None:
        raise ValueError(
            "num_experts is None; it is required, unless weights is a folder whose config.json has n_routed_experts"
        )
    num_replicas, num_experts = check_int("num_replicas", num_replicas, 1), check_int("num_experts", num_experts, 1)
    n_shared_experts = check_int("n_shared_experts", n_shared_experts, 1)
    validator, total = _CheckpointValidator(num_experts, n_shared_experts), None
    if path is None:
        weights = _validated(weights, validator)
    else:
        for name, shape in _read_shapes(files):
            validator.add(name, shape)
        validator.finish()
        weights, total = _read_tensors(files), len(validator.names)
    return _rename_shared(weights, num_replicas, num_experts, n_shared_experts, total, progress)


def _validated(weights, validator):
    """Yield the same pairs; validate each, and the whole checkpoint at the end."""
    for pair in weights:
        match pair:
            case [str(name), torch.Tensor() as tensor]:
                validator.add(name, tuple(tensor.shape))
            case _:
                raise TypeError(f"weights has the element {_describe(pair)}; each must be (name, tensor)")
        yield name, tensor
        del pair, tensor
    validator.finish()


def _describe(pair):
    """Describe what is no pair of name and tensor."""
    if not isinstance(pair, tuple | list):
        return type(pair).__name__
    return f"({', '.join(repr(part) if isinstance(part, str) else type(part).__name__ for part in pair)})"


def _rename_shared(weights, num_replicas, num_experts, n_shared_experts, total, progress):
    for name, tensor in track(weights, "Fusing shared experts", total=total, disable=not progress):
        match = _TENSOR.fullmatch(name)
        if not match or not match["shared"]:
            yield name, tensor
            continue
        axis = _intermediate_axis(match)
        width = tensor.shape[axis] // n_shared_experts
        for shared in range(n_shared_experts):
            shard = tensor.narrow(axis, shared * width, width)
            for replica in range(num_replicas):
                expert = num_experts + shared * num_replicas + replica
                yield f"{match['layer']}.experts.{expert}.{match['suffix']}", shard
        del tensor


def _intermediate_axis(match):
    """Return the axis of a projection's matrix that belongs to the intermediate layer."""
    return 1 if match["projection"] == "down" else 0


class _CheckpointValidator:
    """Collects the shapes of a checkpoint's tensors and raises ValueError for the first error."""

    def __init__(self, num_experts, n_shared_experts):
        self.num_experts, self.n_shared_experts = num_experts, n_shared_experts
        self.names = set()
        self.routed, self.shared = {}, {}  # {layer: {suffix: shape}}

    def add(self, name, shape):
        if name in self.names:
            raise ValueError(f"weights has {name} twice; each name is allowed once")
        self.names.add(name)
        match = _TENSOR.fullmatch(name)
        if not match:
            if _OF_EXPERT.fullmatch(name):
                supported = "weight and weight_scale_inv of gate_proj, up_proj and down_proj"
                raise ValueError(f"weights has {name}; of an expert, only {supported} are supported")
            return
        layer, suffix = match["layer"], match["suffix"]
        if len(shape) != 2:
            raise ValueError(f"{name} has shape {shape}; it must have 2 dimensions")
        if match["shared"]:
            if shape[_intermediate_axis(match)] % self.n_shared_experts:
                raise ValueError(f"{name} is {shape}; it cannot be split into {self.n_shared_experts} experts")
            self.shared.setdefault(layer, {})[suffix] = shape
        else:
            if int(match["expert"]) >= self.num_experts:
                raise ValueError(f"{name} belongs to an expert with id num_experts ({self.num_experts}) or higher")
            first_shape = self.routed.setdefault(layer, {}).setdefault(suffix, shape)
            if first_shape != shape:
                raise ValueError(f"{name} is {shape}; the layer's other experts have {first_shape}")
        self._compare_shapes(layer, suffix, _intermediate_axis(match))

    def _compare_shapes(self, layer, suffix, axis):
        routed, shared = self.routed.get(layer, {}).get(suffix), self.shared.get(layer, {}).get(suffix)
        if routed and shared:
            expected = tuple(size * (self.n_shared_experts if i == axis else 1) for i, size in enumerate(routed))
            if shared != expected:
                raise ValueError(
                    f"{layer}.shared_experts.{suffix} is {shared}; for {self.n_shared_experts} shared experts like the "
                    f"routed ones, {routed}, it must be {expected}"
                )

    def finish(self):
        if not self.routed:
            raise ValueError(
                "weights has no tensor of a routed expert (...layers.N.mlp.experts.M...); is it a DeepSeek checkpoint?"
            )
        for layer, suffixes in self.routed.items():
            if layer not in self.shared:
                raise ValueError(f"{layer} has routed experts but no shared_experts")
            if missing := sorted(set(suffixes) - set(self.shared[layer])):
                raise ValueError(f"{layer}.shared_experts.{missing[0]} is missing")
            names = (f"{layer}.experts.{e}.{suffix}" for suffix in suffixes for e in range(self.num_experts))
            if missing_name := next((name for name in names if name not in self.names), None):
                raise ValueError(f"{missing_name} is missing; num_experts is {self.num_experts}")
        for layer, suffixes in self.shared.items():
            if unmatched := sorted(set(suffixes) - set(self.routed.get(layer, {}))):
                raise ValueError(f"{layer} has shared_experts.{unmatched[0]}, but no routed expert has this tensor")


def _config(path):
    file = path and path / "config.json"
    return json.loads(file.read_text()) if file and file.is_file() else {}


def _files(path):
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"weights is {path}, which is neither a safetensors file nor a folder of them")
    return files


def _read_shapes(files):
    """Yield names and shapes from the headers of the files."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dictionary
                yield name, tuple(opened.get_slice(name).get_shape())


def _read_tensors(files):
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
