"""A table of what the two compilers make of every kernel: registers, spills, stack, instructions and seconds.

Usage, without a GPU, where numba-cuda-mlir is installed (``pip install 'moe_numba[mlir]'``)::

    export MOE_NUMBA_SIMULATE=0
    python -m moe_numba.course.bench.records.compilers             compile what docs/results/compilers.json lacks
    python -m moe_numba.course.bench.records.compilers --first 2   only the first two cases of each kernel
    python -m moe_numba.course.bench.records.compilers --check     compile all of them, and write nothing

The file is written after each case, so an interrupted run can be continued. Kernels are compiled for sm_90a as for a
launch on an H200; the cases are those of ``fingerprint_cases``. Seconds are the processor's, not the clock's: other
programs do not change them much. What a case needs of device functions that an earlier case compiled is not in them.
``docs/compilers.md`` is made from the file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

from moe_numba.course.bench import records
from moe_numba.course.bench.records.environment import version
from moe_numba.course.bench.records.fingerprint import has_source, launches_of_cases, source_of
from moe_numba.runtime import compilers
from moe_numba.runtime.compile_calls import usable_cores

LINKERS = ("nvidia-nvjitlink", "nvidia-cuda-nvrtc", "nvidia-nvvm")
FIELDS = ("registers", "stack_bytes", "spilled_bytes", "instructions", "seconds")
PAGE = "compilers.md"
_ERROR_CHARACTERS = 300


def versions():
    """Return the versions of both compilers and of what assembles and links their code."""
    found = {name: version(name) for name in LINKERS}
    for compiler in compilers.DISTRIBUTIONS:
        found |= compilers.versions(compiler)
    return {name: found[name] for name in sorted(found) if found[name]}


def cases(only=()):
    """Return the launches of all cases, sorted so that the first of each kernel come first.

    An item is (name, kernel, signature, options). Of cases with the same machine code only one is kept.
    """
    by_kernel, seen = {}, set()
    for name, kernel, signature, options in launches_of_cases(only):
        key = kernel, signature, tuple(sorted(options.items()))
        if key not in seen:
            seen.add(key)
            topic = name.partition(":")[0]
            by_kernel.setdefault((topic, kernel.py_func.__qualname__), []).append((name, kernel, signature, options))
    return by_kernel


def compile_case(kernel, signature, options, compiler):
    """Compile a kernel; return the `FIELDS` and the numbers of warnings, or ``{"error"}``."""
    from moe_numba.runtime import sass
    from moe_numba.runtime.compile import compile_kernel

    start = time.process_time()
    try:
        compiled = compile_kernel(kernel, signature, launch_bounds=options["launch_bounds"], compiler=compiler)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:_ERROR_CHARACTERS]}
    seconds = round(time.process_time() - start, 2)
    found = sass.resources(compiled.log) | {"instructions": sass.count_instructions(compiled.code.code)}
    return found | {"seconds": seconds, "warnings": sass.warnings_of(compiled.log)}


def work(names, again):
    """Compile the cases of these names, and print each as a line of JSON.

    With ``again``, the name of a compiler, what the stored table has of the other one is kept.
    """
    wanted, found = set(names), {}
    stored = read()["kernels"] if again and path().exists() else {}
    for items in cases({name.partition(":")[0] for name in names}).values():
        found |= {name: launch for name, *launch in items if name in wanted}
    for compiler in compilers.DISTRIBUTIONS:  # what takes long to load
        compile_case(*found[names[0]], compiler)
    for name in names:
        kernel, signature, options = found[name]
        print(json.dumps([name, None]), flush=True)  # begun: should the compiler kill the process, the case is known
        about = {"kernel": kernel.py_func.__name__} | source_of(kernel, signature, options)
        kept = stored[name] if has_source(stored.get(name), about) else {}
        for compiler in compilers.DISTRIBUTIONS:
            is_kept = compiler in kept and compiler != again
            about[compiler] = kept[compiler] if is_kept else compile_case(kernel, signature, options, compiler)
        print(json.dumps([name, about]), flush=True)


def compile_all(todo, done, workers, again=""):
    """Compile the cases ``{name: source}`` in processes; call ``done(name, entry)`` after each."""
    queue = SimpleQueue()
    for start in range(0, len(todo), _PORTION):
        queue.put(list(todo)[start : start + _PORTION])

    def run():
        while True:
            try:
                names = queue.get_nowait()
            except Empty:
                return
            while names:
                begun = None
                command = [sys.executable, "-m", __spec__.name, "--worker", again, *names]
                environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
                    for line in process.stdout:
                        if line.startswith("["):
                            name, entry = json.loads(line)
                            begun = name if entry is None else None
                            if entry:
                                done(name, entry)
                if not process.returncode:
                    break
                if begun is None:
                    raise RuntimeError(f"the process that compiles failed with exit status {process.returncode}")
                error = {"error": f"the compiler ended its process (exit status {process.returncode})"}
                done(begun, todo[begun] | {"kernel": "", compilers.DEFAULT: {}, compilers.MLIR: error})
                names = names[names.index(begun) + 1 :]

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(run) for _ in range(workers)]:
            future.result()


_PORTION = 12  # cases of a process: a process loads both compilers, and keeps what they compiled


def path(root=None):
    """Return the file of the table."""
    return records.repository(root) / "docs" / "results" / "compilers.json"


def read(root=None):
    """Return the stored table: ``{"arch", "versions", "cases", "kernels": {name: entry}}``."""
    return json.loads(path(root).read_text())


def choose(first, only=()):
    """Return ``{name: source}`` of the first cases of each kernel (all if 0), and the number of all cases."""
    every = cases(only)
    depth = max(map(len, every.values()), default=0)
    chosen = [items[i] for i in range(min(first or depth, depth)) for items in every.values() if i < len(items)]
    return {name: source_of(*launch) for name, *launch in chosen}, sum(map(len, every.values()))


# The page


def _ratio(entries, field):
    pairs = [(e[compilers.MLIR].get(field), e[compilers.DEFAULT].get(field)) for e in entries]
    ratios = [new / old for new, old in pairs if new and old]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def _cell(found):
    if "registers" not in found:
        return found.get("error", "").partition(":")[0]
    stack = (
        f" {found['stack_bytes']}+{found['spilled_bytes']}" if found["stack_bytes"] or found["spilled_bytes"] else ""
    )
    return f"{found['registers']} / {found['instructions']}{stack}"


def page(table):
    """Return the text of ``docs/compilers.md``."""
    entries, by_kernel = table["kernels"], {}
    for name, entry in entries.items():
        by_kernel.setdefault((name.partition(":")[0], entry["kernel"]), []).append((name, entry))
    failed = {name: e for name, e in entries.items() if "error" in e[compilers.MLIR]}
    texts = [f"{name} {found}" for name, found in table["versions"].items()]
    not_tried = " The others were not tried." * (len(entries) < table["cases"])
    lines = [
        "# What the two compilers make of the kernels",
        "",
        "<!-- Made by `make compilers` from results/compilers.json. -->",
        "",
        f"{len(entries)} of {table['cases']} cases with a launch of their own have been compiled for {table['arch']} "
        f"with numba-cuda, and {len(entries) - len(failed)} of these with numba-cuda-mlir, without a GPU."
        f"{not_tried} This table says nothing about results or speed. "
        "[Moving to numba-cuda-mlir](moving_to_numba_cuda_mlir.md) says what it is for.",
        "",
        "Ratios are numba-cuda-mlir's number over numba-cuda's, the median over a kernel's cases. Seconds are the "
        "processor's, for a kernel and those of its device functions that no case before it had. *stack* counts the "
        "cases with a stack frame or spilled registers.",
        "",
        "| topic | kernel | cases | compile | registers | instructions | seconds | stack: before | stack: now |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (topic, kernel), items in by_kernel.items():
        both = [e for _, e in items if "registers" in e[compilers.MLIR] and "registers" in e[compilers.DEFAULT]]
        stacks = [sum(e[c]["stack_bytes"] + e[c]["spilled_bytes"] > 0 for e in both) for c in compilers.DISTRIBUTIONS]
        ratios = [_ratio(both, field) for field in ("registers", "instructions", "seconds")]
        lines.append("| " + " | ".join(map(str, [topic, kernel, len(items), len(both), *ratios, *stacks])) + " |")
    lines += ["", "## What does not compile", ""]
    lines += [f"- {name}: {entry[compilers.MLIR]['error']}" for name, entry in failed.items()] or ["Nothing."]
    lines += [
        "",
        "## Case by case",
        "",
        "Registers / instructions, and, if there are any, bytes of stack + bytes of spilled registers.",
        "",
        "| case | numba-cuda | numba-cuda-mlir | seconds |",
        "|---|---|---|---|",
    ]
    for name, entry in entries.items():
        old, new = entry[compilers.DEFAULT], entry[compilers.MLIR]
        lines.append(f"| {name} | {_cell(old)} | {_cell(new)} | {old.get('seconds', '')} / {new.get('seconds', '')} |")
    return "\n".join([*lines, "", f"Versions: {', '.join(texts)}.", ""])


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit status 1 if a case does not compile that the file does not list as such."""
    parser = argparse.ArgumentParser(prog="make compilers", description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, default=0, metavar="N", help="only the first N cases of each kernel")
    parser.add_argument("--only", nargs="+", default=[], help="only these topics, such as gate align")
    parser.add_argument("--check", action="store_true", help="compile, and compare with the file instead of writing it")
    parser.add_argument("--again", choices=compilers.DISTRIBUTIONS, default="", help="compile all with this one again")
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        again, *names = options.worker
        work(names, again)
        return 0
    todo, number = choose(options.first, options.only)
    stored = read() if path().exists() else {"versions": None, "kernels": {}}
    known = stored["kernels"] if stored["versions"] == versions() else {}
    if options.only and not options.check and known:
        number = stored["cases"]
    new = dict(known)

    def done(name, entry):
        new[name] = entry
        error = entry[compilers.MLIR].get("error")
        print(f"{name}: {error or _cell(entry[compilers.DEFAULT]) + ' -> ' + _cell(entry[compilers.MLIR])}", flush=True)
        if not options.check:
            table = {"arch": "sm_90a", "versions": versions(), "cases": number, "kernels": dict(sorted(new.items()))}
            path().write_text(records.dump(table))
            (path().parents[1] / PAGE).write_text(page(table))

    if not options.check and not options.again:
        todo = {name: source for name, source in todo.items() if not has_source(known.get(name), source)}
    compile_all(todo, done, options.processes, options.again)
    was = stored["kernels"]
    failed = [n for n in todo if "error" in new[n][compilers.MLIR] and "error" not in was.get(n, {}).get("mlir", {})]
    print(*(f"{name}: no longer compiles" for name in failed), f"{len(todo)} cases compiled", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
