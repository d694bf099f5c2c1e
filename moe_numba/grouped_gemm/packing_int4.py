"""Packing of int4 weights with a scale per group into the tiles of ``weight_tiles.py``.

A code is an integer from 0 to 15, and the weight is ``(code - 8) * scale``. Two words of codes have the eight registers
of a 32-column block, four each: either half of a word has the codes of the registers in bits 0 to 3, 4 to 7, 8 to 11
and 12 to 15. The low eight bits of a bf16 are an integer times 2**-133, because the subnormal numbers and the smallest
normal ones have the same unit in the last place. So a code in bits 0 to 3 is code * 2**-133, and in bits 4 to 7 it is
code * 2**-129: an AND and one ``fma`` make it ``(code - 8) * 2**-6``, and the upper two registers of a word take one
shift. The epilogue multiplies by ``2**RESULT_EXPONENT``.
"""

import torch

from moe_numba.grouped_gemm.w4.weight_tiles import (
    CODE_BYTES,
    TILE,
    as_bytes,
    bf16_fragments,
    check_gate_up,
    order_rows,
    pad,
    unpack_nibbles,
)
from moe_numba.runtime.dlpack import as_tensor, call_with_tensors
from moe_numba.runtime.validate import check_has_memory, check_tensor

ZERO_CODE = 8
RESULT_EXPONENT = 6
LOW_NIBBLES, LOW_FACTOR = 0x000F000F, 0x7F007F00  # 2**127 as two bf16
HIGH_NIBBLES, HIGH_FACTOR = 0x00F000F0, 0x7D007D00  # 2**123
MINUS_ZERO_CODE = 0xBE00BE00  # -ZERO_CODE * 2**-RESULT_EXPONENT as two bf16
GROUP_SIZES = (32, 64, 128)  # elements of k that share a scale
SCALE_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def pack_int4(
    codes: torch.Tensor, scales: torch.Tensor, gate_up: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack int4 weights for ``group_gemm_int4``, once when a model is loaded.

    Parameters
    ----------
    codes : tensor [groups, n, k / 2], uint8
        Two codes per byte, the first in the low half. The weight is ``(code - 8) * scale``: symmetric quantisation, as
        GPTQ and AWQ checkpoints have it with a zero point of 8 everywhere. n and k are multiples of 32.
    scales : tensor [groups, n, k / group_size], bfloat16, float16 or float32
        One scale for 32, 64 or 128 elements of k, of which k is a multiple.
    gate_up : {None, "interleaved", "stacked"}
        Whether the rows are those of gate and up, for ``activation``: alternating, or first all of gate.

    Returns
    -------
    weight : tensor [groups, ceil(n / 64), ceil(k / 64), 2048], uint8
        Rows and columns are padded with zeros to multiples of 64.
    w_scale : tensor [groups, ceil(n / 64), k / group_size, 64], dtype of ``scales``
        With groups of 32, an even number of them.

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.
    """
    if not isinstance(codes, torch.Tensor):
        return call_with_tensors(pack_int4, "codes", dict(codes=codes, scales=scales, gate_up=gate_up))
    scales = as_tensor(scales, "scales")
    for name, tensor in (("codes", codes), ("scales", scales)):
        check_has_memory(name, tensor)
    if scales.dim() != 3:
        raise ValueError(f"scales has shape {tuple(scales.shape)}; it must be [groups, n, k / group_size]")
    groups, n, k_groups = scales.shape
    check_tensor("codes", codes, dtype=torch.uint8, shape=(groups, n, "k / 2"))
    check_tensor("scales", scales, dtype=tuple(SCALE_DTYPES), device=(codes.device, "codes"))
    k = 2 * codes.shape[2]
    if n % 32 or not n or not groups:
        raise ValueError(f"scales has shape {tuple(scales.shape)}; n must be a multiple of 32, and none may be 0")
    if not k_groups or k not in [k_groups * size for size in GROUP_SIZES]:
        raise ValueError(
            f"scales has {k_groups} groups of k, and codes {k} columns; a group must be 32, 64 or 128 of them"
        )
    check_gate_up(gate_up, n)
    rows, columns = -(-n // TILE), -(-k // TILE)
    weight = torch.empty(groups, rows, columns, CODE_BYTES, dtype=torch.uint8, device=codes.device)
    k_groups = max(k_groups, columns * TILE * k_groups // k)  # an even number of groups of 32, as in whole tiles
    w_scale = torch.empty(groups, rows, k_groups, TILE, dtype=scales.dtype, device=codes.device)
    for group in range(groups):  # one at a time: the intermediate results take many times the memory
        numbers = pad(unpack_nibbles(order_rows(codes[group], gate_up)), rows * TILE, columns * TILE, ZERO_CODE)
        weight[group] = _pack_codes(numbers.long(), rows, columns)
        ordered = pad(order_rows(scales[group], gate_up), rows * TILE, k_groups)
        # Dimensions: tile row, warp, two rows of a lane, row of 8, group of k.
        w_scale[group] = ordered.view(rows, 4, 2, 8, k_groups).permute(0, 4, 1, 3, 2).flatten(2)
    return weight, w_scale


def _pack_codes(codes, rows, columns):
    """Pack [64 rows, 64 columns] of codes as [rows, columns, 2048] bytes."""
    halves = bf16_fragments(codes, rows, columns).unflatten(-2, (2, 4))
    words = sum((halves[..., i, 0] | halves[..., i, 1] << 16) << 4 * i for i in range(4))
    return as_bytes(words.reshape(rows, columns, CODE_BYTES // 4))
