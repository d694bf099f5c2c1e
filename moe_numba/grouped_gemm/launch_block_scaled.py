"""Launches of the block-scaled kernel, for groups of many rows on GPUs with wgmma."""

from functools import cache

from moe_numba import simulator
from moe_numba.grouped_gemm.config import BLOCK_K_BYTES, THREADS
from moe_numba.grouped_gemm.config_block_scaled import BOX_ROWS, BlockScaledConfig, with_gather
from moe_numba.grouped_gemm.kernel_block_scaled import make_kernel
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.tensor_map import tensor_map_template

BLOCK_SCALED_SIGNATURE = (
    *(TENSOR_MAP, TENSOR_MAP, "int32*", "float32*", "int32*", "int32*", "float32*", "float32*"),
    *("int32",) * 5,
    *("int32", "int32", "int64"),  # strides of x_scale: rows, blocks of k, groups
    *("uint8*", "int32*", "int32", "int32"),  # x, row_indices, x_rows, row_bytes: used with gather only
)


class BlockScaledLaunch:
    """Launches for tensors of given shapes, strides and dtypes."""

    def __init__(self, config, tensors, shape):
        x, weight, indices = tensors[0], tensors[1], tensors[7]
        self.config = config = config if indices is None else with_gather(config)
        self.start, self.grid = get_block_scaled_launcher(config, x.device.index or 0), _grid_size(x.device)
        rows = x.flatten(0, 1) if x.dim() == 3 else x
        # Gathering from no rows: a tensor map cannot be of an empty tensor.
        self.x_is_empty = not len(rows)
        self.x_map = tensor_map_template(
            weight[0] if self.x_is_empty else rows, (BOX_ROWS, BLOCK_K_BYTES), swizzle=128, name="x"
        )
        self.weight_map = tensor_map_template(weight, (1, config.half_rows, BLOCK_K_BYTES), swizzle=128, name="weight")
        self.is_masked = shape.row_layout == "masked"
        self.sizes = *shape.sizes, shape.k, *shape.scale_strides
        self.gather_sizes = len(x), 0 if indices is None else x.stride(0)

    def __call__(self, tensors, outputs):
        """Launch the kernel. A pointer that it does not use is that of the group sizes."""
        x, weight, seqlens, cu_seqlens, x_scale, weight_scale, offs, indices, *_ = tensors
        rows = weight[0] if self.x_is_empty else x.flatten(0, 1) if self.is_masked else x
        lengths = address(seqlens if offs is None else offs)
        self.start(
            self.grid,
            THREADS,
            None,
            self.x_map(rows),
            self.weight_map(weight),
            address(outputs[0]),
            address(outputs[-1]),
            lengths,
            lengths if cu_seqlens is None else address(cu_seqlens),
            address(x_scale),
            address(weight_scale),
            *self.sizes,
            address(rows),
            lengths if indices is None else address(indices),
            *self.gather_sizes,
        )


@cache
def get_block_scaled_launcher(config: BlockScaledConfig, device: int):
    """Compile and load the kernel of a configuration on a device."""
    kernel, shared_bytes = make_kernel(config)
    return launcher(
        kernel,
        BLOCK_SCALED_SIGNATURE,
        device,
        launch_bounds=THREADS,
        shared_bytes=shared_bytes,
        cluster=config.cluster_size if config.cluster_size > 1 else None,
        dependent=True,
    )


@cache
def _grid_size(device):
    """One CTA per SM, rounded down to an even number for clusters of two."""
    return 2 if simulator.ENABLED else gpu_of(device).sm_count // 2 * 2
