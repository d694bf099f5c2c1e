"""Simulator: kernels that Numba would not compile are refused before they start."""

import enum
import functools
import linecache
import math
import operator
import os
import random
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32, njit
from numba.cuda import libdevice
from numba.extending import register_jitable

from moe_numba.simulator.compiler.launched import compile_launched
from moe_numba.simulator.core.settings import override_settings

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


# --- kernels of one line, with the arguments o: float64[:] and x: float32[:] -----------------------------------------


class Values:
    v = 2.0

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __getitem__(self, i):
        return 1.0


class Color(enum.Enum):
    RED = 1


def plain(v=1):
    return v + 1


@cuda.jit(device=True)
def device(v):
    return v + 1


@cuda.jit(device=True)
def store(array):
    array[0] = 1.0


@cuda.jit(device=True)
def factorial(n):
    return 1 if n <= 1 else n * factorial(n - 1)


@njit
def for_the_cpu(v):
    return v + 1


@register_jitable
def jitable(v):
    return v + 1


N, D, S, L, T, MIXED, NONE, TEXT = 3, {1: 2.0}, {1, 2}, [1.0, 2.0], (1, 2, 3), (1, 2.5, 3), None, "abc"
ARRAYS = np.arange(3.0), np.arange(4.0)
A, O, PARTIAL, LAMBDA, SINE = np.arange(4.0), Values(), functools.partial(plain, 1), lambda v: v + 1, np.sin

REFUSED_LINES = {
    "a plain Python function.* did you forget @cuda.jit": [
        "o[0] = plain(x[0])",
        "o[0] = LAMBDA(x[0])",
        "f = plain; o[0] = f(x[0])",
        "if N == 3: plain(1)",
        "if T[0] == 7: plain(1)",
    ],
    "itself, .* write a loop": ["o[0] = factorial(5)"],
    "an instance of (Values|partial), of which Numba knows no type": [
        "o[0] = O.v",
        "o[0] = O[0]",
        "y = O",
        "o[0] = PARTIAL()",
    ],
    "uses Values, a class": ["o[0] = Values.v", "o[0] = Values().v"],
    "uses [DSL], a (dict|set|list) outside the kernel, .* use a tuple": [
        "o[0] = D[1]",
        "o[0] = len(D)",
        "o[0] = 1 in D",
        "o[0] = 1 in S",
        "o[0] = L[0]",
        "L[0] = 2.0",
        "for v in L: o[0] = v",
        "o[0] = len(L)",
        "o[0] = tuple(L)[0]",
    ],
    "stores to A, a global array, .* pass the array": [
        "A[0] = 1.0",
        "A[cuda.threadIdx.x] += 1.0",
        "a = A; a[0] = 1.0",
        "a = A[1:]; a[0] = 1.0",
        "a = A if x[0] > 0 else A; a[0] = 1.0",
        "store(A)",
    ],
    "stores to ARRAYS, a global array, .* pass the array": ["ARRAYS[1][0] = 1.0"],
    "uses an assignment to a global variable": ["global N; N += 1", "global N; N = 1"],
    "uses an import, .* outside the kernel": ["import math as m; o[0] = m.pi", "from math import pi; o[0] = pi"],
    "uses del, .* leave it out": ["y = 1; del y", "del x", "del x[0]"],
    "uses a starred target, .* slice the tuple": [
        "a, *b = (1, 2, 3); o[0] = a",
        "*a, b = T; o[0] = b",
        "for i, *r in ((1, 2),): o[0] = i",
    ],
    "uses a class, ": ["class Q: pass"],
    "calls .*, but Numba compiles no method .* for a GPU": [
        "o[0] = x.astype(np.float64)[0]",
        "o[0] = x[0].astype(np.float64)",
        "y = x.copy(); o[0] = y[0]",
        "o[0] = x[1:].copy()[0]",
        "o[0] = A.copy()[0]",
        "o[0] = x.max()",
        "o[0] = x.min()",
        "x.sort()",
        "o[0] = x.dot(x)",
        "o[0] = x.tolist()[0]",
        "o[0] = x.cumsum()[0]",
        "o[0] = x.flatten()[0]",
        "o[0] = x.squeeze()[0]",
        "i = 5; o[0] = i.bit_length()",
        "i = cuda.threadIdx.x; o[0] = i.bit_length()",
        "f = float(x[0]); o[0] = f.is_integer()",
        "o[0] = (x[0] * 2).is_integer()",
        "f = 5.0; print(f.hex())",
        "f = 5.0; o[0] = f.as_integer_ratio()[0]",
    ],
    "the itemsize of a dtype": ["o[0] = x.dtype.itemsize"],
    "which Numba does not compile for a GPU: use cuda.local.array": [
        "y = np.zeros(4, np.float32); o[0] = y[0]",
        "y = np.empty(4, np.float32); y[0] = 1",
        "y = np.ones(4); o[0] = y[0]",
        "y = np.array((1, 2)); o[0] = y[0]",
        "y = np.zeros_like(x); o[0] = y[0]",
        "for i in np.arange(4): o[0] = i",
    ],
    "which Numba does not compile for a GPU: (use|write)": [
        "o[0] = np.dot(x, x)",
        "o[0] = np.where(x[0] > 0, 1.0, 2.0)",
        "o[0] = np.clip(x[0], 0, 1)",
        "o[0] = np.max(x)",
        "o[0] = np.sort(x)[0]",
        "o[0] = np.cumsum(x)[0]",
        "y = np.concatenate((x, x))",
        "o[0] = np.abs(x[0])",
        "o[0] = np.sign(x[0])",
        "o[0] = np.add(x[0], x[1])",
        "o[0] = sorted((2, 1))[0]",
        "o[0] = any((x[0] > 0, x[1] > 0))",
        "o[0] = all((x[0] > 0, x[1] > 0))",
        "for v in reversed(T): o[0] = v",
        "for v in map(device, x): o[0] = v",
        "o[0] = hash(3)",
        "o[0] = bin(3) == '0b11'",
        "o[0] = eval('1')",
        "o[0] = math.comb(4, 2)",
        "o[0] = math.factorial(4)",
        "o[0] = math.gcd(4, 2)",
        "o[0] = math.isclose(1.0, 2.0)",
        "o[0] = math.prod((1, 2))",
        "o[0] = math.isqrt(4)",
        "o[0] = math.cbrt(4.0)",
    ],
    "use math.(sqrt|exp|floor)$": ["o[0] = np.sqrt(x[0])", "o[0] = np.exp(x[0])", "o[0] = np.floor(x[0])"],
    "use numba.cuda.random": ["o[0] = np.random.rand()", "o[0] = random.random()"],
    "with [23] arguments, but Numba compiles at most [12]": [
        "o[0] = math.hypot(1.0, 2.0, 3.0)",
        "o[0] = math.log(4.0, 2.0)",
        "o[0] = pow(2, 3, 5)",
    ],
    "(%|format) on a string, .* pass the values to print": [
        "print('x %d' % 3)",
        "print('%d' % x[0])",
        "print('x {}'.format(3))",
    ],
    "uses print with sep": ["print(x[0], sep='')"],
    "integers have at most 64 bits": [
        "o[0] = 1 << 70",
        "o[0] = 10 ** 20",
        "o[0] = 18446744073709551616",
        "o[0] = -9223372036854775809",
    ],
    "a tuple of several types, by .*, but Numba takes a constant": [
        "i = cuda.threadIdx.x; o[0] = MIXED[i]",
        "for i in range(3): o[0] = MIXED[i]",
        "t = (1, 2.5); i = cuda.threadIdx.x; o[0] = t[i]",
        "o[0] = (1, 2.5)[cuda.threadIdx.x]",
    ],
    "loops over .*, a tuple of several types": ["for v in MIXED: o[0] = v", "for v in (1, 2.5): o[0] = v"],
    "uses a copy from slice to slice": ["o[:] = x[:]", "x[0:2] = x[2:4]"],
    "of dtype (float|int|bool), Python's type": [
        "a = cuda.local.array(4, float); a[0] = 1",
        "a = cuda.shared.array(shape=4, dtype=int); a[0] = 1",
        "a = cuda.local.array(4, bool); a[0] = 1",
    ],
    "which only the host can call": ["y = cuda.to_device(x)", "y = cuda.device_array(4)", "cuda.synchronize()"],
    "uses an f-string|uses a list|uses a dict|uses a generator|uses try|uses with": [
        "print(f'{N}')",
        "y = [x[0]]; o[0] = y[cuda.threadIdx.x]",
        "o[0] = {1: 2}[1]",
        "o[0] = sum(v for v in T)",
    ],
}
COMPILED_LINES = [
    "o[0] = device(x[0])",
    "o[0] = for_the_cpu(x[0])",
    "o[0] = jitable(x[0])",
    "if N == 4: plain(1)",
    "if NONE is not None: plain(1)",
    "v = N if N else D[1]; o[0] = v",
    "f = math.sqrt; o[0] = f(2.0)",
    "o[0] = CONFIG.size",
    "if Color.RED == Color.RED: o[0] = Color.RED.value",
    "o[0] = T[0] + MIXED[1]",
    "i = cuda.threadIdx.x; o[0] = T[i]",
    "j = 1; o[0] = MIXED[j]",
    "for v in T: o[0] = v",
    "o[0] = A[0] + A.shape[0] + A.sum()",
    "o[0] = TEXT == 'abc'; print(TEXT)",
    "global N; o[0] = N",
    "t = (*T, 1); o[0] = t[0] + max(*T)",
    "assert x[0] == 1",
    "if x[0] != 1: raise ValueError('x')",
    "o[0] = x[0].item()",
    "o[0] = x.sum() + x.mean() + x.prod() + x.std() + x.argmax()",
    "x.fill(0)",
    "o[0] = x.view(np.int32)[0] + x.T[0] + x.flat[0]",
    "o[0] = x.size + x.ndim + x.nbytes + x.itemsize + x.strides[0] + len(x)",
    "y = x[1:]; o[0] = y[0] + x[::2][0]",
    "x[:] = 0; x[1:3] = 5.0",
    "x[:2] = (1, 2)",
    "i = 5; o[0] = i.bit_count() + (5.0).conjugate()",
    "c = 1 + 2j; o[0] = abs(c) + c.real",
    "o[0] = np.sum(x) + np.mean(x) + np.argmax(x) + np.size(x)",
    "o[0] = np.sin(x[0]) + np.log(x[0]) + np.maximum(x[0], x[1]) + np.isnan(x[0]) + SINE(x[0])",
    "o[0] = np.float32(1) + np.int32(x[0]) + np.pi + np.iinfo(np.int32).max + np.finfo(np.float32).eps",
    "for i, v in np.ndenumerate(x): o[0] = v",
    "o[0] = sum(T) + min(T) + max(x[0], 1) + abs(x[0]) + round(x[0]) + divmod(7, 2)[0] + pow(x[0], 2)",
    "o[0] = isinstance(x, int)",
    "for i, v in enumerate(T): o[i] = v",
    "for a, b in zip(x, o): o[0] = a",
    "o[0] = math.hypot(1.0, 2.0) + math.exp2(4.0) + math.remainder(4.0, 3.0) + math.log(4.0) + math.inf",
    "o[0] = math.modf(4.5)[0] + math.erf(4.5) + math.lgamma(4.5) + math.floor(4.5) + math.tau",
    "o[0] = 2 ** 70",
    "o[0] = 0xFFFFFFFFFFFFFFFF",
    "o[0] = -9223372036854775808",
    "o[0] = operator.add(1, 2)",
    "y = (z := 3); o[0] = z",
    "f = lambda v: v + 1; o[0] = f(1)",
    "y = 1; y = 2.0; o[0] = y",
    "t = (1, 2) + (3,); o[0] = t[1:][0] + t.index(2)",
    "i, j = cuda.grid(2); o[0] = i + cuda.laneid",
    "a = cuda.local.array((2, 2), np.float32); a[0, 0] = 1",
    "a = cuda.local.array(N, 'float32'); a[0] = 1",
    "a = cuda.const.array_like(A); o[0] = a[0]",
    "o[0] = cuda.atomic.max(o, 0, 1.0) + cuda.popc(3) + cuda.fma(1.0, 2.0, 3.0)",
    "o[0] = libdevice.sqrt(2.0)",
]
KNOWN_DIFFERENCES = {  # lines that run here and that `compile_kernel` refuses -> why they are not refused here
    "o[0] = x.reshape((2, 2))[0, 0]": "a launch links what this needs, which compile_kernel does not",
    "if (y := x[0]) > 0: o[0] = y": "Numba compiles other uses of :=, so this seems to be an error of numba-cuda",
    "t = (1, x[0]); o[0] = t[cuda.threadIdx.x]": "the type of x[0] is not known without types",
    "o[:] = x": "that x is an array, not a number, is not known without types",
    "i = 5; o[0] = i.numerator": "the type of i is not known without types",
    "t = (1, 2, 1); o[0] = t.count(1)": "the type of t is not known without types",
    "o[0] = int('3')": "the types of arguments are not compared",
    "for c in 'abc': o[0] = 1": "strings are not checked",
    "o[0] = 'abc'.upper() == 'ABC'": "strings are not checked",
}
LINES = [*(line for lines in REFUSED_LINES.values() for line in lines), *COMPILED_LINES, *KNOWN_DIFFERENCES]


def one_line_kernel(line):
    """Return a kernel with this line as its body, in this module's names, and with its source."""
    source, file = f"def kernel(o, x):\n    {line}\n", f"<{line}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    modules = {"math": math, "operator": operator, "random": random, "libdevice": libdevice}
    names = {**globals(), **modules}
    exec(compile(source, file, "exec"), names)
    return names["kernel"]


def run_one_line(line):
    cuda.jit(one_line_kernel(line))[1, 1](np.zeros(4), np.ones(4, np.float32))


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

    @pytest.mark.parametrize("words, line", [(words, line) for words in REFUSED_LINES for line in REFUSED_LINES[words]])
    def test_lines_that_numba_does_not_compile_are_refused(self, words, line):
        with pytest.raises(simulator.CompileError, match=rf"^kernel kernel does not compile: \S*.*:\d+ .*({words})"):
            run_one_line(line)

    @pytest.mark.parametrize("line", [*COMPILED_LINES, *KNOWN_DIFFERENCES])
    def test_other_lines_run(self, line):
        run_one_line(line)

    def test_the_compiler_refuses_what_runs_here_and_names_its_line(self):
        with override_settings(compile=True):
            for line in [*COMPILED_LINES, *KNOWN_DIFFERENCES]:
                run_one_line(line)
        errors, notes = compile_launched()
        refused = [line for line in KNOWN_DIFFERENCES if "reshape" not in line]  # which a launch links
        assert len(errors) == len(refused) and len(notes) == 1, (errors, notes)
        for error, line in zip(errors, refused):
            start = f"kernel kernel(float64[:], float32[:]) does not compile: <{line}>:2: "
            assert error.startswith(start) and error.endswith(f"\n    {line}") and len(error.splitlines()) == 2, error

    def test_atomic_operations_on_constants_are_refused(self):
        """Numba compiles them, and NVVM warns that the memory is constant."""
        with pytest.raises(simulator.CompileError, match="stores to A, a global array"):
            run_one_line("cuda.atomic.add(A, 0, 1.0)")

    def test_types_of_the_program_may_have_any_method(self):
        from numba.core import types
        from numba.core.typing.templates import AttributeTemplate, builtin_registry

        template = type("Attributes", (AttributeTemplate,), {"key": type("Own", (types.Type,), {})})
        builtin_registry.register_attr(template)
        try:
            run_one_line("y = x.dot(x)")
        finally:
            builtin_registry.attributes.remove(template)

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
for line in tests.LINES:
    try:
        compile_kernel(cuda.jit(tests.one_line_kernel(line)), ("float64[]", "float32[]"))
        print(tests.LINES.index(line), "compiles")
    except Exception:
        print(tests.LINES.index(line), "does not")
for kernel in [*tests.REFUSED, tests.calls_device_function, *tests.COMPILED]:
    try:
        compile_kernel(cuda.jit(kernel), ("int32[]", "int32"))
        print(kernel.__name__, "compiles")
    except Exception:
        print(kernel.__name__, "does not")
"""


def test_numba_compiles_the_same_kernels():
    environment = {**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_ALL], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    expected = {kernel.__name__: "does not" for kernel in (*REFUSED, calls_device_function)}
    expected |= {kernel.__name__: "compiles" for kernel in COMPILED}
    expected |= {str(i): "compiles" if line in COMPILED_LINES else "does not" for i, line in enumerate(LINES)}
    assert dict(line.split(maxsplit=1) for line in done.stdout.splitlines()) == expected, done.stderr
