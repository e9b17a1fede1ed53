"""What the core tells the doors of features: a frozen value for each door, with facts alone.

That of the Epilog is in hooks/epilog.py, which works with it itself: an Epilog of a job with only
images imports nothing of features but the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence
    from typing import BinaryIO, Literal

    from forestage.cache.layout import Cache
    from forestage.cache.node import Node
    from forestage.check import CheckTarget
    from forestage.check.slurm_site import SlurmSite
    from forestage.clock import Clock
    from forestage.commands.event_counters import EventTally, Histogram
    from forestage.commands.inventory import InventoryItem
    from forestage.commands.status import NodeStatus
    from forestage.config import Config, LoadedConfig
    from forestage.errors import Declined
    from forestage.events import CopyOutcome, EventHook, Outcome, RequestOutcome
    from forestage.hooks.hook_deadlines import HookDeadlines
    from forestage.paths import NodePaths
    from forestage.slurm.job import Job
    from forestage.slurm.slurm_client import SlurmClient
    from forestage.slurm.slurm_conf import SlurmConf
    from forestage.slurm.step_protocol import LineFields
    from forestage.system.terminal import OutputBlock
    from forestage.system.tree import RootedTree


class SweepFacts(msgspec.Struct, frozen=True):
    """sweep.py: the node as a sweep has it; `jobs_with_lease` are those that are not over."""

    node: Node
    slurm: SlurmClient
    jobs_with_lease: frozenset[int]
    dry_run: bool


class StatusFacts(msgspec.Struct, frozen=True):
    """status.py: the node whose state is read at `now`, in seconds since the epoch.

    `items` are the entries of its cache. `has_cache` is whether that is there and in use; where it
    is not, its disk may hang.
    """

    node: Node
    items: tuple[InventoryItem, ...]
    has_cache: bool
    now: float


class StatusPart(msgspec.Struct, frozen=True):
    """What a feature adds to `forestage status`.

    `fields` are of the JSON document, where they come `after` that field of the core's. `room` are
    rows about what takes the disk's room, `rows` about the node, `tables` follow that of copies.
    """

    fields: dict[str, object]
    after: str
    room: tuple[tuple[str, str], ...] = ()
    rows: tuple[tuple[str, str], ...] = ()
    tables: tuple[OutputBlock, ...] = ()


class MetricsFacts(msgspec.Struct, frozen=True):
    """metrics.py: what is known when metrics are written; `now` is monotonic.

    `config` is None where it cannot be used, `status` where the node's state could not be read.
    """

    places: NodePaths
    config: Config | None
    status: NodeStatus | None
    tally: EventTally
    now: float


class MetricFamily(msgspec.Struct, frozen=True):
    """A family of metrics, without the prefix; it comes `after` that one of the core's.

    It has one `value`, or `values` by those of its `label`, or a `histogram`.
    """

    name: str
    text: str
    after: str
    kind: Literal["gauge", "counter"] = "gauge"
    value: float = 0.0
    label: str = ""
    values: dict[str, int] = {}
    histogram: Histogram | None = None


class MetricsPart(msgspec.Struct, frozen=True):
    """What a feature adds to the metrics; `info` are labels of forestage_info."""

    info: dict[str, str] = {}
    families: tuple[MetricFamily, ...] = ()


class ExplainFacts(msgspec.Struct, frozen=True):
    """explain.py: what a hook or a stager came to.

    `copies_ahead` are the copies, by key, that were made before the job asked, and which it used
    first.
    """

    hook: EventHook
    outcome: Outcome
    copies_ahead: Mapping[str, CopyOutcome] = {}


class ExplainPart(msgspec.Struct, frozen=True):
    """What a feature says in `forestage explain`.

    `redirect` and `consequence` are said in place of what the core says of the redirect, and that
    the original path was kept; `sentences` follow the others, `rows` the request. `option` is by
    what it was asked, if not by --stage.
    """

    redirect: str = ""
    consequence: str = ""
    sentences: tuple[str, ...] = ()
    option: str = ""
    rows: tuple[tuple[str, str], ...] = ()


class CheckFacts(msgspec.Struct, frozen=True):
    """checks.py: the node that `forestage check` looks at, by the files below its root.

    `site` is None where Slurm's files could not be read.
    """

    target: CheckTarget
    files: RootedTree
    settings: LoadedConfig
    site: SlurmSite | None


class BeforeLeaseFacts(msgspec.Struct, frozen=True):
    """prolog.py, step.py: a job before the core takes a lease for it.

    `environ` is the hook's. `record_outcomes` records what comes of the job in a process that goes
    on after the hook, `write_log_line` writes a line of the hook's.
    """

    node: Node
    job: Job
    slurm_conf: SlurmConf
    environ: Mapping[str, str]
    record_outcomes: Callable[[Sequence[Outcome]], None]
    write_log_line: Callable[[str], None]


class AfterLeaseFacts(msgspec.Struct, frozen=True):
    """prolog.py, step.py: a job once the core has served it, and why nothing may be staged now."""

    node: Node
    job: Job
    limit: HookDeadlines
    refusal: Declined | None


class StepPart(msgspec.Struct, frozen=True):
    """What a feature shows a step: lines for the companion, and what became of each request.

    `local_paths` are the paths, in the comment's order, at which all of it is read from this node.
    """

    lines: list[LineFields]
    outcomes: list[RequestOutcome]
    local_paths: tuple[str, ...] = ()


class TendFacts(msgspec.Struct, frozen=True):
    """tend.py: the node whose minute it is; `config` is None if it cannot be used.

    `is_feature_host`: a feature has its host here, and Slurm calls no hook.
    """

    places: NodePaths
    clock: Clock
    config: Config | None
    is_feature_host: bool


class PeerServiceFacts(msgspec.Struct, frozen=True):
    """service.py: the node whose peer service is asked."""

    cache: Cache
    places: NodePaths


class ServiceRoute(msgspec.Struct, frozen=True):
    """A path that another node may get; its group `key` is what the session must be for.

    `open_reply` finds the answer: bytes, or a file, which is sent when its turn to upload comes. It
    raises FileNotFoundError, NotADirectoryError, records.DamagedRecord where there is none.
    """

    path: re.Pattern[str]
    open_reply: Callable[[PeerServiceFacts, re.Match[str]], bytes | BinaryIO]
