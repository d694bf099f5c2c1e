"""Measures imports, `warm_up` and first calls, each in new processes: rows of the topic `first_call`.

All times are of the host's clock, from a point at which the process has imported what it needs and has made its inputs
until the GPU has finished. The cache of machine code is a folder that was empty before, or that `warm_up` has filled.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch

import moe_numba
from moe_numba import simulator
from moe_numba.course.bench import Stats, records
from moe_numba.course.bench.records.kernel_hash import describe
from moe_numba.course.bench.timing import launched_by, shuffled_rounds
from moe_numba.course.bench.timing.fresh_process import call_in_process, environment
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.moe_layer import MoELayer, reference
from moe_numba.moe_layer.router import router_logits
from moe_numba.runtime.compile_calls import default_processes
from moe_numba.runtime.cubin_cache import FOLDER

TOKENS, REPEATS = (1, 64, 4096), 2
CONFIG = dict(model="Qwen3-30B-A3B", num_experts=128, hidden=2048, intermediate=768, topk=8)
SIZES = CONFIG["num_experts"], CONFIG["hidden"], CONFIG["intermediate"], CONFIG["topk"]
FLOOR, FUNCTIONS = "torch and numba.cuda", "final, with fused_experts"
IMPORTS = {  # step -> code
    "torch": "import torch",
    "numba.cuda": "from numba import cuda",
    FLOOR: "import torch; from numba import cuda",
    "final": "import moe_numba",
    FUNCTIONS: "import moe_numba; moe_numba.fused_experts",
}
CLOCK = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
EMPTY, FULL = "empty", "full"  # caches of machine code
BOUND, CHECKED = 1e-2, 16  # relative error, and the first tokens that are compared with the reference
DEVICE = "cpu" if simulator.ENABLED else "cuda"


def measure(token_counts=TOKENS, repeats=REPEATS, sizes=SIZES):
    """Return the rows of the record."""
    rows = [*measure_imports(repeats)]
    with tempfile.TemporaryDirectory() as folder:
        full = os.path.join(folder, FULL)
        cold = [call_in_new_cache(partial(call_in_process, time_warm_up, sizes)) for _ in range(repeats - 1)]
        cold.append(call_in_process(time_warm_up, sizes, **{FOLDER: full}))
        again = [call_in_process(time_warm_up, sizes, **{FOLDER: full}) for _ in range(repeats)]
        for cache, found in ((EMPTY, cold), (FULL, again)):
            more = dict(processes=default_processes(), kernels_compiled=found[0]["count"])
            rows.append(_row("warm_up", cache, found, **more))
        for tokens in token_counts:
            call = partial(call_in_process, time_first_call, tokens, sizes)
            empty = [call_in_new_cache(call) for _ in range(repeats)]
            for cache, found in ((EMPTY, empty), (FULL, [call(**{FOLDER: full}) for _ in range(repeats)])):
                rows.append(
                    _row("first call", cache, found, size=dict(tokens=tokens), kernels=found[0]["kernels"] or None)
                )
            _report_progress(f"{tokens} tokens")
    return rows


def _report_progress(what):
    print(f"first_call: {what}", file=sys.stderr, flush=True)


def _row(operation, cache, found, **more):
    stats = Stats.of([result["us"] for result in found])
    return records.row(
        "final", config=CONFIG | dict(cache=cache), dtype="bf16", call=stats, operation=operation, **more
    )


def call_in_new_cache(call: Callable) -> dict:
    """Return ``call(MOE_NUMBA_CACHE=...)`` with a folder that is empty, and removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return call(**{FOLDER: os.path.join(folder, EMPTY)})


def measure_imports(repeats=REPEATS):
    """Yield the rows of imports."""
    for code in IMPORTS.values():  # brings all files into the page cache
        import_us(code)
    samples: dict[str, list[float]] = {step: [] for step in IMPORTS}
    for step in shuffled_rounds(IMPORTS, repeats):
        samples[step].append(import_us(IMPORTS[step]))
    times = {step: Stats.of(values) for step, values in samples.items()}
    floors = {FUNCTIONS: times[FLOOR].median}
    for step, stats in times.items():
        yield records.row(step, call=stats, operation="import", floor_us=floors.get(step))
    _report_progress("imports")


def import_us(code: str) -> float:
    """Return the microseconds that a new process takes for some imports."""
    given = environment()
    given.pop("PYTHONDONTWRITEBYTECODE", None)  # as an installed package, which is compiled to bytecode once
    done = subprocess.run([sys.executable, "-c", CLOCK.format(code)], capture_output=True, text=True, env=given)
    if done.returncode:
        raise RuntimeError(f"{code} failed:\n{done.stderr[-3000:]}")
    return 1e6 * float(done.stdout)


# In the new processes


def make_layer(sizes):
    """Return a layer with random weights."""
    torch.manual_seed(0)
    layer = MoELayer(*sizes, scoring="softmax", device=DEVICE)
    for parameter in layer.parameters():
        parameter.normal_(std=0.05)
    return layer


@torch.no_grad()
def time_warm_up(sizes):
    """Return the time of `warm_up` for all numbers of tokens, and its number of kernels."""
    layer = make_layer(sizes)
    _synchronize()
    start = time.perf_counter()
    count = moe_numba.warm_up(layer, progress=False)
    _synchronize()
    return dict(us=1e6 * (time.perf_counter() - start), count=count)


@torch.no_grad()
def time_first_call(tokens, sizes):
    """Return the time of the first call of a layer, and its kernels; the result is checked afterwards."""
    layer = make_layer(sizes)
    x = torch.randn(tokens, layer.router_weight.shape[1], device=DEVICE).bfloat16()
    logits = router_logits(x, layer.router_weight)  # loads torch's GEMM, which is not this package's
    results, times = [], []

    def call():
        start = time.perf_counter()
        results.append(layer(x))
        _synchronize()
        times.append(time.perf_counter() - start)

    _synchronize()
    kernels = launched_by(call)
    few, experts = slice(CHECKED), layer.experts
    weights, ids = moe_numba.biased_grouped_topk(logits[few], None, layer.topk, scoring="softmax")
    wanted = reference.fused_experts(x[few], experts.w13, experts.w2, weights, ids)
    if fault := mismatch(results[0][few], wanted, BOUND):
        raise AssertionError(f"{tokens} tokens: {fault}")
    return dict(us=1e6 * times[0], kernels=describe(kernels))


def _synchronize():
    if not simulator.ENABLED:
        torch.cuda.synchronize()
