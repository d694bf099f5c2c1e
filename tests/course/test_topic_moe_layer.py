"""Benchmark topic moe_layer: the checks before timing, rows, figures, table, and a page without a record."""

from types import SimpleNamespace

import pytest
import torch
from helpers.bench_topics import ABOUT, patch_topic
from helpers.figures import misplaced, texts

from moe_numba import __main__ as cli
from moe_numba import simulator
from moe_numba.course import readme
from moe_numba.course.bench import Stats, parts_figure, records, topic, topics
from moe_numba.course.bench.baselines import torch_experts
from moe_numba.course.bench.topics import moe_layer_measure as measure
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.moe_layer import fused_experts, reference

moe_layer = topic("moe_layer")
SMALL = {
    "DeepSeek-V3": measure.Layer(6, 128, 128, FP8, (1, 3), 2),
    "DeepSeek-V3, 32 experts": measure.Layer(3, 128, 128, FP8, (4,), 2),
    "Qwen3-30B-A3B": measure.Layer(6, 128, 64, torch.bfloat16, (1, 3), 2),
}
LAYERS = pytest.mark.parametrize("layer", [SMALL["DeepSeek-V3"], SMALL["Qwen3-30B-A3B"]], ids=["fp8", "bf16"])
BF16_PARTS = ["group_by_expert", "gate_up GEMM", "silu_and_mul", "down GEMM", "weighted_sum"]
FP8_PARTS = ["group_by_expert", "per_token_cast_to_fp8", "gate_up GEMM, silu_and_mul", "down GEMM", "weighted_sum"]


def times_of(named, **_):
    for calls in named.values():
        calls[0]()
    return {name: Stats(t, t - 1.0, t + 1.0) for t, name in enumerate(named, 100)}


@pytest.fixture
def small(monkeypatch):
    """Few experts and tokens, and no clock."""
    patch_topic(monkeypatch, measure, called_times=times_of, SETS=2, BATCHED_TOKENS=1)
    monkeypatch.setattr(moe_layer, "LAYERS", SMALL)


def problem_of(layer, tokens=3, seed=1):
    return measure.Problem(layer, measure.Weights(layer), tokens, seed)


# Problems and steps


@LAYERS
def test_a_problem_is_random_but_the_same_in_each_run(layer):
    p, again, other = problem_of(layer), problem_of(layer), problem_of(layer, seed=2)
    for given, same, different in zip(p.arguments, again.arguments, other.arguments, strict=True):
        given, same, different = (t.view(torch.uint8) for t in (given, same, different))
        assert torch.equal(given, same)
        is_weight = given.data_ptr() in [t.data_ptr() for t in (p.weights.w13, p.weights.w2, *p.weights.scales)]
        assert torch.equal(given, different) == is_weight
    assert all(len(set(ids)) == layer.topk for ids in p.ids.tolist()) and p.active == len(p.ids.unique())
    w = p.weights
    tensors = w.w13, w.w2, *w.scales
    assert w.bytes_per_expert * len(w.w13) == sum(t.numel() * t.element_size() for t in tensors)


@LAYERS
def test_the_reference_by_expert_and_the_loop(layer):
    p = problem_of(layer)
    expected = torch_experts.expected_output(*p.arguments)
    torch.testing.assert_close(expected, reference.fused_experts(*p.arguments))
    assert mismatch(torch_experts.loop_over_experts(*p.arguments), expected, 2e-2) is None


def test_steps_and_parts():
    for layer, parts in ((SMALL["Qwen3-30B-A3B"], BF16_PARTS), (SMALL["DeepSeek-V3"], FP8_PARTS)):
        assert list(measure.parts(layer)) == parts
        steps = list(measure.ladder_steps(layer))
        assert steps[:3] == [measure.LOOP, "with grouped GEMMs", "with group_by_expert"]
        assert steps[-1] == "with weighted_sum" and [measure.waits(step) for step in steps] == [True] * 4 + [False]
    assert measure.waits("peer:transformers eager") and not measure.waits("peer:transformers grouped_mm")


def test_the_bound_is_the_longer_of_reading_and_computing(monkeypatch):
    layer = SMALL["Qwen3-30B-A3B"]
    weights = measure.Weights(layer)
    problems = [measure.Problem(layer, weights, 3, seed) for seed in (1, 2)]
    problems[0].active, problems[1].active = 4, 5
    limits = SimpleNamespace(hbm_bandwidth=1e12, tensor_flops={"bfloat16": 1e15})
    monkeypatch.setattr(measure, "chip_limits", lambda: limits)
    num_bytes, flops = int(4.5 * 3 * 128 * 64 * 2), 3 * 2 * 2 * 3 * 128 * 64
    read_us = num_bytes / 1e12 * 1e6
    wanted = dict(bytes=num_bytes, flops=flops, read_us=read_us, floor_us=read_us)
    assert measure.bound(layer, weights, problems) == wanted
    limits.tensor_flops["bfloat16"] = 1e9
    assert measure.bound(layer, weights, problems) == wanted | dict(floor_us=flops / 1e9 * 1e6)


def test_the_real_layers_have_the_sizes_of_the_models():
    bytes_of = {name: 3 * layer.hidden * layer.intermediate for name, layer in topics.moe_layer.LAYERS.items()}
    assert bytes_of["DeepSeek-V3"] == 3 * 7168 * 2048 and bytes_of["Qwen3-30B-A3B"] == 3 * 2048 * 768
    assert all(layer.topk == 8 for layer in topics.moe_layer.LAYERS.values())
    assert {name for _, names in moe_layer.MODELS.values() for name in names} == set(topics.moe_layer.LAYERS)
    assert set(moe_layer.QUICK) <= set(topics.moe_layer.LAYERS)


# Rows


@pytest.fixture
def record(small):
    return {"topic": "moe_layer", **ABOUT, "sources": {"a": "b"}, "rows": moe_layer.measure([], False)}


def test_rows_figures_and_table(record):
    assert records.invalid(record) == []
    assert moe_layer.sizes(record) == [
        ("DeepSeek-V3", 1),
        ("DeepSeek-V3", 3),
        ("DeepSeek-V3, 32 experts", 4),
        ("Qwen3-30B-A3B", 1),
        ("Qwen3-30B-A3B", 3),
    ]
    for model, tokens in moe_layer.sizes(record):
        rows = moe_layer.rows_of(record, model, tokens)
        parts = BF16_PARTS if "Qwen" in model else FP8_PARTS
        assert [step for step in rows if step.startswith("part: ")] == [f"part: {part}" for part in parts]
        for step, row in rows.items():
            waits = measure.waits(step)
            assert ("kernel_us" in row) != waits and row.get("host_waits", False) == waits or "not_run" in row
            assert set(row["config"]) == {"model", "num_experts", "topk", "hidden", "intermediate"}
            assert (row.get("floor_us", 0) > 0) == (step in ("final", "both GEMMs"))
        peers = [step for step in rows if step.startswith("peer:")]
        assert len(peers) == (0 if "DeepSeek" in model else 3 if tokens == 1 else 2)
    figures = moe_layer.figures(record)
    assert {"parts-deepseek-v3", "parts-qwen3-30b-a3b", "steps-deepseek-v3"} <= set(figures)
    for name, figure in figures.items():
        assert misplaced(figure) == [], name
    assert {"1 token", "3 tokens", "4 tokens\n32 experts"} <= set(texts(figures["parts-deepseek-v3"]))
    table = moe_layer.readme_table(record)
    assert table.count("\n| ") == 5 and "NVIDIA Toy" in table and "lower bound |\n" in table
    limits = moe_layer.limits_table(record)
    assert limits.count("\n| ") == limits.count("| reading weights |") + limits.count("| tensor cores |") == 5


def test_without_transformers_the_peers_are_missing(small, monkeypatch):
    monkeypatch.setattr(torch_experts, "transformers_version", lambda: None)
    layer = SMALL["Qwen3-30B-A3B"]
    rows = measure.measure_layer("Qwen3-30B-A3B", layer, measure.Weights(layer), 3)
    missing = {row["step"]: row["not_run"] for row in rows if "not_run" in row}
    why = "transformers 5 is not installed"
    assert missing == {"peer:transformers grouped_mm": why, "peer:transformers eager": why}
    record = {"topic": "moe_layer", **ABOUT, "sources": {"a": "b"}, "rows": rows}
    assert records.invalid(record) == [] and "peers-qwen3-30b-a3b" not in moe_layer.figures(record)
    assert "|  |" in moe_layer.readme_table(record)


def test_transformers_are_measured_with_their_version(small):
    transformers = pytest.importorskip("transformers")
    layer = SMALL["Qwen3-30B-A3B"]
    p = problem_of(layer)
    steps = measure.peer_steps(layer, p.weights, 1, [])
    assert list(steps) == [f"peer:{name}" for name in moe_layer.OWN_PEERS]
    results = {name: call(p) for name, (call, version) in steps.items() if version == transformers.__version__}
    expected = torch_experts.expected_output(*p.arguments)
    assert len(results) == 3 and all(mismatch(out, expected, 2e-2) is None for out in results.values())


def test_other_peers_have_a_function_per_dtype(small):
    peer = SimpleNamespace(
        NAME="other", VERSION="1", fused_experts_e4m3=fused_experts_of_peer, fused_experts_bf16=wrong
    )
    for layer in (SMALL["DeepSeek-V3"], SMALL["Qwen3-30B-A3B"]):
        rows = measure.measure_layer("a", layer, measure.Weights(layer), 1, [peer])
        (row,) = [row for row in rows if row["step"] == "peer:other"]
        assert row["version"] == "1"
        assert "kernel_us" in row if layer.dtype == FP8 else "was not written" in row["refused"]


def fused_experts_of_peer(*arguments, out):
    return fused_experts(*arguments, out=out)


def wrong(*_, out):
    return out


# Wrong kernels


def drop_last_expert(run):
    def call(x, w13, w2, weights, ids, *rest):
        ids = ids.clone()
        ids[-1, -1] = -1
        return run(x, w13, w2, weights, ids, *rest)

    return call


def weights_twice(run):
    return lambda x, w13, w2, weights, *rest: run(x, w13, w2, weights * weights, *rest)


def next_expert(run):
    return lambda x, w13, w2, weights, ids, *rest: run(x, w13, w2, weights, (ids + 1) % len(w13), *rest)


@LAYERS
@pytest.mark.parametrize("change", [drop_last_expert, weights_twice, next_expert])
@pytest.mark.parametrize("step", ["run_experts", "fused_experts"])
def test_wrong_kernels_are_not_timed(small, monkeypatch, step, change, layer):
    monkeypatch.setattr(measure, "kernel_times", lambda *_: pytest.fail("it was timed"))
    function = getattr(measure, step)

    def wrong_step(*arguments, **options):
        if not options:
            return change(function)(*arguments)
        return options["out"].copy_(change(lambda *given: function(*given, **options))(*arguments))

    monkeypatch.setattr(measure, step, wrong_step)
    message = "final" if step == "fused_experts" else "with grouped GEMMs"
    with pytest.raises(AssertionError, match=f"a, 3 tokens: {message}: "):
        measure.measure_layer("a", layer, measure.Weights(layer), 3)


@LAYERS
@pytest.mark.parametrize("fault", ["not launched", "wrong"])
def test_wrong_parts_are_not_timed(small, monkeypatch, fault, layer):
    monkeypatch.setattr(measure, "kernel_times", lambda *_: pytest.fail("it was timed"))
    down = measure._down
    monkeypatch.setattr(measure, "_down", lambda p: None if fault == "not launched" else down(p).mul_(2))
    with pytest.raises(AssertionError, match="the parts one after another differ from one call"):
        measure.measure_layer("a", layer, measure.Weights(layer), 3)


# Without a clock, a record or a GPU


@pytest.mark.skipif(not simulator.ENABLED, reason="a GPU measures times")
def test_the_simulator_measures_no_times():
    calls = []
    assert measure.called_times({"a": [lambda: calls.append(1)], "b": [lambda: calls.append(2)]}) == {
        "a": None,
        "b": None,
    }
    assert calls == [1, 2]


def test_quick_measures_fewer_sizes(monkeypatch):
    found = []
    monkeypatch.setattr(measure, "Weights", lambda layer: None)
    monkeypatch.setattr(
        measure, "measure_layer", lambda name, layer, w, tokens, peers: found.append((name, tokens)) or []
    )
    assert moe_layer.measure([], True) == [] and found == [(n, t) for n, own in moe_layer.QUICK.items() for t in own]
    found.clear()
    moe_layer.measure([], False)
    assert len(found) == 11 and ("DeepSeek-V3, 32 experts", 4096) in found


def test_the_readmes_block_with_and_without_a_record(small, monkeypatch):
    recorded, layer = records.recorded, SMALL["Qwen3-30B-A3B"]
    rows = measure.measure_layer("Qwen3-30B-A3B", layer, measure.Weights(layer), 1)
    record = {"topic": "moe_layer", **ABOUT, "sources": {"a": "b"}, "rows": rows}
    for own in (record, None):
        monkeypatch.setattr(
            records, "recorded", lambda name, *w, own=own: own if name == "moe_layer" else recorded(name)
        )
        table = readme.blocks()["README.md"]["moe_layer"]
        assert table == (moe_layer.readme_table(record) if own else "")


def test_transformers_times_need_no_folder_of_peers_again(monkeypatch, capsys):
    """A run without --peers may replace times of transformers, which the topic measures itself."""
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(records, "environment", lambda: {"gpu": "NVIDIA Toy"})
    rows = [records.row(f"peer:{name}", kernel=Stats(2.0, 1.0, 3.0)) for name in ("transformers grouped_mm", "other")]
    monkeypatch.setattr(records, "recorded", lambda *_: {"rows": rows})
    assert cli.main(["bench", "moe_layer"]) == 2
    error = capsys.readouterr().err
    assert "has times of other, which" in error


def test_the_figure_of_parts_refuses_what_it_cannot_show():
    with pytest.raises(ValueError, match="the number of groups is 13; this figure can show 1 to 12"):
        parts_figure.stacked_parts({str(i): ({"a": 1.0}, 1.0, 0.5) for i in range(13)})
    with pytest.raises(ValueError, match="the number of parts is 8"):
        parts_figure.stacked_parts({"": ({str(i): 1.0 for i in range(8)}, 1.0, 0.5)})


@pytest.mark.gpu
def test_a_record_is_measured_on_a_gpu(monkeypatch):
    layers = {
        "DeepSeek-V3": measure.Layer(32, 1024, 512, FP8, (16,)),
        "Qwen3-30B-A3B": measure.Layer(32, 1024, 512, torch.bfloat16, (1, 256)),
    }
    monkeypatch.setattr(moe_layer, "LAYERS", layers)
    rows = moe_layer.measure([], False)
    record = {"topic": "moe_layer", **ABOUT, "sources": {"a": "b"}, "rows": rows}
    assert records.invalid(record) == [] and moe_layer.figures(record) and moe_layer.readme_table(record)
    final = records.find(record, step="final", size={"tokens": 16})
    assert final["kernel_us"]["median"] > final["floor_us"]
