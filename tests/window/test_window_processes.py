"""A window's processes: shared, killed, stopped, forked, without room, on disks that are full."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import forestage_window
import pytest
from copiers import copiers, processes, usage, wait_for_end
from forestage_window import Window, window

from conftest import REPOSITORY, SIZE

LOADER = """
import json, sys
from forestage_window import window
paths, room, options = json.loads(sys.argv[1])
shards = window(paths, room, **options)
for path in shards:
    print(json.dumps(path), flush=True)
    if not sys.stdin.readline():
        break
print(json.dumps(vars(shards.stats)), flush=True)
"""


class Loader:
    """Another process with a window; it goes on to the next path when it is asked to."""

    def __init__(self, paths: list[Path], room: int, **options: object) -> None:
        said = json.dumps([list(map(str, paths)), room, options])
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOADER, said],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src/window")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def path(self) -> str:
        assert self.process.stdout
        return str(json.loads(self.process.stdout.readline()))

    def go_on(self) -> None:
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)

    def rest(self) -> dict[str, object]:
        """Reads all that is left as fast as it comes; returns the statistics."""
        out, _ = self.process.communicate("\n" * 1000, timeout=120)
        stats: dict[str, object] = json.loads(out.splitlines()[-1])
        return stats

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def loaders(job: Path) -> Iterator[list[Loader]]:
    started: list[Loader] = []
    yield started
    for loader in started:
        loader.kill()


def the_copier(job: Path) -> int:
    (pid,) = copiers(job)
    return pid


def test_loaders_of_a_job_share_one_copier_and_its_copies(
    job: Path, data_set: list[Path], loaders: list[Loader]
) -> None:
    loaders += [Loader(data_set, 40 * SIZE) for _ in range(12)]
    for loader in loaders:
        assert job in Path(loader.path()).parents
    the_copier(job)
    stats = [loader.rest() for loader in loaders]
    assert {one["shared"] for one in stats} == {0}
    assert max(int(str(one["copied"])) for one in stats) == 20 * SIZE


def test_four_loaders_and_two_epochs_never_take_more_than_the_room(
    job: Path, data_set: list[Path], loaders: list[Loader]
) -> None:
    """Each with its own part of 20 files; room for 8."""
    room, over, done = 8 * SIZE, [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            if (used := usage(job)) > room:
                over.append(used)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        loaders += [Loader(data_set[part::4] * 2, room, ahead=2) for part in range(4)]
        stats = [loader.rest() for loader in loaders]
    finally:
        done.set()
        watcher.join()
    assert over == []
    assert sum(int(str(one["local"])) for one in stats) >= 30


def test_killed_copier_is_replaced_and_its_last_copies_stay(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set, room=6 * SIZE, ahead=2, keep=2)
    paths, given = iter(shards), []
    for _ in range(5):
        given.append(next(paths))
    os.kill(the_copier(job), signal.SIGKILL)
    given.append(next(paths))
    # What the dead one gave last may still be opened, and takes its room.
    assert Path(given[4]).read_bytes() == data_set[4].read_bytes()
    the_copier(job)
    given.append(next(paths))
    next(paths)
    assert not os.path.exists(given[4])
    for source, local in zip(data_set[8:], paths, strict=True):
        assert job in Path(local).parents
        assert Path(local).read_bytes() == source.read_bytes()
    assert usage(job) <= 6 * SIZE
    shards.close()
    assert list(job.iterdir()) == []


def test_killed_fetch_process_leaves_only_its_own_file_uncopied(
    job: Path, data_set: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch says that it runs by its pid, and never ends by itself."""
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    (tmp_path / "hanging.py").write_text(
        "import os, signal\n"
        "def fetch(source, target):\n"
        "    if source.endswith('000.tar'):\n"
        f"        with open({str(pids)!r}, 'w') as file: print(os.getpid(), file=file)\n"
        "        signal.pause()\n"
        "    open(target, 'wb').write(open(source, 'rb').read())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    hanging = importlib.import_module("hanging")

    def kill() -> None:
        os.kill(int(pids.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    shards = window(data_set, room=8 * SIZE, fetch=hanging.fetch)
    locals_ = list(shards)
    killer.join()
    assert locals_[0] == str(data_set[0])
    assert (shards.stats.local, shards.stats.shared) == (19, 1)


def test_fetch_process_ends_with_its_copier(
    job: Path, data_set: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    (tmp_path / "sleeping.py").write_text(
        "import os, signal\n"
        "def fetch(source, target):\n"
        f"    with open({str(pids)!r}, 'w') as file: print(os.getpid(), file=file)\n"
        "    signal.pause()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sleeping = importlib.import_module("sleeping")

    asking = threading.Thread(
        target=lambda: next(iter(window(data_set[:1], room=8 * SIZE, fetch=sleeping.fetch)))
    )
    asking.start()
    fetching = int(pids.read_text())
    os.kill(the_copier(job), signal.SIGKILL)
    wait_for_end(fetching)
    # The next copier begins the file anew; that one is killed, too.
    again = int(pids.read_text())
    os.kill(again, signal.SIGKILL)
    asking.join()


def test_killed_loader_frees_the_room_of_its_copies(
    job: Path, data_set: list[Path], loaders: list[Loader]
) -> None:
    loaders.append(Loader(data_set, 2 * SIZE, ahead=0, keep=2))
    loaders[0].path()
    loaders[0].go_on()
    loaders[0].path()
    shards = window(data_set[10:], room=2 * SIZE, ahead=0)
    paths = iter(shards)
    assert next(paths) == str(data_set[10])  # the other one holds both
    copier = the_copier(job)
    loaders[0].kill()
    # The copier sees the end of a connection before it reads what was said after it.
    assert job in Path(next(paths)).parents
    assert the_copier(job) == copier


def test_copier_ends_and_deletes_all_after_its_last_loader_was_killed(
    job: Path, data_set: list[Path], loaders: list[Loader]
) -> None:
    loaders.append(Loader(data_set, 8 * SIZE))
    loaders[0].path()
    copier = the_copier(job)
    os.kill(copier, signal.SIGTERM)  # as Slurm does: the wait for another epoch is over
    loaders[0].go_on()
    assert job in Path(loaders[0].path()).parents  # but not for who still reads
    loaders[0].kill()
    wait_for_end(copier)
    assert list(job.iterdir()) == []


def test_copies_left_by_killed_processes_are_deleted_by_the_next_window(
    job: Path, data_set: list[Path], loaders: list[Loader]
) -> None:
    loaders.append(Loader(data_set, 8 * SIZE))
    left = Path(loaders[0].path())
    for pid in (*processes(job), loaders[0].process.pid):
        with contextlib.suppress(ProcessLookupError):  # what copies ends with its copier
            os.kill(pid, signal.SIGKILL)
    for pid in processes(job):
        wait_for_end(pid)
    loaders[0].kill()
    assert left.exists()
    shards = window(data_set, room=8 * SIZE)
    assert not left.exists()
    shards.close()
    assert list(job.iterdir()) == []


def test_window_yields_shared_paths_after_the_job_directory_was_deleted(
    job: Path, data_set: list[Path], tmp_path: Path
) -> None:
    """The Epilog renames it and deletes it."""
    shards = window(data_set, room=4 * SIZE)
    paths = iter(shards)
    next(paths)
    job.rename(tmp_path / "deleted")
    shutil.rmtree(tmp_path / "deleted")
    assert set(list(paths)[5:]) <= set(map(str, data_set))
    # By whoever finds it first: the loader, or a copier amid a file.
    assert os.fspath(job) in shards.stats.trouble


def test_stopped_copier_is_given_up_and_the_given_paths_are_yielded(
    job: Path, data_set: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = window(data_set, room=4 * SIZE)
    assert job in Path(next(iter(first))).parents  # the copier has begun, however long that took
    monkeypatch.setattr(forestage_window, "ANSWER_TIMEOUT_S", 0.5)
    shards = window(data_set, room=4 * SIZE)
    paths = iter(shards)
    next(paths)
    copier = the_copier(job)
    os.kill(copier, signal.SIGSTOP)
    assert list(paths) == list(map(str, data_set[1:]))
    os.kill(copier, signal.SIGCONT)


def test_stopped_loader_does_not_block_another_loader(
    job: Path, data_set: list[Path], loaders: list[Loader]
) -> None:
    loaders += [Loader(data_set, 8 * SIZE), Loader(data_set[::-1], 8 * SIZE)]
    for loader in loaders:
        loader.path()
    loaders[0].process.send_signal(signal.SIGSTOP)
    assert loaders[1].rest()["local"] == 20
    loaders[0].process.send_signal(signal.SIGCONT)
    assert loaders[0].rest()["local"] == 20


def test_invalid_message_to_the_copier_ends_only_its_own_connection(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set, room=4 * SIZE)
    paths = iter(shards)
    next(paths)
    (place,) = job.glob("*/*")
    hello = json.dumps(shards._settings)
    for words in ("", "\n", "[]\n", "{}\n[]\n", f'{hello}\n["/a"]\n{{"at": 7}}\n', "\0" * 100_000):
        with socket.socket(socket.AF_UNIX) as bad, contextlib.suppress(OSError):
            bad.connect(f"{place}/socket")
            bad.sendall(words.encode())
            bad.shutdown(socket.SHUT_WR)
            while bad.recv(1 << 16):
                pass
    assert all(job in Path(path).parents for path in paths)


def test_forked_child_continues_the_window_with_its_own_connection(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set, room=8 * SIZE)
    paths = iter(shards)
    next(paths)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            rest = [Path(path) for path in paths]
            right = [one.read_bytes() for one in rest[-1:]] == [data_set[-1].read_bytes()]
            os.write(
                writer, b"y" if right and len(rest) == 19 and job in rest[-1].parents else b"n"
            )
        finally:
            os._exit(0)
    assert os.read(reader, 1) == b"y"
    os.waitpid(child, 0)
    for descriptor in (reader, writer):
        os.close(descriptor)
    rest = list(paths)
    assert len(rest) == 19
    assert shards.stats.shared == 0


def test_forked_child_holds_no_connection_of_its_parents_window(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set, room=8 * SIZE)
    paths = iter(shards)
    next(paths)
    reader, writer = os.pipe()
    runs, runs_writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(runs_writer, b"x")
        os.read(reader, 1)
        os._exit(0)
    os.read(runs, 1)  # until it runs it holds all: the copier would linger
    os.close(runs)
    os.close(runs_writer)
    paths.close()  # type: ignore[attr-defined]
    copier = the_copier(job)
    shards.close()
    wait_for_end(copier)
    assert list(job.iterdir()) == []
    os.close(writer)
    os.waitpid(child, 0)
    os.close(reader)


def read_all(shards: Window) -> tuple[int, int]:
    right = sum(
        Path(local).read_bytes() == Path(path).read_bytes()
        for path, local in zip(shards.paths, shards, strict=True)
    )
    return right, shards.stats.local


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_process_pool_share_one_copier_of_the_window(
    job: Path, data_set: list[Path], method: str
) -> None:
    shards = window(data_set, room=8 * SIZE)
    context = multiprocessing.get_context(method)
    with context.Pool(3) as pool:
        assert pool.map(read_all, [shards] * 3) == [(20, 20)] * 3
    the_copier(job)


def test_copier_keeps_no_output_of_its_loader_open(job: Path, data_set: list[Path]) -> None:
    script = f"""
import os, sys
from forestage_window import window
next(iter(window({list(map(str, data_set))}, {8 * SIZE})))
os._exit(3)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src/window")},
        capture_output=True,
        timeout=forestage_window.LINGER_S / 2,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, b"", b"")
    the_copier(job)


def test_window_on_a_full_disk_yields_the_given_paths(
    private_mounts: None, job: Path, data_set: list[Path]
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320k", "small", job], check=True)
    try:
        shards = window(data_set, room=40 * SIZE)
        paths = list(shards)
        assert 1 <= shards.stats.local < 20
        assert str(data_set[-1]) in paths
        assert "No space left" in shards.stats.trouble
        shards.close()
    finally:
        subprocess.run(["umount", "--lazy", job], check=True)


def test_window_directory_that_cannot_be_written_yields_the_given_paths(
    tmp_path: Path, data_set: list[Path]
) -> None:
    (tmp_path / "file").touch()
    shards = window(data_set, room=8 * SIZE, directory=tmp_path / "file")
    assert list(shards) == list(map(str, data_set))
    assert "Not a directory" in shards.stats.trouble


@pytest.mark.parametrize("kind", ["open to others", "link", "another user's"])
def test_window_directory_that_is_not_the_users_alone_is_not_used(
    job: Path, data_set: list[Path], tmp_path: Path, kind: str
) -> None:
    place = job / "forestage-window-job-7"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o777 if kind == "open to others" else 0o700)
        if kind == "another user's":
            if os.geteuid():
                pytest.skip("needs root")
            os.chown(place, 65534, 65534)
    shards = window(data_set, room=8 * SIZE)
    assert list(shards) == list(map(str, data_set))
    assert "not a directory of this user alone" in shards.stats.trouble


def test_window_in_a_very_long_directory_path_yields_local_copies(
    tmp_path: Path, data_set: list[Path], job: Path
) -> None:
    deep = job / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with window(data_set, room=8 * SIZE, directory=deep) as shards:
        assert deep in Path(next(iter(shards))).parents


OLD = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3")) + [
    Path(found) for name in ("python3.8", "python3.9") if (found := shutil.which(name))
]


@pytest.mark.ci
@pytest.mark.parametrize("python", OLD, ids=lambda path: path.parent.parent.name)
def test_window_runs_with_other_installed_python_versions(
    job: Path, data_set: list[Path], python: Path
) -> None:
    told = [str(python), "-c", "import sys; print(sys.version_info >= (3, 8))"]
    asked = subprocess.run(told, capture_output=True, text=True, check=False)
    if asked.stdout.strip() != "True":
        pytest.skip("older than 3.8, or does not run")
    said = json.dumps([list(map(str, data_set)), 8 * SIZE, {}])
    ran = subprocess.run(
        [python, "-c", LOADER, said],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src/window")},
        input="\n" * 20,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout.splitlines()[-1])["local"] == 20
