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
    """One generation. `fuse_fd` is a descriptor of /dev/fuse."""

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
        self.fuse_fd = line
        self.memory = memory
        self.shared_state = common
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
        works += (
            [self._serve_from_copy] * AT_COPY
            + [self._serve_from_source] * AT_SOURCE
            + [self._run_looker]
        )
        for work in works:
            threading.Thread(target=_run_or_exit, args=(work,), daemon=True).start()
        _run_or_exit(self._run_main_loop)
        os._exit(GONE)

    # Requests

    def _receive(self, number: int) -> None:
        slot = self.memory.request_slot(number)
        # The page must be there: for one that is not, a process that is being killed gets no memory
        # any more, and the kernel would answer the request with EIO.
        self.memory.clear_slot(number)
        while True:
            try:
                os.readv(self.fuse_fd, [slot])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    self.gone = True
                    return
                if error.errno not in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    raise
                continue
            self._dispatch_request(slot)
            self.memory.clear_slot(number)

    def _dispatch_request(self, slot: memoryview) -> None:
        request = fuse.parse_request(slot)
        if request is None:
            return
        if request.op == FuseOpcode.READ:
            offset, size = fuse.parse_read_range(request)
            size = max(0, min(size, self.file.size - offset))
            self._journal_read(PendingRead(request.unique, offset, size, pid=request.pid))
        elif request.op == FuseOpcode.INTERRUPT:
            self._handle_interrupt(request)
        else:
            if (
                request.op == FuseOpcode.INIT
                and self.file.acl
                and not fuse.has_acl_support(request)
            ):
                self.shared_state.hides_acl = 1
            answer = fuse.compute_reply(request, self.file)
            if answer is not None:
                fuse.send_reply(self.fuse_fd, request.unique, answer[1], error=answer[0])

    def _journal_read(self, read: PendingRead) -> None:
        """Notes a READ and hands it to who will answer it."""
        if read.unique in self.pending:
            return
        if not read.size or not self.free:
            error = errno.EAGAIN if read.size else 0
            fuse.send_reply(self.fuse_fd, read.unique, error=error)
            return
        number = self.free.popleft()
        self.memory.write_record(number, read)
        self.pending[read.unique] = number
        self.shared_state.first_read = self.shared_state.first_read or time.monotonic_ns()
        if not self.shared_state.hot_known:
            end = chunk_count(read.offset + read.size, HOT_PIECE)
            self.hot.update(range(read.offset // HOT_PIECE, end))
        self._dispatch_read(read)

    def _dispatch_read(self, read: PendingRead) -> None:
        if not self.looked:
            self.early.append(read)
            return
        whole = self.local.is_whole
        straight = not whole and self.streams.is_sequential(read.offset, read.size)
        if self.disk_hangs:
            self._queue_for_source(read)
        elif whole or self.local.has_bytes(read.offset, read.size):
            self._queue_for_copy(read)
        elif straight and self._is_copy_coming():
            self.waiting.append(read)
            self._request_chunks(read, NOW)  # after that: see _run_main_loop
            self.stir.set()
        else:
            self._queue_for_source(read, NOW if straight else SOON)

    def _handle_interrupt(self, request: FuseRequest) -> None:
        """Answers for a reader that is being killed, whatever its read waits for."""
        unique = fuse.parse_interrupted_id(request)
        number = self.pending.get(unique)
        if number is None:
            # Another thread may be about to note it. EAGAIN has the kernel tell us once more,
            # unless the read has been answered.
            time.sleep(0.001)
            fuse.send_reply(self.fuse_fd, request.unique, error=errno.EAGAIN)
        else:
            self.interrupted[unique] = self.memory.read_record(number).pid
            self._answer_killed_readers()

    def _answer_killed_readers(self) -> None:
        """Answers reads of threads that are being killed.

        The kernel tells of a read's first signal only. If that does not kill, the read goes on:
        programs expect EINTR of no file.
        """
        for unique, pid in list(self.interrupted.items()):
            if unique not in self.pending:
                self.interrupted.pop(unique, None)
            elif _is_killed(pid):
                self.interrupted.pop(unique, None)
                fuse.send_reply(self.fuse_fd, unique, error=errno.EINTR)
                number = self.pending.pop(unique, None)
                if number is not None:
                    self._free_record(number)

    def _reply(self, read: PendingRead, data: memoryview | bytes = b"", error: int = 0) -> None:
        if read.unique in self.pending:
            fuse.send_reply(self.fuse_fd, read.unique, data, error=error)
            number = self.pending.pop(read.unique, None)
            if number is not None:
                self._free_record(number)

    def _free_record(self, number: int) -> None:
        self.memory.clear_record(number)
        self.free.append(number)

    # Bytes

    def _serve_from_copy(self) -> None:
        buffer = memoryview(mmap.mmap(-1, fuse.MAX_READ))
        while True:
            read = self.at_copy.get()
            if read.unique in self.pending:
                if self.local.read_into(read.offset, buffer[: read.size]):
                    self._count_read(read, of_source=False)
                    self._reply(read, buffer[: read.size])
                else:
                    self._retry_from_source(read)
            self.on_disk.pop(read.unique, None)
            self.disk_hangs = False
            if self.local.unreadable_inode:
                self._evict_unreadable()

    def _retry_from_source(self, read: PendingRead) -> None:
        """Has the source answer; once the entry is what is shown, only if it has the same bytes."""
        if self.shared_state.whole:
            with contextlib.suppress(OSError):  # the read will say so
                facts = os.fstat(self.served.source)
                if source_image.identity_from_stat(facts, self.source_is.path) != self.source_is:
                    self._reply(read, error=errno.EIO)
                    return
        self._queue_for_source(read)

    def _evict_unreadable(self) -> None:
        """After a bad block: the next job is to have no hit that ends in an I/O error."""
        key = self.served.image.key
        try:
            self.local.evict_unreadable()
            log.write_log_line(
                f"through key={key} result=evicted detail='it cannot be read'", by_slurm=True
            )
        except (Failed, OSError) as error:
            log.write_log_line(
                f"through key={key} result=failed detail={str(error)!r}", by_slurm=True
            )

    def _serve_from_source(self) -> None:
        buffer = memoryview(mmap.mmap(-1, fuse.MAX_READ))
        while True:
            read, level = self.at_source.get()
            if read.servers_ended > TRIES:
                self._reply(read, error=errno.EIO)
            elif read.unique in self.pending:
                self._request_chunks(read, level)
                try:
                    count = _read_until_full(self.served.source, buffer[: read.size], read.offset)
                except OSError as error:
                    self._reply(read, error=error.errno or errno.EIO)
                else:
                    self._reply(read, buffer[:count])
                    self._count_read(read, of_source=True)
                self._mark_source_read()
            self.on_source.pop(read.unique, None)

    def _request_chunks(self, read: PendingRead, level: WantLevel) -> None:
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

    def _count_read(self, read: PendingRead, of_source: bool) -> None:
        readers = self.local.readers
        if readers is not None and not self.shared_state.whole:
            with self.counting:
                readers.count_read(read.size, of_source)

    def _is_copy_coming(self) -> bool:
        """Whether the copy is under way, or about to begin."""
        return self.local.is_copied and self.arrivals.is_coming

    # The main thread

    def _run_main_loop(self) -> None:
        seen: dict[tuple[int, int], bytes] = {}
        next_look, told = 0.0, self.local.readers
        while not self.gone:
            readers = self.local.readers
            if readers is not told:  # a copy has begun: it does not know yet what is waited for
                told = readers
                for read in list(self.waiting):
                    self._request_chunks(read, NOW)
            pieces = readers.count_arrived() if readers is not None else -1
            self.arrivals.update(pieces, bool(self.waiting), time.monotonic())
            self._dispatch_early_reads()
            self._dispatch_waiting_reads()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + BEAT
                self.shared_state.beat += 1
                self._mark_source_read()
                self._move_stuck_reads_to_source()
                self._move_slow_reads_to_copy()
                self._answer_killed_readers()
                self._take_over_from_hung_servers(seen)
                self._update_need()
            self.stir.wait(WAITING_BEAT if self.waiting or not self.looked else BEAT)
            self.stir.clear()

    def _mark_source_read(self) -> None:
        """Has the copy keep away from the source while it takes long to answer a job."""
        readers = self.local.readers
        if readers is not None and self.on_source:
            readers.mark_source_read(time.monotonic_ns())

    def _update_need(self) -> None:
        if self.shared_state.beat % NEED_BEATS == 0:
            with contextlib.suppress(Failed, OSError):  # a damaged lease may be of who needs it
                self.shared_state.unneeded = not self._is_needed()

    def _is_needed(self) -> bool:
        """Whether a job holds a lease on the image. Raises Failed, OSError."""
        return self.served.image.key in self.served.leases.leased_keys()

    def _dispatch_early_reads(self) -> None:
        """Hands on what came before the looker's first look.

        A server before this one may have found that the copy is worthless, or the source.
        """
        self.looked = self.looked or time.monotonic() - self.began > STUCK
        if self.looked:
            for _ in range(len(self.early)):
                self._dispatch_read(self.early.popleft())

    def _dispatch_waiting_reads(self) -> None:
        arrives = self._is_copy_coming()
        for _ in range(len(self.waiting)):
            read = self.waiting.popleft()
            if read.unique not in self.pending:
                continue
            if self.local.has_bytes(read.offset, read.size):
                self._queue_for_copy(read)
            elif arrives:
                self.waiting.append(read)
            else:
                self._queue_for_source(read, NOW)

    def _queue_for_copy(self, read: PendingRead) -> None:
        self.on_disk[read.unique] = read, time.monotonic()
        self.at_copy.put(read)

    def _queue_for_source(self, read: PendingRead, level: WantLevel = SOON) -> None:
        """Has the source answer; `level` is how much its chunk is wanted."""
        self.on_source[read.unique] = read, time.monotonic()
        self.at_source.put((read, level))

    def _move_slow_reads_to_copy(self) -> None:
        """Has the copy answer what the source does not, as soon as it has come."""
        late = time.monotonic() - SLOW
        for unique, (read, since) in list(self.on_source.items()):
            if unique not in self.pending:
                self.on_source.pop(unique, None)
            elif (
                since < late
                and not self.disk_hangs
                and self.local.has_bytes(read.offset, read.size)
            ):
                self.on_source.pop(unique, None)
                self._queue_for_copy(read)

    def _move_stuck_reads_to_source(self) -> None:
        """Has the source answer what the node's disk does not."""
        late = time.monotonic() - STUCK
        for unique, (read, since) in list(self.on_disk.items()):
            if since < late:
                self.disk_hangs = True  # until it answers, no other read has to wait for it
                self.on_disk.pop(unique, None)
                self._queue_for_source(read)

    # What other generations left

    def _take_over_reads(self, generation: RequestJournal) -> None:
        for number in range(generation.receivers):
            slot = generation.request_slot(number)
            self._dispatch_request(slot)
            generation.clear_slot(number)
        for number, read in list(generation.list_reads()):
            self._journal_read(msgspec.structs.replace(read, servers_ended=read.servers_ended + 1))
            self.interrupted[read.unique] = read.pid  # it may have been told of that
            generation.clear_record(number)

    def _take_over_from_hung_servers(self, seen: dict[tuple[int, int], bytes]) -> None:
        """Adopts from servers that were killed and have not ended: a thread hangs in the kernel.

        None of their instructions runs any more, but the kernel may still deliver a request. So
        they are looked at again and again, and a slot counts once it looked the same twice.
        """
        for generation in [one for one in self.earlier if not one.has_ended]:
            found = [bytes(generation.request_slot(n)) for n in range(generation.receivers)]
            place = id(generation)
            if all(seen.get((place, n)) == slot for n, slot in enumerate(found)):
                self._take_over_reads(generation)
            seen.update({(place, n): slot for n, slot in enumerate(found)})
        for generation in [one for one in self.earlier if one.has_ended]:
            self._take_over_reads(generation)
            self.earlier.remove(generation)

    # The looker

    def _run_looker(self) -> None:
        if self.shared_state.changed:
            self.local.stop_using()
        elif (
            not self.shared_state.whole
        ):  # else the entry is what is shown, whatever the source is now
            self._check_source()
        self._open_latest_copy()
        self.looked = True
        while not (self.local.is_whole and self.shared_state.hot_known):
            self._check_source()
            for _ in range(round(SOURCE_LOOK / LOOK)):
                self._open_latest_copy()
                time.sleep(LOOK)
            self._update_abandoned()
            self._save_hot_map()

    def _open_latest_copy(self) -> None:
        with contextlib.suppress(OSError):  # the disk's fault; the source has the bytes
            self.local.open_latest()
            if self.local.is_whole:
                self.shared_state.whole = 1

    def _update_abandoned(self) -> None:
        """Tells the keeper, which may start another, whether a copy that is needed has none."""
        with contextlib.suppress(Failed, OSError):
            gone = not self.shared_state.changed and self.local.is_abandoned()
            self.shared_state.abandoned = gone and self._is_needed()

    def _save_hot_map(self) -> None:
        """Once the first minute is over."""
        since = time.monotonic_ns() - self.shared_state.first_read
        if (
            self.shared_state.first_read
            and since > hot_pieces.WINDOW * 1e9
            and not self.shared_state.hot_known
        ):
            self.shared_state.hot_known = 1
            with contextlib.suppress(OSError):  # only a matter of speed, next time
                hot_pieces.save_hot_map(self.local.cache, self.served.image, self.hot)

    def _check_source(self) -> None:
        """A source that was changed in place makes the copy worthless, and what is cached of it."""
        try:
            facts = os.fstat(self.served.source)
        except OSError:
            return  # reads will say so
        found = source_image.identity_from_stat(facts, self.source_is.path)
        if found != self.source_is and not self.local.is_whole:
            self.local.stop_using()
            fuse.invalidate_cache(self.fuse_fd)
            # Last: a server that is killed before leaves all of it to the next.
            self.source_is = found
            self.shared_state.changed = 1


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
