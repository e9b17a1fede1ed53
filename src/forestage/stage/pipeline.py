"""The steps of one copy, in order: turn, source, room, bytes, check, rights, entry.

The caller is the stager and holds the key's lock. It may be killed at any line: the next stager of
the key resumes from what the part says, and nothing that a job can see appears before the one
rename of `cache.publish`.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator

import msgspec

from forestage import events, log, trace
from forestage.cache import (
    allocation,
    arrival_map,
    digest,
    disk_errors,
    evict,
    hot_pieces,
    source_image,
)
from forestage.cache.arrival_map import ArrivalMap
from forestage.cache.layout import Entry
from forestage.cache.part import ENTRY_BYTES, Part, PartRecord, boot_id, chunk_count
from forestage.config import Config
from forestage.errors import Declined, Failed
from forestage.features import Feature, list_switched_on
from forestage.sources.source import ReadableSource, SourceTruncated, SourceUnreadable
from forestage.stage import chunks, copy_queue, engines, fstab
from forestage.stage.copy_queue import repeat_in_thread
from forestage.stage.task import CopyTask
from forestage.system import lock
from forestage.system.files import open_descriptor
from forestage.units import format_rate

PROGRESS_EVERY = 10.0  # seconds between two lines in the log
GIVERS = 8  # that are named in an event, those that gave most


class CopyStats(msgspec.Struct):
    """What a copy took, as its event says it; of evicted entries the keys, times in seconds.

    `rate` are bytes per second of the source, 0 where that is not known. It grows on the way, so
    that a copy that fails has its figures too. `expected` and `ahead` as in `CopyOutcome`.
    """

    evicted: tuple[str, ...] = ()
    copying: float = 0.0
    resumed: int = 0
    expected: float = 0.0
    ahead: int = 0
    from_peers: int = 0
    from_others: int = 0
    givers: tuple[str, ...] = ()
    uploaded: int = 0
    read_through: int = 0
    read_straight: int = 0
    rate: float = 0.0


def run_copy(task: CopyTask, stop: threading.Event, figures: CopyStats) -> None:
    """Copies the image into the cache and publishes it.

    Raises Declined (changed, no-room, stopped, source-error, ...), Failed, OSError of the disk.
    """
    task.node.cache.mark_in_use()
    before = task.part.find_record()
    owner = claim_part(task)
    figures.expected = owner.expected
    trace.reach_point("claimed")
    owner = copy_queue.wait_for_slot(task.node, task.key, owner, stop)
    content = task.source.open()
    _make_room(task, content, figures)
    with contextlib.suppress(OSError):  # only a matter of speed
        hot_pieces.inherit_hot_map(task.node.cache, task.image)
    owner = _mark_copying(task, owner)
    figures.resumed = owner.resumed
    if before is not None and before.expected and not owner.expected and owner.resumed:
        figures.expected, figures.ahead = before.expected, owner.resumed
    _reserve(task, content, figures)
    trace.reach_point("reserved")
    uploaded = _count_uploaded_bytes(task)
    with _arrival_map(task) as shown:
        with copy_queue.stop_when_displaced(task.node, task.key, stop), _log_progress(task, owner):
            given, others, figures.rate = _copy_bytes(task, content, stop, shown)
        figures.from_peers = sum(given.values())
        figures.from_others = sum(given.get(node, 0) for node in others)
        figures.givers = tuple(sorted(given, key=lambda node: -given[node])[:GIVERS])
        figures.uploaded = max(0, _count_uploaded_bytes(task) - uploaded)
        figures.copying = round(task.node.clock.monotonic() - owner.began, 4)
        if shown is not None:
            figures.read_through, figures.read_straight = shown.read_totals()
        trace.reach_point("copied")
        task.source.check_unchanged()
        trace.reach_point("checked")
        _mirror_access(task)
        disk_errors.scan_kernel_log(
            task.node.places, task.node.cache, task.node.clock
        )  # what comes now is new
        task.node.cache.publish(
            _make_entry(task, figures, _read_fstab_binds(task)), task.job.user.uid
        )
    trace.reach_point("published")
    with contextlib.suppress(OSError):  # only a matter of the next version's speed
        hot_pieces.index_entry(task.node.cache, task.image)


def claim_part(task: CopyTask) -> PartRecord:
    """Notes in the part who copies now; what is there already stays if it can be resumed."""
    node, config = task.node, task.node.config
    owner = PartRecord(
        pid=os.getpid(),
        boot=boot_id(),
        image=task.image,
        chunk=task.chunk,
        engine=config.engine,
        job=task.job.id,
        uid=task.job.user.uid,
        since=0.0,
        expected=task.job.expected,
    )
    if not task.part.is_beginning_of(owner):
        node.cache.drop_part(task.key)
    # Both at once, so that who asked earlier is also seen earlier by those in the queue.
    with lock.held(node.cache.space_lock, lock.SPACE_TIMEOUT):
        _resume_from_entry(task, owner)
        owner = msgspec.structs.replace(owner, since=node.clock.monotonic())
        task.part.write_record(owner)
    return owner


def _resume_from_entry(task: CopyTask, owner: PartRecord) -> None:
    """Resumes from the entry of an earlier boot, if there is one: its bytes have to be proven.

    To read it from this node's disk is quicker than to read the source, which a whole cluster may
    do after a restart. What the disk has lost comes from the source, as with any resumed part.
    """
    cache = task.node.cache
    entry = cache.find_entry_by_key(task.key)
    if entry is None or task.part.directory.exists() or cache.is_proven(task.key):
        return
    fits = (entry.engine, entry.chunk) == (owner.engine, owner.chunk)
    if fits and entry.digest == digest.digest_image(cache.read_digests(entry)):
        cache.demote_to_part(task.key)


def _mark_copying(task: CopyTask, owner: PartRecord) -> PartRecord:
    """Strikes what an earlier copy left wrong; from now on the part counts as being copied."""
    part = task.part
    if owner.engine == "chunks":
        clear_wrong_chunks(part, task.image.size, task.node.config)
    owner = msgspec.structs.replace(
        owner, phase="copying", began=task.node.clock.monotonic(), resumed=part.copied_bytes(owner)
    )
    # Before the space is taken: from then on, a disk that others fill must not matter.
    part.write_record(owner)
    return owner


def clear_wrong_chunks(part: Part, size: int, config: Config) -> int:
    """Strikes from a part's map each chunk whose bytes are not what the map says; returns how many.

    Within one boot the two belong together, unless something else has written to them: a bad disk,
    a careless hand. A resumed copy would publish that, so each chunk is read once more, which is
    quicker from this node's disk than from the source. `size` of the image in bytes. Raises
    OSError.
    """
    tuning = engines.derive_tuning(config, size)
    count = chunk_count(size, tuning.chunk)
    known = digest.split_map(
        part.read_digests()[: count * ENTRY_BYTES].ljust(count * ENTRY_BYTES, b"\0")
    )
    copied = [number for number, one in enumerate(known) if one != digest.MISSING]
    if not copied:
        return 0
    try:
        found = digest.split_map(chunks.compute_digests(part.image, size, tuning, copied))
    except (SourceUnreadable, SourceTruncated):
        found = [digest.MISSING] * len(copied)
    wrong = [number for number, one in zip(copied, found, strict=True) if known[number] != one]
    with allocation.open_part_file(part.map) as fd:
        for number in wrong:
            os.pwrite(fd, digest.MISSING, number * ENTRY_BYTES)
    return len(wrong)


def _make_room(task: CopyTask, content: ReadableSource, figures: CopyStats) -> None:
    """Makes room for what the copy will allocate, or raises Declined before it is begun.

    What copies under way hold for jobs that are only expected is a job's, if it needs it.
    """
    try:
        _evict_for(task, content, figures)
    except Declined as declined:
        if (
            declined.reason != "no-room"
            or task.job.expected
            or not copy_queue.wait_for_expected_copies(task.node)
        ):
            raise
        _evict_for(task, content, figures)


def _evict_for(task: CopyTask, content: ReadableSource, figures: CopyStats) -> None:
    """Holes of the source cost nothing: who wrote no bytes must not evict what others did."""
    node = task.node
    need = max(
        0,
        engines.choose_engine(node.config, task.image.size).needed_bytes(content)
        - task.part.allocated_bytes(),
    )
    figures.evicted += evict.make_room(
        node.cache,
        node.leases,
        node.config,
        task.image.path,
        need,
        task.job.user.uid,
        data=task.image.kind == "data",
        keys_to_keep=task.job.keys_to_keep,
    )


def _reserve(task: CopyTask, content: ReadableSource, figures: CopyStats) -> None:
    """Takes the room at once, so that no copy fails half-way for want of space."""
    engine = engines.choose_engine(task.node.config, task.image.size)
    try:
        engine.reserve(content, task.part)
    except OSError as error:
        # Another copy, or somebody else on this disk, was faster; look once more.
        if error.errno != errno.ENOSPC:
            raise
        _make_room(task, content, figures)
        engine.reserve(content, task.part)


@contextlib.contextmanager
def _arrival_map(task: CopyTask) -> Iterator[ArrivalMap | None]:
    """What read-through servers look at during the copy; None where there can be none."""
    config = task.node.config
    directory = task.node.places.through / task.key
    made = None
    if config.engine == "chunks" and task.opened.is_read_through:
        made = arrival_map.create_map(directory, task.image.size, task.chunk, task.part.image)
    try:
        yield made
    finally:
        if made is not None:
            made.remove_map()


def _copy_bytes(
    task: CopyTask, content: ReadableSource, stop: threading.Event, shown: ArrivalMap | None
) -> engines.EngineResult:
    """Copies the bytes."""
    config = task.node.config
    if not task.job.id:  # none is about to start, for which the copy would make way
        config = msgspec.structs.replace(config, cold="shared")
    try:
        return engines.choose_engine(config, task.image.size).copy(
            content, task.part, stop, _find_helpers(task), shown
        )
    except Failed:
        task.source.check_unchanged()  # an engine may fail over a source that moves under it
        raise


def _find_helpers(task: CopyTask) -> engines.CopyHelpers | None:
    """Return the helpers that the first feature has for this copy, or None."""
    features = _helping(task)
    if not features:
        return None
    from forestage.features.doors import ENGINE_HELPERS, load_doors

    found = (find(task) for find in load_doors(ENGINE_HELPERS, features))
    return next(filter(None, found), None)


def _count_uploaded_bytes(task: CopyTask) -> int:
    """Return how many bytes of this key were given to other nodes."""
    features = _helping(task)
    if not features:
        return 0
    from forestage.features.doors import ENGINE_UPLOADED, load_doors

    return sum(count(task) for count in load_doors(ENGINE_UPLOADED, features))


def _helping(task: CopyTask) -> list[Feature]:
    """Return the features that may help with a copy; mostly none is on, and none is imported."""
    return list_switched_on("engine.helpers", task.node.config, str(task.node.places.run))


@contextlib.contextmanager
def _log_progress(task: CopyTask, owner: PartRecord) -> Iterator[None]:
    """Writes a line to the log now and then during a long copy."""
    due = ProgressThrottle()

    def say() -> None:
        if due.is_line_due(task.part.copied_bytes(owner)):
            log.write_log_line(
                f"stager job={owner.job} {format_progress(task, owner)}", by_slurm=True
            )

    with repeat_in_thread(say, PROGRESS_EVERY, "progress"):
        yield


class ProgressThrottle:
    """When a line is worth writing: at each look while the copy grows, else ever more seldom.

    A source may hang for days.
    """

    def __init__(self) -> None:
        self._last = -1
        self._pause = self._left = 0  # looks without a line

    def is_line_due(self, copied: int) -> bool:
        """Whether to write one, `copied` being the bytes that are here at this look."""
        if copied != self._last:
            self._last, self._pause, self._left = copied, 0, 0
            return True
        if self._left:
            self._left -= 1
            return False
        self._pause = self._left = 2 * self._pause + 1
        return True


def format_progress(task: CopyTask, owner: PartRecord) -> str:
    """Returns how far the copy is, for the log."""
    done = task.part.copied_bytes(owner)
    took = task.node.clock.monotonic() - owner.began
    return (
        f"image={events.quote_field(owner.image.path)} key={owner.image.key}"
        f" copied={done} of={owner.image.size}"
        f" rate={format_rate(done - owner.resumed, took).replace(' ', '')}"
    )


def _mirror_access(task: CopyTask) -> None:
    """Sets on the copy the source's owner, group, mode, ACL and time."""
    wanted = task.image
    with open_descriptor(task.part.image, os.O_RDWR) as fd:
        if os.fstat(fd).st_size != wanted.size:
            raise Failed("copy", f"the copy of {wanted.path} has another size than its source")
        os.fchown(fd, wanted.access.uid, wanted.access.gid)
        if wanted.access.acl:
            try:
                os.setxattr(fd, source_image.ACL, wanted.access.acl)
            except OSError as error:
                # Without its ACL the mode's group bits would mean something else.
                raise Declined("acl", f"the cache's file system takes no ACL: {error}") from None
        # Last: chown clears set-id bits.
        os.fchmod(fd, wanted.access.mode)
        os.utime(fd, ns=(wanted.identity.mtime_ns, wanted.identity.mtime_ns))


def _read_fstab_binds(task: CopyTask) -> tuple[str, ...]:
    """What the image has its containers bind."""
    if task.image.kind != "image":
        return ()
    with open_descriptor(task.part.image, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as copy:
        return fstab.read_fstab_binds(copy, task.job.user)


def _make_entry(task: CopyTask, figures: CopyStats, binds: tuple[str, ...]) -> Entry:
    config = task.node.config
    return Entry(
        key=task.key,
        identity=task.image.identity,
        access=task.image.access,
        created=task.node.clock.wall(),
        engine=config.engine,
        chunk=task.chunk,
        digest=digest.digest_image(task.part.read_digests()),
        kind=task.image.kind,
        rate=figures.rate,
        binds=binds,
        expected=task.job.expected,
    )
