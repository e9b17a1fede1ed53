"""Report of one node to `forestage warm`: what became of the images, as one line of JSON.

Run by srun on each node as `python3 -m forestage.admin.warm_node JOB IMAGE...`. As root it reads
the node's events, and waits for copies that the job's Prolog did not wait for. Other users may read
neither: their answer is `unseen` for each image, though the job had it staged as any job would.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from forestage import events
from forestage.admin import copies, inventory
from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import load_settings
from forestage.errors import ConfigError, ForestageError
from forestage.events import Copied, Event, Handled
from forestage.paths import Places
from forestage.units import printable

HERE = ("hit", "joined", "copied")
EVERY = 1.0  # seconds between two looks at a copy
TRIES = 3  # without a live copy; its event is written a moment after its lock is free

# `copying`: under way, and awaited. `unseen`: this user cannot know whether it is here.
Result = Literal["hit", "joined", "copied", "copying", "declined", "failed", "unseen"]


class ImageResult(msgspec.Struct, frozen=True, omit_defaults=True):
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


class NodeReport(msgspec.Struct, frozen=True):
    """What one job prints, as one line of JSON. `forestage` marks it among other output."""

    forestage: Literal["warm"]
    job: int
    images: tuple[ImageResult, ...]


def by_events(log: Iterable[Event], job: int, images: Iterable[str]) -> tuple[ImageResult, ...]:
    """Pure: what the job's own hooks, and the copies that they left under way, have on record."""
    own: dict[str, Event] = {}
    ended: dict[str, Event] = {}
    for event in log:
        if isinstance(event.outcome, Copied):
            ended[event.outcome.key] = event
        elif isinstance(event.outcome, Handled) and event.job == job:
            own[event.outcome.request] = event
    return tuple(_by_event(image, own.get(printable(image)), ended) for image in images)


def _by_event(image: str, event: Event | None, ended: Mapping[str, Event]) -> ImageResult:
    if event is None:
        detail = "no Prolog of forestage ran for this job, or it saw no hint"
        return ImageResult(image, "failed", detail=detail)
    outcome = event.outcome
    assert isinstance(outcome, Handled)
    # `through`: the step of this very job, as its copy was under way.
    going = outcome.result in ("started", "through")
    if not (going or (outcome.reason == "deadline" and outcome.key)):
        return _by_outcome(image, outcome)
    copy = ended.get(outcome.key)
    # One that ended before the hook began to wait is an older copy of the same key.
    if copy is None or copy.time < event.time - event.total:
        return ImageResult(image, "copying", key=outcome.key)
    assert isinstance(copy.outcome, Copied)
    return _by_outcome(image, copy.outcome)


def _by_outcome(image: str, outcome: Handled | Copied) -> ImageResult:
    # A hook's event has no other results than these, and "released" is not about an image.
    known: dict[str, Result] = {"hit": "hit", "joined": "joined", "copied": "copied"}
    known["declined"] = "declined"
    result = known.get(outcome.result, "failed")
    wait = outcome.wait if result in HERE else None
    return ImageResult(image, result, outcome.reason, outcome.detail, wait, outcome.key)


def wait_for_copies(node: Node, job: int, images: tuple[str, ...]) -> tuple[ImageResult, ...]:
    """Returns when no image is being copied any more. Raises PermissionError for all but root."""
    how_far: dict[str, int] = {}
    log: list[Event] = []
    without_copy = 0
    while True:
        live = {copy.key for copy in copies.gather(node)} if inventory.is_made(node) else set()
        log += events.unread(node.places.events, how_far)
        results = by_events(log, job, images)
        waiting = {one.key for one in results if one.result == "copying"}
        without_copy = 0 if waiting & live else without_copy + 1
        if not waiting or without_copy == TRIES:
            return tuple(_ended(node, one) for one in results)
        node.clock.sleep(EVERY)


def _ended(node: Node, one: ImageResult) -> ImageResult:
    """The result of a copy that ended without an event: whether its entry is there."""
    if one.result != "copying":
        return one
    if node.cache.image(one.key).exists():
        return msgspec.structs.replace(one, result="copied")
    detail = "its copy was stopped or killed before it was done"
    return msgspec.structs.replace(one, result="failed", reason="copy", detail=detail)


def results(
    places: Places, clock: Clock, job: int, images: tuple[str, ...]
) -> tuple[ImageResult, ...]:
    """What this user may know; what is wrong with the node is an answer, too."""
    try:
        node = Node.of(load_settings(places.etc).config, places, clock)
        return wait_for_copies(node, job, images)
    except PermissionError:
        detail = f"only root may see the cache; root on the node: forestage explain {job}"
        return tuple(ImageResult(image, "unseen", detail=detail) for image in images)
    except (ForestageError, OSError) as error:
        reason = "config" if isinstance(error, ConfigError) else "io"
        detail = printable(str(error))
        return tuple(ImageResult(image, "failed", reason, detail) for image in images)


def main(words: list[str]) -> None:
    """JOB IMAGE..., the images as absolute paths."""
    job, *images = words
    found = results(Places(), Clock(), int(job), tuple(images))
    # A name that is not UTF-8 must not end the answer.
    safe = tuple(
        msgspec.structs.replace(one, image=printable(one.image), detail=printable(one.detail))
        for one in found
    )
    report = NodeReport("warm", int(job), safe)
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
