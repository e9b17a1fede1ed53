"""What all tests share. `node` runs the hooks for real: as root, on a node made of tmpfs."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# These lie beside this file, not in a package.
import choice
import isolate
import lanes
from forestage.system import mounts
from node import Node
from parking import Park, with_fuse

pytest_plugins = ["flaky"]

LONGEST = 3 * 3600  # seconds for a test that is known to take its time

# Also beneath nohup(1): what it ignores our commands leave ignored, and tests see to both.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# A script's shell has what it starts in the background ignore ^C, with all that this starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.umask(0o022)  # whatever whoever runs the tests has; what it must not matter to sets its own

MS_PRIVATE = 1 << 18
PR_SET_CHILD_SUBREAPER = 36
FOLDERS = "fst-"  # in /tmp; short, as the names of sockets must be
TOP = Path("/mnt")  # there on every Linux; covered in the test's own namespace only
TOOLS = ("rsync", "setfacl", "mount", "mkfs.ext4", "gcc", "pkg-config")

_libc = ctypes.CDLL(None, use_errno=True)


def pytest_configure() -> None:
    """Has this process keep its directories where no other closes them to users.

    pytest makes /tmp/pytest-of-root its user's alone as each process of it begins: another one's
    test may need just then that a user can enter. Also clears up after processes that have ended,
    whose locks the kernel has released: their PIDs would not show it, as each ./test has its own.
    """
    closed = isolate.find_closed(isolate.TREE) if os.geteuid() == 0 else None
    if closed:
        raise pytest.UsageError(f"users whom tests become cannot traverse {closed} (run ./test)")
    for old in Path("/tmp").glob(f"{FOLDERS}*"):
        if (descriptor := _lock(old)) is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(descriptor)
    own = Path(tempfile.mkdtemp(prefix=FOLDERS, dir="/tmp"))
    while _lock(own) is None or not own.exists():  # else another process has just cleared it up
        own = Path(tempfile.mkdtemp(prefix=FOLDERS, dir="/tmp"))
    own.chmod(0o711)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(own)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds its lock, or None if another process does, or has removed it."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return descriptor
    return None


def pytest_sessionfinish(exitstatus: int) -> None:
    if exitstatus == 0:  # else somebody wants to look
        shutil.rmtree(os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes long, unless ./test says otherwise; tests/slurm knows more of that."""
    for item in items:
        if item.get_closest_marker("long") or item.get_closest_marker("suite"):
            item.add_marker(pytest.mark.timeout(LONGEST))
    also = set(os.environ.get("FORESTAGE_TEST_ALSO", "").split())
    unasked = {"long", "machine"} - also
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if lanes.taken_here() and "ci" not in also:  # whoever names a file wants all of it
        left_out += choice.find_left_out(items)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """The tests fork often: what is there already need not be looked at, nor copied, each time."""
    gc.collect()
    gc.freeze()
    _libc.malloc_trim(0)


def pytest_runtestloop(session: pytest.Session) -> object:
    taken = lanes.taken_here()
    if taken is None or session.testsfailed or session.config.option.collectonly:
        return None  # pytest does it
    lanes.run(session, taken)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    taken = lanes.taken_here()
    if taken is not None:
        lanes.note(terminalreporter.stats, taken)


@contextlib.contextmanager
def _forgetting_places() -> Iterator[None]:
    """Forget where `peering.find_at` has had the nodes of one host found meanwhile."""
    peering = sys.modules.get("peering")  # few modules of tests have it
    before = dict(peering._places) if peering else {}
    yield
    if peering:
        peering._places.clear()
        peering._places.update(before)


@pytest.fixture(autouse=True)
def forget_places() -> Iterator[None]:
    with _forgetting_places():
        yield


@pytest.fixture(autouse=True, scope="module")
def forget_places_of_module() -> Iterator[None]:
    with _forgetting_places():
        yield


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips for an ordinary user; root has no excuse, ./test installs all that is needed."""
    if os.geteuid() != 0:
        pytest.skip("mounts and other users' rights need root")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in TOOLS if not shutil.which(name, path=path)]:
        pytest.fail(f"missing: {', '.join(missing)} (run tests/prepare)")


@pytest.fixture(scope="session")
def farfs(machine: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the file system that can be slow, hang and die."""
    return with_fuse("farfs", tmp_path_factory.mktemp("farfs"))


@pytest.fixture
def park(machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Park]:
    """Has somebody hold inodes until the test ends, or lets go of them."""
    with contextlib.ExitStack() as stack:
        yield Park(with_fuse("park", tmp_path_factory.mktemp("park")), stack)


@pytest.fixture(scope="session")
def nfslike(machine: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the file system that keeps attributes, names and listings."""
    return with_fuse("nfslike", tmp_path_factory.mktemp("nfslike"))


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """`tmp_path`, which here any user may enter."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    return tmp_path


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if not found:
        assert os.geteuid() != 0, "promtool is missing (run tests/prepare)"
        pytest.skip("promtool is missing")
    return found


@pytest.fixture
def private_mounts(machine: None) -> Iterator[None]:
    """A mount namespace for one test, which goes with all its mounts when the test leaves it."""
    folder = Path.cwd()
    home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    assert _libc.unshare(mounts.CLONE_NEWNS) == 0
    try:
        mounts.mount("none", "/", mounts.MS_REC | MS_PRIVATE)
        yield
    finally:
        # setns(2) refuses a process of several threads, and one that was joined may still be on
        # its way out of the kernel.
        result = _libc.setns(home, mounts.CLONE_NEWNS)
        for _ in range(6000):
            if result == 0:
                break
            time.sleep(0.01)
            result = _libc.setns(home, mounts.CLONE_NEWNS)
        os.close(home)
        if result != 0:
            pytest.exit("cannot leave a test's mount namespace")
        os.chdir(folder)  # setns(2) goes to the root


@pytest.fixture
def node(private_mounts: None) -> Iterator[Node]:
    """A node with an empty cache on its NVMe and an empty shared file system."""
    # The stagers of hooks that have ended become ours, so that their ends can be seen.
    assert _libc.prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    node = Node.boot(TOP)
    yield node
    node.shut_down()
    assert _libc.prctl(PR_SET_CHILD_SUBREAPER, 0) == 0
