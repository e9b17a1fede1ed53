"""What the queue names: squeue's lines about jobs that wait, parsed without trust. Pure.

A comment is its user's word and is printed as it is, newlines too, so a user could write whole
lines of the listing. Each line of Slurm's own holds a nonce in front of all that users write.
"""

import functools
import re
from collections import Counter
from urllib.parse import unquote

import msgspec

from forestage.features.prefetch.policy import PendingJob
from forestage.slurm.hints import MAX_HINTED_PATHS, parse_hints
from forestage.units import is_utf8

MAX_BEGIN_DELAY = 3600.0  # seconds until the begin time of a job, within which it counts
MAX_PATH = 4096  # bytes
ADMIN_COMMENT_WORD = "stage-seen="
"""Begins the word in a job's *admin* comment that packaging/slurm/job_submit.lua writes."""

# slurm_protocol_defs.c, job_reason_string. What waits for one of these has no place in the queue
# yet, or will never start; it is listed once the reason is another one.
NEVER_STARTING_REASONS = frozenset(
    (
        *("BadConstraints", "Cleaning", "Dependency", "DependencyNeverSatisfied", "InvalidAccount"),
        *("InvalidQOS", "JobArrayTaskLimit", "JobHeldAdmin", "JobHeldUser", "JobHoldMaxRequeue"),
        *("PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit", "ReservationDeleted"),
    )
)
_TASKS = re.compile(r"[0-9]+_\[([0-9,:.-]*)(?:%([0-9]+))?\]?", re.ASCII)
_JOB = re.compile(r"[0-9]+(?:[_+][0-9]+)?", re.ASCII)


class PendingJobQueue(msgspec.Struct, frozen=True):
    """The jobs that count, the next one first, and how many others there are, by reason.

    `tasks`: how many jobs there are with each task of an array; None where squeue cut one short.
    """

    pending: tuple[PendingJob, ...] = ()
    others: tuple[tuple[str, int], ...] = ()
    tasks: int | None = 0


def parse_queue(listing: str, nonce: str, now: float) -> PendingJobQueue:
    """Return the jobs of `query_pending_jobs`; what cannot be read counts as `unreadable`."""
    heads = re.compile(rf"^([^|\n]*)\|{re.escape(nonce)}<", re.MULTILINE)
    parts = heads.split(listing)[1:]
    found: list[PendingJob] = []
    others: Counter[str] = Counter()
    for job, rest in zip(parts[::2], parts[1::2], strict=True):
        pending = _parse_job(job, rest, nonce, now)
        if isinstance(pending, PendingJob):
            found.append(pending)
        else:
            others[pending] += 1
    all_tasks = sum(map(count_listed_tasks, parts[::2]))
    is_cut = any("..." in job for job in parts[::2])
    return PendingJobQueue(tuple(found), tuple(others.most_common()), None if is_cut else all_tasks)


def _parse_job(job: str, rest: str, nonce: str, now: float) -> PendingJob | str:
    """The job, or why it does not count."""
    fields, middle, comment = rest.partition(f"|{nonce}>")
    values = fields.split("|", 5)
    if not middle or len(values) < 6:
        return "unreadable"
    user, nodes, partitions, reason, eligible, admin_comment = values
    count = count_runnable_tasks(job)
    digits = re.match("[0-9]{1,7}", nodes)
    if not count or not digits or not (user.isascii() and user.isdigit() and len(user) <= 10):
        return "unreadable"
    if int(user) == 0:
        return "root's"
    if reason in NEVER_STARTING_REASONS:
        return reason
    # By its time, as a new job's reason is None; Slurm's guess of a start may be a year away.
    if eligible.isdigit() and int(eligible) > now + MAX_BEGIN_DELAY:
        return "BeginTime"
    images = list_named_images(
        _without_null(comment.removesuffix("\n")), _without_null(admin_comment)
    )
    if not images:
        return "no image"
    wanted = min(count * int(digits[0]), 1 << 24)
    return PendingJob(int(user), images, wanted, tuple(partitions.split(",")))


def _without_null(field: str) -> str:
    return "" if field == "(null)" else field


def count_runnable_tasks(job: str) -> int:
    """How many tasks of `12`, `12_3` or `12_[1,4-10%2]` may run at once; 0 for no job's name."""
    count, array = count_listed_tasks(job), _TASKS.match(job)
    return min(count, int(array[2])) if array and array[2] and int(array[2]) else count


def count_listed_tasks(job: str) -> int:
    """How many tasks there are in all, as far as squeue names them: it cuts long lists off."""
    if _JOB.fullmatch(job):
        return 1
    array = _TASKS.match(job)
    if not array:
        return 0
    count = 0
    for span in array[1].split(","):
        first, _, last = span.partition(":")[0].partition("-")
        if first.isdigit():
            count += max(1, int(last) - int(first) + 1) if last.isdigit() else 1
    return count


@functools.lru_cache(4096)
def list_named_images(comment: str, admin_comment: str) -> tuple[str, ...]:
    """The images that a job names, as far as they are files: absolute paths, each once."""
    hints = parse_hints(comment)
    if hints.off:
        return ()
    found = (
        *(one.path for one in hints.requests if one.kind == "image"),
        *parse_admin_comment(admin_comment),
    )
    return tuple(one for one in dict.fromkeys(found) if is_image_path(one))


def parse_admin_comment(admin_comment: str) -> tuple[str, ...]:
    """Return the images that a job's submission named, absolute paths, from its admin comment.

    Only operators and slurmctld's own plugins can write one, but the paths are the user's words: a
    wrong one must cost nothing but its own request, as in a comment.
    """
    word = next((one for one in admin_comment.split() if one.startswith(ADMIN_COMMENT_WORD)), "")
    parts = word.removeprefix(ADMIN_COMMENT_WORD).split(",")
    paths = (unquote(part, errors="surrogateescape") for part in parts)
    return tuple(dict.fromkeys(path for path in paths if path.startswith("/")))[:MAX_HINTED_PATHS]


def is_image_path(path: str) -> bool:
    """Whether a word may be the path of an image: it goes into records and logs."""
    is_word = path.startswith("/") and path.isprintable() and is_utf8(path)
    return is_word and len(path.encode()) < MAX_PATH
