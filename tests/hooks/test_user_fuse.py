"""A job's owner may mount a file system of his own, which is whatever he wants it to be."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.bind import unmount
from forestage.features.data import data_view
from forestage.system import mounts
from forestage.system.as_user import User
from node import ALICE, BOB, Arrange, Node, content, read_as, until


def users_may_mount(node: Node) -> None:
    """Device and configuration as they may be on a site's machines."""
    device, conf = node.server / "fuse", node.server / "fuse.conf"
    os.mknod(device, stat.S_IFCHR, os.makedev(10, 229))
    device.chmod(0o666)
    mounts.mount(str(device), "/dev/fuse", mounts.MS_BIND)
    conf.write_text("user_allow_other\n")
    mounts.mount(str(conf), "/etc/fuse.conf", mounts.MS_BIND)


class Own:
    """Alice's squashfuse, in her folder, of a squashfs with an image; as `user`."""

    def __init__(self, node: Node, folder: Path, *options: str, user: User = ALICE) -> None:
        node.put("alice/own/below", b"")
        self.point = node.shared / "alice/own"
        self.image = self.point / "image.sqsh"
        file = node.server / "alice/own.sqsh"
        (folder / "image.sqsh").write_bytes(content(5))
        os.chown(folder / "image.sqsh", ALICE.uid, ALICE.gid)
        os.utime(folder / "image.sqsh", (1e9, 1e9))
        subprocess.run(["mksquashfs", folder, file, "-quiet", "-no-progress"], check=True)
        users_may_mount(node)
        self.server = self.serve(file, self.point, *options, user=user)

    @staticmethod
    def serve(
        file: Path, point: Path, *options: str, user: User = ALICE
    ) -> subprocess.Popen[bytes]:
        server = subprocess.Popen(
            ["squashfuse", "-f", *options, file, point],
            user=user.uid,
            group=user.gid,
            extra_groups=[],
        )
        # Root may not look in.
        until(lambda: f" {point} " in Path("/proc/self/mounts").read_text(), "the mount")
        return server

    def end(self) -> None:
        self.server.kill()
        self.server.wait()


@pytest.fixture
def mount(node: Node, tmp_path: Path) -> Iterator[Callable[..., Own]]:
    made: list[Own] = []

    def mounting(*options: str, user: User = ALICE) -> Own:
        made.append(Own(node, tmp_path, *options, user=user))
        return made[-1]

    yield mounting
    for own in made:
        own.end()


def test_image_in_a_users_private_fuse_mount_is_declined_and_the_mount_stays(
    node: Node, mount: Callable[..., Own]
) -> None:
    own = mount()
    for job, user in ((1, ALICE), (2, BOB)):
        assert node.prolog(job, own.image, user=user).ended == (0, "declined", "no-permission")
        assert node.epilog(job).code == 0
    assert read_as(ALICE, own.image) == content(5)
    assert (read_as(BOB, own.image), node.entries()) == (None, set())


def test_image_in_a_users_fuse_mount_with_allow_other_is_declined(
    node: Node, mount: Callable[..., Own]
) -> None:
    """It may lie in a directory that a group writes to, over files of others; and says of its files
    what its user likes, also when the stager looks again."""
    own = mount("-o", "allow_other")
    assert node.prolog(1, own.image).ended == (0, "declined", "bad-path")
    assert read_as(BOB, own.image) == content(5)
    node.configure(redirect="spank")
    node.prolog(2, comment=f"stage={own.point}/")

    def is_declined() -> bool:
        tree = data_view.read_job_data(node.leases, 2).trees[f"{own.point}/"]
        return (tree.state, tree.reason) == ("declined", "bad-path")

    until(is_declined, "the directory to be declined")
    assert node.entries() == set()


@contextlib.contextmanager
def forged(node: Node, program: Path) -> Iterator[Path]:
    """Alice's FUSE over a directory of hers, in which Bob's image has the same identity and other
    bytes; its path."""
    path = node.put("proj/images/tools/tool.sqsh", user=BOB)
    above, control = node.server / "proj", node.places.root / "control"
    own_program = shutil.copy(program, node.places.root / "farfs")
    os.chown(above, ALICE.uid, ALICE.gid)
    users_may_mount(node)
    control.write_text("forges 1\n")
    calls = control.with_name("control.calls")
    calls.touch()
    calls.chmod(0o666)
    point = node.shared / "proj"
    options = "allow_other,default_permissions"
    ids = {"user": ALICE.uid, "group": ALICE.gid, "extra_groups": []}
    server = subprocess.Popen([own_program, above, control, point, options], **ids)  # type: ignore[call-overload]
    until(lambda: f" {point} " in Path("/proc/self/mounts").read_text(), "the mount")
    yield path
    mounts.umount(str(point))
    server.wait()


@pytest.mark.cases(2)
@pytest.mark.parametrize("source", ["proj/images", "proj", "."])
def test_file_in_a_users_fuse_mount_is_declined_wherever_the_sources_are(
    node: Node, farfs: Path, source: str
) -> None:
    """What it says of Bob's file is what the file is, but for its bytes."""
    sources = [str(node.shared / source)]
    with forged(node, farfs) as path:
        facts = [os.stat(file) for file in (path, node.server / "proj/images/tools/tool.sqsh")]
        assert (
            len({(one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in facts}) == 1
        )
        assert read_as(BOB, path) != content()
        node.configure(sources=sources)
        assert node.prolog(1, path).ended == (0, "declined", "bad-path")
        node.configure(sources=sources, redirect="spank")
        node.prolog(2, comment=f"stage={path.parent}/")

        def is_declined() -> bool:
            tree = data_view.read_job_data(node.leases, 2).trees[f"{path.parent}/"]
            return (tree.state, tree.reason) == ("declined", "bad-path")

        until(is_declined, "the directory to be declined")
        assert node.entries() == set()
    node.configure(sources=sources)
    assert node.prolog(3, path, user=BOB).said == ("copied", "")
    assert read_as(BOB, path) == content()


@pytest.mark.parametrize(
    ("kind", "uid", "said"),
    [
        ("fuse.squashfuse", ALICE.uid, ("copied", "")),
        ("fuse.squashfuse", BOB.uid, ("declined", "bad-path")),
        ("fuse.other", ALICE.uid, ("declined", "bad-path")),
    ],
)
def test_image_in_a_fuse_mount_listed_in_user_mounts_is_staged(
    node: Node, mount: Callable[..., Own], kind: str, uid: int, said: tuple[str, str]
) -> None:
    own = mount("-o", "allow_other")
    node.configure(sources=[str(own.point)], user_mounts={str(own.point): f"{kind} {uid}"})
    assert node.prolog(1, own.image).said == said
    assert node.epilog(1).code == 0
    assert node.binds() == {}


def test_hanging_or_dead_fuse_mount_of_a_user_delays_no_hook(
    node: Node, mount: Callable[..., Own]
) -> None:
    # Names are known for long: else, once a second is over, the Epilog has to ask for them.
    own = mount("-o", "allow_other,entry_timeout=3600,attr_timeout=3600")
    services = {str(own.point): f"fuse.squashfuse {ALICE.uid}"}
    keys = {"sources": [str(own.point)], "user_mounts": services}
    node.configure(**keys)
    assert node.prolog(1, own.image).outcome.result == "copied"
    assert read_as(ALICE, own.image) == content(5)
    own.server.send_signal(signal.SIGSTOP)
    # The redirect lies on a file system that does not answer.
    assert node.epilog(1).outcome.unmounted == 1
    assert node.binds() == {}
    node.configure(**keys, deadline="1s")
    assert node.prolog(2, own.image).ended == (0, "declined", "source-hangs")
    own.end()
    node.configure(**keys)
    assert node.prolog(3, own.image).ended == (0, "declined", "source-error")
    assert [node.epilog(job).code for job in (2, 3)] == [0, 0]


# --- over a directory in which a redirect lies


def shown(own: Own) -> list[int]:
    """The uids of those whose file systems lie on that directory."""
    point = str(own.point)
    return [one.fuse_owner_uid for one in mounts.list_mounts() if one.point == point]


@pytest.mark.cases(2)
@pytest.mark.parametrize("harm", [signal.SIGCONT, signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("options", [(), ("-o", "allow_other")])
def test_redirect_below_a_users_fuse_mount_is_unmounted_and_the_fuse_mount_stays(
    node: Node, mount: Callable[..., Own], harm: int, options: tuple[str, ...]
) -> None:
    """Whether its server is well, stopped or dead; another job of hers may be at work in it."""
    path, other = node.staged(1, "alice/own/image.sqsh"), node.staged(2, "alice/other.sqsh")
    own = mount(*options)
    own.server.send_signal(harm)
    if harm == signal.SIGKILL:
        own.server.wait()
    assert node.epilog(2).said == ("released", "")
    assert set(node.binds()) == {str(path)}, "a job still needs it"
    assert (node.epilog(1).said, node.binds()) == (("released", ""), {})
    assert shown(own) == [ALICE.uid]
    assert not other.samefile(node.cache.image_path(node.identity(other).key))
    if harm == signal.SIGCONT:
        assert read_as(ALICE, own.image) == content(5)
    flags = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "own" in line]
    assert all("nosuid,nodev" in line for line in flags)


def test_redirect_below_two_fuse_mounts_of_a_user_is_unmounted(
    node: Node, mount: Callable[..., Own]
) -> None:
    node.staged(1, "alice/own/image.sqsh")
    own = mount()
    outer = own.serve(node.shared / "alice/own.sqsh", node.shared / "alice")
    try:
        outer.send_signal(signal.SIGSTOP)
        assert (node.epilog(1).said, node.binds()) == (("released", ""), {})
        found = {one.point for one in mounts.list_mounts() if one.fuse_owner_uid == ALICE.uid}
        assert found == {str(own.point), str(own.point.parent)}
    finally:
        outer.kill()
        outer.wait()


def test_fuse_mount_of_root_over_a_redirect_is_not_moved(
    node: Node, mount: Callable[..., Own]
) -> None:
    path = node.staged(1, "alice/own/image.sqsh")
    own = mount("-o", "allow_other", user=User("root", 0, 0))
    assert node.epilog(1).outcome.reason == "redirect"
    assert (shown(own), set(node.binds())) == ([0], {str(path)})


def test_mount_of_root_over_a_users_fuse_mount_is_not_moved(
    node: Node, mount: Callable[..., Own]
) -> None:
    path = node.staged(1, "alice/own/image.sqsh")
    own = mount("-o", "allow_other")
    mounts.mount("none", str(own.point), 0, "tmpfs")
    assert node.epilog(1).outcome.reason == "redirect"
    assert (shown(own), set(node.binds())) == ([ALICE.uid, 0], {str(path)})


@pytest.mark.cases(2)
@pytest.mark.parametrize("swap", ["link", "directory", "another mount"])
def test_users_fuse_mount_is_not_put_back_on_a_swapped_path(
    node: Node, mount: Callable[..., Own], before: Arrange, swap: str
) -> None:
    """Root walks to where it was; its user may have put a link there, or another's directory."""
    node.staged(1, "alice/own/image.sqsh")
    own, victim = mount(), node.put("bob/sub/file", user=BOB).parent

    home = node.places.root / "home"  # not on the shared file system
    (home / "own").mkdir(parents=True)
    os.chown(home / "own", ALICE.uid, ALICE.gid)

    def swapped() -> None:
        if swap == "another mount":
            (node.server / "alice").rename(node.server / "away")
            (node.server / "alice").symlink_to(home)
            return
        (node.server / "alice/own").rename(node.server / "alice/away")
        if swap == "link":
            (node.server / "alice/own").symlink_to(victim)
        else:
            (node.server / "bob/sub").rename(node.server / "alice/own")

    before(unmount, "_put_user_mount_back", swapped)
    node.epilog(1)
    assert node.binds() == {}
    assert shown(own) == []
    assert [one for one in mounts.list_mounts() if one.fuse_owner_uid] == []


def test_redirect_stays_if_the_fuse_mount_above_cannot_be_cloned(
    node: Node, mount: Callable[..., Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(path: str) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    path = node.staged(1, "alice/own/image.sqsh")
    own = mount()
    with monkeypatch.context() as patch:
        patch.setattr(mounts, "clone_mount", missing)
        assert node.epilog(1).said == ("released", "redirect")
    assert (shown(own), set(node.binds())) == ([ALICE.uid], {str(path)})
    node.epilog(1)
    assert (shown(own), node.binds()) == ([ALICE.uid], {})
