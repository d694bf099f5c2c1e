"""Static properties of a profiled kernel: registers, spills and shared memory from the compiler, and occupancy.

The kernel is compiled in a second process; see `simulator.compiler`.
"""

import math
from dataclasses import asdict, dataclass, field

from moe_numba.simulator.compiler import process
from moe_numba.simulator.profiler.occupancy import Occupancy, occupancy

_REGISTERS_PER_BLOCK = 65536


@dataclass
class StaticProfile:
    """What the compiler makes of a kernel for one GPU.

    `registers` and the numbers after it are None where the kernel could not be compiled; `reason` then says why.
    `sass_lines` maps "file:line" to the number of SASS instructions of that line.
    """

    gpu: str
    launch_bounds: object = None
    registers: int | None = None
    stack_bytes: int | None = None
    spilled_bytes: int | None = None
    static_shared_bytes: int | None = None
    sass_lines: dict | None = None
    reason: str | None = None
    setmaxnreg_registers: int | None = None  # that a block's warpgroups have after setmaxnreg, of 65,536
    occupancy: list[Occupancy] = field(default_factory=list)  # of each launch

    def estimated_instructions(self, kernel):
        """Estimate the warp-level instructions of all launches: SASS instructions of a line times its executions.

        Lines before the first one that runs (the `def`) count once per warp. Too low or too high where the compiler
        unrolls a loop, replaces a branch by predicates or moves code out of a loop. None without line information.
        """
        if not self.sass_lines:
            return None
        executions = {f"{line.file}:{line.line}": line.executions for line in kernel.lines}
        warps = sum(launch["warps"] for launch in kernel.launches)
        first = min(line.line for line in kernel.lines if line.file == kernel.file and line.function == kernel.name)
        before = {f"{kernel.file}:{number}" for number in range(first)}
        return sum(
            count * executions.get(site, warps if site in before else 0) for site, count in self.sass_lines.items()
        )

    def as_dict(self):
        """Return the values as built-in types."""
        return asdict(self) | {"occupancy": [o._asdict() for o in self.occupancy]}

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
