"""What turns a part into an entry? Room, the bytes, the check that they are still the right ones.

The caller is the stager and holds the key's lock; everything here may be killed at any line, and
the next stager of the key goes on from what the part says.
"""

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING

import msgspec

from forestage import log, trace
from forestage.cache import digest, evict, image
from forestage.cache.image import Image, Look
from forestage.cache.layout import Entry
from forestage.cache.node import Node
from forestage.cache.part import MAX_SHARED, Owner, Part, boot_id, chunk_count
from forestage.errors import Declined, Failed, PeerError
from forestage.slurm.job import Job
from forestage.stage import engines, opened, resume
from forestage.stage.chunks import Source
from forestage.system import lock

if TYPE_CHECKING:
    from forestage.peers import Peers


class Task(msgspec.Struct, frozen=True):
    """What to copy, where to, and for which job first."""

    node: Node
    job: Job
    looked: Look

    def taken(self) -> "Task":
        """The same with the source as a descriptor of this process."""
        return Task(self.node, self.job, self.looked.taken())

    @property
    def image(self) -> Image:
        return self.looked.image

    @property
    def key(self) -> str:
        return self.looked.image.key

    @property
    def part(self) -> Part:
        return self.node.cache.part(self.key)


def claim(task: Task) -> Owner:
    """Says in the part who copies now; what is there already stays if it can be resumed."""
    node, config = task.node, task.node.config
    owner = Owner(
        pid=os.getpid(),
        boot=boot_id(),
        image=task.image,
        chunk=config.chunk_size,
        engine=config.engine,
        digest=config.digest,
        job=task.job.id,
        since=0.0,
    )
    if not task.part.resumable(owner):
        node.cache.drop_part(task.key)
    # In one go, so that who asked earlier is also seen earlier by those who stand in line.
    with lock.held(node.cache.space_lock, lock.SPACE_TIMEOUT):
        owner = msgspec.structs.replace(owner, since=node.clock.monotonic())
        task.part.write_owner(owner)
    return owner


def ready(task: Task, owner: Owner, evicted: list[str]) -> tuple[Owner, Source]:
    """Opens the source and takes the space; from now on the part counts as being copied.

    `evicted` grows by the keys that had to make room, also where this fails later.
    """
    node, part = task.node, task.part
    node.clock.sleep(opened.settling(task.image, node.clock.wall()))
    source = opened.open_source(task.looked, node.config)
    if owner.engine == "chunks":
        resume.believe(part, task.image.size, node.config)
    owner = msgspec.structs.replace(
        owner, phase="copying", began=node.clock.monotonic(), resumed=part.copied(owner)
    )
    # Before the space is taken: from then on, a disk that others fill must not matter.
    part.write_owner(owner)
    _reserve(task, source, evicted)
    trace.point("reserved")
    return owner, source


def fetch(task: Task, source: Source, stop: threading.Event) -> int:
    """The bytes; how many of them came from other nodes.

    Raises chunks.Stopped, chunks.Truncated, Failed, OSError.
    """
    with contextlib.ExitStack() as undo:
        lender = _peers(task)
        if lender is not None:
            undo.callback(lender.close)
        try:
            count = engines.engine(task.node.config).copy(source, task.part, stop, lender)
        except Failed:
            _check_unchanged(task)  # an engine may fail over a source that moves under it
            raise
    trace.point("copied")
    return count


def _peers(task: Task) -> "Peers | None":
    """The other nodes of the job, where they are to help; without them it is merely slower."""
    node, job = task.node, task.job
    if not node.config.peers.enabled:
        return None
    count = chunk_count(task.image.size, node.config.chunk_size)
    if count > MAX_SHARED:
        detail = f"{count} chunks, at most {MAX_SHARED}: a larger chunk_size makes fewer"
        log.say(f"stager job={job.id} peers=none detail={detail!r}", by_slurm=True)
        return None
    from forestage.peers import Peers

    try:
        return Peers.of(node.config, job.node, job.nodelist, task.key, node.places)
    except (PeerError, OSError) as error:
        log.say(f"stager job={job.id} peers=none detail={str(error)!r}", by_slurm=True)
        return None


def publish(task: Task) -> None:
    """Checks that the source is still the same, then gives the copy its rights and its name."""
    _check_unchanged(task)
    trace.point("checked")
    _mirror(task)
    config = task.node.config
    entry = Entry(
        key=task.key,
        identity=task.image.identity,
        access=task.image.access,
        created=task.node.clock.wall(),
        engine=config.engine,
        chunk=config.chunk_size,
        digest=digest.of_image(task.part.digests()),
    )
    task.node.cache.publish(entry)
    trace.point("published")


def _reserve(task: Task, source: Source, evicted: list[str]) -> None:
    """Makes room and takes it at once, so that no copy fails half-way for want of space."""
    node, engine = task.node, engines.engine(task.node.config)
    for attempt in (1, 2):
        need = max(0, task.image.size - task.part.allocated())
        evicted += evict.make_room(node.cache, node.leases, node.config, task.image.path, need)
        try:
            engine.reserve(source, task.part)
        except OSError as error:
            # Another copy, or somebody else on this disk, was faster; look once more.
            if error.errno != errno.ENOSPC or attempt == 2:
                raise
        else:
            return


def _check_unchanged(task: Task) -> None:
    """Both the open file and what the path now leads to must be as before. Raises Declined."""
    wanted, node = task.image, task.node
    opened.must_be_same(task.looked)
    try:
        seen, line = image.glance(
            wanted.path, task.job.user, node.config.sources, [node.cache.real], opened.LOOK_TIMEOUT
        )
    except OSError:
        raise opened.changed(wanted.path) from None
    line.close()
    if seen.image != wanted:
        found = seen.image and opened.difference(wanted.identity, seen.image.identity)
        raise opened.changed(wanted.path, found or "")


def _mirror(task: Task) -> None:
    """Gives the copy the source's owner, group, mode, ACL and time: only who could read it may."""
    wanted = task.image
    fd = os.open(task.part.image, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != wanted.size:
            raise Failed("copy", f"the copy of {wanted.path} has another size than its source")
        os.fchown(fd, wanted.access.uid, wanted.access.gid)
        if wanted.access.acl:
            try:
                os.setxattr(fd, image.ACL, wanted.access.acl)
            except OSError as error:
                # Without its ACL the mode's group bits would mean something else.
                raise Declined("acl", f"the cache's file system takes no ACL: {error}") from None
        # Last: chown clears set-id bits.
        os.fchmod(fd, wanted.access.mode)
        os.utime(fd, ns=(wanted.identity.mtime_ns, wanted.identity.mtime_ns))
    finally:
        os.close(fd)
