"""Images of a comment with `redirect: spank`: each step shows them, whatever it starts by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forestage.clock import Clock
from forestage.commands.event_counters import EventTally
from forestage.events import RequestOutcome, read_events
from forestage.features.contexts import AfterLeaseFacts, BeforeLeaseFacts, StepPart
from forestage.hooks.boundary import IMAGE_OPTION, STAGE_OPTION, HookRun
from forestage.slurm.hints import MAX_PROBLEMS, Request
from forestage.slurm.job import Job
from forestage.system import lock
from helper import Helper, environ, run_step, texts_for_user
from made_up import around_all
from node import Node, content, until


@pytest.fixture
def paths(spank: Node) -> list[Path]:
    """Two images that the cache has."""
    made = [spank.put(f"alice/{n}.sqsh", content(n)) for n in (1, 2)]
    for job, path in enumerate(made, 100):
        assert spank.prolog(job, path).said == ("started", "")
        key = spank.identity(path).key
        until(lambda key=key: key in spank.entries() and spank.is_idle(key), "the copy")  # type: ignore[misc]
        spank.epilog(job)
    return made


def used(node: Node, path: Path) -> str:
    found = node.identity(path)
    numbers = (found.inode, found.size, found.mtime_ns, found.ctime_ns, 1)
    return "\t".join(["use", str(node.cache.image_path(found.key)), str(path), *map(str, numbers)])


def test_step_without_an_image_is_answered_with_all_images_of_the_comment(
    spank: Node, paths: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    link = spank.server / "alice/link"
    link.symlink_to("2.sqsh")
    assert spank.prolog(1, comment=f"stage={paths[0]},{spank.shared}/alice/link").code == 0
    said = run_step(spank, 1, capfd)
    assert said.splitlines() == [
        *(f"also\t{used(spank, path)}" for path in paths),
        "leave\tno-image",
    ]
    assert [one.result for one in spank.outcomes("step", 1)] == ["hit", "hit"]
    spank.epilog(1)
    assert list(spank.leases.directory.iterdir()) == []


def test_feature_adds_images_for_its_raw_hint_word_and_gets_the_word_in_each_step(
    spank: Node,
    paths: list[Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add(facts: BeforeLeaseFacts) -> Job:
        images = [Request(str(paths[int(value)]), "hint") for _, value in facts.job.hints.words]
        return msgspec.structs.replace(facts.job, requests=tuple(images))

    def show(facts: AfterLeaseFacts) -> StepPart:
        return StepPart([("say", value) for _, value in facts.job.hints.words], [])

    around_all(monkeypatch, {"prolog.before_lease": add}, {"step.after_lease": show}, "stage-made")
    done = spank.prolog(1, comment="stage-made=0 stage-made=1")
    assert [one.result for one in done.outcomes] == ["hit", "hit"]
    shown = [f"also\t{used(spank, path)}" for path in paths]
    for _ in range(2):
        said = run_step(spank, 1, capfd).splitlines()
        assert said == [*shown, "say\t0", "say\t1", "leave\tno-image"]
    assert spank.prolog(2, comment=f"stage={paths[0]}").code == 0
    assert "say" not in run_step(spank, 2, capfd)


def test_forestage_local_lists_the_comments_images_that_are_in_the_cache(
    spank: Node, paths: list[Path]
) -> None:
    new = spank.put("alice/new.sqsh", content(3))
    assert spank.prolog(1, comment=f"stage={paths[1]},{new},{paths[0]} stage-wait=0").code == 0
    found = Helper(spank, environ(spank, 1, paths[0])).variables()
    listed = found["FORESTAGE_LOCAL"].split(":")
    assert [one for one in listed if one != str(new)] == [str(paths[1]), str(paths[0])]
    assert "FORESTAGE_DATA_RESULT" not in found


def test_step_with_an_image_is_answered_with_that_image_and_the_comments_images(
    spank: Node, paths: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert spank.prolog(1, comment=f"stage={paths[0]}").code == 0
    said = run_step(spank, 1, capfd, paths[1])
    assert said.splitlines() == [f"also\t{used(spank, paths[0])}", used(spank, paths[1])]


def test_declined_image_of_the_comment_is_not_in_a_steps_answer(
    spank: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    path = spank.put("alice/empty.sqsh", b"")
    assert spank.prolog(1, comment=f"stage={path}").said == ("declined", "empty")
    assert not spank.leases.hints_flag(1).exists()
    assert run_step(spank, 1, capfd) == "leave\tno-image\n"


def test_job_with_only_an_image_option_records_no_hints_for_other_steps(
    spank: Node, paths: list[Path]
) -> None:
    assert spank.prolog(1, paths[0]).said == ("hit", "")
    assert not spank.leases.hints_flag(1).exists()


def counted(node: Node) -> EventTally:
    found = EventTally()
    for event in read_events(node.places.events):
        if event.job == 1:
            found.add_event(event)
    return found


def test_bytes_count_as_spared_for_each_step_that_gets_the_comments_image(
    spank: Node, paths: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert spank.prolog(1, comment=f"stage={paths[0]}").said == ("hit", "")
    assert counted(spank).spared == {}
    run_step(spank, 1, capfd)
    run_step(spank, 1, capfd)
    size = paths[0].stat().st_size
    assert counted(spank).spared == {"hit": 2 * size}
    assert counted(spank).starts == {"hit": 2}


def test_hinted_image_with_redirect_bind_records_no_hints_for_steps(node: Node) -> None:
    path = node.put("alice/1.sqsh")
    assert node.prolog(1, comment=f"stage={path}").said == ("copied", "")
    assert not node.leases.hints_flag(1).exists()
    assert isinstance(node.outcomes("prolog", 1)[0], RequestOutcome)
    assert IMAGE_OPTION not in node.environ(1)


# Hints that come to nothing


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("comment", "line"),
    [
        ("stage-wait=10parsecs", "n1: ignored in --comment: stage-wait: expected"),
        ("stage-tell=loud", "n1: ignored in --comment: stage-tell: expected yes or no"),
        ("upstage=1 stage-weit=1m", "n1: ignored in --comment: unknown hint stage-weit="),
        ("stage=/typo.sqsh", "n1: stage=/typo.sqsh is not staged: /typo.sqsh does not exist; it"),
        (
            "stage=typo.sqsh",
            "n1: stage=typo.sqsh is not staged: typo.sqsh is an image of",
        ),
        ("stage=./typo.sqsh", "n1: stage=./typo.sqsh is not staged: {shared}/./typo.sqsh does not"),
        ("stage=/dev/null", "n1: stage=/dev/null is not staged: "),
        ("stage=/etc/passwd", "n1: stage=/etc/passwd is not staged: "),
    ],
)
def test_bad_hint_is_reported_to_the_user_once_by_the_first_step(
    loaded: Node, capfd: pytest.CaptureFixture[str], comment: str, line: str
) -> None:
    assert loaded.prolog(1, comment=comment.format(shared=loaded.shared)).code == 0
    (first,) = texts_for_user(run_step(loaded, 1, capfd))
    assert first.startswith(f"forestage: {line.format(shared=loaded.shared)}")
    assert texts_for_user(run_step(loaded, 1, capfd)) == []
    assert not loaded.leases.hints_flag(1).exists()
    loaded.epilog(1)
    assert not [*loaded.places.leases.iterdir()]


def asked(node: Node, option: str, comment: str = "") -> None:
    """A job that was submitted with these options; by hand, they may be anything."""
    environ = node.environ(1, comment=comment) | {STAGE_OPTION: option}
    HookRun("prolog", environ, time.monotonic()).run(node.places, Clock())


def test_stage_option_is_served_instead_of_the_comments_hint(
    loaded: Node, paths: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    asked(loaded, f"stage={paths[1]}\nstage-tell=yes\n", f"stage={paths[0]} stage-tell=no")
    answer = run_step(loaded, 1, capfd)
    assert f"also\t{used(loaded, paths[1])}" in answer.splitlines()
    assert str(paths[0]) not in answer
    (line,) = texts_for_user(answer)
    assert f"{paths[1]} is read from this node's copy" in line
    (event,) = [
        one for one in read_events(loaded.places.events) if (one.job, one.hook) == (1, "prolog")
    ]
    assert (event.options, event.ignored) == (("stage", "stage-tell"),) * 2


def test_stage_option_set_by_hand_in_the_environment_is_validated(
    loaded: Node, paths: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    bad = f"stage=../x\nstage={paths[0]}@/etc\nstage-dir=\x1b[2J\nother=1\nstage={paths[1]}"
    asked(loaded, bad)
    answer = run_step(loaded, 1, capfd)
    assert f"also\t{used(loaded, paths[1])}" in answer.splitlines()
    assert "/etc" not in "".join(line for line in answer.splitlines() if line.startswith("also"))
    lines = [line for line in texts_for_user(answer) if "ignored" in line]
    assert [line.partition("ignored: option ")[2][:14] for line in lines] == [
        "--stage=../x: ",
        "--stage-dir=\\x",
        "--other=1: unk",
    ]
    assert all(line.isprintable() for line in lines)


def test_failed_stage_option_is_reported_as_the_user_wrote_the_option(
    loaded: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    asked(loaded, "stage=/typo.sqsh\n")
    (line,) = texts_for_user(run_step(loaded, 1, capfd))
    assert line.startswith("forestage: n1: --stage=/typo.sqsh is not staged: /typo.sqsh does not")


def test_image_above_max_image_size_is_reported_to_the_user(
    loaded: Node, paths: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    loaded.configure(redirect="spank", max_image_size="1KiB")
    assert loaded.prolog(1, comment=f"stage={paths[0]}").code == 0
    (line,) = texts_for_user(run_step(loaded, 1, capfd, paths[1]))
    assert "max_image_size 1 KiB; make it smaller" in line


@pytest.mark.parametrize("why", ["none", "no companion", "off", "disabled", "good", "stage=off"])
def test_no_message_for_good_hints_or_if_hints_do_not_count(
    loaded: Node, paths: list[Path], capfd: pytest.CaptureFixture[str], why: str
) -> None:
    comment = f"stage={paths[0]}" if why == "good" else "stage-wait=10parsecs"
    if why == "none":
        loaded.configure(redirect="spank", user_messages="none")
    if why == "no companion":
        loaded.places.loaded.unlink()
    if why == "disabled":
        loaded.configure(redirect="spank", enabled=False)
    if why == "off":
        loaded.places.disabled.touch()
    if why == "stage=off":
        comment = "stage=off"
    loaded.prolog(1, comment=comment)
    assert texts_for_user(run_step(loaded, 1, capfd)) == []


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (lambda node: node.write_config("nonsense: true\n"), "forestage is not set up right"),
        (lambda node: node.cache.root.chmod(0o777), "this node's cache cannot be used"),
    ],
    ids=["configuration", "cache"],
)
@pytest.mark.parametrize("tell", [True, False])
def test_stage_tell_reports_each_request_that_the_node_cannot_serve(
    loaded: Node,
    paths: list[Path],
    capfd: pytest.CaptureFixture[str],
    trouble: Callable[[Node], None],
    why: str,
    tell: bool,
) -> None:
    """And reads what to do, not what an admin has to."""
    trouble(loaded)
    comment = f"stage={paths[0]}" + " stage-tell=yes" * tell
    loaded.prolog(1, paths[1], comment=comment)
    lines = [
        line.split()[2]
        for line in texts_for_user(run_step(loaded, 1, capfd, paths[1]))
        if why in line
    ]
    assert sorted(lines) == (list(map(str, paths)) if tell else lines)
    assert tell or len(lines) <= 1
    assert texts_for_user(run_step(loaded, 1, capfd, paths[1])) == []


def test_hint_with_terminal_escapes_is_reported_without_escapes(
    loaded: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded.prolog(1, comment="stage-\x1b]0;owned\x07=1 stage=/\x1b[2J\u202e.sqsh stage-wait=\x9b5m")
    text = run_step(loaded, 1, capfd)
    assert len(texts_for_user(text)) == 2, text  # the second token is no path of its own
    assert all(line.isprintable() for line in text.replace("\t", "").splitlines())


def test_step_on_another_node_than_the_first_reports_no_bad_hint(
    loaded: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded.prolog(1, comment="stage-wait=x")
    environ = loaded.environ(1, None) | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[0-1]"}
    capfd.readouterr()
    HookRun("step", environ, time.monotonic()).run(loaded.places, Clock())
    assert texts_for_user(capfd.readouterr().out) == []
    assert texts_for_user(run_step(loaded, 1, capfd)) == []


@pytest.mark.parametrize(("listed", "does"), [("n[1-2]", True), ("n[0-1]", False), ("n1", True)])
def test_only_the_first_node_of_a_job_reports_its_bad_hints(
    loaded: Node, capfd: pytest.CaptureFixture[str], listed: str, does: bool
) -> None:
    """Else a script with a step for each node would say them as often."""
    environ = loaded.environ(1, None, comment="stage-wait=x") | {"SLURM_JOB_NODELIST": listed}
    HookRun("prolog", environ, time.monotonic()).run(loaded.places, Clock())
    capfd.readouterr()
    assert bool(texts_for_user(run_step(loaded, 1, capfd))) == does


@pytest.mark.parametrize(
    "comment",
    [
        "stage=%ff@job",
        "stage={path}/%ff/",
        "stage={path}/x.sqsh@/mnt/%ff",
        "stage={path}@seed:%ff",
        "stage=\udcff/,./\udcff@job",
        "stage-list=%00",
        "stage-list={path}/%ff",
        "stage-dir=16M stage={path}/%c2%9b[2J@job",
    ],
)
@pytest.mark.parametrize("redirect", ["spank", "bind"])
def test_hint_of_any_bytes_exits_0_and_leaves_printable_events(
    node: Node, comment: str, redirect: str
) -> None:
    node.configure(redirect=redirect)
    ran = node.prolog(1, comment=comment.format(path=node.shared))
    assert (ran.code, node.epilog(1).code) == (0, 0)
    assert "failed" not in [one.result for one in ran.outcomes]
    assert node.places.events.read_text().replace("\n", "").isprintable()


def test_many_bad_hints_give_a_bounded_number_of_message_lines(
    loaded: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded.prolog(1, comment=" ".join(f"stage-{n}=x stage=/{n}" for n in range(40)))
    assert len(texts_for_user(run_step(loaded, 1, capfd))) == MAX_PROBLEMS


def test_bad_hint_is_not_reported_if_the_space_lock_stays_held(
    loaded: Node, capfd: pytest.CaptureFixture[str], short_locks: None
) -> None:
    loaded.cache.prepare(require_mount=False)
    with lock.held(loaded.cache.space_lock, 5):
        assert loaded.prolog(1, comment="stage-wait=x").said == ("declined", "bad-hint")
    assert texts_for_user(run_step(loaded, 1, capfd)) == []
