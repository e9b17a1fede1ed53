"""The fixtures of a suite, for its tests below tests/features."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parent


def suite_of(file: str) -> str:
    """The suite of a file below tests: its folder, or that below its feature's."""
    first, *below = file.split("/")
    return below[1] if first == "features" and len(below) > 2 else first


def fixtures_of(*folders: str) -> dict[str, object]:
    """All that the conftest.py of these folders have; what a conftest says holds below it alone."""
    found: dict[str, object] = {}
    for folder in folders:
        named = vars(_load(folder))
        found |= {name: one for name, one in named.items() if not name.startswith("__")}
    return found


def _load(folder: str) -> ModuleType:
    name = f"conftest_of_{folder.replace('/', '_')}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TESTS / folder / "conftest.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
