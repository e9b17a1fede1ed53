"""Client of users without root: asks nodes about a user's own job.

This node is asked at its socket, others through their peer service. On a node the kernel tells the
service who asks; from elsewhere, such as a login node, munge does (peers/auth.py). Which nodes a
job had is asked of Slurm, as its user.
"""

import contextlib
import errno
import http.client
import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from forestage.admin import ask_answer, explain
from forestage.admin.ask_answer import MAX_ANSWER, Public
from forestage.admin.explain import History
from forestage.admin.job_images import Seen
from forestage.config import Peering, load_settings
from forestage.errors import ConfigError, ForestageError, NotFound, PeerError
from forestage.paths import Places
from forestage.peers import auth
from forestage.slurm import nodelist
from forestage.slurm.queue import Slurm, this_node
from forestage.system.terminal import Line, Piece, count

TIMEOUT = 15.0  # seconds for one node
NODES = 16  # asked of a job; the others have mostly done the same
AT_ONCE = 8


class Told(msgspec.Struct, frozen=True):
    """What nodes told of a job. `problems` are sentences, one for each node that told nothing."""

    histories: tuple[History, ...]
    problems: tuple[str, ...] = ()


def about_job(places: Places, job: int, environ: Mapping[str, str]) -> Told:
    """What is known of a job to who calls. Raises NotFound, ForestageError, OSError."""
    try:
        return Told((explain.gather(places, job),))
    except (NotFound, PermissionError) as nothing:
        if os.geteuid() == 0:
            raise
        own: ForestageError | OSError = nothing
    answered = ""
    try:
        found = ask_answer.decoded(ask(places, f"job {job}\n")).history
        if found is not None:
            return Told((found,))
    except (FileNotFoundError, ConnectionRefusedError):
        if isinstance(own, PermissionError):  # else a login node
            own = unanswered()
    except NotFound as nothing:
        own = nothing
        answered = this_node(environ)
    return _elsewhere(places, job, environ, own, answered)


def unanswered() -> PermissionError:
    """What a user is told on a node whose service does not run."""
    what = "forestage-ask.socket does not answer users on this node: it may not be enabled"
    return PermissionError(errno.EACCES, what)


def public(places: Places) -> Public:
    """The node's state, as everyone may know it.

    Raises ForestageError; PermissionError where its service does not answer.
    """
    try:
        answer = ask(places, "status\n")
    except OSError as error:
        raise unanswered() from error
    found = ask_answer.decoded(answer).public
    if found is None:
        raise ForestageError("the node's answer is of another kind")
    return found


def about_images(places: Places, job: int) -> Seen:
    """What the node knows of the images of one's own job. Raises ForestageError, OSError."""
    found = ask_answer.decoded(ask(places, f"images {job}\n")).images
    if found is None:
        raise ForestageError("the node's answer is of another kind")
    return found


def ask(places: Places, question: str) -> bytes:
    """What the service of this node answers. Raises OSError, ForestageError."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(TIMEOUT)
        line.connect(os.fspath(places.ask))
        answer = b""
        # Who is refused gets the answer and the end of the connection before the question is sent.
        with contextlib.suppress(BrokenPipeError):
            line.sendall(question.encode())
        with contextlib.suppress(ConnectionResetError):
            while len(answer) <= MAX_ANSWER and (piece := line.recv(65536)):
                answer += piece
    if len(answer) > MAX_ANSWER:
        raise ForestageError("the node's answer is too long")
    return answer


def _elsewhere(
    places: Places,
    job: int,
    environ: Mapping[str, str],
    own: ForestageError | OSError,
    answered: str,
) -> Told:
    """What the job's nodes tell. `own` is what this one says, and all there is without Slurm.

    `answered` is this node's name, where it has said all that it knows.
    """
    try:
        nodes = nodelist.expand(Slurm.of(environ).nodes_of(job))
    except ForestageError as silent:
        raise own from silent
    nodes = tuple(node for node in nodes if node != answered)
    if not nodes:
        raise own
    peers, unread = _peers(places)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        told = list(pool.map(lambda node: _of_node(places, peers, node, job), nodes[:NODES]))
    histories = tuple(one for one in told if isinstance(one, History))
    problems = [one for one in told if isinstance(one, str)] + [unread] * bool(unread)
    if len(nodes) > NODES:
        problems.append(f"{count(len(nodes) - NODES, 'further node')} of the job were not asked")
    if not histories:
        here = [own.what if isinstance(own, ForestageError) else own.strerror or str(own)]
        hint = "on a node of the job, forestage-ask.socket answers without peers, if it is enabled"
        raise NotFound("; ".join([*here, *problems]), hint)
    return Told(histories, tuple(problems))


def _peers(places: Places) -> tuple[Peering, str]:
    """Return how peers are asked, and what of the configuration this user could not read."""
    try:
        settings = load_settings(places.etc)
    except (ConfigError, OSError):  # mostly a login node has none, and the defaults are right
        return Peering(), ""
    return settings.config.peers, settings.unread


def _of_node(places: Places, peers: Peering, node: str, job: int) -> History | str:
    """What one node tells, or why not."""
    try:
        answer = ask_answer.decoded(ask_node(peers, node, job, auth.Munge(places.munge)))
    except ForestageError as error:
        return f"{node}: {error}"
    except OSError as error:
        return f"{node}: its peer service does not answer ({error.strerror or error})"
    return answer.history or f"{node}: its answer is of another kind"


def ask_node(peers: Peering, node: str, job: int, munge: auth.Munge) -> bytes:
    """A node's answer about a job, proven by the MAC to come from root there.

    Raises NotFound, PeerError, OSError.
    """
    at = peers.of(node)
    offer = munge.ask(node, job)
    line = http.client.HTTPConnection(at.host, at.port, timeout=TIMEOUT)
    try:
        line.request("POST", f"/v1/explain/{job}", offer.text.encode())
        response = line.getresponse()
        body = response.read(MAX_ANSWER + 1)
        mac = response.headers.get("Forestage-Mac", "")
    except (http.client.HTTPException, ValueError) as error:
        raise PeerError(f"no answer in HTTP: {error!r}") from None
    finally:
        line.close()
    if response.status != http.client.OK:
        just = response.status == http.client.TOO_MANY_REQUESTS
        why = "it has just answered you: ask again" if just else "its clock, its release or munge"
        raise PeerError(f"it refuses, with status {response.status}", why)
    if len(body) > MAX_ANSWER or not auth.same(auth.of_answer(offer.secret, body), mac):
        raise PeerError("an answer that no node of this cluster made")
    return body


def pieces(told: Told, now: float) -> list[Piece]:
    """Pure: the histories, one after the other."""
    lines: list[Piece] = []
    for number, one in enumerate(told.histories):
        lines += [Line("")] * (number > 0) + explain.pieces(one, now)
    return lines + [Line(f"Problem: {problem}") for problem in told.problems]


def document(told: Told) -> History | Told:
    """Pure: the JSON document: of a single node its history alone, as root has it there."""
    return told if told.problems or len(told.histories) != 1 else told.histories[0]
