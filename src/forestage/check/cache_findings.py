"""Findings about the cache's place: its file system, who may write there, its room."""

import contextlib
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from forestage.cache import disk_errors, disk_probe, earlier_caches, evict, known_disks
from forestage.cache.layout import Cache, StoredEntry
from forestage.check.event_log_facts import EventLogFacts, ImageUse
from forestage.check.finding import CheckFinding
from forestage.config import Config
from forestage.errors import Failed, NotFoundError
from forestage.events import BadEntryOutcome, EventRecord
from forestage.paths import NodePaths
from forestage.slurm import enroot
from forestage.system.mounts import MountInfo
from forestage.system.terminal import format_count, format_local_time
from forestage.system.tree import RootedTree
from forestage.units import format_size

RECENT_SECONDS = 7 * 86400.0  # seconds since wrong bytes were found
_QUOTA_OPTIONS = {
    "quota",
    "usrquota",
    "usrjquota",
    "grpquota",
    "grpjquota",
}  # ext4 and xfs in mountinfo


def list_findings(
    files: RootedTree,
    config: Config,
    covered_paths: tuple[str, ...],
    log_facts: EventLogFacts,
    origin: str,
    now: float,
) -> Iterator[CheckFinding]:
    """Looks and changes nothing. A network file system is not asked: it may hang.

    `covered_paths` are directories that jobs see as others than the node does, `origin` is the file
    that sets `cache:`.
    """
    yield from _list_wrong_bytes_findings(
        event for event in log_facts.bad_entries.values() if now - event.time < RECENT_SECONDS
    )
    real = files.resolve_paths((config.cache,))[config.cache]
    yield from _list_earlier_cache_findings(files, real)
    under = files.find_mount(real)
    if under is None:
        return
    yield from _list_file_system_findings(config, under, covered_paths, real, origin)
    if _is_disk_unmounted(under, config) or under.is_remote:
        return
    if other := _find_other_disk_finding(files, under, real):
        yield other
        return
    yield from _list_cache_findings(files, config, real, log_facts.images, origin, now)


def _list_wrong_bytes_findings(found: Iterable[EventRecord]) -> Iterator[CheckFinding]:
    for event in found:
        outcome = event.outcome
        assert isinstance(outcome, BadEntryOutcome)
        copy = outcome.image or f"entry {outcome.key}"
        since = (
            f"between {format_local_time(outcome.since)} and then" if outcome.since else "before"
        )
        yield CheckFinding(
            "wrong-bytes",
            "critical",
            f"at {format_local_time(event.time)} `{event.hook}` found wrong bytes in the copy of"
            f" {copy}" + ("" if outcome.evicted else ", which stays"),
            f"Jobs that began with it {since} may have read them",
            "`forestage explain JOBID` marks each such job; for the disk see `dmesg`"
            + ("" if outcome.evicted else f", and `forestage evict {outcome.key}`"),
        )


def _is_disk_unmounted(under: MountInfo, config: Config) -> bool:
    """Whether the cache would lie on the root disk for want of its own."""
    return under.point == "/" and config.require_mount


def _find_other_disk_finding(files: RootedTree, under: MountInfo, real: str) -> CheckFinding | None:
    """Return the finding where nothing is mounted at the mount point that is remembered."""
    known = known_disks.read_known_disks(NodePaths(files.root).known_disks).find_location(real)
    if known is None or known.point == under.point:
        return None
    if not known_disks.is_below_its_disk(known, files.host_path(real), under):
        return None
    return CheckFinding(
        "cache-other-disk",
        "critical",
        f"{real} was made on the disk at {known.point}, where nothing is mounted; it would lie on"
        f" the disk of {under.point} ({under.source})",
        "Nothing is staged until it is mounted; a disk that several nodes share would lose what"
        " their jobs read",
        f"mount {known.point}; or, if the cache is to lie on the disk of {under.point} from now on:"
        " forestage check --accept-disk",
    )


def _list_earlier_cache_findings(files: RootedTree, real: str) -> Iterator[CheckFinding]:
    """The caches that were configured before: nothing but an admin removes them."""
    places, now = NodePaths(files.root), Cache(files.host_path(real))
    known = known_disks.read_known_disks(places.known_disks).caches
    for root in (one.root for one in known if one.root != real):
        cache = Cache(files.host_path(root), places.claims, places.known_disks)
        under = files.find_mount(root)
        if (
            under is None
            or under.is_remote
            or disk_probe.find_known_hang(places, cache) is not None
        ):
            continue
        try:
            if not earlier_caches.is_other_cache(cache, now) or _find_other_disk_finding(
                files, under, root
            ):
                continue
            cache.check_used_alone()
            stored = cache.list_entries()
        except (OSError, NotFoundError):  # another forestage's, or a user may not look
            continue
        size = format_size(sum(one.bytes for one in stored))
        yield CheckFinding(
            "cache-left",
            "warning",
            f"{root} was the cache before {real}, and has"
            f" {format_count(len(stored), 'entry', 'entries')}"
            f" with {size}",
            "No job uses what it takes, and nothing removes it but this command",
            f"forestage evict --all --cache {shlex.quote(root)} (or set `cache:` to it again)",
        )


def _list_file_system_findings(
    config: Config,
    mount: MountInfo,
    covered_paths: tuple[str, ...],
    resolved_cache: str,
    origin: str,
) -> Iterator[CheckFinding]:
    """The file system of `mount`, on which the cache lies, at `resolved_cache`."""
    line = f"{origin}: cache: /mnt/nvme/forestage"
    if _is_disk_unmounted(mount, config):
        yield CheckFinding(
            "cache-not-mounted",
            "critical",
            f"{config.cache} lies on the root file system: its disk is not mounted",
            "Nothing is staged until it is",
            f"/etc/fstab: the cache's disk, at {Path(config.cache).parent} (or, if it is meant"
            f" to be there, {origin}: require_mount: false)",
        )
        return
    for above in covered_paths:
        if f"{resolved_cache}/".startswith(f"{above.rstrip('/')}/"):
            yield CheckFinding(
                "cache-hidden",
                "critical",
                f"{config.cache} lies below {above}, which jobs do not see as the node does",
                "Images are copied, and jobs cannot be given the copies",
                line,
            )
            break
    if mount.is_read_only:
        yield CheckFinding(
            "cache-read-only",
            "critical",
            f"{mount.point} is mounted read-only",
            "Nothing is staged; ext4 goes read-only when its disk fails: see `dmesg`",
            f"mount -o remount,rw {mount.point} (after fsck, if it failed)",
        )
    if mount.is_remote:
        yield CheckFinding(
            "cache-on-network",
            "critical",
            f"{config.cache} lies on {mount.kind} ({mount.source}), which is no disk of this node",
            "Nothing is staged: copies would go through the network twice, and nodes evict what"
            " others' jobs read",
            line,
        )
        return
    # Whether or not there is a limit for anybody.
    if any(one.partition("=")[0] in _QUOTA_OPTIONS for one in mount.options):
        yield CheckFinding(
            "cache-quota",
            "warning",
            f"{mount.point} has quotas for users or groups; a copy belongs to its image's owner",
            "A copy counts against its owner's quota there, also after the job: what they write may"
            " fail (EDQUOT)",
            f"{origin}: cache: on a file system without quotas for users and groups (those for"
            " projects do no harm)",
        )


def _list_cache_findings(
    files: RootedTree,
    config: Config,
    real: str,
    images: tuple[ImageUse, ...],
    origin: str,
    now: float,
) -> Iterator[CheckFinding]:
    """What the disk told of itself, who may write to the cache, and its room."""
    places, cache = NodePaths(files.root), Cache(files.host_path(real))
    if hang := disk_probe.find_known_hang(places, cache):
        yield CheckFinding(
            "cache-hangs",
            "critical",
            str(disk_probe.declined_by_hang(cache, hang)),
            "Nothing is copied; jobs read the shared path, and what is here while it can be read",
            "see the kernel's log: a frozen file system (fsfreeze -u), or a disk to be replaced",
        )
        return  # who looks further would hang with it
    known = disk_errors.read_state(places)
    if known.since:
        yield CheckFinding(
            "disk-errors",
            "critical",
            f"the disk of {config.cache} has lost data: {known.why}",
            "No job gets a copy of this node until the sweep has read every entry again; all read"
            " the shared path",
            "forestage sweep, or wait for its timer; if it comes again, replace the disk",
        )
    if not _is_private_directory(cache.root):
        yield CheckFinding(
            "cache-not-ours",
            "critical",
            f"{config.cache} is not a directory of root's with mode 0700",
            "Nothing is staged: others could change what jobs read",
            f"chown root: {config.cache}; chmod 0700 {config.cache} (if nobody else uses it)",
        )
    else:
        yield from _list_exposure_findings(Cache(files.host_path(config.cache)))
    stored: list[StoredEntry] = []
    with contextlib.suppress(OSError):
        stored = cache.list_entries()
    yield from _list_vanished_file_findings(cache, config, stored, now)
    yield from _list_space_findings(files, cache, config, images, origin, stored)


def _list_vanished_file_findings(
    cache: Cache, config: Config, stored: list[StoredEntry], now: float
) -> Iterator[CheckFinding]:
    """What is said of damaged entries that lack a file: an entry is published and evicted whole."""
    lost = [_file_loss_time(cache.entry_dir(one.key)) for one in stored if one.entry is None]
    since = [time for time in lost if now - time < RECENT_SECONDS]
    if since:
        yield CheckFinding(
            "entries-vanish",
            "warning",
            f"files vanish from entries ({len(since)} since {format_local_time(min(since))}): does"
            " something on this node delete by owner?",
            "Jobs keep what they have open, and each next one copies its image anew. A copy belongs"
            " to its image's owner, so that whatever deletes a user's files on the disk takes it",
            f"leave out {config.cache} where the site's Epilog, or a timer, deletes users' files",
        )


def _file_loss_time(directory: Path) -> float:
    """Return when a damaged entry lost a file, by its directory's time; 0 if it has them all."""
    try:
        if all((directory / name).exists() for name in ("image", "entry.json")):
            return 0.0
        return directory.stat().st_mtime if directory.is_dir() else 0.0
    except OSError:
        return 0.0


def _list_exposure_findings(cache: Cache) -> Iterator[CheckFinding]:
    """Whether somebody else could put another directory in the cache's place, as each hook asks."""
    problem = None
    with contextlib.suppress(OSError):  # a directory above it is not there yet
        problem = cache.find_exposure()
    if problem:
        why = "Nothing is staged: others could change what jobs read"
        yield CheckFinding("cache-not-ours", "critical", problem.what, why, problem.hint)


def _is_private_directory(root: Path) -> bool:
    """Whether Cache.prepare would take the directory; one that is to be made is all right."""
    try:
        facts = os.lstat(root)
    except OSError:
        return True
    owned = stat.S_ISDIR(facts.st_mode) and facts.st_uid in (0, os.geteuid())
    return owned and not facts.st_mode & 0o077


def _list_unpack_findings(
    files: RootedTree, config: Config, min_free: int, origin: str
) -> Iterator[CheckFinding]:
    """Where enroot unpacks to the cache's disk: whether jobs find room there."""
    settings = enroot.read_enroot_setup(files).settings
    told, fixed = settings.get("ENROOT_DATA_PATH", ""), enroot.find_fixed_data_path(settings)
    if not fixed or files.find_mount(files.resolve_path(config.cache)) != files.find_mount(
        files.resolve_path(fixed)
    ):
        return
    if config.unpack_ratio and min_free:
        return
    yield CheckFinding(
        "enroot-beside",
        "warning",
        f"enroot unpacks to {told}, on the cache's disk, and"
        f" {'no room is made for it' if min_free else 'min_free is 0'}",
        "A container that finds the disk full fails (no space left on device), which it would not"
        " without the cache",
        f"{origin}: " + ("unpack_ratio: 3" if min_free else "min_free: 20%"),
    )


def _list_space_findings(
    files: RootedTree,
    cache: Cache,
    config: Config,
    images: tuple[ImageUse, ...],
    origin: str,
    stored: list[StoredEntry],
) -> Iterator[CheckFinding]:
    """What entries may take if all others are evicted, compared with the largest image."""
    facts = files.find_statvfs(config.cache)
    if facts is None:
        return
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    used = 0
    with contextlib.suppress(OSError, Failed):
        used = evict.measure_space(cache, stored, config).used
    room = min(
        config.max_size.resolve_bytes(total), used + free - config.min_free.resolve_bytes(total)
    )
    largest = max(images, key=lambda image: image.size, default=ImageUse(""))
    yield from _list_unpack_findings(files, config, config.min_free.resolve_bytes(total), origin)
    if room <= 0:
        yield CheckFinding(
            "cache-full",
            "critical",
            f"the disk of {config.cache} has no space for any entry ({format_size(free)} of"
            f" {format_size(total)} are free, the rest is not the cache's)",
            "Nothing is staged; every start reads the shared file system",
            f"make room on the disk, or {origin}: max_size and min_free",
        )
    elif room < 2 * largest.size:
        yield CheckFinding(
            "cache-small",
            "warning",
            f"entries may take {format_size(room)}, less than two images such as"
            f" {largest.path} ({format_size(largest.size)}); {format_size(free)} of"
            f" {format_size(total)} are free",
            "Two jobs with images of that size at a time: one of them reads the shared file system",
            f"make room on the disk, or {origin}: cache: on a larger one",
        )
