"""Arguments of a call of the grouped GEMM: its tensors, its options and the sizes that follow from them."""

from typing import Any, NamedTuple

import torch

from moe_numba.grouped_gemm.common.constants import DTYPE_NAMES


class GemmOptions(NamedTuple):
    """Options of a call: of the epilogue, as for the public functions, and ``early_weight``."""

    silu_and_mul: bool = False
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    use_fast_accum: bool = False
    # Load weights while the kernel launched before this one still runs. It may compute any input but the group sizes:
    # the kernel that wrote them must have completed when that one allows its dependents to start.
    early_weight: bool = False


class GemmTensors(NamedTuple):
    """The tensors of a call, with their names in messages."""

    x: Any
    weight: Any
    seqlens: Any
    cu_seqlens: Any
    x_scale: Any
    w_scale: Any  # or y_scale
    offs: Any
    gather_indices: Any
    bias: Any
    scatter_indices: Any
    row_weights: Any
    out: Any  # that rows are scattered to
    m_indices: Any
    out_scale: Any = None  # one float32, of y in FP8


NAMES = GemmTensors._fields
PLAIN = GemmOptions()


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
    plain = PLAIN._replace(silu_and_mul=options.silu_and_mul, early_weight=options.early_weight)
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
