"""Check the arguments of the grouped GEMM with 4-bit weights, plan and launch it."""

from functools import cache

import torch

from moe_numba.grouped_gemm.arguments import GemmOptions, GemmTensors, has_epilogue_options
from moe_numba.grouped_gemm.checks import (
    check_arguments,
    check_given_config,
    check_rows,
    describe_outputs,
    rows_of,
    scale_strides,
)
from moe_numba.grouped_gemm.config import DTYPE_NAMES, MAX_AVERAGE, MAX_TILES
from moe_numba.grouped_gemm.config_choice import select_w4
from moe_numba.grouped_gemm.config_w4 import W4Config, fit_registers
from moe_numba.grouped_gemm.kernel_w4 import make_kernel
from moe_numba.grouped_gemm.layout_w4 import W4Layout, fit_shared_memory
from moe_numba.grouped_gemm.packing_int4 import GROUP_SIZES, SCALE_DTYPES
from moe_numba.grouped_gemm.packing_mxfp4 import E4M3_SHAPE, SCALE_BLOCK, TILE_BYTES
from moe_numba.grouped_gemm.weight_tiles import CODE_BYTES, TILE
from moe_numba.runtime import device as devices
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.cubin_cache import machine_code
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember, tensor_key
from moe_numba.runtime.tensor_map import tensor_map_template
from moe_numba.runtime.validate import (
    UnsupportedDeviceError,
    check_aligned,
    check_int,
    check_tensor,
    is_fake,
    make_outputs,
)

W4_SIGNATURE = (
    *(TENSOR_MAP, "uint8*", "int32*", "int32*", "int32*"),
    *("int32",) * 6,
    *("uint8*", "int32*", "int32", "int32", "int32"),  # x, row_indices, x_rows, row_bytes, valid_bytes: for gather
    *("uint16*", "float32*", "int32*", "int32"),  # bias, row_weights, scatter_indices, y_rows
    *("uint8*", "int32"),  # w_scale, k_groups: of int4
    *("float32*", "int32", "int32", "int64"),  # x_scale and its strides: rows, blocks of k, groups
)
NO_TENSORS = dict.fromkeys(GemmTensors._fields)
E4M3 = torch.float8_e4m3fn

_plans: dict = {}


def group_gemm(
    weight_format,
    x,
    weight,
    seqlens,
    cu_seqlens,
    average: int | None = None,
    offs=None,
    out=None,
    gather_indices=None,
    bias=None,
    scatter_indices=None,
    row_weights=None,
    x_scale=None,
    w_scale=None,
    n: int | None = None,
    config: W4Config | None = None,
    **options,
):
    """Check the arguments, select a configuration and launch the kernel.

    ``weight_format`` is "mxfp4" or "int4"; ``options`` are fields of ``GemmOptions``. ``config`` replaces the
    configuration that ``average`` selects; all else is as for the public functions.
    """
    if average is not None:  # before the look-up: 8.0 would find the plan for 8
        average = min(check_int("num_seq_per_group_avg", average, 0), MAX_AVERAGE)
    if n is not None:
        n = check_int("n", n, 0)
    # Rows are scattered to an output of any number of rows.
    given = dict(x=x, weight=weight, seqlens=seqlens, cu_seqlens=cu_seqlens, offs=offs, gather_indices=gather_indices)
    given |= dict(bias=bias, scatter_indices=scatter_indices, row_weights=row_weights, x_scale=x_scale, w_scale=w_scale)
    tensors = GemmTensors(**NO_TENSORS | given | dict(out=None if scatter_indices is None else out))
    made = GemmOptions(**options)
    try:
        key = (weight_format, average, n, config, made, *map(tensor_key, tensors))
    except AttributeError:  # an array of another library
        names = GemmTensors._fields
        tensors = GemmTensors(*(a if a is None else as_tensor(a, name) for a, name in zip(tensors, names, strict=True)))
        key = (weight_format, average, n, config, made, *map(tensor_key, tensors))
    plan = _plans.get(key)
    if plan is None or (made.accumulate and out is None):
        plan = remember(_plans, key, W4Plan(weight_format, tensors, made, average, n, config, out is not None))
    outputs = plan.outputs(out)
    if plan.start is not None:
        plan.launch(tensors, outputs)
    return outputs[0] if out is None else out


def check(weight_format, tensors, options, n, has_out):
    """Check the arguments of a call except outputs.

    Returns
    -------
    row_layout : str
    wanted : list of (name, shape, dtype)
        The outputs.
    formats : dict
        Fields of the configuration: dtypes and scales.
    """
    x, weight = tensors.x, tensors.weight
    formats = _check_x(x, tensors.x_scale, weight_format)
    n_tiles, k_tiles = _check_weight(weight, x, weight_format)
    k = x.shape[-1] if x.dim() else 0
    if k % SCALE_BLOCK or -(-k // TILE) != k_tiles:
        raise ValueError(
            f"x has {k} columns; weight is packed for {TILE * k_tiles - SCALE_BLOCK} or {TILE * k_tiles} of them"
        )
    n = TILE * n_tiles if n is None else n
    if n % SCALE_BLOCK or -(-n // TILE) != n_tiles:
        raise ValueError(f"n is {n}; weight is packed for {TILE * n_tiles - SCALE_BLOCK} or {TILE * n_tiles} rows")
    if weight_format == "int4":
        formats |= _check_w_scale(tensors.w_scale, weight)
    # One row of weight, expanded to the shape before packing, has what the other checks ask for.
    unpacked = weight.new_empty(k, dtype=x.dtype).expand(len(weight), n, k)
    tensors = tensors._replace(weight=unpacked)
    row_layout = check_arguments("none", tensors, options, has_out, x.dtype)
    if not is_fake(x.device) and not (gpu := devices.gpu_of(x.device)).has_wgmma:
        raise UnsupportedDeviceError(
            "{} has compute capability {}.{}; grouped GEMMs with 4-bit weights need 9.0 (H100, H200: wgmma): on this "
            "GPU, dequantise the weights and call group_gemm_bf16".format(gpu.name, *gpu.capability)
        )
    return row_layout, describe_outputs(rows_of(tensors), n, "none", options, tensors.out), formats


def _check_x(x, x_scale, weight_format):
    """Check the dtype of x and its scales; return the fields of the configuration that they determine."""
    dtypes = (torch.bfloat16, E4M3) if weight_format == "mxfp4" else (torch.bfloat16,)
    check_tensor("x", x, dtype=dtypes)
    if x.dtype == torch.bfloat16:
        if x_scale is not None:
            raise ValueError("x_scale is given, but x is torch.bfloat16; it must be None")
        return dict(weight=weight_format)
    *rows, k = x.shape or (0,)
    k_blocks = -(-k // 128)
    if x_scale is None:
        raise TypeError(f"x_scale is None; for an x of {E4M3} it must be a tensor of torch.float32")
    check_tensor("x_scale", x_scale, dtype=torch.float32, device=(x.device, "x"))
    shape, scaling = list(x_scale.shape), "block"
    if x_scale.numel() == 1:
        scaling = "tensor"
    elif shape in (rows, [*rows, 1]):
        scaling = "row"
    elif shape != [*rows, k_blocks]:
        raise ValueError(f"x_scale has shape {tuple(shape)}; it must be [1], {rows} or {[*rows, k_blocks]}")
    if scaling != "block":
        check_tensor("x_scale", x_scale, contiguous=True)
    return dict(weight=weight_format, dtype="e4m3", x_scaling=scaling)


def _check_weight(weight, x, weight_format):
    """Check the shape of a packed weight; return its number of tiles along n and k."""
    bf16, e4m3, int4 = (TILE_BYTES,), E4M3_SHAPE, (CODE_BYTES,)
    tile = int4 if weight_format == "int4" else bf16 if x.dtype == torch.bfloat16 else e4m3
    check_tensor("weight", weight, dtype=torch.uint8)
    found = tuple(weight.shape[3:])
    if found != tile and {found, tile} == {bf16, e4m3}:
        packed_for = torch.bfloat16 if found == bf16 else E4M3
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: it is packed for {packed_for}, but x is {x.dtype}: use "
            f"pack_mxfp4(..., activation_dtype={x.dtype})"
        )
    check_tensor("weight", weight, shape=("groups", "n / 64", "k / 64", *tile), contiguous=True)
    return weight.shape[1:3]


def _check_w_scale(w_scale, weight):
    """Check the packed scales of int4; return the fields of the configuration that they determine."""
    if w_scale is None:
        raise TypeError("w_scale is None; it must be the tensor of scales that pack_int4 returns")
    groups, n_tiles, k_tiles = weight.shape[:3]
    shape = (groups, n_tiles, "k / group size", TILE)
    dtypes, device = tuple(SCALE_DTYPES), (weight.device, "weight")
    check_tensor("w_scale", w_scale, dtype=dtypes, shape=shape, contiguous=True, device=device)
    for size in GROUP_SIZES:
        if size * w_scale.shape[2] == TILE * k_tiles:
            return dict(group_size=size, scale_dtype=SCALE_DTYPES[w_scale.dtype])
    raise ValueError(
        f"w_scale has {w_scale.shape[2]} groups along k; weight's {k_tiles} tiles of {TILE} columns must have groups "
        f"of {' or '.join(map(str, GROUP_SIZES))} columns"
    )


class W4Plan:
    """Launch plan for tensors of given shapes, strides and dtypes: the arguments are checked once."""

    def __init__(self, weight_format, tensors, options, average, n, config, has_out):
        x, weight, indices = tensors.x, tensors.weight, tensors.gather_indices
        row_layout, wanted, formats = check(weight_format, tensors, options, n, has_out)
        check_rows(tensors)
        (_, (*rows, n), _), total_rows = wanted[0], rows_of(tensors).numel()
        self.outputs, self.start = Outputs(wanted, x.device, aligned=["y"]), None
        if not total_rows or not rows[0]:
            return
        groups, n_tiles, k_tiles = weight.shape[:3]
        if config is None:
            is_measured = indices is None and not options.silu_and_mul and not has_epilogue_options(tensors, options)
            average = -(-total_rows // groups) if average is None else average
            config = select_w4(row_layout, n, x.shape[-1], groups, average, is_measured, **formats)
        else:
            check_given_config(config, groups, row_layout=row_layout)
            config = config._replace(**formats)
        self.config = config = with_options(config, tensors, options)
        if groups * -(-total_rows // config.block_m) * -(-n_tiles // config.warpgroups) > MAX_TILES:
            raise ValueError(f"x has {total_rows} rows, too many for {groups} groups of {n} columns")
        self.threads = W4Layout(config).threads
        self.start, self.grid = get_w4_launcher(config, x.device.index or 0), devices.persistent_ctas(x.device)
        k, self.is_masked, size = x.shape[-1], row_layout == "masked", x.element_size()
        x_rows = x.flatten(0, 1) if self.is_masked else x
        # Gathering from no rows: a tensor map cannot be of an empty tensor.
        self.no_rows = None if len(x_rows) else weight.new_empty(1, k, dtype=x.dtype)
        example = x_rows if self.no_rows is None else self.no_rows
        self.x_map = tensor_map_template(example, (config.box_rows, config.x_tile_k), swizzle=128, name="x")
        self.sizes = groups, total_rows, x.shape[1] if self.is_masked else 0, n, n_tiles, k_tiles
        self.gather_sizes = len(x), 0 if indices is None else size * x.stride(0), size * k
        self.y_rows = min(rows[0], MAX_TILES)
        self.k_groups = 0 if tensors.w_scale is None else tensors.w_scale.shape[2]
        self.scale_strides = scale_strides(tensors.x_scale) if config.x_scaling == "block" else (0, 0, 0)

    def launch(self, tensors, outputs):
        """Launch the kernel. A pointer that it does not use is that of the group sizes."""
        x, weight, seqlens, cu_seqlens, x_scale, w_scale, offs, indices = tensors[:8]
        bias, scatter_indices, row_weights = tensors[8:11]
        check_aligned("weight", weight)
        if w_scale is not None:
            check_aligned("w_scale", w_scale)
        rows = (x.flatten(0, 1) if self.is_masked else x) if self.no_rows is None else self.no_rows
        lengths = address(seqlens if offs is None else offs)
        if x_scale is not None and not x_scale.numel():
            x_scale = None  # an empty tensor has no address; every row index is out of bounds
        self.start(
            self.grid,
            self.threads,
            None,
            self.x_map(rows),
            address(weight),
            address(outputs[0]),
            lengths,
            lengths if cu_seqlens is None else address(cu_seqlens),
            *self.sizes,
            address(rows),
            lengths if indices is None else address(indices),
            *self.gather_sizes,
            lengths if bias is None else address(bias),
            lengths if row_weights is None else address(row_weights),
            lengths if scatter_indices is None else address(scatter_indices),
            self.y_rows,
            lengths if w_scale is None else address(w_scale),
            self.k_groups,
            lengths if x_scale is None else address(x_scale),
            *self.scale_strides,
        )


def with_options(config, tensors, options):
    """Return the configuration with the options of a call."""
    if options.silu_and_mul:
        config = config._replace(activation=options.activation)
    if config.activation == "swigluoai":
        config = config._replace(alpha=float(options.alpha), limit=float(options.limit))
    config = config._replace(
        gather=tensors.gather_indices is not None,
        bias="" if tensors.bias is None else DTYPE_NAMES[tensors.bias.dtype],
        out_dtype="f32" if options.accumulate else DTYPE_NAMES[options.out_dtype],
        accumulate=options.accumulate,
        scatter=tensors.scatter_indices is not None,
        row_weights=tensors.row_weights is not None,
    )
    return fit_shared_memory(fit_registers(config))


def fake_group_gemm(weight_format: str, call, silu_and_mul: bool = False):
    """Check the arguments of a public function's call and return its output."""
    given = vars(call)
    tensors = GemmTensors(**{name: given.get(name) for name in GemmTensors._fields})
    if tensors.scatter_indices is None:
        tensors = tensors._replace(out=None)
    options = GemmOptions(**{name: given[name] for name in GemmOptions._fields if name in given})
    options = options._replace(silu_and_mul=silu_and_mul)
    _, wanted, _ = check(weight_format, tensors, options, given.get("n"), call.out is not None)
    return make_outputs(call.out, wanted, call.x.device)[0]


@cache
def get_w4_launcher(config: W4Config, device: int):
    """Compile and load the kernel of a configuration on a device."""
    (kernel, shared_bytes), threads = make_kernel(config), W4Layout(config).threads
    return launcher(kernel, W4_SIGNATURE, device, launch_bounds=threads, shared_bytes=shared_bytes, dependent=True)


def compile_w4_config(config: W4Config) -> None:
    """Compile the kernel of a configuration into the cubin cache on disk; no GPU is needed."""
    machine_code(make_kernel(config)[0], W4_SIGNATURE, launch_bounds=W4Layout(config).threads)
