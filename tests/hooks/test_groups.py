"""Groups of a user that a node does not know, and a name service or a home that is slow."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from forestage.cache.node import Node as Bare
from forestage.clock import Clock
from forestage.commands import explain
from forestage.config import load_config
from forestage.features.data import data_view
from forestage.features.data import requests as data
from forestage.hooks import container_binds
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.slurm.job import Job
from forestage.sources import opening
from forestage.system import as_user, loop
from helper import Helper, ask, environ
from node import ALICE, Node, until

PROJ = 31000
KNOWN = f"alice with the groups that this node knows ({ALICE.gid})"
GIVEN = (ALICE.gid, PROJ)


@pytest.fixture
def closed(spank: Node) -> Path:
    """An image for a group that only slurmctld knows alice to be in."""
    path = spank.put("proj/image.sqsh", mode=0o640)
    os.chown(spank.server / "proj/image.sqsh", 0, PROJ)
    return path


def sentences(node: Node, job: int, hook: str) -> tuple[str, ...]:
    runs = explain.read_job_history(node.places, job).runs
    (run,) = [run for run in runs if run.hook == hook]
    return run.explained[0].sentences


def test_step_opens_an_image_with_the_groups_passed_by_slurm(spank: Node, closed: Path) -> None:
    assert ask(spank, 7, closed, groups=GIVEN)[0] == "use"
    assert ask(spank, 8, closed) == ["leave", "no-permission"]
    (outcome,) = spank.outcomes("step", 8)
    assert f" with the groups of this step ({ALICE.gid})" in outcome.detail


def test_image_readable_only_with_slurms_groups_is_declined_by_the_prolog_and_served_by_a_step(
    spank: Node, closed: Path
) -> None:
    ran = spank.prolog(7, comment=f"stage={closed}")
    assert ran.said == ("declined", "no-permission")
    assert ran.outcome.detail == f"{closed} is not readable as {KNOWN}"
    assert sentences(spank, 7, "prolog")[-1].startswith("Each step looks again")
    assert spank.leases.read_notes(7).say == ()
    other = spank.put("images/other.sqsh")
    lines = Helper(spank, environ(spank, 7, other, groups=GIVEN)).lines()
    assert [line[0] for line in lines] == ["also", "use"]
    _, served = spank.outcomes("step", 7)
    assert (served.result, getattr(served, "image", "")) == ("copied", str(closed))
    spank.epilog(7)
    assert spank.lease(7) is None


def test_step_tells_the_user_that_an_image_of_the_comment_is_not_readable(
    spank: Node, closed: Path
) -> None:
    spank.prolog(7, comment=f"stage={closed}")
    lines = Helper(spank, environ(spank, 7, spank.put("images/other.sqsh"))).lines()
    (said,) = [line[1] for line in lines if line[0] == "say"]
    assert f"{closed} is not staged" in said
    assert "give yourself the right to read it" in said


def test_declined_image_with_redirect_bind_names_the_groups_known_to_the_node(node: Node) -> None:
    path = node.put("proj/image.sqsh", mode=0o640)
    os.chown(node.server / "proj/image.sqsh", 0, PROJ)
    ran = node.prolog(7, path, comment=f"stage={path}")
    assert ran.outcome.detail == f"{path} is not readable as {KNOWN}"
    assert sentences(node, 7, "prolog")[-1] == "The job kept its original path."
    assert not node.leases.hints_flag(7).exists()


def of_alice(node: Node, comment: str, **changes: object) -> tuple[Bare, Job]:
    """A job of alice's, and the node as its hooks have it."""
    job = Job.from_environ(node.environ(7, comment=comment))
    user = msgspec.structs.replace(job.user, **changes)
    config = load_config(node.places.etc).for_partition("batch")
    bare = Bare(config, node.places, node.cache, node.leases, Clock())
    return bare, msgspec.structs.replace(job, user=user)


def show(node: Node, groups: tuple[int, ...]) -> data.StepPart:
    """What a step is shown that has these groups."""
    bare, job = of_alice(node, "", groups=groups, of_step=True)
    limit = HookDeadlines.from_seconds(Clock(), 600.0, 600.0)
    return data.show_job_data(bare, msgspec.structs.replace(job, step=0), limit, None)


def test_directory_readable_only_in_a_step_is_copied_then(
    spank: Node,
) -> None:
    spank.put("proj/set/file", b"content")
    os.chown(spank.server / "proj/set", 0, PROJ)
    (spank.server / "proj/set").chmod(0o750)
    path = f"{spank.shared}/proj/set/"
    prolog = of_alice(spank, f"stage={path}", groups=(ALICE.gid,))
    (started,) = data.start_job_data(
        *prolog, HookDeadlines.from_seconds(Clock(), 600.0, None), None
    )
    assert started.result == "started"
    tree = until(
        lambda: (found := data_view.read_job_data(spank.leases, 7).trees[path]).reason and found,
        "the look",
    )
    assert (tree.reason, tree.groups) == ("no-permission", (ALICE.gid,))
    shown = show(spank, (ALICE.gid,))  # of these groups it was looked at
    assert (shown.lines, shown.outcomes[0].reason) == ([], "no-permission")
    shown = show(spank, GIVEN)
    assert (shown.outcomes[0].result, shown.outcomes[0].detail) == ("hit", "")
    assert [line[0] for line in shown.lines] == ["device"]
    for one in [
        one for one in loop.list_attached_devices() if one.is_on_file_system(spank.nvme.stat())
    ]:
        loop.detach_device(one)


def test_user_without_an_account_on_the_node_is_shown_by_number(spank: Node) -> None:
    """Slurm calls each of them nobody."""
    path = spank.put("alice/image.sqsh")
    stranger = as_user.User("nobody", 4_000_000, 4_000_000)
    assert spank.prolog(7, path, user=stranger).said == ("started", "")
    assert explain.read_job_history(spank.places, 7).runs[0].user == "4000000"


def test_name_service_is_queried_once_by_a_prolog_and_its_stager(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stager's children alone asked a dozen times: 13 s where each answer takes 0.7 s."""

    def lists(name: str, gid: int) -> list[int]:
        with (tmp_path / "asked").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return [gid]

    monkeypatch.setattr(os, "getgrouplist", lists)
    assert node.prolog(7, node.put("alice/image.sqsh")).outcome.result == "copied"
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


def test_prolog_with_a_hanging_name_service_is_declined_with_slow_names(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: signal.pause())
    node.configure(deadline="300ms")
    ran = node.prolog(7, node.put("alice/image.sqsh"))
    assert (ran.code, *ran.said) == (0, "declined", "slow-names")
    assert "name service took more than" in ran.outcome.detail


def test_slow_home_directory_is_waited_for_within_the_deadline(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job waits for its home directory as well; a second was too short for some."""
    look = container_binds._read_folder_binds

    def slow(*asked: object) -> object:
        time.sleep(1.2)
        return look(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(container_binds, "_read_folder_binds", slow)
    assert node.prolog(7, node.put("alice/image.sqsh")).outcome.result == "copied"


@pytest.mark.parametrize("known", [False, True])
def test_hanging_home_directory_is_named_in_the_decline(
    node: Node, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is known to hang takes no more of a hook's time."""
    monkeypatch.setattr(container_binds, "_read_folder_binds", lambda *_: signal.pause())
    home = str(node.shared / "alice")
    alice = msgspec.structs.replace(ALICE, groups=(ALICE.gid,), home=home)
    monkeypatch.setattr(as_user, "query_name_service", lambda user, timeout: alice)
    noted: list[str] = []
    monkeypatch.setattr(opening, "start_server_probe", lambda places, path: noted.append(path))
    if known:
        node.configure(deadline="1h")
        hang = f"{home} has hung for 1m"
        of_home = lambda places, path: hang if path == home else ""  # noqa: E731
        monkeypatch.setattr(opening, "find_server_hang", of_home)
    else:
        node.configure(deadline="1s")
    ran = node.prolog(7, node.put("images/image.sqsh"))
    assert (ran.code, *ran.said) == (0, "declined", "below-bind")
    said = f"{home} has hung for 1m" if known else f"the home directory {home} did not answer for "
    assert said in ran.outcome.detail
    assert noted == ([] if known else [f"{home}/.config/enroot"])
