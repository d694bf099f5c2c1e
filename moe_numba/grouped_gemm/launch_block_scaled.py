"""Launches of the block-scaled kernel, for groups of many rows on GPUs with wgmma."""

from functools import cache

from moe_numba.grouped_gemm.checks import is_packed
from moe_numba.grouped_gemm.config import BLOCK_K_BYTES, THREADS
from moe_numba.grouped_gemm.config_block_scaled import BOX_ROWS, BlockScaledConfig, with_gather
from moe_numba.grouped_gemm.kernel_block_scaled import make_kernel
from moe_numba.grouped_gemm.launch_tma import TmaLaunch, signature_of
from moe_numba.runtime.launch import launcher


class BlockScaledLaunch(TmaLaunch):
    """Launches for tensors of given shapes, strides and dtypes."""

    def __init__(self, config, tensors, shape):
        config = config if tensors.gather_indices is None else with_gather(config)
        packed = is_packed(tensors.x_scale), is_packed(tensors.w_scale)
        self.config = config = config._replace(packed_x_scale=packed[0], packed_weight_scale=packed[1])
        start = get_block_scaled_launcher(config, tensors.x.device.index or 0)
        x_box, weight_box = (BOX_ROWS, BLOCK_K_BYTES), (1, config.half_rows, BLOCK_K_BYTES)
        super().__init__(start, tensors, shape, x_box, weight_box)


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
