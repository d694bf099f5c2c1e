"""Runs our port of DeepEP's dispatch with one order missing, in weak memory, and says what wrong rows contain."""

from collections import Counter

import torch

from moe_numba import simulator
from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig, min_buffer_bytes
from moe_numba.course.deepep_port.simulate import dispatch_all, virtual_ranks

TOKENS, SLOTS = (6, 4), 2  # of the ranks; of a ring
LATER, BEFORE = "a later row", "what was in memory before"
SHOWN = "early head", 6  # the fault and the seed of the page


def shown() -> list[str]:
    """Return a sentence for each wrong row of a run whose missing order the page asks for."""
    sentences = []
    for rank, row, source, token, values in wrong_rows(*SHOWN):
        found = {f"token {int(v) % 100} of rank {int(v) // 100}" for v in values if v < 300}
        more = {BEFORE} if any(v >= 300 for v in values) else set()
        contains = ", ".join(sorted(found | more))
        sentences.append(
            f"recv_x[{row}] of rank {rank} should be token {token} of rank {source}; in it are values of {contains}"
        )
    return sentences


def table(faults: dict[str, str], seeds: int = 2) -> str:
    """Return for each fault, by its name on the page, what its wrong rows contain besides their own values."""
    texts = []
    for name, fault in faults.items():
        found = Counter()
        for seed in range(seeds):
            for _, _, source, token, values in wrong_rows(fault, seed):
                found[LATER if all(100 * source + token < v < 300 for v in values) else BEFORE] += 1
        texts.append(f"{name}: {' and '.join(found) or 'nothing wrong'}")
    return "; ".join(texts)


def wrong_rows(fault: str, seed: int) -> list[tuple]:
    """Return the wrong rows: receiving rank, row, source, token, and the values that are not the row's own.

    Rows of token t of rank r consist of 100 r + t. Memory contains large numbers before.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty is then filled, so that a seed always gives the same run
    try:
        return _wrong_rows(fault, seed)
    finally:
        torch.use_deterministic_algorithms(before)


def _wrong_rows(fault, seed):
    chosen = [torch.ones(tokens, 2, dtype=torch.bool) for tokens in TOKENS]
    numbers = [100 * rank + torch.arange(tokens, dtype=torch.float32) for rank, tokens in enumerate(TOKENS)]
    x = [of_rank[:, None].repeat(1, 16).bfloat16() for of_rank in numbers]
    config = DeepEPConfig(2, 1, SLOTS, 2, 32, 0, 0, 2, 2, fault=fault)
    with virtual_ranks(2, min_buffer_bytes(config)) as ranks, simulator.seed(seed), simulator.weak_memory():
        got = dispatch_all(ranks, config, x, chosen)
    right, rows = torch.cat(numbers), []
    for rank, received in enumerate(got):
        values = received[0].float().nan_to_num(nan=1e9)
        for row in (values != right[:, None]).any(dim=1).nonzero().flatten().tolist():
            own = int(right[row])
            rows.append((rank, row, own // 100, own % 100, sorted(set(values[row][values[row] != own].tolist()))))
    return rows
