"""The Prolog: one outcome for each image, waits that slurm.conf allows, and what a job says."""

from __future__ import annotations

import msgspec
import pytest

from forestage.cache.node import Node
from forestage.hooks import prolog
from forestage.hooks.limit import Limit
from forestage.slurm.hints import Hints, Request
from forestage.slurm.job import Job
from forestage.slurm.timeouts import Limits

LIMITS = Limits(None, 15.0)
PATHS = ("/lustre/a", "/lustre/b")


@pytest.fixture
def limit(staging_node: Node, job: Job) -> Limit:
    return prolog.limit_of(staging_node, job, LIMITS, None)


@pytest.fixture
def job(asking: Job) -> Job:
    return msgspec.structs.replace(asking, requests=tuple(Request(p, "hint") for p in PATHS))


@pytest.mark.parametrize(("problems", "reasons"), [((), []), (("odd", "hint"), ["bad-hint"])])
def test_hint_that_cannot_be_read_is_an_outcome(
    staging_node: Node, job: Job, limit: Limit, problems: tuple[str, ...], reasons: list[str]
) -> None:
    job = msgspec.structs.replace(job, requests=(), hints=Hints(problems=problems))
    assert [outcome.reason for outcome in prolog.bad_hint(job)] == reasons
    job = msgspec.structs.replace(job, hints=Hints(problems=problems, wait=1.0))
    noted = [one.outcome for one in prolog.prolog(staging_node, job, limit, None)]
    assert [outcome.reason for outcome in noted] == reasons
