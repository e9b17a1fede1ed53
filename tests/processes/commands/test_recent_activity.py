"""Who was called lately, how jobs began, what failed: from marks, processes and the log's end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commands import NOW, Site
from forestage.commands import recent_activity
from forestage.events import CopyOutcome, EventRecord, RequestOutcome, append_events
from forestage.hooks import boundary


def mark(site: Site, hook: boundary.HookKind, job: int, ago: float = 60.0) -> None:
    """As the hook leaves it."""
    site.places.run.mkdir(parents=True, exist_ok=True)
    boundary.record_call(hook, {"SLURM_JOB_ID": str(job)}, str(site.places.run))
    os.utime(site.places.hook_call_mark(hook), (NOW - ago, NOW - ago))


def step(site: Site, job: int, title: str = "slurmstepd: [{}.0]") -> None:
    """A step manager on this node, as /proc shows it."""
    process = site.places.root / f"proc/{1000 + job}"
    process.mkdir(parents=True)
    (process / "cmdline").write_text(title.format(job))
    (process / "status").write_text("Uid:\t0\t0\t0\t0\n")


def start(result: str, ago: float, **facts: str) -> EventRecord:
    outcome = RequestOutcome(result, key="k", **facts)  # type: ignore[arg-type]
    return EventRecord(time=NOW - ago, hook="step", job=7, outcome=outcome)


def test_status_shows_the_last_prolog_and_epilog_with_time_and_job(site: Site) -> None:
    assert "neither Prolog nor Epilog since the node booted" in site.run("status").stdout
    mark(site, "prolog", 41, ago=180)
    mark(site, "epilog", 40, ago=5)
    found = site.json("status")["calls"]
    assert found["prolog"] == {"time": NOW - 180, "job": 41}
    assert (found["epilog"]["job"], found["companion"], found["missed"]) == (40, None, [])
    assert "Prolog 3m ago (job 41), Epilog 5s ago (job 40)\n" in site.run("status").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="a step manager is root's")
def test_running_job_newer_than_the_last_prolog_is_reported_as_missed(site: Site) -> None:
    mark(site, "prolog", 41)
    for job in (40, 41, 43):
        step(site, job)
    step(site, 99, title="bash")
    assert site.json("status")["calls"]["missed"] == [43]
    assert "for job 43, which runs here (see `forestage check`)" in site.run("status").stdout
    assert "state=not-called " in site.run("status", "--oneline").stdout
    mark(site, "prolog", 43)
    assert "state=ok " in site.run("status", "--oneline").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="a step manager is root's")
def test_job_without_a_prolog_is_reported_as_missed_also_after_job_ids_wrapped_around(
    site: Site,
) -> None:
    """With MaxJobId passed, or slurmctld's state lost; the job of before still runs."""
    mark(site, "prolog", 67043327)
    mark(site, "prolog", 5)
    site.places.hook_call_mark("prolog").write_text(f"{5:10} {int(NOW) - 60:10}")
    slurmd(site, 3600, "slurmstepd: [67043327.batch]", pid=901)
    slurmd(site, 30, "slurmstepd: [67043327.4]", pid=902)
    slurmd(site, 30, "slurmstepd: [5.batch]", pid=903)
    found = site.json("status")["calls"]
    assert (found["prolog"]["job"], found["missed"]) == (5, [])
    slurmd(site, 20, "slurmstepd: [6.batch]", pid=904)
    assert site.json("status")["calls"]["missed"] == [6]


def test_hit_ratio_and_last_failure_come_from_the_last_week(site: Site) -> None:
    week = 7 * 86400
    append_events(
        site.places.events,
        [
            start("hit", week + 1),
            start("failed", week + 1, reason="io"),
            start("hit", 500),
            start("failed", 400, reason="cache-not-ours", detail="\x1b[31m"),
            start("hit", 300),
            start("declined", 200, reason="off"),
        ],
    )
    found = site.json("status")["starts"]
    assert (found["tried"], found["hits"], found["since"]) == (3, 2, NOW - 500)
    assert (found["failure"]["reason"], found["failure"]["job"]) == ("cache-not-ours", 7)
    printed = site.run("status").stdout
    assert "67%, 2 of 3 starts since " in printed
    assert "cache-not-ours (job 7): \\x1b[31m" in printed


def test_recent_starts_are_counted_from_the_end_of_a_long_event_log(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [start("hit", 900 - number) for number in range(100)]
    append_events(site.places.events, events[:50])
    older: Path = site.places.events.with_name("events.jsonl.1")
    site.places.events.rename(older)
    append_events(site.places.events, events[50:])
    assert recent_activity.count_recent_starts(site.places.events, NOW).tried == 100
    length = older.stat().st_size // 50
    monkeypatch.setattr(recent_activity, "MAX_LOG_BYTES", 60 * length + 1)
    assert recent_activity.count_recent_starts(site.places.events, NOW).tried in (60, 61)
    monkeypatch.setattr(recent_activity, "MAX_LOG_BYTES", 10 * length + 1)
    assert recent_activity.count_recent_starts(site.places.events, NOW).tried in (9, 10)


@pytest.mark.parametrize("text", ["", "x" * 50, "12\n13", "-3"])
def test_hook_mark_with_garbage_is_shown_as_job_0(site: Site, text: str) -> None:
    mark(site, "prolog", 41)
    site.places.hook_call_mark("prolog").write_text(text)
    assert site.json("status")["calls"]["prolog"]["job"] == 0
    mark(site, "prolog", 42)
    assert site.json("status")["calls"]["prolog"]["time"] == NOW - 60


@pytest.mark.parametrize(
    ("trouble", "code", "expected"),
    [
        (lambda site: None, 0, "forestage state=ok full=0% "),
        (lambda site: site.configure("enabled: false\n"), 0, "forestage state=off "),
        (lambda site: site.node.cache.root.chmod(0o777), 5, "forestage state=unusable full=- "),
    ],
)
def test_status_oneline_prints_one_line_that_begins_with_the_state(
    site: Site, trouble: object, code: int, expected: str
) -> None:
    site.node.cache.prepare(False)
    assert callable(trouble)
    trouble(site)
    done = site.run("status", "--oneline")
    assert (done.exit_code, len(done.stdout.splitlines())) == (code, 1)
    assert done.stdout.startswith(expected)


def test_status_oneline_prints_the_documented_fields(site: Site) -> None:
    site.publish(site.image("a.sqsh"))
    words = [word.partition("=")[0] for word in site.run("status", "--oneline").stdout.split()]
    assert words == [
        *("forestage", "state", "full", "reclaimable", "entries", "damaged", "leases"),
        *("copies", "hits", "companion", "failure"),
    ]


def slurmd(site: Site, began: float, title: str = "/usr/sbin/slurmd\0-D", pid: int = 900) -> None:
    """A process of Slurm's that began so many seconds before NOW, as /proc shows it."""
    process = site.places.root / f"proc/{pid}"
    process.mkdir(parents=True, exist_ok=True)
    (process / "cmdline").write_text(title)
    (process / "status").write_text("Uid:\t0\t0\t0\t0\n")
    ticks = round((5000.0 - began) * os.sysconf("SC_CLK_TCK"))
    (process / "stat").write_text(f"{pid} (slurm) d) S {' '.join(['0'] * 18)} {ticks} 0")
    (site.places.root / "proc/uptime").write_text("5000.00 1.00\n")


def loaded(site: Site, ago: float) -> None:
    site.places.run.mkdir(parents=True, exist_ok=True)
    site.places.loaded.touch()
    os.utime(site.places.loaded, (NOW - ago, NOW - ago))


STEP = "slurmstepd: [43.{}]"


@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's processes are root's")
@pytest.mark.parametrize(
    ("title", "began", "last", "said"),
    [
        ("/usr/sbin/slurmd\0-D", 600, 599.8, ""),
        ("/usr/sbin/slurmd\0-D", 600, 4000, "slurmd has not loaded forestage's SPANK plugin"),
        ("/usr/sbin/slurmd\0-D", 10, 4000, ""),  # it may be about to
        ("/usr/sbin/sshd\0-D", 600, 4000, ""),
        (STEP.format(0), 600, 4000, "step 43.0 runs without forestage's SPANK plugin"),
        (STEP.format("batch"), 600, 4000, "step 43.batch runs without forestage's SPANK plugin"),
        (STEP.format("extern"), 600, 4000, ""),
    ],
)
def test_status_reports_a_slurmd_or_step_that_began_without_loading_the_companion(
    site: Site, title: str, began: float, last: float, said: str
) -> None:
    loaded(site, last)
    mark(site, "prolog", 43)
    slurmd(site, began, title)
    assert site.json("status")["no_companion"] == said
    line = site.run("status", "--oneline").stdout
    assert line.startswith("forestage state=no-companion " if said else "forestage state=ok ")
    assert (f'why="{said}"' in line) == bool(said)
    assert (f"{said} (see `forestage check`)" in site.run("status").stdout) == bool(said)


@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's processes are root's")
@pytest.mark.parametrize(
    ("redirect", "line", "state"),
    [
        ("auto", "optional /usr/lib/forestage/spank/forestage.so", "no-companion"),
        ("auto", "", "ok"),  # the admin has taken it out: `auto` is bind
        ("bind", "optional /usr/lib/forestage/spank/forestage.so", "ok"),
        ("spank", "", "no-companion"),
    ],
)
def test_status_reports_a_missing_companion_only_if_the_redirect_setting_needs_the_companion(
    site: Site, redirect: str, line: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    site.configure(f"redirect: {redirect}\n")
    conf = site.places.root / "etc/slurm/slurm.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text("ClusterName=x\n")
    conf.with_name("plugstack.conf").write_text(f"{line}\n")
    loaded(site, 4000)
    slurmd(site, 600)
    assert f"state={state} " in site.run("status", "--oneline").stdout


def copy(result: str, ago: float, **facts: str) -> EventRecord:
    outcome = CopyOutcome(result, key="k", **facts)  # type: ignore[arg-type]
    return EventRecord(time=NOW - ago, hook="stager", job=7, outcome=outcome)


FAILED = {"reason": "io", "detail": "[Errno 5] Input/output error"}


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([copy("copied", 900), copy("failed", 300, **FAILED)], "failing"),
        ([copy("failed", 900, **FAILED), copy("copied", 300)], "ok"),
        ([copy("failed", 900, **FAILED), copy("declined", 300, reason="no-room")], "failing"),
        ([copy("declined", 300, reason="source-error")], "ok"),
        ([copy("failed", 3601, **FAILED)], "ok"),
    ],
)
def test_status_is_failing_for_an_hour_after_a_failed_copy(
    site: Site, events: list[EventRecord], state: str
) -> None:
    site.node.cache.prepare(False)
    append_events(site.places.events, events)
    line = site.run("status", "--oneline").stdout
    assert line.startswith(f"forestage state={state} ")
    if state == "failing":
        assert "(io): [Errno 5] Input/output error" in line


def test_status_oneline_prints_the_age_of_the_last_failure(site: Site) -> None:
    append_events(site.places.events, [start("failed", 2 * 3600 + 300, reason="io")])
    assert "failure=io@2h5m" in site.run("status", "--oneline").stdout
