"""Nobody reads through the cache what the shared file system would not give, and all it gives."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from node import ALICE, BOB, Node, content, read_as

SQUASHED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def cache_files(node: Node) -> list[Path]:
    return [path for path in node.cache.root.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("name", "mode", "folder_mode"),
    [("alice/image.sqsh", 0o600, 0o755), ("alice/private/image.sqsh", 0o644, 0o700)],
)
def test_another_user_can_read_neither_a_private_image_nor_its_copy(
    node: Node, name: str, mode: int, folder_mode: int
) -> None:
    path = node.put(name, mode=mode)
    (node.server / name).parent.chmod(folder_mode)
    assert node.prolog(1, path).outcome.result == "copied"

    (node.server / "link").symlink_to(path)
    for asked in (path, "./link"):
        assert node.prolog(2, asked, user=BOB).ended == (0, "declined", "no-permission")
        assert read_as(BOB, path) is None
        assert all(read_as(BOB, file) is None for file in cache_files(node))
        assert node.lease(2) is None
        assert read_as(ALICE, path) == content()
    # Nor does he find the files of the node that name it.
    files = set(node.places.root.rglob("*.json")) - {node.places.config_names}
    assert all(read_as(BOB, file) is None for file in files)
    assert read_as(BOB, node.places.events) is None


def test_image_that_the_user_may_not_read_is_not_copied(node: Node) -> None:
    path = node.put("alice/image.sqsh", mode=0o600)
    assert node.prolog(1, path, user=BOB).said == ("declined", "no-permission")
    assert node.entries() == set()
    assert node.prolog(2, path, user=ALICE).outcome.result == "copied"


@pytest.mark.cases(2)
@pytest.mark.parametrize("asked", ["alice/image.sqsh", "./alice/image.sqsh", "alice/link"])
def test_rights_removed_from_a_redirected_source_are_denied_to_the_next_job(
    node: Node, asked: str
) -> None:
    path = node.put("alice/image.sqsh", mode=0o644)
    (node.server / "alice/link").symlink_to("image.sqsh")
    node.prolog(1, path, user=BOB)
    assert read_as(BOB, path) == content()
    (node.server / "alice/image.sqsh").chmod(0o600)

    asked = asked if asked.startswith(".") else f"{node.shared}/{asked}"
    assert node.prolog(2, asked, user=BOB).said == ("declined", "no-permission")

    assert node.binds() == {}
    assert read_as(BOB, path) is None
    # The owner's next job gets a copy that shows the new rights.
    assert node.prolog(3, path).outcome.result == "copied"
    assert read_as(ALICE, path) == content()
    assert read_as(BOB, path) is None


def test_redirect_of_an_evicted_entry_is_unreadable_for_a_user_without_rights_on_the_source(
    node: Node,
) -> None:
    path = node.put("alice/image.sqsh", mode=0o644)
    node.prolog(1, path)
    source = node.server / "alice/image.sqsh"
    source.write_bytes(content(2))
    assert node.prolog(2, path, user=BOB).outcome.redirect == "mounted"
    key = node.prolog(2, path, user=BOB).outcome.key
    node.epilog(2)
    assert path.as_posix() in node.binds(), "job 1 still has a lease that names the path"
    shutil.rmtree(node.cache.entry_dir(key))
    source.chmod(0o600)

    assert node.prolog(3, path, user=BOB).said == ("declined", "no-permission")

    assert read_as(BOB, path) is None


def test_rights_added_to_a_redirected_source_are_granted_to_the_next_job(node: Node) -> None:
    path = node.put("alice/image.sqsh", mode=0o600)
    node.prolog(1, path)
    (node.server / "alice/image.sqsh").chmod(0o640)
    os.chown(node.server / "alice/image.sqsh", ALICE.uid, BOB.gid)
    ran = node.prolog(2, path, user=BOB)
    assert (ran.outcome.result, ran.outcome.redirect) == ("copied", "mounted")
    assert read_as(BOB, path) == content()


def test_copy_of_a_group_readable_source_serves_a_member_of_that_group(node: Node) -> None:
    path = node.put("alice/image.sqsh", mode=0o640)
    os.chown(node.server / "alice/image.sqsh", ALICE.uid, BOB.gid)
    node.prolog(1, path)
    ran = node.prolog(2, path, user=BOB)
    assert ran.said == ("hit", "")
    assert node.shows_entry(path, ran.outcome.key)
    assert read_as(BOB, path) == content()


def test_acl_of_the_source_is_mirrored_on_the_copy(node: Node) -> None:
    path = node.put("alice/image.sqsh", mode=0o600)
    subprocess.run(
        ["setfacl", "-m", f"u:{BOB.uid}:r", node.server / "alice/image.sqsh"], check=True
    )

    def acl(file: Path) -> str:
        argv = ["getfacl", "-nc", "--absolute-names", file]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    ran = node.prolog(1, path, user=BOB)

    assert node.shows_entry(path, ran.outcome.key)
    assert f"user:{BOB.uid}:r--" in acl(path)
    assert acl(path) == acl(node.server / "alice/image.sqsh")
    assert read_as(BOB, path) == content()
    assert node.prolog(2, path, user=ALICE).outcome.result == "hit"


def test_sticky_bit_is_mirrored_and_the_redirect_is_nosuid(node: Node) -> None:
    path = node.put("alice/image.sqsh", mode=0o1755)  # with a set-id bit it would be declined
    node.prolog(1, path)
    assert path.stat().st_mode & 0o7777 == 0o1755
    assert os.statvfs(path).f_flag & os.ST_NOSUID


def test_another_users_file_is_never_mounted_over_a_jobs_own(node: Node) -> None:
    secret = node.put("alice/secret.sqsh", mode=0o600)
    node.prolog(1, secret)
    mine = node.put("bob/image.sqsh", content(2), user=BOB)
    key = node.prolog(2, mine, user=BOB).outcome.key
    assert node.shows_entry(mine, key)
    assert read_as(BOB, mine) == content(2)
    # Renaming his folder takes the redirect along, and nothing else into it.
    (node.server / "bob").rename(node.server / "robert")
    assert node.prolog(3, node.shared / "robert/image.sqsh", user=BOB).code == 0
    assert read_as(BOB, node.shared / "robert/image.sqsh") == content(2)
    assert read_as(BOB, secret) is None
    node.epilog(2)
    node.epilog(3)
    assert set(node.binds()) == {str(secret)}


def test_image_with_a_very_long_acl_is_staged_or_declined(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    user, named, group, mask, other = 0x01, 0x02, 0x04, 0x10, 0x20
    entries = [(user, 6, 0xFFFFFFFF)]
    entries += [(named, 4, 100_000 + number) for number in range(8000)]
    entries += [(tag, 4, 0xFFFFFFFF) for tag in (group, mask, other)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(node.server / "alice/image.sqsh", "system.posix_acl_access", acl)
    assert node.prolog(1, path).outcome.result in ("copied", "declined")


def _squashed(node: Node, hook: str) -> None:
    """Runs `node.<hook>` as on a shared file system that squashes root, who is nobody there."""
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path; from node import Node\n"
        f"node = Node(Path(sys.argv[3])); node.{hook}\n"
    )
    folders = [Path(__file__).parents[1], Path(sys.modules["forestage"].__path__[0]).parent]
    argv = [*SQUASHED, sys.executable, "-c", script, *map(str, folders), str(node.shared.parent)]
    subprocess.run(argv, check=True)


def test_image_in_a_directory_closed_to_root_is_staged_checked_and_released(
    node: Node,
) -> None:
    path = node.put("alice/image.sqsh", content(1))
    (node.server / "alice").chmod(0o700)
    for job in (1, 2):
        (node.server / "alice/image.sqsh").write_bytes(content(job))
        _squashed(node, f"prolog({job}, node.shared / 'alice/image.sqsh')")
        assert set(node.binds()) == {str(path)}
        assert read_as(ALICE, path) == content(job)
    for job in (1, 2):
        _squashed(node, f"epilog({job})")
    assert node.binds() == {}
