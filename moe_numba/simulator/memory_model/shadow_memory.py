"""Shadow memory: for each byte of memory, the last write and the reads since then that a write must not race with."""

import numpy as np

PAGE_BITS = 12
PAGE = 1 << PAGE_BITS
_COARSEST = 4  # cells start with 16 bytes


class Page:
    """The shadow of 4096 bytes.

    All bytes of a cell have been accessed together, so that they share one entry. A cell has `1 << shift` bytes, which
    is the largest power of two that divides the addresses and sizes of all accesses so far.
    """

    __slots__ = ("shift", "writes", "reads")

    def __init__(self):
        self.shift = _COARSEST
        self._set(np.zeros(PAGE >> _COARSEST, np.int32), np.zeros(PAGE >> _COARSEST, np.int32))

    def _set(self, writes, reads):
        self.writes, self.reads = memoryview(writes), memoryview(reads)

    def renumbered(self, numbers, of_sets):
        """Return a page whose entries have other numbers, with one access instead of each set."""
        page = Page.__new__(Page)
        page.shift = self.shift
        page._set(*(numbers[_without_sets(np.asarray(entries), of_sets)] for entries in (self.writes, self.reads)))
        return page

    def refine(self, shift):
        """Divide the cells into smaller ones."""
        count = 1 << self.shift - shift
        self.shift = shift
        self._set(np.repeat(self.writes, count), np.repeat(self.reads, count))


def _without_sets(entries, of_sets):
    """Return entries of cells with one access instead of each set."""
    return np.where(entries >= 0, entries, of_sets[np.maximum(-entries, 0)])


class ShadowMemory:
    """Pages by their number. A cell holds the numbers of accesses, which `HappensBefore` defines; 0 means none.

    `writes`: the last write, `reads`: one read, or, if negative, minus the number of a set of accesses.
    """

    def __init__(self):
        self.pages = {}

    def numbers(self, of_sets):
        """Return the numbers of all accesses in the shadow, sorted, with `of_sets[n]` for set `n`."""
        found = set()
        for page in self.pages.values():
            for entries in (page.writes, page.reads):
                found.update(_without_sets(np.unique(entries), of_sets).tolist())
        return sorted(found)

    def renumbered(self, numbers, of_sets):
        """Return a copy in which access `n` is `numbers[n]`, and set `n` is access `of_sets[n]`."""
        copy = ShadowMemory()
        copy.pages = {index: page.renumbered(numbers, of_sets) for index, page in self.pages.items()}
        return copy

    def cells(self, address: int, size: int):
        """Return (page, first cell, cell after the last one) of each page that the bytes from an address on touch."""
        first = address & PAGE - 1
        stop = first + size
        if stop > PAGE:
            here = PAGE - first
            return *self.cells(address, here), *self.cells(address + here, size - here)
        page = self.pages.get(address >> PAGE_BITS)
        if page is None:
            page = self.pages[address >> PAGE_BITS] = Page()
        shift = page.shift
        if (first | stop) & (1 << shift) - 1:
            shift = ((first | stop) & -(first | stop)).bit_length() - 1
            page.refine(shift)
        return ((page, first >> shift, stop >> shift),)

    def distinct(self, address: int, size: int):
        """Yield (page, cells) where `cells` lists one cell for each pair of entries that the bytes have.

        A copy of many bytes is checked once for each pair, instead of once for each cell.
        """
        for page, first, stop in self.cells(address, size):
            if stop - first <= 4:
                yield page, range(first, stop)
                continue
            writes, reads = (np.asarray(a)[first:stop].astype(np.int64) for a in (page.writes, page.reads))
            yield page, first + np.unique(writes << 32 | reads & 0xFFFFFFFF, return_index=True)[1]
