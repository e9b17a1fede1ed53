"""The service's unit: it starts what there is, and what it forbids itself it does not need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forestage.cli.exits import Exit
from forestage.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
UNITS = REPOSITORY / "packaging/systemd"
SERVICES = ("forestage-peer", "forestage-sweep", "forestage-metrics")
# systemd.exec(5): what gives a service a mount namespace of its own.
OWN_MOUNTS = re.compile(
    r"^(Private(Tmp|Devices|Mounts|Users|IPC)|Protect\w+|RootDirectory|RootImage|MountFlags|TemporaryFileSystem"
    r"|(ReadOnly|ReadWrite|Inaccessible|Exec|NoExec|Bind|BindReadOnly)Paths|DynamicUser)=",
    re.MULTILINE,
)


def unit(name: str) -> str:
    return (UNITS / name).read_text()


def values(name: str, service: str = "forestage-peer") -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit(f"{service}.service"), re.MULTILINE)


@pytest.mark.parametrize("service", SERVICES)
def test_it_starts_a_command_that_there_is_beside_the_hooks_interpreter(service: str) -> None:
    (start,) = values("ExecStart", service)
    program, command = start.split()
    assert command in main.commands
    assert str(Path(program).parent / "python3") in (REPOSITORY / "prolog/forestage").read_text()


def test_a_wrong_configuration_is_not_tried_again_but_a_missing_munged_is() -> None:
    (codes,) = values("RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} == {Exit.USAGE, Exit.CONFIG}


@pytest.mark.parametrize("service", SERVICES)
def test_the_jobs_of_the_node_come_first(service: str) -> None:
    assert int(values("Nice", service)[0]) > 0
    assert int(values("CPUWeight", service)[0]) < 100
    assert int(values("IOWeight", service)[0]) < 100


def test_the_sweep_takes_redirects_off_the_nodes_own_mounts() -> None:
    """What it takes off in a namespace of its own stays where jobs look."""
    assert OWN_MOUNTS.search(unit("forestage-peer.service"))
    assert not OWN_MOUNTS.search(unit("forestage-sweep.service"))


def test_the_metrics_look_at_the_nodes_own_mounts_and_tell_of_each_minute() -> None:
    assert not OWN_MOUNTS.search(unit("forestage-metrics.service"))
    timer = unit("forestage-metrics.timer")
    assert re.search(r"^OnUnitInactiveSec=1min$", timer, re.MULTILINE)
    assert values("Type", "forestage-metrics") == ["oneshot"]


def test_the_sweep_is_started_again_and_again_and_ends_by_itself() -> None:
    timer = unit("forestage-sweep.timer")
    assert re.search(r"^OnUnitInactiveSec=\d+min$", timer, re.MULTILINE)
    assert re.search(r"^RandomizedDelaySec=\d+min$", timer, re.MULTILINE)
    assert values("Type", "forestage-sweep") == ["oneshot"]
    assert values("TimeoutStartSec", "forestage-sweep") == ["infinity"]
