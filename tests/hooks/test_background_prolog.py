"""The Prolog as the script that slurmd runs, and its process that works on when that has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.clock import Clock
from forestage.hooks import boundary
from forestage.hooks.background_prolog import PROCESS_NAME
from forestage.hooks.boundary import STAGE_OPTION, HookRun
from forestage.slurm import slurm_conf
from forestage.system import lock
from node import ALICE, HANGS, Node, children_left, comm, content, start_hook, until


class Background:
    """A node with the companion, whose Prologs leave."""

    def __init__(self, node: Node, job: int = 7) -> None:
        self.node = node
        self.job = job
        self.mark = node.places.leases / f"{job}.prolog"

    def environ(
        self,
        image: Path | str | None = None,
        comment: Path | str | None = None,
        option: Path | str | None = None,
    ) -> dict[str, str]:
        """What slurmd gives its hooks; with a slurm.conf that nobody writes again."""
        given = self.node.environ(self.job, image, comment=comment)  # type: ignore[arg-type]
        conf = self.node.places.root / "same/slurm.conf"
        if not conf.exists():
            conf.parent.mkdir()
            conf.write_text("ClusterName=c\n")
        words = {STAGE_OPTION: str(option)} if option else {}
        return given | words | {"SLURM_CONF": str(conf)}

    def hook(self, name: boundary.HookKind, **asked: str | Path | None) -> subprocess.Popen[bytes]:
        """Starts one as slurmd does."""
        environ = self.environ(**asked)
        context = {"SLURM_SCRIPT_CONTEXT": "spank_step", "SLURM_STEP_ID": "0"}
        given = environ | (context if name == "step" else {})
        return start_hook(self.node, name, given, subprocess.STDOUT)

    def prolog(
        self, image: Path | None = None, comment: str | None = None, option: str | None = None
    ) -> str:
        """Runs one to the script's end, then kills its group, as slurmd does; what it said."""
        script = self.hook("prolog", image=image, comment=comment, option=option)
        said = self.ended(script)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        return said

    def ended(self, script: subprocess.Popen[bytes]) -> str:
        said, _ = script.communicate(timeout=HANGS)
        assert script.returncode == 0
        return said.decode()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """No hook takes a lease meanwhile."""
        with lock.held(self.node.cache.space_lock, 60):
            yield

    def worker(self) -> int:
        """The process that works for the job's Prolog."""
        pid = int(self.mark.read_text().split()[0])
        assert comm(pid) == PROCESS_NAME[:15]
        return pid

    def await_end(self) -> None:
        until(lambda: not self.mark.exists(), "the Prolog's work to end")

    def left(self) -> list[str]:
        return sorted(path.name for path in self.node.places.leases.iterdir())


@pytest.fixture
def background(node: Node) -> Background:
    node.configure(redirect="spank", cold="shared")
    node.places.loaded.parent.mkdir(parents=True, exist_ok=True)
    node.places.loaded.touch()
    return Background(node)


@pytest.fixture
def image(background: Background) -> Path:
    """One that the cache has, and a record of who may leave: a job has had it copied."""
    node = background.node
    path = node.put("alice/image.sqsh")
    first = Background(node, 1)
    first.prolog(path)
    first.await_end()
    key = node.identity(path).key
    until(lambda: key in node.entries() and node.is_idle(key), "the copy")
    first.ended(first.hook("epilog"))
    assert first.left() == []
    return path


def test_first_prolog_of_a_node_detaches_before_opening_the_image(background: Background) -> None:
    """What it looks for may lie on a file server that hangs."""
    node = background.node
    path = node.put("alice/image.sqsh")
    node.cache.prepare(False)
    assert not node.places.background_marks.exists()
    with background.held_up():
        assert background.prolog(path) == ""
        assert node.lease(7) is None
        background.worker()
    background.await_end()
    assert node.outcomes("prolog", 7)[0].result == "started"


def test_prolog_script_ends_before_its_detached_process_writes_the_lease(
    background: Background, image: Path
) -> None:
    node = background.node
    with background.held_up():
        assert background.prolog(image) == "", "what it says goes to the log"
        assert node.lease(7) is None
        pid = background.worker()
        assert os.getsid(pid) == pid
    background.await_end()
    assert [use.key for use in node.held(7).uses] == [node.identity(image).key]
    assert node.outcomes("prolog", 7)[0].result == "hit"
    assert node.leases.step_record_file(7).exists()
    background.ended(background.hook("epilog"))
    assert background.left() == []


def test_prolog_detaches_or_stays_by_the_current_configuration(
    background: Background, image: Path
) -> None:
    node = background.node
    node.configure(redirect="spank", cold="shared", max_stage_wait="1m")
    with background.held_up():
        assert background.prolog(image) == ""
        background.worker()
    background.await_end()
    node.configure(redirect="spank", cold="wait")
    assert "result=hit" in background.prolog(image)
    node.switch_off("by hand")
    assert "reason=disabled" in background.prolog(image)


def test_prolog_does_not_detach_once_plugstack_no_longer_includes_the_companion(
    background: Background, image: Path
) -> None:
    """It binds then: what is out of date has to go before the job starts."""
    node = background.node
    node.configure(redirect="auto", cold="shared")
    plugstack = Path(background.environ()["SLURM_CONF"]).with_name("plugstack.conf")
    plugstack.write_text("include spank-*.conf\n")
    part = plugstack.with_name("spank-1.conf")
    part.write_text("optional forestage.so\n")
    assert background.prolog(image) == ""
    background.await_end()
    background.ended(background.hook("epilog"))
    part.unlink()
    assert "redirect=mounted" in background.prolog(image)
    background.ended(background.hook("epilog"))


@pytest.mark.parametrize("asked", ["comment", "option"])
def test_step_waits_for_the_images_of_the_detached_prolog(
    background: Background, image: Path, asked: str
) -> None:
    """It names no image, and would not know what the comment says, or the option."""
    with background.held_up():
        background.prolog(**{asked: f"stage={image}"})
        assert background.left() == ["7.hinted", "7.prolog"]
        step = background.hook("step")
        until(lambda: child_sleeps(step.pid) or step.poll() is not None, "the step to wait")
    said = background.ended(step)
    entry = background.node.cache.image_path(background.node.identity(image).key)
    assert f"also\tuse\t{entry}\t{image}\t" in said


def test_step_that_waited_for_the_detached_prolog_reports_a_bad_hint(
    background: Background, image: Path
) -> None:
    with background.held_up():
        background.prolog(comment="stage-wiat=1m")
        assert background.left() == ["7.hinted", "7.prolog"]
        step = background.hook("step")
        until(lambda: child_sleeps(step.pid) or step.poll() is not None, "the step to wait")
    assert "unknown hint stage-wiat=" in background.ended(step)


def test_step_stages_the_image_if_the_detached_prolog_was_killed(
    background: Background, image: Path
) -> None:
    with background.held_up():
        background.prolog(image)
        pid = background.worker()
        step = background.hook("step", image=image)
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in children_left(), "its end")
    entry = background.node.cache.image_path(background.node.identity(image).key)
    assert f"use\t{entry}\t{image}\t" in background.ended(step)
    assert background.node.held(7).uses
    background.ended(background.hook("epilog"))
    assert background.left() == []


@pytest.mark.parametrize("comment", [None, "stage=/nowhere/else"])
def test_epilog_kills_a_detached_prolog_that_still_runs(
    background: Background, image: Path, comment: str | None
) -> None:
    """Of a job that is over before its Prolog has taken a lease."""
    with background.held_up():
        background.prolog(image, comment)
        pid = background.worker()
        epilog = background.hook("epilog")
        background.await_end()
        assert pid not in children_left()
    background.ended(epilog)
    assert background.left() == []
    assert background.node.outcomes("prolog", 7) == ()


def test_epilog_removes_all_files_of_a_killed_prolog(background: Background, image: Path) -> None:
    with background.held_up():
        background.prolog(image, f"stage={image}")
        os.kill(background.worker(), signal.SIGKILL)
    background.ended(background.hook("epilog"))
    assert background.left() == []


def test_second_prolog_of_a_job_starts_no_second_detached_process(
    background: Background, image: Path
) -> None:
    with background.held_up():
        background.prolog(image)
        pid = background.worker()
        background.prolog(image)
        assert background.worker() == pid
    background.await_end()
    assert len(background.node.outcomes("prolog", 7)) == 1
    background.prolog(image)
    until(lambda: len(background.node.outcomes("prolog", 7)) == 2, "a Prolog after it")


def test_prolog_of_a_requeued_job_detaches_while_the_first_runs_prolog_still_works(
    background: Background, image: Path
) -> None:
    """Its Prolog comes after an Epilog which could not wait for the end of the first."""
    with background.held_up():
        background.prolog(image)
        old = background.worker()
        background.mark.unlink()
        background.prolog(image)
        assert background.worker() != old
        os.kill(old, signal.SIGKILL)
    background.await_end()
    assert background.node.held(7).uses


@pytest.mark.parametrize("hint", ["stage=/etc/passwd", "the 2nd stage"])
def test_comment_without_a_usable_image_starts_no_helper_in_later_steps(
    background: Background, image: Path, hint: str
) -> None:
    background.node.configure(redirect="spank", cold="shared", user_messages="none")
    background.prolog(image, hint)
    background.prolog(image, hint)
    background.await_end()
    assert not background.node.leases.hints_flag(7).exists()


def test_cold_image_is_copied_after_the_prolog_script_has_ended(
    background: Background, image: Path
) -> None:
    node = background.node
    path = node.put("alice/cold.sqsh", content(2), user=ALICE)
    background.prolog(path)
    key = node.identity(path).key
    until(lambda: key in node.entries() and node.is_idle(key), "the copy")
    assert node.cache.image_path(key).read_bytes() == content(2)


def test_prolog_stages_in_the_foreground_if_fork_fails(
    background: Background, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script does its work itself, and the mark goes."""
    from forestage.hooks import boundary

    def fails() -> int:
        raise OSError(11, "fork")

    for name, value in background.environ(image).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "fork", once(fails, os.fork))
    assert boundary._run_to_exit_status("prolog", str(background.node.places.root)) == 0
    assert background.node.held(7).uses
    assert not background.mark.exists()


def child_sleeps(pid: int) -> bool:
    """Whether the child in which a hook works does nothing but wait for a moment."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        waits = [Path(f"/proc/{child}/wchan").read_text() for child in children]
        return any("nanosleep" in one for one in waits)
    return False


def once(first: Callable[[], int], then: Callable[[], int]) -> Callable[[], int]:
    """Something else than usual the first time it is called."""
    calls = iter([first])
    return lambda: next(calls, then)()


def test_prolog_reads_each_file_of_slurm_conf_once(
    background: Background, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Prolog: limits, the companion, and which files say that it is loaded."""
    background.node.configure(redirect="auto")
    environ = background.environ(image)
    conf = Path(environ["SLURM_CONF"])
    conf.write_text("Include parts/a.conf\n")
    (conf.parent / "parts").mkdir()
    (conf.parent / "parts/a.conf").write_text("Include b.conf\n")
    (conf.parent / "b.conf").write_text("BatchStartTimeout=60\n")
    (conf.parent / "plugstack.conf").write_text("optional forestage.so\n")
    read: list[str] = []
    text_of = slurm_conf.read_conf_text
    monkeypatch.setattr(
        slurm_conf, "read_conf_text", lambda path: (read.append(path), text_of(path))[1]
    )
    for name in ("prolog", "epilog"):
        read.clear()
        HookRun(name, environ, 0.0).run(background.node.places, Clock())  # type: ignore[arg-type]
        of_conf = [path for path in read if not path.endswith("plugstack.conf")]
        assert of_conf == [str(conf), f"{conf.parent}/parts/a.conf", f"{conf.parent}/b.conf"]
        assert len(of_conf) < len(read), "plugstack.conf, too"
