"""Benchmark of gate and alignment together: in two launches, and in the one of ``biased_grouped_topk_align``."""

import torch

from moe_numba import biased_grouped_topk, biased_grouped_topk_align, moe_align_block_size
from moe_numba.align.api import make_align_outputs
from moe_numba.align.with_gate import MAX_EXPERTS, MAX_TOKENS
from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import markdown_table
from moe_numba.course.bench.timing import call_times, kernel_times, rotating
from moe_numba.course.bench.topics import gate

MODELS = {name: config for name, config in gate.MODELS.items() if config["num_experts"] <= MAX_EXPERTS}
TOKENS = [1, 2, 4, MAX_TOKENS]
CALL_TOKENS = MAX_TOKENS  # of DeepSeek-V3: the host time of a call hardly depends on them
BLOCK_SIZE = 16
DTYPE = "float32"
DEVICE = "cuda"
TWO, ONE = "gate, then align", "gate and align in one launch"


def measure(peers, quick):
    """Return the rows of the record. Both give the same bits, which is checked before they are timed."""
    return [
        row
        for config in MODELS.values()
        for tokens in ([4] if quick else TOKENS)
        for row in _measure(config, tokens, has_call=config is gate.DEEPSEEK_V3 and tokens == CALL_TOKENS)
    ]


def _measure(config, tokens, has_call):
    experts, topk = config["num_experts"], config["topk"]
    options = {k: v for k, v in config.items() if k not in ("num_experts", "topk")}
    bias = None if "scoring" in config else torch.rand(experts, device=DEVICE) * 0.2
    inputs = rotating(lambda: torch.randn(tokens, experts, device=DEVICE), tokens * experts * 4)
    routed = torch.empty(tokens, topk, device=DEVICE), torch.empty(tokens, topk, dtype=torch.int32, device=DEVICE)
    aligned = make_align_outputs(None, tokens * topk, BLOCK_SIZE, experts, True, False, inputs[0].device)

    def two(x):
        _, ids = biased_grouped_topk(x, bias, topk, **options, out=routed)
        moe_align_block_size(ids, BLOCK_SIZE, experts, out=aligned)
        return *routed, *aligned

    def one(x):
        return biased_grouped_topk_align(x, bias, topk, BLOCK_SIZE, **options, out=(*routed, *aligned))

    steps = {TWO: two, ONE: one}
    expected = [tensor.clone() for tensor in two(inputs[0])]
    for tensor in (*routed, *aligned):
        tensor.fill_(-7)
    if not all(map(torch.equal, expected, one(inputs[0]))):
        raise AssertionError(f"one launch differs from two: {config}, {tokens} tokens")
    kernel = kernel_times({n: [lambda x=x, s=s: s(x) for x in inputs] for n, s in steps.items()})
    call = call_times({n: (lambda s=s: s(inputs[0])) for n, s in steps.items()}) if has_call else {}
    config, size = {**config, "block_size": BLOCK_SIZE}, {"tokens": tokens}
    return [records.row(n, config=config, size=size, dtype=DTYPE, kernel=kernel[n], call=call.get(n)) for n in steps]


def figures(record):
    """Draw nothing: the table is short."""
    return {}


def times_of(record, model, tokens):
    """Return the median times of two launches and of one, in microseconds, or None without them."""
    config = {**MODELS[model], "block_size": BLOCK_SIZE}
    rows = [records.find(record, step=step, config=config, size={"tokens": tokens}) for step in (TWO, ONE)]
    return tuple(row["kernel_us"]["median"] for row in rows) if all(rows) else None


def readme_table(record):
    """Return a table of the times of two launches, of one, and of what one saves."""
    lines = []
    for model, config in MODELS.items():
        cells = []
        for tokens in TOKENS:
            if times := times_of(record, model, tokens):
                before, after = times
                cells.append(f"{before:.2f} → {after:.2f} ({round(100 * (after / before - 1)):+} %)")
            else:
                cells.append("")
        lines.append((model, f"{config['num_experts']}, top-{config['topk']}", *cells))
    headings = "model", "experts", *(f"{tokens} token{'s' * (tokens > 1)}" for tokens in TOKENS)
    table = markdown_table(headings, lines, text_columns=2)
    what = f"Kernel time in microseconds of two launches → of one, {DTYPE} logits, blocks of {BLOCK_SIZE}"
    return f"{table}\n\n{what}; {plots.provenance(record)}."
