"""Metrics of this node for Prometheus: counters of the event log, and the node's state.

`forestage metrics`, run by a timer, writes them to a file that node exporter's textfile collector
reads. No hook does: what a hook has to report is in the event log already. Label sets are bounded:
results, reasons and hooks are ours, and no job, user or image is ever a label.
"""

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from forestage import events, log
from forestage.cache import disk_errors
from forestage.cache.node import Node
from forestage.check import slurm_site as sites
from forestage.clock import Clock
from forestage.commands import status as node_status
from forestage.commands.command_context import insert_after
from forestage.commands.event_counters import WAIT_BOUNDS, EventTally, Histogram
from forestage.commands.status import NodeStatus
from forestage.config import Config, load_config, resolve_auto_redirect, switch
from forestage.errors import ConfigError, ForestageError
from forestage.events.reasons import collect_failures, collect_reasons
from forestage.features.contexts import MetricFamily, MetricsFacts, MetricsPart
from forestage.features.doors import METRICS_COUNT, METRICS_READ_METRICS, load_doors
from forestage.features.metrics import textfile
from forestage.paths import NodePaths
from forestage.system import records

LOCK_TIMEOUT = textfile.LOCK_TIMEOUT
PREFIX = "forestage_"
FILE_MODE = 0o644  # node exporter is a user of its own

REQUESTS = ("hit", "joined", "copied", "started", "through", "declined", "failed")
STARTS = (*REQUESTS, "excluded")
COPY_RESULTS = ("copied", "declined", "failed")
HOOKS = ("prolog", "step")
EVICTORS = ("prolog", "step", "stager", "epilog", "sweep")
ORIGINS = ("source", "peers", "others")
PHASES = ("queued", "copying", "publishing")
OTHER = "other"
"""For a reason that this release does not know: another one wrote the event."""


class MetricsError(ForestageError):
    """Nobody would read the metrics where they were to be written."""

    exit_code: ClassVar[int] = 6


class TallyRecord(msgspec.Struct):
    """tally.json. What was counted and how far the logs were read is one file: all or nothing."""

    tally: EventTally = msgspec.field(default_factory=EventTally)
    seen: dict[str, int] = {}


class MetricsExportFacts(msgspec.Struct, frozen=True):
    """Everything that is exported. `config` is None where it cannot be used.

    `status` is None where the node's state could not be read. `doubt` is since when the cache's
    disk is not trusted, in seconds since the epoch; 0 where it is. `swept` is when the last sweep
    was, 0 if none was since the node booted. `written` is now. `parts` are what features add.
    """

    tally: EventTally
    version: str
    off: bool
    config: Config | None = None
    status: NodeStatus | None = None
    doubt: float = 0.0
    swept: float = 0.0
    written: float = 0.0
    parts: tuple[MetricsPart, ...] = ()


@contextlib.contextmanager
def hold_metrics_lock(places: NodePaths) -> Iterator[None]:
    """Lets one run at a time read, count and write. Raises OSError, lock.LockTimeout."""
    with textfile.hold_metrics_lock(places, LOCK_TIMEOUT):
        yield


def count_new_events(places: NodePaths) -> EventTally:
    """Counts the events that no run has counted yet; as root, under `hold_metrics_lock`.

    Raises OSError.
    """
    record = _load_record(places.tally)
    for event in events.read_new_events(places.events, record.seen):
        record.tally.add_event(event)
    written = msgspec.to_builtins(record)
    for count in load_doors(METRICS_COUNT):
        written["tally"] |= count(places)
    records.write(places.tally, msgspec.json.encode(written))
    return record.tally


def _load_record(file: Path) -> TallyRecord:
    try:
        return records.load(file, TallyRecord)
    except FileNotFoundError:
        return TallyRecord()
    except records.DamagedRecord as damaged:
        # Prometheus takes counters that fall for new ones; no counters at all help nobody.
        log.write_log_line(f"metrics start again from zero: {damaged}", by_slurm=False)
        return TallyRecord()


def has_textfile_directory(places: NodePaths) -> bool:
    """Whether node exporter's directory is there. Raises OSError."""
    try:
        path = load_config(places.etc).node_config.metrics.textfile
    except ConfigError:
        path = textfile.find_last_textfile(places)
    return path is not None and (places.root / path.lstrip("/")).parent.is_dir()


def write_metrics(
    places: NodePaths, clock: Clock, version: str, conf: str = "", is_shown: bool = False
) -> bytes:
    """Writes the file that node exporter reads, if one is configured; returns its text.

    `conf` is $SLURM_CONF or "": what `redirect: auto` means depends on it. `is_shown`: the caller
    prints the text. Raises OSError and lock.LockTimeout; ConfigError, once the file says so too;
    MetricsError where nobody would read either.
    """
    config, wrong = None, None
    try:
        config = load_config(places.etc).node_config
        config = resolve_auto_redirect(config, sites.read_node_companion_state(places, conf).state)
    except ConfigError as error:
        wrong = error
    with hold_metrics_lock(places):
        tally, status = count_new_events(places), None
        if config is not None:
            # The cache's disk may be what is wrong; then the rest is wanted all the more.
            with contextlib.suppress(OSError, ForestageError):
                status = node_status.read_node_status(Node.from_config(config, places, clock), conf)
        off = bool(switch.find_off_reason(places, config or Config(), clock.wall()))
        since = disk_errors.read_state(places).since
        swept = read_last_sweep_time(places)
        facts = MetricsFacts(places, config, status, tally, clock.monotonic())
        parts = _list_parts(facts)
        about = config, status, since, swept, clock.wall(), parts
        written = format_metrics(MetricsExportFacts(tally, version, off, *about))
        # Who reads the last one is to know that the configuration is broken.
        path = textfile.find_last_textfile(places) if config is None else config.metrics.textfile
        textfile.replace_last_textfile(places, path)
        if path is not None:
            file = places.root / path.lstrip("/")
            try:
                records.write(file, written, FILE_MODE)
            except FileNotFoundError:
                if is_shown and wrong is None:
                    return written
                hint = "install node exporter, or set metrics.textfile"
                raise wrong or MetricsError(f"{file.parent} is not there", hint) from None
    if wrong:
        raise wrong
    return written


def _list_parts(facts: MetricsFacts) -> tuple[MetricsPart, ...]:
    return tuple(read(facts) for read in load_doors(METRICS_READ_METRICS))


def read_last_sweep_time(places: NodePaths) -> float:
    """When it was, in seconds since the epoch; 0 if none was since the node booted."""
    try:
        return places.hook_call_mark("sweep").stat().st_mtime
    except OSError:
        return 0.0


def format_metrics(facts: MetricsExportFacts) -> bytes:
    """Pure: the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsCollector(facts))
    return generate_latest(registry)


class _MetricsCollector(Collector):
    def __init__(self, facts: MetricsExportFacts) -> None:
        self.facts = facts

    def collect(self) -> Iterator[Metric]:
        own = {one.name.removeprefix(PREFIX): one for one in self._list_own_metrics()}
        families = (family for part in self.facts.parts for family in part.families)
        added = [(one.after, {one.name: _make_family(one)}) for one in families]
        yield from insert_after(own, added).values()

    def _list_own_metrics(self) -> Iterator[Metric]:
        yield from list_state_metrics(self.facts)
        if self.facts.status is not None:
            yield from list_cache_metrics(self.facts.status)
        yield from list_counters(self.facts.tally)
        yield from list_histograms(self.facts.tally)


def list_state_metrics(facts: MetricsExportFacts) -> Iterator[Metric]:
    """Pure: the release, whether it works, and how it is configured."""
    config = facts.config
    info = {"version": facts.version}
    if config is not None:
        info |= {"redirect": config.redirect, "engine": config.engine}
    for part in facts.parts:
        info |= part.info
    yield InfoMetricFamily("forestage", "The release, and how it is configured.", value=info)
    text = "When these metrics were written."
    yield _make_gauge("written_timestamp_seconds", text, facts.written)
    yield _make_gauge("config_valid", "Whether the configuration can be used.", config is not None)
    yield _make_gauge(
        "switched_off", "Whether no job is served, by the file or `enabled`.", facts.off
    )
    found = facts.status
    usable = found is not None and not (found.unusable or found.blocked)
    text = "Whether copies can be made: the cache is mounted, answers, takes writes and has room."
    yield _make_gauge("cache_usable", text, usable)
    word = node_status.choose_state(found)[0] if found else ""
    states = {name: int(name == word) for name in node_status.STATE_NAMES}
    text = "What `forestage status` says of the node: the state that is 1."
    yield _make_labelled(GaugeMetricFamily, "state", text, "state", states)
    distrusted = "Whether no job is served until every entry was read, for errors of the disk."
    yield _make_gauge("disk_doubt", distrusted, bool(facts.doubt))
    swept = "When the sweep ran last; 0 if it did not since the node booted."
    yield _make_gauge("last_sweep_timestamp_seconds", swept, facts.swept)
    if facts.doubt:
        since = "When the last of these errors was seen."
        yield _make_gauge("disk_doubt_timestamp_seconds", since, facts.doubt)


def list_cache_metrics(status: NodeStatus) -> Iterator[Metric]:
    """Pure: the cache, its room, and who uses it now."""
    if status.room is not None and status.disk is not None:
        found = status.room
        yield _make_gauge(
            "cache_bytes", "What the cache takes, copies under way included.", found.used
        )
        yield _make_gauge("cache_max_bytes", "The most it may take (max_size).", found.max_size)
        yield _make_gauge("cache_low_watermark_bytes", "Where evicting at rest stops.", found.low)
        kinds = {"data": status.data, "image": max(0, found.used - status.data)}
        of_kind = "What each kind takes of that; directories and mounted files are data."
        yield _make_labelled(GaugeMetricFamily, "kind_bytes", of_kind, "kind", kinds)
        yield _make_gauge("data_max_bytes", "The most that data may take (data.share).", found.data)
        yield _make_gauge("disk_free_bytes", "Free on the cache's disk.", found.free)
        yield _make_gauge(
            "disk_min_free_bytes", "What stays free there (min_free).", found.min_free
        )
        yield _make_gauge("disk_bytes", "The size of that disk.", status.disk.total)
    numbers = msgspec.structs.asdict(status.entries)
    total, data = numbers.pop("total"), numbers.pop("data")
    yield _make_gauge("entries", "Entries in the cache.", total)
    kinds = {"data": data, "image": total - data}
    yield _make_labelled(
        GaugeMetricFamily, "entries_of_kind", "Entries by what they are.", "kind", kinds
    )
    in_state = "Entries that are leased, pinned, superseded, damaged; one may be several."
    yield _make_labelled(GaugeMetricFamily, "entries_in_state", in_state, "state", numbers)
    yield _make_gauge("leases", "Jobs that hold a lease.", len(status.leases))
    yield _make_gauge("leases_damaged", "Leases that cannot be read.", len(status.problems))
    if status.leases:
        oldest = min(one.since for one in status.leases)
        yield _make_gauge(
            "oldest_lease_timestamp_seconds", "When the oldest lease was taken.", oldest
        )
    yield _make_gauge("redirects", "Paths that show their local copy.", len(status.redirects))
    called = {
        name: call.time
        for name, call in (
            ("prolog", status.calls.prolog),
            ("epilog", status.calls.epilog),
            ("companion", status.calls.companion),
        )
        if call
    }
    last = "When Slurm called the hook last, or loaded the companion, since boot."
    yield _make_labelled(GaugeMetricFamily, "last_call_timestamp_seconds", last, "hook", called)
    missed = "Jobs that run here though no Prolog of forestage ran for them."
    yield _make_gauge("jobs_not_called", missed, len(status.calls.missed))
    phases = dict.fromkeys(PHASES, 0)
    for copy in status.copies:
        phases[copy.phase] += 1
    yield _make_labelled(GaugeMetricFamily, "copies_under_way", "Copies by phase.", "phase", phases)


def list_counters(tally: EventTally) -> Iterator[Metric]:
    """Pure: what only grows. Every series is there at once, so that the first error is a growth."""
    for name, text, asked in (
        ("requests", "Images and data that jobs and steps asked for.", tally.requests),
        ("data_requests", "Those of them that were for data.", tally.of_data),
    ):
        family = CounterMetricFamily(f"forestage_{name}", text, labels=("hook", "result"))
        for hook in HOOKS:
            for result, number in _with_zeros(REQUESTS, asked.get(hook, {})).items():
                family.add_metric((hook, result), number)
        yield family
    starts = _with_zeros(STARTS, tally.starts)
    reasons, failures = collect_reasons(), collect_failures()
    declined = _count_by_reason(tally.declined, sorted(reasons.keys() - failures), reasons)
    errors = _count_by_reason(tally.errors, sorted(failures), reasons)
    copied = _with_zeros(ORIGINS, tally.copied)
    bad = _with_zeros(("sweep", "verify"), tally.bad)
    spared = _with_zeros(("hit", "joined"), tally.spared)
    spared |= {by: copied[by] for by in ("peers", "others")}
    through = _with_zeros(("copy", "source"), tally.read_through)
    for name, text, label, numbers in (
        ("starts", "Images that jobs and their further steps began with.", "result", starts),
        ("declined", "Requests not served, by a rule or the user's mistake.", "reason", declined),
        ("errors", "Failures of the node's or forestage's own.", "reason", errors),
        ("copies", "Copies that have ended.", "result", _with_zeros(COPY_RESULTS, tally.copies)),
        ("copied_bytes", "Bytes copied into the cache.", "from", copied),
        ("spared_bytes", "Bytes not read from the shared file system.", "by", spared),
        ("read_through_bytes", "Bytes read of copies before they were complete.", "from", through),
        ("bad_entries", "Entries with wrong bytes, by who found them.", "by", bad),
        (
            "evictions",
            "Entries evicted, by the hook.",
            "hook",
            _with_zeros(EVICTORS, tally.evicted),
        ),
    ):
        yield _make_labelled(CounterMetricFamily, name, text, label, numbers)
    for name, text, grown in (
        ("saved_seconds", "What measured starts saved, where their copy was faster.", tally.saved),
        ("lost_seconds", "What measured starts lost, where their copy was slower.", tally.lost),
        ("swept_leases", "Leases released by the sweep: their Epilog never ran.", tally.swept),
    ):
        yield CounterMetricFamily(f"forestage_{name}", text, value=grown)


def list_histograms(tally: EventTally) -> Iterator[Metric]:
    """Pure: how long jobs waited, and how fast copies were."""
    waits: dict[tuple[str, ...], Histogram] = {}
    for hook in HOOKS:
        waits[(hook,)] = tally.waits.get(hook) or Histogram.make_empty(WAIT_BOUNDS)
    yield _make_histogram(
        "wait_seconds", "What staging one image took, of a hook.", ("hook",), waits
    )
    whole = "The rates of whole copies."
    yield _make_histogram("copy_rate_bytes_per_second", whole, (), {(): tally.rates})


def _make_histogram(
    name: str, text: str, labels: tuple[str, ...], found: Mapping[tuple[str, ...], Histogram]
) -> Metric:
    made = HistogramMetricFamily(f"forestage_{name}", text, labels=labels)
    for values, one in found.items():
        # As Prometheus has them: each with all that is below it.
        names = (*map(str, one.bounds), "+Inf")
        buckets = list(zip(names, map(float, accumulate(one.counts)), strict=True))
        made.add_metric(values, buckets, one.sum)
    return made


def _make_family(one: MetricFamily) -> Metric:
    """Return a feature's family as Prometheus' library has it. Pure."""
    if one.histogram is not None:
        return _make_histogram(one.name, one.text, (), {(): one.histogram})
    family = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
    if one.label:
        return _make_labelled(family, one.name, one.text, one.label, one.values)
    return family(f"{PREFIX}{one.name}", one.text, value=float(one.value))


def _make_gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"forestage_{name}", text, value=float(value))


def _make_labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    numbers: Mapping[str, int] | Mapping[str, float],
) -> Metric:
    made = family(f"forestage_{name}", text, labels=(label,))
    for value, number in numbers.items():
        made.add_metric((value,), number)
    return made


def _count_by_reason(
    found: Mapping[str, int], expected: Iterable[str], reasons: Container[str]
) -> dict[str, int]:
    """Pure: the counts by reason; 0 for each that is `expected`, since its first must be a growth.

    A reason of another release is not a label: labels are bounded by `reasons`, which this release
    knows.
    """
    known = {reason: number for reason, number in found.items() if reason in reasons}
    other = sum(number for reason, number in found.items() if reason not in reasons)
    return dict.fromkeys(expected, 0) | known | {OTHER: other}


def _with_zeros(names: Iterable[str], numbers: Mapping[str, int]) -> dict[str, int]:
    return {name: numbers.get(name, 0) for name in names}
