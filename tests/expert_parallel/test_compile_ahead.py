"""Kernels that are compiled in advance are those that a buffer uses, and reach the compiler once each."""

import pickle

import pytest
import torch
from helpers.expert_parallel import NUM_BYTES, SMALL, make_inputs, new_output, send
from helpers.low_latency import SMS

from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.expert_parallel.low_latency.config import shape_of_options
from moe_numba.expert_parallel.low_latency.exchange import exchange_kernels
from moe_numba.expert_parallel.ranks import compile_ahead
from moe_numba.expert_parallel.rings import launch_plans
from moe_numba.expert_parallel.rings.config import limits_of
from moe_numba.expert_parallel.rings.launch_plans import PlannedKernels
from moe_numba.runtime import cubin_cache, device
from moe_numba.runtime.device import gpu_of


@pytest.fixture
def loaded(monkeypatch):
    """Collect the definitions of the kernels that ranks load."""
    found, load = set(), launch_plans.Kernel.load
    monkeypatch.setattr(launch_plans.Kernel, "load", lambda kernel: (found.add(kernel.definition), load(kernel)))
    return found


def test_kernels_of_a_buffer(loaded):
    inputs = make_inputs([3, 2])

    def work(transport):
        buffer = Buffer(transport, NUM_BYTES)
        out = new_output(buffer, 8)
        for to in (None, out):
            given = send(buffer, transport.rank, inputs, out=to)
            buffer.combine(given[0], given[4], given[2], config=SMALL)
        out.close()
        buffer.destroy()
        return buffer.transport.device, inputs.x[0].shape[1]

    device, hidden = LocalGroup(2).run(work)[0]
    planned = PlannedKernels(2, NUM_BYTES, limits_of(gpu_of(device)))
    for to_output in (False, True):
        planned.combine(SMALL, hidden, 2, planned.dispatch(SMALL, hidden, topk=2, to_output=to_output))
    assert set(planned.definitions) == loaded and len(loaded) == 6
    assert pickle.loads(pickle.dumps(planned.definitions)) == planned.definitions, "they go to other processes"


@pytest.mark.parametrize("options", [{}, dict(use_fp8=True, protocol="flags")])
def test_kernels_of_a_low_latency_exchange(options, loaded):
    sizes = 3, 256, 4, 2  # tokens, hidden, experts, experts per token

    def work(transport):
        buffer = Buffer(transport, low_latency_mode=True)
        loaded.clear()
        buffer.low_latency(*sizes, num_sms=SMS, topk_idx_dtype=torch.int32, **options).close()
        buffer.destroy()

    LocalGroup(1).run(work)
    kernels = exchange_kernels(shape_of_options(1, *sizes, **options), torch.int32)
    assert set(kernels) == loaded and pickle.loads(pickle.dumps(kernels)) == kernels


def test_each_kernel_is_compiled_once(tmp_path, monkeypatch):
    """Here the calls are made in this process; `compile_calls` makes them in another one."""
    shapes = [shape_of_options(2, tokens, 256, 8, 2) for tokens in (1, 2, 1)]
    kernels, compiled = [kernel for shape in shapes for kernel in exchange_kernels(shape)], []

    def compile_calls(calls, gpu, processes):
        assert gpu == gpu_of(0) and processes == 2
        for call in calls:
            call()
        yield len(compiled), len(compiled)

    monkeypatch.setattr(device, "on_launch", lambda *launch: compiled.append((*launch[:2], launch[2]["launch_bounds"])))
    monkeypatch.setattr(compile_ahead, "compile_calls", compile_calls)
    monkeypatch.setenv(cubin_cache.FOLDER, "0")
    assert compile_ahead.compile_ahead(kernels) == 0 and not compiled, "nothing could use them"
    monkeypatch.setenv(cubin_cache.FOLDER, str(tmp_path))
    assert compile_ahead.compile_ahead(kernels, processes=2) == len(set(compiled)) == len(compiled) == 4
    assert {bounds for _, _, bounds in compiled} == {kernel.launch_bounds for kernel in kernels}
