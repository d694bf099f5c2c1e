"""Benchmark of the shared-experts fusion: appending the columns after the gate or in it, and whole layers.

There are no peers, because no other project provides the append as a separate function.
"""

import torch

from moe_numba import biased_grouped_topk
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines import torch_layer
from moe_numba.course.bench.baselines.limits import copy_bandwidth, empty_kernel
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import bold_best, markdown_table
from moe_numba.course.bench.timing import call_times, kernel_times, rotating
from moe_numba.shared_experts import fuse_routing, reference

ROUTING = dict(num_experts=256, topk=8)
GATE = dict(num_experts=256, topk=8, num_expert_group=8, topk_group=4, routed_scaling_factor=2.5)
NUM_SHARED = {"all": 1, "round_robin": 8, "random": 8}  # shared experts or replicas per policy
ROUTING_TOKENS = [1, 64, 1024, 4096, 16384, 65536]
QUICK_TOKENS = [64, 16384]
GATE_TOKENS = [1, 64, 256, 1024, 4096, 16384]
MODELS = {"tp8": torch_layer.TP8, "ep8": torch_layer.EP8}
LAYER_TOKENS = {"tp8": [1, 8, 64, 256, 1024, 2048, 4096, 8192], "ep8": [1, 64, 256, 1024, 4096]}
DTYPES = [torch.bfloat16, torch_layer.FP8]
VARIANTS = {"separate": 0, "1 shared": 1, "8 replicas": 8}
MOE_NUMBA_VARIANTS = {
    "separate, own GEMM": 0,
    "1 shared, own GEMM": 1,
}  # variants with this package's grouped GEMM, bfloat16 only
GATES = ["gate alone", "gate, column inside", "gate, then fuse_routing", "gate, then torch"]
DEVICE = "cuda"
TITLES = {"layer": "The layer", "GEMMs": "The layer's GEMMs alone"}
CALL_TOKENS = 64  # the host time of a call does not depend on the number of tokens
MATMUL_SIZE = 8192  # of the square GEMM that measures the tensor cores' rate


def measure(peers, quick):
    """Return the rows of the record. Every step's outputs are checked before it is timed."""
    bandwidth, rows = copy_bandwidth(), empty_kernel()
    for policy in NUM_SHARED:
        for tokens in QUICK_TOKENS if quick or policy != "random" else ROUTING_TOKENS:
            rows += _measure_append(policy, tokens, bandwidth)
    for tokens in [64, 4096] if quick else GATE_TOKENS:
        rows += _measure_gate(tokens, bandwidth)
    for model, shape in list(MODELS.items())[: 1 if quick else None]:
        for dtype in DTYPES:
            rate = measure_matmul_flops(dtype)
            first = torch_layer.Layer(shape, dtype, DEVICE, replicas=8)
            layers = [first, *(first.clone() for _ in range(3))]
            for tokens in [64, 1024] if quick else LAYER_TOKENS[model]:
                rows += _measure_layer(model, layers, tokens, bandwidth, rate, gemms=model == "tp8")
    return rows


def measure_matmul_flops(dtype):
    """Measure the operations per second of a large square GEMM."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=DEVICE).to(dtype) for _ in range(2))
    one = torch.ones((), device=DEVICE)

    def matmul():
        if dtype == torch_layer.FP8:
            return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return a @ b.t()

    us = kernel_times({"": matmul}, launches=5, replays=10)[""].median
    return 2 * MATMUL_SIZE**3 / (us * 1e-6)


def torch_append(topk_weights, topk_ids, num_experts, shared, scale, policy):
    """Append shared experts with torch operations; random replicas come from ``torch.randint``, as in SGLang."""
    tokens, device = len(topk_ids), topk_ids.device
    if policy == "random":
        chosen = torch.randint(num_experts, num_experts + shared, (tokens, 1), dtype=torch.int32, device=device)
    elif policy == "round_robin":
        chosen = (torch.arange(tokens, dtype=torch.int32, device=device) % shared + num_experts)[:, None]
    else:
        chosen = torch.arange(num_experts, num_experts + shared, dtype=torch.int32, device=device).expand(tokens, -1)
    weights = torch.full(chosen.shape, 1 / scale, device=device)
    return torch.cat([topk_weights, weights], dim=1), torch.cat([topk_ids, chosen], dim=1)


def _routing(tokens):
    ids = torch.rand(tokens, ROUTING["num_experts"], device=DEVICE).topk(ROUTING["topk"], dim=1).indices
    return torch.rand(tokens, ROUTING["topk"], device=DEVICE), ids.to(torch.int32)


def _measure_append(policy, tokens, bandwidth):
    experts, topk, shared = ROUTING["num_experts"], ROUTING["topk"], NUM_SHARED[policy]
    width = topk + reference.num_columns(shared, policy)
    num_bytes = tokens * 8 * (topk + width)
    inputs = rotating(lambda: _routing(tokens), num_bytes)
    out = torch.empty(tokens, width, device=DEVICE), torch.empty(tokens, width, dtype=torch.int32, device=DEVICE)
    arguments = dict(num_experts=experts, num_fused_shared_experts=shared, routed_scaling_factor=2.5, policy=policy)
    steps = {
        "final": lambda w, i: fuse_routing(w, i, **arguments),
        "final, out=": lambda w, i: fuse_routing(w, i, **arguments, out=out),
        "torch": lambda w, i: torch_append(w, i, experts, shared, 2.5, policy),
    }
    expected = reference.fuse_routing(*inputs[0], **arguments)
    for name, step in steps.items():
        out[0].fill_(float("nan"))
        out[1].fill_(-7)
        weights, ids = step(*inputs[0])
        if name == "torch" and policy == "random":  # any replica is correct
            is_shared = (ids >= experts) & (ids < experts + shared)
            ids = torch.where(is_shared, expected[1], ids)
        if not (torch.equal(weights, expected[0]) and torch.equal(ids, expected[1])):
            raise AssertionError(f"{name}, {policy}, {tokens} tokens: the routing is wrong")
    calls = {n: [lambda x=x, s=s: s(*x) for x in inputs] for n, s in steps.items() if n != "final"}
    kernel = kernel_times(calls)
    kernel["final"] = kernel["final, out="]  # without the allocations
    call = call_times({n: (lambda s=s: s(*inputs[0])) for n, s in steps.items()}) if tokens == CALL_TOKENS else {}
    config = {**ROUTING, "num_fused_shared_experts": shared, "policy": policy}
    common = dict(
        config=config, size={"tokens": tokens}, dtype="float32", floor_us=num_bytes / bandwidth * 1e6, bytes=num_bytes
    )
    return [
        records.row(n, kernel=kernel[n], call=call.get(n), **common) for n in steps if n in call or n != "final, out="
    ]


def _measure_gate(tokens, bandwidth):
    """Measure the gate and its shared column: in the same launch, appended by ``fuse_routing``, appended by torch."""
    experts, topk, scale = GATE["num_experts"], GATE["topk"], GATE["routed_scaling_factor"]
    groups = {k: GATE[k] for k in ("num_expert_group", "topk_group")}
    bias = torch.rand(experts, device=DEVICE) * 0.2
    inputs = rotating(lambda: torch.randn(tokens, experts, device=DEVICE), tokens * experts * 4)
    routed, wide = ([torch.empty(tokens, n, device=DEVICE) for _ in range(2)] for n in (topk, topk + 1))
    routed[1], wide[1] = routed[1].int(), wide[1].int()

    def alone(x):
        return biased_grouped_topk(x, bias, topk, **groups, out=routed)

    def inside(x):
        shared = dict(num_fused_shared_experts=1, routed_scaling_factor=scale)
        return biased_grouped_topk(x, bias, topk + 1, **groups, **shared, out=wide)

    def then_kernel(x):
        return fuse_routing(*alone(x), experts, 1, scale, out=wide)

    def then_torch(x):
        return torch_append(*alone(x), experts, 1, scale, "all")

    steps = dict(zip(GATES, (alone, inside, then_kernel, then_torch), strict=True))
    expected = [t.clone() for t in then_torch(inputs[0])]
    for name in GATES[1:3]:
        wide[0].fill_(float("nan"))
        wide[1].fill_(-7)
        weights, ids = steps[name](inputs[0])
        if not (torch.equal(ids, expected[1]) and torch.allclose(weights, expected[0], rtol=1e-6, atol=0)):
            raise AssertionError(f"{name}, {tokens} tokens: the routing is wrong")
    kernel = kernel_times({n: [lambda x=x, s=s: s(x) for x in inputs] for n, s in steps.items()})
    call = call_times({n: (lambda s=s: s(inputs[0])) for n, s in steps.items()}) if tokens == CALL_TOKENS else {}
    num_bytes = tokens * (4 * experts + 8 * (topk + 1))
    common = dict(
        config=GATE, size={"tokens": tokens}, dtype="float32", floor_us=num_bytes / bandwidth * 1e6, bytes=num_bytes
    )
    kernel_counts = {n: torch_layer.count_kernels(lambda s=s: s(inputs[0])) for n, s in steps.items()} if call else {}
    return [records.row(n, kernel=kernel[n], call=call.get(n), launches=kernel_counts.get(n), **common) for n in steps]


def _measure_layer(model, layers, tokens, bandwidth, rate, gemms):
    """Measure each variant of the layer and its GEMMs alone, cycling over the layers' weights."""
    first, shape = layers[0], layers[0].shape
    x = first.tokens(tokens)
    expected = first.expected(x)

    def forward(layer, replicas):
        if not replicas:
            return layer.separate(x)
        routing = layer.route(x, 1) if replicas == 1 else _route_to_replicas(layer, x, replicas)
        return layer.fused(x, *routing, shape.num_experts + replicas)

    calls, alone, rooflines = {}, {}, {}
    for name, replicas in (VARIANTS | (MOE_NUMBA_VARIANTS if first.dtype == torch.bfloat16 else {})).items():
        made = (
            [layer.with_grouped_gemm(torch_layer.moe_numba_grouped_gemm) for layer in layers]
            if name in MOE_NUMBA_VARIANTS
            else layers
        )
        if wrong := torch_layer.mismatch(forward(made[0], replicas), expected, first.dtype):
            raise AssertionError(f"{name}, {model}, {tokens} tokens: {wrong}")
        calls[f"layer: {name}"] = [lambda layer=layer, r=replicas: forward(layer, r) for layer in made]
        if gemms:
            alone[f"GEMMs: {name}"] = [_grouped_gemms(layer, x, replicas) for layer in made]
        rooflines[name] = _roofline(first, x, replicas, bandwidth, rate)
        if name in MOE_NUMBA_VARIANTS:  # they describe torch's tiles
            del rooflines[name]["tile_rows"], rooflines[name]["longest_column"]
    del expected
    # A large layer takes long enough without the default repetitions in the graph.
    timing_options = dict(launches=len(layers), replays=12) if tokens >= 1024 else {}
    kernel = kernel_times({**calls, **alone}, **timing_options)
    main = tokens == CALL_TOKENS and model == "tp8"
    first_calls = {n: calls_of_layers[0] for n, calls_of_layers in calls.items()} if main else {}
    call = call_times(first_calls) if main else {}
    kernel_counts = {n: torch_layer.count_kernels(first_call) for n, first_call in first_calls.items()}
    config = {
        "model": model,
        "num_experts": shape.num_experts,
        "topk": shape.topk,
        "hidden_size": shape.hidden_size,
        "moe_intermediate_size": shape.moe_intermediate_size,
    }
    dtype = torch_layer.NAMES[first.dtype]
    return [
        records.row(
            n,
            config=config,
            size={"tokens": tokens},
            dtype=dtype,
            kernel=kernel[n],
            call=call.get(n),
            launches=kernel_counts.get(n),
            **rooflines[n.partition(": ")[2]],
        )
        for n in kernel
    ]


def _route_to_replicas(layer, x, replicas):
    scale = layer.shape.routed_scaling_factor
    return fuse_routing(*layer.route(x), layer.shape.num_experts, replicas, scale, "random")


def _fused_ids(layer, x, replicas):
    return (
        layer.route(x, 1) if replicas == 1 else _route_to_replicas(layer, x, replicas) if replicas else layer.route(x)
    )[1]


def _grouped_gemms(layer, x, replicas):
    """Return a function that runs the grouped GEMMs on gathered rows, and a separate shared expert's dense GEMMs."""
    ids, num_experts = _fused_ids(layer, x, replicas), layer.shape.num_experts + replicas
    order, ends = layer.sort_by_expert(ids, num_experts)
    rows, scales = layer.gather(x, order // ids.shape[1])
    gate_up, down, shared = (
        layer.gate_up.first_experts(num_experts),
        layer.down.first_experts(num_experts),
        layer.shape.num_experts,
    )
    hidden = layer.quantise_if_fp8(torch_layer.swiglu(layer.grouped(rows, scales, gate_up, ends)))
    rows_of_all, shared_hidden = layer.quantise_if_fp8(x), None
    if not replicas:
        shared_hidden = layer.quantise_if_fp8(
            torch_layer.swiglu(torch_layer.torch_dense_gemm(*rows_of_all, layer.gate_up, shared))
        )

    def run():
        layer.grouped(rows, scales, gate_up, ends)
        layer.grouped(*hidden, down, ends)
        if not replicas:
            torch_layer.torch_dense_gemm(*rows_of_all, layer.gate_up, shared)
            torch_layer.torch_dense_gemm(*shared_hidden, layer.down, shared)

    return run


def _roofline(layer, x, replicas, bandwidth, rate):
    """Return bytes, operations, lower bound and tile statistics of a variant."""
    shape, ids = layer.shape, _fused_ids(layer, x, replicas)
    tokens, num_experts = len(x), shape.num_experts + replicas
    experts = layer.count_experts(ids) + (not replicas)
    num_bytes, flops = layer.bytes(tokens, experts), layer.flops(ids.numel() + tokens * (not replicas))
    wide = 2 * shape.moe_intermediate_size
    tile = torch_layer.tile_rows(ids.numel(), num_experts, wide, shape.hidden_size, layer.dtype)
    fullest = int(torch.bincount(ids.flatten().long(), minlength=num_experts).max())
    return dict(
        bytes=num_bytes,
        flops=flops,
        floor_us=max(num_bytes / bandwidth, flops / rate) * 1e6,
        experts=experts,
        tile_rows=tile,
        longest_column=-(-fullest // tile),
    )


def layer_times(record, model, dtype, what="layer"):
    """Return ``{tokens: {variant: us}}`` of the layer, or of its GEMMs, for sizes with all variants."""
    config = {"model": model}
    found = {n: records.series(record, step=f"{what}: {n}", config=config, dtype=dtype) for n in VARIANTS}
    sizes = set.intersection(*(set(points) for points in found.values()))
    return {n: {name: points[n]["median"] for name, points in found.items()} for n in sorted(sizes)}


def figures(record):
    """Draw the sweeps of the routing and the gate, and layer times relative to the separate layer."""
    from moe_numba.course.lessons.shared_experts.layer_figure import layer_bars

    caption, steps = plots.caption(record), {"fuse_routing": "final", "torch": "torch"}
    title = "Appending one of 8 replicas to a routing: kernel time"
    made = {"routing": plots.kernel_sweep(record, steps, dict(config={**ROUTING, "policy": "random"}), title=title)}
    made["gate"] = plots.sweep_figure(
        {name: records.series(record, step=name, config=GATE) for name in GATES},
        title="The gate and its shared column: kernel time",
        caption=caption,
    )
    for model in MODELS:
        for dtype in map(torch_layer.NAMES.get, DTYPES):
            for what in TITLES:
                if times := layer_times(record, model, dtype, what):
                    title = f"{TITLES[what]}, {model.upper()}, {dtype}"
                    made[f"{what.lower()}-{model}-{dtype}"] = layer_bars(
                        times, "separate", title=title, caption=caption
                    )
    return made


def readme_table(record):
    """Return a table of layer times before and after the fusion, and the time of the append."""
    heads = ["separate shared expert", "fused", "fused, 8 replicas", "fused, moe_numba GEMM", "saved"]
    lines, kernel_counts = [], {}
    for dtype in map(torch_layer.NAMES.get, DTYPES):
        for tokens, us in layer_times(record, "tp8", dtype).items():
            wanted = dict(config={"model": "tp8"}, size={"tokens": tokens}, dtype=dtype)
            rows = {name: records.find(record, step=f"layer: {name}", **wanted) for name in VARIANTS}
            saved = 100 * (1 - us["1 shared"] / us["separate"])
            cells = [f"{us['separate']:.1f}", f"{us['1 shared']:.1f}", f"{us['8 replicas']:.1f}", f"{saved:.1f} %"]
            fused_gemm = records.find(record, step="layer: 1 shared, own GEMM", **wanted)
            cells.insert(3, f"{fused_gemm['kernel_us']['median']:.1f}" if fused_gemm else "")
            cells = bold_best(cells, slice(4))
            lines.append([f"{tokens}, {dtype}", *cells, f"{rows['1 shared']['floor_us']:.1f}"])
            if "launches" in rows["separate"]:
                kernel_counts[dtype] = rows["separate"]["launches"], rows["1 shared"]["launches"]
    counts = "; ".join(
        f"{before} before and {after} after in {dtype}" for dtype, (before, after) in kernel_counts.items()
    )
    config = {**ROUTING, "policy": "random"}
    append = [records.find(record, step=s, config=config, size={"tokens": CALL_TOKENS}) for s in ("final", "torch")]
    text = [markdown_table(["tokens, weights", *heads, "speed of light"], lines)]
    if all(append) and kernel_counts:
        append_us, torch_us = (row["kernel_us"]["median"] for row in append)
        text.append(
            f"Kernels per layer: {counts}. Appending the column for {CALL_TOKENS} tokens takes {append_us:.2f} us "
            f"with `fuse_routing` and {torch_us:.2f} us with torch; the gate can also write it itself."
        )
    return "\n\n".join([*text, f"Kernel time in microseconds, median, {plots.provenance(record)}."])
