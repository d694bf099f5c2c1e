"""What the compiler makes of a kernel, for the simulator: `simulator.compiler.MODULE` names this module."""

import os

from moe_numba.runtime.compile import compile_kernel
from moe_numba.runtime.sass import disassemble, sass_per_line, static_shared_bytes
from moe_numba.runtime.sass import resources as resources_of

__all__ = ["report"]


def report(kernel, signature, resources, *, arch, **options):
    """Compile a kernel; with ``resources``, return its registers, stack, spills, shared memory and SASS per line.

    Other parameters as `compile_kernel`.
    """
    compiled = compile_kernel(kernel, signature, arch=arch, **options)
    if not resources:
        return {}
    shared = static_shared_bytes(compiled.code.code, arch)
    text = disassemble(compiled.code.code, "-c", "-gi")
    lines = text and {f"{os.path.abspath(file)}:{line}": count for (file, line), count in sass_per_line(text).items()}
    return {**resources_of(compiled.log), "static_shared_bytes": shared, "sass_lines": lines}
