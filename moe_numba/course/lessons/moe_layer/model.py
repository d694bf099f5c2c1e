"""Lower bounds of a layer's experts, and a model of a DeepSeek-V3 layer whose experts are distributed over GPUs.

Both compute times from data-sheet rates of an H200. In the model, nodes have 8 GPUs and routing is uniform. A token's
row crosses the network once per node that has one of its experts, and is forwarded over NVLink; NVLink and network
transfer at the same time. Rows are FP8 with scales in dispatch and bfloat16 in combine. Every part takes the time of
its bytes or operations, and transfers do not overlap with GEMMs.
"""

from math import comb

from moe_numba.course.bench.baselines.limits import H200 as GPU
from moe_numba.course.bench.topics.grouped_gemm.show import TORCH_NAMES
from moe_numba.moe_layer.compile_layers import Layer

NVLINK, NETWORK, NODE = 450e9, 50e9, 8  # bytes per second of a GPU in each direction; GPUs
NUM_EXPERTS, TOPK, HIDDEN, INTERMEDIATE, MOE_LAYERS = 256, 8, 7168, 2048, 58
MAX_NODES = 4  # that DeepSeek-V3's router sends a token to
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE  # FP8 weights
_BYTES = {"bf16": 2, "e4m3": 1, "mxfp4": 17 / 32}  # of a weight


def ranks_per_token(num_experts: int, topk: int, ranks: int) -> float:
    """Return how many ranks a token reaches on average if its distinct experts are drawn uniformly at random."""
    others = comb(num_experts - num_experts // ranks, topk)  # choices without an expert of a given rank
    return ranks * (1 - others / comb(num_experts, topk))


def experts_used(tokens: int, num_experts: int, topk: int) -> float:
    """Return how many experts tokens use on average, each of which has ``topk`` drawn uniformly at random."""
    return num_experts * (1 - (1 - topk / num_experts) ** tokens)


def bounds(layer: Layer, tokens: int) -> tuple[float, float, float]:
    """Return the experts that tokens use on average, and the microseconds to read their weights and to compute."""
    routed, shared = layer.num_experts - layer.num_shared, layer.num_shared
    used = shared + experts_used(tokens, routed, layer.topk - shared)
    weights = 3 * layer.hidden * layer.intermediate  # of an expert
    read = used * weights * _BYTES[layer.dtype] / GPU.hbm_bandwidth
    compute = 2 * layer.topk * tokens * weights / GPU.tensor_flops[TORCH_NAMES[layer.dtype]]
    return used, read * 1e6, compute * 1e6


def part_times(gpus: int, tokens: int, max_nodes: int | None = None) -> dict[str, float]:
    """Return {part: microseconds} of a layer with ``tokens`` tokens on each of ``gpus`` GPUs.

    ``max_nodes``: most nodes that a token reaches on average; by default as many as with uniform routing.
    """
    nodes = max(gpus // NODE, 1)
    used = NUM_EXPERTS // gpus * (1 - (1 - TOPK / NUM_EXPERTS) ** (tokens * gpus))
    nvlink_rows = tokens * ranks_per_token(NUM_EXPERTS, TOPK, gpus) * (gpus - nodes) / gpus
    reached = min(ranks_per_token(NUM_EXPERTS, TOPK, nodes), max_nodes or nodes)
    network_rows = tokens * reached * (nodes - 1) / nodes
    seconds_per_byte = max(nvlink_rows / NVLINK, network_rows / NETWORK)
    seconds = {
        "read weights": used * EXPERT_BYTES / GPU.hbm_bandwidth,
        "compute": 2 * TOPK * tokens * EXPERT_BYTES / GPU.tensor_flops["float8_e4m3fn"],
        "dispatch": seconds_per_byte * (HIDDEN + HIDDEN / 128 * 4),  # a float32 scale per 128 elements
        "combine": seconds_per_byte * 2 * HIDDEN,
    }
    return {name: 1e6 * value for name, value in seconds.items()}


def total_us(gpus: int, tokens: int, max_nodes: int | None = None) -> float:
    """Return the microseconds of a layer: GEMMs that read or compute, dispatch and combine."""
    parts = part_times(gpus, tokens)
    return max(parts["read weights"], parts["compute"]) + transfer_us(gpus, tokens, max_nodes)


def transfer_us(gpus: int, tokens: int, max_nodes: int | None = None) -> float:
    """Return the microseconds of dispatch and combine."""
    parts = part_times(gpus, tokens, max_nodes)
    return parts["dispatch"] + parts["combine"]


def table(gpu_counts: tuple[int, ...], token_counts: tuple[int, ...]) -> str:
    """Return the parts' times for each number of GPUs and tokens as a Markdown table."""
    heads = "GPUs", "tokens on each", "weights on each, GB", "rows per expert", *part_times(1, 1), "us per token"
    lines = [f"| {' | '.join(heads)} |", "|---:" * len(heads) + "|"]
    for tokens in token_counts:
        for gpus in gpu_counts:
            times, gigabytes = part_times(gpus, tokens).values(), MOE_LAYERS * NUM_EXPERTS // gpus * EXPERT_BYTES / 1e9
            cells = [f"{gigabytes:.0f}", f"{tokens * gpus * TOPK / NUM_EXPERTS:.0f}", *(f"{us:.0f}" for us in times)]
            lines.append(f"| {gpus} | {tokens} | {' | '.join(cells)} | {total_us(gpus, tokens) / tokens:.2f} |")
    return "\n".join(lines)
