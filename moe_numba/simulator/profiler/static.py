"""Static properties of a profiled kernel: registers, spills and shared memory from the compiler, and occupancy.

The kernel is compiled in a second process; see `simulator.compiler`.
"""

import collections
import math
import os
from dataclasses import dataclass, field

from moe_numba.simulator.compiler import process
from moe_numba.simulator.profiler.occupancy import Occupancy, occupancy

_REGISTERS_PER_BLOCK = 65536


@dataclass
class StaticProfile:
    """What the compiler makes of a kernel for one GPU.

    `registers` and the numbers after it are None where the kernel could not be compiled; `reason` then says why.
    `sass` has the machine code: a dict for each instruction with the fields of `runtime.sass.Instruction`, whose site
    has an absolute path. Instructions of an inlined function belong to the line of that function, not to the call.
    """

    gpu: str
    launch_bounds: object = None
    registers: int | None = None
    stack_bytes: int | None = None
    spilled_bytes: int | None = None
    static_shared_bytes: int | None = None
    sass: list | None = field(default=None, repr=False)
    reason: str | None = None
    setmaxnreg_registers: int | None = None  # that a block's warpgroups have after setmaxnreg, of 65,536
    occupancy: list[Occupancy] = field(default_factory=list)  # of each launch

    @property
    def sass_lines(self):
        """Number of SASS instructions of each "file:line"; None if not known, empty without line information."""
        if self.sass is None:
            return None
        return collections.Counter("{}:{}".format(*code["site"]) for code in self.sass if code["site"])

    def instructions(self, counted):
        """Return the number of SASS instructions of a kernel's functions, wherever the compiler has inlined them.

        `counted` is the profile of the kernel, or a `Part` of it. None without line information.
        """
        if not self.sass_lines:
            return None
        names = {line.function for line in counted.lines}
        spans = [
            (os.path.abspath(f), first, last) for (f, first, last), n in counted.kernel.spans.items() if n in names
        ]
        sites = {(file, number) for file, first, last in spans for number in range(first, last + 1)}
        return sum(count for site, count in self._sites() if site in sites)

    def estimated_instructions(self, counted):
        """Estimate the warp-level instructions of all launches: SASS instructions of a line times its executions.

        `counted` is the profile of the kernel, or a `Part` of it, whose functions count where they are inlined. Lines
        before the first one of the kernel that runs (the `def`) count once per warp. Too low or too high where the
        compiler unrolls a loop, replaces a branch by predicates or moves code out of a loop. None without line
        information.
        """
        if not self.sass_lines:
            return None
        kernel = counted.kernel
        executions = {(os.path.abspath(line.file), line.line): line.executions for line in counted.lines}
        statements = {(os.path.abspath(file), line): first for (file, line), first in kernel.statements.items()}
        own = [line.line for line in counted.lines if line.file == kernel.file and line.function == kernel.name]
        begins = min(first for (_, first, _), name in kernel.spans.items() if name == kernel.name)
        before = range(begins, min(own, default=0))
        warps, kernel_file, found = sum(launch["warps"] for launch in kernel.launches), os.path.abspath(kernel.file), 0
        for (file, number), count in self._sites():
            times = executions.get((file, statements.get((file, number), number)), 0)
            found += count * (times or warps * (file == kernel_file and number in before))
        return found

    def _sites(self):
        """Yield ((file, line), number of instructions)."""
        for site, count in self.sass_lines.items():
            file, _, line = site.rpartition(":")
            yield (file, int(line)), count

    def as_dict(self):
        """Return the values as built-in types."""
        own = {name: value for name, value in vars(self).items() if name != "sass"}
        return own | {"sass_lines": self.sass_lines, "occupancy": [o._asdict() for o in self.occupancy]}

    def __str__(self):
        if self.registers is None:
            compiled = f"not compiled ({self.reason})"
        else:
            compiled = (
                f"{self.registers} registers, {self.spilled_bytes} bytes spilled, {self.static_shared_bytes} bytes of "
                f"static shared memory, launch bounds {self.launch_bounds}"
            )
        texts = [f"{self.gpu}: {compiled}"]
        if self.setmaxnreg_registers is not None:
            texts.append(f"setmaxnreg: {self.setmaxnreg_registers} of {_REGISTERS_PER_BLOCK} registers")
        for o in dict.fromkeys((*o[:1], ", ".join(o.limited_by), *o[3:]) for o in self.occupancy):
            blocks, limits, share, resident, fits = o
            texts.append(
                f"occupancy {share:.0%} ({blocks} blocks per SM, limited by {limits}), {resident} blocks at once: "
                f"{'all blocks are co-resident' if fits else 'not all blocks are co-resident'}"
            )
        return "; ".join(texts)


def compile_for(kernels, gpu):
    """Compile the kernels of a list of `KernelProfile` for a GPU, and set their `static`."""
    requests = []
    for kernel in kernels:
        bounds = kernel.options.get("launch_bounds")
        if bounds is None and kernel.setmaxnreg:
            bounds = math.prod(kernel.launches[0]["block"])
        kernel.static = StaticProfile(gpu.name, bounds)
        if kernel.setmaxnreg:
            kernel.static.setmaxnreg_registers = 128 * sum(kernel.setmaxnreg.values())
        requests.append(_request(kernel, gpu))
    sent = [r for r in requests if isinstance(r, bytes)]
    reports = iter(process.compile_apart(sent) if sent else ())
    for kernel, request in zip(kernels, requests):
        report = next(reports) if isinstance(request, bytes) else {"reason": request}
        for name in vars(kernel.static).keys() & report.keys():
            setattr(kernel.static, name, report[name])
        for launch in kernel.launches:
            threads, blocks = math.prod(launch["block"]), math.prod(launch["grid"])
            found = occupancy(gpu, threads, blocks, kernel.static.registers, launch["shared_bytes"])
            kernel.static.occupancy.append(found)


def _request(kernel, gpu):
    """Return what `compile_apart` takes for a kernel, or the reason why it cannot be sent."""
    options = {"arch": process.architecture(gpu.capability), "launch_bounds": kernel.static.launch_bounds}
    # The linker takes setmaxnreg only from kernels with an entry in C++, which have no line information.
    options |= {"cpp_entry": True} if kernel.setmaxnreg else {"lineinfo": True}
    try:
        signature = process.signature_of(kernel.arguments)
        return process.request(kernel.function, kernel.options, signature, resources=True, **options)
    except process.NotSent as error:
        return str(error)
