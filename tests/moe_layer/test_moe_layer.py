"""Test fused_experts against a loop over the experts, with and without a workspace."""

import importlib

import pytest
import torch
from helpers.wrong_kernels import is_rejected

import moe_numba
from moe_numba import simulator
from moe_numba.grouped_gemm.reference import FP8, mismatch, quantise_blocks
from moe_numba.moe_layer import ExpertsWorkspace, fused_experts, launches, reference
from moe_numba.moe_layer import workspace as layer_workspace
from moe_numba.moe_layer.weights import FORMATS
from moe_numba.runtime import replay
from moe_numba.runtime.outputs import Outputs

api = importlib.import_module("moe_numba.moe_layer.fused_experts")  # the package exports the function

BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a function of the layer in the simulator")


def make_inputs(tokens, topk, fp8, device, experts=4, hidden=128, intermediate=128, ids_dtype=torch.int32, seed=0):
    """Arguments of a call. Some ids are -1 or too large, and experts may be repeated within a token."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=random)

    x, shared = draw(tokens, hidden).bfloat16(), draw(tokens, hidden).bfloat16()
    w13 = draw(experts, 2 * intermediate, hidden) / hidden**0.5
    w2 = draw(experts, hidden, intermediate) / intermediate**0.5
    ids = torch.randint(-1, experts + 1, (tokens, topk), generator=random).to(ids_dtype)
    scales = {}
    if fp8:
        (w13, scales["w13_scale"]), (w2, scales["w2_scale"]) = quantise_blocks(w13), quantise_blocks(w2)
    else:
        w13, w2 = w13.bfloat16(), w2.bfloat16()
    weights = torch.rand(tokens, topk, generator=random)
    arguments = dict(x=x, w13=w13, w2=w2, topk_weights=weights, topk_ids=ids, **scales, shared=shared)
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def wrong(given, arguments):
    """Return None, or how a result differs from the reference: the last rounding and those of the sums remain.

    A GPU's tensor cores add FP8 products with about 13 significant bits. That moves some of the activations to the next
    FP8 number, up to 1/8 away; with a first GEMM that is wrong by 1e-3 a row of the reference changes by about 1e-2.
    """
    rounds_sums = arguments["w13"].dtype == FP8 and not simulator.ENABLED
    return mismatch(given, reference.fused_experts(**arguments), 1e-2 if rounds_sums else 4e-3)


def workspace_of(arguments, max_tokens=None):
    tokens, topk = arguments["topk_ids"].shape
    return ExpertsWorkspace(tokens if max_tokens is None else max_tokens, topk, arguments["w13"], arguments["w2"])


def mlp(x, w13, w2):
    gate, up = (x @ w13.T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ w2.T


@DTYPES
def test_reference_against_a_loop_over_tokens(fp8):
    """A loop over tokens in float64, without roundings in between; FP8 has a mantissa of 3 bits."""
    given = make_inputs(6, 2, fp8, "cpu")
    w13, w2 = given["w13"].double(), given["w2"].double()
    if fp8:
        w13 = reference.dequantise_blocks(given["w13"], given["w13_scale"]).double()
        w2 = reference.dequantise_blocks(given["w2"], given["w2_scale"]).double()
    wanted = given["shared"].double()
    for token, (ids, weights) in enumerate(zip(given["topk_ids"], given["topk_weights"], strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            if 0 <= expert < len(w13):
                wanted[token] += weight * mlp(given["x"][token : token + 1].double(), w13[expert], w2[expert])[0]
    error = reference.fused_experts(**given) - wanted
    assert float(error.norm() / wanted.norm()) < (0.05 if fp8 else 0.004)


@DTYPES
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(
    "tokens, topk, shape", [(7, 2, {}), (1, 1, dict(experts=1)), (5, 3, dict(experts=6, hidden=192))]
)
def test_equals_reference(tokens, topk, shape, has_shared, fp8, device):
    given = make_inputs(tokens, topk, fp8, device, **shape)
    given["topk_ids"][0, 0] = 0
    if not has_shared:
        given["shared"] = None
    result = fused_experts(**given)
    assert result.dtype == BF16 and wrong(result, given) is None
    out = torch.full_like(result, float("nan"))
    assert fused_experts(**given, out=out, workspace=workspace_of(given)) is out
    assert torch.equal(out, result)


@DTYPES
@pytest.mark.parametrize("wrong_rows", [False, True])
def test_tokens_in_the_order_of_the_experts(wrong_rows, fp8, device, monkeypatch):
    """As with many tokens per expert; the calls with few tokens, in the same workspace, gather."""
    many, few = (make_inputs(tokens, 3, fp8, device, hidden=192) for tokens in (9, 2))
    expected, out = fused_experts(**many), torch.full_like(many["x"], float("nan"))
    monkeypatch.setattr(layer_workspace, "MAX_GATHERED_AVERAGE", dict.fromkeys(FORMATS, 2))  # of 4 experts
    monkeypatch.setattr(api, "_plans", {})
    permuted = []

    def permute(x, inverse_indices, out):
        permuted.append(len(x))
        return function(x, inverse_indices.flip(0).contiguous() if wrong_rows else inverse_indices, out)

    function = getattr(launches, name := "permute_cast_to_fp8" if fp8 else "permute_tokens")
    monkeypatch.setattr(launches, name, permute)
    workspace = workspace_of(many)
    for given in (many, few, many):
        result = fused_experts(**given, out=out[: len(given["x"])], workspace=workspace)
        assert (wrong(result, given) is None) == (given is few or not wrong_rows)
    assert set(permuted) == {9} and torch.equal(out, expected) != wrong_rows  # launches may be repeated without it


def in_fp8(given, column_major=False):
    """The same arguments with x in FP8; a low-latency dispatch returns its scales column-major."""
    values, scales = moe_numba.per_token_cast_to_fp8(given["x"])
    scales = scales.T.contiguous().T if column_major else scales
    return given | dict(x=values, x_scale=scales)


@pytest.mark.parametrize("permutes", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
def test_tokens_in_fp8(permutes, column_major, device, monkeypatch):
    """Bit-identical to the cast of the same tokens; also with one token, for which other kernels would be chosen."""
    average = 1 if permutes else 99
    monkeypatch.setattr(layer_workspace, "MAX_GATHERED_AVERAGE", dict.fromkeys(FORMATS, average))
    monkeypatch.setattr(api, "uses_decode_kernels", lambda *_: False)
    given = make_inputs(7, 3, True, device, hidden=192)
    arguments = in_fp8(given, column_major)
    result = fused_experts(**arguments)
    assert result.dtype == BF16 and torch.equal(result, fused_experts(**given)) and wrong(result, arguments) is None
    others = arguments | dict(x_scale=arguments["x_scale"].flip(1).contiguous())
    assert wrong(result, others) is not None
    monkeypatch.undo()
    one = in_fp8(make_inputs(1, 2, True, device), column_major)
    assert wrong(fused_experts(**one), one) is None
    assert fused_experts(**in_fp8(make_inputs(0, 2, True, device))).shape == (0, 128)


@DTYPES
def test_no_tokens(fp8, device):
    given = make_inputs(0, 2, fp8, device)
    result = fused_experts(**given, workspace=workspace_of(given))
    assert result.shape == (0, 128) and result.dtype == BF16


@DTYPES
def test_tokens_without_experts(fp8, device):
    given = make_inputs(5, 2, fp8, device)
    given["topk_ids"][:] = torch.tensor([-1, 4])
    assert torch.equal(fused_experts(**given), given["shared"])
    assert not fused_experts(**given | dict(shared=None)).any()


def test_int64_ids_in_any_strides(device):
    given = make_inputs(6, 3, False, device, ids_dtype=torch.int64)
    expected = fused_experts(**given)
    given["topk_ids"] = given["topk_ids"].t().contiguous().t()
    assert torch.equal(fused_experts(**given), expected)


@DTYPES
def test_one_workspace_for_calls_of_all_sizes(fp8, device):
    """Also with what other calls left in it: NaN in all of its memory."""
    workspace = workspace_of(make_inputs(7, 2, fp8, device))
    for tokens in (7, 3, 7, 1):
        workspace.buffer.fill_(0xFF)
        given = make_inputs(tokens, 2, fp8, device, seed=tokens)
        assert wrong(fused_experts(**given, workspace=workspace), given) is None


@DTYPES
def test_with_out_and_workspace_nothing_is_allocated(fp8, device, monkeypatch):
    given = make_inputs(7, 2, fp8, device)
    out, workspace = fused_experts(**given), workspace_of(given)
    fused_experts(**given, out=out, workspace=workspace)

    call = Outputs.__call__

    def refuse(self, given=None):
        assert given is not None, "a tensor was allocated"
        return call(self, given)

    monkeypatch.setattr(Outputs, "__call__", refuse)
    monkeypatch.setattr(api.ExpertsPlan, "new_memory", lambda self: refuse(None))
    fused_experts(**given, out=out, workspace=workspace)
    for missing in ("out", "workspace"):
        with pytest.raises(AssertionError, match="a tensor was allocated"):
            fused_experts(**given | dict(out=out, workspace=workspace) | {missing: None})


@pytest.mark.gpu
@DTYPES
def test_with_out_and_workspace_no_gpu_memory_is_allocated(fp8):
    given = make_inputs(7, 2, fp8, "cuda")
    out, workspace = fused_experts(**given), workspace_of(given)
    fused_experts(**given, out=out, workspace=workspace)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    fused_experts(**given, out=out, workspace=workspace)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 600])
def test_repeated_calls_with_other_addresses_and_streams(tokens, fp8, monkeypatch):
    """Calls of a shape repeat the launches of the first; intermediate results are poisoned."""
    kept, streams = [], [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for seed, stream in enumerate(streams * 2):
        given = make_inputs(tokens, 2, fp8, "cuda", seed=seed)
        workspace = workspace_of(given)
        workspace.buffer.fill_(0xFF)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            results = fused_experts(**given), fused_experts(**given, workspace=workspace)
        torch.cuda.synchronize()
        with monkeypatch.context() as without:
            without.setattr(replay, "_is_replayed", lambda: False)
            launched = fused_experts(**given)
        assert all(torch.equal(result, launched) for result in results)
        kept.append((given, workspace, results))  # so that the next call has other memory
    assert wrong(launched[:7], {name: t[:7] if len(t) == tokens else t for name, t in given.items()}) is None


@pytest.mark.multigpu
def test_repeated_calls_on_two_gpus():
    first, second = (make_inputs(7, 2, False, f"cuda:{i}") for i in range(2))
    for _ in range(2):
        results = fused_experts(**first), fused_experts(**second)
        assert torch.equal(results[0], results[1].to("cuda:0"))
        with pytest.raises(ValueError, match="w2 is on cuda:1; it must be where w13 is, on cuda:0"):
            fused_experts(**first | dict(w2=second["w2"]))


@pytest.mark.parametrize("name", ["x", "shared"])
def test_out_may_be_an_input(name, device):
    given = make_inputs(6, 2, False, device)
    expected = fused_experts(**given)
    assert fused_experts(**given, out=given[name]) is given[name]
    assert torch.equal(given[name], expected)


@DTYPES
def test_position_in_the_batch_does_not_matter(fp8, device):
    given = make_inputs(6, 2, fp8, device)
    order = torch.tensor([4, 0, 5, 1, 3, 2], device=device)
    per_token = "x", "topk_weights", "topk_ids", "shared"
    moved = given | {name: given[name][order] for name in per_token}
    assert torch.equal(fused_experts(**moved), fused_experts(**given)[order])


def test_prepared_call(device):
    given = make_inputs(6, 2, False, device)
    with pytest.raises(ValueError, match="workspace is None; a prepared call needs one"):
        moe_numba.prepare(fused_experts, **given)
    workspace = workspace_of(given)
    prepared = moe_numba.prepare(fused_experts, **given, workspace=workspace)
    fused_experts(**given, workspace=workspace)
    later = make_inputs(6, 2, False, device, seed=1)
    for name in ("x", "topk_ids", "topk_weights"):
        given[name].copy_(later[name])
    assert wrong(prepared(), given) is None


def test_a_gate_in_front(device):
    given = make_inputs(5, 2, False, device, experts=16)
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(device)
    given["topk_weights"], given["topk_ids"] = moe_numba.biased_grouped_topk(logits, None, 2)
    assert wrong(fused_experts(**given), given) is None


def test_torch_compile_with_a_workspace(device):
    """The op has no workspace: under torch.compile intermediate results are allocated."""
    given = make_inputs(5, 2, False, device)
    expected, workspace = fused_experts(**given), workspace_of(given)
    layer = torch.compile(lambda x: fused_experts(x, workspace=workspace, **rest), fullgraph=True, backend="aot_eager")
    rest = dict(given)
    assert torch.equal(layer(rest.pop("x")), expected)


# Error messages

X, IDS, WEIGHTS = torch.zeros(3, 128).bfloat16(), torch.zeros(3, 2).int(), torch.zeros(3, 2)
W13, W2 = torch.zeros(4, 256, 128), torch.zeros(4, 128, 128)
FP8_ARGUMENTS = dict(w13=W13.to(FP8), w2=W2.to(FP8), w13_scale=torch.ones(4, 2, 1), w2_scale=torch.ones(4, 1, 1))
UNALIGNED = torch.zeros(3 * 128 + 8).bfloat16()[4:-4].view(3, 128)
REFUSALS = [
    (dict(x=[1.0]), TypeError, "x is list"),
    (dict(x=X.float()), TypeError, "x is torch.float32; it must be torch.bfloat16"),
    (dict(x=X[:, :64]), ValueError, r"x has shape \(3, 64\) and strides \(128, 1\)"),
    (dict(x=X[:, :64].contiguous()), ValueError, "x has 64 columns; it must have w13's hidden, 128"),
    (dict(x=UNALIGNED), ValueError, "x starts at address"),
    (dict(w13=W13), TypeError, "w13 is torch.float32; it must be torch.bfloat16, torch.float8_e4m3fn with scales, or"),
    (dict(w13=W13[0].bfloat16()), ValueError, r"w13 has shape \(256, 128\).* \[experts, 2 \* intermediate, hidden\]"),
    (dict(w13=W13[:0].bfloat16()), ValueError, "w13 has 0 experts; 1 to 512 are allowed"),
    (dict(w13=W13.bfloat16().transpose(0, 1)), ValueError, "w13 has shape .* and strides"),
    (dict(w13=W13[:, :64].bfloat16().contiguous()), ValueError, "intermediate is 32 .w13 has 64.* of 64"),
    (dict(w13=W13[:, :, :100].bfloat16().contiguous()), ValueError, "w13's hidden is 100.* a multiple of 64"),
    (dict(w2=W2), TypeError, "w2 is torch.float32; it must be torch.bfloat16"),
    (dict(w2=W2[:2].bfloat16()), ValueError, r"w2 has shape \(2, 128, 128\).*; it must be \[4, 128, 128\]"),
    (dict(topk_ids=IDS.float()), TypeError, "topk_ids is torch.float32"),
    (dict(topk_ids=IDS[:2]), ValueError, r"topk_ids has shape \(2, 2\); it must be \[3, topk\]"),
    (dict(topk_ids=IDS[:, :1].expand(3, 65)), ValueError, "topk, the columns of topk_ids, is 65; 1 to 64 are allowed"),
    (dict(topk_weights=WEIGHTS.bfloat16()), TypeError, "topk_weights is torch.bfloat16; it must be torch.float32"),
    (dict(topk_weights=WEIGHTS[:, :1]), ValueError, r"topk_weights has shape \(3, 1\).*; it must be \[3, 2\]"),
    (dict(w13_scale=torch.ones(4, 2, 1)), ValueError, "w13_scale is given, but the weights are torch.bfloat16"),
    (dict(x=X.to(FP8)), TypeError, "x is torch.float8_e4m3fn; it must be torch.bfloat16"),
    (dict(x=X.to(FP8), x_scale=torch.ones(3, 1)), ValueError, "x_scale is given; it is allowed only with FP8 weights"),
    (FP8_ARGUMENTS | dict(x_scale=torch.ones(3, 1)), TypeError, "x is torch.bfloat16; it must be torch.float8_e4m3fn"),
    (
        FP8_ARGUMENTS | dict(x=X.to(FP8), x_scale=torch.ones(3, 2)),
        ValueError,
        r"x_scale has shape \(3, 2\).*; it must be \[3, 1\]",
    ),
    (
        FP8_ARGUMENTS | dict(x=X.to(FP8), x_scale=torch.ones(3, 1).double()),
        TypeError,
        "x_scale is torch.float64; it must be torch.float32",
    ),
    (dict(shared=X.float()), TypeError, "shared is torch.float32"),
    (dict(shared=X[:2]), ValueError, r"shared has shape \(2, 128\).*; it must be \[3, 128\]"),
    (dict(shared=UNALIGNED), ValueError, "shared starts at address"),
    (dict(out=X.float()), ValueError, "out is torch.float32"),
    (dict(workspace=3), TypeError, "workspace is int; it must be an ExpertsWorkspace or None"),
    (FP8_ARGUMENTS | dict(w2=W2.bfloat16()), TypeError, "w2 is torch.bfloat16; it must be torch.float8_e4m3fn"),
    (FP8_ARGUMENTS | dict(w13_scale=None), TypeError, r"w13_scale is None; FP8 weights need .* block, \(4, 2, 1\)"),
    (
        FP8_ARGUMENTS | dict(w13_scale=torch.ones(4, 2)),
        ValueError,
        r"w13_scale has shape \(4, 2\); it must be \(4, 2, 1\)",
    ),
    (FP8_ARGUMENTS | dict(w2_scale=torch.ones(4, 1, 2)), ValueError, r"w2_scale has shape \(4, 1, 2\)"),
    (FP8_ARGUMENTS | dict(w2_scale=torch.ones(4, 1, 1).double()), TypeError, "w2_scale is torch.float64"),
    (
        FP8_ARGUMENTS | dict(w13=W13[:, :128].to(FP8).contiguous()),
        ValueError,
        r"w13_scale has shape \(4, 2, 1\); it must be \(4, 1, 1\), .* or \(4,\), .* as w13 has 128 rows",
    ),
]


def moved(value, device):
    if not isinstance(value, torch.Tensor) or value.device.type == device:
        return value
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


@pytest.mark.parametrize("change, error, message", REFUSALS)
def test_invalid_arguments(change, error, message, device, monkeypatch):
    def refuse(*_):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(api, "launches_of", refuse)
    arguments = dict(x=X, w13=W13.bfloat16(), w2=W2.bfloat16(), topk_weights=WEIGHTS, topk_ids=IDS) | change
    with pytest.raises(error, match=message):
        fused_experts(**{name: moved(value, device) for name, value in arguments.items()})


@pytest.mark.parametrize(
    "tokens, topk, change, message",
    [
        (3, 2, {}, "workspace is for up to 2 tokens with 2 experts each; the call has 3 tokens with 2"),
        (1, 3, {}, "workspace is for up to 2 tokens with 2 experts each; the call has 1 tokens with 3"),
        (
            1,
            2,
            dict(intermediate=64),
            "workspace is for 4 experts of hidden 128 and intermediate 128 in torch.bfloat16",
        ),
    ],
)
def test_a_workspace_of_another_size(tokens, topk, change, message, device):
    workspace = workspace_of(make_inputs(2, 2, False, device))
    with pytest.raises(ValueError, match=message):
        fused_experts(**make_inputs(tokens, topk, False, device, **change), workspace=workspace)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(max_tokens=-1), ValueError, "max_tokens is -1; 0 to"),
        (dict(max_tokens=1.0), TypeError, "max_tokens is 1.0; it must be an int"),
        (dict(topk=65), ValueError, "topk is 65; 1 to 64 are allowed"),
        (dict(w13=None), TypeError, "w13 is NoneType; it must be a tensor"),
        (dict(w2=W2.bfloat16()[:, :64]), ValueError, "w2 has shape"),
    ],
)
def test_invalid_workspaces(change, error, message):
    with pytest.raises(error, match=message):
        ExpertsWorkspace(**dict(max_tokens=2, topk=2, w13=W13.bfloat16(), w2=W2.bfloat16()) | change)


# Wrong layers


def call_with(change):
    """Return a maker of functions that call another one with changed arguments."""
    return lambda function: lambda *args, **kwargs: function(*change(*args), **kwargs)


def call_gemm_with(name, change, silu_and_mul):
    """Return a maker as :func:`call_with`, for the layer's first grouped GEMM, with ``silu_and_mul``, or its second."""

    def make(function):
        def call(scaling, **arguments):
            if arguments.get("silu_and_mul", False) == silu_and_mul:
                arguments[name] = change(arguments[name])
            return function(scaling, **arguments)

        return call

    return make


def shift_experts(function):
    def call(ids, num_experts, out):
        return function((ids + 1) % num_experts, num_experts, out=out)

    return call


def without(option):
    return lambda function: lambda *args, **kwargs: function(*args, **{k: v for k, v in kwargs.items() if k != option})


WRONG = {
    "expert off by one": (False, "group_by_expert", shift_experts),
    "rows in the order of the experts": (
        False,
        "weighted_sum",
        call_with(lambda y, index, *rest: (y, torch.arange(index.numel()).int().view(index.shape), *rest)),
    ),
    "weights are not applied": (
        False,
        "weighted_sum",
        call_with(lambda y, index, weights, *rest: (y, index, torch.ones_like(weights), *rest)),
    ),
    "shared experts are left out": (False, "weighted_sum", call_with(lambda y, i, w, shared: (y, i, w, None))),
    "gate and up exchanged": (
        False,
        "group_gemm",
        call_gemm_with("weight", lambda w: w.roll(w.shape[1] // 2, 1), True),
    ),
    "scales of the next expert": (True, "group_gemm", call_gemm_with("w_scale", lambda scale: scale.roll(1, 0), True)),
    "scales of x are not gathered": (True, "group_gemm", call_gemm_with("x_scale", lambda scale: scale.flip(0), True)),
    "scales of another block": (True, "group_gemm", call_gemm_with("w_scale", lambda scale: scale.flip(1), False)),
}


@SIMULATED
@pytest.mark.parametrize("name", WRONG)
def test_wrong_layers_are_rejected(name, device, monkeypatch):
    fp8, function, change = WRONG[name]
    given = make_inputs(6, 2, fp8, device, hidden=256)
    assert wrong(fused_experts(**given), given) is None
    monkeypatch.setattr(launches, function, change(getattr(launches, function)))
    assert is_rejected(lambda seed: wrong(fused_experts(**given), given), seeds=1)


# On a GPU: large sizes and graphs.


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_large(tokens, fp8):
    given = make_inputs(tokens, 8, fp8, "cuda", experts=64, hidden=2048, intermediate=1024)
    first = fused_experts(**given)
    assert wrong(first, given) is None
    for _ in range(10):
        assert torch.equal(fused_experts(**given), first)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("tokens", [16, 2048])
def test_graph_replays_with_changed_routing(tokens, fp8):
    shape = dict(experts=32, hidden=1024, intermediate=512)
    given = make_inputs(tokens, 8, fp8, "cuda", **shape)
    workspace, out = workspace_of(given, tokens + 5), torch.empty_like(given["x"])
    call = lambda: fused_experts(**given, out=out, workspace=workspace)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(3):
        later = make_inputs(tokens, 8, fp8, "cuda", **shape, seed=seed + 1)
        for name in ("x", "topk_ids", "topk_weights", "shared"):
            given[name].copy_(later[name])
        out.fill_(float("nan"))
        graph.replay()
        assert wrong(out, given) is None
