"""Steps whose step manager runs in the job's PID and user namespaces, as of Slurm 25.11."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.cache.part import PROCESS_NAME
from forestage.events import CopyOutcome
from forestage.views.through import keeper
from node import Node, comm, content, until

# `forestage step` on the test's node instead of the machine.
HELPER = """
import sys
from pathlib import Path
from forestage import paths
real, root = paths.NodePaths, Path(sys.argv.pop())
paths.NodePaths = lambda *_: real(root)
from forestage.commands.console_script import main
main()
"""
STEP = {"SLURM_SCRIPT_CONTEXT": "spank_step", "SLURM_STEP_ID": "0", "PATH": os.environ["PATH"]}
MIB = 1024 * 1024
IDENTITY = "0 0 4294967295\n"  # as namespace/linux maps users


class JobsOwn:
    """Namespaces that namespace/linux makes for a job, with the step manager that is their init."""

    def __init__(self, node: Node, users: str = "") -> None:
        manager = node.places.root / "slurmstepd"
        if not manager.exists():
            manager.symlink_to("/bin/sleep")
        self.users = _with_users(users) if users else None
        enter = ["nsenter", f"--target={self.users.pid}", "--user"] if self.users else []
        make = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        self.outer = subprocess.Popen(
            [*enter, *make, str(manager), "inf"], stderr=subprocess.DEVNULL
        )
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        self.init = int(until(children.read_text, "the namespace"))
        until(lambda: comm(self.init) == "slurmstepd", "the step manager")
        self.kinds = ["--pid", "--mount", *(["--user"] if users else [])]

    def asks(self, node: Node, job: int, image: Path) -> list[str]:
        """The last line of a step's helper in there, in fields."""
        enter = ["nsenter", f"--target={self.init}", *self.kinds, "--"]
        helper = [sys.executable, "-Ic", HELPER, "step", str(node.places.root)]
        done = subprocess.run(
            [*enter, *helper],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=node.environ(job, image) | STEP,
            check=True,
        )
        return done.stdout.decode().splitlines()[-1].split("\t")

    def end(self) -> None:
        """As Slurm ends a job: all that is in the PID namespace is killed with its init."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self.outer.wait()
        if self.users:
            self.users.kill()
            self.users.wait()


def _with_users(line: str) -> subprocess.Popen[bytes]:
    """A process in a user namespace with this map; /proc of a sandbox may allow none."""
    holder = subprocess.Popen(["unshare", "--user", "sleep", "inf"])
    until(lambda: comm(holder.pid) == "sleep" or holder.poll(), "a user namespace")
    if holder.returncode:
        pytest.skip("no user namespaces here")
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{holder.pid}/{name}").write_text(line)
    return holder


@pytest.fixture
def job(node: Node) -> Iterator[Callable[..., JobsOwn]]:
    made: list[JobsOwn] = []

    def making(users: str = "") -> JobsOwn:
        made.append(JobsOwn(node, users))
        return made[-1]

    yield making
    for one in made:
        one.end()


BOTH = pytest.mark.parametrize("users", ["", IDENTITY], ids=["pid", "pid and user"])


@BOTH
def test_step_in_its_jobs_namespaces_has_the_copy(
    node: Node, job: Callable[..., JobsOwn], users: str
) -> None:
    node.configure(redirect="spank")
    path = node.put("alice/image.sqsh")
    inside = job(users)
    assert [inside.asks(node, number, path)[0] for number in (1, 2)] == ["use", "use"]
    said = [(one.result, one.reason) for one in node.outcomes("step")]
    assert said == [("copied", ""), ("hit", "")]
    assert node.prolog(3, path).said == ("hit", "")


@BOTH
def test_step_inside_a_jobs_namespaces_starts_no_keeper_that_would_end_with_the_job(
    node: Node, job: Callable[..., JobsOwn], users: str
) -> None:
    """Its keeper would be killed with that job, and other jobs' reads would be I/O errors."""
    node.configure(redirect="spank", cold="through", bandwidth="1K", threads=1)
    path = node.put("alice/image.sqsh", content(1, 4 * MIB))
    inside = job(users)
    assert inside.asks(node, 1, path) == ["leave", "started"]
    (step,) = node.outcomes("step")
    assert (step.result, step.reason) == ("started", "no-through")
    assert keeper.list_keepers(node.places.through) == []
    # That of a Prolog is the node's own, and serves them as well.
    assert node.prolog(2, path).outcome.result == "started"
    ((spot, state),) = until(
        lambda: keeper.list_keepers(node.places.through), "the Prolog's keeper"
    )
    until(lambda: keeper.is_listening(spot / "sock"), "its socket")
    assert inside.asks(node, 2, path)[:2] == ["through", str(spot / "sock")]
    inside.end()
    assert comm(state.pid) == keeper.PROCESS_NAME


@BOTH
def test_copy_killed_with_its_jobs_namespace_is_resumed_by_the_next_job(
    node: Node, job: Callable[..., JobsOwn], users: str
) -> None:
    """The pid that its stager noted is that of another process on the node, or of none."""
    node.configure(redirect="spank", cold="shared", bandwidth="1M", threads=1)
    path = node.put("alice/image.sqsh", content(1, 4 * MIB))
    key = node.identity(path).key
    inside = job(users)
    assert inside.asks(node, 1, path) == ["leave", "started"]
    owner = until(lambda: node.cache.find_stager(key), "the copy as the node sees it")
    assert comm(owner.pid) != PROCESS_NAME
    until(lambda: any(node.cache.part(key).read_digests()), "a chunk")
    inside.end()
    assert node.cache.find_stager(key) is None
    node.configure(redirect="bind", cold="wait")
    assert node.prolog(2, path).outcome.result == "copied"
    copied = node.outcomes("stager")[-1]
    assert isinstance(copied, CopyOutcome)
    assert copied.resumed >= MIB


def test_step_as_root_of_a_foreign_user_namespace_changes_nothing(
    node: Node, job: Callable[..., JobsOwn]
) -> None:
    """A site's UserNSScript maps users as it likes: all that is root's is out of reach."""
    path = node.staged(1)
    node.epilog(1)
    node.configure(redirect="spank")
    before = node.entries()
    inside = job("0 100000 65536\n")
    assert inside.asks(node, 2, path) == ["leave", "config"]
    assert node.entries() == before
    assert node.shows_source(path)
    assert node.prolog(3, path).said == ("hit", "")
