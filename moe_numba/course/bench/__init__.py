"""Benchmarks: ``timing`` measures, ``records`` stores in ``docs/results/<gpu>/<topic>.json``, ``plots`` draws.

A topic of ``python -m moe_numba bench`` is a module ``topics/<name>.py`` with

- ``measure(peers, quick) -> rows``, which needs a GPU and makes its rows with ``records.row``,
- ``figures(record) -> {name: Figure}`` and ``readme_table(record) -> str``, which need none.
"""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_numba.course.bench import records
from moe_numba.course.bench.timing import Stats, call_time, call_times, kernel_time, kernel_times, rotating

__all__ = [
    "Stats",
    "call_time",
    "call_times",
    "drop_if_wrong",
    "kernel_time",
    "kernel_times",
    "load_peers",
    "records",
    "rotating",
    "topic",
    "topic_names",
]


def topic_names() -> list[str]:
    """Return the names of all bench topics, sorted."""
    from moe_numba.course.bench import topics

    return sorted(module.name for module in pkgutil.iter_modules(topics.__path__))


def topic(name: str) -> ModuleType:
    """Return the module of a topic; raise ``ValueError`` with the known names if there is none."""
    if name not in topic_names():
        raise ValueError(records.unknown("topic", name, topic_names()))
    module = f"{__name__}.topics.{name}"
    return importlib.import_module(
        f"{module}.show" if importlib.util.find_spec(module).submodule_search_locations else module
    )


def load_peers(folder: Path | str, names: Collection[str] | None = None) -> list[ModuleType]:
    """Import every ``*.py`` of a folder: other projects' kernels, measured in the same run.

    With ``names`` only files of these names are imported, for example by the processes of other ranks.

    A peer defines ``NAME``, ``VERSION`` and one function per topic that it supports. A peer that fails to import,
    because its package is not installed, is reported on standard error and left out.

    Returns
    -------
    list of modules, sorted by file name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"the peers' folder {folder} does not exist")
    peers = []
    for path in sorted(folder.glob("*.py")):
        if names is not None and path.name not in names:
            continue
        name = f"moe_numba_peer_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # Triton and dataclasses look their module up by name
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # the other peers are measured whatever this one raises
            del sys.modules[name]
            print(f"peer {path.name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        missing = [wanted for wanted in ("NAME", "VERSION") if not hasattr(module, wanted)]
        if missing:
            raise ValueError(f"the peer {path} lacks {' and '.join(missing)}")
        peers.append(module)
    return peers


def drop_if_wrong(
    calls: dict[str, Any], name: str, where: str, is_peer: bool, find_fault: Callable[[], str | None]
) -> None:
    """Remove a peer's call of which ``find_fault`` returns a fault or raises, and report it; raise for any other.

    ``where`` says of which problem: "2048 rows". Raises ``AssertionError`` for a call that is not a peer's.
    """
    try:
        fault = find_fault()
    except Exception as error:
        if not is_peer:
            raise
        fault = f"{type(error).__name__}: {error}"
    if fault and not is_peer:
        raise AssertionError(f"{name}, {where}: {fault}")
    if fault:
        print(f"{name} is left out, {where}: {fault}", file=sys.stderr)
        del calls[name]
