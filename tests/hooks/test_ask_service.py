"""`forestage answer` as a real process, and users who ask it, nicely or not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forestage.admin import ask_answer, ask_client, ask_service
from forestage.admin.ask_service import PER_USER
from forestage.events import Event, Handled, append
from forestage.paths import Places
from node import ALICE, BOB, HANGS, until

SERVE = """
import sys
from pathlib import Path
from forestage.cli.main import main
from forestage.clock import Clock
from forestage.paths import Places
from forestage.cli.world import World
{patch}
main(["answer"], obj=World(Places(Path(sys.argv[1])), Clock()))
"""

# As the user that it is run as: connections at once, each with the same bytes; what came back.
ASK = """
import json, socket, sys
path, text, number, wait = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
lines = [socket.socket(socket.AF_UNIX) for _ in range(number)]
for line in lines:
    line.connect(path)
    try:
        line.sendall(text.encode("latin-1") * (1 if number > 1 or wait else int(sys.argv[5])))
    except BrokenPipeError:
        pass
if wait:
    print("asked", flush=True)
    sys.stdin.read()
found = []
for line in lines:
    answer = b""
    try:
        while piece := line.recv(65536):
            answer += piece
    except ConnectionResetError:
        pass
    found.append(answer.decode())
print(json.dumps(found))
"""


class Desk:
    def __init__(self, top: Path) -> None:
        self.places = Places(top)
        self.places.etc.mkdir(parents=True)
        (self.places.etc / "forestage.yaml").write_text("require_mount: false\n")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, patch: str = "") -> None:
        code = SERVE.format(patch=patch)
        self.process = subprocess.Popen([sys.executable, "-c", code, str(self.places.root)])
        until(self.listens, "the service")

    def listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as line:
            return line.connect_ex(str(self.places.ask)) == 0

    def asker(
        self, text: str, uid: int, number: int = 1, waits: bool = False, times: int = 1
    ) -> subprocess.Popen[str]:
        words = [str(self.places.ask), text, str(number), "yes" * waits, str(times)]
        return subprocess.Popen(
            ["/usr/bin/python3", "-I", "-c", ASK, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            user=uid,
            group=uid,
            extra_groups=[],
            cwd="/",
        )

    def ask(self, text: str, uid: int = ALICE.uid, times: int = 1) -> Any:
        """The answer, or "" where the connection was closed without one."""
        out, _ = self.asker(text, uid, times=times).communicate(timeout=HANGS)
        (answer,) = json.loads(out)
        return json.loads(answer) if answer else ""

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            assert self.process.wait(HANGS) == 0


@pytest.fixture
def desk() -> Iterator[Desk]:
    # Not below pytest's own folder, which other users cannot enter.
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        made = Desk(Path(top))
        hit = Handled("hit", request="/lustre/img.sqsh", redirect="mounted")
        append(
            made.places.events,
            [Event(time.time(), "prolog", 7, hit, user="alice", uid=ALICE.uid, node="n1")],
        )
        made.places.events.parent.chmod(0o700)
        yield made
        made.end()


def test_user_is_told_of_their_own_job_by_the_kernels_word(desk: Desk) -> None:
    desk.start()
    own, others = desk.ask("job 7\n"), desk.ask("job 7\n", BOB.uid)
    assert own["history"]["runs"][0]["user"] == "alice"
    assert others["problem"].startswith("nothing is recorded about your job 7")
    assert desk.ask("job 7\n", 0)["history"] == own["history"], "root"
    assert desk.ask("status\n", BOB.uid)["public"] == {
        "enabled": True, "cache": None, "hit_ratio": 1.0, "starts": 1
    }  # fmt: skip


def test_user_is_told_of_the_images_of_their_own_job(desk: Desk) -> None:
    desk.start()
    (image,) = desk.ask("images 7\n")["images"]["images"]
    assert (image["image"], image["result"]) == ("/lustre/img.sqsh", "hit")
    assert desk.ask("images 7\n", BOB.uid)["images"]["images"] == []


NO_QUESTIONS = [
    *("", "\n", "job\n", "job 0\n", "job -7\n", "job 7", "job 7 \n", "job 77777777777\n"),
    *("JOB 7\n", "job 7;id\n", "images\n", "\x80\xff\n", "status", "job \xd9\xa7\n"),
]


@pytest.mark.parametrize("text", NO_QUESTIONS)
def test_what_is_no_question_gets_one_line_that_says_so(desk: Desk, text: str) -> None:
    desk.start("from forestage.admin import ask_service; ask_service.QUESTION_SECONDS = 0.2")
    assert list(desk.ask(text)) == ["problem"]
    assert desk.ask("job 7\n")["history"]


def test_endless_question_is_cut_off(desk: Desk) -> None:
    desk.start("from forestage.admin import ask_service; ask_service.QUESTION_SECONDS = 600.0")
    desk.ask("x" * 65536, times=1000)
    assert desk.ask("job 7\n")["history"]


def test_user_with_many_silent_connections_keeps_nobody_else_from_an_answer(desk: Desk) -> None:
    desk.start("from forestage.admin import ask_service; ask_service.QUESTION_SECONDS = 600.0")
    hostile = desk.asker("job", BOB.uid, number=100, waits=True)
    assert hostile.stdout
    assert hostile.stdout.readline() == "asked\n"
    assert desk.ask("job 7\n")["history"]
    desk.end()
    out, _ = hostile.communicate(timeout=HANGS)
    refused = [answer for answer in json.loads(out) if "too many" in answer]
    assert len(refused) == 100 - PER_USER
    desk.start()
    assert desk.ask("job 7\n")["history"], "else it is ended before it has begun"


def test_service_without_descriptors_logs_a_line_a_second_and_answers_afterwards(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    desk.start(
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "from forestage.admin import ask_service; ask_service.QUESTION_SECONDS = 600.0"
    )
    assert desk.process
    # It finds more of them than it has descriptors for, before it has closed any.
    desk.process.send_signal(signal.SIGSTOP)
    hostile = desk.asker("job", BOB.uid, number=60, waits=True)
    assert hostile.stdout
    assert hostile.stdout.readline() == "asked\n"
    desk.process.send_signal(signal.SIGCONT)
    said = ""

    def refused() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "Too many open files" in said

    until(refused, "a line")
    hostile.kill()
    hostile.communicate()
    assert desk.ask("job 7\n")["history"]
    desk.end()
    said += capfd.readouterr().err
    assert all("answer refused=" in line for line in said.splitlines())


def test_user_with_too_many_questions_reads_so(desk: Desk) -> None:
    """It is refused before it has asked: sending fails, or the connection is reset."""
    desk.start("from forestage.admin import ask_service; ask_service.QUESTION_SECONDS = 600.0")
    silent = desk.asker("job", ALICE.uid, number=PER_USER, waits=True)
    assert silent.stdout
    assert silent.stdout.readline() == "asked\n"
    os.seteuid(ALICE.uid)
    try:
        for _ in range(50):
            assert "too many questions" in ask_client.ask(desk.places, "job 7\n").decode()
    finally:
        os.seteuid(0)
        silent.kill()
        silent.wait()


def test_who_does_not_take_the_answer_is_cut_off(desk: Desk) -> None:
    """The service ends by itself although a client sits there."""
    steps = Handled("hit", request="/lustre/img.sqsh", detail="x" * 60000)
    append(
        desk.places.events,
        [Event(2.0 + n, "step", 7, steps, uid=ALICE.uid, step=n) for n in range(4)],
    )
    desk.start("from forestage.admin import ask_service; ask_service.ANSWER_SECONDS = 0.2")
    with socket.socket(socket.AF_UNIX) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(str(desk.places.ask))
        line.sendall(b"job 7\n")
        poll = threading.Event()
        assert until(lambda: _is_hung_up(line) or poll.wait(0.05), "the end")


def _is_hung_up(line: socket.socket) -> bool:
    import select

    poll = select.poll()
    poll.register(line, select.POLLHUP)
    return bool(poll.poll(0))


def test_failure_is_told_without_a_path(desk: Desk) -> None:
    desk.start(
        "from forestage.admin import ask_answer\n"
        "def fails(*_): raise PermissionError(13, 'no', '/lustre/bob')\n"
        "ask_answer.about_job = fails"
    )
    assert desk.ask("job 7\n")["problem"].startswith("the node could not answer")


def test_configuration_is_read_anew_and_one_that_is_wrong_ends_nothing(desk: Desk) -> None:
    config = desk.places.etc / "forestage.yaml"
    desk.start("from forestage.admin import ask_service; ask_service.FRESH = 0.0")
    assert desk.ask("status\n")["public"]["enabled"]
    config.write_text("require_mount: false\nenabled: false\n")
    assert not desk.ask("status\n")["public"]["enabled"]
    config.write_text("no_such_key: 1\n")
    assert desk.ask("status\n")["problem"].startswith("the node could not answer")
    desk.end()
    desk.start()
    assert desk.ask("job 7\n")["history"], "which needs no configuration"


def test_service_that_systemd_started_ends_when_nobody_asks_and_is_started_again(
    desk: Desk,
) -> None:
    desk.places.run.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(desk.places.ask))
        desk.places.ask.chmod(0o666)
        listening.listen()
        code = SERVE.format(patch="from forestage.admin import ask_service; ask_service.IDLE = 0.5")
        passed = {"LISTEN_FDS": "1", "PATH": os.environ["PATH"]}

        def hand_over() -> None:
            os.dup2(listening.fileno(), ask_service.FIRST_FD)
            os.environ["LISTEN_PID"] = str(os.getpid())

        shell = f'LISTEN_PID=$$ exec "{sys.executable}" -c "$0" "$1"'
        for _ in range(2):  # the name has to outlive the first: nobody makes it again
            process = subprocess.Popen(
                ["/bin/sh", "-c", shell, code, str(desk.places.root)],
                env=passed,
                pass_fds=(3,),
                preexec_fn=hand_over,
            )
            assert desk.ask("job 7\n")["history"]
            assert process.wait(HANGS) == 0


def test_commands_of_a_user_show_what_the_service_says(desk: Desk) -> None:
    """`forestage explain` and `status` as alice, who may read neither log nor leases."""
    desk.places.leases.mkdir(parents=True, mode=0o700)
    desk.start()
    code = SERVE.format(patch="").replace('["answer"]', "sys.argv[2:]")
    readable = [*map(str, Path(ask_answer.__file__).parents[2].parents)]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, str(desk.places.root), *words],
            user=ALICE.uid,
            group=ALICE.gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            timeout=HANGS,
            check=False,
        )

    if not all(os.stat(folder).st_mode & 0o001 for folder in readable):
        pytest.skip("this user may not read the sources")
    explained, unknown, status = run("explain", "7.0"), run("explain", "8"), run("status")
    assert explained.stdout.startswith("Job 7 of alice on n1\n"), explained
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "nothing is recorded about your job 8" in unknown.stderr
    expected = "staging on cache not in use hits 100% of 1 start"
    assert status.stdout.split() == expected.split()
