"""Arithmetic that is rounded as IEEE 754 says, in single instructions."""

import numpy as np

from moe_numba.ptx.intrinsic import instruction


def rcp_rn(x):
    """``rcp.rn.f32``: 1/x, rounded to the nearest float32; subnormals are kept."""
    return np.float32(1) / np.float32(x)


rcp_rn = instruction("rcp.rn.f32 $0, $1;", "f32", "f32", simulate=rcp_rn, side_effect=False)
