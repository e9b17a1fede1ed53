"""A job's owner may mount a file system of his own, which is whatever he wants it to be."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.system import mounts
from node import ALICE, BOB, Node, content, read_as, until


class Own:
    """Alice's squashfuse, in her folder, of a squashfs with an image."""

    def __init__(self, node: Node, folder: Path, *options: str) -> None:
        node.put("alice/own/below", b"")
        self.point = node.shared / "alice/own"
        self.image = self.point / "image.sqsh"
        file = node.server / "alice/own.sqsh"
        (folder / "image.sqsh").write_bytes(content(5))
        os.chown(folder / "image.sqsh", ALICE.uid, ALICE.gid)
        os.utime(folder / "image.sqsh", (1e9, 1e9))
        subprocess.run(["mksquashfs", folder, file, "-quiet", "-no-progress"], check=True)
        # Both as they may be on a site's machines.
        device, conf = node.server / "fuse", node.server / "fuse.conf"
        os.mknod(device, stat.S_IFCHR, os.makedev(10, 229))
        device.chmod(0o666)
        mounts.mount(str(device), "/dev/fuse", mounts.MS_BIND)
        conf.write_text("user_allow_other\n")
        mounts.mount(str(conf), "/etc/fuse.conf", mounts.MS_BIND)
        self.server = subprocess.Popen(
            ["squashfuse", "-f", *options, file, self.point],
            user=ALICE.uid,
            group=ALICE.gid,
            extra_groups=[],
        )
        # Root may not look in.
        until(lambda: f" {self.point} " in Path("/proc/self/mounts").read_text(), "the mount")

    def end(self) -> None:
        self.server.kill()
        self.server.wait()


@pytest.fixture
def mount(node: Node, tmp_path: Path) -> Iterator[Callable[..., Own]]:
    made: list[Own] = []

    def mounting(*options: str) -> Own:
        node.configure(on_error="drain")
        made.append(Own(node, tmp_path, *options))
        return made[-1]

    yield mounting
    for own in made:
        own.end()


def test_users_mount_for_themselves_alone_stays_as_it_is(
    node: Node, mount: Callable[..., Own]
) -> None:
    own = mount()
    for job, user in ((1, ALICE), (2, BOB)):
        assert node.prolog(job, own.image, user=user).ended == (0, "declined", "no-permission")
        assert node.epilog(job).code == 0
    assert read_as(ALICE, own.image) == content(5)
    assert (read_as(BOB, own.image), node.entries()) == (None, set())


def test_users_mount_for_all_that_hangs_and_dies_holds_up_nobody(
    node: Node, mount: Callable[..., Own]
) -> None:
    # Names are known for long: else, once a second is over, the Epilog has to ask for them.
    own = mount("-o", "allow_other,entry_timeout=3600,attr_timeout=3600")
    assert node.prolog(1, own.image).outcome.result == "copied"
    assert read_as(ALICE, own.image) == content(5)
    own.server.send_signal(signal.SIGSTOP)
    # The redirect lies on a file system that does not answer.
    assert node.epilog(1).outcome.unmounted == 1
    assert node.binds() == {}
    node.configure(on_error="drain", deadline="1s")
    assert node.prolog(2, own.image).ended == (0, "declined", "source-hangs")
    own.end()
    node.configure(on_error="drain")
    assert node.prolog(3, own.image).ended == (0, "declined", "source-error")
    assert [node.epilog(job).code for job in (2, 3)] == [0, 0]
