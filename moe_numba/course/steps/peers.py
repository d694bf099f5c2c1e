"""Other projects' kernels beside a lesson's: those of a folder that the environment variable ``MOE_NUMBA_PEERS`` names.

`bench.load_peers` reads the folder; `bench.topics.grouped_gemm.measure` says what its modules provide. Their rows in
the lesson's record are called "name: peer", like all that `Lesson.times` times, and have a ``version``.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from moe_numba.course.bench import drop_if_wrong, load_peers, records
from moe_numba.course.bench.topics.grouped_gemm.measure import peer_steps
from moe_numba.course.steps.lesson import Lesson
from moe_numba.course.steps.recorded import recorded_peers

VARIABLE = "MOE_NUMBA_PEERS"
_loaded = cache(load_peers)


class Timed(NamedTuple):
    """Kernels that were timed interleaved, now or in the run of the record.

    Attributes
    ----------
    us : dict
        Label -> median in microseconds; empty if the times are not known.
    versions : dict
        Name of another project's kernel -> its version; each is a label, too.
    """

    us: dict[str, float]
    versions: dict[str, str]

    def cell(self, label: str) -> str:
        """Return a label's time as a table shows it."""
        return records.format_us(self.us[label]) if label in self.us else "not timed"


def beside_peers(
    lesson: Lesson,
    name: str,
    time: Callable[[dict[str, list], Mapping[str, str]], Mapping[str, float]],
    scaling: str,
    problems: Sequence[SimpleNamespace],
    wrong: Callable[[torch.Tensor], str | None],
) -> Timed:
    """Time a lesson's kernels and those of the peers interleaved; where nothing is timed, take both from the record.

    Parameters
    ----------
    lesson : Lesson
    name : str
        Of the rows in the record, and in what is printed of a peer that is left out.
    time : callable
        ``time(calls, versions)`` times the lesson's kernels and these calls of peers by `Lesson.times`, which it passes
        ``versions``; it returns label -> microseconds, or {} if they are not known.
    scaling : str
    problems : sequence
        What ``plan_group_gemm(scaling, problem)`` takes.
    wrong : callable
        Returns what is wrong with an output of the first problem, or None. A peer whose output is wrong, or that fails,
        is left out, and the reason is printed.
    """
    folder = os.environ.get(VARIABLE)
    peers = _loaded(folder) if folder else []
    steps = peer_steps(peers, scaling, problems)
    for step_name, step in list(steps.items()):

        def find_fault(step=step):
            step(problems[0])
            return wrong(step.result(problems[0]))

        drop_if_wrong(steps, step_name, name, True, find_fault)
    versions = {peer.NAME: peer.VERSION for peer in peers if f"peer:{peer.NAME}" in steps}
    calls: dict[str, list[Any]] = {label: [partial(steps[f"peer:{label}"], p) for p in problems] for label in versions}
    if lesson.is_timed:
        return Timed(dict(time(calls, versions)), versions)
    us = dict(time({}, {}))
    for label, row in recorded_peers(lesson.topic, name, lesson.size, lesson.config, lesson.gpu).items() if us else ():
        us[label], versions[label] = row["kernel_us"]["median"], row["version"]
    return Timed(us, versions)


def about_peers(*found: Timed) -> str:
    """Return sentences for below a table: which kernel is the fastest, if it has one row, and the others' versions."""
    versions = {label: version for timed in found for label, version in timed.versions.items()}
    us, sentences = found[0].us if len(found) == 1 else {}, []
    if us:
        best = min(us, key=us.__getitem__)
        sentences.append(f"The fastest is {best}.")
    if versions:
        named = ", ".join(f"{label} {version}" for label, version in versions.items())
        sentences.append(f"Other projects' kernels, timed in the same run: {named}.")
    else:
        sentences.append("No other project's own kernels were timed in this run.")
    return " ".join(sentences)
