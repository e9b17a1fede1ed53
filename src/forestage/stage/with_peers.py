"""The default engine where other nodes of the job help: some threads read, others ask peers.

The schedule of forestage.peers says which chunk comes next, and from where. A peer's bytes go
straight into the image, and count only once their digest was right. A chunk that is on its way
already is brought a second time in memory, and written only if it comes first: no late or wrong
piece may go over bytes that count.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from forestage.asks import Ask, Policy
from forestage.cache.part import Part
from forestage.errors import Declined
from forestage.refusal import Failed
from forestage.shares import SOURCE
from forestage.stage import reading
from forestage.stage.chunks import Run, Tuning, Write
from forestage.stage.source import Source, Unreadable
from forestage.supply import Supply

POLL = 0.1  # seconds between two looks of a thread that has nothing to do


class Peers(Protocol):
    """peers.client.Peers, as far as the engine uses it; tests have others."""

    nodes: tuple[str, ...]
    me: str

    def fetch(
        self,
        peer: str,
        number: int,
        start: int,
        size: int,
        buffer: memoryview,
        give_up: float,
        sink: Write,
        stop: Callable[[], bool],
        wait: float | None = None,
        knows: Callable[[int, bool], None] = lambda has, blind: None,
    ) -> bytes:
        """Brings a chunk through `buffer` into `sink`; its digest. Raises refusal.Failed."""


def copy(
    source: Source,
    part: Part,
    tuning: Tuning,
    stop: threading.Event,
    peers: Peers,
    downloads: int,
) -> int:
    """As chunks.copy, with the help of peers; the bytes that came from them.

    `downloads` chunks are asked of peers at once.
    """
    run = Shared(source, part, tuning, stop, peers, downloads)
    try:
        run.share()
    finally:
        run.close()
    return run.from_peers


def policy(threads: int, downloads: int, nodes: int) -> Policy:
    """Pure: the fewer streams each of many nodes reads in, the sooner its chunks are whole."""
    at_once = min(threads, max(1, -(-4 * threads // nodes)))
    return Policy(at_once=at_once, busy=downloads)


class _Over(Exception):
    """The chunk has come in another way."""


class Shared(Run):
    """A run whose chunks come from the source and from peers."""

    def __init__(
        self,
        source: Source,
        part: Part,
        tuning: Tuning,
        stop: threading.Event,
        peers: Peers,
        downloads: int,
    ) -> None:
        super().__init__(source, part, tuning, stop)
        # Between our chunks lie those of others: what the kernel reads ahead, nobody wants here.
        os.posix_fadvise(source.buffered, 0, 0, os.POSIX_FADV_RANDOM)
        self.peers = peers
        self.downloads = downloads
        self.from_peers = 0
        self.turn = threading.Condition()
        self.guards: dict[int, threading.Lock] = {}
        self.unreadable: Unreadable | None = None
        self.supply = Supply(
            part.directory.name,
            peers.nodes,
            peers.me,
            [number for number in self.todo if number in self.data],
            tuning.chunk,
            policy(tuning.threads, downloads, len(peers.nodes)),
        )

    def share(self) -> None:
        for number in self.todo:
            if number not in self.data:  # a hole: nothing to bring
                self.note(number, self.take(number, memoryview(b""), self.write))
        readers = [lambda: self._serve(self.supply.next_of_source)] * self.tuning.threads
        askers = [lambda: self._serve(self.supply.next_of_peers)] * self.downloads
        self.join([*readers, *askers])

    def close(self) -> None:
        super().close()
        if self.supply.done:  # of a part that is left behind, both stay true
            self.part.forget_peers()

    def _serve(self, next_ask: Callable[[float], Ask | None]) -> None:
        """A thread's life."""
        buffer = reading.buffer(self.tuning.chunk)
        try:
            while (found := self._next(next_ask)) is not None:
                ask, twice = found
                self._bring(ask, buffer, twice)
        except (OSError, Declined) as error:
            self.errors.append(error)
            self.halt.set()
        finally:
            with self.turn:
                self.turn.notify_all()

    def _next(self, next_ask: Callable[[float], Ask | None]) -> tuple[Ask, bool] | None:
        """What to bring, and whether it is on its way already; None: no more."""
        with self.turn:
            while not (self._ends() or self.supply.done):
                now = time.monotonic()
                ask = next_ask(now)
                if ask is not None:
                    self.guards.setdefault(ask.number, threading.Lock())
                    return ask, self.supply.twice(ask)
                if self.unreadable and self.supply.hopeless(now):
                    raise self.unreadable
                self.turn.wait(POLL)
        return None

    def _ends(self) -> bool:
        return self.stop.is_set() or self.halt.is_set()

    def _bring(self, ask: Ask, buffer: memoryview, twice: bool) -> None:
        start, size = self.span(ask.number)
        aside = memoryview(mmap.mmap(-1, size)) if twice else None
        guard = self.guards[ask.number]

        def sink(at: int, piece: memoryview) -> None:
            if aside is not None:
                aside[at - start : at - start + len(piece)] = piece
                return
            with guard:
                if self.supply.obsolete(ask):
                    raise _Over
                self.write(at, piece)

        try:
            found = self._fetched(ask, buffer, sink)
        except Failed as failed:
            with self.turn:
                self.supply.failed(ask, failed.why, time.monotonic())
            return
        except _Over:
            with self.turn:
                self.supply.got(ask, time.monotonic())
            return
        if found is not None:
            with guard:
                if aside is not None and not self.supply.obsolete(ask):
                    self.write(start, aside)
                self._is_in(ask, size, found)

    def _fetched(self, ask: Ask, buffer: memoryview, sink: Write) -> bytes | None:
        """The digest; None where the source cannot be read. Raises refusal.Failed."""
        if ask.peer == SOURCE:
            try:
                return self.take(ask.number, buffer, sink)
            except Unreadable as error:
                with self.turn:
                    self.unreadable = error
                    self.supply.failed(ask, "source", time.monotonic())
                self.part.note_blind()
                return None
        start, size = self.span(ask.number)

        def knows(has: int, blind: bool) -> None:
            with self.turn:
                self.supply.knows(ask.peer, has, time.monotonic(), blind)

        return self.peers.fetch(
            ask.peer,
            ask.number,
            start,
            size,
            buffer,
            self.supply.give_up(ask),
            sink,
            lambda: self._ends() or self.supply.obsolete(ask),
            self.supply.wait(ask),
            knows,
        )

    def _is_in(self, ask: Ask, size: int, found: bytes) -> None:
        """Notes a chunk, unless another ask was faster. The caller has the chunk's guard."""
        if not self.supply.obsolete(ask):
            self.note(ask.number, found)
            if ask.peer != SOURCE:
                with self.turn:
                    self.from_peers += size
                    self.part.note_peers(self.from_peers)
        with self.turn:
            self.supply.got(ask, time.monotonic())
            self.turn.notify_all()
