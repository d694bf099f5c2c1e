"""The compute capability that code is generated for and that the simulator simulates.

``MOE_NUMBA_ARCH=80`` chooses one below the GPU's own: kernels then take the paths of an sm_80 GPU, and their PTX is
compiled for the GPU that is present. In the simulator, instructions that are newer raise an error.

``MOE_NUMBA_ONLY=90`` is for notebooks about one architecture: on other GPUs, kernels run in the simulator of that one.
"""

import os

from moe_numba.simulator.core.errors import SimulatorError

VARIABLE, ONLY = "MOE_NUMBA_ARCH", "MOE_NUMBA_ONLY"
KNOWN = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


class UnsupportedInstruction(SimulatorError):
    """A kernel executed an instruction that the simulated GPU does not have."""


def requested():
    """Return the compute capability in ``MOE_NUMBA_ARCH`` as (major, minor), or None."""
    return _read(VARIABLE)


def only():
    """Return the compute capability in ``MOE_NUMBA_ONLY``, or None."""
    return _read(ONLY)


def _read(variable):
    text = os.environ.get(variable, "")
    return parse(text, variable) if text else None


def parse(text, name):
    """Return the compute capability that a text such as "90" names; raise a RuntimeError that names the setting."""
    found = next((c for c in KNOWN if text == f"{c[0]}{c[1]}"), None)
    if found is None:
        raise RuntimeError(f"{name} is {text!r}; it must be one of {', '.join(f'{a}{b}' for a, b in KNOWN)}")
    return found


def simulate(arch):
    """Simulate a GPU of this compute capability, here and in child processes."""
    global SIMULATED
    SIMULATED, os.environ[VARIABLE] = arch, "{}{}".format(*arch)


SIMULATED = only() or requested() or (9, 0)


def refuse(what, needed):
    """Raise: the simulated GPU is older than compute capability ``needed``."""
    major, minor = SIMULATED
    raise UnsupportedInstruction(
        f"{what} needs compute capability {needed[0]}.{needed[1]}; the simulated GPU has {major}.{minor} ({VARIABLE})"
    )
