"""Players: pages that step through frames of boxes and arrows, with buttons, arrow keys and a slider, offline.

Viewers that run no scripts show the last frame. `Player.strip` draws some frames below each other as a figure, which a
notebook displays for them.
"""

import html
import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, INK, ORANGE, WIDTH
from moe_numba.course.draw.canvas import arrow, box, canvas, ink_on, text

COLOURS = {"plain": None, "active": BLUE, "done": GREEN, "waits": ORANGE}
_MOST_FRAMES = 400


@dataclass(frozen=True)
class Box:
    """A rectangle with text, from its upper left corner, in pixels; ``kind`` is a name in `COLOURS`.

    ``group`` names what it belongs to, such as a lane: a click on one shape marks all of its group.
    """

    x: float
    y: float
    width: float
    height: float
    text: str = ""
    kind: str = "plain"
    group: str = ""


@dataclass(frozen=True)
class Arrow:
    """An arrow between two points."""

    x1: float
    y1: float
    x2: float
    y2: float
    group: str = ""


@dataclass(frozen=True)
class Label:
    """Text whose left edge, or with ``centred`` whose middle, is at a point."""

    x: float
    y: float
    text: str
    centred: bool = False


@dataclass(frozen=True)
class Frame:
    """One moment: its shapes, and a sentence that says what happens."""

    note: str
    shapes: Sequence[Box | Arrow | Label] = field(default_factory=tuple)


_SHAPES = {"Box": Box, "Arrow": Arrow, "Label": Label}


class Player:
    """Steps through frames; notebooks display it, ``str`` is a whole page.

    Parameters
    ----------
    frames : sequence of Frame
        1 to 400.
    width, height : int
        Size of the drawing in pixels; no box may lie outside.
    title : str
        What the player shows, also for screen readers.
    """

    def __init__(self, frames: Iterable[Frame], width: int, height: int, title: str):
        self.frames, self.width, self.height, self.title = list(frames), width, height, title
        if not 1 <= len(self.frames) <= _MOST_FRAMES:
            raise ValueError(f"a player shows 1 to {_MOST_FRAMES} frames, not {len(self.frames)}")
        for shape in (s for frame in self.frames for s in frame.shapes if isinstance(s, Box)):
            if shape.kind not in COLOURS:
                raise ValueError(f"kind is {shape.kind!r}; it must be one of {', '.join(COLOURS)}")
            if not (0 <= shape.x <= width - shape.width and 0 <= shape.y <= height - shape.height):
                raise ValueError(f"{shape} is outside the drawing of {width} x {height} pixels")

    def as_dict(self) -> dict[str, Any]:
        """Return the player as plain values, which `in_simulator` can return from another process."""
        frames = [(frame.note, [(type(s).__name__, asdict(s)) for s in frame.shapes]) for frame in self.frames]
        return {"frames": frames, "width": self.width, "height": self.height, "title": self.title}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Player":
        """Return the player that `as_dict` described."""
        of = lambda shapes: [_SHAPES[kind](**fields) for kind, fields in shapes]
        frames = [Frame(note, of(shapes)) for note, shapes in values["frames"]]
        return cls(frames, values["width"], values["height"], values["title"])

    def __str__(self):
        head = f'<meta charset="utf-8"><title>{html.escape(self.title)}</title>'
        style = "<style>:root { color-scheme: light dark }</style>"
        return f'<!DOCTYPE html><html lang="en"><head>{head}{style}</head><body>{self._repr_html_()}</body></html>'

    def _repr_html_(self):
        name = f"player-{uuid.uuid4().hex[:12]}"
        last = len(self.frames) - 1
        hidden = ' display="none"'
        drawn = "".join(
            f'<g data-frame="{k}"{hidden if k < last else ""}>{"".join(map(_svg, frame.shapes))}</g>'
            for k, frame in enumerate(self.frames)
        )
        buttons = "".join(
            f'<button type="button" name="{move}" aria-label="{label}">{text}</button>'
            for move, label, text in _BUTTONS
        )
        notes = json.dumps([frame.note for frame in self.frames]).replace("<", "\\u003c")
        return (
            f'<div class="player" id="{name}" tabindex="0"><style>{_STYLE}</style><b>{html.escape(self.title)}</b>'
            f'<div class="controls">{buttons}<input type="range" min="0" max="{last}" aria-label="frame">'
            f"<span></span></div>"
            f'<svg viewBox="0 0 {self.width} {self.height}" style="max-width: {1.25 * self.width:.0f}px" '
            f'role="img" aria-label="{html.escape(self.title)}">'
            f"{_MARKER.replace('ID', name)}{drawn.replace('#arrow', f'#{name}-arrow')}</svg>"
            f'<p aria-live="polite">{html.escape(self.frames[-1].note)}</p>'
            f'<script type="application/json">{notes}</script><script>{_SCRIPT.replace("ID", name)}</script></div>'
        )

    def strip(self, numbers: Sequence[int]):
        """Draw some frames below each other, each with its sentence: what readers without scripts see.

        Returns
        -------
        Figure
        """
        scale = (WIDTH - 0.3) / self.width
        each = self.height * scale + 0.45
        figure, axes = canvas(WIDTH, each * len(numbers) + 0.45, self.title)
        for place, number in enumerate(numbers):
            top = each * (len(numbers) - place)
            text(axes, 0.15, top - 0.12, f"{number + 1}. {self.frames[number].note}", ha="left")
            for shape in self.frames[number].shapes:
                _draw(axes, shape, lambda x: 0.15 + scale * x, lambda y, top=top: top - 0.3 - scale * y, scale)
        return figure


def _text_colour(kind):
    """Return the colour of the text of boxes of a kind that has a colour of its own."""
    return COLOURS[kind] and ink_on(COLOURS[kind])


def _draw(axes, shape, x, y, scale):
    if isinstance(shape, Box):
        colour = COLOURS[shape.kind]
        where = x(shape.x), y(shape.y + shape.height), scale * shape.width, scale * shape.height
        box(axes, *where, shape.text, fill=colour or "white", colour=_text_colour(shape.kind) or INK, size=8)
    elif isinstance(shape, Arrow):
        arrow(axes, (x(shape.x1), y(shape.y1)), (x(shape.x2), y(shape.y2)), colour=GREY)
    else:
        text(axes, x(shape.x), y(shape.y), shape.text, size=8, ha="center" if shape.centred else "left")


def _svg(shape):
    if isinstance(shape, Label):
        anchor = "middle" if shape.centred else "start"
        return f'<text x="{shape.x}" y="{shape.y}" text-anchor="{anchor}">{html.escape(shape.text)}</text>'
    group = f' data-group="{html.escape(shape.group)}"' if shape.group else ""
    if isinstance(shape, Arrow):
        points = f'x1="{shape.x1:g}" y1="{shape.y1:g}" x2="{shape.x2:g}" y2="{shape.y2:g}"'
        return f'<line {points} marker-end="url(#arrow)"{group}/>'
    middle = f'x="{shape.x + shape.width / 2:g}" y="{shape.y + shape.height / 2:g}" text-anchor="middle"'
    rectangle = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}" rx="3"'
    words = f"<text {middle}>{html.escape(shape.text)}</text>"
    return f'<g class="{shape.kind}"{group}><rect {rectangle}/>{words}</g>'


_BUTTONS = (
    ("first", "first frame", "|&lt;"),
    ("back", "previous frame", "&lt;"),
    ("play", "play or pause", "play"),
    ("next", "next frame", "&gt;"),
)
_MARKER = (
    '<defs><marker id="ID-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>'
)
_FILLS = "\n".join(f".player .{kind} rect {{ fill: {colour} }}" for kind, colour in COLOURS.items() if colour)
_TEXTS = "\n".join(
    f".player svg .{kind} text {{ fill: {_text_colour(kind)} }}" for kind, colour in COLOURS.items() if colour
)
_STYLE = f"""
.player {{ font: 14px/1.5 system-ui, sans-serif; max-width: 900px; --ink: #222; --paper: #fff; outline-offset: 4px }}
@media (prefers-color-scheme: dark) {{ .player {{ --ink: #ddd; --paper: #1d1d1f }} }}
.player svg {{ width: 100%; height: auto; display: block; background: var(--paper) }}
.player svg text {{ fill: var(--ink); font: 12px system-ui, sans-serif; dominant-baseline: central }}
.player rect {{ fill: var(--paper); stroke: var(--ink) }}
.player line {{ stroke: var(--ink); stroke-width: 1.3 }}
.player marker path {{ fill: var(--ink) }}
{_FILLS}
{_TEXTS}
.player .controls {{ display: none; gap: .5em; align-items: center; margin: .4em 0 }}
.player .controls input {{ flex: 1 }}
.player p {{ min-height: 3em; margin: .3em 0 }}
.player [data-group] {{ cursor: pointer }}
.player.picked [data-group]:not(.marked) {{ opacity: .15 }}
""".strip()
_SCRIPT = """
(() => {
  const root = document.getElementById("ID"), notes = JSON.parse(root.querySelector("script").textContent);
  const frames = [...root.querySelectorAll("[data-frame]")], slider = root.querySelector("input");
  const play = root.querySelector("[name=play]");
  let at = 0, timer = null;
  const show = (k) => {
    at = Math.max(0, Math.min(frames.length - 1, k));
    frames.forEach((frame, i) => frame.setAttribute("display", i === at ? "inline" : "none"));
    root.querySelector("p").textContent = notes[at];
    root.querySelector(".controls span").textContent = `${at + 1} / ${frames.length}`;
    slider.value = root.dataset.at = at;
  };
  const pause = () => { clearInterval(timer); timer = null; play.textContent = "play"; };
  const moves = {
    first: () => show(0), back: () => show(at - 1), next: () => show(at + 1),
    play: () => {
      play.textContent = "pause";
      if (at + 1 === frames.length) show(0);
      timer = setInterval(() => at + 1 < frames.length ? show(at + 1) : pause(), 900);
    },
  };
  const act = (name) => { const playing = timer; pause(); if (name !== "play" || !playing) moves[name](); };
  root.querySelectorAll("button").forEach((b) => b.addEventListener("click", () => act(b.name)));
  slider.addEventListener("input", () => { pause(); show(+slider.value); });
  root.addEventListener("keydown", (event) => {
    const name = { ArrowLeft: "back", ArrowRight: "next", Home: "first" }[event.key];
    if (name) { act(name); event.preventDefault(); event.stopPropagation(); }
  });
  root.querySelector("svg").addEventListener("click", (event) => {
    const shape = event.target.closest("[data-group]"), group = shape && shape.dataset.group;
    const picked = root.dataset.group === group ? null : group;
    root.dataset.group = picked || "";
    root.classList.toggle("picked", Boolean(picked));
    root.querySelectorAll("[data-group]").forEach((s) => s.classList.toggle("marked", s.dataset.group === picked));
  });
  root.querySelector(".controls").style.display = "flex";
  show(0);
})();
""".strip()
