"""Where a GPU runs the kernels, another process counts each step: it must be able to make every version again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("page_on_a_gpu.py")
CANNOT = "the simulator's process failed", "cannot be made again"
PAGES = (
    "01_gate_prompt",
    "02_gate_decode",
    "03_align_published",
    "04_align_one_launch",
    "05_shared_experts",
    "06_hopper_gemm",
    "07_grouped_gemm",
    "08_block_scales",
    "09_w4_weights",
    "10_dispatch_layout",
    "11_talk_to_a_peer",
    "12_dispatch",
    "13_combine",
    "14_low_latency",
    "15_moe_layer",
    "16_one_kernel",
)
SMALL = """
from moe_numba.course.lessons.align.published import lesson

# %%
def make(value):
    from numba import cuda

    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = value
    return kernel

# %%
lesson.step("one", make(1))
"""


def failures(page):
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0"}
    done = subprocess.run([sys.executable, SCRIPT, page], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    return [line for line in done.stdout.split("\n") if any(text in line for text in CANNOT)]


@pytest.mark.parametrize("name", PAGES)
def test_every_step_is_counted(name):
    assert not failures(ROOT / "notebooks" / f"{name}.py")


def test_a_maker_that_is_no_factory_is_found(tmp_path):
    page = tmp_path / "page.py"
    page.write_text("# %%" + SMALL)
    assert len(failures(page)) == 1
