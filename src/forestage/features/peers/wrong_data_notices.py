"""Notices that what one node read of a key from the source is wrong: they follow the chunks.

    GET /v1/wrong/<key>/<reader>   the copy that found it tells who gave the chunk, and the reader
    /run/forestage/wrong/<key>     on each node that has such chunks: their readers, one a line

The service that is told gives these chunks to nobody any more, and tells those to whom it gave any
of the key. A copy under way strikes them, and the sweep evicts an entry that has some. A notice is
believed as it is: a wrong one costs a copy, and no bytes.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator

from forestage.cache.layout import Cache
from forestage.features.peers import chunk_readers, protocol
from forestage.features.peers.addresses import AddressFinder
from forestage.features.peers.auth import Authenticator
from forestage.features.peers.connection import PeerConnection, PeerRequestError, ResponseDeadline
from forestage.paths import NodePaths
from forestage.system import files, folders
from forestage.system.files import open_descriptor

PATIENCE = 1.0  # seconds for one node
REPEAT_AFTER = (
    60.0  # seconds before the same one counts again: it comes back by others who are told
)
MAX_READERS = 64  # of one key
MAX_KEYS = 1000
MAX_REPLY_BYTES = 64  # bytes of an answer

PATH = re.compile(r"/v1/wrong/([0-9a-f]{32})/([A-Za-z0-9][A-Za-z0-9._-]{0,62})")


def chunks_read_by(known: chunk_readers.ChunkReaders | None, reader: str, me: str) -> int:
    """Pure: the chunks of a copy that this node read; -1 is all. `known` is None without peers."""
    if known is None:
        return -1 if reader == me else 0
    return int(known.by.get(reader, "0"), 16)


def has_wrong_chunks(places: NodePaths, cache: Cache, key: str, me: str) -> bool:
    """Whether an entry has any of the chunks that are wrong. Raises OSError."""
    directory = cache.entry_dir(key)
    known = chunk_readers.find_chunk_readers(directory)
    return directory.exists() and any(
        chunks_read_by(known, who, me) for who in read_wrong_readers(places, key)
    )


def record_notice(places: NodePaths, key: str, reader: str) -> None:
    """Notes that these chunks are wrong. Raises OSError."""
    folders.ensure_directory_with_mode(places.wrong_bytes_notes)
    file = places.wrong_bytes_notes / key
    before = read_wrong_readers(places, key)
    many = len(before) >= MAX_READERS or (
        not before and len(list(places.wrong_bytes_notes.iterdir())) >= MAX_KEYS
    )
    if reader not in before and not many:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with open_descriptor(file, flags, 0o600) as fd:
            os.write(fd, f"{reader}\n".encode())


def read_wrong_readers(places: NodePaths, key: str) -> frozenset[str]:
    """Whose chunks of the key are wrong. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return frozenset(files.read_file(places.wrong_bytes_notes / key).decode().split())
    return frozenset()


def list_keys_with_notices(places: NodePaths) -> Iterator[str]:
    """The keys of which something is wrong here. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        yield from sorted(file.name for file in places.wrong_bytes_notes.iterdir())


def send_notices(
    addresses: AddressFinder,
    nodes: Iterable[str],
    key: str,
    reader: str,
    authenticator: Authenticator,
) -> None:
    """Tells these nodes, one after the other; who is out of reach is not told."""
    for node in nodes:
        until = time.monotonic() + PATIENCE

        def late(until: float = until) -> bool:
            return time.monotonic() > until

        line = PeerConnection(addresses.node_address(node))
        with (
            contextlib.suppress(PeerRequestError, protocol.SessionUnknown),
            contextlib.closing(line),
        ):
            session = protocol.open_session(line, key, authenticator, late)
            limit = ResponseDeadline(0.0, until, late)
            protocol.fetch_reply(line, session, f"/v1/wrong/{key}/{reader}", MAX_REPLY_BYTES, limit)
