"""Warming: the jobs that are asked for, what their answers mean, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import NOW, Site
from forestage import events, warm, warmed
from forestage.cli.exits import Exit
from forestage.clock import Clock
from forestage.errors import SlurmError
from forestage.events import Event, Outcome
from forestage.slurm.job import read_hints
from forestage.slurm.queue import Slurm
from forestage.system import lock, run
from forestage.warm import Answer, Order
from forestage.warmed import Report, Said
from node import until

IMAGE = "/lustre/a.sqsh"
ORDER = Order((IMAGE,), ("n1", "n2", "n3"))
Fake = Callable[..., Slurm]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """A Slurm whose commands are these scripts; what they were asked is in `asked`."""

    def faking(srun: str, scancel: str = "exit 0") -> Slurm:
        for name, script in (("srun", srun), ("scancel", scancel)):
            program = tmp_path / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/asked\n{script}\n')
            program.chmod(0o755)
        return Slurm(f"{tmp_path}:{run.PATH}")

    return faking


def report(*said: Said, job: int = 7) -> str:
    return msgspec.json.encode(Report("warmed", job, said)).decode()


def says(*said: Said) -> str:
    return f"echo a TaskProlog has something to say; echo '{report(*said)}'"


def quiet(text: str) -> None:
    pass


# --- what is asked of Slurm


@given(st.lists(st.binary(min_size=1, max_size=20).map(lambda raw: raw.replace(b"\0", b"/")),
                min_size=1, max_size=16, unique=True))  # fmt: skip
def test_whatever_an_image_is_called_the_prolog_reads_it_so(names: list[bytes]) -> None:
    images = tuple(os.fsdecode(b"/" + name) for name in names)
    hints = read_hints(warm.comment(Order(images, ("n1",), wait="10m")))
    assert (hints.paths, hints.wait, hints.problems) == (images, 600.0, ())


def test_each_node_gets_a_job_of_its_own(fake: Fake, tmp_path: Path) -> None:
    slurm = fake(says(Said(IMAGE, "hit")))
    done = warm.warm(ORDER, slurm, Clock(), "token", quiet)
    assert (done.failed, [one.node for one in done.nodes]) == (0, ["n1", "n2", "n3"])
    lines = (tmp_path / "asked").read_text().splitlines()
    assert len(lines) == 3
    for node in ORDER.nodes:
        (line,) = [one for one in lines if f"--nodelist={node} " in one]
        for word in ("--nodes=1", "--ntasks=1", "--immediate=300", f"--comment=stage={IMAGE}"):
            assert f" {word} " in line


def test_partition_reservation_and_other_options_reach_srun(
    site: Site, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake(says(Said(IMAGE, "copied"))).path)
    words = ["--partition", "gpu", "--reservation", "r", "--srun", "--account=lab", "--busy", "1m"]
    done = site.run("warm", IMAGE, "--nodes", "n1", *words)
    assert done.exit_code == Exit.OK, done.output
    line = (tmp_path / "asked").read_text()
    for word in ("--partition=gpu", "--reservation=r", "--account=lab", "--immediate=60"):
        assert f" {word} " in line
    assert line.index("--account") < line.index(" -- ") < line.index(warm.PYTHON)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("n[1-3]!n2", ("n1", "n3")), ("n2,n1,n2", ("n1", "n2")), ("n[08-10]", ("n08", "n09", "n10"))],
)
def test_a_node_set_is_clustershells(text: str, nodes: tuple[str, ...]) -> None:
    assert warm.nodes_of(text) == nodes


@pytest.mark.parametrize("text", ["", "n[", "n[3-1]", "n1!n1"])
def test_a_node_set_that_is_none_starts_no_job(
    site: Site, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PATH", fake(says(Said(IMAGE, "hit"))).path)
    assert site.run("warm", IMAGE, "--nodes", text).exit_code == Exit.USAGE
    assert not (tmp_path / "asked").exists()


def test_more_images_than_a_hint_may_name_are_refused(site: Site) -> None:
    images = [f"/lustre/{number}" for number in range(warm.MAX_IMAGES + 1)]
    assert site.run("warm", *images, "--nodes", "n1").exit_code == Exit.USAGE


def test_without_slurm_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="srun is not installed"):
        warm.warm(ORDER, Slurm(str(tmp_path)), Clock(), "token", quiet)


def test_no_more_jobs_at_once_than_are_wanted(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    count = f"cd {tmp_path}/here; mkdir $$; ls | wc -l >>../most; rmdir $$; "
    order = msgspec.structs.replace(ORDER, nodes=tuple(f"n{n}" for n in range(6)), at_once=1)
    warm.warm(order, fake(count + says(Said(IMAGE, "hit"))), Clock(), "token", quiet)
    assert (tmp_path / "most").read_text().split() == ["1"] * 6


# --- what the answers mean


@pytest.mark.parametrize("result", ["copying", "declined", "failed", "unseen"])
def test_one_node_without_the_image_is_a_failure(
    site: Site, fake: Fake, monkeypatch: pytest.MonkeyPatch, result: warmed.Result
) -> None:
    bad = says(Said(IMAGE, "hit"), Said("/lustre/b", result, "no-room", "it is full"))
    script = f'case "$*" in *nodelist=n2*) {bad};; *) {says(Said(IMAGE, "hit"))};; esac'
    monkeypatch.setenv("PATH", fake(script).path)
    done = site.run("warm", IMAGE, "/lustre/b", "--nodes", "n[1-3]")
    assert done.exit_code == Exit.NOT_FOUND
    assert "2 of 3 nodes warm: 3 hit, 1 " + result in done.output
    assert "no-room: it is full" in done.output


def test_a_node_that_slurm_does_not_give_is_told_in_its_words(
    site: Site, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "srun: error: Unable to allocate resources: Requested nodes are busy"
    late = "srun: error: something that follows from it"
    monkeypatch.setenv("PATH", fake(f"echo '{error}' >&2; echo '{late}' >&2; exit 1").path)
    told = site.json("warm", IMAGE, "--nodes", "n1", code=Exit.NOT_FOUND)
    (node,) = told["nodes"]
    assert node["problem"] == "Unable to allocate resources: Requested nodes are busy"
    assert told["failed"] == 1


@pytest.mark.parametrize(
    "out", ["", "{}", '{"job": 1}', '{"forestage": "other", "job": 1, "images": []}', "\x00\x1b[2J"]
)
def test_what_is_no_answer_is_not_taken_for_one(out: str) -> None:
    told = warm.answer("n1", run.Ran(("srun",), 0, out, ""), 1.0)
    assert (told.is_warm, told.problem) == (False, "srun ended with 0 and no answer")


def test_an_answer_without_an_image_is_not_warm() -> None:
    assert not Answer("n1", 1.0, 7, ()).is_warm


def test_the_progress_names_who_is_missing() -> None:
    done = {"n2": Answer("n2", 1.0, 7, (Said(IMAGE, "hit"),))}
    assert warm.progress(ORDER, done) == "1 of 3 nodes done; 1 hit; waiting for n1, n3"


# --- the end


class Interrupted(Exception):
    """Stands for ^C."""


def test_an_interrupted_command_cancels_its_jobs_and_waits_for_them(
    fake: Fake, tmp_path: Path
) -> None:
    """An srun that were killed would leave its job behind; scancel ends the job, and so srun."""
    srun = f"echo $$ >>{tmp_path}/pids; while ! test -e {tmp_path}/cancelled; do sleep 0.02; done"
    slurm = fake(srun, f"touch {tmp_path}/cancelled")
    pids = tmp_path / "pids"

    class Impatient(Clock):
        """Interrupts as soon as all jobs run."""

    def tell(text: str) -> None:
        until(lambda: pids.exists() and pids.read_text().count("\n") == 2, "both sruns")
        raise Interrupted

    order = msgspec.structs.replace(ORDER, at_once=2)
    with pytest.raises(Interrupted):
        warm.warm(order, slurm, Impatient(), "token", tell)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert sorted({line.split()[0] for line in asked}) == ["scancel", "srun"]
    assert sum(line.startswith("srun") for line in asked) == 2, "the third is not begun any more"
    assert "scancel --name=forestage-warm-token" in asked
    assert all("--job-name=forestage-warm-token" in line for line in asked if "srun" in line)
    for pid in pids.read_text().split():
        assert not Path("/proc", pid).exists()


def test_an_srun_that_asks_for_its_job_after_the_cancelling_is_cancelled_too(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first scancel finds no job yet."""
    monkeypatch.setattr(warm, "PATIENCE", 600.0)
    there = tmp_path / "there"
    srun = f"touch {tmp_path}/began; while ! test -e {tmp_path}/early; do sleep 0.02; done; "
    srun += f"touch {there}; while test -e {there}; do sleep 0.02; done"
    slurm = fake(srun, f"rm -f {there}; touch {tmp_path}/early")

    def tell(text: str) -> None:
        until((tmp_path / "began").exists, "an srun")
        raise Interrupted

    with pytest.raises(Interrupted):
        warm.warm(Order((IMAGE,), ("n1",)), slurm, Clock(), "token", tell)
    assert (tmp_path / "asked").read_text().count("scancel") >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_is_as_an_interrupt(
    site: Site, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Else srun would be killed with us, and its job go on."""
    cancelled = tmp_path / "cancelled"
    srun = f"kill -{number} {os.getpid()}; while ! test -e {cancelled}; do sleep 0.02; done"
    monkeypatch.setenv("PATH", fake(srun, f"touch {cancelled}").path)
    before = signal.getsignal(number)
    assert site.run("warm", IMAGE, "--nodes", "n1").exit_code == Exit.INTERRUPTED
    assert cancelled.exists()
    assert signal.getsignal(number) is before


def test_an_srun_that_does_not_heed_scancel_is_killed(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "PATIENCE", 0.1)
    pid = tmp_path / "pid"
    slurm = fake(f"echo $$ >{pid}; exec sleep 600")

    def tell(text: str) -> None:
        until(lambda: pid.exists() and pid.read_text().endswith("\n"), "srun's pid")
        raise Interrupted

    with pytest.raises(Interrupted):
        warm.warm(Order((IMAGE,), ("n1",)), slurm, Clock(), "token", tell)
    assert not Path("/proc", pid.read_text().strip()).exists()


# --- on the node: what root's job reads


def event(hook: events.Hook, job: int, at: float = NOW, total: float = 1.0, **facts: str) -> Event:
    outcome = msgspec.convert({"asked": IMAGE, "image": IMAGE, "key": "k", **facts}, Outcome)
    return Event(at, hook, job, outcome, total=total)


@pytest.mark.parametrize(
    ("told", "result", "reason"),
    [
        ([event("prolog", 7, result="hit")], "hit", ""),
        ([event("prolog", 7, result="declined", reason="no-room")], "declined", "no-room"),
        ([event("prolog", 7, result="failed", reason="io")], "failed", "io"),
        ([event("prolog", 8, result="hit")], "failed", ""),  # another job's
        ([], "failed", ""),
        ([event("prolog", 7, result="started")], "copying", ""),
        ([event("prolog", 7, result="declined", reason="deadline")], "copying", ""),
        # The copy goes on, and ends, after its Prolog.
        ([event("prolog", 7, result="started"), event("stager", 7, NOW + 9, result="copied")],
         "copied", ""),
        # It was another job's.
        ([event("prolog", 7, result="declined", reason="deadline"),
          event("stager", 3, NOW + 9, result="copied")], "copied", ""),
        ([event("prolog", 7, result="started"),
          event("stager", 7, NOW + 9, result="failed", reason="copy")], "failed", "copy"),
        # An older copy of the same key, evicted since, is not this one.
        ([event("stager", 3, NOW - 99, result="copied"), event("prolog", 7, result="started")],
         "copying", ""),
        # Its own stager may be on record before the hook is.
        ([event("stager", 7, NOW - 0.5, result="copied"), event("prolog", 7, result="started")],
         "copied", ""),
        # Requeued: the last run counts.
        ([event("prolog", 7, NOW - 50, result="declined", reason="no-room"),
          event("prolog", 7, result="hit")], "hit", ""),
    ],
)  # fmt: skip
def test_the_events_are_read_as_they_are_meant(told: list[Event], result: str, reason: str) -> None:
    (said,) = warmed.by_events(told, 7, [IMAGE])
    assert (said.result, said.reason) == (result, reason)


def test_an_image_with_an_odd_name_is_found_among_the_events() -> None:
    odd = "/lustre/a\nb"
    told = [event("prolog", 7, result="hit", asked="/lustre/a\\nb")]
    assert warmed.by_events(told, 7, [odd])[0].result == "hit"


def test_root_waits_for_a_copy_that_the_prolog_left_under_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = site.image("a.sqsh", b"12345678")
    image, key = str(source), site.look(source).key
    site.part(source)
    facts = {"asked": image, "image": image, "key": key}
    started = event("prolog", 7, result="started", **facts)
    events.append(site.places.events, [started])
    slept = []
    held = lock.held(site.node.cache.key_lock(key), 1.0)

    class Turning(Clock):
        def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                held.__exit__(None, None, None)
                copied = event("stager", 7, NOW + 1, result="copied", **facts)
                events.append(site.places.events, [copied])

    node = msgspec.structs.replace(site.node, clock=Turning())
    with held:
        (said,) = warmed.watched(node, 7, (image,))
    assert (said.result, len(slept)) == ("copied", 3)


@pytest.mark.parametrize("published", [True, False])
def test_a_copy_that_ended_without_a_word_is_looked_for(site: Site, published: bool) -> None:
    source = site.image("a.sqsh", b"12345678")
    key = site.publish(source) if published else site.look(source).key
    image = str(source)
    told = event("prolog", 7, result="started", asked=image, image=image, key=key)
    events.append(site.places.events, [told])

    class NoWait(Clock):
        def sleep(self, seconds: float) -> None:
            pass

    node = msgspec.structs.replace(site.node, clock=NoWait())
    (said,) = warmed.watched(node, 7, (image,))
    assert said.result == ("copied" if published else "failed")


# --- on the node: what other users' jobs see


def test_users_see_what_their_paths_show(tmp_path: Path) -> None:
    copy = tmp_path / "a"
    copy.write_bytes(b"1")
    path, made = str(copy), copy.stat().st_ctime
    seen = [
        warmed.by_mounts([path], "bind", 7, made + 1, path, path).result,
        warmed.by_mounts([path], "bind", 7, made - 1, path, path).result,
        warmed.by_mounts([], "bind", 7, made - 1, path, path).result,
    ]
    assert seen == ["hit", "copied", "unseen"]
    gone = warmed.by_mounts([path], "bind", 7, made, path, str(tmp_path / "none"))
    assert (gone.result, gone.reason) == ("declined", "missing")


@pytest.mark.parametrize("redirect", ["spank", "none"])
def test_users_are_told_where_nothing_can_be_seen(tmp_path: Path, redirect: str) -> None:
    (tmp_path / "a").touch()
    path = str(tmp_path / "a")
    said = warmed.by_mounts([], redirect, 7, NOW, path, path)
    assert said.result == "unseen"
    assert f"redirect: {redirect}" in said.detail
    assert "forestage explain 7" in said.detail


def test_a_user_without_rights_falls_back_and_a_broken_configuration_is_an_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/var/log/forestage/events.jsonl")

    monkeypatch.setattr(warmed, "watched", refuse)
    image = str(site.image("a"))
    (said,) = warmed.look(site.places, Clock(), 7, NOW, (image,))
    assert said.result == "unseen"
    site.configure("nonsense: 1\n")
    (said,) = warmed.look(site.places, Clock(), 7, NOW, (image,))
    assert (said.result, said.reason) == ("failed", "config")


def test_the_answer_is_one_line_whatever_the_image_is_called(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warmed, "Places", lambda: site.places)
    warmed.main(["7", str(NOW), "/lustre/a\nb", os.fsdecode(b"/lustre/\xff")])
    (line,) = capsys.readouterr().out.splitlines()
    assert [one["image"] for one in json.loads(line)["images"]] == [
        "/lustre/a\\nb",
        "/lustre/\\udcff",
    ]
    told = warm.answer("n1", run.Ran(("srun",), 0, line, ""), 1.0)
    assert (told.job, len(told.images)) == (7, 2)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)
