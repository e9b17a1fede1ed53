"""What became of the images that one job asked for on this node, and of the copies that it left.

For `forestage warm` (features/prepare/warm_node.py).
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from forestage.cache.node import Node
from forestage.events import WHOLE_RESULTS, CopyOutcome, EventRecord, RequestOutcome
from forestage.system import lock
from forestage.units import make_printable

# `copying`: under way, and awaited. `unseen`: this user cannot know whether it is here.
ImageOutcome = Literal["hit", "joined", "copied", "copying", "declined", "failed", "unseen"]


class ImageResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image on one node; `reason` as in events, `wait` the seconds that staging it took."""

    image: str
    result: ImageOutcome
    reason: str = ""
    detail: str = ""
    wait: float | None = None
    key: str = ""

    @property
    def is_here(self) -> bool:
        return self.result in WHOLE_RESULTS


class JobImagesStatus(msgspec.Struct, frozen=True):
    """A job's images at one moment, judged as if no copy went on.

    `has_unended_copy`: the copy of one has not ended, as far as the events say. `has_live_copy`: it
    is under way.
    """

    images: tuple[ImageResult, ...]
    has_unended_copy: bool = False
    has_live_copy: bool = False


def read_job_images(
    node: Node, log: Iterable[EventRecord], job: int, images: Iterable[str]
) -> JobImagesStatus:
    """Reads which copies are under way, without a lock. Raises OSError."""
    found = results_from_events(log, job, images)
    waiting = [one.key for one in found if one.result == "copying"]
    live = any(not lock.is_free(node.cache.key_lock(key)) for key in waiting)
    return JobImagesStatus(
        tuple(_result_without_event(node, one) for one in found), bool(waiting), live
    )


def make_absent_result(image: str) -> ImageResult:
    """Pure: an image of which no hook has anything on record."""
    detail = "no Prolog of forestage ran for this job, or it saw no hint"
    return ImageResult(image, "failed", detail=detail)


def results_from_events(
    log: Iterable[EventRecord], job: int, images: Iterable[str]
) -> tuple[ImageResult, ...]:
    """Pure: what the job's own hooks, and the copies that they left under way, have on record."""
    own: dict[str, EventRecord] = {}
    ended: dict[str, EventRecord] = {}
    for event in log:
        if isinstance(event.outcome, CopyOutcome):
            ended[event.outcome.key] = event
        elif isinstance(event.outcome, RequestOutcome) and event.job == job:
            own[event.outcome.request] = event
    return tuple(
        _result_from_event(image, own.get(make_printable(image)), ended) for image in images
    )


def _result_from_event(
    image: str, event: EventRecord | None, ended: Mapping[str, EventRecord]
) -> ImageResult:
    if event is None:
        return make_absent_result(image)
    outcome = event.outcome
    assert isinstance(outcome, RequestOutcome)
    # `through`: the step of this very job, as its copy was under way.
    going = outcome.result in ("started", "through")
    if not (going or (outcome.reason == "deadline" and outcome.key)):
        return _result_from_outcome(image, outcome)
    copy = ended.get(outcome.key)
    # One that ended before the hook began to wait is an older copy of the same key.
    if copy is None or copy.time < event.time - event.total:
        return ImageResult(image, "copying", key=outcome.key)
    assert isinstance(copy.outcome, CopyOutcome)
    return _result_from_outcome(image, copy.outcome)


def _result_from_outcome(image: str, outcome: RequestOutcome | CopyOutcome) -> ImageResult:
    # A hook's event has no other results than these, and "released" is not about an image.
    known: dict[str, ImageOutcome] = {"hit": "hit", "joined": "joined", "copied": "copied"}
    known["declined"] = "declined"
    result = known.get(outcome.result, "failed")
    wait = outcome.wait if result in WHOLE_RESULTS else None
    return ImageResult(image, result, outcome.reason, outcome.detail, wait, outcome.key)


def _result_without_event(node: Node, one: ImageResult) -> ImageResult:
    """The result of a copy that ended without an event: whether its entry is there."""
    if one.result != "copying":
        return one
    if node.cache.image_path(one.key).exists():
        return msgspec.structs.replace(one, result="copied")
    detail = "its copy was stopped or killed before it was done"
    return msgspec.structs.replace(one, result="failed", reason="copy", detail=detail)
