"""add.rn.bf16x2 and mul.rn.bf16x2: GPU and simulator return float32 results rounded to bf16."""

import numpy as np
import torch
from helpers.hopper import runs
from numba import cuda

from moe_numba.ptx.arithmetic import add_rn_bf16x2, mul_rn_bf16x2, mul_rn_bf16x2_high, mul_rn_bf16x2_low

SPECIAL_VALUES = [
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x007F,
    0x0080,
    0x3F80,
    0xBF80,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0xFF80,
    0x7FC0,
]


@cuda.jit
def add_pairs(out, a, b):
    i = cuda.grid(1)
    out[i] = add_rn_bf16x2(a[i], b[i])


def test_sums_equal_float32_sums_rounded_once(device):
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 1 << 16, (2, 4096), dtype=np.uint16)
    b[1024:2048] = a[1024:2048] ^ 0x8000 ^ generator.integers(0, 4, 1024, dtype=np.uint16)  # sums that nearly cancel
    b[2048:3072] = (a[2048:3072] & 0xFF80) - (generator.integers(6, 11, 1024) << 7).astype(np.uint16)  # close to a tie
    pairs = [(x, y) for x in SPECIAL_VALUES for y in SPECIAL_VALUES]
    a[-len(pairs) :], b[-len(pairs) :] = np.array(pairs, np.uint16).T
    as_floats = lambda bits: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    right = (as_floats(a).float() + as_floats(b).float()).bfloat16()
    words = lambda bits: torch.from_numpy(bits.copy().view(np.uint32)).to(device)
    make = lambda: [torch.zeros(2048, dtype=torch.uint32, device=device), words(a), words(b)]
    for out, *_ in runs(add_pairs, make, blocks=64, count=1):
        found = out.cpu().view(torch.bfloat16)
        assert torch.equal(found.isnan(), right.isnan())
        number = ~right.isnan()
        assert torch.equal(found[number].view(torch.int16), right[number].view(torch.int16))  # -0 is not 0


@cuda.jit
def multiply_pairs(out, a, b):
    i = cuda.grid(1)
    out[3 * i] = mul_rn_bf16x2(a[i], b[i])
    out[3 * i + 1] = mul_rn_bf16x2_low(a[i], b[i])
    out[3 * i + 2] = mul_rn_bf16x2_high(a[i], b[i])


def test_products_equal_float32_products_rounded_once(device):
    """Without subnormal float32 products, which would be rounded twice here; subnormal bf16 products are exact."""
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 1 << 16, (2, 1024), dtype=np.uint16)
    a[:256] = generator.integers(0, 128, 256)  # subnormal
    b[:256] = (generator.integers(128, 255, 256) << 7).astype(np.uint16)  # powers of two
    pairs = [(x, y) for x in SPECIAL_VALUES for y in SPECIAL_VALUES]
    a[-len(pairs) :], b[-len(pairs) :] = np.array(pairs, np.uint16).T
    number = lambda bits: (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        double = number(a) * number(b)
    b[(np.abs(double) < 2.0**-126) & (double != 0) & (b & 0x7F != 0)] = 0x3F80
    as_floats = lambda bits: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    pairs_of = lambda bits: as_floats(bits).view(-1, 2)
    x, y = pairs_of(a), pairs_of(b)
    right = torch.stack([x * y, x * y[:, :1], x * y[:, 1:]], 1).flatten().bfloat16()
    tiny = torch.stack([(x.double() * f.double()).abs() for f in (y, y[:, :1], y[:, 1:])], 1).flatten() < 2.0**-126
    words = lambda bits: torch.from_numpy(bits.copy().view(np.uint32)).to(device)
    make = lambda: [torch.zeros(3 * 512, dtype=torch.uint32, device=device), words(a), words(b)]
    for out, *_ in runs(multiply_pairs, make, blocks=16, count=1):
        found = out.cpu().view(torch.bfloat16)
        exact = ~tiny | (right.float().abs() == torch.stack([x * y, x * y[:, :1], x * y[:, 1:]], 1).flatten().abs())
        assert torch.equal(found.isnan(), right.isnan()) and int((tiny & exact).sum()) > 100
        compared = exact & ~right.isnan()
        assert torch.equal(found[compared].view(torch.int16), right[compared].view(torch.int16))
