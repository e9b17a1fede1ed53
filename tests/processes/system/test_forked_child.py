"""Processes that outlive a job: they leave its cgroups, and those of slurmd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forestage.system import forked_child


def test_leave_job_cgroups_moves_the_process_out_of_the_jobs_cgroup(cgroup: Path) -> None:
    gone, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            (cgroup / "cgroup.procs").write_text("0")
            inside = (cgroup / "cgroup.procs").read_text().split() == [str(os.getpid())]
            forked_child.leave_job_cgroups()
            empty = (cgroup / "cgroup.procs").read_text() == ""
            os.write(said, b"yes" if inside and empty else b"no")
        finally:
            os._exit(0)
    os.close(said)  # else a child that says nothing would be waited for
    os.waitpid(pid, 0)
    assert os.read(gone, 10) == b"yes"
    os.close(gone)


def test_reap_ended_children_reaps_only_children_that_have_ended() -> None:
    script = """
import os, subprocess
from forestage.system import forked_child
ended = subprocess.Popen(["true"])
os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
lives = subprocess.Popen(["sleep", "4243"])
forked_child.reap_ended_children()
print(os.path.exists(f"/proc/{ended.pid}"), os.path.exists(f"/proc/{lives.pid}"))
lives.kill()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.stdout == "False True\n", ran.stderr
