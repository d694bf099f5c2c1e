"""Check the arguments of the grouped GEMM with MXFP4 weights, plan and launch it."""

from functools import cache

import torch

from moe_numba.grouped_gemm.arguments import GemmOptions, GemmTensors, has_epilogue_options
from moe_numba.grouped_gemm.checks import check_arguments, describe_outputs, rows_of
from moe_numba.grouped_gemm.config import DTYPE_NAMES, MAX_AVERAGE, MAX_TILES
from moe_numba.grouped_gemm.config_choice import select_mxfp4
from moe_numba.grouped_gemm.config_mxfp4 import Mxfp4Config, Mxfp4Layout, fit_registers
from moe_numba.grouped_gemm.kernel_mxfp4 import make_kernel
from moe_numba.grouped_gemm.packing_mxfp4 import SCALE_BLOCK, UNIT, UNIT_BYTES
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

MXFP4_SIGNATURE = (
    *(TENSOR_MAP, "uint8*", "int32*", "int32*", "int32*"),
    *("int32",) * 6,
    *("uint8*", "int32*", "int32", "int32", "int32"),  # x, row_indices, x_rows, row_bytes, valid_bytes: for gather
    *("uint16*", "float32*", "int32*", "int32"),  # bias, row_weights, scatter_indices, y_rows
)
NO_TENSORS = dict.fromkeys(GemmTensors._fields)

_plans: dict = {}


def group_gemm(
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
    n: int | None = None,
    config: Mxfp4Config | None = None,
    **options,
):
    """Check the arguments, select a configuration and launch the kernel.

    ``options`` are fields of ``GemmOptions``. ``config`` replaces the configuration that ``average`` selects; all else
    is as for the public functions.
    """
    if average is not None:  # before the look-up: 8.0 would find the plan for 8
        average = min(check_int("num_seq_per_group_avg", average, 0), MAX_AVERAGE)
    if n is not None:
        n = check_int("n", n, 0)
    # Rows are scattered to an output of any number of rows.
    given = dict(x=x, weight=weight, seqlens=seqlens, cu_seqlens=cu_seqlens, offs=offs, gather_indices=gather_indices)
    given |= dict(bias=bias, scatter_indices=scatter_indices, row_weights=row_weights)
    tensors = GemmTensors(**NO_TENSORS | given | dict(out=None if scatter_indices is None else out))
    made = GemmOptions(**options)
    try:
        key = (average, n, config, made, *map(tensor_key, tensors))
    except AttributeError:  # an array of another library
        names = GemmTensors._fields
        tensors = GemmTensors(*(a if a is None else as_tensor(a, name) for a, name in zip(tensors, names, strict=True)))
        key = (average, n, config, made, *map(tensor_key, tensors))
    plan = _plans.get(key)
    if plan is None or (made.accumulate and out is None):
        plan = remember(_plans, key, Mxfp4Plan(tensors, made, average, n, config, out is not None))
    outputs = plan.outputs(out)
    if plan.start is not None:
        plan.launch(tensors, outputs)
    return outputs[0] if out is None else out


def check(tensors, options, n, has_out):
    """Check the arguments of a call except outputs.

    Returns
    -------
    row_layout : str
    wanted : list of (name, shape, dtype)
        The outputs.
    """
    x, weight = tensors.x, tensors.weight
    check_tensor("weight", weight, dtype=torch.uint8, shape=("groups", "n / 64", "k / 64", UNIT_BYTES), contiguous=True)
    groups, n_units, k_units, _ = weight.shape
    k = x.shape[-1] if x.dim() else 0
    if k % SCALE_BLOCK or -(-k // UNIT) != k_units:
        raise ValueError(
            f"x has {k} columns; weight is packed for {UNIT * k_units - SCALE_BLOCK} or {UNIT * k_units} of them"
        )
    n = UNIT * n_units if n is None else n
    if n % SCALE_BLOCK or -(-n // UNIT) != n_units:
        raise ValueError(f"n is {n}; weight is packed for {UNIT * n_units - SCALE_BLOCK} or {UNIT * n_units} rows")
    # One row of weight, expanded to the shape before packing, has what the other checks ask for.
    unpacked = weight.new_empty(k, dtype=torch.bfloat16).expand(groups, n, k)
    tensors = tensors._replace(weight=unpacked)
    row_layout = check_arguments("none", tensors, options, has_out)
    if not is_fake(x.device) and not (gpu := devices.gpu_of(x.device)).has_wgmma:
        raise UnsupportedDeviceError(
            "{} has compute capability {}.{}; grouped GEMMs with MXFP4 weights need 9.0 (H100, H200: wgmma): on this "
            "GPU, dequantise the weights and call group_gemm_bf16".format(gpu.name, *gpu.capability)
        )
    return row_layout, describe_outputs(rows_of(tensors), n, "none", options, tensors.out)


class Mxfp4Plan:
    """Launch plan for tensors of given shapes, strides and dtypes: the arguments are checked once."""

    def __init__(self, tensors, options, average, n, config, has_out):
        x, weight, indices = tensors.x, tensors.weight, tensors.gather_indices
        row_layout, wanted = check(tensors, options, n, has_out)
        (_, (*rows, n), _), total_rows = wanted[0], rows_of(tensors).numel()
        self.outputs, self.start = Outputs(wanted, x.device, aligned=["y"]), None
        if not total_rows or not rows[0]:
            return
        groups, n_units, k_units, _ = weight.shape
        if config is None:
            is_measured = indices is None and not options.silu_and_mul and not has_epilogue_options(tensors, options)
            average = -(-total_rows // groups) if average is None else average
            config = select_mxfp4(row_layout, n, x.shape[-1], groups, average, is_measured)
        self.config = config = with_options(config, tensors, options)
        if groups * -(-total_rows // config.block_m) * -(-n_units // config.warpgroups) > MAX_TILES:
            raise ValueError(f"x has {total_rows} rows, too many for {groups} groups of {n} columns")
        self.threads = Mxfp4Layout(config).threads
        self.start, self.grid = get_mxfp4_launcher(config, x.device.index or 0), devices.persistent_ctas(x.device)
        k, self.is_masked = x.shape[-1], row_layout == "masked"
        x_rows = x.flatten(0, 1) if self.is_masked else x
        # Gathering from no rows: a tensor map cannot be of an empty tensor.
        self.no_rows = None if len(x_rows) else weight.new_empty(1, k, dtype=torch.bfloat16)
        example = x_rows if self.no_rows is None else self.no_rows
        self.x_map = tensor_map_template(example, (config.box_rows, UNIT), swizzle=128, name="x")
        self.sizes = groups, total_rows, x.shape[1] if self.is_masked else 0, n, n_units, k_units
        self.gather_sizes = len(x), 0 if indices is None else 2 * x.stride(0), 2 * k
        self.y_rows = min(rows[0], MAX_TILES)

    def launch(self, tensors, outputs):
        """Launch the kernel. A pointer that it does not use is that of the group sizes."""
        x, weight, seqlens, cu_seqlens, _, _, offs, indices = tensors[:8]
        bias, scatter_indices, row_weights = tensors[8:11]
        check_aligned("weight", weight)
        rows = (x.flatten(0, 1) if self.is_masked else x) if self.no_rows is None else self.no_rows
        lengths = address(seqlens if offs is None else offs)
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
    return fit_registers(config)


def fake_group_gemm(call, silu_and_mul: bool = False):
    """Check the arguments of a public function's call and return its output."""
    given = vars(call)
    tensors = GemmTensors(**{name: given.get(name) for name in GemmTensors._fields})
    if tensors.scatter_indices is None:
        tensors = tensors._replace(out=None)
    options = GemmOptions(**{name: given[name] for name in GemmOptions._fields if name in given})
    options = options._replace(silu_and_mul=silu_and_mul)
    _, wanted = check(tensors, options, given.get("n"), call.out is not None)
    return make_outputs(call.out, wanted, call.x.device)[0]


@cache
def get_mxfp4_launcher(config: Mxfp4Config, device: int):
    """Compile and load the kernel of a configuration on a device."""
    (kernel, shared_bytes), threads = make_kernel(config), Mxfp4Layout(config).threads
    return launcher(kernel, MXFP4_SIGNATURE, device, launch_bounds=threads, shared_bytes=shared_bytes, dependent=True)


def compile_mxfp4_config(config: Mxfp4Config) -> None:
    """Compile the kernel of a configuration into the cubin cache on disk; no GPU is needed."""
    machine_code(make_kernel(config)[0], MXFP4_SIGNATURE, launch_bounds=Mxfp4Layout(config).threads)
