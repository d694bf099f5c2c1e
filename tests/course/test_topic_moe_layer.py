"""Benchmark topic moe_layer: checks before timing, rows, figure and table."""

import pytest
import torch
from helpers.bench_topics import patch_topic, record_of
from helpers.figures import misplaced

from moe_numba.course.bench import records, topic
from moe_numba.course.bench.topics import moe_layer_measure

moe_layer = topic("moe_layer")
LAYERS = (
    moe_layer_measure.Layer("small FP8", 4, 128, 128, "e4m3", (1,), topk=2),
    moe_layer_measure.Layer("small bf16", 4, 128, 64, "bf16", (150,), topk=2),
    moe_layer_measure.Layer("small gpt-oss", 4, 128, 64, "bf16", (3,), topk=2, activation="swigluoai"),
    moe_layer_measure.Layer("small MXFP4", 4, 128, 64, "mxfp4", (3,), topk=2, activation="swigluoai"),
    moe_layer_measure.Layer("small, a scale per expert", 4, 128, 64, "e4m3", (3,), topk=2, scaling="tensor"),
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
    monkeypatch.setattr(moe_layer, "measure_layers", lambda some: moe_layer_measure.measure(some, str(device)))


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
            assert steps == ["final", *peers, "both GEMMs"]
            assert rows[0]["floor_us"] > 0 and rows[0]["flops"] == 2 * tokens * 2 * 3 * 128 * layer.intermediate
    lines = moe_layer.readme_table(record).splitlines()
    names = "| experts | tokens | moe_numba | its two GEMMs | speed of light | `batched_mm` | `grouped_mm` |"
    assert lines[0] == names and len(lines) == 2 + 5 + 2
    assert lines[2].startswith("| small FP8 | 1 | **10.0** | 11.0 | ") and lines[2].endswith(" |  |  |")
    assert "NVIDIA Toy" in lines[-1]
    (figure,) = moe_layer.figures(record).values()
    assert not misplaced(figure)


def test_quick_has_one_number_of_tokens(monkeypatch):
    monkeypatch.setattr(moe_layer, "measure_layers", lambda some: [layer.token_counts for layer in some])
    assert moe_layer.measure([], True) == [(16,)] * len(moe_layer.LAYERS)
    assert moe_layer.measure([], False) == [layer.token_counts for layer in moe_layer.LAYERS]


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
@pytest.mark.parametrize("name", ["final", "peer"])
def test_wrong_layers_are_not_timed(layer, name, small, monkeypatch):
    monkeypatch.setattr(moe_layer_measure, "kernel_times", lambda *_, **__: pytest.fail("it was timed"))
    if name == "final":
        wrong = lambda *given, out, workspace, **options: out.fill_(0.1)
        monkeypatch.setattr(moe_layer_measure.moe_numba, "fused_experts", wrong)
    else:
        monkeypatch.setattr(
            moe_layer_measure, "peer_calls", lambda layer, given, options: {"peer": lambda: torch.zeros_like(given.x)}
        )
    with pytest.raises(AssertionError, match=f"{name}, {layer.model}, .* tokens: row"):
        moe_layer.measure_layers([layer])
