"""The Prolog: one outcome for each image, waits that slurm.conf allows, and what a job says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from forestage.cache.lease import EntryUse, Lease
from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.errors import Declined
from forestage.events import RequestOutcome
from forestage.hooks import prolog, serve
from forestage.hooks.hook_deadlines import SHORT_WAIT, HookDeadlines
from forestage.hooks.request_results import RequestResult
from forestage.slurm.hints import JobHints, Request
from forestage.slurm.job import Job
from forestage.slurm.timeouts import HookTimeLimits
from forestage.system import lock

Calls = list[tuple[str, Declined | None]]
LIMITS = HookTimeLimits(None, 15.0)
PATHS = ("/lustre/a", "/lustre/b")

Patch = pytest.MonkeyPatch


@pytest.fixture
def limit(staging_node: Node, job: Job) -> HookDeadlines:
    return prolog.make_prolog_deadlines(staging_node, job, LIMITS, None)


@pytest.fixture
def job(asking: Job) -> Job:
    return msgspec.structs.replace(asking, requests=tuple(Request(p, "hint") for p in PATHS))


@pytest.fixture
def handled(monkeypatch: Patch) -> Calls:
    """The path and the refusal of each request; nothing is staged."""
    given: Calls = []

    def noting(
        node: Node,
        job: Job,
        requests: Sequence[Request],
        limit: HookDeadlines,
        refusal: Declined | None,
    ) -> list[RequestResult]:
        given.extend((request.path, refusal) for request in requests)
        return [
            RequestResult(RequestOutcome("declined", request=one.path, reason="off"))
            for one in requests
        ]

    monkeypatch.setattr(serve, "serve_requests", noting)
    return given


@pytest.mark.parametrize(("problems", "reasons"), [((), []), (("odd", "hint"), ["bad-hint"])])
def test_job_with_only_a_bad_hint_has_an_outcome_bad_hint(
    staging_node: Node,
    job: Job,
    limit: HookDeadlines,
    handled: Calls,
    problems: tuple[str, ...],
    reasons: list[str],
) -> None:
    job = msgspec.structs.replace(job, requests=(), hints=JobHints(problems=problems))
    assert [outcome.reason for outcome in prolog.make_bad_hint_outcomes(job)] == reasons
    job = msgspec.structs.replace(job, hints=JobHints(problems=problems, wait=1.0))
    noted = [one.outcome for one in prolog.serve_prolog(staging_node, job, limit, None)]
    assert [outcome.reason for outcome in noted] == reasons


@pytest.mark.parametrize(
    ("config", "hint", "copy", "small"),
    [
        # redirect, cold, deadline; stage-wait=; seconds for copies, and for small ones
        (("bind", "auto", None), None, None, True),
        (("bind", "wait", None), None, 15.0, True),
        (("bind", "wait", 2.0), None, 2.0, True),
        (("bind", "wait", 99.0), None, 15.0, True),
        (("bind", "wait", 2.0), 9.0, 9.0, True),
        (("bind", "wait", None), 0.0, None, False),
        # Who asks to wait waits ...
        (("bind", "shared", None), 9.0, 9.0, True),
        (("bind", "shared", None), 999.0, 12.0, True),
        (("bind", "shared", None), 0.0, None, False),
        (("none", "wait", None), None, 15.0, True),
        # ... but where the steps do, as no timeout of Slurm's ends that.
        (("spank", "auto", None), 9.0, None, False),
        (("spank", "wait", None), 9.0, None, False),
    ],
)
def test_prolog_waits_for_a_copy_if_configured_or_hinted_within_slurms_limit(
    staging_node: Node,
    job: Job,
    config: tuple[str, str, float | None],
    hint: float | None,
    copy: float | None,
    small: bool,
) -> None:
    keys = dict(zip(("redirect", "cold", "deadline"), config, strict=True), max_stage_wait=12.0)
    node = msgspec.structs.replace(staging_node.with_config(**keys), clock=Still())
    job = msgspec.structs.replace(job, hints=JobHints(wait=hint))
    found = prolog.make_prolog_deadlines(node, job, LIMITS, None)
    assert (found.copy and found.copy.seconds_left()) == copy
    assert found.small.seconds_left() == (SHORT_WAIT if small else 0.0)
    assert found.end.seconds_left() == max(2.0 if config[2] == 2.0 else 15.0, copy or 0.0)


class Still(Clock):
    """A clock that stands still."""

    def monotonic(self) -> float:
        return 1000.0


@pytest.mark.parametrize("hint", [0.0, 600.0])
def test_refused_prologs_deadline_ignores_the_jobs_wait_hint(
    staging_node: Node, job: Job, hint: float
) -> None:
    """Else `stage-wait=0` would show the job an older copy, and a long one hold it up."""
    job = msgspec.structs.replace(job, hints=JobHints(wait=hint))
    found = prolog.make_prolog_deadlines(staging_node, job, LIMITS, Declined("disabled", "INC-1"))
    assert found.end.seconds_left() == pytest.approx(15.0, abs=5)
    assert found.copy is None


def test_stage_off_that_cannot_be_recorded_is_a_failed_outcome(
    staging_node: Node, job: Job, limit: HookDeadlines, handled: list[object], monkeypatch: Patch
) -> None:
    def busy(*_: object) -> None:
        raise lock.LockTimeout("space.lock is held")

    monkeypatch.setattr(lock, "held_if_writable", busy)
    job = msgspec.structs.replace(job, hints=JobHints(off=True))
    outcomes = [one.outcome for one in prolog.serve_prolog(staging_node, job, limit, None)]
    assert [(one.result, one.reason) for one in outcomes[2:]] == [("failed", "busy")]


@pytest.mark.parametrize(
    ("messages", "tell", "redirect", "noted"),
    [
        ("problems", True, "bind", 3.0),
        ("all", False, "bind", 3.0),
        ("problems", False, "bind", 0.0),
        ("all", True, "spank", 0.0),
    ],
)
def test_prologs_wait_is_recorded_if_the_user_is_told_of_successes(
    staging_node: Node, asking: Job, limit: HookDeadlines, monkeypatch: Patch,
    messages: str, tell: bool, redirect: str, noted: float,
) -> None:  # fmt: skip
    node = staging_node.with_config(user_messages=messages, redirect=redirect)
    node.cache.prepare(require_mount=False)
    node.leases.write_lease(
        Lease(asking.id, asking.user, 1.0, str(node.cache.root), (EntryUse("k"),))
    )
    took = [RequestResult(RequestOutcome("copied", wait=seconds)) for seconds in (1.0, 2.0)]
    monkeypatch.setattr(serve, "serve_requests", lambda *_: took)
    job = msgspec.structs.replace(asking, hints=JobHints(tell=tell), requests=())
    monkeypatch.setattr(prolog, "_record_hinted_images", lambda *_: None)
    prolog.serve_prolog(node, job, limit, None)
    assert node.leases.read_notes(job.id).waited == noted
