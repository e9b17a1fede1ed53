"""A kind of request that no code knows: one class, one row of the table, and it has all of it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.cache import evict
from forestage.cache.node import Node as Bare
from forestage.clock import Clock, Deadline
from forestage.commands import explain, sweep
from forestage.config import load_config
from forestage.events import RequestOutcome
from forestage.hooks import hook_deadlines, serve
from forestage.hooks.boundary import IMAGE_OPTION, HookRun
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.sources import opening
from forestage.sources.source import OpenImage
from forestage.system import as_user, terminal
from forestage.views.through import keeper
from node import ALICE, Idle, Node, end_keepers, held_at, until


class Named:
    """A small file, readable by the user, that names the image which is meant."""

    def path(self, job: Job, request: Request) -> str:
        return request.path

    @contextlib.contextmanager
    def open(self, node: Bare, job: Job, path: str, end: Deadline) -> Iterator[OpenImage]:
        def work() -> as_user.ChildResult[str]:
            as_user.set_effective_user(job.user)
            return Path(path).read_text(), []

        with opening.open_image_for_hook(
            job.user, as_user.run_in_child(work, str, end.seconds_left())[0], node, end
        ) as opened:
            yield opened


@pytest.fixture
def named(node: Node, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a job names: its kind is in the table."""
    known = vars(Request)["kind"].fget
    kind = property(lambda one: "named" if one.path.endswith(".name") else known(one))
    monkeypatch.setattr(Request, "kind", kind)
    monkeypatch.setitem(serve.SOURCE_FINDERS, "named", Named())  # type: ignore[arg-type, misc]
    monkeypatch.setattr(keeper, "START", 600.0)  # a machine may stand still
    monkeypatch.setattr(hook_deadlines, "SHORT_WAIT", 0.0)
    node.configure(redirect="spank", cold=None)
    return node.put("alice/image.name", str(node.put("alice/image.sqsh")).encode())


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """No copy is published before the test calls it."""
    with held_at("checked", tmp_path) as opened:
        yield opened
    end_keepers()


def step(node: Node, job: int, path: Path) -> tuple[str, str, str]:
    given = node.environ(job, path, ALICE) | {"SLURM_STEP_ID": "0"}
    assert given[IMAGE_OPTION] == str(path)
    HookRun("step", given, 0.0).run(node.places, Clock())
    (*_, outcome) = node.outcomes("step", job)
    assert isinstance(outcome, RequestOutcome)
    return outcome.result, outcome.redirect, outcome.image


def explained(node: Node, job: int) -> str:
    out = io.StringIO()
    terminal.write_plain(
        explain.format_output(explain.read_job_history(node.places, job), Clock().wall()), out
    )
    return out.getvalue()


def test_made_up_source_kind_is_copied_leased_read_through_explained_and_swept(
    node: Node, named: Path, gate: Callable[[], None]
) -> None:
    image = node.shared / "alice/image.sqsh"
    key = node.identity(image).key
    assert node.prolog(7, named).said == ("started", "")
    assert step(node, 7, named) == ("through", "spank", str(image))
    gate()
    until(lambda: node.cache.image_path(key).exists() and node.is_idle(key), "the copy's end")
    assert step(node, 7, named) == ("hit", "spank", str(image))
    assert [use.key for use in node.held(7).uses] == [key]
    assert evict.evict_keys(node.cache, node.leases, [key]) == ()
    assert str(image) in explained(node, 7)
    node.epilog(7)
    assert node.prolog(8, named).said == ("hit", "")
    config = load_config(node.places.etc).for_partition("batch")
    swept = sweep.run_sweep(
        Bare.from_config(config, node.places, Clock()), Idle("", ""), False, print
    )
    assert [one.job for one in swept.released] == [8]
    assert evict.evict_keys(node.cache, node.leases, [key]) == (key,)
