"""Packing of 4-bit weights and their decoding: every code with every scale, and wrong decoders that are rejected."""

import numpy as np
import pytest
import torch
from helpers.w4_gemm import E4M3, INT4, SMALL, make_problem, quantise, random_weight, run, wrong

# isort: split
from moe_numba.grouped_gemm import packing_int4
from moe_numba.grouped_gemm.packing_int4 import pack_int4
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.grouped_gemm.w4 import dequantize, weight_tiles
from moe_numba.grouped_gemm.w4 import packing as w4_packing
from moe_numba.grouped_gemm.w4.packing import MAX_E4M3_SCALE, MAX_SCALE, MIN_SCALE, pack_mxfp4
from moe_numba.grouped_gemm.w4.reference import E2M1, dequantise_int4, dequantise_mxfp4, quantise_int4, quantise_mxfp4


def test_quantisation_of_mxfp4_numbers_is_exact():
    numbers = torch.tensor([*E2M1, *(-v for v in E2M1)]).repeat(3, 4, 2) * torch.tensor([1.0, 0.25, 1024.0]).view(
        3, 1, 1
    )
    blocks, scales = quantise_mxfp4(numbers)
    assert blocks.shape == (3, 4, 1, 16) and scales.shape == (3, 4, 1) and scales[0, 0, 0] == 127
    assert torch.equal(dequantise_mxfp4(blocks, scales).float(), numbers)
    assert blocks[0, 0, 0, 0] == 0x10  # the first number is in the low half
    assert torch.equal(dequantise_mxfp4(blocks.flatten(2), scales).float(), numbers)


def test_quantisation_of_int4_numbers_is_exact():
    numbers = torch.arange(-7, 8).repeat(3, 64, 10)[..., :128] * torch.tensor([1.0, 0.25, 1024.0]).view(3, 1, 1)
    codes, scales = quantise_int4(numbers, 64)
    assert codes.shape == (3, 64, 64) and scales.shape == (3, 64, 2) and scales[0, 0, 0] == 1
    assert torch.equal(dequantise_int4(codes, scales).float(), numbers)
    assert codes[0, 0, 0] == 0x21  # -7 and -6, plus 8, the first in the low half


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "blocks is torch.int8; it must be torch.uint8", lambda b, s: (b.view(torch.int8), s)),
        (TypeError, "scales is torch.int8", lambda b, s: (b, s.view(torch.int8))),
        (ValueError, r"blocks has shape \(2, 64, 1, 16\); it must be \[2, 64, 2, 16\]", lambda b, s: (b[:, :, :1], s)),
        (ValueError, r"blocks has shape \(2, 64, 16\); it must be \[2, 64, 32\]", lambda b, s: (b[:, :, 0], s)),
        (ValueError, r"scales has shape \(64, 2\); it must be \[groups", lambda b, s: (b, s[0])),
        (ValueError, r"n must be a multiple of 32", lambda b, s: (b[:, :48], s[:, :48])),
        (ValueError, r"scales has the byte 161, 2\*\*34; it must be at most 160", lambda b, s: (b, s.fill_(161))),
        (ValueError, r"scales has the byte 249, .* at most 248", lambda b, s: (b, s.fill_(249), None, FP8)),
        (ValueError, "gate_up is 'gate'; it must be None", lambda b, s: (b, s, "gate")),
        (ValueError, "scales has 32 rows; with gate_up", lambda b, s: (b[:, :32], s[:, :32], "stacked")),
        (ValueError, "activation_dtype is torch.float16; it must be", lambda b, s: (b, s, None, torch.float16)),
        (TypeError, "blocks is list; it must be a tensor, or an array", lambda b, s: (b.tolist(), s)),
        (TypeError, "scales is list; it must be a tensor, or an array", lambda b, s: (b, s.tolist())),
        (TypeError, "blocks is a Tensor without memory", lambda b, s: (b.to("meta"), s)),
    ],
)
def test_unsupported_mxfp4_weights_are_refused(error, message, change):
    with pytest.raises(error, match=message):
        pack_mxfp4(*change(*quantise(random_weight(2, 64, 64), SMALL)[:2]))


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "codes is torch.int8; it must be torch.uint8", lambda c, s: (c.view(torch.int8), s)),
        (TypeError, "scales is torch.float64; it must be torch.bfloat16 or", lambda c, s: (c, s.double())),
        (ValueError, r"codes has shape \(2, 64\); it must be \[2, 64, k / 2\]", lambda c, s: (c[:, :, 0], s)),
        (ValueError, r"scales has shape \(64, 2\); it must be \[groups", lambda c, s: (c, s[0])),
        (ValueError, "scales has 2 groups of k, and codes 32 columns; a group must be", lambda c, s: (c[..., :16], s)),
        (ValueError, "n must be a multiple of 32", lambda c, s: (c[:, :48], s[:, :48])),
        (ValueError, "gate_up is 'gate'", lambda c, s: (c, s, "gate")),
        (TypeError, "scales is list; it must be a tensor, or an array", lambda c, s: (c, s.tolist())),
        (TypeError, "scales is a Tensor without memory", lambda c, s: (c, s.to("meta"))),
    ],
)
def test_unsupported_int4_weights_are_refused(error, message, change):
    with pytest.raises(error, match=message):
        pack_int4(*change(*quantise(random_weight(2, 64, 128), INT4)[:2]))


def test_packing_takes_both_layouts_of_codes_and_arrays_of_other_libraries():
    blocks, scales, _ = quantise(random_weight(2, 96, 96), SMALL)
    packed, for_e4m3 = pack_mxfp4(blocks, scales), pack_mxfp4(blocks, scales, activation_dtype=FP8)
    assert packed.shape == (2, 2, 2, 2176) and packed.is_contiguous()
    assert for_e4m3.shape == (2, 2, 2, 136, 16) and for_e4m3.is_contiguous()
    assert torch.equal(pack_mxfp4(blocks.flatten(2), scales), packed)
    from_numpy = pack_mxfp4(blocks.numpy(), scales.numpy())
    assert isinstance(from_numpy, np.ndarray) and torch.equal(torch.from_numpy(from_numpy), packed)
    codes, scales, _ = quantise(random_weight(2, 96, 96), INT4._replace(group_size=32, scale_dtype="f32"))
    weight, w_scale = pack_int4(codes, scales)
    assert weight.shape == (2, 2, 2, 2048) and w_scale.shape == (2, 2, 4, 64) and w_scale.dtype == torch.float32
    from_numpy = pack_int4(codes.numpy(), scales.numpy())
    assert all(torch.equal(torch.from_numpy(a), b) for a, b in zip(from_numpy, (weight, w_scale), strict=True))


# Decoding

DECODED = {
    "bf16": SMALL,
    "e4m3": E4M3._replace(x_scaling="tensor"),
    "int4, bf16": INT4._replace(group_size=32),
    "int4, f16": INT4._replace(group_size=32, scale_dtype="f16"),
    "int4, f32": INT4._replace(group_size=32, scale_dtype="f32"),
}


def every_code_and_scale(config):
    """Weights with all 16 codes twice in each block, and a scale of its own for each of 128 blocks."""
    codes = torch.stack([torch.randperm(32) % 16 for _ in range(128)]).view(1, 64, 2, 32).to(torch.uint8)
    codes, order = codes[..., 0::2] | codes[..., 1::2] << 4, torch.randperm(128).view(1, 64, 2)
    if config.weight == "int4":  # products with a code have at most eight significant bits
        dtype = {name: dtype for dtype, name in packing_int4.SCALE_DTYPES.items()}[config.scale_dtype]
        scales = torch.ldexp(1 + (order % 8) / 8, order // 8 - 8).to(dtype)
        return codes.flatten(2), scales, dequantise_int4(codes.flatten(2), scales)
    if config.dtype == "e4m3":
        scales = (order * MAX_E4M3_SCALE // 127).to(torch.uint8)
        return codes, scales, dequantise_mxfp4(codes, scales)
    assert MAX_SCALE - MIN_SCALE + 2 == 128
    scales = (order + MIN_SCALE - 1).to(torch.uint8)
    right = dequantise_mxfp4(codes, torch.where(scales < MIN_SCALE, 0, scales))
    return codes, scales, torch.where(right.abs() < 2.0**-100, 0, right)  # of the scale below MIN_SCALE


def decoding_error(device, config, **options):
    """Return what is wrong with a product with the identity, which is the decoded weight."""
    torch.manual_seed(0)
    codes, scales, right = every_code_and_scale(config)
    p = make_problem([64], 64, 64, device, config, weight=(codes, scales, right))
    p.x = torch.eye(64, device=device).to(p.x.dtype)
    if p.x_scale is not None:
        p.x_scale.fill_(1)
    found = run(p, config._replace(subtile_m=64, mma_n=(64,)), **options).double().cpu()
    return None if torch.equal(found, right[0].T) else f"{int((found != right[0].T).sum())} weights are wrong"


@pytest.mark.parametrize("name", DECODED)
def test_every_code_is_decoded_exactly_with_every_scale(name, device):
    assert decoding_error(device, DECODED[name]) is None


@pytest.mark.parametrize("config", [SMALL, E4M3])
def test_a_scale_that_is_nan_makes_its_row_nan(config, device):
    p = make_problem([3], 64, 64, device, config)
    p.scales[0, 5, 1] = 255
    y = run(p)
    assert bool(y[:, 5].isnan().all())
    p.expected[:, 5], y[:, 5] = 0, 0
    assert mismatch(y, p.expected) is None


SWAPPED = "codes & 15, codes >> 4", "codes >> 4, codes & 15"
E4M3_FACTORS = "(factor(word), factor(shl(word, 8)), factor(shl(word, 16)), factor(rotr(word, 8)))"
WRONG_DECODING = {
    "the two codes of a byte are swapped": ("bf16", weight_tiles, *SWAPPED),
    "bits of other registers are not compensated": (
        *("bf16", w4_packing),
        *("    a = a | ((y ^ b << 3) & 0x80408040) >> 2\n", ""),
    ),
    "scales below the range are not flushed": ("bf16", w4_packing, "scales < MIN_SCALE, 0", "scales < 0, 0"),
    "the sign is lost": ("bf16", dequantize, "word & uint32(FIELDS)", "word & uint32(0x01C001C0)"),
    "a block has the scale of its neighbour": (
        *("bf16", dequantize),
        *("rotr(word, 8) & uint32(EXPONENTS)", "word & uint32(EXPONENTS)"),
    ),
    "a thread's second row has the first one's scale": (
        *("bf16", dequantize),
        *("mul_rn_bf16x2_high(", "mul_rn_bf16x2_low("),
    ),
    "a scale is that of the next row": (
        *("bf16", dequantize),
        *("8 * (warp & 3) + (lane >> 2))]", "8 * (warp & 3) + (lane + 4 >> 2 & 7))]"),
    ),
    "registers of a block are in another order": (
        *("bf16", dequantize),
        *("fields(b), scales", "fields(rotr(b, 4)), scales"),
    ),
    "e4m3: bits of other registers are not compensated": (
        *("e4m3", w4_packing),
        *("    a = a | ((y ^ b >> 2) & 0x80808080) >> 1\n", ""),
    ),
    "e4m3: the sign is lost": ("e4m3", dequantize, "word & uint32(E4M3_FIELDS)", "word & uint32(0x1C1C1C1C)"),
    "e4m3: registers are in another order": (
        *("e4m3", dequantize),
        *("e4m3_fields(a), e4m3_fields(b)", "e4m3_fields(b), e4m3_fields(a)"),
    ),
    "e4m3: a block has the scale of its neighbour": (
        *("e4m3", dequantize, E4M3_FACTORS),
        "(factor(shl(word, 16)), factor(rotr(word, 8)), factor(word), factor(shl(word, 8)))",
    ),
    "e4m3: a thread's second row has the first one's scale": (
        *("e4m3", dequantize, E4M3_FACTORS),
        "(factor(word), factor(word), factor(shl(word, 16)), factor(shl(word, 16)))",
    ),
    "int4: the two codes of a byte are swapped": ("int4, bf16", weight_tiles, *SWAPPED),
    "int4: the code of zero is another": (
        "int4, bf16",
        dequantize,
        "uint32(LOW_FACTOR), uint32(MINUS_ZERO_CODE)",
        "uint32(LOW_FACTOR), uint32(0xBDE0BDE0)",
    ),
    "int4: a block has the scale of its neighbour": (
        *("int4, bf16", dequantize),
        *("load_pair(smem, int32(first + group_words))", "load_pair(smem, first)"),
    ),
    "int4: a scale is that of the next row": (
        *("int4, f32", dequantize),
        *("(8 * (warp & 3) + (lane >> 2)))\n", "(8 * (warp & 3) + (lane + 4 >> 2 & 7)))\n"),
    ),
    "int4: a thread's second row has the first one's scale": (
        *("int4, f16", dequantize),
        *("half_bits_as_float(shr(word, 16))", "half_bits_as_float(word)"),
    ),
    "int4: registers are in another order": (
        *("int4, bf16", dequantize),
        *("decode_low(a), decode_high(a)", "decode_high(a), decode_low(a)"),
    ),
}


@pytest.mark.parametrize("what", WRONG_DECODING)
def test_wrong_decoding_is_rejected(what, device):
    name, *change = WRONG_DECODING[what]
    assert decoding_error(device, DECODED[name], **wrong(*change)), f"the check accepts a kernel in which {what}"
