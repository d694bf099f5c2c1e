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
# data; this notebook measures what takes the time instead.
#
# It follows an article on SGLang's kernel
# ([`moe_align_kernel.cu`](https://github.com/sgl-project/sglang/blob/9fcf74e1d36629cc616701e2ad4cdde012372e19/python/sglang/kernels/aot/csrc/moe/moe_align_kernel.cu)).
# The article describes five versions, 0x1 to 0x5. You will port, measure and profile each:
#
# | version | what it changes | author |
# |---|---|---|
# | 0x1 | the baseline: a main kernel and a sort kernel, and one small kernel for few slots | the article's author |
# | 0x2 | the main kernel fills the padding ([PR 7437](https://github.com/sgl-project/sglang/pull/7437)) | ispobock |
# | 0x3 | a parallel prefix sum, and a binary search ([PR 7794](https://github.com/sgl-project/sglang/pull/7794)) | ispobock |
# | 0x4 | a prefix sum from warp shuffles ([PR 7884](https://github.com/sgl-project/sglang/pull/7884)) | yuan-luo |
# | 0x5 | a second CTA fills; shorter buffers ([PR 14133](https://github.com/sgl-project/sglang/pull/14133)) | BBuf, after jinzhen-lin's [vLLM PR 29642](https://github.com/vllm-project/vllm/pull/29642) |

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
from moe_numba.course.bench import kernel_time, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.records.dependencies import notebook_sources
from moe_numba.course.draw.phases import phase_bars
from moe_numba.course.draw.player import Player
from moe_numba.course.draw.shared_memory import barrier_steps
from moe_numba.course.draw.warp_frames import shuffles
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.align import draw
from moe_numba.course.lessons.dispatch_layout.draw import banks
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.align_runs import poisoned, random_ids, wrong
from moe_numba.course.steps.instruction_mix import instruction_mix
from moe_numba.course.steps.kernel_phases import phases_of, until, without_earlier
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.prediction import NOISE
from moe_numba.course.steps.simulate import changed_source, define, in_simulator, source_with_dependencies
from moe_numba.course.steps.source_diff import OpCounter, change
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
    "us, the port of 0x5 {last:.1f} us. SGLang's compiled kernel takes {peer:.1f} us; the port of 0x5 is {percent:.0f} % {verdict} "
    "(section 6 names the differences). The package's final kernel, which [03_align_one_launch](03_align_one_launch.ipynb) "
    "builds, takes {final:.1f} us and returns the same order in every run.",
    first=first_us,
    last=last_us,
    peer=sglang_us,
    percent=last_us and sglang_us and abs(100 * (last_us / sglang_us - 1)),
    verdict=last_us and sglang_us and ("slower" if last_us > sglang_us else "faster"),
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
# - `num_tokens_post_pad`: how much of `sorted_token_ids` is used. The array is long enough for any routing; the rest is the
#   **tail**.

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
# `wrong(outputs, ...)` compares a result with the package's reference; `None` means no error. The article's kernels leave the
# slots of an expert in any order, and the tail unwritten or only partly written; their results carry the tags "any order" and
# "any tail". Everything else must match, and outputs are poisoned before a kernel runs. The next cell sets the sizes. Recorded
# times belong to the H200 sizes only.

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
# The lower bound of a step is the longer of two times: its bytes at copy bandwidth, and an empty kernel; figures call it *speed
# of light*. Here an empty kernel takes longer than the bytes.
#
# The predictions below count operations that wait for each other: load an id, add to a counter, wait at a barrier. The next
# two cells measure one link of such chains. A link includes its address arithmetic: a shared load is one load instruction and
# three dependent integer instructions.

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
# the sizes that times belong to; without a GPU those of the record
E, T, K = (256, 4096, 8) if SIMULATED else (EXPERTS, TOKENS, TOPK)
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
BYTES = 4 * (N + TIMED_LENGTH + TIMED_LENGTH // BLOCK + 1)
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
# experts. Steps are compared by the main input; section 6 shows the rest. Each timing repeats its input, which stays in L2, as
# after the gate. A change, or a miss of a prediction, below two percent of the time before counts as noise.
#
# All versions and parts use the same `cumsum`, whose counters the sort kernel increments, so that its address cannot make a
# difference. Section 7 measures whether it would.


# %%
COUNTERS = torch.empty(33 * max(EXPERTS, 256), dtype=torch.int32, device=DEVICE)  # section 7 uses more of it
CUMSUM = COUNTERS[: EXPERTS + 1]


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
    """Print the predicted change; return 0 if the times it needs are not recorded."""
    print("predicted:", "unknown, no times are recorded" if gain_us is None else f"{-gain_us:+.2f} us")
    return gain_us or 0.0


# %% [markdown]
# ### Step 0: torch
#
# The reference, without operations that synchronise the CPU with the GPU, so that a CUDA graph can capture it.


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
print(f"{len(count.names)} operations, about as many kernels")
measure("torch", torch_align, operations=len(count.names))

# %% [markdown]
# ### Step 1: the baseline, 0x1
#
# **Bottleneck.** About 30 kernels, one after another.
#
# **Idea.** Two kernels of our own. The **main kernel** is a single CTA of 1024 threads. It counts into shared memory with
# atomic additions, one thread computes the scan, and one thread per expert writes `expert_ids`. The **sort kernel** has many
# CTAs: each thread takes a slot, adds 1 to its expert's `cumsum` and gets the slot's place. Before both, torch fills
# `sorted_token_ids` with `numel`.
#
# SGLang's kernel has a parameter `experts_per_warp = 32`, which suggests private counters per warp. But the index
# `expert // 32 * 32 + expert % 32` equals `expert`: all threads share one histogram. In the loop that clears it, all 32 lanes
# of a warp write the same 32 words. Comment lines such as `# scan` mark the phases; later cells use them.


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
# **Predicted gain.** torch's time less the sum of four parts (without `expert_ids`), computed from the links above and from
# **SASS**, the GPU's machine code:
#
# - `fill`: an empty kernel;
# - `count`: an empty kernel + slots / 1024 threads / loads at once * a load from L2. The compiler unrolls the loop by 4 and
#   issues four loads at once;
# - `scan`: experts * instructions per expert * 4 clocks. Assumption: 4 clocks per instruction, the latency of dependent integer
#   instructions on Hopper; independent instructions take less, shared loads more;
# - `sort`: an empty kernel + a load from L2 + a global atomic.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
POINTERS_AND_SIZES = ("int32*",) * 5 + ("int32",) * 3


@cache
def code_of(make):
    """The machine code of a version for 256 experts; None without nvdisasm."""
    if sass.disassembler() is None:
        return print("nvdisasm is missing: install nvidia-cuda-nvdisasm")
    mix = instruction_mix({"kernel": (f"{make.__name__}(256)", POINTERS_AND_SIZES, 1024)}, functions=[make])
    return mix.codes["kernel"]


def number(opcodes, name):
    return sum(opcode.startswith(name) for opcode in opcodes)


def loop_with(make, name, pick=max):
    """The instructions of the longest loop that contains this one, or with ``min`` the shortest; empty without nvdisasm."""
    code = code_of(make)
    loops = [code.opcodes[first : last + 1] for first, last in code.loops] if code else []
    return pick((body for body in loops if number(body, name)), key=len, default=[])


def instructions_per_expert(make):
    """SASS instructions of the scan's loop per expert, which is per shared load: the compiler unrolls the loop."""
    body = loop_with(make, "LDS")
    return len(body) / number(body, "LDS") if body else None


# %%
PER_EXPERT, AT_ONCE = instructions_per_expert(make_baseline), number(loop_with(make_baseline, "ATOMS"), "LDG")
PREDICTED = {}  # microseconds of each phase
if KNOWN and PER_EXPERT:
    PREDICTED["fill"] = EMPTY_US
    PREDICTED["count"] = EMPTY_US + N / 1024 / AT_ONCE * NS["a load from the L2"] / 1000
    PREDICTED["scan"] = E * PER_EXPERT * 4 / LIMITS.boost_clock * 1e6
    PREDICTED["sort"] = EMPTY_US + (NS["a load from the L2"] + NS["a global atomic"]) / 1000
gain = us("torch") - sum(PREDICTED.values()) if PREDICTED else None
print(
    f"{PER_EXPERT} instructions per expert, {AT_ONCE} loads at once;", {p: round(us, 1) for p, us in PREDICTED.items()}
)

# %%
measure("0x1 baseline", run_baseline, after="torch", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** `until(make, phase)` builds the same main kernel, cut off after a phase; the differences of such kernels
# approximate the phases, which may overlap at their borders. The cut loses no work, because stores and atomic operations on
# shared memory stay; but without a global store the compiler may load the ids through the read-only path (`LDG.E.CONSTANT`
# instead of `LDG.E`). The sort kernel is timed alone. Every replay advances the counters, so `sort_replayed` wraps the place
# into the array with a mask.


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
    outputs = poisoned(IDS, EXPERTS, BLOCK)
    launch_main(make(EXPERTS), IDS, outputs, CUMSUM)  # where each expert starts, for the sort kernel
    calls = {"fill": partial(outputs[0].fill_, NUMEL)} if fill else {}
    for phase in phases_of(make):
        calls[phase] = partial(launch_main, until(make, phase, globals())(EXPERTS), IDS, outputs, CUMSUM)
    calls["sort"] = partial(launch, sort_replayed, -(-NUMEL // 256), 256, IDS, outputs[0], CUMSUM, NUMEL, MASK)
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
LOOPS = {"0x1": len(loop_with(make_baseline, "ATOMS")), "no atomics": len(loop_with(no_atomics, "LDG"))}
atomics = {opcode for opcode in loop_with(make_baseline, "ATOMS") if "ATOM" in opcode}
print("atomic instructions of the main kernel:", atomics or "unknown")
print("instructions of the counting loop, for four slots:", LOOPS)


def issue_us(instructions):
    """Microseconds to issue this number of instructions per iteration of the counting loop; None without nvdisasm."""
    iterations = N / 1024 / AT_ONCE if AT_ONCE else 0
    return instructions * iterations * 8 / LIMITS.boost_clock * 1e6 or None  # 8 warps per scheduler


# %% jupyter={"source_hidden": true} tags=["hide-input"]
BASE = PHASES.get("0x1 baseline", {})
judged = ladder.gain("0x1 baseline")
say(
    "The predicted gain misses by {miss:.1f} of {gain:.1f} us, its parts by {parts:.1f} us in total (`expert_ids` has no "
    "prediction): misses of opposite sign partly cancel, and torch's time dominates the gain. The serial scan takes "
    "{clocks:.1f} clocks per instruction instead of the assumed 4; counting takes {count:.1f} us instead of {count_predicted:.1f}, and the sort kernel {sort:.1f} instead of "
    "{sort_predicted:.1f}. The scan is still the largest phase, {scan:.1f} of {total:.1f} us: the article is right to call it a "
    "bottleneck. Section 7 measures what the sort kernel waits for.",
    miss=judged and abs(judged.saved_us - judged.predicted_us),
    gain=judged and judged.saved_us,
    parts=PREDICTED and sum(abs(us - PREDICTED.get(phase, 0)) for phase, us in BASE.items()) or None,
    clocks=BASE and PER_EXPERT and BASE["scan"] * LIMITS.boost_clock / 1e6 / E / PER_EXPERT or None,
    count=BASE.get("count"),
    count_predicted=PREDICTED.get("count"),
    sort=BASE.get("sort"),
    sort_predicted=PREDICTED.get("sort"),
    scan=BASE.get("scan"),
    total=us("0x1 baseline"),
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The article also suspects the atomic additions in the count phase. It takes {count:.1f} us, {same:.1f} if all tokens choose the "
    "same experts, and {none:.1f} without atomic additions: they are not its bottleneck. They are `ATOMS.POPC.INC`, which counts "
    "the lanes of a warp with the same address in one operation; the compiler chooses it if 1 is added and the result is not used. "
    "The prediction leaves out the time to issue instructions. An iteration of the loop, four slots, has {loop} of "
    "them; most compute the index and addresses. Each of the SM's four schedulers serves 8 warps and issues at most one "
    "instruction per clock, so the loop needs {issue:.1f} us for issue alone. Without atomic additions it has {longer}, because of the "
    "comparison that keeps the loads: {more:.2f} us more to issue, and {slower:.2f} us slower as measured. The predicted loads and "
    "the issue make {explained:.1f} us together, if they do not overlap; step 3 measures the clearing loop.",
    count=counting and counting["random ids"],
    same=counting and counting["same experts"],
    none=counting and counting["no atomics"],
    loop=LOOPS["0x1"] or None,
    issue=issue_us(LOOPS["0x1"]),
    longer=LOOPS["no atomics"] or None,
    more=issue_us(LOOPS["no atomics"] - LOOPS["0x1"]),
    slower=counting and counting["no atomics"] - counting["random ids"],
    explained=PREDICTED and issue_us(LOOPS["0x1"]) and PREDICTED["count"] + issue_us(LOOPS["0x1"]) or None,
)

# %% [markdown]
# ### Step 2: fill in the kernel, 0x2
#
# **Bottleneck.** The fill is a launch of its own; the bar above shows its part.
#
# **Idea.** The main kernel fills the used part of `sorted_token_ids` at its end, and the sort kernel overwrites the places that
# get a slot. `st_global_s32x4`, which is `st.global.v4.s32`, stores four elements at once. The article expects four times the
# bandwidth of single stores, and almost no cost.
#
# **Predicted gain.** `fill` - used part * (a fill by one CTA - an empty kernel): the launch of the fill disappears, but the
# used part now leaves through one SM. The next cell times one CTA that only fills the whole array, with both kinds of store.


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
used = (N + E * BLOCK / 2) / TIMED_LENGTH  # about half of each last block is padding
gain = BASE["fill"] - used * (fills["16-byte stores"] - EMPTY_US) if fills and BASE else None


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def profile_fills():
    for kernel in (only_fill, only_fill_singly):
        with simulator.profile() as profile:
            launch(kernel, 1, 128, torch.zeros(4096, dtype=torch.int32), 1, 4096)
        name = kernel.py_func.__name__
        total = profile[name].total
        print(f"{name}: {total.global_store_requests} store requests, {total.global_store_sectors} sectors of 32 bytes")


in_simulator(profile_fills)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
sectors, clock = TIMED_LENGTH / 8, LIMITS.boost_clock / 1e6
clocks = fills and {kind: (time - EMPTY_US) * clock / sectors for kind, time in fills.items()}
say(
    "About {used:.0f} % of the array is used. Filling all of it with one CTA takes {wide:.2f} us with 16-byte stores and {single:.2f} "
    "us with 4-byte stores. The lanes of a warp store to neighbouring addresses either way, so both kernels write the same "
    "sectors of 32 bytes. Wide stores need a quarter of the instructions and are still not faster: {a:.1f} and {b:.1f} clocks "
    "per sector, start-up included, suggest that the path from the SM to L2 is the limit. More bandwidth than that needs more SMs.",
    used=100 * used,
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
# **Explanation.** The tail is not filled. The fill rounds up to four elements, so the buffer's length must be a multiple of
# four. It comes last; only `expert_ids`, from which no barrier separates it, can overlap with it. The phases, and both versions
# with few tokens:

# %%
phases("0x2 padding inside", make_padding)
arguments = OTHERS["few"], poisoned(OTHERS["few"], EXPERTS, BLOCK)
calls = {"0x1": partial(run_baseline, *arguments), "0x2": partial(version(make_padding), *arguments)}
few_us = ladder.times("0x1 and 0x2 with few tokens", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
judged, few_change = ladder.gain("0x2 padding inside"), few_us and few_us["0x2"] / few_us["0x1"] - 1
say(
    "With {tokens} tokens, 0x1 takes {before:.2f} us and 0x2 {after:.2f} us. This change, {few:+.1f} %, {verdict}; with {all_tokens} "
    "tokens it is {all:+.1f} %. With less to fill, the saved launch counts for more.",
    tokens=64 if SIMULATED else FEW_TOKENS,
    before=few_us.get("0x1"),
    after=few_us.get("0x2"),
    few=few_us and 100 * few_change,
    verdict=few_us and ("is more than noise" if abs(few_change) > NOISE else "counts as noise"),
    all_tokens=T,
    all=judged and -100 * judged.saved_us / judged.before_us,
)

# %% [markdown]
# ### Step 3: plain counters, 0x3
#
# The three changes of 0x3 are separate steps here.
#
# **Bottleneck.** Still the serial scan. Part of its instructions compute `warp * 32 + offset` in 64 bits, with extra
# instructions for Python's floor division of negative numbers.
#
# **Idea.** `shared_counts[expert]`. The index becomes simpler in the scan and in counting, and one thread clears each counter.
#
# **Predicted gain.** For the scan only: `scan` * (1 - instructions per expert now / before).


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
# **Explanation.** The prediction leaves out the phase `count`: the index of its atomic additions, and the loop that cleared the
# counters.

# %%
phases("0x3 plain counters", make_plain)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
INDEX = "            warp, offset = topk_ids[i] // experts_per_warp, topk_ids[i] % experts_per_warp\n"
text = changed_source(make_baseline, INDEX + ATOMIC, "            cuda.atomic.add(shared_counts, topk_ids[i], 1)\n")
old_clearing = define(text, globals(), "plain index, old clearing loop")["make_baseline"]
outputs, counts_of = (
    poisoned(IDS, EXPERTS, BLOCK),
    {"0x1": make_baseline, "plain index": old_clearing, "0x3": make_plain},
)
calls = {
    name: partial(launch_main, until(make, "count", globals())(EXPERTS), IDS, outputs, CUMSUM)
    for name, make in counts_of.items()
}
clearing = ladder.times("index and clearing loop", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
before, after = PHASES.get("0x2 padding inside"), PHASES.get("0x3 plain counters")
drop = {phase: before[phase] - after[phase] for phase in after} if before and after else {}
loop = len(loop_with(make_plain, "ATOMS"))
say(
    "The scan, which the prediction is about, is {scan:.1f} us shorter, and `count` {count:.1f}. An iteration of the counting loop has {now} "
    "instead of {old} instructions, which saves {issue:.1f} us of issue. With the new index and the old clearing loop, in which a warp "
    "stores 32 words one after another, `count` takes {plain_index:.1f} us: the index saves {by_index:.1f} us, the clearing loop "
    "{by_clearing:.1f}. `expert_ids`, whose source is the same, is {ids:.1f} us "
    "shorter; no measurement here isolates why.",
    scan=drop.get("scan"),
    count=drop.get("count"),
    now=loop or None,
    old=LOOPS["0x1"] or None,
    issue=issue_us(LOOPS["0x1"] - loop),
    plain_index=clearing.get("plain index"),
    by_index=clearing and clearing["0x1"] - clearing["plain index"] or None,
    by_clearing=clearing and clearing["plain index"] - clearing["0x3"] or None,
    ids=drop.get("expert_ids"),
)

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
# The two sweeps of the article's eight numbers:

# %%
NUMBERS = [3, 1, 7, 0, 4, 1, 6, 3]
draw.blelloch(NUMBERS)

# %% [markdown]
# The next cell runs `blelloch_scan` in the simulator and plays its trace, a frame per barrier; blue elements are stored in this
# step.


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
# In the kernel, the thread of an expert rounds its count up into `scan_buf`, whose length is the next power of two; `prefix`
# keeps the result.
#
# **Predicted gain.** `scan` - levels * (a barrier + a shared load) - 3 barriers. 256 experts have 16 levels, 8 up and 8 down.
# The three barriers come after filling `scan_buf`, after the zero and after `prefix`.


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
scan_us = (levels * (NS["a barrier"] + NS["a shared load"]) + 3 * NS["a barrier"]) / 1000 if KNOWN else None
gain = before["scan"] - scan_us if before else None
measure("0x3 Blelloch scan", version(make_blelloch), after="0x3 plain counters", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** 16 levels replace 256 iterations, but a level takes longer: it has a barrier, two loads and a store or two. Its
# strided accesses have bank conflicts, too: step 6 counts them, [small step 3](#Small-step-3:-pad-the-rows) explains them.

# %%
phases("0x3 Blelloch scan", make_blelloch)
show_phases()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
before, after = PHASES.get("0x3 plain counters"), PHASES.get("0x3 Blelloch scan")
say(
    "The loop took {loop:.0f} ns per expert; the sweeps take {level:.0f} ns for each of their {levels} levels. The scan "
    "takes {now:.1f} us instead of {then:.1f}.",
    then=before and before["scan"],
    now=after and after["scan"],
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
# **Predicted gain.** `expert_ids` - blocks per thread, rounded up * 8 * a shared load: a thread searches up to 3 blocks, with
# 8 dependent shared loads each (9 for expert 0).


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
search_us = -(-blocks // 1024) * (E - 1).bit_length() * NS["a shared load"] / 1000 if KNOWN else None
gain = before["expert_ids"] - search_us if before else None
measure("0x3 binary search", version(make_search), after="0x3 Blelloch scan", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The phases, and both versions when all tokens choose the same experts, the case that the search is for:

# %%
phases("0x3 binary search", make_search)
outputs = poisoned(SKEWED, EXPERTS, BLOCK)
makes = {"a thread per expert": make_blelloch, "binary search": make_search}
calls = {name: partial(version(make), SKEWED, outputs) for name, make in makes.items()}
skewed = ladder.times("skewed ids", calls)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
before, after = PHASES.get("0x3 Blelloch scan"), PHASES.get("0x3 binary search")
step, iterations = len(loop_with(make_search, "LDS", min)), (E - 1).bit_length()
judged = ladder.gain("0x3 binary search")
issue = blocks / 32 * iterations * step / 4 / LIMITS.boost_clock * 1e6  # 32 blocks per warp, 4 schedulers
say(
    "The prediction counts only the shared loads, {loads:.1f} us. But each of the {iterations} iterations per block has {step} "
    "instructions, and issuing them for all blocks takes at least {issue:.1f} us; the whole phase took {before:.1f} us before. It now "
    "takes {after:.1f} us; loads and issue together leave {rest:.1f} us of it unexplained. For random ids the whole step is "
    "{change:.2f} us {slower}. When all tokens choose the same experts, the version with a thread per expert takes {loop:.1f} us "
    "and the one with the search {search:.1f} us.",
    loads=search_us,
    iterations=iterations,
    step=step or None,
    issue=issue or None,
    before=before and before["expert_ids"],
    after=after and after["expert_ids"],
    rest=after and issue and search_us and after["expert_ids"] - search_us - issue or None,
    change=judged and abs(judged.saved_us),
    slower=judged and ("faster" if judged.saved_us > 0 else "slower"),
    loop=skewed and skewed["a thread per expert"],
    search=skewed and skewed["binary search"],
)

# %% [markdown]
# ### Step 6: a scan in two levels, 0x4
#
# **Bottleneck.** Every level of Blelloch's tree ends with a barrier of the whole CTA. The article counts 14 for 128 experts, which
# is right for the two sweeps; the kernel has 5 more, 2 in `count` and 3 around the sweeps.
#
# **Idea.** The lanes of a warp exchange registers with shuffles: no shared memory, no barrier. `shfl_up` returns the value of
# the lane `offset` below; with the offsets 1, 2, 4, 8 and 16 each lane sums its own value and those of all lanes below it. At the
# end it subtracts its own value, which makes the scan exclusive.


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
# Lanes without a source receive their own value (white) and do not add it. Blue: received and added. The sums of all rounds, and
# what remains after the subtraction:

# %%
draw.warp_scan(NUMBERS)

# %% [markdown]
# 256 experts are eight warps, so there are **two levels**: every warp scans its 32 values, warp 0 scans the sums of the warps,
# and every thread adds what is before its warp.

# %%
draw.two_level_scan()

# %% [markdown]
# The article's complete flow has one pass of exclusive scans. SGLang's source scans twice, first for the total, then for the
# starts. The port follows the source, with a function for each pass.
#
# **Predicted gain.** Fewer barriers * a barrier + 16 shared loads - 20 shuffles. The simulator counts the barriers: 9 fewer for
# 128 experts, so 11 fewer for 256. The 16 dependent loads of the sweeps become 20 dependent shuffles, 5 for each of four warp
# scans.


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


def count_conflicts(name):
    torch.manual_seed(0)
    with simulator.profile() as profile:
        simulate(globals()[name], random_ids(8, 64, 4), 64)
    return profile["kernel"].total.bank_conflicts


COMPARED = {"serial": make_plain, "Blelloch": make_search, "two levels": make_two_level}
BARRIERS = {name: barriers(make) for name, make in COMPARED.items()}
conflicts = {
    name: in_simulator(count_conflicts, make.__name__, functions=[make], constants=IN_SIMULATOR)
    for name, make in COMPARED.items()
}
print("barriers of the main kernel, 128 experts:", BARRIERS)
print("bank conflicts, 64 experts:", conflicts)

# %%
more_levels = levels - 14  # than for 128 experts
fewer_barriers = BARRIERS["Blelloch"] - BARRIERS["two levels"] + more_levels
scan_loads = levels * NS["a shared load"] - 20 * NS["a shuffle"] if KNOWN else None
gain = (fewer_barriers * NS["a barrier"] + scan_loads) / 1000 if KNOWN else None
measure("0x4 two-level scan", version(make_two_level), after="0x3 binary search", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The scan before and after:

# %%
phases("0x4 two-level scan", make_two_level)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def unchanged_phases(before, after):
    """How much longer two phases take whose source did not change; None if it is not known."""
    return before and after and sum(after[phase] - before[phase] for phase in ("expert_ids", "fill"))


before, after = PHASES.get("0x3 binary search"), PHASES.get("0x4 two-level scan")
judged = ladder.gain("0x4 two-level scan")
say(
    "The scan takes {after:.2f} us instead of {before:.2f}, where {predicted:.2f} us less were predicted. `expert_ids` and `fill`, whose "
    "source is the same, change by {rest:+.2f} us together. The step saves {saved:.2f} us; less than {noise:.2f} us, two percent of "
    "the time before, counts as no change. The scan has not been the bottleneck since step 4.",
    before=before and before["scan"],
    after=after and after["scan"],
    predicted=judged and judged.predicted_us,
    rest=unchanged_phases(before, after),
    saved=judged and judged.saved_us,
    noise=judged and NOISE * judged.before_us,
)

# %% [markdown]
# #### A race in SGLang's source
#
# The last barrier before the search is ours. In SGLang's source, the first threads write `prefix[tid]`, and all threads search
# all of `prefix` ([PR 37663](https://github.com/sgl-project/sglang/pull/37663) of September 2026 adds the barrier). An early warp
# reads elements that are not written yet. On a GPU, warps that run close together may hide it. The simulator shows it with its
# race detector, and by running the kernel under several seeds, that is, orders of threads:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def as_in_sglang():
    barrier = "        cuda.syncthreads()  # SGLang's source had no barrier here\n"
    return define(changed_source(make_two_level, barrier, ""), globals(), "0x4 as in SGLang")["make_two_level"]


def race():
    torch.manual_seed(0)
    ids = random_ids(64, 64, 4)
    for name, make in {"as in SGLang's source": as_in_sglang(), "with the barrier": make_two_level}.items():
        failing = {}
        for seed in range(8):
            with simulator.seed(seed):
                if error := simulate(make, ids, 64):
                    failing[seed] = error
        print(f"{name}: wrong under the seeds {list(failing)}", *list(failing.values())[:1], sep="; ")
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
# The race can only change `expert_ids`: the GEMM would use another expert's matrix for a block, or skip it, and no error would
# be raised.
#
# **Exercise align-1.** The kernel scans 64 counts exclusively, in one CTA of 64 threads, but each warp only knows its own lanes.
# Complete it.


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


exercise("align-1").check(scan_64)

# %% [markdown]
# ### Step 7: one scan
#
# **Bottleneck.** Within the scan: two passes over the same values.
#
# **Idea.** The last expert's start plus its count is the total, so the first pass disappears, and with it `scan_buf`: a thread keeps
# its value in a register. Three barriers remain in the scan, as the article counts.
#
# **Predicted gain.** Fewer barriers * a barrier + 10 shuffles + 2 shared loads.


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
BARRIERS["one pass"] = barriers(make_one_pass)
print("barriers of the main kernel, 128 experts:", BARRIERS)
fewer_barriers = BARRIERS["two levels"] - BARRIERS["one pass"]
saved_ns = fewer_barriers * NS["a barrier"] + 10 * NS["a shuffle"] + 2 * NS["a shared load"] if KNOWN else None
gain = saved_ns / 1000 if KNOWN else None
measure("0x4, one pass", version(make_one_pass), after="0x4 two-level scan", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The change of the scan, as far as the cuts separate it from its neighbours:

# %%
phases("0x4, one pass", make_one_pass)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
before, after = PHASES.get("0x4 two-level scan"), PHASES.get("0x4, one pass")
judged = ladder.gain("0x4, one pass")
say(
    "By the cuts, the scan is {scan:.2f} us shorter; the whole step saves {step:.2f} us, and {predicted:.2f} were predicted. No "
    "measurement here isolates the difference. `expert_ids` and `fill`, whose source is the same, change by {rest:+.2f} us together; "
    "no barrier separates them, so the split between the two is uncertain.",
    scan=before and after and before["scan"] - after["scan"],
    step=judged and judged.saved_us,
    predicted=judged and judged.predicted_us,
    rest=unchanged_phases(before, after),
)

# %% [markdown]
# ### Step 8: fill first, the starting point of 0x5
#
# **Bottleneck.** The fill waits for the scan, which computes how much is used.
#
# **Idea.** In its chapter on 0x5 the article starts from a kernel that fills the whole array at the beginning, one element per
# store. The SM can then send these stores while the threads count.
#
# **Predicted gain.** Used part * (16-byte fill - an empty kernel) - (4-byte fill - an empty kernel): the fill of step 2, longer by
# the tail, but with the stores that were faster. The model ignores that the fill overlaps with the search now, and may overlap
# with counting.


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
gain = used * (fills["16-byte stores"] - EMPTY_US) - (fills["4-byte stores"] - EMPTY_US) if fills else None
run = version(make_filling_first)
measure("0x4, filling first", run, after="0x4, one pass", predicted_gain_us=predict(gain), slower=True)

# %% [markdown]
# **Explanation.** The phases, and the same version with 16-byte stores:

# %%
phases("0x4, filling first", make_filling_first)
text = changed_source(make_filling_first, "fill_singly(", "fill(", "make_wide")
make_wide = define(text, globals(), "filling first, 16-byte stores")["make_wide"]
outputs = poisoned(IDS, EXPERTS, BLOCK)
calls = {"4-byte stores": partial(run, IDS, outputs), "16-byte stores": partial(version(make_wide), IDS, outputs)}
widths = ladder.times("filling first", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
before, after = PHASES.get("0x4, one pass"), PHASES.get("0x4, filling first")
known = KNOWN and before and after
say(
    "The stores hardly overlap with counting: without the launch, it took {count_before:.2f} us before and takes {count:.2f} us after "
    "the fill. The fill no longer overlaps with the search: it takes {fill:.2f} us without the launch, but took {fill_before:.2f} at the end of "
    "the kernel, where no barrier separates the two. `scan` and `expert_ids`, whose source is the same, take {rest:.2f} us more; no "
    "measurement here isolates why. Wider stores do not help: the version takes {single:.2f} us with 4-byte stores and {wide:.2f} with 16-byte stores.",
    count_before=known and before["count"] - EMPTY_US or None,
    count=known and after["count"] or None,
    fill=known and after["fill"] - EMPTY_US or None,
    fill_before=known and before["fill"] or None,
    rest=known and sum(after[phase] - before[phase] for phase in ("scan", "expert_ids")) or None,
    single=widths.get("4-byte stores"),
    wide=widths.get("16-byte stores"),
)

# %% [markdown]
# ### Step 9: a second CTA fills, 0x5
#
# **Bottleneck.** One SM does everything in the main kernel; all others are idle.
#
# **Idea.** The fill needs neither counts nor scan. The main kernel is launched with two CTAs: CTA 1 fills and returns, CTA 0
# does the rest. They need no synchronisation, because the sort kernel, which overwrites the fill, is a later launch.
#
# **Predicted gain.** `fill` + rest - max(CTA 1, CTA 0). CTA 1 takes as long as the 4-byte fill of step 2, CTA 0 an empty kernel
# and the rest: `count`, `scan` and `expert_ids`.


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
before, gain = PHASES.get("0x4, filling first"), None
if before and fills:
    rest = sum(before[phase] for phase in ("count", "scan", "expert_ids"))
    gain = before["fill"] + rest - max(fills["4-byte stores"], EMPTY_US + rest)
    print(f"CTA 1: {fills['4-byte stores']:.2f} us, CTA 0: {EMPTY_US + rest:.2f} us")
run_0x5 = version(make_parallel_fill, ctas=2)
measure("0x5 parallel fill", run_0x5, after="0x4, filling first", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** The phases of CTA 0, launched without CTA 1. The whole takes hardly longer, so the fill is hidden:

# %%
phases("0x5 parallel fill", make_parallel_fill)
show_phases()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
LAST = PHASES.get("0x5 parallel fill", {})
say(
    "Of the {total:.1f} us of 0x5, the sort kernel takes {sort:.1f}, which no version has changed, and counting, with the launch, "
    "{count:.1f}. The scan, the largest phase of 0x1, takes {after:.1f} us instead of {before:.1f}, as far as the cuts "
    "separate it from its neighbours.",
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
# **Exercise align-2.** The rule is sufficient, but not tight. Write a function that returns the fewest places that suffice for
# any routing; each slot may choose any expert.

# %%
exercise("align-2").check(lambda numel, num_experts, block_size: ...)

# %% [markdown]
# With the short buffer, both versions have less to fill:


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
    "second CTA that fills, {c:.2f} and {d:.2f} us. The shorter buffer saves less there, because the fill runs beside CTA 0.",
    a=lengths.get("filling first, old length"),
    b=lengths.get("filling first, new length"),
    c=lengths.get("a second CTA fills, old length"),
    d=lengths.get("a second CTA fills, new length"),
)

# %% [markdown]
# #### Other ids and more experts
#
# SGLang's kernel is a template over the type of the ids. Numba compiles the same source for the types of its arguments, so
# 64-bit ids need no change. The main kernel has one thread per expert, so a CTA of 1024 threads supports at most
# 1024 experts:

# %%
for ids, experts in ((IDS.long(), EXPERTS), (random_ids(16, THREADS, TOPK, DEVICE), THREADS)):
    outputs = poisoned(ids, experts, BLOCK)
    result = run_both(make_parallel_fill(experts), ids, outputs, COUNTERS, ctas=2)
    print(ids.dtype, experts, "experts:", wrong(result, ids, experts, BLOCK) or "correct")

# %% [markdown]
# ## 4. The small kernel
#
# For at most 64 experts and fewer than 1024 slots, the article has a kernel that does everything in one launch of one CTA, and
# without atomics: each thread has a row of counters of its own in shared memory, `tokens_cnts`.
#
# 1. Thread `t` clears row `t + 1` and counts its slots there; row 0 is zero.
# 2. The thread of an expert sums up its column. Row `t` then holds, for each expert, the slots of the threads below `t`.
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
# **Predicted gain.** `fill` - (a fill by the counting threads - an empty kernel). The next cell measures it, and a fill by the
# 256 threads that the next step adds.

# %%
few_threads, filled = SMALL_THREADS, poisoned(SMALL_IDS, SMALL_EXPERTS, BLOCK)[0]
FILL_THREADS = 64 if SIMULATED else 256
fill_calls = {
    name: partial(launch, only_fill_singly, 1, threads, filled, SMALL_IDS.numel(), len(filled))
    for name, threads in {"counting threads": few_threads, "fill threads": FILL_THREADS}.items()
}
small_fills = small_ladder.times("fills", fill_calls)
print("kernels that only fill, in us:", small_fills)
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
# **Explanation.** The launch now counts for `fill`; so `count` is shorter, but by less than a launch:

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
# In the article's listing the fill threads call `__syncthreads()` three times in a branch of their own, to match the barriers
# of the other branch. PTX's `bar.sync` permits it for whole warps; CUDA C++ does not, so the behaviour is undefined. The
# simulator rejects it:


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
# **Predicted gain.** The fill of the counting threads - what the fill threads take longer than the counting, if they do.


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
run, gain = small_version(make_small_fill_threads, more_threads=FILL_THREADS), None
if fill_us is not None and (before := SMALL_PHASES.get("0x2 small")):
    gain = fill_us - max(0, small_fills["fill threads"] - EMPTY_US - before["count"])
small_ladder.step("0x5 small", run, dtype="int32", after="0x2 small", predicted_gain_us=predict(gain))

# %% [markdown]
# **Explanation.** In `count`, the fill now runs beside the counting:

# %%
times = small_ladder.times("phases of 0x5 small", cut_off(make_small_fill_threads, more_threads=FILL_THREADS))
show_small("0x5 small", make_small_fill_threads, times)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "With its launch, `count` takes {now:.2f} us; in 0x1, where nothing is filled beside it, it takes {alone:.2f} us. A kernel whose "
    "{threads} threads only fill takes {fill:.2f} us.",
    now=SMALL_PHASES.get("0x5 small", {}).get("count"),
    alone=SMALL_PHASES.get("0x1 small", {}).get("count"),
    threads=256 if SIMULATED else FILL_THREADS,
    fill=small_fills and small_fills["fill threads"],
)

# %% [markdown]
# ### Small step 3: pad the rows
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
# **Idea.** Make rows longer, so that the same column lies in another bank in each row; here with 8 banks instead of 32:

# %%
banks()

# %% [markdown]
# **Exercise align-3.** Return a row pitch in words (at least `num_experts`, at most `2 * num_experts + 2`) without bank conflicts
# when 32 threads read the same column, for any number of experts.

# %%
exercise("align-3").check(lambda num_experts: ...)

# %% [markdown]
# **Predicted gain.** Removed conflicts / clock rate: an SM delivers one wavefront per clock, so each removed conflict saves one
# clock. The conflicts that remain come from counters indexed by expert id, where the lanes of a warp access random columns.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_small_row_pitch(num_experts, fill_threads=FILL_THREADS):
    threads = max(num_experts, 32)
    pitch, ends, cells = num_experts | 1, num_experts + 1, (threads + 1) * (num_experts | 1)

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
# **Explanation.** In Numba a negative index counts from the end of an array, so compiled code tests the sign of each index:
# with rows of 64 words, the sign of the row's start decides for all 64 stores of the clearing loop; with 65, each store is
# tested. With an unsigned start of the row, computed before the loop, the compiler adds constants to one address:

# %%
times = small_ladder.times("phases of row pitch", cut_off(make_small_row_pitch, more_threads=FILL_THREADS))
show_small("row pitch", make_small_row_pitch, times)

# %%
loop = "            for i in range(num_experts):\n                tokens_cnts["
start = "            row = uint32((tid + 1) * pitch)\n" + loop
text = changed_source(make_small_row_pitch, loop + "(tid + 1) * pitch + i]", start + "row + i]", "make_small_row")
make_small_row = define(text, globals(), "row pitch, unsigned row")["make_small_row"]
more = changed_source(make_small_row, "tid * pitch + topk_ids[i]", "uint32(tid * pitch + topk_ids[i])", "make_sorted")
make_sorted = define(more, globals(), "unsigned row and sort")["make_sorted"]
makes = {"0x5 small": make_small_fill_threads, "row pitch": make_small_row_pitch}
makes |= {"unsigned row": make_small_row, "unsigned sort": make_sorted}
calls = {name: small_version(make, more_threads=FILL_THREADS) for name, make in makes.items()}
assert all(small_ladder.check(call()) is None for call in calls.values())
pitches = small_ladder.times("row pitches", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
if sass.disassembler():
    source = source_with_dependencies([make_small_fill_threads, make_small_row_pitch]) + f"\n{text}\n{more}"
    signature = ("int32*",) * 4 + ("int32",) * 3
    requests = {name: (f"{make.__name__}(64, 256)", signature, 320, False) for name, make in makes.items()}
    codes = sass.compile_apart(source, requests)
    print("instructions:", {name: len(code.opcodes) - code.count("NOP") for name, code in codes.items()})

# %% jupyter={"source_hidden": true} tags=["hide-input"]
before, after = SMALL_PHASES.get("0x5 small"), SMALL_PHASES.get("row pitch")
small = before and after and {phase: after[phase] - before[phase] for phase in after}
say(
    "The clearing loop loses all its conflicts; the other lines gain a few. `count` is {count:.2f} us shorter, and `sort` changes by "
    "{sort:+.2f} us. "
    "Without the sign tests in the clearing loop the kernel takes {unsigned:.2f} us, with them {pitch:.2f}, and {before:.2f} before "
    "the step: {saved:.2f} us less, of {predicted:.2f} predicted. With an unsigned index in `sort`, too, it takes {unsigned_sort:.2f} "
    "us; no measurement here isolates the rest.",
    count=small and -small["count"],
    sort=small and small["sort"],
    before=pitches.get("0x5 small"),
    pitch=pitches.get("row pitch"),
    unsigned=pitches.get("unsigned row"),
    unsigned_sort=pitches.get("unsigned sort"),
    saved=pitches and pitches["0x5 small"] - pitches["unsigned row"] or None,
    predicted=gain,
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
outputs = poisoned(SMALL_IDS, SMALL_EXPERTS, BLOCK)
calls = {
    "main and sort kernel of 0x5": partial(run_both, make_parallel_fill(SMALL_EXPERTS), SMALL_IDS, outputs, ctas=2),
    "small kernel of 0x5": small_version(make_small_fill_threads, more_threads=FILL_THREADS),
    "small kernel, row pitch": small_version(make_small_row_pitch, more_threads=FILL_THREADS),
}
alternatives = small_ladder.times("small kernel or two launches", calls) or {}
say(
    "For these slots the small kernel is not worth having: it takes {small:.1f} us in 0x5 and {pitch:.1f} us with padded rows, the "
    "two large kernels of 0x5 take {two:.1f} us together. It saves one launch, but one of its threads still scans alone, for "
    "{scan:.1f} us, and the column sums take {sums:.1f} us.",
    two=alternatives.get("main and sort kernel of 0x5"),
    small=alternatives.get("small kernel of 0x5"),
    pitch=alternatives.get("small kernel, row pitch"),
    scan=SMALL_PHASES.get("row pitch", {}).get("scan"),
    sums=SMALL_PHASES.get("row pitch", {}).get("column sums"),
)

# %% [markdown]
# **Exercise align-4.** The order of the small kernel is the same in every run, but not ascending: an expert's slots of thread 0,
# such as 64, come before those of thread 1, such as 1. Return the slots that `thread` must take instead, at most
# `ceil(numel / threads)`.

# %%
exercise("align-4").check(lambda thread, threads, numel: ...)

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
print("the second, where any order is accepted:", ladder.check((*spoiled(swaps_two_slots), "any order")) or "accepted")

# %% [markdown]
# ## 6. All steps
#
# All steps once more, interleaved, and how good the predictions were. `previous` of 0x5 is `0x4, one pass`. The lines
# `sglang-aot` (the kernel of this notebook), `sglang-v2` (SGLang's newer one) and `vllm` are recorded times of compiled kernels,
# with their commits, measured by `python -m moe_numba bench align`.
#
# The port of 0x5 follows the article; `sglang-aot` scans twice, as in step 6, and fills with 16-byte stores. Neither explains
# why `sglang-aot` is faster for 4096 tokens: one scan was the faster one (step 7), and wide stores gained nothing (steps 2 and
# 8). The cause is not isolated here.
#
# Other inputs (second table) are not interleaved: differences below five percent may be noise.

# %%
for steps in (ladder, small_ladder):
    steps.measure_all()
    for row in steps.rows:
        if gain := steps.gain(row["step"]):
            print(f"{row['step']:<20} {gain}")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
headings = {"few_us": f"{FEW_TOKENS} tokens", "one_us": "1 token", "skewed_us": "same experts"}
if SIMULATED:
    headings["few_us"] = "64 tokens"  # of the record
print(f"{'us, other inputs':<22}", "".join(f"{heading:>14}" for heading in headings.values()))
for step in (row["step"] for row in ladder.rows):
    if "one_us" in (found := ladder.row(step) or {}):
        print(f"{step:<22}", "".join(f"{found[key]:>14.2f}" for key in headings))

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
captions = ["Ports: timed by this notebook, interleaved."] if swept else []
if "sglang-aot" in lines:
    captions.append(f"sglang-aot: {plots.caption(ALIGN)}; the band spans its 10th to 90th percentile.")
caption = " ".join(captions)
plots.sweep_figure(lines, title=title, caption=caption) if lines else None

# %% jupyter={"source_hidden": true} tags=["hide-input"]
both = {
    tokens: lines["0x5"][tokens] / stats["median"] for tokens, stats in lines.get("sglang-aot", {}).items() if swept
}
say(
    "The port of 0x5 takes {least:.2f} to {ratio:.2f} times as long as the recorded SGLang kernel. It is over 5 % slower for {slower} "
    "tokens; smaller differences may be noise, because the two were measured in separate runs.",
    slower=both
    and (", ".join(str(tokens) for tokens, ratio in both.items() if ratio > 1.05) or "no number of")
    or None,
    least=min(both.values(), default=None),
    ratio=max(both.values(), default=None),
)

# %% [markdown]
# ## 7. What is left
#
# The sort kernel is the same in all versions. To see what it waits for, the next cells change one part at a time. Without
# atomics, `i & 127` spreads the stores: an expert has about 128 slots.


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
    "a load instead of the atomic": {"atomic": False},
    "a cache line per counter": {"spread": 32},
}
outputs, calls = poisoned(IDS, EXPERTS, BLOCK), {}
launch_main(make_parallel_fill(EXPERTS), IDS, outputs, CUMSUM)  # where each expert starts
apart = COUNTERS[max(EXPERTS, 256) :]
apart[::32][:EXPERTS] = CUMSUM[:EXPERTS]
for name, options in VARIANTS.items():
    arguments = IDS, outputs[0], apart if "spread" in options else CUMSUM, NUMEL, MASK
    calls[name] = partial(launch, make_sort(**options), -(-NUMEL // 256), 256, *arguments)
sort_us = ladder.times("sort kernel", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
LINES = -(-4 * E // 128)  # cache lines that hold the counters
say(
    "The sort kernel takes {whole:.1f} us. Without scattered stores it takes {no_scatter:.1f}: the stores hardly matter. "
    "With a load instead of the atomic operation it takes {load:.1f}, and with as many atomic operations, but a cache line per counter, "
    "{spread:.1f}. So neither latency nor the atomic operations as such take the time, but their concentration on {lines} "
    "cache lines: each line receives {each} of them, one every {ns:.1f} ns. The prediction of step 1 counted a single one.",
    whole=sort_us.get("as it is"),
    no_scatter=sort_us.get("no scattered stores"),
    load=sort_us.get("a load instead of the atomic"),
    spread=sort_us.get("a cache line per counter"),
    lines=LINES,
    each=N // LINES,
    ns=sort_us and 1000 * (sort_us["as it is"] - EMPTY_US) / (N // LINES) or None,
)

# %% [markdown]
# The same sort kernel, with its counters at 16 addresses that are 1 KB apart:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
starts, places = CUMSUM.clone(), [256 * n for n in range(16)]  # 256 counters take 1 KB
calls = {}
for at in places:
    COUNTERS[at : at + EXPERTS + 1] = starts
    arguments = IDS, outputs[0], COUNTERS[at:], NUMEL, MASK
    calls[f"{4 * at} bytes"] = partial(launch, sort_replayed, -(-NUMEL // 256), 256, *arguments)
by_address = ladder.times("addresses of the counters", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The sort kernel takes {fastest:.2f} to {slowest:.2f} us: where the counters lie in this buffer makes no difference.",
    fastest=min(by_address.values(), default=None),
    slowest=max(by_address.values(), default=None),
)

# %%
for steps in (ladder, small_ladder):  # all measurements are done
    steps.save(notebook_sources("notebooks/02_align.py"))

# %% [markdown]
# **Exercise align-5.** If many lanes of a warp have the same expert, one of them can add for all (a *warp-aggregated* atomic
# operation). The kernel computes the place of each slot; `next_place[e]` is where expert `e` continues. Change it so that a warp
# adds once per distinct expert; any order within an expert is accepted. `cuda.match_any_sync(mask, value)` returns to each lane
# a bit mask of the lanes with the same value.


# %%
@cuda.jit
def sort_aggregated(ids, next_place, places):
    i = cuda.grid(1)
    places[i] = cuda.atomic.add(next_place, ids[i], 1)


exercise("align-5").check(sort_aggregated)

# %% [markdown]
# ### The order changes from run to run
#
# In the sort kernel, `atomicAdd` hands out places in the order of arrival:


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
# In the Marlin MoE GEMM of vLLM and SGLang, which splits the inner dimension K across CTAs, a slot's place decides how its sum
# is rounded, so the same prompt can yield other tokens ([sglang 33511](https://github.com/sgl-project/sglang/pull/33511),
# [vllm 52532](https://github.com/vllm-project/vllm/pull/52532)).
#
# Three costs are left: the second launch with its atomic operations, the counting in a single SM, and the elements that are
# written twice. [03_align_one_launch](03_align_one_launch.ipynb) removes all three.
#
# ## Sources
#
# - The article: *sgl-kernel MoE Align Block Size Kernel*, in Chinese, by the author of 0x1, and the pull requests of the table
#   above.
# - G. E. Blelloch, *Prefix sums and their applications*, 1990.
# - NVIDIA, *PTX ISA*: `st.global.v4`, `shfl.sync`, `atom`; *CUDA C++ Programming Guide*, on barriers in branches.
# - We compare [the article's claims](../docs/claims.md#align) with our measurements.
