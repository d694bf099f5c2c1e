"""Runs of the notebook on a layer's experts: kernels that group assignments, tables of times, a tiny model."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.records import format_us
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.prediction import NOISE, Judgement
from moe_numba.runtime.launch import launch

NAMES = "seqlens", "cu_seqlens", "gather_indices", "inverse_indices"


def groups_mismatch(outputs: Any, right: Any) -> str | None:
    """Return None, or which output of ``group_by_expert`` differs from the reference, and where."""
    for name, out, wanted in zip(NAMES, outputs, right, strict=True):
        if not torch.equal(out, wanted):
            return f"{name} differs at {(out != wanted).nonzero()[0].tolist()}"
    return None


def poisoned_groups(ids: torch.Tensor, num_experts: int) -> list[torch.Tensor]:
    """Return outputs of ``group_by_expert`` filled with -7."""
    sizes = (num_experts,), (num_experts + 1,), (ids.numel(),), tuple(ids.shape)
    return [torch.full(size, -7, dtype=torch.int32, device=ids.device) for size in sizes]


def group_by(kernel: Any, threads: int, ids: torch.Tensor, num_experts: int) -> Callable:
    """Return a call that launches one CTA of a kernel and returns its outputs, which were poisoned once."""
    outputs = poisoned_groups(ids, num_experts)

    def call():
        launch(kernel, 1, threads, ids, *outputs, ids.numel())
        return outputs

    return call


def call_times_table(ladder: Ladder, steps: Iterable[str]) -> str | None:
    """Return a table of steps' times, and the change of the call time, as predicted by the number of torch operations.

    The prediction multiplies the operations that a step saves by the first step's ``operation_us``; where a step saves
    none, there is no prediction. None if a time is missing.
    """
    steps = list(steps)
    us = {name: ladder.median_us(name, "call_us") for name in steps}
    operations = {name: ladder.median_us(name, "operations") for name in steps}
    operation_us = ladder.median_us(steps[0], "operation_us")
    if None in (operation_us, *us.values(), *operations.values()):
        return None
    heads = "step", "torch operations", "kernel time, us", "call time, us", "change of the call time"
    lines = [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---|"]
    for name, before in zip(steps, [None, *steps], strict=False):
        kernel_us = ladder.median_us(name, "kernel_us")
        times = "waits" if kernel_us is None else format_us(kernel_us), format_us(us[name])
        change = ""
        if before is not None:
            saved, changed = operations[before] - operations[name], us[name] - us[before]
            judgement = Judgement(us[before], us[name], saved * operation_us)
            change = str(judgement) if saved else f"measured {changed:+.1f} us ({_percent(changed / us[before])})"
        lines.append(f"| {name} | {operations[name]} | {' | '.join(times)} | {change} |")
    return "\n".join(lines)


def joined(us: Iterable[float | None]) -> str | None:
    """Format microseconds as "1.00 / 2.00 / 3.00"; None if one is missing."""
    found = list(us)
    return None if None in found else " / ".join(map(format_us, found))


@dataclass(frozen=True)
class RecordedTimes:
    """Recorded times of one model for several numbers of tokens; without a record all are None."""

    record: dict | None
    model: str
    sizes: tuple[int, ...]

    def us(self, step: str, tokens: int, field: str = "kernel_us") -> float | None:
        """Return a step's median in microseconds, or another field of its row."""
        size = {"tokens": tokens}
        row = self.record and records.find(self.record, step=step, config={"model": self.model}, size=size)
        value = row and row.get(field)
        return value["median"] if isinstance(value, dict) else value

    def listed(self, step: str, field: str = "kernel_us") -> str | None:
        """Format what is recorded of a step for all numbers of tokens."""
        return joined(self.us(step, tokens, field) for tokens in self.sizes)

    def launches(self, tokens: int) -> dict[str, float]:
        """Return the microseconds of a call's launches, each repeated alone."""
        own = {"config": {"model": self.model}, "size": {"tokens": tokens}}
        found = records.select(self.record, **own) if self.record else []
        parts = {row["step"]: row["kernel_us"]["median"] for row in found if row["step"].startswith("part: ")}
        return {step.removeprefix("part: "): us for step, us in parts.items()}

    def fastest_other(self, tokens: int) -> tuple[str, float | None]:
        """Return the name and the microseconds of the fastest other implementation; "" and None if there is none."""
        times = {step: self.us(step, tokens) for step in records.peers(self.record)} if self.record else {}
        measured = [(us, step.removeprefix("peer:")) for step, us in times.items() if us]
        us, name = min(measured, default=(None, ""))
        return name, us


def of_models(record: dict, models: Collection[str]) -> dict:
    """Return a record of the topic ``moe_layer`` with the rows of some models only."""
    return record | {"rows": [row for row in record["rows"] if row["config"]["model"] in models]}


def _percent(part):
    return f"{100 * part:+.1f} %"


def slowdown(times: dict[str, float], launch: str, before: tuple[str, str]) -> dict[str, str | None]:
    """Return sentences about a launch that follows each of two others, {other: sentence}, and a ``conclusion``.

    Parameters
    ----------
    times : dict
        Microseconds of each of the three alone, and of "other, launch" for both pairs. Empty: all sentences are None.
    """
    if not times:
        return dict.fromkeys((*before, "conclusion"))
    extra_us = {name: times[f"{name}, {launch}"] - times[name] - times[launch] for name in before}
    found: dict[str, str | None] = {
        name: f"after `{name}`, `{launch}` takes {us:+.0f} us ({_percent(us / times[launch])}) relative to "
        f"{times[launch]:.0f} us alone"
        for name, us in extra_us.items()
    }
    slower = [name for name, us in extra_us.items() if us > NOISE * times[launch]]
    if not slower:
        conclusion = "The hypothesis is refuted: neither slows it down by more than the noise."
    elif len(slower) == 2:
        conclusion = f"Both slow it down, so that is no property of `{before[0]}`: any kernel that writes as much does."
    elif max(extra_us.values()) - min(extra_us.values()) <= NOISE * times[launch]:
        conclusion = f"Both change it alike, so that is no property of `{before[0]}`."
    else:
        conclusion = f"Only `{slower[0]}` slows it down."
    return found | {"conclusion": conclusion}


def tiny_model(device: str) -> torch.nn.Module:
    """Make a Qwen3-MoE model of transformers with two layers of 8 experts and random bfloat16 weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, head_dim=32)
    counts = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=8)
    tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0, num_experts_per_tok=2)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, **tokens)).bfloat16().eval().to(device)
    # After the constructor, which draws other numbers with each version of torch. With 1 no choice of experts is near.
    torch.manual_seed(1)
    for parameter in model.parameters():  # larger than by default, so that the generated tokens differ
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model
