"""The model of one kernel for a layer on several GPUs: its bounds, and what changes its times."""

import pytest
from bench_topics import record_with

from moe_numba.course.bench import Stats, records
from moe_numba.course.lessons.one_kernel import model

FAST = model.Rates(
    gemms={(4096, 7168): {0: 100.0, 32768: 1700.0}, (7168, 2048): {0: 50.0, 32768: 900.0}},
    parts={"group_by_expert": 10.0},
    wire=350e3,
    sum_all=3800e3,
    sum_warp=1000e3,
    one_way_us=1.0,
)


@pytest.mark.parametrize("ranks", model.RANKS)
@pytest.mark.parametrize("tokens", model.TOKENS)
def test_nothing_ends_before_what_it_needs(ranks, tokens):
    of = model.rates()
    line, gemms = model.one_kernel(of, ranks, tokens), model.gemms_us(of, tokens)
    assert 0 < line.first_rows < line.first_gemm < line.second_gemm <= line.rows_sent < line.sums
    assert line.second_gemm >= line.first_rows + sum(gemms) - 1e-6
    sent = model.bytes_of(ranks, tokens)
    assert line.rows_sent >= line.first_gemm + sent.combine_per_expert / of.wire * 31 / 32  # but the first expert
    assert line.first_gemm >= sent.dispatch_per_expert / of.wire


def test_bytes():
    sent = model.bytes_of(2, 4096)
    assert sent.dispatch_per_expert == 4096 * 8 / 2 * (7168 + 4 * 56)
    assert sent.dispatch < 4096 / 2 * 2 * model.FP8_ROW  # a token reaches fewer than 2 of 2 ranks on average
    assert sent.combine / sent.dispatch == pytest.approx(model.BF16_ROW / model.FP8_ROW)


def test_a_slow_link_sets_the_end():
    fast, slow = (model.one_kernel(FAST._replace(wire=wire), 8, 4096) for wire in (350e3, 50e3))
    sent = model.bytes_of(8, 4096)
    assert slow.rows_sent == pytest.approx(slow.first_gemm + sent.combine_per_expert / 50e3, rel=0.02)
    assert slow.sums > 3 * fast.sums and fast.second_gemm < fast.sums < 1.3 * fast.second_gemm


def test_slower_gemms_delay_the_end_by_as_much():
    right, slow = (model.one_kernel(FAST, 2, 4096, slower=slower) for slower in (0, 0.1))
    assert slow.second_gemm - right.second_gemm == pytest.approx(0.1 * sum(model.gemms_us(FAST, 4096)), rel=0.02)


def test_without_a_warp_that_adds_up_all_sums_come_last():
    alone = model.one_kernel(FAST._replace(sum_warp=0.0), 2, 4096)
    assert alone.sums == pytest.approx(alone.rows_sent + model.bytes_of(2, 4096).sum / 3800e3 + 1, rel=1e-6)
    assert model.one_kernel(FAST, 2, 4096).sums < alone.sums


@pytest.mark.parametrize("rows, us", [(8, 2.0), (9, 2.5), (12, 4.0), (16, 8.0)])
def test_interpolation(rows, us):
    assert model.interpolate({2: 0.0, 8: 2.0, 10: 3.0, 12: 4.0, 13: 5.0}, rows) == pytest.approx(us)


def test_the_page_has_a_line_for_each_size_and_recorded_times_where_they_are():
    lines = model.table().splitlines()
    assert len(lines) == 2 + len(model.RANKS) * len(model.TOKENS)
    assert model.chain_us(2, 4096) and model.chain_us(3, 4096) is None
    assert "On 8 GPUs the first expert's rows are there after" in model.text()


def test_measured_times():
    config, size = dict(ranks=2, num_experts=64), dict(tokens=512)
    us = {
        "one kernel": 550.0,
        "launches by expert": 700.0,
        "part: GEMMs by expert": 500.0,
        "final": 660.0,
        "low latency": 600.0,
    }
    row = lambda step, us: records.row(step, config=config, size=size, dtype="e4m3", kernel=Stats(us, us, us))
    record = record_with("moe_layer_ranks", [row(step, time) for step, time in us.items()])
    cells = [cell.strip() for cell in model.measured(record).splitlines()[2].split("|")[1:-1]]
    assert cells == ["2", "512", "550", "700", "600 (low latency)", "500", "1.10", "0.92"]
    assert model.measured(record_with("moe_layer_ranks", [row("final", 660.0)])) == "No record has the kernel yet."


def test_tiles_round_robin_give_all_full_tiles_to_half_of_the_ctas(monkeypatch):
    """8 experts with 192 rows each: full and half tiles alternate, on 2 CTAs."""
    sizes = dict(EXPERTS=8, CTAS=2, HIDDEN=256, INTERMEDIATE=128)
    for name, value in sizes.items():
        monkeypatch.setattr(model, name, value)
    round_robin, when_ready = model.balance(192)
    assert round_robin == pytest.approx(2 / 1.5) and when_ready == 1
    monkeypatch.setattr(model, "TILE_ROWS", 64)  # tiles that are equal
    assert model.balance(192) == (1, 1)


@pytest.mark.parametrize("tokens", model.TOKENS)
def test_tiles_when_ready_are_not_worse(tokens):
    round_robin, when_ready = model.balance(tokens)
    assert 1 <= when_ready <= round_robin and when_ready < 1.05
