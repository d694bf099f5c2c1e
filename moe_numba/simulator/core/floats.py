"""The short floats e4m3 and bf16, by their bits."""

import numpy as np


def _e4m3(code):
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return np.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = np.array([_e4m3(code) for code in range(256)], np.float32)  # what each of the 256 codes means
_MIDPOINTS = (E4M3[:126].astype(np.float64) + E4M3[1:127]) / 2  # between each of the numbers up to 448 and the next


def e4m3_bits(value):
    """The code of the nearest e4m3, of two as near the even one; what is beyond 448 becomes 448."""
    value = np.float32(value)
    if value != value:
        return 0x7F
    size = abs(float(value))
    code = int(np.searchsorted(_MIDPOINTS, size))
    if code < 126 and size == _MIDPOINTS[code] and code & 1:
        code += 1
    return code | (0x80 if np.signbit(value) else 0)


def bf16_bits(value):
    """The bits of the nearest bf16, of two as near the even one."""
    value = np.float32(value)
    if value != value:
        return 0x7FFF
    bits = int(value.view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def decode(data, dtype):
    """Bytes, the last axis of an array, as the numbers that they are: `e4m3` or `bf16`, in float64."""
    if dtype == "e4m3":
        return _E4M3_DOUBLE[data]
    return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


_E4M3_DOUBLE = E4M3.astype(np.float64)
