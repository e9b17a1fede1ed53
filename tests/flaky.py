"""Runs a test command, and what failed in it once more, alone: `tests/flaky.py COMMAND…`.

As a program it is what CI runs. It ends with 0 where nothing failed, or where no more than MOST
tests failed and each of them passed when it ran again; the names of those stand under "flaky".

As a pytest plugin it is the other half: it notes the tests that fail in the file that FAILED names,
and runs only those that are in the file that ONLY names. Names go through files, one JSON string on
each line: the ids of parametrized tests hold any characters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FAILED = "FORESTAGE_TEST_FAILED"
ONLY = "FORESTAGE_TEST_ONLY"
MOST = 3  # more than these are no accident
TESTS_FAILED = 1  # pytest's exit code; any other than that and 0 is not about single tests


# As a plugin


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and FAILED in os.environ:
        # One write of a line: several processes append to the same file.
        with open(os.environ[FAILED], "ab", buffering=0) as file:
            file.write(json.dumps(report.nodeid).encode() + b"\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests that ONLY names. Raises UsageError if one of them is not there."""
    if ONLY not in os.environ:
        return
    import pytest

    wanted = names(Path(os.environ[ONLY]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]
    if missing := set(wanted) - {item.nodeid for item in items}:
        raise pytest.UsageError(f"no such tests: {sorted(missing)}")


def names(file: Path) -> list[str]:
    """Each once: a test may fail in its setup, its call and its teardown."""
    lines = file.read_text().splitlines() if file.exists() else []
    return list(dict.fromkeys(map(json.loads, lines)))


# As a program


def run(command: Sequence[str]) -> int:
    """Returns the exit code of all of it. The command itself must heed ONLY."""
    with tempfile.TemporaryDirectory(prefix="forestage-flaky-") as folder:
        first, again = Path(folder, "first"), Path(folder, "again")
        code = _run(command, {FAILED: str(first)})
        failed = names(first)
        if code != TESTS_FAILED or not failed:
            return code
        if len(failed) > MOST:
            print(f"\n{len(failed)} tests failed, more than {MOST}: none is run again", flush=True)
            return code
        print(f"\n=== flaky: {len(failed)} failed, now once more, alone ===", flush=True)
        code = _run(command, {ONLY: str(first), FAILED: str(again)})
        print("\n=== flaky ===")
        for name in failed:
            # Where pytest itself did not get through, nothing has passed.
            passed = code in (0, TESTS_FAILED) and name not in names(again)
            print(f"failed, then {'passed' if passed else 'FAILED AGAIN'}: {name}")
        sys.stdout.flush()
        return code


def _run(command: Sequence[str], also: Mapping[str, str]) -> int:
    """The exit code, as a shell has it."""
    with subprocess.Popen(command, env={**os.environ, **also}) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                pass  # the command got it as well, and ends in its own way


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
