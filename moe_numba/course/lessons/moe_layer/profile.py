"""Tables of where a layer's time goes: a record's launches beside the whole layer, and a model beside measurements."""

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import H200
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.records import format_us
from moe_numba.course.bench.topics.moe_layer_ranks import show as ranks_bench
from moe_numba.course.draw.canvas import plural
from moe_numba.course.lessons.moe_layer import model

QWEN, DEEPSEEK = "Qwen3-30B-A3B", "DeepSeek-V3"
SHOWN = QWEN, DEEPSEEK, f"{DEEPSEEK}, 1 of 8 GPUs"
FEW, MANY = 64, 4096  # tokens on each GPU, of the model


def parts_table(record: dict) -> str:
    """Return a table of the whole layer, its launches, its GEMMs and the lower bound of each row of ``moe_layer``."""
    heads = "experts", "tokens", "whole layer", "sum of launches", "GEMMs", "lower bound", "layer / bound", "limit"
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * 6 + "---|"]
    for row in records.select(record, step="final"):
        model, tokens, bound = row["config"]["model"], row["size"]["tokens"], row["floor_us"]
        own = {"config": {"model": model}, "size": {"tokens": tokens}}
        median = {other["step"]: other["kernel_us"]["median"] for other in records.select(record, **own)}
        launches = sum(us for step, us in median.items() if step.startswith("part: "))
        rate = H200.tensor_flops[{"e4m3": "float8_e4m3fn"}.get(row["dtype"], "bfloat16")]
        limit = "tensor cores" if row["flops"] / rate * 1e6 > 0.999 * bound else "memory bandwidth"
        cells = [*map(format_us, (median["final"], launches, median["both GEMMs"], bound))]
        lines.append(f"| {model} | {tokens} | {' | '.join(cells)} | {median['final'] / bound:.2f} | {limit} |")
    return "\n".join([*lines, "", f"Microseconds, {plots.caption(record)}."])


def moved_bytes(config: dict, tokens: int) -> dict[str, int]:
    """Return {launch: bytes} that launches besides the GEMMs read and write; bfloat16, with a permutation."""
    x = 2 * tokens * config["hidden"]
    rows = config["topk"] * x
    activation = 2 * tokens * config["topk"] * 3 * config["intermediate"]
    return {"permute": x + rows, "activation": activation, "weighted_sum": rows + x}


def rates_table(record: dict, model: str, tokens: int) -> str:
    """Return a table of the launches of `moved_bytes`: megabytes, microseconds and rates."""
    lines = ["| launch | MB read and written | us | TB/s |", "|---|---:|---:|---:|"]
    for row in records.select(record, config={"model": model}, size={"tokens": tokens}):
        name, num_bytes = row["step"].removeprefix("part: "), moved_bytes(row["config"], tokens)
        if name in num_bytes:
            us, moved = row["kernel_us"]["median"], num_bytes[name]
            lines.append(f"| {name} | {moved / 1e6:.0f} | {format_us(us)} | {moved / us * 1e-6:.1f} |")
    return "\n".join([*lines, "", f"{model}, {plural(tokens, 'token')}."])


def profile(record: dict) -> str:
    """Return both tables of a record of the topic ``moe_layer``, for the models of the page."""
    shown = record | {"rows": [row for row in record["rows"] if row["config"]["model"] in SHOWN]}
    return f"{parts_table(shown)}\n\n{rates_table(record, QWEN, MANY)}"


def model_beside_measurements(ranks_record: dict) -> str:
    """Return how much faster than measured the model of a layer is on 8 GPUs, and its table."""
    lines = ["| tokens on each of 8 GPUs | model, us | measured, us | measured / model |", "|---:|---:|---:|---:|"]
    for tokens in (FEW, MANY):
        modelled, us = model.total_us(8, tokens), ranks_bench.fastest(ranks_record, 8, tokens)
        lines.append(f"| {tokens} | {modelled:.0f} | {format_us(us)} | {us / modelled:.1f} |")
    return "\n".join(lines)


def model_of_64_gpus() -> str:
    """Return the model's table of 1, 8 and 64 GPUs, and what a limit of nodes per token changes."""
    limited = model.total_us(64, MANY, model.MAX_NODES) / MANY
    transfer, all_nodes = model.transfer_us(64, MANY, model.MAX_NODES), model.transfer_us(64, MANY)
    text = (
        f"With {MANY} tokens on each of 64 GPUs, dispatch and combine take {all_nodes:.0f} us if a token may reach all "
        f"nodes. DeepSeek-V3's router sends a token to at most {model.MAX_NODES} nodes: then they take {transfer:.0f} "
        f"us, and a layer {limited:.2f} us per token."
    )
    return f"{model.table((1, 8, 64), (FEW, MANY))}\n\n{text}"
