"""`numba_cuda_mlir` in the simulator: its modules are those of Numba that they replace.

numba-cuda-mlir, the successor of numba-cuda, has no simulator. It names its modules `numba_cuda_mlir.cuda` and so on;
here a program that imports them gets the simulated ones, whether numba-cuda-mlir is installed or not.
"""

import importlib
import importlib.machinery
import sys
import types

PACKAGE = "numba_cuda_mlir"
_SAME = {  # module of numba-cuda-mlir -> module that stands for it and its submodules
    f"{PACKAGE}.cuda": "numba.cuda",
    f"{PACKAGE}.numba_cuda": "numba.cuda",  # its copy of numba-cuda
    f"{PACKAGE}.types": "numba.types",
    f"{PACKAGE}.extending": "numba.extending",
}


class _Finder:
    """Finds the modules of `numba_cuda_mlir`, and loads each by importing the one that stands for it."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == PACKAGE or name.startswith(PACKAGE + "."):
            return importlib.machinery.ModuleSpec(name, cls, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        name = module.__name__
        if name == PACKAGE:
            module.cuda, module.types = importlib.import_module("numba.cuda"), importlib.import_module("numba.types")
            module.__version__ = "simulated"
            return
        alias = next((a for a in _SAME if name == a or name.startswith(a + ".")), None)
        if alias is None:
            raise ModuleNotFoundError(
                f"{name} does not work in the simulator, which has {', '.join(sorted(_SAME))} and their submodules",
                name=name,
            )
        sys.modules[name] = importlib.import_module(_SAME[alias] + name.removeprefix(alias))


def install():
    """Let programs import the simulated modules as those of numba-cuda-mlir."""
    loaded = sys.modules.get(PACKAGE)
    if isinstance(loaded, types.ModuleType) and _Finder not in sys.meta_path:
        raise RuntimeError(f"import moe_numba before {PACKAGE}, which was loaded without the simulator")
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
