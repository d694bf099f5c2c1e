"""Benchmark of the grouped GEMM: twelve sizes of the two GEMMs of a DeepSeek-V3 expert, beside torch and the peers.

A peer provides ``group_gemm_pertensor(x, weight, seqlens, cu_seqlens, y_scale, out=None)`` or
``group_gemm_blockwise(x, weight, seqlens, cu_seqlens, x_scale, w_scale, out=None)``, which return the output.
"""

from types import SimpleNamespace

import torch

from moe_numba.course.bench import plots, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.tables import bold_best
from moe_numba.course.bench.timing import call_times, kernel_times
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.api import group_gemm_bf16, group_gemm_blockwise_fp8, group_gemm_pertensor_fp8
from moe_numba.grouped_gemm.reference import BLOCK, FP8

SHAPES = {"gate_up": dict(n=4096, k=7168), "down": dict(n=7168, k=2048)}
ROWS = [32, 128, 512, 2048, 8192, 32768]
SKEWED_ROWS = {"zipf": [2048, 8192], "one": [2048]}
GROUPS, MANY_GROUPS = 32, 256
MANY_ROWS = {"gate_up": [1024, 16384], "down": [1024, 16384]}
CALL_ROWS = 128  # the host cost of a call does not depend on the number of rows
SIDE = 8192  # m, n and k of the dense GEMM
TORCH_NAMES = {"e4m3": "float8_e4m3fn", "bf16": "bfloat16"}
SETS = 2  # weights alternate between two sets, so that none of a set is left in the L2 cache
BF16 = torch.bfloat16


def measure(peers, quick):
    """Return the rows of the record; each step's output is checked before it is timed."""
    rows = _measure_dense()
    for shape in list(SHAPES)[: 1 if quick else None]:
        rows += _measure_shape(shape, GROUPS, [128, 2048] if quick else ROWS, peers)
        if not quick:
            for routing, counts in SKEWED_ROWS.items():
                rows += _measure_shape(shape, GROUPS, counts, peers, routing)
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


def random_weight(groups, n, k, dtype=FP8, device="cuda"):
    """Make a weight group by group, because float32 for all groups would need too much memory."""
    weight = torch.empty(groups, n, k, dtype=dtype, device=device)
    for g in range(groups):
        weight[g] = (torch.randn(n, k, device=device) * 0.5).to(dtype)
    return weight


def lower_bound(lengths, n, k, dtype="e4m3"):
    """Return the lower bound of the time in microseconds, the bytes to move and the operations to compute."""
    rows, active, size = int(lengths.sum()), int((lengths > 0).sum()), 2 if dtype == "bf16" else 1
    count = active * n * k * size + rows * k * size + 2 * rows * n
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


def _steps(problems, bounds, peers):
    """Return {step: call} for FP8 with a scale per group."""
    offs = problems[0].cu_seqlens[1:].contiguous()
    per_row = problems[0].y_scale.repeat_interleave(problems[0].seqlens)
    ones = torch.ones(problems[0].weight.shape[:2], device=offs.device)

    def grouped(p):
        return torch._scaled_grouped_mm(
            p.x, p.weight.transpose(1, 2), per_row, ones, offs=offs, out_dtype=BF16, use_fast_accum=True
        )

    def final(p):
        arguments = p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale, p.average
        return group_gemm_pertensor_fp8(*arguments, out=p.out)

    steps = {"final": final, "torch": grouped, "torch, loop": lambda p: scaled_mm_loop(p, bounds)}
    for peer in peers:
        if hasattr(peer, "group_gemm_pertensor"):
            steps[f"peer:{peer.NAME}"] = lambda p, peer=peer: peer.group_gemm_pertensor(
                p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale, out=p.out
            )
    return steps


def _block_steps(peers):
    def final(p):
        arguments = p.x, p.weight, p.seqlens, p.cu_seqlens, p.x_scale, p.w_scale, p.average
        return group_gemm_blockwise_fp8(*arguments, out=p.out)

    steps = {"final": final}
    for peer in peers:
        if hasattr(peer, "group_gemm_blockwise"):
            steps[f"peer:{peer.NAME}"] = lambda p, peer=peer: peer.group_gemm_blockwise(
                p.x, p.weight, p.seqlens, p.cu_seqlens, p.x_scale, p.w_scale, out=p.out
            )
    return steps


def _bf16_steps(problems):
    offs = problems[0].cu_seqlens[1:].contiguous()

    def final(p):
        return group_gemm_bf16(p.x, p.weight, p.seqlens, p.cu_seqlens, p.average, out=p.out)

    return {"final": final, "torch": lambda p: torch._grouped_mm(p.x, p.weight.transpose(1, 2), offs=offs)}


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
                cases = {"tensor": _steps(problems, bounds, peers), "block": _block_steps(peers)}
            for scaling, steps in cases.items():
                config = {"num_groups": groups, "n": n, "k": k, "scaling": scaling, "routing": routing}
                found += _measure_steps(steps, problems, config, lengths, dtype, peers)
        del weights, problems
        torch.cuda.empty_cache()
    return found


def add_block_scales(problems):
    """Add random block scales to problems."""
    for p in problems:
        groups, n, blocks = len(p.weight), p.weight.shape[1], -(-p.weight.shape[2] // BLOCK)
        p.x_scale = torch.rand(len(p.x), blocks, device=p.x.device) + 0.5
        p.w_scale = torch.rand(groups, -(-n // BLOCK), blocks, device=p.x.device) + 0.5


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


def _measure_steps(steps, problems, config, lengths, dtype, peers):
    first, rows = problems[0], int(lengths.sum())
    expected = expected_output(first, config["scaling"])
    versions = {f"peer:{peer.NAME}": peer.VERSION for peer in peers}
    for name, step in steps.items():
        first.out.fill_(float("nan"))
        # torch's fast accumulation sums over all of k in the tensor cores, with fewer bits than float32.
        if error := reference.mismatch(step(first), expected, 1e-2 if name.startswith("torch") else 2e-3):
            raise AssertionError(f"{name}, {config}, {rows} rows: {error}")
    del expected
    kernel = kernel_times({n: [lambda p=p, s=s: s(p) for p in problems] for n, s in steps.items()}, launches=20)
    main = rows == CALL_ROWS and config["num_groups"] == GROUPS
    call = call_times({n: (lambda s=s: s(first)) for n, s in steps.items()}) if main else {}
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

    steps = {"final": _steps([p], [(0, SIDE)], [])["final"], "torch": dense}
    config = {"num_groups": 1, "n": SIDE, "k": SIDE, "scaling": "tensor", "routing": "uniform"}
    return _measure_steps(steps, [p], config, lengths, "e4m3", [])


# Figures and tables


def row_config(shape, scaling="tensor", groups=GROUPS, routing="uniform"):
    """Return the ``config`` of a record's row for one of ``SHAPES``."""
    return {"num_groups": groups, **SHAPES[shape], "scaling": scaling, "routing": routing}


def series_by_label(record, shape, scaling="tensor"):
    """Return ``{label: {rows: statistics}}`` of all kernels that were measured for a shape."""
    named = {"moe_numba": "final", **{n.removeprefix("peer:"): n for n in records.peers(record)}}
    named |= {"torch": "torch", "torch, loop": "torch, loop"}
    config = row_config(shape, scaling)
    found = {label: records.series(record, over="rows", step=step, config=config) for label, step in named.items()}
    return {label: points for label, points in found.items() if points}


def figures(record):
    """Plot a sweep over rows for each shape and scaling, the roofline, and the recorded ladders."""
    made, caption = {}, plots.caption(record)
    for shape in SHAPES:
        for scaling in ("tensor", "block", "none"):
            if series := series_by_label(record, shape, scaling):
                floors = records.series(
                    record, over="rows", value="floor_us", step="final", config=row_config(shape, scaling)
                )
                kind = {"tensor": "FP8, a scale per group", "block": "FP8, block scales", "none": "bf16"}[scaling]
                made[f"sweep-{shape}-{scaling}"] = plots.sweep_figure(
                    series,
                    xlabel="rows in 32 groups",
                    floor=floors,
                    caption=caption,
                    title=f"Grouped GEMM, N {SHAPES[shape]['n']}, K {SHAPES[shape]['k']}, {kind}: kernel time",
                )
    made["roofline"] = roofline(record, caption)
    for topic, title in (("grouped_gemm_dense_ladder", "One matrix"), ("grouped_gemm_ladder", "32 groups")):
        ladder = records.recorded(topic, records.folder(record["gpu"]))
        if ladder:
            floor_us = next(row["floor_us"] for row in ladder["rows"] if "floor_us" in row)
            made[topic.removeprefix("grouped_gemm_").replace("_", "-")] = plots.ladder_figure(
                ladder["rows"],
                lines={"speed of light": floor_us},
                title=f"Grouped GEMM step by step: {title}",
                caption=plots.caption(ladder),
                reference="torch",
            )
    return made


def roofline(record, caption=""):
    """Plot TFLOP/s of the package's kernel over arithmetic intensity; the roof is that of the data sheet."""
    series, roof = {}, {}
    for shape in SHAPES:
        for row in records.select(record, step="final", config=row_config(shape)):
            intensity = round(row["flops"] / row["bytes"], 1)
            series.setdefault(shape, {})[intensity] = row["flops"] / row["kernel_us"]["median"] / 1e6
            roof[intensity] = row["flops"] / row["floor_us"] / 1e6
    figure = plots.sweep_figure(
        series,
        xlabel="operations per byte",
        ylabel="TFLOP/s",
        floor=roof,
        caption=caption,
        title="Grouped GEMM, FP8: roofline",
    )
    figure.axes[0].set_xticks([4, 8, 16, 32, 64, 128, 256, 512])
    return figure


def readme_table(record):
    """Return a table of kernel times in microseconds: this package, the peers, torch and the lower bound."""
    peers = records.peers(record)
    columns = [("final", "tensor"), ("final", "block"), *((p, s) for p in peers for s in ("tensor", "block"))]
    columns = [c for c in columns if records.find(record, step=c[0], config={"scaling": c[1]})]
    columns += [("torch", "tensor"), ("torch, loop", "tensor")]
    suffix = {"tensor": "", "block": ", by blocks"}
    names = [("moe_numba" if n == "final" else n.removeprefix("peer:")) + suffix[s] for n, s in columns]
    table = [f"| N x K, rows | {' | '.join(names)} | speed of light |", "|---|" + "---:|" * (len(names) + 1)]
    for shape, sides in SHAPES.items():
        for rows in ROWS:
            size = {"rows": rows}
            found = [records.find(record, step=n, config=row_config(shape, s), size=size) for n, s in columns]
            if not found[0]:
                continue
            cells = [f"{row['kernel_us']['median']:.0f}" if row else "" for row in found]
            cells = bold_best(cells)
            table.append(f"| {sides['n']} x {sides['k']}, {rows} | {' | '.join(cells)} | {found[0]['floor_us']:.0f} |")
    table += ["", f"32 groups, rows drawn evenly at random. Kernel time in microseconds, {plots.provenance(record)}."]
    return "\n".join(table)
