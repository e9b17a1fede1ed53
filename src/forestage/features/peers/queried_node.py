"""A node that is asked for what another feature has there, as by features/data/shared_scan.py.

One connection, one session. The service neither waits nor walks: whoever asks comes
again, after pauses that grow, until there is an answer or it is too late.
"""

import contextlib
import threading
import time
from collections.abc import Callable

from forestage.config import Config
from forestage.errors import PeerError
from forestage.features.peers import addresses, auth, protocol, silent_nodes
from forestage.features.peers.connection import PeerConnection, PeerRequestError, ResponseDeadline
from forestage.features.peers.protocol import PeerSession, SessionUnknown
from forestage.paths import NodePaths

MAX_REPLY_BYTES = 64 << 20  # bytes of an answer: a name of 200,000 files has 100 of these or more
SLOWEST = 1 << 20  # bytes a second; a limit for one answer
GRACE = 10.0  # seconds more for it


def query_node(
    config: Config, places: NodePaths, node: str, name: str, path: str
) -> "PeerNodeClient":
    """Return a node that may have something below a path of its service (service.routes).

    `name` is what the session is for. Raises PeerError, OSError.
    """
    return PeerNodeClient(config, places, node, name, path)


class PeerNodeClient:
    """A node, and the path there."""

    def __init__(self, config: Config, places: NodePaths, node: str, name: str, path: str) -> None:
        """Raises PeerError, OSError where the key file cannot be used."""
        self._prover = auth.make_authenticator(config.peers.key_file, places)
        self._line = PeerConnection(
            addresses.load_addresses(config.peers, places).node_address(node)
        )
        self._path = path
        self._name = name
        self._node, self._places = node, places
        self._session: PeerSession | None = None
        self._opening: threading.Thread | None = None

    def answers_within(self, seconds: float, now: float) -> bool:
        """Return whether a session with the node could be opened in so many seconds.

        No node that was silent a moment ago is asked; `now` is monotonic. For a step, which can
        look itself. Neither a name service nor the node's own munged can be
        interrupted, so a thread opens the session, which is abandoned if need be.
        """
        if silent_nodes.is_silent(self._places, self._node, now):
            return False
        until = time.monotonic() + seconds
        opened: list[PeerSession] = []

        def open_session() -> None:
            about = self._line, self._name, self._prover
            with contextlib.suppress(PeerRequestError):
                opened.append(protocol.open_session(*about, lambda: time.monotonic() > until))

        self._opening = threading.Thread(target=open_session, name="asked", daemon=True)
        self._opening.start()
        self._opening.join(seconds)
        self._session = opened[0] if opened else None
        return bool(opened)

    def query(self, more: str = "", stop: Callable[[], bool] = lambda: False) -> bytes | None:
        """What it says now, or the part of it that `more` names; None: nothing (yet).

        Raises PeerError, also once `stop` says so.
        """
        try:
            return self._query_with_retry(more, stop)
        except PeerRequestError as error:
            raise PeerError(str(error)) from None

    def _query_with_retry(self, more: str, stop: Callable[[], bool]) -> bytes | None:
        for _ in range(2):
            if self._session is None:
                self._session = protocol.open_session(self._line, self._name, self._prover, stop)
            limit = ResponseDeadline(
                0.0, time.monotonic() + GRACE + MAX_REPLY_BYTES / SLOWEST, stop
            )
            try:
                path = self._path + more
                return protocol.fetch_reply(self._line, self._session, path, MAX_REPLY_BYTES, limit)
            except SessionUnknown:  # its service was restarted
                self._session = None
        raise PeerRequestError("refused", "the session is not known")

    def close(self) -> None:
        """End the connection, but for one that a thread still opens: the thread ends it."""
        if self._opening is None or not self._opening.is_alive():
            self._line.close()
