"""A user lists one of our directories into memory that never comes: its lock is held meanwhile.

getdents(2) writes to the caller's memory under the lock of the directory; here the memory is mapped
from a file system that does not answer.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from far import Far
from fault import beside, image

from forestage import events
from forestage.clock import Clock
from forestage.commands import off as switching
from forestage.commands import sweep
from forestage.config import switch
from forestage.events import RequestOutcome, user_files
from forestage.features.metrics import textfile
from forestage.features.registry import step_files
from forestage.hooks import boundary
from forestage.system import processes
from forestage.system.as_user import User
from node import ALICE, BOB, HANGS, Node, Ran, until

NUMBER = {"x86_64": 217, "aarch64": 61}[platform.machine()]  # of getdents64

PARK = """\
import ctypes, mmap, os, platform, sys
file = os.open(sys.argv[1], os.O_RDONLY)
page = mmap.mmap(file, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
there = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
folder = os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECTORY)
print("lists", flush=True)
ctypes.CDLL(None).syscall(int(sys.argv[3]), folder, there, 4096)
"""

READ = """\
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
page = mmap.mmap(file, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
try:
    own = os.open(sys.argv[2], os.O_RDONLY | int(sys.argv[3]))
except OSError:  # a tmpfs knows O_DIRECT since Linux 6.6
    own = os.open(sys.argv[2], os.O_RDONLY)
print("reads", flush=True)
os.preadv(own, [page], 0)
"""


@contextlib.contextmanager
def parked(
    far: Far, path: Path, code: str = PARK, user: User = BOB, number: int = NUMBER
) -> Iterator[None]:
    """Bob lists a directory, until the block ends; a directory that he may not open ends it."""
    page = far.put("page", bytes(4096))
    far.hang_reads()
    before = far.calls()["read"]
    argv = [sys.executable, "-ISc", code, page, path, str(number)]
    lister = subprocess.Popen(
        argv, user=user.uid, group=user.gid, extra_groups=[], stdout=subprocess.PIPE
    )
    with lister:
        assert lister.stdout is not None
        if not lister.stdout.readline():
            raise PermissionError(path)
        until(lambda: far.calls()["read"] > before, "the kernel to want the page")
        try:
            yield
        finally:
            far.behaves()
    assert lister.returncode == 0


@pytest.fixture
def run(node: Node) -> Path:
    """As somebody's hand has made it."""
    run = node.places.run
    run.mkdir(parents=True)
    for folder in (run, node.places.images, node.places.through):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    return run


def called(node: Node, name: str, job: int) -> None:
    """What a hook does first."""
    boundary.record_call(name, node.environ(job), str(node.places.run))  # type: ignore[arg-type]


def test_users_can_lock_no_directory_in_which_hooks_create_files(
    node: Node, far: Far, run: Path
) -> None:
    """After jobs of many kinds there is none; in tests/slurm/jobs.py after all of the tests'."""
    node.staged(2)
    called(node, "prolog", 2)
    step_files.make_placeholder(node.places, 2, 0, 100)
    node.configure(cold="shared")
    node.prolog(3, node.put("alice/other.sqsh"))
    state = node.places.known_disks.parent
    for folder in (node.places.etc, node.places.config_parts, state):
        folder.mkdir(exist_ok=True, parents=True)
        folder.chmod(0o755)
    sweep.make_config_unlistable(node.places)
    ours = [Path(one) for one, _, _ in os.walk(run)]  # a copy that ends takes one away
    assert {run, node.places.images, node.places.through} < set(ours)
    ours += [node.places.etc, node.places.config_parts, state, node.places.events.parent]
    for folder in ours:
        with pytest.raises(PermissionError), parked(far, folder):
            pass


@contextlib.contextmanager
def held(far: Far, folder: Path) -> Iterator[None]:
    """Bob lists a directory, as in `parked`, and makes a name in it.

    Whoever looks up a name there that the kernel does not know yet waits behind the latter.
    """
    argv = [sys.executable, "-ISc", "import os, sys; os.mkdir(sys.argv[1])", folder / "bobs"]
    with parked(far, folder):
        maker = subprocess.Popen(argv, user=BOB.uid, group=BOB.gid, extra_groups=[])
        until(lambda: processes.read_stat(Path(f"/proc/{maker.pid}")).state == "D", "him to wait")
        yield
    assert maker.wait() == 0


def test_epilog_ends_while_a_user_locks_dev_shm(node: Node, far: Far, run: Path) -> None:
    """Of a job with an image, and of one without: hooks name nothing where all users make names."""
    node.staged(1)
    shared = node.places.root / "dev/shm"
    shared.mkdir(parents=True)
    shared.chmod(0o1777)

    def epilog_of(job: int) -> Ran:
        nothing = boundary.has_no_work("epilog", node.environ(job), str(node.places.root))
        assert nothing is (job == 2)
        return node.epilog(job)

    with held(far, shared):
        for job in (1, 2):
            assert beside(partial(epilog_of, job)).said == ("released", "")


@pytest.mark.parametrize("flag", [0, os.O_DIRECT])
def test_hanging_reader_of_a_users_event_file_blocks_no_hook_and_no_sweep(
    node: Node, far: Far, run: Path, flag: int
) -> None:
    """On XFS the same read holds the lock that a write waits for; this is a tmpfs."""
    path = node.staged(1)
    own = user_files.user_file_path(node.places.users, ALICE.uid)
    with parked(far, own, READ, ALICE, flag):
        assert beside(lambda: node.epilog(1)).said == ("released", "")
        assert beside(lambda: node.prolog(2, path)).said == ("hit", "")
        hooks = [one.hook for one in events.read_user_events(node.places, ALICE.uid)]
        assert hooks[-2:] == ["epilog", "prolog"]
        detail = RequestOutcome("hit", detail="x" * user_files.MAX_USER_FILE_BYTES)
        full = events.EventRecord(1.0, "step", 2, detail, uid=ALICE.uid)
        beside(lambda: events.record_events(node.places, [full] * 2))  # its front is given back
        beside(lambda: user_files.remove_idle_users(node.places.users, time.time() * 2))
        assert not own.exists()


# A hook on the test's node.
HASTY = """
import os, sys
from forestage.hooks import boundary, hook_worker
from forestage.system import probe
probe.LIMIT, hook_worker.PROBE_INTERVAL, hook_worker.HANG_AFTER = 0.2, 0.2, 0.3
os._exit(boundary._run_to_exit_status(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["prolog", "step", "epilog"])
def test_hook_ends_while_a_user_locks_the_directory_above_the_cache(
    node: Node, far: Far, run: Path, tmp_path: Path, name: str
) -> None:
    """On a scratch disk users make names beside the cache: its path hangs then as its disk would.

    That the hook knows which cache it is takes no walk along that path.
    """
    scratch = node.shared / "scratch"
    scratch.mkdir()
    scratch.chmod(0o1777)
    below_root = node.places.root / scratch.relative_to("/")  # a hook's paths lie below the node's
    below_root.parent.mkdir(parents=True)
    below_root.symlink_to(scratch)
    node.configure(cache=f"{scratch}/forestage")
    node.places.leases.mkdir(parents=True, exist_ok=True)
    (node.places.leases / "1.prolog").touch()  # an Epilog has work; there is no lease
    context = {"SLURM_SCRIPT_CONTEXT": "spank_step", "SLURM_STEP_ID": "0"} if name == "step" else {}
    environ = node.environ(1, node.put("alice/image.sqsh", image())) | context
    argv = [sys.executable, "-Ic", HASTY, name, node.places.root]
    said = tmp_path / "said"  # no pipe: a step's child that hangs keeps it
    with held(far, scratch), said.open("w") as file:
        assert subprocess.call(argv, env=environ, stdout=file, stderr=file, timeout=HANGS) == 0
    assert "reason=cache-hangs" in said.read_text()
    until(far.is_left_alone, "what was left behind")


def test_hook_ends_while_a_user_locks_run_or_var_log(node: Node, far: Far, run: Path) -> None:
    """/run itself, and /var/log: what is there is not made again."""
    path = node.staged(1)
    called(node, "prolog", 1)
    for folder in (run.parent, node.places.events.parent.parent):
        folder.chmod(0o755)
    with parked(far, run.parent):
        called(node, "prolog", 2)
        assert beside(lambda: node.prolog(2, path)).said == ("hit", "")
        assert beside(lambda: node.epilog(2)).said == ("released", "")
    far.answer()
    with parked(far, node.places.events.parent.parent):
        assert beside(lambda: node.prolog(3, path)).said == ("hit", "")
        assert beside(lambda: node.epilog(3)).said == ("released", "")


def test_metrics_lock_is_acquired_while_a_user_locks_run_or_var_log(
    node: Node, far: Far, run: Path
) -> None:
    """The lock of `metrics`, whose folder filelock would make once more."""

    def lock_metrics() -> Ran:
        with textfile.hold_metrics_lock(node.places, 60):
            return Ran(())

    lock_metrics()
    for folder in (run.parent, node.places.events.parent.parent):
        folder.chmod(0o755)
        with parked(far, folder):
            assert beside(lock_metrics).code == 0
        far.answer()


def test_off_and_on_end_while_a_user_locks_etc_and_a_later_off_cleans_up(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging is off at once; what lasts is written by a child, which is left behind."""
    places, clock = node.places, Clock()
    monkeypatch.setattr(switch, "PATIENCE", 0.3)
    places.etc.chmod(0o755)
    with parked(far, places.etc):
        done = beside(lambda: switching.switch_off(places, clock, "INC-1", None))
        assert (done.off, done.kept, done.files) == (True, False, (str(places.disabled),))
        assert "did not answer" in done.error
        assert done.why == f"{places.disabled}: INC-1"
        done = beside(lambda: switching.switch_on(places, clock))
        assert (done.off, done.files) == (True, (str(places.disabled),))
        assert "did not answer" in done.error
    until(lambda: list(places.etc.glob(".disabled.*")), "the child that was left behind")
    monkeypatch.setattr(switch, "PATIENCE", 60.0)
    done = switching.switch_off(places, clock, "INC-2", None)
    assert (done.kept, done.files) == (True, (str(places.lasting_off_file),))
    assert not switching.switch_on(places, clock).off
    assert not list(places.etc.glob(".disabled.*"))
