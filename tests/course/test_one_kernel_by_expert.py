"""A layer whose rows travel in the order of the experts, on several ranks of one process."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.expert_parallel import NUM_BYTES, SHORT_TIMEOUT, engine
from helpers.wrong_kernels import changed

from moe_numba import simulator
from moe_numba.course.lessons.one_kernel import by_launches, kernels
from moe_numba.course.lessons.one_kernel.by_launches import LaunchesByExpert
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.grouped_gemm.reference import FP8, mismatch, quantise_blocks
from moe_numba.moe_layer import Experts, reference
from moe_numba.moe_layer.expert_parallel.one_kernel import OneKernel, counts, kernel
from moe_numba.moe_layer.expert_parallel.one_kernel import layer as layers

HIDDEN, PER_RANK, TOPK, TOKENS = 128, 2, 3, 6
BOUND = 1e-2
BOUND_OF_FP8 = 2e-2  # a last bit of silu may round a value to the next one; a GPU's differs from torch's


def make_inputs(tokens, dtype, seed=0, only=None, hidden=HIDDEN, intermediate=HIDDEN):
    """Return the state of all experts, and x, topk_weights and topk_ids of each rank; ``only``: all on one expert."""
    random, experts = torch.Generator().manual_seed(seed), PER_RANK * len(tokens)
    draw = lambda *shape: torch.randn(shape, generator=random)
    w13 = draw(experts, 2 * intermediate, hidden) / hidden**0.5
    w2 = draw(experts, hidden, intermediate) / intermediate**0.5
    if dtype == FP8:
        (w13, scale13), (w2, scale2) = quantise_blocks(w13), quantise_blocks(w2)
        state = dict(w13=w13, w2=w2, w13_scale=scale13, w2_scale=scale2)
    else:
        state = dict(w13=w13.bfloat16(), w2=w2.bfloat16())
    low, high = (-1, experts + 1) if only is None else (only, only + 1)  # some ids are no expert's
    ranks = [
        (
            draw(n, hidden).bfloat16(),
            torch.rand(n, TOPK, generator=random),
            torch.randint(low, high, (n, TOPK), generator=random, dtype=torch.int32),
        )
        for n in tokens
    ]
    return state, ranks


def start(layer, x, topk_weights, topk_ids):
    """Launch a call, whose result is there when all ranks have run their kernels, perhaps those of later calls, too."""
    out = torch.empty_like(x)
    for launch in layer.launches(x, topk_weights, topk_ids, out).values():
        launch()
    return out


def run(state, ranks, dtype, work=start, seed=0, calls=1, timeout=100.0, kind=LaunchesByExpert, num_sms=2):
    """Run ``work(layer, x, topk_weights, topk_ids)`` on all ranks; every second call is for other experts."""

    def on_rank(transport):
        rank, device = transport.rank, transport.device
        buffer = Buffer(transport, NUM_BYTES, timeout=timeout)
        hidden, intermediate = state["w13"].shape[2], state["w2"].shape[2]
        experts = Experts(PER_RANK, hidden, intermediate, dtype, device)
        experts.load_state_dict({name: t[rank * PER_RANK : (rank + 1) * PER_RANK] for name, t in state.items()})
        most = max(TOKENS, *(len(x) for x, *_ in ranks))
        layer = kind(buffer, experts, TOPK, most, num_sms=num_sms)
        given = [t.to(device) for t in ranks[rank]]
        results = []
        for call in range(calls):
            x, weights, ids = given
            results.append(work(layer, x, weights, layer.sizes.all_experts - 1 - ids if call % 2 else ids).cpu())
        layer.close()
        buffer.destroy()
        assert all(torch.equal(result, results[0]) for result in results[::2])
        return results[0]

    with engine(seed):
        return LocalGroup(len(ranks)).run(on_rank)


def wrong(results, state, ranks):
    scales = state.get("w13_scale"), state.get("w2_scale")
    for result, (x, weights, ids) in zip(results, ranks, strict=True):
        expected = reference.fused_experts(x, state["w13"], state["w2"], weights, ids, *scales)
        bound = BOUND_OF_FP8 if state["w13"].dtype == FP8 else BOUND
        if len(x) and (found := mismatch(result, expected, bound)):
            return found
    return None


def fails(attempt, seed, state, ranks):
    """Return whether ``attempt(seed)`` raises an error or returns a wrong result."""
    try:
        return wrong(attempt(seed), state, ranks) is not None
    except (AssertionError, TimeoutError, simulator.SimulatorError):
        return True


FORMATS = pytest.mark.parametrize("dtype", (torch.bfloat16, FP8), ids=("bf16", "fp8"))


@FORMATS
@pytest.mark.parametrize("tokens, only", (([3, 5], None), ([4, 0], 1), ([4], None)), ids=str)
def test_equals_all_experts_on_one_gpu(tokens, only, dtype):
    state, ranks = make_inputs(tokens, dtype, only=only)
    results = run(state, ranks, dtype)
    assert wrong(results, state, ranks) is None
    assert wrong(results, state, [(x.flip(1), *others) for x, *others in ranks]) is not None


@FORMATS
@pytest.mark.parametrize("tokens, only", (([3, 5], None), ([4, 0], 1), ([4], None)), ids=str)
def test_one_kernel_equals_all_experts_on_one_gpu(tokens, only, dtype):
    state, ranks = make_inputs(tokens, dtype, only=only)
    results = run(state, ranks, dtype, kind=OneKernel)
    assert wrong(results, state, ranks) is None
    assert wrong(results, state, [(x.flip(1), *others) for x, *others in ranks]) is not None


@FORMATS
def test_one_kernel_with_several_tiles(dtype, monkeypatch):
    """Tiles of few rows, some without rows for a warpgroup, columns that end within a tile, rows in pieces."""
    monkeypatch.setattr(kernel, "PIECE_BYTES", 320)
    state, ranks = make_inputs([43, 45], dtype, hidden=384, intermediate=256)
    ranks = [(x, weights, ids.clamp(-1, 1) if r else ids.clamp(0, 1)) for r, (x, weights, ids) in enumerate(ranks)]
    rows = sum((ids == 1).sum() for *_, ids in ranks)
    assert 128 < rows < 192 and rows % 16
    results = run(state, ranks, dtype, kind=OneKernel, num_sms=3)
    assert wrong(results, state, ranks) is None


def scale_rows(layer, x, topk_weights, topk_ids):
    """Carry rows to experts that multiply them by one more than their number, and back."""
    out = torch.empty_like(x)
    for name, launch in layer.launches(x, topk_weights, topk_ids, out).items():
        if name not in ("gate and up", "down"):
            launch()
        if name == "push rows":
            layer.runtime.synchronize()
            starts = layer.exchange.starts.tolist()
            for e in range(PER_RANK):
                rows = slice(starts[e], starts[e + 1])
                layer.rows[rows] = layer.exchange.x[rows] * (1 + layer.rank * PER_RANK + e)
    layer.runtime.synchronize()
    layer.runtime.check_alive()
    return out


def wrongly_scaled(tokens, seed=0, calls=2):
    """Return whether a rank's rows are not what `scale_rows` should make of them."""
    state, ranks = make_inputs(tokens, torch.bfloat16, seed)
    results = run(state, ranks, torch.bfloat16, scale_rows, seed, calls)
    for result, (x, weights, ids) in zip(results, ranks, strict=True):
        valid = (ids >= 0) & (ids < PER_RANK * len(tokens))
        rows = (x[:, None] * (1 + ids[..., None]).bfloat16()).float() * (weights * valid)[..., None]
        if mismatch(result, rows.sum(1), BOUND):
            return True
    return False


@pytest.mark.parametrize("tokens", ([3, 5], [6, 0], [2, 0, 4], [1, 1, 1, 1], [4]), ids=str)
def test_rows_come_back(tokens):
    assert not any(wrongly_scaled(tokens, seed, calls=5) for seed in range(3))


USERS = {kernels: [by_launches], counts: [by_launches, layers], kernel: [layers]}  # module -> where it is imported


def plant(monkeypatch, modules, right, wrong):
    """Change the module of kernels that has the code ``right``; exactly one of ``modules`` has it."""
    (module,) = (each for each in modules if right in Path(each.__file__).read_text())
    for user in USERS[module]:
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(user, name, SimpleNamespace(**changed(module, right, wrong)))


WRONG = {
    "rows of other ranks are overwritten": ("= int32(start + before)", "= start"),
    "all experts begin at the first row": ("int32(end + inclusive - total)", "end"),
    "counters do not release rows": (
        "ld_volatile_s32, red_add_release_sys_s32\n",
        "ld_volatile_s32, red_add_relaxed_sys_s32 as red_add_release_sys_s32\n",
    ),
    "the wait for rows is missing": (
        "wait_count(ctx, local, arrived + e, state[EXPECTED + e], EXPERT_ROWS, e)",
        "pass",
    ),
    "rows are expected of one call only": ("int32(state[EXPECTED + e] + total)", "total"),
    "a lane counts rows that others still write": (
        "row = int32(row - count)\n                cuda.syncwarp()",
        "row = int32(row - count)",
    ),
    "rows go back to the place of another rank's": ("origin - source * assignments", "origin % 3"),
}


@pytest.mark.skipif(not simulator.ENABLED, reason="the simulator runs threads and memory in any order")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_rejected(name, monkeypatch):
    plant(monkeypatch, (kernels, counts), *WRONG[name])
    state, ranks = make_inputs([3, 5], torch.bfloat16)
    attempt = lambda seed: run(state, ranks, torch.bfloat16, seed=seed, calls=3)
    assert any(fails(attempt, seed, state, ranks) for seed in range(8))


LAST_IS_FIRST = dict(timeout=0.1, num_sms=4)  # the last tile of a CTA is its first, too
MORE_TILES, TWO_CALLS = dict(num_sms=1), dict(calls=2, timeout=0.1)
DESCRIBED = "describe_tile(smem, stage, row, rows, column, int32(g + experts) if is_second else g)\n"
WAITS = (
    "counter, place, expected, code = counter_of_rows(ctx, done, lengths, g, is_second)\n"
    "                    wait_count(ctx, counter, place, expected, code, g)\n"
)
WRONG_ONE_KERNEL = {  # what is right, what is wrong, and options of `run`
    "TMA does not wait for rows": ("wait_count(ctx, counter, place, expected, code, g)", "pass"),
    "factors do not wait for scales": ("wait_too(ctx, counter, place, expected)", "pass"),
    "the second GEMM waits for one warp": ("int32(FACTOR_WARPS * tiles)", "int32(1)"),
    "rows are counted before they are stored": ("mbarrier_wait_parity(smem.barriers, stored, phase)", "pass"),
    "activations are not released": ("                fence_acq_rel_gpu()\n", ""),
    "the last rows of the first GEMM are told late": (
        "if is_second and told == 1:",
        "if is_second and told == 3:",
        LAST_IS_FIRST,
    ),
    "the last rows are not told": (
        "if told != 0:\n                    count",
        "if told == 3:\n                    count",
        LAST_IS_FIRST,
    ),
    "a tile is described when its rows are there": (
        f"{DESCRIBED}                    {WAITS}",
        f"{WAITS}                    {DESCRIBED}",
        LAST_IS_FIRST,
    ),
    "rows are counted before they are written": ("                    bulk_wait()  # the rows are written\n", ""),
    "a row overwrites the one before": ("                        bulk_wait_read()  # the", "                        #"),
    "rows are counted for another rank": ("source_0 == s", "source_0 == 0", LAST_IS_FIRST),
    "the wait for rows that come back is missing": (
        "wait_count(ctx, local, returned, state[EXPECTED_BACK], ROWS_BACK, int32(-1))",
        "pass",
    ),
    "up has the scales of gate": ("w_1 = w_0 + int64(n_blocks_1 // 2) * k_blocks", "w_1 = w_0"),
    "up is the next columns of gate": ("(COLUMNS if is_second else intermediate)", "COLUMNS"),
    "a tile is described while its slot is in use": (
        "mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n                    # Before",
        "# Before",
        MORE_TILES,
    ),
    "the end is described while its slot is in use": (
        "mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n                describe_tile",
        "describe_tile",
        MORE_TILES,
    ),
    "no CTA takes the first tile from the counter": (
        "tile = int32(cuda.gridDim.x + atom",
        "tile = int32(cuda.gridDim.x + 1 + atom",
        LAST_IS_FIRST,
    ),
    "the tiles of the call before count": ("range(t, experts + 1, threads)", "range(t, experts, threads)", TWO_CALLS),
}


@pytest.mark.skipif(not simulator.ENABLED, reason="the simulator runs threads and memory in any order")
@pytest.mark.parametrize("name", WRONG_ONE_KERNEL)
def test_a_wrong_one_kernel_is_rejected(name, monkeypatch):
    right, wrong_code, *options = WRONG_ONE_KERNEL[name]
    plant(monkeypatch, (kernel, counts), right, wrong_code)
    state, ranks = make_inputs([3, 5], FP8, hidden=384, intermediate=256)
    attempt = lambda seed: run(state, ranks, FP8, seed=seed, kind=OneKernel, **(options[0] if options else {}))
    assert any(fails(attempt, seed, state, ranks) for seed in range(8))


@pytest.mark.parametrize(
    "kind, dtype", ((LaunchesByExpert, torch.bfloat16), (OneKernel, FP8)), ids=("launches", "one kernel")
)
def test_a_rank_that_sends_no_rows_ends_the_waits_of_others(kind, dtype):
    state, ranks = make_inputs([2, 2], dtype, only=0)

    def work(layer, x, topk_weights, topk_ids):
        out = torch.empty_like(x)
        for name, launch in layer.launches(x, topk_weights, topk_ids, out).items():
            if layer.rank == 0 or name in ("cast", "order", "exchange counts"):
                launch()
        layer.runtime.synchronize()
        if layer.rank == 0:
            waited = "the rows of its expert 0|its tokens' rows to come back"
            with pytest.raises(TimeoutError, match=f"rank 0 waited for ({waited}): expected [0-9]+ .*, found [0-9]+"):
                layer.runtime.check_alive()
            assert out.isnan().all()
        return torch.zeros(1)

    run(state, ranks, dtype, work, timeout=SHORT_TIMEOUT, kind=kind)


@pytest.mark.skipif(not simulator.ENABLED, reason="the simulator runs ranks in any order")
@pytest.mark.parametrize("is_wrong", (False, True))
def test_a_rank_without_rows_may_be_a_call_late(is_wrong, monkeypatch):
    """Rank 0 needs no rows of rank 1 in the first call, and may send the counts of the second before rank 1 reads."""
    if is_wrong:
        plant(monkeypatch, (counts,), "(sequence & 1) * ranks", "0 * ranks")
    state, ranks = make_inputs([2, 0], torch.bfloat16, only=1)

    attempt = lambda seed: run(state, ranks, torch.bfloat16, seed=seed, calls=3, timeout=0.05)
    assert any(fails(attempt, seed, state, ranks) for seed in range(8 if is_wrong else 3)) == is_wrong


def test_a_rank_that_does_not_call_is_named():
    state, ranks = make_inputs([2, 2], torch.bfloat16)

    def only_rank_0(layer, *given):
        if layer.rank:
            return torch.zeros(1)
        with pytest.raises(TimeoutError, match="rank 0 waited for the counts of rank 1"):
            scale_rows(layer, *given)
        return torch.zeros(1)

    run(state, ranks, torch.bfloat16, only_rank_0, timeout=SHORT_TIMEOUT)


@pytest.mark.parametrize(
    "changes, message",
    (
        (dict(topk=0), "topk is 0"),
        (dict(max_tokens=1), "x's number of tokens is 2; 0 to 1 are allowed"),
        (dict(num_sms=0), "num_sms is 0"),
        (dict(max_tokens=1 << 24), "max_tokens is 16777216: with 1 ranks and topk 3 a rank shares .* are allowed"),
    ),
)
def test_invalid_arguments(changes, message):
    state, ranks = make_inputs([2], torch.bfloat16)

    def work(transport):
        buffer = Buffer(transport, NUM_BYTES)
        experts = Experts(PER_RANK, HIDDEN, HIDDEN, torch.bfloat16, transport.device)
        experts.load_state_dict(state)
        with pytest.raises(ValueError, match=message):
            LaunchesByExpert(buffer, experts, **dict(topk=TOPK, max_tokens=TOKENS) | changes)(
                *(t.to(transport.device) for t in ranks[0])
            )
        buffer.destroy()

    LocalGroup(1).run(work)
