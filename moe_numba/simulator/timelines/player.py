"""A page that shows a timeline and steps through it, forwards and backwards; without JavaScript it is a picture."""

import html
import itertools
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from moe_numba.simulator.core.scheduler import Event
from moe_numba.simulator.timelines.spans import NS_PER_STEP, Span, as_spans, from_zero, rows

_MOST_SPANS, _MOST_ROWS = 4000, 200
_WIDTH, _LABEL, _ROW, _TICK = 960, 190, 20, 3  # pixels
# Dark enough for white text: a contrast of 4.5 or more.
_COLOURS = {"wait": "#647788", "copy": "#b25d0d", "compute": "#7a5fb5", "access": "#2b7d54"}
_PALETTE = ("#336fbb", "#b5476b", "#806c10", "#207b83", "#7d5f45")  # of the other spans, by name
_STYLE = """
.sim-timeline { font: 13px/1.45 system-ui, sans-serif; color-scheme: light dark; --ink: #222; --line: #8884;
  max-width: 980px; outline: none; color: var(--ink) }
@media (prefers-color-scheme: dark) { .sim-timeline { --ink: #ddd } }
.sim-timeline figure { margin: 0; overflow: auto; max-height: 70vh }
.sim-timeline svg text { font: 11px ui-monospace, monospace; fill: var(--ink) }
.sim-timeline svg text.inside { fill: #fff; pointer-events: none }
.sim-timeline svg .title { font-weight: 600 }
.sim-timeline svg line { stroke: var(--line) }
.sim-timeline .later { opacity: .12 }
.sim-timeline .current rect { stroke: var(--ink); stroke-width: 2 }
.sim-timeline .controls { display: none; gap: .4em; align-items: center; margin: .4em 0 }
.sim-timeline .controls input { flex: 1 }
.sim-timeline output { display: block; min-height: 3em; font: 12px/1.45 ui-monospace, monospace }
.sim-timeline .legend span { display: inline-block; margin-right: 1.2em }
.sim-timeline .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
"""
_SCRIPT = """
(function () {
  const root = document.getElementById("ID"), texts = JSON.parse(root.querySelector("script").textContent);
  const marks = texts.map((_, k) => root.querySelector('[data-k="' + k + '"]'));
  const slider = root.querySelector("input"), output = root.querySelector("output");
  let at = texts.length;  // the number of marks shown
  function show(n) {
    at = Math.max(0, Math.min(texts.length, n));
    marks.forEach((mark, k) => {
      mark.classList.toggle("later", k >= at);
      mark.classList.toggle("current", k === at - 1);
    });
    slider.value = at;
    output.textContent = at ? at + " of " + texts.length + ": " + texts[at - 1] : "before the first event";
  }
  const moves = { first: () => 0, back: () => at - 1, forward: () => at + 1, last: () => texts.length };
  root.querySelectorAll("button").forEach((b) => b.addEventListener("click", () => show(moves[b.name]())));
  slider.addEventListener("input", () => show(+slider.value));
  marks.forEach((mark, k) => mark.addEventListener("click", () => show(k + 1)));
  root.addEventListener("keydown", (event) => {
    const move = { Home: "first", ArrowLeft: "back", ArrowRight: "forward", End: "last" }[event.key];
    if (move) { show(moves[move]()); event.preventDefault(); event.stopPropagation(); }
  });
  root.querySelector(".controls").style.display = "flex";
  show(texts.length);
})();
"""
_BUTTONS = {
    "first": ("|&lt;", "Home"),
    "back": ("&lt;", "left arrow"),
    "forward": ("&gt;", "right arrow"),
    "last": ("&gt;|", "End"),
}


def timeline(simulated: "Iterable[Event | Span]" = (), measured: "Iterable[Span]" = ()) -> "Timeline":
    """Return a timeline of a simulated trace, and below it one of measured spans, for a notebook or a file.

    Parameters
    ----------
    simulated : events of `simulator.trace`, or Spans
        Drawn in their order, not to scale: a trace has no clock.
    measured : Spans
        Such as those of `measured_spans`; drawn to scale.

    Raises
    ------
    ValueError
        If there is nothing to draw, or more than 4000 spans or 200 rows.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def wait():
    ...     cuda.syncthreads()
    >>> with moe_numba.simulator.trace() as events:
    ...     wait[1, 64]()
    >>> page = moe_numba.simulator.timeline(events)
    >>> "<svg" in page._repr_html_()
    True
    """
    return Timeline(as_spans(simulated), from_zero(as_spans(measured)))


class Timeline:
    """A timeline to step through; notebooks display it, and `save` writes it as a page of its own."""

    def __init__(self, simulated, measured):
        self._panels = []
        if simulated:
            title = "simulated: order of events, not to scale"
            self._panels.append((title, rows(simulated), _by_order(simulated), _in_steps))
        if measured:
            end = max(span.end_ns for span in measured) or 1
            self._panels.append((f"measured: 0 to {end:,.0f} ns", rows(measured), lambda ns: ns / end, _in_ns))
        count, row_count = len(simulated) + len(measured), sum(len(found) for _, found, *_ in self._panels)
        if not count:
            raise ValueError("the timeline has no events: run a kernel with barriers, copies or the like in the trace")
        if count > _MOST_SPANS or row_count > _MOST_ROWS:
            raise ValueError(
                f"a timeline shows at most {_MOST_SPANS} spans in {_MOST_ROWS} rows, not {count} in {row_count}: leave "
                "some out, such as all but one block's"
            )

    def save(self, path: str | os.PathLike) -> None:
        """Write a page that needs nothing else."""
        Path(path).write_text(str(self), encoding="utf-8")

    def __str__(self):
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Timeline</title>'
            "<style>:root { color-scheme: light dark }</style>"
        )
        body = f"<body>{self._repr_html_()}</body>"
        return f'<!DOCTYPE html><html lang="en"><head>{head}</head>{body}</html>'

    def _repr_html_(self):
        name = f"timeline-{uuid.uuid4().hex[:12]}"
        colours = self._colours()
        drawings, texts = [], []
        for panel in self._panels:
            drawings.append(_panel(*panel, colours, texts))
        buttons = "".join(
            f'<button type="button" name="{move}" title="{key}">{label}</button>'
            for move, (label, key) in _BUTTONS.items()
        )
        controls = f'<input type="range" min="0" max="{len(texts)}" value="{len(texts)}" aria-label="events shown">'
        legend = "".join(
            f'<span><i style="background: {colour}"></i>{html.escape(kind)}</span>' for kind, colour in colours.items()
        )
        data = json.dumps(texts).replace("<", "\\u003c")
        return (
            f'<div class="sim-timeline" id="{name}" tabindex="0"><style>{_STYLE}</style>'
            f'<div class="controls">{buttons}{controls}</div><output></output>'
            f'<figure>{"".join(drawings)}</figure><div class="legend">{legend}</div>'
            f'<script type="application/json">{data}</script><script>{_SCRIPT.replace("ID", name)}</script></div>'
        )

    def _colours(self):
        """Return the colour of each kind of spans, and of each name of those that have no kind of their own."""
        names = dict.fromkeys(
            _legend(span) for _, found, *_ in self._panels for spans in found.values() for span in spans
        )
        others = itertools.cycle(_PALETTE)
        return {name: _COLOURS.get(name) or next(others) for name in names}


def _legend(span):
    return span.kind if span.kind in _COLOURS else span.name


def _by_order(spans):
    """Return a function from a time to its place from 0 to 1 that leaves equal space between successive moments."""
    moments = sorted({time for span in spans for time in (span.start_ns, span.end_ns)})
    place = {time: i / len(moments) for i, time in enumerate(moments)}
    return place.__getitem__


def _panel(title, found, place, format_times, colours, texts):
    """Return the SVG of one panel, and append the description of each mark, in order of time, to `texts`."""
    height = _ROW * (len(found) + 1) + 6
    parts = [f'<text class="title" x="4" y="14">{html.escape(title)}</text>']
    marks = []
    for number, ((track, row), spans) in enumerate(found.items()):
        y = _ROW * (number + 1) + 4
        process = "" if len({track.process for track, _ in found}) == 1 else f"{track.process} "
        label = html.escape(f"{process}{track.thread}" if row == 0 else "")
        parts.append(f'<text x="4" y="{y + 13}">{label}</text>')
        parts.append(f'<line x1="{_LABEL}" x2="{_WIDTH}" y1="{y + _ROW - 2}" y2="{y + _ROW - 2}"/>')
        marks += [(span, y) for span in spans]
    marks.sort(key=lambda mark: (mark[0].start_ns, mark[1]))
    scale = _WIDTH - _LABEL - _TICK
    for span, y in marks:
        x = _LABEL + scale * place(span.start_ns)
        width = max(_TICK, scale * (place(span.end_ns) - place(span.start_ns)))
        text, colour = _describe(span, format_times), colours[_legend(span)]
        name = html.escape(span.name) if width > 7 * len(span.name) + 6 else ""
        parts.append(
            f'<g data-k="{len(texts)}"><title>{html.escape(text)}</title>'
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 5}" rx="2" fill="{colour}"/>'
            f'<text class="inside" x="{x + 4:.1f}" y="{y + 12}">{name}</text></g>'
        )
        texts.append(text)
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return f'<svg {size} role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'


def _in_steps(span):
    until = f" to {span.end_ns / NS_PER_STEP:.0f}" if span.duration_ns else ""
    return f"scheduler step {span.start_ns // NS_PER_STEP:.0f}{until}"


def _in_ns(span):
    return f"{span.start_ns:,.0f} to {span.end_ns:,.0f} ns"


def _describe(span, format_times):
    details = "; ".join(f"{name} {value}" for name, value in span.args.items())
    return f"{span.name} ({span.track.process}, {span.track.thread}, {format_times(span)})" + f": {details}" * bool(
        details
    )
