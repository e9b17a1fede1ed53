"""Data of a comment: what comes to nothing is said once, and what a step waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forestage.clock import Clock
from forestage.hooks import hook_deadlines
from forestage.hooks.boundary import HookRun
from helper import run_step, texts_for_user
from node import Node, content


@pytest.mark.parametrize(
    ("comment", "lines"),
    [
        ("stage-list=/typo", ["what stage-list= names is not staged: /typo does not exist"]),
        ("stage-list={list}", ["what stage-list= names is not staged: stage-list: {list}: it na"]),
        ("stage={list}.d/", ["{list}.d/ is read from its original path: {list}.d/ does not exist"]),
        ("stage-dir=900TiB", ["this job has no directory of its own on this node: stage-dir= as"]),
    ],
)
def test_bad_hint_for_data_is_reported_by_the_first_step_only(
    loaded: Node, capfd: pytest.CaptureFixture[str], comment: str, lines: list[str]
) -> None:
    listed = loaded.put("alice/list", b"an-image.sqsh\n")
    loaded.prolog(1, comment=comment.format(list=listed))
    found = [
        line.removeprefix("forestage: n1: ") for line in texts_for_user(run_step(loaded, 1, capfd))
    ]
    assert len(found) == len(lines), found
    for line, beginning in zip(found, lines, strict=True):
        assert line.startswith(beginning.format(list=listed))
    assert texts_for_user(run_step(loaded, 1, capfd)) == []


def test_stage_list_with_a_byte_order_mark_stages_its_first_path(loaded: Node) -> None:
    listed = loaded.put("alice/list", "\ufeff/typo/\r\n".encode())
    ran = loaded.prolog(1, comment=f"stage-list={listed}")
    (outcome,) = [one for one in ran.outcomes if one.data]
    assert (outcome.result, outcome.request) == ("started", "/typo/")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_stage_list_in_utf_16_is_reported_with_save_it_as_utf_8(
    loaded: Node, capfd: pytest.CaptureFixture[str], encoding: str
) -> None:
    listed = loaded.put("alice/list", "/typo/\r\n".encode(encoding))
    loaded.prolog(1, comment=f"stage-list={listed}")
    (line,) = texts_for_user(run_step(loaded, 1, capfd))
    assert f"stage-list: {listed} is UTF-16; save it as UTF-8" in line


def test_directory_with_too_many_files_is_reported_by_one_step_at_most(
    loaded: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """How many there are, the process that looks for it finds out, before or after the step."""
    loaded.configure(redirect="spank", data={"max_files": 1})
    for name in ("a", "b", "c"):
        loaded.put(f"alice/{name}", b"x")
    assert loaded.prolog(1, comment=f"stage={loaded.shared}/alice/").code == 0
    assert len(texts_for_user(run_step(loaded, 1, capfd))) <= 1
    assert texts_for_user(run_step(loaded, 1, capfd)) == []
    assert loaded.leases.read_notes(1).data
    loaded.epilog(1)
    assert not [*loaded.places.leases.iterdir()]


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (lambda node: node.write_config("nonsense: true\n"), "forestage is not set up right"),
        (lambda node: node.cache.root.chmod(0o777), "this node's cache cannot be used"),
    ],
    ids=["configuration", "cache"],
)
def test_stage_tell_reports_a_directory_that_the_node_cannot_serve(
    loaded: Node, capfd: pytest.CaptureFixture[str], trouble: Callable[[Node], None], why: str
) -> None:
    loaded.cache.prepare(require_mount=False)
    trouble(loaded)
    directory = f"{loaded.shared}/alice/set/"
    loaded.prolog(1, comment=f"stage={directory} stage-tell=yes")
    (line,) = texts_for_user(run_step(loaded, 1, capfd))
    assert why in line
    assert line.split()[2] == directory
    assert texts_for_user(run_step(loaded, 1, capfd)) == []


@pytest.mark.parametrize(("wait", "found"), [("stage-wait=5m", "hit"), ("", "started")])
def test_step_with_default_configuration_waits_for_a_directory_only_with_stage_wait(
    spank: Node, monkeypatch: pytest.MonkeyPatch, wait: str, found: str
) -> None:
    """No copy ends before the step looks: its first MiB takes half a second."""
    monkeypatch.setattr(hook_deadlines, "SHORT_WAIT", 0.0)
    spank.configure(redirect="spank", cold=None, bandwidth="2M", threads=1)
    for number in range(3):
        spank.put(f"alice/set/{number}", content(number, 1 << 20))
    spank.prolog(7, comment=f"stage={spank.shared}/alice/set/ {wait}")
    given = spank.environ(7, None) | {"SLURM_STEP_ID": "0"}
    HookRun("step", given, 0.0).run(spank.places, Clock())
    assert [one.result for one in spank.outcomes("step", 7)] == [found]
