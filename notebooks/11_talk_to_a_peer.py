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
# # Talk to a peer
#
# The experts of a layer are spread over several GPUs, so tokens travel. A kernel can store into the memory of another GPU as if it were its own:
# NVLink carries the store. Nothing tells the other GPU that it has arrived.
#
# So this lesson has one question: **what must two GPUs do so that one reads exactly what the other wrote, and what does it cost?** You begin with a
# single store. Then you send a message, measure what its flag costs, and build a ring through which rows stream: first for one thread, then for a
# warp, then for many. On the way you find out how a ring that is too short stops two GPUs for ever. The next lessons,
# [dispatch](12_dispatch.ipynb) and combine, consist of such rings.
#
# Most of the code is yours. The simulator judges it with **weak memory**: stores arrive late and in any order that the memory model allows.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from contextlib import contextmanager

import torch
from numba import cuda, int32, uint32, uint64

from moe_numba.course.bench.timing.multigpu import outputs_of, settle
from moe_numba.course.lessons.talk_to_a_peer import draw, exercises
from moe_numba.course.lessons.talk_to_a_peer import runs as page
from moe_numba.course.lessons.talk_to_a_peer.runs import GROUP, OTHER_SMS, SAME_SM, SAME_WARP, Queue, Version, lesson
from moe_numba.course.lessons.talk_to_a_peer.sizes import (
    BATCH,
    CHANNELS,
    CHUNK,
    DATA,
    FLAG,
    HEAD,
    RANKS,
    RING,
    TAIL,
    WORD_SLOTS,  # for your answers
)
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    ld_relaxed_gpu_s32,
    ld_relaxed_sys_s32,
    poll_acquire_cta_shared_s32,
    st_relaxed_gpu_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.cp_async import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    make_bulk_wait_group,
    make_bulk_wait_group_read,
)
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.memory import ld_global_s32x4, pointer_from_address, st_na_s32x4

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.describe_ranks())
print(page.result())

# %% [markdown]
# A **rank** is a process, or here a thread, with a GPU of its own. Each rank sends to the next one, and the last one to rank 0. `RANKS` and all other
# sizes stand in `moe_numba/course/lessons/talk_to_a_peer/sizes.py`; 4 and 8 ranks work, too. If there are fewer GPUs than ranks, they are **virtual**:
# they share a GPU, or the simulator. Then every kernel still runs and is checked, and times come from records.
#
# ## The problem

# %%
draw.problem()

# %% [markdown]
# ## Step 1: an address in a peer's memory
#
# A device address is valid in one process only. To share an allocation, its owner asks the driver for an **IPC handle**, sends it to the other
# processes, and these open it. DeepEP allocates one buffer per rank and shares it in this way. The buffer has the data, and behind it what the
# kernels need to find the others: a table of all addresses.

# %%
draw.buffer()

# %% [markdown]
# This kernel stores into the buffer of rank `peer`. `pointer_from_address` turns an integer into a pointer, of the type of the pointer `mine`.


# %%
@cuda.jit
def store_into_peer(buffer_ptrs, mine, peer, value):
    theirs = pointer_from_address(buffer_ptrs[peer], mine)
    theirs[cuda.threadIdx.x] = value + cuda.threadIdx.x


page.show_second_process(store_into_peer)

# %% [markdown]
# On a GPU, the cell has started a second process that opens this one's handle. (Both use the same GPU there; the calls are the same with two.) In the simulator,
# ranks live in one process, and only *registered* buffers have addresses that others may use. Three rules of IPC: a process cannot open its own
# handle; a handle stands for a whole `cudaMalloc`, so a tensor of torch's caching allocator cannot be shared alone; and the owner must not free
# the memory before the others have closed it.
#
# Between nodes there is no such address. [DeepEP between nodes](../docs/deepep_between_nodes.md) says what its buffer does there: NVSHMEM, its
# bootstrap, and queues of the network card.
#
# **Build.** Every rank has a `value` that no other rank knows. Write a kernel that stores it into the buffers of *all* ranks, at index `rank`. It is
# launched with 32 threads on each rank, `peers` are the addresses of all buffers (int32), and `local` is this rank's own.


# %%
@cuda.jit
def my_tell_everyone(peers, local, rank, ranks, value):
    pass  # yours


tell_everyone = exercises.everyone.use(my_tell_everyone)

# %% [markdown]
# And this is how a kernel gets onto all ranks. `GROUP` runs a function on each rank and gives it a **transport**, which knows the `rank`, allocates memory that
# all ranks can access (`shared.addresses` are the addresses; behind it are IPC handles, torch's symmetric memory or NVSHMEM), and launches kernels
# that wait for those of other ranks. We write the function as a context manager: it allocates, yields the function `step` that launches, waits until
# *all* ranks have finished (`settle`), and frees. What is timed is then `step` alone. All later cells do the same, in the module `runs`.


# %%
@contextmanager
def make(transport):
    shared = transport.allocate(4 * RANKS)
    local, value = shared.local.view(torch.int32), 100 + transport.rank

    def step():
        transport.launch(tell_everyone, 1, 32, shared.addresses, local, transport.rank, transport.num_ranks, value)
        return local

    yield step
    settle(transport)
    shared.close()


for rank, words in enumerate(outputs_of(GROUP, make)):
    print(f"rank {rank} has been told", words.tolist())

# %% [markdown]
# Here the *host* waited for all kernels before it looked. That is the expensive way: kernels end, streams synchronise, hosts meet.
#
# **Take away.** An address is all that a kernel needs to reach a peer. When to look is the problem.
#
# ## Step 2: a message
#
# Now kernels find each other while they run. 64 threads of a rank store a word each, and then a **flag**. The receiver **polls** the flag and reads the words.
# `publish` and `observe` are holes.


# %%
@factory
def make_message(publish, observe):
    @cuda.jit
    def message(peers, local, x, out, to, number):
        thread = int32(cuda.threadIdx.x)
        there = pointer_from_address(peers[to], local)
        there[DATA + thread] = x[thread]
        publish(there, number)  # <-- a hole: the flag
        observe(local, number)  # <-- a hole: wait for the flag of the rank before
        out[thread] = local[DATA + thread]

    return message


@cuda.jit(device=True)
def publish_relaxed(there, number):
    if cuda.threadIdx.x == 0:
        st_relaxed_sys_s32(there, FLAG, number)


@cuda.jit(device=True)
def observe(here, number):
    if cuda.threadIdx.x == 0:
        while ld_acquire_sys_s32(here, FLAG) < number:
            pass
    cuda.syncthreads()


print(page.show_torn(make_message(publish_relaxed, observe)))

# %% [markdown]
# A **relaxed** store is atomic, and that is all. It may overtake the stores before it. The simulator runs the message under several **seeds**, each of which is
# another order in which threads run and stores arrive. It also names the race: the two accesses that nothing orders.

# %%
draw.message()

# %% [markdown]
# Two instructions order them. A store with **release** semantics first makes visible what its thread has stored, *and what this thread has observed of
# other threads*. A load with **acquire** semantics that reads the released value sees all of that. The **scope** says among whom: `sys` is all GPUs and the
# host.
#
# **Build.** Write `publish`. All 64 threads call it, after each has stored its word. Use `st_release_sys_s32(there, FLAG, number)`. Par: one flag.


# %%
@cuda.jit(device=True)
def my_publish(there, number):
    pass  # yours


publish = exercises.publish.use(my_publish)

# %% [markdown]
# Which part is needed? Each line but the first leaves one out:


# %%
@cuda.jit(device=True)
def publish_with_barrier_only(there, number):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        st_relaxed_sys_s32(there, FLAG, number)


@cuda.jit(device=True)
def publish_without_barrier(there, number):
    if cuda.threadIdx.x == 0:
        st_release_sys_s32(there, FLAG, number)


@cuda.jit(device=True)
def observe_relaxed(here, number):
    if cuda.threadIdx.x == 0:
        while ld_relaxed_sys_s32(here, FLAG) < number:
            pass
    cuda.syncthreads()


page.show_orders(
    {
        "your publish, acquire": make_message(publish, observe),
        "barrier, relaxed store": make_message(publish_with_barrier_only, observe),
        "release without a barrier": make_message(publish_without_barrier, observe),
        "relaxed load": make_message(publish, observe_relaxed),
    }
)

# %% [markdown]
# The simulator shows what *may* happen. On a GPU a further column counts what *did* happen, in some launches. A message that arrives intact a
# million times proves nothing.
#
# **Choose.** `fence_acq_rel_sys()` orders what comes before it against what comes after it. Instead of a release one can write a fence and a relaxed store.
# Which of these is right, and why not the others?

# %%
exercises.fences.check(...)

# %% [markdown]
# **Take away.** Data, barrier, release; acquire, barrier, data. A release speaks for its own thread, and for others only after a barrier.
#
# ## Step 3: what a flag costs
#
# In a **ping-pong** a rank stores a flag at its partner (0 and 1 are partners, 2 and 3, ...), which answers as soon as it sees it. A round trip is two flags.


# %%
@factory
def make_ping_pong(store):
    @cuda.jit
    def ping_pong(peers, local, rank, rounds, before):
        there = pointer_from_address(peers[rank ^ 1], local)
        for i in range(rounds):
            number = int32(before + i + 1)
            if rank & 1 == 0:
                store(there, FLAG, number)
            while ld_acquire_sys_s32(local, FLAG) < number:
                pass
            if rank & 1 == 1:
                store(there, FLAG, number)

    return ping_pong


page.show_ping_pong({"relaxed": make_ping_pong(st_relaxed_sys_s32), "release": make_ping_pong(st_release_sys_s32)})

# %% [markdown]
# These are the two latencies of NVLink that all later lessons predict with. If the release takes longer, it does so although it has nothing to wait for: the
# thread has stored only flags.
#
# A load from a peer is a round trip, too: the request goes there, the data come back. So a kernel should **store to peers and poll its own memory**.
#
# The **host** is a peer, too. A receiver often must know how many rows will come before it can allocate memory for them, so a kernel tells the host. A counter in
# *pinned* host memory, mapped into the GPU's address space, does it without a copy and without waiting for the stream: it starts at -1, and the host polls.


# %%
@cuda.jit
def report(counter, value):
    st_release_sys_s32(counter, 0, value)


page.show_counter(report)

# %% [markdown]
# **Formula.** A sender may reuse the place of a row only after the receiver has said that it has read it. How many rows must be under way at once to keep a link
# busy, if copying takes no time and a signal takes `one_way_us`?

# %%
rows_in_flight = ...  # yours: lambda link_gbps, one_way_us, row_bytes: ...
exercises.in_flight.check(rows_in_flight)

# %% [markdown]
# **Take away.** A sender that waits for an answer to each row pays for two flags per row.
#
# ## Step 4: a ring
#
# Several rows under way need several places, and the places are used again. That is a **ring**. The sender stores into **slots** in the receiver's memory. The **tail**
# counts rows that were sent, the **head** counts rows that were taken: each head is a **credit** for the sender.

# %%
draw.ring()

# %% [markdown]
# **Build.** Write this kernel, for words instead of rows. It runs with two CTAs of *one* thread on every rank. CTA 0 sends `x[0]` to `x[sends - 1]` to rank
# `to`. CTA 1 receives `receives` words from rank `source` and stores them in `out`. The ring has `WORD_SLOTS` slots from index `RING` on. `TAIL` is the
# index of the tail, in the receiver's memory, and `HEAD` that of the head, in the sender's; they are 0 at first. The sender must use all slots
# before it waits.


# %%
@cuda.jit
def my_ring_of_words(peers, local, x, out, sends, receives, to, source):
    pass  # yours


exercises.words.check(my_ring_of_words)

# %% [markdown]
# **Take away.** Two counters, each written by one end and polled by the other. The sender releases the tail after it has stored a slot, the receiver
# releases the head after it has *read* one: reads need an order, too.
#
# ## The lower bound: the push rate
#
# Before we make a ring fast, we ask how fast bytes can leave at all. Two ways: all threads store 16 bytes each. Or one thread per warp issues **bulk copies** (TMA,
# [lesson 06](06_hopper_gemm.ipynb)): a row from local memory to shared memory, and from there to the peer.


# %%
@cuda.jit
def push_stores(peers, local, x, rows, row_words, to):
    there = pointer_from_address(peers[to], local)
    for i in range(cuda.grid(1), rows * row_words // 4, cuda.gridsize(1)):
        k = int32(i)
        st_na_s32x4(there, 4 * i, k, k, k, k)


have_read, have_written = make_bulk_wait_group_read(0), make_bulk_wait_group(0)


@cuda.jit
def push_bulk(peers, local, x, rows, row_words, to):
    smem, bars = cuda.shared.array(0, int32, 128), cuda.shared.array(0, uint64, 128)  # the same memory
    there = pointer_from_address(peers[to], local)
    thread, warps = int32(cuda.threadIdx.x), int32(cuda.blockDim.x >> 5)
    warp, row_bytes, phase = int32(thread >> 5), int32(4 * row_words), uint32(0)
    at, bar = int32(warp * row_words), int32((warps * row_words >> 1) + warp)  # barriers lie behind the rows
    if thread & 31 == 0:
        mbarrier_init(bars, bar, 1)
        fence_mbarrier_init()
        for row in range(cuda.blockIdx.x * warps + warp, rows, cuda.gridDim.x * warps):
            have_read()  # the store of the row before has read shared memory
            mbarrier_arrive_expect_tx(bars, bar, row_bytes)
            bulk_load(smem, at, x, int32(row * row_words), row_bytes, bars, bar)
            mbarrier_wait_parity(bars, bar, phase)
            phase = uint32(phase ^ uint32(1))
            bulk_store(there, int32(row * row_words), smem, at, row_bytes)
            bulk_commit_group()
        have_written()


page.show_push(push_stores, push_bulk)

# %% [markdown]
# All ranks push at the same time, so each link carries as much in both directions. A CTA reaches a fraction of the link; several CTAs saturate it,
# whichever way they copy. Compare the threads of both lines: one thread that issues bulk copies moves more than a warp that stores. The best rate of this
# table gives **the lower bound for bytes over NVLink**, here and in lessons 12 and 13.
#
# **Formula.** In dispatch a rank sends rows to all `ranks` ranks in equal numbers, itself included, and a CTA copies `cta_gbps`, own rows included. How many CTAs
# saturate a link of `link_gbps`?

# %%
ctas_that_saturate = ...  # yours: lambda ranks, cta_gbps, link_gbps: ...
exercises.saturate.check(ctas_that_saturate)

# %% [markdown]
# ## Step 5: one slot, a warp
#
# Now rows, copied by a warp: each lane takes 16 bytes at a time. `make_ring` launches two warps per **channel**, which is a ring of its own: an even CTA sends
# to rank `to`, an odd one receives from rank `source`. Each channel has `share` rows. (`pairs` is for a later section.) A launch continues to count where the launch before has ended, in
# `before`. So counters are never cleared, and no barrier is needed between launches.
#
# | field of `queue` | |
# |---|---|
# | `here`, `there` | the memory of this rank, and of the rank at the other end |
# | `tail`, `head`, `ring` | indices of the tail, the head, and the first slot: the same in all memories |
# | `slots`, `row_words` | how many slots, and how long a row is |
# | `before` | the number of the first row of this launch |


# %%
@cuda.jit(device=True)
def copy_row(to, to_at, source, at, words):  # by a warp
    for i in range(4 * int32(cuda.threadIdx.x & 31), words, 128):
        a, b, c, d = ld_global_s32x4(source, int32(at + i))
        st_na_s32x4(to, int32(to_at + i), a, b, c, d)


@cuda.jit(device=True)
def slot_of(queue, number):
    slot = uint32(uint32(number) % uint32(queue.slots))  # 32 bits: a 64-bit division is a function call
    return int32(queue.ring + int32(slot) * queue.row_words)


@factory
def make_ring(send, receive, pairs=True):
    @cuda.jit
    def ring(peers, local, x, out, rows, share, row_words, slots, launch, to, source):
        channels, cta = int32(cuda.gridDim.x >> 1), int32(cuda.blockIdx.x)
        if pairs:
            channel, sends = int32(cta >> 1), cta & 1 == 0
        else:
            channel, sends = int32(cta if cta < channels else cta - channels), cta < channels
        first = int32(channel * share)
        count = int32(max(0, min(share, rows - first)))
        at, before = int32(channel * (RING + slots * row_words)), int32(launch * count)
        if sends:
            there = pointer_from_address(peers[to], local)
            send(Queue(local, there, at + TAIL, at + HEAD, at + RING, slots, row_words, before), x, first, count)
        else:
            there = pointer_from_address(peers[source], local)
            receive(Queue(local, there, at + TAIL, at + HEAD, at + RING, slots, row_words, before), out, first, count)

    return ring


# %% [markdown]
# **Build.** Write both ends. `send` sends rows `first` to `first + count - 1` of `x`, and row `first + n` has the number `queue.before + n`. `receive` stores rows in
# `out` at the same places. All 32 lanes call them, and all should copy. Par: a tail per row, and a head per row.


# %%
@cuda.jit(device=True)
def my_send(queue, x, first, count):
    pass  # yours


send = exercises.send.use(my_send)


# %%
@cuda.jit(device=True)
def my_receive(queue, out, first, count):
    pass  # yours


receive = exercises.receive.use(my_receive)

# %% [markdown]
# At first the ring has a single slot:

# %%
step("one slot", Version(make_ring(send, receive), slots=1))

# %% [markdown]
# A step is checked on all ranks, in a second launch, with outputs that were poisoned and rows that only their sender has. In the simulator it runs
# under several seeds in weak memory, and with the race detector on. The table counts what crosses the link. **Rows in a ring** is the number to watch.
#
# **Take away.** With one slot, sender and receiver take turns: each row waits for a tail and for a credit.
#
# ## Step 6: several slots
#
# The same kernel with more slots.
#
# **Prediction.** The sender no longer waits for signals: we save two one-way latencies per row. (Sender and receiver now also copy at the same time. That
# saves more, but we have no number for it.)

# %%
step("ring", Version(make_ring(send, receive)), predicted_us=page.without_waits("one slot"))

# %% [markdown]
# How many slots are enough? Your formula knows, if you put in the rate of what sends:

# %%
print(page.slots_needed("ring"))

# %% [markdown]
# **Break.** This is the lesson's receiver. Remove one `cuda.syncwarp()`, such that all rows still arrive intact under all seeds, even in weak memory, and the race
# detector objects. What could go wrong on a GPU?


# %%
@cuda.jit(device=True)
def my_broken_receive(queue, out, first, count):
    lane = int32(cuda.threadIdx.x & 31)
    for n in range(count):
        number = int32(queue.before + n)
        if lane == 0:
            while ld_acquire_sys_s32(queue.here, queue.tail) <= number:
                pass
        cuda.syncwarp()
        copy_row(out, int32((first + n) * queue.row_words), queue.here, slot_of(queue, number), queue.row_words)
        cuda.syncwarp()
        if lane == 0:
            st_release_sys_s32(queue.there, queue.head, int32(number + 1))


exercises.broken.check(my_broken_receive)

# %% [markdown]
# **Take away.** Slots buy time for signals to travel, and a slow sender needs few of them. A check that passes says little of orders: ask the race detector.
#
# ## What a signal costs
#
# The sender still stores a tail per row, with release. What does that cost? Thread 0 of this kernel signals again and again, while nobody else writes to the peer, or its
# own warp stores a row before each signal, or other warps of its SM write, or other SMs.


# %%
@factory
def make_signals(store, busy):
    @cuda.jit
    def signals(peers, local, x, row_words, rounds, launch, to):
        stop, thread = cuda.shared.array(1, int32), int32(cuda.threadIdx.x)
        there = pointer_from_address(peers[to], local)
        warp = int32((cuda.blockIdx.x * cuda.blockDim.x + thread) >> 5)
        own = int32(2 * DATA + warp * row_words)  # each warp writes to a place of its own
        if thread == 0:
            stop[0] = 0
        cuda.syncthreads()
        if warp == 0:
            for i in range(rounds):
                if busy == SAME_WARP:
                    copy_row(there, own, x, int32(0), row_words)
                    cuda.syncwarp()
                if thread == 0:
                    store(there, FLAG, int32(i))
            if thread == 0:
                st_release_cta_shared_s32(stop, 0, 1)
                st_relaxed_gpu_s32(local, DATA, launch)
        elif busy == SAME_SM:
            while poll_acquire_cta_shared_s32(stop, 0) == 0:
                copy_row(there, own, x, int32(0), row_words)
        elif busy == OTHER_SMS and cuda.blockIdx.x > 0:
            while ld_relaxed_gpu_s32(local, DATA) < launch:
                copy_row(there, own, x, int32(0), row_words)

    return signals


page.show_signals(make_signals, {"st.relaxed": st_relaxed_sys_s32, "st.release": st_release_sys_s32})

# %% [markdown]
# Compare lines *and* columns. A relaxed store waits, too, if it has to queue behind other stores: the last two lines show whether it does so in its SM or in the link. The
# difference of both columns is what the release adds. In the last two lines its thread has stored nothing but flags, so all that it waits for are stores of others.
#
# Two remedies. **Signal less often**: the next step. Or **let another warp signal**, so that those that copy go on at once. Copying warps post in shared
# memory what they have done, with a release at scope `cta`, which is cheap. (`poll_...` is a load for such loops: in the simulator other threads run before it.) One
# warp fences for all of them:
#
# **Build.** 96 threads of a CTA call your function. Warps 0 and 1 have stored 32 words each at the peer. They post: `st_release_cta_shared_s32(posted, warp, 1)`. Lanes 0 and 1 of warp
# 2 wait for `posted[lane]` with `poll_acquire_cta_shared_s32(posted, lane)`, and store 1 to `FLAG + lane` of `there`. Use `fence_acq_rel_sys()` and relaxed stores. Warps 0
# and 1 wait for nothing but their own lanes: they return when they have posted.


# %%
@cuda.jit(device=True)
def my_signal_for_others(posted, there):
    pass  # yours


exercises.signal.check(my_signal_for_others)

# %% [markdown]
# Lesson 12 puts such a warp into dispatch, and measures what it saves there.
#
# **Take away.** A release waits until stores have arrived, and a busy link delays it. So publish many rows with one signal, or let a warp wait that has
# nothing else to do.
#
# ## Step 7: a signal per chunk
#
# The sender waits until a whole **chunk** of rows fits, copies them, and stores one tail. The receiver stays as it is: it stores a head per row.
#
# **Choose.** What do you expect?

# %%
exercises.slower_end.check(...)

# %% [markdown]
# **Prediction.** None of the sender's savings show: the receiver limits.


# %%
@factory
def make_send_chunks(chunk):
    @cuda.jit(device=True)
    def send(queue, x, first, count):
        lane, n = int32(cuda.threadIdx.x & 31), int32(0)
        while n < count:
            rows, number = int32(min(chunk, count - n)), int32(queue.before + n)
            if lane == 0:
                while number + rows - ld_acquire_sys_s32(queue.here, queue.head) > queue.slots:
                    pass
            cuda.syncwarp()
            for i in range(rows):
                at = int32((first + n + i) * queue.row_words)
                copy_row(queue.there, slot_of(queue, int32(number + i)), x, at, queue.row_words)
            cuda.syncwarp()
            if lane == 0:
                st_release_sys_s32(queue.there, queue.tail, int32(number + rows))
            n = int32(n + rows)

    return send


chunked = make_ring(make_send_chunks(CHUNK), receive)
step("signal per chunk", Version(chunked), predicted_us=page.as_before("ring"))

# %% [markdown]
# **Take away.** Two ends of a ring are a pipeline. Make the slower end faster.
#
# ## Step 8: credits in batches
#
# Now the receiver, too, signals once for several rows: it returns its credits in **batches**, and the rest at the end, so that the next launch finds all slots free.
#
# **Prediction.** We save the releases of the receiver that are no longer there, each at its price while its own warp stores to the peer. The receiver copies within its
# GPU, so this is the most that we can save.


# %%
@factory
def make_receive_batches(batch):
    @cuda.jit(device=True)
    def receive(queue, out, first, count):
        lane = int32(cuda.threadIdx.x & 31)
        for n in range(count):
            number = int32(queue.before + n)
            if lane == 0:
                while ld_acquire_sys_s32(queue.here, queue.tail) <= number:
                    pass
            cuda.syncwarp()
            at = int32((first + n) * queue.row_words)
            copy_row(out, at, queue.here, slot_of(queue, number), queue.row_words)
            cuda.syncwarp()
            if lane == 0 and ((n + 1) % batch == 0 or n + 1 == count):
                st_release_sys_s32(queue.there, queue.head, int32(number + 1))

    return receive


@factory
def make_batched(chunk, batch):
    return make_ring(make_send_chunks(chunk), make_receive_batches(batch))


batched = make_batched(CHUNK, BATCH)
step("credits in batches", Version(batched), predicted_us=page.with_fewer_signals("signal per chunk", BATCH))

# %% [markdown]
# **Take away.** Fewer signals cost latency: a row waits for its chunk, a slot for its batch. That is harmless as long as the ring has slots for it.
#
# ## Who waits for whom
#
# As long as it has slots for it: how many are that? With one row per signal, one slot was enough. The simulator runs chunks of 4 and batches of 3, with rings of several
# lengths:

# %%
page.show_deadlocks(make_batched, 4, 3, range(4, 9))

# %% [markdown]
# A **deadlock**: both ends wait for each other, for ever. On a GPU such a kernel hangs. The simulator notices that no thread can go on, and says where each one
# waits. (`local[32]` is the head, `local[0]` the tail.)

# %%
print(page.show_deadlock(make_batched, 4, 3, 5))

# %%
draw.stuck(4, 3, 5)

# %% [markdown]
# Try other numbers in the last three cells, such as chunks of 4 and batches of 2, or a ring that is shorter than a chunk.
#
# **Formula.** Return the smallest number of slots that never deadlocks.

# %%
fewest_slots = ...  # yours: lambda chunk, batch: ...
exercises.fewest.check(fewest_slots)

# %% [markdown]
# Lesson 13 meets this bound in DeepEP's combine, where many warps read from one ring, and the slowest of them decides on the credits.
#
# The ends of a ring also wait for each other's **SM**. A CTA that polls stays on its SM. If more CTAs are launched than fit, the others start only when one has ended.
# Here each CTA asks for so much shared memory that an SM holds one, and there are twice as many CTAs as SMs. The switch `pairs` decides who comes first:

# %%
page.show_residency(
    {"sender, receiver, sender, ...": make_ring(send, receive), "all senders first": make_ring(send, receive, False)}
)

# %%
draw.resident()

# %% [markdown]
# CTAs usually start in the order of their index, but CUDA does not promise it. What is safe: launch only as many waiting CTAs as are resident at once.
#
# **Predict.** How many such CTAs, one per SM, may each of two ranks launch, if each has an H200 (132 SMs) of its own, and if both share one?

# %%
exercises.resident.check(own_gpu=..., shared_gpu=...)

# %% [markdown]
# **Take away.** Ask of every wait: which thread ends it, and does that thread run? A ring needs `chunk + batch - 1` slots, or a few less, and both its ends need an SM.
#
# ## Step 9: many channels
#
# One warp copies a few rows per signal and waits for its loads. Many rings side by side, each with its own range of rows, keep many loads in flight.
#
# **Prediction.** The time falls with the number of channels, until the push rate limits.

# %%
step("many channels", Version(batched, channels=CHANNELS), predicted_us=page.by_channels("credits in batches"))

# %% [markdown]
# **Take away.** Latency is hidden by doing something else: more slots hide signals, more warps hide loads.
#
# ## What did not pay, and why
#
# The next cell checks variants of the ring of step 6 as it checks a step, and times them on GPUs. Each switch changes one thing. Which of them would you expect to cost
# nothing?


# %%
@factory
def make_send_variant(head_there, all_lanes, fence):
    @cuda.jit(device=True)
    def send(queue, x, first, count):
        lane = int32(cuda.threadIdx.x & 31)
        for n in range(count):
            number = int32(queue.before + n)
            if lane == 0 or all_lanes:
                if head_there:  # the head is in the receiver's memory: each poll is a round trip
                    while number - ld_acquire_sys_s32(queue.there, queue.head) >= queue.slots:
                        pass
                else:
                    while number - ld_acquire_sys_s32(queue.here, queue.head) >= queue.slots:
                        pass
            cuda.syncwarp()
            at = int32((first + n) * queue.row_words)
            copy_row(queue.there, slot_of(queue, number), x, at, queue.row_words)
            cuda.syncwarp()
            if fence:
                if lane == 0:
                    fence_acq_rel_sys()
                    st_relaxed_sys_s32(queue.there, queue.tail, int32(number + 1))
            elif lane == 0 or all_lanes:  # all lanes store the same number
                st_release_sys_s32(queue.there, queue.tail, int32(number + 1))

    return send


@cuda.jit(device=True)
def receive_with_own_head(queue, out, first, count):
    lane = int32(cuda.threadIdx.x & 31)
    for n in range(count):
        number = int32(queue.before + n)
        if lane == 0:
            while ld_acquire_sys_s32(queue.here, queue.tail) <= number:
                pass
        cuda.syncwarp()
        copy_row(out, int32((first + n) * queue.row_words), queue.here, slot_of(queue, number), queue.row_words)
        cuda.syncwarp()
        if lane == 0:
            st_release_sys_s32(queue.here, queue.head, int32(number + 1))


page.show_variants(
    {
        "as in step 6": make_ring(make_send_variant(False, False, False), receive),
        "fence and relaxed store instead of release": make_ring(make_send_variant(False, False, True), receive),
        "all lanes poll and release": make_ring(make_send_variant(False, True, False), receive),
        "head in the receiver's memory": make_ring(make_send_variant(True, False, False), receive_with_own_head),
    }
)

# %% [markdown]
# DeepEP keeps the head in the receiver's memory; lesson 12 starts there.
#
# ## All steps
#
# The last ring with more and more channels, beside the push alone and the copy engine (`cudaMemcpyPeerAsync`), which needs no SM and no kernel, but also tells no
# kernel when it is done:

# %%
page.show_sweep(batched)

# %%
lesson.save()
lesson.summary()

# %% [markdown]
# Each rank has one neighbour to send to, and NVLink connects all pairs of a node through switches. So with more ranks nothing should change; the records say whether that holds:

# %%
page.show_ranks()

# %% [markdown]
# **You can now** write both ends of a ring between two GPUs, say what each release and acquire orders, and compute how many slots it needs.
#
# ## Next step, not built
#
# In the last ring a warp loads 16 bytes per lane, stores them, and loads the next. The push above has shown what one thread can do with bulk copies.
# **Build** a sender that loads the next row into shared memory by TMA while the last one leaves, and a warp that signals for all senders of a CTA. (A thread that
# has acquired a flag must execute `fence.proxy.async` before a bulk copy touches what the flag guards.) How few SMs come within a tenth of the bound?

# %%
print(page.lower_bound())

# %% [markdown]
# ## Sources
#
# - The article: BoLi2001, [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), 2025, in Chinese, on the buffer, IPC handles and rings of
#   [DeepEP](https://github.com/deepseek-ai/DeepEP). We compare [its claims](../docs/claims.md#deepep) with our measurements.
# - NVIDIA: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/), "Memory Consistency Model" (release and acquire patterns, scopes, proxies); *CUDA C++ Programming Guide*,
#   "Interprocess Communication".
# - J. Little: *A Proof for the Queuing Formula L = λW*, Operations Research 9, 1961.
# - What the simulator's weak memory does, and what it leaves out: `moe_numba/simulator/memory_model/store_buffer.py`.
#
# Before: [10, the dispatch layout](10_dispatch_layout.ipynb). Next: [12, dispatch](12_dispatch.ipynb), which sends each token to the ranks of its experts.
