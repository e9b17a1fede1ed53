"""The nodes that one copy asks: its sessions and connections, shared by its threads.

A copy has one session with each peer, which a thread of its own opens first: a peer that does not
answer holds up no thread that brings chunks. Each of these has connections of its own, and keeps
the MAX_CONNECTIONS that it used last.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from forestage.config import Config
from forestage.features.peers import (
    activation,
    addresses,
    auth,
    known_copies,
    node_list,
    protocol,
    proven_node,
    silent_nodes,
    wrong_data_notices,
)
from forestage.features.peers.auth import Authenticator
from forestage.features.peers.connection import POLL_INTERVAL, PeerConnection, PeerRequestError
from forestage.features.peers.known_copies import OtherJobsPeers
from forestage.features.peers.protocol import (
    ChunkReceiver,
    ChunkRequest,
    PeerSession,
    SessionUnknown,
)
from forestage.paths import NodePaths
from forestage.slurm.nodelist import expand_nodelist

MAX_CONNECTIONS = 32  # connections of one thread
NO_OTHER_PEERS = OtherJobsPeers()
SILENCE = 0.9  # seconds without an answer; less than connection.CONNECT_TIMEOUT
AGAIN = 1.0  # seconds for which one thread's failure to open a session counts for all threads


class _SharedSession:
    """The session with one peer, and the lock under which it is opened."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: PeerSession | None = None
        self.failed: PeerRequestError | None = None
        self.failed_at = 0.0

    @contextlib.contextmanager
    def hold_lock(self, stop: Callable[[], bool]) -> Iterator[None]:
        """Takes the lock; opening a session may take seconds. Raises PeerRequestError at `stop`."""
        while not self.lock.acquire(timeout=POLL_INTERVAL):
            if stop():
                raise PeerRequestError("slow", "it is not wanted any more")
        try:
            yield
        finally:
            self.lock.release()


class PeerClient:
    """Nodes for the copy of one key: `nodes` share the reading, `givers` are of other jobs."""

    def __init__(
        self,
        config: Config,
        nodes: tuple[str, ...],
        me: str,
        key: str,
        authenticator: Authenticator,
        others: OtherJobsPeers = NO_OTHER_PEERS,
        places: NodePaths | None = None,
    ) -> None:
        self.givers = others.givers
        self.leaders = others.readers if others.leaves_reading else ()
        self.nodes = nodes if others.leaves_reading else (*nodes, *others.readers)
        self.me = me
        self._key = key
        self._addresses = addresses.load_addresses(config.peers, places or NodePaths())
        self._authenticator = authenticator
        self._places = places or NodePaths()
        self._sessions = {node: _SharedSession() for node in (*nodes, *self.givers)}
        self._is_proven = False
        self._own = threading.local()  # each thread's connections

    def fetch_chunk(self, peer: str, chunk: ChunkRequest, receiver: ChunkReceiver) -> bytes:
        """Writes a chunk to the receiver and returns its digest, which the bytes have.

        Raises PeerRequestError: then nothing that was written counts. What `receiver.write` raises
        goes through. The first chunk of a peer may take protocol.HANDSHAKE_TIMEOUT seconds more
        than its limit.
        """
        line = self._reuse_connection(peer)
        for _ in range(2):
            session = self._ensure_session(peer, line, receiver.is_unwanted)
            try:
                return protocol.fetch_chunk(line, session, self._key, chunk, receiver)
            except SessionUnknown:
                self._drop_session(peer, session, receiver.is_unwanted)
        raise PeerRequestError("refused", "the session is not known")

    def open_session(self, peer: str, stop: Callable[[], bool]) -> None:
        """Opens the session with a peer, by a connection of its own. Raises PeerRequestError.

        Notes for other copies whether it was silent; a refusal is no silence.
        """
        begun = time.monotonic()
        line = PeerConnection(self._addresses.node_address(peer))
        try:
            self._ensure_session(peer, line, stop)
        except PeerRequestError as refused:
            now = time.monotonic()
            if now - begun >= SILENCE:
                silent_nodes.record_silence(self._places, peer, now)
            elif refused.why != "slow":  # else the copy is over, and nobody knows
                silent_nodes.delete_silence(self._places, peer)
            raise
        finally:
            line.close()
        silent_nodes.delete_silence(self._places, peer)

    def list_silent_nodes(self) -> frozenset[str]:
        """The nodes that did not answer another copy a short while ago."""
        return silent_nodes.list_silent_nodes(self._places, time.monotonic())

    def list_wrong_readers(self) -> frozenset[str]:
        """The nodes whose chunks of the key another copy has found wrong."""
        with contextlib.suppress(OSError):
            return wrong_data_notices.read_wrong_readers(self._places, self._key)
        return frozenset()

    def report_wrong_reader(self, giver: str, reader: str) -> None:
        """Tells who gave wrong bytes, who had read them, and this node's service, of it."""
        known = (giver, reader, self.me)
        nodes = [node for node in dict.fromkeys(known) if node in self._sessions]
        wrong_data_notices.send_notices(
            self._addresses, nodes, self._key, reader, self._authenticator
        )

    def _reuse_connection(self, peer: str) -> PeerConnection:
        """This thread's connection to a peer; a new one takes the place of the least recent one."""
        if not hasattr(self._own, "lines"):
            self._own.lines = OrderedDict()
        lines: OrderedDict[str, PeerConnection] = self._own.lines
        if peer not in lines:
            lines[peer] = PeerConnection(self._addresses.node_address(peer))
            while len(lines) > MAX_CONNECTIONS:
                lines.popitem(last=False)[1].close()
        lines.move_to_end(peer)
        return lines[peer]

    def _ensure_session(
        self, peer: str, line: PeerConnection, stop: Callable[[], bool]
    ) -> PeerSession:
        """The copy's session with a peer, opened if need be. Raises PeerRequestError."""
        shared = self._sessions[peer]
        with shared.hold_lock(stop):
            if shared.session is not None:
                return shared.session
            # Else each thread would wait for the time-out of its own connection, one by one.
            if shared.failed is not None and time.monotonic() - shared.failed_at < AGAIN:
                raise PeerRequestError(shared.failed.why, str(shared.failed))
            try:
                shared.session = protocol.open_session(line, self._key, self._authenticator, stop)
                self._record_proof(peer)
            except PeerRequestError as failed:
                if failed.why != "slow":  # else only this thread does not want its chunk any more
                    shared.failed, shared.failed_at = failed, time.monotonic()
                raise
            return shared.session

    def _record_proof(self, peer: str) -> None:
        """Note, once for a copy, that another node could read our credential."""
        if peer != self.me and not self._is_proven:
            self._is_proven = True
            proven_node.record_proven_node(self._places, peer, time.time())

    def _drop_session(self, peer: str, session: PeerSession, stop: Callable[[], bool]) -> None:
        shared = self._sessions[peer]
        with shared.hold_lock(stop):
            if shared.session is session:  # else another thread has opened a new one
                shared.session = None


def find_client_of_nodes(
    config: Config,
    node_name: str,
    nodelist: str,
    key: str,
    places: NodePaths | None,
    is_speculative: bool,
    chunks: int | None,
) -> PeerClient | None:
    """As peers.find_peer_client, which loads this for more than one node."""
    nodes, places = expand_nodelist(nodelist), places or NodePaths()
    if chunks is not None and not activation.is_worthwhile(config, len(nodes), chunks):
        return None
    if node_name not in nodes:
        nodes = (*nodes, node_name)
    listed = node_list.read_up_nodes(places, time.time()) if config.peers.reach == "cluster" else ()
    if len(nodes) < 2 and not listed:
        return None
    prover = auth.make_authenticator(config.peers.key_file, places)
    found = addresses.load_addresses(config.peers, places)
    others = known_copies.query_known_copies(
        found, key, node_name, nodes, listed, prover, is_speculative
    )
    if len(nodes) < 2 and not others.givers:
        return None
    return PeerClient(config, nodes, node_name, key, prover, others, places)
