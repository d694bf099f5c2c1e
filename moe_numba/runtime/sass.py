"""What the compiler makes of a kernel: registers, spills and instructions. No GPU is needed.

A process has either Numba's compiler or its simulator, so ``compile_apart`` compiles in a process of its own.
"""

import contextlib
import functools
import gc
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moe_numba.runtime.elf import sections

__all__ = [
    "Instruction",
    "MachineCode",
    "body_and_loops",
    "compile_apart",
    "disassemble",
    "disassembler",
    "instructions",
    "resources",
    "static_shared_bytes",
    "warnings_of",
]

_RESERVED_SHARED_BYTES = 1024  # from compute capability 9.0 on, machine code counts the system's part as well
_LINE = re.compile(r'//## File "(.*?)", line (\d+)')
_ENCODED = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]+)")
_CONTROL = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/$")  # the upper half of an instruction's 128 bits
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)")
_EXIT = re.compile(r"\*/\s+EXIT\b")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.")
_LABEL, _BRANCH = re.compile(r"\.(L_x_\d+):"), re.compile(r"\bBRA\S* .*\.(L_x_\d+)")
_SETMAXNREG = re.compile(r"USETMAXREG\.(?:DEALLOC|TRY_ALLOC)\S*\s+(?:UP\w+, )?(0x[0-9a-f]+)")
_TRANSPOSES = re.compile(r"\bHGMMA\S* .*?gdesc\[UR\d+\]([.\w]*)")
# ptxas warns of wgmmas that it serialises, of a setmaxnreg that it ignores, of anything that costs time.
_WARNING = re.compile(r"\((C\d+)\) Potential Performance Loss|\((C75\d\d)\)|(Potential Performance Loss)")


@dataclass(frozen=True)
class MachineCode:
    """A kernel's resources as ptxas reports them, and its instructions (None without nvdisasm)."""

    registers: int
    stack_bytes: int
    spilled_bytes: int
    complaints: list
    opcodes: list | None
    setmaxnreg: list | None = None  # register counts of its setmaxnreg instructions, in order
    body: list | None = None  # first and last instruction of the main path, as indices into opcodes
    loops: list | None = None  # the same for each loop in it
    wgmma_transposes: list | None = None  # of each HGMMA: "", ".tnspA", ".tnspB" or ".tnspA.tnspB" (MN-major operands)

    def count(self, *prefixes):
        """Count the instructions that begin with one of these names; None without nvdisasm."""
        if self.opcodes is None:
            return None
        return sum(code == p or code.startswith(p + ".") for code in self.opcodes for p in prefixes)


def disassembler():
    """Find nvdisasm: the wheel's, or the CUDA toolkit's; None if there is neither."""
    try:
        import nvidia

        wheels = (str(path) for folder in nvidia.__path__ for path in Path(folder).glob("*/bin/nvdisasm"))
        return next(wheels, None) or shutil.which("nvdisasm")
    except ImportError:
        return shutil.which("nvdisasm")


@functools.cache
def missing():
    """Return what to install before kernels can be compiled and disassembled here, as a sentence, or None."""
    if sys.platform == "darwin":
        return "there is no CUDA compiler for macOS"
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for library in ("nvrtc", "nvvm", "nvJitLink"):
            load_nvidia_dynamic_lib(library)
    except (ImportError, RuntimeError):  # cuda.pathfinder's DynamicLibNotFoundError is a RuntimeError
        return "CUDA's compiler is not installed: pip install 'moe_numba[cu13]'"
    return None if disassembler() else "nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"


def disassemble(cubin, *options):
    """Disassemble machine code (bytes); None without nvdisasm. Options are nvdisasm's, such as ``"-c"``: code only."""
    if not (tool := disassembler()):
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


class Instruction(NamedTuple):
    """An instruction of a kernel's machine code, with the bits by which the compiler schedules it.

    `stall` is the number of clocks until the warp may issue the next one. An instruction of unknown latency sets one
    of six scoreboards when it has written its result (`sets`) or read its operands (`sets_read`), or none (None);
    `waits` is a mask of those that it waits for before it is issued. A branch has a `target`, as an index of all
    instructions. `site` is the (file, line) of its source, or None.
    """

    opcode: str
    predicated: bool
    site: tuple | None
    target: int | None
    stall: int
    sets: int | None
    sets_read: int | None
    waits: int


def instructions(text):
    """Return the instructions of a kernel in what ``disassemble`` returns with ``"-hex"``, without padding.

    With ``"-gi"``, instructions of an inlined device function have its own line as their site; with ``"-g"``, that of
    the call. Functions that the kernel calls, such as the slow path of a division, are left out.
    """
    found, labels, targets, site, previous, section = [], {}, {}, None, "", 0
    kernel = {
        name for name in re.findall(r"^\s*\.section\s+\.text\.(\S+?),", text, re.M) if f".global         {name}" in text
    }
    for line in text.splitlines():
        if start := re.match(r"\s*\.section\s+\.text\.(\S+?),", line):
            section = start[1] in kernel or len(kernel) != 1
        elif mark := _LINE.search(line):
            if not _LINE.search(previous):  # the lines of the calls follow that of the inlined function
                site = mark[1], int(mark[2])
        elif label := _LABEL.search(line):
            labels[label[1]] = len(found)
        elif section and (code := _ENCODED.search(line)):
            branch = _BRANCH.search(line)
            is_padding = code[2] == "NOP" or branch and previous.strip() == f".{branch[1]}:"
            if not is_padding:
                targets[len(found)] = branch and branch[1]
                found.append(Instruction(code[2], bool(code[1]), site, None, 1, None, None, 0))
            continued = not is_padding
        elif section and found and continued and (bits := _CONTROL.match(line)):
            control = int(bits[1], 16) >> 41
            sets, sets_read = control >> 5 & 7, control >> 8 & 7
            found[-1] = found[-1]._replace(
                stall=control & 15,
                sets=sets if sets < 6 else None,
                sets_read=sets_read if sets_read < 6 else None,
                waits=control >> 11 & 63,
            )
        previous = line
    return [code._replace(target=labels.get(targets[n])) if targets[n] else code for n, code in enumerate(found)]


def body_and_loops(text):
    """Return the main path of a kernel and its loops, from what ``disassemble`` returns.

    The main path ends with the first EXIT without a predicate: ptxas places what is rarely executed behind it, and
    functions that the kernel calls, such as the slow path of a division, in sections of their own.

    Returns
    -------
    [int, int], list of [int, int]
        First and last instruction of the main path, and of each loop in it, as indices of all instructions; None and
        None if every EXIT has a predicate.
    """
    first, labels, loops, count = 0, {}, [], 0
    for line in text.splitlines():
        if _SECTION.search(line):
            first, labels, loops = count, {}, []
        if found := _LABEL.search(line):
            labels[found[1]] = count
        if _OPCODE.search(line):
            if (found := _BRANCH.search(line)) and labels.get(found[1], count) < count:
                loops.append([labels[found[1]], count])
            if _EXIT.search(line):
                return [first, count], loops
            count += 1
    return None, None


def count_instructions(cubin):
    """Return the number of a kernel's instructions without padding; None without nvdisasm."""
    text = disassemble(cubin, "-c")
    return text and sum(code != "NOP" for code in _OPCODE.findall(text))


def static_shared_bytes(cubin, arch):
    """Return the bytes of static shared memory of a kernel, from its machine code (an ELF file) for ``arch``."""
    size = sum(section.size for section in sections(cubin) if section.name.startswith(".nv.shared."))
    return max(0, size - (_RESERVED_SHARED_BYTES if tuple(arch[:2]) >= (9, 0) else 0))


def compile_apart(source, requests, arch=None, link_archs=()):
    """Compile kernels, by default for a Hopper GPU, in a process of their own.

    Parameters
    ----------
    source : str
        Python that defines them, with its imports.
    requests : dict
        Name -> (expression, signature, threads, lto). The expression evaluates to the kernel, such as
        ``"make_kernel(4)"``; the others are as for :func:`moe_numba.runtime.compile.compile_kernel`. ``threads`` is the
        launch bound: maximum threads per CTA, (threads, minimum CTAs per SM), or None for the kernel's own bound.
    arch : tuple, optional
        Compute capability that PTX is generated for, ``SM_90A`` if not given.
    link_archs : sequence of tuple, optional
        Compute capabilities that the PTX is assembled for, if not for ``arch``.

    Returns
    -------
    dict
        Name -> :class:`MachineCode`; with ``link_archs`` (name, compute capability) -> :class:`MachineCode`.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _MODULE).write_text(source)
        with _lock:
            status = _server().compile(folder, requests, arch, link_archs)
        if status:
            raise RuntimeError(f"the compiler failed:\n{Path(folder, _ERRORS).read_text()[-3000:]}")
        reports = [json.loads(line) for line in Path(folder, _REPORTS).read_text().splitlines()]
    key = lambda name, link_arch: (name, tuple(link_arch)) if link_arch else name
    return {key(report.pop("name"), report.pop("link_arch")): MachineCode(**report) for report in reports}


# The compiler's process stays alive, because its imports take longer than most kernels. It forks for each request, so
# that no request sees what another one has left behind.

_MODULE, _REPORTS, _ERRORS = "kernels.py", "reports.jsonl", "errors.txt"  # files in a request's folder
_lock = threading.Lock()


class _Server:
    """A process that compiles, in an environment that does not change."""

    def __init__(self, environment):
        self.environment = environment
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def compile(self, folder, *request):
        """Return the exit status of a request; the reports or the error are in the folder."""
        try:
            self.process.stdin.write(json.dumps([folder, *request]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # interrupted: the next request must not read this one's answer
            self.process.kill()
            self.process.wait()
            raise
        if not answer:
            raise RuntimeError(f"the compiler's process ended with exit status {self.process.wait()}")
        return int(answer)

    def is_usable(self, environment):
        return self.environment == environment and self.process.poll() is None

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


_servers: list[_Server] = []  # at most one


def _server():
    """Return a server for this process's environment."""
    root = str(Path(__file__).parents[2])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment |= {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": paths}
    if _servers and not _servers[0].is_usable(environment):
        _servers.pop().close()
    if not _servers:
        _servers.append(_Server(environment))
    return _servers[0]


os.register_at_fork(after_in_child=_servers.clear)  # two processes must not write to one server


def _serve():
    """Compile what standard input asks for, a request per line; print the exit status of each."""
    from numba import cuda

    from moe_numba.runtime.compile import compile_kernel

    compile_kernel(cuda.jit(lambda x: None), ("int32*",))  # what takes long to load, before the first fork
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # kernels' modules may print
    for line in sys.stdin:
        folder, *request = json.loads(line)
        if "moe_numba" in Path(folder, _MODULE).read_text():
            with contextlib.suppress(ImportError):
                import torch  # noqa: F401  most kernels' modules need it; the fork inherits it
        child = os.fork()
        if child == 0:
            os._exit(_compile(Path(folder), *request))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _compile(folder, requests, arch, link_archs):
    """Compile one request, write its reports and return the exit status."""
    from moe_numba.runtime.compile import SM_90A, assemble, compile_kernel

    gc.disable()  # it takes a tenth of the time, and this process ends soon
    try:
        space = runpy.run_path(str(folder / _MODULE))
        arch, lines = tuple(arch or SM_90A), []
        for name, (expression, signature, threads, lto) in requests.items():
            bounds = (threads, 1) if isinstance(threads, int) else threads and tuple(threads)
            kernel = eval(expression, space)
            compiled = compile_kernel(kernel, tuple(signature), arch=arch, launch_bounds=bounds, lto=lto)
            for link_arch in map(tuple, link_archs or [()]):
                linked = assemble(compiled, link_arch) if link_arch and link_arch != arch else compiled
                lines.append(json.dumps({"name": name, "link_arch": link_arch, **_report(linked)}))
        (folder / _REPORTS).write_text("\n".join(lines))
        return 0
    except BaseException:
        (folder / _ERRORS).write_text(traceback.format_exc())
        return 1


def resources(log):
    """Return registers, stack_bytes and spilled_bytes of a kernel as a dict, from what ptxas printed."""
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "stack_bytes": max(map(int, re.findall(r"(\d+) bytes stack frame", log))),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
    }


def warnings_of(log):
    """Return the numbers of the compiler's warnings, such as ``["C7512"]``, from what ptxas printed."""
    return ["".join(found) for found in _WARNING.findall(log)]


def _report(compiled):
    text = disassemble(compiled.code.code, "-c")
    body, loops = body_and_loops(text) if text else (None, None)
    return {
        **resources(compiled.log),
        "complaints": warnings_of(compiled.log),
        "opcodes": text and _OPCODE.findall(text),
        "setmaxnreg": text and [int(count, 16) for count in _SETMAXNREG.findall(text)],
        "wgmma_transposes": text and _TRANSPOSES.findall(text),
        "body": body,
        "loops": loops,
    }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # Jupyter interrupts a kernel's processes when it shuts down
        _serve()
