"""What data a job wants on this node, and what shows it.

What is wanted is `data` of what was said to the job (cache/job_notes.py): written by its Prolog,
read by its steps and its Epilog. A module for each kind of request shows it;
features/data/requests.py calls them.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from forestage.cache.job_notes import DirectoryCopyState, JobData
from forestage.cache.lease import LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.clock import Deadline
from forestage.errors import Failed
from forestage.events import RequestOutcome
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.slurm.step_protocol import LineFields
from forestage.sources import opening
from forestage.stage.copy_wait import ProgressCallback
from forestage.system import lock

if TYPE_CHECKING:
    from forestage.features.data.job_dir import JobDirMount

StepView = tuple[Sequence[LineFields], RequestOutcome]
"""What a request comes to in a step: lines for the companion, and the outcome."""


class StagedFile(msgspec.Struct, frozen=True):
    """What a file's copy came to; `keeper_socket` is its keeper's if it is read through."""

    outcome: RequestOutcome
    image: SourceImage | None
    keeper_socket: Path | None


class ViewContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests of a job share in its Prolog, or in one of its steps.

    A step waits for what others bring until `copy_deadline`, if at all, for what it brings itself
    until `fill_deadline`; `end` limits all else. `progress` is called during a wait. `stage` has a
    file copied as an image, within so long; `check_not_bound` raises Declined where the job's
    container binds what a path lies below. `own` is the job's own directory, which only steps see.
    """

    node: Node
    job: Job
    noted: JobData
    copy_deadline: Deadline | None
    end: Deadline
    fill_deadline: Deadline
    progress: ProgressCallback
    stage: Callable[[Request, Deadline], StagedFile]
    check_not_bound: Callable[[str], None]
    own: "JobDirMount | None"

    def scan_deadline(self) -> Deadline:
        """What is left to the step, and enough after a long wait for what came before."""
        left = max(self.end.seconds_left(), opening.HOOK_TIMEOUT)
        return Deadline.after(left, self.node.clock)


class DataView(Protocol):
    """A module that shows one kind of request, whose path is absolute.

    Both raise ForestageError, OSError.
    """

    def start_in_prolog(self, call: ViewContext, request: Request) -> RequestOutcome:
        """What a Prolog does for it, which waits for nothing."""

    def show_in_step(self, call: ViewContext, request: Request) -> StepView:
        """What a step is shown of it."""


def drop_nested_directories(lines: Sequence[LineFields]) -> list[LineFields]:
    """Pure: the lines, as `sort_by_depth` has them, without directories in each other's way.

    One that lies in another is in that one's copy, too. One in which something else is mounted
    stays the shared one, as the copy has other inodes.
    """
    mounted = [line[-2] for line in lines if line[0] in ("served", "folder")]
    kept: list[LineFields] = []
    trees: list[str] = []
    for line in lines:
        if line[0] == "device" and line[3] == "erofs":
            at = f"{line[-2]}/"
            if any(point.startswith(at) for point in mounted) or any(map(at.startswith, trees)):
                continue
            trees.append(at)
        kept.append(line)
    return kept


def sort_by_depth(lines: Sequence[LineFields]) -> list[LineFields]:
    """Pure: the lines as the companion is to follow them: no mount hides one that came before."""
    return sorted(lines, key=lambda line: 0 if line[0] == "env" else len(line[-2]))


def read_job_data(leases: LeaseDirectory, job: int, uid: int | None = None) -> JobData:
    """What was noted of this user's job; nothing where nothing can be read."""
    with contextlib.suppress(OSError, Failed):
        return leases.read_notes(job, uid).data or JobData()
    return JobData()


def record_directory_state(node: Node, job: Job, path: str, tree: DirectoryCopyState) -> None:
    """Notes how far a directory is, if this run of the job is still here.

    Raises lock.LockTimeout, OSError.
    """
    with lock.held(node.cache.space_lock, lock.SPACE_TIMEOUT):
        if is_still_wanted(node, job):
            record_directory_states(node, job, {path: tree})


def record_directory_states(node: Node, job: Job, trees: dict[str, DirectoryCopyState]) -> None:
    """Notes how far these directories of a job that is here are. Under the space lock."""
    noted = read_job_data(node.leases, job.id, job.user.uid)
    data = msgspec.structs.replace(noted, trees=noted.trees | trees)
    node.leases.add_notes(job.id, job.user.uid, data=data)


def is_still_wanted(node: Node, job: Job) -> bool:
    """Whether this very run of a job still wants data here: it may have ended, or been requeued."""
    lease = node.leases.find_lease(job.id)
    if lease is None or not lease.belongs_to(job.user.uid, job.start):
        return False
    data = node.leases.read_notes(job.id, job.user.uid).data
    return data is not None and data.restart == job.restart
