"""Defects of numba-cuda-mlir, each with a reproducer of at most 12 lines that needs nothing of this package.

``python mlir_reproducers.py`` compiles them for sm_90a without a GPU, as numba-cuda-mlir is; with ``--corrected`` as
``moe_numba.runtime.mlir`` corrects it. It prints ``{name: what is wrong, or None}`` as JSON.
"""

import json
import re
import sys
from typing import NamedTuple

ASSIGNMENTS = "\n".join(f"    v = v * {i} + x[{i}]" for i in range(3, 40))  # longer than what is inlined early


class Reproducer(NamedTuple):
    """A kernel ``k``, and a pattern that right PTX has (or, with a leading "!", has not)."""

    source: str
    signature: str
    pattern: str
    upstream: str = ""  # its number there


REPRODUCERS = {
    # Wrong code without an error
    "dynamic shared memory lies behind static arrays": Reproducer(
        """
def k(x, out):
    d = cuda.shared.array(0, int32, 1024)
    s = cuda.shared.array(32, int32)
    d[cuda.threadIdx.x], s[cuda.threadIdx.x] = x[0], x[1]
    cuda.syncthreads()
    out[cuda.threadIdx.x] = d[cuda.threadIdx.x ^ 1] + s[cuda.threadIdx.x ^ 2]
""",
        "int32* int32*",
        r"\.extern \.shared \.align 1024",
        "numba-cuda-mlir pull requests 263 and 312",
    ),
    "a pointer's int32 index has a sign": Reproducer(
        "def k(x, out): out[x[0]] = 5", "int32* int32*", r"!mul\.wide\.u32", "numba-cuda-mlir issue 303, of arrays"
    ),
    "a number stored as int64 keeps its sign": Reproducer(
        "def k(x, out): out[0] = x[0]", "int32* int64*", r"!ld\.global\.u32"
    ),
    "max of unsigned numbers": Reproducer("def k(x, out): out[0] = max(x[0], x[1])", "uint32* uint32*", r"max\.u32"),
    "atomics of a shared array that is an argument": Reproducer(
        """
@far
def lower(s, i, v): cuda.atomic.min(s, i, v)
def k(x, out):
    s = cuda.shared.array(32, int32)
    lower(s, x[0], int32(cuda.threadIdx.x))
    out[0] = s[0]
""",
        "int32* int32*",
        r"!atom\.global",
    ),
    "no copy of a device function that was inlined": Reproducer(
        """
@far
def store(x): x[0] = 1
def k(x): store(x)
""",
        "int32*",
        r"!\.func",
    ),
    "a barrier is convergent": Reproducer("def k(x): cuda.syncthreads()", "int32*", r"LLVM convergent"),
    # Errors
    "a NamedTuple's constructor": Reproducer(
        """
import typing
Pair = typing.NamedTuple("Pair", [("a", int), ("b", int)])
def k(x, out): out[0] = Pair(x[0], x[1]).b
""",
        "int32* int32*",
        "st.global",
    ),
    "max of three": Reproducer("def k(x, out): out[0] = max(x[0], x[1], x[2])", "int32* int32*", r"max\.s32"),
    "enumerate": Reproducer(
        """
def k(x, out):
    for i, v in enumerate((x[0], x[1])): out[i] = v
""",
        "int32* int32*",
        r"!\.local",
    ),
    "threadfence_block": Reproducer("def k(x): cuda.threadfence_block()", "int32*", r"membar|fence"),
    "None in a tuple that is an argument": Reproducer(
        """
@far
def second(t, out): out[0] = t[1]
def k(x, out): second((None, x[0]), out)
""",
        "int32* int32*",
        "st.global",
    ),
    "a tuple of one item that is a result": Reproducer(
        """
@far
def one(x): return (x[0],)
def k(x, out): out[0] = one(x)[0]
""",
        "int32* int32*",
        "st.global",
    ),
    "a device function's shared array": Reproducer(
        """
@far
def reverse(x):
    s = cuda.shared.array(32, int32)
    s[cuda.threadIdx.x] = x[cuda.threadIdx.x]
    cuda.syncthreads()
    x[cuda.threadIdx.x] = s[31 - cuda.threadIdx.x]
def k(x): reverse(x)
""",
        "int32*",
        r"\.shared",
    ),
    "a call with *arguments": Reproducer(
        """
@device
def store(x, v): x[0] = v
@device
def forward(*arguments): store(*arguments)
def k(x, v): forward(x, v)
""",
        "int32* int32",
        "st.global",
    ),
    "a function of *arguments that is not inlined early": Reproducer(
        """
@far
def forward(*arguments): arguments[0][0] = arguments[1]
def k(x, v): forward(x, v)
""",
        "int32* int32",
        "st.global",
    ),
    "two calls with the same *arguments": Reproducer(
        """
@far
def store(x, v): x[v] = v
def k(*arguments):
    store(*arguments)
    store(*arguments)
""",
        "*int32* int32",
        "st.global",
    ),
    # Cost
    "a loop over constants keeps them out of memory": Reproducer(
        """
def k(x, out):
    s = float32(0)
    for d in (16, 8, 4, 2, 1):
        s += cuda.shfl_xor_sync(0xFFFFFFFF, x[d], d)
    out[0] = s
""",
        "float32* float32*",
        r"!\.local",
    ),
    "two blocks that load different variables are not merged": Reproducer(
        """
def k(x, out, n):
    a, b = int32(0), int32(1)
    for i in range(n):
        if x[i] < 0: a += x[i]
        else: b *= x[i]
        if x[i] & 1: out[i] = a
        else: out[i] = b
""",
        "int32* int32* int32",
        r"!\.local",
    ),
    "a loop of unknown length is not repeated": Reproducer(
        """
def k(x, out, n):
    for i in range(n):
        cuda.syncthreads()
        out[i] = x[i]
""",
        "int32* int32* int32",
        r"!bar\.sync[^$]*bar\.sync",
    ),
    "a loop over a part of a tuple stays in registers": Reproducer(
        """
def k(x, out):
    s = float32(0)
    for v in (x[0], x[1], x[2], x[3])[:2]:
        s += v
    out[0] = s
""",
        "float32* float32*",
        r"!\.local",
    ),
}


def main(corrected):
    """Compile all reproducers, and print what is wrong."""
    from numba_cuda_mlir import tools

    tools._cached_cc = (9, 0)  # else it asks the driver
    import numba_cuda_mlir.types as types
    from numba_cuda_mlir import cuda
    from numba_cuda_mlir.compiler import _compile_and_optimize
    from numba_cuda_mlir.mlir_optimization import get_llvmir
    from numba_cuda_mlir.numba_cuda.types import StarArgTuple

    never = lambda *_: False
    names = {"cuda": cuda, "int32": types.int32, "float32": types.float32}
    names |= {"device": cuda.jit(device=True), "far": cuda.jit(device=True, inline=never)}
    if corrected:
        from moe_numba.runtime.mlir import code, corrections

        code._set_up()
        names["device"] = cuda.jit(device=True, inline=corrections.inline)

    def typ(name):
        return types.CPointer(typ(name[:-1])) if name[-1] == "*" else getattr(types, name)

    def compiled(space, arguments, wants_llvm):
        options = {"chip": "sm_90a", "lto": False}
        if corrected:
            return code.compile_function(space["k"], arguments, options)[0]
        made = _compile_and_optimize(space["k"], types.void(*arguments), options | {"output": "ptx"})
        return get_llvmir(made, options) if wants_llvm else made.metadata["ptx"]

    def defect(case):
        space, arguments = dict(names), [typ(name) for name in case.signature.lstrip("*").split()]
        exec(case.source, space)
        if case.signature[0] == "*":
            arguments = [StarArgTuple(arguments)]
        wants_llvm, pattern = case.pattern.startswith("LLVM "), case.pattern.removeprefix("LLVM ")
        if wants_llvm and corrected:
            text = corrections.correct_text('  call void asm sideeffect "bar.sync 0;", ""() #1')
        else:
            try:
                text = compiled(space, arguments, wants_llvm)
            except Exception as error:
                return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        found = re.search(pattern.lstrip("!"), text)
        return None if bool(found) != pattern.startswith("!") else f"PTX: {case.pattern}"

    print(json.dumps({name: defect(case) for name, case in REPRODUCERS.items()}))


if __name__ == "__main__":
    main("--corrected" in sys.argv)
