"""Who may have a copy of a key, on nodes of other jobs: a question that is an announcement too.

    GET /v1/copies/<key>[/<node>]   <node> is about to copy <key>; the answer: `KnownCopiesReply`,
                                    with a MAC

A stager asks QUERIED_NODES nodes of root's own list (features/peers/node_list.py), those that come
first in the key's ring: all stagers ask the same ones, themselves too. Each of them remembers who
asked, and names them to who asks next. Of a job of many nodes only some say who they are: those of
earlier jobs would be forgotten for it, while its nodes still ask. There is no tracker, and none of
this outlives the service. Names are hints: a node that has nothing costs one request, and what it
gives is believed no more than any peer (docs/decisions/0051-any-warm-node-serves.md).

Copies ahead of jobs begin on many nodes within a minute, and nobody waits for them. The first
READERS nodes that ask share the reading, as the nodes of a job do, with those that were before
them; the others leave it to these. The word of one node alone says who they are, of the first in
the ring that answers: else two nodes could each leave it to the other.
"""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec

from forestage.features.peers import protocol
from forestage.features.peers.addresses import AddressFinder
from forestage.features.peers.auth import Authenticator
from forestage.features.peers.connection import PeerConnection, PeerRequestError, ResponseDeadline
from forestage.features.peers.ring import NodeRing

QUERIED_NODES = 3  # nodes for each copy
MAX_GIVERS = 2  # nodes of those that are named
PATIENCE = 1.0  # seconds for all answers together
NAMES = 4  # of one key, those that asked last
ANNOUNCED_PER_JOB = 2  # nodes of a job that are remembered
REMEMBERED_SECONDS = 86400.0  # seconds
READERS = 4  # nodes that read an image ahead of jobs
SPECULATIVE_SECONDS = 600.0  # seconds for which these may be at it
KEYS = 10_000  # some 5 MB
MAX_REPLY_BYTES = 4096  # bytes of an answer

PATH = re.compile(r"/v1/copies/([0-9a-f]{32})(?:/([A-Za-z0-9][A-Za-z0-9._-]{0,62}))?")


class KnownCopiesReply(msgspec.Struct, frozen=True):
    """Whether the node that was asked has anything of the key itself, and who else asked for it.

    `nodes` are those that asked last, `first` those that asked first of late; both in their order.
    """

    has: bool
    nodes: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


class OtherJobsPeers(NamedTuple):
    """Nodes of other jobs that may give chunks, and how a copy ahead of a job stands to them.

    `readers` are those of the givers that share the reading: with this node, unless it
    `leaves_reading`.
    """

    givers: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    leaves_reading: bool = False


class RequesterTable:
    """Who asked for which key lately, the last `names` of them; seconds are monotonic.

    With `first` the first of them instead.
    """

    def __init__(
        self, names: int = NAMES, kept: float = REMEMBERED_SECONDS, first: bool = False
    ) -> None:
        self._names = slice(names) if first else slice(-names, None)
        self._kept = kept
        self._by_key: OrderedDict[str, dict[str, float]] = OrderedDict()

    def record_and_list(self, key: str, node: str | None, now: float) -> tuple[str, ...]:
        """Who asked for the key before, the first of them first; and remembers who says a name."""
        known = self._by_key.pop(key, {})
        others = {name: at for name, at in known.items() if now - at <= self._kept and name != node}
        if node is not None:
            self._by_key[key] = dict([*others.items(), (node, now)][self._names])
        elif others:
            self._by_key[key] = others
        if len(self._by_key) > KEYS:
            self._by_key.popitem(last=False)
        return tuple(others)


def pick_nodes_to_query(key: str, nodes: Collection[str], me: str) -> list[str]:
    """Pure: the nodes that remember who has the key, three others; this one too if it does."""
    asked = list(NodeRing(key, tuple(nodes)).nodes[: QUERIED_NODES + 1])
    if me not in asked[:QUERIED_NODES]:
        return asked[:QUERIED_NODES]
    return asked if asked != [me] else []


def should_announce(key: str, job: Collection[str], me: str) -> bool:
    """Pure: whether this node of the job is one of those that say who they are."""
    return me in NodeRing(key, tuple(job)).nodes[:ANNOUNCED_PER_JOB]


def pick_givers(
    answers: Sequence[tuple[str, KnownCopiesReply]], known: Collection[str]
) -> tuple[str, ...]:
    """Pure: the nodes to take from; who has a copy before who is only named.

    `known` are the nodes of root's list that are not of the job: no other name counts.
    """
    sure = [node for node, answer in answers if answer.has]
    named = [node for _, answer in answers for node in answer.nodes]
    return tuple(node for node in dict.fromkeys((*sure, *named)) if node in known)[:MAX_GIVERS]


def pick_readers(
    asked: Sequence[str], answers: Sequence[tuple[str, KnownCopiesReply]], known: Collection[str]
) -> tuple[str, ...]:
    """Pure: the nodes that began to read ahead before this one, by one node's word.

    `asked` are those asked, in the order of the ring; `known` as for `pick_givers`.
    """
    said = dict(answers)
    first = next((said[node].first for node in asked if node in said), ())
    return tuple(node for node in first if node in known)[:READERS]


def query_known_copies(
    addresses: AddressFinder,
    key: str,
    me: str,
    job: Collection[str],
    nodes: Sequence[str],
    authenticator: Authenticator,
    is_speculative: bool = False,
) -> OtherJobsPeers:
    """The nodes of other jobs that may have the key; `nodes` is root's list. Within PATIENCE.

    `is_speculative`: no job waits for the copy, so nodes share the reading.
    """
    known = frozenset(nodes).difference(job)
    asked = pick_nodes_to_query(key, nodes, me)
    until = time.monotonic() + PATIENCE
    came: SimpleQueue[tuple[str, KnownCopiesReply | None]] = SimpleQueue()

    path = f"/v1/copies/{key}/{me}" if should_announce(key, job, me) else f"/v1/copies/{key}"

    def ask(node: str) -> None:
        came.put((node, _query_node(addresses, node, key, path, authenticator, until)))

    for node in asked:  # nobody waits for the last of them: it only has to hear who asks
        threading.Thread(target=ask, args=(node,), name="ask", daemon=True).start()
    answers: list[tuple[str, KnownCopiesReply]] = []
    for node, answer in _collect_replies(came, len(asked), until):
        answers += [(node, answer)] if answer else []
        if len(pick_givers(answers, known)) == MAX_GIVERS and not is_speculative:
            break
    before = pick_readers(asked, answers, known) if is_speculative else ()
    givers = tuple(dict.fromkeys((*pick_givers(answers, known), *before)))
    return OtherJobsPeers(givers, before, leaves_reading=len(before) == READERS)


def _collect_replies(
    came: "SimpleQueue[tuple[str, KnownCopiesReply | None]]", count: int, until: float
) -> Iterator[tuple[str, KnownCopiesReply | None]]:
    for _ in range(count):
        try:
            yield came.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return


def _query_node(
    addresses: AddressFinder,
    node: str,
    key: str,
    path: str,
    authenticator: Authenticator,
    until: float,
) -> KnownCopiesReply | None:
    """What one node answers; None: nothing, or nothing in time."""

    def late() -> bool:
        return time.monotonic() > until

    line = PeerConnection(addresses.node_address(node))
    try:
        session = protocol.open_session(line, key, authenticator, late)
        limit = ResponseDeadline(0.0, until, late)
        body = protocol.fetch_reply(line, session, path, MAX_REPLY_BYTES, limit)
        return msgspec.json.decode(body, type=KnownCopiesReply) if body else None
    except (PeerRequestError, protocol.SessionUnknown, msgspec.MsgspecError):
        return None
    finally:
        line.close()
