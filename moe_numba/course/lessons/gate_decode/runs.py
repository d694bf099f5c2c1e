"""The lesson "The gate, for decode": sizes, inputs, check, times and tables."""

import html
import sys
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.latencies import latencies
from moe_numba.course.bench.timing import rotating
from moe_numba.course.bench.topics.gate import name_of
from moe_numba.course.steps.estimate import ISSUE, clocks_by_function, estimate
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Lesson, Run, Table
from moe_numba.course.steps.score import TOTAL, Score, count, score_of_kernels, score_of_launches
from moe_numba.course.steps.simulate import expression_of, in_simulator, source_with_dependencies
from moe_numba.gate import four_tokens_per_warp, one_token_per_warp, packed_keys
from moe_numba.gate.device_functions import make_sort_descending
from moe_numba.gate.reference import mismatch
from moe_numba.runtime.changed_source import source_of
from moe_numba.runtime.launch import launch

EXPERTS, GROUPS, KEPT, TOPK = 256, 8, 4, 8  # DeepSeek-V3
TOKENS = 64  # of the times, and of what the simulator counts
SMALL_EXPERTS, SMALL_TOPK = 128, 8  # Qwen3-30B-A3B, which has neither groups nor a bias

FULL = 0xFFFFFFFF  # all 32 lanes of a warp
WARPS = 4  # of a CTA; each routes a token
HELD, LANES = EXPERTS // 32, 32 // GROUPS  # experts that a lane holds, lanes of a group
SUM_ROUNDS = (TOPK - 1).bit_length()  # of a butterfly over the lanes that have a pick
SMALL_HELD = SMALL_EXPERTS // 32
START, LOADED, STORED = 0, 1, 2  # places of the kernel: before the loads, after them, and after the stores
sort_descending = make_sort_descending(HELD)
sort_small = make_sort_descending(SMALL_HELD)

DEVICE = "cpu" if simulator.ENABLED else "cuda"
OPTIONS = dict(num_expert_group=GROUPS, topk_group=KEPT)
CONFIG = dict(num_experts=EXPERTS, num_expert_group=GROUPS, topk_group=KEPT, topk=TOPK)


@cache
def inputs() -> dict[str, tuple[torch.Tensor, torch.Tensor, list[tuple[str, int]]]]:
    """Return batches of logits with a bias: name -> (logits, bias, what the rows are and how many of each)."""
    torch.manual_seed(0)
    kinds = [
        ("logits of three values", torch.randint(-1, 2, (3, EXPERTS)).float()),
        ("all logits equal", torch.zeros(1, EXPERTS)),
        ("rising logits", torch.linspace(-4, 4, EXPERTS)[None]),
        ("ties between lanes only", torch.linspace(-1, 1, HELD).repeat(32)[None]),
        ("ties within lanes only", torch.linspace(-2, 2, 32).repeat_interleave(HELD)[None]),
        ("one logit for each group", torch.randn(1, GROUPS).repeat_interleave(EXPERTS // GROUPS, 1)),
    ]
    tied = torch.cat([rows for _, rows in kinds]), torch.zeros(EXPERTS), [(name, len(rows)) for name, rows in kinds]
    random = torch.randn(5, EXPERTS), torch.rand(EXPERTS) * 0.2, [("random logits", 5)]
    return {name: (x.to(DEVICE), bias.to(DEVICE), rows) for name, (x, bias, rows) in zip("rt", (random, tied))}


def outputs(tokens: int, topk: int = TOPK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs that no kernel leaves as they are: weights of NaN, and ids of -7."""
    weights = torch.full((tokens, topk), float("nan"), device=DEVICE)
    return weights, torch.full((tokens, topk), -7, dtype=torch.int32, device=DEVICE)


def run(version, logits: torch.Tensor, bias: torch.Tensor, out=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a version: (kernel, whether it is a dependent launch), and the warps of a CTA if they are not `WARPS`."""
    kernel, dependent, warps = (*version, WARPS)[:3]
    weights, ids = outputs(len(logits)) if out is None else out
    ctas = -(-len(logits) // warps)
    launch(kernel, ctas, 32 * warps, logits, bias, weights, ids, len(logits), dependent=dependent)
    return weights, ids


def check(version) -> str | None:
    """Compare a version with the reference on all inputs; return the first error."""
    for logits, bias, kinds in inputs().values():
        weights, ids = run(version, logits, bias)
        for name, rows in kinds:
            parts = [tensor[:rows] for tensor in (weights, ids, logits)]
            if fault := mismatch(*parts, bias, TOPK, **OPTIONS):
                return f"{name}: {fault}"
            weights, ids, logits = (tensor[rows:] for tensor in (weights, ids, logits))
    return None


@cache
def _sets(tokens: int = TOKENS):
    """Return sets of logits that are timed in turn, and a bias. All stay in the L2, as what a router's GEMM writes."""
    torch.manual_seed(1)
    make = lambda: torch.randn(tokens, EXPERTS, device=DEVICE)
    return rotating(make, 4 * tokens * EXPERTS), torch.rand(EXPERTS, device=DEVICE) * 0.2


def timed(version, tokens: int = TOKENS):
    """Return calls with different logits."""
    sets, bias = _sets(tokens)
    out = outputs(tokens)
    return [partial(run, version, logits, bias, out) for logits in sets]


def once(version):
    """Launch a version on the inputs whose work is counted."""
    sets, bias = _sets()
    return run(version, sets[0], bias)


class DecodeLesson(Lesson):
    """A lesson whose kernels have unrolled loops: their instructions are counted as the estimate counts them."""

    def count(self, version, name: str) -> Score:
        """Return the score of a version; the simulator counts."""
        gpu = self.gpu.upper()
        with simulator.profile(gpu) as profile:
            self.run.once(version)
        (kernel,) = profile.kernels
        found = score_of_kernels([kernel], name, gpu)
        of_a_warp = sum(clocks[ISSUE] for clocks in clocks_by_function(kernel, gpu).values())
        warps = sum(launched["warps"] for launched in kernel.launches)
        found.rows[TOTAL, "instructions"] = round(warps * of_a_warp)
        return found


lesson = DecodeLesson(
    "gate_decode_ladder",
    Run(check, once, timed, kernels=lambda version: version[:1]),
    f"{__name__}:lesson",
    config=CONFIG,
    size=dict(tokens=TOKENS),
    dtype="float32",
)


# Tables


def bounds(version) -> Table:
    """Return the simulator's estimate of a version: what each resource takes alone."""
    if simulator.ENABLED:
        lines = _bounds(version)
    else:
        expression, functions = expression_of(version)
        lines = in_simulator(_bounds_again, expression, functions=functions)
    return Table(["what it takes alone", "us on an H200, estimated"], lines)


def _bounds(version):
    found = estimate(partial(once, version))
    return [[name, f"{us:.2f}"] for name, us in (found.bounds | {"estimated time": found.us}).items() if us >= 0.005]


def _bounds_again(version):
    return _bounds(eval(version, vars(sys.modules["__main__"])))


def rounds_fewer(before: str, rounds: int) -> float | None:
    """Return the time of a step without so many rounds of shuffles, if it is known; a round is a shuffle's latency."""
    us = lesson.steps[before].us
    return us and us - rounds * latencies(lesson.gpu.upper()).ns["shuffles"] / 1000


def dependent_launch(before: str) -> float | None:
    """Return the time of a step less what a dependent launch saves of an empty kernel, if it is known."""
    us, empty = lesson.steps[before].us, _empty_us()
    return us - empty[0] + empty[1] if us and empty else None


def show_chains(kernels: dict) -> Table:
    """Return a table of the time of a link of a chain, from kernels ``kernel(out, links)``: 2n links less n."""
    n, in_simulator = 1024, 4  # links: recorded, and simulated
    out = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    links = {m: m * in_simulator // n if simulator.ENABLED else m for m in (n, 2 * n)}
    calls = {f"{name} x {m}": partial(launch, k, 1, 32, out, links[m]) for name, k in kernels.items() for m in links}
    us = lesson.times("chains", calls)
    known = ["a shuffle alone, from the latencies", f"{latencies(lesson.gpu.upper()).ns['shuffles']:.1f}"]
    if not us:
        return Table(["link", "ns"], [[name, "not timed"] for name in kernels] + [known])
    ns = {name: 1000 * (us[f"{name} x {2 * n}"] - us[f"{name} x {n}"]) / n for name in kernels}
    return Table(["link", "ns"], [*([name, f"{each:.1f}"] for name, each in ns.items()), known])


def saved_by_a_round(before: str, after: str, rounds: int) -> dict[str, float | None]:
    """Return what a round less has saved, from the times of two steps, and what a shuffle takes: nanoseconds."""
    first, second = lesson.steps[before].us, lesson.steps[after].us
    known = first is not None and second is not None
    return {
        "round": 1000 * (first - second) / rounds if known else None,
        "shuffle": latencies(lesson.gpu.upper()).ns["shuffles"],
    }


def dependent_launches(versions: dict) -> dict[str, list[float] | None]:
    """Time pairs of versions, ordinary and dependent launch; return both times by name, also of an empty kernel."""
    kinds = "ordinary", "dependent"
    calls = {
        f"{name}, {kind}": timed(version)
        for name, pair in versions.items()
        for kind, version in zip(kinds, pair, strict=True)
    }
    us = lesson.times("dependent launches", calls)
    found = {name: [us[f"{name}, {kind}"] for kind in kinds] if us else None for name in versions}
    return {"an empty kernel": _empty_us()} | found


def show_dependent_launches(found: dict) -> Table:
    """Return a table of `dependent_launches`, with what each kernel saves."""
    lines = [
        [name, *(f"{each:.2f}" for each in (*pair, pair[0] - pair[1]))] if pair else [name, "not timed", "", ""]
        for name, pair in found.items()
    ]
    return Table(["kernel", "us, ordinary launch", "us, dependent launch", "saved"], lines)


def conclude_from_launches(found: dict) -> str | None:
    """Return what the times of an empty kernel, a short one and the gate say, in words; None if there are none."""
    if None in found.values():
        return None
    empty, short, gate = (ordinary - dependent for ordinary, dependent in found.values())
    if abs(short - gate) <= _ALIKE * gate:
        return (
            f"The short kernel saves {short:.2f} us, the whole gate {gate:.2f}, an empty kernel {empty:.2f}: what the "
            "prediction lacks is in what the first two do, and groups and picks have no part in it."
        )
    return (
        f"The short kernel saves {short:.2f} us, the whole gate {gate:.2f}, an empty kernel {empty:.2f}: what the gate "
        "computes has a part in it, too. We did not find out which."
    )


_ALIKE = 0.25  # of a saving: a smaller difference counts as none


def _empty_us():
    """Return the recorded times of an empty kernel: ordinary launch, dependent launch; None if there are none."""
    record = records.recorded("gate")
    find = lambda dependent: records.find(record, step="empty kernel", config=dict(dependent=dependent))
    rows = [find(dependent) for dependent in (False, True)] if record else []
    return [row["kernel_us"]["median"] for row in rows] if rows and all(rows) else None


def result() -> str:
    """Return what the lesson starts from and what it builds, in numbers of the records."""
    gate = records.recorded("gate")
    if gate is None:
        return "no times are recorded"
    row = lambda step: records.find(gate, step=step, size=dict(tokens=TOKENS), config=CONFIG, dtype="float32")
    us = {step: row(step) and records.format_us(row(step)["kernel_us"]["median"]) for step in _STEPS}
    texts = [f"{name} {us[step]} us" for step, name in _STEPS.items() if us[step]]
    return f"Recorded on an H200 ({gate['date'][:10]}), {TOKENS} tokens: " + "; ".join(texts)


_STEPS = {
    "peer:sglang-aot": "SGLang's C++ kernel",
    "peer:sglang-triton": "SGLang's Triton kernel",
    "peer:flashinfer": "FlashInfer's fused_topk_deepseek",
    "final": "this package",
}


def lower_bound() -> str:
    """Return the time of the bytes, in words."""
    num_bytes = TOKENS * (4 * EXPERTS + 8 * TOPK) + 4 * EXPERTS
    us = num_bytes / chip_limits().copy_bandwidth * 1e6
    return f"{num_bytes:,} bytes take {us:.3f} us at the rate of a copy"


class Parts(NamedTuple):
    """Times of kernels, each with one part more than the one before, and whether they were measured or estimated."""

    us: dict[str, float]
    source: str


def parts(versions: dict) -> Parts:
    """Return the time of each version that has one part more than the one before it; estimated if none is recorded."""
    us = lesson.times("parts", {name: timed(version) for name, version in versions.items()})
    if not us:
        return Parts({name: _estimate(name, version) for name, version in versions.items()}, "estimated")
    return Parts(us, "recorded" if simulator.ENABLED else "measured")


def _estimate(name, version):
    step = next((step for step in lesson.steps.values() if step.version == version), None)
    return step.score.us if step else score_of_launches(partial(once, version), name).us


def show_parts(found: Parts) -> Table:
    """Return a table of `parts`: kernels, each named after the part that it has more, and what that adds."""
    lines, before = [], 0.0
    for name, us in found.us.items():
        us = round(us, 2)  # so that the differences are those of the numbers in the table
        lines.append([f"... + {name}" if lines else name, f"{us:.2f}", f"{us - before:+.2f}"])
        before = us
    return Table(["kernel", f"us, {found.source}", "this part adds"], lines)


def show_ties(versions: dict) -> Table:
    """Return a table of what random and tied logits cost: times, or else warp-wide operations of a warp."""
    sets, bias = _sets()
    tied = (sets[0] * 0).contiguous(), (sets[0] > 0).float()
    cases = {"random": (sets[0], bias), "all equal": (tied[0], bias * 0), "two values": (tied[1], bias * 0)}
    out = outputs(TOKENS)
    calls = {
        f"{name}, {case}": partial(run, version, *given, out)
        for name, version in versions.items()
        for case, given in cases.items()
    }
    us = lesson.times("ties", calls)
    if us:
        text, heading = lambda name, case: records.format_us(us[f"{name}, {case}"]), "us"
    else:
        text, heading = lambda name, case: str(_votes(versions[name], cases[case])), "votes of a warp"
    lines = [[name, *(text(name, case) for case in cases)] for name in versions]
    return Table([heading, *cases], lines)


def _votes(version, given):
    if not simulator.ENABLED:
        return ""
    return count(version[0], lambda _: run(version, *given)).critical_path.votes


def last_bound() -> str:
    """Return the lower bound of a kernel that launches, loads once and sums, in words."""
    known, record = latencies(lesson.gpu.upper()), records.recorded("gate")
    row = record and records.find(record, step="empty kernel", config=dict(dependent=True))
    if not row:
        return "no empty kernel is recorded"
    parts = (
        row["kernel_us"]["median"],
        known.ns["global_load_requests"] / 1000,
        SUM_ROUNDS * known.ns["shuffles"] / 1000,
    )
    text = " + ".join(f"{us:.2f}" for us in parts)
    return f"launch, load and sum: {text} = {sum(parts):.2f} us"


def show_variants(final, others: dict) -> Table:
    """Return a table of variants of the last step, with the times of `TOKENS` tokens and of one."""
    versions = {"the last step": final} | others
    calls = {
        f"{name}, {tokens}": timed(version, tokens) for tokens in (TOKENS, 1) for name, version in versions.items()
    }
    names, four = list(versions), "four tokens per warp (the package's kernel for many tokens)"
    if four_tokens_per_warp.supports(EXPERTS, GROUPS, KEPT, TOPK, 0):
        names.append(four)
        calls |= {f"{four}, {tokens}": _four_tokens(tokens) for tokens in (TOKENS, 1)}
    us = lesson.times("variants", calls)
    text = lambda name, tokens: records.format_us(us[f"{name}, {tokens}"]) if us else "not timed"
    differs = _DIFFERS | {four: _FOUR}
    lines = [[name, text(name, TOKENS), text(name, 1), differs.get(name, "")] for name in names]
    return Table(["kernel", f"us, {TOKENS} tokens", "us, 1 token", "what differs"], lines)


_DIFFERS = {
    "released after the loads": "The compiler has moved the release after the first instructions that need the "
    "logits, so it waits for the loads.",
    "released before the wait": "The next kernel may start while this one still waits. That is safe only if the next "
    "one touches nothing before its own wait: the check of the exercise shows what else would break. With many tokens, "
    "CTAs that can only wait take the places of those that could work.",
    "one warp per CTA": "Each warp has an SM of its own, and four times as many CTAs must be started.",
    "eight warps per CTA": "Two warps share a scheduler, and half as many CTAs must be started.",
}
_FOUR = (
    "It needs fewer instructions for a token, and scores four tokens one after another before it picks. With few "
    "tokens no warp waits for instructions, and the chain is longer."
)


def _four_tokens(tokens):
    """Return calls of the package's kernel for many tokens."""
    kernel = four_tokens_per_warp.make_4tokens_kernel(one_token_per_warp.GateConfig(**CONFIG))
    sets, bias = _sets(tokens)
    per_cta, threads = 4 * four_tokens_per_warp.WARPS_PER_BLOCK, 32 * four_tokens_per_warp.WARPS_PER_BLOCK
    return [partial(_package, kernel, per_cta, threads, logits, bias, outputs(tokens)) for logits in sets]


def _package(kernel, tokens_per_cta, threads, logits, bias, out):
    """Launch a kernel of the package, as its public function does without padding and shared experts."""
    tokens = len(logits)
    sizes = tokens, np.int64(logits.stride(0)), tokens
    launch(kernel, -(-tokens // tokens_per_cta), threads, logits, bias, *out, *sizes, 1.0, 1.0, dependent=True)
    return out


# The model without groups and without a bias


@cache
def _small_sets(tokens=TOKENS):
    torch.manual_seed(2)
    make = lambda: torch.randn(tokens, SMALL_EXPERTS, device=DEVICE).bfloat16()
    return rotating(make, 2 * tokens * SMALL_EXPERTS)


def run_small(kernel, logits: torch.Tensor, out=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a gate that takes (logits, weights, ids, tokens), 16-bit logits as their bits; a dependent launch."""
    out = outputs(len(logits), SMALL_TOPK) if out is None else out
    launch(kernel, -(-len(logits) // WARPS), 32 * WARPS, logits, *out, len(logits), dependent=True)
    return out


def check_small(kernel) -> str | None:
    """Compare a gate of the small model with the reference; return the first error."""
    logits = _small_sets()[0][:6]
    cases = {
        "random logits": logits,
        "logits of three values": logits.sign() * (logits.abs() > 0.7),
        "all logits equal": logits * 0,
        "0.0 and -0.0": -(logits > 1).to(logits.dtype) * 0 + (logits > 2.2) * 1,
    }
    for name, each in cases.items():
        if fault := mismatch(*run_small(kernel, each.contiguous()), each, None, SMALL_TOPK, scoring="softmax"):
            return f"{name}: {fault}"
    return None


def show_small(kernels: dict) -> Table:
    """Return a table of gates of the small model: checked, and timed beside the package's, or estimated."""
    for name, kernel in kernels.items():
        if fault := check_small(kernel):
            raise WrongResult(f"{name}: {fault}")
    out = outputs(TOKENS, SMALL_TOPK)
    calls = {name: [partial(run_small, kernel, x, out) for x in _small_sets()] for name, kernel in kernels.items()}
    if not simulator.ENABLED:
        calls |= _small_package(out)
    us = lesson.times(_SMALL, calls)
    source = "us" if us else "us, estimated"
    us = us or {name: score_of_launches(calls[name][0], name).us for name in kernels}
    us |= {name: time for name, time in small_package().items() if time and source == "us"}
    return Table([f"{SMALL_EXPERTS} experts, top-{SMALL_TOPK}, no bias", source], [[n, f"{us[n]:.2f}"] for n in us])


_SMALL = "without a bias"
_SMALL_PACKAGE = {  # name of a sentence's field -> the package's kernel
    "places": "the package's, with keys that do not hold the expert",
    "packed": "the package's, packed keys",
    "four": "the package's, packed keys, four tokens per warp",
}


def small_package() -> dict[str, float | None]:
    """Return the times of the package's kernels for the small model by name: measured now, or recorded."""
    record, found = records.recorded(lesson.topic), {}
    for name in _SMALL_PACKAGE.values():
        step = f"{_SMALL}: {name}"
        row = lesson.diagnosed.get(step) or record and records.find(record, step=step, size=dict(tokens=TOKENS))
        found[name] = row["kernel_us"]["median"] if row else None
    return found


def small_numbers() -> dict[str, float | None]:
    """Return the times of the package's kernels for the small model, for a sentence."""
    found = small_package()
    return {field: found[name] for field, name in _SMALL_PACKAGE.items()}


def _small_package(out):
    common = dict(scoring="softmax", dtype="bfloat16")
    config = one_token_per_warp.GateConfig(SMALL_EXPERTS, 1, 1, SMALL_TOPK, **common, bias_dtype=None, load_bytes=8)
    packed = packed_keys.PackedConfig(SMALL_EXPERTS, SMALL_TOPK, 32, **common, load_bytes=8)
    four = packed._replace(lanes=8, load_bytes=16)
    made = one_token_per_warp.make_kernel(config), *map(packed_keys.make_packed_kernel, (packed, four))
    kernels = dict(zip(_SMALL_PACKAGE.values(), zip(made, (1, 1, 4), strict=True), strict=True))
    bias = torch.zeros(1, device=DEVICE)
    return {
        name: [partial(_package, kernel, WARPS * tokens, 32 * WARPS, x, bias, out) for x in _small_sets()]
        for name, (kernel, tokens) in kernels.items()
    }


class Folded(NamedTuple):
    """Text or a table that a page shows folded, below a table that it shows; ``str`` is all of it."""

    heading: str
    hidden: Any
    shown: Any = ""

    def __str__(self):
        return "\n".join(filter(None, [str(self.shown), f"{self.heading}:", str(self.hidden)]))

    __repr__ = __str__

    def _repr_html_(self):
        def of(thing):
            return thing._repr_html_() if hasattr(thing, "_repr_html_") else f"<pre>{html.escape(thing)}</pre>"

        shown = of(self.shown) if self.shown else ""
        return f"{shown}<details><summary>{html.escape(self.heading)}</summary>{of(self.hidden)}</details>"


def listing(version) -> Folded:
    """Return the source of a version: the kernel, and all functions of the page and of the exercises that it calls."""
    _, functions = expression_of(version)
    found = {}
    for line in source_with_dependencies(functions).splitlines():
        home, _, names = line.removeprefix("from ").partition(" import ")
        thing = getattr(sys.modules.get(home), names.split(" ")[0], None) if home.startswith(__package__) else None
        if thing is not None and hasattr(thing, "__name__") and thing is not sort_descending:
            found[thing.__name__] = source_of(thing)
        elif line[:5] not in ("from ", "impor"):
            found[len(found)] = line
    return Folded("The whole kernel", "\n".join(found.values()))


def show_peers() -> Folded:
    """Return the recorded kernels for few tokens: the others beside this package; folded, all shapes but this one."""
    record = records.recorded("gate")
    rows = [
        r for r in (record or {}).get("rows", ()) if r.get("size", {}).get("tokens") in (1, TOKENS) and "kernel_us" in r
    ]
    steps = [
        "final",
        *dict.fromkeys(r["step"] for r in rows if r["step"].startswith("peer:") and "," not in r["step"]),
        "torch.compile",
    ]
    found: dict = {}
    for row in rows:
        config = row["config"]
        key = (*(config[name] for name in CONFIG), row["dtype"], row["size"]["tokens"])
        found.setdefault(key, {})[row["step"]] = records.format_us(row["kernel_us"]["median"])
    lines = [
        [f"{experts}, {groups}, {kept}, {topk}", dtype, str(tokens), *(us.get(step, "") for step in steps)]
        for (experts, groups, kept, topk, dtype, tokens), us in found.items()
    ]
    headings = ["experts, groups, kept, top-k", "logits", "tokens", *map(name_of, steps)]
    own = ", ".join(map(str, CONFIG.values()))
    shown, others = ([line for line in lines if (line[0] == own) is is_own] for is_own in (True, False))
    return Folded(f"{len(others)} rows of other shapes", Table(headings, others), Table(headings, shown))
