"""Plan and launch the grouped GEMM: the implementation behind the public functions."""

from functools import cache

import torch

from moe_numba import simulator
from moe_numba.grouped_gemm.checks import check_average, check_indices, check_inputs, check_scales, describe_outputs
from moe_numba.grouped_gemm.config import BLOCK_N, THREADS, GemmConfig, SharedMemoryLayout, select_config
from moe_numba.grouped_gemm.kernel import make_kernel
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import address, cached_cubin, current_stream, launcher
from moe_numba.runtime.tensor_map import encode_tensor_map
from moe_numba.runtime.validate import as_tensor, make_outputs, to_caller_library

SIGNATURE = (
    *(TENSOR_MAP, TENSOR_MAP, "int32*", "float32*", "int32*", "int32*", "float32*", "float32*", *("int32",) * 5),
    *("uint8*", "int32*", "int32", "int32"),  # x, row_indices, x_rows, row_bytes: used with gather only
)
_MAX_TILES = (1 << 31) - 1


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
    config: GemmConfig | None = None,
):
    """Check the arguments, select a configuration and launch the kernel.

    ``scaling`` is "tensor", "block" or "none". ``config`` replaces the configuration that ``average`` selects; all else
    is as for the public functions.
    """
    caller_x, x, weight = x, as_tensor(x, "x"), as_tensor(weight, "weight")
    dtype = torch.bfloat16 if scaling == "none" else torch.float8_e4m3fn
    row_layout, lengths, starts = check_inputs(x, weight, seqlens, cu_seqlens, offs, dtype)
    groups, n, k = weight.shape
    indices = None if gather_indices is None else check_indices(gather_indices, x)
    x_scale, weight_scale = check_scales(scaling, x, weight, x_scale, weight_scale)
    shape = x.shape[:-1] if indices is None else indices.shape
    total_rows = shape.numel()
    wanted = describe_outputs(shape, n, silu_and_mul)
    n //= 1 + silu_and_mul
    outputs = make_outputs(out, wanted, x.device, aligned=[name for name, _, _ in wanted])
    if total_rows:
        config = config or select_config(scaling, row_layout, check_average(average, total_rows, groups), silu_and_mul)
        if indices is not None:
            config = config._replace(gather=True, cluster_size=1)
        if groups * -(-total_rows // config.block_m) * -(-n // BLOCK_N) > _MAX_TILES:
            raise ValueError(f"x has {total_rows} rows, too many for {groups} groups of {n} columns")
        index = x.device.index or 0
        start, block_k = get_launcher(config, index), 128 // x.element_size()
        rows = x.view(-1, k) if x.dim() == 3 else x
        rows = rows if len(rows) else weight[0]  # gathering from no rows: a tensor map cannot be of an empty tensor
        start(
            _grid_size(x.device),
            THREADS,
            current_stream(index),
            encode_tensor_map(rows, (SharedMemoryLayout(config).x_box_rows, block_k), swizzle=128),
            encode_tensor_map(weight, (1, BLOCK_N, block_k), swizzle=128),
            address(outputs[0]),
            address(outputs[-1]),
            address(lengths),
            address(lengths if starts is None else starts),
            address(lengths if x_scale is None else x_scale),
            address(lengths if weight_scale is None else weight_scale),
            groups,
            total_rows,
            x.shape[1] if row_layout == "masked" else 0,
            n,
            k,
            address(rows),
            address(lengths if indices is None else indices),
            len(x),
            0 if indices is None else x.stride(0) * x.element_size(),
        )
    if out is not None:
        return out
    results = tuple(to_caller_library(tensor, caller_x) for tensor in outputs)
    return results if silu_and_mul else results[0]


def fake_group_gemm(scaling: str, call, silu_and_mul: bool = False):
    """Check the arguments of a public function's call and return its outputs."""
    x, weight, out = call.x, call.weight, call.out
    dtype = torch.bfloat16 if scaling == "none" else torch.float8_e4m3fn
    check_inputs(x, weight, call.seqlens, call.cu_seqlens, call.offs, dtype)
    if scaling == "tensor":
        check_scales(scaling, x, weight, None, call.y_scale)
    elif scaling == "block":
        check_scales(scaling, x, weight, call.x_scale, call.w_scale)
    shape = x.shape[:-1] if call.gather_indices is None else check_indices(call.gather_indices, x).shape
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
        cache_key=_cache_key(config),
    )


def compile_config(config: GemmConfig) -> None:
    """Compile the kernel of a configuration into the cubin cache on disk; no GPU is needed."""
    kernel, _ = make_kernel(config)
    cached_cubin(kernel, SIGNATURE, launch_bounds=THREADS, cache_key=_cache_key(config))


def _cache_key(config):
    return ("grouped_gemm", *config)


@cache
def _grid_size(device):
    """One CTA per SM, rounded down to an even number for clusters of two."""
    return 2 if simulator.ENABLED else gpu_of(device).sm_count // 2 * 2
