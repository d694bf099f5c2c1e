"""Report of a profile: counters per kernel and source line, as a table, as JSON and as HTML."""

import json
import linecache
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moe_numba.simulator.core import reachable
from moe_numba.simulator.core.errors import file_name
from moe_numba.simulator.profiler import html, static
from moe_numba.simulator.profiler.control_flow import statements
from moe_numba.simulator.profiler.counters import METRICS, LineCounters, ratio
from moe_numba.simulator.profiler.occupancy import gpu_properties
from moe_numba.simulator.profiler.phases import COUNTERS, CriticalPath, Phases

SCHEMA = 2  # version of the JSON


class Counted:
    """Counters of some lines of a kernel: all of them, or those of some of its functions."""

    name, file, lines, phases, kernel = "", "", (), None, None

    @property
    def total(self) -> LineCounters:
        """Sum of the counters of the lines."""
        total = LineCounters(self.file, 0, self.name)
        for line in self.lines:
            total.add(line)
        return total

    @property
    def instructions(self) -> int | None:
        """SASS instructions of the lines' functions; None without a compiler or its line information."""
        return self.kernel.static and self.kernel.static.instructions(self)

    @property
    def estimated_instructions(self) -> int | None:
        """Estimated instructions that warps execute; see `StaticProfile.estimated_instructions`."""
        return self.kernel.static and self.kernel.static.estimated_instructions(self)

    @property
    def critical_path(self) -> CriticalPath:
        """What the warp that has most to do does between two block-wide barriers, summed, of the longest block."""
        return self.phases.critical_path(self._selected())

    def longest_chain(self, weights: Mapping[str, float]) -> float:
        """Return the sum, over the phases between two block-wide barriers, of the warp with the largest weighted sum.

        Parameters
        ----------
        weights : dict
            Counter of `phases.COUNTERS` -> weight, such as the latency of an access in nanoseconds.
        """
        unknown = sorted(weights.keys() - set(COUNTERS))
        if unknown:
            raise ValueError(f"weights has {', '.join(unknown)}; its keys must be of {', '.join(COUNTERS)}")
        return self.phases.longest(weights, self._selected())

    def _selected(self):
        return self.lines


class Part(Counted):
    """Counters of some functions of a kernel, by their names: `lines`, `total`, `critical_path`, as of the kernel."""

    def __init__(self, kernel: "KernelProfile", names: Iterable[str]):
        self.kernel, self.names, self.phases, self.file = kernel, tuple(names), kernel.phases, kernel.file
        self.name = ", ".join(self.names)

    @property
    def lines(self) -> list[LineCounters]:
        return [line for line in self.kernel.lines if line.function in self.names]


class KernelProfile(Counted):
    """Counters of all launches of one kernel.

    Attributes
    ----------
    name, file : str
    launches : list of dict
        Of each launch: ``grid``, ``block``, ``cluster`` (each three integers), the ``blocks`` that ran and their
        ``warps``, ``shared_bytes`` (dynamic and static), ``dependent``, and the ``argument_bytes`` of its arrays.
    setmaxnreg : dict
        Warpgroup of a block -> the registers per thread that it set last.
    static : StaticProfile or None
        What the compiler makes of the kernel; None if no GPU was named, or without a compiler.
    """

    def __init__(self, function):
        self.function, self.name, self.file = function, function.__name__, function.__code__.co_filename
        self.launches, self.setmaxnreg, self.static = [], {}, None
        self.options, self.arguments = {}, ()  # of the last launch
        self.layouts = []  # shared memory of each launch
        self.spans = {}  # (file, first line, last line) of the kernel and its device functions -> their names
        self.statements = {}  # (file, line) -> first line of its statement
        self.phases, self.kernel = Phases(), self
        self._lines, self._codes = {}, set()

    def line(self, code, number):
        """Return the counters of a line of the kernel or of a device function."""
        key = code.co_filename, number
        if key not in self._lines:
            if code not in self._codes:
                self._codes.add(code)
                lines = [n for *_, n in code.co_lines() if n]
                self.spans[code.co_filename, code.co_firstlineno, max(lines)] = code.co_name
                self.statements |= {(code.co_filename, n): first for n, first in statements(code).items()}
            self._lines[key] = LineCounters(*key, code.co_name)
        return self._lines[key]

    def note_warpgroup_instruction(self, group, what):
        """Note the registers per thread that a setmaxnreg gives to a warpgroup."""
        if what.startswith("setmaxnreg"):
            self.setmaxnreg[group.index] = int(what.split()[-1])

    def merge(self, other: "KernelProfile") -> None:
        """Add what another profile of the same kernel has counted; not its launches."""
        line_of = {}
        for key, line in other._lines.items():
            mine = line_of[line] = self._lines.setdefault(key, LineCounters(line.file, line.line, line.function))
            mine.add(line)
        self.phases.merge(other.phases, line_of)
        self.spans |= other.spans
        self.statements |= other.statements
        self.setmaxnreg |= other.setmaxnreg

    @property
    def lines(self) -> list[LineCounters]:
        """Lines that were executed, the kernel's file first, in the order of their numbers."""
        lines = [line for line in self._lines.values() if line.executions or line.accesses or line.waits]
        return sorted(lines, key=lambda line: (line.file != self.file, line.file, line.line))

    def _selected(self):
        return None

    def __getitem__(self, number: int) -> LineCounters:
        """Return the counters of a line of the kernel's file, zeros if it was not executed."""
        return self._lines.get((self.file, number)) or LineCounters(self.file, number)

    @property
    def functions(self) -> dict[str, Part]:
        """The kernel's own lines, and those of each device function that it has called, by the function's name."""
        names = dict.fromkeys([self.name, *(line.function for line in self.lines)])
        return {name: Part(self, [name]) for name in names}

    def part(self, *names: str) -> Part:
        """Return the counters of some functions together; raise a KeyError with the known names for another one."""
        known = self.functions
        for name in names:
            if name not in known:
                raise KeyError(f"kernel {self.name} has called no function {name!r}; it has {', '.join(known)}")
        return Part(self, names)


class Profile:
    """Counters of the kernels launched within `simulator.profile()`, in the order of their first launches.

    ``profile["name"]`` has those of a kernel; see `docs/simulator_profile.md`.

    Parameters
    ----------
    gpu : str, optional
        As for `simulator.profile`, which makes the profile.
    """

    def __init__(self, gpu=None):
        self.gpu = gpu_properties(gpu) if gpu is not None else None
        self._kernels = {}

    def kernel(self, grid):
        """Return the counters of a launch's kernel, and note the launch.

        :meta private:
        """
        if grid.kernel not in self._kernels:
            self._kernels[grid.kernel] = KernelProfile(grid.kernel)
        kernel = self._kernels[grid.kernel]
        warps = sum(len(block.warps) for block in grid.blocks)
        launch = {"grid": [*grid.grid_dim], "block": [*grid.block_dim], "cluster": [*grid.cluster_dim], "warps": warps}
        launch["blocks"] = len(grid.blocks)
        launch["dependent"], launch["argument_bytes"] = grid.dependent, _total(reachable.intervals([grid]))
        kernel.launches.append(launch)
        kernel.layouts.append(grid.shared_layout)
        kernel.options = {**grid.options, "launch_bounds": grid.launch_bounds}
        if self.gpu is not None:
            kernel.arguments = grid.args
        return kernel

    def complete(self):
        """Compile the kernels, if the profile is for a GPU.

        :meta private:
        """
        for kernel in self.kernels:
            for launch, layout in zip(kernel.launches, kernel.layouts):
                launch["shared_bytes"] = layout.used
        if self.gpu is not None:
            static.compile_for(self.kernels, self.gpu)
            for kernel in self.kernels:
                kernel.arguments = ()

    @property
    def kernels(self) -> list[KernelProfile]:
        return list(self._kernels.values())

    def __getitem__(self, name: str) -> KernelProfile:
        """Return the counters of a kernel by its name; the first one launched if several have it."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise KeyError(f"no kernel {name!r} was launched; the profile has {[kernel.name for kernel in self.kernels]}")

    def table(self) -> str:
        """Return the counters of each kernel as a text table, one row per line and a row of totals."""
        return "\n\n".join("\n".join(_kernel_table(kernel)) for kernel in self.kernels) or "no kernel was launched"

    __str__ = table

    def as_dict(self) -> dict:
        """Return the counters as built-in types; `docs/simulator_profile.md` describes the keys."""
        gpu = self.gpu and self.gpu._asdict()
        return {"schema": SCHEMA, "gpu": gpu, "kernels": [_kernel_dict(kernel) for kernel in self.kernels]}

    def json(self, indent: int | None = None) -> str:
        """Return `as_dict` as JSON, in lines with an ``indent``, the spaces per level."""
        return json.dumps(self.as_dict(), indent=indent)

    def heatmap(self, counter: str = "executions", kernel: str | None = None) -> "html.Page":
        """Return the source with a colour per line, as HTML that needs no other file; notebooks display it.

        Parameters
        ----------
        counter : str
            A key of `METRICS`.
        kernel : str, optional
            Name of a kernel; all of them if not given.
        """
        if counter not in METRICS:
            raise ValueError(f"counter is {counter!r}; it must be one of {', '.join(METRICS)}")
        return html.Page(self.kernels if kernel is None else [self[kernel]], counter)

    def _repr_html_(self):
        return self.heatmap()._repr_html_()


def write_report(profile: Profile, path: str | None = None) -> None:
    """Print a profile as a table, or write it to a file.

    Parameters
    ----------
    profile : Profile
        From `simulator.profile`.
    path : str, optional
        The file: JSON for `.json`, HTML for `.html`, otherwise the table. None prints the table.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def double(x):
    ...     i = cuda.grid(1)
    ...     x[i] *= 2
    >>> x = np.arange(64, dtype=np.float32)
    >>> with moe_numba.simulator.profile() as p:
    ...     double[2, 32](x)
    >>> moe_numba.simulator.write_report(p)
    kernel double ...
    """
    if path is None:
        print(profile.table())
        return
    formats = {".json": lambda: profile.json(indent=1), ".html": lambda: str(profile.heatmap())}
    Path(path).write_text(formats.get(Path(path).suffix, profile.table)() + "\n", encoding="utf-8")


def source_text(line):
    """Return the text of a line's source; "" if the file is not known."""
    return linecache.getline(line.file, line.line).rstrip()


def _total(intervals):
    """Return the bytes of intervals, each address counted once."""
    end = total = 0
    for first, last in sorted(intervals):
        total, end = total + max(last - max(first, end), 0), max(end, last)
    return total


def _per_request(line, operation):
    return ratio(getattr(line, f"global_{operation}_sectors"), getattr(line, f"global_{operation}_requests"))


# Header -> value; a column without a value in any row is left out.
_COLUMNS = {
    "exec": lambda line: line.executions,
    "lanes": lambda line: line.divergence and f"{line.divergence:.0%}",
    "ld req": lambda line: line.global_load_requests,
    "sect/req": lambda line: _per_request(line, "load"),
    "st req": lambda line: line.global_store_requests,
    "sect/req ": lambda line: _per_request(line, "store"),
    "lds req": lambda line: line.shared_load_requests,
    "wavefr": lambda line: line.shared_load_wavefronts,
    "sts req": lambda line: line.shared_store_requests,
    "wavefr ": lambda line: line.shared_store_wavefronts,
    "conflicts": lambda line: line.bank_conflicts,
    "width": lambda line: "/".join(map(str, line.vector_widths)),
    "atomics": lambda line: line.global_atomic_requests + line.shared_atomic_requests,
    "contention": lambda line: line.contention,
    "async B": lambda line: line.async_bytes,
    "collectives": lambda line: sum(line.collectives.values()),
    "waits": lambda line: sum(line.waits.values()),
}


def _cell(value):
    if not value:
        return ""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _kernel_table(kernel) -> Iterator[str]:
    """Yield the lines of a kernel's table."""
    lines, total = kernel.lines, kernel.total
    yield f"kernel {kernel.name} ({file_name(kernel.file)})"
    for launch in kernel.launches[:3]:
        yield f"  {describe_launch(launch)}"
    if len(kernel.launches) > 3:
        yield f"  and {len(kernel.launches) - 3} more launches"
    columns = [(header.strip(), [_cell(value(line)) for line in [*lines, total]]) for header, value in _COLUMNS.items()]
    columns = [(header, cells) for header, cells in columns if any(cells)]
    widths = [max(map(len, (header, *cells))) for header, cells in columns]
    row = lambda cells: "  ".join(cell.rjust(width) for cell, width in zip(cells, widths))
    yield "  line  " + row([header for header, _ in columns]) + "  source"
    file = kernel.file
    for i, line in enumerate(lines):
        if line.file != file:
            file = line.file
            yield f"  {file_name(file)}"
        yield f"{line.line:6}  {row([cells[i] for _, cells in columns])}  {source_text(line)}"
    yield " total  " + row([cells[-1] for _, cells in columns])
    yield f"  bytes: {describe_bytes(total)}"
    for name, operations in total.operations.items():
        yield f"  {name}: {operations.count}, {operations.bytes} bytes"
    for name, count in total.collectives.items():
        yield f"  {name}: {count} by a warp"
    for name, count in total.waits.items():
        yield f"  waits at {name}: {count} of a warp"
    for rank, count in sorted(total.peers.items()):
        yield f"  memory of rank {rank}: {count} bytes"
    path = ", ".join(f"{name} {count}" for name, count in kernel.critical_path.as_dict().items())
    yield f"  critical path of a block: {path}"
    if kernel.setmaxnreg:
        used = sum(kernel.setmaxnreg.values()) * 128
        registers = ", ".join(str(kernel.setmaxnreg[group]) for group in sorted(kernel.setmaxnreg))
        yield f"  setmaxnreg: {registers} registers per thread of the warpgroups, {used} of 65536 of a block"
    if kernel.static is not None:
        yield f"  {kernel.static}"


def describe_launch(launch):
    """Describe a launch in one line."""
    dims = [f"{name} {tuple(launch[name])}" for name in ("grid", "block")]
    dims += [f"cluster {tuple(launch['cluster'])}"] * (launch["cluster"] != [1, 1, 1])
    return f"{', '.join(dims)}: {launch['warps']} warps, {launch.get('shared_bytes', 0)} bytes of shared memory a block"


def describe_bytes(total):
    """Describe the bytes that a kernel moves by memory space."""
    texts = [f"global {total.requested_bytes} requested, {total.transferred_bytes} transferred"]
    names = {"shared": total.shared_bytes, "distributed shared": total.distributed_shared_bytes}
    texts += [f"{name} {count}" for name, count in (names | {"async": total.async_bytes}).items() if count]
    return "; ".join(texts)


def _kernel_dict(kernel):
    return {
        "name": kernel.name,
        "file": kernel.file,
        "launches": kernel.launches,
        "static": kernel.static and kernel.static.as_dict(),
        "setmaxnreg": kernel.setmaxnreg,
        "total": _counters_dict(kernel.total),
        "critical_path": _path_dict(kernel),
        "functions": [
            {"name": name, **_counters_dict(part.total), "critical_path": _path_dict(part)}
            for name, part in kernel.functions.items()
        ],
        "lines": [
            {"file": line.file, "line": line.line, "function": line.function, "source": source_text(line)}
            | _counters_dict(line)
            for line in kernel.lines
        ],
    }


def _path_dict(counted):
    path = counted.critical_path
    return {"counters": path.as_dict(), "phases": path.phases}


def _counters_dict(line):
    keys = "space", "operation", "size"
    return {
        "counters": {name: metric.value(line) for name, metric in METRICS.items()},
        "accesses": [dict(zip(keys, key)) | vars(accesses) for key, accesses in sorted(line.accesses.items())],
        "operations": [{"name": name} | vars(operations) for name, operations in line.operations.items()],
        "collectives": line.collectives,
        "waits": line.waits,
        "peers": line.peers,
    }
