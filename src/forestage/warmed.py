"""What became of these images on this node? A job of `forestage warm` asks this, and prints it.

Root reads the node's events, and waits for copies that its Prolog did not wait for. Other users may
read neither; their jobs see what any job sees: whether the path shows the local copy, and when that
was made. It is run by srun on the node, as `python3 -m forestage.warmed JOB SINCE IMAGE...`.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from forestage import copies, entries, events
from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import load_settings
from forestage.errors import ConfigError
from forestage.events import Event, Outcome
from forestage.paths import Places
from forestage.system import mounts
from forestage.units import printable

HERE = ("hit", "joined", "copied")
EVERY = 1.0  # seconds between two looks at a copy
LOOKS = 3  # without a live copy; its event is written a moment after its lock is free

# `copying`: under way, and awaited. `unseen`: this user cannot see whether it is here.
Result = Literal["hit", "joined", "copied", "copying", "declined", "failed", "unseen"]


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image on one node; `reason` as in events, `wait` the seconds that staging it took."""

    image: str
    result: Result
    reason: str = ""
    detail: str = ""
    wait: float | None = None
    key: str = ""

    @property
    def is_here(self) -> bool:
        return self.result in HERE


class Report(msgspec.Struct, frozen=True):
    """What one job prints, as one line of JSON. `forestage` tells it from other output."""

    forestage: Literal["warmed"]
    job: int
    images: tuple[Said, ...]


def by_events(told: Iterable[Event], job: int, images: Iterable[str]) -> tuple[Said, ...]:
    """Pure: what the job's own hooks, and the copies that they left under way, have on record."""
    own: dict[str, Event] = {}
    ended: dict[str, Event] = {}
    for event in told:
        if event.hook == "stager":
            ended[event.outcome.key] = event
        elif event.job == job and event.hook in ("prolog", "step"):
            own[event.outcome.asked] = event
    return tuple(_said(image, own.get(printable(image)), ended) for image in images)


def _said(image: str, event: Event | None, ended: Mapping[str, Event]) -> Said:
    if event is None:
        detail = "no Prolog of forestage has seen the job, or it saw no hint"
        return Said(image, "failed", detail=detail)
    outcome = event.outcome
    if not (outcome.result == "started" or (outcome.reason == "deadline" and outcome.key)):
        return _as_told(image, outcome)
    copy = ended.get(outcome.key)
    # One that ended before the hook began to wait is an older copy of the same key.
    if copy is None or copy.time < event.time - event.total:
        return Said(image, "copying", key=outcome.key)
    return _as_told(image, copy.outcome)


def _as_told(image: str, outcome: Outcome) -> Said:
    # An event of a hook has no other results than these; of "released" no hook is asked about.
    known: dict[str, Result] = {"hit": "hit", "joined": "joined", "copied": "copied"}
    known["declined"] = "declined"
    result = known.get(outcome.result, "failed")
    wait = outcome.wait if result in HERE else None
    return Said(image, result, outcome.reason, outcome.detail, wait, outcome.key)


def watched(node: Node, job: int, images: tuple[str, ...]) -> tuple[Said, ...]:
    """Root's: waits for copies under way to end. Raises PermissionError for other users."""
    how_far: dict[str, int] = {}
    told: list[Event] = []
    dead = 0
    while True:
        live = {copy.key for copy in copies.gather(node)} if entries.is_made(node) else set()
        told += events.unread(node.places.events, how_far)
        said = by_events(told, job, images)
        waiting = {one.key for one in said if one.result == "copying"}
        dead = 0 if waiting & live else dead + 1
        if not waiting or dead == LOOKS:
            return tuple(_ended(node, one) for one in said)
        node.clock.sleep(EVERY)


def _ended(node: Node, one: Said) -> Said:
    """Of a copy that is over and has told nobody how: what there is of it."""
    if one.result != "copying":
        return one
    if node.cache.image(one.key).exists():
        return msgspec.structs.replace(one, result="copied")
    detail = "its copy was stopped or killed before it was done"
    return msgspec.structs.replace(one, result="failed", reason="copy", detail=detail)


def by_mounts(
    binds: Iterable[str], redirect: str, job: int, since: float, image: str, resolved: str
) -> Said:
    """What an ordinary user's job sees; `binds` are paths that show something of the cache.

    `since`, in seconds since the epoch, is when the job was submitted.
    """
    try:
        made = os.stat(resolved).st_ctime  # noqa: PTH116 - a bind's own inode is the copy's
    except FileNotFoundError:
        return Said(image, "declined", "missing", "there is no such file on this node")
    except OSError as error:
        return Said(image, "declined", "source-error", error.strerror or "")
    if resolved in binds:
        return Said(image, "copied" if made >= since else "hit")
    why = "the path shows no local copy"
    if redirect != "bind":
        why = f"`redirect: {redirect}` shows users nothing"
    return Said(image, "unseen", detail=f"{why}; root on the node: forestage explain {job}")


def seen(places: Places, job: int, since: float, images: Iterable[str]) -> tuple[Said, ...]:
    """For users who may not read the events. Raises ConfigError, OSError."""
    config = load_settings(places.etc).config
    cache = os.path.realpath(config.cache)
    binds = {bind.point for bind, _ in mounts.binds_from(mounts.current(), cache)}
    return tuple(
        by_mounts(binds, config.redirect, job, since, image, os.path.realpath(image))
        for image in images
    )


def look(
    places: Places, clock: Clock, job: int, since: float, images: tuple[str, ...]
) -> tuple[Said, ...]:
    """What this user can know. A node that cannot be asked is an answer, too."""
    try:
        try:
            node = Node.of(load_settings(places.etc).config, places, clock)
            return watched(node, job, images)
        except PermissionError:
            return seen(places, job, since, images)
    except (ConfigError, OSError) as error:
        reason = "config" if isinstance(error, ConfigError) else "io"
        return tuple(Said(image, "failed", reason, printable(str(error))) for image in images)


def main(words: list[str]) -> None:
    """JOB SINCE IMAGE..., the images as absolute paths."""
    job, since, *images = words
    said = look(Places(), Clock(), int(job), float(since), tuple(images))
    # A name that is no text must not end the answer.
    report = Report("warmed", int(job), tuple(map(_printable, said)))
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


def _printable(one: Said) -> Said:
    return msgspec.structs.replace(one, image=printable(one.image), detail=printable(one.detail))


if __name__ == "__main__":
    main(sys.argv[1:])
