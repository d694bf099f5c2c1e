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
# # The dispatch layout
#
# With **expert parallelism** the experts of a layer are spread over several GPUs, called **ranks**. Each rank has tokens of its own, and a token
# must travel to the ranks that hold its experts. Before a rank can send anything, it must know how many of its tokens go to each rank and to each
# expert. DeepEP calls this the **dispatch layout**.
#
# Counting is easy. Counting in a few microseconds is a question of who adds to which counter, and when. So this lesson has one question: **how do
# many threads count together without waiting for each other?** They may share counters in global memory, share them in a CTA, or have private ones, as DeepEP's first
# version does. That kernel needs no atomic operation, and is much slower than one with shared counters. You will take it apart to find out why. Then you write the sum of a cluster, and a walk over the tokens in which several
# lanes share a token.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import torch
from numba import cuda, int32, int64, uint8, uint32

from moe_numba.course.lessons.dispatch_layout import draw, exercises
from moe_numba.course.lessons.dispatch_layout import runs as page
from moe_numba.course.lessons.dispatch_layout.runs import Launch, lesson
from moe_numba.course.lessons.dispatch_layout.sizes import (
    CLUSTER,
    CLUSTER_THREADS,
    COUNTERS,
    EACH,
    EXPERTS,
    EXPERTS_PER_CTA,
    FULL,  # for your answers
    LANES,
    PER_WARP,
    PORT_THREADS,
    RANKS,
    RANKS_PER_CTA,
    SHARE,  # for your answers
    SHARES,  # for your answers
    THREADS,
    TOPK,
)
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.cluster import (  # some of them for your answers
    barrier_cluster_arrive,
    barrier_cluster_wait,
    cluster_ctarank,
    st_cluster_s32,
)
from moe_numba.ptx.memory import atom_add_s32, griddepcontrol_launch_dependents, griddepcontrol_wait

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.result())

# %% [markdown]
# ## The problem
#
# A gate has chosen `topk` experts for each token. Each rank computes three things for its own tokens. They go to a rank **once**, even if it holds several of
# their experts: that saves traffic.

# %%
draw.problem()

# %% [markdown]
# DeepEP returns three tensors: `num_tokens_per_rank`, `num_tokens_per_expert`, and `is_token_in_rank`, a flag for each token and rank. Our
# kernels write the first two one behind the other, in an array `counts`: a counter for each expert, then one for each rank. All sizes are in
# `moe_numba/course/lessons/dispatch_layout/sizes.py`; the page runs with others, too:

# %%
page.constants()

# %% [markdown]
# How much traffic does it save to send a token once? **Build a formula.** A token has `topk` different experts of `experts`, all equally likely. How
# many of the `ranks` ranks does it visit, on average?


# %%
def my_ranks_of_a_token(experts, topk, ranks):
    return ...  # yours


exercises.ranks_of_a_token.check(my_ranks_of_a_token)

# %%
print(page.show_ranks_per_token())

# %% [markdown]
# ## The reference
#
# In torch. An id that is no expert, usually -1, is not counted: it goes to one expert more, on one rank more.


# %%
def torch_layout(topk_idx):
    experts = topk_idx.where((topk_idx >= 0) & (topk_idx < EXPERTS), EXPERTS)
    per_expert = torch.zeros(EXPERTS + 1, dtype=torch.int32, device=experts.device)
    per_expert.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten(), dtype=torch.int32))
    is_in_rank = torch.zeros(len(experts), RANKS + 1, dtype=torch.uint8, device=experts.device)
    is_in_rank.scatter_(1, experts // EACH, 1)
    is_in_rank = is_in_rank[:, :RANKS].contiguous()
    return torch.cat([per_expert[:EXPERTS], is_in_rank.sum(dim=0, dtype=torch.int32)]), is_in_rank


page.show_reference(torch_layout)

# %% [markdown]
# ## The lower bound

# %%
print(page.lower_bound())
print("Latencies, recorded in lessons 03 and 04:", page.chain())

# %% [markdown]
# The ids are few. So bandwidth is not the problem, and neither is arithmetic: a kernel that counts is a **chain of latencies**. A thread loads an id, adds to
# a counter, waits for the others, and stores. Each step below removes links of this chain.
#
# ## Step 1: global atomics
#
# One thread for each token. It loads the token's ids one after the other, adds 1 to the counter of each expert, and collects the ranks in a mask, so that
# a rank that occurs twice counts once. `add` and `add_ranks` are holes: where the counters are, and how the ranks are counted. All 32 lanes of a warp
# call `add_ranks`, also those that have no token, with a mask of 0; a later step needs that.
#
# (`uint32(...)` keeps numbers in 32 bits. Without it Numba computes with 64, which takes more instructions.)


# %%
@factory
def make_count(add, add_ranks):
    @cuda.jit(device=True)
    def count(topk_idx, is_in_rank, counts, tokens):
        lane = cuda.threadIdx.x & 31
        first = cuda.grid(1) - lane  # of the warp's tokens
        while first < tokens:
            token, ranks = first + lane, uint32(0)
            if token < tokens:
                for k in range(TOPK):
                    expert = topk_idx[token * TOPK + k]
                    if 0 <= expert and expert < EXPERTS:
                        add(counts, expert, 1)
                        ranks = uint32(ranks | uint32(1) << uint32(uint32(expert) // uint32(EACH)))
                for rank in range(RANKS):
                    is_in_rank[token * RANKS + rank] = uint8(ranks >> uint32(rank) & uint32(1))
            add_ranks(counts, ranks)
            first += cuda.gridsize(1)

    return count


@factory
def make_add_for_each_token(add):
    @cuda.jit(device=True)
    def add_ranks(counts, ranks):
        for rank in range(RANKS):
            if ranks >> uint32(rank) & uint32(1):
                add(counts, EXPERTS + rank, 1)

    return add_ranks


@cuda.jit(device=True)
def add_global(counts, i, number):
    atom_add_s32(counts, i, number)


@cuda.jit
def zero(counts):
    i = cuda.grid(1)
    while i < COUNTERS:
        counts[i] = 0
        i += cuda.gridsize(1)


@factory
def make_global(count):
    @cuda.jit
    def global_atomics(topk_idx, counts, is_in_rank, tokens):
        count(topk_idx, is_in_rank, counts, tokens)

    return global_atomics


clear_counts = Launch(zero, 1, THREADS)
one_by_one = make_global(make_count(add_global, make_add_for_each_token(add_global)))

# %% [markdown]
# `Launch` says how to launch a kernel. `None` stands for as many CTAs as the tokens need. A version may have several launches; here the first one zeroes the counters.
#
# **Prediction.** Two launches, `topk` loads one after another, and an atomic. And then the additions: the counters are few, and eight of them share a sector of 32
# bytes. We assume that the L2 adds once in a nanosecond to the same sector.

# %%
step("global atomics", (clear_counts, Launch(one_by_one, None, THREADS)), predicted_us=page.global_us())

# %% [markdown]
# Which counter is the busiest? One would think that of a rank, since most tokens go to each rank. But look at the rows *compiler* of the table:

# %%
print(page.who_votes("global atomics"))

# %% [markdown]
# And what does an addition cost? The prediction has assumed it.

# %%
print(page.what_an_addition_costs("global atomics"))

# %% [markdown]
# **Take away.** Additions to one address happen one after the other, wherever they come from. Count how many hit the busiest one, in the machine code, not in the source.
#
# ## Build: the tokens of a rank
#
# A vote is worth knowing: 32 lanes count among themselves, without any memory. The compiler finds it only if the address is plainly the same for all lanes. Write
# `tokens_of_rank(ranks)`, which all lanes call with the mask of their token. Lane `r`, for `r < RANKS`, must return how many of the warp's 32 tokens go to rank
# `r`; what other lanes return does not matter. Par: `RANKS` exchanges.


# %%
@cuda.jit(device=True)
def my_tokens_of_rank(ranks):
    return ...  # yours


tokens_of_rank = exercises.tokens_of_rank.use(my_tokens_of_rank)

# %% [markdown]
# ## Step 2: a ballot for each rank
#
# Now the votes stand in the source, and lane `r` adds for rank `r`. Only the hole `add_ranks` changes: additions by one lane each become one instruction with a lane for each rank.
#
# **Prediction.** Each counter gets as many additions as before. So the time stays the same.


# %%
@factory
def make_add_for_each_warp(add):
    @cuda.jit(device=True)
    def add_ranks(counts, ranks):
        lane, number = cuda.threadIdx.x & 31, tokens_of_rank(ranks)
        if lane < RANKS and number:
            add(counts, EXPERTS + lane, number)

    return add_ranks


by_ballot = make_global(make_count(add_global, make_add_for_each_warp(add_global)))
step("a ballot for each rank", (clear_counts, Launch(by_ballot, None, THREADS)), predicted_us=page.ballot_us())

# %% [markdown]
# Both times may depend on something that the code does not show. The L2 consists of slices, and the address of a line of 128 bytes decides which slice adds to its counters. All counters lie in
# a few lines, so several of them may share a slice. The next cell gives both kernels counters at other places.

# %%
page.show_places(
    {
        "global atomics": (clear_counts, Launch(one_by_one, None, THREADS)),
        "a ballot for each rank": (clear_counts, Launch(by_ballot, None, THREADS)),
    }
)

# %%
print(page.same_additions("global atomics", "a ballot for each rank"))

# %% [markdown]
# (Here the compiler keeps a second copy of the votes, for a warp whose lanes have diverged. So the row *votes* under *compiler* counts each one twice.)
#
# **Take away.** A warp is the cheapest place to add up: 32 lanes exchange values in registers, in one instruction. Know when the compiler does it for you.
#
# ## Step 3: shared atomics
#
# The additions for experts still go to the L2. Let each CTA count in shared memory, and add its counts to the global counters at the end: one addition for
# each counter that is not zero, instead of one for each id.
#
# Here is the kernel that most of the following steps use. It has three holes. `count` is the function above, now with counters in shared memory. `add_up`
# adds what the CTAs have counted. `start` and `dependent` belong to later steps.


# %%
@factory
def make_layout(start, count, add_up, dependent=False):
    @cuda.jit
    def layout(topk_idx, counts, is_in_rank, tokens):
        own = cuda.shared.array(COUNTERS, int32)
        start()  # <-- a hole
        i = cuda.threadIdx.x
        while i < COUNTERS:
            own[i] = 0
            i += cuda.blockDim.x
        cuda.syncthreads()
        if dependent:
            griddepcontrol_wait()
        count(topk_idx, is_in_rank, own, tokens)  # <-- a hole: the tokens of this CTA
        if dependent:
            griddepcontrol_launch_dependents()
        cuda.syncthreads()
        add_up(own, counts)  # <-- a hole

    return layout


@cuda.jit(device=True)
def add_shared(counts, i, number):
    cuda.atomic.add(counts, i, number)


@cuda.jit(device=True)
def start_nothing():
    pass


@cuda.jit(device=True)
def add_to_global(own, counts):
    i = cuda.threadIdx.x
    while i < COUNTERS:
        if own[i]:
            atom_add_s32(counts, i, own[i])
        i += cuda.blockDim.x


# %% [markdown]
# **Prediction.** Two launches and the loads remain. A shared atomic takes a fraction of a global one, and one round of global atomics comes at the end.

# %%
count_shared = make_count(add_shared, make_add_for_each_warp(add_shared))
shared = make_layout(start_nothing, count_shared, add_to_global)
step("shared atomics", (clear_counts, Launch(shared, None, THREADS)), predicted_us=page.shared_us())

# %% [markdown]
# **Take away.** Add up where it is near: in a warp, then in a CTA, and globally only once.
#
# ## Step 4: private counters, as in DeepEP's first version
#
# DeepEP goes further. If **each thread has counters of its own**, no addition has to be atomic. All counters of all threads of a CTA do not fit in shared memory. So DeepEP divides the counters among
# CTAs: some count `EXPERTS_PER_CTA` experts each, another one counts the ranks, and writes the flags. Each CTA walks over *all* tokens, and a thread counts in its own row. Then one thread for each
# column adds the rows up:

# %%
draw.private_counters()

# %% [markdown]
# Each global counter belongs to one CTA, so nothing must be zeroed, and one launch suffices. This is our port of the kernel, with the holes `count_experts` and `count_ranks`. As in DeepEP, sizes
# that depend on the model are arguments. The four switches of `make_count_ranks` are ours: leave them for the moment.


# %%
@cuda.jit(device=True)
def add_column(rows, column):
    total = int32(0)
    for i in range(PORT_THREADS):
        total = int32(total + rows[i, column])
    return total


@cuda.jit(device=True)
def count_experts(topk_idx, counts, tokens, topk, begin, end):
    rows = cuda.shared.array((PORT_THREADS, EXPERTS_PER_CTA), int32)
    thread = token = int32(cuda.threadIdx.x)
    for j in range(EXPERTS_PER_CTA):
        rows[thread, j] = 0
    while token < tokens:
        for k in range(topk):
            expert = topk_idx[token * topk + k]
            if begin <= expert and expert < end:
                rows[thread, expert - begin] += 1
        token = int32(token + PORT_THREADS)
    cuda.syncthreads()
    if begin + thread < end:
        counts[begin + thread] = add_column(rows, thread)


@factory
def make_count_ranks(bits=False, constant=False, columns=False, ahead=False):
    @cuda.jit(device=True)
    def count_ranks(topk_idx, counts, is_in_rank, tokens, topk, ranks, experts, begin, end):
        rows = cuda.shared.array((PORT_THREADS, RANKS_PER_CTA), int32)
        is_in, ids = cuda.local.array(RANKS_PER_CTA, int32), cuda.local.array(TOPK, int64)
        thread = token = int32(cuda.threadIdx.x)
        each = uint32(EACH) if constant else uint32(experts) // uint32(ranks)
        stride = tokens if columns else int32(1)  # ids of a token
        for j in range(RANKS_PER_CTA):
            rows[thread, j] = 0
        while token < tokens:
            at = token if columns else token * topk
            mask = uint32(0)
            for j in range(RANKS_PER_CTA):
                is_in[j] = 0
            if ahead:
                for k in range(TOPK):
                    ids[k] = topk_idx[at + k * stride]
            for k in range(TOPK if ahead else topk):
                expert = ids[k] if ahead else topk_idx[at + k * stride]
                if begin * each <= expert and expert < end * each:
                    rank = int32(uint32(expert) // each) - begin
                    if bits:
                        mask = uint32(mask | uint32(1) << uint32(rank))
                    else:
                        is_in[rank] += 1
            for j in range(end - begin):
                if bits:
                    flag = int32(mask >> uint32(j) & uint32(1))
                else:
                    flag = int32(1) if is_in[j] > 0 else int32(0)
                is_in_rank[token * ranks + begin + j] = uint8(flag)
                rows[thread, j] += flag
            token = int32(token + PORT_THREADS)
        cuda.syncthreads()
        if begin + thread < end:
            counts[experts + begin + thread] = add_column(rows, thread)

    return count_ranks


@factory
def make_private(count_experts, count_ranks):
    @cuda.jit
    def private(topk_idx, counts, is_in_rank, tokens, topk, ranks, experts):
        of_experts = (experts + EXPERTS_PER_CTA - 1) // EXPERTS_PER_CTA  # CTAs
        cta = cuda.blockIdx.x
        if cta < of_experts:
            begin = int32(cta * EXPERTS_PER_CTA)
            count_experts(topk_idx, counts, tokens, topk, begin, min(int32(begin + EXPERTS_PER_CTA), experts))
        else:
            begin = int32((cta - of_experts) * RANKS_PER_CTA)
            end = min(int32(begin + RANKS_PER_CTA), ranks)
            count_ranks(topk_idx, counts, is_in_rank, tokens, topk, ranks, experts, begin, end)

    return private


CTAS = -(-EXPERTS // EXPERTS_PER_CTA) + -(-RANKS // RANKS_PER_CTA)


def port(count_experts, count_ranks, columns=False):
    return Launch(make_private(count_experts, count_ranks), CTAS, PORT_THREADS, 1, False, columns, False)


# %% [markdown]
# **Prediction.** A thread clears its row, and all lanes of a warp clear the same column, which lies in one bank. Then it has a share of *all* tokens, and waits for the L2 at each id. At the end it adds a column up.

# %%
step(
    "private counters", port(count_experts, make_count_ranks()), after="shared atomics", predicted_us=page.private_us()
)

# %% [markdown]
# A kernel without atomics, and it takes many times as long as one with them. Why?
#
# ## Diagnose: which CTAs?
#
# The CTAs do different things. So run them apart: fill one of the holes with a function that does nothing.


# %%
@cuda.jit(device=True)
def no_experts(topk_idx, counts, tokens, topk, begin, end):
    pass


@cuda.jit(device=True)
def no_ranks(topk_idx, counts, is_in_rank, tokens, topk, ranks, experts, begin, end):
    pass


apart = page.apart(
    {
        "all": port(count_experts, make_count_ranks()),
        "experts": port(count_experts, no_ranks),
        "ranks": port(no_experts, make_count_ranks()),
    }
)
page.show_apart(apart)

# %%
draw.ctas(apart)

# %%
print(page.who_is_last(apart))

# %% [markdown]
# ## Predict: what does a load touch?
#
# The last column of the table is large. A warp loads one id of 8 bytes for each lane, and a sector has 32 bytes. This is what it loads:

# %%
draw.loads(1)

# %% [markdown]
# **Predict.** How many sectors would such a load touch if a token had two experts? And how many, with any number of experts, if neighbouring lanes loaded neighbouring ids?

# %%
exercises.sectors.check(two_experts_for_each_token=..., neighbouring_lanes=...)

# %% [markdown]
# ## Diagnose: what takes so long?
#
# In the CTA that counts ranks there are four suspects, and a switch for each:
#
# - **A: the array.** Registers have no index. So `is_in[rank] += 1` either goes to memory, or the compiler compares `rank` with each of the indices. `bits` sets a bit of a mask instead.
# - **B: the division.** `experts_per_rank` is known at run time only, and a GPU has no instruction that divides integers. With `constant` it is known to the compiler, which shifts instead.
# - **C: the sectors.** With `columns`, the ids are stored as `[topk, tokens]`, so that neighbouring lanes load neighbouring ids.
# - **D: the order.** A thread looks at an id before it loads the next one, and may wait for the memory `topk` times. With `ahead` it loads all ids of its token first.
#
# (Bank conflicts are no suspect, although the table counts many: without them the port takes about as long, see *What did not pay*.)
#
# **Diagnose.** Which one saves most? Choose before you run the cell below it.

# %%
suspects = {
    "as it is": port(no_experts, make_count_ranks()),
    "A: a mask instead of an array": port(no_experts, make_count_ranks(True)),
    "B: a constant instead of a division": port(no_experts, make_count_ranks(False, True)),
    "C: ids in columns": port(no_experts, make_count_ranks(False, False, True), True),
    "D: all ids before the first is used": port(no_experts, make_count_ranks(False, False, False, True)),
    "all four": port(no_experts, make_count_ranks(True, True, True, True), True),
}
exercises.slow_cta.check(suspects, ...)

# %%
page.show_variants(page.SLOW_CTA, suspects)

# %%
print(page.what_is_left(suspects))

# %% [markdown]
# What is left after all four is the design itself: **all tokens pass through one SM**, 256 at a time, however many SMs the GPU has.
#
# **Take away.** Divide the work, not the counters. And before you explain why a kernel is slow, run its parts apart.
#
# ## Step 5: one cluster
#
# Step 3 divides the tokens among CTAs, and needs counters in global memory that a launch has zeroed before. Hopper has a third way. A **cluster** is a group of CTAs that run at the
# same time, have a barrier of their own, and can store into each other's shared memory: *distributed shared memory*. It is zeroed by its owner. So one launch suffices:

# %%
draw.cluster_sum()

# %% [markdown]
# **Build: the sum of a cluster.** Write `add_up`. `CLUSTER` CTAs call it. `own` has the `COUNTERS` counters of this CTA in shared memory, and a `syncthreads` has just passed. Store
# the sums over all CTAs to `counts`, in global memory. You have:
#
# - `cluster_ctarank()`: the number of this CTA in its cluster.
# - `st_cluster_s32(array, i, cta, value)`: store to `array[i]` of CTA `cta`, where `array` is a shared array that all CTAs have declared.
# - `barrier_cluster_arrive()`, and `barrier_cluster_wait()`, which waits until all threads of the cluster have arrived. The kernel has called the first `arrive` already, in the hole `start`.
#
# A CTA may store to another one only after that one has started, and must see what others have stored before it adds up. `SHARE` is `COUNTERS / CLUSTER`, rounded up, and `SHARES` is `CLUSTER * SHARE`.
# Par: each count travels to another CTA once.


# %%
@cuda.jit(device=True)
def my_sum_in_cluster(own, counts):
    pass  # yours


sum_in_cluster = exercises.sum_in_cluster.use(my_sum_in_cluster)

# %% [markdown]
# **Prediction.** We save a launch, and pay for two cluster barriers. A cluster has few SMs, but enough threads: none takes more than one of these few tokens, as in step 3.


# %%
@cuda.jit(device=True)
def start_cluster():
    barrier_cluster_arrive()  # this CTA has started: others may store to it


in_cluster = make_layout(start_cluster, count_shared, sum_in_cluster)
step(
    "one cluster",
    Launch(in_cluster, CLUSTER, CLUSTER_THREADS, CLUSTER),
    after="shared atomics",
    predicted_us=page.cluster_us(),
)

# %% [markdown]
# How are the tokens spread?

# %%
print(page.why_one_cluster("shared atomics", "one cluster"))

# %% [markdown]
# **Take away.** Memory that a kernel owns, as its shared memory, needs no launch that zeroes it. But a kernel is as fast as its fullest SM: count the tokens of each one.
#
# ## Build: what the lanes of a group know together
#
# A lane for each token loads `topk` ids one after the other, and each load touches a sector for each lane. Let a **group** of neighbouring lanes take a token instead, an id for each lane. There are
# as many lanes as the larger of `topk` and the number of ranks, rounded up to a power of two:

# %%
draw.lanes()

# %% [markdown]
# Each lane knows the rank of one expert. To write flags, the group must know the ranks of all of them. Write `or_in_group(bits)`, which returns to each lane the bitwise or of the 32-bit
# values of all lanes of its group, lanes `LANES * g` to `LANES * g + LANES - 1`. All lanes of the warp call it. Par: 3 exchanges for 8 lanes. (The shuffles of `cuda` take an `int32`: write `int32(bits)`, and `uint32(...)` around the result.)


# %%
@cuda.jit(device=True)
def my_or_in_group(bits):
    return ...  # yours


or_in_group = exercises.or_in_group.use(my_or_in_group)

# %% [markdown]
# ## Step 6: a group of lanes for each token
#
# **Build: the walk.** Write `count(topk_idx, is_in_rank, counts, tokens)` as in the figure. It fills the hole `count` of the kernel, as the function of step 1 did. `topk_idx` and `is_in_rank` are flat:
# token `t` has the ids `topk_idx[t * TOPK]` on and the flags `is_in_rank[t * RANKS]` on. Each warp of the *grid* takes `PER_WARP` consecutive tokens, then those `PER_WARP` times the number of warps further on. A lane
# counts the tokens of its rank in a register, and adds them to `counts[EXPERTS + rank]` at the end. `cuda.atomic.add` adds in shared memory. Par: no more sectors than the ids have.


# %%
@cuda.jit(device=True)
def my_count_in_groups(topk_idx, is_in_rank, counts, tokens):
    pass  # yours


count_in_groups = exercises.count_in_groups.use(my_count_in_groups)

# %% [markdown]
# **Prediction.** A token's ids arrive at once. But now a thread has one id of a token, so the threads of the cluster take several rounds, each of which waits for the L2 once. (The tokens are also spread over more CTAs. We have
# no number for what that saves.)

# %%
grouped = make_layout(start_cluster, count_in_groups, sum_in_cluster)
step("a group of lanes", Launch(grouped, CLUSTER, CLUSTER_THREADS, CLUSTER), predicted_us=page.groups_us())

# %% [markdown]
# Look at *sectors of a load*, at the shared atomics, and at the stores: a warp now writes the flags of its tokens with one instruction.
#
# **Take away.** Neighbouring lanes should touch neighbouring bytes. If the data of one item lie together, give the item to several lanes.
#
# ## Step 7: four tokens at once
#
# Each round waits for its load before it counts. But the loads of several rounds do not depend on each other. So a lane issues the loads for **four tokens**, and only then looks at the first. The rank masks of
# four tokens fit one word, a byte each, since there are at most eight ranks: one `or_in_group` serves four tokens.
#
# This is the whole walk. `chosen` is indexed by numbers that are known when the loops are unrolled, so its elements are registers, and no index is compared as in the port.
#
# **Prediction.** A quarter of the rounds wait for a load.


# %%
@cuda.jit(device=True)
def count_four(topk_idx, is_in_rank, counts, tokens):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.grid(1) >> 5, cuda.gridsize(1) >> 5
    member, tokens_of_mine = lane % LANES, int32(0)
    chosen = cuda.local.array(4, uint32)
    first, apart = warp * PER_WARP, warps * PER_WARP
    while first < tokens:
        own = first + lane // LANES
        for i in range(4):  # four loads
            token = own + i * apart
            chosen[i] = uint32(EXPERTS)
            if token < tokens and member < TOPK:
                expert = topk_idx[token * TOPK + member]
                if 0 <= expert and expert < EXPERTS:
                    chosen[i] = uint32(expert)
        bits = uint32(0)  # a byte for each token, a bit for each rank
        for i in range(4):
            if chosen[i] < uint32(EXPERTS):
                cuda.atomic.add(counts, chosen[i], 1)
                bits = uint32(bits | uint32(1) << uint32(uint32(8 * i) + chosen[i] // uint32(EACH)))
        flags = uint32(or_in_group(bits) >> uint32(member) & uint32(0x01010101))  # of this lane's rank
        tokens_of_mine = int32(tokens_of_mine + int32(cuda.popc(flags)))
        for i in range(4):
            token = own + i * apart
            if token < tokens and member < RANKS:
                is_in_rank[token * RANKS + member] = uint8(flags >> uint32(8 * i) & uint32(1))
        first += 4 * apart
    if member < RANKS:
        cuda.atomic.add(counts, EXPERTS + member, tokens_of_mine)


four = make_layout(start_cluster, count_four, sum_in_cluster)
step("four tokens at once", Launch(four, CLUSTER, CLUSTER_THREADS, CLUSTER), predicted_us=page.four_us())

# %% [markdown]
# **Take away.** Latency is paid once for all loads that are in flight. Issue them before you use the first.
#
# ## Step 8: start early
#
# The switch `dependent`, as in [lesson 02](02_gate_decode.ipynb): the next launch may start before this one has ended. Its CTAs start, arrive at the cluster's barrier and clear their counters, and wait before they read the ids
# (`griddepcontrol_wait`). This kernel lets it start when its own tokens are counted, before the sum.
#
# **Prediction.** It saves as much as in a kernel that does nothing. It may save more, since there is more to overlap.

# %%
early = make_layout(start_cluster, count_four, sum_in_cluster, True)
last = Launch(early, CLUSTER, CLUSTER_THREADS, CLUSTER, True)
step("start early", last, predicted_us=page.dependent_us())

# %% [markdown]
# In the timed sequence the kernel before is this kernel itself. After another kernel the gain differs.
#
# The package's kernel, `moe_numba/expert_parallel/layout/kernel.py`, has these parts in one file, and three changes that this lesson does not time apart: the CTAs take turns in the order of tokens, so that few tokens reach all CTAs; a warp
# adds up its tokens of a rank by shuffles before one atomic; and most numbers are unsigned, with 32 bits.
#
# **Take away.** What does not depend on the kernel before, a kernel can do before that one ends.
#
# ## What did not pay, and why
#
# An earlier version of this lesson changed our port, one thing at a time, before it knew which CTA the others wait for. (Its port divided 64 bits where C++ divides 32.)

# %%
page.show_what_did_not_pay()

# %% [markdown]
# For few tokens, clearing and adding up 256 rows is most of the work, and all three changes help. For many tokens the walk is, and after each of these changes every CTA still walks over all of them.
#
# ## All inputs
#
# Now other numbers of tokens, and a skewed routing, in which all tokens choose the same experts. The last column has the fastest, and those that are about as fast:

# %%
versions = {
    "global atomics": (clear_counts, Launch(one_by_one, None, THREADS)),
    "shared atomics": (clear_counts, Launch(shared, None, THREADS)),
    "our port of DeepEP's": port(count_experts, make_count_ranks()),
    "one cluster": Launch(in_cluster, CLUSTER, CLUSTER_THREADS, CLUSTER),
    "step 8": last,
}
sweep = page.sweep(versions, torch_layout)
page.show_sweep(sweep)

# %%
print(page.who_wins(sweep))

# %% [markdown]
# ## Many tokens: eight SMs against all
#
# A cluster has eight SMs, and the grid of step 3 grows with the tokens until it fills all of them. Is that the whole difference? Give step 3's kernel as many CTAs as the cluster has. And give step 7's walk to all SMs, with the sum of step 3:

# %%
wide = make_layout(start_nothing, count_four, add_to_global)
page.show_many(
    {
        "step 3": (clear_counts, Launch(shared, None, THREADS)),
        "step 3 on 8 CTAs of 1024": (clear_counts, Launch(shared, CLUSTER, CLUSTER_THREADS)),
        "step 7, one cluster": Launch(four, CLUSTER, CLUSTER_THREADS, CLUSTER),
        "step 7's walk on 128 CTAs of 512, step 3's sum": (clear_counts, Launch(wide, 128, 512)),
    }
)

# %%
print(page.why_many())

# %% [markdown]
# The package keeps its eight SMs: the others stay free for kernels of another stream. And sending so many tokens takes milliseconds, as [lesson 12](12_dispatch.ipynb) shows.
#
# ## All steps

# %%
lesson.save(page.one)
lesson.summary()

# %% [markdown]
# **You can now** choose where threads add up (in a warp, a CTA, a cluster or the L2), and find the CTA that all others wait for.
#
# ## Next step, not built
#
# Two launches for many tokens, one cluster for few: a kernel with **several clusters** could have both. Each cluster adds up its counts, and then adds its sums to global counters. Who zeroes these? (Lesson 04 has counts that carry the
# number of their launch.) **Build** it, and beat step 7's walk with step 3's sum, the last line of the table of many tokens. The lower bound is the time that the ids and flags take at the rate of a copy:

# %%
print(page.lower_bound_of_many())

# %% [markdown]
# ## Sources
#
# - DeepSeek-AI: [DeepEP](https://github.com/deepseek-ai/DeepEP), `csrc/kernels/layout.cu` of its first version; commit `d4f3497` changed 32 experts for each CTA to 4.
# - BoLi2001: [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), in Chinese. We compare [its claims](../docs/claims.md#deepep) with our measurements. Its code truncates ids to 32 bits, and also
#   counts tokens for nodes (`is_in_rdma_rank`), which we leave out: here all ranks are on one node.
# - NVIDIA: *CUDA C++ Programming Guide*, "Thread Block Clusters"; [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/), `barrier.cluster`, `st.shared::cluster`.
#
# Before: [09, 4-bit weights](09_w4_weights.ipynb). Next: [11, talk to a peer](11_talk_to_a_peer.ipynb), where a thread stores into the memory of another GPU.
