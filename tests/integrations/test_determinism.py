"""On a GPU: logits of whole models are bit-identical from run to run and at any place in a batch; memory does not grow.

The tests run in no simulator, where they would show nothing: its calls are sequential.
"""

import os
import resource
import threading

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="transformers 5.17 or newer is needed")

from helpers.tiny_models import make_model  # noqa: E402

import moe_numba  # noqa: E402
from moe_numba.integrations import transformers as integration  # noqa: E402
from moe_numba.moe_layer.compile_layers import (
    Layer,  # noqa: E402
    compile_layers,  # noqa: E402
)

pytestmark = pytest.mark.gpu
RUNS = 100
SOAK_SECONDS, REPORT_SECONDS = float(os.environ.get("MOE_NUMBA_SOAK_SECONDS", "5")), 15
# Name: options of the layer, and of the module of experts.
SOAK_FORMATS = {
    "bf16": (dict(dtype="bf16"), dict(dtype=torch.bfloat16)),
    "block scales": (dict(dtype="e4m3"), dict(dtype=torch.float8_e4m3fn)),
    "scale per expert": (dict(dtype="e4m3", scaling="tensor"), dict(dtype=torch.float8_e4m3fn, scaling="tensor")),
    "MXFP4": (
        dict(dtype="mxfp4", activation="swigluoai"),
        dict(dtype=torch.uint8, activation="swigluoai", has_bias=True),
    ),
}
MODELS = {
    "Qwen3Moe": ("Qwen3Moe", dict(num_experts_per_tok=4)),
    "DeepseekV3": ("DeepseekV3", dict(num_experts_per_tok=4)),
    "GptOss": ("GptOss", dict(num_experts_per_tok=4)),
    "GptOss in MXFP4": ("GptOss", dict(num_experts_per_tok=4)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def make_fast_model(name):
    """A model with its experts and routers on the package's kernels."""
    kind, options = MODELS[name]
    integration.register()
    model = make_model(kind, "cuda", hidden_size=256, **options)
    if name.endswith("MXFP4"):
        integration.pack_mxfp4_weights(model, allow_rounding=True)
    model.set_experts_implementation("moe_numba")
    integration.fuse_routers(model)
    return model


def prompts_of(count, length, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (count, length), generator=random).cuda()


@each_model
@pytest.mark.parametrize("count, length", [(1, 1), (3, 11), (8, 64)])
def test_logits_are_the_same_in_each_run(name, count, length):
    model, prompts = make_fast_model(name), prompts_of(count, length)
    first = model(prompts).logits
    assert first.isfinite().all() and not torch.equal(first, model((prompts + 1) % 64).logits)
    for _ in range(RUNS):
        assert torch.equal(model(prompts).logits, first)


@each_model
def test_logits_do_not_depend_on_the_place_in_a_batch(name):
    """Each prompt at each place of a batch, with other prompts around it."""
    model, prompts = make_fast_model(name), prompts_of(6, 17)
    first = model(prompts).logits
    for shift in range(1, 6):
        assert torch.equal(model(prompts.roll(shift, 0)).logits, first.roll(shift, 0))
    others = prompts_of(6, 17, seed=1)
    others[4] = prompts[2]
    assert torch.equal(model(others).logits[4], first[2])


def resident_bytes():
    """Return the memory of this process on the CPU."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize()


def after(seconds):
    """Return an event that is set after ``seconds``."""
    event = threading.Event()
    timer = threading.Timer(seconds, event.set)
    timer.daemon = True
    timer.start()
    return event


def test_soak():
    """Batches of random sizes, for MOE_NUMBA_SOAK_SECONDS: results stay the same, and memory does not grow."""
    sizes = [1, 2, *torch.randint(1, 700, (46,), generator=torch.Generator().manual_seed(0)).tolist()]
    compile_layers(
        [Layer("", 16, 256, 256, token_counts=tuple(sizes), topk=4, **of) for of, _ in SOAK_FORMATS.values()]
    )
    experts = {}
    for name, (_, options) in SOAK_FORMATS.items():
        module = experts[name] = moe_numba.moe_layer.Experts(16, 256, 256, device="cuda", **options)
        torch.manual_seed(0)
        for parameter in module.parameters():
            if parameter.dtype == torch.uint8:
                parameter.random_(60, 120)  # any bytes are weights; their scales are small, and none is NaN
            else:
                parameter.copy_(torch.randn(parameter.shape, device="cuda") / 16)
    random = torch.Generator("cuda").manual_seed(0)
    calls, wanted = [], []
    for tokens in sizes:
        x = torch.randn(tokens, 256, generator=random, device="cuda").bfloat16()
        logits = torch.randn(tokens, 16, generator=random, device="cuda")
        weights, ids = moe_numba.biased_grouped_topk(logits, None, 4, scoring="softmax")
        calls += [(module, (x, weights, ids)) for module in experts.values()]
    for _ in range(2):  # compile, plan, and let the allocators reach their sizes
        wanted = [module(*given) for module, given in calls]
    assert all(result.isfinite().all() for result in wanted)
    torch.cuda.synchronize()
    allocated, reserved, resident = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident_bytes()
    choose, rounds, reports = torch.Generator().manual_seed(1), 0, 0
    ended, due = after(SOAK_SECONDS), after(REPORT_SECONDS)
    while not ended.is_set() or not rounds:
        for i in torch.randint(0, len(calls), (64,), generator=choose).tolist():
            module, given = calls[i]
            assert torch.equal(module(*given), wanted[i])
        rounds += 1
        if due.is_set():
            reports, due = reports + 1, after(REPORT_SECONDS)
            grown = torch.cuda.memory_reserved() - reserved, resident_bytes() - resident
            seconds = REPORT_SECONDS * reports
            print(f"soak: {seconds} s, {64 * rounds} calls, {grown[0] >> 20} and {grown[1] >> 20} MiB more", flush=True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    # Another order of the same sizes may need other blocks of the caching allocator.
    assert torch.cuda.memory_reserved() - reserved < 64 << 20 and resident_bytes() - resident < 64 << 20
