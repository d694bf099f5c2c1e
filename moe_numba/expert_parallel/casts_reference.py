"""The casts to FP8 and back in torch, after DeepEP's test utilities, for hidden of any size.

Each 128 neighbours of a token share a scale. The document's functions refuse a hidden that is no multiple of 128. Here,
as in DeepEP's later ones, the last group is then filled up with zeros, which change no maximum, and cut off again.
"""

import torch

FP8, FP8_MOST = torch.float8_e4m3fn, 448.0
GROUP = 128  # elements that share a scale
AMAX_LEAST = 1e-4


def per_token_cast_to_fp8(x):
    """[tokens, hidden] -> e4m3, and float32 scales [tokens, hidden / 128], rounded up: the largest becomes 448.

    The document's ``448 / amax`` is in torch the rounded reciprocal times 448. Its ``amax / 448`` is on a GPU a product
    with the rounded 1 / 448, and on a CPU a division. What a GPU does is spelled out here, to be the same on both.
    """
    groups = _groups(x.float())
    amax = groups.abs().amax(2).clamp(min=AMAX_LEAST)
    inverse = amax.reciprocal() * FP8_MOST
    values = (groups * inverse[:, :, None]).to(FP8)
    return values.flatten(1)[:, : x.shape[1]].contiguous(), amax * (1 / FP8_MOST)


def per_token_cast_back(x_fp8, x_scales):
    """The same values in bfloat16, each multiplied with its scale in float32 and rounded once."""
    groups = _groups(x_fp8.float())
    scales = as_floats(x_scales)[:, : groups.shape[1], None]
    return (groups * scales).flatten(1)[:, : x_fp8.shape[1]].bfloat16()


def as_floats(scales):
    """Scales as float32; int32 ones are four powers of two each, of which only the exponents are kept.

    The document reads the exponents as signed bytes, so that a scale of 2 or more would become negative; here they are
    unsigned, as they are in a float32.
    """
    if scales.dtype != torch.int32:
        return scales
    return (scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)


def _groups(x):
    """[tokens, hidden] -> [tokens, groups, 128]."""
    tokens, hidden = x.shape
    return torch.nn.functional.pad(x, (0, -hidden % GROUP)).view(tokens, -(-hidden // GROUP), GROUP)
