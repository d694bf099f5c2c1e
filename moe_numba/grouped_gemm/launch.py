"""Plan and launch the grouped GEMM: the implementation behind the public functions.

A GPU with wgmma executes the kernel of ``kernel.py``, or with block scales and many rows per group that of
``kernel_block_scaled.py``; any other executes that of ``kernel_mma.py``.
"""

from functools import cache
from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.grouped_gemm.checks import (
    check_indices,
    check_inputs,
    check_m_indices,
    check_scales,
    describe_outputs,
    scale_strides,
)
from moe_numba.grouped_gemm.config import BLOCK_N, THREADS, GemmConfig, SharedMemoryLayout, select_config
from moe_numba.grouped_gemm.config_block_scaled import BlockScaledConfig, select_block_scaled_config
from moe_numba.grouped_gemm.config_mma import MmaConfig
from moe_numba.grouped_gemm.group_starts import GroupStarts
from moe_numba.grouped_gemm.kernel import make_kernel
from moe_numba.grouped_gemm.kernel_block_scaled import make_kernel as make_block_scaled_kernel
from moe_numba.grouped_gemm.launch_block_scaled import BLOCK_SCALED_SIGNATURE, BlockScaledLaunch
from moe_numba.grouped_gemm.launch_mma import MmaLaunch
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.cubin_cache import machine_code
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.tensor_map import tensor_map_template
from moe_numba.runtime.validate import check_int, make_outputs

SIGNATURE = (
    *(TENSOR_MAP, TENSOR_MAP, "int32*", "float32*", "int32*", "int32*", "float32*", "float32*", *("int32",) * 5),
    *("int32", "int32", "int64"),  # strides of x_scale: rows, blocks of k, groups
    *("uint8*", "int32*", "int32", "int32"),  # x, row_indices, x_rows, row_bytes: used with gather only
)
_MAX_TILES, _MAX_AVERAGE = (1 << 31) - 1, 1 << 20

_plans: dict = {}


def group_gemm(
    scaling: str,
    x,
    weight,
    seqlens,
    cu_seqlens,
    x_scale,
    weight_scale,
    average: int | None = None,
    offs=None,
    out=None,
    silu_and_mul: bool = False,
    gather_indices=None,
    m_indices=None,
    config: GemmConfig | BlockScaledConfig | MmaConfig | None = None,
):
    """Check the arguments, select a configuration and launch the kernel.

    ``scaling`` is "tensor", "block" or "none". ``config`` replaces the configuration that the GPU and ``average``
    select, and its class the kernel; all else is as for the public functions.
    """
    if average is not None:  # before the look-up: 8.0 would find the plan for 8
        average = min(check_int("num_seq_per_group_avg", average, 0), _MAX_AVERAGE)
    tensors: tuple = (x, weight, seqlens, cu_seqlens, x_scale, weight_scale, offs, gather_indices, m_indices)
    try:
        key = (scaling, average, silu_and_mul, config, *map(_tensor_key, tensors))
    except AttributeError:  # an array of another library
        scale = "y_scale" if scaling == "tensor" else "w_scale"
        names = "x", "weight", "seqlens", "cu_seqlens", "x_scale", scale, "offs", "gather_indices", "m_indices"
        tensors = tuple(a if a is None else as_tensor(a, name) for a, name in zip(tensors, names, strict=True))
        key = (scaling, average, silu_and_mul, config, *map(_tensor_key, tensors))
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, GemmPlan(scaling, tensors, average, silu_and_mul, config))
    outputs = plan.outputs(out)
    if plan.launch is not None:
        if tensors[-1] is not None:
            tensors = *tensors[:2], *plan.group_starts(tensors[-1]), *tensors[4:]
        plan.launch(tensors[:-1], outputs)
    if out is not None:
        return out
    return tuple(outputs) if silu_and_mul else outputs[0]


def _tensor_key(tensor):
    return tensor if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


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
    scale_strides: tuple[int, int, int] = (0, 0, 0)  # of x_scale, in elements; see `kernel.ScaleStrides`

    @property
    def sizes(self):
        """Arguments of the kernels."""
        return self.groups, self.total_rows, self.capacity, self.n


class GemmPlan:
    """Launch plan for tensors of given shapes, strides and dtypes: the arguments are checked once.

    ``tensors`` are x, weight, seqlens, cu_seqlens, x_scale, weight_scale, offs, gather_indices and m_indices. The other
    arguments are as for `group_gemm`.
    """

    def __init__(self, scaling, tensors, average, silu_and_mul, config):
        *tensors, m_indices = tensors
        x, weight, seqlens, cu_seqlens, x_scale, weight_scale, offs, indices = tensors
        dtype = torch.bfloat16 if scaling == "none" else torch.float8_e4m3fn
        row_layout = check_inputs(x, weight, seqlens, cu_seqlens, offs, dtype, m_indices)
        groups, n, k = weight.shape
        if indices is not None:
            check_indices(indices, x)
        check_scales(scaling, x, weight, x_scale, weight_scale)
        rows = x.shape[:-1] if indices is None else indices.shape
        total_rows = rows.numel()
        if m_indices is not None:
            check_m_indices(m_indices, total_rows, x.device)
        wanted = describe_outputs(rows, n, silu_and_mul)
        self.outputs = Outputs(wanted, x.device, aligned=[name for name, _, _ in wanted])
        self.launch = None
        if not total_rows:
            return
        if m_indices is not None:
            self.group_starts = GroupStarts(total_rows, groups, x.device)
        average = -(-total_rows // groups) if average is None else average
        capacity, n = x.shape[1] if row_layout == "masked" else 0, n // (1 + silu_and_mul)
        shape = GemmShape(scaling, row_layout, silu_and_mul, average, groups, total_rows, capacity, n, k)
        if x_scale is not None:
            shape = shape._replace(scale_strides=scale_strides(x_scale))
        is_row_major = x_scale is None or x_scale.is_contiguous()
        gpu = gpu_of(x.device)
        if config is None and gpu.has_wgmma and scaling == "block" and is_row_major:
            config = select_block_scaled_config(row_layout, average, silu_and_mul)
        if isinstance(config, BlockScaledConfig):
            if not is_row_major:
                raise ValueError(f"x_scale has strides {x_scale.stride()}; for {config} it must be contiguous")
            self.launch = BlockScaledLaunch(config, tensors, shape)
            columns = self.launch.config.columns
        elif isinstance(config, GemmConfig) or (config is None and gpu.has_wgmma):
            self.launch, columns = HopperLaunch(config, tensors, shape), BLOCK_N
        else:
            self.launch = MmaLaunch(config, tensors, shape, gpu)
            columns = self.launch.config.columns
        if groups * -(-total_rows // self.launch.config.block_m) * -(-n // columns) > _MAX_TILES:
            raise ValueError(f"x has {total_rows} rows, too many for {groups} groups of {n} columns")


class HopperLaunch:
    """Launches of the kernel with TMA and wgmma for tensors of given shapes, strides and dtypes."""

    def __init__(self, config, tensors, shape):
        x, weight, _, _, _, _, _, indices = tensors
        config = config or select_config(shape.scaling, shape.row_layout, shape.average, shape.silu_and_mul)
        if indices is not None:
            config = config._replace(gather=True, cluster_size=1)
        self.config = config
        self.start, self.grid = get_launcher(config, x.device.index or 0), _grid_size(x.device)
        block_k, x_box_rows = 128 // x.element_size(), SharedMemoryLayout(config).x_box_rows
        rows = x.view(-1, shape.k) if x.dim() == 3 else x
        # Gathering from no rows: a tensor map cannot be of an empty tensor.
        self.x_is_empty = not len(rows)
        self.x_map = tensor_map_template(
            weight[0] if self.x_is_empty else rows, (x_box_rows, block_k), swizzle=128, name="x"
        )
        self.weight_map = tensor_map_template(weight, (1, BLOCK_N, block_k), swizzle=128, name="weight")
        self.is_masked = shape.row_layout == "masked"
        self.sizes = *shape.sizes, shape.k, *shape.scale_strides
        self.gather_sizes = len(x), 0 if indices is None else x.stride(0) * x.element_size()

    def __call__(self, tensors, outputs):
        """Launch the kernel. A pointer that it does not use is that of the group sizes."""
        x, weight, seqlens, cu_seqlens, x_scale, weight_scale, offs, indices = tensors
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
            lengths if x_scale is None else address(x_scale),
            lengths if weight_scale is None else address(weight_scale),
            *self.sizes,
            address(rows),
            lengths if indices is None else address(indices),
            *self.gather_sizes,
        )


def fake_group_gemm(scaling: str, call, silu_and_mul: bool = False):
    """Check the arguments of a public function's call and return its outputs."""
    x, weight, out = call.x, call.weight, call.out
    dtype = torch.bfloat16 if scaling == "none" else torch.float8_e4m3fn
    m_indices = getattr(call, "m_indices", None)
    check_inputs(x, weight, call.seqlens, call.cu_seqlens, call.offs, dtype, m_indices)
    if scaling == "tensor":
        check_scales(scaling, x, weight, None, call.y_scale)
    elif scaling == "block":
        check_scales(scaling, x, weight, call.x_scale, call.w_scale)
    if call.gather_indices is not None:
        check_indices(call.gather_indices, x)
    shape = x.shape[:-1] if call.gather_indices is None else call.gather_indices.shape
    if m_indices is not None:
        check_m_indices(m_indices, shape.numel(), x.device)
    outputs = make_outputs(out, describe_outputs(shape, weight.shape[1], silu_and_mul), x.device)
    return outputs if silu_and_mul else outputs[0]


@cache
def get_launcher(config: GemmConfig, device: int):
    """Compile and load the kernel of a configuration on a device."""
    kernel, shared_bytes = make_kernel(config)
    return launcher(
        kernel,
        SIGNATURE,
        device,
        launch_bounds=THREADS,
        shared_bytes=shared_bytes,
        cluster=config.cluster_size if config.cluster_size > 1 else None,
        dependent=True,
    )


def compile_config(config: GemmConfig | BlockScaledConfig) -> None:
    """Compile the kernel of a configuration into the cubin cache on disk; no GPU is needed."""
    if isinstance(config, BlockScaledConfig):
        machine_code(make_block_scaled_kernel(config)[0], BLOCK_SCALED_SIGNATURE, launch_bounds=THREADS)
    else:
        machine_code(make_kernel(config)[0], SIGNATURE, launch_bounds=THREADS)


@cache
def _grid_size(device):
    """One CTA per SM, rounded down to an even number for clusters of two."""
    return 2 if simulator.ENABLED else gpu_of(device).sm_count // 2 * 2
