"""Restarts of the machine, as far as forestage can tell."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from forestage.cache import part
from forestage.system import mounts

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Boot:
    """What the kernel says of its boot; `again` makes it say something new."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.again()

    @classmethod
    @contextlib.contextmanager
    def told_by(cls, file: Path) -> Iterator[Boot]:
        """Covers the kernel's own file, so that every process sees it. Needs private mounts."""
        boot = cls(file)
        mounts.mount(str(file), str(BOOT_ID), mounts.MS_BIND)
        try:
            yield boot
        finally:
            mounts.umount(str(BOOT_ID))
            part.boot_id.cache_clear()

    def again(self) -> None:
        self._file.write_text(f"{uuid.uuid4()}\n")
        part.boot_id.cache_clear()  # as each new process would ask anew
