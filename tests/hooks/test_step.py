"""The companion's helper as a process: its answer, and what is left when it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from forestage.bind import origins, redirect
from forestage.cache.lease import EntryUse
from forestage.clock import Clock
from forestage.config import switch
from forestage.events import EventRecord, read_events
from forestage.hooks import bare_name, boundary, hook_work
from forestage.hooks.boundary import IMAGE_OPTION, HookRun, _run_to_exit_status
from forestage.system.as_user import User
from helper import Helper, ask, environ, noted
from node import ALICE, BOB, HANGS, Node, content, held_at, until

MIB = 1024 * 1024

BY_HAND = [
    sys.executable,
    "-Ic",
    "from forestage.commands.console_script import main; main()",
    "step",
]


def warm(node: Node, job: int, name: str = "alice/image.sqsh") -> Path:
    """Has an earlier job copy an image, for which this job's Prolog then runs; its path."""
    path = node.put(name)
    assert Helper(node, environ(node, 1000, path)).lines()[-1][0] == "use"
    assert node.prolog(job, path).outcome.result == "hit"
    return path


@pytest.fixture
def slow(node: Node) -> Iterator[Node]:
    """Every copy takes seconds, as many as the image has MiB."""
    node.configure(redirect="spank", bandwidth="1M", threads=1)
    yield node
    for part in node.parts():
        if owner := part.find_record():
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner.pid, signal.SIGKILL)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """No stager of a Prolog copies a byte before the test calls it."""
    with held_at("reserved", tmp_path) as opened:
        yield opened


def used(node: Node, path: Path, tell: str = "1") -> list[str]:
    """The answer that makes each task show the copy of exactly this file."""
    seen = node.identity(path)
    facts = (seen.inode, seen.size, seen.mtime_ns, seen.ctime_ns)
    return ["use", str(node.cache.image_path(seen.key)), str(path), *map(str, facts), tell]


def keys(node: Node, job: int) -> set[str]:
    lease = node.lease(job)
    return {use.key for use in lease.uses} if lease else set()


# --- what a step gets


@pytest.mark.parametrize("user", [ALICE, BOB])
def test_step_with_redirect_spank_gets_the_entry_and_the_node_has_no_bind(
    spank: Node, user: User
) -> None:
    path = spank.put("images/a.sqsh", user=user, mode=0o600)
    assert ask(spank, 7, path, user=user, step=3) == used(spank, path)
    key = spank.identity(path).key
    assert spank.cache.image_path(key).read_bytes() == content()
    assert (spank.binds(), spank.shows_source(path)) == ({}, True)
    lease = spank.held(7)
    assert lease.uses == (EntryUse(key),)
    assert ask(spank, 7, "./images/a.sqsh", user=user) == used(spank, path)
    said = [(e.hook, e.step, e.outcome.result, e.outcome.redirect) for e in read_step_events(spank)]
    assert said == [
        ("step", 3, "copied", "spank"),
        ("step", 0, "hit", "spank"),
    ]
    assert spank.epilog(7).outcome.result == "released"
    assert spank.lease(7) is None


def read_step_events(node: Node) -> list[EventRecord]:
    return [event for event in read_events(node.places.events) if event.hook != "stager"]


def test_step_records_its_answer_for_further_steps(spank: Node) -> None:
    path = spank.put("images/a.sqsh")
    ask(spank, 7, path)
    ask(spank, 7, "./images/a.sqsh")
    for asked, (name, uid, event, *answer) in zip(
        (path, f"{spank.shared}/./images/a.sqsh"), noted(spank, 7), strict=True
    ):
        assert (name, uid, answer) == (str(asked), str(ALICE.uid), used(spank, path))
        # As the companion completes it.
        text = '{"time":5,"step":3,"total":0.1,' + event
        assert text.count('"total"') == text.count('"time"') == text.count('"step"') - 1 == 1
        assert '"wait"' not in text  # nobody has
        seen = msgspec.json.decode(text, type=EventRecord)
        assert (seen.hook, seen.job, seen.node, seen.step) == ("step", 7, "n1", 3)
        assert (seen.outcome.result, seen.outcome.image) == ("hit", str(path))


def test_prolog_records_the_answer_for_the_first_step_and_the_epilog_deletes_the_record(
    spank: Node,
) -> None:
    path = warm(spank, 7)
    ((asked, uid, _, *answer),) = noted(spank, 7)
    assert (asked, uid, answer) == (str(path), str(ALICE.uid), used(spank, path))
    spank.epilog(7)
    assert not spank.leases.step_record_file(7).exists()


@pytest.mark.parametrize(
    ("messages", "comment"),
    [("all", "any"), ("problems", "stage-tell=yes"), ("none", "stage-tell=yes")],
)
def test_successful_step_is_reported_once_with_messages_all_or_stage_tell(
    spank: Node, messages: str, comment: str
) -> None:
    """The Prolog leaves no note: the first step's helper has that line to write."""
    warm(spank, 1)
    spank.configure(redirect="spank", user_messages=messages, unpack_ratio=1)
    path = spank.shared / "alice/image.sqsh"
    assert spank.prolog(7, path, comment=comment).outcome.result == "hit"
    assert noted(spank, 7) == []
    first = Helper(spank, environ(spank, 7, path)).lines()
    (said,) = [line[1] for line in first if line[0] == "say"]
    # How long it waited is said from a tenth of a second on: on a busy machine it may be that.
    assert said.startswith(f"forestage: n1: {path} is read from this node's copy (hit")
    assert any(word in said for word in ("saves about", "costs about", "as fast as"))
    assert noted(spank, 7)
    assert Helper(spank, environ(spank, 7, path, step=1)).answer() == used(spank, path, "1")


def test_successful_step_is_not_reported_without_stage_tell(spank: Node) -> None:
    path = warm(spank, 7)
    assert Helper(spank, environ(spank, 7, path)).answer() == used(spank, path)
    assert spank.prolog(8, path, comment="stage-tell=no").outcome.result == "hit"
    assert Helper(spank, environ(spank, 8, path)).answer() == used(spank, path)


def test_forestage_result_variable_tells_the_outcome_of_the_image(spank: Node) -> None:
    path = warm(spank, 7)
    assert Helper(spank, environ(spank, 7, path)).variables() == {
        "FORESTAGE_RESULT": "hit", "FORESTAGE_IMAGE_PATH": str(path)
    }  # fmt: skip
    gone = Helper(spank, environ(spank, 7, "./none.sqsh")).variables()
    assert gone == {
        "FORESTAGE_RESULT": "missing",
        "FORESTAGE_IMAGE_PATH": f"{spank.shared}/./none.sqsh",
    }
    spank.prolog(8, path, comment="stage=off")
    off = Helper(spank, environ(spank, 8, path)).variables()
    assert off["FORESTAGE_RESULT"] == "off"
    spank.configure(redirect="none")
    unseen = Helper(spank, environ(spank, 9, path)).variables()
    assert unseen["FORESTAGE_RESULT"] == "none"


@pytest.mark.parametrize("redirect", ["spank", "bind"])
def test_truncated_image_is_declined_and_reported_to_the_user(node: Node, redirect: str) -> None:
    node.configure(redirect=redirect)
    path = node.put("alice/image.sqsh", content(1, 9 << 20))
    os.truncate(node.server / "alice/image.sqsh", 3 << 20)
    ran = node.prolog(7, path)
    assert (ran.code, *ran.said) == (0, "declined", "truncated")
    helper = Helper(node, environ(node, 7, path))
    said, last = helper.lines()
    told = (
        f"{path} is truncated: it has 3 MiB of the 9 MiB that its superblock says (copy it again, "
    )
    assert said[1].startswith(f"forestage: n1: {told}")
    assert last == ["leave", "truncated"]
    assert (node.entries(), node.parts()) == (set(), [])


def test_bare_name_of_an_existing_file_is_declined_with_a_hint_to_write_dot_slash(
    spank: Node,
) -> None:
    path = spank.put("image.sqsh")
    told = (
        "image.sqsh is an image of a registry to pyxis;"
        f" the file {path} lies here: write ./image.sqsh"
    )
    said, last = Helper(spank, environ(spank, 7, "image.sqsh")).lines()
    assert said[1] == f"forestage: n1: {told}"
    assert last == ["leave", "bare-name"]
    (outcome,) = spank.prolog(8, "image.sqsh").outcomes
    assert (outcome.reason, outcome.detail) == ("bare-name", told)


@pytest.mark.parametrize(
    ("name", "lies"),
    [("image.sqsh", False), ("ubuntu", True), ("folder.sqsh", False), ("a/b\n.sqsh", False)],
)
def test_bare_name_without_a_file_in_the_jobs_directory_is_a_registry_image(
    spank: Node, name: str, lies: bool
) -> None:
    """What ends like no image's file is not looked for."""
    if lies:
        spank.put(name)
    (spank.server / "folder.sqsh").mkdir()
    assert spank.prolog(7, name).said == ("declined", "registry")


def test_bare_name_of_a_file_that_the_user_may_not_see_is_a_registry_image(spank: Node) -> None:
    spank.put("closed/image.sqsh", user=BOB)
    (spank.server / "closed").chmod(0o700)
    assert spank.prolog(7, "closed/image.sqsh").said == ("declined", "registry")


def test_bare_name_lookup_in_a_hanging_directory_times_out(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child looks for it, and is given up."""
    real, hook = os.stat, os.getpid()

    def stat(path: str, *more: object, **how: object) -> os.stat_result:
        if str(path).endswith("image.sqsh"):
            assert os.getpid() != hook
            signal.pause()
        return real(path, *more, **how)  # type: ignore[call-overload, no-any-return]

    spank.put("image.sqsh")
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(bare_name, "LOOKUP_TIMEOUT", 0.2)
    assert spank.prolog(7, "image.sqsh").said == ("declined", "registry")


def test_forestage_image_path_variable_is_omitted_for_a_path_with_control_characters(
    spank: Node,
) -> None:
    found = Helper(spank, environ(spank, 7, "/a\x1b[2J.sqsh")).variables()
    assert found == {"FORESTAGE_RESULT": "bad-path"}


@pytest.mark.parametrize("redirected", ["bind", "none"])
def test_step_record_is_written_only_with_redirect_spank(node: Node, redirected: str) -> None:
    node.configure(redirect=redirected)
    path = node.staged(7)
    ask(node, 7, path)
    assert noted(node, 7) == []


def test_job_with_stage_off_has_no_step_record(spank: Node) -> None:
    path = spank.staged(1)
    spank.prolog(7, path, comment="stage=off")
    assert ask(spank, 7, path) == ["leave", "off"]
    assert noted(spank, 7) == []


def test_step_record_is_invalid_if_the_configuration_changes_during_the_hook(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = warm(spank, 1)
    read_config = hook_work.read_partition_config

    def and_then_it_changes(hook: HookRun, *given: object) -> object:
        found = read_config(hook, *given)  # type: ignore[arg-type]
        spank.configure(redirect="spank", user_messages="none")
        return found

    monkeypatch.setattr(hook_work, "read_partition_config", and_then_it_changes)
    spank.prolog(7, path)
    config = spank.places.etc / "forestage.yaml"
    line = f"file\t{config}\t{config.stat().st_ino}\t{config.stat().st_size}"
    assert noted(spank, 7)
    assert line not in spank.leases.step_record_file(7).read_text()


@pytest.mark.parametrize("redirected", ["bind", "none"])
def test_step_with_redirect_bind_mounts_and_with_none_only_stages(
    node: Node, redirected: str
) -> None:
    node.configure(redirect=redirected)
    path = node.put("alice/image.sqsh")
    key = node.identity(path).key
    assert ask(node, 7, path) == (used(node, path) if redirected == "bind" else ["leave", "none"])
    assert node.binds() == ({str(path): key} if redirected == "bind" else {})
    assert keys(node, 7) == {key}
    node.epilog(7)
    assert node.shows_source(path)


@pytest.mark.parametrize("redirected", ["bind", "spank"])
def test_step_unmounts_an_outdated_redirect_of_another_job(node: Node, redirected: str) -> None:
    path = node.staged(1)
    (node.server / "alice/image.sqsh").write_bytes(content(2))
    assert path.read_bytes() == content(1)
    node.configure(redirect=redirected)
    assert ask(node, 2, path)[0] == "use"
    assert path.read_bytes() == content(2)


@pytest.mark.parametrize("saves", ["alice/image.sqsh", "./alice/link", "{}"])
def test_step_that_saves_to_its_image_is_answered_leave_saves(spank: Node, saves: str) -> None:
    path = spank.put("alice/image.sqsh")
    (spank.server / "alice/link").symlink_to("image.sqsh")
    assert ask(spank, 7, path, saves=saves.format(path)) == ["leave", "saves"]
    assert ask(spank, 7, path, saves=str(path) + ".new") == used(spank, path)


def test_path_with_a_newline_is_answered_leave_and_not_copied(spank: Node) -> None:
    spank.put("alice/a\nuse\t/etc/shadow")
    (spank.server / "alice/link").symlink_to("a\nuse\t/etc/shadow")
    assert ask(spank, 7, "./alice/link") == ["leave", "bad-path"]
    assert ask(spank, 7, spank.shared / "alice/a\nuse\t/etc/shadow") == ["leave", "bad-path"]
    assert spank.entries() == set()


def test_step_of_a_user_without_rights_is_answered_leave_no_permission(spank: Node) -> None:
    path = spank.put("alice/image.sqsh", mode=0o600)
    ask(spank, 1, path)
    assert ask(spank, 2, path, user=BOB) == ["leave", "no-permission"]
    assert keys(spank, 2) == set()


# --- what its user reads


def test_user_message_says_why_the_original_path_is_read(node: Node) -> None:
    node.configure(redirect="spank", max_size=SMALL)
    path = node.put("alice/im\u202eage.sqsh")
    said, last = Helper(node, environ(node, 7, path)).lines()
    assert said[0] == "say"
    assert said[1].startswith("forestage: n1: /mnt/shared/alice/im\\u202eage.sqsh is read from its")
    assert last == ["leave", "no-room"]
    node.configure(redirect="spank", max_size=SMALL, user_messages="none")
    assert ask(node, 7, path) == ["leave", "no-room"]


SMALL = 1024


# --- the Prolog of such a job


def test_prolog_starts_the_copy_and_the_step_waits_for_the_copy(
    node: Node, gate: Callable[[], None]
) -> None:
    node.configure(redirect="spank")
    path = node.put("alice/image.sqsh")
    key = node.identity(path).key
    ran = node.prolog(7, path)
    assert (ran.code, *ran.said, ran.outcome.redirect) == (0, "started", "", "spank")
    assert (node.entries(), keys(node, 7), node.binds()) == (set(), {key}, {})
    until(
        lambda: any(part.find_record() for part in node.parts()), "the copy"
    )  # else the step's begins
    helper = Helper(node, environ(node, 7, path))
    assert helper.waits()
    gate()
    assert helper.answer() == used(node, path)
    assert [outcome.result for outcome in node.outcomes("stager")] == ["copied"]
    ran = node.prolog(8, path)
    assert (ran.outcome.result, ran.outcome.redirect) == ("hit", "spank")


def test_redirect_is_mounted_by_the_stager_if_the_prolog_may_not_wait(
    node: Node, gate: Callable[[], None]
) -> None:
    node.configure(deadline=0)
    path = node.put("alice/image.sqsh")
    code, result, reason = node.prolog(7, path).ended
    assert (code, result) == (0, "declined")
    assert reason in ("source-hangs", "deadline")  # a look may be over before it is looked for
    node.configure()
    assert node.prolog(7, path, comment="stage-wait=0").outcome.result == "started"
    assert node.shows_source(path)
    gate()
    until(lambda: str(path) in node.binds(), "the stager to redirect the path")
    assert node.prolog(8, path).outcome.redirect == "kept"


def test_stage_wait_of_the_job_limits_the_wait_of_its_steps(slow: Node) -> None:
    slow.configure(redirect="spank", bandwidth="10K", threads=1)
    path = slow.put("alice/image.sqsh", content(size=3 * MIB))
    slow.prolog(7, comment="stage-wait=1s")
    said, last = Helper(slow, environ(slow, 7, path)).lines()
    assert (said[0], last) == ("say", ["leave", "deadline"])
    slow.epilog(7)
    assert slow.leases.list_leases() == []


@pytest.mark.parametrize("with_image", [True, False])
def test_stage_off_applies_to_the_jobs_steps_until_its_epilog(
    spank: Node, with_image: bool
) -> None:
    path = spank.put("alice/image.sqsh")
    ran = spank.prolog(7, path if with_image else None, comment="stage=off")
    assert ran.ended == (0, "declined", "off")
    assert ask(spank, 7, path) == ["leave", "off"]
    assert spank.entries() == set()
    spank.epilog(7)
    assert spank.leases.list_leases() == []
    assert ask(spank, 7, path) == used(spank, path)


# --- several at once, and those that are killed


def test_simultaneous_steps_with_different_images_each_get_an_entry_and_a_lease(
    spank: Node,
) -> None:
    paths = [spank.put(f"alice/{n}.sqsh", content(n)) for n in range(4)]
    helpers = [Helper(spank, environ(spank, 7, path, step=n)) for n, path in enumerate(paths)]
    assert [helper.answer() for helper in helpers] == [used(spank, path) for path in paths]
    assert keys(spank, 7) == {spank.identity(path).key for path in paths}


def test_step_that_redirects_keeps_another_steps_use_in_the_lease(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = node.put("alice/1.sqsh", content(1)), node.put("alice/2.sqsh", content(2))
    mount = redirect.mount_redirect

    def late(*arguments: object) -> object:
        monkeypatch.setattr(redirect, "mount_redirect", mount)
        assert ask(node, 7, second, step=1)[0] == "use"
        return mount(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(redirect, "mount_redirect", late)
    HookRun("step", environ(node, 7, first), 0.0).run(node.places, Clock())
    lease = node.held(7)
    assert {use.path for use in lease.uses} == {str(first), str(second)}


def test_steps_for_the_same_image_share_one_copy(slow: Node) -> None:
    path = slow.put("alice/image.sqsh", content(size=2 * MIB))
    helpers = [Helper(slow, environ(slow, 7, path, step=n)) for n in range(3)]
    assert [helper.answer() for helper in helpers] == [used(slow, path)] * 3
    assert [outcome.result for outcome in slow.outcomes("stager")] == ["copied"]
    assert keys(slow, 7) == slow.entries()


def test_step_begins_after_its_deadline_and_the_copy_continues(slow: Node) -> None:
    slow.configure(redirect="spank", bandwidth="1M", threads=1, deadline="1s")
    path = slow.put("alice/image.sqsh", content(size=3 * MIB))
    said, last = Helper(slow, environ(slow, 7, path)).lines()
    assert said[0] == "say"
    assert "of 3 MiB of /mnt/shared/alice/image.sqsh are here" in said[1]
    assert last == ["leave", "deadline"]
    until(slow.entries, "the copy to go on for the job's next step")
    assert keys(slow, 7) == slow.entries()
    assert ask(slow, 7, path, step=1) == used(slow, path)


def test_copy_and_lease_survive_a_killed_step_helper(slow: Node) -> None:
    path = slow.put("alice/image.sqsh", content(size=3 * MIB))
    key = slow.identity(path).key
    helper = Helper(slow, environ(slow, 7, path))
    until(lambda: any(part.find_record() for part in slow.parts()), "the copy")
    helper.kill()
    assert keys(slow, 7) == {key}
    until(slow.entries, "the copy to go on")
    slow.epilog(7)
    assert slow.lease(7) is None


# --- whatever happens


def test_step_helper_exits_0_if_the_companion_has_gone(spank: Node) -> None:
    path = spank.put("alice/image.sqsh")
    helper = Helper(spank, environ(spank, 7, path))
    assert helper.process.stdout is not None
    helper.process.stdout.close()
    assert helper.process.wait(HANGS) == 0
    assert [outcome.result for outcome in spank.outcomes("step")] == ["copied"]


def test_step_with_a_broken_configuration_is_answered_leave(spank: Node) -> None:
    path = spank.put("alice/image.sqsh")
    spank.write_config("redirekt: spank\n")
    assert ask(spank, 7, path) == ["leave", "config"]
    assert spank.outcomes("step")[0].reason == "config"


def test_step_with_a_failing_cache_is_answered_leave(spank: Node) -> None:
    spank.configure(redirect="spank", user_messages="none")
    spank.cache.root.mkdir(mode=0o755)
    assert ask(spank, 7, spank.put("alice/image.sqsh")) == ["leave", "cache-not-ours"]


@pytest.mark.parametrize(
    ("module", "name", "is_served"),
    [(origins, "read_known_caches", False), (HookRun, "record_outcomes", True)],
)
def test_unexpected_exception_in_a_step_answers_leave_or_keeps_the_given_answer(
    spank: Node,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    module: object,
    name: str,
    is_served: bool,
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError

    spank.configure(redirect="spank")
    path = spank.put("alice/image.sqsh")
    answer = used(spank, path) if is_served else ["leave", "error"]
    for variable, value in environ(spank, 7, path).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("forestage.paths.NodePaths", lambda: spank.places)
    monkeypatch.setattr(module, name, broken)
    assert _run_to_exit_status("step") == 0
    assert capfd.readouterr().out.splitlines()[-1] == "\t".join(answer)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_STEP_ID"])
def test_step_with_a_malformed_environment_is_answered_leave(spank: Node, name: str) -> None:
    given = environ(spank, 7, spank.put("alice/image.sqsh")) | {name: "7\nuse"}
    assert Helper(spank, given).answer() == ["leave", "error"]


@pytest.mark.parametrize("image", [None, ""])
def test_step_without_an_image_is_answered_leave_no_image_and_logs_no_event(
    spank: Node, image: str | None
) -> None:
    given = environ(spank, 7, image or "")
    if image is None:
        del given[IMAGE_OPTION]
    assert Helper(spank, given).answer() == ["leave", "no-image"]
    assert not spank.places.events.exists()


@pytest.mark.parametrize("words", [[], ["--help"], ["--json"]])
def test_step_command_typed_by_hand_exits_with_usage(words: list[str]) -> None:
    ran = subprocess.run(
        [*BY_HAND, *words], env={"SLURM_JOB_ID": "7"}, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (boundary.USAGE_STATUS, "")
    assert ran.stderr.startswith("forestage: `step` is what forestage's SPANK plugin runs")


def test_step_on_a_switched_off_node_is_answered_leave_until_the_node_is_on(
    spank: Node,
) -> None:
    path = spank.put("alice/image.sqsh")
    spank.places.disabled.parent.mkdir(parents=True)
    spank.places.disabled.write_text("why not")
    assert ask(spank, 7, path) == ["leave", "disabled"]
    (outcome,) = spank.outcomes("step", 7)
    assert outcome.detail == f"{spank.places.disabled}: why not"
    assert spank.lease(7) is None
    spank.places.disabled.unlink()
    assert ask(spank, 7, path)[0] == "use"


def test_node_switched_off_until_a_time_serves_steps_afterwards(spank: Node) -> None:
    path = spank.put("alice/image.sqsh")
    switch.turn_off(spank.places, "INC-42", Clock().wall() + 3600)
    assert ask(spank, 7, path) == ["leave", "disabled"]
    spank.places.lasting_off_file.write_text("until 1\nINC-42\n")
    assert ask(spank, 7, path)[0] == "use"


def test_step_that_only_saves_unmounts_the_redirect_of_the_path(node: Node) -> None:
    path = node.staged(1)
    given = environ(node, 7, path, saves=str(path))
    del given[IMAGE_OPTION]
    assert Helper(node, given).answer() == ["leave", "no-image"]
    assert node.shows_source(path)


def test_save_path_that_the_user_may_not_write_keeps_its_redirect(node: Node) -> None:
    path = node.staged(1)
    node.prolog(2, user=BOB, saves=str(path))
    assert str(path) in node.binds()
    assert node.prolog(3, path).outcome.redirect == "kept"
