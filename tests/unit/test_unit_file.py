"""The service's unit: it starts what there is, and what it forbids itself it does not need."""

from __future__ import annotations

import re
from pathlib import Path

from forestage.cli import main
from forestage.exits import Exit

REPOSITORY = Path(__file__).resolve().parents[2]
UNIT = (REPOSITORY / "packaging/systemd/forestage-peer.service").read_text()


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def test_it_starts_a_command_that_there_is_beside_the_hooks_interpreter() -> None:
    (start,) = values("ExecStart")
    program, command = start.split()
    assert command in main.commands
    assert str(Path(program).parent / "python3") in (REPOSITORY / "prolog/forestage").read_text()


def test_a_wrong_configuration_is_not_tried_again_but_a_missing_munged_is() -> None:
    (codes,) = values("RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} == {Exit.USAGE, Exit.CONFIG}


def test_the_jobs_of_the_node_come_first() -> None:
    assert int(values("Nice")[0]) > 0
    assert int(values("CPUWeight")[0]) < 100
    assert int(values("IOWeight")[0]) < 100
