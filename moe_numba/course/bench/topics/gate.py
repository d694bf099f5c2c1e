"""Benchmark of the gate: the package's kernels, torch and the peers, over tokens, dtypes and models."""

import torch

from moe_numba import biased_grouped_topk
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits, copy_bandwidth, empty_kernel
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import kernel_times_table, steps_with_peers
from moe_numba.course.bench.timing import call_times, kernel_times, rotating
from moe_numba.gate import reference

DEEPSEEK_V3 = dict(num_experts=256, num_expert_group=8, topk_group=4, topk=8)
NO_GROUPS = dict(num_expert_group=1, topk_group=1)
SOFTMAX = dict(NO_GROUPS, scoring="softmax")  # and no correction bias
MODELS = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi K2": dict(num_experts=384, topk=8, **NO_GROUPS),
    "gpt-oss-20b": dict(num_experts=32, topk=4, **SOFTMAX),
    "gpt-oss-120b": dict(num_experts=128, topk=4, **SOFTMAX),
    "Qwen3-30B-A3B": dict(num_experts=128, topk=8, **SOFTMAX),
    "Qwen3-Next": dict(num_experts=512, topk=10, **SOFTMAX),
}
OTHERS = [  # shapes that the peers test, and more experts than most kernels take
    dict(num_experts=128, num_expert_group=4, topk_group=2, topk=4),
    dict(num_experts=160, topk=8, **NO_GROUPS),
    dict(num_experts=512, num_expert_group=16, topk_group=8, topk=16),
    dict(num_experts=896, topk=16, **SOFTMAX),
]
TOKENS = [1, 64, 256, 1024, 4096, 16384, 65536]
OTHER_TOKENS = [1, 64, 4096, 65536]
CALL_TOKENS, CALL_DTYPE = 64, "float32"  # of DeepSeek-V3: the host time of a call hardly depends on them
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MUFU_OPERATIONS = {"sigmoid": 2, "softmax": 1}  # per logit: an exponential, and a reciprocal
MUFU_OPERATIONS_PER_CLOCK = 16  # per SM


def floor_us(tokens, config, dtype, bandwidth):
    """Return the bytes and the lower bound in us: each byte moved once, or the MUFU operations of the scores."""
    experts, topk = config["num_experts"], config["topk"]
    num_bytes = tokens * (experts * DTYPES[dtype].itemsize + topk * 8)
    limits = chip_limits()
    mufu_rate = limits.sm_count * MUFU_OPERATIONS_PER_CLOCK * limits.boost_clock
    operations = tokens * experts * MUFU_OPERATIONS[config.get("scoring", "sigmoid")]
    return num_bytes, max(num_bytes / bandwidth, operations / mufu_rate) * 1e6


def measure(peers, quick):
    """Return the rows of the record. Every step's outputs are checked before it is timed."""
    bandwidth = copy_bandwidth()
    compiled = torch.compile(_eager, dynamic=False)
    rows = empty_kernel()
    for config in [*MODELS.values(), *OTHERS]:
        main = config is DEEPSEEK_V3
        for dtype in DTYPES:
            for tokens in [64, 16384] if quick else TOKENS if main and dtype != "float16" else OTHER_TOKENS:
                # torch.compile takes seconds per size.
                torch_steps = main and not quick, main and not quick and dtype == "float32" and compiled
                rows += _measure(config, dtype, tokens, peers, bandwidth, *torch_steps)
    return rows


def _measure(config, dtype, tokens, peers, bandwidth, eager, compiled):
    experts, topk = config["num_experts"], config["topk"]
    options = {k: v for k, v in config.items() if k not in ("num_experts", "topk")}
    bias = None if "scoring" in config else torch.rand(experts, device="cuda") * 0.2
    inputs = rotating(
        lambda: torch.randn(tokens, experts, device="cuda").to(DTYPES[dtype]), tokens * experts * DTYPES[dtype].itemsize
    )
    out = torch.empty(tokens, topk, device="cuda"), torch.empty(tokens, topk, dtype=torch.int32, device="cuda")
    steps = {
        "final": lambda x: biased_grouped_topk(x, bias, topk, **options),
        "final, out=": lambda x: biased_grouped_topk(x, bias, topk, **options, out=out),
    }
    if eager:
        steps["torch eager"] = lambda x: _eager(x, bias, topk, **options)
    if compiled:
        steps["torch.compile"] = lambda x: compiled(x, bias, topk, **options)
    versions, notes = {}, {}
    for peer in peers:
        if not peer.serves(dtype=dtype, **config):
            continue
        name = f"peer:{peer.NAME}"
        versions[name] = versions[f"{name}, out="] = peer.VERSION
        steps[name] = lambda x, peer=peer: peer.gate(x, bias, topk, **options)
        steps[f"{name}, out="] = lambda x, peer=peer: peer.gate(x, bias, topk, **options, out=out)
    for name, step in steps.items():
        out[0].fill_(float("nan"))
        out[1].fill_(-7)
        wrong = reference.mismatch(*step(inputs[0]), inputs[0], bias, topk, **options, tolerance=1e-5)
        if wrong and name.startswith("final"):
            raise AssertionError(f"{name}, {config}, {tokens} tokens of {dtype}: {wrong}")
        if wrong:  # peers may break ties differently or round to 16 bits; the record notes it
            notes[name] = wrong
    # Kernel times use preallocated outputs, so that the graph contains no allocations.
    kernel = kernel_times(
        {n: [lambda x=x, s=s: s(x) for x in inputs] for n, s in steps.items() if f"{n}, out=" not in steps}
    )
    is_called = config is DEEPSEEK_V3 and (tokens, dtype) == (CALL_TOKENS, CALL_DTYPE)
    call = call_times({n: (lambda s=s: s(inputs[0])) for n, s in steps.items()}) if is_called else {}
    num_bytes, floor = floor_us(tokens, config, dtype, bandwidth)
    return [
        records.row(
            name,
            config=config,
            size={"tokens": tokens},
            dtype=dtype,
            kernel=kernel.get(name) or kernel.get(f"{name}, out="),
            call=call.get(name),
            floor_us=floor,
            bytes=num_bytes,
            version=versions.get(name),
            note=notes.get(name) and f"differs from the reference: {notes[name]}",
        )
        for name in steps
        if name in call or not name.endswith(", out=")
    ]


def _eager(gating_output, correction_bias, topk, num_expert_group, topk_group):
    """Route in plain torch, as in the article; ties are broken arbitrarily. Also the input of torch.compile."""
    scores = gating_output.float().sigmoid()
    biased = scores + correction_bias
    groups = biased.view(len(scores), num_expert_group, -1).topk(2, dim=-1)[0].sum(dim=-1)
    group_mask = torch.zeros_like(groups).scatter_(1, groups.topk(topk_group, dim=-1, sorted=False)[1], 1)
    expert_mask = group_mask.unsqueeze(-1).expand(-1, -1, scores.shape[1] // num_expert_group).reshape(scores.shape)
    ids = biased.masked_fill(~expert_mask.bool(), float("-inf")).topk(topk, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True), ids.to(torch.int32)


def figures(record):
    """Draw the sweeps over tokens, the time of a call and, if recorded, the ladder."""
    steps = steps_with_peers(record, "torch.compile", "torch eager")
    made = {
        f"sweep-{dtype}": plots.kernel_sweep(
            record,
            steps,
            dict(config=DEEPSEEK_V3, dtype=dtype),
            title=f"DeepSeek-V3's gate, {dtype} logits: kernel time",
        )
        for dtype in DTYPES
    }
    rows = [
        {**row, "step": row["step"].removeprefix("peer:")}
        for row in records.select(record, config=DEEPSEEK_V3, size={"tokens": 64}, dtype="float32")
    ]
    title = "A call for 64 tokens: GPU time and host time"
    made["call"] = plots.split_figure(rows, title=title, caption=plots.caption(record))
    wanted = dict(size={"tokens": 16384}, dtype="float32", config=DEEPSEEK_V3)
    peers = {name: records.find(record, step=name, **wanted) for name in records.peers(record)}
    times = {name.removeprefix("peer:"): row["kernel_us"]["median"] for name, row in peers.items() if row}
    best = dict(sorted(times.items(), key=lambda item: item[1])[:1])
    if torch_row := records.find(record, step="torch eager", **wanted):
        best["torch"] = torch_row["kernel_us"]["median"]
    title = "Gate, step by step: {tokens} tokens, 256 experts, float32"
    if ladder := plots.recorded_ladder(record, "gate_prompt_ladder", title, best):
        made["ladder"] = ladder
    return made


_NAMES = {  # step of the record -> what lessons call it
    "final": "this package",
    "torch eager": "torch",
    "peer:sglang-aot": "SGLang, C++",
    "peer:sglang-triton": "SGLang, Triton",
    "peer:flashinfer": "FlashInfer",
    "peer:flashinfer-trtllm": "FlashInfer, TensorRT-LLM's",
    "peer:sglang-jit": "SGLang, JIT",
    "peer:vllm": "vLLM",
    "peer:vllm-topk-sigmoid": "vLLM, topk_sigmoid",
}


def name_of(step: str) -> str:
    """Return what lessons call a step of the record."""
    return _NAMES.get(step, step.removeprefix("peer:"))


_CALLED_DIRECTLY = (
    "We call FlashInfer's kernels directly: its Python function `fused_topk_deepseek` (flashinfer) refuses more than "
    "one expert per token where there are no groups, and its routing kernel of trtllm-gen is built for Blackwell."
)


def readme_table(record):
    """Return a table of kernel times in microseconds: this package, the peers, torch, and the lower bound."""
    rows = {
        f"{tokens}, {dtype}": dict(config=DEEPSEEK_V3, size={"tokens": tokens}, dtype=dtype)
        for dtype in DTYPES
        for tokens in TOKENS
    }
    steps = steps_with_peers(record, "torch.compile", "torch eager")
    table = kernel_times_table(record, "tokens, logits", steps, rows)
    by_model = {
        f"{model}, {tokens}": dict(config=config, size={"tokens": tokens}, dtype="bfloat16")
        for model, config in list(MODELS.items())[1:]
        for tokens in OTHER_TOKENS
    }
    models = kernel_times_table(record, "model, tokens", steps, by_model)
    shapes = "; ".join(
        f"{model}: {config['num_experts']} experts, top-{config['topk']}, {config.get('scoring', 'sigmoid')}"
        for model, config in list(MODELS.items())[1:]
    )
    return (
        f"{table}\n\nOther models, bfloat16 logits ({shapes}):\n\n{models}\n\n"
        f"Kernel time in microseconds, median, {plots.provenance(record)}. {_CALLED_DIRECTLY}"
    )
