"""Launches of the block-scaled kernel, for groups of many rows on GPUs with wgmma."""

from functools import cache

from moe_numba.grouped_gemm.block_scaled.config import BOX_ROWS, BUFFER_ROWS, ROW_BYTES, BlockScaledConfig, with_gather
from moe_numba.grouped_gemm.block_scaled.kernel import make_kernel
from moe_numba.grouped_gemm.call.checks import is_packed
from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, THREADS
from moe_numba.grouped_gemm.common.tma_launch import TmaLaunch, signature_of
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.launch import launcher
from moe_numba.runtime.tensor_map import tensor_map_template

VECTOR = 4  # float32 scales in a load of 16 bytes


class BlockScaledLaunch(TmaLaunch):
    """Launches for tensors of given shapes, strides and dtypes."""

    def __init__(self, config, tensors, shape):
        config = config if tensors.gather_indices is None else with_gather(config)
        packed_x, packed_weight = is_packed(tensors.x_scale), is_packed(tensors.w_scale)
        row, k_block, group = shape.scale_strides
        # Producers that gather rows load each scale alone: the same kernel for any strides.
        has_vectors = not config.gather and -(-shape.k // FP8_SCALE_BLOCK) % VECTOR == 0
        self.config = config = config._replace(
            packed_x_scale=packed_x,
            packed_weight_scale=packed_weight,
            vector_x_scale=has_vectors and not packed_x and k_block == 1 and (row | group) % VECTOR == 0,
            vector_weight_scale=has_vectors and not packed_weight,
        )
        self.device, self.y_map = tensors.x.device.index or 0, None
        start = get_block_scaled_launcher(config, self.device)
        x_box, weight_box = (BOX_ROWS, BLOCK_K_BYTES), (1, config.half_rows, BLOCK_K_BYTES)
        super().__init__(start, tensors, shape, x_box, weight_box)

    def output_maps(self, y):
        """Return the tensor map of y, with boxes of one buffer of the epilogue."""
        y = y.flatten(0, -2)
        if self.y_map is None:
            self.y_map = tensor_map_template(y, (BUFFER_ROWS, ROW_BYTES // y.element_size()), swizzle=128, name="out")
        return (self.y_map(y),)

    def __call__(self, tensors, outputs):
        has_vectors = self.config.vector_x_scale or self.config.vector_weight_scale
        x_scale, weight_scale = tensors[4:6]
        if has_vectors and (x_scale.data_ptr() | weight_scale.data_ptr()) % 16:  # views of other scales
            self.config = self.config._replace(vector_x_scale=False, vector_weight_scale=False)
            self.start = get_block_scaled_launcher(self.config, self.device)
        super().__call__(tensors, outputs)


@cache
def get_block_scaled_launcher(config: BlockScaledConfig, device: int):
    """Compile and load the kernel of a configuration on a device."""
    kernel, shared_bytes = make_kernel(config)
    return launcher(
        kernel,
        signature_of(config),
        device,
        launch_bounds=THREADS,
        shared_bytes=shared_bytes,
        cluster=config.cluster_size if config.cluster_size > 1 else None,
        dependent=True,
    )
