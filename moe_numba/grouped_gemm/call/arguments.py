"""Arguments of a call of the grouped GEMM: its tensors, its options and the sizes that follow from them."""

from operator import itemgetter
from typing import Any, NamedTuple

import torch

from moe_numba.grouped_gemm.common.constants import ALPHA, DTYPE_NAMES, LIMIT


class GemmOptions(NamedTuple):
    """Options of a call: those of the public functions, ``silu_and_mul``, ``early_weight`` and ``store_gate_up``.

    The defaults are the values of a public function that does not have the option.
    """

    silu_and_mul: bool = False
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False
    activation: str = "silu"
    alpha: float = ALPHA
    limit: float = LIMIT
    use_fast_accum: bool = False
    # Load weights while the kernel launched before this one still runs. It may compute any input but the group sizes
    # and scales per tensor: what wrote these must have completed when that kernel allows its dependents to start.
    early_weight: bool = False
    store_gate_up: bool = False  # with silu_and_mul in bfloat16, on GPUs with wgmma: [gate, up] is a second output


class GemmTensors(NamedTuple):
    """The tensors of a call, with the names of the public functions' parameters."""

    x: Any
    weight: Any
    seqlens: Any
    cu_seqlens: Any
    x_scale: Any
    w_scale: Any  # y_scale with per-tensor scales
    offs: Any
    gather_indices: Any
    bias: Any
    scatter_indices: Any
    row_weights: Any
    m_indices: Any
    out_scale: Any  # one float32, of y in FP8
    x_low: Any  # with weight_low, in bfloat16 on GPUs with wgmma: y is x @ weight.T + x_low @ weight_low.T
    weight_low: Any
    out: Any  # that rows are scattered to; else None


PLAIN = GemmOptions()
# By scaling: the parameters' names of the tensors, in the order of `GemmTensors`.
_SCALINGS = "tensor", "row", "block", "none", "mxfp4"
NAMES: dict[str, tuple[str, ...]] = dict.fromkeys(_SCALINGS, GemmTensors._fields)
NAMES["tensor"] = tuple("y_scale" if name == "w_scale" else name for name in GemmTensors._fields)
# All arguments that a call may have, with their values if its public function does not have them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    scaling: dict.fromkeys((*names, "num_seq_per_group_avg", "config")) | GemmOptions._field_defaults
    for scaling, names in NAMES.items()
}
_DEFAULTS["mxfp4"]["n"] = None
_select_tensors = {scaling: itemgetter(*names) for scaling, names in NAMES.items()}
_select_options = itemgetter(*GemmOptions._fields)


def split_arguments(scaling: str, arguments: dict[str, Any], more: dict[str, Any]) -> tuple[tuple, tuple, Any, dict]:
    """Split the arguments of a call, by name; ``more`` are arguments beside those of a public function.

    Returns
    -------
    tensors : tuple
        The fields of :class:`GemmTensors`.
    options : tuple
        The fields of :class:`GemmOptions`.
    out
        The output argument, or None.
    others : dict
        All arguments by name, with the defaults of those that are not given.
    """
    defaults = _DEFAULTS[scaling]
    others = {**defaults, **arguments, **more}
    if len(others) > len(defaults):
        raise TypeError(f"{', '.join(others.keys() - defaults.keys())}: the grouped GEMM has no such argument")
    out = others["out"]
    if others["scatter_indices"] is None:
        others["out"] = None  # an output with the rows of x: a plan does not depend on it
    return _select_tensors[scaling](others), _select_options(others), out, others


class GemmShape(NamedTuple):
    """Sizes and options of a call."""

    scaling: str
    row_layout: str
    silu_and_mul: bool
    average: int  # rows per group
    groups: int
    total_rows: int
    capacity: int  # rows of a group if x is masked, or else 0
    n: int  # columns of y
    k: int
    options: GemmOptions = PLAIN
    y_rows: int = 0
    scale_strides: tuple[int, int, int] = (0, 0, 0)  # of block scales of x; see `kernel.ScaleStrides`

    @property
    def sizes(self):
        """Arguments of the kernels."""
        return self.groups, self.total_rows, self.capacity, self.n


def has_epilogue_options(tensors: GemmTensors, options: GemmOptions) -> bool:
    """Whether a call needs an epilogue that the block-scaled kernel does not have."""
    names = "silu_and_mul", "early_weight", "store_gate_up"
    plain = PLAIN._replace(**{name: getattr(options, name) for name in names})
    return options != plain or any(t is not None for t in (tensors.bias, tensors.scatter_indices, tensors.row_weights))


def epilogue_fields(tensors: GemmTensors, options: GemmOptions) -> dict[str, Any]:
    """Return the fields of a kernel's configuration that the output of a call and the inputs of its epilogue have."""
    return dict(
        bias="" if tensors.bias is None else DTYPE_NAMES[tensors.bias.dtype],
        out_dtype="f32" if options.accumulate else DTYPE_NAMES[options.out_dtype],
        accumulate=options.accumulate,
        scatter=tensors.scatter_indices is not None,
        row_weights=tensors.row_weights is not None,
    )


def activation_fields(options: GemmOptions) -> dict[str, Any]:
    """Return the fields of a kernel's configuration that the activation has: no numbers that it does not use."""
    if options.activation != "swigluoai":
        return dict(activation=options.activation)
    return dict(activation=options.activation, alpha=float(options.alpha), limit=float(options.limit))
