"""What a job's window has left in memory, all its processes killed, goes with the job's Epilog."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from forestage.clock import Clock
from forestage.hooks import epilog
from node import ALICE, BOB, Node

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "src/window"))

from forestage_window import directory_of  # noqa: E402


@pytest.fixture
def shm(node: Node) -> Path:
    made = node.places.window(0).parent
    made.mkdir(parents=True)
    made.chmod(0o1777)
    return made


def left(shm: Path, job: int = 7, user: int = ALICE.uid) -> Path:
    """A killed copier's folder."""
    folder = Path(directory_of("ram", str(shm), "a", {"SLURM_JOB_ID": str(job)}))
    (folder / "copies/deep").mkdir(parents=True)
    (folder / "copies/0").write_bytes(bytes(1 << 20))
    (folder / "copies/link").symlink_to("/etc/passwd")
    for above, folders, files in os.walk(folder.parent):
        for name in ("", *folders, *files):
            os.chown(os.path.join(above, name), user, user, follow_symlinks=False)
    (folder / "copies/deep").chmod(0)
    return folder.parent


def test_what_a_window_left_in_memory_goes_with_its_job(node: Node, shm: Path) -> None:
    own, other = left(shm), left(shm, job=77)
    assert node.epilog(7).said == ("released", "")
    assert list(shm.iterdir()) == [other]
    assert not own.exists()
    assert Path("/etc/passwd").exists()


def test_another_users_directory_of_that_name_stays(node: Node, shm: Path) -> None:
    theirs = left(shm, user=BOB.uid)
    assert node.epilog(7).said == ("released", "")
    assert (next(theirs.iterdir()) / "copies/0").exists()


def test_link_of_that_name_is_deleted_and_not_followed(node: Node, shm: Path) -> None:
    target = node.places.root / "alices"
    target.mkdir()
    (target / "file").touch()
    for path in (target, target / "file"):
        os.chown(path, ALICE.uid, ALICE.gid)
    link = shm / "forestage-window-job-7"
    link.symlink_to(target)
    os.chown(link, ALICE.uid, ALICE.gid, follow_symlinks=False)
    node.epilog(7)
    assert not link.is_symlink()
    assert (target / "file").exists()


def test_epilog_gives_up_in_time(node: Node, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilog, "WINDOW_TIME", 0.0)
    monkeypatch.setattr(Clock, "monotonic", lambda self: 1.0)
    left(shm)
    assert node.epilog(7).said == ("released", "")
    assert (shm / "forestage-window-job-7").exists()
