"""The shell files that slurmd runs: whatever the interpreter does, they exit with 0."""

from __future__ import annotations

import re
import socket
import stat
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
INTERPRETER = "/usr/lib/forestage/bin/python3"
HOOKS = ["prolog", "epilog"]

FAKES = {
    "exits 0": "exit 0",
    "exits 1": "exit 1",
    "exits 2, as for a wrong argument": "exit 2",
    "exits 120, as when stdout cannot be flushed": "exit 120",
    "exits 126": "exit 126",
    "exits 255": "exit 255",
    "is killed by SEGV": "kill -SEGV $$",
    "is killed by TERM": "kill -TERM $$",
    "is killed by KILL": "kill -KILL $$",
    "prints rubbish": "echo 1; echo '\"; exit 1' >&2; head -c 100000 /dev/zero",
    "prints a traceback": "echo 'ModuleNotFoundError: yaml' >&2; exit 1",
    "is missing": None,
    "cannot be executed": b"\x7fELF",
}


def run(tmp_path: Path, hook: str, fake: str | bytes | None) -> subprocess.CompletedProcess[bytes]:
    """Runs a copy of the hook with another interpreter, in the bare environment slurmd gives."""
    interpreter = tmp_path / "python3"
    if fake is not None:
        script = fake if isinstance(fake, bytes) else f"#!/bin/sh\n{fake}\n".encode()
        interpreter.write_bytes(script)
        interpreter.chmod(0o755)
    copy = tmp_path / hook
    text = (REPOSITORY / hook / "forestage").read_text()
    assert text.count(INTERPRETER) == 1
    text = text.replace("/run/forestage", f"{tmp_path}/run")  # the node's own is none of a test's
    copy.write_text(text.replace(INTERPRETER, str(interpreter)))
    copy.chmod(0o755)
    return subprocess.run(
        [copy],
        env={"SLURM_JOB_ID": "7"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("fake", FAKES)
def test_hook_script_exits_0_however_python_ends(tmp_path: Path, hook: str, fake: str) -> None:
    assert run(tmp_path, hook, FAKES[fake]).returncode == 0


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("fake", "status"), [("is missing", 127), ("prints a traceback", 1)])
def test_hook_script_logs_one_line_if_python_fails(
    tmp_path: Path, dev_log: socket.socket, hook: str, fake: str, status: int
) -> None:
    run(tmp_path, hook, FAKES[fake])
    dev_log.setblocking(False)
    received = dev_log.recv(65536).decode()
    assert f" forestage: {hook} job=7 result=failed reason=python status={status} " in received
    assert received.startswith("<27>"), "daemon.err"
    with pytest.raises(BlockingIOError):
        dev_log.recv(1)


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_script_logs_nothing_if_python_exits_0(
    tmp_path: Path, dev_log: socket.socket, hook: str
) -> None:
    run(tmp_path, hook, FAKES["exits 0"])
    dev_log.setblocking(False)
    with pytest.raises(BlockingIOError):
        dev_log.recv(1)


@pytest.mark.parametrize("fake", FAKES)
def test_epilog_script_marks_a_leased_job_as_over_if_python_fails(
    tmp_path: Path, fake: str
) -> None:
    script = FAKES[fake]
    assert run(tmp_path, "epilog", script).returncode == 0
    leases = tmp_path / "run/leases"
    leases.mkdir(parents=True)
    for file in ("70.json", "7.said"):
        (leases / file).touch()
    run(tmp_path, "epilog", script)
    assert not (leases / "7.over").exists()
    (leases / "7.json").touch()
    assert run(tmp_path, "epilog", script).returncode == 0
    worked = fake in ("exits 0", "prints rubbish")
    assert (leases / "7.over").exists() != worked
    (leases / "7.over").unlink(missing_ok=True)
    (leases / "7.over").mkdir()  # whatever lies there
    assert run(tmp_path, "epilog", script).returncode == 0


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("hook", HOOKS)
def test_hook_script_does_not_block_on_an_unread_dev_log(tmp_path: Path, hook: str) -> None:
    ran = run(tmp_path, hook, None)
    assert (ran.returncode, ran.stdout) == (0, b"")


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_script_starts_python_isolated_with_the_hooks_name(tmp_path: Path, hook: str) -> None:
    out = run(tmp_path, hook, 'printf "%s\\n" "$@"').stdout.decode().splitlines()
    assert out[:2] == ["-I", "-c"]
    assert f'main("{hook}")' in out[2]


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_script_is_executable_short_and_uses_absolute_paths(hook: str) -> None:
    file = REPOSITORY / hook / "forestage"
    assert file.stat().st_mode & stat.S_IXUSR
    lines = file.read_text().splitlines()
    assert lines[0] == "#!/bin/sh"
    assert len(lines) <= 20
    # No PATH from slurmd: a program without its folder would not be found.
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    programs = re.findall(r"(?m)(?:^|\|\| )(?!exit )(\S+) ", text.replace("\\\n", ""))
    assert all(re.match(r"/|\[$", program) for program in programs), programs
