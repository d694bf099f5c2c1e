"""Time every configuration of the grouped GEMM that fits, to choose those in ``grouped_gemm/config*.py``.

    python -m moe_numba.course.bench.tune_grouped_gemm [--scaling tensor|block|none] [--rows 32 8192] [--silu]

It uses the two GEMMs of a DeepSeek-V3 expert, or with ``--silu`` the first with the activation, and prints the times in
ascending order for each number of rows. A configuration whose result differs from the reference has no time.
"""

import argparse
import itertools
import multiprocessing

import torch

from moe_numba import simulator
from moe_numba.course.bench.timing import kernel_times
from moe_numba.course.bench.topics.grouped_gemm import (
    GROUPS,
    SHAPES,
    lower_bound,
    make_problem,
    random_lengths,
    random_weight,
)
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.config import GemmConfig, SharedMemoryLayout
from moe_numba.grouped_gemm.config_block_scaled import BlockScaledConfig, BlockScaledLayout
from moe_numba.grouped_gemm.launch import compile_config, group_gemm
from moe_numba.runtime.device import H200

MAX_STAGES = 12  # enough to hide the latency of a load
TILES = [  # subtile_m, m_subtiles, mma_n
    (16, 1, (16,)),
    (32, 1, (32, 16)),
    (48, 1, (48, 32)),
    (64, 1, (64, 32)),
    (96, 1, (96, 64)),
    (128, 1, (128, 96, 64)),
    (144, 1, (144, 128, 96)),
    (96, 2, (96, 64)),
    (128, 2, (128, 96)),
    (136, 2, (136, 128)),
    (144, 2, (144, 128)),
    (144, 2, (144, 136, 128, 120, 104, 88, 64, 32)),
]
SILU_TILES = [tile for tile in TILES if tile[1] == 1] + [
    (112, 1, (112, 104, 96, 88)),
    (128, 1, (128, 120, 112, 104)),
    (136, 1, (136, 128, 120, 112)),
    (144, 1, (144, 136, 128, 120)),
    (144, 1, (144, 136, 128, 120, 112, 104)),
]
WITHOUT_SILU = "without the activation, selected configuration"


def candidates(scaling, silu_and_mul=False):
    """Return {name: config} of all configurations that fit into shared memory, each with as many stages as fit."""
    found = {}
    for subtile_m, m_subtiles, mma_n in SILU_TILES if silu_and_mul else TILES:
        for cluster_size in (1, 2):
            config = GemmConfig(
                dtype="bf16" if scaling == "none" else "e4m3",
                scaling=scaling,
                subtile_m=subtile_m,
                m_subtiles=m_subtiles,
                mma_n=mma_n,
                silu_and_mul=silu_and_mul,
                cluster_size=cluster_size,
            )
            if config := with_most_stages(config, SharedMemoryLayout):
                name = "/".join(map(str, mma_n)) + f" x {m_subtiles}" * (m_subtiles > 1)
                found[name + ", cluster" * (cluster_size > 1)] = config
    return found | (block_scaled_candidates(silu_and_mul) if scaling == "block" else {})


def block_scaled_candidates(silu_and_mul):
    """Return the configurations of the block-scaled kernel, with rows of x as wgmma's rows."""
    found = {}
    for block_n in (256,) if silu_and_mul else (128, 192):
        for keep_weight, cluster_size in itertools.product((False, True), (1,) if silu_and_mul else (1, 2)):
            config = BlockScaledConfig(
                block_n=block_n, silu_and_mul=silu_and_mul, keep_weight=keep_weight, cluster_size=cluster_size
            )
            name = f"rows of x by {block_n}" + ", weights kept in L2" * keep_weight + ", cluster" * (cluster_size > 1)
            found[name] = with_most_stages(config, BlockScaledLayout)
    return found


def with_most_stages(config, layout):
    """Return the configuration with as many stages as fit into shared memory, or None."""
    by_stages = [config._replace(stages=stages) for stages in range(3, MAX_STAGES + 1)]
    fitting = [config for config in by_stages if layout(config).bytes <= H200.shared_bytes]
    return fitting[-1] if fitting else None


def arguments_of(scaling, p):
    """Return x, weight, group sizes and scales of a problem, as ``launch.group_gemm`` takes them."""
    if scaling != "block":
        return p.x, p.weight, p.seqlens, p.cu_seqlens, None, p.y_scale if scaling == "tensor" else None
    groups, n, k = p.weight.shape
    x_scale = torch.rand(len(p.x), -(-k // 128), device=p.x.device) + 0.5
    w_scale = torch.rand(groups, -(-n // 128), -(-k // 128), device=p.x.device) + 0.5
    return p.x, p.weight, p.seqlens, p.cu_seqlens, x_scale, w_scale


def error_of(scaling, arguments, out, lengths, silu_and_mul=False, groups=4):
    """Return None, or how the results of the first ``groups`` groups differ from the reference."""
    x, weight, seqlens, starts, x_scale, weight_scale = arguments
    rows = int(lengths[:groups].sum())
    first = x[:rows], weight[:groups], seqlens[:groups], starts[: groups + 1]
    if scaling == "block":
        expected = reference.group_gemm_blockwise(*first, x_scale[:rows], weight_scale[:groups])
    else:
        expected = reference.group_gemm(*first, None if scaling == "none" else weight_scale[:groups])
    if not silu_and_mul:
        return reference.mismatch(out[:rows], expected)
    y, scale = (tensor[:rows] for tensor in out)
    expected = reference.silu_and_mul(expected)
    error = float((y.double() * scale.repeat_interleave(128, 1) - expected).norm() / expected.norm())
    return None if error < 0.035 else f"relative error {error:.2g}; rounding to FP8 causes 0.026"


def compile_all(configs):
    """Compile the configurations into the cubin cache, in one process per core."""
    if not simulator.ENABLED:
        with multiprocessing.get_context("spawn").Pool() as pool:
            pool.map(compile_config, configs, chunksize=1)


def tune(scaling, silu_and_mul, rows_wanted, shapes=None, groups=GROUPS, device="cuda"):
    """Print the times and return ``{(shape, rows): {configuration: microseconds}}``."""
    dtype, found = torch.bfloat16 if scaling == "none" else reference.FP8, {}
    configs = candidates(scaling, silu_and_mul)
    compile_all(configs.values())
    shapes = shapes or ({"gate_up": SHAPES["gate_up"]} if silu_and_mul else SHAPES)
    for shape, sides in shapes.items():
        weights = [random_weight(groups, sides["n"], sides["k"], dtype, device) for _ in range(2)]
        for rows in rows_wanted:
            lengths, calls = random_lengths(groups, rows), {}
            all_arguments = [arguments_of(scaling, make_problem(weight, lengths)) for weight in weights]
            for name, config in configs.items():
                run = [
                    lambda a=a, c=config: group_gemm(scaling, *a, silu_and_mul=silu_and_mul, config=c)
                    for a in all_arguments
                ]
                if error := error_of(scaling, all_arguments[0], run[0](), lengths, silu_and_mul):
                    print(f"{shape}, {rows} rows, {name}: {error}")
                else:
                    calls[name] = run
            if silu_and_mul:
                calls[WITHOUT_SILU] = [lambda a=a: group_gemm(scaling, *a) for a in all_arguments]
            times = {} if simulator.ENABLED else kernel_times(calls, launches=10, replays=7)
            found[shape, rows] = {name: stats.median for name, stats in times.items()}
            ranked = sorted(found[shape, rows].items(), key=lambda item: item[1])
            bound = lower_bound(lengths, **sides, dtype="bf16" if scaling == "none" else "e4m3")[0]
            times_text = "; ".join(f"{name} {us:.1f}" for name, us in ranked)
            print(f"{shape}, {rows} rows, lower bound {bound:.0f} us: {times_text}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scaling", choices=["tensor", "block", "none"], default="tensor")
    parser.add_argument("--silu", action="store_true", help="gate and up with the activation")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512, 2048, 8192])
    options = parser.parse_args()
    tune(options.scaling, options.silu, options.rows)


if __name__ == "__main__":
    main()
