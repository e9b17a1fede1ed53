"""What is not staged: the job goes on with its original path, and a user's mistake never drains."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import pytest

from forestage import events
from forestage.clock import Clock
from forestage.hooks import prolog
from forestage.hooks.boundary import Hook
from node import ALICE, BOB, Node, content


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
    with open(node.put("alice/it"), "r+b") as file:
        file.truncate(1 << 40)
    node.configure(on_error="drain")
    return str(node.shared / "alice/it")


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


@pytest.mark.parametrize(
    ("make", "reason"), REQUESTS, ids=[f"{n}-{reason}" for n, (_, reason) in enumerate(REQUESTS)]
)
def test_what_a_user_asks_for_is_declined_and_never_drains_the_node(
    node: Node, capfd: pytest.CaptureFixture[str], make: Callable[[Node], str], reason: str
) -> None:
    node.configure(max_image_size="1M", on_error="drain")
    asked = make(node)
    ran = node.prolog(7, asked)
    assert (ran.code, *ran.said) == (0, "declined", reason)
    assert ran.outcome.detail
    assert node.binds() == {}
    assert node.entries() == set()
    assert node.lease(7) is None
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert line[:-1].isprintable()
    assert len(line) < 8000


def test_without_sources_nothing_is_staged(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    node.configure(sources=None)
    assert node.prolog(7, path).said == ("declined", "outside-sources")


def test_enabled_false_does_nothing_at_all(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    node.configure(enabled=False)
    assert node.prolog(7, path).said == ("declined", "disabled")
    assert not node.cache.root.exists()


def test_the_file_switches_all_off_at_the_next_hook_and_says_why(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    assert node.prolog(7, path).said == ("copied", "")
    node.places.disabled.write_text("INC-42: look \x1b[31minto it\nand more\n")
    ran = node.prolog(8, path)
    assert (ran.code, *ran.said) == (0, "declined", "disabled")
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
def test_a_job_that_is_not_served_reads_no_older_bytes_of_a_running_ones(
    node: Node, how: str
) -> None:
    path = node.put("alice/image.sqsh", content(1))
    assert node.prolog(7, path).said == ("copied", "")
    node.put("alice/image.sqsh", content(2))
    assert path.read_bytes() == content(1)
    spoil(node, how)
    ran = node.prolog(8, path)
    assert ran.code == 0
    assert ran.outcome.result in ("declined", "failed")
    assert path.read_bytes() == content(2)


def test_what_fails_while_staging_is_switched_off_drains_no_node(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade switches it off while old and new code may meet."""
    path = node.put("alice/image.sqsh")
    node.configure(on_error="drain")
    monkeypatch.setattr(prolog, "prolog", None)
    node.places.disabled.parent.mkdir(parents=True)
    node.places.disabled.touch()
    hook = Hook("prolog", node.environ(7, path), time.monotonic())
    with pytest.raises(TypeError):
        hook.run(node.places, Clock())
    assert not hook.drains


def test_stage_off_is_remembered_for_the_steps_while_staging_is_switched_off(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    node.places.disabled.parent.mkdir(parents=True)
    node.places.disabled.touch()
    node.prolog(7, path, comment="stage=off")
    lease = node.lease(7)
    assert lease is not None
    assert lease.off


@pytest.mark.parametrize("kind", ["empty", "binary", "directory", "fifo", "link", "huge"])
def test_whatever_the_file_is_it_switches_off_and_holds_nobody_up(node: Node, kind: str) -> None:
    path, file = node.put("alice/image.sqsh"), node.places.disabled
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
    assert (ran.code, *ran.said) == (0, "declined", "disabled")
    assert len(ran.outcome.detail) < 1000
    assert not node.cache.root.exists()


def test_the_file_works_where_the_configuration_is_broken(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    node.write_config("on_error: drain\nenabled: [")
    node.places.disabled.parent.mkdir(parents=True)
    node.places.disabled.touch()
    ran = node.prolog(7, path)
    assert (ran.code, *ran.said) == (0, "declined", "disabled")


def test_a_partition_can_be_left_alone(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    node.configure(partitions={"batch": {"enabled": False}})
    assert node.prolog(7, path).said == ("declined", "disabled")


def test_stage_off_leaves_the_job_alone(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    ran = node.prolog(7, path, comment="stage=off")
    assert (ran.code, *ran.said) == (0, "declined", "off")
    assert node.binds() == {}
    assert node.entries() == set()
    lease = node.lease(7)
    assert lease is not None
    assert (lease.off, lease.uses) == (True, ())


def test_stage_off_still_shows_the_source_and_not_an_older_copy(node: Node) -> None:
    path = node.put("alice/image.sqsh", content(1))
    node.prolog(1, path)
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
        ("x" * 10_000 + " stage", ""),
    ],
)
def test_a_wrong_hint_is_reported_and_the_image_staged_all_the_same(
    node: Node, capfd: pytest.CaptureFixture[str], comment: str, problem: str
) -> None:
    node.configure(on_error="drain")
    path = node.put("alice/image.sqsh")
    ran = node.prolog(7, path, comment=comment)
    assert (ran.code, ran.outcome.result) == (0, "copied")
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert line[:-1].isprintable()
    assert problem in line
    (event,) = [event for event in events.read(node.places.events) if event.hook == "prolog"]
    assert problem in "; ".join(event.problems)


@pytest.mark.parametrize(
    "comment", [" ".join(f"stage-x{n}=1" for n in range(1000)), "stage-" + "x" * 10_000 + "=1"]
)
def test_a_long_comment_makes_no_long_log_line_and_no_long_event(
    node: Node, capfd: pytest.CaptureFixture[str], comment: str
) -> None:
    node.prolog(7, node.put("alice/image.sqsh"), comment=comment)
    assert len(capfd.readouterr().err) < 8000
    assert node.places.events.stat().st_size < 8000


@pytest.mark.parametrize("comment", ["stage-\udcff=1", "stage=/\udcff stage-\udcff=1"])
def test_a_comment_that_is_no_text_gets_its_outcome_like_any_other(
    node: Node, comment: str
) -> None:
    node.configure(on_error="drain")
    assert node.prolog(7, node.put("alice/image.sqsh"), comment=comment).code == 0


def test_a_hint_with_nothing_to_stage_gets_an_outcome(node: Node) -> None:
    assert node.prolog(7, comment="stage-wait=soon").said == ("declined", "bad-hint")
    assert node.prolog(8, comment="the stage is set").outcomes == ()


def test_one_image_that_is_missing_does_not_keep_the_other_from_being_staged(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    ran = node.prolog(7, comment=f"stage={node.shared}/alice/missing.sqsh,{path}")
    assert [outcome.result for outcome in ran.outcomes] == ["declined", "copied"]
    assert set(node.binds()) == {str(path)}


@pytest.mark.parametrize(("kind", "reason"), [("file", "missing"), ("loop", "bad-path")])
def test_a_folder_swapped_during_the_copy_is_the_users_doing(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    from forestage.cache import redirect

    node.configure(on_error="drain")
    path = node.put("alice/sub/image.sqsh")
    folder = node.server / "alice/sub"
    mount = redirect.mount

    def swapped(*args: object) -> object:
        folder.rename(node.server / "alice/old")
        folder.write_text("") if kind == "file" else folder.symlink_to("sub")
        return mount(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(redirect, "mount", swapped)
    ran = node.prolog(7, path)
    assert (ran.code, *ran.said) == (0, "declined", reason)
    assert node.binds() == {}
    assert node.lease(7) is None


def test_a_symlink_put_in_the_way_of_the_redirect_is_not_followed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forestage.cache import redirect

    path = node.put("alice/sub/image.sqsh")
    victim = node.put("bob/sub/image.sqsh", content(2), user=BOB, mode=0o600)
    mount = redirect.mount

    def swapped(*args: object) -> object:
        (node.server / "alice/sub").rename(node.server / "alice/old")
        (node.server / "alice/sub").symlink_to(victim.parent)
        return mount(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(redirect, "mount", swapped)
    # The second look follows it as the job itself would, with no more rights.
    assert node.prolog(7, path, user=ALICE).said == ("declined", "no-permission")
    assert node.binds() == {}
    assert victim.read_bytes() == content(2)
