"""Benchmark topic older_gpus: processes, the checks before timing, rows, figure, table and README."""

from functools import partial

import pytest
import torch
from bench_topics import patch_topic, record_with
from helpers.figures import marks, misplaced

from moe_numba import simulator
from moe_numba.course.bench import Stats, records, topic
from moe_numba.course.bench.topics.dispatch_combine import measure as dispatch_combine_measure
from moe_numba.course.bench.topics.dispatch_combine import show as dispatch_combine
from moe_numba.course.bench.topics.older_gpus import measure as older_gpus_measure
from moe_numba.course.pages import readme

older_gpus = topic("older_gpus")
simulated = pytest.mark.skipif(not simulator.ENABLED, reason="a GPU has one compute capability")
SMALL = older_gpus_measure.Sizes(side=64, groups=2, n=64, k=64, rows=(1, 3))


# Processes


def test_a_process_has_its_own_compute_capability_and_arguments():
    for arch, path in (((8, 0), "16-byte loads and stores instead of TMA"), ((9, 0), "TMA bulk copies")):
        found = older_gpus_measure.in_process(arch, older_gpus_measure.provenance, "dispatch and combine")
        name = "{}.{}".format(*arch)
        assert found == [{"capability": name}, path, f"MOE_NUMBA_ARCH={name.replace('.', '')}"]


@pytest.mark.parametrize(
    "function, arguments, message",
    [
        ("measure_gemm", (60, 1, 64, 64, [1]), "measure_gemm with MOE_NUMBA_ARCH=80 .* exit code 1:.*n is 60; it must"),
        ("compile_jobs", ([],), "compile_jobs with MOE_NUMBA_ARCH=80 returned nothing, exit code 0"),
    ],
)
def test_a_process_that_fails_or_returns_no_rows_raises(function, arguments, message):
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        older_gpus_measure.in_process((8, 0), getattr(older_gpus_measure, function), *arguments)


@simulated
def test_kernels_for_an_older_gpu_are_measured_in_a_process():
    rows = older_gpus_measure.in_process((8, 0), older_gpus_measure.measure_gemm, 64, 1, 64, 64, [1])
    paths = {(row["step"], row.get("path"), row["config"].get("capability")) for row in rows}
    own, by_torch = ("mma.sync and cp.async", "8.0"), (None, None)
    dense = {(step + how, *path) for step, path in (("final", own), ("torch.mm", by_torch)) for how in ("", ", alone")}
    assert paths == dense and len(rows) == 4 + 3


@pytest.fixture
def processes(monkeypatch):
    """Collect the calls of `in_process` instead of starting processes."""
    calls = []

    def in_process(capability, function, *arguments):
        calls.append((capability, function.__name__, *arguments))
        return [capability, function.__name__]

    monkeypatch.setattr(older_gpus_measure, "in_process", in_process)
    return calls


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("own", [(9, 0), (8, 0)])
@pytest.mark.parametrize("quick", [False, True])
def test_each_capability_is_measured_in_its_own_process(processes, monkeypatch, gpus, own, quick):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: own)
    rows = older_gpus.measure([], quick)
    each_rows = older_gpus.QUICK_ROWS if quick else (1, 16, 64, 256)
    functions = [("measure_gemm", 8192, 32, 4096, 7168, each_rows), ("measure_exchange",)][:gpus]
    wanted = [(arch, *function) for arch in sorted({(8, 0), own}) for function in functions]
    assert [call for call in processes if call[1] != "compile_jobs"] == wanted
    assert rows == [part for arch, name, *_ in wanted for part in (arch, name)]
    jobs = [(arch, *job) for arch, name, *rest in processes if name == "compile_jobs" for job in rest[0]]
    assert {arch for arch, *_ in jobs} == {(8, 0), own} and len(jobs) == len(set(jobs))
    averages = {job[3] for job in jobs if job[1:3] == ("warm_up_gemm", "none")}
    assert averages == {8192, *each_rows}, "of the dense GEMM too"


def test_jobs_compile_the_kernels_by_small_calls(monkeypatch):
    averages = []
    monkeypatch.setattr(older_gpus_measure, "group_gemm", lambda scaling, p: averages.append((scaling, p.average)))
    jobs = older_gpus_measure.kernel_jobs(SMALL)
    assert older_gpus_measure.compile_jobs(jobs) == jobs
    assert averages == [("none", 64), *((scaling, n) for scaling in older_gpus_measure.FUNCTIONS for n in (1, 3))]


# Rows


def test_rows_of_the_gemms(monkeypatch):
    patch_topic(monkeypatch, older_gpus_measure)
    rows = older_gpus_measure.measure_gemm(*SMALL)
    assert records.invalid(record_with("older_gpus", rows)) == []
    dense, by_torch, dense_alone, by_torch_alone, *grouped = rows
    for row, alone in ((dense, dense_alone), (by_torch, by_torch_alone)):
        assert alone["step"] == row["step"] + ", alone" and alone["config"] == row["config"]
    assert (dense["step"], by_torch["step"]) == ("final", "torch.mm") and dense["run"] == by_torch["run"]
    assert dense["config"] == by_torch["config"] | {"capability": "9.0"} and "path" not in by_torch
    assert dense["path"] == "TMA, wgmma and clusters" and dense["flops"] == 2 * 64**3
    found = [(row["operation"], row["dtype"], row["config"]["scaling"], row["size"]["rows"]) for row in grouped]
    kinds = ("bf16", "bf16", "none"), ("pertensor_fp8", "e4m3", "tensor"), ("blockwise_fp8", "e4m3", "block")
    assert found == [(f"group_gemm_{name}", *rest, rows) for name, *rest in kinds for rows in (2, 6)]


@pytest.mark.parametrize("wrong", ["final", "torch.mm"])
@pytest.mark.parametrize("fault", ["not written", "scaled"])
def test_a_wrong_gemm_is_not_timed(monkeypatch, wrong, fault):
    patch_topic(monkeypatch, older_gpus_measure, kernel_times=lambda *_, **__: pytest.fail("it was timed"))
    call = {"final": partial(older_gpus_measure.group_gemm, "none"), "torch.mm": older_gpus_measure.dense_mm}[wrong]

    def wrong_call(*arguments):
        p = arguments[-1]
        return p.out if fault == "not written" else call(p).mul_(1.05)

    monkeypatch.setattr(older_gpus_measure, "group_gemm" if wrong == "final" else "dense_mm", wrong_call)
    message = f"{wrong}, group_gemm_bf16, .* 64 rows: {'row 0 was not written' if fault == 'not written' else 'row '}"
    with pytest.raises(AssertionError, match=message):
        older_gpus_measure.measure_gemm(*SMALL)


def test_rows_of_an_exchange_name_the_path(monkeypatch):
    row = exchange_rows("9.0", 0)[0]
    calls = []

    def measure(*arguments, **options):
        calls.append((*arguments, options))
        return [{**row, "config": {"ranks": 2}}]

    monkeypatch.setattr(dispatch_combine_measure, "measure", measure)
    (found,) = older_gpus_measure.measure_exchange()
    assert calls == [([2], {"quick": True, "parts": ["large"]})]
    assert found["config"] == {"ranks": 2, "capability": "9.0"} and found["path"] == "TMA bulk copies"
    assert found["run"].startswith("MOE_NUMBA_ARCH=") and found["kernel_us"] == row["kernel_us"]


# Figure, table and README


def exchange_rows(capability, us):
    config = dict(ranks=2, num_experts=256, topk=8, hidden=7168, num_sms=24, capability=capability)
    steps = [*dispatch_combine.STEPS.values(), dict(step="final, with notify", operation="dispatch", dtype="bf16")]
    return [
        records.row(config=config, size={"tokens": 4096}, kernel=Stats(us + i, us, us + 9), run=capability, **wanted)
        for i, wanted in enumerate(steps)
    ]


def gemm_rows(capability, us):
    def row(step, us, groups, rows, name, dtype, n=4096, k=7168, **config):
        config = {"num_groups": groups, "n": n, "k": k, **config}
        more = dict(dtype=dtype, kernel=Stats(us, us - 1, us + 1), operation=f"group_gemm_{name}", run=capability)
        return records.row(step, config=config, size={"rows": rows}, **more)

    dense = ("bf16", "bf16", 8192, 8192)
    yield row("final", 10 * us, 1, 8192, *dense, scaling="none", capability=capability)
    yield row("torch.mm", 1500.0 + us, 1, 8192, *dense, scaling="none")
    yield row("final, alone", 9 * us, 1, 8192, *dense, scaling="none", capability=capability)
    yield row("torch.mm, alone", 1300.0 + us, 1, 8192, *dense, scaling="none")
    kinds = ("bf16", "bf16", "none"), ("pertensor_fp8", "e4m3", "tensor"), ("blockwise_fp8", "e4m3", "block")
    for i, (name, dtype, scaling) in enumerate(kinds):
        for rows in (1, 16, 64, 256):
            yield row("final", us + i + rows, 32, 32 * rows, name, dtype, scaling=scaling, capability=capability)


@pytest.fixture
def record():
    rows = [*gemm_rows("8.0", 250.0), *exchange_rows("8.0", 400.0)]
    rows += [*gemm_rows("9.0", 150.0), *exchange_rows("9.0", 300.0)]
    return record_with("older_gpus", rows)


def test_the_record_is_valid(record):
    assert records.invalid(record) == []


def test_the_table_compares_both_paths_and_torch_of_the_same_run(record):
    lines = older_gpus.readme_table(record).splitlines()
    assert lines[0] == "| operation | size | path for 8.0 | compared with | ratio |"
    assert lines[2] == "| `group_gemm_bf16` | 8192 x 8192 x 8192 | 2500 | 1750 (torch.mm) | 0.70 |"
    assert lines[3] == "| `group_gemm_bf16` | 8192 x 8192 x 8192 | 2500 | 1500 (path for 9.0) | 0.60 |"
    assert lines[4] == "| `group_gemm_bf16` | 8192 x 8192 x 8192, alone | 2250 | 1550 (torch.mm) | 0.69 |"
    assert lines[5] == "| `group_gemm_bf16` | 8192 x 8192 x 8192, alone | 2250 | 1350 (path for 9.0) | 0.60 |"
    assert lines[6] == "| `group_gemm_bf16` | 32 groups of 1 row | 251 | 151 (path for 9.0) | 0.60 |"
    assert lines[17] == "| `group_gemm_blockwise_fp8` | 32 groups of 256 rows | 508 | 408 (path for 9.0) | 0.80 |"
    assert lines[18] == "| dispatch, bfloat16 | 4096 tokens on each of 2 GPUs | 400 | 300 (path for 9.0) | 0.75 |"
    assert lines[22].startswith("| combine, bfloat16 | 4096 tokens on each of 2 GPUs | 404 | 304 ")
    assert len(lines) == 2 + 4 + 12 + 5 + 2 and "notify" not in lines[-1]
    assert "a weight of 4096 x 7168" in lines[-1] and "24 SMs, the slower rank. Recorded on NVIDIA Toy" in lines[-1]


def test_the_table_without_two_gpus_and_with_rows_of_an_earlier_run(record):
    for row in record["rows"]:
        if "ranks" in row["config"]:
            row["measured"] = {"commit": "abcdef0123", "date": "2026-02-03T00:00:00Z"}
    assert "the slower rank, with commit abcdef0, 2026-02-03. Recorded" in older_gpus.readme_table(record)
    record["rows"] = [row for row in record["rows"] if "ranks" not in row["config"]]
    table = older_gpus.readme_table(record)
    assert "ispatch" not in table and table.count("\n| `") == 16


def test_on_an_a100_the_table_has_torch_alone(record):
    record["rows"] = [row for row in record["rows"] if row["run"] == "8.0"]
    lines = older_gpus.readme_table(record).splitlines()
    assert lines[2].endswith("1750 (torch.mm) | 0.70 |") and lines[4] == ""
    assert older_gpus.figures(record)


def test_the_figure_has_a_mark_per_path(record):
    (figure,) = older_gpus.figures(record).values()
    assert misplaced(figure) == []
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == 14 + 5 and labels[0] == "group_gemm_bf16, 8192 x 8192 x 8192"
    assert len(marks(axes)) == 2 * 19 + 2
    assert {"path for 8.0", "path for 9.0", "torch.mm", "2500", "1750"} <= {text.get_text() for text in axes.texts}


def test_rows_of_two_gpus_are_kept_on_one(record, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    kept = records.carried_over(record, older_gpus.out_of_reach, record)
    assert len(kept) == 2 * 6 and {row["config"]["ranks"] for row in kept} == {2}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert records.carried_over(record, older_gpus.out_of_reach, record) == []


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_readmes_block_with_and_without_a_record(record, monkeypatch, is_recorded):
    recorded, own = records.recorded, record if is_recorded else None
    monkeypatch.setattr(records, "recorded", lambda name, *where: own if name == "older_gpus" else recorded(name))
    table = readme.blocks()[readme.MEASUREMENTS]["older_gpus"]
    assert table == (older_gpus.readme_table(record) if is_recorded else "Not measured yet.")
    page = (records.repository() / readme.MEASUREMENTS).read_text()
    section = readme.replace_block(page, "older_gpus", table).split("## Kernels for older GPUs")[1].split("\n##")[0]
    assert table in section and "<!-- older_gpus:begin -->" in section


@pytest.mark.gpu
def test_a_record_is_measured_on_a_gpu():
    rows = older_gpus.measure([], True)
    record = record_with("older_gpus", rows)
    assert records.invalid(record) == [] and older_gpus.figures(record)
    assert "(torch.mm)" in older_gpus.readme_table(record)
    assert any("ranks" in row["config"] for row in rows) == (torch.cuda.device_count() >= 2)
