"""The service's unit: it starts what there is, and what it forbids itself it does not need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forestage.commands import tend
from forestage.commands.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
UNITS = REPOSITORY / "packaging/systemd"
# Not that of forestage-hold, which is no command.
SERVICES = tuple(path.stem for path in UNITS.glob("*.service") if path.stem != "forestage-hold")
# systemd.exec(5): what gives a service a mount namespace of its own.
OWN_MOUNTS = re.compile(
    r"^(Private(Tmp|Devices|Mounts|Users|IPC)|Protect\w+|RootDirectory|RootImage|MountFlags|TemporaryFileSystem"
    r"|(ReadOnly|ReadWrite|Inaccessible|Exec|NoExec|Bind|BindReadOnly)Paths|DynamicUser)=",
    re.MULTILINE,
)


def unit(name: str) -> str:
    return (UNITS / name).read_text()


def values(name: str, service: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit(f"{service}.service"), re.MULTILINE)


@pytest.mark.parametrize("service", SERVICES)
def test_command_of_the_service_exists_beside_the_hooks_interpreter(service: str) -> None:
    (start,) = values("ExecStart", service)
    program, command, *_ = start.split()
    assert command in main.commands
    assert str(Path(program).parent / "python3") in (REPOSITORY / "prolog/forestage").read_text()


def test_service_of_each_minute_fills_no_journal_and_hides_no_error() -> None:
    """LogLevelMax= drops systemd's own lines as well; what the program says is at SyslogLevel=."""
    assert values("LogLevelMax", "forestage") == values("SyslogLevel", "forestage") == ["notice"]


def test_services_that_see_redirects_have_no_mounts_of_their_own() -> None:
    """What the sweep unmounts in a namespace of its own stays where jobs look."""
    assert OWN_MOUNTS.search("PrivateTmp=yes")
    assert not OWN_MOUNTS.search(unit("forestage.service"))


def test_what_outlives_a_job_ends_with_no_unit() -> None:
    """It may be a job's reads. The sweep's timer starts it, the packages restart it never."""
    assert "forestage-hold.service" in unit("forestage.timer").split("Wants=")[1]
    assert values("KillMode", "forestage-hold") == ["process"]
    assert values("Delegate", "forestage-hold") == ["yes"]
    assert values("OOMPolicy", "forestage-hold") == ["continue"]
    scripts = (REPOSITORY / "packaging/scripts").glob("p*install")
    assert not any("forestage-hold" in script.read_text() for script in scripts)


def test_run_overlaps_no_other_and_ends_before_systemd_ends_it() -> None:
    """A oneshot is not started again while it runs; room is to be made each minute."""
    assert values("Type", "forestage") == ["oneshot"]
    assert values("KillMode", "forestage") == ["process"]
    timer = unit("forestage.timer")
    assert "\nOnUnitActiveSec=1min\n" in timer
    delay = re.search(r"^RandomizedDelaySec=(\d+)s$", timer, re.MULTILINE)
    assert delay
    assert 60 + int(delay[1]) < 70
    assert (
        tend.RUN_SECONDS + tend.KILL_TIMEOUT
        < 50
        < int(values("TimeoutStartSec", "forestage")[0])
        < 60
    )


def test_service_of_each_minute_makes_no_part_nice() -> None:
    """With nice 19 the kernel takes the lowest I/O priority, and room is to have that of any."""
    found = re.findall(r"^(Nice|IOWeight|IOScheduling\w+)=", unit("forestage.service"), re.M)
    assert found == []


def test_minutes_work_waits_for_nothing_that_may_hang() -> None:
    """Neither for munge, nor for slurmd, which asks slurmctld, nor for mounts."""
    assert re.findall(r"^(?:After|Wants|Requires)=(.*)$", unit("forestage.service"), re.M) == [
        "local-fs.target"
    ]


def test_directory_of_the_hooks_cannot_be_listed_by_users() -> None:
    tmpfiles = (UNITS.parent / "tmpfiles.d/forestage.conf").read_text()
    assert re.findall(r"^(.) /run/forestage(\S*) (\d+)", tmpfiles, re.MULTILINE) == [
        ("d", "", "0711"),
        ("z", "/images", "0711"),
        ("z", "/through", "0700"),
    ]
