"""A copy under way on disk: its bytes so far, and which chunks of them are in.

    parts/<key>/image          as long as the source; space is reserved for all that holds data
    parts/<key>/map            16 bytes for each chunk: its digest once it is in, zeros before
    parts/<key>/spare          room for the small files that an entry has beside its image
    parts/<key>/peers          how many bytes came from peers, in decimal, while they help
    parts/<key>/source-failed  is there while peers help and the source gives errors here
    parts/<key>/origins        who read which chunks from the source, see
                               features/peers/chunk_readers.py
    parts/<key>/hot            the pieces that a start of the image reads: their numbers, in JSON
    parts/<key>/waited         its time is when a hook last said that it waits
    parts/<key>/owner.json     what is copied, by whom, since when; good for one boot

The map is the unit of resume, of progress and of verifying. A chunk's entry is written after its
bytes, so a killed copy leaves a map that is true. After a power cut the map may have reached the
disk and the bytes not: that is why a part is good for the boot it was written in, and no longer.
Who writes holds the key's lock.
"""

import contextlib
import functools
import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from forestage.cache.source_image import SourceImage
from forestage.errors import Declined
from forestage.system import files, records
from forestage.units import format_size

ABANDONED_AFTER = 24 * 3600.0  # seconds without a write; then a part is only in the way
PROCESS_NAME = "forestage-stage"  # of a stager in ps(1); the kernel keeps 15 characters
ENTRY_BYTES = 16  # of the map, for one chunk
MAX_CHUNKS = (
    1 << 18
)  # of an image: a copy of so many takes 80 MiB of memory, with 16 MiB each 4 TiB
HOT_PIECE = 1024 * 1024  # bytes
CopyPhase = Literal["queued", "copying"]
Positive = Annotated[int, msgspec.Meta(gt=0)]

WAITED = 2.0  # seconds for which the mark of a hook that waits counts


class PartRecord(msgspec.Struct, frozen=True):
    """owner.json. `since` (asked) and `began` (copying) are monotonic seconds of this boot.

    `pid` is for people: a step's stager may have that of its job's PID namespace. `chunk` in bytes;
    `resumed` bytes were in when it began; `job` is the one that asked first, and `uid` its user's;
    `placed` once the queue has let it go on; `stopped`: not to be gone on with until another job
    asks; `expected`: since when pending jobs name it, 0 where a job asked; it ends once one does:
    `Job.expected`.
    """

    pid: int
    boot: str
    image: SourceImage
    chunk: Positive
    engine: str
    job: int
    since: float
    phase: CopyPhase = "queued"
    began: float = 0.0
    resumed: int = 0
    uid: int = 0
    placed: bool = False
    stopped: bool = False
    expected: float = 0.0


class Part:
    """One directory below parts/. Who writes holds the key's lock; reading needs none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.image = directory / "image"
        self.map = directory / "map"
        self.record = directory / "owner.json"
        self.spare = directory / "spare"
        self.peers = directory / "peers"
        self.source_failed = directory / "source-failed"
        self.hot = directory / "hot"
        self.waited = directory / "waited"

    def find_record(self) -> PartRecord | None:
        """Who copies, or copied; None where nothing can be read."""
        return records.find(self.record, PartRecord)

    def write_record(self, owner: PartRecord) -> None:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.delete_peer_notes()  # what one that was killed noted of them
        if not self.waited.exists():
            self.waited.touch()
            os.utime(self.waited, (0, 0))
        records.write(self.record, msgspec.json.encode(owner))

    def mark_stopped(self) -> None:
        """Says that the copy did not end by misfortune. Raises OSError."""
        owner = self.find_record()
        if owner is not None:
            self.write_record(msgspec.structs.replace(owner, stopped=True))

    def read_digests(self) -> bytes:
        """The whole map; empty where there is none yet, or something else has its name."""
        try:
            return records.read_raw(self.map)
        except (FileNotFoundError, NotADirectoryError, records.DamagedRecord):
            return b""

    def list_hot_chunks(self, chunk: int) -> list[int]:
        """The chunks that a start of the image reads, if that is known."""
        numbers = records.find(self.hot, list[int]) or []
        return list(dict.fromkeys(number * HOT_PIECE // chunk for number in numbers))

    def copied_bytes(self, owner: PartRecord) -> int:
        """Bytes that are in. Of a copy without a map (rsync): how far the file has grown."""
        if owner.engine == "rsync":
            return _file_size(self.image)
        return count_done_bytes(self.read_digests(), owner.chunk, owner.image.size)

    def mark_waited_for(self, now: float) -> None:
        """Says that a hook waits for this copy, `now` in seconds since the epoch.

        It makes no file: that might be one more in the entry that the part becomes this moment.
        """
        with contextlib.suppress(OSError):
            os.utime(self.waited, (now, now), follow_symlinks=False)

    def is_waited_for(self, now: float) -> bool:
        """Whether a hook has said lately that it waits."""
        found = files.lstat_or_none(self.waited)
        return found is not None and abs(now - found.st_mtime) < WAITED

    def delete_peer_notes(self) -> None:
        self.peers.unlink(missing_ok=True)
        self.source_failed.unlink(missing_ok=True)

    def read_peer_bytes(self) -> int:
        """Bytes that peers gave to the stager that runs now."""
        try:
            return int(records.read_raw(self.peers) or b"0")
        except (FileNotFoundError, NotADirectoryError, records.DamagedRecord, ValueError):
            return 0

    def idle_seconds(self, now: float) -> float:
        """Seconds since the last chunk, or rsync's last write, came in; `now` since the epoch.

        By the file whose time is nearest: one that was written before the clock was set back has a
        time that is yet to come.
        """
        there = filter(None, map(files.lstat_or_none, (self.map, self.image, self.record)))
        return min((abs(now - found.st_mtime) for found in there), default=now)

    def allocated_bytes(self) -> int:
        """Bytes of disk that image and map have."""
        there = filter(None, map(files.lstat_or_none, (self.image, self.map)))
        return sum(found.st_blocks for found in there) * 512

    def is_resumable_in_boot(self, boot: str) -> bool:
        """Whether somebody could go on with it in this boot."""
        owner = self.find_record()
        return owner is not None and owner.boot == boot

    def is_beginning_of(self, owner: PartRecord) -> bool:
        """Whether what is here is the beginning of just this copy, written in this boot."""
        before = self.find_record()
        # rsync's file grows; a file of chunks has its full length from the start.
        return (
            before is not None
            and self._has_files_only()
            and (owner.engine == "rsync" or _file_size(self.image) == owner.image.size)
            and (
                (before.boot, before.image, before.chunk, before.engine)
                == (owner.boot, owner.image, owner.chunk, owner.engine)
            )
        )

    def _has_files_only(self) -> bool:
        """Whether all that is here are files: a directory by the map's name is never written."""
        with os.scandir(self.directory) as entries:
            return all(entry.is_file(follow_symlinks=False) for entry in entries)


def chunk_count(size: int, chunk: int) -> int:
    """Pure: how many chunks an image of `size` bytes has."""
    return -(-size // chunk)


def check_chunk_count(image: SourceImage, chunk: int) -> None:
    """Pure: raises Declined for an image of more than MAX_CHUNKS.

    What a copy takes of memory grows with their number, and a file of 8 PiB takes its user no more
    than a truncate(1). So this comes before a lease, a keeper or a stager.
    """
    if chunk_count(image.size, chunk) > MAX_CHUNKS:
        raise Declined(
            "too-large",
            f"{image.path} has {format_size(image.size)}, more than {MAX_CHUNKS} chunks of"
            f" {format_size(chunk)}",
            "the admin can set a larger `chunk_size:`",
        )


def list_missing_chunks(digests: bytes, size: int, chunk: int) -> list[int]:
    """Pure: the numbers of the chunks that are not in, in order."""
    whole = digests.ljust(chunk_count(size, chunk) * ENTRY_BYTES, b"\0")
    return [
        number
        for number in range(chunk_count(size, chunk))
        if not any(whole[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES])
    ]


def count_done_bytes(digests: bytes, chunk: int, size: int) -> int:
    """Pure: the bytes that a map says are in; the last chunk may be short."""
    missing = list_missing_chunks(digests, size, chunk)
    return size - sum(min(chunk, size - number * chunk) for number in missing)


@functools.cache  # the peer service asks for each chunk
def boot_id() -> str:
    """Names this boot of the machine (proc(5), random/boot_id)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _file_size(path: Path) -> int:
    found = files.lstat_or_none(path)
    return found.st_size if found else 0
