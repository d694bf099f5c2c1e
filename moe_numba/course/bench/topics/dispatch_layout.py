"""Benchmark of the dispatch layout over the number of tokens, with torch and our port of DeepEP's kernel as peers."""

import torch

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import copy_bandwidth, empty_kernel
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import kernel_times_table
from moe_numba.course.bench.timing import call_times, kernel_times, rotating
from moe_numba.course.deepep_port import dispatch_layout
from moe_numba.expert_parallel import get_dispatch_layout, reference

DEEPSEEK_V3 = dict(num_experts=256, topk=8, ranks=8)
OTHERS = [dict(num_experts=64, topk=6, ranks=4), dict(num_experts=384, topk=8, ranks=8)]  # DeepSeek-V2-Lite, Kimi K2
TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536]
OTHER_TOKENS = [64, 4096]
CALL_TOKENS = 4096
DEVICE = "cpu" if simulator.ENABLED else "cuda"
STEPS = {"moe_numba": "final", "DeepEP's kernel, our port": "port", "torch": "torch"}


def uniform_routing(tokens, num_experts, topk, device=DEVICE):
    """Draw distinct experts for each token, all equally likely: int64 [tokens, topk]."""
    return torch.rand(tokens, num_experts, device=device).topk(topk, dim=1).indices.contiguous()


def layout_bytes(tokens, topk, num_experts, ranks):
    """Return the minimum number of bytes to move: ids read once, flags and counts written once."""
    return 8 * tokens * topk + tokens * ranks + 4 * (num_experts + ranks)


def measure(peers, quick):
    """Return the record's rows; every step's outputs are checked before it is timed."""
    bandwidth = copy_bandwidth()
    rows = empty_kernel()
    for tokens in [64, 4096] if quick else TOKENS:
        rows += measure_layout(DEEPSEEK_V3, tokens, bandwidth)
    for config in [] if quick else OTHERS:
        for tokens in OTHER_TOKENS:
            rows += measure_layout(config, tokens, bandwidth)
    return rows


def measure_layout(config, tokens, bandwidth):
    """Return the rows of one size: the package's kernel, our port of DeepEP's kernel, and torch."""
    experts, topk, ranks = config["num_experts"], config["topk"], config["ranks"]
    inputs = rotating(lambda: uniform_routing(tokens, experts, topk, DEVICE), tokens * topk * 8)
    out = layout_outputs(tokens, experts, ranks)
    steps = {
        "final": lambda ids: get_dispatch_layout(ids, experts, ranks),
        "final, out=": lambda ids: get_dispatch_layout(ids, experts, ranks, out=out),
        "port": lambda ids: dispatch_layout.get_dispatch_layout(ids, experts, ranks, out=out),
        "torch": lambda ids: torch_layout(ids, experts, ranks),
    }
    right = reference.dispatch_layout(inputs[0], ranks, experts)
    for name, step in steps.items():
        for tensor in out:
            tensor.view(torch.uint8).fill_(0xCD)
        for given, wanted in zip(step(inputs[0]), right, strict=True):
            if not torch.equal(given.view(torch.uint8), wanted.view(torch.uint8)):
                raise AssertionError(f"{name}, {config}, {tokens} tokens: the layout is wrong")
    calls = {n: [lambda x=x, s=s: s(x) for x in inputs] for n, s in steps.items() if n != "final"}
    kernel = kernel_times(calls)
    kernel["final"] = kernel["final, out="]  # an allocation in a graph would be counted
    call = call_times({n: (lambda s=s: s(inputs[0])) for n, s in steps.items()}) if tokens == CALL_TOKENS else {}
    count = layout_bytes(tokens, topk, experts, ranks)
    more = dict(
        config=config,
        size={"tokens": tokens},
        dtype="int64",
        operation="layout",
        floor_us=count / bandwidth * 1e6,
        bytes=count,
    )
    return [
        records.row(n, kernel=kernel[n], call=call.get(n), **more) for n in steps if n in call or n != "final, out="
    ]


def layout_outputs(tokens, num_experts, ranks, device=None):
    """Allocate poisoned outputs."""
    shapes = ((ranks,), torch.int32), ((num_experts,), torch.int32), ((tokens, ranks), torch.bool)
    out = tuple(torch.empty(shape, dtype=dtype, device=device or DEVICE) for shape, dtype in shapes)
    for tensor in out:
        tensor.view(torch.uint8).fill_(0xCD)
    return out


def torch_layout(topk_idx, num_experts, ranks):
    """Compute the layout as a torch user would, for valid ids; without host synchronisation, for CUDA graphs."""
    flat = topk_idx.flatten()
    per_expert = torch.zeros(num_experts, dtype=torch.int32, device=flat.device)
    per_expert.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    is_in = torch.zeros(len(topk_idx), ranks, dtype=torch.bool, device=flat.device)
    is_in.scatter_(1, topk_idx // (num_experts // ranks), True)
    return is_in.sum(dim=0, dtype=torch.int32), per_expert, is_in


def figures(record):
    """Draw the layout over tokens, and the ladder if recorded."""
    title = "get_dispatch_layout, 256 experts, top-8, 8 ranks: kernel time"
    made = {"layout": plots.kernel_sweep(record, STEPS, dict(operation="layout", config=DEEPSEEK_V3), title=title)}
    title = "The dispatch layout, step by step: {tokens} tokens"
    wanted = dict(operation="layout", config=DEEPSEEK_V3, size={"tokens": 4096}, step="torch")
    lines = {"torch": row["kernel_us"]["median"]} if (row := records.find(record, **wanted)) else {}
    if ladder := plots.recorded_ladder(record, "dispatch_count_ladder", title, lines):
        made["layout-ladder"] = ladder
    return made


def readme_table(record):
    """Format the kernel times in microseconds: the package, our port of DeepEP's kernel, torch, the lower bound."""
    rows = {str(tokens): dict(operation="layout", config=DEEPSEEK_V3, size={"tokens": tokens}) for tokens in TOKENS}
    table = kernel_times_table(record, "tokens", STEPS, rows)
    return f"{table}\n\n`get_dispatch_layout`: kernel time in microseconds, median, {plots.provenance(record)}."
