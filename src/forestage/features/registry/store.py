"""A user's directory of imported images, which all nodes share.

    <base>/<uid>/NAME.sqsh                an image; it has this name once it is whole
                 NAME.json                what it was made of; its mtime is when it was used last
                 NAME.<random>.part       one that is being imported
                 NAME.lease.<n>, .wanted, .failed    see import_lease.py
                 tags/<hash>.json         the digest that a tag meant last
                 jobs/<job>-<hash>.json   the digest that counts for all nodes of a job

All of it is the user's, in a directory that is theirs alone (0700): who calls this is that user, in
all three ids. A user may have put anything there, and a node may have died while it wrote: no
name leads further, and nothing here waits for whoever holds a FIFO.
"""

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.cache.source_image import HEAD, is_squashfs, parse_squashfs_size
from forestage.clock import Clock, Deadline
from forestage.errors import DISK_FULL_ERRNOS, Declined
from forestage.features.registry import store_age
from forestage.features.registry.reference import is_digest
from forestage.features.registry.store_files import find_own_record, open_own_file, try_create_file
from forestage.system import mounts, records
from forestage.system.files import open_descriptor
from forestage.units import format_size

MODE = 0o700
RECORD_LASTS = 7 * 86400.0  # seconds since its last use after which a job's record is another job's
WRITE_TIMEOUT = 5.0  # seconds in which who made a file there has written it

FILE = re.compile(
    r"(?P<name>[0-9a-z][0-9A-Za-z_-]{0,199})"
    r"\.(?P<kind>sqsh|json|wanted|failed|lease\.[0-9]{1,9}|[0-9a-f]{16}\.part)"
)


class ImageRecord(msgspec.Struct, frozen=True):
    """What an image was made of, by which host; `digest` is "" where it was imported by its tag."""

    reference: str
    digest: str
    date: float
    size: int
    host: str


class ResolvedTag(msgspec.Struct, frozen=True):
    """The digest that a reference means; "" where no registry says it: imported by its tag."""

    reference: str
    digest: str
    date: float


@contextlib.contextmanager
def convert_store_errors(place: Path) -> Iterator[None]:
    """Has an OSError of the store raise Declined instead: `store-full` or `store-gone`."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise make_full_error(f"{place}: {error.strerror}") from None
        what = f"the store of images, {place}, cannot be used: {error.strerror or error}"
        raise Declined("store-gone", what) from None


def make_full_error(what: str) -> Declined:
    hint = "`forestage registry ls` shows your images, and `rm` deletes them"
    return Declined("store-full", f"no room for the image: {what}", hint)


class ImageStore:
    """The images of the user whom this process is, below `base`."""

    def __init__(self, base: Path, clock: Clock, cache: str = "") -> None:
        """Makes the directory; none on the disk of `cache`, which its user could fill.

        Raises Declined: store-foreign, store-full, store-gone, store-local.
        """
        self.uid = os.geteuid()
        self.clock = clock
        self.folder = base / str(self.uid)
        if not base.is_absolute():
            raise Declined(
                "store-gone", "no store of images is configured", "set `registry: store:`"
            )
        with convert_store_errors(base):
            _check_other_file_system(base, cache)
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(MODE)
            self._check_own_directory()

    def _check_own_directory(self) -> None:
        found = os.lstat(self.folder)
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == self.uid
        if not mine or found.st_mode & 0o077:
            who = "others may enter it" if mine else "somebody else made it"
            hint = f"`chmod 700 {self.folder}`" if mine else "the admin can remove it"
            raise Declined("store-foreign", f"{self.folder} is not used: {who}", hint)

    def image_path(self, name: str) -> Path:
        return self.folder / f"{name}.sqsh"

    def new_part_path(self, name: str) -> Path:
        """A name for one import; nothing is there yet, as enroot demands."""
        return self.folder / f"{name}.{os.urandom(8).hex()}.part"

    def find_image(self, name: str) -> Path | None:
        """Returns where an image lies, and notes that it is used. Raises Declined."""
        path = self.image_path(name)
        with convert_store_errors(self.folder):
            if _find_squashfs_size(path) is None:
                return None
        # Not on a store that is read-only; and an import that was killed has left none.
        with contextlib.suppress(OSError):
            os.utime(path.with_suffix(".json"), follow_symlinks=False)
        return path

    @property
    def free_bytes(self) -> int:
        """Bytes that this user can still write there, but for quotas. Raises Declined."""
        with convert_store_errors(self.folder):
            disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    def publish_image(
        self, name: str, part: Path, record: ImageRecord, max_size: int | None
    ) -> Path:
        """Makes an imported file an image, by one rename. Raises Declined, and deletes it then."""
        path = self.image_path(name)
        try:
            with convert_store_errors(self.folder):
                size = _check_imported_image(part, max_size)
                part.chmod(0o600)
                records.sync_file(part)
                whole = msgspec.structs.replace(record, size=size)
                records.write(path.with_suffix(".json"), msgspec.json.encode(whole))
                os.replace(part, path)
                records.sync_directory(self.folder)
        except Declined:
            self.delete_part(part)
            raise
        return path

    def delete_part(self, part: Path) -> None:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)

    def find_job_digest(self, job: str, reference: str) -> str | None:
        """The digest that counts for a job, whose record is used; None where nobody has said it."""
        path = self._job_record_path(job, reference)
        if self._is_old(path):
            return None
        found = self._find_digest(path, reference)
        with contextlib.suppress(OSError):
            if found is not None:
                os.utime(path, follow_symlinks=False)
        return found

    def agree_on_job_digest(self, job: str, reference: str, digest: str) -> str:
        """Says the digest for all of a job. Returns what counts: the first word does.

        Where the store cannot be written to, that is this node's own.
        """
        path = self._job_record_path(job, reference)
        meant = ResolvedTag(reference, digest, self.clock.wall())
        with contextlib.suppress(OSError):
            _ensure_directory(path.parent)
            if self._is_old(path):
                path.unlink()
            if try_create_file(path, msgspec.json.encode(meant)):
                return digest
        known, end = self._find_digest(path, reference), Deadline.after(WRITE_TIMEOUT, self.clock)
        while known is None and os.path.lexists(path) and end.seconds_left():
            self.clock.sleep(0.02)
            known = self._find_digest(path, reference)
        return digest if known is None else known

    def find_last_digest(self, reference: str) -> str:
        """The digest that a tag meant when it was resolved last; "" if it never was."""
        return self._find_digest(self._tag_record_path(reference), reference) or ""

    def record_last_digest(self, reference: str, digest: str) -> None:
        """Notes what a tag means, for when its registry does not answer."""
        path = self._tag_record_path(reference)
        with contextlib.suppress(OSError):
            _ensure_directory(path.parent)
            meant = ResolvedTag(reference, digest, self.clock.wall())
            records.write(path, msgspec.json.encode(meant))

    def _job_record_path(self, job: str, reference: str) -> Path:
        # The job's number as well: a user reads the names.
        known = re.sub(r"[^0-9A-Za-z.-]", "_", job)[:60].lstrip(".")
        both = "\0".join((job, reference))
        return self.folder / "jobs" / f"{known}-{_hash_text(both)}.json"

    def _tag_record_path(self, reference: str) -> Path:
        return self.folder / "tags" / f"{_hash_text(reference)}.json"

    def _is_old(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            name = os.fspath(path.relative_to(self.folder))
            return (
                os.path.lexists(path)
                and store_age.compute_unused_seconds(self.folder, name) > RECORD_LASTS
            )
        return False

    def _find_digest(self, path: Path, reference: str) -> str | None:
        found = find_own_record(path, ResolvedTag)
        if found is None or found.reference != reference:
            return None
        return found.digest if not found.digest or is_digest(found.digest) else None


def _check_other_file_system(base: Path, cache: str) -> None:
    """Raises Declined where both lie on one file system; OSError."""
    with open_descriptor(base, os.O_PATH | os.O_DIRECTORY) as fd:
        here = mounts.find_mount_of_descriptor(fd)
    there = (
        mounts.find_mount_of_path(mounts.list_mounts(), os.path.realpath(cache)) if cache else None
    )
    if here and there and here.device == there.device:
        what = f"the store of images, {base}, lies on the disk of this node's cache"
        raise Declined("store-local", what, "the admin can move it to a shared file system")


def _ensure_directory(folder: Path) -> None:
    """Raises OSError, also where a link has its name."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(MODE)
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(folder))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _find_squashfs_size(path: Path) -> int | None:
    """The size of a squashfs image of this user's own; None for all else, and half of one."""
    try:
        with open_own_file(path) as fd:
            head = os.pread(fd, HEAD, 0)
            size = os.fstat(fd).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            return None
        raise
    return size if is_squashfs(head) and parse_squashfs_size(head) <= size else None


def _check_imported_image(part: Path, max_size: int | None) -> int:
    """The size of what was imported. Raises Declined."""
    size = _find_squashfs_size(part)
    if size is None and not os.path.lexists(part):
        # By its user, or where it was taken for a dead one's: an import elsewhere may fare better.
        raise Declined("store-gone", f"{part.name} was deleted while it was written")
    if size is None:
        raise Declined(
            "import-failed", "enroot made no squashfs image (version 4.0), or half of one"
        )
    if max_size is not None and size > max_size:
        what = (
            f"the image has {format_size(size)}, more than max_image_size {format_size(max_size)}"
        )
        raise Declined("too-large", what)
    return size
