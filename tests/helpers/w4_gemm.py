"""Inputs of the grouped GEMM with MXFP4 weights for tests, and runs of its kernel."""

from types import SimpleNamespace

import torch

from helpers.wrong_kernels import changed_maker
from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.w4 import kernel as w4_kernel
from moe_numba.grouped_gemm.w4 import packing as w4_packing
from moe_numba.grouped_gemm.w4.config import W4Config
from moe_numba.grouped_gemm.w4.layout import W4Layout
from moe_numba.grouped_gemm.w4.packing import pack_mxfp4
from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4, quantise_mxfp4
from moe_numba.grouped_gemm.w4.weight_tiles import TILE
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

SMALL = W4Config(subtile_m=16, mma_n=(16, 8), box_rows=8, stages=3, max_groups=8)


def random_weight(groups, n, k):
    """Random weights whose rows differ by powers of two, and whose blocks of 32 columns do as well."""
    rows, blocks = (torch.exp2(torch.randint(-4, 5, (groups, *size)).float()) for size in ((n, 1), (n, k // 32)))
    return torch.randn(groups, n, k) * rows * blocks.repeat_interleave(32, 2)


def quantise(weight):
    """Quantise to MXFP4; return codes, scales and the dequantised weight."""
    blocks, scales = quantise_mxfp4(weight)
    return blocks, scales, dequantise_mxfp4(blocks, scales)


def make_problem(lengths, n, k, device="cpu", config=SMALL, seed=0, weight=None):
    """Random inputs and the expected output, which is NaN in rows that belong to no group."""
    torch.manual_seed(seed)
    lengths, capacity = torch.tensor(lengths, dtype=torch.int32), 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    if config.row_layout == "masked":
        capacity = int(lengths.max()) + 3
        starts = torch.arange(len(lengths), dtype=torch.int32) * capacity
    total = capacity * len(lengths) if capacity else int(lengths.sum()) or 4  # a tensor map cannot be of no rows
    x = torch.randn(total, k).bfloat16()
    blocks, scales, wide = weight or quantise(random_weight(len(lengths), n, k))
    expected = reference.group_gemm(x.double(), wide, lengths, starts)
    tensors = dict(x=x, blocks=blocks, scales=scales, lengths=lengths, starts=starts, expected=expected)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return SimpleNamespace(**tensors, capacity=capacity, n=n, k=k, indices=None, config=config)


def gathered(p):
    """The same problem with x in another order, among rows of NaN that no index names."""
    count, rows = len(p.x), torch.randperm(len(p.x) + 5)[: len(p.x)].to(p.x.device)
    wide = torch.full((count + 5, p.k), float("nan"), dtype=p.x.dtype, device=p.x.device)
    wide[rows] = p.x
    p.x, p.indices = wide, rows.int()
    return p


def pack(p, gate_up=None):
    """Return the packed weight."""
    return pack_mxfp4(p.blocks, p.scales, gate_up)


def run(p, config=None, blocks=2, seed=0, make_kernel=w4_kernel.make_kernel, pack_mxfp4=pack_mxfp4):
    """Run the kernel on an output filled with NaN, with 4 guard rows behind it."""
    config = (config or p.config)._replace(gather=p.indices is not None)
    made, shared_bytes = make_kernel(config)
    weight, indices = pack_mxfp4(p.blocks, p.scales), p.lengths if p.indices is None else p.indices
    total, size = len(p.x if p.indices is None else p.indices), p.x.element_size()
    y = torch.full((total + 4, p.n), float("nan"), dtype=torch.bfloat16, device=p.x.device)
    lengths = p.lengths if config.row_layout != "offsets" else (p.starts[:-1] + p.lengths)
    with simulator.seed(seed):
        launch(
            made,
            blocks,
            W4Layout(config).threads,
            TensorMap(p.x, (config.box_rows, TILE), swizzle=128),
            weight,
            *(y.view(torch.int32), lengths, p.starts),
            *(len(p.lengths), total, p.capacity, p.n, weight.shape[1], weight.shape[2]),
            *(p.x.view(torch.uint8), indices, len(p.x), size * p.x.shape[1], size * p.x.shape[1]),
            *(p.lengths, p.lengths, p.lengths, total),  # bias, row_weights, scatter_indices: not used
            shared_bytes=shared_bytes,
        )
    assert bool(y[total:].isnan().all()), "rows behind the output were written"
    return y[:total]


def wrong(module, right, text, *more):
    """Return the options of ``run`` for a passage of a kernel's or a packing module's source replaced by another.

    ``more`` are further pairs of passages of a kernel's source.
    """
    if module.__name__.rpartition(".")[2] in ("packing", "weight_tiles"):
        return dict(pack_mxfp4=changed_maker(w4_packing, "pack_mxfp4", module, right, text))
    return dict(make_kernel=changed_maker(w4_kernel, "make_kernel", module, right, text, *more))
