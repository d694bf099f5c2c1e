"""What all public functions do with arrays of other libraries, tensors without memory and outputs of callers."""

import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

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


# --- tensors without memory -----------------------------------------------------------------------------------------


def fake(tensor):
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def wrapper(tensor):
    return TwoTensor(tensor, tensor)


@pytest.mark.parametrize("lose_memory", [fake, wrapper])
@pytest.mark.parametrize("called_before", [False, True])
def test_tensors_without_memory_are_refused_by_name(lose_memory, called_before, device):
    """Also if tensors of the same shape have a launch plan."""
    rows = torch.randn(6, 64 + called_before * 32, device=device).bfloat16()
    k = rows.shape[1]
    weight, sizes = rows.new_zeros(2, 64, k), torch.tensor([2, 4], dtype=torch.int32, device=device)
    indices, offs = torch.arange(6, dtype=torch.int32, device=device).view(3, 2), sizes.cumsum(0, dtype=torch.int32)
    calls = [
        (moe_numba.group_gemm_bf16, dict(x=rows, weight=weight, seqlens=None, cu_seqlens=None, offs=offs)),
        (moe_numba.k_grouped_gemm_bf16, dict(a=rows, b=rows, seqlens=None, cu_seqlens=None, offs=offs)),
        (
            moe_numba.per_token_quant_fp8,
            dict(x=rows[:3].clone(), scale=torch.ones(1, device=device), inverse_indices=indices),
        ),
        (moe_numba.permute_tokens, dict(x=rows[:3].clone(), inverse_indices=indices)),
    ]
    for function, arguments in calls:
        result = function(**arguments) if called_before else None
        first, *others = [name for name, value in arguments.items() if value is not None]
        changes = {name: lose_memory(arguments[name]) for name in others}
        if called_before and isinstance(result, torch.Tensor):
            changes["out"] = lose_memory(result)
        for name, tensor in changes.items():
            with pytest.raises(TypeError, match=f"^{name} is a .*Tensor without memory; it must be a tensor with data"):
                function(**arguments | {name: tensor})


def test_subclasses_with_memory_are_taken(device):
    class Subclass(torch.Tensor):
        pass

    x, scale = torch.randn(3, 64, device=device).bfloat16(), torch.ones(1, device=device)
    values, _ = moe_numba.per_token_quant_fp8(x, scale.as_subclass(Subclass))
    assert torch.equal(values.float(), moe_numba.per_token_quant_fp8(x, scale)[0].float())
    weight, offs = x.new_ones(1, 64, 64), torch.tensor([3], dtype=torch.int32, device=device)
    y = moe_numba.group_gemm_bf16(x, weight.as_subclass(Subclass), None, None, offs=offs)
    assert torch.equal(y, moe_numba.group_gemm_bf16(x, weight, None, None, offs=offs))


def calls_with_outputs(device):
    """Return a call of each kind of function that takes ``out``, without it."""
    logits, rows = torch.randn(4, 8, device=device), torch.randn(6, 64, device=device).bfloat16()
    ids = torch.tensor([[0, 1], [1, 0], [2, 1]], dtype=torch.int32, device=device)
    weights, offs = torch.rand(3, 2, device=device), torch.tensor([2, 6], dtype=torch.int32, device=device)
    indices, tokens = torch.arange(6, dtype=torch.int32, device=device).view(3, 2), rows[:3].clone()
    experts = dict(w13=rows.new_ones(3, 128, 64), w2=rows.new_ones(3, 64, 64), topk_weights=weights, topk_ids=ids)
    return {
        "biased_grouped_topk": dict(gating_output=logits, correction_bias=logits[0].clone(), topk=2),
        "biased_grouped_topk_align": dict(gating_output=logits, correction_bias=None, topk=2, block_size=16),
        "moe_align_block_size": dict(topk_ids=ids, block_size=16, num_experts=8),
        "get_dispatch_layout": dict(topk_idx=ids.long(), num_experts=8, num_ranks=2),
        "fuse_routing": dict(topk_weights=weights, topk_ids=ids, num_experts=8, num_fused_shared_experts=1),
        "group_by_expert": dict(topk_ids=ids, num_experts=3),
        "permute_tokens": dict(x=tokens, inverse_indices=indices),
        "weighted_sum": dict(rows=rows, inverse_indices=indices, topk_weights=weights, shared=tokens),
        "silu_and_mul": dict(x=rows),
        "per_token_cast_to_fp8": dict(x=rows.repeat(1, 2)),
        "per_token_quant_fp8": dict(x=rows),
        "group_gemm_bf16": dict(x=rows, weight=rows.new_ones(2, 64, 64), seqlens=None, cu_seqlens=None, offs=offs),
        "fused_experts": dict(x=tokens, **experts),
    }


WITH_OUTPUTS = list(calls_with_outputs("cpu"))


def in_one_memory(*tensors):
    """Return copies of tensors that all begin at the same address."""
    memory = torch.zeros(max(t.nbytes for t in tensors), dtype=torch.uint8, device=tensors[0].device)
    return [memory[: t.nbytes].view(t.dtype).view(t.shape).copy_(t) for t in tensors]


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_an_output_in_the_memory_of_an_input_or_output_is_refused(name, device):
    function, arguments = getattr(moe_numba, name), calls_with_outputs(device)[name]
    result = function(**arguments)
    is_tuple = isinstance(result, tuple)
    outs = list(result) if is_tuple else [result]
    call = lambda outs, **more: function(**arguments | more, out=tuple(outs) if is_tuple else outs[0])
    call(outs)
    for i, out in enumerate(outs):
        for argument, value in arguments.items():
            if isinstance(value, torch.Tensor) and (name, argument) not in IN_PLACE:
                shared, value = in_one_memory(out, value)
                message = f"^out{f'[{i}]' if is_tuple else ''} overlaps {argument} in memory"
                with pytest.raises(ValueError, match=re.escape(message).replace(r"\^", "^")):
                    call([*outs[:i], shared, *outs[i + 1 :]], **{argument: value})
        for j in range(i):
            if out.numel() and outs[j].numel():
                shared, other = in_one_memory(out, outs[j])
                with pytest.raises(ValueError, match=r"^out\[\d\] overlaps out\[\d\] in memory"):
                    call([*outs[:j], other, *outs[j + 1 : i], shared, *outs[i + 1 :]])


IN_PLACE = {("fused_experts", "x"), ("weighted_sum", "shared")}  # of the same shape and dtype, as these are


def test_only_the_whole_input_may_be_the_output(device):
    arguments = calls_with_outputs(device)["fused_experts"]
    x, expected = arguments.pop("x"), moe_numba.fused_experts(**calls_with_outputs(device)["fused_experts"])
    memory = torch.zeros(4, 64, dtype=x.dtype, device=device)
    memory[:3] = x
    with pytest.raises(ValueError, match="^out overlaps x in memory; it may only be x or shared as a whole"):
        moe_numba.fused_experts(memory[:3], **arguments, out=memory[1:])
    assert torch.equal(memory[:3], x)
    moe_numba.fused_experts(x := memory[:3], **arguments, out=x)
    assert x.shape == expected.shape


@pytest.mark.parametrize("called_before", [False, True])
def test_a_negated_view_is_refused(called_before, device):
    """Also if tensors of the same shape have a launch plan, and if no gradient is recorded."""
    x, scale = torch.zeros(3, 64, device=device).bfloat16(), torch.ones(1, dtype=torch.complex64, device=device)
    weight, offs = x.new_ones(1, 64, 64), torch.tensor([3], dtype=torch.int32, device=device)
    logits, out = torch._neg_view(x[:, :8].clone()), torch._neg_view(x[:, :32].clone())
    groups = dict(seqlens=None, cu_seqlens=None, offs=offs)
    calls = [
        (moe_numba.per_token_quant_fp8, dict(x=x, scale=scale.conj().imag)),
        (moe_numba.biased_grouped_topk, dict(gating_output=logits, correction_bias=None, topk=2)),
        (moe_numba.group_gemm_bf16, dict(x=x, weight=torch._neg_view(weight), **groups)),
        (moe_numba.silu_and_mul, dict(x=x, out=out)),
    ]
    for function, arguments in calls:
        (negated,) = (name for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.is_neg())
        if called_before:
            function(**arguments | {negated: arguments[negated].resolve_neg()})
        message = rf"^{negated} is a negated view, .*; use {negated}.resolve_neg\(\)"
        for mode in (torch.no_grad, torch.enable_grad):
            with mode(), pytest.raises(ValueError, match=message):
                function(**arguments)


def zeros_without_memory(tensor):
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def freed(tensor):
    """Return a tensor as FSDP leaves parameters that it does not need."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def masked(tensor):
    return torch.masked.masked_tensor(tensor, tensor > 0)


LAYOUTS = {
    "sparse_coo tensor": torch.Tensor.to_sparse,
    "sparse_csr tensor": torch.Tensor.to_sparse_csr,
    "nested tensor": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "masked tensor": masked,
    "tensor of zeros without memory": zeros_without_memory,
    "freed memory": freed,
} | ({"mkldnn tensor": torch.Tensor.to_mkldnn} if simulator.ENABLED else {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("called_before", [False, True])
def test_tensors_without_strided_memory_are_refused_by_name(kind, called_before, device):
    logits = torch.randn(4, 8, device=device)
    calls = (
        dict(gating_output=logits, correction_bias=None),
        dict(gating_output=logits, correction_bias=logits[0].clone()),
    )
    if called_before:
        for tensors in calls:
            moe_numba.biased_grouped_topk(**tensors, topk=2)
    for tensors, name in zip(calls, ("gating_output", "correction_bias"), strict=True):
        wrong = LAYOUTS[kind](logits)
        with pytest.raises((TypeError, ValueError), match=f"^{name} (is a .*(tensor|without memory)|has no memory)"):
            moe_numba.biased_grouped_topk(**tensors | {name: wrong}, topk=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("called_before", [False, True])
def test_outputs_without_strided_memory_are_refused_by_name(kind, called_before, device):
    logits, out = torch.randn(4, 8, device=device), torch.zeros(4, 2, device=device)
    if called_before:
        moe_numba.biased_grouped_topk(logits, None, 2, out=(out, out.int()))
    with pytest.raises((TypeError, ValueError), match=r"^out\[0\] (is a .*(tensor|without memory)|has no memory)"):
        moe_numba.biased_grouped_topk(logits, None, 2, out=(LAYOUTS[kind](out), out.int()))


def test_a_negated_view_of_an_output_that_was_checked_is_refused(device):
    x, out = torch.zeros(3, 64, device=device).bfloat16(), torch.zeros(3, 32, device=device).bfloat16()
    moe_numba.silu_and_mul(x, out=out)
    with pytest.raises(ValueError, match="^out is a negated view"):
        moe_numba.silu_and_mul(x, out=torch._neg_view(out))


# --- options --------------------------------------------------------------------------------------------------------


def calls_with_options(device):
    """Return calls, and options that each accepts."""
    rows = torch.randn(6, 64, device=device).bfloat16()
    weight, fp8 = rows.new_zeros(2, 64, 64), torch.float8_e4m3fn
    offs, out = torch.tensor([2, 6], dtype=torch.int32, device=device), torch.zeros(6, 64, device=device)
    scale, indices = torch.ones(2, device=device), torch.arange(6, dtype=torch.int32, device=device).view(6, 1)
    packed = torch.full((2, 1, 1, 2176), 130, dtype=torch.uint8, device=device)
    gemm = dict(seqlens=None, cu_seqlens=None, offs=offs)
    activation = dict(activation="swigluoai", alpha=1.0, limit=1.0)
    in_fp8 = dict(x=rows.to(fp8), weight=weight.to(fp8), y_scale=scale)
    sums = dict(a=rows, b=rows, out=torch.zeros(2, 64, 64, device=device))
    accumulate = dict(accumulate=True, out_dtype=torch.float32)
    ids, weights = torch.zeros(6, 2, dtype=torch.int32, device=device), torch.ones(6, 2, device=device)
    experts = dict(x=rows, w13=rows.new_zeros(2, 128, 64), w2=weight)
    gate = dict(topk=2, num_expert_group=1, topk_group=1, num_fused_shared_experts=0, routed_scaling_factor=2.0)
    gate |= dict(renormalize=True, scoring="softmax")
    logits = dict(gating_output=torch.randn(6, 4, device=device), correction_bias=None)
    align = dict(block_size=4, pad_sorted_ids=True, ignore_invalid_experts=True)
    return {
        moe_numba.group_gemm_bf16: (dict(x=rows, weight=weight, out=out) | gemm, accumulate),
        moe_numba.group_gemm_mxfp4: (dict(x=rows, weight=packed, out=out) | gemm, accumulate),
        moe_numba.group_gemm_silu_and_mul_bf16: (dict(x=rows, weight=weight) | gemm, activation),
        moe_numba.group_gemm_silu_and_mul_mxfp4: (
            dict(x=rows, weight=packed.unflatten(3, (136, 16))) | gemm,
            activation,
        ),
        moe_numba.group_gemm_pertensor_fp8: (in_fp8 | gemm, dict(use_fast_accum=True)),
        moe_numba.k_grouped_gemm_bf16: (sums | gemm, accumulate),
        moe_numba.per_token_quant_fp8: (dict(x=rows, inverse_indices=indices), dict(permute=True)),
        moe_numba.silu_and_mul_quant_fp8: (dict(x=rows), activation),
        moe_numba.silu_and_mul: (dict(x=rows), activation),
        moe_numba.fused_experts: (experts | dict(topk_weights=weights, topk_ids=ids), activation),
        moe_numba.fused_moe: (experts | dict(router_logits=weights, correction_bias=None), gate | activation),
        moe_numba.biased_grouped_topk: (logits, gate | dict(apply_routed_scaling_factor_on_output=True)),
        moe_numba.biased_grouped_topk_align: (logits, gate | align),
        moe_numba.moe_align_block_size: (dict(topk_ids=ids), align | dict(num_experts=4)),
        moe_numba.group_by_expert: (dict(topk_ids=ids), dict(num_experts=4)),
        moe_numba.fuse_routing: (
            dict(topk_weights=weights, topk_ids=ids),
            dict(num_experts=4, num_fused_shared_experts=1, routed_scaling_factor=2.0, policy="all", seed=1),
        ),
        moe_numba.get_dispatch_layout: (dict(topk_idx=ids), dict(num_experts=4, num_ranks=2)),
    }


FUNCTIONS = [function.__name__ for function in calls_with_options("cpu")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_of_another_type_are_refused_by_name(name, device):
    """Also if they equal those of a call that has a launch plan, and if they cannot be hashed."""
    function = getattr(moe_numba, name)
    arguments, options = calls_with_options(device)[function]
    function(**arguments | options)
    for option, value in options.items():
        equal = {bool: 1.0, float: True}.get(type(value), "x")
        for wrong in (equal, [value], "False"):
            message = f"^{option} is {re.escape(repr(wrong))}; it must be"
            with pytest.raises((TypeError, ValueError), match=message):
                function(**arguments | options | {option: wrong})


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("vanishing", [0.0, 1e-46, 1e-39, 1e39, float("nan")])
def test_numbers_that_float32_cannot_hold_are_refused(name, vanishing, device):
    """Zero, subnormal or infinite numbers: kernels would compute with another value."""
    function = getattr(moe_numba, name)
    arguments, options = calls_with_options(device)[function]
    for option in (option for option, value in options.items() if isinstance(value, float)):
        with pytest.raises(ValueError, match=f"^{option} is {re.escape(str(vanishing))}; it must be .* in float32"):
            function(**arguments | options | {option: vanishing})


# --- sizes that another argument determines -------------------------------------------------------------------------


def calls_with_sizes(device):
    """Return calls, and for arguments and their dimensions the other argument that an error must name."""
    rows, out = torch.randn(6, 128, device=device).bfloat16(), torch.zeros(6, 128, device=device).bfloat16()
    weight, fp8 = rows.new_zeros(2, 128, 128), torch.float8_e4m3fn
    w13, ones = rows.new_zeros(2, 256, 128), lambda *size: torch.ones(size, device=device)
    sizes = dict(seqlens=ones(2).int(), cu_seqlens=ones(3).int())
    ids, indices = ones(6, 2).int(), torch.arange(12, dtype=torch.int32, device=device).view(6, 2)
    routed = dict(topk_weights=ones(6, 2), topk_ids=ids)
    of_weight, of_ids = ("weight has 2 groups", "weight's n is 128"), ("topk_ids has 6 rows", "topk_ids has 2 columns")
    of_x, of_w13 = ("x has 6 rows", "x has 128 columns"), ("w13 has 2 experts", "w13 has 256 rows")
    codes, scales = torch.zeros(2, 128, 4, 16, dtype=torch.uint8, device=device), ones(2, 128, 4).byte()
    down = dict(down_proj_blocks=codes[..., :2, :].contiguous(), down_proj_scales=scales[..., :2].contiguous())
    experts = dict(x=rows, w13=w13, w2=weight, **routed, shared=rows, w13_bias=ones(2, 256), w2_bias=ones(2, 128))
    in_fp8 = dict(x=rows.to(fp8), weight=weight.to(fp8), **sizes)
    return {
        "biased_grouped_topk": (
            dict(gating_output=ones(6, 8), correction_bias=ones(8), topk=2, out=(ones(6, 2), ids)),
            dict(correction_bias=("gating_output has 8 columns",), out=("gating_output has 6 rows", "topk is 2")),
        ),
        "moe_align_block_size": (
            dict(topk_ids=ids, block_size=4, num_experts=8, expert_map=torch.arange(8, device=device)),
            dict(expert_map=("num_experts is 8",)),
        ),
        "fuse_routing": (routed | dict(num_experts=8), dict(topk_weights=of_ids)),
        "permute_tokens": (
            dict(x=rows, inverse_indices=indices, out=rows.repeat(2, 1)),
            dict(inverse_indices=of_x[:1], out=("inverse_indices has 12 elements", of_x[1])),
        ),
        "per_token_cast_back": (
            dict(x_fp8=rows.to(fp8), x_scales=ones(6, 1), out=out),
            dict(x_scales=("x_fp8 has 6 rows", "x_fp8 has 128 columns"), out=("x_fp8 has 6 rows",)),
        ),
        "weighted_sum": (
            dict(rows=rows.repeat(2, 1), inverse_indices=indices, topk_weights=ones(6, 2), shared=rows, out=out),
            dict(
                topk_weights=("inverse_indices has 6 rows", "inverse_indices has 2 columns"),
                shared=("inverse_indices has 6 rows", "rows has 128 columns"),
                out=("inverse_indices has 6 rows", "rows has 128 columns"),
            ),
        ),
        "group_gemm_bf16": (
            dict(x=rows, weight=weight, **sizes, bias=ones(2, 128), row_weights=ones(6), out=out),
            dict(seqlens=of_weight[:1], cu_seqlens=of_weight[:1], bias=of_weight, row_weights=of_x[:1])
            | dict(x=("", "must have weight's k"), out=(of_x[0], of_weight[1])),
        ),
        "group_gemm_silu_and_mul_bf16": (
            dict(x=rows, weight=w13, **sizes, x_low=rows[:, :16], weight_low=w13[..., :16], out=out),
            dict(x_low=(of_x[0], "weight_low has 16 columns")) | dict(weight_low=(of_weight[0], "weight's n is 256")),
        ),
        "group_gemm_blockwise_fp8": (
            in_fp8 | dict(x_scale=ones(6, 1), w_scale=ones(2, 1, 1)),
            dict(x_scale=of_x, w_scale=(*of_weight, "weight's k is 128")),
        ),
        "k_grouped_gemm_bf16": (
            dict(a=rows, b=rows, **sizes),
            dict(b=("a has 6 rows",), cu_seqlens=("seqlens has 2",)),
        ),
        "pack_mxfp4": (
            dict(blocks=codes, scales=scales),
            dict(scales=("blocks has 2 groups", "blocks has 128 rows", "blocks has 128 columns")),
        ),
        "pack_mxfp4_experts": (
            dict(gate_up_proj_blocks=codes, gate_up_proj_scales=scales) | down,
            dict(
                gate_up_proj_scales=tuple(f"gate_up_proj_blocks has {n}" for n in ("2", "128 rows", "128 columns")),
                down_proj_blocks=tuple(f"gate_up_proj_blocks has {n}" for n in ("2", "128 columns", "128 rows")),
                down_proj_scales=tuple(f"down_proj_blocks has {n}" for n in ("2", "128 rows", "64 columns")),
            ),
        ),
        "fused_experts": (
            experts,
            dict(topk_ids=of_x[:1], topk_weights=of_ids, shared=of_x, w2=(of_w13[0], "w13 has 128 columns", of_w13[1]))
            | dict(w13_bias=of_w13, w2_bias=(of_w13[0], "w2 has 128 rows")),
        ),
        "fused_moe": (
            dict(x=rows, router_logits=ones(6, 2), correction_bias=ones(2), w13=w13, w2=weight, topk=2),
            dict(router_logits=(of_x[0], of_w13[0]), correction_bias=("router_logits has 2 columns",)),
        ),
    }


@pytest.mark.parametrize("name", calls_with_sizes("cpu"))
def test_a_size_that_another_argument_determines_is_refused_with_both_names(name, device):
    arguments, reasons = calls_with_sizes(device)[name]
    for argument, dimensions in reasons.items():
        for dim, reason in enumerate(dimensions):
            given = arguments[argument]
            tensor = given[0] if isinstance(given, tuple) else given
            wrong = tensor.repeat(*(1 + (i == dim) for i in range(tensor.dim())))
            wrong = (wrong, *given[1:]) if isinstance(given, tuple) else wrong
            if reason:
                with pytest.raises(ValueError, match=f"^{argument}.*{re.escape(reason)}"):
                    getattr(moe_numba, name)(**arguments | {argument: wrong})


# --- messages that name the cause -----------------------------------------------------------------------------------

ROWS, FP8 = torch.zeros(6, 128).bfloat16(), torch.zeros(2, 128, 128).to(torch.float8_e4m3fn)
GEMM, IDS = dict(x=ROWS, weight=ROWS.new_zeros(2, 128, 128)), torch.zeros(6, 2, dtype=torch.int32)
LAYER = dict(x=ROWS, w2=FP8[..., :64].contiguous(), topk_weights=torch.ones(6, 2), topk_ids=IDS)
CODES, BYTES = torch.zeros(2, 128, 2, 16).byte(), torch.zeros(2, 128, 2).byte()
CHECKPOINT = dict(gate_up_proj_blocks=CODES, gate_up_proj_scales=BYTES)
CHECKPOINT |= dict(down_proj_blocks=CODES[:, :64], down_proj_scales=BYTES[:, :64])


@ON_THE_CPU
@pytest.mark.parametrize(
    "name, arguments, message",
    [
        *(
            ("pack_mxfp4_experts", CHECKPOINT | {name: tensor.int()}, f"{name} is torch.int32; it must be torch.uint8")
            for name, tensor in CHECKPOINT.items()
        ),
        (
            "biased_grouped_topk",
            dict(gating_output=ROWS[:, :8], correction_bias=None, topk=9),
            "topk is 9; there are 8 exp",
        ),
        (
            "biased_grouped_topk",
            dict(gating_output=ROWS[:, :8], correction_bias=None, topk=10, num_fused_shared_experts=1),
            "topk is 10, 1 of them shared; there are 8 experts",
        ),
        (
            "fused_experts",
            LAYER | dict(w13=FP8, w13_scale=torch.ones(2, 2), w2_scale=torch.ones(2, 1, 1)),
            r"w13_scale has shape \(2, 2\); it must be \(2, 1, 1\), .* or \(2,\), .*, as w13 has 2 experts",
        ),
        ("fused_experts", LAYER | dict(w13=FP8), "w13_scale is None; FP8 weights need"),
        (
            "fused_experts",
            LAYER | dict(w13=FP8, w13_scale=torch.ones(2, 1, 1), w2_scale=torch.ones(2, 1, 1)),
            r"intermediate is 64 \(w13 has 128 rows, gate and up\); with .* it must be a multiple of 128",
        ),
        (
            "group_gemm_bf16",
            GEMM | dict(seqlens=None, cu_seqlens=None),
            "seqlens is None; .*, or offs or m_indices must be",
        ),
        (
            "group_gemm_bf16",
            GEMM | dict(seqlens=None, cu_seqlens=None, offs=IDS[:2, 0].contiguous(), out=ROWS[:, :64].contiguous()),
            r"out is torch.bfloat16 \(6, 64\)",
        ),
        (
            "k_grouped_gemm_bf16",
            dict(a=ROWS, b=ROWS, seqlens=None, cu_seqlens=None),
            "seqlens is None; .*, or offs must be given",
        ),
        *(
            (
                "moe_align_block_size",
                dict(topk_ids=IDS, block_size=4, num_experts=4, expert_map=torch.tensor(ids)),
                f"expert_map has {wrong} for expert {ids.index(wrong)}; it must be -1, or 0 to 1, as 2 experts",
            )
            for ids, wrong in (([-1, 0, 2, -1], 2), ([-7, 0, 1, -1], -7), ([0, -1, -1, 1000], 1000))
        ),
        (
            "biased_grouped_topk_align",
            dict(gating_output=ROWS[:, :8], correction_bias=None, topk=2, block_size=4, expert_map=torch.arange(7)),
            "expert_map has shape .* as gating_output has 8 columns",
        ),
    ],
)
def test_messages(name, arguments, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        getattr(moe_numba, name)(**arguments)


# --- strides of routing weights -------------------------------------------------------------------------------------


def test_routing_weights_may_have_any_strides(device):
    """They are copied, which a prepared call refuses."""
    x, weight = torch.randn(6, 128, device=device).bfloat16(), torch.randn(2, 128, 128, device=device).bfloat16()
    ids, indices = (
        torch.ones(6, 2, dtype=torch.int32, device=device),
        torch.arange(12, dtype=torch.int32, device=device),
    )
    strided = torch.rand(2, 6, device=device).T
    calls = {
        moe_numba.fused_experts: dict(x=x, w13=weight.repeat(1, 2, 1), w2=weight, topk_ids=ids),
        moe_numba.weighted_sum: dict(rows=x.repeat(2, 1), inverse_indices=indices.view(6, 2)),
        moe_numba.fuse_routing: dict(topk_ids=ids, num_experts=2),
    }
    for function, arguments in calls.items():
        for rows in (1, 6):
            given = arguments | (
                {} if rows == 6 else {n: t[:1] for n, t in arguments.items() if n in ("x", "topk_ids")}
            )
            given |= dict(inverse_indices=indices.view(6, 2)[:rows]) if "rows" in given else {}
            found, wanted = (function(**given, topk_weights=w[:rows]) for w in (strided, strided.contiguous()))
            for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, wanted)), strict=True):
                assert torch.equal(a, b)
        with pytest.raises(ValueError, match="^topk_weights .* for a prepared call"):
            moe_numba.prepare(function, **arguments, topk_weights=strided)
