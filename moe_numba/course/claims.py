"""What the five articles claim, and what was measured here: the tables of notebooks/appendix_claims.

The claims are data (`articles.claims`), and `verdicts.verdict` judges them. Claims about times name entries of
``LOOKUPS``, which say where a record holds a number.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from IPython.display import Markdown

from moe_numba.course.articles.claims import align, deepep, gate, hpc_ops, shared_experts
from moe_numba.course.bench import records
from moe_numba.course.verdicts import NOT_MEASURED, VERDICTS, Claim, Found, verdict

ARTICLES = {article.name: article for article in (m.ARTICLE for m in (gate, align, shared_experts, deepep, hpc_ops))}


class Row(NamedTuple):
    """A number in a row of a record: the median if it is a time, the number of entries if it is a list."""

    record: str
    step: str
    field: str = "kernel_us"  # a path, such as "by_tile.64.main"
    where: Mapping[str, Any] = {}  # config, size and dtype of the row, if steps repeat

    def find(self, record: dict) -> float | None:
        value = records.find(record, step=self.step, **self.where)
        for key in self.field.split("."):
            value = (value or {}).get(key)
        if isinstance(value, list):
            return len(value)
        return value.get("median") if isinstance(value, dict) else value

    @property
    def run(self) -> tuple:
        """What was measured interleaved has the same run.

        Kernel times of a size are interleaved, and so are the phases of a step. Other fields of a row are times that
        the notebooks measured step by step.
        """
        if self.field == "kernel_us":
            return self.record, self.field, str(self.where)
        field = "phases_us" if self.field.startswith("phases_us.") else self.field
        return self.record, self.step, field, str(self.where)


class Most(NamedTuple):
    """The largest value of a key of the config among a step's rows with a time."""

    record: str
    step: str
    key: str

    def find(self, record: dict) -> int | None:
        rows = records.select(record, step=self.step)
        return max((row["config"][self.key] for row in rows if "kernel_us" in row), default=None)

    @property
    def run(self) -> tuple:
        return self.record, self.step, self.key


class Diagnosis(NamedTuple):
    """A time that `Ladder.times(name, {label: ...})` has recorded."""

    record: str
    name: str
    label: str

    def find(self, record: dict) -> float | None:
        return record.get("diagnosis", {}).get(self.name, {}).get(self.label)

    @property
    def run(self) -> tuple:
        """Times of one diagnosis are interleaved."""
        return self.record, self.name


def _gate(step, tokens):
    where = {"size": {"tokens": tokens}, "dtype": "float32", "config": {"num_experts": 256}}
    return Row("gate", step, where=where)


def _layer(step, tokens, dtype="float8_e4m3fn"):
    where = {"size": {"tokens": tokens}, "dtype": dtype, "config": {"model": "tp8"}}
    return Row("shared_experts", step, where=where)


GATE_TOKENS = (1, 64, 256, 1024, 4096, 16384, 65536)
ALIGN_SIZES = {"4096 tokens": "kernel_us", "64 tokens": "few_us", "1 token": "one_us"}  # of the alignment's ladder
GEMM_SIZES = {"2048 rows": "kernel_us", "32 rows": "few_us", "8192 rows": "many_us"}  # of the grouped GEMM's ladder
ALIGN_STEPS = {
    "0x1": "0x1 baseline",
    "0x2": "0x2 padding inside",
    "0x3": "0x3 binary search",  # the last of its steps: plain counters, Blelloch's scan, the search
    "0x4": "0x4 two-level scan",  # SGLang's kernel: both of the article's listings, one after the other
    "0x4, one scan": "0x4, one pass",  # the article's second listing, "the complete flow"
    "0x4, filling first": "0x4, filling first",  # as section 0x5 shows it
    "0x5": "0x5 parallel fill",
}

# name: where the number is, or None as long as no record has it.
LOOKUPS: dict[str, Row | Most | Diagnosis | None] = {
    # 01_gate
    "gate: kernels of torch.compile": Row("gate_ladder", "torch.compile", "timeline"),
    "gate: first call of torch.compile": Row("gate_ladder", "torch.compile", "compile_s"),
    **{f"gate: torch.compile, {tokens}": _gate("torch.compile", tokens) for tokens in GATE_TOKENS},
    **{f"gate: moe_fused_gate, {tokens}": _gate("peer:sglang-aot", tokens) for tokens in GATE_TOKENS},
    # 02_align
    **{
        f"{name}, {size}": Row("align_ladder", step, at)
        for name, step in ALIGN_STEPS.items()
        for size, at in ALIGN_SIZES.items()
    },
    **{
        f"0x1: {part}": Row("align_ladder", "0x1 baseline", f"phases_us.{phase}")
        for part, phase in {
            "fill": "fill",
            "counting": "count",
            "serial scan": "scan",
            "expert_ids": "expert_ids",
            "sort kernel": "sort",
        }.items()
    },
    "0x1: counting phase": Diagnosis("align_ladder", "counting", "random ids"),
    "0x1: counting phase without atomics": Diagnosis("align_ladder", "counting", "no atomics"),
    "sort kernel": Diagnosis("align_ladder", "sort kernel", "as it is"),
    "sort kernel with loads instead of atomics": Diagnosis(
        "align_ladder", "sort kernel", "a load instead of the atomic"
    ),
    **{
        f"a chain of {links} shuffles": Diagnosis("align_ladder", "chains", f"a shuffle x {links}")
        for links in (1024, 2048)
    },
    "0x3: search for expert_ids, uneven": Diagnosis("align_ladder", "skewed ids", "binary search"),
    "0x3: loop over each expert's blocks instead, uneven": Diagnosis(
        "align_ladder", "skewed ids", "a thread per expert"
    ),
    # Phases are cut off after their end, so the last one is the whole main kernel; 0x5's is launched without CTA 1.
    "0x4, filling first: main kernel": Diagnosis("align_ladder", "phases of 0x4, filling first", "expert_ids"),
    "0x5: CTA 0 of the main kernel": Diagnosis("align_ladder", "phases of 0x5 parallel fill", "expert_ids"),
    "fill with 16-byte stores": Diagnosis("align_ladder", "fills", "16-byte stores"),
    "fill with 4-byte stores": Diagnosis("align_ladder", "fills", "4-byte stores"),
    "small kernel of 0x4": Row("align_small_ladder", "0x2 small"),  # 0x3 and 0x4 did not change it
    "small kernel of 0x5": Row("align_small_ladder", "0x5 small"),
    **{
        f"small kernel or two launches: {label}": Diagnosis("align_small_ladder", "small kernel or two launches", label)
        for label in ("main and sort kernel of 0x5", "small kernel of 0x5")
    },
    "serial fill, old length": Diagnosis("align_ladder", "buffer lengths", "filling first, old length"),
    "serial fill, new length": Diagnosis("align_ladder", "buffer lengths", "filling first, new length"),
    "parallel fill, new length": Diagnosis("align_ladder", "buffer lengths", "a second CTA fills, new length"),
    "SGLang's alignment: most experts": Most("align", "peer:sglang-aot", "num_experts"),
    # 04_shared_experts
    **{
        f"layer, {variant}, {dtype}, {tokens}": _layer(f"layer: {variant}", tokens, dtype)
        for variant in ("separate", "1 shared", "8 replicas")
        for dtype in ("float8_e4m3fn", "bfloat16")
        for tokens in (1, 8, 64, 256, 1024, 4096)
    },
    **{
        f"GEMMs, {variant}, {tokens}": _layer(f"GEMMs: {variant}", tokens)
        for variant in ("1 shared", "8 replicas")
        for tokens in (64, 1024, 4096)
    },
    **{
        f"{step}, 64": Row("shared_experts", step, where={"size": {"tokens": 64}, "config": {"num_expert_group": 8}})
        for step in ("gate, then torch", "gate, column inside")
    },
    # 06_grouped_gemm
    **{
        f"{step}, {size}": Row("grouped_gemm_ladder", step, at)
        for step in (
            "torch",
            "padding, one tensor map",
            "tensor map per group",
            "vertical scheduler",
            "one tensor map for X",
        )
        for size, at in GEMM_SIZES.items()
    },
    **{
        f"kTileM {tile}, {size}": Row("grouped_gemm_ladder", "vertical scheduler", f"by_tile.{tile}.{key}")
        for tile in (8, 16, 32, 48, 64, 96, 128)
        for size, key in zip(GEMM_SIZES, ("main", "few", "many"))
    },
    "kTileM by the average, 2048 rows": Row("grouped_gemm_ladder", "kTileM by the average"),
    "16 tokens, not transposed": Row("grouped_gemm_dense_ladder", "warp specialisation", "sixteen_us"),
    "16 tokens, transposed": Row("grouped_gemm_dense_ladder", "transposed MMA", "sixteen_us"),
    "hpc-ops": None,
    # 07_dispatch_layout
    "IPC handle": Row("dispatch_layout_ladder", "final", "ipc.handle_bytes"),
    **{
        f"{step}, {size}": Row("dispatch_layout_ladder", step, at)
        for step in ("private counters", "the same with atomics")
        for size, at in ALIGN_SIZES.items()
    },
    # 08_ring_buffer_dispatch
    "dispatch with a chunk of 1": None,
    "dispatch with the default chunk": Row("ring_buffer_dispatch_ladder", "DeepEP's ring"),
}


class Judged(NamedTuple):
    """A claim and what came of it."""

    claim: Claim
    found: Found | None
    verdict: str
    missing: tuple[str, ...]  # lookups that found nothing
    sources: tuple[str, ...]  # the records of the measurement


def find(name: str, read: Callable[[str], dict | None] = records.recorded) -> float | None:
    """Return the number that an entry of ``LOOKUPS`` names, or None; ``read`` returns a record or None."""
    entry = LOOKUPS[name]
    record = entry and read(entry.record)
    return entry.find(record) if record else None


def are_interleaved(names: Iterable[str]) -> bool:
    """Return whether each of these entries of ``LOOKUPS`` was measured interleaved with another one of them."""
    runs = Counter(LOOKUPS[name].run for name in names)
    return all(count > 1 for count in runs.values())


def judge(claim: Claim, read: Callable[[str], dict | None] = records.recorded) -> Judged:
    """Measure or check a claim and compute its verdict."""
    values = {name: find(name, read) for name in claim.lookups}
    missing = tuple(name for name, value in values.items() if value is None)
    found = None if missing or claim.measure is None else claim.measure(*values.values())
    sources = tuple(dict.fromkeys(LOOKUPS[name].record for name in claim.lookups if LOOKUPS[name]))
    return Judged(claim, found, verdict(claim, found), missing, sources)


def contents() -> Markdown:
    """Return the five articles as a table."""
    lines = ["| | article | about | notebooks | claims |", "|---|---|---|---|---:|"]
    for article in ARTICLES.values():
        notebooks = ", ".join(f"[{name[:2]}]({name}.ipynb)" for name in article.notebooks)
        title = f"[{article.title}]({article.link})" if article.link else article.title
        about = f"[{article.about}]({article.code})"
        lines.append(f"| {article.name} | {title} | {about} | {notebooks} | {len(article.claims)} |")
    return Markdown("\n".join(lines))


def measured() -> Markdown:
    """Return the records that the tables use, with GPU, date and commit, as a table."""
    lines = ["| record | GPU | date | commit | its code has changed since |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(entry.record for entry in LOOKUPS.values() if entry):
        if record := records.recorded(name):
            about = record["gpu"], record["date"][:10], record["commit"][:7]
            changed = "yes" if records.has_changed(record) else "no"
            lines.append(f"| `{name}` | {' | '.join(about)} | {changed} |")
    return Markdown("\n".join(lines))


def table(name: str, read: Callable[[str], dict | None] = records.recorded) -> Markdown:
    """Return an article's claims and their verdicts as a table."""
    lines = ["| the article says | decided by | found here | like for like | verdict |", "|---|---|---|---|---|"]
    return Markdown("\n".join([*lines, *(row(judge(claim, read)) for claim in ARTICLES[name].claims)]))


def row(judged: Judged) -> str:
    """Return a claim's row of the table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(judged)) + " |"


def _cells(judged):
    claim = judged.claim
    said, decided = f'"{claim.quote}" ({claim.section})', f"{claim.quantity}: {claim.threshold}"
    if judged.found is None:
        needs = claim.needs or "an entry of the record for " + ", ".join(f'"{name}"' for name in judged.missing)
        return said, decided, f"nothing; it needs {needs}", "", f"**{NOT_MEASURED}**"
    found = judged.found.text + (f" (`{'`, `'.join(judged.sources)}`)" if judged.sources else "")
    like = claim.setup.value + (f": {claim.differs}" if claim.differs else "")
    return said, decided, found, like, f"**{judged.verdict}**"


def counts(read: Callable[[str], dict | None] = records.recorded) -> dict[str, Counter]:
    """Count the verdicts of each article: ``{name: {verdict: number}}``."""
    return {name: Counter(judge(claim, read).verdict for claim in article.claims) for name, article in ARTICLES.items()}


def summary(read: Callable[[str], dict | None] = records.recorded) -> Markdown:
    """Return the numbers of verdicts as a table."""
    found = counts(read)
    lines = ["| verdict | " + " | ".join(found) + " | all |", "|---|" + "---:|" * (len(found) + 1)]
    for name in VERDICTS:
        numbers = [counter[name] for counter in found.values()]
        lines.append(f"| {name} | " + " | ".join(map(str, [*numbers, sum(numbers)])) + " |")
    numbers = [counter.total() for counter in found.values()]
    return Markdown("\n".join([*lines, "| all | " + " | ".join(map(str, [*numbers, sum(numbers)])) + " |"]))
