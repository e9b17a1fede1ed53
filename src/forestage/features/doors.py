"""The doors of features: which functions of a feature the core calls, and how it gets at them.

A door is a file of a feature's folder, or a function of one, that has the door's name: `reasons`,
`epilog.before_lease_drop`. Each has a type and an overload of `load` here. After a change to doors
or to the table:

    .venv/bin/python3 packaging/conformance > tests/features/conformance.py

With that file mypy compares each door with its type.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forestage.features import FEATURES

if TYPE_CHECKING:
    from typing import Literal, Protocol, overload

    import click

    from forestage.cache.layout import Cache
    from forestage.check.finding import Finding
    from forestage.commands.sweep import SweepReport
    from forestage.commands.tend import Part
    from forestage.commands.world import World
    from forestage.config import Config
    from forestage.events import Handled
    from forestage.features.contexts import (
        CheckFacts,
        EpilogFacts,
        ExplainFacts,
        ExplainPart,
        LeaseFacts,
        MetricsFacts,
        MetricsPart,
        Route,
        ServedFacts,
        StatusFacts,
        StatusPart,
        StepPart,
        SweepFacts,
        TendFacts,
    )
    from forestage.paths import Places
    from forestage.slurm.hints import Request
    from forestage.slurm.job import Job
    from forestage.slurm.lines import Fields
    from forestage.slurm.queue import Slurm
    from forestage.stage.engines import Helpers
    from forestage.stage.task import Task

    # The Epilog: what goes before the job's lease is dropped, and after that.
    BeforeLeaseDrop = Callable[[EpilogFacts], None]
    AfterLeaseDrop = Callable[[EpilogFacts, Cache], None]

    # Prolog and step: what is done before the core takes the job's lease, and once it has served
    # the job. A step's answer of a feature comes instead of the core's.
    PrologBeforeLease = Callable[[LeaseFacts], Job]
    PrologAfterLease = Callable[[ServedFacts], list[Handled]]
    StepBeforeLease = Callable[[LeaseFacts], tuple[Job, Fields]]
    StepAfterLease = Callable[[ServedFacts], StepPart]

    # A copy: what helps with it, and how many bytes of its key other nodes got from this one.
    EngineHelpers = Callable[[Task], Helpers | None]
    EngineUploaded = Callable[[Task], int]

    # A sweep: what needs no cache; what jobs that are over left in a cache, also in one that was
    # configured before; what is wrong in the cache, once there is room; what nodes share, and may
    # hang; what Slurm is asked once a day. Each returns what it adds to fields of the report.
    SweepDoor = Literal[
        "sweep.without_cache",
        "sweep.in_each_cache",
        "sweep.with_cache",
        "sweep.afterwards",
        "sweep.ask_slurm",
    ]
    CleanUp = Callable[[SweepFacts], Mapping[str, tuple[object, ...]]]
    # And what `forestage sweep` prints of these fields.
    SweepLines = Callable[[SweepReport], list[str]]

    class ReasonsDoor(Protocol):
        """Reasons of outcomes that the feature alone gives, and which of them are of a Failed."""

        REASONS: dict[str, str]
        FAILURES: frozenset[str]

    class CommandsDoor(Protocol):
        """The commands of a feature; those of the core have such modules, too."""

        @property
        def COMMANDS(self) -> tuple[click.Command, ...]: ...

    # Its command that brings an image by a reference, and returns the path of that.
    ImportReference = Callable[[World, str], str]
    # Where a job is submitted: raises Declined for what no node would do.
    MustBePossible = Callable[[Request], None]

    class HintsDoor(Protocol):
        """`forestage hints` where the companion runs it, without all that commands need."""

        def main(self, words: Sequence[str]) -> int: ...

    # What a feature adds to explain, to status and to the metrics. ReadSent: the bytes of each key
    # that went to other nodes. Count: counts that are in no event, by their names in tally.json,
    # where they are kept beside those that are.
    ExplainOutcome = Callable[[ExplainFacts], ExplainPart]
    ReadStatus = Callable[[StatusFacts], StatusPart]
    ReadSent = Callable[[Places], Mapping[str, int]]
    ReadMetrics = Callable[[MetricsFacts], MetricsPart]
    Count = Callable[[Places], dict[str, object]]

    # What `forestage check` finds; before what may hang, a text says what it is about to look at.
    LookForFindings = Callable[[CheckFacts], Iterator[Finding | str]]
    # What a feature adds to the minute's work. WorksForOthers: whether this host does it for nodes,
    # and so need not be one.
    ListParts = Callable[[TendFacts], Iterator[Part]]
    WorksForOthers = Callable[[Config, Slurm], bool]
    # What other nodes may get of the feature, by the peer service.
    ListRoutes = Callable[[], tuple[Route, ...]]
    # Nodes that ask each other: whether this one does (the time is monotonic), and a way to ask a
    # node for what a feature has at a path there; the text before names what the session is for.
    IsOn = Callable[[Config, Places, float], bool]
    AskNode = Callable[[Config, Places, str, str, str], "OtherNode"]

    class OtherNode(Protocol):
        """A node that is asked over one connection."""

        def answers_within(self, seconds: float, now: float) -> bool: ...
        def ask(self, more: str = "", stop: Callable[[], bool] = ...) -> bytes | None: ...
        def close(self) -> None: ...

    # Whether `forestage enable` is to start the row's unit on a node with this configuration.
    WantsUnit = Callable[[Config], bool]


if TYPE_CHECKING:

    @overload
    def load(name: str, door: Literal["epilog.before_lease_drop"]) -> BeforeLeaseDrop: ...
    @overload
    def load(name: str, door: Literal["epilog.after_lease_drop"]) -> AfterLeaseDrop: ...
    @overload
    def load(name: str, door: Literal["prolog.before_lease"]) -> PrologBeforeLease: ...
    @overload
    def load(name: str, door: Literal["prolog.after_lease"]) -> PrologAfterLease: ...
    @overload
    def load(name: str, door: Literal["step.before_lease"]) -> StepBeforeLease: ...
    @overload
    def load(name: str, door: Literal["step.after_lease"]) -> StepAfterLease: ...
    @overload
    def load(name: str, door: Literal["engine.helpers"]) -> EngineHelpers: ...
    @overload
    def load(name: str, door: Literal["engine.uploaded"]) -> EngineUploaded: ...
    @overload
    def load(name: str, door: SweepDoor) -> CleanUp: ...
    @overload
    def load(name: str, door: Literal["sweep.lines"]) -> SweepLines: ...
    @overload
    def load(name: str, door: Literal["reasons"]) -> ReasonsDoor: ...
    @overload
    def load(name: str, door: Literal["commands"]) -> CommandsDoor: ...
    @overload
    def load(name: str, door: Literal["commands.import_reference"]) -> ImportReference: ...
    @overload
    def load(name: str, door: Literal["submitted.must_be_possible"]) -> MustBePossible: ...
    @overload
    def load(name: str, door: Literal["hints"]) -> HintsDoor: ...
    @overload
    def load(name: str, door: Literal["explain.explain_outcome"]) -> ExplainOutcome: ...
    @overload
    def load(name: str, door: Literal["status.read_status"]) -> ReadStatus: ...
    @overload
    def load(name: str, door: Literal["status.read_sent"]) -> ReadSent: ...
    @overload
    def load(name: str, door: Literal["metrics.read_metrics"]) -> ReadMetrics: ...
    @overload
    def load(name: str, door: Literal["metrics.count"]) -> Count: ...
    @overload
    def load(name: str, door: Literal["checks.findings"]) -> LookForFindings: ...
    @overload
    def load(name: str, door: Literal["checks.wants_unit"]) -> WantsUnit: ...
    @overload
    def load(name: str, door: Literal["activation.is_on"]) -> IsOn: ...
    @overload
    def load(name: str, door: Literal["asked_node.ask_node"]) -> AskNode: ...
    @overload
    def load(name: str, door: Literal["service.routes"]) -> ListRoutes: ...
    @overload
    def load(name: str, door: Literal["tend.each_minute"]) -> ListParts: ...
    @overload
    def load(name: str, door: Literal["tend.works_for_others"]) -> WorksForOthers: ...


def load(name: str, door: str) -> Any:
    """Import a feature's door: its module, or a function of that. The table says what is there."""
    file, _, function = door.partition(".")
    module = importlib.import_module(f"forestage.features.{name}.{file}")
    return getattr(module, function) if function else module


def having(door: str) -> list[str]:
    """Return the names of the features with this door, in the table's order."""
    return [feature.name for feature in FEATURES if door in feature.doors]


def asked_for(door: str, *kinds: str) -> list[str]:
    """Return the names of those that have this door, and that a job asks for one of these kinds."""
    return [
        feature.name
        for feature in FEATURES
        if door in feature.doors and not set(kinds).isdisjoint(feature.kinds)
    ]


def with_work(door: str, job: int, run: Path) -> list[str]:
    """Return the names of those that have this door, and a mark of the job below `run`."""
    return [
        feature.name
        for feature in FEATURES
        if door in feature.doors
        if any(os.path.exists(run / mark.format(job=job)) for mark in feature.marks)
    ]


@contextlib.contextmanager
def calling_first(names: Iterable[str], call: Callable[[str], object]) -> Iterator[None]:
    """Make the call for each feature, then run the block, also after a call that raised.

    What was raised last goes on at the end. What is no Exception, such as ^C, does so at once.
    """
    with contextlib.ExitStack() as raised:
        for name in names:
            raised.enter_context(_after(name, call))
        yield


@contextlib.contextmanager
def _after(name: str, call: Callable[[str], object]) -> Iterator[None]:
    try:
        call(name)
    except Exception:
        yield
        raise
    else:
        yield
