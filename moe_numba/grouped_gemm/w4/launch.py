"""Check the arguments of the grouped GEMM with MXFP4 weights, plan and launch it."""

from functools import cache
from typing import Any

from moe_numba.grouped_gemm.call.arguments import (
    GemmOptions,
    GemmTensors,
    activation_fields,
    epilogue_fields,
    has_epilogue_options,
    split_arguments,
)
from moe_numba.grouped_gemm.call.checks import check_average, check_given_config, check_rows, rows_of
from moe_numba.grouped_gemm.call.heuristics import select_w4
from moe_numba.grouped_gemm.common.constants import MAX_TILES
from moe_numba.grouped_gemm.common.tma_launch import RowsLaunch
from moe_numba.grouped_gemm.w4.checks import check_w4_arguments
from moe_numba.grouped_gemm.w4.config import W4Config, fit_registers
from moe_numba.grouped_gemm.w4.kernel import make_kernel
from moe_numba.grouped_gemm.w4.layout import W4Layout, fit_shared_memory
from moe_numba.grouped_gemm.w4.weight_tiles import TILE
from moe_numba.runtime import device as devices
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.cubin_cache import machine_code
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, find_plan, remember
from moe_numba.runtime.validate import check_aligned, check_int, make_outputs

W4_SIGNATURE = (
    *(TENSOR_MAP, "uint8*", "int32*", "int32*", "int32*"),
    *("int32",) * 6,
    *("uint8*", "int32*", "int32", "int32", "int32"),  # x, row_indices, x_rows, row_bytes, valid_bytes: for gather
    *("uint16*", "float32*", "int32*", "int32"),  # bias, row_weights, scatter_indices, y_rows
)
_plans: dict = {}


def group_gemm(arguments: dict[str, Any] | None = None, /, **more):
    """Check the arguments, select a configuration and launch the kernel.

    Parameters
    ----------
    arguments : dict, optional
        Arguments by name: all of a public function.
    **more
        Other arguments: ``silu_and_mul``, ``early_weight`` (see ``GemmOptions``), and ``config``, which replaces the
        configuration that ``num_seq_per_group_avg`` selects.
    """
    tensors, options, out, others = split_arguments("mxfp4", arguments or {}, more)
    average, n, config = others["num_seq_per_group_avg"], others["n"], others["config"]
    if average is not None:  # before the look-up: 8.0 would find the plan for 8
        average = check_average(average)
    if n is not None:
        n = check_int("n", n, 0)
    key = average, n, config, options, *map(type, options)  # 1, 1.0 and True are equal
    plan, key, tensors = find_plan(_plans, key, tensors, GemmTensors._fields)
    if plan is None or (out is None and others["accumulate"]):
        plan = W4Plan(GemmTensors(*tensors), GemmOptions(*options), average, n, config, out is not None)
        remember(_plans, key, plan)
    outputs = plan.outputs(out)
    if plan.launch is not None:
        plan.launch(tensors, outputs)
    return outputs[0] if out is None else out


class W4Plan:
    """Launch plan for tensors of given shapes, strides and dtypes: the arguments are checked once."""

    def __init__(self, tensors, options, average, n, config, has_out):
        x, weight, indices = tensors.x, tensors.weight, tensors.gather_indices
        row_layout, wanted = check_w4_arguments(tensors, options, n, has_out)
        check_rows(tensors)
        (_, (*rows, n), *_), total_rows = wanted[0], rows_of(tensors).numel()
        self.outputs, self.launch = Outputs(wanted, x.device, aligned=["y"]), None
        if not total_rows or not rows[0]:
            return
        groups, n_tiles = weight.shape[:2]
        if config is None:
            default_epilogue = not has_epilogue_options(tensors, options)
            in_tuning_table = default_epilogue and indices is None and not options.silu_and_mul
            average = -(-total_rows // groups) if average is None else average
            config = select_w4(row_layout, n, x.shape[-1], groups, average, in_tuning_table)
        else:
            check_given_config(config, groups, row_layout=row_layout)
        config = with_options(config, tensors, options)
        if groups * -(-total_rows // config.block_m) * -(-n_tiles // config.warpgroups) > MAX_TILES:
            raise ValueError(f"x has {total_rows} rows, too many for {groups} groups of {n} columns")
        capacity = x.shape[1] if row_layout == "masked" else 0
        self.launch = W4Launch(config, tensors, (groups, total_rows, capacity, n), min(rows[0], MAX_TILES))


class W4Launch(RowsLaunch):
    """Launches for tensors of given shapes, strides and dtypes.

    ``sizes`` are the number of groups, all rows, the rows of a group if x is masked, or else 0, and the columns of y,
    of which it has ``y_rows``.
    """

    def __init__(self, config, tensors, sizes, y_rows):
        x, weight, self.config = tensors.x, tensors.weight, config
        start, x_box = get_w4_launcher(config, x.device.index or 0), (config.box_rows, TILE)
        super().__init__(start, devices.persistent_ctas(x.device), W4Layout(config).threads, tensors, x_box)
        self.sizes = *sizes, *weight.shape[1:3]
        self.gather_sizes = *self.gather_sizes, x.element_size() * x.shape[-1]
        self.y_rows = y_rows

    def __call__(self, tensors, outputs):
        check_aligned("weight", tensors[1])
        super().__call__(tensors, outputs)

    def arguments(self, weight, outputs, pointers):
        return (
            address(weight),
            address(outputs[0]),
            pointers.lengths,
            pointers.starts,
            *self.sizes,
            pointers.rows,
            pointers.row_indices,
            *self.gather_sizes,
            *pointers.epilogue,
            self.y_rows,
        )

    def placeholder(self, x, weight):
        return weight.flatten()[: x.shape[-1] * x.element_size()].view(x.dtype)[None]


def with_options(config, tensors, options):
    """Return the configuration with the options of a call."""
    if options.silu_and_mul:
        config = config._replace(**activation_fields(options))
    config = config._replace(early_weight=config.early_weight or options.early_weight)
    config = config._replace(gather=tensors.gather_indices is not None, **epilogue_fields(tensors, options))
    return fit_shared_memory(fit_registers(config))


def fake_group_gemm(call, **options):
    """Check the arguments of a public function's call and return its output; ``options`` as for `group_gemm`."""
    tensors, made, out, others = split_arguments("mxfp4", vars(call), options)
    _, wanted = check_w4_arguments(GemmTensors(*tensors), GemmOptions(*made), others["n"], out is not None)
    return make_outputs(out, wanted, call.x.device)[0]


@cache
def get_w4_launcher(config: W4Config, device: int):
    """Compile and load the kernel of a configuration on a device."""
    (kernel, shared_bytes), threads = make_kernel(config), W4Layout(config).threads
    return launcher(kernel, W4_SIGNATURE, device, launch_bounds=threads, shared_bytes=shared_bytes, dependent=True)


def compile_w4_config(config: W4Config) -> None:
    """Compile the kernel of a configuration into the cubin cache on disk; no GPU is needed."""
    machine_code(make_kernel(config)[0], W4_SIGNATURE, launch_bounds=W4Layout(config).threads)
