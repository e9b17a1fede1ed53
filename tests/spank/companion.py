"""A step of a user's, run by the step manager in little (fake.c)."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from forestage.slurm.step_protocol import PROTOCOL_GREETING

REPO = Path(__file__).parents[2]
FOLDER = REPO / "src/spank"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")

KEY, OLD_KEY = "0123456789abcdef" * 2, "f" * 32
JOB, UID, GID = 77, 4242, 4243  # the job and its user, as fake.c has them
HERE = Path(__file__).parent
OLDER_KERNEL = (sys.executable, str(HERE / "older_kernel.py"))
SERVED = "from afar\n"  # as long as the image
Keeper = Callable[[str], None]
LEASES = Path(f"/tmp/forestage-spank-leases-{os.getpid()}")
MARK = Path(f"/tmp/forestage-spank-run-{os.getpid()}/companion")
EVENTS = MARK.parent / "events.jsonl"
OWN = Path(f"/tmp/forestage-spank-own-{os.getpid()}")
"""In place of /forestage/job."""


@dataclass(frozen=True)
class Ran:
    """What the fake step manager reported; `out` is what the tasks' commands wrote."""

    report: tuple[str, ...]
    out: str
    mounts: tuple[str, ...]

    def lines(self, kind: str) -> list[str]:
        return [line.partition(" ")[2] for line in self.report if line.startswith(f"{kind} ")]

    def facts(self, name: str) -> set[str]:
        return {line for line in self.lines("fact") if line.startswith(f"{name} ")}

    @property
    def environ(self) -> dict[str, str]:
        """Of the step's tasks, as the companion has left it."""
        found = (one.removeprefix("environ ").partition("=") for one in self.facts("environ"))
        return {name: value for name, _, value in found}

    @property
    def said(self) -> list[str]:
        return self.lines("user")

    @property
    def logged(self) -> str:
        return "\n".join(self.lines("info"))


@dataclass
class Step:
    """A user's image, its copy in a cache, and a helper that answers with it."""

    folder: Path
    program: Path
    runs: int = 0
    environ: dict[str, str] = field(default_factory=dict)
    kernel: tuple[str, ...] = ()  # what starts the program as on another kernel

    @property
    def image(self) -> Path:
        return self.folder / "shared/img.sqsh"

    @property
    def helper(self) -> Path:
        return self.folder / "helper"

    @property
    def place(self) -> Path:
        """Of the image's keeper."""
        return self.folder / "through" / KEY

    def entry(self, key: str = KEY) -> Path:
        return self.folder / "cache/entries" / key / "image"

    def use(self, path: str | None = None, user_sees: int = 1, **differs: int) -> str:
        """The helper's answer for the image as it is now; `differs` replaces numbers."""
        st = self.image.stat()
        known = {"ino": st.st_ino, "size": st.st_size, "m": st.st_mtime_ns, "c": st.st_ctime_ns}
        numbers = {**known, **differs}.values()
        return "\t".join(
            ["use", str(self.entry()), path or str(self.image), *map(str, numbers), str(user_sees)]
        )

    def through(self, **differs: int) -> str:
        """The helper's answer while the image's keeper serves it."""
        return self.use(**differs).replace(f"use\t{self.entry()}", f"through\t{self.place}/sock")

    def answers(self, *lines: str, first: str = "", then: str = "") -> None:
        """Makes the helper run some sh, write the greeting and these lines, and then run some more.

        Once it has answered it may be ended: what a test is to find is noted before.
        """
        all_lines = (PROTOCOL_GREETING, *lines)
        text = "".join(f"printf '%s\\n' {shlex.quote(line)}\n" for line in all_lines)
        self.script(f"echo x >> {self.folder}/runs\n{first}\n{text}{then}")

    def script(self, text: str) -> None:
        self.helper.write_text(f"#!/bin/sh\n{text}\n")
        self.helper.chmod(0o755)

    def run(self, *arguments: str, image: str | None = None, helper: bool = True) -> Ran:
        self.runs += 1
        report = self.folder / f"report{self.runs}"
        given = [f"image={self.image if image is None else image}"] if image != "" else []
        given += [f"arg=helper={self.helper}"] if helper else []
        sanitizer = self.folder / "sanitizer"
        ran = subprocess.run(
            [*self.kernel, self.program, report, *given, *arguments],
            env={
                "PATH": os.environ["PATH"],
                "ASAN_OPTIONS": f"log_path={sanitizer}:exitcode=99",
                "UBSAN_OPTIONS": f"log_path={sanitizer}:exitcode=99:print_stacktrace=1",
                **self.environ,
            },
            capture_output=True,
            text=True,
            timeout=240,  # a hang, reported before pytest ends the test
            check=False,
        )
        found = "".join(path.read_text() for path in self.folder.glob("sanitizer*"))
        text = report.read_text() if report.exists() else ""
        assert not found, found
        assert ran.returncode == 0, f"{text}{ran.stderr}"
        tables = sorted(self.folder.glob(f"{report.name}.[0-9]*"))
        seen = Ran(tuple(text.splitlines()), ran.stdout, tuple(path.read_text() for path in tables))
        # What holds whatever the helper does.
        assert seen.facts("user_init") == {"user_init 0"}
        assert seen.facts("identity") == {f"identity {UID} {GID}"}
        assert seen.facts("task") == {"task 0"}
        # Fewer by the connection to a keeper, which the step manager made for the tasks.
        assert seen.facts("descriptors") <= {"descriptors 0 more", "descriptors -1 more"}
        assert seen.facts("root") == {"root 0 0 0 0 1 4711"}
        assert seen.facts("children") == {"children none"}
        assert seen.facts("mounts") == {"mounts same"}
        return seen

    def asked(self) -> int:
        """How often the helper was started."""
        runs = self.folder / "runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0


def shown_before(step: Step) -> str:
    """As root, in the namespace that the tasks inherit: the file that the keeper serves."""
    shower = [sys.executable, str(HERE / "shown.py")]
    return shlex.join([*shower, f"{step.place}/sock", str(step.image)])


@contextlib.contextmanager
def keeping(step: Step, manner: str) -> Iterator[Path]:
    """The socket of a keeper (keeper.py) that hands out a directory with one file."""
    (step.place / "bytes").mkdir(parents=True)
    (step.place / "bytes/file").write_text("from the keeper\n")
    socket = step.place / "sock"
    given = [str(socket), str(step.image), str(step.place / "bytes"), manner]
    argv = [sys.executable, str(HERE / "keeper.py"), *given]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield socket
        finally:
            process.kill()


def line(*fields: object) -> str:
    return "\t".join(map(str, fields))


def served(socket: Path, point: Path, inode: int | str | None = None) -> str:
    return line("served", socket, point, point.stat().st_ino if inode is None else inode)
