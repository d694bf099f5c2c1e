"""What is measured of shared experts: appending them to a routing, after the gate or in it, and whole layers.

No other project offers the append as a function of its own, so peers are not asked.
"""

import torch

from moe_numba import biased_grouped_topk
from moe_numba.course.bench import plots, records
from moe_numba.course.bench.baselines import torch_layer
from moe_numba.course.bench.baselines.limits import copy_bandwidth, empty_kernel
from moe_numba.course.bench.tables import bold_best
from moe_numba.course.bench.timing import call_times, kernel_times, rotating
from moe_numba.shared_experts import fuse_routing, reference

ROUTING = dict(num_experts=256, topk=8)
GATE = dict(num_experts=256, topk=8, num_expert_group=8, topk_group=4, routed_scaling_factor=2.5)
SHARED = {"all": 1, "round_robin": 8, "random": 8}  # shared experts of each policy
ROUTING_TOKENS = [1, 64, 1024, 4096, 16384, 65536]
FEW_TOKENS = [64, 16384]
GATE_TOKENS = [1, 64, 256, 1024, 4096, 16384]
MODELS = {"tp8": torch_layer.TP8, "ep8": torch_layer.EP8}
LAYER_TOKENS = {"tp8": [1, 8, 64, 256, 1024, 2048, 4096, 8192], "ep8": [1, 64, 256, 1024, 4096]}
DTYPES = [torch.bfloat16, torch_layer.FP8]
VARIANTS = {"separate": 0, "1 shared": 1, "8 replicas": 8}
OWN = {"separate, own GEMM": 0, "1 shared, own GEMM": 1}  # with this package's grouped GEMM, in bfloat16
GATES = ["gate alone", "gate, column inside", "gate, then fuse_routing", "gate, then torch"]
DEVICE = "cuda"
TITLES = {"layer": "The layer", "GEMMs": "The layer's matrix products alone"}
CALL_TOKENS = 64  # what a call costs the host does not depend on the tokens
SIDE = 8192  # of the square matrices whose product is the tensor cores' yardstick


def measure(peers, quick):
    """Rows for the record: every step's outputs are checked before it is timed."""
    bandwidth, rows = copy_bandwidth(), empty_kernel()
    for policy in SHARED:
        for tokens in FEW_TOKENS if quick or policy != "random" else ROUTING_TOKENS:
            rows += _measure_append(policy, tokens, bandwidth)
    for tokens in [64, 4096] if quick else GATE_TOKENS:
        rows += _measure_gate(tokens, bandwidth)
    for model, shape in list(MODELS.items())[: 1 if quick else None]:
        for dtype in DTYPES:
            rate = product_rate(dtype)
            first = torch_layer.Layer(shape, dtype, DEVICE, replicas=8)
            layers = [first, *(first.clone() for _ in range(3))]
            for tokens in [64, 1024] if quick else LAYER_TOKENS[model]:
                rows += _measure_layer(model, layers, tokens, bandwidth, rate, gemms=model == "tp8")
    return rows


def product_rate(dtype):
    """Operations a second of a large square product: the tensor cores' ceiling as it is."""
    a, b = (torch.randn(SIDE, SIDE, device=DEVICE).to(dtype) for _ in range(2))
    one = torch.ones((), device=DEVICE)

    def product():
        if dtype == torch_layer.FP8:
            return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return a @ b.t()

    us = kernel_times({"": product}, launches=5, replays=10)[""].median
    return 2 * SIDE**3 / (us * 1e-6)


def torch_append(topk_weights, topk_ids, num_experts, shared, scale, policy):
    """What ``fuse_routing`` does, in torch operations; the random choice is ``torch.randint``'s, as in SGLang."""
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
    experts, topk, shared = ROUTING["num_experts"], ROUTING["topk"], SHARED[policy]
    width = topk + reference.columns(shared, policy)
    count = tokens * 8 * (topk + width)
    inputs = rotating(lambda: _routing(tokens), count)
    out = torch.empty(tokens, width, device=DEVICE), torch.empty(tokens, width, dtype=torch.int32, device=DEVICE)
    arguments = dict(num_experts=experts, num_fused_shared_experts=shared, routed_scaling_factor=2.5, policy=policy)
    steps = {
        "final": lambda w, i: fuse_routing(w, i, **arguments),
        "final, out=": lambda w, i: fuse_routing(w, i, **arguments, out=out),
        "torch": lambda w, i: torch_append(w, i, experts, shared, 2.5, policy),
    }
    right = reference.fuse_routing(*inputs[0], **arguments)
    for name, step in steps.items():
        out[0].fill_(float("nan"))
        out[1].fill_(-7)
        weights, ids = step(*inputs[0])
        if name == "torch" and policy == "random":  # which replica is left to chance, but it must be one
            is_shared = (ids >= experts) & (ids < experts + shared)
            ids = torch.where(is_shared, right[1], ids)
        if not (torch.equal(weights, right[0]) and torch.equal(ids, right[1])):
            raise AssertionError(f"{name}, {policy}, {tokens} tokens: the routing is wrong")
    calls = {n: [lambda x=x, s=s: s(*x) for x in inputs] for n, s in steps.items() if n != "final"}
    kernel = kernel_times(calls)
    kernel["final"] = kernel["final, out="]  # an allocation inside a graph is not the kernel's
    call = call_times({n: (lambda s=s: s(*inputs[0])) for n, s in steps.items()}) if tokens == CALL_TOKENS else {}
    config = {**ROUTING, "num_fused_shared_experts": shared, "policy": policy}
    more = dict(config=config, size={"tokens": tokens}, dtype="float32", floor_us=count / bandwidth * 1e6, bytes=count)
    return [
        records.row(n, kernel=kernel[n], call=call.get(n), **more) for n in steps if n in call or n != "final, out="
    ]


def _measure_gate(tokens, bandwidth):
    """The gate with its shared column: in its own launch, appended by ``fuse_routing``, appended by torch."""
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
    right = [t.clone() for t in then_torch(inputs[0])]
    for name in GATES[1:3]:
        wide[0].fill_(float("nan"))
        wide[1].fill_(-7)
        weights, ids = steps[name](inputs[0])
        if not (torch.equal(ids, right[1]) and torch.allclose(weights, right[0], rtol=1e-6, atol=0)):
            raise AssertionError(f"{name}, {tokens} tokens: the routing is wrong")
    kernel = kernel_times({n: [lambda x=x, s=s: s(x) for x in inputs] for n, s in steps.items()})
    call = call_times({n: (lambda s=s: s(inputs[0])) for n, s in steps.items()}) if tokens == CALL_TOKENS else {}
    count = tokens * (4 * experts + 8 * (topk + 1))
    more = dict(config=GATE, size={"tokens": tokens}, dtype="float32", floor_us=count / bandwidth * 1e6, bytes=count)
    starts = {n: torch_layer.launches(lambda s=s: s(inputs[0])) for n, s in steps.items()} if call else {}
    return [records.row(n, kernel=kernel[n], call=call.get(n), launches=starts.get(n), **more) for n in steps]


def _measure_layer(model, layers, tokens, bandwidth, rate, gemms):
    """The layer, and its grouped GEMMs alone, for each variant; the layers' weights take turns."""
    first, shape = layers[0], layers[0].shape
    x = first.tokens(tokens)
    right = first.right(x)

    def forward(layer, replicas):
        if not replicas:
            return layer.separate(x)
        routing = layer.route(x, 1) if replicas == 1 else _replicated(layer, x, replicas)
        return layer.fused(x, *routing, shape.num_experts + replicas)

    calls, alone, facts = {}, {}, {}
    for name, replicas in (VARIANTS | (OWN if first.dtype == torch.bfloat16 else {})).items():
        made = [layer.on(torch_layer.own_grouped) for layer in layers] if name in OWN else layers
        if wrong := torch_layer.mismatch(forward(made[0], replicas), right, first.dtype):
            raise AssertionError(f"{name}, {model}, {tokens} tokens: {wrong}")
        calls[f"layer: {name}"] = [lambda layer=layer, r=replicas: forward(layer, r) for layer in made]
        if gemms:
            alone[f"GEMMs: {name}"] = [_products(layer, x, replicas) for layer in made]
        facts[name] = _facts(first, x, replicas, bandwidth, rate)
        if name in OWN:  # the tiles are torch's
            del facts[name]["tile_rows"], facts[name]["longest_column"]
    del right
    # A large layer fills the graph by itself; the default would repeat it twenty times.
    often = dict(launches=len(layers), replays=12) if tokens >= 1024 else {}
    kernel = kernel_times({**calls, **alone}, **often)
    main = tokens == CALL_TOKENS and model == "tp8"
    call = call_times({n: own[0] for n, own in calls.items()}) if main else {}
    starts = {n: torch_layer.launches(own[0]) for n, own in calls.items()} if main else {}
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
            launches=starts.get(n),
            **facts[n.partition(": ")[2]],
        )
        for n in kernel
    ]


def _replicated(layer, x, replicas):
    scale = layer.shape.routed_scaling_factor
    return fuse_routing(*layer.route(x), layer.shape.num_experts, replicas, scale, "random")


def _ids(layer, x, replicas):
    return (layer.route(x, 1) if replicas == 1 else _replicated(layer, x, replicas) if replicas else layer.route(x))[1]


def _products(layer, x, replicas):
    """The grouped GEMMs on rows that lie ready, and for a shared expert of its own the two plain ones."""
    ids, count = _ids(layer, x, replicas), layer.shape.num_experts + replicas
    order, ends = layer.by_expert(ids, count)
    rows, scales = layer.gather(x, order // ids.shape[1])
    gate_up, down, shared = layer.gate_up.first(count), layer.down.first(count), layer.shape.num_experts
    hidden = layer.prepared(torch_layer.swiglu(layer.grouped(rows, scales, gate_up, ends)))
    own, own_hidden = layer.prepared(x), None
    if not replicas:
        own_hidden = layer.prepared(torch_layer.swiglu(torch_layer.torch_dense(*own, layer.gate_up, shared)))

    def run():
        layer.grouped(rows, scales, gate_up, ends)
        layer.grouped(*hidden, down, ends)
        if not replicas:
            torch_layer.torch_dense(*own, layer.gate_up, shared)
            torch_layer.torch_dense(*own_hidden, layer.down, shared)

    return run


def _facts(layer, x, replicas, bandwidth, rate):
    """Bytes, operations and floor of a variant, and the tiles of its fullest expert."""
    shape, ids = layer.shape, _ids(layer, x, replicas)
    tokens, count = len(x), shape.num_experts + replicas
    experts = layer.touched(ids) + (not replicas)
    moved, flops = layer.bytes(tokens, experts), layer.flops(ids.numel() + tokens * (not replicas))
    wide = 2 * shape.moe_intermediate_size
    tile = torch_layer.tile_rows(ids.numel(), count, wide, shape.hidden_size, layer.dtype)
    fullest = int(torch.bincount(ids.flatten().long(), minlength=count).max())
    return dict(
        bytes=moved,
        flops=flops,
        floor_us=max(moved / bandwidth, flops / rate) * 1e6,
        experts=experts,
        tile_rows=tile,
        longest_column=-(-fullest // tile),
    )


def layer_times(record, model, dtype, what="layer"):
    """``{tokens: {variant: microseconds}}`` of the layer, or of its GEMMs, where all variants were measured."""
    config = {"model": model}
    found = {n: records.series(record, step=f"{what}: {n}", config=config, dtype=dtype) for n in VARIANTS}
    sizes = set.intersection(*(set(points) for points in found.values()))
    return {n: {name: points[n]["median"] for name, points in found.items()} for n in sorted(sizes)}


def figures(record):
    """The routing over tokens, and layers with the shared expert folded in, as parts of the layer before."""
    from moe_numba.course.bench.layer_figure import layer_bars

    caption, made = plots.caption(record), {}
    empty = records.find(record, step="empty kernel", config={"dependent": True})["kernel_us"]["median"]
    config = {**ROUTING, "policy": "random"}
    floor = records.series(record, value="floor_us", step="final", config=config)
    made["routing"] = plots.sweep_figure(
        {n: records.series(record, step=s, config=config) for n, s in (("fuse_routing", "final"), ("torch", "torch"))},
        floor={tokens: max(us, empty) for tokens, us in floor.items()},
        title="Appending one of 8 replicas to a routing: kernel time",
        caption=caption,
    )
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
    ladder = records.recorded("shared_experts_ladder", records.folder(record["gpu"]))
    if ladder:
        tokens = ladder["rows"][0]["size"]["tokens"]
        made["ladder"] = plots.ladder_figure(
            ladder["rows"],
            lines={"speed of light": next(row["floor_us"] for row in ladder["rows"] if "floor_us" in row)},
            title=f"Folding the shared expert, step by step: {tokens} tokens, DeepSeek-V3 on one of 8 GPUs",
            caption=plots.caption(ladder),
            reference="separate",
        )
    return made


def readme_table(record):
    """The layer before and after, microseconds and kernels, and what appending the column costs."""
    heads = ["shared expert apart", "folded in", "folded in, 8 replicas", "folded in, own GEMM", "saved"]
    lines = [f"| tokens, weights | {' | '.join(heads)} | speed of light |", "|---|" + "---:|" * (len(heads) + 1)]
    starts = {}
    for dtype in map(torch_layer.NAMES.get, DTYPES):
        for tokens, us in layer_times(record, "tp8", dtype).items():
            wanted = dict(config={"model": "tp8"}, size={"tokens": tokens}, dtype=dtype)
            rows = {name: records.find(record, step=f"layer: {name}", **wanted) for name in VARIANTS}
            saved = 100 * (1 - us["1 shared"] / us["separate"])
            cells = [f"{us['separate']:.1f}", f"{us['1 shared']:.1f}", f"{us['8 replicas']:.1f}", f"{saved:.1f} %"]
            own = records.find(record, step="layer: 1 shared, own GEMM", **wanted)
            cells.insert(3, f"{own['kernel_us']['median']:.1f}" if own else "")
            cells = bold_best(cells, slice(4))
            lines.append(f"| {tokens}, {dtype} | {' | '.join(cells)} | {rows['1 shared']['floor_us']:.1f} |")
            if "launches" in rows["separate"]:
                starts[dtype] = rows["separate"]["launches"], rows["1 shared"]["launches"]
    counts = "; ".join(f"{before} before and {after} after in {dtype}" for dtype, (before, after) in starts.items())
    config = {**ROUTING, "policy": "random"}
    append = [records.find(record, step=s, config=config, size={"tokens": CALL_TOKENS}) for s in ("final", "torch")]
    lines.append("")
    if all(append) and starts:
        own, theirs = (row["kernel_us"]["median"] for row in append)
        lines.append(
            f"The layer starts so many kernels: {counts}. To append the column for {CALL_TOKENS} tokens takes "
            f"`fuse_routing` {own:.2f} us and torch {theirs:.2f} us; the gate can also write it in its own launch."
        )
        lines.append("")
    lines.append(f"Kernel time in microseconds, median, {plots.provenance(record)}.")
    return "\n".join(lines)
