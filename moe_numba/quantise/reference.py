"""Torch references of the casts to FP8."""

import torch

from moe_numba.ptx.conversions import FP8_MAX
from moe_numba.quantise import FP8_SCALE_BLOCK

FP8 = torch.float8_e4m3fn
AMAX_MIN = 1e-4


def per_token_cast_to_fp8(x):
    """Cast [tokens, hidden] to e4m3, with float32 scales [tokens, hidden / 128] (rounded up).

    After DeepEP's test utilities, for any ``hidden``: each group of 128 consecutive elements of a token shares a scale,
    and the last group is padded with zeros, which do not change the maximum. In torch, ``448 / amax`` is the rounded
    reciprocal times 448. ``amax / 448`` is a multiplication by the rounded 1 / 448 on a GPU, but a division on a CPU.
    This function spells out the GPU's operations, so that the results are the same on both.
    """
    groups = _groups(x.float())
    amax = groups.abs().amax(2).clamp(min=AMAX_MIN)
    inverse = amax.reciprocal() * FP8_MAX
    values = (groups * inverse[:, :, None]).to(FP8)
    return values.flatten(1)[:, : x.shape[1]].contiguous(), amax * (1 / FP8_MAX)


def per_token_cast_back(x_fp8, x_scales):
    """Cast back to bfloat16: multiply each value by its scale in float32, and round once."""
    groups = _groups(x_fp8.float())
    scales = as_floats(x_scales)[:, : groups.shape[1], None]
    return (groups * scales).flatten(1)[:, : x_fp8.shape[1]].bfloat16()


def as_floats(scales):
    """Convert scales to float32; an int32 packs the exponents of four powers of two.

    DeepEP reads the exponents as signed bytes, so that a scale of 2 or more would become negative; here they are
    unsigned, as in a float32.
    """
    if scales.dtype != torch.int32:
        return scales
    return (scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)


def _groups(x):
    """Reshape [tokens, hidden] to [tokens, groups, 128], padded with zeros."""
    tokens, hidden = x.shape
    return torch.nn.functional.pad(x, (0, -hidden % FP8_SCALE_BLOCK)).view(
        tokens, -(-hidden // FP8_SCALE_BLOCK), FP8_SCALE_BLOCK
    )
