"""The child that acts as the user: it has the user's rights only, and may hang or die."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forestage.errors import Declined, Failed
from forestage.system import as_user
from forestage.system.as_user import User
from node import children_left, until

NOBODY = User("", 65534, 65533)
TIMEOUT = 600.0  # what hangs, pytest ends sooner


class Facts(msgspec.Struct):
    ids: list[int]
    groups: list[int]


def test_run_in_child_returns_a_value_and_open_descriptors(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")

    def work() -> as_user.ChildResult[str]:
        return "found", [os.open(tmp_path / "a", os.O_RDONLY)]

    value, (fd,) = as_user.run_in_child(work, str, TIMEOUT)
    assert value == "found"
    assert os.read(fd, 100) == b"content"
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_child_has_only_the_effective_ids_and_groups_of_the_user(as_root: None) -> None:
    """With the real and saved ids the user could kill or trace a child that reads for the cache."""

    def work() -> as_user.ChildResult[Facts]:
        as_user.set_effective_user(NOBODY)
        return Facts([*os.getresuid(), *os.getresgid()], os.getgroups()), []

    facts, _ = as_user.run_in_child(work, Facts, TIMEOUT)
    assert facts.ids == [0, 65534, 0, 0, 65533, 0]
    assert facts.groups == [65533]


def test_child_has_the_groups_that_the_name_service_lists_for_the_user(
    as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, len(name)])

    def work() -> as_user.ChildResult[list[int]]:
        as_user.set_effective_user(User("alice", 65534, 65533))
        return os.getgroups(), []

    assert sorted(as_user.run_in_child(work, list[int], TIMEOUT)[0]) == [5, 65533]


def test_child_of_a_step_has_slurms_groups_without_querying_the_name_service(
    as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node may not know them, and a name service may take seconds for each question."""
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: pytest.fail("it was asked"))
    alice = User("alice", 65534, 65533, groups=(65533, 31000), of_step=True)

    def work() -> as_user.ChildResult[list[int]]:
        as_user.set_effective_user(alice)
        return os.getgroups(), []

    assert sorted(as_user.run_in_child(work, list[int], TIMEOUT)[0]) == [31000, 65533]


def test_name_service_is_queried_once_for_a_hook_and_all_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each answer may take a second, and a stager has a dozen children."""
    asked = tmp_path / "asked"

    def lists(name: str, gid: int) -> list[int]:
        with asked.open("a") as file:
            file.write(f"{name}\n")
        return [31000, gid]

    monkeypatch.setattr(os, "getgrouplist", lists)
    known = as_user.query_name_service(User("root", 0, 7), TIMEOUT)
    assert known == User("root", 0, 7, groups=(7, 31000), home="/root")
    assert asked.read_text() == "root\n"
    assert (as_user.list_group_ids(known), as_user.find_home_directory(known)) == (
        [7, 31000],
        "/root",
    )
    assert asked.read_text() == "root\n"
    of_step = as_user.query_name_service(User("", 0, 7, groups=(7, 5), of_step=True), TIMEOUT)
    assert of_step == User("root", 0, 7, groups=(7, 5), home="/root", of_step=True)
    stranger = User("", 4_000_000_000, 7)
    assert as_user.query_name_service(stranger, TIMEOUT) == User("", 4_000_000_000, 7, (7,), "")


def test_slow_name_service_is_declined_with_reason_slow_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: signal.pause())
    with pytest.raises(Declined) as caught:
        as_user.query_name_service(User("root", 0, 0), 0.3)
    assert (type(caught.value), caught.value.reason) == (Declined, "slow-names")
    assert "name service took more than 0.3 s" in str(caught.value)


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (User("alice", 7, 8), "alice"),
        (User("", 7, 8), "uid 7"),
        (User("al", 7, 8, (8, 9)), "al with the groups that this node knows (8, 9)"),
        (User("al", 7, 8, (8, 9), of_step=True), "al with the groups of this step (8, 9)"),
        (
            User("al", 7, 0, tuple(range(22))),
            f"al with the groups that this node knows ({str([*range(20)])[1:-1]} and 2 more)",
        ),
    ],
)
def test_text_of_a_user_names_the_groups_that_were_tried(user: User, said: str) -> None:
    assert str(user) == said


def test_run_in_child_keeps_the_hooks_ids_and_groups(as_root: None) -> None:
    before = os.getresuid(), os.getresgid(), os.getgroups()

    def work() -> as_user.ChildResult[None]:
        as_user.set_effective_user(NOBODY)
        return None, []

    as_user.run_in_child(work, type(None), TIMEOUT)
    assert (os.getresuid(), os.getresgid(), os.getgroups()) == before


def test_os_error_in_the_child_is_raised_in_the_parent(tmp_path: Path) -> None:
    def work() -> as_user.ChildResult[None]:
        os.open(tmp_path / "nothing", os.O_RDONLY)
        return None, []

    with pytest.raises(FileNotFoundError) as caught:
        as_user.run_in_child(work, type(None), TIMEOUT)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(tmp_path / "nothing")


def test_answer_of_a_child_longer_than_one_read_is_received_whole(tmp_path: Path) -> None:
    """An ACL has up to 64 KiB, and more once it is written as JSON; one read gets less."""
    long = "x" * 200_000

    def work() -> as_user.ChildResult[str]:
        return long, [os.open(tmp_path, os.O_RDONLY)]

    value, (fd,) = as_user.run_in_child(work, str, TIMEOUT)
    os.close(fd)
    assert value == long


class Reached(msgspec.Struct):
    path: str
    ids: list[int]


@pytest.mark.parametrize("squashed", [False, True])
def test_path_is_opened_as_root_or_else_as_the_user(
    as_root: None, tmp_path: Path, squashed: bool
) -> None:
    """On a shared file system root may be nobody; what a user can see, he can be served."""
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    (tmp_path / "a").touch()
    opens = os.open

    def server(path: str, flags: int, *mode: int) -> int:
        if squashed and path.startswith(str(tmp_path)) and os.geteuid() == 0:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opens(path, flags, *mode)

    def work() -> as_user.ChildResult[Reached]:
        os.open = server
        fd = as_user.open_path_as_root_or_user(str(tmp_path / "a"), NOBODY)
        return Reached(os.readlink(f"/proc/self/fd/{fd}"), [os.geteuid(), os.getegid()]), []

    reached, _ = as_user.run_in_child(work, Reached, TIMEOUT)
    assert (reached.path, reached.ids) == (str(tmp_path / "a"), [0, 0])


def _exits() -> Any:
    sys.exit(3)


def _dies() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _raises() -> Any:
    raise RuntimeError


def _recurses() -> Any:
    return _recurses()


@pytest.mark.parametrize("work", [_exits, _raises, _recurses])
def test_child_that_exits_without_an_answer_raises_failed(work: Any) -> None:
    with pytest.raises(Failed) as caught:
        as_user.run_in_child(work, type(None), TIMEOUT)
    assert caught.value.reason == "helper"


def test_child_that_is_killed_is_retried_once(tmp_path: Path) -> None:
    """An epilog that ends all processes of a user meets a child with their ids as well."""
    here = os.open(tmp_path, os.O_RDONLY)

    def work() -> as_user.ChildResult[int]:
        with contextlib.suppress(FileExistsError):
            os.mkdir("killed", dir_fd=here)
            _dies()
        return len(os.listdir(here)), []

    assert as_user.run_in_child(work, int, TIMEOUT, keep=(here,))[0] == 1
    (tmp_path / "killed").rmdir()
    kept = as_user.run_each_in_child(
        [lambda: _killed_at_first(tmp_path), lambda: 2], int, TIMEOUT, TIMEOUT, 2
    )
    assert kept == [1, 2]
    os.close(here)


def _killed_at_first(place: Path) -> int:
    with contextlib.suppress(FileExistsError):
        (place / "killed").mkdir()
        _dies()
    return 1


@pytest.mark.parametrize("tries", [1, 2])
def test_child_that_is_killed_at_each_try_raises_child_killed_and_not_failed(
    tmp_path: Path, tries: int
) -> None:
    here = os.open(tmp_path, os.O_RDONLY)

    def work() -> Any:
        os.mkdir(str(os.getpid()), dir_fd=here)
        return _dies()

    with pytest.raises(as_user.ChildKilled) as caught:
        as_user.run_in_child(work, type(None), TIMEOUT, keep=(here,), tries=tries)
    assert not isinstance(caught.value, Failed)
    assert (caught.value.reason, "killed by signal 9" in str(caught.value)) == ("killed", True)
    assert len(os.listdir(tmp_path)) == tries
    assert as_user.run_each_in_child([_dies], int, TIMEOUT, TIMEOUT, 1) == [None]
    os.close(here)


def test_child_never_returns_into_the_hooks_code(tmp_path: Path) -> None:
    """If it did, two processes would go on with the hook."""
    here = os.getpid()
    try:
        as_user.run_in_child(_raises, type(None), TIMEOUT)
    except BaseException:
        (tmp_path / str(os.getpid())).touch()
        if os.getpid() != here:
            os._exit(1)
    assert os.listdir(tmp_path) == [str(here)]


def test_hanging_child_raises_child_timeout_and_is_killed() -> None:
    born: list[int] = []
    fork = os.fork

    def noting() -> int:
        child = fork()
        born.append(child)
        return child

    def work() -> as_user.ChildResult[None]:
        signal.pause()
        return None, []

    os.fork = noting
    try:
        with pytest.raises(as_user.ChildTimeout):
            as_user.run_in_child(work, type(None), 0.05)
    finally:
        os.fork = fork
    until(lambda: _is_over(born[0]), "the end of a child that was killed")


def _is_over(child: int) -> bool:
    """Whoever started it gives up waiting soon, and leaves it to be collected by us."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        return True


def test_child_has_no_open_output_or_locks_of_its_hook(tmp_path: Path) -> None:
    """slurmd waits for stdout; a flock is held as long as any process has the file open."""
    fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    kept = os.open(tmp_path / "kept", os.O_RDWR | os.O_CREAT)

    def work() -> as_user.ChildResult[list[str]]:
        open_files = []
        for name in os.listdir("/proc/self/fd"):
            try:
                open_files.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:  # the one that listed them
                continue
        return open_files, []

    names, _ = as_user.run_in_child(work, list[str], TIMEOUT, keep=(kept,))
    os.close(fd)
    os.close(kept)
    assert str(tmp_path / "kept") in names
    assert {name for name in names if not name.startswith("socket:")} == {
        "/dev/null",
        str(tmp_path / "kept"),
    }
    assert len([name for name in names if name.startswith("socket:")]) == 1


def test_run_in_child_leaks_no_descriptor() -> None:
    gc.collect()  # what earlier tests left open must not be closed in between
    before = sorted(os.listdir("/proc/self/fd"))
    for work in (lambda: (None, []), _raises, lambda: time.sleep(30)):
        with contextlib.suppress(Failed, as_user.ChildTimeout):
            as_user.run_in_child(work, type(None), 0.05)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_idle_function_is_called_while_the_parent_waits_for_a_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(as_user, "_IDLE", 0.01)
    there, here = os.pipe()
    calls: list[int] = []

    def idle() -> None:
        calls.append(1)
        if len(calls) == 3:
            os.write(here, b"go")

    def work() -> as_user.ChildResult[str]:
        return os.read(there, 2).decode(), []

    value, line = as_user.run_in_child_with_socket(work, str, 240.0, keep=(there,), on_idle=idle)
    line.close()
    assert (value, len(calls) >= 3) == ("go", True)
    with pytest.raises(as_user.ChildTimeout):
        as_user.run_in_child_with_socket(work, str, 0.05, keep=(there,), on_idle=lambda: None)
    os.close(there)
    os.close(here)


def test_hanging_dead_or_failing_child_does_not_affect_the_answers_of_other_children(
    tmp_path: Path,
) -> None:
    """One that hangs, dies or fails is None, and keeps no other from its answer."""

    def hangs() -> int:
        while True:
            signal.pause()

    def dies() -> int:
        os._exit(1)

    def fails() -> int:
        return os.open(tmp_path / "nothing", os.O_RDONLY)

    works = [lambda: 1, hangs, dies, fails, lambda: 2]
    assert as_user.run_each_in_child(works, int, 3.0, TIMEOUT, 3) == [1, None, None, None, 2]
    until(lambda: not children_left(), "the child that hung to die")


def test_limited_number_of_children_run_at_once_and_none_starts_after_the_deadline(
    tmp_path: Path,
) -> None:
    def hangs(n: int) -> int:
        (tmp_path / str(n)).touch()
        while True:
            signal.pause()

    works = [functools.partial(hangs, n) for n in range(5)]
    done: list[tuple[int, int | None]] = []
    each = as_user.run_each_in_child(works, int, TIMEOUT, 3.0, 2, lambda *ended: done.append(ended))
    assert each == [None] * 5
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}
    assert sorted(done) == [(number, None) for number in range(5)]


def test_end_of_one_child_is_reported_while_another_still_runs(tmp_path: Path) -> None:
    def waits() -> int:
        while not (tmp_path / "go").exists():
            time.sleep(0.005)
        return 2

    def ended(number: int, value: int | None) -> None:
        (tmp_path / "go").touch()
        done.append((number, value))

    done: list[tuple[int, int | None]] = []
    assert as_user.run_each_in_child([waits, lambda: 1], int, TIMEOUT, TIMEOUT, 2, ended) == [2, 1]
    assert done == [(1, 1), (0, 2)]


def test_children_are_received_by_a_process_with_more_descriptors_than_select_supports(
    tmp_path: Path,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context((tmp_path / "file").open("w"))
        works = [functools.partial(abs, -number) for number in range(3)]
        assert as_user.run_each_in_child(works, int, TIMEOUT, TIMEOUT, 3) == [0, 1, 2]
        assert as_user.run_in_child(lambda: (7, []), int, TIMEOUT)[0] == 7


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_child_with_no_time_left_is_declined_as_deadline_and_not_run(timeout: float) -> None:
    """Nobody was asked, so the source is not said to hang."""
    with pytest.raises(Declined) as caught:
        as_user.run_in_child(lambda: pytest.fail("it was asked"), type(None), timeout)
    assert caught.value.reason == "deadline"


def test_child_that_answers_quickly_succeeds_though_almost_no_time_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(as_user, "_LEAST", TIMEOUT)

    def work() -> as_user.ChildResult[int]:
        time.sleep(0.05)
        return 7, []

    assert as_user.run_in_child(work, int, 0.001)[0] == 7
