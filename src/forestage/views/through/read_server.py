"""Answers the reads of one image, from this node's copy or from the source, until its mounts go.

    receivers   take requests from the kernel and answer all but READs; they touch memory only
    at_copy     threads that read the node's disk
    at_source   threads that read the shared file system
    looker      opens the copy as it comes, and looks whether the source is still the same
    main        says that all is well, has an eye on reads that wait, adopts what others left

Source and disk may hang: then the threads that read there hang, and nothing else. A reader that is
killed is answered at once, by whoever receives its INTERRUPT. The process may be killed at any
instruction (views/through/server_memory.py). It ends by itself when the kernel says that no mount
is left, and with any thread that fails: the keeper starts another.
"""

import contextlib
import errno
import mmap
import os
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from forestage import log
from forestage.cache import hot_pieces, source_image
from forestage.cache.arrival_map import NOW, SOON, WantLevel
from forestage.cache.lease import LeaseDirectory
from forestage.cache.part import HOT_PIECE, chunk_count
from forestage.cache.source_image import SourceImage
from forestage.errors import Failed
from forestage.system import fuse
from forestage.system.fuse import FuseAttributes, FuseOpcode, FuseRequest
from forestage.views.through.local_image import LocalImage
from forestage.views.through.read_policy import ArrivalMonitor, ReadStreams
from forestage.views.through.server_memory import PendingRead, ReadThroughState, RequestJournal

RECEIVERS = 2  # threads
AT_COPY, AT_SOURCE = 3, 16  # threads
BEAT = 0.1  # seconds between two looks of the main thread
NEED_BEATS = 20  # of the former, between two looks whether a job needs the image
WAITING_BEAT = 0.004  # seconds, while a reader waits for the copy
LOOK = 0.1  # seconds between two looks for the copy
SOURCE_LOOK = 1.0  # seconds between two looks at the source's attributes
STUCK = 3.0  # seconds for a read of the node's disk; then the source answers
SLOW = 0.5  # seconds for a read of the source; then the copy answers, if it has come by now
ENDS = 3  # reads in a row that find the end of the source, before it counts
TRIES = 100  # servers that may end over one read before it is refused
_KILLED = 1 << (signal.SIGKILL - 1)  # set for each thread, whatever signal kills its process
GONE = 3  # exit status: no mount is left


class ServedImage(msgspec.Struct, frozen=True):
    """What is served: the image, its open source, what is here of it, and who needs it."""

    image: SourceImage
    source: int
    local: LocalImage
    leases: LeaseDirectory

    @property
    def attributes(self) -> FuseAttributes:
        identity, access = self.image.identity, self.image.access
        return FuseAttributes(
            *(identity.inode, identity.size, identity.mtime_ns, identity.ctime_ns),
            *(stat.S_IFREG | access.mode, access.uid, access.gid, access.acl),
        )


class ReadServer:
    """One generation. `line` is a descriptor of /dev/fuse."""

    def __init__(
        self,
        served: ServedImage,
        line: int,
        memory: RequestJournal,
        common: ReadThroughState,
        earlier: Sequence[RequestJournal],
    ) -> None:
        self.served = served
        self.file = served.attributes
        self.line = line
        self.memory = memory
        self.common = common
        self.earlier = list(earlier)
        self.local = served.local
        self.source_is = served.image.identity
        self.streams = ReadStreams()
        self.counting = threading.Lock()
        self.free = deque(range(memory.records))
        self.pending: dict[int, int] = {}  # a read's `unique`: its record
        self.interrupted: dict[int, int] = {}  # the same: the thread that reads
        self.waiting: deque[PendingRead] = deque()
        self.stir = threading.Event()  # one more waits
        self.early: deque[PendingRead] = deque()
        self.looked = False
        self.began = time.monotonic()
        self.at_copy: SimpleQueue[PendingRead] = SimpleQueue()
        self.at_source: SimpleQueue[tuple[PendingRead, WantLevel]] = SimpleQueue()
        self.on_disk: dict[int, tuple[PendingRead, float]] = {}
        self.on_source: dict[int, tuple[PendingRead, float]] = {}
        self.disk_hangs = False
        self.gone = False  # no mount is left
        self.hot: set[int] = set()
        self.arrivals = ArrivalMonitor(self.began)

    def run(self) -> NoReturn:
        """Serves until no mount is left. Never returns."""
        works: list[Callable[[], None]] = [
            partial(self._receive, number) for number in range(self.memory.receivers)
        ]
        works += [self._read_copy] * AT_COPY + [self._read_source] * AT_SOURCE + [self._look]
        for work in works:
            threading.Thread(target=_run_or_exit, args=(work,), daemon=True).start()
        _run_or_exit(self._watch)
        os._exit(GONE)

    # Requests

    def _receive(self, number: int) -> None:
        slot = self.memory.slot(number)
        # The page must be there: for one that is not, a process that is being killed gets no memory
        # any more, and the kernel would answer the request with EIO.
        self.memory.clear_slot(number)
        while True:
            try:
                os.readv(self.line, [slot])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    self.gone = True
                    return
                if error.errno not in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    raise
                continue
            self._take(slot)
            self.memory.clear_slot(number)

    def _take(self, slot: memoryview) -> None:
        request = fuse.parse_request(slot)
        if request is None:
            return
        if request.op == FuseOpcode.READ:
            offset, size = fuse.parse_read_range(request)
            size = max(0, min(size, self.file.size - offset))
            self._accept(PendingRead(request.unique, offset, size, pid=request.pid))
        elif request.op == FuseOpcode.INTERRUPT:
            self._interrupt(request)
        else:
            if (
                request.op == FuseOpcode.INIT
                and self.file.acl
                and not fuse.has_acl_support(request)
            ):
                self.common.hides_acl = 1
            answer = fuse.compute_reply(request, self.file)
            if answer is not None:
                fuse.send_reply(self.line, request.unique, answer[1], error=answer[0])

    def _accept(self, read: PendingRead) -> None:
        """Notes a READ and hands it to who will answer it."""
        if read.unique in self.pending:
            return
        if not read.size or not self.free:
            error = errno.EAGAIN if read.size else 0
            fuse.send_reply(self.line, read.unique, error=error)
            return
        number = self.free.popleft()
        self.memory.write(number, read)
        self.pending[read.unique] = number
        self.common.first_read = self.common.first_read or time.monotonic_ns()
        if not self.common.hot_known:
            end = chunk_count(read.offset + read.size, HOT_PIECE)
            self.hot.update(range(read.offset // HOT_PIECE, end))
        self._hand_on(read)

    def _hand_on(self, read: PendingRead) -> None:
        if not self.looked:
            self.early.append(read)
            return
        whole = self.local.whole
        straight = not whole and self.streams.straight(read.offset, read.size)
        if self.disk_hangs:
            self._from_source(read)
        elif whole or self.local.has(read.offset, read.size):
            self._from_copy(read)
        elif straight and self._arrives():
            self.waiting.append(read)
            self._want(read, NOW)  # after that: see _watch
            self.stir.set()
        else:
            self._from_source(read, NOW if straight else SOON)

    def _interrupt(self, request: FuseRequest) -> None:
        """Answers for a reader that is being killed, whatever its read waits for."""
        unique = fuse.parse_interrupted_id(request)
        number = self.pending.get(unique)
        if number is None:
            # Another thread may be about to note it. EAGAIN has the kernel tell us once more,
            # unless the read has been answered.
            time.sleep(0.001)
            fuse.send_reply(self.line, request.unique, error=errno.EAGAIN)
        else:
            self.interrupted[unique] = self.memory.read(number).pid
            self._end_killed()

    def _end_killed(self) -> None:
        """Answers reads of threads that are being killed.

        The kernel tells of a read's first signal only. If that does not kill, the read goes on:
        programs expect EINTR of no file.
        """
        for unique, pid in list(self.interrupted.items()):
            if unique not in self.pending:
                self.interrupted.pop(unique, None)
            elif _is_killed(pid):
                self.interrupted.pop(unique, None)
                fuse.send_reply(self.line, unique, error=errno.EINTR)
                number = self.pending.pop(unique, None)
                if number is not None:
                    self._forget(number)

    def _reply(self, read: PendingRead, data: memoryview | bytes = b"", error: int = 0) -> None:
        if read.unique in self.pending:
            fuse.send_reply(self.line, read.unique, data, error=error)
            number = self.pending.pop(read.unique, None)
            if number is not None:
                self._forget(number)

    def _forget(self, number: int) -> None:
        self.memory.clear(number)
        self.free.append(number)

    # Bytes

    def _read_copy(self) -> None:
        buffer = memoryview(mmap.mmap(-1, fuse.MAX_READ))
        while True:
            read = self.at_copy.get()
            if read.unique in self.pending:
                if self.local.read(read.offset, buffer[: read.size]):
                    self._count(read, of_source=False)
                    self._reply(read, buffer[: read.size])
                else:
                    self._copy_failed(read)
            self.on_disk.pop(read.unique, None)
            self.disk_hangs = False
            if self.local.spoilt:
                self._evict_spoilt()

    def _copy_failed(self, read: PendingRead) -> None:
        """Has the source answer; once the entry is what is shown, only if it has the same bytes."""
        if self.common.whole:
            with contextlib.suppress(OSError):  # the read will say so
                facts = os.fstat(self.served.source)
                if source_image.identity_from_stat(facts, self.source_is.path) != self.source_is:
                    self._reply(read, error=errno.EIO)
                    return
        self._from_source(read)

    def _evict_spoilt(self) -> None:
        """After a bad block: the next job is to have no hit that ends in an I/O error."""
        key = self.served.image.key
        try:
            self.local.evict_spoilt()
            log.write_log_line(
                f"through key={key} result=evicted detail='it cannot be read'", by_slurm=True
            )
        except (Failed, OSError) as error:
            log.write_log_line(
                f"through key={key} result=failed detail={str(error)!r}", by_slurm=True
            )

    def _read_source(self) -> None:
        buffer = memoryview(mmap.mmap(-1, fuse.MAX_READ))
        while True:
            read, level = self.at_source.get()
            if read.adopted > TRIES:
                self._reply(read, error=errno.EIO)
            elif read.unique in self.pending:
                self._want(read, level)
                try:
                    count = _read_until_full(self.served.source, buffer[: read.size], read.offset)
                except OSError as error:
                    self._reply(read, error=error.errno or errno.EIO)
                else:
                    self._reply(read, buffer[:count])
                    self._count(read, of_source=True)
                self._note_reads()
            self.on_source.pop(read.unique, None)

    def _want(self, read: PendingRead, level: WantLevel) -> None:
        """Tells the stager that a job reads there, and from where."""
        readers = self.local.readers
        if readers is None:
            return
        if level == SOON:
            readers.mark_source_read(time.monotonic_ns())
        chunk, inode = readers.chunk, self.local.inode
        for number in range(read.offset // chunk, chunk_count(read.offset + read.size, chunk)):
            rest = self.file.size - number * chunk
            if not readers.has_arrived(number * chunk, min(chunk, rest), inode):
                readers.request_chunk(number, level)

    def _count(self, read: PendingRead, of_source: bool) -> None:
        readers = self.local.readers
        if readers is not None and not self.common.whole:
            with self.counting:
                readers.count_read(read.size, of_source)

    def _arrives(self) -> bool:
        """Whether the copy is under way, or about to begin."""
        return self.local.is_copied and self.arrivals.come

    # The main thread

    def _watch(self) -> None:
        seen: dict[tuple[int, int], bytes] = {}
        next_look, told = 0.0, self.local.readers
        while not self.gone:
            readers = self.local.readers
            if readers is not told:  # a copy has begun: it does not know yet what is waited for
                told = readers
                for read in list(self.waiting):
                    self._want(read, NOW)
            pieces = readers.count_arrived() if readers is not None else -1
            self.arrivals.look(pieces, bool(self.waiting), time.monotonic())
            self._hand_on_early()
            self._hand_on_waiting()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + BEAT
                self.common.beat += 1
                self._note_reads()
                self._give_up_disk()
                self._give_up_source()
                self._end_killed()
                self._adopt_hung(seen)
                self._note_need()
            self.stir.wait(WAITING_BEAT if self.waiting or not self.looked else BEAT)
            self.stir.clear()

    def _note_reads(self) -> None:
        """Has the copy keep away from the source while it takes long to answer a job."""
        readers = self.local.readers
        if readers is not None and self.on_source:
            readers.mark_source_read(time.monotonic_ns())

    def _note_need(self) -> None:
        if self.common.beat % NEED_BEATS == 0:
            with contextlib.suppress(Failed, OSError):  # a damaged lease may be of who needs it
                self.common.unneeded = not self._is_needed()

    def _is_needed(self) -> bool:
        """Whether a job holds a lease on the image. Raises Failed, OSError."""
        return self.served.image.key in self.served.leases.leased_keys()  # noqa: SIM118

    def _hand_on_early(self) -> None:
        """Hands on what came before the looker's first look.

        A server before this one may have found that the copy is worthless, or the source.
        """
        self.looked = self.looked or time.monotonic() - self.began > STUCK
        if self.looked:
            for _ in range(len(self.early)):
                self._hand_on(self.early.popleft())

    def _hand_on_waiting(self) -> None:
        arrives = self._arrives()
        for _ in range(len(self.waiting)):
            read = self.waiting.popleft()
            if read.unique not in self.pending:
                continue
            if self.local.has(read.offset, read.size):
                self._from_copy(read)
            elif arrives:
                self.waiting.append(read)
            else:
                self._from_source(read, NOW)

    def _from_copy(self, read: PendingRead) -> None:
        self.on_disk[read.unique] = read, time.monotonic()
        self.at_copy.put(read)

    def _from_source(self, read: PendingRead, level: WantLevel = SOON) -> None:
        """Has the source answer; `level` is how much its chunk is wanted."""
        self.on_source[read.unique] = read, time.monotonic()
        self.at_source.put((read, level))

    def _give_up_source(self) -> None:
        """Has the copy answer what the source does not, as soon as it has come."""
        late = time.monotonic() - SLOW
        for unique, (read, since) in list(self.on_source.items()):
            if unique not in self.pending:
                self.on_source.pop(unique, None)
            elif since < late and not self.disk_hangs and self.local.has(read.offset, read.size):
                self.on_source.pop(unique, None)
                self._from_copy(read)

    def _give_up_disk(self) -> None:
        """Has the source answer what the node's disk does not."""
        late = time.monotonic() - STUCK
        for unique, (read, since) in list(self.on_disk.items()):
            if since < late:
                self.disk_hangs = True  # until it answers, no other read has to wait for it
                self.on_disk.pop(unique, None)
                self._from_source(read)

    # What other generations left

    def _adopt(self, generation: RequestJournal) -> None:
        for number in range(generation.receivers):
            slot = generation.slot(number)
            self._take(slot)
            generation.clear_slot(number)
        for number, read in list(generation.reads()):
            self._accept(msgspec.structs.replace(read, adopted=read.adopted + 1))
            self.interrupted[read.unique] = read.pid  # it may have been told of that
            generation.clear(number)

    def _adopt_hung(self, seen: dict[tuple[int, int], bytes]) -> None:
        """Adopts from servers that were killed and have not ended: a thread hangs in the kernel.

        None of their instructions runs any more, but the kernel may still deliver a request. So
        they are looked at again and again, and a slot counts once it looked the same twice.
        """
        for generation in [one for one in self.earlier if not one.ended]:
            found = [bytes(generation.slot(n)) for n in range(generation.receivers)]
            place = id(generation)
            if all(seen.get((place, n)) == slot for n, slot in enumerate(found)):
                self._adopt(generation)
            seen.update({(place, n): slot for n, slot in enumerate(found)})
        for generation in [one for one in self.earlier if one.ended]:
            self._adopt(generation)
            self.earlier.remove(generation)

    # The looker

    def _look(self) -> None:
        if self.common.changed:
            self.local.drop()
        elif not self.common.whole:  # else the entry is what is shown, whatever the source is now
            self._look_at_source()
        self._look_at_copy()
        self.looked = True
        while not (self.local.whole and self.common.hot_known):
            self._look_at_source()
            for _ in range(round(SOURCE_LOOK / LOOK)):
                self._look_at_copy()
                time.sleep(LOOK)
            self._look_at_stager()
            self._keep_hot()

    def _look_at_copy(self) -> None:
        with contextlib.suppress(OSError):  # the disk's fault; the source has the bytes
            self.local.look()
            if self.local.whole:
                self.common.whole = 1

    def _look_at_stager(self) -> None:
        """Tells the keeper, which may start another, whether a copy that is needed has none."""
        with contextlib.suppress(Failed, OSError):
            gone = not self.common.changed and self.local.abandoned()
            self.common.abandoned = gone and self._is_needed()

    def _keep_hot(self) -> None:
        """Once the first minute is over."""
        since = time.monotonic_ns() - self.common.first_read
        if self.common.first_read and since > hot_pieces.WINDOW * 1e9 and not self.common.hot_known:
            self.common.hot_known = 1
            with contextlib.suppress(OSError):  # only a matter of speed, next time
                hot_pieces.save_hot_map(self.local.cache, self.served.image, self.hot)

    def _look_at_source(self) -> None:
        """A source that was changed in place makes the copy worthless, and what is cached of it."""
        try:
            facts = os.fstat(self.served.source)
        except OSError:
            return  # reads will say so
        found = source_image.identity_from_stat(facts, self.source_is.path)
        if found != self.source_is and not self.local.whole:
            self.local.drop()
            fuse.invalidate_cache(self.line)
            # Last: a server that is killed before leaves all of it to the next.
            self.source_is = found
            self.common.changed = 1


def _is_killed(pid: int) -> bool:
    """Whether a thread will end as soon as its system call does; true of an unknown one."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return True
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(signals & _KILLED for signals in pending)


def _read_until_full(fd: int, into: memoryview, offset: int) -> int:
    """Bytes read: fewer than asked for only at the end of the file. Raises OSError.

    A FUSE that knows files by their paths (sshfs) gives an open one the size of what was put in its
    place, for a moment: a read that was under way ends there, the next one does not.
    """
    done = ends = 0
    while done < len(into) and ends < ENDS:
        count = os.preadv(fd, [into[done:]], offset + done)
        ends = 0 if count else ends + 1
        done += count
    return done


def _run_or_exit(work: Callable[[], None]) -> None:
    """Ends the process with whatever ends a thread: another server is better than half of one."""
    ended = False
    try:
        work()
        ended = True
    finally:
        if not ended:
            log.write_log_line(f"through result=failed detail={sys.exc_info()[1]!r}", by_slurm=True)
            os._exit(1)
