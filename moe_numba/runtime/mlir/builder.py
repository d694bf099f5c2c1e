"""Code generators written for Numba, which call llvmlite's IRBuilder, on numba-cuda-mlir.

`adapted` wraps the definition of a Numba intrinsic. Its code generator runs unchanged, on a `Builder` that has the
methods of IRBuilder used in ``moe_numba.ptx`` and emits operations of MLIR's LLVM and arith dialects. Types in it are
llvmlite's, values are `Value`, and the value of a tuple is a Python tuple of them.
"""

import inspect
from itertools import count
from types import SimpleNamespace

from llvmlite import ir as llvm_ir
from numba.core import types as numba_types
from numba_cuda_mlir import extending
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import arith, builtin, llvm, math, memref
from numba_cuda_mlir.lowering_utilities import convert, memref_data_pointer, memref_descriptor_type
from numba_cuda_mlir.numba_cuda import types as mlir_types
from numba_cuda_mlir.numba_cuda.core import ir as numba_ir
from numba_cuda_mlir.numba_cuda.typing.typeof import typeof

from moe_numba.runtime.mlir.types import converted

DYNAMIC_INDEX = -(2**31)  # in a `getelementptr`: the index is an operand
_NUMBERS = count()
_TWO_OPERANDS = {
    "fadd": arith.addf,
    "fsub": arith.subf,
    "fmul": arith.mulf,
    "add": arith.addi,
    "sub": arith.subi,
    "mul": arith.muli,
    "and_": arith.andi,
    "or_": arith.ori,
    "xor": arith.xori,
    "shl": arith.shli,
    "lshr": arith.shrui,
    "ashr": arith.shrsi,
}
_CASTS = {
    "ptrtoint": llvm.ptrtoint,
    "inttoptr": llvm.inttoptr,
    "sext": arith.extsi,
    "zext": arith.extui,
    "trunc": arith.trunci,
}
_ORDERED = {"<": "OLT", ">": "OGT", "<=": "OLE", ">=": "OGE", "==": "OEQ", "!=": "ONE"}


class Value:
    """An MLIR value with its llvmlite type; None for an array's."""

    def __init__(self, value, typ):
        self.value, self.type = value, typ


class Builder:
    """Emits MLIR where the compiler is; the methods are those of llvmlite's IRBuilder."""

    def __getattr__(self, name):
        if name in _TWO_OPERANDS:
            return lambda a, b: Value(_TWO_OPERANDS[name](_operand(a), _operand(b)), a.type)
        if name in _CASTS:
            return lambda value, typ: Value(_CASTS[name](_mlir_type(typ), _operand(value)), typ)
        raise NotImplementedError(f"IRBuilder.{name} is not known to moe_numba.runtime.mlir.builder")

    def call(self, assembly, operands, attrs=()):
        """Emit inline assembly. `corrections` makes it convergent if it has side effects, which MLIR cannot say."""
        returned = assembly.function_type.return_type
        is_void = isinstance(returned, llvm_ir.VoidType)
        out = llvm.inline_asm(
            None if is_void else _mlir_type(returned),
            [_operand(operand) for operand in operands],
            assembly.asm,
            assembly.constraint,
            has_side_effects=assembly.side_effect or "convergent" in attrs,
        )
        return None if is_void else Value(out, returned)

    def extract_value(self, value, index):
        if isinstance(value, tuple):
            return value[index]
        typ = value.type.elements[index]
        return Value(llvm.extractvalue(_mlir_type(typ), value.value, [index]), typ)

    def extract_element(self, vector, index):
        return Value(llvm.extractelement(vector.value, _operand(index)), vector.type.element)

    def gep(self, pointer, indices):
        (index,) = indices
        element = _mlir_type(pointer.type.pointee)
        return Value(_element(pointer.value, _operand(index), element), pointer.type)

    def load(self, pointer, align=None):
        typ = pointer.type.pointee
        return Value(llvm.load(_mlir_type(typ), pointer.value, alignment=align), typ)

    def bitcast(self, value, typ):
        if isinstance(typ, llvm_ir.PointerType):  # MLIR's pointers have no element type
            return Value(value.value, typ)
        return Value(llvm.bitcast(_mlir_type(typ), _operand(value)), typ)

    def addrspacecast(self, pointer, typ):
        if pointer.type.addrspace == typ.addrspace:
            return Value(pointer.value, typ)
        return Value(llvm.addrspacecast(_mlir_type(typ), pointer.value), typ)

    def fma(self, a, b, c):
        return Value(math.fma(_operand(a), _operand(b), _operand(c)), a.type)  # LLVM 7 has no name for llvm.intr.fma

    def fcmp_ordered(self, operator, a, b):
        predicate = getattr(arith.CmpFPredicate, _ORDERED[operator])
        return Value(arith.cmpf(predicate, _operand(a), _operand(b)), llvm_ir.IntType(1))

    def select(self, condition, a, b):
        return Value(arith.select(_operand(condition), _operand(a), _operand(b)), a.type)


class Context:
    """What code generators use of Numba's target context."""

    typing_context = None

    def __init__(self, lower, target, translation):
        self._lower, self._target, self._translation = lower, target, translation

    def get_dummy_value(self):
        return None

    def get_value_type(self, typ):
        return _llvm_type(typ)

    def get_constant(self, typ, value):
        return _llvm_type(typ)(value)

    def make_tuple(self, builder, typ, values):
        return tuple(values)

    def make_array(self, typ):
        """Return a function whose result has the pointer of an array, and makes an array of another pointer."""

        def make(context, builder, value):
            made = SimpleNamespace(data=Value(memref_data_pointer(value.value), _llvm_type(typ.dtype).as_pointer()))
            made._getvalue = lambda: Value(_with_pointer(value.value, made.data.value), None)
            return made

        return make

    def compile_internal(self, builder, function, sig, values):
        """Emit a call of a Python function, which is compiled as a device function."""
        callee = Callee(self._translation.device_function(function), function)
        return self._call(callee, sig.args, values, sig.return_type)

    def get_function(self, callee, sig):
        """Return a function that emits a call of a `Callee`."""

        def call(builder, values):
            return self._call(callee, sig.args, values, sig.return_type)

        call.libs = ()
        return call

    def add_linking_libs(self, libs):
        pass

    def _call(self, callee, arguments, values, returned):
        """Emit a call as if the kernel's source had it, with variables of the kernel for its arguments and result."""
        lower, target = self._lower, self._target

        def variable(typ):
            name = f"$call_of_a_code_generator.{next(_NUMBERS)}"
            lower.fndesc.typemap[name] = typ
            return numba_ir.Var(scope=target.scope, name=name, loc=target.loc)

        wanted = [converted(typ, mlir_types) for typ in arguments]
        variables = [variable(typ) for typ in wanted]
        for var, value in zip(variables, values, strict=True):
            lower.varmap[var.name] = _unwrapped(value)
        own = typeof(callee.dispatcher).get_call_type(lower.context.typing_context, wanted, {}).return_type
        out = lower.build_user_defined_function_call(variable(own), callee.dispatcher, variables)
        if returned in (numba_types.none, numba_types.void):
            return None
        return _wrapped(returned, lower.lower_cast(own, converted(returned, mlir_types), out))


class Callee:
    """A device function that a code generator calls; Numba's ``typeof`` takes it for its own type."""

    def __init__(self, dispatcher, py_func):
        self.dispatcher, self.py_func, self._numba_type_ = dispatcher, py_func, self

    def get_call_type(self, context, arguments, keywords):
        """Return the signature of a call whose result the code generator does not use."""
        return numba_types.void(*arguments)


def adapted(definition, translation):
    """Return numba-cuda-mlir's intrinsic of the definition of one of Numba's."""

    def typed(typingctx, *arguments):
        given = [converted(argument, numba_types) for argument in arguments]
        answer = definition(typingctx, *given)
        if answer is None:
            return None
        signature, codegen = answer
        # An array of numba-cuda-mlir may know its address space, which Numba's type does not say.
        exact = {own: theirs for own, theirs in zip(given, arguments, strict=True)}

        def back(typ):
            return exact[typ] if typ in exact else converted(typ, mlir_types)

        wanted = [back(typ) for typ in signature.args]

        def lowered(lower, target, variables, keywords):
            values = [
                _wrapped(own, cast(lower, variable, typ))
                for own, typ, variable in zip(signature.args, wanted, variables, strict=True)
            ]
            out = codegen(Context(lower, target, translation), Builder(), signature, values)
            lower.store_var(target, _unwrapped(out))

        return back(signature.return_type)(*wanted), lowered

    typed.__signature__ = inspect.signature(definition)
    typed.__name__, typed.__doc__ = definition.__name__, definition.__doc__
    return extending.intrinsic(typed)


def cast(lower, variable, wanted):
    """Return the value of a variable of the kernel, cast to the type that a signature asks for."""
    value, own = lower.load_var(variable), lower.get_numba_type(variable.name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = lower.lower_literal_if_needed(value, own)
    return value if own == wanted or isinstance(wanted, mlir_types.Array) else lower.lower_cast(own, wanted, value)


def _wrapped(typ, value):
    if isinstance(typ, numba_types.BaseTuple):
        return tuple(_wrapped(item, part) for item, part in zip(typ.types, value, strict=True))
    if isinstance(typ, numba_types.Array):
        return Value(value, None)
    if typ == numba_types.none:
        return None
    wanted = _llvm_type(typ)
    return Value(convert(value, _mlir_type(wanted)), wanted)


def _unwrapped(value):
    if isinstance(value, tuple):
        return tuple(_unwrapped(part) for part in value)
    return None if value is None else value.value if isinstance(value, Value) else _operand(value)


def _operand(value):
    """Return the MLIR value of a value or of a constant of llvmlite."""
    if isinstance(value, Value):
        return value.value
    is_float = isinstance(value.type, llvm_ir.FloatType | llvm_ir.DoubleType)
    number = float(value.constant) if is_float else _signed(int(value.constant), value.type.width)
    return arith.constant(_mlir_type(value.type), number)


def _signed(number, bits):
    """Return an integer as MLIR takes it, whose integers of given bits are below ``2 ** (bits - 1)``."""
    return number - (1 << bits) if number >= 1 << (bits - 1) and bits > 1 else number


def _element(pointer, index, element):
    return llvm.getelementptr(pointer.type, pointer, [index], [DYNAMIC_INDEX], element, None)


def _llvm_type(typ):
    """Return the llvmlite type of a type of Numba."""
    if isinstance(typ, numba_types.Boolean):
        return llvm_ir.IntType(1)
    if isinstance(typ, numba_types.Integer):
        return llvm_ir.IntType(typ.bitwidth)
    if isinstance(typ, numba_types.Float):
        return llvm_ir.FloatType() if typ.bitwidth == 32 else llvm_ir.DoubleType()
    if isinstance(typ, numba_types.CPointer):
        return _llvm_type(typ.dtype).as_pointer()
    raise NotImplementedError(f"{typ} as an operand of an intrinsic")


def _mlir_type(typ):
    """Return the MLIR type of a type of llvmlite."""
    if isinstance(typ, llvm_ir.IntType):
        return ir.IntegerType.get_signless(typ.width)
    if isinstance(typ, llvm_ir.FloatType):
        return ir.F32Type.get()
    if isinstance(typ, llvm_ir.DoubleType):
        return ir.F64Type.get()
    if isinstance(typ, llvm_ir.PointerType):
        return llvm.PointerType.get(typ.addrspace) if typ.addrspace else llvm.PointerType.get()
    if isinstance(typ, llvm_ir.VectorType):
        return ir.VectorType.get([typ.count], _mlir_type(typ.element))
    if isinstance(typ, llvm_ir.LiteralStructType):
        return llvm.StructType.get_literal([_mlir_type(element) for element in typ.elements])
    raise NotImplementedError(f"llvmlite's {typ}")


def _with_pointer(array, pointer):
    """Return an array with the shape and strides of ``array`` that begins at ``pointer``."""
    own = ir.MemRefType(array.type)
    generic = ir.MemRefType.get(own.shape, own.element_type, own.layout)
    if generic != own:
        array = memref.memory_space_cast(dest=generic, source=array)
    descriptor = builtin.unrealized_conversion_cast([memref_descriptor_type(generic.rank)], [array])
    for field in (0, 1):  # allocated and aligned
        position = ir.DenseI64ArrayAttr.get([field])
        descriptor = llvm.insertvalue(container=descriptor, value=pointer, position=position)
    out = builtin.unrealized_conversion_cast([generic], [descriptor])
    return out if generic == own else memref.memory_space_cast(dest=own, source=out)
