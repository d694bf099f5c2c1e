"""Properties of machine code that hold with each compiler, and the version of the one that there is."""

from cuda.bindings import nvjitlink


def is_dependent_launch(report):
    """Return whether a kernel has a griddepcontrol.wait and launch_dependents, by their names in SASS.

    Compilers may make two copies of a kernel's end, each with a trigger: that of CUDA 13.0 does in the gate. A path for
    warps without a token may wait by itself.
    """
    return 1 <= report.count("ACQBULK") <= 2 and 1 <= report.count("PREEXIT") <= 2


def compiler_before(*cuda_version):
    """Return whether the compiler is older than that of a CUDA version, such as ``compiler_before(13, 5)``."""
    return nvjitlink.version() < cuda_version


def main_loops(code):
    """Return the instructions of each innermost loop with a wgmma, as sets of names; there is one at least."""
    opcodes = [opcode.split(".")[0] for opcode in code.opcodes]
    inner = [(a, b) for a, b in code.loops if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in code.loops)]
    found = [body for first, last in inner if {"QGMMA", "HGMMA"} & (body := set(opcodes[first : last + 1]))]
    assert found
    return found
