"""Arithmetic on two bf16 in a word, in single instructions."""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def add_rn_bf16x2(a, b):
    """``add.rn.bf16x2``: the sums of the high halves and of the low ones, each rounded once, to the nearest bf16.

    The same bits as when both are added in float32 and the sum is rounded to bf16: float32 has so many more bits that
    rounding twice changes nothing (Figueroa, 1995: 2 p + 2 are enough, and 24 >= 2 * 8 + 2).
    """
    halves = [np.array([x], np.uint32) << np.array([16, 0], np.uint32) & np.uint32(0xFFFF0000) for x in (a, b)]
    low, high = halves[0].view(np.float32) + halves[1].view(np.float32)
    return np.uint32(simulator.floats.bf16_bits(high) << 16 | simulator.floats.bf16_bits(low))


add_rn_bf16x2 = instruction("add.rn.bf16x2 $0, $1, $2;", "u32", "u32", "u32", simulate=add_rn_bf16x2, side_effect=False)
