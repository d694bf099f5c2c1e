"""The host side of `cuda`, as ordinary Numba-CUDA programs use it around their launches, and libdevice."""

import importlib
import math
import re

import numpy as np
import pytest

from moe_numba import simulator

# isort: split
from numba import cuda, float32, guvectorize, njit, vectorize
from numba.cuda import libdevice, random

from moe_numba.simulator.core.host import Unsupported

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")


@cuda.jit
def add_one(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] += 1


def is_poison(array, host=False):
    values = np.asarray(array if host else array.copy_to_host())
    return np.isnan(values).all() if values.dtype.kind in "fc" else (values != 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.int8, np.int32, np.uint64])
@pytest.mark.parametrize("shape, order", [(5, "C"), ((3, 4), "C"), ((3, 4), "F"), ((0,), "C"), ((), "C")])
def test_new_arrays_are_poison(shape, order, dtype):
    array = cuda.device_array(shape, dtype, order=order)
    assert array.shape == np.empty(shape).shape and array.dtype == dtype and is_poison(array)
    like = cuda.device_array_like(array)
    assert is_poison(like)
    if array.size:
        assert like.strides == array.strides == np.empty(shape, dtype, order).strides
    assert is_poison(cuda.mapped_array(shape, dtype)) and is_poison(cuda.mapped_array_like(array))
    for host in (cuda.pinned_array(shape, dtype), cuda.pinned_array_like(array), cuda.managed_array(shape, dtype)):
        assert is_poison(host, host=True)


def test_strides_are_kept():
    array = cuda.device_array((2, 3), np.int32, strides=(32, 8))
    assert array.strides == (32, 8) and is_poison(array)


def test_copies_to_the_device():
    host = np.arange(6, dtype=np.float32)
    there = cuda.to_device(host)
    host[:] = 0
    assert (there.copy_to_host() == np.arange(6)).all()
    assert is_poison(cuda.to_device(host, copy=False))
    target = cuda.device_array(6, np.float32)
    assert cuda.to_device(host, to=target) is target and (target.copy_to_host() == 0).all()
    assert cuda.to_device(there) is there
    out = np.empty(3, np.float32)
    assert there[1:4].copy_to_host(out) is out and out.tolist() == [1, 2, 3]


def test_streams_and_events():
    x, stream = np.zeros(100, np.float32), cuda.stream()
    start, end = cuda.event(timing=True), cuda.event()
    called = []
    with stream.auto_synchronize() as same, cuda.pinned(x), cuda.defer_cleanup(), cuda.profiling():
        start.record(same)
        there = cuda.to_device(x, stream=stream)
        add_one.forall(100, stream=stream)(there)
        there.copy_to_host(x, stream=stream)
        end.record(stream)
        stream.add_callback(lambda stream, status, arg: called.append(arg), "done")
    end.synchronize()
    cuda.synchronize()
    assert (x == 1).all() and called == ["done"] and end.query()
    assert math.isnan(start.elapsed_time(end)) and math.isnan(cuda.event_elapsed_time(start, end))
    with cuda.mapped(x) as shared:
        add_one[1, 128, cuda.default_stream()](shared)
    assert (x == 2).all()


def test_the_device_has_properties():
    device = cuda.get_current_device()
    assert device.compute_capability == simulator.capability.SIMULATED == cuda.gpus[0].compute_capability
    assert device.WARP_SIZE == 32 and device.MAX_THREADS_PER_BLOCK == 1024 and device.MULTIPROCESSOR_COUNT > 0
    assert (device.COMPUTE_CAPABILITY_MAJOR, device.COMPUTE_CAPABILITY_MINOR) == device.compute_capability
    assert device.CAN_MAP_HOST_MEMORY == device.UNIFIED_ADDRESSING == 1 and device.PCI_BUS_ID == 0
    free, total = cuda.current_context().get_memory_info()
    assert 0 < int(free) <= int(total)
    with cuda.gpus[0]:
        assert cuda.select_device(0).device is device and cuda.is_available() and len(cuda.gpus) == 1
    assert cuda.devices.gpus[0].name == device.name and cuda.devices.get_context().device is device
    assert cuda.is_cuda_array(cuda.device_array(3)) and not cuda.is_cuda_array(np.zeros(3))


@pytest.mark.parametrize(
    "call, error, said",
    [
        (lambda: cuda.compile_ptx(add_one, ()), Unsupported, "cuda.compile_ptx does not work in the simulator"),
        (lambda: cuda.declare_device("f", "int32(int32)")(1), Unsupported, "f does not work in the simulator"),
        (
            lambda: vectorize([(float32,)], target="cuda")(lambda x: x),
            Unsupported,
            "the function <lambda> of vectorize(target='cuda') needs signatures with a return type",
        ),
        (lambda: cuda.external_stream(1), Unsupported, "cuda.external_stream does not work in the simulator"),
        (lambda: libdevice.modf(1.0), Unsupported, "libdevice.modf does not work in the simulator"),
        (lambda: libdevice.fadd_ru(1.0, 2.0), Unsupported, "libdevice.fadd_ru does not work in the simulator"),
        (lambda: add_one.inspect_asm(), AttributeError, "kernel add_one has no attribute inspect_asm in the simulator"),
        (lambda: add_one[2.5, 32](np.zeros(3)), TypeError, "the grid is 2.5, but its dimensions must be integers"),
        (lambda: cuda.select_device(1), ValueError, "device_id is 1, but the simulator has one device, number 0"),
        (lambda: cuda.get_current_device().NO, AttributeError, "the simulated device has no attribute NO"),
    ],
)
def test_what_is_unsupported_is_named(call, error, said):
    with pytest.raises(error, match=re.escape(said)):
        call()


@cuda.jit
def apply_libdevice(out, x):
    i = cuda.grid(1)
    if i < x.size:
        out[i, 0] = libdevice.sinf(x[i])
        out[i, 1] = libdevice.fmax(x[i], 0.25)
        out[i, 2] = libdevice.rsqrtf(x[i])
        out[i, 3] = libdevice.fma_rn(x[i], x[i], 1.0)
        out[i, 4] = libdevice.fast_powf(x[i], 2.0)
        out[i, 5] = libdevice.atan2(x[i], 2.0)
        out[i, 6] = libdevice.roundf(x[i] - float32(0.5))
        out[i, 7] = libdevice.tgamma(x[i])


def test_libdevice_computes():
    x, out = np.linspace(0.1, 3, 20).astype(np.float32), np.zeros((20, 8))
    apply_libdevice[1, 32](out, x)
    gamma = [math.gamma(v) for v in x.tolist()]
    rounded = np.sign(x - 0.5) * np.floor(np.abs(x - np.float32(0.5)) + 0.5)
    wide = x.astype(np.float64)
    expected = (np.sin(x), np.maximum(wide, 0.25), x**-0.5, wide * wide + 1, x * x, np.arctan2(wide, 2), rounded, gamma)
    np.testing.assert_allclose(out, np.stack(expected, axis=1), rtol=1e-6)
    assert type(libdevice.sinf(1)) is np.float32 and type(libdevice.sin(1)) is np.float64


def test_functions_for_the_cpu_still_compile():
    assert njit(lambda n: np.arange(n).sum() + math.sqrt(n))(4) == 8


@cuda.jit
def draw(out, states):
    i = cuda.grid(1)
    out[i] = random.xoroshiro128p_uniform_float64(states, i)


@pytest.mark.parametrize("n", [32, 1024])  # more than 1000 states are initialised by compiled code
def test_random_numbers_are_those_of_a_gpu(n):
    states, out = random.create_xoroshiro128p_states(n, seed=3), np.zeros(n)
    few = random.create_xoroshiro128p_states(32, seed=3)
    assert (states.copy_to_host()[:32] == few.copy_to_host()).all()
    draw[n // 32, 32](out, states)
    assert 0 <= out.min() and out.max() < 1 and len(set(out)) == n
    # xoroshiro128+ of the first state: the 53 upper bits of the sum.
    total = sum(int(few.copy_to_host()[0][name]) for name in ("s0", "s1")) % 2**64
    assert out[0] == (total >> 11) / 2**53


@cuda.jit
def apply_ufunc(out, x):
    np.sin(x, out)
    np.fmax(out, x, out)


def test_numpy_functions_apply_to_whole_arrays():
    x, out = np.linspace(0, 1, 5), np.zeros(5)
    apply_ufunc[1, 1](out, x)
    assert (out == np.fmax(np.sin(x), x)).all()


@vectorize(["float32(float32, float32)", "int64(int64, int64)"], target="cuda")
def difference(x, y):
    return x - y


@vectorize(["int32(int32, int32)"], target="cuda")
def total(x, y):
    return x + y


@guvectorize(["void(float64[:,:], float64[:,:], float64[:,:])"], "(m,n),(n,p)->(m,p)", target="cuda")
def product(a, b, c):
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            c[i, j] = 0
            for k in range(a.shape[1]):
                c[i, j] += a[i, k] * b[k, j]


@guvectorize(["void(float32, float32[:], float32[:])"], "(),(n)->(n)", target="cuda")
def scaled(factor, x, out):
    for i in range(x.shape[0]):
        out[i] = factor * x[i]


@pytest.mark.parametrize("there", [np.asarray, cuda.to_device])
def test_ufuncs_launch_kernels(there):
    host = lambda array: array.copy_to_host() if there is cuda.to_device else array
    x = np.random.default_rng(0).random((3, 4), np.float32)
    result = host(difference(there(x), there(x[:, :1].copy())))
    assert result.dtype == np.float32 and (result == x - x[:, :1]).all()
    n = np.arange(7)
    assert (host(difference(there(n), 2)) == n - 2).all()
    out = there(np.zeros(7, np.int64))
    difference(there(n), there(n[::-1].copy()), out=out)
    assert (host(out) == n - n[::-1]).all()
    assert total.reduce(there(n.astype(np.int32))) == 21
    a, b = np.random.default_rng(0).random((5, 3, 4)), np.random.default_rng(1).random((4, 2))
    np.testing.assert_allclose(host(product(there(a), there(b))), a @ b)
    np.testing.assert_allclose(host(product(there(a[0]), there(b))), a[0] @ b)
    assert (host(scaled(np.float32(3), there(x))) == 3 * x).all()


def test_ufuncs_use_the_vector_engine():
    with simulator.settings.settings.override(engine="vector"):
        assert (difference(np.arange(5000), 1) == np.arange(5000) - 1).all()


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_reductions_take_the_options_of_numba(dtype):
    add, x = cuda.reduce(lambda x, y: x + y), np.arange(1, 6, dtype=dtype)
    assert add(x) == 15 and add(x).dtype == dtype and add(cuda.to_device(x), size=3, init=4, stream=cuda.stream()) == 10
    result = cuda.device_array(1, dtype)
    assert add(x[:0], init=2) == 2 and add(x, res=result) is None and result.copy_to_host() == 15
    with pytest.raises(TypeError, match="only support 1D array"):
        add(x.reshape(1, 5))


def test_kernels_tell_how_many_blocks_fit():
    overload = add_one.overloads["any signature"]
    assert overload.max_cooperative_grid_blocks(256) == 8 * cuda.get_current_device().MULTIPROCESSOR_COUNT
    assert overload.max_cooperative_grid_blocks((32, 32)) == 2 * cuda.get_current_device().MULTIPROCESSOR_COUNT


@njit
def first_plus(x, i):
    return x[0] + i


@cuda.jit
@njit
def call_cpu_function(out):
    i = cuda.threadIdx.x
    out[i] = first_plus(out, i) if i else out[0]


def test_kernels_call_functions_for_the_cpu():
    out = np.full(32, 5.0)
    call_cpu_function.configure(1, 32)(out)
    assert out.tolist() == [5.0 + i for i in range(32)]
    assert first_plus(out, 1) == 6 and first_plus.signatures


@cuda.jit
def last_of_each_row(x, out, i):
    out[-1] = x[1, -1]
    out[-2] += x[-2, i]


def test_negative_literals_count_from_the_end():
    x, out = np.arange(6.0).reshape(2, 3), np.zeros(4)
    last_of_each_row[1, 1](x, out, 1)
    assert out.tolist() == [0, 0, 1, 5]


@cuda.jit
def copy_from_half(x, out, i):
    out[i] = x[i / 2]


@cuda.jit
def store_at_half(x, out, i):
    x[i, i / 2] = out[i]


def test_an_index_must_be_an_integer():
    with pytest.raises(simulator.OutOfBounds, match=r"index 1\.0 of x \(2 x float64\) is no integer"):
        copy_from_half[1, 1](np.zeros(2), np.zeros(3), 2)
    with pytest.raises(simulator.OutOfBounds, match=r"index \(2, 1\.0\) of x \(3 x 3 x float64\) is no integer"):
        store_at_half[1, 1](np.zeros((3, 3)), np.zeros(3), np.int32(2))


@cuda.jit
def add_to(out, i):
    cuda.atomic.add(out, i, 1)


def test_computed_negative_indices_are_errors(monkeypatch):
    with pytest.raises(simulator.OutOfBounds, match=r"index \(-2, -1\) is outside x"):
        last_of_each_row[1, 1](np.zeros((2, 3)), np.zeros(4), -1)
    with pytest.raises(simulator.OutOfBounds, match="index -2 is outside out"):
        last_of_each_row[1, 1](np.zeros((2, 3)), np.zeros(1), 0)
    with pytest.raises(simulator.OutOfBounds, match="index -1 is outside out"):
        add_to[1, 1](np.zeros(4), -1)
    monkeypatch.setenv("MOE_NUMBA_WRAPAROUND", "1")
    out = np.zeros(4)
    last_of_each_row[1, 1](np.ones((2, 3)), out, -3)
    add_to[1, 1](out, -4)
    assert out.tolist() == [1, 0, 1, 1]
    for i in (-5, 4):
        with pytest.raises(simulator.OutOfBounds, match=f"index {i} is outside out"):
            add_to[1, 1](out, i)
    with pytest.raises(simulator.OutOfBounds, match="index -1 is outside out"):
        simulator.run(add_to, 1, 1, (simulator.pointer(out), -1))


def test_names_of_numba_cuda_mlir_are_those_of_the_simulated_modules():
    for name, real in (("cuda", cuda), ("cuda.random", random), ("numba_cuda.libdevice", libdevice)):
        assert importlib.import_module(f"numba_cuda_mlir.{name}") is real
    from numba_cuda_mlir.types import int32

    @cuda.jit
    def kernel(out):
        total = int32(0)
        for item in cuda.literal_unroll((1, 2.5)):
            total += int32(item)
        out[cuda.grid(1)] = total

    out = np.zeros(4, np.int32)
    kernel[1, 4](out)
    assert (out == 3).all() and cuda.random.__spec__.name == "numba.cuda.random"
    with pytest.raises(ModuleNotFoundError, match="numba_cuda_mlir.lowering does not work in the simulator, which has"):
        importlib.import_module("numba_cuda_mlir.lowering")
