"""The step hook: its answer to the companion, its limits, and what the user reads."""

from __future__ import annotations

import math
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from forestage.cache.layout import Cache
from forestage.cache.lease import EntryUse, Lease, LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.clock import Clock, Deadline
from forestage.errors import Declined
from forestage.events import Outcome, RequestOutcome
from forestage.events.reasons import FAILURES
from forestage.hooks import leases, request_results, serve, step, user_messages
from forestage.hooks.hook_deadlines import SHORT_WAIT, HookDeadlines
from forestage.hooks.request_results import RequestResult
from forestage.hooks.step import format_answer_fields, with_identified_user, with_prolog_notes
from forestage.hooks.user_messages import (
    FIRST_MESSAGE_AFTER,
    REPEAT_MESSAGE_AFTER,
    JobMessageWriter,
    WaitReporter,
    format_message,
)
from forestage.slurm.hints import JobHints, Request
from forestage.slurm.job import Job
from forestage.slurm.timeouts import STEP_WAIT
from forestage.sources.opening import HOOK_TIMEOUT
from forestage.stage.copy_wait import CopyEstimate
from forestage.system import lock
from forestage.system.as_user import User

Configured = Callable[..., Node]
Make = Callable[..., SourceImage]
PATH = "/lustre/a.sqsh"


@pytest.fixture
def image_asked(asking: Job) -> Job:
    return msgspec.structs.replace(asking, requests=(Request(PATH, "option"),), step=0)


def hit(**changes: object) -> Outcome:
    outcome = RequestOutcome("hit", request=PATH, image=PATH, redirect="spank", wait=0.02)
    return msgspec.structs.replace(outcome, **changes)


@pytest.mark.parametrize(("messages", "tell"), [("none", "0"), ("problems", "1"), ("all", "1")])
def test_step_answer_use_names_the_entry_and_its_sources_identity(
    configured: Configured, make_image: Make, messages: str, tell: str
) -> None:
    node, wanted = configured(redirect="spank", user_messages=messages), make_image(size=7)
    entry = str(node.cache.image_path(wanted.key))
    assert format_answer_fields(node, RequestResult(hit(), wanted)) == (
        "use",
        entry,
        PATH,
        "1",
        "7",
        "10",
        "20",
        tell,
    )


def test_step_answer_through_names_the_keepers_socket(
    configured: Configured, make_image: Make
) -> None:
    answer = RequestResult(hit(result="through"), make_image(size=7), Path("/run/k/sock"))
    words = ("through", "/run/k/sock", PATH, "1", "7", "10", "20", "1")
    assert format_answer_fields(configured(redirect="spank"), answer) == words


@pytest.mark.parametrize("mounted", ["mounted", "kept"])
def test_step_is_answered_use_even_if_the_node_has_the_redirect(
    configured: Configured, make_image: Make, mounted: str
) -> None:
    """job_container/tmpfs: the job's namespace has the mounts of the moment it was made."""
    node = configured(redirect="bind")
    assert (
        format_answer_fields(node, RequestResult(hit(redirect=mounted), make_image()))[0] == "use"
    )


@pytest.mark.parametrize(
    ("outcome", "redirect", "reason"),
    [
        (hit(redirect="none"), "none", "none"),
        (hit(redirect="none"), "spank", "saves"),
        (hit(redirect="none"), "bind", "saves"),
        (RequestOutcome("declined", reason="deadline"), "spank", "deadline"),
        (RequestOutcome("failed", reason="io"), "bind", "io"),
        (RequestOutcome("started", redirect="later"), "bind", "started"),
        (RequestOutcome("started", redirect="none", reason="no-through"), "spank", "started"),
    ],
)
def test_step_answer_leave_gives_its_reason(
    configured: Configured, make_image: Make, outcome: Outcome, redirect: str, reason: str
) -> None:
    node = configured(redirect=redirect)
    assert format_answer_fields(node, RequestResult(outcome, make_image())) == ("leave", reason)


@pytest.mark.parametrize("bad", ["\n", "\t", "\0", "\x1b", "\x7f"])
@pytest.mark.parametrize("where", ["path", "cache"])
def test_step_answer_with_a_control_character_in_a_path_is_leave_bad_path(
    configured: Configured, make_image: Make, where: str, bad: str
) -> None:
    node, wanted = configured(redirect="spank"), make_image()
    if where == "path":
        wanted = make_image(path=f"/lustre/a{bad}use")
    else:
        node = msgspec.structs.replace(node, cache=Cache(node.cache.root / f"a{bad}b"))
    assert format_answer_fields(node, RequestResult(hit(), wanted)) == ("leave", "bad-path")


def run(
    node: Node, job: Job, say: user_messages.WriteMessage = pytest.fail, timeout: str = "60"
) -> step.StepResult:
    """What boundary does."""
    job, refusal = with_prolog_notes(node, job, None)
    done = step.serve_step(
        node, job, step.make_step_deadlines(node, job, timeout, say, refusal), refusal
    )
    user_messages.write_messages(node, job, done.outcomes, say)
    return done


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
def test_user_message_problems_covers_lost_time_but_not_errors_that_pyxis_reports(
    result: str, reason: str, told: bool
) -> None:
    outcome = hit(result=result, reason=reason, detail="this is why", redirect="")
    why = user_messages.USER_TEXTS.get(reason, "this is why")
    expected = f"{PATH} is read from its original path: {why}" if told else ""
    assert format_message(outcome, "problems") == expected
    decided = {"registry", "outside-sources", "disabled", "too-large"}
    assert bool(format_message(outcome, "all")) == (told or reason in decided)
    assert format_message(outcome, "none") == ""


def test_user_message_says_that_enroot_imports_a_registry_image() -> None:
    outcome = RequestOutcome(
        "declined", request="nvcr.io#a/b:1", reason="registry", detail="it is one"
    )
    assert (
        format_message(outcome, "all")
        == "nvcr.io#a/b:1 is imported by enroot, as without forestage"
    )


def test_successful_step_is_reported_to_the_user_with_messages_all() -> None:
    copy = f"{PATH} is read from this node's copy (hit), "
    assert format_message(hit(), "all") == f"{copy}what that saves is not known"
    assert format_message(hit(baseline=12.34), "all") == f"{copy}which saves about 12s"
    assert format_message(hit(baseline=0.04), "all") == f"{copy}as fast as from its source"
    waited = format_message(hit(baseline=12.34, wait=20.04), "all")
    assert waited.endswith("copy (hit, the step waited 20s), which costs about 7.7s")
    waited = format_message(hit(result="copied", baseline=12.34, wait=0.13), "all", 20.0)
    assert waited.endswith(
        "(copied, the step waited 0.1s, the job's start 20s), which costs about 7.8s"
    )
    assert format_message(hit(result="through"), "all").startswith(
        f"{PATH} is read from this node's copy"
    )
    assert format_message(hit(result="started"), "all").startswith(
        f"{PATH} is read from its original"
    )
    assert (format_message(hit(), "problems"), format_message(hit(), "none")) == ("", "")


def test_user_message_of_a_node_failure_hides_paths_of_the_cache() -> None:
    detail = "[Errno 30] Read-only file system: '/mnt/nvme/forestage/locks/space.lock'"
    line = format_message(
        RequestOutcome("failed", request=PATH, reason="io", detail=detail), "problems"
    )
    assert ("nvme" in line, "tell your admin" in line) == (False, True)
    assert set(user_messages.USER_TEXTS) >= FAILURES - {"evicted-stays"}


def test_user_messages_all_report_each_request_and_problems_one_line(
    configured: Configured, image_asked: Job
) -> None:
    outcomes = [hit(), hit(request="/b", image="/b"), hit(request="/c", image="/c")]
    outcomes[1] = RequestOutcome("declined", request="/b", reason="changed", detail="it changed")
    node, heard = configured(user_messages="all"), list[str]()
    user_messages.write_messages(
        node, image_asked, outcomes, JobMessageWriter(node, image_asked, heard.append)
    )
    assert [line.split()[1] for line in heard] == ["/b", PATH, "/c"]
    user_messages.write_messages(
        node, image_asked, outcomes, JobMessageWriter(node, image_asked, heard.append)
    )
    assert len(heard) == 3, "a further step says nothing"
    other = msgspec.structs.replace(image_asked, id=8)
    node = configured(user_messages="problems")
    user_messages.write_messages(
        node, other, outcomes * 2, JobMessageWriter(node, other, heard.append)
    )
    assert len(heard) == 4


@pytest.mark.parametrize(
    ("results", "word"),
    [
        (["hit"], "hit"),
        (["hit", "joined", "copied"], "copied"),
        (["through", "hit"], "through"),
        (["started", "through"], "started"),
        (["missing", "started"], "missing"),
        (["missing", "io", "hit"], "io"),
    ],
)
def test_data_result_variable_is_the_worst_result_of_the_data(
    results: list[str], word: str
) -> None:
    made = {
        "missing": RequestOutcome("declined", reason="missing"),
        "io": RequestOutcome("failed", reason="io"),
    }
    outcomes = [made.get(one) or hit(result=one) for one in results]
    assert request_results.list_data_variables(outcomes, ()) == [("FORESTAGE_DATA_RESULT", word)]


def test_forestage_local_variable_lists_local_paths_encoded_and_bounded() -> None:
    local = ("/a:b", "/50%", "/c\td", "/a:b", f"/{'x' * request_results.MAX_LOCAL_BYTES}", "/last")
    assert request_results.list_data_variables((), local) == [
        ("FORESTAGE_LOCAL", "/a%3Ab:/50%25:/last")
    ]
    assert request_results.list_data_variables((), ()) == []


def test_user_messages_report_a_failure_before_a_success(
    configured: Configured, image_asked: Job
) -> None:
    heard: list[str] = []
    outcomes = [hit(), RequestOutcome("declined", request="stage-dir", detail="no room")]
    user_messages.write_messages(
        configured(user_messages="all"), image_asked, outcomes, heard.append
    )
    assert ["no room" in line for line in heard] == [True, False]


@pytest.mark.parametrize("reason", ["no-mount", "missing", "disabled", "deadline", "too-large"])
def test_missing_mount_is_always_reported_to_the_user(
    configured: Configured, image_asked: Job, reason: str
) -> None:
    heard, always = list[str](), list[str]()
    missing = RequestOutcome(
        "declined", "missing", request="/a.sqsh@/point", detail="why", data=True
    )
    missing = msgspec.structs.replace(missing, reason=reason)
    outcomes = [hit(), missing, msgspec.structs.replace(missing, redirect="none")]
    for messages in ("problems", "all", "none"):
        node = configured(user_messages=messages)
        user_messages.write_messages(node, image_asked, outcomes, heard.append, always.append)
    assert always == ["/a.sqsh@/point is not mounted: why"] * 2
    assert not any("not mounted" in line for line in heard if reason != "no-mount")


class ManualClock(Clock):
    """A clock that goes where a test puts it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_waiting_user_gets_one_progress_line(staging_node: Node, make_image: Make) -> None:
    clock = ManualClock()
    heard: list[tuple[float, str]] = []
    watch = WaitReporter(clock, lambda text: heard.append((clock.now - 1000, text)), math.inf)
    eta = CopyEstimate(staging_node, make_image(), Deadline.after(999, clock), watch)
    for _ in range(400):
        clock.now += 0.25
        assert not eta.should_stop_waiting()
    assert heard == [(FIRST_MESSAGE_AFTER, eta.format_progress())]


def test_user_waiting_for_data_gets_a_progress_line_every_half_minute() -> None:
    clock = ManualClock()
    heard: list[tuple[float, str]] = []
    patience = WaitReporter(
        clock, lambda text: heard.append((clock.now - 1000, text)), REPEAT_MESSAGE_AFTER
    )
    for number in range(300):
        clock.now += 0.25
        patience(lambda number=number: f"line {number}")  # type: ignore[misc]
    assert [at for at, _ in heard] == [
        FIRST_MESSAGE_AFTER,
        FIRST_MESSAGE_AFTER + REPEAT_MESSAGE_AFTER,
        FIRST_MESSAGE_AFTER + 2 * REPEAT_MESSAGE_AFTER,
    ]
    assert heard[0][1] == "line 19"


def test_progress_messages_do_not_suppress_the_final_message_of_the_job(
    configured: Configured, image_asked: Job
) -> None:
    node, heard = configured(), list[str]()
    once = JobMessageWriter(node, image_asked, heard.append)
    for text in ("10 %", "20 %"):
        once.write_progress(text)
    once("it failed")
    once.write_progress("of another request")
    assert heard == ["n1: 10 %", "n1: 20 %", "n1: it failed", "n1: of another request"]
    other = msgspec.structs.replace(image_asked, nodelist="m[1-2],n1")
    JobMessageWriter(node, other, pytest.fail).write_progress("the first node tells")


@pytest.mark.parametrize(
    ("hint", "timeout", "seconds"),
    [(3.0, "900", 3.0), (0.0, "900", 0.0), (600.0, "60", 48.0), (None, "10", 0.0), (5.0, "", 5.0)],
)
def test_step_waits_for_the_fill_of_its_directory_within_hint_and_companion_timeout(
    configured: Configured, image_asked: Job, hint: float | None, timeout: str, seconds: float
) -> None:
    node = msgspec.structs.replace(configured(), clock=ManualClock())
    job = msgspec.structs.replace(image_asked, hints=JobHints(wait=hint))
    found = step.make_step_deadlines(node, job, timeout, pytest.fail, None)
    assert found.fill is not None
    assert found.fill.seconds_left() == seconds


@pytest.mark.parametrize("messages", ["none", "problems"])
def test_user_messages_none_reports_no_progress(
    configured: Configured, image_asked: Job, messages: str
) -> None:
    node = configured(user_messages=messages, cold="shared")
    found = step.make_step_deadlines(node, image_asked, "", pytest.fail, None, lambda text: None)
    assert isinstance(found.on_data_wait, WaitReporter) is (messages != "none")


@pytest.mark.parametrize(
    ("nodelist", "speaks"),
    [("n[1-512]", True), ("m7,n[1-2]", False), ("n[0-511]", False), ("", True), ("n[", True)],
)
@pytest.mark.parametrize("name", ["nodelist", "step_nodelist"])
def test_only_the_first_node_of_a_step_writes_user_messages(
    configured: Configured, image_asked: Job, name: str, nodelist: str, speaks: bool
) -> None:
    heard: list[str] = []
    job = msgspec.structs.replace(
        image_asked, **{"nodelist": "n[0-9]" * bool(nodelist), name: nodelist}
    )
    JobMessageWriter(configured(), job, heard.append)("this is why")
    assert heard == ["n1: this is why"] * speaks


def test_user_gets_one_message_line_per_job_across_steps(
    configured: Configured, image_asked: Job
) -> None:
    node, heard = configured(), list[str]()
    for text in ("first", "second"):
        JobMessageWriter(node, image_asked, heard.append)(text)
    assert heard == ["n1: first"]
    node.leases.lease_file(image_asked.id).write_bytes(b"{")
    JobMessageWriter(node, image_asked, heard.append)("rather twice than never")
    assert len(heard) == 2


class Call(NamedTuple):
    job: Job
    limit: HookDeadlines
    refusal: Declined | None


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the step asks for; nothing is staged."""
    given: list[Call] = []

    def noting(
        node: Node, job: Job, requests: object, limit: HookDeadlines, refusal: Declined | None
    ) -> list[RequestResult]:
        given.append(Call(job, limit, refusal))
        return [RequestResult(RequestOutcome("declined", reason="missing"))]

    monkeypatch.setattr(serve, "serve_requests", noting)
    return given


@pytest.mark.parametrize(
    ("cold", "deadline", "hint", "timeout", "copy", "end"),
    [
        ("wait", None, None, "900", STEP_WAIT, STEP_WAIT),
        ("wait", 600.0, None, "900", 600, 600),
        ("wait", 600.0, None, "60", 55, 55),
        ("wait", 600.0, 3.0, "900", 3, HOOK_TIMEOUT),
        ("wait", 3.0, 9999.0, "900", 600, 600),
        ("shared", None, 20.0, "900", 20, 20),
        # What does not wait for a copy may still look, and be a hit.
        ("wait", 0.0, None, "900", 0, HOOK_TIMEOUT),
        ("wait", None, 0.0, "900", None, HOOK_TIMEOUT),
        ("shared", 600.0, None, "900", None, HOOK_TIMEOUT),
        ("auto", 600.0, None, "900", None, HOOK_TIMEOUT),
        ("auto", 600.0, 20.0, "900", 20, 20),
        ("auto", 600.0, 0.0, "900", None, HOOK_TIMEOUT),
        ("auto", None, None, "10", None, 5),
    ],
)
def test_step_waits_for_a_copy_if_configured_or_hinted_within_the_companions_timeout(
    configured: Configured,
    image_asked: Job,
    handled: list[Call],
    cold: str,
    deadline: float | None,
    hint: float | None,
    timeout: str,
    copy: float | None,
    end: float,
) -> None:
    config = configured(redirect="spank", cold=cold, deadline=deadline)
    node = msgspec.structs.replace(config, clock=ManualClock())
    job = msgspec.structs.replace(image_asked, hints=JobHints(wait=hint))
    if hint is not None:
        node.leases.add_notes_and_keep_lease(Lease(job.id, job.user, 0.0, "/cache"), wait=hint)
    run(node, job, timeout=timeout)
    (given,) = [one.limit for one in handled]
    assert (given.copy and given.copy.end - 1000, given.end.end - 1000) == (copy, end)
    assert given.small.seconds_left() == (0.0 if hint == 0 else SHORT_WAIT)
    assert given.is_read_through is (cold == "auto")


@pytest.mark.parametrize(("messages", "watched"), [("none", False), ("problems", True)])
def test_user_messages_none_reports_no_progress_during_a_wait(
    configured: Configured, image_asked: Job, handled: list[Call], messages: str, watched: bool
) -> None:
    run(configured(user_messages=messages, cold="wait"), image_asked)
    assert isinstance(handled[0].limit.on_copy_wait, WaitReporter) is watched


@pytest.mark.parametrize(
    ("refusal", "reason"), [(None, "lease-damaged"), (Declined("disabled", "off"), "disabled")]
)
def test_step_with_a_damaged_lease_is_refused_with_lease_damaged(
    configured: Configured, image_asked: Job, refusal: Declined | None, reason: str
) -> None:
    node = configured()
    node.leases.directory.mkdir(parents=True)
    node.leases.lease_file(image_asked.id).write_bytes(b"{")
    _, found = with_prolog_notes(node, image_asked, refusal)
    assert found is not None
    assert found.reason == reason


def test_step_with_an_unreadable_lease_fails_with_one_user_message(
    configured: Configured, image_asked: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "I/O error")

    node, heard = configured(), list[str]()
    monkeypatch.setattr(LeaseDirectory, "find_lease", fail)
    done = run(node, image_asked, heard.append)
    assert (done.answer_fields, done.outcomes[0].result) == (("leave", "io"), "failed")
    assert len(heard) == 1


def test_step_with_groups_from_slurm_queries_no_name_service(
    configured: Configured, image_asked: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Prolog has noted the user's name, which is for people."""
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pytest.fail("it was asked"))
    node, alice = configured(), User("alice", 1001, 7)
    prolog = msgspec.structs.replace(image_asked, user=alice)
    with lock.held(node.cache.space_lock, 1.0):
        node.leases.write_lease(
            leases.read_or_make_lease(node, prolog).with_use(EntryUse("a" * 32))
        )
    of_step = User("", 1001, 7, groups=(7, 31000), of_step=True)
    job, refusal = with_identified_user(
        node, msgspec.structs.replace(image_asked, user=of_step), "60"
    )
    assert (refusal, job.user) == (None, msgspec.structs.replace(of_step, name="alice"))
    noted = node.leases.find_lease(job.id)
    assert noted is not None
    assert noted.user == alice


def test_refused_step_waits_for_no_copy(configured: Configured, asking: Job) -> None:
    refusal = Declined("config", "broken")
    found = step.make_step_deadlines(configured(cold="wait"), asking, "", pytest.fail, refusal)
    assert found.copy is None
    assert found.end.seconds_left() == pytest.approx(HOOK_TIMEOUT, abs=5)
