"""Benchmark topic training: the check of gradients before timing, rows, figure and table."""

import pytest
import torch
from bench_topics import patch_topic, record_of
from helpers.figures import misplaced

pytest.importorskip("transformers", minversion="5.17", reason="transformers 5.17 or newer is needed")

from moe_numba.course.bench import Stats, topic  # noqa: E402
from moe_numba.moe_layer.compile_layers import Layer  # noqa: E402

training = topic("training")
TINY = (
    Layer("Tiny", 4, 64, 64, "bf16", (6,), topk=2),
    Layer("Tiny gpt-oss", 4, 64, 64, "bf16", (5,), topk=2, activation="swigluoai"),
)
STEPS = ["final", "final, frozen weights", "final, forward", "final, checkpointed", "final, LoRA"]
PEERS = [f"peer:transformers {name}" for name in ("grouped_mm", "eager", "compiled grouped_mm", "grouped_mm, LoRA")]


@pytest.fixture
def topic_of_tiny_layers(monkeypatch, device):
    times = iter(range(10, 10**6))
    stats = lambda steps: {name: Stats(t, t - 1.0, t + 1.0) for name, t in zip(steps, times, strict=False)}
    patch_topic(monkeypatch, training, LAYERS=TINY, step_times=stats, peak_bytes=lambda step: 2e9)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    measure = training.measure
    monkeypatch.setattr(training, "measure", lambda *arguments: measure(*arguments, device=str(device)))
    return training


def test_rows_figure_and_table(topic_of_tiny_layers):
    record = record_of(training, "training")
    found = [(row["config"]["model"], row["size"]["tokens"], row["step"]) for row in record["rows"]]
    rows = [(f"{t.model}{law}", t.token_counts[0]) for t in TINY for law in ("", ", Zipf")]
    assert found == [(*row, step) for row in rows for step in (*STEPS, *PEERS)]
    lines = training.readme_table(record).splitlines()
    assert lines[0].startswith("| experts | tokens | moe_numba | compiled grouped_mm | eager | grouped_mm |")
    assert lines[2].startswith("| Tiny | 6 | **10.0** | 17.0 | 16.0 | 15.0 | 12.0 | 11.0 | 13.0 | **14.0** | 18.0 |")
    assert lines[2].endswith("| 2.0 / 2.0 / 2.0 / 2.0 |") and "Recorded on NVIDIA Toy" in lines[-1]
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
