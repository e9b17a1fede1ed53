"""The step hook: its answer to the companion, its limits, and what the user reads."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest

from forestage.cache.image import Image
from forestage.cache.layout import Cache
from forestage.cache.lease import Lease, Leases
from forestage.cache.node import Node
from forestage.clock import Clock, Deadline
from forestage.errors import Declined
from forestage.events import Handled, Outcome
from forestage.hooks import image, step
from forestage.hooks.image import Answer, Wait
from forestage.hooks.step import EVERY, Watch, fields, message, named
from forestage.slurm.job import Job, Request
from forestage.stage.source import HOOK_TIMEOUT
from forestage.stage.wait import Eta
from forestage.system.as_user import User

Configured = Callable[..., Node]
Make = Callable[..., Image]
PATH = "/lustre/a.sqsh"


@pytest.fixture
def configured(staging_node: Node) -> Configured:
    def configuring(**keys: object) -> Node:
        config = msgspec.structs.replace(staging_node.config, **keys)
        return msgspec.structs.replace(staging_node, config=config)

    return configuring


@pytest.fixture
def image_asked(asking: Job) -> Job:
    return msgspec.structs.replace(asking, requests=(Request(PATH, "option"),), step=0)


def hit(**changes: object) -> Outcome:
    outcome = Handled("hit", request=PATH, image=PATH, redirect="spank", wait=0.02)
    return msgspec.structs.replace(outcome, **changes)


@pytest.mark.parametrize(("messages", "tell"), [("none", "0"), ("problems", "1"), ("all", "1")])
def test_entry_is_answered_with_the_very_file_it_stands_for(
    configured: Configured, make_image: Make, messages: str, tell: str
) -> None:
    node, wanted = configured(redirect="spank", user_messages=messages), make_image(size=7)
    entry = str(node.cache.image(wanted.key))
    assert fields(node, Answer(hit(), wanted)) == ("use", entry, PATH, "1", "7", "10", "20", tell)


@pytest.mark.parametrize("mounted", ["mounted", "kept"])
def test_task_that_may_not_see_the_nodes_redirect_gets_its_own(
    configured: Configured, make_image: Make, mounted: str
) -> None:
    """job_container/tmpfs: the job's namespace has the mounts of the moment it was made."""
    node = configured(redirect="bind")
    assert fields(node, Answer(hit(redirect=mounted), make_image()))[0] == "use"


@pytest.mark.parametrize(
    ("outcome", "redirect", "reason"),
    [
        (hit(redirect="none"), "none", "none"),
        (hit(redirect="none"), "spank", "saves"),
        (hit(redirect="none"), "bind", "saves"),
        (Handled("declined", reason="deadline"), "spank", "deadline"),
        (Handled("failed", reason="io"), "bind", "io"),
    ],
)
def test_path_that_stays_as_it_is_has_its_reason(
    configured: Configured, make_image: Make, outcome: Outcome, redirect: str, reason: str
) -> None:
    node = configured(redirect=redirect)
    assert fields(node, Answer(outcome, make_image())) == ("leave", reason)


@pytest.mark.parametrize("bad", ["\n", "\t", "\0", "\x1b", "\x7f"])
@pytest.mark.parametrize("where", ["path", "cache"])
def test_field_with_a_control_character_is_not_answered(
    configured: Configured, make_image: Make, where: str, bad: str
) -> None:
    node, wanted = configured(redirect="spank"), make_image()
    if where == "path":
        wanted = make_image(path=f"/lustre/a{bad}use")
    else:
        node = msgspec.structs.replace(node, cache=Cache(node.cache.root / f"a{bad}b"))
    assert fields(node, Answer(hit(), wanted)) == ("leave", "bad-path")


def test_step_without_an_image_has_no_event(configured: Configured, asking: Job) -> None:
    done = step.step(
        configured(), asking, step.waiting(configured(), "60", pytest.fail, None), pytest.fail, None
    )
    assert (done.outcomes, done.answer) == ([], ("leave", "no-image"))


@pytest.mark.parametrize(
    ("result", "reason", "told"),
    [
        *((result, reason, True)
          for result, reason in (
              ("declined", "no-room"), ("declined", "deadline"), ("declined", "source-hangs"),
              ("declined", "changed"), ("declined", "stopped"), ("failed", "busy"),
              ("failed", "copy"), ("failed", "cache-not-mounted"))),
        *(("declined", reason, False)
          for reason in ("registry", "outside-sources", "off", "disabled", "missing",
                         "no-permission", "not-a-file", "empty", "too-large", "bad-path",
                         "not-squashfs")),
    ],
)  # fmt: skip
def test_user_reads_what_costs_time_and_not_what_pyxis_says(
    result: str, reason: str, told: bool
) -> None:
    outcome = hit(result=result, reason=reason, detail="this is why", redirect="")
    expected = f"{PATH} is read from its original path: this is why" if told else ""
    assert message(outcome, "problems") == message(outcome, "all") == expected
    assert message(outcome, "none") == ""


def test_success_is_told_to_who_wants_to_hear_all() -> None:
    assert message(hit(), "all") == f"{PATH} is read from this node's copy (hit in 0.02s)"
    assert (message(hit(), "problems"), message(hit(), "none")) == ("", "")


class ManualClock(Clock):
    """A clock that goes where a test puts it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_waiting_user_reads_a_line_every_half_minute(staging_node: Node, make_image: Make) -> None:
    clock = ManualClock()
    heard: list[tuple[float, str]] = []
    watch = Watch(clock, lambda text: heard.append((clock.now - 1000, text)))
    eta = Eta(staging_node, make_image(), Deadline.after(999, clock), watch)
    for _ in range(400):
        clock.now += 0.25
        assert not eta.hopeless()
    assert [when for when, _ in heard] == [EVERY, 2 * EVERY, 3 * EVERY]
    assert {text for _, text in heard} == {eta.progress()}


class Call(NamedTuple):
    job: Job
    limit: Wait
    refusal: Declined | None


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the step asks for; nothing is staged."""
    given: list[Call] = []

    def noting(
        node: Node, job: Job, request: Request, limit: Wait, refusal: Declined | None
    ) -> Answer:
        given.append(Call(job, limit, refusal))
        return Answer(Handled("declined", reason="missing"))

    monkeypatch.setattr(image, "handle", noting)
    return given


@pytest.mark.parametrize(
    ("wait", "timeout", "copy", "end"),
    [
        (600.0, "900", 600, 600),
        (600.0, "60", 55, 55),
        # What may not wait for a copy may still look, and be a hit.
        (0.0, "900", 0, HOOK_TIMEOUT),
        (0.0, "10", 0, 5),
    ],
)
def test_step_waits_as_long_as_the_admin_lets_it_and_no_longer_than_the_companion(
    configured: Configured,
    image_asked: Job,
    handled: list[Call],
    wait: float,
    timeout: str,
    copy: float,
    end: float,
) -> None:
    node = msgspec.structs.replace(configured(step_wait=wait), clock=ManualClock())
    step.step(node, image_asked, step.waiting(node, timeout, pytest.fail, None), pytest.fail, None)
    (given,) = [one.limit for one in handled]
    assert (given.copy.end - 1000, given.end.end - 1000) == (copy, end)
    assert given.in_vain == "keep", "another step of the job may wait for the same copy"


@pytest.mark.parametrize(("messages", "watched"), [("none", False), ("problems", True)])
def test_user_messages_none_is_silent_during_a_wait(
    configured: Configured, image_asked: Job, handled: list[Call], messages: str, watched: bool
) -> None:
    step.step(
        configured(user_messages=messages),
        image_asked,
        step.waiting(configured(user_messages=messages), "60", pytest.fail, None),
        pytest.fail,
        None,
    )
    assert (handled[0].limit.watch is not None) is watched


@pytest.mark.parametrize("off", [True, False])
def test_stage_off_that_the_prolog_noted_holds_for_the_steps(
    configured: Configured, image_asked: Job, handled: list[Call], off: bool
) -> None:
    node, job = configured(), image_asked
    node.leases.write(Lease(job.id, job.user, 0.0, "/cache", off=off))
    step.step(node, job, step.waiting(node, "60", pytest.fail, None), pytest.fail, None)
    assert handled[0].job.hints.off is off


@pytest.mark.parametrize(
    ("refusal", "reason"), [(None, "lease-damaged"), (Declined("disabled", "off"), "disabled")]
)
def test_damaged_lease_is_why_nothing_is_staged(
    configured: Configured,
    image_asked: Job,
    handled: list[Call],
    refusal: Declined | None,
    reason: str,
) -> None:
    node = configured()
    node.leases.directory.mkdir(parents=True)
    node.leases.file(image_asked.id).write_bytes(b"{")
    step.step(
        node, image_asked, step.waiting(node, "60", pytest.fail, refusal), pytest.fail, refusal
    )
    assert handled[0].refusal is not None
    assert handled[0].refusal.reason == reason


def test_lease_that_cannot_be_read_is_an_outcome_that_the_user_reads(
    configured: Configured, image_asked: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "I/O error")

    node, heard = configured(), list[str]()
    monkeypatch.setattr(Leases, "read", fail)
    done = step.step(
        node, image_asked, step.waiting(node, "60", heard.append, None), heard.append, None
    )
    assert (done.answer, done.outcomes[0].result) == (("leave", "io"), "failed")
    assert len(heard) == 1


def test_groups_are_those_of_the_uid_and_an_unknown_uid_has_none_but_its_own(
    image_asked: Job,
) -> None:
    me = os.getuid()
    job = msgspec.structs.replace(image_asked, user=User("", me, 7))
    assert named(job).user == User(pwd.getpwuid(me).pw_name, me, 7)
    stranger = msgspec.structs.replace(image_asked, user=User("", 4_000_000_000, 7))
    assert named(stranger).user == User("", 4_000_000_000, 7)


def test_refused_step_waits_for_no_copy(configured: Configured) -> None:
    found = step.waiting(configured(step_wait=480.0), "", pytest.fail, Declined("config", "broken"))
    assert found.copy.left() == 0.0
    assert found.end.left() == pytest.approx(HOOK_TIMEOUT, abs=5)
