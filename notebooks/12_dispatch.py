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
# # Dispatch
#
# The experts of a layer are spread over several GPUs, its tokens too. **Dispatch** sends the row of each token (its hidden vector) to every
# rank that has one of the token's experts. [Lesson 10](10_dispatch_layout.ipynb) has counted which token goes where. In
# [lesson 11](11_talk_to_a_peer.ipynb) you have built a ring through which one GPU sends rows to another.
#
# This lesson has one question: **how do thousands of rows cross NVLink at the link's rate, from few SMs?** You start with copies by torch and
# a naive kernel. Then you build a ring for each channel as DeepEP does, and change one thing after the other, each by a switch of one
# kernel, until most of the time is that of the bytes on the link.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, int64, uint32, uint64

from moe_numba.course.deepep_port.polling import make_copy_row
from moe_numba.course.lessons.dispatch import draw, exercises, model, ring_player, ring_trace, symptoms
from moe_numba.course.lessons.dispatch import runs as page
from moe_numba.course.lessons.dispatch.runs import Board, Version, lesson
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.lesson import factory
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.expert_parallel.rings.bulk_pipeline import (
    fence_acquired,
    fence_staging,
    init_barriers,
    load_row,
    wait_all,
    wait_all_but_one,
    wait_row,
)
from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,  # for your answers, as others of these
    ld_acquire_cta_shared_u64,
    ld_acquire_sys_s32,
    poll_acquire_cta_shared_s32,
    poll_acquire_cta_shared_u64,
    st_relaxed_gpu_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_s32,
    st_release_cta_shared_u64,
    st_release_sys_s32,
)
from moe_numba.ptx.cp_async import bulk_commit_group, bulk_store
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import ld_global_s32x4, ld_nc_na_s32x4, pointer_from_address, st_na_s32x4
from moe_numba.ptx.warp import FULL_MASK, redux_sync_add_s32
from moe_numba.ptx.warpgroup import bar_sync

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.here())
print(page.result())

# %% [markdown]
# The number of ranks and all sizes stand in `moe_numba/course/lessons/dispatch/sizes.py`. Where there are fewer GPUs than ranks, ranks are
# **virtual**: they share a GPU, or the simulator runs them.
#
# ## The problem
#
# Two ranks have eight tokens each. The small numbers say to which ranks a token goes:

# %%
EXAMPLE = [
    [[1, 0], [0, 1], [0, 1], [1, 1], [1, 0], [0, 1], [1, 1], [0, 1]],
    [[0, 1], [1, 0], [1, 1], [1, 0], [0, 1], [1, 0], [1, 0], [1, 1]],
]  # is_token_in_rank of rank 0, and of rank 1
CHANNELS = 4
draw.row_order(EXAMPLE, CHANNELS)

# %% [markdown]
# The rows in `recv_x` are ordered by the rank that they come from, then by channel, then by token. A **channel** is a range of consecutive
# tokens of a rank. Channels are sent at the same time, independently of each other. Experts do not matter yet: a token goes to a rank once,
# however many of its experts are there.
#
# With each row travels the token's number on its source rank, which combine needs. DeepEP and our package also send the chosen experts and their
# weights, in the same way; the kernels below leave them out. In torch, for one receiving rank:
#
# ```python
# recv_x = torch.cat([x[source][chosen[source][:, rank]] for source in range(ranks)])
# ```
#
# ## The lower bound
#
# Only rows that leave their rank cross the link. Their bytes, divided by the best **push rate** that lesson 11 has measured, are the lower
# bound of every step below.
#
# **Predict** how many MB leave each rank on average. There are 4096 tokens of 14,336 bytes on each rank, and each token chooses 8 of 256 experts
# with equal chances.

# %%
exercises.wire_bytes.check(two_ranks=..., four_ranks=..., eight_ranks=...)

# %% [markdown]
# ## Step 1: copies by torch
#
# Each rank selects the rows for each peer and copies them to their places in the peer's `recv_x`. Copies between GPUs run on copy engines; no SM
# takes part, except in `index_select`. `places[to]` are this rank's rows in the tensors of rank `to`. The barrier of all ranks afterwards
# says that all rows have arrived: each rank stores a number at each other rank, and waits for theirs.


# %%
def copy_rows(x, tokens_for, places):
    for tokens, (recv_x, recv_src) in zip(tokens_for, places, strict=True):
        recv_x.copy_(x.index_select(0, tokens), non_blocking=True)
        recv_src.copy_(tokens.int(), non_blocking=True)


@cuda.jit(device=True)
def meet(peers, local, rank, ranks, number):
    thread = int32(cuda.threadIdx.x)
    cuda.syncthreads()  # the release covers what all threads of this CTA have stored
    if thread < ranks:
        st_release_sys_s32(pointer_from_address(peers[thread], local), rank, number)
        while ld_acquire_sys_s32(local, thread) < number:
            pass
    cuda.syncthreads()


@cuda.jit
def barrier(peers, local, rank, ranks, number):
    meet(peers, local, rank, ranks, number)


step("torch", Version(copy_rows, barrier=barrier, kind="copies"))

# %% [markdown]
# A step runs on all ranks. It is checked in weak memory, where stores reach other ranks late and in any order that the memory model allows, and
# with the race detector on; outputs and rings are poisoned first. Two calls follow each other, and a kernel reads what the second one has received.
# The host never waits in between, so only flags and barriers keep the ranks apart. Then the simulator counts what the kernels of all ranks do, for
# a few short rows. "Bytes, other ranks" are what this lesson is about: no kernel can do with fewer than the rows. With a GPU for each rank a step
# is timed; the slowest rank counts.
#
# ## Step 2: NCCL
#
# The library for such exchanges is NCCL. A rank sorts the rows by destination and calls `all_to_all_single`:
#
# ```python
# order = is_token_in_rank.T.nonzero()[:, 1]                        # by rank, then by token
# all_to_all_single(recv_x, x.index_select(0, order), receives, sends)
# ```
#
# NCCL needs a process per rank, so we have timed it apart. The host must know the counts `receives` and `sends`; the row that begins with "counts"
# includes their exchange:

# %%
page.show_ranks("NCCL all_to_all_single", "index_select and NCCL", "counts, index_select and NCCL")

# %% [markdown]
# **Take away.** NCCL moves rows that are already sorted. A dispatch with it also pays for sorting them, and for a host that waits for counts.
#
# ## Step 3: a naive kernel
#
# If a rank knows the row that each of its tokens has at each peer, a warp can load a row once and store it to all its destinations. In this
# step the host gathers all counts and computes `place[token, rank]`, or -1. Lane `r` of a warp has the place at rank `r`.
#
# **Prediction.** All SMs store. The time is that of the wire bytes at the rate of many storing SMs.


# %%
@factory
def make_send_row(ranks, row_words):
    vectors = row_words // 4  # of 16 bytes

    @cuda.jit(device=True)
    def send_row(x, token, mask, at, peers, local, lane):  # bit r of mask: to rank r; lane r: where to, in its memory
        words = cuda.local.array(16, int32)
        for base in range(0, vectors, 128):
            first = int32(base + lane)
            for k in range(4):
                if first + 32 * k < vectors:
                    a, b, c, d = ld_nc_na_s32x4(x, int64(token) * row_words + 4 * (first + 32 * k))
                    words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = a, b, c, d
            for r in range(ranks):
                if mask >> uint32(r) & uint32(1):
                    remote, to = pointer_from_address(peers[r], local), cuda.shfl_sync(FULL_MASK, at, r)
                    for k in range(4):
                        if first + 32 * k < vectors:
                            a, b, c, d = words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]
                            st_na_s32x4(remote, to + 4 * (first + 32 * k), a, b, c, d)

    return send_row


@factory
def make_naive(shape):
    ranks, row_words, numbers = shape.ranks, shape.row_words, shape.numbers
    send_row = make_send_row(ranks, row_words)

    @cuda.jit
    def naive(x, place, peers, local, tokens):
        lane = int32(cuda.threadIdx.x & 31)
        for token in range(cuda.grid(1) // 32, tokens, cuda.gridsize(1) // 32):
            row = place[token * ranks + lane] if lane < ranks else int32(-1)
            mask = uint32(cuda.ballot_sync(FULL_MASK, row >= 0))
            send_row(x, token, mask, int64(row) * row_words, peers, local, lane)
            if row >= 0:
                pointer_from_address(peers[lane], local)[numbers + row] = int32(token)

    return naive


naive = Version(make_naive, barrier=barrier, kind="naive")
step("naive, all SMs", naive, predicted_us=model.all_sms_us())

# %% [markdown]
# **Take away.** A row that is stored directly to its place costs hardly more than its bytes. But this kernel takes all SMs, while a server wants
# them for its GEMMs, and it needs counts from all ranks. The rest of the lesson gives the kernel half of 24 SMs to send, and no host.
#
# ## From counts to positions
#
# A receiver needs three numbers before it can place a row:
#
# 1. how many rows come in all, with which `recv_x` is allocated;
# 2. how many rows come from lower ranks;
# 3. how many rows of the same rank are in lower channels.
#
# For the example:

# %%
page.show_prefixes(EXAMPLE, CHANNELS)

# %% [markdown]
# Each rank knows only its own counts, so they must be exchanged first: that is the kernel **notify**. It fills two matrices. Entry `(s, r)` of
# `rank_prefix` counts the rows from ranks 0 to `s` to rank `r`. `channel_prefix` exists twice: in `sent`, entry `(r, c)` counts the rows of *my*
# channels 0 to `c` to rank `r`; in `received`, entry `(s, c)` counts those of the channels 0 to `c` of rank `s` to *me*.
#
# ## Step 4: notify
#
# A CTA for each peer counts the tokens that go there, a warp per channel, and stores the counts in the peer's memory. Then it raises a flag. The
# last CTA waits for the flags of all ranks and computes the prefix sums. Call `n` stores to half `n % 2` of the memory: a rank that is in call
# `n + 1` has seen all flags of call `n`, so no rank still reads the counts of call `n - 1`.


# %%
@cuda.jit(device=True)
def range_of(channel, channels, tokens):
    share = int32(int32(tokens + channels - 1) // channels)
    first = min(int32(share * channel), tokens)
    return first, min(int32(first + share), tokens)  # the first token, and the one behind the last


@cuda.jit
def notify(chosen, tokens_per_rank, tokens, channels, peers, local, rank, ranks, number, rank_prefix, sent, received):
    counts, thread, peer = cuda.shared.array(0, int32), int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    width = int32(ranks + channels)  # a rank sends its rows for each rank, then those of its channels for this one
    half = int32(ranks + (number & 1) * ranks * width)  # flags come first
    if peer < ranks:
        remote, own = pointer_from_address(peers[peer], local), int32(half + rank * width)
        for channel in range(thread >> 5, channels, cuda.blockDim.x >> 5):
            first, end = range_of(int32(channel), channels, tokens)
            count = int32(0)
            for token in range(first + (thread & 31), end, 32):
                count = int32(count + int32(chosen[token * ranks + peer] != 0))
            count = redux_sync_add_s32(FULL_MASK, count)
            if thread & 31 == 0:
                counts[channel] = count
        cuda.syncthreads()
        if thread == 0:
            total = int32(0)
            for channel in range(channels):
                total = int32(total + counts[channel])
                remote[own + ranks + channel] = sent[peer * channels + channel] = total
            for to in range(ranks):
                remote[own + to] = tokens_per_rank[to]
            st_release_sys_s32(remote, rank, number)
    else:
        if thread < ranks:
            while ld_acquire_sys_s32(local, thread) < number:
                pass
        cuda.syncthreads()
        if thread < ranks:
            total = int32(0)
            for source in range(ranks):
                total = int32(total + local[half + source * width + thread])
                rank_prefix[source * ranks + thread] = total
        for i in range(thread, ranks * channels, cuda.blockDim.x):
            source = int32(int32(i) // channels)
            received[i] = local[half + source * width + ranks + int32(i - source * channels)]


page.show_notify(notify)

# %% [markdown]
# All steps of this lesson are timed with known counts. That is the case in the backward pass, for example, which uses the counts of the forward
# pass; DeepEP keeps them in a **handle**. A first dispatch pays for notify as well, and its host
# waits for the number of rows, unless it allocates for the worst case.
#
# DeepEP's notify has three barriers of all ranks where this one has a flag, and its dispatch kernel sends the counts of channels itself, as
# two numbers in front of the rows of each ring.
#
# **Build** the function that dispatch calls. It returns the first row of a channel in `recv_x`, and how many rows the channel has, for the tokens
# that rank `source` sends to rank `to`. Both matrices are flat arrays. `line` is the line of `channel_prefix` that counts these rows: a receiver
# passes `source`, a sender passes `to`.


# %%
@cuda.jit(device=True)
def my_rows_of(rank_prefix, channel_prefix, source, to, line, channel, ranks, channels):
    pass  # yours: return the first row, and the number of rows


rows_of = exercises.rows_of.use(my_rows_of)

# %% [markdown]
# **Take away.** Two prefix sums replace a coordinator: once every rank has all counts, each computes every position alone.
#
# ## Rings
#
# The naive kernel stores into `recv_x` of a peer. That needs a `recv_x` that all ranks can access, and which nobody reads any more. DeepEP
# stores into **rings** instead, in a buffer that is allocated once: one ring for each channel and pair of ranks. You know the protocol from lesson 11. The sender
# stores rows into free slots and then the **tail**, with release. The receiver copies the rows between its **head** and the tail to `recv_x`, and
# then stores the head, with release. This is a run of our port of DeepEP's kernel, for the first six tokens of the example, with two channels and
# rings of two slots:

# %%
PLAYED = in_simulator(ring_trace.play, [rows[:6] for rows in EXAMPLE], 2, 1, 2, 1, 3)
ring_player.rings(PLAYED)

# %% [markdown]
# Orange rows are written, but not published; blue ones may be read. Follow one slot: written, published, read.

# %%
PLAYER = ring_player.rings(PLAYED)
PLAYER.strip(ring_player.stills(PLAYER))

# %% [markdown]
# **Build** the sender's wait. Lane `r` of a warp handles the ring to rank `r`, if `has_ring`. It has sent `tail` rows, and the head of its ring
# stands at `heads[at]`, which another rank stores with release. Wait until no ring of the warp has more than `most` rows that are not read.
# Then return in all lanes: all of them will write to slots. Both counters are uint32 and may wrap. You have `ld_acquire_sys_s32(heads, at)`,
# `cuda.any_sync(FULL_MASK, condition)` and `cuda.syncwarp()`.


# %%
@cuda.jit(device=True)
def my_wait_for_space(heads, at, tail, most, has_ring):
    pass  # yours


wait_for_space = exercises.wait_for_space.use(my_wait_for_space)

# %% [markdown]
# ## Step 5: our port of DeepEP's ring
#
# In DeepEP's kernel a CTA is a channel. Half of the CTAs send and half receive. The 24 warps of a CTA are divided into **teams**, one for each
# rank:

# %%
draw.roles()

# %% [markdown]
# All warps of a team visit all tokens of the channel and take turns with those that go to the team's rank. After a chunk of rows they meet at a
# named barrier, and one thread stores the tail. At the receiver one thread polls the tail and tells its team how many rows have arrived.
#
# The next cell has **the whole kernel**, and all its switches. Read it with all of them `False`: skip each `if` of a switch. Then `has_ring` is
# true in one lane of a warp, that of the team's rank. The steps below turn the switches on, one after the other, and come back to their lines. A switch
# needs those before it: a signalling warp without TMA, say, would be another kernel. Numba removes code behind a switch that is off.
#
# The four functions in front of the kernel belong to TMA and to the signalling warp; skip them for now.


# %%
@factory
def make_packing(row_words, scale_words):
    @cuda.jit(device=True)
    def pack(smem, bars, bar, lane, stage, x, scales, token):  # a row, its scales, and the token's number
        load_row(smem, bars, bar, lane, stage, x, int64(token) * row_words, 4 * row_words)  # one lane, one bulk load
        for i in range(lane, scale_words, 32):
            smem[stage + row_words + i] = scales[token * scale_words + i]
        if lane == 0:
            smem[stage + row_words + scale_words] = token
        fence_staging()

    @cuda.jit(device=True)
    def unpack(smem, lane, issuer, stage, row, recv_x, recv_scales, recv_src):
        if lane == issuer:
            bulk_store(recv_x, int64(row) * row_words, smem, stage, 4 * row_words)
            bulk_commit_group()
        for i in range(lane, scale_words, 32):
            recv_scales[row * scale_words + i] = smem[stage + row_words + i]
        if lane == 0:
            recv_src[row] = smem[stage + row_words + scale_words]
        cuda.syncwarp()  # all lanes have read what the next row overwrites

    return pack, unpack


@cuda.jit(device=True)
def post(board, item, channel, count):
    both = uint64(uint64(channel + 1) << uint64(32) | uint64(count))  # one store: they always belong together
    st_release_cta_shared_u64(board.posts, board.posted + item, both)


@cuda.jit(device=True)
def wait_until_published(board, item):
    while poll_acquire_cta_shared_u64(board.posts, board.published + item) != board.posts[board.posted + item]:
        pass


@factory
def make_dispatch(shape, signal, take, head_at_sender, warp_per_token, tma, own_rows, helping):
    ranks, warps, channels, slots, chunk = shape.ranks, shape.warps, shape.channels, shape.slots, shape.chunk
    row_words, slot_words, slot_bytes = shape.row_words, shape.slot_words, 4 * shape.slot_words
    TAIL, HEAD, NUMBERS, RINGS = shape.tail, shape.head, shape.numbers, shape.rings
    SENT, RECEIVED, TAKEN = shape.sent, shape.received, shape.taken
    stage_words, bar_at, posted, done, share = shape.stage_words, shape.bars, shape.posted, shape.done, shape.share
    send_row, copy_row = make_send_row(ranks, row_words), make_copy_row(4 * row_words, ld_global_s32x4)
    pack, unpack = make_packing(row_words, shape.scale_words)
    signaller, balanced = signal is not None, take is not None
    team = 1 if warp_per_token else warps // ranks  # warps that share a ring

    @cuda.jit(device=True)
    def meet_team(warp):
        if team > 1:
            bar_sync(1 + warp // team, 32 * team)
        else:
            cuda.syncwarp()

    @cuda.jit
    def dispatch(
        x, scales, chosen, tokens, rank_prefix, sent, received, recv_x, recv_scales, recv_src, peers, local, state, rank
    ):
        smem, bars = cuda.shared.array(0, int32, 128), cuda.shared.array(0, uint64, 128)  # the same memory
        thread, block, phase = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), uint32(0)
        warp, lane = int32(thread >> 5), int32(thread & 31)

        # ---- Who does what: lane r of a warp has the ring to rank r, or the one from rank r ----
        senders = int32(cuda.gridDim.x >> 1)
        sends = block < senders
        number = block if sends else int32(block - senders)
        peer = lane if lane < ranks else int32(0)
        if warp_per_token:
            channel, member, has_ring = int32(warp * senders + number), int32(0), lane < ranks
        else:
            channel, member, has_ring = number, int32(warp % team), lane == warp // team
        if own_rows:
            has_ring = has_ring and lane != rank
        remote = pointer_from_address(peers[peer], local)
        stage, bar, item = int32(warp * stage_words), int32(bar_at + warp), int32(warp * ranks + lane)
        board = Board(bars, smem, posted, posted + warps * ranks, done, warps, warps * ranks, ranks)
        if tma:
            init_barriers(bars, bar_at, warps)
        if signaller:
            for i in range(thread, 2 * warps * ranks, 32 * (warps + 1)):
                bars[int32(posted + i)] = uint64(0)
            if thread < warps:
                smem[int32(done + thread)] = int32(0)
        cuda.syncthreads()

        if signaller and warp == warps:
            signal(board, lane, int32(TAIL if sends else HEAD), rank, peers, local)
        elif sends:
            while channel < channels:
                token, end = range_of(channel, channels, tokens)
                at_peer, here = int32(channel * ranks + rank), int32(channel * ranks + peer)
                tail = uint32(state[SENT + here]) if has_ring else uint32(0)  # of all launches, as the head
                own_row, _ = rows_of(rank_prefix, sent, rank, rank, rank, channel, ranks, channels)
                own = int32(0)
                while token < end:
                    # ---- Wait until a chunk fits into each ring ----
                    if head_at_sender:
                        wait_for_space(local, HEAD + here, tail, uint32(slots - chunk), has_ring)
                    else:
                        wait_for_space(remote, HEAD + at_peer, tail, uint32(slots - chunk), has_ring)
                    if tma:
                        fence_acquired()

                    # ---- Send rows until a ring has got a chunk ----
                    begin, more = tail, True
                    while token < end and more:
                        selected = has_ring and chosen[int64(token) * ranks + peer] != 0
                        slot = int64(at_peer) * slots + int64(tail % uint32(slots))
                        if tma:
                            pack(smem, bars, bar, lane, stage, x, scales, token)
                            phase = wait_row(bars, bar, phase)
                            if selected:
                                bulk_store(remote, RINGS + slot * slot_words, smem, stage, slot_bytes)
                                bulk_commit_group()
                            if own_rows and chosen[int64(token) * ranks + rank] != 0:
                                if not helping or own % 2 == 0:
                                    unpack(smem, lane, rank, stage, int32(own_row + own), recv_x, recv_scales, recv_src)
                                own = int32(own + 1)
                        else:
                            is_mine = selected and int32(tail % uint32(team)) == member  # the team takes turns
                            mask = uint32(cuda.ballot_sync(FULL_MASK, is_mine))
                            if mask != uint32(0):
                                send_row(x, token, mask, RINGS + slot * slot_words, peers, local, lane)
                                if mask >> uint32(lane) & uint32(1):
                                    remote[NUMBERS + slot] = token
                        if selected:
                            if signaller:
                                wait_all_but_one()  # the rows before this one have arrived
                                post(board, item, channel, tail)
                            tail = uint32(tail + uint32(1))
                        token = int32(token + 1)
                        more = cuda.all_sync(FULL_MASK, not has_ring or uint32(tail - begin) < uint32(chunk)) != 0

                    # ---- Publish the tail: all rows of the chunk have arrived ----
                    if tma:
                        wait_all()
                    meet_team(warp)
                    if has_ring and member == 0:
                        state[SENT + here] = int32(tail)
                        if signaller:
                            post(board, item, channel, tail)
                        else:
                            st_release_sys_s32(remote, TAIL + at_peer, int32(tail))
                if signaller and has_ring:
                    wait_until_published(board, item)
                cuda.syncwarp()
                channel = int32(channels)  # no other one
                if balanced:
                    channel = int32(senders * warps + take(state, int32(TAKEN), channels, lane))
        else:
            while channel < channels:
                here = int32(channel * ranks + peer)
                head = uint32(state[RECEIVED + here]) if has_ring else uint32(0)
                row, left = rows_of(rank_prefix, received, peer, rank, peer, channel, ranks, channels)
                left = left if has_ring else int32(0)
                token, end = range_of(channel, channels, tokens) if helping else (int32(0), int32(0))
                own_row, _ = rows_of(rank_prefix, sent, rank, rank, rank, channel, ranks, channels)
                own = int32(0)
                while cuda.any_sync(FULL_MASK, left > 0) or token < end:
                    # ---- See how many rows have arrived ----
                    arrived = int32(0)
                    if left > 0 and member == 0:
                        arrived = int32(uint32(ld_acquire_sys_s32(local, TAIL + here)) - head)
                        while team > 1 and arrived == 0:
                            arrived = int32(uint32(ld_acquire_sys_s32(local, TAIL + here)) - head)
                    if team > 1:  # one warp has polled for its team
                        if left > 0 and member == 0:
                            smem[int32(share + peer)] = arrived
                        meet_team(warp)
                        if left > 0:
                            arrived = smem[int32(share + peer)]
                    else:
                        cuda.syncwarp()  # what a lane has acquired, the others will read
                    mask = uint32(cuda.ballot_sync(FULL_MASK, arrived > 0))

                    # ---- Copy them to their places ----
                    if tma and mask != uint32(0):
                        fence_acquired()
                    for s in range(ranks):
                        if mask >> uint32(s) & uint32(1):
                            count, to = cuda.shfl_sync(FULL_MASK, arrived, s), cuda.shfl_sync(FULL_MASK, row, s)
                            first = uint32(cuda.shfl_sync(FULL_MASK, int32(head), s))
                            for i in range(member, count, team):
                                turn = uint32(first + uint32(i)) % uint32(slots)
                                slot = int64(channel * ranks + s) * slots + int64(turn)
                                if tma:
                                    load_row(smem, bars, bar, lane, stage, local, RINGS + slot * slot_words, slot_bytes)
                                    phase = wait_row(bars, bar, phase)
                                    unpack(smem, lane, 0, stage, int32(to + i), recv_x, recv_scales, recv_src)
                                else:
                                    copy_row(recv_x, int64(to + i) * row_words, local, RINGS + slot * slot_words, lane)
                                    if lane == 0:
                                        recv_src[to + i] = local[NUMBERS + slot]
                    if helping and mask == uint32(0) and token < end:  # nothing has arrived: copy every second own row
                        if chosen[int64(token) * ranks + rank] != 0:
                            if own % 2 == 1:
                                pack(smem, bars, bar, lane, stage, x, scales, token)
                                phase = wait_row(bars, bar, phase)
                                unpack(smem, lane, 0, stage, int32(own_row + own), recv_x, recv_scales, recv_src)
                            own = int32(own + 1)
                        token = int32(token + 1)

                    # ---- Publish the head: all of them have been read ----
                    meet_team(warp)
                    head, row, left = uint32(head + uint32(arrived)), int32(row + arrived), int32(left - arrived)
                    if arrived > 0 and member == 0:
                        state[RECEIVED + here] = int32(head)
                        if signaller:
                            post(board, item, channel, head)
                        elif head_at_sender:
                            st_release_sys_s32(remote, HEAD + channel * ranks + rank, int32(head))
                        else:
                            st_release_sys_s32(local, HEAD + here, int32(head))
                if signaller and has_ring:
                    wait_until_published(board, item)
                cuda.syncwarp()
                channel = int32(channels)
                if balanced:
                    channel = int32(senders * warps + take(state, int32(TAKEN + 1), channels, lane))

        if tma:
            wait_all()  # also rows that go to recv_x
        if signaller:
            cuda.syncwarp()
            if lane == 0 and warp < warps:
                st_release_cta_shared_s32(smem, done + warp, 1)

    return dispatch


# %% [markdown]
# One kernel runs before it in this step, as in DeepEP: `clear` sets all counters to zero, between two barriers of all ranks. Without the first
# barrier it might clear a counter that a peer still polls; without the second one a peer might send before its tail is cleared.


# %%
@cuda.jit
def clear(peers, local, rank, ranks, number, flags, words, state):
    meet(peers, local, rank, ranks, int32(number - 1))
    for i in range(cuda.threadIdx.x, words, cuda.blockDim.x):
        flags[i] = state[i] = int32(0)
    meet(peers, local, rank, ranks, number)


TEAMS = dict(clear=clear)
step("our port of DeepEP's ring", Version(make_dispatch, **TEAMS), predicted_us=model.team_us())

# %% [markdown]
# The prediction lets half of the 24 SMs send all rows, own ones too, each at the rate of one storing CTA of lesson 11. Our whole port of DeepEP's kernels
# also sends experts and weights, and has timeouts:

# %%
page.show_port(Version(make_dispatch, **TEAMS))

# %% [markdown]
# **Take away.** A ring needs little memory, and its address is known before the first count. In return each row is written twice, half of the
# SMs only receive, and sender and receiver wait for each other. The next steps attack these three costs.
#
# ## Diagnose: which order is missing?
#
# Here are rows of a run of our port from which somebody has removed one order. Nobody else has touched it. Rings have two slots.

# %%
print("\n".join(in_simulator(symptoms.shown)))

# %% [markdown]
# What is missing? "A": the sender stores the tail with a plain store. "B": the receiver stores the head before it has copied the rows. "C": the
# receiver polls the tail with relaxed loads. "D": the warps of a team do not wait for each other before one of them stores the tail.

# %%
exercises.symptom.check(...)

# %% [markdown]
# ## Step 6: the head at the sender
#
# The sender looks at the head before each chunk, and the head is in the receiver's memory, where DeepEP has it. Each look is a round trip over NVLink during
# which the whole team waits. So let the receiver store the head in the sender's memory. A store does not wait, and both sides poll
# memory of their own, as in the ping-pong of lesson 11. These are the lines of `head_at_sender`:
#
# ```python
# wait_for_space(local, HEAD + here, tail, uint32(slots - chunk), has_ring)
# st_release_sys_s32(remote, HEAD + channel * ranks + rank, int32(head))
# ```
#
# **Prediction.** Per chunk we save a round trip: twice the time of a flag.

# %%
HEADS = TEAMS | dict(head_at_sender=True)
predicted_us = model.head_us(lesson.steps["our port of DeepEP's ring"].us)
step("head at the sender", Version(make_dispatch, **HEADS), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** Poll local memory, store to remote memory. Never load over the link what the other side can store.
#
# ## Step 7: one warp per token
#
# A token that goes to three ranks is loaded by three teams. And all warps of a team wait for the slowest one after each chunk. Instead let one
# warp take a token and store it to all its destinations, as the naive kernel does. Then a warp is a channel, and lane `r` has the ring to rank `r`:
#
# ```python
# channel, member, has_ring = int32(warp * senders + number), int32(0), lane < ranks
# ```
#
# There are no teams any more, so a warp meets nobody: `cuda.syncwarp()` replaces the named barrier. There are 15 times as many channels, one for
# each copy warp, with rings of fewer slots: all rings together keep their size. A CTA has 15 copy warps because later each of them needs room for a
# row in shared memory.
#
# **Prediction.** If a load costs as much as a store, the time falls as loads plus stores per row do.

# %%
WARPS = HEADS | dict(warp_per_token=True)
predicted_us = model.one_load_us(lesson.steps["head at the sender"].us)
step("one warp per token", Version(make_dispatch, **WARPS), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** Give the unit of work to the smallest group that can do it alone. What is not shared needs no barrier.
#
# ## Step 8: TMA, and packed slots
#
# A warp copies a row with 28 loads and stores of each lane. TMA copies a whole row with one instruction: a bulk load to shared memory (`pack`), and a
# bulk store from there for each destination. While one warp waits for its row, the others' rows are under way. The token's number, and scales if
# there are some, are written behind the row in shared memory, so that one bulk store sends all of it:

# %%
draw.slots()

# %% [markdown]
# ```python
# pack(smem, bars, bar, lane, stage, x, scales, token)
# phase = wait_row(bars, bar, phase)
# bulk_store(remote, RINGS + slot * slot_words, smem, stage, slot_bytes)
# ```
#
# TMA reads and writes through the async proxy. So after an acquire, `fence_acquired` orders the bulk copies behind it. And before the tail is stored,
# `wait_all` waits until this lane's bulk stores have arrived. These two ideas cannot be separated well: a bulk copy of the row and a store of the
# number would need both kinds of order.
#
# **Prediction.** The senders copy all rows at the rate of bulk copies.

# %%
TMA = WARPS | dict(tma=True)
step("TMA, packed slots", Version(make_dispatch, **TMA), predicted_us=model.bulk_us())

# %%
say("{comparison}", comparison=model.compare_ways())

# %% [markdown]
# **Take away.** Let the copy engine move rows and keep lanes for decisions. What is packed needs one copy and one order.
#
# ## Step 9: a signalling warp
#
# Lesson 11 has measured that a release takes several times as long while other warps of the SM write to a peer: it waits for *their* stores, too. Each of
# the 15 warps stops for that after each chunk. Let an additional warp do it. A copy warp *posts* its progress in shared memory, and does not wait. The last
# warp of the CTA collects what is new, issues **one** fence for all, and stores the flags:
#
# ```python
# post(board, item, channel, tail)
# signal(board, lane, int32(TAIL if sends else HEAD), rank, peers, local)
# ```
#
# Since posting is cheap, a warp posts after each row: `wait_all_but_one` waits until all rows but the last one have arrived.
#
# **Build** the signalling warp. Its lanes look after `board.items` posts; item `warp * ranks + r` belongs to the ring of a warp to rank `r`. The post of
# an item is `board.posts[board.posted + item]`, a 64-bit number: the channel plus 1 in the upper half, the number of rows in the lower one; 0 is no post.
# What has been published of it is `board.posts[board.published + item]`. For each post that differs from that: fence at system scope, store the number
# of rows at rank `r`, at index `flags_at + channel * ranks + rank`, and store the post as published, for which the copy warp waits before it takes
# another channel. Return when the flags of all warps, `board.words[board.done + warp]`, are set and everything is published. You have
# `ld_acquire_cta_shared_u64(board.posts, index)` (and `poll_...` for loops that wait), `st_release_cta_shared_u64(board.posts, index, value)`,
# `poll_acquire_cta_shared_s32(board.words, board.done + warp)`, `fence_acq_rel_sys()`, `st_relaxed_sys_s32(pointer, index, value)` and
# `pointer_from_address(peers[r], local)`.


# %%
@cuda.jit(device=True)
def my_signal(board, lane, flags_at, rank, peers, local):
    pass  # yours


signal = exercises.signal.use(my_signal)

# %% [markdown]
# **Prediction.** Each copy warp saves a release per chunk, of the time that lesson 11 has measured on a busy SM.

# %%
SIGNALS = TMA | dict(signal=signal)
predicted_us = model.no_release_us(lesson.steps["TMA, packed slots"].us)
step("a signalling warp", Version(make_dispatch, **SIGNALS), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** A fence covers what its thread has *observed*, not only what it has stored. So one warp can pay for all.
#
# ## Step 10: own rows without a ring
#
# Rows that stay on their rank pass through a ring of their own rank so far. A sender has such a row in shared memory; it knows its place, too. So it stores
# the row directly to `recv_x`. The lines of `own_rows`:
#
# ```python
# has_ring = has_ring and lane != rank
# unpack(smem, lane, rank, stage, int32(own_row + own), recv_x, recv_scales, recv_src)
# ```
#
# **Prediction.** If the senders are the limit, the time stays: they still copy as many bytes. Only the receivers have less to do.

# %%
OWN = SIGNALS | dict(own_rows=True)
predicted_us = lesson.steps["a signalling warp"].us
step("own rows without a ring", Version(make_dispatch, **OWN), predicted_us=predicted_us)

# %% [markdown]
# ## Step 11: receivers help
#
# Now the receivers have time. While no row has arrived, a receiving warp copies every second own row of its channel; the sender takes the others. With
# two ranks half of all rows are own ones, with eight ranks an eighth, so this step matters less there.
#
# **Prediction.** The senders copy the rows that leave, and half of the own rows.

# %%
HELP = OWN | dict(helping=True)
step("receivers help", Version(make_dispatch, **HELP), predicted_us=model.helping_us())

# %% [markdown]
# **Take away.** Balance the roles, then the workers: step 10 frees time of the receivers, and step 11 uses it.
#
# ## Step 12: balancing
#
# All SMs send with equal shares, but the link does not serve them equally. Some warps finish early and then do nothing. So make four channels for each
# warp, and let a warp that has finished a channel take the next one from a counter.
#
# Could ranks deadlock, if a warp waits for rows of a channel that nobody sends yet? Warps take channels in ascending order. Consider the lowest channel that is
# not finished on some rank: everywhere a warp has taken it, or has finished it, and that warp waits for no other channel. So it goes on.
#
# **Build** the counter. `taken[role]` is 0 before the first launch. All lanes of a warp call `take` together; it returns the same number in all of them, 0 for the first
# warp that calls, then 1, and so on. A warp ends when it gets a number that is too large, so exactly `channels` numbers are taken in a launch, whatever the
# order. In the next launch numbers begin at 0 again, and no other kernel may run in between. Par: one atomic per call. You have
# `atom_add_relaxed_gpu_s32(taken, index, 1)`, which returns the number before, and `st_relaxed_gpu_s32(taken, index, value)`.


# %%
@cuda.jit(device=True)
def my_take(taken, role, channels, lane):
    pass  # yours


take = exercises.take.use(my_take)

# %% [markdown]
# All rings together keep their size, so rings and chunks get shorter:

# %%
BALANCED = HELP | dict(take=take)
print(page.describe_rings(Version(make_dispatch, **HELP), Version(make_dispatch, **BALANCED)))

# %% [markdown]
# Where a chunk is one row, a warp waits after each row until it has arrived (`wait_all`). Meanwhile the other warps of its SM copy.
#
# **Prediction.** With perfect balance only the limit of step 11 remains. We do not know how far the SMs drift apart; the difference tells.

# %%
step("balanced channels", Version(make_dispatch, **BALANCED), predicted_us=model.helping_us())

# %% [markdown]
# The simulator's channels have few tokens, so the bytes that a channel reads before its first row, counters and prefix sums, weigh much in this table.
#
# **Take away.** Equal shares are not equal times. A counter costs an atomic per channel.
#
# ## Step 13: counters that continue
#
# The kernel still waits for `clear`, which has two barriers of all ranks. But nothing needs zeros: tail and head count the rows of *all* launches, and
# row `n` is in slot `n % slots`, whatever launch it belongs to. The kernel has kept both counts in `state` all along. So we leave `clear` out. No switch changes,
# and no line of the kernel.
#
# **Prediction.** Two flags and a launch are saved.

# %%
RINGS = BALANCED | dict(clear=None)
predicted_us = model.no_barriers_us(lesson.steps["balanced channels"].us)
step("counters that continue", Version(make_dispatch, **RINGS), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** Count on instead of clearing: a sequence number needs no barrier in front of it.
#
# ## Step 14: direct writes
#
# With rings each row that leaves its rank is copied twice. The naive kernel copied it once, but needed the host for the places. After notify, however,
# each *GPU* has all counts: a warp that takes the tokens of a channel in order knows the next row at each rank. So nobody needs to receive, and all SMs
# send. In return, `recv_x` must be memory that all ranks can access, with a barrier before (nobody still reads the old rows) and after (all rows have
# arrived). Nothing of the rings is left, so this is no switch but a kernel of its own:


# %%
@factory
def make_direct(shape, take):
    ranks, channels, warps, row_words, numbers = (
        shape.ranks,
        shape.channels,
        shape.warps,
        shape.row_words,
        shape.numbers,
    )
    stage_words, bar_at, TAKEN = shape.stage_words, shape.bars, shape.taken
    pack, _ = make_packing(row_words, 0)

    @cuda.jit
    def direct(x, scales, chosen, tokens, rank_prefix, sent, peers, local, state, rank):
        smem, bars = cuda.shared.array(0, int32, 128), cuda.shared.array(0, uint64, 128)
        lane, warp, phase = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5), uint32(0)
        blocks, channel = int32(cuda.gridDim.x), int32(warp * cuda.gridDim.x + cuda.blockIdx.x)
        peer, stage, bar = lane if lane < ranks else int32(0), int32(warp * stage_words), int32(bar_at + warp)
        remote = pointer_from_address(peers[peer], local)
        init_barriers(bars, bar_at, warps)
        cuda.syncthreads()
        while channel < channels:
            token, end = range_of(channel, channels, tokens)
            row, _ = rows_of(rank_prefix, sent, rank, peer, peer, channel, ranks, channels)  # lane r: at rank r
            while token < end:
                pack(smem, bars, bar, lane, stage, x, scales, token)
                phase = wait_row(bars, bar, phase)
                if lane < ranks and chosen[int64(token) * ranks + peer] != 0:
                    bulk_store(remote, int64(row) * row_words, smem, stage, 4 * row_words)
                    bulk_commit_group()
                    remote[numbers + row] = token
                    row = int32(row + 1)
                token = int32(token + 1)
            channel = int32(blocks * warps + take(state, int32(TAKEN), channels, lane))
        wait_all()

    return direct


# %% [markdown]
# **Prediction.** 16 SMs copy each row once, with two barriers.

# %%
direct = Version(make_direct, take=take, barrier=barrier, kind="direct")
step("direct writes", direct, predicted_us=model.direct_us())

# %% [markdown]
# **Take away.** A ring is the price of not knowing where a row goes, or whether its place is free. Who knows both writes directly.
#
# ## Step 15: FP8 rows
#
# If the experts compute in FP8, tokens can be cast before they are sent: one byte per element, and a float32 scale for each 128 of them. The slot
# has room for the scales between row and number; nothing else changes. We use the rings of step 13.
#
# **Prediction.** The time is proportional to the bytes of a row.

# %%
predicted_us = model.fp8_us(lesson.steps["counters that continue"].us)
step("FP8 rows", Version(make_dispatch, **RINGS, fp8=True), after="counters that continue", predicted_us=predicted_us)

# %% [markdown]
# **Choose.** Scales that are powers of two may travel as exponents, four in an int32. BoLi2001's article (see the sources) unpacks them with
# `x_scales.view(torch.int8).to(torch.int) << 23` and reads the result as float32. Which scales come out wrong? "A": those that are not powers of two.
# "B": scales of 2 or more. "C": scales below 1. "D": none.

# %%
exercises.exponent.check(...)

# %% [markdown]
# ## The package's kernels
#
# `Buffer.dispatch` of the package runs two kernels like these: rings, and direct writes if it gets an output in memory of all ranks. Its rings
# differ from step 13 in little things. They also send experts and weights; each wait has a timeout, after which outputs are poisoned and the host raises
# an error; a launch always begins with slot 0; and waits for space look at the head for each row, only when the last known head leaves none.

# %%
page.show_package(Version(make_dispatch, **RINGS), direct)

# %% [markdown]
# ## What did not pay, and why

# %%
page.show_what_did_not_pay()

# %% [markdown]
# ## Fewer SMs, more ranks, other tokens
#
# With fewer SMs direct writes win, since all of them send:

# %%
page.show_sweep(Version(make_dispatch, **RINGS), direct)

# %% [markdown]
# With more ranks most rows leave, and the link is the limit. These times were measured with a process per rank, and differ a little from those above.
# Compiled DeepEP has a row here as soon as it has been measured with as many tokens; until then all that this page says about DeepEP's design is said
# about our port.

# %%
page.show_ranks()

# %% [markdown]
# Tokens prefer some experts. If expert `e` is wanted `1 / (e + 1)` as often (Zipf), the rank of the first experts receives more, and its link
# decides. With two ranks nearly every token goes to both anyway:

# %%
page.show_skew({"the rings of step 13": Version(make_dispatch, **RINGS), "direct writes": direct})

# %% [markdown]
# ## All steps

# %%
lesson.save()
lesson.summary()

# %%
page.show_earlier()

# %% [markdown]
# **You can now** place every row from exchanged counts, keep a link busy from few SMs, and say which of a ring's costs direct writes avoid.
#
# ## Next step, not built
#
# A sender stores a row once for each rank that it goes to. NVLink switches can multiply: one store to a **multicast** address reaches all GPUs. **Build** a
# dispatch in which rows that go to most ranks are multicast to slots that all ranks have. Which receivers must then skip a slot, and which rank tells
# them? The table says what it can save: bytes that leave a rank, and with them stores of SMs, but no bytes that arrive. So it cannot beat the lower bound
# above. It may reach it with fewer SMs.

# %%
page.show_multicast()

# %% [markdown]
# ## Sources
#
# - BoLi2001, [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), 2025, in Chinese. We compare
#   [its claims](../docs/claims.md#deepep) with our measurements.
# - DeepSeek-AI: [DeepEP](https://github.com/deepseek-ai/DeepEP), `csrc/kernels/intranode.cu` of its first version. Our port is in
#   `moe_numba/course/deepep_port`. [TileScale](https://github.com/tile-ai/tilescale) has a port with direct writes.
# - NVIDIA: *PTX ISA*, "Memory Consistency Model" and "Proxies".
# - The package's kernels: `moe_numba/expert_parallel/rings/dispatch.py` and `dispatch_direct.py`, each with its protocol in front.
#
# Before: [11, talk to a peer](11_talk_to_a_peer.ipynb). Next: [13, combine](13_combine.ipynb), the way back.
