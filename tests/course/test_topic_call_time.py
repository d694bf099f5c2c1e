"""Benchmark topic call_time: loops with a fake clock, the checks before timing, rows, figure and table."""

import gc
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from bench_topics import record_with
from helpers.figures import marks, misplaced

from moe_numba import moe_align_block_size
from moe_numba.course.bench import Stats, records, topic
from moe_numba.course.bench.baselines import peer_calls
from moe_numba.course.bench.topics.call_time import measure as call_time_measure
from moe_numba.course.bench.topics.call_time import measure_buffer as call_time_buffer_measure
from moe_numba.course.pages import readme
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.gate import reference as gate_reference
from moe_numba.grouped_gemm import reference as gemm_reference
from moe_numba.runtime import torch_op

call_time = topic("call_time")
FUNCTIONS = (
    "biased_grouped_topk moe_align_block_size biased_grouped_topk_align fuse_routing get_dispatch_layout "
    "per_token_cast_to_fp8 per_token_cast_back group_gemm_pertensor_fp8 group_gemm_blockwise_fp8 group_gemm_bf16 "
    "group_gemm_silu_and_mul_pertensor_fp8 group_gemm_silu_and_mul_blockwise_fp8"
).split()
LAYER = [f"{name}, {tokens}" for tokens in ("1 token", "3 tokens") for name in ("fused_experts", "fused_moe")]
FUNCTIONS += [*LAYER, "group_by_expert", "weighted_sum"]


def stub_times(calls, synchronize, loops, **_):
    """Return n + 1 microseconds for the n-th call."""
    return {name: [n + 1.0] * loops for n, name in enumerate(calls)}


@pytest.fixture
def small(monkeypatch):
    """Small inputs, and a stub in place of the clock."""
    values = dict(
        TOKENS=3,
        HIDDEN=128,
        GATE=dict(num_experts=16, num_expert_group=4, topk_group=2, topk=2),
        GEMM=dict(num_groups=2, n=256, k=128),
        ROWS_PER_GROUP=4,
        LAYER=dict(num_experts=4, hidden=64, intermediate=64, topk=2),
        LAYER_TOKENS=(1, 3),
        loop_times=stub_times,
    )
    for name, value in values.items():
        monkeypatch.setattr(call_time_measure, name, value)
    monkeypatch.setattr(call_time_measure, "installed_peers", list)
    for name, value in dict(TOKENS=3, HIDDEN=64, EXPERTS=4, TOPK=2, loop_times=stub_times).items():
        monkeypatch.setattr(call_time_buffer_measure, name, value)
    monkeypatch.setattr(Buffer, "num_sms", 2)


# Measuring


def test_loops_are_interleaved_and_synchronise_after_the_clock(monkeypatch):
    monkeypatch.setattr(call_time_measure, "CALLS", 4)
    now, log, collects = [0], [], []

    def call(name, us):
        now[0] += 1000 * us
        log.append(name)
        collects.append(gc.isenabled())

    def synchronize():
        now[0] += 10**6
        log.append("synchronize")

    calls = {"short": lambda: call("short", 5), "long": lambda: call("long", 20)}
    found = call_time_measure.loop_times(calls, synchronize, 6, clock=lambda: now[0])
    assert found == {"short": [5.0] * 6, "long": [20.0] * 6}
    batches = [(name, len(list(group))) for name, group in itertools.groupby(log[12:])]  # without the warm-up
    assert all(batch == ("synchronize", 1) for batch in batches[1::2])
    order = [name for name, _ in batches[::2]]
    assert {count for _, count in batches[::2]} == {4}
    assert all(set(order[i : i + 2]) == set(calls) for i in range(0, 12, 2)) and len(order) == 12
    assert not any(collects[6:]) and gc.isenabled()
    first, log[:] = log.copy(), []
    call_time_measure.loop_times(calls, synchronize, 6, clock=lambda: now[0])
    assert log == first, "ranks need the same order"


def test_every_public_function_is_measured_with_out_and_prepared(small):
    rows = call_time_measure.measure_functions([], 2)
    steps = {name: [row["step"] for row in rows if row["operation"] == name] for name in FUNCTIONS}
    assert steps == dict.fromkeys(FUNCTIONS, ["final", "final, out=", "final, prepared"])
    others = [(row["operation"], row["step"]) for row in rows if row["operation"] not in FUNCTIONS]
    assert others == [
        ("torch.sigmoid", "torch"),
        ("torch.sigmoid", "torch, out="),
        ("torch.topk", "torch"),
        ("torch.topk", "torch, out="),
        ("torch.empty, twice", "torch"),
    ]
    assert rows[0]["call_us"] == {"median": 1.0, "p10": 1.0, "p90": 1.0} and rows[4]["call_us"]["median"] == 5
    assert rows[0]["config"] == call_time_measure.GATE and rows[0]["size"] == {"tokens": 3}
    assert records.invalid(record_with("call_time", rows)) == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_outputs_are_rejected(small, name):
    case = call_time_measure.make_cases()[name]
    right = case.function(*case.args, **case.options)
    right = (right,) if isinstance(right, torch.Tensor) else right
    assert case.mismatch(right, False) is None
    for i in range(len(right)):
        wrong = [tensor.clone() for tensor in right]
        call_time_measure.poison(wrong[i])
        assert case.mismatch(tuple(wrong), False)


@pytest.mark.parametrize("step", ["final", "final, out=", "final, prepared"])
def test_a_wrong_step_is_not_timed(step, monkeypatch):
    def function(x, out=None):
        return x + (step == "final") if out is None else out if step == "final, out=" else out.copy_(x)

    monkeypatch.setitem(torch_op.OPS, "function", ())  # a function of the package may launch nothing
    x = torch.arange(4.0)
    equals = lambda outputs, is_peer: None if torch.equal(outputs[0], x) else "differs"
    with pytest.raises(AssertionError, match=f"function, {step}: differs"):
        call_time_measure.function_steps(call_time_measure.Case(function, (x,), {}, {}, {}, equals))


STEPS_OF_BUFFERS = "final", "final, out=", "peer:DeepEP"


def test_buffer_calls_are_measured_on_two_ranks_beside_deepep(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Buffer))  # the same interface
    first, second = LocalGroup(2).run(lambda group: call_time_buffer_measure.measure_rank(group, 2))
    for row in (*first, *second):
        row.pop("kernels", None)  # ranks that are threads of a process note each other's launches
    assert first == second
    names = "get_dispatch_layout", "dispatch, num_worst_tokens", "dispatch, handle", "combine"
    found = {step: [row["operation"][7:] for row in first if row["step"] == step] for step in STEPS_OF_BUFFERS}
    assert found == {"final": [*names], "final, out=": [*names[1:3]], "peer:DeepEP": [*names]} and len(first) == 10
    assert all(row["config"]["ranks"] == 2 and row["call_us"] for row in first)


@pytest.mark.parametrize("wrong", ["num_worst_tokens", "handle", "handle, out="])
def test_a_wrong_dispatch_is_not_timed(small, monkeypatch, wrong):
    class WrongBuffer(Buffer):
        def dispatch(self, x, handle=None, out=None, **options):
            given = "num_worst_tokens" if "num_worst_tokens" in options else "handle" if handle else ""
            is_wrong = given + (", out=" if out else "") == wrong
            return super().dispatch(x + 1 if is_wrong else x, handle, out=out, **options)

    monkeypatch.setattr(call_time_buffer_measure, "Buffer", WrongBuffer)
    with pytest.raises(AssertionError, match=f"Buffer.dispatch, {wrong}: the combined rows"):
        LocalGroup(2).run(lambda group: call_time_buffer_measure.measure_rank(group, 2))


def test_without_deepep_only_the_package_is_measured(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # its import fails
    monkeypatch.setattr(call_time_measure, "CALLS", 1)
    monkeypatch.setattr(call_time_buffer_measure, "loop_times", call_time_measure.loop_times)
    rows = LocalGroup(2).run(lambda group: call_time_buffer_measure.measure_rank(group, 1))[0]
    assert {row["step"] for row in rows} == {"final", "final, out="}


@pytest.mark.parametrize("gpus, is_measured", [(1, False), (2, True)])
def test_rows_of_two_gpus_are_measured_or_kept(monkeypatch, gpus, is_measured):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    rows = {"function": {"config": {"num_ranks": 8}}, "buffer": {"config": {"ranks": 2}}}
    monkeypatch.setattr(call_time_measure, "measure_functions", lambda peers, loops: [rows["function"]])
    monkeypatch.setattr(call_time_buffer_measure, "measure_buffer", lambda loops: [rows["buffer"]])
    assert call_time.measure([], True) == ([*rows.values()] if is_measured else [rows["function"]])
    assert call_time.out_of_reach(rows["buffer"]) != is_measured and not call_time.out_of_reach(rows["function"])


@pytest.mark.gpu
def test_a_record_is_measured_on_a_gpu():
    record = record_with("call_time", call_time.measure([], True))
    assert records.invalid(record) == [] and call_time.readme_table(record) and call_time.figures(record)
    has_buffer = any(row["operation"].startswith("Buffer.") for row in record["rows"])
    assert has_buffer == (torch.cuda.device_count() >= 2)


# Peers


def write_alignment(ids, block_size, experts, outputs):
    for output, right in zip(outputs, moe_align_block_size(ids, block_size, experts), strict=True):
        output[: len(right)] = right[: len(output)]


def fake_modules():
    """Return modules with the interfaces of the peers' packages."""

    def moe_fused_gate(logits, bias, num_expert_group, topk_group, topk):
        weights, ids = gate_reference.biased_grouped_topk(
            logits, bias, topk, num_expert_group=num_expert_group, topk_group=topk_group
        )
        return [weights.float(), ids.int()]

    def sgl_align(ids, experts, block_size, sorted_ids, expert_ids, total, offsets, pad_sorted_token_ids):
        assert len(offsets) == experts + 1 and pad_sorted_token_ids
        write_alignment(ids, block_size, experts - 1, (sorted_ids, expert_ids, total))

    def vllm_align(ids, block_size, experts):
        sorted_ids, expert_ids, total = moe_align_block_size(ids, block_size, experts)
        return sorted_ids[: 1 - block_size], expert_ids, total  # shorter, without invalid ids

    def vllm_op(ids, experts, block_size, *outputs):
        write_alignment(ids, block_size, experts, outputs)

    def gemm(x, weight, out, group_of_row):
        lengths = torch.bincount(group_of_row.cpu()).int()
        starts = lengths.cumsum(0) - lengths
        out.copy_(gemm_reference.group_gemm_blockwise(x[0], weight[0], lengths, starts, x[1], weight[1]))

    folder = "vllm.model_executor.layers.fused_moe"
    return {
        "sgl_kernel": SimpleNamespace(moe_fused_gate=moe_fused_gate, moe_align_block_size=sgl_align),
        "vllm": SimpleNamespace(_custom_ops=SimpleNamespace(moe_align_block_size=vllm_op)),
        f"{folder}.moe_align_block_size": SimpleNamespace(moe_align_block_size=vllm_align),
        **{name: SimpleNamespace() for name in ("vllm.model_executor", "vllm.model_executor.layers", folder)},
        "deep_gemm": SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=gemm),
    }


PEER_STEPS = {
    "sgl_kernel": [("biased_grouped_topk", ""), ("moe_align_block_size", ", out=")],
    "vllm": [("moe_align_block_size", ""), ("moe_align_block_size", ", out=")],
    "deep_gemm": [("group_gemm_blockwise_fp8", ", out=")],
}


@pytest.mark.parametrize("module", PEER_STEPS)
def test_installed_peers_are_measured(small, monkeypatch, module):
    torch.manual_seed(0)  # the shorter outputs of vLLM's function must hold all slots of these tokens
    for name, fake in fake_modules().items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(peer_calls.importlib.metadata, "packages_distributions", lambda: {module: ["dist"]})
    monkeypatch.setattr(peer_calls.importlib.metadata, "version", lambda name: "1.2")
    (peer,) = peer_calls.installed_peers()
    steps = call_time_measure.peer_steps([peer], call_time_measure.make_cases())
    expected = [(function, f"peer:{peer.NAME}{suffix}") for function, suffix in PEER_STEPS[module]]
    assert [(step.row["operation"], step.step) for step in steps] == expected
    assert {step.row["version"] for step in steps} == {"1.2"}


def test_peers_that_are_missing_or_wrong_are_left_out(small, monkeypatch, capsys):
    distributions = {"sgl_kernel": ["sgl-kernel"]}
    monkeypatch.setattr(peer_calls.importlib.metadata, "packages_distributions", lambda: distributions)
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)  # installed, but its import fails
    assert peer_calls.installed_peers() == [] and "peer sgl_kernel is left out" in capsys.readouterr().err

    def calls(cases):
        out = torch.zeros(4, 4, dtype=torch.bfloat16)
        yield "group_gemm_bf16", ", out=", lambda: None, (out,)

    cases = call_time_measure.make_cases()
    assert call_time_measure.peer_steps([peer_calls.Peer("lazy", "1", calls)], cases) == []
    assert "peer lazy is left out: AssertionError: group_gemm_bf16, out=: the shape is" in capsys.readouterr().err
    assert call_time_measure.peer_steps([SimpleNamespace(NAME="gate only", VERSION="1")], cases) == []


# Figure and table


def make_record(peer="peer:sgl_kernel"):
    def row(operation, step, us, **more):
        return records.row(step, operation=operation, call=Stats(us, 0.9 * us, 1.2 * us), **more)

    rows = [
        row(name, step, us + i)
        for i, name in enumerate(FUNCTIONS)
        for step, us in (("final", 15.2), ("final, out=", 10.9), ("final, prepared", 4.7))
    ]
    rows += [row("torch.sigmoid", "torch", 7.2), row("torch.sigmoid", "torch, out=", 5.9)]
    rows += [row("torch.empty, twice", "torch", 6.8), row("Buffer.combine", "final", 40.0, config={"ranks": 2})]
    rows += [row("moe_align_block_size", step, 12.0 + i) for i, step in enumerate((peer, f"{peer}, out=")) if peer]
    return record_with("call_time", rows)


def test_the_table_has_a_row_per_function():
    lines = call_time.readme_table(make_record()).splitlines()
    assert lines[0] == "| function | call | with `out=` | prepared | other projects |"
    assert lines[2] == "| `biased_grouped_topk` | 15.2 | 10.9 | 4.70 |  |"
    assert lines[3] == "| `moe_align_block_size` | 16.2 | 11.9 | 5.70 | 12.0 (sgl_kernel); 13.0 (sgl_kernel, out=) |"
    assert lines[-5] == "| `torch.sigmoid` | 7.20 | 5.90 |  |  |"
    assert lines[-3] == "| `Buffer.combine` | 40.0 |  |  |  |"
    assert lines[-1].startswith("Call time in microseconds, median of loops of 100 calls, recorded on NVIDIA Toy")


def test_the_table_without_peers_has_no_column_for_them():
    record = make_record(peer=None)
    assert call_time.readme_table(record).startswith("| function | call | with `out=` | prepared |\n")


def test_the_table_names_the_run_on_two_gpus():
    record = make_record(peer=None)
    assert call_time.readme_table(record).endswith("; `Buffer` in one process per GPU on two GPUs, the slower one.")
    record["rows"][-1]["measured"] = {"commit": "abcdef0123", "date": "2026-02-03T00:00:00Z"}
    assert call_time.readme_table(record).endswith("the slower one, with commit abcdef0, 2026-02-03.")
    record["rows"].pop()
    assert "Buffer" not in call_time.readme_table(record)


def test_the_figure_shows_each_function_and_two_torch_calls():
    (figure,) = call_time.figures(make_record()).values()
    assert misplaced(figure) == []
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [*FUNCTIONS, "Buffer.combine"]
    assert len(marks(axes)) == 3 * len(FUNCTIONS) + 1
    shown = [text.get_text() for text in axes.texts]
    assert {"torch.sigmoid 7.20", "torch.empty, twice 6.80", "call", "out=", "prepared", "4.70"} <= set(shown)


def test_a_topic_without_a_record_has_no_table(monkeypatch):
    recorded = records.recorded
    monkeypatch.setattr(
        records, "recorded", lambda name, *where: None if name == "call_time" else recorded(name, *where)
    )
    tables = readme.blocks()[readme.MEASUREMENTS]
    assert tables["call_time"] == "Not measured yet." and tables["gate"].startswith("| tokens, logits |")
