"""Runs of the notebook on a layer's experts: kernels that group assignments, a table of call times, a tiny model."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from moe_numba.course.bench.records import format_us
from moe_numba.course.ladder import Ladder
from moe_numba.course.prediction import Judgement
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
    """Return a table of steps' call times and what each changes, as predicted by the number of torch operations.

    The prediction multiplies the operations that a step saves by the first step's time per operation. None if a time is
    missing.
    """
    steps = list(steps)
    us = {name: ladder.median_us(name, "call_us") for name in steps}
    operations = {name: ladder.median_us(name, "operations") for name in steps}
    if None in us.values() or None in operations.values():
        return None
    lines = ["| step | torch operations | call time, us | change of the call time |", "|---|---:|---:|---|"]
    per_operation = us[steps[0]] / operations[steps[0]]
    for name, before in zip(steps, [None, *steps], strict=False):
        gain_us = before and (operations[before] - operations[name]) * per_operation
        change = "" if before is None else Judgement(us[before], us[name], gain_us)
        lines.append(f"| {name} | {operations[name]} | {format_us(us[name])} | {change} |")
    return "\n".join(lines)


def tiny_model(device: str) -> torch.nn.Module:
    """Make a Qwen3-MoE model of transformers with two layers of 8 experts and random bfloat16 weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, head_dim=32)
    counts = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=8)
    tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0, num_experts_per_tok=2)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, **tokens)).bfloat16().eval().to(device)
    for parameter in model.parameters():  # larger than by default, so that the generated tokens differ
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model
