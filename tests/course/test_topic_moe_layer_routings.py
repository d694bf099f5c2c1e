"""Benchmark topic moe_layer_routings: experts of each routing, checks before timing, rows, table and figures."""

from types import SimpleNamespace

import pytest
import torch
from bench_topics import patch_topic, record_of, record_with
from helpers.figures import misplaced

from moe_numba.course.bench import records, topic
from moe_numba.moe_layer import reference
from moe_numba.moe_layer.compile_layers import Layer

routings = topic("moe_layer_routings")
LAYERS = (
    Layer("small bf16", 4, 128, 64, "bf16", (1, 3), topk=2),
    Layer("small MXFP4", 4, 128, 64, "mxfp4", (3,), topk=2, activation="swigluoai"),
)


def peer(compute=reference.fused_experts):
    """Return a peer for bfloat16 that computes by the reference, or by another function."""
    plan = lambda scaling, p: lambda: compute(*p[:7], activation=p.activation)
    return SimpleNamespace(
        NAME="toy", VERSION="1", serves_experts=lambda scaling, problem: scaling == "none", plan_experts=plan
    )


@pytest.fixture
def small(monkeypatch, device):
    patch_topic(monkeypatch, routings, LAYERS=LAYERS, SETS=2)
    measure = routings.measure
    monkeypatch.setattr(routings, "measure", lambda peers, quick: measure(peers or [peer()], quick, str(device)))


def test_rows_table_and_figures(small):
    record = record_of(routings, "moe_layer_routings")
    assert len(record["rows"]) == 3 * (2 * 2 + 1)  # of each routing: two steps of two sizes, and one without a peer
    for row in record["rows"]:
        assert row["config"]["routing"] in routings.ROUTINGS and row["floor_us"] > 0
    table, _, text = routings.readme_table(record).partition("\n\n")
    assert table.splitlines()[-1] == "| small MXFP4 |  |  |  |" and "toy (1)" in text
    assert all(not misplaced(figure) for figure in routings.figures(record).values())
    assert list(routings.figures(record)) == list(routings.ROUTINGS)


def test_ratios():
    rows = [
        records.row(step, config={"model": "m", "routing": "same"}, size={"tokens": tokens})
        | {"kernel_us": {"median": us}, "version": "1"}
        for tokens, step, us in [
            (1, "final", 10),
            (1, "peer:a", 40),
            (1, "peer:b", 20),
            (2, "final", 4),
            (2, "peer:a", 2),
        ]
    ]
    record = record_with("moe_layer_routings", rows)
    assert routings.ratios(record, "m", "same") == {1: 2.0, 2: 0.5}
    assert "1.00 (least 0.50, 2 tokens)" in routings.readme_table(record)


def test_a_wrong_peer_is_not_timed(small, capsys):
    rows = routings.measure([peer(lambda *given, **options: 2 * reference.fused_experts(*given, **options))], False)
    assert {row["step"] for row in rows} == {"final"} and "toy is left out" in capsys.readouterr().err


@pytest.mark.parametrize("routing", routings.ROUTINGS)
def test_experts_of_a_routing(routing):
    layer = Layer("", 64, 128, 64, "bf16", (), topk=4)
    ids, other = (routings.draw_experts(layer, 256, routing, seed, "cpu") for seed in range(2))
    counts = torch.bincount(ids.flatten(), minlength=64)
    assert ids.dtype == torch.int32 and all(len(set(row)) == 4 for row in ids.tolist()) and not torch.equal(ids, other)
    if routing == "same":
        assert sorted(counts.tolist())[-4:] == [256] * 4
    else:
        assert (counts.max() > 4 * counts.float().mean()) == (routing == "zipf")
