"""Slurm's accounting: which job started where and when, with which images. Trusts no row.

A row is what sacct prints for a job or a step. Of images it has what a command line says: the line
of a job (srun, sbatch, salloc) and of each step, and what a site's job_submit.lua has noted in the
admin comment. `#SBATCH` lines are not in it. Quoting is lost in a line, and a newline there breaks
its row: the rest is no row, and is counted as that.
"""

from __future__ import annotations

import functools
import itertools
import posixpath
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import unquote

FIELD_SEPARATOR = "\x1f"
SACCT_FIELDS = ("JobID", "Partition", "Start", "NodeList", "AdminComment", "WorkDir", "SubmitLine")
"""A job's number first, what users write last: it may hold separators."""

SEEN_IMAGES_WORD = "stage-seen="  # as packaging/slurm/job_submit.lua writes it
MAX_ROW_NODES = 20000  # of one row
MAX_JOB_IMAGES = 64  # of one job

_STEP_NAME = r"batch|extern|interactive|[0-9]{1,10}"
_JOB_ID = re.compile(rf"([0-9]{{1,10}}(?:_[0-9]{{1,10}}|\+[0-9]{{1,5}})?)(?:\.({_STEP_NAME}))?")
_IMAGE_OPTION = re.compile(r"(?:^| )--container-image[= ](\S+)")
_HOST_RANGES = re.compile(r"\[([0-9,-]+)\]")
_PARTITION_NAMES = re.compile(r"[\w.,-]{0,200}")
_HOST_NAMES = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class ImageStart:
    """A job's first use of an image on some of its nodes. `start_time` is in seconds since 1970."""

    __slots__ = ("image", "nodes", "partition", "start_time")  # a year has millions
    start_time: float
    partition: str
    nodes: tuple[str, ...]
    image: str

    @property
    def is_path(self) -> bool:
        """Whether the image is a file; others come from a registry."""
        return self.image.startswith("/")


@dataclass
class AccountedJob:
    """A job that has started. A node has an image in one of `starts` only."""

    __slots__ = ("is_batch", "job_id", "nodes", "partition", "start_time", "starts")
    job_id: str
    start_time: float
    partition: str
    nodes: tuple[str, ...]
    is_batch: bool
    starts: list[ImageStart]


class _JobImageUses:
    """What one job has used where: sets for all jobs would fill the memory."""

    def __init__(self, job: AccountedJob) -> None:
        self.job = job
        self._job_nodes = frozenset(job.nodes)
        self._used_nodes: dict[str, set[str]] = {}
        self._uses_left = MAX_JOB_IMAGES * len(job.nodes)
        for start in job.starts:
            self._used_nodes.setdefault(start.image, set()).update(start.nodes)
            self._uses_left -= len(start.nodes)

    def add_images(self, row: _AccountingRow) -> None:
        """Note a row's images on those of its nodes that are the job's."""
        nodes = row.nodes
        if nodes != self.job.nodes:
            nodes = tuple(node for node in nodes if node in self._job_nodes)
        for image in row.images:
            used = self._used_nodes.setdefault(image, set())
            new_nodes = tuple(node for node in nodes if node not in used) if used else nodes
            new_nodes = new_nodes[: self._uses_left]
            if new_nodes:
                used.update(new_nodes)
                self._uses_left -= len(new_nodes)
                self.job.starts.append(
                    ImageStart(row.start_time, self.job.partition, new_nodes, image)
                )


@dataclass
class JobRecords:
    """All jobs that were read; `dropped_lines` lines were no row."""

    jobs: dict[str, AccountedJob] = field(default_factory=dict)
    dropped_lines: int = 0


@dataclass(frozen=True)
class _AccountingRow:
    job_id: str
    step_name: str
    partition: str
    start_time: float
    nodes: tuple[str, ...]
    images: tuple[str, ...]


def build_sacct_command(since: str, until: str) -> list[str]:
    """The command whose output `read_job_records` reads."""
    period = [f"--starttime={since}", f"--endtime={until}"]
    output_format = [
        "--noheader",
        "--parsable2",
        f"--delimiter={FIELD_SEPARATOR}",
        f"--format={','.join(SACCT_FIELDS)}",
    ]
    return ["sacct", "--allusers", *period, *output_format]


def read_job_records(lines: Iterable[bytes]) -> JobRecords:
    """Reads rows as sacct prints them: a job's own before those of its steps."""
    records = JobRecords()
    uses: _JobImageUses | None = None
    for line in lines:
        text = line.decode("utf-8", "surrogateescape").rstrip("\r\n")
        row = _parse_row(text)
        if row is None:
            records.dropped_lines += _is_malformed_row(text)
        elif not row.step_name:
            # A second one with this number: forged, or counted from 1 again.
            if row.job_id in records.jobs:
                records.dropped_lines += 1
            else:
                job = AccountedJob(
                    row.job_id, row.start_time, row.partition, row.nodes, is_batch=False, starts=[]
                )
                records.jobs[row.job_id] = job
                uses = _JobImageUses(job)
                uses.add_images(row)
        elif row.job_id in records.jobs:
            job = records.jobs[row.job_id]
            job.is_batch |= row.step_name == "batch"
            if row.step_name.isdigit():
                if uses is None or uses.job is not job:
                    uses = _JobImageUses(job)
                uses.add_images(row)
    return records


def _is_malformed_row(text: str) -> bool:
    """Whether this is not just a job that has not started, or has had no nodes."""
    fields = text.split(FIELD_SEPARATOR, len(SACCT_FIELDS) - 1)
    return len(fields) != len(SACCT_FIELDS) or not _JOB_ID.fullmatch(fields[0])


def _parse_row(text: str) -> _AccountingRow | None:
    fields = text.split(FIELD_SEPARATOR, len(SACCT_FIELDS) - 1)
    if len(fields) != len(SACCT_FIELDS):
        return None
    job_text, partition, start, nodes, comment, directory, line = fields
    job_match, start_time, hosts = (
        _JOB_ID.fullmatch(job_text),
        _parse_time(start),
        expand_hosts(nodes),
    )
    if (
        not job_match
        or start_time is None
        or not hosts
        or not _PARTITION_NAMES.fullmatch(partition)
    ):
        return None
    images = tuple(
        map(
            sys.intern,
            dict.fromkeys([*_find_line_images(line, directory), *_find_comment_images(comment)]),
        )
    )
    return _AccountingRow(
        job_match[1], job_match[2] or "", sys.intern(partition), start_time, hosts, images
    )


def _find_line_images(line: str, directory: str) -> list[str]:
    """The image that a command line names."""
    matched = _IMAGE_OPTION.search(line)
    if not matched:
        return []
    image = matched[1]
    if image.startswith("."):
        image = posixpath.join(directory, image)
    return [posixpath.normpath(image) if image.startswith("/") else image]


def _find_comment_images(comment: str) -> list[str]:
    """The images that a site's job_submit.lua has noted."""
    images_word = next(
        (one for one in comment.split() if one.startswith(SEEN_IMAGES_WORD)), SEEN_IMAGES_WORD
    )
    paths = [
        unquote(one, errors="surrogateescape")
        for one in images_word[len(SEEN_IMAGES_WORD) :].split(",")
    ]
    return [posixpath.normpath(path) for path in paths if path.startswith("/")]


def _parse_time(text: str) -> float | None:
    """A time as SLURM_TIME_FORMAT=%s prints it, or as sacct does by itself; None for neither."""
    if re.fullmatch(r"[0-9]{1,11}", text):
        return float(text) or None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


@functools.lru_cache(maxsize=1 << 16)
def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a list as `n[1-4,07],login`; none if it is no such list or names too many."""
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        pieces = _HOST_RANGES.split(part)  # a text, what is in brackets, a text, …
        choices = [_expand_numbers(p) if odd % 2 else [p] for odd, p in enumerate(pieces)]
        if functools.reduce(lambda many, one: many * len(one), choices, 1) > MAX_ROW_NODES:
            return ()
        hosts += ["".join(one) for one in itertools.product(*choices)]
        if len(hosts) > MAX_ROW_NODES:
            return ()
    # One match for all of them: that is most of what a row of many nodes costs.
    if not (_HOST_NAMES.fullmatch("".join(hosts)) and all(0 < len(host) <= 200 for host in hosts)):
        return ()
    return tuple(map(sys.intern, dict.fromkeys(hosts)))


def _expand_numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash) and len(part) < 20):
            return []
        end = int(last or first)
        if end - int(first) > MAX_ROW_NODES:
            return []
        numbers += [str(number).rjust(len(first), "0") for number in range(int(first), end + 1)]
    return numbers


def has_unrecorded_image(script: str) -> bool:
    """Whether a batch script names one where no row shows it."""
    lines = (line.strip() for line in script.splitlines())
    return any(
        "--container-image" in line if line.startswith("#SBATCH") else _exports_image(line)
        for line in lines
    )


def _exports_image(line: str) -> bool:
    return "PYXIS_CONTAINER_IMAGE=" in line and not line.startswith("#")
