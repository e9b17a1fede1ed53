"""Other programs: a small environment, a time limit, and an explained end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from forestage.errors import Failed
from forestage.system import as_user, run
from node import until


def test_program_is_run_with_a_minimal_environment_and_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_SOMEBODY", "1")
    ran = run.run_program(["sh", "-c", "env | sort; pwd; readlink /proc/self/fd/0"])
    assert ran.out.splitlines() == ["LC_ALL=C", f"PATH={run.PATH}", "PWD=/", "/", "/dev/null"]
    assert (ran.code, ran.err) == (0, "")


def test_program_inherits_only_the_named_descriptors(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    fds = [os.open(tmp_path / "a", os.O_RDONLY) for _ in range(2)]
    script = f"cat /proc/self/fd/{fds[0]}; test ! -e /proc/self/fd/{fds[1]}"
    ran = run.run_program(["sh", "-c", script], pass_fds=fds[:1])
    for fd in fds:
        os.close(fd)
    assert (ran.code, ran.out) == (0, "content")


@pytest.mark.parametrize(
    ("script", "explained"),
    [
        ("exit 0", "sh: exit 0"),
        ("echo no >&2; echo 'disk full' >&2; exit 23", "sh: exit 23 disk full"),
        ("kill -KILL $$", "sh: signal 9"),
        ("printf '\\377' >&2; exit 1", "sh: exit 1 \ufffd"),
    ],
)
def test_end_of_a_program_is_explained_in_one_line(script: str, explained: str) -> None:
    assert run.run_program(["sh", "-c", script]).format_ending() == explained


def test_argument_is_never_read_by_a_shell() -> None:
    assert run.run_program(["printf", "%s", "$(id); `id` *"]).out == "$(id); `id` *"


def test_missing_program_raises_failed_with_a_hint() -> None:
    with pytest.raises(Failed) as caught:
        run.run_program(["no-such-program-anywhere"])
    assert (caught.value.reason, bool(caught.value.hint)) == ("program", True)


class Once(threading.Event):
    """Is set as soon as a file has a line."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def is_set(self) -> bool:
        return self.file.exists() and self.file.read_text().endswith("\n")


def test_program_that_is_stopped_is_killed_with_its_children(tmp_path: Path) -> None:
    script = (
        f"sleep 600 >/dev/null 2>&1 & echo $! > {tmp_path}/pid; echo $$ > {tmp_path}/group; wait"
    )
    ran = run.run_program(["sh", "-c", script], stop=Once(tmp_path / "group"))
    assert ran.format_ending() == "sh: signal 9"
    child = int((tmp_path / "pid").read_text())
    until(lambda: not _alive(child), "the end of a child that was killed")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "group").read_text()), 0)


def test_program_is_run_in_a_session_and_process_group_of_its_own() -> None:
    ran = run.run_program(["sh", "-c", "cut -d' ' -f5,6 /proc/$$/stat"])
    group, session = map(int, ran.out.split())
    assert group == session
    assert session != os.getsid(0)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_program_past_its_timeout_is_killed_with_its_children() -> None:
    ran = run.run_program(["sh", "-c", "sleep 600 & sleep 600"], timeout=0.1)
    assert ran.code == -9
    assert run.run_program(["sh", "-c", "echo done"], timeout=600.0).out == "done\n"


def test_program_gets_the_given_variables_beside_the_fixed_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = run.run_program(["sh", "-c", "echo $SLURM_CONF $PATH"], variables={"SLURM_CONF": "/a b"})
    assert ran.out == f"/a b {run.PATH}\n"
    assert "SLURM_CONF" not in run.ENVIRONMENT


# As the user whom this process is


def test_program_run_as_current_user_gets_the_given_variables_but_the_fixed_path() -> None:
    variables = {"A": "b c", "PATH": "/evil", "LC_ALL": "x"}
    ran = run.run_as_current_user(["env"], variables, 600.0, 1 << 20)
    assert sorted(ran.out.decode().splitlines()) == ["A=b c", "LC_ALL=x", f"PATH={run.PATH}"]
    assert (ran.code, ran.err, ran.cut) == (0, b"", "")


def test_program_run_as_current_user_reads_the_given_input() -> None:
    given = os.urandom(1 << 20)
    assert run.run_as_current_user(["cat"], {}, 600.0, 2 << 20, given).out == given
    assert run.run_as_current_user(["cat"], {}, 600.0, 1 << 20).out == b""


def test_program_run_as_current_user_is_killed_if_its_output_is_too_long() -> None:
    for where in ("", ">&2"):
        ran = run.run_as_current_user(["sh", "-c", f"yes {where}"], {}, 600.0, 1 << 20)
        assert (ran.code, ran.cut) == (-9, "size")
        assert len(ran.out + ran.err) < 2 << 20
    assert run.run_as_current_user(["head", "-c", "1000", "/dev/zero"], {}, 600.0, 1000).cut == ""


@pytest.mark.parametrize("script", ["echo a; sleep 600 & wait", "exec >&- 2>&-; sleep 600"])
def test_program_run_as_current_user_is_killed_at_its_timeout(script: str) -> None:
    ran = run.run_as_current_user(["sh", "-c", script], {}, 0.3, 1 << 20)
    assert (ran.code, ran.cut) == (-9, "time")


def test_program_run_as_current_user_is_refused_if_real_and_effective_uid_differ(
    as_root: None,
) -> None:
    """With root's real id, bash would make itself root again."""

    def work() -> as_user.ChildResult[str]:
        as_user.set_effective_user(as_user.User("", 65534, 65534))
        with pytest.raises(Failed) as caught:
            run.run_as_current_user(["id"], {}, 600.0, 1 << 20)
        return caught.value.reason, []

    assert as_user.run_in_child(work, str, 600.0)[0] == "helper"


def test_missing_program_run_as_current_user_raises_failed() -> None:
    with pytest.raises(Failed) as caught:
        run.run_as_current_user(["no-such-program-anywhere"], {}, 600.0, 1 << 20)
    assert caught.value.reason == "program"
