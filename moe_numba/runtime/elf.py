"""Reads machine code, an ELF file for 64-bit little-endian machines: its sections and what the loader fills in."""

import struct
from typing import NamedTuple

_NO_BITS, _RELA, _REL = 8, 4, 9  # types of sections
_SYMBOL_BYTES = 24


class Section(NamedTuple):
    """One section; ``data`` is empty if the file has no bytes for it, such as for shared memory."""

    name: str
    type: int
    size: int
    data: bytes
    link: int  # of relocations: the section with their symbols; of symbols: the section with their names
    info: int  # of relocations: the section that they change


class Relocation(NamedTuple):
    """A place in a section where the loader fills in an address."""

    offset: int
    type: int
    addend: int
    section: int | None  # the section of the address, or None if another file defines the symbol
    symbol: str
    value: int  # the symbol's offset in its section


def sections(cubin: bytes) -> list[Section]:
    """Return the sections of a cubin."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQII", cubin, table + i * size) for i in range(count)]
    strings = cubin[headers[names][4] :]
    return [
        Section(
            _string(strings, name), kind, size, b"" if kind == _NO_BITS else cubin[start : start + size], link, info
        )
        for name, kind, _, _, start, size, link, info in headers
    ]


def relocations(found: list[Section], number: int) -> list[Relocation]:
    """Return the relocations of section ``number`` of ``found``."""
    result = []
    for section in found:
        if section.type in (_RELA, _REL) and section.info == number:
            symbols = found[section.link]
            names = found[symbols.link].data
            for offset, info, *addend in struct.iter_unpack("<QQq" if section.type == _RELA else "<QQ", section.data):
                name, _, _, home, value, _ = struct.unpack_from("<IBBHQQ", symbols.data, (info >> 32) * _SYMBOL_BYTES)
                inside = home if 0 < home < len(found) else None
                kind = info & 0xFFFFFFFF
                result.append(Relocation(offset, kind, sum(addend), inside, _string(names[name:]), value))
    return result


def _string(data, start=0):
    return data[start : data.index(b"\0", start)].decode()
