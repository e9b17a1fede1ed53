"""A job's number comes again, with another user's job or a later run; the first left records."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.cache.job_notes import JobNotes
from forestage.events import ReleaseOutcome, RequestOutcome
from forestage.hooks import background_prolog, epilog
from forestage.system import lock
from node import ALICE, BOB, Node, Ran, content

JOB = 7
START = "SLURM_JOB_START_TIME"


@pytest.fixture
def image(node: Node) -> Path:
    """One that a job of Alice's uses here, whose Epilog has not come."""
    path = node.put("alice/image.sqsh")
    assert run(node, "prolog", path, start="100").code == 0
    assert node.held(JOB).start == 100
    return path


def run(
    node: Node,
    hook: str,
    asked: Path | None = None,
    comment: str | None = None,
    bob: bool = False,
    start: str = "",
) -> Ran:
    """A hook of the job; `start` as Slurm says it, or not at all."""
    environ = node.environ(JOB, asked, BOB if bob else ALICE, comment)
    environ |= {START: start} if start else {}
    return node._run(hook, environ, None)  # type: ignore[arg-type]


def begin_step(node: Node) -> None:
    """A step manager of the job's number on the node."""
    process = node.places.root / "proc/4711"
    process.mkdir(parents=True)
    (process / "status").write_text("Uid:\t0\t0\t0\t0\n")
    (process / "cmdline").write_text(f"slurmstepd: [{JOB}.batch]")


def released(node: Node) -> list[str]:
    """The users whose jobs of that number were released."""
    from forestage import events

    found = events.read_events(node.places.events)
    return [one.user for one in found if isinstance(one.outcome, ReleaseOutcome) and one.job == JOB]


def test_prolog_without_an_image_releases_another_users_job_of_the_same_number(
    node: Node, image: Path
) -> None:
    (node.places.leases / f"{JOB}.nodes").write_text(f"n[1-2]\n{ALICE.uid} 100")
    assert run(node, "prolog", bob=True).code == 0
    assert (node.lease(JOB), node.binds()) == (None, {})
    assert [*node.places.leases.iterdir()] == []
    assert node.shows_source(image)
    assert released(node) == [ALICE.name]


def test_prolog_of_a_reused_number_has_its_own_lease_and_no_notes_of_the_first_job(
    node: Node, image: Path
) -> None:
    node.leases.add_notes_and_keep_lease(node.held(JOB), off=True, say=("a line for Alice",))
    own = node.put("bob/image.sqsh", content(2), BOB)
    assert run(node, "prolog", own, bob=True).said == ("copied", "")
    assert node.held(JOB).user.uid == BOB.uid
    assert [use.path for use in node.held(JOB).uses] == [str(own)]
    assert node.leases.read_notes(JOB) == JobNotes()
    assert node.shows_source(image)
    assert released(node) == [ALICE.name]


def test_prolog_of_a_reused_number_keeps_the_new_jobs_node_list(node: Node, image: Path) -> None:
    node.places.loaded.touch()
    own = node.environ(JOB, user=BOB) | {"SLURM_JOB_NODELIST": "n[1,3]"}
    node._run("prolog", own, None)
    assert node.leases.read_nodelist(JOB, BOB.uid) == "n[1,3]"


@pytest.mark.parametrize("start", ["", "100"])
def test_second_prolog_of_the_same_run_keeps_lease_and_redirect(
    node: Node, image: Path, start: str
) -> None:
    lease = node.held(JOB)
    run(node, "prolog", image, start=start)
    assert (node.held(JOB), released(node)) == (lease, [])
    assert node.shows_entry(image, lease.uses[0].key)


def test_prolog_of_a_later_run_releases_the_first_runs_lease_and_redirect(
    node: Node, image: Path
) -> None:
    run(node, "prolog", start="200")
    assert (node.lease(JOB), node.binds(), released(node)) == (None, {}, [ALICE.name])


@pytest.mark.parametrize("bob", [False, True])
def test_prolog_releases_nothing_of_a_job_with_a_running_step(
    node: Node, image: Path, bob: bool
) -> None:
    begin_step(node)
    lease = node.held(JOB)
    run(node, "prolog", start="200", bob=bob)
    assert (node.held(JOB), released(node)) == (lease, [])
    assert node.shows_entry(image, lease.uses[0].key)


def test_job_with_the_number_of_another_users_running_job_is_declined(
    node: Node, image: Path
) -> None:
    begin_step(node)
    lease, own = node.held(JOB), node.put("bob/image.sqsh", content(2), BOB)
    ran = run(node, "prolog", own, f"stage={own} stage-wait=3", bob=True)
    assert ran.code == 0
    assert {(one.result, one.reason) for one in ran.outcomes} == {("declined", "other-job")}
    assert run(node, "epilog", bob=True).code == 0
    assert node.held(JOB) == lease
    assert node.leases.read_notes(JOB) == JobNotes()
    assert node.shows_entry(image, lease.uses[0].key)
    assert node.shows_source(own)


def test_step_reads_no_hints_and_notes_of_another_users_job_of_the_same_number(
    spank: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    path = spank.put("alice/image.sqsh")
    assert spank.prolog(JOB, comment=f"stage={path} stage-wait=9").code == 0
    begin_step(spank)  # else a Prolog would have released it
    before = spank.held(JOB), spank.leases.read_notes(JOB)
    environ = spank.environ(JOB, user=BOB) | {"SLURM_STEP_ID": "0", "FORESTAGE_GROUPS": "4242"}
    spank._run("step", environ, None)
    printed = capfd.readouterr().out
    assert "alice" not in printed
    assert printed.splitlines()[-1] == "leave\tno-image"
    assert (spank.held(JOB), spank.leases.read_notes(JOB)) == before
    assert spank.outcomes("step", JOB) == ()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("late", "bob", "stays"),
    [
        ("", False, False),
        ("100", False, False),
        ("300", False, False),  # Slurm has moved the start: a node was booted for it
        ("50", False, True),
        ("100", True, True),
        ("", True, True),
    ],
)
def test_late_epilog_releases_nothing_of_a_later_job_of_the_same_number(
    node: Node, image: Path, late: str, bob: bool, stays: bool
) -> None:
    asking = node.places.images / f"{JOB}.asked"
    asking.parent.mkdir()
    asking.touch()
    assert run(node, "epilog", bob=bob, start=late).said == ("released", "")
    assert (node.lease(JOB) is not None) is stays
    assert asking.exists() is stays
    assert bool(node.binds()) is stays


def test_epilog_releases_nothing_of_a_later_job_that_began_while_waiting_for_the_lock(
    node: Node, image: Path, before: Callable[[object, str, Callable[[], object]], None]
) -> None:
    """A Prolog of that one had the lock."""
    own = node.put("bob/image.sqsh", content(2), BOB)
    began: list[bool] = []

    def begin() -> None:
        if not began:
            began.append(True)
            run(node, "prolog", own, bob=True)

    before(epilog, "record_last_use", begin)
    assert run(node, "epilog", start="100").code == 0
    assert node.outcomes("epilog", JOB)[-1].detail == epilog.OTHER_JOB_TEXT
    assert node.held(JOB).user.uid == BOB.uid
    assert node.shows_entry(own, node.held(JOB).uses[0].key)


@pytest.mark.parametrize(
    ("other", "ended"),
    [
        ({}, True),
        ({START: "100"}, True),
        ({START: "50"}, False),
        ({"SLURM_JOB_UID": str(BOB.uid)}, False),
    ],
)
def test_epilog_stops_no_prolog_of_a_later_job_of_the_same_number(
    node: Node, other: dict[str, str], ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = node.places.leases / f"{JOB}.prolog"
    mark.parent.mkdir(parents=True)
    mark.write_text(f"1 {ALICE.uid} 100")
    waited: list[str] = []
    monkeypatch.setattr(
        background_prolog, "wait_for_prolog", lambda mark, *_, **__: waited.append(mark)
    )
    environ = node.environ(JOB) | other
    background_prolog.stop_prolog(str(mark), environ)
    assert (waited == [str(mark)], mark.exists()) == (ended, not ended)


def test_prolog_keeps_the_mark_of_another_users_running_prolog(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may run; and this job's Prolog is not over with that one's work."""
    mark = node.places.leases / f"{JOB}.prolog"
    mark.parent.mkdir(parents=True)
    mark.write_text(f"{os.getpid()} {ALICE.uid} 0")
    monkeypatch.setattr(background_prolog, "may_detach", lambda *_: True)
    with lock.held(mark, 1):
        mark.write_text(f"{os.getpid()} {ALICE.uid} 0")
        assert (
            background_prolog.detach_prolog(node.environ(JOB, user=BOB), str(node.places.run)) == ""
        )
    assert mark.read_text().endswith(f"{ALICE.uid} 0")


def test_job_of_a_reused_number_is_served_and_its_lease_has_the_new_user(
    node: Node, image: Path
) -> None:
    run(node, "prolog", image, bob=True)
    outcome = node.outcomes("prolog", JOB)[-1]
    assert isinstance(outcome, RequestOutcome)
    assert (outcome.result, node.held(JOB).user.uid) == ("hit", BOB.uid)
