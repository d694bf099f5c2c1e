"""Compile kernels of test files for sm_90a without a GPU.

When the linker starts from PTX it makes code that other code may call, and then ignores ``setmaxnreg``. These kernels
are therefore linked from LTO-IR as whole programs.
"""

from pathlib import Path

from moe_numba.runtime.sass import compile_apart

TESTS = Path(__file__).parents[1]


def compile_whole(kernels):
    """Compile kernels; return their ``MachineCode`` by name.

    ``kernels`` maps a name to (module, expression, signature): ``("test_cluster", "make_kernel(4)", ["int32*"])``.
    """
    folders = [str(folder) for folder in (TESTS, TESTS / "ptx", TESTS / "simulator")]
    source = f"import sys\nsys.path[:0] = {folders}\nfrom importlib import import_module\n"
    requests = {
        name: (f"import_module({module!r}).{expression}", signature, None, True)
        for name, (module, expression, signature) in kernels.items()
    }
    return compile_apart(source, requests)
