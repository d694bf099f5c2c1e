"""Reads of global memory that nothing has written: `moe_numba.simulator.core.uninitialized`."""

import gc

import numpy as np
import pytest
import torch

from moe_numba import simulator
from moe_numba.simulator.core import uninitialized

# isort: split
from numba import cuda, int32

from moe_numba.ptx.memory import ld_global_s32x4
from moe_numba.runtime.launch import launch

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="needs the simulator")


@cuda.jit
def copy(x, y):
    i = cuda.grid(1)
    if i < len(y):
        y[i] = x[i]


@cuda.jit
def last(x, y):
    y[0] = x[len(x) - 1]


@cuda.jit
def add_one(x):
    cuda.atomic.add(x, cuda.grid(1), 1)


@cuda.jit
def first_of_vectors(x, y):
    y[cuda.grid(1)] = ld_global_s32x4(x, int32(4 * cuda.grid(1)))[0]


def empty_tensors(dtype):
    x = torch.zeros(64, dtype=dtype)
    return [
        torch.empty(64, dtype=dtype),
        torch.empty_like(x),
        x.new_empty(64),
        torch.empty_strided((64,), (1,), dtype=dtype),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16, torch.uint8, torch.int64], ids=str)
def test_a_read_of_an_empty_tensor_is_reported(dtype):
    with simulator.races():
        for x in empty_tensors(dtype):
            with pytest.raises(simulator.UninitializedRead, match=r"lane \d+, at copy, .*, reads index \d+ of x "):
                copy[2, 32](x, torch.zeros(64, dtype=dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.float64], ids=lambda dtype: dtype.__name__)
def test_a_read_of_an_empty_device_array_is_reported(dtype):
    x = cuda.device_array(64, dtype)  # outside of the context
    with simulator.races(), pytest.raises(simulator.UninitializedRead):
        copy[2, 32](x, cuda.device_array(64, dtype))


@pytest.mark.parametrize("size, dtype", [(1, np.int8), (1, np.float16), (3, np.float16), (5, np.int8)])
def test_the_last_bytes_of_an_array_are_checked(size, dtype):
    x, y = cuda.device_array(size, dtype), cuda.device_array(1, dtype)
    x[: size - 1] = 0
    with simulator.races(), pytest.raises(simulator.UninitializedRead):
        last[1, 1](x, y)


def by_torch(x):
    x.fill_(1)


def by_numpy(x):
    x.numpy()[:] = 0


def by_kernel(x):
    copy[2, 32](torch.ones_like(x), x)


@pytest.mark.parametrize("write", [by_torch, by_numpy, by_kernel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8], ids=str)
def test_written_tensors_are_read(write, dtype):
    with simulator.races():
        x, y = torch.empty(64, dtype=dtype), torch.empty(64, dtype=dtype)
        write(x)
        copy[2, 32](x, y)
    assert torch.equal(x, y)


def test_the_first_unwritten_element_is_named():
    with simulator.races():
        x = torch.empty(64)
        x[:63] = 1
        with pytest.raises(simulator.UninitializedRead, match=r"warp 1 lane 31, .* index 63 of x \(64 x float32\)"):
            copy[1, 64](x, torch.empty(64))


def test_a_view_of_an_empty_tensor():
    with simulator.races():
        x = torch.empty(2, 64)[1].view(torch.int32)
        with pytest.raises(simulator.UninitializedRead):
            copy[2, 32](x, torch.empty(64, dtype=torch.int32))


def test_an_atomic_reads_what_it_updates():
    with simulator.races():
        x = torch.empty(32, dtype=torch.int32)
        with pytest.raises(simulator.UninitializedRead):
            add_one[1, 32](x)
        add_one[1, 32](x.zero_())
    assert x.tolist() == [1] * 32


def test_a_vector_is_reported_if_all_of_it_is_unwritten():
    with simulator.races():
        x = torch.empty(128, dtype=torch.int32)
        x[::4] = torch.arange(32, dtype=torch.int32)
        y = torch.empty(32, dtype=torch.int32)
        launch(first_of_vectors, 1, 32, x, y)
        assert y.tolist() == list(range(32))
        x = torch.empty(128, dtype=torch.int32)
        with pytest.raises(simulator.UninitializedRead):
            launch(first_of_vectors, 1, 32, x, y)


def test_nothing_is_reported_without_races():
    copy[2, 32](torch.empty(64), torch.empty(64))
    with simulator.races():
        x = torch.empty(64)
    copy[2, 32](x, torch.empty(64))


def test_freed_memory_is_forgotten():
    gc.collect()
    before = len(uninitialized._allocations)
    with simulator.races():
        tensors = [torch.empty(1000) for _ in range(5)]
        view = tensors[0][500:]
        assert len(uninitialized._allocations) == before + 5
        del tensors
        gc.collect()
        assert len(uninitialized._allocations) == before + 1 == len(uninitialized._addresses)
        with pytest.raises(simulator.UninitializedRead):
            copy[2, 32](view, torch.empty(64))
