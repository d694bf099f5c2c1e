"""Reads and writes records of measurements: ``docs/results/<gpu>/<topic>.json``.

Each row names the kernels that were timed, with hashes of their source and of their machine code (``kernel_hash``), and
the record has the hashes of the functions that these kernels consist of. So ``stale`` finds without a GPU which rows
were measured with other kernels than the present ones. Each row is one line of the file, so that diffs are readable.
All times are in microseconds.
"""

import json
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moe_numba.course.bench.records import progress
from moe_numba.course.bench.records.environment import SIMULATOR, environment, folder
from moe_numba.course.bench.records.environment import versions as versions  # doctor prints them
from moe_numba.course.bench.records.kernel_hash import CELLS, changed_functions, describe
from moe_numba.course.bench.timing import Stats
from moe_numba.runtime.recording import Launched, launched_kernels
from moe_numba.simulator import capability
from moe_numba.simulator.command_line import unknown

PACKAGED = Path(__file__).parent / "results"  # a wheel's copy of docs/results
FIELDS = ("topic", "gpu", "driver", "versions", "commit", "date", "rows")


def repository(root: Path | str | None = None) -> Path:
    """Return the repository, by default the one that contains this package.

    Raises ``FileNotFoundError`` if there is none, as for an installed package.
    """
    root = Path(root) if root is not None else Path(__file__).resolve().parents[4]
    if not ((root / "docs" / "results").is_dir() or (root / "pyproject.toml").is_file()):
        raise FileNotFoundError(
            f"this needs a clone of moe_numba's repository, with its notebooks, docs/ and tests; {root} is none"
        )
    return root


def results(root: Path | str | None = None) -> Path:
    """Return the folder of the records: docs/results of the repository, or its copy in an installed package."""
    return PACKAGED if root is None and PACKAGED.is_dir() else repository(root) / "docs" / "results"


def written_to(root: Path | str | None = None) -> Path:
    """Return the folder of new records: docs/results of a clone, or ``results`` here for an installed package."""
    return Path("results") if root is None and PACKAGED.is_dir() else repository(root) / "docs" / "results"


def row(
    step: str,
    *,
    config: dict | None = None,
    size: dict | None = None,
    dtype: str | None = None,
    kernel: Stats | None = None,
    call: Stats | None = None,
    floor_us: float | None = None,
    **more: Any,
) -> dict:
    """Make one row of a record, with floats rounded to six digits.

    Parameters
    ----------
    step : str
        A step of a ladder, ``"final"`` for the package's own kernel, ``"peer:<name>"`` for another project's.
    config, size : dict
        Keys are the public function's argument names: ``{"num_experts": 256}``, ``{"tokens": 4096}``.
    dtype : str
        Such as "float32".
    kernel, call : Stats
        Kernel time and call time, microseconds; the kernels that they timed become the row's ``kernels``.
    floor_us : float
        Lower bound from the chip's limits, microseconds.
    **more
        ``bytes``, ``flops``, ``wire_gbps``, ``operation``, ``note``, ... Fields that are None are left out.
    """
    timed = [launched for stats in (kernel, call) if stats is not None for launched in stats.kernels]
    fields = {
        "step": step,
        "config": config or {},
        "size": size or {},
        "dtype": dtype,
        "kernel_us": times(kernel),
        "call_us": times(call),
        "floor_us": floor_us,
        "kernels": describe(timed) or None,
        **more,
    }
    made = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }
    progress.report(made)
    return made


def recorded(topic: str, gpu: str = "h200", root: Path | str | None = None) -> dict | None:
    """Return a record, or None if there is none."""
    try:
        return read(topic, gpu, root)
    except FileNotFoundError:
        return None


def peers(record: dict) -> list[str]:
    """Return the steps of other projects' kernels, without variants such as "peer:name, out="."""
    return sorted({row["step"] for row in record["rows"] if row["step"].startswith("peer:") and "," not in row["step"]})


def select(record: dict, **wanted: Any) -> list[dict]:
    """Return the rows that match all of ``wanted``; a dictionary (``size={"tokens": 64}``) may name some keys."""

    def agrees(have, value):
        return value.items() <= (have or {}).items() if isinstance(value, dict) else have == value

    wanted = {name: value for name, value in wanted.items() if value is not None}
    return [row for row in record["rows"] if all(agrees(row.get(name), value) for name, value in wanted.items())]


def find(record: dict, **wanted: Any) -> dict | None:
    """Return the first row that ``select`` finds."""
    return next(iter(select(record, **wanted)), None)


def series(record: dict, over: str = "tokens", value: str = "kernel_us", **wanted: Any) -> dict:
    """Return ``{tokens: value}`` of the selected rows in ascending order: one line of ``plots.sweep_figure``."""
    found = {row["size"][over]: row[value] for row in select(record, **wanted) if over in row["size"] and value in row}
    return dict(sorted(found.items()))


def format_us(us: float) -> str:
    """Format microseconds with three significant digits: 2.31, 12.4, 178."""
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def format_ratio(ratio: float) -> str:
    """Format a speed ratio with one or two significant digits: 12, 1.3, 0.97, 0.04."""
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 1 else format_slowdown(ratio)


def format_slowdown(ratio: float) -> str:
    """Format a ratio with two decimals, or one significant digit below 0.1."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}"


def find_step(rows: list[dict], name: str) -> dict | None:
    """Return the row of a step."""
    return next((row for row in rows if row["step"] == name), None)


def previous_step(rows: list[dict], row: dict) -> dict | None:
    """Return the last row before ``row`` that has a kernel time and is not marked as slower."""
    before = rows[: rows.index(row)]
    return next((r for r in reversed(before) if "kernel_us" in r and not r.get("slower")), None)


def speedup(other: dict | None, row: dict) -> str | None:
    """Format how many times faster the kernel of ``row`` is than that of ``other``.

    Returns None if ``other`` is missing or ``row`` itself, or if one of the two has no kernel time.
    """
    if other is None or other is row or "kernel_us" not in other or "kernel_us" not in row:
        return None
    return format_ratio(other["kernel_us"]["median"] / row["kernel_us"]["median"])


def write(
    topic: str,
    rows: Iterable[dict],
    root: Path | str | None = None,
    *,
    results: Path | str | None = None,
    env: dict | None = None,
    diagnosis: dict[str, dict[str, float]] | None = None,
) -> Path:
    """Write a record and return its path, ``docs/results/<gpu>/<topic>.json`` (see ``written_to``).

    With ``MOE_NUMBA_ARCH=80`` the folder is ``<gpu>-sm80``, so that times of the paths for another GPU replace none.
    ``results`` replaces ``docs/results``. ``diagnosis`` holds times of kernels that are no steps, such as those of a
    step without one of its phases: ``{name: {label: microseconds}}``. Raises ``ValueError`` for invalid rows and
    without a GPU.
    """
    env = env or environment()
    if env["gpu"] == SIMULATOR:
        raise ValueError("records are not written without a GPU: the simulator measures no times")
    target = Path(results) if results is not None else written_to(root)
    functions, rows = functions_apart(rows)
    record = {"topic": topic, **env, "functions": functions, "rows": rows}
    if diagnosis:
        record["diagnosis"] = diagnosis
    if wrong := invalid(record):
        raise ValueError("; ".join(wrong))
    other = capability.requested()
    path = target / (folder(env["gpu"]) + ("-sm{}{}".format(*other) if other else "")) / f"{topic}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(record))
    return path


def functions_apart(rows: Iterable[dict]) -> tuple[dict[str, list[str]], list[dict]]:
    """Move the functions of the kernels out of rows; return ``{kernel: [function and hash]}``, and the rows."""
    functions: dict[str, set[str]] = {}
    found = []
    for row in rows:
        if "kernels" in row:
            kernels = [dict(kernel) for kernel in row["kernels"]]
            for kernel in kernels:
                functions.setdefault(kernel["name"], set()).update(kernel.pop("functions", ()))
            row = row | {"kernels": kernels}
        found.append(row)
    return {kernel: sorted(functions[kernel]) for kernel in sorted(functions)}, found


def launched_here() -> dict:
    """Return ``{"kernels", "functions"}`` of what this process has launched, for the metadata of a notebook."""
    functions, (about,) = functions_apart([{"kernels": describe(launched_kernels())}])
    return {**about, "functions": functions}


def read(topic: str, gpu: str = "h200", root: Path | str | None = None) -> dict:
    """Return the record of a topic; raise ``FileNotFoundError`` if there is none, which names those that there are."""
    folders = results(root)
    path = folders / gpu / f"{topic}.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    if path.parent.is_dir():
        missing = unknown("record", topic, [file.stem for file in path.parent.glob("*.json")])
    else:
        missing = unknown("GPU", gpu, [folder.name for folder in folders.iterdir() if folder.is_dir()])
    where = path.parent if path.parent.is_dir() else folders
    raise FileNotFoundError(f"{missing} in {where}; `python -m moe_numba bench` writes records on a GPU")


def peers_of(record: dict | None) -> list[str]:
    """Return the steps of other projects in a record, sorted."""
    steps = {row["step"] for row in record["rows"]} if record else set()
    return sorted(step.removeprefix("peer:") for step in steps if step.startswith("peer:"))


def carried_over(record: dict | None, out_of_reach: Callable[[dict], bool], env: dict) -> list[dict]:
    """Return the rows of an earlier record that this machine cannot measure again, with their commit and date.

    The result is empty unless GPU, driver and all versions are those of ``env``. Rows whose kernels have changed since
    lose the hashes of these.
    """
    if record is None or any(record[name] != env[name] for name in ("gpu", "driver", "versions")):
        return []
    when = {name: record[name] for name in ("commit", "date")}
    changed, found = changed_kernels(record), []
    for row in filter(out_of_reach, record["rows"]):
        row = {"measured": when, **row}
        kernels = row.pop("kernels", [])
        if kernels and not any(kernel["name"] in changed for kernel in kernels):
            row["kernels"] = [kernel | {"functions": record["functions"][kernel["name"]]} for kernel in kernels]
        found.append(row)
    return found


def edited(record: dict, launched: Iterable[Launched]) -> list[str]:
    """Return the functions of a notebook's cells, in kernels that were launched now, that are not those of a record."""
    found = set()
    for kernel in describe(launched):
        recorded = record.get("functions", {}).get(kernel["name"])
        functions = [function for function in kernel.get("functions", ()) if function.startswith(CELLS)]
        if recorded is not None:
            found |= {function.removeprefix(CELLS).split()[0] for function in functions if function not in recorded}
    return sorted(found)


def changed_kernels(record: dict) -> dict[str, list[str]]:
    """Return ``{kernel: [function]}`` of the functions in a record's kernels that the package no longer has like this.

    ``record`` may also be the metadata of an executed notebook. Kernels that were not hashed are left out.
    """
    found = {kernel: changed_functions(functions) for kernel, functions in record.get("functions", {}).items()}
    return {kernel: functions for kernel, functions in found.items() if functions}


def stale(record: dict) -> list[str]:
    """Describe which rows of a record were measured with other kernels than the present ones, a sentence each."""
    when = f"measured at commit {record['commit'][:7]}"
    if "functions" not in record:
        return [f"{when}, before kernels were hashed"]
    changed, found = changed_kernels(record), []
    rows = [row for row in record["rows"] if any(kernel["name"] in changed for kernel in row.get("kernels", ()))]
    if rows:
        count = f"{len(rows)} of {len(record['rows'])} rows"
        found.append(f"{count} were {when} with kernels that have changed since: {format_changes(changed)}")
    kept = [row for row in record["rows"] if "measured" in row and "kernels" not in row and _is_own(row)]
    if kept:
        commits = ", ".join(sorted({row["measured"]["commit"][:7] for row in kept}))
        found.append(f"{len(kept)} of {len(record['rows'])} rows were measured at commit {commits} with other kernels")
    return found


def format_changes(changed: dict[str, list[str]]) -> str:
    """Format what ``changed_kernels`` returns: "gate_kernel (make_select, load)"."""
    return ", ".join(f"{kernel} ({', '.join(functions)})" for kernel, functions in sorted(changed.items()))


def _is_own(row):
    return not row["step"].startswith(("peer:", "torch"))


def invalid(record: dict) -> list[str]:
    """List what is wrong with a record's format, a sentence each."""
    wrong = [f"the field {name!r} is missing" for name in FIELDS if name not in record]
    if wrong:
        return wrong
    if not record["rows"]:
        wrong.append("the record has no rows")
    for number, row in enumerate(record["rows"]):
        where = f"row {number} ({row.get('step')})"
        if not isinstance(row.get("step"), str):
            wrong.append(f"{where}: step must be a name")
        for name in ("config", "size"):
            if not isinstance(row.get(name), dict):
                wrong.append(f"{where}: {name} must be a dict")
        for kernel in row.get("kernels", ()):
            if kernel["name"] not in record.get("functions", {}) or not kernel.keys() <= {"name", "code", "ast"}:
                wrong.append(f"{where}: a kernel is name, code and ast, and has functions, unlike {kernel}")
        if "measured" in row and set(row["measured"]) != {"commit", "date"}:
            wrong.append(f"{where}: measured is a commit and a date, not {row['measured']}")
        times = [row[name] for name in ("kernel_us", "call_us") if name in row]
        if bool(times) + ("refused" in row) + ("not_run" in row) != 1:
            wrong.append(f"{where}: either a time, or refused and why, or not_run and why")
        for time in times:
            if set(time) != {"median", "p10", "p90"} or not 0 < time["p10"] <= time["median"] <= time["p90"]:
                wrong.append(f"{where}: a time is median, p10 and p90, in order and above zero, not {time}")
    return wrong


def times(stats: Stats | None) -> dict | None:
    """Return statistics as a row stores them: microseconds, rounded."""
    return stats and {name: round(getattr(stats, name), 3) for name in ("median", "p10", "p90")}


def dump(record: dict) -> str:
    """Format a record as the text of its file."""
    fields = []
    for name, value in record.items():
        if name == "rows":
            text = "[\n" + ",\n".join("    " + json.dumps(row, allow_nan=False) for row in value) + "\n  ]"
        elif name in ("functions", "kernels") and value:  # of a record, of fingerprints
            lines = (f"    {json.dumps(kernel)}: {json.dumps(about)}" for kernel, about in value.items())
            text = "{\n" + ",\n".join(lines) + "\n  }"
        else:
            text = textwrap.indent(json.dumps(value, indent=2), "  ").lstrip()
        fields.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"
