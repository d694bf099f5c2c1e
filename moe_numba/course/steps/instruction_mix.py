"""Instruction mix of kernels: SASS instructions by class, registers and spills, without a GPU.

The counts are static: an instruction of a loop counts once, however often it is executed. They show what a change of
the source does to the machine code.
"""

import html
from collections.abc import Callable, Iterable, Mapping

from moe_numba.course.steps.simulate import source_with_dependencies
from moe_numba.runtime.sass import MachineCode, compile_apart

# Class -> opcodes, without the modifiers behind their first dot. Uniform instructions begin with U.
CLASSES = {
    "float": "FADD FADD32I FMUL FMUL32I FFMA FFMA32I FMNMX FMNMX3 FSEL FSET FSETP FCHK HADD2 HMUL2 HFMA2 HMNMX2 HSETP2 "
    "HSET2 DADD DMUL DFMA DSETP DMNMX",
    "integer": "IADD IADD3 IMAD IMUL IMNMX VIADD VIADDMNMX VIMNMX VIMNMX3 LEA ISETP ICMP IABS LOP LOP3 PLOP3 SHF SHL "
    "SHR SEL SGXT BMSK BREV FLO POPC PRMT IDP",
    "special function": "MUFU",
    "conversion": "F2F F2FP F2I F2IP I2F I2FP I2I FRND",
    "global load": "LD LDG LDGSTS",
    "global store": "ST STG",
    "atomic": "ATOM ATOMG ATOMS RED REDG",
    "shared load": "LDS LDSM",
    "shared store": "STS STSM",
    "local memory": "LDL STL",
    "constant load": "LDC ULDC LDCU",
    "shuffle, vote, redux": "SHFL VOTE VOTEU REDUX MATCH",
    "tensor core": "HMMA IMMA QMMA DMMA HGMMA QGMMA IGMMA WARPGROUP WARPGROUPSET",
    "TMA, mbarrier": "UBLKCP UBLKRED UTMALDG UTMASTG UTMAREDG UTMACCTL UTMACMDFLUSH UTMAPF SYNCS FENCE",
    "branch": "BRA BRX BRXU JMP BSSY BSYNC BREAK CALL RET EXIT WARPSYNC ENDCOLLECTIVE YIELD NANOSLEEP KILL BPT",
    "barrier, fence": "BAR B2R MEMBAR ERRBAR CCTL DEPBAR LDGDEPBAR ACQBULK PREEXIT ELECT UCGABAR_ARV "
    "UCGABAR_WAIT CGAERRBAR",
    "move": "MOV MOV32I R2P P2R S2R S2UR CS2R R2UR UMOV",
}
_CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}
_PADDING = "NOP"


def classify(code: MachineCode) -> dict[str, int]:
    """Count a kernel's instructions by class; classes without any are left out, unknown opcodes are "other".

    Padding does not count. Raises ``ValueError`` if nvdisasm was missing when the kernel was compiled.
    """
    if code.opcodes is None:
        raise ValueError("the instructions are unknown: install nvidia-cuda-nvdisasm, or the CUDA toolkit")
    counts = dict.fromkeys([*CLASSES, "uniform", "other"], 0)
    for opcode in (full.partition(".")[0] for full in code.opcodes):
        if opcode != _PADDING:
            counts[_CLASS_OF.get(opcode) or ("uniform" if opcode.startswith("U") else "other")] += 1
    return {name: count for name, count in counts.items() if count}


class InstructionMix:
    """A table of kernels and their instructions by class: ``str`` is text, notebooks display HTML."""

    def __init__(self, codes: Mapping[str, MachineCode]):
        self.codes = dict(codes)
        self.counts = {name: classify(code) for name, code in self.codes.items()}

    def __getitem__(self, name: str) -> dict[str, int]:
        return self.counts[name]

    def rows(self) -> list[tuple]:
        """Return the rows of the table: a name, and a number for each kernel."""
        found = [name for name in [*CLASSES, "uniform", "other"] if any(name in c for c in self.counts.values())]
        rows = [(name, *(counts.get(name, 0) for counts in self.counts.values())) for name in found]
        rows.append(("instructions", *(sum(counts.values()) for counts in self.counts.values())))
        rows.append(("registers per thread", *(code.registers for code in self.codes.values())))
        rows.append(("stack bytes per thread", *(code.stack_bytes for code in self.codes.values())))
        rows.append(("spilled bytes", *(code.spilled_bytes for code in self.codes.values())))
        return rows

    def __str__(self):
        table = [("", *self.counts), *((name, *map(str, values)) for name, *values in self.rows())]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = []
        for name, *values in table:
            numbers = "  ".join(value.rjust(width) for value, width in zip(values, widths[1:]))
            lines.append(f"{name:<{widths[0]}}  {numbers}".rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self):
        head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *self.counts))
        body = "".join(
            f"<tr><th style='text-align: left'>{name}</th>{''.join(f'<td>{value:,}</td>' for value in values)}</tr>"
            for name, *values in self.rows()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def instruction_mix(
    kernels: Mapping[str, tuple], functions: Iterable[Callable] = (), arch: tuple | None = None
) -> InstructionMix:
    """Compile kernels and count their instructions by class.

    Parameters
    ----------
    kernels : dict
        Name -> (kernel, signature) or (kernel, signature, threads per CTA). Instead of a kernel, an expression such as
        ``"make_kernel(8)"`` may be given, if ``functions`` has what it names. For signatures see `compile_kernel`.
    functions : iterable of callables
    arch : tuple, optional
        Compute capability, such as ``(8, 0)``; that of an H200 by default.
    """
    requests, needed = {}, list(functions)
    for name, (kernel, signature, *threads) in kernels.items():
        if not isinstance(kernel, str):
            needed.append(kernel)
            kernel = kernel.__name__
        requests[name] = (kernel, signature, threads[0] if threads else None, False)
    return InstructionMix(compile_apart(source_with_dependencies(needed), requests, arch))
