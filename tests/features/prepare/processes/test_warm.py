"""`forestage warm`: the jobs it asks Slurm for, what their answers mean, and that none stays."""

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
from forestage import events
from forestage.clock import Clock
from forestage.commands.command_context import ExitStatus
from forestage.errors import SlurmError
from forestage.events import CopyOutcome, EventRecord, Outcome, user_files
from forestage.features.prepare import job_images, warm, warm_node
from forestage.features.prepare.job_images import ImageResult, JobImagesStatus
from forestage.features.prepare.warm import WarmNodeResult, WarmRequest
from forestage.features.prepare.warm_node import WarmNodeReport
from forestage.slurm.hints import parse_hints
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import lock, run
from forestage.units import make_printable
from node import until

IMAGE = "/lustre/a.sqsh"
ORDER = WarmRequest((IMAGE,), ("n1", "n2", "n3"))
Fake = Callable[..., SlurmClient]


@pytest.fixture
def fake(programs: Callable[..., Path]) -> Fake:
    """Slurm's commands as scripts."""

    def faking(srun: str, scancel: str = "exit 0") -> SlurmClient:
        programs(srun=srun, scancel=scancel)
        return SlurmClient(run.PATH)

    return faking


def asked(tmp_path: Path) -> list[str]:
    file = tmp_path / "asked"
    return file.read_text().splitlines() if file.exists() else []


def answers(*images: ImageResult, job: int = 7) -> str:
    """A script of an srun that prints this, and what a TaskProlog prints."""
    report = msgspec.json.encode(WarmNodeReport("warm", job, images)).decode()
    return f"echo a TaskProlog prints this; echo '{report}'"


def ignored(text: str) -> None:
    pass


# --- what Slurm is asked for


@given(st.lists(st.binary(min_size=1, max_size=20).map(lambda raw: raw.replace(b"\0", b"/")),
                min_size=1, max_size=16, unique=True))  # fmt: skip
def test_warm_comment_with_any_image_name_is_parsed_back_to_the_same_paths(
    names: list[bytes],
) -> None:
    # One that ends with a slash is a directory, and no image.
    images = tuple(dict.fromkeys(os.fsdecode(b"/" + name + b".") for name in names))
    hints = parse_hints(warm.format_comment(WarmRequest(images, ("n1",), wait="10m")))
    assert (hints.paths, hints.wait, hints.problems) == (images, 600.0, ())


def test_warm_of_three_nodes_runs_one_srun_for_each_node(fake: Fake, tmp_path: Path) -> None:
    done = warm.warm_nodes(
        ORDER, fake(answers(ImageResult(IMAGE, "hit"))), Clock(), "token", ignored
    )
    assert (done.failed, [one.node for one in done.nodes]) == (0, ["n1", "n2", "n3"])
    assert len(asked(tmp_path)) == 3
    for node in ORDER.nodes:
        (line,) = [one for one in asked(tmp_path) if f"--nodelist={node} " in one]
        for word in ("--nodes=1", "--ntasks=1", "--immediate=300", f"--comment=stage={IMAGE}"):
            assert f" {word} " in line


def test_warm_runs_no_more_jobs_at_once_than_at_once_allows(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    number = f"cd {tmp_path}/here; mkdir $$; ls | wc -l >>../most; rmdir $$; "
    order = msgspec.structs.replace(ORDER, nodes=tuple(f"n{n}" for n in range(6)), at_once=1)
    slurm = fake(number + answers(ImageResult(IMAGE, "hit")))
    warm.warm_nodes(order, slurm, Clock(), "token", ignored)
    assert (tmp_path / "most").read_text().split() == ["1"] * 6


def test_warm_passes_its_options_to_srun(site: Site, fake: Fake, tmp_path: Path) -> None:
    fake(answers(ImageResult(IMAGE, "copied")))
    words = ["--partition", "gpu", "--reservation", "r", "--srun", "--account=lab", "--busy", "1m"]
    done = site.run("warm", IMAGE, "--nodes", "n1", *words)
    assert done.exit_code == ExitStatus.OK, done.output
    (line,) = asked(tmp_path)
    for word in ("--partition=gpu", "--reservation=r", "--account=lab", "--immediate=60"):
        assert f" {word} " in line
    assert line.index("--account") < line.index(" -- ") < line.index(warm.PYTHON)


@pytest.mark.parametrize(
    ("nodes", "images"),
    [("", 1), ("n[", 1), ("n[3-1]", 1), ("n1!n1", 1), ("n1", warm.MAX_IMAGES + 1)],
)
def test_warm_with_bad_nodes_or_too_many_images_exits_with_usage_and_runs_no_srun(
    site: Site, fake: Fake, tmp_path: Path, nodes: str, images: int
) -> None:
    fake(answers(ImageResult(IMAGE, "hit")))
    named = [f"/lustre/{number}" for number in range(images)]
    assert site.run("warm", *named, "--nodes", nodes).exit_code == ExitStatus.USAGE
    assert asked(tmp_path) == []


def test_warm_without_srun_raises_slurm_error(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="srun is not installed"):
        warm.warm_nodes(ORDER, SlurmClient(str(tmp_path)), Clock(), "token", ignored)


# --- what the answers mean


@pytest.mark.parametrize("result", ["copying", "declined", "failed", "unseen"])
def test_warm_exits_with_not_found_if_one_node_lacks_an_image(
    site: Site, fake: Fake, result: job_images.ImageOutcome
) -> None:
    good = ImageResult(IMAGE, "hit")
    bad = answers(good, ImageResult("/lustre/b", result, "no-room", "it is full"))
    fake(f'case "$*" in *nodelist=n2*) {bad};; *) {answers(good)};; esac')
    done = site.run("warm", IMAGE, "/lustre/b", "--nodes", "n[1-4]!n4")
    assert done.exit_code == ExitStatus.NOT_FOUND
    assert "2 of 3 nodes warm: 3 hit, 1 " + result in done.output
    assert "no-room: it is full" in done.output


def test_warm_reports_the_first_error_line_of_a_failed_srun(site: Site, fake: Fake) -> None:
    error = "srun: error: Unable to allocate resources: Requested nodes are busy"
    later = "srun: error: something that follows from it"
    fake(f"echo '{error}' >&2; echo '{later}' >&2; exit 1")
    report = site.json("warm", IMAGE, "--nodes", "n1", code=ExitStatus.NOT_FOUND)
    (node,) = report["nodes"]
    assert node["problem"] == "Unable to allocate resources: Requested nodes are busy"
    assert report["failed"] == 1


@pytest.mark.parametrize(
    "out", ["", "{}", '{"job": 1}', '{"forestage": "other", "job": 1, "images": []}', "\x00\x1b[2J"]
)
def test_warm_treats_unknown_srun_output_as_no_answer(out: str) -> None:
    found = warm.parse_node_result("n1", run.ProcessResult(("srun",), 0, out, ""), 1.0)
    assert (found.is_warm, found.problem) == (False, "it ended with 0 and no answer")


def test_warm_progress_line_names_the_nodes_still_waited_for() -> None:
    done = {"n2": WarmNodeResult("n2", 1.0, 7, (ImageResult(IMAGE, "hit"),))}
    assert warm.format_progress(ORDER, done) == "1 of 3 nodes done; 1 hit; waiting for n1, n3"


# --- interrupts


class Interrupted(Exception):
    """Stands for ^C."""


def interrupt_when(happened: Callable[[], bool]) -> Callable[[str], None]:
    def progress(text: str) -> None:
        until(happened, "the sruns")
        raise Interrupted

    return progress


def test_interrupted_warm_cancels_its_jobs_and_waits_for_their_sruns(
    fake: Fake, tmp_path: Path
) -> None:
    """An srun that were killed would leave its job behind; scancel ends the job, and so srun."""
    pids = tmp_path / "pids"
    srun = f"echo $$ >>{pids}; while ! test -e {tmp_path}/cancelled; do sleep 0.02; done"
    slurm = fake(srun, f"touch {tmp_path}/cancelled")
    both = interrupt_when(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    with pytest.raises(Interrupted):
        warm.warm_nodes(msgspec.structs.replace(ORDER, at_once=2), slurm, Clock(), "token", both)
    lines = asked(tmp_path)
    assert sorted({line.split()[0] for line in lines}) == ["scancel", "srun"]
    assert sum(line.startswith("srun") for line in lines) == 2, "the third is not begun any more"
    assert "scancel --name=forestage-warm-token" in lines
    assert all("--job-name=forestage-warm-token" in line for line in lines if "srun" in line)
    assert not [pid for pid in pids.read_text().split() if Path("/proc", pid).exists()]


def test_warm_interrupted_before_srun_submits_still_cancels_the_job(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first scancel finds no job yet."""
    monkeypatch.setattr(warm, "CANCEL_TIMEOUT", 600.0)
    job = tmp_path / "job"
    srun = f"touch {tmp_path}/began; while ! test -e {tmp_path}/early; do sleep 0.02; done; "
    srun += f"touch {job}; while test -e {job}; do sleep 0.02; done"
    slurm = fake(srun, f"rm -f {job}; touch {tmp_path}/early")
    began = interrupt_when((tmp_path / "began").exists)
    with pytest.raises(Interrupted):
        warm.warm_nodes(WarmRequest((IMAGE,), ("n1",)), slurm, Clock(), "token", began)
    assert sum(line.startswith("scancel") for line in asked(tmp_path)) >= 2


def test_interrupted_warm_kills_an_srun_that_does_not_end(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "CANCEL_TIMEOUT", 0.1)
    pid = tmp_path / "pid"
    slurm = fake(f"echo $$ >{pid}; exec sleep 600")
    began = interrupt_when(lambda: pid.exists() and pid.read_text().endswith("\n"))
    with pytest.raises(Interrupted):
        warm.warm_nodes(WarmRequest((IMAGE,), ("n1",)), slurm, Clock(), "token", began)
    assert not Path("/proc", pid.read_text().strip()).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_warm_cancels_its_jobs_on_sigterm_and_sighup(
    site: Site, fake: Fake, tmp_path: Path, number: int
) -> None:
    """Else srun would be killed with us, and its job go on."""
    cancelled = tmp_path / "cancelled"
    srun = f"kill -{number} {os.getpid()}; while ! test -e {cancelled}; do sleep 0.02; done"
    fake(srun, f"touch {cancelled}")
    before = signal.getsignal(number)
    assert site.run("warm", IMAGE, "--nodes", "n1").exit_code == ExitStatus.INTERRUPTED
    assert cancelled.exists()
    assert signal.getsignal(number) is before


# --- on the node


class NoWait(Clock):
    def sleep(self, seconds: float) -> None:
        pass


def event(
    hook: events.EventHook, job: int, at: float = NOW, total: float = 1.0, **facts: str
) -> EventRecord:
    request = facts.pop("request", IMAGE)
    facts = {"image": IMAGE, "key": "k", **facts}
    outcome: Outcome = msgspec.convert(
        {"kind": "copied", **facts}
        if hook == "stager"
        else {"kind": "handled", "request": request, **facts},
        Outcome,  # type: ignore[arg-type]
    )
    return EventRecord(at, hook, job, outcome, total=total)


@pytest.mark.parametrize(
    ("log", "result", "reason"),
    [
        ([event("prolog", 7, result="hit")], "hit", ""),
        ([event("prolog", 7, result="declined", reason="no-room")], "declined", "no-room"),
        ([event("prolog", 7, result="failed", reason="io")], "failed", "io"),
        ([event("prolog", 8, result="hit")], "failed", ""),  # another job's
        ([], "failed", ""),
        ([event("prolog", 7, result="started")], "copying", ""),
        # The step of that very job read through it.
        ([event("prolog", 7, result="started"), event("step", 7, result="through")],
         "copying", ""),
        ([event("step", 7, result="through"), event("stager", 7, NOW + 9, result="copied")],
         "copied", ""),
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
def test_job_images_status_is_derived_from_the_events_of_the_job_and_its_copies(
    log: list[EventRecord], result: str, reason: str
) -> None:
    (found,) = job_images.results_from_events(log, 7, [IMAGE])
    assert (found.result, found.reason) == (result, reason)


def test_job_images_status_finds_events_of_a_name_with_a_newline() -> None:
    log = [event("prolog", 7, result="hit", request="/lustre/a\\nb")]
    assert job_images.results_from_events(log, 7, ["/lustre/a\nb"])[0].result == "hit"


def test_warm_on_the_node_as_root_waits_for_a_copy_started_by_the_prolog(site: Site) -> None:
    source = site.image("a.sqsh", b"12345678")
    image, key = str(source), site.look(source).key
    site.part(source)
    facts = {"request": image, "image": image, "key": key}
    events.append_events(site.places.events, [event("prolog", 7, result="started", **facts)])
    slept = []
    held = lock.held(site.node.cache.key_lock(key), 1.0)

    class Turning(Clock):
        def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                held.__exit__(None, None, None)
                copied = event("stager", 7, NOW + 1, result="copied", **facts)
                events.append_events(site.places.events, [copied])

    with held:
        (found,) = warm_node.read_results(site.places, Turning(), 7, (image,))
    assert (found.result, len(slept)) == ("copied", 3)


@pytest.mark.parametrize("published", [True, False])
def test_warm_on_the_node_checks_the_cache_for_a_copy_without_an_end_event(
    site: Site, published: bool
) -> None:
    source = site.image("a.sqsh", b"12345678")
    key = site.publish(source) if published else site.look(source).key
    started = event("prolog", 7, result="started", request=str(source), image=str(source), key=key)
    events.append_events(site.places.events, [started])
    (found,) = warm_node.read_results(site.places, NoWait(), 7, (str(source),))
    assert found.result == ("copied" if published else "failed")


def refuse(*_: object) -> None:
    raise PermissionError(13, "Permission denied", "/var/log/forestage/events.jsonl")


@pytest.fixture
def alice(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[[EventRecord], None]:
    """This process is a user who may not read the log; adds an event to what they may read."""
    monkeypatch.setattr(events, "read_new_events", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    file = user_files.user_file_path(site.places.users, 1000)
    file.parent.mkdir(parents=True)
    return lambda event: events.append_events(file, [event])


def test_warm_on_the_node_reports_unseen_to_a_user_without_events(
    site: Site, alice: Callable[[EventRecord], None]
) -> None:
    alice(event("prolog", 6, result="hit", request=IMAGE))
    (found,) = warm_node.read_results(site.places, Clock(), 7, (IMAGE,))
    assert (found.result, found.is_here) == ("unseen", False)
    assert "forestage explain 7" in found.detail


def test_warm_on_the_node_as_a_user_waits_for_another_users_copy(
    site: Site, alice: Callable[[EventRecord], None]
) -> None:
    """An image with an odd name is found; one that the job did not name has failed."""
    odd, key = "/lustre/a\nb", "a" * 32
    alice(event("prolog", 7, result="started", request=make_printable(odd), key=key))

    class Turning(Clock):
        def sleep(self, seconds: float) -> None:
            alice(EventRecord(NOW + 9, "stager", 0, CopyOutcome("copied", key=key, wait=9.0)))

    found = warm_node.read_results(site.places, Turning(), 7, (odd, IMAGE))
    assert [(one.image, one.result) for one in found] == [(odd, "copied"), (IMAGE, "failed")]


def test_warm_on_the_node_as_a_user_waits_at_most_an_hour_for_a_killed_copy(
    site: Site, alice: Callable[[EventRecord], None]
) -> None:
    alice(event("prolog", 7, result="started", request=IMAGE, key="a" * 32))
    now = 0.0

    class Hours(Clock):
        def monotonic(self) -> float:
            return now

        def sleep(self, seconds: float) -> None:
            nonlocal now
            now += 600.0

    (found,) = warm_node.read_results(site.places, Hours(), 7, (IMAGE,))
    assert (found.result, found.is_here) == ("copying", False)
    assert now >= warm_node.USER_TIMEOUT


def test_warm_on_the_node_stops_waiting_if_no_copy_runs(site: Site) -> None:
    gone = JobImagesStatus((ImageResult(IMAGE, "failed", "copy"),), has_unended_copy=True)
    asked = []

    def look() -> JobImagesStatus:
        asked.append(1)
        return gone

    assert warm_node.wait_for_copies(look, NoWait()) == gone.images
    assert len(asked) == warm_node.TRIES


def test_warm_on_the_node_reports_a_broken_configuration_as_failed(site: Site) -> None:
    site.configure("nonsense: 1\n")
    (found,) = warm_node.read_results(site.places, Clock(), 7, (IMAGE,))
    assert (found.result, found.reason) == ("failed", "config")


def test_warm_on_the_node_prints_odd_names_on_one_line_that_warm_parses(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_node, "NodePaths", lambda: site.places)
    warm_node.main(["7", "/lustre/a\nb", os.fsdecode(b"/lustre/\xff")])
    (line,) = capsys.readouterr().out.splitlines()
    names = [one["image"] for one in json.loads(line)["images"]]
    assert names == ["/lustre/a\\nb", "/lustre/\\udcff"]
    found = warm.parse_node_result("n1", run.ProcessResult(("srun",), 0, line, ""), 1.0)
    assert (found.job, len(found.images)) == (7, 2)
