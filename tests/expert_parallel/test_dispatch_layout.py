"""Dispatch layout: flags of each token's ranks, and counts per rank and per expert."""

import pytest
import torch
from helpers.layout_checks import TOKENS, check, mismatch, reject, skewed, some, with_invalid_experts
from helpers.streams import blocked
from helpers.wrong_kernels import changed

from moe_numba import simulator
from moe_numba.expert_parallel import get_dispatch_layout, reference
from moe_numba.expert_parallel.layout import api as dispatch_layout
from moe_numba.expert_parallel.layout import kernel as layout_kernel
from moe_numba.runtime import device as devices

HAS_CLUSTERS = devices.gpu_of(0).has_clusters


def test_the_reference_on_a_small_example():
    ids = torch.tensor([[0, 1, 5], [2, -1, 2], [-1, -1, -1], [7, 4, 3]])
    per_rank, per_expert, is_in = reference.dispatch_layout(ids, 4, 8)
    assert per_rank.tolist() == [1, 2, 2, 1]
    assert per_expert.tolist() == [1, 1, 2, 1, 1, 1, 0, 1]
    assert is_in.int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]]
    assert (per_rank.dtype, per_expert.dtype, is_in.dtype) == (torch.int32, torch.int32, torch.bool)


@pytest.fixture
def without_clusters(monkeypatch):
    """Let plans see a GPU that has none."""
    monkeypatch.setattr(dispatch_layout, "gpu_of", lambda device: devices.gpu_like((8, 0)))


@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("experts, ranks", [(e, r) for e in (8, 24, 256) for r in (1, 2, 3, 4, 8) if e % r == 0])
def test_the_reference_bit_for_bit(experts, ranks, topk, device):
    for tokens in TOKENS if topk == 8 else TOKENS[:-1]:
        check(some(tokens, topk, experts, device, seed=tokens), experts, ranks)


@pytest.mark.parametrize(
    "experts, ranks, topk", [(5, 5, 3), (7, 7, 32), (12, 6, 5), (1024, 8, 32), (1, 1, 1), (33, 1, 17)]
)
def test_odd_and_maximum_sizes(experts, ranks, topk, device):
    for tokens in (1, 70):
        check(some(tokens, topk, experts, device), experts, ranks)


@pytest.mark.parametrize("experts, ranks, topk", [(256, 8, 8), (7, 7, 32), (12, 6, 5), (1024, 8, 32), (1, 1, 1)])
def test_one_cta(experts, ranks, topk, device, without_clusters):
    for tokens in TOKENS:
        check(some(tokens, topk, experts, device, seed=tokens), experts, ranks)


def test_skewed_routings(device):
    for ids in skewed():
        check(ids.to(device), 256, 8)


def test_invalid_experts_are_not_counted(device):
    check(with_invalid_experts().to(device), 24, 8)


@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_int32_experts(tokens, device):
    """The gate's results are int32."""
    ids = some(tokens, 8, 24, "cpu")
    ids.view(-1)[::7] = torch.tensor([-2, 24, (1 << 31) - 1, -(1 << 31)]).repeat(100)[: len(ids.view(-1)[::7])]
    check(ids.int().to(device), 24, 8)


@pytest.mark.parametrize("seed, preempt", [(0, 0), (1, 0), (2, 0), (3, 0.02)])
def test_any_order_of_the_threads(seed, preempt, device):
    with simulator.seed(seed, preempt=preempt):
        check(some(70, 8, 24, device, seed=seed), 24, 8)


def test_outputs_are_allocated_or_used_again(device):
    out = None
    for seed, tokens in enumerate((40, 40, 40)):
        ids = some(tokens, 8, 256, device, seed=seed)
        fresh = get_dispatch_layout(ids, 256, 8)
        assert isinstance(fresh, tuple) and mismatch(fresh, ids, 256, 8) is None
        out = out or fresh
        assert get_dispatch_layout(ids, 256, 8, out=out) is out and mismatch(out, ids, 256, 8) is None


def test_numpy_in_numpy_out():
    if not simulator.ENABLED:
        pytest.skip("NumPy's arrays are not on a GPU")
    ids = some(9, 2, 8, "cpu")
    given = get_dispatch_layout(ids.numpy(), 8, 2)
    assert all(type(array).__module__ == "numpy" for array in given)
    assert mismatch([torch.from_numpy(array) for array in given], ids, 8, 2) is None


OUTPUTS = [torch.zeros(2).int(), torch.zeros(8).int(), torch.zeros(3, 2).bool()]


@pytest.mark.parametrize(
    "change, error, sentence",
    [
        (dict(topk_idx=[1]), TypeError, "topk_idx is list"),
        (
            dict(topk_idx=torch.zeros(3, 4).short()),
            TypeError,
            "topk_idx is torch.int16; it must be torch.int64 or torch.int32",
        ),
        (dict(topk_idx=torch.zeros(3, 4).byte()), TypeError, "topk_idx is torch.uint8; it must be torch.int64 or"),
        (dict(topk_idx=torch.zeros(12).long()), ValueError, "topk_idx has shape"),
        (dict(topk_idx=torch.zeros(4, 3).long().T), ValueError, "strides"),
        (dict(topk_idx=torch.zeros(3, 0).long()), ValueError, "topk_idx has 0 columns; 1 to 32 are allowed"),
        (dict(topk_idx=torch.zeros(3, 33).long()), ValueError, "topk_idx has 33 columns"),
        (dict(num_experts=0), ValueError, "num_experts is 0; 1 to 1024 are allowed"),
        (dict(num_experts=1032), ValueError, "num_experts is 1032"),
        (dict(num_experts=8.0), TypeError, "num_experts is 8.0; it must be an int"),
        (dict(num_experts=True), TypeError, "num_experts is True"),
        (dict(num_experts=9), ValueError, "num_experts is 9; it must be a multiple of num_ranks, 2"),
        (dict(num_ranks=0), ValueError, "num_ranks is 0; 1 to 8 are allowed"),
        (dict(num_ranks=16), ValueError, "num_ranks is 16"),
        (dict(num_ranks=None), TypeError, "num_ranks is None"),
        (dict(out=OUTPUTS[:2]), ValueError, "out is 2 of them; it must be a tuple of 3"),
        (dict(out=[OUTPUTS[1].clone(), *OUTPUTS[1:]]), ValueError, "out's num_tokens_per_rank"),
        (dict(out=[OUTPUTS[0], OUTPUTS[1].long(), OUTPUTS[2]]), ValueError, "out's num_tokens_per_expert"),
        (dict(out=[*OUTPUTS[:2], torch.zeros(2, 3).bool().T]), ValueError, "out's is_token_in_rank"),
    ],
)
def test_invalid_arguments(change, error, sentence, device):
    def here(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    arguments = dict(topk_idx=torch.zeros(3, 4).long(), num_experts=8, num_ranks=2) | change
    arguments = {k: [here(v) for v in value] if k == "out" else here(value) for k, value in arguments.items()}
    with pytest.raises(error, match=sentence):
        get_dispatch_layout(**arguments)


def test_too_many_tokens_are_refused(device, monkeypatch):
    monkeypatch.setattr(dispatch_layout, "_MAX_ELEMENTS", 11)
    with pytest.raises(ValueError, match="topk_idx has 3 tokens; at most 2 are allowed"):
        get_dispatch_layout(torch.zeros(3, 4).long().to(device), 8, 2)


# A kernel with one of these changes must be rejected.
WRONG = {
    "invalid experts are counted": (
        layout_kernel,
        "chosen[k] < uint32(num_experts)",
        "chosen[k] <= uint32(num_experts)",
    ),
    "negative ids are accepted": (layout_kernel, "if expert >= 0 and", "if"),
    "ids are cut to 32 bits": (
        layout_kernel,
        "if expert >= 0",
        "expert = int64(int32(expert))\n                    if expert >= 0",
    ),
    "the last rank has no flags": (layout_kernel, "member < uint32(num_ranks):", "member < uint32(num_ranks - 1):"),
    "a token counts several times for a rank": (
        layout_kernel,
        "ranks = uint32(ranks | (",
        "cuda.atomic.add(counts, uint32(num_experts + rank), 1)\n                    ranks = uint32(ranks | (",
    ),
    "the last token is skipped": (layout_kernel, "if token < num_tokens and m", "if token + 1 < num_tokens and m"),
    "the reduction in a lane group is incomplete": (layout_kernel, "in range(lane_bits):", "in range(lane_bits - 1):"),
    "the reduction in a warp is incomplete": (layout_kernel, "in range(lane_bits, 5):", "in range(lane_bits, 4):"),
    "counts start at undefined values": (layout_kernel, "counts[i] = int32(0)", "pass"),
    "one CTA's counts are ignored": (
        layout_kernel,
        "for other in range(CLUSTER_SIZE)",
        "for other in range(CLUSTER_SIZE - 1)",
    ),
    "the last counters are ignored": (
        layout_kernel,
        "share = -(-num_counters // CLUSTER_SIZE)",
        "share = num_counters // CLUSTER_SIZE",
    ),
    "counts are sent before they are complete": (
        layout_kernel,
        "launch_dependents()\n        cuda.syncthreads()\n",
        "launch_dependents()\n        cuda.syncwarp()\n",
    ),
    "counting starts before all counters are cleared": (
        layout_kernel,
        "        cuda.syncthreads()\n        griddepcontrol_wait()",
        "        griddepcontrol_wait()",
    ),
    "shares are summed before they arrive": (
        layout_kernel,
        "        barrier_cluster_arrive()\n        barrier_cluster_wait()\n",
        "        cuda.syncthreads()\n",
    ),
}
WRONG_ONE_CTA = {
    "counting starts before all counters are cleared": "        cuda.syncthreads()\n        count_tokens(",
    "counts are written before they are complete": "        cuda.syncthreads()\n        for v in range(-(-num_counters",
}
ON_A_GPU = [w for w in WRONG if not any(part in w for part in ("before", "start at", "last counters"))]
# On a GPU the others may produce right results by chance, or end the process.


@pytest.mark.parametrize("what", WRONG if simulator.ENABLED else ON_A_GPU)
def test_wrong_kernels_are_rejected(what, monkeypatch, device):
    module, right, wrong = WRONG[what]
    if "cluster" in wrong + right.lower() and not HAS_CLUSTERS:
        pytest.skip("the change is in the kernel for clusters")
    made = changed(module, right, wrong)
    for make in ("make_layout_kernel", "make_single_cta_layout_kernel"):
        monkeypatch.setattr(dispatch_layout, make, made.get(make))
    reject(get_dispatch_layout, what, device)


@pytest.mark.parametrize("what", WRONG_ONE_CTA)
def test_wrong_kernels_of_one_cta_are_rejected(what, monkeypatch, device, without_clusters):
    if not simulator.ENABLED:
        pytest.skip("they may produce right results by chance")
    right = WRONG_ONE_CTA[what]
    made = changed(layout_kernel, right, right.replace("        cuda.syncthreads()\n", ""))
    make = "make_single_cta_layout_kernel"
    monkeypatch.setattr(dispatch_layout, make, made[make])
    reject(get_dispatch_layout, what, device)


# On a GPU: large sizes, graphs, streams.


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4095, 4096, 65536, 100_003])
def test_many_tokens(tokens):
    for experts, ranks, topk in ((256, 8, 8), (64, 4, 6), (1024, 8, 32), (7, 7, 1)):
        for invalid in (0.0, 0.3, 1.0):
            check(some(tokens, topk, experts, "cuda", invalid), experts, ranks)
    check(torch.full((tokens, 8), 255, device="cuda"), 256, 8)


@pytest.mark.gpu
def test_flags_beyond_two_gigabytes():
    """The offset of a flag needs more than 32 bits."""
    ids = (torch.arange(300_000_000, device="cuda") % 24)[:, None]
    per_rank, per_expert, is_in = get_dispatch_layout(ids, 24, 8)
    assert (per_expert == 12_500_000).all() and (per_rank == 37_500_000).all()
    assert (is_in.sum(dim=1, dtype=torch.int32) == 1).all()
    assert is_in.view(torch.uint8).gather(1, ids // 3).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4096])
def test_graph_replays_on_changed_inputs(tokens):
    ids = some(tokens, 8, 256, "cuda")
    out = get_dispatch_layout(ids, 256, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        get_dispatch_layout(ids, 256, 8, out=out)
    for seed in range(1, 4):
        ids.copy_(some(tokens, 8, 256, "cuda", seed=seed))
        for tensor in out:
            tensor.view(torch.uint8).fill_(0xCD)
        graph.replay()
        assert (wrong := mismatch(out, ids, 256, 8)) is None, wrong


@pytest.mark.gpu
def test_it_runs_asynchronously_on_the_callers_stream():
    ids = some(4096, 8, 256, "cuda")
    ids.copy_(255 - ids)  # CUDA loads a kernel when it is first used, and waits for all streams then
    out = get_dispatch_layout(ids, 256, 8)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with blocked(stream), torch.cuda.stream(stream):
        ids.copy_(255 - ids)
        get_dispatch_layout(ids, 256, 8, out=out)
    stream.synchronize()
    assert (wrong := mismatch(out, ids, 256, 8)) is None, wrong
