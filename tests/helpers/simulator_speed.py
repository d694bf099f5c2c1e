"""CPU seconds of the simulator's launches on both engines: `python tests/helpers/simulator_speed.py [runs]`.

Runs of the two engines alternate. Only launches are timed, in CPU seconds of this process: other processes may share
the machine's cores.
"""

import moe_numba  # noqa: I001  before Numba

import contextlib
import math
import statistics
import sys
import time

import numpy as np
import torch
from numba import cuda, float32, int32

from moe_numba.expert_parallel import Buffer, Config
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.grouped_gemm import reference
from moe_numba.simulator.core.scheduler import override_settings
from moe_numba.simulator.vector import launch

FULL_MASK = 0xFFFFFFFF


@cuda.jit
def increment(x, y, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i] + float32(1)


@cuda.jit
def reduce_by_shuffles(x, out):
    t = cuda.threadIdx.x
    warp_sums = cuda.shared.array(32, int32)
    value = x[t]
    for d in range(5):
        value += cuda.shfl_xor_sync(FULL_MASK, value, 1 << d)
    if t % 32 == 0:
        warp_sums[t // 32] = value
    cuda.syncthreads()
    if t < 32:
        value = warp_sums[t]
        for d in range(5):
            value += cuda.shfl_xor_sync(FULL_MASK, value, 1 << d)
        if t == 0:
            out[0] = value


@cuda.jit
def tiled_matmul(a, b, c, n):
    a_tile, b_tile = cuda.shared.array((16, 16), float32), cuda.shared.array((16, 16), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * 16 + y, cuda.blockIdx.x * 16 + x
    total = float32(0)
    for k in range(0, n, 16):
        a_tile[y, x] = a[row, k + x]
        b_tile[y, x] = b[k + y, column]
        cuda.syncthreads()
        for j in range(16):
            total += a_tile[y, j] * b_tile[j, x]
        cuda.syncthreads()
    c[row, column] = total


def _matmul(n):
    a, b = np.random.rand(n, n).astype(np.float32), np.random.rand(n, n).astype(np.float32)
    return lambda: tiled_matmul[(n // 16, n // 16), (16, 16)](a, b, np.zeros((n, n), np.float32), n)


def _grouped_gemm():
    lengths = torch.full((4,), 64, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    (x, x_scale), (w, w_scale) = (
        reference.quantise_rows(torch.randn(256, 256)),
        reference.quantise_blocks(torch.randn(4, 256, 256)),
    )
    return lambda: moe_numba.group_gemm_blockwise_fp8(x, w, lengths, starts, x_scale, w_scale)


def _dispatch():
    idx = [torch.randint(0, 8, (24, 2)) for _ in range(4)]
    x = [torch.randn(24, 32).bfloat16() for _ in range(4)]

    def on_rank(transport):
        rank, buffer = transport.rank, Buffer(transport, 1 << 16)
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx[rank], 8)
        buffer.dispatch(
            x[rank],
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_in_rank,
            topk_idx=idx[rank],
            topk_weights=torch.ones(24, 2),
            config=Config(2, 1, 23),
        )
        buffer.destroy()

    return lambda: LocalGroup(4).run(on_rank)


def cases():
    """Return functions to call, by name; those that count for the mean come last."""
    torch.manual_seed(0)
    np.random.seed(0)
    x, ones = np.random.rand(65536).astype(np.float32), np.ones(1024, np.int32)
    logits, bias = torch.randn(64, 256), 0.1 * torch.randn(256)
    ids = torch.randint(0, 64, (256, 8), dtype=torch.int32)
    return {
        "65,536 short threads": lambda: increment[256, 256](x, np.zeros_like(x), len(x) - 5),
        "1,024-thread shuffle reduction": lambda: reduce_by_shuffles[1, 1024](ones, np.zeros(1, np.int32)),
        "gate, 64 tokens": lambda: moe_numba.biased_grouped_topk(logits, bias, 8, True, 8, 4),
        "align, 256 x 8": lambda: moe_numba.moe_align_block_size(ids, 64, 64),
        "tiled matmul, 256 cubed": _matmul(256),
        "grouped GEMM, 256 cubed": _grouped_gemm(),
        "dispatch, four ranks": _dispatch(),
    }


@contextlib.contextmanager
def timed():
    """Yield a list that receives the CPU seconds of each launch."""
    seconds, run = [], launch.run

    def timed_run(*arguments):
        start = time.process_time()
        try:
            run(*arguments)
        finally:
            seconds.append(time.process_time() - start)

    launch.run = timed_run
    try:
        yield seconds
    finally:
        launch.run = run


def measure(function, engine):
    with override_settings(engine=engine), timed() as seconds:
        function()
    return sum(seconds)


def main(runs=3):
    ratios = []
    for name, function in cases().items():
        times = {"threads": [], "vector": []}
        measure(function, "vector")  # transforms the sources
        for _ in range(1 if "matmul" in name else runs):
            for engine, seconds in times.items():
                seconds.append(measure(function, engine))
        threads, vector = (statistics.median(seconds) for seconds in times.values())
        ratios.append(threads / vector)
        print(f"{name:32}{threads:10.4f} s {vector:10.4f} s {threads / vector:8.1f} x", flush=True)
    print(f"geometric mean {math.exp(statistics.mean(map(math.log, ratios))):.1f} x")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
