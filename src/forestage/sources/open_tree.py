"""A directory as a source of a copy: its manifest, and where each byte of its image is from."""

import os
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import ClassVar

import msgspec

from forestage.cache import allocation
from forestage.cache.allocation import ChunkMap
from forestage.cache.image import Access, Identity, Image
from forestage.cache.part import chunk_count
from forestage.clock import Clock
from forestage.sources import agreement, manifest, source
from forestage.sources.erofs import Layout
from forestage.sources.manifest import Manifest
from forestage.sources.source import Content, Truncated, Unreadable
from forestage.system.as_user import User
from forestage.units import printable

# A small file costs round trips more than bytes, so the files of one piece are read side by side.
# An engine thread has eight of them under way, and not eight chunks: the fewer chunks are read at
# once, the sooner each is whole, and other nodes can have it. With 32 chunks for a node, eight
# nodes shared a slow source between 128 chunks, none was whole for seconds, and so they read for
# one another what was under way: 1.33 to 1.5 times the tree.
WIDTH = 8  # files of one piece that are read at once
READERS = 32  # threads in which they are, of all pieces together
ROOTS_OWN = Access(0, 0, stat.S_IRUSR | stat.S_IWUSR)  # the rights are in the image


def image_of(found: Manifest, size: int) -> Image:
    """Pure: the image of this directory, of so many bytes."""
    top = found.files[0]
    identity = Identity(found.path, top.inode, size, top.mtime_ns, top.ctime_ns, tree=found.digest)
    return Image(identity, ROOTS_OWN, "data")


class FilePiece(msgspec.Struct, frozen=True):
    """Bytes of file `number` of the manifest, from `offset` on, and the memory that they fill."""

    number: int
    offset: int
    memory: memoryview


class OpenTree:
    """A directory as the stager's source: its manifest, and where each byte is from.

    `looked` is the wall clock's time before the first look. `lent`: another node has looked.
    """

    is_read_through: ClassVar[bool] = False

    def __init__(
        self,
        root: int,
        found: Manifest,
        made: Layout,
        user: User,
        max_files: int,
        clock: Clock,
        looked: float,
        lent: bool = False,
    ) -> None:
        self.root = root
        self.disk = os.fstat(root).st_dev
        self.found = found
        self.user = user
        self.max_files = max_files
        self.clock = clock
        self.looked = looked
        self.made = made
        self.lent = lent
        self.seen: set[int] = set()  # the files that were read here, by number
        self.maps: dict[int, ChunkMap] = {}  # by the size of a chunk
        self.own = threading.local()
        self.pool = ThreadPoolExecutor(READERS, "read-file")

    @property
    def image(self) -> Image:
        return image_of(self.found, self.made.size)

    def open(self) -> Content:
        """Returns it as the engines read it, once a further change must show in its times.

        What had not changed for long when it was first looked at needs no other look now. Whether
        somebody writes is asked of each file as it is opened; here where that says too little.
        """
        pause = agreement.settling(self.found, self.looked)
        if pause:
            self.clock.sleep(pause)
            self.must_be_unchanged()
        source.must_be_written_nowhere(self.root, self.found.path)
        head = len(self.made.head)
        return Content(-1, None, self.made.size, self.found.path, self.read, head, self.map_chunks)

    def map_chunks(self, chunk: int) -> ChunkMap:
        """Return what is known of its holes; what is in no file takes no space, and is not read.

        Only files that lack blocks are asked where their holes are. That is a read of them: each is
        the one that was looked at, and nobody writes to it. Raises Declined, Unreadable.
        """
        if chunk not in self.maps:
            lacking, made = set(self.found.sparse), self.made
            read = set(range(chunk_count(len(made.head), chunk)))
            asked = []
            for start, number in zip(made.starts, made.numbers, strict=True):
                if number in lacking:
                    asked.append((start, number))
                else:
                    end = start + self.found.files[number].size
                    read.update(range(start // chunk, chunk_count(end, chunk)))
            all_sets = read, set(read), set[int]()
            manifest.each_as(self.user, asked, partial(self._add_file, all_sets, chunk))
            self.maps[chunk] = ChunkMap(*all_sets)
        return self.maps[chunk]

    def _add_file(self, all_sets: tuple[set[int], ...], chunk: int, where: tuple[int, int]) -> None:
        """Adds to a map's sets those of a file, which is at this place of the image, and number."""
        start, number = where
        name, size = self._name(number), self.found.files[number].size
        try:
            self._open(number)
            try:
                found = allocation.map_chunks(self.own.fd, size, chunk, start)
                source.must_have_no_writer(self.own.fd, name)
            finally:
                self._close()
        except OSError as error:
            raise Unreadable(name, error) from None
        for numbers, of_file in zip(all_sets, found, strict=True):
            numbers.update(of_file)

    def must_be_unchanged(self) -> None:
        """Looks at all of it once more; where another node does so, at what was read here.

        Raises Declined.
        """
        source.must_be_written_nowhere(self.root, self.found.path)
        if self.lent:
            # What was read of an inode is shown by all its names.
            names = self.found.names
            read = (name for number in sorted(self.seen) for name in names.get(number, [number]))
            some = [self.found.files[number] for number in read]
            try:
                if manifest.still(self.root, [*manifest.sample(self.found), *some], self.user):
                    return
            except OSError:
                raise source.changed(self.found.path) from None
            raise source.changed(self.found.path)
        now = manifest.take(self.root, self.found.path, self.user, self.max_files)
        if now.digest != self.found.digest:
            raise source.changed(self.found.path)

    def read(self, start: int, want: memoryview) -> None:
        """Fills `want` with what begins at `start`. Raises Declined, Truncated, Unreadable.

        With the user's rights, whichever thread it is; that has its own back afterwards.
        """
        pieces = list(self._file_pieces(start, want))
        inner = pieces[1:-1]
        others = [
            self.pool.submit(self._read_files, inner[number::WIDTH])
            for number in range(1, min(WIDTH, len(inner)))
        ]
        try:
            # This thread has read the piece before, and so has its last file open, mostly.
            self._read_files([*pieces[:1], *inner[::WIDTH], *pieces[1:][-1:]])
        finally:
            wait(others)  # the memory is the caller's again once this returns
        for other in others:
            other.result()

    def _file_pieces(self, start: int, want: memoryview) -> Iterator[FilePiece]:
        """Fills what is in no file, and yields what is to be read of files, in their order."""
        made, end = self.made, start + len(want)
        head = made.head[start:end]
        want[: len(head)] = head
        at = start + len(head)
        place = max(0, made.first(at))
        while at < end:
            begins = made.starts[place] if place < len(made.starts) else made.size
            size = self.found.files[made.numbers[place]].size if begins < made.size else 0
            if at >= begins + size:  # to the next block's, or the image's, end
                after = made.starts[place + 1] if place + 1 < len(made.starts) else made.size
                count = min(end, after) - at
                want[at - start : at - start + count] = bytes(count)
                place += 1
            else:
                count = min(end, begins + size) - at
                memory = want[at - start :][:count]
                yield FilePiece(made.numbers[place], at - begins, memory)
            at += count

    def _read_files(self, pieces: Iterable[FilePiece]) -> None:
        for piece in pieces:
            self._read_file(piece.number, piece.offset, piece.memory)

    def _read_file(self, number: int, offset: int, want: memoryview) -> None:
        name = self._name(number)
        try:
            with manifest.acting(self.user):
                if getattr(self.own, "number", -1) != number:
                    self._open(number)
                done = 0
                while done < len(want):
                    count = os.preadv(self.own.fd, [want[done:]], offset + done)
                    if count == 0:
                        raise Truncated(name)
                    done += count
                source.must_have_no_writer(self.own.fd, name)
            os.posix_fadvise(self.own.fd, offset, len(want), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise Unreadable(name, error) from None

    def _name(self, number: int) -> str:
        """A file's path, for messages."""
        path = os.fsdecode(self.found.files[number].path)
        return printable(os.path.join(self.found.path, path))

    def _open(self, number: int) -> None:
        """Makes a file this thread's open one.

        Raises OSError, Declined where it has changed, or somebody writes to it.
        """
        file = self.found.files[number]
        self._close()
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        self.own.fd = os.open(file.path, flags, dir_fd=self.root)
        # What lies behind the piece may be another node's to read: no readahead.
        os.posix_fadvise(self.own.fd, 0, 0, os.POSIX_FADV_RANDOM)
        facts = os.fstat(self.own.fd)
        seen = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        # A file system that a user mounts there for a moment says what inode and times it likes.
        if seen != (self.disk, file.inode, file.size, file.mtime_ns, file.ctime_ns):
            raise source.changed(self._name(number))
        source.must_have_no_writer(self.own.fd, self._name(number))
        self.own.number = number
        self.seen.add(number)

    def _close(self) -> None:
        if getattr(self.own, "fd", -1) >= 0:
            os.close(self.own.fd)
        self.own.fd, self.own.number = -1, -1
