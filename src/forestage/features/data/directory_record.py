"""The record of a job's own directory: the companion shows it by that where no helper answers.

    /run/forestage/leases/<job>.directory    beside the lease, gone with it; fields between tabs

    directory N                                 the format's number
    boot      BOOT-ID
    owner     UID
    device    …  |  served  …                   as in slurm/step_protocol.py: what shows it
    env       NAME  VALUE                       … and what leads into it

A helper gives no answer while the package is upgraded, or once it was removed; the job still has
its files. So the record counts whatever the admin has switched off since, unlike that of images
(cache/step_record.py). Jobs outlive an upgrade: a companion reads this format and the one before,
and a hook leaves a record of another format as it is. `src/spank/step_record.c` reads this.
"""

import os
from collections.abc import Iterable

from forestage.cache.lease import LeaseDirectory
from forestage.cache.part import boot_id
from forestage.errors import Failed
from forestage.slurm.step_protocol import (
    DIRECTORY_RECORD_FORMAT,
    LineFields,
    has_control_characters,
)
from forestage.system import records

HEAD = "directory"


def format_record(uid: int, lines: Iterable[LineFields]) -> str:
    """Return the record of a directory of this user's, which these lines show.

    Raises Failed where a field cannot be in a record, OSError.
    """
    fields = [("boot", boot_id()), ("owner", str(uid)), *lines]
    if any(has_control_characters(word) for words in fields for word in words):
        raise Failed("bad-path", "control characters in what a job's directory is shown by")
    return "".join(
        f"{line}\n" for line in (f"{HEAD} {DIRECTORY_RECORD_FORMAT}", *map("\t".join, fields))
    )


def is_write_needed(leases: LeaseDirectory, job: int, text: str) -> bool:
    """Whether the job has another record of this format, or none. Raises OSError."""
    try:
        found = os.fsdecode(records.read_raw(leases.directory_record_file(job)))
    except (FileNotFoundError, records.DamagedRecord):
        return True
    return found != text and found.partition("\n")[0] == text.partition("\n")[0]


def write_record(leases: LeaseDirectory, job: int, text: str) -> None:
    """Write the job's record, if it has a lease. Under the space lock. Raises Failed, OSError."""
    if leases.find_lease(job) is not None:
        records.write(leases.directory_record_file(job), os.fsencode(text))
