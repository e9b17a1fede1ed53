"""What people see of copies under way: no dead one, no wrong rate, nobody who waits forgotten."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from commands import CHUNK, NOW, Site
from forestage import trace
from forestage.cache.layout import Entry
from forestage.cache.lease import EntryUse
from forestage.cache.part import ENTRY_BYTES, PartRecord
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.clock import Clock
from forestage.commands import copies
from forestage.commands.command_context import ExitStatus
from forestage.commands.copies import (
    CopySnapshot,
    CopyUnderWay,
    format_snapshot,
    format_table,
    make_copy,
)
from forestage.commands.main import CommandContext, main
from forestage.system import lock
from forestage.system.terminal import OutputBlock, write_plain
from node import Node, content, until

MIB = 1 << 20
PATH = "/lustre/images/a.sqsh"


def owner(path: str = PATH, **facts: object) -> PartRecord:
    image = SourceImage(FileIdentity(path, 1, 100 * MIB, 3, 4), AccessRights(0, 0, 0o644))
    made = PartRecord(1, "boot", image, MIB, "chunks", job=7, since=10.0)
    return msgspec.structs.replace(made, **facts)


def one(copied: int = 40 * MIB, now: float = 24.0, **facts: object) -> CopyUnderWay:
    """A copy of 100 MiB, by default since four seconds."""
    its = owner(**{"phase": "copying", "began": 20.0, **facts})  # type: ignore[arg-type]
    return make_copy("k1", its, copied, now)


def text(pieces: list[OutputBlock]) -> str:
    out = io.StringIO()
    write_plain(pieces, out)
    return out.getvalue()


def line(**changes: object) -> str:
    """What `status --watch` prints of a copy."""
    return text(format_snapshot(CopySnapshot(NOW, (msgspec.structs.replace(one(), **changes),))))


# --- pure: how far it is


def test_resumed_bytes_count_as_copied_but_not_for_rate() -> None:
    copy = one(copied=60 * MIB, resumed=40 * MIB)
    assert (copy.copied, copy.percent, copy.age) == (60 * MIB, 60.0, 4.0)
    assert (copy.rate, copy.left) == (5 * MIB, 8.0)


@pytest.mark.parametrize(
    "copy",
    [
        one(copied=0, began=24.0),
        one(copied=9 * MIB, began=24.0),
        one(copied=9 * MIB, resumed=9 * MIB),
        one(copied=9 * MIB, began=99.0),
        one(copied=9 * MIB, phase="queued"),
    ],
)
def test_copy_without_measurable_progress_has_no_rate(copy: CopyUnderWay) -> None:
    assert (copy.rate, copy.left) == (None, None)
    assert copy.age >= 0
    assert "None" not in text(
        [*format_table((copy,)), *format_snapshot(CopySnapshot(NOW, (copy,)))]
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, f"40%  40 MiB of 100 MiB  10 MiB/s  6s left  {PATH}  for no job\n"),
        ({"waiting": (9,)}, "for job 9\n"),
        (
            {"waiting": tuple(range(100, 300))},
            "for jobs 100, 101, 102, 103 and 196 more\n",
        ),
        ({"from_peers": 30 * MIB}, "30 MiB from other nodes"),
        ({"served": 70 * MIB}, "70 MiB to other nodes"),
        ({"percent": 99.9}, " 99%  "),
        ({"phase": "publishing", "percent": 100.0}, "publishing"),
        ({"image": "/\x1b]0;gotcha\x07.sqsh"}, r"/\x1b]0;gotcha\x07.sqsh"),
    ],
)
def test_watch_line_of_a_copy_has_percent_rate_jobs_and_peers(
    changes: dict[str, object], expected: str
) -> None:
    printed = line(**changes)
    assert expected in printed
    assert printed.count("\n") == 1
    assert ("other nodes" in printed) == ("other nodes" in expected)


# --- gathered from a real cache


def test_status_lists_a_part_as_a_copy_under_way_only_while_its_lock_is_held(site: Site) -> None:
    path, dead = site.image("a.sqsh", b"x" * 3 * CHUNK), site.image("b.sqsh", b"y" * CHUNK)
    part, owner = site.part(path, phase="copying", began=0.0, job=5)
    site.part(dead)
    site.lease(5, EntryUse(owner.image.key))
    site.lease(6, EntryUse(owner.image.key))
    with part.map.open("r+b") as digests:
        digests.seek(2 * ENTRY_BYTES)
        digests.write(b"d" * ENTRY_BYTES)
    with lock.held(site.node.cache.key_lock(owner.image.key), 0):
        (copy,) = site.json("status")["copies"]
        said = site.run("status").stdout
    assert "in 1 stopped copy, kept until a job goes on with it" in " ".join(said.split())
    assert (copy["image"], copy["copied"], copy["size"]) == (str(path), CHUNK, 3 * CHUNK)
    assert (copy["percent"], copy["phase"], copy["engine"]) == (33.3, "copying", "chunks")
    assert (copy["job"], copy["waiting"]) == (5, [5, 6])
    assert not site.node.cache.key_lock(site.look(dead).key).exists()
    assert site.json("status")["copies"] == []
    assert site.json("status")["stopped"]["number"] == 2


def test_queued_copies_are_listed_in_the_order_of_their_requests(site: Site) -> None:
    since = {"k3": 30.0, "k1": 20.0, "k0": 10.0}
    facts = {"k0": {"phase": "copying", "began": 11.0}}
    keys = {}
    with contextlib.ExitStack() as locks:
        for name, asked in since.items():
            _, its = site.part(site.image(name), since=asked, **facts.get(name, {}))
            keys[name] = its.image.key
            locks.enter_context(lock.held(site.node.cache.key_lock(its.image.key), 0))
        found = copies.list_copies(site.node)
        printed = site.run("status").stdout
    assert [(copy.key, copy.place) for copy in found] == [
        (keys["k0"], 0),
        (keys["k1"], 1),
        (keys["k3"], 2),
    ]
    assert "3 copies under way" in printed
    assert "queued 2" in printed


def test_part_of_an_earlier_boot_is_not_listed_as_a_copy_under_way(site: Site) -> None:
    part, owner = site.part(site.image("a.sqsh", b"x" * CHUNK))
    part.write_record(msgspec.structs.replace(owner, boot="another"))
    with lock.held(site.node.cache.key_lock(owner.image.key), 0):
        assert copies.list_copies(site.node) == ()


def test_copy_being_published_is_listed_as_under_way(site: Site) -> None:
    path = site.image("a.sqsh", b"x" * CHUNK)
    part, owner = site.part(path)
    entry = Entry(owner.image.key, owner.image.identity, owner.image.access, NOW, "chunks", CHUNK)
    (part.directory / "entry.json").write_bytes(msgspec.json.encode(entry))
    part.record.unlink()
    with lock.held(site.node.cache.key_lock(owner.image.key), 0):
        (copy,) = copies.list_copies(site.node)
    assert (copy.image, copy.phase, copy.percent) == (str(path), "publishing", 100.0)


@pytest.mark.parametrize("junk", [b"", b"{", b'{"key": 1}'])
def test_unreadable_part_is_not_listed_as_a_copy_under_way(site: Site, junk: bytes) -> None:
    part, owner = site.part(site.image("a.sqsh", b"x" * CHUNK))
    part.record.write_bytes(junk)
    (part.directory / "entry.json").write_bytes(junk)
    with lock.held(site.node.cache.key_lock(owner.image.key), 0):
        assert copies.list_copies(site.node) == ()


# --- --watch


def test_status_watch_in_a_pipe_ends_at_once_if_no_copy_is_under_way(site: Site) -> None:
    assert site.run("status", "--watch").stdout.endswith("no copy is under way\n")
    done = site.run("status", "--watch", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (ExitStatus.OK, {"time": NOW, "copies": []})
    assert not site.node.cache.root.exists()


def test_status_watch_in_a_pipe_ends_after_the_last_copy(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SNAPSHOT_INTERVAL", 0.01)
    several = iter([(one(),), (one(),), ()])
    monkeypatch.setattr(copies, "list_copies", lambda node: next(several))
    site.publish(site.image("a.sqsh"))
    lines = site.run("status", "--watch", "--json").stdout.splitlines()
    assert [len(json.loads(line)["copies"]) for line in lines] == [1, 1, 0]


def test_status_watch_of_an_unusable_cache_exits_with_cache_status(site: Site) -> None:
    site.publish(site.image("a.sqsh"))
    (site.node.cache.root / "format").write_text("99\n")
    assert site.run("status", "--watch").exit_code == ExitStatus.CACHE


SHELL = (
    "from pathlib import Path; from forestage.commands.main import *;"
    "from forestage.paths import NodePaths; from forestage.clock import Clock;"
    "main(['status', '--watch'], obj=CommandContext(NodePaths(Path({!r})), Clock()))"
)


def read(terminal: int) -> bytes:
    assert select.select([terminal], [], [], 600)[0], "no more is shown, and no end"
    return os.read(terminal, 4096)


@pytest.mark.ci
def test_status_watch_at_a_terminal_exits_0_when_interrupted(site: Site, tmp_path: Path) -> None:
    path = site.image("a.sqsh", b"x" * 4 * CHUNK)
    part, owner = site.part(path, phase="copying", began=time.monotonic(), job=5)
    site.lease(41, EntryUse(owner.image.key))
    with part.map.open("r+b") as digests:
        digests.write(b"d" * ENTRY_BYTES)
    controller, terminal = pty.openpty()
    environ = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    with lock.held(site.node.cache.key_lock(owner.image.key), 0):
        process = subprocess.Popen(
            [sys.executable, "-c", SHELL.format(str(tmp_path))],
            stdout=terminal,
            env=environ,
        )
        os.close(terminal)
        shown = b""
        while not re.search(rb"for\s+job\s+41", shown):
            shown += read(controller)
        process.send_signal(signal.SIGINT)
        # Not looked at: rich draws once more at the end, and does so in the same line where the
        # signal comes while it notes that it has drawn.
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while True:
                read(controller)
        assert process.wait(600) == 0
    os.close(controller)
    printed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", shown.decode())  # the cursor moves
    assert "25%  1 MiB of 4 MiB" in printed
    assert max(map(len, re.split(r"[\r\n]+", printed))) <= 80


# --- a real stager


def test_status_watch_shows_a_copy_to_its_end_after_the_job_stopped_waiting(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"

    class Watching(Clock):
        def sleep(self, seconds: float) -> None:
            seen.touch()
            super().sleep(min(seconds, 0.1))

    def wait(name: str) -> None:
        if name == "chunk":
            until(seen.exists, "somebody to look")

    monkeypatch.setattr(trace, "listener", wait)
    path = node.put("a.sqsh", content(size=6 * MIB))
    node.configure(deadline="1s", threads=1)
    assert node.prolog(7, path).outcome.reason == "deadline"
    world = CommandContext(node.places, Watching())
    watched = CliRunner().invoke(main, ["status", "--watch", "--json"], obj=world).stdout
    shown = [json.loads(line)["copies"] for line in watched.splitlines()]
    (first,) = shown[0]
    assert (first["image"], first["job"], first["waiting"]) == (str(path), 7, [7])
    assert 0 <= first["copied"] < first["size"] == 6 * MIB
    assert shown[-1] == []
    until(lambda: node.outcomes("stager"), "the stager's event")
    printed = CliRunner().invoke(main, ["explain", "7"], obj=world).stdout
    assert re.search(
        r"Prolog.*declined \(deadline\).*Stager.*copied 6 MiB.*had stopped waiting",
        printed,
        re.DOTALL,
    )
    assert node.prolog(8, path).outcome.result == "hit"
