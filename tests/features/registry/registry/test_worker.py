"""Root's side of a worker, and workers that are not what they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from imports import processes, until

from forestage.features.registry import worker
from forestage.features.registry.worker import MOST, RegistryWorker
from forestage.features.registry.worker_messages import ImportProgress, ImportRefused
from forestage.system import run
from forestage.system.as_user import User

CAROL = User("", 61003, 61003)
WORD = '{"type":"progress","text":"1 GiB"}'


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the workers here has anything to clean up."""
    monkeypatch.setattr(worker, "GRACE", 1.0)


def saying(script: str) -> RegistryWorker:
    """Another program in a worker's place."""
    return RegistryWorker(run.start_piped_program(None, ("sh", "-c", script), ()))


def test_worker_message_is_received_before_the_worker_exits() -> None:
    with saying(f"echo '{WORD}'; echo '{WORD}'; read end") as at_work:
        assert until(at_work, ImportProgress)[0] == ImportProgress("1 GiB")
        assert not at_work.ended


@pytest.mark.parametrize(
    "script",
    [
        "echo nonsense; read end",
        "head -c 5000 /dev/zero; exec sleep inf",
        "exec cat /dev/zero",
        "exec yes",
        """exec yes '{"type":"root"}'""",
        "exit 0",
        "kill -9 $$",
        "printf '{\"type\":'",
    ],
)
def test_worker_that_writes_garbage_floods_or_dies_is_refused_and_killed(script: str) -> None:
    with saying(script) as at_work:
        word = until(at_work)[-1]
    assert isinstance(word, ImportRefused)
    assert word.reason == "registry-odd"
    assert at_work.ended
    assert not _runs(at_work.pid)


def test_worker_that_sends_too_many_messages_is_refused() -> None:
    with saying(f"exec yes '{WORD}'") as at_work:
        said = until(at_work)
    assert isinstance(said[-1], ImportRefused)
    assert len(said) * (len(WORD) + 1) <= MOST + 2 * 65536


def test_unknown_reason_from_a_worker_becomes_registry_odd() -> None:
    with saying("""echo '{"type":"refused","reason":"my-own","detail":"x"}'""") as at_work:
        assert until(at_work) == [ImportRefused("registry-odd", "x")]


def test_worker_messages_after_a_refusal_are_ignored() -> None:
    last = '{"type":"refused","reason":"import-failed","detail":"x"}'
    with saying(f"echo '{last}'; echo '{WORD}'; echo nonsense") as at_work:
        assert until(at_work) == [ImportRefused("import-failed", "x")]
        assert at_work.read_messages() == []


def test_killing_a_worker_ends_all_processes_of_its_session() -> None:
    groups = "set -m; sleep inf & set +m; trap '' HUP TERM; sleep inf &"
    at_work = saying(f"{groups} echo '{WORD}'; read end; sleep inf")
    until(at_work, ImportProgress)
    assert len(run.list_session_processes(at_work.pid)) == 3
    at_work.kill()
    assert run.list_session_processes(at_work.pid) == []


COMETS = """
import os, signal
print('{"type":"progress","text":"x"}', flush=True)
if os.fork() == 0:
    os.setsid()
    while True:
        if os.fork():
            os._exit(0)
signal.pause()
"""


@pytest.mark.usefixtures("machine")
def test_killing_a_worker_ends_its_constantly_forking_processes() -> None:
    """None of them lives long enough to be killed by its number."""
    at_work = RegistryWorker(run.start_piped_program(CAROL, (sys.executable, "-c", COMETS), ()))
    until(at_work, ImportProgress)
    at_work.kill()
    assert not _runs(at_work.pid)
    assert processes(CAROL) == []


@pytest.mark.usefixtures("machine")
def test_worker_runs_with_all_ids_of_the_user_and_no_capabilities() -> None:
    program = run.start_piped_program(
        CAROL, ("sh", "-c", "cat /proc/self/status; id -G; read end"), ()
    )
    os.set_blocking(program.out, True)
    text = b""
    while b"\n61003\n" not in text:
        text += os.read(program.out, 65536)
    status = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
    assert status["Uid"].split() == ["61003"] * 4
    assert status["Gid"].split() == ["61003"] * 4
    assert status["NoNewPrivs"].strip() == "0"  # enroot imports by file capabilities
    assert int(status["CapEff"], 16) == int(status["CapInh"], 16) == 0
    RegistryWorker(program).kill()


@pytest.mark.usefixtures("machine")
def test_worker_does_not_inherit_an_inheritable_capability() -> None:
    script = """
import os
from forestage.features.registry.worker import RegistryWorker
from forestage.system import run
from forestage.system.as_user import User
argv = ("grep", "CapInh", "/proc/self/status")
print(run.run_program(argv).out.split()[-1])
program = run.start_piped_program(User("", 61003, 61003), argv, ())
os.set_blocking(program.out, True)
print(os.read(program.out, 65536).split()[-1].decode())
RegistryWorker(program).kill()
"""
    argv = ("setpriv", "--inh-caps=+chown", "--", sys.executable, "-c", script)
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert [int(one, 16) for one in ran.stdout.split()] == [1, 0]


@pytest.mark.usefixtures("machine")
def test_process_with_a_root_real_uid_and_a_user_effective_uid_starts_no_program() -> None:
    script = """
import os
from forestage.errors import Failed
from forestage.system import run
os.seteuid(61003)
try:
    run.start_in_current_session(("true",), {})
except Failed as error:
    print(error.reason)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "helper\n"


def _runs(pid: int) -> bool:
    return run._find_session(pid) != -1
