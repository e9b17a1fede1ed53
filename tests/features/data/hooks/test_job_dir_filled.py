"""What a job's comment puts into its own directory: trees, archives, files; honest and hostile."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

import jobdir
from forestage.errors import Declined
from forestage.features.data import copy_in, job_dir_fill
from forestage.system import as_user, forked_child
from forestage.system.files import remove_tree
from jobdir import MIB, Dirs, as_alice
from node import ALICE, Node, until

_fork = get_context("fork")


@pytest.fixture
def dirs(node: Node, tmp_path: Path) -> Iterator[Dirs]:
    with jobdir.made(node, tmp_path / "disk") as made:
        os.chown(made.source, ALICE.uid, ALICE.gid)
        yield made


def tree(dirs: Dirs, name: str = "tree") -> Path:
    """A directory of Alice's with what trees have."""
    top = dirs.source / name
    (top / "a/deep/er").mkdir(parents=True)
    (top / "empty").mkdir()
    (top / "file").write_bytes(b"x" * (3 * MIB + 17))
    (top / "a/tool").write_text("#!/bin/sh\n")
    (top / "a/tool").chmod(0o4755)
    (top / "a/deep/er/read-only").write_text("r")
    (top / "a/deep/er/read-only").chmod(0o444)
    (top / "a/deep/er").chmod(0o555)
    (top / "link").symlink_to("a/tool")
    (top / "out").symlink_to("/etc/passwd")
    with open(os.fsencode(top) + b"/b\xffyte\nname", "wb") as odd:
        odd.write(b"odd")
    for folder, folders, files in os.walk(os.fsencode(top)):
        for entry in (b"", *folders, *files):
            path = os.path.join(folder, entry)
            if not os.path.islink(path):
                os.utime(path, (1e9, 1e9))
            os.chown(path, ALICE.uid, ALICE.gid, follow_symlinks=False)
    (top / "a/tool").chmod(0o4755)  # which chown(2) took away
    os.utime(top / "a/tool", (1e9, 1e9))
    return top


def begun(dirs: Dirs, *requests: object, size: str = "64M", job: int = 7) -> None:
    comment = f"stage-dir={size} stage={','.join(map(str, requests))}"
    for outcome in dirs.prolog(job, comment):
        assert outcome.result == "started", outcome


def told(dirs: Dirs, job: int = 7, fill: float = 240.0) -> list[tuple[str, str]]:
    return [(one.result, one.reason) for one in dirs.step(job, fill=fill).outcomes]


def content(top: Path) -> dict[bytes, object]:
    """All that a tree holds, by names: bytes of files, where links lead, None for directories."""
    found: dict[bytes, object] = {}
    root = os.fsencode(top)
    for folder, folders, files in os.walk(root):
        for entry in (*folders, *files):
            path = os.path.join(folder, entry)
            name = os.path.relpath(path, root)
            if os.path.islink(path):
                found[name] = os.readlink(path)
            elif os.path.isdir(path):
                found[name] = None
            else:
                found[name] = Path(os.fsdecode(path)).read_bytes()
    return found


def left(at: Path) -> list[str]:
    return sorted(path.name for path in at.iterdir())


# --- honest


def test_tree_in_the_job_directory_equals_its_source_and_is_writable_for_the_user(
    dirs: Dirs,
) -> None:
    top = tree(dirs)
    begun(dirs, f"{top}@job")
    assert told(dirs) == [("copied", "")]
    assert told(dirs) == [("hit", "")]
    with dirs.seen(7) as at:
        assert left(at) == ["tree"]
        copy = at / "tree"
        assert content(copy) == content(top)
        facts = (copy / "a/tool").stat()
        assert (facts.st_uid, facts.st_mode & 0o7777, facts.st_mtime) == (ALICE.uid, 0o755, 1e9)
        assert (copy / "a/deep/er").stat().st_mtime == 1e9
        ran = as_alice("echo y >> tree/a/deep/er/read-only && rm -r tree", at)
        assert (ran.returncode, ran.stderr) == (0, "")


def test_later_steps_keep_the_jobs_changes_to_a_copied_tree(dirs: Dirs) -> None:
    begun(dirs, f"{tree(dirs)}@job")
    told(dirs)
    with dirs.seen(7) as at:
        as_alice("rm -r tree/a; echo mine > tree/file", at)
    assert told(dirs) == [("hit", "")]
    with dirs.seen(7) as at:
        assert (at / "tree/file").read_text() == "mine\n"


def test_seed_is_copied_to_a_fixed_path_that_its_variable_names(dirs: Dirs) -> None:
    top = tree(dirs, "cache")
    begun(dirs, f"{top}@seed:TRITON_CACHE_DIR")
    target = f"{dirs.node.places.job_dir}/seed/TRITON_CACHE_DIR"
    for _ in range(2):
        assert ("env", "TRITON_CACHE_DIR", target) in dirs.step(7).lines
    with dirs.seen(7) as at:
        assert content(at / "seed/TRITON_CACHE_DIR") == content(top)
    assert content(top)  # and the shared one is what it was
    assert not (top / "new").exists()


def test_copied_seed_keeps_its_variable_after_forestage_is_switched_off(dirs: Dirs) -> None:
    whole, late = tree(dirs, "cache"), dirs.source / "late"
    begun(dirs, f"{whole}@seed:CACHE", f"{late}@seed:LATE")
    dirs.step(7)  # which finds but one of the two
    shown = dirs.step(7, refusal=Declined("disabled", "an upgrade"))
    assert ("env", "CACHE", f"{dirs.node.places.job_dir}/seed/CACHE") in shown.lines
    assert ("env", "LATE") in shown.lines
    assert {one.image or one.request: one.reason for one in shown.outcomes} == {
        str(whole): "",
        f"{late}@seed:LATE": "disabled",
    }
    record = dirs.on.leases.directory_record_file(7).read_text()  # what steps have without a helper
    assert "env\tCACHE\t" in record


def test_step_on_a_switched_off_node_copies_no_seed_into_the_job_directory(dirs: Dirs) -> None:
    begun(dirs, f"{tree(dirs)}@seed:CACHE")
    shown = dirs.step(7, refusal=Declined("disabled", "an upgrade"))
    assert ("env", "CACHE") in shown.lines
    with dirs.seen(7) as at:
        assert left(at) == []


PACKERS = {"": "cat", "gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}


@pytest.mark.parametrize("mode", PACKERS)
def test_tar_archive_of_each_compression_is_unpacked_into_the_job_directory(
    dirs: Dirs, mode: str
) -> None:
    top = tree(dirs)
    suffix = f".tar.{mode}".removesuffix(".")
    file = dirs.source / f"set{suffix}"
    bare = file.with_name("bare.tar")
    with tarfile.open(bare, "w") as tar:
        for name in os.listdir(top):
            tar.add(top / name, name)
    with file.open("wb") as out:
        subprocess.run([PACKERS[mode], *["-c"] * bool(mode), bare], stdout=out, check=True)
    begun(dirs, f"{file}@job")
    assert told(dirs) == [("copied", "")]
    with dirs.seen(7) as at:
        assert left(at) == ["set"]
        assert content(at / "set") == content(top)
        facts = (at / "set/a/tool").stat()
        assert (facts.st_uid, facts.st_mode & 0o7777, facts.st_mtime) == (ALICE.uid, 0o755, 1e9)


def test_plain_file_is_copied_into_the_job_directory(dirs: Dirs) -> None:
    file = dirs.source / "model.bin"
    file.write_bytes(b"m" * MIB)
    begun(dirs, f"{file}@job")
    assert told(dirs) == [("copied", "")]
    with dirs.seen(7) as at:
        assert left(at) == ["model.bin"]
        assert (at / "model.bin").read_bytes() == b"m" * MIB


def test_hard_links_of_an_archive_are_unpacked_as_hard_links(dirs: Dirs) -> None:
    file = packed(dirs, ("a", b"1", {}), ("b", b"", {"type": tarfile.LNKTYPE, "linkname": "a"}))
    begun(dirs, f"{file}@job")
    assert told(dirs) == [("copied", "")]
    with dirs.seen(7) as at:
        assert (at / "set/a").samefile(at / "set/b")


def test_concurrent_steps_copy_a_tree_into_the_job_directory_once(dirs: Dirs) -> None:
    begun(dirs, f"{tree(dirs)}@job")

    def life() -> None:
        assert told(dirs)[0][0] in ("copied", "hit")

    steps = [_fork.Process(target=life) for _ in range(4)]
    for step in steps:
        step.start()
    for step in steps:
        step.join()
        assert step.exitcode == 0
    with dirs.seen(7) as at:
        assert left(at) == ["tree"]


# --- what the user got wrong


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ("nothing@job", "missing"),
        ("secret@job", "no-permission"),
        ("fifo@job", "not-put"),
        ("file@seed:CACHE", "not-put"),
    ],
)
def test_source_that_cannot_be_copied_is_declined_with_its_name_and_absent_from_the_job_directory(
    dirs: Dirs, request_: str, reason: str
) -> None:
    (dirs.source / "secret").mkdir(mode=0o700)
    os.mkfifo(dirs.source / "fifo")
    (dirs.source / "file").write_text("x")
    begun(dirs, f"{dirs.source}/{request_}")
    (outcome,) = dirs.step(7).outcomes
    assert (outcome.result, outcome.reason) == ("declined", reason)
    assert request_.split("@")[0] in outcome.detail
    with dirs.seen(7) as at:
        assert left(at) in ([], ["seed"])
    seeds = [line for line in dirs.step(7).lines if line[1] == "CACHE"]
    assert seeds == ([("env", "CACHE")] if "seed" in request_ else [])


def test_second_step_does_not_wait_for_a_copier_that_timed_out(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def slow(work: object, answer: object, timeout: float, **_: object) -> None:
        asked.append(timeout)
        raise as_user.ChildTimeout("no answer")

    begun(dirs, f"{tree(dirs)}@job")
    monkeypatch.setattr(as_user, "run_in_child_with_socket", slow)
    for _ in range(2):
        assert told(dirs, fill=100.0) == [("declined", "source-hangs")]
    (timeout,) = asked
    assert 100.0 < timeout < 106.5  # more than the copier has itself


def test_step_that_waits_for_a_job_directory_copy_reports_progress(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, heard = dirs.source / "gate", list[str]()
    real = job_dir_fill._choose_method

    def slow(order: job_dir_fill._FillTask, source: int) -> job_dir_fill._CopyMethod:
        until(gate.exists, "the gate")
        return real(order, source)

    def progress(line: Callable[[], str]) -> None:
        heard.append(line())
        gate.touch()

    (dirs.source / "plain").write_bytes(b"x")
    monkeypatch.setattr(as_user, "_IDLE", 0.01)
    monkeypatch.setattr(job_dir_fill, "_choose_method", slow)
    begun(dirs, f"{dirs.source}/plain@job")
    shown = dirs.step(7, progress=progress)
    assert [one.result for one in shown.outcomes] == ["copied"]
    assert heard[0].startswith(f"waiting for {dirs.source}/plain, which is put into the job's dir")


def test_request_for_the_job_directory_without_stage_dir_is_declined_with_that_hint(
    dirs: Dirs,
) -> None:
    (outcome,) = dirs.prolog(7, f"stage={tree(dirs)}@job")
    assert (outcome.result, outcome.reason) == ("declined", "job-dir")
    assert "stage-dir=SIZE" in outcome.detail
    (outcome,) = dirs.step(7).outcomes
    assert outcome.reason == "job-dir"


def test_second_request_for_the_same_name_in_the_job_directory_is_declined(dirs: Dirs) -> None:
    first, second = tree(dirs, "one/tree"), tree(dirs, "two/tree")
    (second / "file").write_text("second")
    outcomes = dirs.prolog(7, f"stage-dir=64M stage={first}@job,{second}@job")
    assert [one.reason for one in outcomes] == ["", "bad-hint"]
    assert told(dirs) == [("copied", ""), ("declined", "bad-hint")]
    with dirs.seen(7) as at:
        assert content(at / "tree") == content(first)


def test_tree_with_an_unreadable_file_is_declined_and_removed_from_the_job_directory(
    dirs: Dirs,
) -> None:
    top = tree(dirs)
    (top / "a/secret").write_text("s")
    (top / "a/secret").chmod(0o600)
    begun(dirs, f"{top}@job")
    (outcome,) = dirs.step(7).outcomes
    assert outcome.reason == "not-put"
    assert "a/secret" in outcome.detail
    with dirs.seen(7) as at:
        assert left(at) == []


@pytest.mark.parametrize("odd", ["fifo", "socket", "device"])
def test_tree_with_a_fifo_socket_or_device_is_declined_for_the_job_directory(
    dirs: Dirs, odd: str
) -> None:
    top = tree(dirs)
    kinds = {"fifo": 0o010644, "socket": 0o140644, "device": 0o020644}
    os.mknod(top / "odd", kinds[odd], os.makedev(1, 5))
    begun(dirs, f"{top}@job")
    (outcome,) = dirs.step(7).outcomes
    assert (outcome.reason, "odd" in outcome.detail) == ("not-put", True)
    with dirs.seen(7) as at:
        assert left(at) == []


def test_tree_larger_than_the_job_directory_is_declined_and_its_space_freed(dirs: Dirs) -> None:
    top = tree(dirs)
    (top / "large").write_bytes(b"l" * (40 * MIB))
    begun(dirs, f"{top}@job", size="32M")
    assert told(dirs) == [("declined", "job-dir-full")]
    with dirs.seen(7) as at:
        assert left(at) == []
        disk = os.statvfs(at)
        assert disk.f_bavail * disk.f_frsize > 28 * MIB


def test_copy_into_the_job_directory_is_declined_at_its_deadline(dirs: Dirs) -> None:
    top = tree(dirs)
    begun(dirs, f"{top}@job")
    assert told(dirs, fill=0.0) == [("declined", "deadline")]
    with dirs.seen(7) as at:
        assert left(at) == []


# --- hostile


def packed(
    dirs: Dirs, *members: tuple[str, bytes, dict[str, object]], name: str = "set.tar"
) -> Path:
    """An archive of members as nobody would make them."""
    file = dirs.source / name
    with tarfile.open(file, "w") as tar:
        for member, data, more in members:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            for key, value in more.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return file


@pytest.fixture
def home(dirs: Dirs) -> Path:
    """A directory of Alice's, with a file that no archive may change."""
    made = dirs.node.places.root / "home"
    made.mkdir()
    (made / "precious").write_text("mine")
    for path in (made, made / "precious"):
        os.chown(path, ALICE.uid, ALICE.gid)
    return made


LINK = {"type": tarfile.SYMTYPE}


@pytest.mark.parametrize("way", ["absolute", "up", "link", "relative-link", "hard-link"])
def test_archive_with_absolute_or_parent_paths_or_links_writes_nothing_outside_the_job_directory(
    dirs: Dirs, home: Path, way: str
) -> None:
    up = "../" * 20 + str(home).lstrip("/")
    members: dict[str, list[tuple[str, bytes, dict[str, object]]]] = {
        "absolute": [(f"{home}/precious", b"evil", {})],
        "up": [(f"{up}/precious", b"evil", {})],
        "link": [("d", b"", LINK | {"linkname": str(home)}), ("d/precious", b"evil", {})],
        "relative-link": [("d", b"", LINK | {"linkname": up}), ("d/precious", b"evil", {})],
        "hard-link": [
            ("h", b"", {"type": tarfile.LNKTYPE, "linkname": f"{home}/precious"}),
            ("h", b"evil", {}),
        ],
    }
    begun(dirs, f"{packed(dirs, *members[way])}@job")
    told(dirs)
    assert (home / "precious").read_text() == "mine"
    assert [path.name for path in home.iterdir()] == ["precious"]


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_archive_with_a_device_or_fifo_is_declined(dirs: Dirs, kind: bytes) -> None:
    odd = {"type": kind, "devmajor": 1, "devminor": 1}
    begun(dirs, f"{packed(dirs, ('a', b'1', {}), ('odd', b'', odd))}@job")
    assert told(dirs) == [("declined", "not-put")]
    with dirs.seen(7) as at:
        assert left(at) == []


def test_unpacked_file_has_no_set_id_bits_and_belongs_to_the_user(dirs: Dirs) -> None:
    begun(dirs, f"{packed(dirs, ('x', b'1', {'mode': 0o6755, 'uid': 0, 'gid': 0}))}@job")
    told(dirs)
    with dirs.seen(7) as at:
        facts = (at / "set/x").stat()
        assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o7777) == (
            ALICE.uid,
            ALICE.gid,
            0o755,
        )


def test_decompression_bomb_is_declined_when_the_job_directory_is_full(dirs: Dirs) -> None:
    file = dirs.source / "bomb.tar.gz"
    zeros = dirs.source / "zeros"
    subprocess.run(["truncate", "-s", "1G", zeros], check=True)
    subprocess.run(["tar", "czf", file, "-C", dirs.source, "zeros"], check=True)
    assert file.stat().st_size < 2 * MIB
    begun(dirs, f"{file}@job", size="32M")
    assert told(dirs) == [("declined", "job-dir-full")]
    with dirs.seen(7) as at:
        assert left(at) == []


@pytest.mark.parametrize("cut", ["header", "bytes", "end", "junk", "empty"])
def test_damaged_tar_archive_is_declined_and_leaves_no_file(dirs: Dirs, cut: str) -> None:
    file = packed(dirs, *((f"f{n}", b"x" * 1000, {}) for n in range(5)))
    data = bytearray(file.read_bytes())
    if cut == "header":
        data[3 * 1536 + 10 : 3 * 1536 + 300] = b"!" * 290
    cuts = {"bytes": data[: 2 * 1536 + 700], "end": data[: 3 * 1536], "empty": b""}
    file.write_bytes(bytes({"junk": b"junk" * 1000, **cuts}.get(cut, data)))
    begun(dirs, f"{file}@job")
    assert told(dirs) == [("declined", "not-put")]
    with dirs.seen(7) as at:
        assert left(at) == []


@pytest.mark.cases(2)
@pytest.mark.parametrize("at", [70_000, -6], ids=["middle", "checksum"])
@pytest.mark.parametrize("mode", ["gz", "bz2", "xz", "zst"])
def test_archive_with_damaged_compression_is_declined_and_leaves_no_file(
    dirs: Dirs, mode: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_in, "BLOCK", 512)  # else all of so small a one is read at once
    # All files are in the first 128 KiB, which zstd writes before it knows the checksum; the rest
    # is filling, of which no tar has need.
    sizes = (30000, 30000, 30000, 30000, 3000)
    bare = packed(dirs, *((f"f{n}", os.urandom(size), {}) for n, size in enumerate(sizes)))
    assert bare.stat().st_size > 128 * 1024
    file = dirs.source / f"set.tar.{mode}"
    with file.open("wb") as out:
        subprocess.run([PACKERS[mode], "-c", bare], stdout=out, check=True)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    begun(dirs, f"{file}@job")
    assert told(dirs) == [("declined", "not-put")]
    with dirs.seen(7) as seen:
        assert left(seen) == []


def test_archive_header_larger_than_the_memory_limit_is_declined(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_in, "MEMORY", 1 << 30)
    raw = tarfile.TarInfo("././@LongLink")
    raw.type, raw.size = tarfile.GNUTYPE_LONGNAME, 2 << 30
    file = dirs.source / "set.tar"
    file.write_bytes(raw.tobuf(tarfile.GNU_FORMAT))
    os.truncate(file, 3 << 30)
    begun(dirs, f"{file}@job")
    (outcome,) = dirs.step(7).outcomes
    assert "does not fit into memory" in outcome.detail


def deep(top: Path, levels: int) -> None:
    """Directories in each other, deeper than any path can say."""
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_tree_deeper_than_the_longest_path_is_declined_and_removed(dirs: Dirs) -> None:
    deep(dirs.source / "deep", 3000)
    begun(dirs, f"{dirs.source}/deep@job")
    (outcome,) = dirs.step(7).outcomes
    assert outcome.reason == "not-put"
    with dirs.seen(7) as at:
        assert left(at) == []
    subprocess.run(["rm", "-rf", dirs.source / "deep"], check=True)


@pytest.mark.parametrize("levels", [20_000])
def test_remove_tree_deletes_20000_nested_directories_and_follows_no_link(
    node: Node, levels: int
) -> None:
    top = node.nvme  # in memory: a disk that others keep busy takes a minute for so many
    deep(top / "deep", levels)
    (top / "deep/d/file").write_text("x")
    (top / "outside").write_text("stays")
    (top / "deep/link").symlink_to(top / "outside")
    fd = os.open(top, os.O_RDONLY)
    remove_tree(fd, "deep", "deep.")
    os.close(fd)
    assert left(top) == ["outside"]


def test_users_link_in_the_job_directory_does_not_redirect_a_copy_outside(
    dirs: Dirs, home: Path
) -> None:
    begun(dirs, f"{tree(dirs)}@job")
    with dirs.seen(7) as at:  # another step of the user's was first
        as_alice(f"ln -s {home} .forestage-0; mkdir -p .forestage-0.1/x", at)
    assert told(dirs) == [("copied", "")]
    assert (home / "precious").read_text() == "mine"
    with dirs.seen(7) as at:
        assert left(at) == ["tree"]


NO_NEW_PRIVS, DUMPABLE = 39, 3  # linux/prctl.h: what asks for them


def must_be_confined() -> None:
    libc = ctypes.CDLL(None)
    assert os.listdir("/") == []
    assert {*os.getresuid(), *os.getresgid(), *os.getgroups()} == {ALICE.uid}
    assert (libc.prctl(NO_NEW_PRIVS, 0, 0, 0, 0), libc.prctl(DUMPABLE, 0, 0, 0, 0)) == (1, 0)
    with pytest.raises(PermissionError):
        os.setuid(0)


def test_confined_copier_cannot_leave_its_root_or_regain_privileges(
    dirs: Dirs, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()

    def life() -> None:
        os.setgroups([0, 4242])
        copy_in.confine(os.open(tmp_path / "empty", os.O_RDONLY), ALICE)
        must_be_confined()

    process = _fork.Process(target=life)
    process.start()
    process.join()
    assert process.exitcode == 0


CONFINED_ALONE = """
import os, sys
from forestage.system.as_user import User
from forestage.features.data import copy_in
copy_in.preload_modules()
known = set(sys.modules)
copy_in.confine(os.open(sys.argv[1], os.O_RDONLY), User("alice", 65534, 65534, (65534,)))
sys.exit(f"loaded later: {set(sys.modules) - known}" if set(sys.modules) - known else 0)
"""


def test_confining_the_copier_imports_no_module_after_copy_in_load(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    # A process of its own: this one has loaded all that any test needs.
    argv = [sys.executable, "-c", CONFINED_ALONE, str(tmp_path / "empty")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_tree_copy_into_the_job_directory_runs_confined_as_the_user(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(dirs, f"{tree(dirs)}@job")
    real = copy_in.copy_tree

    def looked(source: int, still: copy_in.TimeCheck) -> int:
        must_be_confined()
        return real(source, still)

    monkeypatch.setattr(copy_in, "copy_tree", looked)
    assert told(dirs) == [("copied", "")]


def test_killed_copier_is_declined_and_the_next_step_copies_again(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tree(dirs)
    begun(dirs, f"{top}@job")

    def dies(source: int, still: copy_in.TimeCheck) -> int:
        Path("/half").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(copy_in, "copy_tree", dies)
        assert told(dirs) == [("declined", "not-put")]
    with dirs.seen(7) as at:
        assert left(at) == []  # half a copy takes no room, nor memory
    assert told(dirs) == [("copied", "")]
    with dirs.seen(7) as at:
        assert left(at) == ["tree"]
        assert content(at / "tree") == content(top)


def test_copier_completes_after_its_waiting_step_was_killed(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun(dirs, f"{tree(dirs)}@job")
    real = copy_in.copy_tree
    go, here = tmp_path / "go", tmp_path / "here"
    os.mkfifo(go)
    waiting = os.open(go, os.O_RDWR)
    come = os.open(here, os.O_WRONLY | os.O_CREAT, 0o666)

    def slow(source: int, still: copy_in.TimeCheck) -> int:
        os.write(come, b"x")
        os.read(waiting, 1)
        return real(source, still)

    monkeypatch.setattr(copy_in, "copy_tree", slow)
    monkeypatch.setattr(
        forked_child, "close_descriptors_except", lambda keep: None
    )  # the pipe is the test's
    step = _fork.Process(target=told, args=(dirs,))
    step.start()
    until(lambda: here.stat().st_size, "the copy")
    step.kill()
    step.join()
    os.write(waiting, b"xx")
    # The other one waits for the copy, and finds it.
    assert told(dirs) == [("copied", "")]
    with dirs.seen(7) as at:
        assert left(at) == ["tree"]
