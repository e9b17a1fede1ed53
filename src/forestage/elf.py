"""What does a shared object define? Read from its file, so that no code of it runs.

elf(5); 64-bit, little-endian, as every machine that Slurm's packages are made for.
"""

import struct
from typing import NamedTuple

_DYNSYM, _NOBITS = 11, 8
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class _Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    each: int


class Object(NamedTuple):
    """Names that others can call, and where they are in memory; `data` is the file."""

    data: bytes
    symbols: dict[str, int]
    sections: tuple[_Section, ...]

    def word(self, name: str) -> int | None:
        """The 32-bit value of an initialised variable."""
        address = self.symbols.get(name)
        if address is None:
            return None
        for one in self.sections:
            if one.type != _NOBITS and one.address <= address <= one.address + one.size - 4:
                at = one.offset + address - one.address
                return int.from_bytes(self.data[at : at + 4], "little")
        return None


def parse(data: bytes) -> Object | None:
    """Pure: None where it is no such file, or a damaged one."""
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    try:
        sections = tuple(_sections(data))
        return Object(data, _symbols(data, sections), sections)
    except (struct.error, IndexError, ValueError, OverflowError):
        return None


def _sections(data: bytes) -> list[_Section]:
    (start,) = struct.unpack_from("<Q", data, 0x28)
    each, number = struct.unpack_from("<HH", data, 0x3A)
    return [
        _Section(*_SECTION.unpack_from(data, start + index * each))
        for index in range(number if each == _SECTION.size else 0)
    ]


def _symbols(data: bytes, sections: tuple[_Section, ...]) -> dict[str, int]:
    found = {}
    for table in sections:
        if table.type != _DYNSYM or table.each != _SYMBOL.size:
            continue
        names = sections[table.link]
        text = data[names.offset : names.offset + names.size]
        body = data[table.offset : table.offset + table.size // _SYMBOL.size * _SYMBOL.size]
        for name, _, _, section, value, _ in _SYMBOL.iter_unpack(body):
            if section:  # else it is only wanted, and defined elsewhere
                found[text[name : text.index(b"\0", name)].decode(errors="replace")] = value
    return found
