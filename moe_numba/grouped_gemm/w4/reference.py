"""Reference of MXFP4 weights in torch: quantisation and float64 dequantisation.

MXFP4 (OCP Microscaling Formats 1.0) stores e2m1 numbers, two to a byte with the first in the low half, and one scale
for 32 of them in UE8M0: byte s is 2**(s - 127), and 255 is NaN.
"""

import torch

from moe_numba.grouped_gemm.w4.packing import MX_BLOCK

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the codes 0 to 7; codes 8 to 15 are their negatives


def quantise_mxfp4(weight):
    """Quantise [..., k] to MXFP4; k is a multiple of 32.

    Returns
    -------
    blocks : tensor [..., k / 32, 16], uint8
    scales : tensor [..., k / 32], uint8
        The largest magnitude of a block is scaled into the binade of 4 to 8, and saturates at 6.
    """
    parts = weight.float().unflatten(-1, (-1, MX_BLOCK))
    largest = parts.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 3, -127).clamp(-127, 127)
    magnitudes = torch.tensor(E2M1, device=weight.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    scaled = torch.ldexp(parts, -exponent)
    codes = torch.bucketize(scaled.abs(), middles) + 8 * (scaled < 0)
    low, high = codes[..., 0::2], codes[..., 1::2]
    return (low | high << 4).to(torch.uint8), (exponent.squeeze(-1) + 127).to(torch.uint8)


def dequantise_mxfp4(blocks, scales):
    """Dequantise to float64 [..., k]; ``blocks`` is [..., k / 32, 16] or [..., k / 2], ``scales`` [..., k / 32]."""
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=blocks.device)
    blocks = blocks.reshape(*scales.shape, MX_BLOCK // 2).long()
    parts = torch.stack([values[blocks & 15], values[blocks >> 4]], -1).flatten(-2)
    factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales.int() - 127)
    factors = torch.where(scales == 255, float("nan"), factors)
    return (parts * factors[..., None]).flatten(-2)
