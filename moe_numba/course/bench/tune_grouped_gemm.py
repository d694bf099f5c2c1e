"""Which form of the grouped GEMM is the fastest for how many rows: how its tables were chosen.

    python -m moe_numba.course.bench.tune_grouped_gemm [--scaling tensor|block|none] [--rows 32 8192] [--activated]

For DeepSeek-V3's two products, or with ``--activated`` for the first, it times every form that fits, and prints the
times in the order of rows. A form that does not give the reference's result has no time.
"""

import argparse
import multiprocessing

import torch

from moe_numba import simulator
from moe_numba.course.bench.timing import kernel_times
from moe_numba.course.bench.topics.grouped_gemm import GROUPS, SHAPES, floor, lengths_of, problem, random_weight
from moe_numba.grouped_gemm import api, configs, reference
from moe_numba.grouped_gemm.constants import Constants, Layout

SHARED_BYTES = 227 * 1024  # that a block may have
STAGES = 12  # at most: more are never needed to hide a load
TILES = [  # tokens of a part, parts, multiplications
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
    (144, 2, (144, 136, 128, 120)),
]
ACTIVATED_TILES = [tile for tile in TILES if tile[1] == 1] + [
    (112, 1, (112, 104, 96, 88)),
    (128, 1, (128, 120, 112, 104)),
    (136, 1, (136, 128, 120, 112)),
    (144, 1, (144, 136, 128, 120)),
    (144, 1, (144, 136, 128, 120, 112, 104)),
]
PRODUCT = "the product alone, in the form that is chosen"


def candidates(scaling, activated=False):
    """Every form that fits a block's shared memory, with as many stages as there is room for; and its name."""
    found = {}
    for tokens, parts, sizes in ACTIVATED_TILES if activated else TILES:
        for cluster in (1, 2):
            constants = Constants(
                dtype="bf16" if scaling == "none" else "e4m3",
                scaling=scaling,
                tokens=tokens,
                parts=parts,
                sizes=sizes,
                activated=activated,
                cluster=cluster,
            )
            fitting = [s for s in range(3, STAGES + 1) if Layout(constants._replace(stages=s)).bytes <= SHARED_BYTES]
            if fitting:
                name = f"{'/'.join(map(str, sizes))}" + f" x {parts}" * (parts > 1) + ", cluster" * (cluster > 1)
                found[name] = constants._replace(stages=fitting[-1])
    return found


def arguments_of(scaling, p):
    """What the internal function takes for a problem, before the average; quantised where scales come in blocks."""
    if scaling != "block":
        return p.x, p.weight, p.seqlens, p.cu_seqlens, None, p.y_scale if scaling == "tensor" else None
    groups, n, k = p.weight.shape
    x_scale = torch.rand(len(p.x), -(-k // 128), device=p.x.device) + 0.5
    w_scale = torch.rand(groups, -(-n // 128), -(-k // 128), device=p.x.device) + 0.5
    return p.x, p.weight, p.seqlens, p.cu_seqlens, x_scale, w_scale


def wrong(scaling, arguments, out, lengths, activated=False, groups=4):
    """None, or how the first groups' results differ from the reference."""
    x, weight, seqlens, starts, x_scale, weight_scale = arguments
    rows = int(lengths[:groups].sum())
    few = x[:rows], weight[:groups], seqlens[:groups], starts[: groups + 1]
    if scaling == "block":
        right = reference.group_gemm_blockwise(*few, x_scale[:rows], weight_scale[:groups])
    else:
        right = reference.group_gemm(*few, None if scaling == "none" else weight_scale[:groups])
    if not activated:
        return reference.mismatch(out[:rows], right)
    y, scale = (part[:rows] for part in out)
    right = reference.silu_and_mul(right)
    error = float((y.double() * scale.repeat_interleave(128, 1) - right).norm() / right.norm())
    return None if error < 0.035 else f"relative error {error:.2g}; rounding to FP8 makes 0.026"


def compile_all(every):
    """Every form's machine code to the disk cache, by as many processes as there are cores."""
    if not simulator.ENABLED:
        with multiprocessing.get_context("spawn").Pool() as pool:
            pool.map(configs.compile_for, every, chunksize=1)


def tune(scaling, activated, rows_wanted, shapes=None, groups=GROUPS, device="cuda"):
    """``{(shape, rows): {form: microseconds}}``; prints as it goes."""
    dtype, found = torch.bfloat16 if scaling == "none" else reference.FP8, {}
    compile_all(candidates(scaling, activated).values())
    shapes = shapes or ({"gate_up": SHAPES["gate_up"]} if activated else SHAPES)
    for name, shape in shapes.items():
        weights = [random_weight(groups, shape["n"], shape["k"], dtype, device) for _ in range(2)]
        for rows in rows_wanted:
            lengths, calls = lengths_of(groups, rows), {}
            all_arguments = [arguments_of(scaling, problem(weight, lengths)) for weight in weights]
            for form, constants in candidates(scaling, activated).items():
                run = [
                    lambda a=a, c=constants: api._group_gemm(scaling, *a, None, None, None, activated, c)
                    for a in all_arguments
                ]
                out = run[0]()
                if says := wrong(scaling, all_arguments[0], out, lengths, activated):
                    print(f"{name}, {rows} rows, {form}: {says}")
                else:
                    calls[form] = run
            if activated:
                calls[PRODUCT] = [lambda a=a: api._group_gemm(scaling, *a, None, None, None) for a in all_arguments]
            times = {} if simulator.ENABLED else kernel_times(calls, launches=10, replays=7)
            found[name, rows] = {form: stats.median for form, stats in times.items()}
            best = sorted(found[name, rows].items(), key=lambda item: item[1])
            least = floor(lengths, **shape, dtype="bf16" if scaling == "none" else "e4m3")[0]
            print(f"{name}, {rows} rows, floor {least:.0f} us: " + "; ".join(f"{f} {us:.1f}" for f, us in best))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scaling", choices=["tensor", "block", "none"], default="tensor")
    parser.add_argument("--activated", action="store_true", help="gate and up, with the activation behind them")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512, 2048, 8192])
    options = parser.parse_args()
    tune(options.scaling, options.activated, options.rows)


if __name__ == "__main__":
    main()
