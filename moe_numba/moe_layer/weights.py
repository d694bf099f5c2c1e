"""Weights of the experts of a layer: their formats, sizes and checks."""

from typing import NamedTuple

import torch

from moe_numba.grouped_gemm.call.checks import MAX_GROUPS, has_wgmma, is_mn_major
from moe_numba.grouped_gemm.w4.checks import check_packed
from moe_numba.grouped_gemm.w4.packing import GATE_UP_TILE, PLAIN_TILE, check_blocks, check_scales, pack_checked
from moe_numba.grouped_gemm.w4.weight_tiles import GATE_UP, TILE
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.dlpack import as_tensor, call_with_tensors
from moe_numba.runtime.validate import UnsupportedDeviceError, check_choice, check_tensor, reasons

FP8 = torch.float8_e4m3fn
BF16, FP8_BLOCK, FP8_TENSOR, MXFP4 = FORMATS = "bf16", "fp8_block", "fp8_tensor", "mxfp4"
FORMAT_NAMES = {
    BF16: "torch.bfloat16",
    FP8_BLOCK: f"{FP8} with a scale per 128 x 128 block",
    FP8_TENSOR: f"{FP8} with a scale per expert",
    MXFP4: "MXFP4",
}
_DTYPES = {torch.bfloat16: BF16, FP8: FP8_BLOCK, torch.uint8: MXFP4}
DTYPES = tuple(_DTYPES)
SCALINGS = {"block": FP8_BLOCK, "tensor": FP8_TENSOR}  # of FP8 weights


class ExpertsShape(NamedTuple):
    """Format and sizes of the experts of a layer."""

    num_experts: int
    hidden: int
    intermediate: int
    format: str  # one of `FORMATS`
    device: torch.device

    def __str__(self):
        return (
            f"{self.num_experts} experts of hidden {self.hidden} and intermediate {self.intermediate} in "
            f"{FORMAT_NAMES[self.format]} on {self.device}"
        )


def format_of(w13: torch.Tensor, scaling: str = "block") -> str:
    """Return the format of weights, of which ``scaling``, "block" or "tensor", says how FP8 ones are scaled."""
    check_choice("scaling", scaling, tuple(SCALINGS))
    format_ = _DTYPES[w13.dtype]
    return SCALINGS[scaling] if format_ == FP8_BLOCK else format_


def shape_of(w13: torch.Tensor, w2: torch.Tensor, format_: str) -> ExpertsShape:
    """Return the sizes of experts with these weights, which `check_weights` has checked."""
    if format_ == MXFP4:
        hidden, intermediate = TILE * w2.shape[1], TILE * w2.shape[2]
    else:
        hidden, intermediate = w13.shape[2], w2.shape[2]
    return ExpertsShape(len(w13), hidden, intermediate, format_, w13.device)


def scaling_of(w13_scale: torch.Tensor | None) -> str:
    """Return how FP8 weights with these scales are scaled."""
    return "tensor" if w13_scale is not None and w13_scale.dim() == 1 else "block"


def packed_shape(name: str, experts: int, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of MXFP4 weights [experts, rows, columns], "w13" or "w2", as they are packed."""
    return experts, -(-rows // TILE), -(-columns // TILE), *(GATE_UP_TILE if name == "w13" else PLAIN_TILE)


def check_scaled_weights(w13: torch.Tensor, w2: torch.Tensor, w13_scale: torch.Tensor | None) -> ExpertsShape:
    """Check the weights as `check_weights`, and the scales of w13, which say how FP8 weights are scaled."""
    _check_dtypes(w13, w2)
    scaling = scaling_of(w13_scale)
    if w13.dim() == 3:  # before the sizes of w13, of which multiples the scaling allows
        check_weight_scale("w13_scale", w13_scale, w13, format_of(w13, scaling))
    return check_weights(w13, w2, scaling)


def check_weight_scale(
    name: str, scale: torch.Tensor | None, weight: torch.Tensor, format_: str, halves: int = 1, contiguous: bool = True
) -> None:
    """Check the scales of a weight, ``w13_scale`` or ``w2_scale``.

    ``halves``: parts of the weight's rows whose blocks begin at their first row. 2: gate and up, each of them.
    """
    if format_ not in (FP8_BLOCK, FP8_TENSOR):
        if scale is not None:
            raise ValueError(f"{name} is given, but the weights are {weight.dtype}; scales are for FP8 weights")
        return
    experts, rows, columns = weight.shape
    blocks = experts, halves * -(-rows // (halves * FP8_SCALE_BLOCK)), -(-columns // FP8_SCALE_BLOCK)
    if scale is None:
        raise TypeError(f"{name} is None; FP8 weights need a scale per 128 x 128 block, {blocks}, or one per expert")
    shape: tuple[int, ...] = blocks
    what = "a scale per 128 x 128 block"
    if format_ == FP8_TENSOR:
        shape, what = blocks[:1], "a scale per expert"
    if tuple(scale.shape) != shape:
        of = name.removesuffix("_scale")
        if of == "w2":
            what += " like w13_scale"
        elif format_ == FP8_BLOCK:
            what += f", or {blocks[:1]}, a scale per expert"
        because = f"{of} has {{}} experts", f"{of} has {rows} rows per expert", f"{of} has {columns} columns"
        why = reasons(scale.shape, shape, because)
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; it must be {shape}, {what}{why}")
    check_tensor(name, scale, dtype=torch.float32, contiguous=contiguous)


def _check_dtypes(w13, w2):
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{name} is {type(weight).__name__}; it must be a tensor")
        if weight.dtype not in _DTYPES:
            raise TypeError(
                f"{name} is {weight.dtype}; it must be torch.bfloat16, {FP8} with scales, or torch.uint8 for MXFP4 "
                "that pack_mxfp4_experts has packed"
            )


def check_weights(w13: torch.Tensor, w2: torch.Tensor, scaling: str = "block") -> ExpertsShape:
    """Check dtypes, shapes and strides of the weights; return their sizes."""
    _check_dtypes(w13, w2)
    format_ = format_of(w13, scaling)
    if format_ == MXFP4:
        _check_packed(w13, w2)
    else:
        check_plain(w13, w2, 128 if format_ == FP8_BLOCK else 64)
    return shape_of(w13, w2, format_)


def check_plain(w13, w2, step, any_strides=False):
    """Check weights that are not packed; ``step``: what the intermediate size is a multiple of."""
    _check_matrices("w13", w13, ("experts", "2 * intermediate", "hidden"), any_strides=any_strides)
    experts, twice, hidden = w13.shape
    _check_experts(experts)
    if twice % 2:
        raise ValueError(f"w13 has {twice} rows; it must have 2 * intermediate, those of gate and of up")
    if not twice or twice % (2 * step):
        raise ValueError(
            f"intermediate is {twice // 2} (w13 has {twice} rows, gate and up); with {w13.dtype} it must be a multiple "
            f"of {step}"
        )
    if not hidden or hidden % 64:
        raise ValueError(f"w13's hidden is {hidden}; it must be a multiple of 64")
    check_tensor("w2", w2, dtype=w13.dtype)
    because = "w13 has {} experts", "w13 has {} columns", f"w13 has {twice} rows, gate and up"
    _check_matrices("w2", w2, (experts, hidden, twice // 2), because, any_strides)
    check_tensor("w2", w2, device=(w13.device, "w13"))


def _check_matrices(name, weight, shape, because=(), any_strides=False):
    """Check a weight that is contiguous, or in bfloat16 the transposed view ``.mT`` of one that is."""
    is_transposed = weight.dtype == torch.bfloat16 and weight.dim() == 3 and weight.mT.is_contiguous()
    check_tensor(name, weight, shape=shape, because=because, contiguous=not (is_transposed or any_strides))


def _check_packed(w13, w2):
    """Check packed MXFP4 weights."""
    names = "experts", "2 * intermediate / 64", "hidden / 64"
    packed = "what pack_mxfp4_experts returns"
    if w13.shape[3:] not in (GATE_UP_TILE, PLAIN_TILE):
        shape = _text((*names, *GATE_UP_TILE))
        raise ValueError(f"w13 has shape {tuple(w13.shape)}; in torch.uint8 it must be {packed}, {shape}")
    check_packed("w13", w13, names, gate_up=True)
    experts, twice, hidden = w13.shape[:3]
    _check_experts(experts)
    if not twice or twice % 2 or not hidden:
        raise ValueError(
            f"w13 has shape {tuple(w13.shape)}; hidden and intermediate must be multiples of 64, that is "
            "2 * intermediate / 64 must be even"
        )
    because = "w13 has {} experts", "w13 has {} tiles of columns", f"w13 has {twice} tiles of rows"
    wanted = dict(gate_up=False, because=because, device=(w13.device, "w13"))
    check_packed("w2", w2, (experts, hidden, twice // 2), **wanted)


def _text(shape):
    return f"[{', '.join(map(str, shape))}]"


def _check_experts(experts):
    if not 1 <= experts <= MAX_GROUPS:
        raise ValueError(f"w13 has {experts} experts; 1 to {MAX_GROUPS} are allowed")


def check_wgmma(w13, w2):
    """Raise for weights whose grouped GEMMs need wgmma on a GPU that has none."""
    if has_wgmma(w13.device):
        return
    needs = "compute capability 9.0 (H100, H200: wgmma)"
    if w13.dtype == torch.uint8:
        raise UnsupportedDeviceError(f"MXFP4 weights need {needs}: on this GPU, dequantise them to torch.bfloat16")
    for name, weight in (("w13", w13), ("w2", w2)):
        if is_mn_major(weight):
            raise UnsupportedDeviceError(
                f"{name} has strides {weight.stride()}; transposed weights need {needs}: on this GPU, use "
                f"{name}.contiguous()"
            )


def pack_mxfp4_experts(
    gate_up_proj_blocks: torch.Tensor,
    gate_up_proj_scales: torch.Tensor,
    down_proj_blocks: torch.Tensor,
    down_proj_scales: torch.Tensor,
    gate_up: str = "interleaved",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a layer's MXFP4 weights for ``fused_experts``, once when a model is loaded.

    Parameters
    ----------
    gate_up_proj_blocks : tensor [experts, 2 * intermediate, hidden / 32, 16], uint8
    gate_up_proj_scales : tensor [experts, 2 * intermediate, hidden / 32], uint8
    down_proj_blocks : tensor [experts, hidden, intermediate / 32, 16], uint8
    down_proj_scales : tensor [experts, hidden, intermediate / 32], uint8
        The tensors of these names of a checkpoint of gpt-oss; see :func:`moe_numba.pack_mxfp4` for the encoding.
        ``hidden`` is a multiple of 64, ``intermediate`` of 32.
    gate_up : {"interleaved", "stacked"}
        Order of the rows of ``gate_up_proj_*``. "interleaved": alternately of gate and up, as in checkpoints of
        gpt-oss. "stacked": first all of gate, then all of up, as where ``gate_proj`` and ``up_proj`` (w1 and w3 of
        Mixtral) have been concatenated: ``gate_up_proj`` of other models in transformers, and w13 in vLLM and SGLang.
        Neither these tensors nor packed weights tell which order rows have: with the wrong name the results are wrong,
        without an error.

    Returns
    -------
    w13 : tensor [experts, 2 * intermediate / 64, hidden / 64, 136, 16], uint8
    w2 : tensor [experts, hidden / 64, intermediate / 64, 2176], uint8
        On the device and in the library of ``gate_up_proj_blocks``: 4.25 bits per weight. An odd multiple of 32 as
        ``intermediate`` is padded with zeros to a multiple of 64, which ``w13_bias`` must then have, too:
        :func:`moe_numba.shard_experts` pads both, and cuts shards for tensor parallelism.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.

    Examples
    --------
    >>> codes = lambda *shape: torch.zeros(shape, dtype=torch.uint8)
    >>> w13, w2 = moe_numba.pack_mxfp4_experts(
    ...     codes(1, 2 * 64, 2, 16), codes(1, 2 * 64, 2), codes(1, 64, 2, 16), codes(1, 64, 2)
    ... )
    >>> w13.shape, w2.shape
    (torch.Size([1, 2, 1, 136, 16]), torch.Size([1, 1, 1, 2176]))
    """
    if not isinstance(gate_up_proj_blocks, torch.Tensor):
        arguments = dict(gate_up_proj_blocks=gate_up_proj_blocks, gate_up_proj_scales=gate_up_proj_scales)
        arguments |= dict(down_proj_blocks=down_proj_blocks, down_proj_scales=down_proj_scales, gate_up=gate_up)
        return call_with_tensors(pack_mxfp4_experts, "gate_up_proj_blocks", arguments)
    check_choice("gate_up", gate_up, GATE_UP)
    names = "gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"
    given = gate_up_proj_blocks, gate_up_proj_scales, down_proj_blocks, down_proj_scales
    tensors = dict(zip(names, map(as_tensor, given, names), strict=True))
    check_checkpoint(tensors)
    return pack_checkpoint(tensors, gate_up)


def check_checkpoint(tensors: dict[str, torch.Tensor]) -> tuple[int, int, int]:
    """Check MXFP4 weights before packing: blocks and scales of gate and up, then those of down, by their names.

    Returns
    -------
    experts, hidden, intermediate : int
    """
    names, (blocks, scales, down_blocks, down_scales) = tuple(tensors), tensors.values()
    experts, twice, hidden_blocks = sizes = check_blocks(names[0], blocks)
    if twice % 64 or hidden_blocks % 2:
        raise ValueError(
            f"{names[0]} has shape {tuple(blocks.shape)}; it must be [experts, 2 * intermediate, hidden / 32, 16], "
            "with hidden a multiple of 64 and intermediate of 32"
        )
    check_scales(names[1], scales, names[0], blocks, sizes)
    down_sizes = experts, 32 * hidden_blocks, twice // 64
    shape = (*down_sizes[:2], twice // 4) if down_blocks.dim() == 3 else (*down_sizes, 16)
    because = tuple(f"{names[0]} has {n}" for n in ("{} experts", "{} columns", f"{twice} rows per expert"))
    check_tensor(names[2], down_blocks, dtype=torch.uint8, shape=shape, because=because)
    check_scales(names[3], down_scales, names[2], down_blocks, down_sizes)
    return experts, 32 * hidden_blocks, twice // 2


def pack_checkpoint(tensors: dict[str, torch.Tensor], gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack what `check_checkpoint` has checked."""
    names, (blocks, scales, down_blocks, down_scales) = tuple(tensors), tensors.values()
    w13 = pack_checked(blocks, scales, gate_up, names[:2])
    if w13.shape[1] % 2:  # rows are in the packed order here, so that a tile is 32 rows of gate and 32 of up
        w13 = torch.nn.functional.pad(w13, (0, 0, 0, 0, 0, 0, 0, 1))
    return w13, pack_checked(down_blocks, down_scales, None, names[2:])
