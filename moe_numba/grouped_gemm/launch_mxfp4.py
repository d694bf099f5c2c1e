"""Check the arguments of the grouped GEMM with MXFP4 weights, plan and launch it."""

from functools import cache

import torch

from moe_numba import simulator
from moe_numba.grouped_gemm.checks import check_indices, check_inputs
from moe_numba.grouped_gemm.config_mxfp4 import Mxfp4Config, Mxfp4Layout, select_mxfp4_config
from moe_numba.grouped_gemm.kernel_mxfp4 import make_kernel
from moe_numba.grouped_gemm.packing_mxfp4 import SCALE_BLOCK, UNIT, UNIT_BYTES
from moe_numba.runtime import device as devices
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.cubin_cache import machine_code
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.tensor_map import tensor_map_template
from moe_numba.runtime.validate import UnsupportedDeviceError, check_int, check_tensor, is_fake, make_outputs

MXFP4_SIGNATURE = (
    *(TENSOR_MAP, "uint8*", "int32*", "int32*", "int32*"),
    *("int32",) * 6,
    *("uint8*", "int32*", "int32", "int32", "int32"),  # x, row_indices, x_rows, row_bytes, valid_bytes: for gather
)
_MAX_TILES, _MAX_AVERAGE = (1 << 31) - 1, 1 << 20

_plans: dict = {}


def group_gemm(x, weight, seqlens, cu_seqlens, average=None, offs=None, out=None, indices=None, n=None, config=None):
    """Check the arguments, select a configuration and launch the kernel; arguments as for ``group_gemm_mxfp4``.

    ``config`` replaces the configuration that ``average`` selects.
    """
    if average is not None:  # before the look-up: 8.0 would find the plan for 8
        average = min(check_int("num_seq_per_group_avg", average, 0), _MAX_AVERAGE)
    if n is not None:
        n = check_int("n", n, 0)
    tensors: tuple = (x, weight, seqlens, cu_seqlens, offs, indices)
    try:
        key = (average, n, config, *map(_tensor_key, tensors))
    except AttributeError:  # an array of another library
        names = "x", "weight", "seqlens", "cu_seqlens", "offs", "gather_indices"
        tensors = tuple(a if a is None else as_tensor(a, name) for a, name in zip(tensors, names, strict=True))
        key = (average, n, config, *map(_tensor_key, tensors))
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, Mxfp4Plan(tensors, average, n, config))
    outputs = plan.outputs(out)
    if plan.start is not None:
        plan.launch(tensors, outputs)
    return outputs[0] if out is None else out


def _tensor_key(tensor):
    return tensor if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def check(x, weight, seqlens, cu_seqlens, offs, indices, n):
    """Check the arguments; return the row layout, the shape of the rows of y, and its number of columns."""
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
    # A weight of one element, expanded to the shape before packing, has what the other checks ask for.
    unpacked = weight.new_empty(1, dtype=torch.bfloat16).expand(groups, n, k)
    row_layout = check_inputs(x, unpacked, seqlens, cu_seqlens, offs, torch.bfloat16)
    if not is_fake(x.device) and not (gpu := devices.gpu_of(x.device)).has_wgmma:
        raise UnsupportedDeviceError(
            "{} has compute capability {}.{}; group_gemm_mxfp4 needs 9.0 (H100, H200: wgmma): on this GPU, dequantise "
            "the weights and call group_gemm_bf16".format(gpu.name, *gpu.capability)
        )
    if indices is not None:
        check_indices(indices, x)
    return row_layout, x.shape[:-1] if indices is None else indices.shape, n


class Mxfp4Plan:
    """Launch plan for tensors of given shapes, strides and dtypes: the arguments are checked once."""

    def __init__(self, tensors, average, n, config):
        x, weight, seqlens, cu_seqlens, offs, indices = tensors
        row_layout, rows, n = check(x, weight, seqlens, cu_seqlens, offs, indices, n)
        self.outputs = Outputs([("y", (*rows, n), torch.bfloat16)], x.device, aligned=["y"])
        self.start, total_rows = None, rows.numel()
        if not total_rows:
            return
        groups, n_units, k_units, _ = weight.shape
        config = config or select_mxfp4_config(row_layout, -(-total_rows // groups) if average is None else average)
        config = config._replace(gather=indices is not None)
        if groups * -(-total_rows // config.block_m) * -(-n_units // config.warpgroups) > _MAX_TILES:
            raise ValueError(f"x has {total_rows} rows, too many for {groups} groups of {n} columns")
        self.config, self.threads = config, Mxfp4Layout(config).threads
        self.start, self.grid = get_mxfp4_launcher(config, x.device.index or 0), _grid_size(x.device)
        k, self.is_masked = x.shape[-1], row_layout == "masked"
        rows = x.flatten(0, 1) if self.is_masked else x
        # Gathering from no rows: a tensor map cannot be of an empty tensor.
        self.x_is_empty = not len(rows)
        example = weight.new_empty(1, k, dtype=torch.bfloat16) if self.x_is_empty else rows
        self.x_map, self.example = tensor_map_template(example, (config.box_rows, UNIT), swizzle=128, name="x"), example
        self.sizes = groups, total_rows, x.shape[1] if self.is_masked else 0, n, n_units, k_units
        self.gather_sizes = len(x), 0 if indices is None else 2 * x.stride(0), 2 * k

    def launch(self, tensors, outputs):
        """Launch the kernel. A pointer that it does not use is that of the group sizes."""
        x, weight, seqlens, cu_seqlens, offs, indices = tensors
        rows = self.example if self.x_is_empty else x.flatten(0, 1) if self.is_masked else x
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
        )


def fake_group_gemm(call):
    """Check the arguments of a call and return its output."""
    inputs = call.x, call.weight, call.seqlens, call.cu_seqlens, call.offs, call.gather_indices
    _, rows, n = check(*inputs, call.n)
    return make_outputs(call.out, [("y", (*rows, n), torch.bfloat16)], call.x.device)[0]


@cache
def get_mxfp4_launcher(config: Mxfp4Config, device: int):
    """Compile and load the kernel of a configuration on a device."""
    (kernel, shared_bytes), threads = make_kernel(config), Mxfp4Layout(config).threads
    return launcher(kernel, MXFP4_SIGNATURE, device, launch_bounds=threads, shared_bytes=shared_bytes, dependent=True)


def compile_mxfp4_config(config: Mxfp4Config) -> None:
    """Compile the kernel of a configuration into the cubin cache on disk; no GPU is needed."""
    machine_code(make_kernel(config)[0], MXFP4_SIGNATURE, launch_bounds=Mxfp4Layout(config).threads)


@cache
def _grid_size(device):
    """One CTA per SM."""
    return 2 if simulator.ENABLED else devices.gpu_of(device).sm_count
