from __future__ import annotations

import hashlib
import importlib

import pytest

from forestage.system import sha256

DATA = b"\0" * 1000


def test_sha256_equals_hashlibs() -> None:
    assert sha256.sha256(DATA) == hashlib.sha256(DATA).hexdigest()


def test_sha256_falls_back_to_hashlib_without_the_builtin_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
