"""One node's look at a directory for all nodes of a job: at its start, and as each step begins.

    <cache>/looks/<job>/<name>           JSON of `ScanNotice`
                        <name>.files     MessagePack of `ScannedFiles`, of the look at the job's
start

The first node of the job, or of the step, by Slurm's own list, looks at every file. The others ask
its peer service, and look at what could differ between two nodes: which file system it is, the
user's groups, the directory itself, and files that nobody could have foreseen
(`is_scan_valid_here`). Where any of it differs, or the first node is silent, a node looks at
everything itself. Why that is right: docs/decisions/0033-a-directory-is-one-image.md.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from forestage import log
from forestage.cache.layout import Cache
from forestage.cache.lease import LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.part import boot_id
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.clock import Deadline
from forestage.errors import Declined, PeerError
from forestage.features.data import manifest
from forestage.features.data.manifest import DirectoryManifest
from forestage.features.doors import ACTIVATION_IS_ON, QUERIED_NODE_QUERY_NODE, load_doors
from forestage.slurm.job import Job
from forestage.sources import source
from forestage.system import as_user, files, lock, mounts, records
from forestage.system.as_user import User

if TYPE_CHECKING:
    from forestage.features.doors import NodeClient

CONNECT_TIMEOUT = (
    0.2  # seconds for the first node's service to answer a step, which can look itself
)
STEP_BEGIN_TIMEOUT = (
    2.0  # seconds in which the first node must have begun to look; its hook may run later
)
START_BEGIN_TIMEOUT = 20.0  # … at a job's start, where nobody waits for this
SCAN_TIMEOUT = 60.0  # seconds for that node to look at all, at a job's start
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two questions
SKEW = 30.0  # seconds that a step's look may be old, by the clocks of two nodes


class ScanNotice(msgspec.Struct, frozen=True):
    """What a node has found, and as whom: `digest` of the manifest, `path` resolved.

    `began` is wall time; `place` is the file system as any node names it, `groups` are the user's.
    `none`: this node does not look.
    """

    state: Literal["looking", "looked", "none"]
    began: float = 0.0
    digest: str = ""
    path: str = ""
    place: str = ""
    groups: tuple[int, ...] = ()


class ScannedFiles(msgspec.Struct, frozen=True):
    """All that a copy is made of: what the files are, and the ACLs of those that have one.

    None: nobody has looked at the ACLs.
    """

    manifest: DirectoryManifest
    acls: dict[bytes, bytes] | None


class SharedScan(msgspec.Struct, frozen=True):
    """One look for several nodes of a job; `first` is the node that looks for all."""

    cache: Cache
    job: int
    name: str
    first: str
    is_leader: bool

    def publish_notice(self, look: ScanNotice) -> None:
        """Has the peer service give this look to other nodes; best effort: they look themselves."""
        with contextlib.suppress(OSError):
            records.write(self._file(), msgspec.json.encode(look))

    def find_notice(self) -> ScanNotice | None:
        """What this node has told; None where it has not."""
        with contextlib.suppress(OSError, records.DamagedRecord):
            return records.load(self._file(), ScanNotice)
        return None

    def save_files(self, found: ScannedFiles) -> None:
        """Keeps all of it, for other nodes and for the samples of later looks. Best effort."""
        data = msgspec.msgpack.encode(found)
        with contextlib.suppress(OSError):
            records.write(self._file(".files"), data)

    def find_files(self) -> ScannedFiles | None:
        """What was kept here; None where nothing was."""
        with contextlib.suppress(OSError, records.DamagedRecord, msgspec.MsgspecError):
            return msgspec.msgpack.decode(records.read_raw(self._file(".files")), type=ScannedFiles)
        return None

    def _file(self, more: str = "") -> Path:
        return self.cache.looks / str(self.job) / (self.name + more)


def find_shared_scan(
    node: Node, job: Job, restart: int, path: str, step: int | None
) -> SharedScan | None:
    """The look at `path` that nodes share as a step begins, at the job's start without one.

    None where each looks for itself. `restart` tells the runs of a job apart: a requeued job's step
    has the number that one of the run before had.
    """
    if not can_query_other_nodes(node) or not job.nodelist:
        return None
    from forestage.slurm.nodelist import expand_nodelist  # few jobs need it

    nodes = expand_nodelist(job.nodelist)
    if step is not None and job.step_nodelist:
        # A user's word: it only says which of the job's nodes is asked.
        own = frozenset(expand_nodelist(job.step_nodelist))
        nodes = tuple(name for name in nodes if name in own)
    if job.node not in nodes or len(nodes) < 2:
        return None
    words = (job.id, restart, -1 if step is None else step, job.user.uid, path)
    name = hashlib.sha256(msgspec.json.encode(words)).hexdigest()[:32]
    return SharedScan(node.cache, job.id, name, nodes[0], nodes[0] == job.node)


def can_query_other_nodes(node: Node) -> bool:
    """Whether this node asks others at all, by whichever feature there is for that."""
    about = node.config, node.places, node.clock.monotonic()
    return any(is_on(*about) for is_on in load_doors(ACTIVATION_IS_ON))


def make_scan_directory(cache: Cache, job: int) -> None:
    """Makes the job's place for looks, for its Prolog. Best effort."""
    with contextlib.suppress(OSError):
        cache.looks.mkdir(mode=0o700, exist_ok=True)
        (cache.looks / str(job)).mkdir(mode=0o700, exist_ok=True)


def delete_job_scans(cache: Cache, job: int) -> None:
    """Deletes what was found for a job, for its Epilog."""
    shutil.rmtree(cache.looks / str(job), ignore_errors=True)


def delete_stale_scans(cache: Cache, leases: LeaseDirectory) -> None:
    """Deletes what was found for jobs that have no lease. Raises Failed, OSError."""
    # A Prolog notes its lease first.
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        jobs = set(map(str, leases.list_jobs()))
        with contextlib.suppress(FileNotFoundError):
            for directory in cache.looks.iterdir():
                if directory.name not in jobs:
                    shutil.rmtree(directory, ignore_errors=True)


def make_notice(root: int, found: DirectoryManifest, user: User, began: float) -> ScanNotice:
    """The look of this node that has found this. Raises OSError."""
    groups = tuple(sorted(as_user.list_group_ids(user)))
    return ScanNotice(
        "looked", began, found.digest, found.path, mounts.find_cluster_wide_name(root), groups
    )


def _connect_to_first(node: Node, shared: SharedScan) -> "contextlib.closing[NodeClient]":
    """A way to ask the first node, once `can_query_other_nodes` has said so.

    Raises PeerError, OSError.
    """
    query_node = next(load_doors(QUERIED_NODE_QUERY_NODE))
    path = f"/v1/look/{shared.job}/{shared.name}"
    return contextlib.closing(query_node(node.config, node.places, shared.first, shared.name, path))


def _wait_for_notice(
    node: Node, first: "NodeClient", until: Deadline, not_yet: float
) -> ScanNotice | None:
    """The first node's look, None where there is none.

    Waits up to `until` for a look that has begun, `not_yet` seconds for one that has not.
    """
    begun_by = Deadline.after(min(not_yet, until.seconds_left()), node.clock)
    pause = FIRST_PAUSE
    with contextlib.suppress(PeerError, msgspec.MsgspecError):
        while until.seconds_left():
            said = first.query(stop=lambda: not until.seconds_left())
            look = msgspec.json.decode(said, type=ScanNotice) if said else None
            if look is not None and look.state != "looking":
                return look if look.state == "looked" else None
            if look is None and not begun_by.seconds_left():
                return None
            node.clock.sleep(min(pause, until.seconds_left()))
            pause = min(LONGEST_PAUSE, pause * 1.5)
    return None


def _fetch_scan(
    node: Node, job: Job, shared: SharedScan, root: int, path: str
) -> ScannedFiles | None:
    """What the first node has found, if this node agrees with it; None: look at everything here.

    For a job's start. The process has the user's groups.
    """
    until = Deadline.after(SCAN_TIMEOUT, node.clock)
    try:
        with _connect_to_first(node, shared) as first:
            look = _wait_for_notice(node, first, until, START_BEGIN_TIMEOUT)
            said = first.query(".files") if look else None
        if look is None or said is None:
            return None
        found = msgspec.msgpack.decode(said, type=ScannedFiles)
        manifest.check_manifest(found.manifest, found.acls or {}, node.config.data.max_files)
        same = (found.manifest.path, found.manifest.digest) == (look.path, look.digest)
        if same and is_scan_valid_here(look, found, root, path, job.user):
            return found
        why = f"{shared.first} sees another {path}"
    except (PeerError, Declined, OSError, msgspec.MsgspecError) as error:
        why = str(error)
    log.write_log_line(f"stager job={job.id} looks=alone detail={why!r}", by_slurm=True)
    return None


def is_scan_valid_here(
    look: ScanNotice, found: ScannedFiles, root: int, path: str, user: User
) -> bool:
    """Whether what another node has found holds here: the same files, with the same rights.

    Asks the kernel, as the user, for the directory and a sample. The process has the user's groups.
    Raises Declined, OSError.
    """
    some = manifest.sample_files(found.manifest)
    if not has_same_view(look, root, path, user) or not manifest.are_files_unchanged(
        root, some, user
    ):
        return False
    if found.acls is None:  # a change of one would be a change of ctime
        return True
    acls = manifest.read_acls(root, DirectoryManifest(path, tuple(some)), user)
    return acls == {file.path: found.acls[file.path] for file in some if file.path in found.acls}


def has_same_view(look: ScanNotice, root: int, path: str, user: User) -> bool:
    """Whether both nodes look at one file system, as the same user with the same groups.

    The file server is told these: it grants both nodes the same. Raises OSError.
    """
    here = (path, mounts.find_cluster_wide_name(root), tuple(sorted(as_user.list_group_ids(user))))
    return here == (look.path, look.place, look.groups) and bool(look.place)


def is_fresh(look: ScanNotice, now: float) -> bool:
    """Pure: whether a step may go by this look; `now` is wall time here."""
    return abs(now - look.began) <= SKEW


def seconds_to_settle(found: DirectoryManifest, looked: float) -> float:
    """Pure: seconds until a further change must show in its times; `looked` is wall time."""
    newest = FileIdentity("", 0, 0, found.newest_ns, found.newest_ns)
    return source.seconds_to_settle(SourceImage(newest, AccessRights(0, 0, 0)), looked)


class DirectoryScan(msgspec.Struct, frozen=True):
    """What a directory holds; `acls` where they are known.

    `is_from_peer` is true where another node has looked.
    `seconds` is how long this node looked at it; 0 where another one has looked.
    """

    manifest: DirectoryManifest
    acls: dict[bytes, bytes] | None = None
    is_from_peer: bool = False
    seconds: float = 0.0


def scan_for_job_start(node: Node, job: Job, path: str, root: int, resolved: str) -> DirectoryScan:
    """Looks at the directory at a job's start, as one node for all. Raises Declined, OSError."""
    shared = find_shared_scan(node, job, job.restart, path, None)
    began = node.clock.wall()
    if shared is not None and not shared.is_leader:
        lent = _fetch_scan(node, job, shared, root, resolved)
        if (
            lent is not None
            and lent.acls is not None
            and not seconds_to_settle(lent.manifest, began)
        ):
            shared.save_files(lent)
            return DirectoryScan(lent.manifest, lent.acls, is_from_peer=True)
    leads = shared is not None and shared.is_leader
    with _publish_scan(shared if leads else None) as tell:
        start = node.clock.monotonic()
        found = manifest.scan_directory(root, resolved, job.user, node.config.data.max_files)
        seconds = node.clock.monotonic() - start
        acls = manifest.read_acls(root, found, job.user) if leads else None
        if shared is not None:
            shared.save_files(ScannedFiles(found, acls))
        if leads:
            tell.append(make_notice(root, found, job.user, began))
    return DirectoryScan(found, acls, seconds=seconds)


@contextlib.contextmanager
def _publish_scan(shared: SharedScan | None) -> Iterator[list[ScanNotice]]:
    """Tells other nodes that this one looks, then what it has found: the last in the list."""
    found = [ScanNotice("none")]
    if shared is not None:
        shared.publish_notice(ScanNotice("looking"))
    try:
        yield found
    finally:
        if shared is not None:
            # Of a disk of this node's nobody else can say what is on theirs.
            shared.publish_notice(found[-1] if found[-1].place else ScanNotice("none"))


def digest_for_step(
    node: Node, job: Job, restart: int, path: str, expected: str, timeout: float
) -> str:
    """The digest as a step begins: the step's first node has it, or this node looks at all.

    `expected` is that of the look at the job's start, `timeout` in seconds. Raises
    as_user.ChildTimeout, Declined, OSError.
    """
    step = None if job.step is None else find_shared_scan(node, job, restart, path, job.step)
    start = find_shared_scan(node, job, restart, path, None)
    if step is not None and start is not None and not step.is_leader:
        lent = _fetch_digest(node, job, path, step, start, expected, timeout)
        if lent:
            return lent
    with _publish_scan(step if step is not None and step.is_leader else None) as tell:
        tell.append(_scan_as_step(node, job, path, Deadline.after(timeout, node.clock)))
        return tell[-1].digest


def _scan_as_step(node: Node, job: Job, path: str, until: Deadline) -> ScanNotice:
    """Looks at all, or takes the look of another step of this user that began after this call.

    A look that began before may have seen what the job has changed since. So of many steps that
    start together the first one looks, and then one more for all others. Raises
    as_user.ChildTimeout, Declined, OSError.
    """
    asked = node.clock.monotonic()
    words = (job.user.uid, job.user.gid, job.user.groups, path)
    name = hashlib.sha256(msgspec.json.encode(words)).hexdigest()[:32]
    file = node.cache.locks / f"look-{name}.lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock.held(file, until.seconds_left()))
        except lock.LockTimeout:
            raise Declined("deadline", f"another step still looks at {path}") from None
        except OSError:  # of a disk that is read-only by now: who cannot share looks alone
            return _scan_now(node, job, path, until)
        with contextlib.suppress(OSError, records.DamagedRecord):
            last = records.load(file, _LastScan)
            if last.boot == boot_id() and last.began >= asked:
                return last.look
        last = _LastScan(boot_id(), node.clock.monotonic(), _scan_now(node, job, path, until))
        with contextlib.suppress(OSError):
            # Into the file that is locked: a record that takes its name would be another's lock.
            files.overwrite_file(file, msgspec.json.encode(last))
        return last.look


class _LastScan(msgspec.Struct, frozen=True):
    """A look of a step, in its lock's file; `began` is of the monotonic clock of that boot."""

    boot: str
    began: float
    look: ScanNotice


def _scan_now(node: Node, job: Job, path: str, until: Deadline) -> ScanNotice:
    began, timeout = node.clock.wall(), until.seconds_left()
    # The look ends itself a moment before: then its reason is known.
    end = Deadline.after(timeout * 0.9, node.clock)

    def work() -> as_user.ChildResult[ScanNotice]:
        os.setgroups(as_user.list_group_ids(job.user))
        root, resolved = manifest.open_root(path, job.user)
        found = manifest.scan_directory(root, resolved, job.user, node.config.data.max_files, end)
        return make_notice(root, found, job.user, began), []

    return as_user.run_in_child(work, ScanNotice, timeout)[0]


def announce_no_scan(node: Node, job: Job, restart: int, path: str) -> None:
    """Says that this node, if it is a step's first, does not look: the others need not wait."""
    step = find_shared_scan(node, job, restart, path, job.step)
    if step is not None and step.is_leader:
        step.publish_notice(ScanNotice("none"))


def _fetch_digest(
    node: Node,
    job: Job,
    path: str,
    step: SharedScan,
    start: SharedScan,
    expected: str,
    timeout: float,
) -> str:
    """The digest that the step's first node has found; "" where this node has to look itself."""
    until = Deadline.after(timeout / 2, node.clock)  # the rest is for an own look
    found = start.find_files()
    if found is None:
        return ""
    try:
        with _connect_to_first(node, step) as first:
            if not first.answers_within(CONNECT_TIMEOUT, node.clock.monotonic()):
                return ""
            look = _wait_for_notice(node, first, until, STEP_BEGIN_TIMEOUT)
    except (PeerError, OSError):
        return ""
    if look is None or not is_fresh(look, node.clock.wall()):
        return ""

    def work() -> as_user.ChildResult[bool]:
        os.setgroups(as_user.list_group_ids(job.user))
        root, resolved = manifest.open_root(path, job.user)
        if look.digest != expected:  # the copy is of no use, whoever looks
            return has_same_view(look, root, resolved, job.user), []
        return is_scan_valid_here(look, found, root, resolved, job.user), []

    try:
        return look.digest if as_user.run_in_child(work, bool, timeout / 2)[0] else ""
    except (Declined, OSError):  # an own look says what it is
        return ""
