"""Hashes the machine code and the source of every kernel that the public functions launch on an H200.

Usage, without a GPU::

    python -m moe_numba.course.bench.records.fingerprint            write docs/results/fingerprints.json
    python -m moe_numba.course.bench.records.fingerprint --check    name the kernels whose machine code differs from it

The hashes are those that a row of a record keeps of its kernels: see ``kernel_hash``.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from moe_numba.course.bench import records
from moe_numba.course.bench.records.environment import version
from moe_numba.course.bench.records.fingerprint_cases import CASES
from moe_numba.course.bench.records.kernel_hash import ast_hash, machine_code_hash

VERSIONS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvjitlink", "nvidia-cuda-nvrtc", "nvidia-nvvm")


def compile_cases(worker, workers, only=()):
    """Compile every ``workers``-th kernel from ``worker`` on; yield (name, hashes); ``only`` names some cases."""
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
    """Compile a kernel for sm_90a; return ``{"code", "ast"}``, the hashes of its machine code and of its source."""
    from moe_numba.runtime.compile import compile_kernel

    cubin = compile_kernel(kernel, signature, launch_bounds=options["launch_bounds"]).code.code
    return {"code": machine_code_hash(cubin, options), "ast": ast_hash(kernel)}


def versions():
    """The versions of the compilers, on which machine code depends."""
    return {name: found for name in VERSIONS if (found := version(name))}


def compile_all(only=()):
    """Name -> hashes of every kernel (of the cases ``only``), compiled in one process per core."""
    workers = len(os.sched_getaffinity(0))

    def run(worker):
        command = [sys.executable, "-m", __spec__.name, "--worker", str(worker), str(workers), *only]
        environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"the compiler failed:\n{done.stderr[-3000:]}")
        lines = (line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
        return {name: {"code": code, "ast": ast} for name, code, ast in lines}

    with ThreadPoolExecutor(workers) as pool:
        found = {name: hashes for part in pool.map(run, range(workers)) for name, hashes in part.items()}
    return dict(sorted(found.items()))


def path(root=None):
    """Return the file of the stored fingerprints."""
    return records.repository(root) / "docs" / "results" / "fingerprints.json"


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
    parser.add_argument("--only", nargs="+", default=[], choices=CASES, help="with --check: some of the cases")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        worker, workers, *only = options.worker
        for name, hashes in compile_cases(int(worker), int(workers), only):
            print(name, hashes["code"], hashes["ast"], sep="\t", flush=True)
        return 0
    if options.only and not options.check:
        parser.error("--only goes with --check")
    now = {"arch": "sm_90a", "versions": versions(), "kernels": compile_all(options.only)}
    if not options.check:
        path().write_text(records.dump(now))
        print(f"{len(now['kernels'])} kernels: {path()}")
        return 0
    before = json.loads(path().read_text())
    if before["versions"] != now["versions"]:
        print(f"other compilers: {before['versions']} then, {now['versions']} now")
        return 1
    kernels = {name: old for name, old in before["kernels"].items() if name.split(":")[0] in (options.only or CASES)}
    found = list(differences(kernels, now["kernels"]))
    print(*found, f"{len(found)} of {len(now['kernels'])} kernels differ", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
