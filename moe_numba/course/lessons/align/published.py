"""What the lesson "Alignment as published" runs its kernels on, and how it checks, counts and times them."""

from functools import cache, partial

import torch

from moe_numba import simulator
from moe_numba.align.reference import sizes
from moe_numba.course.bench.timing import rotating
from moe_numba.course.steps.align_runs import poisoned, random_ids, wrong
from moe_numba.course.steps.lesson import Lesson, Run
from moe_numba.runtime.launch import launch

EXPERTS, TOPK, BLOCK = 256, 8, 16  # DeepSeek-V3, blocks of 16 rows
THREADS = 1024  # of the main kernel's CTA
TOKENS = 4096  # of the times
_DEVICE = "cpu" if simulator.ENABLED else "cuda"
_CHECKED = 64 if simulator.ENABLED else TOKENS  # tokens of the checks
_COUNTED = 64  # tokens of what the simulator counts


@cache
def inputs(tokens: int = _CHECKED) -> dict[str, torch.Tensor]:
    """Return routings that an alignment may get wrong, by name."""
    torch.manual_seed(0)
    ids = random_ids(tokens, EXPERTS, TOPK, _DEVICE)
    in_turn = torch.arange(tokens * TOPK, dtype=torch.int32, device=_DEVICE).reshape(-1, TOPK) % EXPERTS
    return {
        "random experts": ids,
        "the same number of slots for each expert": in_turn,
        "all tokens choose the same experts": ids[:1].repeat(tokens, 1).contiguous(),
        "three of four experts have no slot": (ids // 4 * 4 + 3).contiguous(),
        "one token": ids[:1].contiguous(),
    }


def run(version, ids: torch.Tensor, outputs=None, cumsum=None) -> tuple:
    """Launch the main kernel, and the sort kernel behind it; return the outputs and what is not promised of them."""
    main, sort, ctas = version
    outputs = poisoned(ids, EXPERTS, BLOCK) if outputs is None else outputs
    cumsum = torch.full((EXPERTS + 1,), -7, dtype=torch.int32, device=ids.device) if cumsum is None else cumsum
    numel, length = ids.numel(), len(outputs[0])
    launch(main, ctas, THREADS, ids, *outputs, cumsum, BLOCK, numel, length)
    launch(sort, -(-numel // 256), 256, ids, outputs[0], cumsum, numel)
    return *outputs, "any order", "any tail"


def check(version) -> str | None:
    """Compare a version with the reference on all inputs; return the first error."""
    for name, ids in inputs().items():
        if fault := wrong(run(version, ids), ids, EXPERTS, BLOCK):
            return f"{name}: {fault}"
    return None


def timed(version):
    """Return calls with different routings, each with its own outputs."""
    cumsum = torch.empty(EXPERTS + 1, dtype=torch.int32, device=_DEVICE)
    make = partial(random_ids, TOKENS, EXPERTS, TOPK, _DEVICE)
    routings = rotating(make, 4 * TOKENS * TOPK) if not simulator.ENABLED else [make()]
    outputs = poisoned(routings[0], EXPERTS, BLOCK)
    return [partial(run, version, ids, outputs, cumsum) for ids in routings]


def once(version):
    """Launch a version on the inputs whose work is counted."""
    return run(version, inputs(_COUNTED)["random experts"])


lesson = Lesson(
    "align_published_ladder",
    Run(check, once, timed, kernel=lambda version: version[0], kernels=lambda version: version[:2]),
    f"{__name__}:lesson",
    config=dict(num_experts=EXPERTS, topk=TOPK, block_size=BLOCK),
    size=dict(tokens=TOKENS),
    dtype="int32",
)
BUFFER_LENGTH = sizes(TOKENS * TOPK, BLOCK, EXPERTS)[0]
