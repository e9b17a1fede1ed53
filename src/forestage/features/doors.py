"""The doors of features: which functions of a feature the core calls, and how it gets at them.

A door is a file of a feature's folder, or a function of one, that has the door's name: `reasons`,
`epilog.before_lease_drop`. Each has a constant here, with its type. After a change to doors or to
the table:

    .venv/bin/python3 packaging/conformance > tests/features/conformance.py

With that file mypy compares each door with its type.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from forestage.features import Feature, list_names_with_door

if TYPE_CHECKING:
    from typing import Protocol

    import click

    from forestage.cache.layout import Cache
    from forestage.check.finding import CheckFinding
    from forestage.commands.command_context import CommandContext
    from forestage.commands.sweep import SweepReport
    from forestage.commands.tend import TendPart
    from forestage.config import Config
    from forestage.events import RequestOutcome
    from forestage.features.contexts import (
        AfterLeaseFacts,
        BeforeLeaseFacts,
        CheckFacts,
        ExplainFacts,
        ExplainPart,
        MetricsFacts,
        MetricsPart,
        ServiceRoute,
        StatusFacts,
        StatusPart,
        StepPart,
        SweepFacts,
        TendFacts,
    )
    from forestage.hooks.epilog import EpilogFacts
    from forestage.paths import NodePaths
    from forestage.slurm.hints import Request
    from forestage.slurm.job import Job
    from forestage.slurm.slurm_client import SlurmClient
    from forestage.slurm.step_protocol import LineFields
    from forestage.stage.engines import CopyHelpers
    from forestage.stage.task import CopyTask

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

    class NodeClient(Protocol):
        """A node that is asked over one connection."""

        def answers_within(self, seconds: float, now: float) -> bool: ...
        def query(self, more: str = "", stop: Callable[[], bool] = ...) -> bytes | None: ...
        def close(self) -> None: ...

    # What a sweep calls returns what it adds to fields of the report.
    SweepFunction = Callable[[SweepFacts], Mapping[str, tuple[object, ...]]]

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class Door(Generic[T]):
    """A door, by its name; T is the type of what a feature has there."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


# The Epilog: what goes before the job's lease is dropped, and after that.
EPILOG_BEFORE_LEASE_DROP: Door[Callable[[EpilogFacts], None]] = Door("epilog.before_lease_drop")
EPILOG_AFTER_LEASE_DROP: Door[Callable[[EpilogFacts, Cache], None]] = Door(
    "epilog.after_lease_drop"
)

# Prolog and step: what is done before the core takes the job's lease, and once it has served the
# job. A step's answer of a feature comes instead of the core's.
PROLOG_BEFORE_LEASE: Door[Callable[[BeforeLeaseFacts], Job]] = Door("prolog.before_lease")
PROLOG_AFTER_LEASE: Door[Callable[[AfterLeaseFacts], list[RequestOutcome]]] = Door(
    "prolog.after_lease"
)
STEP_BEFORE_LEASE: Door[Callable[[BeforeLeaseFacts], tuple[Job, LineFields]]] = Door(
    "step.before_lease"
)
STEP_AFTER_LEASE: Door[Callable[[AfterLeaseFacts], StepPart]] = Door("step.after_lease")

# A copy: what helps with it, and how many bytes of its key other nodes got from this one.
ENGINE_HELPERS: Door[Callable[[CopyTask], CopyHelpers | None]] = Door("engine.helpers")
ENGINE_UPLOADED: Door[Callable[[CopyTask], int]] = Door("engine.uploaded")

# A sweep: what needs no cache; what jobs that are over left in a cache, also in one that was
# configured before; what is wrong in the cache, once there is room; what nodes share, and may hang;
# what Slurm is asked once a day. Then the fields that a feature adds to the report, each with that
# of the core after which it comes; and what `forestage sweep` prints of all that.
SWEEP_WITHOUT_CACHE: Door[SweepFunction] = Door("sweep.without_cache")
SWEEP_IN_EACH_CACHE: Door[SweepFunction] = Door("sweep.in_each_cache")
SWEEP_WITH_CACHE: Door[SweepFunction] = Door("sweep.with_cache")
SWEEP_AFTERWARDS: Door[SweepFunction] = Door("sweep.afterwards")
SWEEP_ASK_SLURM: Door[SweepFunction] = Door("sweep.ask_slurm")
SWEEP_FIELDS: Door[Callable[[], Mapping[str, str]]] = Door("sweep.fields")
SWEEP_LINES: Door[Callable[[SweepReport], list[str]]] = Door("sweep.lines")

REASONS: Door[ReasonsDoor] = Door("reasons")

# Commands, and one that brings an image by a reference and returns the path of that. Where a job is
# submitted: what answers the companion, and what raises Declined for what no node would do.
COMMANDS: Door[CommandsDoor] = Door("commands")
COMMANDS_IMPORT_REFERENCE: Door[Callable[[CommandContext, str], str]] = Door(
    "commands.import_reference"
)
HINTS: Door[HintsDoor] = Door("hints")
SUBMITTED_MUST_BE_POSSIBLE: Door[Callable[[Request], None]] = Door("submitted.must_be_possible")

# What a feature adds to explain, to status and to the metrics. The bytes of each key that went to
# other nodes. Counts that are in no event, by their names in tally.json, where they are kept beside
# those that are.
EXPLAIN_EXPLAIN_OUTCOME: Door[Callable[[ExplainFacts], ExplainPart]] = Door(
    "explain.explain_outcome"
)
STATUS_READ_STATUS: Door[Callable[[StatusFacts], StatusPart]] = Door("status.read_status")
STATUS_READ_SENT: Door[Callable[[NodePaths], Mapping[str, int]]] = Door("status.read_sent")
METRICS_READ_METRICS: Door[Callable[[MetricsFacts], MetricsPart]] = Door("metrics.read_metrics")
METRICS_COUNT: Door[Callable[[NodePaths], dict[str, object]]] = Door("metrics.count")

# What `forestage check` finds; before what may hang, a text says what it is about to look at. And
# whether `forestage enable` is to start the row's unit on a node with this configuration.
CHECKS_FINDINGS: Door[Callable[[CheckFacts], Iterator[CheckFinding | str]]] = Door(
    "checks.findings"
)
CHECKS_WANTS_UNIT: Door[Callable[[Config], bool]] = Door("checks.wants_unit")

# What a feature adds to the minute's work, and whether this host does it for nodes, and so need not
# be one.
TEND_EACH_MINUTE: Door[Callable[[TendFacts], Iterator[TendPart]]] = Door("tend.each_minute")
TEND_WORKS_FOR_OTHERS: Door[Callable[[Config, SlurmClient], bool]] = Door("tend.works_for_others")

# What other nodes may get of the feature, by the peer service.
SERVICE_ROUTES: Door[Callable[[], tuple[ServiceRoute, ...]]] = Door("service.routes")
# Nodes that ask each other: whether this one does (the time is monotonic), and a way to ask a node
# for what a feature has at a path there; the text before names what the session is for.
ACTIVATION_IS_ON: Door[Callable[[Config, NodePaths, float], bool]] = Door("activation.is_on")
QUERIED_NODE_QUERY_NODE: Door[Callable[[Config, NodePaths, str, str, str], NodeClient]] = Door(
    "queried_node.query_node"
)


def load_door(name: str, door: Door[T]) -> T:
    """Import a feature's door: its module, or a function of that. The table says what is there."""
    file, _, function = door.name.partition(".")
    module: Any = importlib.import_module(f"forestage.features.{name}.{file}")
    found: T = getattr(module, function) if function else module
    return found


def load_doors(door: Door[T], features: Iterable[Feature] | None = None) -> Iterator[T]:
    """Import a door of each of these features that has it; of all, in the table's order."""
    return (load_door(name, door) for name in list_names_with_door(door.name, features))


def make_door_calls(
    door: Door[Callable[P, R]], features: Iterable[Feature], *facts: P.args, **more: P.kwargs
) -> list[Callable[[], R]]:
    """Return a call of a door for each of these features that has it, which also imports it."""

    def call(name: str) -> R:
        return load_door(name, door)(*facts, **more)

    return [functools.partial(call, name) for name in list_names_with_door(door.name, features)]
