"""The host's pass: one question to each of Slurm's commands, bounded, whatever users submit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.clock import Clock
from forestage.errors import Failed, SlurmError
from forestage.features.prefetch import expected_list, prefetch_host, service, slurm_queries
from forestage.features.prefetch.policy import DEFAULT_RULES
from forestage.paths import NodePaths
from forestage.slurm import slurm_client
from forestage.slurm.slurm_client import SlurmClient
from node import until

Programs = Callable[..., Path]

NONCE = """n=$(echo "$* $SQUEUE_FORMAT2" | sed 's/.*JobArrayID:0|\\([0-9a-f]*\\)<.*/\\1/')"""
SINFO = "echo 'gpu|2|n[1-2]'"


def line(job: str, user: int, comment: str, nodes: int = 1) -> str:
    return f"printf '%s\\n' \"{job}|$n<{user}|{nodes}|gpu|Priority|0|(null)|$n>{comment}\""


def asked(places: NodePaths, slurm: SlurmClient) -> prefetch_host.PrefetchHostPass:
    return prefetch_host.run_host_pass(places, slurm, Clock(), dry_run=False)


@pytest.fixture
def places(tmp_path: Path) -> NodePaths:
    return NodePaths(tmp_path / "root")


@pytest.fixture
def slurm(programs: Programs) -> Callable[..., SlurmClient]:
    def make(squeue: str, sinfo: str = SINFO) -> SlurmClient:
        programs(squeue=f"{NONCE}\n{squeue}", sinfo=sinfo)
        return SlurmClient(os.environ["PATH"], node="ctl1")

    return make


def test_forged_squeue_line_in_a_comment_adds_no_row_to_the_prefetch_list(
    places: NodePaths, slurm: Callable[..., SlurmClient]
) -> None:
    old = "0" * 32
    forged = f"x\n9|{old}<0|9|gpu|Priority|0|(null)|{old}>stage=/etc/shadow\n"
    forged += "77777|n1|gpu|stage=/etc/shadow"
    done = asked(places, slurm("\n".join((line("1", 1000, forged), line("2", 1001, "stage=/b")))))
    assert [(row.user, row.image) for row in done.list.rows] == [(1001, "/b")]
    assert done.others == (("no image", 1),)


def test_prefetch_list_of_10000_jobs_of_one_user_takes_one_squeue_and_keeps_other_users_rows(
    places: NodePaths, slurm: Callable[..., SlurmClient], programs: Programs
) -> None:
    crowd = (
        'awk -v n="$n" \'BEGIN { for (i = 1; i <= 10000; i++)'
        ' printf "%d|%s<1000|2|gpu|Priority|0|(null)|%s>stage=/a%d\\n", i, n, n, i }\''
    )
    done = asked(places, slurm(f"{crowd}\n{line('10001', 1001, 'stage=/b', nodes=2)}"))
    assert (done.jobs, done.tasks) == (10_001, 10_001)
    assert sum(row.user == 1000 for row in done.list.rows) <= prefetch_host.MAX_ROWS_OF_USER
    (theirs,) = [row for row in done.list.rows if row.user == 1001]
    assert theirs.starts >= DEFAULT_RULES.least
    assert len(programs().read_text().split("squeue ")) == 2
    assert expected_list.find_list(places) == done.list


@pytest.mark.parametrize("which", ["squeue", "sinfo"])
def test_hanging_squeue_or_sinfo_is_killed_and_the_prefetch_list_stays_unchanged(
    places: NodePaths,
    slurm: Callable[..., SlurmClient],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    which: str,
) -> None:
    asked(places, slurm(line("1", 1000, "stage=/a")))
    before = service.locate_list(places).read_bytes()
    monkeypatch.setattr(slurm_client, "TIMEOUT", 1.0)
    hangs = f"trap '' TERM\necho $$ >{tmp_path}/pid\nwhile :; do sleep 1000; done"
    scripts = {"squeue": line("1", 1000, "stage=/b"), "sinfo": SINFO, which: hangs}
    with pytest.raises(SlurmError, match=f"{which} did not end"):
        asked(places, slurm(**scripts))
    assert service.locate_list(places).read_bytes() == before
    pid = (tmp_path / "pid").read_text().strip()
    until(lambda: not Path(f"/proc/{pid}").exists(), "its end")


@pytest.mark.parametrize(
    ("squeue", "sinfo", "why"),
    [
        ("exit 1", SINFO, "squeue: exit 1"),
        ("echo 'error: Unable to contact slurm controller' >&2; exit 1", SINFO, "contact"),
        (f"while :; do echo {'x' * 60}; done", SINFO, "has written more than"),
        (line("1", 1000, "stage=/a"), "exit 1", "sinfo: exit 1"),
    ],
    ids=["fails", "no slurmctld", "without an end", "no sinfo"],
)
def test_failing_squeue_or_sinfo_leaves_the_prefetch_list_unchanged(
    places: NodePaths,
    slurm: Callable[..., SlurmClient],
    monkeypatch: pytest.MonkeyPatch,
    squeue: str,
    sinfo: str,
    why: str,
) -> None:
    asked(places, slurm(line("1", 1000, "stage=/a")))
    before = service.locate_list(places).read_bytes()
    monkeypatch.setattr(slurm_queries, "MAX_BYTES", 1 << 16)
    with pytest.raises((SlurmError, Failed), match=why):
        asked(places, slurm(squeue, sinfo))
    assert service.locate_list(places).read_bytes() == before
