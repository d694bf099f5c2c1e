"""The course's topics in one table, from which tables of README.md and docs/ are generated.

A bench topic is a module ``bench/topics/<name>.py`` that ``python -m moe_numba bench <name>`` measures.
"""

from typing import NamedTuple


class Topic(NamedTuple):
    """One notebook of the course and what belongs to it."""

    notebook: str  # the file name in notebooks/, without its ending
    title: str  # what the notebook builds: a sentence for a table
    source: str = ""  # the project whose kernel the notebook follows
    bench: str = ""  # the bench topic, whose record and block of docs/measurements.md have the same name
    measures: str = ""  # what the bench topic measures, for the list of commands
    records: tuple[str, ...] = ()  # the records that the notebook itself writes
    hopper: bool = False  # the notebook sets MOE_NUMBA_ONLY=90: on other GPUs it runs in the simulator
    gpus: int = 1  # that its times need; on fewer its ranks are virtual, and it records nothing


TOPICS = (
    Topic(
        "00_start_here",
        "what the lessons assume: launches, warps, memory; the simulator; how kernel time and call time are measured",
        bench="call_time",
        measures="the host time of a Python call of each function",
        records=("start_here",),
    ),
    Topic(
        "01_gate_prompt",
        "the gate: choose each token's experts",
        "SGLang's `moe_fused_gate`",
        "gate",
        "the gate",
        ("gate_prompt_ladder",),
    ),
    Topic(
        "02_gate_decode",
        "the gate for 1 to 64 tokens: the chain of one token, and what starts before it",
        records=("gate_decode_ladder",),
    ),
    Topic(
        "03_align_published",
        "the alignment: sort assignments by expert and pad each expert to whole blocks",
        "SGLang's `moe_align_block_size`",
        "align",
        "the alignment",
        ("align_published_ladder",),
    ),
    Topic(
        "04_align_one_launch",
        "the alignment in one launch: recompute, exchange counts, or rank in a warp",
        records=("one_launch_ladder", "align_one_launch_ladder", "gate_align_ladder"),
    ),
    Topic(
        "05_shared_experts",
        "shared-expert fusion: route the shared expert like a routed one, and see what that saves",
        "SGLang",
        "shared_experts",
        "a whole layer, with the shared expert separate and fused",
        ("shared_experts_ladder",),
        hopper=True,
    ),
    Topic(
        "06_hopper_gemm",
        "an FP8 GEMM, step by step to the limit of the tensor cores: TMA, mbarriers, wgmma, a producer, multicast",
        records=("hopper_gemm_ladder",),
        hopper=True,
    ),
    Topic(
        "07_grouped_gemm",
        "the experts' FP8 GEMMs in one launch: find tiles, skip padding and maps, tiles for few and many rows",
        "Tencent's hpc-ops",
        "grouped_gemm",
        "the grouped GEMM",
        ("grouped_gemm_lesson_ladder",),
        hopper=True,
    ),
    Topic(
        "08_block_scales",
        "an FP8 GEMM with block scales: who multiplies by them, and what limits the kernel then",
        "DeepGEMM",
        records=("block_scales_ladder",),
        hopper=True,
    ),
    Topic(
        "09_w4_weights",
        "a GEMM for few tokens whose weights have 4 bits: decode them on the way to the tensor cores",
        records=("w4_weights_ladder",),
        hopper=True,
    ),
    Topic(
        "10_dispatch_layout",
        "the dispatch layout: count the tokens that each rank sends to each rank and expert",
        "DeepEP, intranode",
        "dispatch_layout",
        "the dispatch layout",
        ("dispatch_count_ladder",),
        hopper=True,
    ),
    Topic(
        "11_talk_to_a_peer",
        "talk to a peer: addresses, release and acquire, what a flag costs, rings of your own, and how they deadlock",
        "DeepEP, intranode",
        records=("peer_ladder",),
        hopper=True,
        gpus=2,
    ),
    Topic(
        "12_dispatch",
        "dispatch: send token rows over NVLink through ring buffers",
        "DeepEP, intranode",
        "dispatch_combine",
        "dispatch and combine, on two GPUs or more",
        ("dispatch_ladder",),
        hopper=True,
        gpus=2,
    ),
    Topic(
        "13_combine",
        "combine: return the experts' results and sum them per token, while rows arrive; two deadlocks",
        "DeepEP, intranode",
        records=("combine_steps_ladder",),
        hopper=True,
        gpus=2,
    ),
    Topic(
        "14_low_latency",
        "low-latency dispatch and combine for decode: one launch each, without counts",
        "DeepEP, low-latency mode",
        "low_latency",
        "low-latency dispatch and combine, on one GPU or more",
        ("low_latency_ladder",),
    ),
    Topic(
        "15_moe_layer",
        "the experts of a layer: grouping by expert, grouped GEMMs and the weighted sum in one call",
        "vLLM's and SGLang's `fused_experts`",
        "moe_layer",
        "the experts of whole MoE layers",
        ("layer_ladder", "layer_group_ladder", "layer_swiglu_ladder", "layer_sum_ladder"),
        hopper=True,
    ),
    Topic(
        "16_one_kernel",
        "a layer on several GPUs in one kernel: flags instead of launches, and why they cannot deadlock",
        "DeepGEMM's MegaMoE",
        records=("one_kernel_ladder",),
        hopper=True,
        gpus=2,
    ),
)
# Record -> the notebook whose first edition wrote it; docs/*.md, lessons and `bench.latencies` cite them.
FIRST_EDITION = {
    "gate_ladder": "01_gate_prompt",
    "align_ladder": "03_align_published",
    "align_small_ladder": "03_align_published",
    "hopper_ladder": "06_hopper_gemm",
    "grouped_gemm_dense_ladder": "07_grouped_gemm",
    "grouped_gemm_ladder": "07_grouped_gemm",
    "grouped_gemm_block_scales_ladder": "08_block_scales",
    "grouped_gemm_mxfp4_ladder": "09_w4_weights",
    "ring_buffer_dispatch_ladder": "12_dispatch",
    "dispatch_layout_ladder": "10_dispatch_layout",
    "combine_ladder": "13_combine",
    "moe_layer_ladder": "15_moe_layer",
}
# {bench topic: what it measures}; the last ones belong to no notebook.
BENCH_TOPICS = {topic.bench: topic.measures for topic in TOPICS if topic.bench} | {
    "first_call": "imports, `warm_up`, and the first call of a layer in a new process",
    "gate_align": "gate and alignment of few tokens, in two launches and in one",
    "grouped_gemm_tiles": "the tile configurations of the grouped GEMM; writes the package's table of the best ones",
    "models": "Hugging Face Transformers models with their own and with this package's experts and routers",
    "moe_layer_ranks": "experts of a layer that are distributed over two GPUs or more",
    "moe_layer_routings": "the experts of whole MoE layers, by number of tokens and routing",
    "older_gpus": "the kernels for older GPUs, beside those for this GPU",
    "training": "a training step of a layer's experts, forward and backward, beside Hugging Face Transformers",
}


class Headline(NamedTuple):
    """One line of the first table of the measurements: the package's step of a record beside the best of the others."""

    label: str
    record: str
    where: dict  # config, size and dtype of the rows
    ours: str = "final"
    others: tuple[str, ...] = ()  # steps; the peers of the record are always included
    notes: dict = {}  # {step: name in the table}
    front: bool = False  # also in the README


def _headlines():
    gate = dict(config={"num_experts": 256, "num_expert_group": 8}, dtype="float32")
    align = {"num_experts": 256, "block_size": 16}
    for tokens in (64, 16384):
        where = gate | {"size": {"tokens": tokens}}
        others = "torch eager", "torch.compile"
        yield Headline(f"gate, {tokens} tokens", "gate", where, others=others, front=tokens == 64)
    for tokens in (64, 16384):
        where = {"config": align, "size": {"tokens": tokens}}
        label = f"alignment, {tokens} tokens, blocks of 16"
        yield Headline(label, "align", where, others=("torch",), front=tokens > 64)
    scales = {"tensor": "a scale per expert", "block": "block scales"}
    for scaling, rows in (("block", 128), ("block", 8192), ("tensor", 8192)):
        config = {"num_groups": 32, "n": 4096, "k": 7168, "scaling": scaling, "routing": "uniform"}
        where = {"config": config, "size": {"rows": rows}}
        label = f"FP8 grouped GEMM, {scales[scaling]}, 32 experts of 4096 x 7168, {rows} rows"
        front = (scaling, rows) == ("block", 8192)
        yield Headline(label, "grouped_gemm", where, others=("torch", "torch, loop"), front=front)
    for tokens in (64, 4096):
        where = {"config": {"model": "Qwen3-30B-A3B"}, "size": {"tokens": tokens}}
        label = f"experts of a Qwen3-30B-A3B layer in bfloat16, {tokens} tokens"
        yield Headline(label, "moe_layer", where, front=tokens > 64)
    where = {"config": {"model": "Qwen3-30B-A3B"}, "size": {"tokens": 4096}}
    yield Headline(
        "training step of a Qwen3-30B-A3B layer's experts, 4096 tokens, without a CUDA graph",
        "training",
        where,
        front=True,
    )
    where = {"config": {"model": "DeepSeek-V3"}, "size": {"tokens": 64}}
    yield Headline("experts of a DeepSeek-V3 layer in FP8, block scales, 64 tokens", "moe_layer", where)
    where = {"config": {"ranks": 2}, "size": {"tokens": 32}, "dtype": "bf16"}
    for step, layout in (("final", "packed by expert"), ("in slots", "in slots")):
        label = f"low-latency dispatch and combine, {layout}, 2 GPUs, 32 tokens each"
        yield Headline(label, "low_latency", where, step)
    where = {"config": {"ranks": 4, "num_experts": 256}, "size": {"tokens": 4096}}
    names = {"counts, index_select and NCCL": "torch and NCCL"}
    label = "dispatch with its exchange of counts, 4 GPUs, 4096 tokens each"
    yield Headline(label, "dispatch_combine", where, "final, with notify", tuple(names), names, front=True)


HEADLINES = tuple(_headlines())
