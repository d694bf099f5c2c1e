"""Check the gate on every shape: 1 to 1024 experts in any number of groups that divides them.

Most shapes compile a kernel of their own, so all of them take a pool of processes and a GPU::

    PYTHONPATH=. python tests/helpers/gate_shapes.py --processes 16
"""

import argparse
import multiprocessing
import random
import sys
from collections import defaultdict

import torch

from moe_numba import biased_grouped_topk, simulator
from moe_numba.gate import api, four_tokens_per_warp, one_token_per_warp
from moe_numba.gate.reference import mismatch


def all_shapes():
    """Return all (experts, groups)."""
    return [(experts, groups) for experts in range(1, 1025) for groups in range(1, experts + 1) if not experts % groups]


def shape_classes(shapes):
    """Return {(lanes per group, experts per lane): shapes}; no lanes for more than 32 groups."""
    classes = defaultdict(list)
    for shape in shapes:
        classes[one_token_per_warp.lane_layout(*shape)].append(shape)
    return classes


def sample(lanes_per_group, count, seed=0):
    """Draw ``count`` shapes, among them the fewest and the most experts per lane, and those around 32."""
    classes = {k: v for k, v in shape_classes(all_shapes()).items() if k[0] == lanes_per_group}
    rng, per_lane = random.Random(seed), sorted(k[1] for k in classes)
    edges = [n for n in (per_lane[0], 32, 33, per_lane[-1]) if n in per_lane]
    drawn = [rng.choice(classes[lanes_per_group, n]) for n in dict.fromkeys(edges)]
    while len(drawn) < count:
        drawn.append(rng.choice(classes[lanes_per_group, rng.choice(per_lane)]))
    return drawn


def draw_options(experts, groups):
    """Draw the other arguments; the same for the same shape."""
    rng = random.Random(experts * 1025 + groups)
    kept = rng.randint(1, groups)
    topk = rng.randint(1, min(16, kept * (experts // groups)))
    shared = rng.randint(0, 2)
    options = dict(num_expert_group=groups, topk_group=kept, num_fused_shared_experts=shared, routed_scaling_factor=2.5)
    return topk + shared, options


def make_inputs(experts, groups, device):
    """Return logits and bias: random tokens, and tokens with ties between experts and groups, and with NaN."""
    generator = torch.Generator().manual_seed(experts * 1025 + groups)
    logits, bias = torch.randn(4, experts, generator=generator), torch.rand(experts, generator=generator)
    logits[1] = logits[1].round()
    logits[2] = logits[2, : experts // groups].repeat(groups)
    logits[3, torch.rand(experts, generator=generator) < 0.5] = float("nan")
    bias[: experts // 2] = 0
    return logits.to(device), bias.to(device)


def check_shapes(shapes):
    """Compare the gate with its reference on ``shapes``; return a description of each shape that fails."""
    device, failures, least = "cpu" if simulator.ENABLED else "cuda", [], api.MANY_TOKENS
    for experts, groups in shapes:
        topk, options = draw_options(experts, groups)
        logits, bias = make_inputs(experts, groups, device)
        shape = experts, groups, options["topk_group"], topk, options["num_fused_shared_experts"]
        for least_tokens in (1 << 31, 1) if four_tokens_per_warp.supports(*shape) else (1 << 31,):
            api.MANY_TOKENS = least_tokens
            try:
                out = (
                    torch.full((len(logits), topk), float("nan"), device=device),
                    torch.full((len(logits), topk), -7, dtype=torch.int32, device=device),
                )
                biased_grouped_topk(logits, bias, topk, out=out, **options)
                wrong = mismatch(*out, logits, bias, topk, **options)
            except simulator.SimulatorError as error:
                wrong = str(error)
            finally:
                api.MANY_TOKENS = least
            if wrong:
                failures.append(f"{experts} experts, {groups} groups, {options}, top-{topk}: {wrong}")
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--part", default="0/1", help="which part of the shapes: 0/4, 1/4, 2/4 or 3/4")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    # The generic kernel is compiled once per size of its shared memory: keep shapes of one size in one slice.
    shapes = sorted(all_shapes(), key=sum)[part * len(all_shapes()) // parts : (part + 1) * len(all_shapes()) // parts]
    slices = [shapes[i : i + 64] for i in range(0, len(shapes), 64)]
    failures = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for done, failed in enumerate(pool.imap_unordered(check_shapes, slices), 1):
            failures += failed
            print(f"{done} of {len(slices)} slices, {len(failures)} of {len(shapes)} shapes failed", flush=True)
    print("\n".join(failures))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
