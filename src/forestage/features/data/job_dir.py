"""A job's own directory on the node, on its disk or in memory: gone with the job.

    <cache>/jobs/<job>.<restart>/disk        the file system that steps mount, see
    features/data/job_disk.py
                                 made.json   for whom and how large; without it nothing is whole
                                 held         the same
                                 mount        of one in memory, see features/data/job_ram.py
                                 lock.<n>, put.<n>    of the job's n-th request, see
                                 features/data/job_dir_fill.py

Room on the disk is taken in advance: what a job has asked for it has, and no more. For one in
memory the Prolog makes only the record; the job's first step does the rest. The order of what
happens to a directory keeps the sweep from taking that of a job that begins:

    Prolog      notes the lease, removes what an earlier run of the job left, makes the directory
    step        mounts its device in each task's namespace
    Epilog      drops the lease; renames the directory away, ends its holder, detaches its device,
                deletes the file (without Python the holder does all of this, see
                features/data/job_disk.py)
    sweep       under the space lock: renames away what has no lease; then as the Epilog, also with
                what Prologs have renamed away
"""

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Container
from pathlib import Path

import msgspec

from forestage import trace
from forestage.cache import disk_errors, evict, unpack_space
from forestage.cache.layout import Cache, DiskUsage
from forestage.cache.lease import LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.part import boot_id
from forestage.clock import Deadline
from forestage.errors import Declined, Failed
from forestage.features.data import job_disk, job_ram
from forestage.slurm.job import Job
from forestage.slurm.step_protocol import LineFields
from forestage.system import as_user, daemon, files, folders, lock, loop, mounts, records
from forestage.units import format_size, is_number

PATIENCE = 30.0  # seconds for another job's Prolog, which takes its room


class JobDirRecord(msgspec.Struct, frozen=True):
    """made.json: whose directory it is, of how many bytes, made in which boot of the node.

    `ram`: it is in memory, and takes no room on the disk. `start` as in slurm/job.Job.
    """

    uid: int
    gid: int
    size: int
    boot: str
    ram: bool = False
    start: int = 0

    def is_same_run(self, wanted: "JobDirRecord") -> bool:
        """Return whether it is what this run of the job wants. Pure. A start of 0 is any."""
        starts = {self.start, wanted.start}
        return msgspec.structs.replace(self, start=wanted.start) == wanted and (
            0 in starts or len(starts) == 1
        )


class JobDirectory(msgspec.Struct, frozen=True):
    """The directory of one run of a job."""

    directory: Path

    @property
    def job(self) -> int:
        number = self.directory.name.partition(".")[0]
        return int(number) if is_number(number) else 0

    @property
    def disk_file(self) -> Path:
        return self.directory / "disk"

    @property
    def record_file(self) -> Path:
        return self.directory / "made.json"

    def lock_file(self, number: int) -> Path:
        """Held while the job's request of this number is put into the directory."""
        return self.directory / f"lock.{number}"

    def result_file(self, number: int) -> Path:
        """What came of that, once it is over."""
        return self.directory / f"put.{number}"

    def find_record(self) -> JobDirRecord | None:
        """What it is; None where it is not whole."""
        with contextlib.suppress(OSError, records.DamagedRecord):
            return records.load(self.record_file, JobDirRecord)
        return None


class JobDirMount(msgspec.Struct, frozen=True):
    """The directory that a step finds, and the line by which the companion mounts it."""

    job_directory: JobDirectory
    line: LineFields


def make_job_dir(node: Node, job: Job, size: int, ram: bool, end: Deadline) -> None:
    """Makes the job's directory of `size` bytes; one that this run of the job has already, stays.

    For the Prolog, once the lease is noted. Raises Declined, also once it is `end`, Failed,
    OSError.
    """
    # First: a container that mounts it would not start if it were missing.
    _make_mount_point(node.places.job_dir)
    try:
        _make_unless_present(node, job, size, ram, end)
    except (Failed, as_user.ChildTimeout):
        job_disk.limit_to_deadline(0.0, end)  # what was waited for until then was cut short by it
        raise


def _make_unless_present(node: Node, job: Job, size: int, ram: bool, end: Deadline) -> None:
    place = JobDirectory(node.cache.jobs / f"{job.id}.{job.restart}")
    wanted = JobDirRecord(job.user.uid, job.user.gid, size, boot_id(), ram, job.start)
    for earlier in _list_dirs_of_job(node.cache, job.id):
        made = earlier.find_record()
        if earlier != place or made is None or not made.is_same_run(wanted):
            _remove_earlier_run(node.cache, earlier, end)
    disk_errors.check_no_doubt(node.places)
    if size < job_disk.SMALLEST:
        least = format_size(job_disk.SMALLEST)
        raise Declined("bad-hint", f"stage-dir= needs {least} at least, got {format_size(size)}")
    most = size if ram else _max_total_bytes(node, size)
    if place.find_record() is not None:
        return
    job_disk.limit_to_deadline(PATIENCE, end)
    node.cache.jobs.mkdir(mode=0o700, exist_ok=True)
    place.directory.mkdir(mode=0o700)
    with contextlib.ExitStack() as on_error:
        on_error.callback(
            lambda: _remove_job_dir(node.cache, place, min(job_disk.END, end.seconds_left()))
        )
        if ram:
            records.write(place.record_file, msgspec.json.encode(wanted))
            on_error.pop_all()
            return
        # One after the other: each must see the room that the one before has taken.
        with lock.held(node.cache.locks / "jobs.lock", job_disk.limit_to_deadline(PATIENCE, end)):
            _check_fits(node, size, most)
            _evict_for_job_dir(node, job, size, end)
            job_disk.reserve_file(place.disk_file, size)
        trace.reach_point("job room")
        device = job_disk.format_ext4(place.disk_file, job.user, place.directory, end)
        over, patience = (
            node.leases.over_mark(job.id),
            job_disk.limit_to_deadline(daemon.START, end),
        )
        job_disk.start_holder(device, place.directory, over, patience)
        records.write(place.record_file, msgspec.json.encode(wanted))
        on_error.pop_all()


def _max_total_bytes(node: Node, size: int) -> int:
    """The bytes that the directories of all jobs may take together. Raises Declined, OSError."""
    disk = os.statvfs(node.cache.root)
    most = node.config.data.job_dir.resolve_bytes(disk.f_blocks * disk.f_frsize)
    if size > most:
        raise Declined(
            "too-large",
            f"stage-dir= asks for {format_size(size)}, all jobs together may have"
            f" {format_size(most)} on this node (`data: job_dir`)",
        )
    return most


def _check_fits(node: Node, size: int, most: int) -> None:
    others = measure_disk_usage(node.cache).bytes
    if others + size > most:
        raise Declined(
            "no-room",
            f"stage-dir= asks for {format_size(size)}; other jobs have {format_size(others)} of the"
            f" {format_size(most)} that all together may have on this node (`data: job_dir`)",
        )


def _make_mount_point(target: Path) -> None:
    """Makes the empty directory over which each task mounts; nobody but root may replace it."""
    for directory in (target.parent, target):
        if not directory.exists():  # mkdir(2) of what exists waits for the lock of `/`
            directory.mkdir(exist_ok=True)
            directory.chmod(0o755)  # whatever the umask is
        facts = os.lstat(directory)
        others = stat.S_IWGRP | stat.S_IWOTH
        if (
            not stat.S_ISDIR(facts.st_mode)
            or facts.st_uid != os.geteuid()
            or facts.st_mode & others
        ):
            raise Declined("job-dir", f"{directory} is no directory of root's alone")
    with contextlib.suppress(OSError):  # of a node whose root is read-only
        folders.ensure_directory_with_mode(
            target.parent, folders.PASSABLE
        )  # else who lists it holds up each task


def _evict_for_job_dir(node: Node, job: Job, size: int, end: Deadline) -> None:
    """Evicts what the job's user may have evicted, and only if that is enough. Raises Declined."""
    if not unpack_space.has_free_bytes(node.cache, node.config, size):
        patience = job_disk.limit_to_deadline(PATIENCE, end)
        has = _count_reserved_by_user(node.cache)
        evict.evict_for_job(node.cache, node.leases, node.config, size, job.user.uid, patience, has)
    if not unpack_space.has_free_bytes(node.cache, node.config, size):
        stays = unpack_space.read_min_free(node.cache, node.config)
        raise Declined(
            "no-room",
            f"stage-dir= asks for {format_size(size)}; the disk of {node.cache.root} has less,"
            f" in addition to {format_size(stays)} that must stay free, and evicting what this user"
            " may have evicted would not free enough",
        )


def find_job_dir(node: Node, job: Job) -> JobDirectory | None:
    """The directory that a running job has here, whole; None if it has none.

    In the cache that its lease names: `cache:` may be another by now. Raises Failed.
    """
    boot = boot_id()
    lease = node.leases.find_own_lease(job.id, job.user.uid)
    cache = Cache(Path(lease.cache), node.places.claims) if lease else node.cache
    start = lease.start if lease else 0
    for place in _list_dirs_of_job(cache, job.id):
        made = place.find_record()
        is_own = made is not None and (made.uid, made.boot) == (job.user.uid, boot)
        if made is not None and is_own and (0 in (made.start, start) or made.start == start):
            return place
    return None


def prepare_mount_for_step(node: Node, job: Job) -> JobDirMount:
    """The directory of a step's job. Raises Declined where it has none, Failed, OSError.

    `job_ram` makes one in memory for the first step.
    """
    place = find_job_dir(node, job)
    if place is None:
        raise Declined("job-dir", "the job has no directory of its own on this node")
    target = os.fspath(node.places.job_dir)
    made = place.find_record()
    if made is not None and made.ram:
        patience = Deadline.after(daemon.START, node.clock)
        over = node.leases.over_mark(job.id)
        name = job_ram.ensure_tmpfs_holder(
            place.directory, over, job.user, made.size, job.manager, patience
        )
        return JobDirMount(place, ("served", os.fspath(name), target, "root"))
    device = loop.attach_file(place.disk_file, read_only=False)
    file = loop.format_file_id(place.disk_file.stat())
    return JobDirMount(place, ("device", device, file, job_disk.KIND, "rw", target, "root"))


def open_root(own: JobDirMount) -> int:
    """A descriptor of its root directory, for root, in a process of one thread.

    Raises Declined, OSError.
    """
    if own.line[0] == "served":
        return job_ram.open_root(Path(own.line[1]))
    return mounts.open_hidden_mount(
        own.line[1], job_disk.KIND, os.fspath(own.job_directory.directory)
    )


def remove_job_dirs(cache: Cache, job: int) -> None:
    """Removes what the job has here, at once and whatever it holds; may run again.

    For the Epilog, once the lease is dropped, and not under the space lock. Raises Failed, OSError.
    """
    for place in _list_dirs_of_job(cache, job):
        _remove_job_dir(cache, place)


def list_leftovers(cache: Cache, jobs: Container[int]) -> list[JobDirectory]:
    """The directories of other jobs than these, of which leases are known. Raises OSError."""
    return [place for place in _list_job_dirs(cache) if place.job not in jobs]


def remove_leftovers(cache: Cache, leases: LeaseDirectory) -> tuple[str, ...]:
    """Removes what Epilogs left that were killed, or never ran; returns its names.

    Raises Failed, OSError.
    """
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        going = [_move_aside(cache, place) for place in list_leftovers(cache, leases.list_jobs())]
    # Also of Prologs, which only rename, and of Epilogs that were killed. <job>.<restart>.<n>: a
    # look into the directory of an entry may hang with who deletes that (Cache.delete_evicted).
    for directory in cache.evicted.glob("*.*.*"):
        _release_devices(
            _RemovedJobDir(directory.name, directory, files.lstat_or_none(directory / "disk"))
        )
    cache.delete_evicted()
    # Also of an Epilog that was killed before it did so: a device keeps its file's room.
    facts = os.stat(cache.root)  # noqa: PTH116
    for device in loop.list_attached_devices():
        deleted = device.file.endswith(f"/disk{loop.DELETED}")
        if deleted and device.is_on_file_system(facts) and device.is_below_cache(cache.real_root):
            loop.detach_device(device)
    return tuple(gone.name for gone in going)


def measure_disk_usage(cache: Cache) -> DiskUsage:
    """What the directories of jobs take of the disk. Raises OSError."""
    disks = [
        found for place in _list_job_dirs(cache) if (found := files.lstat_or_none(place.disk_file))
    ]
    return DiskUsage(len(disks), sum(disk.st_blocks * 512 for disk in disks))


def _count_reserved_by_user(cache: Cache) -> Counter[int]:
    """The bytes of the disk that each user's jobs have reserved, by uid."""
    found: Counter[int] = Counter()
    for made in filter(None, (place.find_record() for place in _list_job_dirs(cache))):
        found[made.uid] += 0 if made.ram else made.size
    return found


def _list_job_dirs(cache: Cache) -> list[JobDirectory]:
    with contextlib.suppress(FileNotFoundError):
        return [JobDirectory(directory) for directory in sorted(cache.jobs.iterdir())]
    return []


def _list_dirs_of_job(cache: Cache, job: int) -> list[JobDirectory]:
    return [place for place in _list_job_dirs(cache) if place.job == job]


class _RemovedJobDir(msgspec.Struct, frozen=True):
    """A directory that no step finds any more: where it is now, what stat(2) says of its disk."""

    name: str
    current_path: Path | None
    disk: os.stat_result | None


def _remove_job_dir(cache: Cache, place: JobDirectory, patience: float = job_disk.END) -> None:
    gone = _move_aside(cache, place)
    trace.reach_point("job aside")
    _release_devices(gone, patience)
    trace.reach_point("job detached")
    cache.delete_evicted()


def _move_aside(cache: Cache, place: JobDirectory) -> _RemovedJobDir:
    facts = files.lstat_or_none(place.disk_file)
    return _RemovedJobDir(place.directory.name, cache.move_to_evicted(place.directory), facts)


def _remove_earlier_run(cache: Cache, earlier: JobDirectory, end: Deadline) -> None:
    """Removes what an earlier run of the job left: this one has to have its room.

    What cannot be, the sweep removes.
    """
    gone = _move_aside(cache, earlier)
    with contextlib.suppress(Failed, OSError):
        until = Deadline.after(min(job_disk.END, end.seconds_left()), end.clock)
        _release_devices(gone, until.seconds_left())
        if gone.current_path is not None:
            cache.delete_evicted(gone.current_path)
        # The kernel lets go of a device, and so of the file's room, once it was last used. Not of
        # one that a task still has mounted: that run may not have ended for all of its processes.
        while gone.disk and job_disk.list_devices(gone.disk) and until.seconds_left():
            end.clock.sleep(min(lock.POLL, until.seconds_left()))


def _release_devices(gone: _RemovedJobDir, patience: float = job_disk.END) -> None:
    """Ends its holder and detaches its device; what a task has mounted goes with the last one."""
    if gone.current_path is not None:
        daemon.stop_daemon(gone.current_path, patience)
    for device in job_disk.list_devices(gone.disk) if gone.disk else ():
        loop.detach_device(device)
