"""A directory as a source of a copy: its manifest, and where each byte of its image is from."""

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import msgspec

from forestage.cache import allocation
from forestage.cache.allocation import ChunkMap
from forestage.cache.part import chunk_count
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.clock import Clock
from forestage.features.data import file_readers, manifest, shared_scan, user_threads
from forestage.features.data.erofs import ErofsLayout
from forestage.features.data.file_readers import (
    MAX_REQUEST_BYTES,
    MAX_REQUEST_PIECES,
    FilePiece,
    FileReaderPool,
    OpenDirectory,
)
from forestage.features.data.manifest import DirectoryManifest
from forestage.sources import source
from forestage.sources.source import ReadableSource, SourceUnreadable
from forestage.system.as_user import User

SMALL = 256 * 1024  # bytes of a piece of a file, up to which its process costs less than a thread
ROOTS_OWN = AccessRights(0, 0, stat.S_IRUSR | stat.S_IWUSR)  # the rights are in the image


def make_source_image(found: DirectoryManifest, size: int) -> SourceImage:
    """Pure: the image of this directory, of so many bytes."""
    top = found.files[0]
    identity = FileIdentity(
        found.path, top.inode, size, top.mtime_ns, top.ctime_ns, tree=found.digest
    )
    return SourceImage(identity, ROOTS_OWN, "data")


class _FilePart(msgspec.Struct, frozen=True):
    """Bytes of file `number` of the manifest, from `offset` on, and the memory that they fill."""

    number: int
    offset: int
    memory: memoryview


class DirectorySource:
    """A directory as the stager's source: its manifest, and where each byte is from.

    To be made while this process has one thread, and closed. `scanned_at` is the wall clock's time
    before the first look. `is_from_peer`: another node has looked.
    """

    is_read_through: ClassVar[bool] = False

    def __init__(
        self,
        root: int,
        found: DirectoryManifest,
        made: ErofsLayout,
        user: User,
        max_files: int,
        clock: Clock,
        scanned_at: float,
        is_from_peer: bool = False,
    ) -> None:
        self.root = root
        self.directory = OpenDirectory(root, found.path, os.fstat(root).st_dev, user)
        self.manifest = found
        self.user = user
        self.max_files = max_files
        self.clock = clock
        self.scanned_at = scanned_at
        self.layout = made
        self.is_from_peer = is_from_peer
        self.files_read: set[int] = set()  # the files that were read here, by number
        self.maps: dict[int, ChunkMap] = {}  # by the size of a chunk
        self.thread_file = threading.local()
        self.readers = FileReaderPool(self.directory)

    @property
    def image(self) -> SourceImage:
        return make_source_image(self.manifest, self.layout.size)

    def open(self) -> ReadableSource:
        """Returns it as the engines read it, once a further change must show in its times.

        What had not changed for long when it was first looked at needs no other look now. Whether
        somebody writes is asked of each file as it is opened; here where that says too little.
        """
        pause = shared_scan.seconds_to_settle(self.manifest, self.scanned_at)
        if pause:
            self.clock.sleep(pause)
            self.check_unchanged()
        source.check_no_writer_below(self.root, self.manifest.path)
        head = len(self.layout.head)
        return ReadableSource(
            -1, None, self.layout.size, self.manifest.path, self.read, head, self.map_chunks
        )

    def map_chunks(self, chunk: int) -> ChunkMap:
        """Return what is known of its holes; what is in no file takes no space, and is not read.

        Only files that lack blocks are asked where their holes are. That is a read of them: each is
        the one that was looked at, and nobody writes to it. Raises Declined, SourceUnreadable.
        """
        if chunk not in self.maps:
            lacking, made = set(self.manifest.sparse), self.layout
            read = set(range(chunk_count(len(made.head), chunk)))
            asked = []
            for start, number in zip(made.starts, made.numbers, strict=True):
                if number in lacking:
                    asked.append((start, number))
                else:
                    end = start + self.manifest.files[number].size
                    read.update(range(start // chunk, chunk_count(end, chunk)))
            all_sets = read, set(read), set[int]()
            user_threads.map_as_user(self.user, asked, partial(self._map_file, all_sets, chunk))
            self.maps[chunk] = ChunkMap(*all_sets)
        return self.maps[chunk]

    def _map_file(self, all_sets: tuple[set[int], ...], chunk: int, where: tuple[int, int]) -> None:
        """Adds to a map's sets those of a file, which is at this place of the image, and number."""
        start, number = where
        file = self.manifest.files[number]
        name, size = self.directory.format_path(file), file.size
        try:
            self._open(number)
            try:
                found = allocation.map_chunks(self.thread_file.fd, size, chunk, start)
                source.check_no_writer(self.thread_file.fd, name)
            finally:
                self._close()
        except OSError as error:
            raise SourceUnreadable(name, error) from None
        for numbers, of_file in zip(all_sets, found, strict=True):
            numbers.update(of_file)

    def check_unchanged(self) -> None:
        """Looks at all of it once more; where another node does so, at what was read here.

        Raises Declined.
        """
        source.check_no_writer_below(self.root, self.manifest.path)
        if self.is_from_peer:
            # What was read of an inode is shown by all its names.
            names = self.manifest.names_by_inode
            read = (
                name for number in sorted(self.files_read) for name in names.get(number, [number])
            )
            some = [self.manifest.files[number] for number in read]
            try:
                if manifest.are_files_unchanged(
                    self.root, [*manifest.sample_files(self.manifest), *some], self.user
                ):
                    return
            except OSError:
                raise source.declined_as_changed(self.manifest.path) from None
            raise source.declined_as_changed(self.manifest.path)
        now = manifest.scan_directory(self.root, self.manifest.path, self.user, self.max_files)
        if now.digest != self.manifest.digest:
            raise source.declined_as_changed(self.manifest.path)

    def read(self, start: int, want: memoryview) -> None:
        """Fills `want` with what begins at `start`.

        Raises Declined, SourceTruncated, SourceUnreadable.
        With the user's rights, whichever thread it is; that has its own back afterwards.
        """
        pieces = list(self._file_pieces(start, want))
        # A large one is read by this thread: its file is the one that it had open before, mostly.
        small = [piece for piece in pieces if len(piece.memory) <= SMALL]
        for piece in pieces:
            if len(piece.memory) > SMALL:
                self._read_file(piece.number, piece.offset, piece.memory)
        while small:
            some = _select_first_request(small)
            self._read_small(some)
            del small[: len(some)]

    def _read_small(self, pieces: Sequence[_FilePart]) -> None:
        self.files_read.update(piece.number for piece in pieces)
        asked = [
            FilePiece(self.manifest.files[piece.number], piece.offset, len(piece.memory))
            for piece in pieces
        ]
        self.readers.read_pieces(asked, [piece.memory for piece in pieces])

    def _file_pieces(self, start: int, want: memoryview) -> Iterator[_FilePart]:
        """Fills what is in no file, and yields what is to be read of files, in their order."""
        made, end = self.layout, start + len(want)
        head = made.head[start:end]
        want[: len(head)] = head
        at = start + len(head)
        place = max(0, made.find_file_index(at))
        while at < end:
            begins = made.starts[place] if place < len(made.starts) else made.size
            size = self.manifest.files[made.numbers[place]].size if begins < made.size else 0
            if at >= begins + size:  # to the next block's, or the image's, end
                after = made.starts[place + 1] if place + 1 < len(made.starts) else made.size
                count = min(end, after) - at
                want[at - start : at - start + count] = bytes(count)
                place += 1
            else:
                count = min(end, begins + size) - at
                memory = want[at - start :][:count]
                yield _FilePart(made.numbers[place], at - begins, memory)
            at += count

    def _read_file(self, number: int, offset: int, want: memoryview) -> None:
        file = self.manifest.files[number]
        try:
            with user_threads.with_thread_user(self.user):
                if getattr(self.thread_file, "number", -1) != number:
                    self._open(number)
                file_readers.read_file_into(self.directory, file, self.thread_file.fd, offset, want)
        except OSError as error:
            raise SourceUnreadable(self.directory.format_path(file), error) from None

    def _open(self, number: int) -> None:
        """Makes a file this thread's open one. Raises OSError, Declined as `open_unchanged`."""
        self._close()
        self.thread_file.fd = file_readers.open_unchanged(
            self.directory, self.manifest.files[number]
        )
        # What lies behind the piece may be another node's to read: no readahead.
        os.posix_fadvise(self.thread_file.fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.thread_file.number = number
        self.files_read.add(number)

    def _close(self) -> None:
        if getattr(self.thread_file, "fd", -1) >= 0:
            os.close(self.thread_file.fd)
        self.thread_file.fd, self.thread_file.number = -1, -1

    def close(self) -> None:
        """Ends the processes that read for it."""
        self.readers.close()


def _select_first_request(pieces: Sequence[_FilePart]) -> list[_FilePart]:
    """Return the first pieces that one request of a reader takes. Pure."""
    room = MAX_REQUEST_BYTES
    for count, piece in enumerate(pieces):
        room -= len(piece.memory)
        if room < 0 or count == MAX_REQUEST_PIECES:
            return list(pieces[:count])
    return list(pieces)
