"""Launches of the block-scaled kernel, for groups of many rows on GPUs with wgmma."""

from functools import cache

from moe_numba.grouped_gemm.config import BLOCK_K_BYTES, THREADS
from moe_numba.grouped_gemm.config_block_scaled import BOX_ROWS, BlockScaledConfig, with_gather
from moe_numba.grouped_gemm.kernel_block_scaled import make_kernel
from moe_numba.grouped_gemm.launch_tma import SIGNATURE, TmaLaunch
from moe_numba.runtime.launch import launcher

BLOCK_SCALED_SIGNATURE = SIGNATURE


class BlockScaledLaunch(TmaLaunch):
    """Launches for tensors of given shapes, strides and dtypes."""

    def __init__(self, config, tensors, shape):
        self.config = config = config if tensors.gather_indices is None else with_gather(config)
        start = get_block_scaled_launcher(config, tensors.x.device.index or 0)
        x_box, weight_box = (BOX_ROWS, BLOCK_K_BYTES), (1, config.half_rows, BLOCK_K_BYTES)
        super().__init__(start, tensors, shape, x_box, weight_box)


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
