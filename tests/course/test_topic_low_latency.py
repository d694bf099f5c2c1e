"""Benchmark topic low_latency: figures and tables from rows, and which groups are measured."""

from types import SimpleNamespace

import pytest
import torch

from moe_numba.course.bench import Stats, records, topic
from moe_numba.course.bench.topics.low_latency import measure as low_latency_measure
from moe_numba.course.bench.topics.low_latency.measure_peers import Problem, peer_pairs
from moe_numba.expert_parallel.ranks.local_group import LocalGroup

low_latency = topic("low_latency")


def rows(ranks):
    config = dict(ranks=ranks, num_experts=256, topk=8, hidden=7168)
    for tokens in low_latency_measure.TOKENS:
        for i, (step, dtype) in enumerate(low_latency.STEPS.values()):
            if not low_latency.is_measured(step, ranks):
                continue
            kernel, call = Stats(10.0 * ranks + i, 1, 99), Stats(30.0 + i, 1, 99)
            loop = {"loop_us": records.times(Stats(12.0 + i, 1, 99))} if ranks < 4 else {}
            yield records.row(
                step, config=config, size={"tokens": tokens}, dtype=dtype, kernel=kernel, call=call, **loop
            )


@pytest.fixture
def record():
    known = {"gpu": "NVIDIA H200", "driver": "1", "commit": "0" * 7, "date": "2026-11-22", "versions": {}}
    return known | {"topic": "low_latency", "rows": [*rows(2), *rows(4)]}


def test_the_table_has_a_line_per_group_and_number_of_tokens(record):
    lines = low_latency.readme_table(record).splitlines()
    assert lines[0].startswith("| GPUs, tokens | packed by expert | FP8 dispatch | in slots |")
    assert lines[2] == "| 2, 1 | **20.0** | 21.0 | 22.0 | 23.0 | 24.0 | 25.0 | 26.0 | 30 | 12 |"
    assert lines[-3] == "| 4, 256 | **40.0** | 41.0 | 42.0 | 43.0 | 44.0 | 45.0 | 46.0 | 30 |  |"
    assert "commit 0000000" in lines[-1]


def test_the_table_omits_incomplete_lines(record):
    record["rows"] = [row for row in record["rows"] if row["size"]["tokens"] != 8 or row["step"] != "in slots"]
    assert "| 2, 8 |" not in low_latency.readme_table(record)


def test_one_rank_has_no_peers_in_the_table(record):
    record["rows"] = [*rows(1), *rows(2)]
    lines = low_latency.readme_table(record).splitlines()
    assert lines[2] == "| 1, 1 | **10.0** | 11.0 | 12.0 | 13.0 |  |  |  | 30 | 12 |"
    assert lines[7].startswith("| 2, 1 | **20.0** |") and "nothing crosses NVLink" in lines[-1]


def test_the_table_shows_peers(record):
    for dtype in ("bf16", "e4m3"):
        wanted = dict(config={"ranks": 2}, size={"tokens": 8}, dtype=dtype)
        record["rows"] += [records.select(record, **wanted)[0] | {"step": "peer:other", "kernel_us": {"median": 9.0}}]
    lines = low_latency.readme_table(record).splitlines()
    assert "| other | other, FP8 | one call | in a loop |" in lines[0]
    assert lines[3].endswith("| **9.0** | **9.0** | 30 | 12 |") and lines[2].endswith("|  |  | 30 | 12 |")


@pytest.mark.parametrize("ranks, title", [(4, "4 GPUs: "), (1, "One rank, its own rows only: ")])
def test_the_figure_shows_the_largest_group(record, ranks, title):
    record["rows"] = list(rows(1)) if ranks == 1 else record["rows"]
    figure = low_latency.figures(record)["pair"]
    assert list(figure.axes[0].lines[0].get_ydata()) == [10.0 * ranks] * len(low_latency_measure.TOKENS)
    assert any(text.get_text().startswith(title) for text in figure.texts)


def test_measured_steps_are_those_of_the_table():
    measured = {*low_latency_measure.LOW_LATENCY, ("normal, graph", "bf16")}
    assert {key for key in low_latency.STEPS.values() if not key[0].startswith("peer:")} <= measured


def test_rows_need_enough_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert low_latency.measure([], True) == [] and low_latency.out_of_reach({"config": {"ranks": 1}})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert low_latency.out_of_reach({"config": {"ranks": 2}}) and not low_latency.out_of_reach({"config": {"ranks": 1}})


class Peer:
    """A peer with two pairs, one of whose sums are wrong on one rank."""

    NAME, VERSION = "other", "1"

    def plan_low_latency(self, problem):
        """Return the pairs."""
        sums = problem.x.float() * problem.topk_weights.sum(1, keepdim=True)
        wrong = sums * (1.5 if problem.transport.rank == 1 else 1)
        return {
            ("wrong", "bf16"): (None, lambda: wrong.bfloat16(), True),
            ("right", "bf16"): (None, lambda: sums.bfloat16(), True),
        }


class Failing:
    """A peer that cannot plan."""

    NAME, VERSION = "failing", "1"

    def plan_low_latency(self, problem):
        """Raise an error on one rank."""
        return {} if problem.transport.rank else 1 // 0


def test_only_peers_with_right_sums_are_measured(capsys):
    def work(transport):
        bench = low_latency_measure.LowLatencyBench.__new__(low_latency_measure.LowLatencyBench)
        bench.peers, bench.versions, bench.ranks = [Failing(), Peer()], {}, 2
        bench.buffer = SimpleNamespace(transport=transport)
        x, weights = torch.randn(5, 8).bfloat16(), torch.rand(5, 2)
        problem = Problem(transport, x, torch.zeros(5, 2).long(), weights, 4)
        assert set(peer_pairs(bench, problem)) == {("peer:other right", "bf16")}
        assert bench.versions == {"peer:other right": "1"}

    LocalGroup(2).run(work)
    reported = capsys.readouterr().err
    assert "peer failing is left out: ZeroDivisionError" in reported
    assert "peer other wrong, bf16, 5 tokens is left out: AssertionError" in reported


def test_ranks_that_a_peer_ends_are_measured_without_it(monkeypatch, capsys):
    def spawn(work, arguments, nprocs):
        *_, files, found = arguments
        if files:
            raise RuntimeError("process 1 terminated")
        found.write_text('["row"]')

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.multiprocessing.spawn", spawn)
    monkeypatch.setattr(low_latency_measure, "compile_ahead", lambda kernels: None)
    peer = SimpleNamespace(__file__="peer.py", plan_low_latency=None)
    assert low_latency_measure.measure([2], peers=[peer]) == ["row"]
    assert "2 ranks are measured again, without peers: process 1 terminated" in capsys.readouterr().err
