"""Chunks from the other nodes of a job: connections, sessions, and which of them are kept.

Used by the threads of a copy. What goes over a connection is exchange.py's part, which is loaded
when there is somebody to ask.
"""

import contextlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from forestage.config import Config
from forestage.paths import Places
from forestage.refusal import Failed as Failed
from forestage.refusal import Why as Why

if TYPE_CHECKING:
    from forestage.credential import Prover
    from forestage.exchange import Session
    from forestage.wire import Line

KEPT = 32  # connections of one thread
LONGEST_WAIT = 5.0  # seconds; the service waits no longer for a chunk on its way
WAIT_SHARE = 0.75  # of what a chunk may take; the rest is for its bytes
MAX_NODES = 65536  # of a job; a user's word, where a step says it
MOMENT = 0.2  # seconds between two looks at whether a chunk is still wanted
AGAIN = 1.0  # seconds for which all threads of a copy take one's failure for theirs

# Names as hosts have them, with numbers in brackets: nothing that could be a port or a path.
_SPANS = r"\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\]"
_HOST = rf"[A-Za-z0-9](?:[A-Za-z0-9._-]|{_SPANS})*"
_LIST = re.compile(rf"{_HOST}(?:,{_HOST})*", re.ASCII)
_NAME = re.compile(_HOST, re.ASCII)
_BRACKETS = re.compile(r"\[([^]]*)\]")


class _Door:
    """How to get in at one peer; the first thread opens it for all."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.failed: Failed | None = None
        self.failed_at = 0.0

    @contextlib.contextmanager
    def held(self, stop: Callable[[], bool]) -> Iterator[None]:
        """For one thread at a time; who opens it may take seconds. Raises Failed at `stop`."""
        while not self.lock.acquire(timeout=MOMENT):
            if stop():
                raise Failed("slow", "it is not wanted any more")
        try:
            yield
        finally:
            self.lock.release()


class Peers:
    """The nodes of a job, for the copy of one key."""

    def __init__(
        self, config: Config, nodes: tuple[str, ...], me: str, key: str, prover: "Prover"
    ) -> None:
        self.nodes = nodes
        self.me = me
        self._key = key
        self._config = config.peers
        self._prover = prover
        self._doors = {node: _Door() for node in nodes}
        self._own = threading.local()  # each thread's connections
        self._all: list[OrderedDict[str, Line]] = []

    @classmethod
    def of(
        cls,
        config: Config,
        node_name: str,
        nodelist: str,
        key: str,
        places: Places | None = None,
    ) -> "Peers | None":
        """None: peers are off, or there is nobody else. `nodelist` as Slurm writes it: n[1-4,7].

        Raises PeerError and OSError where the key file cannot be used.
        """
        # One name has neither; then not even the parser is loaded.
        if not (config.peers.enabled and node_name and ("," in nodelist or "[" in nodelist)):
            return None
        nodes = expand(nodelist)
        if node_name not in nodes:
            nodes = (*nodes, node_name)
        if len(nodes) < 2:
            return None
        from forestage import credential

        prover = credential.prover(config.peers.key_file, (places or Places()).munge)
        return cls(config, nodes, node_name, key, prover)

    def fetch(
        self,
        peer: str,
        number: int,
        start: int,
        size: int,
        buffer: memoryview,
        give_up: float,
        sink: Callable[[int, memoryview], None],
        stop: Callable[[], bool],
        wait: float | None = None,
        knows: Callable[[int, bool], None] = lambda has, blind: None,
    ) -> bytes:
        """Brings a chunk, piece by piece through `buffer`, into `sink(offset in the image, piece)`.

        Gives its digest, which is right. Raises Failed: then no byte given to `sink` counts; what
        `sink` raises goes through. Seconds: `give_up` as a whole, to which the first chunk of a
        peer may add exchange.HANDSHAKE; `wait` with the peer for a chunk on its way. `knows` is
        told what the peer has, bit 5 for chunk 5, where it has the image or a part of it.
        """
        from forestage import exchange

        patience = min(LONGEST_WAIT, WAIT_SHARE * give_up) if wait is None else wait
        chunk = exchange.Chunk(self._key, number, start, size, give_up, patience)
        taker = exchange.Taker(buffer, sink, knows, stop)
        line = self._line(peer)
        for _ in range(2):
            session = self._session(peer, line, stop)
            try:
                return exchange.fetch(line, session, chunk, taker)
            except exchange.Forgotten:
                self._forget(peer, session, stop)
        raise Failed("refused", "the session is not known")

    def close(self) -> None:
        """Ends all connections. No other thread uses them any more."""
        for lines in self._all:
            while lines:
                lines.popitem()[1].close()

    def _line(self, peer: str) -> "Line":
        """This thread's connection to a peer; the one longest unused goes for a new one."""
        from forestage import wire

        if not hasattr(self._own, "lines"):
            self._own.lines = OrderedDict()
            self._all.append(self._own.lines)
        lines: OrderedDict[str, Line] = self._own.lines
        if peer not in lines:
            lines[peer] = wire.Line(self._config.of(peer))
            while len(lines) > KEPT:
                lines.popitem(last=False)[1].close()
        lines.move_to_end(peer)
        return lines[peer]

    def _session(self, peer: str, line: "Line", stop: Callable[[], bool]) -> "Session":
        """The copy's session with a peer. Raises Failed; one thread's failure is everybody's."""
        from forestage import exchange

        door = self._doors[peer]
        with door.held(stop):
            if door.session is not None:
                return door.session
            if door.failed is not None and time.monotonic() - door.failed_at < AGAIN:
                raise Failed(door.failed.why, str(door.failed))
            try:
                door.session = exchange.open_session(line, self._key, self._prover, stop)
            except Failed as failed:
                if failed.why != "slow":  # else this thread alone wants it no more
                    door.failed, door.failed_at = failed, time.monotonic()
                raise
            return door.session

    def _forget(self, peer: str, session: "Session", stop: Callable[[], bool]) -> None:
        door = self._doors[peer]
        with door.held(stop):
            if door.session is session:  # else another thread has made a new one
                door.session = None


def expand(nodelist: str) -> tuple[str, ...]:
    """Pure: the names in a list as Slurm writes it; () where it is none, or too long."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    if not _LIST.fullmatch(nodelist) or _at_most(nodelist) > MAX_NODES:
        return ()
    try:
        # Without groups: looking these up would read files and run programs.
        return tuple(NodeSet(nodelist, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return ()


def _at_most(nodelist: str) -> int:
    """Pure: how many names there may be in it; to be known before they are made."""
    total = 0
    for name in _NAME.findall(nodelist):
        count = 1
        for within in _BRACKETS.findall(name):
            spans = [span.partition("-") for span in within.split(",")]
            count *= sum(max(0, int(high or low) - int(low)) + 1 for low, _, high in spans)
        total += count
    return total
