"""The peer service's unit: when it is started again, and who may list its directory."""

from __future__ import annotations

import re
from pathlib import Path

from forestage.commands.command_context import ExitStatus

UNIT = Path(__file__).resolve().parents[4] / "packaging/systemd/forestage-peer.service"


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_peer_unit_does_not_restart_after_exit_status_usage_or_config() -> None:
    (codes,) = values("RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} == {ExitStatus.USAGE, ExitStatus.CONFIG}


def test_peer_unit_creates_its_runtime_directory_with_mode_0711() -> None:
    """Which the unit makes where tmpfiles.d did not."""
    assert values("RuntimeDirectoryMode") == ["0711"]
