"""A directory as one entry of the cache: looked at, copied and shown to the steps of a job.

A process of its own, begun by the Prolog, looks at all that the directory holds, as the user. What
it finds is the identity; the entry is an EROFS image made of it (features/data/erofs.py), so that
stager,
peers, resume, verify and eviction know nothing of directories. Steps start from the shared path
until all of it is here. Each looks again before it is shown the copy: a job may write to its data
between two steps. Of the nodes of a job one looks for all where it can
(features/data/shared_scan.py).

    state in JOB.data     reached by
    looking               the Prolog
    copying               the process has looked, and there is no entry
    ready                 there is one
    declined              why not is beside it
"""

import contextlib
import hashlib
import os
import threading
from functools import partial
from pathlib import Path

import msgspec

from forestage import log
from forestage.cache import part, source_image
from forestage.cache.job_notes import DirectoryCopyState
from forestage.cache.layout import Cache
from forestage.cache.lease import EntryUse, LeaseDirectory
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.errors import Declined, Failed, ForestageError, classify_node_error
from forestage.events import RequestOutcome
from forestage.features.data import data_view, directory_source, erofs, manifest, retry, shared_scan
from forestage.features.data.data_view import StepView, ViewContext
from forestage.features.data.manifest import DirectoryManifest
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.sources.source import OpenImage
from forestage.stage import stager
from forestage.stage.copy_wait import CopyEstimate
from forestage.stage.task import CopyTask
from forestage.system import as_user, daemon, lock, loop, mounts, run
from forestage.system.as_user import User
from forestage.system.daemon import StartChannel, StartReport
from forestage.system.loop import LoopDevice
from forestage.units import format_size, make_printable

LOCK_TIMEOUT = (
    5.0  # seconds between two looks whether the job lives, while another one's copy goes on
)
MAX_AT_ONCE = 32  # directories looked at or copied at once for jobs of all users
MAX_OF_USER = 16  # … of one user; and looked at by steps of one
SLOT_INTERVAL = 1.0  # seconds between two tries for a place
POLL = 0.25  # seconds between two looks of a step that waits
SCAN_TIMEOUT = 60.0  # seconds for a step's look at all files; a file server that needs longer hangs
WORK_DIR_TIMEOUT = 5.0  # seconds for a look where the job works
GIVE_UP = 1.0  # seconds for the space lock, where a later step can do the same
PROBE = 10.0  # seconds for the kernel to load a module


def start_in_prolog(call: ViewContext, request: Request) -> RequestOutcome:
    """Starts the process that brings a directory, for the Prolog. Raises Failed, OSError."""
    data_view.record_directory_state(
        call.node, call.job, request.path, DirectoryCopyState("looking")
    )
    _start_process(call.node, call.job, request.path)
    return RequestOutcome("started", request=make_printable(request.path), via="hint")


def _start_process(node: Node, job: Job, path: str) -> None:
    """Starts the process; that it looks is noted. Raises Failed, OSError."""
    if shared_scan.can_query_other_nodes(node):
        shared_scan.make_scan_directory(node.cache, job.id)
    about = f"stager job={job.id}"
    with daemon.start_daemon(
        stager.STAGER, about, partial(_run_process, node, job, path)
    ) as channel:
        message = channel.receive_message(daemon.START)
        if message is not None and message.state == "died":
            why = "the process that looks at the directory died"
            data_view.record_directory_state(
                node, job, path, DirectoryCopyState("declined", reason="helper", detail=why)
            )
            raise Failed("helper", why)


def _rescan_if_more_groups(call: ViewContext, restart: int, path: str) -> None:
    """Has the process of a Prolog look once more, where the step has groups which that one had not.

    Once for all steps that have the same groups. Raises Failed, OSError.
    """
    node, job = call.node, msgspec.structs.replace(call.job, restart=restart, step=None)
    if not _may_see_more(_read_state(node, job, path), job.user):
        return
    with lock.held(node.cache.space_lock, GIVE_UP):
        if not _may_see_more(_read_state(node, job, path), job.user):  # another step was faster
            return
        data_view.record_directory_states(node, job, {path: DirectoryCopyState("looking")})
    _start_process(node, job, path)


def _may_see_more(tree: DirectoryCopyState, user: User) -> bool:
    """Pure: whether this user of a step may read what was not readable before."""
    refused = tree.state == "declined" and tree.reason == "no-permission"
    return refused and not set(user.groups or ()) <= set(tree.groups)


def show_in_step(call: ViewContext, request: Request) -> StepView:
    """The line by which a step's tasks see the copy; none where it is not here, or is outdated.

    Raises Declined, Failed, OSError.
    """
    node, job, path, until = call.node, call.job, request.path, call.copy_deadline
    noted = data_view.read_job_data(node.leases, job.id, job.user.uid)
    _rescan_if_more_groups(call, noted.restart, path)
    tree = _read_state(node, job, path)
    while until is not None and tree.state in ("looking", "copying") and until.seconds_left():
        if lock.is_free(_process_lock(node, job.id, noted.restart, path)):
            tree = _read_state(node, job, path)
            if tree.state not in ("ready", "declined"):  # and so it stays
                why = f"who brings {path} has been killed"
                tree = DirectoryCopyState("declined", reason="helper", detail=why)
            break
        call.progress(partial(_format_progress, node, path, tree, until))
        node.clock.sleep(min(POLL, until.seconds_left()))
        tree = _read_state(node, job, path)
    outcome = RequestOutcome(
        "started", request=make_printable(request.path), via="hint", image=tree.path
    )
    entry = node.cache.find_entry_by_key(tree.key) if tree.state == "ready" else None
    if entry is None or not node.cache.is_proven(tree.key):
        shared_scan.announce_no_scan(node, job, noted.restart, path)
        if tree.state == "declined":
            raise Declined(tree.reason, tree.detail)
        return [], outcome
    digest = entry.identity.tree
    until_seen = Deadline.after(min(SCAN_TIMEOUT, call.scan_deadline().seconds_left()), node.clock)
    if tree.seconds > until_seen.seconds_left():  # by now, not when that is over
        shared_scan.announce_no_scan(node, job, noted.restart, path)
        what = f"{tree.files} files, of which a look took {tree.seconds:.0f} s as the job began"
        raise manifest.make_too_slow_error(path, what)
    with contextlib.ExitStack() as place:
        if not _try_scan_slot(node, job, place, until_seen):
            shared_scan.announce_no_scan(node, job, noted.restart, path)
            raise Declined(
                "deadline", f"{MAX_OF_USER} steps of this user look at directories already"
            )
        if (
            shared_scan.digest_for_step(
                node, job, noted.restart, path, digest, until_seen.seconds_left()
            )
            != digest
        ):
            raise Declined("changed", f"{path} has changed since the job began")
    _check_job_outside(tree.path, job, call.scan_deadline())
    call.check_not_bound(tree.path)
    copy = node.cache.image_path(tree.key)
    device, file = loop.attach_file(copy, read_only=True), loop.format_file_id(copy.stat())
    line = ("device", device, file, "erofs", "ro", tree.path, str(entry.identity.inode))
    shown = msgspec.structs.replace(
        outcome, result="hit", key=tree.key, size=entry.identity.size, redirect="spank"
    )
    return [line], shown


def _check_job_outside(directory: str, job: Job, end: Deadline) -> None:
    """Raises Declined where the job works in the directory: it would become read-only.

    Wherever links lead: the directory is resolved. Raises as_user.ChildTimeout.
    """

    def work() -> as_user.ChildResult[list[bytes]]:  # they need not be text
        home = job.home or as_user.find_home_directory(job.user)
        as_user.set_effective_user(job.user)
        own = [path for path in (home, job.work_dir) if path.startswith("/")]
        return [*map(os.fsencode, (*own, *map(os.path.realpath, own)))], []

    found, _ = as_user.run_in_child(work, list[bytes], min(WORK_DIR_TIMEOUT, end.seconds_left()))
    for own in map(os.fsdecode, found):
        if f"{own}/".startswith(f"{directory}/"):
            raise Declined("no-mount", f"{directory} holds the job's own directory {own}")


def _process_lock(node: Node, job: int, restart: int, path: str) -> Path:
    """The lock that the process which brings a directory holds for its life.

    In a folder whose unused locks the sweep removes.
    """
    words = msgspec.json.encode((job, restart, path))
    return node.cache.locks / f"tree-{hashlib.sha256(words).hexdigest()[:32]}.lock"


def _format_progress(node: Node, path: str, tree: DirectoryCopyState, until: Deadline) -> str:
    """For a user who waits: how far the directory is."""
    if tree.state == "looking":
        return f"waiting for {make_printable(path)}, whose files are being looked at"
    owner = node.cache.find_stager(tree.key)
    if owner is None:
        return f"waiting for the copy of {make_printable(path)}, which is about to begin"
    eta = CopyEstimate(node, owner.image, until)
    eta.should_stop_waiting()  # measures it
    return eta.format_progress()


def detach_unused_devices(cache: Cache, leases: LeaseDirectory, patience: float) -> None:
    """Detaches the devices of entries that no lease names. Raises Failed.

    `patience` is in seconds, for the space lock. Where a task is left that has one mounted, the
    kernel does so after it. A step that is about to mount one this moment finds it gone and reads
    the shared path.
    """
    with lock.held_if_writable(cache.space_lock, patience):
        used = leases.leased_keys()
        for device in loop.list_attached_devices():
            if _is_unused(cache, device, used):
                loop.detach_device(device)


def _is_unused(cache: Cache, device: LoopDevice, used: frozenset[str]) -> bool:
    """Whether a device shows an entry that no lease names; one that was evicted has no name."""
    path = device.file.removesuffix(loop.DELETED)
    if not (device.is_below_cache(cache.real_root) and path.endswith("/image")):
        return False
    with contextlib.suppress(OSError):
        if device.is_file_deleted:
            return device.is_on_file_system(cache.root.stat())
        key = Path(path).parent.name
        return key not in used and device.is_backed_by(os.lstat(cache.image_path(key)))
    return False


def _run_process(node: Node, job: Job, path: str, hook: StartChannel) -> None:
    """The whole life of the process that brings a directory."""

    def work(stop: threading.Event) -> None:
        hook.release_hook()
        with lock.held(_process_lock(node, job.id, job.restart, path), daemon.START):
            hook.send(StartReport("ready"))
            hook.close()
            _copy_and_record(node, job, path, stop)

    stager.run_until_stopped(work)


def _copy_and_record(node: Node, job: Job, path: str, stop: threading.Event) -> None:
    ended = DirectoryCopyState(
        "declined", reason="helper", detail="the process that brought it died"
    )
    try:
        with contextlib.ExitStack() as place:
            _wait_for_copy_slot(node, job, place)
            ended = _scan_and_copy(node, job, path, stop)
    except (ForestageError, OSError) as error:
        reason = error.reason if isinstance(error, Declined) else classify_node_error(error).reason
        groups = tuple(job.user.groups or ()) if reason == "no-permission" else ()
        ended = DirectoryCopyState(
            "declined", reason=reason, detail=make_printable(str(error)), groups=groups
        )
        line = f"reason={reason} detail={make_printable(str(error))!r}"
        log.write_log_line(f"stager job={job.id} result=declined {line}", by_slurm=True)
    finally:
        data_view.record_directory_state(node, job, path, ended)


def _wait_for_copy_slot(node: Node, job: Job, held: contextlib.ExitStack) -> None:
    """Waits until few others are at work: each has all names of its directory in root's memory.

    That counts for no job: 200,000 long names take 400 MiB. Raises Declined.
    """
    for name, most in ((f"trees-{job.user.uid}", MAX_OF_USER), ("trees", MAX_AT_ONCE)):
        while lock.acquire_slot(node.cache.locks, name, most, held) is None:
            _check_wanted(node, job)
            node.clock.sleep(SLOT_INTERVAL)


def _try_scan_slot(node: Node, job: Job, held: contextlib.ExitStack, until: Deadline) -> bool:
    """Waits until few other steps of this user look, for the same reason; False where it is late.

    Other users' looks are in nobody's way: a step waits.
    """
    with contextlib.suppress(OSError):  # of a disk that is read-only by now
        name = f"looks-{job.user.uid}"
        while lock.acquire_slot(node.cache.locks, name, MAX_OF_USER, held) is None:
            if not until.seconds_left():
                return False
            node.clock.sleep(min(POLL, until.seconds_left()))
    return True


def _scan_and_copy(node: Node, job: Job, path: str, stop: threading.Event) -> DirectoryCopyState:
    """Looks at the directory, and sees to it that there is an entry. Raises Declined, OSError."""
    os.setgroups(as_user.list_group_ids(job.user))
    root, resolved = manifest.open_root(path, job.user)
    _check_below_sources(node, root, resolved)
    max_files = node.config.data.max_files
    looked = node.clock.wall()
    seen = shared_scan.scan_for_job_start(node, job, path, root, resolved)
    found = seen.manifest
    _check_has_bytes(found)
    _check_size(node, found)
    key = found.digest[:32]
    _add_to_lease(node, job, key)
    ready = DirectoryCopyState("ready", key, resolved, files=len(found.files), seconds=seen.seconds)
    if node.cache.find_entry_by_key(key) is not None and node.cache.is_proven(key):
        return ready
    data_view.record_directory_state(node, job, path, DirectoryCopyState("copying", key, resolved))
    _check_erofs()
    with contextlib.ExitStack() as held:
        _wait_for_key_lock(node, job, key, held)
        # Nothing that takes much memory before: another job's copy may take hours.
        if node.cache.find_entry_by_key(key) is not None and node.cache.is_proven(key):
            return ready
        retry.check_retry_due(node.cache, resolved, node.clock.wall())
        acls = manifest.read_acls(root, found, job.user) if seen.acls is None else seen.acls
        made = erofs.compute_layout(found, acls)
        # Of what an earlier copy has read nobody here knows which files those were.
        lent = seen.is_from_peer and not node.cache.part_dir(key).exists()
        opened = directory_source.DirectorySource(
            root, found, made, job.user, max_files, node.clock, looked, lent
        )
        held.callback(opened.close)
        # Of files there is no second descriptor past the page cache, and rsync knows no images.
        here = node.with_config(engine="chunks", cold="shared")
        task = CopyTask(here, job, OpenImage(opened.image, job.user, root, other_source=opened))
        ended = stager.copy_and_report(task, stop)
    if ended.state == "failed":
        if ended.reason == "written":
            retry.record_refusal(node.cache, resolved, ended.detail, node.clock.wall())
        raise (Failed if ended.node_failed else Declined)(ended.reason, ended.detail)
    return ready


def _wait_for_key_lock(node: Node, job: Job, key: str, held: contextlib.ExitStack) -> None:
    """Takes the key's lock; waits for another job's copy while this job lives. Raises Declined."""
    while True:
        with contextlib.suppress(lock.LockTimeout):
            held.enter_context(lock.held_for_work(node.cache.key_lock(key), LOCK_TIMEOUT))
            return
        _check_wanted(node, job)


def _check_wanted(node: Node, job: Job) -> None:
    if not data_view.is_still_wanted(node, job):
        raise Declined("stopped", "the job is over")


def _check_below_sources(node: Node, root: int, resolved: str) -> None:
    sources = tuple(map(as_user.resolve_links, node.config.sources))
    if not source_image.is_below_any(resolved, sources):
        raise Declined(
            "outside-sources",
            f"{resolved} is not below {', '.join(sources)}",
            "the admin can add its directory to `sources:`",
        )
    if source_image.is_below_any(str(node.cache.real_root), [resolved]):
        raise Declined("outside-sources", f"{resolved} holds the cache itself")
    if mounts.is_on_user_mount(root, resolved, node.config.user_mounts):
        raise Declined(
            "bad-path",
            f"{resolved} is in a file system that a user has mounted",
            "the admin can name that of a service in `user_mounts:`",
        )


def _check_has_bytes(found: DirectoryManifest) -> None:
    """Raises Declined for a directory that is nothing but links: the bytes lie elsewhere."""
    if not found.total_bytes:
        links = sum(bool(file.link) for file in found.files)
        what = f"{found.path} has no bytes" + (f", only {links} links" if links else "")
        raise Declined("empty", what, "name the directory to which the links lead, too")


def _check_size(node: Node, found: DirectoryManifest) -> None:
    """Raises Declined for what is too large, before anything takes memory by its size."""
    # Each file begins at a block; names and inodes take the rest.
    size = found.total_bytes + erofs.BLOCK * len(found.files)
    most = node.config.max_image_size
    if most is not None and size > most:
        what = f"{found.path} has {format_size(size)}, more than max_image_size {format_size(most)}"
        raise Declined("too-large", what)
    part.check_chunk_count(
        directory_source.make_source_image(found, size), node.config.chunk_bytes_for(size)
    )


def _check_erofs() -> None:
    """Raises Declined where the kernel has no EROFS, nor a module of it; Failed."""
    if "\terofs\n" not in Path("/proc/filesystems").read_text():
        ran = run.run_program(["modprobe", "erofs"], timeout=PROBE)
        if ran.code != 0:
            what = f"this kernel has no EROFS, of which the copy would be: {ran.format_ending()}"
            raise Declined("no-erofs", what)


def _add_to_lease(node: Node, job: Job, key: str) -> None:
    """Holds the entry for the job. Raises CopyStopped where that is over."""
    with lock.held(node.cache.space_lock, lock.SPACE_TIMEOUT):
        lease = node.leases.find_own_lease(job.id, job.user.uid)
        if lease is None or not data_view.is_still_wanted(node, job):
            raise Declined("stopped", "the job is over")
        node.leases.write_lease(lease.with_use(EntryUse(key)))


def _read_state(node: Node, job: Job, path: str) -> DirectoryCopyState:
    nobody = DirectoryCopyState("declined", reason="helper", detail=f"nobody looks at {path}")
    return data_view.read_job_data(node.leases, job.id, job.user.uid).trees.get(path, nobody)
