"""The peer service's unit: when it is started again, and who may list its directory."""

from __future__ import annotations

import re
from pathlib import Path

from forestage.commands.world import ExitStatus

UNIT = Path(__file__).resolve().parents[4] / "packaging/systemd/forestage-peer.service"


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_service_with_a_wrong_configuration_is_not_started_again() -> None:
    (codes,) = values("RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} == {ExitStatus.USAGE, ExitStatus.CONFIG}


def test_directory_of_the_hooks_is_made_as_closed_as_by_tmpfiles() -> None:
    """Which the unit makes where tmpfiles.d did not."""
    assert values("RuntimeDirectoryMode") == ["0711"]
