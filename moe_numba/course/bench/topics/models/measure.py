"""Measures forward passes of models of transformers: rows of the topic `models`."""

import sys
import time
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers

from moe_numba.course.bench import Stats, kernel_times, records
from moe_numba.course.bench.timing import no_garbage_collection, shuffled_rounds
from moe_numba.course.bench.topics.models.rows import DEFAULT, OURS, PACKED, WITH_ROUTERS
from moe_numba.integrations.transformers import fuse_routers, pack_mxfp4_weights, register, unfuse_routers
from moe_numba.integrations.transformers_layout import arguments_of
from moe_numba.moe_layer import reference
from moe_numba.moe_layer.compile_layers import Layer, call_gate, compile_layers

PEERS = DEFAULT, "batched_mm"
STEPS = *PEERS, OURS, WITH_ROUTERS
PROMPT_TOKENS = 1024  # from this number on, the tokens of a pass are one prompt
# batched_mm copies the weights of each assignment: leave out larger copies, or a larger share of the free memory, as a
# CUDA graph allocates them again.
GATHERED_BYTES, GATHERED_SHARE = 16 << 30, 1 / 3
SPARE_BYTES = 6 << 30  # of the GPU's memory, besides the weights
BOUND = 1e-2  # relative error of a module of experts, in bfloat16; another expert's weights give far more


class Model(NamedTuple):
    """A model of real width with random weights."""

    name: str
    architecture: str
    layers: int
    options: dict[str, Any]

    @property
    def config(self):
        """Configuration of transformers."""
        options = dict(vocab_size=32768, num_hidden_layers=self.layers, max_position_embeddings=8192)
        return getattr(transformers, f"{self.architecture}Config")(**options | self.options)


MODELS = (
    Model(
        "Qwen3-30B-A3B",
        "Qwen3Moe",
        12,
        dict(
            hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        ),
    ),
    Model(
        "DeepSeek-V3",
        "DeepseekV3",
        4,
        dict(
            hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256,
            num_local_experts=256, num_experts_per_tok=8, n_shared_experts=1, n_group=8, topk_group=4,
            first_k_dense_replace=1, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536,
            kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        ),
    ),
    Model(
        "gpt-oss-20b",
        "GptOss",
        12,
        dict(
            hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
            num_attention_heads=64, num_key_value_heads=8, head_dim=64, sliding_window=128,
        ),
    ),
)  # fmt: skip


def measure(models, token_counts, device="cuda"):
    """Return the rows of all models. The experts of each implementation are checked before it is timed."""
    register()
    rows = []
    if device == "cuda":
        models = [about for about in models if fits(about)]
        layers = [layer for about in models for layer in layers_of(about, token_counts)]
        compile_layers(layers, torch.int64, [gate for about in models for gate in gates_of(about, token_counts)])
    errors = []
    for about in models:
        try:
            for found in measure_model(about, token_counts, device):
                rows += found
        except Exception as error:  # the other models are measured whatever this one raises
            print(f"{about.name}: left out from here, {type(error).__name__}: {error}", file=sys.stderr)
            errors.append(error)
        if device == "cuda":
            torch.cuda.empty_cache()
    if errors and not rows:
        raise errors[0]
    return rows


def measure_model(about, token_counts, device):
    """Yield the rows of each forward pass of a model."""
    model = make_model(about, device)
    for name in (OURS, *PEERS):
        check_experts(model, name)
    for tokens in token_counts:
        yield measure_if_it_fits(about, model, tokens, STEPS)
    if about.architecture == "GptOss":
        pack_mxfp4_weights(model, allow_rounding=True)
        check_experts(model, PACKED)
        for tokens in token_counts:
            yield measure_if_it_fits(about, model, tokens, (PACKED,))


def layers_of(about, token_counts):
    """Return the layers whose kernels a model needs, to compile them in advance; those of gpt-oss in MXFP4, too."""
    config = about.config
    experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
    options = dict(token_counts=tuple(token_counts), topk=config.num_experts_per_tok)
    if about.architecture != "GptOss":
        sizes = experts, config.hidden_size, config.moe_intermediate_size
        return [Layer(about.name, *sizes, dtype="bf16", **options)]
    sizes, options = (config.num_local_experts, *2 * (config.hidden_size,)), options | dict(activation="swigluoai")
    return [
        Layer(about.name, *sizes, "bf16", transposed=True, **options),
        Layer(about.name, *sizes, "mxfp4", **options),
    ]


def gates_of(about, token_counts):
    """Return calls of the gate as a model's fused routers call it, to compile its kernels in advance."""
    config = about.config
    make = partial(partial, call_gate)
    if about.architecture == "DeepseekV3":
        options = config.norm_topk_prob, config.n_group, config.topk_group, 0, config.routed_scaling_factor, True
        gates = config.n_routed_experts, config.num_experts_per_tok, torch.float32, torch.float32, *options
        return [make(tokens, *gates, renormalize_epsilon=1e-20) for tokens in token_counts]
    experts = config.num_local_experts if about.architecture == "GptOss" else config.num_experts
    gates = experts, config.num_experts_per_tok, torch.bfloat16, None, getattr(config, "norm_topk_prob", True)
    return [make(tokens, *gates, scoring="softmax") for tokens in token_counts]


def fits(about, copies=1):
    """Return whether the GPU's memory holds a model, or some copies of its weights; report it if not."""
    with torch.device("meta"):
        model = getattr(transformers, f"{about.architecture}ForCausalLM")(about.config)
    needed = 2 * copies * sum(parameter.numel() for parameter in model.parameters()) + SPARE_BYTES
    memory = torch.cuda.get_device_properties(0).total_memory
    if needed > memory:
        print(f"{about.name} is left out: it needs {needed >> 30} GiB, the GPU has {memory >> 30}", file=sys.stderr)
    return needed <= memory


def make_model(about, device):
    """Make a model with random weights in bfloat16."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = getattr(transformers, f"{about.architecture}ForCausalLM")(about.config)
    finally:
        torch.set_default_dtype(before)
    for parameter in model.eval().requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # as in a model that is loaded; versions differ in new ones
            buffer.data = buffer.float()
    return model


def select(model, name):
    """Select the implementation of a step."""
    model.set_experts_implementation("moe_numba" if name.startswith(OURS) else name)
    unfuse_routers(model)
    if name in (WITH_ROUTERS, PACKED):
        fuse_routers(model)


def check_experts(model, name, change=lambda ids: ids):
    """Compare the first module of experts with the reference; ``change`` spoils the routing."""
    select(model, name)
    experts = next(module.experts for module in model.modules() if hasattr(module, "experts"))
    device, given = experts.gate_up_proj.device, arguments_of(experts)
    random = torch.Generator(device).manual_seed(0)
    draw = partial(torch.rand, generator=random, device=device)
    x = (draw(6, model.config.hidden_size) - 0.5).bfloat16()
    ids, weights = draw(6, len(experts.gate_up_proj)).topk(4).indices, draw(6, 4)
    wanted = reference.fused_experts(x, topk_weights=weights, topk_ids=ids, **given)
    error = float((experts(x, change(ids), weights.bfloat16()) - wanted).norm() / wanted.norm())
    assert error < BOUND, f"{name}: the experts have relative error {error:.1e}; {BOUND:.0e} is allowed"


def measure_if_it_fits(about, model, tokens, steps):
    """Return the rows of :func:`measure_passes`; none, with a report, if the GPU's memory does not suffice."""
    try:
        return measure_passes(about, model, tokens, steps)
    except torch.OutOfMemoryError as error:
        print(f"{about.name}, {tokens} tokens: left out, {str(error).partition('. ')[0]}", file=sys.stderr)
    torch.cuda.empty_cache()
    return []


def measure_passes(about, model, tokens, steps):
    """Return the rows of a forward pass of some tokens: one of each of as many sequences, or from 1024 on a prompt."""
    prompt = tokens >= PROMPT_TOKENS
    shape = (1, tokens) if prompt else (tokens, 1)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    masks = masks_of(model, ids)

    @torch.no_grad()
    def forward():
        return model(ids, attention_mask=masks, use_cache=False, logits_to_keep=1).logits

    def select_and_forward(name):
        select(model, name)
        return forward()

    experts = next(module.experts for module in model.modules() if hasattr(module, "experts"))
    topk = model.config.num_experts_per_tok
    expert_bytes = sum(w[0].numel() * w.element_size() for w in (experts.gate_up_proj, experts.down_proj))
    can_gather = tokens * topk * expert_bytes <= min(GATHERED_BYTES, GATHERED_SHARE * free_bytes(model.device))
    names = [name for name in steps if name != "batched_mm" or can_gather]
    kernels = kernel_times({name: partial(select_and_forward, name) for name in names}, launches=2, replays=10)
    passes = pass_times({name: partial(select, model, name) for name in names}, forward)
    config = dict(model=about.name, layers=about.layers)
    return [
        records.row(
            name if name.startswith(OURS) else f"peer:transformers {name}",
            config=config,
            size=dict(tokens=tokens),
            dtype="mxfp4" if name == PACKED else "bf16",
            kernel=kernels[name],
            pass_us=records.times(passes[name]),
            operation="prefill" if prompt else "decode",
            version=None if name.startswith(OURS) else transformers.__version__,
        )
        for name in names
    ]


@torch.no_grad()
def masks_of(model, ids):
    """Return the attention masks of a pass by the kinds of layers, or None where the model makes them itself.

    transformers makes a mask for eager attention, which gpt-oss has, with a number from the CPU: a CUDA graph cannot
    capture that.
    """
    if model.config._attn_implementation != "eager":
        return None
    found = {}

    def keep(kind, layer, given, named):
        found[kind] = named["attention_mask"]

    layers = zip(model.config.layer_types, model.model.layers, strict=True)
    hooks = [layer.register_forward_pre_hook(partial(keep, kind), with_kwargs=True) for kind, layer in layers]
    model(ids, use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return found


def free_bytes(device):
    """Return the memory of a GPU that torch can still allocate."""
    if device.type != "cuda":
        return float("inf")
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def pass_times(selections, forward, repeats=10):
    """Measure eager forward passes, from the call until the GPU has finished, after each of the selections."""
    samples = {name: [] for name in selections}
    with no_garbage_collection():
        for name in shuffled_rounds(selections, repeats):
            selections[name]()
            forward()
            torch.cuda.synchronize()
            start = time.perf_counter()
            forward()
            torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: Stats.of(values) for name, values in samples.items()}
