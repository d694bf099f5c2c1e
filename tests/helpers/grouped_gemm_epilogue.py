"""Inputs of the grouped GEMM's epilogue for tests, and what its options compute."""

import torch

from moe_numba.grouped_gemm import (
    group_gemm_bf16,
    group_gemm_blockwise_fp8,
    group_gemm_pertensor_fp8,
    group_gemm_rowwise_fp8,
    reference,
)
from moe_numba.grouped_gemm.reference import mismatch

# Of float32 results: the tensor cores sum FP8 products of 128 elements of k with fewer bits than float32.
BOUNDS = {"bf16": 2e-5, "pertensor": 5e-4, "blockwise": 5e-4, "rowwise": 5e-4}
FUNCTIONS = {
    "bf16": (group_gemm_bf16, reference.group_gemm),
    "pertensor": (group_gemm_pertensor_fp8, reference.group_gemm),
    "blockwise": (group_gemm_blockwise_fp8, reference.group_gemm_blockwise),
    "rowwise": (group_gemm_rowwise_fp8, reference.group_gemm_rowwise),
}


class Inputs:
    """Inputs of one of the functions, in any order of x, and everything that its epilogue can read."""

    def __init__(self, name, lengths=(5, 0, 15), n=144, k=192, device="cpu"):
        self.name, random = name, torch.Generator().manual_seed(1)
        new = lambda *shape: torch.randn(shape, generator=random)
        rows, groups = sum(lengths), len(lengths)
        self.seqlens = torch.tensor(lengths, dtype=torch.int32)
        self.cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), self.seqlens.cumsum(0).int()])
        x, weight, self.scales = new(rows + 3, k), new(groups, n, k), []
        if name == "bf16":
            self.x, self.weight = x.bfloat16(), weight.bfloat16()
        else:
            (self.x, x_scale), (self.weight, w_scale) = reference.quantise_rows(x), reference.quantise_blocks(weight)
            if name == "pertensor":
                self.scales = [new(groups).abs() + 0.5]
            elif name == "rowwise":
                self.scales = [new(rows + 3).abs() + 0.5, new(groups, n).abs() + 0.5]
            else:
                self.scales = [x_scale, w_scale]
        self.gather = torch.randperm(rows + 3, generator=random)[:rows].int()
        self.gather[1] = -1  # a row of zeros
        self.bias, self.row_weights = new(groups, n) * 8, new(rows)
        # Rows of an output of 5 more rows; two are stored nowhere.
        self.scatter = torch.randperm(rows + 5, generator=random)[:rows].int()
        self.scatter[0], self.scatter[rows - 2] = -1, rows + 5
        self.out = new(rows + 5, n)
        for key, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, key, value.to(device))
        self.scales = [scale.to(device) for scale in self.scales]

    def ordered(self):
        """x and the scales in the order of the groups."""
        per_row = self.name in ("blockwise", "rowwise")
        x = reference.gather_rows(self.x.float(), self.gather)
        if not per_row:
            return x, self.scales
        x_scale = reference.gather_rows(self.scales[0].reshape(len(self.x), -1), self.gather)
        return x, [x_scale.squeeze(1) if self.name == "rowwise" else x_scale, self.scales[1]]

    def product(self):
        x, scales = self.ordered()
        return FUNCTIONS[self.name][1](x, self.weight, self.seqlens, self.cu_seqlens, *scales)

    def finished(self, bias=None, row_weights=None):
        return reference.finish_rows(self.product(), self.seqlens, self.cu_seqlens, bias, row_weights)

    def call(self, **options):
        groups = dict(seqlens=self.seqlens, cu_seqlens=self.cu_seqlens) | options
        scales = {"bf16": (), "pertensor": ("y_scale",)}.get(self.name, ("x_scale", "w_scale"))
        scales = dict(zip(scales, self.scales, strict=True))
        return FUNCTIONS[self.name][0](self.x, self.weight, gather_indices=self.gather, **groups | scales)


def options_mismatch(name, device, lengths=(5, 0, 15), n=144, k=192):
    """None, or what is wrong if rows are gathered, biased, weighted and added to other rows, which are scattered.

    The second call is in bfloat16, with a bias in bfloat16, and with tiles of many rows.
    """
    p = Inputs(name, lengths, n, k, device=device)
    options = dict(row_weights=p.row_weights, scatter_indices=p.scatter)
    expected = reference.store_rows(p.finished(p.bias, p.row_weights), p.out, p.scatter, accumulate=True)
    out = p.out.clone()
    assert p.call(bias=p.bias, accumulate=True, out=out, **options) is out
    untouched = [row for row in range(len(out)) if row not in p.scatter.tolist()]
    assert untouched and torch.equal(out[untouched], p.out[untouched])
    if wrong := mismatch(out, expected, BOUNDS[name]):
        return wrong
    out, bias = p.out.bfloat16(), p.bias.bfloat16()
    expected = reference.store_rows(p.finished(bias, p.row_weights), out, p.scatter)
    p.call(bias=bias, out=out, num_seq_per_group_avg=300, **options)
    return mismatch(out, expected)
