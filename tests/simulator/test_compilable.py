"""Simulator: kernels that Numba would not compile are refused before they start."""

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32

SIZE, SHAPE, CONFIG, NUMPY_SIZE = 4, (4, 8), namedtuple("Config", "size")(4), np.int32(4)
ROOT = Path(__file__).parents[2]


def uses_dict(out, n):
    d = {1: n}
    out[0] = d[1]


def calls_dict(out, n):
    d = dict()
    d[1] = n


def uses_set(out, n):
    out[0] = n in {1, 2}


def uses_list(out, n):
    items = [n, n]
    out[0] = items[n]


def uses_list_comprehension(out, n):
    items = [i for i in range(4)]
    out[0] = items[n]


def uses_f_string(out, n):
    print(f"n is {n}")


def uses_try(out, n):
    try:
        out[0] = 1
    except Exception:
        out[0] = 2


@cuda.jit(device=True)
def look_up(n):
    return {1: n}[1]


def calls_device_function(out, n):
    out[0] = look_up(n)


def returns_a_number(out, n):
    if n == 1:
        return
    return 5


def shape_is_an_argument(out, n):
    a = cuda.local.array(n, float32)
    a[0] = 1


def shape_depends_on_an_argument(out, n):
    size = n
    a = cuda.shared.array((4, size), float32)
    a[0, 0] = 1


def shape_is_computed(out, n):
    a = cuda.local.array(2 * SIZE, float32)
    a[0] = 1


def shape_is_an_attribute(out, n):
    a = cuda.local.array(CONFIG.size, float32)
    a[0] = 1


def shape_is_a_block_dimension(out, n):
    a = cuda.shared.array(cuda.blockDim.x, float32)
    a[0] = 1


def shape_is_a_length(out, n):
    size = len(out)
    a = cuda.shared.array(shape=size, dtype=float32)
    a[0] = 1


def shape_is_a_numpy_number(out, n):
    a = cuda.local.array(NUMPY_SIZE, float32)
    a[0] = 1


def shape_grows(out, n):
    size = n
    size += 1
    a = cuda.local.array(size, float32)
    a[0] = 1


REFUSED = {
    uses_dict: (1, "uses a dict"),
    calls_dict: (1, "uses a dict"),
    uses_set: (1, "uses a set"),
    uses_list: (1, "uses a list"),
    uses_list_comprehension: (1, "uses a list"),
    uses_f_string: (1, "uses an f-string"),
    uses_try: (1, "uses try"),
    returns_a_number: (3, "returns 5, but a kernel returns nothing"),
    shape_is_an_argument: (1, "declares local.array of shape n, which must be a compile-time constant"),
    shape_depends_on_an_argument: (2, r"declares shared.array of shape \(4, size\), which must be"),
    shape_is_computed: (1, r"declares local.array of shape 2 \* SIZE, which must be"),
    shape_is_an_attribute: (1, r"declares local.array of shape CONFIG.size, which must be"),
    shape_is_a_block_dimension: (1, r"declares shared.array of shape cuda.blockDim.x, which must be"),
    shape_is_a_length: (2, "declares shared.array of shape size, which must be"),
    shape_is_a_numpy_number: (1, "declares local.array of shape NUMPY_SIZE, which must be"),
    shape_grows: (3, "declares local.array of shape size, which must be"),
}


def make_closure(size, shape):
    def shapes_of_a_closure(out, n):
        a, b = cuda.local.array(size, float32), cuda.local.array(shape, float32)
        a[0] = b[0, 0] = 1

    return shapes_of_a_closure


@cuda.jit(device=True)
def store_in_array(size, out):
    a = cuda.local.array(size, float32)
    a[0] = out[0]


@cuda.jit(device=True)
def store_one(out):
    out[0] = 1


def constant_shapes(out, n):
    size, rows = SIZE, 2
    shape = (size, rows)
    a = cuda.shared.array(shape, float32)
    b = cuda.local.array(shape=4 * 8, dtype=int32)
    c = cuda.local.array(SHAPE[0], int32)
    a[0, 0] = b[0] = c[0] = 1
    store_in_array(16, out)


def lists_that_become_tuples(out, n):
    for i in [1, 2]:
        out[0] = i
    if n in (1, 2):
        out[0] = 3


def lambdas_return(out, n):
    f = lambda x: x + 1  # noqa: E731
    out[0] = f(n)
    if n:
        return None
    return store_one(out)


COMPILED = [make_closure(4, (4, 4)), constant_shapes, lists_that_become_tuples, lambdas_return]


@pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")
class TestSimulator:
    @pytest.mark.parametrize("kernel", REFUSED, ids=lambda kernel: kernel.__name__)
    def test_what_numba_does_not_compile_is_refused(self, kernel):
        offset, words = REFUSED[kernel]
        line = kernel.__code__.co_firstlineno + offset
        out = np.zeros(4, np.int32)
        message = rf"kernel {kernel.__name__} does not compile: test_compilable.py:{line} {words}"
        with pytest.raises(simulator.CompileError, match=message):
            cuda.jit(kernel)[1, 32](out, 2)
        assert not out.any()

    def test_device_functions_are_checked(self):
        words = (
            r"calls_device_function does not compile: test_compilable.py:\d+ \(device function look_up\) uses a dict"
        )
        with pytest.raises(simulator.CompileError, match=words):
            simulator.run(calls_device_function, 1, 1, [np.zeros(4, np.int32), 2])

    @pytest.mark.parametrize("kernel", COMPILED, ids=lambda kernel: kernel.__name__)
    def test_what_numba_compiles_runs(self, kernel):
        for n in (0, 1):
            cuda.jit(kernel)[1, 2](np.zeros(4, np.int32), n)

    def test_a_kernel_without_source_runs(self):
        names = {}
        exec("def kernel(out, n):\n    out[0] = {1: n}[1]", names)
        out = np.zeros(1, np.int32)
        cuda.jit(names["kernel"])[1, 1](out, 2)
        assert out[0] == 2


COMPILE_ALL = """
import sys
sys.path.insert(0, "tests/simulator")
import test_compilable as tests
from numba import cuda
from moe_numba.runtime.compile import compile_kernel
for kernel in [*tests.REFUSED, tests.calls_device_function, *tests.COMPILED]:
    try:
        compile_kernel(cuda.jit(kernel), ("int32[]", "int32"))
        print(kernel.__name__, "compiles")
    except Exception:
        print(kernel.__name__, "does not")
"""


def test_numba_compiles_the_same_kernels():
    environment = {**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_ALL], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    expected = {kernel.__name__: "does not" for kernel in (*REFUSED, calls_device_function)}
    expected |= {kernel.__name__: "compiles" for kernel in COMPILED}
    assert dict(line.split(maxsplit=1) for line in done.stdout.splitlines()) == expected, done.stderr
