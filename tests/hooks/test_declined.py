"""What is not staged: the job goes on with its original path, and a user's mistake never drains."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from forestage import events
from node import Node, content


def _directory(node: Node) -> str:
    (node.server / "it").mkdir()
    return str(node.shared / "it")


def _fifo(node: Node) -> str:
    os.mkfifo(node.server / "it", 0o666)
    return str(node.shared / "it")


def _device(node: Node) -> str:
    # Readable by all, so that only its kind can be the reason.
    os.mknod(node.server / "it", 0o020666, os.makedev(1, 3))
    (node.server / "it").chmod(0o666)
    return str(node.shared / "it")


def _socket(node: Node) -> str:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(node.server / "it"))
    (node.server / "it").chmod(0o777)
    return str(node.shared / "it")


def _empty(node: Node) -> str:
    return str(node.put("alice/it", b""))


def _too_large(node: Node) -> str:
    return str(node.put("alice/it", content(1, 1024 * 1024 + 16)))


def _outside(node: Node) -> str:
    (node.places.root / "it").write_bytes(content())
    return str(node.places.root / "it")


def _link_to_outside(node: Node) -> str:
    outside = _outside(node)
    node.put("alice/other")
    (node.server / "alice/it").symlink_to(outside)
    return str(node.shared / "alice/it")


def _beside_sources(node: Node) -> str:
    beside = node.shared.with_name(node.shared.name + "2")
    beside.mkdir()
    (beside / "it").write_bytes(content())
    return str(beside / "it")


def _missing(node: Node) -> str:
    return str(node.shared / "it")


def _below_a_file(node: Node) -> str:
    return f"{node.put('alice/file')}/it"


def _link_loop(node: Node) -> str:
    (node.server / "it").symlink_to("it")
    return str(node.shared / "it")


def _too_big_for_the_disk(node: Node) -> str:
    node.configure(max_size="100K")
    return str(node.put("alice/it"))


def _text(text: str) -> Callable[[Node], str]:
    return lambda node: text.replace("SHARED", str(node.shared))


REQUESTS = [
    (_directory, "not-a-file"),
    (_fifo, "not-a-file"),
    (_device, "not-a-file"),
    (_socket, "not-a-file"),
    (_empty, "empty"),
    (_too_large, "too-large"),
    (_outside, "outside-sources"),
    (_link_to_outside, "outside-sources"),
    (_beside_sources, "outside-sources"),
    (_missing, "missing"),
    (_below_a_file, "missing"),
    (_link_loop, "bad-path"),
    (_too_big_for_the_disk, "no-room"),
    (_text("docker://ubuntu"), "registry"),
    (_text("ubuntu:24.04"), "registry"),
    (_text("(null)"), "registry"),
    (_text("/etc/shadow"), "outside-sources"),
    (_text("/proc/self/mem"), "outside-sources"),
    (_text("/proc/self/fd/3"), "missing"),
    (_text("SHARED/../../etc/passwd"), "outside-sources"),
    (_text("SHARED/it\nforestage: prolog job=1 result=hit"), "bad-path"),
    (_text("SHARED/\x1b[2Jit"), "bad-path"),
    (_text("SHARED/\udcff"), "bad-path"),
    (_text("\udcff"), "registry"),
    (_text("/" + "x" * 300), "bad-path"),
    (_text("/" + "x/" * 3000), "bad-path"),
    (_text("/" * 100_000), "bad-path"),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("make", "reason"), REQUESTS, ids=[f"{n}-{reason}" for n, (_, reason) in enumerate(REQUESTS)]
)
def test_request_that_cannot_be_served_is_declined_with_exit_0(
    node: Node, capfd: pytest.CaptureFixture[str], make: Callable[[Node], str], reason: str
) -> None:
    node.configure(max_image_size="1M")
    asked = make(node)
    ran = node.prolog(7, asked)
    assert ran.ended == (0, "declined", reason)
    assert ran.outcome.detail
    assert node.binds() == {}
    assert node.entries() == set()
    assert node.lease(7) is None
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert line[:-1].isprintable()
    assert len(line) < 8000


def test_image_is_declined_without_configured_sources(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    node.configure(sources=None)
    assert node.prolog(7, path).said == ("declined", "outside-sources")


@pytest.mark.parametrize(
    "keys", [{"enabled": False}, {"partitions": {"batch": {"enabled": False}}}]
)
def test_disabled_node_or_partition_declines_and_creates_no_cache(
    node: Node, keys: dict[str, object]
) -> None:
    node.configure(**keys)
    assert node.prolog(7, node.put("alice/image.sqsh")).said == ("declined", "disabled")
    assert not node.cache.root.exists()


def test_switch_file_makes_the_next_prolog_decline_with_its_first_line(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    assert node.prolog(7, path).said == ("copied", "")
    node.places.disabled.write_text("INC-42: look \x1b[31minto it\nand more\n")
    ran = node.prolog(8, path)
    assert ran.ended == (0, "declined", "disabled")
    why = f"{node.places.disabled}: INC-42: look \\x1b[31minto it"
    assert ran.outcome.detail == why
    assert node.lease(8) is None
    assert node.shows_entry(path, node.identity(path).key), "the running job keeps what it has"
    assert node.epilog(7).said == ("released", "")
    assert node.shows_source(path)
    node.places.disabled.unlink()
    assert node.prolog(9, path).said == ("hit", "")


def spoil(node: Node, how: str) -> None:
    if "off" in how:
        node.places.disabled.touch()
    if "broken" in how:
        node.write_config("cache: [")
    if how == "disabled":
        node.configure(enabled=False)
    if how == "format":
        (node.cache.root / "format").write_text("2\n")
    if how == "not-ours":
        node.nvme.chmod(0o777)


@pytest.mark.parametrize("how", ["off", "broken", "off broken", "disabled", "format", "not-ours"])
def test_prolog_that_serves_nothing_unmounts_an_outdated_redirect_of_a_running_job(
    node: Node, how: str
) -> None:
    path = node.put("alice/image.sqsh", content(1))
    assert node.prolog(7, path).said == ("copied", "")
    node.put("alice/image.sqsh", content(2))
    assert path.read_bytes() == content(1)
    spoil(node, how)
    assert node.prolog(8, path).outcome.result in ("declined", "failed")
    assert path.read_bytes() == content(2)


@pytest.mark.parametrize("kind", ["empty", "binary", "directory", "fifo", "link", "huge"])
def test_switch_file_of_any_type_switches_off_even_with_a_broken_configuration(
    node: Node, kind: str
) -> None:
    path, file = node.put("alice/image.sqsh"), node.places.disabled
    node.write_config("enabled: [")
    file.parent.mkdir(parents=True)
    {
        "empty": file.touch,
        "binary": lambda: file.write_bytes(b"\xff\0\n"),
        "directory": file.mkdir,
        "fifo": lambda: os.mkfifo(file),
        "link": lambda: file.symlink_to("/nowhere"),
        "huge": lambda: file.write_bytes(b"x" * 1_000_000),
    }[kind]()
    ran = node.prolog(7, path)
    assert ran.ended == (0, "declined", "disabled")
    assert len(ran.outcome.detail) < 1000
    assert not node.cache.root.exists()


@pytest.mark.parametrize("disabled", [False, True])
def test_stage_off_stages_nothing_and_is_recorded_for_the_jobs_steps(
    node: Node, disabled: bool
) -> None:
    path = node.put("alice/image.sqsh")
    if disabled:
        node.switch_off()
    ran = node.prolog(7, path, comment="stage=off")
    assert ran.ended == (0, "declined", "disabled" if disabled else "off")
    assert (node.binds(), node.entries()) == ({}, set())
    assert (node.leases.read_notes(7).off, node.held(7).uses) == (True, ())


def test_stage_off_unmounts_an_outdated_redirect(node: Node) -> None:
    path = node.staged(1)
    (node.server / "alice/image.sqsh").write_bytes(content(2))
    node.prolog(2, path, comment="stage=off")
    assert path.read_bytes() == content(2)


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("stage-wiat=10m", "unknown hint stage-wiat="),
        ("stage-wait=soon", "stage-wait: expected a duration"),
        ("stage=", "names no image"),
        ("stage-\n\x1b[31m=x", ""),
        ("stage-x=1 " * 1000, "unknown hint stage-x="),
        ("stage-" + "x" * 10_000 + "=1", "unknown hint"),
        (" ".join(f"stage-x{n}=1" for n in range(1000)), "unknown hint"),
        ("x" * 10_000 + " stage", ""),
        ("stage-\udcff=1", ""),
        ("stage=/\udcff stage-\udcff=1", ""),
    ],
)
def test_wrong_hint_is_reported_and_the_image_is_staged(
    node: Node, capfd: pytest.CaptureFixture[str], comment: str, problem: str
) -> None:
    path = node.put("alice/image.sqsh")
    ran = node.prolog(7, path, comment=comment)
    assert (ran.code, ran.outcomes[0].result) == (0, "copied")
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert line[:-1].isprintable()
    assert problem in line
    event = next(
        event for event in events.read_events(node.places.events) if event.hook == "prolog"
    )
    assert problem in "; ".join(event.problems)
    assert len(line) < 8000
    assert node.places.events.stat().st_size < 8000


def test_bad_hint_without_an_image_gets_a_declined_outcome(node: Node) -> None:
    assert node.prolog(7, comment="stage-wait=soon").said == ("declined", "bad-hint")
    assert node.prolog(8, comment="the stage is set").outcomes == ()


def test_missing_image_of_a_comment_does_not_stop_the_other_image(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    ran = node.prolog(7, comment=f"stage={node.shared}/alice/missing.sqsh,{path}")
    assert [outcome.result for outcome in ran.outcomes] == ["declined", "copied"]
    assert set(node.binds()) == {str(path)}
