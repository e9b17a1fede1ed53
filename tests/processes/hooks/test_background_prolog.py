"""Whether a Prolog may end before its work is done, and who waits for that work or ends it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.cache import step_record
from forestage.cache.lease import Lease, LeaseDirectory
from forestage.config import CompanionPresence, load_config
from forestage.hooks import background_prolog
from forestage.hooks.background_prolog import (
    PROCESS_NAME,
    may_detach,
    record_detachable_partitions,
    stop_prolog,
    wait_for_prolog,
)
from forestage.hooks.boundary import IMAGE_OPTION, STAGE_OPTION, has_no_work
from forestage.paths import NodePaths
from forestage.slurm.job import Job
from forestage.slurm.slurm_conf import SlurmConf
from forestage.system.as_user import User

JOB = {"SLURM_JOB_ID": "7", IMAGE_OPTION: "/lustre/a.sqsh"}
ON = "sources: [/lustre]\nredirect: spank\n"

WORKER = f"""
import fcntl, os, signal, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] == "named":
    open("/proc/self/comm", "w").write("{PROCESS_NAME}")
os.pwrite(fd, b"%d" % os.getpid(), 0)
print("ready", flush=True)
sys.stdin.read()
"""


class Node:
    """A node's /run and configuration below a folder, and its slurm.conf."""

    def __init__(self, root: Path) -> None:
        self.places = NodePaths(root)
        self.run = str(self.places.run)
        self.conf = root / "slurm/slurm.conf"
        self.conf.parent.mkdir()
        self.conf.write_text("ClusterName=c\n")
        parts = root / "slurm/plugstack.conf.d"
        parts.mkdir()
        (parts / "forestage.conf").write_text("optional forestage.so\n")
        (root / "slurm/plugstack.conf").write_text(f"include {parts}/*.conf\n")
        self.places.etc.mkdir(parents=True)
        self.places.leases.mkdir(parents=True)
        self.places.loaded.touch()

    def configure(self, text: str, companion: CompanionPresence = "loaded") -> None:
        """As a Prolog reads it, which notes who may leave."""
        (self.places.etc / "forestage.yaml").write_text(text)
        decided = step_record.format_config_lines(self.places)
        settings = load_config(self.places.etc)
        record_detachable_partitions(
            self.places,
            settings,
            companion,
            decided,
            background_prolog.format_plugstack_lines(SlurmConf(str(self.conf))),
        )

    def may(self, **environ: str) -> bool:
        return may_detach(JOB | environ, self.run)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    made.configure(ON)
    return made


@pytest.fixture
def mark(node: Node) -> Path:
    return node.places.leases / "7.prolog"


Work = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def work(mark: Path) -> Iterator[Work]:
    """Processes that hold the mark as a Prolog's does, or as another program of that pid."""
    started = []

    def start(name: str = "named") -> subprocess.Popen[str]:
        argv = [sys.executable, "-Ic", WORKER, str(mark), name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(argv, text=True, **pipes)  # type: ignore[call-overload]
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process  # type: ignore[no-any-return]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_prolog_may_detach_if_the_companion_redirects_the_images(node: Node) -> None:
    assert node.may()
    assert node.may(**{IMAGE_OPTION: "./a.sqsh"}, SLURM_JOB_PARTITION="gpu")
    assert node.may(**{IMAGE_OPTION: "docker://ubuntu"})
    assert may_detach({"SLURM_JOB_ID": "7", "SLURM_JOB_COMMENT": "stage=/lustre/a"}, node.run)
    assert may_detach({"SLURM_JOB_ID": "7", STAGE_OPTION: "stage=/lustre/a\n"}, node.run)


def test_prolog_may_detach_however_many_files_slurm_conf_includes(node: Node) -> None:
    """The record has a line for each: those of the partitions come behind them."""
    for number in range(1000):
        node.conf.with_name(f"p{number}.conf").write_text(f"PartitionName=p{number}\n")
    node.conf.write_text("".join(f"Include p{number}.conf\n" for number in range(1000)))
    node.configure(ON)
    assert node.may()
    node.conf.with_name("p999.conf").write_text("PartitionName=other\n")
    assert not node.may()


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_COMMENT": "stage=/lustre/a stage-wait=10m"},
        {STAGE_OPTION: "stage=/lustre/a\nstage-wait=10m\n"},
        {"SLURM_JOB_ID": "../7"},
        {"SLURM_JOB_ID": ""},
    ],
)
def test_prolog_may_not_detach_if_the_job_asks_to_wait_or_has_no_valid_id(
    node: Node, environ: dict[str, str]
) -> None:
    assert not node.may(**environ)


@pytest.mark.parametrize(
    "more", ["redirect: bind", "redirect: none", "redirect: spank\ncold: wait"]
)
def test_prolog_may_not_detach_with_redirect_bind_or_none_or_cold_wait(
    node: Node, more: str
) -> None:
    node.configure(f"sources: [/lustre]\n{more}\n")
    assert not node.may()


@pytest.mark.parametrize("companion", ["loaded", "absent", "unknown"])
def test_prolog_with_automatic_redirect_may_detach_only_if_the_companion_is_loaded(
    node: Node, companion: CompanionPresence
) -> None:
    node.configure("sources: [/lustre]\n", companion)
    assert node.may() is (companion == "loaded")


def test_non_utf8_byte_in_slurm_files_does_not_stop_a_prolog_from_detaching(node: Node) -> None:
    for file in (node.conf, node.conf.with_name("plugstack.conf")):
        file.write_bytes(b"# f\374r M\374ller\n" + file.read_bytes())
    node.configure(ON)
    parts = node.conf.with_name("plugstack.conf.d")
    assert node.may()
    (parts / "forestage.conf").write_text("")
    assert not node.may()


def test_prolog_may_detach_by_the_settings_of_the_jobs_partition(node: Node) -> None:
    node.configure(f"{ON}partitions:\n  slow: {{cold: wait}}\n  dark: {{enabled: false}}\n")
    assert [node.may(SLURM_JOB_PARTITION=name) for name in ("slow", "dark", "gpu")] == [
        False,
        True,
        True,
    ]


def test_no_prolog_may_detach_if_one_partition_uses_redirect_bind(node: Node) -> None:
    """One that is out of date has to go before any job of the node begins."""
    node.configure(f"{ON}partitions:\n  old: {{redirect: bind}}\n")
    assert not node.may(SLURM_JOB_PARTITION="gpu")


@pytest.mark.parametrize(
    "file",
    [
        "etc/forestage/forestage.yaml",
        "etc/forestage/conf.d/site.yaml",
        "run/forestage/disabled",
        "slurm/slurm.conf",
        "slurm/plugstack.conf",
        "slurm/plugstack.conf.d/forestage.conf",
        "slurm/plugstack.conf.d/another.conf",
    ],
)
def test_prolog_may_not_detach_after_a_configuration_or_slurm_file_has_changed(
    node: Node, file: str
) -> None:
    path = node.places.root / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as opened:
        opened.write("\n")
    assert not node.may()


def test_prolog_may_not_detach_after_the_file_that_names_the_companion_was_removed(
    node: Node,
) -> None:
    """As a package that is removed leaves an include which matches nothing."""
    (node.places.root / "slurm/plugstack.conf.d/forestage.conf").unlink()
    assert not node.may()


@pytest.mark.parametrize("text", [b"", b"\xff\n", b"forestage 0\npartition\t*\tleave\n", None])
def test_prolog_may_not_detach_if_its_record_is_missing_damaged_or_of_another_release(
    node: Node, text: bytes | None
) -> None:
    node.places.background_marks.unlink()
    if text is not None:
        node.places.background_marks.write_bytes(text)
    assert not node.may()


def test_prolog_may_not_detach_if_the_companion_was_never_loaded(node: Node) -> None:
    node.places.loaded.unlink()
    assert not node.may()


def test_detach_record_is_written_once_as_long_as_no_setting_changes(node: Node) -> None:
    before = node.places.background_marks.stat()
    decided = step_record.format_config_lines(node.places)
    settings = load_config(node.places.etc)
    by_slurm = background_prolog.format_plugstack_lines(SlurmConf(str(node.conf)))
    record_detachable_partitions(node.places, settings, True, decided, by_slurm)
    assert node.places.background_marks.stat() == before
    record_detachable_partitions(node.places, settings, False, [], by_slurm)
    assert node.may(), "files that cannot be told change nothing"


def test_wait_for_prolog_ends_when_the_detached_prolog_ends(mark: Path, work: Work) -> None:
    wait_for_prolog(str(mark))
    process = work()
    process.stdin.close()  # type: ignore[union-attr]
    wait_for_prolog(str(mark), 240.0)
    assert process.wait(60) == 0


def test_wait_for_prolog_times_out_without_killing_the_detached_prolog(
    mark: Path, work: Work
) -> None:
    process = work()
    wait_for_prolog(str(mark), 0.01)
    assert process.poll() is None


def test_step_does_not_wait_again_for_a_prolog_that_has_hung_longer_than_the_timeout(
    mark: Path, work: Work
) -> None:
    process = work()
    begun = time.time() - 7200
    os.utime(mark, (begun, begun))
    wait_for_prolog(str(mark), 3600.0)
    assert process.poll() is None
    stop_prolog(str(mark), {})
    assert process.wait(60) == -signal.SIGKILL


def test_stop_prolog_kills_the_detached_prolog_and_removes_its_mark(mark: Path, work: Work) -> None:
    process = work()
    stop_prolog(str(mark), {})
    assert process.wait(60) == -signal.SIGKILL
    assert not mark.exists()
    stop_prolog(str(mark), {})


def test_stop_prolog_kills_no_other_process_that_has_the_recorded_pid(
    mark: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_prolog, "KILL_TIMEOUT", 0.05)
    process = work("another")
    stop_prolog(str(mark), {})
    assert process.poll() is None
    assert not mark.exists()


def test_prolog_mark_is_locked_by_only_one_process(mark: Path, work: Work) -> None:
    work()
    assert background_prolog._lock_mark(str(mark)) is None


def test_shared_lock_of_a_reader_does_not_stop_a_prolog_from_locking_its_mark(mark: Path) -> None:
    """A sweep or a step looks by a shared lock, for a moment."""
    mark.touch()
    looking = os.open(mark, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    real, tries = background_prolog._find_worker_pid, []

    def look(path: str) -> int:
        tries.append(path)
        fcntl.flock(looking, fcntl.LOCK_UN)
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_prolog, "_find_worker_pid", look)
        fd = background_prolog._lock_mark(str(mark))
    assert tries == [str(mark)]
    assert fd is not None
    assert fd >= 0
    os.close(fd)
    os.close(looking)


def test_prolog_does_not_detach_if_its_mark_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "leases").touch()
    assert background_prolog._lock_mark(str(tmp_path / "leases/7.prolog")) == -1


def test_epilog_has_work_if_a_prolog_mark_is_left(node: Node, mark: Path) -> None:
    """Of a Prolog that was killed before it took a lease."""
    mark.touch()
    assert not has_no_work("epilog", {"SLURM_JOB_ID": "7"}, str(node.places.root))
    assert has_no_work("epilog", {"SLURM_JOB_ID": "77"}, str(node.places.root))


def test_sweep_removes_marks_of_a_killed_prolog_but_not_of_a_running_prolog(
    node: Node, mark: Path, work: Work
) -> None:
    leases, hints = LeaseDirectory(node.places.leases), mark.with_suffix(".hinted")
    process = work()
    hints.touch()
    leases.drop_unfinished()
    assert mark.exists()
    assert hints.exists()
    process.kill()
    process.wait()
    leases.drop_unfinished()
    assert [*node.places.leases.iterdir()] == []


@pytest.mark.parametrize(("say", "left"), [((), False), (("a line",), True)])
def test_hints_mark_is_deleted_unless_the_first_step_has_a_message_to_print(
    node: Node, me: User, say: tuple[str, ...], left: bool
) -> None:
    leases = LeaseDirectory(node.places.leases)
    leases.add_notes_and_keep_lease(Lease(7, me, time.time(), "/cache"), tell=True, say=say)
    leases.hints_flag(7).touch()
    uid = str(me.uid)
    job = Job.from_environ({"SLURM_JOB_ID": "7", "SLURM_JOB_UID": uid, "SLURM_JOB_GID": uid})
    background_prolog.clear_needless_hints_flag(node.places, job)
    assert leases.hints_flag(7).exists() is left
    leases.add_notes(7, me.uid, hinted=(b"/lustre/a",))
    leases.set_hints_flag(7)
    background_prolog.clear_needless_hints_flag(node.places, job)
    assert leases.list_hinted_images(7) == ("/lustre/a",)
