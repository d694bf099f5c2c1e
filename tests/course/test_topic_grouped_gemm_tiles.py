"""The choice of the grouped GEMM's tile configurations: candidates, measurement, table, and a wrong table."""

from pathlib import Path

import pytest
from bench_topics import patch_topic, record_with

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.topics.grouped_gemm_tiles import measure as measuring
from moe_numba.course.bench.topics.grouped_gemm_tiles import show as topic
from moe_numba.course.bench.topics.grouped_gemm_tiles import tune as tuner
from moe_numba.course.bench.topics.grouped_gemm_tiles.tune import Problem
from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig, BlockScaledLayout, check_block_scaled_config
from moe_numba.grouped_gemm.call import heuristics
from moe_numba.grouped_gemm.call.arguments import GemmShape
from moe_numba.grouped_gemm.w4.config import W4Config
from moe_numba.grouped_gemm.w4.layout import W4Layout, check_w4_config
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, SharedMemoryLayout, check_config, select_config
from moe_numba.runtime import device as devices

ROOT = Path(__file__).parents[2]
BOUND = 1.03  # a choice is at most 3 % slower than the best
CHECKS = {
    GemmConfig: (SharedMemoryLayout, check_config),
    BlockScaledConfig: (BlockScaledLayout, check_block_scaled_config),
    W4Config: (W4Layout, check_w4_config),
}


@pytest.mark.parametrize("kind", tuner.KINDS)
def test_candidates_fit_and_include_the_rules(kind, monkeypatch):
    monkeypatch.setattr(heuristics, "TABLE", {})
    heuristics.measured_config.cache_clear()
    found = tuner.candidates(kind)
    assert len(found) >= 7 and len(set(found.values())) == len(found)
    for config in found.values():
        layout, check = CHECKS[type(config)]
        check(config)
        assert layout(config).bytes <= devices.H200.shared_bytes
    for average in (1, 16, 64, 100, 128, 1024):
        choice = measuring.present_choice(Problem(kind, 4096, 7168, 32, average))
        assert found[tuner.name_of(choice)] == choice


@pytest.mark.skipif(not simulator.ENABLED, reason="on a GPU the benchmark itself measures")
@pytest.mark.parametrize("kind", ["block", "mxfp4", "tensor, silu"])
def test_correct_candidates_are_measured(kind, monkeypatch, capsys):
    patch_topic(monkeypatch, measuring, ROUTINGS=["uniform", "zipf"], lower_bound=lambda *_: (1.0, 1, 1))
    problem, found = Problem(kind, 256, 128, 2, 3), tuner.candidates(kind)
    small = {name: found[name] for name in sorted(found, key=lambda name: found[name].block_m)[:2]}
    rows = measuring.measure_problem(problem, small, measuring.Operands("cpu"))
    assert [row["config"]["routing"] for row in rows] == ["uniform", "zipf"] and capsys.readouterr().out == ""
    assert all(tuner.problem_of(row) == problem and set(small) <= set(row["tiles"]) for row in rows)
    record = record_with("grouped_gemm_tiles", rows)
    assert records.invalid(record) == [] and all(topic.figures(record).values())
    assert f"| {kind} | 1 | " in topic.readme_table(record)


@pytest.mark.skipif(not simulator.ENABLED, reason="on a GPU the benchmark itself measures")
def test_wrong_candidates_are_left_out(monkeypatch, capsys):
    patch_topic(monkeypatch, measuring, ROUTINGS=["uniform", "zipf"], lower_bound=lambda *_: (1.0, 1, 1))
    problem, found, calls_of = Problem("none", 128, 128, 2, 3), tuner.candidates("none"), measuring.calls_of

    def wrong_calls(case, config):
        def wrong():
            calls_of(case, config)[0]()
            case.out[-wrong_rows:] *= 1.02

        return [wrong] if config == wrong_config else calls_of(case, config)

    wrong_config, wrong_rows = found["16, 12 stages"], 1  # not of the largest group, whose rows have a reference
    monkeypatch.setattr(measuring, "calls_of", wrong_calls)
    names = "16, 12 stages", "16, cluster, 12 stages"
    rows = measuring.measure_problem(problem, {name: found[name] for name in names}, measuring.Operands("cpu"))
    assert names[0] not in rows[0]["tiles"] and names[1] in rows[0]["tiles"]
    assert f"{names[0]} is left out: row" in capsys.readouterr().out
    wrong_config, wrong_rows = measuring.present_choice(problem), 6
    assert measuring.measure_problem(problem, {}, measuring.Operands("cpu")) == []


def test_the_most_important_problems_come_first():
    problems = list(measuring.ordered_problems())
    assert len(set(problems)) == len(problems) and all(p.groups * p.average <= 1 << 16 for p in problems)
    assert [p.kind for p in problems[:3]] == ["tensor", "block", "none"] and {p.groups for p in problems[:3]} == {1}
    assert {(p.n, p.k, p.groups) for p in problems[3:59]} == {(4096, 7168, 32), (7168, 2048, 32)}
    assert {p.kind for p in problems[3:59]} == {"tensor", "block", "none", "mxfp4"}


# A made-up record: tiles A, B and C of a kind, by problem and routing


A, B, C = "32/16, cluster, 10 stages", "64/32, cluster, 8 stages", "128/96/64, cluster, 6 stages"
TIMES = {  # (n, k, groups, average): times of A, B and C in microseconds for each routing
    (4096, 7168, 32, 1): {"uniform": (100, 100.4, 150), "zipf": (100, 100, 140)},
    (4096, 7168, 32, 16): {"uniform": (100, 101.5, 101.5), "zipf": (100, 100, 104), "one": (200, 150, 100)},
    (4096, 7168, 32, 128): {"uniform": (180, 150, 100), "zipf": (130, 100, 110)},
    (2048, 768, 8, 16): {"uniform": (10, 10.04, 12), "zipf": (10, 10.04, 12)},
}


def made_up_rows(times=TIMES, tile=B):
    rows = []
    for (n, k, groups, average), by_routing in times.items():
        for routing, us in by_routing.items():
            config = dict(num_groups=groups, n=n, k=k, scaling="tensor", routing=routing)
            stats = measuring.records.row("final", kernel=None)
            stats |= {"kernel_us": {"median": us[1], "p10": us[1], "p90": us[1]}}
            rows.append(
                stats
                | dict(config=config, size={"rows": groups * average}, dtype="e4m3", tile=tile)
                | dict(tiles=dict(zip((A, B, C), us, strict=True)))
            )
    return rows


def use_table(monkeypatch, text):
    """Use a table's text as the package's."""
    table: dict = {}
    exec(text, table)
    monkeypatch.setattr(heuristics, "TABLE", table["TABLE"])
    monkeypatch.setattr(heuristics, "CONFIGS", table["CONFIGS"])
    heuristics.measured_config.cache_clear()


@pytest.fixture(autouse=True)
def forget_choices():
    """Forget choices from tables of tests."""
    yield
    heuristics.measured_config.cache_clear()


def too_slow(rows):
    """Return the problems of a record for which the package's table has a configuration that is too slow."""
    return [problem for problem, ratio in tuner.excess(rows).items() if ratio > BOUND]


def test_the_table_has_few_configurations_that_are_near_the_best(monkeypatch):
    rows = made_up_rows()
    chosen = tuner.choose(rows)
    assert {problem[1:]: name for problem, name in chosen.items()} == {
        (4096, 7168, 32, 1): B,  # A is 0.4 % faster, but B serves more problems
        (4096, 7168, 32, 16): B,  # 1.5 % slower than A if rows are spread, but faster in one group; C is 4 % slower
        (4096, 7168, 32, 128): C,  # 10 % slower than the best in its worst routing, B 50 %
        (2048, 768, 8, 16): B,
    }
    use_table(monkeypatch, tuner.table_text({"toy": rows}))
    assert too_slow(rows) == [] and max(tuner.excess(rows).values()) <= tuner.TOLERANCE


def test_a_table_with_one_altered_entry_is_rejected(monkeypatch):
    rows = made_up_rows()
    text = tuner.table_text({"toy": rows})
    right = "(4096, 7168, 32): {1: 1, 16: 1, 128: 0}"
    assert right in text
    use_table(monkeypatch, text.replace(right, right.replace("128: 0", "128: 1")))
    assert too_slow(rows) == [Problem("tensor", 4096, 7168, 32, 128)]


def test_the_nearest_problem_is_used_and_beyond_the_table_the_rules(monkeypatch):
    use_table(monkeypatch, tuner.table_text({"toy": made_up_rows()}))
    name = lambda *sizes: tuner.name_of(heuristics.measured_config("tensor", *sizes))
    assert name(4096, 7168, 32, 15) == name(4096, 7168, 32, 19) == B and name(4096, 7168, 32, 150) == C
    assert name(5000, 6000, 40, 128) == C and name(4096, 7168, 32, 0) == B
    for sizes in ((4096, 7168, 32, 20), (4096, 7168, 32, 64), (6000, 7168, 32, 16), (4096, 7168, 64, 16)):
        assert heuristics.measured_config("tensor", *sizes) is None
    assert heuristics.measured_config("block", 4096, 7168, 32, 16) is None
    shape = GemmShape("tensor", "masked", False, 128, 32, 4096, 128, 4096, 7168)
    measured = heuristics.select_wgmma_config(shape, True, True, 132)
    assert measured.row_layout == "masked" and tuner.name_of(measured) == C
    other = heuristics.select_wgmma_config(shape, False, False, 132)
    assert other == select_config("tensor", "masked", 128)


def test_of_each_problem_the_first_record_counts():
    other = {(4096, 7168, 32, 1): {"uniform": (100, 200, 300)}, (2048, 768, 32, 4): {"uniform": (1, 2, 3)}}
    found = tuner.first_rows({"a": made_up_rows(), "b": made_up_rows(other)})
    assert len(found) == len(made_up_rows()) + 1 and tuner.problem_of(found[-1]).average == 4


def test_the_packages_table_is_near_the_best_of_its_records():
    """It is generated from the records; whoever measures again generates it again."""
    by_gpu = tuner.recorded_rows()
    path = ROOT / "moe_numba" / "grouped_gemm" / "call" / "config_table.py"
    assert path.read_text() == tuner.table_text(by_gpu)
    assert too_slow(tuner.first_rows(by_gpu)) == []
