"""Public functions as PyTorch ops: ``torch.ops.moe_numba.*``, for torch.compile, torch.export and fake tensors.

An ordinary call does not go through PyTorch's dispatcher, which costs some microseconds. A call that PyTorch traces or
transforms must go through it. So a public function is written like this::

    @torch_op()
    def function(x: torch.Tensor, bias: torch.Tensor | None, ..., out: torch.Tensor | None = None) -> torch.Tensor:
        ...  # launch kernels


    @register_fake(function)
    def _fake_function(call):
        ...  # check call.x and the other arguments; return the outputs
"""

import ast
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch.autograd import forward_ad

from moe_numba import simulator
from moe_numba.runtime.dlpack import PLAIN_TYPES, call_with_tensors, check_kind
from moe_numba.runtime.outputs import remember
from moe_numba.runtime.overlap import overlaps

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "moe_numba"
OPS: dict[str, tuple[str, ...]] = {}  # all ops that are registered, and the parameters of their functions

# FRAGMENT, so that other code can add ops to the namespace. Not torch.library.custom_op: its Autograd kernel is Python,
# and triples the cost of a call.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
# Of each function: the parameters that are tensors or None, those that `out` may be, those that must be tensors, and
# those that may be an int or a tensor.
_functions: dict[str, Callable] = {}
_apart: dict[tuple, bool] = {}  # (function, first input, outputs) that do not overlap, see `check_overlap`
_tensors: dict[str, tuple[str, ...]] = {}
_in_place: dict[str, tuple[str, ...]] = {}
_required_tensors: dict[str, tuple[str, ...]] = {}
_int_or_tensor: dict[str, tuple[str, ...]] = {}
# Of each function: its parameters that are a named tuple or None, the class, and the fields that the op takes.
_named_tuples: dict[str, dict[str, tuple[Any, list[str]]]] = {}
_with_fake: set[str] = set()  # ops that have a fake implementation
_with_autograd: set[str] = set()  # ops that have a backward
_differentiable: dict[str, Callable] = {}  # what calls with tensors that require grad call instead of an op
_TENSOR = torch.Tensor, torch.Tensor | None
_INT_OR_TENSOR = int | torch.Tensor | None
_NO_TENSOR = "workspace"  # a parameter that ops do not have: memory for intermediate results, of no type of a schema
_SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    _INT_OR_TENSOR: "Tensor?",
    int: "SymInt",
    int | None: "SymInt?",
    torch.dtype | None: "ScalarType?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_is_grad_enabled = torch.is_grad_enabled


class _State(threading.local):
    in_op = False  # whether this thread runs the implementation of an op


_state = _State()


def needs_dispatch(x, *others) -> bool:
    """Whether a call of a public function needs more than a launch on torch tensors.

    True if ``x`` is an array of another library, or if the call must go through PyTorch's dispatcher: under
    torch.compile, torch.export, FakeTensorMode and any other TorchDispatchMode; inside transforms of torch.func; if
    ``x`` is a meta tensor or of a subclass; if a tensor requires grad, which an op without backward refuses; and for a
    negated view and a tensor without memory, which :func:`call_op` refuses.

    Parameters
    ----------
    x : torch.Tensor or array of another library
        The first tensor of the call.
    *others : torch.Tensor, array of another library or None
        Its other tensors.
    """
    if _is_dynamo_compiling():  # Dynamo replaces the call by True and does not trace the rest
        return True
    if type(x) in PLAIN_TYPES and not _num_dispatch_modes() and _functorch_interpreter() is None and not x.is_meta:
        if not any(map(_is_special, (x, *others))):
            return False
    return not _state.in_op


def _is_ordinary(tensors):
    """Return an expression that is false for each call that `needs_dispatch`, and fast for most others.

    It raises AttributeError for an array of another library, and RuntimeError for a sparse tensor, without an address.
    """
    no_mode = "not _is_dynamo_compiling() and not _num_dispatch_modes() and _functorch_interpreter() is None"
    is_plain = f"type({tensors[0]}) in PLAIN_TYPES"
    have_memory = [f"({t} is None or {t}.data_ptr() and not {t}.is_neg())" for t in tensors]
    need_grad = [f"{t} is not None and {t}.requires_grad" for t in tensors]
    return " and ".join((no_mode, is_plain, *have_memory, f"not (_is_grad_enabled() and ({' or '.join(need_grad)}))"))


def _is_special(tensor):
    """Whether a tensor needs a gradient that is recorded, is a negated view, or has no memory."""
    if type(tensor) not in PLAIN_TYPES:
        return False
    try:
        has_no_memory = not tensor.data_ptr() and tensor.numel()
    except RuntimeError:
        return True
    return has_no_memory or tensor.is_neg() or (tensor.requires_grad and _is_grad_enabled())


def call_op(name: str, arguments: dict[str, Any]) -> Any:
    """Call the op of a public function with all arguments of the function; return what the function returns.

    If the first argument is an array of another library, call the function with tensors.
    """
    op, first = getattr(torch.ops.moe_numba, name), OPS[name][0]
    if not isinstance(arguments[first], torch.Tensor):
        return call_with_tensors(_functions[name], first, arguments)
    if name in _differentiable and arguments.get("out") is None and wants_grad(arguments.values()):
        arguments.pop("out", None)
        return _differentiable[name](**arguments)
    if not _is_dynamo_compiling():  # under Dynamo the fake implementation checks
        _check_no_grad(name, arguments)
        check_kinds(arguments)
    out = arguments.pop("out", None)
    arguments.pop(_NO_TENSOR, None)
    for key in _int_or_tensor[name]:
        if isinstance(arguments[key], int | torch.SymInt):
            device = arguments[_required_tensors[name][0]].device
            arguments[key] = torch.full((1,), arguments[key], dtype=torch.int64, device=device)
    for key, (kind, fields) in _named_tuples[name].items():
        if (value := arguments.pop(key)) is not None:
            if not isinstance(value, kind):
                raise TypeError(f"{key} is {type(value).__name__}; it must be a {kind.__name__}")
            for field, item in zip(kind._fields, value, strict=True):
                if field in fields:
                    arguments[f"{key}_{field}"] = item
                elif item is not None:
                    raise TypeError(f"{key}.{field} is a {type(item).__name__}; under torch.compile {name} takes None")
    if out is None:
        return op.default(**arguments)
    op.out(**arguments, out=out)
    return out


def wants_grad(values: Iterable[Any]) -> bool:
    """Whether a tensor among the values requires grad, and grad mode is on."""
    return _is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def name_requiring_grad(arguments: dict[str, Any]) -> str | None:
    """Return the name of the first tensor that requires grad, or None."""
    return next((n for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.requires_grad), None)


def public_function(name: str) -> Callable:
    """Return the public function of an op."""
    return _functions[name]


def check_kinds(arguments: dict[str, Any]) -> None:
    """Raise for a tensor, or one in a tuple, whose memory does not have its values in strided order."""
    for name, value in arguments.items():
        for i, tensor in enumerate(value if isinstance(value, (tuple, list)) else (value,)):
            if isinstance(tensor, torch.Tensor):
                check_kind(f"{name}[{i}]" if isinstance(value, (tuple, list)) else name, tensor)


def check_overlap(name: str, out: Any, tensors: tuple) -> None:
    """Raise if an output of a call overlaps another one or one of ``tensors``, those of `_tensors` of the function.

    On a GPU, where a call takes microseconds, outputs are checked with the same first input only once.
    """
    try:
        if type(out) is tuple:
            key = name, tensors[0].data_ptr(), *[(o.data_ptr(), o.nbytes, o.is_neg()) for o in out]
        else:
            key = name, tensors[0].data_ptr(), out.data_ptr(), out.nbytes, out.is_neg()
        if key in _apart:
            return
    except AttributeError:  # of an array of another library
        key = None
    check_kinds({"out": out})
    outs = out if isinstance(out, (tuple, list)) else (out,)
    if found := overlaps(outs, tensors, [n in _in_place[name] for n in _tensors[name]]):
        i, j = found
        names = [f"out[{k}]" for k in range(len(outs))] if outs is out else ["out"]
        other = names[j - len(tensors)] if j >= len(tensors) else _tensors[name][j]
        whole = f"; it may only be {' or '.join(_in_place[name])} as a whole" if other in _in_place[name] else ""
        raise ValueError(f"{names[i]} overlaps {other} in memory{whole}: pass other memory, or no out")
    if key and not simulator.ENABLED:
        remember(_apart, key, True)


def torch_op(*, in_place: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a public function as the op ``moe_numba::<name>``; a decorator.

    The decorated function has the same signature. It calls the op where a call :func:`needs_dispatch`, and the function
    itself otherwise. It refuses an ``out`` that overlaps an input. If a call fails because a tensor is sparse, nested
    or without memory, the error names it.

    The op has the function's parameters without ``out`` and ``workspace``. A function with ``out`` has a second
    overload, ``<name>.out``, in which ``out`` and what follows are keyword-only. It writes to ``out`` and returns
    nothing. Where the function takes an int or a tensor the op takes a tensor, because schemas have no such type;
    :func:`call_op` converts. Where it takes a named tuple the op takes its fields, ``<parameter>_<field>``; those that
    the class names in ``written()`` are modified. The op of a function that returns a single tensor lacks these.

    Parameters
    ----------
    in_place : tuple of str
        Names of the parameters that ``out`` may be, with the same memory from the first to the last element.
    """

    def decorate(function):
        parameters = inspect.signature(function).parameters.values()
        _tensors[function.__name__] = tuple(p.name for p in parameters if p.annotation in _TENSOR and p.name != "out")
        _in_place[function.__name__] = in_place
        public = _with_dispatch(function)
        if function.__name__ not in OPS:  # else the module is executed again, as by importlib.reload
            _register(function, public)
        return public

    return decorate


def _with_dispatch(function):
    """Return a function of the same signature which calls the op if a call needs it.

    It is generated: a wrapper with ``*args, **kwargs`` takes ten times as long, and Dynamo does not trace how it would
    bind them. In tracebacks its line is that of the decorator.
    """
    name, names = function.__name__, list(inspect.signature(function).parameters)
    arguments, by_name = ", ".join(names), f"{{{', '.join(f'{n!r}: {n}' for n in names)}}}"
    tensors = ", ".join(_tensors[name])
    check_out = f"   if out is not None: check_overlap({name!r}, out, ({tensors},))\n" if "out" in names else ""
    tree = ast.parse(
        f"def bind(function):\n"
        f" def {name}({arguments}):\n"
        f"  try: is_ordinary = {_is_ordinary(_tensors[name])}\n"
        f"  except (AttributeError, RuntimeError): is_ordinary = False\n"
        f"  if not is_ordinary and needs_dispatch({tensors}): return call_op({name!r}, {by_name})\n"
        f"  try:\n"
        f"{check_out}"
        f"   return function({arguments})\n"
        f"  except RuntimeError: check_kinds({by_name}); raise\n"
        f" return {name}"
    )
    code = function.__code__
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = code.co_firstlineno
    namespace: dict[str, Any] = {}
    exec(compile(tree, code.co_filename, "exec"), globals(), namespace)
    public = functools.wraps(function)(namespace["bind"](function))
    public.__defaults__ = function.__defaults__
    return public


def _register(function, public):
    """Define the op of a function, whose name no op has yet; ``public`` is the function with dispatch."""
    name, signature = function.__name__, inspect.signature(function)
    parameters = signature.parameters
    names = OPS[name] = tuple(parameters)
    found = {n: [t for t in get_args(parameters[n].annotation) if hasattr(t, "_fields")] for n in names}
    # Inductor cannot compile an op with a single output that modifies an argument.
    left_out = lambda kind: kind.written() if signature.return_annotation is torch.Tensor else ()
    _named_tuples[name] = {
        n: (kind, [f for f in kind._fields if f not in left_out(kind)]) for n, kinds in found.items() for kind in kinds
    }
    positional = _op_names(name)
    _functions[name] = public
    _required_tensors[name] = tuple(n for n in names if parameters[n].annotation is torch.Tensor)
    _int_or_tensor[name] = tuple(n for n in names if parameters[n].annotation == _INT_OR_TENSOR)

    def implementation(*args, **kwargs):
        arguments = _with_named_tuples(name, dict(zip(positional, args)) | kwargs)
        if _is_grad_enabled():
            _check_no_grad(name, arguments, of_op=True)
        if (out := arguments.get("out")) is not None:
            check_overlap(name, out, tuple(arguments.get(n) for n in _tensors[name]))
        before, _state.in_op = _state.in_op, True
        try:
            return function(**arguments)
        finally:
            _state.in_op = before

    def out_implementation(*args, **kwargs):
        implementation(*args, **kwargs)

    def refuse_vmap(*args, **kwargs):
        raise NotImplementedError(f"{name} does not support torch.vmap: pass all tokens in one call")

    for with_out, qualified in ((False, name), (True, f"{name}.out")):
        if with_out and "out" not in parameters:
            continue
        _library.define(qualified + _schema(signature, _named_tuples[name], with_out), tags=_TAGS)
        for device in ("CPU", "CUDA"):
            _library.impl(qualified, out_implementation if with_out else implementation, device)
        _library.impl(qualified, refuse_vmap, "FuncTorchBatched")


class Call(types.SimpleNamespace):
    """The arguments of a call of a public function, by name."""

    def replace(self, **changes):
        """Return a copy with other arguments."""
        return Call(**vars(self) | changes)


def register_fake(public: Callable) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Register the fake implementation of a public function's op; a decorator.

    It takes a :class:`Call` with fake tensors, whose sizes may be symbolic. It checks the arguments as far as that
    needs no data, and returns the outputs: new ones, or those in ``out``.
    """
    name, parameters = public.__name__, inspect.signature(public).parameters
    names = _op_names(name)
    defaults = {n: parameter.default for n, parameter in parameters.items()}

    def register(fake):
        if name in _with_fake:
            return fake
        _with_fake.add(name)

        def functional(*args, **kwargs):
            call = Call(**defaults | _with_named_tuples(name, dict(zip(names, args)) | kwargs))
            _check_no_grad(name, vars(call), of_op=True)
            outputs = fake(call)
            return tuple(outputs) if isinstance(outputs, list) else outputs

        def with_out(*args, **kwargs):
            functional(*args, **kwargs)

        torch.library.register_fake(f"{NAMESPACE}::{name}", functional, lib=_library)
        if "out" in parameters:
            torch.library.register_fake(f"{NAMESPACE}::{name}.out", with_out, lib=_library)
        return fake

    return register


def register_autograd(public: Callable, backward: Callable, setup_context: Callable) -> None:
    """Register the backward of a public function's op, as ``torch.library.register_autograd`` but by name.

    ``setup_context(ctx, call, output)`` takes a :class:`Call`, and ``backward(ctx, grad)`` returns a dict of
    gradients by argument.
    """
    name = public.__name__
    names = _op_names(name)

    def setup(ctx, inputs, output):
        setup_context(ctx, Call(**dict(zip(names, inputs, strict=True))), output)

    def in_order(ctx, *grads):
        return tuple(map(backward(ctx, *grads).get, names))

    if name not in _with_autograd:
        _with_autograd.add(name)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", in_order, setup_context=setup, lib=_library)


def register_differentiable(public: Callable, function: Callable) -> None:
    """Let calls of a public function with a tensor that requires grad call ``function``.

    That holds in grad mode and without ``out``, which ``function`` does not have; its other parameters are the same. It
    serves functions whose op modifies an argument, which autograd refuses, and those that are a composition of others.
    """
    _differentiable[public.__name__] = function


def _op_names(name):
    """Return the parameters of a function's op, without ``out``."""
    names = (n for n in OPS[name] if n not in ("out", _NO_TENSOR))
    tuples = {n: [f"{n}_{field}" for field in fields] for n, (_, fields) in _named_tuples[name].items()}
    return [parameter for n in names for parameter in tuples.get(n, [n])]


def _with_named_tuples(name, arguments):
    """Return the arguments of a function from those of its op."""
    for key, (kind, names) in _named_tuples[name].items():
        fields = {f: arguments.pop(p) for f in names if (p := f"{key}_{f}") in arguments}
        arguments[key] = None if fields.get(kind._fields[0]) is None else kind(**fields)
    return arguments


def _schema_of_fields(parameter, kind, fields):
    """Yield the arguments in a schema for fields of a named tuple; without it, its first field is None."""
    for field, annotation in get_type_hints(kind).items():
        if field not in fields:
            continue
        default, name = kind._field_defaults.get(field), _SCHEMA_TYPES[annotation].removesuffix("?")
        name = "Tensor(b!)" if field in kind.written() else name
        yield f"{name}{'?' if default is None else ''} {parameter}_{field}={default!r}"


def _schema(signature, named_tuples, with_out):
    """The schema of an op, or of its overload with ``out``, from the signature of the function."""
    single = signature.return_annotation is torch.Tensor
    arguments = []
    for parameter in signature.parameters.values():
        if parameter.name == _NO_TENSOR:
            continue
        if parameter.name == "out":
            # Without ``out`` all arguments are positional: torch.library.register_autograd takes no others.
            arguments += ["*", "Tensor(a!) out" if single else "Tensor(a!)[] out"] if with_out else []
            continue
        if parameter.name in named_tuples:
            arguments += _schema_of_fields(parameter.name, *named_tuples[parameter.name])
            continue
        argument = f"{_SCHEMA_TYPES[parameter.annotation]} {parameter.name}"
        if parameter.default is not inspect.Parameter.empty:
            argument += f"={repr(parameter.default).removeprefix('torch.')}"
        arguments.append(argument)
    returns = "" if with_out else ", ".join(["Tensor"] * (1 if single else len(get_args(signature.return_annotation))))
    return f"({', '.join(arguments)}) -> ({returns})"


def _check_no_grad(name, arguments, of_op=False):
    """Raise for tensors that require grad, if the result of a function, or its op, would silently lose the gradient."""
    out = arguments.get("out")
    if name not in _with_autograd and (of_op or name not in _differentiable):
        reason = f"{name} has no backward"
    else:
        reason = f"{name} has a backward only without out" if out is not None else ""
    if isinstance(out, (tuple, list)):
        arguments = arguments | {f"out[{i}]": tensor for i, tensor in enumerate(out)}
    for parameter, tensor in arguments.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if reason and _is_grad_enabled() and tensor.requires_grad:
            raise ValueError(f"{parameter} requires grad; {reason}: use torch.no_grad() or detach()")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(f"{parameter} has a tangent; {name} has no forward-mode derivative: use detach()")
