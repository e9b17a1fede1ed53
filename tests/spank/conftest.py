"""The companion's callbacks in a step manager of ours, with the sanitizers watching."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# It lies beside this file, not in a package.
from companion import (  # noqa: E402
    EVENTS,
    FOLDER,
    GID,
    KEY,
    LEASES,
    MARK,
    OLD_KEY,
    OWN,
    SANITIZERS,
    SERVED,
    UID,
    WARNINGS,
    Keeper,
    Step,
)

from forestage.system import loop  # noqa: E402
from forestage.system.lock_ranges import TASK_TURNS  # noqa: E402

# Waits and places, as they are and as the tests have them. A helper that is killed ends; only a
# machine that stands still lets it take longer than the companion waits.
Others = dict[str, dict[str, tuple[object, object]]]
OTHERS: Others = {
    "helper.c": {
        "SIGNAL_CHECK_MS": (1000, 100),
        "EXIT_TIMEOUT_MS": (5000, 500),
        "KILL_TIMEOUT_MS": (2000, 60000),
    },
    "stage_options.c": {"CHECK_TIMEOUT_MS": (2000, 60000)},
    "step_record.c": {"PROLOG_TIMEOUT_US": (1000000, 60000000)},
    "read_through.c": {"KEEPER_TIMEOUT_S": (1, 2)},
    "task_namespace.c": {
        "MOUNT_TIMEOUT_MS": ("2000 ", "60000 "),
        "QUEUE_TIMEOUT_MS": (30000, 120000),
    },
    "plugin.h": {"MAX_DATA_LINES": ("40", " 6")},
    "constants.h": {
        "JOB_DIRECTORY": ('"/forestage/job"', f'"{OWN}"'),
        "RUN_DIRECTORY": ('"/run/forestage"', f'"{MARK.parent}"'),
        "EVENT_LOG": ('"/var/log/forestage/events.jsonl"', f'"{EVENTS}"'),
        "LEASE_DIRECTORY": ('RUN_DIRECTORY "/leases"', f'"{LEASES}"'),
    },
}


HASTY: Others = {
    **OTHERS,
    "task_namespace.c": {},
    "constants.h": {**OTHERS["constants.h"], "TASK_TURNS": (TASK_TURNS, 2)},
    "stage_options.c": {"CHECK_TIMEOUT_MS": (2000, 300)},
}
"""For tests in which a mount or a program hangs, and somebody waits for that limit."""


CROWDED: Others = {
    **OTHERS,
    "task_namespace.c": {
        "MOUNT_TIMEOUT_MS": ("2000 ", "60000 "),
        "QUEUE_TIMEOUT_MS": (30000, 5000),
    },
}
"""For tests in which a task waits for its turn to mount."""


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("spank"), OTHERS)


@pytest.fixture(scope="session")
def hasty_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("spank-hasty"), HASTY)


@pytest.fixture(scope="session")
def crowded_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("spank-crowded"), CROWDED)


@pytest.fixture
def crowded(step: Step, crowded_program: Path) -> Step:
    """A step whose tasks wait for their turn shorter than for a mount."""
    step.program = crowded_program
    return step


@pytest.fixture
def hasty(step: Step, hasty_program: Path) -> Step:
    """A step whose tasks do not wait long for a mount."""
    step.program = hasty_program
    return step


def built(folder: Path, others: Others) -> Path:
    if os.geteuid() != 0:
        pytest.skip("the callbacks run as root")
    own = [adapted(source, folder, others) for source in FOLDER.glob("*.c")]
    for header in FOLDER.glob("*.h"):
        adapted(header, folder, others)
    out, sources = folder / "fake", [*HERE.glob("*.c"), *own]
    command: list[str | Path] = [
        "gcc",
        "-std=gnu11",
        f"-I{folder}",
        *WARNINGS,
        *SANITIZERS,
        "-o",
        out,
        *sources,
    ]
    subprocess.run(command, check=True)
    return out


def adapted(source: Path, folder: Path, others: Others) -> Path:
    """A copy of the companion's source, with other waits."""
    text = source.read_text()
    for name, (usual, ours) in others.get(source.name, {}).items():
        line = f"#define {name} {usual}"
        assert line in text, f"{line} is not in {source}"
        text = text.replace(line, f"#define {name} {ours}")
    copy = folder / source.name
    copy.write_text(text)
    return copy


@pytest.fixture
def step(program: Path) -> Iterator[Step]:
    folder = Path(tempfile.mkdtemp(prefix="forestage-spank-"))
    folder.chmod(0o755)  # the job's user must get to the image
    step = Step(folder, program)
    for key, text in ((KEY, "the image\n"), (OLD_KEY, "an older image\n")):
        step.entry(key).parent.mkdir(parents=True)
        step.entry(key).parent.chmod(0o700)
        step.entry(key).write_text(text)
    (folder / "cache/evicted").mkdir()
    (folder / "cache").chmod(0o700)
    step.image.parent.mkdir()
    step.image.write_text("the image\n")
    step.answers(step.use())
    yield step
    for left in (folder, LEASES, MARK.parent, OWN):
        shutil.rmtree(left, ignore_errors=True)


@pytest.fixture
def disk(step: Step) -> Iterator[tuple[str, str]]:
    """A loop device with one file, and what it shows."""
    (step.folder / "tree").mkdir()
    (step.folder / "tree/file").write_text("from the disk\n")
    image = step.folder / "disk"
    with image.open("wb") as file:
        file.truncate(4 << 20)
    argv = ["/usr/sbin/mkfs.ext4", "-q", "-O", "^has_journal", "-d", step.folder / "tree", image]
    subprocess.run(argv, check=True)
    device = loop.attach_file(image, read_only=False)
    yield device, loop.format_file_id(image.stat())
    subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def point(step: Step) -> Path:
    """A directory of the user's."""
    point = step.folder / "home/point"
    point.mkdir(parents=True)
    for one in (point.parent, point):
        os.chown(one, UID, GID)
    return point


@pytest.fixture
def keeper(step: Step) -> Iterator[Keeper]:
    """Starts the image's keeper, as a helper would, and has the helper answer with it."""
    begun: list[subprocess.Popen[str]] = []
    place = step.place
    place.mkdir(mode=0o700, parents=True)
    (place / "bytes").write_text(SERVED)
    (place / "bytes").chmod(0o444)

    def start(manner: str) -> None:
        program, given = HERE / "keeper.py", [place / "sock", step.image, place / "bytes", manner]
        process = subprocess.Popen(
            [sys.executable, program, *given], stdout=subprocess.PIPE, text=True
        )
        begun.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        step.answers(step.through())

    yield start
    for process in begun:
        process.kill()
        process.communicate()
