"""What was said to a job on this node, and by it: beside its lease, gone with it.

    /run/forestage/leases/<job>.said    JSON of `JobNotes`, written under the space lock
                                        (cache/lease.py)

Its steps, its Epilog and the sweep could not see it otherwise. What the job holds is in the lease.
"""

from typing import Literal

import msgspec

from forestage.slurm.hints import Request


class DirectoryCopyState(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a directory is (features/data/directory.py): its key and path, or why it has none.

    `groups` are those of the user who could not read all of it, `seconds` is how long it took to
    look at its `files`; 0 where another node has looked.
    """

    state: Literal["looking", "copying", "ready", "declined"]
    key: str = ""
    path: str = ""
    reason: str = ""
    detail: str = ""
    groups: tuple[int, ...] = ()
    files: int = 0
    seconds: float = 0.0


class JobData(msgspec.Struct, frozen=True, omit_defaults=True):
    """`room` in bytes is for the job's own directory, in memory with `ram`; None: it wants none.

    `refused` says why it has none though, `off` that for this reason it gets nothing else either;
    `reason` is that in one word.
    `restart` is the run of the job, as Slurm counts them. `trees` has the directories by their
    paths as the job names them.
    """

    requests: tuple[Request, ...] = ()
    room: int | None = None
    ram: bool = False
    refused: str = ""
    off: bool = False
    reason: str = ""
    trees: dict[str, DirectoryCopyState] = {}
    restart: int = 0


class JobNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """`off`, `wait` (seconds), `tell`: the job said stage=off, stage-wait=, stage-tell=yes.

    `hinted` are the images that its comment named, resolved: as bytes, since a path need not be
    text. `data` is what else it names; None: nothing. `say` are lines for its user, `told`: they
    have read a line. `waited` are the seconds that its Prolog took, for a user who wants to know.
    `words` are those of its comment that features read themselves.
    `uid` says to whose job, as a number comes again; None once that was asked.
    """

    off: bool = False
    wait: float | None = None
    tell: bool = False
    hinted: tuple[bytes, ...] = ()
    data: JobData | None = None
    say: tuple[str, ...] = ()
    told: bool = False
    waited: float = 0.0
    words: tuple[tuple[str, str], ...] = ()
    uid: int | None = None
