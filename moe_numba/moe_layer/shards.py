"""``shard_experts``: a rank's share of a layer's weights for tensor parallelism, padded to what the kernels need."""

from typing import NamedTuple

import torch

from moe_numba.grouped_gemm.w4.weight_tiles import GATE_UP
from moe_numba.moe_layer.weights import (
    BF16,
    DTYPES,
    FORMAT_NAMES,
    FP8_BLOCK,
    FP8_TENSOR,
    MXFP4,
    check_checkpoint,
    check_plain,
    check_weight_scale,
    format_of,
    pack_checkpoint,
    scaling_of,
)
from moe_numba.runtime.dlpack import as_tensor, call_with_tensors
from moe_numba.runtime.validate import check_choice, check_int, check_tensor


class _Sizes(NamedTuple):
    """Sizes along the intermediate dimension for a format of weights."""

    step: int  # a shard is a multiple of it
    block: int  # elements of w2's rows that share a scale
    multiple: int  # what the kernels need


_SIZES = {
    BF16: _Sizes(16, 1, 64),
    FP8_TENSOR: _Sizes(16, 1, 64),
    FP8_BLOCK: _Sizes(64, 128, 128),
    MXFP4: _Sizes(16, 32, 64),
}
_CODES_PER_BYTE = 2  # of MXFP4


class _Shard(NamedTuple):
    """Elements ``begin`` to ``begin + size - 1`` of a dimension, with zeros before and after them."""

    begin: int
    size: int
    front: int  # zeros before them
    padded: int  # all, with the zeros

    def in_units(self, unit):
        """Return the shard of a dimension in which ``unit`` elements of this one are one, such as their scale."""
        begin, end = self.begin // unit, -(-(self.begin + self.size) // unit)
        return _Shard(begin, end - begin, self.front // unit, self.padded // unit)

    def cut(self, tensor, dim):
        """Return the shard of a tensor, contiguous."""
        result = tensor.new_zeros(*tensor.shape[:dim], self.padded, *tensor.shape[dim + 1 :])
        result.narrow(dim, self.front, self.size).copy_(tensor.narrow(dim, self.begin, self.size))
        return result

    def cut_gate_up(self, tensor, gate_up):
        """Return the shard of a tensor whose dimension 1 is rows of gate and up, in the same order."""
        sizes, dim = ((2, -1), 2) if gate_up == "stacked" else ((-1, 2), 1)
        return self.cut(tensor.unflatten(1, sizes), dim).flatten(1, 2)


def shard_experts(
    w13: torch.Tensor,
    w2: torch.Tensor,
    rank: int,
    ranks: int,
    *,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    gate_up: str = "stacked",
) -> dict[str, torch.Tensor]:
    """Cut one rank's share out of a layer's weights for tensor parallelism, once when a model is loaded.

    Of ``intermediate`` columns of gate and up each rank computes ``intermediate / ranks``. All ranks call
    :func:`moe_numba.fused_experts` with the same tokens and routing; the sum of their outputs (all-reduce) is the
    layer's output. Pass ``shared`` on one rank only.

    Parameters
    ----------
    w13 : tensor [experts, 2 * intermediate, hidden], bfloat16 or float8_e4m3fn
        The whole layer's, of any strides. ``hidden`` is a multiple of 64. Or MXFP4 before packing: tensor [experts,
        2 * intermediate, hidden / 32, 16], uint8, as ``gate_up_proj_blocks`` of :func:`moe_numba.pack_mxfp4_experts`;
        ``intermediate`` is a multiple of 32.
    w2 : tensor [experts, hidden, intermediate], dtype of w13; in MXFP4 [experts, hidden, intermediate / 32, 16]
    rank : int
        0 to ``ranks - 1``.
    ranks : int
        Divides ``intermediate``. A shard, ``intermediate / ranks`` columns, must be a multiple of 64 with block scales,
        and of 16 otherwise. 1: only pad, also a shard that has been cut before.
    w13_scale : tensor [experts, 2 * ceil(intermediate / 128), hidden / 128] or [experts], float32, optional
    w2_scale : tensor [experts, hidden / 128, intermediate / 128] or [experts], float32, optional
        Required for FP8 weights: the scale of each 128 x 128 block, numbers of blocks rounded up, or of each expert's
        weight. Blocks of gate and of up begin at their first row, so that each has ceil(intermediate / 128) of them
        also if 128 does not divide ``intermediate``. That excludes a shard that was cut out in the middle of a block:
        pass the whole layer instead. In MXFP4: uint8, [experts, 2 * intermediate, hidden / 32] and
        [experts, hidden, intermediate / 32], required, too.
    w13_bias : tensor [experts, 2 * intermediate], bfloat16 or float32, optional
    w2_bias : tensor [experts, hidden], bfloat16 or float32, optional
        Not with FP8 weights.
    gate_up : {"stacked", "interleaved"}
        Order of the rows of w13, with their scales and biases: first all of gate, as "silu" of ``fused_experts`` needs
        them, or alternately of gate and up, as "swigluoai" (gpt-oss) does. It stays the same; MXFP4 is packed for both.
        Block scales: "stacked" only.

    Returns
    -------
    dict of str to tensor
        The arguments for :func:`moe_numba.fused_experts` by name: ``w13``, ``w2``, and of scales and biases those that
        are given. New, contiguous tensors. MXFP4 is packed, and so has no scales. Only rank 0 has ``w2_bias``, as
        the outputs of all ranks are added.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.

    Notes
    -----
    The kernels need an intermediate size that is a multiple of 64, or of 128 with block scales. A shard of another size
    is padded with zeros, which are exact: gate = up = 0 makes the activation 0, ``silu(0) * 0`` and
    ``(0 + 1) * 0 * sigmoid(0)``, and the columns of w2 that multiply it are zeros, too. A shard may begin or end in
    the middle of a scale's 128 x 128 block, or of 32 elements of w2 in MXFP4. It keeps the whole block then, with
    zeros in place of the other rank's part, so that no scale changes. All ranks have shards of the same padded size.

    Padding costs memory, and time where reading weights limits a call: shards of 96 columns in bfloat16 are padded to
    128, and those of 192 with block scales to 256, which is a third more; shards of 16 columns to 64, four times as
    much.

    Where activations are quantised (FP8 weights), a rank takes the scale of a row from its own columns. So sums
    of ranks differ from the output of one rank by roundings.

    Examples
    --------
    One rank of two keeps half of the 192 intermediate columns, padded to 128. The sum of the ranks' outputs, in a
    program an all-reduce, is the layer's output:

    >>> w13, w2 = torch.zeros(2, 2 * 192, 64).bfloat16(), torch.zeros(2, 64, 192).bfloat16()
    >>> shard = moe_numba.shard_experts(w13, w2, rank=0, ranks=2)
    >>> shard["w13"].shape, shard["w2"].shape
    (torch.Size([2, 256, 64]), torch.Size([2, 64, 128]))
    """
    given = dict(w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale, w13_bias=w13_bias, w2_bias=w2_bias)
    if not isinstance(w13, torch.Tensor):
        return call_with_tensors(shard_experts, "w13", given | dict(rank=rank, ranks=ranks, gate_up=gate_up))
    ranks, rank = check_int("ranks", ranks, 1), check_int("rank", rank, 0)
    if rank >= ranks:
        raise ValueError(f"rank is {rank}, but ranks is {ranks}; 0 to {ranks - 1} are allowed")
    check_choice("gate_up", gate_up, GATE_UP)
    whole = {name: as_tensor(value, name).detach() for name, value in given.items() if value is not None}
    format_, intermediate = _check_layer(whole, gate_up)
    shard = _range_of(rank, ranks, intermediate, format_)
    blocks = shard.in_units(_SIZES[format_].block)
    result = dict(w13=shard.cut_gate_up(whole["w13"], gate_up))
    if format_ == MXFP4:
        result["w13_scale"] = shard.cut_gate_up(whole["w13_scale"], gate_up)
        result["w2"] = shard.in_units(_CODES_PER_BYTE).cut(whole["w2"].flatten(2), 2)
        result["w2_scale"] = blocks.cut(whole["w2_scale"], 2)
        result = dict(zip(("w13", "w2"), pack_checkpoint(result, gate_up), strict=True))
    else:
        result["w2"] = shard.cut(whole["w2"], 2)
    if format_ == FP8_BLOCK:
        result["w13_scale"] = blocks.cut_gate_up(whole["w13_scale"], gate_up)
        result["w2_scale"] = blocks.cut(whole["w2_scale"], 2)
    elif format_ == FP8_TENSOR:
        result |= {name: whole[name].clone() for name in ("w13_scale", "w2_scale")}
    if "w13_bias" in whole:
        result["w13_bias"] = shard.cut_gate_up(whole["w13_bias"], gate_up)
    if "w2_bias" in whole and rank == 0:
        result["w2_bias"] = whole["w2_bias"].clone(memory_format=torch.contiguous_format)
    return result


def _check_layer(whole, gate_up):
    """Check the tensors of a whole layer by name; return the format of the weights and the intermediate size."""
    w13 = whole["w13"]
    check_tensor("w13", w13, dtype=DTYPES)
    format_ = format_of(w13, scaling_of(whole.get("w13_scale")))
    if format_ == MXFP4:
        for name in ("w13_scale", "w2_scale"):
            if name not in whole:
                raise TypeError(f"{name} is None; MXFP4 weights need a scale per 32 elements of a row")
        parts = {name: whole[name] for name in ("w13", "w13_scale", "w2", "w2_scale")}
        experts, hidden, intermediate = check_checkpoint(parts)
    else:
        check_plain(w13, whole["w2"], 1, any_strides=True)
        for name, halves in (("w13", 2), ("w2", 1)):
            scale = whole.get(f"{name}_scale")
            check_weight_scale(f"{name}_scale", scale, whole[name], format_, halves, contiguous=False)
        experts, hidden, intermediate = w13.shape[0], w13.shape[2], w13.shape[1] // 2
    if format_ == FP8_BLOCK and gate_up != "stacked":
        raise ValueError(f"gate_up is {gate_up!r}; with {FORMAT_NAMES[format_]} it must be 'stacked'")
    sizes = dict(w13_bias=(experts, 2 * intermediate), w2_bias=(experts, hidden))
    for name, shape in sizes.items():
        if name not in whole:
            continue
        if format_ in (FP8_BLOCK, FP8_TENSOR):
            raise ValueError(f"{name} is given; with FP8 weights it must be None")
        because = "w13 has {} experts", f"{name.removesuffix('_bias')} has {{}} rows per expert"
        check_tensor(name, whole[name], dtype=(torch.bfloat16, torch.float32), shape=shape, because=because)
    for name, tensor in whole.items():
        check_tensor(name, tensor, device=(w13.device, "w13"))
    return format_, intermediate


def _range_of(rank, ranks, intermediate, format_):
    """Return a rank's range of intermediate columns."""
    step, block, multiple = _SIZES[format_]
    of_w13 = f"w13 has {2 * intermediate} rows, gate and up"
    if intermediate % ranks:
        raise ValueError(f"ranks is {ranks}; it must divide intermediate, {intermediate} ({of_w13})")
    size = intermediate // ranks
    if size % step:
        raise ValueError(
            f"a shard has {size} of {intermediate} intermediate columns ({of_w13}; ranks is {ranks}); with "
            f"{FORMAT_NAMES[format_]} it must be a multiple of {step}"
        )
    begin = rank * size
    front = begin % block  # columns of this block that the rank before has
    return _Shard(begin, size, front, -(-(front + size) // multiple) * multiple)
