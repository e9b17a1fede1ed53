from __future__ import annotations

import hashlib
import importlib

import pytest

from forestage.system import sha256

DATA = b"\0" * 1000


def test_digits_are_those_of_hashlib() -> None:
    assert sha256.sha256(DATA) == hashlib.sha256(DATA).hexdigest()


def test_python_built_without_its_own_uses_hashlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str) -> object:
        if name.startswith("_sha"):
            raise ModuleNotFoundError(name)
        return real(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", without)
        importlib.reload(sha256)
        assert sha256.sha256(DATA) == hashlib.sha256(DATA).hexdigest()
    importlib.reload(sha256)
