"""Shared memory of a keeper and its servers: what was received, and not yet answered.

Each server, a *generation*, has memory of its own, so that one which was replaced while it still
hung can spoil nothing of the next:

    received  a slot for each thread that receives; the kernel copies a request straight into it
    journal   a record for each READ that waits for its answer

A request is in its slot from the moment the kernel counts it as delivered. The thread writes a READ
into the journal before it clears the slot; the record is cleared when the answer is out. So a
server may be killed at any instruction: the next one finds each unanswered request in one of the
two, or in both, and adopts it.
"""

import ctypes
import mmap
import struct
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from forestage.system.fuse import REQUEST_BYTES

RECORDS = 16384
"""READs that may wait at once: each reader waits for one, the kernel's read-ahead for thousands."""

_NUMBERS = ("beat", "first_read", "device")
_FLAGS = ("settled", "hides_acl", "changed", "whole", "unneeded", "hot_known", "abandoned")
_RECORD = struct.Struct("<QQIH2xI4x")


class PendingRead(msgspec.Struct, frozen=True):
    """A READ: `size` bytes from `offset` on, asked as `unique`.

    `servers_ended` counts the servers that ended while it waited; `pid` is the thread's that reads.
    """

    unique: int
    offset: int
    size: int
    servers_ended: int = 0
    pid: int = 0


class RequestJournal:
    """The memory of one server. Made by the keeper; written by that server and, later, the next."""

    def __init__(self, receivers: int) -> None:
        self.receivers = receivers
        self.records = RECORDS
        self._journal = receivers * REQUEST_BYTES
        self._end = self._journal + RECORDS * _RECORD.size
        self._memory = mmap.mmap(-1, self._end + 1)

    @property
    def has_ended(self) -> bool:
        """Whether the keeper has reaped this server: nothing is written here any more."""
        return self._memory[self._end] == 1

    def mark_ended(self) -> None:
        self._memory[self._end] = 1

    def request_slot(self, receiver: int) -> memoryview:
        start = receiver * REQUEST_BYTES
        return memoryview(self._memory)[start : start + REQUEST_BYTES]

    def clear_slot(self, receiver: int) -> None:
        # The request's length: 0 says that nothing is there.
        self._memory[receiver * REQUEST_BYTES : receiver * REQUEST_BYTES + 4] = bytes(4)

    def write_record(self, number: int, read: PendingRead) -> None:
        # The unique last: a record counts once that is there.
        at = self._journal + number * _RECORD.size
        data = _RECORD.pack(*msgspec.structs.astuple(read))
        self._memory[at + 8 : at + _RECORD.size] = data[8:]
        self._memory[at : at + 8] = data[:8]

    def read_record(self, number: int) -> PendingRead:
        return PendingRead(
            *_RECORD.unpack_from(self._memory, self._journal + number * _RECORD.size)
        )

    def clear_record(self, number: int) -> None:
        at = self._journal + number * _RECORD.size
        self._memory[at : at + 8] = bytes(8)

    def list_reads(self) -> Iterator[tuple[int, PendingRead]]:
        """The records that wait, each with its number."""
        journal = memoryview(self._memory)[self._journal : self._end]
        for number, fields in enumerate(_RECORD.iter_unpack(journal)):
            if fields[0]:
                yield number, PendingRead(fields[0], *fields[1:])

    def is_empty(self) -> bool:
        """Whether there is nothing to adopt."""
        slots = [self.request_slot(number)[:4] for number in range(self.receivers)]
        return not any(map(any, slots)) and next(self.list_reads(), None) is None


class ReadThroughState(ctypes.Structure):
    """What all servers of an image, and its keeper, know of how it is read.

    `beat` grows as long as the server is well. `first_read` is in ns of CLOCK_MONOTONIC, 0 before
    it. `device` is the file's st_dev.
    """

    beat: int
    first_read: int
    device: int
    settled: int  # the kernel knows what it need not ask
    hides_acl: int  # the kernel cannot keep to the file's ACL
    changed: int  # the source is another file by now: no byte of the copy any more
    whole: int  # the entry is published, all reads come from it
    unneeded: int  # no job holds a lease on the image
    hot_known: int  # the hot map is made
    abandoned: int  # nobody copies what a job needs

    _fields_: ClassVar = [
        *((name, ctypes.c_uint64) for name in _NUMBERS),
        *((name, ctypes.c_uint8) for name in _FLAGS),
    ]

    @classmethod
    def create_shared(cls) -> "ReadThroughState":
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))
