"""Colours, fonts and the figure class that all figures and pictures share."""

import io

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, GREY, PALE = "#222222", "#777777", "#B8B8B8"
BROWN = "#9A6400"  # dark orange, legible as text
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)
WIDTH, ROW, COLUMN = 9.2, 0.34, 0.88  # inches: a figure, a row of bars, a column of numbers

STYLE = {
    "font.family": "DejaVu Sans",  # part of matplotlib, so figures look the same everywhere
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": PALE,
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": "#E6E6E6",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 150,
    "svg.hashsalt": "moe_numba",  # the same rows produce the same file
}


class Picture(Figure):
    """A figure that notebooks display without pyplot."""

    def _repr_png_(self):
        data = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.savefig(data, format="png", dpi=110)
        return data.getvalue()
