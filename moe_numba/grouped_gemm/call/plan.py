"""Plan and launch the grouped GEMM: the implementation behind the public functions.

A GPU with wgmma executes the kernel of ``wgmma/kernel.py``, or with block scales and many rows per group that of
``block_scaled/kernel.py``; any other executes that of ``mma_sync/kernel.py``.
"""

from typing import Any

from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig
from moe_numba.grouped_gemm.block_scaled.kernel import make_kernel as make_block_scaled_kernel
from moe_numba.grouped_gemm.block_scaled.launch import BlockScaledLaunch
from moe_numba.grouped_gemm.call.arguments import (
    NAMES,
    GemmOptions,
    GemmShape,
    GemmTensors,
    has_epilogue_options,
    split_arguments,
)
from moe_numba.grouped_gemm.call.checks import (
    check_arguments,
    check_average,
    check_given_config,
    check_rows,
    describe_outputs,
    is_mn_major,
    rows_of,
    scale_strides,
)
from moe_numba.grouped_gemm.call.heuristics import select_wgmma_config
from moe_numba.grouped_gemm.common.constants import BLOCK_N, MAX_TILES, THREADS
from moe_numba.grouped_gemm.common.group_starts import GroupStarts
from moe_numba.grouped_gemm.common.tma_launch import signature_of
from moe_numba.grouped_gemm.mma_sync.config import MmaConfig
from moe_numba.grouped_gemm.mma_sync.launch import MmaLaunch
from moe_numba.grouped_gemm.wgmma.config import GemmConfig
from moe_numba.grouped_gemm.wgmma.kernel import make_kernel
from moe_numba.grouped_gemm.wgmma.launch import HopperLaunch
from moe_numba.runtime.cubin_cache import machine_code
from moe_numba.runtime.device import gpu_of, persistent_ctas
from moe_numba.runtime.outputs import Outputs, find_plan, remember
from moe_numba.runtime.replay import Replay
from moe_numba.runtime.validate import UnsupportedDeviceError, make_outputs

M_INDICES = GemmTensors._fields.index("m_indices")
_plans: dict = {}


def group_gemm(scaling: str, arguments: dict[str, Any] | None = None, /, **more):
    """Check the arguments, select a configuration and launch the kernel.

    Parameters
    ----------
    scaling : {"tensor", "row", "block", "none"}
    arguments : dict, optional
        Arguments by name: all of a public function.
    **more
        Other arguments: ``silu_and_mul``, ``early_weight`` (see :class:`GemmOptions`), and ``config``, which replaces
        the configuration that the GPU and ``num_seq_per_group_avg`` select, and by its class the kernel.
        With "tensor" on GPUs with wgmma ``x_scale`` may be one float32, a factor of all results, and with
        ``silu_and_mul`` ``out_scale`` the scale of all of y, which then is the only output; magnitudes beyond
        448 * ``out_scale`` saturate.
    """
    tensors, options, out, others = split_arguments(scaling, arguments or {}, more)
    average, config = others["num_seq_per_group_avg"], others["config"]
    if average is not None:  # before the look-up: 8.0 would find the plan for 8
        average = check_average(average)
    key = scaling, average, config, options, *map(type, options)  # 1, 1.0 and True are equal
    plan, key, tensors = find_plan(_plans, key, tensors, NAMES[scaling])
    if plan is None or (out is None and others["accumulate"]):
        plan = GemmPlan(scaling, GemmTensors(*tensors), average, GemmOptions(*options), config, out is not None)
        remember(_plans, key, plan)
    outputs = plan.outputs(out)
    if plan.launch is not None:
        if others["m_indices"] is not None:
            tensors = *tensors[:2], *plan.group_starts(tensors[M_INDICES]), *tensors[4:]
        plan.replay(*tensors, *outputs)
    if out is not None:
        return out
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


class GemmPlan:
    """Launch plan for tensors of given shapes, strides and dtypes: the arguments are checked once.

    ``tensors`` are :class:`GemmTensors`, ``options`` :class:`GemmOptions`; ``has_out`` is whether the call has an
    output argument. The others are as for `group_gemm`.
    """

    def __init__(self, scaling, tensors, average, options, config, has_out):
        x, weight, silu_and_mul = tensors.x, tensors.weight, options.silu_and_mul
        row_layout = check_arguments(scaling, tensors, options, has_out)
        groups, n, k = weight.shape
        rows = rows_of(tensors)
        total_rows = rows.numel()
        check_rows(tensors)
        wanted = describe_outputs(tensors, n, scaling, options)
        self.outputs = Outputs(wanted, x.device, aligned=[name for name, *_ in wanted])
        self.launch = None
        if not total_rows or not wanted[0][1][0]:
            return
        if tensors.m_indices is not None:
            self.group_starts = GroupStarts(total_rows, groups, x.device)
        average = -(-total_rows // groups) if average is None else average
        capacity, n = x.shape[1] if row_layout == "masked" else 0, n // (1 + silu_and_mul)
        y_rows = min(wanted[0][1][0], MAX_TILES)
        shape = GemmShape(
            scaling, row_layout, silu_and_mul, average, groups, total_rows, capacity, n, k, options, y_rows
        )
        if scaling == "block":
            shape = shape._replace(scale_strides=scale_strides(tensors.x_scale))
        default_epilogue = not has_epilogue_options(tensors, options)
        gpu, config_forced = gpu_of(x.device), config is not None
        if config_forced:
            check_config_of_call(config, shape)
        if not config_forced and gpu.has_wgmma:
            in_tuning_table = default_epilogue and tensors.gather_indices is None and not is_mn_major(weight)
            config = select_wgmma_config(shape, default_epilogue, in_tuning_table, persistent_ctas(x.device, 2))
        if isinstance(config, BlockScaledConfig):
            if not default_epilogue:
                raise ValueError(f"config is {config}; its kernel does not have these epilogue options")
            self.launch = BlockScaledLaunch(config, tensors, shape)
            columns = self.launch.config.columns
        elif isinstance(config, GemmConfig):
            self.launch, columns = HopperLaunch(config, tensors, shape, config_forced), BLOCK_N
        else:
            if scaling == "tensor" and (tensors.x_scale is not None or tensors.out_scale is not None):
                raise ValueError(f"x_scale or out_scale is given; {gpu.name} has no kernel for them")
            if tensors.x_low is not None:
                raise UnsupportedDeviceError(
                    f"x_low is given; {gpu.name} has no wgmma (compute capability 9.0), which it needs: on this GPU, "
                    "call group_gemm_bf16 for x and for x_low, and add the results"
                )
            if is_mn_major(weight):
                raise ValueError(
                    f"weight has strides {weight.stride()}; the kernel with mma.sync, which {gpu.name} executes, needs "
                    "a contiguous last dimension: use weight.contiguous()"
                )
            self.launch = MmaLaunch(config, tensors, shape, gpu)
            columns = self.launch.config.columns
        inputs = len(tensors)
        self.replay = Replay(lambda *given: self.launch(given[:inputs], given[inputs:]))
        if groups * -(-total_rows // self.launch.config.block_m) * -(-n // columns) > MAX_TILES:
            raise ValueError(f"x has {total_rows} rows, too many for {groups} groups of {n} columns")


def check_config_of_call(config, shape):
    """Raise for an explicit configuration that a call with other arguments needs."""
    if not isinstance(config, GemmConfig | BlockScaledConfig | MmaConfig):
        raise TypeError(f"config is {config!r}; it must be a GemmConfig, BlockScaledConfig or MmaConfig")
    if isinstance(config, BlockScaledConfig) and shape.scaling != "block":
        raise ValueError(f"config is {config}; its kernel has block scales, scaling is {shape.scaling!r}")
    check_given_config(
        config,
        shape.groups,
        dtype="bf16" if shape.scaling == "none" else "e4m3",
        scaling=shape.scaling,
        row_layout=shape.row_layout,
        silu_and_mul=shape.silu_and_mul,
    )


def fake_group_gemm(scaling: str, call, **options):
    """Check the arguments of a public function's call and return its outputs; ``options`` as for `group_gemm`."""
    given_tensors, given_options, out, _ = split_arguments(scaling, vars(call), options)
    tensors, made = GemmTensors(*given_tensors), GemmOptions(*given_options)
    check_arguments(scaling, tensors, made, out is not None)
    wanted = describe_outputs(tensors, call.weight.shape[1], scaling, made)
    outputs = make_outputs(out, wanted, call.x.device)
    return outputs if len(wanted) > 1 else outputs[0]


def compile_config(config: GemmConfig | BlockScaledConfig) -> None:
    """Compile the kernel of a configuration into the cubin cache on disk; no GPU is needed."""
    make = make_block_scaled_kernel if isinstance(config, BlockScaledConfig) else make_kernel
    machine_code(make(config)[0], signature_of(config), launch_bounds=THREADS)
