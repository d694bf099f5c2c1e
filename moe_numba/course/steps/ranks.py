"""The steps of a lesson between ranks: kernels of several ranks run together, and the slowest rank's time counts.

A version is timed by what ``Run.timed(version)`` returns: ``make(transport)``, a context manager that a rank enters. It
allocates what the rank needs and yields ``step()``, which launches once (see `bench.timing.multigpu`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.timing import Stats
from moe_numba.course.bench.timing.multigpu import can_time, outputs_of, rank_times
from moe_numba.course.steps.lesson import Lesson, Run
from moe_numba.expert_parallel.ranks.local_group import LocalGroup


class RankLesson(Lesson):
    """A `Lesson` whose versions run on several ranks.

    Where each rank has a GPU of its own, versions are timed. Ranks that share a GPU, or the simulator, are virtual:
    there each version runs and is checked, and recorded times are shown. The simulator checks in weak memory.

    Parameters
    ----------
    topic, run, home, config, size, dtype, gpu, seeds
        As for `Lesson`; ``config`` has "ranks".
    group : LocalGroup
        The ranks. Its number must be that of ``config``.
    launches, samples : int
        Launches between two events, and how often they are timed.
    """

    def __init__(
        self,
        topic: str,
        run: Run,
        home: str,
        config: Mapping[str, Any],
        size: Mapping[str, int],
        dtype: str,
        gpu: str = "h200",
        seeds: int = 4,
        *,
        group: LocalGroup,
        launches: int = 10,
        samples: int = 20,
    ):
        super().__init__(topic, run, home, config, size, dtype, gpu, seeds)
        if config["ranks"] != group.num_ranks:
            raise ValueError(f"config has {config['ranks']} ranks; group has {group.num_ranks}")
        self.group, self.launches, self.samples = group, launches, samples

    @property
    def is_timed(self) -> bool:
        """Whether each rank has a GPU of its own."""
        return can_time(self.group)

    @contextmanager
    def conditions(self, seed: int, races: bool) -> Iterator[None]:
        """As those of a lesson, and stores reach other ranks late and in any order that the memory model allows."""
        with super().conditions(seed, races), simulator.weak_memory():
            yield

    def measured(self, calls: Mapping[str, Any]) -> dict[str, Stats]:
        """Return the times of what `Run.timed` returned, of the slowest rank, measured interleaved."""
        return rank_times(self.group, dict(calls), launches=self.launches, samples=self.samples)

    def kept_rows(self) -> list[dict]:
        """Return the recorded rows of other numbers of ranks, if GPU, driver and versions are the same."""
        other = lambda row: row["config"].get("ranks") != self.config["ranks"]
        return records.carried_over(records.recorded(self.topic, self.gpu), other, records.environment())

    def call(self, call: Any) -> None:
        """Run one call of what `Run.timed` returned, on all ranks."""
        outputs_of(self.group, call)
