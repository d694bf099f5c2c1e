"""Measures the call times of ``Buffer`` with one process per GPU, beside DeepEP's ``Buffer`` where it is installed.

Both have the same interface, so the same calls are measured. No call's host waits for the GPU.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.records import progress
from moe_numba.course.bench.records.environment import version
from moe_numba.course.bench.timing import launched_by
from moe_numba.course.bench.timing.multigpu import settle, slowest
from moe_numba.course.bench.topics.call_time.measure import loop_times
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.ranks.process_group import free_port, process_group

RANKS = 2  # processes, with a GPU each
TOKENS, HIDDEN, EXPERTS, TOPK = 64, 7168, 256, 8


def measure_buffer(loops):
    """Return the rows of ``Buffer``, and of DeepEP's where it is installed; the slowest rank's time counts."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        torch.multiprocessing.spawn(_work, (RANKS, free_port(), loops, found), nprocs=RANKS)
        return json.loads(found.read_text())


def _work(rank, ranks, port, loops, found):
    with process_group(rank, ranks, port), progress.said(rank == 0):
        rows = measure_rank(torch.distributed.group.WORLD, loops)
        if rank == 0:
            found.write_text(json.dumps(rows))


def measure_rank(group, loops):
    """Measure on one rank; return the rows, which are the same on all ranks."""
    configs = [get(RANKS) for get in (Buffer.get_dispatch_config, Buffer.get_combine_config)]
    buffer = Buffer(group, max(config.get_nvl_buffer_size_hint(2 * HIDDEN, RANKS) for config in configs))
    device = buffer.transport.device
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    topk_idx = torch.rand(TOKENS, EXPERTS, device=device).topk(TOPK, dim=1).indices.contiguous()
    arguments = x, topk_idx, torch.rand(TOKENS, TOPK, device=device), EXPERTS
    out = buffer.new_output(RANKS * TOKENS, HIDDEN, x.dtype, num_topk=TOPK)
    steps = {(name, f"final{suffix}"): call for (name, suffix), call in buffer_calls(buffer, *arguments, out).items()}
    steps |= {(name, "peer:DeepEP"): call for (name, _), call in _deep_ep_calls(group, arguments).items()}
    kernels = {}
    for name, call in steps.items():
        kernels[name] = launched_by(call)
        settle(buffer.transport)
    times = slowest(buffer.transport.gather(loop_times(steps, partial(settle, buffer.transport), loops)), kernels)
    out.close()
    buffer.destroy()
    row = dict(
        config={"ranks": RANKS, "num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN},
        size={"tokens": TOKENS},
        dtype="bf16",
    )
    return [
        records.row(
            step, call=stats, operation=name, version=version("deep_ep") if step.startswith("peer:") else None, **row
        )
        for (name, step), stats in times.items()
    ]


def buffer_calls(buffer, x, topk_idx, topk_weights, num_experts, out=None):
    """Return ``{(operation, suffix of the step): call}`` of a buffer, this package's or DeepEP's, each checked once.

    ``out`` is an output for dispatch, if the buffer's dispatch has this argument.
    """
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    layout: dict[str, Any] = dict(
        num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank
    )
    worst = dict(num_worst_tokens=RANKS * len(x), topk_idx=topk_idx, topk_weights=topk_weights)
    received, *_, handle, _ = buffer.dispatch(x, **layout)
    dispatches = {
        "Buffer.dispatch, num_worst_tokens": partial(buffer.dispatch, x, **layout, **worst),
        "Buffer.dispatch, handle": partial(buffer.dispatch, x, handle),
    }
    calls = {(name, ""): call for name, call in dispatches.items()}
    if out is not None:
        calls |= {(name, ", out="): partial(call, out=out) for name, call in dispatches.items()}
    expected = (x.float() * is_in_rank.sum(1, keepdim=True)).bfloat16()  # each copy of a token comes back
    for (name, suffix), call in calls.items():
        rows, *_, new_handle, _ = call()
        if not torch.equal(buffer.combine(rows, new_handle or handle)[0], expected):  # DeepEP returns no new handle
            raise AssertionError(f"{name}{suffix}: the combined rows are not the sums of the sent rows")
    combine = partial(buffer.combine, received, handle)
    if not torch.equal(combine()[0], expected):
        raise AssertionError("Buffer.combine: the combined rows are not the sums of the sent rows")
    layout_call = partial(buffer.get_dispatch_layout, topk_idx, num_experts)
    return {("Buffer.get_dispatch_layout", ""): layout_call, **calls, ("Buffer.combine", ""): combine}


def _deep_ep_calls(group, arguments):
    """Return the calls of DeepEP's buffer, none if it is not installed or fails."""
    try:
        import deep_ep
    except ModuleNotFoundError:
        return {}
    try:
        configs = [get(RANKS) for get in (deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config)]
        buffer = deep_ep.Buffer(group, max(config.get_nvl_buffer_size_hint(2 * HIDDEN, RANKS) for config in configs))
        return buffer_calls(buffer, *arguments)
    except Exception as error:  # the package is measured whatever DeepEP raises
        print(f"peer DeepEP is left out: {type(error).__name__}: {error}", file=sys.stderr)
        return {}
