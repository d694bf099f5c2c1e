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
# # Combine
#
# [Dispatch](12_dispatch.ipynb) sent each token to the ranks (GPUs) that hold its experts. A token that went to three ranks has three result rows now, one
# on each. **Combine** returns these rows to the rank that has the token, its **home rank**, and sums them there.
#
# Dispatch only copies. Combine must also wait: a sum is complete when *all* rows of its token have come. So this lesson has one question: **how do you
# sum rows while they arrive, and still keep the link busy?** You write the sum, the loads that keep memory busy, and the wait. Then you turn seven
# switches of one kernel, one at a time. At the end two kernels deadlock, and you repair both.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, int64, uint32, uint64  # for your answers

from moe_numba.course.lessons.combine import deadlocks, draw, exercises
from moe_numba.course.lessons.combine import runs as page
from moe_numba.course.lessons.combine.deadlocks import HEAD, RING, SLOTS, TAIL, THREE
from moe_numba.course.lessons.combine.runs import RANKS, VECTORS, Call, Rows, Switches, Version, give_up, lesson
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.lesson import factory
from moe_numba.expert_parallel.rings.bulk_pipeline import (
    init_barriers,
    load_row,
    store_row,
    wait_all,
    wait_all_but_one,
    wait_read,
    wait_row,
)
from moe_numba.expert_parallel.rings.progress import clear_progress, post_progress, wait_published
from moe_numba.ptx.arithmetic import add_rn_bf16x2, uint_as_float  # for your answers
from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_acquire_sys_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32  # for your answers
from moe_numba.ptx.fence import fence_proxy_async, fence_proxy_async_shared
from moe_numba.ptx.memory import (
    ld_global_s32x4,
    ld_nc_na_s32x4,
    ld_shared_s32x4,
    pointer_from_address,
    st_na_s32x4,
    st_shared_s32x4,
)
from moe_numba.ptx.warp import FULL_MASK

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.result())

# %% [markdown]
# Times need a GPU per rank. Ranks that share a GPU, or the simulator, run and check every step, and show recorded times.
#
# ## The problem
#
# Three ranks have four tokens each. These are the rows that they have computed; the coloured ones belong to tokens of rank 0:

# %%
draw.problem()

# %% [markdown]
# Rows that belong to one home rank lie next to each other, in the order of its tokens. That is how dispatch received them. Combine needs no
# counts and no indices on the way: from the dispatch each rank knows which rows it will get for its tokens, and from whom.
#
# In torch, for a rank that can read the rows of all others:
#
# ```python
# total = torch.zeros(tokens, hidden)                       # float32
# for peer in range(ranks):                                 # in rank order
#     total.index_add_(0, token_of[peer], y[peer][rows_for_me].to(device).float())
# return total.bfloat16()
# ```
#
# ## The lower bound
#
# A row that leaves its rank crosses NVLink once. The receiver writes it to memory and reads it again, and it writes the sums:

# %%
page.lower_bound()

# %% [markdown]
# The push rate is the best one that [lesson 11](11_talk_to_a_peer.ipynb) measured, and the same bytes have the same lower bound in
# [lesson 12](12_dispatch.ipynb). Rows that stay on their rank do not count: **some published bandwidths include them**, and with two ranks that doubles the
# number. The link is the limit, if the sum can run while rows arrive.
#
# ## One rounding
#
# A kernel should return the same bits in every call, so we fix two things: rows are added **in rank order**, in whatever order they arrive, and the sum
# is kept in `float32` and **rounded once**. A `bfloat16` has 8 significant bits. This happens to one element of eight rows, if it is rounded after each row:

# %%
draw.rounding([256.0, 1.0, 1.5, -3.0, 1.0, 2.0, 1.0, -256.0])

# %% [markdown]
# **Build.** A lane holds 16 bytes of each row, four words of two elements. Those of rank r are `words[first + 4 * r]` and the next three. Return the four
# words of the sum of those rows whose bit of `mask` is set. A `bfloat16` is the upper half of a `float32`. You have `uint_as_float(bits)`, and
# `cvt_rn_bf16x2_f32(high, low)`, which rounds two `float32` to one word. Sums begin at 0, so that the sum of -0 and -0 is 0.


# %%
@cuda.jit(device=True)
def my_sum_vector(words, first, ranks, mask):
    pass  # yours


sum_vector = exercises.one_rounding.use(my_sum_vector)

# %% [markdown]
# **Take away.** Say in which order you add, and where you round. Then a test can compare bits.
#
# ## Step 1: push, then sum
#
# The rank that has a row **pushes** it to its home rank, because a store needs no reply. Each rank has a buffer for the worst case, a row from each rank for
# each token. A barrier of all ranks, a kernel that pushes, another barrier, and a kernel that sums: nobody waits inside of a kernel.
#
# A warp copies a row, 16 bytes per lane at a time:


# %%
@cuda.jit(device=True)
def copy_row(to, to_at, source, at, lane):
    words = cuda.local.array(16, int32)
    for first in range(lane, page.ROW_WORDS // 4, 128):
        for u in range(4):  # four loads are in flight
            i = first + 32 * u
            if i < page.ROW_WORDS // 4:
                words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3] = ld_nc_na_s32x4(source, at + 4 * i)
        for u in range(4):
            i = first + 32 * u
            if i < page.ROW_WORDS // 4:
                st_na_s32x4(to, to_at + 4 * i, words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3])


@cuda.jit
def push(y, home, token, rows, peers, rank):
    thread = int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    lane, row = int32(thread & 31), int32(thread >> 5)
    while row < rows:  # a warp per row
        remote = pointer_from_address(peers[home[row]], y)
        place = page.ROWS + (int64(token[row]) * RANKS + rank) * page.ROW_WORDS
        copy_row(remote, place, y, int64(row) * page.ROW_WORDS, lane)
        row = int32(row + (cuda.gridDim.x * cuda.blockDim.x >> 5))


# %% [markdown]
# `sum_token` sums a token's rows with a warp. It has two holes: your `sum_vector`, and `load`, which fetches vectors of 16 bytes of all rows into
# registers. Lane r knows where rank r's row begins (`at`). The first `load` fetches one vector of each row.


# %%
@cuda.jit(device=True)
def load_one(words, rows, begins, mask, first, row_vectors):
    for r in range(RANKS):
        if mask >> uint32(r) & uint32(1):
            a, b, c, d = ld_global_s32x4(rows.local, begins[r] + 4 * first)
            words[4 * r], words[4 * r + 1], words[4 * r + 2], words[4 * r + 3] = a, b, c, d


@factory
def make_sum_token(load, sum_vector, vectors, staged=False):
    row_vectors, held = page.ROW_WORDS // 4, 4 * RANKS * vectors

    @cuda.jit(device=True)
    def sum_token(rows, at, mask, lane, out, out_at):
        words, begins = cuda.local.array(held, int32), cuda.local.array(RANKS, int64)
        for r in range(RANKS):
            begins[r] = cuda.shfl_sync(FULL_MASK, at, r)
        for first in range(lane, row_vectors, 32 * vectors):
            load(words, rows, begins, mask, first, row_vectors)  # <-- a hole
            for u in range(vectors):
                i = int32(first + 32 * u)
                if i < row_vectors:
                    a, b, c, d = sum_vector(words, 4 * RANKS * u, RANKS, mask)  # <-- a hole
                    if staged:  # step 11
                        st_shared_s32x4(rows.smem, int32(rows.staging + 4 * i), a, b, c, d)
                    else:
                        st_na_s32x4(out, out_at + 4 * i, a, b, c, d)

    return sum_token


@factory
def make_sum(sum_token):
    @cuda.jit
    def sum_rows(local, is_in, tokens, out):
        thread = int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        lane, token = int32(thread & 31), int32(thread >> 5)
        while token < tokens:  # a warp per token
            has_row = lane < RANKS and is_in[token * RANKS + lane] != 0
            mask = uint32(cuda.ballot_sync(FULL_MASK, has_row))
            at = page.ROWS + (int64(token) * RANKS + lane) * page.ROW_WORDS
            rows = Rows(local, local, local, int32(0), int32(0))
            sum_token(rows, at, mask, lane, out, int64(token) * page.ROW_WORDS)
            token = int32(token + (cuda.gridDim.x * cuda.blockDim.x >> 5))

    return sum_rows


# %% [markdown]
# **Prediction.** The bytes that leave at the push rate, then the sum's reads and writes at the rate of a copy, four launches and two barriers.

# %%
step(
    "push, then sum",
    Version("push", push, make_sum(make_sum_token(load_one, sum_vector, 1))),
    predicted_us=page.predict_push(),
)

# %% [markdown]
# The check is the same for all steps: buffers and rings are filled with NaNs, each rank first combines other rows and then the rows that are
# compared, and every bit must be right. In the simulator, stores reach other ranks late and in any order that the memory model allows. The table
# counts signals that a kernel stores through the addresses of `peers`: here those of the barriers.
#
# **Does the order of the rows slow the push down?** An earlier version of this lesson measured that a push of combine is slower than the naive dispatch, which
# also copies all rows on all SMs. In combine the rows are sorted by home rank, so a rank's own rows come in one block, and meanwhile the link would be idle.
# Interleave them, and see:

# %%
page.show_push_orders(Version("push", push))

# %%
print(page.explain_push_orders())

# %% [markdown]
# **Take away.** Push and sum is right and simple. But it needs the whole GPU, a buffer for the worst case, and while it sums, the link is idle.
#
# ## Step 2: loads in flight
#
# A lane that loads a vector, adds, stores, and only then loads the next one, mostly waits:

# %%
draw.loads()

# %% [markdown]
# **Little's law**: bytes in flight = bandwidth x latency. Below the bandwidth of the memory, a kernel reads as fast as its bytes in flight allow,
# whether few threads have many loads in flight, or many threads a few. Here are the recorded numbers of an H200:

# %%
print(page.show_rates())

# %% [markdown]
# **Build.** A kernel sums `rows` rows per token. Each of `threads` threads on each of `sms` SMs issues n loads of 16 bytes for each row before the first
# addition. Return the smallest n whose bytes in flight suffice for `bandwidth` (bytes per second) and `latency_ns`.


# %%
def my_loads_in_flight(bandwidth, latency_ns, sms, threads, rows):
    return ...  # yours


exercises.in_flight.check(my_loads_in_flight)

# %% [markdown]
# **Build.** Now write such a `load`. The lane's vectors are `i = first + 32 * u` for u from 0 to `VECTORS - 1`, if the row has them (`i < row_vectors`).
# The row of rank r begins at word `begins[r]` of `rows.local`; a vector has four words. Load those of ranks in `mask` to `words[4 * (RANKS * u + r)]` and the
# three words after it. Nothing is added in this function, so all its loads are in flight together.


# %%
@cuda.jit(device=True)
def my_load(words, rows, begins, mask, first, row_vectors):
    pass  # yours


load_several = exercises.several_loads.use(my_load)

# %% [markdown]
# **Prediction.** The sum alone, at the rates that an earlier version of this kernel reached with one and with several vectors. The push is unchanged.

# %%
step(
    "loads in flight",
    Version("push", push, make_sum(make_sum_token(load_several, sum_vector, VECTORS))),
    predicted_us=page.after_sum("push, then sum", VECTORS),
)

# %% [markdown]
# No count of the table changes: the same loads, and the same bytes. Only *when* they are issued is different, and that takes a GPU to see. Compare the
# kilobytes in flight above with what is needed, and the recorded rates on few and on all SMs: with few SMs this function will matter much more. But
# latency grows with the load, so four times the bytes in flight are less than four times as fast.
#
# **Take away.** Issue loads before you use the first one. How many you need is bandwidth times latency, divided by the threads you have.
#
# ## Step 3: our port of DeepEP's rings
#
# DeepEP combines on few SMs, and leaves the others to the experts. Rows pass through **rings** of lesson 11: the sender writes a row to the next slot in the
# receiver's memory and then raises the **tail**; the receiver reads the row and then raises the **head**. A **channel** is a range of a rank's tokens with rings
# of its own. In DeepEP's kernel, of which we run our port, a channel has a pair of CTAs:

# %%
draw.roles()

# %% [markdown]
# In the sending CTA, several warps write the rows for one rank, chunk after chunk. In the other one, warps take tokens in turn; each waits for all rows of its
# token. So rows are not read in the order in which they lie in the ring.
#
# **Choose.** Who may raise the head? "A": the warp that has read the row. "B": the warp that has read the last row of its token. "C": warp 0, which
# stores the least position that any other warp still needs.

# %%
exercises.publishes.check(...)

# %% [markdown]
# (For a token without a row from some rank, a warp still has to say what it needs of that ring: nothing before the *next* row from there. DeepEP's
# `cached_notify_combine` writes that position into the gaps of `send_head` before each combine, and clears heads and tails between two barriers.)
#
# **Prediction.** The rings of dispatch move as many bytes. We expect the time of our port of DeepEP's dispatch, which lesson 12 has measured.

# %%
step("our port of DeepEP's rings", Version("port"), predicted_us=page.recorded_us(page.DISPATCH, "DeepEP's ring"))

# %%
say("{text}", text=page.explain_port())

# %% [markdown]
# **Take away.** With several readers of one ring, the head is a minimum, somebody must compute it, and the slowest reader holds back everyone. (It can do worse:
# see the first deadlock below.)
#
# ## Step 4: one warp per channel
#
# Give a whole channel to **one warp** on each side (the lower half of the figure), and use many more channels. The warp that sums takes its tokens in order, so it
# reads each ring in order, and the head is the warp's own count. No minimum, no gaps, no barrier among warps. The warp that sends serves its rings in turn: in each
# iteration it writes one row to each rank whose ring has room. Lane r keeps the numbers of the ring to or from rank r. All else stays as in step 3: rows go through
# registers, heads lie at the receiver, and counters are cleared between two barriers, though by three launches, where the port has one kernel. Only one
# thing follows from the change: there are no chunks, so a warp publishes each row.
#
# First the wait. **Build.** All lanes of a warp call it. A lane with `waits` needs row `wanted` of its ring: the row has come when the counter `local[at]`, an int32
# that another rank raises, exceeds `wanted`. Counters are never cleared later on, so compare modulo 2^32: `int32(tail - wanted) > 0`. `tail` is the
# counter as this lane last read it. Return the newest value that you know. Afterwards *all* lanes read the rows. You have
# `ld_acquire_sys_s32(local, at)`, `cuda.any_sync(FULL_MASK, ...)`, and `cuda.syncwarp()`. (`state` is for `give_up`, by which the lesson's own answer ends a
# wait that never ends on a GPU; ignore it.)


# %%
@cuda.jit(device=True)
def my_wait_rows(local, at, tail, wanted, waits, state):
    pass  # yours


wait_rows = exercises.wait.use(my_wait_rows)

# %% [markdown]
# This is the sender. Its switches are `if`s that Numba decides when it compiles; in this step they are all off, and each of the following steps turns one.


# %%
@factory
def make_send(switches):
    s = Switches(*switches)
    go_on, near, signals, bulk = s.counters_go_on, s.head_at_sender, s.signalling_warp, s.bulk_send
    own_rings, slots, staging, words = s.own_rings, s.slots, s.staging, page.ROW_WORDS

    @cuda.jit(device=True)
    def send(smem, smem_u64, call, channel, phase):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        peer, has_ring = lane if lane < RANKS else int32(0), lane < RANKS and (own_rings or lane != call.rank)
        remote, ring = pointer_from_address(call.peers[peer], call.local), int32(channel * RANKS + call.rank)
        counter, progress = int32(page.SENT + channel * RANKS + peer), int32(page.PROGRESS + warp * RANKS + lane)
        row = call.row_start[peer * call.channels + channel]  # the next row to send, of `left` rows
        left = int32(call.row_start[peer * call.channels + channel + 1] - row) if has_ring else int32(0)
        tail = uint32(call.state[counter]) if go_on and has_ring else uint32(0)
        head, arrived, published, polls = uint32(tail - uint32(slots)), tail, tail, int32(0)
        while cuda.any_sync(FULL_MASK, left > 0):
            # is there room? A lane asks only if its ring seems to be full
            if left > 0 and uint32(tail - head) >= uint32(slots):
                if near:
                    head = uint32(ld_acquire_sys_s32(call.local, page.HEADS + channel * RANKS + peer))
                else:
                    head = uint32(ld_acquire_sys_s32(remote, page.HEADS + ring))
                if bulk:
                    fence_proxy_async()
            cuda.syncwarp()  # what one lane has acquired, all lanes may overwrite
            sends = left > 0 and uint32(tail - head) < uint32(slots)
            mask = uint32(cuda.ballot_sync(FULL_MASK, sends))
            # one row to each rank whose ring has room
            for r in range(RANKS):
                if mask >> uint32(r) & uint32(1):
                    at = int64(cuda.shfl_sync(FULL_MASK, row, r)) * words
                    slot = int32(uint32(cuda.shfl_sync(FULL_MASK, int32(tail), r)) & uint32(slots - 1))
                    place = page.ROWS + (int64(ring) * slots + slot) * words
                    if bulk:
                        mine = int32(staging + warp * page.ROW_STRIDE)
                        load_row(smem, smem_u64, page.MBARRIER + warp, lane, mine, call.y, at, 4 * words)
                        phase = wait_row(smem_u64, page.MBARRIER + warp, phase)
                        store_row(lane, r, remote, place, smem, mine, 4 * words)  # lane r stores
                    else:
                        copy_row(pointer_from_address(call.peers[r], call.local), place, call.y, at, lane)
            # which rows have arrived?
            if bulk:  # those of earlier iterations; the last store may still be under way
                arrived = tail
                if sends:
                    wait_all_but_one()
                else:
                    wait_all()
            if sends:
                tail, left, row = uint32(tail + uint32(1)), int32(left - 1), int32(row + 1)
            if bulk:
                if left == 0:
                    wait_all()
                    arrived = tail
            else:
                arrived = tail
                cuda.syncwarp()  # all lanes have stored their part of the row
            # publish the tail
            if signals:
                if has_ring:
                    post_progress(smem_u64, progress, channel, arrived)
            elif has_ring and arrived != published:
                st_release_sys_s32(remote, page.TAILS + ring, int32(arrived))
                published = arrived
            polls = int32(0) if mask != uint32(0) else int32(polls + 1)
            if give_up(call.state, polls):
                left = int32(0)
        if has_ring and go_on:
            call.state[counter] = int32(tail)
        return phase

    return send


# %% [markdown]
# And this is the warp that sums. For each token it reads the positions of the token's rows, waits, sums, and raises the heads.


# %%
@factory
def make_receive(sum_token, wait_rows, switches):
    s = Switches(*switches)
    go_on, near, signals, bulk = s.counters_go_on, s.head_at_sender, s.signalling_warp, s.bulk_receive
    own_rings, slots, staging, words = s.own_rings, s.slots, s.staging, page.ROW_WORDS

    @cuda.jit(device=True)
    def receive(smem, smem_u64, call, channel, phase):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        peer, has_ring = lane if lane < RANKS else int32(0), lane < RANKS and (own_rings or lane != call.rank)
        remote, ring = pointer_from_address(call.peers[peer], call.local), int32(channel * RANKS + peer)
        counter, progress = int32(page.RECEIVED + ring), int32(page.PROGRESS + warp * RANKS + lane)
        mine, own_rows = int32(staging + warp * page.ROW_STRIDE), call.row_start[call.rank * call.channels + channel]
        first = int32(min(channel * call.share, call.tokens))
        last = int32(min(first + call.share, call.tokens))
        base = uint32(call.state[counter]) if go_on and has_ring else uint32(0)
        tail = head = base
        for token in range(first, last):
            # which rows does the token have? `position` is that among the channel's rows from this lane's rank, or -1
            position = call.position[token * RANKS + peer] if lane < RANKS else int32(-1)
            own = int32(cuda.shfl_sync(FULL_MASK, position, call.rank))
            if bulk:
                if own >= 0:  # the own row is loaded while the warp waits
                    at = int64(own_rows + own) * words
                    load_row(smem, smem_u64, page.MBARRIER + warp, lane, mine, call.y, at, 4 * words)
                else:
                    wait_read()  # the last sum has left shared memory
                    cuda.syncwarp()
            # wait for the others
            wanted = uint32(base + uint32(position))
            waits = has_ring and position >= 0
            tail = wait_rows(call.local, page.TAILS + ring, tail, wanted, waits, call.state)  # <-- a hole
            if bulk and own >= 0:
                phase = wait_row(smem_u64, page.MBARRIER + warp, phase)
            # sum
            mask = uint32(cuda.ballot_sync(FULL_MASK, position >= 0))
            at = page.ROWS + (int64(ring) * slots + int32(wanted & uint32(slots - 1))) * words
            if not own_rings and lane == call.rank:
                at = int64(own_rows + position) * words
            rows = Rows(call.local, call.y, smem, mine, call.rank)
            sum_token(rows, at, mask, lane, call.out, int64(token) * words)  # <-- a hole
            if bulk:
                fence_proxy_async_shared()
            cuda.syncwarp()  # all lanes have read the rows
            if bulk:
                store_row(lane, 0, call.out, int64(token) * words, smem, mine, 4 * words)
            # publish the head: this warp's own count
            if waits:
                head = uint32(wanted + uint32(1))
                if signals:
                    post_progress(smem_u64, progress, channel, head)
                elif near:
                    st_release_sys_s32(remote, page.HEADS + channel * RANKS + call.rank, int32(head))
                else:
                    st_release_sys_s32(call.local, page.HEADS + ring, int32(head))
        if has_ring and go_on:
            call.state[counter] = int32(head)
        return phase

    return receive


# %% [markdown]
# The kernel gives each warp its channel. The first half of the CTAs sends, the other half sums. The last warp of each CTA is idle until step 8.


# %%
@factory
def make_combine(send, receive, switches):
    s = Switches(*switches)
    signals, balance, warps, publish = s.signalling_warp, s.balance, page.WARPS, page.make_publish()

    @cuda.jit
    def combine(local, peers, rank, state, y, row_start, position, tokens, share, channels, number, out):
        smem, smem_u64 = cuda.shared.array(0, int32, 128), cuda.shared.array(0, uint64, 128)  # the same memory
        call = Call(local, peers, rank, state, y, row_start, position, tokens, share, channels, out)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        cta, ctas = int32(cuda.blockIdx.x), int32(cuda.gridDim.x >> 1)
        receives = cta >= ctas
        init_barriers(smem_u64, page.MBARRIER, warps)
        clear_progress(smem, smem_u64, page.PROGRESS, page.PUBLISHED, page.DONE, warps, RANKS)
        if warp == warps:
            if signals:
                publish(smem, smem_u64, lane, rank, page.HEADS if receives else page.TAILS, local, peers)
        else:
            channel, phase = int32(warp * ctas + (cta - ctas if receives else cta)), uint32(0)
            while channel < channels:
                if receives:
                    phase = receive(smem, smem_u64, call, channel, phase)
                else:
                    phase = send(smem, smem_u64, call, channel, phase)
                channel = int32(channels)
                if balance:  # step 12: take the next channel
                    taken, role = int32(0), int32(1 if receives else 0)
                    if lane == 0:
                        taken = atom_add_relaxed_gpu_s32(state, page.NEXT_CHANNEL + role, 1)
                    taken = uint32(uint32(cuda.shfl_sync(FULL_MASK, taken, 0)) - uint32(number) * uint32(channels))
                    channel = int32(ctas * warps + int32(taken))
                    if lane < RANKS:
                        at = int32(warp * RANKS + lane)
                        wait_published(smem_u64, page.PROGRESS + at, page.PUBLISHED + at)
                    cuda.syncwarp()
            wait_all()
            cuda.syncwarp()
            if lane == 0:
                st_release_cta_shared_s32(smem, page.DONE + warp, 1)  # the signalling warp may end

    return combine


def rings(switches, load, vectors, sum_vector=sum_vector):
    sum_token = make_sum_token(load, sum_vector, vectors, switches.bulk_receive)
    send, receive = make_send(tuple(switches)), make_receive(sum_token, wait_rows, tuple(switches))
    return Version("rings", make_combine(send, receive, tuple(switches)), None, switches)


# %% [markdown]
# **Prediction.** The slower of two sides: the sending SMs copy all rows by stores, and the receiving SMs sum all rows at the recorded rate of as many SMs
# with one vector of each row. On both sides a warp also waits for a release after each row, which adds to its copies.

# %%
s4 = Switches()
slower = page.slower_of(page.reading_us(1), page.sending_us("stores"))
step("one warp per channel", rings(s4, load_one, 1), predicted_us=page.added(slower, page.releases_us()))

# %% [markdown]
# **Take away.** Give a resource one owner, and bookkeeping becomes a count in a register.
#
# ## Step 5: loads in flight, again
#
# On half of 24 SMs a lane with one vector of each row in flight reads far too slowly, by Little's law. Your `load` of step 2 goes into the same hole.
#
# **Prediction.** The same parts, with the recorded rate of more vectors.

# %%
slower = page.slower_of(page.reading_us(VECTORS), page.sending_us("stores"))
step("several vectors", rings(s4, load_several, VECTORS), predicted_us=page.added(slower, page.releases_us()))

# %% [markdown]
# **Take away.** The fewer the SMs, the more each thread must have in flight.
#
# ## Steps 6 to 8: three ideas of lesson 12
#
# Lesson 12 has shown these on dispatch. Each is one switch.
#
# **6. Counters go on.** Until now two barriers of all ranks and a kernel that clears heads and tails precede each launch. If both sides keep their counters, as `state`
# does from launch to launch, nothing must be cleared. *Prediction:* three launches and two flags less.

# %%
s6 = s4._replace(counters_go_on=True)
predicted_us = page.less("several vectors", page.launches_us(3, 2))
step("counters go on", rings(s6, load_several, VECTORS), predicted_us=predicted_us)

# %% [markdown]
# **7. The head at the sender.** The sender polls the head. If it lies in the receiver's memory, each poll crosses the link and back. So the receiver stores it
# in the *sender's* memory. *Prediction:* no gain. Senders poll only if a ring seems to be full, and then they wait anyway. (The table counts more signals, since
# heads now go through `peers`.)

# %%
s7 = s6._replace(head_at_sender=True)
predicted_us = page.less("counters go on", 0)
step("head at the sender", rings(s7, load_several, VECTORS), predicted_us=predicted_us)

# %% [markdown]
# **8. A signalling warp.** A release at system scope waits until the warp's stores are visible to the other GPU, which takes microseconds on a busy link. Warps now post
# their counts in shared memory, and the last warp of the CTA publishes for all. *Prediction:* the releases disappear.

# %%
s8 = s7._replace(signalling_warp=True)
predicted_us = page.less("head at the sender", page.releases_us())
step("a signalling warp", rings(s8, load_several, VECTORS), predicted_us=predicted_us)

# %% [markdown]
# **Take away.** Let counters run, and let one warp pay for the fence. Where a flag lies matters as much as it is polled.
#
# ## Steps 9 to 11: the way of a row
#
# Three switches change the way of a row, first at the sender, then of own rows, then at the receiver:

# %%
draw.paths()

# %% [markdown]
# **9. Bulk copies send.** One lane issues a bulk load of the row into shared memory, and lane r a bulk store to rank r. No register holds a row, and no lane computes
# an address. *Prediction:* the slower of both sides, the senders at the recorded rate of CTAs that load and store rows in bulk.

# %%
s9 = s8._replace(bulk_send=True)
predicted_us = page.slower_of(page.reading_us(VECTORS), page.sending_us("bulk copies after bulk loads"))
step("bulk copies send", rings(s9, load_several, VECTORS), predicted_us=predicted_us)

# %% [markdown]
# **10. Own rows directly.** A rank's own rows need no ring: the receiver reads them where they are. With two ranks the senders have half of their work left, with eight
# ranks seven eighths. *Prediction:* what that makes of the slower side, since the receivers still read all rows.
#
# Now one of the rows is in `y`, and in the next step it will be in shared memory. So here is `load` for all three places:


# %%
@factory
def make_load(vectors, own_row):
    in_y, in_smem = own_row == "y", own_row == "shared memory"

    @cuda.jit(device=True)
    def load(words, rows, begins, mask, first, row_vectors):
        for u in range(vectors):
            i = first + 32 * u
            if i < row_vectors:
                for r in range(RANKS):
                    if mask >> uint32(r) & uint32(1):
                        if in_smem and r == rows.rank:
                            a, b, c, d = ld_shared_s32x4(rows.smem, int32(rows.staging + 4 * i))
                        elif in_y and r == rows.rank:
                            a, b, c, d = ld_nc_na_s32x4(rows.y, begins[r] + 4 * i)
                        else:
                            a, b, c, d = ld_global_s32x4(rows.local, begins[r] + 4 * i)
                        j = 4 * (RANKS * u + r)
                        words[j], words[j + 1], words[j + 2], words[j + 3] = a, b, c, d

    return load


s10, load_own = s9._replace(own_rings=False), make_load(VECTORS, "y")
step(
    "own rows directly", rings(s10, load_own, VECTORS), predicted_us=page.without_own_rows("bulk copies send", VECTORS)
)

# %% [markdown]
# **11. Bulk copies receive.** A bulk load brings the own row into shared memory while the warp waits for the others. The sum replaces it there, and a bulk store
# writes it out while the warp goes on with the next token. *Prediction:* no gain. The receivers read as many bytes as before.

# %%
s11, load_staged = s10._replace(bulk_receive=True), make_load(VECTORS, "shared memory")
predicted_us = page.less("own rows directly", 0)
step("bulk copies receive", rings(s11, load_staged, VECTORS), predicted_us=predicted_us)

# %%
say("{text}", text=page.explain_ways())

# %% [markdown]
# **Take away.** Find the slower side first. What you take from the other one is time that it waits.
#
# ## Step 12: balance
#
# So far each warp has one channel. Warps do not get equal shares of a busy link, so some finish early and idle. Cut the tokens into four channels per warp; a
# warp that has finished takes the next channel from a counter. Warps take channels in ascending order on all ranks. So the lowest unfinished channel has a
# warp everywhere, and that warp waits for no other channel: this cannot deadlock.
#
# **Prediction.** The last warp finishes when the mean one does, by the recorded ends of an earlier version.

# %%
s12 = s11._replace(balance=True)
balanced = rings(s12, load_staged, VECTORS)
step("balanced", balanced, predicted_us=page.evened("bulk copies receive"))

# %% [markdown]
# A kernel that spins on flags is right under *one* order of threads and stores far too easily. Here it runs under some more:

# %%
print(page.show_orders(balanced))

# %% [markdown]
# **Take away.** Small pieces of work and a counter even out what you cannot predict.
#
# ## Is the sum hidden?
#
# The second of these kernels is wrong, and says what limits the right one: its warps wait and publish, but sum nothing.


# %%
@cuda.jit(device=True)
def sum_nothing(rows, at, mask, lane, out, out_at):
    pass


hollow = make_receive(sum_nothing, wait_rows, tuple(s12))
no_sums = Version("rings", make_combine(make_send(tuple(s12)), hollow, tuple(s12)), None, s12)
page.show_parts({"balanced": balanced, "no sums": no_sums})

# %%
say("{text}", text=page.explain_parts())

# %% [markdown]
# ## Step 13, for two ranks only: packed additions
#
# Hopper adds two pairs of `bfloat16` in one instruction, `add.rn.bf16x2`, which rounds each sum once. For *two* rows this is the same as one rounding of a
# `float32` sum: rounding first to 24 bits and then to 8 never differs from rounding once, if 24 is at least 2 x 8 + 2 (Figueroa 1995). For three rows it is wrong.
#
# **Predict.** A token picks 8 of 256 experts. How many percent of the tokens have at most two rows, with two, four and eight ranks? (Within 1 with four, and 0.3 with eight ranks.)

# %%
exercises.two_rows.check(ranks_2=..., ranks_4=..., ranks_8=...)

# %% [markdown]
# **Prediction.** At most we save the part of the sum that shows above. Additions get fewer and loads stay, so we guess half of it.


# %%
@cuda.jit(device=True)
def sum_two(words, first, ranks, mask):
    if mask != uint32(3):
        return sum_vector(words, first, ranks, mask)
    a, b = (
        add_rn_bf16x2(uint32(words[first]), uint32(0)),
        add_rn_bf16x2(uint32(words[first + 1]), uint32(0)),
    )  # 0, not -0
    c, d = add_rn_bf16x2(uint32(words[first + 2]), uint32(0)), add_rn_bf16x2(uint32(words[first + 3]), uint32(0))
    a, b = add_rn_bf16x2(a, uint32(words[first + 4])), add_rn_bf16x2(b, uint32(words[first + 5]))
    c, d = add_rn_bf16x2(c, uint32(words[first + 6])), add_rn_bf16x2(d, uint32(words[first + 7]))
    return int32(a), int32(b), int32(c), int32(d)


def packed_additions():
    if RANKS != 2:
        return f"skipped: with {RANKS} ranks a token may have more than two rows"
    packed = rings(s12, load_staged, VECTORS, sum_two)
    return step("packed additions", packed, predicted_us=page.less("balanced", page.half(page.sum_that_shows_us())))


packed_additions()

# %% [markdown]
# **Take away.** A trick for two ranks is a trick for two ranks. Measure with the number that you will have.
#
# ## The first deadlock: a ring that is too short
#
# Ranks **deadlock** if they wait for one another in a cycle. DeepEP requires rings that are longer than a chunk. Is that enough? The simulator notices when no
# thread can go on. It runs our port with two ranks, one channel, several chunks and rings, and R warps that sum:

# %%
short = deadlocks.ShortRings()
short

# %% [markdown]
# **Build.** From this table, how many rows must a ring have?


# %%
def my_least_ring(chunk, warps):
    return ...  # yours


exercises.shortest_ring.check(my_least_ring)

# %% [markdown]
# This is one of the runs that hang:

# %%
draw.stuck_ring(*short.stuck())

# %% [markdown]
# All rows of the ring have been read, and still the head does not move. One warp waits for a row that has not been sent, and the last that it has said is what it
# needed *after its previous token*. Meanwhile the other R - 1 warps have read the rows in between. The sender waits for room for a whole chunk.
# With eight ranks DeepEP's kernel has 24 warps in a CTA, so R is 23, and a ring of chunk + 1 rows passes its own check. Our port and the package's `Config` refuse it.
#
# **Build: repair it.** A longer ring hides the mistake; one line removes it. Lane r of a warp calls `hold` *before* the warp waits for its next token. `heads[at]`, in shared
# memory, is the position that this warp says it still needs of rank r's ring; warp 0 reads it with acquire. `needed` is the position of the token's row (or of the next
# row from that rank). DeepEP does nothing here. The check runs your port with rings of `chunk` rows.


# %%
@cuda.jit(device=True)
def my_hold(heads, at, needed):
    pass  # yours


hold = exercises.hold.use(my_hold)

# %% [markdown]
# **Take away.** Say what you hold *before* you wait, not after. What a waiting thread has said last is all that the others know.
#
# ## The second deadlock: a sender that waits
#
# Dispatch may wait for a full ring: its receiver empties a ring whenever rows have come. The receiver of combine waits for *all* rows of its next token, and meanwhile
# empties no other ring. This is combine on three ranks, as small as it can be: one thread sends, one sums, rows have one word, rings two slots. `y` has this rank's
# rows by home rank, those for rank `to` from `first[to]` on; `position[THREE * token + source]` is the position of a token's row in its ring, or -1.


# %%
@cuda.jit
def combine_that_waits(local, peers, rank, y, first, position, tokens, out):
    if cuda.threadIdx.x == 0:  # sends
        tail = cuda.local.array(THREE, int32)
        for to in range(THREE):
            tail[to] = 0
        left = int32(1)
        while left > 0:
            left = int32(0)
            for to in range(THREE):
                if to != rank and tail[to] < first[to + 1] - first[to]:
                    left = int32(left + 1)
                    while tail[to] - ld_acquire_sys_s32(local, HEAD + to) >= SLOTS:
                        pass
                    remote = pointer_from_address(peers[to], local)
                    remote[RING + SLOTS * rank + tail[to] % SLOTS] = y[first[to] + tail[to]]
                    tail[to] += 1
                    st_release_sys_s32(remote, TAIL + rank, tail[to])
    elif cuda.threadIdx.x == 32:  # sums
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


message, waits = deadlocks.wait_for_each_other(combine_that_waits)
print(message)

# %% [markdown]
# In this example the first tokens of rank r have rows on rank r + 1 only, the later ones on all ranks. The heads and tails that the deadlock left behind
# tell who waits for whom:

# %%
draw.cycle(waits) if waits else print("no cycle was found")

# %% [markdown]
# **Build: repair it.** Copy the kernel, and change the sender so that no ring can hold back another. Longer rings do not help: longer runs of tokens fill them.


# %%
@cuda.jit
def my_combine_three(local, peers, rank, y, first, position, tokens, out):
    pass  # yours


exercises.skips.check(my_combine_three)

# %% [markdown]
# The kernel of this lesson does that from step 4 on: a lane `sends` if *its* ring has room.
#
# **Take away.** Draw who waits for whom. If a thread serves several rings, it must not wait for one of them.
#
# ## What did not pay, and why

# %%
page.show_what_did_not_pay()

# %% [markdown]
# ## All steps
#
# The same kernel with other numbers of SMs, beside what records have of the package's `Buffer.combine` with more ranks:

# %%
page.show_sms(balanced)

# %% [markdown]
# And with other routings. Zipf: expert e is picked in proportion to 1 / (e + 1). One rank: all tokens go to experts of the last rank.

# %%
page.show_peers(balanced)

# %%
say("{text}", text=page.compare_with_package())

# %%
print(page.about_deepep())

# %%
lesson.save()
lesson.summary()

# %%
page.show_earlier()

# %% [markdown]
# **You can now** sum rows in a fixed order while they arrive, and find the cycle of waits in a kernel that hangs.
#
# ## Next step, not built
#
# Every row crosses a link, although a home rank only wants the sum. Within a node that cannot be helped: a row that another rank adds first crosses a link to
# that rank. But between *nodes* a network card is the limit, and there a sum of rows counts once. **Build** a combine for two nodes, in which the ranks of
# a node first add their rows of a token, and one of them sends the sum to the token's node. How many bytes does that save between the nodes, with eight
# ranks each? And what becomes of "in rank order, rounded once"?
#
# ## Sources
#
# - DeepSeek-AI: [DeepEP](https://github.com/deepseek-ai/DeepEP), `cached_notify_combine` and `combine` in `csrc/kernels/intranode.cu` of its first version, which our port follows.
# - The article of lessons 10 to 12, [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), in Chinese, ends before combine.
# - NVIDIA: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/), "Memory Consistency Model".
# - Samuel A. Figueroa, "When is Double Rounding Innocuous?", *ACM SIGNUM Newsletter* 30 (3), 1995.
# - John D. C. Little, "A Proof for the Queuing Formula: L = λW", *Operations Research* 9 (3), 1961.
# - The package's kernel: [`rings/combine.py`](../moe_numba/expert_parallel/rings/combine.py). It also returns weights, adds biases, and aborts after a timeout.
#
# Before: [12, dispatch](12_dispatch.ipynb). Next: [14, low latency](14_low_latency.ipynb), where one launch sends and receives a handful of tokens.
