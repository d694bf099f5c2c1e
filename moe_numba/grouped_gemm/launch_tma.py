"""Launches of the kernels with TMA and wgmma: the arguments that they have in common."""

from moe_numba.grouped_gemm.checks import is_mn_major
from moe_numba.grouped_gemm.config import THREADS
from moe_numba.grouped_gemm.config_block_scaled import BlockScaledConfig
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


def signature_of(config):
    """Return the signature of the kernel of a configuration, a GemmConfig or a BlockScaledConfig."""
    has_inputs = getattr(config, "has_inputs", False)
    signature = with_scale_types((*SIGNATURE, *EPILOGUE_INPUTS) if has_inputs else SIGNATURE, config)
    return (TENSOR_MAP, *signature) if isinstance(config, BlockScaledConfig) else signature  # its output has a map, too


def with_scale_types(signature, config):
    """Return a signature with the types of the scales of x and weight, its seventh and eighth arguments."""
    packed = config.packed_x_scale, config.packed_weight_scale
    return *signature[:6], *("int32*" if each else "float32*" for each in packed), *signature[8:]


class TmaLaunch:
    """Launches for tensors of given shapes, strides and dtypes.

    Parameters
    ----------
    start : callable
        The launcher of the kernel.
    tensors : GemmTensors
    shape : GemmShape
    x_box, weight_box : tuple of int
        What one TMA load copies.
    view_weight : callable, optional
        Returns the view of weight that its tensor map covers.
    """

    def __init__(self, start, tensors, shape, x_box, weight_box, view_weight=None):
        x, weight, indices = tensors.x, tensors.weight, tensors.gather_indices
        self.start, self.grid = start, persistent_ctas(x.device, 2)  # even, for clusters of two
        self.view_weight = view_weight or (lambda weight: weight)
        rows = x.flatten(0, 1) if x.dim() == 3 else x
        # Gathering from no rows: a tensor map cannot be of an empty tensor.
        self.x_is_empty = not len(rows)
        self.x_map = tensor_map_template(_stand_in(weight) if self.x_is_empty else rows, x_box, swizzle=128, name="x")
        self.weight_map = tensor_map_template(self.view_weight(weight), weight_box, swizzle=128, name="weight")
        self.is_masked = shape.row_layout == "masked"
        self.sizes = *shape.sizes, shape.k, *shape.scale_strides
        self.gather_sizes = len(x), 0 if indices is None else x.stride(0) * x.element_size()

    def __call__(self, tensors, outputs):
        """Launch the kernel. A pointer that it does not use is that of the group sizes."""
        x, weight, seqlens, cu_seqlens, x_scale, weight_scale, offs, indices, *rest = tensors
        rows = _stand_in(weight) if self.x_is_empty else x.flatten(0, 1) if self.is_masked else x
        lengths = address(seqlens if offs is None else offs)
        # An empty tensor has no address; the kernel reads no scale, because every row index is out of bounds.
        x_scale = weight_scale if self.x_is_empty else x_scale
        self.start(
            self.grid,
            THREADS,
            None,
            self.x_map(rows),
            self.weight_map(self.view_weight(weight)),
            *self.output_maps(outputs[0]),
            address(outputs[0]),
            address(outputs[-1]),
            lengths,
            lengths if cu_seqlens is None else address(cu_seqlens),
            lengths if x_scale is None else address(x_scale),
            lengths if weight_scale is None else address(weight_scale),
            *self.sizes,
            address(rows),
            lengths if indices is None else address(indices),
            *self.gather_sizes,
            *self.epilogue_arguments(lengths, *rest),
        )

    def output_maps(self, y):
        """Return the tensor maps of the output."""
        return ()

    def epilogue_arguments(self, lengths, bias, scatter_indices, row_weights, *_):
        """Return the arguments of the epilogue."""
        return ()


def _stand_in(weight):
    """Return a matrix to encode a tensor map of, for an x without rows; the kernel loads none of its rows."""
    return weight[0].mT if is_mn_major(weight) else weight[0]
