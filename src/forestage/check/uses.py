"""What this node's event log says: images by how often they were asked for, and when hooks ran.

Also which sources did not answer the last job that asked them, and which entries were found to
have wrong bytes.
"""

import contextlib

import msgspec

from forestage import events
from forestage.events import Bad, Event, Handled
from forestage.paths import Places

HANGS = "source-hangs"


class Used(msgspec.Struct):
    """An image: how often jobs asked for it, and its bytes."""

    path: str
    times: int = 0
    size: int = 0


class Uses(msgspec.Struct, frozen=True):
    """`images`, most used first; when each of our hooks ran last, by its name in lower case.

    `hung`: when paths that jobs named were asked in vain that have not answered since. `bad`: by
    key, what was last found wrong of an entry.
    """

    images: tuple[Used, ...]
    hooks: dict[str, float]
    hung: dict[str, float] = {}
    bad: dict[str, Event] = {}


def gather(places: Places) -> Uses:
    """Reads the log as far as it can be read."""
    images: dict[str, Used] = {}
    hooks: dict[str, float] = {}
    hung: dict[str, float] = {}
    bad: dict[str, Event] = {}
    with contextlib.suppress(OSError):
        for event in events.read(places.events):
            hooks[event.hook] = max(event.time, hooks.get(event.hook, 0.0))
            outcome = event.outcome
            if isinstance(outcome, Bad):
                bad[outcome.key] = event
            if isinstance(outcome, Handled) and outcome.request.startswith("/"):
                hung.pop(outcome.request, None)
                hung |= {outcome.request: event.time} if outcome.reason == HANGS else {}
            if isinstance(outcome, Handled) and outcome.image:
                used = images.setdefault(outcome.image, Used(outcome.image))
                used.times += 1
                used.size = outcome.size or used.size
    most_used = sorted(images.values(), key=lambda used: (-used.times, used.path))
    return Uses(tuple(most_used), hooks, hung, bad)
