"""Float64 reference of the grouped GEMM in torch, and the quantisation of its FP8 inputs.

Group g owns the rows ``starts[g]`` to ``starts[g] + lengths[g]`` of x; its result is ``x[rows] @ weight[g].T``.
"""

import torch

from moe_numba.ptx.conversions import FP8_MAX
from moe_numba.quantise import FP8_SCALE_BLOCK

FP8 = torch.float8_e4m3fn


def gather_rows(x, indices):
    """Return ``x[indices]``, with rows of zeros where an index is out of bounds."""
    valid = (indices >= 0) & (indices < len(x))
    rows = x.new_zeros(len(indices), x.shape[1])
    rows[valid] = x[indices[valid].long()]
    return rows


def matmul_transposed(x, weight):
    """Return ``x @ weight.T`` in float64, summed over float32 products of 128 columns.

    A float32 sum of 128 FP8 products is nearly exact, so the result does not depend on how a library multiplies large
    float64 matrices.
    """
    out = torch.zeros(len(x), len(weight), dtype=torch.float64, device=x.device)
    for k in range(0, x.shape[1], FP8_SCALE_BLOCK):
        out += x[:, k : k + FP8_SCALE_BLOCK].float() @ weight[:, k : k + FP8_SCALE_BLOCK].float().T
    return out


def group_rows(m_indices, groups):
    """Return lengths and first rows of the groups that ``m_indices`` name; a group has the rows of its first run."""
    lengths, starts = torch.zeros(groups, dtype=torch.int32), torch.zeros(groups, dtype=torch.int32)
    values, counts = torch.unique_consecutive(m_indices.cpu(), return_counts=True)
    ends = counts.cumsum(0)
    for group, count, end in zip(values.tolist(), counts.tolist(), ends.tolist(), strict=True):
        if 0 <= group < groups and not lengths[group]:
            lengths[group], starts[group] = count, end - count
    return lengths.to(m_indices.device), starts.to(m_indices.device)


def group_gemm(x, weight, lengths, starts, scales=None):
    """Return the grouped GEMM in float64, NaN in rows that belong to no group; ``scales`` has one per group."""
    out = torch.full((len(x), weight.shape[1]), float("nan"), dtype=torch.float64, device=x.device)
    for g, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=False)):
        rows = slice(start, start + length)
        out[rows] = matmul_transposed(x[rows], weight[g])
        if scales is not None:
            out[rows] *= scales[g].double()
    return out


def k_grouped_gemm(a, b, lengths, starts):
    """Return ``a[rows].T @ b[rows]`` of each group's rows in float64, [groups, n, k]."""
    groups = zip(lengths.tolist(), starts.tolist(), strict=False)
    return torch.stack([a[s : s + l].double().T @ b[s : s + l].double() for l, s in groups])


def group_gemm_blockwise(x, weight, lengths, starts, x_scale, weight_scale):
    """Return the grouped GEMM in float64 for scales per 1 x 128 block of x and per 128 x 128 block of weight."""
    scale = weight_scale.repeat_interleave(FP8_SCALE_BLOCK, 1).repeat_interleave(FP8_SCALE_BLOCK, 2)
    weight = weight.double() * scale[:, : weight.shape[1], : weight.shape[2]].double()
    x = x.double() * x_scale.repeat_interleave(FP8_SCALE_BLOCK, 1)[:, : x.shape[1]].double()
    return group_gemm(x, weight, lengths, starts)


def group_gemm_rowwise(x, weight, lengths, starts, x_scale, weight_scale):
    """Return the grouped GEMM in float64 for scales [rows] of x and [groups, n] of weight."""
    out = group_gemm(x, weight, lengths, starts) * x_scale.double()[:, None]
    return out * rows_of_groups(weight_scale, lengths, starts, len(x))


def rows_of_groups(values, lengths, starts, rows):
    """Return the row of ``values`` [groups, n] of each row's group in float64, zeros for rows of no group."""
    out = torch.zeros(rows, values.shape[1], dtype=torch.float64, device=values.device)
    for g, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=False)):
        out[start : start + length] = values[g].double()
    return out


def finish_rows(product, lengths, starts, bias=None, row_weights=None):
    """Return ``(product + bias) * row_weights`` in float64, for a bias [groups, n] and a weight for each row."""
    if bias is not None:
        product = product + rows_of_groups(bias, lengths, starts, len(product))
    return product if row_weights is None else product * row_weights.double()[:, None]


def store_rows(product, out, indices=None, accumulate=False):
    """Return ``out`` in float64 after the rows of ``product`` have been stored or added, to the rows in ``indices``.

    Rows of NaN, which belong to no group, and rows whose index is out of bounds change nothing.
    """
    result = out.double()
    for i, row in enumerate(range(len(product)) if indices is None else indices.tolist()):
        if 0 <= row < len(out) and not bool(product[i].isnan().any()):
            result[row] = result[row] + product[i] if accumulate else product[i]
    return result


def swigluoai(gate_up, alpha=1.702, limit=7.0):
    """Return gpt-oss' activation of interleaved columns of gate and up, in the dtype of ``gate_up``."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def silu_and_mul(gate_up):
    """Return ``silu(gate) * up`` in float32; gate and up are the halves of the columns, first rounded to bfloat16."""
    gate, up = gate_up.bfloat16().float().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def quantise_rows(x):
    """Quantise [rows, k] to e4m3 with float32 scales [rows, ceil(k / 128)]; the block maximum becomes 448."""
    rows, k = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -k % FP8_SCALE_BLOCK)).view(
        rows, -(-k // FP8_SCALE_BLOCK), FP8_SCALE_BLOCK
    )
    scale = blocks.abs().amax(2).clamp(min=1e-10) / FP8_MAX
    return (blocks / scale[:, :, None]).to(FP8).flatten(1)[:, :k].contiguous(), scale


def quantise_blocks(weight):
    """Quantise [groups, n, k] to e4m3 with float32 scales [groups, ceil(n / 128), ceil(k / 128)]."""
    groups, n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % FP8_SCALE_BLOCK, 0, -n % FP8_SCALE_BLOCK))
    blocks = padded.view(groups, padded.shape[1] // FP8_SCALE_BLOCK, FP8_SCALE_BLOCK, -1, FP8_SCALE_BLOCK)
    scale = blocks.abs().amax((2, 4)).clamp(min=1e-10) / FP8_MAX
    values = (blocks / scale[:, :, None, :, None]).to(FP8).view(groups, *padded.shape[1:])
    return values[:, :n, :k].contiguous(), scale


def pack_ue8m0(scale):
    """Pack the exponents of float32 scales [..., rows, blocks] as DeepGEMM does: [..., rows, ceil(blocks / 4)], int32.

    The first of four exponents is in the lowest byte. Rows are contiguous, and columns begin at multiples of 16 bytes.
    A scale that is no power of two is rounded down to one.
    """
    *groups, rows, blocks = scale.shape
    exponents = torch.nn.functional.pad(scale.float().contiguous().view(torch.int32) >> 23 & 255, (0, -blocks % 4))
    shifts = torch.arange(4, device=scale.device) * 8
    words = (exponents.view(*groups, rows, -1, 4).long() << shifts).sum(-1)
    packed = torch.zeros(*groups, words.shape[-1], -(-rows // 4) * 4, dtype=torch.int32, device=scale.device)
    packed[..., :rows] = words.mT  # beyond 31 bits it wraps around
    return packed[..., :rows].mT


def unpack_ue8m0(packed, blocks):
    """Return the float32 scales [..., rows, blocks] of packed exponents; 255 is NaN, and 0 is 2**-127."""
    shifts = torch.arange(4, device=packed.device, dtype=torch.int32) * 8
    exponents = (packed.unsqueeze(-1) >> shifts & 255).flatten(-2)[..., :blocks]
    values = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents - 127).float()
    return torch.where(exponents == 255, float("nan"), values)


def mismatch(out, expected, bound=2.3e-3):
    """Return None, or a sentence that describes how ``out`` differs from the reference.

    Rounding to bfloat16, with 8 significant bits, gives a row a relative error (in the 2-norm) of about 1.7e-3; the
    most that is expected, if all significands are close to 1, is 2**-8 / sqrt(3), 2.26e-3. An element that is much
    larger than the others of its row is rounded by up to 2**-8 of itself.

    Parameters
    ----------
    out : torch.Tensor
        Filled with NaN before the kernel ran.
    expected : torch.Tensor, float64
        NaN in rows that must not be written.
    bound : float
        Maximum relative error of the whole; a row may have twice that.
    """
    if out.shape != expected.shape:
        return f"the shape is {tuple(out.shape)}; it must be {tuple(expected.shape)}"
    written, wanted = ~out.isnan(), ~expected.isnan()
    if bool((written & ~wanted).any()):
        return f"row {int((written & ~wanted).any(1).nonzero()[0])} belongs to no group, but was written"
    if bool((~written & wanted).any()):
        return f"row {int((~written & wanted).any(1).nonzero()[0])} was not written, or is NaN"
    error = torch.where(wanted, out.double() - expected, 0.0)
    norms = torch.where(wanted, expected, 0.0).norm(dim=1).clamp(min=1e-30)
    relative = error.norm(dim=1) / norms
    if len(relative) and float(relative.max()) > 2 * bound:
        return (
            f"row {int(relative.argmax())} has relative error {float(relative.max()):.1e}; {2 * bound:.1e} is allowed"
        )
    if len(relative) and float(error.norm() / norms.norm()) > bound:
        return f"the relative error is {float(error.norm() / norms.norm()):.1e}; {bound:.1e} is allowed"
    typical = (norms / expected.shape[1] ** 0.5)[:, None]
    beyond_rounding = error.abs() - torch.where(wanted, expected, 0.0).abs() * 2**-8
    largest = float((beyond_rounding / typical).max()) if error.numel() else 0.0
    if largest > 25 * bound:
        return f"an element's error is {largest:.2g} of the row's root mean square; {25 * bound:.2g} is allowed"
    return None
