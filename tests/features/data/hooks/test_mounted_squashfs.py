"""A squashfs file of a comment, mounted for a step: who serves it, from where, and for how long."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from forestage import log
from forestage.clock import Clock
from forestage.events import CopyOutcome, RequestOutcome
from forestage.features.data import requests as data
from forestage.features.data import squashfs_server
from forestage.hooks.boundary import HookRun
from forestage.slurm.job import HOME_OPTION, Job
from forestage.system import daemon, forked_child, fuse, mounts
from forestage.system.as_user import User
from node import ALICE, BOB, Node, children_left, comm, content, until
from through import Through

STEP = 4294967291
FILE, TEXT = "lib/module", "from the squashfs\n"


class Manager:
    """A step manager with a task of Alice's, which runs her program."""

    def __init__(self) -> None:
        alice = f"setpriv --reuid={ALICE.uid} --regid={ALICE.gid} --clear-groups"
        script = f"exec 3>&1; {alice} sh -c 'echo $$ >&3; exec sleep 600' & read end"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(["sh", "-c", script], **pipes)
        assert self.process.stdout is not None
        self.pid, self.task = self.process.pid, int(self.process.stdout.readline())

    def end(self) -> None:
        """The step is over."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.task, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


class Mounting:
    """A node, a user's squashfs file, and the directory where it is to show."""

    def __init__(self, node: Node, capfd: pytest.CaptureFixture[str], manager: Manager) -> None:
        self.node, self.capfd, self.manager = node, capfd, manager
        self.point = self.directory("alice/point")
        self.path = self.squashfs("alice/env.sqsh")
        self.taken: list[Path] = []

    def directory(self, name: str, user: int = ALICE.uid, mode: int = 0o755) -> Path:
        made = self.node.shared / name
        made.mkdir(parents=True, exist_ok=True)
        os.chown(made, user, user)
        made.chmod(mode)
        return made

    def squashfs(self, name: str, text: str = TEXT, *options: str) -> Path:
        tree = self.node.places.root / "tree"
        (tree / FILE).parent.mkdir(parents=True, exist_ok=True)
        (tree / FILE).write_text(text)
        made = self.node.places.root / "made"
        made.unlink(missing_ok=True)
        argv = ["mksquashfs", tree, made, "-quiet", "-no-progress", *options]
        subprocess.run(argv, check=True)
        return self.node.put(name, made.read_bytes())

    def comment(self, point: Path | str | None = None) -> str:
        return f"stage={self.path}@{point or self.point}"

    def staged(self, job: int, point: Path | str | None = None) -> None:
        """The job's Prolog, and the copy."""
        assert self.node.prolog(job, comment=self.comment(point)).code == 0
        self.copied()

    def copied(self) -> None:
        key = self.node.identity(self.path).key
        until(lambda: key in self.node.entries() and self.node.is_idle(key), "the copy")

    def step(self, job: int, **more: str) -> list[list[str]]:
        """What the helper tells the companion, in fields, but for `variables`."""
        own = {"SLURM_STEP_ID": str(STEP), "FORESTAGE_MANAGER": str(self.manager.pid)}
        environ = self.node.environ(job) | own | more
        self.capfd.readouterr()
        HookRun("step", environ, time.monotonic()).run(self.node.places, Clock())
        lines = [line.split("\t") for line in self.capfd.readouterr().out.splitlines()]
        own_variables = [one for one in lines if one[0] == "env"]
        self.variables = {one[1]: one[2] for one in own_variables}
        return [one for one in lines if one not in own_variables]

    def job(self, number: int, user: User = ALICE) -> Job:
        own = {"SLURM_STEP_ID": "0", "FORESTAGE_MANAGER": str(self.manager.pid)}
        return Job.from_environ(self.node.environ(number, user=user) | own)

    def outcome(self, job: int) -> RequestOutcome:
        found = self.node.outcomes("step", job)[-1]
        assert isinstance(found, RequestOutcome)
        return found

    def socket(self, job: int) -> Path:
        """Of the server that the step was told of."""
        data, last = self.step(job)
        assert data[0] == "served"
        assert data[2:] == [str(self.point), str(self.point.stat().st_ino)]
        assert last == ["leave", "no-image"]
        return Path(data[1])

    def ask(self, name: Path) -> tuple[str, list[int]]:
        """What a task is answered."""
        with connected(name) as line:
            line.send(b"mount")
            said, fds, _, _ = socket.recv_fds(line, 1024, 1)
        return said.decode(), fds

    def show(self, name: Path, at: Path | None = None) -> Path:
        """Mounts a clone as a task would."""
        at = at or self.point
        said, (clone,) = self.ask(name)
        assert said == "ok"
        target = os.open(at, os.O_PATH)
        mounts.attach_mount(clone, target)
        os.close(clone)
        os.close(target)
        self.taken.append(at)
        return at / FILE

    def hide(self) -> None:
        while self.taken:
            mounts.umount(str(self.taken.pop()))

    def processes(self) -> dict[str, int]:
        """The pids of the server, of the init beneath it, and of what serves beneath that."""
        found = {}
        for pid in children_left():
            if comm(pid) == squashfs_server.PROCESS_NAME:
                found["keeper"] = pid
                for one in children(pid):
                    found["init"] = one
                    for other in children(one):
                        found["program"] = other
        return found

    def ended(self) -> None:
        until(lambda: not self.processes(), "the server's end")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def connected(name: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(os.fspath(name))
        yield line


@pytest.fixture
def mounting(node: Node, capfd: pytest.CaptureFixture[str]) -> Iterator[Mounting]:
    node.configure(redirect="spank")
    made = Mounting(node, capfd, Manager())
    yield made
    made.hide()
    made.manager.end()
    made.ended()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A job's cgroup in a hierarchy of this machine."""
    spots = (Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup"))
    top = next((one for one in spots if os.access(one / "cgroup.procs", os.W_OK)), None)
    if top is None:
        pytest.skip("no cgroup hierarchy can be written here")
    made = top / f"slurm_test-{os.getpid()}" / "job_7"
    step = made / "step_0"
    step.mkdir(parents=True)
    yield made
    for folder in (step, made, made.parent):
        procs = folder / "cgroup.procs"
        until(partial(is_empty, procs), "the end of all in the cgroup")
        folder.rmdir()


def is_empty(procs: Path) -> bool:
    return not procs.read_text()


def test_mounted_squashfs_shows_the_nodes_copy_after_the_shared_file_was_emptied(
    mounting: Mounting,
) -> None:
    mounting.staged(1)
    name = mounting.socket(1)
    outcome = mounting.outcome(1)
    assert (outcome.result, outcome.redirect) == ("hit", "spank")
    assert outcome.request == f"{mounting.path}@{mounting.point}"
    local = {"FORESTAGE_DATA_RESULT": "hit", "FORESTAGE_LOCAL": str(mounting.point)}
    assert mounting.variables == local
    shown = mounting.show(name)
    (mounting.node.server / "alice/env.sqsh").write_bytes(b"")
    assert shown.read_text() == TEXT
    assert os.statvfs(shown).f_flag & 7 == os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV


def test_two_tasks_of_a_step_share_one_squashfuse_process(mounting: Mounting) -> None:
    mounting.staged(1)
    name = mounting.socket(1)
    shown = [mounting.show(name, mounting.directory(f"alice/{n}")) for n in (1, 2)]
    assert [one.read_text() for one in shown] == [TEXT, TEXT]
    assert len({one.stat().st_dev for one in shown}) == 1
    assert len(mounting.processes()) == 3


def test_squashfuse_runs_with_the_users_ids_and_no_capabilities(mounting: Mounting) -> None:
    mounting.staged(1)
    mounting.show(mounting.socket(1))
    pid = mounting.processes()["program"]
    facts = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert facts["Uid"].split() == [str(ALICE.uid)] * 4
    assert facts["Gid"].split() == [str(ALICE.gid)] * 4
    assert facts["Groups"].split() == [str(ALICE.gid)]
    assert facts["NoNewPrivs"] == "1"
    assert {facts[f"Cap{kind}"].strip("0") for kind in ("Inh", "Prm", "Eff", "Amb")} == {""}
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {one.partition(b"=")[0] for one in environ if one} == {b"PATH", b"LC_ALL"}
    links = sorted(os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir())
    assert links[:5] == ["/", "/", "/dev/fuse", "/dev/null", "/dev/null"]
    assert [link.partition(":")[0] for link in links[5:]] == ["pipe"]


def test_squashfuse_starts_at_a_tasks_request_inside_the_tasks_cgroup(
    cgroup: Path, mounting: Mounting
) -> None:
    """It is a process of the user's: without the step's limits it would be a way out of them."""
    mounting.staged(1)
    for pid in (mounting.manager.pid, mounting.manager.task):  # as Slurm forks a task
        (cgroup / "cgroup.procs").write_text(str(pid))
    name = mounting.socket(1)
    assert mounting.processes().keys() == {"keeper"}
    with connected(name) as line:
        line.send(b"mount")
        # Its init may be there, and what waits to be let into the step; no program of the user's.
        begun = mounting.processes().get("program")
        assert begun is None or not comm(begun).startswith("squashfuse")
        (cgroup / "step_0/cgroup.procs").write_text(str(mounting.manager.task))
        line.settimeout(60)
        assert line.recv(1024) == b"ok"
    found = mounting.processes()
    inside = [int(pid) for pid in (cgroup / "step_0/cgroup.procs").read_text().split()]
    assert sorted(inside) == sorted([mounting.manager.task, found["program"]])
    # Slurm would wait for them; the kernel kills them last.
    for name_of in ("keeper", "init"):
        proc = Path(f"/proc/{found[name_of]}")
        assert "job_7" not in (proc / "cgroup").read_text()
        assert (proc / "oom_score_adj").read_text() == safest()
    assert Path(f"/proc/{found['program']}/oom_score_adj").read_text() == "0\n"


def test_squashfuse_has_an_oom_score_adj_of_0_whatever_its_parent_has(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any machine's root may have more, not all less.
    mine = msgspec.structs.replace(squashfs_server.SERVER_SPEC, oom_score_adj=300)
    monkeypatch.setattr(squashfs_server, "SERVER_SPEC", mine)
    mounting.staged(1)
    mounting.show(mounting.socket(1))
    adjusted = [
        Path(f"/proc/{mounting.processes()[one]}/oom_score_adj").read_text()
        for one in ("keeper", "init", "program")
    ]
    assert adjusted == ["300\n", "300\n", "0\n"]


def safest() -> str:
    """What root gets who asks for the least oom_score_adj: not all machines' root may have it."""
    adj = "/proc/self/oom_score_adj"
    script = f"echo {daemon.OOM_EXEMPT} >{adj} 2>&- || true; cat {adj}"
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout


def test_task_outside_of_the_steps_cgroup_is_refused_a_mount(
    cgroup: Path, mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_child.enter_task_cgroups, "__defaults__", ("", 0.1))
    mounting.staged(1)
    (cgroup / "cgroup.procs").write_text(str(mounting.manager.task))
    why = "no no process can go to the cgroups of the step's tasks"
    assert mounting.ask(mounting.socket(1)) == (why, [])
    assert mounting.processes().keys() == {"keeper"}


ESCAPES = """
import os, sys
for _ in range(3):
    if os.fork():
        os._exit(0)
    os.setsid()
open(sys.argv[1], "w").write(os.readlink("/proc/self"))
os.execlp("sleep", "sleep", "4245")
"""


def test_process_that_the_user_starts_by_tracing_squashfuse_is_killed_at_the_steps_end(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may trace it from its first moment, and have it be any program."""
    left = mounting.directory("alice/left") / "pid"
    program = mounting.node.places.root / "traced"
    script = f"#!/bin/sh\n{sys.executable} -c '{ESCAPES}' {left} &\nexec squashfuse \"$@\"\n"
    program.write_text(script)
    program.chmod(0o755)
    mounting.node.places.root.chmod(0o755)
    monkeypatch.setattr(squashfs_server, "PROGRAMS", (str(program),))
    mounting.staged(1)
    assert mounting.show(mounting.socket(1)).read_text() == TEXT
    until(lambda: left.exists() and left.read_text(), "what has escaped")
    escaped = int(left.read_text())
    assert Path(f"/proc/{escaped}").exists()
    mounting.manager.end()
    mounting.ended()
    assert not Path(f"/proc/{escaped}").exists()


def test_squashfuse_stopped_by_its_user_is_killed_at_the_steps_end(mounting: Mounting) -> None:
    mounting.staged(1)
    mounting.show(mounting.socket(1))
    os.kill(mounting.processes()["program"], signal.SIGSTOP)
    mounting.manager.end()
    mounting.ended()
    assert squashfs_server._list_live_servers(mounting.node.places.served_sockets) == []


@pytest.mark.parametrize("options", [("-all-root",), ("-force-uid", "1", "-force-gid", "1")])
def test_files_of_a_mounted_squashfs_belong_to_the_user_whatever_owner_they_record(
    mounting: Mounting, options: tuple[str, ...]
) -> None:
    """Some set-user-ID programs trust files of root's, and the kernel lets them look in here."""
    mounting.squashfs("alice/env.sqsh", TEXT, *options)
    mounting.staged(1)
    shown = mounting.show(mounting.socket(1))
    for one in (shown, shown.parent, mounting.point):
        assert (one.stat().st_uid, one.stat().st_gid) == (ALICE.uid, ALICE.gid)


@pytest.mark.parametrize(("help", "chosen"), [("-o timeout=N", "other"), ("-o uid=N", "fake_ll")])
def test_squashfuse_program_without_the_uid_option_is_not_chosen(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch, help: str, chosen: str
) -> None:
    programs = [mounting.node.places.root / name for name in ("fake_ll", "other")]
    for one in programs:
        one.write_text(f"#!/bin/sh\necho '{help}' >&2; exit 1\n")
        one.chmod(0o755)
    monkeypatch.setattr(squashfs_server, "PROGRAMS", tuple(map(str, programs)))
    assert Path(squashfs_server._find_program()).name == chosen


def test_mount_server_counts_to_the_limit_until_its_last_process_is_gone(
    cgroup: Path, mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen process stands for one that a disk holds in the kernel: no signal ends it."""
    state = cgroup / "step_0/freezer.state"
    if not state.exists():
        pytest.skip("needs the freezer of cgroup v1")
    mounting.staged(1)
    (cgroup / "step_0/cgroup.procs").write_text(str(mounting.manager.task))
    mounting.show(mounting.socket(1))
    (cgroup / "cgroup.procs").write_text(str(mounting.manager.task))
    state.write_text("FROZEN")
    until(lambda: state.read_text() == "FROZEN\n", "it to be frozen")
    try:
        mounting.manager.end()
        until(
            lambda: len([*mounting.node.places.served_sockets.iterdir()]) == 1,
            "the end of the socket",
        )
        assert len(squashfs_server._list_live_servers(mounting.node.places.served_sockets)) == 1
    finally:
        state.write_text("THAWED")
    mounting.ended()
    assert squashfs_server._list_live_servers(mounting.node.places.served_sockets) == []


def test_files_owner_cannot_write_to_the_copy_through_squashfuses_descriptors(
    mounting: Mounting,
) -> None:
    """They may trace what serves them. The copy has the owner and the mode of its source."""
    mounting.staged(1)
    mounting.show(mounting.socket(1))
    pid = mounting.processes()["program"]
    key = mounting.node.identity(mounting.path).key
    inode = mounting.node.cache.image_path(key).stat().st_ino
    copies = [one for one in Path(f"/proc/{pid}/fd").iterdir() if one.stat().st_ino == inode]
    assert copies
    for copy in copies:
        with pytest.raises(OSError, match="Read-only"):
            os.open(copy, os.O_WRONLY)


def test_mount_server_ends_with_the_step_and_disconnects_a_mount_left_by_a_task(
    mounting: Mounting,
) -> None:
    mounting.staged(1)
    name = mounting.socket(1)
    shown = mounting.show(name)
    assert shown.read_text() == TEXT
    mounting.manager.end()
    mounting.ended()
    assert [*name.parent.iterdir()] == []
    with pytest.raises(OSError, match="not connected"):
        shown.read_text()


def test_mount_server_without_requests_starts_no_squashfuse_and_ends_with_the_step(
    mounting: Mounting,
) -> None:
    mounting.staged(1)
    name = mounting.socket(1)
    assert mounting.processes().keys() == {"keeper"}
    mounting.manager.end()
    mounting.ended()
    assert not name.exists()


def test_reader_gets_enotconn_after_squashfuse_was_killed_and_the_next_step_mounts_again(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = mounting.node.places.root / "log"
    monkeypatch.setattr(log, "write_log_line", lambda line, by_slurm: said.write_text(line))
    mounting.staged(1)
    name = mounting.socket(1)
    shown = mounting.show(name)
    program = mounting.processes()["program"]
    os.kill(program, signal.SIGKILL)
    until(lambda: program not in children_left() and not Path(f"/proc/{program}").exists(), "it")
    with pytest.raises(OSError, match="not connected") as raised:
        shown.read_text()
    assert raised.value.errno == errno.ENOTCONN
    mounting.ended()
    assert not name.exists()
    assert said.read_text() == (
        f"mounted job=1 step={STEP} result=failed detail='its squashfuse ended: 137'"
    )
    mounting.hide()
    assert mounting.show(mounting.socket(1)).read_text() == TEXT


def test_squashfuse_exits_when_its_keeper_is_killed(mounting: Mounting) -> None:
    """Nobody else would end it."""
    mounting.staged(1)
    shown = mounting.show(mounting.socket(1))
    program = mounting.processes()["program"]
    os.kill(mounting.processes()["keeper"], signal.SIGKILL)
    until(lambda: not Path(f"/proc/{program}").exists(), "the program's end")
    with pytest.raises(OSError, match="not connected"):
        shown.read_text()


def test_next_step_removes_the_socket_that_a_killed_mount_server_left(mounting: Mounting) -> None:
    mounting.staged(1)
    left = mounting.socket(1)
    os.kill(mounting.processes()["keeper"], signal.SIGKILL)
    until(lambda: "keeper" not in mounting.processes(), "its end")
    assert left.exists()
    name = mounting.socket(1)
    assert {*left.parent.iterdir()} == {name, Path(f"{name}.lock")}


def test_squashfs_that_was_declined_is_mounted_from_its_shared_path(mounting: Mounting) -> None:
    mounting.node.configure(redirect="spank", sources=["/elsewhere"])
    assert mounting.node.prolog(1, comment=mounting.comment()).said == (
        "declined",
        "outside-sources",
    )
    assert mounting.show(mounting.socket(1)).read_text() == TEXT
    outcome = mounting.outcome(1)
    assert (outcome.reason, outcome.redirect) == ("outside-sources", "none")


def test_squashfs_is_mounted_through_its_keeper_while_its_copy_runs(
    mounting: Mounting,
) -> None:
    through = Through(mounting.node, mounting.path)
    job = mounting.job(1)
    with squashfs_server.SquashfsSource() as content:
        content.keeper_socket = through.sock
        name = squashfs_server.start_server(mounting.node.places.served_sockets, job, 1, content)
    assert mounting.show(name).read_text() == TEXT
    mounting.hide()
    mounting.manager.end()
    mounting.ended()
    through.close()


def test_private_squashfs_is_mounted_only_for_a_user_with_read_access(
    mounting: Mounting,
) -> None:
    mounting.node.put("alice/env.sqsh", mounting.path.read_bytes(), mode=0o600)
    mounting.staged(1)
    assert mounting.show(mounting.socket(1)).read_text() == TEXT
    with squashfs_server.SquashfsSource() as content:
        content.entry_path = mounting.node.cache.image_path(
            mounting.node.identity(mounting.path).key
        )
        name = squashfs_server.start_server(
            mounting.node.places.served_sockets, mounting.job(2, BOB), 1, content
        )
    said, fds = mounting.ask(name)
    assert (said[:3], "Permission denied" in said, fds) == ("no ", True, [])


def declined(mounting: Mounting, why: str, job: int = 1, **environ: str) -> None:
    """The step gets nothing, and its user reads why."""
    said, last = mounting.step(job, **environ)
    assert said[0] == "say"
    assert why in said[1]
    assert last == ["leave", "no-image"]
    outcome = mounting.outcome(job)
    assert (outcome.result, outcome.reason) == ("declined", "no-mount")


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"x" * 5000, "look like a squashfs"), (b"hsqs" + b"\1" * 5000, "version 257.257")],
)
def test_mount_of_a_file_that_is_no_squashfs_is_refused_with_the_reason(
    mounting: Mounting, data: bytes, why: str
) -> None:
    """The task that asks hears it: the helper has no program begin."""
    mounting.node.put("alice/env.sqsh", data)
    mounting.staged(1)
    name = mounting.socket(1)
    said, fds = mounting.ask(name)
    assert (said[:3], why in said, fds) == ("no ", True, [])
    assert mounting.ask(name) == (said, [])  # so do the others
    until(lambda: "program" not in mounting.processes(), "the program's end")


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        (squashfs_server, "PROGRAMS", ("no-such-program",), "squashfuse is not installed"),
        (fuse, "DEVICE", "/dev/none", "this node has no /dev/none"),
        (
            squashfs_server,
            "MAX_FILES",
            0,
            "0 files of this user and 0 of all are mounted on this node",
        ),
        (
            squashfs_server,
            "MAX_FILES_OF_USER",
            0,
            "0 files of this user and 0 of all are mounted on this node",
        ),
        (squashfs_server, "MAX_SERVERS", 0, "steps on this node have 0 files mounted"),
        (squashfs_server, "MAX_SERVERS_OF_USER", 0, "steps on this node have 0 files mounted"),
    ],
)
def test_step_reports_why_the_node_cannot_mount_a_squashfs(
    mounting: Mounting,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    value: object,
    why: str,
) -> None:
    mounting.staged(1)
    monkeypatch.setattr(where, name, value)
    declined(mounting, why)
    mounting.ended()


def test_mounted_squashfs_counts_once_to_the_users_limit_for_all_steps_of_a_job(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17 packed jobs with one environment have 34 servers: batch scripts are steps as well."""
    monkeypatch.setattr(squashfs_server, "MAX_FILES_OF_USER", 1)
    mounting.staged(1)
    with connected(mounting.socket(1)), connected(mounting.socket(1)):
        mounting.staged(2)
        declined(mounting, "1 files of this user and 1 of all are mounted on this node", 2)


@pytest.mark.cases(2)
@pytest.mark.parametrize("messages", ["problems", "all", "none"])
def test_each_step_reports_a_missing_mount_unless_user_messages_is_none(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch, messages: str
) -> None:
    """… though the user has read their line: of another step, or of what went well."""
    mounting.node.configure(redirect="spank", user_messages=messages)
    mounting.staged(1)
    mounting.socket(1) if messages != "all" else mounting.step(1)
    monkeypatch.setattr(squashfs_server, "MAX_FILES", 0)
    elsewhere = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_STEP_NODELIST": "n[0-1]"}
    for environ in ({}, {}, elsewhere):
        said = [line for line in mounting.step(1, **environ) if line[0] == "say"]
        assert len(said) == (messages != "none")
        assert all("is not mounted: 0 files" in line[1] for line in said)


@pytest.mark.parametrize("when", ["Prolog", "step"])
def test_step_reports_the_missing_mount_of_a_job_on_a_switched_off_node(
    mounting: Mounting, when: str
) -> None:
    if when == "Prolog":
        mounting.node.switch_off("INC-1")
        mounting.node.prolog(1, comment=mounting.comment())
        mounting.node.places.disabled.unlink()
    else:
        mounting.staged(1)
        mounting.node.switch_off("INC-1")
    said, last = mounting.step(1)
    assert said[:1] == ["say"]
    assert "is not mounted: " in said[1]
    assert "INC-1" in said[1]
    assert last == ["leave", "no-image"]
    assert mounting.node.epilog(1).code == 0
    assert mounting.node.lease(1) is None


def test_task_gets_a_refusal_if_squashfuse_hangs_at_its_start(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounting.staged(1)
    hangs = mounting.node.places.root / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 1000\n")
    hangs.chmod(0o755)
    mounting.node.places.root.chmod(0o755)
    monkeypatch.setattr(squashfs_server, "PROGRAMS", (str(hangs),))
    monkeypatch.setattr(squashfs_server, "SERVE_TIMEOUT", 0.3)
    assert mounting.ask(mounting.socket(1)) == ("no its server does not answer", [])


def test_symbolic_links_in_a_mount_points_path_are_followed(mounting: Mounting) -> None:
    (mounting.node.shared / "way").symlink_to("alice")
    mounting.staged(1, mounting.node.shared / "way/point")
    assert mounting.show(mounting.socket(1)).read_text() == TEXT


def test_mount_over_a_directory_that_the_user_cannot_write_to_is_declined(
    mounting: Mounting,
) -> None:
    """Set-user-ID programs believe what lies there; the step's tasks could start one."""
    for job, point in enumerate(
        (
            mounting.directory("roots", 0),
            mounting.directory("bobs", BOB.uid),
            mounting.directory("sticky", 0, 0o1777),
        ),
        1,
    ):
        mounting.staged(job, point)
        declined(mounting, "this user cannot write to the directory", job)


def test_mount_over_a_directory_that_the_user_cannot_reach_is_declined(mounting: Mounting) -> None:
    mounting.directory("bobs", BOB.uid, 0o700)
    mounting.staged(1, mounting.directory("bobs/point"))
    declined(mounting, "Permission denied")


def test_mount_over_a_regular_file_is_declined(mounting: Mounting) -> None:
    mounting.staged(1, mounting.path)
    declined(mounting, "Not a directory")


def test_mount_over_a_parent_of_the_jobs_directories_is_declined(mounting: Mounting) -> None:
    os.chown(mounting.node.shared, ALICE.uid, ALICE.gid)
    mounting.staged(1, mounting.node.shared)
    declined(mounting, f"would hide {mounting.node.shared}")


def test_mount_over_a_parent_of_the_cache_is_declined_even_below_mount_roots(
    mounting: Mounting,
) -> None:
    roots = {"mount_roots": [str(mounting.node.nvme.parent)]}
    mounting.node.configure(redirect="spank", data=roots)
    mounting.staged(1, mounting.node.nvme)
    declined(mounting, f"would hide {mounting.node.cache.root}")


@pytest.mark.parametrize("above", ["alice", "alice/point"])
def test_mount_that_would_hide_a_directory_bound_by_the_container_is_declined(
    mounting: Mounting, above: str
) -> None:
    home = {"FORESTAGE_HOME": str(mounting.node.shared / above), HOME_OPTION: "1"}
    mounting.staged(1)
    why = {"alice": "the container binds", "alice/point": "would hide"}[above]
    declined(mounting, why, **home)


def test_step_line_with_a_control_character_is_left_out(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounting.staged(1)
    lines = [("env", "A", "x\ty"), ("env", "B", "y")]
    monkeypatch.setattr(data, "show_job_data", lambda *_: data.StepPart(lines, []))
    assert (mounting.step(1), mounting.variables) == ([["leave", "no-image"]], {"B": "y"})


@pytest.fixture
def root(mounting: Mounting) -> Path:
    """A directory of the admin's for mount points."""
    root = mounting.node.places.root / "data"
    root.mkdir()
    mounting.node.places.root.chmod(0o755)
    mounting.node.configure(redirect="spank", data={"mount_roots": [str(root)]})
    return root


def test_step_requests_a_missing_mount_point_below_mount_roots_from_the_companion(
    mounting: Mounting, root: Path
) -> None:
    mounting.staged(1, root / "a/b")
    folder, served, _ = mounting.step(1)
    assert folder == ["folder", "a/b", str(root), "root"]
    assert served[:1] + served[2:] == ["served", f"{root}/a/b", "root"]
    assert [*root.iterdir()] == []


def test_existing_directory_below_mount_roots_is_mounted_over(
    mounting: Mounting, root: Path
) -> None:
    (root / "there").mkdir()
    mounting.staged(1, root / "there")
    served, _ = mounting.step(1)
    assert served[2:] == [f"{root}/there", str((root / "there").stat().st_ino)]


def test_mount_root_that_is_not_empty_is_declined(mounting: Mounting, root: Path) -> None:
    (root / "there").mkdir()
    mounting.staged(1, root / "missing")
    declined(mounting, f"{root} is no empty directory of root's")


def test_mount_root_that_belongs_to_a_user_is_declined(mounting: Mounting, root: Path) -> None:
    os.chown(root, ALICE.uid, ALICE.gid)
    mounting.staged(1, root / "missing")
    declined(mounting, f"{root} is no empty directory of root's")


def test_missing_mount_point_outside_of_mount_roots_is_declined(mounting: Mounting) -> None:
    mounting.staged(1, mounting.node.shared / "alice/missing")
    declined(mounting, "does not exist")


@pytest.mark.parametrize("point", ["/", "/etc", "/usr/lib/x", "/proc/self", "/var"])
def test_mount_over_a_system_directory_is_declined_and_nothing_is_copied(
    mounting: Mounting, point: str
) -> None:
    assert mounting.node.prolog(1, comment=mounting.comment(point)).said == (
        "declined",
        "no-mount",
    )
    assert mounting.node.entries() == set()
    declined(mounting, "nothing may be mounted over")


def test_entry_and_outcomes_of_a_mounted_squashfs_are_recorded_as_data(mounting: Mounting) -> None:
    mounting.staged(1)
    (entry,) = mounting.node.cache.list_entries()
    assert entry.is_data
    began, copied = mounting.node.outcomes("prolog", 1)[-1], mounting.node.outcomes("stager")[-1]
    assert isinstance(began, RequestOutcome)
    assert isinstance(copied, CopyOutcome)
    assert (began.data, copied.data) == (True, True)
    # Who names the same file as an image has it, and it stays what it was copied as.
    assert mounting.node.prolog(2, mounting.path).said == ("hit", "")
    (entry,) = mounting.node.cache.list_entries()
    assert entry.is_data


def test_mounted_squashfs_is_limited_to_datas_share_and_evicts_no_image(mounting: Mounting) -> None:
    image = mounting.node.put("alice/image.sqsh", content())
    mounting.node.configure(redirect="bind")
    mounting.node.prolog(1, image)
    mounting.node.epilog(1)
    mounting.node.configure(redirect="spank", data={"share": "0%"})
    mounting.node.prolog(2, comment=mounting.comment())
    until(lambda: mounting.node.outcomes("stager")[-1].reason, "the end of its copy")
    assert mounting.node.outcomes("stager")[-1].reason == "no-room"
    assert mounting.node.entries() == {mounting.node.identity(image).key}
    mounting.step(2)  # the step mounts the shared file
    assert mounting.outcome(2).redirect == "none"


def test_prolog_of_a_job_without_data_writes_no_data_notes(mounting: Mounting) -> None:
    mounting.node.prolog(1, comment=f"stage={mounting.path}")
    assert mounting.node.leases.read_notes(1).data is None


def test_prolog_of_a_mounted_squashfs_starts_a_copy_and_then_has_a_hit(mounting: Mounting) -> None:
    assert mounting.node.prolog(1, comment=mounting.comment()).said == ("started", "")
    mounting.copied()
    assert mounting.node.prolog(2, comment=mounting.comment()).said == ("hit", "")
