"""The sizes of the dispatch and combine notebooks are valid for their kernels; other notebooks run with other sizes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_numba import simulator
from moe_numba.course import execute
from moe_numba.course.sizes import dispatch_sizes


@pytest.mark.parametrize(
    "gpus, sms, devices, max_sms", [(1, 132, [0, 0], 48), (1, 78, [0, 0], 32), (3, 78, [0, 1, 2], 48)]
)
def test_ctas_of_ranks_that_share_a_gpu_are_resident_at_once(monkeypatch, gpus, sms, devices, max_sms):
    properties = SimpleNamespace(multi_processor_count=sms)
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    sizes = dispatch_sizes()
    assert sizes.devices == devices and sizes.sweep[-1] == max_sms


def test_dispatch_sizes_are_valid():
    sizes = dispatch_sizes()
    threads = 32 * sizes.warps * sizes.ranks
    assert 64 <= threads <= 1024 and sizes.num_experts % sizes.ranks == 0 and sizes.chunk <= sizes.ring
    assert sizes.sms in sizes.sweep and sizes.deepep_sweep[1] == sizes.sms
    assert sizes.deepep_sweep[0] < sizes.sms < sizes.deepep_sweep[2]
    assert all(sms % 2 == 0 for sms in (*sizes.sweep, *sizes.deepep_sweep)) and 2 * sizes.hidden % 16 == 0
    assert sizes.devices is None or len(sizes.devices) == sizes.ranks


def test_gate_notebook_runs_with_other_sizes(tmp_path):
    """Four groups: the kernel for four tokens per warp does not support them, so the notebook leaves its step out."""
    source = (Path(__file__).parents[2] / "notebooks" / "01_gate.py").read_text()
    sizes = "EXPERTS, GROUPS, KEPT, TOPK = "
    assert f"{sizes}256, 8, 4, 8" in source
    path = tmp_path / "01_gate.py"
    path.write_text(source.replace(f"{sizes}256, 8, 4, 8", f"{sizes}128, 4, 2, 6"))
    execute.execute(path, env={"MOE_NUMBA_SIMULATE": "1"})


def test_align_notebook_runs_with_other_sizes(tmp_path):
    """A number of experts that is no power of two and no multiple of a warp, and ids that no vector fits."""
    source = (Path(__file__).parents[2] / "notebooks" / "02_align.py").read_text()
    for old, new in (
        ("EXPERTS, TOPK = (64, 4)", "EXPERTS, TOPK = (41, 3)"),
        ("TOKENS, FEW_TOKENS = (64, 8)", "TOKENS, FEW_TOKENS = (51, 7)"),
        ("BLOCK = 16 ", "BLOCK = 8 "),
        ("SMALL_EXPERTS = 16", "SMALL_EXPERTS = 33"),
    ):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = tmp_path / "02_align.py"
    path.write_text(source)
    execute.execute(path, env={"MOE_NUMBA_SIMULATE": "1"})


def test_align_one_launch_notebook_runs_with_other_sizes(tmp_path):
    """No size is a power of two, the experts fill no whole warps, and the CTAs do not divide by two."""
    source = (Path(__file__).parents[2] / "notebooks" / "03_align_one_launch.py").read_text()
    for name, sizes, others in (
        ("EXPERTS, TOPK, BLOCK", "(64, 4, 16)", "(48, 6, 7)"),
        ("TOKENS, FEW_TOKENS", "(64, 8)", "(50, 7)"),
        ("CTAS, THREADS", "(6, 128)", "(5, 96)"),
    ):
        assert f"{name} = {sizes} if SIMULATED" in source
        source = source.replace(f"{name} = {sizes}", f"{name} = {others}")
    path = tmp_path / "03_align_one_launch.py"
    path.write_text(source)
    execute.execute(path, env={"MOE_NUMBA_SIMULATE": "1"})
