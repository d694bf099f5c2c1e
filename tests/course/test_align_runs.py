"""Inputs and checks of the alignment's notebooks: `moe_numba.course.steps.align_runs`."""

import pytest
import torch

from moe_numba.align.reference import moe_align_block_size as reference
from moe_numba.course.steps.align_runs import POISON, poisoned, random_ids, wrong


@pytest.fixture
def ids():
    torch.manual_seed(0)
    return random_ids(16, 8, 2)


def test_tokens_choose_distinct_experts(ids):
    assert ids.dtype == torch.int32 and ids.shape == (16, 2) and ids.is_contiguous()
    assert all(a != b and 0 <= a < 8 and 0 <= b < 8 for a, b in ids.tolist())


def test_outputs_are_poisoned_and_long_enough(ids):
    outputs = poisoned(ids, 8, 4)
    assert [len(o) for o in outputs] == [len(o) for o in reference(ids, 4, 8)]
    assert all((o == POISON).all() for o in outputs) and wrong(outputs, ids, 8, 4) is not None


def test_tags_relax_what_they_name(ids):
    assert wrong(reference(ids, 4, 8), ids, 8, 4) is None
    swapped, unwritten, lost = (reference(ids, 4, 8) for _ in range(3))
    swapped[0][:2] = swapped[0][:2].flip(0)
    unwritten[0][-1] = POISON
    lost[0][0] = ids.numel()
    assert wrong(swapped, ids, 8, 4) and wrong(unwritten, ids, 8, 4)
    assert wrong((*swapped, "any order"), ids, 8, 4) is None and wrong((*swapped, "any tail"), ids, 8, 4)
    assert wrong((*unwritten, "any tail"), ids, 8, 4) is None and wrong((*unwritten, "any order"), ids, 8, 4)
    assert wrong((*lost, "any order", "any tail"), ids, 8, 4)


def test_unknown_tags_are_refused(ids):
    with pytest.raises(ValueError, match="outputs end with {'any length'}"):
        wrong((*reference(ids, 4, 8), "any length"), ids, 8, 4)
