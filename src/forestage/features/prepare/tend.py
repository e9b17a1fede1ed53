"""The images of `warm_at_boot` as a part of the minute's work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forestage.commands.tend import TendPart

if TYPE_CHECKING:
    from forestage.features.contexts import TendFacts
    from forestage.paths import NodePaths


def warmed_sign_path(places: NodePaths) -> Path:
    """Return the file that is there once the images of `warm_at_boot` were here since the boot."""
    return places.run / "warmed"


def each_minute(facts: TendFacts) -> Iterator[TendPart]:
    """Yield what begins their copies, until all of them were here once since the boot."""
    config, done = facts.config, warmed_sign_path(facts.places)
    if config is None or facts.is_feature_host:
        return
    if config.warm_at_boot and not done.exists():
        words = ("stage", "--within", "0")  # which ends with 1 while one is not here yet
        yield TendPart("warm", words, 15.0, done=done, harmless=(0, 1))
