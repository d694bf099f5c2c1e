"""The simulator's numbers are those of compiled code: operators, conversions and functions, on both engines.

Numba's typing gives the type of each operator's result, and PTX the conversions of floats to integers.
"""

import functools
import math
import operator

import numpy as np
import pytest
from numba import cuda, float32, int8, int16, int32, int64, njit, uint8, uint16, uint32, uint64
from numba.core.registry import cpu_target
from numba.np.numpy_support import as_dtype, from_dtype

from moe_numba import simulator
from moe_numba.simulator.core.scheduler import override_settings

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests the simulator")
DTYPES = [np.dtype(t) for t in "?bhilBHILfd"]
ARITHMETIC = "add sub mul truediv floordiv mod pow".split()
BITS = "lshift rshift and_ or_ xor".split()
LIMIT = 0.1  # is no float32


@pytest.fixture(params=["threads", "vector"])
def engine(request):
    with override_settings(engine=request.param):
        yield request.param


@cuda.jit(device=True)
def lanes_with(value):
    return cuda.match_any_sync(0xFFFFFFFF, value) & uint32(0xFFFF)


def test_a_device_function_inside_a_wrapper_has_compiled_operators(engine):
    """As the answer of an exercise, which `functools.wraps` has wrapped: int32 & uint32 is an int64."""

    @functools.wraps(lanes_with)
    def wrapped(*arguments):
        return lanes_with(*arguments)

    @cuda.jit
    def kernel(x, out):
        out[cuda.threadIdx.x] = wrapped(x[cuda.threadIdx.x])

    x, out = np.arange(32, dtype=np.int32) % 2, np.zeros(32, np.int64)
    kernel[1, 32](x, out)
    assert out.tolist() == [0x5555, 0xAAAA] * 16


@cuda.jit
def arithmetic(x, y, add, sub, mul, truediv, floordiv, mod, power):
    i = cuda.threadIdx.x
    a, b = x[i], y[i]
    add[i] = a + b
    sub[i] = a - b
    mul[i] = a * b
    truediv[i] = a / b
    floordiv[i] = a // b
    mod[i] = a % b
    power[i] = a ** abs(b)


@cuda.jit
def in_place(x, y, add, sub, mul, truediv, floordiv, mod, power):
    i = cuda.threadIdx.x
    a = x[i]
    a += y[i]
    add[i] = a
    a = x[i]
    a -= y[i]
    sub[i] = a
    a = x[i]
    a *= y[i]
    mul[i] = a
    a = x[i]
    a /= y[i]
    truediv[i] = a
    a = x[i]
    a //= y[i]
    floordiv[i] = a
    a = x[i]
    a %= y[i]
    mod[i] = a
    a = x[i]
    a **= abs(y[i])
    power[i] = a


@cuda.jit
def bits(x, y, lshift, rshift, and_, or_, xor):
    i = cuda.threadIdx.x
    lshift[i] = x[i] << y[i]
    rshift[i] = x[i] >> y[i]
    and_[i] = x[i] & y[i]
    or_[i] = x[i] | y[i]
    xor[i] = x[i] ^ y[i]


def values_of(dtype):
    if dtype.kind == "f":
        return [0, 1.5, -2.25, 1e30, np.inf, -np.inf, np.nan, 3]
    if dtype.kind == "b":
        return [False, True]
    return [0, 1, 3, 33, np.iinfo(dtype).max, np.iinfo(dtype).min, 70, -1 if dtype.kind == "i" else 9]


def numba_type(name, *dtypes):
    """Return the dtype that Numba gives an operator's result, or None without such an operator."""
    context = cpu_target.typing_context
    context.refresh()
    found = context.resolve_function_type(getattr(operator, name), tuple(map(from_dtype, dtypes)), {})
    return as_dtype(found.return_type)


def wrapped(value, dtype):
    return np.array(value & 2**64 - 1, np.uint64).astype(dtype)[()]


def expected(name, a, b, dtype):
    """Return an operator's result in this type."""
    if dtype.kind == "f":
        function = {"truediv": np.true_divide, "floordiv": np.floor_divide, "mod": np.mod, "pow": np.power}.get(name)
        function = function or getattr(np, {"add": "add", "sub": "subtract", "mul": "multiply"}[name])
        return function(dtype.type(a), dtype.type(b))
    shift = name in ("lshift", "rshift")
    a, b = int(wrapped(int(a), dtype)), int(b) & 0xFFFFFFFF if shift else int(wrapped(int(b), dtype))
    if name in ("floordiv", "mod") and b == 0 or name == "lshift" and b > 63:
        return dtype.type(0)
    if name == "pow":
        return wrapped(pow(a, b, 2**64) if b >= 0 else a ** (b & 1) if a in (1, -1) else 0, dtype)
    return wrapped(getattr(operator, name)(a, min(b, 64) if shift else b), dtype)


def pairs(of):
    return [(a, b) for a in of for b in of]


def check_operators(kernel, names, a, b):
    x, y = (m.reshape(-1) for m in np.meshgrid(np.array(values_of(a), a), np.array(values_of(b), b)))
    results = {name: np.zeros(len(x), numba_type(name, a, b)) for name in names}
    kernel[1, len(x)](x, y, *results.values())
    with np.errstate(all="ignore"):
        for name, given in results.items():
            second = np.abs(y) if name == "pow" else y
            wanted = np.array([expected(name, *v, given.dtype) for v in zip(x, second)])
            if name == "pow" and given.dtype.kind == "f":
                np.testing.assert_allclose(given, wanted, rtol=1e-6, err_msg=f"{a} pow {b}")
            else:
                np.testing.assert_array_equal(given, wanted, f"{a} {name} {b}")


@pytest.mark.parametrize("kernel", [arithmetic, in_place], ids=["binary", "in place"])
def test_arithmetic_of_every_pair_of_types(engine, kernel):
    for a, b in pairs(DTYPES if kernel is arithmetic else DTYPES[::3]):
        if (a.kind, b.char) == ("b", "i"):
            continue  # Numba's power of a bool and an int32 is a float32, by accident
        check_operators(kernel, ARITHMETIC, a, b)


def test_bit_operators_of_every_pair_of_integers(engine):
    for a, b in pairs([d for d in DTYPES if d.kind != "f"]):
        check_operators(bits, BITS, a, b)


@njit(error_model="numpy")
def with_literals(x, i):
    a = x[i]
    return a + 1, 3 - a, a * 7, a // 2, a % 5, a / 3, a + 0.1, a * 2.0, -a, a > 0.1, +a


@njit(error_model="numpy")
def with_integer_literals(x, i):
    a = x[i]
    return a << 33, a >> 1, a & 255, a | 1, a ^ 3, 1 << a, ~a, a & 0xFFFFFFFFFFFFFFFF, (a > 0) + (a > 1), (a > 0) * 5


@cuda.jit
def literals(x, o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, o10):
    i = cuda.threadIdx.x
    o0[i], o1[i], o2[i], o3[i], o4[i], o5[i], o6[i], o7[i], o8[i], o9[i], o10[i] = with_literals(x, i)


@cuda.jit
def integer_literals(x, o0, o1, o2, o3, o4, o5, o6, o7, o8, o9):
    i = cuda.threadIdx.x
    o0[i], o1[i], o2[i], o3[i], o4[i], o5[i], o6[i], o7[i], o8[i], o9[i] = with_integer_literals(x, i)


@pytest.mark.parametrize("dtype", ["i", "B", "L", "f"])
def test_literals_are_int64_and_float64_as_in_compiled_code(dtype):
    dtype = np.dtype(dtype)
    x = np.array([0, 1, 3, 33, 60, 0.1 if dtype.kind == "f" else 7], dtype)
    for kernel, function in [(literals, with_literals), (integer_literals, with_integer_literals)][
        : 1 + (dtype != "f")
    ]:
        compiled = [function(x, i) for i in range(len(x))]
        types = function.overloads[function.signatures[-1]].signature.return_type
        outputs = [np.zeros(len(x), as_dtype(t)) for t in types]
        for name in "threads", "either":
            with override_settings(engine=name):
                kernel[1, len(x)](x, *outputs)
            for k, given in enumerate(outputs):
                np.testing.assert_array_equal(given, [c[k] for c in compiled], f"{dtype}, result {k}, {name}")


FLOATS = [0, 1.5, -1.5, -0.9, 300, -300, 70000, 3e9, -3e9, 1e19, -1e19, 2.0**63, np.inf, -np.inf, np.nan]
INTEGERS = {"int8": int8, "int16": int16, "int32": int32, "int64": int64}
INTEGERS |= {"uint8": uint8, "uint16": uint16, "uint32": uint32, "uint64": uint64}


def saturated(value, dtype):
    """Convert as PTX does: to 8 bits through 16, and a NaN as the source's and the result's sizes tell."""
    info = np.iinfo(dtype if dtype.itemsize > 1 else f"{dtype.kind}2")
    if value != value:
        return wrapped(1 << info.bits - 1 if value.dtype == np.float64 or info.bits == 64 else 0, dtype)
    least, largest = int(info.min), int(info.max)
    return wrapped(least if value <= least else largest if value >= float(largest + 1) else int(value), dtype)


def make_conversion(numba_integer, numpy_integer):
    @cuda.jit
    def convert(x, called, numpy, stored, shared, local):
        i = cuda.threadIdx.x
        called[i] = numba_integer(x[i])
        numpy[i] = numpy_integer(x[i])
        stored[i] = x[i]
        block = cuda.shared.array(32, numba_integer)
        block[i] = x[i]
        shared[i] = block[i]
        own = cuda.local.array(1, numba_integer)
        own[0] = x[i]
        local[i] = own[0]

    return convert


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("name", INTEGERS)
def test_floats_saturate_as_integers(engine, name, source):
    x, dtype = np.array(FLOATS, source), np.dtype(name)
    results = [np.zeros(len(x), dtype) for _ in range(5)]
    make_conversion(INTEGERS[name], dtype.type)[1, len(x)](x, *results)
    for given in results:
        np.testing.assert_array_equal(given, [saturated(v, dtype) for v in x])


@cuda.jit
def integers_wrap(x, o, p):
    i = cuda.threadIdx.x
    o[i] = np.int32(x[i])
    p[i] = np.uint8(x[i])


@cuda.jit
def python_casts(x, o, f):
    i = cuda.threadIdx.x
    o[i] = int(x[i])
    f[i] = float(x[i]) + 1e-12


def test_integers_wrap_when_they_are_converted(engine):
    x = np.array([2**31, -1, 2**40 + 5, 255, 256])
    o, p = np.zeros(5, np.int32), np.zeros(5, np.uint8)
    integers_wrap[1, 5](x, o, p)
    np.testing.assert_array_equal(o, x.astype(np.int32))
    np.testing.assert_array_equal(p, x.astype(np.uint8))


def test_int_and_float_make_64_bits(engine):
    x = np.array(FLOATS, np.float32)
    o, f = np.zeros(len(x), np.int64), np.zeros(len(x))
    python_casts[1, len(x)](x, o, f)
    np.testing.assert_array_equal(o, [saturated(v, o.dtype) for v in x])
    np.testing.assert_array_equal(f, x.astype(float) + 1e-12)


@cuda.jit
def scalar_arguments(n, eps, big, o, f):
    i = cuda.threadIdx.x
    o[0, i] = n * n * n
    o[1, i] = (i + 1) * 1000000007 * 998244353 * n
    o[2, i] = n // (n - n)
    o[3, i] = n % (n - n)
    o[4, i] = big >> 63
    o[5, i] = -n << 40
    f[0, i] = 1.0 / eps
    f[1, i] = n / (n - n)
    f[2, i] = -1.0 // eps
    f[3, i] = 1.0 % eps


def test_scalar_arguments_are_int64_and_float64(engine):
    o, f, n = np.zeros((6, 2), np.int64), np.zeros((4, 2)), 10**7
    scalar_arguments[1, 2](n, 0.0, 2**64 - 1, o, f)
    hashes = [wrapped((i + 1) * 1000000007 * 998244353 * n, np.int64) for i in range(2)]
    rows = [wrapped(n**3, np.int64), hashes, 0, 0, 1, wrapped(-n << 40, np.int64)]
    np.testing.assert_array_equal(o, [np.broadcast_to(row, 2) for row in rows])
    np.testing.assert_array_equal(f, [[np.inf] * 2, [np.inf] * 2, [-np.inf] * 2, [np.nan] * 2])


@cuda.jit
def compare_with_outer(x, o):
    i = cuda.threadIdx.x
    o[i] = x[i] > LIMIT


def test_a_float32_is_compared_in_double_precision(engine):
    o = np.zeros(1, np.bool_)
    compare_with_outer[1, 1](np.array([0.1], np.float32), o)
    assert o[0] == (float(np.float32(0.1)) > 0.1)


@cuda.jit
def ieee(x, o):
    i = cuda.threadIdx.x
    a = x[i]
    o[0, i] = math.log(a)
    o[1, i] = math.sqrt(a)
    o[2, i] = math.exp(a * 1000)
    o[3, i] = math.acos(a)
    o[4, i] = math.pow(a, 0.5)
    o[5, i] = math.sin(a / 0.0)
    o[6, i] = math.fmod(a, 0.0)
    o[7, i] = a**1.5
    o[8, i] = math.log2(a)
    o[9, i] = math.log10(a)
    o[10, i] = math.log1p(-abs(a))
    o[11, i] = math.cosh(a * 1000)
    o[12, i] = math.sinh(a * 1000)
    o[13, i] = math.asin(a)
    o[14, i] = math.atanh(a)
    o[15, i] = math.acosh(a)
    o[16, i] = math.tan(a / 0.0)
    o[17, i] = math.expm1(a * 1000)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_math_gives_ieee_results(engine, dtype):
    x = np.array([0, 1, -1, 2, -2, np.inf, -np.inf, np.nan, 0.5], dtype)
    o = np.zeros((18, len(x)))
    ieee[1, len(x)](x, o)
    with np.errstate(all="ignore"):
        d = x.astype(float)
        rows = [
            np.log(d),
            np.sqrt(d),
            np.exp(d * 1000),
            np.arccos(d),
            np.float64([0, 1, np.nan, 2**0.5, np.nan, np.inf, np.inf, np.nan, 0.5**0.5]),
        ]
        rows += [np.sin(d / 0)]
        rows += [np.fmod(d, 0), np.power(d, 1.5), np.log2(d), np.log10(d), np.log1p(-abs(d)), np.cosh(d * 1000)]
        rows += [np.sinh(d * 1000), np.arcsin(d), np.arctanh(d), np.arccosh(d), np.tan(d / 0), np.expm1(d * 1000)]
    with np.errstate(all="ignore"):
        rows = np.array(rows)
        if dtype == np.float32:  # `math` and NumPy take float32 as the result's type
            is_double = [2, 4, 5, 6, 7, 11, 12, 16, 17]
            singles = [k for k in range(18) if k not in is_double]
            rows[singles] = rows[singles].astype(np.float32)
    for k, (given, wanted) in enumerate(zip(o, rows)):
        np.testing.assert_allclose(given, wanted, rtol=1e-12, err_msg=f"row {k}")


@cuda.jit
def rounded(x, o):
    i = cuda.threadIdx.x
    o[0, i] = math.floor(x[i])
    o[1, i] = math.ceil(x[i])


def test_floor_and_ceil_saturate(engine):
    x = np.array([1.5, -1.5, 1e30, -np.inf, np.nan], np.float32)
    o = np.zeros((2, 5), np.int64)
    rounded[1, 5](x, o)
    for row, function in zip(o, (np.floor, np.ceil)):
        np.testing.assert_array_equal(row, [saturated(v, o.dtype) for v in function(x)])


@cuda.jit
def float32_stays(x, o):
    i = cuda.threadIdx.x
    o[i] = math.exp(x[i]) * x[i] + float32(0.1)


def test_math_of_a_float32_is_a_float32(engine):
    x = np.array([0.1, 0.7, 3.3], np.float32)
    o = np.zeros(3)
    float32_stays[1, 3](x, o)
    exact = np.exp(x.astype(float)).astype(np.float32)
    np.testing.assert_array_equal(o, exact * x + np.float32(0.1))
