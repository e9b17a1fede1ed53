"""That a registry gave a step no digest: its importer does not ask again (admin/registry.get).

/run/forestage/images/JOB.STEP.refused    root's, readable for the step's user; goes with the job
"""

import contextlib
from pathlib import Path

import msgspec

from forestage.errors import Declined
from forestage.paths import Places
from forestage.registry import reference
from forestage.registry.user_notes import find_note, write_note
from forestage.system.as_user import User

REASONS = (
    "registry-denied",
    "registry-missing",
    "registry-busy",
    "registry-silent",
    "registry-odd",
)
"""Why there is no digest; enroot itself may fare better, or tells the user why not."""


class RegistryRefusal(msgspec.Struct, frozen=True):
    """What a worker was told of `reference`, the user's text."""

    reference: str
    reason: str
    detail: str


def note_refusal(places: Places, job: int, step: int, user: User, refusal: RegistryRefusal) -> None:
    """Notes it for the step's importer. As root; best effort."""
    with contextlib.suppress(OSError):
        write_note(_path(places, str(job), str(step)), user.uid, refusal)


def find_refusal(places: Places, job: str, step: str, text: str) -> Declined | None:
    """Return why the registry refused this image to a step of the user's whom this process is.

    `text` is the image as pyxis has it, which is another text than the user's. Raises Declined if
    it is no reference.
    """
    found = find_note(_path(places, job, step), RegistryRefusal)
    if found is None or found.reason not in REASONS:
        return None
    if reference.parse(found.reference).text != reference.parse(text).text:
        return None
    return Declined(found.reason, found.detail)


def _path(places: Places, job: str, step: str) -> Path:
    return places.images / f"{job}.{step}.refused"
