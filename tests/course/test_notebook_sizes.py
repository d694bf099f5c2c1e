"""Notebooks run with other sizes than their own."""

from pathlib import Path

import pytest

from moe_numba.course.pages import execute

OTHER_SIZES = {
    # Three ranks, so that the order of a sum matters; metadata fills no whole vectors, and rows no whole warps.
    "14_low_latency": [
        ("TOPK, LOCAL_EXPERTS = 2, 4, 64, 2, 2", "TOPK, LOCAL_EXPERTS = 3, 3, 40, 3, 2"),
        ("LAYER = Sizes(2, 4, 64, 2, 4)", "LAYER = Sizes(3, 3, 40, 3, 2)"),
    ],
    # No size is a power of two; assignments fill no whole warps, and rows no whole CTA.
    "15_moe_layer": [
        ('Layer("small", 8, 128, 64, "bf16", (), 2)', 'Layer("small", 7, 192, 64, "bf16", (), 3)'),
        ("TOKENS = 6 if SIMULATED", "TOKENS = 5 if SIMULATED"),
        ("G_EXPERTS, G_TOPK, G_TOKENS = (16, 4, 20)", "G_EXPERTS, G_TOPK, G_TOKENS = (41, 3, 29)"),
        ("S_TOKENS, S_TOPK, S_HIDDEN = (8, 2, 64)", "S_TOKENS, S_TOPK, S_HIDDEN = (5, 3, 72)"),
    ],
}


def with_other_sizes(name):
    """Return a notebook's source with its other sizes; each of the passages occurs once."""
    source = (Path(__file__).parents[2] / "notebooks" / f"{name}.py").read_text()
    for old, new in OTHER_SIZES[name]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_other_sizes_replace_the_notebooks(name):
    assert with_other_sizes(name)


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_runs_with_other_sizes(name, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(with_other_sizes(name))
    execute.execute(path, env={"MOE_NUMBA_SIMULATE": "1"})
