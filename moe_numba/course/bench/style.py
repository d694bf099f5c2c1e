"""Colours, fonts and the figure class that all figures and pictures share."""

import io

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, GREY, PALE = "#222222", "#777777", "#B8B8B8"
BROWN = "#9A6400"  # orange's darker sister, legible as text
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)
WIDTH, ROW, COLUMN = 9.2, 0.34, 0.88  # inches: a bar figure, one of its rows, one of its columns of numbers

STYLE = {
    "font.family": "DejaVu Sans",  # matplotlib brings it along, so a figure looks the same everywhere
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
    "svg.hashsalt": "moe_numba",  # the same rows give the same file
}


class Picture(Figure):
    """A figure that a notebook shows although pyplot never saw it."""

    def _repr_png_(self):
        data = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.savefig(data, format="png", dpi=110)
        return data.getvalue()
