"""What this node's event log says: images by how often they were asked for, and when hooks ran.

Also which sources did not answer the last job that asked them, and which entries were found to
have wrong bytes.
"""

import contextlib

import msgspec

from forestage import events
from forestage.events import BadEntryOutcome, EventRecord, RequestOutcome
from forestage.paths import NodePaths

HANG_REASON = "source-hangs"


class ImageUse(msgspec.Struct):
    """An image: how often jobs asked for it, and its bytes."""

    path: str
    requests: int = 0
    size: int = 0


class EventLogFacts(msgspec.Struct, frozen=True):
    """`images`, most used first; when each of our hooks ran last, by its name in lower case.

    `hung_paths`: when paths that jobs named were asked in vain that have not answered since.
    `bad_entries`: by key, what was last found wrong of an entry.
    """

    images: tuple[ImageUse, ...]
    hooks: dict[str, float]
    hung_paths: dict[str, float] = {}
    bad_entries: dict[str, EventRecord] = {}


def read_event_log_facts(places: NodePaths) -> EventLogFacts:
    """Reads the log as far as it can be read."""
    images: dict[str, ImageUse] = {}
    hooks: dict[str, float] = {}
    hung: dict[str, float] = {}
    bad: dict[str, EventRecord] = {}
    with contextlib.suppress(OSError):
        for event in events.read_events(places.events):
            hooks[event.hook] = max(event.time, hooks.get(event.hook, 0.0))
            outcome = event.outcome
            if isinstance(outcome, BadEntryOutcome):
                bad[outcome.key] = event
            if isinstance(outcome, RequestOutcome) and outcome.request.startswith("/"):
                hung.pop(outcome.request, None)
                hung |= {outcome.request: event.time} if outcome.reason == HANG_REASON else {}
            if isinstance(outcome, RequestOutcome) and outcome.image:
                used = images.setdefault(outcome.image, ImageUse(outcome.image))
                used.requests += 1
                used.size = outcome.size or used.size
    most_used = sorted(images.values(), key=lambda used: (-used.requests, used.path))
    return EventLogFacts(tuple(most_used), hooks, hung, bad)
