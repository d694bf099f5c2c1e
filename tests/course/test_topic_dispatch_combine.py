"""Benchmark topic dispatch_combine: figures and tables from rows, and its baselines."""

from types import SimpleNamespace

import pytest
import torch

from moe_numba.course.bench import Stats, records, topic
from moe_numba.course.bench.baselines.nccl_all_to_all import (
    all_to_all_counts,
    all_to_all_rows,
    played,
    poisoned,
    wrong_rows,
)
from moe_numba.course.bench.baselines.peer_push import push
from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.course.bench.topics.dispatch_combine import measure as dispatch_combine_measure
from moe_numba.course.bench.topics.dispatch_combine.measure_peers import Problem, peer_rows
from moe_numba.expert_parallel import reference
from moe_numba.expert_parallel.ranks.local_group import LocalGroup

exchange = topic("dispatch_combine")


def rows(ranks, rate):
    config = dict(ranks=ranks, num_experts=256, topk=8, hidden=7168)

    def row(step, us, gbps=None, tokens=dispatch_combine_measure.TOKENS, **more):
        more["config"] = config | ({"num_sms": sms} if (sms := more.pop("sms", None)) else {})
        return records.row(step, size={"tokens": tokens}, kernel=Stats(us, us, us), wire_gbps=gbps, **more)

    for sms in dispatch_combine_measure.SMS:
        for i, wanted in enumerate(exchange.STEPS.values()):
            yield row(us=100 * ranks + sms + i, gbps=rate + sms + i, sms=sms, **wanted)
    yield row("final, with notify", 100 * ranks + 99, rate, sms=24, operation="dispatch", dtype="bf16")
    for blocks in dispatch_combine_measure.BLOCKS_OF_PUSH:
        yield row("plain push", 50, rate + blocks, sms=blocks, operation="push", dtype="bf16")
        if ranks > 2:
            yield row("push to all", 70, rate + blocks - 10, sms=blocks, operation="push", dtype="bf16")
    for step in exchange.NCCL_STEPS:
        yield row(step, 500 + ranks, rate - 50, operation="dispatch", dtype="bf16")
    for tokens in dispatch_combine_measure.DECODE_TOKENS:
        for i, step in enumerate(exchange.DECODE_STEPS.values()):
            yield row(step, 10 * tokens + i, tokens=tokens, sms=24, operation="dispatch and combine", dtype="bf16")


@pytest.mark.parametrize("others, blocks", [(1, 2), (2, 2), (2, 5), (3, 4)])
def test_push_writes_to_the_next_ranks(others, blocks):
    source = lambda rank: torch.arange(4 * 3000, dtype=torch.int32) + 100_000 * rank

    def work(transport):
        shared = transport.allocate(3 * 48_000)
        given = source(transport.rank).to(transport.device)
        push(shared.addresses, transport.rank, others, given, blocks)
        settle(transport)
        found = shared.local.view(torch.int32).cpu().split(12_000)
        shared.close()
        return found

    for rank, found in enumerate(LocalGroup(4).run(work)):
        for nth, received in enumerate(found):
            assert torch.equal(received, source((rank - 1 - nth) % 4) if nth < others else torch.zeros_like(received))


def test_push_needs_a_block_per_rank():
    with pytest.raises(ValueError, match="others is 2 and blocks 1; 1 to 3"):
        push(torch.zeros(4, dtype=torch.uint64), 0, 2, torch.zeros(4), 1)


@pytest.fixture
def record():
    known = {"gpu": "NVIDIA H200", "driver": "1", "commit": "0" * 7, "date": "2026-11-22", "versions": {}}
    return known | {"rows": [*rows(2, 200), *rows(4, 250)]}


def test_the_table_has_a_column_per_group_size(record):
    lines = exchange.readme_table(record).splitlines()
    assert lines[0] == "| 4096 tokens each | 2 GPUs | 4 GPUs |"
    assert lines[2] == "| dispatch, bfloat16, 24 SMs | 224 us, 224 GB/s | 424 us, 274 GB/s |"
    assert lines[4] == "| dispatch into an output, bfloat16, 16 SMs | 226 us, 226 GB/s | 426 us, 276 GB/s |"
    assert lines[6] == "| combine, bfloat16, 24 SMs | 228 us, 228 GB/s | 428 us, 278 GB/s |"
    assert lines[7].startswith("| dispatch into an output, bfloat16, 12 SMs | 214 us, 214 GB/s |")
    assert lines[8].endswith("| 299 us, 200 GB/s | 499 us, 250 GB/s |"), "with counts"
    assert lines[9] == "| NCCL all_to_all_single, bfloat16 | 502 us, 150 GB/s | 504 us, 200 GB/s |"
    assert lines[11] == "| counts, index_select and NCCL, bfloat16 | 502 us, 150 GB/s | 504 us, 200 GB/s |"
    assert lines[12] == "| plain push, 132 SMs | 50 us, 332 GB/s | 50 us, 382 GB/s |"
    assert lines[13] == "| push to all others, 132 SMs |  | 70 us, 372 GB/s |"
    assert lines[-3] == "| 128 | **1280** | 1281 | 1282 | 1283 | 1284 |"


def test_the_table_omits_missing_steps(record):
    record["rows"] = [row for row in record["rows"] if row["step"] != exchange.NCCL_STEPS[-1]]
    table = exchange.readme_table(record)
    assert exchange.NCCL_STEPS[-1] not in table and exchange.NCCL_STEPS[-2] in table


def test_figures_show_the_largest_group(record):
    figures = exchange.figures(record)
    assert {"bandwidth", "few"} <= set(figures) <= {"bandwidth", "few", "dispatch-ladder", "combine-ladder"}
    dispatch = figures["bandwidth"].axes[0].lines[0]
    assert list(dispatch.get_xdata()) == list(dispatch_combine_measure.SMS)
    assert dispatch.get_ydata()[list(dispatch_combine_measure.SMS).index(24)] == 274, "of four GPUs"


def test_rows_of_larger_groups_are_kept_with_their_commit_and_date(record, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    now = record | {"commit": "1" * 7, "date": "2026-11-23"}
    kept = records.carried_over(record, exchange.out_of_reach, now)
    assert {row["config"]["ranks"] for row in kept} == {4} and len(kept) == len([*rows(4, 250)])
    kept_twice = records.carried_over(now | {"rows": kept}, exchange.out_of_reach, now)
    assert kept_twice == kept and all(row["measured"] == {"commit": "0" * 7, "date": "2026-11-22"} for row in kept)
    new = now | {"rows": [*rows(2, 210), *kept]}
    assert exchange.readme_table(new).endswith(
        "driver 1, commit 1111111, 2026-11-23; 4 GPUs with commit 0000000, 2026-11-22."
    )
    caption = [text.get_text() for text in exchange.figures(new)["bandwidth"].texts]
    assert any("commit 0000000, 2026-11-22" in text for text in caption), "of four GPUs"
    assert not records.carried_over(record, exchange.out_of_reach, now | {"driver": "2"}), "with another driver"
    assert not records.carried_over(None, exchange.out_of_reach, now)


def test_rows_need_enough_gpus(monkeypatch):
    monkeypatch.setattr(dispatch_combine_measure, "_measure_ranks", lambda ranks, quick, parts, files: [(ranks, parts)])
    for gpus, measured in ((1, []), (2, [2]), (8, [2, 4, 8])):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert exchange.measure([], True) == [(ranks, dispatch_combine_measure.PARTS) for ranks in measured]
    assert dispatch_combine_measure.measure([2], parts=["nccl"]) == [(2, ["nccl"])]


@pytest.mark.parametrize("parts", ["nccl", ["nccl", "ncll"]])
def test_unknown_parts_are_refused(parts):
    with pytest.raises(ValueError, match="parts is .*; it must be .* names out of push, large, nccl, decode"):
        dispatch_combine_measure.measure([2], parts=parts)


# Dispatch with torch and NCCL


@pytest.fixture
def world():
    """Tokens of three ranks and their destinations; rank 1 has none, and only rank 2 sends to rank 2."""
    torch.manual_seed(0)
    x = [torch.randn(tokens, 8).bfloat16() for tokens in (7, 0, 5)]
    chosen = [torch.rand(len(rows), 3) < 0.5 for rows in x]
    chosen[0][:, 2], chosen[2][:, 2] = False, True
    return x, chosen


def exchanged(x, chosen, change=lambda output: None):
    """Return what each rank receives; ``change`` corrupts the received rows."""

    def work(transport):
        def exchange(output, *rest):
            play(output, *rest)
            if output.dim() == 2:
                change(output)

        play, rank = played(transport), transport.rank
        own, is_in_rank = x[rank].to(transport.device), chosen[rank].to(transport.device)
        known = all_to_all_counts(is_in_rank, poisoned(exchange))
        return all_to_all_rows(own, *known, poisoned(exchange)).cpu()

    return LocalGroup(3).run(work)


def sent_to(rank, x, chosen):
    return [rows[selected[:, rank]] for rows, selected in zip(x, chosen, strict=True)]


def test_all_to_all_equals_dispatch(world):
    for rank, (given, want) in enumerate(zip(exchanged(*world), reference.dispatch(*world), strict=True)):
        assert torch.equal(given, want.x)
        assert wrong_rows(given, sent_to(rank, *world)) is None


def swap(output):
    output[[0, -1]] = output[[-1, 0]].clone()


def not_written(output):
    output[-1] = float("nan")


def one_bit(output):
    output.view(torch.int16)[0, 3] ^= 1


@pytest.mark.parametrize("change", [swap, not_written, one_bit])
def test_wrong_rows_are_rejected(world, change):
    errors = [wrong_rows(given, sent_to(rank, *world)) for rank, given in enumerate(exchanged(*world, change))]
    assert all(errors) and "are not those that it sent" in errors[0], errors


def test_missing_rows_are_rejected(world):
    assert "rows were received, not" in wrong_rows(exchanged(*world)[0][1:], sent_to(0, *world))


def test_poisoned_detects_an_exchange_that_writes_nothing():
    output = torch.ones(4, 2).bfloat16()
    poisoned(lambda output, given: None)(output, output.clone())
    assert output.isnan().all()


class Plan:
    """Rows that a peer "sends": of one rank, whose tokens stay."""

    def __init__(self, x, wrong):
        self.x, self.wrong, self.poisons, self.calls = x, wrong, True, []
        self.recv_src_idx = torch.arange(len(x))
        self.rank_prefix = torch.tensor([[len(x)]])

    def dispatch(self):
        self.calls.append(self.poisons)
        self.recv_x = self.x.clone()

    def dispatch_again(self):
        self.dispatch()
        self.recv_x += self.wrong

    def combine(self, rows):
        return rows.clone()

    def close(self):
        self.calls.append("closed")


@pytest.mark.parametrize("wrong", [0, 1])
def test_peers_are_checked_before_they_are_timed(wrong, capsys):
    plan, layout = Plan(torch.randn(6, 8).bfloat16(), wrong), {"is_token_in_rank": torch.ones(6, 1, dtype=torch.bool)}
    bench = dispatch_combine_measure._Bench.__new__(dispatch_combine_measure._Bench)
    bench.rank, bench.peers = (
        0,
        [SimpleNamespace(NAME="other", VERSION="1", plan_dispatch_combine=lambda problem: plan)],
    )
    bench.row = lambda step, operation, *rest, version: call(step, operation, rest[2])
    call = lambda step, operation, run: (step, operation, run())[:2]
    problem = Problem(SimpleNamespace(gather=lambda value: [value]), plan.x, None, None, 4, 24)
    found = peer_rows(bench, problem, layout, "bf16", 0, True)
    timed = [("peer:other", "dispatch"), ("peer:other, with notify", "dispatch"), ("peer:other", "combine")]
    assert found == ([] if wrong else timed)
    assert plan.calls == ([True, True] if wrong else [True, True, False, False, "closed"])
    assert ("are not what was sent" in capsys.readouterr().err) == bool(wrong)


def test_peers_are_in_the_table_and_the_figure(record):
    wanted = dict(operation="dispatch", dtype="bf16", step="final")
    record["rows"] += [row | {"step": "peer:other"} for row in records.select(record, **wanted)]
    assert "| other: dispatch, bfloat16, 24 SMs |" in exchange.readme_table(record)
    assert "other: dispatch, bfloat16" in exchange.peer_steps(record) and exchange.figures(record)
