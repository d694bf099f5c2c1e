"""Checks of what the article on DeepEP's intranode kernels says about their code, most of them in the simulator.

The simulator runs this course's Numba port of the kernels (`articles.deepep`).
"""

import ast
import inspect
from collections import Counter
from functools import cache

import torch
from numba import cuda, int32

from moe_numba import simulator
from moe_numba.course.deepep_port import combine, dispatch_layout, launch, simulate
from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig, dispatch_offsets, min_buffer_bytes
from moe_numba.course.lessons.ring_buffer_dispatch.draw_ring_trace import play, replay
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.verdicts import Found
from moe_numba.expert_parallel import reference
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.runtime import launch as runtime_launch
from moe_numba.runtime.sass import compile_apart

RANKS, CHANNELS, SEEDS, ALIGNMENT = range(2), 4, 6, 4
# The article's example: two ranks, eight tokens each, four channels. Whether each token goes to rank 0 and to rank 1.
EXAMPLE = [
    [[1, 0], [0, 1], [0, 1], [1, 1], [1, 0], [0, 1], [1, 1], [0, 1]],
    [[0, 1], [1, 0], [1, 1], [1, 0], [0, 1], [1, 0], [1, 0], [1, 1]],
]
FEW_IDS = [[[0, 3], [1, 2], [0, 1], [3, 2], [0, 2]], [[2, 3], [1, 0], [3, 1], [2, 0]]]  # topk_idx, 4 experts


# What runs in the simulator. Results are plain, since they may come from another process.


def simulated():
    """Run the kernels of all checks in the simulator."""
    return {
        "played": play(EXAMPLE, 4, 2, CHANNELS),
        "slow": play(EXAMPLE, 2, 1, 1, 1, 3),
        "most": _most_in_a_ring(play(EXAMPLE, 2, 1, 1, 1, 3)),
        "notify": _notify(),
        "cached": _cached_notify(),
        "layout": _layout(),
        "faults": {fault: _wrong_seeds(fault) for fault in ("", "no barrier", "plain tail", "relaxed poll")},
    }


@cache
def _simulated():
    return in_simulator(simulated)


@cuda.jit
def read_words(buffers, rank, out, count):
    """Copy the first words of a rank's buffer."""
    words = pointer_from_address(buffers[rank], out)
    for i in range(count):
        out[i] = int32(words[i])


def _words(rank, config):
    out = torch.zeros(dispatch_offsets(config).x // 4, dtype=torch.int32)
    runtime_launch.launch(read_words, 1, 1, rank.buffers, rank.rank, out, len(out))
    return out


def _small_config():
    return DeepEPConfig(2, 2, 2, 2, 32, 2, 0, 4, 1)


def _notify():
    """Exchange the counts of ``FEW_IDS``; return what each host sees, and what each buffer holds afterwards."""
    config, ids = _small_config(), [torch.tensor(rows) for rows in FEW_IDS]
    layouts = [reference.dispatch_layout(rows, 2, 4) for rows in ids]
    with simulate.virtual_ranks(2, min_buffer_bytes(config)) as ranks, simulator.seed(0), simulator.weak_memory():
        found = simulate.notify_all(ranks, config, [layout[2] for layout in layouts], ids, ALIGNMENT)
        buffers = [_words(rank, config) for rank in ranks]
    first = dispatch_offsets(config).start // 4
    return {
        "counted": [layout[1].tolist() for layout in layouts],
        "experts": [per_expert.tolist() for *_, per_expert in found],
        "not cleared": sum(int((words[first:] != 0).sum()) for words in buffers),
        "kept": [words[:4].tolist() == matrix.view(-1).tolist() for words, (matrix, *_) in zip(buffers, found)],
    }


def _cached_notify():
    """Run the kernel for a known layout on poisoned buffers; return how many words it cleared beside the matrix."""
    config = _small_config()
    matrix = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    with simulate.virtual_ranks(2, min_buffer_bytes(config)) as ranks, simulator.seed(0):
        simulate.on_all(ranks, lambda rank: launch.cached_notify_dispatch(rank, config, matrix))
        words = _words(ranks[0], config)
    return {"copied": words[:4].tolist() == [1, 2, 3, 4], "cleared": int((words[4:] == 0).sum())}


def _layout():
    """Run the layout kernel; return the ids that each CTA reads, and how far the counts are right."""
    torch.manual_seed(0)
    tokens, topk, experts, ranks = 70, 3, 64, 8
    ids = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)])
    with simulator.trace(accesses=True) as events:
        per_rank, per_expert, _ = dispatch_layout.get_dispatch_layout(ids, experts, ranks)
    reads = Counter(e.block.x for e in events if e.what == "global load" and e.details["buffer"] == "topk_idx")
    distinct = torch.zeros(ranks, dtype=torch.int64)
    for row in ids:
        distinct[(row // (experts // ranks)).unique()] += 1
    return {
        "ids": ids.numel(),
        "reads": sorted(reads.values()),
        "per rank": per_rank.tolist(),
        "distinct": distinct.tolist(),
        "per expert": int(per_expert.sum()),
    }


def _most_in_a_ring(played):
    """Return the most rows that were published and not taken, and the slots of a ring."""
    most = max(ring.tail - ring.head for _, rings in replay(played) for ring in rings.values())
    return [int(most), played["ring"]]


def _wrong_seeds(fault):
    """Count the seeds under which a dispatch of two ranks goes wrong, with one line of the kernel changed."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty is then filled: its contents affect the order of events
    torch.manual_seed(1)
    chosen = [torch.ones(tokens, 2, dtype=torch.bool) for tokens in (9, 7)]
    x = [torch.randn(len(rows), 16).bfloat16() for rows in chosen]
    wanted, wrong = reference.dispatch(x, chosen), 0
    config = DeepEPConfig(2, 1, 2, 2, 32, 0, 0, 2, 2, fault=fault)
    try:
        for seed in range(SEEDS):
            try:
                with simulate.virtual_ranks(2, min_buffer_bytes(config)) as ranks:
                    with simulator.seed(seed), simulator.weak_memory():
                        got = simulate.dispatch_all(ranks, config, x, chosen)
                wrong += any((a[0].view(torch.int16) != b.x.view(torch.int16)).any() for a, b in zip(got, wanted))
            except simulator.SimulatorError:
                wrong += 1
    finally:
        torch.use_deterministic_algorithms(deterministic)
    return int(wrong)


# get_dispatch_layout


def layout_blocks() -> Found:
    count = dispatch_layout.num_blocks(256, 8)
    return Found(count, f"{count} CTAs for 256 experts and 8 ranks: 256 / 32 + 8 / 8")


def reads_of_a_block() -> Found:
    layout = _simulated()["layout"]
    least = min(layout["reads"])
    return Found(
        100 * least / layout["ids"], f"each of {len(layout['reads'])} CTAs reads {least} of {layout['ids']} ids"
    )


def atomics_of_layout() -> Found:
    """Count the calls of atomic functions in the port's source."""
    tree = ast.parse(inspect.getsource(dispatch_layout))
    names = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    count = sum("atomic" in name or name.startswith("red_") for name in names)
    return Found(count, f"{count} atomic operations among {len(names)} calls")


def counts_per_rank() -> Found:
    layout = _simulated()["layout"]
    wrong = sum(a != b for a, b in zip(layout["per rank"], layout["distinct"], strict=True))
    counted = f"{sum(layout['per rank'])} tokens, where experts count {layout['per expert']} of {layout['ids']} ids"
    return Found(wrong, f"{wrong} of {len(layout['distinct'])} ranks differ; {counted}")


@cache
def stack_of_layout() -> Found | None:
    """Compile the port and return the bytes of its stack, where ``is_in_rank`` lies if not in registers."""
    types = ("int64*", "int32*", "int32*", "uint8*", *["int32"] * 4)
    request = {"layout": ("make_layout_kernel(256)", types, 256, False)}
    try:
        code = compile_apart(inspect.getsource(dispatch_layout), request)["layout"]
    except (RuntimeError, ImportError):
        return None  # no compiler
    return Found(code.stack_bytes, f"Numba's compiler gives the port a stack of {code.stack_bytes} bytes")


# Buffer and notify_dispatch


def parts_of_the_buffer() -> Found:
    """Lay out one allocation as the listing does; count the bytes that two parts share or that none has."""
    data, signals, pointers, peers = 2 * 10**9, 4 * 8, 8 * 8, 8
    total = data + signals + 2 * pointers
    starts = {"data": 0, "signals": data, "pointers": data + signals, "signal pointers": data + signals + pointers}
    ends = [*list(starts.values())[1:], total]
    sizes = [end - start for start, end in zip(starts.values(), ends, strict=True)]
    wrong = sum(abs(size - own) for size, own in zip(sizes, (data, signals, 8 * peers, 8 * peers), strict=True))
    behind = f"signals and two lists of {peers} pointers, {total - data} bytes"
    return Found(wrong, f"{wrong} bytes; behind the data lie {behind}")


def rank_prefix_matrix() -> Found:
    rows = torch.tensor(EXAMPLE).sum(dim=1).cumsum(dim=0).tolist()
    wrong = sum(own["rank_prefix_matrix"] != rows for own in _simulated()["played"]["matrices"])
    return Found(wrong, f"{rows} on both ranks for the example")


def _by_channel():
    return [torch.tensor(rows).view(CHANNELS, -1, 2).sum(dim=1).T.cumsum(dim=1).tolist() for rows in EXAMPLE]


def channel_prefix_matrix() -> Found:
    matrices = _simulated()["played"]["matrices"]
    wrong = sum(own["channel_prefix_matrix"] != rows for own, rows in zip(matrices, _by_channel(), strict=True))
    return Found(wrong, f"{_by_channel()[0]} on rank 0 for the example")


def tokens_per_expert() -> Found:
    notify = _simulated()["notify"]
    wanted = [
        [-(-sum(own[2 * rank + e] for own in notify["counted"]) // ALIGNMENT) * ALIGNMENT for e in range(2)]
        for rank in RANKS
    ]
    wrong = sum(a != b for a, b in zip(notify["experts"], wanted, strict=True))
    return Found(wrong, f"{notify['experts']} on two ranks, rounded up to multiples of {ALIGNMENT}")


def words_left() -> Found:
    """Count the words behind rank_prefix_matrix that are not zero after the exchange."""
    notify = _simulated()["notify"]
    if not all(notify["kept"]):
        return Found(-1, "rank_prefix_matrix is not kept")
    return Found(notify["not cleared"], f"{notify['not cleared']} words are not zero, and rank_prefix_matrix is kept")


def memset_words() -> Found:
    """Compare num_memset_int with the four Buffer<int> of the listing of dispatch."""
    channels, ranks = 12, 8
    arrays = dict.fromkeys(("start_offset", "end_offset", "head_idx", "tail_idx"), channels * ranks)
    cleared, words = channels * ranks * 4, sum(arrays.values())
    return Found(cleared - words, f"{cleared} for {ranks} ranks and {channels} channels; the four arrays have {words}")


def words_of_cached_notify() -> Found:
    cached = _simulated()["cached"]
    if not cached["copied"]:
        return Found(-1, "the matrix is not copied")
    return Found(
        cached["cleared"], f"it also clears {cached['cleared']} words, the flags, between two barriers of all ranks"
    )


# dispatch


def order_of_recv_x() -> Found:
    wanted = [[[s, t] for s in RANKS for t, rows in enumerate(EXAMPLE[s]) if rows[r]] for r in RANKS]
    runs = [_simulated()[name]["received"] for name in ("played", "slow")]
    wrong = sum(run != wanted for run in runs)
    return Found(wrong, f"{wrong} of {len(runs)} runs differ, with 4 channels and with 1, under different seeds")


def _offsets():
    moments = _simulated()["played"]["moments"]
    return {(rank, source, c, what): v for what, rank, source, c, v, *_ in moments if what in ("start", "end")}


def offsets_below_zero() -> Found:
    values = list(_offsets().values())
    return Found(max(values), f"{len(values)} offsets, {min(values)} to {max(values)}")


def offsets_of_channels() -> Found:
    found, prefix, wrong = _offsets(), _by_channel(), 0
    for (rank, source, c, what), value in found.items():
        rows = prefix[source][rank]
        count = rows[c] if what == "end" else rows[c - 1] if c else 0
        wrong += value != -count - 1
    return Found(wrong, f"{len(found) - wrong} of {len(found)} in the example")


def rows_in_a_ring() -> Found:
    most, slots = _simulated()["most"]
    return Found(most - slots, f"at most {most} rows are published and not taken, in rings of {slots}")


def _fault(fault, what) -> Found:
    faults = _simulated()["faults"]
    return Found(
        faults[fault] if not faults[""] else -1,
        f"{what}: {faults[fault]} of {SEEDS} runs go wrong; as it is, {faults['']}",
    )


def without_the_barrier() -> Found:
    return _fault("no barrier", "without it")


def without_release() -> Found:
    return _fault("plain tail", "with a plain store")


def without_acquire() -> Found:
    return _fault("relaxed poll", "with a relaxed load")


def warps_per_rank() -> Found:
    warps = 768 // 32
    return Found(warps // 8, f"{warps} warps, {warps // 8} for each of 8 ranks")


def channel_example() -> Found:
    """Compute the numbers of the example of notify_dispatch's workers."""
    channels, warps = 100 // 2, 128 // 32
    tokens = 10000 // channels
    right = (channels, tokens, warps) == (50, 200, 4)
    return Found(int(right), f"{channels} channels of {tokens} tokens, {warps} warps")


def ring_bytes() -> Found:
    """Compare the text's size of the rings with the listing's Buffer<int4>, for DeepSeek-V3's rows."""
    channels, ranks, slots, hidden = 12, 8, 256, 7168
    hidden_int4 = hidden * 2 // 16
    listing, text = 16 * (channels * ranks) * slots * hidden_int4, 2 * channels * ranks * slots * hidden
    return Found(
        listing - text, f"{listing / 1e6:.0f} MB for {ranks} ranks, {channels} channels and rings of {slots} rows"
    )


def scales_of_a_token() -> Found:
    count = 7168 // 128
    return Found(count, f"{count} scales for DeepSeek-V3's hidden size of 7168, more than a warp's lanes")


def reads_of_src_idx() -> Found:
    """Count the reads of src_idx in the port's reduction."""
    tree = ast.parse(inspect.getsource(combine.make_reduce))
    names = [getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)]
    count = names.count("src_idx")
    return Found(count, f"{count} reads in the port, which finds rows by send_head")


# FP8


def largest_e4m3() -> Found:
    most = torch.finfo(torch.float8_e4m3fn).max
    return Found(most, f"{most:g} by torch")


def _cast_back(scales):
    """Return what the article's per_token_cast_back makes of ones with these packed int32 scales."""
    unpacked = (scales.view(dtype=torch.int8).to(torch.int) << 23).view(dtype=torch.float)
    return unpacked.view(-1)


def _packed(exponents):
    wanted = (exponents.to(torch.int32) << 23).view(torch.float32)
    return int((_cast_back(exponents.to(torch.uint8).view(torch.int32)) != wanted).sum()), wanted


def packed_scales_below_2() -> Found:
    wrong, scales = _packed(torch.arange(128)[4:])
    return Found(wrong, f"{wrong} of {len(scales)} powers of 2 up to {float(scales.max()):g} come back wrong")


def packed_scales_from_2() -> Found:
    wrong, scales = _packed(torch.arange(128, 252))
    back = float(_cast_back(torch.tensor([128] * 4, dtype=torch.uint8).view(torch.int32))[0])
    return Found(wrong, f"{wrong} of {len(scales)} from {float(scales.min()):g} on come back wrong: 2 as {back:g}")
