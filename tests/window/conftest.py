"""What the tests of the window share: a data set, and a window's processes and bytes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "src/window"), str(Path(__file__).parent)]

import forestage_window  # noqa: E402
from copiers import processes  # noqa: E402

SIZE = 1 << 16  # bytes of a file


@pytest.fixture
def data_set(tmp_path: Path) -> list[Path]:
    """Twenty files, all of them different."""
    folder = tmp_path / "lustre"
    folder.mkdir()
    paths = [folder / f"shard-{number:03}.tar" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(number.to_bytes(4, "big") * (SIZE // 4))
    return paths


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a job; what still runs there is killed at the end."""
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.setenv("FORESTAGE_DIR", str(folder))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    yield folder
    for window in list(forestage_window._windows):
        window.close()
    for pid in processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
