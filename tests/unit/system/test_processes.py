"""What /proc says of processes whose users name them as they like."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.system import processes
from forestage.system.processes import ProcessStat

NAMES = [b"sleep", b"a) R 1 1 1 1", b"(((", b"x y\nz", b"\xff\xfe) Z"]


@pytest.mark.parametrize("name", NAMES)
def test_process_stat_is_parsed_right_whatever_the_process_name(
    tmp_path: Path, name: bytes
) -> None:
    fields = b"S 70 71 72 0 -1" + b" 0" * 13 + b" 4247" + b" 0" * 30
    (tmp_path / "stat").write_bytes(b"71 (%s) %s\n" % (name, fields))
    (tmp_path / "comm").write_bytes(name + b"\n")
    assert processes.read_stat(tmp_path) == ProcessStat("S", 70, 72, 4247)
    assert os.fsencode(processes.read_name(tmp_path)) == name


def test_zombie_process_counts_as_over() -> None:
    assert [ProcessStat(state, 1, 1, 1).is_over for state in "RSDZX"] == [False] * 3 + [True] * 2


def test_own_process_is_listed_with_its_state_parent_and_session() -> None:
    assert os.getpid() in [*processes.list_pids()]
    own = processes.read_stat(Path("/proc/self"))
    assert (own.state, own.parent, own.session) == ("R", os.getppid(), os.getsid(0))


def test_process_is_trusted_by_its_real_uid(tmp_path: Path) -> None:
    """As proc_pid_status(5) shows it: a newline in the name is escaped there."""
    own = os.getuid()
    for uids, is_trusted in (
        ("0\t0\t0\t0", True),
        ("0\t4242\t0\t4242", True),
        (f"{own}\t{own}\t{own}\t{own}", True),
        ("4242\t0\t0\t0", False),  # su(1) that waits for a password
        ("4242\t4242\t4242\t4242", False),
    ):
        name = r"x\nUid:"
        (tmp_path / "status").write_text(f"Name:\t{name}\t0\t0\nState:\tS\nUid:\t{uids}\nGid:\t0\n")
        assert processes.is_trusted(tmp_path) is is_trusted
    (tmp_path / "status").write_text("Name:\tx\n")
    assert not processes.is_trusted(tmp_path)
    assert not processes.is_trusted(tmp_path / "gone")


def test_reading_an_ended_process_raises() -> None:
    gone = Path("/proc/4194305")  # above the most that Linux gives
    for look in (processes.read_stat, processes.read_name):
        with pytest.raises(FileNotFoundError):
            look(gone)
