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
# # Low-latency dispatch and combine
#
# During decode each rank (GPU) has 1 to 128 tokens per step. Dispatch and combine of [lesson 12](12_dispatch.ipynb) and [lesson 13](13_combine.ipynb) are
# built for thousands of tokens: rows stream through ring buffers, and the bandwidth of NVLink limits them. With few tokens there is almost nothing to send, and
# the pair still takes tens of microseconds.
#
# This lesson has one question: **what must happen one after the other before a token has been at its experts and back?** You build a pair of kernels that does
# little more than that. Each is one launch, and no counts are exchanged, so the CPU need not wait either. You send a row and a flag, you find
# out what the order of the two costs, and you let the data be its own flag. Then rows come back in a fixed order, and finally they are packed as the experts' GEMM
# wants them. Three of the functions are yours to write.
#
# All sizes, and the number of ranks, stand in `moe_numba/course/lessons/low_latency/sizes.py`.

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from functools import cache

from numba import cuda, float32, int32  # for your answers

from moe_numba.course.lessons.low_latency import draw, exercises
from moe_numba.course.lessons.low_latency import runs as page
from moe_numba.course.lessons.low_latency.runs import Memory, Version, alone, lesson, many, ranks_of
from moe_numba.course.steps.lesson import factory
from moe_numba.expert_parallel.low_latency.combine import add_row, round_sums  # for your answers
from moe_numba.expert_parallel.low_latency.layout import CLEAN_NAN, SENTINEL
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_relaxed_sys_s32, st_relaxed_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import ld_global_s32x4, pointer_from_address, st_global_s32x4
from moe_numba.ptx.system_vectors import ld_relaxed_sys_s32x4, st_relaxed_sys_s32x4
from moe_numba.ptx.warp import FULL_MASK  # for your answers

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.result())

# %% [markdown]
# ## The problem
#
# Each rank has the same number of consecutive experts. **Dispatch** copies the row of a token to each rank that has one of its experts. These
# ranks compute one result row for it, and **combine** brings these rows back and adds them.

# %%
draw.problem()

# %% [markdown]
# Through ring buffers, three kernels run. *Notify* exchanges counts, because a receiver must know how many rows arrive and where they go. *Dispatch* loads a row
# into shared memory, stores it in the peer's ring, and after a fence it moves the ring's tail; the receiver polls the tail, loads the row and stores it again.
# *Combine* does the same in the other direction. With one token nothing overlaps: each box waits for the one before it.
#
# The **lower bound** is what no pair avoids, in either direction: a launch, a load (a token's experts), and one way over NVLink. To it we add the bytes at the
# best push rate that [lesson 11](11_talk_to_a_peer.ipynb) has measured. With one token they hardly count:

# %%
print(page.show_launch())
page.show_latencies()

# %%
page.show_pairs()

# %% [markdown]
# DeepEP is DeepSeek's library, compiled from its sources; its low-latency kernels return rows packed by expert, as the package's do. NCCL's pairs send every
# token to all ranks and back: they select no ranks, place no rows by expert, and the all-to-all does not add.
#
# ## How steps are checked
#
# The memory of a rank has a **slot** for every token of every rank, `[source rank, token]`. A wrong kernel of this kind gives right results most of the time, so each step runs
# several operations, all queued at once: a rank runs ahead of the others as far as the kernels let it. In the simulator memory is **weakly ordered** too:
# stores become visible late and in any order, unless a fence or a release orders them. Outputs are filled with NaN first. Sums must have the right bits.
#
# ## Step 1: fixed slots, flags after data
#
# **Idea.** The address of a slot depends only on the rank and the number of the token. So nothing must be counted, and a sender needs no answer. CTA `t` sends
# token `t` of its rank, and receives token `t` of every rank:
#
# - It stores the row in the slot on each rank that has one of the token's experts.
# - After a barrier and a system-scope fence it stores a **flag** on *all* ranks: for operation n `2 * n`, plus 1 if the slot has a row. So each rank learns for
#   every slot whether it has a row.
# - It polls the flags of token `t` from all ranks, and copies the rows.
#
# A CUDA graph passes the same arguments in every replay, so a CTA counts operations itself, in `epochs`. Flags have this number, and are never cleared. Slots
# are double-buffered, in two **halves** which operations use alternately: a rank in operation n + 1 does not overwrite rows that another rank still reads in
# operation n. No rank can be two operations ahead: operation n + 1 ends when all flags are in, and a rank sends its flag n + 1 only after its own operation n.
#
# All CTAs must be resident at the same time, because they wait for CTAs of other ranks. Numbers wrap after 2^22 operations, since a flag has few bits for
# them; a few values would do, but their count must be even, so that the halves alternate.
#
# Here is the kernel. The two holes are what the next steps replace; `ranks_of` returns a mask of the ranks that have one of the token's experts.

# %%
NUMBERS = (1 << 22) - 1  # operations are numbered modulo 2^22


@factory
def make_dispatch(send, receive, halves=2):
    @cache
    def dispatch_of(sizes):
        ranks, tokens, slots, words = sizes.ranks, sizes.tokens, sizes.slots, sizes.words
        topk, local_experts, rows = sizes.topk, sizes.local_experts, sizes.metadata_words

        @cuda.jit
        def dispatch(local, peers, epochs, rank, x, topk_idx, recv_x, has_row):
            thread, token = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
            memory = Memory(local, peers, int32(rows), int32(words), int32(ranks))
            number = int32(epochs[token] + 1 & NUMBERS)  # of this operation
            first = int32((number & halves - 1) * slots)  # slot of its half
            targets = ranks_of(topk_idx, token, topk, local_experts)
            send(memory, int32(first + rank * tokens + token), number, targets, x, token)  # <-- a hole
            for r in range(ranks):
                out = int32(r * tokens + token)
                found = receive(memory, int32(first + out), number, recv_x, out)  # <-- a hole
                if thread == 0:
                    has_row[out] = found
            cuda.syncthreads()  # all threads have read epochs
            if thread == 0:
                epochs[token] = number

        return dispatch

    return dispatch_of


# %% [markdown]
# `memory.local` is the memory of this rank, and `memory.peers` has the addresses of all ranks'. Flags come first, and rows begin at word `memory.rows`.
# `pointer_from_address` makes a pointer to a peer's memory.


# %%
@cuda.jit(device=True)
def send_flag(memory, slot, number, targets, x, token):
    thread, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    for r in range(memory.ranks):
        if targets >> r & 1:
            remote = pointer_from_address(memory.peers[r], memory.local)
            for i in range(4 * thread, memory.words, 4 * threads):
                a, b, c, d = ld_global_s32x4(x, token * memory.words + i)
                st_relaxed_sys_s32x4(remote, memory.rows + slot * memory.words + i, a, b, c, d)
    cuda.syncthreads()  # all threads have stored their part of the row
    if thread < memory.ranks:
        fence_acq_rel_sys()
        remote = pointer_from_address(memory.peers[thread], memory.local)
        st_relaxed_sys_s32(remote, slot, int32(2 * number + (targets >> thread & 1)))


@cuda.jit(device=True)
def receive_flag(memory, slot, number, recv_x, out):
    flag = ld_acquire_sys_s32(memory.local, slot)
    while flag >> 1 != number:
        flag = ld_acquire_sys_s32(memory.local, slot)
    if flag & 1:
        for i in range(4 * int32(cuda.threadIdx.x), memory.words, 4 * int32(cuda.blockDim.x)):
            a, b, c, d = ld_global_s32x4(memory.local, memory.rows + slot * memory.words + i)
            st_global_s32x4(recv_x, out * memory.words + i, a, b, c, d)
    return flag & 1


# %% [markdown]
# A CTA has one warp at first. A row of 7168 bfloat16 is 896 vectors of 16 bytes, so each lane moves 28 of them. In a lane the store of a vector waits for its
# load, and the next load is issued after that store. A token has experts on most ranks, often also on its own. The kernel loads the row again for each of these
# ranks, after the first time from L1. On average a CTA receives as many rows as it sends, and copies them all.
#
# **Prediction.** A launch, a load (the number and the experts), the loads of one row, a release over NVLink, the loads of all rows that arrive.

# %%
flags = make_dispatch(send_flag, receive_flag)
ROWS = page.rows_each_way()
print(f"a CTA receives {ROWS:.1f} rows on average")
predicted_us = page.chain_us(1 + (1 + ROWS) * page.loads_of(32), "release")
step("flags after data", Version(flags, warps=1), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** If addresses are known beforehand, no rank has to ask. Memory for the worst case is the price: with 8 ranks and 128 tokens, slots of dispatch
# take 29 MB.
#
# ## What happens in the slots
#
# The player shows two operations of a simulated run, with rows of 16 bytes: the slots of both ranks, with the flag above and the row below. `1:0` is token 0 of
# rank 1. Viewers that run no scripts, such as GitHub's, show only the last frame.

# %%
player = page.play(Version(flags, warps=1), data_is_flag=False)
player

# %% [markdown]
# Here are three of these frames: the first flag, the first flag of a row, and a store of rank 1 in operation 2, while rank 0 still has to read a row of operation 1.
# The two rows are in different halves.

# %%
page.strip(player, ("flag",), (": row.",), ("Operation 2", "the row"))

# %% [markdown]
# ## Step 2: a thread per vector
#
# **Bottleneck.** A lane's loads, one after the other, are most of the prediction.
#
# **Idea.** A CTA gets a thread for each vector of a row: 896. The kernel does not change, only its launch.
#
# **Prediction.** A launch, a load, then one load to send, a release over NVLink, one load to receive: the rank's own row has been copied meanwhile.

# %%
predicted_us = page.chain_us(1 + 2, "release")
step("a thread per vector", Version(flags), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** Latency is hidden by parallelism, also where there is only one row: split the row.
#
# ## What the order costs
#
# The fence makes sure that no flag becomes visible before its row. How does it know? It waits until the peer has acknowledged the row's stores.
#
# **Predict.** How many one-way trips over NVLink pass between the first store of a row and the moment at which the receiver may read it, with a flag after the
# data? And how many would pass if the row needed no flag?

# %%
exercises.trips.check(flag_after_data=..., data_is_flag=...)

# %% [markdown]
# We can time a kernel without the fence, and one without fence and barrier. They are wrong. On a GPU they may pass every test that you run; the simulator's weak memory
# shows what may happen:


# %%
@cuda.jit(device=True)
def send_without_fence(memory, slot, number, targets, x, token):
    thread, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    for r in range(memory.ranks):
        if targets >> r & 1:
            remote = pointer_from_address(memory.peers[r], memory.local)
            for i in range(4 * thread, memory.words, 4 * threads):
                a, b, c, d = ld_global_s32x4(x, token * memory.words + i)
                st_relaxed_sys_s32x4(remote, memory.rows + slot * memory.words + i, a, b, c, d)
    cuda.syncthreads()
    if thread < memory.ranks:
        remote = pointer_from_address(memory.peers[thread], memory.local)
        st_relaxed_sys_s32(remote, slot, int32(2 * number + (targets >> thread & 1)))


without_fence = make_dispatch(send_without_fence, receive_flag)
lesson.orders(Version(without_fence), seeds=2)


# %%
@cuda.jit(device=True)
def send_flag_first(memory, slot, number, targets, x, token):
    thread, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    if thread < memory.ranks:
        remote = pointer_from_address(memory.peers[thread], memory.local)
        st_relaxed_sys_s32(remote, slot, int32(2 * number + (targets >> thread & 1)))
    for r in range(memory.ranks):
        if targets >> r & 1:
            remote = pointer_from_address(memory.peers[r], memory.local)
            for i in range(4 * thread, memory.words, 4 * threads):
                a, b, c, d = ld_global_s32x4(x, token * memory.words + i)
                st_relaxed_sys_s32x4(remote, memory.rows + slot * memory.words + i, a, b, c, d)


page.show_parts(
    {
        "a thread per vector": Version(flags),
        "without the fence": Version(without_fence),
        "the flag first": Version(make_dispatch(send_flag_first, receive_flag)),
    }
)

# %% [markdown]
# The first two lines differ by what a fence costs that waits for a row. The last line is a message that waits for nothing, so it is what the next step may hope for.
#
# ## Step 3: the data is its own flag
#
# **Bottleneck.** The fence, in space and time:

# %%
draw.space_time()

# %% [markdown]
# **Idea.** The receiver polls the row itself. TensorRT-LLM, whose all-reduce uses this protocol, calls it "Lamport".
#
# - Every word of an empty slot holds a **sentinel**, `0xFFFFFFFF`. A 16-byte vector has arrived when *none* of its four words is the sentinel: PTX treats a
#   vector access as four accesses in no order.
# - `clean` replaces words of a row that equal the sentinel. Such a word is two bfloat16 NaNs, and remains two NaNs.
# - After reading, the receiver **resets** the slot to the sentinel, for operation n + 2, which uses the same half. Is the reset in time? A sender that begins
#   operation n + 2 has received the receiver's metadata of operation n + 1. By then the receiver had finished operation n, including every reset. The end of a
#   kernel orders its stores before those of the next kernel of its rank, so the reset needs no fence either.
# - The word that says whether a slot has a row is now **metadata**. It has the number of the operation, so it is its own flag, too.
#
# Within an operation no order of stores is required: all of them are relaxed, without fence or barrier.


# %%
@cuda.jit(device=True)
def has_arrived(a, b, c, d):
    return (a != SENTINEL) & (b != SENTINEL) & (c != SENTINEL) & (d != SENTINEL)


@cuda.jit(device=True)
def clean(word):
    return int32(CLEAN_NAN) if word == SENTINEL else word


@cuda.jit(device=True)
def take_vector(local, offset):
    a, b, c, d = ld_relaxed_sys_s32x4(local, offset)
    while not has_arrived(a, b, c, d):
        a, b, c, d = ld_relaxed_sys_s32x4(local, offset)
    st_relaxed_sys_s32x4(local, offset, SENTINEL, SENTINEL, SENTINEL, SENTINEL)  # for the operation after the next
    return a, b, c, d


@cuda.jit(device=True)
def push_row(memory, slot, x, row, target):
    remote = pointer_from_address(memory.peers[target], memory.local)
    for i in range(4 * int32(cuda.threadIdx.x), memory.words, 4 * int32(cuda.blockDim.x)):
        a, b, c, d = ld_global_s32x4(x, row * memory.words + i)
        at = memory.rows + slot * memory.words + i
        st_relaxed_sys_s32x4(remote, at, clean(a), clean(b), clean(c), clean(d))


@cuda.jit(device=True)
def send_data(memory, slot, number, targets, x, token):
    thread = int32(cuda.threadIdx.x)
    if thread < memory.ranks:
        remote = pointer_from_address(memory.peers[thread], memory.local)
        st_relaxed_sys_s32(remote, slot, int32(2 * number + (targets >> thread & 1)))
    for r in range(memory.ranks):
        if targets >> r & 1:
            push_row(memory, slot, x, token, r)


@cuda.jit(device=True)
def receive_data(memory, slot, number, recv_x, out):
    flag = ld_relaxed_sys_s32(memory.local, slot)
    while flag >> 1 != number:
        flag = ld_relaxed_sys_s32(memory.local, slot)
    if flag & 1:
        for i in range(4 * int32(cuda.threadIdx.x), memory.words, 4 * int32(cuda.blockDim.x)):
            a, b, c, d = take_vector(memory.local, memory.rows + slot * memory.words + i)
            st_global_s32x4(recv_x, out * memory.words + i, a, b, c, d)
    return flag & 1


# %% [markdown]
# **Prediction.** As step 2, with a relaxed way over NVLink instead of a release. (A release of lesson 11's ping-pong has no row to wait for, so the saving may be
# larger.)

# %%
data = make_dispatch(send_data, receive_data)
predicted_us = page.chain_us(1 + 2, "relaxed")
step("data as its own flag", Version(data), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** An acknowledgement that no thread needs is a round trip that no thread should wait for. If each piece of data can say that it has arrived, pieces need no order.
#
# The score has more stores than before: the resets. They stay on the rank, and no thread waits for them.
#
# Here are the same two operations as before. Nothing is orange, because a row may be read as soon as it is stored; the receiver stores the sentinel after reading:

# %%
player = page.play(Version(data), data_is_flag=True)
page.strip(player, ("the row",), ("reads",), ("Operation 2", "the row"))

# %% [markdown]
# ## Build: a word as its own flag
#
# Write the protocol yourself, for one word. Two ranks exchange a word in each launch, and each launch has one thread per rank. `local` has two words, which hold the
# sentinel at first; `epoch[0]` is the number of earlier launches, and you count it on. `value[0]` is the word to send, never the sentinel; what the other rank sent
# belongs in `out[0]`. Launches are queued, so the other rank may be one ahead. Par: 4 bytes to the other rank per launch.


# %%
@cuda.jit
def my_exchange(local, peers, epoch, rank, value, out):
    pass  # yours


exchange = exercises.exchange.use(my_exchange)

# %% [markdown]
# ## Wrong kernels
#
# **Choose.** With one half instead of two, consecutive operations use the same slots. What happens in step 3? "A": nothing, since flags have numbers. "B": rows are
# wrong, but all operations end. "C": rows may be wrong, and the ranks may wait forever.

# %%
exercises.halves.check(...)


# %% [markdown]
# The next cell runs that kernel, and one that forgets to reset. A test of a single operation finds neither.


# %%
@cuda.jit(device=True)
def receive_without_reset(memory, slot, number, recv_x, out):
    flag = ld_relaxed_sys_s32(memory.local, slot)
    while flag >> 1 != number:
        flag = ld_relaxed_sys_s32(memory.local, slot)
    if flag & 1:
        for i in range(4 * int32(cuda.threadIdx.x), memory.words, 4 * int32(cuda.blockDim.x)):
            at = memory.rows + slot * memory.words + i
            a, b, c, d = ld_relaxed_sys_s32x4(memory.local, at)
            while not has_arrived(a, b, c, d):
                a, b, c, d = ld_relaxed_sys_s32x4(memory.local, at)
            st_global_s32x4(recv_x, out * memory.words + i, a, b, c, d)
    return flag & 1


ONE_HALF = 1
print("one half:", lesson.orders(Version(make_dispatch(send_data, receive_data, ONE_HALF)), seeds=2), "", sep="\n")
print("no reset:", lesson.orders(Version(make_dispatch(send_data, receive_without_reset)), seeds=2), sep="\n")

# %% [markdown]
# ## Step 4: combine in rank order
#
# **Idea.** Combine uses the same protocol, with slots `[expert rank, token]` in the memory of the source rank. The source knows from its own `topk_idx` which
# ranks send a row, so combine needs no metadata. Rows may arrive in any order, but must be added in one: otherwise the bits of a sum change from run to run. So a
# thread waits for its vectors in rank order, adds them in float32 and rounds once. Waiting in order costs nothing: the sum is complete with the last row in any
# order.


# %%
@factory
def make_combine(sum_rows):
    @cache
    def combine_of(sizes):
        ranks, tokens, slots, words = sizes.ranks, sizes.tokens, sizes.slots, sizes.words
        topk, local_experts = sizes.topk, sizes.local_experts

        @cuda.jit
        def combine(local, peers, epochs, rank, y, has_row, topk_idx, out):
            token = int32(cuda.blockIdx.x)
            memory = Memory(local, peers, int32(0), int32(words), int32(ranks))
            number = int32(epochs[token] + 1 & NUMBERS)
            first = int32((number & 1) * slots)
            targets = ranks_of(topk_idx, token, topk, local_experts)
            for source in range(ranks):
                row = int32(source * tokens + token)
                if has_row[row]:
                    push_row(memory, int32(first + rank * tokens + token), y, row, source)
            sum_rows(memory, int32(first + token), tokens, targets, out, token)  # <-- a hole
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                epochs[token] = number

        return combine

    return combine_of


# %% [markdown]
# ## Build: the sum
#
# Write `sum_rows`. A row of rank `r` is in slot `slot + r * tokens`, and `targets >> r & 1` says whether rank `r` sends one. Each thread takes its vectors of
# `memory.words` words, four at a time, as `receive_data` does: for every vector it adds those of all ranks, in rank order, and stores the sum in row `token` of
# `out`. You have `take_vector(memory.local, index)`; `add_row(sums, vector, 0, float32(1))` adds the eight bfloat16 of four words `vector` to eight float32 `sums`;
# `round_sums(sums, vector)` rounds them. Both are arrays: `cuda.local.array(8, float32)` and `cuda.local.array(4, int32)`.


# %%
@cuda.jit(device=True)
def my_sum_rows(memory, slot, tokens, targets, out, token):
    pass  # yours


sum_rows = exercises.sum_rows.use(my_sum_rows)

# %% [markdown]
# **Prediction.** A launch, two loads (the experts, the row), and one way over NVLink more than dispatch alone.

# %%
combine = make_combine(sum_rows)
predicted_us = page.after("data as its own flag", page.chain_us(2, "relaxed"))
step("with combine", Version(data, combine), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** A fixed order of additions is not a fixed order of arrivals.
#
# In these rounds every dispatch is followed by a combine, and the metadata of the next dispatch keeps the ranks within one operation of each other. So here even one
# half would do for combine (why?). In the package a combine may follow a combine: every rank signals to all others that its combine has started, and waits for
# their signals.
#
# ## Where is the rest?
#
# A rank alone runs the same kernels, with the same number of experts, but nothing crosses NVLink. What several ranks take beyond that should be one way for each
# dispatch and combine, or three of them with a fence:

# %%
page.show_alone(
    {
        "a thread per vector": Version(flags),
        "data as its own flag": Version(data),
        "with combine": Version(data, combine),
    }
)

# %% [markdown]
# If the last column is larger than 3, 1 and 2, the difference is what the model leaves out: the latency of the table above is that of one word, and here a whole
# row is stored and polled; and each operation waits for the slower rank.
#
# ## Step 5: packed by expert
#
# **Bottleneck.** The grouped GEMM of [lesson 07](07_grouped_gemm.ipynb) takes the first row of each expert, and the number of its rows; between them lie no others.
# In the layout that DeepGEMM calls **masked**, the rows of an expert begin at a fixed place of a tensor `[local experts, capacity, hidden]`. Rows in slots would have
# to be copied there, in another launch. This step and the next one are timed with more tokens, as packing depends on them.
#
# **Idea.** A row's **place**, its index within its expert, is the number of earlier slots with that expert. Metadata now names the experts, in one word for
# each of the top-k. Every CTA collects the metadata of all slots in shared memory and counts, so that no CTA needs another one's results. Rows of an expert are ordered
# by source rank, then by token, in every run.

# %%
EXAMPLE_IDS = [[[0, 1], [2, 0], [3, 2], [1, 3]], [[2, 3], [0, 3], [1, 2], [0, 1]]]  # 2 experts on each of 2 ranks
draw.packed_rows(EXAMPLE_IDS, rank=1, local_experts=2)

# %% [markdown]
# A warp counts for one entry of the metadata at a time. At first each lane counts all by itself, and all 32 lanes do the same:

# %%
NOT_HERE = 255  # in place of an expert of another rank


@cuda.jit(device=True)
def count_alone(experts, expert, n):
    count = int32(0)
    for j in range(n):
        count = int32(count + (experts[j] == expert))
    return count


@factory
def make_packed(count):
    @cache
    def packed_of(sizes):
        ranks, tokens, slots, words, rows = sizes.ranks, sizes.tokens, sizes.slots, sizes.words, sizes.metadata_words
        topk, local_experts, entries, own = sizes.topk, sizes.local_experts, slots * sizes.topk, ranks * sizes.topk

        @cuda.jit
        def packed(local, peers, epochs, rank, x, topk_idx, recv_x, counts):
            experts = cuda.shared.array(entries, int32)  # of all slots
            places = cuda.shared.array(own, int32)  # of this CTA's tokens: rows of recv_x
            thread, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
            token, warp, warps = int32(cuda.blockIdx.x), int32(thread >> 5), int32(threads >> 5)
            memory = Memory(local, peers, int32(rows), int32(words), int32(ranks))
            number = int32(epochs[token] + 1 & NUMBERS)
            half, targets = int32(number & 1), ranks_of(topk_idx, token, topk, local_experts)
            slot = int32(half * slots + rank * tokens + token)

            for r in range(ranks):
                if thread < topk:
                    expert = int32(topk_idx[token * topk + thread] - r * local_experts)
                    code = expert if 0 <= expert < local_experts else int32(NOT_HERE)
                    remote = pointer_from_address(peers[r], local)
                    st_relaxed_sys_s32(remote, slot * topk + thread, int32(number << 8 | code))
                if targets >> r & 1:
                    push_row(memory, slot, x, token, r)

            for j in range(thread, entries, threads):
                word = ld_relaxed_sys_s32(local, half * entries + j)
                while word >> 8 != number:
                    word = ld_relaxed_sys_s32(local, half * entries + j)
                experts[j] = word & 255
            cuda.syncthreads()

            for j in range(warp, own, warps):
                entry = int32((j // topk * tokens + token) * topk + j % topk)
                expert, place = experts[entry], int32(-1)
                if expert < NOT_HERE:
                    place = int32(expert * slots + count(experts, expert, entry))  # <-- a hole
                if thread & 31 == 0:
                    places[j] = place
            for e in range(token * warps + warp, local_experts, tokens * warps):
                found = count(experts, int32(e), int32(entries))
                if thread & 31 == 0:
                    counts[e] = found
            cuda.syncthreads()

            for r in range(ranks):
                for i in range(4 * thread, words, 4 * threads):
                    at, has_read = int32(rows + (half * slots + r * tokens + token) * words + i), False
                    for k in range(topk):
                        place = places[r * topk + k]
                        if place >= 0:
                            if not has_read:
                                a, b, c, d = take_vector(local, at)
                                has_read = True
                            st_global_s32x4(recv_x, place * words + i, a, b, c, d)
            if thread == 0:
                epochs[token] = number

        return packed

    return packed_of


# %% [markdown]
# The comparison is step 3 with as many tokens. **Prediction.** Each row is stored once for each of its experts here. And warps go through entries one by one: a
# load, a comparison, a selection and an addition each, and a quarter of a loop. The warp that counts most goes through those before an entry, and through all of
# them for the number of an expert's rows.

# %%
INSTRUCTIONS = 5  # per entry
many.step("data as its own flag", Version(data))
predicted_us = page.packed_us("data as its own flag", INSTRUCTIONS)
many.step("packed by expert", Version(make_packed(count_alone), packed=True), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** If every CTA can compute a result from what all of them have, recomputing it may be cheaper than waiting for the CTA that knows it.
#
# ## Build: a warp counts
#
# Write `count_by_warp`: how many of `experts[0]` to `experts[n - 1]` equal `expert`? All 32 lanes of a warp call it with the same arguments, and all of them return the
# result. `cuda.ballot_sync(FULL_MASK, condition)` returns a word with a bit for each lane, and `cuda.popc` counts bits. Par: a load for 32 entries.


# %%
@cuda.jit(device=True)
def my_count(experts, expert, n):
    pass  # yours


count_by_warp = exercises.count_by_warp.use(my_count)

# %% [markdown]
# ## Step 6: 32 lanes count
#
# **Prediction.** The counting of step 5 takes a 32nd of its time.

# %%
predicted_us = page.counted_us("packed by expert", INSTRUCTIONS)
many.step("counted by warps", Version(make_packed(count_by_warp), packed=True), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** 32 lanes that do the same work are one lane. Look for them where a result is needed by all of a warp.
#
# The combine of packed rows does more than that of step 4: each rank first sums the rows of its own experts, times their weights, in float32, and rounds to bfloat16, so
# that one row per rank and token travels. It needs the weights, which the source sends first: one more way over NVLink.
#
# ## What the package adds
#
# The package's kernels follow steps 1 to 6. Two things are different:
#
# - **Senders and receivers.** In the steps a CTA sends its token and then receives. In the package each CTA does one of the two, and if tokens are few, several CTAs
#   share a row: [`roles` and `slot_at`](../moe_numba/expert_parallel/low_latency/protocol.py).
# - **Bit sets.** Receiving CTAs keep a bit set of slots for each expert, filled as metadata arrives; a row's place is the number of bits before its own:
#   [`count_slots`](../moe_numba/expert_parallel/low_latency/dispatch.py).
#
# What a server needs besides (timeouts, ranks that die, FP8, a receive phase that is called apart), and how the pair is called, also from a CUDA graph, is in
# [Use the kernels](../docs/usage.md). What could come after it is in [Expert parallelism](../docs/expert_parallel.md). The next cell runs the package's pair on
# this page's ranks:

# %%
print(page.show_package())

# %% [markdown]
# ## What did not pay, and why
#
# These are variants of the package's kernels on 2 GPUs, from the record of `python -m moe_numba bench low_latency`:

# %%
page.show_what_did_not_pay()

# %% [markdown]
# With one token FP8 saves bytes that take no time; with many tokens, bytes are what takes time.
#
# ## More tokens, more GPUs
#
# A model adds a constant, for all latencies of a pair, and the bytes that a rank sends and receives at a bandwidth. Both are fitted to the record of 2 GPUs, in
# slots. With more GPUs a rank sends each token to more of them. Extrapolated columns assume the same constant and bandwidth; nothing has confirmed them:

# %%
print(page.describe_model())
page.show_model()

# %% [markdown]
# ## Formula: where bytes begin to matter
#
# On two GPUs every token goes to the other rank (hidden 7168, bfloat16; top-8 makes that nearly certain). With how many tokens per rank do the bytes of dispatch and
# combine together take as long as the constant of the model? `model` has `latency_us` and `gbps`.


# %%
def my_break_even(model):
    return ...


exercises.break_even.check(my_break_even)

# %% [markdown]
# ## All steps

# %%
lesson.save(many, alone)
lesson.summary()

# %%
many.summary()

# %% [markdown]
# **You can now** send rows without a flag or a fence, by data that says of itself that it has arrived.
#
# ## Next step, not built
#
# Even our best pair is two launches, and the experts' GEMMs are more of them. **Build** a dispatch that begins before the kernel in front of it has ended
# (programmatic dependent launch: the package does that), and then one that ends in the GEMM: a tile of the GEMM polls the rows that it multiplies, so that no row is
# stored twice, and the first expert starts when its first rows are there. The bound of such a kernel is a launch less per pair:

# %%
print(
    f"{page.chain_us(2, 'relaxed', launches=2):.2f} us with two launches, {page.model.launch().us:.2f} us of them for each"
)

# %% [markdown]
# ## Sources
#
# - DeepSeek: [DeepEP](https://github.com/deepseek-ai/DeepEP), `low_latency_dispatch` and `low_latency_combine`, whose interface the package follows. DeepEP sends a
#   row once per expert; this package sends it once per rank.
# - NVIDIA: TensorRT-LLM, one-shot all-reduce ("Lamport": the data is its own flag), and its one-sided NVLink all-to-all.
# - NVIDIA: *PTX ISA*, memory consistency model, vector accesses; *CUDA C++ Programming Guide*, programmatic dependent launch.
# - The package's kernels: [`dispatch.py`](../moe_numba/expert_parallel/low_latency/dispatch.py) and
#   [`combine.py`](../moe_numba/expert_parallel/low_latency/combine.py), with [`protocol.py`](../moe_numba/expert_parallel/low_latency/protocol.py).
#
# Before: [13, combine](13_combine.ipynb). Next: [15, a layer](15_moe_layer.ipynb), which puts experts between the two.
