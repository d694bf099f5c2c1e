"""``python -m moe_numba doctor``: report what this machine can run, by compiling and launching a small kernel.

The trial runs in its own process: the simulator hides the compiler from the process in which it is on, and a driver
that fails to load must not end this process.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

LABEL = 12  # width of the first column, in characters
NEWEST_EXTRA = 13  # cu13 installs the compiler of CUDA 13, for drivers of CUDA 13 or newer; cu12 is for older ones


def report() -> list[str]:
    """Return the lines that ``python -m moe_numba doctor`` prints."""
    from moe_numba import simulator
    from moe_numba.course.bench import records

    found = probe()
    lines = [("GPU", _gpu_line(found, simulator.REASON if simulator.ENABLED else None))]
    names = [f"{name} {version}" for name, version in records.versions().items()]
    lines.append(("versions", ", ".join(names)))
    if problem := _compiler_problem(found):
        lines.append(("compiler", problem))
    lines.append(("sm_90a", _sm_90a_line(found)))
    lines += [("runs" if i == 0 else "", line) for i, line in enumerate(_consequences(found, simulator.ENABLED))]
    lines.append(("results", _results_line()))
    return [f"{label:<{LABEL}}{text}" for label, text in lines]


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
    """Count the recorded results that are older than the code."""
    from moe_numba.course.bench import sources

    try:
        found = len(list(sources.stale_results()))
    except FileNotFoundError:
        return "not installed: the records of measurements are part of the repository, not of the package"
    return f"{found} are older than the code; `make stale` lists them" if found else "all match the code"


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


def _sm_90a_line(found):
    if "cubin_bytes" not in found:
        return f"the compiler fails: {found['error']}"
    text = f"the compiler works (wgmma.fence, {found['cubin_bytes']} bytes of machine code)"
    if "launched" not in found:
        return f"{text}; not launched: {found.get('error') or 'needs a GPU of compute capability 9.0'}"
    return f"{text}; launched: {'correct' if found['launched'] else 'WRONG'} result"


def _consequences(found, simulated):
    """Yield what can run here, a sentence each."""
    hopper = bool(found.get("launched"))
    if simulated or not found["gpus"]:
        yield "notebooks and tests run in the simulator at small sizes; results are checked, times are not measured"
        yield "notebooks show times recorded on an H200 (docs/results); bench needs a GPU"
    elif hopper:
        yield "all kernels, bench, pytest -m gpu" + (" and -m multigpu" if len(found["gpus"]) > 1 else "")
    else:
        yield "kernels without Hopper instructions, and their benchmarks"
        yield "grouped_gemm and other TMA or wgmma kernels refuse this GPU; MOE_NUMBA_SIMULATE=1 simulates them"
    if "cubin_bytes" in found:
        yield "tests that compile for sm_90a (registers, instructions)"
    else:
        yield "tests that compile for sm_90a cannot run"


def _trial():
    """Compile and link a kernel for sm_90a, and launch it on a Hopper GPU if there is one.

    Returns a dict with ``gpus`` and, as far as the trial came, the CUDA versions of ``driver`` and ``compiler``,
    ``torch``, ``cubin_bytes``, ``launched`` and ``error``.
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
        code, entry = _compile()
        found["cubin_bytes"] = len(code.code)
        hopper = [i for i, (_, capability) in enumerate(found["gpus"]) if capability == (9, 0)]
        if hopper:
            cuda.select_device(hopper[0])
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


def _compile():
    """Compile a kernel with an instruction that only sm_90a has to machine code; PTX alone would prove nothing."""
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

    def kernel(out):
        wgmma_fence()
        if cuda.threadIdx.x == 0:
            out[0] = 90

    ptx, _ = cuda.compile_ptx(kernel, types.void(types.CPointer(types.int32)), cc=(9, 0, "a"))
    entry = ptx.split(".visible .entry ")[1].split("(")[0].strip()
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch="sm_90a"))
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
