"""Benchmark topic gate_align: rows, the check before timing, and the table, with fake times."""

import pytest
from bench_topics import patch_topic, record_of

from moe_numba.course.bench import topic_names
from moe_numba.course.bench.topics import gate
from moe_numba.course.bench.topics import gate_align as topic

GROUPS = dict(num_experts=32, topk=4, num_expert_group=4, topk_group=2)
SOFTMAX = dict(num_experts=16, topk=2, **gate.SOFTMAX)


@pytest.fixture
def small(monkeypatch, device):
    """Few tokens and experts."""
    models = {"with groups": GROUPS, "softmax": SOFTMAX}
    patch_topic(monkeypatch, topic, MODELS=models, TOKENS=[1, 3], CALL_TOKENS=3, DEVICE=device)
    monkeypatch.setattr(gate, "DEEPSEEK_V3", GROUPS)


def test_the_command_line_knows_the_topic():
    assert "gate_align" in topic_names()


def test_models_with_more_experts_are_left_out():
    assert "Kimi K2" in topic.MODELS and "Qwen3-Next" not in topic.MODELS


def test_rows_and_table(small):
    record = record_of(topic, "gate_align")
    assert len(record["rows"]) == 2 * 2 * 2
    assert {row["config"]["block_size"] for row in record["rows"]} == {topic.BLOCK_SIZE}
    called = [row["step"] for row in record["rows"] if "call_us" in row]
    assert called == [topic.TWO, topic.ONE]  # only DeepSeek-V3's
    before, after = topic.times_of(record, "softmax", 3)
    table = topic.readme_table(record)
    assert "| softmax | 16, top-2 | " in table and f"{before:.2f} → {after:.2f}" in table and "NVIDIA Toy" in table
    assert topic.figures(record) == {}


def test_absent_rows_leave_a_cell_empty():
    record = {"rows": []}
    assert topic.times_of(record, "Kimi K2", 1) is None


def test_another_result_is_not_timed(small, monkeypatch):
    def wrong(*args, out, **options):
        return out

    monkeypatch.setattr(topic, "biased_grouped_topk_align", wrong)
    with pytest.raises(AssertionError, match="one launch differs from two"):
        topic.measure([], False)


def test_quick_measures_fewer_sizes(small):
    assert {row["size"]["tokens"] for row in topic.measure([], True)} == {4}
