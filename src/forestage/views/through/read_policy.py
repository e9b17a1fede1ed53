"""Who answers a read of an image that is still being copied: the copy, or the source.

in the copy                     the copy
elsewhere, here and there       the source, at once; its chunk is copied soon
elsewhere, straight through     the copy, when it arrives: that is read ahead by several threads,
                                and reading the same bytes twice would slow both down; for a moment
                                also while it is about to begin, else each node of a job reads the
                                source from its head on
the same, but nothing arrives   the source; the copy does not make way for such reads, else they
                                would keep it from arriving for as long as they go on
"""

import threading

RUN = 1024 * 1024
"""Bytes; who reads more of them in one go reads straight through.

The kernel reads as many ahead at once (fuse.MAX_READ), but no more, of somebody who hops.
"""

REORDERED = 2 * 1024 * 1024  # bytes by which the kernel's read-aheads may come out of order
DENSE = 0.75  # of a run that must have been read
STREAMS = 64  # readers that are told apart
PATIENCE, LONGEST = 1.0, 10.0  # seconds without a new piece, after which no reader waits any more
BEGIN = 3.0  # seconds, of the same, for a copy that has its place and has not begun


def piece_timeout(last: float) -> float:
    """Pure: seconds to wait for a new piece, where the last one took so many."""
    return min(LONGEST, max(PATIENCE, 4 * last))


class ArrivalMonitor:
    """Tells whether the copy comes. Only the time in which a reader waits for it counts."""

    def __init__(self, now: float) -> None:
        self.is_coming = True
        self._pieces = 0
        self._since = now  # when the last piece came, or a reader began to wait
        self._patience = PATIENCE

    def update(self, pieces: int, waits: bool, now: float) -> None:
        """Takes how many pieces are here, and whether a reader waits for another one.

        `pieces` is -1 before the copy has begun.
        """
        if pieces != self._pieces:
            self._patience = piece_timeout(now - self._since)
            self._pieces, self._since, self.is_coming = pieces, now, True
        elif not waits:
            self._since = now
        elif now - self._since >= (self._patience if pieces >= 0 else BEGIN):
            self.is_coming = False


class ReadStreams:
    """Tells who reads straight through, by where reads begin and end."""

    def __init__(self) -> None:
        # By where one ends: where it began, and how many bytes of it were read; oldest first.
        self._runs: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def is_sequential(self, offset: int, size: int) -> bool:
        """Notes a read; returns whether it is of a run of more than RUN bytes."""
        with self._lock:
            return self._add_read(offset, size) > RUN

    def _add_read(self, offset: int, size: int) -> int:
        """The bytes of the run so far, with this read.

        Of a run most is read: somebody who hops about in a part of the image is not straight.
        """
        near = (at for at in self._runs if abs(offset - at) <= REORDERED)
        at = next(near, None)
        start, run = self._runs.pop(at) if at is not None else (offset, 0)
        end = max(offset + size, at or 0)
        if run + size < DENSE * (end - start):
            start, end, run = offset, offset + size, 0
        self._runs[end] = min(start, offset), run + size
        if len(self._runs) > STREAMS:
            del self._runs[next(iter(self._runs))]
        return run + size
