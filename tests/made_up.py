"""Features for a test, whose doors are functions of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from forestage import features
from forestage.features import FEATURES, Feature
from forestage.slurm import hints

Door = Callable[..., Any]


def around_all(
    patch: pytest.MonkeyPatch, first: dict[str, Door], last: dict[str, Door], word: str = ""
) -> None:
    """Put a feature with these doors before all others, and another one behind them.

    A comment may have the word for each of them.
    """
    rows = {"first": first, "last": last}
    for name, functions in rows.items():
        for door, function in functions.items():
            file, _, at = door.partition(".")
            full = f"forestage.features.{name}.{file}"
            module = sys.modules.get(full) or ModuleType(full)
            patch.setitem(sys.modules, full, module)
            setattr(module, at, function)
    mark = ("leases/{job}.json",)
    made = [
        Feature(name, doors=tuple(rows[name]), marks=mark, raw_words=(word,) if word else ())
        for name in rows
    ]
    patch.setattr(features, "FEATURES", (made[0], *FEATURES, made[1]))
    if word:
        patch.setattr(hints, "RAW", (word,))
        patch.setattr(hints, "KNOWN_WORDS", (*hints.KNOWN_WORDS, word))


def calls_of(names: tuple[str, ...], raised: type[BaseException]) -> tuple[Any, Any, list[str]]:
    """Return doors that raise and doors that do not, and the list in which both note a call."""
    called: list[str] = []

    def raising(name: str) -> Door:
        def door(*facts: object) -> dict[str, tuple[object, ...]]:
            called.append(name)
            raise raised(name)

        return door

    def quiet(name: str) -> Door:
        def door(*facts: object) -> dict[str, tuple[object, ...]]:
            called.append(f"{name}, too")
            return {}

        return door

    return {one: raising(one) for one in names}, {one: quiet(one) for one in names}, called
