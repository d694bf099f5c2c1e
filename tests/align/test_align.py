"""Test the alignment against its reference, on a GPU or in the simulator, and the checker against wrong kernels."""

import contextlib
import importlib
import inspect
import itertools
import random
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_numba
from moe_numba import moe_align_block_size, simulator
from moe_numba.align import api, counting_sort, large, medium, reference
from moe_numba.align.reference import mismatch, sizes
from moe_numba.runtime import workspace as workspaces

POISON = -12345
ALL_IDS = (torch.uint8, torch.int16, torch.int32, torch.int64)
LIMITS = "FEW_SLOTS", "SMALL_MAX_SLOTS", "MEDIUM_MAX_SLOTS", "LARGE_MAX_SLOTS"
KERNELS = {  # which kernel: the limits that lead to it, for all sizes that it supports
    "default": tuple(getattr(api, limit) for limit in LIMITS),
    "small": (range(0), 32, 1 << 31, 0),
    "few": (range(513), 0, 1 << 31, 0),
    "medium": (range(0), 0, 1 << 31, 0),
    "large": (range(0), 0, 0, 1 << 31),  # as far as it goes: the counting sort beyond
    "counting_sort": (range(0), 0, 0, 0),
}
MAX_FORCED_MEDIUM_SLOTS = 65535  # upper limit of the medium kernel when forced; lower for more than 285 experts


def poisoned(lengths, device, shift=0):
    """Return views into one poisoned buffer, ``shift`` elements past 16-byte boundaries, and the gaps around them."""
    starts, end = [], 8
    for length in lengths:
        starts.append(-(-end // 4) * 4 + shift)
        end = starts[-1] + length + 8
    buffer = torch.full((end,), POISON, dtype=torch.int32, device=device)
    edges = zip([0, *(s + n for s, n in zip(starts, lengths))], [*starts, end])
    return tuple(buffer[s : s + n] for s, n in zip(starts, lengths)), [buffer[a:b] for a, b in edges]


def align(
    topk_ids, block_size, num_experts, expert_map=None, longer=0, shift=0, function=moe_align_block_size, **options
):
    """Call the public function on poisoned outputs, and check that it does not write outside of them."""
    length, blocks = sizes(topk_ids.numel(), block_size, num_experts, **options)
    out, around = poisoned((length + longer, blocks + longer, 1), topk_ids.device, shift)
    function(topk_ids, block_size, num_experts, expert_map, out=out, **options)
    assert (torch.cat(around) == POISON).all(), "out-of-bounds write"
    return out


def check(topk_ids, block_size, num_experts, expert_map=None, longer=0, shift=0, **options):
    out = align(topk_ids, block_size, num_experts, expert_map, longer, shift, **options)
    wrong = mismatch(*out, topk_ids, block_size, num_experts, expert_map=expert_map, **options)
    assert wrong is None, f"{tuple(topk_ids.shape)} ids, block {block_size}, {num_experts} experts, {options}: {wrong}"


def make_ids(tokens, topk, experts, device, dtype=torch.int32, invalid=0.0, seed=0):
    """Random ids, a fraction ``invalid`` of which is -1."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (tokens, topk), generator=rng)
    return ids.masked_fill(torch.rand(ids.shape, generator=rng) < invalid, -1).to(device, dtype)


def make_map(experts, device, seed=0):
    """An expert map with about half of the experts on this rank."""
    is_local = torch.rand(experts, generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where(is_local, is_local.cumsum(0) - 1, -1).to(device, torch.int32)


def force(which, patch, where=api):
    """Force a kernel: all but the small one, and that for few slots, are correct for the sizes used here."""
    for name, value in zip(LIMITS, KERNELS[which], strict=True):
        patch.setattr(where, name, value)


@pytest.fixture(params=["few", "medium", "large", "counting_sort"])
def each_kernel(request, monkeypatch):
    force(request.param, monkeypatch)
    return request.param


# The reference against plain Python and against values computed by hand

# Twelve slots, five experts, blocks of four: one id is -1 and one too large, expert 2 needs two blocks, expert 3 none.
IDS, BLOCK_SIZE, EXPERTS = [[2, 0], [2, 1], [0, 2], [2, 4], [-1, 1], [2, 9]], 4, 5
SORTED = [8, 11, 12, 12, 1, 4, 12, 12, 3, 9, 12, 12, 0, 2, 5, 6, 10, 12, 12, 12, 7, 12, 12, 12]


def align_lists(ids, block_size, num_experts, expert_map=None, ignore_invalid_experts=False):
    """Align with lists and a dict; return (sorted_token_ids, expert_ids) without the tails."""
    runs = {}
    for slot, expert in enumerate(ids):
        bucket = expert if 0 <= expert < num_experts else -1
        is_ignored = bucket == -1 or (expert_map is not None and expert_map[expert] == -1)
        if not (ignore_invalid_experts and is_ignored):
            runs.setdefault(bucket, []).append(slot)
    sorted_ids, expert_ids = [], []
    for bucket, run in sorted(runs.items()):
        blocks = -(-len(run) // block_size)
        sorted_ids += run + [len(ids)] * (blocks * block_size - len(run))
        expert_ids += blocks * [bucket if bucket == -1 or expert_map is None else expert_map[bucket]]
    return sorted_ids, expert_ids


@st.composite
def calls(draw):
    """Draw ids, some of them invalid, and the other arguments."""
    experts = draw(st.integers(1, 12))
    invalid_ids = st.sampled_from([-1, -7, experts, experts + 5, 2**31 - 1, -(2**31)])
    ids = draw(st.lists(st.one_of(st.integers(0, experts - 1), invalid_ids), max_size=60))
    local = st.one_of(st.just(-1), st.integers(0, 20))
    options = dict(
        expert_map=draw(st.none() | st.lists(local, min_size=experts, max_size=experts)),
        ignore_invalid_experts=draw(st.booleans()),
    )
    return ids, draw(st.integers(1, 9)), experts, options, draw(st.booleans())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(calls())
def test_reference_against_lists(call):
    """Also checks that the lengths of :func:`sizes` suffice."""
    ids, block_size, experts, options, pad = call
    sorted_ids, expert_ids = align_lists(ids, block_size, experts, **options)
    if options["expert_map"] is not None:
        options["expert_map"] = torch.tensor(options["expert_map"], dtype=torch.int32)
    out = reference.moe_align_block_size(torch.tensor(ids).int(), block_size, experts, pad_sorted_ids=pad, **options)
    length, blocks = sizes(len(ids), block_size, experts, pad, options["ignore_invalid_experts"])
    assert len(sorted_ids) <= length and len(expert_ids) <= blocks
    assert out[0].tolist() == sorted_ids + [len(ids)] * (length - len(sorted_ids))
    assert out[1].tolist() == expert_ids + [-1] * (blocks - len(expert_ids))
    assert out[2].tolist() == [len(sorted_ids)] and {tensor.dtype for tensor in out} == {torch.int32}


def test_reference_by_hand():
    out = reference.moe_align_block_size(torch.tensor(IDS), BLOCK_SIZE, EXPERTS)
    assert [tensor.tolist() for tensor in out] == [SORTED + [12] * 8, [-1, 0, 1, 2, 2, 4, -1, -1], [24]]
    expert_map = torch.tensor([-1, 0, 1, -1, 2])
    options = dict(expert_map=expert_map, ignore_invalid_experts=True, pad_sorted_ids=False)
    out = reference.moe_align_block_size(torch.tensor(IDS), BLOCK_SIZE, EXPERTS, **options)
    assert [tensor.tolist() for tensor in out] == [SORTED[8:] + [12] * 11, [0, 1, 1, 2, -1, -1, -1], [16]]


def test_sizes():
    assert sizes(8, 128, 256) == (8 * 128, 8)  # the article's example, which allocated 32520 elements
    assert sizes(0, 16, 8) == (0, 0)
    assert sizes(1000, 16, 8) == (1136, 71) and sizes(1000, 16, 8, pad_sorted_ids=False) == (1135, 71)
    assert sizes(1000, 16, 8, ignore_invalid_experts=True) == (1120, 70)
    for experts, block_size in itertools.product((1, 5, 64), (1, 4, 16)):  # the bound is tight
        ids = torch.arange(-1, experts)
        for few in (ids, ids[1:], ids[:1]):
            out = reference.moe_align_block_size(few, block_size, experts)
            assert len(out[0]) == int(out[2]) == len(few) * block_size and len(out[1]) == len(few)


# The checker must reject wrong outputs.

TAIL, ORDER = {"any_tail"}, {"any_order"}
CORRUPTIONS = {  # name: (output, {position: new value}, options that allow it)
    "two slots of one expert swapped": (0, {12: 2, 13: 0}, ORDER),
    "slots of two experts swapped": (0, {4: 3, 8: 1}, set()),
    "a slot twice": (0, {13: 0}, set()),
    "a slot missing": (0, {15: 12}, set()),
    "a slot in the padding too": (0, {6: 1}, set()),
    "padding before a slot": (0, {16: 12, 17: 10}, set()),
    "padding too large": (0, {6: 13}, set()),
    "an unwritten slot": (0, {12: POISON}, set()),
    "a wrong expert": (1, {2: 2}, set()),
    "an expert too high": (1, {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 5}, set()),
    "no expert": (1, {5: -1}, set()),
    "an expert for invalid ids": (1, {0: 0}, set()),
    "the total not padded": (2, {0: 12}, set()),
    "a block more": (2, {0: 28}, set()),
    "a block less": (2, {0: 20}, set()),
    "a slot in the tail": (0, {24: 7}, TAIL),
    "the tail unwritten": (0, {31: POISON}, TAIL),
    "the tail beyond what is needed unwritten": (0, {34: POISON}, TAIL),
    "an expert in the tail": (1, {6: 0}, TAIL),
    "the tail of the experts unwritten": (1, {7: POISON}, TAIL),
    "the experts' tail beyond what is needed unwritten": (1, {10: POISON}, TAIL),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_checker_rejects_wrong_outputs(case, device):
    which, values, allowed_by = CORRUPTIONS[case]
    ids = torch.tensor(IDS, device=device)
    out = align(ids, BLOCK_SIZE, EXPERTS, longer=3)
    assert mismatch(*out, ids, BLOCK_SIZE, EXPERTS) is None
    for position, value in values.items():
        assert out[which][position] != value
        out[which][position] = value
    for tolerance in (set(), ORDER, TAIL, ORDER | TAIL):
        wrong = mismatch(*out, ids, BLOCK_SIZE, EXPERTS, **dict.fromkeys(tolerance, True))
        assert (wrong is None) == bool(allowed_by & tolerance), f"{tolerance}: {wrong}"


def test_checker_rejects_wrong_dtypes_and_shapes(device):
    ids = torch.tensor(IDS, device=device)
    out = align(ids, BLOCK_SIZE, EXPERTS)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad")
    for i, change in itertools.product(range(3), (torch.Tensor.long, lambda t: t[:-1], lambda t: t[None])):
        corrupted = [change(tensor) if i == j else tensor for j, tensor in enumerate(out)]
        assert mismatch(*corrupted, ids, BLOCK_SIZE, EXPERTS).startswith(names[i])


# Each kernel on small inputs

BLOCKS, TOKENS, TOPKS, NUM_EXPERTS = (1, 3, 4, 16, 64, 128), (0, 1, 2, 7, 33), (1, 2, 8), (1, 2, 8, 64, 100, 257)
GRID = list(itertools.product(BLOCKS, TOKENS, TOPKS, NUM_EXPERTS, ALL_IDS, (True, False)))
SAMPLE = random.Random(0).sample(GRID, 30)
LARGE = [(16, 33, 8, 1025, torch.int32, True), (4, 7, 8, 8192, torch.int32, True)]
EDGES = [(4, 20, 8, experts, torch.int32, True) for experts in (93, 94, 285, 286, 541, 542)]  # around the capacities


@pytest.mark.parametrize("case", SAMPLE + LARGE + EDGES, ids=str)
def test_shapes(case, device, each_kernel):
    block_size, tokens, topk, experts, dtype, pad = case
    skip_if_too_many(experts)
    check(make_ids(tokens, topk, experts, device, dtype, invalid=0.1), block_size, experts, pad_sorted_ids=pad)


def skip_if_too_many(experts):
    """Skip what needs more shared memory than older GPUs have, with more than 1024 slots."""
    if experts > {64 << 10: 2077, 99 << 10: 2077, 163 << 10: 4125}.get(api.devices.gpu_of(0).shared_bytes, experts):
        pytest.skip(f"{experts} experts need more shared memory")


def test_sample_covers_every_size():
    assert [set(column) for column in zip(*SAMPLE)] == [set(column) for column in zip(*GRID)]


@pytest.mark.parametrize("block_size", [1, 16])
def test_skewed_routings(block_size, device, each_kernel):
    for experts, ids in (
        (64, torch.full((33, 8), 37)),  # all slots to one expert
        (257, torch.arange(256, -1, -1)),  # one slot per expert
        (100, torch.arange(90) % 2 * 99),  # only the first and the last expert
    ):
        check(ids.int().to(device), block_size, experts)


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_invalid_ids(dtype, ignore, device, each_kernel):
    experts, invalid_ids = 12, [-1, 12, 17, -7, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:  # truncated to 32 bits these would be experts 0, 3, 11 and -1
        invalid_ids += [2**40, 2**32 + 3, -(2**32) + 11, 2**32 - 1, 2**63 - 1, -(2**63)]
    ids = make_ids(40, 2, experts, device, dtype, seed=1)
    ids.view(-1)[: 6 * len(invalid_ids) : 6] = torch.tensor(invalid_ids, device=device)
    check(ids, 4, experts, ignore_invalid_experts=ignore)
    check(torch.tensor(invalid_ids, dtype=dtype, device=device), 4, experts, ignore_invalid_experts=ignore)
    for share in (0.3, 1.0):
        check(make_ids(33, 8, 100, device, dtype, share), 16, 100, ignore_invalid_experts=ignore)


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("experts", [1, 8, 256])
def test_expert_map(experts, ignore, device, each_kernel):
    for expert_map in (
        make_map(experts, device),
        make_map(experts, device).long(),
        make_map(experts, device).clamp(max=-1),
    ):
        check(
            make_ids(9, 8, experts, device, invalid=0.1),
            4,
            experts,
            expert_map=expert_map,
            ignore_invalid_experts=ignore,
        )


@pytest.mark.parametrize("ignore", [False, True])
def test_an_expert_map_that_int32_cannot_hold(ignore, device, each_kernel, monkeypatch):
    """Truncated to 32 bits, the first five would be 1, -2**31, 0, 3 and -1."""
    monkeypatch.setattr(api, "check_local_ids", lambda expert_map: None)  # a GPU does not check values
    expert_map = torch.tensor([2**32 + 1, 2**31, -(2**40), 3 - 2**32, 2**63 - 1, 7, -1, 2**31 - 1], device=device)
    expected = [[-1] * 5 + [7, -1, 2**31 - 1], [7, 2**31 - 1] + [-1] * 6][ignore]
    options = dict(expert_map=expert_map, ignore_invalid_experts=ignore)
    check(torch.arange(8, dtype=torch.int32, device=device), 1, 8, **options)
    assert moe_align_block_size(torch.arange(8, device=device), 1, 8, **options)[1].tolist() == expected


def test_any_shape(device, each_kernel):
    ids = make_ids(12, 6, 10, device)
    wide = make_ids(12, 13, 10, device)
    for shaped in (ids.view(-1), ids.view(3, 4, 6), ids[3, 2], ids.T, wide[:, ::2], ids[:, :1].expand(12, 4)):
        check(shaped, 4, 10)


@pytest.mark.parametrize("shift, longer", [(1, 0), (2, 5), (3, 1), (0, 3)])
def test_unaligned_and_longer_outputs(shift, longer, device, each_kernel):
    """Outputs may be unaligned views; elements beyond the needed length are tail."""
    for block_size, tokens in ((16, 7), (3, 7), (4, 0)):
        ids = make_ids(tokens, 8, 32, device, invalid=0.1)
        check(ids, block_size, 32, longer=longer, shift=shift, ignore_invalid_experts=tokens == 7)
        check(poisoned([ids.numel()], device, shift)[0][0].copy_(ids.view(-1)), block_size, 32, longer=longer)


def test_allocated_outputs(device, each_kernel):
    """In deterministic mode torch fills new tensors with the largest value."""
    for tokens, flag in itertools.product((0, 9), (False, True)):
        ids, options = (
            make_ids(tokens, 8, 32, device, invalid=0.1),
            dict(pad_sorted_ids=flag, ignore_invalid_experts=flag),
        )
        torch.use_deterministic_algorithms(True)
        try:
            out = moe_align_block_size(ids, 16, 32, **options)
        finally:
            torch.use_deterministic_algorithms(False)
        expected = reference.moe_align_block_size(ids, 16, 32, **options)
        assert all(torch.equal(a, b) and a.device == ids.device for a, b in zip(out, expected, strict=True))


@pytest.mark.parametrize("seed, preempt", [(0, 0), (1, 0), (2, 0), (3, 0.02)])
def test_thread_orders(seed, preempt, device, each_kernel):
    for tokens, experts in ((160, 100), (33, 64)):  # the first has several CTAs with several tiles each
        with simulator.seed(seed, preempt=preempt):
            check(make_ids(tokens, 8, experts, device, invalid=0.1, seed=seed), 4, experts)


@pytest.mark.skipif(not simulator.ENABLED, reason="weak memory is the simulator's")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("which", ["large", "counting_sort"])
def test_counts_are_published_with_their_launch_number(which, seed, device, monkeypatch):
    """Other CTAs may see two stores in either order."""
    force(which, monkeypatch)
    with simulator.seed(seed), simulator.weak_memory():
        for again in range(2):
            check(make_ids(80, 8, 100, device, invalid=0.1, seed=again), 4, 100)


def test_a_new_workspace_is_zeroed(device):
    """In deterministic mode torch fills other new tensors."""
    torch.use_deterministic_algorithms(True)
    try:
        assert not workspaces.workspace(0, 1 << 10).any()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ALL_IDS)
def test_id_types_of_the_small_kernel(dtype, device):
    ids = torch.tensor([3, 200, 7, 3, 0, 255, 6], device=device).to(dtype)
    check(ids, 4, 8)
    check(ids, 4, 255, expert_map=make_map(255, device), ignore_invalid_experts=True)


# Beyond the limits of 32-bit row numbers and shared memory


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("tokens, experts", [(0, 8), (1, 8), (20, 100), (100, 64), (9, 1025)])
def test_64_bit_row_numbers(tokens, experts, dtype, device, monkeypatch):
    monkeypatch.setattr(api, "MAX_NARROW_ELEMENTS", 100)
    made, make = [], counting_sort.make_counting_sort_kernel
    monkeypatch.setattr(
        counting_sort, "make_counting_sort_kernel", lambda *config: made.append(config) or make(*config)
    )
    ids = make_ids(tokens, 8, experts, device, dtype, invalid=0.1)
    check(ids, 4, experts, longer=101)
    check(ids, 4, experts, expert_map=make_map(experts, device), ignore_invalid_experts=True, longer=101)
    assert [config[-1] for config in made] == [True, True]


@pytest.mark.parametrize("which", ["large", "counting_sort"])
def test_tiles_of_8192_slots(which, device, monkeypatch):
    """A slot's index in its tile takes the 13 bits below its bucket; more than 4096 slots need all of them."""
    monkeypatch.setattr(api, "_LARGE_CONFIGS", (api.LargeConfig(512, 16, 1),))
    monkeypatch.setattr(counting_sort, "_CONFIGS", (counting_sort.SortConfig(512, 16, 1),))
    force(which, monkeypatch)
    check(make_ids(4104, 1, 8, device), 16, 8)


@pytest.mark.parametrize("sms", [128, 3])
@pytest.mark.parametrize("numel", [0, 1, 20_000, 32_768, 262_144, 262_145, 8_323_073, (1 << 31) - 1])
def test_grids(numel, sms, device, monkeypatch):
    """Each CTA has slots, no more than its kernel takes, and all CTAs are resident."""
    monkeypatch.setattr(api, "_LARGE_CONFIGS", (api.LargeConfig(512, 8, 128),))
    monkeypatch.setattr(counting_sort, "_CONFIGS", (counting_sort.SortConfig(512, 8, 128),))
    plan = api.AlignPlan(torch.zeros(1, dtype=torch.int32, device=device), 16, 256, None, False)
    plan.max_large_ctas, plan.sort_config = sms, plan.sort_config._replace(max_ctas=sms)
    monkeypatch.setattr(plan, "_cached", lambda compile_kernel, config: config)
    assert plan._is_large(numel) == (numel <= min(1 << 18, sms * 4096))
    grids = [plan._counting_sort(numel, False)] + ([plan._large(numel)] if plan._is_large(numel) else [])
    for config, ctas, threads, slots_per_cta, words in grids:
        assert (ctas - 1) * slots_per_cta < max(numel, 1) and numel <= ctas * slots_per_cta and ctas <= sms
        assert slots_per_cta % threads == 0 and words >= 4 + ctas * plan.capacity
        assert config is False or slots_per_cta <= 4096


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("experts", [8193, 1_000_000])
@pytest.mark.parametrize("num_slots", [0, 1, 32, 33, 64, 100])
def test_any_number_of_experts_for_few_slots(num_slots, experts, ignore, device):
    ids = make_ids(num_slots, 1, experts, device, invalid=0.1, seed=num_slots)
    ids[: num_slots // 2] = ids[num_slots // 2 : num_slots // 2 * 2]  # experts with several slots
    check(ids, 4, experts, ignore_invalid_experts=ignore, longer=3)
    check(ids, 1, experts, expert_map=make_map(experts, device), ignore_invalid_experts=ignore, shift=1)


def test_most_experts(device):
    """As the reference would need memory for a billion experts, compare with lists."""
    experts = (1 << 30) - 1
    ids = [experts - 1, 0, experts, experts - 1, -1] * 8
    out = moe_align_block_size(torch.tensor(ids, device=device), 4, experts)
    expected_ids, expected_experts = align_lists(ids, 4, experts)
    assert out[0].tolist()[: len(expected_ids)] == expected_ids and int(out[2]) == len(expected_ids)
    assert out[1].tolist()[: len(expected_experts)] == expected_experts


@pytest.mark.parametrize("slots", [1, 7, 8, 9, 31, 32, 33])
def test_small_kernel(slots, device):
    for experts, block_size, invalid in ((1, 3, 0.5), (5, 1, 0.2), (542, 16, 0.0), (600, 64, 0.2)):
        ids, expert_map = make_ids(slots, 1, experts, device, invalid=invalid, seed=slots), make_map(experts, device)
        check(ids, block_size, experts, longer=slots % 3)
        check(ids, block_size, experts, expert_map=expert_map, shift=slots % 4, ignore_invalid_experts=True)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(calls(), st.sampled_from(list(KERNELS)), st.integers(0, 3), st.integers(0, 4))
def test_against_the_reference(call, which, shift, longer):
    device = "cpu" if simulator.ENABLED else "cuda"
    ids, block_size, experts, options, pad = call
    if options["expert_map"] is not None:
        options["expert_map"] = torch.tensor(options["expert_map"], dtype=torch.int32, device=device)
    with pytest.MonkeyPatch.context() as patch:
        force(which, patch)
        patch.setattr(api, "check_local_ids", lambda expert_map: None)  # a GPU does not check values
        ids = torch.tensor(ids, dtype=torch.int32, device=device)
        check(ids, block_size, experts, longer=longer, shift=shift, pad_sorted_ids=pad, **options)


def test_numpy_and_cupy_arrays(device):
    ids = make_ids(5, 8, 32, device)
    library = np if simulator.ENABLED else pytest.importorskip("cupy")
    out = moe_align_block_size(library.from_dlpack(ids), 16, 32)
    assert {type(array) for array in out} == {library.ndarray}
    assert mismatch(*map(torch.from_dlpack, out), ids, 16, 32) is None


# Error messages: the argument, its value and what is allowed


def on_wrong_device(*shape):
    return lambda _: torch.zeros(shape, dtype=torch.int32, device="meta" if simulator.ENABLED else "cpu")


def slots(count):
    return lambda device: torch.zeros(1, dtype=torch.int32, device=device).expand(count)  # allocates a single element


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            dict(topk_ids=lambda _: torch.zeros(4, 2)),
            TypeError,
            "topk_ids is torch.float32; it must be torch.uint8 or torch.int16 or torch.int32 or torch.int64",
        ),
        (
            dict(topk_ids=slots((1 << 31) - 1)),
            ValueError,
            "2147483647 slots .* 2147483792 elements; at most 2147483647",
        ),
        (dict(topk_ids=slots(1 << 31)), ValueError, "2147483648 slots.* at most"),  # more than int32 indices allow
        (dict(block_size=0), ValueError, "block_size is 0; 1 to"),
        (dict(block_size=16.0), TypeError, "block_size is 16.0; it must be an int"),
        (dict(block_size=1 << 28), ValueError, "block_size is 268435456"),
        (dict(num_experts=0), ValueError, "num_experts is 0; 1 to 1073741823 are allowed"),
        (dict(num_experts=1 << 30), ValueError, "num_experts is 1073741824; 1 to 1073741823 are allowed"),
        (
            dict(num_experts=8193, topk_ids=slots(1025)),
            ValueError,
            "num_experts is 8193: with 1025 slots at most 8192 are allowed, with up to 1024 slots 1073741823",
        ),
        (dict(num_experts=True), TypeError, "num_experts is True; it must be an int"),
        (dict(pad_sorted_ids=2), TypeError, "pad_sorted_ids is 2; it must be True or False"),
        (dict(ignore_invalid_experts="no"), TypeError, "ignore_invalid_experts is 'no'; it must be True or False"),
        (dict(topk_ids=np.zeros((4, 2), np.uint16)), TypeError, "topk_ids is torch.uint16; it must be"),
        (dict(num_experts=8.0), TypeError, "num_experts is 8.0; it must be an int"),
        (dict(expert_map=lambda device: make_map(7, device)), ValueError, r"expert_map .*\(7,\).* it must be"),
        (dict(expert_map=lambda device: make_map(8, device)[None]), ValueError, r"expert_map .*\(1, 8\).* it must be"),
        (dict(expert_map=lambda device: make_map(8, device).half()), TypeError, "expert_map is torch.float16; it must"),
        (
            dict(expert_map=lambda device: make_map(16, device)[::2]),
            ValueError,
            r"expert_map .* it must be \[8\] and contiguous",
        ),
        (dict(expert_map=on_wrong_device(8)), ValueError, "expert_map is on .* it must be"),
        (dict(out=(0, torch.Tensor.long)), ValueError, "out's sorted_token_ids is .* it must be"),
        (dict(out=(0, lambda t: t[:-1])), ValueError, "out's sorted_token_ids is .* it must be"),
        (dict(out=(1, lambda t: t[:-1])), ValueError, "out's expert_ids is .* it must be"),
        (dict(out=(1, lambda t: t.repeat(2)[::2])), ValueError, "out's expert_ids is .* it must be"),
        (dict(out=(2, lambda t: t.to("meta"))), ValueError, "out's num_tokens_post_pad is .* it must be"),
        (dict(topk_ids=[[1, 2]]), TypeError, "topk_ids is list"),
        (dict(topk_ids=np.zeros((4, 2), np.int32)[::-1]), ValueError, "topk_ids has strides"),
        (dict(block_size=[16]), TypeError, "block_size is .* it must be an int"),
        (dict(out=(2, lambda t: t[:0])), ValueError, "out's num_tokens_post_pad is .* it must be"),
    ],
)
def test_invalid_arguments(change, error, message, device):
    arguments = dict(topk_ids=torch.zeros(4, 2, device=device).int(), block_size=16, num_experts=8)
    for expert_map in (None, make_map(8, device)):  # cached plans must not let invalid arguments pass
        moe_align_block_size(**arguments, expert_map=expert_map)
    arguments |= {name: value(device) if callable(value) else value for name, value in change.items()}
    if "out" in change:
        which, corrupted = arguments["out"]
        out = poisoned((*sizes(8, 16, 8), 1), device)[0]
        arguments["out"] = [corrupted(tensor) if i == which else tensor for i, tensor in enumerate(out)]
    with pytest.raises(error, match=message):
        moe_align_block_size(**arguments)


def test_numpy_integers_and_flags(device):
    """They find the plan of Python's ints."""
    ids = make_ids(9, 8, 32, device)
    expected = moe_align_block_size(ids, 16, 32, pad_sorted_ids=False)
    plans = len(api._plans)
    given = moe_align_block_size(ids, np.int64(16), np.uint8(32), pad_sorted_ids=np.bool_(False))
    assert all(map(torch.equal, given, expected)) and len(api._plans) == plans


@pytest.mark.parametrize(
    "make, arguments, message",
    [
        (medium.make_medium_kernel, (100, 2, 96, False, False), "threads is 100; it must be a multiple of 32"),
        (medium.make_medium_kernel, (2048, 2, 96, False, False), "threads is 2048; it must be a multiple of 32"),
        (medium.make_medium_kernel, (64, 2, 98, False, False), "capacity is 98; it must be a multiple of 4"),
        (large.make_large_kernel, (48, 96, 8, False, False), "threads is 48; it must be a multiple of 32"),
        (large.make_large_kernel, (512, 96, 17, False, False), "slots_per_thread 17 .* at most 8192 slots"),
        (large.make_large_kernel, (512, 1 << 20, 8, False, False), "capacity 1048576; .* 524288 buckets"),
    ],
)
def test_factories_refuse_shapes(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(*arguments)


# Wrong kernels, each with one change of the source. Only some thread orders of the simulator expose RACES.

WRONG = {  # name: (module, kernel, source text, its replacement)
    "a slot counts itself": ("medium", "medium", "& lanemask_lt())", "& ~lanemask_lt())"),
    "the last slot is not counted": (
        "medium",
        "medium",
        "threads + thread) < numel:",
        "threads + thread) < numel - 1:",
    ),
    "id num_experts is valid": ("device_functions", "medium", "expert < num_experts", "expert <= num_experts"),
    "expert ids are one too high": ("device_functions", "medium", "int32(bucket) - int32(1)", "int32(bucket)"),
    "the last padding is not written": (
        "device_functions",
        "medium",
        "end_block * block_size)",
        "end_block * block_size - 1)",
    ),
    "the end of the tail is not written": ("device_functions", "medium", "row < length:", "row < length - 1:"),
    "the end of the experts is not written": (
        "device_functions",
        "large",
        "row < num_blocks:",
        "row < num_blocks - 1:",
    ),
    "a block writes too far": ("device_functions", "large", "row < num_blocks:", "row < num_blocks + 1:"),
    "a CTA's own slots count as slots of lower CTAs": ("large", "large", "< block\n", "<= block\n"),
    "a CTA's own slots count as those of lower CTAs": (
        *("counting_sort", "counting_sort"),
        "int32(up_to_lane - of_lane)",
        "up_to_lane",
    ),
    "equal lanes are in reverse": (
        *("counting_sort", "counting_sort"),
        "same_bucket & ~lanemask_lt()",
        "same_bucket & (uint32(0xFFFFFFFF) >> (uint32(31) - lane))",
    ),
    "a slot is its own predecessor": ("pairwise", "pairwise", "slot < thread", "slot <= thread"),
    "equal buckets are lower": ("pairwise", "pairwise", "[slot] < bucket", "[slot] <= bucket"),
    "slots in reverse": (
        "small",
        "small",
        "popc(uint32(same_bucket & lower_lanes))",
        "popc(uint32(same_bucket & ~lower_lanes)) - 1",
    ),
    "every slot is its expert's first": (
        "small",
        "small",
        "same_bucket & lower_lanes) ==",
        "same_bucket & uint32(0)) ==",
    ),
    "lower lanes' slots are not counted": ("one_expert_per_warp", "few", "range(6)", "range(0)"),
    "experts of the own vector are not lower": ("one_expert_per_warp", "few", "if in_vector > 1", "if in_vector > 2"),
    "block counts are rounded down": ("device_functions", "few", "((1 << _RECIPROCAL_BITS) - reciprocal)", "0"),
    "a warp's slots are in reverse": (
        *("large", "large"),
        "same_bucket & lanemask_lt()",
        "same_bucket & (uint32(0xFFFFFFFE) << lane)",
    ),
}
TILES = {  # wrong if a CTA sorts several tiles, which twice as many tokens need in the simulator alone
    "sums of a tile's buckets are not subtracted": (
        *("counting_sort", "counting_sort"),
        "int32(others[i] - tile_start[i])",
        "others[i]",
    )
}
RACES = {  # with weak memory
    "no barrier after the counts": (
        "one_expert_per_warp",
        "few",
        "cuda.syncthreads()\n        griddepcontrol_launch",
        "griddepcontrol_launch",
    ),
    "no barrier after the clearing": (
        "one_expert_per_warp",
        "few",
        "cuda.syncthreads()\n        griddepcontrol_wait",
        "griddepcontrol_wait",
    ),
    "no barrier after the buckets": ("pairwise", "pairwise", "cuda.syncthreads()\n        count", "count"),
    "no barrier after the blocks of slots": ("pairwise", "pairwise", "cuda.syncthreads()\n        total", "total"),
    "no barrier after the counting": ("medium", "medium", "cuda.syncthreads()\n        total_blocks", "total_blocks"),
    "no barrier after the first blocks": (
        "medium",
        "medium",
        "cuda.syncthreads()\n        if not launch_dependents",
        "if not launch_dependents",
    ),
    "no barrier after masks": ("large", "large", f"counter, bit)\n{' ' * 16}cuda.syncwarp()", "counter, bit)"),
    "no wait for the other CTAs": ("large", "large", "while stale:", "for _ in range(1):"),
    "no wait for all counts": ("counting_sort", "counting_sort", "while stale:", "for _ in range(1):"),
    "no wait for the sums of all": (
        "counting_sort",
        "counting_sort",
        " or uint32(total >> uint64(32)) != launch_number",
        "",
    ),
}
NUM_TOKENS = 80  # top-8: enough for several CTAs in both kernels


def changed(module, right, wrong, monkeypatch):
    """Reload the package's modules with a change in one of them, and return its api module; it has new workspaces."""
    for cache in ("_workspaces", "_pools"):
        monkeypatch.setattr(workspaces, cache, {})
    names = "device_functions", "small", "one_expert_per_warp", "medium", "large", "counting_sort", "pairwise", "api"
    for name in names:
        real = importlib.import_module(f"moe_numba.align.{name}")
        source, fresh = inspect.getsource(real), types.ModuleType(real.__name__)
        if name == module:
            assert right in source
            source = source.replace(right, wrong)
        monkeypatch.setitem(sys.modules, real.__name__, fresh)
        monkeypatch.setattr(moe_numba.align, name, fresh)
        exec(compile(source, f"<{name} of {wrong}>", "exec"), fresh.__dict__)
    return fresh


@pytest.mark.parametrize("case", WRONG | TILES | RACES if simulator.ENABLED else WRONG)
def test_checker_rejects_wrong_kernels(case, monkeypatch, device):
    """The checker must reject one of ten inputs and thread orders."""
    module, which, right, wrong = (WRONG | TILES | RACES)[case]
    wrong_api = changed(module, right, wrong, monkeypatch)
    experts = 10_000 if which == "pairwise" else 100
    force(which if which in KERNELS else "large", monkeypatch, wrong_api)
    for seed in range(10):
        # New ids each time, so that stale results do not pass
        tokens = NUM_TOKENS * (2 if case in TILES else 1)
        ids = make_ids(tokens, 8, 100, device, invalid=0.1, seed=seed)
        ids[2] = experts  # invalid by one
        ids = ids[: {"small": 4, "few": 64}.get(which)]
        try:
            with simulator.seed(seed), simulator.weak_memory() if case in RACES else contextlib.nullcontext():
                out = align(ids, 16, experts, longer=99, function=wrong_api.moe_align_block_size)
        except (simulator.SimulatorError, AssertionError):
            return
        if mismatch(*out, ids, 16, experts):
            return
    pytest.fail(f"the checker accepted a wrong kernel: {case}")


# On a GPU: large inputs, streams, graphs


def check_exact(ids, block_size, experts, **options):
    expected = reference.moe_align_block_size(ids, block_size, experts, **options)
    same = [torch.equal(a, b) for a, b in zip(align(ids, block_size, experts, **options), expected, strict=True)]
    assert all(same), f"{same}: {tuple(ids.shape)} ids, block {block_size}, {options}"


@pytest.mark.gpu
@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("experts", [8, 64, 128, 160, 256, 257, 260, 264, 1025, 2048, 4095])
def test_grid_of_other_implementations(experts, which, monkeypatch):
    skip_if_too_many(experts)
    force(which, monkeypatch)
    every_tokens, every_topk = [0, *(1 << i for i in range(13))], [1 << i for i in range(7)]
    slots = {
        share: make_ids(4096, 65, experts, "cuda", invalid=share, seed=experts).view(-1) for share in (0.0, 0.3, 1.0)
    }
    for tokens, topk in itertools.product(every_tokens, every_topk):
        if which == "medium" and tokens * topk > MAX_FORCED_MEDIUM_SLOTS:
            continue
        ids, some_invalid, all_invalid = (s[topk : topk + tokens * topk].view(tokens, topk) for s in slots.values())
        for block_size, pad in itertools.product((16, 32, 64, 128, 256), (True, False)):
            check_exact(ids, block_size, experts, pad_sorted_ids=pad)
        for invalid, ignore in itertools.product((some_invalid, all_invalid), (True, False)):
            if topk in (1, 8, 64):
                check_exact(invalid, 64, experts, ignore_invalid_experts=ignore)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2047, 8191, 65536, 100_003, 1_000_000])
def test_large_batches(tokens):
    many = 4095 if api.devices.gpu_of(0).shared_bytes > 128 << 10 else 2048
    for experts, invalid, dtype in ((256, 0.0, torch.int32), (8, 0.3, torch.int64), (many, 0.3, torch.int32)):
        ids = make_ids(tokens, 8, experts, "cuda", dtype, invalid)
        for block_size, ignore in ((16, False), (128, True)):
            check_exact(ids, block_size, experts, ignore_invalid_experts=ignore)
    check_exact(torch.full_like(ids, 7), 128, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_2_27_slots(dtype):
    random = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, 256, (1 << 27,), generator=random, dtype=torch.int16, device="cuda").to(dtype)
    check_exact(ids, 128, 250)  # some ids are invalid
    check_exact(torch.zeros_like(ids), 1, 8)


@pytest.mark.gpu
def test_the_most_slots():
    """2**31 - 1 slots and rows; checked without the reference, which would need five times the memory."""
    numel, experts, chunk = (1 << 31) - 1, 5, 1 << 28
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB")
    ids = torch.empty(numel, dtype=torch.uint8, device="cuda")
    for start in range(0, numel, chunk):
        part = ids[start : start + chunk]
        part.copy_(torch.arange(start, start + len(part), device="cuda") * 2654435761 // 65536 % experts)
    sorted_ids, expert_ids, total = moe_align_block_size(ids, 1, experts)
    assert int(total) == numel and len(sorted_ids) == numel
    last = -1
    for start in range(0, numel, chunk):
        slots = sorted_ids[start : start + chunk].long()
        of_slots = ids[slots].long()
        assert torch.equal(of_slots, expert_ids[start : start + chunk].long())
        key = of_slots * numel + slots  # by expert, then by slot: strictly ascending, so each slot appears once
        assert int(key[0]) > last and bool((key.diff() > 0).all())
        last = int(key[-1])


@pytest.mark.gpu
def test_a_million_experts():
    for num_slots in (1, 64, 1024):
        ids = make_ids(num_slots, 1, 1_000_000, "cuda", invalid=0.1)
        check_exact(ids, 16, 1_000_000)
        check_exact(ids, 16, 1_000_000, expert_map=make_map(1_000_000, "cuda"), ignore_invalid_experts=True)


class Job:
    """A call on its own stream that is also checked there, so that the host does not wait.

    ``sleep`` delays the stream, so that work queued meanwhile runs concurrently with that of other jobs.
    """

    def __init__(self, tokens, seed, priority=0):
        self.stream, self.graph = torch.cuda.Stream(priority=priority), torch.cuda.CUDAGraph()
        self.ids, self.wrong = torch.zeros(tokens, 8, dtype=torch.int32, device="cuda"), torch.zeros(1, device="cuda")
        self.out = poisoned((*sizes(8 * tokens, 16, 256), 1), "cuda")[0]
        self.change(seed)
        self.call()
        torch.cuda.synchronize()

    def change(self, seed):
        self.ids.copy_(make_ids(len(self.ids), 8, 256, "cuda", invalid=0.1, seed=seed))
        self.expected = reference.moe_align_block_size(self.ids, 16, 256)

    def call(self):
        moe_align_block_size(self.ids, 16, 256, out=self.out)

    def sleep(self):
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(20_000_000)

    def repeat(self, start):
        with torch.cuda.stream(self.stream):
            start()
            for actual, expected in zip(self.out, self.expected):
                self.wrong += (actual != expected).sum()
                actual.fill_(POISON)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 512, 4096, 65536])
def test_concurrent_streams(tokens):
    """Three streams, one with priority, and a fourth whose GEMMs leave few SMs free."""
    jobs = [Job(tokens, seed, priority) for seed, priority in enumerate((0, 0, -1))]
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for round in range(100):
        with torch.cuda.stream(other):
            a @ a
        for job in jobs:
            if round % 25 == 0:
                job.sleep()
            job.repeat(job.call)
    torch.cuda.synchronize()
    assert [int(job.wrong) for job in jobs] == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, calls, use_pool", [(4, 1, 1), (512, 1, 1), (4096, 1, 1), (4096, 3, 1), (4096, 3, 0)])
def test_graphs(tokens, calls, use_pool, monkeypatch):
    """Replay two graphs concurrently on changed ids, with eager calls in between; also with an empty workspace pool."""
    jobs, eager = [Job(tokens, seed) for seed in range(2)], Job(tokens, 2)
    if not use_pool:
        monkeypatch.setattr(workspaces, "_pools", {})
    for job in jobs:
        with torch.cuda.graph(job.graph):
            for _ in range(calls):
                job.call()
    for seed in range(3, 9):
        for job in (*jobs, eager):
            job.change(seed)
        torch.cuda.synchronize()
        for job in (*jobs, eager):
            job.sleep()
        for _ in range(20):
            for job in jobs:
                job.repeat(job.graph.replay)
            eager.repeat(eager.call)
        torch.cuda.synchronize()
    assert [int(job.wrong) for job in (*jobs, eager)] == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 128])
def test_deterministic_beside_other_work(block_size):
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for tokens in (1, 16, 64, 256, 1024, 2048, 4096, 16384, 65536):
        ids = make_ids(tokens, 8, 256, "cuda", invalid=0.1)
        for _ in range(50):
            with torch.cuda.stream(other):
                a @ a
            check_exact(ids, block_size, 256)


def test_public_names():
    assert moe_numba.moe_align_block_size is moe_align_block_size is api.moe_align_block_size
    assert "topk_ids" in moe_align_block_size.__doc__
