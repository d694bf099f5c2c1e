"""Descriptions of parameters that the public functions of the grouped GEMM have in common."""

import re
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)

_TEXT = """
seqlens : tensor [groups], int32
    Number of rows of each group, 0 or more. The kernel reads it, so the host does not wait for it.
cu_seqlens : tensor [groups + 1], int32, or None
    First row of each group. None if ``x`` is masked.
num_seq_per_group_avg : int, optional
    Expected average number of rows per group. It selects the tile size and affects nothing else. Rows divided by
    groups if not given.
offs : tensor [groups], int32, optional
    End of each group's rows, as for ``torch._scaled_grouped_mm``; replaces seqlens and cu_seqlens.
out : tensor, optional
    Contiguous, 16-byte aligned output. The call then neither allocates nor synchronises.
gather_indices : tensor [total], int32, optional
    Contiguous. Row i of the GEMM uses row ``gather_indices[i]`` of x, and zeros if that is out of bounds. x and
    its scales are then [tokens, ...] in any order, so they need not be permuted first.
bias : tensor [groups, n], bfloat16 or float32, optional
    Contiguous. Added to each row of a group, in float32.
out_dtype : torch.dtype, optional
    torch.bfloat16 or torch.float32.
accumulate : bool, optional
    Add the result to ``out``, which must then be given and float32; ``out_dtype`` has no effect.
scatter_indices : tensor [total] or [groups, capacity], int32, optional
    Contiguous. Row i of the result is stored to row ``scatter_indices[i]`` of ``out``, or not at all if that is out
    of bounds. ``out`` must be given, [any number of rows, n]; its other rows do not change. Indices in bounds must
    differ from each other: of rows with equal ones it is undefined which remains, or in what order they are added.
row_weights : tensor [total] or [groups, capacity], float32, optional
    Contiguous. Row i of the result, with its bias, is multiplied by ``row_weights[i]`` before it is rounded: the
    routing weights, if each row of the result belongs to one token and expert.
m_indices : tensor [total], int32, optional
    Group of each row, as for DeepGEMM's contiguous layout; replaces seqlens, cu_seqlens and offs. The rows of a
    group must be consecutive: of a group with several runs of rows only the first run is used. Rows with -1, or any
    other value that is not a group, are skipped; they may come before, between and after the groups. This adds one
    launch, of one CTA, which computes the group sizes.
x_low : tensor [total, r] or [groups, capacity, r], bfloat16, optional
    A second operand with the rows of x, given with ``weight_low``: ``x_low @ weight_low.T`` of each group is added to
    ``x @ weight.T`` in float32, by the same kernel. For a LoRA adapter it is ``x @ a.T``, where a is the adapter's
    first matrix. r is a multiple of 8; the kernel loads r in blocks of 64. The argument needs a GPU with wgmma (compute
    capability 9.0), and ``gather_indices`` must be None.
weight_low : tensor [groups, n, r], bfloat16, optional
    The weight of ``x_low``: a LoRA adapter's second matrix, multiplied by the adapter's scaling factor. Its rows have
    the order of those of weight. Its last dimension is contiguous if that of weight is, and otherwise its second.
use_fast_accum : bool, optional
    Accumulate over all of k in the tensor cores, as for ``torch._scaled_grouped_mm``: up to 9 % faster, and less
    accurate, because FP8 tensor cores keep about 13 bits of a sum. Without it the sums over 128 elements of k are added
    in float32. It has an effect on GPUs of compute capability 9.0 only.
activation : str, optional
    "silu": ``silu(gate) * up``. The first n / 2 rows of weight compute gate, the others up.
    "swigluoai", of gpt-oss, by vLLM's name: ``(up + 1) * gate * sigmoid(alpha * gate)``. gate is first clamped to at
    most ``limit``, and up to the range ``-limit`` to ``limit``. The even rows of weight compute gate, the odd ones
    up.
alpha, limit : float, optional
    Of "swigluoai"; positive and normal in float32, 1.2e-38 to 1e38. The kernel is compiled for each value.
"""
DESCRIPTIONS = {entry.partition(" : ")[0]: entry for entry in re.split(r"\n(?=\w)", _TEXT.strip())}
_PLACEHOLDER = re.compile(r"^( *)\{([^}]*)\}$", re.MULTILINE)


def describe_parameters(function: F) -> F:
    """Replace each line ``{name}`` in a function's docstring by the parameter's description; a decorator."""

    def describe(line):
        return "\n".join(line[1] + text if text else "" for text in DESCRIPTIONS[line[2]].splitlines())

    if function.__doc__:  # python -OO removes docstrings
        function.__doc__ = _PLACEHOLDER.sub(describe, function.__doc__)
    return function
