"""Compile kernels without a GPU into a folder of cubins that ``MOE_NUMBA_CUBINS`` may name on another machine.

Usage::

    export MOE_NUMBA_SIMULATE=0
    python -m moe_numba.course.bench.records.export_cubins DIR --compiler mlir --only gate align

The kernels are those of ``fingerprint_cases``, for sm_90a and launches on an H200. There, with
``MOE_NUMBA_COMPILER=mlir MOE_NUMBA_CUBINS=DIR``, a launch of one of these kernels loads its cubin, no compiler runs,
and a kernel that the folder lacks raises an error. That machine needs the same sources and the same minor version of
Python. Cubins that are already in the folder are kept.
"""

import argparse
import sys
import time
from pathlib import Path

from moe_numba.course.bench.records.compilers import cases
from moe_numba.runtime import compilers
from moe_numba.runtime.cubin_cache import export


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit status 1 if a kernel does not compile."""
    parser = argparse.ArgumentParser(prog="export_cubins", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--compiler", choices=compilers.DISTRIBUTIONS, default=compilers.chosen())
    parser.add_argument("--only", nargs="+", default=[], help="only these topics, such as gate align")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N cases of each kernel")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    size, failed = 0, 0
    for items in cases(options.only).values():
        for name, kernel, signature, launch in items[: options.first]:
            start = time.perf_counter()
            try:
                bounds = launch["launch_bounds"]
                size += export(kernel, signature, options.folder, options.compiler, launch_bounds=bounds)
            except Exception as error:
                failed += 1
                print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            else:
                print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{len(list(options.folder.glob('*.cubin')))} cubins; {size / 1e6:.1f} MB; {failed} kernels failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
