"""The event log, events.jsonl: a JSON line for each image of each hook run and each stager.

Hooks append without a lock, one write(2) for each line. At ROTATE_BYTES the file becomes
events.jsonl.1, in place of the one before; the only lock is that of the two hooks which may see the
full file at once. Lines that a crash cut short are skipped by every reader.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from forestage.events import user_files
from forestage.paths import NodePaths
from forestage.slurm.hints import RequestOrigin
from forestage.slurm.job import Job
from forestage.system import folders
from forestage.system.files import add_path_to_errors, open_descriptor
from forestage.units import make_printable

OutcomeResult = Literal[
    "hit", "joined", "copied", "started", "through", "declined", "failed", "released", "bad"
]
WHOLE_RESULTS = ("hit", "joined", "copied")  # results with which all of it is on this node's disk
UNSERVED_RESULTS = ("declined", "failed")
ByteOrigin = Literal[
    "source", "peers", "others"
]  # of bytes: nodes of the job, or those of other jobs
ImageArrival = Literal["", "stored", "imported", "waited", "enroot"]
EventHook = Literal["prolog", "step", "stager", "epilog", "sweep", "verify"]

ROTATE_BYTES = 16 * 1024 * 1024  # bytes; one older file is kept beside it
MAX_LINE_BYTES = 1024 * 1024  # bytes; an event is below 64 KiB, whatever its user wrote
# The fields of an outcome's part of the log line, in their order; each outcome has some of them.
_LOG_FIELDS = (
    *("image", "key", "digest", "result", "reason", "chunks", "unmounted", "redirect", "bytes"),
    *("ahead", "from_peers", "from_others", "givers", "uploaded", "read_through", "read_straight"),
    *("wait", "evicted", "detail"),
)
MAX_REMEMBERED_LOGS = 4  # logs that `read_new_events` remembers: at most two are there at once


class _BaseOutcome(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """What every outcome says: `reason` is one word of events.reasons, `detail` is for people."""

    result: OutcomeResult
    reason: str = ""
    detail: str = ""


class RequestOutcome(_BaseOutcome, frozen=True, omit_defaults=True, tag="handled"):
    """What one request of a job came to, in its Prolog or at a step's start.

    `request` is the user's own word, `image` the resolved path, `size` its bytes; `wait` is seconds
    spent on staging. `started`: the copy goes on without the hook; `through`: and the step reads
    through it. `evicted` are the keys that made room for the container that is unpacked from it.
    `digest` is what a registry's reference meant. `came` is how its image came: a file was
    `stored`, this node `imported` it or `waited` for another that did, or it was left to `enroot`.
    `baseline`: seconds that reading the image from its source takes here; 0 where that is not known
    (cache/baseline.py).
    `data`: it is no container's image, but what the comment names besides
    (features/data/requests.py).
    """

    request: str = ""
    via: RequestOrigin | None = None
    image: str = ""
    key: str = ""
    size: int = 0
    redirect: str = ""
    wait: float = 0.0
    evicted: tuple[str, ...] = ()
    digest: str = ""
    came: ImageArrival = ""
    data: bool = False
    baseline: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes that were copied for this request."""
        return self.size if self.result == "copied" else 0


class CopyOutcome(_BaseOutcome, frozen=True, omit_defaults=True, tag="copied"):
    """How one stager's copy ended.

    Seconds: `wait` from its start to its end, of which `copying` went into the bytes. Bytes:
    `resumed` were here before, `from_peers` came from other nodes, most of it from `givers`,
    and of it `from_others` from those of other jobs; `uploaded` went to others meanwhile. Jobs read
    `read_through` before the copy was whole, of these `read_straight` from the source. `evicted`
    are the keys that made room. `data`: of a job's data. `expected`: since when pending jobs named
    the image, in seconds since the epoch, if it was copied for them; where a job took that copy
    over, `ahead` of the resumed bytes came by it.
    """

    image: str = ""
    key: str = ""
    size: int = 0
    wait: float = 0.0
    copying: float = 0.0
    resumed: int = 0
    expected: float = 0.0
    ahead: int = 0
    from_peers: int = 0
    from_others: int = 0
    givers: tuple[str, ...] = ()
    uploaded: int = 0
    read_through: int = 0
    read_straight: int = 0
    evicted: tuple[str, ...] = ()
    data: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the image that are here now, those included that were here before."""
        return self.size if self.result == "copied" else 0

    @property
    def bytes_by_origin(self) -> dict[ByteOrigin, int]:
        """These by where they came from.

        Those that were here before count as from the source: who copied them was killed, and wrote
        no event.
        """
        return {
            "source": max(0, self.bytes - self.from_peers),
            "peers": self.from_peers - self.from_others,
            "others": self.from_others,
        }


class ReleaseOutcome(_BaseOutcome, frozen=True, omit_defaults=True, tag="released"):
    """What an Epilog or a sweep let go: `unmounted` counts redirects, `evicted` are keys."""

    unmounted: int = 0
    evicted: tuple[str, ...] = ()


class BadEntryOutcome(_BaseOutcome, frozen=True, omit_defaults=True, tag="bad"):
    """An entry whose bytes or rights were found not to be its source's, by a sweep or `verify`.

    `chunks` is how many differ, `since` when all were last read and right, in seconds since the
    epoch (0: never). `evicted` is its key, unless it stays; `detail` says what differs, or why.
    """

    image: str = ""
    key: str = ""
    size: int = 0
    chunks: int = 0
    since: float = 0.0
    evicted: tuple[str, ...] = ()


Outcome = RequestOutcome | CopyOutcome | ReleaseOutcome | BadEntryOutcome


class EventRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of events.jsonl; `time` in seconds since the epoch, `total` the hook's seconds.

    Of a Prolog: `problems` of the job's hints, `options` the words that were given as options, and
    `ignored` the words of the comment that count for nothing beside them.
    """

    time: float
    hook: EventHook
    job: int
    outcome: Outcome
    user: str = ""
    uid: int = -1
    node: str = ""
    partition: str = ""
    total: float = 0.0
    problems: tuple[str, ...] = ()
    step: int | None = None
    options: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def format_summary(job: Job, outcomes: Iterable[Outcome], total: float) -> str:
    """Returns the log line of a hook run, after its name and job, in logfmt. Pure."""
    parts = [f"user={job.user.name}", *map(format_outcome, outcomes)]
    parts += [f"options={','.join(job.hints.options)}"] if job.hints.options else []
    parts += [f"problem={quote_field(problem)}" for problem in job.hints.problems]
    return " ".join([*parts, f"total={total:.3f}s"])


def format_outcome(outcome: Outcome) -> str:
    """Returns the outcome's part of a log line, in logfmt. Pure."""
    found = ((name, _field_value(outcome, name)) for name in _LOG_FIELDS)
    return " ".join(f"{name}={quote_field(value)}" for name, value in found if value)


def _field_value(outcome: Outcome, name: str) -> object:
    value = getattr(outcome, name, "")
    if name in ("evicted", "givers"):
        return ",".join(value)
    if name == "image" and isinstance(outcome, RequestOutcome):
        return value or outcome.request
    return f"{value:.3f}s" if name == "wait" and value else value


def quote_field(value: object) -> str:
    """Returns a value of the log line, in quotes where it would not be one word. Pure."""
    text = make_printable(str(value))
    if not any(char in text for char in ' ="\\'):
        return text
    # A user's path must not be able to end the quotes and go on with fields of its own.
    escaped = text.replace('"', "\\x22")
    return f'"{escaped[:-1]}\\x5c"' if escaped.endswith("\\") else f'"{escaped}"'


def make_job_event(
    job: Job, hook: EventHook, outcome: Outcome, now: float = 0.0, total: float = 0.0
) -> EventRecord:
    """Pure: the event of one outcome of a hook's run for this job."""
    return EventRecord(
        time=round(now, 3),
        hook=hook,
        job=job.id,
        outcome=outcome,
        user=job.user.name,
        uid=job.user.uid,
        node=job.node,
        partition=job.partition,
        total=round(total, 4),
        problems=job.hints.problems if hook == "prolog" else (),
        step=job.step,
        options=job.hints.options if hook == "prolog" else (),
        ignored=job.hints.ignored if hook == "prolog" else (),
    )


def record_outcomes(
    places: NodePaths,
    now: float,
    hook: EventHook,
    job: Job,
    outcomes: Iterable[Outcome],
    total: float,
) -> None:
    """Records an event for each outcome of one run; all have its time and `total`, in seconds."""
    record_events(places, [make_job_event(job, hook, outcome, now, total) for outcome in outcomes])


def record_events(places: NodePaths, events: Iterable[EventRecord]) -> None:
    """Appends events to their users' own files, and to the log. Raises OSError of the log.

    First where no disk hangs.
    """
    events = tuple(events)
    for uid in {event.uid for event in events}:
        own = [_encode_event(event) for event in events if event.uid == uid]
        user_files.append_user_lines(places.users, uid, own)
    append_events(places.events, events)


def record_copy_for_users(places: NodePaths, event: EventRecord, uids: Iterable[int]) -> None:
    """Append the end of a copy to the files of other users, whose jobs hold its key."""
    outcome = event.outcome
    if isinstance(outcome, CopyOutcome):
        known = CopyOutcome(
            outcome.result,
            outcome.reason,
            key=outcome.key,
            size=outcome.size,
            wait=outcome.wait,
            copying=outcome.copying,
            resumed=outcome.resumed,
        )
        _append_to_user_files(
            places, EventRecord(event.time, event.hook, 0, known, total=event.total), uids
        )


def record_bad_entry_for_users(places: NodePaths, event: EventRecord) -> None:
    """Append that an entry was found bad to the files of users whose jobs had it."""
    outcome = event.outcome
    if isinstance(outcome, BadEntryOutcome):
        known = BadEntryOutcome(
            outcome.result,
            outcome.reason,
            key=outcome.key,
            chunks=outcome.chunks,
            since=outcome.since,
        )
        uids = user_files.list_users_of_key(places.users, outcome.key)
        _append_to_user_files(places, EventRecord(event.time, event.hook, 0, known), uids)


def _append_to_user_files(places: NodePaths, event: EventRecord, uids: Iterable[int]) -> None:
    """Append an event, which has no user, job, path or text of others. Raises OSError."""
    for uid in uids:
        user_files.append_user_lines(places.users, uid, [_encode_event(event)], is_own=False)


def _encode_event(event: EventRecord) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def append_events(file: Path, events: Iterable[EventRecord]) -> None:
    """Appends events to the log, one write each, so that the lines of two hooks do not mix.

    Raises OSError. `file` may be missing, and its directory too.
    """
    lines = [_encode_event(event) for event in events]
    if not lines:
        return
    folders.ensure_directory(file.parent, 0o750)
    _rotate_if_full(file)
    # No link is followed, and a FIFO without a reader is an error and no wait.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open_descriptor(file, flags, 0o640) as fd, add_path_to_errors(file):
        user_files.write_lines(fd, lines)


def read_user_events(places: NodePaths, uid: int) -> Iterator[EventRecord]:
    """Yields the events that a user may read, oldest first. Raises OSError."""
    return read_latest_events(
        user_files.user_file_path(places.users, uid), 2 * user_files.MAX_USER_FILE_BYTES
    )


def read_events(file: Path) -> Iterator[EventRecord]:
    """Yields every event that can be decoded, oldest first."""
    for handle in _open_logs(file):
        yield from (event for event in decode_lines(handle) if event)


def read_latest_events(file: Path, max_bytes: int) -> Iterator[EventRecord]:
    """Yields the events in the last `max_bytes` bytes of the logs, oldest first."""
    sizes = [os.fstat(handle.fileno()).st_size for handle in _open_logs(file)]
    skip = max(0, sum(sizes) - max_bytes)
    for handle in _open_logs(file):
        if skip:
            size = os.fstat(handle.fileno()).st_size
            handle.seek(min(skip, size))
            skip -= min(skip, size)
            handle.readline(MAX_LINE_BYTES)  # it may begin amid a line
        yield from (event for event in decode_lines(handle) if event)


def _open_logs(file: Path) -> Iterator[BinaryIO]:
    """The logs that are there, open, oldest first."""
    for path in (_rotated_path(file), file):
        try:
            handle = open(path, "rb", opener=_open_without_blocking)  # noqa: SIM115 - closed below
        except FileNotFoundError:
            continue
        with handle:
            yield handle


def decode_lines(log: BinaryIO) -> Iterator[EventRecord | None]:
    """Yields the event of each line of an open log; None for one that cannot be decoded."""
    # A bounded piece at a time: what is no line of ours may be a terabyte without an end.
    while line := log.readline(MAX_LINE_BYTES):
        yield _decode_event(line)


def read_new_events(file: Path, read_offsets: dict[str, int]) -> Iterator[EventRecord]:
    """Yields every event that was not yielded before, oldest first; for one reader at a time.

    `read_offsets` says how far each log was read, and is updated: bytes, by a hash of the log's
    first line. An inode does not identify a log, as the next one may get it; nor does its name, as
    it changes.
    """
    from hashlib import blake2b  # no hook needs it

    for handle in _open_logs(file):
        first = handle.readline(MAX_LINE_BYTES)
        if not _is_line_complete(first):
            continue
        name = blake2b(first, digest_size=12).hexdigest()
        # The tail may be lost in a crash: what comes in its place is new.
        at = min(read_offsets.pop(name, 0), os.fstat(handle.fileno()).st_size)
        handle.seek(at)
        while _is_line_complete(line := handle.readline(MAX_LINE_BYTES)):
            at += len(line)
            if event := _decode_event(line):
                yield event
        read_offsets[name] = at
    # A log that was moved between our two looks is found next time; older ones are gone for good.
    for name in list(read_offsets)[:-MAX_REMEMBERED_LOGS]:
        del read_offsets[name]


def _is_line_complete(line: bytes) -> bool:
    """Whether nobody is still writing the line: it ends, or is longer than any of ours."""
    return line.endswith(b"\n") or len(line) == MAX_LINE_BYTES


def _decode_event(line: bytes) -> EventRecord | None:
    try:
        return msgspec.json.decode(line, type=EventRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _open_without_blocking(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _rotated_path(file: Path) -> Path:
    return file.with_name(file.name + ".1")


def _rotate_if_full(file: Path) -> None:
    try:
        if file.stat().st_size < ROTATE_BYTES:
            return
        with open_descriptor(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            # Two hooks may see the full log. The second would move the new one, of a line or two,
            # over the full one, which is gone then.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), file.stat()):
                file.replace(_rotated_path(file))
    except (FileNotFoundError, BlockingIOError):
        return  # not there yet, or another hook moves it
