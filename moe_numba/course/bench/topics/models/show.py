"""Benchmark of models of transformers with their own and with this package's experts and routers.

The models have real widths and random weights, in bfloat16, and fewer layers. A forward pass has one token of each of 1
to 64 sequences, as a step of decoding, or one prompt. ``models_measure`` measures the rows. Records also have rows of
an earlier version with a context: 1024 earlier tokens of each sequence in a key/value cache.
"""

from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.records import format_us
from moe_numba.course.bench.topics.models.rows import DEFAULT, OURS, PACKED, WITH_ROUTERS

TOKENS = 1, 16, 64, 4096
QUICK_TOKENS = (16,)
BEFORE = f"peer:transformers {DEFAULT}"
COLUMNS = {BEFORE: "grouped_mm", OURS: "moe_numba", WITH_ROUTERS: "and routers", PACKED: "and MXFP4"}


def measure(peers, quick):
    """Return the rows of the record. It needs transformers."""
    from moe_numba.course.bench.topics.models import measure as models_measure

    return models_measure.measure(models_measure.MODELS, QUICK_TOKENS if quick else TOKENS)


def passes(record):
    """Yield (model, layers, tokens, context, {step: row}) of each forward pass."""
    found: dict = {}
    for row in record["rows"]:
        size = row["size"]
        key = row["config"]["model"], row["config"]["layers"], size["tokens"], size.get("context", 0)
        found.setdefault(key, {})[row["step"]] = row
    for key, steps in found.items():
        yield *key, steps


def figures(record):
    """Draw the kernel times of each forward pass as bars."""
    rows = [
        {"step": f"{model}, {tokens} token{'s' * (tokens > 1)}{f', context {context}' if context else ''}"}
        | {step: steps[step]["kernel_us"] for step in COLUMNS if step in steps}
        for model, _, tokens, context, steps in passes(record)
    ]
    title = f"Forward pass of models of transformers on an {record['gpu']}: kernel time"
    return {"passes": plots.bars_figure(rows, COLUMNS, title=title, caption=plots.caption(record))}


def readme_table(record):
    """Return a table of forward passes in microseconds: in a CUDA graph, and called eagerly in brackets."""
    others = [step for step in records.peers(record) if step != BEFORE]
    steps_shown = [BEFORE, *others, OURS, WITH_ROUTERS]
    names = [step.removeprefix("peer:transformers ") for step in steps_shown[:-2]]
    names = [f"`{name}`" for name in (*names, "moe_numba")] + ["with fused routers", "speedup"]
    has_packed = any(row["step"] == PACKED for row in record["rows"])
    names += ["in MXFP4"] * has_packed
    lines = [f"| model | tokens | context | {' | '.join(names)} |", "|---|---:|---:|" + "---:|" * len(names)]
    for model, layers, tokens, context, steps in passes(record):
        cells = [_cell(steps.get(step)) for step in steps_shown]
        cells.append(_speedup(steps.get(BEFORE), steps.get(WITH_ROUTERS)))
        cells += [_cell(steps.get(PACKED))] * has_packed
        lines.append(f"| {model}, {layers} layers | {tokens} | {context} | {' | '.join(cells)} |")
    version = next((row["version"] for row in record["rows"] if "version" in row), "")
    provenance = plots.provenance(record) + plots.other_commits(record, lambda row: row["config"]["model"])
    text = (
        "Microseconds of a forward pass in a CUDA graph and, in brackets, called eagerly until the GPU has finished. "
        "The models have random weights in bfloat16. Up to 64 tokens are decoded, one per sequence; the column context "
        "counts a sequence's tokens that are already in the key/value cache. 4096 tokens "
        f"are a prompt. `{DEFAULT}` is what transformers {version} runs by default; the speedup is that with fused "
        f"routers. {provenance[0].upper()}{provenance[1:]}."
    )
    return "\n".join([*lines, "", text])


_TIMES = "kernel_us", "pass_us"


def _speedup(before, after):
    if before is None or after is None:  # one did not fit into memory
        return ""
    ratios = [before[time]["median"] / after[time]["median"] for time in _TIMES]
    return "{} ({})".format(*map(records.format_ratio, ratios))


def _cell(row):
    return "" if row is None else "{} ({})".format(*(format_us(row[time]["median"]) for time in _TIMES))
