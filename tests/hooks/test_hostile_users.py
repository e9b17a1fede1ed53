"""What a job's owner may try: names, links, renames, ACLs, namespaces. He never gets more than his.

Kept elsewhere: odd requests and comments (test_declined.py, slurm/test_bad_input.py), rights and
ACLs that change (test_rights.py), a change at a bad moment (test_race.py, faults/), a step's own
tricks (slurm/test_step_hostile.py), other nodes (test_peer_hostile.py).
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.cache.lease import Lease, LeaseDirectory
from forestage.stage import copy_wait
from forestage.system import as_user
from forestage.system.as_user import User
from node import ALICE, BOB, Arrange, Node, content, leased, read_as

NAMES = [
    "..hidden",
    "a%2Fb",
    "100%",
    "a b",
    "ünïcode",
    "‮hsqs.a",  # from right to left
    "image (deleted)",
    "back\\slash",
    '"quoted" key=forged',
    "semi;colon",
    "$(id)`id`",
    "-rf",
    "'",
    "new\nline",
    "\x1b[2Jescape",
    "x" * 255,
]


def encoded(path: str) -> str:
    return "".join(f"%{byte:02x}" for byte in os.fsencode(path))


def test_file_with_any_name_is_staged_redirected_and_released(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through links, since a path with control characters is asked for by no job of ours."""
    paths = [node.put(f"alice/{name}", content(n)) for n, name in enumerate(NAMES)]
    for n, path in enumerate(paths):
        (node.server / f"alice/{n}").symlink_to(path.name)
    asked = ",".join(encoded(f"{node.shared}/alice/{n}") for n in range(len(NAMES)))

    ran = node.prolog(1, comment=f"stage={asked}")

    assert [(o.result, o.redirect) for o in ran.outcomes] == [("copied", "mounted")] * len(NAMES)
    assert [path.read_bytes() for path in paths] == [content(n) for n in range(len(NAMES))]
    assert set(node.binds()) == set(map(str, paths))
    assert node.epilog(1).outcome.unmounted == len(NAMES)
    assert node.binds() == {}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert "key=forged" not in lines[0].replace('key=forged"', "")


SAVES = ["\udcff", "a\nb", "x" * 300, "x" * 5000, "/" * 100_000, "../" * 3000, "%00", "/proc/1/mem"]


@pytest.mark.parametrize("saves", SAVES, ids=range(len(SAVES)))
def test_nonsensical_save_path_does_not_stop_staging(node: Node, saves: str) -> None:
    ran = node.prolog(1, node.put("alice/image.sqsh"), saves=saves)
    assert (ran.code, ran.outcome.result) == (0, "copied")
    assert (node.epilog(1).code, node.binds()) == (0, {})


def test_acl_that_denies_a_user_the_source_denies_the_copy_too(node: Node) -> None:
    path = node.put("alice/image.sqsh", mode=0o644)
    source = node.server / "alice/image.sqsh"
    subprocess.run(["setfacl", "-m", f"u:{BOB.uid}:-", source], check=True)
    assert node.prolog(1, path).outcome.result == "copied"
    assert read_as(ALICE, path) == content()
    assert read_as(BOB, path) is None
    assert node.prolog(2, path, user=BOB).ended == (0, "declined", "no-permission")
    assert read_as(BOB, path) is None
    assert node.prolog(3, path).said == ("hit", "")


def test_hard_link_to_an_image_gives_no_rights_that_the_file_has_lost(node: Node) -> None:
    path = node.put("alice/image.sqsh", mode=0o644)
    node.put("bob/own.sqsh", content(2), BOB)
    os.link(node.server / "alice/image.sqsh", node.server / "bob/link.sqsh")
    link = node.shared / "bob/link.sqsh"
    assert node.prolog(1, path).outcome.result == "copied"
    assert node.prolog(2, link, user=BOB).outcome.result == "copied"
    assert len(node.entries()) == 2
    (node.server / "alice/image.sqsh").chmod(0o600)
    for asked in (link, path):
        assert node.prolog(3, asked, user=BOB).said == ("declined", "no-permission")
        assert read_as(BOB, asked) is None
    assert node.prolog(4, path).outcome.result == "copied"
    assert read_as(BOB, path) is None
    assert read_as(ALICE, path) == content()


def test_redirect_is_mounted_on_the_opened_file_if_its_path_is_swapped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped in the last moment: after the file was opened and compared, before the mount."""
    path = node.put("alice/sub/image.sqsh")
    victim = node.put("bob/sub/image.sqsh", content(2), user=BOB)
    write = LeaseDirectory.write_lease

    def swapping(leases: LeaseDirectory, lease: Lease) -> None:
        write(leases, lease)
        if any(use.path for use in lease.uses):
            (node.server / "alice/sub").rename(node.server / "alice/old")
            (node.server / "alice/sub").symlink_to(victim.parent)

    monkeypatch.setattr(LeaseDirectory, "write_lease", swapping)
    assert node.prolog(1, path).outcome.result == "copied"
    assert victim.read_bytes() == content(2)
    assert set(node.binds()) == {str(node.shared / "alice/old/image.sqsh")}
    monkeypatch.undo()
    node.epilog(1)
    assert node.binds() == {}


@pytest.mark.parametrize("put", ["nothing", "a file", "a link"])
def test_redirect_moved_during_its_unmount_is_unmounted(
    node: Node, monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    """Whoever renames at the right moment would else keep it, and its old bytes, for later jobs."""
    path = node.put("alice/sub/image.sqsh")
    node.prolog(1, path)
    reach = as_user.open_path_as_root_or_user

    def moved(point: str, user: User) -> int:
        if point == str(path):
            (node.server / "alice/sub").rename(node.server / "alice/away")
            if put == "a file":
                node.put("alice/sub/image.sqsh", content(2))
            elif put == "a link":
                (node.server / "alice/sub").symlink_to("sub")
        return reach(point, user)

    monkeypatch.setattr(as_user, "open_path_as_root_or_user", moved)
    assert node.epilog(1).said == ("released", "")
    assert node.binds() == {}


def test_copy_that_the_jobs_user_cannot_read_is_not_mounted(node: Node, after: Arrange) -> None:
    """A server may grant what no mode shows; then the copy must not be in his way."""
    path = node.put("alice/image.sqsh", mode=0o644)
    copy = node.cache.image_path(node.identity(path).key)
    after(copy_wait, "wait_for_copy", lambda: copy.chmod(0o600))
    assert node.prolog(1, path, user=BOB).said == ("declined", "access")
    assert node.binds() == {}
    assert read_as(BOB, path) == content()


TRICKS = """
mount -o remount,bind,rw {image}
umount {image}
umount -l {image}
mount --move {image} {other}
chmod 777 {image}
truncate -s 0 {image}
sh -c 'echo x >>{image}'
mount --bind {image} {other} && sh -c 'echo x >>{other}'
setfacl -m u:4242:rw {image}
"""


def test_user_as_root_of_a_user_namespace_cannot_change_a_redirect(node: Node) -> None:
    """There a user is root, and may mount; but what the node has locked stays so."""
    path = node.put("alice/image.sqsh")
    other = node.put("alice/other.sqsh", content(2))
    secret = node.put("bob/secret.sqsh", content(3), user=BOB, mode=0o600)
    key = node.prolog(1, path).outcome.key
    node.prolog(2, secret, user=BOB)
    tricks = TRICKS.format(image=shlex.quote(str(path)), other=shlex.quote(str(other)))
    script = f"{tricks}\ncat {secret} {node.cache.image_path(key)}; sha256sum < {path}; true"
    ran = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        user=ALICE.uid,
        group=ALICE.gid,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    if ran.returncode:
        pytest.skip("no user namespaces here")
    assert content(3)[:64] not in ran.stdout
    assert node.cache.image_path(key).read_bytes() == content()
    assert node.cache.image_path(key).stat().st_mode & 0o7777 == 0o644
    assert node.shows_entry(path, key)
    assert other.read_bytes() == content(2)
    node.epilog(1)
    node.epilog(2)
    assert node.binds() == {}


SWAPPER = """
import os, random, sys
folder, seed, *targets = sys.argv[1:]
dice = random.Random(int(seed))
os.chdir(folder)
for n, target in enumerate(targets):
    os.symlink(target, f"link-{n}")
os.mkdir("d0"); os.mkdir("d1")
open("d0/image", "wb").write(b"0" * 70000)
os.symlink(targets[1], "d1/image")
os.mkfifo("fifo")
print("ready", flush=True)
while True:
    kind = dice.randrange(5)
    try:
        if os.path.lexists("new"):
            os.unlink("new")
        if kind == 0:
            os.symlink(dice.choice(targets), "new")
        elif kind == 1:
            open("new", "wb").write(b"%d" % dice.randrange(10) * 70000)
        elif kind == 2:
            os.link("fifo", "new")
        elif os.path.lexists("tmp"):
            os.rename("tmp", "d0" if os.path.lexists("d1") else "d1")
        else:
            os.rename("d0", "tmp"); os.rename("d1", "d0"); os.rename("tmp", "d1")
        os.path.lexists("new") and os.replace("new", "swapped")
    except OSError:
        pass  # a redirect is in the way just now
"""


def _swap_while(node: Node, seed: int, targets: list[Path], run: Callable[[], None]) -> None:
    """Runs something while a process of Alice's swaps what lies in her folder, all the time."""
    swapper = subprocess.Popen(
        [sys.executable, "-ISc", SWAPPER, node.server / "alice", str(seed), *targets],
        user=ALICE.uid,
        group=ALICE.gid,
        extra_groups=[],
        stdout=subprocess.PIPE,
    )
    try:
        assert swapper.stdout is not None
        assert swapper.stdout.readline() == b"ready\n"
        run()
        assert swapper.poll() is None, "the swapper has died"
    finally:
        swapper.send_signal(signal.SIGKILL)
        swapper.wait()


@pytest.mark.parametrize(("seed", "rounds"), [(1, 6), pytest.param(2, 400, marks=pytest.mark.long)])
def test_paths_swapped_during_hooks_show_no_user_another_users_bytes(
    node: Node, seed: int, rounds: int
) -> None:
    own = node.put("alice/own.sqsh", content(1))
    secret = node.put("bob/secret.sqsh", content(2), user=BOB, mode=0o600)
    passwd = node.places.root / "passwd"
    passwd.write_bytes(content(3))
    passwd.chmod(0o600)
    node.prolog(1, secret, user=BOB)  # it is in the cache, so that it could be shown
    node.configure(deadline="5s")
    before = [file.stat() for file in (secret, passwd)]
    dice = random.Random(seed)
    asked = [node.shared / "alice/swapped", node.shared / "alice/d0/image", own]
    codes: set[int] = set()

    def hooks() -> None:
        for job in range(10, 10 + rounds):
            path = dice.choice(asked)
            codes.add(node.prolog(job, path, comment=f"stage={asked[1]}").code)
            for name in ("swapped", "d0/image", "d1/image"):
                shown = _read_now(node.shared / "alice" / name)
                assert shown is None or content(2)[:64] not in shown
                assert shown is None or content(3)[:64] not in shown
            # Redirects lie on files of hers or of Bob's, never outside the sources.
            assert all(path.startswith(f"{node.shared}/") for path in node.binds())
            codes.add(node.epilog(job).code)

    _swap_while(node, seed, [own, secret, passwd, Path("nowhere")], hooks)

    assert codes == {0}
    assert set(node.binds()) == {str(secret)}
    assert secret.read_bytes() == content(2)
    for file, was in zip((secret, passwd), before, strict=True):
        now = file.stat()
        assert (now.st_uid, now.st_gid, now.st_mode) == (was.st_uid, was.st_gid, was.st_mode)
    assert passwd.read_bytes() == content(3)
    inodes = {secret.stat().st_ino, passwd.stat().st_ino, node.identity(secret).inode}
    for stored in node.cache.list_entries():
        assert stored.entry is not None
        hers = stored.entry.identity.path.startswith(f"{node.shared}/alice/")
        assert hers == (stored.entry.identity.inode not in inodes)
        assert stored.entry.access.uid == (ALICE.uid if hers else BOB.uid)


def _read_now(path: Path) -> bytes | None:
    """What Alice reads there at this moment; nothing of a FIFO, nor of what just went."""
    ran = subprocess.run(
        ["dd", f"if={path}", "iflag=nonblock", "bs=256", "count=1", "status=none"],
        user=ALICE.uid,
        group=ALICE.gid,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    return ran.stdout if ran.returncode == 0 else None


def test_file_lease_of_a_user_on_the_copy_delays_no_hook(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    assert node.prolog(1, path).outcome.result == "copied"
    key = node.identity(path).key
    with leased(path) as held:
        assert node.prolog(2, path, user=BOB).outcome.result == "hit"
        assert node.shows_entry(path, key)
        assert node.epilog(1).code == node.epilog(2).code == 0
        assert node.binds() == {}
        assert node.prolog(3, path, user=BOB).outcome.redirect == "mounted"
        assert held(), "a hook waited until the kernel broke the lease"
