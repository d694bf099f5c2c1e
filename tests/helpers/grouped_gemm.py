"""Inputs of the grouped GEMM for tests, and the comparison of its FP8 outputs."""

from types import SimpleNamespace

import torch

from moe_numba.grouped_gemm import (
    group_gemm_bf16,
    group_gemm_blockwise_fp8,
    group_gemm_pertensor_fp8,
    group_gemm_silu_and_mul_blockwise_fp8,
    group_gemm_silu_and_mul_pertensor_fp8,
    reference,
)
from moe_numba.grouped_gemm.reference import FP8

PATTERNS = {
    "empty groups": [0, 3, 0, 0, 9, 0],
    "one row": [1],
    "an exact tile, and one row more": [16, 17],
    "all in one group": [0, 70, 0],
    "no rows": [0, 0],
}


def inputs(lengths=(5, 0, 15), n=128, k=192, device="cpu"):
    """A small problem: the arguments of the three functions without activation."""
    torch.manual_seed(1)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), seqlens.cumsum(0).int()])
    x, weight = torch.randn(int(seqlens.sum()), k), torch.randn(len(lengths), n, k)
    (xq, xs), (wq, ws) = reference.quantise_rows(x), reference.quantise_blocks(weight)
    scale = torch.rand(len(lengths)) + 1
    every = {
        "pertensor": (xq, wq, seqlens, cu_seqlens, scale),
        "blockwise": (xq, wq, seqlens, cu_seqlens, xs, ws),
        "bf16": (x.bfloat16(), weight.bfloat16(), seqlens, cu_seqlens),
    }
    return {name: tuple(tensor.to(device) for tensor in arguments) for name, arguments in every.items()}


FUNCTIONS = {
    "pertensor": (group_gemm_pertensor_fp8, reference.group_gemm),
    "blockwise": (group_gemm_blockwise_fp8, reference.group_gemm_blockwise),
    "bf16": (group_gemm_bf16, reference.group_gemm),
}


SILU = {
    "pertensor": (group_gemm_silu_and_mul_pertensor_fp8, reference.group_gemm),
    "blockwise": (group_gemm_silu_and_mul_blockwise_fp8, reference.group_gemm_blockwise),
}


def silu_mismatch(y, scale, expected):
    """None, or what is wrong: e4m3 has 3 mantissa bits, so rounding is off by up to 1/16 of a number.

    Where cancellation makes gate or up small, their absolute error is that of the summands: 0.2 % of a block's maximum.
    """
    wanted, wanted_scale = reference.quantise_rows(expected)
    if not torch.allclose(scale, wanted_scale, rtol=0.01, atol=1e-9):
        return "a scale is wrong"
    wide = scale.repeat_interleave(128, 1)[:, : y.shape[1]]
    got = y.float() * wide
    step = wide * torch.clamp(expected.abs() / wide, 2**-6) / 16
    if bool(((got - expected).abs() > 1.2 * step + 0.01 * expected.abs() + 2e-3 * 448 * wide).any()):
        return "an element is off by more than half a step"
    same = float((y.view(torch.uint8) == wanted.view(torch.uint8)).float().mean())
    return None if same > 0.95 else f"only {100 * same:.0f} % of the elements are the same"


def make_problem(config, lengths, n, k, device="cpu", seed=0):
    """Random inputs and the expected output, which is NaN in rows that belong to no group."""
    torch.manual_seed(seed)
    lengths, capacity = torch.tensor(lengths, dtype=torch.int32), 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    if config.row_layout == "masked":
        capacity = int(lengths.max()) + 3
        starts = torch.arange(len(lengths), dtype=torch.int32) * capacity
    total = capacity * len(lengths) if capacity else int(lengths.sum()) or 4  # a tensor map cannot be of no rows
    dtype = FP8 if config.dtype == "e4m3" else torch.bfloat16
    x = (torch.randn(total, k, device=device) * 0.5).to(dtype)
    weight = (torch.randn(len(lengths), n, k, device=device) * 0.5).to(dtype)
    x_scale = torch.rand(total, -(-k // 128), device=device) + 0.5
    weight_scale = torch.rand(len(lengths), -(-n // 128), -(-k // 128), device=device) + 0.5
    if getattr(config, "weight_major", "k") == "mn":
        weight = weight.mT.contiguous().mT
    if config.scaling == "block":
        expected = reference.group_gemm_blockwise(x, weight, lengths, starts, x_scale, weight_scale)
    else:
        weight_scale = torch.rand(len(lengths), device=device) + 0.5
        scales = weight_scale if config.scaling == "tensor" else None
        expected = reference.group_gemm(x, weight, lengths, starts, scales)
    return SimpleNamespace(
        x=x,
        weight=weight,
        lengths=lengths.to(device),
        starts=starts.to(device),
        x_scale=x_scale,
        weight_scale=weight_scale,
        expected=expected,
        capacity=capacity,
        indices=None,
        scale_strides=(*x_scale.stride(), 0),
    )


def lay_out_scales(p, config):
    """The same problem with column-major scales of x, in each group if it is masked, and NaN between the columns."""
    groups = len(p.lengths) if config.row_layout == "masked" else 1
    scale = p.x_scale.view(groups, -1, p.x_scale.shape[1])
    rows = scale.shape[1]
    memory = torch.full((groups, scale.shape[2] + 1, rows + 3), float("nan"), device=scale.device)
    memory[:, :-1, :rows] = scale.mT
    p.x_scale, p.scale_strides = memory, (1, rows + 3, memory.stride(0) - rows)
    return p


def with_powers_of_two(arguments):
    """The arguments of a grouped GEMM with block scales, with other scales that UE8M0 represents, and these packed.

    Of a weight DeepGEMM packs a scale for each row.
    """
    x, weight, seqlens, cu_seqlens, *scales = arguments
    other = lambda scale: torch.randint(-3, 4, scale.shape, device=scale.device)  # random ones are nearly equal
    powers = [torch.exp2(torch.log2(scale).round() + other(scale)) for scale in scales]
    rows = powers[1].repeat_interleave(128, 1)[:, : weight.shape[1]]
    return (x, weight, seqlens, cu_seqlens, *powers), tuple(map(reference.pack_ue8m0, (powers[0], rows)))


def scatter(p):
    """The same problem with x and its scales in another order, among rows of NaN that no index names."""
    count, rows = len(p.x), torch.randperm(len(p.x) + 5)[: len(p.x)].to(p.x.device)
    for name in ("x", "x_scale"):
        wide = torch.full((count + 5, getattr(p, name).shape[1]), float("nan"), device=rows.device)
        wide = wide.to(getattr(p, name).dtype)
        wide[rows] = getattr(p, name)
        setattr(p, name, wide)
    p.indices = rows.int()
    return p


def check_graph_replay():
    """Replay a captured call with other lengths of the groups, which the kernel reads."""
    x, weight, seqlens, cu_seqlens, scale = inputs((5, 0, 15), 256, 512, "cuda")["pertensor"]
    out = torch.empty(20, 256, dtype=torch.bfloat16, device="cuda")
    call = lambda: group_gemm_pertensor_fp8(x, weight, seqlens, cu_seqlens, scale, out=out)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths in ((20, 0, 0), (0, 1, 2), (7, 7, 6)):
        seqlens.copy_(torch.tensor(lengths))
        cu_seqlens[1:].copy_(torch.tensor(lengths).cumsum(0))
        out.fill_(float("nan"))
        graph.replay()
        assert reference.mismatch(out, reference.group_gemm(x, weight, seqlens, cu_seqlens, scale)) is None
