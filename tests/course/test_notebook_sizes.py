"""The sizes of the dispatch and combine notebooks are valid for their kernels."""

from types import SimpleNamespace

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.pages.sizes import dispatch_sizes


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
