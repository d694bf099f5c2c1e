"""Measuring: what the notebooks, the README and ``python -m moe_numba bench`` draw from.

``timing`` takes times, ``records`` keeps them in ``docs/results/<gpu>/<topic>.json``, ``plots`` draws them, and
``Ladder`` does all three for the steps of a notebook. A topic that the command line can measure is one module
``topics/<name>.py``, with

- ``measure(peers, quick) -> rows``, on a GPU (the rows come from ``records.row``),
- ``figures(record) -> {name: Figure}`` and, for the README, ``readme_table(record) -> str``, both without a GPU.
"""

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path

from moe_numba.course.bench import records
from moe_numba.course.bench.timing import Stats, call_time, call_times, kernel_time, kernel_times, rotating

__all__ = [
    "Stats",
    "call_time",
    "call_times",
    "kernel_time",
    "kernel_times",
    "load_peers",
    "records",
    "rotating",
    "topic",
    "topic_names",
]


def topic_names():
    """The names that ``topic`` knows, sorted."""
    from moe_numba.course.bench import topics

    return sorted(
        module.name for module in pkgutil.iter_modules(topics.__path__) if not module.name.endswith("_measure")
    )


def topic(name):
    """The module ``topics.<name>``; ``ValueError`` with the known names when there is none."""
    if name not in topic_names():
        raise ValueError(f"there is no topic {name!r}; the topics are: {', '.join(topic_names()) or 'none yet'}")
    return importlib.import_module(f"{__name__}.topics.{name}")


def load_peers(folder):
    """Import each ``*.py`` in ``folder``: other projects' kernels, to be measured beside this one's.

    A peer names itself with ``NAME`` and ``VERSION`` and has one function for each topic it takes part in. One that
    cannot be imported (its package is not installed) is left out, and standard error says so.

    Returns
    -------
    list of modules, sorted by file name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"the peers' folder {folder} does not exist")
    peers = []
    for path in sorted(folder.glob("*.py")):
        name = f"moe_numba_peer_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # Triton and dataclasses look their module up by name
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever a foreign package raises, the others are still measured
            del sys.modules[name]
            print(f"peer {path.name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        missing = [wanted for wanted in ("NAME", "VERSION") if not hasattr(module, wanted)]
        if missing:
            raise ValueError(f"the peer {path} lacks {' and '.join(missing)}")
        peers.append(module)
    return peers
