"""Events: each is one line, whatever the user has written, and none is lost."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage import events
from forestage.events import (
    CopyOutcome,
    EventRecord,
    Outcome,
    ReleaseOutcome,
    RequestOutcome,
    append_events,
    event_log,
    format_summary,
    read_events,
)
from forestage.paths import NodePaths
from forestage.slurm.hints import JobHints
from forestage.slurm.job import Job
from forestage.system.as_user import User
from forestage.units import MAX_TEXT, make_printable

JOB = Job(
    id=7,
    user=User("alice", 1, 1),
    node="n1",
    partition="gpu",
    work_dir="/",
    requests=(),
    saves=None,
    hints=JobHints(),
)


def event(job: int = 7, outcome: Outcome | None = None) -> EventRecord:
    return EventRecord(time=1.0, hook="prolog", job=job, outcome=outcome or RequestOutcome("hit"))


@given(st.text())
def test_any_text_in_an_event_is_made_printable_short_and_encodable(text: str) -> None:
    shown = make_printable(text)
    assert shown.isprintable()
    assert len(shown) <= 10 * MAX_TEXT
    shown.encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/lustre/ü b", "/lustre/ü b"),
        ("a\nb", "a\\nb"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\udcff", "\\udcff"),
        ("\u202e", "\\u202e"),
        ("x" * 1000, "x" * 1000),
        ("/" + "x" * 4000 + " is empty", "/" + "x" * 498 + "…" + "x" * 491 + " is empty"),
    ],
)
def test_users_text_is_escaped_in_messages(text: str, shown: str) -> None:
    assert make_printable(text) == shown


def test_log_line_of_a_copy_is_logfmt() -> None:
    outcome = RequestOutcome(
        "copied", request="/a", image="/lustre/a", key="0a", size=5, redirect="mounted", wait=0.25
    )
    assert format_summary(JOB, [outcome], 0.5) == (
        "user=alice image=/lustre/a key=0a result=copied redirect=mounted bytes=5 wait=0.250s"
        " total=0.500s"
    )


def test_log_line_of_an_epilog_and_of_no_outcome_is_logfmt() -> None:
    released = ReleaseOutcome("released", unmounted=2, evicted=("0a", "0b"))
    assert format_summary(JOB, [released], 0.1) == (
        "user=alice result=released unmounted=2 evicted=0a,0b total=0.100s"
    )
    assert format_summary(JOB, [], 0.0) == "user=alice total=0.000s"


def test_step_number_is_recorded_only_in_events_of_a_step(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    step = msgspec.structs.replace(JOB, step=3)
    events.record_outcomes(places, 1.0, "step", step, [RequestOutcome("hit")], 0.1)
    events.record_outcomes(places, 1.0, "prolog", JOB, [RequestOutcome("started")], 0.1)
    assert [(one.hook, one.step) for one in read_events(places.events)] == [
        ("step", 3),
        ("prolog", None),
    ]
    assert b"step" not in places.events.read_bytes().splitlines()[1]


@given(st.text(), st.text(), st.lists(st.text(), max_size=3).map(tuple))
def test_users_text_breaks_no_log_line(asked: str, detail: str, problems: tuple[str, ...]) -> None:
    job = msgspec.structs.replace(JOB, hints=JobHints(problems=problems))
    line = format_summary(job, [RequestOutcome("declined", request=asked, detail=detail)], 1.0)
    assert line.isprintable()
    assert line.endswith(" total=1.000s")


def test_users_text_forges_no_field_of_a_log_line() -> None:
    asked = '/a" result=hit image="/b'
    line = format_summary(JOB, [RequestOutcome("declined", request=asked)], 1.0)
    assert '" result=hit image="' not in line


def test_appended_events_are_read_in_order_of_writing(tmp_path: Path) -> None:
    file = tmp_path / "log/events.jsonl"
    append_events(file, [event(1), event(2)])
    append_events(file, [event(3)])
    assert [one.job for one in read_events(file)] == [1, 2, 3]
    assert file.stat().st_mode & 0o777 == 0o640
    assert file.parent.stat().st_mode & 0o777 == 0o750


def test_appending_no_events_creates_no_log_file(tmp_path: Path) -> None:
    append_events(tmp_path / "log/events.jsonl", [])
    assert list(tmp_path.iterdir()) == []
    assert list(read_events(tmp_path / "log/events.jsonl")) == []


@pytest.mark.parametrize(
    "garbage", [b"{\n", b"\n", b"null\n", b"\xff\n", b'{"job":1}\n', b"\0" * 512 + b"\n"]
)
def test_damaged_line_of_the_event_log_is_skipped(tmp_path: Path, garbage: bytes) -> None:
    file = tmp_path / "events.jsonl"
    append_events(file, [event(1)])
    with file.open("ab") as handle:
        handle.write(garbage)
    append_events(file, [event(2)])
    assert [one.job for one in read_events(file)] == [1, 2]


def test_event_after_a_line_cut_short_by_a_crash_is_read(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    append_events(file, [event(1)])
    os.truncate(file, file.stat().st_size - 3)
    append_events(file, [event(2)])
    assert [one.job for one in read_events(file)] == [2]


def test_full_event_log_is_rotated_and_the_older_file_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "ROTATE_BYTES", 200)
    file = tmp_path / "events.jsonl"
    for job in range(20):
        append_events(file, [event(job)])
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]
    assert file.stat().st_size < 400
    jobs = [one.job for one in read_events(file)]
    assert jobs == list(range(jobs[0], 20))


def test_no_event_is_lost_when_two_hooks_rotate_the_log_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events.jsonl"
    append_events(file, [event(job) for job in range(20)])
    flock = fcntl.flock

    def meanwhile(fd: int, operation: int) -> None:
        """Another hook saw the full log as well, and was faster."""
        file.rename(tmp_path / "events.jsonl.1")
        append_events(file, [event(20)])
        flock(fd, operation)

    monkeypatch.setattr(event_log, "ROTATE_BYTES", 200)
    monkeypatch.setattr(fcntl, "flock", meanwhile)
    append_events(file, [event(21)])
    assert [one.job for one in read_events(file)] == list(range(22))


def test_each_event_is_appended_by_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O_APPEND keeps two hooks' lines apart only if each is written at once."""
    written: list[bytes] = []
    write = os.write

    def noting(fd: int, data: bytes) -> int:
        written.append(data)
        return write(fd, data)

    monkeypatch.setattr(os, "write", noting)
    append_events(tmp_path / "events.jsonl", [event(1), event(2)])
    assert [data.count(b"\n") for data in written] == [1, 1]
    assert all(data.endswith(b"\n") for data in written)


RESULTS = st.sampled_from(["hit", "copied", "declined"])
EVICTED = st.lists(st.text("0a"), max_size=2).map(tuple)
OUTCOMES = (
    st.builds(
        RequestOutcome, RESULTS, request=st.text().map(make_printable), size=st.integers(0, 2**60)
    )
    | st.builds(CopyOutcome, RESULTS, size=st.integers(0, 2**60), evicted=EVICTED)
    | st.builds(ReleaseOutcome, st.just("released"), evicted=EVICTED)
)


@given(OUTCOMES)
def test_any_event_is_read_back_unchanged(outcome: Outcome) -> None:
    line = msgspec.json.encode(event(1, outcome))
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=EventRecord).outcome == outcome
