"""Inputs and checks of the kernels that compute a dispatch layout."""

import pytest
import torch

from moe_numba import simulator
from moe_numba.expert_parallel import get_dispatch_layout, reference

NAMES = ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank")
TOKENS = (0, 1, 31, 33, 300)
BAD_IDS = (-1, -2, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 40, -(1 << 32), -(1 << 63), (1 << 63) - 1)


def some(tokens, topk, experts, device, invalid=0.2, seed=0):
    """Draw distinct experts for each token where there are enough, some of them -1."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, max(experts, topk), generator=random).argsort(dim=1)[:, :topk] % experts
    ids[torch.rand(tokens, topk, generator=random) < invalid] = -1
    return ids.contiguous().to(device)


def poisoned(tokens, experts, ranks, device):
    """Return poisoned outputs inside larger buffers, and the bytes of these buffers."""
    shapes = ((ranks,), torch.int32), ((experts,), torch.int32), ((tokens, ranks), torch.bool)
    out, buffers = [], []
    for shape, dtype in shapes:
        size = torch.Size(shape).numel()
        whole = torch.full(((size + 10) * dtype.itemsize,), 0xCD, dtype=torch.uint8, device=device)
        out.append(whole.view(dtype)[5:-5].view(shape))
        buffers.append((whole[: 5 * dtype.itemsize], whole[-5 * dtype.itemsize :]))
    return out, buffers


def mismatch(given, ids, experts, ranks):
    """Return what is wrong with a layout, or None. Flags are compared as bytes, 0 or 1."""
    for name, mine, right in zip(NAMES, given, reference.dispatch_layout(ids.long(), ranks, experts), strict=True):
        if mine.shape != right.shape or mine.dtype != right.dtype:
            return f"{name} is {mine.dtype} {tuple(mine.shape)}, not {right.dtype} {tuple(right.shape)}"
        if not torch.equal(mine.view(torch.uint8), right.view(torch.uint8)):
            return f"{name} is wrong at {(mine != right).nonzero()[:4].tolist()}"
    return None


def check(ids, experts, ranks, function=get_dispatch_layout):
    out, buffers = poisoned(len(ids), experts, ranks, ids.device)
    assert function(ids, experts, ranks, out=out) is out
    assert (wrong := mismatch(out, ids, experts, ranks)) is None, wrong
    assert all((edge == 0xCD).all() for edges in buffers for edge in edges), "written outside of the outputs"


def skewed():
    """Yield routings of 70 tokens to 256 experts that are far from even."""
    shape = (70, 8)
    yield torch.full(shape, -1)
    yield torch.full(shape, 255)  # one expert, eight times a token
    yield torch.arange(8).expand(shape).contiguous()  # eight experts of one rank
    yield torch.arange(0, 256, 32).expand(shape).contiguous()  # an expert of each rank
    yield torch.arange(70)[:, None].expand(shape).contiguous()


def with_invalid_experts():
    """Return a routing to 24 experts with experts outside of them, also some that are valid in their lower 32 bits."""
    ids = some(40, 8, 24, "cpu")
    ids.view(-1)[:: 320 // len(BAD_IDS)][: len(BAD_IDS)] = torch.tensor(BAD_IDS)
    ids[-1, -1], ids[-2] = 24, 24
    return ids


def reject(function, what, device, preempt=0.0):
    """Fail unless the first run, or some thread order of the simulator (see `simulator.seed`), is found to be wrong."""
    for seed in range(10):
        ids = some(70, 8, 100, "cpu", seed=seed)
        ids[5, 2], ids[6, 3], ids[7, 4], ids[69, 0], ids[68, :2] = 100, (1 << 32) + 1, -1 << 32, 99, torch.arange(2)
        out, buffers = poisoned(70, 100, 5, device)
        try:
            with simulator.seed(seed, preempt=preempt):
                function(ids.to(device), 100, 5, out=out)
        except simulator.SimulatorError:
            return
        if mismatch(out, ids.to(device), 100, 5) or any((e != 0xCD).any() for edges in buffers for e in edges):
            return
    pytest.fail(f"the check accepts a kernel in which {what}")
