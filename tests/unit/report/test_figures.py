"""From event logs to the report's figures, and the command: no figure is better than the truth."""

from __future__ import annotations

import json
import os
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

from forestage import report as reports
from forestage.admin.tally import Tally
from forestage.cli.main import main
from forestage.cli.world import Exit, World
from forestage.clock import Clock
from forestage.events import Copied, Event, Handled, Hook, Outcome
from forestage.paths import Places
from forestage.report.figures import DAY, HOUR, MAX_PERIODS, Report
from forestage.report.sums import QUARTER

GIB = 1 << 30
NOW = 1_800_000_000.0
THEN = NOW - 10 * DAY
PATH = "/lustre/a.sqsh"
ALWAYS = reports.Window()


def event(hook: Hook, outcome: Outcome, at: float = 0.0, job: int = 7, node: str = "n1") -> Event:
    return Event(time=THEN + at, hook=hook, job=job, outcome=outcome, node=node)


def hit(wait: float = 0.0, redirect: str = "mounted", path: str = PATH, size: int = GIB) -> Outcome:
    return Handled("hit", image=path, key=path, size=size, redirect=redirect, wait=wait)


def copy(seconds: float, path: str = PATH, size: int = GIB, peers: int = 0) -> Outcome:
    return Copied("copied", image=path, key=path, size=size, copying=seconds, from_peers=peers)


def lines(*events: Event) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in events)


def reported(*events: Event, window: reports.Window = ALWAYS, offset: int = 0) -> Report:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(lines(*events))
        return reports.from_logs([file.name], window, NOW, offset)


def of(user: str, outcome: Outcome, **changes: object) -> Event:
    made = event("step", msgspec.structs.replace(outcome, **changes), job=hash(user) % 1000)
    return msgspec.structs.replace(made, user=user)


def test_each_user_has_what_their_measured_starts_saved_less_all_waiting() -> None:
    found = reported(
        of("alice", hit(wait=1.0), baseline=10.0),
        of("alice", hit(wait=1.0), baseline=10.0),
        of("alice", hit(wait=1.0)),  # on a node that has not measured it
        of("alice", Handled("declined", image=PATH, key="k", reason="deadline", wait=5.0)),
        of("bob", hit()),
        of("carol", hit(redirect="none"), baseline=10.0),  # nobody reads that copy
    )
    assert [(one.user, one.starts, one.hits) for one in found.users] == [
        ("alice", 4, 3), ("bob", 1, 1), ("carol", 1, 1)
    ]  # fmt: skip
    assert [(one.local, one.measured, one.saved) for one in found.users] == [
        (3, 2, 12.0), (1, 0, None), (0, 0, None)
    ]  # fmt: skip


# --- what counts


@dataclass(frozen=True)
class Counted:
    why: str
    runs: tuple[tuple[Hook, Outcome], ...]
    starts: str
    kept_off: int = 0
    ratio: float | None = None


MISSED = Handled("declined", image=PATH, key="k", size=GIB, reason="deadline")
OFF = Handled("declined", image=PATH, key="k", size=GIB, reason="off")
RULE = Handled("declined", request="docker://x", reason="registry")
BROKEN = Handled("failed", reason="cache-not-mounted")
MINE = Handled("copied", image=PATH, key=PATH, size=GIB, redirect="mounted")


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
def test_start_is_counted_as_what_it_was(case: Counted) -> None:
    found = reported(*(event(hook, outcome) for hook, outcome in case.runs))
    kinds = ("hit", "joined", "through", "waited", "shared", "original", "excluded")
    assert [kind for kind in kinds if getattr(found.total, kind)] == case.starts.split()
    assert sum(found.kept_off.values()) == case.kept_off
    assert found.hit_ratio == case.ratio
    tally = Tally()
    for hook, outcome in case.runs:
        tally.add(event(hook, outcome))
    assert tally.hit_ratio == case.ratio, "as in `status`, and in the metrics"


def test_savings_are_time_of_copies_less_all_waiting() -> None:
    found = reported(
        event("stager", copy(10.0)),
        event("prolog", msgspec.structs.replace(MINE, wait=10.0)),
        *(event("prolog", hit(wait=0.5), job=job) for job in range(10, 14)),
        event("prolog", msgspec.structs.replace(MISSED, wait=3.0), job=20),
    )
    assert found.savings is not None
    assert found.savings.gross == pytest.approx(4 * 10.0)
    assert found.savings.net == pytest.approx(40 - 10 - 4 * 0.5 - 3)
    assert found.total.seconds == 15.0


@pytest.mark.parametrize(
    "useless",
    [
        None,
        msgspec.structs.replace(copy(1000.0), resumed=GIB // 2),
        Copied("failed", image=PATH, key=PATH, size=GIB, reason="io", copying=1000.0),
    ],
    ids=["none", "resumed", "failed"],
)
def test_logs_without_whole_copy_have_no_savings(useless: Outcome | None) -> None:
    copies = [event("stager", useless)] if useless else []
    assert reported(*copies, event("prolog", hit())).savings is None


def test_data_is_told_from_images() -> None:
    directory = Handled("hit", image="/lustre/set", key="s", size=GIB, redirect="spank", data=True)
    found = reported(event("prolog", hit()), event("step", directory, 1.0, job=8))
    assert {one.path: one.kind for one in found.images} == {PATH: "image", "/lustre/set": "data"}
    assert found.total.hit == 2


def test_job_on_two_nodes_is_two_starts() -> None:
    found = reported(event("prolog", MINE), event("prolog", MINE, node="n2"))
    assert (found.total.cold, found.nodes) == (2, 2)


# --- which events count


def test_window_contains_its_beginning_and_not_its_end() -> None:
    window = reports.Window(THEN, THEN + 60)
    found = reported(
        *(event("prolog", hit(), at, job=int(at) + 99) for at in (-1, 0, 59, 60)), window=window
    )
    assert (found.total.hit, found.outside_window, found.events) == (2, 2, 2)


def test_step_after_prolog_before_window_is_no_start() -> None:
    runs = (event("prolog", MINE, at=-5), event("step", hit(redirect="kept"), at=5))
    found = reported(*runs, window=reports.Window(since=THEN))
    assert found.total.tried + found.total.excluded == 0
    assert sum(found.kept_off.values()) == 0


@pytest.mark.parametrize("time", [0.0, 86400.0, NOW + 2 * DAY, 9e15, 1e300, -5.0])
def test_impossible_time_makes_no_start_and_no_period(time: float) -> None:
    wrong = msgspec.structs.replace(event("prolog", hit(), job=8), time=time)
    found = reported(event("prolog", hit()), wrong)
    assert (found.impossible_time, found.total.hit) == (1, 1)
    assert len(found.periods) == 1


# --- medians and periods


@given(st.lists(st.floats(1e-4, 1e8), min_size=1, max_size=60))
@settings(max_examples=60)
def test_median_is_at_most_two_percent_too_high(waits: list[float]) -> None:
    found = reported(*(event("prolog", hit(wait=wait), job=n) for n, wait in enumerate(waits)))
    true = statistics.median_low(waits)
    assert found.warm.count == len(waits)
    assert found.warm.median is not None
    assert true * (1 - 1e-9) <= found.warm.median <= true * 1.0201


@given(st.integers(0, 6 * 364 * DAY), st.integers(-56, 56), st.integers(0, 7 * DAY))
@settings(max_examples=60)
def test_periods_are_few_and_contain_every_start_once(span: int, zone: int, first: int) -> None:
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
def test_days_begin_at_local_midnight_and_weeks_on_monday(offset: int) -> None:
    def first_start(days: int) -> str:
        runs = [event("prolog", hit(), -n * DAY, job=n) for n in range(days)]
        start = reported(*runs, offset=offset).periods[0].start
        return datetime.fromtimestamp(start + offset, timezone.utc).strftime("%A %H:%M")

    assert first_start(30).endswith(" 00:00")
    assert first_start(200) == "Monday 00:00"


def test_no_event_is_a_report_without_figures() -> None:
    found = reported()
    assert (found.hit_ratio, found.savings, found.periods, found.first) == (None, None, (), None)
    assert json.loads(reports.as_json(found))["events"] == 0


# --- the command


class Now(Clock):
    def wall(self) -> float:
        return NOW


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Places(tmp_path), Now())


def ran(world: World, *words: str | Path, given: bytes = b"") -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)], obj=world, input=given)


def as_report(world: World, *words: str | Path, given: bytes = b"") -> Report:
    done = ran(world, "--json", *words, given=given)
    assert done.exit_code == 0, done.output
    return msgspec.json.decode(done.stdout, type=Report)


def test_damaged_lines_are_counted_and_skipped(world: World, tmp_path: Path) -> None:
    good = [lines(event("prolog", hit(), n, job=n)) for n in range(3)]
    damage = (b"{}\n", b"\xff\xfe\n", b"[" * 5000 + b"\n", b"\n", b'{"time": 1')
    (tmp_path / "log").write_bytes(
        good[0] + damage[0] + damage[1] + good[1] + damage[2] + damage[3] + good[2] + damage[4]
    )
    found = as_report(world, tmp_path / "log")
    assert (found.logs.damaged_lines, found.total.hit) == (5, 3)


def test_log_named_twice_counts_once(world: World, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(lines(event("prolog", hit())))
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").write_bytes((tmp_path / "a").read_bytes())
    found = as_report(world, *(tmp_path / name for name in "aabc"))
    assert (found.logs.logs, found.logs.duplicates, found.total.hit) == (1, 2, 1)
    assert as_report(world, "-", given=(tmp_path / "a").read_bytes()).total.hit == 1


def test_rotated_log_is_read_before_current_one(world: World, tmp_path: Path) -> None:
    """Otherwise a step whose Prolog is in the rotated log would be a second start."""
    (tmp_path / "n.jsonl.1").write_bytes(lines(event("prolog", hit())))
    (tmp_path / "n.jsonl").write_bytes(lines(event("step", hit(redirect="kept"))))
    found = as_report(world, tmp_path / "n.jsonl", tmp_path / "n.jsonl.1")
    assert (found.logs.logs, found.total.hit) == (2, 1)


def test_command_without_logs_reads_this_nodes(world: World) -> None:
    assert as_report(world).logs.logs == 0
    log = world.places.events
    log.parent.mkdir(parents=True)
    log.write_bytes(lines(event("prolog", hit())))
    log.with_name(log.name + ".1").write_bytes(lines(event("prolog", hit(), at=-9, job=6)))
    found = as_report(world)
    assert (found.logs.logs, found.total.hit) == (2, 2)


def test_missing_log_ends_command_without_page(world: World, tmp_path: Path) -> None:
    done = ran(world, tmp_path / "none", "-o", tmp_path / "page")
    assert done.exit_code == Exit.NOT_FOUND
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
def test_since_is_date_or_age(world: World, tmp_path: Path, since: str, starts: int) -> None:
    late = event("prolog", hit(), at=9 * DAY, job=8)
    (tmp_path / "log").write_bytes(lines(event("prolog", hit()), late))
    assert as_report(world, "--since", since, tmp_path / "log").total.hit == starts


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
def test_ambiguous_time_is_refused(world: World, words: tuple[str, ...]) -> None:
    assert ran(world, "--json", *words).exit_code == Exit.USAGE


def test_output_replaces_files_and_not_links_or_devices(world: World, tmp_path: Path) -> None:
    page, link, pipe = tmp_path / "page.html", tmp_path / "link", tmp_path / "pipe"
    assert ran(world, "-o", page).exit_code == 0
    before = page.stat().st_ino
    link.symlink_to(page)
    assert ran(world, "--json", "-o", link).exit_code == 0
    assert link.is_symlink()
    assert json.loads(page.read_bytes())["events"] == 0
    assert page.stat().st_ino == before
    assert ran(world, "-o", page).exit_code == 0
    assert page.stat().st_ino != before, "replaced as a whole"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert ran(world, "--json", "-o", pipe).exit_code == 0
        assert os.read(reader, 1) == b"{"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
