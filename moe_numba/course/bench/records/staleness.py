"""Finds records and executed notebooks that were measured with other code than the present one. It compiles nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

from moe_numba.course.bench import records
from moe_numba.course.bench.records.code_hash import hash_cells


def stale_records(root: Path | str | None = None) -> dict[str, list[str]]:
    """Return ``{"<gpu>/<topic>": sentences}`` of all records; no sentences for one with the present kernels."""
    paths = sorted(records.results(root).glob("*/*.json"))
    return {
        f"{path.parent.name}/{path.stem}": records.stale(json.loads(path.read_text(encoding="utf-8"))) for path in paths
    }


def stale_notebook(path: Path) -> list[str]:
    """Describe how the code of a notebook, ``notebooks/NN_topic.py``, differs from that of its executed copy."""
    about = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["metadata"].get("moe_numba", {})
    if "code" not in about:
        return ["the executed copy does not say which code was executed"]
    when, found = f"executed at commit {about['commit'][:7]}", []
    if about["gpu"] == records.SIMULATOR:
        found.append("no GPU has executed it")
    if about["code"] != hash_cells(path.read_text(encoding="utf-8")):
        found.append(f"{when}; its code cells have changed since")
    elif "functions" not in about:
        found.append(f"{when}, before kernels were hashed")
    if changed := records.changed_kernels(about):
        found.append(f"{when} with kernels that have changed since: {records.format_changes(changed)}")
    return found


def stale_results(root: Path | str | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each stale record and executed notebook, with a sentence for each reason."""
    for path in sorted((records.repository(root) / "docs" / "results").glob("*/*.json")):
        if sentences := records.stale(json.loads(path.read_text(encoding="utf-8"))):
            yield f"{path.parent.name}/{path.stem}", sentences
    for copy in sorted((records.repository(root) / "notebooks").glob("*.ipynb")):
        if (source := copy.with_suffix(".py")).is_file() and (sentences := stale_notebook(source)):
            yield copy.name, sentences
