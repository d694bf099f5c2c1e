"""Plan and launch the k-grouped GEMM: the implementation behind ``k_grouped_gemm_bf16``."""

from functools import cache

import torch

from moe_numba.grouped_gemm.call.checks import has_wgmma
from moe_numba.grouped_gemm.common.constants import MAX_GROUPS, MAX_TILES, THREADS
from moe_numba.grouped_gemm.k_grouped.config import (
    BLOCK_N,
    BLOCK_ROWS,
    BOX_COLUMNS,
    STORE_ROWS,
    KGroupedConfig,
    select_k_grouped_config,
)
from moe_numba.grouped_gemm.k_grouped.kernel import make_kernel
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.device import gpu_of, persistent_ctas
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, find_plan, remember
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.tensor_map import tensor_map_template
from moe_numba.runtime.validate import UnsupportedDeviceError, check_device, check_flag, check_tensor

K_GROUPED_SIGNATURE = (*(TENSOR_MAP,) * 3, *("int32*",) * 2, *("int32",) * 4)
_OUT_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_NAMES = "a", "b", "seqlens", "cu_seqlens", "offs"
_plans: dict = {}


def k_grouped_gemm(a, b, seqlens, cu_seqlens, offs, out, out_dtype, accumulate, config: KGroupedConfig | None = None):
    """Check the arguments, select a configuration and launch the kernel.

    ``config`` replaces the configuration that the sizes select; all else is as for the public function.
    """
    accumulate = check_flag("accumulate", accumulate)
    out_dtype = select_out_dtype(out, out_dtype, accumulate)
    tensors = a, b, seqlens, cu_seqlens, offs
    plan, key, tensors = find_plan(_plans, (out_dtype, accumulate, config), tensors, _NAMES)
    if plan is None:
        plan = remember(_plans, key, KGroupedPlan(tensors, out_dtype, accumulate, config))
    outputs = plan.outputs(out)
    plan(tensors, outputs[0])
    return outputs[0] if out is None else out


def select_out_dtype(out, out_dtype, accumulate):
    """Return the dtype of the output, by default that of ``out``, or float32."""
    if accumulate and out is None:
        raise ValueError("accumulate is True, but out is None; it must be the float32 tensor that is added to")
    if out_dtype is None:
        out_dtype = torch.float32 if out is None else as_tensor(out, "out").dtype
    is_allowed = isinstance(out_dtype, torch.dtype) and out_dtype in _OUT_DTYPES
    if not is_allowed or (accumulate and out_dtype != torch.float32):
        raise ValueError(f"out_dtype is {out_dtype!r}; it must be torch.float32, or without accumulate torch.bfloat16")
    return out_dtype


def check_k_grouped_inputs(a, b, seqlens, cu_seqlens, offs):
    """Check the operands and the group sizes.

    Returns
    -------
    str, (int, int, int)
        The row layout, "lengths" or "offsets", and the shape of the output.
    """
    check_tensor("a", a, dtype=torch.bfloat16, shape=("total", "n"))
    check_tensor(
        "b", b, dtype=torch.bfloat16, shape=(a.shape[0], "k"), because=("a has {} rows",), device=(a.device, "a")
    )
    for name, tensor in (("a", a), ("b", b)):
        if tensor.shape[1] % 8 or not tensor.shape[1]:
            raise ValueError(f"{name} has {tensor.shape[1]} columns; it must have a positive multiple of 8")
    if a.shape[0] >= 1 << 31:
        raise ValueError(f"a has {a.shape[0]} rows; at most 2^31 - 1 are allowed")
    check_device(a.device, "a")
    if not has_wgmma(a.device):
        gpu = gpu_of(a.device)
        raise UnsupportedDeviceError(
            f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}; k_grouped_gemm_bf16 needs a "
            "Hopper GPU (TMA and wgmma): on this GPU, multiply the rows of each group by torch.mm"
        )
    if offs is not None:
        if seqlens is not None or cu_seqlens is not None:
            raise ValueError("offs is given: seqlens and cu_seqlens must be None")
        row_layout, sizes = "offsets", [("offs", offs, "groups")]
    else:
        row_layout, sizes = "lengths", [("seqlens", seqlens, "groups"), ("cu_seqlens", cu_seqlens, "groups + 1")]
    for name, tensor, size in sizes:
        if tensor is None:
            raise TypeError(f"{name} is None; it must be a tensor ({size},) of torch.int32, or offs must be given")
        check_tensor(name, tensor, dtype=torch.int32, shape=(size,), contiguous=True, device=(a.device, "a"))
    name, tensor, _ = sizes[0]
    groups = tensor.shape[0]
    if offs is None:
        check_tensor("cu_seqlens", cu_seqlens, shape=(groups + 1,), because=(f"seqlens has {groups} elements",))
    if not 1 <= groups <= MAX_GROUPS:
        raise ValueError(f"{name} has {groups} groups; 1 to {MAX_GROUPS} are allowed")
    return row_layout, (groups, a.shape[1], b.shape[1])


def describe_output(row_layout, shape, dtype):
    """Return name, shape, dtype and reason of the output, in a list."""
    sizes = "offs" if row_layout == "offsets" else "seqlens"
    return [("out", shape, dtype, (f"{sizes} has {{}} elements", "a has {} columns", "b has {} columns"))]


class KGroupedPlan:
    """Launch plan for tensors of given shapes, strides and dtypes: the arguments are checked once."""

    def __init__(self, tensors, out_dtype, accumulate, config):
        a, b, _, _, _ = tensors
        row_layout, shape = check_k_grouped_inputs(*tensors)
        groups, n, k = shape
        self.outputs = Outputs(describe_output(row_layout, shape, out_dtype), a.device, aligned=["out"])
        self.accumulate, self.start = accumulate, None
        if not len(a):
            return
        dtype = _OUT_DTYPES[out_dtype]
        config = config or select_k_grouped_config(n, k, row_layout, dtype, accumulate)
        self.config = config = config._replace(row_layout=row_layout, out_dtype=dtype, accumulate=accumulate)
        if groups * (-(-n // BLOCK_N) + 1) * -(-k // config.block_k) > MAX_TILES:
            raise ValueError(f"out would be {list(shape)}, which has too many tiles of {BLOCK_N} x {config.block_k}")
        self.start, self.grid = (
            get_k_grouped_launcher(config, a.device.index or 0),
            persistent_ctas(a.device, 2),
        )  # even, for clusters of two
        self.a_map, self.b_map = (
            tensor_map_template(tensor, (BLOCK_ROWS, BOX_COLUMNS), swizzle=128, name=name)
            for name, tensor in (("a", a), ("b", b))
        )
        self.out_box, self.sizes = (1, STORE_ROWS, config.store_columns), (groups, len(a), n, k)
        self.out_map = None

    def __call__(self, tensors, out):
        """Launch the kernel. A pointer that it does not use is that of the group sizes."""
        if self.start is None:  # a tensor map cannot be of an empty tensor
            if not self.accumulate:
                refuse_recording("a has 0 rows; for a prepared call without accumulate it must have at least one")
                out.zero_()
            return
        a, b, seqlens, cu_seqlens, offs = tensors
        if self.out_map is None:
            self.out_map = tensor_map_template(out, self.out_box, swizzle=128, name="out")
        lengths = address(seqlens if offs is None else offs)
        self.start(
            self.grid,
            THREADS,
            None,
            self.a_map(a),
            self.b_map(b),
            self.out_map(out),
            lengths,
            lengths if cu_seqlens is None else address(cu_seqlens),
            *self.sizes,
        )


@cache
def get_k_grouped_launcher(config: KGroupedConfig, device: int):
    """Compile and load the kernel of a configuration on a device."""
    kernel, shared_bytes = make_kernel(config)
    cluster = config.cluster_size if config.cluster_size > 1 else None
    return launcher(
        kernel,
        K_GROUPED_SIGNATURE,
        device,
        launch_bounds=THREADS,
        shared_bytes=shared_bytes,
        cluster=cluster,
        dependent=True,
    )
