"""What the prefetch host asks Slurm: as one command line, bounded in time and in bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.errors import ForestageError
from forestage.features.prefetch import slurm_queries
from forestage.slurm import slurm_client
from forestage.slurm.slurm_client import SlurmClient

Programs = Callable[..., Path]


def test_squeue_is_run_once_with_a_nonce_around_the_text_that_users_write(
    programs: Programs, tmp_path: Path
) -> None:
    asked = programs(squeue=f"env >{tmp_path}/env\nprintf 'x|y'")
    slurm = SlurmClient(os.environ["PATH"])
    assert slurm_queries.query_pending_jobs(slurm, "feed") == "x|y"
    (line,) = asked.read_text().splitlines()
    assert "feed" not in line, "everybody sees a command line"
    seen = (tmp_path / "env").read_text().splitlines()
    (variable,) = (line for line in seen if line.startswith("SQUEUE_FORMAT2="))
    fields = variable.partition("=")[2].split(",")
    assert fields[0] == "JobArrayID:0|feed<"
    assert fields[-2:] == ["admin_comment:0|feed>", "Comment:0"]
    assert "UserID:0|" in fields, "a name may be nobody's"
    assert "SLURM_TIME_FORMAT=%s" in seen


@pytest.mark.parametrize(
    "squeue", ["exit 1", "exec sleep 1000", "exec cat /dev/zero", "exec >&- 2>&-; sleep 1000"]
)
def test_squeue_that_fails_hangs_or_writes_endlessly_raises_an_error(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, squeue: str
) -> None:
    programs(squeue=squeue)
    monkeypatch.setattr(slurm_client, "TIMEOUT", 0.5)
    monkeypatch.setattr(slurm_queries, "MAX_BYTES", 1 << 16)
    with pytest.raises(ForestageError):
        slurm_queries.query_pending_jobs(SlurmClient(os.environ["PATH"]), "feed")
