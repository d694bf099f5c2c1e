"""Benchmark of the alignment: the package's kernels, torch and the peers, over tokens and models."""

from functools import partial

import torch

from moe_numba import moe_align_block_size
from moe_numba.align import api, reference
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import copy_bandwidth, empty_kernel
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import kernel_times_table, steps_with_peers
from moe_numba.course.bench.timing import call_times, kernel_times, rotating
from moe_numba.runtime.launch import launcher

DEEPSEEK_V3 = dict(num_experts=256, topk=8)
BLOCK_SIZES = [16, 128]
OTHERS = [  # Mixtral, Qwen3-MoE, Kimi K2, and more experts than most kernels take
    dict(num_experts=8, topk=2, block_size=64),
    dict(num_experts=128, topk=8, block_size=64),
    dict(num_experts=384, topk=8, block_size=64),
    dict(num_experts=1024, topk=8, block_size=16),
]
TOKENS = [1, 4, 16, 64, 256, 1024, 2048, 4096, 16384, 65536]
OTHER_TOKENS = [1, 64, 4096, 65536]
ALLOCATIONS = 3  # of the outputs: a kernel's time may depend on where they lie; the median of them is recorded
CALL_TOKENS = 64  # of DeepSeek-V3: the host time of a call hardly depends on them


def measure(peers, quick):
    """Return the rows of the record. Every step's outputs are checked before it is timed."""
    bandwidth = copy_bandwidth()
    rows = empty_kernel()
    for block_size in BLOCK_SIZES:
        config = {**DEEPSEEK_V3, "block_size": block_size}
        for tokens in [64, 4096] if quick else TOKENS:
            rows += _measure(config, tokens, peers, bandwidth, main=True)
    if not quick:
        one_expert = _measure({**DEEPSEEK_V3, "block_size": 16}, 4096, peers, bandwidth, routing=one_expert_routing)
        rows += [{**row, "step": f"{row['step']}, one expert"} for row in one_expert]
        for config in OTHERS:
            for tokens in OTHER_TOKENS:
                rows += _measure(config, tokens, peers, bandwidth)
    return rows


def uniform_routing(tokens, num_experts, topk):
    """Route each token to distinct, uniformly distributed experts."""
    return torch.rand(tokens, num_experts, device="cuda").topk(topk, dim=1).indices.to(torch.int32)


def one_expert_routing(tokens, num_experts, topk):
    """Route all slots to one expert."""
    return torch.full((tokens, topk), num_experts // 2, dtype=torch.int32, device="cuda")


class _SerialPlan(api.AlignPlan):
    """The same kernels, launched without programmatic dependent launch."""

    def _launcher(self, kernel, *, pointers=None, **options):
        return launcher(kernel, (*(pointers or self.pointers), *("int32",) * 6), self.device, **options)


def _measure(config, tokens, peers, bandwidth, main=False, routing=uniform_routing):
    experts, block_size, topk = config["num_experts"], config["block_size"], config["topk"]
    inputs = rotating(lambda: routing(tokens, experts, topk), tokens * topk * 4)
    lengths = *reference.sizes(tokens * topk, block_size, experts), 1
    outs, gaps = [], []
    for i in range(ALLOCATIONS):
        outs.append([torch.empty(n, dtype=torch.int32, device="cuda") for n in lengths])
        gaps.append(torch.empty((3 << 20) + 1000 * i, dtype=torch.uint8, device="cuda"))
    out = outs[0]
    steps = {
        "final": lambda ids, _: moe_align_block_size(ids, block_size, experts),
        "final, out=": lambda ids, out: moe_align_block_size(ids, block_size, experts, out=out),
    }
    if main:
        serial = _SerialPlan(inputs[0], block_size, experts, None, False)
        steps["final, in order"] = lambda ids, out: serial.launch(ids, None, out) or out
        steps["torch"] = lambda ids, _: torch_align(ids, block_size, experts)
    versions, nondeterministic = {}, {"torch"}
    for peer in peers:
        if not peer.serves(tokens=tokens, **config):
            continue
        name = f"peer:{peer.NAME}"
        versions[name] = versions[f"{name}, out="] = peer.VERSION
        nondeterministic |= {name, f"{name}, out="}
        steps[name] = lambda ids, _, peer=peer: peer.align(ids, block_size, experts)
        steps[f"{name}, out="] = lambda ids, out, peer=peer: peer.align(ids, block_size, experts, out=out)
    for name, step in steps.items():
        for tensor in out:
            tensor.fill_(-7)
        torch.cuda.synchronize()
        tolerances = dict(any_order=True, any_tail=True) if name in nondeterministic else {}
        if wrong := reference.mismatch(*step(inputs[0], out), inputs[0], block_size, experts, **tolerances):
            raise AssertionError(f"{name}, {config}, {tokens} tokens: {wrong}")
    # Kernel times use preallocated outputs, so that the graph contains no allocations.
    timed = {
        (n, i): [partial(step, x, place) for x in inputs]
        for n, step in steps.items()
        if f"{n}, out=" not in steps
        for i, place in enumerate(outs)
    }
    by_place: dict[str, list] = {}
    for (n, _), stats in kernel_times(timed).items():
        by_place.setdefault(n, []).append(stats)
    kernel = {n: sorted(found, key=lambda stats: stats.median)[len(found) // 2] for n, found in by_place.items()}
    spread = {n: [round(f(stats.median for stats in found), 3) for f in (min, max)] for n, found in by_place.items()}
    is_called = main and tokens == CALL_TOKENS
    call = call_times({n: partial(s, inputs[0], out) for n, s in steps.items()}) if is_called else {}
    num_bytes = 4 * (tokens * topk + sum(lengths))
    return [
        records.row(
            name,
            config=config,
            size={"tokens": tokens},
            dtype="int32",
            kernel=kernel.get(name) or kernel.get(f"{name}, out="),
            call=call.get(name),
            floor_us=num_bytes / bandwidth * 1e6,
            bytes=num_bytes,
            allocations_us=spread.get(name) or spread.get(f"{name}, out="),
            version=versions.get(name),
        )
        for name in steps
        if name in call or not name.endswith(", out=")
    ]


def torch_align(topk_ids, block_size, num_experts):
    """Align valid ids in plain torch, as a user would; shapes do not depend on values, so a graph can capture it."""
    ids = topk_ids.flatten().long()
    length, num_blocks = reference.sizes(len(ids), block_size, num_experts)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device).index_add_(0, ids, torch.ones_like(ids))
    ends = ((counts + block_size - 1) // block_size).cumsum(0)
    order = ids.argsort(stable=True)
    starts = ends - (counts + block_size - 1) // block_size
    shift = starts * block_size - (counts.cumsum(0) - counts)
    position = shift[ids[order]] + torch.arange(len(ids), device=ids.device)
    sorted_token_ids = torch.full((length,), len(ids), dtype=torch.int32, device=ids.device)
    sorted_token_ids[position] = order.to(torch.int32)
    blocks = torch.arange(num_blocks, device=ids.device)
    expert_ids = torch.searchsorted(ends, blocks, right=True)
    expert_ids = torch.where(expert_ids < num_experts, expert_ids, -1).to(torch.int32)
    return sorted_token_ids, expert_ids, (ends[-1:] * block_size).to(torch.int32)


def figures(record):
    """Draw the sweep over tokens for both block sizes and, if recorded, the ladder."""
    made = {
        f"sweep-block-{block_size}": plots.kernel_sweep(
            record,
            steps_with_peers(record, "torch"),
            dict(config={**DEEPSEEK_V3, "block_size": block_size}, dtype="int32"),
            title=f"moe_align_block_size, 256 experts, top-8, block {block_size}: kernel time",
        )
        for block_size in BLOCK_SIZES
    }
    wanted = dict(size={"tokens": 4096}, dtype="int32", config={**DEEPSEEK_V3, "block_size": 16})
    peers = {name: records.find(record, step=name, **wanted) for name in records.peers(record)}
    lines = {name.removeprefix("peer:"): row["kernel_us"]["median"] for name, row in peers.items() if row}
    title = "Alignment, step by step: {tokens} tokens, 256 experts, block 16"
    if ladder := plots.recorded_ladder(record, "align_published_ladder", title, lines):
        made["ladder"] = ladder
    return made


def readme_table(record):
    """Return a table of kernel times in microseconds: this package, the peers, torch, and the lower bound."""
    rows = {
        f"{tokens}, {block_size}": dict(config={**DEEPSEEK_V3, "block_size": block_size}, size={"tokens": tokens})
        for block_size in BLOCK_SIZES
        for tokens in TOKENS
    }
    table = kernel_times_table(record, "tokens, block", steps_with_peers(record, "torch"), rows)
    return f"{table}\n\nKernel time in microseconds, median, {plots.provenance(record)}."
