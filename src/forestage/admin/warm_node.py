"""Report of one node to `forestage warm`: what became of the images, as one line of JSON.

Run by srun on each node as `python3 -m forestage.admin.warm_node JOB IMAGE...`. It waits for copies
that the job's Prolog did not wait for. Root reads the node's events; other users may not, and ask
the node's service (admin/ask_service.py). Where none answers, each of their images is `unseen`,
though the job had it staged as any job would.
"""

import sys
from collections.abc import Callable
from typing import Literal

import msgspec

from forestage import events
from forestage.admin import ask_client, job_images
from forestage.admin.job_images import ImageResult, Seen
from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import load_settings
from forestage.errors import ConfigError, ForestageError
from forestage.events import Event
from forestage.paths import Places
from forestage.units import printable

EVERY = 1.0  # seconds between two looks at a copy
ASK_EVERY = 3.0  # of a user: for each answer the node reads its whole event log
TRIES = 3  # without a live copy; its event is written a moment after its lock is free


class NodeReport(msgspec.Struct, frozen=True):
    """What one job prints, as one line of JSON. `forestage` marks it among other output."""

    forestage: Literal["warm"]
    job: int
    images: tuple[ImageResult, ...]


def wait_for_copies(
    look: Callable[[], Seen], clock: Clock, every: float
) -> tuple[ImageResult, ...]:
    """Returns when no image is being copied any more."""
    without_copy = 0
    while True:
        seen = look()
        without_copy = 0 if seen.live else without_copy + 1
        if not seen.waits or without_copy == TRIES:
            return seen.images
        clock.sleep(every)


def results(
    places: Places, clock: Clock, job: int, images: tuple[str, ...]
) -> tuple[ImageResult, ...]:
    """What this user may know; what is wrong with the node is an answer, too."""
    try:
        node = Node.of(load_settings(places.etc).config, places, clock)
        how_far: dict[str, int] = {}
        log: list[Event] = []

        def look() -> Seen:
            log.extend(events.unread(places.events, how_far))
            return job_images.look(node, log, job, images)

        return wait_for_copies(look, clock, EVERY)
    except PermissionError:
        return _told(places, clock, job, images)
    except (ForestageError, OSError) as error:
        reason = "config" if isinstance(error, ConfigError) else "io"
        detail = printable(str(error))
        return tuple(ImageResult(image, "failed", reason, detail) for image in images)


def _told(
    places: Places, clock: Clock, job: int, images: tuple[str, ...]
) -> tuple[ImageResult, ...]:
    """What the node's service says to who is not root."""
    try:
        told = wait_for_copies(lambda: ask_client.about_images(places, job), clock, ASK_EVERY)
    except (ForestageError, OSError) as error:
        silent = isinstance(error, FileNotFoundError | ConnectionRefusedError)
        why = "forestage-ask.socket is not enabled there" if silent else printable(str(error))
        detail = f"the node tells users nothing: {why}; root on the node: forestage explain {job}"
        return tuple(ImageResult(image, "unseen", detail=detail) for image in images)
    found = {one.image: one for one in told}
    return tuple(
        msgspec.structs.replace(found.get(printable(image), job_images.absent(image)), image=image)
        for image in images
    )


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
