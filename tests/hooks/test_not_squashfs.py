"""Files that are no squashfs images: nobody makes another user's data read-only for the node.

Which bytes are an image: unit/cache/test_source_image.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import squashfs
from node import BOB, Node, content

LOG = b"step 1\n" * 100
WAYS = ("option", "hint")


def ask(node: Node, job: int, path: Path, way: str) -> tuple[str, str]:
    if way == "option":
        return node.prolog(job, path).said
    return node.prolog(job, comment=f"stage={path}").said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("data", [LOG, squashfs.MAGIC, squashfs.MAGIC + bytes(1000)])
def test_other_users_file_that_is_no_squashfs_is_declined_and_stays_writable(
    node: Node, way: str, data: bytes
) -> None:
    path = node.put("bob/progress.log", data, user=BOB)
    assert ask(node, 1, path, way) == ("declined", "not-squashfs")
    assert (node.binds(), node.entries(), node.parts(), node.lease(1)) == ({}, set(), [], None)
    with path.open("ab") as log:
        log.write(b"step 2\n")
    assert path.read_bytes() == data + b"step 2\n"
    path.rename(path.with_name("moved"))
    path.with_name("moved").unlink()


def test_other_users_program_keeps_its_setuid_bit(node: Node) -> None:
    path = node.put("apps/starter", b"\x7fELF" + bytes(1000), user=BOB, mode=0o4755)
    assert ask(node, 1, path, "hint") == ("declined", "not-squashfs")
    assert node.shows_source(path)


def test_image_replaced_by_a_plain_file_loses_the_redirect_of_a_running_job(node: Node) -> None:
    path = node.staged(1)
    node.put("alice/image.sqsh", LOG)
    assert ask(node, 2, path, "option") == ("declined", "not-squashfs")
    assert path.read_bytes() == LOG


def test_entry_copied_with_redirect_none_is_not_bound_if_no_squashfs(node: Node) -> None:
    node.configure(redirect="none")
    path = node.put("bob/data", LOG, user=BOB)
    assert node.prolog(1, path).outcome.result == "copied"
    node.configure(redirect="bind")
    assert ask(node, 2, path, "option") == ("declined", "not-squashfs")
    assert node.binds() == {}


@pytest.mark.parametrize(("redirect", "result"), [("spank", "started"), ("none", "copied")])
def test_file_that_is_no_squashfs_is_staged_unless_redirect_is_bind(
    node: Node, redirect: str, result: str
) -> None:
    node.configure(redirect=redirect)
    path = node.put("alice/data", LOG)
    assert node.prolog(1, path).outcome.result == result
    assert node.shows_source(path)


def test_file_that_is_no_squashfs_is_staged_in_a_partition_with_redirect_none(node: Node) -> None:
    node.configure(redirect="bind", partitions={"batch": {"redirect": "none"}})
    assert node.prolog(1, node.put("alice/data", LOG)).outcome.result == "copied"
    assert node.prolog(2, node.put("alice/image.sqsh", content())).outcome.result == "copied"
    assert node.binds() == {}


def test_image_open_for_writing_is_declined_and_stays_writable(node: Node) -> None:
    path = node.put("bob/new.sqsh", content(), user=BOB)
    with path.open("r+b") as written:
        assert ask(node, 1, path, "hint") == ("declined", "written")
        written.write(b"h")
    assert (node.binds(), node.entries()) == ({}, set())
    assert ask(node, 2, path, "hint") == ("copied", "")


def test_image_with_a_set_id_bit_is_not_redirected(node: Node) -> None:
    path = node.put("bob/odd.sqsh", content(), user=BOB, mode=0o4755)
    assert ask(node, 1, path, "hint") == ("declined", "set-id")
    assert node.shows_source(path)


def test_image_in_a_directory_that_the_user_cannot_list_is_not_redirected(node: Node) -> None:
    path = node.put("bob/image.sqsh", content(), user=BOB)
    (node.server / "bob").chmod(0o711)
    assert ask(node, 1, path, "hint") == ("declined", "unlisted")
    assert node.prolog(2, path, user=BOB).said == ("copied", "")


def test_redirect_auto_binds_for_the_node_only_without_the_companion(node: Node) -> None:
    node.configure(redirect=None)
    (node.places.root / "plugstack.conf").write_text("optional /opt/forestage.so\n")
    path = node.put("bob/progress.log", LOG, user=BOB)
    assert ask(node, 1, path, "hint") == ("declined", "not-squashfs")
    node.places.run.mkdir(parents=True, exist_ok=True)
    node.places.loaded.touch()  # as the companion does it
    assert ask(node, 2, path, "hint") == ("started", "")
    assert node.binds() == {}
    (node.places.root / "plugstack.conf").write_text("")
    image = node.put("bob/image.sqsh", content(), user=BOB)
    assert ask(node, 3, image, "hint") == ("copied", "")
    assert node.binds() == {str(image): node.identity(image).key}


def test_unreadable_plugstack_mounts_no_redirect_and_is_logged_once(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """The companion, which is loaded, shows the job its copy."""
    node.configure(redirect=None)
    node.places.run.mkdir(parents=True, exist_ok=True)
    node.places.loaded.touch()
    stack = node.places.root / "plugstack.conf"
    stack.symlink_to(stack)
    image = node.put("bob/image.sqsh", content(), user=BOB)
    assert node.prolog(1, image, user=BOB).code == 0
    assert node.binds() == {}
    (line,) = [one for one in capfd.readouterr().err.splitlines() if "slurm-conf" in one]
    assert f"reason=slurm-conf detail='{stack} cannot be read: Too many levels" in line
    assert node.epilog(1).code == 0
    assert "slurm-conf" not in capfd.readouterr().err


def test_plugstack_with_bytes_that_are_not_utf8_still_shows_the_companion(node: Node) -> None:
    node.configure(redirect=None)
    node.places.run.mkdir(parents=True, exist_ok=True)
    node.places.loaded.touch()
    stack = node.places.root / "plugstack.conf"
    stack.write_bytes(b"# f\374r M\374ller\noptional /opt/forestage.so\n")
    path = node.put("bob/progress.log", LOG, user=BOB)
    assert ask(node, 1, path, "hint") == ("started", "")
    assert node.binds() == {}
