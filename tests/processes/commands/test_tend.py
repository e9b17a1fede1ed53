"""`forestage tend` as the timer runs it: what it says, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Site
from forestage.clock import Clock
from forestage.commands import tend
from forestage.commands.command_context import ExitStatus
from forestage.commands.main import CommandContext
from forestage.config import Config
from forestage.config.keys import PrefetchSection
from forestage.features.contexts import TendFacts
from forestage.slurm.slurm_client import read_own_node_name
from forestage.system import lock
from node import HANGS, until
from tending import COMMAND

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the cache is root's")
PENDING = '#!/bin/sh\n[ -e "$0.ran" ] || echo $$ >"$0.ran"\n'


class Tending:
    """A host below a folder, and the program that its timer starts."""

    def __init__(self, root: Path) -> None:
        self.site = Site(root)
        self.site.world = CommandContext(self.site.places, Clock())
        self.folder = root / "bin"
        self.folder.mkdir()
        self.program = self.folder / "forestage"
        self.program.write_text(COMMAND.format(python=sys.executable, root=str(root), before=""))
        self.program.chmod(0o755)

    def tool(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.write_text(text)
        file.chmod(0o755)
        return file

    def ran(self) -> list[str]:
        """The parts that began at any time, as their locks stay."""
        found = self.site.places.locks.glob("tend-*.lock")
        return sorted(one.stem.removeprefix("tend-") for one in found)

    def begin(self) -> subprocess.Popen[str]:
        environ = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        return subprocess.Popen(
            [self.program, "tend"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def begin_beside_silent_slurm(self) -> tuple[subprocess.Popen[str], int]:
        """Begins a run of the prefetch host; the process in which Slurm is asked, and is silent."""
        name = read_own_node_name({})
        self.site.file.write_text(f"cache: /none/forestage\nprefetch: {{host: {name}}}\n")
        ran, silent = self.folder / "sinfo.ran", self.folder / "silent"
        os.mkfifo(silent)
        self.tool("sinfo", f'#!/bin/sh\necho $$ >"{ran}"\nread line <{silent}\n')
        process = self.begin()
        until(lambda: ran.exists() and ran.read_text(), "Slurm to be asked")
        return process, int(ran.read_text())

    def run(self) -> tuple[int, str]:
        """How it ended, and all that it and its parts wrote, those that outlive it as well."""
        process = self.begin()
        said, _ = process.communicate()
        return process.returncode, said


@pytest.fixture
def tending(tmp_path: Path) -> Tending:
    return Tending(tmp_path)


def test_tend_runs_its_parts_and_prints_nothing_on_a_node_without_work(tending: Tending) -> None:
    """Here is no node exporter, and no cache yet."""
    assert tending.run() == (0, "")
    assert tending.site.places.hook_call_mark("sweep").exists()
    assert tending.ran() == ["metrics", "proofs", "room", "sweep"]


def test_tend_on_a_prefetch_host_without_a_cache_runs_only_prefetch(
    tending: Tending,
) -> None:
    name = read_own_node_name({})
    tending.site.file.write_text(f"cache: /none/forestage\nprefetch: {{host: {name}}}\n")
    asked = tending.tool("squeue", PENDING)
    tending.tool("sinfo", PENDING)
    code, said = tending.run()
    assert (code, Path(f"{asked}.ran").exists()) == (0, True)
    assert said.startswith("0 rows told")
    assert tending.ran() == ["prefetch"]


def test_tend_exits_0_and_prints_nothing_if_the_caches_disk_is_not_mounted(
    tending: Tending,
) -> None:
    tending.site.file.write_text("cache: /nvme/forestage\nrequire_mount: true\n")
    assert tending.run() == (0, "")


def test_tend_reports_a_wrong_configuration_once_and_exits_with_config_status(
    tending: Tending,
) -> None:
    tending.site.file.write_text("nonsense: 1\n")
    exported = tending.site.places.root / "var/lib/prometheus/node-exporter/forestage.prom"
    exported.parent.mkdir(parents=True)
    code, said = tending.run()
    assert code == ExitStatus.CONFIG
    assert said.count("nonsense") == 1
    assert "forestage_configuration_usable 0" in exported.read_text() or exported.exists()


def test_tend_terminated_by_systemd_ends_the_part_that_is_running(tending: Tending) -> None:
    process, asked = tending.begin_beside_silent_slurm()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == ExitStatus.INTERRUPTED
    until(lambda: not Path(f"/proc/{asked}").exists(), "sinfo to be gone")
    assert said == ""


def test_tend_that_is_killed_ends_the_part_that_is_running(tending: Tending) -> None:
    """Else nothing would end it, and its lock would have the part left out for ever."""
    process, asked = tending.begin_beside_silent_slurm()
    process.kill()
    process.communicate()
    until(lambda: not Path(f"/proc/{asked}").exists(), "sinfo to be gone")
    file = tend.part_lock_path(tending.site.places, "prefetch")
    until(lambda: lock.is_free(file), "the part to be gone")


def test_tend_runs_only_its_long_parts_with_nice_and_idle_io(
    tending: Tending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So has what they start, as a copy that `prefetch` begins."""
    tending.tool("forestage", f'#!/bin/sh\n(nice; ionice) >"{tending.folder}/$1"\n')
    monkeypatch.setattr(sys, "argv", [str(tending.program), "tend"])
    places = tending.site.places
    config = Config(prefetch=PrefetchSection(host="ctl1"), warm_at_boot=("/a",))
    for part in tend.list_parts(TendFacts(places, Clock(), config, False), False):
        started = tend.start_part({**os.environ}, part, None)
        assert started.wait(HANGS)
        nice, io = (tending.folder / part.command[0]).read_text().splitlines()
        own = (str(os.nice(0)), subprocess.check_output(["ionice"], text=True).strip())
        assert (nice, io) == (("19", "idle") if part.is_idle else own), part.name
