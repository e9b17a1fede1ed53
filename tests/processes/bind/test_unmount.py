"""Claims on binds: who takes one off, who leaves it, and what a hung path is left for."""

from __future__ import annotations

from pathlib import Path

from forestage.bind import unmount
from forestage.bind.unmount import ClaimedBind, RedirectBind
from forestage.cache.layout import Cache
from forestage.system.as_user import User
from forestage.system.mounts import MountInfo


def test_unmount_binds_does_not_fail_if_the_redirect_is_already_unmounted(
    cache: Cache, tmp_path: Path, me: User
) -> None:
    (tmp_path / "file").touch()
    paths = [str(tmp_path), f"{tmp_path}/gone", f"{tmp_path}/gone/too", f"{tmp_path}/file/below"]
    gone = [
        ClaimedBind(RedirectBind(MountInfo(-1, 0, "0:0", "/", path), ""), cache) for path in paths
    ]
    unmount.unmount_binds(gone, lambda bind: me)
