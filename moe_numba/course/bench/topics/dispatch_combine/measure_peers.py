"""Peers of the topic `dispatch_combine`: other projects' dispatch and combine of the same tokens, in the same run.

A module of ``--peers`` provides ``plan_dispatch_combine(problem)`` (`Problem`), which all ranks call. It returns None,
or an object with

- ``dispatch()``, which exchanges counts and sends the tokens with their experts and weights,
- ``dispatch_again()``, which sends the tokens by the same handle, without experts and weights,
- ``combine(rows)``, which returns the sums of bfloat16 rows, and ``close()``,
- ``recv_x``, ``recv_scales``, ``recv_src_idx`` and ``rank_prefix``, as ``Buffer.dispatch`` returns them,
- ``poisons``: while it is true, calls fill what they return with NaN first.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from moe_numba.course.bench.timing.dist import on_all_ranks


class Problem(NamedTuple):
    """What a peer dispatches and combines, on one rank."""

    transport: Any  # see ``expert_parallel.transport``
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # bfloat16, or FP8 and scales
    topk_idx: torch.Tensor  # [tokens, topk], int64
    topk_weights: torch.Tensor  # [tokens, topk], float32
    num_experts: int
    num_sms: int


def peer_rows(bench, problem, layout, dtype, wire, is_main):
    """Measure the peers of a benchmark, after checking what they send; report one that raises an error on any rank."""
    found = []
    for peer in bench.peers:
        what, plan = f"peer {peer.NAME} ({problem.num_sms} SMs, {dtype})", partial(peer.plan_dispatch_combine, problem)
        plan = on_all_ranks(problem.transport, what, plan)
        if plan is None:
            continue
        checks = (
            partial(_check, bench, plan, name, problem.x, dtype, layout) for name in ("dispatch", "dispatch_again")
        )
        if not all(on_all_ranks(problem.transport, what, check) for check in checks):
            continue
        plan.poisons = False
        calls = [(f"peer:{peer.NAME}", "dispatch", plan.dispatch_again)]
        if is_main:
            calls.append((f"peer:{peer.NAME}, with notify", "dispatch", plan.dispatch))
        if dtype == "bf16":
            calls.append((f"peer:{peer.NAME}", "combine", lambda plan=plan: plan.combine(plan.recv_x)))
        for step, operation, call in calls:
            row = bench.row(step, operation, problem.num_sms, dtype, call, wire, is_main, version=peer.VERSION)
            found.append(row)
        plan.close()
    return found


def _check(bench, plan, name, x, dtype, layout):
    getattr(plan, name)()
    received = plan.recv_x if dtype == "bf16" else (plan.recv_x, plan.recv_scales)
    bench.check(x, received, plan.recv_src_idx, plan.rank_prefix, plan.combine, layout)
    return True
