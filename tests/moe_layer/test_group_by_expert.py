"""Test group_by_expert against its reference, with one CTA and with many."""

import itertools

import numpy as np
import pytest
import torch
from helpers.machine_code import is_dependent_launch
from helpers.wrong_kernels import changed, changed_maker, is_rejected

import moe_numba
from moe_numba import simulator
from moe_numba.align import counting_sort
from moe_numba.align.device_functions import capacity_for
from moe_numba.moe_layer import group_by_expert, reference
from moe_numba.moe_layer.group_by_expert import api as group_by_expert_api
from moe_numba.moe_layer.group_by_expert import kernel as kernels
from moe_numba.runtime.sass import compile_apart

POISON = -12345
NAMES = "seqlens", "cu_seqlens", "gather_indices", "inverse_indices"
SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a kernel in the simulator")


def make_ids(tokens, topk, experts, device, dtype=torch.int32, seed=0):
    """Ids with repetitions within a token, -1, and ids beyond the experts."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (tokens, topk), generator=random)
    draw = torch.rand(tokens, topk, generator=random)
    ids = torch.where(draw < 0.1, -1, torch.where(draw < 0.2, experts, torch.where(draw < 0.25, 7 * experts + 5, ids)))
    return ids.to(device, dtype)


def poisoned(wanted):
    """Return poisoned outputs, each in the middle of a larger poisoned buffer, and the buffers."""
    buffers = [torch.full((t.numel() + 10,), POISON, dtype=t.dtype, device=t.device) for t in wanted]
    return tuple(b[5:-5].view(t.shape) for b, t in zip(buffers, wanted, strict=True)), buffers


def mismatch(given, wanted):
    """Return None, or the name of the first output that differs."""
    for name, tensor, right in zip(NAMES, given, wanted, strict=True):
        if tensor.dtype != torch.int32 or tensor.shape != right.shape or not torch.equal(tensor, right):
            return name
    return None


def check(ids, experts):
    wanted = reference.group_by_expert(ids, experts)
    out, buffers = poisoned(wanted)
    assert group_by_expert(ids, experts, out=out) is out
    assert mismatch(out, wanted) is None
    assert all((b[:5] == POISON).all() and (b[-5:] == POISON).all() for b in buffers), "out-of-bounds write"
    return out


@pytest.fixture
def many_ctas(monkeypatch):
    monkeypatch.setattr(group_by_expert_api, "MAX_SINGLE_CTA_ASSIGNMENTS", 0)
    monkeypatch.setattr(group_by_expert_api, "_plans", {})


def test_reference_by_hand():
    """Five experts, of which expert 3 has no token; an id is -1, another too large, one is repeated in its token."""
    ids = torch.tensor([[2, 0], [2, 2], [-1, 4], [9, 0], [1, 2]])
    given = [tensor.tolist() for tensor in reference.group_by_expert(ids, 5)]
    inverse = [[3, 0], [4, 5], [-1, 7], [-1, 1], [2, 6]]
    assert given == [[2, 1, 4, 0, 1], [0, 2, 3, 7, 7, 8], [0, 3, 4, 0, 1, 1, 4, 2, -1, -1], inverse]


@pytest.mark.parametrize("experts", [1, 8, 64, 256, 512])
@pytest.mark.parametrize("tokens, topk", [(0, 8), (1, 1), (7, 2), (64, 8), (300, 8)])
def test_one_cta(tokens, topk, experts, device):
    check(make_ids(tokens, topk, experts, device), experts)


@pytest.mark.parametrize("experts", [1, 8, 64, 256, 512])
@pytest.mark.parametrize("tokens, topk", [(64, 8), (300, 8), (1031, 1)])
def test_many_ctas(tokens, topk, experts, device, many_ctas):
    check(make_ids(tokens, topk, experts, device), experts)


def test_one_cta_or_many_for_few_assignments(device, many_ctas):
    check(make_ids(3, 8, 8, device), 8)


@pytest.mark.parametrize("expert", [0, 63, -1, 64])
@pytest.mark.parametrize("tokens", [5, 300])
def test_one_expert_for_all(expert, tokens, device, many_ctas):
    """An expert without other experts, and no valid id at all."""
    ids = torch.full((tokens, 8), expert, dtype=torch.int32, device=device)
    seqlens, cu_seqlens, gather_indices, inverse_indices = check(ids, 64)
    rows = 8 * tokens if 0 <= expert < 64 else 0
    assert int(seqlens.sum()) == int(cu_seqlens[-1]) == rows
    assert (gather_indices[rows:] == -1).all() and (inverse_indices >= 0).all() == bool(rows)


def test_int64_ids_that_wrap_around_are_invalid(device):
    ids = torch.tensor([[2**32 + 3, 3], [2**40, 0], [-(2**32) + 5, 2**63 - 1]], device=device)
    assert check(ids, 8)[3].tolist() == [[-1, 1], [-1, 0], [-1, -1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("limit", [8192, 0])
def test_strides(dtype, limit, device, monkeypatch):
    """Ids are read in place, without a copy."""
    monkeypatch.setattr(group_by_expert_api, "MAX_SINGLE_CTA_ASSIGNMENTS", limit)
    monkeypatch.setattr(group_by_expert_api, "_plans", {})
    ids = make_ids(80, 6, 16, device, dtype)
    wide = torch.full((160, 19), 5, dtype=dtype, device=device)
    wide[::2, ::3][:, :6] = ids
    for strided in (ids.t().contiguous().t(), wide[::2, ::3][:, :6], ids[:1].expand(80, 6)):
        assert not strided.is_contiguous()
        check(strided, 16)


def test_many_ctas_return_the_same_as_one(device, monkeypatch):
    ids = make_ids(200, 8, 64, device)
    one = group_by_expert(ids, 64)
    monkeypatch.setattr(group_by_expert_api, "MAX_SINGLE_CTA_ASSIGNMENTS", 0)
    group_by_expert_api._plans.clear()
    assert mismatch(group_by_expert(ids, 64), one) is None


def test_numpy_numbers_and_arrays(device):
    ids = make_ids(9, 4, 16, device)
    wanted = reference.group_by_expert(ids, 16)
    assert mismatch(group_by_expert(ids, np.int64(16)), wanted) is None
    library = np if simulator.ENABLED else pytest.importorskip("cupy")
    given = group_by_expert(library.from_dlpack(ids), 16)
    assert {type(array) for array in given} == {library.ndarray}
    assert mismatch([torch.from_dlpack(array) for array in given], wanted) is None


@SIMULATED
@pytest.mark.parametrize("limit", [8192, 0])
def test_thread_orders(limit, device, monkeypatch):
    monkeypatch.setattr(group_by_expert_api, "MAX_SINGLE_CTA_ASSIGNMENTS", limit)
    monkeypatch.setattr(group_by_expert_api, "_plans", {})
    ids = make_ids(40, 8, 24, device)
    for seed in range(6):
        with simulator.seed(seed, preempt=0.1), simulator.settings.settings.override(engine="threads"):
            check(ids, 24)


def test_prepared_call(device):
    ids = make_ids(20, 4, 8, device)
    prepared = moe_numba.prepare(group_by_expert, ids, 8)
    ids.copy_(make_ids(20, 4, 8, device, seed=1))
    assert mismatch(prepared(), reference.group_by_expert(ids, 8)) is None


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(topk_ids=[1]), TypeError, "topk_ids is list"),
        (dict(topk_ids=torch.zeros(3, 4)), TypeError, "topk_ids is torch.float32; it must be torch.int32 or"),
        (dict(topk_ids=torch.zeros(3).int()), ValueError, r"topk_ids has shape \(3,\); it must be \[tokens, topk\]"),
        (dict(topk_ids=torch.zeros(3, 0).int()), ValueError, "topk, the columns of topk_ids, is 0; it must be 1"),
        (dict(topk_ids=torch.zeros(1, 1).int().expand(1 << 20, 1025)), ValueError, "1048576 tokens; at most 1047552"),
        (dict(num_experts=0), ValueError, "num_experts is 0; 1 to 512 are allowed"),
        (dict(num_experts=513), ValueError, "num_experts is 513; 1 to 512 are allowed"),
        (dict(num_experts=8.0), TypeError, "num_experts is 8.0; it must be an int"),
        (dict(num_experts=True), TypeError, "num_experts is True"),
        (dict(out=()), ValueError, "out is 0 of them; it must be a tuple of 4 tensors"),
        (dict(out=[torch.zeros(8) for _ in range(4)]), ValueError, "out's seqlens is torch.float32"),
    ],
)
def test_invalid_arguments(change, error, message, device):
    arguments = dict(topk_ids=torch.zeros(3, 4).int(), num_experts=8) | change
    arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(error, match=message):
        group_by_expert(**arguments)


@pytest.mark.parametrize(
    "make, arguments, message",
    [
        (kernels.make_single_cta_kernel, (513, 8, 256), "num_experts is 513; 1 to 512"),
        (kernels.make_single_cta_kernel, (0, 8, 256), "num_experts is 0"),
        (kernels.make_many_ctas_kernel, (100, 96, 8, 8), "threads is 100; it must be a multiple of 32"),
    ],
)
def test_factories_refuse_shapes(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(*arguments)


# Wrong kernels

ONE, MANY = 8192, 0
WRONG = {
    "ids equal to num_experts are valid": (ONE, "and expert < num_experts:", "and expert <= num_experts:"),
    "ids are compared after narrowing": (ONE, "if expert >= 0 and expert < num_experts:", "if expert < num_experts:"),
    "no barrier after clearing": (ONE, "clear(counters)\n        cuda.syncthreads()\n", "clear(counters)\n"),
    "no barrier after counting": (ONE, "assignments, counters)\n        cuda.syncthreads()", "assignments, counters)"),
    "no barrier before assigning": (
        ONE,
        "cu_seqlens[num_experts] = total\n        cuda.syncthreads()",
        "cu_seqlens[num_experts] = total",
    ),
    "one bit of the expert is not compared": (ONE, "range(num_bits)", "range(num_bits - 1)"),
    "lanes above are counted": (
        ONE,
        "position = int32(starts[expert] + earlier + int32(cuda.popc(lower_lanes)))",
        "position = int32(starts[expert] + earlier + int32(cuda.popc(same_expert)) - 1 "
        "- int32(cuda.popc(lower_lanes)))",
    ),
    "a counter is written before all lanes have read it": (
        ONE,
        "                cuda.syncwarp()\n                if expert >= 0 and lower",
        "                if expert >= 0 and lower",
    ),
    "the column instead of the token": (
        ONE,
        "] = int32(uint32(assignment) // uint32(topk))",
        "] = int32(uint32(assignment) % uint32(topk))",
    ),
    "no tail": (ONE, "while row < end:", "while row < end - 1:"),
    "many CTAs: ids equal to num_experts are valid": (MANY, "expert < num_experts\n", "expert <= num_experts\n"),
    "many CTAs: ids are compared after narrowing": (
        MANY,
        "is_valid = expert >= 0 and expert",
        "is_valid = int32(expert)",
    ),
    "many CTAs: the column instead of the token": (
        MANY,
        "int32(uint32(slot) // uint32(topk))",
        "int32(uint32(slot) % uint32(topk))",
    ),
    "only assignments of lower CTAs are counted": (MANY, " + counts[expert + 1 + capacity])", ")"),
    "the number of all rows is not stored": (MANY, "while expert <= num_experts:", "while expert < num_experts:"),
}
SORT = {  # the alignment does not use these passages of the sort
    "dropped assignments have a row": ("int32(-1) if buckets[k] == uint32(drop_bucket) else row", "row"),
    "assignments beyond the last have a row": (
        "if k < num_steps and int32(slot + k * 32) < last:",
        "if k < num_steps:",
    ),
}


@SIMULATED
@pytest.mark.parametrize("name", WRONG | SORT)
def test_wrong_kernels_are_rejected(name, device, monkeypatch):
    limit = WRONG[name][0] if name in WRONG else MANY
    monkeypatch.setattr(group_by_expert_api, "MAX_SINGLE_CTA_ASSIGNMENTS", limit)
    for factory in ("make_single_cta_kernel", "make_many_ctas_kernel"):
        make = (
            changed(kernels, *WRONG[name][1:])[factory]
            if name in WRONG
            else changed_maker(kernels, factory, counting_sort, *SORT[name])
        )
        monkeypatch.setattr(kernels, factory, make)
    ids = make_ids(41, 8, 16, device)

    def attempt(seed):
        group_by_expert_api._plans.clear()
        with simulator.seed(seed), simulator.races():
            check(ids, 16)
            check(torch.where(ids == 3, ids.long() - (1 << 33), ids.long()), 16)

    assert is_rejected(attempt)


# Machine code; no GPU is needed.

_SIZES = "int32", "int64", "int64"
KERNELS = {
    f"single_cta {experts} {threads}": (
        f"make_single_cta_kernel({experts}, 8, {threads})",
        ("int32*",) * 5 + _SIZES,
        *(threads, False),
    )
    for experts, threads in ((256, 1024), (512, 512), (8, 256))
} | {
    f"many_ctas {experts} 512": (
        f"make_many_ctas_kernel(512, {capacity_for(experts)}, 8, 8)",
        ("int64*", *["int32*"] * 5, "int32", "int32", *_SIZES),
        *(512, False),
    )
    for experts in (8, 256, 512)
}


@pytest.fixture(scope="module")
def reports():
    return compile_apart("from moe_numba.moe_layer.group_by_expert.kernel import *", KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_the_machine_code(name, reports):
    """No spills, no local or generic memory, and no second copy of the ballots for a diverged warp."""
    report, (kernel, experts, _) = reports[name], name.split()
    assert report.spilled_bytes == report.stack_bytes == 0
    assert report.registers <= (64 if kernel == "single_cta" else 128)
    if report.opcodes is None:
        pytest.skip("there is no nvdisasm")
    assert report.count("LDL", "STL", "LD", "ST") == report.count("WARPSYNC.COLLECTIVE") == 0
    assert is_dependent_launch(report)
    if kernel == "single_cta":
        assert report.count("VOTE") == kernels._BATCH * (1 + (int(experts) - 1).bit_length())
        assert report.count("ATOMS.POPC.INC.32") == kernels._BATCH  # counting needs no old value


# On a GPU: large sizes and graphs.


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, experts", [*itertools.product((1, 64, 1024, 1025, 4096, 200_000), (8, 256, 512))])
def test_large(tokens, experts):
    check(make_ids(tokens, 8, experts, "cuda"), experts)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 4096])
def test_graph_replays_with_changed_routing(tokens):
    ids = make_ids(tokens, 8, 256, "cuda")
    out = group_by_expert(ids, 256)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group_by_expert(ids, 256, out=out)
    for seed in range(3):
        ids.copy_(make_ids(tokens, 8, 256, "cuda", seed=seed + 1))
        for tensor in out:
            tensor.fill_(POISON)
        graph.replay()
        assert mismatch(out, reference.group_by_expert(ids, 256)) is None
