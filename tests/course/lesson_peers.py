"""Other projects' kernels for the tests of lessons: a folder of stand-ins, and records with rows of theirs."""

from moe_numba.course.bench import records
from moe_numba.course.steps import peers

_MODULE = """
import torch

from moe_numba.course.bench.topics.grouped_gemm.measure import expected_output
from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4

NAME, VERSION = "{name}", "{version}"


class Plan:
    def __init__(self, scaling, p):
        if scaling == "mxfp4":
            weights = [dequantise_mxfp4(*each) for each in zip(p.blocks, p.scales)]
            rows = p.x.double().split(p.seqlens.tolist())
            self.expected = torch.cat([x @ weight.T for x, weight in zip(rows, weights)])
        else:
            self.expected = expected_output(p, scaling)
        self.out = torch.full(self.expected.shape, float("nan"), dtype=torch.bfloat16)

    def launch(self):
        self.out.copy_({factor} * self.expected)

    def result(self):
        return self.out


def plan_group_gemm(scaling, problem):
    return Plan(scaling, problem) if {serves} else None
"""


def use_stand_ins(monkeypatch, folder):
    """Let the lessons find a right peer, a wrong one, one that has no kernel for them and one whose plan fails."""
    for name, factor, serves in (("right", 1, True), ("wrong", 2, True), ("other", 1, False), ("broken", 1, "1 // 0")):
        text = _MODULE.format(name=name, version=f"{name} 1.2", factor=factor, serves=serves)
        (folder / f"{name}_stand_in.py").write_text(text)
    monkeypatch.setenv(peers.VARIABLE, str(folder))


def record_peers(monkeypatch, lesson, names, **us):
    """Let the lesson's own kernels have a recorded time of 200 us, and peers these, in rows "name: peer"."""
    about = dict(config=lesson.config, size=lesson.size, dtype=lesson.dtype)
    rows = [
        records.row(f"{name}: {peer}", **about, version="6e2eced") | {"kernel_us": {"median": time}}
        for name in names
        for peer, time in us.items()
    ]
    read = records.recorded
    monkeypatch.delenv(peers.VARIABLE, raising=False)
    monkeypatch.setattr(lesson, "recorded_us", lambda step, kernels: 200.0)
    monkeypatch.setattr(
        records, "recorded", lambda topic, *more: {"rows": rows} if topic == lesson.topic else read(topic, *more)
    )
