"""``python -m moe_numba doctor``: report what this machine can run, by compiling and launching a small kernel.

``--arch 75`` prints what runs on a GPU of compute capability 7.5 instead; ``MOE_NUMBA_ARCH=75`` makes kernels run so.

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

LABEL = 12  # width of the first column, in characters
_HOPPER = (9, 0)
NEWEST_EXTRA = 13  # cu13 installs the compiler of CUDA 13, for drivers of CUDA 13 or newer; cu12 is for older ones


def report(arch: tuple[int, int] | None = None) -> list[str]:
    """Return the lines that ``python -m moe_numba doctor`` prints: for compute capability ``arch``, or this machine."""
    if arch is not None:
        return tables(arch, arch)
    from moe_numba import simulator
    from moe_numba.course.bench import records
    from moe_numba.simulator.capability import requested

    found = probe()
    lines = [("GPU", _gpu_line(found, simulator.REASON if simulator.ENABLED else None))]
    names = [f"{name} {version}" for name, version in records.versions().items()]
    lines.append(("versions", ", ".join(names)))
    if problem := _compiler_problem(found):
        lines.append(("compiler", problem))
    lines.append((found.get("arch", "sm_90a"), _compiler_line(found)))
    lines += [("runs" if i == 0 else "", line) for i, line in enumerate(_consequences(found, simulator.ENABLED))]
    lines.append(("results", _results_line()))
    printed = [f"{label:<{LABEL}}{text}" for label, text in lines]
    if found.get("launched") and not simulator.ENABLED:
        own = tuple(found["gpus"][0][1])
        printed += ["", *tables(requested() or own, own)]
    return printed


def tables(arch: tuple[int, int], own: tuple[int, int]) -> list[str]:
    """Return which functions and notebooks run, and how, as lines of text.

    ``arch`` is the compute capability that code is generated for, and ``own`` that of the GPU.
    """
    from moe_numba.course.pages import gpu_support
    from moe_numba.runtime.device import gpu_like

    gpu = gpu_like(arch)._replace(hardware_capability=own)
    lines = ["compute capability {}.{}".format(*arch)]
    for title, rows in (("function", gpu_support.functions(gpu)), ("notebook", gpu_support.notebooks(gpu))):
        width = 2 + max(len(row.name) for row in rows)
        lines += ["", f"{title:<{width}}runs  path"]
        lines += [f"{row.name:<{width}}{'yes' if row.runs else 'no':<6}{row.path}" for row in rows]
    return lines


def probe(timeout_s: float = 120) -> dict:
    """Run ``_trial`` in a new process and return its findings, with an ``error`` if the process died."""
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "MOE_NUMBA_SIMULATE": "0", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "moe_numba.doctor"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"gpus": [], "error": f"the trial did not finish within {timeout_s} s"}
    except (IndexError, json.JSONDecodeError):  # the process died before it printed a result
        return {"gpus": [], "error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def _results_line():
    """Count the records that were measured with other kernels than the present ones."""
    from moe_numba.course.bench.records import staleness

    try:
        return staleness.summary()
    except FileNotFoundError:
        return "not installed: the records of measurements are part of the repository, not of the package"


def _gpu_line(found, why_simulated):
    if not found["gpus"]:
        return "none: kernels run in the simulator"
    text = "; ".join(f"{name}, compute capability {major}.{minor}" for name, (major, minor) in found["gpus"])
    if not found.get("torch", True):
        text += "; torch cannot use it (is this a CPU build of torch, or one for a newer CUDA than the driver's?)"
    return text + (f"; kernels run in the simulator nevertheless ({why_simulated})" if why_simulated else "")


def _compiler_problem(found):
    """Return which extra to install if the compiler is missing, or newer than the driver; otherwise None."""
    driver, compiler = found.get("driver"), found.get("compiler")
    if not compiler and "cubin_bytes" not in found:
        extra = f"cu{min(driver[0], NEWEST_EXTRA)}" if driver else "cu13]' (driver 580 or newer) or 'moe_numba[cu12"
        return f"none is installed: pip install 'moe_numba[{extra}]'"
    if driver and compiler and driver[0] < compiler[0]:
        return (
            f"for CUDA {compiler[0]}.{compiler[1]}, but the driver supports CUDA {driver[0]}.{driver[1]}: "
            f"pip install 'moe_numba[cu{driver[0]}]' in a new environment"
        )
    return None


def _compiler_line(found):
    if "cubin_bytes" not in found:
        return f"the compiler fails: {found['error']}"
    text = f"the compiler works ({found['cubin_bytes']} bytes of machine code)"
    if "launched" not in found:
        return f"{text}; not launched: {found.get('error') or 'needs a GPU'}"
    return f"{text}; launched: {'correct' if found['launched'] else 'WRONG'} result"


def _consequences(found, simulated):
    """Yield what can run here, a sentence each."""
    if importlib.util.find_spec("torch") is None:
        yield "the simulator alone: kernels, notebooks and tests need torch: pip install 'moe_numba[kernels]'"
        return
    if simulated or not found["gpus"]:
        yield "notebooks and tests run in the simulator at small sizes; results are checked, times are not measured"
        yield "notebooks show times recorded on an H200 (docs/results); bench needs a GPU"
    elif found.get("launched"):
        multigpu = " and -m multigpu" if len(found["gpus"]) > 1 else ""
        yield f"kernels, bench, pytest -m gpu{multigpu}; the tables below list what this GPU lacks"
    else:
        yield "no kernel; MOE_NUMBA_SIMULATE=1 simulates them"
    if "cubin_bytes" in found:
        yield "tests that compile for sm_90a (registers, instructions)"
    else:
        yield "tests that compile for sm_90a cannot run"


def _trial():
    """Compile and link a kernel for the first GPU, and launch it there; without a GPU, compile it for sm_90a.

    Returns a dict with ``gpus`` and, as far as the trial came, the CUDA versions of ``driver`` and ``compiler``,
    ``torch``, ``arch``, ``cubin_bytes``, ``launched`` and ``error``.
    """
    found = {"gpus": [], **_cuda_versions()}
    try:
        import numpy as np
        from numba import cuda

        if cuda.is_available():
            # Reading a GPU's attributes creates no context.
            found["gpus"] = [(_text(gpu.name), tuple(gpu.compute_capability)) for gpu in cuda.list_devices()]
            import torch

            found["torch"] = torch.cuda.is_available()
        capability = found["gpus"][0][1] if found["gpus"] else _HOPPER
        arch = (*_HOPPER, "a") if capability == _HOPPER else capability
        found["arch"] = "sm_" + "".join(map(str, arch))
        code, entry = _compile(arch)
        found["cubin_bytes"] = len(code.code)
        if found["gpus"]:
            cuda.select_device(0)
            found["launched"] = _launch(code, entry, np.zeros(1, np.int32))
    except Exception as error:  # the report shows whatever failed
        lines = str(error).strip().splitlines()
        found["error"] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return found


def _cuda_versions():
    """Return the CUDA versions, (major, minor), of the ``driver`` and the ``compiler``, each if it is installed."""
    from cuda.bindings import driver, nvrtc

    found = {}
    with contextlib.suppress(RuntimeError):  # what cuda.bindings raises for a missing library
        version = driver.cuDriverGetVersion()[1]
        found["driver"] = version // 1000, version % 1000 // 10
    with contextlib.suppress(RuntimeError):
        found["compiler"] = nvrtc.nvrtcVersion()[1:]
    return found


def _compile(arch):
    """Compile a kernel to machine code; PTX alone would prove nothing. For sm_90a, with an instruction of its own."""
    from llvmlite import ir
    from numba import cuda, types
    from numba.cuda.extending import intrinsic

    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode
    except ImportError:  # cuda-core before 1.0
        from cuda.core.experimental import Linker, LinkerOptions, ObjectCode

    @intrinsic
    def wgmma_fence(typingctx):
        def codegen(context, builder, signature, arguments):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(ir.InlineAsm(kind, "wgmma.fence.sync.aligned;", "~{memory}", side_effect=True), [])
            return context.get_dummy_value()

        return types.void(), codegen

    is_hopper = arch[:2] == _HOPPER

    def kernel(out):
        if is_hopper:
            wgmma_fence()
        if cuda.threadIdx.x == 0:
            out[0] = 90

    ptx, _ = cuda.compile_ptx(kernel, types.void(types.CPointer(types.int32)), cc=arch)
    entry = ptx.split(".visible .entry ")[1].split("(")[0].strip()
    options = LinkerOptions(arch="sm_" + "".join(map(str, arch)))
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    return linker.link("cubin"), entry


def _launch(code, entry, out):
    """Launch the kernel; return whether it wrote the expected value."""
    from numba import cuda

    try:
        from cuda.core import Device, LaunchConfig, launch
    except ImportError:
        from cuda.core.experimental import Device, LaunchConfig, launch

    on_gpu = cuda.to_device(out)  # creates the primary context, which cuda.core shares
    device = Device(cuda.get_current_device().id)
    device.set_current()
    stream = device.create_stream()
    launch(stream, LaunchConfig(grid=1, block=128), code.get_kernel(entry), on_gpu.device_ctypes_pointer.value)
    stream.sync()
    return int(on_gpu.copy_to_host()[0]) == 90


def _text(name):
    return name.decode() if isinstance(name, bytes) else str(name)


if __name__ == "__main__":
    print(json.dumps(_trial()))
