"""Heat map: the source of kernels with a colour per line, as HTML without scripts for light and dark pages."""

import html
import linecache

from moe_numba.simulator.core.errors import file_name
from moe_numba.simulator.profiler.counters import METRICS

_STYLE = """
.sim-profile { font: 13px/1.45 system-ui, sans-serif; overflow-x: auto }
.sim-profile table { border-collapse: collapse; font: 12px/1.45 ui-monospace, monospace }
.sim-profile :is(td, th) { padding: 0 .6em; text-align: right; white-space: pre; border: 0 }
.sim-profile :is(td, th).source { text-align: left }
.sim-profile th { font-weight: 600 }
.sim-profile .number { opacity: .6 }
"""
_COLOUR = "230, 85, 13"  # translucent, so that it suits light and dark pages


class Page:
    """A heat map; `str` gives a whole HTML page, and `body` what notebooks display, in their own colours."""

    def __init__(self, kernels, counter):
        self._kernels, self._counter = kernels, counter

    def __str__(self):
        head = '<meta charset="utf-8"><title>Profile</title><style>:root { color-scheme: light dark }</style>'
        return f"<!DOCTYPE html><html><head>{head}</head><body>{self.body}</body></html>"

    @property
    def body(self):
        parts = "".join(_kernel(kernel, self._counter) for kernel in self._kernels)
        return f'<div class="sim-profile"><style>{_STYLE}</style>{parts}</div>'

    def _repr_html_(self):
        return self.body


def _kernel(kernel, counter):
    metric = METRICS[counter]
    title = f"{kernel.name}: {counter}"
    rows, most = [], max((metric.value(line) or 0 for line in kernel.lines), default=0)
    counted = {(line.file, line.line): line for line in kernel.lines}
    file = None
    for path, number in _source_lines(kernel):
        if path != file:
            file = path
            rows.append(f'<tr><th></th><th></th><th class="source">{html.escape(file_name(path))}</th></tr>')
        rows.append(_row(path, number, counted.get((path, number)), metric, most))
    described = html.escape(metric.description)
    return f"<p><b>{html.escape(title)}</b><br>{described}</p><table>{''.join(rows)}</table>"


def _row(path, number, line, metric, most):
    value = metric.value(line) if line is not None else None
    text = _number(value) if value else ""
    share = value / most if value and most else 0
    style = f' style="background: rgba({_COLOUR}, {0.08 + 0.62 * share:.2f})"' if share else ""
    title = f' title="{html.escape(_details(line))}"' if line is not None else ""
    source = html.escape(linecache.getline(path, number).rstrip("\n"))
    return f'<tr{style}{title}><td class="number">{number}</td><td>{text}</td><td class="source">{source}</td></tr>'


def _details(line):
    """List all counters of a line that are not zero."""
    values = ((name, metric.value(line)) for name, metric in METRICS.items())
    return "\n".join(f"{name}: {_number(value)}" for name, value in values if value)


def _number(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _source_lines(kernel):
    """Yield (file, line number) of every line of the kernel and its device functions, the kernel's file first."""
    spans = sorted(kernel.spans, key=lambda span: (span[0] != kernel.file, span))
    yield from dict.fromkeys((path, number) for path, first, last in spans for number in range(first, last + 1))
