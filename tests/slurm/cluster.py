"""A real Slurm cluster on one machine: one process tree in namespaces of its own.

    with Cluster.up(ClusterSpec(nodes=2)) as cluster:
        cluster.run(["srun", "-N2", "hostname"])

A cluster has its own PID, mount, network, UTS and IPC namespaces, and so has each of its nodes
except for the network; with `net` for that too. Two clusters cannot meet, and the host sees
nothing of either but the state directory. Needs root. Standard library only: it also runs before
.venv exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import net
from host import ClusterError, Leader, detach_above, file_identity, loop_files, wait_until
from spec import INSIDE_STATE, NO_VENV, PYXIS_REPORT, REPO, USERS, VENV, ClusterSpec
from suite import on_suite

__all__ = ["UMASK", "Cluster", "ClusterError", "ClusterSpec", "state_path"]

INSIDE = Path(__file__).with_name("inside.py")
BUILT = "FORESTAGE_TEST_BUILT"  # set by ./test: a directory of what its clusters have built
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
UP_SECONDS = 120.0
COMMAND_SECONDS = 240.0  # what hangs is reported before pytest ends the test
# A node that gave no answer once is asked again after a third of SlurmdTimeout, 100 s.
IDLE_SECONDS = 150.0
UMASK = 0o022  # whatever that of the caller is
# No journal, few inodes, nothing reserved: a 1 GiB disk holds 1007 MiB of images.
MKFS = "mkfs.ext4 -q -m 0 -O ^has_journal,^resize_inode -i 1048576 -E lazy_itable_init=0"


class Cluster:
    """One cluster. Made by `up` or `attach`; as a context manager it ends with `down`."""

    def __init__(self, state: Path, spec: ClusterSpec) -> None:
        self.state = state
        self.spec = spec
        self.nodes = spec.node_names
        self._init = Leader(state / "init.pid")
        self._unshare: subprocess.Popen[str] | None = None

    # Life

    @classmethod
    def up(
        cls, spec: ClusterSpec | None = None, *, name: str | None = None, detach: bool = False
    ) -> Cluster:
        """Starts a cluster and returns when all its nodes are idle.

        It ends with this process, even if that is killed, unless `detach`. Without `name` it
        gets a unique one. Raises ClusterError if it does not come up; nothing is left then.
        """
        spec = spec or ClusterSpec()
        if (other := os.environ.get("FORESTAGE_TEST_ON")) and spec.lower == "/":
            spec = on_suite(spec, other)
        cluster = cls(_new_state(name), spec)
        try:
            cluster._start(detach)
        except BaseException:  # ^C as well: half a cluster is no use to anybody
            cluster.down()
            raise
        return cluster

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """The running cluster of that name. Raises ClusterError if there is none."""
        state = state_path(name)
        if not (state / "spec.json").exists():
            raise ClusterError(f"there is no cluster {name!r} ({state})")
        cluster = cls(state, ClusterSpec.from_json((state / "spec.json").read_text()))
        if not cluster.running:
            raise ClusterError(f"the cluster {name!r} is not running ({state} is left of it)")
        return cluster

    @property
    def running(self) -> bool:
        return self._init.alive

    @property
    def leader(self) -> int:
        """The pid of the process whose namespaces are the cluster's."""
        return self._init.pid

    def down(self) -> None:
        """Kills every process of the cluster and removes its state. May be called again."""
        self._init.kill()
        if self._unshare is not None:
            if self._unshare.poll() is None:
                # The init may not be recorded yet; --kill-child takes it along.
                self._unshare.kill()
            self._unshare.wait()
            for pipe in (self._unshare.stdin, self._unshare.stdout):
                if pipe is not None:
                    pipe.close()
            self._unshare = None
        self._wait_for_loops([self._disk(node) for node in self.nodes])
        if self.state.exists():
            shutil.rmtree(self.state)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def _start(self, detach: bool) -> None:
        for directory in ("layers", "root", "shared", "log", "nodes"):
            _make_directory(self.state / directory)
        (self.state / "nodes").chmod(0o700)  # the disks' raw contents are not for users
        (self.state / "spec.json").write_text(self.spec.to_json())
        self._start_init()
        report = self.host_path(PYXIS_REPORT)
        report.touch()
        report.chmod(0o666)
        self._check_hooks()
        self._check_venv()
        self._build("tests/slurm/pyxis", "pyxis.so")
        if self.spec.companion is not None:
            self._build("src/spank", "forestage.so")
        self.run(["munged"], user="munge", cwd="/")
        self.run(["slurmctld"], user="root", cwd="/")
        for node in self.nodes:
            _make_directory(self.state / "nodes" / node)
            if not self.spec.net:  # else it is memory
                disk = self._disk(node)
                disk.touch()
                os.truncate(disk, self.spec.nvme_mib << 20)
                subprocess.run([*MKFS.split(), str(disk)], check=True)
            self._start_node(node)
        self.wait_idle(UP_SECONDS)
        if detach:
            self._detach()

    def _start_init(self) -> None:
        unshare = ["unshare", *NAMESPACES, "--propagation", "private", "--fork", "--kill-child"]
        init = [sys.executable, "-B", str(INSIDE), "init", str(self.state)]
        with open(self.state / "log/init.log", "w") as log:
            self._unshare = subprocess.Popen(
                [*unshare, *self._init.recorded(init)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                umask=UMASK,
                cwd="/",  # keeps no other directory of the host busy
                start_new_session=True,  # a ^C is for `up` to handle, not for the cluster
            )
        stdout = self._unshare.stdout
        if stdout is None or stdout.readline() != "ready\n":
            raise ClusterError(f"the root tree could not be built\n{self.logs()}")

    def _detach(self) -> None:
        if self._unshare is None or self._unshare.stdin is None:
            raise ClusterError("only the process that started a cluster can detach it")
        self._unshare.stdin.write("d")
        self._unshare.stdin.close()

    def _build(self, source: str, plugin: str) -> None:
        """With the headers of the cluster's own Slurm, whichever release that is.

        The clusters of one ./test that run in the same tree share what one of them has built.
        """
        shared = None
        if BUILT in os.environ:
            shared = Path(os.environ[BUILT], self.spec.lower.replace("/", "-") + plugin)
            if shared.is_dir():
                shutil.copytree(shared, self.state, dirs_exist_ok=True)
                return
        make = ["make", "-s", "-C", str(REPO / source), f"OUT={INSIDE_STATE}/{plugin}"]
        self.run(make, user="root", cwd="/")
        if shared:
            # Whole or not at all: other lanes start clusters at the same time.
            finished = shared.with_name(f"{shared.name}.{os.getpid()}")
            finished.mkdir()
            for made in (*self.state.glob(f"{plugin}*"), *self.state.glob("plugstack-*.conf")):
                shutil.copy(made, finished)
            with contextlib.suppress(OSError):  # another lane's is there
                finished.rename(shared)

    def _check_hooks(self) -> None:
        """Without this, a mistyped path shows only as nodes that drain at their first job."""
        for script in (self.spec.prolog, self.spec.epilog):
            if script and self.run(["test", "-x", script], user="root", check=False).returncode:
                raise ClusterError(f"{script} is not there, or not executable")

    def _check_venv(self) -> None:
        """Without this a cluster whose hooks cannot run looks right: each of them fails open."""
        if self.spec.venv == NO_VENV:
            return
        asked = self.run([f"{VENV}/bin/python3", "-c", "import forestage"], check=False)
        if asked.returncode:
            why = f"no user can import forestage from {self.spec.venv}"
            raise ClusterError(f"{why} (run tests/prepare)\n{asked.stdout}{asked.stderr}")

    # Nodes

    def node_kill(self, node: str) -> None:
        """Kills all of a node's processes at once, as a power cut would."""
        self._leader(node).kill()

    def node_reboot(self, node: str) -> None:
        """Kills all of a node's processes and starts it anew. Its disk and node_dirs stay.

        The node is set down in Slurm, which would notice by itself after 300 s.
        """
        self.node_kill(node)
        self._wait_for_loops([self._disk(node)])
        down = ["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=reboot"]
        self.run(down, user="root")
        self._start_node(node, "-b")

        def registered() -> bool:
            return "down" not in self.node_states()[node]

        wait_until(registered, 90, lambda: f"{node} does not come back\n{self.logs()}")

    def _start_node(self, node: str, *flags: str) -> None:
        init = self._init.pid
        network = f"/proc/{init}/root{net.NAMESPACES / node}" if self.spec.net else ""
        # The mount namespace comes last, when the leader has been recorded outside of it.
        # `setsid --fork` leaves the node to the cluster's init, so that it outlives this process.
        enter = ["nsenter", f"--target={init}", "--pid", "--uts", "--ipc"]
        enter += [f"--net={network}" if network else "--net"]
        fork = ["setsid", "--fork", "unshare", "--pid", "--uts", "--ipc", "--fork"]
        mounts = ["nsenter", f"--mount=/proc/{init}/ns/mnt"]
        private = ["unshare", "--mount", "--propagation", "private"]
        inside = ["/usr/bin/env", "-i", f"PATH={PATH}", "python3", "-B", str(INSIDE), "node", node]
        leader = self._leader(node)
        leader.record.unlink(missing_ok=True)
        with open(self.state / "log" / f"{node}.start.log", "w") as log:
            subprocess.run(
                [*enter, *fork, *leader.recorded([*mounts, *private, *inside, *flags])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=UMASK,
                cwd="/",
                check=True,
            )
        wait_until(lambda: leader.alive, 60, lambda: f"{node} did not start\n{self.logs()}")

    def node_states(self) -> dict[str, str]:
        """For example {"n1": "idle", "n2": "drained"}; a star behind it: does not respond."""
        listing = self.run(["sinfo", "-h", "-N", "-o", "%N %T"], user="root").stdout
        return dict(line.split() for line in sorted(set(listing.splitlines())))

    def wait_idle(self, timeout: float = IDLE_SECONDS) -> None:
        """Waits until every node is idle and no job is left, not even one in its Epilog."""

        def idle() -> bool:
            if dead := [node for node in self.nodes if not self._leader(node).alive]:
                raise ClusterError(f"{', '.join(dead)} ended\n{self.logs()}")
            # In one: it is asked often, while others want the processors.
            ask = "squeue -h && sinfo -h -N -o 'node %N %T'"
            asked = self.run(["sh", "-c", ask], user="root", check=False)
            # A node in two partitions is listed twice. Jobs have lines of their own.
            states = {" ".join(line.split()) for line in asked.stdout.splitlines()}
            return not asked.returncode and states == {f"node {n} idle" for n in self.nodes}

        wait_until(idle, timeout, lambda: f"not idle\n{self.overview()}\n{self.logs()}")

    def overview(self) -> str:
        """Jobs and nodes, for a human to read."""
        show = "squeue; sinfo -N -o '%N %T %E'"
        return self.run(["sh", "-c", show], user="root", check=False).stdout

    def mounts(self, node: str | None = None) -> str:
        """The node's (or the login's) /proc/self/mountinfo."""
        return Path("/proc", str(self._leader(node).pid), "mountinfo").read_text()

    # Commands

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "alice",
        node: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = COMMAND_SECONDS,
        check: bool = True,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login or on a node, as if the user had just logged in there.

        Raises ClusterError when it takes longer than `timeout` seconds (it is killed then,
        with its process group), and, unless `check` is False, when its exit code is not 0.
        """
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        process = self.popen(argv, user=user, node=node, cwd=cwd, env=env, stdin=stdin)
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException as error:
            # A signal to us may arrive just as the command has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                why = f"not done in {timeout} s"
                raise ClusterError(f"{' '.join(argv)}: {why}\n{stdout}{stderr}") from None
            raise
        if check and process.returncode:
            why = f"exit code {process.returncode}"
            raise ClusterError(f"{' '.join(argv)}: {why}\n{stdout}{stderr}")
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)

    def submit(self, script: str, *options: str, user: str = "alice") -> int:
        """Submits a batch script; its job ID. Faster than `sbatch --wait`, which polls slowly."""
        done = self.run(["sbatch", "--parsable", *options], user=user, input=script)
        return int(done.stdout)

    @staticmethod
    def signal(process: subprocess.Popen[str], number: int) -> None:
        """To what `popen` has started, so that `process` ends after it and as it does.

        Its group has nsenter in it as well, which has forked to enter the PID namespace: that one
        would die at once, whatever the other does. Raises ProcessLookupError.
        """
        children = Path("/proc", str(process.pid), "task", str(process.pid), "children")
        for child in children.read_text().split():
            os.kill(int(child), number)

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "alice",
        node: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[str] = subprocess.DEVNULL,
        stdout: int | IO[str] = subprocess.PIPE,
        stderr: int | IO[str] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Starts a command as `run` does. Its PID is a process group: signal it by os.killpg."""
        return subprocess.Popen(
            self.command(argv, user=user, node=node, cwd=cwd, env=env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            umask=UMASK,
            start_new_session=True,
        )

    def command(
        self,
        argv: Sequence[str],
        *,
        user: str = "alice",
        node: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The host's command line that runs `argv` inside; for what wants its own Popen."""
        home = "/root" if user == "root" else f"/home/{user}"
        cwd = cwd or (f"/shared/{user}" if user in [one.name for one in USERS] else "/")
        environment = {"PATH": PATH, "HOME": home, "USER": user, "LOGNAME": user}
        environment |= {"SHELL": "/bin/bash", "LANG": "C.UTF-8", **(env or {})}
        enter = ["nsenter", f"--target={self._leader(node).pid}", *NAMESPACES, "--"]
        clean = ["env", "-i", "-C", cwd, *(f"{key}={value}" for key, value in environment.items())]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
        return [*enter, *clean, *become, *argv]

    # Files

    def host_path(self, path: str, node: str | None = None) -> Path:
        """Where the host finds a path of the cluster: for tests to read and write as root.

        An absolute symbolic link on the way would lead to the host's files.
        """
        inside = Path(path)
        if node is None and not self.spec.net and inside.is_relative_to("/shared"):
            return self.state / path.lstrip("/")  # also while the cluster is not running
        return Path("/proc", str(self._leader(node).pid), "root", path.lstrip("/"))

    def read(self, path: str, node: str | None = None) -> str:
        return self.host_path(path, node).read_text()

    def write(self, path: str, text: str, node: str | None = None, mode: int = 0o644) -> None:
        target = self.host_path(path, node)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def pyxis_reports(self, job: int | None = None) -> list[dict[str, object]]:
        """What the stand-in for pyxis found in each task: of one job, or of all."""
        # Without what may be the half of a line that a task is writing.
        whole = self.read(PYXIS_REPORT).rpartition("\n")[0]
        lines = map(json.loads, whole.splitlines())
        return [line for line in lines if job is None or line["job"] == job]

    def logs(self, lines: int = 15) -> str:
        """The ends of all the daemons' logs."""
        text = []
        for log in sorted((self.state / "log").glob("*.log")):
            tail = log.read_text(errors="replace").splitlines()[-lines:]
            text += [f"--- {log.name}", *tail] if tail else []
        return "\n".join(text)

    # Inner things

    def _leader(self, node: str | None) -> Leader:
        """The process whose namespaces are those of the node, or of the login."""
        if node is None:
            return self._init
        if node not in self.nodes:
            raise ClusterError(f"there is no node {node!r}, only {', '.join(self.nodes)}")
        return Leader(self.state / "nodes" / node / "pid")

    def _disk(self, node: str) -> Path:
        return self.state / "nodes" / node / "nvme.img"

    def _wait_for_loops(self, disks: Sequence[Path]) -> None:
        """The kernel lets go of a dead namespace's loop devices a moment later.

        Of those that show a node's entries and job directories only a real reboot does.
        """
        mine = {file_identity(disk) for disk in disks if disk.exists()}
        detach_above(mine)
        wait_until(lambda: not mine & loop_files(), 60, lambda: f"a loop device still has {disks}")


def _make_directory(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)  # also where the umask is stricter: jobs' users must pass


def state_path(name: str) -> Path:
    return Path(tempfile.gettempdir(), f"forestage-cluster-{name}")


def _new_state(name: str | None) -> Path:
    if name is None:
        state = Path(tempfile.mkdtemp(prefix=state_path("").name))
    else:
        state = state_path(name)
        if Leader(state / "init.pid").alive:
            raise ClusterError(f"the cluster {name!r} is already running")
        shutil.rmtree(state, ignore_errors=True)  # of one whose owner was killed
        state.mkdir()
    # Jobs may pass through to what is theirs, but not look around.
    state.chmod(0o711)
    return state
