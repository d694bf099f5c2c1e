"""Benchmark topic models: the check before timing, rows, figure and table."""

import inspect

import pytest
import torch
from bench_topics import ABOUT, patch_topic, record_of
from helpers.figures import misplaced

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers 5.17 or newer is needed")


from moe_numba.course.bench import Stats, records, topic  # noqa: E402
from moe_numba.course.bench.topics.models import measure as models_measure  # noqa: E402
from moe_numba.integrations import transformers as integration  # noqa: E402
from moe_numba.moe_layer import compile_layers  # noqa: E402

models = topic("models")
TINY = models_measure.Model(
    "Tiny",
    "Qwen3Moe",
    1,
    dict(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    ),
)  # fmt: skip
TINY_GPT_OSS = models_measure.Model(
    "Tiny gpt-oss",
    "GptOss",
    1,
    dict(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_local_experts=8, num_experts_per_tok=4,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    ),
)  # fmt: skip
TINY_DEEPSEEK = models_measure.Model(
    "Tiny DeepSeek",
    "DeepseekV3",
    1,
    dict(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, n_routed_experts=8,
        num_local_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=4, topk_group=2,
        first_k_dense_replace=0, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32,
    ),
)  # fmt: skip
TINY_MODELS = TINY, TINY_GPT_OSS, TINY_DEEPSEEK


@pytest.fixture
def record(monkeypatch, device):
    times = iter(range(2000, 10**6, 1000))
    stats = lambda named, _: {name: Stats(t, t, t + 1.0) for name, t in zip(named, times, strict=False)}
    patch_topic(monkeypatch, models_measure, MODELS=(TINY,), pass_times=stats)
    measure = models_measure.measure
    monkeypatch.setattr(models_measure, "measure", lambda *arguments: measure(*arguments, device=str(device)))
    monkeypatch.setattr(models, "TOKENS", (1, 1024))
    monkeypatch.setattr(models_measure, "GATHERED_BYTES", 1 << 20)
    return record_of(models, "models")


def test_rows_figure_and_table(record):
    steps = ["peer:transformers grouped_mm", "peer:transformers batched_mm", "final", "final, fused routers"]
    few = [step for step in steps if "batched" not in step]
    found = [(row["operation"], *row["size"].values(), row["step"]) for row in record["rows"]]
    assert found == [*(("decode", 1, step) for step in steps), *(("prefill", 1024, step) for step in few)]
    assert all(row["config"] == {"model": "Tiny", "layers": 1} for row in record["rows"])
    lines = models.readme_table(record).splitlines()
    assert lines[0].startswith(
        "| model | tokens | context | `grouped_mm` | `batched_mm` | `moe_numba` | with fused routers |"
    )
    assert lines[2] == (
        "| Tiny, 1 layers | 1 | 0 | 10.0 (2000) | 11.0 (3000) | 12.0 (4000) | 13.0 (5000) | 0.77 (0.40) |"
    )
    assert lines[3] == "| Tiny, 1 layers | 1024 | 0 | 14.0 (6000) |  | 15.0 (7000) | 16.0 (8000) | 0.88 (0.75) |"
    assert "Recorded on NVIDIA Toy" in lines[-1]
    row = record["rows"][0]
    record["rows"].append(row | dict(size=row["size"] | dict(context=1024)))  # of an earlier version
    assert "\n| Tiny, 1 layers | 1 | 1024 | 10.0 (2000) |" in models.readme_table(record)
    (figure,) = models.figures(record).values()
    assert not misplaced(figure)


def test_all_models_are_of_transformers():
    for about in models_measure.MODELS:
        config = about.config
        assert config.num_hidden_layers == about.layers
        assert [getattr(config, name) for name in about.options] == list(about.options.values())


def described(value):
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("about", models_measure.MODELS, ids=lambda about: about.name)
def test_kernels_are_compiled_for_the_layers_of_the_models(about):
    with torch.device("meta"):
        model = getattr(transformers, f"{about.architecture}ForCausalLM")(about._replace(layers=2).config)
    experts = next(module.experts for module in model.modules() if hasattr(module, "experts"))
    wanted = integration.arguments_of(experts.bfloat16())
    given = compile_layers.empty_arguments(models_measure.layers_of(about, (3,))[0], 3, torch.int64)
    assert given["topk_ids"].shape == (3, model.config.num_experts_per_tok) and given["topk_ids"].dtype == torch.int64
    for name in ("w13", "w2", "w13_bias", "w2_bias"):
        assert described(given.get(name)) == described(wanted.get(name))
    assert given["activation"] == wanted.get("activation", "silu")


@pytest.mark.parametrize("about", TINY_MODELS, ids=lambda about: about.name)
def test_kernels_are_compiled_for_the_routers_of_the_models(about, device, monkeypatch):
    seen, gate = [], integration.biased_grouped_topk

    def record_call(logits, bias, *options, **named):
        defaults = inspect.signature(gate).parameters
        given = {name: value for name, value in named.items() if value != defaults[name].default}
        seen.append((described(logits), described(bias), options, given))
        if logits.device.type == str(device):  # else it is called to be compiled
            return gate(logits, bias, *options, **named)

    monkeypatch.setattr(integration, "biased_grouped_topk", record_call)
    monkeypatch.setattr(compile_layers.moe_numba, "biased_grouped_topk", record_call)
    model = models_measure.make_model(about, str(device))
    assert integration.fuse_routers(model) == 1
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.int64, device=device))
    (call,) = models_measure.gates_of(about, (3,))
    call()
    assert len(seen) == 2 and seen[0] == seen[1]


def test_masks_of_eager_attention_are_made_once(device, monkeypatch):
    """A CUDA graph cannot capture how transformers makes them."""
    about = TINY_GPT_OSS._replace(layers=2, options=TINY_GPT_OSS.options | dict(sliding_window=4))
    model = models_measure.make_model(about, str(device))
    model.set_attn_implementation("eager")
    ids = torch.arange(7, device=device)[None]
    masks = models_measure.masks_of(model, ids)
    assert set(masks) == set(model.config.layer_types)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", lambda *_, **__: pytest.fail("a mask was made"))
        assert torch.equal(model(ids, attention_mask=masks, use_cache=False).logits, expected)
    qwen = models_measure.make_model(TINY, str(device))
    assert models_measure.masks_of(qwen, ids) is None


def test_a_model_that_fails_does_not_lose_the_others(monkeypatch, capsys):
    def measure_model(about, token_counts, device):
        yield [about.name]
        if about.name == "Tiny":
            raise RuntimeError("no such kernel")
        yield ["more"]

    monkeypatch.setattr(models_measure, "measure_model", measure_model)
    assert models_measure.measure([TINY, TINY_GPT_OSS], (1,), "cpu") == ["Tiny", "Tiny gpt-oss", "more"]
    assert "Tiny: left out from here, RuntimeError: no such kernel" in capsys.readouterr().err
    monkeypatch.setattr(models_measure, "measure_model", lambda *_: [][0])
    with pytest.raises(IndexError):
        models_measure.measure([TINY], (1,), "cpu")


def test_passes_that_do_not_fit_are_reported(monkeypatch, capsys):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(models_measure, "measure_passes", fail)
    assert models_measure.measure_if_it_fits(TINY, None, 64, models_measure.STEPS) == []
    assert capsys.readouterr().err == "Tiny, 64 tokens: left out, CUDA out of memory\n"


def test_each_step_selects_its_implementation(device):
    model = models_measure.make_model(TINY, str(device))
    models_measure.register()
    for name in (*models_measure.PEERS, models_measure.OURS, models_measure.WITH_ROUTERS, models_measure.OURS):
        models_measure.select(model, name)
        wanted = "moe_numba" if name.startswith("final") else name
        assert model.config._experts_implementation == wanted
        fused = ["forward" in vars(module) for module in model.modules() if "TopKRouter" in type(module).__name__]
        assert fused == [name == models_measure.WITH_ROUTERS]


@pytest.mark.parametrize("name", [models_measure.OURS, *models_measure.PEERS])
def test_wrong_experts_are_not_timed(name, device):
    model = models_measure.make_model(TINY, str(device))
    models_measure.register()
    check_wrong_experts(model, name)


def check_wrong_experts(model, name):
    models_measure.check_experts(model, name)
    for change in (lambda ids: (ids + 1) % 8, torch.zeros_like):
        with pytest.raises(AssertionError, match=f"{name}: the experts have relative error"):
            models_measure.check_experts(model, name, change)


def test_gpt_oss_is_measured_in_mxfp4_too(monkeypatch, device):
    seen, check = [], models_measure.check_experts
    monkeypatch.setattr(models_measure, "measure_passes", lambda about, model, tokens, steps: [(tokens, steps)])
    monkeypatch.setattr(models_measure, "check_experts", lambda model, name: seen.append(name) or check(model, name))
    rows = models_measure.measure([TINY_GPT_OSS], (1, 4), str(device))
    assert rows == [(tokens, steps) for steps in (models_measure.STEPS, ("final, MXFP4",)) for tokens in (1, 4)]
    assert seen == ["final", *models_measure.PEERS, "final, MXFP4"]
    rows = [records.row(step, config=dict(model="m", layers=1), size=dict(tokens=1)) for step in models.COLUMNS]
    times = dict(kernel_us=dict(median=3.0), pass_us=dict(median=5.0))
    record = dict(ABOUT, rows=[row | times for row in rows])
    lines = models.readme_table(record).splitlines()
    assert lines[0].endswith("| with fused routers | speedup | in MXFP4 |") and lines[2].endswith("| 3.00 (5.00) |")
