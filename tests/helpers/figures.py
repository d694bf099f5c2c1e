"""Checks of figures: texts that are cut off or overlap, labelled shapes, and the values inside them."""

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text


def texts(figure):
    """Return the texts of the first axes, in drawing order."""
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def marks(axes):
    """Return the bars of a figure of times, or the dots that replace them on a logarithmic axis."""
    return [*axes.patches, *(line for line in axes.lines if line.get_marker() == "o")]


def labelled(figure, label):
    """Return the shapes and lines with a label."""
    artists = figure.axes[0].patches + figure.axes[0].lines
    return [artist for artist in artists if artist.get_label() == label]


def values_of(figure, label):
    """Return the first text inside each box with a label, in drawing order."""
    places = [(text.get_text(), text.get_position()) for text in figure.axes[0].texts if text.get_text()]
    found = []
    for box in labelled(figure, label):
        (x0, y0), x1, y1 = box.get_xy(), box.get_x() + box.get_width(), box.get_y() + box.get_height()
        found.append(next(text for text, (x, y) in places if x0 < x < x1 and y0 < y < y1))
    return found


def colours_of(figure, label):
    """Return the fill colour of each box with a label."""
    return [to_hex(patch.get_facecolor()) for patch in labelled(figure, label)]


def text_boxes(figure):
    """Return each visible text and its box, without a margin of a pixel; ticks outside the limits are not drawn."""
    drawn, draw, renderer = [], Text.draw, FigureCanvasAgg(figure).get_renderer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", lambda self, renderer: (drawn.append(self), draw(self, renderer)))
        figure.draw(renderer)
    shown = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent(renderer).padded(-1)) for text in shown]


def cut_off(figure):
    """Return the texts that are not entirely inside the canvas."""
    return _cut_off(text_boxes(figure), figure.bbox)


def misplaced(figure):
    """Return the texts that are cut off, and the pairs of texts that overlap."""
    boxes = text_boxes(figure)
    pairs = itertools.combinations(boxes, 2)
    return _cut_off(boxes, figure.bbox) + [(a, b) for (a, one), (b, other) in pairs if one.overlaps(other)]


def _cut_off(boxes, edge):
    return [t for t, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > edge.x1 or box.y1 > edge.y1]
