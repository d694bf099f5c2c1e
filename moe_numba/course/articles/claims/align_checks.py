"""Checks of what the alignment's article says about the versions of `moe_align_block_size`."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate

import torch
from numba import cuda, int32

from moe_numba import simulator
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.verdicts import Found
from moe_numba.runtime.launch import launch

WARP_SIZE, CTA_THREADS = 32, 1024
EXAMPLE = [3, 1, 7, 0, 4, 1, 6, 3]  # the article's, for both scans
BLELLOCH_ROWS = [
    [3, 4, 7, 7, 4, 5, 6, 9],
    [3, 4, 7, 11, 4, 5, 6, 14],
    [3, 4, 7, 11, 4, 5, 6, 25],
    [3, 4, 7, 11, 4, 5, 6, 0],
    [3, 4, 7, 0, 4, 5, 6, 11],
    [3, 0, 7, 4, 4, 11, 6, 16],
    [0, 3, 4, 11, 11, 15, 16, 22],
]
WARP_ROWS = [
    [3, 4, 8, 7, 4, 5, 7, 9],
    [3, 4, 11, 11, 12, 12, 11, 14],
    [3, 4, 11, 11, 15, 16, 22, 25],
    [0, 3, 4, 11, 11, 15, 16, 22],
]


# Scans, thread by thread in lockstep


class Lockstep:
    """A CTA whose threads take each step together; counts barriers, and the threads that work in each step."""

    def __init__(self):
        self.barriers, self.active, self.rows = 0, [], []

    def step(self, work: Callable[[int], None], threads: Sequence[int], values: list[int]) -> None:
        """Call ``work(tid)`` for these threads, then pass a barrier; keep a copy of the values."""
        for tid in threads:
            work(tid)
        self.active.append(len(threads))
        self.barriers += 1
        self.rows.append(list(values))


def blelloch(values: list[int]) -> Lockstep:
    """Run the two sweeps of section 0x3's listing; ``values`` becomes its exclusive prefix sum."""
    size, offset = len(values), 1
    cta = Lockstep()

    def pair(tid):
        return offset * (2 * tid + 1) - 1, offset * (2 * tid + 2) - 1

    def add(tid):
        a, b = pair(tid)
        values[b] += values[a]

    def swap_and_add(tid):
        a, b = pair(tid)
        if b < size:
            values[a], values[b] = values[b], values[a] + values[b]

    active = size >> 1
    while active:
        cta.step(add, range(active), values)
        active, offset = active >> 1, offset << 1
    values[-1] = 0
    cta.rows.append(list(values))  # the listing has a barrier here too, which the article does not count
    active = 1
    while active < size:
        offset >>= 1
        cta.step(swap_and_add, range(active), values)
        active <<= 1
    return cta


def warp_inclusive_scan(values: list[int]) -> list[list[int]]:
    """Return the values of a warp's lanes after each exchange."""
    rows, offset = [values], 1
    while offset < len(values):
        before = rows[-1]
        rows.append([v + (before[i - offset] if i >= offset else 0) for i, v in enumerate(before)])
        offset <<= 1
    return rows[1:]


def two_level_scan(values: list[int]) -> Lockstep:
    """Run section 0x4's listing of the complete flow, steps 2 and 3; ``values`` becomes its exclusive prefix sum."""
    cta, warps = Lockstep(), range(0, len(values), WARP_SIZE)
    inclusive = [total for i in warps for total in warp_inclusive_scan(values[i : i + WARP_SIZE])[-1]]
    before = [total - own for total, own in zip(inclusive, values, strict=True)]  # within the warp
    sums = [0] * len(warps)

    def write_sum(tid):
        sums[tid // WARP_SIZE] = inclusive[tid]

    def scan_sums(_):
        sums[:] = [0, *accumulate(sums)][:-1]  # warp 0, by exchanges

    def add_offset(tid):
        values[tid] = before[tid] + sums[tid // WARP_SIZE]

    cta.step(write_sum, range(WARP_SIZE - 1, len(values), WARP_SIZE), values)
    cta.step(scan_sums, range(1), values)
    cta.step(add_offset, range(len(values)), values)
    return cta


def _random_counts(size):
    generator = random.Random(size)
    return [16 * generator.randrange(9) for _ in range(size)]


def blelloch_rows() -> Found:
    rows = blelloch(list(EXAMPLE)).rows
    same = sum(row == own for row, own in zip(rows, BLELLOCH_ROWS, strict=True))
    return Found(same, f"{same} of {len(rows)} rows of the example")


def warp_scan_rows() -> Found:
    rows = warp_inclusive_scan(EXAMPLE)
    rows.append([after - own for after, own in zip(rows[-1], EXAMPLE)])
    same = sum(row == own for row, own in zip(rows, WARP_ROWS, strict=True))
    return Found(same, f"{same} of {len(rows)} rows of the example")


def warp_scan_iterations() -> Found:
    count = len(warp_inclusive_scan(list(range(WARP_SIZE))))
    return Found(count, f"{count} exchanges for {WARP_SIZE} lanes")


def blelloch_levels() -> Found:
    """Count the levels of each sweep for 128 experts."""
    cta = blelloch(_random_counts(128))
    up = cta.barriers // 2
    return Found(up, f"{up} levels up and {cta.barriers - up} down; the serial loop has 128 iterations")


def blelloch_barriers() -> Found:
    count = blelloch(_random_counts(128)).barriers
    return Found(
        count, f"{count} in the two loops for scan_size 128 (and one between them, which the article leaves out)"
    )


def two_level_barriers() -> Found:
    values = _random_counts(128)
    wanted = [0, *accumulate(values)][:-1]
    count = two_level_scan(values).barriers
    if values != wanted:
        return Found(math.nan, "the prefix sum is wrong")
    return Found(count, f"{count} in the listing of the complete flow, whose prefix sum is right")


def blelloch_active_threads() -> Found:
    active = blelloch(_random_counts(128)).active
    return Found(
        max(active), f"at most {max(active)} threads work on 128 numbers at a time, and {min(active)} at the root"
    )


def blelloch_other_sizes() -> Found:
    """Count the sizes that are no power of 2 for which the listing's sweeps are right."""
    sizes, right = [size for size in range(2, 65) if size & (size - 1)], 0
    for size in sizes:
        values = [value + 1 for value in _random_counts(size)]
        wanted = [0, *accumulate(values)][:-1]
        blelloch(values)
        right += values == wanted
    return Found(right, f"{right} of the {len(sizes)} other sizes up to 64 give a prefix sum")


# Sizes


def shared_bytes(num_experts: int, warp_sums: int = 0) -> int:
    scan_size = 1 << (num_experts - 1).bit_length()
    return 4 * (num_experts + (num_experts + 1) + scan_size + warp_sums)


def shared_bytes_0x3() -> Found:
    return Found(shared_bytes(128), f"{shared_bytes(128)} bytes for 128 experts")


def shared_bytes_added() -> Found:
    warps = CTA_THREADS // WARP_SIZE
    more = shared_bytes(128, warps) - shared_bytes(128)
    return Found(more, f"{more} bytes for {warps} warps")


def old_length(numel: int, num_experts: int, block_size: int) -> int:
    return numel + num_experts * (block_size - 1)


def new_length(numel: int, num_experts: int, block_size: int) -> int:
    return numel * block_size if numel < num_experts else old_length(numel, num_experts, block_size)


def saved_length(numel: int) -> float:
    return 100 * (1 - new_length(numel, 256, 128) / old_length(numel, 256, 128))


def saved_for_8_slots() -> Found:
    old, new = (length(8, 256, 128) for length in (old_length, new_length))
    return Found(saved_length(8), f"{old} -> {new} places for 8 slots, {saved_length(8):.2f} %")


def least_saved() -> Found:
    """Find what the new length saves at least, over all numbers of slots that it applies to."""
    saved = {numel: saved_length(numel) for numel in range(1, 256)}
    most = max(numel for numel, percent in saved.items() if percent >= 90)
    return Found(
        min(saved.values()),
        f"90 % or more up to {most} slots, {min(saved.values()):.1f} % for {min(saved, key=saved.get)}; the rule "
        f"applies to {len(saved)} numbers of slots (256 experts, block_size 128)",
    )


def number_of_blocks(ids: Iterable[int], block_size: int) -> int:
    """Return how many expert blocks the slots with these experts take."""
    return sum(-(-count // block_size) for count in Counter(ids).values())


def blocks_per_slot() -> Found:
    """Find the largest ratio of blocks to slots, if there are fewer slots than experts, and a token's blocks."""
    generator, most, runs, topk = random.Random(0), 0.0, 300, 8
    for _ in range(runs):
        numel, block_size = generator.randrange(1, 64), generator.choice((1, 4, 16, 128))
        ids = [generator.randrange(64) for _ in range(numel)]
        most = max(most, number_of_blocks(ids, block_size) / numel)
    one_token = number_of_blocks(range(topk), 128)
    return Found(most, f"at most {most:g} in {runs} random cases; a token with {topk} experts takes {one_token} blocks")


def small_kernel_conditions() -> Found:
    """Count the numbers of tokens for which the article's two conditions of the small kernel disagree."""
    topk, tokens = 8, range(1, 1025)
    differ = [n for n in tokens if (n <= 1024) != (n * topk < 1024)]
    return Found(
        len(differ),
        f"{len(differ)} of {len(tokens)} numbers of tokens with top-8, {differ[0]} to {differ[-1]}, differ "
        "from section 0x1's numel < 1024",
    )


# expert_ids, for 2048 blocks that all belong to one expert

BLOCKS, EXPERTS = 2048, 256


def busiest_thread() -> Found:
    """Compare the blocks that the busiest thread writes, by a loop per expert and by a search per block."""
    loop = max(BLOCKS if tid == 7 else 0 for tid in range(EXPERTS))
    search = max(len(range(tid, BLOCKS, CTA_THREADS)) for tid in range(CTA_THREADS))
    return Found(search, f"the busiest thread writes {loop} blocks by 0x2's loop, {search} by 0x3's, of {BLOCKS}")


def find_expert(prefix: list[int], block: int) -> tuple[int, int]:
    """Run section 0x3's binary search; return the expert of a block and the number of iterations."""
    left, right, iterations = 0, len(prefix) - 1, 0
    while left < right:
        middle, iterations = (left + right) >> 1, iterations + 1
        if prefix[middle] <= block:
            left = middle + 1
        else:
            right = middle
    return left - 1, iterations


def search_iterations() -> Found:
    """Let each expert own all blocks, search the first and the last of them, and count the iterations."""
    needed = {}
    for own in range(EXPERTS):
        prefix = [0, *accumulate(BLOCKS if expert == own else 0 for expert in range(EXPERTS))]
        found = [find_expert(prefix, block) for block in (0, BLOCKS - 1)]
        if wrong := {expert for expert, _ in found} - {own}:
            return Found(math.inf, f"a block of expert {own} is given to expert {wrong.pop()}")
        needed[own] = max(iterations for _, iterations in found)
    most = max(needed.values())
    first = next(expert for expert, iterations in needed.items() if iterations == most)
    range_text = f"{min(needed.values())} to {most} iterations for {EXPERTS} experts"
    return Found(most, f"{range_text}; expert {first} is the first that needs {most}")


STORE_WIDTHS = 4, 16  # bytes of a store of int32 and of int4


def store_requests() -> Found:
    """Count the requests and the sectors of a warp that fills 4 KiB by narrow and by wide stores."""
    requests, sectors = [], []
    for width in STORE_WIDTHS:
        starts = range(0, 4096, WARP_SIZE * width)
        requests.append(len(starts))
        sectors.append(sum(len({(at + lane * width) // 32 for lane in range(WARP_SIZE)}) for at in starts))
    return Found(
        requests[0] / requests[1],
        f"{requests[0]} -> {requests[1]} requests of a warp for 4 KiB, but {sectors[0]} -> {sectors[1]} sectors of 32 "
        "bytes",
    )


# 0x5's main kernel and its sort kernel, small

FEW_EXPERTS, BLOCK_SIZE, THREADS = 8, 4, 32


@cache
def make_main(num_experts, block_size, threads):
    """Make 0x5's main kernel, for two CTAs: CTA 1 fills, CTA 0 counts, adds up and writes ``expert_ids``."""

    @cuda.jit
    def main(topk_ids, sorted_ids, expert_ids, cumsum, numel, length):
        tid = int32(cuda.threadIdx.x)
        counts = cuda.shared.array(num_experts, int32)
        if cuda.blockIdx.x == 1:
            for i in range(tid, length, threads):
                sorted_ids[i] = numel
        else:
            for e in range(tid, num_experts, threads):
                counts[e] = 0
            cuda.syncthreads()
            for i in range(tid, numel, threads):
                cuda.atomic.add(counts, topk_ids[i], 1)
            cuda.syncthreads()
            if tid == 0:
                total = int32(0)
                for e in range(num_experts):
                    cumsum[e] = total
                    blocks = int32((counts[e] + block_size - 1) // block_size)
                    for b in range(blocks):
                        expert_ids[total // block_size + b] = e
                    total = int32(total + blocks * block_size)
                cumsum[num_experts] = total

    return main


@cuda.jit
def sort(topk_ids, sorted_ids, cumsum, numel):
    i = cuda.grid(1)
    if i < numel:
        sorted_ids[cuda.atomic.add(cumsum, topk_ids[i], 1)] = i


def align_under_seeds(seeds):
    """Run both kernels under many orders of threads.

    Returns the sorted ids of each run, the number of runs with a data race, and that of wrong runs.
    """
    torch.manual_seed(0)
    numel = 40
    topk_ids = torch.randint(FEW_EXPERTS, (numel,), dtype=torch.int32)
    length = old_length(numel, FEW_EXPERTS, BLOCK_SIZE)
    results, races, wrong = [], 0, 0
    for seed in range(seeds):
        sorted_ids, expert_ids = (torch.full((n,), -7, dtype=torch.int32) for n in (length, length // BLOCK_SIZE))
        cumsum = torch.full((FEW_EXPERTS + 1,), -7, dtype=torch.int32)
        try:
            with simulator.seed(seed), simulator.races():
                kernel = make_main(FEW_EXPERTS, BLOCK_SIZE, THREADS)
                launch(kernel, 2, THREADS, topk_ids, sorted_ids, expert_ids, cumsum, numel, length)
                total = int(cumsum[-1])
                launch(sort, -(-numel // THREADS), THREADS, topk_ids, sorted_ids, cumsum, numel)
        except simulator.DataRace:
            races += 1
            continue
        slots = sorted_ids[:total].tolist()
        of_expert = [int(topk_ids[s]) == int(expert_ids[i // BLOCK_SIZE]) for i, s in enumerate(slots) if s < numel]
        wrong += not all(of_expert) or sorted(s for s in slots if s < numel) != list(range(numel))
        results.append([slots, numel])
    return results, races, wrong


@cache
def _runs(seeds=20):
    return in_simulator(align_under_seeds, seeds), seeds


def padding_places() -> Found:
    """Count the different sets of places that hold padding, over many orders of the sort kernel's atomics."""
    (results, _, _), seeds = _runs()
    places = {tuple(slot == numel for slot in slots) for slots, numel in results}
    if len(places) != 1:
        return Found(len(places), f"{len(places)} different sets of padded places")
    return Found(1, f"the padding lies at the same places in {len(results)} of {seeds} runs in the simulator")


def runs_without_races() -> Found:
    """Count the runs in which the fill, the main part and the sort kernel have a race or a wrong result."""
    (_, races, wrong), seeds = _runs()
    return Found(races + wrong, f"{races} races and {wrong} wrong results in {seeds} runs in the simulator")


# Barriers in two branches


@cuda.jit
def barriers_in_two_branches(out, fill_threads):
    tid = cuda.threadIdx.x
    if tid < fill_threads:
        out[tid] = 1
        cuda.syncthreads()
        cuda.syncthreads()
        cuda.syncthreads()
        return
    cuda.syncthreads()
    cuda.syncthreads()
    cuda.syncthreads()
    out[tid] = 2


def refusals():
    """Run a kernel whose threads pass three barriers in each of two branches; return the simulator's errors."""
    try:
        launch(barriers_in_two_branches, 1, 64, torch.zeros(64, dtype=torch.int32), 32)
    except simulator.DivergentBarrier as error:
        return [type(error).__name__]
    return []


@cache
def refused_barriers() -> Found:
    found = in_simulator(refusals)
    said = ", ".join(found) or "nothing"
    return Found(
        len(found),
        f"the simulator reports {said}: CUDA allows a barrier in a branch only if all threads of the CTA take it; a "
        "GPU counts arrivals and goes on",
    )
