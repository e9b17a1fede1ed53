"""Who read which chunks of a copy from the source, and so which of them may go to other jobs.

    origins   in a part, later in its entry; sets of chunks in hex, bit 5 is chunk 5

Without the file no other node had a part in the copy. What nodes of other jobs gave goes on to no
third job before this node has compared its pieces with the source (features/peers/peer_copy.py):
as long as
it is copied, and for ever where the source could not be read.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from forestage.features.peers.peer_table import list_chunk_numbers, make_chunk_set
from forestage.system import files, records

NAME = "origins"

HexChunkSet = Annotated[str, msgspec.Meta(pattern="^-?[0-9a-f]+$")]


class ChunkReaders(msgspec.Struct, frozen=True):
    """By reader, its chunks; those that came from `outside`, from another job's nodes.

    `compared`: all is in, and the pieces that were drawn of it were the source's.
    """

    by: dict[str, HexChunkSet] = {}
    outside: HexChunkSet = "0"
    compared: bool = False

    def find_reader(self, number: int) -> str:
        """Who read the chunk; "" where it did not come from a peer."""
        return next((who for who, its in self.by.items() if int(its, 16) >> number & 1), "")

    def chunks_for_other_jobs(self, here: int, is_whole: bool) -> int:
        """Pure: which of the chunks that are in may go to nodes of other jobs."""
        if is_whole:
            return here if self.compared else here & ~int(self.outside, 16)
        # It lags behind: what it does not name yet may be anybody's.
        named = 0
        for its in self.by.values():
            named |= int(its, 16)
        return here & named & ~int(self.outside, 16)


UNREADABLE_RECORD = ChunkReaders(outside="-1")
"""Of a damaged file, or one that is being written."""


def find_chunk_readers(directory: Path) -> ChunkReaders | None:
    """Of a part or an entry; None: no peer had a part in it."""
    try:
        return records.load(directory / NAME, ChunkReaders)
    except FileNotFoundError:
        return None
    except (OSError, records.DamagedRecord):
        return UNREADABLE_RECORD


class ChunkReaderRecorder:
    """What a copy notes on its way. The caller holds the copy's lock."""

    def __init__(self, directory: Path, me: str, here: Iterable[int]) -> None:
        """`here`: the chunks that were in before."""
        self._file = directory / NAME
        self._me = me
        before = find_chunk_readers(directory) or ChunkReaders({me: f"{make_chunk_set(here):x}"})
        self._by = {who: int(its, 16) for who, its in before.by.items()}
        self._outside = int(before.outside, 16)
        self.write_file()

    def record_chunk(self, number: int, reader: str = "", outside: bool = False) -> None:
        """A chunk is in; without a reader this node read it itself."""
        self.remove_chunks((number,))
        self._by[reader or self._me] = self._by.get(reader or self._me, 0) | 1 << number
        self._outside |= outside << number

    def chunks_read_by(self, reader: str) -> list[int]:
        """The chunks that this node read, by what their givers say."""
        return list_chunk_numbers(self._by.get(reader, 0)) if reader != self._me else []

    def remove_chunks(self, numbers: Iterable[int]) -> None:
        """These chunks are not in any more."""
        gone = make_chunk_set(numbers)
        self._by = {who: its & ~gone for who, its in self._by.items()}
        self._outside &= ~gone

    def write_file(self, compared: bool = False) -> None:
        """Half a file counts as none: it is no matter when it is read meanwhile."""
        by = {who: f"{its:x}" for who, its in self._by.items() if its}
        data = msgspec.json.encode(ChunkReaders(by, f"{self._outside:x}", compared))
        with contextlib.suppress(OSError):  # a disk that others filled must not matter
            files.overwrite_file(self._file, data)
