"""What all public functions do with arrays of other libraries, tensors without memory and outputs of callers."""

import numpy as np
import pytest
import torch

import moe_numba
from moe_numba import simulator

ON_THE_CPU = pytest.mark.skipif(not simulator.ENABLED, reason="NumPy's arrays are not on a GPU")


# --- arrays of other libraries --------------------------------------------------------------------------------------


def read_only(array):
    array.flags.writeable = False
    return array


@ON_THE_CPU
@pytest.mark.parametrize("first", [torch.from_numpy, lambda logits: logits], ids=["torch", "numpy"])
def test_a_read_only_output_is_refused(first):
    logits = read_only(np.ones((4, 8), np.float32))
    out = np.ones((4, 2), np.float32), read_only(np.full((4, 2), 7, np.int32))
    with pytest.raises(ValueError, match=r"^out\[1\] is read-only; it must be writable$"):
        moe_numba.biased_grouped_topk(first(logits.copy()), None, 2, out=out)
    assert (out[1] == 7).all()
    moe_numba.biased_grouped_topk(logits, None, 2)  # an input may be


@ON_THE_CPU
@pytest.mark.parametrize("dtype", [">f4", object, [("a", "f4")]])
def test_an_array_that_dlpack_cannot_describe_is_refused_by_name(dtype):
    logits = torch.zeros(4, 8)
    with pytest.raises(TypeError, match="^gating_output is ndarray of .*; it must be an array that DLPack can"):
        moe_numba.biased_grouped_topk(logits.numpy().astype(dtype), None, 2)
    with pytest.raises(TypeError, match="^correction_bias is ndarray of .*; it must be"):
        moe_numba.biased_grouped_topk(logits, np.zeros(8).astype(dtype), 2)


@ON_THE_CPU
def test_results_of_a_dtype_that_numpy_lacks_are_torch_tensors():
    x = torch.randn(2, 128)
    values, scales = moe_numba.per_token_cast_to_fp8(x.numpy())
    wanted = moe_numba.per_token_cast_to_fp8(x)
    assert torch.equal(values.float(), wanted[0].float()) and type(scales) is np.ndarray
    assert torch.equal(torch.from_numpy(scales), wanted[1])
    codes, bf16_scales = torch.zeros(1, 32, 16, dtype=torch.uint8), torch.ones(1, 32, 1).bfloat16()
    weight, w_scale = moe_numba.pack_int4(codes.numpy(), bf16_scales)
    assert type(weight) is np.ndarray and w_scale.dtype == torch.bfloat16
