"""``python -m moe_numba doctor``: what this machine can do, found out by doing it.

The trial runs in a process of its own: the simulator, once it is on, hides the compiler, and a driver that cannot be
loaded should not take this process with it.
"""

import json
import os
import subprocess
import sys

LABEL = 12  # characters, of a line's first column


def report():
    """The lines that ``python -m moe_numba doctor`` prints."""
    from moe_numba import simulator
    from moe_numba.course.bench import records

    found = probe()
    lines = [("GPU", _gpu_line(found, simulator.REASON if simulator.ENABLED else None))]
    names = [f"{name} {version}" for name, version in records.versions().items()]
    lines.append(("versions", ", ".join(names)))
    lines.append(("sm_90a", _sm_90a_line(found)))
    lines += [("runs" if i == 0 else "", line) for i, line in enumerate(_consequences(found, simulator.ENABLED))]
    lines.append(("results", _results_line()))
    return [f"{label:<{LABEL}}{text}" for label, text in lines]


def probe(timeout_s=120):
    """Try in a fresh process what ``_trial`` tries, and give what it found; an ``error`` if it died."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "MOE_NUMBA_SIMULATE": "0"}
    # -P: this file's folder must not come first on the path, where its neighbours would hide other packages.
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"gpus": [], "error": f"the trial took more than {timeout_s} s"}
    except (IndexError, json.JSONDecodeError):  # it died before it could answer
        return {"gpus": [], "error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def _results_line():
    """How many recorded results are older than the code."""
    from moe_numba.course.bench import sources

    try:
        found = len(list(sources.stale_results()))
    except FileNotFoundError:
        return "the recorded results come with a clone of the repository, not with the package"
    return f"{found} are older than the code: `make stale` names them" if found else "none is older than the code"


def _gpu_line(found, why_simulated):
    if not found["gpus"]:
        return "no GPU: simulator"
    text = "; ".join(f"{name}, compute capability {major}.{minor}" for name, (major, minor) in found["gpus"])
    if not found.get("torch", True):
        text += "; torch cannot reach it (is it a build for CPUs?)"
    return text + (f"; the simulator is on all the same ({why_simulated})" if why_simulated else "")


def _sm_90a_line(found):
    if "cubin_bytes" not in found:
        return f"cannot be compiled here: {found['error']}"
    text = f"compiles (a wgmma.fence, {found['cubin_bytes']} bytes of machine code)"
    if "launched" not in found:
        return f"{text}; not launched: {found.get('error') or 'it needs a GPU of compute capability 9.0'}"
    return f"{text}; launched, and gave {'the right' if found['launched'] else 'a WRONG'} answer"


def _consequences(found, simulated):
    """What will therefore run, in sentences."""
    hopper = bool(found.get("launched"))
    if simulated or not found["gpus"]:
        yield "notebooks and tests run in the simulator, on small sizes: right results, no times"
        yield "times and figures are those recorded on an H200 (docs/results); bench needs a GPU"
    elif hopper:
        yield "everything: all kernels, bench, pytest -m gpu" + (" and -m multigpu" if len(found["gpus"]) > 1 else "")
    else:
        yield "the kernels that need no Hopper instruction, and bench for them"
        yield "TMA and wgmma kernels (grouped_gemm) refuse this GPU; MOE_NUMBA_SIMULATE=1 runs them in the simulator"
    if "cubin_bytes" in found:
        yield "every kernel can be compiled for sm_90a, so the tests of registers and instructions run too"
    else:
        yield "the tests that compile for sm_90a cannot run"


def _trial():
    """Compile and link for sm_90a; launch where a GPU allows. Gives gpus, torch, cubin_bytes, launched, error."""
    found = {"gpus": []}
    try:
        import numpy as np
        from numba import cuda

        if cuda.is_available():
            # A GPU's attributes are there without making a context on it.
            found["gpus"] = [(_text(gpu.name), tuple(gpu.compute_capability)) for gpu in cuda.list_devices()]
            import torch

            found["torch"] = torch.cuda.is_available()
        code, entry = _compile()
        found["cubin_bytes"] = len(code.code)
        hopper = [i for i, (_, capability) in enumerate(found["gpus"]) if capability == (9, 0)]
        if hopper:
            cuda.select_device(hopper[0])
            found["launched"] = _launch(code, entry, np.zeros(1, np.int32))
    except Exception as error:  # whatever fails, the report says so
        lines = str(error).strip().splitlines()
        found["error"] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return found


def _compile():
    """A kernel with an instruction that only sm_90a has, as machine code: PTX alone would not prove anything."""
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
    """Whether the kernel wrote what it should."""
    from numba import cuda

    try:
        from cuda.core import Device, LaunchConfig, launch
    except ImportError:
        from cuda.core.experimental import Device, LaunchConfig, launch

    on_gpu = cuda.to_device(out)  # makes the primary context, which cuda.core shares
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
