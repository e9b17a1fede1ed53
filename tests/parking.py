"""Who holds the inode of a file or directory, so that a mount over it waits: faults/park.c."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path

FAULTS = Path(__file__).parent / "faults"


def with_fuse(name: str, folder: Path) -> Path:
    """Builds a program of tests/faults that is a FUSE: one that runs on other distributions too."""
    argv = ["pkg-config", "--cflags", "--libs", "fuse3"]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    flags = found.replace("-lfuse3", "-l:libfuse3.a").split()
    source, program = FAULTS / f"{name}.c", folder / name
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", "-O1", *warnings, "-o", program, source, *flags], check=True)
    return program


class Park:
    """Runs the program; each call holds one inode, until `let_go`."""

    def __init__(self, program: Path, stack: contextlib.ExitStack) -> None:
        self.program = program
        self._held: list[subprocess.Popen[str]] = []
        self._stack = stack
        stack.callback(self.let_go)

    def __call__(self, path: Path, how: str, ms: int | None = None) -> None:
        """`how`: read, write or list. With `ms` held for so long, again and again."""
        point = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="forestage-park-"))
        loop = [] if ms is None else [str(ms)]
        process = subprocess.Popen(
            [self.program, path, how, point, *loop],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._held.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "parked\n"

    def let_go(self) -> None:
        """Returns once nobody holds any of them."""
        for process in self._held:
            out, _ = process.communicate()
            assert (process.returncode, out) == (0, "over\n")
        self._held.clear()
