"""Zeros in the rows of a tensor that belong to no group: gradients of rows that the grouped GEMM does not read."""

from functools import cache

import torch
from numba import cuda, int32, int64

from moe_numba import simulator
from moe_numba.grouped_gemm.common.scheduler import Problem, make_group_rows
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.torch_op import NAMESPACE, needs_dispatch

THREADS, WARPS = 256, 8
CTAS_PER_SM = 8
SIGNATURE = "int32*", "int32*", "int32*", *("int32",) * 4


@cache
def make_kernel(row_layout):
    """Make ``zero_unused_rows(out, lengths, starts, groups, rows, capacity, vectors)``.

    Each warp takes every n-th row, of ``vectors`` 16-byte vectors. Its lanes compare the row with one group each.
    """
    group_rows = make_group_rows(row_layout)

    @cuda.jit
    def zero_unused_rows(out, lengths, starts, groups, rows, capacity, vectors):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        problem = Problem(lengths, starts, groups, rows, capacity)
        thread = int32(cuda.threadIdx.x)
        lane, zero = int32(thread & 31), int32(0)
        row = int64(int32(cuda.blockIdx.x) * WARPS + (thread >> 5))
        while row < rows:
            is_used = False
            for base in range(0, groups, 32):
                group = int32(base + lane)
                if group < groups:
                    first, count = group_rows(problem, group)
                    is_used = is_used or (first <= row and row - first < count)
            if not cuda.any_sync(FULL_MASK, is_used):
                for i in range(lane, vectors, 32):
                    st_global_s32x4(out, (row * vectors + i) * 4, zero, zero, zero, zero)
            row += int64(cuda.gridDim.x) * WARPS

    return zero_unused_rows


def zero_unused_rows(
    out: torch.Tensor, seqlens: torch.Tensor | None, cu_seqlens: torch.Tensor | None, offs: torch.Tensor | None
) -> None:
    """Write zeros to the rows of ``out`` that belong to no group.

    ``out`` is contiguous bfloat16, [total, n] or [groups, capacity, n], and n a multiple of 8; the others are those of
    ``group_gemm_bf16``, which has checked them.
    """
    if needs_dispatch(out):
        torch.ops.moe_numba.zero_unused_rows(out, seqlens, cu_seqlens, offs)
    else:
        _launch(out, seqlens, cu_seqlens, offs)


def _launch(out, seqlens, cu_seqlens, offs):
    rows = out.shape[:-1].numel()
    if not rows:
        return
    row_layout = "offsets" if offs is not None else "lengths" if out.dim() == 2 else "masked"
    lengths = seqlens if offs is None else offs
    device = out.device.index or 0
    get_launcher(row_layout, device)(
        min(-(-rows // WARPS), _most_ctas(out.device)),
        THREADS,
        None,
        address(out.view(torch.int32)),
        address(lengths),
        address(lengths if cu_seqlens is None else cu_seqlens),
        len(lengths),
        rows,
        out.shape[1] if row_layout == "masked" else 0,
        out.shape[-1] * out.element_size() // 16,
    )


@cache
def get_launcher(row_layout: str, device: int):
    """Compile and load the kernel on a device."""
    return launcher(make_kernel(row_layout), SIGNATURE, device, launch_bounds=THREADS, dependent=True)


@cache
def _most_ctas(device):
    return 2 if simulator.ENABLED else CTAS_PER_SM * gpu_of(device).sm_count


@torch.library.custom_op(f"{NAMESPACE}::zero_unused_rows", mutates_args={"out"})
def _op(
    out: torch.Tensor, seqlens: torch.Tensor | None, cu_seqlens: torch.Tensor | None, offs: torch.Tensor | None
) -> None:
    _launch(out, seqlens, cu_seqlens, offs)


@_op.register_fake
def _fake(out, seqlens, cu_seqlens, offs):
    return None
