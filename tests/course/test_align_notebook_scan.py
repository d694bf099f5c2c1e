"""The scan that notebook 03 plays: its rows are the article's, and the figure's."""

from pathlib import Path

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.bench.records import code_hash
from moe_numba.course.draw.player import Box
from moe_numba.course.draw.shared_memory import barrier_steps
from moe_numba.course.lessons.align.draw_scans import blelloch_steps
from moe_numba.runtime.changed_source import define
from moe_numba.runtime.launch import launch

NUMBERS = [3, 1, 7, 0, 4, 1, 6, 3]
ROWS_OF_ARTICLE = [
    [3, 4, 7, 7, 4, 5, 6, 9],
    [3, 4, 7, 11, 4, 5, 6, 14],
    [3, 4, 7, 11, 4, 5, 6, 25],
    [3, 4, 7, 11, 4, 5, 6, 0],
    [3, 4, 7, 0, 4, 5, 6, 11],
    [3, 0, 7, 4, 4, 11, 6, 16],
    [0, 3, 4, 11, 11, 15, 16, 22],
]


def test_figure_has_the_rows_of_the_article():
    up, down = blelloch_steps(NUMBERS)
    assert [numbers for _, numbers, _, _ in up[1:] + down] == ROWS_OF_ARTICLE


@pytest.mark.skipif(not simulator.ENABLED, reason="it draws simulator traces")
def test_kernel_stores_the_rows_of_the_article():
    text = (Path(__file__).parents[2] / "notebooks" / "03_align_published.py").read_text()
    cells = [cell for cell in code_hash.code_cells(text) if "def blelloch_scan(" in cell or "def scan_alone(" in cell]
    imports = "from numba import cuda, int32\nfrom moe_numba import simulator\n"
    kernel = define(imports + "\n".join(cells).partition("\ndef play_blelloch(")[0], {})["scan_alone"]
    scanned = torch.zeros(8, dtype=torch.int32)
    with simulator.trace(accesses=True) as events:
        launch(kernel, 1, 8, torch.tensor(NUMBERS, dtype=torch.int32), scanned)
    frames, *_ = barrier_steps(events, 8)
    after = [[int(s.text) for s in frame.shapes if isinstance(s, Box) and s.y > 60] for frame in frames]
    assert after == ROWS_OF_ARTICLE and scanned.tolist() == ROWS_OF_ARTICLE[-1]
