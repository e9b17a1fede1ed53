"""The cache on the node's disk: its layout, look-up, and publishing a finished copy.

    <root>/CACHEDIR.TAG  format
    <root>/entries/<key>/{image, map, entry.json, boot, used, pinned}
                         used: mtime is the last use, the text the uids of its users, 0 where root
                         warmed it; empty: nobody knows
    <root>/parts/<key>/{image, map, owner.json}  a copy under way, see part.py
    <root>/jobs/<job>.<restart>/                 a job's own directory, see features/data/job_dir.py
    <root>/evicted/{<key>,<job>.<restart>}.<n>   evicted, soon deleted
    <root>/hot/<hash of a path>                  which of its images had a hot map, see
                                                 hot_pieces.py
    <root>/looks/<job>/                          looks at directories, see
                                                 features/data/shared_scan.py
    <root>/locks/{<key>.lock, space.lock}
    <root>/locks/entries.sum                     the bytes of all entries, see entry_sum.py
    <root>/instances/<boot>.<run>                by whom the cache is used, see
                                                 earlier_caches.py

A published entry is read without a lock: it appears by one rename and leaves by one.
"""

import contextlib
import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from forestage import log
from forestage.cache import entry_sum, known_disks
from forestage.cache.known_disks import CacheLocation
from forestage.cache.part import ENTRY_BYTES, Part, PartRecord, boot_id, chunk_count
from forestage.cache.source_image import AccessRights, FileIdentity, ImageKind, SourceImage
from forestage.errors import DISK_FULL_ERRNOS, Declined, Failed, NotFoundError, classify_disk_error
from forestage.system import as_user, files, forked_child, lock, mounts, records
from forestage.system.files import open_descriptor
from forestage.system.mounts import MountInfo

FORMAT = "1\n"
UNFINISHED_AFTER = 3600.0  # seconds; to make a cache takes some milliseconds
DELETION, DELETIONS = 10.0, 60.0  # seconds for one of what was evicted, and for all
DELETED_AT_ONCE = 4
EXACT = 0.001  # seconds: what a file's time keeps of a float
USERS = 4000  # bytes of their uids: no more than the block that the file has anyway
PROVEN = b"proven"  # in an entry's file `boot`, in place of the boot that wrote the entry

# CACHEDIR.TAG: its signature is fixed, and backup programs leave a folder that has one out.
_CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Copies of container images, made by forestage. Each can be fetched again.\n"
)


class Entry(msgspec.Struct, frozen=True):
    """entry.json: what was copied, how, and when (seconds since the epoch).

    `chunk` bytes are what one entry of `map` stands for; `digest` is that of the whole `map`.
    `kind` is that of the job which was the first to want it; `rate` is what the source gave in
    bytes per second, 0 where that is not known. `binds` is what the image's own fstab binds
    (stage/fstab.py). `expected`: since when pending jobs named it, if it was copied for them.
    """

    key: str
    identity: FileIdentity
    access: AccessRights
    created: float
    engine: str
    chunk: int = 0
    digest: str = ""
    kind: ImageKind = "image"
    rate: float = 0.0
    binds: tuple[str, ...] = ()
    expected: float = 0.0


class StoredEntry(msgspec.Struct, frozen=True):
    """A directory below entries/: `bytes` on disk, `used` in seconds since the epoch.

    `entry` is None where entry.json cannot be read; such a one is never served, only evicted.
    `user` is the uid of the only user so far, None where several used it or nobody knows.
    """

    key: str
    bytes: int
    used: float
    pinned: bool
    entry: Entry | None
    user: int | None = None

    @property
    def is_data(self) -> bool:
        """Whether it is no image, but a job's data."""
        return self.entry is not None and self.entry.kind == "data"

    @property
    def is_unused(self) -> bool:
        """Whether it was copied for pending jobs, and none has used it so far.

        Its time is when it was made, or 0 once it is expected no more.
        """
        entry = self.entry
        if entry is None or not entry.expected:
            return False
        return not self.used or abs(self.used - entry.created) < EXACT


def open_copy(path: Path) -> io.FileIO:
    """Opens a copy for reading, without waiting for its owner. Raises OSError.

    It belongs to the source's owner (docs/decisions/0026), who may hold a lease on it (F_SETLEASE).
    An open that waits would wait for as long as they like, up to the kernel's lease-break-time,
    45 s. So this raises BlockingIOError then. Nobody gets such a lease on a file that is open.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    return io.FileIO(os.open(path, flags))


class Cache:
    """The paths of one cache root. Making a Cache touches nothing; `prepare` does.

    `claims` is where its redirects are claimed (bind/unmount.py), the same for all of the node;
    `known_disks` where its disk is remembered (known_disks.py), None for what only looks.
    """

    def __init__(
        self, root: Path, claims: Path | None = None, known_disks: Path | None = None
    ) -> None:
        self.root = root
        self.entries = root / "entries"
        self.parts = root / "parts"
        self.jobs = root / "jobs"
        self.looks = root / "looks"
        self.evicted = root / "evicted"
        self.hot_names = root / "hot"
        self.locks = root / "locks"
        self.instances = root / "instances"
        self.space_lock = self.locks / "space.lock"
        self.entry_sum = self.locks / "entries.sum"
        self.claims = claims or self.locks
        self.known_disks = known_disks

    @property
    def real_root(self) -> str:
        """The root as the kernel's mount table knows it."""
        return os.path.realpath(self.root)

    def key_lock(self, key: str) -> Path:
        return self.locks / f"{key}.lock"

    def entry_dir(self, key: str) -> Path:
        return self.entries / key

    def image_path(self, key: str) -> Path:
        return self.entries / key / "image"

    def part_dir(self, key: str) -> Path:
        return self.parts / key

    def part(self, key: str) -> Part:
        return Part(self.parts / key)

    def mark_stager_start(self, key: str) -> None:
        """Tells `find_stager` that who holds the key's lock has just taken it."""
        with contextlib.suppress(OSError):  # of the disk: the copy itself will meet it
            os.utime(self.key_lock(key))

    def find_stager(self, key: str) -> PartRecord | None:
        """The record of who copies the key now; None where nobody does, or has not written one.

        By the key's lock: a pid would be another process' after a while, or in another PID
        namespace. A record from before the lock was taken is that of a stager that was killed.
        """
        owner, taken = self.part(key).find_record(), self.key_lock(key)
        noted, held = files.lstat_or_none(self.part(key).record), files.lstat_or_none(taken)
        if owner is None or noted is None or held is None or noted.st_mtime_ns < held.st_mtime_ns:
            return None
        lives = owner.boot == boot_id() and not lock.is_free(taken)
        return owner if lives else None

    def prepare(self, require_mount: bool) -> None:
        """Makes the layout, or finds it made.

        Raises Failed where it must not be used, Declined where its disk is full (no-room) or no
        node's own, OSError.
        """
        try:
            self._prepare(require_mount)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            raise classify_disk_error(error) from None

    def _prepare(self, require_mount: bool) -> None:
        # It looks before it makes: mkdir(2) waits for a disk that takes no writes, though the
        # directory is there.
        self.check_on_its_disk(require_mount)
        if not self.root.exists():
            self.root.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.root.mkdir(mode=0o700)
        facts = os.lstat(self.root)
        # The parent may be a scratch disk on which users can make directories: one of theirs by
        # our name would let them change what other users' jobs read.
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or not self.root.is_dir():
            raise Failed(
                "cache-not-ours",
                f"{self.root} is not a directory of root's with mode 0700",
                "remove it, or set `cache:` to another path",
            )
        self._check_out_of_reach()
        found = self._is_made()
        for directory in (self.entries, self.parts, self.evicted, self.locks):
            if not directory.is_dir():
                directory.mkdir(mode=0o700, exist_ok=True)
        if found:
            return
        # Before the cache is made: the next hook tries again where this one is killed.
        self.remember_disk()
        records.write(self.root / "CACHEDIR.TAG", _CACHEDIR_TAG.encode())
        # Last: whoever reads it finds the directories above.
        records.write(self.root / "format", FORMAT.encode())

    def _is_made(self) -> bool:
        """Whether the cache is made. Raises Failed where it is not one of this release's."""
        file = self.root / "format"
        try:
            found = records.read_raw(file)
        except FileNotFoundError:
            return False
        except records.DamagedRecord as damaged:
            raise Failed("cache-format", str(damaged), "empty the cache") from None
        if found != FORMAT.encode():
            raise Failed(
                "cache-format",
                f"{self.root} has format {_shorten_for_log(found)}, this forestage writes"
                f" {FORMAT.strip()}",
                "empty it, or install the release that wrote it",
            )
        return True

    def mark_in_use(self) -> None:
        """Leave a mark of this forestage in the cache: by its /run, where its leases are.

        Before something is made that another one might delete, and by the sweep; not for a hit.
        """
        mark = self._instance_mark()
        with contextlib.suppress(OSError):  # of the disk: what is made next will meet it
            if mark is not None and not mark.exists():
                mark.parent.mkdir(mode=0o700, exist_ok=True)
                mark.touch(mode=0o600)
                for other in mark.parent.iterdir():
                    if not other.name.startswith(f"{boot_id()}."):
                        other.unlink(missing_ok=True)

    def check_used_alone(self) -> None:
        """Raise NotFoundError where another forestage has used the cache since the boot."""
        others = self.instances.glob(f"{boot_id()}.*")
        if found := next((one for one in others if one != self._instance_mark()), None):
            raise NotFoundError(
                f"{self.root} is used by another forestage of this node, in a container perhaps",
                f"if that is gone for good, remove {found}",
            )

    def _instance_mark(self) -> Path | None:
        """Of its /run; None for what only looks. Two on one node never have the same inode."""
        run = files.lstat_or_none(self.claims.parent) if self.claims != self.locks else None
        name = f"{boot_id()}.{run.st_dev}-{run.st_ino}" if run else ""
        return self.instances / name if name else None

    def drop_unfinished(self, now: float) -> None:
        """Deletes what hooks left that were killed while they made the cache.

        `now` in seconds since the epoch: a hook that makes it at this moment needs its file.
        """
        for file in self.root.glob(".*.*"):  # as records.py names them
            found = files.lstat_or_none(file)
            if found is not None and abs(now - found.st_mtime) > UNFINISHED_AFTER:
                file.unlink(missing_ok=True)

    def correct_future_uses(self, now: float) -> None:
        """Makes uses that have yet to come, by this node's clock, uses at `now`.

        They are of before the clock was set back. Else what jobs use from now on would be evicted
        before those entries for as long as the clock was ahead. Raises OSError.
        """
        for directory in self.entries.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found = files.lstat_or_none(directory / "used")
                if found is not None and found.st_mtime > now + UNFINISHED_AFTER / 60:
                    os.utime(directory / "used", (now, now), follow_symlinks=False)

    def find_entry(self, image: SourceImage) -> Entry | None:
        """The published entry with exactly this image's bytes and access rights, if it is here.

        None also where its bytes are not proven: a stager does that (`demote_to_part`), or a sweep.
        """
        entry = self.find_entry_by_key(image.key)
        if entry is None or entry.identity != image.identity or entry.access != image.access:
            return None
        return entry if self.is_proven(image.key) else None

    def is_proven(self, key: str) -> bool:
        """Whether an entry was written in this boot, or read and compared since.

        It was made durable before it had its name, but disks have been seen to lose confirmed
        writes in a power cut.
        """
        try:
            return records.read_raw(self.entry_dir(key) / "boot") in (boot_id().encode(), PROVEN)
        except (FileNotFoundError, NotADirectoryError, records.DamagedRecord):
            return False

    def last_verified(self, key: str) -> float:
        """When an entry was last read whole and right; seconds since the epoch, 0: unknown."""
        found = files.lstat_or_none(self.entry_dir(key) / "boot")
        return found.st_mtime if found else 0.0

    def demote_to_part(self, key: str) -> None:
        """Makes an entry a part again, so that a stager proves it. Under the key's and space lock.

        Nobody sees its file: what is not proven is not served, and a boot ends all redirects.
        """
        size, is_data = self._entry_bytes(key), self._is_data(key)
        self.entry_dir(key).rename(self.part_dir(key))
        entry_sum.add_bytes(self.entry_sum, -size, is_data)
        (self.part_dir(key) / "entry.json").unlink(missing_ok=True)

    def find_entry_by_key(self, key: str) -> Entry | None:
        """The record of a published entry; None where there is none, or it is damaged."""
        entry = self._find_record(key)
        return (
            entry
            if entry and _is_entry_whole(entry, key, files.lstat_or_none(self.image_path(key)))
            else None
        )

    def _find_record(self, key: str) -> Entry | None:
        return records.find(self.entry_dir(key) / "entry.json", Entry)

    def read_digests(self, entry: Entry) -> bytes:
        """The digests that were taken while it was copied; b"" where not every chunk has a place.

        Raises OSError.
        """
        try:
            found = records.read_raw(self.entry_dir(entry.key) / "map")
        except (FileNotFoundError, NotADirectoryError, records.DamagedRecord):
            return b""
        length = chunk_count(entry.identity.size, entry.chunk or 1) * ENTRY_BYTES
        return found if len(found) == length else b""

    def list_entries(self, known: Iterable[StoredEntry] = ()) -> list[StoredEntry]:
        """Everything below entries/, damaged ones too, in no order.

        Of `known` ones that are still here nothing is read again, but for damaged ones: there may
        be a new copy in the place of such a one.
        """
        whole = {one.key: one for one in known if one.entry is not None}
        found = []
        for directory in self.entries.iterdir():
            try:
                found.append(whole.get(directory.name) or self._read_entry_directory(directory))
            except FileNotFoundError:  # evicted meanwhile
                continue
        return found

    def _read_entry_directory(self, directory: Path) -> StoredEntry:
        facts = os.lstat(directory)
        if not stat.S_ISDIR(facts.st_mode):
            return StoredEntry(directory.name, facts.st_blocks * 512, 0.0, pinned=False, entry=None)
        key = directory.name
        with os.scandir(directory) as names:
            found = {one.name: one.stat(follow_symlinks=False) for one in names}
        entry = self._find_record(key)
        return StoredEntry(
            key=key,
            bytes=512 * (facts.st_blocks + sum(one.st_blocks for one in found.values())),
            used=found.get("used", facts).st_mtime,
            pinned="pinned" in found,
            entry=entry if entry and _is_entry_whole(entry, key, found.get("image")) else None,
            user=_sole_user(_read_user_ids(directory / "used")),
        )

    def is_pinned(self, key: str) -> bool:
        return (self.entry_dir(key) / "pinned").exists()

    def publish(self, entry: Entry, user: int | None = None) -> None:
        """Turns the finished part into an entry. The caller holds the key's lock.

        The image's bytes must be complete; they are made durable here, before the name is. `user`
        is the uid of the first user.
        """
        part = self.part_dir(entry.key)
        (part / "spare").unlink(missing_ok=True)  # what is written next may need its room
        self.part(entry.key).delete_peer_notes()
        records.write(part / "entry.json", msgspec.json.encode(entry))
        records.write(part / "used", b"%d" % (user or 0))
        (part / "owner.json").unlink(missing_ok=True)
        (part / "waited").unlink(missing_ok=True)
        files.overwrite_file(part / "boot", boot_id().encode())
        os.utime(part / "boot", (entry.created, entry.created))  # when its bytes were last read
        records.sync_file(part / "image")
        with contextlib.suppress(FileNotFoundError):
            records.sync_file(part / "map")
        records.sync_directory(part)
        if entry.expected:
            os.utime(part / "used", (entry.created, entry.created))
        # A damaged entry of the same key would be in the way of the rename.
        self.evict_entry(entry.key)
        part.rename(self.entry_dir(entry.key))
        entry_sum.add_bytes(self.entry_sum, self._entry_bytes(entry.key), entry.kind == "data")
        records.sync_directory(self.entries)

    def record_use(self, key: str, now: float, user: int | None = None) -> None:
        """Notes a use at `now` (seconds since the epoch), by the user with this uid."""
        used = self.entry_dir(key) / "used"
        if user is not None:
            with contextlib.suppress(OSError):  # only a matter of shares
                _add_user(used, user)
        os.utime(used, (now, now), follow_symlinks=False)

    def evict_entry(self, key: str) -> None:
        """Moves an entry away by one rename; `delete_evicted` deletes it later.

        Who has it open, or bound over a path, keeps reading it: unlinked files stay until closed.
        """
        size, is_data = self._entry_bytes(key), self._is_data(key)
        if self.move_to_evicted(self.entry_dir(key)) is not None:
            entry_sum.add_bytes(self.entry_sum, -size, is_data)

    def _entry_bytes(self, key: str) -> int:
        """Of an entry, for the sum, which is wrong by that much where a disk does not say it."""
        try:
            return tree_bytes(self.entry_dir(key))
        except OSError:
            return 0

    def _is_data(self, key: str) -> bool:
        """Whether an entry is no image, for the sum; a damaged one counts as an image."""
        try:
            entry = self._find_record(key)
        except OSError:
            return False
        return entry is not None and entry.kind == "data"

    def delete_evicted(self, only: Path | None = None) -> None:
        """Deletes what was evicted, or the one directory, as far as it can; also what a crash left.

        Two at once do no harm. Each in a child: whoever has an image open can have unlink(2) wait
        for as long as they like, by a read with O_DIRECT into a FUSE of theirs; no signal ends that
        wait.
        """
        works = [partial(self._delete, one) for one in ([only] if only else self.evicted.iterdir())]
        with contextlib.suppress(OSError):  # no process can be started: the next hook tries again
            as_user.run_each_in_child(works, bool, DELETION, DELETIONS, DELETED_AT_ONCE)

    def _delete(self, evicted: Path) -> bool:
        """Unless another process does it, or hangs with it: that keeps a lock on the directory."""
        forked_child.leave_job_cgroups()  # nobody is to wait for it
        if evicted.is_symlink() or not evicted.is_dir():
            with contextlib.suppress(OSError):
                evicted.unlink()
            return True
        with open_descriptor(evicted, os.O_RDONLY | os.O_DIRECTORY) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            import shutil  # few hooks delete something

            shutil.rmtree(evicted, ignore_errors=True)
        return True

    def drop_part(self, key: str) -> None:
        """Deletes a part. The caller holds the key's lock.

        By one rename first: a part that is half gone would pass for one that can be resumed.
        """
        gone = self.move_to_evicted(self.part_dir(key))
        if gone is not None:
            self.delete_evicted(gone)

    def move_to_evicted(self, directory: Path) -> Path | None:
        """Where the directory is now, below evicted/; None if there is none. Raises Failed."""
        for number in range(1000):
            target = self.evicted / f"{directory.name}.{number}"
            try:
                directory.rename(target)
            except FileNotFoundError:
                return None
            except OSError as error:
                # An earlier one of this key is still being deleted. The latter two: what has that
                # name there, or here, is no directory.
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                    continue
                raise
            return target
        raise Failed("evicted-stays", f"{self.evicted} cannot be emptied", "delete what it holds")

    def _check_out_of_reach(self) -> None:
        """Raises Failed where somebody else could put another directory in the cache's place."""
        # Mostly the same directories: each is looked at once, as each hook does it.
        for above in dict.fromkeys((*self.root.parents, *Path(self.real_root).parents)):
            facts = above.stat()
            others = stat.S_IWOTH | (stat.S_IWGRP if facts.st_gid else 0)
            # In a sticky directory, such as /tmp, nobody renames what is not theirs.
            by_them = facts.st_mode & others and not facts.st_mode & stat.S_ISVTX
            if by_them or facts.st_uid not in (0, os.geteuid()):
                raise Failed(
                    "cache-not-ours",
                    f"{above} lets others rename what is in it, {self.root} too",
                    f"give it to root, `chmod go-w {above}`, or set `cache:` to another path",
                )

    def find_exposure(self) -> Failed | None:
        """Why `prepare` would refuse the place for what others may do there. Raises OSError."""
        try:
            self._check_out_of_reach()
        except Failed as failed:
            return failed
        return None

    def check_on_its_disk(self, require_mount: bool) -> None:
        """Raises Failed where the cache's disk is not mounted, Declined where nodes share it.

        The mount table is read only where the file system there is not the one that is remembered,
        or is that of `/`. Raises OSError.
        """
        known = None
        if self.known_disks is not None:
            known = known_disks.read_known_disks(self.known_disks).find_location(self.real_root)
        if known is not None and known_disks.is_on_its_disk(known, self.root):
            return
        under = self._find_local_mount(require_mount)
        if under is None or known is None or known.point == under.point:
            return
        if known_disks.is_below_its_disk(known, self.root, under):
            raise Failed(
                "cache-other-disk",
                f"{self.root} was made on the disk at {known.point}, where nothing is mounted; it"
                f" would lie on the disk of {under.point}",
                "mount it, or have the other one used: `forestage check --accept-disk`",
            )

    def find_other_disk(self) -> Declined | None:
        """Why what lies at the root is another disk than the cache's. Raises OSError."""
        try:
            self.check_on_its_disk(require_mount=False)
        except Declined as declined:
            return declined
        return None

    def remember_disk(self) -> None:
        """Remembers the disk that the cache lies on, and says in the log where that is a new one.

        What cannot be remembered is no error: a node may have nowhere to keep it.
        """
        if self.known_disks is None:
            return
        with contextlib.suppress(OSError, Declined):
            now = self.read_current_location()
            before = known_disks.remember_disk(self.known_disks, now)
            if before is not None:
                there = f"{before.file_system} at {before.point}"
                detail = f"{now.file_system} at {now.point}, until now {there}"
                log.write_log_line(
                    f"cache root={self.root} result=new-disk {detail=}", by_slurm=True
                )

    def accept_disk(self, require_mount: bool) -> CacheLocation:
        """Has the cache use the disk that its path leads to now. Raises Declined, OSError."""
        now = self.read_current_location(require_mount)
        if self.known_disks is not None:
            known_disks.remember_disk(self.known_disks, now, is_accepted=True)
        return now

    def read_current_location(self, require_mount: bool = False) -> CacheLocation:
        """Return the disk that the cache's path leads to now. Raises Declined, OSError."""
        under = self._find_local_mount(require_mount)
        if under is None:
            raise Failed("cache-not-mounted", f"no mount is known above {self.root}")
        return known_disks.read_current_location(self.root, self.real_root, under)

    def _find_local_mount(self, require_mount: bool) -> MountInfo | None:
        """The mount that the cache lies on, or would; None where none is known above it.

        Raises Failed where that is the root disk and must not be, Declined where nodes share it.
        """
        under = mounts.find_disk_mount(self.real_root)
        if require_mount and (under is None or under.point == "/"):
            raise Failed(
                "cache-not-mounted",
                f"{self.root} is on the root file system: its disk is not mounted",
                "mount it, or set `require_mount: false`",
            )
        if under is not None and under.is_remote:
            raise Declined(
                "cache-on-network",
                f"{self.root} is on {under.kind} ({under.source}), which is no disk of this node",
                "set `cache:` to a path on a disk of the node",
            )
        return under


class DiskUsage(msgspec.Struct, frozen=True):
    """How many of something are there, and the bytes that they take of the node's disk."""

    number: int = 0
    bytes: int = 0


def tree_bytes(directory: Path) -> int:
    """Bytes on disk, as du(1) counts them, of a directory of plain files and itself.

    Something else by that name, which somebody has put there, counts as well: it can be evicted.
    """
    facts = os.lstat(directory)
    total = facts.st_blocks
    if stat.S_ISDIR(facts.st_mode):
        with os.scandir(directory) as entries:
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_blocks
    return total * 512


def _is_entry_whole(entry: Entry, key: str, image: os.stat_result | None) -> bool:
    """Pure: whether a record is of this key, and its image there."""
    # A directory has a size too, and a link may lead to a file of another user's.
    if image is None or not stat.S_ISREG(image.st_mode):
        return False
    return image.st_size == entry.identity.size and entry.key == key


def _read_user_ids(used: Path) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(map(int, records.read_raw(used).split())))
    except (OSError, ValueError, records.DamagedRecord):
        return ()


def _sole_user(users: tuple[int, ...]) -> int | None:
    return users[0] if len(users) == 1 else None


def _add_user(used: Path, user: int) -> None:
    """By one write, to the end: two at once lose nothing. Raises OSError."""
    users = _read_user_ids(used)
    if users and user not in users:
        with open_descriptor(used, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            if os.fstat(fd).st_size < USERS:
                os.write(fd, b" %d" % user)


def _shorten_for_log(text: bytes) -> str:
    """A file's words for a log line; there may be a gigabyte of them."""
    return repr(text[:40].decode(errors="replace").strip())
