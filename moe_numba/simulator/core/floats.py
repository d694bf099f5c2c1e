"""Encoding and decoding of the 8-bit and 16-bit floats e4m3, f16 and bf16."""

import numpy as np


def _decode_e4m3(code):
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return np.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = np.array([_decode_e4m3(code) for code in range(256)], np.float32)  # value of each of the 256 codes
_E4M3_FLOAT64 = E4M3.astype(np.float64)
MIDPOINTS = (_E4M3_FLOAT64[:126] + _E4M3_FLOAT64[1:127]) / 2  # between neighbours from 0 to 448


def e4m3_bits(value):
    """Round to the nearest e4m3, ties to even, and return its code; magnitudes above 448 saturate to 448."""
    value = np.float32(value)
    if value != value:
        return 0x7F
    magnitude = abs(float(value))
    code = int(np.searchsorted(MIDPOINTS, magnitude))
    if code < 126 and magnitude == MIDPOINTS[code] and code & 1:
        code += 1
    return code | (0x80 if np.signbit(value) else 0)


def bf16_bits(value):
    """Round to the nearest bf16, ties to even, and return its bits."""
    value = np.float32(value)
    if value != value:
        return 0x7FFF
    bits = int(value.view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def decode(data, dtype):
    """Decode the bytes along an array's last axis as `e4m3`, `f16` or `bf16` numbers, in float64."""
    if dtype == "e4m3":
        return _E4M3_FLOAT64[data]
    if dtype == "f16":
        return np.ascontiguousarray(data).view(np.float16).astype(np.float64)
    return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
