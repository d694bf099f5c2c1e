"""Reads of memory that nothing has written: `moe_numba.simulator.core.uninitialized` and `unknown`."""

import gc

import numpy as np
import pytest
import torch

from moe_numba import simulator
from moe_numba.simulator.core import uninitialized

# isort: split
from numba import cuda, float32, int32, uint8

from moe_numba.ptx.memory import ld_global_s32x4, ld_shared_s32x4, st_global_s32x4, st_shared_s32x4
from moe_numba.runtime.launch import launch
from moe_numba.simulator.core.settings import override_settings

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


# --- shared and local memory -----------------------------------------------------------------------------------------


@cuda.jit(device=True)
def twice(v):
    return 2 * v


def sums_in_place(out, a, b, t):
    cuda.atomic.add(a, 0, float32(t))


def adds_to_an_element(out, a, b, t):
    a[t] += 1
    out[t] = a[t]


def branches(out, a, b, t):
    if a[t] > 1:
        out[t] = 1


def branches_on_a_computed_value(out, a, b, t):
    y = int32(twice(a[t]) + 1)
    while y > 3:
        y -= 1


def indexes(out, a, b, t):
    out[b[t]] = 1


def indexes_shared_memory(out, a, b, t):
    a[b[t] & 31] = 1


def loops(out, a, b, t):
    for i in range(b[3]):
        out[t] = i


def stores_to_global_memory(out, a, b, t):
    out[t] = -a[t]


def copies_first(out, a, b, t):
    a[t] = b[t] + 1
    b[t] = int32(a[t])
    out[t] = b[t]


def adds_to_global_memory(out, a, b, t):
    cuda.atomic.add(out, 0, a[t])


def exchanges_it(out, a, b, t):
    out[t] = cuda.shfl_xor_sync(0xFFFFFFFF, a[t], 1)


def forgets_one_lane(out, a, b, t):
    if t != 7:
        a[t] = 1
        b[t] = 1
    out[t] = a[t]


def reads_behind_what_was_written(out, a, b, t):
    a[0] = 1
    cuda.syncwarp()
    out[t] = a[t // 31]


def masks_it(out, a, b, t):
    if t < 16:
        a[t] = 1
    y = twice(a[t]) + 1
    out[t] = y if t < 16 else 0.0


def masks_it_with_and(out, a, b, t):
    if (t > 40) & (a[t] > 0):
        out[t] = 1


def copies_it(out, a, b, t):
    a[t] = a[t] + 1
    b[t] = b[t]


def writes_first(out, a, b, t):
    a[t], b[t] = t, t
    if a[t] + b[t] >= 0:
        out[t] = a[b[t]]


def writes_a_part_in_each_branch(out, a, b, t):
    if t % 2:
        a[t] = 1
    else:
        a[t] = 2
    out[t] = a[t]


MATTERS = {  # kernel -> what the message says of the value, and the array that is read
    sums_in_place: ("", "a"),
    adds_to_an_element: ("; the value is stored to index .* of out", "a"),
    branches: ("; the value decides a branch", "a"),
    branches_on_a_computed_value: ("; the value decides a branch", "a"),
    indexes: ("; the value is an index of out", "b"),
    indexes_shared_memory: ("; the value is an index of the (shared|local) array", "b"),
    loops: ("; the value is an index, or the length of a loop", "b"),
    stores_to_global_memory: ("; the value is stored to index .* of out", "a"),
    copies_first: ("; the value is stored to index .* of out", "b"),
    adds_to_global_memory: ("; the value is an operand of an atomic operation on index 0 of out", "a"),
    exchanges_it: ("; the value is stored to index .* of out", "a"),
    forgets_one_lane: ("; the value is stored to index 7 of out", "a"),
    reads_behind_what_was_written: ("; the value is stored to index 31 of out", "a"),
}
DOES_NOT_MATTER = [masks_it, masks_it_with_and, copies_it, writes_first, writes_a_part_in_each_branch]


def kernel_with(body, space):
    step = cuda.jit(device=True)(body)

    @cuda.jit
    def in_shared_memory(out):
        a = cuda.shared.array(32, float32)
        b = cuda.shared.array(32, int32)
        step(out, a, b, cuda.threadIdx.x)

    @cuda.jit
    def in_local_memory(out):
        a = cuda.local.array(32, float32)
        b = cuda.local.array(32, int32)
        step(out, a, b, cuda.threadIdx.x)

    return in_shared_memory if space == "shared" else in_local_memory


@pytest.mark.parametrize("engine", ["threads", "either"])
@pytest.mark.parametrize("space", ["shared", "local"])
@pytest.mark.parametrize("body", [*MATTERS, *DOES_NOT_MATTER], ids=lambda body: body.__name__)
def test_uninitialised_shared_and_local_memory(body, space, engine):
    kernel, out = kernel_with(body, space), np.zeros(32)
    with simulator.races(), override_settings(engine=engine):
        if body in DOES_NOT_MATTER:
            kernel[1, 32](out)
            return
        how, array = MATTERS[body]
        line = kernel.py_func.__code__.co_firstlineno + (2 if array == "a" else 3)
        words = rf"at {body.__name__}, .*, reads index \d+ of the {space} array of test_uninitialized.py:{line} \(32 x"
        with pytest.raises(simulator.UninitializedRead, match=f"{words} .*, which nothing has written{how}"):
            kernel[1, 32](out)


@pytest.mark.parametrize("space", ["shared", "local"])
@pytest.mark.parametrize("body", [writes_first, writes_a_part_in_each_branch], ids=lambda body: body.__name__)
def test_kernels_that_write_before_they_read_run_as_vectors(body, space):
    with simulator.races(), override_settings(engine="vector"):
        kernel_with(body, space)[1, 32](np.zeros(32))


@pytest.mark.parametrize("engine", ["threads", "either"])
@pytest.mark.parametrize("kind", ["a part is used", "padding is used", "padding is stored", "nothing is written"])
def test_vectors_of_shared_memory(kind, engine):
    @cuda.jit
    def kernel(out):
        tile, t = cuda.shared.array(128, int32, 16), cuda.threadIdx.x
        if kind != "nothing is written":
            tile[4 * t] = t
        a, b, c, d = ld_shared_s32x4(tile, int32(4 * t))
        st_shared_s32x4(tile, int32(4 * t), a, b, c, d)
        a, b, c, d = ld_shared_s32x4(tile, int32(4 * t))
        if kind == "padding is stored":
            st_global_s32x4(out, int32(4 * t), a, b, c, d)
        else:
            out[4 * t] = b if kind == "padding is used" else a

    out = torch.zeros(128, dtype=torch.int32)
    with simulator.races(), override_settings(engine=engine):
        if kind in ("a part is used", "padding is stored"):
            launch(kernel, 1, 32, out)
            assert out[::4].tolist() == list(range(32))
        else:
            with pytest.raises(simulator.UninitializedRead, match="reads index .* of the shared array"):
                launch(kernel, 1, 32, out)


@pytest.mark.parametrize("engine", ["threads", "either"])
def test_bytes_are_known_if_a_byte_of_their_word_is(engine):
    @cuda.jit
    def kernel(out, step):
        tile, t = cuda.shared.array(32, uint8), cuda.threadIdx.x
        if t % step == 0:
            tile[t] = 255
        cuda.syncthreads()
        out[t] = tile[t]

    with simulator.races(), override_settings(engine=engine):
        kernel[1, 32](np.zeros(32), 4)
        with pytest.raises(simulator.UninitializedRead):
            kernel[1, 32](np.zeros(32), 8)
