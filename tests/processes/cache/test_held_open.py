"""What is deleted and held open counts, also while the kernel is busy with another file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from forestage.cache import held_open
from forestage.system import handles, libc


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may ask for a handle")
@pytest.mark.parametrize(("times", "found"), [(3, True), (1 << 30, False)])
def test_file_system_that_gives_no_file_for_a_moment_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, found: bool
) -> None:
    """As ext4 does while a new file gets the inode number of one that has gone."""
    monkeypatch.setattr(handles, "_PAUSE", 0.0)
    call, refused = libc.call, 0

    def busy(name: str, *args: object, about: str | None = None) -> int:
        nonlocal refused
        if name == "open_by_handle_at" and refused < times:
            refused += 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return call(name, *args, about=about)

    file = tmp_path / "image"
    file.write_bytes(b"x" * 8192)
    with file.open("rb"), held_open.noted(tmp_path / "held", file, (1000,)):
        file.unlink()
        monkeypatch.setattr(libc, "call", busy)
        if found:
            assert held_open.of_users(tmp_path / "held")[1000] >= 8192
        else:
            with pytest.raises(OSError, match="memory"):
                held_open.of_users(tmp_path / "held")
