"""Launches of the kernels with TMA and wgmma: the arguments that they have in common."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig
from moe_numba.grouped_gemm.call.checks import is_mn_major
from moe_numba.grouped_gemm.common.constants import THREADS
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.device import persistent_ctas
from moe_numba.runtime.launch import address
from moe_numba.runtime.tensor_map import tensor_map_template

SIGNATURE = (
    *(TENSOR_MAP, TENSOR_MAP, "int32*", "float32*", "int32*", "int32*", "float32*", "float32*", *("int32",) * 5),
    *("int32", "int32", "int64"),  # strides of x_scale: rows, blocks of k, groups
    *("uint8*", "int32*", "int32", "int32"),  # x, row_indices, x_rows, row_bytes: used with gather only
)
# Of kernels whose epilogue reads bias, row_weights, scatter_indices and y_rows, or scales per row.
EPILOGUE_INPUTS = "uint16*", "float32*", "int32*", "int32"
LOW_RANK_INPUTS = TENSOR_MAP, TENSOR_MAP, "int32"  # x_low, weight_low, their k; behind EPILOGUE_INPUTS


def signature_of(config):
    """Return the signature of the kernel of a configuration, a GemmConfig or a BlockScaledConfig."""
    signature = with_scale_types(SIGNATURE, config)
    if getattr(config, "takes_epilogue_inputs", False):
        signature = *signature, *EPILOGUE_INPUTS
    if getattr(config, "low_rank", False):
        signature = *signature, *LOW_RANK_INPUTS
    return (TENSOR_MAP, *signature) if isinstance(config, BlockScaledConfig) else signature  # its output has a map, too


def with_scale_types(signature, config):
    """Return a signature with the types of the second output and of the scales of x and weight."""
    packed = config.packed_x_scale, config.packed_weight_scale
    if getattr(config, "stores_gate_up", False):
        signature = *signature[:3], "int32*", *signature[4:]
    return *signature[:6], *("int32*" if each else "float32*" for each in packed), *signature[8:]


class Pointers(NamedTuple):
    """Addresses of a call's tensors. One that the kernel does not use is that of the group sizes."""

    rows: Any  # of x, all groups'
    lengths: Any
    starts: Any
    x_scale: Any
    w_scale: Any
    row_indices: Any
    second: Any  # the last output, or with ``out_scale`` that input
    epilogue: tuple[Any, Any, Any]  # bias, row_weights and scatter_indices


class RowsLaunch(ABC):
    """Launches of a kernel that reads rows of x by TMA, for tensors of given shapes, strides and dtypes.

    Parameters
    ----------
    start : callable
        The launcher of the kernel.
    grid, threads : int
        CTAs, and threads of one.
    tensors : GemmTensors
    x_box : tuple of int
        What one TMA load of x copies.
    """

    def __init__(self, start, grid, threads, tensors, x_box):
        x, indices = tensors.x, tensors.gather_indices
        self.start, self.grid, self.threads, self.is_masked = start, grid, threads, x.dim() == 3
        rows = x.flatten(0, 1) if self.is_masked else x
        # Gathering from no rows: a tensor map cannot be of an empty tensor.
        self.x_is_empty = not len(rows)
        rows = self.placeholder(x, tensors.weight) if self.x_is_empty else rows
        self.x_map = tensor_map_template(rows, x_box, swizzle=128, name="x")
        self.gather_sizes = len(x), 0 if indices is None else x.stride(0) * x.element_size()

    def __call__(self, tensors, outputs):
        """Launch the kernel."""
        x, weight, seqlens, cu_seqlens, x_scale, w_scale, offs, indices, *others = tensors
        bias, scatter_indices, row_weights, _, out_scale, x_low, weight_low, _ = others
        rows = x.flatten(0, 1) if self.is_masked else x
        if self.x_is_empty:
            rows = self.placeholder(x, weight)
            if x_scale is not None and not x_scale.numel():
                x_scale = None  # an empty tensor has no address; every row index is out of bounds
        lengths = address(seqlens if offs is None else offs)
        pointers = Pointers(
            address(rows),
            lengths,
            lengths if cu_seqlens is None else address(cu_seqlens),
            lengths if x_scale is None else address(x_scale),
            lengths if w_scale is None else address(w_scale),
            lengths if indices is None else address(indices),
            address(outputs[-1] if out_scale is None else out_scale),
            (
                lengths if bias is None else address(bias),
                lengths if row_weights is None else address(row_weights),
                lengths if scatter_indices is None else address(scatter_indices),
            ),
        )
        low_rank = () if x_low is None else self.low_rank_arguments(x_low, weight_low)
        arguments = *self.arguments(weight, outputs, pointers), *low_rank
        self.start(self.grid, self.threads, None, self.x_map(rows), *arguments)

    @abstractmethod
    def arguments(self, weight, outputs, pointers):
        """Return the arguments of the kernel behind the tensor map of x."""

    def low_rank_arguments(self, x_low, weight_low):
        """Return the arguments of a kernel with ``low_rank`` behind all others."""
        raise NotImplementedError

    @abstractmethod
    def placeholder(self, x, weight):
        """Return a matrix in the memory of ``weight`` to encode a tensor map of, for an x without rows."""


class TmaLaunch(RowsLaunch):
    """Launches of a kernel that reads the weight by TMA, too.

    Parameters
    ----------
    shape : GemmShape
    weight_box : tuple of int
        What one TMA load of the weight copies.
    view_weight : callable, optional
        Returns the view of weight that its tensor map covers.
    takes_epilogue_inputs : bool
        Whether the kernel takes ``EPILOGUE_INPUTS``.
    start, tensors, x_box
        See :class:`RowsLaunch`.
    """

    def __init__(self, start, tensors, shape, x_box, weight_box, view_weight=None, takes_epilogue_inputs=False):
        super().__init__(start, persistent_ctas(tensors.x.device, 2), THREADS, tensors, x_box)  # even: clusters of two
        self.view_weight = view_weight or (lambda weight: weight)
        self.weight_map = tensor_map_template(self.view_weight(tensors.weight), weight_box, swizzle=128, name="weight")
        self.sizes = *shape.sizes, shape.k, *shape.scale_strides
        self.y_rows = shape.y_rows if takes_epilogue_inputs else None

    def arguments(self, weight, outputs, pointers):
        return (
            self.weight_map(self.view_weight(weight)),
            *self.output_maps(outputs[0]),
            address(outputs[0]),
            pointers.second,
            pointers.lengths,
            pointers.starts,
            pointers.x_scale,
            pointers.w_scale,
            *self.sizes,
            pointers.rows,
            pointers.row_indices,
            *self.gather_sizes,
            *(() if self.y_rows is None else (*pointers.epilogue, self.y_rows)),
        )

    def output_maps(self, y):
        """Return the tensor maps of the output."""
        return ()

    def placeholder(self, x, weight):
        return weight[0].mT if is_mn_major(weight) else weight[0]
