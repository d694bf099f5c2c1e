"""The model of overlapped communication: its table in the docs, and its limits."""

import pytest

from moe_numba.course.bench import overlap_model as model
from moe_numba.course.bench import records
from moe_numba.course.bench.topics.moe_layer_ranks.show import PARTS, medians


def test_the_docs_have_the_table():
    text = (records.repository() / "docs" / "expert_parallel.md").read_text()
    assert model.table() in text, "run python -m moe_numba.course.bench.overlap_model, and copy its table"


@pytest.mark.parametrize("ranks", model.RANKS)
def test_times_are_those_of_the_record(ranks):
    steps = medians(records.read("moe_layer_ranks", model.GPU), ranks)[512]
    t = model.times_of(512, ranks)
    assert t[:3] == pytest.approx([steps[part, model.WIRE] for part in PARTS])
    assert t.total == sum(t[:3]) and t.rows_per_expert == 128
    assert 0 < t.gate_up < t.experts and t.permute + t.weighted_sum < t.experts - t.gate_up
    between = model.times_of(300, ranks)
    assert all(few < more for few, more in zip(model.times_of(64, ranks)[:3], between, strict=False))
    assert all(few < more for few, more in zip(between[:3], t, strict=False))


def test_gains_are_limited_by_what_is_hidden():
    for ranks in model.RANKS:
        for tokens in model.TOKENS:
            t, gains = model.gains(tokens, ranks)
            by_tile, by_half, by_expert_row, by_sum, by_fp8_sums = (gains[name] for name in model.GAINS)
            assert by_tile <= t.dispatch + t.permute and by_half < t.dispatch + t.combine
            assert by_expert_row < 0 < by_sum <= t.weighted_sum and 0 < by_fp8_sums < t.combine / 2
    few, many = model.times_of(64, 2), model.times_of(4096, 2)
    assert model.left_out_sms(few, 100) == 0 and model.left_out_sms(many, 108) == pytest.approx(24)


def test_micro_batches_of_free_weights_and_sms_would_hide_both(monkeypatch):
    """With GEMMs whose time is proportional to the rows, half of dispatch and of combine is hidden."""
    monkeypatch.setattr(model, "left_out_sms", lambda *_: 0)
    t = model.times_of(4096, 8)._replace(dispatch=200.0, experts=1000.0, combine=400.0)
    half = t._replace(dispatch=100.0, experts=500.0, combine=200.0)
    assert model.by_half(t, half) == pytest.approx(300)


def test_measured_gains_are_differences_of_recorded_layers(monkeypatch):
    steps = {
        ("final", "e4m3"): 100.0,
        ("combine during the sum", "e4m3"): 97.0,
        ("low latency", "e4m3"): 90.0,
        ("low latency, FP8 sums", "e4m3"): 85.0,
    }
    monkeypatch.setattr(model.moe_layer_ranks, "medians", lambda *_: {64: steps})
    assert model.measured_gains(64, 2) == {"combine during the sum": 3.0, "sums in FP8": 5.0}
    assert model.measured_gains(512, 2) == {}
    del steps["low latency", "e4m3"], steps["combine during the sum", "e4m3"]
    assert model.measured_gains(64, 2) == {"sums in FP8": 15.0}
