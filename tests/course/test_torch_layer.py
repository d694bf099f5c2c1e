"""The torch layer with separate and fused shared experts, its checker, and the benchmark topic."""

from dataclasses import replace

import pytest
import torch
from bench_topics import patch_topic, record_of

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines import torch_layer
from moe_numba.course.bench.baselines.torch_layer import (
    FP8,
    SMALL,
    Layer,
    mismatch,
    quantise,
    tile_rows,
    torch_grouped_gemm,
)
from moe_numba.course.bench.topics import shared_experts as topic
from moe_numba.shared_experts import fuse_routing, reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, FP8]
FUSIONS = [  # distinct shared experts, replicas of each, policy
    (1, 1, "all"),
    (2, 1, "all"),
    (1, 1, "random"),
    (1, 2, "round_robin"),
    (1, 8, "round_robin"),
    (1, 8, "random"),
]
# Large enough for several tiles, and for experts without tokens
LARGE = torch_layer.Shape(64, 6, 512, 256, 8, 4)


def append(layer, x, policy="all", scale=None, exact=False):
    """Route with columns for all shared experts of the layer, with the kernel or in float64."""
    weights, ids = layer.route(x)
    arguments = layer.shape.num_experts, layer.count - layer.shape.num_experts
    scale = scale or layer.shape.routed_scaling_factor
    if exact:
        return reference.fuse_routing(weights.double(), ids, *arguments, scale, policy)
    return fuse_routing(weights, ids, *arguments, scale, policy)


@pytest.mark.parametrize("scale", [1.0, 2.5, 16.0])
@pytest.mark.parametrize("shared, replicas, policy", FUSIONS)
@pytest.mark.parametrize("tokens", [0, 9])
def test_separate_and_fused_agree_in_float64(tokens, shared, replicas, policy, scale, device):
    shape = replace(SMALL, n_shared_experts=shared, routed_scaling_factor=scale)
    layer = Layer(shape, torch.float64, device, replicas)
    x = layer.tokens(tokens)
    before, after = layer.separate(x), layer.fused(x, *append(layer, x, policy, exact=True))
    assert before.shape == after.shape == x.shape
    assert mismatch(before, layer.expected(x), torch.float64) is None
    assert mismatch(after, before, torch.float64) is None


def test_a_model_without_shared_experts(device):
    layer = Layer(replace(SMALL, n_shared_experts=0), torch.float64, device)
    x = layer.tokens(5)
    assert mismatch(layer.separate(x), layer.fused(x, *layer.route(x)), torch.float64) is None


def test_float32_weights_limit_float64_accuracy(device):
    layer = Layer(SMALL, torch.float64, device)
    x = layer.tokens(9)
    after = layer.fused(x, *append(layer, x))
    assert mismatch(after, layer.separate(x), torch.float64) is not None
    assert mismatch(after, layer.separate(x), torch.float32) is None


def check_error_bounds(shape, dtype, device, tokens):
    layer = Layer(shape, dtype, device, replicas=8)
    x = layer.tokens(tokens)
    expected = layer.expected(x)
    assert mismatch(layer.separate(x), expected, dtype) is None
    assert mismatch(layer.fused(x, *layer.route(x, 1), count=shape.num_experts + 1), expected, dtype) is None
    for policy in ("round_robin", "random"):
        routing = append(layer, x, policy)
        out = layer.fused(x, *routing)
        assert mismatch(out, expected, dtype) is None
        assert torch.equal(out, layer.fused(x, *routing)), "not deterministic"
    for wrong in (append(layer, x, "all"), append(layer, x, "random", scale=1.0)):
        assert "is off by" in mismatch(layer.fused(x, *wrong), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_error_bounds(dtype, device):
    check_error_bounds(SMALL, dtype, device, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_error_bounds_on_a_gpu(dtype, tokens):
    check_error_bounds(LARGE, dtype, "cuda", tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 2000])
def test_graph_capture(dtype, tokens):
    layer = Layer(LARGE, dtype, replicas=8)
    x = layer.tokens(tokens)
    for forward in (layer.separate, lambda x: layer.fused(x, *append(layer, x, "random"))):
        eager, graph = forward(x), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(x)
        out.zero_()
        graph.replay()
        assert torch.equal(out, eager)


def corrupt_scaling(layer, x):
    return layer.fused(x, *append(layer, x, "random", scale=1.0))


def sum_all_replicas(layer, x):
    return layer.fused(x, *append(layer, x, "all"))


def drop_replica_of_one_token(layer, x):
    weights, ids = append(layer, x, "random")
    weights[4, -1] = 0
    return layer.fused(x, weights, ids)


def double_replica_of_one_token(layer, x):
    weights, ids = append(layer, x, "random")
    weights[4, -1] *= 2
    return layer.fused(x, weights, ids)


def write_nan(layer, x):
    out = layer.separate(x)
    out[3, 5] = float("nan")
    return out


def corrupt_element(layer, x):
    out = layer.separate(x)
    out[3, 5] += 3
    return out


def drop_token(layer, x):
    return layer.separate(x)[1:]


@pytest.mark.parametrize("dtype", [torch.float64, FP8], ids=str)
@pytest.mark.parametrize(
    "corrupt, message",
    [
        (corrupt_scaling, "token"),
        (sum_all_replicas, "token"),
        (drop_replica_of_one_token, "token 4 is off"),
        (double_replica_of_one_token, "token 4 is off"),
        (write_nan, "1 elements are not finite"),
        (corrupt_element, "is off by"),
        (drop_token, r"the shape is"),
    ],
)
def test_checker_rejects_wrong_outputs(corrupt, message, dtype, device):
    layer = Layer(SMALL, dtype, device, replicas=8)
    x = layer.tokens(9)
    assert message in mismatch(corrupt(layer, x), layer.expected(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_gemm_with_empty_groups(dtype, device):
    layer = Layer(SMALL, dtype, device)
    ends = torch.tensor([0, 3, 3, 3, 7] + [7] * 12, dtype=torch.int32, device=device)
    x = layer.tokens(7)
    out = torch_grouped_gemm(*layer.quantise_if_fp8(x), layer.gate_up, ends)
    for expert, rows in ((1, slice(0, 3)), (4, slice(3, 7))):
        expected = x[rows].double() @ layer.gate_up.exact(expert).T
        assert mismatch(out[rows], expected, dtype) is None
    assert torch_grouped_gemm(*layer.quantise_if_fp8(x[:0]), layer.gate_up, ends * 0).shape == (0, 128)


def test_custom_grouped_gemm(device):
    seen = []

    def grouped(rows, scales, matrices, ends):
        seen.append((len(rows), len(matrices.values), ends.tolist()[-1]))
        return torch_grouped_gemm(rows, scales, matrices, ends)

    layer = Layer(SMALL, torch.float32, device, replicas=2, grouped=grouped)
    x = layer.tokens(3)
    layer.fused(x, *layer.route(x, 1), count=17)
    assert seen == [(15, 17, 15)] * 2


def test_moe_numba_grouped_gemm(device):
    layer = Layer(SMALL, torch.bfloat16, device)
    with_moe_numba, x = layer.with_grouped_gemm(torch_layer.moe_numba_grouped_gemm), layer.tokens(5)
    assert with_moe_numba.gate_up is layer.gate_up and layer.grouped is torch_grouped_gemm
    expected = layer.expected(x)
    assert mismatch(with_moe_numba.separate(x), expected, torch.bfloat16) is None
    assert mismatch(with_moe_numba.fused(x, *with_moe_numba.route(x, 1)), expected, torch.bfloat16) is None
    ends = torch.tensor([0, 3] + [5] * 15, dtype=torch.int32, device=device)
    out = torch_layer.moe_numba_grouped_gemm(x, None, layer.gate_up, ends)
    assert mismatch(out, torch_grouped_gemm(x, None, layer.gate_up, ends).double(), torch.bfloat16) is None
    with pytest.raises(TypeError, match="rows is .*; it must be torch.bfloat16"):
        torch_layer.moe_numba_grouped_gemm(*Layer(SMALL, FP8, device).quantise_if_fp8(x), layer.gate_up, ends)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 2000])
def test_moe_numba_grouped_gemm_on_a_gpu(tokens):
    layer = Layer(LARGE, torch.bfloat16).with_grouped_gemm(torch_layer.moe_numba_grouped_gemm)
    x = layer.tokens(tokens)
    assert mismatch(layer.fused(x, *layer.route(x, 1)), layer.expected(x), torch.bfloat16) is None


def test_quantise():
    x = torch.randn(5, 64)
    x[3] = 0
    values, scale = quantise(x)
    assert values.dtype == FP8 and scale.shape == (5,)
    assert values.float().abs().amax(1).tolist() == [448, 448, 448, 0, 448]
    torch.testing.assert_close(values.float() * scale[:, None], x, rtol=2**-4, atol=float(scale.max()) / 512)


def test_replicas_and_clones(device):
    for dtype in (torch.bfloat16, FP8):
        layer = Layer(replace(SMALL, n_shared_experts=2), dtype, device, replicas=3)
        exact = [layer.down.exact(expert) for expert in range(16, 22)]
        assert all(torch.equal(exact[0], other) for other in exact[1:3])
        assert all(torch.equal(exact[3], other) for other in exact[4:]) and not torch.equal(exact[0], exact[3])
        other, x = layer.clone(), layer.tokens(4)
        assert torch.equal(other.separate(x), layer.separate(x))
        assert other.gate_up.values.data_ptr() != layer.gate_up.values.data_ptr()


def test_bytes_operations_and_tiles():
    layer = Layer(SMALL, torch.bfloat16, "cpu")
    assert SMALL.expert_weights == 3 * 64 * 64
    assert layer.bytes(tokens=2, experts=5) == 5 * 3 * 64 * 64 * 2 + 2 * 2 * 64 * 2
    assert layer.flops(slots=7) == 7 * 2 * 3 * 64 * 64
    assert layer.count_experts(torch.tensor([[1, 2], [2, 5]])) == 3
    assert [tile_rows(4096 * k, e, 512, 7168, FP8) for k, e in ((8, 256), (9, 257))] == [64, 128]
    assert tile_rows(10**6, 256, 128, 7168, FP8) == 64
    assert [tile_rows(4096 * 9, 33, 4096, 7168, dtype) for dtype in (torch.bfloat16, FP8)] == [128, 256]


@pytest.mark.parametrize("policy", reference.POLICIES)
def test_torch_append(policy):
    weights, ids = torch.rand(50, 4), torch.rand(50, 16).argsort(dim=1)[:, :4].int()
    given = topic.torch_append(weights, ids, 16, 3, 2.5, policy)
    expected = reference.fuse_routing(weights, ids, 16, 3, 2.5, policy)
    assert [t.dtype for t in given] == [torch.float32, torch.int32] and torch.equal(given[0], expected[0])
    if policy == "random":
        assert set(given[1][:, 4].tolist()) == {16, 17, 18}
    else:
        assert torch.equal(given[1], expected[1])


# The benchmark topic


@pytest.fixture
def small_topic(monkeypatch, device):
    """Small layers and few tokens."""
    patch_topic(
        monkeypatch,
        topic,
        MODELS={"tp8": SMALL, "ep8": replace(SMALL, num_expert_group=1, topk_group=1)},
        ROUTING=dict(num_experts=16, topk=4),
        GATE=dict(num_experts=16, topk=4, num_expert_group=4, topk_group=2, routed_scaling_factor=2.5),
        LAYER_TOKENS={"tp8": [1, 4], "ep8": [4]},
        CALL_TOKENS=4,
        ROUTING_TOKENS=[1, 4],
        GATE_TOKENS=[1, 4],
        QUICK_TOKENS=[4],
        DEVICE=device,
        measure_matmul_flops=lambda dtype: 1e15,
    )
    monkeypatch.setattr(torch_layer, "count_kernels", lambda call: 26)
    # The package's grouped GEMM is tested above, and slow in the simulator.
    monkeypatch.setattr(torch_layer, "moe_numba_grouped_gemm", torch_grouped_gemm)


def test_rows_figures_and_table(small_topic):
    record = record_of(topic, "shared_experts")
    assert len(records.select(record, step="layer: separate")) == 2 * (2 + 1)
    for row in record["rows"]:
        if row["step"].startswith(("layer", "GEMMs")):
            is_moe_numba = row["step"].endswith("own GEMM")
            assert (
                row["bytes"] > 0 and row["flops"] > 0 and row["floor_us"] > 0 and ("tile_rows" in row) != is_moe_numba
            )
            assert not is_moe_numba or row["dtype"] == "bfloat16"
    assert len(records.select(record, step="layer: 1 shared, own GEMM")) == 2 + 1
    rows = [records.find(record, step=f"layer: {n}", size={"tokens": 4}, dtype="bfloat16") for n in topic.VARIANTS]
    assert rows[0]["flops"] == rows[1]["flops"] == rows[2]["flops"]
    assert rows[0]["bytes"] == rows[1]["bytes"] < rows[2]["bytes"] or rows[2]["experts"] == rows[1]["experts"]
    assert all("call_us" in row and row["launches"] == 26 for row in rows)
    assert records.find(record, step="final", size={"tokens": 4})["call_us"]
    figures = topic.figures(record)
    assert {"routing", "gate", "layer-tp8-bfloat16", "gemms-tp8-float8_e4m3fn", "layer-ep8-bfloat16"} <= set(figures)
    table = topic.readme_table(record)
    assert table.count("\n| ") == 4 and "26 before and 26 after in bfloat16" in table and "NVIDIA Toy" in table
    assert topic.layer_times(record, "tp8", "bfloat16").keys() == {1, 4}


def test_wrong_variants_are_not_timed(small_topic, monkeypatch, device):
    monkeypatch.setattr(
        topic, "_route_to_replicas", lambda layer, x, replicas: fuse_routing(*layer.route(x), 16, 8, 1.0)
    )
    with pytest.raises(AssertionError, match=r"8 replicas, tp8, 4 tokens: token \d is off"):
        topic._measure_layer("tp8", [Layer(SMALL, torch.bfloat16, device, 8)], 4, 1e12, 1e15, gemms=False)
