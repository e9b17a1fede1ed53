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
def test_service_units_command_exists_beside_the_hooks_interpreter(service: str) -> None:
    (start,) = values("ExecStart", service)
    program, command, *_ = start.split()
    assert command in main.commands
    assert str(Path(program).parent / "python3") in (REPOSITORY / "prolog/forestage").read_text()


def test_minute_service_logs_from_notice_on() -> None:
    """LogLevelMax= drops systemd's own lines as well; what the program says is at SyslogLevel=."""
    assert values("LogLevelMax", "forestage") == values("SyslogLevel", "forestage") == ["notice"]


def test_minute_service_has_no_mount_namespace_of_its_own() -> None:
    """What the sweep unmounts in a namespace of its own stays where jobs look."""
    assert OWN_MOUNTS.search("PrivateTmp=yes")
    assert not OWN_MOUNTS.search(unit("forestage.service"))


def test_hold_service_is_started_by_the_timer_and_never_kills_its_processes() -> None:
    """It may be a job's reads. The sweep's timer starts it, the packages restart it never."""
    assert "forestage-hold.service" in unit("forestage.timer").split("Wants=")[1]
    assert values("KillMode", "forestage-hold") == ["process"]
    assert values("Delegate", "forestage-hold") == ["yes"]
    assert values("OOMPolicy", "forestage-hold") == ["continue"]
    scripts = (REPOSITORY / "packaging/scripts").glob("p*install")
    assert not any("forestage-hold" in script.read_text() for script in scripts)


def test_minute_service_ends_before_its_next_start_and_its_timeout() -> None:
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


def test_minute_service_sets_neither_nice_nor_io_priority() -> None:
    """With nice 19 the kernel takes the lowest I/O priority, and room is to have that of any."""
    found = re.findall(r"^(Nice|IOWeight|IOScheduling\w+)=", unit("forestage.service"), re.M)
    assert found == []


def test_minute_service_depends_on_local_fs_target_only() -> None:
    """Neither for munge, nor for slurmd, which asks slurmctld, nor for mounts."""
    assert re.findall(r"^(?:After|Wants|Requires)=(.*)$", unit("forestage.service"), re.M) == [
        "local-fs.target"
    ]


def test_tmpfiles_conf_makes_run_directories_unlistable_for_users() -> None:
    tmpfiles = (UNITS.parent / "tmpfiles.d/forestage.conf").read_text()
    assert re.findall(r"^(.) /run/forestage(\S*) (\d+)", tmpfiles, re.MULTILINE) == [
        ("d", "", "0711"),
        ("z", "/images", "0711"),
        ("z", "/through", "0700"),
    ]
