# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Align: sort the token slots by expert
#
# The gate ([01](01_gate.ipynb)) has chosen 8 experts for every token. Before the experts' GEMMs can run, the token slots
# must be sorted by expert, and each expert's slots padded to whole blocks. This is `moe_align_block_size`. It moves almost no
# data; its time is latency, and this notebook measures which latency.
#
# It follows an article on SGLang's kernel
# ([`moe_align_kernel.cu`](https://github.com/sgl-project/sglang/blob/main/sgl-kernel/csrc/moe/moe_align_kernel.cu)), whose
# five versions you will build, measure and take apart:
#
# | version | what it changes | author |
# |---|---|---|
# | 0x1 | the baseline: a main kernel and a sort kernel, and one small kernel for few slots | the article's author |
# | 0x2 | the main kernel fills the padding ([PR 7437](https://github.com/sgl-project/sglang/pull/7437)) | ispobock |
# | 0x3 | a parallel prefix sum, and a binary search ([PR 7794](https://github.com/sgl-project/sglang/pull/7794)) | ispobock |
# | 0x4 | a prefix sum from warp shuffles ([PR 7884](https://github.com/sgl-project/sglang/pull/7884)) | yuan-luo |
# | 0x5 | a second CTA fills; shorter buffers ([PR 14133](https://github.com/sgl-project/sglang/pull/14133)) | the community |

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import warnings
from functools import cache, partial

import torch
from IPython.display import HTML
from numba import cuda, int32, uint32

from moe_numba import simulator
from moe_numba.align.reference import moe_align_block_size as reference
from moe_numba.align.reference import sizes
from moe_numba.course.align_runs import poisoned, random_ids, wrong
from moe_numba.course.bench import kernel_time, plots, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.draw import align as draw
from moe_numba.course.draw.dispatch_layout import banks
from moe_numba.course.draw.phases import phase_bars
from moe_numba.course.draw.player import Player
from moe_numba.course.draw.shared_frames import barrier_steps
from moe_numba.course.draw.warp_frames import shuffles
from moe_numba.course.exercises import exercise
from moe_numba.course.instruction_mix import instruction_mix
from moe_numba.course.kernel_phases import phases_of, until, without_earlier
from moe_numba.course.ladder import Ladder
from moe_numba.course.prose import say
from moe_numba.course.simulate import changed_source, define, in_simulator
from moe_numba.course.source_diff import OpCounter, change
from moe_numba.ptx.memory import atom_add_s32, st_global_s32x4
from moe_numba.runtime import sass
from moe_numba.runtime.launch import launch

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # these kernels have one CTA, on purpose

# %% jupyter={"source_hidden": true} tags=["hide-input"]
LADDER, ALIGN = records.recorded("align_ladder"), records.recorded("align")
CASE = {"config": {"num_experts": 256, "topk": 8, "block_size": 16}, "size": {"tokens": 4096}}


def recorded_us(record, step):
    """The recorded kernel time of a step for 4096 tokens, or None."""
    row = record and records.find(record, step=step, **CASE)
    return row["kernel_us"]["median"] if row and "kernel_us" in row else None


first_us, last_us = recorded_us(LADDER, "0x1 baseline"), recorded_us(LADDER, "0x5 parallel fill")
sglang_us, final_us = recorded_us(ALIGN, "peer:sglang-aot"), recorded_us(ALIGN, "final")
say(
    "**Result**, recorded on an H200, 4096 tokens, 256 experts, top-8, blocks of 16: the Numba port of 0x1 takes {first:.1f} "
    "us, the port of 0x5 {last:.1f} us. SGLang's own compiled kernel, which 0x5 became, takes {peer:.1f} us, so the port {verdict} it. The "
    "package's final kernel, which [03_align_one_launch](03_align_one_launch.ipynb) builds, takes {final:.1f} us and returns "
    "the same order in every run.",
    first=first_us,
    last=last_us,
    peer=sglang_us,
    verdict=last_us and sglang_us and ("is slower than" if last_us > sglang_us else "is not slower than"),
    final=final_us,
)

# %% [markdown]
# ## 1. The problem
#
# Each element of the gate's `topk_ids` is a **slot**; slot `s` belongs to token `s // topk`. A grouped GEMM works on **expert
# blocks** of, say, 16 rows, and all rows of a block must belong to one expert. The function returns
#
# - `sorted_token_ids`: the slots sorted by expert; each expert's part is padded to whole blocks with the number of slots,
#   `numel`, which no slot has;
# - `expert_ids`: the expert of each block;
# - `num_tokens_post_pad`: how much of `sorted_token_ids` is used. The array is as long as the worst routing needs; the rest
#   is the **tail**.

# %%
torch.manual_seed(0)
example = random_ids(6, 4, 2)
draw.problem(example, block_size=4, num_experts=4)

# %% [markdown]
# This is a **counting sort**: (1) **count** the slots of each expert, a **histogram**; (2) compute the **exclusive prefix
# sum** (scan) of the padded counts, which is where each expert starts; (3) write `expert_ids`; (4) **scatter** every slot to
# its place. In torch, for the example:

# %%
ids, numel, block = example.flatten().long(), example.numel(), 4
counts = torch.bincount(ids, minlength=4)
padded = (counts + block - 1) // block * block
starts, before = padded.cumsum(0) - padded, counts.cumsum(0) - counts
order = ids.argsort(stable=True)
place = starts[ids[order]] + torch.arange(numel) - before[ids[order]]
print("counts", counts.tolist(), "padded", padded.tolist(), "starts", starts.tolist())
print("sorted_token_ids", torch.full((int(padded.sum()),), numel).scatter_(0, place, order).tolist())
print("expert_ids      ", torch.arange(4).repeat_interleave(padded // block).tolist())

# %% [markdown]
# `wrong(outputs, ...)` compares a result with the package's reference. The article's kernels leave the slots of an expert in
# any order and do not write parts of the tails; their results say so with the tags "any order" and "any tail". Everything
# else must match, and outputs are poisoned before a kernel runs. The sizes may be changed:

# %%
SIMULATED = simulator.ENABLED
DEVICE = "cpu" if SIMULATED else "cuda"
EXPERTS, TOPK = (64, 4) if SIMULATED else (256, 8)  # DeepSeek-V3: 256 experts, top-8
TOKENS, FEW_TOKENS = (64, 8) if SIMULATED else (4096, 64)
BLOCK = 16  # rows of a block of the GEMM
THREADS = 128 if SIMULATED else 1024  # of a CTA; at least as many as experts
SMALL_EXPERTS = 16 if SIMULATED else 64  # for the small kernel

IDS = random_ids(TOKENS, EXPERTS, TOPK, DEVICE)
SKEWED = IDS[:1].repeat(TOKENS, 1).contiguous()  # all tokens choose the same experts
OTHERS = {"one": IDS[:1].contiguous(), "few": IDS[:FEW_TOKENS].contiguous(), "skewed": SKEWED}
NUMEL, LENGTH = IDS.numel(), sizes(IDS.numel(), BLOCK, EXPERTS)[0]
print(f"{NUMEL} slots, {LENGTH} places, of which {int(reference(IDS, BLOCK, EXPERTS)[2])} are used")
print("the reference:", wrong(reference(IDS, BLOCK, EXPERTS), IDS, EXPERTS, BLOCK))
print("poison:       ", wrong(poisoned(IDS, EXPERTS, BLOCK), IDS, EXPERTS, BLOCK))

# %% [markdown]
# ## 2. Lower bound
#
# The bytes are no limit: each id is read once, each output written once, and an empty kernel takes longer than that. What
# costs time is a chain of operations that wait for each other: load an id, add to a counter, wait at a barrier. The next cell
# measures what one link of such a chain costs, in kernels whose every operation needs the result of the one before.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
FULL = 0xFFFFFFFF  # all 32 lanes


@cuda.jit
def chain_of_loads(links, out, n):
    at = int32(0)
    for _ in range(n):
        at = links[at]  # the next address is what this load returns
    out[0] = at


@cuda.jit
def chain_of_shared_loads(links, out, n):
    shared_links = cuda.shared.array(32, int32)
    shared_links[cuda.threadIdx.x] = links[cuda.threadIdx.x] & 31
    cuda.syncthreads()
    at = int32(0)
    for _ in range(n):
        at = shared_links[at]
    out[cuda.threadIdx.x] = at


@cuda.jit
def chain_of_shared_atomics(links, out, n):
    counter = cuda.shared.array(1, int32)
    counter[0] = 0
    at = int32(0)
    for _ in range(n):
        at = cuda.atomic.add(counter, at >> 31, 1)  # the sign of what came back, 0, is the next index
    out[0] = at


@cuda.jit
def chain_of_shuffles(links, out, n):
    value = links[cuda.threadIdx.x]
    for _ in range(n):
        value = cuda.shfl_xor_sync(FULL, value, 1)
    out[cuda.threadIdx.x] = value


@cuda.jit
def chain_of_barriers(links, out, n):
    for _ in range(n):
        cuda.syncthreads()
    out[cuda.threadIdx.x] = n


@cuda.jit
def chain_of_atomics(links, out, n):
    at = int32(0)
    for _ in range(n):
        at = atom_add_s32(out, at >> 31, 1)
    out[1] = at


CHAINS = {
    "a load from the L2": (chain_of_loads, 1),
    "a shared load": (chain_of_shared_loads, 32),
    "a shared atomic": (chain_of_shared_atomics, 1),
    "a shuffle": (chain_of_shuffles, 32),
    "a barrier": (chain_of_barriers, THREADS),
    "a global atomic": (chain_of_atomics, 1),
}


def chain_calls(links):
    """A call for each chain, once and twice as long, and one for a kernel that does nothing."""
    steps = torch.randperm(1 << 10 if SIMULATED else 1 << 20, device=DEVICE)  # 4 MB on a GPU: in L2, not in L1
    path = torch.empty_like(steps, dtype=torch.int32)
    path[steps] = steps.roll(-1).int()  # one cycle through all elements
    out = torch.zeros(THREADS, dtype=torch.int32, device=DEVICE)
    calls = {"empty kernel": partial(launch, chain_of_loads, 1, 32, path, out, 0)}
    for name, (kernel, threads) in CHAINS.items():
        for n in (links, 2 * links):
            calls[f"{name} x {n}"] = partial(launch, kernel, 1, threads, path, out, n)
    return calls


# %%
E, T, K = (256, 4096, 8) if SIMULATED else (EXPERTS, TOKENS, TOPK)  # of the times: without a GPU, of the record
N, TIMED_LENGTH = T * K, sizes(T * K, BLOCK, E)[0]
ladder = Ladder(
    "align_ladder",
    partial(wrong, ids=IDS, num_experts=EXPERTS, block_size=BLOCK),
    f"Align, step by step: {T} tokens, {E} experts, top-{K}, blocks of {BLOCK}",
    "torch",
    config={"num_experts": EXPERTS, "topk": TOPK, "block_size": BLOCK},
    size={"tokens": TOKENS},
)
us = ladder.median_us  # a step's kernel time, measured now or recorded
LINKS = 8 if SIMULATED else 1024
chains = ladder.times("chains", chain_calls(LINKS))
NS, EMPTY_US = {}, 0.0  # nanoseconds of one link; microseconds of an empty kernel
if chains:
    EMPTY_US = chains["empty kernel"]
    NS = {name: 1000 * (chains[f"{name} x 2048"] - chains[f"{name} x 1024"]) / 1024 for name in CHAINS}
KNOWN = bool(NS)  # whether times are measured or recorded, for the predictions
BYTES = 4 * (NUMEL + LENGTH + LENGTH // BLOCK + 1)
LIMITS = chip_limits()
FLOOR_US = max(BYTES / LIMITS.copy_bandwidth * 1e6, EMPTY_US)
print(LIMITS, f"\n{BYTES} bytes: {BYTES / LIMITS.copy_bandwidth * 1e6:.2f} us")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "An empty kernel takes {empty:.2f} us. One link takes: {links}.",
    empty=EMPTY_US or None,
    links=", ".join(f"{name} {ns:.0f} ns" for name, ns in NS.items()) or None,
)

# %% [markdown]
# ## 3. The ladder
#
# Each version is checked, and timed, for the main input, for few tokens, for one token and for tokens that all choose the same
# experts. Steps are compared by the main input.


# %%
CUMSUM = torch.empty(EXPERTS + 1, dtype=torch.int32, device=DEVICE)


def measure(name, run, **more):
    """Check ``run(ids, outputs)`` for all inputs, and time it for each of them."""
    with ladder.attempt(name, "int32"):
        for which, ids in OTHERS.items():
            outputs = poisoned(ids, EXPERTS, BLOCK)
            error = wrong(run(ids, outputs), ids, EXPERTS, BLOCK)
            assert error is None, f"{name}, {which}: {error}"
            time = kernel_time(partial(run, ids, outputs))
            more[f"{which}_us"] = time and time.median
        outputs = poisoned(IDS, EXPERTS, BLOCK)
        ladder.step(name, partial(run, IDS, outputs), dtype="int32", floor_us=FLOOR_US, bytes=BYTES, **more)


def predict(gain_us):
    """Print what a step should change; None, because a time that this needs is not recorded, counts as no change."""
    print("predicted:", "unknown, no times are recorded" if gain_us is None else f"{-gain_us:+.2f} us")
    return gain_us or 0.0


# %% [markdown]
# ### Step 0: torch
#
# The reference without operations that wait for the GPU, so that a CUDA graph can hold it.


# %%
def torch_align(ids, outputs=None):
    flat, numel = ids.flatten().long(), ids.numel()
    length, num_blocks = sizes(numel, BLOCK, EXPERTS)
    order = flat.argsort(stable=True)
    expert = flat[order]
    counts = torch.zeros(EXPERTS, dtype=torch.long, device=DEVICE).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    ends = padded.cumsum(0)
    rank = torch.arange(numel, device=DEVICE) - (counts.cumsum(0) - counts)[expert]
    sorted_token_ids = torch.full((length,), numel, dtype=torch.int32, device=DEVICE)
    sorted_token_ids.scatter_(0, (ends - padded)[expert] + rank, order.int())
    expert_ids = torch.searchsorted(ends, torch.arange(num_blocks, device=DEVICE) * BLOCK, right=True)
    expert_ids = torch.where(expert_ids < EXPERTS, expert_ids, -1)
    return sorted_token_ids, expert_ids.int(), ends[-1:].int()


with OpCounter() as count:
    torch_align(IDS)
print(len(count.names), "operations, each at least one kernel")
measure("torch", torch_align, latency_ns=NS or None, operations=len(count.names))

# %% [markdown]
# ### Step 1: the baseline, 0x1
#
# **Bottleneck.** Dozens of operations, each at least one kernel.
#
# **Idea.** Two kernels of our own. The **main kernel** is a single CTA of 1024 threads. It counts into shared memory with
# atomic additions, one thread computes the scan, and one thread per expert writes `expert_ids`. The **sort kernel** has many
# CTAs: each thread takes a slot, adds 1 to its expert's `cumsum` and gets the slot's place. Before both, torch fills
# `sorted_token_ids` with `numel`.
#
# SGLang passes `experts_per_warp = 32`, as if each warp counted for its own 32 experts. The index says otherwise: `expert //
# 32 * 32 + expert % 32` is `expert`, and all threads add to all counters. Comment lines such as `# scan` mark the phases;
# later cells use them.


# %%
@cuda.jit(device=True)
def round_up(count, block_size):
    return int32(uint32(count + block_size - 1) // uint32(block_size) * uint32(block_size))


@cache
def make_baseline(num_experts, experts_per_warp=32):
    padded_num_experts = -(-num_experts // 32) * 32

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(padded_num_experts, int32)
        tid, stride = cuda.threadIdx.x, cuda.blockDim.x
        # count
        my_expert_start = tid // 32 * experts_per_warp
        for i in range(experts_per_warp):
            if my_expert_start + i < padded_num_experts:
                shared_counts[my_expert_start + i] = 0
        cuda.syncthreads()
        for i in range(tid, numel, stride):
            warp, offset = topk_ids[i] // experts_per_warp, topk_ids[i] % experts_per_warp
            cuda.atomic.add(shared_counts, warp * experts_per_warp + offset, 1)
        cuda.syncthreads()
        # scan
        if tid == 0:
            start = int32(0)
            cumsum[0] = start
            for i in range(num_experts):
                warp, offset = i // experts_per_warp, i % experts_per_warp
                start = int32(start + round_up(shared_counts[warp * experts_per_warp + offset], block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        # expert_ids
        if tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid

    return kernel


# %% [markdown]
# C++ template parameters such as the number of experts are **closure constants** here: `make_baseline(256)` returns a kernel
# compiled for 256. `int32(...)` keeps sums in 32 bits; Numba's integers are 64 bits wide otherwise
# ([01](01_gate.ipynb) shows what that costs). The sort kernel and the host code:


# %%
@cuda.jit
def count_and_sort(topk_ids, sorted_token_ids, cumsum, numel):
    for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
        rank_post_pad = atom_add_s32(cumsum, topk_ids[i], 1)
        sorted_token_ids[rank_post_pad] = i


def launch_main(kernel, ids, outputs, cumsum, block_size=BLOCK, ctas=1):
    launch(kernel, ctas, THREADS, ids, *outputs, cumsum, block_size, ids.numel(), len(outputs[0]))


def run_both(kernel, ids, outputs, cumsum=None, block_size=BLOCK, ctas=1):
    cumsum = CUMSUM if cumsum is None else cumsum
    launch_main(kernel, ids, outputs, cumsum, block_size, ctas)
    launch(count_and_sort, -(-ids.numel() // 256), 256, ids, outputs[0], cumsum, ids.numel())
    return *outputs, "any order", "any tail"


def run_baseline(ids, outputs):
    outputs[0].fill_(ids.numel())
    return run_both(make_baseline(EXPERTS), ids, outputs)


# %% [markdown]
# **Predicted gain.** Three launches. Counting waits for a load from L2 in every iteration. The scan is a loop of one thread:
# its time is its instructions, one per 4 clocks if each needs the result of the one before. SASS shows how many there are per
# expert. The sort kernel waits for a load and for an atomic operation.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
POINTERS_AND_SIZES = ("int32*",) * 5 + ("int32",) * 3


@cache
def opcodes_of(make):
    """The SASS instructions of a version for 256 experts, in order; empty without nvdisasm."""
    if sass.disassembler() is None:
        print("nvdisasm is missing: install nvidia-cuda-nvdisasm")
        return []
    mix = instruction_mix({"kernel": (f"{make.__name__}(256)", POINTERS_AND_SIZES, 1024)}, functions=[make])
    return mix.codes["kernel"].opcodes


def instructions_per_expert(make):
    """SASS instructions of the scan's loop, with its set-up, per expert; None without nvdisasm."""
    opcodes = opcodes_of(make)
    branches = [n for n, opcode in enumerate(opcodes) if opcode.startswith("BRA")]
    loads = [n for n, opcode in enumerate(opcodes) if opcode.startswith("LDS")]  # one per expert
    if not loads:
        return None
    start, end = max(n for n in branches if n < loads[0]), min(n for n in branches if n > loads[0])
    return (end - start) / sum(start < n < end for n in loads)  # the compiler unrolls the loop


# %%
PER_EXPERT = instructions_per_expert(make_baseline)
PREDICTED = {}  # microseconds of each phase
if KNOWN and PER_EXPERT:
    PREDICTED["fill"] = EMPTY_US
    PREDICTED["count"] = EMPTY_US + N / 1024 * NS["a load from the L2"] / 1000
    PREDICTED["scan"] = E * PER_EXPERT * 4 / LIMITS.boost_clock * 1e6
    PREDICTED["sort"] = EMPTY_US + (NS["a load from the L2"] + NS["a global atomic"]) / 1000
gain = us("torch") - sum(PREDICTED.values()) if PREDICTED else None
print("instructions per expert:", PER_EXPERT, " phases:", {phase: round(time, 1) for phase, time in PREDICTED.items()})

# %%
measure("0x1 baseline", run_baseline, after="torch", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The total says little about the parts. `until(make, phase)` builds the same main kernel, cut off after a phase;
# the differences of such kernels are the phases. The sort kernel is timed alone. It must be replayed many times, and each replay
# moves the counters on, so the replayed one masks the place: the same loads, atomic operations and scattered stores, always
# inside the array.


# %%
@cuda.jit
def sort_replayed(topk_ids, sorted_token_ids, cumsum, numel, mask):
    for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
        rank_post_pad = atom_add_s32(cumsum, topk_ids[i], 1)
        sorted_token_ids[rank_post_pad & mask] = i


MASK = (1 << (LENGTH.bit_length() - 1)) - 1  # the largest power of two that fits, less one
PHASES, ORDER = {}, ["fill", "count", "scan", "expert_ids", "sort"]  # the order of the colours


def phases(name, make, fill=False):
    """Time the main kernel cut off after each of its phases, the sort kernel, and a fill by torch."""
    outputs, starts, cumsum = poisoned(IDS, EXPERTS, BLOCK), CUMSUM.clone(), CUMSUM.clone()
    launch_main(make(EXPERTS), IDS, outputs, starts)  # where each expert starts, for the sort kernel
    calls = {"fill": partial(outputs[0].fill_, NUMEL)} if fill else {}
    for phase in phases_of(make):
        calls[phase] = partial(launch_main, until(make, phase, globals())(EXPERTS), IDS, outputs, cumsum)
    calls["sort"] = partial(launch, sort_replayed, -(-NUMEL // 256), 256, IDS, outputs[0], starts, NUMEL, MASK)
    if times := ladder.times(f"phases of {name}", calls):
        PHASES[name] = {phase: round(us, 2) for phase, us in without_earlier(times, phases_of(make)).items()}
        (ladder.row(name) or {})["phases_us"] = PHASES[name]  # recorded with the step
        print(PHASES[name], f"together {sum(PHASES[name].values()):.2f} us; the whole takes {us(name)} us")
        show_changes(name, PHASES)


def show_changes(name, phases_of_all):
    """Print what changed since the version before, without changes below a twentieth of a microsecond."""
    names = list(phases_of_all)
    if place := names.index(name):
        old, new = phases_of_all[names[place - 1]], phases_of_all[name]
        changes = {phase: new.get(phase, 0) - old.get(phase, 0) for phase in [*old, *new]}
        print("since", names[place - 1], {phase: f"{us:+.2f}" for phase, us in changes.items() if abs(us) >= 0.05})


def show_phases():
    title = "Where the time goes; a launch counts for its first phase"
    return phase_bars(PHASES, title, phases=ORDER) if PHASES else None


# %%
phases("0x1 baseline", make_baseline, fill=True)
print("predicted:", {phase: round(time, 2) for phase, time in PREDICTED.items()})
show_phases()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ATOMIC = "            cuda.atomic.add(shared_counts, warp * experts_per_warp + offset, 1)\n"
NEVER = "            if warp + offset == -1:\n                shared_counts[0] = 1\n"  # never true: keeps the loads
no_atomics = define(changed_source(make_baseline, ATOMIC, NEVER), globals(), "0x1 without atomics")["make_baseline"]
count_only, outputs = until(make_baseline, "count", globals())(EXPERTS), poisoned(IDS, EXPERTS, BLOCK)
counting = ladder.times(
    "counting",
    {
        "random ids": partial(launch_main, count_only, IDS, outputs, CUMSUM),
        "same experts": partial(launch_main, count_only, SKEWED, outputs, CUMSUM),
        "no atomics": partial(launch_main, until(no_atomics, "count", globals())(EXPERTS), IDS, outputs, CUMSUM),
    },
)
print("atomic instructions of the main kernel:", {opcode for opcode in opcodes_of(make_baseline) if "ATOM" in opcode})

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# after the GPU run: check the sentences against the figures
BASE = PHASES.get("0x1 baseline", {})
say(
    "The serial scan is the largest part, {scan:.1f} of {total:.1f} us: the article is right to call it a bottleneck. The "
    "second largest is the sort kernel, {sort:.1f} us, where waiting for one load and one atomic operation explains {simple:.1f}. "
    "The article's other suspect are the atomic additions of the counting: it takes {count:.1f} us, {same:.1f} if all tokens "
    "choose the same experts, and {none:.1f} without atomic additions. The additions are `ATOMS.POPC.INC`, which counts the lanes "
    "of a warp with the same address in one operation; the compiler chooses it if 1 is added and the result is not used.",
    scan=BASE.get("scan"),
    total=us("0x1 baseline"),
    sort=BASE.get("sort"),
    simple=PREDICTED.get("sort"),
    count=counting and counting["random ids"],
    same=counting and counting["same experts"],
    none=counting and counting["no atomics"],
)

# %% [markdown]
# ### Step 2: fill in the kernel, 0x2
#
# **Bottleneck.** The fill is a launch of its own; the bar above shows its part.
#
# **Idea.** The main kernel fills the used part of `sorted_token_ids` at its end, and the sort kernel overwrites the places
# that get a slot. A store of 16 bytes writes four elements: `st_global_s32x4` is `st.global.v4.s32`. (C++ needs a type for it,
# the article's `AlignedArray<int32_t, 4>`.) The article expects four times the bandwidth of single stores, and almost no cost.
#
# **Predicted gain.** The launch of the fill goes, but the whole array now leaves through one SM. This is what one CTA needs
# for nothing but a fill, with both kinds of store:


# %%
@cuda.jit(device=True)
def fill(sorted_token_ids, value, count):
    """The first ``count`` places, rounded up to four."""
    for i in range(cuda.threadIdx.x, (count + 3) // 4, cuda.blockDim.x):
        st_global_s32x4(sorted_token_ids, 4 * i, value, value, value, value)


@cuda.jit(device=True)
def fill_singly(sorted_token_ids, value, count):
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        sorted_token_ids[i] = value


@cuda.jit
def only_fill(sorted_token_ids, value, count):
    fill(sorted_token_ids, value, count)


@cuda.jit
def only_fill_singly(sorted_token_ids, value, count):
    fill_singly(sorted_token_ids, value, count)


filled = poisoned(IDS, EXPERTS, BLOCK)[0]
alone = lambda kernel: partial(launch, kernel, 1, THREADS, filled, NUMEL, LENGTH)
fills = ladder.times("fills", {"16-byte stores": alone(only_fill), "4-byte stores": alone(only_fill_singly)})
gain = BASE["fill"] - (fills["16-byte stores"] - EMPTY_US) if fills and BASE else None


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def profile_fills():
    for kernel in (only_fill, only_fill_singly):
        with simulator.profile() as profile:
            launch(kernel, 1, 128, torch.zeros(4096, dtype=torch.int32), 1, 4096)
        total = profile[kernel.py_func.__name__].total
        print(f"{total.global_store_requests} store requests, {total.global_store_sectors} sectors of 32 bytes")


in_simulator(profile_fills)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# after the GPU run: check that both widths cost the same number of clocks per sector
sectors, clock = TIMED_LENGTH / 8, LIMITS.boost_clock / 1e6
clocks = fills and {kind: (time - EMPTY_US) * clock / sectors for kind, time in fills.items()}
say(
    "Filling the array with one CTA takes {wide:.2f} us with 16-byte stores and {single:.2f} us with 4-byte stores. The lanes of "
    "a warp store to neighbouring addresses either way, so both kernels write the same sectors of 32 bytes; wide stores only "
    "need a quarter of the instructions. The SM spends {a:.1f} and {b:.1f} clocks per sector. The path from an SM to L2 is the "
    "limit, and four times the bandwidth can only come from more SMs.",
    wide=fills and fills["16-byte stores"],
    single=fills and fills["4-byte stores"],
    a=clocks and clocks["16-byte stores"],
    b=clocks and clocks["4-byte stores"],
)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_padding(num_experts, experts_per_warp=32):
    padded_num_experts = -(-num_experts // 32) * 32

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(padded_num_experts, int32)
        tid, stride = cuda.threadIdx.x, cuda.blockDim.x
        # count
        my_expert_start = tid // 32 * experts_per_warp
        for i in range(experts_per_warp):
            if my_expert_start + i < padded_num_experts:
                shared_counts[my_expert_start + i] = 0
        cuda.syncthreads()
        for i in range(tid, numel, stride):
            warp, offset = topk_ids[i] // experts_per_warp, topk_ids[i] % experts_per_warp
            cuda.atomic.add(shared_counts, warp * experts_per_warp + offset, 1)
        cuda.syncthreads()
        # scan
        if tid == 0:
            start = int32(0)
            cumsum[0] = start
            for i in range(num_experts):
                warp, offset = i // experts_per_warp, i % experts_per_warp
                start = int32(start + round_up(shared_counts[warp * experts_per_warp + offset], block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        # expert_ids
        if tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        # fill
        fill(sorted_token_ids, numel, total_tokens_post_pad[0])

    return kernel


# %%
change(make_baseline, make_padding)


# %%
def version(make, ctas=1):
    """``run(ids, outputs)`` of a version."""
    kernel = make(EXPERTS)
    return lambda ids, outputs: run_both(kernel, ids, outputs, ctas=ctas)


measure("0x2 padding inside", version(make_padding), after="0x1 baseline", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The loop stops at `num_tokens_post_pad`, so the tail is not filled; and it rounds up to four elements, so it
# needs a buffer that is that long. The fill comes after all other work, so it hides behind nothing. The phases, and the same
# two versions with few tokens:

# %%
phases("0x2 padding inside", make_padding)
arguments = OTHERS["few"], poisoned(OTHERS["few"], EXPERTS, BLOCK)
calls = {"0x1": partial(run_baseline, *arguments), "0x2": partial(version(make_padding), *arguments)}
few_us = ladder.times("0x1 and 0x2 with few tokens", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "With {tokens} tokens, 0x1 takes {before:.2f} us and 0x2 {after:.2f} us: with less to fill, the launch counts for more.",
    tokens=64 if SIMULATED else FEW_TOKENS,
    before=few_us.get("0x1"),
    after=few_us.get("0x2"),
)

# %% [markdown]
# ### Step 3: plain counters, 0x3
#
# 0x3 changes three things. They are separate steps here, so that each gain has an owner.
#
# **Bottleneck.** Still the serial scan. Part of its instructions compute `warp * 32 + offset`, in 64 bits, and rounding down
# for negative numbers as well, as Python's `//` does. The SASS shows how many.
#
# **Idea.** `shared_counts[expert]`, and one thread clears each counter.
#
# **Predicted gain.** The scan shrinks as the instructions of its loop do.


# %%
@cuda.jit(device=True)
def count_slots(shared_counts, topk_ids, num_experts, numel):
    tid = cuda.threadIdx.x
    if tid < num_experts:
        shared_counts[tid] = 0
    cuda.syncthreads()
    for i in range(tid, numel, cuda.blockDim.x):
        cuda.atomic.add(shared_counts, topk_ids[i], 1)
    cuda.syncthreads()


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_plain(num_experts):
    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        tid = cuda.threadIdx.x
        # count
        count_slots(shared_counts, topk_ids, num_experts, numel)
        # scan
        if tid == 0:
            start = int32(0)
            cumsum[0] = start
            for i in range(num_experts):
                start = int32(start + round_up(shared_counts[i], block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        # expert_ids
        if tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        # fill
        fill(sorted_token_ids, numel, total_tokens_post_pad[0])

    return kernel


# %%
change(make_padding, make_plain)

# %%
PLAIN_PER_EXPERT = instructions_per_expert(make_plain)
before = PHASES.get("0x2 padding inside")
gain = before["scan"] * (1 - PLAIN_PER_EXPERT / PER_EXPERT) if before and PER_EXPERT else None
print(f"instructions of the scan per expert: {PER_EXPERT} -> {PLAIN_PER_EXPERT}")
measure("0x3 plain counters", version(make_plain), after="0x2 padding inside", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The prediction leaves out the loop that cleared the counters, which is part of the phase `count`:

# %%
phases("0x3 plain counters", make_plain)

# %% [markdown]
# ### Step 4: Blelloch's scan, 0x3
#
# **Bottleneck.** One thread scans while the others wait.
#
# **Idea.** Blelloch's scan works in place, in a shared array whose length is a power of two, in two sweeps. The **up-sweep**
# adds neighbours, then pairs of neighbours, and so on: a tree of sums. Then the last element is set to zero, and the
# **down-sweep** walks the tree back: for each pair `(ai, bi)`, the left one receives the right one's value, and the right one
# the sum of both. In the end each element holds the sum of all elements before it. The work is O(n), the depth O(log n), and
# every level ends with a barrier.


# %%
@cuda.jit(device=True)
def blelloch_scan(scan_buf, scan_size):
    """Scan exclusively, in place; thread 0 returns the sum of all elements."""
    tid, offset, total = cuda.threadIdx.x, 1, int32(0)
    while offset < scan_size:
        if tid < scan_size // (2 * offset):
            ai, bi = offset * (2 * tid + 1) - 1, offset * (2 * tid + 2) - 1
            scan_buf[bi] += scan_buf[ai]
        offset *= 2
        cuda.syncthreads()
    if tid == 0:
        total = scan_buf[scan_size - 1]
        scan_buf[scan_size - 1] = 0
    cuda.syncthreads()
    while offset > 1:
        offset //= 2
        if tid < scan_size // (2 * offset):
            ai, bi = offset * (2 * tid + 1) - 1, offset * (2 * tid + 2) - 1
            left = scan_buf[ai]
            scan_buf[ai] = scan_buf[bi]
            scan_buf[bi] += left
        cuda.syncthreads()
    return total


# %% [markdown]
# The article steps through eight numbers. This kernel writes the array down after every step, and the rows are compared with
# the article's.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
NUMBERS = [3, 1, 7, 0, 4, 1, 6, 3]
ROWS_OF_ARTICLE = {
    "up, neighbours": [3, 4, 7, 7, 4, 5, 6, 9],
    "up, 2 apart": [3, 4, 7, 11, 4, 5, 6, 14],
    "up, 4 apart": [3, 4, 7, 11, 4, 5, 6, 25],
    "the last becomes 0": [3, 4, 7, 11, 4, 5, 6, 0],
    "down, pair (3, 7)": [3, 4, 7, 0, 4, 5, 6, 11],
    "down, pairs (1, 3) (5, 7)": [3, 0, 7, 4, 4, 11, 6, 16],
    "down, all neighbours": [0, 3, 4, 11, 11, 15, 16, 22],
}


@cuda.jit
def blelloch_in_rows(values, rows, n):
    scan_buf = cuda.shared.array(32, int32)
    tid, row = cuda.threadIdx.x, 0
    scan_buf[tid] = values[tid]
    cuda.syncthreads()
    for step in range(-3, 4):  # up with the offsets 1, 2, 4; the zero; down with the offsets 4, 2, 1
        offset = 1 << (step + 3 if step < 0 else 3 - step)
        ai, bi = offset * (2 * tid + 1) - 1, offset * (2 * tid + 2) - 1
        if step == 0 and tid == n - 1:
            scan_buf[tid] = 0
        elif step != 0 and bi < n:
            left, right = scan_buf[ai], scan_buf[bi]
            scan_buf[bi] = int32(left + right)
            if step > 0:
                scan_buf[ai] = right
        cuda.syncthreads()
        rows[row * n + tid] = scan_buf[tid]
        row += 1
        cuda.syncthreads()


values = torch.tensor(NUMBERS, dtype=torch.int32, device=DEVICE)
rows = torch.full((len(ROWS_OF_ARTICLE), 8), -7, dtype=torch.int32, device=DEVICE)
launch(blelloch_in_rows, 1, 8, values, rows, 8)
for (name, expected), row in zip(ROWS_OF_ARTICLE.items(), rows.tolist()):
    print(f"{name:<26}", row, "as in the article" if row == expected else f"but the article has {expected}")

# %%
draw.blelloch(NUMBERS)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def scan_alone(values, out):
    scan_buf = cuda.shared.array(8, int32)
    scan_buf[cuda.threadIdx.x] = values[cuda.threadIdx.x]
    cuda.syncthreads()
    blelloch_scan(scan_buf, 8)
    out[cuda.threadIdx.x] = scan_buf[cuda.threadIdx.x]


def play_blelloch(numbers):
    names = ["Up-sweep"] * 3 + ["The last element becomes 0"] + ["Down-sweep"] * 3
    listed = lambda stored: ", ".join(f"[{i}] = {stored[i]}" for i in sorted(stored))
    explain = lambda number, stored: f"{names[number]}: {listed(stored)}."
    with simulator.trace(accesses=True) as events:
        launch(scan_alone, 1, 8, torch.tensor(numbers, dtype=torch.int32), torch.zeros(8, dtype=torch.int32))
    return Player(*barrier_steps(events, 8, explain), "Blelloch's scan, traced: a frame per barrier").as_dict()


player = Player.from_dict(in_simulator(play_blelloch, NUMBERS))
player

# %%
player.strip([1, 5])

# %% [markdown]
# In the kernel, the thread of an expert rounds its count up into `scan_buf`; `prefix` keeps the result. Three shared arrays
# now: `shared_counts`, `prefix` with one element more, and `scan_buf`, whose length is the next power of two.
#
# **Predicted gain.** The serial loop goes. Each of the levels, up and down, costs a barrier and a dependent load from shared
# memory; two more barriers follow.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def next_pow2(n):
    return 1 << (n - 1).bit_length()


@cache
def make_blelloch(num_experts):
    ends, scan_size = num_experts + 1, next_pow2(num_experts)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        scan_buf = cuda.shared.array(scan_size, int32)
        tid = cuda.threadIdx.x
        # count
        count_slots(shared_counts, topk_ids, num_experts, numel)
        # scan
        if tid < scan_size:
            scan_buf[tid] = round_up(shared_counts[tid], block_size) if tid < num_experts else int32(0)
        cuda.syncthreads()
        total = blelloch_scan(scan_buf, scan_size)
        if tid == 0:
            prefix[num_experts] = total
            total_tokens_post_pad[0] = total
        if tid < num_experts:
            prefix[tid] = scan_buf[tid]
        cuda.syncthreads()
        if tid <= num_experts:
            cumsum[tid] = prefix[tid]
        # expert_ids
        if tid < num_experts:
            for i in range(prefix[tid], prefix[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        # fill
        fill(sorted_token_ids, numel, prefix[num_experts])

    return kernel


# %%
change(make_plain, make_blelloch)

# %%
before, levels = PHASES.get("0x3 plain counters"), 2 * (next_pow2(E).bit_length() - 1)
scan_us = (levels * (NS["a barrier"] + NS["a shared load"]) + 2 * NS["a barrier"]) / 1000 if KNOWN else None
gain = before["scan"] - scan_us if before else None
measure("0x3 Blelloch scan", version(make_blelloch), after="0x3 plain counters", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** From O(n) to O(log n) is not 256 / 8 times faster: the sweeps walk the tree twice, and a level is not as short
# as an iteration of the loop.

# %%
phases("0x3 Blelloch scan", make_blelloch)
show_phases()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
before, after = PHASES.get("0x3 plain counters"), PHASES.get("0x3 Blelloch scan")
say(
    "The loop took {loop:.0f} ns per expert; the sweeps take {level:.0f} ns for each of their {levels} levels.",
    loop=before and 1000 * before["scan"] / E,
    level=after and 1000 * after["scan"] / levels,
    levels=levels,
)

# %% [markdown]
# ### Step 5: binary search, 0x3
#
# **Bottleneck.** The thread of an expert writes all its entries of `expert_ids`. If all tokens choose the same experts, few
# threads write everything; the other lanes of their warps idle (**divergence**).
#
# **Idea.** A thread takes blocks instead, and searches `prefix` for the last expert that starts at or before a block. The work
# is even for any routing, and O(log num_experts) per block.
#
# **Predicted gain.** For random ids an expert has few blocks, while a search is a chain of dependent loads from shared memory.


# %%
@cuda.jit(device=True)
def find_expert(prefix, num_experts, block_start):
    """The last expert that starts at or before this place."""
    left, right = int32(0), int32(num_experts)
    while left < right:
        mid = int32((left + right) >> 1)
        if prefix[mid] <= block_start:
            left = int32(mid + 1)
        else:
            right = mid
    return left - 1


@cuda.jit(device=True)
def search_experts(prefix, num_experts, expert_ids, block_size):
    num_blocks = int32(uint32(prefix[num_experts]) // uint32(block_size))
    for i in range(cuda.threadIdx.x, num_blocks, cuda.blockDim.x):
        expert_ids[i] = find_expert(prefix, num_experts, i * block_size)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_search(num_experts):
    ends, scan_size = num_experts + 1, next_pow2(num_experts)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        scan_buf = cuda.shared.array(scan_size, int32)
        tid = cuda.threadIdx.x
        # count
        count_slots(shared_counts, topk_ids, num_experts, numel)
        # scan
        if tid < scan_size:
            scan_buf[tid] = round_up(shared_counts[tid], block_size) if tid < num_experts else int32(0)
        cuda.syncthreads()
        total = blelloch_scan(scan_buf, scan_size)
        if tid == 0:
            prefix[num_experts] = total
            total_tokens_post_pad[0] = total
        if tid < num_experts:
            prefix[tid] = scan_buf[tid]
        cuda.syncthreads()
        if tid <= num_experts:
            cumsum[tid] = prefix[tid]
        # expert_ids
        search_experts(prefix, num_experts, expert_ids, block_size)
        # fill
        fill(sorted_token_ids, numel, prefix[num_experts])

    return kernel


# %%
change(make_blelloch, make_search)

# %%
before, blocks = PHASES.get("0x3 Blelloch scan"), (N + E * BLOCK // 2) / BLOCK  # half of each last block is padding
search_us = -(-blocks // 1024) * (E.bit_length()) * NS["a shared load"] / 1000 if KNOWN else None
gain = before["expert_ids"] - search_us if before else None
measure("0x3 binary search", version(make_search), after="0x3 Blelloch scan", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The phases, and both versions when all tokens choose the same experts, the case that the search is for:

# %%
phases("0x3 binary search", make_search)
outputs = poisoned(SKEWED, EXPERTS, BLOCK)
skewed = ladder.times(
    "skewed ids",
    {
        "a thread per expert": partial(version(make_blelloch), SKEWED, outputs),
        "binary search": partial(version(make_search), SKEWED, outputs),
    },
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "When all tokens choose the same experts, the version with a thread per expert takes {loop:.1f} us and the one with the "
    "search {search:.1f} us.",
    loop=skewed and skewed["a thread per expert"],
    search=skewed and skewed["binary search"],
)

# %% [markdown]
# ### Step 6: a scan in two levels, 0x4
#
# **Bottleneck.** Every level of Blelloch's tree ends with a barrier of the whole CTA: 14 for 128 experts, as the article counts.
#
# **Idea.** The lanes of a warp exchange registers with shuffles: no shared memory, no barrier. `shfl_up` returns the value of
# the lane `offset` below; with the offsets 1, 2, 4, 8 and 16 each lane sums up all lanes below it. At the end it subtracts its
# own value, which makes the scan exclusive. The lanes of a warp need not run in step; the shuffle itself waits for all lanes
# that its mask names.


# %%
@cuda.jit(device=True)
def warp_exclusive_scan(v):
    """The sum of the values of all lanes below this one."""
    original, lane = v, cuda.threadIdx.x & 31
    for s in range(5):
        n = cuda.shfl_up_sync(FULL, v, 1 << s)
        if lane >= 1 << s:
            v = int32(v + n)
    return int32(v - original)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def warp_scan_alone(values, out):
    out[cuda.threadIdx.x] = warp_exclusive_scan(values[cuda.threadIdx.x])


def play_warp_scan(numbers):
    values = torch.tensor(numbers + [0] * (32 - len(numbers)), dtype=torch.int32)
    with simulator.trace() as events:
        launch(warp_scan_alone, 1, 32, values, torch.zeros(32, dtype=torch.int32))
    explain = lambda number, what, offset: f"Each lane adds the value of the lane {offset} below, if there is one."
    return Player(*shuffles(events, lanes=8, explain=explain), "A warp's scan, traced: lanes 0 to 7").as_dict()


player = Player.from_dict(in_simulator(play_warp_scan, NUMBERS))
player

# %%
player.strip([0, 2])

# %% [markdown]
# The sums of all rounds, and what remains after the subtraction:

# %%
draw.warp_scan(NUMBERS)

# %% [markdown]
# 256 experts are eight warps, so there are **two levels**: every warp scans its 32 values, warp 0 scans the sums of the warps,
# and every thread adds what is before its warp.

# %%
draw.two_level_scan()

# %% [markdown]
# The article has two listings of this. One computes the total, with inclusive scans; the other, the complete flow, computes the
# starts with one pass of exclusive scans. In SGLang's source both stand one after the other: the CTA scans twice, first for the
# total, then for the starts. The port follows the source, with a function for each pass.
#
# **Predicted gain.** The simulator counts the barriers of both versions. Shuffles replace the loads from shared memory.


# %%
@cuda.jit(device=True)
def total_over_block(v, warp_sums, num_warps):
    """The first pass: inclusive scans, for the last sum."""
    tid = cuda.threadIdx.x
    warp_sum = int32(warp_exclusive_scan(v) + v)
    if tid & 31 == 31:
        warp_sums[tid // 32] = warp_sum
    cuda.syncthreads()
    if tid < 32:
        sums = warp_sums[tid] if tid < num_warps else int32(0)
        warp_sums[tid] = int32(warp_exclusive_scan(sums) + sums)
    cuda.syncthreads()
    return warp_sums[num_warps - 1]


@cuda.jit(device=True)
def block_exclusive_scan(v, warp_sums, num_warps):
    """The second pass: the sum of the values of all threads below this one."""
    warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x & 31
    pre = warp_exclusive_scan(v)
    if lane == 31:
        warp_sums[warp] = int32(pre + v)
    cuda.syncthreads()
    if warp == 0:
        sums = warp_sums[lane] if lane < num_warps else int32(0)
        warp_sums[lane] = warp_exclusive_scan(sums)
    cuda.syncthreads()
    return int32(pre + warp_sums[warp])


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_two_level(num_experts):
    ends, scan_size = num_experts + 1, next_pow2(num_experts)
    num_warps_for_scan = -(-scan_size // 32)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        scan_buf = cuda.shared.array(scan_size, int32)
        warp_sums = cuda.shared.array(32, int32)
        tid = cuda.threadIdx.x
        # count
        count_slots(shared_counts, topk_ids, num_experts, numel)
        # scan
        padded_count = int32(0)
        if tid < num_experts:
            padded_count = round_up(shared_counts[tid], block_size)
            scan_buf[tid] = padded_count
        total = total_over_block(padded_count, warp_sums, num_warps_for_scan)
        if tid == 0:
            prefix[num_experts] = total
            total_tokens_post_pad[0] = total
        cuda.syncthreads()
        if num_experts <= tid < scan_size:
            scan_buf[tid] = 0
        cuda.syncthreads()
        v = scan_buf[tid] if tid < scan_size else int32(0)
        start = block_exclusive_scan(v, warp_sums, num_warps_for_scan)
        if tid < scan_size:
            scan_buf[tid] = start
        cuda.syncthreads()
        if tid < num_experts:
            prefix[tid] = scan_buf[tid]
        if tid <= num_experts:
            cumsum[tid] = prefix[tid]
        cuda.syncthreads()  # SGLang's source had no barrier here
        # expert_ids
        search_experts(prefix, num_experts, expert_ids, block_size)
        # fill
        fill(sorted_token_ids, numel, prefix[num_experts])

    return kernel


# %%
change(make_search, make_two_level)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
IN_SIMULATOR = dict(DEVICE="cpu", EXPERTS=64, BLOCK=16, THREADS=128, SIMULATED=True)


def simulate(make, ids, num_experts):
    """Run a version in the simulator; return what is wrong with its outputs."""
    outputs = poisoned(ids, num_experts, 16)
    result = run_both(make(num_experts), ids, outputs, torch.zeros(num_experts + 1, dtype=torch.int32), 16)
    return wrong(result, ids, num_experts, 16)


def count_barriers(name):
    with simulator.trace() as events:
        simulate(globals()[name], random_ids(8, 128, 4), 128)
    return sum(event.what == "syncthreads" for event in events) // THREADS


def barriers(make):
    """The barriers that a thread of a version passes, for 128 experts."""
    return in_simulator(count_barriers, make.__name__, functions=[make], constants=IN_SIMULATOR)


BARRIERS = {"0x2": barriers(make_plain), "0x3": barriers(make_search), "0x4": barriers(make_two_level)}
print("barriers of the main kernel, 128 experts:", BARRIERS)

# %%
more_levels = levels - 14  # than for 128 experts
fewer_barriers = BARRIERS["0x3"] - BARRIERS["0x4"] + more_levels
scan_loads = levels * NS["a shared load"] - 20 * NS["a shuffle"] if KNOWN else None
gain = (fewer_barriers * NS["a barrier"] + scan_loads) / 1000 if KNOWN else None
measure("0x4 two-level scan", version(make_two_level), after="0x3 binary search", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** How small the scan had become before, and what it lost:

# %%
phases("0x4 two-level scan", make_two_level)

# %% [markdown]
# #### A race in SGLang's source
#
# The last barrier before the search is ours. In SGLang's source, where it was added later, the first threads write `prefix[tid]`
# and then all threads search all of `prefix`. A warp that is early reads elements that are not written yet. On a GPU the warps
# run close together and may hide it. The simulator shows it, with its race detector and by running the kernel under several
# seeds, that is, orders of threads:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def as_in_sglang():
    barrier = "        cuda.syncthreads()  # SGLang's source had no barrier here\n"
    return define(changed_source(make_two_level, barrier, ""), globals(), "0x4 as in SGLang")["make_two_level"]


def race():
    torch.manual_seed(0)
    ids = random_ids(64, 64, 4)
    for name, make in {"as in SGLang's source": as_in_sglang(), "with the barrier": make_two_level}.items():
        failing = []
        for seed in range(8):
            with simulator.seed(seed):
                if simulate(make, ids, 64):
                    failing.append(seed)
        print(f"{name}: wrong under the seeds {failing}")
    try:
        with simulator.races():
            simulate(as_in_sglang(), ids, 64)
    except simulator.DataRace as error:
        print(error)


in_simulator(race, constants=IN_SIMULATOR)
if not SIMULATED:
    run, outputs, others, failures = version(as_in_sglang()), *(poisoned(IDS, EXPERTS, BLOCK) for _ in range(2)), 0
    for _ in range(200):
        run(SKEWED, others)  # otherwise shared memory holds the right prefix of the run before
        failures += ladder.check(run(IDS, outputs)) is not None
    print(f"on this GPU: {failures} of 200 runs as in SGLang's source are wrong")

# %% [markdown]
# Only some `expert_ids` come out wrong: the GEMM would multiply those blocks with another expert's matrix, and no error would
# be raised.
#
# **Exercise align-2.** The kernel scans 64 counts with two warps, but each warp only knows its own lanes. Complete it.


# %%
@cuda.jit
def scan_64(counts, starts):
    tid = cuda.threadIdx.x
    lane = tid % 32
    value = counts[tid]
    for k in range(5):
        below = cuda.shfl_up_sync(0xFFFFFFFF, value, 1 << k)
        if lane >= 1 << k:
            value += below
    starts[tid] = value - counts[tid]


exercise("align-2").check(scan_64)

# %% [markdown]
# ### Step 7: one scan
#
# **Bottleneck.** Two passes over the same values.
#
# **Idea.** The second pass knows everything: the last expert's start plus its count is the total. So the first pass goes, and
# with it `scan_buf`, because a thread can keep its own value in a register. Three barriers remain in the scan, the three that
# the article counts.
#
# **Predicted gain.** The barriers that go, ten shuffles, and two trips through shared memory.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_one_pass(num_experts):
    ends, num_warps_for_scan = num_experts + 1, -(-num_experts // 32)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        warp_sums = cuda.shared.array(32, int32)
        tid = cuda.threadIdx.x
        # count
        count_slots(shared_counts, topk_ids, num_experts, numel)
        # scan
        padded_count = round_up(shared_counts[tid], block_size) if tid < num_experts else int32(0)
        start = block_exclusive_scan(padded_count, warp_sums, num_warps_for_scan)
        if tid < num_experts:
            prefix[tid] = start
            cumsum[tid] = start
        if tid == num_experts - 1:
            prefix[num_experts] = start + padded_count
            total_tokens_post_pad[0] = start + padded_count
        cuda.syncthreads()
        # expert_ids
        search_experts(prefix, num_experts, expert_ids, block_size)
        # fill
        fill(sorted_token_ids, numel, prefix[num_experts])

    return kernel


# %%
change(make_two_level, make_one_pass)

# %%
BARRIERS["0x4, one pass"] = barriers(make_one_pass)
print("barriers of the main kernel, 128 experts:", BARRIERS)
fewer_barriers = BARRIERS["0x4"] - BARRIERS["0x4, one pass"]
saved_ns = fewer_barriers * NS["a barrier"] + 10 * NS["a shuffle"] + 2 * NS["a shared load"] if KNOWN else None
gain = saved_ns / 1000 if KNOWN else None
measure("0x4, one pass", version(make_one_pass), after="0x4 two-level scan", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The change of the scan alone:

# %%
phases("0x4, one pass", make_one_pass)

# %% [markdown]
# ### Step 8: fill first, the starting point of 0x5
#
# **Bottleneck.** The fill waits for the scan, although filling the whole array only needs its length.
#
# **Idea.** In its chapter on 0x5 the article starts from a kernel that fills the whole array at the beginning, one element per
# store.
#
# **Predicted gain.** Wide stores to the used part become single stores to the whole array. Step 2 measured both alone.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_filling_first(num_experts):
    ends, num_warps_for_scan = num_experts + 1, -(-num_experts // 32)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        warp_sums = cuda.shared.array(32, int32)
        tid = cuda.threadIdx.x
        # fill
        fill_singly(sorted_token_ids, numel, length)
        # count
        count_slots(shared_counts, topk_ids, num_experts, numel)
        # scan
        padded_count = round_up(shared_counts[tid], block_size) if tid < num_experts else int32(0)
        start = block_exclusive_scan(padded_count, warp_sums, num_warps_for_scan)
        if tid < num_experts:
            prefix[tid] = start
            cumsum[tid] = start
        if tid == num_experts - 1:
            prefix[num_experts] = start + padded_count
            total_tokens_post_pad[0] = start + padded_count
        cuda.syncthreads()
        # expert_ids
        search_experts(prefix, num_experts, expert_ids, block_size)

    return kernel


# %%
change(make_one_pass, make_filling_first)

# %%
used = (N + E * BLOCK / 2) / TIMED_LENGTH  # about half of each last block is padding
gain = used * (fills["16-byte stores"] - EMPTY_US) - (fills["4-byte stores"] - EMPTY_US) if fills else None
run = version(make_filling_first)
measure("0x4, filling first", run, after="0x4, one pass", predicted_gain_us=predict(gain), slower=True)

# %% [markdown]
# **Explanation.** If counting takes longer behind the fill than in the version before, the loads of the ids wait behind the
# stores in the SM's path to L2:

# %%
# after the GPU run: say in words whether counting takes longer
phases("0x4, filling first", make_filling_first)

# %% [markdown]
# ### Step 9: a second CTA fills, 0x5
#
# **Bottleneck.** One SM does everything in the main kernel; all others are idle.
#
# **Idea.** The fill needs neither counts nor scan. The main kernel is launched with two CTAs: CTA 1 fills and returns, CTA 0
# does the rest. They need no synchronisation, because the sort kernel, which overwrites the fill, is a later launch.
#
# **Predicted gain.** The whole phase `fill`, because CTA 1 needs less time for it than CTA 0 for the rest.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_parallel_fill(num_experts):
    ends, num_warps_for_scan = num_experts + 1, -(-num_experts // 32)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        warp_sums = cuda.shared.array(32, int32)
        tid = cuda.threadIdx.x
        if cuda.blockIdx.x == 1:
            fill_singly(sorted_token_ids, numel, length)
            return  # the whole CTA returns, so no barrier waits for it
        # count
        count_slots(shared_counts, topk_ids, num_experts, numel)
        # scan
        padded_count = round_up(shared_counts[tid], block_size) if tid < num_experts else int32(0)
        start = block_exclusive_scan(padded_count, warp_sums, num_warps_for_scan)
        if tid < num_experts:
            prefix[tid] = start
            cumsum[tid] = start
        if tid == num_experts - 1:
            prefix[num_experts] = start + padded_count
            total_tokens_post_pad[0] = start + padded_count
        cuda.syncthreads()
        # expert_ids
        search_experts(prefix, num_experts, expert_ids, block_size)

    return kernel


# %%
change(make_filling_first, make_parallel_fill)

# %%
before = PHASES.get("0x4, filling first")
gain = before["fill"] - EMPTY_US if before else None
run_0x5 = version(make_parallel_fill, ctas=2)
measure("0x5 parallel fill", run_0x5, after="0x4, filling first", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The phases of CTA 0; CTA 1 fills beside it.

# %%
phases("0x5 parallel fill", make_parallel_fill)
show_phases()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# after the GPU run: check the sentence against the figures
LAST = PHASES.get("0x5 parallel fill", {})
say(
    "Of the {total:.1f} us of 0x5, the sort kernel takes {sort:.1f}, which no version has changed, and counting {count:.1f}. The "
    "scan, where everything began, has shrunk from {before:.1f} to {after:.1f} us.",
    total=us("0x5 parallel fill"),
    sort=LAST.get("sort"),
    count=LAST.get("count"),
    before=BASE.get("scan"),
    after=LAST.get("scan"),
)

# %% [markdown]
# #### Shorter buffers
#
# 0x5 also shortens `sorted_token_ids`. In the worst case each expert pads a block with one slot to `block_size`. With fewer slots
# than experts, at most `numel` experts have a slot:
#
# ```python
# max_num_tokens_padded = topk_ids.numel() + num_experts * (block_size - 1)
# if topk_ids.numel() < num_experts:                                         # new in 0x5
#     max_num_tokens_padded = topk_ids.numel() * block_size
# ```
#
# **Exercise align-3.** The rule is sufficient, but not tight. Write a function that returns the fewest positions that suffice
# for any routing. The check accepts SGLang's rule, too.

# %%
exercise("align-3").check(lambda numel, num_experts, block_size: ...)

# %% [markdown]
# With the short buffer, both ways to fill have less to do:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def lengths_compared(old, new, block_size=128):
    calls, ids = {}, OTHERS["one"]
    for name, make, ctas in (("filling first", make_filling_first, 1), ("a second CTA fills", make_parallel_fill, 2)):
        for which, length in {"old": old, "new": new}.items():
            outputs = torch.empty(length, dtype=torch.int32, device=DEVICE), *poisoned(ids, EXPERTS, block_size)[1:]
            options = {"block_size": block_size, "ctas": ctas}
            run = calls[f"{name}, {which} length"] = partial(run_both, make(EXPERTS), ids, outputs, **options)
            assert wrong(run(), ids, EXPERTS, block_size) is None
    return ladder.times("buffer lengths", calls) or {}


lengths = lengths_compared(old=TOPK + EXPERTS * 127, new=TOPK * 128)
say(
    "For one token and blocks of 128, filling first takes {a:.2f} us with the old length and {b:.2f} us with the new one; with a "
    "second CTA that fills, {c:.2f} and {d:.2f} us.",
    a=lengths.get("filling first, old length"),
    b=lengths.get("filling first, new length"),
    c=lengths.get("a second CTA fills, old length"),
    d=lengths.get("a second CTA fills, new length"),
)

# %% [markdown]
# #### Other ids and more experts
#
# The kernel in C++ is a template over the type of the ids, `scalar_t`. In Numba the same source is compiled for the types of its
# arguments, so 64-bit ids need no change. The main kernel has one thread per expert, so a CTA of 1024 threads supports at most
# 1024 experts:

# %%
for ids, experts in ((IDS.long(), EXPERTS), (random_ids(16, THREADS, TOPK, DEVICE), THREADS)):
    outputs, cumsum = poisoned(ids, experts, BLOCK), torch.empty(experts + 1, dtype=torch.int32, device=DEVICE)
    result = run_both(make_parallel_fill(experts), ids, outputs, cumsum, ctas=2)
    print(ids.dtype, experts, "experts:", wrong(result, ids, experts, BLOCK) or "correct")

# %% [markdown]
# ## 4. The small kernel
#
# For at most 64 experts and fewer than 1024 slots, the article has a kernel that does everything in one launch of one CTA, and
# without atomics: each thread has a row of counters of its own in shared memory, `tokens_cnts`.
#
# 1. A thread clears its row and counts its own slots there.
# 2. The thread of an expert sums up its column. Row `t` then tells how many slots of each expert the threads before `t` have.
# 3. Thread 0 scans the padded counts; the thread of an expert writes its `expert_ids`.
# 4. A slot's place is its expert's start plus the thread's counter, which then grows by one.
#
# No thread competes for a place, so the order is the same in every run.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
SMALL_IDS = random_ids(FEW_TOKENS, SMALL_EXPERTS, TOPK, DEVICE)
SMALL_THREADS = max(SMALL_EXPERTS, 32)
TIMED_SMALL = (64, 64, 8) if SIMULATED else (FEW_TOKENS, SMALL_EXPERTS, TOPK)
small_ladder = Ladder(
    "align_small_ladder",
    partial(wrong, ids=SMALL_IDS, num_experts=SMALL_EXPERTS, block_size=BLOCK),
    "The small kernel: {} tokens, {} experts, top-{}, blocks of {}".format(*TIMED_SMALL, BLOCK),
    "0x1 small",
    config={"num_experts": SMALL_EXPERTS, "topk": TOPK, "block_size": BLOCK},
    size={"tokens": FEW_TOKENS},
)


def small_version(make, fill=False, more_threads=0, **options):
    """A call of a small kernel, after a fill by torch or without."""
    kernel, outputs = make(SMALL_EXPERTS, **options), poisoned(SMALL_IDS, SMALL_EXPERTS, BLOCK)
    threads, numel, length = SMALL_THREADS + more_threads, SMALL_IDS.numel(), len(outputs[0])

    def run():
        if fill:
            outputs[0].fill_(numel)
        launch(kernel, 1, threads, SMALL_IDS, *outputs, BLOCK, numel, length)
        return *outputs, "any order", "any tail"

    return run


# %%
@cache
def make_small(num_experts):
    threads = max(num_experts, 32)
    pitch, ends, cells = num_experts, num_experts + 1, (threads + 1) * num_experts

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length):
        cumsum = cuda.shared.array(ends, int32)
        tokens_cnts = cuda.shared.array(cells, int32)
        tid = cuda.threadIdx.x
        # count
        for i in range(num_experts):
            tokens_cnts[(tid + 1) * pitch + i] = 0
        for i in range(tid, numel, threads):
            tokens_cnts[(tid + 1) * pitch + topk_ids[i]] += 1
        cuda.syncthreads()
        # column sums
        if tid < num_experts:
            tokens_cnts[tid] = 0
            for i in range(1, threads + 1):
                tokens_cnts[i * pitch + tid] += tokens_cnts[(i - 1) * pitch + tid]
        cuda.syncthreads()
        # scan
        if tid == 0:
            cumsum[0] = start = int32(0)
            for i in range(num_experts):
                start = int32(start + round_up(tokens_cnts[threads * pitch + i], block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        # expert_ids
        if tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        # sort
        for i in range(tid, numel, threads):
            mine = tid * pitch + topk_ids[i]
            sorted_token_ids[cumsum[topk_ids[i]] + tokens_cnts[mine]] = i
            tokens_cnts[mine] += 1

    return kernel


# %% jupyter={"source_hidden": true} tags=["hide-input"]
SMALL_PHASES = {}


def cut_off(make, fill=False, more_threads=0):
    """Calls of a small kernel, cut off after each of its phases, and of a fill by torch."""
    calls = {"fill": partial(poisoned(SMALL_IDS, SMALL_EXPERTS, BLOCK)[0].fill_, 0)} if fill else {}
    for phase in phases_of(make):
        calls[phase] = small_version(until(make, phase, globals()), more_threads=more_threads)
    return calls


def show_small(name, make, times):
    """Print and draw the phases of a small kernel."""
    if times is None:
        return None
    SMALL_PHASES[name] = {phase: round(us, 2) for phase, us in without_earlier(times, phases_of(make)).items()}
    (small_ladder.row(name) or {})["phases_us"] = SMALL_PHASES[name]
    print(SMALL_PHASES[name])
    show_changes(name, SMALL_PHASES)
    title = "The small kernels; a launch counts for its first phase"
    return phase_bars(SMALL_PHASES, title, phases=[*ORDER, "column sums"])


# %%
small_ladder.step("0x1 small", small_version(make_small, fill=True), dtype="int32")
times = small_ladder.times("phases of 0x1 small", cut_off(make_small, fill=True))
show_small("0x1 small", make_small, times)

# %% [markdown]
# ### Small step 1: fill in the kernel, 0x2
#
# **Bottleneck.** As in the large case, the fill is a launch.
#
# **Idea.** The threads fill first, then count.
#
# **Predicted gain.** The launch goes; what the fill costs one CTA with few threads is measured alone:

# %%
few_threads, filled = SMALL_THREADS, poisoned(SMALL_IDS, SMALL_EXPERTS, BLOCK)[0]
FILL_THREADS = 64 if SIMULATED else 256
fill_calls = {
    name: partial(launch, only_fill_singly, 1, threads, filled, SMALL_IDS.numel(), len(filled))
    for name, threads in {"counting threads": few_threads, "fill threads": FILL_THREADS}.items()
}
small_fills = small_ladder.times("fills", fill_calls)
fill_us = small_fills["counting threads"] - EMPTY_US if small_fills and KNOWN else None
gain = SMALL_PHASES["0x1 small"]["fill"] - fill_us if SMALL_PHASES and fill_us is not None else None


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_small_filling(num_experts):
    threads = max(num_experts, 32)
    pitch, ends, cells = num_experts, num_experts + 1, (threads + 1) * num_experts

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length):
        cumsum = cuda.shared.array(ends, int32)
        tokens_cnts = cuda.shared.array(cells, int32)
        tid = cuda.threadIdx.x
        # fill
        for i in range(tid, length, threads):
            sorted_token_ids[i] = numel
        # count
        for i in range(num_experts):
            tokens_cnts[(tid + 1) * pitch + i] = 0
        for i in range(tid, numel, threads):
            tokens_cnts[(tid + 1) * pitch + topk_ids[i]] += 1
        cuda.syncthreads()
        # column sums
        if tid < num_experts:
            tokens_cnts[tid] = 0
            for i in range(1, threads + 1):
                tokens_cnts[i * pitch + tid] += tokens_cnts[(i - 1) * pitch + tid]
        cuda.syncthreads()
        # scan
        if tid == 0:
            cumsum[0] = start = int32(0)
            for i in range(num_experts):
                start = int32(start + round_up(tokens_cnts[threads * pitch + i], block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        # expert_ids
        if tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        # sort
        for i in range(tid, numel, threads):
            mine = tid * pitch + topk_ids[i]
            sorted_token_ids[cumsum[topk_ids[i]] + tokens_cnts[mine]] = i
            tokens_cnts[mine] += 1

    return kernel


# %%
change(make_small, make_small_filling)

# %%
run = small_version(make_small_filling)
small_ladder.step("0x2 small", run, dtype="int32", after="0x1 small", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The phases of both:

# %%
times = small_ladder.times("phases of 0x2 small", cut_off(make_small_filling))
show_small("0x2 small", make_small_filling, times)

# %% [markdown]
# ### Small step 2: threads that only fill, 0x5
#
# **Bottleneck.** The counting threads fill before they count.
#
# **Idea.** 256 more threads, the template argument `fill_threads`, fill while the others count. All must wait for each other
# before slots overwrite the fill.
#
# In the article's listing the fill threads stand in a branch of their own, which calls `__syncthreads()` three times, only to
# match the barriers of the other branch. CUDA allows a barrier in a branch only if all threads of the CTA take it. The hardware
# counts arrivals, so the listing happens to work, but its behaviour is undefined. The simulator rejects it:


# %%
@cuda.jit
def barriers_in_two_branches(out, fill_threads):
    tid = cuda.threadIdx.x
    if tid < fill_threads:
        out[tid] = 1
        cuda.syncthreads()
        return
    cuda.syncthreads()
    out[tid] = 2


def try_two_branches():
    try:
        barriers_in_two_branches[1, 128](torch.zeros(128, dtype=torch.int32), 64)
        print("accepted")
    except simulator.SimulatorError as error:
        print(f"{type(error).__name__}: {error}")


in_simulator(try_two_branches)

# %% [markdown]
# In the port all threads pass the same three barriers.
#
# **Predicted gain.** The time that the counting threads need to fill.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_small_fill_threads(num_experts, fill_threads=FILL_THREADS):
    threads = max(num_experts, 32)
    pitch, ends, cells = num_experts, num_experts + 1, (threads + 1) * num_experts

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length):
        cumsum = cuda.shared.array(ends, int32)
        tokens_cnts = cuda.shared.array(cells, int32)
        tid = cuda.threadIdx.x - fill_threads
        # count
        if tid < 0:
            for i in range(cuda.threadIdx.x, length, fill_threads):
                sorted_token_ids[i] = numel
        else:
            for i in range(num_experts):
                tokens_cnts[(tid + 1) * pitch + i] = 0
            for i in range(tid, numel, threads):
                tokens_cnts[(tid + 1) * pitch + topk_ids[i]] += 1
        cuda.syncthreads()
        # column sums
        if 0 <= tid < num_experts:
            tokens_cnts[tid] = 0
            for i in range(1, threads + 1):
                tokens_cnts[i * pitch + tid] += tokens_cnts[(i - 1) * pitch + tid]
        cuda.syncthreads()
        # scan
        if tid == 0:
            cumsum[0] = start = int32(0)
            for i in range(num_experts):
                start = int32(start + round_up(tokens_cnts[threads * pitch + i], block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        # expert_ids
        if 0 <= tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        # sort
        if tid >= 0:
            for i in range(tid, numel, threads):
                mine = tid * pitch + topk_ids[i]
                sorted_token_ids[cumsum[topk_ids[i]] + tokens_cnts[mine]] = i
                tokens_cnts[mine] += 1

    return kernel


# %%
change(make_small_filling, make_small_fill_threads)

# %%
run = small_version(make_small_fill_threads, more_threads=FILL_THREADS)
small_ladder.step("0x5 small", run, dtype="int32", after="0x2 small", predicted_gain_us=predict(fill_us))

# %% [markdown]
# **Explanation.** The phase `count` now lasts as long as the slower of the fill and the counting:

# %%
times = small_ladder.times("phases of 0x5 small", cut_off(make_small_fill_threads, more_threads=FILL_THREADS))
show_small("0x5 small", make_small_fill_threads, times)

# %% [markdown]
# ### Small step 3: no bank conflicts
#
# **Bottleneck.** Shared memory has 32 **banks**; word `w` lies in bank `w % 32`. Lanes that access different words of one bank
# are served one after another: a **bank conflict** costs a wavefront per word. With 64 experts a row of `tokens_cnts` is 64
# words, so all counters of an expert lie in the same bank. The profile shows where this hurts:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def bank_conflicts(name):
    torch.manual_seed(0)
    ids = random_ids(64, 64, 8)
    outputs = poisoned(ids, 64, 16)
    with simulator.profile() as profile:
        launch(globals()[name](64, 64), 1, 128, ids, *outputs, 16, ids.numel(), len(outputs[0]))
    return profile["kernel"].total.bank_conflicts, profile.heatmap("bank_conflicts", "kernel")._repr_html_()


CONFLICTS, heatmap = in_simulator(bank_conflicts, "make_small_fill_threads", functions=[make_small_fill_threads])
HTML(heatmap)

# %% [markdown]
# **Idea.** Make rows one word longer than the experts need. The same column then lies in another bank in each row; here with 8
# banks instead of 32:

# %%
banks()

# %% [markdown]
# **Exercise align-1.** Which row pitches, in words, have no bank conflicts, for any number of experts?

# %%
exercise("align-1").check(lambda num_experts: ...)

# %% [markdown]
# **Predicted gain.** An SM delivers one wavefront per clock, so each conflict that goes saves a clock.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_small_row_pitch(num_experts, fill_threads=FILL_THREADS):
    threads = max(num_experts, 32)
    pitch, ends, cells = num_experts + 1, num_experts + 1, (threads + 1) * (num_experts + 1)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length):
        cumsum = cuda.shared.array(ends, int32)
        tokens_cnts = cuda.shared.array(cells, int32)
        tid = cuda.threadIdx.x - fill_threads
        # count
        if tid < 0:
            for i in range(cuda.threadIdx.x, length, fill_threads):
                sorted_token_ids[i] = numel
        else:
            for i in range(num_experts):
                tokens_cnts[(tid + 1) * pitch + i] = 0
            for i in range(tid, numel, threads):
                tokens_cnts[(tid + 1) * pitch + topk_ids[i]] += 1
        cuda.syncthreads()
        # column sums
        if 0 <= tid < num_experts:
            tokens_cnts[tid] = 0
            for i in range(1, threads + 1):
                tokens_cnts[i * pitch + tid] += tokens_cnts[(i - 1) * pitch + tid]
        cuda.syncthreads()
        # scan
        if tid == 0:
            cumsum[0] = start = int32(0)
            for i in range(num_experts):
                start = int32(start + round_up(tokens_cnts[threads * pitch + i], block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        # expert_ids
        if 0 <= tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        # sort
        if tid >= 0:
            for i in range(tid, numel, threads):
                mine = tid * pitch + topk_ids[i]
                sorted_token_ids[cumsum[topk_ids[i]] + tokens_cnts[mine]] = i
                tokens_cnts[mine] += 1

    return kernel


# %%
change(make_small_fill_threads, make_small_row_pitch)

# %%
LEFT, _ = in_simulator(bank_conflicts, "make_small_row_pitch", functions=[make_small_row_pitch])
gain = (CONFLICTS - LEFT) / LIMITS.boost_clock * 1e6
print(f"bank conflicts: {CONFLICTS} -> {LEFT}")
run = small_version(make_small_row_pitch, more_threads=FILL_THREADS)
small_ladder.step("row pitch", run, dtype="int32", after="0x5 small", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The conflicts are not the whole story. In Numba a negative index counts from the end of an array, so compiled
# code tests the sign of each index. With rows of 64 words the compiler tests once per row; with 65 words it tests in every
# store. An unsigned index needs no test:

# %%
times = small_ladder.times("phases of row pitch", cut_off(make_small_row_pitch, more_threads=FILL_THREADS))
show_small("row pitch", make_small_row_pitch, times)

# %%
signed = "tokens_cnts[(tid + 1) * pitch + i] = 0"
unsigned = "tokens_cnts[uint32((tid + 1) * pitch + i)] = 0"
text = changed_source(make_small_row_pitch, signed, unsigned, "make_small_unsigned")
make_small_unsigned = define(text, globals(), "row pitch, unsigned")["make_small_unsigned"]
makes = {"0x5 small": make_small_fill_threads, "row pitch": make_small_row_pitch, "unsigned": make_small_unsigned}
calls = {name: small_version(make, more_threads=FILL_THREADS) for name, make in makes.items()}
assert small_ladder.check(calls["unsigned"]()) is None
pitches = small_ladder.times("row pitches", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# after the GPU run: check that the unsigned index reaches the prediction
say(
    "The small kernel of 0x5 takes {before:.2f} us, with the new row pitch {pitch:.2f}, and {unsigned:.2f} if the clearing loop "
    "also has an unsigned index.",
    before=pitches.get("0x5 small"),
    pitch=pitches.get("row pitch"),
    unsigned=pitches.get("unsigned"),
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
outputs, cumsum = (
    poisoned(SMALL_IDS, SMALL_EXPERTS, BLOCK),
    torch.empty(SMALL_EXPERTS + 1, dtype=torch.int32, device=DEVICE),
)
calls = {
    "main and sort kernel of 0x5": partial(
        run_both, make_parallel_fill(SMALL_EXPERTS), SMALL_IDS, outputs, cumsum, ctas=2
    ),
    "small kernel of 0x5": small_version(make_small_fill_threads, more_threads=FILL_THREADS),
    "small kernel, row pitch": small_version(make_small_row_pitch, more_threads=FILL_THREADS),
}
alternatives = small_ladder.times("small kernel or two launches", calls) or {}
say(
    "Is the small kernel worth having? For the same slots, the two kernels of 0x5 take {two:.1f} us, the small kernel of 0x5 takes "
    "{small:.1f} us, and {pitch:.1f} us without bank conflicts.",
    two=alternatives.get("main and sort kernel of 0x5"),
    small=alternatives.get("small kernel of 0x5"),
    pitch=alternatives.get("small kernel, row pitch"),
)

# %% [markdown]
# **Exercise align-5.** The order of the small kernel is the same in every run, but not ascending: thread 0 brings slots 0, 64 and
# 128 before thread 1 brings slot 1. Which slots must a thread take instead?

# %%
exercise("align-5").check(lambda thread, threads, numel: ...)

# %% [markdown]
# ## 5. A check must be able to fail
#
# Two wrong steps on purpose: one loses a slot, the other swaps two slots, which only a check of the order notices.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def spoiled(change):
    outputs = reference(IDS, BLOCK, EXPERTS)
    change(outputs[0])
    return outputs


def loses_a_slot(sorted_token_ids):
    sorted_token_ids[0] = NUMEL


def swaps_two_slots(sorted_token_ids):
    sorted_token_ids[:2] = sorted_token_ids[:2].flip(0)  # the first two places of expert 0


trial = Ladder("align_trial", ladder.check)
trial.step("loses a slot", lambda: (*spoiled(loses_a_slot), "any order", "any tail"), expect_wrong=True)
trial.step("swaps two slots", lambda: spoiled(swaps_two_slots), expect_wrong=True)
print("the second, where any order is accepted:", ladder.check((*spoiled(swaps_two_slots), "any order")))

# %% [markdown]
# ## 6. All steps
#
# All steps once more, interleaved, and how good the predictions were. The dashed lines are compiled kernels of other projects,
# measured by `python -m moe_numba bench align`.

# %%
ladder.measure_all()
ladder.save(notebook_sources("notebooks/02_align.py"))
small_ladder.measure_all()
small_ladder.save(notebook_sources("notebooks/02_align.py"))
for steps in (ladder, small_ladder):
    for row in steps.rows:
        if gain := steps.gain(row["step"]):
            print(f"{row['step']:<20} {gain}")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
PEERS = {}
for step in records.peers(ALIGN) if ALIGN else ():
    if recorded_us(ALIGN, step):
        version_of = records.find(ALIGN, step=step, **CASE).get("version", "").rpartition("@")[2]
        PEERS[f"{step.removeprefix('peer:')} {version_of}"] = recorded_us(ALIGN, step)
ladder.plot(floor_us=FLOOR_US, peers=PEERS)

# %%
small_ladder.plot()

# %% [markdown]
# ### Other sizes
#
# `sglang-aot` is SGLang's compiled kernel, from the record.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
SWEEP = (1, 8, 64) if SIMULATED else (1, 16, 64, 256, 1024, 4096, 16384)
MAKES = {"0x1": run_baseline, "0x3": version(make_search), "0x4": version(make_two_level), "0x5": run_0x5}
calls = {}
for tokens in SWEEP:
    ids = random_ids(tokens, EXPERTS, TOPK, DEVICE)
    for name, run in MAKES.items():
        calls[f"{name}, {tokens}"] = partial(run, ids, poisoned(ids, EXPERTS, BLOCK))
swept = ladder.times("sweep", calls) or {}
lines = {name: {} for name in MAKES}
for label, time in swept.items():
    name, tokens = label.split(", ")
    lines[name][int(tokens)] = time
if ALIGN:
    peer = records.series(ALIGN, step="peer:sglang-aot", config=CASE["config"])
    lines["sglang-aot"] = {tokens: stats for tokens, stats in peer.items() if tokens in lines["0x5"] or not swept}
lines = {name: points for name, points in lines.items() if points}
title = f"Align over tokens, {E} experts, top-{K}, blocks of {BLOCK}"
caption = f"The ports are timed with the ladder above; sglang-aot: {plots.caption(ALIGN)}" if ALIGN else ""
plots.sweep_figure(lines, title=title, caption=caption) if lines else None

# %% jupyter={"source_hidden": true} tags=["hide-input"]
both = {
    tokens: lines["0x5"][tokens] / stats["median"] for tokens, stats in lines.get("sglang-aot", {}).items() if swept
}
say(
    "The port of 0x5 is slower than SGLang's compiled kernel for {slower} tokens; the largest ratio is {ratio:.2f}.",
    slower=both and (", ".join(str(tokens) for tokens, ratio in both.items() if ratio > 1) or "no number of") or None,
    ratio=max(both.values(), default=None),
)

# %% [markdown]
# ## 7. What is left
#
# The sort kernel is the same in all versions. To see what it waits for, it is timed as it is, without the scattered stores,
# without the atomic operations, and with each counter in a cache line of its own, so that more parts of L2 can work on the
# counters.


# %%
@cache
def make_sort(atomic=True, scatter=True, spread=1):
    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, cumsum, numel, mask):
        for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
            counter = topk_ids[i] * spread
            place = atom_add_s32(cumsum, counter, 1) if atomic else cumsum[counter] + (i & 127)
            if scatter or place == -1:  # no place is -1; the comparison keeps the result of the atomic operation in use
                sorted_token_ids[place & mask] = i

    return kernel


# %% jupyter={"source_hidden": true} tags=["hide-input"]
VARIANTS = {
    "as it is": {},
    "no scattered stores": {"scatter": False},
    "no atomics": {"atomic": False},
    "a cache line per counter": {"spread": 32},
}
outputs, calls = poisoned(IDS, EXPERTS, BLOCK), {}
launch_main(make_parallel_fill(EXPERTS), IDS, outputs, CUMSUM)  # where each expert starts
for name, options in VARIANTS.items():
    spread = options.get("spread", 1)
    counters = torch.zeros(EXPERTS * spread, dtype=torch.int32, device=DEVICE)
    counters[::spread] = CUMSUM[:EXPERTS]
    arguments = IDS, outputs[0], counters, NUMEL, MASK
    calls[name] = partial(launch, make_sort(**options), -(-NUMEL // 256), 256, *arguments)
sort_us = ladder.times("sort kernel", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# after the GPU run: say which of the three removals accounts for the time
say(
    "As it is, the sort kernel takes {whole:.1f} us; without scattered stores {no_scatter:.1f}, without atomic operations "
    "{no_atomics:.1f}, with a cache line per counter {spread:.1f}. The variant that is much faster names the limit: the stores, the "
    "atomic operations themselves, or their few addresses, which share {cache_lines} cache lines.",
    whole=sort_us.get("as it is"),
    no_scatter=sort_us.get("no scattered stores"),
    no_atomics=sort_us.get("no atomics"),
    spread=sort_us.get("a cache line per counter"),
    cache_lines=-(-4 * (E + 1) // 128),
)

# %% [markdown]
# **Exercise align-4.** If many lanes of a warp have the same expert, one of them can add for all (a *warp-aggregated* atomic
# operation). The kernel computes the place of each slot; `next_place[e]` is where expert `e` continues. Change it so that a warp
# adds to a counter once.


# %%
@cuda.jit
def sort_aggregated(ids, next_place, places):
    i = cuda.grid(1)
    places[i] = cuda.atomic.add(next_place, ids[i], 1)


exercise("align-4").check(sort_aggregated)

# %% [markdown]
# ### The order changes from run to run
#
# The sort kernel has another property, which no time shows: `atomicAdd` hands out places in the order in which threads arrive.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def distinct_results(run, ids, times):
    """How many different outputs a version returns; in the simulator each run has its own seed."""
    seen = set()
    for n in range(times):
        with simulator.seed(n):
            seen.add(tuple(run(ids, poisoned(ids, EXPERTS, BLOCK))[0].tolist()))
    return len(seen)


RUNS = 4 if SIMULATED else 50
print(f"0x5: {distinct_results(run_0x5, IDS, RUNS)} different orders in {RUNS} runs")

# %% [markdown]
# The order decides how a GEMM may split and round its sums, so the same prompt can give other tokens. Users reported it
# ([sglang 33511](https://github.com/sgl-project/sglang/pull/33511)), and for vLLM there is a patch that sorts again
# ([vllm 52532](https://github.com/vllm-project/vllm/pull/52532)).
#
# Three things are left to gain: the second launch with its atomic operations, the counting in a single SM, and the elements that
# are written twice, first by the fill and then by a slot. [03_align_one_launch](03_align_one_launch.ipynb) removes all three, and
# returns the same order in every run.
#
# ## Sources
#
# - The article: *sgl-kernel MoE Align Block Size Kernel*, in Chinese, by the author of 0x1; 0x2 and 0x3 are by
#   [ispobock](https://github.com/ispobock), 0x4 by [yuan-luo](https://github.com/yuan-luo).
# - SGLang's pull requests [7437](https://github.com/sgl-project/sglang/pull/7437),
#   [7794](https://github.com/sgl-project/sglang/pull/7794), [7884](https://github.com/sgl-project/sglang/pull/7884) and
#   [14133](https://github.com/sgl-project/sglang/pull/14133); the last follows
#   [vllm 29642](https://github.com/vllm-project/vllm/pull/29642).
# - G. E. Blelloch, *Prefix sums and their applications*, 1990.
# - NVIDIA, *PTX ISA*: `st.global.v4`, `shfl.sync`, `atom`; *CUDA C++ Programming Guide*, on barriers in branches.
# - What the article claims, and what is measured: [appendix_claims](appendix_claims.ipynb).
