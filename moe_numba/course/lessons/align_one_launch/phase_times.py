"""Time and machine code of the phases of a kernel, from copies of it that end after each phase (`kernel_phases`)."""

import inspect
from collections.abc import Callable
from dataclasses import replace

from moe_numba.course.steps.instruction_mix import classify
from moe_numba.course.steps.kernel_phases import phases_of, until, without_earlier
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.simulate import source_with_dependencies
from moe_numba.runtime.changed_source import source_of
from moe_numba.runtime.sass import MachineCode, compile_apart


def phases(ladder: Ladder, name: str, make: Callable, run: Callable[[Callable], Callable]) -> dict[str, float | None]:
    """Measure how long each phase of a kernel takes, and print it.

    Parameters
    ----------
    ladder : Ladder
        It times the kernel and its shortened copies, interleaved, and records them as "phases of ``name``".
    name : str
        The step that the kernel belongs to.
    make : function
        Makes the kernel; comments in its source mark the phases (see `kernel_phases.phases_of`).
    run : callable
        ``run(make)`` returns a callable that launches what ``make``, or a copy of it, makes. Each copy needs outputs of
        its own.

    Returns
    -------
    dict
        Phase -> microseconds; None if nothing is measured or recorded.

    Raises
    ------
    ValueError
        No comment of the kernel marks a phase.
    """
    names, namespace = phases_of(make), _namespace(make)
    if not names:
        raise ValueError(f"the kernel of {make.__name__} has no comments that mark phases")
    calls = {phase: run(until(make, phase, namespace)) for phase in names[:-1]} | {names[-1]: run(make)}
    measured = ladder.times(f"phases of {name}", calls)
    if measured is None:
        return dict.fromkeys(names)
    found: dict[str, float | None] = without_earlier(measured, names)
    times = ", ".join(f"{phase} {us:.2f}" for phase, us in found.items())
    print(f"{name}: {times}; {measured[names[-1]]:.2f} us{f' ({ladder.untimed}: recorded)' if ladder.untimed else ''}")
    return found


def phase_instructions(
    make: Callable, arguments: tuple, signature: tuple[str, ...], threads: int, arch: tuple | None = None
) -> dict[str, dict[str, int]]:
    """Compile a kernel and its shortened copies, and count the SASS instructions of each phase by class.

    No GPU is needed. The compiler may move instructions between phases.

    Parameters
    ----------
    make : function
        As for `phases`.
    arguments : tuple
        What ``make`` is called with: plain values.
    signature, threads, arch
        As for `instruction_mix.instruction_mix`.

    Returns
    -------
    dict
        Phase -> class -> instructions.
    """
    names, namespace, requests = phases_of(make), _namespace(make), {}
    source = source_with_dependencies([make])
    for number, phase in enumerate(names):
        text = source_of(until(make, phase, namespace))
        source += "\n" + text.replace(f"def {make.__name__}(", f"def until_{number}(", 1)
        requests[phase] = f"until_{number}({', '.join(map(repr, arguments))})", signature, threads, False
    codes = compile_apart(source, requests, arch)
    found: dict[str, dict[str, int]] = {}
    before: dict[str, int] = {}
    for phase in names:
        counts = classify(codes[phase])
        found[phase] = {kind: counts.get(kind, 0) - before.get(kind, 0) for kind in {**before, **counts}}
        before = counts
    return found


def atomic_loop(
    make: Callable, arguments: tuple, signature: tuple[str, ...], threads: int, arch: tuple | None = None
) -> MachineCode:
    """Compile a kernel and return its loop with the most atomic operations, from its label to the branch back to it.

    No GPU is needed. What the compiler places outside the loop, such as the remainder of an unrolled one, does not
    count.

    Parameters
    ----------
    make, arguments, signature, threads, arch
        As for `phase_instructions`.

    Raises
    ------
    ValueError
        No loop has an atomic operation, or nvdisasm is missing.
    """
    request = f"{make.__name__}({', '.join(map(repr, arguments))})", signature, threads, False
    code = compile_apart(source_with_dependencies([make]), {"kernel": request}, arch)["kernel"]
    if code.opcodes is None:
        raise ValueError("the instructions are unknown: install nvidia-cuda-nvdisasm, or the CUDA toolkit")
    loops = [replace(code, opcodes=code.opcodes[first : last + 1], loops=None) for first, last in code.loops or ()]
    most = max(loops, key=_atomics, default=None)
    if most is None or not _atomics(most):
        raise ValueError(f"no loop of the kernel of {make.__name__} has an atomic operation")
    return most


def _atomics(code):
    return code.count("ATOMS", "ATOMG", "RED", "REDG")


def _namespace(make):
    return inspect.unwrap(make).__globals__
