"""What the tests of the commands share: programs that are scripts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.system import run


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts scripts before all programs; the file that comes back has each command line."""

    def put(**scripts: str) -> Path:
        folder, asked = tmp_path / "bin", tmp_path / "asked"
        folder.mkdir(exist_ok=True)
        asked.touch()
        for name, script in scripts.items():
            program = folder / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >>{asked}\n{script}\n')
            program.chmod(0o755)
        path = f"{folder}:{run.PATH}"
        monkeypatch.setenv("PATH", path)
        monkeypatch.setattr(run, "PATH", path)
        monkeypatch.setitem(run.ENVIRONMENT, "PATH", path)
        return asked

    return put
