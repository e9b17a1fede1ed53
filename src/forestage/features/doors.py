"""The doors of features: which functions of a feature the core calls, and how it gets at them."""

from __future__ import annotations

import importlib
from typing import Any

from forestage.features import FEATURES


def load(name: str, door: str) -> Any:
    """The module of a feature's door; only what the table says is there may be asked for."""
    return importlib.import_module(f"forestage.features.{name}.{door}")


def having(door: str) -> list[str]:
    """The names of the features with this door, in the table's order."""
    return [feature.name for feature in FEATURES if door in feature.doors]
