"""Which tests a run has: ``--suite fast``, ``commit`` or ``all``, and ``--shard 3/48``.

``tests/costs.json`` has the seconds of each test that takes long, and for each planted bug the cheapest test that finds
it. A commit's run consists of

- all tests of functions that take little time,
- of the other tests those that are the cheapest one to find a planted bug (`Suite.finders`), which also detect data
  races, and
- a shard of the rest: every shard takes about as long, and all shards together are the rest.

The commit chooses the shard; the header of pytest's output says how to run it again.
"""

import json
import subprocess
from collections import defaultdict
from pathlib import Path

COSTS = Path(__file__).parents[1] / "costs.json"
SHARDS = 48
CASE_S, FUNCTION_S = 0.05, {"fast": 0.5, "commit": 1.0}  # a function takes little time if a case or all of them do
SETUP_S = 2.0  # the tests of a module whose fixtures take longer are not spread over shards


def read_costs(path=COSTS):
    """Return the contents of ``tests/costs.json``: {"functions": seconds a case, "modules": seconds, "finders"}."""
    return json.loads(path.read_text())


def function_of(nodeid):
    """Return the part of a node id that all cases of a test function share."""
    return nodeid.partition("[")[0]


def shard_of_commit():
    """Return a shard that follows from the hash of the commit; 0 outside of a repository."""
    command = "git", "rev-parse", "HEAD"
    try:
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(commit, 16) % SHARDS


def parse_shard(text):
    """Return (3, 48) for "3/48", and raise ``ValueError`` for what is no shard."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"--shard is {text!r}; it must be its number and that of all shards, such as 3/{SHARDS}")
    return int(number), int(count)


class Suite:
    """The choice of tests for a run.

    Parameters
    ----------
    costs : dict
        See `read_costs`.
    name : {"fast", "commit", "all"}
    shard : (int, int)
        Number of the shard, and the number of shards.
    """

    def __init__(self, costs, name, shard):
        self.name, self.shard = name, shard
        self._cases, self._setups = costs["functions"], costs["modules"]
        self.finders = set(costs["finders"].values())

    def seconds(self, nodeid):
        """Return the time of a test without the fixtures of its module."""
        return self._cases.get(function_of(nodeid), 0.0)

    def missing(self, nodeids):
        """Return the tests that find planted bugs according to ``costs.json``, but are not in a whole collection."""
        return sorted(self.finders.difference(nodeids))

    def choose(self, nodeids):
        """Return the set of those tests of a collection that belong to the run."""
        if self.name == "all":
            return set(nodeids)
        cheap = self._cheap(nodeids)
        if self.name == "fast":
            return cheap
        chosen = cheap | self.finders.intersection(nodeids)
        return chosen | self._shards([n for n in nodeids if n not in chosen])[self.shard[0]]

    def _cheap(self, nodeids):
        totals = defaultdict(float)
        for nodeid in nodeids:
            totals[function_of(nodeid)] += self.seconds(nodeid)
        return {
            nodeid
            for nodeid in nodeids
            if not self._has_long_setup(nodeid)
            and (self.seconds(nodeid) < CASE_S or totals[function_of(nodeid)] < FUNCTION_S[self.name])
        }

    def _has_long_setup(self, nodeid):
        return self._setups.get(nodeid.partition("::")[0], 0.0) > SETUP_S

    def _shards(self, nodeids):
        """Spread tests over shards, the longest first, each on the shard that has least."""
        parts, seconds = defaultdict(list), defaultdict(float)
        for nodeid in nodeids:
            module = nodeid.partition("::")[0]
            part = module if self._has_long_setup(nodeid) else nodeid
            parts[part].append(nodeid)
            seconds[part] += self.seconds(nodeid)
        for part in parts:
            seconds[part] += self._setups.get(part, 0.0)
        loads, shards = [0.0] * self.shard[1], [set() for _ in range(self.shard[1])]
        for part in sorted(parts, key=lambda part: (-seconds[part], part)):
            least = loads.index(min(loads))
            loads[least] += seconds[part]
            shards[least].update(parts[part])
        return shards
