"""Layers of the lesson "Shared experts": weights, check, launches, and times, measured or read from a record."""

import ast
import copy
import hashlib
import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_numba import biased_grouped_topk, simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.torch_layer import NAMES, Shape, count_kernels, mismatch
from moe_numba.course.bench.timing import kernel_times
from moe_numba.course.lessons.shared_experts.sizes import (
    CHECKED,
    COPIES,
    DECODE,
    DEVICE,
    DTYPES,
    FP8,
    REPLICAS,
    SHAPE,
    TIMED,
)
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Table
from moe_numba.course.steps.prediction import Judgement
from moe_numba.course.steps.simulate import source_with_dependencies
from moe_numba.shared_experts import reference

TOPIC = "shared_experts_ladder"
MAIN = "FP8"  # the dtype that predictions are about
BLOCK = 128  # rows and columns that share a scale, in FP8


class Layer:
    """A layer with random weights, of which the last experts are copies of the shared one.

    Attributes
    ----------
    shape : Shape
    w13, w2 : tensors [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate]
    w13_scale, w2_scale : tensors or None
        In FP8, a scale for each 128 x 128 block.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, replicas: int = REPLICAS, device: str = DEVICE, seed: int = 0):
        self.shape, self.dtype = shape, dtype
        self.random = torch.Generator(device).manual_seed(seed)
        hidden, wide, count = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts + replicas
        self.w13, self.w13_scale = self._weights(count, 2 * wide, hidden)
        self.w2, self.w2_scale = self._weights(count, hidden, wide)
        self.router = (self._randn(shape.num_experts, hidden) / hidden**0.5).bfloat16()
        self.bias = self._randn(shape.num_experts) * 0.05
        self._ends: dict[int, torch.Tensor] = {}

    def _randn(self, *size):
        return torch.randn(size, generator=self.random, device=self.random.device)

    def _weights(self, count, rows, columns):
        values = torch.empty(count, rows, columns, dtype=self.dtype, device=self.random.device)
        routed, factor = self.shape.num_experts, 1.0 if self.dtype == FP8 else columns**-0.5
        for expert in range(count):
            values[expert] = values[routed] if expert > routed else (self._randn(rows, columns) * factor).to(self.dtype)
        if self.dtype != FP8:
            return values, None
        size = count, -(-rows // BLOCK), -(-columns // BLOCK)
        scales = (torch.rand(size, generator=self.random, device=values.device) + 0.5) * columns**-0.5
        scales[routed + 1 :] = scales[routed]
        return values, scales

    def clone(self) -> "Layer":
        """Copy the layer with its weights, so that the copy's weights are not in the caches."""
        other = copy.copy(self)
        for name in ("w13", "w2", "w13_scale", "w2_scale"):
            weights = getattr(self, name)
            setattr(other, name, None if weights is None else weights.clone())
        return other

    def experts(self, first: int, last: int) -> tuple:
        """Return w13, w2, w13_scale and w2_scale of experts from ``first`` to before ``last``."""
        every = self.w13, self.w2, self.w13_scale, self.w2_scale
        return tuple(None if weights is None else weights[first:last] for weights in every)

    def ends(self, tokens: int) -> torch.Tensor:
        """Return where the rows of a single group end, for grouped GEMMs; made once, since graphs cannot make it."""
        if tokens not in self._ends:
            self._ends[tokens] = torch.tensor([tokens], dtype=torch.int32, device=self.random.device)
        return self._ends[tokens]

    def tokens(self, count: int) -> torch.Tensor:
        """Return random hidden states [count, hidden]."""
        return self._randn(count, self.shape.hidden_size).bfloat16()

    def route(self, x: torch.Tensor, shared: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights, times the scaling factor, and ids of each token's experts: the router and the gate."""
        s = self.shape
        return biased_grouped_topk(
            torch.nn.functional.linear(x, self.router),
            self.bias,
            s.topk + shared,
            num_expert_group=s.num_expert_group,
            topk_group=s.topk_group,
            num_fused_shared_experts=shared,
            routed_scaling_factor=s.routed_scaling_factor,
            apply_routed_scaling_factor_on_output=True,
        )

    def exact(self, expert: int) -> tuple[torch.Tensor, ...]:
        """Return an expert's three matrices in float64: gate, up, down."""
        w13, w2, w13_scale, w2_scale = self.experts(expert, expert + 1)
        gate, up = _exact(w13, w13_scale).chunk(2)
        return gate, up, _exact(w2, w2_scale)

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output in float64: routed experts, whose weights have the factor, plus the shared one."""
        weights, ids = self.route(x)
        routed = map(self.exact, range(self.shape.num_experts))
        shared = [self.exact(self.shape.num_experts)]
        return reference.forward_normal(x.double(), weights.double(), ids, routed, shared, 1.0)


def _exact(values, scales):
    values = values[0].double()
    if scales is None:
        return values
    scales = scales[0].double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values * scales[: len(values), : values.shape[1]]


@cache
def layers(dtype: str) -> tuple[Layer, ...]:
    """Return layers of one dtype, which are timed in turn."""
    first = Layer(SHAPE, DTYPES[dtype])
    return (first, *(first.clone() for _ in range(COPIES - 1)))


@cache
def batch(dtype: str, tokens: int, alike: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and the right output; with ``alike`` all tokens are the same, and so are their experts."""
    layer = layers(dtype)[0]
    x = layer.tokens(1).expand(tokens, -1).contiguous() if alike else layer.tokens(tokens)
    return x, layer.expected(x)


def wrong(forward: Callable, dtype: str, tokens: int = CHECKED, alike: bool = False) -> str | None:
    """Return how ``forward(layer, x)`` is wrong, or None."""
    x, right = batch(dtype, tokens, alike)
    out = forward(layers(dtype)[0], x)
    fault = mismatch(out, right, DTYPES[dtype])
    return fault and f"{dtype}, {tokens} tokens: {fault}"


class _Operations(TorchDispatchMode):
    """Counts torch's operations that launch a kernel: neither views, nor allocations, nor this package's operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_launch = func.namespace == "aten" and not func.is_view and func.overloadpacket.__name__ not in _NO_LAUNCH
        self.count += is_launch
        return func(*args, **(kwargs or {}))


_NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach"}


def launches(call: Callable) -> int:
    """Return how many kernels a call launches; in the simulator every operation of torch counts as one."""
    if not simulator.ENABLED:
        return count_kernels(call)
    with simulator.profile() as profile, _Operations() as operations:
        call()
    return sum(len(kernel.launches) for kernel in profile.kernels) + operations.count


def code_of(forward: Callable) -> str:
    """Return a hash of a function of the page and of the page's functions that it calls, without their comments."""
    source = ast.unparse(ast.parse(source_with_dependencies([forward])))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@dataclass
class LayerStep:
    """A step's result; notebooks display it. ``us`` and ``launches`` are by dtype."""

    name: str
    forward: Callable
    launches: dict[str, int]
    us: dict[str, float]
    before: "LayerStep | None"
    compared: tuple[float, float] | None  # times in the main dtype, measured together
    predicted_us: float | None

    @property
    def judgement(self) -> Judgement | None:
        """The prediction, in the main dtype, beside what came."""
        if self.predicted_us is None or self.compared is None:
            return None
        return Judgement(*self.compared, self.before.us[MAIN] - self.predicted_us)

    @property
    def table(self) -> Table:
        lines = []
        for dtype in DTYPES:
            cells = [dtype]
            for values, text in ((self.launches, str), (self.us, records.format_us)):
                now, then = values.get(dtype), self.before and getattr(self.before, _NAMES[text]).get(dtype)
                cells.append(
                    "not timed" if now is None else text(now) if then is None else f"{text(then)} → {text(now)}"
                )
            lines.append(cells)
        return Table([f"{DECODE} tokens", "launches", "us"], lines)

    def sentence(self) -> str:
        """Return the prediction and what came of it, or an empty string."""
        if self.judgement:
            return f"{MAIN}: {self.judgement}"
        return "" if self.predicted_us is None else f"{MAIN}: predicted {records.format_us(self.predicted_us)} us"

    def __str__(self):
        return "\n".join(filter(None, [f"{self.name}: right", self.sentence(), str(self.table)]))

    __repr__ = __str__

    def _repr_html_(self):
        return (
            f'<div style="border-left: 4px solid rgb(46, 160, 67); padding: .2em .8em"><b>{html.escape(self.name)}: '
            f"right</b><div>{html.escape(self.sentence())}</div>{self.table._repr_html_()}</div>"
        )


_NAMES = {str: "launches", records.format_us: "us"}


class Layers:
    """The steps of the page that are whole layers: each is checked in all dtypes, counted, and timed or looked up."""

    def __init__(self, topic: str = TOPIC, gpu: str = "h200"):
        self.topic, self.gpu = topic, gpu
        self.steps: dict[str, LayerStep] = {}
        self.rows: dict[tuple, dict] = {}

    def step(
        self, name: str, forward: Callable, *, after: str | None = None, predicted_us: float | None = None
    ) -> LayerStep:
        """Check ``forward(layer, x)``, count its launches, time it beside the step that it changes, and return all.

        Raises `WrongResult` if it is wrong.
        """
        for dtype in DTYPES:
            if fault := wrong(forward, dtype):
                raise WrongResult(f"{name}: {fault}")
        names = [other for other in self.steps if other != name]
        before = self.steps[after or names[-1]] if names else None
        us, compared = {}, None
        for dtype in DTYPES:
            pair = ({before.name: before.forward} if before else {}) | {name: forward}
            if row := self._row(name, pair, dtype, predicted_us if dtype == MAIN else None):
                us[dtype] = row["kernel_us"]["median"]
                compared = tuple(row["compared_us"]) if dtype == MAIN and before else compared
        counted = {dtype: launches(partial(forward, layers(dtype)[0], batch(dtype, CHECKED)[0])) for dtype in DTYPES}
        self.steps[name] = step = LayerStep(name, forward, counted, us, before, compared, predicted_us)
        return step

    def _row(self, name, pair, dtype, predicted_us):
        """Return the row of a step, measured beside the step before it, or recorded for exactly this code; or None."""
        if simulator.ENABLED:
            return self._recorded(name, pair[name], dtype)
        stats = _measured(pair, dtype)
        compared = [round(stats[each].median, 4) for each in pair]
        more = dict(compared_us=compared, predicted_us=predicted_us) if len(pair) > 1 else {}
        return self._keep(name, pair[name], stats[name], dtype, **more)

    def _keep(self, name, forward, stats, dtype, tokens=DECODE, alike=False, **more):
        about = _about(dtype, tokens, alike)
        self.rows[name, dtype, tokens, alike] = row = records.row(
            name, kernel=stats, forward=code_of(forward), **about, **more
        )
        return row

    def _recorded(self, name, forward, dtype, tokens=DECODE, alike=False):
        """Return a recorded row, which counts for exactly the code of the page that was timed; or None."""
        record = records.recorded(self.topic, self.gpu)
        row = record and records.find(record, step=name, **_about(dtype, tokens, alike))
        return row if row and row.get("forward") == code_of(forward) else None

    def times(
        self, about: str, forwards: Mapping[str, Callable], dtype: str, tokens: int = DECODE, alike: bool = False
    ) -> dict[str, float]:
        """Time functions of a layer and tokens, interleaved; return {name: us}, recorded times without a GPU.

        Their rows in the record are called "about: name". Times that are not recorded are left out.
        """
        if simulator.ENABLED:
            rows = {each: self._recorded(f"{about}: {each}", f, dtype, tokens, alike) for each, f in forwards.items()}
        else:
            found = _measured(forwards, dtype, tokens, alike)
            rows = {
                each: self._keep(f"{about}: {each}", f, found[each], dtype, tokens, alike)
                for each, f in forwards.items()
            }
        return {each: row["kernel_us"]["median"] for each, row in rows.items() if row}

    def summary(self) -> Table:
        """Return a table of all steps."""
        lines = []
        for step in self.steps.values():
            cells = [step.name]
            for dtype in DTYPES:
                cells += [str(step.launches[dtype]), records.format_us(step.us[dtype]) if dtype in step.us else ""]
            lines.append([*cells, str(step.judgement or "")])
        heads = [f"{dtype}, {what}" for dtype in DTYPES for what in ("launches", "us")]
        return Table(["step", *heads, f"prediction ({MAIN})"], lines)


_CONFIG = "num_experts", "topk", "hidden_size", "moe_intermediate_size"


def _about(dtype, tokens, alike):
    size = dict(tokens=tokens) | (dict(routing="concentrated") if alike else {})
    config = {name: getattr(TIMED if simulator.ENABLED else SHAPE, name) for name in _CONFIG}
    return dict(config=config, size=size, dtype=NAMES[DTYPES[dtype]])


def _measured(forwards, dtype, tokens=DECODE, alike=False):
    x, _ = batch(dtype, tokens, alike)
    calls = {name: [partial(forward, layer, x) for layer in layers(dtype)] for name, forward in forwards.items()}
    # A large layer takes long enough without the default repetitions in the graph.
    return kernel_times(calls, **(dict(launches=2 * COPIES, replays=12) if tokens >= 1024 else {}))
