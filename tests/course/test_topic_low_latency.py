"""Benchmark topic low_latency: figures and tables from rows, and which groups are measured."""

import pytest

from moe_numba.course.bench import Stats, records, topic
from moe_numba.course.bench.topics import low_latency_measure

low_latency = topic("low_latency")


def rows(ranks):
    config = dict(ranks=ranks, num_experts=256, topk=8, hidden=7168)
    for tokens in low_latency_measure.TOKENS:
        for i, (step, dtype) in enumerate(low_latency.STEPS.values()):
            if not low_latency.is_measured(step, ranks):
                continue
            kernel, call = Stats(10.0 * ranks + i, 1, 99), Stats(30.0 + i, 1, 99)
            yield records.row(step, config=config, size={"tokens": tokens}, dtype=dtype, kernel=kernel, call=call)


@pytest.fixture
def record():
    known = {"gpu": "NVIDIA H200", "driver": "1", "commit": "0" * 7, "date": "2026-11-22", "versions": {}}
    return known | {"topic": "low_latency", "rows": [*rows(2), *rows(4)]}


def test_the_table_has_a_line_per_group_and_number_of_tokens(record):
    lines = low_latency.readme_table(record).splitlines()
    assert lines[0].startswith("| GPUs, tokens | packed by expert | FP8 dispatch | in slots |")
    assert lines[2] == "| 2, 1 | **20.0** | 21.0 | 22.0 | 23.0 | 24.0 | 25.0 | 26.0 | 30 |"
    assert lines[-3] == "| 4, 256 | **40.0** | 41.0 | 42.0 | 43.0 | 44.0 | 45.0 | 46.0 | 30 |"
    assert "commit 0000000" in lines[-1]


def test_the_table_omits_incomplete_lines(record):
    record["rows"] = [row for row in record["rows"] if row["size"]["tokens"] != 8 or row["step"] != "in slots"]
    assert "| 2, 8 |" not in low_latency.readme_table(record)


def test_one_rank_has_no_peers_in_the_table(record):
    record["rows"] = [*rows(1), *rows(2)]
    lines = low_latency.readme_table(record).splitlines()
    assert lines[2] == "| 1, 1 | **10.0** | 11.0 | 12.0 | 13.0 |  |  |  | 30 |"
    assert lines[7].startswith("| 2, 1 | **20.0** |") and "nothing crosses NVLink" in lines[-1]


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
