"""An estimate of a kernel's time on a GPU that is not there: bounds per resource, a time, and what limits it.

The simulator counts how often each warp executes each source line between two barriers, and what the lines access. The
compiler's machine code has the instructions of each line, the clocks until the next one may issue, and the scoreboards
that it waits for. Together they give the time of a warp alone, and the clocks of an SM's pipes that all warps take.

    print(estimate(lambda: kernel[grid, block](x, y)))          # a table: bounds, the time, and how far it may be off

It belongs to the course: the simulator imports nothing of the rest and measures no time, and the latencies are those
that the lessons recorded.
"""

import collections
import functools
import html
import itertools
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines import limits
from moe_numba.course.bench.latencies import latencies
from moe_numba.runtime import sass
from moe_numba.simulator.core.typed_code import reachable
from moe_numba.simulator.profiler.report import Counted, KernelProfile

ISSUE = "issue slots"
# Pipe -> (clocks of a scheduler per instruction of a warp, opcodes). FMA and FMA heavy share lanes, as MUFU and the
# warp-wide reductions do; a shuffle occupies the load/store unit, which the four schedulers share. Clocks are those of
# compute capability 9.0: the table of arithmetic throughput in NVIDIA's CUDA Programming Guide, results per clock and
# SM, divided by 4 schedulers.
PIPES = {
    "FMA": (1, "FADD FADD32I FFMA FFMA32I FMUL FMUL32I"),
    "FMA ": (2, "IMAD IDP"),
    "ALU": (
        2,
        "FCHK FMNMX FMNMX3 FSEL FSET FSETP IABS IADD IADD3 IMNMX ISETP LEA LOP LOP3 MOV P2R PLOP3 PRMT R2P SEL SGXT "
        "SHF SHL SHR BMSK VIADD VIADDMNMX VIMNMX VIMNMX3 VOTE",
    ),
    "XU": (8, "BREV F2F F2FP F2I FLO FRND I2F I2FP MUFU POPC REDUX"),
    "LSU": (4, "ATOMS LD LDG LDL LDS SHFL ST STG STL STS"),
}
PIPE_OF = {opcode: (name.strip(), clocks) for name, (clocks, opcodes) in PIPES.items() for opcode in opcodes.split()}

# Opcode -> the counter of a line that counts its executions in the source.
_MARKERS = {
    **dict.fromkeys(("LD", "LDG", "LDGSTS"), "global_load_requests"),
    **dict.fromkeys(("LDS", "LDSM"), "shared_load_requests"),
    **dict.fromkeys(("ST", "STG"), "global_store_requests"),
    **dict.fromkeys(("STS", "STSM"), "shared_store_requests"),
    **dict.fromkeys(("ATOM", "ATOMG", "RED", "REDG"), "global_atomic_requests"),
    "ATOMS": "shared_atomic_requests",
    "SHFL": "shuffles",
    "REDUX": "reductions",
    "MATCH": "matches",
    "BAR": "barriers",
}
_ENDS = "BRA", "BRX", "EXIT", "RET", "JMP", "BREAK"  # of a basic block
# Clocks until the result of an opcode whose latency the records lack is there.
_OTHER_LATENCY = 20
_L2_BYTES_PER_SM = 64  # of one SM per clock; all SMs together get less of the L2's bandwidth
_L1_BYTES = 256 * 1024  # of an SM, with its shared memory
_L1_CLOCKS, _DRAM_CLOCKS = 40, 560  # of a load that hits in the L1 cache, and of one that comes from DRAM
_SM_RESOURCES = "L1 and shared memory", "L2", "DRAM", "tensor cores"
_SCHEDULER_RESOURCES = ISSUE, "FMA", "ALU", "XU", "LSU"
RESOURCES = (*_SCHEDULER_RESOURCES, *_SM_RESOURCES)
_SECTOR = 32
_SORT_CONTENTION = 688  # counter `sector_contention` of the recorded sort kernel with 32,768 ids of 256 experts


@dataclass(frozen=True)
class Chip:
    """Limits of a GPU: rates in bytes per clock and SM, latencies in clocks, and what is in microseconds by name."""

    sm_count: int
    clock: float
    l2_bytes: float
    dram_bytes: float
    latency: Mapping[str, float]  # opcode -> clocks
    launch_us: float  # of an empty kernel
    dependent_us: float  # the same with programmatic dependent launch
    warp_us: float  # of each warp that an SM starts
    sector_us: float  # from one atomic operation to the next in the same sector
    waits: Mapping[str, float]  # beginning of a wait's name -> clocks


def chip_of(gpu: str) -> Chip:
    """Return the limits of a GPU as recorded; raise a ValueError for one of which docs/results has no latencies."""
    clock, chip = limits.H200.boost_clock, limits.H200
    clocks = {counter: ns * clock / 1e9 for counter, ns in latencies(gpu).ns.items()}
    times = {
        topic: records.recorded(topic, gpu.lower())["diagnosis"]
        for topic in ("align_ladder", "align_one_launch_ladder", "gate_align_ladder")
    }
    launches, barrier = (times["align_one_launch_ladder"][name] for name in ("basics", "barrier alone"))
    sort, clusters = times["align_ladder"]["sort kernel"], times["gate_align_ladder"]["cluster barriers"]
    started = times["align_one_launch_ladder"]["phases of unsigned integers"]["start"]  # 32 warps on each SM
    return Chip(
        chip.sm_count,
        clock,
        chip.l2_bandwidth / chip.sm_count / clock,
        chip.copy_bandwidth / chip.sm_count / clock,
        {opcode: clocks[counter] for opcode, counter in _MARKERS.items() if counter in clocks},
        launches["empty"],
        launches["empty, dependent"],
        (started - launches["empty"]) / 32,
        (sort["as it is"] - times["align_ladder"]["chains"]["empty kernel"]) / _SORT_CONTENTION,
        {
            "grid sync": (barrier["barrier"] - barrier["empty"]) * clock / 1e6,
            "barrier.cluster": (clusters["64"] - clusters["32"]) / 32 * clock / 1e6,
            # A store or an atomic operation reaches the L2, and a load sees it.
            "": clocks["global_atomic_requests"] + clocks["global_load_requests"],
        },
    )


class _Code:
    """A kernel's machine code, and what its instructions cost each execution of a source line."""

    def __init__(self, kernel: KernelProfile, chip: Chip, cold: bool, evicted: float):
        self.kernel, self.chip, self.cold, self.code = kernel, chip, cold, kernel.static.sass
        self.evicted = evicted
        self.warps = sum(launch["warps"] for launch in kernel.launches)
        lines = {(os.path.abspath(line.file), line.line): line for line in kernel.lines}
        first = {(os.path.abspath(file), number): n for (file, number), n in kernel.statements.items()}
        functions = reachable(kernel.function)  # also those that no warp has called
        known = {file for file, _ in lines} | {os.path.abspath(f.__code__.co_filename) for f in functions}
        self.line_of = []
        self.dead = []  # whether an instruction belongs to a statement that no warp has executed
        heads = {  # the lines of `def`, whose instructions every warp executes
            (os.path.abspath(file), n)
            for file, first, last in kernel.spans
            for n in range(
                first, min((n for f, n in lines if f == os.path.abspath(file) and first <= n <= last), default=0)
            )
        }
        own = next((os.path.abspath(file) for (file, *_), name in kernel.spans.items() if name == kernel.name), "")
        for code in self.code:
            file, number = code["site"] or ("", 0)
            if file not in known:  # of an equal function of another file, which Python does not tell apart
                file = own
            self.line_of.append(lines.get((file, first.get((file, number), number))))
            self.dead.append(self.line_of[-1] is None and number > 0 and (file, number) not in heads)
        self.names = [code["opcode"].partition(".")[0] for code in self.code]
        self.blocks = self._find_blocks()
        # Where lanes may have diverged, a warp-wide operation has a second copy, to which converged warps do not go.
        self.slow = {
            n for start, end in self.blocks if "ENDCOLLECTIVE" in self.names[start:end] for n in range(start, end)
        }
        self.loops = self._find_loops()  # number of the first block -> numbers of all
        self.loop_of = [None] * len(self.code)  # the first block of the innermost loop
        for header, body in sorted(self.loops.items(), key=lambda loop: -len(loop[1])):
            for number in body:
                start, end = self.blocks[number]
                self.loop_of[start:end] = [header] * (end - start)
        self.executions, self.owners = self._count()
        self.clocks = self._time()

    def _find_blocks(self):
        """Return the basic blocks, as (first instruction, one after the last)."""
        starts = {0, *(code["target"] for code in self.code if code["target"] is not None)}
        starts |= {n + 1 for n, name in enumerate(self.names) if name in _ENDS}
        starts = sorted(n for n in starts if n < len(self.code))
        return list(zip(starts, [*starts[1:], len(self.code)], strict=True))

    def _find_loops(self):
        """Return the natural loops: branches back to a block through which each path to the branch leads."""
        number_of = {start: number for number, (start, _) in enumerate(self.blocks)}
        before, after = collections.defaultdict(list), collections.defaultdict(list)
        for number, (_, end) in enumerate(self.blocks):
            code, name = self.code[end - 1], self.names[end - 1]
            leaves = name in _ENDS and not code["predicated"] and not code["opcode"].startswith("BRA.DIV")
            for target in {code["target"], None if leaves else end} - {None, len(self.code)}:
                after[number].append(number_of[target])
                before[number_of[target]].append(number)
        everything = (1 << len(self.blocks)) - 1
        dominators, changed = [1] + [everything] * (len(self.blocks) - 1), True
        while changed:
            changed = False
            for number in range(1, len(self.blocks)):
                common = everything
                for other in before[number]:
                    common &= dominators[other]
                found = common | 1 << number
                if found != dominators[number]:
                    dominators[number], changed = found, True
        loops = {}
        for number, targets in after.items():
            for header in targets:
                if dominators[number] >> header & 1 and dominators[number] != everything:
                    body, waiting = loops.setdefault(header, {header}), [number]
                    while waiting:
                        if (each := waiting.pop()) not in body:
                            body.add(each)
                            waiting += before[each]
        return loops

    def _copies(self):
        """Return (loop, line) -> how many copies of the line the loop has, if it has an instruction that is counted."""
        found = collections.defaultdict(collections.Counter)
        for n, (name, line, loop) in enumerate(zip(self.names, self.line_of, self.loop_of, strict=True)):
            if line is not None and name in _MARKERS and n not in self.slow:
                found[loop, line][_MARKERS[name]] += 1
        copies = {}
        for (loop, line), counts in found.items():
            each = {
                counter: max(1, round(getattr(line, counter) / max(line.executions, 1)))
                for counter in counts
                if getattr(line, counter)
            }
            if each:
                copies[loop, line] = statistics.median(max(1, counts[counter] / n) for counter, n in each.items())
        return copies

    def _iterations(self, number_of):
        """Return loop -> its iterations, those of all warps together; a part of the code in no loop has one per warp.

        They are those of lines that no inner loop has, too: the compiler peels iterations off an inner loop.
        """
        counts, lines = collections.defaultdict(list), collections.defaultdict(set)
        for line, loop in zip(self.line_of, self.loop_of, strict=True):
            lines[loop].add(line)
        inner = {
            loop: set().union(*(lines[other] for other, body in self.loops.items() if body < self.loops[loop]))
            for loop in self.loops
        }
        for line, loop in zip(self.line_of, self.loop_of, strict=True):
            if loop is not None and line is not None and line not in inner[loop]:
                counts[loop].append(line.executions / number_of(loop, line))
        most = {loop: sorted(each)[9 * len(each) // 10] for loop, each in counts.items()}
        for (loop, line), copies in self._copies().items():
            if loop in most and line not in inner[loop] and most[loop] > 2 * line.executions / copies:
                most[loop] = line.executions / copies
        return {None: self.warps} | most

    def _repeated(self):
        """Return (loop, line) -> the most frequent number of an opcode of the line, probably its copies; not 1."""
        found = collections.defaultdict(collections.Counter)
        for n, (code, line, loop) in enumerate(zip(self.code, self.line_of, self.loop_of, strict=True)):
            if line is not None and loop is not None and n not in self.slow:
                found[loop, line][code["opcode"]] += 1
        common = {}
        for key, opcodes in found.items():
            numbers = collections.Counter(opcodes.values())
            number = max(numbers, key=lambda number: (numbers[number], -number))
            if 1 < number <= key[1].executions / self.warps:
                common[key] = number
        return common

    def _remainders(self, copies):
        """Return loop -> share of the iterations: of unrolled loops, the copy of the source's loop that does the rest.

        The compiler makes several loops of one: the unrolled one has most copies of each line. It takes as many of the
        iterations as it can.
        """
        loops_of = collections.defaultdict(dict)
        for (loop, line), count in copies.items():
            if loop is not None:
                loops_of[line][loop] = count
        votes = collections.defaultdict(list)
        for line, loops in loops_of.items():
            if len(loops) < 2:
                continue
            main = max(loops, key=loops.get)
            trips = line.executions / self.warps
            for loop, count in loops.items():
                nested = self.loops[loop] >= self.loops[main]
                if loop != main and not nested:
                    enough = trips >= loops[main] > count
                    votes[loop].append(
                        (trips % loops[main]) / trips if enough else 1 / len(loops) if count == loops[main] else 1.0
                    )
                    if not enough and count < loops[main]:
                        votes[main].append(0.0)
            if all(count == loops[main] for count in loops.values()):
                votes[main].append(1 / len(loops))
        return {loop: statistics.median(shares) for loop, shares in votes.items()}

    def _count(self):
        """Return how often the warps that ran execute each instruction, all together, and the line that tells which.

        All instructions of a basic block are executed equally often. The compiler moves some of a line's to blocks that
        other warps execute, too, so the block is taken to be executed with the line that its count comes from.
        """
        copies, counts, owners = self._copies(), [], []
        share, usual = self._remainders(copies), collections.defaultdict(list)
        for (loop, _), count in copies.items():
            usual[loop].append(count)
        usual = {loop: statistics.median(each) for loop, each in usual.items() if loop is not None}
        repeated = self._repeated()
        number_of = lambda loop, line: copies.get((loop, line)) or repeated.get((loop, line)) or usual.get(loop, 1)
        most = self._iterations(number_of)
        for start, end in self.blocks:
            if start in self.slow:
                counts += [0.0] * (end - start)
                owners += [None] * (end - start)
                continue
            loop, strong, weak = self.loop_of[start], [], []
            for n in range(start, end):
                line = self.line_of[n]
                if line is None or self.code[n]["predicated"] and self.names[n] not in _MARKERS:
                    continue
                count = line.executions / number_of(loop, line) * share.get(loop, 1.0)
                count = min(count, most.get(loop, count))
                weak.append((count, n))
                if (loop, line) in copies and self.names[n] in _MARKERS:
                    strong.append((count, n))
            found = sorted(strong or weak)
            if 2 * sum(self.dead[start:end]) > end - start:
                count, owner = 0.0, None
            elif found:
                count, n = found[len(found) // 2 if strong else len(found) // 4]
                owner = self.line_of[n]
            else:
                count, owner = (counts[-1], owners[-1]) if counts and loop is None else (self.warps, None)
            counts += [count] * (end - start)
            owners += [owner] * (end - start)
        return counts, owners

    def _time(self):
        """Return the clocks that a warp alone takes from the instruction before to each instruction."""
        clocks, ready, state = [0.0] * len(self.code), [0.0] * 6, [0.0, 0.0]  # now, of the last issue

        def issue(n):
            code = self.code[n]
            now = max(state[0], *(ready[b] for b in range(6) if code["waits"] >> b & 1), 0.0)
            clocks[n], state[1] = now - state[1], now
            state[0] = now + code["stall"]
            if code["sets"] is not None:
                ready[code["sets"]] = max(ready[code["sets"]], now + self._latency(n))
            if code["sets_read"] is not None:
                ready[code["sets_read"]] = max(ready[code["sets_read"]], now + _OTHER_LATENCY)
            if self.names[n] == "BAR":
                state[0] += 20 + 2 * math.prod(self.kernel.launches[0]["block"]) / 32

        def run(blocks, inside):
            done = set()
            for number in blocks:
                if number in self.loops and number not in inside:
                    for _ in range(2):
                        run(sorted(self.loops[number]), inside | {number})
                    done |= self.loops[number]
                elif number not in done:
                    for n in range(*self.blocks[number]):
                        issue(n)

        run(range(len(self.blocks)), frozenset())
        return clocks

    def _latency(self, n):
        """Return the clocks until the result of an instruction is there."""
        found, line = self.chip.latency.get(self.names[n], _OTHER_LATENCY), self.line_of[n]
        if self.names[n] in ("LD", "LDG") and line is not None and line.global_load_sectors:
            missed = _missed(line, self.evicted) / line.global_load_sectors
            found = _L1_CLOCKS + missed * ((_DRAM_CLOCKS if self.cold else found) - _L1_CLOCKS)
        return found

    def weights(self):
        """Return line -> clocks per execution of the line: of a warp alone, then of each of `RESOURCES`.

        Those of a scheduler count one scheduler's, the others an SM's. The second result is the same for instructions
        of no line that ran, for each warp.
        """
        found = collections.defaultdict(lambda: np.zeros(1 + len(RESOURCES)))
        for n, count in enumerate(self.executions):
            cost = found[self.owners[n]]
            cost[0] += count * self.clocks[n]
            cost[1] += count
            if self.names[n] in PIPE_OF:
                pipe, clocks = PIPE_OF[self.names[n]]
                cost[1 + RESOURCES.index(pipe)] += count * clocks
        other = found.pop(None, np.zeros(1 + len(RESOURCES))) / self.warps
        return {line: cost / max(line.executions, 1) for line, cost in found.items()}, other


def _missed(line, evicted):
    """Return the sectors of a line's loads that miss the L1 cache, which has evicted a share of those loaded before."""
    return line.global_load_first_sectors * (1 - evicted) + line.global_load_sectors * evicted


def _evicted(kernel, resident):
    """Return the share of the sectors of resident blocks for which an SM's L1 cache has no room."""
    blocks = sum(launch["blocks"] for launch in kernel.launches)
    loaded = _SECTOR * kernel.total.global_load_first_sectors / blocks * resident
    room = _L1_BYTES - resident * kernel.launches[0]["shared_bytes"]
    return max(1 - room / loaded, 0.0) if loaded else 0.0


def _memory_weights(line: Any, chip: Chip, evicted: float) -> np.ndarray:
    """Return the clocks of an SM for what one execution of a line accesses, for each of `RESOURCES`."""
    found = np.zeros(1 + len(RESOURCES))
    wavefronts = line.shared_load_wavefronts + line.shared_store_wavefronts + line.shared_atomic_requests
    wavefronts += sum(each.wavefronts for (space, *_), each in line.accesses.items() if space == "global")
    updated = sum(
        each.sectors for (space, what, _), each in line.accesses.items() if (space, what) == ("global", "atomic")
    )
    sectors = _missed(line, evicted) + line.global_store_sectors + updated
    nbytes = _SECTOR * sectors + line.async_bytes
    found[0] = sum(count * _wait_clocks(what, chip) for what, count in line.waits.items())
    found[1 + RESOURCES.index("L1 and shared memory")] = wavefronts
    found[1 + RESOURCES.index("L2")] = nbytes / _L2_BYTES_PER_SM
    found[1 + RESOURCES.index("tensor cores")] = sum(
        operation.count * _tensor_clocks(name) for name, operation in line.operations.items()
    )
    return found / max(line.executions, 1)


def _wait_clocks(what, chip):
    """Return the clocks of a wait by its name; those of a barrier of a block are in the machine code."""
    if what.startswith(("syncthreads", "barrier ", "mbarrier")):
        return 0.0
    return next(clocks for name, clocks in chip.waits.items() if what.startswith(name))


def _tensor_clocks(name):
    """Return the clocks of an SM's tensor cores for a wgmma, by the name of the operation with its shape."""
    if not (shape := re.match(r"wgmma m(\d+)n(\d+)k(\d+)", name)):
        return 0.0
    m, n, k = map(int, shape.groups())
    return 2 * m * n * k / (4096 if k <= 16 else 8192)  # 16-bit, 8-bit operands


@dataclass(frozen=True)
class _Work:
    """What the blocks of a kernel that ran, or some lines of it, take on an SM, in clocks."""

    alone: list[float]  # of each distinct block: its warps between two barriers, each as if it had its own scheduler
    single: list[float]  # the same, if the block has an SM of its own
    demand: dict[str, float]  # resource -> clocks of a block, on average

    @classmethod
    def of(cls, counted: Counted, chip: Chip, cold: bool = False, resident: int = 1) -> "_Work":
        kernel, size = counted.kernel, 1 + len(RESOURCES)
        code, evicted = kernel.static.sass, _evicted(kernel, resident)
        has_lines = any(each["site"] for each in code)
        weights, other = _Code(kernel, chip, cold, evicted).weights() if has_lines else ({}, np.zeros(size))
        chosen = list(counted.lines)
        if counted is not kernel:
            other = np.zeros(size)
        weights = {line: weights.get(line, np.zeros(size)) + _memory_weights(line, chip, evicted) for line in chosen}
        blocks = sum(launch["blocks"] for launch in kernel.launches)
        warps = -(-math.prod(kernel.launches[0]["block"]) // 32)
        schedulers, alone, single = slice(1, 1 + len(_SCHEDULER_RESOURCES)), [], []
        for work in kernel.phases.per_warp(weights) if weights else ():
            work[:1, :warps] += other
            busy = work.sum(1)
            busy[:, schedulers] = work.reshape(len(work), -1, 4, size).sum(1).max(1)[:, schedulers]
            path = work[:, :, 0].max(1)
            alone.append(float(path.sum()))
            single.append(float(np.maximum(path, busy[:, 1:].max(1)).sum()))
        if not has_lines:  # the compiler names no lines of kernels with setmaxnreg
            alone = single = [counted.longest_chain(latencies(kernel.static.gpu).ns) * chip.clock / 1e9]
        total = sum((weights[line] * line.executions for line in chosen), np.zeros(size)) / blocks + other * warps
        total[schedulers] /= 4
        return cls(alone, single, dict(zip(RESOURCES, total[1:].tolist(), strict=True)))


@dataclass(frozen=True)
class LaunchEstimate:
    """The estimate of one launch: its kernel's name, resource -> bound in microseconds, and a time."""

    name: str
    bounds: dict[str, float]
    us: float


def _estimate_launch(kernel: KernelProfile, launch: dict, occupancy: Any, chip: Chip, cold: bool) -> LaunchEstimate:
    ran = sum(each["blocks"] for each in kernel.launches)
    blocks, warps = math.prod(launch["grid"]), -(-math.prod(launch["block"]) // 32)
    per_sm = max(blocks / chip.sm_count, 1.0)
    resident = max(min(occupancy.blocks_per_sm, math.ceil(per_sm)), 1)
    work = _Work.of(kernel, chip, cold, resident)
    waves = math.ceil(blocks / (resident * chip.sm_count))
    demand, share = dict(work.demand), min(blocks / chip.sm_count, 1.0)  # of the SMs that have a block
    demand["L2"] *= max(1.0, share * _L2_BYTES_PER_SM / chip.l2_bytes)
    if cold:  # each byte comes from DRAM once
        total = kernel.total
        sectors = total.global_load_first_sectors + total.global_store_sectors
        moved = (sectors * _SECTOR + total.async_bytes) * blocks / ran
        demand["DRAM"] = share * min(moved, launch["argument_bytes"] or moved) / blocks / chip.dram_bytes
    us = lambda clocks: clocks / chip.clock * 1e6
    one = max(work.single, default=0.0) if waves == 1 else statistics.mean(work.single)
    pipes, memory = (max(demand[name] for name in names) for names in (_SCHEDULER_RESOURCES, _SM_RESOURCES))
    first, second = max(pipes, memory), min(pipes, memory)
    # All blocks of a wave load before they compute, so that within a wave one of the two does not hide the other.
    busy = max(waves * one, one + (per_sm - 1) * first + (resident - 1) * second)
    contention = max((line.sector_contention for line in kernel.lines), default=0) * blocks / ran * chip.sector_us
    start = (chip.dependent_us if launch["dependent"] else chip.launch_us) + chip.warp_us * warps * resident
    bounds = {"launch": start, "dependent chain": us(waves * max(work.alone, default=0.0))}
    bounds |= {name: us(per_sm * clocks) for name, clocks in demand.items()} | {"atomics": contention}
    return LaunchEstimate(kernel.name, bounds, start + max(us(busy), contention))


@dataclass(frozen=True)
class Estimate:
    """Bounds and a time of some launches, one after the other; ``str`` is a table, notebooks display HTML.

    Attributes
    ----------
    gpu : str
    launches : tuple of LaunchEstimate
    """

    gpu: str
    launches: tuple[LaunchEstimate, ...]

    @property
    def us(self) -> float:
        """The estimated time in microseconds."""
        return sum(launch.us for launch in self.launches)

    @property
    def bounds(self) -> dict[str, float]:
        """Resource -> the time in microseconds that it takes alone, of all launches; zeros are left out."""
        names = dict.fromkeys(name for launch in self.launches for name in launch.bounds)
        found = {name: sum(launch.bounds[name] for launch in self.launches) for name in names}
        return {name: us for name, us in found.items() if us > 0}

    @property
    def limited_by(self) -> str:
        """The resource with the largest bound."""
        return max(self.bounds, key=self.bounds.__getitem__)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table: name and text."""
        kernels = ", ".join(dict.fromkeys(launch.name for launch in self.launches))
        rows = [(name, f"{us:.2f} us") for name, us in self.bounds.items() if us >= 0.005]
        return [(f"bounds on an {self.gpu}", kernels), *rows, ("estimated time", f"{self.us:.2f} us")]

    @property
    def note(self) -> str:
        """Sentences below the table: what limits, and how far recorded times are off."""
        return f"{self.limited_by} limits. {describe_error(self.gpu)}"

    def __str__(self):
        return "\n".join([*(f"{name:<24}{text:>14}" for name, text in self.rows()), self.note])

    __repr__ = __str__

    def _repr_html_(self):
        cells = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in self.rows())
        return f"<table>{cells}</table><div>{html.escape(self.note)}</div>"


def estimate(
    run: Callable[[], object], gpu: str = "H200", *, cold: bool = False, blocks: int | None = None
) -> Estimate:
    """Run launches in the simulator, compile their kernels, and estimate how long they take on a GPU.

    Parameters
    ----------
    run : callable
        ``run()`` launches the kernels, with the sizes that the estimate is for.
    gpu : str
        One whose latencies are recorded: "H200".
    cold : bool
        Inputs come from DRAM; otherwise they are in the L2 cache, as after the kernel before.
    blocks : int, optional
        Simulate only about so many blocks of larger grids (`simulator.profile`), and take the others to do the same.

    Raises
    ------
    RuntimeError
        Kernels run on a GPU here, or the compiler or nvdisasm is missing.
    ValueError
        The GPU has no recorded latencies, or ``run`` launched no kernel.
    """
    if not simulator.ENABLED:
        raise RuntimeError("the simulator counts, and kernels run on a GPU here: measure instead")
    chip_of(gpu)
    with simulator.profile(gpu, blocks) as profile:
        run()
    return estimate_of(profile.kernels, gpu, cold)


def estimate_of(kernels: Iterable[KernelProfile], gpu: str = "H200", cold: bool = False) -> Estimate:
    """Return the estimate of kernels that were profiled for a GPU; parameters and errors as of `estimate`."""
    chip, found = chip_of(gpu), []
    for kernel in kernels:
        _check_compiled(kernel)
        for launch, occupancy in zip(kernel.launches, kernel.static.occupancy, strict=True):
            found.append(_estimate_launch(kernel, launch, occupancy, chip, cold))
    if not found:
        raise ValueError("run launched no kernel, so there is nothing to estimate")
    return Estimate(gpu, tuple(found))


def clocks_by_function(kernel: KernelProfile, gpu: str = "H200") -> dict[str, dict[str, float]]:
    """Return function -> pipe or "issue slots" -> clocks of a scheduler that a warp takes in it, on average.

    The kernel was profiled for the GPU. Device functions count where the compiler has inlined them.
    """
    _check_compiled(kernel)
    code, found = _Code(kernel, chip_of(gpu), False, 0.0), {}
    for line, name, count in zip(code.line_of, code.names, code.executions, strict=True):
        function = kernel.name if line is None else line.function
        clocks = found.setdefault(function, dict.fromkeys(_SCHEDULER_RESOURCES, 0.0))
        clocks[ISSUE] += count / code.warps
        if name in PIPE_OF:
            pipe, each = PIPE_OF[name]
            clocks[pipe] += count * each / code.warps
    return found


def part_us(counted: Counted, gpu: str = "H200") -> float:
    """Return the estimated time of one block in a kernel that was profiled for a GPU, or in some functions of it."""
    _check_compiled(counted.kernel)
    chip = chip_of(gpu)
    return max(_Work.of(counted, chip).single, default=0.0) / chip.clock * 1e6


class NoCompiler(RuntimeError):
    """The compiler or nvdisasm is not installed, so that kernels have no machine code."""


def require_compiler() -> None:
    """Raise `NoCompiler` where kernels cannot be compiled: a lesson that shows machine code has no numbers then."""
    if missing := sass.missing():
        raise NoCompiler(f"this looks at machine code: {missing}")


def _check_compiled(kernel):
    if kernel.static is None or not kernel.static.sass:
        require_compiler()
        reason = kernel.static and kernel.static.reason
        raise RuntimeError(f"the machine code of kernel {kernel.name} is unknown: {reason}")


# What `judge_estimates` has recorded.

_NOISE = 1.02  # factor between two recorded times that may be noise; the lessons take it for that, too
_WITHIN = 1.3  # factor of a time that counts as right


@functools.cache
def judged(gpu: str = "H200") -> list[dict]:
    """Return the recorded comparison with the ladders: topic, step, recorded_us, estimated_us, limited_by of a step."""
    path = records.results() / "estimates.json"
    return json.loads(path.read_text()).get(gpu.lower(), []) if path.is_file() else []


def summary(rows: Iterable[Mapping]) -> dict[str, float]:
    """Return how good estimates are: the share within 30 %, and of neighbouring steps those in the right order.

    "median" and "p90" are factors between estimated and recorded times; 90 % of them are at most the second.
    """
    rows = list(rows)
    factors = sorted(max(r["estimated_us"] / r["recorded_us"], r["recorded_us"] / r["estimated_us"]) for r in rows)
    neighbours = [(a, b) for a, b in itertools.pairwise(rows) if a["topic"] == b["topic"]]
    signs = [
        (a["estimated_us"] < b["estimated_us"]) == (a["recorded_us"] < b["recorded_us"])
        for a, b in neighbours
        if max(a["recorded_us"], b["recorded_us"]) > _NOISE * min(a["recorded_us"], b["recorded_us"])
    ]
    return {
        "steps": len(rows),
        "within": sum(factor <= _WITHIN for factor in factors) / max(len(rows), 1),
        "pairs": len(signs),
        "ordered": sum(signs) / max(len(signs), 1),
        "median": statistics.median(factors) if factors else math.inf,
        "p90": factors[math.ceil(0.9 * len(factors)) - 1] if factors else math.inf,
    }


def describe_error(gpu: str = "H200") -> str:
    """Return a sentence on how far estimates are off."""
    if not (rows := judged(gpu)):
        return "How far estimates are off was not judged."
    found = summary(rows)
    return (
        f"Of {found['steps']} steps recorded on an {gpu}, 90 % have estimates within a factor of {found['p90']:.1f}, "
        f"and half within {found['median']:.2f}; {found['ordered']:.0%} of {found['pairs']} neighbouring steps that "
        f"differ by more than {_NOISE - 1:.0%} are in the right order."
    )


def error_factor(gpu: str = "H200") -> float:
    """Return the factor between estimated and recorded times that 90 % of the estimates stay within."""
    return summary(judged(gpu))["p90"]
