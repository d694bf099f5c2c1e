"""Measures the grouped GEMM: the two GEMMs of a DeepSeek-V3 expert beside torch and other projects' kernels.

A module of ``--peers`` provides ``plan_group_gemm(scaling, problem)`` for ``scaling`` "tensor", "block", "none"
(bfloat16) or "mxfp4". It returns None if the peer has no such kernel, or an object with two methods: ``launch()``
launches the kernel on torch's current stream, and ``result()`` returns the output, one row for each row of x. The plan
converts the problem, see :func:`make_problem`, into the peer's layout of rows and scales, which is not timed. A problem
with MXFP4 weights has ``blocks`` and ``scales`` of a checkpoint, as `pack_mxfp4` takes them.
"""

import sys
from types import SimpleNamespace

import torch

from moe_numba.course.bench import drop_if_wrong, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.timing import call_times, kernel_times
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.api.bf16 import group_gemm_bf16
from moe_numba.grouped_gemm.api.fp8 import group_gemm_blockwise_fp8, group_gemm_pertensor_fp8
from moe_numba.grouped_gemm.api.w4 import group_gemm_mxfp4
from moe_numba.grouped_gemm.reference import FP8
from moe_numba.grouped_gemm.w4.packing import pack_mxfp4
from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4
from moe_numba.quantise import FP8_SCALE_BLOCK

SHAPES = {"gate_up": dict(n=4096, k=7168), "down": dict(n=7168, k=2048)}
ROWS = [32, 128, 512, 2048, 8192, 32768]
SKEWED_ROWS = {"zipf": [512, 2048, 8192], "one": [2048]}
FEW_GROUPS, GROUPS, MANY_GROUPS = 8, 32, 256
FEW_ROWS = [8192]
MANY_ROWS = {"gate_up": [1024, 16384], "down": [1024, 16384]}
CALL_ROWS = 128  # the host cost of a call does not depend on the number of rows
SIDE = 8192  # m, n and k of the dense GEMM
TORCH_NAMES = {"e4m3": "float8_e4m3fn", "bf16": "bfloat16", "mxfp4": "bfloat16"}  # of the tensor cores' operands
BYTES_OF_X, BYTES_OF_WEIGHT = {"e4m3": 1, "bf16": 2, "mxfp4": 2}, {"e4m3": 1, "bf16": 2, "mxfp4": 17 / 32}
SETS = 2  # weights alternate between two sets, so that none of a set is left in the L2 cache
BF16 = torch.bfloat16
FAST = "fast accumulation"  # in the tensor cores, as torch's steps use it


def measure(peers, quick):
    """Return the rows of the record; each step's output is checked before it is timed."""
    rows = _measure_dense()
    for shape in list(SHAPES)[: 1 if quick else None]:
        rows += _measure_shape(shape, GROUPS, [128, 2048] if quick else ROWS, peers)
        if not quick:
            for routing, counts in SKEWED_ROWS.items():
                rows += _measure_shape(shape, GROUPS, counts, peers, routing)
            rows += _measure_shape(shape, FEW_GROUPS, FEW_ROWS, peers)
            rows += _measure_shape(shape, MANY_GROUPS, MANY_ROWS[shape], peers)
    return rows


# Problems


def random_lengths(groups, rows, routing="uniform", seed=71):
    """Draw the number of rows of each group: "uniform", by Zipf's law ("zipf"), or all in one group ("one").

    With the default seed 23 of 32 groups are not empty with 32 rows, and 31 with 128 rows, close to the expectation.
    """
    generator = torch.Generator().manual_seed(seed)
    first = torch.zeros(groups)
    first[0] = 1
    weights = {"uniform": torch.ones(groups), "zipf": 1 / torch.arange(1, groups + 1), "one": first}[routing]
    return torch.bincount(torch.multinomial(weights, rows, True, generator=generator), minlength=groups).int()


def make_problem(weight, lengths, seed=1):
    """Make random rows for a weight [groups, n, k], in FP8 with a scale per group or in bf16."""
    (groups, n, k), device = weight.shape, weight.device
    seqlens = lengths.to(device)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]).to(device)
    torch.manual_seed(seed)
    x = (torch.randn(int(lengths.sum()), k, device=device) * 0.5).to(weight.dtype)
    return SimpleNamespace(
        x=x,
        weight=weight,
        seqlens=seqlens,
        cu_seqlens=starts,
        y_scale=torch.rand(groups, device=device) + 0.5,
        out=torch.empty(len(x), n, dtype=BF16, device=device),
        average=-(-len(x) // groups),
    )


def random_weight(groups, n, k, dtype=FP8, device="cuda", generator=None):
    """Make a weight group by group, because float32 for all groups would need too much memory."""
    weight = torch.empty(groups, n, k, dtype=dtype, device=device)
    for g in range(groups):
        weight[g] = (torch.randn(n, k, device=device, generator=generator) * 0.5).to(dtype)
    return weight


def lower_bound(lengths, n, k, dtype="e4m3"):
    """Return the lower bound of the time in microseconds, the bytes to move and the operations to compute."""
    rows, active = int(lengths.sum()), int((lengths > 0).sum())
    count = int(active * n * k * BYTES_OF_WEIGHT[dtype]) + rows * k * BYTES_OF_X[dtype] + 2 * rows * n
    flops, limits = 2 * rows * n * k, chip_limits()
    return max(count / limits.hbm_bandwidth, flops / limits.tensor_flops[TORCH_NAMES[dtype]]) * 1e6, count, flops


# Steps


def scaled_mm_loop(p, bounds):
    """Run the article's loop with group bounds that the host knows, so that a CUDA graph can capture it."""
    if not hasattr(p, "scales"):
        p.scales = [scale.clone() for scale in p.y_scale]  # cuBLAS needs each at a multiple of 16 bytes
    one = torch.ones((), device=p.x.device)
    for g, (start, end) in enumerate(bounds):
        if end > start:
            torch._scaled_mm(
                p.x[start:end],
                p.weight[g].t(),
                p.scales[g],
                one,
                out_dtype=BF16,
                use_fast_accum=True,
                out=p.out[start:end],
            )
    return p.out


def _steps(problems, bounds):
    """Return {step: call} for FP8 with a scale per group."""
    offs = problems[0].cu_seqlens[1:].contiguous()
    per_row = problems[0].y_scale.repeat_interleave(problems[0].seqlens)
    ones = torch.ones(problems[0].weight.shape[:2], device=offs.device)

    def grouped(p):
        return torch._scaled_grouped_mm(
            p.x, p.weight.transpose(1, 2), per_row, ones, offs=offs, out_dtype=BF16, use_fast_accum=True
        )

    def final(p, use_fast_accum=False):
        arguments = p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale, p.average
        return group_gemm_pertensor_fp8(*arguments, out=p.out, use_fast_accum=use_fast_accum)

    return {
        "final": final,
        FAST: lambda p: final(p, use_fast_accum=True),
        "torch": grouped,
        "torch, loop": lambda p: scaled_mm_loop(p, bounds),
    }


def _block_steps():
    def final(p):
        arguments = p.x, p.weight, p.seqlens, p.cu_seqlens, p.x_scale, p.w_scale, p.average
        return group_gemm_blockwise_fp8(*arguments, out=p.out)

    return {"final": final}


def _bf16_steps(problems):
    offs = problems[0].cu_seqlens[1:].contiguous()

    def final(p):
        return group_gemm_bf16(p.x, p.weight, p.seqlens, p.cu_seqlens, p.average, out=p.out)

    return {"final": final, "torch": lambda p: torch._grouped_mm(p.x, p.weight.transpose(1, 2), offs=offs)}


def make_mxfp4_problems(problems):
    """Return problems with the same rows in bf16 and random MXFP4 weights, packed and dequantised."""
    made = []
    for p in problems:
        groups, n, k = p.weight.shape
        drawn, packed, dequantised = [], [], torch.empty_like(p.weight)
        for g in range(groups):  # float64 for all groups would need too much memory
            blocks = torch.randint(0, 256, (1, n, k // 2), dtype=torch.uint8, device=p.x.device)
            scales = torch.randint(125, 128, (1, n, k // 32), dtype=torch.uint8, device=p.x.device)
            drawn.append((blocks, scales))
            packed.append(pack_mxfp4(blocks, scales))
            dequantised[g] = dequantise_mxfp4(blocks, scales)[0]
        blocks, scales = map(torch.cat, zip(*drawn, strict=True))
        weights = {"weight": dequantised, "packed": torch.cat(packed), "blocks": blocks, "scales": scales}
        made.append(SimpleNamespace(**vars(p) | weights))
    return made


def _mxfp4_steps():
    def final(p):
        return group_gemm_mxfp4(p.x, p.packed, p.seqlens, p.cu_seqlens, p.average, out=p.out)

    return {"final": final}


class PeerStep:
    """A peer's launches, planned for each of some problems."""

    def __init__(self, plans):
        self.plans = plans  # of each problem, by its id

    def __call__(self, p):
        """Launch the kernel."""
        self.plans[id(p)].launch()

    def result(self, p):
        """Return the output of the last launch."""
        return self.plans[id(p)].result()


def peer_steps(peers, scaling, problems):
    """Return {step: call} of the peers that support the problems; report those whose plan raises an error."""
    steps = {}
    for peer in peers:
        if not hasattr(peer, "plan_group_gemm"):
            continue
        try:
            plans = {id(p): peer.plan_group_gemm(scaling, p) for p in problems}
        except Exception as error:  # the other peers are measured whatever this one raises
            size = f"{len(problems[0].x)} rows, {scaling}"
            print(f"peer {peer.NAME} is left out ({size}): {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if all(plan is not None for plan in plans.values()):
            steps[f"peer:{peer.NAME}"] = PeerStep(plans)
    return steps


def _measure_shape(shape, groups, rows, peers, routing="uniform"):
    """Measure one weight shape for several numbers of rows."""
    n, k = SHAPES[shape]["n"], SHAPES[shape]["k"]
    found = []
    for dtype, kind in (("e4m3", FP8), ("bf16", BF16)):
        if dtype == "bf16" and groups > GROUPS:
            continue
        weights = [random_weight(groups, n, k, kind) for _ in range(SETS)]
        for count in rows:
            lengths = random_lengths(groups, count, routing)
            problems = [make_problem(weight, lengths) for weight in weights]
            ends = lengths.cumsum(0).tolist()
            bounds = list(zip([0, *ends], ends, strict=False))
            if dtype == "bf16":
                cases = {"none": _bf16_steps(problems)}
            else:
                add_block_scales(problems)
                cases = {"tensor": _steps(problems, bounds), "block": _block_steps()}
            for scaling, steps in cases.items():
                steps |= peer_steps(peers, scaling, problems)
                config = {"num_groups": groups, "n": n, "k": k, "scaling": scaling, "routing": routing}
                found += measure_steps(steps, problems, config, lengths, dtype, peers)
            if dtype == "bf16" and groups == GROUPS and routing == "uniform":
                config = {"num_groups": groups, "n": n, "k": k, "scaling": "mxfp4", "routing": routing}
                packed = make_mxfp4_problems(problems)
                steps = _mxfp4_steps() | peer_steps(peers, "mxfp4", packed)
                found += measure_steps(steps, packed, config, lengths, "mxfp4", peers)
                del packed
        del weights, problems, cases, steps
        torch.cuda.empty_cache()
    return found


def add_block_scales(problems):
    """Add random block scales to problems."""
    for p in problems:
        groups, n, blocks = len(p.weight), p.weight.shape[1], -(-p.weight.shape[2] // FP8_SCALE_BLOCK)
        p.x_scale = torch.rand(len(p.x), blocks, device=p.x.device) + 0.5
        p.w_scale = torch.rand(groups, -(-n // FP8_SCALE_BLOCK), blocks, device=p.x.device) + 0.5


def expected_output(p, scaling):
    """Return the float64 reference of a problem."""
    arguments = p.x, p.weight, p.seqlens, p.cu_seqlens
    if scaling == "block":
        return expected_blockwise(p)
    return reference.group_gemm(*arguments, p.y_scale if scaling == "tensor" else None)


def expected_blockwise(p):
    """Return the float64 reference for block scales, computed group by group to save memory."""
    out = torch.full((len(p.x), p.weight.shape[1]), float("nan"), dtype=torch.float64, device=p.x.device)
    one = torch.zeros(1, dtype=torch.int32)
    for g, (start, length) in enumerate(zip(p.cu_seqlens.tolist(), p.seqlens.tolist(), strict=False)):
        rows, own = slice(start, start + length), slice(g, g + 1)
        out[rows] = reference.group_gemm_blockwise(
            p.x[rows], p.weight[own], one + length, one, p.x_scale[rows], p.w_scale[own]
        )
    return out


def _drop_wrong(steps, p, config, rows):
    """Check each step; remove a peer's that fails or whose output is wrong, and report it."""
    expected = expected_output(p, config["scaling"])
    for name, step in list(steps.items()):
        is_peer = isinstance(step, PeerStep)
        # torch's fast accumulation sums over all of k in the tensor cores, with fewer bits than float32.
        bound = 1e-2 if name == FAST or name.startswith("torch") else 2e-3

        def find_fault(step=step, is_peer=is_peer, bound=bound):
            p.out.fill_(float("nan"))
            out = step(p)
            return reference.mismatch(step.result(p) if is_peer else out, expected, bound)

        drop_if_wrong(steps, name, f"{config}, {rows} rows", is_peer, find_fault)


def measure_steps(steps, problems, config, lengths, dtype, peers):
    first, rows, steps = problems[0], int(lengths.sum()), dict(steps)
    versions = {f"peer:{peer.NAME}": peer.VERSION for peer in peers}
    _drop_wrong(steps, first, config, rows)
    kernel = kernel_times({n: [lambda p=p, s=s: s(p) for p in problems] for n, s in steps.items()}, launches=20)
    main = rows == CALL_ROWS and config["num_groups"] == GROUPS
    timed = {n: s for n, s in steps.items() if main and not isinstance(s, PeerStep)}  # a plan has no call of the peer
    call = call_times({n: (lambda s=s: s(first)) for n, s in timed.items()}) if timed else {}
    floor_us, count, flops = lower_bound(lengths, config["n"], config["k"], dtype)
    return [
        records.row(
            name,
            config=config,
            size={"rows": rows},
            dtype=dtype,
            kernel=kernel[name],
            call=call.get(name),
            floor_us=floor_us,
            bytes=count,
            flops=flops,
            version=versions.get(name),
        )
        for name in steps
    ]


def _measure_dense():
    """Measure one group of 8192 rows, a dense GEMM of 8192 x 8192 x 8192, beside ``torch._scaled_mm``."""
    weight = random_weight(1, SIDE, SIDE)
    lengths = torch.tensor([SIDE], dtype=torch.int32)
    p = make_problem(weight, lengths)
    one = torch.ones((), device="cuda")

    def dense(p):
        return torch._scaled_mm(p.x, p.weight[0].t(), p.y_scale[0], one, out_dtype=BF16, use_fast_accum=True)

    own = _steps([p], [(0, SIDE)])
    steps = {"final": own["final"], FAST: own[FAST], "torch": dense}
    config = {"num_groups": 1, "n": SIDE, "k": SIDE, "scaling": "tensor", "routing": "uniform"}
    return measure_steps(steps, [p], config, lengths, "e4m3", [])
