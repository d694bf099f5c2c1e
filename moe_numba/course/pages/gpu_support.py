"""Which functions and notebooks run on which GPUs, and how: the tables of ``doctor`` and of docs/gpus.md.

The conditions are those by which the plans choose their kernels: properties of :class:`~moe_numba.runtime.device.GPU`,
and what instructions need.
"""

from collections.abc import Callable
from typing import NamedTuple

from moe_numba.align.with_gate import MAX_EXPERTS, MAX_TOKENS
from moe_numba.course.pages.topics import TOPICS
from moe_numba.expert_parallel.layout.kernel import CLUSTER_SIZE
from moe_numba.ptx.capability import OLDEST, needed_by
from moe_numba.runtime.device import GPU, gpu_like

ARCHITECTURES = {
    (7, 5): "Turing: T4, RTX 20",
    (8, 0): "Ampere: A100, A30",
    (8, 6): "Ampere: A10, RTX 30",
    (8, 9): "Ada: L4, L40S, RTX 40",
    (9, 0): "Hopper: H100, H200",
    (10, 0): "Blackwell: B200",
    (12, 0): "Blackwell: RTX 50, RTX PRO",
}


class Support(NamedTuple):
    """How a function, or a notebook, runs on a GPU."""

    name: str
    runs: bool
    path: str


def functions(gpu: GPU) -> list[Support]:
    """Return how each function of the package runs on a GPU."""
    if gpu.capability < OLDEST:
        needs = "needs compute capability {}.{}".format(*OLDEST)
        return [Support(name, False, needs) for name in _FUNCTIONS]
    return [
        Support(name, not path.startswith("not supported"), path)
        for name, choose in _FUNCTIONS.items()
        for path in [choose(gpu)]
    ]


def notebooks(gpu: GPU) -> list[Support]:
    """Return how each notebook runs on a GPU; ``runs`` is whether its kernels run there, not in the simulator."""
    found = []
    for topic in TOPICS:
        simulated = gpu.capability < OLDEST or (topic.hopper and not gpu.has_wgmma)
        limit = _LIMITS.get(topic.notebook, lambda gpu: "")(gpu)
        path = "in the simulator, with times of an H200" if simulated else limit or "all steps"
        found.append(Support(topic.notebook, not simulated, path))
    return found


def by_name(how: Callable[[GPU], list[Support]]) -> dict[str, str]:
    """Return which paths ``functions`` or ``notebooks`` take on which GPUs: ``{names: "7.5 to 8.9: path<br>..."}``."""
    archs = list(ARCHITECTURES)
    found: dict[str, dict[str, list]] = {}
    for number, arch in enumerate(archs):
        for row in how(gpu_like(arch)):
            found.setdefault(row.name, {}).setdefault(row.path, []).append(number)
    texts: dict[str, list] = {}
    for name, paths in found.items():
        text = "<br>".join(f"{_ranges(numbers, archs)}: {path}" for path, numbers in paths.items())
        texts.setdefault(text, []).append(name)
    return {", ".join(names): text for text, names in texts.items()}


def _ranges(numbers, archs):
    """Describe the architectures with these positions in ``archs``, which are in ascending order."""
    text = ["{}.{}".format(*arch) for arch in archs]
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    parts = []
    for start, end in zip(starts, ends, strict=True):
        if end == len(archs) - 1:
            parts.append(f"{text[start]} and newer")
        else:
            parts.append(text[start] if start == end else f"{text[start]} to {text[end]}")
    return ", ".join(parts)


_NEEDS_WGMMA = "not supported: needs compute capability 9.0 (wgmma)"


def _has(gpu, instruction):
    return gpu.capability >= needed_by(instruction)


def _dependent_launch(gpu):
    return "programmatic dependent launch" if gpu.has_clusters else "without programmatic dependent launch"


def _gate_align(gpu):
    return f"one launch up to {MAX_TOKENS} tokens and {MAX_EXPERTS} experts, otherwise two"


def _layout(gpu):
    return f"one cluster of {CLUSTER_SIZE} CTAs" if gpu.has_clusters else "one CTA instead of a cluster"


def _casts(gpu):
    return "e4m3 conversions" if _has(gpu, "cvt.rn.satfinite.e4m3x2.f32") else "integer instructions for e4m3"


def _dispatch(gpu):
    return "TMA bulk copies" if _has(gpu, "cp.async.bulk") else "16-byte loads and stores instead of TMA"


def _grouped_gemm(gpu):
    if gpu.has_wgmma:
        return "TMA, wgmma and clusters"
    if _has(gpu, "cp.async"):
        return "mma.sync and cp.async"
    return "not supported: needs compute capability {}.{} (cp.async)".format(*needed_by("cp.async"))


def _grouped_gemm_w4(gpu):
    return "TMA and wgmma" if gpu.has_wgmma else _NEEDS_WGMMA


def _k_grouped_gemm(gpu):
    return "TMA, wgmma and clusters" if gpu.has_wgmma else _NEEDS_WGMMA


def _activations(gpu):
    if gpu.has_wgmma:
        return "TMA, wgmma and clusters"
    if _has(gpu, "cp.async"):
        return f"{_NEEDS_WGMMA}, except for silu in FP8 without a bias"
    return _grouped_gemm(gpu)


def _moe_layer(gpu):
    if _has(gpu, "cp.async"):
        return _dependent_launch(gpu)
    return f"{_dependent_launch(gpu)}; fused_experts is not supported (needs the grouped GEMM)"


_FUNCTIONS = {
    "gate": _dependent_launch,
    "alignment": _dependent_launch,
    "fused gate and alignment": _gate_align,
    "shared-expert fusion": _dependent_launch,
    "dispatch layout": _layout,
    "FP8 casts": _casts,
    "dispatch and combine": _dispatch,
    "low-latency mode": _dependent_launch,
    "grouped GEMM": _grouped_gemm,
    "4-bit grouped GEMM": _grouped_gemm_w4,
    "k-grouped GEMM": _k_grouped_gemm,
    "grouped GEMM with SwiGLU": _activations,
    "experts of a layer": _moe_layer,
}
_LIMITS = {
    "02_gate_decode": lambda gpu: "" if gpu.has_clusters else "all steps, of which no launch is a dependent one",
    "04_align_one_launch": lambda gpu: "" if gpu.has_clusters else "all but dependent launches",
}
