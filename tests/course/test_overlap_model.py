"""The model of overlapped communication: its table in the docs, and its limits."""

import pytest

from moe_numba.course.bench import overlap_model as model
from moe_numba.course.bench.records import repository


def test_the_docs_have_the_table():
    text = (repository() / "docs" / "expert_parallel.md").read_text()
    assert model.table() in text, "run python -m moe_numba.course.bench.overlap_model, and copy its table"


def test_times_of_the_records():
    """With the sizes of the records the parts are the recorded ones; others grow with rows, and with remote rows."""
    t = model.times_of(4096, 2)
    assert (t.gate_up, t.down) == pytest.approx((model._gemm_us(4096, 7168, 32768), model._gemm_us(7168, 2048, 32768)))
    assert t.total == pytest.approx(sum(t) - t.rows_per_expert) and t.rows_per_expert == 1024
    assert model.times_of(2048, 2).combine == pytest.approx(t.combine / 2)
    more = model.times_of(4096, 8)
    assert (
        more.combine / t.combine == pytest.approx(model.remote_rows(8) / model.remote_rows(2)) and more.down == t.down
    )


def test_gains():
    t, half = model.times_of(4096, 2), model.times_of(2048, 2)
    assert model.by_sum(t) == min(t.weighted_sum, t.combine)
    # No gain can exceed what is hidden, and with free SMs and weights that are read once the rest would remain.
    assert model.by_half(t, half) < (t.dispatch + t.combine) / 2
    assert model.by_tile(t) < t.dispatch + t.permute
    few = model.times_of(64, 2)
    assert model.by_tile(few) == pytest.approx(few.dispatch)
    assert model.left_out_sms(few, 100) == 0 < model.left_out_sms(t, 100)
    assert model.by_expert_row(t, 2) == pytest.approx(t.combine - 4 * t.combine / model.remote_rows(2))
