"""Launches of the kernel with ``mma.sync``, on GPUs without wgmma."""

from functools import cache

from moe_numba.grouped_gemm.call.arguments import epilogue_fields
from moe_numba.grouped_gemm.call.checks import is_packed
from moe_numba.grouped_gemm.common.tma_launch import with_scale_types
from moe_numba.grouped_gemm.mma_sync.config import MmaConfig, select_mma_config
from moe_numba.grouped_gemm.mma_sync.kernel import NO_ROW, make_kernel
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.device import persistent_ctas
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.validate import UnsupportedDeviceError, check_aligned, vector_strides

MMA_SIGNATURE = (
    *("uint8*", "uint8*", "int32*", "float32*", "int32*", "int32*", "float32*", "float32*", "int32*"),
    *("int32",) * 5,
    *("int32", "int32", "int64"),  # strides of x_scale: rows, blocks of k, groups
    *("int32",) * 4,
    *("uint16*", "float32*", "int32*", "int32"),  # bias, row_weights, scatter_indices, y_rows
)
_VECTOR_BYTES = 16


class MmaLaunch:
    """Launches for tensors of given shapes, strides and dtypes. It has no tensor maps: ``cp.async`` takes addresses."""

    def __init__(self, config, tensors, shape, gpu):
        x, weight, indices = tensors.x, tensors.weight, tensors.gather_indices
        self.config = config or select_mma_config(
            gpu, shape.scaling, shape.row_layout, shape.average, shape.silu_and_mul
        )
        if indices is not None:
            self.config = self.config._replace(gather=True)
        self.config = _with_options(self.config, tensors, shape, gpu)
        x_pitch = vector_strides("x", x)[-2] // _VECTOR_BYTES
        group_pitch, weight_pitch, _ = (stride // _VECTOR_BYTES for stride in vector_strides("weight", weight))
        x_rows = x.shape[:-1].numel()
        # The kernel counts 16 bytes in 32 bits: within x, and within the weight of a group.
        for name, tensor, vectors in (("x", x, x_rows * x_pitch), ("weight", weight, weight.shape[1] * weight_pitch)):
            if vectors > NO_ROW:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, over 64 GiB")
        if group_pitch >= 1 << 31:
            raise ValueError(f"weight has strides {weight.stride()}; groups must be less than 32 GiB apart")
        self.pitches = x_rows, x_pitch, weight_pitch, group_pitch
        self.sizes = *shape.sizes, shape.k * x.element_size(), *shape.scale_strides
        self.y_rows = shape.y_rows
        self.start = get_mma_launcher(self.config, x.device.index or 0)
        self.grid, self.threads = persistent_ctas(x.device) * self.config.min_blocks, self.config.threads

    def __call__(self, tensors, outputs):
        """Launch the kernel. A pointer that it does not use is that of the group sizes."""
        x, weight, seqlens, cu_seqlens, x_scale, weight_scale, offs, indices, *rest = tensors
        bias, scatter_indices, row_weights, *_ = rest
        check_aligned("x", x)
        check_aligned("weight", weight)
        rows = x if self.pitches[0] else weight  # gathering from no rows: x has no memory
        lengths = address(seqlens if offs is None else offs)
        self.start(
            self.grid,
            self.threads,
            None,
            address(rows),
            address(weight),
            address(outputs[0]),
            address(outputs[-1]),
            lengths,
            lengths if cu_seqlens is None else address(cu_seqlens),
            lengths if x_scale is None else address(x_scale),
            lengths if weight_scale is None else address(weight_scale),
            lengths if indices is None else address(indices),
            *self.sizes,
            *self.pitches,
            lengths if bias is None else address(bias),
            lengths if row_weights is None else address(row_weights),
            lengths if scatter_indices is None else address(scatter_indices),
            self.y_rows,
        )


def _with_options(config, tensors, shape, gpu):
    """Return the configuration with the options of a call; refuse those that only the kernel with wgmma has."""
    options, needs = shape.options, None
    if shape.silu_and_mul and shape.scaling == "none":
        needs = "group_gemm_silu_and_mul_bf16"
    elif shape.silu_and_mul and (options.activation != "silu" or tensors.bias is not None):
        needs = f"activation {options.activation!r}" if options.activation != "silu" else "bias with FP8 results"
    elif shape.silu_and_mul and shape.n % FP8_SCALE_BLOCK:
        needs = f"n = {2 * shape.n}, of which half is no multiple of {FP8_SCALE_BLOCK}"
    if needs:
        raise UnsupportedDeviceError(
            f"{gpu.name} has no wgmma (compute capability 9.0), which {needs} needs; on this GPU, compute gate and up "
            "by group_gemm_bf16 or group_gemm_pertensor_fp8, and the activation apart"
        )
    return config._replace(
        packed_x_scale=is_packed(tensors.x_scale),
        packed_weight_scale=is_packed(tensors.w_scale),
        **epilogue_fields(tensors, options),
    )


@cache
def get_mma_launcher(config: MmaConfig, device: int):
    """Compile and load the kernel of a configuration on a device."""
    kernel, shared_bytes = make_kernel(config)
    signature, bounds = with_scale_types(MMA_SIGNATURE, config), (config.threads, config.min_blocks)
    return launcher(kernel, signature, device, launch_bounds=bounds, shared_bytes=shared_bytes)
