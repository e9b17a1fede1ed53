"""What a copy under way and the read-through servers of its image tell each other.

    /run/forestage/through/<key>/pieces  twice 8 bytes: the inode of the part's image, a number that
                                         grows whenever marks are cleared; then a byte for each
                                         PIECE of it: 1 once the right bytes are in place
    /run/forestage/through/<key>/wanted  four times 8 bytes: the moment of a job's last read of the
                                         source (CLOCK_MONOTONIC, ns), bytes that jobs have read,
                                         how many of them of the source, the size of a chunk; then a
                                         byte for each chunk: 0, SOON or NOW

Both are shared memory, on a tmpfs: a hung disk must not stop who writes here. The stager makes
them, marks pieces and reads what is wanted; a server the other way round. The peer service asks as
well, for other nodes. While a keeper serves the image, `sock` is in the same directory.

A piece counts before its chunk's digest is in the map. So the stager marks it only for bytes that
it read from the source itself, or once the chunk is proven, and clears it before anything else may
overwrite them. A reader looks at the marks, the inode and the count again after it has read: a
stager that begins anew clears all marks first, and a part that was dropped is another file.
"""

import contextlib
import errno
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from forestage.cache.part import chunk_count
from forestage.system import folders
from forestage.system.files import open_descriptor

PIECE = 1024 * 1024  # bytes; chunks are multiples of it

WantLevel = Literal[1, 2]
SOON: WantLevel = 1
NOW: WantLevel = 2
"""How much a chunk is wanted: a job has read a part of it elsewhere; a job waits for it."""

_HEAD = struct.Struct("<QQ")  # of `pieces`: the inode, and a count of clearings
_STAMP = struct.Struct("<Q")
_STATE = struct.Struct("<4Q")  # of `wanted`: a job's last read, bytes read, of the source, chunk


class ArrivalMap:
    """The two files of one image, mapped. `size` and `chunk` in bytes."""

    def __init__(
        self, directory: Path, size: int, chunk: int = 0, inode: int | None = None
    ) -> None:
        """Maps the files; the stager, once, makes and clears them, for a part's image of `inode`.

        `chunk` is the stager's to say. Raises FileNotFoundError where no stager has made them,
        OSError.
        """
        self.directory = directory
        self.size = size
        fresh = inode is not None
        wanted = _STATE.size + chunk_count(size, chunk) if fresh else 0
        if fresh:
            _delete_if_other_size(directory / "wanted", wanted)
        self._pieces = _map_file(directory, "pieces", _HEAD.size + chunk_count(size, PIECE), fresh)
        self._wanted = _map_file(directory, "wanted", wanted, fresh)
        if inode is not None:
            _STATE.pack_into(self._wanted, 0, 0, 0, 0, chunk)
            _HEAD.pack_into(self._pieces, 0, inode, time.monotonic_ns())

    @property
    def chunk(self) -> int:
        """Bytes; the image's size for the moment before the stager has said it."""
        return _STATE.unpack_from(self._wanted)[3] or self.size

    def close(self) -> None:
        self._pieces.close()
        self._wanted.close()

    # The stager's

    def mark_arrived(self, start: int, length: int) -> None:
        """Marks the pieces that lie wholly in the `length` bytes from `start` on."""
        first = chunk_count(start, PIECE)
        end = start + length
        last = chunk_count(end, PIECE) if end == self.size else end // PIECE
        if first < last:
            self._pieces[_HEAD.size + first : _HEAD.size + last] = b"\1" * (last - first)

    def clear_arrived(self, number: int) -> None:
        """Clears the marks of a chunk: its bytes may be overwritten from now on."""
        inode, cleared = _HEAD.unpack_from(self._pieces)
        _HEAD.pack_into(self._pieces, 0, inode, cleared + 1)
        first = number * self.chunk // PIECE
        last = min(first + self.chunk // PIECE, chunk_count(self.size, PIECE))
        self._pieces[_HEAD.size + first : _HEAD.size + last] = bytes(last - first)

    def list_wanted(self, levels: Sequence[int] = (NOW, SOON)) -> list[int]:
        """The chunks that are wanted so much, level by level."""
        found = []
        for level in levels:
            at = self._wanted.find(bytes((level,)), _STATE.size)
            while at >= 0:
                found.append(at - _STATE.size)
                at = self._wanted.find(bytes((level,)), at + 1)
        return found

    def clear_wanted(self, number: int) -> None:
        """The chunk is in: nobody needs to want it any more."""
        self._wanted[_STATE.size + number] = 0

    def has_recent_source_read(self, now_ns: int, calm_ns: int) -> bool:
        """Whether a job has read the source in the last `calm_ns`."""
        last: int = _STAMP.unpack_from(self._wanted)[0]
        return now_ns - last < calm_ns

    def is_unread(self) -> bool:
        """Whether no job has read anything yet."""
        return not any(self._wanted[: _STAMP.size])

    def read_totals(self) -> tuple[int, int]:
        """Bytes that jobs read before the copy was whole, and how many of these of the source."""
        _, read, of_source, _ = _STATE.unpack_from(self._wanted)
        return read, of_source

    def is_served(self) -> bool:
        """Whether jobs read the image through a server."""
        return is_served(self.directory)

    def remove_map(self) -> None:
        """Takes both files away: no copy is under way any more.

        A server may have them mapped still, and the next stager may bring other bytes to a piece.
        """
        self._pieces[_HEAD.size :] = bytes(len(self._pieces) - _HEAD.size)
        self.close()
        remove_map_files(self.directory)

    # The server's

    def has_arrived(self, start: int, length: int, inode: int) -> bool:
        """Whether the image with this inode has all pieces that `length` bytes from `start` touch.

        A byte's worth of `length` at least.
        """
        if _HEAD.unpack_from(self._pieces)[0] != inode:
            return False
        first, last = start // PIECE, chunk_count(start + length, PIECE)
        return bytes(self._pieces[_HEAD.size + first : _HEAD.size + last]).count(1) == last - first

    def clear_count(self) -> int:
        """A number that is another one after any clearing of marks."""
        found: int = _HEAD.unpack_from(self._pieces)[1]
        return found

    def count_arrived(self) -> int:
        """How many pieces are in place."""
        return bytes(self._pieces[_HEAD.size :]).count(1)

    def request_chunk(self, number: int, level: WantLevel) -> None:
        """Asks for a chunk; never lowers what was asked before."""
        at = _STATE.size + number
        self._wanted[at] = max(level, self._wanted[at])

    def mark_source_read(self, now_ns: int) -> None:
        """Says that a job reads the source at this moment."""
        _STAMP.pack_into(self._wanted, 0, now_ns)

    def count_read(self, size: int, of_source: bool) -> None:
        """Counts the bytes of a job's read; one thread at a time."""
        stamp, read, straight, chunk = _STATE.unpack_from(self._wanted)
        straight += size if of_source else 0
        _STATE.pack_into(self._wanted, 0, stamp, read + size, straight, chunk)


def create_map(directory: Path, size: int, chunk: int, image: Path) -> ArrivalMap | None:
    """The memory for a copy to a part's `image`; None, and no files, where /run is full."""
    try:
        folders.ensure_directory_with_mode(directory.parent)
        folders.ensure_directory_with_mode(directory)
        return ArrivalMap(directory, size, chunk, image.stat().st_ino)
    except OSError:
        remove_map_files(directory)
        return None


def remove_map_files(directory: Path) -> None:
    """Removes the files, and the directory unless a keeper is in it."""
    with contextlib.suppress(OSError):
        for name in ("pieces", "wanted"):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()


def is_served(directory: Path) -> bool:
    """Whether a keeper is there, which serves the image to jobs."""
    return (directory / "sock").exists()


def request_chunk_soon(directory: Path, number: int) -> None:
    """Asks for a chunk SOON, if a copy is under way; for who knows neither size nor chunk size."""
    file = directory / "wanted"
    with contextlib.suppress(OSError), open_descriptor(file, os.O_RDWR | os.O_NOFOLLOW) as fd:
        at = _STATE.size + number
        if os.pread(fd, 1, at) == b"\0":
            os.pwrite(fd, bytes((SOON,)), at)


def _delete_if_other_size(file: Path, size: int) -> None:
    """Made by a stager with chunks of another size. Not truncated: a server may have it mapped."""
    with contextlib.suppress(FileNotFoundError):
        if file.stat().st_size != size:
            file.unlink()
            file.with_name("pieces").unlink()  # by which servers see that both are new


def _map_file(directory: Path, name: str, size: int, fresh: bool) -> mmap.mmap:
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if fresh else 0)
    with open_descriptor(directory / name, flags, 0o600) as fd:
        if fresh:
            # Written, so that a full tmpfs is an error now and no SIGBUS later.
            os.pwrite(fd, bytes(size), 0)
        try:
            return mmap.mmap(fd, size)
        except ValueError as error:  # shorter: made for another chunk size, or not yet whole
            raise FileNotFoundError(errno.ENOENT, str(error), str(directory / name)) from None
