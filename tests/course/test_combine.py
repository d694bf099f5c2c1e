"""The lesson "Combine": steps are right, its check finds wrong kernels, exercises judge answers and cheats."""

from pathlib import Path

import pytest
import torch
from lesson_pages import definitions, fault_of, run_with_sizes

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig, min_buffer_bytes
from moe_numba.course.deepep_port.simulate import dispatch_all, virtual_ranks
from moe_numba.course.lessons.combine import answers, deadlocks, draw, exercises, inputs, runs
from moe_numba.course.lessons.combine.deadlocks import HEAD, RING, SLOTS, TAIL, THREE
from moe_numba.course.lessons.combine.runs import RANKS, VECTORS, Switches, Version
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_release_cta_shared_s32, st_release_sys_s32
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import ld_global_s32x4, pointer_from_address
from moe_numba.ptx.warp import FULL_MASK

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks/13_combine.py"


# Answers: one rounding


@cuda.jit(device=True)
def rounds_each_time(words, first, ranks, mask):
    sums = cuda.local.array(4, int32)
    for k in range(4):
        sums[k] = int32(0)
    for r in range(ranks):
        if mask >> uint32(r) & uint32(1):
            for k in range(4):
                old, new = uint32(sums[k]), uint32(words[first + 4 * r + k])
                low = uint_as_float(uint32(old << uint32(16))) + uint_as_float(uint32(new << uint32(16)))
                high = uint_as_float(uint32(old & uint32(0xFFFF0000))) + uint_as_float(uint32(new & uint32(0xFFFF0000)))
                sums[k] = int32(cvt_rn_bf16x2_f32(high, low))
    return sums[0], sums[1], sums[2], sums[3]


@cuda.jit(device=True)
def last_rank_first(words, first, ranks, mask):
    sums = cuda.local.array(8, float32)
    for k in range(8):
        sums[k] = float32(0)
    for i in range(ranks):
        r = ranks - 1 - i
        if mask >> uint32(r) & uint32(1):
            for k in range(4):
                word = uint32(words[first + 4 * r + k])
                sums[2 * k] += uint_as_float(uint32(word << uint32(16)))
                sums[2 * k + 1] += uint_as_float(uint32(word & uint32(0xFFFF0000)))
    a, b = cvt_rn_bf16x2_f32(sums[1], sums[0]), cvt_rn_bf16x2_f32(sums[3], sums[2])
    c, d = cvt_rn_bf16x2_f32(sums[5], sums[4]), cvt_rn_bf16x2_f32(sums[7], sums[6])
    return int32(a), int32(b), int32(c), int32(d)


@cuda.jit(device=True)
def begins_with_the_first_row(words, first, ranks, mask):
    """Return -0 for rows of -0."""
    sums, begun = cuda.local.array(8, float32), int32(0)
    for k in range(8):
        sums[k] = float32(0)
    for r in range(ranks):
        if mask >> uint32(r) & uint32(1):
            for k in range(4):
                word = uint32(words[first + 4 * r + k])
                low, high = uint_as_float(uint32(word << uint32(16))), uint_as_float(uint32(word & uint32(0xFFFF0000)))
                sums[2 * k] = low if begun == 0 else sums[2 * k] + low
                sums[2 * k + 1] = high if begun == 0 else sums[2 * k + 1] + high
            begun = int32(1)
    a, b = cvt_rn_bf16x2_f32(sums[1], sums[0]), cvt_rn_bf16x2_f32(sums[3], sums[2])
    c, d = cvt_rn_bf16x2_f32(sums[5], sums[4]), cvt_rn_bf16x2_f32(sums[7], sums[6])
    return int32(a), int32(b), int32(c), int32(d)


@cuda.jit(device=True)
def ignores_the_mask(words, first, ranks, mask):
    return answers.sum_vector(words, first, ranks, uint32(0xFF))


@cuda.jit(device=True)
def asks_other_lanes(words, first, ranks, mask):
    a, b, c, d = answers.sum_vector(words, first, ranks, mask)
    return cuda.shfl_xor_sync(FULL_MASK, cuda.shfl_xor_sync(FULL_MASK, a, 1), 1), b, c, d


# Loads in flight


@cuda.jit(device=True)
def loads_one_vector(words, rows, begins, mask, first, row_vectors):
    for r in range(RANKS):
        if mask >> uint32(r) & uint32(1):
            j = 4 * r
            words[j], words[j + 1], words[j + 2], words[j + 3] = ld_global_s32x4(rows.local, begins[r] + 4 * first)


@cuda.jit(device=True)
def reads_beyond_the_row(words, rows, begins, mask, first, row_vectors):
    for u in range(VECTORS):
        for r in range(RANKS):
            if mask >> uint32(r) & uint32(1):
                a, b, c, d = ld_global_s32x4(rows.local, begins[r] + 4 * min(first + 32 * u, row_vectors - 1))
                j = 4 * (RANKS * u + r)
                words[j], words[j + 1], words[j + 2], words[j + 3] = a, b, c, d


@cuda.jit(device=True)
def loads_words(words, rows, begins, mask, first, row_vectors):
    for u in range(VECTORS):
        i = first + 32 * u
        if i < row_vectors:
            for r in range(RANKS):
                if mask >> uint32(r) & uint32(1):
                    for k in range(4):
                        words[4 * (RANKS * u + r) + k] = rows.local[begins[r] + 4 * i + k]


# The receiver's wait


@cuda.jit(device=True)
def without_acquire(local, at, tail, wanted, waits, state):
    waits = waits and int32(tail - wanted) <= 0
    while cuda.any_sync(FULL_MASK, waits):
        if waits:
            tail = uint32(ld_volatile_s32(local, at))
            waits = int32(tail - wanted) <= 0
    cuda.syncwarp()
    return tail


@cuda.jit(device=True)
def without_syncwarp(local, at, tail, wanted, waits, state):
    waits = waits and int32(tail - wanted) <= 0
    while waits:
        tail = uint32(ld_acquire_sys_s32(local, at))
        waits = int32(tail - wanted) <= 0
    return tail


@cuda.jit(device=True)
def compares_without_wrapping(local, at, tail, wanted, waits, state):
    waits = waits and tail <= wanted
    while cuda.any_sync(FULL_MASK, waits):
        if waits:
            tail = uint32(ld_acquire_sys_s32(local, at))
            waits = tail <= wanted
    cuda.syncwarp()
    return tail


@cuda.jit(device=True)
def does_not_wait(local, at, tail, wanted, waits, state):
    cuda.syncwarp()
    return uint32(wanted + uint32(1)) if waits else tail


@cuda.jit(device=True)
def always_asks(local, at, tail, wanted, waits, state):
    if waits:
        tail = uint32(ld_acquire_sys_s32(local, at))
        while int32(tail - wanted) <= 0:
            tail = uint32(ld_acquire_sys_s32(local, at))
    cuda.syncwarp()
    return tail


@cuda.jit(device=True)
def is_content_with_the_row_before(local, at, tail, wanted, waits, state):
    while waits and int32(tail - wanted) < 0:
        tail = uint32(ld_acquire_sys_s32(local, at))
    cuda.syncwarp()
    return tail


@cuda.jit(device=True)
def returns_what_it_waited_for(local, at, tail, wanted, waits, state):
    answers.wait_rows(local, at, tail, wanted, waits, state)
    return uint32(wanted + uint32(1))


@cuda.jit(device=True)
def compares_as_int32(local, at, tail, wanted, waits, state):
    while waits and int32(tail) <= int32(wanted):
        tail = uint32(ld_acquire_sys_s32(local, at))
    cuda.syncwarp()
    return tail


@cuda.jit(device=True)
def waits_for_exactly_the_next(local, at, tail, wanted, waits, state):
    while waits and int32(tail - wanted) != 1:
        tail = uint32(ld_acquire_sys_s32(local, at))
    cuda.syncwarp()
    return tail


# What a waiting warp needs


@cuda.jit(device=True)
def releases_its_next_row(heads, at, needed):
    st_release_cta_shared_s32(heads, at, needed + 1)


@cuda.jit(device=True)
def stores_plainly(heads, at, needed):
    heads[at] = needed


@cuda.jit(device=True)
def says_nothing_new(heads, at, needed):
    st_release_cta_shared_s32(heads, at, int32(heads[at]))


# Three ranks


@cuda.jit
def waits_for_each_ring(local, peers, rank, y, first, position, tokens, out):
    if cuda.threadIdx.x == 0:
        for n in range(64):
            for to in range(THREE):
                if to != rank and n < first[to + 1] - first[to]:
                    while n - ld_acquire_sys_s32(local, HEAD + to) >= SLOTS:
                        pass
                    remote = pointer_from_address(peers[to], local)
                    remote[RING + SLOTS * rank + n % SLOTS] = y[first[to] + n]
                    st_release_sys_s32(remote, TAIL + rank, int32(n + 1))
    elif cuda.threadIdx.x == 32:
        for token in range(tokens):
            total = int32(0)
            for source in range(THREE):
                n = position[THREE * token + source]
                if n >= 0 and source == rank:
                    total += y[first[rank] + n]
                elif n >= 0:
                    while ld_acquire_sys_s32(local, TAIL + source) <= n:
                        pass
                    total += local[RING + SLOTS * source + n % SLOTS]
                    st_release_sys_s32(pointer_from_address(peers[source], local), HEAD + rank, int32(n + 1))
            out[token] = total


@cuda.jit
def waits_but_sums_in_any_order(local, peers, rank, y, first, position, tokens, out):
    """The sender still waits for each ring; the receiver takes rows as they come, so that it need not."""
    if cuda.threadIdx.x == 0:
        for n in range(64):
            for to in range(THREE):
                if to != rank and n < first[to + 1] - first[to]:
                    while n - ld_acquire_sys_s32(local, HEAD + to) >= SLOTS:
                        pass
                    remote = pointer_from_address(peers[to], local)
                    remote[RING + SLOTS * rank + n % SLOTS] = y[first[to] + n]
                    st_release_sys_s32(remote, TAIL + rank, int32(n + 1))
    elif cuda.threadIdx.x == 32:
        taken, at, left = cuda.local.array(THREE, int32), cuda.local.array(THREE, int32), True
        for source in range(THREE):
            taken[source] = at[source] = 0
        for token in range(tokens):
            n = position[THREE * token + rank]
            out[token] = y[first[rank] + n] if n >= 0 else int32(0)
        while left:
            left = False
            for source in range(THREE):
                while source != rank and at[source] < tokens and position[THREE * at[source] + source] < 0:
                    at[source] += 1
                if source != rank and at[source] < tokens:
                    left = True
                    if ld_acquire_sys_s32(local, TAIL + source) > taken[source]:
                        out[at[source]] += local[RING + SLOTS * source + taken[source] % SLOTS]
                        taken[source] += 1
                        at[source] += 1
                        st_release_sys_s32(pointer_from_address(peers[source], local), HEAD + rank, taken[source])


@cuda.jit
def sums_own_rows_only(local, peers, rank, y, first, position, tokens, out):
    if cuda.threadIdx.x == 32:
        for token in range(tokens):
            n = position[THREE * token + rank]
            out[token] = y[first[rank] + n] if n >= 0 else int32(0)


@cuda.jit
def ignores_heads(local, peers, rank, y, first, position, tokens, out):
    if cuda.threadIdx.x == 0:
        for to in range(THREE):
            if to != rank:
                remote = pointer_from_address(peers[to], local)
                for n in range(first[to + 1] - first[to]):
                    remote[RING + SLOTS * rank + n % SLOTS] = y[first[to] + n]
                    st_release_sys_s32(remote, TAIL + rank, int32(n + 1))
    elif cuda.threadIdx.x == 32:
        for token in range(tokens):
            total = int32(0)
            for source in range(THREE):
                n = position[THREE * token + source]
                if n >= 0 and source == rank:
                    total += y[first[rank] + n]
                elif n >= 0:
                    while ld_acquire_sys_s32(local, TAIL + source) <= n:
                        pass
                    total += local[RING + SLOTS * source + n % SLOTS]
            out[token] = total


JUDGED = [
    ("one_rounding", answers.sum_vector, RIGHT, "par is 120"),
    ("one_rounding", rounds_each_time, WRONG, "random rows, mask 11111: element"),
    ("one_rounding", last_rank_first, WRONG, "rows that cancel, mask 11111"),
    ("one_rounding", begins_with_the_first_row, WRONG, "rows of -0"),
    ("one_rounding", ignores_the_mask, WRONG, "mask 01010"),
    ("one_rounding", asks_other_lanes, REFUSED, "it asks other lanes"),
    ("several_loads", answers.load_several, RIGHT, "loads of a warp"),
    ("several_loads", loads_one_vector, WRONG, "vector 32, rank 0"),
    ("several_loads", reads_beyond_the_row, WRONG, "must stay as it was"),
    ("several_loads", loads_words, OVER_PAR, "which fetches 16 bytes"),
    ("wait", answers.wait_rows, RIGHT, "0 loads"),
    ("wait", without_acquire, WRONG, "race"),
    ("wait", without_syncwarp, WRONG, "race"),
    ("wait", compares_without_wrapping, WRONG, "the counters rise from 2^32 - 1 to 2: threads wait for ever"),
    ("wait", does_not_wait, WRONG, "race"),
    ("wait", is_content_with_the_row_before, WRONG, "race"),
    ("wait", returns_what_it_waited_for, WRONG, "what a lane returns[1] is 5, not 8"),
    ("wait", compares_as_int32, WRONG, "the counters rise from 2^31 - 1 to 2^31: threads wait for ever"),
    ("wait", waits_for_exactly_the_next, WRONG, "the counters rise from 4 to 8: threads wait for ever"),
    ("wait", always_asks, OVER_PAR, "`tail` already says"),
    ("hold", answers.hold, RIGHT, "1 store"),
    ("hold", releases_its_next_row, WRONG, "two threads race"),
    ("hold", stores_plainly, WRONG, "two threads race"),
    ("hold", says_nothing_new, WRONG, "the ranks still wait for one another"),
    ("skips", answers.combine_three_ranks, RIGHT, "bytes to other ranks"),
    ("skips", waits_for_each_ring, WRONG, "the rows of the deadlock: threads wait for ever"),
    ("skips", waits_but_sums_in_any_order, WRONG, "rank 1 reads no row until rank 2 has all of its rows: threads wait"),
    ("skips", sums_own_rows_only, WRONG, "out of rank 0"),
    ("skips", ignores_heads, WRONG, "the rows of the deadlock: "),
]


@pytest.mark.parametrize("exercise, answer, state, text", JUDGED)
def test_answers(exercise, answer, state, text):
    verdict = getattr(exercises, exercise).check(answer)
    assert verdict.state == state and text in verdict.text, verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else getattr(exercises, exercise).own)


def test_formulas_and_guesses():
    assert exercises.in_flight.check(answers.loads_in_flight).state == RIGHT
    assert exercises.in_flight.check(lambda bandwidth, latency_ns, sms, threads, rows: 1).state == WRONG
    assert exercises.shortest_ring.check(answers.least_ring).state == RIGHT
    assert exercises.shortest_ring.check(lambda chunk, warps: chunk + 1).state == WRONG
    assert exercises.two_rows.check(ranks_2=100, ranks_4=2, ranks_8=0).state == RIGHT
    verdict = exercises.two_rows.check(ranks_2=100, ranks_4=25, ranks_8=6)
    assert verdict.state == WRONG and "sample" in verdict.text
    assert exercises.two_rows.check(ranks_2=..., ranks_4=..., ranks_8=...).text == "no prediction yet"
    assert exercises.publishes.check("C").state == RIGHT and exercises.publishes.check("A").state == WRONG
    assert exercises.publishes.check(...).state == OPEN


def test_shares_of_tokens_are_those_of_a_sample():
    for ranks, within in ((2, 0), (4, 0.005), (8, 0.0005)):
        assert abs(runs.share_with_two_rows(ranks) - runs.sampled_share(ranks)) <= within


# Inputs


@pytest.mark.parametrize("num_tokens, channels", [([9, 5], 2), ([4, 1, 7], 3), ([6], 1)])
def test_handles_equal_those_of_deepeps_dispatch(num_tokens, channels):
    ranks, generator = len(num_tokens), torch.Generator().manual_seed(1)
    is_in = [torch.rand(tokens, ranks, generator=generator) < 0.6 for tokens in num_tokens]
    c = DeepEPConfig(ranks, channels, 4, 2, 32, 0, 0, 4 * ranks, 2)
    with virtual_ranks(ranks, min_buffer_bytes(c)) as all_ranks:
        x = [torch.randn(tokens, 16).bfloat16() for tokens in num_tokens]
        got = [result[3] for result in dispatch_all(all_ranks, c, x, is_in)]
    for expected, given in zip(got, inputs.handles_of(is_in, channels), strict=True):
        for name, right, found in zip(expected._fields, expected, given, strict=True):
            assert found.dtype == right.dtype and torch.equal(found, right), name


@pytest.mark.parametrize("kind", ["uniform", "Zipf", "one rank"])
def test_sums_are_the_reference_rounded_once(kind):
    is_in = inputs.random_routing(7, 8, 2, 2, kind)
    y = [torch.randn(len(inputs.rows_of(is_in, r).home), 16).bfloat16() for r in range(2)]
    for sums, total in zip(inputs.sums_of(y, is_in), inputs.reference_sums(y, is_in), strict=True):
        assert torch.allclose(sums.double(), total, rtol=2**-8, atol=1e-5)
    if kind == "one rank":
        assert not any(chosen[:, 0].any() for chosen in is_in)


def test_channels_cover_all_rows():
    is_in = inputs.random_routing(9, 8, 2, 2)
    for rank in range(2):
        found = inputs.channels_of(is_in, rank, 4)
        rows = inputs.rows_of(is_in, rank)
        assert found.row_start[-1] == len(rows.home) and found.share == 3
        for home in range(2):
            for channel in range(4):
                first, last = found.row_start[home * 4 + channel : home * 4 + channel + 2].tolist()
                assert set(rows.home[first:last].tolist()) <= {home}
                assert all(token // 3 == channel for token in rows.token[first:last].tolist())


# The page's kernels

OWN = {name: getattr(answers, name) for name in ("sum_vector", "load_several", "wait_rows", "hold")}
LEFT_OUT = r"exercises\.|deadlocks\.|step\(|page\.(?!R)|balanced|hollow|no_sums|parts|predicted_us|short ="
WAITS = "wait_rows(call.local, page.TAILS + ring, tail, wanted, waits, call.state)"
OWN_ROW = "                phase = wait_row(smem_u64, page.MBARRIER + warp, phase)\n            # sum\n"
NAMES = "counters_go_on", "head_at_sender", "signalling_warp", "bulk_send", "own_rings", "bulk_receive", "balance"


def page(right="", wrong=""):
    return definitions(NOTEBOOK, OWN, LEFT_OUT, right, wrong)[0]


@pytest.fixture(scope="module")
def right_page():
    return page()


def version(found, count, packed=False):
    """Return the version with the first ``count`` switches turned, in the order of the page."""
    switches = Switches(**{name: name != "own_rings" for name in NAMES[:count]})
    load = OWN["load_several"]
    if count > 4:
        load = found["make_load"](VECTORS, "shared memory" if count > 5 else "y")
    return found["rings"](switches, load, VECTORS, found["sum_two"] if packed else OWN["sum_vector"])


def test_the_page_has_these_steps():
    _, steps = definitions(NOTEBOOK, OWN, LEFT_OUT)
    assert list(steps) == [
        "push, then sum",
        "loads in flight",
        "our port of DeepEP's rings",
        "one warp per channel",
        "several vectors",
        "counters go on",
        "head at the sender",
        "a signalling warp",
        "bulk copies send",
        "own rows directly",
        "bulk copies receive",
        "balanced",
    ]


@pytest.mark.parametrize("count", range(8))
def test_each_switch_is_right_in_two_orders(count, right_page):
    of = version(right_page, count)
    assert [runs.lesson._checked(of, seed, races=seed == 0) for seed in (0, 5)] == [None, None]


@pytest.mark.skipif(RANKS != 2, reason="packed additions are for two ranks")
def test_packed_additions_are_right(right_page):
    assert fault_of(runs, version(right_page, 7, packed=True)) is None


def test_push_and_sum_are_right(right_page):
    for load, vectors in ((right_page["load_one"], 1), (OWN["load_several"], VECTORS)):
        sums = right_page["make_sum"](right_page["make_sum_token"](load, OWN["sum_vector"], vectors))
        assert fault_of(runs, Version("push", right_page["push"], sums)) is None


def test_a_kernel_that_sends_nothing_is_wrong(right_page):
    """Receive buffers are poisoned, and other rows are combined first: a step must communicate."""

    @cuda.jit
    def sends_nothing(y, home, token, rows, peers, rank):
        pass

    sums = right_page["make_sum"](right_page["make_sum_token"](right_page["load_one"], OWN["sum_vector"], 1))
    assert "nan" in fault_of(runs, Version("push", sends_nothing, sums))


WRONG_KERNELS = [  # switches that are turned, passage of the page, what stands there instead
    (0, "cuda.syncwarp()  # what one lane has acquired, all lanes may overwrite", "pass"),
    (0, "cuda.syncwarp()  # all lanes have stored their part of the row", "pass"),
    (0, "sends = left > 0 and uint32(tail - head) < uint32(slots)", "sends = left > 0"),
    (0, "cuda.syncwarp()  # all lanes have read the rows", "pass"),
    (0, WAITS, "wanted"),
    (1, "call.state[counter] = int32(tail)", "pass"),
    (2, "page.HEADS + channel * RANKS + call.rank, int32(head)", "page.HEADS + ring, int32(head)"),
    (4, "                if left == 0:\n                    wait_all()\n", "                if left == 0:\n"),
    (4, "                    wait_all_but_one()", "                    pass"),
    (5, "if not own_rings and lane == call.rank:", "if False:"),
    (6, "                fence_proxy_async_shared()", "                pass"),
    (6, OWN_ROW, "                pass\n"),
    (7, "- uint32(number) * uint32(channels)", ""),
]


@pytest.mark.parametrize("count, right, wrong", WRONG_KERNELS, ids=range(len(WRONG_KERNELS)))
def test_the_check_finds_wrong_kernels(count, right, wrong):
    of = version(page(right, wrong), count)
    assert any(runs.lesson._checked(of, seed, races=True) for seed in range(4))


@pytest.mark.skipif(RANKS != 2, reason="more ranks run in one order")
def test_a_step_runs_in_two_orders(monkeypatch):
    """In the first one, a warp that does not wait until its last post is published loses none."""
    seeds = []
    monkeypatch.setattr(runs.lesson, "_checked", lambda version, seed, races: seeds.append((seed, races)))
    assert runs.lesson.fault(None) is None and seeds == [(0, True), (1, False)]


def test_a_score_says_what_changes(right_page):
    registers, bulk = (runs.lesson.count(version(right_page, count), "").rows for count in (3, 4))
    assert bulk["all warps", "loads of 16 bytes a lane"] < registers["all warps", "loads of 16 bytes a lane"]
    assert bulk["all warps", "bytes, bulk copies"] > 0 == registers["all warps", "bytes, bulk copies"]
    releases, one_warp = (runs.lesson.count(version(right_page, count), "").rows for count in (2, 3))
    row = "all warps", "signals to peers, signalling warp apart"
    assert one_warp[row] == 0 < releases[row]


# Deadlocks


def test_rings_of_the_port_deadlock_below_the_bound_only():
    short = deadlocks.ShortRings()
    for chunk, ring, warps, stuck in short.runs:
        assert stuck.hung == (ring < answers.least_ring(chunk, 2 * warps - 1)) and not stuck.wrong
    assert "deadlocks" in str(short) and draw.stuck_ring(*short.stuck()).title


def test_the_cycle_of_three_ranks_is_found():
    message, waits = deadlocks.wait_for_each_other(waits_for_each_ring)
    assert "polls in vain" in message and len(waits) == 6
    assert waits[0] == ("rank 0 sends", "its ring to rank 1 is full") and waits[1][1] == "no row from rank 2"
    assert deadlocks.wait_for_each_other(answers.combine_three_ranks) == ("all sums are right", None)
    assert "rank 2 sums" in draw.cycle(waits)._repr_svg_()


# Tables and figures


def test_tables_have_lines():
    assert len(runs.lower_bound().lines) == 3 + (RANKS not in (2, 4, 8))
    assert len(runs.show_what_did_not_pay().lines) == 3
    assert "Little" not in runs.show_rates() and "ns" in runs.show_rates()
    assert "no claim" in runs.about_deepep() or "the package" in runs.about_deepep()


def test_one_lower_bound_for_the_same_bytes():
    assert runs.wire_us() == pytest.approx(runs.bytes_of().wire / (1e3 * max(runs.push_rates().values())))


def test_figures_say_what_they_show():
    assert "row of rank 2" in draw.problem()._repr_svg_()
    assert "error 0.5" in draw.rounding([256.0, 1.0, 1.5, -3.0, 1.0, 2.0, 1.0, -256.0])._repr_svg_()
    assert "warp 0: heads" in draw.roles()._repr_svg_() and "shared memory" in draw.paths()._repr_svg_()
    assert "four vectors" in draw.loads()._repr_svg_()


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_page_runs_with_other_ranks(ranks):
    sizes = dict(RANKS=ranks, SMALL_TOKENS=2, SMALL_HIDDEN=64, SMALL_WARPS=1)
    assert "balanced" in run_with_sizes(NOTEBOOK, "combine", **sizes)


# What the page says of times is computed

TIMES = {  # of a run on two H200s
    "our port of DeepEP's rings": 810,
    "a signalling warp": 279,
    "bulk copies receive": 282,
    "parts: balanced": 257,
    "parts: no sums": 188,
    "push: own rows in one block": 194,
    "push: home ranks alternate": 168,
    "routing uniform: this lesson": 257,
    "routing uniform: the package": 196,
}
SENTENCES = [  # function, times that differ from those, what it says
    ("explain_port", {}, "takes 810 us, and its dispatch"),
    ("explain_port", {"our port of DeepEP's rings": 250}, "waiting for all rows costs little"),
    ("explain_ways", {}, "gain nothing: 279 us before them, 282 us after them"),
    ("explain_ways", {"bulk copies receive": 240}, "bring 279 us to 240 us"),
    ("explain_parts", {}, "The sum is not hidden: 188 us without it, 257 us with it"),
    ("explain_parts", {"parts: balanced": 190}, "The sum is hidden"),
    ("explain_push_orders", {}, "Yes: in one block 194 us, alternating 168 us"),
    ("explain_push_orders", {"push: home ranks alternate": 193}, "No: in one block"),
    ("compare_with_package", {}, "We did not isolate"),
    ("compare_with_package", {"routing uniform: the package": 256}, "and this lesson's 257 us."),
]


@pytest.mark.parametrize("function, times, text", SENTENCES)
def test_sentences_follow_the_times(function, times, text, monkeypatch):
    monkeypatch.setattr(
        runs, "recorded_us", lambda topic, step, **_: (TIMES | {"DeepEP's ring": 300} | times).get(step)
    )
    monkeypatch.setattr(runs.lesson, "steps", {})
    assert text in getattr(runs, function)()


@pytest.mark.parametrize(
    "function", [name for name in dict.fromkeys(name for name, *_ in SENTENCES) if "push" not in name]
)
def test_without_times_nothing_is_said(function, monkeypatch):
    monkeypatch.setattr(runs, "recorded_us", lambda *_, **__: None)
    monkeypatch.setattr(runs.lesson, "steps", {})
    assert getattr(runs, function)() is None


@pytest.mark.skipif(RANKS != 2, reason="rates are recorded with two ranks")
def test_predictions_use_the_recorded_rates_of_few_sms():
    assert runs.reading_us(1) > 1.5 * runs.reading_us(4) > 2.5 * runs.reading_us(1) / 4
    assert runs.added(1.0, 2.0) == 3.0 and runs.added(1.0, None) is runs.half(None) is None
