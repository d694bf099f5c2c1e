"""The topic of exchanges: what its figures and tables make of rows; the rows themselves come from several GPUs."""

import pytest

from moe_numba.bench import Stats, across_ranks, records, topic

exchange = topic("exchange")


def rows(ranks, rate):
    config = dict(ranks=ranks, num_experts=256, topk=8, hidden=7168)

    def row(step, us, gbps=None, tokens=across_ranks.TOKENS, **more):
        more["config"] = config | ({"num_sms": sms} if (sms := more.pop("sms", None)) else {})
        return records.row(step, size={"tokens": tokens}, kernel=Stats(us, us, us), wire_gbps=gbps, **more)

    for sms in across_ranks.SMS:
        for i, wanted in enumerate(exchange.EXCHANGES.values()):
            yield row("final", 100 * ranks + sms + i, rate + sms + i, sms=sms, **wanted)
    yield row("final, with notify", 100 * ranks + 99, rate, sms=24, operation="dispatch", dtype="bf16")
    for blocks in across_ranks.BLOCKS_OF_PUSH:
        yield row("plain push", 50, rate + blocks, sms=blocks, operation="push", dtype="bf16")
    for step in exchange.OTHER_WAYS:
        yield row(step, 500 + ranks, rate - 50, operation="dispatch", dtype="bf16")
    for tokens in across_ranks.DECODE_TOKENS:
        for i, step in enumerate(exchange.FEW.values()):
            yield row(step, 10 * tokens + i, tokens=tokens, sms=24, operation="there and back", dtype="bf16")


@pytest.fixture
def record():
    known = {"gpu": "NVIDIA H200", "driver": "1", "commit": "0" * 7, "date": "2026-11-22", "versions": {}}
    return known | {"rows": [*rows(2, 200), *rows(4, 250)]}


def test_the_table_has_a_column_for_each_number_of_gpus(record):
    lines = exchange.readme_table(record).splitlines()
    assert lines[0] == "| 4096 tokens each | 2 GPUs | 4 GPUs |"
    assert lines[2] == "| dispatch, bfloat16, 24 multiprocessors | 224 us, 224 GB/s | 424 us, 274 GB/s |"
    assert lines[4] == "| combine, bfloat16, 24 multiprocessors | 226 us, 226 GB/s | 426 us, 276 GB/s |"
    assert lines[5].endswith("| 299 us, 200 GB/s | 499 us, 250 GB/s |"), "with counts"
    assert lines[6] == "| NCCL all_to_all_single, bfloat16 | 502 us, 150 GB/s | 504 us, 200 GB/s |"
    assert lines[8] == "| plain push, 132 multiprocessors | 50 us, 332 GB/s | 50 us, 382 GB/s |"
    assert lines[-3] == "| 128 | 1280 | 1281 | 1282 | 1283 |"


def test_figures_show_the_largest_group(record):
    figures = exchange.figures(record)
    assert set(figures) == {"bandwidth", "few"}
    dispatch = figures["bandwidth"].axes[0].lines[0]
    assert list(dispatch.get_xdata()) == list(across_ranks.SMS)
    assert dispatch.get_ydata()[list(across_ranks.SMS).index(24)] == 274, "of four GPUs"


def test_no_gpu_no_rows(monkeypatch):
    monkeypatch.setattr(across_ranks, "_measure_ranks", lambda ranks, quick: [ranks])
    for gpus, measured in ((1, []), (2, [2]), (8, [2, 4, 8])):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert exchange.measure([], True) == measured
