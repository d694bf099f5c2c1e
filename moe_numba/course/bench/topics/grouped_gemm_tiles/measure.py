"""Times the candidate tile configurations of the grouped GEMM, the most important problems first, until time is up.

All candidates of a problem are checked, then timed shortly. Those that may be the best are timed interleaved, with rows
drawn evenly at random, all rows in one group, rows drawn by Zipf's law, and the same number for each group.
"""

import itertools
import multiprocessing
import time
from functools import partial
from types import SimpleNamespace

import torch

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.timing import kernel_times, rotating
from moe_numba.course.bench.topics.grouped_gemm.measure import BF16, BYTES_OF_WEIGHT, FP8, lower_bound, random_lengths
from moe_numba.course.bench.topics.grouped_gemm_tiles import tune as tuner
from moe_numba.course.bench.topics.grouped_gemm_tiles.tune import Problem
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.call.arguments import GemmShape
from moe_numba.grouped_gemm.call.heuristics import select_w4, select_wgmma_config
from moe_numba.grouped_gemm.call.plan import compile_config, group_gemm
from moe_numba.grouped_gemm.w4 import launch as w4_launch
from moe_numba.grouped_gemm.w4.config import W4Config
from moe_numba.grouped_gemm.w4.packing import TILE_BYTES, pack_mxfp4
from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4
from moe_numba.grouped_gemm.w4.weight_tiles import TILE
from moe_numba.runtime.compile_calls import usable_cores
from moe_numba.runtime.device import persistent_ctas

SIDE = 8192  # of a dense GEMM
SECONDS, QUICK_SECONDS = 240, 60
SHAPES = [(4096, 7168), (7168, 2048), (1536, 2048), (2048, 768), (5760, 2880), (2880, 2880)]  # n, k
AVERAGES = [16, 64, 1, 256, 4, 128, 1024]
ROUTINGS = ["uniform", "one", "zipf", "even"]
PRUNED_BY = 2  # routings, of the first ones, with which all candidates are timed
KEPT, NEAR = 6, 1.2  # most candidates that are timed again, and by how much they may be slower in the short timing
CHECKED_ROWS = 64
REPLAY_US = 800
MAX_ROWS = 1 << 16  # more would take seconds for one problem


def measure(peers, quick, seconds=None):
    """Return the rows of the record; print how far the present choice is from the best of each problem."""
    end = time.monotonic() + (seconds or (QUICK_SECONDS if quick else SECONDS))
    kinds = {kind: tuner.candidates(kind) for kind in tuner.KINDS}
    rows, operands = [], Operands("cpu" if simulator.ENABLED else "cuda")
    with Compilation(kinds) as compilation:
        for number, problem in enumerate(ordered_problems()):
            if time.monotonic() > end:
                print(f"the time is up after {number} problems")
                break
            configs = compilation.compiled(problem.kind)
            try:
                found = measure_problem(problem, configs, operands)
            except torch.OutOfMemoryError as error:
                print(f"{tuple(problem)} is left out: {error}")
                continue
            rows += found
            if found:
                ratios, chosen = tuner.ratios_of(found)[problem], found[0]["tile"]
                best = min(ratios, key=ratios.get)
                print(
                    f"{100 * (ratios[chosen] / ratios[best] - 1):5.1f} %  {tuple(problem)}: {chosen}; best: {best}",
                    flush=True,
                )
    return rows


def ordered_problems():
    """Yield the problems, the most important ones first."""
    rounds = [((32,), SHAPES[:2]), ((32,), SHAPES[2:]), ((128, 8), SHAPES[:2]), ((128, 8), SHAPES[2:])]
    plain, silu = tuner.KINDS[:4], tuner.KINDS[4:]
    gate_up = (32,), SHAPES[:1]
    yield from (Problem(kind, SIDE, SIDE, 1, SIDE) for kind in plain[:3])
    for kinds, (groups, shapes) in [(plain, rounds[0]), (silu, gate_up), *((plain, sizes) for sizes in rounds[1:])]:
        for kind, shape, count, average in itertools.product(kinds, shapes, groups, AVERAGES):
            if count * average <= MAX_ROWS:
                yield Problem(kind, *shape, count, average)


class Compilation:
    """Compiles all candidates into the cubin cache, in one process per core, while the first ones are timed."""

    def __init__(self, kinds):
        self.kinds, self.pool, self.pending = kinds, None, {}

    def __enter__(self):
        if not simulator.ENABLED:
            self.pool = multiprocessing.get_context("spawn").Pool(usable_cores())
            for kind, configs in self.kinds.items():
                self.pending[kind] = self.pool.map_async(compile_problem, configs.values(), chunksize=1)
        return self

    def __exit__(self, *_):
        if self.pool is not None:
            self.pool.terminate()

    def compiled(self, kind):
        """Return the candidates of a kind that compile; wait for them."""
        if kind in self.pending:
            errors = dict(zip(self.kinds[kind], self.pending.pop(kind).get(), strict=True))
            for name, error in errors.items():
                if error:
                    print(f"{kind}, {name} is left out: {error}")
                    del self.kinds[kind][name]
        return self.kinds[kind]


def compile_problem(config):
    """Compile a configuration; return None or what is wrong."""
    try:
        (w4_launch.compile_w4_config if isinstance(config, W4Config) else compile_config)(config)
    except Exception as error:  # another process prints it
        return f"{type(error).__name__}: {error}"
    return None


# Problems


class Operands:
    """Random weights and rows for all problems: views of one buffer for each format."""

    def __init__(self, device):
        self.device, self.buffers = device, {}

    def take(self, kind, count, start=0):
        """Return ``count`` random elements from ``start`` on: FP8, bf16, or bytes of packed MXFP4 weights."""
        if start + count > len(self.buffers.get(kind, ())):
            self.buffers.pop(kind, None)
            self.buffers[kind] = self.random(kind, start + count)
        return self.buffers[kind][start : start + count]

    def random(self, kind, count):
        if kind == "mxfp4":
            tiles = pack_mxfp4(*random_blocks(64 * TILE, 16 * TILE, self.device)).flatten()
            return tiles.repeat(-(-count // len(tiles)))[:count]
        found, step = torch.empty(count, dtype=kind, device=self.device), 1 << 26
        for start in range(0, count, step):
            part = found[start : start + step]
            part.copy_(torch.randn(len(part), device=self.device) * 0.5)
        return found

    def weights(self, problem, x_elements):
        """Return the weights that launches alternate between, more than fit into L2, and random elements of x."""
        _, n, k, groups, _ = problem
        if problem.kind == "mxfp4":
            shape = groups, -(-n // TILE), -(-k // TILE), TILE_BYTES
            kind, size, dtype = "mxfp4", groups * shape[1] * shape[2] * TILE_BYTES, "mxfp4"
        else:
            kind = BF16 if problem.kind == "none" else FP8
            shape, size, dtype = (groups, n, k), groups * n * k, "bf16" if kind == BF16 else "e4m3"
        sets = max(2, len(rotating(lambda: None, int(groups * n * k * BYTES_OF_WEIGHT[dtype]))))
        own = 0 if kind == "mxfp4" else x_elements
        buffer = self.take(kind, sets * size + own)
        x = buffer[sets * size :] if own else self.take(BF16, x_elements)
        return [buffer[i * size : (i + 1) * size].view(shape) for i in range(sets)], x


def random_blocks(n, k, device):
    """Return MXFP4 codes and scales of one group's random weight."""
    codes = torch.randint(0, 256, (1, n, k // 2), dtype=torch.uint8, device=device)
    return codes, torch.randint(125, 128, (1, n, k // 32), dtype=torch.uint8, device=device)


def lengths_of(problem, routing):
    """Return the number of rows of each group."""
    if routing == "even":
        return torch.full((problem.groups,), problem.average, dtype=torch.int32)
    return random_lengths(problem.groups, problem.groups * problem.average, routing)


def make_case(problem, routing, operands):
    """Make the inputs of a problem for one routing."""
    kind, n, k, groups, average = problem
    lengths, rows = lengths_of(problem, routing), groups * average
    weights, x = operands.weights(problem, rows * k)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    device, columns = operands.device, n // (1 + problem.silu_and_mul)
    make = lambda *shape: torch.rand(*shape, device=device) + 0.5
    out = torch.empty(rows, columns, dtype=BF16, device=device)
    if problem.silu_and_mul:
        out = out.to(FP8), make(rows, -(-columns // 128))
    scales = {
        "block": lambda: dict(x_scale=make(rows, -(-k // 128)), w_scale=make(groups, -(-n // 128), -(-k // 128))),
        "tensor": lambda: dict(y_scale=make(groups)),
    }.get(problem.scaling, dict)()
    sizes = dict(seqlens=lengths.to(device), cu_seqlens=starts.to(device))
    return SimpleNamespace(
        problem=problem, lengths=lengths, x=x.view(rows, k), weights=weights, sizes=sizes, scales=scales, out=out
    )


def calls_of(case, config):
    """Return a call for each set of weights."""
    problem, options = case.problem, dict(out=case.out, config=config)
    if problem.kind == "mxfp4":
        return [partial(w4_launch.group_gemm, x=case.x, weight=w, **case.sizes, **options) for w in case.weights]
    options |= dict(x=case.x, silu_and_mul=problem.silu_and_mul, **case.sizes, **case.scales)
    return [partial(group_gemm, problem.scaling, weight=w, **options) for w in case.weights]


def present_choice(problem):
    """Return the configuration that the package selects for a problem."""
    kind, n, k, groups, average = problem
    if kind == "mxfp4":
        return select_w4("lengths", n, k, groups, average, True)
    columns, silu_and_mul = n // (1 + problem.silu_and_mul), problem.silu_and_mul
    shape = GemmShape(problem.scaling, "lengths", silu_and_mul, average, groups, groups * average, 0, columns, k)
    return select_wgmma_config(shape, True, True, persistent_ctas("cpu" if simulator.ENABLED else "cuda", 2))


def is_plausible(config, average):
    """Whether a tile has neither many more rows than a group nor many times fewer, and a group more than one band."""
    has_bands = average > getattr(config, "band_rows", 0)
    return min(average / 4, 128) <= config.block_m <= 32 * max(average, 4) and has_bands


# Checks


def checked_rows(case):
    """Return the largest group, and up to CHECKED_ROWS of its first and last rows."""
    group = int(case.lengths.argmax())
    start, length = int(case.sizes["cu_seqlens"][group]), int(case.lengths[group])
    rows = sorted({*range(start, start + length)[:CHECKED_ROWS], *range(start, start + length)[-CHECKED_ROWS:]})
    return group, torch.tensor(rows, device=case.x.device)


def expected_rows(case, group, rows):
    """Return the reference's result for some rows of a group; of an MXFP4 weight, the group is made anew."""
    problem, scales = case.problem, case.scales
    x, own = take_rows(case.x, rows), slice(group, group + 1)
    one = torch.tensor([len(rows)]), torch.tensor([0])
    if problem.kind == "mxfp4":
        blocks = random_blocks(problem.n, problem.k, x.device)
        case.weights[0][own] = pack_mxfp4(*blocks)
        return reference.group_gemm(x, dequantise_mxfp4(*blocks), *one)
    weight = case.weights[0][own]
    if problem.scaling == "block":
        expected = reference.group_gemm_blockwise(x, weight, *one, scales["x_scale"][rows], scales["w_scale"][own])
    else:
        expected = reference.group_gemm(x, weight, *one, scales["y_scale"][own] if scales else None)
    return reference.silu_and_mul(expected).double() if problem.silu_and_mul else expected


def take_rows(tensor, rows):
    """Return ``tensor[rows]``, which torch does not have for all FP8 tensors."""
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


def output_rows(case, rows):
    """Return rows of the output, in float64 if they are quantised."""
    if not case.problem.silu_and_mul:
        return case.out[rows]
    y, scale = (take_rows(tensor, rows) for tensor in case.out)
    return y.double() * scale.repeat_interleave(128, 1)[:, : y.shape[1]].double()


def error_of(case, config, rows, expected, sample, wanted):
    """Run a configuration; return its rows of ``sample`` and None, or how they, or ``rows``, are wrong."""
    for tensor in case.out if case.problem.silu_and_mul else (case.out,):
        tensor.view(torch.uint8).fill_(0x7F) if tensor.dtype == FP8 else tensor.fill_(float("nan"))
    calls_of(case, config)[0]()
    found, bound = output_rows(case, sample), 0.035 if case.problem.silu_and_mul else 3e-3
    error = reference.mismatch(output_rows(case, rows), expected, bound)
    if error is None and wanted is not None:
        error = reference.mismatch(found, wanted.double(), bound)
    return found, error


# Times


def measure_problem(problem, configs, operands):
    """Return a row for each routing, with the times of the present choice and of the candidates that may be better.

    If the present choice does not run, the fastest candidate stands for it.
    """
    choice = present_choice(problem)
    chosen = tuner.name_of(choice)
    configs = {chosen: choice} | {n: c for n, c in configs.items() if is_plausible(c, problem.average)}
    cases = {routing: make_case(problem, routing, operands) for routing in ROUTINGS}
    first = cases[ROUTINGS[0]]
    configs = correct_configs(first, configs)
    if not configs:
        return []
    bound = {r: lower_bound(case.lengths, problem.n, problem.k, dtype_of(problem)) for r, case in cases.items()}
    sets = len(first.weights)
    short: dict[str, list[float]] = {}
    for routing in ROUTINGS[:PRUNED_BY]:
        times = medians(kernel_times(calls(cases[routing], configs), launches=sets, replays=3))
        for name, us in times.items():
            short.setdefault(name, []).append(us / min(times.values()))
    ranked = sorted(configs, key=lambda name: sum(short[name]))
    kept = [name for name in ranked[:KEPT] if sum(short[name]) <= NEAR * sum(short[ranked[0]])]
    chosen = chosen if chosen in configs else ranked[0]
    configs = {name: configs[name] for name in dict.fromkeys([chosen, *kept])}
    rows = []
    for routing, case in cases.items():
        launches = sets * max(1, round(REPLAY_US / (1.5 * bound[routing][0] + 3) / sets))
        stats = kernel_times(calls(case, configs), launches=launches, replays=7)
        floor_us, count, flops = bound[routing]
        config = dict(num_groups=problem.groups, n=problem.n, k=problem.k, scaling=problem.scaling, routing=routing)
        rows.append(
            records.row(
                "final",
                config=config | ({"silu_and_mul": True} if problem.silu_and_mul else {}),
                size={"rows": problem.groups * problem.average},
                dtype=dtype_of(problem),
                kernel=stats[chosen],
                floor_us=floor_us,
                bytes=count,
                flops=flops,
                tile=chosen,
                tiles={name: float(f"{us:.4g}") for name, us in medians(stats).items()},
            )
        )
    return rows


def calls(case, configs):
    """Return {name: calls} of configurations."""
    return {name: calls_of(case, config) for name, config in configs.items()}


def medians(times):
    """Return {name: microseconds}."""
    return {name: stats.median for name, stats in times.items()}


def dtype_of(problem):
    """Return the name of a problem's dtype in records."""
    return {"none": "bf16", "mxfp4": "mxfp4"}.get(problem.scaling, "e4m3")


def correct_configs(case, configs):
    """Return the configurations with a correct result; report the others."""
    group, rows = checked_rows(case)
    expected = expected_rows(case, group, rows)
    count = len(case.x)
    sample = torch.linspace(0, count - 1, min(count, 256), device=case.x.device).round().long()
    correct, wanted = {}, None
    for name, config in configs.items():
        try:
            found, error = error_of(case, config, rows, expected, sample, wanted)
        except ValueError as refused:  # it needs more than this GPU has
            found, error = None, str(refused)
        if error:
            print(f"{tuple(case.problem)}, {name} is left out: {error}")
            continue
        correct[name] = config
        wanted = found if wanted is None else wanted
    return correct
