"""What is measured of the grouped GEMM: ten sizes of DeepSeek-V3's two products, beside torch and the peers.

A peer takes part with ``group_gemm_pertensor(x, weight, seqlens, cu_seqlens, y_scale, out=None)`` or with
``group_gemm_blockwise(x, weight, seqlens, cu_seqlens, x_scale, w_scale, out=None)``, which give the output.
"""

from types import SimpleNamespace

import torch

from moe_numba.course.bench import plots, records
from moe_numba.course.bench.tables import bold_best
from moe_numba.course.bench.timing import call_times, kernel_times
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.api import group_gemm_bf16, group_gemm_blockwise_fp8, group_gemm_pertensor_fp8
from moe_numba.grouped_gemm.reference import BLOCK, FP8

SHAPES = {"gate_up": dict(n=4096, k=7168), "down": dict(n=7168, k=2048)}
ROWS = [32, 128, 512, 2048, 8192]
GROUPS, MANY_GROUPS = 32, 256
MANY_ROWS = {"gate_up": [1024, 16384], "down": [1024, 16384]}
CALL_ROWS = 128  # what a call costs the host does not depend on the rows
SIDE = 8192  # of the square matrices of the dense product
BANDWIDTH, RATE = 4.8e12, {"e4m3": 1979e12, "bf16": 989e12}  # bytes and operations a second, from the data sheet
SETS = 2  # of weights: by its turn a set is not in the L2 any more
BF16 = torch.bfloat16


def measure(peers, quick):
    """Rows for the record: every step's outputs are checked before it is timed."""
    rows = _measure_dense()
    for shape in list(SHAPES)[: 1 if quick else None]:
        rows += _measure_shape(shape, GROUPS, [128, 2048] if quick else ROWS, peers)
        if not quick:
            for routing in ("zipf", "one"):
                rows += _measure_shape(shape, GROUPS, [2048], peers, routing)
            rows += _measure_shape(shape, MANY_GROUPS, MANY_ROWS[shape], peers)
    return rows


# Problems


def lengths_of(groups, rows, routing="uniform", seed=71):
    """How many rows each group gets, drawn at random: evenly, by Zipf's law (the second gets half of the first), or one
    group gets all.

    With this seed 23 of 32 groups have rows where there are 32, and 31 where there are 128, which is what to expect.
    """
    generator = torch.Generator().manual_seed(seed)
    first = torch.zeros(groups)
    first[0] = 1
    weights = {"uniform": torch.ones(groups), "zipf": 1 / torch.arange(1, groups + 1), "one": first}[routing]
    return torch.bincount(torch.multinomial(weights, rows, True, generator=generator), minlength=groups).int()


def problem(weight, lengths, seed=1):
    """Random rows for a weight [groups, n, k]; FP8 in a scale for each group, or bf16."""
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
    """Made group by group: in float32 all of it would be too much."""
    weight = torch.empty(groups, n, k, dtype=dtype, device=device)
    for g in range(groups):
        weight[g] = (torch.randn(n, k, device=device) * 0.5).to(dtype)
    return weight


def floor(lengths, n, k, dtype="e4m3"):
    """``us, bytes, flops``: the least time for groups of so many rows, what must be moved, and what be computed."""
    rows, active, size = int(lengths.sum()), int((lengths > 0).sum()), 2 if dtype == "bf16" else 1
    count = active * n * k * size + rows * k * size + 2 * rows * n
    flops = 2 * rows * n * k
    return max(count / BANDWIDTH, flops / RATE[dtype]) * 1e6, count, flops


# Steps


def loop_of_scaled_mm(p, bounds):
    """The document's loop, for lengths that the host knows, so that a CUDA graph can hold it."""
    if not hasattr(p, "scales"):
        p.scales = [scale.clone() for scale in p.y_scale]  # cuBLAS wants each at a multiple of 16 bytes
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
    """``{step: (scaling, call)}`` of FP8 with a scale for each group."""
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

    steps = {"final": final, "torch": grouped, "torch, loop": lambda p: loop_of_scaled_mm(p, bounds)}
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
    """One product for several numbers of rows; its weights take turns, made once."""
    n, k = SHAPES[shape]["n"], SHAPES[shape]["k"]
    found = []
    for dtype, kind in (("e4m3", FP8), ("bf16", BF16)):
        if dtype == "bf16" and groups > GROUPS:
            continue
        weights = [random_weight(groups, n, k, kind) for _ in range(SETS)]
        for count in rows:
            lengths = lengths_of(groups, count, routing)
            problems = [problem(weight, lengths) for weight in weights]
            ends = lengths.cumsum(0).tolist()
            bounds = list(zip([0, *ends], ends, strict=False))
            if dtype == "bf16":
                cases = {"none": _bf16_steps(problems)}
            else:
                _add_block_scales(problems)
                cases = {"tensor": _steps(problems, bounds, peers), "block": _block_steps(peers)}
            for scaling, steps in cases.items():
                config = {"num_groups": groups, "n": n, "k": k, "scaling": scaling, "routing": routing}
                found += _measure_steps(steps, problems, config, lengths, dtype, peers)
        del weights, problems
        torch.cuda.empty_cache()
    return found


def _add_block_scales(problems):
    for p in problems:
        groups, n, blocks = len(p.weight), p.weight.shape[1], -(-p.weight.shape[2] // BLOCK)
        p.x_scale = torch.rand(len(p.x), blocks, device=p.x.device) + 0.5
        p.w_scale = torch.rand(groups, -(-n // BLOCK), blocks, device=p.x.device) + 0.5


def right_of(p, scaling):
    """The products in float64."""
    given = p.x, p.weight, p.seqlens, p.cu_seqlens
    if scaling == "block":
        return right_by_blocks(p)
    return reference.group_gemm(*given, p.y_scale if scaling == "tensor" else None)


def right_by_blocks(p):
    """The reference for block scales, group by group, for want of memory."""
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
    right, versions = right_of(first, config["scaling"]), {f"peer:{peer.NAME}": peer.VERSION for peer in peers}
    for name, step in steps.items():
        first.out.fill_(float("nan"))
        # torch's fast accumulation adds up all of k in the tensor cores' own, fewer bits.
        if wrong := reference.mismatch(step(first), right, 1e-2 if name.startswith("torch") else 2e-3):
            raise AssertionError(f"{name}, {config}, {rows} rows: {wrong}")
    del right
    kernel = kernel_times({n: [lambda p=p, s=s: s(p) for p in problems] for n, s in steps.items()}, launches=20)
    main = rows == CALL_ROWS and config["num_groups"] == GROUPS
    call = call_times({n: (lambda s=s: s(first)) for n, s in steps.items()}) if main else {}
    floor_us, count, flops = floor(lengths, config["n"], config["k"], dtype)
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
    """One group of 8192 rows, 8192 cubed, where torch has one plain product."""
    weight = random_weight(1, SIDE, SIDE)
    lengths = torch.tensor([SIDE], dtype=torch.int32)
    p = problem(weight, lengths)
    one = torch.ones((), device="cuda")

    def dense(p):
        return torch._scaled_mm(p.x, p.weight[0].t(), p.y_scale[0], one, out_dtype=BF16, use_fast_accum=True)

    steps = {"final": _steps([p], [(0, SIDE)], [])["final"], "torch": dense}
    config = {"num_groups": 1, "n": SIDE, "k": SIDE, "scaling": "tensor", "routing": "uniform"}
    return _measure_steps(steps, [p], config, lengths, "e4m3", [])


# What is drawn


def config_of(shape, scaling="tensor", groups=GROUPS, routing="uniform"):
    """A row's config for one of ``SHAPES``."""
    return {"num_groups": groups, **SHAPES[shape], "scaling": scaling, "routing": routing}


def lines(record, shape, scaling="tensor"):
    """``{label: {rows: statistics}}`` of all who were measured for a shape; hpc-ops and its like by their names."""
    named = {"moe_numba": "final", **{n.removeprefix("peer:"): n for n in records.peers(record)}}
    named |= {"torch": "torch", "torch, loop": "torch, loop"}
    config = config_of(shape, scaling)
    found = {label: records.series(record, over="rows", step=step, config=config) for label, step in named.items()}
    return {label: points for label, points in found.items() if points}


def figures(record):
    """A sweep over rows for each shape and scaling, the roofline, and the ladders, if they are recorded."""
    made, caption = {}, plots.caption(record)
    for shape in SHAPES:
        for scaling in ("tensor", "block", "none"):
            if series := lines(record, shape, scaling):
                floors = records.series(
                    record, over="rows", value="floor_us", step="final", config=config_of(shape, scaling)
                )
                kind = {"tensor": "FP8, a scale a group", "block": "FP8, scales of 128 by 128", "none": "bf16"}[scaling]
                made[f"sweep-{shape}-{scaling}"] = plots.sweep_figure(
                    series,
                    xlabel="rows of 32 groups",
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
                title=f"The grouped GEMM's ladder: {title}",
                caption=plots.caption(ladder),
                reference="torch",
            )
    return made


def roofline(record, caption=""):
    """TFLOP/s of the package's kernel over operations for each byte; the roof is the data sheet's."""
    series, roof = {}, {}
    for shape in SHAPES:
        for row in records.select(record, step="final", config=config_of(shape)):
            intensity = round(row["flops"] / row["bytes"], 1)
            series.setdefault(shape, {})[intensity] = row["flops"] / row["kernel_us"]["median"] / 1e6
            roof[intensity] = row["flops"] / row["floor_us"] / 1e6
    figure = plots.sweep_figure(
        series,
        xlabel="operations for each byte",
        ylabel="TFLOP/s",
        floor=roof,
        caption=caption,
        title="Grouped GEMM, FP8: how near to the roof",
    )
    figure.axes[0].set_xticks([4, 8, 16, 32, 64, 128, 256, 512])
    return figure


def readme_table(record):
    """Kernel times, microseconds: this package, the peers, torch, and the floor."""
    peers = records.peers(record)
    columns = [("final", "tensor"), ("final", "block"), *((p, s) for p in peers for s in ("tensor", "block"))]
    columns = [c for c in columns if records.find(record, step=c[0], config={"scaling": c[1]})]
    columns += [("torch", "tensor"), ("torch, loop", "tensor")]
    says = {"tensor": "", "block": ", by blocks"}
    names = [("moe_numba" if n == "final" else n.removeprefix("peer:")) + says[s] for n, s in columns]
    table = [f"| N x K, rows | {' | '.join(names)} | speed of light |", "|---|" + "---:|" * (len(names) + 1)]
    for shape, sides in SHAPES.items():
        for rows in ROWS:
            size = {"rows": rows}
            found = [records.find(record, step=n, config=config_of(shape, s), size=size) for n, s in columns]
            if not found[0]:
                continue
            cells = [f"{row['kernel_us']['median']:.0f}" if row else "" for row in found]
            cells = bold_best(cells)
            table.append(f"| {sides['n']} x {sides['k']}, {rows} | {' | '.join(cells)} | {found[0]['floor_us']:.0f} |")
    table += ["", f"32 groups, rows drawn evenly at random. Kernel time in microseconds, {plots.provenance(record)}."]
    return "\n".join(table)
