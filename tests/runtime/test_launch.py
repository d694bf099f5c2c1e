"""Kernel launcher: argument types, launch shapes and errors; on a GPU also attributes, streams and limits."""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numba import cuda, int32

from moe_numba import biased_grouped_topk, biased_grouped_topk_align, moe_align_block_size, simulator
from moe_numba.ptx.memory import atom_add_s32
from moe_numba.runtime import driver_launch
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.dlpack import as_tensor, call_with_tensors
from moe_numba.runtime.launch import launch, launcher
from moe_numba.runtime.prepare import prepare
from moe_numba.runtime.tensor_map import encode_tensor_map
from moe_numba.runtime.validate import UnsupportedDeviceError, check_device, check_int


@cuda.jit
def fill(out, value, scale, width):
    x = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    y = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    if x < width:
        out[y * width + x] = value * scale + y


@pytest.mark.parametrize("grid, block", [((3, 2), (32, 4)), ((3, 8, 1), 32), ((3, 1), (32, 8, 1))])
def test_shapes_of_grid_and_block(grid, block, device):
    out = torch.full((8, 96), -1.0, device=device)
    launch(fill, grid, block, out, 3, 0.5, 96)
    assert torch.equal(out, (torch.arange(8.0, device=device) + 1.5)[:, None].expand(8, 96))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float64, torch.float32])
def test_a_pointer_has_the_tensors_dtype(dtype, device):
    out = torch.zeros(4, dtype=dtype, device=device)
    launch(fill, 1, 32, out, 7, 1.0, 4)
    assert out.tolist() == [7] * 4


def test_a_pointer_starts_at_the_tensors_offset(device):
    out = torch.zeros(8, device=device)
    launch(fill, 1, 32, out[3:], 7, 1.0, 2)
    assert out.tolist() == [0, 0, 0, 7, 7, 0, 0, 0]


@cuda.jit
def copy_bits(source, out):
    out[cuda.threadIdx.x] = source[cuda.threadIdx.x]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_short_floats_are_passed_as_bits(dtype, device):
    source = torch.tensor([1.0, -2.0, 0.5, 0.0], device=device).to(dtype)
    out = torch.zeros(4, dtype=torch.int32, device=device)
    launch(copy_bits, 1, 4, source, out)
    bits = source.view(torch.uint8 if source.element_size() == 1 else torch.int16)
    assert out.tolist() == [b & 0xFFFF for b in bits.tolist()]


@cuda.jit
def store_number(out, number):
    out[0] = number


def test_numbers_keep_their_numpy_type(device):
    out = torch.zeros(1, dtype=torch.int64, device=device)
    launch(store_number, 1, 1, out, np.int64(1 << 40))
    assert out.item() == 1 << 40
    with pytest.raises(ValueError, match=r"the number 1099511627776 does not fit int32: pass numpy.int64"):
        launch(store_number, 1, 1, out, 1 << 40)


def test_unsupported_arguments_are_refused(device):
    with pytest.raises(TypeError, match="a kernel takes tensors, tensor maps and numbers, not str"):
        launch(store_number, 1, 1, torch.zeros(1, device=device), "x")
    with pytest.raises(ValueError, match="launch of store_number: no argument is a tensor"):
        launch(store_number, 1, 1, 3, 4)


def test_launchers_are_cached(device):
    assert launcher(store_number, ("int64*", "int64"), 0) is launcher(store_number, ("int64*", "int64"), 0)
    assert launcher(store_number, ("int64*", "int64"), 0) is not launcher(store_number, ("int32*", "int64"), 0)


def test_the_wrong_device_is_refused():
    wrong = torch.device("cuda" if simulator.ENABLED else "cpu")
    with pytest.raises(ValueError, match="logits is on .* it must be on"):
        check_device(wrong, "logits", (8, 0))


def test_arrays_of_another_library_become_tensors_and_results_are_of_that_library():
    def function(x, y, factor, out=None):
        assert isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and factor == 2
        return x + y if out is None else out[0].copy_(x + y)

    x, y = np.arange(4.0), torch.ones(4)
    result = call_with_tensors(function, "x", dict(x=x, y=y, factor=2))
    assert type(result) is np.ndarray and result.tolist() == [1, 2, 3, 4]
    out = (np.zeros(4),)
    assert call_with_tensors(function, "x", dict(x=x, y=y, factor=2, out=out)) is out
    assert out[0].tolist() == [1, 2, 3, 4]
    assert as_tensor(y, "y") is y
    with pytest.raises(TypeError, match="x is list; it must be a tensor, or an array that supports DLPack"):
        call_with_tensors(function, "x", dict(x=[1.0], y=y, factor=2))


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_library_are_accepted(value):
    assert type(check_int("n", value, 1, 5)) is int


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", None, torch.tensor(3)])
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(TypeError, match="n is .*; it must be an int"):
        check_int("n", value, 1, 5)


@cuda.jit
def reverse_in_shared_memory(out, count):
    buffer = cuda.shared.array(0, int32)
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        buffer[i] = i
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        out[i] = buffer[count - 1 - i]


@pytest.mark.parametrize("count", [64, 25_000])
def test_dynamic_shared_memory_beyond_48_kb(count, device):
    out = torch.zeros(count, dtype=torch.int32, device=device)
    launch(reverse_in_shared_memory, 1, 32, out, count, shared_bytes=4 * count)
    assert torch.equal(out.cpu(), torch.arange(count, dtype=torch.int32).flip(0))


def test_cooperative_launch(device):
    """Every block waits for all others."""
    out = torch.zeros(64, dtype=torch.int32, device=device)
    launch(barrier_by_counter, 64, 32, out, torch.zeros(1, dtype=torch.int32, device=device), cooperative=True)
    assert (out == 64).all()


@cuda.jit
def barrier_by_counter(out, arrived):
    if cuda.threadIdx.x == 0:
        atom_add_s32(arrived, 0, 1)
        while atom_add_s32(arrived, 0, 0) < cuda.gridDim.x:
            cuda.nanosleep(100)
        out[cuda.blockIdx.x] = atom_add_s32(arrived, 0, 0)


@pytest.mark.gpu
def test_a_gpu_that_is_too_old_is_refused():
    with pytest.raises(UnsupportedDeviceError, match=r"has compute capability .*; 99.0 or newer is needed"):
        check_device(torch.device("cuda"), "logits", (99, 0))


@pytest.mark.gpu
def test_too_much_shared_memory_is_refused():
    with pytest.raises(ValueError, match="shared_bytes is 1000000, more than a block of this GPU can have"):
        launch(
            reverse_in_shared_memory, 1, 32, torch.zeros(4, dtype=torch.int32, device="cuda"), 4, shared_bytes=1_000_000
        )


@pytest.mark.gpu
def test_a_failed_launch_raises():
    message = r"^CUDA_ERROR_INVALID_VALUE \(invalid argument\): launch of store_number with grid 1, block 2048"
    with pytest.raises(RuntimeError, match=message):
        launch(store_number, 1, 2048, torch.zeros(1, dtype=torch.int64, device="cuda"), np.int64(1))


def test_the_packed_configuration_is_the_drivers_structure():
    driver = pytest.importorskip("cuda.bindings.driver")
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = 2, 3, 4
    config.blockDimX, config.blockDimY, config.blockDimZ = 5, 6, 7
    config.sharedMemBytes, config.hStream = 8, 9
    packed = struct.pack("=" + driver_launch._CONFIG_FORMAT, 2, 3, 4, 5, 6, 7, 8, 9)
    assert ctypes.string_at(config.getPtr(), len(packed)) == packed
    attribute.id, value = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, attribute.value
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = 2, 3, 4
    attribute.value = value
    packed = driver_launch._attributes((2, 3, 4), False, False).raw
    assert ctypes.string_at(attribute.getPtr(), 20) == packed[:20] and len(packed) == driver_launch._ATTRIBUTE_BYTES


def test_a_prepared_call_reads_its_inputs_again(device):
    out, numbers = torch.zeros(4, dtype=torch.int32, device=device), torch.arange(4.0, device=device)
    prepared = prepare(lambda: launch(copy_bits, 1, 4, numbers.view(torch.int32), out) or out)
    numbers += 1
    assert prepared() is out and torch.equal(out.view(torch.float32), numbers)


STUBS = {  # of the driver, which counts the calls of cuInit, and of NVML, which finds a GPU
    "libcuda.so.1": """
        #include <stdio.h>
        int cuInit(unsigned flags) { puts("cuInit"); fflush(stdout); return 100; }
    """,
    "libnvidia-ml.so.1": """
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
        int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = gpu; return 0; }
        int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) { *major = 9, *minor = 0; return 0; }
    """,
}


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler for stubs of the driver")
def test_importing_the_package_does_not_initialise_cuda(tmp_path):
    """A process that has initialised CUDA cannot use it after a fork."""
    for name, source in STUBS.items():
        compile_stub = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", tmp_path / name]
        subprocess.run(compile_stub, input=source, text=True, check=True)
    code = """
import ctypes, moe_numba
from moe_numba import biased_grouped_topk
print(moe_numba.simulator.REASON, flush=True)
ctypes.CDLL("libcuda.so.1").cuInit(0)
"""
    environment = {n: value for n, value in os.environ.items() if "SIM" not in n and n != "CUDA_VISIBLE_DEVICES"}
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a GPU was found", "cuInit"]


@pytest.mark.gpu
def test_importing_the_package_leaves_cuda_to_forked_processes():
    """A process that has initialised CUDA cannot use it after a fork."""
    code = """
import os, moe_numba, torch
from moe_numba import biased_grouped_topk
child = os.fork()
if child == 0:
    os._exit(0 if torch.zeros(1, device="cuda").item() == 0 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_a_call_from_a_new_thread():
    """A new thread has no CUDA context until it asks for one."""
    out = torch.zeros(8, dtype=torch.int64, device="cuda")
    views, errors = out.split(1), []

    def work(i):
        try:
            launch(store_number, 1, 1, views[i], np.int64(i), stream=0)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and out.tolist() == list(range(8))


@pytest.mark.gpu
def test_a_prepared_call_in_a_graph_and_on_another_stream():
    source, out = torch.zeros(4, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    prepared = prepare(launch, copy_bits, 1, 4, source.view(torch.int32), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared()
    for value, run in ((1.0, graph.replay), (2.0, prepared)):
        source.fill_(value)
        run()
        assert out.view(torch.float32).tolist() == [value] * 4
    with torch.cuda.stream(torch.cuda.Stream()):
        source.fill_(3.0)
        prepared()
        assert out.view(torch.float32).tolist() == [3.0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("options", [dict(cluster=2), dict(cluster=(2, 1, 1)), dict(dependent=True)])
def test_launch_attributes(options):
    out = torch.zeros(8, 96, device="cuda")
    if "cluster" in options and not gpu_of(0).has_clusters:
        with pytest.raises(UnsupportedDeviceError, match="fill needs thread block clusters"):
            launch(fill, (4, 8), 32, out, 3, 0.5, 96, **options)
        return
    launch(fill, (4, 8), 32, out, 3, 0.5, 96, **options)
    assert torch.equal(out, (torch.arange(8.0, device="cuda") + 1.5)[:, None].expand(8, 96))


@pytest.mark.gpu
def test_graph_capture_on_the_current_stream():
    out = torch.zeros(8, 96, device="cuda")
    launch(fill, (3, 8), 32, out, 3, 0.5, 96)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(fill, (3, 8), 32, out, 5, 0.5, 96)
    out.zero_()
    graph.replay()
    assert out[0, 0].item() == 2.5


def test_arrays_of_another_library_beside_tensors():
    """Such as a bias that NumPy has loaded; what is no array is refused by name."""
    logits, ids = torch.randn(3, 8), torch.randint(0, 8, (3, 2), dtype=torch.int32)
    bias, expert_map = np.linspace(-1, 1, 8, dtype=np.float32), np.arange(8, dtype=np.int32)
    if simulator.ENABLED:  # on a GPU they would have to be CuPy's
        calls = (biased_grouped_topk, (logits, bias, 2), {}), (moe_align_block_size, (ids, 4, 8, expert_map), {})
        calls += ((biased_grouped_topk_align, (logits, bias, 2, 4), dict(expert_map=expert_map)),)
        for function, arguments, options in calls:
            tensors = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arguments]
            wanted = function(*tensors, **{name: torch.from_numpy(a) for name, a in options.items()})
            assert all(map(torch.equal, function(*arguments, **options), wanted))
    with pytest.raises(TypeError, match="correction_bias is list; it must be a tensor"):
        biased_grouped_topk(logits, [0.0] * 8, 2)
    with pytest.raises(TypeError, match="expert_map is list; it must be a tensor"):
        moe_align_block_size(ids, 4, 8, [0] * 8)


@pytest.mark.gpu
def test_a_new_thread_can_encode_a_tensor_map():
    """A thread has no current context before its first call of the CUDA runtime."""
    with ThreadPoolExecutor(1) as pool:
        encoded = pool.submit(encode_tensor_map, torch.zeros(48, 80, device="cuda"), (16, 16)).result()
    assert len(encoded) == 128
