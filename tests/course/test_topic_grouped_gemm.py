"""The grouped GEMM's benchmark: other projects' kernels beside the package's own, and its table and figures."""

import re
from types import SimpleNamespace

import pytest
import torch
from bench_topics import patch_topic, record_with

from moe_numba import simulator
from moe_numba.course.bench import Stats, records
from moe_numba.course.bench.topics.grouped_gemm import measure as measuring
from moe_numba.course.bench.topics.grouped_gemm import show as topic


class Reversed:
    """A plan of a peer that stores rows in reverse; ``fault`` is added to its result."""

    def __init__(self, scaling, p, fault):
        self.expected, self.fault, self.launches = topic.expected_output(p, scaling).flip(0), fault, 0
        self.out = torch.full(self.expected.shape, float("nan"), dtype=torch.bfloat16, device=p.x.device)

    def launch(self):
        self.launches += 1
        self.out.copy_(self.expected + self.fault)

    def result(self):
        return self.out.flip(0)


def peer(name, supported=("tensor", "block", "none"), fault=0.0):
    def plan_group_gemm(scaling, p):
        return Reversed(scaling, p, fault) if scaling in supported else None

    return SimpleNamespace(NAME=name, VERSION="1.2", plan_group_gemm=plan_group_gemm)


def problem(scaling, device):
    dtype = torch.bfloat16 if scaling == "none" else torch.float8_e4m3fn
    lengths = torch.tensor([3, 0, 5], dtype=torch.int32)
    p = topic.make_problem(topic.random_weight(3, 128, 128, dtype, device), lengths)
    topic.add_block_scales([p])
    return p, lengths


def test_peers_are_checked_and_measured(device, monkeypatch, capsys):
    patch_topic(monkeypatch, measuring)
    monkeypatch.setattr(measuring, "CALL_ROWS", 8)
    monkeypatch.setattr(measuring, "GROUPS", 3)
    p, lengths = problem("block", device)
    broken = SimpleNamespace(NAME="broken", VERSION="0", plan_group_gemm=lambda scaling, p: 1 // 0)
    peers = [peer("padded"), peer("other", ["tensor"]), broken, SimpleNamespace(NAME="gate only", VERSION="0")]
    steps = {"final": lambda p: topic.expected_output(p, "block").bfloat16()}
    steps |= measuring.peer_steps(peers, "block", [p])
    assert list(steps) == ["final", "peer:padded"]
    assert capsys.readouterr().err.startswith("peer broken is left out (8 rows, block): ZeroDivisionError")
    rows = measuring.measure_steps(steps, [p], topic.row_config("down", "block", 3), lengths, "e4m3", peers)
    assert [row["step"] for row in rows] == list(steps)
    assert rows[1]["version"] == "1.2" and "version" not in rows[0]
    assert "call_us" in rows[0] and "call_us" not in rows[1]  # a plan's launch is not the peer's own call
    assert steps["peer:padded"].plans[id(p)].launches == 2  # checked, and timed
    wrong = {"final": steps["final"], **measuring.peer_steps([peer("padded", fault=1.0)], "block", [p])}
    rows = measuring.measure_steps(wrong, [p], topic.row_config("down", "block", 3), lengths, "e4m3", peers)
    assert [row["step"] for row in rows] == ["final"]
    assert re.match("peer:padded is left out, .* 8 rows: row . has relative error", capsys.readouterr().err)
    with pytest.raises(AssertionError, match="final, .* 8 rows: "):
        steps = {"final": lambda p: 2 * topic.expected_output(p, "block")}
        measuring.measure_steps(steps, [p], topic.row_config("down", "block", 3), lengths, "e4m3", peers)


@pytest.mark.skipif(not simulator.ENABLED, reason="torch has no such operation on a CPU, where it is replaced")
def test_every_size_is_measured_with_the_peers(monkeypatch):
    """Each scaling has the peers that support it, at all sizes."""
    sizes = dict(ROWS=[2], SKEWED_ROWS={"zipf": [3]}, FEW_ROWS=[4], MANY_ROWS={"one": [5]}, SIDE=128, SETS=1)
    sizes |= dict(SHAPES={"one": dict(n=128, k=128)}, FEW_GROUPS=1, GROUPS=2, MANY_GROUPS=3, CALL_ROWS=2)
    patch_topic(monkeypatch, measuring, **sizes)
    made = topic.random_weight
    monkeypatch.setattr(measuring, "random_weight", lambda *sides: made(*sides, device="cpu"))
    only_final = lambda function: lambda *args: {"final": function(*args)["final"]}
    monkeypatch.setattr(measuring, "_steps", only_final(measuring._steps))
    monkeypatch.setattr(measuring, "_bf16_steps", only_final(measuring._bf16_steps))
    monkeypatch.setattr(measuring, "_measure_dense", list)
    monkeypatch.setattr(measuring, "lower_bound", lambda *_: (1.0, 1, 1))
    peers = peer("fp8", ["tensor", "block"]), peer("bf16", ["none"]), peer("w4", ["mxfp4"])
    rows = measuring.measure(peers, False)
    found = {(r["config"]["num_groups"], r["config"]["routing"], r["size"]["rows"]) for r in rows}
    assert found == {(2, "uniform", 2), (2, "zipf", 3), (1, "uniform", 4), (3, "uniform", 5)}
    packed = [row for row in rows if row["config"]["scaling"] == "mxfp4"]
    assert [(row["step"], row["size"]["rows"]) for row in packed] == [("final", 2), ("peer:w4", 2)]
    rows = [row for row in rows if row not in packed]
    for row in rows:
        own = "peer:bf16" if row["config"]["scaling"] == "none" else "peer:fp8"
        assert row["step"] in ("final", own)
    assert sum(row["step"] != "final" for row in rows) * 2 == len(rows)


def made_up_record():
    """Times of the package, torch and two peers: kernel time is 100 us plus the number of rows, peers 10 us less."""
    rows = []
    for scaling, steps in (
        ("tensor", ["final", "torch", "peer:hpc-ops"]),
        ("block", ["final", "peer:deepgemm-masked", "peer:hpc-ops"]),
        ("none", ["final", "torch"]),
    ):
        for shape in topic.SHAPES:
            for groups, routing, count, _ in topic.TABLE_ROWS:
                for step in steps:
                    us = 100.0 + count - 10 * step.startswith("peer") + 20 * (step == "torch")
                    rows.append(
                        records.row(
                            step,
                            config=topic.row_config(shape, scaling, groups, routing),
                            size={"rows": count},
                            dtype="bf16" if scaling == "none" else "e4m3",
                            kernel=Stats(us, us - 1, us + 1),
                            floor_us=50.0,
                            bytes=10**6,
                            flops=10**9,
                        )
                    )
    record = record_with("grouped_gemm", rows)
    assert records.invalid(record) == []
    return record


def test_table_and_figures_show_the_peers():
    record = made_up_record()
    lines = topic.readme_table(record).splitlines()
    assert lines[2] == "| N x K, rows | moe_numba | hpc-ops | torch | speed of light |"
    assert lines[4] == "| 4096 x 7168, 32 | 132 | **122** | 152 | 50 |"
    assert "| 7168 x 2048, 8192, by Zipf's law | 8292 | **8282** | 8312 | 50 |" in lines
    assert "| 7168 x 2048, 8192 in 8 groups | 8292 | **8282** | 8312 | 50 |" in lines
    assert "| N x K, rows | moe_numba | deepgemm-masked | hpc-ops | speed of light |" in lines
    assert "| N x K, rows | moe_numba | torch | speed of light |" in lines
    assert lines[-1].endswith("Layouts that other projects' kernels need are made beforehand.")
    labels = {
        name: {text.get_text() for axes in figure.axes for text in axes.texts} | set(legend_texts(figure))
        for name, figure in topic.figures(record).items()
    }
    assert any("deepgemm-masked" in text for text in labels["sweep-down-block"])
    assert not any("deepgemm-masked" in text for text in labels["sweep-down-tensor"])
    without = record | {"rows": [row for row in record["rows"] if row["step"] == "final"]}
    assert "| 4096 x 7168, 32 | 132 | 50 |" in topic.readme_table(without)  # nothing to compare with: not bold


def legend_texts(figure):
    """Yield the texts of the figure's legends."""
    for axes in figure.axes:
        if legend := axes.get_legend():
            yield from (text.get_text() for text in legend.get_texts())
