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
# # The gate, for decode
#
# While a model reads a prompt, its gate routes thousands of tokens at a time. The [lesson before](01_gate_prompt.ipynb) makes that fast by
# saving bytes and instructions. While a model writes (**decode**), a step has as many tokens as there are users: 1 to 64. Their bytes and instructions
# take a small part of a microsecond, and gates take several. Where does the time go?
#
# It goes into a chain of operations, each of which waits for the one before. You will find the links of this chain, count them, and take
# them out one by one.

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.lessons.gate_decode import draw, exercises
from moe_numba.course.lessons.gate_decode import runs as page
from moe_numba.course.lessons.gate_decode.runs import lesson, sort_descending, sort_small
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.exercises import predict
from moe_numba.course.steps.lesson import factory
from moe_numba.gate.device_functions import EXCLUDED, LOG2_E, key_as_float, order_key, sigmoid
from moe_numba.gate.packed_keys import sortable_pair
from moe_numba.ptx.arithmetic import add_rn_bf16x2, ex2_approx, rcp_approx, uint_as_float
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, load_nc_u32x2, load_nc_u32x4
from moe_numba.ptx.warp import redux_sync_max_s32

EXPERTS, GROUPS, KEPT, TOPK = page.EXPERTS, page.GROUPS, page.KEPT, page.TOPK
HELD, LANES, SUM_ROUNDS, WARPS, FULL = page.HELD, page.LANES, page.SUM_ROUNDS, page.WARPS, page.FULL
START, LOADED, STORED = page.START, page.LOADED, page.STORED
print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
print(f"{EXPERTS} experts in {GROUPS} groups; {KEPT} groups are kept, {TOPK} experts chosen; {page.TOKENS} tokens")
step = lesson.step
print(page.result())

# %% [markdown]
# ## The problem
#
# The rule is DeepSeek-V3's, and so are the numbers in the text: 256 experts in 8 groups. A score is the sigmoid of a logit, and a bias is
# added to it. The two best biased scores of a group add up to the group's score. The four best groups are kept, and of their experts the
# eight best. The weights are the scores without the bias, divided by their sum. Of equal groups or experts the lower one is better.
#
# The bytes are few. They come from the L2 cache, into which the router's GEMM has just written them:

# %%
print(page.lower_bound())

# %% [markdown]
# ## A kernel with four holes
#
# A **warp** routes a token, so 64 tokens are 64 warps: 16 CTAs of four warps, on 16 of the SMs, so that each warp has a scheduler of its
# own. A lane holds eight adjacent experts, and a group is four lanes:

# %%
draw.lanes()

# %% [markdown]
# `keep`, `pick`, `weigh` and `order` are holes, and `make_gate` puts a device function into each. From here on a step writes one function
# and fills one hole.
#
# `order_key` maps a float to an integer that sorts the same way, so that we compare integers (the lesson before builds it). A lane issues
# its four loads, each of 16 bytes, before it uses any of them. So it waits for memory once.


# %%
@cuda.jit(device=True)
def load(x, start, values):
    for i in range(0, HELD, 4):
        words = load_nc_u32x4(x, start + i)
        for w in range(4):
            values[i + w] = uint_as_float(words[w])


@factory
def make_gate(keep, pick, weigh, order, warps=WARPS):
    @cuda.jit
    def gate(logits, bias, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x & 31)
        token = int32(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5))
        score = cuda.local.array(HELD, float32)
        lane_bias = cuda.local.array(HELD, float32)
        keys = cuda.local.array(HELD, int32)
        order(START)  # <-- a hole, in three places: see "Start while the kernel before runs"
        if token < tokens:  # the same for all lanes of a warp
            load(logits, token * EXPERTS + lane * HELD, score)
            load(bias, lane * HELD, lane_bias)
            order(LOADED)
            for i in range(HELD):
                score[i] = sigmoid(score[i])
                keys[i] = order_key(score[i] + lane_bias[i])
            # <-- a hole: is the lane's group among the KEPT best?
            if not keep(keys, lane):
                for i in range(HELD):
                    keys[i] = EXCLUDED
            # <-- a hole: for lane k the lane that holds the k-th expert, and the expert's place there
            holder, position = pick(keys, lane)
            # <-- a hole: for lane k the score of that expert
            weight = weigh(logits, token, score, holder, position, lane)
            total = weight = weight if lane < TOPK else float32(0)
            for s in range(SUM_ROUNDS):
                total += cuda.shfl_xor_sync(FULL, total, 1 << s)
            if lane < TOPK:
                weights[token * TOPK + lane] = weight * rcp_approx(total)
                ids[token * TOPK + lane] = int32(holder * HELD + position)
            order(STORED)

    return gate


# %% [markdown]
# ## Build: the two best of a group
#
# The group's score needs the two best of 32 experts. A lane finds the two best of its own eight without help. Then four lanes must agree:
#
# (Lesson 01 does this with floats; your function needs little change.)
#
# Write `two_largest`: `first` and `second` are the two largest keys of this lane, `first` being the larger one. Return the two largest keys
# of the four lanes of the group, to each of them. Equal keys count twice. `cuda.shfl_xor_sync(FULL, x, d)` returns the `x` of lane `lane ^
# d`. Par: 4 shuffles.


# %%
@cuda.jit(device=True)
def my_two_largest(first, second):
    return ...  # yours


two_largest = exercises.two_largest_keys.use(my_two_largest)

# %% [markdown]
# ## Step 1: the largest, eight times
#
# This is how one would write it, and what SGLang's kernels do. To choose four groups, find the best one four times, and take it out each
# time. To choose eight experts, do the same eight times. The best of a warp takes a butterfly: five rounds, and in each round a lane
# exchanges its key and its expert with the lane at twice the distance of the round before. The best group takes three rounds, since the
# lanes of a group agree already.
#
# **Predict.** How many shuffles does a warp execute? Count those of `two_largest`, of the groups, of the picks and of the sum. Replace the
# `...` before you run the cell of the step.

# %%
my_guess = predict("argmax by shuffles", shuffles=...)


# %%
@cuda.jit(device=True)
def group_key(keys):
    first, second = EXCLUDED, EXCLUDED
    for i in range(HELD):
        second = max(second, min(first, keys[i]))
        first = max(first, keys[i])
    first, second = two_largest(first, second)
    return order_key(key_as_float(first) + key_as_float(second))


@cuda.jit(device=True)
def keep_by_argmax(keys, lane):
    key, is_kept = group_key(keys), False
    for _ in range(KEPT):
        best, group = key, int32(lane // LANES)
        distance = LANES
        while distance < 32:
            other, other_group = cuda.shfl_xor_sync(FULL, best, distance), cuda.shfl_xor_sync(FULL, group, distance)
            if (other > best) | ((other == best) & (other_group < group)):
                best, group = other, other_group
            distance *= 2
        if group == lane // LANES:
            is_kept, key = True, EXCLUDED
    return is_kept


# %%
@cuda.jit(device=True)
def pick_by_shuffles(keys, lane):
    picked = int32(0)
    for k in range(TOPK):
        best, expert = keys[0], int32(lane * HELD)
        for i in range(1, HELD):
            if keys[i] > best:
                best, expert = keys[i], int32(lane * HELD + i)
        for s in range(5):
            other, other_expert = cuda.shfl_xor_sync(FULL, best, 1 << s), cuda.shfl_xor_sync(FULL, expert, 1 << s)
            if (other > best) | ((other == best) & (other_expert < expert)):
                best, expert = other, other_expert
        picked = expert if lane == k else picked
        for i in range(HELD):
            keys[i] = EXCLUDED if lane * HELD + i == expert else keys[i]
    return int32(picked // HELD), int32(picked % HELD)


@cuda.jit(device=True)
def load_again(logits, token, score, holder, position, lane):
    weight = float32(0)
    if lane < TOPK:  # lane k does not hold the score of the k-th expert, but it can load the logit
        weight = sigmoid(logits[token * EXPERTS + holder * HELD + position])
    return weight


@cuda.jit(device=True)
def in_order(place):  # an ordinary launch needs nothing
    pass


first = make_gate(keep_by_argmax, pick_by_shuffles, load_again, in_order), False
step("argmax by shuffles", first)

# %%
my_guess.judge(lesson.steps["argmax by shuffles"].score)

# %% [markdown]
# The simulator cannot time a kernel, but it knows the machine code, and how often each instruction is executed. From both it estimates what
# each resource would take if it were alone:

# %%
page.bounds(first)

# %% [markdown]
# The pipes, the caches and the issue slots of a scheduler are busy for a part of the time only. What takes the time is the **dependent
# chain**: the instructions of one warp, of which each waits for a result of another. A scheduler with sixteen warps would issue
# instructions of the others meanwhile. This one has a single warp, and waits.
#
# The *estimated time* is the launch, and after it the time of one CTA: its chain, or what keeps a pipe busy for longer. All CTAs run at the same
# time here, each on an SM of its own, so nothing else is added. (With many tokens, as in the lesson before, the pipes of an SM serve many CTAs,
# and their time exceeds the chain.)
#
# ## Where does the chain spend it?
#
# To see what a part takes, leave it out: fill its hole with something that takes no time. The results are wrong, of course.


# %%
@cuda.jit(device=True)
def keep_all(keys, lane):
    return True


@cuda.jit(device=True)
def pick_own(keys, lane):  # depends on the keys, so that the compiler cannot drop them
    return lane, int32(keys[0] & (HELD - 1))


@cuda.jit(device=True)
def weigh_own(logits, token, score, holder, position, lane):
    weight = float32(0)
    for i in range(HELD):
        weight += score[i]
    return weight


parts = page.parts(
    {
        "launch, loads, sigmoids, sum, stores": (make_gate(keep_all, pick_own, weigh_own, in_order), False),
        "groups": (make_gate(keep_by_argmax, pick_own, weigh_own, in_order), False),
        "picks": (make_gate(keep_by_argmax, pick_by_shuffles, weigh_own, in_order), False),
        "the second load": first,
    }
)

# %% [markdown]
# **Diagnose.** Which part adds most? Write one of the four names instead of `...` before you look at the table below.

# %%
exercises.largest_part.check(parts, ...)

# %%
page.show_parts(parts)

# %% [markdown]
# The picture shows why. A box is an exchange between lanes, or a load. Boxes of a column are under way together; each column waits for the
# one on its left:

# %%
draw.chains(["argmax by shuffles"])

# %% [markdown]
# **Take away.** With one warp per scheduler, time is the length of a chain. Do not count instructions; count columns.
#
# ## Build: how many groups are better?
#
# Four times "the best group" is a chain of twelve rounds. But a lane need not know which group is best. It must know whether its own group
# is among the best four, and that is so if fewer than four others are better. None of the comparisons with the others waits for another
# one.
#
# Lesson 01 counts with two shuffles and two votes. Here no exchange may wait for another one, however many there are.
#
# Write `better_groups`: `key` is the key of this lane's group, the same in its four lanes. Return how many groups have a larger key, or the
# same key and a lower number. Par: 7 shuffles, none of which waits for another.


# %%
@cuda.jit(device=True)
def my_better_groups(key, lane):
    return ...  # yours


better_groups = exercises.group_rank.use(my_better_groups)

# %% [markdown]
# ## Step 2: rank the groups by counting
#
# **Prediction.** Twelve rounds become one. A round takes at least the latency of a shuffle.


# %%
@cuda.jit(device=True)
def keep_by_counting(keys, lane):
    return better_groups(group_key(keys), lane) < KEPT


counted = make_gate(keep_by_counting, pick_by_shuffles, load_again, in_order), False
ROUNDS_FEWER = KEPT * (GROUPS - 1).bit_length() - 1
predicted_us = page.rounds_fewer("argmax by shuffles", ROUNDS_FEWER)
step("groups ranked by counting", counted, predicted_us=predicted_us)

# %%
say(
    "For each round that is gone the kernel takes {round:.0f} ns less, and a shuffle takes {shuffle:.0f}. A round is more than its shuffles: before "
    "the next round it compares keys and groups, and selects. The prediction left that out.",
    **page.saved_by_a_round("argmax by shuffles", "groups ranked by counting", ROUNDS_FEWER),
)

# %% [markdown]
# **Take away.** A maximum that is repeated n times is a chain of n links. To rank m candidates takes m comparisons each, which do not wait
# for one another. With few candidates, rank.
#
# (The package uses two shuffles and two votes instead of seven shuffles. The chain is as long, but with many tokens the instructions
# count.)
#
# ## Step 3: redux
#
# The picks remain: forty rounds. `redux.sync` returns the largest integer of a warp in one instruction. It returns the key, not the lane
# that holds it. A vote tells that: `ballot_sync` returns a mask of the lanes whose key is the largest, and its lowest bit is the lowest
# lane.
#
# What does a link take? Make a chain of many links in a kernel of one warp, and one twice as long. The difference is the links alone,
# without the launch:


# %%
@cuda.jit(device=True)
def five_shuffles(key):
    for s in range(5):
        key = max(key, cuda.shfl_xor_sync(FULL, key, 1 << s))
    return key


@cuda.jit(device=True)
def redux(key):
    return redux_sync_max_s32(uint32(FULL), key)


@cuda.jit(device=True)
def redux_and_vote(key):
    best = redux_sync_max_s32(uint32(FULL), key)
    return int32(cuda.ballot_sync(FULL, key == best))


@factory
def make_chain(link):
    @cuda.jit
    def chain(out, links):
        key = int32(cuda.threadIdx.x)
        for _ in range(links):
            key = int32(link(key) ^ cuda.threadIdx.x)  # the next link waits for this one
        out[cuda.threadIdx.x] = key

    return chain


page.show_chains(
    {
        "the maximum by five shuffles": make_chain(five_shuffles),
        "redux": make_chain(redux),
        "redux and a vote": make_chain(redux_and_vote),
    }
)


# %% [markdown]
# **Prediction.** If a redux and its vote took as long as one round of shuffles, one round of five would remain for each pick, and four would be
# gone. The table says how far that is true.


# %%
@cuda.jit(device=True)
def pick_by_redux(keys, lane):
    picked = int32(0)
    for k in range(TOPK):
        best, expert = keys[0], int32(lane * HELD)
        for i in range(1, HELD):
            if keys[i] > best:
                best, expert = keys[i], int32(lane * HELD + i)
        winner = redux_sync_max_s32(uint32(FULL), best)
        holder = int32(cuda.ffs(cuda.ballot_sync(FULL, best == winner)) - 1)
        expert = cuda.shfl_sync(FULL, expert, holder)
        picked = expert if lane == k else picked
        for i in range(HELD):
            keys[i] = EXCLUDED if lane * HELD + i == expert else keys[i]
    return int32(picked // HELD), int32(picked % HELD)


reduced = make_gate(keep_by_counting, pick_by_redux, load_again, in_order), False
step("redux", reduced, predicted_us=page.rounds_fewer("groups ranked by counting", 4 * TOPK))

# %% [markdown]
# **Take away.** Where integers will do, one warp-wide instruction replaces five rounds. That is what the integer keys are for.
#
# ## Step 4: sort once, then pop
#
# For each pick a lane looks through its eight keys again: seven comparisons that wait for one another, and then eight to take out the
# winner. If a lane sorts its keys once, its next candidate is always `queue[0]`, and taking it out moves the others up by one. The sorting
# network has six levels. Sorted keys have lost their experts, so `find` looks for the key among those of the lane that held it: eight
# shuffles that do not wait for one another.
#
# That search is right only if the lane holds the key just once. A lane that wins with one of two equal keys notices it, and then the warp picks
# again in the slow way of step 3.


# %%
@cuda.jit(device=True)
def find(keys, key, holder):
    position = int32(0)
    for i in range(HELD):
        held = cuda.shfl_sync(FULL, keys[i], holder)
        position = int32(i) if held == key else position
    return position


# %%
@cuda.jit(device=True)
def pop_lowest_lane(queue, lane):
    key, holder, is_tied = int32(0), int32(0), False
    for k in range(TOPK):
        best = redux_sync_max_s32(uint32(FULL), queue[0])
        lowest = int32(cuda.ffs(cuda.ballot_sync(FULL, queue[0] == best)) - 1)
        if lane == k:
            key, holder = best, lowest
        wins = lane == lowest
        is_tied = is_tied | (wins & (queue[1] == best))
        for i in range(HELD - 1):
            queue[i] = queue[i + 1] if wins else queue[i]
        queue[HELD - 1] = EXCLUDED if wins else queue[HELD - 1]
    return key, holder, is_tied


@factory
def make_pick(pop):
    @cuda.jit(device=True)
    def pick(keys, lane):
        queue = cuda.local.array(HELD, int32)
        for i in range(HELD):
            queue[i] = keys[i]
        sort_descending(queue)
        key, holder, is_tied = pop(queue, lane)  # <-- a hole: lane k receives the k-th key, and the lane that held it
        position = find(keys, key, holder)
        if cuda.any_sync(FULL, is_tied):
            holder, position = pick_by_redux(keys, lane)
        return holder, position

    return pick


popped = make_gate(keep_by_counting, make_pick(pop_lowest_lane), load_again, in_order), False
step("sort once, then pop", popped)

# %% [markdown]
# **Take away.** Do before the loop what the loop would repeat, and after it what need not be in it.
#
# ## Step 5: do not wait for the vote
#
# The next pick needs `queue[0]`, which needs `wins`, which needs the vote. But a lane whose key is the largest knows that it wins without
# asking the others. Only if two lanes hold the same key both go on, and one expert is lost. The votes show that, too. So each pick goes
# ahead, and the masks are looked at afterwards.
#
# **Prediction.** A vote and the search for its lowest bit leave the chain of each pick. They are executed while the next redux is under
# way.


# %%
@cuda.jit(device=True)
def pop_all(queue, lane):
    key, holders, is_tied = int32(0), uint32(0), False
    for k in range(TOPK):
        best = redux_sync_max_s32(uint32(FULL), queue[0])
        wins = queue[0] == best
        ballot = uint32(cuda.ballot_sync(FULL, wins))
        if lane == k:
            key, holders = best, ballot
        is_tied = is_tied | (uint32(ballot & uint32(ballot - uint32(1))) != uint32(0)) | (wins & (queue[1] == best))
        for i in range(HELD - 1):
            queue[i] = queue[i + 1] if wins else queue[i]
        queue[HELD - 1] = EXCLUDED if wins else queue[HELD - 1]
    return key, int32(cuda.ffs(holders) - 1), is_tied


pick_all = make_pick(pop_all)
unvoted = make_gate(keep_by_counting, pick_all, load_again, in_order), False
step("no vote in the chain", unvoted)

# %% [markdown]
# **Take away.** Go on with what is almost always right, and check it beside the chain. That pays if the other case is rare and can be
# repaired.
#
# **Break.** How rare is it? Here is the kernel that never looks for ties. Find a row of 256 **different** logits that it routes wrongly.
# The bias is zero for all experts.


# %%
@cuda.jit(device=True)
def pop_unchecked(queue, lane):
    key, holder, _ = pop_all(queue, lane)
    return key, holder, False


unchecked = make_gate(keep_by_counting, make_pick(pop_unchecked), load_again, in_order), False
my_logits = None  # yours: 256 numbers, such as torch.randn(256)
exercises.lost_pick.check(unchecked, my_logits)

# %% [markdown]
# What do ties cost? A row of equal logits takes the slow way, in step 4 as well. The first column has random logits, as the steps have:

# %%
page.show_ties({"sort once, then pop": popped, "no vote in the chain": unvoted})

# %% [markdown]
# ## Step 6: no second load
#
# Lane k knows the k-th expert, and loads its logit again for the weight. At the end of the chain it computes an address, waits for a load,
# if only from the L1 cache, and computes a sigmoid for the second time. The lane that holds the expert has the score in a register:


# %%
@cuda.jit(device=True)
def take_score(logits, token, score, holder, position, lane):
    weight = float32(0)
    for i in range(HELD):
        held = cuda.shfl_sync(FULL, score[i], holder)
        weight = held if position == i else weight
    return weight


held = make_gate(keep_by_counting, pick_all, take_score, in_order), False
step("no second load", held)

# %% [markdown]
# The eight shuffles need only `holder`, which is known as soon as the last pick is. So they are under way together with those of `find`.
# The warp executes more instructions, and its chain is a little shorter.
#
# **Take away.** A register of another lane is nearer than any cache.
#
# ## Start while the kernel before runs
#
# The launch is a link of the chain, too: the CTAs of the gate start when the router's GEMM has ended. With programmatic dependent
# launch, which the lesson before tries in step 11, they may start earlier:

# %%
draw.overlap()

# %% [markdown]
# Two instructions say what may overlap. `griddepcontrol.wait` waits until the kernel before has ended and its stores are visible. Before
# it, a kernel must not access anything that the kernel before writes. `griddepcontrol.launch_dependents` lets the **next** kernel start, as
# soon as each CTA has executed it or ended; without it, when all CTAs have ended.
#
# So the wait belongs before the first load of logits. What about the bias? No kernel writes it during decode, so it could be loaded before
# the wait. But the loads of logits and bias are under way together anyway, so that gains nothing; and in training the kernel before may
# write the bias. The package waits first.
#
# (Our loads are `ld.global.nc`, which PTX promises only for data that no kernel writes meanwhile. That holds: the kernel before may still run when
# this one starts, but after the wait all its stores are visible, before our first load.)
#
# ## Step 7: a dependent launch
#
# The safe choice: wait at the start, and let the next kernel start when everything is stored.
#
# **Prediction.** The step saves what a dependent launch saves of an empty kernel.


# %%
@cuda.jit(device=True)
def release_at_the_end(place):
    if place == START:
        griddepcontrol_wait()
    if place == STORED:
        griddepcontrol_launch_dependents()


late = make_gate(keep_by_counting, pick_all, take_score, release_at_the_end), True
step("dependent launch", late, predicted_us=page.dependent_launch("no second load"))

# %% [markdown]
# An empty kernel is not all that overlaps. Before it waits, this kernel also loads its parameters and computes its indices, and the warps of an
# ordinary launch do that only when the kernel before has ended. If that is what the prediction lacks, then a kernel that has no groups and no
# picks, and only launches, loads, computes sigmoids and stores, must save as much as the whole gate:

# %%
short = make_gate(keep_all, pick_own, weigh_own, in_order), False
short_late = make_gate(keep_all, pick_own, weigh_own, release_at_the_end), True
launches = page.dependent_launches({"no groups, no picks": (short, short_late), "the whole gate": (held, late)})
page.show_dependent_launches(launches)

# %%
say("{conclusion}", conclusion=page.conclude_from_launches(launches))

# %% [markdown]
# ## Build: release early
#
# Write `order`. The kernel calls it at `START`, before the first load; at `LOADED`, after the loads in the source; and at `STORED`. Let the
# next kernel start as early as you can. The check runs three kernels, all of them dependent launches: a router that writes the logits and
# reads counters of the layer before; a gate with your function; and an alignment, which clears those counters before it waits, and then
# reads the ids.


# %%
@cuda.jit(device=True)
def my_order(place):
    pass  # yours


order = exercises.dependent.use(my_order)

# %% [markdown]
# ## Step 8: released after the wait
#
# The next kernel waits for the end of this one by itself. So once this kernel has waited, nothing forbids that the next one starts, and its
# start is hidden by our loads and picks.


# %%
last = make_gate(keep_by_counting, pick_all, take_score, order), True
step("released after the wait", last)

# %% [markdown]
# The model knows only that a dependent launch starts faster. It does not know that the next one starts during this one, so it shows no
# gain.
#
# **Take away.** In a kernel of a microsecond the launch is one of the longest links. Let the next kernel start while you compute, and ask
# of each access whether it may come before the wait.
#
# Here is the whole kernel, as it is now:

# %%
page.listing(last)

# %% [markdown]
# The package's kernel is [one_token_per_warp.py](../moe_numba/gate/one_token_per_warp.py). Its chain is the same. It also takes 16-bit
# logits, NaN, other numbers of experts, shared experts and padding. And it goes ahead with one thing more: it stores what it has picked before
# it knows whether keys were equal, and if they were, it picks and stores again. So not even the branch to the slow way is in the chain.
#
# ## Without a bias: a key that holds the expert
#
# Qwen3 and gpt-oss have neither groups nor a bias, and their scores are a softmax, which rises with the logit. So we can rank the logits
# themselves. They have 16 bits, and a register has 32.
#
# **Build.** Write `best_of_warp`: `value` is an integer from -32768 to 32767, `expert` one from 0 to 65535. Return the warp's largest value
# and its expert; of equal values that with the lower expert. Par: one `redux`, no shuffle, no vote.


# %%
@cuda.jit(device=True)
def my_best_of_warp(value, expert):
    return ...  # yours: two integers


best_of_warp = exercises.packed.use(my_best_of_warp)

# %% [markdown]
# A key of this kind holds everything about the winner: no lane must be found, no place in it, no score, and no two keys are equal. Here is
# the whole gate, with a hole for the picks:


# %%
SMALL_EXPERTS, SMALL_TOPK, SMALL_HELD = page.SMALL_EXPERTS, page.SMALL_TOPK, page.SMALL_HELD


@factory
def make_small_gate(pick):
    @cuda.jit
    def small_gate(logits, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x & 31)
        token = int32(cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5))
        values = cuda.local.array(SMALL_HELD, int32)
        griddepcontrol_wait()
        if token < tokens:
            words = load_nc_u32x2(logits, token * SMALL_EXPERTS + lane * SMALL_HELD)  # four bfloat16 logits
            griddepcontrol_launch_dependents()
            for w in range(2):
                pair = sortable_pair(add_rn_bf16x2(words[w], uint32(0)))  # + 0.0 makes 0.0 of -0.0
                values[2 * w] = int32(uint32(pair << uint32(16))) >> 16
                values[2 * w + 1] = int32(pair) >> 16
            value, expert = pick(values, lane)  # <-- a hole: for lane k the k-th value, and its expert
            sixteen = value ^ ((value >> 31) & 0x7FFF)  # the upper half of a float32, as a bfloat16 is
            bits = uint32(uint32(sixteen) << uint32(16))
            logit = uint_as_float(bits)
            largest = cuda.shfl_sync(FULL, logit, 0)
            total = weight = ex2_approx((logit - largest) * LOG2_E) if lane < SMALL_TOPK else float32(0)
            for s in range(3):
                total += cuda.shfl_xor_sync(FULL, total, 1 << s)
            if lane < SMALL_TOPK:
                weights[token * SMALL_TOPK + lane] = weight * rcp_approx(total)
                ids[token * SMALL_TOPK + lane] = int32(expert)

    return small_gate


# %%
@cuda.jit(device=True)
def pick_with_best_of_warp(values, lane):
    picked_value, picked_expert = int32(0), int32(0)
    for k in range(SMALL_TOPK):
        value, place = values[0], int32(0)
        for i in range(1, SMALL_HELD):
            if values[i] > value:
                value, place = values[i], int32(i)
        value, expert = best_of_warp(value, int32(lane * SMALL_HELD + place))
        if lane == k:
            picked_value, picked_expert = int32(value), int32(expert)
        for i in range(SMALL_HELD):  # no number is as low as -32768
            values[i] = int32(-32768) if lane * SMALL_HELD + i == expert else values[i]
    return picked_value, picked_expert


# %% [markdown]
# And as in step 4: pack once, sort once, then pop.


# %%
@cuda.jit(device=True)
def pop_packed(values, lane):
    keys = cuda.local.array(SMALL_HELD, int32)
    for i in range(SMALL_HELD):
        keys[i] = int32(uint32(uint32(values[i]) << uint32(16)) | uint32(0xFFFF - lane * SMALL_HELD - i))
    sort_small(keys)
    picked = int32(0)
    for k in range(SMALL_TOPK):
        best = redux_sync_max_s32(uint32(FULL), keys[0])
        picked = best if lane == k else picked
        wins = keys[0] == best
        for i in range(SMALL_HELD - 1):
            keys[i] = keys[i + 1] if wins else keys[i]
        keys[SMALL_HELD - 1] = EXCLUDED if wins else keys[SMALL_HELD - 1]
    return int32(picked >> 16), int32(0xFFFF - (picked & 0xFFFF))


page.show_small(
    {"best_of_warp": make_small_gate(pick_with_best_of_warp), "packed and sorted once": make_small_gate(pop_packed)}
)

# %%
say(
    "The package's kernel in this form is [packed_keys.py](../moe_numba/gate/packed_keys.py). It also takes NaN, padding and other sizes, "
    "which the kernels of this page do not. With {tokens:.0f} tokens it takes {packed:.2f} us, and the package's kernel whose keys do not hold the expert "
    "takes {places:.2f} us. Packed keys were written for many tokens, of which up to sixteen share a warp. (The table of other projects' kernels below has the time of the "
    "package's public function, which chooses a kernel by the number of tokens.)",
    tokens=page.TOKENS,
    **page.small_numbers(),
)

# %% [markdown]
# **Take away.** If a key holds all that you will ask of the winner, there is nothing to look up afterwards.
#
# ## Variants of the last step
#
# Two of them release the next kernel elsewhere, two change how many warps share an SM, and four tokens per warp is what makes the kernel for
# prompts fast. On a GPU this cell times them. Compare the columns, too: what is best for 64 tokens need not be best for one.


# %%
@cuda.jit(device=True)
def release_after_the_loads(place):
    if place == START:
        griddepcontrol_wait()
    if place == LOADED:
        griddepcontrol_launch_dependents()


@cuda.jit(device=True)
def release_before_the_wait(place):
    if place == START:
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()


page.show_variants(
    last,
    {
        "released after the loads": (make_gate(keep_by_counting, pick_all, take_score, release_after_the_loads), True),
        "released before the wait": (make_gate(keep_by_counting, pick_all, take_score, release_before_the_wait), True),
        "one warp per CTA": (make_gate(keep_by_counting, pick_all, take_score, order, 1), True, 1),
        "eight warps per CTA": (make_gate(keep_by_counting, pick_all, take_score, order, 8), True, 8),
    },
)

# %% [markdown]
# ## All steps

# %%
lesson.save()
lesson.summary()

# %%
draw.chains()

# %% [markdown]
# Other projects' kernels, and this package's at the time of the record, for 1 and 64 tokens. Folded below it are shapes of other models:

# %%
page.show_peers()

# %% [markdown]
# **You can now** find the chain of a kernel that is too small to fill the GPU, take it apart link by link, and let two kernels overlap without a race.
#
# ## Next step, not built
#
# Eight picks are eight links, because each waits for the one before. One can **merge** instead: two lanes with sorted queues of eight keep
# the best eight of both, and after five such rounds each lane has the eight best of all. Five rounds instead of eight, but each has eight
# shuffles and a bitonic merge of three levels. **Build** it: fill the hole `pick`, and beat the last step. A lower bound is a dependent
# launch of an empty kernel, one load, and the three rounds of the sum:

# %%
print(page.last_bound())

# %% [markdown]
# ## Sources
#
# - The kernel that the gate lessons start from: [sglang PR 4530](https://github.com/sgl-project/sglang/pull/4530). FlashInfer's `fused_topk_deepseek` replaced it
#   ([PR 15347](https://github.com/sgl-project/sglang/pull/15347)), and then SGLang's Triton router ([PR 29771](https://github.com/sgl-project/sglang/pull/29771)).
# - NVIDIA: *CUDA C++ Programming Guide*, programmatic dependent launch; *PTX ISA*, `redux.sync` and `griddepcontrol`.
# - K. E. Batcher, *Sorting networks and their applications*, 1968.
# - We compare [the article's claims](../docs/claims.md#gate) with our measurements.
#
# Before: [01, the gate for a prompt](01_gate_prompt.ipynb). Next: [03, alignment as published](03_align_published.ipynb), which sorts the tokens by the experts
# that were chosen here.
