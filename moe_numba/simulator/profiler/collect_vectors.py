"""Collects counters while vectors run a kernel; `collect` says what counts as one execution or one request.

All lanes of a gang execute a statement or an access together if its mask has them, so a warp executes it if the mask
has one of its lanes. The vector versions of a kernel's functions note each statement with its mask (`Gang.notes`), and
what executes accesses, warp-wide operations and barriers notes these; the line is that of the caller's frame. Notes are
counted in bulk: those of many accesses in one array operation.
"""

import sys

import numpy as np

from moe_numba.simulator.core import reachable
from moe_numba.simulator.core.source import written
from moe_numba.simulator.profiler.bank_conflicts import count_matrices, wavefronts_of
from moe_numba.simulator.profiler.coalescing import contention_of, sectors_of
from moe_numba.simulator.profiler.control_flow import belongs_to_kernel
from moe_numba.simulator.profiler.counters import (
    Accesses,
    collective_counter,
    count_operation,
    count_peers,
    is_barrier,
    is_block_wide,
    name_of_wait,
)
from moe_numba.simulator.profiler.phases import Phases, access_counter
from moe_numba.simulator.profiler.report import KernelProfile
from moe_numba.simulator.vector import state
from moe_numba.simulator.vector.numbers import Weak

_MOST_KEPT = 1 << 19  # lanes of accesses that are kept before they are counted
_MOST_STATEMENTS = 1 << 12  # statements of phases, and warp-wide operations, that are kept before they are counted
_HASH = 0x1E3779B97F4A7C15  # odd, so that sectors of different blocks have different hashes, but for rare accidents
_missing = object()


class VectorCollector:
    """Counts what one attempt to run grids does; nothing of it reaches the profile unless the attempt succeeds."""

    def __init__(self, profile, addresses):
        self._profile, self._addresses, self._launches = profile, addresses, {}

    def of(self, gang):
        """Return what counts for a new gang."""
        launch = self._launches.get(gang.grid)
        if launch is None:
            launch = self._launches[gang.grid] = _Launch(gang.grid, self._addresses)
        return _Notes(gang, launch)

    def commit(self):
        """Add what was counted to the profile."""
        for grid, launch in self._launches.items():
            launch.finish()
            self._profile.kernel(grid).merge(launch.kernel)

    def access(self, *_):
        """Do nothing: of what scalar functions access for single lanes, the gang has noted the whole."""

    def operation(self, name, nbytes, shape=None, count=1, spans=()):
        """Record an asynchronous operation; see `collect.Collector.operation`."""
        state.gang.notes.operation(name, nbytes, shape, count, spans)


class _Notes:
    """What one gang has executed in the current phase of its block."""

    def __init__(self, gang, launch):
        self.gang, self.launch, self.statements, self.phase = gang, launch, [], 0
        self.block, self.first_warp = launch.block_number(gang.block), gang.warps[0].index

    def line(self):
        """Return the counters of the line that the kernel executes now; None outside its functions."""
        frame, lines, outside = sys._getframe(2), self.launch.lines, self.launch.outside
        while frame is not None:
            code = frame.f_code
            if id(code) not in outside:
                key = id(code), frame.f_lineno
                found = lines.get(key, _missing)
                if found is _missing:
                    found = self.launch.line(written[code], key[1]) if code in written else None
                    if found is None:
                        outside[id(code)] = code  # kept, so that its id is not reused
                    else:
                        lines[key] = found
                if found is not None:
                    return found
            frame = frame.f_back
        return None

    def mark(self):
        """Return the number of accesses that are noted, for `join`."""
        return len(self.launch.accesses)

    def access(self, operation, x, region, address, step, size, index, mask):
        """Note that each lane of a mask accesses `size` bytes at `address + index * step`, in array or pointer `x`."""
        line, gang = self.line(), self.gang
        if line is None:
            return
        space, address = self._place(x, region, address)
        index = index.values if type(index) is Weak else index
        self.launch.accesses.append((line, operation, space, size, address, step, index, mask, self, self.phase))
        self.launch.kept += gang.size
        if reachable.ranks and space == "global":
            self._peers(line, x.address, step, size, index, mask)
        if self.launch.kept > _MOST_KEPT:
            self.launch.count()
        if len(self.statements) > _MOST_KEPT:
            self.end_phase()

    def _place(self, x, region, address):
        """Return the memory space, and an address as it would be on a GPU."""
        if region.shared is None:
            return "global", address + self.launch.addresses.shift(x.array)
        space = "shared" if region.shared.shared.block is self.gang.block else "distributed shared"
        return space, address + region.shared.to_window

    def _peers(self, line, address, step, size, index, mask):
        many = type(index) is np.ndarray
        lanes = self.gang.size if mask is None else int(np.count_nonzero(mask))
        first = index[0 if mask is None else mask.nonzero()[0][0]] if many else index
        count_peers(line, self.gang.grid.rank, address + int(first) * step, size * lanes)

    def join(self, before):
        """Make one access of those since `before`: a pointer differs between the lanes of an instruction."""
        parts, self.launch.accesses[before:] = self.launch.accesses[before:], []
        for alike in _by(lambda note: note[:4], parts):
            if len(alike) > 1:
                addresses, whole = np.zeros(self.gang.size, np.int64), np.zeros(self.gang.size, bool)
                for *_, address, step, index, mask, _, _ in alike:
                    addresses[mask] = address + step * (index[mask] if type(index) is np.ndarray else index)
                    whole |= mask
                alike = [(*alike[0][:4], 0, 1, addresses, whole, self, self.phase)]
            self.launch.accesses += alike

    def matrix(self, operation, allocation, offsets, count):
        """Note an ldmatrix or stmatrix of a warp whose lanes address rows at offsets in an allocation."""
        line = self.line()
        if line is not None:
            kind = line.accesses.setdefault(("shared", operation, 16), Accesses())
            conflicts = count_matrices(kind, (offsets + allocation.start).tolist(), count)
            self._count(line, access_counter("shared", operation))
            self._count(line, "bank_conflicts", more=conflicts)

    def collective(self, what, groups):
        """Note a warp-wide operation; `groups` has the number of masks that the lanes of each warp name."""
        line = self.line()
        counter = collective_counter(what)
        if line is not None and counter is not None:
            self.launch.waits.append((line, counter, what, groups, self, self.phase))

    def operation(self, name, nbytes, shape=None, count=1, spans=()):
        """Note an asynchronous operation; see `collect.Collector.operation`."""
        line = self.line()
        if line is not None:
            count_operation(line, self.gang.grid.rank, name, nbytes, shape, count, spans)

    def barrier(self, what):
        """Note that all lanes wait at a barrier; one of the whole block ends the phase."""
        line = self.line()
        if line is not None:
            line.waits[what] = line.waits.get(what, 0) + self.gang.num_warps
            self._count(line, "barriers")
        self.end_phase()
        self.phase += is_block_wide(what)

    def wait(self, where):
        """Note that the gang waits or polls: not at a barrier of the whole block, which `barrier` has noted."""
        what = name_of_wait(where)
        line = None if is_block_wide(what) else self.line()
        if line is not None:
            line.waits[what] = line.waits.get(what, 0) + 1
            if is_barrier(what):
                self._count(line, "barriers")

    def warpgroup_instruction(self, group, what):
        """Note the registers per thread that a setmaxnreg gives to a warpgroup."""
        self.launch.kernel.note_warpgroup_instruction(group, what)

    def _count(self, line, counter, more=1):
        self.launch.waits.append((line, counter, None, np.full(self.gang.num_warps, more), self, self.phase))

    def end_phase(self):
        """Count the statements of the phase so far."""
        executed = {}
        for site, mask in self.statements:
            key = site, id(mask)
            found = executed.get(key)
            if found is None:
                executed[key] = [site, mask, 1]
            else:
                found[2] += 1
        self.statements.clear()
        for site, mask, times in executed.values():
            line = self.launch.lines.get(site, _missing)
            if line is _missing:
                line = self.launch.lines[site] = self.launch.line(site.code, site.line)
            if line is not None:
                self.launch.executions.append((line, mask, times, self, self.phase))
        if len(self.launch.executions) > _MOST_STATEMENTS:
            self.launch.count_executions()
        if len(self.launch.waits) > _MOST_STATEMENTS:
            self.launch.count_waits()


class _Launch:
    """What all gangs of one grid have executed."""

    def __init__(self, grid, addresses):
        self.kernel, self.addresses, self.grid = KernelProfile(grid.kernel), addresses, grid
        self.lines, self.outside = {}, {}  # (id of code, line), or Site -> counters; id -> code of other functions
        self.accesses, self.executions, self.waits, self.kept = [], [], [], 0
        self.keys, self.counts, self._waiting = [], [], 0  # of `phases`, with the block in front
        self.blocks = {block: number for number, block in enumerate(grid.blocks)}
        self.contending = {}  # Accesses of atomics -> arrays of addresses, one for each request that updates it
        self.updated = {}  # the same for sectors of global memory
        self.loaded = np.empty(0, np.int64)  # hashes of the blocks and sectors of loads from global memory

    def block_number(self, block):
        return self.blocks[block]

    def line(self, code, number):
        return self.kernel.line(code, number) if belongs_to_kernel(code, self.kernel) else None

    def count_waits(self):
        """Count the warp-wide operations and the barriers that are noted."""
        notes, self.waits = self.waits, []
        for alike in _by(lambda note: (note[1], note[4].gang.num_warps), notes):
            counts = np.stack([note[3] for note in alike])
            self._add_rows(alike, alike[0][1], counts)
            for (line, _, what, *_), count in zip(alike, counts.sum(1).tolist(), strict=True):
                if what is not None:
                    line.collectives[what] = line.collectives.get(what, 0) + count

    def _add(self, keys, counts):
        self.keys.append(keys)
        self.counts.append(counts)
        self._waiting += len(keys)
        if self._waiting > _MOST_KEPT:
            self._compact()

    def _compact(self):
        """Add up the counts of equal keys."""
        if self.keys:
            keys, inverse = np.unique(np.concatenate(self.keys), return_inverse=True)
            counts = np.bincount(inverse.reshape(-1), np.concatenate(self.counts)).astype(np.int64)
            self.keys, self.counts, self._waiting = [keys[counts > 0]], [counts[counts > 0]], 0

    def finish(self):
        """Count all that is left."""
        self.count()
        self.count_executions()
        self.count_waits()
        self._compact()
        keys, counts = (np.concatenate(self.keys), np.concatenate(self.counts)) if self.keys else ([], [])
        if len(keys):
            block = keys >> _BLOCK_BITS
            starts = np.flatnonzero(np.append(True, block[1:] != block[:-1]))
            keys = keys & ((1 << _BLOCK_BITS) - 1)
            for first, end in zip(starts, [*starts[1:], len(keys)], strict=True):
                self.kernel.phases.add_block(keys[first:end], counts[first:end])
        for kind, addresses in self.contending.items():
            _, requests = np.unique(np.concatenate(addresses), return_counts=True)
            kind.warp_contention = max(kind.warp_contention, int(requests.max()))
        for kind, sectors in self.updated.items():
            _, requests = np.unique(np.concatenate(sectors), return_counts=True)
            kind.sector_contention = max(kind.sector_contention, int(requests.max()))

    def count_executions(self):
        """Count the statements that are noted."""
        notes, self.executions = self.executions, []
        for alike in _by(lambda note: note[3].gang.size, notes):
            active, mask_of = _distinct_masks([note[1] for note in alike], alike[0][3].gang.size)
            lanes, times = np.count_nonzero(active, axis=2)[mask_of], np.array([note[2] for note in alike])
            counts = times[:, None] * (lanes > 0)
            self._add_rows(alike, "executions", counts)
            for (line, *_), executions, active in zip(alike, counts.sum(1), times * lanes.sum(1), strict=True):
                line.executions += int(executions)
                line.active_lanes += int(active)

    def _add_rows(self, notes, counter, counts):
        """Add counts [note, warp]; a note begins with its line and ends with its `_Notes` and phase."""
        keys = self._keys(notes, counter)[:, None] + np.arange(counts.shape[1])
        self._add(keys.reshape(-1), counts.reshape(-1))

    def _keys(self, notes, counter):
        """Return the key of the first warp of each note."""
        columns = {line: self.kernel.phases.column(line, counter) for line in {note[0] for note in notes}}
        keys = [_key(own.block, phase, columns[line], own.first_warp) for line, *_, own, phase in notes]
        return np.array(keys, np.int64)

    def count(self):
        """Count the accesses that are noted."""
        notes, self.accesses, self.kept = self.accesses, [], 0
        for alike in _by(lambda note: (*note[1:4], note[8].gang.size), notes):
            self._count_alike(alike)

    def _count_alike(self, notes):
        """Count accesses of one operation, space and size, by gangs of one size: a request of each warp with a lane."""
        (_, operation, space, width), size = notes[0][:4], notes[0][8].gang.size
        active, mask_of = _distinct_masks([note[7] for note in notes], size)
        note, warp = (np.count_nonzero(active, axis=2) > 0)[mask_of].nonzero()
        active = active[mask_of[note], warp]
        addresses = self._addresses(notes, size, note, warp)
        lanes = np.count_nonzero(active, axis=1)
        found = {"requests": np.ones(len(note), np.int64), "lanes": lanes, "bytes": width * lanes}
        lines = {line: number for number, line in enumerate(dict.fromkeys(note[0] for note in notes))}
        line_of = np.array([lines[note[0]] for note in notes])[note]
        kinds = [line.accesses.setdefault((space, operation, width), Accesses()) for line in lines]
        if space == "global":
            sectors, new, found["wavefronts"] = sectors_of(addresses, active, width)
            found["sectors"] = np.count_nonzero(new, axis=1)
            row = new.nonzero()[0]
            if operation == "load":
                block = np.array([own.block for *_, own, _ in notes])[note]
                found["first_sectors"] = np.bincount(
                    row[self._first_seen(sectors[new], block[row])], minlength=len(new)
                )
            if operation == "atomic":
                for number, kind in enumerate(kinds):
                    self.updated.setdefault(kind, []).append(sectors[new][line_of[row] == number])
        if space == "shared" and operation != "atomic":
            found["wavefronts"], found["ideal_wavefronts"] = wavefronts_of(
                addresses, active, width, operation == "load"
            )
            conflicts = found["wavefronts"] - found["ideal_wavefronts"]
            if conflicts.any():
                self._add(self._keys(notes, "bank_conflicts")[note] + warp, conflicts)
        if counter := access_counter(space, operation):
            self._add(self._keys(notes, counter)[note] + warp, found["requests"])
        for name, values in found.items():
            for kind, more in zip(kinds, np.bincount(line_of, values).astype(np.int64).tolist(), strict=True):
                setattr(kind, name, getattr(kind, name) + more)
        if operation == "atomic":
            most, addresses, distinct = contention_of(addresses, active)
            if space == "shared":  # blocks have shared memory of their own
                addresses = addresses + np.array([own.block << 32 for *_, own, _ in notes])[note][:, None]
            for number, kind in enumerate(kinds):
                rows = line_of == number
                kind.contention = max(kind.contention, int(most[rows].max()))
                self.contending.setdefault(kind, []).append(addresses[rows][distinct[rows]])

    def _first_seen(self, sectors, blocks):
        """Return the indices of those sectors that no load of their block has touched before."""
        hashes, first = np.unique(sectors * _HASH + blocks, return_index=True)
        new = np.isin(hashes, self.loaded, assume_unique=True, invert=True)
        self.loaded = np.concatenate([self.loaded, hashes[new]])
        return first[new]

    def _addresses(self, notes, size, note, warp):
        """Return the byte addresses [request, lane] of the requests of these notes and warps."""
        varying = np.array([type(n[6]) is np.ndarray for n in notes])
        base = np.array([n[4] if v else n[4] + int(n[6]) * n[5] for n, v in zip(notes, varying)], np.int64)
        addresses = np.repeat(base[note][:, None], 32, axis=1)
        if varying.any():
            which = np.cumsum(varying) - 1  # of the arrays of indices
            indices = _by_warp(np.stack([n[6] for n, v in zip(notes, varying) if v]).astype(np.int64, copy=False), 0)
            rows = varying[note]
            steps = np.array([n[5] for n in notes])[note[rows]]
            addresses[rows] += indices[which[note[rows]], warp[rows]] * steps[:, None]
        return addresses


_BLOCK_BITS = 40


def _key(block, phase, column, warp):
    return (block << _BLOCK_BITS) + Phases.key(phase, column, warp)


def _by(key, notes):
    """Return the notes as lists of those that have the same key."""
    groups = {}
    for note in notes:
        groups.setdefault(key(note), []).append(note)
    return list(groups.values())


def _distinct_masks(masks, size):
    """Return the distinct ones of some masks as [mask, warp, lane], and the number of each mask's."""
    numbers, distinct = {}, []
    for mask in masks:
        if id(mask) not in numbers:
            numbers[id(mask)] = len(distinct)
            distinct.append(np.ones(size, bool) if mask is None else mask)
    return _by_warp(np.stack(distinct), False), np.array([numbers[id(mask)] for mask in masks])


def _by_warp(values, filler):
    """Return values [note, lane] as [note, warp, lane]; the last warp may lack lanes."""
    missing = -values.shape[1] % 32
    if missing:
        values = np.concatenate([values, np.full((len(values), missing), filler, values.dtype)], 1)
    return values.reshape(len(values), -1, 32)
