"""The console script: how it ends where it is interrupted before a command is at work."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from forestage.commands.command_context import ExitStatus

# Sends itself SIGINT when a module is about to be imported, once.
SCRIPT = """
import os, signal, sys
from forestage.commands.console_script import main

class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, {handler})
sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["config"]
main()
"""


def run(module: str, handler: str = "signal.default_int_handler") -> tuple[int, str]:
    """How `forestage config` ends that is interrupted at this import, and what it says of it."""
    script = SCRIPT.format(module=module, handler=handler)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "module", ["forestage.commands.main", "click", "forestage.commands.command_context"]
)
def test_command_interrupted_while_it_is_imported_ends_by_sigint_and_prints_nothing(
    module: str,
) -> None:
    assert run(module) == (-signal.SIGINT, "")


def test_command_interrupted_while_it_runs_exits_with_interrupted_status() -> None:
    assert run("forestage.commands.show") == (ExitStatus.INTERRUPTED, "")


def test_command_that_ignores_sigint_is_not_ended_while_it_is_imported() -> None:
    assert run("click", "signal.SIG_IGN") == run("no.module")
