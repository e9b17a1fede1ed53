"""What users may read of their jobs' events: their own file alone, whatever they do with it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from forestage import events
from forestage.cache.lease import EntryUse, Lease, LeaseDirectory
from forestage.cache.node import Node as Here
from forestage.clock import Clock
from forestage.commands import explain, inventory, sweep, verify
from forestage.config import Config
from forestage.errors import NotFoundError
from forestage.events import (
    BadEntryOutcome,
    CopyOutcome,
    EventRecord,
    ReleaseOutcome,
    RequestOutcome,
    user_files,
)
from forestage.system import files
from forestage.system.as_user import User
from forestage.system.terminal import TextLine
from node import ALICE, BOB, HANGS, Later, Node

KEYS = {ALICE.uid: "a" * 32, BOB.uid: "b" * 32}


def event(
    user: User, job: int, outcome: events.Outcome | None = None, **facts: object
) -> EventRecord:
    path = f"/lustre/{user.name}/img.sqsh"
    hit = RequestOutcome("hit", request=path, image=path, key=KEYS[user.uid], redirect="mounted")
    made = {"time": time.time(), "hook": "prolog", "user": user.name, "node": "n1", **facts}
    return EventRecord(job=job, outcome=outcome or hit, uid=user.uid, **made)  # type: ignore[arg-type]


def own(node: Node, user: User = ALICE) -> list[EventRecord]:
    return list(events.read_user_events(node.places, user.uid))


def file_of(node: Node, user: User = ALICE) -> Path:
    return user_files.user_file_path(node.places.users, user.uid)


def attempt(user: User, code: str, *words: str | Path) -> str:
    """What a user's program prints, or the name of the error that ends it."""
    script = f"import fcntl, os, sys\nwords = sys.argv[1:]\n{code}"
    ran = subprocess.run(
        [sys.executable, "-ISc", script, *words],
        user=user.uid,
        group=user.gid,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    return ran.stdout.strip() if not ran.returncode else ran.stderr.splitlines()[-1].split(":")[0]


def must_be_refused(user: User, codes: Sequence[str], file: Path) -> None:
    """Have a user try each of these statements; the kernel must refuse all of them."""
    found = {code: attempt(user, code, file) for code in codes}
    assert found == dict.fromkeys(codes, "PermissionError")


def said(node: Node, job: int, user: User) -> str:
    """What `explain` prints to a user, or why it prints nothing."""
    try:
        found = explain.read_job_history(node.places, job, user.uid)
    except NotFoundError as nothing:
        return str(nothing)
    return repr(explain.format_output(found, time.time())) + repr(found)


# Who may read what


def test_user_can_explain_their_own_job_from_the_users_event_file(node: Node) -> None:
    path = node.staged(7)
    node.prolog(8, node.put("bob/image.sqsh", user=BOB), user=BOB)
    assert node.epilog(7).code == 0
    hooks = [(one.hook, one.job, one.uid) for one in own(node)]
    assert hooks == [(hook, 7, ALICE.uid) for hook in ("stager", "prolog", "epilog")]
    found = explain.read_job_history(node.places, 7, ALICE.uid)
    assert found.runs == explain.read_job_history(node.places, 7).runs
    assert str(path) in said(node, 7, ALICE)


def test_explain_shows_a_user_only_their_own_jobs(node: Node) -> None:
    events.record_events(node.places, [event(ALICE, 7), event(BOB, 8), event(BOB, 7)])
    assert "bob" not in said(node, 7, ALICE)
    assert "alice" not in said(node, 7, BOB), "the number came again"
    assert said(node, 8, ALICE).replace("8", "9") == said(node, 9, ALICE), "as if there were none"


def test_explain_shows_a_user_evicted_entries_of_other_users_by_key_only(node: Node) -> None:
    gone = ReleaseOutcome("released", evicted=(KEYS[BOB.uid],))
    events.record_events(node.places, [event(BOB, 8), event(ALICE, 7, gone, hook="epilog")])
    assert KEYS[BOB.uid][:8] in said(node, 7, ALICE)
    assert "bob" not in said(node, 7, ALICE)


def test_explain_shows_a_user_no_lease(node: Node) -> None:
    node.staged(7)
    assert node.lease(7) is not None
    found = explain.read_job_history(node.places, 7, ALICE.uid)
    assert found.lease is None
    lines = [one.text for one in explain.format_output(found, 1.0) if isinstance(one, TextLine)]
    assert lines[-1] == ("Now: no Epilog is recorded; what the job holds, root sees on this node.")


def test_user_can_read_their_event_file_and_do_nothing_else_with_the_file(node: Node) -> None:
    node.staged(7)
    file = file_of(node)
    assert '"prolog"' in attempt(ALICE, "print(open(words[0]).read())", file)
    forbidden = (
        "open(words[0], 'a')",
        "os.truncate(words[0], 0)",
        "os.chmod(words[0], 0o666)",
        "os.setxattr(words[0], 'system.posix_acl_access', b'')",
        "os.unlink(words[0])",
        "os.rename(words[0], words[0] + '.1')",
        "os.symlink('/etc/passwd', words[0] + '.1')",
        "os.mkfifo(words[0] + '.1')",
        "os.link(words[0], words[0] + '.1')",
        "os.listdir(os.path.dirname(words[0]))",
        "os.listdir(os.path.dirname(os.path.dirname(words[0])))",
        "os.chmod(os.path.dirname(words[0]), 0o777)",
        "os.rmdir(os.path.dirname(words[0]))",
        "fcntl.fcntl(os.open(words[0], os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    )
    must_be_refused(ALICE, forbidden, file)


def test_another_user_can_stat_the_event_directory_of_a_user_and_nothing_inside(node: Node) -> None:
    node.staged(7)
    file = file_of(node)
    assert attempt(BOB, "print(os.stat(words[0]).st_uid)", file.parent) == "0"
    looks = (
        "open(words[0])",
        "os.stat(words[0])",
        "os.stat(words[0] + '.none')",
        "os.getxattr(words[0], 'system.posix_acl_access')",
        "os.listdir(os.path.dirname(words[0]))",
        "os.listdir(os.path.dirname(os.path.dirname(words[0])))",
    )
    must_be_refused(BOB, looks, file)


def test_users_event_file_is_linked_after_its_owner_mode_and_acl_are_set(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.link, []

    def link(source: str, name: str, dst_dir_fd: int) -> None:
        facts = os.stat(source)
        acl = os.getxattr(source, files.ACL)
        seen.append((facts.st_uid, stat.S_IMODE(facts.st_mode), facts.st_nlink, acl))
        real(source, name, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "link", link)
    events.record_events(node.places, [event(ALICE, 7)])
    acl = files.encode_acl(ALICE.uid, owner=6, user=4)
    assert seen == [(0, 0o640, 0, acl)]  # of an ACL the group's bits are the mask
    assert os.getxattr(file_of(node).parent, files.ACL) == files.encode_acl(ALICE.uid, 7, 1)
    assert stat.S_IMODE(node.places.users.stat().st_mode) == 0o711


@pytest.mark.parametrize("at", ["mkdir", "link"])
def test_users_event_file_is_created_by_the_next_hook_if_one_hook_was_killed(
    node: Node, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    real = getattr(os, at)

    def killed(*args: object, **kwargs: object) -> None:
        if "users" in str(args[0]) or at == "link":
            real(*args, **kwargs) if at == "mkdir" else None
            raise OSError(errno.EINTR, "killed")
        real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, at, killed)
        events.record_events(node.places, [event(ALICE, 7)])
    assert own(node) == []
    events.record_events(node.places, [event(ALICE, 8)])
    assert [one.job for one in own(node)] == [8]
    assert "prolog" in attempt(ALICE, "print(open(words[0]).read())", file_of(node))


@pytest.mark.parametrize("job_of", [User("root", 0, 0), User("nobody knows", -1, -1)])
def test_root_and_a_user_without_uid_get_no_event_file(node: Node, job_of: User) -> None:
    hit = RequestOutcome("hit")
    events.record_events(node.places, [EventRecord(1.0, "prolog", 7, hit, uid=job_of.uid)])
    assert not node.places.users.exists()
    assert len(list(events.read_events(node.places.events))) == 1


# What is told of others


def test_end_of_another_users_copy_is_recorded_for_a_user_with_a_lease_on_the_key(
    node: Node,
) -> None:
    path = node.put("bob/secret.sqsh", user=BOB)
    key = node.identity(path).key
    node.leases.write_lease(Lease(7, ALICE, 1.0, str(node.cache.root), (EntryUse(key),)))
    events.record_events(
        node.places, [event(ALICE, 7, RequestOutcome("started", request="/a", key=key))]
    )
    node.prolog(8, path, user=BOB)
    (told,) = [one for one in own(node) if one.hook == "stager"]
    assert isinstance(told.outcome, CopyOutcome)
    assert (told.outcome.result, told.outcome.key) == ("copied", key)
    text = file_of(node).read_text()
    assert "bob" not in text
    assert "secret" not in text
    assert '"job":8' not in text


def test_explain_shows_a_user_another_users_late_copy_without_its_job(node: Node) -> None:
    late = RequestOutcome(
        "declined", "deadline", request="/a", image="/lustre/a", key=KEYS[ALICE.uid]
    )
    copy = CopyOutcome("copied", image="/lustre/a", key=KEYS[ALICE.uid], size=1, wait=9.0)
    now = time.time()
    events.record_events(node.places, [event(ALICE, 7, late, time=now)])
    events.record_copy_for_users(
        node.places, event(BOB, 8, copy, hook="stager", time=now + 1, total=9.0), {ALICE.uid}
    )
    text = said(node, 7, ALICE)
    assert "The job had stopped waiting 1s before" in text
    assert "Stager of another job" in text
    assert "bob" not in text


def test_wrong_bytes_are_reported_to_the_users_of_the_entry(node: Node) -> None:
    events.record_events(node.places, [event(ALICE, 7), event(BOB, 8)])
    bad = BadEntryOutcome(
        "bad", "wrong-bytes", image="/lustre/alice/img.sqsh", key=KEYS[ALICE.uid], chunks=2
    )
    events.record_bad_entry_for_users(node.places, EventRecord(time.time(), "sweep", 0, bad))
    assert "WRONG BYTES?" in said(node, 7, ALICE)
    assert len(own(node, BOB)) == 1
    (told,) = [one.outcome for one in own(node) if isinstance(one.outcome, BadEntryOutcome)]
    assert (told.image, told.detail, told.chunks) == ("", "", 2)


@pytest.mark.parametrize(
    "outcome",
    [
        ReleaseOutcome("released", evicted=(KEYS[BOB.uid],)),
        RequestOutcome("declined", "missing", request=f'/a/"key":"{KEYS[BOB.uid]}"'),
    ],
    ids=["evicted", "in a path"],
)
def test_wrong_bytes_are_not_reported_to_a_user_with_events_that_only_mention_the_key(
    node: Node, outcome: events.Outcome
) -> None:
    events.record_events(node.places, [event(ALICE, 7, outcome), event(BOB, 8)])
    bad = BadEntryOutcome("bad", "wrong-bytes", key=KEYS[BOB.uid], chunks=2)
    events.record_bad_entry_for_users(node.places, EventRecord(time.time(), "sweep", 0, bad))
    assert (len(own(node)), len(own(node, BOB))) == (1, 2)


def test_copy_event_is_logged_if_users_of_the_key_cannot_be_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(leases: LeaseDirectory, key: str) -> frozenset[int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), leases.directory)

    monkeypatch.setattr(LeaseDirectory, "list_users_of", unreadable)
    node.staged(7)
    assert next(events.read_events(node.places.events)).hook == "stager"


def test_wrong_bytes_are_logged_if_they_cannot_be_written_for_users(node: Node) -> None:
    """Somebody's hand has put a file in the directory's place."""
    path = node.staged(7)
    shutil.rmtree(node.places.users)
    node.places.users.touch()
    node.cache.image_path(node.identity(path).key).chmod(0o600)  # not what its record says
    here = Here.from_config(Config(cache="/mnt/nvme/forestage"), node.places, Clock())
    assert (
        verify.verify_entries(
            here, inventory.read_inventory(here).items, False, lambda text: None
        ).bad
        == 1
    )
    assert [one.outcome.result for one in events.read_events(node.places.events)][-1] == "bad"


# What users do to it


def test_users_lock_on_their_event_file_delays_no_hook(node: Node) -> None:
    node.staged(7)
    code = """
fd = os.open(words[0], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX)
fcntl.lockf(fd, fcntl.LOCK_SH)
print("locked", flush=True)
sys.stdin.read()
"""
    argv = [sys.executable, "-ISc", f"import fcntl, os, sys\nwords = sys.argv[1:]\n{code}"]
    with subprocess.Popen(
        [*argv, str(file_of(node))], user=ALICE.uid, group=ALICE.gid, extra_groups=[],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as reader:  # fmt: skip
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"locked\n"
        assert node.epilog(7).code == 0
        assert own(node)[-1].hook == "epilog"
        with (
            files.open_descriptor(file_of(node), os.O_RDONLY) as fd,
            pytest.raises(BlockingIOError),
        ):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        reader.kill()


def test_full_users_event_file_frees_its_oldest_blocks_and_keeps_the_latest_lines(
    node: Node,
) -> None:
    first = RequestOutcome("hit", detail="x" * 4096)
    events.record_events(node.places, [event(ALICE, 7, first)])
    file = file_of(node)
    before = file.stat()
    with (
        files.open_descriptor(file, os.O_RDONLY) as fd,
        mmap.mmap(fd, 4096, prot=mmap.PROT_READ) as mapped,
    ):
        for step in range(600):  # 1.5 MiB
            hit = RequestOutcome("hit", request="/a", detail="x" * 2500)
            events.record_events(node.places, [event(ALICE, 7, hit, hook="step", step=step)])
            assert os.fstat(fd).st_blocks * 512 <= user_files.MAX_USER_FILE_BYTES + 4096
        assert mapped[:16] == bytes(16), "nobody keeps the memory by a mapping"
    assert file.stat().st_ino == before.st_ino, "who has it open reads on"
    steps = [one.step for one in own(node)]
    assert steps == list(range(600 - len(steps), 600))
    assert len(steps) > 40
    assert explain.read_job_history(node.places, 7, ALICE.uid).runs[-1].step == 599


def test_full_users_event_file_is_trimmed_only_by_hooks_of_that_user(node: Node) -> None:
    """A user who has it mapped a million times holds up the process that does, for seconds."""
    file = file_of(node)
    events.record_events(node.places, [event(ALICE, 7)])
    with file.open("ab") as full:
        full.write((b"x" * 511 + b"\n") * (user_files.MAX_USER_FILE_BYTES // 512))
    size, blocks = file.stat().st_size, file.stat().st_blocks
    copy = event(BOB, 8, CopyOutcome("copied", key=KEYS[ALICE.uid]), hook="stager")
    events.record_copy_for_users(node.places, copy, {ALICE.uid})
    assert file.stat().st_size > size
    assert file.stat().st_blocks >= blocks
    events.record_events(node.places, [event(ALICE, 7)])
    assert file.stat().st_blocks * 512 < user_files.MAX_USER_FILE_BYTES
    assert [one.hook for one in own(node)] == ["stager", "prolog"]


def test_many_simultaneous_hooks_create_one_users_event_file_and_lose_no_line(node: Node) -> None:
    def hook(number: int) -> None:
        for step in range(20):
            facts = event(ALICE, number, hook="step", step=step)
            events.record_events(node.places, [facts])

    context = multiprocessing.get_context("fork")
    hooks = [context.Process(target=hook, args=(number,)) for number in range(1, 13)]
    for one in hooks:
        one.start()
    for one in hooks:
        one.join(HANGS)
    found = [(one.job, one.step) for one in own(node)]
    assert sorted(found, key=repr) == sorted(
        ((job, step) for job in range(1, 13) for step in range(20)), key=repr
    )
    assert [one.name for one in file_of(node).parent.iterdir()] == [user_files.USER_FILE_NAME]


def test_hook_appends_to_a_users_event_file_created_meanwhile_by_another_hook(
    node: Node, before: Callable[[object, str, Callable[[], object]], None]
) -> None:
    others = [[event(ALICE, 8)]]
    before(os, "link", lambda: others and events.record_events(node.places, others.pop()))
    events.record_events(node.places, [event(ALICE, 7)])
    assert [one.job for one in own(node)] == [8, 7]


def test_line_cut_short_in_a_users_event_file_spoils_no_other_line(node: Node) -> None:
    node.staged(7)
    with file_of(node).open("a") as file:
        file.write('{"cut": "sho')
    node.epilog(7)
    assert [one.hook for one in own(node)][-2:] == ["prolog", "epilog"]


@pytest.mark.parametrize("kind", ["link", "FIFO", "directory"])
def test_symlink_fifo_or_directory_instead_of_a_users_event_file_is_not_written(
    node: Node, kind: str
) -> None:
    """Only root could put it there."""
    file, elsewhere = file_of(node), node.places.root / "elsewhere"
    file.parent.mkdir(parents=True)
    elsewhere.touch()
    if kind == "link":
        file.symlink_to(elsewhere)
    elif kind == "FIFO":
        os.mkfifo(file)
    else:
        file.mkdir()
    node.staged(7)
    assert len(node.outcomes("prolog", 7)) == 1
    assert elsewhere.stat().st_size == 0


def test_full_memory_for_users_event_files_costs_only_the_users_event(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.staged(7)
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if os.path.samestat(os.fstat(fd), file_of(node).stat()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    assert node.prolog(8, node.put("alice/image.sqsh")).code == 0
    assert node.outcomes("prolog", 8)
    assert 8 not in [one.job for one in own(node)]


# Where no such file can be


def no_acl(*args: object, **kwargs: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def no_seals(*args: object) -> int:
    raise OSError(errno.EINVAL, "Invalid argument")  # as on all that is no tmpfs


@pytest.mark.parametrize(
    ("module", "name", "fails"), [(os, "setxattr", no_acl), (fcntl, "fcntl", no_seals)]
)
def test_node_without_acls_or_sealed_memory_keeps_no_users_events_and_explain_says_why(
    node: Node, monkeypatch: pytest.MonkeyPatch, module: object, name: str,
    fails: Callable[..., object],
) -> None:  # fmt: skip
    monkeypatch.setattr(module, name, fails)
    events.record_events(node.places, [event(ALICE, 7)])
    assert list(node.places.users.iterdir()) == []
    assert "/run here is no tmpfs with ACLs" in said(node, 7, ALICE)
    assert explain.read_job_history(node.places, 7).runs


def test_users_event_file_is_not_written_outside_a_tmpfs(tmp_path: Path) -> None:
    """On others a reader can hold the lock that a hook's write waits for."""
    argv = ["stat", "--file-system", "--format=%T", tmp_path]
    if subprocess.run(argv, capture_output=True, check=True).stdout == b"tmpfs\n":
        pytest.skip("this machine's temporary directory is one")
    user_files.append_user_lines(tmp_path, ALICE.uid, [b"{}\n"])
    assert list(tmp_path.iterdir()) == []


# How long it stays


def test_event_files_of_idle_users_are_removed_and_their_memory_freed(node: Node) -> None:
    events.record_events(node.places, [event(ALICE, 7), event(BOB, 8)])
    old = time.time() - user_files.IDLE_DAYS * 86400 - 60
    os.utime(file_of(node), (old, old))
    with files.open_descriptor(file_of(node), os.O_RDONLY) as held:
        user_files.remove_idle_users(node.places.users, time.time())
        assert os.fstat(held).st_blocks == 0, "who has it open keeps no memory"
    assert user_files.list_users(node.places.users) == [BOB.uid]
    assert "nothing is recorded" in said(node, 7, ALICE)
    events.record_events(node.places, [event(ALICE, 9)])
    assert [one.job for one in own(node)] == [9], "whoever has the number now"


def test_number_of_users_event_files_is_bounded_and_the_most_idle_is_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_files, "MAX_USERS", 3)
    for number, uid in enumerate((5001, 5002, 5003)):
        user_files.append_user_lines(node.places.users, uid, [b"{}\n"])
        os.utime(user_files.user_file_path(node.places.users, uid), (number, number))
    user_files.append_user_lines(node.places.users, 5001, [b"{}\n"])
    user_files.append_user_lines(node.places.users, 5004, [b"{}\n"])
    assert user_files.list_users(node.places.users) == [5001, 5003, 5004]


@pytest.mark.parametrize("kind", ["file beside it", "directory in its place", "file", "link"])
def test_foreign_files_among_users_event_files_do_not_stop_writing_or_removal(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(user_files, "MAX_USERS", 2)
    users = node.places.users
    odd = user_files.user_file_path(users, 5001)
    user_files.append_user_lines(users, 5002, [b"{}\n"])
    os.utime(user_files.user_file_path(users, 5002), (1, 1))
    if kind == "file":
        odd.parent.touch()
    else:
        odd.parent.mkdir()
        if kind == "file beside it":
            odd.with_suffix(".old").touch()
        else:
            odd.mkdir() if kind == "directory in its place" else odd.symlink_to("/nowhere")
    user_files.append_user_lines(users, 5003, [b"{}\n"])
    user_files.append_user_lines(users, 5004, [b"{}\n"])
    assert set(user_files.list_users(users)) >= {5003, 5004}
    os.utime(user_files.user_file_path(users, 5004), (1, 1))
    sweep.clean_user_events(Here.from_config(Config(), node.places, Clock()))
    assert set(user_files.list_users(users)) - {5001} == {5003}


def test_sweep_restores_mode_and_acl_of_users_event_files(node: Node) -> None:
    node.staged(7)
    file = file_of(node)
    made = [os.getxattr(one, files.ACL) for one in (file.parent, file)]
    for one in (node.places.users, file.parent, file):
        one.chmod(0o777)
    os.removexattr(file, files.ACL)
    sweep.clean_user_events(Here.from_config(Config(), node.places, Clock()))
    assert [os.getxattr(one, files.ACL) for one in (file.parent, file)] == made
    assert stat.S_IMODE(node.places.users.stat().st_mode) == 0o711
    assert "prolog" in attempt(ALICE, "print(open(words[0]).read())", file)
    assert attempt(BOB, "os.stat(words[0])", file) == "PermissionError"


def test_users_event_file_is_kept_if_the_clock_is_set_back(node: Node) -> None:
    node.staged(7)
    user_files.remove_idle_users(node.places.users, Later(-86400 * 365).wall())
    assert own(node)


def test_explain_run_by_a_user_shows_their_own_job_only(node: Node) -> None:
    """`forestage explain` as alice, who may read neither log nor leases."""
    node.staged(7)
    readable = Path(explain.__file__).parents[2]
    if not all(os.stat(folder).st_mode & 0o001 for folder in (readable, *readable.parents)):
        pytest.skip("this user may not read the sources")
    code = (
        "import sys\nfrom pathlib import Path\nfrom forestage.commands.main import main\n"
        "from forestage.clock import Clock\nfrom forestage.paths import NodePaths\n"
        "from forestage.commands.command_context import CommandContext\n"
        "main(sys.argv[2:], obj=CommandContext(NodePaths(Path(sys.argv[1])), Clock()))"
    )

    def run(user: User, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, str(node.places.root), *words],
            user=user.uid, group=user.gid, extra_groups=[], capture_output=True, text=True,
            cwd="/", env={"PATH": "/usr/bin:/bin"}, timeout=HANGS, check=False,
        )  # fmt: skip

    mine, others = run(ALICE, "explain", "7.0"), run(BOB, "explain", "7")
    assert mine.stdout.startswith("Job 7 of alice on n1, "), mine
    assert (others.returncode, others.stdout) == (1, "")
    assert "srun --jobid=7 --overlap -w NODE forestage explain 7" in others.stderr
    assert run(ALICE, "status").stderr.endswith("Permission denied (run as root)\n")
