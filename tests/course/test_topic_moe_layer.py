"""Benchmark topic moe_layer: checks before timing, rows, figure and table."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_topics import patch_topic, record_of, record_with
from helpers.figures import misplaced

from moe_numba.course.bench import records, topic
from moe_numba.course.bench.topics.moe_layer import measure as moe_layer_measure
from moe_numba.moe_layer import compile_layers

ROOT = Path(__file__).parents[2]
moe_layer = topic("moe_layer")
LAYERS = (
    compile_layers.Layer("small FP8", 4, 128, 128, "e4m3", (1,), topk=2),
    compile_layers.Layer("small bf16", 4, 128, 64, "bf16", (150,), topk=2),
    compile_layers.Layer("small gpt-oss", 4, 128, 64, "bf16", (3,), topk=2, activation="swigluoai"),
    compile_layers.Layer("small MXFP4", 4, 128, 64, "mxfp4", (3,), topk=2, activation="swigluoai"),
    compile_layers.Layer("small, a scale per expert", 4, 128, 64, "e4m3", (3,), topk=2, scaling="tensor"),
)
PARTS = {
    "block": ["group_by_expert", "cast", "gate_up", "down", "weighted_sum"],
    "tensor": ["group_by_expert", "cast", "gate_up", "activation", "down", "weighted_sum"],
    "": ["group_by_expert", "gate_up", "down", "weighted_sum"],
}


@pytest.fixture
def small(monkeypatch, device):
    patch_topic(monkeypatch, moe_layer_measure)
    monkeypatch.setattr(moe_layer, "LAYERS", LAYERS)
    measure = lambda some, peers: moe_layer_measure.measure(some, peers, str(device))
    monkeypatch.setattr(moe_layer, "measure_layers", measure)


def test_rows_figure_and_table(small):
    pytest.importorskip("transformers")
    record = record_of(moe_layer, "moe_layer")
    for layer in LAYERS:
        for tokens in layer.token_counts:
            rows = records.select(record, config=layer.config, size={"tokens": tokens}, dtype=layer.dtype)
            parts = [row["step"].removeprefix("part: ") for row in rows if row["step"].startswith("part: ")]
            wanted = list(PARTS[layer.scaling if layer.dtype == "e4m3" else ""])
            if tokens == 150:
                wanted.insert(1, "permute")
            assert parts == wanted
            steps = [row["step"] for row in rows if not row["step"].startswith("part: ")]
            peers = [f"peer:transformers {name}" for name in ("grouped_mm", "batched_mm") if layer.dtype == "bf16"]
            static = ["static scales", "static scales, fast accumulation"] if layer.scaling == "tensor" else []
            assert steps == ["final", *peers, *static, "both GEMMs"]
            assert rows[0]["floor_us"] > 0 and rows[0]["flops"] == 2 * tokens * 2 * 3 * 128 * layer.intermediate
            bounds = {row.get("floor_us") for row in rows if not row["step"].startswith("part: ")}
            assert bounds == {rows[0]["floor_us"]}
    lines = moe_layer.readme_table(record).splitlines()
    names = "| experts | tokens | moe_numba | its two GEMMs | speed of light | `batched_mm` | `grouped_mm` |"
    assert lines[0] == names and len(lines) == 2 + 5 + 2
    assert lines[2].startswith("| small FP8 | 1 | 10.0 | 11.0 | ") and lines[2].endswith(" |  |  |")  # no competitor
    assert lines[3].startswith("| small bf16 | 150 | **17.0** | 20.0 | ")
    assert "NVIDIA Toy" in lines[-1]
    (figure,) = moe_layer.figures(record).values()
    assert not misplaced(figure)


def test_quick_has_one_number_of_tokens(monkeypatch):
    monkeypatch.setattr(moe_layer, "measure_layers", lambda some, peers: [layer.token_counts for layer in some])
    assert moe_layer.measure([], True) == [(16,)] * len(moe_layer.LAYERS)
    assert moe_layer.measure([], False) == [layer.token_counts for layer in moe_layer.LAYERS]


def test_one_token_is_measured_with_groups_too(monkeypatch, device):
    patch_topic(monkeypatch, moe_layer_measure, transformers_version=lambda: None)
    layer = LAYERS[1]._replace(num_experts=5, token_counts=(1,), topk=3, num_shared=1)
    rows = moe_layer_measure.measure([layer], (), str(device))
    parts = [f"part: {name}" for name in ("gate_up", "down")]
    assert [row["step"] for row in rows] == ["final", "grouped", "both GEMMs", *parts]
    assert rows[0]["config"]["num_shared"] == 1 and rows[1]["floor_us"] == rows[0]["floor_us"]


def test_shared_experts_are_those_of_every_token(device):
    layer = LAYERS[1]._replace(num_experts=6, topk=3, num_shared=2)
    weights = moe_layer_measure.make_weights(layer, str(device))
    given = moe_layer_measure.make_inputs(layer, 40, *weights)
    assert given.ids[:, 1:].tolist() == [[4, 5]] * 40 and set(given.ids[:, 0].tolist()) == {0, 1, 2, 3}


def test_parts_compute_the_same_as_the_layer(device):
    for layer, tokens in ((LAYERS[0], 5), (LAYERS[1], 150)):
        given = moe_layer_measure.make_inputs(layer, tokens, *moe_layer_measure.make_weights(layer, str(device)))
        workspace = moe_layer_measure.ExpertsWorkspace(tokens, 2, given.w13, given.w2)
        out, again = torch.empty_like(given.x), torch.full_like(given.x, float("nan"))
        moe_layer_measure.moe_numba.fused_experts(*given, out=out, workspace=workspace)
        for part in moe_layer_measure.part_calls(given, workspace, again, {}).values():
            part()
        assert torch.equal(out, again)


@pytest.mark.parametrize("layer", LAYERS[:2], ids=lambda layer: layer.dtype)
def test_a_wrong_layer_is_not_timed(layer, small, monkeypatch):
    monkeypatch.setattr(moe_layer_measure, "kernel_times", lambda *_, **__: pytest.fail("it was timed"))
    wrong = lambda *given, out, workspace, **options: out.fill_(0.1)
    monkeypatch.setattr(moe_layer_measure.moe_numba, "fused_experts", wrong)
    with pytest.raises(AssertionError, match=f"final, {layer.model}, .* tokens: row"):
        moe_layer.measure_layers([layer], [])


def make_peer(change=lambda out: out, scalings=("none", "block")):
    """A peer that computes the experts in torch; ``change`` spoils its output."""

    def plan(scaling, problem):
        given = problem._asdict()
        activation = given.pop("activation")
        return lambda: change(moe_layer_measure.reference.fused_experts(**given, activation=activation).bfloat16())

    serves = lambda scaling, problem: scaling in scalings
    return SimpleNamespace(NAME="Other", VERSION="1.2", serves_experts=serves, plan_experts=plan)


def steps_of(peer, layers, monkeypatch, device):
    patch_topic(monkeypatch, moe_layer_measure)
    rows = moe_layer_measure.measure(layers, [peer], str(device))
    return rows, {row["config"]["model"] for row in rows if row["step"] == "peer:Other"}


def test_peers_are_measured_in_the_formats_that_they_serve(monkeypatch, device):
    rows, found = steps_of(make_peer(), LAYERS, monkeypatch, device)
    assert found == {"small FP8", "small bf16", "small gpt-oss"}
    assert all(row["version"] == "1.2" and row["floor_us"] for row in rows if row["step"] == "peer:Other")
    record = record_with("moe_layer", rows)
    lines = moe_layer.readme_table(record).splitlines()
    assert "| speed of light | Other |" in lines[0] and "Other projects: Other (1.2);" in lines[-1]
    figures = moe_layer.figures(record)
    assert list(figures) == ["layers", "layers-other"]
    assert not any(map(misplaced, figures.values()))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda out: out.roll(1, 1), r"peer:Other is left out, small FP8, 1 tokens: row 0 has relative error"),
        (lambda out: out[:0], r"peer:Other is left out, .*: the shape is"),
        (lambda out: 1 / 0, r"peer:Other is left out, small FP8, 1 tokens: ZeroDivisionError"),
    ],
)
def test_wrong_peers_are_reported_and_left_out(change, said, monkeypatch, device, capsys):
    _, found = steps_of(make_peer(change), LAYERS[:1], monkeypatch, device)
    assert not found and re.search(said, capsys.readouterr().err)


def test_output_that_a_peer_does_not_write_again_is_seen(monkeypatch, device, capsys):
    kept = []
    keep = lambda out: kept[-1] if kept and kept[-1].shape == out.shape else kept.append(out) or out
    _, found = steps_of(make_peer(keep, ("block",)), LAYERS[:1], monkeypatch, device)
    assert not found and "was not written, or is NaN" in capsys.readouterr().err


def test_arguments_of_all_layers_are_accepted():
    """Compile-only calls have the shapes and dtypes of the layers that are measured."""
    for layer in LAYERS:
        given = compile_layers.empty_arguments(layer, 3)
        weights = moe_layer_measure.make_weights(layer, "cpu")
        for name, tensor in zip(("w13", "w2", "w13_scale", "w2_scale"), weights, strict=True):
            own = given.get(name)
            assert (own is None) == (tensor is None)
            assert own is None or (own.shape, own.dtype) == (tensor.shape, tensor.dtype)
        options = moe_layer_measure.make_options(layer, "cpu") or dict(activation="silu")
        assert {name: given[name].shape for name in options if name != "activation"} == {
            name: tensor.shape for name, tensor in options.items() if name != "activation"
        }
