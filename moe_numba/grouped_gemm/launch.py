"""Plan and launch the grouped GEMM: the implementation behind the public functions.

A GPU with wgmma executes the kernel of ``kernel.py``, or with block scales and many rows per group that of
``kernel_block_scaled.py``; any other executes that of ``kernel_mma.py``.
"""

from functools import cache
from typing import Any, NamedTuple

import torch

from moe_numba import simulator
from moe_numba.grouped_gemm.checks import check_arguments, describe_outputs, is_mn_major, rows_of, scale_strides
from moe_numba.grouped_gemm.config import BLOCK_N, DTYPE_NAMES, THREADS, GemmConfig, SharedMemoryLayout, select_config
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
from moe_numba.runtime.outputs import Outputs, remember, tensor_key
from moe_numba.runtime.tensor_map import tensor_map_template
from moe_numba.runtime.validate import check_int, make_outputs

SIGNATURE = (
    *(TENSOR_MAP, TENSOR_MAP, "int32*", "float32*", "int32*", "int32*", "float32*", "float32*", *("int32",) * 5),
    *("int32", "int32", "int64"),  # strides of x_scale: rows, blocks of k, groups
    *("uint8*", "int32*", "int32", "int32"),  # x, row_indices, x_rows, row_bytes: used with gather only
)
# Of kernels whose epilogue reads bias, row_weights, scatter_indices and y_rows, or scales per row.
EPILOGUE_SIGNATURE = *SIGNATURE, "uint16*", "float32*", "int32*", "int32"
_MAX_TILES, _MAX_AVERAGE = (1 << 31) - 1, 1 << 20
_MAX_ROWS = _MAX_TILES - 1024  # rounded up to a tile they still fit into 32 bits

_plans: dict = {}


class GemmOptions(NamedTuple):
    """Options of the epilogue, as for the public functions."""

    silu_and_mul: bool = False
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0


class GemmTensors(NamedTuple):
    """The tensors of a call, with their names in messages."""

    x: Any
    weight: Any
    seqlens: Any
    cu_seqlens: Any
    x_scale: Any
    w_scale: Any  # or y_scale
    offs: Any
    gather_indices: Any
    bias: Any
    scatter_indices: Any
    row_weights: Any
    out: Any  # that rows are scattered to
    m_indices: Any


PLAIN = GemmOptions()


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
    config: GemmConfig | BlockScaledConfig | MmaConfig | None = None,
    bias=None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    scatter_indices=None,
    row_weights=None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    m_indices=None,
):
    """Check the arguments, select a configuration and launch the kernel.

    ``scaling`` is "tensor", "row", "block" or "none". ``config`` replaces the configuration that the GPU and
    ``average`` select, and its class the kernel; all else is as for the public functions.
    """
    if average is not None:  # before the look-up: 8.0 would find the plan for 8
        average = min(check_int("num_seq_per_group_avg", average, 0), _MAX_AVERAGE)
    options: tuple = silu_and_mul, out_dtype, accumulate, activation, alpha, limit
    tensors: tuple = x, weight, seqlens, cu_seqlens, x_scale, weight_scale, offs, gather_indices, bias
    # Rows are scattered to an output of any number of rows.
    tensors = *tensors, scatter_indices, row_weights, None if scatter_indices is None else out, m_indices
    try:
        key = (scaling, average, options, config, *map(tensor_key, tensors))
    except AttributeError:  # an array of another library
        scale = "y_scale" if scaling == "tensor" else "w_scale"
        names = (scale if name == "w_scale" else name for name in GemmTensors._fields)
        tensors = tuple(a if a is None else as_tensor(a, name) for a, name in zip(tensors, names, strict=True))
        key = (scaling, average, options, config, *map(tensor_key, tensors))
    plan = _plans.get(key)
    if plan is None or (accumulate and out is None):
        plan = GemmPlan(scaling, GemmTensors(*tensors), average, GemmOptions(*options), config, out is not None)
        remember(_plans, key, plan)
    outputs = plan.outputs(out)
    if plan.launch is not None:
        if tensors[-1] is not None:
            tensors = *tensors[:2], *plan.group_starts(tensors[-1]), *tensors[4:]
        plan.launch(tensors, outputs)
    if out is not None:
        return out
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


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
    options: GemmOptions = PLAIN
    y_rows: int = 0
    scale_strides: tuple[int, int, int] = (0, 0, 0)  # of block scales of x; see `kernel.ScaleStrides`

    @property
    def sizes(self):
        """Arguments of the kernels."""
        return self.groups, self.total_rows, self.capacity, self.n


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
        for name, count in (("the output", total_rows), ("x", x.shape[:-1].numel())):
            if count > _MAX_ROWS:
                raise ValueError(f"{name} has {count} rows; at most {_MAX_ROWS} are allowed")
        if tensors.gather_indices is not None and x.stride(0) * x.element_size() >= 1 << 31:
            raise ValueError(f"x has strides {x.stride()}; with gather_indices its rows must be less than 2 GiB apart")
        wanted = describe_outputs(rows, n, scaling, options, tensors.out)
        self.outputs = Outputs(wanted, x.device, aligned=[name for name, _, _ in wanted])
        self.launch = None
        if not total_rows or not wanted[0][1][0]:
            return
        if tensors.m_indices is not None:
            self.group_starts = GroupStarts(total_rows, groups, x.device)
        average = -(-total_rows // groups) if average is None else average
        capacity, n = x.shape[1] if row_layout == "masked" else 0, n // (1 + silu_and_mul)
        y_rows = min(wanted[0][1][0], _MAX_TILES)
        shape = GemmShape(
            scaling, row_layout, silu_and_mul, average, groups, total_rows, capacity, n, k, options, y_rows
        )
        by_block = scaling == "block"
        if by_block:
            shape = shape._replace(scale_strides=scale_strides(tensors.x_scale))
        is_plain = not has_epilogue_options(tensors, options)
        gpu = gpu_of(x.device)
        if config is None and gpu.has_wgmma and by_block and is_plain:
            config = select_block_scaled_config(row_layout, average, silu_and_mul, n)
        if isinstance(config, BlockScaledConfig):
            if not is_plain:
                raise ValueError(f"config is {config}; its kernel does not have these epilogue options")
            self.launch = BlockScaledLaunch(config, tensors, shape)
            columns = self.launch.config.columns
        elif isinstance(config, GemmConfig) or (config is None and gpu.has_wgmma):
            self.launch, columns = HopperLaunch(config, tensors, shape), BLOCK_N
        else:
            if is_mn_major(weight):
                raise ValueError(
                    f"weight has strides {weight.stride()}; the kernel with mma.sync, which {gpu.name} executes, needs "
                    "a contiguous last dimension: use weight.contiguous()"
                )
            self.launch = MmaLaunch(config, tensors, shape, gpu)
            columns = self.launch.config.columns
        if groups * -(-total_rows // self.launch.config.block_m) * -(-n // columns) > _MAX_TILES:
            raise ValueError(f"x has {total_rows} rows, too many for {groups} groups of {n} columns")


def has_epilogue_options(tensors, options):
    """Whether a call needs an epilogue that the block-scaled kernel does not have."""
    plain = PLAIN._replace(silu_and_mul=options.silu_and_mul)
    return options != plain or any(t is not None for t in (tensors.bias, tensors.scatter_indices, tensors.row_weights))


class HopperLaunch:
    """Launches of the kernel with TMA and wgmma for tensors of given shapes, strides and dtypes."""

    def __init__(self, config, tensors, shape):
        x, weight, indices = tensors.x, tensors.weight, tensors.gather_indices
        config = config or select_config(shape.scaling, shape.row_layout, shape.average, shape.silu_and_mul)
        if indices is not None:
            config = config._replace(gather=True, cluster_size=1)
        config = config._replace(weight_major="mn" if is_mn_major(weight) else "k")
        self.config = config = with_options(config, tensors, shape)
        self.start, self.grid = get_launcher(config, x.device.index or 0), _grid_size(x.device)
        block_k, x_box_rows = 128 // x.element_size(), SharedMemoryLayout(config).x_box_rows
        rows = x.view(-1, shape.k) if x.dim() == 3 else x
        # Gathering from no rows: a tensor map cannot be of an empty tensor.
        self.x_is_empty = not len(rows)
        self.x_map = tensor_map_template(
            _stand_in(weight) if self.x_is_empty else rows, (x_box_rows, block_k), swizzle=128, name="x"
        )
        self.weight_view, box = weight_map_of(config, block_k)
        self.weight_map = tensor_map_template(self.weight_view(weight), box, swizzle=128, name="weight")
        self.is_masked = shape.row_layout == "masked"
        self.sizes = *shape.sizes, shape.k, *shape.scale_strides
        self.gather_sizes = len(x), 0 if indices is None else x.stride(0) * x.element_size()
        self.y_rows = shape.y_rows if config.has_inputs else None

    def __call__(self, tensors, outputs):
        """Launch the kernel. A pointer that it does not use is that of the group sizes."""
        x, weight, seqlens, cu_seqlens, x_scale, weight_scale, offs, indices, *rest = tensors
        rows = _stand_in(weight) if self.x_is_empty else x.flatten(0, 1) if self.is_masked else x
        lengths = address(seqlens if offs is None else offs)
        more: tuple = ()
        if self.y_rows is not None:
            bias, scatter_indices, row_weights, *_ = rest
            # An empty tensor has no address; the kernel reads no scale, because every row index is out of bounds.
            x_scale = weight_scale if self.x_is_empty else x_scale
            more = (
                lengths if bias is None else address(bias),
                lengths if row_weights is None else address(row_weights),
                lengths if scatter_indices is None else address(scatter_indices),
                self.y_rows,
            )
        self.start(
            self.grid,
            THREADS,
            None,
            self.x_map(rows),
            self.weight_map(self.weight_view(weight)),
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
            *more,
        )


def with_options(config, tensors, shape):
    """Return the configuration with the options of a call."""
    options = shape.options
    return config._replace(
        scaling=shape.scaling,
        activation=options.activation,
        alpha=float(options.alpha) if options.activation == "swigluoai" else config.alpha,
        limit=float(options.limit) if options.activation == "swigluoai" else config.limit,
        partial=shape.silu_and_mul and shape.scaling == "tensor" and shape.n % BLOCK_N != 0,
        bias="" if tensors.bias is None else DTYPE_NAMES[tensors.bias.dtype],
        out_dtype="f32" if options.accumulate else DTYPE_NAMES[options.out_dtype],
        accumulate=options.accumulate,
        scatter=tensors.scatter_indices is not None,
        row_weights=tensors.row_weights is not None,
    )


def _stand_in(weight):
    """Return a matrix to encode a tensor map of, for an x without rows; the kernel loads none of its rows."""
    return weight[0].mT if is_mn_major(weight) else weight[0]


def weight_map_of(config, block_k):
    """Return the view of weight that its tensor map covers, as a function, and the map's box."""
    if config.interleaved:
        return (lambda weight: weight.unflatten(1, (-1, 2))), (1, BLOCK_N, 1, block_k)
    if config.partial:
        return (lambda weight: weight.unflatten(1, (2, -1))), (1, 1, BLOCK_N, block_k)
    if config.weight_major == "mn":
        return (lambda weight: weight.mT), (1, block_k, BLOCK_N // 2)
    return (lambda weight: weight), (1, BLOCK_N, block_k)


def fake_group_gemm(scaling: str, call, silu_and_mul: bool = False):
    """Check the arguments of a public function's call and return its outputs."""
    given = vars(call)
    tensors = {name: given.get(name) for name in GemmTensors._fields}
    tensors["w_scale"] = given.get("y_scale" if scaling == "tensor" else "w_scale")
    if given.get("scatter_indices") is None:
        tensors["out"] = None
    options = {name: given[name] for name in GemmOptions._fields if name in given}
    described = GemmTensors(**tensors), GemmOptions(**options)._replace(silu_and_mul=silu_and_mul)
    check_arguments(scaling, *described, call.out is not None)
    wanted = describe_outputs(rows_of(described[0]), call.weight.shape[1], scaling, described[1], tensors["out"])
    outputs = make_outputs(call.out, wanted, call.x.device)
    return outputs if len(wanted) > 1 else outputs[0]


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


def signature_of(config: GemmConfig):
    """Return the signature of the kernel of a configuration."""
    return EPILOGUE_SIGNATURE if config.has_inputs else SIGNATURE


def compile_config(config: GemmConfig | BlockScaledConfig) -> None:
    """Compile the kernel of a configuration into the cubin cache on disk; no GPU is needed."""
    if isinstance(config, BlockScaledConfig):
        machine_code(make_block_scaled_kernel(config)[0], BLOCK_SCALED_SIGNATURE, launch_bounds=THREADS)
    else:
        machine_code(make_kernel(config)[0], signature_of(config), launch_bounds=THREADS)


@cache
def _grid_size(device):
    """One CTA per SM, rounded down to an even number for clusters of two."""
    return 2 if simulator.ENABLED else gpu_of(device).sm_count // 2 * 2
