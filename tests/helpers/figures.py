"""Structural queries on pictures: texts, labelled shapes and the values inside them."""

from matplotlib.colors import to_hex


def words_of(figure):
    """Return the non-empty text artists."""
    return [t for t in figure.axes[0].texts if t.get_text()]


def said(figure):
    """Return the drawn texts."""
    return [t.get_text() for t in words_of(figure)]


def labelled(figure, label):
    """Return the shapes and lines with a label."""
    artists = figure.axes[0].patches + figure.axes[0].lines
    return [artist for artist in artists if artist.get_label() == label]


def values_of(figure, label):
    """Return the text inside each box with a label, in drawing order."""
    found = []
    for patch in labelled(figure, label):
        (x0, y0), (x1, y1) = patch.get_xy(), (patch.get_x() + patch.get_width(), patch.get_y() + patch.get_height())
        inside = [t for t in words_of(figure) if x0 < t.get_position()[0] < x1 and y0 < t.get_position()[1] < y1]
        found.append(inside[0].get_text())
    return found


def colours_of(figure, label):
    """Return the fill colour of each box with a label."""
    return [to_hex(patch.get_facecolor()) for patch in labelled(figure, label)]
