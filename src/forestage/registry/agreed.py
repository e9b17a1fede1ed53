"""One digest for the nodes of a job where there is no store: a step's first node resolves for all.

    <cache>/looks/<job>/<name>    a Look whose digest is the image's (data/looks.py)

The others ask its peer service. In a batch job each node keeps what it heard for the job's further
steps; a step's first node that has heard nothing asks the job's first node, which may have led an
earlier step. Without peers, and where the first node says nothing, each node asks the registry.
"""

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.data import looks
from forestage.data.looks import Look, Round
from forestage.errors import PeerError
from forestage.registry import place
from forestage.registry.reference import is_digest
from forestage.slurm.job import Job

Tell = Callable[[str], None]

PATIENCE = 30.0  # seconds for the first node's word; it may be in a queue for its registry
NOT_YET = 10.0  # seconds in which it must have begun; its helper may start later


class Nodes(msgspec.Struct, frozen=True):
    """Whom a node of this step may ask, and tells: `step` and `whole` are None where nobody."""

    step: Round | None
    whole: Round | None


def nodes_of(node: Node, job: Job, reference: str, batch: bool) -> Nodes:
    """`batch` is whether one digest counts for all of the job."""
    path = f"registry:{reference}"
    step = None if job.step is None else looks.round_of(node, job, 0, path, job.step)
    whole = looks.round_of(node, job, 0, path, None) if batch else None
    if step or whole:
        looks.prepare(node.cache, job.id)
        place.note_agreed(node.places, job.id)
    return Nodes(step, whole)


def asked(node: Node, nodes: Nodes) -> str:
    """The digest that another node, or this one for an earlier step, has resolved; else ""."""
    step, whole = nodes.step, nodes.whole
    known = _digest(whole.told()) if whole else ""
    if not known and step and not step.leads:
        known = _ask(node, step, NOT_YET)
    elif not known and whole and not whole.leads:
        known = _ask(node, whole, 0.0)
    if known and whole:
        whole.tell(Look("looked", digest=known))
    return known


def _ask(node: Node, one: Round, not_yet: float) -> str:
    try:
        look, first = looks.ask(node, one, Deadline.after(PATIENCE, node.clock), not_yet)
    except (PeerError, OSError):
        return ""
    first.close()
    return _digest(look)


def _digest(look: Look | None) -> str:
    return look.digest if look and look.state == "looked" and is_digest(look.digest) else ""


@contextlib.contextmanager
def telling(nodes: Nodes) -> Iterator[Tell]:
    """Has the other nodes wait for what is told in here; where nothing is, they are told so."""
    told = False

    def tell(digest: str) -> None:
        nonlocal told
        told = is_digest(digest)
        for one in (nodes.step, nodes.whole):
            # Of the whole job each node keeps it for itself.
            if told and one is not None and (one.leads or one is nodes.whole):
                one.tell(Look("looked", digest=digest))

    if nodes.step and nodes.step.leads:
        nodes.step.tell(Look("looking"))
    try:
        yield tell
    finally:
        if nodes.step and nodes.step.leads and not told:
            nodes.step.tell(Look("none"))
