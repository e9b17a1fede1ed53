"""From event logs to the report's figures, and the command: no figure is better than the truth."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from forestage.clock import Clock
from forestage.commands.command_context import CommandContext, ExitStatus
from forestage.commands.event_counters import EventTally
from forestage.commands.main import main
from forestage.events import (
    BadEntryOutcome,
    CopyOutcome,
    EventHook,
    EventRecord,
    Outcome,
    ReleaseOutcome,
    RequestOutcome,
)
from forestage.features import report as reports
from forestage.features.report.figures import DAY, HOUR, MAX_PERIODS, SavingsReport
from forestage.features.report.sums import QUARTER
from forestage.paths import NodePaths

GIB = 1 << 30
NOW = 1_800_000_000.0
THEN = NOW - 10 * DAY
PATH = "/lustre/a.sqsh"
ALWAYS = reports.TimeWindow()


def event(
    hook: EventHook, outcome: Outcome, at: float = 0.0, job: int = 7, node: str = "n1"
) -> EventRecord:
    return EventRecord(time=THEN + at, hook=hook, job=job, outcome=outcome, node=node)


def hit(
    wait: float = 0.0, redirect: str = "mounted", path: str = PATH, size: int = GIB
) -> RequestOutcome:
    return RequestOutcome("hit", image=path, key=path, size=size, redirect=redirect, wait=wait)


def copy(seconds: float, path: str = PATH, size: int = GIB, peers: int = 0) -> CopyOutcome:
    return CopyOutcome("copied", image=path, key=path, size=size, copying=seconds, from_peers=peers)


def lines(*events: EventRecord) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in events)


def reported(
    *events: EventRecord, window: reports.TimeWindow = ALWAYS, offset: int = 0
) -> SavingsReport:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(lines(*events))
        return reports.make_report_from_logs([file.name], window, NOW, offset)


def of(user: str, outcome: Outcome, **changes: object) -> EventRecord:
    made = event("step", msgspec.structs.replace(outcome, **changes), job=hash(user) % 1000)
    return msgspec.structs.replace(made, user=user)


def test_report_sums_saved_time_for_each_user_image_partition_and_node() -> None:
    runs = (
        of("alice", hit(wait=1.0), baseline=10.0, redirect="spank"),
        of("alice", hit(wait=3.0, path="/lustre/b"), baseline=10.0, redirect="spank"),
        of("alice", hit(wait=1.0), redirect="spank"),  # on a node that has not measured it
        of("alice", RequestOutcome("declined", image=PATH, key="k", reason="deadline", wait=5.0)),
        of("bob", hit(wait=9.0), baseline=4.0, redirect="spank"),
        of("carol", hit(redirect="none"), baseline=10.0),  # nobody reads that copy
    )
    found = reported(*runs)
    assert [(one.name, one.starts, one.hits) for one in found.users] == [
        ("alice", 4, 3), ("bob", 1, 1), ("carol", 1, 1)
    ]  # fmt: skip
    assert [(one.local, one.measured, one.saved) for one in found.users] == [
        (3, 2, 16.0), (1, 1, -5.0), (0, 0, None)
    ]  # fmt: skip
    assert {one.name: one.saved for one in found.images} == {PATH: 4.0, "/lustre/b": 7.0}
    assert (found.all.saved, found.partitions[0].saved, found.nodes[0].saved) == (11.0,) * 3
    tally = EventTally()
    for run in runs:
        tally.add_event(run)
    assert tally.saved - tally.lost == found.all.saved, "as in the metrics"


def test_report_counts_saved_time_of_a_step_after_its_prolog_started_the_copy() -> None:
    """As `explain` shows it: the step found all of it here, and its copy was measured."""
    started = RequestOutcome("started", image=PATH, key=PATH, size=GIB, redirect="spank")
    step = hit(wait=0.5, redirect="spank")
    step = msgspec.structs.replace(step, baseline=8.0)
    found = reported(event("prolog", started), event("step", step))
    assert (found.all.saved, found.total.waited, found.total.hit) == (7.5, 1, 0)


def test_report_credits_read_through_with_the_time_until_the_copy_was_complete() -> None:
    through = RequestOutcome("through", image=PATH, key=PATH, size=GIB, redirect="spank")
    whole = copy(9.0)
    assert isinstance(whole, CopyOutcome)
    ended = msgspec.structs.replace(whole, wait=11.0, read_through=GIB // 2, read_straight=GIB // 8)
    found = reported(
        event("step", through, at=-50.0, job=9),  # its copy was complete before it was written
        event("step", through, at=10.0, job=1),
        event("step", through, at=12.0, job=2),
        event("step", through, at=10.0, job=1, node="n2"),
        event("stager", ended, at=20.0),
        event("stager", msgspec.structs.replace(ended, result="failed"), at=30.0, node="n2"),
        event("step", hit(redirect="spank"), at=40.0, job=3),
    )
    assert (found.through.steps, found.through.seconds) == (4, 18.0)
    assert found.through.ahead == pytest.approx(8.0, rel=0.021)
    assert (found.through.read, found.through.straight) == (GIB // 2, GIB // 8)
    assert (found.total.through, found.total.hit) == (4, 1)


def test_report_lists_failing_and_slow_nodes_first() -> None:
    found = reported(
        event("stager", copy(1.0), node="fast"),
        event("stager", copy(9.0), node="slow"),
        event("epilog", ReleaseOutcome("failed", reason="io"), node="broken"),
        event("prolog", hit(wait=2.0), node="fast"),
    )
    assert [one.name for one in found.nodes] == ["broken", "slow", "fast"]
    assert (found.nodes[0].failed, found.failed) == (1, {"io": 1})
    assert found.nodes[2].waits.most == pytest.approx(2.0, rel=0.021)


def test_report_separates_missed_deadlines_from_excluded_starts() -> None:
    found = reported(event("prolog", MISSED), event("prolog", RULE, job=8))
    assert (found.original, found.excluded) == ({"deadline": 1}, {"registry": 1})
    assert (found.total.original, found.total.excluded) == (1, 1)


# --- what counts


@dataclass(frozen=True)
class Counted:
    why: str
    runs: tuple[tuple[EventHook, Outcome], ...]
    starts: str
    kept_off: int = 0
    ratio: float | None = None


MISSED = RequestOutcome("declined", image=PATH, key="k", size=GIB, reason="deadline")
OFF = RequestOutcome("declined", image=PATH, key="k", size=GIB, reason="off")
RULE = RequestOutcome("declined", request="docker://x", reason="registry")
BROKEN = RequestOutcome("failed", reason="cache-not-mounted")
MINE = RequestOutcome("copied", image=PATH, key=PATH, size=GIB, redirect="mounted")


@pytest.mark.parametrize(
    "case",
    [
        Counted("a hit", (("prolog", hit()),), "hit", GIB, 1.0),
        Counted("nobody reads that copy", (("prolog", hit(redirect="none")),), "hit", 0, 1.0),
        Counted(
            "the first step is the Prolog's start",
            (("prolog", MINE), ("step", hit(redirect="kept"))),
            "waited",
            0,
            0.0,
        ),
        Counted("a copy in vain is no hit", (("prolog", MISSED),), "original", 0, 0.0),
        Counted("our failure is a miss", (("prolog", BROKEN),), "original", 0, 0.0),
        Counted("a rule's is none", (("prolog", RULE),), "excluded"),
        Counted("nor is the job's own wish", (("prolog", OFF),), "excluded"),
        Counted("what peers gave", (("stager", copy(1.0, peers=GIB // 4)),), "", GIB // 4),
    ],
    ids=lambda case: case.why,
)
def test_report_classifies_each_start_by_its_outcomes_as_the_tally_does(case: Counted) -> None:
    found = reported(*(event(hook, outcome) for hook, outcome in case.runs))
    kinds = ("hit", "joined", "through", "waited", "shared", "original", "excluded")
    assert [kind for kind in kinds if getattr(found.total, kind)] == case.starts.split()
    assert sum(found.kept_off.values()) == case.kept_off
    assert found.hit_ratio == case.ratio
    tally = EventTally()
    for hook, outcome in case.runs:
        tally.add_event(event(hook, outcome))
    assert tally.hit_ratio == case.ratio, "as in `status`, and in the metrics"


def test_report_estimate_is_the_hits_copy_time_minus_all_waiting() -> None:
    found = reported(
        event("stager", copy(10.0)),
        event("prolog", msgspec.structs.replace(MINE, wait=10.0)),
        *(event("prolog", hit(wait=0.5), job=job) for job in range(10, 14)),
        event("prolog", msgspec.structs.replace(MISSED, wait=3.0), job=20),
    )
    assert found.estimate is not None
    assert found.estimate.gross == pytest.approx(4 * 10.0)
    assert found.estimate.net == pytest.approx(40 - 10 - 4 * 0.5 - 3)
    assert found.total.seconds == 15.0


@pytest.mark.parametrize(
    "useless",
    [
        None,
        msgspec.structs.replace(copy(1000.0), resumed=GIB // 2),
        CopyOutcome("failed", image=PATH, key=PATH, size=GIB, reason="io", copying=1000.0),
    ],
    ids=["none", "resumed", "failed"],
)
def test_report_has_no_estimate_without_a_complete_copy(useless: Outcome | None) -> None:
    copies = [event("stager", useless)] if useless else []
    assert reported(*copies, event("prolog", hit())).estimate is None


def test_report_lists_data_and_images_with_their_kind() -> None:
    directory = RequestOutcome(
        "hit", image="/lustre/set", key="s", size=GIB, redirect="spank", data=True
    )
    found = reported(event("prolog", hit()), event("step", directory, 1.0, job=8))
    assert {one.name: one.kind for one in found.images} == {PATH: "image", "/lustre/set": "data"}
    assert found.total.hit == 2


def test_report_counts_a_job_on_two_nodes_as_two_starts() -> None:
    found = reported(event("prolog", MINE), event("prolog", MINE, node="n2"))
    assert (found.total.cold, len(found.nodes)) == (2, 2)


def test_event_without_a_node_is_assigned_to_the_latest_node_of_its_log() -> None:
    found = reported(
        event("prolog", hit()), event("verify", BadEntryOutcome("bad"), job=0, node="")
    )
    assert [one.name for one in found.nodes] == ["n1"]


# --- which events count


def test_report_window_includes_its_start_and_excludes_its_end() -> None:
    window = reports.TimeWindow(THEN, THEN + 60)
    found = reported(
        *(event("prolog", hit(), at, job=int(at) + 99) for at in (-1, 0, 59, 60)), window=window
    )
    assert (found.total.hit, found.outside_window, found.events) == (2, 2, 2)


def test_step_after_a_prolog_before_the_window_counts_as_no_start() -> None:
    runs = (event("prolog", MINE, at=-5), event("step", hit(redirect="kept"), at=5))
    found = reported(*runs, window=reports.TimeWindow(since=THEN))
    assert found.total.tried + found.total.excluded == 0
    assert sum(found.kept_off.values()) == 0


@pytest.mark.parametrize("time", [0.0, 86400.0, NOW + 2 * DAY, 9e15, 1e300, -5.0])
def test_event_with_an_impossible_time_is_counted_apart_from_starts_and_periods(
    time: float,
) -> None:
    wrong = msgspec.structs.replace(event("prolog", hit(), job=8), time=time)
    found = reported(event("prolog", hit()), wrong)
    assert (found.impossible_time, found.total.hit) == (1, 1)
    assert len(found.periods) == 1


# --- medians and periods


@given(st.lists(st.floats(1e-4, 1e8), min_size=1, max_size=60))
@settings(max_examples=60)
def test_reported_median_and_percentile_waits_are_at_most_two_percent_too_high(
    waits: list[float],
) -> None:
    found = reported(*(event("prolog", hit(wait=wait), job=n) for n, wait in enumerate(waits)))
    ordered = sorted(waits)
    most = ordered[math.ceil(0.95 * len(waits)) - 1]
    assert found.waits.count == len(waits)
    for true, shown in (
        (statistics.median_low(waits), found.waits.median),
        (most, found.waits.most),
    ):
        assert shown is not None
        assert true * (1 - 1e-9) <= shown <= true * 1.0201


@given(st.integers(0, 6 * 364 * DAY), st.integers(-56, 56), st.integers(0, 7 * DAY))
@settings(max_examples=60)
def test_report_periods_are_limited_in_number_and_contain_every_start_once(
    span: int, zone: int, first: int
) -> None:
    begin = 1_580_000_000.0 + first
    times = (begin, begin + span, begin + span)
    runs = [
        msgspec.structs.replace(event("prolog", hit(), job=n), time=time)
        for n, time in enumerate(times)
    ]
    found = reported(*runs, offset=zone * QUARTER)
    starts = [one.start for one in found.periods]
    assert sum(one.hit for one in found.periods) == 3
    assert starts == [starts[0] + n * found.width for n in range(len(starts))]
    assert starts[0] <= begin < starts[0] + found.width
    assert len(starts) <= MAX_PERIODS + 1


@pytest.mark.parametrize("offset", [0, 2 * HOUR, -5 * HOUR, 5 * HOUR + 1800])
def test_report_periods_begin_at_local_midnight_and_weeks_on_monday(offset: int) -> None:
    def first_start(days: int) -> str:
        runs = [event("prolog", hit(), -n * DAY, job=n) for n in range(days)]
        start = reported(*runs, offset=offset).periods[0].start
        return datetime.fromtimestamp(start + offset, timezone.utc).strftime("%A %H:%M")

    assert first_start(30).endswith(" 00:00")
    assert first_start(200) == "Monday 00:00"


def test_report_without_events_has_no_ratio_savings_or_periods() -> None:
    found = reported()
    assert (found.hit_ratio, found.all.saved, found.periods, found.first) == (None, None, (), None)
    assert json.loads(reports.format_json(found))["events"] == 0


# --- the command


class Now(Clock):
    def wall(self) -> float:
        return NOW


@pytest.fixture
def context(tmp_path: Path) -> CommandContext:
    return CommandContext(NodePaths(tmp_path), Now())


def ran(context: CommandContext, *words: str | Path, given: bytes = b"") -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)], obj=context, input=given)


def as_report(context: CommandContext, *words: str | Path, given: bytes = b"") -> SavingsReport:
    done = ran(context, "--json", *words, given=given)
    assert done.exit_code == 0, done.output
    return msgspec.json.decode(done.stdout, type=SavingsReport)


def test_report_counts_and_skips_damaged_log_lines(context: CommandContext, tmp_path: Path) -> None:
    good = [lines(event("prolog", hit(), n, job=n)) for n in range(3)]
    damage = (b"{}\n", b"\xff\xfe\n", b"[" * 5000 + b"\n", b"\n", b'{"time": 1')
    (tmp_path / "log").write_bytes(
        good[0] + damage[0] + damage[1] + good[1] + damage[2] + damage[3] + good[2] + damage[4]
    )
    found = as_report(context, tmp_path / "log")
    assert (found.logs.damaged_lines, found.total.hit) == (5, 3)


def test_report_counts_a_log_given_twice_once(context: CommandContext, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(lines(event("prolog", hit())))
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").write_bytes((tmp_path / "a").read_bytes())
    found = as_report(context, *(tmp_path / name for name in "aabc"))
    assert (found.logs.logs, found.logs.duplicates, found.total.hit) == (1, 2, 1)
    assert as_report(context, "-", given=(tmp_path / "a").read_bytes()).total.hit == 1


def test_report_reads_the_rotated_log_before_the_current_log(
    context: CommandContext, tmp_path: Path
) -> None:
    """Otherwise a step whose Prolog is in the rotated log would be a second start."""
    (tmp_path / "n.jsonl.1").write_bytes(lines(event("prolog", hit())))
    (tmp_path / "n.jsonl").write_bytes(lines(event("step", hit(redirect="kept"))))
    found = as_report(context, tmp_path / "n.jsonl", tmp_path / "n.jsonl.1")
    assert (found.logs.logs, found.total.hit) == (2, 1)


def test_report_without_arguments_reads_this_nodes_logs(context: CommandContext) -> None:
    assert as_report(context).logs.logs == 0
    log = context.places.events
    log.parent.mkdir(parents=True)
    log.write_bytes(lines(event("prolog", hit())))
    log.with_name(log.name + ".1").write_bytes(lines(event("prolog", hit(), at=-9, job=6)))
    found = as_report(context)
    assert (found.logs.logs, found.total.hit) == (2, 2)


def test_report_of_a_missing_log_exits_with_not_found_and_writes_no_page(
    context: CommandContext, tmp_path: Path
) -> None:
    done = ran(context, tmp_path / "none", "-o", tmp_path / "page")
    assert done.exit_code == ExitStatus.NOT_FOUND
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize(
    ("since", "starts"),
    [
        ("2d", 1),
        ("30d", 2),
        ("2026-01-01", 2),
        ("2027-01-14T00:00:00Z", 1),
        ("2027-01-14T02:00:00+02:00", 1),
    ],
)
def test_report_since_accepts_a_date_or_an_age(
    context: CommandContext, tmp_path: Path, since: str, starts: int
) -> None:
    late = event("prolog", hit(), at=9 * DAY, job=8)
    (tmp_path / "log").write_bytes(lines(event("prolog", hit()), late))
    assert as_report(context, "--since", since, tmp_path / "log").total.hit == starts


@pytest.mark.parametrize(
    "words",
    [
        ("--since", "20260501"),
        ("--since", "yesterday"),
        ("--until", "0001-01-01T00:00:00+23:00"),
        ("--until", "9999-12-31T23:59:59-11:00"),
        ("--until", ""),
        ("--since", "1d", "--until", "2d"),
    ],
)
def test_report_refuses_an_ambiguous_or_impossible_time_range(
    context: CommandContext, words: tuple[str, ...]
) -> None:
    assert ran(context, "--json", *words).exit_code == ExitStatus.USAGE


def test_report_since_without_a_unit_exits_with_the_known_units(context: CommandContext) -> None:
    done = ran(context, "--since", "7")
    assert done.exit_code == ExitStatus.USAGE
    assert "7 has no unit: 7d is days, 7h hours ago" in done.output


def test_report_prints_text_unless_output_or_json_is_given(
    context: CommandContext, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    shown = msgspec.structs.replace(hit(wait=1.0), redirect="spank", baseline=31.0)
    log.write_bytes(lines(event("step", shown), event("prolog", MISSED, job=8)))
    text = ran(context, log).stdout
    assert re.search(r"saved +30 s, summed over nodes; measured: 1 of 1 start from a copy", text)
    assert re.search(r"hit ratio +50.0 %, 1 of 2 starts", text)
    assert re.search(r"in vain +deadline 1", text)
    assert re.search(r"(?m)^  NODE +STARTS +HITS +KEPT OFF +COPIES AT +95% WAIT +FAILURES$", text)
    assert re.search(r"(?m)^  USER +STARTS +HITS +KEPT OFF +SAVED$", text)
    assert re.search(r"(?m)^  n1 +2 +1 ", text)
    assert "<" not in text
    assert "no events" in ran(context).stdout
    assert ran(context, log, "-o", "-").stdout.startswith("<!DOCTYPE html>")


def test_report_names_the_missing_folder_of_its_output_file(
    context: CommandContext, tmp_path: Path
) -> None:
    done = ran(context, "-o", tmp_path / "none/r.html")
    assert done.exit_code == ExitStatus.NOT_FOUND
    assert f"{tmp_path}/none is not there" in done.output


def test_report_output_replaces_a_file_but_writes_through_a_link_or_fifo(
    context: CommandContext, tmp_path: Path
) -> None:
    page, link, pipe = tmp_path / "page.html", tmp_path / "link", tmp_path / "pipe"
    assert ran(context, "-o", page).exit_code == 0
    before = page.stat().st_ino
    link.symlink_to(page)
    assert ran(context, "--json", "-o", link).exit_code == 0
    assert link.is_symlink()
    assert json.loads(page.read_bytes())["events"] == 0
    assert page.stat().st_ino == before
    assert ran(context, "-o", page).exit_code == 0
    assert page.stat().st_ino != before, "replaced as a whole"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert ran(context, "--json", "-o", pipe).exit_code == 0
        assert os.read(reader, 1) == b"{"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
