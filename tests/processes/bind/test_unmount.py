"""Claims on binds: who takes one off, who leaves it, and what a hung path is left for."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.bind import unmount
from forestage.bind.unmount import Bind, Going
from forestage.cache.layout import Cache
from forestage.system.as_user import User
from forestage.system.mounts import Mount


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    made = Cache(tmp_path / "cache")
    made.locks.mkdir(parents=True)
    return made


def bind(cache: Cache, number: int, path: str = "") -> Bind:
    where = f"{cache.root}/entries/0{number}/image"
    return Bind(Mount(number, 1, "0:1", where, path or f"/lustre/{number}"), f"0{number}")


def test_redirect_that_is_gone_already_is_taken_off(cache: Cache, tmp_path: Path, me: User) -> None:
    (tmp_path / "file").touch()
    paths = [str(tmp_path), f"{tmp_path}/gone", f"{tmp_path}/gone/too", f"{tmp_path}/file/below"]
    gone = [Going(Bind(Mount(-1, 0, "0:0", "/", path), ""), cache) for path in paths]
    unmount.unmount(gone, lambda bind: me)
