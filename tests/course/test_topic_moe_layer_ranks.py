"""Benchmark topic moe_layer_ranks: checks before timing, rows, figure, table and the prediction."""

import pytest
import torch
from bench_topics import record_with
from helpers.expert_parallel import NUM_BYTES, SMALL, engine
from helpers.figures import misplaced

from moe_numba.course.bench import Stats, records, topic
from moe_numba.course.bench.topics.moe_layer_ranks import measure
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.expert_parallel.low_latency import config as low_latency_config
from moe_numba.moe_layer import module, reference

moe_layer_ranks = topic("moe_layer_ranks")
BY_EXPERT = measure.BY_EXPERT
NAMES = "x", "w13", "w2", "topk_weights", "topk_ids", "w13_scale", "w2_scale"
PARTS = [f"part: {name}" for name in ("dispatch", "experts", "combine")]


@pytest.fixture
def small(monkeypatch):
    sizes = dict(LOCAL_EXPERTS=2, HIDDEN=128, INTERMEDIATE=128, TOPK=2, BUFFER_BYTES=NUM_BYTES)
    for name, value in sizes.items():
        monkeypatch.setattr(measure, name, value)
    for name in ("get_dispatch_config", "get_combine_config"):
        monkeypatch.setattr(Buffer, name, classmethod(lambda cls, ranks: SMALL))

    def compute(workspace, **given):  # in torch, because the simulator takes seconds for a grouped GEMM
        return reference.fused_experts(**given).bfloat16()

    monkeypatch.setattr(module, "fused_experts", compute)
    monkeypatch.setattr(
        measure.moe_numba, "fused_experts", lambda *given: compute(None, **dict(zip(NAMES, given, strict=True)))
    )

    def times(bench, calls):
        return {key: Stats(t, t - 1, t + 1) for t, key in enumerate(calls, start=10)}

    monkeypatch.setattr(measure.LayerBench, "_times", times)
    monkeypatch.setattr(measure, "BY_EXPERT", {})  # whose grouped GEMMs take seconds in the simulator
    shared = lambda hidden, intermediate, device: Twice()
    monkeypatch.setattr(measure, "SharedExpert", shared)
    monkeypatch.setattr(low_latency_config, "default_parts", lambda max_tokens: 1)  # rows are short
    monkeypatch.setattr(measure, "all_gather", lambda ranks, x: torch.cat(ranks.gather(x)))
    add = lambda ranks, x: sum(ranks.gather(x.float())).bfloat16().chunk(ranks.num_ranks)[ranks.rank]
    monkeypatch.setattr(measure, "reduce_scatter", add)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))


class Twice(torch.nn.Module):
    """Shared experts without weights."""

    def forward(self, x):
        return 2 * x


def run(tokens, ranks=2):
    with engine(0):
        work = lambda transport: measure.LayerBench(transport.rank, ranks, transport, transport.device).rows([tokens])
        return LocalGroup(ranks).run(work)


def test_rows(small, monkeypatch):
    monkeypatch.setattr(measure, "BY_EXPERT", BY_EXPERT)
    first, second = run(3)
    assert first == second
    steps = [(row["step"], row["dtype"]) for row in first]
    both = lambda *names: [(name, dtype) for dtype in ("bf16", "e4m3") for name in names]
    beside = [(f"shared experts {how}", "bf16") for how in ("beside", "first")]
    layers = both("final", "low latency")
    layers.append(("low latency, FP8 sums", "e4m3"))
    layers += [(name, "e4m3") for name in BY_EXPERT]
    naive = ("peer:NCCL all-gather and reduce-scatter", "bf16")
    parts = [("part: shared experts", "bf16"), measure.GEMMS, *both(*PARTS)]
    assert steps == [*layers, beside[0], naive, beside[1], *parts]
    assert [bool(row.get("version")) for row in first] == [step == naive for step in steps]
    assert all(row["config"]["ranks"] == 2 and row["config"]["num_experts"] == 4 for row in first)


@pytest.mark.parametrize("name", ["per_token_cast_to_fp8", "make_weights", "reduce_scatter"])
def test_wrong_layers_are_not_timed(name, small, monkeypatch):
    if name == "reduce_scatter":
        monkeypatch.setattr(measure, name, lambda ranks, x: x[: len(x) // ranks.num_ranks])
    elif name == "make_weights":  # of other experts than the rank's own
        load = measure.Experts.load_state_dict
        wrong = lambda module, state: load(module, {key: value.flip(0) for key, value in state.items()})
        monkeypatch.setattr(measure.Experts, "load_state_dict", wrong)
    else:
        from moe_numba.moe_layer.expert_parallel import layer as expert_parallel_moe

        cast = expert_parallel_moe.per_token_cast_to_fp8
        monkeypatch.setattr(expert_parallel_moe, name, lambda x: cast(x.flip(1)))
    with pytest.raises(AssertionError, match="tokens: row|tokens: the relative error"):
        run(3)


def made_record():
    """Times that are linear in the tokens: dispatch 20 + 2 per token, combine 30 + 4 per token, experts 100."""
    rows = []
    for tokens in (8, 64, 512):
        us = {"dispatch": 20 + 2 * tokens, "experts": 100, "combine": 30 + 4 * tokens}
        steps = {f"part: {name}": t for name, t in us.items()} | {"final": sum(us.values())}
        for step, t in steps.items():
            config, size = dict(ranks=2, num_experts=64), dict(tokens=tokens)
            rows.append(records.row(step, config=config, size=size, dtype="bf16", kernel=Stats(t, t, t)))
    return record_with("moe_layer_ranks", rows)


def test_prediction():
    """On 8 GPUs each token is sent to as many other GPUs, times the time per row."""
    rows = {ranks: moe_layer_ranks.remote_rows(ranks) for ranks in (2, 8)}
    assert 0.99 < rows[2] < 1 and 4.5 < rows[8] < 4.7
    record = made_record()
    for tokens, us in moe_layer_ranks.predict(record, 2).items():
        assert us == pytest.approx(150 + 6 * tokens * rows[8] / rows[2])
    faster = [dict(row, step="low latency") for row in record["rows"] if row["step"] == "final"]
    for row in faster:
        row["kernel_us"] = dict(row["kernel_us"], median=row["kernel_us"]["median"] - 7)
    record["rows"] += faster[:1]
    few, many = min(row["size"]["tokens"] for row in faster), max(row["size"]["tokens"] for row in faster)
    predicted = moe_layer_ranks.predict(record, 2)
    assert predicted[few] == pytest.approx(143 + 6 * few * rows[8] / rows[2])
    assert predicted[many] == pytest.approx(150 + 6 * many * rows[8] / rows[2])


def test_the_naive_layer_has_a_column_and_a_sentence():
    record = made_record()
    assert "naive" not in moe_layer_ranks.readme_table(record), "it is not measured"
    naive = [dict(row, step=measure.NAIVE) for row in record["rows"] if row["step"] == "final"]
    for row, ratio in zip(naive, (0.5, 1.0, 2.0), strict=True):
        row["kernel_us"] = {name: us * ratio for name, us in row["kernel_us"].items()}
    record["rows"] += naive
    lines = moe_layer_ranks.readme_table(record).splitlines()
    assert lines[0].startswith("| GPUs, tokens on each | whole layer | naive, NCCL | DeepGEMM's mega-MoE |")
    assert lines[2].startswith("| 2, 8 | **198** | 99.0 |"), "bold is our fastest layer"
    assert "it takes 0.50 to 2.00 times as long as our fastest layer." in lines[6]
    assert lines[8] == "| GPUs, tokens on each | dispatch | experts | combine | sum of the parts |"


def test_figure_and_tables():
    record = made_record()
    lines = moe_layer_ranks.readme_table(record).splitlines()
    assert lines[0] == "| GPUs, tokens on each | whole layer | DeepGEMM's mega-MoE | DeepEP and DeepGEMM |"
    assert lines[2] == "| 2, 8 | **198** |  |  |"
    assert (
        "rows, by tokens on each GPU: 8: 373, 64: " in lines[6]
        and "faster" not in lines[6]
        and "brackets" not in lines[6]
    )
    assert lines[8] == "| GPUs, tokens on each | dispatch | experts | combine | sum of the parts |"
    assert lines[10] == "| 2, 8 | 36.0 | 100 | 62.0 | 198 |"
    assert "NVIDIA Toy" in lines[-1]
    (figure,) = moe_layer_ranks.figures(record).values()
    assert not misplaced(figure)


def test_tables_with_the_published_group_size():
    record = made_record()
    of_eight = [row | dict(config=dict(ranks=8, num_experts=256)) for row in record["rows"]]
    record["rows"] += of_eight
    lines = moe_layer_ranks.readme_table(record).splitlines()
    assert lines[2] == "| 2, 8 | **198** |  |  |" and lines[5] == "| 8, 8 | **198** | 404 | 456 |"
    text = lines[9]
    assert (
        "DeepGEMM's mega-MoE is faster with 64 and 512 tokens. DeepEP and DeepGEMM is faster with 64 and 512 tokens."
        in text
    )
    assert "with the measured time in brackets, by tokens on each GPU: 8: 373 (198), 64: " in text
    assert moe_layer_ranks.fastest(record, 8, 8) == 198 and moe_layer_ranks.fastest(record, 4, 8) is None
