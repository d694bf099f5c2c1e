"""Checks of what the gate's article says about `moe_fused_gate`'s host code and kernel."""

from collections.abc import Iterable
from functools import cache

import torch
from numba import cuda, float32, int32

from moe_numba import simulator
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.verdicts import Found
from moe_numba.runtime.launch import launch

WARP_SIZE, WARPS_PER_CTA, MAX_VPT = 32, 6, 32
FULL_MASK, LARGEST = 0xFFFFFFFF, 3.4028234663852886e38
DTYPES = ("bfloat16", "float16", "float32")
PROMISED = {256: (8, 16), 128: (4, 8)}  # numbers of experts and groups with a templated kernel, in the listing's order

_BY_DTYPE = "if bfloat16 launch else if float16 launch else if float32 launch"
# The nesting of one case of the listing's switch, in words; {0} and {1} are conditions on the number of groups. The
# listing has no braces around the first chain of dtypes.
LISTING = f"if {{0}} {_BY_DTYPE} else if {{1}} {_BY_DTYPE}"


def launches(code: str, true: Iterable[str]) -> int:
    """Execute nested if statements and count the launches; an ``else`` belongs to the nearest ``if``, as in C++.

    Parameters
    ----------
    code : str
        Words: "if" and a condition, "else", "launch"; "begin" and "end" stand for braces.
    true : iterable of str
        The conditions that are true.
    """
    words, true = code.split(), set(true)

    def statement(i, active):
        if words[i] == "launch":
            return i + 1, int(active)
        if words[i] == "begin":
            i, count = statement(i + 1, active)
            return i + 1, count
        holds = words[i + 1] in true
        i, count = statement(i + 2, active and holds)
        if i < len(words) and words[i] == "else":
            i, more = statement(i + 1, active and not holds)
            count += more
        return i, count

    return statement(0, True)[1]


def templated_launches(num_experts: int, groups: int, dtype: str, code: str = LISTING) -> int:
    """Count the templated kernels that the switch starts; if there is none, the dynamic kernel runs."""
    if num_experts not in PROMISED:
        return 0
    return launches(code.format(*(f"groups={g}" for g in PROMISED[num_experts])), {f"groups={groups}", dtype})


def templates_reached(code: str = LISTING) -> Found:
    """Count for how many of the promised shapes and dtypes a templated kernel starts."""
    cases = [(experts, groups, dtype) for experts, own in PROMISED.items() for groups in own for dtype in DTYPES]
    reached = [case for case in cases if templated_launches(*case, code)]
    shapes = ", ".join(dict.fromkeys(f"{experts}/{groups}" for experts, groups, _ in reached))
    text = f"{len(reached)} of {len(cases)} shapes and dtypes ({shapes})"
    if len(reached) < len(cases):
        text += ": in C++ the second `else if` belongs to the chain of dtypes of the first"
    return Found(len(reached), text)


def kernels_of_a_call() -> Found:
    """Count the kernels that one call starts, whatever the shape."""
    shapes = [(experts, groups) for experts in (64, 128, 256, 512) for groups in (4, 8, 16, 32)]
    found = {max(1, templated_launches(*shape, dtype)) for shape in shapes for dtype in DTYPES}
    return Found(max(found), f"{max(found)} in each of {len(shapes) * len(DTYPES)} combinations of shape and dtype")


def thread_model(num_experts: int, groups: int) -> tuple[int, int, int]:
    """Return VPT, ROWS_PER_WARP and ROWS_PER_CTA by the host code's formulas."""
    rows_per_warp = max(1, WARP_SIZE // groups)
    return num_experts // groups, rows_per_warp, WARPS_PER_CTA * rows_per_warp


def right_comments() -> Found:
    """Compare three comments of the switch with the formulas."""
    comments = {(256, 8): (32, 4, 24), (256, 16): (16, 2, 12), (128, 8): (16, 4, 24)}
    right = [shape for shape, numbers in comments.items() if thread_model(*shape) == numbers]
    return Found(len(right), f"{len(right)} of {len(comments)} agree with the formulas")


def rows_per_warp_of_128_4() -> Found:
    _, warp, cta = thread_model(128, 4)
    return Found(warp, f"32 / 4 = {warp}, and {cta} rows per CTA, by the host code's formula and by its macro")


def accepts(num_experts: int, groups: int) -> bool:
    """Return whether a shape passes the host code's three checks."""
    return num_experts & (num_experts - 1) == 0 and num_experts % groups == 0 and num_experts // groups <= MAX_VPT


def small_groups_accepted() -> Found:
    """Count the shapes with fewer than 8 experts per group that pass the checks."""
    shapes = [(experts, groups) for experts in (16, 32, 64, 128, 256) for groups in (4, 8, 16, 32)]
    small = [(experts, groups) for experts, groups in shapes if experts % groups == 0 and experts // groups < 8]
    passed = [f"{experts}/{groups}" for experts, groups in small if accepts(experts, groups)]
    return Found(len(passed), f"{len(passed)} of {len(small)} pass; experts and groups: {', '.join(passed) or 'none'}")


def room_above_vpt() -> Found:
    vpt, *_ = thread_model(256, 8)
    return Found(MAX_VPT - vpt, f"MAX_VPT is {MAX_VPT}, and DeepSeek-V3 has VPT {vpt}, which the host code accepts")


def guards_that_skip() -> Found:
    """Count the iterations in which one of the two guards inside the loops is false."""
    topk = sum(not k < topk for topk in range(1, 33) for k in range(topk))
    excluded = sum(
        not k < groups - kept for groups in range(1, 33) for kept in range(1, groups + 1) for k in range(groups - kept)
    )
    count = topk + excluded
    return Found(count, f"{count} iterations for up to 32 experts or groups: the loop has the same condition")


def butterfly(scores: list[float], ids: list[int], takes_other) -> list[int]:
    """Reduce by exchanges with lane ^ 4, ^ 2, ^ 1 (for eight lanes); return the id that each lane ends with."""
    lanes, mask = list(zip(scores, ids, strict=True)), len(scores) // 2
    while mask:
        lanes = [lanes[i ^ mask] if takes_other(lanes[i], lanes[i ^ mask]) else lanes[i] for i in range(len(lanes))]
        mask //= 2
    return [i for _, i in lanes]


def _ties(takes_other, chosen):
    generator, right, runs = torch.Generator().manual_seed(0), 0, 200
    ids = [32 * group for group in range(8)]
    for _ in range(runs):
        scores = torch.randint(3, (8,), generator=generator).tolist()
        right += set(butterfly(scores, ids, takes_other)) == {chosen(scores, ids)}
    return Found(runs - right, f"{right} of {runs} random rows with ties end so, on all eight lanes")


def ties_of_groups() -> Found:
    """Run the reduction that finds the worst group, with equal scores."""
    return _ties(
        lambda own, other: own[0] > other[0] or (own[0] == other[0] and other[1] > own[1]),
        lambda scores, ids: max(i for i, score in zip(ids, scores) if score == min(scores)),
    )


def ties_of_experts() -> Found:
    """Run the reduction that finds the best expert, with equal values."""
    return _ties(
        lambda own, other: other[0] > own[0] or (other[0] == own[0] and other[1] < own[1]),
        lambda scores, ids: min(i for i, score in zip(ids, scores) if score == max(scores)),
    )


# The listing's two loops, for 8 groups of 4 experts, with or without the barrier between them.

GROUPS, GROUP_EXPERTS, KEPT, TOPK = 8, 4, 4, 4
EXPERTS = GROUPS * GROUP_EXPERTS


@cache
def make_gate_loops(with_barrier):
    """Make a kernel for CTAs of 64 threads, 8 per row: it excludes the worst groups, then picks the best experts."""

    @cuda.jit
    def gate_loops(choices, ids):
        row, group = int32(cuda.grid(1) // GROUPS), int32(cuda.threadIdx.x % GROUPS)
        first = int32(group * GROUP_EXPERTS)
        choice = cuda.local.array(GROUP_EXPERTS, float32)
        for i in range(GROUP_EXPERTS):
            choice[i] = choices[row * EXPERTS + first + i]
        for _ in range(GROUPS - KEPT):
            best, second = float32(-LARGEST), float32(-LARGEST)
            for i in range(GROUP_EXPERTS):
                if choice[i] > best:
                    second, best = best, choice[i]
                elif choice[i] > second:
                    second = choice[i]
            score, expert = float32(best + second), first
            for mask in (4, 2, 1):
                other = cuda.shfl_xor_sync(FULL_MASK, score, mask)
                other_expert = cuda.shfl_xor_sync(FULL_MASK, expert, mask)
                if score > other or (score == other and other_expert > expert):
                    score, expert = other, other_expert
            if group == expert // GROUP_EXPERTS:
                for i in range(GROUP_EXPERTS):
                    choice[i] = float32(LARGEST)
        if with_barrier:
            cuda.syncthreads()
        for k in range(TOPK):
            best, expert = choice[0], first
            if best == float32(LARGEST):
                best = float32(-LARGEST)
            else:
                for i in range(1, GROUP_EXPERTS):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            for mask in (4, 2, 1):
                other = cuda.shfl_xor_sync(FULL_MASK, best, mask)
                other_expert = cuda.shfl_xor_sync(FULL_MASK, expert, mask)
                if other > best or (other == best and other_expert < expert):
                    best, expert = other, other_expert
            if group == expert // GROUP_EXPERTS:
                choice[expert % GROUP_EXPERTS] = float32(-LARGEST)
                ids[row * TOPK + k] = expert

    return gate_loops


def wrong_runs(with_barrier: bool, seeds: int) -> int:
    """Run the loops in the simulator and count the seeds under which a row differs from torch's choice."""
    torch.manual_seed(0)
    rows, wrong = 16, 0
    choices = torch.rand(rows, EXPERTS)
    grouped = choices.view(rows, GROUPS, GROUP_EXPERTS)
    kept = grouped.topk(2, dim=2)[0].sum(dim=2).topk(KEPT, dim=1)[1]
    masked = torch.full_like(grouped, -1).scatter(
        1,
        kept[:, :, None].expand(-1, -1, GROUP_EXPERTS),
        grouped.gather(1, kept[:, :, None].expand(-1, -1, GROUP_EXPERTS)),
    )
    wanted = masked.view(rows, EXPERTS).topk(TOPK, dim=1)[1].int()
    for seed in range(seeds):
        ids = torch.full((rows * TOPK,), -7, dtype=torch.int32)
        with simulator.seed(seed), simulator.races():
            launch(make_gate_loops(with_barrier), rows * GROUPS // 64, 64, choices.view(-1), ids)
        wrong += not torch.equal(ids.view(rows, TOPK), wanted)
    return wrong


@cache
def runs_that_need_the_barrier(seeds: int = 10) -> Found:
    """Count the runs that go wrong without the barrier after the groups are excluded."""
    wrong = in_simulator(wrong_runs, False, seeds)
    return Found(
        wrong, f"{wrong} of {seeds} runs in the simulator go wrong without it: each thread excludes its own values"
    )
