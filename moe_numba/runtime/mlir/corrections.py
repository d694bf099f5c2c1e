"""What numba-cuda-mlir 0.6.0 lacks or gets wrong for the kernels of this package.

Each correction has a reproducer in ``tests/runtime/mlir_reproducers.py``, which compiles with numba-cuda-mlir alone,
and a test that fails as soon as a release no longer needs the correction.
"""

import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache

from numba_cuda_mlir import lowering_utilities, mlir_lowering
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import arith, llvm
from numba_cuda_mlir._mlir.passmanager import PassManager
from numba_cuda_mlir.decorators import _default_inline
from numba_cuda_mlir.install_registry import register_lowering
from numba_cuda_mlir.lowering import ctypes as pointers
from numba_cuda_mlir.numba_cuda import stubs, types

from moe_numba.runtime.mlir.builder import DYNAMIC_INDEX, cast

_SHARED_ALIGNMENT = 1024  # bytes: of dynamic shared memory, as the swizzles of TMA and wgmma need it
_LONGEST_SELECTION = 32  # items of a tuple
_BUILDERS: list[Callable] = []  # functions of (lower, type of the function, signature) that return a lowering, or None


@cache
def apply():
    """Correct the compiler in this process."""
    register_lowering()
    kind = mlir_lowering.MLIRLower
    found = kind.get_registered_builder

    def get_registered_builder(self, fn, signature):
        typ = self.get_numba_type(fn.name) if hasattr(fn, "name") else None
        made = (builder(self, typ, signature) for builder in _BUILDERS)
        return next(filter(None, made), None) or found(self, fn, signature)

    kind.get_registered_builder = get_registered_builder
    _pointers_extend_by_sign()
    _atomics_find_the_address_space()
    _callees_bring_what_callers_need()
    _tuples_as_arguments()
    _two_calls_with_the_same_star()
    _iterated_tuples_stay_in_registers()
    _enumerations_are_their_own_iterators()


def inline(call, caller, callee):
    """Decide as the compiler does by default whether a call is inlined early, but never for ``f(*arguments)``.

    It chooses such calls, and calls of functions of ``*arguments``, as well, and then refuses them: "Calling a closure
    with *args is unsupported", "Stararg not supported in inliner".
    """
    code = getattr(callee, "func_ir", callee).func_id.code
    has_star = getattr(call, "vararg", None) or code.co_flags & inspect.CO_VARARGS
    return not has_star and _default_inline(call, caller, callee)


def promote_variables(module):
    """Keep variables in registers, which the compiler allocates in memory, before its passes change the module.

    They merge blocks that differ only in the variable that they load, and load through a choice of two addresses then.
    The optimiser does not undo that, and leaves both variables in local memory.
    """
    PassManager.parse("builtin.module(gpu.module(gpu.func(mem2reg),func.func(mem2reg)))").run(module.operation)


def correct_module(gpu_module):
    """Correct a module of MLIR that is about to become LLVM IR.

    - Dynamic shared memory (pull requests 263 and 312): it is an internal array of no bytes, which the linker places
      over static arrays, aligned to 16 bytes. An external array is placed behind them.
    - Local memory is allocated where it is first used, also within loops. The optimiser keeps only that of a function's
      first block in registers, in which `_allocate_first` puts all of it.
    """
    for operation in gpu_module.regions[0].blocks[0].operations:
        if isinstance(operation, llvm.LLVMFuncOp) and operation.regions[0].blocks:
            _allocate_first(operation.regions[0].blocks)
        if isinstance(operation, llvm.GlobalOp) and operation.sym_name.value.startswith("__dynamic_shmem__"):
            operation.attributes["linkage"] = ir.Attribute.parse("#llvm.linkage<external>")
            bits = ir.IntegerType.get_signless(64)
            operation.attributes["alignment"] = ir.IntegerAttr.get(bits, _SHARED_ALIGNMENT)


def _allocate_first(blocks):
    first = blocks[0].operations[0]
    for block in blocks:
        for operation in list(block.operations):
            size = operation.operands[0].owner if operation.name == "llvm.alloca" else None
            if isinstance(size, ir.Operation | ir.OpView) and size.name == "llvm.mlir.constant":
                copy = size.operation.clone(ip=ir.InsertionPoint(first))
                operation.operation.operands[0] = copy.results[0]
                operation.operation.move_before(first)


def correct_text(text, inlined=None):
    """Correct LLVM 7 IR, which the compiler makes without attributes of functions and calls.

    - Device functions become internal, so that those that were inlined vanish: the compiler keeps a copy of each.
    - Device functions and ``inlined``, which a C++ entry calls, are always inlined. The linker would otherwise keep the
      call of a large kernel, and ptxas then serialises wgmma.
    - Inline assembly with side effects becomes convergent, as barriers must be.
    - Loops of unknown length are not repeated. The optimiser repeats those with wgmma four times and a remainder.
    """
    text = re.sub(r"^define (?!ptx_kernel )(.*) \{$", r"define internal \1 alwaysinline {", text, flags=re.MULTILINE)
    if inlined:
        text = re.sub(rf"^define internal (.* @{inlined}\()", r"define \1", text, flags=re.MULTILINE)
    text = re.sub(r'^( +(?:%\S+ = )?call .* asm sideeffect ".*)$', r"\1 convergent", text, flags=re.MULTILINE)
    # What LLVM IR of libnvvm asks for: no initial value of shared arrays, and the data layout with 128-bit integers.
    text = _keep_loops(text)
    text = re.sub(r"^(@.* addrspace\(3\) global .*) zeroinitializer", r"\1 undef", text, flags=re.MULTILINE)
    return text.replace("-i64:64:64-f32", "-i64:64:64-i128:128:128-f32", 1)


def _keep_loops(text):
    """Forbid the optimiser to repeat a loop of unknown length, by metadata of each jump to an earlier block."""
    lines, nodes, seen = [], [], set()
    first = 1 + max(map(int, re.findall(r"^!(\d+) =", text, flags=re.MULTILINE)), default=-1)
    for line in text.split("\n"):
        if line.startswith("define"):
            seen = set()
        elif label := re.match(r"; <label>:(\d+):", line):
            seen.add(label[1])
        elif re.match(" +br ", line) and not seen.isdisjoint(re.findall(r"label %(\d+)", line)):
            loop = first + 1 + len(nodes)
            nodes.append(f"!{loop} = distinct !{{!{loop}, !{first}}}")
            line += f", !llvm.loop !{loop}"
        lines.append(line)
    unroll = [f'!{first} = !{{!"llvm.loop.unroll.runtime.disable"}}'] if nodes else []
    return "\n".join([*lines, *unroll, *nodes]) + "\n"


def _builder(function):
    _BUILDERS.append(function)
    return function


@_builder
def _construct_named_tuple(lower, typ, signature):
    """No lowering of a call of a NamedTuple's class."""
    if not isinstance(typ, types.NamedTupleClass):
        return None

    def build(lower, target, args, kwargs):
        made, names = lower.get_numba_type(target.name), typ.instance_class._fields
        fields = [*args, *(dict(kwargs)[name] for name in names[len(args) :])]
        values = [cast(lower, variable, item) for variable, item in zip(fields, made.types, strict=True)]
        lower.store_var(target, tuple(values))

    return build


@_builder
def _max_and_min(lower, typ, signature):
    """``max`` and ``min`` compare unsigned integers as signed ones, and take only two arguments."""
    function = getattr(typ, "typing_key", None)
    if function not in (max, min) or len(signature.args) < 2 or not isinstance(signature.return_type, types.Integer):
        return None

    def build(lower, target, args, kwargs):
        wanted = lower.get_numba_type(target.name)
        choices = (arith.maxsi, arith.maxui) if function is max else (arith.minsi, arith.minui)
        out, *others = [cast(lower, variable, wanted) for variable in args]
        for value in others:
            out = choices[not wanted.signed](out, value)
        lower.store_var(target, out)

    return build


@_builder
def _threadfence_block(lower, typ, signature):
    """No lowering of ``cuda.threadfence_block``."""
    if getattr(typ, "typing_key", None) is not stubs.threadfence_block:
        return None

    def build(lower, target, args, kwargs):
        llvm.inline_asm(None, [], "fence.acq_rel.cta;", "~{memory}", has_side_effects=True)
        lower.store_var(target, None)

    return build


class _Enumeration(lowering_utilities.UniTupleIterObject):
    """The iterator of ``enumerate``; the base class is one of those that the compiler asks for the next item."""

    def __init__(self, items):
        self._items = items

    def next(self):
        index, found = self._items.index, self._items.next()
        return lowering_utilities.IterResult((index, found.value), found.is_valid)


@_builder
def _enumerate(lower, typ, signature):
    """No lowering of ``enumerate``."""
    if getattr(typ, "typing_key", None) is not enumerate or not isinstance(signature.args[0], types.UniTuple):
        return None

    def build(lower, target, args, kwargs):
        if len(args) > 1 or kwargs:
            raise NotImplementedError("enumerate with a start")
        lower.lower_getiter_expr_assign(target, args[0])
        lower.varmap[target.name] = _Enumeration(lower.load_var(target))

    return build


def _enumerations_are_their_own_iterators():
    """A part of `_enumerate`."""
    kind = mlir_lowering.MLIRLower
    found = kind.lower_getiter_expr_assign

    def lower_getiter_expr_assign(self, target, value):
        if isinstance(self.get_numba_type(value.name), types.EnumerateType):
            self.store_var(target, self.load_var(value))
        else:
            found(self, target, value)

    kind.lower_getiter_expr_assign = lower_getiter_expr_assign


def _pointers_extend_by_sign():
    """A pointer's int32 index, and a value stored as a wider type, are extended by zeros (issue 303 is of arrays)."""

    def address(lower, pointer, index):
        typ = lower.get_numba_type(pointer.name)
        element, at = lower.get_storage_type(typ.dtype), cast(lower, index, types.int64)
        base, generic = lower.load_var(pointer), llvm.PointerType.get()
        return typ.dtype, element, llvm.getelementptr(generic, base, [at], [DYNAMIC_INDEX], element, None)

    def getitem(lower, target, args, kwargs):
        dtype, element, where = address(lower, *args)
        lower.store_var(target, lower.from_storage(dtype, llvm.load(element, where)))

    def setitem(lower, target, args, kwargs):
        pointer, index, value = args
        dtype, _, where = address(lower, pointer, index)
        llvm.store(lower.as_storage(dtype, cast(lower, value, dtype)), where)

    # They are registered already: their code is replaced.
    _become(pointers, "lower_pointer_getitem", getitem)
    _become(pointers, "lower_pointer_setitem", setitem)


def _atomics_find_the_address_space():
    """Atomic operations take an array of unknown address space, such as a device function's argument, for global.

    With a generic pointer the optimiser finds the address space of the caller's array.
    """
    known = lowering_utilities.memref_llvm_address_space
    lowering_utilities.memref_llvm_address_space = lambda typ: 0 if typ.memory_space is None else known(typ)
    old = "llvm.addrspacecast(ptr_type, memref_data_pointer(array))"
    new = "(lambda p: p if p.type == ptr_type else llvm.addrspacecast(ptr_type, p))(memref_data_pointer(array))"
    function = _changed(lowering_utilities.memref_to_llvm_ptr, lowering_utilities, (old, new))
    lowering_utilities.memref_to_llvm_ptr.__code__ = function.__code__


def _callees_bring_what_callers_need():
    """A device function's static shared arrays are not copied to its caller's module.

    And a function that returns a tuple of one item is taken to return the item.
    """
    arrays = "(gpu.GPUFuncOp, func.FuncOp, llvm.GlobalOp)"
    is_tuple = "isinstance(target_type, types.BaseTuple)"
    _change_method(
        "build_user_defined_function_call",
        (arrays, "(gpu.GPUFuncOp, func.FuncOp, llvm.GlobalOp, memref.GlobalOp)"),
        (f"{is_tuple} and len(callee_function_type) > 1", is_tuple),
    )


def _tuples_as_arguments():
    """None in a tuple that a device function takes is passed although the function has no parameter for it.

    And a call of a function of ``*arguments`` is not lowered: "'tuple' object has no attribute 'name'".
    """
    pairs = []
    for typ in ("arg_type", "value_type"):
        argument = f"self.as_argument({typ}, value)"
        pairs.append((f"self._flatten_abi_value({argument})", f"self._flatten_abi_operands({typ}, {argument})"))
    # The arguments of a function of `*arguments`, which the method also gets from the calls that `inline` lets pass.
    starred = "tuple(self.load_vars(arg)) if isinstance(arg, tuple) else self.load_var(arg)"
    pairs.append(
        (
            "self._coerce_value_to_numba_type(arg_type, self.load_var(arg))",
            f"self._coerce_value_to_numba_type(arg_type, {starred})",
        )
    )
    _change_method("_call_operands_from_vars", *pairs)


def _two_calls_with_the_same_star():
    """Two calls ``f(*arguments)`` of the same tuple in a function define the same variables twice."""
    name = 'f"$vararg_{expr.vararg.name}_{%si}"'
    _change_method("lower_expr_assign", (name % "", name % "target.name}_{"))


def _selected(values, index):
    """Return the item of a tuple at an index, by selections, which vanish once the index is a constant."""
    out = values[0]
    for i, value in enumerate(values[1:], 1):
        is_it = arith.cmpi(arith.CmpIPredicate.eq, index, arith.constant(index.type, i))
        out = arith.select(is_it, value, out)
    return out


def _iterated_tuples_stay_in_registers():
    """A loop over a tuple, even of constants, stores it in local memory, where it stays after the loop is unrolled."""
    lowering, iterator = mlir_lowering.MLIRLower, lowering_utilities.UniTupleIterObject
    concretize, initialise = lowering.concretize_tuple_ex, iterator.__init__

    def concretize_tuple_ex(self, value):
        storage, uses_llvm = concretize(self, value)
        self._concretized = storage, value
        return storage, uses_llvm

    def __init__(self, lower, tuple_storage, count, *arguments, **options):
        initialise(self, lower, tuple_storage, count, *arguments, **options)
        storage, values = getattr(lower, "_concretized", (None, None))
        known = storage is tuple_storage and isinstance(values, tuple) and count <= _LONGEST_SELECTION
        self._values = values if known else None

    old = "memref.load(self._tuple_storage, [index_as_index])"
    new = f"_selected(self._values, current_index) if self._values else {old}"
    lowering_utilities._selected = _selected
    iterator.next = _changed(iterator.next, lowering_utilities, (old, new))
    iterator.__init__, lowering.concretize_tuple_ex = __init__, concretize_tuple_ex
    make = "utio = UniTupleIterObject(self, mr, value_type.count, element_type)"
    constants = "tuple(arith.constant(result=element_type, value=v) for v in literal_values)"
    _change_method("lower_getiter_expr_assign", (make, f"self._concretized = mr, {constants}; {make}"))


def _change_method(name, *pairs):
    kind = mlir_lowering.MLIRLower
    setattr(kind, name, _changed(getattr(kind, name), mlir_lowering, *pairs))


def _changed(function, module, *pairs):
    """Return a function of another module made from its source, with passages replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in pairs:
        if source.count(old) != 1:
            raise RuntimeError(f"{module.__name__}.{function.__name__} has changed: {old!r} is not in it once")
        source = source.replace(old, new)
    space = {}
    exec(compile(source, module.__file__, "exec"), module.__dict__, space)
    return space[function.__name__]


def _become(module, name, function):
    """Let a registered lowering call ``function`` in its place."""
    space = {}
    exec(
        f"def {name}(builder, target, args, kwargs):\n    return _corrected_{name}(builder, target, args, kwargs)",
        space,
    )
    setattr(module, f"_corrected_{name}", function)
    getattr(module, name).__code__ = space[name].__code__
