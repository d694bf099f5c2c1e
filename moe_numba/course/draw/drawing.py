"""Drawings in SVG: as wide as a phone, and dark where the reader's system is."""

import html

WIDTH = 390
_STYLE = """
.drawing-paper { fill: #fff } .drawing-ink { fill: #222 } .drawing-quiet { fill: #666 } .drawing-pale { fill: #e3e3e3 }
.drawing-light { fill: #fff } .drawing-dark { fill: #1a1a1a } .drawing-rule { stroke: #888; fill: none }
.drawing-blue { fill: #0072b2 } .drawing-sky { fill: #7cc4ee } .drawing-orange { fill: #e69f00 }
.drawing-green { fill: #009e73 } .drawing-purple { fill: #cc79a7 }
@media (prefers-color-scheme: dark) {
.drawing-paper { fill: #1b1b1b } .drawing-ink { fill: #eee } .drawing-quiet { fill: #aaa }
.drawing-pale { fill: #3d3d3d } }
""".strip()
_ON = {"blue": "light", "green": "light", "sky": "dark", "orange": "dark", "purple": "dark"}  # fill -> text on it


class Drawing:
    """Boxes, lines and text in pixels, from the upper left corner; a notebook displays it."""

    def __init__(self, title: str):
        self.title, self.parts, self.height = title, [], 0.0
        self.text(8, 18, title, size=13, bold=True)

    def text(self, x, y, words, *, size=11, kind="ink", anchor="start", bold=False):
        """Write words whose baseline is at y; ``anchor`` is "start", "middle" or "end"."""
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="drawing-{kind}" {place}{weight}>{html.escape(words)}</text>')
        self.height = max(self.height, y + 8)

    def box(self, x, y, width, height, kind="pale", words="", *, size=10):
        """Draw a filled rectangle, with centred words."""
        place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        self.parts.append(f'<rect class="drawing-{kind}" {place}/>')
        if words:
            on, middle = _ON.get(kind, "ink"), y + height / 2 + 0.36 * size
            self.text(x + width / 2, middle, words, size=size, kind=on, anchor="middle")
        self.height = max(self.height, y + height + 8)

    def line(self, *points, width=1.0):
        """Draw a line through points (x, y)."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="drawing-rule" stroke-width="{width}" points="{path}"/>')

    def note(self, x, y, words):
        """Write a grey line of small print."""
        self.text(x, y, words, size=10, kind="quiet")

    def legend(self, y, entries):
        """Explain fills in a row: (kind, words)."""
        x = 8.0
        for kind, words in entries:
            self.box(x, y - 9, 10, 10, kind)
            self.note(x + 14, y, words)
            x += 26 + 5.6 * len(words)

    def _repr_svg_(self):
        size = f'viewBox="0 0 {WIDTH} {self.height:.0f}" width="{1.5 * WIDTH:.0f}" height="{1.5 * self.height:.0f}"'
        paper = f'<rect class="drawing-paper" width="{WIDTH}" height="{self.height:.0f}"/>'
        font = 'font-family="system-ui, sans-serif" style="max-width: 100%; height: auto"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">'
        title = f"<title>{html.escape(self.title)}</title>"
        return f"{head}{title}<style>{_STYLE}</style>{paper}{''.join(self.parts)}</svg>"

    def __repr__(self):
        return f"a figure: {self.title}"
