"""Peers' own tests of routing and alignment; skipped where the folder has no copies of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from peers.stand_ins import FILES, FOLDER, ROOT

OWN = """
import torch
from sglang.kernels.ops.moe import no_such_function
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

def route():
    logits = torch.randn(4, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).cuda()
    return logits, *fused_topk(None, logits.to("cuda"), 2, renormalize=True)[:2]

def test_right():
    logits, weights, ids = route()
    assert ids.tolist() == logits.topk(2).indices.tolist()
    torch.testing.assert_close(weights.sum(1), torch.ones(4, device="cuda"))

def test_wrong():
    assert route()[2].tolist() == [[0, 1]] * 4

def test_missing():
    no_such_function()

def test_invalid_args_rejected():
    "Is in the table of differences, but passes."
"""


def run(folder, path, *options):
    """Run the tests of one file in a process of their own, which has the peers' import names."""
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parent)])
    plugins = "-p", "stand_ins", "-p", "no:cacheprovider", "--import-mode=importlib"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *options, folder / path],
        env=os.environ | {"PYTHONPATH": paths, "MOE_NUMBA_PEERS": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("path", [path for path in FILES if "/test_" in path])
def test_passes(path):
    peer = path.partition("/")[0]
    if absent := [name for name in FILES if name.startswith(f"{peer}/") and not (FOLDER / name).is_file()]:
        pytest.skip(f"{FOLDER / absent[0]} is absent; it comes from {FILES[absent[0]]}")
    done = run(FOLDER, path)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


def test_own_file(tmp_path):
    (tmp_path / "test_own.py").write_text(OWN)
    lines = run(tmp_path, "test_own.py", "--tb=line").stdout.splitlines()
    assert lines[0].startswith(".FFF") and "3 failed, 1 passed" in lines[-1], lines
    output = "\n".join(lines)
    for expected in ("sglang.kernels.ops.moe.no_such_function has no stand-in", "XPASS(strict)", "[0, 1]]"):
        assert expected in output, output
