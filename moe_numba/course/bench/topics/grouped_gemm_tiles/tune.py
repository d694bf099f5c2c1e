"""Candidates for the tile configurations of the grouped GEMM, and the table of those that the package uses.

    python -m moe_numba bench grouped_gemm_tiles [--seconds 240]                # on a GPU: the record and the table
    python -m moe_numba.course.bench.topics.grouped_gemm_tiles.tune  # the table again, from the records

A row of the record has the times of the best candidates, ``tiles``, of one problem and routing. A problem's
configuration is chosen for all routings, because the host does not know how rows are distributed: the time of the
table's configuration, relative to the best candidate's, is near the least possible in the worst of the routings that
spread rows over the groups, within ``TOLERANCE``. Of such candidates those are left that are the fastest when all rows
are in one group, and of these the one that serves the most problems, so that noise causes no additional kernels, which
take seconds to compile. Rows of a problem without that routing leave those within ``NOISE`` that have the most rows per
tile, which lose least where rows are skewed.
"""

import argparse
import itertools
from pathlib import Path
from typing import NamedTuple

from moe_numba.course.bench import records
from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig, BlockScaledLayout
from moe_numba.grouped_gemm.call import config_table, heuristics
from moe_numba.grouped_gemm.call.heuristics import kind_of
from moe_numba.grouped_gemm.w4.config import CONFIGS as MXFP4_CONFIGS
from moe_numba.grouped_gemm.w4.config import W4Config
from moe_numba.grouped_gemm.w4.layout import W4Layout
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, SharedMemoryLayout, select_config
from moe_numba.runtime.device import H200

TOPIC = "grouped_gemm_tiles"
KINDS = ("tensor", "block", "none", "mxfp4", "tensor, silu", "block, silu")
NOISE = 1.005
TOLERANCE = 1.02  # of the least time, to be faster when all rows are in one group
BAND_ROWS = 3072
MAX_STAGES = 12  # enough to hide the latency of a load
TILES = [  # subtile_m, m_subtiles, mma_n
    (16, 1, (16,)),
    (32, 1, (32, 16)),
    (48, 1, (48, 32)),
    (64, 1, (64, 32)),
    (96, 1, (96, 64)),
    (128, 1, (128, 96, 64)),
    # The host does not know the largest group: tiles for many rows that also have a small wgmma, for few.
    (16, 1, (16, 8)),
    (64, 1, (64, 32, 16)),
    (96, 1, (96, 64, 32, 16)),
    (128, 1, (128, 96, 64, 32)),
    (96, 2, (96, 64)),
    (128, 2, (128, 96)),
    (144, 2, (144, 136, 128, 120, 104, 88, 64, 32)),
]
SILU_TILES = [
    *TILES[:5],
    *TILES[7:9],
    (112, 1, (112, 104, 96, 88)),
    (128, 1, (128, 120, 112, 104)),
    (144, 1, (144, 136, 128, 120)),
]
# With four warpgroups, several sizes of wgmma and overlapped decoding, ptxas serialises wgmma (C7512), or registers are
# spilled, as with (32, 24, 16, 8). Serialised wgmmas may still be the fastest, as with (64, 48, 32, 16).
MXFP4_TILES_OF_FOUR = [
    dict(subtile_m=8, mma_n=(8,), box_rows=8),
    dict(subtile_m=16, mma_n=(16, 8), box_rows=8),
    dict(subtile_m=24, mma_n=(24, 16, 8), box_rows=8),
    dict(subtile_m=32, mma_n=(32, 16, 8), box_rows=8),
    dict(subtile_m=64, mma_n=(64, 32, 16, 8), box_rows=8),
    dict(subtile_m=64, mma_n=(64, 48, 32, 16), box_rows=16),
    dict(subtile_m=64, mma_n=(64, 48, 32, 16), box_rows=16, overlap=False),
]
MXFP4_TILES = [
    dict(subtile_m=32, mma_n=(32, 24, 16, 8), box_rows=8),
    dict(subtile_m=64, mma_n=(64, 48, 32, 16), box_rows=16),
    dict(subtile_m=96, mma_n=(96, 80, 64, 48), box_rows=16),
    dict(subtile_m=128, mma_n=(128, 96, 64, 32), box_rows=32),
    dict(subtile_m=256, mma_n=(256, 208, 160, 112, 56), box_rows=32, stage_tiles=1, overlap=False),
]
# With block scales two subtiles have too many scales for the registers of a thread.
TILES_OF_KIND = {kind: SILU_TILES if "silu" in kind else TILES[:10] if kind == "block" else TILES for kind in KINDS}


class Problem(NamedTuple):
    """What a configuration is chosen for."""

    kind: str
    n: int  # rows of weight
    k: int
    groups: int
    average: int  # rows per group

    @property
    def scaling(self) -> str:
        return self.kind.partition(",")[0]

    @property
    def silu_and_mul(self) -> bool:
        return self.kind == kind_of(self.scaling, True)


# Candidates


def candidates(kind):
    """Return {name: configuration} of a kind of grouped GEMM, with as many pipeline stages as fit, and the rules'."""
    scaling, _, activation = kind.partition(", ")
    silu_and_mul = activation == "silu"
    if kind == "mxfp4":
        return {name_of(config): config for config in mxfp4_candidates()}
    base = GemmConfig(dtype="bf16" if scaling == "none" else "e4m3", scaling=scaling, silu_and_mul=silu_and_mul)
    found = [select_config(scaling, "lengths", average, silu_and_mul) for average in range(1, 256)]
    found += block_scaled_candidates(silu_and_mul) if scaling == "block" else []
    for (subtile_m, m_subtiles, mma_n), cluster_size in itertools.product(TILES_OF_KIND[kind], (1, 2)):
        config = base._replace(subtile_m=subtile_m, m_subtiles=m_subtiles, mma_n=mma_n, cluster_size=cluster_size)
        found.append(with_most_stages(config, SharedMemoryLayout))
        if not silu_and_mul and (subtile_m, cluster_size) == (64, 2):
            found.append(config._replace(stages=8))  # one less than fit
        if m_subtiles == 2 and cluster_size == 1:
            found.append(with_most_stages(config._replace(band_rows=BAND_ROWS), SharedMemoryLayout))
    return {name_of(config): config for config in found if config}


def block_scaled_candidates(silu_and_mul):
    """Return the configurations of the block-scaled kernel, with rows of x as wgmma's rows."""
    found = []
    for block_n in (256,) if silu_and_mul else (128, 192, 256):
        for keep_weight, cluster_size in itertools.product((False, True), (1, 2)):
            config = BlockScaledConfig(
                block_n=block_n, silu_and_mul=silu_and_mul, keep_weight=keep_weight, cluster_size=cluster_size
            )
            found.append(with_most_stages(config, BlockScaledLayout))
    widest = found[-2:]  # which keep weights in L2, alone and in pairs
    found += [config._replace(early_test=True) for config in widest]
    alone = [config for config in found if config.keep_weight and config.cluster_size == 1]
    return [*found, *(with_most_stages(config._replace(balanced=True), BlockScaledLayout) for config in alone)]


def mxfp4_candidates():
    """Return the configurations of the kernel for MXFP4 weights."""
    found = [W4Config(**tile) for _, tile in MXFP4_CONFIGS]
    found += [W4Config(**tile, stages=stages) for tile, stages in zip(MXFP4_TILES, (11, 8))]
    configs = [W4Config(**tile) for tile in MXFP4_TILES]
    configs += [W4Config(**tile, warpgroups=4) for tile in MXFP4_TILES_OF_FOUR]
    return found + [with_most_stages(config, W4Layout) for config in configs]


def with_most_stages(config, layout):
    """Return the configuration with as many stages as fit into shared memory, or None."""
    by_stages = [config._replace(stages=stages) for stages in range(3, MAX_STAGES + 1)]
    fitting = [config for config in by_stages if layout(config).bytes <= H200.shared_bytes]
    return fitting[-1] if fitting else None


def name_of(config):
    """Return a name that tells a configuration from all other candidates of its kind."""
    if isinstance(config, BlockScaledConfig):
        name = f"rows of x by {config.block_n}" + ", weights kept in L2" * config.keep_weight
        name += ", early test" * config.early_test + ", balanced" * config.balanced
    else:
        name = "/".join(map(str, config.mma_n)) + f" x {config.m_subtiles}" * (config.m_subtiles > 1)
        name += f", bands of {band_rows} rows" if (band_rows := getattr(config, "band_rows", 0)) else ""
    if isinstance(config, W4Config):
        name += f", {config.warpgroups} warpgroups" + ", no overlap" * (config.warpgroups == 4 and not config.overlap)
    return name + ", cluster" * (config.cluster_size > 1) + f", {config.stages} stages"


# Choice


def problem_of(row):
    """Return the problem of a row of the record."""
    config = row["config"]
    kind, groups = kind_of(config["scaling"], config.get("silu_and_mul", False)), config["num_groups"]
    return Problem(kind, config["n"], config["k"], groups, row["size"]["rows"] // groups)


def ratios_of(rows):
    """Return {problem: {name: ratio}}: a candidate's time relative to the best one's, in its worst routing.

    Routings are those that spread rows over the groups. A candidate that is not measured with all of them has no ratio.
    """
    tiles: dict = {}
    for row in rows:
        if row["config"]["routing"] != "one":
            tiles.setdefault(problem_of(row), []).append(row["tiles"])
    found = {}
    for problem, by_routing in tiles.items():
        names = sorted(set.intersection(*map(set, by_routing)))
        found[problem] = {name: max(times[name] / min(times.values()) for times in by_routing) for name in names}
    return found


def has_rule(problem):
    """Return whether a rule of ``wgmma/config.py`` chooses the configuration, whatever was measured.

    It does for a single group, and in bfloat16 for at most one row per group, of which the problems here have exactly
    one, but layers mostly less.
    """
    return problem.groups == 1 or (problem.kind == "none" and problem.average <= 1)


def choose(rows):
    """Return {problem: name} of the chosen configurations; see the module. Those that `has_rule` have none.

    What an earlier version measured and is no candidate any more is not chosen.
    """
    chosen: dict[Problem, str] = {}
    in_one_group = {problem_of(row): row["tiles"] for row in rows if row["config"]["routing"] == "one"}
    for kind in KINDS:
        near, configs = {}, candidates(kind)
        for problem, ratios in ratios_of(rows).items():
            ratios = {name: ratio for name, ratio in ratios.items() if name in configs}
            if problem.kind == kind and not has_rule(problem) and ratios:
                times = in_one_group.get(problem)
                limit = (TOLERANCE if times else NOISE) * min(ratios.values())
                # What is least among these decides between them:
                second = {
                    n: times[n] if times else -configs[n].block_m for n, ratio in ratios.items() if ratio <= limit
                }
                least = min(second.values()) * (TOLERANCE if times else 1)
                near[problem] = {name: ratios[name] for name, cost in second.items() if cost <= least}
        while near:
            served: dict[str, list[float]] = {}
            for name, ratio in itertools.chain(*(found.items() for found in near.values())):
                served.setdefault(name, []).append(ratio)
            name = min(served, key=lambda name: (-len(served[name]), sum(served[name]), name))
            chosen |= {problem: name for problem, found in near.items() if name in found}
            near = {problem: found for problem, found in near.items() if name not in found}
    return chosen


def excess(rows, chosen=None):
    """Return {problem: ratio}: the ratio (see `ratios_of`) of the chosen configuration to the least of all candidates.

    Problems that `has_rule` are left out, as in the table.

    Parameters
    ----------
    rows : list of dict
        Rows of the record.
    chosen : callable, optional
        ``chosen(problem)`` returns a name; by default that of the package's table, which must have the problem.
    """
    found = {}
    for problem, ratios in ratios_of(rows).items():
        if not has_rule(problem):
            name = chosen(problem) if chosen else name_of(heuristics.measured_config(*problem))
            found[problem] = ratios[name] / min(ratios.values())
    return found


# Table


def first_rows(by_gpu):
    """Return the rows of several records, {folder: rows}; of each problem those of the first record that has it."""
    found, known = [], set()
    for rows in by_gpu.values():
        own = {problem_of(row) for row in rows} - known
        found += [row for row in rows if problem_of(row) in own]
        known |= own
    return found


def table_text(by_gpu):
    """Return the text of ``config_table.py`` for several records, {folder of docs/results: rows}; see `first_rows`."""
    chosen = choose(first_rows(by_gpu))
    lines = [
        f'"""Tile configurations by problem, from the records {TOPIC}.json of docs/results/.',
        "",
        f"Of each problem, the first record that has it counts: {', '.join(by_gpu)}.",
        "Generated by `course/bench/topics/grouped_gemm_tiles/tune.py`: do not edit. See `heuristics.py`.",
        '"""',
        "# fmt: off",
        "# ruff: noqa: E501, F401",
        "",
        "from typing import Any",
        "",
        "from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig",
        "from moe_numba.grouped_gemm.w4.config import W4Config",
        "from moe_numba.grouped_gemm.wgmma.config import GemmConfig",
        "",
        f"GPUS: tuple[str, ...] = {tuple(by_gpu)}",
        "",
        "CONFIGS: dict[str, tuple[Any, ...]] = {",
    ]
    names = {kind: sorted({name for p, name in chosen.items() if p.kind == kind}) for kind in KINDS}
    for kind in filter(names.get, KINDS):
        configs = candidates(kind)
        lines += [f'    "{kind}": (', *(f"        {source_of(configs[name])}," for name in names[kind]), "    ),"]
    lines += ["}", "", "# By kind and by (n, k, groups): {rows per group: index of the configuration}."]
    lines.append("TABLE: dict[str, dict[tuple[int, int, int], dict[int, int]]] = {")
    for kind in filter(names.get, KINDS):
        lines.append(f'    "{kind}": {{')
        problems = sorted(problem for problem in chosen if problem.kind == kind)
        for shape, found in itertools.groupby(problems, key=lambda problem: problem[1:4]):
            lines.append(f"        {shape}: { ({p.average: names[kind].index(chosen[p]) for p in found}) },")
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def source_of(config):
    """Return the expression that makes a configuration."""
    changed = {name: value for name, value in config._asdict().items() if value != config._field_defaults[name]}
    return f"{type(config).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def recorded_rows(gpus=config_table.GPUS):
    """Return {folder: rows} of the records that the table is made of."""
    return {gpu: records.read(TOPIC, gpu)["rows"] for gpu in gpus}


def write_table(by_gpu, root=None) -> Path:
    """Write ``config_table.py`` and return its path."""
    path = records.repository(root) / "moe_numba" / "grouped_gemm" / "call" / "config_table.py"
    path.write_text(table_text(by_gpu))
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", nargs="+", default=config_table.GPUS, help="folders of docs/results, the first counts")
    by_gpu = recorded_rows(parser.parse_args().gpu)
    rows = first_rows(by_gpu)
    chosen = choose(rows)
    worst = max(excess(rows, chosen.get).values())
    print(f"{len(chosen)} problems, at most {100 * (worst - 1):.1f} % slower than the best: {write_table(by_gpu)}")


if __name__ == "__main__":
    main()
