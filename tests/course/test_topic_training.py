"""Benchmark topic training: the check of gradients before timing, peers, rows, figure and table."""

from types import SimpleNamespace

import pytest
import torch
from bench_topics import patch_topic, record_of, record_with
from helpers.figures import misplaced

pytest.importorskip("transformers", minversion="5.17", reason="transformers 5.17 or newer is needed")

from moe_numba.course.bench import Stats, topic  # noqa: E402
from moe_numba.course.bench.topics.models import training_step  # noqa: E402
from moe_numba.course.bench.topics.models.measure import Model  # noqa: E402
from moe_numba.integrations import transformers as integration  # noqa: E402
from moe_numba.moe_layer.compile_layers import Layer  # noqa: E402

training = topic("training")
TINY = (
    Layer("Tiny", 4, 64, 64, "bf16", (6,), topk=2),
    Layer("Tiny gpt-oss", 4, 64, 64, "bf16", (5,), topk=2, activation="swigluoai"),
)
TINY_MODEL = Model(
    "Tiny",
    "Qwen3Moe",
    1,
    dict(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    ),
)  # fmt: skip
STEPS = ["final", "final, frozen weights", "final, forward", "final, checkpointed", "final, LoRA"]
PEERS = [f"peer:transformers {name}" for name in ("grouped_mm", "eager", "compiled grouped_mm", "grouped_mm, LoRA")]


@pytest.fixture
def topic_of_tiny_layers(monkeypatch, device):
    times = iter(range(10, 10**6))
    stats = lambda steps: {
        name: (Stats(t, t - 1.0, t + 1.0), Stats(5.0, 4.0, 6.0)) for name, t in zip(steps, times, strict=False)
    }
    patch_topic(monkeypatch, training, LAYERS=TINY, step_times=stats, peak_bytes=lambda step: 2e9)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(training_step, "MODELS", (TINY_MODEL,))
    monkeypatch.setattr(training, "MODEL_TOKENS", (8, 16))
    monkeypatch.setattr(training_step, "PROMPT_TOKENS", 8)
    measure = training.measure
    monkeypatch.setattr(training, "measure", lambda *arguments: measure(*arguments, device=str(device)))
    return training


def test_rows_figure_and_table(topic_of_tiny_layers):
    record = record_of(training, "training")
    found = [(row["config"]["model"], row["size"]["tokens"], row["step"]) for row in record["rows"]]
    rows = [(f"{t.model}{law}", t.token_counts[0]) for t in TINY for law in ("", ", Zipf")]
    names = PEERS[0], "final", "final, fused routers"
    of_model = [("Tiny, a model of 1 layers", tokens, name) for tokens in (8, 16) for name in names]
    assert found == [(*row, step) for row in rows for step in (*STEPS, *PEERS)] + of_model
    text, times, other_text, others, _, memory = training.readme_table(record).split("\n\n")
    assert "an optimiser; the host takes 5.00 of 46.0 us (grouped_mm, 8 tokens), 5.00 of 47.0 us (moe_n" in text
    assert "Recorded on NVIDIA Toy" in text and "LoRA of rank 16" in other_text
    times, others, memory = (table.splitlines() for table in (times, others, memory))
    assert times[0] == "| experts | tokens | moe_numba | compiled grouped_mm | eager | grouped_mm | speed of light |"
    assert times[2].startswith("| Tiny | 6 | **10.0** | 17.0 | 16.0 | 15.0 | ")
    assert times[6] == "| Tiny, a model of 1 layers | 8 | 47.0 |  |  | **46.0** |  |"
    assert others[2] == "| Tiny | 6 | 12.0 | 11.0 | 13.0 | **14.0** | 18.0 |" and len(others) == 6
    assert memory[2] == "| Tiny | 6 | 2.0 | 2.0 | 2.0 | 2.0 | 2.0 | 2.0 |" and len(memory) == 8
    (figure,) = training.figures(record).values()
    assert not misplaced(figure)


def test_a_wrong_gradient_is_rejected(topic_of_tiny_layers, monkeypatch):
    right = training.steps_of

    def wrong(*arguments):
        steps = right(*arguments)
        own = steps["final"]
        return steps | {"final": lambda: [2 * gradient for gradient in own()]}

    monkeypatch.setattr(training, "steps_of", wrong)
    with pytest.raises(AssertionError, match="final, Tiny, 6 tokens: the gradient of x differs by 1.0e"):
        training.measure([], False)


def test_a_step_of_a_model_whose_experts_are_wrong_is_refused(topic_of_tiny_layers, monkeypatch, device):
    right = integration.fused_experts
    monkeypatch.setattr(integration, "fused_experts", lambda *args, **given: 2 * right(*args, **given))
    with pytest.raises(AssertionError, match="final, Tiny: the loss or its gradients differ by"):
        training_step.model_steps(TINY_MODEL, 8, str(device))


def experts_of_torch(x, w13, w2, topk_weights, topk_ids):
    """Compute a layer's experts, one after the other."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for expert, (up, down) in enumerate(zip(w13, w2, strict=True)):
        tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens] @ up.T).chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up) @ down.T
        y = y.index_add(0, tokens, out.float() * topk_weights[tokens, places, None])
    return y.to(x.dtype)


def make_peer(change=lambda gradients: gradients):
    """Return a peer that computes a step in torch, in leaves of its own layout; ``change`` spoils its gradients."""

    def plan(problem):
        leaves = [t.detach().clone().requires_grad_() for t in (problem.x, problem.topk_weights)]
        weights = [w.detach().mT.contiguous().requires_grad_() for w in (problem.w13, problem.w2)]

        def step():
            x, topk_weights = leaves
            y = experts_of_torch(x, *(w.mT for w in weights), topk_weights, problem.topk_ids)
            dx, drouting, *dweights = torch.autograd.grad(y, [*leaves, *weights], problem.grad)
            return change([dx, drouting, *(d.mT for d in dweights)])

        return step

    def plan_lora(problem):
        assert not problem.w13.requires_grad and not problem.w2.requires_grad

        def step():
            a13, b13, a2, b2 = problem.adapters
            w13, w2 = problem.w13 + b13 @ a13, problem.w2 + b2 @ a2
            y = experts_of_torch(problem.x, w13, w2, problem.topk_weights, problem.topk_ids)
            return change(
                list(torch.autograd.grad(y, [problem.x, problem.topk_weights, *problem.adapters], problem.grad))
            )

        return step

    return SimpleNamespace(NAME="Other", VERSION="1.2", plan_experts_step=plan, plan_lora_step=plan_lora)


def peer_rows(rows):
    return [(row["config"]["model"], row["step"]) for row in rows if row["step"].startswith("peer:Other")]


def test_peers_are_measured_with_silu_alone(topic_of_tiny_layers, capsys):
    rows = training.measure([make_peer(), SimpleNamespace(NAME="Gate", VERSION="1")], False)
    layers = "Tiny", "Tiny, Zipf"
    assert peer_rows(rows) == [(layer, step) for layer in layers for step in ("peer:Other", "peer:Other, LoRA")]
    assert all(row["version"] == "1.2" for row in rows if row["step"].startswith("peer:Other"))
    assert not capsys.readouterr().err
    record = record_with("training", rows)
    text, times, _, others, _, memory = training.readme_table(record).split("\n\n")
    assert times.startswith("| experts | tokens | moe_numba | Other | compiled grouped_mm | eager | grouped_mm |")
    assert "| LoRA | LoRA, grouped_mm | LoRA, Other |" in others.splitlines()[0]
    assert "Other projects, for silu without biases: Other (1.2);" in text
    assert "| Tiny gpt-oss | 5 | 2.0 |  | 2.0 | 2.0 | 2.0 | 2.0 | 2.0 |" in memory.splitlines()
    (figure,) = training.figures(record).values()
    assert not misplaced(figure)


def make_problem():
    """Draw a step with 6 tokens and 4 experts, and adapters of rank 2."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *size: (torch.randn(*size, generator=random) / 8).bfloat16()
    x, w13, w2, grad = draw(6, 64), draw(4, 128, 64), draw(4, 64, 64), draw(6, 64)
    adapters = tuple(draw(4, *size).requires_grad_() for size in ((2, 64), (128, 2), (2, 64), (64, 2)))
    ids = torch.rand(6, 4, generator=random).topk(2).indices.int()
    weights = torch.rand(6, 2, generator=random).requires_grad_()
    return training.StepProblem(x.requires_grad_(), w13, w2, weights, ids, grad, adapters)


kept: dict = {}
WRONG_PEERS = {
    "scaled": (lambda g: [g[0], 1.05 * g[1], *g[2:]], "the gradient of topk_weights differs by 5.0e-02"),
    "one expert": (lambda g: [*g[:-1], g[-1].index_fill(0, torch.tensor([1]), 0)], "the gradient of w2 differs by"),
    "NaN": (lambda g: [*g[:2], g[2] * float("nan"), *g[3:]], "the gradient of w13 differs by nan"),
    "transposed": (lambda g: [*g[:2], g[2].mT, *g[3:]], "the gradient of w13 has the shape (4, 64, 128), not (4, 128,"),
    "too few": (lambda g: g[:3], "ValueError"),
    "not written again": (lambda g: kept.setdefault(len(g), g), "the gradient of x differs by nan"),
    "error": (lambda g: 1 / 0, "ZeroDivisionError"),
}


@pytest.mark.parametrize("change, said", WRONG_PEERS.values(), ids=WRONG_PEERS)
def test_wrong_steps_of_peers_are_reported_and_left_out(change, said, capsys):
    problem = make_problem()._replace(adapters=())
    right, wrong = (make_peer(c).plan_experts_step(problem) for c in (lambda gradients: gradients, change))
    steps = {training.DEFAULT: right, "peer:Other": wrong, "peer:Right": right}
    training.drop_wrong(steps, "Tiny, 6 tokens")
    assert list(steps) == [training.DEFAULT, "peer:Right"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"peer:Other is left out, Tiny, 6 tokens: {said}")


def test_a_wrong_lora_step_is_left_out(capsys):
    problem = make_problem()
    flip = lambda gradients: [*gradients[:-1], -gradients[-1]]
    right, wrong = (make_peer(c).plan_lora_step(problem) for c in (lambda gradients: gradients, flip))
    steps = {training.PEER_LORA: right, "peer:Other, LoRA": wrong, "peer:Right, LoRA": right}
    training.drop_wrong(steps, "Tiny, 6 tokens")
    assert list(steps) == [training.PEER_LORA, "peer:Right, LoRA"]
    assert "peer:Other, LoRA is left out, Tiny, 6 tokens: the gradient of w2_b differs by 2" in capsys.readouterr().err


def test_plans_that_fail_or_are_none_are_left_out(capsys):
    fails = SimpleNamespace(NAME="Other", VERSION="1", plan_experts_step=lambda problem: 1 / 0)
    small = SimpleNamespace(NAME="Small", VERSION="1", plan_experts_step=lambda problem: None)
    problem = make_problem()
    assert not training.peer_steps(problem, [fails, small], "Tiny, 6 tokens")  # neither has adapters
    right = make_peer()
    found = training.peer_steps(problem._replace(adapters=()), [fails, small, right], "Tiny, 6 tokens")
    assert list(found) == ["peer:Other"] and len(found["peer:Other"]()) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "peer:Other is left out, Tiny, 6 tokens: ZeroDivisionError: division by zero"
