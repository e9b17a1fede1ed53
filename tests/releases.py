"""The releases of filelock that the program may meet: the oldest, the packages', the newest."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
NEWEST = "newest"  # as pip has installed it for these tests
OTHERS = [
    re.search(pattern, (REPO / file).read_text(), re.MULTILINE)[1]  # type: ignore[index]
    for file, pattern in (
        ("pyproject.toml", r'"filelock>=([\d.]+)"'),
        ("packaging/requirements.txt", r"^filelock==([\d.]+)$"),
    )
]
RELEASES = (*OTHERS, NEWEST)


@contextlib.contextmanager
def import_release(release: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have `import filelock` find this release, from where tests/prepare has put it."""
    with monkeypatch.context() as patch:
        for name in _loaded():
            patch.delitem(sys.modules, name)
        if release != NEWEST:
            patch.syspath_prepend(str(REPO / ".venv/filelock" / release))
        import filelock

        assert release in (NEWEST, filelock.__version__), "run tests/prepare"
        yield
        for name in _loaded():
            del sys.modules[name]


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "filelock"]
