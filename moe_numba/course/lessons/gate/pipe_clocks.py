"""Clocks that the execution pipes of an SM need for the instructions of one warp, from the machine code.

An SM has four schedulers, each with pipes of its own. A scheduler issues one instruction per clock, but a pipe with 16
lanes takes an instruction of 32 threads only every second clock. The slowest pipe is a lower bound of the time of a
kernel whose instructions, not its memory, are the bottleneck. No GPU is needed.

`steps.estimate` has the pipes, and counts loops with the simulator; here the lesson gives what they execute.
"""

import html
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from moe_numba.course.steps.estimate import ISSUE, PIPE_OF
from moe_numba.course.steps.simulate import source_with_dependencies
from moe_numba.runtime.sass import MachineCode, compile_apart

NAMES = (ISSUE, *dict.fromkeys(pipe for pipe, _ in PIPE_OF.values()))


def executions(code: MachineCode, executed: Mapping[str, int] | None = None) -> list[int]:
    """Return how often a warp executes each instruction of the main path.

    Parameters
    ----------
    code : MachineCode
    executed : dict, optional
        Opcode, such as ``"SHFL.BFLY"``, -> how often a warp executes it in the whole kernel. The iterations of loops
        follow from these numbers; they differ from the source's if the compiler unrolls. A loop without any of these
        opcodes counts as one iteration. Instructions that a branch may skip count as executed.

    Raises
    ------
    ValueError
        The numbers do not determine the iterations of the loops that contain the opcodes.
    """
    (start, end), marks = code.body, dict(executed or {})
    has = lambda opcode, mark: opcode == mark or opcode.startswith(mark + ".")
    count = lambda mark, first, last: sum(has(opcode, mark) for opcode in code.opcodes[first : last + 1])
    inside = np.array([[count(mark, *loop) for loop in code.loops] for mark in marks], int)
    inside = inside.reshape(len(marks), len(code.loops))
    missing = np.array([wanted - count(mark, start, end) for mark, wanted in marks.items()], int)
    counted = [number for number in range(len(code.loops)) if inside[:, number].any()]
    more = np.zeros(len(code.loops), int)  # iterations beyond the first
    if counted:
        exact, _, rank, _ = np.linalg.lstsq(inside[:, counted], missing, rcond=None)
        more[counted] = np.rint(exact)
        if rank < len(counted):
            raise ValueError(
                f"{marks} do not determine the iterations of loops that contain {inside.T.tolist()} of them"
            )
    if (inside @ more != missing).any() or (more < 0).any():
        raise ValueError(
            f"{marks} do not fit loops that contain {inside.T.tolist()} of them: {missing.tolist()} missing"
        )
    times = np.ones(len(code.opcodes), int)
    for (first, last), iterations in zip(code.loops, more, strict=True):
        times[first : last + 1] += iterations
    return times[start : end + 1].tolist()


def clocks_of(code: MachineCode, executed: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the clocks of a scheduler that the instructions of one warp take in each pipe, and their issue slots."""
    if code.opcodes is None:
        raise ValueError("the instructions are unknown: install nvidia-cuda-nvdisasm, or the CUDA toolkit")
    if code.body is None:
        raise ValueError("the main path is unknown: every EXIT has a predicate")
    found = Counter(dict.fromkeys(NAMES, 0))
    for opcode, count in zip(code.opcodes[code.body[0] :], executions(code, executed)):
        name = opcode.partition(".")[0]
        if name != "NOP":
            found[ISSUE] += count
            if name in PIPE_OF:
                pipe, clocks = PIPE_OF[name]
                found[pipe] += clocks * count
    return dict(found)


class PipeClocks:
    """A table of kernels and the clocks of each pipe per warp: ``str`` is text, notebooks display HTML.

    Attributes
    ----------
    counts : dict
        Kernel -> pipe -> clocks.
    codes : dict
        Kernel -> `MachineCode`.
    """

    def __init__(
        self, counts: Mapping[str, dict[str, int]] | None = None, codes: Mapping[str, MachineCode] | None = None
    ):
        self.counts, self.codes = dict(counts or {}), dict(codes or {})

    def __getitem__(self, name: str) -> int:
        """Return the clocks of the slowest pipe of a kernel."""
        return max(self.counts[name].values())

    def update(self, other: "PipeClocks") -> None:
        """Add the kernels of another table."""
        self.counts |= other.counts
        self.codes |= other.codes

    def select(self, *names: str) -> "PipeClocks":
        """Return a table of some kernels."""
        return PipeClocks({name: self.counts[name] for name in names}, {name: self.codes[name] for name in names})

    def slowest(self, name: str) -> str:
        """Return the name of the slowest pipe of a kernel."""
        return max(self.counts[name], key=self.counts[name].get)

    def __str__(self):
        width = max(map(len, ("clocks per warp", *self.counts)))
        lines = [f"{'clocks per warp':<{width}}" + "".join(f"{pipe:>13}" for pipe in NAMES)]
        for name, counts in self.counts.items():
            lines.append(f"{name:<{width}}" + "".join(f"{counts[pipe]:>13,}" for pipe in NAMES))
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self):
        head = "".join(f"<th>{text}</th>" for text in ("clocks per warp", *NAMES))
        rows = []
        for name, counts in self.counts.items():
            cells = (f"<b>{counts[p]:,}</b>" if p == self.slowest(name) else f"{counts[p]:,}" for p in NAMES)
            cells = "".join(f"<td>{cell}</td>" for cell in cells)
            rows.append(f"<tr><th style='text-align: left'>{html.escape(name)}</th>{cells}</tr>")
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def pipe_clocks(kernels: Mapping[str, tuple], functions: Iterable[Callable] = ()) -> PipeClocks:
    """Compile kernels for an H200 and count the clocks that one warp takes in each pipe.

    Parameters
    ----------
    kernels : dict
        Name -> (kernel, signature), (kernel, signature, executed) or (kernel, signature, executed, threads per CTA);
        kernel and signature as for `instruction_mix.instruction_mix`, ``executed`` as for `executions`.
    functions : iterable of callables
        Functions of the notebook that the expressions in ``kernels`` name.
    """
    requests, needed, executed = {}, list(functions), {}
    for name, (kernel, signature, *more) in kernels.items():
        if not isinstance(kernel, str):
            needed.append(kernel)
            kernel = kernel.__name__
        executed[name], threads = (*more, None, None)[:2]
        requests[name] = (kernel, signature, threads, False)
    codes = compile_apart(source_with_dependencies(needed), requests)
    return PipeClocks({name: clocks_of(codes[name], executed[name]) for name in kernels}, codes)
