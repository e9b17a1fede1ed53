"""The bytes of an image that are on this node: a part that grows, then the entry.

`open_latest` goes to the cache's disk, which may hang, and belongs to a thread of its own. All else
asks memory, but for the reading itself.
"""

import contextlib
import errno
import os
import shutil  # noqa: F401 - what evicts imports it late: Python may be upgraded under a server
from pathlib import Path

from forestage.cache.arrival_map import ArrivalMap
from forestage.cache.layout import Cache, open_copy
from forestage.cache.source_image import SourceImage
from forestage.system import lock


class _OpenCopy:
    """An open image; `readers` is None where it is the entry.

    The descriptor closes with the last that uses it: a thread may still read when another one has
    put a new file in its place.
    """

    def __init__(self, path: Path, readers: ArrivalMap | None) -> None:
        self._file = open_copy(path)
        self.fd = self._file.fileno()
        self.inode = os.fstat(self.fd).st_ino
        self.readers = readers
        if readers is not None:
            # No read-ahead: what comes next in a part may not be there yet.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def clear_count(self) -> int:
        return self.readers.clear_count() if self.readers is not None else 0

    def has_bytes(self, offset: int, size: int) -> bool:
        return self.readers is None or self.readers.has_arrived(offset, size, self.inode)


class LocalImage:
    """What this node has of the image; `directory` is that of cache/arrival_map.py."""

    def __init__(self, cache: Cache, image: SourceImage, directory: Path) -> None:
        self.cache = cache
        self.image = image
        self.directory = directory
        self._lock = cache.key_lock(image.key)
        self.readers: ArrivalMap | None = None
        self.is_copied = False  # a copy is under way, or about to begin
        self._file: _OpenCopy | None = None
        self._past: _OpenCopy | None = None
        self._seen = 0, 0  # the inodes of the marks and of the part's image that are open
        self._dropped = False
        self._is_evicted = False
        self._is_free = False  # the key's lock
        self.unreadable_inode = 0  # the inode of an entry that gave an I/O error

    @property
    def is_whole(self) -> bool:
        return self._file is not None and self._file.readers is None

    @property
    def inode(self) -> int:
        """Of the image that is open; 0 for none."""
        file = self._file
        return file.inode if file is not None else 0

    def open_latest(self) -> None:
        """Opens what is there by now. Raises OSError where the disk is at fault."""
        # Not before the next look is it closed: that may take the disk long, and a thread that only
        # asks `has_bytes` must not be the last that knows the file.
        self._past = self._file
        if self.is_whole or self._dropped:
            return
        try:
            if self.cache.find_entry(self.image) is not None:
                self._file = _OpenCopy(self.cache.image_path(self.image.key), None)
                return
            marks = (self.directory / "pieces").stat().st_ino
            path = self.cache.part(self.image.key).image
            if (marks, path.stat().st_ino) != self._seen:
                self.readers = ArrivalMap(self.directory, self.image.size)
                self._file = _OpenCopy(path, self.readers)
                self._seen = marks, self._file.inode
        except FileNotFoundError:  # no copy is under way, or it has ended this moment
            self._file = self.readers = None
            self._seen = 0, 0
        self.is_copied = self.readers is not None or self._is_about_to_begin()

    def _is_about_to_begin(self) -> bool:
        """Whether a stager has the key, and stands in no queue. Raises OSError."""
        if lock.is_free(self._lock):
            return False
        owner = self.cache.part(self.image.key).find_record()
        return owner is None or owner.placed

    def is_abandoned(self) -> bool:
        """Whether a part is left of which nobody made a copy at this call and at the last.

        Its stager was killed, or met an error of source or disk. One that was told to stop says
        so, and one that had no room, or found the source changed, leaves no part. Raises OSError.
        """
        was_free, self._is_free = self._is_free, lock.is_free(self._lock)
        if not (was_free and self._is_free):  # a new one may be about to take it
            return False
        owner = self.cache.part(self.image.key).find_record()
        return not self.is_whole and owner is not None and not owner.stopped

    def stop_using(self) -> None:
        """Uses nothing of it any more."""
        self._dropped = True
        self._past = self._file
        self._file = self.readers = None
        self.is_copied = False

    def evict_unreadable(self) -> None:
        """Evicts the entry that gave an I/O error. Raises OSError, Failed.

        What is open here stays open: its other blocks are right. Redirects, if it has any, go with
        the next Prolog that names the path.
        """
        inode, self.unreadable_inode = self.unreadable_inode, 0
        with (
            lock.held(self.cache.space_lock, lock.SPACE_TIMEOUT),
            contextlib.suppress(FileNotFoundError),  # somebody else was faster
        ):
            if self.cache.image_path(self.image.key).stat().st_ino == inode:
                self.cache.evict_entry(self.image.key)
        self._is_evicted = True
        self.cache.delete_evicted()

    def has_bytes(self, offset: int, size: int) -> bool:
        file = self._file
        return file is not None and file.has_bytes(offset, size)

    def read_into(self, offset: int, into: memoryview) -> bool:
        """Fills `into`; False where the bytes are not there, or not there any more."""
        file = self._file
        if file is None:
            return False
        before = file.clear_count()
        if not file.has_bytes(offset, len(into)):
            return False
        done = 0
        try:
            while done < len(into):
                count = os.preadv(file.fd, [into[done:]], offset + done)
                if not count:
                    return False
                done += count
        except OSError as error:  # this node's disk: the source has the same
            if error.errno == errno.EIO and file.readers is None and not self._is_evicted:
                self.unreadable_inode = file.inode
            return False
        # A stager clears marks before it overwrites anything, and may set them again in between.
        same = before == file.clear_count() and file.has_bytes(offset, len(into))
        return same and not self._dropped
