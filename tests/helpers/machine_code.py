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
