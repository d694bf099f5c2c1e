"""What the compiler makes of a kernel: registers, spills and instructions. No GPU is needed.

A process has either Numba's compiler or its simulator, so the compiler runs in one of its own: ``compile_apart``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moe_numba.runtime.compile import MAP, compile_program, compiling_for

__all__ = ["MachineCode", "compile_apart", "disassembler"]

ARCH = (9, 0, "a")
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)")
# Of wgmmas that must wait for one another, of a setmaxnreg that is ignored, of anything that costs time.
_COMPLAINT = re.compile(r"\((C\d+)\) Potential Performance Loss|\((C75\d\d)\)|(Potential Performance Loss)")
_MAIN = "from moe_numba.runtime import sass; sass._serve()"


@dataclass(frozen=True)
class MachineCode:
    """A kernel's machine code: what ptxas said of it, and its instructions (None where there is no nvdisasm)."""

    registers: int
    stack_bytes: int
    spilled_bytes: int
    complaints: list
    opcodes: list | None

    def count(self, *prefixes):
        """How many instructions begin with one of these names; None where there is no nvdisasm."""
        if self.opcodes is None:
            return None
        return sum(code == p or code.startswith(p + ".") for code in self.opcodes for p in prefixes)


def disassembler():
    """nvdisasm: the wheel's, or the CUDA toolkit's; None if there is neither."""
    try:
        import nvidia

        wheels = (str(path) for folder in nvidia.__path__ for path in Path(folder).glob("*/bin/nvdisasm"))
        return next(wheels, None) or shutil.which("nvdisasm")
    except ImportError:
        return shutil.which("nvdisasm")


def compile_apart(source, requests):
    """Compile kernels for a Hopper GPU, in a process of their own.

    Parameters
    ----------
    source : str
        Python that defines them, with its imports.
    requests : dict
        Name -> (expression, signature, threads, lto). The expression gives the kernel, such as ``"make_kernel(4)"``;
        the signature is that of :func:`moe_numba.runtime.launch.compile_kernel`, with ``"uint8[]"`` for an array; with
        ``lto`` the kernel and what is linked with it become machine code as one, else each for itself. A kernel with a
        ``"tensormap"`` is compiled as a program, as one in any case.

    Returns
    -------
    dict
        Name -> :class:`MachineCode`.
    """
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", _MAIN],
        input=json.dumps({"source": source, "requests": requests}),
        capture_output=True,
        text=True,
        env={**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": paths},
    )
    if done.returncode:
        raise RuntimeError(f"the compiler failed:\n{done.stderr[-3000:]}")
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {report.pop("name"): MachineCode(**report) for report in reports}


def _serve():
    """The other process: requests come in, reports go out, a line each."""
    given, space = json.load(sys.stdin), {"__name__": "kernels"}
    exec(compile(given["source"], "kernels", "exec"), space)
    for name, (expression, signature, threads, lto) in given["requests"].items():
        kernel = eval(expression, space)
        if MAP in signature:
            code, log = compile_program(kernel, tuple(signature), threads)
        else:
            code, log = compile_linked(kernel, signature, threads, lto=lto)
        print(json.dumps({"name": name, **_report(code, log)}))


def compile_linked(kernel, signature, threads, *, lto, arch=ARCH):
    """Compile a ``@cuda.jit`` function and what it declares with ``link=``, as ``kernel[grid, block]`` would.

    Gives the ``ObjectCode`` and what ptxas said.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda, types
    from numba.cuda.cudadrv import nvrtc

    forms = {"*": types.CPointer, "[": lambda element: types.Array(element, 1, "C")}
    arguments = [
        forms[s[-1]](getattr(types, s[:-1])) if s[-1] in forms else getattr(types, s)
        for s in (name.removesuffix("]") for name in signature)
    ]
    # Numba's own way to compile C++ asks the driver what PTX it takes.
    asked, nvrtc.compile = (
        nvrtc.compile,
        lambda text, name, cc, ltoir=False, **_: (_compile_cpp(text, name, cc, ltoir), ""),
    )
    try:
        with compiling_for(arch):
            codes, _ = cuda.compile_all(
                kernel.py_func,
                types.void(*arguments),
                device=False,
                abi="numba",
                cc=arch,
                output="ltoir" if lto else "ptx",
                launch_bounds=(threads, 1),
            )
    finally:
        nvrtc.compile = asked
    make = ObjectCode.from_ltoir if lto else ObjectCode.from_ptx
    objects = [make(c.encode() if isinstance(c, str) else c) for c in codes]
    options = LinkerOptions(
        arch="sm_" + "".join(map(str, arch)), link_time_optimization=lto or None, ptxas_options=["-v"]
    )
    linker = Linker(*objects, options=options)
    return linker.link("cubin"), re.sub("\0", "", linker.get_info_log())


def _compile_cpp(text, name, arch, lto):
    """CUDA C++ to PTX or LTO-IR, by NVRTC itself."""
    from cuda.bindings import nvrtc

    def good(answer):
        if answer[0]:
            raise RuntimeError(f"NVRTC: {answer[0].name}\n{log()}")
        return answer[1:]

    def log():
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        text = b" " * size
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.decode()

    options = [b"-arch=sm_" + "".join(map(str, arch)).encode(), b"-rdc=true", *[b"-dlto"] * lto]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], [])
    good(nvrtc.nvrtcCompileProgram(program, len(options), options))
    ask_size, ask = (
        (nvrtc.nvrtcGetLTOIRSize, nvrtc.nvrtcGetLTOIR) if lto else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    )
    code = b" " * good(ask_size(program))[0]
    good(ask(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code if lto else code.rstrip(b"\0")


def _report(code, log):
    opcodes = None
    if tool := disassembler():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code.code)
            file.flush()
            text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
        opcodes = _OPCODE.findall(text)
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "stack_bytes": max(map(int, re.findall(r"(\d+) bytes stack frame", log))),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "complaints": ["".join(found) for found in _COMPLAINT.findall(log)],
        "opcodes": opcodes,
    }
