"""Is it here? The layout on the node's disk, look-up, and publishing a finished copy.

    <root>/CACHEDIR.TAG  format
    <root>/entries/<key>/{image, map, entry.json, used, pinned}  used: its mtime is the last use
    <root>/parts/<key>/{image, map, owner.json}                  a copy under way, see part.py
    <root>/evicted/<key>.<n>                                     retired, soon deleted
    <root>/locks/{<key>.lock, space.lock}

A published entry is read without a lock: it appears by one rename and leaves by one.
"""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import msgspec

from forestage import atomic, mounts
from forestage.errors import Failed
from forestage.image import Access, Identity, Image
from forestage.part import Part

FORMAT = "1\n"

# The signature is fixed by https://bford.info/cachedir/: backup programs leave such a folder out.
_CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Copies of container images, made by forestage. Each can be fetched again.\n"
)


class Entry(msgspec.Struct, frozen=True):
    """entry.json: what was copied, how, and when (seconds since the epoch).

    `chunk` bytes are what one entry of `map` stands for; `digest` is "" where none was taken.
    """

    key: str
    identity: Identity
    access: Access
    created: float
    engine: str
    chunk: int = 0
    digest: str = ""


class Stored(msgspec.Struct, frozen=True):
    """A directory below entries/: `bytes` on disk, `used` in seconds since the epoch.

    `entry` is None where entry.json cannot be read; such a one is never served, only evicted.
    """

    key: str
    bytes: int
    used: float
    pinned: bool
    entry: Entry | None


class Cache:
    """The paths of one cache root. Making a Cache touches nothing; `prepare` does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries = root / "entries"
        self.parts = root / "parts"
        self.evicted = root / "evicted"
        self.locks = root / "locks"
        self.space_lock = self.locks / "space.lock"

    @property
    def real(self) -> str:
        """The root as the kernel's mount table knows it."""
        return os.path.realpath(self.root)

    def key_lock(self, key: str) -> Path:
        return self.locks / f"{key}.lock"

    def entry_dir(self, key: str) -> Path:
        return self.entries / key

    def image(self, key: str) -> Path:
        return self.entries / key / "image"

    def part_dir(self, key: str) -> Path:
        return self.parts / key

    def part(self, key: str) -> Part:
        return Part(self.parts / key)

    def prepare(self, require_mount: bool) -> None:
        """Makes the layout, or finds it made. Raises Failed where it must not be used."""
        if require_mount:
            self.must_be_mounted()
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
        found = _text(self.root / "format")
        if found == FORMAT:
            return
        if found is not None:
            raise Failed(
                "cache-format",
                f"{self.root} has format {found.strip()!r}, this forestage writes {FORMAT.strip()}",
                "empty it, or install the release that wrote it",
            )
        for directory in (self.entries, self.parts, self.evicted, self.locks):
            directory.mkdir(mode=0o700, exist_ok=True)
        atomic.write(self.root / "CACHEDIR.TAG", _CACHEDIR_TAG.encode())
        # Last: whoever reads it finds the directories above.
        atomic.write(self.root / "format", FORMAT.encode())

    def find(self, image: Image) -> Entry | None:
        """The published entry with exactly this image's bytes and access rights, if it is here."""
        entry = self.read(image.key)
        if entry is None or entry.identity != image.identity or entry.access != image.access:
            return None
        return entry

    def read(self, key: str) -> Entry | None:
        """The record of a published entry; None where there is none, or it is damaged."""
        try:
            data = (self.entry_dir(key) / "entry.json").read_bytes()
            size = self.image(key).stat().st_size
            entry = msgspec.json.decode(data, type=Entry)
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return entry if entry.key == key and entry.identity.size == size else None

    def stored(self) -> list[Stored]:
        """Everything below entries/, damaged ones too, in no order."""
        found = []
        for directory in self.entries.iterdir():
            try:
                found.append(self._stored(directory))
            except FileNotFoundError:  # retired meanwhile
                continue
        return found

    def _stored(self, directory: Path) -> Stored:
        return Stored(
            key=directory.name,
            bytes=tree_bytes(directory),
            used=_mtime(directory / "used", directory),
            pinned=(directory / "pinned").exists(),
            entry=self.read(directory.name),
        )

    def publish(self, entry: Entry) -> None:
        """Turns the finished part into an entry. The caller holds the key's lock.

        The image's bytes must be complete; they are made durable here, before the name is.
        """
        part = self.part_dir(entry.key)
        (part / "spare").unlink(missing_ok=True)  # what is written next may need its room
        atomic.write(part / "entry.json", msgspec.json.encode(entry))
        atomic.write(part / "used", b"")
        (part / "owner.json").unlink(missing_ok=True)
        (part / "peers").unlink(missing_ok=True)
        fd = os.open(part / "image", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        atomic.sync_directory(part)
        # A damaged entry of the same key would be in the way of the rename.
        self.retire(entry.key)
        part.rename(self.entry_dir(entry.key))
        atomic.sync_directory(self.entries)

    def touch(self, key: str, now: float) -> None:
        """Notes a use at `now` (seconds since the epoch)."""
        os.utime(self.entry_dir(key) / "used", (now, now))

    def retire(self, key: str) -> None:
        """Takes an entry out of sight by one rename; `empty_evicted` deletes it later.

        Who has it open, or bound over a path, keeps reading it: unlinked files stay until closed.
        """
        self._out_of_sight(self.entry_dir(key))

    def empty_evicted(self) -> None:
        """Deletes what was retired, also what a crash left. Two at once do no harm."""
        for directory in self.evicted.iterdir():
            shutil.rmtree(directory, ignore_errors=True)

    def drop_part(self, key: str) -> None:
        """Deletes a part. The caller holds the key's lock.

        By one rename first: a part that is half gone would pass for one that can be resumed.
        """
        gone = self._out_of_sight(self.part_dir(key))
        if gone is not None:
            shutil.rmtree(gone, ignore_errors=True)

    def _out_of_sight(self, directory: Path) -> Path | None:
        """Where the directory is now, below evicted/; None if there is none. Raises Failed."""
        for number in range(1000):
            target = self.evicted / f"{directory.name}.{number}"
            try:
                directory.rename(target)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    continue  # an earlier one of this key is still being deleted
                raise
            return target
        raise Failed("evicted-stays", f"{self.evicted} cannot be emptied", "delete what it holds")

    def must_be_mounted(self) -> None:
        """Raises Failed where the cache lies, or would lie, on the root file system."""
        under = mounts.holder(mounts.current(), os.path.realpath(self.root))
        if under is None or under.point == "/":
            raise Failed(
                "cache-not-mounted",
                f"{self.root} is on the root file system: its disk is not mounted",
                "mount it, or set `require_mount: false`",
            )


def tree_bytes(directory: Path) -> int:
    """Bytes on disk, as du(1) counts them, of a directory of plain files and itself."""
    total = directory.stat().st_blocks
    with os.scandir(directory) as files:
        for file in files:
            total += file.stat(follow_symlinks=False).st_blocks
    return total * 512


def _mtime(path: Path, otherwise: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return otherwise.stat().st_mtime


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
