"""The grouped GEMM in torch, in float64: the ground truth. Also the scalings that its FP8 inputs come from.

Group g's rows of x, ``x[starts[g] : starts[g] + lengths[g]]``, are multiplied with its weight: ``y = x weight[g]^T``.
"""

import torch

FP8, FP8_MOST = torch.float8_e4m3fn, 448.0
BLOCK = 128  # elements of k, and rows of a weight, that share a scale


def gather(x, indices):
    """The rows of x, or of its scales, that indices name; zeros where they name none."""
    known = (indices >= 0) & (indices < len(x))
    rows = x.new_zeros(len(indices), x.shape[1])
    rows[known] = x[indices[known].long()]
    return rows


def product(x, weight):
    """x weight^T in float64, as float32 products of 128 columns each: of FP8 numbers such a sum is all but exact.

    So what is true does not hang on how a library multiplies large matrices of float64.
    """
    out = torch.zeros(len(x), len(weight), dtype=torch.float64, device=x.device)
    for k in range(0, x.shape[1], BLOCK):
        out += x[:, k : k + BLOCK].float() @ weight[:, k : k + BLOCK].float().T
    return out


def group_gemm(x, weight, lengths, starts, factors=None):
    """The products in float64, NaN in rows of no group; ``factors`` has one number for each group."""
    out = torch.full((len(x), weight.shape[1]), float("nan"), dtype=torch.float64, device=x.device)
    for g, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=False)):
        rows = slice(start, start + length)
        out[rows] = product(x[rows], weight[g])
        if factors is not None:
            out[rows] *= factors[g].double()
    return out


def group_gemm_blockwise(x, weight, lengths, starts, x_scale, weight_scale):
    """The same where each 128 elements of a row of x and each 128 by 128 of a weight have a scale of their own."""
    scale = weight_scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    weight = weight.double() * scale[:, : weight.shape[1], : weight.shape[2]].double()
    x = x.double() * x_scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]].double()
    return group_gemm(x, weight, lengths, starts)


def silu_and_mul(gate_up):
    """silu(gate) * up in float32 of rows that hold both side by side; they are rounded to bfloat16 first."""
    gate, up = gate_up.bfloat16().float().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def quantise_rows(x):
    """[rows, k] -> e4m3 and float32 scales [rows, k / 128], rounded up: the largest of each 128 becomes 448."""
    rows, k = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -k % BLOCK)).view(rows, -(-k // BLOCK), BLOCK)
    scale = blocks.abs().amax(2).clamp(min=1e-10) / FP8_MOST
    return (blocks / scale[:, :, None]).to(FP8).flatten(1)[:, :k].contiguous(), scale


def quantise_blocks(weight):
    """[groups, n, k] -> e4m3 and float32 scales [groups, n / 128, k / 128], rounded up."""
    groups, n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.view(groups, padded.shape[1] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((2, 4)).clamp(min=1e-10) / FP8_MOST
    values = (blocks / scale[:, :, None, :, None]).to(FP8).view(groups, *padded.shape[1:])
    return values[:, :n, :k].contiguous(), scale


def mismatch(out, right, bound=2e-3):
    """None, or a sentence saying what is wrong with an output; ``right`` is float64, NaN where nothing belongs.

    bfloat16 has 8 significant bits: a row of results rounded to it is off by about 1.7e-3 of its length.
    """
    if out.shape != right.shape:
        return f"the shape is {tuple(out.shape)}; it must be {tuple(right.shape)}"
    written, wanted = ~out.isnan(), ~right.isnan()
    if bool((written & ~wanted).any()):
        return f"row {int((written & ~wanted).any(1).nonzero()[0])} is of no group, and was written"
    if bool((~written & wanted).any()):
        return f"row {int((~written & wanted).any(1).nonzero()[0])} is not written, or NaN"
    error = torch.where(wanted, out.double() - right, 0.0)
    length = torch.where(wanted, right, 0.0).norm(dim=1).clamp(min=1e-30)
    worst = error.norm(dim=1) / length
    if len(worst) and float(worst.max()) > 2 * bound:
        return f"row {int(worst.argmax())} is off by {float(worst.max()):.1e} of its length; {2 * bound:.1e} is allowed"
    if len(worst) and float(error.norm() / length.norm()) > bound:
        return f"all is off by {float(error.norm() / length.norm()):.1e} of its length; {bound:.1e} is allowed"
    usual = (length / right.shape[1] ** 0.5)[:, None]
    most = float((error.abs() / usual).max()) if error.numel() else 0.0
    if most > 25 * bound:
        return f"an element is off by {most:.2g} of the usual size"
    return None
