"""What this node's event log says: images by how often they were asked for, and when hooks ran."""

import contextlib

import msgspec

from forestage import events
from forestage.events import Handled
from forestage.paths import Places


class Used(msgspec.Struct):
    """An image: how often jobs asked for it, and its bytes."""

    path: str
    times: int = 0
    size: int = 0


class Uses(msgspec.Struct, frozen=True):
    """`images`, most used first; when each of our hooks ran last, by its name in lower case."""

    images: tuple[Used, ...]
    hooks: dict[str, float]


def gather(places: Places) -> Uses:
    """Reads the log as far as it can be read."""
    images: dict[str, Used] = {}
    hooks: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for event in events.read(places.events):
            hooks[event.hook] = max(event.time, hooks.get(event.hook, 0.0))
            outcome = event.outcome
            if isinstance(outcome, Handled) and outcome.image:
                used = images.setdefault(outcome.image, Used(outcome.image))
                used.times += 1
                used.size = outcome.size or used.size
    most_used = sorted(images.values(), key=lambda used: (-used.times, used.path))
    return Uses(tuple(most_used), hooks)
