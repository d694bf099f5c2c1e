"""``weighted_sum``: checks its arguments and launches the kernel."""

import torch

from moe_numba.moe_layer.weighted_sum.kernel import THREADS, VECTOR, make_weighted_sum_kernel
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_aligned, check_device, check_int, check_tensor, make_outputs

_SIGNATURE = "uint16*", "int32*", "float32*", "uint16*", "uint16*", "int32", "int64"
_MAX_TOPK, _MAX_ROWS, _MAX_VECTORS = 64, (1 << 31) - 1, 1 << 31
_OF_SUMS = "inverse_indices has {} rows", "rows has {} columns"  # reasons for the shape of the sums
_plans: dict = {}


@torch_op(in_place=("shared",))
def weighted_sum(
    rows: torch.Tensor,
    inverse_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the rows that experts computed for each token, with the token's weights, in one launch.

    Parameters
    ----------
    rows : tensor [rows, hidden], bfloat16
        Output of the experts' last grouped GEMM. Contiguous, 16-byte aligned; ``hidden`` is a multiple of 8.
    inverse_indices : tensor [tokens, topk], int32
        Row of each assignment, as :func:`moe_numba.group_by_expert` returns it. Contiguous; ``topk`` is 1 to 64. An
        index that is not in 0 to rows - 1, such as -1, adds nothing.
    topk_weights : tensor [tokens, topk], float32
        Any strides; what is not contiguous is copied first.
    shared : tensor [tokens, hidden], bfloat16, optional
        Added last with weight 1: the output of shared experts. Contiguous, 16-byte aligned.
    out : tensor [tokens, hidden], bfloat16, optional
        Contiguous, 16-byte aligned, to write into; it may be ``shared``, but must not overlap an input otherwise. The
        call then neither allocates nor synchronises.

    Returns
    -------
    tensor [tokens, hidden], bfloat16
        From the library that ``rows`` is from. Zero for a token without rows.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed. ValueError also if a
        tensor requires grad: there is no backward.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5.

    Notes
    -----
    Each product is added in float32 by a fused multiply-add, in order of the columns of ``inverse_indices``, and the
    sum is rounded once. So results are bit-identical from run to run, and do not depend on other tokens or on a token's
    position in the batch.

    Examples
    --------
    >>> rows = torch.tensor([1.0, 2, 3, 4]).repeat_interleave(8).view(4, 8).bfloat16()
    >>> inverse_indices = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
    >>> weights = torch.tensor([[0.5, 0.5], [1.0, -1.0]])
    >>> moe_numba.weighted_sum(rows, inverse_indices, weights)[:, 0].tolist()
    [2.0, 2.0]
    """
    indices, weights = as_tensor(inverse_indices, "inverse_indices"), as_tensor(topk_weights, "topk_weights")
    shared = None if shared is None else as_tensor(shared, "shared")
    tensors = rows, indices, weights, shared
    key = tuple(t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    start, ctas, sizes, outputs, copies = _plans.get(key) or remember(_plans, key, _make_plan(*tensors))
    check_aligned("rows", rows)
    if shared is not None:
        check_aligned("shared", shared)
    (result,) = outputs(out)
    if copies:
        weights = contiguous_weights(weights)
    if ctas:
        pointers = rows, indices, weights, rows if shared is None else shared, result
        start(ctas, THREADS, None, *map(address, pointers), *sizes)
    return result if out is None else out


def _make_plan(rows, indices, weights, shared):
    """Check the arguments; return launcher, CTAs, the kernel's numbers, `Outputs`, and whether weights are copied."""
    tokens, topk, hidden = _check(rows, indices, weights, shared)
    kernel = make_weighted_sum_kernel(hidden, topk, shared is not None)
    start = launcher(kernel, _SIGNATURE, rows.device.index or 0, dependent=True)
    num_vectors = tokens * (hidden // VECTOR)
    outputs = Outputs(_describe_output(tokens, hidden), rows.device, aligned=("tensor",))
    return start, -(-num_vectors // THREADS), (len(rows), num_vectors), outputs, not weights.is_contiguous()


def contiguous_weights(topk_weights):
    """Return a contiguous copy of routing weights."""
    refuse_recording(f"topk_weights has strides {topk_weights.stride()}; for a prepared call it must be contiguous")
    return topk_weights.contiguous()


def _describe_output(tokens, hidden):
    return (("tensor", (tokens, hidden), torch.bfloat16, _OF_SUMS),)


def check_topk(name, topk):
    """Raise for numbers of columns that the kernel does not support."""
    check_int(f"topk, the columns of {name},", topk, 1, _MAX_TOPK)


def _check(rows, indices, weights, shared):
    """Check the arguments; return the tokens, topk and hidden."""
    check_tensor("rows", rows, dtype=torch.bfloat16, shape=("rows", "hidden"), contiguous=True)
    check_device(rows.device, "rows")
    place = rows.device, "rows"
    shape = ("tokens", "topk")
    check_tensor("inverse_indices", indices, dtype=torch.int32, shape=shape, contiguous=True, device=place)
    (num_rows, hidden), (tokens, topk) = rows.shape, indices.shape
    check_topk("inverse_indices", topk)
    wanted = dict(shape=(tokens, topk), because=("inverse_indices has {} rows", "inverse_indices has {} columns"))
    check_tensor("topk_weights", weights, dtype=torch.float32, device=place, **wanted)
    if not hidden or hidden % VECTOR:
        raise ValueError(f"rows's hidden is {hidden}; it must be a multiple of {VECTOR}")
    if num_rows > _MAX_ROWS:
        raise ValueError(f"rows has {num_rows} rows; at most {_MAX_ROWS} are allowed")
    if tokens * (hidden // VECTOR) >= _MAX_VECTORS:
        most = (_MAX_VECTORS - 1) // (hidden // VECTOR)
        raise ValueError(f"inverse_indices has {tokens} tokens; at most {most} are allowed")
    if shared is not None:
        wanted = dict(shape=(tokens, hidden), because=_OF_SUMS)
        check_tensor("shared", shared, dtype=torch.bfloat16, contiguous=True, device=place, **wanted)
    return tokens, topk, hidden


@register_fake(weighted_sum)
def _fake_weighted_sum(call):
    """Check the arguments of a call and return its output."""
    tokens, _, hidden = _check(call.rows, call.inverse_indices, call.topk_weights, call.shared)
    return make_outputs(call.out, _describe_output(tokens, hidden), call.rows.device)[0]
