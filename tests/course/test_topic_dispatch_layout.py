"""Benchmark topic dispatch_layout: rows, figures and the table, with fake times."""

import pytest
import torch
from bench_topics import patch_topic, record_of

from moe_numba.course.bench import records, topic_names
from moe_numba.course.bench.topics import dispatch_layout as topic
from moe_numba.course.deepep_port import dispatch_layout
from moe_numba.expert_parallel import reference


@pytest.fixture
def small(monkeypatch, device):
    """Few tokens and experts."""
    patch_topic(
        monkeypatch,
        topic,
        DEEPSEEK_V3=dict(num_experts=64, topk=4, ranks=4),
        OTHERS=[dict(num_experts=6, topk=2, ranks=3)],
        TOKENS=[1, 30],
        OTHER_TOKENS=[5],
        CALL_TOKENS=30,
        DEVICE=device,
    )


def test_the_command_line_knows_the_topic():
    assert "dispatch_layout" in topic_names()


def test_rows_figures_and_table(small):
    record = record_of(topic, "dispatch_layout")
    rows = records.select(record, operation="layout")
    assert len(rows) == len(record["rows"]) - 1 == 3 * 3 + 1
    for row in rows:
        assert set(row["config"]) == {"num_experts", "topk", "ranks"} and set(row["size"]) == {"tokens"}
        assert row["step"] in ("final", "final, out=", "port", "torch") and row["dtype"] == "int64"
        assert row["bytes"] > 0 and row["floor_us"] >= 0
    final = records.find(record, step="final", size={"tokens": 30})
    assert final["call_us"] and final["bytes"] == 8 * 30 * 4 + 30 * 4 + 4 * (64 + 4)
    assert "call_us" not in records.find(record, step="final", size={"tokens": 1})
    assert "layout" in topic.figures(record)
    table = topic.readme_table(record)
    assert table.count("\n| ") == 2 and "NVIDIA Toy" in table and "DeepEP's kernel, our port" in table


def test_quick_measures_fewer_sizes(small, monkeypatch):
    monkeypatch.setattr(topic, "measure_layout", lambda config, tokens, bandwidth: [tokens])
    assert topic.measure([], True)[1:] == [64, 4096]


@pytest.mark.parametrize("experts, ranks, topk", [(64, 4, 4), (6, 3, 6), (8, 1, 2)])
def test_torch_layout(experts, ranks, topk, device):
    for tokens in (0, 1, 70):
        ids = topic.uniform_routing(tokens, experts, topk, device)
        assert ids.shape == (tokens, topk) and ids.dtype == torch.int64 and ids.is_contiguous()
        assert all(len(set(row)) == topk for row in ids.tolist())
        right = reference.dispatch_layout(ids, ranks, experts)
        for given, wanted in zip(topic.torch_layout(ids, experts, ranks), right, strict=True):
            assert given.dtype == wanted.dtype and torch.equal(given, wanted)


def test_a_wrong_step_is_not_timed(small, monkeypatch):
    monkeypatch.setattr(dispatch_layout, "get_dispatch_layout", lambda ids, experts, ranks, out: out)  # writes nothing
    with pytest.raises(AssertionError, match="port, .*5 tokens: the layout is wrong"):
        topic.measure_layout(topic.DEEPSEEK_V3, 5, 1e12)
