"""The compute capability that code is generated for and that the simulator simulates.

``MOE_NUMBA_ARCH=80`` chooses one below the GPU's own: kernels then take the paths of an sm_80 GPU, and their PTX is
compiled for the GPU that is present. In the simulator, instructions that are newer raise an error.

``MOE_NUMBA_NEEDS=90`` makes the simulator run the kernels where the GPU, or the one that ``MOE_NUMBA_ARCH`` asks for,
is older than compute capability 9.0; ``90a`` where it has another one. Notebooks set it, so that they run everywhere.
"""

import os

from moe_numba.simulator.core.errors import SimulatorError

VARIABLE, NEEDS = "MOE_NUMBA_ARCH", "MOE_NUMBA_NEEDS"
KNOWN = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


class UnsupportedInstruction(SimulatorError):
    """A kernel executed an instruction that the simulated GPU does not have."""


def requested():
    """Return the compute capability in ``MOE_NUMBA_ARCH`` as (major, minor), or None."""
    text = os.environ.get(VARIABLE, "")
    return _parse(VARIABLE, text, text) if text else None


def _parse(variable, text, digits):
    found = next((c for c in KNOWN if digits == f"{c[0]}{c[1]}"), None)
    if found is None:
        raise RuntimeError(f"{variable} is {text!r}; it must be one of {', '.join(f'{a}{b}' for a, b in KNOWN)}")
    return found


def unmet_need(found):
    """Return in words what ``MOE_NUMBA_NEEDS`` asks for and compute capability ``found`` is not, or None."""
    text = os.environ.get(NEEDS, "")
    if not text:
        return None
    needed = _parse(NEEDS, text, text.removesuffix("a"))
    if found == needed or (found > needed and not text.endswith("a")):
        return None
    which = "{}.{}".format(*needed) + ("" if text.endswith("a") else " or newer")
    return f"{NEEDS} asks for compute capability {which}, not {found[0]}.{found[1]}"


_HOPPER = (9, 0)
SIMULATED = _HOPPER if unmet_need(requested() or _HOPPER) else requested() or _HOPPER


def refuse(what, needed):
    """Raise: the simulated GPU is older than compute capability ``needed``."""
    major, minor = SIMULATED
    raise UnsupportedInstruction(
        f"{what} needs compute capability {needed[0]}.{needed[1]}; the simulated GPU has {major}.{minor} ({VARIABLE})"
    )
