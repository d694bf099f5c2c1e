"""Launches of the kernel of ``kernel.py``, on GPUs with wgmma."""

from functools import cache

from moe_numba.grouped_gemm.call.arguments import activation_fields, epilogue_fields
from moe_numba.grouped_gemm.call.checks import is_mn_major, is_packed
from moe_numba.grouped_gemm.common.constants import BLOCK_N, THREADS
from moe_numba.grouped_gemm.common.tma_launch import TmaLaunch, signature_of
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, SharedMemoryLayout, fit_registers
from moe_numba.grouped_gemm.wgmma.kernel import make_kernel
from moe_numba.runtime.launch import launcher
from moe_numba.runtime.tensor_map import tensor_map_template


class HopperLaunch(TmaLaunch):
    """Launches for tensors of given shapes, strides and dtypes.

    ``config_forced`` is whether the caller chose ``config``.
    """

    def __init__(self, config, tensors, shape, config_forced=False):
        x, weight = tensors.x, tensors.weight
        if tensors.gather_indices is not None:
            config = config._replace(gather=True, cluster_size=1)
        config = config._replace(weight_major="mn" if is_mn_major(weight) else "k")
        config = with_options(config, tensors, shape)
        self.config = config = config if config_forced else fit_registers(config)
        block_k = 128 // x.element_size()
        view_weight, weight_box = weight_map_of(config, block_k)
        x_box, start = (SharedMemoryLayout(config).x_box_rows, block_k), get_launcher(config, x.device.index or 0)
        super().__init__(start, tensors, shape, x_box, weight_box, view_weight, config.takes_epilogue_inputs)
        if config.low_rank:  # their k is smaller, but their boxes are the same: TMA fills the rest with zeros
            x_low = self.rows_of_low(tensors.x_low)
            self.x_low_map = tensor_map_template(x_low, x_box, swizzle=128, name="x_low")
            weight_low = view_weight(tensors.weight_low)
            self.weight_low_map = tensor_map_template(weight_low, weight_box, swizzle=128, name="weight_low")

    def rows_of_low(self, x_low):
        """Return the rows of x_low of all groups."""
        return x_low.flatten(0, 1) if self.is_masked else x_low

    def low_rank_arguments(self, x_low, weight_low):
        maps = self.x_low_map(self.rows_of_low(x_low)), self.weight_low_map(self.view_weight(weight_low))
        return *maps, x_low.shape[-1]


def with_options(config, tensors, shape):
    """Return the configuration with the options of a call."""
    options = shape.options
    return config._replace(
        scaling=shape.scaling,
        fast_accumulation=config.fast_accumulation or options.use_fast_accum,
        early_weight=config.early_weight or options.early_weight,
        packed_x_scale=is_packed(tensors.x_scale),
        packed_weight_scale=is_packed(tensors.w_scale),
        scaled_x=shape.scaling == "tensor" and tensors.x_scale is not None,
        scaled_y=tensors.out_scale is not None,
        stores_gate_up=options.store_gate_up,
        low_rank=tensors.x_low is not None,
        ragged_n=shape.silu_and_mul and shape.scaling == "tensor" and shape.n % BLOCK_N != 0,
        **activation_fields(options),
        **epilogue_fields(tensors, options),
    )


def weight_map_of(config, block_k):
    """Return the view of weight that its tensor map covers, as a function, and the map's box."""
    if config.interleaved:
        return (lambda weight: weight.unflatten(1, (-1, 2))), (1, BLOCK_N, 1, block_k)
    if config.ragged_n:
        return (lambda weight: weight.unflatten(1, (2, -1))), (1, 1, BLOCK_N, block_k)
    if config.weight_major == "mn":
        return (lambda weight: weight.mT), (1, block_k, BLOCK_N // 2)
    return (lambda weight: weight), (1, BLOCK_N, block_k)


@cache
def get_launcher(config: GemmConfig, device: int):
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
