"""``python -m moe_numba doctor``: report what this machine can run, by compiling and launching a small kernel.

``--arch 75`` lists what runs on a GPU of compute capability 7.5 instead; ``MOE_NUMBA_ARCH=75`` makes kernels run so.

The trial runs in its own process: the simulator hides the compiler from the process in which it is on, and a driver
that fails to load must not end this process.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from moe_numba import __version__
from moe_numba.runtime import compilers

LABEL = 12  # width of the first column, in characters
_HOPPER = (9, 0)
NEWEST_EXTRA = 13  # cu13 installs the compiler of CUDA 13, for drivers of CUDA 13 or newer; cu12 is for older ones


def report(arch: tuple[int, int] | None = None) -> list[str]:
    """Return the lines that ``python -m moe_numba doctor`` prints: for compute capability ``arch``, or this machine."""
    return describe(examine(arch))


def examine(arch: tuple[int, int] | None = None) -> dict:
    """Return the findings, of which `describe` makes lines and ``--json`` a document.

    Parameters
    ----------
    arch : tuple, optional
        List what runs on GPUs of this compute capability, instead of trying this machine.

    Returns
    -------
    dict
        ``status`` is where kernels run: ``"gpu"``, ``"simulator"``, or ``"broken"``: on the GPU, but they do not.
        ``summary`` says it in a sentence. ``functions`` and ``notebooks`` are tables for a GPU.
    """
    if arch is not None:
        return tables(arch, arch)
    from moe_numba import simulator
    from moe_numba.course.bench.records.environment import installed
    from moe_numba.simulator.capability import requested

    with probing() as trial:
        found = {
            "simulated": simulator.ENABLED and simulator.REASON,
            "compiler": {compilers.MLIR: "numba-cuda-mlir"}.get(compilers.chosen(), compilers.DEFAULT),
            "versions": {"moe_numba": __version__, **installed()},
        }
        if not simulator.ENABLED:
            with contextlib.suppress(ImportError):
                from moe_numba.course.pages import gpu_support  # noqa: F401  imports torch while the trial runs
        found |= trial()
    status, summary = _status(found)
    found = {"status": status, "summary": summary, **found}
    if found["status"] == "gpu":
        own = tuple(found["gpus"][0][1])
        found |= tables(requested() or own, own)
    return found


def tables(arch: tuple[int, int], own: tuple[int, int]) -> dict:
    """Return which functions and notebooks run, and how.

    ``arch`` is the compute capability that code is generated for, and ``own`` that of the GPU.
    """
    from moe_numba.course.pages import gpu_support
    from moe_numba.runtime.device import gpu_like

    gpu = gpu_like(arch)._replace(hardware_capability=own)
    return {
        "compute_capability": "{}.{}".format(*arch),
        "functions": [row._asdict() for row in gpu_support.functions(gpu)],
        "notebooks": [row._asdict() for row in gpu_support.notebooks(gpu)],
    }


def describe(found: dict) -> list[str]:
    """Return the findings as lines, the essential one first."""
    lines = []
    if "summary" in found:
        lines = [found["summary"], ""]
        details = {
            "GPU": "; ".join(f"{name}, compute capability {a}.{b}" for name, (a, b) in found["gpus"]) or "none",
            "compiler": _compiler_line(found),
            "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        }
        lines += [f"{label:<{LABEL}}{text}" for label, text in details.items()]
        lines += [f"{'runs' if i == 0 else '':<{LABEL}}{line}" for i, line in enumerate(_consequences(found))]
    if "functions" in found:
        lines += [""] * bool(lines) + [f"compute capability {found['compute_capability']}"]
        for title in ("functions", "notebooks"):
            rows, label = found[title], title.removesuffix("s")
            width = 2 + max(len(row["name"]) for row in rows)
            lines += ["", f"{label:<{width}}runs  path"]
            lines += [f"{row['name']:<{width}}{'yes' if row['runs'] else 'no':<6}{row['path']}" for row in rows]
    return lines


@contextlib.contextmanager
def probing(timeout_s: float = 120):
    """Run ``_trial`` in a new process, and yield a function that waits for its findings.

    They have an ``error`` if the process died.
    """
    if sys.platform == "darwin":
        yield lambda: {"gpus": []}
        return
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "MOE_NUMBA_SIMULATE": "0", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "moe_numba.doctor"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def findings():
        try:
            out, errors = process.communicate(timeout=timeout_s)
            return json.loads(out.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return {"gpus": [], "error": f"the trial did not finish within {timeout_s} s"}
        except (IndexError, json.JSONDecodeError):  # the process died before it printed a result
            return {"gpus": [], "error": (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}

    try:
        yield findings
    finally:
        process.kill()  # it has ended, unless its time is up
        process.communicate()


def _status(found):
    """Return where kernels run, and a sentence that says so and what to do if they do not."""
    if importlib.util.find_spec("torch") is None:
        install = "pip install 'moe_numba[kernels]'"
        return "simulator", f"The simulator runs programs; this package's own kernels also need torch: {install}"
    if not found["gpus"] and found["simulated"]:
        return "simulator", "No GPU was found: kernels run in the simulator, at small sizes and without times"
    if found["simulated"]:
        return "simulator", f"Kernels run in the simulator, although there is a GPU: {found['simulated']}"
    if not found["gpus"]:
        why, fix = "No GPU was found, and the simulator is off", "MOE_NUMBA_SIMULATE=1 turns it on"
    elif problem := _compiler_problem(found):
        why, fix = "There is a GPU, but kernels do not run on it", problem
    elif "cubin_bytes" not in found:
        why, fix = "There is a GPU, but no kernel can be compiled for it", found["error"]
    elif not found["torch"]:
        fix = "is this a CPU build of torch, or one for a newer CUDA than the driver's?"
        why = "There is a GPU, but torch cannot use it"
    elif not found.get("launched"):
        why = "There is a GPU, but a trial kernel fails on it"
        fix = found.get("error") or "its result is WRONG"
    else:
        return "gpu", f"Kernels run on the GPU: {found['gpus'][0][0]}"
    return "broken", f"{why}: {fix}"


def _compiler_problem(found):
    """Return which extra to install if the compiler is missing, or newer than the driver; otherwise None."""
    if sys.platform == "darwin":
        return "there is no CUDA for macOS"
    driver, toolkit = found.get("driver"), found.get("toolkit")
    if not toolkit and "cubin_bytes" not in found:
        extra = f"cu{min(driver[0], NEWEST_EXTRA)}" if driver else "cu13]' (driver 580 or newer) or 'moe_numba[cu12"
        return f"CUDA's compiler is not installed: pip install 'moe_numba[{extra}]'"
    if driver and toolkit and driver[0] < toolkit[0]:
        versions = "{}.{}, but the driver supports CUDA {}.{}".format(*toolkit, *driver)
        return f"the compiler is for CUDA {versions}: pip install 'moe_numba[cu{driver[0]}]' in a new environment"
    return None


def _compiler_line(found):
    """Name the compiler in use and what the trial made with it."""
    text = found["compiler"]
    if text != compilers.DEFAULT:
        text += f" ({compilers.VARIABLE})"
    if "cubin_bytes" not in found:
        return f"{text}; {_compiler_problem(found) or found['error']}"
    text += ", CUDA {}.{}".format(*found["toolkit"]) if "toolkit" in found else ""
    text += f"; {found['arch']}: {found['cubin_bytes']} bytes of machine code"
    if "launched" in found:
        return f"{text}; launched: the result is {'right' if found['launched'] else 'WRONG'}"
    return f"{text}; not launched: {found.get('error') or 'this needs a GPU'}"


def _consequences(found):
    """Yield what can run here, a sentence each."""
    if importlib.util.find_spec("torch") is None:
        yield "python -m moe_numba.simulator run PROGRAM"
    elif found["status"] == "gpu":
        multigpu = " and -m multigpu" if len(found["gpus"]) > 1 else ""
        yield f"kernels, lessons, bench, pytest -m gpu{multigpu}; the tables below list what this GPU lacks"
    elif found["status"] == "simulator":
        yield "kernels, lessons and tests; lessons check results and show times recorded on an H200; bench needs a GPU"
    if "cubin_bytes" in found:
        yield "what looks at machine code, without a GPU, too: some lessons and tests, simulator run --compile"
    elif found["status"] == "simulator":
        yield "nothing that looks at machine code: some lessons and tests, simulator run --compile"


def _trial():
    """Compile and link a kernel for the first GPU, and launch it there; without a GPU, compile it for sm_90a.

    Returns a dict with ``gpus`` and, as far as the trial came, the CUDA versions of ``driver`` and ``toolkit``,
    ``torch``, ``arch``, ``cubin_bytes``, ``launched`` and ``error``.
    """
    found = {"gpus": []}
    try:
        found |= _cuda_versions()
        import numpy as np
        from numba import cuda

        if cuda.is_available():
            # Reading a GPU's attributes creates no context.
            found["gpus"] = [(_text(gpu.name), tuple(gpu.compute_capability)) for gpu in cuda.list_devices()]
        capability = found["gpus"][0][1] if found["gpus"] else _HOPPER
        arch = (*_HOPPER, "a") if capability == _HOPPER else capability
        found["arch"] = "sm_" + "".join(map(str, arch))
        compiled = _compile(arch)
        found["cubin_bytes"] = len(compiled.code.code)
        if found["gpus"]:
            import torch

            found["torch"] = torch.cuda.is_available()
            cuda.select_device(0)
            found["launched"] = _launch(compiled, np.zeros(1, np.int32))
    except Exception as error:  # the report shows whatever failed
        lines = str(error).strip().splitlines() or ["no message"]
        found["error"] = lines[0] if isinstance(error, ImportError) else f"{type(error).__name__}: {lines[0]}"
    return found


def _cuda_versions():
    """Return the CUDA versions, (major, minor), of the ``driver`` and the ``toolkit``, each if it is installed."""
    from cuda.bindings import driver, nvrtc

    found = {}
    with contextlib.suppress(RuntimeError):  # what cuda.bindings raises for a missing library
        version = driver.cuDriverGetVersion()[1]
        found["driver"] = version // 1000, version % 1000 // 10
    with contextlib.suppress(RuntimeError):
        found["toolkit"] = nvrtc.nvrtcVersion()[1:]
    return found


def _compile(arch):
    """Compile a kernel to machine code as the package does, for sm_90a with an instruction that only Hopper has."""
    from numba import cuda

    from moe_numba.ptx.intrinsic import instruction
    from moe_numba.runtime.compile import compile_kernel

    wgmma_fence = instruction("wgmma.fence.sync.aligned;", "void", simulate=lambda: None)
    is_hopper = arch[:2] == _HOPPER

    @cuda.jit
    def kernel(out):
        if is_hopper:
            wgmma_fence()
        if cuda.threadIdx.x == 0:
            out[0] = 90

    return compile_kernel(kernel, ("int32*",), arch=arch)


def _launch(compiled, out):
    """Launch the kernel; return whether it wrote the expected value."""
    from cuda.core import Device, LaunchConfig, launch
    from numba import cuda

    on_gpu = cuda.to_device(out)  # creates the primary context, which cuda.core shares
    device = Device(cuda.get_current_device().id)
    device.set_current()
    stream = device.create_stream()
    kernel = compiled.code.get_kernel(compiled.name)
    launch(stream, LaunchConfig(grid=1, block=128), kernel, on_gpu.device_ctypes_pointer.value)
    stream.sync()
    return int(on_gpu.copy_to_host()[0]) == 90


def _text(name):
    return name.decode() if isinstance(name, bytes) else str(name)


if __name__ == "__main__":
    print(json.dumps(_trial()))
