"""The Prolog: one outcome for each image, waits that slurm.conf allows, and what a job says."""

from __future__ import annotations

import msgspec
import pytest

from forestage.cache.node import Node
from forestage.errors import Declined
from forestage.events import Handled
from forestage.hooks import image, prolog
from forestage.hooks.image import Answer, Wait
from forestage.slurm.job import Hints, Job, Request
from forestage.slurm.timeouts import Limits
from forestage.system import lock

Calls = list[tuple[str, Declined | None]]
LIMITS = Limits(None, 15.0)
PATHS = ("/lustre/a", "/lustre/b")

Patch = pytest.MonkeyPatch


@pytest.fixture
def limit(staging_node: Node, job: Job) -> Wait:
    return prolog.waiting(staging_node, job, LIMITS, None)


@pytest.fixture
def job(asking: Job) -> Job:
    return msgspec.structs.replace(asking, requests=tuple(Request(p, "hint") for p in PATHS))


@pytest.fixture
def handled(monkeypatch: Patch) -> Calls:
    """The path and the refusal of each request; nothing is staged."""
    given: Calls = []

    def noting(
        node: Node, job: Job, request: Request, limit: Wait, refusal: Declined | None
    ) -> Answer:
        given.append((request.path, refusal))
        return Answer(Handled("declined", request=request.path, reason="off"))

    monkeypatch.setattr(image, "handle", noting)
    return given


@pytest.mark.parametrize("refusal", [None, Declined("disabled", "for now")])
def test_each_image_has_its_outcome(
    staging_node: Node, job: Job, limit: Wait, handled: Calls, refusal: Declined | None
) -> None:
    outcomes = prolog.prolog(staging_node, job, limit, refusal)
    assert [outcome.request for outcome in outcomes] == list(PATHS)
    assert handled == [(path, refusal) for path in PATHS]


@pytest.mark.parametrize(
    ("config", "copy", "in_vain"),
    [
        ({"redirect": "bind"}, 15.0, "release"),
        ({"redirect": "spank"}, 15.0, "hand-over"),
        ({"redirect": "bind", "prolog_wait": 2.0}, 2.0, "release"),
        ({"redirect": "bind", "prolog_wait": 99.0}, 15.0, "release"),
    ],
)
def test_prolog_waits_as_long_as_slurm_and_the_admin_allow(
    staging_node: Node, job: Job, config: dict[str, object], copy: float, in_vain: str
) -> None:
    config = {"prolog_wait": None, **config}
    node = msgspec.structs.replace(
        staging_node, config=msgspec.structs.replace(staging_node.config, **config)
    )
    found = prolog.waiting(node, job, LIMITS, None)
    assert found.end.left() == pytest.approx(15.0, abs=5)
    assert found.end.left() - found.copy.left() == pytest.approx(15.0 - copy, abs=0.1)
    assert found.in_vain == in_vain


@pytest.mark.parametrize("hint", [0.0, 600.0])
def test_refused_prolog_searches_for_stale_redirects_whatever_the_hint_says(
    staging_node: Node, job: Job, hint: float
) -> None:
    """Else `stage-wait=0` would show the job an older copy, and a long one hold it up."""
    job = msgspec.structs.replace(job, hints=Hints(wait=hint))
    found = prolog.waiting(staging_node, job, LIMITS, Declined("disabled", "INC-1"))
    assert found.end.left() == pytest.approx(15.0, abs=5)


@pytest.mark.parametrize("requests", [0, 2])
def test_stage_off_is_noted_for_the_steps(
    staging_node: Node, job: Job, limit: Wait, handled: list[object], requests: int
) -> None:
    job = msgspec.structs.replace(job, hints=Hints(off=True), requests=job.requests[:requests])
    outcomes = prolog.prolog(staging_node, job, limit, None)
    assert [outcome.reason for outcome in outcomes] == ["off"] * max(1, requests)
    lease = staging_node.leases.read(job.id)
    assert lease is not None
    assert lease.off


def test_stage_off_that_cannot_be_noted_is_an_outcome_of_its_own(
    staging_node: Node, job: Job, limit: Wait, handled: list[object], monkeypatch: Patch
) -> None:
    def busy(*_: object) -> None:
        raise lock.Busy("space.lock is held")

    monkeypatch.setattr(lock, "held_if_writable", busy)
    job = msgspec.structs.replace(job, hints=Hints(off=True))
    outcomes = prolog.prolog(staging_node, job, limit, None)
    assert [(one.result, one.reason) for one in outcomes[2:]] == [("failed", "busy")]


@pytest.mark.parametrize(("problems", "reasons"), [((), []), (("odd", "hint"), ["bad-hint"])])
def test_hint_that_cannot_be_read_is_an_outcome(
    job: Job, problems: tuple[str, ...], reasons: list[str]
) -> None:
    job = msgspec.structs.replace(job, requests=(), hints=Hints(problems=problems))
    assert [outcome.reason for outcome in prolog.bad_hint(job)] == reasons
