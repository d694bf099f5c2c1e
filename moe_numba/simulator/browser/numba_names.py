"""Numba's names for a browser: types, decorators, and the module `cuda` as Numba's own simulator has it on the host.

Only what a simulated program can use is here. `moe_numba.simulator` completes the module `cuda` as it completes
Numba's, see `core.cuda_module` and `core.host`.
"""

import enum
import importlib.machinery
import sys
import types

import numpy as np

# --- types ----------------------------------------------------------------------------------------------------------


class Type:
    """A type of Numba."""

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name

    __repr__ = __str__

    def __getitem__(self, items):
        """Return an array type: `float32[:, :]`."""
        ndim = len(items) if isinstance(items, tuple) else 1
        return Type(f"array({self.name}, {ndim}d)")

    def __call__(self, *args):
        """Return a signature, or a value of this type."""
        if len(args) == 1 and not isinstance(args[0], Type):
            return self.cast_python_value(args[0])
        return f"{self.name}({', '.join(map(str, args))})"


class Number(Type):
    def __init__(self, name, bitwidth, signed=True):
        super().__init__(name)
        self.bitwidth, self.signed = bitwidth, signed

    def cast_python_value(self, value):
        return getattr(np, self.name)(value)


class Integer(Number):
    def __call__(self, *args):
        return super().__call__(*args)


class Float(Number):
    pass


class Complex(Number):
    pass


class Boolean(Type):
    def cast_python_value(self, value):
        return bool(value)


def _types():
    made = {}
    for bits in (8, 16, 32, 64):
        made[f"int{bits}"], made[f"uint{bits}"] = Integer(f"int{bits}", bits), Integer(f"uint{bits}", bits, False)
    made |= {f"float{bits}": Float(f"float{bits}", bits) for bits in (16, 32, 64)}
    made |= {f"complex{bits}": Complex(f"complex{bits}", bits) for bits in (64, 128)}
    made |= {"boolean": Boolean("bool"), "void": Type("none")}
    aliases = {"bool_": "boolean", "b1": "boolean", "none": "void", "byte": "uint8", "char": "int8"}
    aliases |= {"intp": "int64", "uintp": "uint64", "int_": "int64", "uint": "uint64"}  # of a GPU
    aliases |= {"intc": "int32", "uintc": "uint32", "long_": "int64", "ulong": "uint64", "longlong": "int64"}
    aliases |= {"short": "int16", "ushort": "uint16", "float_": "float32", "double": "float64"}
    short = {"i": "int", "u": "uint", "f": "float"}
    aliases |= {f"{k}{n}": f"{short[k]}{8 * n}" for k in "iuf" for n in (1, 2, 4, 8) if f"{short[k]}{8 * n}" in made}
    return made | {alias: made[name] for alias, name in aliases.items()}


def _as_dtype(numba_type):
    return np.dtype(numba_type.name)


def _typeof(value, purpose=None):
    """Return the type of a constant; raise a ValueError if it has none."""
    kinds = {bool: "boolean", int: "int64", float: "float64", complex: "complex128"}
    if type(value) in kinds:
        return _TYPES[kinds[type(value)]]
    if isinstance(value, (np.bool_, np.number)):
        return _TYPES["boolean" if isinstance(value, np.bool_) else value.dtype.name]
    if isinstance(value, np.ndarray):
        return Type(f"array({value.dtype}, {value.ndim}d)")
    if isinstance(value, tuple):
        return Type(f"Tuple({', '.join(str(_typeof(item)) for item in value)})")
    if value is None or isinstance(value, (str, Type, slice)):
        return Type(type(value).__name__)
    raise ValueError(f"cannot determine Numba type of {type(value)}")


_TYPES = _types()

# --- functions for the CPU ------------------------------------------------------------------------------------------


class CPUDispatcher:
    """A function that Numba compiles for the CPU; here it stays Python."""

    def __init__(self, function):
        self.py_func = function
        self.__name__, self.__doc__, self.__module__ = function.__name__, function.__doc__, function.__module__

    def __call__(self, *args, **kwargs):
        return self.py_func(*args, **kwargs)


def _njit(*args, **_):
    if args and isinstance(args[0], types.FunctionType):
        return CPUDispatcher(args[0])
    return _njit


def _vectorize(*args, **_):
    if args and isinstance(args[0], types.FunctionType):
        return np.vectorize(args[0])
    return _vectorize


# --- arrays of the device -------------------------------------------------------------------------------------------


class FakeCUDAArray:
    """A device array: the host reads it through `copy_to_host`, and elements one by one."""

    __cuda_ndarray__ = True

    def __init__(self, ary, stream=0):
        self._ary, self.stream = ary, stream

    def __getattr__(self, name):
        if name.startswith("__"):  # such as those that copy and pickle ask for
            raise AttributeError(name)
        return getattr(self._ary, name)

    @property
    def alloc_size(self):
        return self._ary.nbytes

    T = property(lambda self: FakeCUDAArray(self._ary.T))

    def __getitem__(self, index):
        found = self._ary[index]
        return FakeCUDAArray(found, self.stream) if isinstance(found, np.ndarray) else found

    def __setitem__(self, index, value):
        self._ary[index] = getattr(value, "_ary", value)

    def __len__(self):
        return len(self._ary)

    def __repr__(self):
        return repr(self._ary)

    def bind(self, stream=0):
        return FakeCUDAArray(self._ary, stream)

    def is_c_contiguous(self):
        return self._ary.flags.c_contiguous

    def is_f_contiguous(self):
        return self._ary.flags.f_contiguous

    def reshape(self, *shape, **options):
        return FakeCUDAArray(self._ary.reshape(*shape, **options))

    def ravel(self, order="C"):
        return FakeCUDAArray(self._ary.ravel(order))

    def view(self, dtype):
        return FakeCUDAArray(self._ary.view(dtype))

    def transpose(self, axes=None):
        return FakeCUDAArray(self._ary.transpose(axes))

    def split(self, section, stream=0):
        return [FakeCUDAArray(self._ary[i : i + section]) for i in range(0, len(self), section)]

    def copy_to_host(self, ary=None, stream=0):
        if ary is None:
            return self._ary.copy(order="K")
        _check_same_layout(self._ary, ary)
        ary[...] = self._ary
        return ary

    def copy_to_device(self, ary, stream=0):
        source = np.asarray(getattr(ary, "_ary", ary))
        _check_same_layout(self._ary, source)
        self._ary[...] = source


def _check_same_layout(first, second):
    if first.dtype != second.dtype:
        raise TypeError(f"incompatible dtype: {first.dtype} vs. {second.dtype}")
    if first.squeeze().shape != second.squeeze().shape:
        raise ValueError(f"incompatible shape: {first.shape} vs. {second.shape}")


def _to_device(ary, stream=0, copy=True, to=None):
    """Return a copy that is aligned like memory of a GPU; NumPy aligns arrays to 8 bytes here."""
    source = np.asarray(ary)
    made = _device_array_like(source, stream)
    made[...] = source
    return made


def _device_array_like(ary, stream=0):
    order = "F" if ary.flags["F_CONTIGUOUS"] and not ary.flags["C_CONTIGUOUS"] else "C"
    return sys.modules["numba.cuda"].device_array(ary.shape, ary.dtype, order=order, stream=stream)


def _pinned_array_like(ary):
    return sys.modules["numba.cuda"].pinned_array(ary.shape, ary.dtype)


def _auto_device(ary, stream=0, copy=True):
    return (ary, False) if isinstance(ary, FakeCUDAArray) else (_to_device(ary), True)


class ArgHint:
    """How a host array that is an argument of a launch reaches the device."""

    def __init__(self, value):
        self.value = value


class In(ArgHint):
    """Copied to the device only."""


class Out(ArgHint):
    """Copied back only."""


class InOut(ArgHint):
    """Copied both ways."""


class Stream:
    """A stream, in which everything has run when a call returns."""

    def synchronize(self):
        pass


class Gpus:
    """`cuda.gpus`, the devices."""

    lst = ()

    def __getitem__(self, index):
        return self.lst[index]

    def __iter__(self):
        return iter(self.lst)

    def __len__(self):
        return len(self.lst)


class Purpose(enum.Enum):
    argument = 1
    constant = 2


# --- modules --------------------------------------------------------------------------------------------------------


def _modules():
    """Return the contents of each module."""
    nothing = lambda *_, **__: None
    fields = dict.fromkeys(("attributes", "globals", "functions"), ())
    registry = types.SimpleNamespace(**fields)
    config = {"ENABLE_CUDASIM": 1, "CUDA_DEBUGINFO_DEFAULT": 0, "CUDA_LOW_OCCUPANCY_WARNINGS": 0}
    classes = {"Type": Type, "Number": Number, "Integer": Integer, "Float": Float, "Boolean": Boolean}
    hints = {"ArgHint": ArgHint, "In": In, "Out": Out, "InOut": InOut}
    gpus = Gpus()
    arrays = {
        "FakeCUDAArray": FakeCUDAArray,
        "to_device": _to_device,
        "device_array": None,  # this and the other functions that allocate come from `core.host`
        "device_array_like": _device_array_like,
        "pinned_array": None,
        "pinned_array_like": _pinned_array_like,
        "mapped_array": None,
        "managed_array": None,
        "pinned": None,
        "auto_device": _auto_device,
    }
    functions = {"is_available": lambda: True, "cuda_error": nothing, "synchronize": nothing, "close": nothing}
    functions |= {"defer_cleanup": _Nothing, "is_supported_version": lambda: True, "list_devices": lambda: gpus}
    functions |= {"is_float16_supported": lambda: True, "is_bfloat16_supported": lambda: False}
    functions |= {"gpus": gpus, "stream": Stream, "current_context": None}
    functions |= {"require_context": lambda function: function, "vectorize": _vectorize, "guvectorize": None}
    vectorizers = "CUDAVectorize", "CUDAUFuncMechanism", "CUDAGeneralizedUFunc"
    decorators = {"njit": _njit, "jit": _njit, "vectorize": _vectorize, "prange": range}
    return {
        "numba": {"__version__": "0.68.1", **_TYPES, **decorators},
        "numba.core": {},
        "numba.core.config": config,
        "numba.core.registry": {"CPUDispatcher": CPUDispatcher},
        "numba.core.types": {**_TYPES, **classes},
        "numba.core.types.abstract": classes,
        "numba.core.types.scalars": classes,
        "numba.core.typing": {"signature": nothing},
        "numba.core.typing.typeof": {"typeof": _typeof, "Purpose": Purpose},
        "numba.core.typing.templates": {"builtin_registry": registry},
        "numba.types": {**_TYPES, **classes},
        "numba.np": {},
        "numba.np.numpy_support": {"as_dtype": _as_dtype},
        "numba.cuda": {**_TYPES, **arrays, **functions, **hints},
        "numba.cuda.args": hints,
        "numba.cuda.libdevice": {},
        "numba.cuda.libdevicefuncs": {"functions": {}},
        "numba.cuda.random": {"init_xoroshiro128p_states_cpu": nothing},
        "numba.cuda.simulator": {},
        "numba.cuda.simulator.api": functions,
        "numba.cuda.simulator.cudadrv": {},
        "numba.cuda.simulator.cudadrv.devicearray": arrays,
        "numba.cuda.simulator.cudadrv.devices": {"gpus": gpus},
        "numba.cuda.simulator.kernelapi": {"FakeCUDAFp16": type("FakeCUDAFp16", (), {})},
        "numba.cuda.vectorizers": {name: type(name, (), {}) for name in vectorizers},
    }


class _Nothing:
    """A context that does nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def install():
    """Add the modules, unless Numba is loaded."""
    if "numba" in sys.modules:
        return
    for name, contents in _modules().items():
        module = types.ModuleType(name, f"Stands for {name} in a browser.")
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None, is_package=True), []
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    sys.modules["numba"].config = sys.modules["numba.cuda"].config = sys.modules["numba.core.config"]
