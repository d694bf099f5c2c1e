"""What the compiler makes of a kernel: registers, spills and instructions. No GPU is needed.

A process has either Numba's compiler or its simulator, so ``compile_apart`` compiles in a process of its own.
"""

import json
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "MachineCode",
    "body_and_loops",
    "compile_apart",
    "disassemble",
    "disassembler",
    "resources",
    "sass_per_line",
    "static_shared_bytes",
]

_RESERVED_SHARED_BYTES = 1024  # from compute capability 9.0 on, machine code counts the system's part as well
_LINE = re.compile(r'//## File "(.*?)", line (\d+)')
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)")
_EXIT = re.compile(r"\*/\s+EXIT\b")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.")
_LABEL, _BRANCH = re.compile(r"\.(L_x_\d+):"), re.compile(r"\bBRA\S* .*\.(L_x_\d+)")
_SETMAXNREG = re.compile(r"USETMAXREG\.(?:DEALLOC|TRY_ALLOC)\S*\s+(?:UP\w+, )?(0x[0-9a-f]+)")
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


def disassemble(cubin, *options):
    """Disassemble machine code (bytes); None without nvdisasm. Options are nvdisasm's, such as ``"-c"``: code only."""
    if not (tool := disassembler()):
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def sass_per_line(text):
    """Count the instructions of each source line in what ``disassemble`` returns with ``"-g"``.

    Instructions of inlined device functions count for the line of the call. The padding after a kernel's end does not
    count.

    Returns
    -------
    dict
        (file, line) -> number of instructions; empty for code without line information.
    """
    counts, site, previous = {}, None, ""
    for line in text.splitlines():
        if found := _LINE.search(line):
            site = found[1], int(found[2])
        elif site and (found := _OPCODE.search(line)):
            is_padding = found[1] == "NOP" or f"BRA `({previous.strip().rstrip(':')})" in line
            counts[site] = counts.get(site, 0) + (not is_padding)
        previous = line
    return counts


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


def static_shared_bytes(cubin, arch):
    """Return the bytes of static shared memory of a kernel, from its machine code (an ELF file) for ``arch``."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start = sections[names][4]
    name = lambda section: cubin[start + section[0] :].split(b"\0", 1)[0].decode()
    size = sum(s[5] for s in sections if name(s).startswith(".nv.shared."))
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
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder, "kernels.py")
        module.write_text(source)
        done = subprocess.run(
            [sys.executable, "-m", __name__, module],
            input=json.dumps([requests, arch, link_archs]),
            capture_output=True,
            text=True,
            env={**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": paths},
        )
    if done.returncode:
        raise RuntimeError(f"the compiler failed:\n{done.stderr[-3000:]}")
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    key = lambda name, link_arch: (name, tuple(link_arch)) if link_arch else name
    return {key(report.pop("name"), report.pop("link_arch")): MachineCode(**report) for report in reports}


def _serve(module):
    """Compile what standard input asks for, and print one report per line."""
    from moe_numba.runtime.compile import SM_90A, assemble, compile_kernel

    space = runpy.run_path(module)
    requests, arch, link_archs = json.load(sys.stdin)
    arch = tuple(arch or SM_90A)
    for name, (expression, signature, threads, lto) in requests.items():
        bounds = (threads, 1) if isinstance(threads, int) else threads and tuple(threads)
        compiled = compile_kernel(eval(expression, space), tuple(signature), arch=arch, launch_bounds=bounds, lto=lto)
        for link_arch in map(tuple, link_archs or [()]):
            linked = assemble(compiled, link_arch) if link_arch and link_arch != arch else compiled
            print(json.dumps({"name": name, "link_arch": link_arch, **_report(linked)}))


def resources(log):
    """Return registers, stack_bytes and spilled_bytes of a kernel as a dict, from what ptxas printed."""
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "stack_bytes": max(map(int, re.findall(r"(\d+) bytes stack frame", log))),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
    }


def _report(compiled):
    text = disassemble(compiled.code.code, "-c")
    body, loops = body_and_loops(text) if text else (None, None)
    return {
        **resources(compiled.log),
        "complaints": ["".join(found) for found in _WARNING.findall(compiled.log)],
        "opcodes": text and _OPCODE.findall(text),
        "setmaxnreg": text and [int(count, 16) for count in _SETMAXNREG.findall(text)],
        "body": body,
        "loops": loops,
    }


if __name__ == "__main__":
    _serve(sys.argv[1])
