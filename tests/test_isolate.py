"""./test, ./demo and benches run anywhere, and what they have mounted or started ends with them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import isolate

ISOLATE = [sys.executable, "-B", isolate.__file__]

# A test that fails behind a FUSE and a process that have left it.
LEAVES = """
import subprocess

def test_failing_with_leftovers():
    subprocess.run(["squashfuse", {image!r}, {point!r}], check=True)
    assert open({point!r} + "/file").read() == "shown"
    subprocess.run(["setsid", "--fork", "sleep", {mark!r}], check=True)
    raise AssertionError("on purpose")
"""
# Blocked from before it is sent until it is waited for: none is missed in between.
AWAITS = """
import signal, sys
awaited = {int(sys.argv[1])}
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
print("ready", flush=True)
print(int(signal.sigwait(awaited)), flush=True)
sys.stdin.read()
print(signal.sigpending())
"""
# Of each suite; where it has any, one that becomes another user.
OF_EACH_SUITE = {
    "unit": "cache/test_digest.py::test_digests_are_the_same_in_every_release",
    "processes": "system/test_as_user.py::test_run_in_child_keeps_the_hooks_ids_and_groups",
    "hooks": "test_rights.py::test_copy_of_a_group_readable_source_serves_a_member_of_that_group",
    "features/registry/registry": "test_commands.py::test_gc_of_a_user_keeps_images_of_other_users",
    "faults": "test_attributes_kept.py::test_statx_queries_the_server_by_descriptor_and_by_name",
    "window": "test_window_processes.py::test_loaders_of_a_job_share_one_copier_and_its_copies",
    "spank": "test_namespace.py::test_task_keeps_its_working_directory_after_its_mounts",
    "slurm": "test_step_bind.py::test_image_of_an_inner_step_is_redirected_on_the_whole_node",
}
CACHES = ("__pycache__", ".*_cache", ".hypothesis")
LINTERS = ("mypy*", "ruff*")  # half of what is in .venv


@pytest.fixture(scope="module")
def closed_clone(machine: None) -> Iterator[Path]:
    """This checkout with its .venv, below two directories that only root can traverse.

    Not in /tmp: clusters have one of their own, in which nothing above the checkout is closed.
    """
    with tempfile.TemporaryDirectory(prefix="forestage-closed-", dir="/var/tmp") as outer:
        tree = Path(outer, "inner/forestage")
        tree.parent.mkdir(mode=0o700)
        copy_checkout(tree)
        yield tree
        for folder in (tree.parent, tree.parents[1]):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def copy_checkout(tree: Path) -> None:
    """With its .venv, which is made to be the copy's."""
    left_out = shutil.ignore_patterns(".git", ".venv", *CACHES)
    shutil.copytree(isolate.TREE, tree, symlinks=True, ignore=left_out)
    left_out = shutil.ignore_patterns(*LINTERS)
    shutil.copytree(isolate.TREE / ".venv", tree / ".venv", symlinks=True, ignore=left_out)
    names = [*(tree / ".venv/bin").iterdir(), *(tree / ".venv").rglob("*forestage*.pth")]
    for file in names:
        if not file.is_symlink():
            file.write_bytes(file.read_bytes().replace(*map(os.fsencode, (isolate.TREE, tree))))


def run_in(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """As somebody types it there, and not as a part of this run."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FORESTAGE_")}
    argv = ["./" + command[0], *command[1:]]
    return subprocess.run(argv, cwd=tree, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.cases(1)
@pytest.mark.parametrize("suite", OF_EACH_SUITE)
def test_suite_passes_in_a_clone_below_closed_directories(closed_clone: Path, suite: str) -> None:
    ran = run_in(closed_clone, "test", f"tests/{suite}/{OF_EACH_SUITE[suite]}")
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    assert re.match(r"\.+ +\[100%\]", ran.stdout), "skipped"


@pytest.mark.ci
def test_bench_runs_in_a_clone_below_closed_directories(closed_clone: Path) -> None:
    ran = run_in(closed_clone, "bench/step", "1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "first=" in ran.stdout.splitlines()[-1]


@pytest.mark.parametrize("place", ["here", pytest.param("/elsewhere", marks=pytest.mark.ci)])
def test_venv_of_a_moved_clone_is_rebuilt(machine: None, tmp_path: Path, place: str) -> None:
    """Else it would run the code of the place that it was made in."""
    made, packages = (tmp_path / name for name in (".venv", ".venv/lib/python3/site-packages"))
    (tmp_path / "tests").mkdir()
    packages.mkdir(parents=True)
    shutil.copy(isolate.TREE / "tests/prepare", tmp_path / "tests")
    for copy in (tmp_path / "pyproject.toml", made / "pyproject.stamp"):
        copy.write_text("")
    was = tmp_path if place == "here" else Path(place)
    (packages / "_forestage.pth").write_text(f"{was}/src")
    # Without an index pip fails at once, when the rest has been seen.
    env = os.environ | {"PIP_NO_INDEX": "1"}
    ran = subprocess.run([tmp_path / "tests/prepare"], env=env, capture_output=True, text=True)
    if place == "here":
        assert (ran.returncode, ran.stderr) == (0, "")
    else:
        assert ran.stderr.startswith("prepare: building .venv\n")
        assert not packages.exists()


def test_pytest_without_isolation_refuses_a_clone_below_closed_directories(
    closed_clone: Path,
) -> None:
    ran = run_in(closed_clone, ".venv/bin/python3", "-m", "pytest", "tests/unit/cache")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"cannot traverse {isolate.find_closed(closed_clone)} (run ./test)" in ran.stderr


def test_clone_with_mode_700_is_refused(closed_clone: Path) -> None:
    closed_clone.chmod(0o700)
    try:
        ran = run_in(closed_clone, "test", "tests/unit/cache", "-q")
    finally:
        closed_clone.chmod(0o755)
    assert (ran.returncode, f"(chmod -R go+rX {closed_clone})" in ran.stderr) == (1, True)


def test_isolated_command_sees_files_beside_the_clone_and_its_writes_stay(
    closed_clone: Path,
) -> None:
    (closed_clone.parent / "beside").write_text("seen")
    script = "cat ../beside; echo kept >written; setpriv --reuid=65534 --clear-groups cat written"
    ran = run_in(closed_clone, "tests/isolate.py", "sh", "-c", script)
    assert (ran.stdout, ran.stderr) == ("seenkept\n", "")
    assert (closed_clone / "written").read_text() == "kept\n"


def processes_with(mark: str) -> list[str]:
    """The PIDs of those whose command line has this word, in namespaces below as well."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if mark.encode() in words:
            found.append(line.parent.name)
    return found


def tables_with(path: Path) -> list[str]:
    """The PIDs of those whose mount table names this path."""
    found = []
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            text = table.read_text()
        except OSError:
            continue
        if f" {path} " in text:
            found.append(table.parent.name)
    return found


def inside(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ISOLATE, *command], capture_output=True, text=True, timeout=60)


def test_failed_test_leaves_neither_mounts_nor_processes(machine: None, tmp_path: Path) -> None:
    content, image, point = (tmp_path / name for name in ("content", "image.sqsh", "point"))
    content.mkdir()
    (content / "file").write_text("shown")
    point.mkdir()
    subprocess.run(["mksquashfs", content, image, "-quiet", "-no-progress"], check=True)
    mark = f"98765.{os.getpid()}"
    test = tmp_path / "test_leaves.py"
    test.write_text(LEAVES.format(image=str(image), point=str(point), mark=mark))
    pytest_there = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path)]
    ran = inside(*pytest_there, str(test))
    assert (ran.returncode, "on purpose" in ran.stdout) == (1, True), ran.stdout + ran.stderr
    assert processes_with(mark) == []
    assert processes_with(str(point)) == []
    assert tables_with(point) == []


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 128 + signal.SIGKILL)]
)
def test_isolate_exits_with_the_commands_exit_code(machine: None, script: str, code: int) -> None:
    assert inside("sh", "-c", script).returncode == code


def test_isolate_names_a_missing_command(machine: None) -> None:
    ran = inside("/no/such/command")
    assert (ran.returncode, ran.stderr) == (
        127,
        "isolate: /no/such/command: [Errno 2] No such file or directory\n",
    )


def test_isolate_runs_a_command_of_an_ordinary_user_without_namespaces(machine: None) -> None:
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    inner = [sys.executable, "-c", "import os; print(os.readlink('/proc/self/ns/pid'))"]
    here = os.readlink("/proc/self/ns/pid")
    ran = subprocess.run([*user, *ISOLATE, *inner], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == (f"{here}\n", "")
    assert inside(*inner).stdout != f"{here}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_isolate_forwards_a_signal_to_the_command_once(
    machine: None, number: signal.Signals
) -> None:
    argv = [*ISOLATE, sys.executable, "-c", AWAITS, str(int(number))]
    with subprocess.Popen(argv, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{int(number)}\n"
        assert process.communicate("", timeout=60)[0] == "set()\n"


def test_isolated_command_ends_when_isolate_is_killed(machine: None) -> None:
    mark = f"98764.{os.getpid()}"
    with subprocess.Popen(
        [*ISOLATE, "sh", "-c", f"sleep {mark} & echo started; wait"], stdout=-1
    ) as one:
        assert one.stdout
        assert one.stdout.readline() == b"started\n"
        one.kill()
        assert one.stdout.read() == b""  # until the last process has closed it
    assert processes_with(mark) == []
