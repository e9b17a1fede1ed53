"""The record of what a job's steps are shown: the companion reads it in place of asking a helper.

    /run/forestage/leases/<job>.shown     beside the lease, gone with it; fields between tabs

    PROTOCOL_GREETING                                  of the lines (slurm/step_protocol.py)
    boot      BOOT-ID
    events    PATH                                     where a step is noted
    file      PATH  INODE  SIZE  MTIME_NS  CTIME_NS    must still be so; zeros: must not be there
    room      MIN_FREE  RATIO                          bytes; times the entry's, for what unpacks it
    enroot    PATH                                     the first on the step manager's PATH, or ""
    theirs    PATH  INODE  SIZE  MTIME_NS  CTIME_NS    as `file`, looked at as the user
    variable  NAME  [VALUE]                            of the step's environment; none: not set
    image     ASKED  UID  EVENT  use|through …

Where less than both is free on the entry's disk, the helper is asked, which evicts. The files are
those of the configuration, the off switch, enroot's own and, last, the lease and what was said:
whatever a hook changes in them makes the record void. So a race with a hook costs a helper's run,
never more. By enroot's, by the user's and by the variables it was decided that no container of the
step binds what is above the image (hooks/container_binds.py). The end of an image's line is the
helper's answer, EVENT the rest of its event's JSON. `src/spank/step_record.c` reads this.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from forestage.cache import unpack_space
from forestage.cache.layout import Cache
from forestage.cache.lease import LeaseDirectory
from forestage.cache.part import boot_id
from forestage.config import Config
from forestage.errors import Failed
from forestage.paths import NodePaths
from forestage.slurm.step_protocol import PROTOCOL_GREETING, LineFields, has_control_characters
from forestage.system import records
from forestage.units import make_printable

FileStamp = tuple[int, int, int, int]
MAX_RECORD_BYTES = 64 * 1024  # what the companion reads; older images give way


class RecordedImage(msgspec.Struct, frozen=True):
    """What a step of this user's gets who asks for `requested_path`.

    That is an absolute path as it was written.
    """

    requested_path: str
    uid: int
    event: str
    reply_fields: LineFields

    @property
    def line(self) -> str:
        return _format_line("image", self.requested_path, self.uid, self.event, *self.reply_fields)


def format_config_lines(places: NodePaths) -> list[str]:
    """Returns the lines for all that the admin has a say with, to be called before it is read.

    No line where something is unusual: then there is no record.
    """
    parts = places.etc / "conf.d"
    files = [places.disabled, places.lasting_off_file, places.etc / "forestage.yaml", parts]
    with contextlib.suppress(OSError, Failed):
        if parts.exists():
            files += sorted(parts.iterdir())
        return [
            _format_line("boot", boot_id()),
            _format_line("events", places.events),
            *map(_format_file_line, files),
        ]
    return []


def format_room_line(cache: Cache, config: Config) -> str:
    """Returns the line that says how much has to be free for a step that unpacks an image."""
    return _format_line("room", unpack_space.read_min_free(cache, config), config.unpack_ratio)


def format_bind_lines(
    program: str,
    files: Mapping[str, FileStamp],
    theirs: Mapping[str, FileStamp],
    variables: Mapping[str, str | None],
) -> tuple[str, ...]:
    """Pure: the lines for what decided that a redirect is in no container's way.

    None where something is unusual: then there is no record.
    """
    try:
        return (
            _format_line("enroot", program),
            *(_format_line("file", path, *facts) for path, facts in files.items()),
            *(_format_line("theirs", path, *facts) for path, facts in theirs.items()),
            *(
                _format_line("variable", name, *_optional_field(value))
                for name, value in variables.items()
            ),
        )
    except Failed:
        return ()


def _optional_field(value: str | None) -> tuple[str, ...]:
    return () if value is None else (value,)


def add_images(
    leases: LeaseDirectory, job: int, decision_lines: Sequence[str], images: Sequence[RecordedImage]
) -> None:
    """Adds images of one user to a job's record, if its lease holds them. Under the space lock.

    `decision_lines` is from before they were handled, and what `format_room_line` says. Raises
    Failed, OSError.
    """
    uid = images[0].uid
    lease = leases.find_own_lease(job, uid)
    if lease is None or leases.read_notes(job, uid).off or not decision_lines:
        return
    keys = {use.key for use in lease.uses}
    head = [PROTOCOL_GREETING, *decision_lines]
    lines = _read_image_lines(leases.step_record_file(job), head) + [image.line for image in images]
    latest = {
        _requested_path_and_uid(line): line
        for line in lines
        if _entry_key(line) in keys and _requested_path_and_uid(line)[1] == str(uid)
    }
    of_job = [_format_file_line(leases.lease_file(job)), _format_file_line(leases.notes_file(job))]
    text = _format_record([*head, *of_job], list(latest.values()))
    records.write(leases.step_record_file(job), os.fsencode(text))


def _format_record(head: list[str], images: list[str]) -> str:
    """Pure: the record, without its oldest images where it would be too long."""
    while True:
        text = "".join(f"{line}\n" for line in (*head, *images))
        if len(os.fsencode(text)) < MAX_RECORD_BYTES or not images:
            return text
        images = images[1:]


def _read_image_lines(file: Path, head: list[str]) -> list[str]:
    """The lines of the images in a record that was made under the same decisions."""
    try:
        lines = os.fsdecode(records.read_raw(file)).split("\n")
    except (FileNotFoundError, records.DamagedRecord):
        return []
    same = lines[: len(head)] == head
    return [line for line in lines if line.startswith("image\t")] if same else []


def _requested_path_and_uid(line: str) -> tuple[str, ...]:
    return tuple(line.split("\t")[1:3])


def _entry_key(line: str) -> str:
    return Path(line.split("\t")[5]).parent.name


def _format_file_line(path: Path) -> str:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return _format_line("file", path, 0, 0, 0, 0)
    times = facts.st_mtime_ns, facts.st_ctime_ns
    return _format_line("file", path, facts.st_ino, facts.st_size, *times)


def _format_line(*fields: object) -> str:
    words = [str(field) for field in fields]
    if any(map(has_control_characters, words)):
        raise Failed("bad-path", f"control characters in {make_printable(str(words))}")
    return "\t".join(words)
