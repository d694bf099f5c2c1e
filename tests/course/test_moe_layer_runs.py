"""Runs, tables and models of notebook 15: outputs that are checked, call times, bounds and the model of 64 GPUs."""

from types import SimpleNamespace

import pytest
import torch

from moe_numba.course.lessons.moe_layer import model
from moe_numba.course.lessons.moe_layer.exercises import ranks_per_token
from moe_numba.course.lessons.moe_layer.parts_figure import draw_parts, parts_of, parts_table, rates_table
from moe_numba.course.lessons.moe_layer.runs import (
    RecordedTimes,
    call_times_table,
    groups_mismatch,
    of_models,
    poisoned_groups,
    slowdown,
)
from moe_numba.moe_layer import reference
from moe_numba.moe_layer.compile_layers import Layer

LAYER = Layer("toy, 1 of 2 GPUs", 8, 1024, 256, "bf16", (1, 64), topk=2)


def test_poisoned_and_unstable_groups_are_rejected():
    ids = torch.tensor([[0, 1], [1, 2]])
    expected = reference.group_by_expert(ids, 3)
    assert groups_mismatch(expected, expected) is None
    assert groups_mismatch(poisoned_groups(ids, 3), expected) == "seqlens differs at [0]"
    seqlens, cu_seqlens, gather, inverse = (tensor.clone() for tensor in expected)
    gather[1:3] = gather[1:3].flip(0)  # both rows of expert 1
    assert groups_mismatch((seqlens, cu_seqlens, gather, inverse), expected) == "gather_indices differs at [1]"


def ladder_of(times):
    """A ladder with (call time, operations) of each step; only "final" has a kernel time."""
    fields = {name: {"call_us": us, "operations": operations} for name, (us, operations) in times.items()}
    fields["loop"]["operation_us"], fields["final"]["kernel_us"] = 2.0, 7.0
    return SimpleNamespace(median_us=lambda name, what: fields[name].get(what))


def test_call_times_are_predicted_by_the_time_per_operation():
    times = {"loop": (100.0, 50), "GEMMs": (40.0, 20), "sum": (30.0, 0), "final": (15.0, 0)}
    lines = call_times_table(ladder_of(times), times).splitlines()[2:]
    assert lines[0] == "| loop | 50 | waits | 100 |  |"
    assert lines[1] == "| GEMMs | 20 | waits | 40.0 | predicted 40 us (-60 %), measured 40 us (-60 %): within a third |"
    assert "predicted 0 us (-100 %), measured 30 us (-25 %): overestimated" in lines[2]
    assert lines[3] == "| final | 0 | 7.00 | 15.0 | measured -15.0 us (-50.0 %) |", "no operation is saved"
    assert call_times_table(ladder_of(times | {"final": (None, 0)}), times) is None


@pytest.mark.parametrize(
    "pairs, conclusion",
    [
        ((110.0, 111.0), "The hypothesis is refuted"),
        ((140.0, 141.0), "Both slow"),
        ((113.0, 111.5), "Both change it alike"),
        ((140.0, 110.0), "Only `permute`"),
    ],
)
def test_a_launch_is_slower_behind_others(pairs, conclusion):
    times = {"permute": 10.0, "copy": 10.0, "gate_up": 100.0}
    found = slowdown(times | {"permute, gate_up": pairs[0], "copy, gate_up": pairs[1]}, "gate_up", ("permute", "copy"))
    assert found["conclusion"].startswith(conclusion)
    extra = pairs[0] - 110
    assert (
        found["permute"]
        == f"after `permute`, `gate_up` takes {extra:+.0f} us ({extra:+.1f} %) relative to 100 us alone"
    )
    assert set(slowdown({}, "gate_up", ("permute", "copy")).values()) == {None}


def test_bounds_are_those_of_random_routing():
    ids = torch.rand(500, 64, LAYER.num_experts, generator=torch.Generator().manual_seed(0)).topk(2).indices
    used, read, compute = model.bounds(LAYER, 64)
    assert used == pytest.approx(sum(len(drawn.unique()) for drawn in ids) / 500, rel=0.01)
    assert read == pytest.approx(used * 3 * 1024 * 256 * 2 / 4.8e6)
    assert compute == pytest.approx(2 * 64 * 2 * 3 * 1024 * 256 / 989e6)
    assert model.bounds_table([LAYER]).count("memory bandwidth") == 2


def test_a_limit_of_nodes_shortens_the_transfers():
    reached = ranks_per_token(model.NUM_EXPERTS, model.TOPK, 8)
    assert model.transfer_us(64, 4096, 4) == pytest.approx(model.transfer_us(64, 4096) * 4 / reached)
    assert model.transfer_us(64, 4096, 8) == model.transfer_us(64, 4096), "more nodes than a token reaches"
    assert model.total_us(64, 4096, 4) < model.total_us(64, 4096)


@pytest.mark.parametrize("gpus", [8, 64])
def test_transfers_of_the_model_are_those_of_random_routing(gpus):
    experts = torch.rand(4000, 256, generator=torch.Generator().manual_seed(0)).topk(8).indices
    visited = torch.zeros(4000, gpus).scatter_(1, experts // (256 // gpus), 1.0)
    assert ranks_per_token(256, 8, gpus) == pytest.approx(visited.sum(1).mean().item(), rel=0.02)
    nodes = visited.view(4000, -1, 8).amax(2)
    seconds = max(visited[:, 1:].sum().item() / model.NVLINK, nodes[:, 1:].sum().item() / model.NETWORK)
    assert model.part_times(gpus, 4000)["combine"] == pytest.approx(1e6 * seconds * 2 * 7168, rel=0.02)
    assert model.part_times(1, 4000)["dispatch"] == 0
    assert model.table((1, gpus), (64,)).count("\n") == 3


def record():
    """Rows of the topic with a permutation and both limits."""
    launches = {"permute": 2.0, "gate_up": 30.0, "activation": 1.0, "down": 15.0, "weighted_sum": 2.0}
    steps = {"final": 51.0, "both GEMMs": 46.0} | {f"part: {name}": us for name, us in launches.items()}
    rows = []
    for tokens, bound, flops in ((1, 20.0, 10**9), (64, 40.0, 4 * 10**10)):
        for step, us in steps.items():
            row = {"step": step, "config": LAYER.config, "size": {"tokens": tokens}, "dtype": "bf16"}
            more = {"floor_us": bound, "flops": flops} if step == "final" else {}
            rows.append(row | {"kernel_us": {"median": us, "p10": us, "p90": us}} | more)
    known = {
        "topic": "moe_layer",
        "gpu": "Toy",
        "driver": "1",
        "versions": {},
        "commit": "c" * 40,
        "date": "2026-01-01",
    }
    return known | {"rows": rows}


def test_parts_and_rates_of_a_record():
    groups = parts_of(record(), [LAYER.model], (64,))
    assert list(groups) == ["64 tokens\n1 of 2 GPUs"]
    parts, us, bound = groups["64 tokens\n1 of 2 GPUs"]
    assert list(parts)[0] == "permute" and (us, bound) == (51.0, 40.0)
    lines = parts_table(record()).splitlines()
    assert lines[2] == "| toy, 1 of 2 GPUs | 1 | 51.0 | 50.0 | 46.0 | 20.0 | 2.55 | memory bandwidth |"
    assert lines[3].endswith("| 1.27 | tensor cores |")
    moved = 2 * 64 * 1024 * 3  # a row of each token, and two of its experts
    assert f"| permute | {moved / 1e6:.0f} | 2.00 | {moved / 2e6:.1f} |" in rates_table(record(), LAYER.model, 64)
    assert draw_parts(record(), "Toy", [LAYER.model])


def test_times_of_a_record():
    known = record()
    row = {"config": LAYER.config, "size": {"tokens": 64}, "dtype": "bf16"}
    for name, us in {"peer:a": 60.0, "peer:b": 55.0}.items():
        known["rows"].append({"step": name, **row, "kernel_us": {"median": us, "p10": us, "p90": us}})
    times = RecordedTimes(known, LAYER.model, (1, 64))
    assert times.listed("final") == "51.0 / 51.0" and times.us("final", 64, "floor_us") == 40.0
    assert times.listed("peer:a") is None and times.us("final", 2) is None
    assert times.fastest_other(64) == ("b", 55.0) and times.fastest_other(1) == ("", None)
    assert sum(times.launches(64).values()) == 50.0
    nothing = RecordedTimes(None, LAYER.model, (1, 64))
    assert nothing.listed("final") is None and nothing.launches(64) == {} and nothing.fastest_other(1) == ("", None)
    assert of_models(known, [LAYER.model]) == known and of_models(known, ["other"])["rows"] == []
