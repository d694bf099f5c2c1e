"""Make an intrinsic from one PTX instruction: a function that kernels call.

On a GPU it is a Numba intrinsic that emits the instruction as inline assembly. In the simulator it is the Python
implementation passed as ``simulate``, so that the same kernel source runs. For the compiler numba-cuda-mlir,
``moe_numba.runtime.mlir.builder`` runs the same code generators on MLIR.

An instruction that older GPUs lack can have a ``fallback``, a function that is compiled in its place for them. The same
kernel source then serves all of them.
"""

import functools
import inspect
import types

from moe_numba import simulator
from moe_numba.ptx.capability import needed_by
from moe_numba.simulator import capability

# An operand that takes two arguments, a pointer and an element index, and becomes one 64-bit address. A pointer and an
# index, rather than an integer from address arithmetic, let the simulator check bounds.
POINTER = "pointer"

# An array in shared memory and an element index, which become one 32-bit address in the shared window.
SHARED = "shared"


def factory(function):
    """Cache the functions that ``function`` makes for kernels.

    Each remembers the call that made it: the simulator's profiler repeats it to compile kernels that use the function,
    and a hash of a kernel identifies the function by it.
    """

    def make(*args, **kwargs):
        made = function(*args, **kwargs)
        made.made_by = function.__module__, function.__name__, args, kwargs
        return made

    return functools.cache(functools.wraps(function)(make))


def instruction(template, result, *operands, simulate, side_effect=True, fallback=None):
    """Make a function for one PTX instruction.

    Parameters
    ----------
    template : str
        The PTX, with ``$0, $1, ...`` for the results first and then the operands.
    result : str
        ``"void"``, a type name such as ``"u32"``, or ``"u32 x 4"`` for a tuple of results.
    *operands : str
        A type name (``u32, s32, u64, s64, f32``), ``POINTER`` or ``SHARED`` for each operand.
    simulate : callable
        Python implementation for the simulator; it takes the same arguments as the intrinsic.
    side_effect : bool
        False only for pure arithmetic, which the compiler may then move, merge or eliminate.
    fallback : callable, optional
        A function of the same arguments, which replaces the instruction on GPUs that lack it. By default the compiler
        and the simulator refuse it there.
    """
    if simulator.ENABLED:
        return simulated(simulate, template, fallback)
    return _intrinsic(template, result, operands, side_effect, simulate, fallback, needed_by(template))


def simulated(simulate, template, fallback=None):
    """Return what the simulator executes for an instruction: ``simulate``, or else ``fallback`` or an error.

    Kernels may call the result; the simulator refuses other Python functions in kernels, as Numba does.
    """
    needed = needed_by(template)
    function = simulate if capability.SIMULATED >= needed else fallback or _refused(simulate, needed)
    if isinstance(function, types.FunctionType):
        function.is_instruction = True  # so that `compilable_values` does not take it for a plain Python function
    return function


def _refused(simulate, needed):
    """Return a function that raises the simulator's error for an instruction of newer GPUs."""

    @functools.wraps(simulate)
    def refused(*_):
        capability.refuse(simulate.__doc__.split(": ")[0], needed)

    return refused


def _intrinsic(template, result, operands, side_effect, simulate, fallback, needed):
    from llvmlite import ir
    from numba import types

    scalars = {
        "u32": (types.uint32, ir.IntType(32), "r"),
        "s32": (types.int32, ir.IntType(32), "r"),
        "u64": (types.uint64, ir.IntType(64), "l"),
        "s64": (types.int64, ir.IntType(64), "l"),
        "f32": (types.float32, ir.FloatType(), "f"),
        "u16": (types.uint16, ir.IntType(16), "h"),
    }
    name, _, count = result.partition(" x ")
    count = int(count) if count else int(result != "void")
    returned = types.void if not count else scalars[name][0]
    returned = types.UniTuple(returned, count) if count > 1 else returned
    register = ir.VoidType() if not count else scalars[name][1]
    register = ir.LiteralStructType([register] * count) if count > 1 else register

    outputs = [f"={scalars[name][2]}"] * count if count else []
    addresses = {POINTER: (ir.IntType(64), "l"), SHARED: (ir.IntType(32), "r")}
    inputs = [(addresses.get(o) or scalars[o][1:])[1] for o in operands]
    constraints = ",".join(outputs + inputs + (["~{memory}"] if side_effect else []))
    registers = [(addresses.get(o) or scalars[o][1:])[0] for o in operands]

    def typing(*arguments):
        accepted, remaining = [], iter(arguments)
        for operand in operands:
            if operand in addresses:
                pointer, _ = next(remaining), next(remaining)
                accepted += [pointer, types.int64 if operand == POINTER else types.int32]
            else:
                next(remaining)
                accepted.append(scalars[operand][0])
        signature = returned(*accepted)

        def codegen(context, builder, sig, values):
            from moe_numba.ptx.capability import compiled_for  # not global: it is no part of a kernel's identity

            if fallback and compiled_for() < needed:
                return context.compile_internal(builder, fallback, sig, values)
            registers_in, remaining = [], iter(zip(sig.args, values, strict=True))
            for operand in operands:
                typ, value = next(remaining)
                if operand in addresses:
                    if isinstance(typ, types.Array):
                        value = context.make_array(typ)(context, builder, value=value).data
                    if operand == SHARED:
                        value = builder.addrspacecast(value, value.type.pointee.as_pointer(3))
                    value = builder.ptrtoint(builder.gep(value, [next(remaining)[1]]), addresses[operand][0])
                registers_in.append(value)
            assembly = ir.InlineAsm(
                ir.FunctionType(register, registers), template, constraints, side_effect=side_effect
            )
            out = builder.call(assembly, registers_in)
            if not count:
                return context.get_dummy_value()
            if count == 1:
                return out
            return context.make_tuple(builder, sig.return_type, [builder.extract_value(out, i) for i in range(count)])

        return signature, codegen

    count_arguments = sum(1 + (o in addresses) for o in operands)
    return make_intrinsic(simulate, count_arguments, typing)


def make_intrinsic(simulate, count, typing):
    """Make a Numba intrinsic of ``count`` arguments, with the name, module and docstring of ``simulate``.

    ``typing(*types)`` returns the signature and the code generator.
    """
    from numba.cuda.extending import intrinsic

    def definition(typingctx, *arguments):
        return typing(*arguments)

    names = ["typingctx", *(f"a{i}" for i in range(count))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    definition.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    definition.__name__, definition.__module__, definition.__doc__ = (
        simulate.__name__,
        simulate.__module__,
        simulate.__doc__,
    )
    return intrinsic(definition)
