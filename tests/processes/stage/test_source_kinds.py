"""A kind of source that no code knows: what it has to bring, and what it gets for that."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from forestage.cache.node import Node
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.commands import inventory, verify
from forestage.commands.verify import VerifyOptions
from forestage.slurm.job import Job
from forestage.sources import source
from forestage.sources.source import OpenImage, ReadableSource
from forestage.stage import stager
from forestage.stage.task import CopyTask

SIZE = 70_000  # bytes: the last chunk is not full
WHOLE = bytes(number % 256 for number in range(SIZE))


class Counting:
    """A file that lies nowhere: each of its bytes is the low byte of where it is."""

    is_read_through: ClassVar[bool] = False

    def __init__(self) -> None:
        self.version = 1
        self.opened_at = 0

    def open(self) -> ReadableSource:
        self.opened_at = self.version
        return ReadableSource(-1, None, SIZE, "/made/up", self.read)

    def read(self, start: int, want: memoryview) -> None:
        want[:] = bytes(number % 256 for number in range(start, start + len(want)))

    def check_unchanged(self) -> None:
        if self.version != self.opened_at:
            raise source.declined_as_changed("/made/up")


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def task(staging_node: Node, asking: Job, counting: Counting) -> CopyTask:
    identity = FileIdentity("/made/up", inode=1, size=SIZE, mtime_ns=1, ctime_ns=1)
    wanted = SourceImage(identity, AccessRights(os.getuid(), os.getgid(), 0o640), "data")
    return CopyTask(staging_node, asking, OpenImage(wanted, asking.user, -1, other_source=counting))


def copy(task: CopyTask) -> tuple[str, str]:
    message = stager.copy_and_report(task, threading.Event())
    return message.state, message.reason


def shown(task: CopyTask) -> Path:
    return task.node.cache.image_path(task.key)


def test_made_up_source_kind_is_copied_verified_and_found_as_a_hit(task: CopyTask) -> None:
    assert copy(task) == ("published", "")
    assert shown(task).read_bytes() == WHOLE
    assert shown(task).stat().st_mode & 0o777 == 0o640
    assert copy(task) == ("found", "")
    items = inventory.make_items(task.node.cache.list_entries(), [])
    done = verify.verify_entries(
        task.node, items, False, lambda _: None, VerifyOptions(source_skip_reason="it has none")
    )
    assert [one.result for one in done.verdicts] == ["ok"]


def test_made_up_source_kind_that_changes_during_the_copy_is_not_published(
    task: CopyTask, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = counting.read

    def changing(start: int, want: memoryview) -> None:
        counting.version = 2
        real(start, want)

    monkeypatch.setattr(counting, "read", changing)
    assert copy(task) == ("failed", "changed")
    assert task.node.cache.find_entry_by_key(task.key) is None
