"""The compute capability that code is generated for and that the simulator simulates.

``MOE_NUMBA_ARCH=80`` chooses one below the GPU's own: kernels then take the paths of an sm_80 GPU, and their PTX is
compiled for the GPU that is present. In the simulator, instructions that are newer raise an error.

``MOE_NUMBA_ONLY=90`` is for notebooks about one architecture: on other GPUs, kernels run in the simulator of that one.
"""

import os
from typing import NamedTuple

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


class SMLimits(NamedTuple):
    """What can be resident on one SM, and the most shared memory that one block can opt in to."""

    threads: int
    blocks: int
    shared_kib: int
    shared_kib_of_a_block: int

    def resident_blocks(self, threads, shared_bytes):
        """Return how many blocks with this many threads and bytes of shared memory are resident on one SM.

        Registers may allow fewer; the simulator does not know how many a kernel uses.
        """
        reserved = 1024 * (self.shared_kib - self.shared_kib_of_a_block)  # for the system, of each block
        by_shared = 1024 * self.shared_kib // max(shared_bytes + reserved, 1)
        return min(self.blocks, self.threads // (-(-threads // 32) * 32), by_shared)


# CUDA Programming Guide, "Technical Specifications per Compute Capability".
SM_LIMITS = {
    (7, 5): SMLimits(1024, 16, 64, 64),
    (8, 0): SMLimits(2048, 32, 164, 163),
    (8, 6): SMLimits(1536, 16, 100, 99),
    (8, 7): SMLimits(1536, 16, 164, 163),
    (8, 9): SMLimits(1536, 24, 100, 99),
    (9, 0): SMLimits(2048, 32, 228, 227),
    (10, 0): SMLimits(2048, 32, 228, 227),
    (10, 3): SMLimits(2048, 32, 228, 227),
    (12, 0): SMLimits(1536, 24, 100, 99),
    (12, 1): SMLimits(1536, 24, 100, 99),
}


def simulate(arch):
    """Simulate a GPU of this compute capability, here and in child processes."""
    global SIMULATED
    SIMULATED, os.environ[VARIABLE] = arch, "{}{}".format(*arch)


SIMULATED = only() or requested() or (9, 0)
SM_COUNT = 132  # of the simulated GPU, as of an H200


def refuse(what, needed):
    """Raise: the simulated GPU is older than compute capability ``needed``."""
    major, minor = SIMULATED
    raise UnsupportedInstruction(
        f"{what} needs compute capability {needed[0]}.{needed[1]}; the simulated GPU has {major}.{minor} ({VARIABLE})"
    )
