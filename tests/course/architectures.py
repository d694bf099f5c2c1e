"""Compile the package's kernels for other architectures, without a GPU; report registers and spills.

Kernels come from the cases of ``moe_numba.course.bench.records.fingerprint_cases``: those that the plans
choose on a GPU of the architecture. By default a sample of them; all of them, for all architectures, take about half an
hour of one core::

    MOE_NUMBA_SIMULATE=0 PYTHONPATH=. python tests/course/architectures.py --all
"""

import argparse
import gc
import json
import os
import subprocess
import sys

# PTX is generated for the first and assembled for the others: newer GPUs of the same generation run the same paths.
ARCHITECTURES = {
    (7, 5): [(7, 5)],
    (8, 0): [(8, 0), (8, 6)],
    (8, 9): [(8, 9)],
    (10, 0): [(10, 0, "a")],
    (12, 0): [(12, 0, "a")],
}
SAMPLE = {
    "gate": ("deepseek_v3 1 float32", "kimi_k2 1 bfloat16", "512 experts 1 float16", "1024 experts 1", "dynamic 1")
    + ("deepseek_v3 16384 float32", "shared experts 16384", "softmax 16384", "sqrtsoftplus 1"),
    "align": ("8 slots, 256 experts", "512 slots, 384 experts", "16384 slots, 1024 experts", "8 slots, map")
    + (
        "65536 slots, 8 experts",
        "65536 slots, 384 experts",
        "65536 slots, 1024 experts",
        "512 slots, 8192 experts",
        "512 slots, 100000 experts",
    ),
    "gate_align": ("deepseek_v3 1 float32", "deepseek_v3 64 float32"),
    "shared_experts": None,
    "moe_layer": ("group 8 1", "group 256 64", "group 256 4096", "group 512 4096", "group 256 4096 int64")
    + ("sum 7168 8", "sum 136 9 shared", "silu 7168", "silu 136 limit"),
    "expert_parallel": ("layout 256 8 8", "cast to fp8 7168 bfloat16", "cast to fp8 136 float32")
    + ("cast back 7168 float32", "cast back 136 int32"),
}


def compile_for(arch, everything=False):
    """Compile for one architecture; yield (name, architecture, registers, spilled bytes)."""
    from moe_numba.course.bench.records.fingerprint_cases import CASES
    from moe_numba.runtime import device
    from moe_numba.runtime.compile import assemble, compile_kernel
    from moe_numba.runtime.sass import resources

    gc.disable()  # it takes a tenth of the time, and the process ends soon
    launches, seen = [], set()
    gpu = device.gpu_like(arch)
    device.compile_only(gpu, lambda *launch: launches.append(launch))
    for topic, names in SAMPLE.items():
        for name, call in CASES[topic]():
            if not everything and names and name not in names:
                continue
            launches.clear()
            try:
                call()
            except device.UnsupportedDeviceError as error:
                print(f"{topic}: {name}: {error}", file=sys.stderr)
            for kernel, signature, options in launches:
                key = kernel, signature, tuple(sorted(options.items()))
                if key in seen:
                    continue
                seen.add(key)
                made = compile_kernel(kernel, signature, arch=gpu.arch, launch_bounds=options["launch_bounds"])
                for link_arch in ARCHITECTURES[arch]:
                    linked = made if link_arch == gpu.arch else assemble(made, link_arch)
                    found = resources(linked.log)
                    full_name = f"{topic}: {name}, {kernel.py_func.__name__}"
                    yield full_name, link_arch, found["registers"], found["spilled_bytes"]


def compile_apart(arch):
    """Compile the sample for an architecture in a process of its own; return what ``compile_for`` yields."""
    command = [sys.executable, __file__, "--arch", *map(str, arch)]
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the compiler failed:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", nargs=2, type=int, help="major and minor; all architectures by default")
    parser.add_argument("--all", action="store_true", help="all kernels of the cases")
    options = parser.parse_args()
    if options.arch:
        for report in compile_for(tuple(options.arch), options.all):
            print(json.dumps(report), flush=True)
        return
    for arch in ARCHITECTURES:
        subprocess.run([sys.executable, __file__, "--arch", *map(str, arch), *["--all"] * options.all], check=True)


if __name__ == "__main__":
    main()
