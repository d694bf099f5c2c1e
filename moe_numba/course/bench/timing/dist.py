"""Peers in the processes of ranks, and calls on all ranks."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_numba.course.bench import load_peers


def peer_files(peers: Iterable[ModuleType], function: str) -> list[str]:
    """Return the files of the peers that have a function, for `load_files` in the processes of the ranks."""
    return [str(peer.__file__) for peer in peers if hasattr(peer, function)]


def load_files(files: Iterable[str]) -> list[ModuleType]:
    """Import peers from their files."""
    paths = [Path(file) for file in files]
    folders = sorted({path.parent for path in paths})
    return [
        peer
        for folder in folders
        for peer in load_peers(folder, {path.name for path in paths if path.parent == folder})
    ]


def on_all_ranks(transport: Any, name: str, function: Callable[[], Any]) -> Any:
    """Call a peer's function on all ranks; return None, and report it, if it raises an error on any of them.

    All ranks then go on with the same next call: a rank that left out what others still wait for would stop them.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as raised:  # the other peers are measured whatever this one raises
        error = f"{type(raised).__name__}: {raised}"
    errors = [error for error in transport.gather(error) if error is not None]
    if errors:
        print(f"{name} is left out: {errors[0]}", file=sys.stderr)
    return None if errors else result
