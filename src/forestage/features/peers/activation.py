"""Decide whether a node exchanges chunks with other nodes, by `peers.enabled` and its service.

A hook does not import this to learn that they are off: `features.list_switched_on` first looks at
the same key, and at whether the sign is there. Nothing else decides by the key.

    /run/forestage/peer.sign   the sign of this node's service: CLOCK_MONOTONIC, in seconds

With `auto` a copy asks other nodes while this node's own service runs: a site without the service
gets no questions either, and nothing is configured twice. The service holds a lock on its sign, and
a hook tries that lock, without a connection. Beside that the service writes the time: a restart of
its unit takes seconds, in which jobs begin that are not to read the whole image. The time alone
would not do, as a service below all jobs' priority may get no processor for long.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from forestage.config import Config
from forestage.paths import NodePaths
from forestage.system import files, folders, lock

SIGN_LASTS = 15.0  # seconds after the service has ended; its unit starts it again after 5
MIN_NODES, MIN_SAVED_CHUNKS = (
    3,
    32,
)  # fewer nodes, or chunks that all of them save, are not worth it by default
LOCK_TIMEOUT = (
    5.0  # seconds in which the lock must be free: a hook that tries it holds it for a moment
)


def is_on(config: Config, places: NodePaths, now: float) -> bool:
    """Return whether this node asks other nodes; `now` is monotonic."""
    if config.peers.enabled is None:
        return may_serve(config) and is_service_running(places, now)
    return config.peers.enabled


def is_worthwhile(config: Config, nodes: int, chunks: int) -> bool:
    """Return whether the nodes of a job share a copy of so many chunks. Pure.

    By bench/first-start. To meet takes the nodes of a job about half a second, and exchanging
    chunks gains only where the file server is what limits them, which nothing tells beforehand. Two
    nodes can gain little and lose as much. An admin who writes `true` has decided, and with
    `reach: cluster` a node may be asked that has all of it.
    """
    if not is_automatic(config) or config.peers.reach == "cluster":
        return True
    return nodes >= MIN_NODES and chunks * (nodes - 1) >= MIN_SAVED_CHUNKS


def may_serve(config: Config) -> bool:
    """Return whether the configuration allows a service on this node. Pure."""
    # A peer's bytes are proven by the chunk's digest, which rsync does not take.
    return config.peers.enabled is not False and config.engine == "chunks"


def explain_no_service(config: Config) -> str:
    """Return why the configuration allows no service, as the keys say it. Pure."""
    return "peers.enabled: false" if config.peers.enabled is False else f"engine: {config.engine}"


def is_automatic(config: Config) -> bool:
    """Return whether nobody has asked for peers, so that what is missing is no fault. Pure."""
    return config.peers.enabled is None


def is_service_running(places: NodePaths, now: float) -> bool:
    """Return whether this node's service runs, or ran a moment ago; `now` is monotonic."""
    try:
        if not lock.is_free(places.peer_sign):
            return True
        since = float(files.read_file(places.peer_sign))
    except (OSError, ValueError):  # no sign, or one that is being written
        return False
    # A later time is of another boot.
    return 0 <= now - since <= SIGN_LASTS


@contextlib.contextmanager
def hold_sign(places: NodePaths) -> Iterator[Callable[[], None]]:
    """Hold the sign for the life of the service; yield what renews its time.

    Raises LockTimeout, OSError.
    """
    folders.ensure_directory_with_mode(places.run, folders.PASSABLE)
    with lock.held(places.peer_sign, LOCK_TIMEOUT):

        def renew() -> None:
            # In place: a file that takes its name would be another file's lock.
            # All digits: rounded up it would be a time to come, which is another boot's.
            files.overwrite_file(places.peer_sign, f"{time.monotonic()}\n".encode())

        renew()
        yield renew
