"""The report claims nothing that the events do not show, whatever is in the logs."""

from __future__ import annotations

import csv
import io
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from forestage import report as work
from forestage import report_sums
from forestage.cli.exits import Exit
from forestage.cli.main import main
from forestage.cli.world import World
from forestage.clock import Clock
from forestage.events import Event, Hook, Outcome
from forestage.paths import Places
from forestage.report import DAY, HOUR, PERIODS, Report, fitting, periods
from forestage.report_logs import Read
from forestage.report_sums import OTHERS, QUARTER, Slot, Spread, Sums, Window

GIB = 1 << 30
NOW = 1_800_000_000.0
THEN = NOW - 10 * DAY
PATH = "/lustre/a.sqsh"
ALWAYS = Window()


def event(hook: Hook, outcome: Outcome, at: float = 0.0, job: int = 7, node: str = "n1") -> Event:
    return Event(time=THEN + at, hook=hook, job=job, outcome=outcome, node=node)


def hit(wait: float = 0.0, redirect: str = "mounted", path: str = PATH, size: int = GIB) -> Outcome:
    return Outcome("hit", image=path, key=path, size=size, redirect=redirect, wait=wait)


def copy(seconds: float, path: str = PATH, size: int = GIB, peers: int = 0) -> Outcome:
    return Outcome(
        "copied", image=path, key=path, size=size, bytes=size, copying=seconds, from_peers=peers
    )


def summed(*events: Event, window: Window = ALWAYS) -> Sums:
    sums = Sums(window, NOW)
    for one in events:
        sums.add(one, "log")
    return sums


def reported(*events: Event, window: Window = ALWAYS, offset: int = 0) -> Report:
    return work.report(summed(*events, window=window), Read(), offset)


# --- what counts


@dataclass(frozen=True)
class Counted:
    why: str
    runs: tuple[tuple[Hook, Outcome], ...]
    starts: str
    kept_off: int = 0
    ratio: float | None = None


MISSED = Outcome("declined", image=PATH, key="k", size=GIB, reason="deadline")
OFF = Outcome("declined", image=PATH, key="k", size=GIB, reason="off")
RULE = Outcome("declined", asked="docker://x", reason="registry")
BROKEN = Outcome("failed", reason="cache-not-mounted")
MINE = Outcome("copied", image=PATH, key=PATH, size=GIB, bytes=GIB, redirect="mounted")


@pytest.mark.parametrize(
    "case",
    [
        Counted("a hit", (("prolog", hit()),), "hit", GIB, 1.0),
        Counted("nobody reads that copy", (("prolog", hit(redirect="none")),), "hit", 0, 1.0),
        Counted(
            "the first step is the Prolog's start",
            (("prolog", MINE), ("step", hit(redirect="kept"))),
            "cold",
            0,
            0.0,
        ),
        Counted("a copy in vain is no hit", (("prolog", MISSED),), "original", 0, 0.0),
        Counted("our failure is a miss", (("prolog", BROKEN),), "original", 0, 0.0),
        Counted("a rule's is none", (("prolog", RULE),), "aside"),
        Counted("nor is the job's own wish", (("prolog", OFF),), "aside"),
        Counted("what peers gave", (("stager", copy(1.0, peers=GIB // 4)),), "", GIB // 4),
    ],
    ids=lambda case: case.why,
)
def test_no_start_is_better_than_it_was(case: Counted) -> None:
    found = reported(*(event(hook, outcome) for hook, outcome in case.runs))
    assert [kind for kind, number in found.starts.items() if number] == case.starts.split()
    assert sum(found.kept_off.values()) == case.kept_off
    assert found.hit_ratio == case.ratio


def test_the_time_saved_is_that_of_copies_here_less_all_waiting() -> None:
    found = reported(
        event("stager", copy(10.0)),
        event("prolog", msgspec.structs.replace(MINE, wait=10.0)),
        *(event("prolog", hit(wait=0.5), job=job) for job in range(10, 14)),
        event("prolog", msgspec.structs.replace(MISSED, wait=3.0), job=20),
    )
    assert found.saved is not None
    assert found.saved.gross == pytest.approx(4 * 10.0)
    assert found.saved.seconds == pytest.approx(40 - 10 - 4 * 0.5 - 3)
    assert found.waited == 15.0


def test_without_a_copy_nothing_is_said_to_be_saved() -> None:
    assert reported(event("prolog", hit())).saved is None


@pytest.mark.parametrize(
    "useless",
    [
        msgspec.structs.replace(copy(1000.0), resumed=GIB // 2),
        Outcome("failed", image=PATH, key=PATH, size=GIB, reason="io", copying=1000.0),
    ],
    ids=["resumed", "failed"],
)
def test_a_copy_that_did_not_run_whole_is_no_measure(useless: Outcome) -> None:
    assert reported(event("stager", useless), event("prolog", hit())).saved is None


def test_an_image_has_its_own_pace_only_after_several_copies() -> None:
    slow = [event("stager", copy(100.0, path="/s"), n) for n in range(3)]
    fast = [event("stager", copy(1.0, path=f"/f{n}"), n) for n in range(9)]
    start = event("prolog", hit(path="/s"))
    one, three = reported(*slow[:1], *fast, start), reported(*slow, *fast, start)
    assert one.saved is not None
    assert three.saved is not None
    assert one.saved.gross == pytest.approx(1.0)
    assert three.saved.gross == pytest.approx(100.0)


def test_waiting_that_was_longer_is_told_as_a_loss() -> None:
    found = reported(event("stager", copy(1.0)), event("prolog", hit(wait=9.0)))
    assert found.saved is not None
    assert found.saved.seconds == pytest.approx(-8.0)


def test_the_same_job_on_two_nodes_is_two_starts() -> None:
    runs: tuple[tuple[Hook, Outcome], ...]
    runs = (("prolog", MINE), ("step", hit(redirect="kept")))
    found = reported(
        *(event(hook, outcome, node=node) for hook, outcome in runs for node in ("n1", "n2"))
    )
    assert (found.starts["cold"], found.starts["hit"], found.nodes) == (2, 0, 2)


# --- which events count


def test_a_window_holds_its_beginning_and_not_its_end() -> None:
    window = Window(THEN, THEN + 60)
    found = reported(
        *(event("prolog", hit(), at, job=int(at) + 99) for at in (-1, 0, 59, 60)), window=window
    )
    assert (found.starts["hit"], found.left.outside, found.events) == (2, 2, 2)


def test_a_step_is_told_from_its_prolog_before_the_window() -> None:
    runs = (event("prolog", MINE, at=-5), event("step", hit(redirect="kept"), at=5))
    found = reported(*runs, window=Window(since=THEN))
    assert sum(found.starts.values()) == 0
    assert sum(found.kept_off.values()) == 0


@pytest.mark.parametrize("time", [0.0, 86400.0, NOW + 2 * DAY, 9e15, 1e300, -5.0])
def test_a_clock_that_was_wrong_makes_no_start_and_no_endless_plot(time: float) -> None:
    wrong = msgspec.structs.replace(event("prolog", hit(), job=8), time=time)
    found = reported(event("prolog", hit()), wrong)
    assert (found.left.undated, found.starts["hit"], len(found.periods)) == (1, 1, 1)


def test_a_clock_that_goes_back_is_told() -> None:
    times = (0.0, 5000.0, 4900.0, 1000.0, 2000.0)
    found = reported(*(event("prolog", hit(), at, job=n) for n, at in enumerate(times)))
    assert (found.left.went_back, found.starts["hit"]) == (1, 5)


@pytest.mark.parametrize(
    "outcome",
    [
        hit(size=-GIB),
        hit(size=10**400),
        hit(wait=-1.0),
        hit(wait=1e300),
        copy(-1.0),
        copy(1.0, peers=2 * GIB),
    ],
    ids=["size", "vast", "wait", "long", "copying", "peers"],
)
def test_figures_that_cannot_be_count_nowhere(outcome: Outcome) -> None:
    hook: Hook = "stager" if outcome.result == "copied" else "prolog"
    found = reported(event(hook, outcome))
    assert (found.left.unsound, found.events, found.waited) == (1, 0, 0.0)


def test_images_beyond_the_bound_are_added_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_sums, "IMAGES", 2)
    runs = [event("prolog", hit(path=f"/{n}"), job=n) for n in range(5)]
    sums = summed(*runs)
    found = work.report(sums, Read(), 0)
    assert [image.path for image in found.images] == ["/0", "/1", OTHERS]
    assert sum(image.kept_off for image in found.images) == 5 * GIB


def test_an_unknown_reason_makes_no_row_of_its_own() -> None:
    odd = [Outcome("declined", reason=f"reason {n}") for n in range(9)]
    assert reported(*(event("prolog", one) for one in odd)).reasons == {"other": 9}


# --- medians and periods


@given(st.lists(st.floats(1e-4, 1e12), min_size=1, max_size=60))
@settings(max_examples=60)
def test_a_median_is_at_most_two_percent_above_the_true_one(values: list[float]) -> None:
    spread = Spread()
    for value in values:
        spread.add(value)
    found, true = spread.median(), statistics.median_low(values)
    assert found is not None
    assert true * (1 - 1e-9) <= found <= true * 1.0201


@given(st.integers(0, 10**9), st.integers(-56, 56), st.integers(0, 10**6))
@settings(max_examples=60)
def test_periods_are_few_and_hold_every_slot_once(span: int, zone: int, first: int) -> None:
    slots = {first: Slot(hit=1), first + span // QUARTER: Slot(hit=2)}
    width = fitting(first * QUARTER, first * QUARTER + span)
    found = list(periods(slots, width, zone * QUARTER))
    assert sum(one.hit for one in found) == sum(one.hit for one in slots.values())
    assert [one.start for one in found] == [found[0].start + n * width for n in range(len(found))]
    assert found[0].start <= first * QUARTER < found[0].start + width
    assert len(found) <= PERIODS + 1


@pytest.mark.parametrize("offset", [0, 2 * HOUR, -5 * HOUR, 5 * HOUR + 1800])
def test_days_begin_at_the_readers_midnight_and_weeks_on_monday(offset: int) -> None:
    slots = {int(THEN // QUARTER): Slot(hit=1)}
    (day,) = periods(slots, DAY, offset)
    assert work.moment(day.start, offset).time().isoformat() == "00:00:00"
    (week,) = periods(slots, 7 * DAY, offset)
    assert work.moment(week.start, offset).strftime("%A %H:%M") == "Monday 00:00"


def test_nothing_at_all_is_a_report_too() -> None:
    found = reported()
    assert (found.hit_ratio, found.saved, found.periods, found.first) == (None, None, (), None)
    assert json.loads(work.as_json(found))["events"] == 0
    assert work.as_csv(found).count(b"\n") == 1


# --- the command


class Now(Clock):
    def wall(self) -> float:
        return NOW


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Places(tmp_path), Now())


def ran(world: World, *words: str | Path, given: bytes = b"") -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)], obj=world, input=given)


def told(world: World, *words: str | Path, given: bytes = b"") -> Report:
    done = ran(world, "--json", *words, given=given)
    assert done.exit_code == 0, done.output
    return msgspec.json.decode(done.stdout, type=Report)


def lines(*events: Event) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in events)


def test_damaged_lines_are_told_and_the_rest_counts(world: World, tmp_path: Path) -> None:
    good = [lines(event("prolog", hit(), n, job=n)) for n in range(3)]
    damage = (b"{}\n", b"\xff\xfe\n", b"[" * 5000 + b"\n", b"\n", b'{"time": 1')
    (tmp_path / "log").write_bytes(
        good[0] + damage[0] + damage[1] + good[1] + damage[2] + damage[3] + good[2] + damage[4]
    )
    found = told(world, tmp_path / "log")
    assert (found.logs.damaged, found.starts["hit"]) == (5, 3)


def test_a_log_that_is_given_twice_counts_once(world: World, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(lines(event("prolog", hit())))
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").write_bytes((tmp_path / "a").read_bytes())
    found = told(world, *(tmp_path / name for name in "aabc"))
    assert (found.logs.logs, found.logs.twice, found.starts["hit"]) == (1, 2, 1)


def test_of_a_node_the_older_log_is_read_first(world: World, tmp_path: Path) -> None:
    """Else the step, whose Prolog stands in the older one, would be a second start."""
    (tmp_path / "n.jsonl.1").write_bytes(lines(event("prolog", hit())))
    (tmp_path / "n.jsonl").write_bytes(lines(event("step", hit(redirect="kept"))))
    found = told(world, tmp_path / "n.jsonl", tmp_path / "n.jsonl.1")
    assert (found.logs.logs, found.starts["hit"]) == (2, 1)


def test_without_a_name_this_nodes_logs_are_read_or_none(world: World) -> None:
    assert told(world).logs.logs == 0
    log = world.places.events
    log.parent.mkdir(parents=True)
    log.write_bytes(lines(event("prolog", hit())))
    log.with_name(log.name + ".1").write_bytes(lines(event("prolog", hit(), at=-9, job=6)))
    found = told(world)
    assert (found.logs.logs, found.starts["hit"]) == (2, 2)


def test_a_pipe_is_read_to_its_end(world: World) -> None:
    assert told(world, "-", given=lines(event("prolog", hit()))).starts["hit"] == 1


def test_a_log_that_is_not_there_ends_it(world: World, tmp_path: Path) -> None:
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
def test_since_is_a_date_or_how_long_ago(
    world: World, tmp_path: Path, since: str, starts: int
) -> None:
    late = event("prolog", hit(), at=9 * DAY, job=8)
    (tmp_path / "log").write_bytes(lines(event("prolog", hit()), late))
    assert told(world, "--since", since, tmp_path / "log").starts["hit"] == starts


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
def test_a_time_that_could_mean_something_else_is_refused(
    world: World, words: tuple[str, ...]
) -> None:
    assert ran(world, "--json", *words).exit_code == Exit.USAGE


def test_a_row_of_csv_is_a_period_and_adds_up(world: World, tmp_path: Path) -> None:
    runs = [event("prolog", hit(path="=1+2"), at=n * DAY, job=n) for n in range(9)]
    (tmp_path / "log").write_bytes(lines(*runs))
    made = ran(world, "--csv", tmp_path / "log").stdout
    rows = list(csv.DictReader(io.StringIO(made)))
    assert sum(int(row["hit"]) for row in rows) == 9
    assert sum(int(row["kept_off"]) for row in rows) == 9 * GIB
    assert "=" not in made, "a spreadsheet would run it"


def test_the_page_is_whole_or_not_there_and_no_device_is_replaced(
    world: World, tmp_path: Path
) -> None:
    page, link, pipe = tmp_path / "page.html", tmp_path / "link", tmp_path / "pipe"
    assert ran(world, "-o", page).exit_code == 0
    before = page.stat().st_ino
    link.symlink_to(page)
    assert ran(world, "--json", "-o", link).exit_code == 0
    assert link.is_symlink()
    assert json.loads(page.read_bytes())["events"] == 0
    assert page.stat().st_ino == before
    assert ran(world, "-o", page).exit_code == 0
    assert page.stat().st_ino != before, "put in its place"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert ran(world, "--csv", "-o", pipe).exit_code == 0
        assert os.read(reader, 5) == b"start"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
