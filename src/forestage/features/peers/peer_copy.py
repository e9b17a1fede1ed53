"""Engine of a peer-assisted copy: some threads read the source, some fetch from peers.

schedule.py says what each does next. A peer's bytes go straight into the image, and count only once
their digest was right. A chunk that is on its way already is brought a second time in memory, and
written only if it comes first: no late or wrong piece may go over bytes that count.

A digest proves only that the bytes came as they are on the peer, which may have read wrongly once,
or lie. So a few pieces are compared with the source before their chunk counts, and a whole chunk
where two peers do not have the same. All nodes of a job together read no more than COMPARED_SHARE
of the image for that; no more than COMPARED_SHARE_OUTSIDE where nodes of other jobs help, since one
job after the other reads as much: the pieces are as many, and smaller. A peer that gave wrong bytes
is left out, and all that it gave before is read again, with all that the same node had read.
"""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random, SystemRandom

from forestage import log
from forestage.cache import digest
from forestage.cache.arrival_map import NOW, PIECE, SOON, ArrivalMap
from forestage.cache.part import ENTRY_BYTES, Part, chunk_count
from forestage.errors import Declined
from forestage.features.peers import chunk_readers
from forestage.features.peers.client import PeerClient
from forestage.features.peers.connection import PeerRequestError
from forestage.features.peers.protocol import ChunkReceiver, ChunkRequest
from forestage.features.peers.ring import SOURCE
from forestage.features.peers.schedule import ChunkSchedule, ChunkTransfer, SchedulePolicy
from forestage.sources.source import ReadableSource, SourceUnreadable
from forestage.stage import source_reader
from forestage.stage.chunks import ChunkCopy, CopyTuning, Write
from forestage.system import files

POLL = 0.1  # seconds between two looks of a thread that has nothing to do
SERVED_POLL = 0.03  # … while jobs read the image
DOWNLOADS = 8  # chunks that one copy gets from peers at once
WRITE_INTERVAL = 0.5  # seconds between two notes of who read what

COMPARED_SHARE = 0.02  # of the image's bytes, for all nodes of a job
COMPARED_SHARE_OUTSIDE = 0.005
SAMPLES = 64  # of one copy; the more, the smaller
SMALLEST, LARGEST = 4 * 1024, 64 * 1024  # bytes of one, a power of two

Span = tuple[int, int]  # where in the image a piece begins, and how long it is; bytes


def copy_with_peers(
    source: ReadableSource,
    part: Part,
    tuning: CopyTuning,
    stop: threading.Event,
    peers: PeerClient,
    readers: ArrivalMap | None = None,
) -> Mapping[str, int]:
    """Copies as chunks.copy_chunks does, and returns how many bytes came from which peer."""
    run = PeerCopy(source, part, tuning, stop, peers, readers)
    try:
        run.run_transfers()
    finally:
        run.close()
    return run.bytes_by_peer()


def make_policy(threads: int, nodes: int) -> SchedulePolicy:
    """Pure: the fewer streams each of many nodes reads in, the sooner its chunks are whole."""
    at_once = min(threads, max(1, -(-4 * threads // nodes)))
    return SchedulePolicy(max_own_reads=at_once, max_fetches=DOWNLOADS)


class _ChunkSuperseded(Exception):
    """The chunk came by another ask."""


class _ReadSuperfluous(Exception):
    """A peer has the chunk that is being read."""


class _PeerMismatch(Exception):
    """A peer gave other bytes than the source."""


class PeerCopy(ChunkCopy):
    """A run whose chunks come from the source and from peers."""

    def __init__(
        self,
        source: ReadableSource,
        part: Part,
        tuning: CopyTuning,
        stop: threading.Event,
        peers: PeerClient,
        readers: ArrivalMap | None = None,
    ) -> None:
        super().__init__(source, part, tuning, stop, readers)
        self._read_local_bytes()
        if source.read is None:
            # The next chunks of the file are other nodes' shares: readahead would read in vain.
            os.posix_fadvise(source.buffered, 0, 0, os.POSIX_FADV_RANDOM)
        self.peers = peers
        self.from_peers = 0
        self.schedule_condition = threading.Condition()
        self.chunk_locks: dict[int, threading.Lock] = {}
        self.unreadable: SourceUnreadable | None = None
        missing = [number for number in self.todo if number in self.known.to_read]
        self.digests_by_peer: dict[int, dict[str, str]] = {}  # by chunk and peer, a digest
        self.chunks_by_giver: dict[str, set[int]] = {}  # by peer, the chunks that are in
        self.reader_by_chunk: dict[
            tuple[int, str], str
        ] = {}  # by chunk and peer, who read it there
        here = set(range(chunk_count(source.size, tuning.chunk))).difference(self.todo)
        self.reader_recorder = chunk_readers.ChunkReaderRecorder(part.directory, peers.me, here)
        self.readers_written_at = self.notices_read_at = 0.0
        self.all_comparable = True  # whether all pieces could be compared
        self.wrong_peers: set[str] = set()
        self.transfers_under_way = 0  # threads that may yet find that a chunk has to be read again
        self.schedule = ChunkSchedule(
            part.directory.name,
            peers.nodes,
            peers.me,
            missing,
            tuning.chunk,
            make_policy(tuning.threads, len(peers.nodes)),
            self.hot,
            peers.givers,
            peers.leaders,
            peers.list_silent_nodes(),
        )
        # Of the own share too: who begins late gets it from peers as well.
        own = sum(node not in peers.givers for node in peers.nodes)  # of the job
        about = missing, source.size, tuning.chunk, own
        self.samples = draw_samples(*about, SystemRandom(), bool(peers.givers))

    def _read_local_bytes(self) -> None:
        """Brings what no other node is asked for: of a directory, what the kernel will parse."""
        buffer = source_reader.allocate_piece_buffer(self.tuning.chunk)
        for number in range(chunk_count(self.source.local_bytes, self.tuning.chunk)):
            if number in self.todo:
                del self.todo[number]
                self.mark_complete(number, self.read_chunk(number, buffer, self.write_piece))

    def run_transfers(self) -> None:
        self.complete_hole_chunks()
        # One more to read: what a job waits for is not to stand behind whole chunks.
        reads = [lambda: self._run_worker(self.schedule.next_read)] * (self.tuning.threads + 1)
        fetches = [lambda: self._run_worker(self.schedule.next_fetch)] * DOWNLOADS
        self.run_threads([*reads, *fetches])

    def close(self) -> None:
        super().close()
        self.reader_recorder.write_file(
            self.schedule.is_done and self.all_comparable and bool(self.samples)
        )
        if self.schedule.is_done:  # a part that is to be resumed keeps both files
            self.part.delete_peer_notes()

    def bytes_by_peer(self) -> Mapping[str, int]:
        """How many bytes each peer gave."""
        return {
            peer: sum(self.chunk_span(number)[1] for number in gave)
            for peer, gave in self.chunks_by_giver.items()
        }

    def _run_worker(self, next_ask: Callable[[float], ChunkTransfer | None]) -> None:
        """Bring one chunk after the other, until there are no more.

        What this thread was bringing counts in `transfers_under_way`, for which all others wait at
        the end. If the thread dies of something unforeseen, no other brings it to an end, so that
        the copy ends: `run_threads` sees whether anything is missing.
        """
        buffer = source_reader.allocate_piece_buffer(self.tuning.chunk)
        is_over = False
        try:
            while (found := self._wait_for_transfer(next_ask)) is not None:
                ask, twice = found
                # The shorter a piece, the less a job's own read waits behind it, and the less is
                # read in vain.
                short = self.is_served() or self.schedule.is_early_read(ask)
                self._transfer_chunk(ask, buffer[:PIECE] if short else buffer, twice)
                self._settle_dispute(ask.number, buffer)
                self._apply_notices()
                with self.schedule_condition:
                    self.transfers_under_way -= 1
                    self.schedule_condition.notify_all()
            is_over = True
        except (OSError, Declined) as error:
            self.errors.append(error)
        finally:
            if not is_over:
                self.halt.set()
            with self.schedule_condition:
                self.schedule_condition.notify_all()

    def _wait_for_transfer(
        self, next_ask: Callable[[float], ChunkTransfer | None]
    ) -> tuple[ChunkTransfer, bool] | None:
        """What to bring, and whether it is on its way by another ask; None: no more."""
        with self.schedule_condition:
            while not (
                self.is_ending() or (self.schedule.is_done and not self.transfers_under_way)
            ):
                now = time.monotonic()
                self._start_first_connections(now)
                if self.readers is not None:
                    self.schedule.set_wanted(
                        self.readers.list_wanted((NOW,)), self.readers.list_wanted((SOON,))
                    )
                ask = next_ask(now)
                if ask is not None:
                    self.chunk_locks.setdefault(ask.number, threading.Lock())
                    self.transfers_under_way += 1
                    return ask, self.schedule.is_transferred_twice(ask)
                if self.unreadable and self.schedule.is_hopeless(now):
                    raise self.unreadable
                self.schedule_condition.wait(SERVED_POLL if self.is_served() else POLL)
        return None

    def _start_first_connections(self, now: float) -> None:
        """Has the first connections made by threads that nobody waits for.

        A peer may be silent for seconds, and so may munge. The caller holds `schedule_condition`.
        """
        while (peer := self.schedule.next_first_connection(now)) is not None:
            threading.Thread(
                target=self._open_session, args=(peer,), name="greet", daemon=True
            ).start()

    def _open_session(self, peer: str) -> None:
        try:
            self.peers.open_session(peer, lambda: self.is_ending() or self.schedule.is_done)
        except PeerRequestError as refused:
            with self.schedule_condition:
                self.schedule.mark_connect_failed(peer, refused.why, time.monotonic())
                self.schedule_condition.notify_all()
        else:
            with self.schedule_condition:
                self.schedule.mark_connected(peer)
                self.schedule_condition.notify_all()

    def _transfer_chunk(self, ask: ChunkTransfer, buffer: memoryview, twice: bool) -> None:
        start, size = self.chunk_span(ask.number)
        aside = memoryview(mmap.mmap(-1, size)) if twice else None
        chunk_lock = self.chunk_locks[ask.number]

        def sink(at: int, piece: memoryview) -> None:
            if aside is not None:
                aside[at - start : at - start + len(piece)] = piece
                return
            with chunk_lock:
                self._check_wanted(ask)
                # What a peer sent is not proven before its digest.
                write = self._write_proven if ask.peer == SOURCE else self.write_piece
                write(at, piece)

        try:
            found = self._read_or_fetch(ask, buffer, sink)
            if found is not None and ask.peer != SOURCE:
                self._compare_samples(ask, buffer, aside)
        except _PeerMismatch:
            self._exclude_wrong_peer(ask.peer, ask.number)
            with self.schedule_condition:
                if not self.schedule.is_obsolete(ask):
                    self.schedule.mark_missing(
                        [ask.number]
                    )  # other peers may have it from this one
                self.schedule.mark_failed(ask, "wrong", time.monotonic())
            return
        except PeerRequestError as refused:
            with self.schedule_condition:
                self.schedule.mark_failed(ask, refused.why, time.monotonic())
            return
        except _ChunkSuperseded:
            with self.schedule_condition:
                self.schedule.mark_received(ask, time.monotonic())
            return
        if found is not None:
            with chunk_lock:
                self._accept_chunk(ask, found, aside)

    def _check_wanted(self, ask: ChunkTransfer) -> None:
        """Raise _ChunkSuperseded or _ReadSuperfluous if this chunk need not be fetched any more."""
        if self.schedule.is_obsolete(ask):
            raise _ChunkSuperseded
        with self.schedule_condition:
            if self.schedule.is_superfluous_read(ask, time.monotonic()):
                raise _ReadSuperfluous

    def _read_or_fetch(self, ask: ChunkTransfer, buffer: memoryview, sink: Write) -> bytes | None:
        """The digest; None where the source cannot be read, or need not.

        Raises PeerRequestError.
        """
        if ask.peer == SOURCE:
            try:
                return self.read_chunk(ask.number, buffer, sink)
            except _ReadSuperfluous:
                self._clear_arrived_pieces(ask)
                with self.schedule_condition:
                    self.schedule.drop_early_read(ask)
                return None
            except SourceUnreadable as error:
                self._clear_arrived_pieces(ask)
                with self.schedule_condition:
                    self.unreadable = error
                    self.schedule.mark_failed(ask, "source", time.monotonic())
                _mark_source_failed(self.part)
                return None
        start, size = self.chunk_span(ask.number)

        def peer_has(has: int, source_failed: bool) -> None:
            with self.schedule_condition:
                self.schedule.record_peer_chunks(ask.peer, has, time.monotonic(), source_failed)

        def peer_says(found: str, reader: str) -> None:
            with self.schedule_condition:
                self.digests_by_peer.setdefault(ask.number, {})[ask.peer] = found
                self.reader_by_chunk[ask.number, ask.peer] = reader or ask.peer

        def stop() -> bool:
            return self.is_ending() or self.schedule.is_obsolete(ask)

        patience = self.schedule.transfer_timeout(ask), self.schedule.peer_wait(ask)
        reach = "cluster" if ask.peer in self.peers.givers else "job"
        chunk = ChunkRequest(ask.number, start, size, *patience, f"{reach} {self.peers.me}")
        return self.peers.fetch_chunk(
            ask.peer, chunk, ChunkReceiver(buffer, sink, peer_has, stop, peer_says)
        )

    def _clear_arrived_pieces(self, ask: ChunkTransfer) -> None:
        """Tell the readers that what was read of a chunk may change.

        Before the ask ends: then a peer's bytes may go over it, which are not proven yet.
        """
        with self.chunk_locks[ask.number]:
            if not self.schedule.is_obsolete(ask):
                self.clear_arrived(ask.number)

    def _compare_samples(
        self, ask: ChunkTransfer, buffer: memoryview, aside: memoryview | None
    ) -> None:
        """Compares what a peer gave with the source, where that is due.

        Raises _PeerMismatch, SourceTruncated.
        """
        start, size = self.chunk_span(ask.number)
        if self.schedule.is_obsolete(ask):
            return
        with self.schedule_condition:
            disputed = len(set(self.digests_by_peer.get(ask.number, {}).values())) > 1
        due = [(start, size)] if disputed else self.samples.get(ask.number, [])
        for at, length in due:
            if aside is not None:
                got = bytes(aside[at - start : at - start + length])
            else:
                got = os.pread(self.image, length, at)
            if self._differs_from_source(at, got, buffer):
                raise _PeerMismatch

    def _differs_from_source(self, at: int, got: bytes, buffer: memoryview) -> bool:
        """Whether the source has other bytes there; where it cannot be read, nobody can say."""
        try:
            read = source_reader.read_pieces(self.source, at, len(got), buffer)
            return any(piece != got[here - at : here - at + len(piece)] for here, piece in read)
        except SourceUnreadable:
            self.all_comparable = False
            return False

    def _accept_chunk(self, ask: ChunkTransfer, found: bytes, aside: memoryview | None) -> None:
        """Notes a chunk, unless another ask was faster or its peer is not to be believed any more.

        The caller holds the chunk's lock.
        """
        start, size = self.chunk_span(ask.number)
        reader = self.reader_by_chunk.get((ask.number, ask.peer), ask.peer)
        with self.schedule_condition:
            is_first = not self.schedule.is_obsolete(ask)
            if {ask.peer, reader} & self.wrong_peers:
                if is_first:
                    self.schedule.mark_missing([ask.number])
                wrong = ask.peer in self.wrong_peers
                self.schedule.mark_failed(ask, "wrong" if wrong else "absent", time.monotonic())
                return
            if ask.peer == SOURCE:
                self.digests_by_peer.setdefault(ask.number, {})[SOURCE] = found.hex()
            elif is_first:  # before it is noted: who finds the peer out then strikes this one too
                self.chunks_by_giver.setdefault(ask.peer, set()).add(ask.number)
                self.from_peers += size
            if is_first:
                self.reader_recorder.record_chunk(ask.number, reader, ask.peer in self.peers.givers)
                self._write_chunk_readers()
        if is_first:
            if aside is not None:
                self.clear_arrived(ask.number)
                self.write_piece(start, aside)
            self.mark_complete(ask.number, found)
            if ask.peer != SOURCE:
                _record_peer_bytes(self.part, self.from_peers)
        with self.schedule_condition:
            self.schedule.mark_received(ask, time.monotonic())

    def _settle_dispute(self, number: int, buffer: memoryview) -> None:
        """Asks the source who is right where a chunk that is in has another digest elsewhere."""
        with self.schedule_condition:
            said = self.digests_by_peer.get(number, {})
            giver = next(
                (peer for peer, gave in self.chunks_by_giver.items() if number in gave), None
            )
            if giver is None or len(set(said.values())) < 2:
                return
            del self.digests_by_peer[number]
        start, size = self.chunk_span(number)
        if self._differs_from_source(start, os.pread(self.image, size, start), buffer):
            self._exclude_wrong_peer(giver, number)
            return
        for peer, found in said.items():
            if peer != SOURCE and found != said.get(giver):
                self._exclude_wrong_peer(peer, number)

    def _exclude_wrong_peer(self, peer: str, number: int) -> None:
        """Leaves out a peer that gave other bytes than the source has, and strikes all it gave.

        Also what others gave that the same node has read. Who gave that is not to blame.
        """
        with self.schedule_condition:
            reader = self.reader_by_chunk.get((number, peer), peer)
            if peer in self.wrong_peers:
                return
            self.wrong_peers.add(peer)  # another thread may find the same
        count = self._reread_chunks_of(peer, reader)
        by = f" that {reader} had read" if reader != peer else ""
        log.write_log_line(
            f"stager key={self.part.directory.name} peer={peer} gave wrong bytes (chunk {number}"
            f"{by}): it is left out, and {count} chunks of it are read again",
            by_slurm=True,
        )
        self.peers.report_wrong_reader(peer, reader)

    def _apply_notices(self) -> None:
        """Strikes what another copy has found wrong; before this one can be complete."""
        now = time.monotonic()
        if now < self.notices_read_at + WRITE_INTERVAL and not self.schedule.is_done:
            return
        self.notices_read_at = now
        for reader in self.peers.list_wrong_readers() - self.wrong_peers - {self.peers.me}:
            count = self._reread_chunks_of("", reader)
            log.write_log_line(
                f"stager key={self.part.directory.name} reader={reader} read wrong bytes, by"
                f" another node's word: {count} chunks of it are read again",
                by_slurm=True,
            )

    def _reread_chunks_of(self, peer: str, reader: str) -> int:
        """Has all read again that this peer gave or this reader read; how many chunks."""
        with self.schedule_condition:
            wrong = {peer, reader} - {self.peers.me, SOURCE}
            self.wrong_peers |= wrong
            for liar in wrong:
                self.schedule.exclude_peer(liar)
            gave = {
                *self.chunks_by_giver.get(peer, ()),
                *self.reader_recorder.chunks_read_by(reader),
            }
            for its in self.chunks_by_giver.values():
                self.from_peers -= sum(self.chunk_span(one)[1] for one in its & gave)
                its -= gave
            self.reader_recorder.remove_chunks(gave)
            self._write_chunk_readers(at_once=True)
            locks = [self.chunk_locks.setdefault(one, threading.Lock()) for one in gave]
        for one, chunk_lock in zip(gave, locks, strict=True):
            with chunk_lock:
                self.clear_arrived(one)
                os.pwrite(self.map, digest.MISSING, one * ENTRY_BYTES)
        with self.schedule_condition:
            self.schedule.mark_missing(gave)
        return len(gave)

    def _write_chunk_readers(self, at_once: bool = False) -> None:
        """Has the peer service know who read what; it may lag.

        The caller holds `schedule_condition`.
        """
        now = time.monotonic()
        if at_once or now - self.readers_written_at > WRITE_INTERVAL:
            self.readers_written_at = now
            self.reader_recorder.write_file()


def _record_peer_bytes(part: Part, count: int) -> None:
    """Record for people how many bytes came from peers so far."""
    with contextlib.suppress(OSError):  # a disk that others filled must not matter
        files.overwrite_file(part.peers, b"%d" % count)


def _mark_source_failed(part: Part) -> None:
    """Record that nothing can be read here; the peer service tells the other nodes."""
    with contextlib.suppress(OSError):
        part.source_failed.touch()


def draw_samples(
    numbers: Sequence[int], size: int, chunk: int, nodes: int, dice: Random, outside: bool = False
) -> Mapping[int, list[Span]]:
    """Return the pieces to compare by the number of their chunk; `numbers` are the missing chunks.

    `size` and `chunk` in bytes; `outside`: nodes of other jobs help. No peer may be able to foresee
    them: `dice` is SystemRandom. Pure, but for the dice.
    """
    found: dict[int, list[Span]] = {}
    budget = size * (COMPARED_SHARE_OUTSIDE if outside else COMPARED_SHARE) / nodes
    length = SMALLEST
    while length < min(LARGEST, chunk) and 2 * length * SAMPLES <= budget:
        length *= 2
    # Where the budget is not enough for one sample, some nodes have one: together no more than
    # COMPARED_SHARE on average.
    count = int(min(SAMPLES, budget / length + dice.random() * (budget < length)))
    for number in dice.choices(numbers, k=count) if numbers else ():
        start = number * chunk
        within = min(chunk, size - start)
        at = start + dice.randrange(-(-within // length)) * length
        found.setdefault(number, []).append((at, min(length, start + within - at)))
    return found
