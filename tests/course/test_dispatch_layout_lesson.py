"""The lesson "Dispatch layout": steps are right, its check finds wrong kernels, exercises judge answers and cheats."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from lesson_pages import definitions, fault_of, run_with_sizes

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32, uint8, uint32

from moe_numba.course.lessons.dispatch_layout import answers, draw, exercises, runs
from moe_numba.course.lessons.dispatch_layout import sizes as own_sizes
from moe_numba.course.lessons.dispatch_layout.answers import or_in_group
from moe_numba.course.lessons.dispatch_layout.sizes import (
    CLUSTER,
    COUNTERS,
    EACH,
    EXPERTS,
    FULL,
    LANE_BITS,
    LANES,
    PER_WARP,
    RANKS,
    SHARE,
    SHARES,
    TOPK,
)
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.score import COMPILER
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.cluster import (
    barrier_cluster_arrive,
    barrier_cluster_wait,
    cluster_ctarank,
    ld_cluster_s32,
    st_cluster_s32,
)
from moe_numba.ptx.memory import atom_add_s32

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
ROOT = Path(__file__).parents[2]
ALL_COUNTERS = CLUSTER * COUNTERS


# Answers: the ranks of a token


def misses_nothing(experts, topk, ranks):
    return min(topk, ranks)


def with_replacement(experts, topk, ranks):
    return ranks * (1 - (1 - 1 / ranks) ** topk)


# The tokens of a rank in a warp


@cuda.jit(device=True)
def stub(ranks):
    return ...


@cuda.jit(device=True)
def own_ranks(ranks):
    return int32(cuda.popc(ranks))


@cuda.jit(device=True)
def any_rank(ranks):
    return int32(cuda.popc(uint32(cuda.ballot_sync(FULL, ranks))))


@cuda.jit(device=True)
def by_shuffles(ranks):
    lane, own = uint32(cuda.threadIdx.x & 31), uint32(0)
    for other in range(32):
        of_other = uint32(cuda.shfl_sync(FULL, int32(ranks), other))
        own = uint32(own + (of_other >> lane & uint32(1)))
    return int32(own)


@cuda.jit(device=True)
def in_shared_memory(ranks):
    counts, lane = cuda.shared.array(32, int32), cuda.threadIdx.x & 31
    counts[lane] = 0
    cuda.syncwarp()
    for rank in range(RANKS):
        if ranks >> uint32(rank) & uint32(1):
            cuda.atomic.add(counts, rank, 1)
    cuda.syncwarp()
    return counts[lane]


@cuda.jit(device=True)
def ballot_of_some_lanes(ranks):
    own = int32(0)
    for rank in range(RANKS):
        if ranks >> uint32(rank) & uint32(1):
            tokens = uint32(cuda.ballot_sync(FULL, True))
            if rank == cuda.threadIdx.x & 31:
                own = int32(cuda.popc(tokens))
    return own


# The sum of a cluster


@cuda.jit(device=True)
def by_loads(own, counts):
    cta = int32(cluster_ctarank())
    barrier_cluster_wait()
    barrier_cluster_arrive()
    barrier_cluster_wait()  # all CTAs have counted
    i = cuda.threadIdx.x
    while i < SHARE and cta * SHARE + i < COUNTERS:
        total = int32(0)
        for other in range(CLUSTER):
            total = int32(total + ld_cluster_s32(own, cta * SHARE + i, other))
        counts[cta * SHARE + i] = total
        i += cuda.blockDim.x
    barrier_cluster_arrive()
    barrier_cluster_wait()  # none ends before the others have read


@cuda.jit(device=True)
def nobody_has_started(own, counts):
    shares, cta = cuda.shared.array(SHARES, int32), int32(cluster_ctarank())
    i = cuda.threadIdx.x
    while i < COUNTERS:
        st_cluster_s32(shares, cta * SHARE + i % SHARE, i // SHARE, own[i])
        i += cuda.blockDim.x
    barrier_cluster_wait()
    barrier_cluster_arrive()
    barrier_cluster_wait()


@cuda.jit(device=True)
def sums_too_early(own, counts):
    shares, cta = cuda.shared.array(SHARES, int32), int32(cluster_ctarank())
    barrier_cluster_wait()
    i = cuda.threadIdx.x
    while i < COUNTERS:
        st_cluster_s32(shares, cta * SHARE + i % SHARE, i // SHARE, own[i])
        i += cuda.blockDim.x
    cuda.syncthreads()
    i = cuda.threadIdx.x
    while i < SHARE and cta * SHARE + i < COUNTERS:
        total = int32(0)
        for other in range(CLUSTER):
            total = int32(total + shares[other * SHARE + i])
        counts[cta * SHARE + i] = total
        i += cuda.blockDim.x
    barrier_cluster_arrive()
    barrier_cluster_wait()


@cuda.jit(device=True)
def one_after_the_other(own, counts):  # in global memory, beside a shared array for show
    cta, dummy = int32(cluster_ctarank()), cuda.shared.array(SHARES, int32)
    dummy[cuda.threadIdx.x] = 0
    for turn in range(CLUSTER):
        barrier_cluster_wait()
        i = cuda.threadIdx.x
        while i < COUNTERS:
            if cta == turn:
                counts[i] = own[i] + (counts[i] if turn else 0)
            i += cuda.blockDim.x
        barrier_cluster_arrive()
    barrier_cluster_wait()


@cuda.jit(device=True)
def global_atomics(own, counts):
    barrier_cluster_wait()
    i = cuda.threadIdx.x
    while i < COUNTERS:
        if cluster_ctarank() == 0:
            counts[i] = own[i]
        i += cuda.blockDim.x
    barrier_cluster_arrive()
    barrier_cluster_wait()
    i = cuda.threadIdx.x
    while i < COUNTERS:
        if cluster_ctarank() != 0:
            atom_add_s32(counts, i, own[i])
        i += cuda.blockDim.x


@cuda.jit(device=True)
def first_cta_sums(own, counts):
    parts, cta = cuda.shared.array(ALL_COUNTERS, int32), int32(cluster_ctarank())
    barrier_cluster_wait()
    i = cuda.threadIdx.x
    while i < COUNTERS:
        st_cluster_s32(parts, cta * COUNTERS + i, 0, own[i])
        i += cuda.blockDim.x
    cuda.syncwarp()
    barrier_cluster_arrive()
    barrier_cluster_wait()
    i = cuda.threadIdx.x
    while i < COUNTERS:
        if cta == 0:
            total = int32(0)
            for other in range(CLUSTER):
                total = int32(total + parts[other * COUNTERS + i])
            counts[i] = total
        i += cuda.blockDim.x


@cuda.jit(device=True)
def one_thread_sums(own, counts):
    cta = int32(cluster_ctarank())
    barrier_cluster_wait()
    barrier_cluster_arrive()
    barrier_cluster_wait()
    if cuda.threadIdx.x == 0:
        for i in range(cta * SHARE, min(COUNTERS, cta * SHARE + SHARE)):
            total = int32(0)
            for other in range(CLUSTER):
                total = int32(total + ld_cluster_s32(own, i, other))
            counts[i] = total
    cuda.syncwarp()
    barrier_cluster_arrive()
    barrier_cluster_wait()


# The or of a group


@cuda.jit(device=True)
def or_of_the_warp(bits):
    for s in range(5):
        bits = uint32(bits | uint32(cuda.shfl_xor_sync(FULL, int32(bits), 1 << s)))
    return bits


@cuda.jit(device=True)
def only_the_first_lane(bits):
    for s in range(LANE_BITS):
        bits = uint32(bits | uint32(cuda.shfl_down_sync(FULL, int32(bits), 1 << s)))
    return bits


@cuda.jit(device=True)
def a_ballot_for_each_bit(bits):
    found, shift = uint32(0), uint32((cuda.threadIdx.x & 31) // LANES * LANES)
    for b in range(32):
        lanes = uint32(cuda.ballot_sync(FULL, bits >> uint32(b) & uint32(1)))
        if lanes >> shift & uint32((1 << LANES) - 1):
            found = uint32(found | uint32(1) << uint32(b))
    return found


@cuda.jit(device=True)
def through_shared_memory(bits):
    values, thread, found = cuda.shared.array(64, uint32), cuda.threadIdx.x, uint32(0)
    values[thread] = bits
    cuda.syncwarp()
    for member in range(LANES):
        found = uint32(found | values[thread // LANES * LANES + member])
    return found


# The walk of groups


@cuda.jit(device=True)
def a_lane_for_each_token(topk_idx, is_in_rank, counts, tokens):
    token = cuda.grid(1)
    while token < tokens:
        bits = uint32(0)
        for k in range(TOPK):
            expert = topk_idx[token * TOPK + k]
            if 0 <= expert and expert < EXPERTS:
                cuda.atomic.add(counts, expert, 1)
                bits = uint32(bits | uint32(1) << uint32(uint32(expert) // uint32(EACH)))
        for rank in range(RANKS):
            flag = bits >> uint32(rank) & uint32(1)
            is_in_rank[token * RANKS + rank] = uint8(flag)
            if flag:
                cuda.atomic.add(counts, EXPERTS + rank, 1)
        token += cuda.gridsize(1)


@cuda.jit(device=True)
def one_serial_thread(topk_idx, is_in_rank, counts, tokens):
    if cuda.grid(1) == 0:
        for token in range(tokens):
            bits = uint32(0)
            for k in range(TOPK):
                expert = topk_idx[token * TOPK + k]
                if 0 <= expert and expert < EXPERTS:
                    counts[expert] += 1
                    bits = uint32(bits | uint32(1) << uint32(uint32(expert) // uint32(EACH)))
            for rank in range(RANKS):
                flag = bits >> uint32(rank) & uint32(1)
                is_in_rank[token * RANKS + rank] = uint8(flag)
                counts[EXPERTS + rank] += int32(flag)


@cuda.jit(device=True)
def counts_experts_for_ranks(topk_idx, is_in_rank, counts, tokens):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.grid(1) >> 5, cuda.gridsize(1) >> 5
    member, first = lane % LANES, warp * PER_WARP
    while first < tokens:
        token, bits = first + lane // LANES, uint32(0)
        if token < tokens and member < TOPK:
            expert = topk_idx[token * TOPK + member]
            if 0 <= expert and expert < EXPERTS:
                cuda.atomic.add(counts, expert, 1)
                cuda.atomic.add(counts, EXPERTS + expert // EACH, 1)
                bits = uint32(uint32(1) << uint32(uint32(expert) // uint32(EACH)))
        flag = or_in_group(bits) >> uint32(member) & uint32(1)
        if token < tokens and member < RANKS:
            is_in_rank[token * RANKS + member] = uint8(flag)
        first += warps * PER_WARP


@cuda.jit(device=True)
def lanes_leave_the_loop(topk_idx, is_in_rank, counts, tokens):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.grid(1) >> 5, cuda.gridsize(1) >> 5
    member, of_mine = lane % LANES, int32(0)
    token = warp * PER_WARP + lane // LANES
    while token < tokens:
        bits = uint32(0)
        expert = topk_idx[token * TOPK + member] if member < TOPK else -1
        if 0 <= expert and expert < EXPERTS:
            cuda.atomic.add(counts, expert, 1)
            bits = uint32(uint32(1) << uint32(uint32(expert) // uint32(EACH)))
        flag = or_in_group(bits) >> uint32(member) & uint32(1)
        of_mine = int32(of_mine + int32(flag))
        if member < RANKS:
            is_in_rank[token * RANKS + member] = uint8(flag)
        token += warps * PER_WARP
    if member < RANKS:
        cuda.atomic.add(counts, EXPERTS + member, of_mine)


@cuda.jit(device=True)
def every_id_is_an_expert(topk_idx, is_in_rank, counts, tokens):
    lane, warp = cuda.threadIdx.x & 31, cuda.grid(1) >> 5
    token = warp * PER_WARP + lane // LANES
    if token < tokens and lane % LANES < TOPK:
        cuda.atomic.add(counts, topk_idx[token * TOPK + lane % LANES], 1)


@cuda.jit(device=True)
def adds_each_flag(topk_idx, is_in_rank, counts, tokens):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.grid(1) >> 5, cuda.gridsize(1) >> 5
    member, first = lane % LANES, warp * PER_WARP
    while first < tokens:
        token, bits = first + lane // LANES, uint32(0)
        if token < tokens and member < TOPK:
            expert = topk_idx[token * TOPK + member]
            if 0 <= expert and expert < EXPERTS:
                cuda.atomic.add(counts, expert, 1)
                bits = uint32(uint32(1) << uint32(uint32(expert) // uint32(EACH)))
        flag = or_in_group(bits) >> uint32(member) & uint32(1)
        if token < tokens and member < RANKS:
            is_in_rank[token * RANKS + member] = uint8(flag)
            if flag:
                cuda.atomic.add(counts, EXPERTS + member, 1)
        first += warps * PER_WARP


@cuda.jit(device=True)
def only_the_first_warp(topk_idx, is_in_rank, counts, tokens):
    lane, member, tokens_of_mine = cuda.threadIdx.x & 31, cuda.threadIdx.x & 31 & LANES - 1, int32(0)
    first = 0 if cuda.grid(1) < 32 else tokens
    while first < tokens:
        token, bits = first + lane // LANES, uint32(0)
        if token < tokens and member < TOPK:
            expert = topk_idx[token * TOPK + member]
            if 0 <= expert and expert < EXPERTS:
                cuda.atomic.add(counts, expert, 1)
                bits = uint32(uint32(1) << uint32(uint32(expert) // uint32(EACH)))
        flag = or_in_group(bits) >> uint32(member) & uint32(1)
        tokens_of_mine = int32(tokens_of_mine + int32(flag))
        if token < tokens and member < RANKS:
            is_in_rank[token * RANKS + member] = uint8(flag)
        first += PER_WARP
    if member < RANKS:
        cuda.atomic.add(counts, EXPERTS + member, tokens_of_mine)


FORMULA, TOKENS, SUM = exercises.ranks_of_a_token, exercises.tokens_of_rank, exercises.sum_in_cluster
OR, WALK = exercises.or_in_group, exercises.count_in_groups


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (FORMULA, ..., OPEN, "not answered yet"),
        (FORMULA, answers.ranks_of_a_token, RIGHT, "five sizes"),
        (FORMULA, misses_nothing, WRONG, "256 experts, topk = 8, 8 ranks: the result is 8"),
        (FORMULA, with_replacement, WRONG, "256 experts"),
        (TOKENS, ..., OPEN, "not answered yet"),
        (TOKENS, stub, OPEN, "not answered yet"),
        (TOKENS, answers.tokens_of_rank, RIGHT, "8 votes"),
        (TOKENS, own_ranks, WRONG, "warp 0: the result by lane"),
        (TOKENS, any_rank, WRONG, "warp 0: the result by lane"),
        (TOKENS, ballot_of_some_lanes, WRONG, "lane"),
        (TOKENS, by_shuffles, OVER_PAR, "Which instruction shows one bit"),
        (TOKENS, in_shared_memory, REFUSED, "shared memory"),
        (SUM, stub, OPEN, "not answered yet"),
        (SUM, answers.sum_in_cluster, RIGHT, "bytes to or from other CTAs"),
        (SUM, by_loads, RIGHT, "bytes to or from other CTAs"),
        (SUM, nobody_has_started, WRONG, "the CTAs of a cluster are not synchronised"),
        (SUM, sums_too_early, WRONG, "race|nothing has written|counts"),
        (SUM, one_after_the_other, REFUSED, "reads from global memory"),
        (SUM, global_atomics, REFUSED, "adds in global memory"),
        (SUM, first_cta_sums, REFUSED, "one CTA stores what all of them could share"),
        (SUM, one_thread_sums, REFUSED, "alone|could share"),
        (OR, stub, OPEN, "not answered yet"),
        (OR, answers.or_in_group, RIGHT, "3 votes, shuffles"),
        (OR, or_of_the_warp, WRONG, "the result by lane"),
        (OR, only_the_first_lane, WRONG, "the result by lane"),
        (OR, a_ballot_for_each_bit, OVER_PAR, "After a shuffle"),
        (OR, through_shared_memory, REFUSED, "shared memory"),
        (WALK, stub, OPEN, "not answered yet"),
        (WALK, answers.count_in_groups, RIGHT, "sectors loaded"),
        (WALK, a_lane_for_each_token, REFUSED, "loads more often than once"),
        (WALK, only_the_first_warp, REFUSED, "has more than its share"),
        (WALK, adds_each_flag, REFUSED, "adds to the counters of ranks more often than once"),
        (WALK, one_serial_thread, REFUSED, "more often than once|alone"),
        (WALK, counts_experts_for_ranks, WRONG, r"rank \d"),
        (WALK, lanes_leave_the_loop, WRONG, "lane"),
        (WALK, every_id_is_an_expert, WRONG, "out of bounds"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_answers(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


def test_sectors_are_explained_after_a_guess():
    check = exercises.sectors.check
    assert check(two_experts_for_each_token=..., neighbouring_lanes=...).state == OPEN
    assert check(two_experts_for_each_token=32, neighbouring_lanes=8).state == WRONG
    assert check(two_experts_for_each_token=16, neighbouring_lanes=8).state == RIGHT


# The page's kernels, and changes that the check must find


NOTEBOOK = ROOT / "notebooks/10_dispatch_layout.py"
ANSWERS = "tokens_of_rank", "sum_in_cluster", "or_in_group", "count_in_groups"


def page(right="", wrong=""):
    """Return what the page's cells define, with a passage replaced, and its steps: name -> version as Python."""
    own = {name: getattr(answers, name) for name in ANSWERS}
    return definitions(NOTEBOOK, own, r"page\.|exercises\.\w+\.use", right, wrong)


@pytest.fixture(scope="module")
def right_page():
    return page()


fault = partial(fault_of, runs)
STEPS = (
    "global atomics",
    "a ballot for each rank",
    "shared atomics",
    "private counters",
    "one cluster",
    "a group of lanes",
    "four tokens at once",
    "start early",
)


def test_the_page_has_these_steps(right_page):
    assert tuple(right_page[1]) == STEPS


@pytest.mark.parametrize("name", STEPS)
def test_all_steps_are_right(name, right_page):
    names, steps = right_page
    with simulator.seed(2):
        assert runs.check(eval(steps[name], names)) is None


@pytest.mark.parametrize("name", ["shared atomics", "private counters", "start early"])
def test_steps_have_no_races(name, right_page):
    names, steps = right_page
    with simulator.seed(5), simulator.races():
        assert runs.check(eval(steps[name], names)) is None


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("global atomics", "add(counts, EXPERTS + rank, 1)", "add(counts, EXPERTS, 1)"),
        ("global atomics", "counts[i] = 0\n", "counts[i] = 1\n"),
        ("a ballot for each rank", "if lane < RANKS and number:", "if lane == 0 and number:"),
        ("shared atomics", "own[i] = 0", "own[i] = 1"),
        ("shared atomics", "if own[i]:", "if i < EXPERTS:"),
        ("private counters", "if begin <= expert and expert < end:", "if expert < end:"),
        ("private counters", "int32(1) if is_in[j] > 0 else int32(0)", "int32(is_in[j])"),
        ("private counters", "rows[thread, expert - begin] += 1", "rows[0, expert - begin] += 1"),
        ("one cluster", "    barrier_cluster_arrive()  # this", "    pass  # this"),
        ("four tokens at once", "uint32(8 * i) + chosen[i]", "uint32(4 * i) + chosen[i]"),
        ("four tokens at once", "first += 4 * apart", "first += apart"),
        ("start early", "            griddepcontrol_wait()", "            pass"),
    ],
)
def test_the_check_finds_wrong_kernels(name, right, wrong):
    names, steps = page(right, wrong)
    with simulator.races(name in ("private counters", "start early")):
        assert fault(eval(steps[name], names)) is not None


def test_the_check_rejects_wrong_layouts():
    ids = runs.inputs(40)["random experts"]
    counts, flags = runs.right(ids)
    assert runs.wrong((counts, flags), ids) is None
    assert "expert 3" in runs.wrong((counts + (3 == counts.new_tensor(range(COUNTERS))), flags), ids)
    assert "rank 0" in runs.wrong((counts + (counts.new_tensor(range(COUNTERS)) == EXPERTS), flags), ids)
    assert "is_in_rank[0, 0]" in runs.wrong((counts, 2 * flags + 1), ids)
    assert runs.wrong(runs.poisoned(40), ids) and "shape" in runs.wrong((counts[1:], flags), ids)


def test_all_variants_of_the_slow_cta_count_alike(right_page):
    names, _ = right_page
    for bits, constant, columns, ahead in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1)):
        count_ranks = names["make_count_ranks"](bool(bits), bool(constant), bool(columns), bool(ahead))
        assert runs.check(names["port"](names["count_experts"], count_ranks)) is None
    only_ranks = names["suspects"]["all four"]
    ids = runs.inputs(70)["random experts"]
    assert (runs.run(only_ranks, ids)[1] == runs.right(ids)[1]).all()


def test_variants_are_checked_before_they_are_timed():
    names, _ = page("mask = uint32(mask | uint32(1) << uint32(rank))", "mask = uint32(uint32(1) << uint32(rank))")
    wrong = {"A: a mask": names["suspects"]["A: a mask instead of an array"]}
    with pytest.raises(WrongResult, match=r"A: a mask: counts\[\d+\] \(rank \d\)"):
        runs.show_variants(runs.SLOW_CTA, wrong)
    nothing = {"nothing": names["port"](names["no_experts"], names["no_ranks"])}
    with pytest.raises(WrongResult, match="writes nothing"):
        runs.show_variants(runs.SLOW_CTA, nothing)


def test_timed_versions_add_to_the_same_counters(right_page):
    names, steps = right_page
    of = lambda name, tokens: runs.timed(eval(steps[name], names), tokens)[0].args[2]
    few, many, other = of("global atomics", 40), of("start early", 80), of("start early", 40)
    assert few[0].data_ptr() == many[0].data_ptr() == other[0].data_ptr()
    assert few[1].data_ptr() == other[1].data_ptr() and many[1].shape == (80, RANKS)


# Counts, tables, figures


def test_the_page_says_who_votes(right_page):
    names, steps = right_page
    score = runs.lesson.count(eval(steps["global atomics"], names), "")
    runs.lesson.steps["votes"] = SimpleNamespace(score=score)
    try:
        assert "has 8 votes" in runs.who_votes("votes") and "gets 128 additions" in runs.who_votes("votes")
        score.rows[COMPILER, runs.VOTES] = 0
        assert "has no votes" in runs.who_votes("votes")
    finally:
        del runs.lesson.steps["votes"]


def test_sectors_of_a_load_fall_to_a_quarter(right_page):
    names, steps = right_page
    counted = runs.lesson.counted({name: eval(steps[name], names) for name in STEPS[3:6]})
    of = lambda name: counted[name][1]
    assert of("private counters") == 32 and of("one cluster") == 32 and of("a group of lanes") == 8


def test_the_slow_cta_is_judged_by_times(right_page, monkeypatch):
    suspects = right_page[0]["suspects"]
    check = exercises.slow_cta.check
    assert check(suspects).state == OPEN and "division" in check(suspects).text
    monkeypatch.setattr(runs.lesson, "times", lambda name, calls: {})
    assert check(suspects, "Z").state == WRONG and "only a GPU" in check(suspects, "A").text
    times = dict(zip(suspects, (50.0, 45.0, 44.0, 30.0, 49.0, 12.0), strict=True))
    monkeypatch.setattr(runs.lesson, "times", lambda name, calls: times)
    assert check(suspects, "A").state == WRONG and check(suspects, "c").state == RIGHT
    assert "C 20.0 us" in check(suspects, "C").text
    assert "30.0" in str(runs.show_variants(runs.SLOW_CTA, suspects))
    assert "'C: ids in columns' alone saves most, 40 %" in runs.what_is_left(suspects)
    runs._us_of.clear()
    assert "Not timed" in runs.what_is_left(suspects)


def test_sentences_follow_the_times():
    parts = {name: dict(us=us, one_us=1.0, lines=9, one_lines=1, per_load=32) for name, us in zip("aer", (50, 20, 49))}
    assert "waits for the CTA that counts ranks" in runs.who_is_last(parts)
    assert "us" in str(draw.ctas(parts)._repr_svg_())
    parts["e"]["us"] = 50
    assert "waits for the CTAs that count experts." in runs.who_is_last(parts)
    parts["r"] |= dict(us=None, lines=30)
    assert "Not timed" in runs.who_is_last(parts) and "ranks 30" in runs.who_is_last(parts)
    sweep = {(4, False): {"the package": 2.0, "one": 2.05}, (9, True): {"the package": 9.0, "one": 5.0}}
    assert "with 9 tokens, the same experts one takes 5.0 us" in runs.who_wins(sweep)
    assert "the package, one" in str(runs.show_sweep(sweep)) and "not been timed" in runs.who_wins({})
    del sweep[9, True]
    assert "about as fast" in runs.who_wins(sweep)


def _fake_step(us=None, times=None, atomics=0):
    return SimpleNamespace(us=us, times=times, score=SimpleNamespace(rows={(runs.TOTAL, "global atomics"): atomics}))


def test_additions_are_explained_by_times(monkeypatch):
    both = {"a": _fake_step(atomics=2048), "b": _fake_step(atomics=1152)}
    monkeypatch.setattr(runs.lesson, "steps", both)
    assert "Not timed" in runs.what_an_addition_costs("a") and "1,024 times" in runs.what_an_addition_costs("a")
    both["a"].us = runs.global_us() + 2.048
    assert "each of them takes 3.0 ns" in runs.what_an_addition_costs("a")
    assert "1,152 instructions instead of 2,048. Not timed" in runs.same_additions("a", "b")
    for times, words in (
        (([10.0, 6.0], [10.4, 6.0]), "6.0 to 10.4 us. At the same place both take about as long"),
        (([10.0, 6.0], [6.0, 4.0]), "costs less than 8 instructions"),
        (([10.0, 6.0], [6.0, 10.0]), "Neither kernel is the faster one"),
    ):
        monkeypatch.setitem(runs._us_of, runs.PLACES_TITLE, dict(zip("ab", times, strict=True)))
        assert words in runs.same_additions("a", "b")


def test_counters_are_timed_at_several_places(right_page, monkeypatch):
    names, steps = right_page
    versions = {name: eval(steps[name], names) for name in ("global atomics", "a ballot for each rank")}
    monkeypatch.setattr(runs.lesson, "times", lambda *_: {})
    assert "not timed" in str(runs.show_places(versions)) and not runs._us_of[runs.PLACES_TITLE]
    at = [runs.timed(versions["global atomics"], 40, place=place)[0].args[2][0].data_ptr() for place in range(4)]
    assert len(set(at)) == 4
    monkeypatch.setattr(runs.lesson, "times", lambda _, calls: {name: float(i + 1) for i, name in enumerate(calls)})
    assert runs.show_places(versions).lines[1] == ["a ballot for each rank", "5.00", "6.00", "7.00", "8.00"]
    runs._us_of.clear()


def test_the_page_says_which_ctas_of_a_cluster_have_tokens(monkeypatch):
    monkeypatch.setattr(runs.lesson, "steps", {"shared": _fake_step(), "one": _fake_step()})
    text = runs.why_one_cluster("shared", "one")
    assert "4 of the cluster's 8 CTAs have tokens, up to 1,024 each" in text and "16 CTAs of up to 256" in text
    assert "4 times as many sectors. Not timed" in text
    runs.lesson.steps["one"].times = 3.98, 5.38
    assert "shared takes 3.98 us, and one 5.38 us" in runs.why_one_cluster("shared", "one")


@pytest.mark.parametrize(
    "us, words", [((7, 30, 14, 5), "what step 3 gains here is the other SMs"), ((7, 10, 14, 5), "not the reason")]
)
def test_many_tokens_are_explained_by_times(us, words, monkeypatch):
    monkeypatch.setitem(runs._us_of, runs._MANY_TITLE, dict(zip("abcd", us, strict=True)))
    assert words in runs.why_many()


def test_the_tables_have_lines():
    assert "65 CTAs" in str(runs.show_what_did_not_pay()) and "0xffffffff" in str(runs.constants())
    assert (
        "empty kernel" in runs.chain()
        and "bytes take" in runs.lower_bound()
        and "1.10 us" in runs.lower_bound_of_many()
    )
    assert "4096 tokens" in runs.result() and "counted: " in runs.show_ranks_per_token()
    assert "shared atomics" in runs.who_wins(runs._earlier_sweep())


def test_figures_say_what_they_show():
    parts = {name: dict(us=None, one_us=None, lines=9, one_lines=2, per_load=32) for name in "aer"}
    figures = draw.problem(), draw.private_counters(), draw.ctas(parts), draw.loads(1), draw.cluster_sum(), draw.lanes()
    for figure in figures:
        svg = figure._repr_svg_()
        assert svg.startswith("<svg") and "prefers-color-scheme: dark" in svg


def with_sizes(**lines):
    """Return all constants of `sizes` after some of its lines are replaced: name -> value."""
    source = Path(own_sizes.__file__).read_text()
    for names, values in lines.items():
        source, count = re.subn(
            rf"^{names.replace('_and_', ', ')} = [^#\n]*",
            f"{names.replace('_and_', ', ')} = {values} ",
            source,
            flags=re.M,
        )
        assert count == 1, names
    found = {}
    exec(source, found)
    return {name: value for name, value in found.items() if name.isupper()}


@pytest.mark.parametrize("ranks, experts, topk", [(2, 64, 6), (4, 64, 4), (8, 40, 3)])
def test_the_page_runs_with_other_sizes(ranks, experts, topk):
    sizes = with_sizes(
        EXPERTS_and_TOPK_and_RANKS=f"{experts}, {topk}, {ranks}",
        TOKENS=200,
        SWEEP="(1, 70)",
        CHECKED=70,
        CLUSTER_and_CLUSTER_THREADS="8, 64",
        PORT_THREADS_and_EXPERTS_PER_CTA_and_RANKS_PER_CTA="64, 32, 8",
    )
    printed = run_with_sizes(NOTEBOOK, "dispatch_layout", **sizes)
    assert f"200 tokens, {topk} of {experts} experts, {ranks} ranks" in printed and "start early" in printed


def test_sizes_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="2 to 8 ranks"):
        with_sizes(EXPERTS_and_TOPK_and_RANKS="64, 4, 16")
    with pytest.raises(ValueError, match="a warp has 32 lanes"):
        with_sizes(EXPERTS_and_TOPK_and_RANKS="64, 33, 4")
