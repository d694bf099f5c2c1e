"""Packing of MXFP4 weights and their decoding: every code with every scale, and wrong decoders that are rejected."""

import numpy as np
import pytest
import torch
from helpers.w4_gemm import SMALL, make_problem, quantise, random_weight, run, wrong

# isort: split
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.grouped_gemm.w4 import dequantize, weight_tiles
from moe_numba.grouped_gemm.w4 import packing as w4_packing
from moe_numba.grouped_gemm.w4.packing import MAX_SCALE, MIN_SCALE, pack_mxfp4
from moe_numba.grouped_gemm.w4.reference import E2M1, dequantise_mxfp4, quantise_mxfp4


def test_quantisation_of_mxfp4_numbers_is_exact():
    numbers = torch.tensor([*E2M1, *(-v for v in E2M1)]).repeat(3, 4, 2) * torch.tensor([1.0, 0.25, 1024.0]).view(
        3, 1, 1
    )
    blocks, scales = quantise_mxfp4(numbers)
    assert blocks.shape == (3, 4, 1, 16) and scales.shape == (3, 4, 1) and scales[0, 0, 0] == 127
    assert torch.equal(dequantise_mxfp4(blocks, scales).float(), numbers)
    assert blocks[0, 0, 0, 0] == 0x10  # the first number is in the low half
    assert torch.equal(dequantise_mxfp4(blocks.flatten(2), scales).float(), numbers)


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "blocks is torch.int8; it must be torch.uint8", lambda b, s: (b.view(torch.int8), s)),
        (TypeError, "scales is torch.int8", lambda b, s: (b, s.view(torch.int8))),
        (ValueError, r"scales has shape \(2, 64, 2\); .* \[2, 64, 1\], as blocks", lambda b, s: (b[:, :, :1], s)),
        (ValueError, r"blocks has shape \(2, 64, 2, 8\); it must be \[groups, n, k / 32", lambda b, s: (b[..., :8], s)),
        (ValueError, r"scales has shape \(64, 2\); it must be \[2, 64, 2\], as b", lambda b, s: (b, s[0])),
        (ValueError, r"n must be a multiple of 32", lambda b, s: (b[:, :48], s[:, :48])),
        (ValueError, r"scales has the byte 161, 2\*\*34; it must be at most 160", lambda b, s: (b, s.fill_(161))),
        (ValueError, "gate_up is 'gate'; it must be one of interleaved, stacked", lambda b, s: (b, s, "gate")),
        (ValueError, "blocks has 32 rows; with gate_up", lambda b, s: (b[:, :32], s[:, :32], "stacked")),
        (TypeError, "blocks is list; it must be a tensor, or an array", lambda b, s: (b.tolist(), s)),
        (TypeError, "scales is list; it must be a tensor, or an array", lambda b, s: (b, s.tolist())),
        (TypeError, "blocks is a Tensor without memory", lambda b, s: (b.to("meta"), s)),
    ],
)
def test_unsupported_mxfp4_weights_are_refused(error, message, change):
    with pytest.raises(error, match=message):
        pack_mxfp4(*change(*quantise(random_weight(2, 64, 64))[:2]))


def test_packing_takes_both_layouts_of_codes_and_arrays_of_other_libraries():
    blocks, scales, _ = quantise(random_weight(2, 96, 96))
    packed = pack_mxfp4(blocks, scales)
    assert packed.shape == (2, 2, 2, 2176) and packed.is_contiguous()
    assert torch.equal(pack_mxfp4(blocks.flatten(2), scales), packed)
    from_numpy = pack_mxfp4(blocks.numpy(), scales.numpy())
    assert isinstance(from_numpy, np.ndarray) and torch.equal(torch.from_numpy(from_numpy), packed)
    blocks, scales = blocks[:, :64], scales[:, :64]
    assert pack_mxfp4(blocks, scales, "stacked").shape == (2, 1, 2, 136, 16)
    assert pack_mxfp4(blocks.numpy(), scales.numpy(), "interleaved").shape == (2, 1, 2, 136, 16)


# Decoding


def every_code_and_scale():
    """Weights with all 16 codes twice in each block, and a scale of its own for each of 128 blocks."""
    codes = torch.stack([torch.randperm(32) % 16 for _ in range(128)]).view(1, 64, 2, 32).to(torch.uint8)
    codes, order = codes[..., 0::2] | codes[..., 1::2] << 4, torch.randperm(128).view(1, 64, 2)
    assert MAX_SCALE - MIN_SCALE + 2 == 128
    scales = (order + MIN_SCALE - 1).to(torch.uint8)
    right = dequantise_mxfp4(codes, torch.where(scales < MIN_SCALE, 0, scales))
    return codes, scales, torch.where(right.abs() < 2.0**-100, 0, right)  # of the scale below MIN_SCALE


def decoding_error(device, **options):
    """Return what is wrong with a product with the identity, which is the decoded weight."""
    torch.manual_seed(0)
    codes, scales, right = every_code_and_scale()
    p = make_problem([64], 64, 64, device, weight=(codes, scales, right))
    p.x = torch.eye(64, device=device).to(p.x.dtype)
    found = run(p, SMALL._replace(subtile_m=64, mma_n=(64,)), **options).double().cpu()
    return None if torch.equal(found, right[0].T) else f"{int((found != right[0].T).sum())} weights are wrong"


def test_every_code_is_decoded_exactly_with_every_scale(device):
    assert decoding_error(device) is None


def test_a_scale_that_is_nan_makes_its_row_nan(device):
    p = make_problem([3], 64, 64, device)
    p.scales[0, 5, 1] = 255
    y = run(p)
    assert bool(y[:, 5].isnan().all())
    p.expected[:, 5], y[:, 5] = 0, 0
    assert mismatch(y, p.expected) is None


WRONG_DECODING = {
    "the two codes of a byte are swapped": (weight_tiles, "codes & 15, codes >> 4", "codes >> 4, codes & 15"),
    "bits of other registers are not compensated": (w4_packing, "    a = a | ((y ^ b << 3) & 0x80408040) >> 2\n", ""),
    "scales below the range are not flushed": (w4_packing, "scales < MIN_SCALE, 0", "scales < 0, 0"),
    "the sign is lost": (dequantize, "word & uint32(FIELDS)", "word & uint32(0x01C001C0)"),
    "a block has the scale of its neighbour": (
        dequantize,
        "rotr(word, 8) & uint32(EXPONENTS)",
        "word & uint32(EXPONENTS)",
    ),
    "a thread's second row has the first one's scale": (dequantize, "mul_rn_bf16x2_high(", "mul_rn_bf16x2_low("),
    "a scale is that of the next row": (
        dequantize,
        "8 * (warp & 3) + (lane >> 2))]",
        "8 * (warp & 3) + (lane + 4 >> 2 & 7))]",
    ),
    "registers of a block are in another order": (dequantize, "fields(b), scales", "fields(rotr(b, 4)), scales"),
}


@pytest.mark.parametrize("what", WRONG_DECODING)
def test_wrong_decoding_is_rejected(what, device):
    assert decoding_error(device, **wrong(*WRONG_DECODING[what])), f"the check accepts a kernel in which {what}"
