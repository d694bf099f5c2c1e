"""The sizes that the notebooks on dispatch and combine run are ones that their kernels take."""

from moe_numba.bench.exchange_sizes import dispatch_sizes


def test_the_sizes_of_the_notebook_on_dispatch_fit_the_kernels():
    here = dispatch_sizes()
    threads = 32 * here.warps * here.ranks
    assert 64 <= threads <= 1024 and here.num_experts % here.ranks == 0 and here.chunk <= here.ring
    assert here.sms in here.sweep and here.document_sweep[1] == here.sms
    assert here.document_sweep[0] < here.sms < here.document_sweep[2]
    assert all(sms % 2 == 0 for sms in (*here.sweep, *here.document_sweep)) and 2 * here.hidden % 16 == 0
    assert here.devices is None or len(here.devices) == here.ranks
