"""The list of images that pending jobs name: one host makes it of the queue, all nodes ask for it.

    GET /v1/expected              the answer: `ExpectedImageList`, with a MAC
    /run/forestage/expected.json  on the host as it was made, on a node as it was taken

A node takes no list that is older than its own, and none for longer than LIST_LASTS: without the
host it knows nothing after a while, and does nothing. What is in a list is a wish. Each image is
opened as the user whose jobs name it (docs/decisions/0053-nodes-ask-the-prefetch-host.md).
"""

import time
from collections.abc import Mapping

import msgspec

from forestage.config import ServiceAddress
from forestage.errors import PeerError
from forestage.features.peers import protocol
from forestage.features.peers.auth import Authenticator
from forestage.features.peers.connection import PeerConnection, PeerRequestError, ResponseDeadline
from forestage.features.prefetch.policy import ExpectedStarts
from forestage.features.prefetch.queue_lines import is_image_path
from forestage.features.prefetch.service import locate_list
from forestage.paths import NodePaths
from forestage.system import folders, records

KEY = "expected"  # in place of an entry's, in a credential and a path
LIST_LASTS = 900.0  # seconds
MAX_CLOCK_AHEAD = 120.0  # seconds that the host's clock may be ahead of this node's
PATIENCE = 10.0  # seconds for the answer: all nodes may ask after a power cut
MAX_REPLY_BYTES = 2 << 20  # bytes of it
MAX_UID = (1 << 32) - 2
MAX_ROWS = 256  # of a list


class ExpectedImageList(msgspec.Struct, frozen=True):
    """The list; `made` and `expires` in seconds since the epoch, by the host's clock.

    `sequence` grows with each list. `partitions` have their nodes as Slurm writes lists.
    """

    sequence: int
    made: float
    expires: float
    partitions: Mapping[str, str] = {}
    rows: tuple[ExpectedStarts, ...] = ()


def next_sequence(before: ExpectedImageList | None, now: float) -> int:
    """Pure: the sequence of a list that is made now; it grows, whatever the clock does."""
    return max(before.sequence + 1 if before else 0, int(now * 1000))


def explain_list_refusal(
    told: ExpectedImageList, known: ExpectedImageList | None, now: float
) -> str:
    """Pure: "" for a list that a node takes in place of the one it has, else why it does not."""
    if told.expires <= now or told.made + LIST_LASTS <= now:
        return "the list is too old"
    if told.made > now + MAX_CLOCK_AHEAD:
        return "the list is of a later time than this node's"
    if known is not None and is_valid(known, now) and told.sequence < known.sequence:
        return "the list is older than the one that is here"
    if max(len(told.rows), len(told.partitions)) > MAX_ROWS:
        return "the list is too long"
    # Root is no user whose jobs are copied for: it may read all, and has no share of the cache.
    if not all(0 < row.user <= MAX_UID and is_image_path(row.image) for row in told.rows):
        return "the list names what is no user, or no path"
    return ""


def is_valid(known: ExpectedImageList, now: float) -> bool:
    """Pure: whether a list still counts."""
    return known.made - MAX_CLOCK_AHEAD <= now < min(known.expires, known.made + LIST_LASTS)


def find_list(places: NodePaths) -> ExpectedImageList | None:
    """The list that is here, however old; None without one, or a damaged one. Raises OSError."""
    return records.find(locate_list(places), ExpectedImageList)


def write_list(places: NodePaths, found: ExpectedImageList) -> None:
    """Replaces the list. Raises OSError."""
    folders.ensure_directory(places.run, folders.PASSABLE)
    records.write(locate_list(places), msgspec.json.encode(found))


def fetch_list(address: ServiceAddress, authenticator: Authenticator) -> ExpectedImageList:
    """What the host says now, within PATIENCE. Raises PeerError."""
    until = time.monotonic() + PATIENCE

    def late() -> bool:
        return time.monotonic() > until

    line, host = PeerConnection(address), address.host
    try:
        session = protocol.open_session(line, KEY, authenticator, late)
        body = protocol.fetch_reply(
            line, session, f"/v1/{KEY}", MAX_REPLY_BYTES, ResponseDeadline(PATIENCE, until, late)
        )
        if body is None:
            raise PeerError(f"{host} has no list", f"see forestage.service on {host}")
        return msgspec.json.decode(body, type=ExpectedImageList)
    except (PeerRequestError, protocol.SessionUnknown) as error:
        raise PeerError(f"{host} gave no list: {error}", "is its peer service running?") from None
    # The last one: brackets in brackets, a thousand deep.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"what {host} gave is no list: {error}") from None
    finally:
        line.close()
