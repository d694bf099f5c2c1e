"""Exercises of the lesson "Combine"; the page checks answers with `exercises.<name>`."""

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, int64, uint32

from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.course.grader import Wrong, case, expect_equal, function_test
from moe_numba.course.lessons.combine import answers, deadlocks
from moe_numba.course.lessons.combine.deadlocks import HEAD, RING, SLOTS, TAIL, THREE, ThreeRanks, routing_of_the_cycle
from moe_numba.course.lessons.combine.runs import RANKS, VECTORS, Rows, sampled_share, share_with_two_rows
from moe_numba.course.steps.exercises import Build, Choose, Formula, Predict
from moe_numba.course.steps.score import count
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.runtime.launch import launch

# Build: one rounding

_FIVE = 5  # rows, more than two: then the order of the additions matters


def _around_sum(answer):
    @cuda.jit
    def around(given, mask, out):
        words, lane = cuda.local.array(28, int32), int32(cuda.threadIdx.x)
        for k in range(28):
            words[k] = given[28 * lane + k]
        a, b, c, d = answer(words, int32(8), int32(_FIVE), uint32(mask))
        out[4 * lane], out[4 * lane + 1], out[4 * lane + 2], out[4 * lane + 3] = int32(a), int32(b), int32(c), int32(d)

    return around


def _rows_to_sum(kind):
    rows = torch.randn(_FIVE + 2, 32, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    if kind == "rows that cancel":
        rows[2] *= 2.0**14
        rows[2 + 4] = -rows[2]
    if kind == "rows of -0":
        rows[:] = -0.0
    return rows


def _sum(kernel, kind="random rows", mask=0b11111):
    rows, out = _rows_to_sum(kind), torch.full((32, 4), 0x7F7F7F7F, dtype=torch.int32)
    given = rows.transpose(0, 1).contiguous().view(torch.int32)  # of lane, row, four words
    launch(kernel, 1, 32, given.reshape(-1), int(mask), out)
    total = torch.zeros(32, 8)
    for r in range(_FIVE):
        total += rows[2 + r].float() if mask >> r & 1 else 0
    return out.view(torch.bfloat16), total.bfloat16()


def _test_sum(answer):
    kernel = _around_sum(answer)
    for kind, mask in (
        ("random rows", 0b11111),
        ("random rows", 0b01010),
        ("rows that cancel", 0b11111),
        ("rows of -0", 0b11111),
    ):
        out, right = _sum(kernel, kind, mask)
        differ = (out.view(torch.int16) != right.view(torch.int16)).nonzero()
        if len(differ):
            lane, element = differ[0].tolist()
            found, wanted = out[lane, element].item(), right[lane, element].item()
            raise Wrong(
                f"{kind}, mask {mask:05b}: element {element} of lane {lane} is {found:.6g}, not {wanted:.6g}; "
                f"{len(differ)} of {out.numel()} differ"
            )


one_rounding = Build(
    "one rounding",
    "a function that sums 16 bytes of each row in rank order, and rounds once",
    own=answers.sum_vector,
    test=_test_sum,
    profile=lambda answer: count(_around_sum(answer), _sum, answer),
    counter="executions",
    par=120,
    unit="source lines of a warp",
    forbidden={"shuffles": "it asks other lanes, where each lane has its own 16 bytes of all rows"},
    over_par="Does each element need its own loop over the ranks?",
    hint="A bfloat16 is the upper half of a float32: the low element of a word is uint_as_float(word << 16), the high "
    "one uint_as_float(word & 0xFFFF0000). Keep eight float32 sums that begin at 0, add the rows of ranks whose bit of "
    "mask is set, and pack each pair with cvt_rn_bf16x2_f32(high, low).",
    home=f"{__name__}:one_rounding",
)


# Formula: Little's law

_GPUS = [
    (4.2e12, 600, 132, 512, 2),
    (4.2e12, 600, 12, 480, 2),
    (1.9e12, 500, 108, 256, 8),
    (3.3e12, 700, 100, 512, 1),
    (1.6e12, 512, 100, 256, 1),  # exactly 2, without rounding errors in any order of the operations
]

in_flight = Formula(
    "Little's law",
    "a function that returns the smallest number of 16-byte loads of each row",
    own=answers.loads_in_flight,
    test=function_test(answers.loads_in_flight, _GPUS),
    praise="bandwidth times latency is what must be in flight, and a thread has n loads of 16 bytes for each row",
    hint="Bandwidth times latency is the number of bytes that must be in flight. How many does one load of every "
    "thread add? Round up.",
)


# Build: several loads in flight

_LONG = 132  # vectors of a row: the last ones do not fill the lanes


def _around_load(answer):
    held = 4 * RANKS * VECTORS

    @cuda.jit
    def around(local, mask, out):
        words, begins, lane = cuda.local.array(held, int32), cuda.local.array(RANKS, int64), int32(cuda.threadIdx.x)
        rows = Rows(local, local, local, int32(0), int32(0))
        for r in range(RANKS):
            begins[r] = int64(64 + 4 * _LONG * r)
        step = int32(0)
        for first in range(lane, _LONG, 32 * VECTORS):
            for k in range(held):
                words[k] = int32(-7)
            answer(words, rows, begins, uint32(mask), int32(first), int32(_LONG))
            for k in range(held):
                out[(step * 32 + lane) * held + k] = words[k]
            step = int32(step + 1)

    return around


def _load(kernel, mask=(1 << RANKS) - 1):
    steps, held = -(-_LONG // (32 * VECTORS)), 4 * RANKS * VECTORS
    local = torch.arange(64 + 4 * _LONG * RANKS, dtype=torch.int32) + 1000
    out = torch.full((steps, 32, VECTORS, RANKS, 4), -7, dtype=torch.int32)
    launch(kernel, 1, 32, local, mask, out.view(-1))
    step, lane, u, r, k = np.mgrid[:steps, :32, :VECTORS, :RANKS, :4]
    vector = lane + 32 * (u + VECTORS * step)
    right = np.where((vector < _LONG) & (mask >> r & 1 == 1), 1064 + 4 * (_LONG * r + vector) + k, -7)
    assert out.numel() == steps * 32 * held
    return out.numpy(), right


def _test_load(answer):
    kernel = _around_load(answer)
    for mask in (1, (1 << RANKS) - 1):
        out, right = _load(kernel, mask)
        where = np.argwhere(out != right)
        if len(where):
            step, lane, u, r, k = where[0].tolist()
            what = "must stay as it was" if right[tuple(where[0])] == -7 else "is wrong"
            raise Wrong(
                f"mask {mask:b}, first = {lane + 32 * VECTORS * step}: word {k} of vector {lane + 32 * u}, rank {r}, "
                f"in words[{4 * (RANKS * u + r) + k}], {what}"
            )


_REQUESTS = RANKS * -(-_LONG // 32)

several_loads = Build(
    "loads in flight",
    f"a function that loads {VECTORS} vector{'s' * (VECTORS > 1)} of each row before it returns",
    own=answers.load_several,
    test=_test_load,
    profile=lambda answer: count(_around_load(answer), _load, answer),
    counter="global_load_requests",
    unit="loads of a warp",
    par=_REQUESTS,
    par_is_bound=True,
    forbidden={"shuffles": "lanes pass vectors on, where each lane loads its own", "barriers": "threads wait"},
    over_par="Does it load a vector with one ld_global_s32x4, which fetches 16 bytes for a lane, and only once?",
    hint="Vector u of this lane is i = first + 32 * u; it exists if i < row_vectors. For rank r it begins at word "
    "begins[r] + 4 * i of rows.local, and goes to words[4 * (RANKS * u + r)] and the three words after it.",
    home=f"{__name__}:several_loads",
)


# Build: the receiver's wait

_WORDS = 8 + 32 * THREE  # of a rank's memory: counters, then a row of 32 words from each rank


def _around_wait(answer):
    @cuda.jit
    def around(local, peers, rank, wanted, known, raised, state, out):
        lane = int32(cuda.threadIdx.x & 31)
        if rank > 0:  # ranks 1 and 2 send rows, whose counters they then raise
            remote = pointer_from_address(peers[0], local)
            remote[8 + 32 * rank + lane] = int32(1000 * rank + lane)
            cuda.syncwarp()
            if lane == 0:
                st_release_sys_s32(remote, rank, raised)
        else:
            source = lane if lane < THREE else int32(0)
            waits = lane == 1 or lane == 2
            tail = answer(local, source, uint32(known), uint32(wanted), waits, state)
            out[lane] = raised if not waits else int32(tail)
            for r in range(1, THREE):
                out[32 * r + lane] = local[8 + 32 * r + lane]

    return around


def _wait(kernel, wanted=4, raised=5):
    """Wait for a row; the counters in memory say at first that the row before has come, and then ``raised``."""
    out, signed = torch.full((32 * THREE,), -7, dtype=torch.int32), lambda n: (n + (1 << 31)) % (1 << 32) - (1 << 31)

    def work(transport):
        shared, state = transport.allocate(4 * _WORDS), torch.zeros(64, dtype=torch.int32)
        local = shared.local.view(torch.int32)
        local[8:] = -9
        local[:8] = signed(wanted)
        given = signed(wanted), signed(wanted - 2), signed(raised)
        rest = state, out if transport.rank == 0 else torch.zeros_like(out)
        transport.launch(kernel, 1, 32, local, shared.addresses, transport.rank, *given, *rest)
        settle(transport)
        shared.close()

    with simulator.weak_memory():
        LocalGroup(THREE).run(work)
    right = torch.full_like(out, signed(raised))
    right[32:] = torch.cat([1000 * r + torch.arange(32) for r in range(1, THREE)]).int()
    return out, right


def _test_wait(answer):
    kernel = _around_wait(answer)
    for wanted, raised, counted in (
        (4, 5, "the counters rise from 4 to 5"),
        (4, 8, "the counters rise from 4 to 8"),
        (-1, 2, "the counters rise from 2^32 - 1 to 2"),
        ((1 << 31) - 1, 1 << 31, "the counters rise from 2^31 - 1 to 2^31"),
    ):
        with case(f"row {wanted % (1 << 32)} is wanted, and {counted}"):
            out, right = _wait(kernel, wanted, raised)
            expect_equal("what a lane returns", out[:32], right[:32])
            expect_equal("what the lanes then read of the rows", out[32:], right[32:])


def _around_known(answer):
    @cuda.jit
    def around(local, state, out):
        lane = int32(cuda.threadIdx.x)
        out[lane] = int32(answer(local, int32(0), uint32(7), uint32(lane & 3), lane < THREE, state))

    return around


def _known(kernel):
    counters = torch.full((8,), 7, dtype=torch.int32)
    launch(kernel, 1, 32, counters, torch.zeros(64, dtype=torch.int32), torch.zeros(32, dtype=torch.int32))


wait = Build(
    "the receiver's wait",
    "a function in which a warp waits for its rows",
    own=answers.wait_rows,
    test=_test_wait,
    profile=lambda answer: count(_around_known(answer), _known, answer),
    counter="global_load_requests",
    unit="loads of counters that had been read already",
    par=0,
    most_alone=None,
    over_par="`tail` already says that the row has come: why ask again?",
    hint="Compare modulo 2^32: row `wanted` has come if int32(tail - wanted) > 0. Lanes poll with ld_acquire_sys_s32 "
    "while cuda.any_sync(FULL_MASK, ...) says that some lane still waits. What one lane has acquired, the others may "
    "read after cuda.syncwarp().",
    home=f"{__name__}:wait",
)

publishes = Choose(
    "who publishes the head",
    {
        "A": "the warp that has read the row: it is free as soon as one warp has read it",
        "B": "the warp that has read its token's rows last",
        "C": "warp 0, and it stores the least of what all other warps still need",
    },
    "C",
    "A head is one number, and says that all rows before it are free. Each warp has tokens of its own and reads them "
    "at its own time, so the rows that have been read are not the first ones. With one warp per channel they are, and "
    "the head is that warp's own count.",
)

two_rows = Predict(
    "tokens with at most two rows",
    right=lambda: {f"ranks_{n}": 100 * share_with_two_rows(n) for n in (2, 4, 8)},
    why=lambda: (
        "All eight experts must be on two ranks: about 6 / 2^8 with four ranks, 28 / 4^8 with eight. In a sample of "
        f"uniform routing it is {100 * sampled_share(4):.2g} % and {100 * sampled_share(8):.1g} %. So a kernel that is "
        "fast because of such tokens is fast on two ranks"
    ),
    within={"ranks_2": 0, "ranks_4": 1, "ranks_8": 0.3},
)


# Formula and build: the first deadlock

shortest_ring = Formula(
    "the shortest ring",
    "a function of the chunk and of the number of summing warps that returns the rows of a ring that never deadlocks",
    own=answers.least_ring,
    test=function_test(answers.least_ring, [(2, 3), (3, 3), (2, 5), (4, 23), (10, 23), (1, 1)]),
    praise="the least position that a warp holds trails by up to R - 1 rows, and the sender waits for a whole chunk",
    hint="If warp 1 waits for row n, what is the first row that it still seems to need? How many rows have the other "
    "R - 1 warps read meanwhile?",
)


def _around_hold(answer):
    @cuda.jit
    def around(needed, out):
        heads, lane = cuda.shared.array(32, int32), int32(cuda.threadIdx.x)
        heads[lane] = int32(0)
        cuda.syncthreads()
        if lane < RANKS:
            answer(heads, lane, needed[lane])
        cuda.syncthreads()
        out[lane] = heads[lane]

    return around


def _hold(kernel):
    needed, out = torch.arange(32, dtype=torch.int32) + 5, torch.zeros(32, dtype=torch.int32)
    launch(kernel, 1, 32, needed, out)
    return out, torch.where(torch.arange(32) < RANKS, needed, 0)


def _test_hold(answer):
    for chunk, ring, warps in ((2, 2, 2), (2, 3, 3)):
        with case(f"chunks of {chunk}, a ring of {ring} rows, {2 * warps - 1} summing warps"):
            found = deadlocks.run_port(chunk, ring, warps, answer, weak=True)
            if found.hung:
                raise Wrong(f"the ranks still wait for one another, with head {found.head} and tail {found.tail}")
            if found.wrong:
                raise Wrong(f"{found.wrong} tokens are wrong: a slot was overwritten before a warp had read it")


hold = Build(
    "what a waiting warp still needs",
    "a function that tells warp 0 what this warp still needs",
    own=answers.hold,
    test=_test_hold,
    profile=lambda answer: count(_around_hold(answer), _hold, answer),
    counter="shared_store_requests",
    unit="stores to shared memory",
    par=1,
    par_is_bound=True,
    hint="Warp 0 loads heads[...] with acquire, and stores the least of them as the head. So store `needed` with "
    "release: st_release_cta_shared_s32(heads, at, value).",
    home=f"{__name__}:hold",
    seeds=3,
)


# Build: the second deadlock


def _routings():
    yield "the rows of the deadlock", ThreeRanks(routing_of_the_cycle())
    generator = torch.Generator().manual_seed(3)
    yield "random rows", ThreeRanks([torch.rand(9, THREE, generator=generator) < 0.6 for _ in range(THREE)])
    chosen = torch.zeros(6, THREE, dtype=torch.bool)
    chosen[:, 0] = True
    yield "all rows on rank 0", ThreeRanks([chosen] * THREE)


_EACH = 5  # rows from rank 0 to each other rank: more than slots


@cuda.jit
def _receives(local, peers, rank, late, out):
    """Take rank 0's rows; rank ``late`` begins when the other rank has all of its rows."""
    if cuda.threadIdx.x == 0:
        while rank == late and ld_acquire_sys_s32(local, TAIL + rank) == 0:
            pass
        for n in range(_EACH):
            while ld_acquire_sys_s32(local, TAIL) <= n:
                pass
            out[n] = local[RING + n % SLOTS]
            st_release_sys_s32(pointer_from_address(peers[0], local), HEAD + rank, int32(n + 1))
        if rank != late:
            st_release_sys_s32(pointer_from_address(peers[late], local), TAIL + late, int32(1))


def _send_to(late, answer):
    """Return what ranks 1 and 2 have received of rank 0's rows; ``late`` takes none until the other has all."""
    y, first = torch.arange(2 * _EACH, dtype=torch.int32) + 50, torch.tensor([0, 0, _EACH, 2 * _EACH]).int()
    outs = [torch.full((_EACH,), -7, dtype=torch.int32) for _ in range(THREE)]

    def work(transport):
        r, shared = transport.rank, transport.allocate(4 * (RING + SLOTS * THREE))
        local = shared.local.view(torch.int32)
        local[RING:] = -9
        settle(transport)
        if r == 0:  # it sends only: it has no token of its own
            given = y, first, torch.full((THREE,), -1, dtype=torch.int32), 0, outs[0]
            transport.launch(answer, 1, 64, local, shared.addresses, r, *given)
        else:
            transport.launch(_receives, 1, 64, local, shared.addresses, r, late, outs[r])
        settle(transport)
        shared.close()

    with simulator.weak_memory():
        LocalGroup(THREE).run(work)
    return torch.cat(outs[1:]), y


def _test_three(answer):
    for name, rows in _routings():
        with case(name):
            for rank, (found, right) in enumerate(zip(rows.run(answer), rows.right, strict=True)):
                expect_equal(f"out of rank {rank}", found, right)
    for late in (1, 2):
        with case(f"rank 0 sends, and rank {late} reads no row until rank {THREE - late} has all of its rows"):
            expect_equal("what ranks 1 and 2 have received", *_send_to(late, answer))


def _profile_three(answer):
    with simulator.profile() as profile:
        ThreeRanks(routing_of_the_cycle()).run(answer)
    (report,) = profile.kernels
    return report


_LEAVE = sum(
    int(chosen.sum()) - int(chosen[:, home].sum()) for home, chosen in enumerate(routing_of_the_cycle())
)  # rows that go to another rank

skips = Build(
    "a sender that does not wait",
    "a kernel in which three ranks combine without a deadlock",
    own=answers.combine_three_ranks,
    test=_test_three,
    profile=_profile_three,
    counter="peer_bytes",
    unit="bytes to other ranks",
    par=12 * _LEAVE,
    most_alone=None,
    over_par="A row has 4 bytes, and so has its tail and its head. What else crosses the link, and need it?",
    hint="If one ring is full, which rows can the sender send meanwhile? It is done when no ring has rows left.",
    home=f"{__name__}:skips",
    seeds=3,
)
