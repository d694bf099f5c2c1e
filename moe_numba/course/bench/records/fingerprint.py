"""Hashes the machine code of every kernel that the public functions launch on an H200.

Usage, without a GPU::

    python -m moe_numba.course.bench.records.fingerprint write docs/results/fingerprints.json
    python -m moe_numba.course.bench.records.fingerprint --check  name the kernels whose code differs
    python -m moe_numba.course.bench.records.fingerprint --restamp  after a check, update the records

A hash covers the disassembled instructions, the data sections and the launch options of a kernel. Symbol names and
label numbers are normalised, so that renaming a function or moving it to another module changes no hash.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from moe_numba.course.bench import records
from moe_numba.course.bench.records.code_hash import hash_file
from moe_numba.course.bench.records.dependencies import all_results, result_sources
from moe_numba.course.bench.records.environment import version
from moe_numba.course.bench.records.fingerprint_cases import CASES
from moe_numba.runtime.sass import disassemble

NOT_HASHED = ("older_gpus",)  # records of kernels that no public function launches on an H200
VERSIONS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvjitlink", "nvidia-cuda-nvrtc", "nvidia-nvvm")


def compile_cases(worker, workers, only=()):
    """Compile every ``workers``-th kernel from ``worker`` on; yield (name, hash). ``only`` names some of the cases."""
    from moe_numba.runtime import device

    launches, seen = [], {}
    device.compile_only(device.H200, lambda *launch: launches.append(launch))
    number = 0
    for topic, function in CASES.items():
        if only and topic not in only:
            continue
        for name, call in function():
            launches.clear()
            call()
            if not launches:
                raise RuntimeError(f"{topic}: {name} launched no kernel")
            for i, (kernel, signature, options) in enumerate(launches):
                key = kernel, signature, tuple(sorted(options.items()))
                full_name = f"{topic}: {name}" + (f" ({i})" if i else "")
                if key not in seen:
                    number += 1
                    seen[key] = fingerprint(kernel, signature, options) if number % workers == worker else None
                if seen[key]:
                    yield full_name, seen[key]


def fingerprint(kernel, signature, options):
    """Compile a kernel for sm_90a and hash it."""
    from moe_numba.runtime.compile import compile_kernel

    code = compile_kernel(kernel, signature, launch_bounds=options["launch_bounds"]).code
    disassembly = disassemble(code.code)
    if disassembly is None:
        raise RuntimeError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    text = "\n".join([*normalised(disassembly), *(f"{k}={v}" for k, v in sorted(options.items()))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?;)", re.MULTILINE)
_LABEL = re.compile(r"\.L_x?_?\d+")
_DATA = re.compile(r"^\s*\.(?:byte|short|word|dword|zero|b8|b16|b32|b64)\b.*$", re.MULTILINE)


def normalised(text):
    """The instructions and data of a disassembly, without symbol names, label numbers and function order."""
    sections = []
    for section in re.split(r"^\s*\.section\s+", text, flags=re.MULTILINE)[1:]:
        name = re.match(r"[^,\s]+", section)[0]
        if name.startswith(".text."):
            code = "\n".join(_INSTRUCTION.findall(section))
            labels = {label: f"L{i}" for i, label in enumerate(dict.fromkeys(_LABEL.findall(code)))}
            code = _LABEL.sub(lambda match, labels=labels: labels[match[0]], code)
            sections.append("text\n" + re.sub(r"\((?!L\d+\))[A-Za-z_$.][^()]*\)", "(symbol)", code))
        elif name.startswith((".nv.global.init", ".nv.constant3", ".nv.constant4", ".nv.constant2", ".rodata")):
            sections.append("data\n" + re.sub(r"\([A-Za-z_$.][^()]*\)", "(symbol)", "\n".join(_DATA.findall(section))))
    if not any(section.startswith("text\n") and len(section) > 20 for section in sections):
        raise RuntimeError("the disassembly has no instructions")
    return sorted(sections)


def versions():
    """The versions of the compilers, on which machine code depends."""
    return {name: found for name in VERSIONS if (found := version(name))}


def compile_all(only=()):
    """Name -> hash of every kernel (of the cases ``only``), compiled in one process per core."""
    workers = len(os.sched_getaffinity(0))

    def run(worker):
        command = [sys.executable, "-m", __spec__.name, "--worker", str(worker), str(workers), *only]
        environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"the compiler failed:\n{done.stderr[-3000:]}")
        return [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]

    with ThreadPoolExecutor(workers) as pool:
        return dict(sorted(tuple(pair) for pairs in pool.map(run, range(workers)) for pair in pairs))


def restamp(root=None):
    """Update the source hashes of all records and notebooks whose own code is unchanged.

    Check the machine code of the package's kernels first. Kernels in a notebook's cells are not in
    the fingerprints, so a notebook whose cells have changed, and the records that it wrote, must be executed again. Nor
    are kernels for other GPUs, so their record must be measured again.
    """
    import nbformat

    root = records.repository(root)
    for file, record in all_results(root):
        own = [name for name in record["sources"] if name.endswith("#code")]
        if any(hash_file(root, name) != record["sources"][name] for name in own):
            print(f"{record['topic']}: the notebook's code has changed; execute it again")
            continue
        sources = records.sources(result_sources(record, root), root)
        if sources == record["sources"]:
            continue
        if record["topic"] in NOT_HASHED:
            print(f"{record['topic']}: its kernels have no fingerprints; measure it again")
            continue
        if file.suffix == ".ipynb":
            notebook = nbformat.read(file, as_version=4)
            notebook.metadata.moe_numba["sources"] = sources
            nbformat.write(notebook, file)
        else:
            file.write_text(records.dump(record | {"sources": sources}))
        print(f"{record['topic']}: sources updated")


def path(root=None):
    """Return the file of the stored fingerprints."""
    return records.repository(root) / "docs" / "results" / "fingerprints.json"


def differences(old, new):
    """Sentences that name each kernel whose machine code differs, is new or is missing."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            what = "differs" if name in old and name in new else "is new" if name in new else "is missing"
            yield f"{name}: {what}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit status 1 if a check finds a difference."""
    parser = argparse.ArgumentParser(prog="make fingerprint", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the file, and write nothing")
    parser.add_argument("--restamp", action="store_true", help="check, then update the sources of all records")
    parser.add_argument("--only", nargs="+", default=[], choices=CASES, help="with --check: some of the cases")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        worker, workers, *only = options.worker
        for name, digest in compile_cases(int(worker), int(workers), only):
            print(name, digest, sep="\t", flush=True)
        return 0
    if options.only and not options.check:
        parser.error("--only goes with --check")
    now = {"arch": "sm_90a", "versions": versions(), "kernels": compile_all(options.only)}
    if not (options.check or options.restamp):
        path().write_text(json.dumps(now, indent=1) + "\n")
        print(f"{len(now['kernels'])} kernels: {path()}")
        return 0
    before = json.loads(path().read_text())
    if before["versions"] != now["versions"]:
        print(f"other compilers: {before['versions']} then, {now['versions']} now")
        return 1
    kernels = {name: old for name, old in before["kernels"].items() if name.split(":")[0] in (options.only or CASES)}
    found = list(differences(kernels, now["kernels"]))
    print(*found, f"{len(found)} of {len(now['kernels'])} kernels differ", sep="\n")
    if found:
        return 1
    if options.restamp:
        restamp()
    return 0


if __name__ == "__main__":
    sys.exit(main())
