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

SEPARATOR = "\x1f"
FIELDS = ("JobID", "Partition", "Start", "NodeList", "AdminComment", "WorkDir", "SubmitLine")
"""A job's number first, what users write last: it may hold separators."""

SEEN = "stage-seen="  # as packaging/slurm/job_submit.lua writes it
MAX_NODES = 20000  # of one row
MAX_IMAGES = 64  # of one job

_STEP = r"batch|extern|interactive|[0-9]{1,10}"
_JOB = re.compile(rf"([0-9]{{1,10}}(?:_[0-9]{{1,10}}|\+[0-9]{{1,5}})?)(?:\.({_STEP}))?")
_IMAGE = re.compile(r"(?:^| )--container-image[= ](\S+)")
_GROUP = re.compile(r"\[([0-9,-]+)\]")
_PARTITION = re.compile(r"[\w.,-]{0,200}")
_HOSTS = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Start:
    """A job's first use of an image on some of its nodes. `at` is in seconds since 1970."""

    __slots__ = ("at", "image", "nodes", "partition")  # a year has millions
    at: float
    partition: str
    nodes: tuple[str, ...]
    image: str

    @property
    def is_path(self) -> bool:
        """Whether the image is a file; others come from a registry."""
        return self.image.startswith("/")


@dataclass
class Job:
    """A job that has started. A node has an image in one of `starts` only."""

    __slots__ = ("at", "is_batch", "nodes", "number", "partition", "starts")
    number: str
    at: float
    partition: str
    nodes: tuple[str, ...]
    is_batch: bool
    starts: list[Start]


class _JobUses:
    """What one job has used where: sets for all jobs would fill the memory."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._nodes = frozenset(job.nodes)
        self._used: dict[str, set[str]] = {}
        self._left = MAX_IMAGES * len(job.nodes)
        for start in job.starts:
            self._used.setdefault(start.image, set()).update(start.nodes)
            self._left -= len(start.nodes)

    def add(self, row: _Row) -> None:
        """Note a row's images on those of its nodes that are the job's."""
        own = row.nodes
        if own != self.job.nodes:
            own = tuple(node for node in own if node in self._nodes)
        for image in row.images:
            used = self._used.setdefault(image, set())
            new = tuple(node for node in own if node not in used) if used else own
            new = new[: self._left]
            if new:
                used.update(new)
                self._left -= len(new)
                self.job.starts.append(Start(row.at, self.job.partition, new, image))


@dataclass
class Accounting:
    """All jobs that were read; `dropped` lines were no row."""

    jobs: dict[str, Job] = field(default_factory=dict)
    dropped: int = 0


@dataclass(frozen=True)
class _Row:
    job: str
    step: str
    partition: str
    at: float
    nodes: tuple[str, ...]
    images: tuple[str, ...]


def sacct(since: str, until: str) -> list[str]:
    """The command whose output `read` reads."""
    period = [f"--starttime={since}", f"--endtime={until}"]
    form = ["--noheader", "--parsable2", f"--delimiter={SEPARATOR}", f"--format={','.join(FIELDS)}"]
    return ["sacct", "--allusers", *period, *form]


def read(lines: Iterable[bytes]) -> Accounting:
    """Reads rows as sacct prints them: a job's own before those of its steps."""
    found = Accounting()
    uses: _JobUses | None = None
    for line in lines:
        text = line.decode("utf-8", "surrogateescape").rstrip("\r\n")
        row = _row(text)
        if row is None:
            found.dropped += _is_no_row(text)
        elif not row.step:
            # A second one with this number: forged, or counted from 1 again.
            if row.job in found.jobs:
                found.dropped += 1
            else:
                job = Job(row.job, row.at, row.partition, row.nodes, is_batch=False, starts=[])
                found.jobs[row.job] = job
                uses = _JobUses(job)
                uses.add(row)
        elif row.job in found.jobs:
            job = found.jobs[row.job]
            job.is_batch |= row.step == "batch"
            if row.step.isdigit():
                if uses is None or uses.job is not job:
                    uses = _JobUses(job)
                uses.add(row)
    return found


def _is_no_row(text: str) -> bool:
    """Whether this is not just a job that has not started, or has had no nodes."""
    fields = text.split(SEPARATOR, len(FIELDS) - 1)
    return len(fields) != len(FIELDS) or not _JOB.fullmatch(fields[0])


def _row(text: str) -> _Row | None:
    fields = text.split(SEPARATOR, len(FIELDS) - 1)
    if len(fields) != len(FIELDS):
        return None
    number, partition, start, nodes, comment, directory, line = fields
    matched, at, hosts = _JOB.fullmatch(number), _seconds(start), expand(nodes)
    if not matched or at is None or not hosts or not _PARTITION.fullmatch(partition):
        return None
    images = tuple(map(sys.intern, dict.fromkeys([*_of_line(line, directory), *_seen(comment)])))
    return _Row(matched[1], matched[2] or "", sys.intern(partition), at, hosts, images)


def _of_line(line: str, directory: str) -> list[str]:
    """The image that a command line names."""
    matched = _IMAGE.search(line)
    if not matched:
        return []
    image = matched[1]
    if image.startswith("."):
        image = posixpath.join(directory, image)
    return [posixpath.normpath(image) if image.startswith("/") else image]


def _seen(comment: str) -> list[str]:
    """The images that a site's job_submit.lua has noted."""
    word = next((one for one in comment.split() if one.startswith(SEEN)), SEEN)
    paths = [unquote(one, errors="surrogateescape") for one in word[len(SEEN) :].split(",")]
    return [posixpath.normpath(path) for path in paths if path.startswith("/")]


def _seconds(text: str) -> float | None:
    """A time as SLURM_TIME_FORMAT=%s prints it, or as sacct does by itself; None for neither."""
    if re.fullmatch(r"[0-9]{1,11}", text):
        return float(text) or None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


@functools.lru_cache(maxsize=1 << 16)
def expand(text: str) -> tuple[str, ...]:
    """The hosts of a list as `n[1-4,07],login`; none if it is no such list or names too many."""
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        pieces = _GROUP.split(part)  # a text, what is in brackets, a text, …
        choices = [_numbers(p) if odd % 2 else [p] for odd, p in enumerate(pieces)]
        if functools.reduce(lambda many, one: many * len(one), choices, 1) > MAX_NODES:
            return ()
        hosts += ["".join(one) for one in itertools.product(*choices)]
        if len(hosts) > MAX_NODES:
            return ()
    # One match for all of them: that is most of what a row of many nodes costs.
    if not (_HOSTS.fullmatch("".join(hosts)) and all(0 < len(host) <= 200 for host in hosts)):
        return ()
    return tuple(map(sys.intern, dict.fromkeys(hosts)))


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash) and len(part) < 20):
            return []
        end = int(last or first)
        if end - int(first) > MAX_NODES:
            return []
        found += [str(number).rjust(len(first), "0") for number in range(int(first), end + 1)]
    return found


def names_an_image(script: str) -> bool:
    """Whether a batch script names one where no row shows it."""
    lines = (line.strip() for line in script.splitlines())
    return any(
        "--container-image" in line if line.startswith("#SBATCH") else _exports(line)
        for line in lines
    )


def _exports(line: str) -> bool:
    return "PYXIS_CONTAINER_IMAGE=" in line and not line.startswith("#")
