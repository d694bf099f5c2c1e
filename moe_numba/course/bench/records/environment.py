"""Describes the machine of a measurement: GPU, driver, versions, commit and date."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from moe_numba import simulator
from moe_numba.runtime import compilers
from moe_numba.runtime.compilers import version

SIMULATOR = "simulator"


def folder(gpu: str) -> str:
    """Return the name of a GPU's folder in ``docs/results``: "h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def environment() -> dict:
    """Return GPU, driver, versions, commit and date (UTC) of this process; without a GPU ``gpu`` is "simulator"."""
    return {
        "gpu": (not simulator.ENABLED and _gpu()) or SIMULATOR,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none",
        "versions": versions(),
        # GIT_COMMIT names the commit on machines that have the files without the history.
        "commit": os.environ.get("GIT_COMMIT")
        or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")
        or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def versions() -> dict[str, str]:
    """Return the versions that may affect a kernel's speed, of the packages that are installed."""
    # Numba compiles with the toolkit's wheels if they are installed; torch reports its own toolkit otherwise.
    cuda = version("cuda-toolkit") or version("nvidia-nvvm") or _torch_cuda()
    return installed() | ({"cuda": cuda} if cuda else {})


def installed() -> dict[str, str]:
    """Return the versions of Python and of the packages that kernels depend on, without importing any."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numba", "numba-cuda", "cuda-core", "numpy"):
        found[name] = version(name)
    if compilers.chosen() == compilers.MLIR:  # it may have compiled elsewhere
        found["numba-cuda-mlir"] = version("numba-cuda-mlir") or "cubins made elsewhere"
    found["cupy"] = version("cupy-cuda13x") or version("cupy-cuda12x") or version("cupy")
    return {name: version for name, version in found.items() if version}


def _torch_cuda():
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def _gpu():
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _output(*command):
    """Return the first line that a program prints, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None
