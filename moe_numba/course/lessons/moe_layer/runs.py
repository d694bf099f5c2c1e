"""The lesson "The experts of a layer": inputs, checks, launches, predictions and tables.

A version of a stage is a function of torch's or of the package's, a kernel, or a function of `Sizes` that makes one.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from moe_numba import fused_experts, group_gemm_bf16
from moe_numba.course.bench import call_time, records, rotating
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.latencies import latencies
from moe_numba.course.bench.topics.moe_layer.measure import make_inputs, make_weights, part_calls
from moe_numba.course.bench.topics.moe_layer_ranks import show as ranks_bench
from moe_numba.course.grader import is_kernel
from moe_numba.course.lessons.moe_layer import model
from moe_numba.course.lessons.moe_layer import sizes as chosen
from moe_numba.course.steps.lesson import Lesson, Run, Table
from moe_numba.course.steps.prediction import Judgement
from moe_numba.course.steps.score import MODEL, TOTAL, Score, score_of_kernels
from moe_numba.course.steps.source_diff import OpCounter
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.moe_layer import ExpertParallelMoE, Experts, ExpertsWorkspace, reference
from moe_numba.moe_layer.compile_layers import Layer
from moe_numba.runtime.launch import launch

SIMULATED = simulator.ENABLED
DEVICE = "cpu" if SIMULATED else "cuda"
QWEN = "Qwen3-30B-A3B"
NAMES = "seqlens", "cu_seqlens", "gather_indices", "inverse_indices"
TOPIC = "layer_ladder"


class Sizes(NamedTuple):
    """What kernels are compiled for."""

    num_experts: int
    topk: int
    warps: int


def _chosen(small: bool = SIMULATED) -> dict:
    names = "EXPERTS", "TOPK", "HIDDEN", "INTERMEDIATE", "TOKENS", "MANY", "WARPS"
    return {name: getattr(chosen, f"SMALL_{name}" if small else name) for name in names}


def sizes_here(small: bool = SIMULATED) -> Sizes:
    """Return the sizes with which kernels run here."""
    of = _chosen(small)
    return Sizes(of["EXPERTS"], of["TOPK"], of["WARPS"])


# Inputs: a layer with its reference, and those of the stages


@cache
def qwen() -> Layer:
    """Return the sizes of the layer, which are small in the simulator."""
    of = _chosen()
    return Layer(QWEN, of["EXPERTS"], of["HIDDEN"], of["INTERMEDIATE"], "bf16", (), of["TOPK"])


@cache
def _weights():
    return make_weights(qwen(), DEVICE)


@cache
def given(tokens: int):
    """Return x, w13, w2, topk_weights and topk_ids, each token's experts drawn uniformly at random."""
    return make_inputs(qwen(), tokens, *_weights())


@cache
def _expected(tokens):
    return reference.fused_experts(*given(tokens))  # in float64, rounded where kernels store bfloat16


def tokens_here() -> int:
    """Return the tokens of the layer here."""
    return 6 if SIMULATED else chosen.TOKENS


def wrong_layer(out: torch.Tensor, tokens: int) -> str | None:
    """Return None, or in what the experts' output differs from the reference."""
    return mismatch(out, _expected(tokens), 1e-2)


@cache
def ids_to_group() -> torch.Tensor:
    """Return experts of tokens; some are shared by many of them."""
    of, random = _chosen(), torch.Generator().manual_seed(4)
    ids = torch.rand(of["TOKENS"], of["EXPERTS"], generator=random).topk(of["TOPK"]).indices
    ids[: of["TOKENS"] // 4] = ids[0]  # so that a warp has the same expert several times
    return ids.int().to(DEVICE)


@cache
def gate_up_rows() -> torch.Tensor:
    """Return rows of gate and up of all assignments of many tokens."""
    of, random = _chosen(), torch.Generator().manual_seed(5)
    columns = chosen.SMALL_COLUMNS if SIMULATED else of["INTERMEDIATE"]
    rows = torch.randn(of["MANY"] * of["TOPK"], 2 * columns, generator=random)
    return (3 * rows).bfloat16().to(DEVICE)


class Sum(NamedTuple):
    """Inputs of the weighted sum."""

    rows: torch.Tensor
    inverse: torch.Tensor
    weights: torch.Tensor


@cache
def to_sum() -> Sum:
    """Return rows of many tokens, the row of each assignment, and weights."""
    of, random = _chosen(), torch.Generator().manual_seed(6)
    count, columns = of["MANY"] * of["TOPK"], chosen.SMALL_COLUMNS if SIMULATED else of["HIDDEN"]
    rows = torch.randn(count, columns, generator=random).bfloat16().to(DEVICE)
    inverse = torch.randperm(count, generator=random).int().view(of["MANY"], of["TOPK"])
    return Sum(rows, inverse.to(DEVICE), torch.rand(of["MANY"], of["TOPK"], generator=random).to(DEVICE))


# Versions of stages


def _kernel(version, small=SIMULATED):
    """Return the kernel of a version, or None if a function does its work."""
    if is_kernel(version):
        return version
    return version(sizes_here(small)) if hasattr(version, "cache_info") else None


def _groups(ids, num_experts, new):
    shapes = (num_experts,), (num_experts + 1,), (ids.numel(),), tuple(ids.shape)
    return [new(shape, dtype=torch.int32, device=ids.device) for shape in shapes]


def poisoned_groups(ids: torch.Tensor, num_experts: int) -> list[torch.Tensor]:
    """Return outputs of a grouping filled with -7."""
    return _groups(ids, num_experts, partial(torch.full, fill_value=-7))


def group(version, ids: torch.Tensor, num_experts: int, outputs: list | None = None) -> list[torch.Tensor]:
    """Group assignments by expert with a version; outputs are poisoned unless they are given."""
    kernel = _kernel(version)
    if kernel is None:
        return list(version(ids, num_experts))
    outputs = outputs or poisoned_groups(ids, num_experts)
    launch(kernel, 1, 32 * sizes_here().warps, ids, *outputs, ids.numel())
    return outputs


def activate(version, gate_up: torch.Tensor, columns: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute SwiGLU with a version; threads of a kernel compute so many columns."""
    kernel = _kernel(version)
    if kernel is None:
        return version(gate_up)
    out = _nan(len(gate_up), gate_up.shape[1] // 2) if out is None else out
    words = out.shape[1] // 2
    grid = -(-2 * words // (128 * columns)), len(out)
    launch(kernel, grid, 128, gate_up.view(torch.int32), out.view(torch.int32), words)
    return out


def add_up(version, inputs: Sum, columns: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the weighted sum with a version; threads of a kernel compute so many columns."""
    kernel = _kernel(version)
    if kernel is None:
        return version(*inputs)
    out = _nan(len(inputs.inverse), inputs.rows.shape[1]) if out is None else out
    words, topk = out.shape[1] // 2, inputs.inverse.shape[1]
    grid = -(-2 * words // (128 * columns)), len(out)
    rows, inverse, weights = inputs.rows.view(torch.int32), inputs.inverse.flatten(), inputs.weights.flatten()
    launch(kernel, grid, 128, rows, inverse, weights, out.view(torch.int32), words, topk)
    return out


def _nan(*shape):
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)


def _empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)


class Stages(NamedTuple):
    """A layer: how assignments are grouped, what comes after the first GEMM, and the sum.

    Attributes
    ----------
    group, swiglu, total : version
    fused : bool
        ``swiglu`` is a grouped GEMM with the activation in its epilogue.
    columns : int
        Of a thread of the kernels ``swiglu`` and ``total``.
    """

    group: Any
    swiglu: Any
    total: Any
    fused: bool = False
    columns: int = 8


def run_stages(stages, inputs, new: Callable = _nan) -> torch.Tensor:
    """Run a layer stage by stage; ``new(rows, columns)`` makes outputs of the page's kernels."""
    stages, (x, w13, w2, topk_weights, topk_ids, *_) = Stages(*stages), inputs
    output = lambda version, *shape: None if _kernel(version) is None else new(*shape)
    indices = _groups(topk_ids, len(w13), torch.empty) if new is _empty and _kernel(stages.group) else None
    seqlens, cu_seqlens, gather, inverse = group(stages.group, topk_ids, len(w13), indices)
    if stages.fused:
        activated = stages.swiglu(x, w13, seqlens, cu_seqlens, gather_indices=gather)
    else:
        gate_up = group_gemm_bf16(x, w13, seqlens, cu_seqlens, gather_indices=gather)
        out = output(stages.swiglu, len(gate_up), gate_up.shape[1] // 2)
        activated = activate(stages.swiglu, gate_up, stages.columns, out)
    rows = group_gemm_bf16(activated, w2, seqlens, cu_seqlens)
    return add_up(stages.total, Sum(rows, inverse, topk_weights), stages.columns, output(stages.total, *x.shape))


# Checks


def wrong_groups(outputs, ids: torch.Tensor, num_experts: int) -> str | None:
    """Return None, or which output of a grouping differs from the reference, and where."""
    for name, out, wanted in zip(NAMES, outputs, reference.group_by_expert(ids, num_experts), strict=True):
        if not torch.equal(out.view(wanted.shape), wanted):
            return f"{name} differs at {(out.view(wanted.shape) != wanted).nonzero()[0].tolist()}"
    return None


def _check_group(version):
    ids, experts = ids_to_group(), qwen().num_experts
    for case in (ids, ids[:1], torch.zeros_like(ids[:3])):  # in the last one, all assignments have one expert
        if wrong := wrong_groups(group(version, case, experts), case, experts):
            return f"{len(case)} tokens: {wrong}"
    return None


def _check_swiglu(version):
    version, columns = version
    gate, up = gate_up_rows().double().chunk(2, dim=1)
    right = torch.nn.functional.silu(gate) * up
    return mismatch(activate(version, gate_up_rows(), columns), right, 1e-2)


def _check_sum(version):
    version, columns = version
    inputs = to_sum()
    if _kernel(version) is not None:  # one assignment has no row; torch's version knows no such thing
        inverse = inputs.inverse.clone()
        inverse[-1, -1] = -1
        inputs = inputs._replace(inverse=inverse)
    weights = inputs.weights.double() * (inputs.inverse >= 0)
    exact = (inputs.rows[inputs.inverse.clamp(min=0).long()].double() * weights[..., None]).sum(1)
    return mismatch(add_up(version, inputs, columns), exact)


def _check_stages(stages):
    return wrong_layer(run_stages(stages, given(tokens_here())), tokens_here())


# Lessons


_ALLOCATIONS = "empty", "empty_like", "empty_strided"
_PACKAGE = "moe_numba"  # what `OpCounter` calls functions of the package


def operations_of(seen: OpCounter) -> list[str]:
    """Return the operations of torch that compute something."""
    return [name for name in seen.names if name not in (_PACKAGE, *_ALLOCATIONS)]


def _make_inputs():
    """Make all inputs, which are kept: making them is no part of a version."""
    for make in (ids_to_group, gate_up_rows, to_sum, partial(given, tokens_here()), partial(one_token, 0)):
        make()


class _Lesson(Lesson):
    """Also versions in torch. Its scores count operations of torch and launches, and what a lone kernel does."""

    def count(self, version, name):
        is_stage = self in LESSONS and self.run.kernels(version)
        _make_inputs()
        with simulator.profile(self.gpu.upper() if is_stage else None) as profile, OpCounter() as seen:
            self.run.once(version)
        if is_stage:
            found = score_of_kernels(profile.kernels, name, self.gpu.upper())
            if self is not groups:  # an estimate of small inputs says nothing of bytes
                found.rows.pop((MODEL, "time"), None)
                found.rows.pop((TOTAL, "instructions"))  # counts a function that is inlined n times n * n times
            return found
        rows = {(TOTAL, "operations of torch"): len(operations_of(seen))}
        if self not in LESSONS:
            rows[TOTAL, "launches of Numba kernels"] = sum(len(kernel.launches) for kernel in profile.kernels)
        return Score(name, rows, self.gpu.upper())


def _lesson(name, topic, check, once, timed, kernels, tokens, dtype="bf16", seeds=2):
    config = dict(num_experts=chosen.EXPERTS, topk=chosen.TOPK, hidden=chosen.HIDDEN, intermediate=chosen.INTERMEDIATE)
    run, home = Run(check, once, timed, kernels), f"{__name__}:{name}"
    return _Lesson(topic, run, home, config, dict(tokens=tokens), dtype, seeds=seeds)


def _own(*versions):
    """Return the kernels of the page among versions, at the sizes that are timed."""
    return tuple(kernel for version in versions if (kernel := _kernel(version, small=False)) is not None)


def _timed_group(version):
    ids, experts = ids_to_group(), qwen().num_experts
    return [partial(group, version, ids, experts, poisoned_groups(ids, experts))]


def _timed_swiglu(version):
    out = None if _kernel(version[0]) is None else _nan(len(gate_up_rows()), gate_up_rows().shape[1] // 2)
    return [partial(activate, version[0], gate_up_rows(), version[1], out)]


def _timed_sum(version):
    out = None if _kernel(version[0]) is None else _nan(len(to_sum().inverse), to_sum().rows.shape[1])
    return [partial(add_up, version[0], to_sum(), version[1], out)]


groups = _lesson(
    "groups",
    "layer_group_ladder",
    _check_group,
    lambda version: group(version, ids_to_group(), qwen().num_experts),
    _timed_group,
    _own,
    chosen.TOKENS,
    "int32",
)
swiglus = _lesson(
    "swiglus",
    "layer_swiglu_ladder",
    _check_swiglu,
    lambda version: activate(version[0], gate_up_rows(), version[1]),
    _timed_swiglu,
    lambda version: _own(version[0]),
    chosen.MANY,
)
sums = _lesson(
    "sums",
    "layer_sum_ladder",
    _check_sum,
    lambda version: add_up(version[0], to_sum(), version[1]),
    _timed_sum,
    lambda version: _own(version[0]),
    chosen.MANY,
)
layers = _lesson(
    "layers",
    TOPIC,
    _check_stages,
    lambda stages: run_stages(stages, given(tokens_here()), _empty),
    lambda stages: [partial(run_stages, stages, given(tokens_here()), _empty)],
    lambda stages: _own(*Stages(*stages)[:3]),
    chosen.TOKENS,
    seeds=1,
)
LESSONS = groups, swiglus, sums


def save() -> None:
    """Write the records of what a GPU has timed."""
    layers.save(one)
    for lesson in LESSONS if layers.is_timed else ():
        lesson.save()


# One token


class Decode(NamedTuple):
    """Two kernels for one token: ``gate_up`` computes activations, ``down`` the weighted sum of the experts' rows."""

    gate_up: Any
    down: Any


GEMV_WARPS = 4  # of a CTA


def gemv(version, inputs, out: torch.Tensor | None = None, activated: torch.Tensor | None = None) -> torch.Tensor:
    """Run a layer for one token: a function of the layer's inputs, or two kernels."""
    if len(version) == 1:
        return version[0](*inputs)
    x, w13, w2, topk_weights, topk_ids, *_ = inputs
    gate_up, down = version
    topk, hidden, intermediate = topk_ids.shape[1], x.shape[1], w2.shape[2]
    out = _nan(1, hidden) if out is None else out
    activated = _nan(topk, intermediate) if activated is None else activated
    words = lambda tensor: tensor.view(torch.int32)
    ids, weights = topk_ids.flatten(), topk_weights.flatten()
    threads, first = 32 * GEMV_WARPS, -(-topk * intermediate // GEMV_WARPS)
    launch(gate_up, first, threads, words(x), words(w13), ids, _bits(activated), topk, intermediate, hidden // 2)
    given = words(activated), words(w2), ids, weights, _bits(out), topk, hidden, intermediate // 2
    launch(down, -(-hidden // GEMV_WARPS), threads, *given)
    return out


def _bits(tensor):
    return tensor.flatten().view(torch.uint16)


def grouped_experts(x, w13, w2, topk_weights, topk_ids, *_):
    """Run the experts of a layer through grouped GEMMs, also for one token."""
    inputs = given(1)._replace(x=x, w13=w13, w2=w2, weights=topk_weights, ids=topk_ids)
    out, workspace = _nan(*x.shape), ExpertsWorkspace(len(x), topk_ids.shape[1], w13, w2)
    for start in part_calls(inputs, workspace, out, {}, decodes=False).values():
        start()
    return out


@cache
def one_token(number: int):
    """Return inputs of one token with the experts after those of the number before."""
    topk, experts = qwen().topk, qwen().num_experts
    ids = (torch.arange(topk) + number * topk) % experts
    return given(1)._replace(ids=ids.int()[None].to(DEVICE))


def weight_bytes() -> int:
    """Return the bytes of the weights of one token's experts, at the sizes that are timed."""
    return 3 * chosen.TOPK * chosen.HIDDEN * chosen.INTERMEDIATE * 2


@cache
def _sets():
    numbers = iter(range(1 << 20))
    return rotating(lambda: one_token(next(numbers)), weight_bytes() // 3)  # the smaller GEMM reads a third


def _check_one(version):
    for number in range(2):
        inputs = one_token(number)
        if wrong := mismatch(gemv(version, inputs), reference.fused_experts(*inputs), 1e-2):
            return wrong
    return None


def _timed_one(version):
    if len(version) == 1 and version[0] is grouped_experts:
        return [partial(_start, _launches(inputs)) for inputs in _sets()]
    if len(version) == 1:
        workspace = ExpertsWorkspace(1, qwen().topk, *_weights()[:2])
        return [partial(version[0], *inputs, out=_nan(1, qwen().hidden), workspace=workspace) for inputs in _sets()]
    return [partial(gemv, version, inputs, *_buffers()) for inputs in _sets()]


def _launches(inputs):
    out, workspace = _nan(1, qwen().hidden), ExpertsWorkspace(1, qwen().topk, inputs.w13, inputs.w2)
    calls = part_calls(inputs, workspace, out, {}, decodes=False)
    for start in calls.values():  # results of a launch are inputs of the next
        start()
    return calls


def _start(calls):
    for start in calls.values():
        start()


def _buffers():
    return _empty(1, qwen().hidden), _empty(qwen().topk, qwen().intermediate)


one = _lesson(
    "one",
    TOPIC,
    _check_one,
    lambda version: gemv(version, one_token(0), *_buffers()),
    _timed_one,
    lambda version: _own(*version),
    1,
    seeds=1,
)


# Predictions in microseconds (None where the time that they start from is not known)


def _us(us):
    return "" if us is None else records.format_us(us)


def _copied_us(num_bytes):
    return num_bytes / chip_limits().copy_bandwidth * 1e6


def less(before: str, stage: Lesson, old: str, new: str) -> float | None:
    """Return the time of the layer if a stage saves in it what it saves alone."""
    times = [layers.steps[before].us, stage.steps[old].us, stage.steps[new].us]
    return None if None in times else times[0] - (times[1] - times[2]) * _share(stage)


def _share(stage):
    """Return which part of a stage's rows the layer has: all for grouping, few tokens of many for the others."""
    return 1 if stage is groups else chosen.TOKENS / chosen.MANY


def without_swiglu(before: str) -> float | None:
    """Return the time of the layer without a launch, and without writing and reading what SwiGLU reads."""
    us = layers.steps[before].us
    num_bytes = 2 * chosen.TOKENS * chosen.TOPK * 2 * chosen.INTERMEDIATE * 2
    return None if us is None else us - launch_us() - _copied_us(num_bytes)


def lower_bound_us(tokens: int) -> float:
    """Return the lower bound of the timed layer: reading weights or computing, whichever takes longer."""
    of = Layer(QWEN, chosen.EXPERTS, chosen.HIDDEN, chosen.INTERMEDIATE, "bf16", (), chosen.TOPK)
    return max(model.bounds(of, tokens)[1:])


def swiglu_us() -> float:
    """Return the time of SwiGLU's bytes at the rate of a copy."""
    return _copied_us(chosen.MANY * chosen.TOPK * 3 * chosen.INTERMEDIATE * 2)


def sum_us() -> float:
    """Return the time of the bytes of a weighted sum at the rate of a copy."""
    return _copied_us(chosen.MANY * (chosen.TOPK + 1) * chosen.HIDDEN * 2)


def launch_us() -> float:
    """Return the recorded time of an empty kernel in a CUDA graph."""
    return records.read("align_one_launch_ladder")["diagnosis"]["basics"]["empty"]


def gemv_us() -> float:
    """Return the time of one token's weights at the rate of a copy, plus two launches."""
    return _copied_us(weight_bytes()) + 2 * launch_us()


def sort_us() -> float:
    """Return the time of a grouping: a launch, two loads from L2 per visit of a warp to its chunk, barriers.

    Besides three barriers of the kernel, its scan has three.
    """
    ns, visits = latencies().ns, -(-chosen.TOKENS * chosen.TOPK // (32 * chosen.WARPS))
    return launch_us() + (2 * visits * ns["global_load_requests"] + 6 * ns["barriers"]) / 1000


# Records, tables, texts


def _record():
    return records.read("moe_layer")


def layer_us(step: str, tokens: int, field: str = "kernel_us") -> float | None:
    """Return a recorded time of the package's or another project's experts of a Qwen layer, or its lower bound."""
    row = records.find(_record(), step=step, config={"model": QWEN}, size={"tokens": tokens})
    value = row and row.get(field)
    return value["median"] if isinstance(value, dict) else value


def show_layers() -> Table:
    """Return a table of recorded experts, the package's and other projects', with the lower bound."""
    record, tokens = _record(), (1, 64, 4096)
    names = {"final": "the package"} | {step: step.removeprefix("peer:") for step in records.peers(record)}
    lines = [[name, *(_us(layer_us(step, n)) for n in tokens)] for step, name in names.items()]
    lines.append(["lower bound", *(_us(layer_us("final", n, "floor_us")) for n in tokens)])
    return Table([f"{QWEN}, bfloat16, us", *("1 token", "64 tokens", "4096 tokens")], [x for x in lines if any(x[1:])])


def result() -> str:
    """Return what is reached, in numbers of records."""
    texts = []
    for tokens in (1, 64, 4096):
        others = {step: us for step in records.peers(_record()) if (us := layer_us(step, tokens))}
        best = min(others, key=others.__getitem__)
        texts.append(
            f"{tokens} token{'s' * (tokens > 1)}: {_us(layer_us('final', tokens))} us, "
            f"{_us(others[best])} us with {best.removeprefix('peer:')}, the fastest other"
        )
    return f"the experts of a {QWEN} layer on an H200, recorded on {_record()['date'][:10]}\n" + "\n".join(texts)


def show_bounds() -> Table:
    """Return a table of the layer's lower bounds by tokens."""
    of, lines = Layer(QWEN, chosen.EXPERTS, chosen.HIDDEN, chosen.INTERMEDIATE, "bf16", (), chosen.TOPK), []
    for tokens in (1, chosen.TOKENS, chosen.MANY):
        used, read, compute = model.bounds(of, tokens)
        limit = "memory bandwidth" if read > compute else "tensor cores"
        lines.append([str(tokens), f"{used:.0f} of {of.num_experts}", f"{read:.1f}", f"{compute:.1f}", limit])
    return Table(["tokens", "experts used", "reading weights, us", "computing, us", "limit"], lines)


def show_wrong_layers() -> Table:
    """Return a table of what the check says of wrong layers; raise if it accepts one."""
    x, w13, w2, weights, ids, *_ = given(tokens_here())
    missing = ids.clone()
    missing[-1, -1] = -1  # an invalid expert id adds nothing
    wrong = {
        "weights applied twice": (x, w13, w2, weights**2, ids),
        "expert off by one": (x, w13, w2, weights, (ids + 1) % len(w13)),
        "an assignment is missing": (x, w13, w2, weights, missing),
        "gate and up exchanged": (x, w13.roll(w13.shape[1] // 2, 1), w2, weights, ids),
    }
    lines = []
    for name, arguments in wrong.items():
        found = wrong_layer(fused_experts(*arguments), tokens_here())
        if not found:
            raise AssertionError(f"the check accepts: {name}")
        lines.append([name, found])
    return Table(["layer", "what the check says"], lines)


def check_loop(loop: Callable) -> str:
    """Return whether a layer in torch is right."""
    return wrong_layer(loop(*given(tokens_here())), tokens_here()) or "right"


PACKAGE_CALL_US = 20.0  # where no record says what a call of the package takes


def package_call_us() -> float:
    """Return the recorded call time of a function of the package: of `weighted_sum`, which allocates its output."""
    record = records.recorded("call_time")
    row = record and records.find(record, step="final", config={"hidden": 2048, "topk": 8})
    return row["call_us"]["median"] if row else PACKAGE_CALL_US


def show_calls(loop: Callable, versions: Mapping[str, Any], operation: Callable) -> Table:
    """Return a table of call times: the loop in torch, and versions of a layer, with what a model predicts.

    The model adds the time of each torch operation that a version issues, and the call time of each of the package's
    functions. The time of an operation is that of ``operation``, whose torch operations wait for nothing.
    """
    inputs, ids = given(tokens_here()), given(tokens_here()).ids
    calls = {"loop over experts": partial(loop, *inputs)}
    calls |= {name: partial(run_stages, stages, inputs, _empty) for name, stages in versions.items()}
    grouping = partial(operation, ids, qwen().num_experts)
    with OpCounter() as seen:
        grouping()
    each = _call_us("grouping in torch", grouping)
    each_us, lines, before = each and each / len(operations_of(seen)), [], None
    for name, call in calls.items():
        with OpCounter() as seen:
            call()
        in_torch, package, us = len(operations_of(seen)), seen.names.count(_PACKAGE), _call_us(name, call)
        predicted = each_us and in_torch * each_us + package * package_call_us()
        verdict, operations = "", str(in_torch)
        if SIMULATED and before is None:  # the loop's operations, and so its prediction, are those of fewer experts
            operations = "not counted at this size"
        elif us and predicted and before:
            verdict = str(Judgement(before, us, before - predicted))
        elif predicted:
            verdict = f"predicted {predicted:.0f} us"
        lines.append([name, operations, str(package), _us(us), verdict])
        before = us
    heads = "layer", "torch operations", "calls of the package", "call time, us", "prediction"
    return Table(heads, lines)


def _call_us(name, call):
    """Measure a call time, or return the recorded one; the row belongs to the record of the layer."""
    step = f"call: {name}"
    if not SIMULATED:
        stats = call_time(call, repeats=10, batch=4) if "loop" in name else call_time(call)
        about = dict(config=layers.config, size=layers.size, dtype=layers.dtype)
        layers.diagnosed[step] = records.row(step, call=stats, **about)
        return stats.median
    record = records.recorded(TOPIC)
    row = record and records.find(record, step=step)
    return row["call_us"]["median"] if row else None


def show_copies(copies: Mapping[str, Any], version: tuple) -> Table:
    """Return a table of copies with 4 and 16 bytes per load, and of a weighted sum, with their rates."""
    inputs, words = to_sum(), to_sum().rows.numel() // 2
    rows, target = inputs.rows.view(torch.int32), torch.empty_like(inputs.rows).view(torch.int32)
    calls = {"torch.clone": [partial(torch.clone, inputs.rows)]}
    for name, (kernel, width) in copies.items():
        calls[name] = [partial(launch, kernel, -(-4 * words // (128 * width)), 128, rows, target, words)]
        calls[name][0]()
        if not torch.equal(target, rows):
            raise AssertionError(f"{name} is wrong")
        target.fill_(-1)
    calls["weighted sum"] = _timed_sum(version)
    us, lines = sums.times("rates", calls), []
    moved = 2 * chosen.MANY * chosen.TOPK * chosen.HIDDEN * 2
    for name in calls:
        num_bytes = moved * (chosen.TOPK + 1) / (2 * chosen.TOPK) if name == "weighted sum" else moved
        lines.append([name, *([_us(us[name]), f"{num_bytes / us[name] * 1e-6:.2f}"] if us else ["not timed", ""])])
    return Table(["kernel", "us", "TB/s"], lines)


def show_package(group_version, swiglu, total) -> Table:
    """Return a table of this lesson's kernels beside the package's, each pair timed interleaved."""
    import moe_numba

    ids, experts = ids_to_group(), qwen().num_experts
    out = poisoned_groups(ids, experts)
    pairs = {
        "group": (groups, _timed_group(group_version), [partial(moe_numba.group_by_expert, ids, experts, out=out)]),
        "weighted sum": (sums, _timed_sum(total), [partial(moe_numba.weighted_sum, *to_sum())]),
    }
    lines = []
    for name, (lesson, ours, package) in pairs.items():
        us = lesson.times(f"package: {name}", {"this lesson": ours, "the package": package})
        lines.append([name, *([_us(us["this lesson"]), _us(us["the package"])] if us else ["not timed", ""])])
    us = swiglus.times("package: SwiGLU", {"this lesson": _timed_swiglu(swiglu)})
    lines.append(["SwiGLU", _us(us["this lesson"]) if us else "not timed", "in the GEMM's epilogue"])
    return Table(["stage", "this lesson, us", "the package, us"], lines)


def error_of_unstable(kernel, seed: int) -> str | None:
    """Return how an unstable grouping differs from the reference in one order of threads."""
    ids = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0]], dtype=torch.int32)
    expected, out = reference.group_by_expert(ids, 3), poisoned_groups(ids, 3)
    with simulator.seed(seed):
        launch(kernel, 1, 8, ids, expected[1], torch.zeros(3, dtype=torch.int32), *out[2:], 2)
    return wrong_groups((*expected[:2], *out[2:]), ids, 3)


def same_bits(order_seed: int = 0) -> str:
    """Return whether a layer returns the same bits again, and with its tokens in another order."""
    x, w13, w2, weights, ids, *_ = given(tokens_here())
    result = fused_experts(x, w13, w2, weights, ids)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(order_seed)).to(DEVICE)
    again = all(torch.equal(fused_experts(x, w13, w2, weights, ids), result) for _ in range(3))
    moved = torch.equal(fused_experts(x[order], w13, w2, weights[order], ids[order]), result[order])
    return (
        f"the same bits in four runs: {'yes' if again else 'NO'}; tokens in another order: {'yes' if moved else 'NO'}"
    )


_EARLIER = "moe_layer_ladder"


def show_what_did_not_pay() -> Table:
    """Return a table of changes that an earlier version timed: before, after, and why."""
    found = records.read(_EARLIER)["diagnosis"]
    reads, prompt = found["read the weights"], found["gate_up of a prompt"]
    boxes = {size: reads[f"boxes, L2 promotion {size} B"] for size in (128, 256)}
    behind = {name: prompt[f"{name}, gate_up"] - prompt[name] for name in ("permute", "copy")}
    down = found["whole layer with 1 token"]["GEMV, down"], found["launches with 1 token, rotating"]["down"]
    rows = (
        (
            "w13 is read by TMA in boxes, not by loads in the order of addresses",
            reads["in order"],
            boxes[128],
            "Both are near the rate of DRAM.",
        ),
        (
            "TMA with an L2 promotion of 256 bytes, not 128",
            boxes[128],
            boxes[256],
            "All bytes are needed; we do not know why.",
        ),
        (
            "the first GEMM right after the kernel that permutes its rows, not after a copy of other rows",
            behind["copy"],
            behind["permute"],
            "Rows do not stay in the L2 cache: it holds less than either kernel writes.",
        ),
        ("1 token: down by a grouped GEMM, not GEMV", *down, "It has nearly as many tiles as SMs."),
    )
    lines = [[what, _us(old), _us(new), why] for what, old, new, why in rows]
    return Table(["change", "us before", "us after", "why"], lines)


# Several ranks


def show_ranks() -> Table:
    """Run a layer on virtual ranks, with the right experts and with those of the next rank; return what differs."""
    ranks, lines = chosen.RANKS, []
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=random)
    experts = 2 * ranks
    w13, w2 = (normal(experts, 256, 128) / 11).bfloat16(), (normal(experts, 128, 128) / 11).bfloat16()
    choose = lambda: torch.rand(3, experts, generator=random).topk(2).indices
    tokens = [(normal(3, 128).bfloat16(), normal(3, 2).abs(), choose()) for _ in range(ranks)]

    def work(rank, shift):
        own = slice(2 * ((rank.rank + shift) % ranks), 2 * ((rank.rank + shift) % ranks) + 2)
        local = Experts(2, 128, 128, device=rank.device)
        local.load_state_dict({"w13": w13[own], "w2": w2[own]})
        buffer = Buffer(rank, 1 << 22)
        layer = ExpertParallelMoE(buffer, local, num_worst_tokens=3 * ranks)  # the CPU does not wait for counts
        result = layer(*(tensor.to(rank.device) for tensor in tokens[rank.rank])).cpu()
        buffer.destroy()
        return result

    expected = [reference.fused_experts(rows, w13, w2, *routing) for rows, *routing in tokens]
    for name, shift in (("own experts", 0), ("experts of the next rank", 1)):
        for rank, out in enumerate(LocalGroup(ranks).run(partial(work, shift=shift))):
            lines.append([name, str(rank), mismatch(out, expected[rank], 1e-2) or "right"])
    return Table(["each rank has", "rank", "what the check says"], lines)


def _ranks_record():
    return records.read("moe_layer_ranks")


def show_layers_on_ranks() -> Table:
    """Return a table of recorded layers on several GPUs, and published times of others on 8."""
    record, lines = _ranks_record(), []
    names = {
        "rings": ("final", "bf16"),
        "rings, FP8 dispatch": ("final", "e4m3"),
        "low latency": ("low latency", "bf16"),
        "low latency, FP8 dispatch": ("low latency", "e4m3"),
        "low latency, FP8 both ways": ("low latency, FP8 sums", "e4m3"),
    }
    tokens = sorted({row["size"]["tokens"] for row in record["rows"]})
    for ranks in ranks_bench.numbers_of_ranks(record):
        found = ranks_bench.medians(record, ranks)
        for name, key in names.items():
            us = [_us(found.get(n, {}).get(key)) for n in tokens]
            if any(us):
                lines.append([str(ranks), f"the package, {name}", *us])
    for name, us in ranks_bench.PUBLISHED.items():
        lines.append(["8", f"{name}, published", *(_us(us.get(n)) for n in tokens)])
    return Table(["GPUs", "DeepSeek-V3 layer, us", *(f"{n} tokens each" for n in tokens)], lines)


def compare_with_others(ranks: int = 8) -> str:
    """Return at which numbers of tokens the others' published layers are faster than the package's fastest one."""
    record, texts = _ranks_record(), []
    for name, published in ranks_bench.PUBLISHED.items():
        ours = {n: us for n in published if (us := ranks_bench.fastest(record, ranks, n))}
        verdicts = {n: "faster" if published[n] < us else "slower" for n, us in ours.items()}
        parts = []
        for verdict in ("faster", "slower"):
            sizes = [f"{n}" for n, found in verdicts.items() if found == verdict]
            if sizes:
                parts.append(f"{verdict} with {', '.join(sizes)} tokens per rank")
        texts.append(f"{name}, as published, against the package's fastest layer: {'; '.join(parts)}")
    return f"On {ranks} GPUs.\n" + "\n".join(texts)
