"""Weights of the experts of a layer: their formats, sizes and checks."""

from typing import NamedTuple

import torch

from moe_numba.grouped_gemm import pack_mxfp4
from moe_numba.grouped_gemm.call.checks import MAX_GROUPS, has_wgmma, is_mn_major
from moe_numba.grouped_gemm.w4.checks import check_packed
from moe_numba.grouped_gemm.w4.packing import GATE_UP_TILE, PLAIN_TILE
from moe_numba.grouped_gemm.w4.weight_tiles import TILE
from moe_numba.runtime.dlpack import as_tensor, call_with_tensors
from moe_numba.runtime.validate import UnsupportedDeviceError, check_choice, check_tensor

FP8 = torch.float8_e4m3fn
BF16, FP8_BLOCK, FP8_TENSOR, MXFP4 = FORMATS = "bf16", "fp8_block", "fp8_tensor", "mxfp4"
_NAMES = {
    BF16: "torch.bfloat16",
    FP8_BLOCK: f"{FP8} with a scale per 128 x 128 block",
    FP8_TENSOR: f"{FP8} with a scale per expert",
    MXFP4: "MXFP4",
}
_DTYPES = {torch.bfloat16: BF16, FP8: FP8_BLOCK, torch.uint8: MXFP4}
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
            f"{_NAMES[self.format]} on {self.device}"
        )


def format_of(w13: torch.Tensor, scaling: str = "block") -> str:
    """Return the format of weights, of which ``scaling``, "block" or "tensor", says how FP8 ones are scaled."""
    check_choice("scaling", scaling, tuple(SCALINGS))
    format_ = _DTYPES[w13.dtype]
    return SCALINGS[scaling] if format_ == FP8_BLOCK else format_


def scaling_of(w13_scale: torch.Tensor | None) -> str:
    """Return how FP8 weights with these scales are scaled."""
    return "tensor" if w13_scale is not None and w13_scale.dim() == 1 else "block"


def shape_of(w13: torch.Tensor, w2: torch.Tensor, format_: str) -> ExpertsShape:
    """Return the sizes of experts with these weights, which `check_weights` has checked."""
    if format_ == MXFP4:
        hidden, intermediate = TILE * w2.shape[1], TILE * w2.shape[2]
    else:
        hidden, intermediate = w13.shape[2], w2.shape[2]
    return ExpertsShape(len(w13), hidden, intermediate, format_, w13.device)


def packed_shape(name: str, experts: int, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of MXFP4 weights [experts, rows, columns], "w13" or "w2", as they are packed."""
    return experts, -(-rows // TILE), -(-columns // TILE), *(GATE_UP_TILE if name == "w13" else PLAIN_TILE)


def check_weights(w13: torch.Tensor, w2: torch.Tensor, scaling: str = "block") -> ExpertsShape:
    """Check dtypes, shapes and strides of the weights; return their sizes."""
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{name} is {type(weight).__name__}; it must be a tensor")
        if weight.dtype not in _DTYPES:
            raise TypeError(
                f"{name} is {weight.dtype}; it must be torch.bfloat16, {FP8} with scales, or torch.uint8 for MXFP4 "
                "that pack_mxfp4_experts has packed"
            )
    format_ = format_of(w13, scaling)
    if format_ == MXFP4:
        _check_packed(w13, w2)
    else:
        _check_plain(w13, w2, 128 if format_ == FP8_BLOCK else 64)
    return shape_of(w13, w2, format_)


def _check_plain(w13, w2, step):
    """Check weights that are not packed; ``step``: what the intermediate size is a multiple of."""
    _check_matrices("w13", w13, ("experts", "2 * intermediate", "hidden"))
    experts, twice, hidden = w13.shape
    _check_experts(experts)
    if not twice or twice % (2 * step):
        raise ValueError(f"w13 has {twice} rows, gate and up; with {w13.dtype} they must be a multiple of {2 * step}")
    if not hidden or hidden % 64:
        raise ValueError(f"w13's hidden is {hidden}; it must be a multiple of 64")
    check_tensor("w2", w2, dtype=w13.dtype)
    _check_matrices("w2", w2, (experts, hidden, twice // 2))
    check_tensor("w2", w2, device=(w13.device, "w13"))


def _check_matrices(name, weight, shape):
    """Check a weight that is contiguous, or in bfloat16 the transposed view ``.mT`` of one that is."""
    is_transposed = weight.dtype == torch.bfloat16 and weight.dim() == 3 and weight.mT.is_contiguous()
    check_tensor(name, weight, shape=shape, contiguous=not is_transposed)


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
    check_packed("w2", w2, (experts, hidden, twice // 2), gate_up=False, device=(w13.device, "w13"))


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
        ``hidden`` and ``intermediate`` are multiples of 64.
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
        On the device and in the library of ``gate_up_proj_blocks``: 4.25 bits per weight.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    """
    if not isinstance(gate_up_proj_blocks, torch.Tensor):
        arguments = dict(gate_up_proj_blocks=gate_up_proj_blocks, gate_up_proj_scales=gate_up_proj_scales)
        arguments |= dict(down_proj_blocks=down_proj_blocks, down_proj_scales=down_proj_scales, gate_up=gate_up)
        return call_with_tensors(pack_mxfp4_experts, "gate_up_proj_blocks", arguments)
    gate_up_proj_scales = as_tensor(gate_up_proj_scales, "gate_up_proj_scales")
    down_proj_blocks = as_tensor(down_proj_blocks, "down_proj_blocks")
    down_proj_scales = as_tensor(down_proj_scales, "down_proj_scales")
    check_choice("gate_up", gate_up, ("interleaved", "stacked"))
    for name, scales in (("gate_up_proj_scales", gate_up_proj_scales), ("down_proj_scales", down_proj_scales)):
        check_tensor(name, scales, dtype=torch.uint8, shape=("experts", "rows", "columns / 32"))
    experts, twice, hidden_blocks = gate_up_proj_scales.shape
    if not experts or not twice or twice % 128 or not hidden_blocks or hidden_blocks % 2:
        raise ValueError(
            f"gate_up_proj_scales has shape {tuple(gate_up_proj_scales.shape)}; it must be "
            "[experts, 2 * intermediate, hidden / 32], with hidden and intermediate multiples of 64"
        )
    shape = experts, 32 * hidden_blocks, twice // 64
    check_tensor("down_proj_scales", down_proj_scales, shape=shape)
    w13 = pack_mxfp4(gate_up_proj_blocks, gate_up_proj_scales, gate_up)
    return w13, pack_mxfp4(down_proj_blocks, down_proj_scales)
