"""Test ExpertParallelMoE on several ranks of one process, against the reference with all experts."""

import itertools

import pytest
import torch
from helpers.expert_parallel import NUM_BYTES, SMALL, engine

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.expert_parallel.low_latency import config as low_latency_config
from moe_numba.grouped_gemm.reference import FP8, mismatch, quantise_blocks
from moe_numba.moe_layer import ExpertParallelMoE, Experts, reference
from moe_numba.moe_layer.compile_layers import Layer, compile_layers
from moe_numba.moe_layer.expert_parallel import layer as expert_parallel_moe

HIDDEN, PER_RANK, TOPK = 128, 2, 3
# Each rank's sum is rounded to bfloat16 before combine adds the ranks' sums.
BOUND = 1e-2


@pytest.fixture(autouse=True)
def one_part(monkeypatch):
    """One CTA sends a row. By default four would share it, three of them without a vector of these short rows."""
    if simulator.ENABLED:
        monkeypatch.setattr(low_latency_config, "default_parts", lambda max_tokens: 1)


def make_inputs(tokens, dtype, seed=0, hidden=HIDDEN, per_rank=PER_RANK):
    """Weights of all experts, and x, topk_weights, topk_ids and shared of each rank."""
    random, experts = torch.Generator().manual_seed(seed), per_rank * len(tokens)
    draw = lambda *shape: torch.randn(shape, generator=random)
    w13, w2 = draw(experts, 2 * hidden, hidden) / hidden**0.5, draw(experts, hidden, hidden) / hidden**0.5
    state = dict(w13=w13, w2=w2)
    if dtype == FP8:
        (w13, scale13), (w2, scale2) = quantise_blocks(w13), quantise_blocks(w2)
        state = dict(w13=w13, w2=w2, w13_scale=scale13, w2_scale=scale2)
    state = {name: t if t.dtype != torch.float32 or "scale" in name else t.bfloat16() for name, t in state.items()}
    ranks = [
        (
            draw(n, hidden).bfloat16(),
            torch.rand(n, TOPK, generator=random),
            torch.randint(-1, experts + 1, (n, TOPK), generator=random),
            draw(n, hidden).bfloat16(),
        )
        for n in tokens
    ]
    return state, ranks


def run(state, ranks, dtype=torch.bfloat16, shift=0, shared_experts=None, reference=(), **options):
    """Run the layer on all ranks; with ``shift`` each has the experts of another one."""

    def work(transport):
        rank, device = transport.rank, transport.device
        buffer = Buffer(transport, NUM_BYTES, low_latency_mode="low_latency_tokens" in options)
        experts = Experts(PER_RANK, HIDDEN, HIDDEN, dtype, device, reference)
        first = (rank + shift) % len(ranks) * PER_RANK
        experts.load_state_dict({name: tensor[first : first + PER_RANK] for name, tensor in state.items()})
        if not options.get("fused"):
            options.setdefault("config", SMALL)
        layer = ExpertParallelMoE(buffer, experts, shared_experts=shared_experts, **options)
        assert layer.num_experts == PER_RANK * len(ranks)
        given = ranks[rank][: 3 if shared_experts else 4]
        results = [layer(*(t.to(device) for t in given)).cpu() for _ in range(2)]
        layer.close()
        buffer.destroy()
        assert torch.equal(*results)
        return results[0]

    with engine(0):
        return LocalGroup(len(ranks)).run(work)


def wrong(results, state, ranks, bound=BOUND):
    """Return how the first wrong rank's result differs from the reference, or None."""
    scales = state.get("w13_scale"), state.get("w2_scale")
    for result, (x, weights, ids, shared) in zip(results, ranks, strict=True):
        expected = reference.fused_experts(x, state["w13"], state["w2"], weights, ids, *scales, shared)
        found = mismatch(result, expected, bound) if len(x) else None
        if found or result.shape != x.shape:
            return found or f"the shape is {tuple(result.shape)}"
    return None


DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}
BATCHES = [([3, 5], 0), ([3, 5], 9), ([4, 0, 2], 6), ([4], 0)]


@pytest.mark.parametrize("batch, name", itertools.product(BATCHES, DTYPES))
def test_equals_all_experts_on_one_gpu(batch, name):
    (tokens, worst), dtype = batch, DTYPES[name]
    state, ranks = make_inputs(tokens, dtype)
    assert wrong(run(state, ranks, dtype, num_worst_tokens=worst), state, ranks) is None


@pytest.mark.parametrize("tokens, name", itertools.product([[3, 5], [4, 0]], DTYPES))
def test_low_latency_exchange(tokens, name):
    dtype = DTYPES[name]
    state, ranks = make_inputs(tokens, dtype)
    assert wrong(run(state, ranks, dtype, low_latency_tokens=5), state, ranks) is None


EXCHANGES = dict(num_worst_tokens=8), dict(low_latency_tokens=5)


@pytest.mark.parametrize("in_torch, options", itertools.product([False, True], EXCHANGES))
def test_dispatch_in_fp8(in_torch, options, monkeypatch):
    """Experts with block scales read what arrives. Stages in torch quantise it to the same numbers again."""
    if in_torch:
        options = options | dict(reference={"sum"})
    else:
        monkeypatch.setattr(expert_parallel_moe, "per_token_cast_back", lambda *_: pytest.fail("rows were cast back"))
    state, ranks = make_inputs([3, 5], FP8)
    results = run(state, ranks, FP8, fp8_dispatch=True, **options)
    assert wrong(results, state, ranks) is None
    flipped = [(x.flip(1), *rest) for x, *rest in ranks]
    assert wrong(results, state, flipped) is not None


class Shared(torch.nn.Module):
    """Shared experts that add what is known: twice the tokens."""

    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("fp8_dispatch", [False, True])
def test_sums_in_fp8(fp8_dispatch):
    """The other rank's sums are rounded to FP8, by 1/16 of an element at most."""
    state, ranks = make_inputs([3, 5], FP8)
    options = dict(low_latency_tokens=5, fp8_dispatch=fp8_dispatch)
    results = run(state, ranks, FP8, fp8_combine=True, **options)
    assert wrong(results, state, ranks, 4e-2) is None
    assert not all(map(torch.equal, results, run(state, ranks, FP8, **options)))


@pytest.mark.parametrize("options", EXCHANGES)
def test_dispatch_in_fp8_for_experts_in_bfloat16(options):
    """The experts' tokens are rounded to FP8, which is 1/16 of an element at most."""
    state, ranks = make_inputs([3, 5], torch.bfloat16)
    results = run(state, ranks, fp8_dispatch=True, **options)
    assert wrong(results, state, ranks, 8e-2) is None
    assert wrong(results, state, [(x.roll(1, 0), *rest) for x, *rest in ranks], 8e-2) is not None


@pytest.mark.parametrize("options", EXCHANGES)
def test_shared_experts_run_beside(options):
    state, ranks = make_inputs([3, 5], torch.bfloat16)
    results = run(state, ranks, shared_experts=Shared(), **options)
    assert wrong(results, state, [(x, weights, ids, 2 * x) for x, weights, ids, _ in ranks]) is None
    assert wrong(results, state, ranks) is not None


CHOICES = [  # ranks, options, low_latency_tokens that the layer chooses
    (2, dict(num_worst_tokens=10), 5),
    (2, dict(num_worst_tokens=9, fp8_dispatch=True, fp8_combine=True), 5),
    (3, dict(num_worst_tokens=3 * 512), 512),
    (1, dict(num_worst_tokens=1), 1),
    (2, dict(), 0),
    (2, dict(num_worst_tokens=2 * 513), 0),
    (2, dict(num_worst_tokens=10, config=SMALL), 0),
    (2, dict(num_worst_tokens=10, low_latency_tokens=0), 0),
    (2, dict(num_worst_tokens=10, low_latency_tokens=7), 7),
]


@pytest.mark.parametrize("ranks, options, wanted", CHOICES)
def test_low_latency_is_chosen_by_what_all_ranks_know(ranks, options, wanted):
    def work(transport):
        buffer = Buffer(transport, NUM_BYTES)
        layer = ExpertParallelMoE(buffer, Experts(PER_RANK, HIDDEN, HIDDEN, FP8, transport.device), **options)
        buffer.destroy()
        return layer.low_latency_tokens

    assert LocalGroup(ranks).run(work) == ranks * [wanted]


def test_memory_of_chosen_low_latency_is_bounded():
    def work(transport):
        buffer = Buffer(transport, NUM_BYTES)
        choose = lambda hidden, **more: (
            ExpertParallelMoE(
                buffer, Experts(1, hidden, 64, device="meta"), num_worst_tokens=512 * 8, **more
            ).low_latency_tokens
        )
        found = choose(7168), choose(12288), choose(14336), choose(64), choose(64, fp8_dispatch=True)
        buffer.destroy()
        return found

    assert LocalGroup(8).run(work) == 8 * [(512, 512, 0, 512, 0)]


def test_the_default_computes_by_low_latency_and_layers_share_its_memory():
    state, ranks = make_inputs([5, 2], torch.bfloat16)

    def work(transport):
        buffer, device = Buffer(transport, NUM_BYTES), transport.device
        made, make = [], buffer.low_latency
        buffer.low_latency = lambda *sizes, **options: made.append(make(*sizes, **options)) or made[-1]
        in_torch = "permute", "gate_up", "activation", "down", "sum"  # which are faster in the simulator
        experts = Experts(PER_RANK, HIDDEN, HIDDEN, device=device, reference=in_torch)
        experts.load_state_dict({n: t[transport.rank * PER_RANK :][:PER_RANK] for n, t in state.items()})
        layers = [ExpertParallelMoE(buffer, experts, num_worst_tokens=10) for _ in range(3)]
        given = [tensor.to(device) for tensor in ranks[transport.rank]]
        results = [layer(*given).cpu() for layer in layers[:2]]
        assert made[0] is made[1] and torch.equal(*results)
        layers[0].close()
        assert not made[0].is_closed and torch.equal(layers[1](*given).cpu(), results[0])
        layers[1].close()
        assert made[0].is_closed
        assert torch.equal(layers[2](*given).cpu(), results[0]) and made[2] is not made[0]
        too_many = [torch.cat([tensor, tensor, tensor]) for tensor in given]
        with pytest.raises(ValueError, match="low_latency_tokens is 5, num_worst_tokens / ranks by default; low_lat"):
            layers[2](*too_many)
        buffer.destroy()
        assert made[2].is_closed
        return results[0]

    with engine(0):
        results = LocalGroup(2).run(work)
    assert wrong(results, state, ranks) is None


BOUND_IN_ONE_KERNEL = 2e-2  # a last bit of silu may round an activation to the next FP8 number


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("tokens", ([3, 5], [4, 0], [4]), ids=str)
def test_experts_in_one_kernel(tokens, name):
    dtype = DTYPES[name]
    state, ranks = make_inputs(tokens, dtype)
    results = run(state, ranks, dtype, num_worst_tokens=5 * len(tokens), fused=True)
    assert wrong(results, state, ranks, BOUND_IN_ONE_KERNEL) is None
    flipped = [(x.flip(1), *rest) for x, *rest in ranks]
    assert wrong(results, state, flipped, BOUND_IN_ONE_KERNEL) is not None


def test_layers_in_one_kernel_share_memory():
    state, ranks = make_inputs([3, 2], FP8)

    def work(transport):
        rank, device = transport.rank, transport.device
        buffer = Buffer(transport, NUM_BYTES)
        layers = []
        for sign in (1, -1):
            experts = Experts(PER_RANK, HIDDEN, HIDDEN, FP8, device)
            experts.load_state_dict({n: t[rank * PER_RANK :][:PER_RANK] for n, t in state.items()})
            experts.w2_scale.data *= sign
            layers.append(ExpertParallelMoE(buffer, experts, num_worst_tokens=6, shared_experts=Shared(), fused=True))
        x, weights, ids, _ = (tensor.to(device) for tensor in ranks[rank])
        first, second = (layer(x, weights, ids).cpu() for layer in layers)
        exchanges = buffer._runtime.exchanges
        assert len(exchanges) == 1
        w2 = layers[0].experts.w2
        layers[0].experts.w2 = torch.nn.Parameter((-w2.float()).to(FP8), requires_grad=False)
        assert torch.equal(layers[0](x, weights, ids).cpu(), second)  # other weights, at another address
        layers[0].experts.w2 = w2
        layers[0].close()
        assert len(exchanges) == 1 and torch.equal(layers[1](x, weights, ids).cpu(), second)
        layers[1].close()
        assert not exchanges
        assert torch.equal(layers[0](x, weights, ids).cpu(), first)
        with pytest.raises(
            ValueError, match="x has 4 tokens; num_worst_tokens 6 allows 3 on each of 2 ranks with fused"
        ):
            layers[0](x[:1].expand(4, -1).clone(), weights[:1].expand(4, -1), ids[:1].expand(4, -1))
        buffer.destroy()
        assert not exchanges
        return first, second

    with engine(0):
        results = LocalGroup(2).run(work)
    of_shared = [(x, weights, ids, 2 * x) for x, weights, ids, _ in ranks]
    assert wrong([first for first, _ in results], state, of_shared, BOUND_IN_ONE_KERNEL) is None
    negative = state | dict(w2_scale=-state["w2_scale"])
    assert wrong([second for _, second in results], negative, of_shared, BOUND_IN_ONE_KERNEL) is None


@pytest.mark.gpu
def test_one_kernel_in_a_graph():
    """Replays with other tokens, other routing and fewer tokens; the first call may not be captured."""
    batches = [make_inputs([tokens], FP8, seed) for seed, tokens in enumerate((64, 64, 5))]
    state = batches[0][0]

    def work(transport):
        buffer, device = Buffer(transport, NUM_BYTES), transport.device
        experts = Experts(PER_RANK, HIDDEN, HIDDEN, FP8, device)
        experts.load_state_dict(state)
        layer = ExpertParallelMoE(buffer, experts, num_worst_tokens=64, fused=True)
        given = [tensor.to(device) for tensor in batches[0][1][0]]
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="call the layer once before a CUDA graph captures it"):
            with torch.cuda.graph(graph):
                layer(*given)
        graph = torch.cuda.CUDAGraph()
        layer(*given)
        with torch.cuda.graph(graph):
            result = layer(*given)
        for _, (inputs,) in (*batches, *batches):
            for tensor, new in zip(given, inputs, strict=True):
                tensor.fill_(-1 if tensor.dtype == torch.int64 else 0)[: len(new)] = new.to(device)
            graph.replay()
            assert wrong([result.cpu()[: len(inputs[0])]], state, [inputs], BOUND_IN_ONE_KERNEL) is None
        buffer.check(synchronize=True)
        buffer.destroy()

    LocalGroup(1).run(work)


NOT_FUSED = (
    (dict(num_worst_tokens=0), "num_worst_tokens is 0 and fused True; with fused it must be 1 or more"),
    (dict(config=SMALL), "config is Config.* and fused True; with fused it must not be given"),
    (dict(low_latency_tokens=4), "low_latency_tokens is 4 and fused True"),
    (dict(fp8_combine=True), "fp8_combine is True and fused True"),
    (dict(scaling="tensor"), "experts have the format fp8_tensor, .*; fused=True needs fp8_block or bf16 and silu"),
    (dict(has_bias=True, dtype=torch.bfloat16), "experts have the format bf16, biases or no silu; fused=True needs"),
    (dict(hidden=192), "experts have hidden 192 and intermediate 128; both must be multiples of 128"),
    (dict(reference={"sum"}), "experts.reference is .'sum'.; fused=True has no stages in torch"),
)


@pytest.mark.parametrize("changes, message", NOT_FUSED)
def test_arguments_that_do_not_go_with_one_kernel(changes, message):
    made = dict(hidden=HIDDEN, dtype=FP8, reference=(), scaling="block", has_bias=False)
    options = dict(num_worst_tokens=4) | {name: value for name, value in changes.items() if name not in made}
    made |= {name: value for name, value in changes.items() if name in made}

    def work(transport):
        buffer = Buffer(transport, NUM_BYTES)
        hidden, dtype, *others = made.values()
        experts = Experts(PER_RANK, hidden, HIDDEN, dtype, transport.device, *others)
        with pytest.raises(ValueError, match=message):
            ExpertParallelMoE(buffer, experts, fused=True, **options)
        buffer.destroy()

    LocalGroup(1).run(work)


def test_experts_of_another_rank_are_rejected():
    state, ranks = make_inputs([3, 5], torch.bfloat16)
    assert wrong(run(state, ranks, shift=1), state, ranks) is not None


def test_conversions_leave_scales_and_quantised_weights():
    def work(transport):
        buffer = Buffer(transport, NUM_BYTES)
        shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        layer = ExpertParallelMoE(buffer, Experts(PER_RANK, HIDDEN, HIDDEN, FP8), shared_experts=shared).half()
        buffer.destroy()
        return {name: parameter.dtype for name, parameter in layer.named_parameters()}

    experts = dict(w13=FP8, w2=FP8, w13_scale=torch.float32, w2_scale=torch.float32)
    wanted = {f"experts.{name}": dtype for name, dtype in experts.items()} | {"shared_experts.weight": torch.float16}
    assert LocalGroup(1).run(work) == [wanted]


def test_invalid_arguments():
    with pytest.raises(TypeError, match="buffer is NoneType; it must be a moe_numba.Buffer"):
        ExpertParallelMoE(None, Experts(PER_RANK, HIDDEN, HIDDEN))

    def work(transport):
        buffer, device = Buffer(transport, NUM_BYTES), transport.device
        experts = Experts(PER_RANK, HIDDEN, HIDDEN, device=device)
        with pytest.raises(TypeError, match="experts is Linear; it must be a moe_numba.moe_layer.Experts"):
            ExpertParallelMoE(buffer, torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match="num_worst_tokens is -1; it must be 0 or more"):
            ExpertParallelMoE(buffer, experts, -1)
        with pytest.raises(ValueError, match="low_latency_tokens is -1; 0 to"):
            ExpertParallelMoE(buffer, experts, low_latency_tokens=-1)
        with pytest.raises(ValueError, match="fp8_combine is True and low_latency_tokens 0; only low-latency combine"):
            ExpertParallelMoE(buffer, experts, fp8_combine=True)
        with pytest.raises(TypeError, match="shared_experts is int; it must be a torch.nn.Module"):
            ExpertParallelMoE(buffer, experts, shared_experts=3)
        with pytest.raises(TypeError, match="config is 3; it must be a Config"):
            ExpertParallelMoE(buffer, experts, config=3)
        for name in ("fp8_dispatch", "fp8_combine", "fused"):
            with pytest.raises(TypeError, match=f"{name} is 1; it must be True or False"):
                ExpertParallelMoE(buffer, experts, **{name: 1})
        x, weights, ids = (torch.zeros(3, columns, device=device) for columns in (HIDDEN, 2, 2))
        x, ids = x.bfloat16(), ids.long()
        layer = ExpertParallelMoE(buffer, experts, low_latency_tokens=2)
        with pytest.raises(ValueError, match="x has 3 tokens; the layer's low_latency_tokens is 2"):
            layer(x, weights, ids)
        layer = ExpertParallelMoE(buffer, experts, shared_experts=Shared())
        with pytest.raises(ValueError, match="shared is given, but the layer has shared_experts"):
            layer(x, weights, ids, x)
        buffer.destroy()

    LocalGroup(1).run(work)


@pytest.mark.parametrize("tokens", [0, 2], ids=["dispatch", "low latency"])
def test_invalid_tensors(tokens, monkeypatch):
    """They are refused before anything is sent: nothing but a call with right ones reaches the experts."""

    def work(transport):
        buffer, device = Buffer(transport, NUM_BYTES), transport.device
        experts = Experts(PER_RANK, HIDDEN, HIDDEN, device=device)
        for parameter in experts.parameters():
            parameter.data.zero_()
        layer = ExpertParallelMoE(buffer, experts, config=SMALL, low_latency_tokens=tokens)
        x, weights, ids = (torch.ones(2, columns, device=device) for columns in (HIDDEN, 2, 2))
        given = dict(x=x.bfloat16(), topk_weights=weights, topk_ids=ids.int() - 1)
        given["shared"] = given["x"].clone()
        with monkeypatch.context() as patch:
            patch.setattr(layer, "compute", lambda *_: pytest.fail("the experts were computed"))
            for error, match, changed in (
                (TypeError, "x is list; it must be a tensor", dict(x=[1])),
                (ValueError, r"x has shape \(\); it must be \[tokens, 128\]", dict(x=torch.ones(()))),
                (ValueError, r"x has shape \(2, 64\); it must be \[tokens, 128\]", dict(x=given["x"][:, :64])),
                (
                    ValueError,
                    r"topk_ids has shape \(2,\); it must be \[2, topk\], as x",
                    dict(topk_ids=given["topk_ids"][0]),
                ),
                (TypeError, "shared is list; it must be a tensor", dict(shared=[1])),
                (TypeError, "shared is torch.float32; it must be torch.bfloat16", dict(shared=given["x"].float())),
                (ValueError, r"shared has shape \(1, 128\)", dict(shared=given["x"][:1])),
                (ValueError, r"shared has shape \(3, 2, 128\)", dict(shared=given["x"].expand(3, 2, HIDDEN))),
            ):
                with pytest.raises(error, match=match):
                    layer(**given | changed)
        with torch.no_grad():
            given["x"].requires_grad_()
            assert torch.equal(layer(**given), given["shared"])
        layer.close()
        buffer.destroy()

    LocalGroup(1).run(work)


# One process and one GPU per rank

GPU_HIDDEN, GPU_PER_RANK, GPU_TOKENS = 1024, 8, 64
GPU_BOUND = 2e-2  # tensor cores add FP8 products with fewer bits, see test_moe_layer.py


def compute_in_processes(rank, ranks, dtype):
    """Eager calls with other numbers of tokens, also 0, and replays of a CUDA graph with other tokens and routing."""
    import torch.distributed as dist

    buffer = Buffer(dist.group.WORLD, 1 << 27, low_latency_mode=True, timeout=60)
    device, few = buffer.transport.device, dict(num_worst_tokens=ranks * GPU_TOKENS)  # by low latency
    worst = few | dict(low_latency_tokens=0)
    counts = [[GPU_TOKENS] * ranks, [5 * r for r in range(ranks)], [GPU_TOKENS - r for r in range(ranks)]]
    sizes = dict(hidden=GPU_HIDDEN, per_rank=GPU_PER_RANK)
    state, _ = make_inputs([1] * ranks, dtype, **sizes)
    inputs = [make_inputs(tokens, dtype, i + 1, **sizes)[1][rank] for i, tokens in enumerate(counts)]
    inputs = [[tensor.to(device) for tensor in given] for given in inputs]
    state = {name: tensor.to(device) for name, tensor in state.items()}
    experts = Experts(GPU_PER_RANK, GPU_HIDDEN, GPU_HIDDEN, dtype, device)
    own = slice(rank * GPU_PER_RANK, (rank + 1) * GPU_PER_RANK)
    experts.load_state_dict({name: tensor[own] for name, tensor in state.items()})

    def check(result, given, what):
        x, weights, ids, shared = given
        scales = state.get("w13_scale"), state.get("w2_scale")
        wanted = reference.fused_experts(x, state["w13"], state["w2"], weights, ids, *scales, shared)
        found = mismatch(result, wanted, GPU_BOUND) if len(x) else None
        assert found is None and result.shape == x.shape, f"{what}: {found}"

    in_fp8 = worst | dict(fp8_dispatch=True), few | dict(fp8_dispatch=True)
    for options in ({}, worst, few, few | dict(fused=True), *(in_fp8 if dtype == FP8 else ())):
        for shared_experts in (None, Shared()):
            layer = ExpertParallelMoE(buffer, experts, shared_experts=shared_experts, **options)

            def call(x, weights, ids, shared, layer=layer):
                return layer(x, weights, ids) if layer.shared_experts else layer(x, weights, ids, shared)

            if shared_experts:
                inputs = [[x, weights, ids, 2 * x] for x, weights, ids, _ in inputs]
            for i, given in enumerate(inputs):
                for _ in range(3):
                    check(call(*given), given, f"{options}, {shared_experts}, inputs {i}")
            if options:
                replay_with_other_inputs(call, inputs, check, f"graph, {options}, {shared_experts}")
            buffer.check(synchronize=True)
            layer.close()
    buffer.destroy()


def replay_with_other_inputs(call, inputs, check, what):
    """Capture a call, and replay it with the first tokens of other inputs; ids of absent tokens are -1."""
    import torch.distributed as dist

    given = [tensor.clone() for tensor in inputs[0]]
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call(*given)
    for other in (*inputs, *inputs):
        for tensor, new in zip(given, other, strict=True):
            tensor.fill_(-1 if tensor.dtype == torch.int64 else 0)[: len(new)] = new
        graph.replay()
        check(result, given, what)


@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_one_process_per_gpu(dtype):
    from helpers.rank_processes import num_ranks, run

    name = "e4m3" if dtype == FP8 else "bf16"
    received = 8, GPU_TOKENS, num_ranks() * GPU_TOKENS
    layers = [Layer("", GPU_PER_RANK, GPU_HIDDEN, GPU_HIDDEN, name, received, TOPK)]
    compile_layers(layers, torch.int64)
    run(compute_in_processes, dtype)
