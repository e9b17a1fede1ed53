"""The engine with peers: all bytes of the source whatever peers do, and few reads of the source."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from forestage.cache import allocation, digest
from forestage.cache.arrival_map import ArrivalMap
from forestage.cache.part import Part, list_missing_chunks
from forestage.errors import CopyStopped, Failed
from forestage.features.peers import chunk_readers, peer_copy
from forestage.features.peers.client import PeerClient
from forestage.features.peers.connection import PeerRequestError
from forestage.features.peers.protocol import ChunkReceiver, ChunkRequest
from forestage.features.peers.ring import SOURCE, NodeRing
from forestage.features.peers.schedule import (
    ChunkSchedule,
    ChunkTransfer,
    FailureReason,
    SchedulePolicy,
)
from forestage.sources.source import ReadableSource, SourceTruncated, SourceUnreadable
from forestage.stage import chunks, source_reader
from forestage.stage.chunks import CopyTuning
from node import HANGS

Patch = pytest.MonkeyPatch

CHUNK = 4 * source_reader.BLOCK
TUNING = CopyTuning(threads=2, chunk=CHUNK)
COUNT = 24
SIZE = COUNT * CHUNK - 5


class Fake(PeerClient):
    """Other nodes: what each has, and how each behaves."""

    def __init__(self, data: bytes, has: int) -> None:
        self.nodes = ("a", "b", "c", "d")
        self.me = "a"
        self.givers: tuple[str, ...] = ()
        self.leaders: tuple[str, ...] = ()
        self.read_by: dict[str, str] = {}  # whom a peer names as the reader of what it gives
        self.data = data
        self.lies: dict[str, bytes] = {}  # what a peer has instead, with digests of its own
        self.has = has
        self.bad: dict[str, FailureReason] = {}
        self.asked: list[tuple[str, int]] = []
        self.noticed: set[str] = set()  # whose chunks others have found wrong
        self.told: list[tuple[str, str]] = []
        self.before: Callable[[str, int], None] = lambda peer, number: None

    def list_wrong_readers(self) -> frozenset[str]:
        return frozenset(self.noticed)

    def report_wrong_reader(self, giver: str, reader: str) -> None:
        self.told.append((giver, reader))

    def list_silent_nodes(self) -> frozenset[str]:
        return frozenset()

    def open_session(self, peer: str, stop: Callable[[], bool]) -> None:
        if self.bad.get(peer) == "refused":
            raise PeerRequestError("refused", "")

    def fetch_chunk(self, peer: str, chunk: ChunkRequest, receiver: ChunkReceiver) -> bytes:
        self.asked.append((peer, chunk.number))
        self.before(peer, chunk.number)
        why = self.bad.get(peer)
        if why in ("refused", "silent", "absent"):
            raise PeerRequestError(why, "")
        receiver.on_peer_chunks(self.has, False)
        if not self.has >> chunk.number & 1:
            raise PeerRequestError("absent", "")
        data = self.lies.get(peer, self.data)
        said = digest.digest_chunk(data[chunk.start : chunk.start + chunk.size]).hex()
        receiver.on_digest(said, self.read_by.get(peer, ""))
        running = digest.RunningDigest()
        end, buffer = chunk.start + chunk.size, receiver.buffer
        for at in range(chunk.start, end, len(buffer)):
            piece = buffer[: min(len(buffer), end - at)]
            piece[:] = data[at : at + len(piece)] if not why else b"\xee" * len(piece)
            running.add(piece)
            receiver.write(at, piece)
        if why:
            raise PeerRequestError(why, "")
        return running.digest()


class Pair:
    """A source that counts what is read of it, and the part it is copied to."""

    def __init__(self, folder: Path, monkeypatch: Patch) -> None:
        self.data = os.urandom(SIZE)
        (folder / "source").write_bytes(self.data)
        self.fd = os.open(folder / "source", os.O_RDONLY)
        self.source = ReadableSource(self.fd, None, SIZE)
        self.part = Part(folder / "key")
        self.part.directory.mkdir()
        found = allocation.list_data_chunks(self.fd, SIZE, CHUNK)
        allocation.reserve_part(self.part, SIZE, CHUNK, found)
        self.read: list[int] = []
        self.reading: Callable[[int], None] = lambda number: None
        real = source_reader.read_piece

        def read_piece(
            source: ReadableSource, start: int, want: memoryview, buffer: memoryview
        ) -> None:
            self.read.append(start // CHUNK)
            self.reading(start // CHUNK)
            real(source, start, want, buffer)

        monkeypatch.setattr(source_reader, "read_piece", read_piece)

    def copy(self, fake: Fake, stop: threading.Event | None = None) -> int:
        stop = stop or threading.Event()
        return sum(peer_copy.copy_with_peers(self.source, self.part, TUNING, stop, fake).values())

    def check(self) -> None:
        assert self.part.image.read_bytes() == self.data
        each = (self.data[at : at + CHUNK] for at in range(0, SIZE, CHUNK))
        assert self.part.read_digests() == b"".join(digest.digest_chunk(one) for one in each)
        assert not self.part.peers.exists()
        assert not self.part.source_failed.exists()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: Patch) -> Iterator[Pair]:
    made = Pair(tmp_path, monkeypatch)
    yield made
    os.close(made.fd)


@pytest.fixture(autouse=True)
def _no_samples(monkeypatch: Patch) -> None:
    """What is read is that of the copy itself, unless a test says otherwise."""
    monkeypatch.setattr(peer_copy, "COMPARED_SHARE", 0.0)


@pytest.fixture(autouse=True)
def few_downloads(monkeypatch: Patch) -> None:
    monkeypatch.setattr(peer_copy, "DOWNLOADS", 3)


def sample(monkeypatch: Patch, *numbers: int) -> None:
    """Has a piece of each of these chunks compared with the source."""
    drawn = {number: [(number * CHUNK, 4096)] for number in numbers}
    monkeypatch.setattr(peer_copy, "draw_samples", lambda *_: drawn)


@pytest.fixture
def patient(monkeypatch: Patch) -> None:
    """On a machine that is busy a second is soon over, and then nobody is hoped for any more."""
    real = peer_copy.make_policy

    def policy(threads: int, nodes: int) -> SchedulePolicy:
        found = real(threads, nodes)
        return msgspec.structs.replace(
            found,
            max_probe_reads=0,
            probe=600.0,
            grace=600.0,
            patience=600.0,
            max_transfer_time=600.0,
            silent_backoff=600.0,
        )

    monkeypatch.setattr(peer_copy, "make_policy", policy)


def everything() -> int:
    return (1 << COUNT) - 1


def share(me: str = "a") -> set[int]:
    ring = NodeRing("key", ("a", "b", "c", "d"))
    return {number for number in range(COUNT) if ring.find_reader(number) == me}


def test_peer_copy_reads_no_source_if_peers_have_all_chunks(pair: Pair, patient: None) -> None:
    fake = Fake(pair.data, everything())
    assert pair.copy(fake) == SIZE
    pair.check()
    assert not pair.read


def test_peer_copy_never_fetches_the_chunks_with_file_system_metadata(
    pair: Pair, patient: None
) -> None:
    pair.source = msgspec.structs.replace(pair.source, local_bytes=CHUNK + 1)
    fake = Fake(pair.data, everything())
    assert pair.copy(fake) == SIZE - 2 * CHUNK
    pair.check()
    assert sorted(pair.read) == [0, 1]
    assert not {0, 1} & {number for _, number in fake.asked}


def test_peer_copy_reads_its_own_share_and_fetches_the_rest(pair: Pair, patient: None) -> None:
    mine = sum(1 << number for number in share())
    fake = Fake(pair.data, everything() & ~mine)
    from_others = pair.copy(fake)
    pair.check()
    assert sorted(pair.read) == sorted(share())
    assert from_others == SIZE - sum(min(CHUNK, SIZE - number * CHUNK) for number in share())


@pytest.mark.parametrize("why", ["refused", "silent", "wrong", "slow"])
def test_peer_copy_has_the_sources_bytes_if_one_peer_fails(
    pair: Pair, patient: None, why: FailureReason
) -> None:
    fake = Fake(pair.data, everything())
    fake.bad["c"] = why
    pair.copy(fake)
    pair.check()
    if why in ("silent", "wrong"):
        assert 1 <= sum(peer == "c" for peer, _ in fake.asked) <= 3, "once by each thread"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_peer_copy_fails_instead_of_hanging_if_one_of_its_threads_dies(
    pair: Pair, patient: None
) -> None:
    """The others would wait for ever for what that thread was bringing."""
    fake = Fake(pair.data, everything())

    def die(peer: str, number: int) -> None:
        raise RuntimeError

    fake.before = die
    with pytest.raises(Failed) as caught:
        pair.copy(fake)
    assert caught.value.reason == "copy"


@pytest.mark.parametrize("why", ["refused", "wrong"])
def test_peer_copy_reads_the_whole_source_if_all_peers_refuse_or_give_wrong_bytes(
    pair: Pair, why: FailureReason
) -> None:
    fake = Fake(pair.data, everything())
    fake.bad = dict.fromkeys("bcd", why)
    assert pair.copy(fake) == 0
    pair.check()
    assert set(pair.read) == set(range(COUNT)), (
        "the first ones perhaps twice, with others' wrong bytes between"
    )


def test_peer_copy_with_an_unreadable_source_is_completed_from_peers(
    pair: Pair, patient: None
) -> None:
    def fail(number: int) -> None:
        raise SourceUnreadable("/lustre/a", OSError(5, "broken"))

    pair.reading = fail
    mine = sum(1 << number for number in share())
    fake = Fake(pair.data, everything() & ~mine)

    def read_elsewhere(peer: str, number: int) -> None:
        if pair.part.source_failed.exists():  # they are told, a moment after the reading
            fake.has = everything()

    fake.before = read_elsewhere
    assert pair.copy(fake) == SIZE
    pair.check()


def test_peer_copy_of_a_truncated_source_raises_source_truncated(pair: Pair) -> None:
    def cut(number: int) -> None:
        raise SourceTruncated("/lustre/a")

    pair.reading = cut
    with pytest.raises(SourceTruncated):
        pair.copy(Fake(pair.data, 0))


def test_peer_copy_on_a_full_disk_raises_the_write_error(pair: Pair, monkeypatch: Patch) -> None:
    def full(fd: int, start: int, data: memoryview) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(chunks, "_write_all", full)
    with pytest.raises(OSError, match="full"):
        pair.copy(Fake(pair.data, everything()))
    assert pair.part.read_digests().strip(b"\0") == b""


def test_stopped_peer_copy_is_resumed_with_only_its_missing_chunks(
    pair: Pair, patient: None
) -> None:
    stop = threading.Event()
    fake = Fake(pair.data, everything())

    def later(peer: str, number: int) -> None:
        if len(fake.asked) >= 9:
            stop.set()

    fake.before = later
    with pytest.raises(CopyStopped):
        pair.copy(fake, stop)
    left = list_missing_chunks(pair.part.read_digests(), SIZE, CHUNK)
    assert 0 < len(left) < COUNT
    again = Fake(pair.data, everything())
    pair.copy(again)
    pair.check()
    assert {number for _, number in again.asked} == set(left)


def test_peer_copy_neither_reads_nor_fetches_holes(tmp_path: Path, pair: Pair) -> None:
    os.truncate(tmp_path / "source", 0)
    os.truncate(tmp_path / "source", SIZE)
    pair.data = bytes(SIZE)
    fake = Fake(pair.data, everything())
    assert pair.copy(fake) == 0
    pair.check()
    assert (pair.read, fake.asked) == ([], [])


def run_of(pair: Pair, fake: Fake) -> peer_copy.PeerCopy:
    return peer_copy.PeerCopy(pair.source, pair.part, TUNING, threading.Event(), fake)


def test_late_wrong_bytes_of_a_slow_peer_do_not_overwrite_a_complete_chunk(pair: Pair) -> None:
    """The slow liar has begun to write when another ask brings the chunk; then it goes on."""
    fake = Fake(pair.data, everything())
    run = run_of(pair, fake)
    begun, ended = threading.Event(), threading.Event()
    number = min(set(range(COUNT)) - share())
    liar, honest = peer_copy.ChunkTransfer(number, "b"), peer_copy.ChunkTransfer(number, "c")

    def before(peer: str, number: int) -> None:
        if peer == "b":
            begun.set()
            assert ended.wait(600)

    fake.before = before
    fake.bad["b"] = "wrong"
    for ask in (liar, honest):
        run.schedule.transfers[ask] = 0.0
        run.chunk_locks.setdefault(number, threading.Lock())
    thread = threading.Thread(
        target=run._transfer_chunk, args=(liar, source_reader.allocate_piece_buffer(CHUNK), False)
    )
    thread.start()
    assert begun.wait(600)
    run._transfer_chunk(honest, source_reader.allocate_piece_buffer(CHUNK), True)
    ended.set()
    thread.join()
    run.close()
    start = number * CHUNK
    assert pair.part.image.read_bytes()[start : start + CHUNK] == pair.data[start : start + CHUNK]
    assert number not in list_missing_chunks(pair.part.read_digests(), SIZE, CHUNK)
    assert run.from_peers == CHUNK


def test_second_transfer_of_a_chunk_writes_nothing_before_its_digest_matches(pair: Pair) -> None:
    fake = Fake(pair.data, everything())
    fake.bad["b"] = "wrong"
    run = run_of(pair, fake)
    ask = peer_copy.ChunkTransfer(3, "b")
    run.schedule.transfers[ask] = 0.0
    run.chunk_locks[3] = threading.Lock()
    run._transfer_chunk(ask, source_reader.allocate_piece_buffer(CHUNK), True)
    run.close()
    assert not any(pair.part.image.read_bytes())


class Noting:
    """Stands for the readers' memory: what the copy says of each chunk, and when."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.early: list[int] = []  # marked before they were in the map
        self.forgotten: list[int] = []
        self.arrivals: list[int] = []

    def mark_arrived(self, start: int, length: int) -> None:
        self.arrivals.append(start // CHUNK)
        if start // CHUNK in list_missing_chunks(self.part.read_digests(), SIZE, CHUNK):
            self.early.append(start // CHUNK)

    def clear_arrived(self, number: int) -> None:
        self.forgotten.append(number)

    def list_wanted(self, levels: Sequence[int] = ()) -> list[int]:
        return []

    def clear_wanted(self, number: int) -> None: ...

    def has_recent_source_read(self, now_ns: int, calm_ns: int) -> bool:
        return False

    def is_served(self) -> bool:
        return True


def copy_for(readers: Noting, pair: Pair, fake: Fake) -> None:
    peer_copy.copy_with_peers(
        pair.source, pair.part, TUNING, threading.Event(), fake, cast("ArrivalMap", readers)
    )


def test_arrival_map_shows_a_peers_chunk_only_after_its_digest_matched(
    pair: Pair, patient: None
) -> None:
    mine = sum(1 << number for number in share())
    readers, fake = Noting(pair.part), Fake(pair.data, everything() & ~mine)
    copy_for(readers, pair, fake)
    pair.check()
    assert set(readers.early) <= set(pair.read)
    assert set(readers.early) >= share()


def test_arrival_map_drops_a_chunk_of_a_failed_read_before_a_peer_writes_the_chunk(
    pair: Pair, patient: None
) -> None:
    def fail(number: int) -> None:
        raise SourceUnreadable("/lustre/a", OSError(5, "broken"))

    pair.reading = fail
    readers = Noting(pair.part)
    mine = sum(1 << number for number in share())
    fake = Fake(pair.data, everything() & ~mine)

    def read_elsewhere(peer: str, number: int) -> None:
        assert not (pair.part.source_failed.exists() and not readers.forgotten)
        if readers.forgotten:
            fake.has = everything()

    fake.before = read_elsewhere
    copy_for(readers, pair, fake)
    pair.check()
    assert set(readers.forgotten) >= set(pair.read)  # and what a second ask brings, if any


def test_arrival_map_drops_a_partly_read_chunk_before_a_peer_writes_the_chunk(
    pair: Pair, patient: None, monkeypatch: Patch
) -> None:
    real_policy, real_peer_has = peer_copy.make_policy, ChunkSchedule.record_peer_chunks
    begun, heard = threading.Event(), threading.Event()

    def policy(threads: int, nodes: int) -> SchedulePolicy:
        return msgspec.structs.replace(real_policy(threads, nodes), max_probe_reads=1)

    def peer_has(one: ChunkSchedule, *about: Any) -> None:
        real_peer_has(one, *about)
        heard.set()

    def hold(number: int) -> None:
        if pair.read.count(number) == 2:
            begun.set()
            heard.wait(HANGS)

    def greet(peer: str, stop: Callable[[], bool]) -> None:
        begun.wait(HANGS)

    monkeypatch.setattr(peer_copy, "make_policy", policy)
    monkeypatch.setattr(peer_copy, "PIECE", CHUNK // 4)
    monkeypatch.setattr(ChunkSchedule, "record_peer_chunks", peer_has)
    # A busy machine asks for a chunk twice while it is read: the second comes in aside.
    monkeypatch.setattr(ChunkSchedule, "_start_second_fetch", lambda *_: None)
    pair.reading = hold
    readers, fake = Noting(pair.part), Fake(pair.data, everything())
    monkeypatch.setattr(fake, "open_session", greet)
    unforgotten: list[int] = []
    given: list[int] = []

    def before(peer: str, number: int) -> None:
        if number in readers.early:
            given.append(number)
            if number not in readers.forgotten:
                unforgotten.append(number)

    fake.before = before
    copy_for(readers, pair, fake)
    pair.check()
    assert given
    assert not unforgotten


def test_peer_copy_records_its_bytes_from_peers_while_running(pair: Pair, patient: None) -> None:
    fake = Fake(pair.data, everything())
    seen: list[int] = []
    fake.before = lambda peer, number: seen.append(pair.part.read_peer_bytes())
    pair.copy(fake)
    assert seen[0] == 0
    assert any(0 < count < SIZE for count in seen)
    assert pair.part.read_peer_bytes() == 0


def wrong(data: bytes) -> bytes:
    return bytes(255 - byte for byte in data)


def marked(readers: Noting, number: int) -> bool:
    return number in readers.arrivals


def test_chunk_that_differs_from_the_source_is_rejected_and_its_peer_logged(
    pair: Pair, patient: None, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]
) -> None:
    sample(monkeypatch, *range(COUNT))
    fake = Fake(pair.data, everything())
    fake.lies["c"] = wrong(pair.data)
    pair.copy(fake)
    pair.check()
    assert 1 <= sum(peer == "c" for peer, _ in fake.asked) <= 3, "once by each thread"
    assert "peer=c gave wrong bytes (chunk" in capfd.readouterr().err


def test_earlier_chunks_of_a_peer_with_wrong_bytes_are_read_again_from_the_source(
    pair: Pair, patient: None, monkeypatch: Patch
) -> None:
    """Whatever other peers have by then: they may have got it from the same one."""
    last = COUNT // 2
    sample(monkeypatch, last)
    fake = Fake(pair.data, everything() & ~(1 << last))
    fake.lies["b"] = wrong(pair.data)
    fake.bad = {"c": "refused", "d": "refused"}

    def later(peer: str, number: int) -> None:
        if len(list_missing_chunks(pair.part.read_digests(), SIZE, CHUNK)) == 1:
            fake.has = everything()

    fake.before = later
    readers = Noting(pair.part)
    monkeypatch.setattr(peer_copy.ChunkSchedule, "next_read", only_struck)
    copy_for(readers, pair, fake)
    pair.check()
    assert set(readers.forgotten) == set(range(COUNT)) - {last}
    assert sorted(pair.read) == sorted([*range(COUNT), last]), "the piece, and then all"
    assert {peer for peer, number in fake.asked if number == last} == {"b"}


def only_struck(schedule: ChunkSchedule, now: float) -> ChunkTransfer | None:
    """Has nothing read of the source but what it must decide."""
    struck = schedule._struck & schedule._unasked
    return real_next_read(schedule, now) if struck else None


real_next_read = ChunkSchedule.next_read


@pytest.mark.parametrize("liar_first", [True, False])
def test_source_read_decides_which_of_two_peers_gave_wrong_bytes(
    pair: Pair, liar_first: bool
) -> None:
    fake = Fake(pair.data, everything())
    fake.lies["b"] = wrong(pair.data)
    run = run_of(pair, fake)
    asks = [peer_copy.ChunkTransfer(3, peer) for peer in ("bc" if liar_first else "cb")]
    run.chunk_locks[3] = threading.Lock()
    for ask in asks:
        run.schedule.transfers[ask] = 0.0
    for ask, twice in zip(asks, (False, True), strict=True):
        run._transfer_chunk(ask, source_reader.allocate_piece_buffer(CHUNK), twice)
        run._settle_dispute(3, source_reader.allocate_piece_buffer(CHUNK))
    assert run.wrong_peers == {"b"}
    assert run.schedule._peers.is_out("b", 1e9)
    assert not run.schedule._peers.is_out("c", 1e9)
    start, is_in = 3 * CHUNK, 3 not in list_missing_chunks(pair.part.read_digests(), SIZE, CHUNK)
    assert is_in == (not liar_first)
    if is_in:
        assert pair.part.image.read_bytes()[start : start + CHUNK] == pair.data[start:][:CHUNK]
    assert run.schedule.missing >> 3 & 1 == (not is_in)
    run.close()


def test_own_late_read_of_a_chunk_exposes_the_peer_that_gave_wrong_bytes(pair: Pair) -> None:
    fake = Fake(pair.data, everything())
    fake.lies["b"] = wrong(pair.data)
    run = run_of(pair, fake)
    run.chunk_locks[3] = threading.Lock()
    for ask in (peer_copy.ChunkTransfer(3, "b"), peer_copy.ChunkTransfer(3, SOURCE)):
        run.schedule.transfers[ask] = 0.0
    run._transfer_chunk(
        peer_copy.ChunkTransfer(3, "b"), source_reader.allocate_piece_buffer(CHUNK), False
    )
    run._transfer_chunk(
        peer_copy.ChunkTransfer(3, SOURCE), source_reader.allocate_piece_buffer(CHUNK), True
    )
    run._settle_dispute(3, source_reader.allocate_piece_buffer(CHUNK))
    run.close()
    assert (run.wrong_peers, 3 in list_missing_chunks(pair.part.read_digests(), SIZE, CHUNK)) == (
        {"b"},
        True,
    )


def test_late_chunk_of_a_peer_known_for_wrong_bytes_is_discarded(pair: Pair) -> None:
    fake = Fake(pair.data, everything())
    fake.lies["b"] = wrong(pair.data)
    run = run_of(pair, fake)
    run.chunk_locks[3] = threading.Lock()
    run.schedule.transfers[peer_copy.ChunkTransfer(3, "b")] = 0.0
    run.wrong_peers.add("b")
    run._transfer_chunk(
        peer_copy.ChunkTransfer(3, "b"), source_reader.allocate_piece_buffer(CHUNK), True
    )
    run.close()
    assert not any(pair.part.image.read_bytes())
    assert 3 in list_missing_chunks(pair.part.read_digests(), SIZE, CHUNK)


def test_wrong_chunk_invalidates_all_chunks_of_its_reader_from_any_giver(
    pair: Pair, patient: None, monkeypatch: Patch
) -> None:
    """b and c each gave chunks that x had read, and d some that it read itself; c's is wrong."""
    sample(monkeypatch)
    fake = Fake(pair.data, everything())
    fake.read_by = {"b": "x", "c": "x"}
    run = run_of(pair, fake)
    for number, peer in ((3, "b"), (5, "d")):
        bring(run, number, peer)
    fake.lies["c"] = wrong(pair.data)
    monkeypatch.setattr(run, "samples", {7: [(7 * CHUNK, 4096)]})
    bring(run, 7, "c")
    assert {3, 5, 7} & set(list_missing_chunks(pair.part.read_digests(), SIZE, CHUNK)) == {3, 7}
    assert (run.chunks_by_giver["b"], run.chunks_by_giver["d"], run.from_peers) == (
        set(),
        {5},
        CHUNK,
    )
    bring(run, 9, "b")
    assert 9 in list_missing_chunks(pair.part.read_digests(), SIZE, CHUNK), (
        "x has read that as well"
    )
    assert run.schedule._struck == 1 << 3 | 1 << 7 | 1 << 9
    assert not run.schedule._peers.is_out("b", 1e9), "it only gave what it had got"
    assert fake.told == [("c", "x")]
    run.close()
    known = chunk_readers.find_chunk_readers(pair.part.directory)
    assert known is not None
    assert known.by == {"d": f"{1 << 5:x}"}


@pytest.mark.parametrize("last", [True, False])
def test_notice_of_wrong_bytes_invalidates_the_readers_chunks_before_the_copy_completes(
    pair: Pair, patient: None, monkeypatch: Patch, last: bool
) -> None:
    """Of all that x has read, which came by b, and of nothing else. It is read from the source."""
    fake = Fake(pair.data, everything())
    fake.read_by = {"b": "x"}
    fake.lies = {"b": wrong(pair.data)}
    count = 0

    def noticed(number: int, found: bytes, note: Callable[..., None]) -> None:
        nonlocal count
        note(number, found)
        count += 1
        if count == (COUNT if last else COUNT // 2):
            fake.noticed = {"x", "a"}

    real = peer_copy.PeerCopy.mark_complete
    monkeypatch.setattr(
        peer_copy.PeerCopy,
        "mark_complete",
        lambda run, n, found: noticed(n, found, partial(real, run)),
    )
    monkeypatch.setattr(peer_copy, "WRITE_INTERVAL", 1e9 if last else 0.0)
    # Only notices tell: on a busy machine chunks are asked for twice, and both answers compared.
    monkeypatch.setattr(peer_copy.PeerCopy, "_compare_samples", lambda *_: None)
    monkeypatch.setattr(peer_copy.PeerCopy, "_settle_dispute", lambda *_: None)
    pair.copy(fake)
    pair.check()
    assert fake.told == []


def bring(run: peer_copy.PeerCopy, number: int, peer: str) -> None:
    run.chunk_locks[number] = threading.Lock()
    run.schedule.transfers[peer_copy.ChunkTransfer(number, peer)] = 0.0
    run._transfer_chunk(
        peer_copy.ChunkTransfer(number, peer), source_reader.allocate_piece_buffer(CHUNK), False
    )


def test_copy_from_another_jobs_node_is_compared_with_the_source_and_recorded_as_compared(
    pair: Pair, patient: None, monkeypatch: Patch
) -> None:
    drawn = {0: [(0, 4096)]}
    asked: list[object] = []
    monkeypatch.setattr(peer_copy, "draw_samples", lambda *about: asked.append(about[-1]) or drawn)
    fake = alone(pair, "x")
    assert pair.copy(fake) == SIZE
    known = chunk_readers.find_chunk_readers(pair.part.directory)
    assert known is not None
    assert (known.by, known.compared, asked) == ({"x": f"{everything():x}"}, True, [True])
    assert known.outside == known.by["x"]
    assert set(pair.read) == {0}, "only what is compared"


@pytest.mark.parametrize("trouble", ["the source fails", "nothing is drawn"])
def test_copy_that_was_not_compared_with_the_source_gives_other_jobs_no_chunk(
    pair: Pair, patient: None, monkeypatch: Patch, trouble: str
) -> None:
    def fail(number: int) -> None:
        raise SourceUnreadable("/lustre/a", OSError(5, "broken"))

    sample(monkeypatch, *([0] if trouble == "the source fails" else []))
    pair.reading = fail
    assert pair.copy(alone(pair, "x")) == SIZE
    known = chunk_readers.find_chunk_readers(pair.part.directory)
    assert known is not None
    assert (known.compared, known.chunks_for_other_jobs(everything(), is_whole=True)) == (False, 0)


def alone(pair: Pair, *givers: str) -> Fake:
    """A job of one node, and nodes of other jobs that have all of it."""
    fake = Fake(pair.data, everything())
    fake.nodes, fake.givers = ("a",), givers
    return fake


def test_arrival_map_shows_a_sampled_chunk_only_after_comparison_with_the_source(
    pair: Pair, patient: None, monkeypatch: Patch
) -> None:
    sample(monkeypatch, *range(COUNT))
    readers = Noting(pair.part)
    shown: dict[int, bool] = {}  # a second ask of a busy machine may compare it again
    pair.reading = lambda number: shown.setdefault(number, marked(readers, number))
    copy_for(readers, pair, Fake(pair.data, everything()))
    pair.check()
    assert shown == dict.fromkeys(range(COUNT), False)


def test_unreadable_source_rejects_no_sampled_chunks_of_peers(
    pair: Pair, patient: None, monkeypatch: Patch
) -> None:
    def fail(number: int) -> None:
        raise SourceUnreadable("/lustre/a", OSError(5, "broken"))

    sample(monkeypatch, *range(COUNT))
    pair.reading = fail
    assert pair.copy(Fake(pair.data, everything())) == SIZE
    pair.check()


def test_copy_thread_waits_for_running_transfers_and_reads_an_invalidated_chunk(pair: Pair) -> None:
    run = run_of(pair, Fake(pair.data, 0))
    run.schedule.missing, run.schedule._unasked, run.transfers_under_way = 0, 0, 1
    ended: list[object] = []
    thread = threading.Thread(
        target=lambda: ended.append(run._wait_for_transfer(run.schedule.next_read)), daemon=True
    )
    thread.start()
    with run.schedule_condition:
        run.schedule.mark_missing([5])
        run.transfers_under_way = 0
        run.schedule_condition.notify_all()
    thread.join()
    run.close()
    assert ended == [(peer_copy.ChunkTransfer(5, SOURCE), False)]
