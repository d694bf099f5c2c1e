"""What the compiler makes of a kernel, for the simulator: `simulator.compiler.MODULE` names this module."""

import os

from moe_numba.runtime.compile import compile_kernel
from moe_numba.runtime.sass import disassemble, instructions, static_shared_bytes
from moe_numba.runtime.sass import resources as resources_of

__all__ = ["report"]


def report(kernel, signature, resources, *, arch, **options):
    """Compile a kernel; with ``resources``, return its registers, stack, spills, shared memory and SASS instructions.

    Other parameters as `compile_kernel`.
    """
    compiled = compile_kernel(kernel, signature, arch=arch, **options)
    if not resources:
        return {}
    shared = static_shared_bytes(compiled.code.code, arch)
    text = disassemble(compiled.code.code, "-c", "-gi", "-hex")
    sites = lambda code: code._replace(site=code.site and (os.path.abspath(code.site[0]), code.site[1]))
    return {
        **resources_of(compiled.log),
        "static_shared_bytes": shared,
        "sass": text and [sites(code)._asdict() for code in instructions(text)],
    }
