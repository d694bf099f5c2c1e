"""Generates what README.md and docs/*.md take from the table of topics, from records and from the simulator.

A block stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``.
"""

import re
from pathlib import Path

import jupytext

from moe_numba.course import bench
from moe_numba.course.bench import records
from moe_numba.course.bench.figures.tables import bold_best, markdown_table
from moe_numba.course.bench.records import format_us
from moe_numba.course.lessons.moe_layer import profile as layer_profile
from moe_numba.course.lessons.one_kernel import model as one_kernel
from moe_numba.course.pages import gpu_support, race
from moe_numba.course.pages.topics import BENCH_TOPICS, FIRST_EDITION, HEADLINES, TOPICS
from moe_numba.grouped_gemm.call import config_table

# Of the ten lessons that readers timed, with exercises; they took 0.7 to 1.5 times as long as this says.
MINUTES_PER_WORD = 0.03
MEASUREMENTS = "docs/measurements.md"  # has a block for each topic of `bench`


def blocks(gpu: str = "h200", root: Path | None = None) -> dict[str, dict[str, str]]:
    """Return the text of every generated block: ``{file: {block: text}}``, files relative to the repository.

    A topic without a record has no table.
    """
    found = {name: records.recorded(name, gpu, root) for name in BENCH_TOPICS}
    table_of = lambda name, record: bench.topic(name).readme_table(record) if record else "Not measured yet."
    tables = {name: table_of(name, record) for name, record in found.items()}
    # The first of the records that the table of tile configurations is made of.
    tiles = records.recorded("grouped_gemm_tiles", config_table.GPUS[0], root) if config_table.GPUS else None
    tables["grouped_gemm_tiles"] = table_of("grouped_gemm_tiles", tiles)
    return {
        "README.md": {"headline": headline(gpu, root, front=True), "notebooks": _notebooks(root)},
        "docs/records.md": {"records": _records()},
        "docs/gate_and_alignment.md": {"gate_align": tables.pop("gate_align")},
        "docs/gpus.md": {"gpus": _gpus()},
        "docs/layer_profile.md": {"parts": layer_profile.profile(found["moe_layer"]) if found["moe_layer"] else ""},
        "docs/layer_on_64_gpus.md": {
            "measured": layer_profile.model_beside_measurements(ranks) if (ranks := found["moe_layer_ranks"]) else "",
            "model": layer_profile.model_of_64_gpus(),
        },
        "docs/one_kernel.md": {
            "times": one_kernel.text() if found["moe_layer_ranks"] else "",
            "balance": markdown_table(("tokens on the GPU", "round robin", "when ready"), one_kernel.balances(), 0),
            "measured": one_kernel.measured(found["moe_layer_ranks"]) if found["moe_layer_ranks"] else "",
        },
        "docs/linked_cuda_cpp.md": {"times": _linked_cuda_cpp(gpu, root)},
        MEASUREMENTS: {"headline": headline(gpu, root), "bench": _bench_commands(), "peers": _peers(found), **tables},
    }


def regenerate(check: bool = False, gpu: str = "h200", root: Path | None = None) -> list[str]:
    """Rewrite the generated blocks and the picture that have changed, or with ``check`` only name them.

    Returns
    -------
    list of str
        ``"docs/measurements.md: gate"`` for each block that was out of date.

    Raises
    ------
    ValueError
        A file lacks the markers of a block.
    """
    changed = []
    for name, parts in blocks(gpu, root).items():
        path = records.repository(root) / name
        text = path.read_text()
        for block, content in parts.items():
            new = replace_block(text, block, content, name)
            if new != text:
                changed.append(f"{name}: {block}")
            text = new
        if not check:
            path.write_text(text)
    path, picture = records.repository(root) / race.PICTURE, race.picture()
    if not path.is_file() or path.read_text() != picture:
        changed.append(race.PICTURE)
        if not check:
            path.write_text(picture)
    return changed


def replace_block(text: str, block: str, content: str, name: str = "README.md") -> str:
    """Return ``text`` with ``content`` between the two markers of a block.

    Raises
    ------
    ValueError
        The text does not hold each marker exactly once, in this order.
    """
    begin, end = f"<!-- {block}:begin -->", f"<!-- {block}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{name} must contain {begin} and, after it, {end}, once each")
    content = content.strip("\n")  # not blanks: a block may begin with an indented line
    return f"{text[: text.index(begin)]}{begin}\n{content}\n{text[text.index(end) :]}"


def _notebooks(root):
    lines = ["| notebook | what it builds | starts from | minutes |", "|---|---|---|---:|"]
    for topic in TOPICS:
        link = f"[{topic.notebook}](notebooks/{topic.notebook}.ipynb)"
        lines.append(f"| {link} | {topic.title} | {topic.source} | {_minutes(topic.notebook, root)} |")
    return "\n".join(lines)


def _minutes(notebook, root):
    """Estimate how long a reader takes for a lesson and its exercises, from the length of its prose."""
    source = (records.repository(root) / "notebooks" / f"{notebook}.py").read_text(encoding="utf-8")
    prose = [cell.source for cell in jupytext.reads(source, fmt="py:percent").cells if cell.cell_type == "markdown"]
    return 10 * round(MINUTES_PER_WORD * len(re.findall(r"\w+", " ".join(prose))) / 10)


def _gpus():
    lines = ["| compute capability | GPUs |", "|---|---|"]
    lines += ["| {}.{} | {} |".format(*arch, gpus) for arch, gpus in gpu_support.ARCHITECTURES.items()]
    for title, how in (("function", gpu_support.functions), ("notebook", gpu_support.notebooks)):
        lines += ["", f"| {title} | how it runs |", "|---|---|"]
        lines += [f"| {names} | {text} |" for names, text in gpu_support.by_name(how).items()]
    return "\n".join(lines)


def _bench_commands():
    width = max(map(len, BENCH_TOPICS))
    commands = [f"    python -m moe_numba bench {name:<{width}}  # {text}" for name, text in BENCH_TOPICS.items()]
    return "\n" + "\n".join(commands)


def _peers(found):
    """Return the versions of other projects' kernels, and the records, {topic: record}, that have them."""
    versions: dict[tuple[str, str], list[str]] = {}
    for topic, record in found.items():
        for step in records.peers(record) if record else ():
            version = records.find(record, step=step).get("version", "")
            versions.setdefault((step.removeprefix("peer:"), version), []).append(f"`{topic}`")
    lines = ["| kernel | version | measured with |", "|---|---|---|"]
    lines += [f"| {name} | {version} | {', '.join(topics)} |" for (name, version), topics in sorted(versions.items())]
    return "\n".join(lines)


def _records():
    lines = ["| record | measured by |", "|---|---|"]
    lines += [f"| `{name}` | `python -m moe_numba bench {name}`: {text} |" for name, text in BENCH_TOPICS.items()]
    lines += [f"| `{name}` | notebook `{topic.notebook}` |" for topic in TOPICS for name in topic.records]
    lines += [f"| `{name}` | the first edition of notebook `{notebook}` |" for name, notebook in FIRST_EDITION.items()]
    return "\n".join(lines)


def _linked_cuda_cpp(gpu, root):
    record = records.recorded("hopper_ladder", gpu, root)
    row = record and records.find(record, step="linked CUDA C++")
    if not row:
        return ""
    names = "intrinsics", "linked CUDA C++, launched by Numba"
    lines = ["| kernel | us |", "|---|---:|"]
    return "\n".join(lines + [f"| {name} | {format_us(us)} |" for name, us in zip(names, row["compared_us"])])


def headline(gpu: str = "h200", root: Path | None = None, front: bool = False) -> str:
    """Return the table of the package's kernels beside the fastest other implementation, in Markdown.

    With ``front`` only the lines that the README has.
    """
    lines = ["| kernel time, us | moe_numba | best other kernel measured | times as fast |", "|---|---:|---:|---:|"]
    for line in HEADLINES:
        if front and not line.front:
            continue
        record = records.read(line.record, gpu, root)
        steps = [line.ours, *records.peers(record), *line.others]
        rows = {step: records.find(record, step=step, **line.where) for step in steps}
        times = {step: row["kernel_us"]["median"] for step, row in rows.items() if row and "kernel_us" in row}
        ours = times.pop(line.ours)
        best = min(times, key=times.get)
        name = line.notes.get(best, best.removeprefix("peer:"))
        cells = bold_best([format_us(ours), format_us(times[best])])
        lines.append(f"| {line.label} | {cells[0]} | {cells[1]} ({name}) | {times[best] / ours:.2f} |")
    return "\n".join(lines)
