"""Public functions as PyTorch ops: opcheck, fake tensors, torch.compile, torch.export, autograd and vmap."""

import inspect
import os
import pickle
import re
import shutil

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._mode_utils import no_dispatch
from torch.utils.flop_counter import FlopCounterMode

import moe_numba
from moe_numba import simulator
from moe_numba.integrations.torch_ops import OPS
from moe_numba.runtime import torch_op
from moe_numba.runtime.changed_source import changed_module
from moe_numba.runtime.torch_op import needs_dispatch
from moe_numba.runtime.validate import check_device

NOT_TENSOR_FUNCTIONS = {
    "warm_up",
    "prepare",
    "Buffer",
    "Config",
    "ExpertPlacement",
    "UnsupportedDeviceError",
    "fuse_checkpoint",
    "pack_mxfp4",
    "pack_mxfp4_experts",
    "memory_cost",
    "shard_experts",
    "simulator",
    "ExpertsWorkspace",
}
EXPERTS = 4
SCALAR_TYPES = {torch.bfloat16: 15}  # numbers of dtypes in schemas, c10::ScalarType


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def fp8(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def bf16(*shape):
    return torch.randn(shape).bfloat16()


def packed(*units, tile=(2176,)):
    """MXFP4 weights of 64 columns, none of them NaN."""
    return torch.randint(130, 160, (*units, 1, *tile), dtype=torch.uint8)


def packed_gate_up(*units):
    return packed(*units, tile=(136, 16))


def ids(*shape):
    return torch.randint(-1, 8, shape, dtype=torch.int32)


GROUPS = int32(2, 4), int32(0, 2, 6)  # seqlens and cu_seqlens
CALLS = {
    "biased_grouped_topk": lambda: ((torch.randn(3, 16), torch.randn(16), 4), dict(num_expert_group=4, topk_group=2)),
    "biased_grouped_topk:limit": lambda: ((bf16(3, 16), None, 4), dict(num_token_non_padded=int32(2))),
    "biased_grouped_topk:mask": lambda: (
        (bf16(3, 16), None, 4),
        dict(renormalize_epsilon=0.5, is_padding=torch.tensor([True, False, False])),
    ),
    "moe_align_block_size": lambda: ((ids(5, 2), 4, 8), {}),
    "moe_align_block_size:map": lambda: ((ids(2, 2), 4, 8, int32(*range(8))), dict(ignore_invalid_experts=True)),
    "biased_grouped_topk_align": lambda: ((torch.randn(3, 16), torch.randn(16), 4, 8), {}),
    "fuse_routing": lambda: ((torch.rand(3, 2), ids(3, 2), 8, 2), dict(policy="random", seed=3)),
    "get_dispatch_layout": lambda: ((ids(5, 2).long(), 8, 2), {}),
    "per_token_cast_to_fp8": lambda: ((torch.randn(3, 136),), {}),
    "per_token_cast_back": lambda: ((fp8(3, 136), torch.rand(2, 3).T), {}),
    "group_gemm_bf16": lambda: ((bf16(6, 64), bf16(2, 64, 64), *GROUPS), dict(num_seq_per_group_avg=3)),
    "group_gemm_bf16:offs": lambda: ((bf16(6, 64), bf16(2, 64, 64), None, None, None, int32(2, 6)), {}),
    "group_gemm_bf16:masked": lambda: ((bf16(2, 4, 64), bf16(2, 64, 64), int32(4, 4), None), {}),
    "group_gemm_bf16:gather": lambda: (
        (bf16(3, 64), bf16(2, 64, 64), *GROUPS),
        dict(gather_indices=int32(0, 1, 2, 0, 1, 2)),
    ),
    "group_gemm_mxfp4": lambda: ((bf16(6, 64), packed(2, 1), *GROUPS), dict(n=32)),
    "group_gemm_mxfp4:options": lambda: (
        (bf16(6, 64), packed(2, 1), *GROUPS),
        dict(bias=bf16(2, 64), out_dtype=torch.float32, row_weights=torch.rand(6)),
    ),
    "group_gemm_silu_and_mul_mxfp4": lambda: (
        (bf16(6, 64), packed_gate_up(2, 1), *GROUPS),
        dict(activation="swigluoai", bias=bf16(2, 64)),
    ),
    "k_grouped_gemm_bf16": lambda: ((bf16(6, 64), bf16(6, 72), *GROUPS), {}),
    "k_grouped_gemm_bf16:bfloat16": lambda: (
        (bf16(6, 64), bf16(6, 72), None, None, int32(2, 6)),
        dict(out_dtype=torch.bfloat16),
    ),
    "group_gemm_bf16:m_indices": lambda: (
        (bf16(6, 64), bf16(2, 64, 64), None, None),
        dict(m_indices=int32(0, 0, 1, 1, 1, 1)),
    ),
    "group_gemm_bf16:low rank": lambda: (
        (bf16(6, 64), bf16(2, 64, 64), *GROUPS),
        dict(x_low=bf16(6, 16), weight_low=bf16(2, 64, 16)),
    ),
    "group_gemm_pertensor_fp8": lambda: ((fp8(6, 64), fp8(2, 64, 64), *GROUPS, torch.rand(2)), {}),
    "group_gemm_blockwise_fp8": lambda: (
        (fp8(6, 64), fp8(2, 64, 64), *GROUPS, torch.rand(6, 1), torch.rand(2, 1, 1)),
        {},
    ),
    "group_gemm_bf16:float32": lambda: (
        (bf16(6, 64), bf16(2, 64, 64), *GROUPS),
        dict(bias=torch.randn(2, 64), out_dtype=torch.float32, row_weights=torch.rand(6)),
    ),
    "group_gemm_rowwise_fp8": lambda: (
        (fp8(6, 64), fp8(2, 64, 64), *GROUPS, torch.rand(6), torch.rand(2, 64)),
        dict(bias=bf16(2, 64)),
    ),
    "group_gemm_silu_and_mul_bf16": lambda: ((bf16(6, 64), bf16(2, 64, 64), *GROUPS), {}),
    "group_gemm_silu_and_mul_bf16:swigluoai": lambda: (
        (bf16(6, 64), bf16(2, 64, 64), *GROUPS),
        dict(bias=bf16(2, 64), activation="swigluoai", alpha=1.5, limit=4.0),
    ),
    "group_by_expert": lambda: ((ids(5, 2), 8), {}),
    "group_by_expert:int64": lambda: ((ids(2, 5).long().T, 8), {}),
    "permute_tokens": lambda: ((bf16(3, 64), int32(0, 1, 2, 3, 4, 5).view(3, 2)), {}),
    "permute_cast_to_fp8": lambda: ((bf16(3, 64), int32(0, 1, 2, 3, 4, 5).view(3, 2)), {}),
    "weighted_sum": lambda: ((bf16(6, 64), ids(3, 2), torch.rand(3, 2)), {}),
    "weighted_sum:shared": lambda: ((bf16(6, 64), ids(3, 2), torch.rand(3, 2), bf16(3, 64)), {}),
    "silu_and_mul": lambda: ((bf16(3, 32),), {}),
    "per_token_quant_fp8": lambda: ((bf16(3, 32), None, int32(0, 1, 2, 3, 4, 5).view(3, 2), True), {}),
    "per_token_quant_fp8:scale": lambda: ((bf16(3, 32), torch.rand(1)), {}),
    "silu_and_mul_quant_fp8": lambda: ((bf16(3, 64), torch.rand(1)), dict(activation="swigluoai", limit=2.0)),
    "fused_experts": lambda: ((bf16(3, 64), bf16(8, 128, 64), bf16(8, 64, 64), torch.rand(3, 2), ids(3, 2)), {}),
    "fused_moe": lambda: ((bf16(3, 64), torch.randn(3, 8), torch.randn(8), bf16(8, 128, 64), bf16(8, 64, 64), 2), {}),
    "fused_moe:softmax": lambda: (
        (bf16(3, 64), bf16(3, 7), None, bf16(8, 128, 64), bf16(8, 64, 64), 3),
        dict(scoring="softmax", num_fused_shared_experts=1, num_token_non_padded=int32(2), shared=bf16(3, 64)),
    ),
    "fused_experts:fp8": lambda: (
        (bf16(3, 128), fp8(4, 256, 128), fp8(4, 128, 128), torch.rand(3, 2), ids(3, 2)),
        dict(w13_scale=torch.rand(4, 2, 1), w2_scale=torch.rand(4, 1, 1), shared=bf16(3, 128)),
    ),
    "fused_experts:fp8 rows": lambda: (
        (fp8(3, 128), fp8(4, 256, 128), fp8(4, 128, 128), torch.rand(3, 2), ids(3, 2)),
        dict(w13_scale=torch.rand(4, 2, 1), w2_scale=torch.rand(4, 1, 1), x_scale=torch.rand(3, 1)),
    ),
    "fused_experts:mxfp4": lambda: (
        (bf16(3, 64), packed_gate_up(4, 2), packed(4, 1), torch.rand(3, 2), ids(3, 2)),
        dict(w13_bias=bf16(4, 128), w2_bias=torch.rand(4, 64), activation="swigluoai"),
    ),
    "group_gemm_silu_and_mul_pertensor_fp8": lambda: ((fp8(6, 64), fp8(2, 256, 64), *GROUPS, torch.rand(2)), {}),
    "group_gemm_silu_and_mul_blockwise_fp8": lambda: (
        (fp8(6, 64), fp8(2, 256, 64), *GROUPS, torch.rand(6, 1), torch.rand(2, 2, 1)),
        {},
    ),
}
FIRST_CALLS = [case for case in CALLS if ":" not in case]
each_call = pytest.mark.parametrize("case", CALLS)
each_function = pytest.mark.parametrize("case", FIRST_CALLS)


def to(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def call_of(case, device):
    """Return the public function, its op, and arguments of a call."""
    torch.manual_seed(0)
    name, (args, kwargs) = case.partition(":")[0], CALLS[case]()
    args, kwargs = [to(a, device) for a in args], {k: to(v, device) for k, v in kwargs.items()}
    return getattr(moe_numba, name), getattr(torch.ops.moe_numba, name), args, kwargs


def tensors_in(values):
    return [v for v in values if isinstance(v, torch.Tensor)]


def as_list(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def empty_like(outputs):
    return torch.zeros_like(outputs) if isinstance(outputs, torch.Tensor) else [torch.zeros_like(t) for t in outputs]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def equal(a, b):
    """Whether two calls have the same outputs, bit by bit."""
    pairs = zip(as_list(a), as_list(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in pairs)


def described(outputs):
    return [(tuple(t.shape), t.dtype, t.stride()) for t in as_list(outputs)]


@pytest.fixture(scope="module", autouse=True)
def inductor_cache(tmp_path_factory):
    """A cache of its own: entries that other versions of the ops have left behind bring their guards with them.

    Inductor's own kernels are not vectorised, since it would compile a program for each instruction set first.
    """
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch({"cpp.vec_isa_ok": False}):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def compiled(function, backend="aot_eager", **options):
    if backend == "inductor" and simulator.ENABLED and not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


# --- registration ---------------------------------------------------------------------------------------------------


def test_every_public_function_is_an_op():
    assert set(OPS) == set(moe_numba.__all__) - NOT_TENSOR_FUNCTIONS
    assert {case.partition(":")[0] for case in CALLS} == set(OPS)


SCALAR_TYPES = {torch.bfloat16: 15}  # a schema stores a dtype as the number of its c10::ScalarType


@pytest.mark.parametrize("name", OPS)
def test_schemas_have_the_names_order_and_defaults_of_the_function(name):
    parameters = inspect.signature(getattr(moe_numba, name)).parameters
    op = getattr(torch.ops.moe_numba, name)
    for overload, left_out in ((op.default, {"out", "workspace"}), (op.out, {"workspace"})):
        arguments, fields = overload._schema.arguments, [f"placement_{n}" for n in moe_numba.ExpertPlacement._fields]
        if name == "fused_moe":  # which returns a single tensor
            fields.remove("placement_load")
        names = [[n] if n != "placement" else fields for n in parameters if n not in left_out]
        assert [a.name for a in arguments] == sum(names, [])
        for argument in arguments:
            if argument.name in fields:  # see tests/gate/test_placement.py
                continue
            default = parameters[argument.name].default
            if argument.name == "out":
                assert argument.is_write
            elif default is inspect.Parameter.empty:
                assert not argument.has_default_value()
            else:
                assert argument.default_value == SCALAR_TYPES.get(default, default)


def test_executing_a_module_again_keeps_the_ops(device):
    copy = changed_module(moe_numba.gate.api, ("_MAX_TOPK, ", "_MAX_TOPK, ")).biased_grouped_topk
    function, op, args, kwargs = call_of("biased_grouped_topk", device)
    assert copy is not function
    assert equal(copy(*args, **kwargs), function(*args, **kwargs))
    assert equal(op(*args, **kwargs), function(*args, **kwargs))


@pytest.mark.parametrize("name", OPS)
def test_functions_pass_all_arguments_to_their_op(name, monkeypatch):
    function = getattr(moe_numba, name)
    monkeypatch.setattr(torch_op, "needs_dispatch", lambda *tensors: True)
    monkeypatch.setattr(torch_op, "call_op", lambda *arguments: arguments)
    parameters = list(inspect.signature(function).parameters)
    assert function(*parameters) == (name, dict(zip(parameters, parameters, strict=True)))


def test_public_functions_look_like_those_that_are_written():
    function = moe_numba.k_grouped_gemm_bf16
    written = inspect.unwrap(function)
    assert written is not function and inspect.signature(function) == inspect.signature(written)
    assert function.__defaults__ is written.__defaults__ and function.__doc__ == written.__doc__
    assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(TypeError, match=r"^k_grouped_gemm_bf16\(\) got an unexpected keyword argument 'rows'"):
        function(*CALLS["k_grouped_gemm_bf16"]()[0], rows=1)
    with pytest.raises(TypeError, match="accumulate is 2") as error:
        function(*[torch.zeros(1)] * 3, None, accumulate=2)
    wrapper = error.traceback[1]
    assert (wrapper.path, wrapper.name) == (error.traceback[2].path, error.traceback[2].name)
    assert str(wrapper.statement) == "@torch_op()"


@pytest.mark.parametrize("overload", ["default", "out"])
@pytest.mark.parametrize("case", CALLS)
def test_opcheck(case, overload, device):
    function, op, args, kwargs = call_of(case, device)
    if overload == "out":
        kwargs["out"] = empty_like(function(*args, **kwargs))
    checks = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    if "fp8" in case or case == "per_token_cast_back":
        checks.remove("test_schema")  # torch.allclose has no FP8; the next test checks the same
    opcheck(getattr(op, overload), args, kwargs, test_utils=sorted(checks))


@each_call
def test_ops_change_no_input_and_return_none(case, device):
    function, op, args, kwargs = call_of(case, device)
    inputs = tensors_in([*args, *kwargs.values()])
    before = [t.clone() for t in inputs]
    outputs, wanted = op(*args, **kwargs), function(*args, **kwargs)
    assert equal(outputs, wanted)
    out = empty_like(wanted)
    assert op.out(*args, **kwargs, out=out) is None
    assert equal(out, wanted)
    assert all(map(equal, inputs, before))
    storages = {t.untyped_storage().data_ptr() for t in inputs}
    results = [t.untyped_storage().data_ptr() for t in as_list(outputs)]
    assert len(set(results)) == len(results) and not storages & set(results)


# --- fake and meta tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_out", [False, True], ids=["allocated", "out"])
@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
@each_call
def test_fake_tensors(case, fake_device, with_out, device):
    function, _, args, kwargs = call_of(case, device)
    wanted = function(*args, **kwargs)
    with FakeTensorMode():

        def fake(value):
            like = isinstance(value, torch.Tensor) and dict(dtype=value.dtype, device=fake_device)
            return torch.empty_strided(value.shape, value.stride(), **like) if like else value

        args, kwargs = [fake(a) for a in args], {k: fake(v) for k, v in kwargs.items()}
        if with_out:
            kwargs["out"] = fake(wanted) if isinstance(wanted, torch.Tensor) else tuple(map(fake, wanted))
        result = function(*args, **kwargs)
    assert (result is kwargs["out"]) if with_out else all(type(t) is FakeTensor for t in as_list(result))
    assert described(result) == described(wanted)
    assert {t.device.type for t in as_list(result)} == {fake_device}
    outside = function(*args, **kwargs)  # of a mode that is no longer active
    assert all(type(t) is FakeTensor for t in as_list(outside))


@each_call
def test_meta_tensors(case, device):
    function, _, args, kwargs = call_of(case, device)
    wanted = function(*args, **kwargs)
    result = function(*[to(a, "meta") for a in args], **{k: to(v, "meta") for k, v in kwargs.items()})
    assert described(result) == described(wanted)
    assert all(t.is_meta for t in as_list(result))
    if len(tensors_in(args)) > 1:
        with pytest.raises(ValueError, match="is on meta; it must be (where|on|\\()|it must be .* on meta"):
            function(to(args[0], "meta"), *args[1:], **kwargs)


def test_lengths_of_the_alignment_add_no_guard():
    """A guard on a minimum becomes two when inductor's cache is warm, and then some numbers of tokens recompile."""
    traced = make_fx(lambda slots: moe_numba.moe_align_block_size(slots, 4, 8), tracing_mode="symbolic")(ids(5, 2))
    assert not [guard for guard in traced.shape_env.guards if "Min" in str(guard.expr)]


def test_wrong_device():
    right, wrong = ("cpu", "cuda") if simulator.ENABLED else ("cuda", "cpu")
    check_device(torch.device(right), "x", (9, 0))
    with pytest.raises(ValueError, match=f"x is on {wrong}; .* must be on"):
        check_device(torch.device(wrong), "x", (9, 0))


WRONG = {  # call, number of the argument or name of the option, wrong value
    "biased_grouped_topk": [(0, torch.zeros(3, 16, dtype=torch.int32)), (2, 40), ("scoring", "tanh")],
    "moe_align_block_size": [(0, torch.zeros(3, 2)), (1, 0), ("expert_map", int32(1, 2))],
    "biased_grouped_topk_align": [(1, torch.zeros(3)), (3, 0)],
    "fuse_routing": [(0, torch.rand(3, 3)), ("policy", "none"), ("routed_scaling_factor", 0.0)],
    "get_dispatch_layout": [(0, torch.zeros(5, 2)), (2, 3)],
    "per_token_cast_to_fp8": [(0, torch.zeros(3, 4))],
    "per_token_cast_back": [(1, torch.rand(3, 1))],
    "group_by_expert": [(0, torch.zeros(5, 2)), (1, 513)],
    "permute_tokens": [(0, bf16(3, 12)), (1, int32(1, 2))],
    "permute_cast_to_fp8": [(0, bf16(3, 24)), (1, int32(1, 2))],
    "weighted_sum": [(0, bf16(6, 12)), (2, torch.rand(3, 1))],
    "per_token_quant_fp8": [(0, bf16(3, 24)), (1, torch.rand(2)), ("permute", 2)],
    "silu_and_mul_quant_fp8": [(0, bf16(3, 48)), ("limit", -1.0)],
    "silu_and_mul": [(0, bf16(3, 24)), ("num_valid_rows", int32(1, 2))],
    "fused_experts": [(0, bf16(3, 128)), (1, bf16(8, 64, 64)), ("w13_scale", torch.rand(8, 1, 1))],
    "group_gemm_mxfp4": [(1, packed_gate_up(2, 1))],
    "group_gemm_silu_and_mul_mxfp4": [(1, packed(2, 1))],
    "fused_experts:mxfp4": [
        (1, packed(4, 2)),
        (1, packed_gate_up(4, 1)),
        (2, packed_gate_up(4, 1)),
        ("w2_bias", torch.rand(4, 128)),
        ("a1_scale", torch.rand(1)),
    ],
    "fused_moe": [(0, bf16(3, 128)), (1, torch.randn(3, 7)), (2, torch.randn(4)), (5, 9)],
    "group_gemm_bf16": [(0, bf16(6, 128)), (2, int32(1)), ("gather_indices", torch.zeros(6))],
    "k_grouped_gemm_bf16": [(0, bf16(6, 12)), (1, bf16(5, 72)), (3, int32(1)), ("accumulate", True)],
    "group_gemm_bf16:m_indices": [("m_indices", int32(0, 1)), (2, int32(1, 1)), (0, bf16(2, 3, 64))],
    "group_gemm_bf16:low rank": [("x_low", bf16(6, 24)), ("weight_low", None), ("gather_indices", int32(0, 1, 2))],
    "group_gemm_blockwise_fp8": [(4, torch.rand(6, 2))],
    "group_gemm_bf16:float32": [("bias", torch.randn(2, 32)), ("accumulate", True), ("row_weights", bf16(6))],
    "group_gemm_rowwise_fp8": [(4, torch.rand(6, 1)), ("scatter_indices", int32(0, 1, 2, 3, 4, 5))],
    "group_gemm_silu_and_mul_bf16": [("activation", "gelu"), ("limit", -1.0)],
    "group_gemm_silu_and_mul_pertensor_fp8": [(1, fp8(2, 144, 64))],
    "group_gemm_silu_and_mul_blockwise_fp8": [(1, fp8(2, 128, 64))],
}


@pytest.mark.parametrize("case,which,value", [(case, *wrong) for case, all_ in WRONG.items() for wrong in all_])
def test_fakes_refuse_what_the_function_refuses(case, which, value, device):
    function, _, args, kwargs = call_of(case, device)

    def error_on(device):
        some, options = [to(a, device) for a in args], {k: to(v, device) for k, v in kwargs.items()}
        (some if isinstance(which, int) else options)[which] = to(value, device)
        with pytest.raises((TypeError, ValueError)) as error:
            function(*some, **options)
        return str(error.value).replace(f"{device}:0", "DEVICE").replace(device, "DEVICE")

    assert error_on("meta") == error_on(device)


# --- the test for dispatch ------------------------------------------------------------------------------------------


class PlainSubclass(torch.Tensor):
    pass


def test_needs_dispatch():
    x, weight = torch.zeros(2, 2), torch.nn.Parameter(torch.zeros(2))
    assert not needs_dispatch(x) and needs_dispatch(x.numpy()) and needs_dispatch("no tensor")
    assert not needs_dispatch(torch.nn.Parameter(x, requires_grad=False), x, x.numpy())
    assert needs_dispatch(x.to("meta")) and needs_dispatch(x.as_subclass(PlainSubclass))
    assert needs_dispatch(weight) and needs_dispatch(x, weight)
    with torch.no_grad():
        assert not needs_dispatch(weight, weight)
    with FakeTensorMode() as mode:
        assert needs_dispatch(x)
    assert needs_dispatch(mode.from_tensor(x))
    with FlopCounterMode(display=False):
        assert needs_dispatch(x) and needs_dispatch(x.numpy())
    seen = []
    torch.vmap(lambda row: seen.append(needs_dispatch(row)) or row)(x)
    assert seen == [True] and not needs_dispatch(x)


@pytest.mark.parametrize("array", [lambda x: x, lambda x: x.as_subclass(PlainSubclass)], ids=["tensor", "subclass"])
@pytest.mark.parametrize("direct", [False, True], ids=["through the mode", "past the mode"])
def test_a_call_that_is_dispatched_ends(array, direct, device):
    """Implementations of ops call the public function, which must not dispatch again."""
    function, _, (x, *args), kwargs = call_of("biased_grouped_topk", device)
    wanted = function(x, *args, **kwargs)
    with FlopCounterMode(display=False):
        if direct:
            with no_dispatch():
                result = function(array(x), *args, **kwargs)
        else:
            result = function(array(x), *args, **kwargs)
    assert equal([t.as_subclass(torch.Tensor) for t in result], wanted)


# --- autograd and vmap ----------------------------------------------------------------------------------------------

NO_BACKWARD = "requires grad; k_grouped_gemm_bf16 has no backward: use torch.no_grad\\(\\) or detach\\(\\)"


@pytest.mark.parametrize("which,name", [(0, "a"), (1, "b")])
def test_tensors_that_require_grad_are_refused(which, name, device):
    function, op, args, _ = call_of("k_grouped_gemm_bf16", device)
    wanted = function(*args)
    args[which] = args[which].requires_grad_()
    traced = compiled(lambda: function(*args)), compiled(lambda: op(*args))
    for call, error in ((function, ValueError), (op, ValueError), *((f, RuntimeError) for f in traced)):
        with pytest.raises(error, match=f"{name} {NO_BACKWARD}"):
            call(*args) if call in (function, op) else call()
    with torch.no_grad():
        assert equal(function(*args), wanted) and equal(op(*args), wanted) and equal(traced[0](), wanted)
    args[which] = args[which].detach()
    assert equal(function(*args), wanted)


WITHOUT_BACKWARD = [c for c in CALLS if c.startswith(("group_gemm", "k_grouped", "per_token", "silu_and_mul_quant"))]


@pytest.mark.parametrize("case", WITHOUT_BACKWARD)
def test_every_tensor_that_requires_grad_is_refused(case, device):
    function, _, args, kwargs = call_of(case, device)
    name = function.__name__
    arguments = {} if name == "group_gemm_bf16" else inspect.signature(function).bind(*args, **kwargs).arguments
    for argument, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            with pytest.raises(ValueError, match=f"^{argument} requires grad; {name} has no backward"):
                function(**arguments | {argument: tensor.detach().requires_grad_()})


@each_function
def test_outputs_that_require_grad_are_refused(case, device):
    function, op, args, kwargs = call_of(case, device)
    wanted = function(*args, **kwargs)
    for i in (i for i, tensor in enumerate(as_list(wanted)) if tensor.is_floating_point()):
        out = as_list(empty_like(wanted))
        out[i].requires_grad_()
        name, out = ("out", out[0]) if isinstance(wanted, torch.Tensor) else (f"out[{i}]", tuple(out))
        for call in (function, op.out):
            with pytest.raises(ValueError, match=re.escape(f"{name} requires grad")):
                call(*args, **kwargs, out=out)
        with torch.no_grad():
            assert equal(function(*args, **kwargs, out=out), wanted)


@each_function
def test_writing_to_out_counts_as_a_modification(case, device):
    """Otherwise a backward that needs the former contents would compute wrong gradients."""
    function, op, args, kwargs = call_of(case, device)
    wanted = function(*args, **kwargs)

    def new():
        out = empty_like(wanted)
        return tuple(out) if isinstance(out, list) else out

    for call in (function, op.out):
        out = new()
        call(*args, **kwargs, out=out)
        assert all(tensor._version > 0 for tensor in as_list(out))
    with torch.inference_mode():  # whose tensors have no version
        function(*args, **kwargs, out=new())


def test_a_backward_that_needs_what_out_had_is_refused(device):
    x, weight = torch.randn(3, 136, device=device), torch.ones(3, 136, device=device, requires_grad=True)
    values, scales = (t.clone() for t in moe_numba.per_token_cast_to_fp8(x))
    loss = (weight[:, :2] * scales).sum()
    moe_numba.per_token_cast_to_fp8(2 * x, out=(values, scales))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_derivatives_of_torch_func_are_refused(device):
    function, _, (a, *args), _ = call_of("k_grouped_gemm_bf16", device)
    with pytest.raises(ValueError, match=f"a {NO_BACKWARD}"):
        torch.func.grad(lambda a: function(a, *args).sum())(a)
    assert torch.func.grad(lambda a: (a + function(a.detach(), *args).sum()).sum())(a).eq(1).all()
    function, _, (x, *args), _ = call_of("group_gemm_bf16", device)
    with pytest.raises(ValueError, match="x has a tangent; group_gemm_bf16 has no forward-mode derivative"):
        torch.func.jvp(lambda x: function(x, *args).sum(), (x,), (x,))


MORE_CALLS = {  # tensors that no other call has
    "per_token_quant_fp8": lambda: ((bf16(3, 32), torch.rand(1)), {}),
    "group_gemm_pertensor_fp8": lambda: (
        (fp8(6, 64), fp8(2, 64, 64), *GROUPS, torch.rand(2)),
        dict(bias=bf16(2, 64), row_weights=torch.rand(6)),
    ),
    "group_gemm_blockwise_fp8": lambda: (
        (fp8(6, 64), fp8(2, 64, 64), *GROUPS, torch.rand(6, 1), torch.rand(2, 1, 1)),
        dict(bias=bf16(2, 64), row_weights=torch.rand(6)),
    ),
    "group_gemm_rowwise_fp8": lambda: (
        (fp8(6, 64), fp8(2, 64, 64), *GROUPS, torch.rand(6), torch.rand(2, 64)),
        dict(row_weights=torch.rand(6)),
    ),
    "group_gemm_silu_and_mul_bf16": lambda: (
        (bf16(6, 64), bf16(2, 256, 64), *GROUPS),
        dict(x_low=bf16(6, 16), weight_low=bf16(2, 256, 16)),
    ),
    "group_gemm_silu_and_mul_pertensor_fp8": lambda: (
        (fp8(6, 64), fp8(2, 256, 64), *GROUPS, torch.rand(2)),
        dict(bias=bf16(2, 256)),
    ),
    "fused_experts": lambda: (
        (bf16(3, 128), fp8(4, 256, 128), fp8(4, 128, 128), torch.rand(3, 2), ids(3, 2)),
        dict(w13_scale=torch.rand(4), w2_scale=torch.rand(4), a1_scale=torch.rand(1), a2_scale=torch.rand(1)),
    ),
    "fused_experts:biases": lambda: (
        (bf16(3, 64), bf16(8, 128, 64), bf16(8, 64, 64), torch.rand(3, 2), ids(3, 2)),
        dict(w13_bias=bf16(8, 128), w2_bias=bf16(8, 64)),
    ),
    "fused_moe": lambda: (
        (bf16(3, 128), torch.randn(3, 4), None, fp8(4, 256, 128), fp8(4, 128, 128), 2),
        dict(w13_scale=torch.rand(4), w2_scale=torch.rand(4), a1_scale=torch.rand(1), a2_scale=torch.rand(1)),
    ),
    "fused_moe:biases": lambda: (
        (bf16(3, 64), torch.randn(3, 8), None, bf16(8, 128, 64), bf16(8, 64, 64), 2),
        dict(w13_bias=bf16(8, 128), w2_bias=bf16(8, 64)),
    ),
}
CHOICES_ONLY = {"correction_bias"}  # results do not depend on it differentiably


def float_tensors():
    """Return (function, parameter, arguments of a call) of each parameter that is a floating-point tensor."""
    found = {}
    for case, make in [*CALLS.items(), *MORE_CALLS.items()]:
        name, (args, kwargs) = case.partition(":")[0], make()
        arguments = dict(zip(OPS[name], args)) | kwargs
        for parameter, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                found[name, parameter] = arguments
    return [(*key, arguments) for key, arguments in found.items()]


FLOAT_TENSORS = float_tensors()


@pytest.mark.parametrize(
    "name, parameter, arguments", [pytest.param(*case, id=" ".join(case[:2])) for case in FLOAT_TENSORS]
)
def test_no_gradient_is_lost(name, parameter, arguments, device):
    """A function refuses an input that requires grad by its name, or has a result that requires grad."""
    arguments = {n: to(value, device) for n, value in arguments.items()}
    arguments[parameter] = arguments[parameter].detach().clone().requires_grad_()
    try:
        results = as_list(getattr(moe_numba, name)(**arguments))
    except ValueError as error:
        assert f"{parameter} requires grad; {name} has" in str(error)
    else:
        of_floats = [t.requires_grad for t in results if t.is_floating_point()]
        assert parameter in CHOICES_ONLY or of_floats == [True]


def test_the_gradient_of_each_tensor_is_tested():
    tested = {case[:2] for case in FLOAT_TENSORS}
    for name in OPS:
        parameters = inspect.signature(getattr(moe_numba, name)).parameters.values()
        tensors = {p.name for p in parameters if p.annotation in (torch.Tensor, torch.Tensor | None)}
        others = {n for n in tensors if n == "out" or re.search("ids|idx|map|ind|len|offs|valid|padding", n)}
        missing = {(name, n) for n in tensors - others} - tested
        assert missing <= {(name, "weight")} and (not missing or name.endswith("4"))  # 4-bit weights are uint8


@each_function
def test_vmap_is_refused(case, device):
    function, op, (x, *args), kwargs = call_of(case, device)
    for call in (function, op):
        with pytest.raises(NotImplementedError, match=f"{case} does not support torch.vmap"):
            torch.vmap(lambda x, call=call: call(x, *args, **kwargs))(x[None])


# --- torch.compile and torch.export ---------------------------------------------------------------------------------


def moe(x, router, bias, weight):
    """Gate and alignment in one launch and in two, and one grouped GEMM."""
    logits = (x @ router.T).float()
    fused = moe_numba.biased_grouped_topk_align(logits, bias, 2, 4)
    weights, ids = moe_numba.biased_grouped_topk(logits, bias, 2)
    aligned = moe_numba.moe_align_block_size(ids, 4, EXPERTS)
    order = ids.flatten().argsort(stable=True)
    offs = (ids.flatten()[None] <= torch.arange(EXPERTS, device=x.device)[:, None]).sum(1).int()
    rows = (order // 2).int()
    average = x.shape[0] * 2 // EXPERTS
    y = moe_numba.group_gemm_bf16(x, weight, None, None, average, offs, gather_indices=rows)
    y = torch.zeros_like(y).index_copy(0, order, y).view(-1, 2, weight.shape[1])
    return (y * weights[..., None]).sum(1), *fused, *aligned


def moe_inputs(tokens, device, hidden=64):
    torch.manual_seed(tokens)
    inputs = bf16(tokens, hidden), bf16(EXPERTS, hidden), torch.randn(EXPERTS), bf16(EXPERTS, hidden, hidden)
    return [t.to(device) for t in inputs]


def close(a, b):
    """The first output may be rounded differently when the sum is compiled."""
    torch.testing.assert_close(a[0], b[0], rtol=1e-4, atol=1e-4)
    return equal(a[1:], b[1:])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_any_number_of_tokens(backend, device):
    layer = compiled(moe, backend, dynamic=True)
    with torch.no_grad():
        for tokens in (5, 2, 9):  # 4 slots are fewer than experts
            inputs = moe_inputs(tokens, device)
            with torch.compiler.set_stance("fail_on_recompile" if tokens != 5 else "default"):
                result = layer(*inputs)
            assert close(result, moe(*inputs))


@pytest.mark.parametrize(
    "case, backend", [(case, backend) for backend in ("aot_eager", "inductor") for case in FIRST_CALLS]
)
def test_compile_each_function_with_and_without_out(case, backend, device):
    function, _, args, kwargs = call_of(case, device)
    wanted = function(*args, **kwargs)
    layer = compiled(lambda args, out: function(*args, **kwargs, out=out), backend)
    assert equal(layer(args, None), wanted)
    out = empty_like(wanted)
    result = layer(args, out)
    assert equal(out, wanted) and equal(result, wanted)


@pytest.mark.parametrize("limit", [lambda n: n, lambda n: torch.tensor(n)], ids=["int", "tensor"])
def test_compile_with_padding(limit, device):
    def route(logits, limit):
        return moe_numba.biased_grouped_topk(logits, None, 3, num_token_non_padded=limit)

    routed = compiled(route, dynamic=True)
    for tokens, padded in ((4, 3), (6, 2)):
        logits = torch.randn(tokens, 16, device=device)
        with torch.compiler.set_stance("fail_on_recompile" if tokens != 4 else "default"):
            assert equal(routed(logits, to(limit(padded), device)), route(logits, padded))


def test_compile_with_integers_that_change(device):
    """Integers may be symbolic: they need no new graph."""
    layer = compiled(lambda ids, *options: moe_numba.moe_align_block_size(ids, *options), dynamic=True)
    fuse = compiled(lambda w, i, seed: moe_numba.fuse_routing(w, i, 8, 2, 1.5, "random", seed), dynamic=True)
    for i, options in enumerate([(4, 8), (16, 9)]):
        slots, weights = ids(5 + i, 2).to(device), torch.rand(5 + i, 2, device=device)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            assert equal(layer(slots, *options), moe_numba.moe_align_block_size(slots, *options))
            result = fuse(weights, slots, 2**40 + i)
        assert equal(result, moe_numba.fuse_routing(weights, slots, 8, 2, 1.5, "random", 2**40 + i))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, device):
    class Layer(torch.nn.Module):
        def forward(self, *inputs):
            return moe(*inputs)

    sizes = ({0: torch.export.Dim("tokens", max=1024)}, None, None, None)
    with torch.no_grad():
        program = torch.export.export(
            Layer(), tuple(moe_inputs(5, device)), dynamic_shapes={"inputs": sizes}, strict=strict
        )
        inputs = moe_inputs(9, device)
        assert close(program.module()(*inputs), moe(*inputs))
    called = {str(node.target) for node in program.graph.nodes}
    assert {f"moe_numba.{name}.default" for name in ("biased_grouped_topk_align", "group_gemm_bf16")} <= called


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 512, 12288])
def test_compile_reduce_overhead_replays_with_changed_routing(tokens, device):
    layer = compiled(moe, "inductor", mode="reduce-overhead")
    with torch.no_grad():
        inputs = moe_inputs(tokens, device, hidden=256)
        moe(*inputs)  # compiles the kernels and makes the workspaces, outside of the graph's memory
        for i in range(5):  # a warm-up, the capture, and replays
            inputs[0].copy_(moe_inputs(tokens + i, device, hidden=256)[0][:tokens])
            torch.compiler.cudagraph_mark_step_begin()
            result = [t.clone() for t in layer(*inputs)]
            assert close(result, moe(*inputs))
