"""The doors of features: which functions of a feature the core calls, and how it gets at them.

A door is a file of a feature's folder that has the door's name. Each has a Protocol here, which
says what is in it, and an overload of `load`. After a change to doors or to the table:

    .venv/bin/python3 packaging/conformance > tests/features/conformance.py

With that file mypy compares each door with its Protocol.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forestage.features import FEATURES

if TYPE_CHECKING:
    from typing import Literal, Protocol, overload

    import click

    from forestage.cache.layout import Cache
    from forestage.features.contexts import (
        JobEnd,
        MetricsFacts,
        MetricsPart,
        StatusFacts,
        StatusPart,
        SweepFacts,
    )
    from forestage.paths import Places

    class EpilogDoor(Protocol):
        """What the Epilog releases, before it drops the job's lease and after that."""

        def before_lease_drop(self, end: JobEnd) -> None: ...
        def after_lease_drop(self, end: JobEnd, cache: Cache) -> None: ...

    class SweepDoor(Protocol):
        """What a sweep cleans up: what needs no cache, then what does."""

        def without_cache(self, facts: SweepFacts) -> None: ...
        def with_cache(self, facts: SweepFacts) -> None: ...

    class ReasonsDoor(Protocol):
        """Reasons of outcomes that the feature alone gives, and which of them are of a Failed."""

        REASONS: dict[str, str]
        FAILURES: frozenset[str]

    class CommandsDoor(Protocol):
        """The commands of a feature; those of the core have such modules, too."""

        @property
        def COMMANDS(self) -> tuple[click.Command, ...]: ...

    class HintsDoor(Protocol):
        """`forestage hints` where the companion runs it, without all that commands need."""

        def main(self, words: Sequence[str]) -> int: ...

    class StatusDoor(Protocol):
        """What `forestage status` says of the feature."""

        def read_status(self, facts: StatusFacts) -> StatusPart: ...

    class MetricsDoor(Protocol):
        """What the feature adds to the metrics."""

        def read_metrics(self, facts: MetricsFacts) -> MetricsPart: ...

    class CountsDoor(Protocol):
        """Counts that are in no event; they are kept in tally.json beside those that are."""

        def count(self, places: Places) -> dict[str, object]: ...


if TYPE_CHECKING:

    @overload
    def load(name: str, door: Literal["epilog"]) -> EpilogDoor: ...
    @overload
    def load(name: str, door: Literal["sweep"]) -> SweepDoor: ...
    @overload
    def load(name: str, door: Literal["reasons"]) -> ReasonsDoor: ...
    @overload
    def load(name: str, door: Literal["commands"]) -> CommandsDoor: ...
    @overload
    def load(name: str, door: Literal["hints"]) -> HintsDoor: ...
    @overload
    def load(name: str, door: Literal["status"]) -> StatusDoor: ...
    @overload
    def load(name: str, door: Literal["metrics"]) -> MetricsDoor: ...
    @overload
    def load(name: str, door: Literal["counts"]) -> CountsDoor: ...


def load(name: str, door: str) -> Any:
    """Import the module of a feature's door. Only a door of the table may be asked for."""
    return importlib.import_module(f"forestage.features.{name}.{door}")


def having(door: str) -> list[str]:
    """Return the names of the features with this door, in the table's order."""
    return [feature.name for feature in FEATURES if door in feature.doors]


def with_work(door: str, job: int, run: Path) -> list[str]:
    """Return the names of those that have this door, and a mark of the job below `run`."""
    return [
        feature.name
        for feature in FEATURES
        if door in feature.doors
        if any(os.path.exists(run / mark.format(job=job)) for mark in feature.marks)
    ]


def call_in_turn(calls: Sequence[Callable[[], None]]) -> None:
    """Make each call, also after one that raised; the exception that was raised last goes on.

    What is no Exception, such as ^C, ends this at once.
    """
    with contextlib.ExitStack() as stack:
        for call in reversed(calls):
            stack.push(partial(_call_after, call))


def _call_after(
    call: Callable[[], None],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Make a call as a function that an ExitStack calls at its end."""
    if kind is None or issubclass(kind, Exception):
        call()
