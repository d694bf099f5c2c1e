"""The lesson "The gate, for a prompt": inputs, checks, times, tables."""

import sys
from collections.abc import Mapping
from functools import cache, partial

import torch
from IPython.display import Markdown

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.timing import rotating
from moe_numba.course.bench.timing.launch_profile import launch_profile
from moe_numba.course.bench.topics.gate import name_of
from moe_numba.course.draw.launch_timeline import is_search
from moe_numba.course.lessons.gate import draw, sizes, variants
from moe_numba.course.lessons.gate import exercises as answers
from moe_numba.course.lessons.gate.sizes import DEVICE, EXPERTS, GROUPS, KEPT, TOKENS, TOPK, WARPS
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.estimate import clocks_by_function
from moe_numba.course.steps.lesson import Lesson, Run, Step, Table
from moe_numba.course.steps.score import MODEL, TOTAL, Score, score_of_kernels
from moe_numba.course.steps.simulate import expression_of, in_simulator
from moe_numba.course.steps.verdict import OPEN, RIGHT, WRONG, Verdict
from moe_numba.gate import reference
from moe_numba.ptx.memory import griddepcontrol_launch_dependents
from moe_numba.runtime.launch import launch

CONFIG = dict(num_experts=EXPERTS, num_expert_group=GROUPS, topk_group=KEPT, topk=TOPK)
_OPTIONS = dict(num_expert_group=GROUPS, topk_group=KEPT)
_COUNTED = 2  # CTAs that the simulator runs to count; the others do the same with other logits
_EARLIER = "gate_ladder"  # the record of earlier versions of the kernels, and of the kernels that torch launches


# Versions of the gate: how they are checked, counted and timed


def gate(kernel, tokens_per_warp=1, ctas_per_sm=0, dependent=False, dtype="float32") -> tuple:
    """Return a version: a kernel, and how it is launched.

    ``ctas_per_sm`` limits the registers, so that at least so many CTAs fit on an SM; ``dependent`` uses programmatic
    dependent launch.
    """
    return kernel, tokens_per_warp, ctas_per_sm, dependent, dtype


@cache
def inputs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return logits and biases that a gate may get wrong, by name; some warps have no token, or not all."""
    torch.manual_seed(0)
    tokens = 5 if simulator.ENABLED else 4093
    few, few_biases = torch.randint(-2, 3, (tokens, EXPERTS)).float(), torch.randint(0, 2, (EXPERTS,)) / 8
    best = torch.randint(0, 3, (tokens, GROUPS))  # of each group, so that some groups are equal, and some better
    best[4] = torch.tensor([1] * (GROUPS - 3) + [0, 1, 2])  # the last one is best, and not all others fit
    few = few.minimum(best.repeat_interleave(EXPERTS // GROUPS, dim=1))
    few[0] = 0  # only the bias decides
    few[1, EXPERTS // 2 :] = few[2, ::2] = -torch.inf  # masked experts
    few[3] *= 40  # scores of exactly 0 and 1
    pairs = {"random logits": (torch.randn(tokens, EXPERTS), torch.rand(EXPERTS) / 5), "few values": (few, few_biases)}
    return {name: (logits.to(DEVICE), bias.to(DEVICE)) for name, (logits, bias) in pairs.items()}


def poisoned(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs that no gate leaves as they are: weights of NaN and ids of -7."""
    weights = torch.full((tokens, TOPK), float("nan"), device=DEVICE)
    return weights, torch.full((tokens, TOPK), -7, dtype=torch.int32, device=DEVICE)


def run(version, logits, bias, weights, ids, **options):
    """Launch a version; return the outputs."""
    kernel, tokens_per_warp, ctas_per_sm, dependent, _ = version
    if ctas_per_sm:
        options["launch_bounds"] = 32 * WARPS, ctas_per_sm
    grid = min(-(-len(logits) // (WARPS * tokens_per_warp)), options.pop("most_ctas", sys.maxsize))
    launch(kernel, grid, (32, WARPS), logits, bias, weights, ids, len(logits), dependent=dependent, **options)
    return weights, ids


def fault(weights, ids, logits, bias) -> str | None:
    """Compare a routing with the reference in float64: experts, their order, ties, weights."""
    return reference.mismatch(weights, ids, logits, bias, TOPK, **_OPTIONS)


def check(version) -> str | None:
    """Compare a version with the reference on all inputs; return the first error.

    If it is launched as a dependent, another kernel writes its logits, and lets it start before they are written.
    """
    for name, (logits, bias) in inputs().items():
        logits, out = logits.to(_dtype(version)), poisoned(len(logits))
        given = torch.full_like(logits, torch.nan) if version[3] else logits
        if version[3]:  # directly before the launch of the version
            launch(_write_late, len(logits), EXPERTS, _words(logits), _words(given))
        if wrong := fault(*run(version, given, bias, *out), logits, bias):
            return f"{name}: {wrong}"
    return None


@cuda.jit
def _write_late(logits, given):
    """Copy logits for a dependent launch, which may start before they are written, as that after a router may."""
    griddepcontrol_launch_dependents()
    cuda.nanosleep(20_000)  # so that a GPU, too, shows what a kernel reads that does not wait
    i = cuda.blockIdx.x * EXPERTS + cuda.threadIdx.x
    given[i] = logits[i]


def _words(logits):
    """Return logits as integers, which a kernel copies whatever they are."""
    return logits.view(torch.int32 if logits.itemsize == 4 else torch.int16)


def _dtype(version):
    return getattr(torch, version[4])


def timed(version, *, tokens=None, sets=None, **options) -> list:
    """Return calls with different logits, which do not fit in the L2 cache together; ``sets`` limits their number."""
    tokens = tokens or (WARPS * version[1] if simulator.ENABLED else TOKENS)
    make = lambda: torch.randn(tokens, EXPERTS, device=DEVICE).to(_dtype(version))
    rotated = rotating(make, tokens * EXPERTS * _dtype(version).itemsize)[:sets]
    bias, out = torch.rand(EXPERTS, device=DEVICE) / 5, poisoned(tokens)
    return [partial(run, version, logits, bias, *out, **options) for logits in rotated]


def once(version):
    """Launch a version with as many tokens as are timed; all versions count what they do with the same logits."""
    torch.manual_seed(0)
    return timed(version, tokens=TOKENS)[0]()


class GateLesson(Lesson):
    """A lesson of a kernel whose CTAs are independent: some are counted, and the estimate is for all.

    A step predicts its time from the estimates: it should change as they do.

    Attributes
    ----------
    about : dict
        Step -> what the compiler made of its kernel: "registers", "local_bytes" and "ctas_per_sm", and "functions":
        function -> pipe -> clocks of a warp.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.about = {}

    def step(self, name: str, version: tuple, *, after: str | None = None) -> Step:
        """Check, count and time a version; see `Lesson.step`."""
        found = super().step(name, version, after=after)
        if found.before and found.before.us:
            found.predicted_us = found.before.us * found.score.us / found.before.score.us
        if found.row:
            found.row["dtype"] = version[4]
        return found

    def _score(self, name, version):
        if simulator.ENABLED:
            return self.count(version, name)
        expression, functions = expression_of(version)
        rows, self.about[name] = in_simulator(_count_again, self.home, name, expression, functions=functions)
        return Score(name, {(section, row): number for section, row, number in rows}, self.gpu.upper())

    def score_of(self, name: str, version: tuple) -> dict[tuple[str, str], float]:
        """Return the rows of the score of a version that need not be a step; `about` has what the compiler made."""
        return (self.steps[name].score if name in self.steps else self._score(name, version)).rows

    def count(self, version: tuple, name: str) -> Score:
        """Return the score of a version; the simulator counts some CTAs."""
        gpu = self.gpu.upper()
        with simulator.profile(gpu, _COUNTED) as profile:
            self.run.once(version)
        (kernel,) = profile.kernels
        found, static = score_of_kernels([kernel], name, gpu, cold=True, bounds=True), kernel.static
        clocks = clocks_by_function(kernel, gpu)
        warps = -(-TOKENS // version[1])
        more = {
            "instructions": round(warps * sum(each["issue slots"] for each in clocks.values())),
            "registers per thread": static.registers,
            "local memory per thread, bytes": static.stack_bytes,
        }
        found.rows.update({(TOTAL, row): number for row, number in more.items()})
        self.about[name] = {
            "functions": clocks,
            "ctas_per_sm": static.occupancy[0].blocks_per_sm,
            "local_bytes": static.stack_bytes,
        }
        return found


def _count_again(home, name, version):
    """Count a version again in the simulator's process; return the rows of its score, and what `about` has."""
    counted = lesson.count(eval(version, vars(sys.modules["__main__"])), name)
    return [(section, row, number) for (section, row), number in counted.rows.items()], lesson.about[name]


lesson = GateLesson(
    "gate_prompt_ladder",
    Run(check, once, timed, kernels=lambda version: version[:1]),
    f"{__name__}:lesson",
    config=CONFIG,
    size=dict(tokens=TOKENS),
    dtype="float32",
    seeds=1,
)


def where(step: str) -> Table:
    """Return a table of the functions of a step's kernel: what each takes of the slowest pipe, and of issue slots."""
    functions = lesson.about[step]["functions"]
    pipe = slowest_pipe(step)
    total = sum(each[pipe] for each in functions.values())
    largest = sorted(functions, key=lambda name: functions[name][pipe], reverse=True)
    lines = [
        [name, f"{clocks:.0f}", f"{clocks / total:.0%}", f"{functions[name]['issue slots']:.0f}"]
        for name in largest
        if (clocks := functions[name][pipe]) >= 0.005 * total
    ]
    return Table([step, f"clocks of the {pipe} pipe, per warp", "share", "instructions"], lines)


def slowest_pipe(step: str) -> str:
    """Return the pipe of a scheduler that a step's kernel keeps busy longest."""
    functions = lesson.about[step]["functions"].values()
    pipes = [pipe for pipe in next(iter(functions)) if pipe != "issue slots"]
    return max(pipes, key=lambda pipe: sum(each[pipe] for each in functions))


def chart() -> draw.Drawing:
    """Draw estimate, slowest pipe and measured time of all steps."""
    steps = []
    for name, step in lesson.steps.items():
        steps.append((name, step.score.us, _slowest_pipe_us(step), step.us))
    return draw.chart(steps)


def _slowest_pipe_us(step):
    return max(us for (section, row), us in step.score.rows.items() if section == MODEL and row in _PIPES)


_PIPES = "issue slots", "FMA", "ALU", "XU", "LSU"


def constants() -> Table:
    """Return a table of the names that the kernels use: value and meaning."""

    def value(name):
        number = getattr(sizes, name)
        if isinstance(number, tuple):
            return f"{len(number)} pairs"
        if name == "FULL":
            return f"{number:#x}"
        return f"{int(number)}" if int(number) == number and abs(float(number)) < 1e10 else f"{number:.6g}"

    lines = [[name, ", ".join(map(value, name.split(", "))), text] for name, text in sizes.MEANINGS.items()]
    return Table(["name", "value", "meaning"], lines)


def counted(before: str, after: str) -> dict[str, float]:
    """Return numbers of two steps for a sentence: estimates, what was counted, and some rows of the second's model."""
    first, second = lesson.steps[before], lesson.steps[after]
    of = lambda step, row: step.score.rows[MODEL, row]
    return {
        "estimate_before": first.score.us,
        "estimate": second.score.us,
        "instructions_before": first.score.rows[TOTAL, "instructions"] / 1e6,
        "instructions": second.score.rows[TOTAL, "instructions"] / 1e6,
        "registers": second.score.rows[TOTAL, "registers per thread"],
        "mb_before": first.score.rows[TOTAL, "bytes, global memory"] / 1e6,
        "mb": second.score.rows[TOTAL, "bytes, global memory"] / 1e6,
        "ALU_before": of(first, "ALU"),
        **{row: of(second, row) for row in ("ALU", "L2", "DRAM")},
    }


def miss(before: str, after: str) -> Markdown:
    """Return a sentence on the prediction of a step: what was measured, and how far both estimates are off."""
    first, second = lesson.steps[before], lesson.steps[after]
    judged = second.judgement
    return say(
        f"Predicted: {{predicted:.1f}} us; measured: {{us:.1f}} us ({{verdict}}). The estimate of *{before}* is "
        f"{{error}} its measured time, that of *{after}* {{second_error}}.",
        predicted=second.predicted_us,
        us=second.us,
        verdict=judged and judged.verdict,
        error=_error(first),
        second_error=_error(second),
    )


def _error(step):
    """Return how far a step's estimate is from its time, in words; None if the step is not timed."""
    if not step.us:
        return None
    error = step.score.us / step.us - 1
    return f"{abs(error):.0%} {'above' if error > 0 else 'below'}"


def shares_of_the_slowest_pipe() -> dict[str, str]:
    """Return the slowest pipe's share of the estimate: in the first three steps, to *fast sigmoid*, and after it."""
    names = list(lesson.steps)
    shares = [_slowest_pipe_us(lesson.steps[name]) / lesson.steps[name].score.us for name in names]
    middle, last = names.index("one warp per token"), names.index("fast sigmoid") + 1
    parts = {"first": shares[:middle], "middle": shares[middle:last], "last": shares[last:]}
    return {name: f"{100 * min(part):.0f} to {100 * max(part):.0f} %" for name, part in parts.items()}


def registers_without_limit(step: str) -> float:
    """Return the registers of a thread of a step's kernel if its launch demands no number of CTAs per SM."""
    kernel, tokens_per_warp, _, *more = lesson.steps[step].version
    return lesson.score_of(f"{step}, no limit", gate(kernel, tokens_per_warp, 0, *more))[TOTAL, "registers per thread"]


def _earlier(step):
    """Return the row of an earlier version of a kernel, or of torch, for this shape; None if there is none."""
    record = records.recorded(_EARLIER)
    return record and records.find(record, step=step, config=CONFIG, size=dict(tokens=TOKENS))


# torch


def torch_faults(function) -> Table:
    """Return a table of what the reference finds in the routings of a torch function, in any order of the experts."""
    lines = []
    for name, (logits, bias) in inputs().items():
        weights, ids = function(logits, logits, bias, TOPK, True, GROUPS, KEPT)
        order = ids.argsort(dim=1)
        weights, ids = weights.gather(1, order), ids.gather(1, order)
        order = (logits.sigmoid() + bias).gather(1, ids.long()).argsort(dim=1, descending=True, stable=True)
        wrong = fault(weights.gather(1, order), ids.gather(1, order), logits, bias)
        lines.append([name, wrong or "right"])
    return Table(["inputs", "torch's routing"], lines)


@cache
def _torch_timelines(function):
    """Return name -> kernels as (name, start, duration) of a call of torch, profiled now or recorded."""
    recorded = {step: row["timeline"] for step in ("torch eager", "torch.compile") if (row := _earlier(step))}
    if simulator.ENABLED:
        return {f"{step}, recorded": kernels for step, kernels in recorded.items()}
    logits, bias = torch.randn(TOKENS, EXPERTS, device=DEVICE), torch.rand(EXPERTS, device=DEVICE)
    now = launch_profile(lambda: function(logits, logits, bias, TOPK, True, GROUPS, KEPT))
    found = {"torch eager": now}
    if "torch.compile" in recorded:
        found["torch.compile, recorded"] = recorded["torch.compile"]
    return found


def torch_kernels(function) -> draw.Drawing | str:
    """Draw the kernels that torch launches for a call of a function."""
    calls = _torch_timelines(function)
    return draw.torch_kernels(calls) if calls else "nothing is recorded for this shape"


def torch_shares(function) -> str:
    """Return how much of torch's time its kernels take that select or sort."""
    if not (calls := _torch_timelines(function)):
        return "nothing is recorded for this shape"
    name, kernels = next(iter(calls.items()))
    search, total = (sum(us for kernel, _, us in kernels if every or is_search(kernel)) for every in (False, True))
    return f"{name}: kernels that select or sort take {search:.0f} of {total:.0f} us, {search / total:.0%}"


# The result, and other projects' kernels


def _recorded(step, dtype="float32", tokens=TOKENS, config=CONFIG):
    record = records.recorded("gate")
    row = record and records.find(record, step=step, dtype=dtype, size=dict(tokens=tokens), config=config)
    return row["kernel_us"]["median"] if row and "kernel_us" in row else None


def _peers():
    record = records.recorded("gate")
    return records.peers(record) if record else []


def result() -> str:
    """Return the recorded times of the package's kernel, of torch and of all peers."""
    final = _recorded("final")
    if final is None:
        return "no times are recorded for this shape"
    others = {name_of(step): _recorded(step) for step in ("torch eager", "torch.compile", *_peers())}
    texts = [f"{name} {records.format_us(us)} us ({us / final:.1f} times as long)" for name, us in others.items() if us]
    head = f"Recorded on an H200, {TOKENS} tokens, float32 logits: this package's kernel takes {final:.1f} us"
    return f"{head}; {'; '.join(texts)}."


def peers() -> Table:
    """Return a table of the package's kernel and all peers of the record: shapes, types and numbers of tokens."""
    record, lines = records.recorded("gate"), []
    if record is None:
        return Table(["nothing is recorded"], [])
    steps = ["final", "torch.compile", *_peers()]
    sizes = (1024, 4096, 16384, 65536)
    configs = [CONFIG] + [c for c in _configs(record) if c != CONFIG]
    for config in configs:
        for dtype in ("float32", "bfloat16"):
            for step in steps:
                us = [_recorded(step, dtype, tokens, config) for tokens in sizes]
                if any(us):
                    texts = [records.format_us(each) if each else "" for each in us]
                    lines.append([_shape(config), dtype, name_of(step), *texts])
    lines = [line if n == 0 or line[:2] != lines[n - 1][:2] else ["", "", *line[2:]] for n, line in enumerate(lines)]
    return Table(["experts, groups, kept, top", "logits", "kernel", *(f"{n} tokens, us" for n in sizes)], lines)


def _configs(record):
    """Return the shapes with a correction bias for which a peer is recorded."""
    found = [row["config"] for row in record["rows"] if row["step"].startswith("peer:")]
    return [each for n, each in enumerate(found) if "scoring" not in each and each not in found[:n]]


def _shape(config):
    return ", ".join(str(config[name]) for name in CONFIG)


def lower_bounds(tokens: int = TOKENS) -> dict[str, float]:
    """Return what each limit allows at best, in microseconds."""
    chip = chip_limits()
    return {
        "DRAM": tokens * (EXPERTS * 4 + TOPK * 8) / chip.copy_bandwidth * 1e6,
        "MUFU": tokens * EXPERTS * 2 / (16 * chip.sm_count * chip.boost_clock) * 1e6,
    }


def show_lower_bounds() -> str:
    """Return the lower bounds, and the time of an empty kernel, in words."""
    bounds = ", ".join(f"{name} {us:.2f} us" for name, us in lower_bounds().items())
    record = records.recorded("gate")
    empty = record and records.find(record, step="empty kernel", config={"dependent": False})
    more = f"; an empty kernel takes {empty['kernel_us']['median']:.2f} us (recorded)" if empty else ""
    return f"lower bounds for {TOKENS} tokens: {bounds}{more}"


# Diagnoses


@cache
def l1_times(narrow: tuple, wide: tuple) -> dict[str, float]:
    """Time both kernels as they are, and with unused shared memory that leaves the L1 cache as little as possible."""
    unused = {"shared_bytes": _unused_shared_bytes(lesson.about["SGLang's design"]["ctas_per_sm"])}
    calls = {"4 bytes": timed(narrow), "16 bytes": timed(wide)}
    calls |= {"4 bytes, small L1": timed(narrow, **unused), "16 bytes, small L1": timed(wide, **unused)}
    return lesson.times("size of L1", calls)


def l1_probe(narrow: tuple, wide: tuple) -> Table:
    """Return a table of `l1_times`."""
    us, lines = l1_times(narrow, wide), []
    for load in ("4 bytes", "16 bytes") if us else ():
        before, small = us[load], us[f"{load}, small L1"]
        lines.append([f"{load} per load", f"{before:.1f}", f"{small:.1f}", f"{small - before:+.1f}"])
    return Table(["", "us", "small L1", "difference"], lines or [_NOT_TIMED])


_NOT_TIMED = "not timed", "", "", ""


def l1_numbers(narrow: tuple, wide: tuple) -> dict[str, float | str | None]:
    """Return what `l1_times` says of the two explanations, for a sentence."""
    if not (us := l1_times(narrow, wide)):
        return dict.fromkeys(("gain", "small_gain", "conclusion"))
    gain, small_gain = us["4 bytes"] - us["16 bytes"], us["4 bytes, small L1"] - us["16 bytes, small L1"]
    if small_gain > 1.5 * gain:
        conclusion = (
            "Narrow loads lose much more: lines are evicted before their lanes come back. With the small cache "
            "capacity is a cause, and with the full one it may be"
        )
    else:
        conclusion = (
            "Both lose about as much, so the lines of the logits are not what a smaller cache evicts early; what both "
            "kernels have in common is local memory. The gain of wide loads does not depend on the capacity, which "
            "leaves the throughput"
        )
    return {"gain": gain, "small_gain": small_gain, "conclusion": conclusion}


def _unused_shared_bytes(ctas):
    """Return the most bytes of shared memory per CTA with which this many CTAs fit on an SM; 0 in the simulator."""
    if simulator.ENABLED:
        return 0
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    system_bytes = 1024  # of each CTA, from compute capability 8.0 on: an SM has one CTA's most and its system bytes
    return ((most + system_bytes) // ctas - system_bytes) // 128 * 128


def l1_footprint(step: str = "SGLang's design") -> str:
    """Return what the resident warps of a step keep in use of an L1 cache, in words."""
    about = lesson.about[step]
    warps = about["ctas_per_sm"] * WARPS
    lines, local = warps * 32 * 128 / 1024, warps * 32 * about["local_bytes"] / 1024
    return (
        f"{warps} warps on an SM: {warps} x 32 lines of 128 bytes are {lines:.0f} KB of logits, and "
        f"{about['local_bytes']} bytes of local memory per thread are {local:.0f} KB. L1 cache and shared memory have "
        "256 KB together."
    )


def on_a_gpu(version: tuple, runs: int = 200) -> str:
    """Return how many runs of a version on a GPU are wrong, in words."""
    if simulator.ENABLED:
        return "There is no GPU here to try it on."
    wrong = sum(check(version) is not None for _ in range(runs))
    return f"On this GPU {wrong} of {runs} runs are wrong."


def rounded_to_bfloat16(tokens: int = 4096) -> str:
    """Return how many tokens get other experts if scores are computed in bfloat16, as SGLang's kernel does."""
    torch.manual_seed(0)
    logits, bias = torch.randn(tokens, EXPERTS).bfloat16(), torch.rand(EXPERTS) / 5
    exact, rounded = logits.float().sigmoid() + bias, logits.sigmoid() + bias.bfloat16()
    chosen = [reference.choose_experts(each.float(), TOPK, GROUPS, KEPT).sort().values for each in (exact, rounded)]
    share = (chosen[0] != chosen[1]).any(dim=1).float().mean().item()
    return f"scores rounded to bfloat16 change the experts of {share:.0%} of {tokens} tokens"


@cache
def from_dram_and_l2(version: tuple) -> tuple[dict[str, float], int]:
    """Time a version with logits from DRAM, with logits that stay in L2, and with whole waves of CTAs.

    Returns
    -------
    us : dict
        "DRAM", "L2", and "1 waves", "2 waves", "4 waves" -> microseconds; empty if nothing is recorded.
    wave : int
        Tokens of a wave: of the CTAs that fit on all SMs.
    """
    wave = chip_limits().sm_count * lesson.about["dependent launch"]["ctas_per_sm"] * WARPS * version[1]
    calls = {"DRAM": timed(version), "L2": timed(version, sets=1)}
    for waves in (1, 2, 4):
        calls[f"{waves} waves"] = timed(version, tokens=None if simulator.ENABLED else waves * wave)
    return lesson.times("DRAM and waves", calls), wave


def open_problem(version: tuple) -> Table:
    """Return a table of where the rest of the last kernel's time is."""
    us, wave = from_dram_and_l2(version)
    if not us:
        return Table(["", "us", "", ""], [_NOT_TIMED])
    each = (us["4 waves"] - us["2 waves"]) / 2
    # A recorded time is that of the CTAs that fit with the registers of the compiler that the GPU had.
    in_waves = f"{wave:,} tokens; {TOKENS:,} are {TOKENS / wave:.2f} waves" if lesson.is_timed else ""
    lines = [
        ["logits from DRAM", us["DRAM"], ""],
        ["the same logits, in L2", us["L2"], "the bound to beat: all waiting for DRAM is hidden"],
        ["difference", us["DRAM"] - us["L2"], "waiting for DRAM"],
        ["bytes at the rate of a copy", lower_bounds()["DRAM"], "the lower bound"],
        ["one wave of CTAs", us["1 waves"], in_waves],
        ["each further wave", each, "its start and end overlap with other waves"],
    ]
    return Table(["", "us", ""], [[name, f"{time:.2f}", text] for name, time, text in lines])


class Repair:
    """Choose the repairs of the race before the kernels with them are checked, as `step` checks a kernel."""

    def check(self, repairs: Mapping[str, tuple], choice: object = ...) -> Verdict:
        """Check the kernel with each repair, in several thread orders and for races; compare with the choice."""
        names = ", ".join(repairs)
        if choice is ...:
            return Verdict("race", OPEN, f"no choice yet: {names}, or several, such as 'AB'")
        found = {name: lesson.orders(version, _ORDERS) for name, version in repairs.items()}
        good = [name for name, orders in found.items() if not orders.wrong and not orders.race]
        lines = [
            [name, f"wrong under {orders.wrong} of {_ORDERS}", "race" if orders.race else "no race"]
            for name, orders in found.items()
        ]
        choice = str(choice).upper()
        is_right = sorted(choice) == good
        repair = f"only {good[0]} repairs" if len(good) == 1 else f"{', '.join(good) or 'none'} repair"
        text = f"{'right' if is_right else f'wrong, you chose {choice}'}: {repair} the kernel"
        notes = [f"{name}: {orders.race}" for name, orders in found.items() if orders.race and not orders.wrong]
        table = Table(["repair", "thread orders", "race detector"], lines)
        return Verdict("race", RIGHT if is_right else WRONG, text, table=table, notes=(*_WHY, *notes))


_ORDERS = 4  # of threads, in which a repair is checked
_WHY = (
    "A fence orders the memory accesses of one thread. It does not make the lane that loads wait for the lane that "
    "stores, and a barrier after both accesses comes too late.",
    "Shuffles and votes exchange registers, and do not order memory. C repairs the sum, but the division at the end "
    "of the kernel still reads weights that other lanes have stored, and nothing orders it after their stores.",
)


class FromL2:
    """Predict the time of the last kernel with logits in L2."""

    def check(self, version: tuple, us: object = ...) -> Verdict:
        """Compare a guess with the time, measured or recorded."""
        found, _ = from_dram_and_l2(version)
        if us is ... or not found:
            return Verdict("from L2", OPEN, "no guess yet" if found else "no time is recorded for this shape")
        if not isinstance(us, int | float):
            return Verdict("from L2", WRONG, f"{us!r} is no number of microseconds: write one without quotes")
        close = abs(us - found["L2"]) <= 0.1 * found["L2"]
        text = f"{'right' if close else 'not within 10 %'}: you predicted {us} us, and it takes {found['L2']:.2f} us"
        return Verdict("from L2", RIGHT if close else WRONG, text, notes=_half_the_bytes())


def _half_the_bytes():
    """Return what the step with bfloat16 logits lets one expect of logits from L2, in words."""
    float32, halves = (lesson.steps[name].us for name in ("dependent launch", "bfloat16 logits"))
    if not float32 or not halves:
        return ()
    saved = float32 - halves
    return (
        f"A guess from the chart: half of the bytes (bfloat16 logits) saves {saved:.2f} us, so all of them would save "
        f"about {2 * saved:.2f} us of {float32:.2f}, which leaves {float32 - 2 * saved:.2f}.",
    )


# What did not pay


def what_did_not_pay() -> Table:
    """Time variants beside what they would replace; return a table of both, and why they do not pay."""
    pairs = variants.versions(gate)
    calls = {}
    for name, pair in pairs.items():
        for which, version, options in zip(("before", "after"), pair.versions, pair.options, strict=True):
            calls[f"{name}, {which}"] = timed(version, **options)
    us = lesson.times("what did not pay", calls)
    text = lambda name: records.format_us(us[name]) if us else "not timed"
    lines = [[name, text(f"{name}, before"), text(f"{name}, after"), pair.why] for name, pair in pairs.items()]
    for step, (name, why) in variants.EARLIER.items():
        if (row := _earlier(step)) and "compared_us" in row:
            lines.append(
                [f"{name} (an earlier version of this kernel)", *map(records.format_us, row["compared_us"]), why]
            )
    return Table(["change", "us, before", "us, after", "why"], lines)


class exercises:
    """The exercises of the page."""

    race, largest, rank, key, pop, place = (
        Repair(),
        *(getattr(answers, name) for name in ("LARGEST", "RANK", "KEY", "POP", "PLACE")),
    )
    from_l2 = FromL2()
