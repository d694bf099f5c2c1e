"""Compile kernels for sm_90a without a GPU, and count instructions, registers and spills.

When the linker starts from PTX it makes code that other code may call, and then ignores ``setmaxnreg``. Kernels are
therefore linked from LTO-IR as whole programs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from moe_numba.runtime.sass import disassembler

TESTS = Path(__file__).parents[1]
_WARNING = re.compile(r"\(C75\d\d\)[^\n]*")  # of wgmmas that the compiler serialises, of setmaxnreg that it ignores

# Runs in a process of its own, since Numba has either its compiler or its simulator.
_PROGRAM = """
import importlib, json, subprocess, sys, tempfile
from types import SimpleNamespace
import moe_numba
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda, types
from numba.cuda import dispatcher
dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0, "a"))
for module, name, constants, signature in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(module), name)
    kernel = kernel(*constants) if constants is not None else kernel
    arguments = [types.CPointer(getattr(types, s[:-1])) if s[-1] == "*" else getattr(types, s) for s in signature]
    codes, _ = cuda.compile_all(kernel.py_func, types.void(*arguments), device=False, abi="numba", cc=(9, 0, "a"),
        output="ltoir", launch_bounds=kernel.targetoptions.get("launch_bounds"))
    linker = Linker(*map(ObjectCode.from_ltoir, codes),
        options=LinkerOptions(arch="sm_90a", link_time_optimization=True, ptxas_options=["-v"]))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(linker.link("cubin").code)
        file.flush()
        sass = subprocess.run([sys.argv[1], "-c", file.name], capture_output=True, text=True, check=True).stdout
    print(json.dumps({"log": linker.get_info_log(), "sass": sass}))
"""


class Report:
    """Registers, spilled and stack bytes, instructions, and ptxas warnings about wgmma and setmaxnreg of a kernel."""

    def __init__(self, log, sass):
        self.registers = int(re.search(r"Used (\d+) registers", log)[1])
        self.spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
        self.stack = int(re.search(r"(\d+) bytes stack frame", log)[1])
        self.instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass)
        self.warnings = _WARNING.findall(log)

    def count(self, prefix):
        """Count instructions by their name, with or without further modifiers."""
        return sum(i == prefix or i.startswith(prefix + ".") for i in self.instructions)


def compile_whole(kernels):
    """Compile kernels; return a Report of each.

    A kernel is (module, name, arguments of the factory or None, signature).
    """
    folders = [TESTS.parent, TESTS, TESTS / "ptx", TESTS / "simulator", os.environ.get("PYTHONPATH")]
    paths = os.pathsep.join(str(folder) for folder in folders if folder)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, disassembler()],
        input=json.dumps(kernels),
        capture_output=True,
        text=True,
        env={**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [Report(**json.loads(line)) for line in done.stdout.splitlines()]
