"""What happened: a JSON line for each image of each hook run, read by `forestage explain`."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from forestage.job import Job, Via
from forestage.units import printable

Result = Literal["hit", "joined", "copied", "started", "declined", "failed", "released"]
Hook = Literal["prolog", "step", "stager", "epilog"]

ROTATE_AT = 16 * 1024 * 1024  # bytes; one older file is kept beside it


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one request. `reason` is one word; `detail` a sentence for people.

    `started`: the job's steps will wait for the copy. Bytes are those copied by this hook; `wait`
    is seconds spent on staging. Of a stager's own outcome `copying` seconds went into the bytes,
    `resumed` of them were here before and `from_peers` came from other nodes. In the Epilog
    `evicted` are the keys that went and `released` counts redirects taken off.
    """

    result: Result
    asked: str = ""
    via: Via | None = None
    image: str = ""
    key: str = ""
    reason: str = ""
    detail: str = ""
    redirect: str = ""
    bytes: int = 0
    size: int = 0
    wait: float = 0.0
    copying: float = 0.0
    resumed: int = 0
    from_peers: int = 0
    evicted: tuple[str, ...] = ()
    released: int = 0


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of events.jsonl; `time` in seconds since the epoch, `total` the hook's seconds."""

    time: float
    hook: Hook
    job: int
    outcome: Outcome
    user: str = ""
    uid: int = -1
    node: str = ""
    partition: str = ""
    total: float = 0.0
    problems: tuple[str, ...] = ()
    step: int | None = None


def summary(job: Job, outcomes: Iterable[Outcome], total: float) -> str:
    """The canonical log line of a hook run, after its name and job; logfmt. Pure."""
    parts = [f"user={job.user.name}"]
    for outcome in outcomes:
        facts = {
            "image": outcome.image or outcome.asked,
            "key": outcome.key,
            "result": outcome.result,
            "reason": outcome.reason,
            "redirect": outcome.redirect,
            "bytes": outcome.bytes,
            "from_peers": outcome.from_peers,
            "wait": f"{outcome.wait:.3f}s" if outcome.wait else "",
            "released": outcome.released,
            "evicted": ",".join(outcome.evicted),
            "detail": outcome.detail,
        }
        parts += [f"{name}={_value(value)}" for name, value in facts.items() if value]
    parts += [f"problem={_value(problem)}" for problem in job.hints.problems]
    return " ".join([*parts, f"total={total:.3f}s"])


def _value(value: object) -> str:
    text = printable(str(value))
    if not any(char in text for char in ' ="\\'):
        return text
    # A user's path must not be able to end the quotes and go on with fields of its own.
    escaped = text.replace('"', "\\x22")
    return f'"{escaped[:-1]}\\x5c"' if escaped.endswith("\\") else f'"{escaped}"'


def record(
    file: Path, now: float, hook: Hook, job: Job, outcomes: Iterable[Outcome], total: float
) -> None:
    """Adds an event for each outcome of one run; all have the run's time and total (seconds)."""
    append(
        file,
        [
            Event(
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
            )
            for outcome in outcomes
        ],
    )


def append(file: Path, events: Iterable[Event]) -> None:
    """Adds lines. Each is one write to a file opened for appending, so hooks do not mix theirs."""
    lines = [msgspec.json.encode(event) + b"\n" for event in events]
    if not lines:
        return
    file.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    _rotate(file)
    fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            lines[0] = b"\n" + lines[0]  # a crash cut the last line short; ours must not follow it
        for line in lines:
            os.write(fd, line)
    finally:
        os.close(fd)


def read(file: Path) -> Iterator[Event]:
    """Every event that can be read, oldest first; a line cut short by a crash is passed over."""
    for path in (_older(file), file):
        try:
            handle = path.open("rb")
        except FileNotFoundError:
            continue
        with handle:
            for line in handle:
                try:
                    yield msgspec.json.decode(line, type=Event)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue


def _older(file: Path) -> Path:
    return file.with_name(file.name + ".1")


def _rotate(file: Path) -> None:
    try:
        if file.stat().st_size >= ROTATE_AT:
            file.replace(_older(file))
    except FileNotFoundError:
        # Not there yet, or another hook has just moved it.
        return
