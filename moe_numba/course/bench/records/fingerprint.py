"""A table of the kernels that the public functions launch on an H200: hashes, registers, spills and warnings.

Usage, without a GPU::

    python -m moe_numba.course.bench.records.fingerprint            renew docs/results/fingerprints.json
    python -m moe_numba.course.bench.records.fingerprint --check    name the kernels whose machine code differs from it

Kernels are compiled whose source or launch differs from the table's; with ``--all`` all of them, which takes half an
hour of two cores. The hashes are those that a row of a record keeps of its kernels: see ``kernel_hash``.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from moe_numba.course.bench import records
from moe_numba.course.bench.records.environment import version
from moe_numba.course.bench.records.fingerprint_cases import CASES
from moe_numba.course.bench.records.kernel_hash import ast_hash, machine_code_hash
from moe_numba.runtime.compile_calls import usable_cores

VERSIONS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvjitlink", "nvidia-cuda-nvrtc", "nvidia-nvvm")


def launches_of_cases(only=()):
    """Yield (name, kernel, signature, options) of each launch of the cases; ``only`` names some."""
    from moe_numba.runtime import device

    launches = []
    device.compile_only(device.H200, lambda *launch: launches.append(launch))
    for topic, function in CASES.items():
        for name, call in function() if not only or topic in only else ():
            launches.clear()
            call()
            if not launches:
                raise RuntimeError(f"{topic}: {name} launched no kernel")
            for i, launch in enumerate(launches):
                yield f"{topic}: {name}" + (f" ({i})" if i else ""), *launch


def compile_cases(worker, workers, known, only=()):
    """Yield (name, entry) of the cases, of which each of several workers compiles its share.

    Entries of ``known`` are taken over if they have the kernel's source and launch.
    """
    seen, number = {}, 0
    for name, kernel, signature, options in launches_of_cases(only):
        key = kernel, signature, tuple(sorted(options.items()))
        if key not in seen:
            source = source_of(kernel, signature, options)
            if has_source(known.get(name), source):
                seen[key] = known[name] if worker == 0 else None
            else:
                number += 1
                seen[key] = source | fingerprint(kernel, signature, options) if number % workers == worker else None
        if seen[key]:
            yield name, seen[key]


def source_of(kernel, signature, options):
    """Return ``{"ast", "launch"}``, hashes of all that a kernel's machine code depends on besides the compilers."""
    launch = repr((signature, sorted(options.items())))
    return {"ast": ast_hash(kernel), "launch": hashlib.sha256(launch.encode()).hexdigest()[:8]}


def has_source(entry, source):
    """Return whether an entry of the table, or None, is of a kernel with this `source_of`."""
    return entry is not None and entry.items() >= source.items()


def fingerprint(kernel, signature, options):
    """Compile a kernel for sm_90a; return the hash of its machine code, and what ptxas says about it.

    Returns
    -------
    dict
        ``{"code", "threads", "registers", "stack_bytes", "spilled_bytes", "warnings"}``.
    """
    from moe_numba.runtime.compile import compile_kernel
    from moe_numba.runtime.sass import resources, warnings_of

    bounds = options["launch_bounds"]
    compiled = compile_kernel(kernel, signature, launch_bounds=bounds)
    return {
        "code": machine_code_hash(compiled.code.code, options),
        "threads": bounds[0] if isinstance(bounds, tuple) else bounds,
        **resources(compiled.log),
        "warnings": warnings_of(compiled.log),
    }


def versions():
    """The versions of the compilers, on which machine code depends."""
    return {name: found for name in VERSIONS if (found := version(name))}


def compile_all(known, only=()):
    """Return ``{name: entry}`` of every kernel (of the cases ``only``), compiled in one process per core."""
    workers = usable_cores()

    def run(worker):
        command = [sys.executable, "-m", __spec__.name, "--worker", str(worker), str(workers), *only]
        environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
        given = json.dumps(known)
        done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"the compiler failed:\n{done.stderr[-3000:]}")
        return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))

    with ThreadPoolExecutor(workers) as pool:
        found = {name: entry for part in pool.map(run, range(workers)) for name, entry in part.items()}
    return dict(sorted(found.items()))


def path(root=None):
    """Return the file of the stored fingerprints."""
    return records.repository(root) / "docs" / "results" / "fingerprints.json"


def read(root=None):
    """Return the stored table: ``{"arch", "versions", "kernels": {name: entry}}``."""
    return json.loads(path(root).read_text())


def outdated():
    """Return the names of kernels whose source or launch is not that of the stored table, or that it has not."""
    kernels = read()["kernels"]
    now = {name: source_of(*launch) for name, *launch in launches_of_cases()}
    return sorted(
        name for name in kernels.keys() | now.keys() if name not in now or not has_source(kernels.get(name), now[name])
    )


def differences(old, new):
    """Sentences that name each kernel whose machine code differs, is new or is missing."""
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            yield f"{name}: is {'new' if name in new else 'missing'}"
        elif old[name]["code"] != new[name]["code"]:
            yield f"{name}: differs"


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit status 1 if a check finds a difference."""
    parser = argparse.ArgumentParser(prog="make fingerprint", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the file, and write nothing")
    parser.add_argument("--all", action="store_true", help="compile also kernels whose source is the table's")
    parser.add_argument("--only", nargs="+", default=[], choices=CASES, help="with --check: some of the cases")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        worker, workers, *only = options.worker
        for named_entry in compile_cases(int(worker), int(workers), json.load(sys.stdin), only):
            print(json.dumps(named_entry), flush=True)
        return 0
    if options.only and not options.check:
        parser.error("--only goes with --check")
    before = read() if path().exists() else {"versions": None, "kernels": {}}
    same_compilers = before["versions"] == versions()
    if options.check and not same_compilers:
        print(f"other compilers: {before['versions']} then, {versions()} now")
        return 1
    known = before["kernels"] if same_compilers and not options.all else {}
    now = {"arch": "sm_90a", "versions": versions(), "kernels": compile_all(known, options.only)}
    if not options.check:
        path().write_text(records.dump(now))
        print(f"{len(now['kernels'])} kernels: {path()}")
        return 0
    kernels = {name: old for name, old in before["kernels"].items() if name.split(":")[0] in (options.only or CASES)}
    found = list(differences(kernels, now["kernels"]))
    print(*found, f"{len(found)} of {len(now['kernels'])} kernels differ", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
