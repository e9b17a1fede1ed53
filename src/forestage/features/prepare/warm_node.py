"""Report of one node to `forestage warm`: what became of the images, as one line of JSON.

Run by srun on each node as `python3 -m forestage.features.prepare.warm_node JOB IMAGE...`. It waits
for copies
that the job's Prolog did not wait for. Root reads the node's events; other users may read their own
(events/user_files.py). Where there are none, each of their images is `unseen`, though the job had
it staged as any job would.
"""

import os
import sys
from collections.abc import Callable
from typing import Literal

import msgspec

from forestage import events
from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import load_config
from forestage.errors import ConfigError, ForestageError
from forestage.events import EventRecord
from forestage.features.prepare import job_images
from forestage.features.prepare.job_images import ImageResult, JobImagesStatus
from forestage.paths import NodePaths
from forestage.units import make_printable

POLL_INTERVAL = 1.0  # seconds between two looks at a copy
USER_TIMEOUT = 3600.0  # seconds for which a user waits: of a copy that was killed nobody tells them
TRIES = 3  # without a live copy; its event is written a moment after its lock is free


class WarmNodeReport(msgspec.Struct, frozen=True):
    """What one job prints, as one line of JSON. `forestage` marks it among other output."""

    forestage: Literal["warm"]
    job: int
    images: tuple[ImageResult, ...]


def wait_for_copies(
    read_images: Callable[[], JobImagesStatus], clock: Clock
) -> tuple[ImageResult, ...]:
    """Returns when no image is being copied any more."""
    without_copy = 0
    while True:
        seen = read_images()
        without_copy = 0 if seen.has_live_copy else without_copy + 1
        if not seen.has_unended_copy or without_copy == TRIES:
            return seen.images
        clock.sleep(POLL_INTERVAL)


def read_results(
    places: NodePaths, clock: Clock, job: int, images: tuple[str, ...]
) -> tuple[ImageResult, ...]:
    """What this user may know; what is wrong with the node is an answer, too."""
    try:
        node = Node.from_config(load_config(places.etc).config, places, clock)
        how_far: dict[str, int] = {}
        log: list[EventRecord] = []

        def look() -> JobImagesStatus:
            log.extend(events.read_new_events(places.events, how_far))
            return job_images.read_job_images(node, log, job, images)

        return wait_for_copies(look, clock)
    except PermissionError:
        return _results_for_user(places, clock, job, images)
    except (ForestageError, OSError) as error:
        reason = "config" if isinstance(error, ConfigError) else "io"
        detail = make_printable(str(error))
        return tuple(ImageResult(image, "failed", reason, detail) for image in images)


def _results_for_user(
    places: NodePaths, clock: Clock, job: int, images: tuple[str, ...]
) -> tuple[ImageResult, ...]:
    """Return what the user's own events say; whether a copy is alive they do not."""
    until = clock.monotonic() + USER_TIMEOUT

    def look() -> JobImagesStatus:
        found = job_images.results_from_events(
            events.read_user_events(places, os.geteuid()), job, images
        )
        waits = any(one.result == "copying" for one in found)
        return JobImagesStatus(found, waits, has_live_copy=clock.monotonic() < until)

    if any(event.job == job for event in events.read_user_events(places, os.geteuid())):
        return wait_for_copies(look, clock)
    detail = f"nothing is recorded for its user; root on the node: forestage explain {job}"
    return tuple(ImageResult(image, "unseen", detail=detail) for image in images)


def main(words: list[str]) -> None:
    """JOB IMAGE..., the images as absolute paths."""
    job, *images = words
    found = read_results(NodePaths(), Clock(), int(job), tuple(images))
    # A name that is not UTF-8 must not end the answer.
    safe = tuple(
        msgspec.structs.replace(
            one, image=make_printable(one.image), detail=make_printable(one.detail)
        )
        for one in found
    )
    report = WarmNodeReport("warm", int(job), safe)
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
