"""The service's unit: it starts what there is, and what it forbids itself it does not need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forestage.cli.main import main
from forestage.cli.world import Exit

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


def values(name: str, service: str = "forestage-peer") -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit(f"{service}.service"), re.MULTILINE)


@pytest.mark.parametrize("service", SERVICES)
def test_command_of_the_service_exists_beside_the_hooks_interpreter(service: str) -> None:
    (start,) = values("ExecStart", service)
    program, command, *_ = start.split()
    assert command in main.commands
    assert str(Path(program).parent / "python3") in (REPOSITORY / "prolog/forestage").read_text()


@pytest.mark.parametrize("service", ["forestage-room", "forestage-metrics"])
def test_service_of_each_minute_fills_no_journal_and_hides_no_error(service: str) -> None:
    """LogLevelMax= drops systemd's own lines as well; what the program says is at SyslogLevel=."""
    assert values("LogLevelMax", service) == values("SyslogLevel", service) == ["notice"]


def test_room_says_nothing_where_nothing_is_evicted() -> None:
    assert values("ExecStart", "forestage-room")[0].endswith("forestage evict --quiet")


def test_service_with_a_wrong_configuration_is_not_started_again() -> None:
    (codes,) = values("RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} == {Exit.USAGE, Exit.CONFIG}


def test_services_that_see_redirects_have_no_mounts_of_their_own() -> None:
    """What the sweep unmounts in a namespace of its own stays where jobs look."""
    assert OWN_MOUNTS.search(unit("forestage-peer.service"))
    for name in ("sweep", "metrics"):
        assert not OWN_MOUNTS.search(unit(f"forestage-{name}.service"))


def test_room_is_made_wherever_the_sweep_runs() -> None:
    """`forestage enable` and the admins know of the sweep's timer."""
    assert "\nWants=forestage-room.timer" in unit("forestage-sweep.timer")
    assert "\nPartOf=forestage-sweep.timer\n" in unit("forestage-room.timer")


def test_what_outlives_a_job_ends_with_no_unit() -> None:
    """It may be a job's reads. The sweep's timer starts it, the packages restart it never."""
    assert "forestage-hold.service" in unit("forestage-sweep.timer").split("Wants=")[1]
    assert values("KillMode", "forestage-hold") == ["process"]
    assert values("Delegate", "forestage-hold") == ["yes"]
    assert values("OOMPolicy", "forestage-hold") == ["continue"]
    scripts = (REPOSITORY / "packaging/scripts").glob("p*install")
    assert not any("forestage-hold" in script.read_text() for script in scripts)


def test_boot_does_not_wait_for_images() -> None:
    """A unit of type oneshot that a target wants is waited for by what comes after the target."""
    assert "\nWantedBy=multi-user.target\n" in unit("forestage-boot.service")
    assert values("Type", "forestage-boot") == ["exec"]


@pytest.mark.parametrize("name", ["sweep", "room"])
def test_unit_that_comes_before_the_caches_disk_has_not_failed(name: str) -> None:
    assert values("SuccessExitStatus", f"forestage-{name}") == [str(int(Exit.UNMOUNTED))]


def test_directory_of_the_hooks_cannot_be_listed_by_users() -> None:
    assert values("RuntimeDirectoryMode") == ["0711"]
    tmpfiles = (UNITS.parent / "tmpfiles.d/forestage.conf").read_text()
    assert re.findall(r"^(.) /run/forestage(\S*) (\d+)", tmpfiles, re.MULTILINE) == [
        ("d", "", "0711"),
        ("z", "/images", "0711"),
        ("z", "/through", "0700"),
    ]


@pytest.mark.parametrize("name", ["sweep", "metrics", "room"])
def test_timer_starts_its_service_again_and_again(name: str) -> None:
    timer = unit(f"forestage-{name}.timer")
    assert re.search(r"^OnUnitInactiveSec=\d+min$", timer, re.MULTILINE)
    assert values("Type", f"forestage-{name}") == ["oneshot"]
