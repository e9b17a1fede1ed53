"""The metrics as a part of the minute's work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forestage.commands.tend import TendPart

if TYPE_CHECKING:
    from forestage.features.contexts import TendFacts


def each_minute(facts: TendFacts) -> Iterator[TendPart]:
    """Yield it if node exporter has a directory here, or if the configuration cannot be used.

    Then the metrics say so.
    """
    config = facts.config
    if config is None or (not facts.is_feature_host and config.metrics.textfile is not None):
        yield TendPart("metrics", ("metrics", "--quiet"), 10.0)
