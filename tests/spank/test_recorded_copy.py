"""A step whose job was shown the image before needs no helper; whatever is unusual asks one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from companion import GID, JOB, KEY, LEASES, MARK, SERVED, UID, Keeper, Step, shown_before
from test_bind import options

from forestage import events
from forestage.cache import step_record
from forestage.cache.lease import EntryUse, Lease, LeaseDirectory
from forestage.cache.step_record import RecordedImage
from forestage.events import EventRecord, OutcomeResult, RequestOutcome, user_files
from forestage.paths import NodePaths
from forestage.system import files
from forestage.system.as_user import User

BATCH = 4294967291  # the step, as fake.c has it


@pytest.fixture
def noted(step: Step) -> Step:
    """As a hook leaves it that found the image in the cache."""
    places = NodePaths(step.folder)
    (places.etc / "conf.d").mkdir(parents=True)
    (places.etc / "conf.d/site.yaml").write_text("sources: [/]\n")
    places.events.parent.mkdir(parents=True)
    (step.entry().parent / "used").touch()
    os.utime(step.entry().parent / "used", (5, 5))
    note(step)
    return step


def note(
    step: Step,
    asked: str | None = None,
    uid: int = UID,
    answer: Callable[[Step], str] = Step.use,
    result: OutcomeResult = "hit",
) -> None:
    places, leases = NodePaths(step.folder), LeaseDirectory(LEASES)
    decided = [*step_record.format_config_lines(places), "room\t0\t3", *by_binds(step)]
    leases.write_lease(
        Lease(JOB, User("", UID, GID), 1.0, str(step.folder / "cache"), (EntryUse(KEY),))
    )
    found = RequestOutcome(
        result, request='a\t"b', image=str(step.image), key=KEY, redirect="spank"
    )
    event = EventRecord(time=0.0, hook="step", job=JOB, outcome=found, user="u", uid=UID)
    text = msgspec.json.encode(event).decode().removeprefix('{"time":0.0,')
    image = RecordedImage(asked or str(step.image), uid, text, tuple(answer(step).split("\t")))
    step_record.add_images(leases, JOB, decided, [image])


def by_binds(step: Step) -> tuple[str, ...]:
    """As hooks/container_binds has it, without an enroot, of a user without files of their own."""
    own = step.folder / "shared/.config"
    facts = step.image.stat()
    times = facts.st_mtime_ns, facts.st_ctime_ns
    theirs = {str(own): (0, 0, 0, 0), str(step.image): (facts.st_ino, facts.st_size, *times)}
    return step_record.format_bind_lines("", {}, theirs, {"XDG_CONFIG_HOME": None, "LATER": None})


def record(step: Step) -> str:
    return LeaseDirectory(LEASES).step_record_file(JOB).read_text()


def test_recorded_copy_is_redirected_without_a_helper(noted: Step) -> None:
    ran = noted.run("tasks=2", f"task=stat -c %i {noted.image}")
    assert ran.out.split() == [str(noted.entry().stat().st_ino)] * 2
    assert noted.asked() == 0
    assert ran.logged == ""
    assert ran.said == []


@contextlib.contextmanager
def prolog_at_work() -> Iterator[Path]:
    """As hooks/background_prolog.py has it: the mark of a Prolog whose script has ended."""
    mark = LEASES / f"{JOB}.prolog"
    fd = os.open(mark, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield mark
    finally:
        mark.unlink()
        os.close(fd)


def openings(file: Path) -> int:
    """How many descriptors lead there, of all processes."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        fds: list[Path] = []
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fds = list((process / "fd").iterdir())
        for fd in fds:
            with contextlib.suppress(OSError):
                found += os.readlink(fd) == str(file)
    return found


def test_step_waits_for_the_record_of_a_running_prolog_and_starts_no_helper(noted: Step) -> None:
    LeaseDirectory(LEASES).step_record_file(JOB).unlink()
    with ThreadPoolExecutor(1) as pool:
        with prolog_at_work() as mark:
            ran = pool.submit(noted.run, f"task=stat -c %i {noted.image}")
            while openings(mark) < 2 and not ran.done():
                time.sleep(0.001)
            note(noted)
        assert ran.result().out.split() == [str(noted.entry().stat().st_ino)]
    assert noted.asked() == 0


def test_step_starts_the_helper_if_the_prolog_does_not_end(noted: Step) -> None:
    LeaseDirectory(LEASES).step_record_file(JOB).unlink()
    with prolog_at_work():
        ran = noted.run(f"task=stat -c %i {noted.image}")
    assert (ran.out.split(), noted.asked()) == ([str(noted.entry().stat().st_ino)], 1)


def test_step_without_a_helper_records_an_event_and_does_not_touch_the_entry(noted: Step) -> None:
    noted.run()
    (event,) = events.read_events(NodePaths(noted.folder).events)
    assert event is not None
    assert (event.hook, event.job, event.step, event.uid) == ("step", JOB, BATCH, UID)
    assert isinstance(event.outcome, RequestOutcome)
    assert (event.outcome.result, event.outcome.request) == ("hit", 'a\t"b')
    assert event.time > 1e9
    assert 0 < event.total < 240
    assert (noted.entry().parent / "used").stat().st_mtime == 5


@pytest.fixture
def frozen(private_mounts: None, noted: Step) -> Iterator[Step]:
    """The cache lies on a disk that takes no writes: who writes hangs, and no signal ends that."""
    cache, disk = noted.folder / "cache", noted.folder / "disk"
    with disk.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    cache.rename(noted.folder / "made")
    cache.mkdir()
    subprocess.run(["mount", "-o", "loop", disk, cache], check=True)
    shutil.copytree(noted.folder / "made", cache, dirs_exist_ok=True)
    cache.chmod(0o700)
    subprocess.run(["fsfreeze", "--freeze", cache], check=True)
    yield noted
    subprocess.run(["fsfreeze", "--unfreeze", cache], check=True)
    subprocess.run(["umount", "--lazy", cache], check=True)


def test_step_without_a_helper_gets_its_copy_from_a_frozen_disk(frozen: Step) -> None:
    ran = frozen.run("tasks=2", f"task=stat -c %i {frozen.image}")
    assert ran.out.split() == [str(frozen.entry().stat().st_ino)] * 2
    assert frozen.asked() == 0
    assert ran.logged == ""
    assert len(list(events.read_events(NodePaths(frozen.folder).events))) == 1


def test_read_through_file_is_mounted_without_a_helper_during_the_copy(
    noted: Step, keeper: Keeper
) -> None:
    keeper("clones")
    note(noted, answer=Step.through, result="through")
    hidden = f"between=mv {noted.place}/sock {noted.folder}/sock"  # as if the copy were whole now
    ran = noted.run(hidden, "tasks=2", f"task=cat {noted.image}")
    assert (ran.out, noted.asked(), ran.logged) == (2 * SERVED, 0, "")
    (event,) = events.read_events(NodePaths(noted.folder).events)
    assert isinstance(event.outcome, RequestOutcome)
    assert (event.outcome.result, event.outcome.redirect) == ("through", "spank")
    assert (noted.entry().parent / "used").stat().st_mtime == 5


@pytest.mark.parametrize("left", [True, False])
def test_step_starts_the_helper_if_its_keeper_is_gone(noted: Step, left: bool) -> None:
    noted.place.mkdir(mode=0o700, parents=True)
    if left:  # as one that was killed leaves it
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"{noted.place}/sock")
    note(noted, answer=Step.through, result="through")
    ran = noted.run(f"task=stat -c %i {noted.image}")
    assert (ran.out.split(), noted.asked()) == ([str(noted.entry().stat().st_ino)], 1)
    assert not NodePaths(noted.folder).events.exists()


def test_event_of_a_step_without_a_helper_starts_on_a_new_line(noted: Step) -> None:
    log = NodePaths(noted.folder).events
    log.write_text('{"cut": "sho')
    noted.run()
    noted.run()
    assert [bool(event) for event in events.read_events(log)] == [True, True]


@pytest.fixture
def own(noted: Step) -> Path:
    """What a hook has made for the step's user."""
    file = user_files.user_file_path(MARK.parent / "users", UID)
    file.parent.mkdir(parents=True)
    file.touch(0o600)
    return file


def test_event_of_a_step_without_a_helper_is_also_written_to_the_users_file(
    noted: Step, own: Path
) -> None:
    noted.run()
    assert own.read_bytes() == NodePaths(noted.folder).events.read_bytes()
    own.write_text('{"cut": "sho')
    noted.run()
    assert [bool(event) for event in events.read_events(own)] == [True]


def test_companion_does_not_create_a_users_event_file(noted: Step) -> None:
    noted.run()
    assert len(list(events.read_events(NodePaths(noted.folder).events))) == 1
    assert not (MARK.parent / "users").exists()


@pytest.mark.parametrize("kind", ["link", "FIFO", "another owner's"])
def test_companion_does_not_write_to_a_link_fifo_or_foreign_file_as_users_event_file(
    noted: Step, own: Path, kind: str
) -> None:
    other = noted.folder / "elsewhere"
    other.touch()
    if kind == "another owner's":
        os.chown(own, UID, GID)
    else:
        own.unlink()
        own.symlink_to(other) if kind == "link" else os.mkfifo(own)
    with files.open_descriptor(own, os.O_RDONLY | os.O_NONBLOCK) as fd:
        noted.run()
        assert os.read(fd, 1) == b""
    assert noted.asked() == 0
    assert len(list(events.read_events(NodePaths(noted.folder).events))) == 1


def test_full_event_file_of_a_user_frees_its_oldest_blocks(noted: Step, own: Path) -> None:
    own.write_bytes((b"x" * 511 + b"\n") * (2 * user_files.MAX_USER_FILE_BYTES // 512))
    size, inode = own.stat().st_size, own.stat().st_ino
    noted.run()
    facts = own.stat()
    assert facts.st_blocks * 512 <= user_files.KEPT_USER_FILE_BYTES + 8192
    assert (facts.st_ino, facts.st_size > size) == (inode, True)
    assert [
        event.job for event in events.read_latest_events(own, 2 * user_files.MAX_USER_FILE_BYTES)
    ] == [JOB]


def test_companion_does_not_follow_a_link_in_place_of_the_event_log(noted: Step) -> None:
    NodePaths(noted.folder).events.symlink_to(noted.folder / "elsewhere")
    noted.run()
    assert noted.asked() == 0
    assert not (noted.folder / "elsewhere").exists()


@pytest.mark.parametrize("result", ["hit", "through"])
def test_step_without_a_helper_sets_the_result_and_path_variables(
    noted: Step, keeper: Keeper, result: OutcomeResult
) -> None:
    if result == "through":
        note(noted, answer=Step.through, result="through")
        keeper("clones")
    ran = noted.run("env=FORESTAGE_RESULT=theirs", "env=FORESTAGE_IMAGE_PATH=/theirs")
    assert noted.asked() == 0
    assert ran.facts("setenv") == {
        f"setenv 1 FORESTAGE_RESULT={result}", f"setenv 1 FORESTAGE_IMAGE_PATH={noted.image}"
    }  # fmt: skip


def test_recorded_relative_path_is_used_only_in_its_folder(noted: Step) -> None:
    folder = noted.image.parent
    note(noted, f"{folder}/./img.sqsh")
    ran = noted.run(f"cwd={folder}", image="./img.sqsh")
    assert (noted.asked(), len(options(ran.mounts[0], noted.image))) == (0, 1)
    noted.run(f"cwd={noted.folder}", image="./img.sqsh")
    assert noted.asked() == 1


UNUSUAL = {
    "no record": "rm {leases}/77.shown",
    "record of another owner": "chown 4242 {leases}/77.shown",
    "record that others may write": "chmod 0622 {leases}/77.shown",
    "record that is a link": "mv {leases}/77.shown {0}/r; ln -s {0}/r {leases}/77.shown",
    "record that is a FIFO": "rm {leases}/77.shown; mkfifo -m 600 {leases}/77.shown",
    "record that is cut short": "truncate -s -1 {leases}/77.shown",
    "record that is empty": "truncate -s 0 {leases}/77.shown",
    "record that is too long": "yes 'image\t' | head -c 65536 >> {leases}/77.shown",
    "record of another release": "sed -i '1s/4/3/' {leases}/77.shown",
    "record of another boot": "sed -i 's/^boot\t.*/boot\tx/' {leases}/77.shown",
    "record without a word of room": "sed -i '/^room/d' {leases}/77.shown",
    "record with a damaged word of room": "sed -i 's/^room.*/room\t0/' {leases}/77.shown",
    "disk without what stays free": "sed -i 's/^room.*/room\t{huge}\t1/' {leases}/77.shown",
    "disk without room to unpack": "sed -i 's/^room.*/room\t0\t{huge}/' {leases}/77.shown",
    "record with a damaged line": "sed -i 's/^file.*disabled.*/file\t/' {leases}/77.shown",
    "record without what is decided": "sed -i 's/^image\t.*/image\t\t/' {leases}/77.shown",
    "enroot that has gone": "sed -i 's,^enroot.*,enroot\t/usr/bin/enroot,' {leases}/77.shown",
    "file of the user's that came": "touch {0}/shared/.config",
    "file of the user's that is another": r"sed -i 's/\(^theirs.*\)./\1x/' {leases}/77.shown",
    "more files of the user's than are kept": "yes 'theirs\t/n\t0\t0\t0\t0' | head -33 > {0}/l;"
    " sed -i '/^room/r {0}/l' {leases}/77.shown",
    "variable that is not set": "sed -i 's/^variable.LATER.*/&\t/' {leases}/77.shown",
    "lease that a hook confirmed": "touch {leases}/77.json",
    "lease that is gone": "rm {leases}/77.json",
    "switched off": "mkdir -p {0}/run/forestage; touch {0}/run/forestage/disabled",
    "switched off by a link": "mkdir -p {0}/run/forestage; ln -s x {0}/run/forestage/disabled",
    "configuration that came": "touch {0}/etc/forestage/forestage.yaml",
    "configuration that changed": "touch {0}/etc/forestage/conf.d/site.yaml",
    "configuration that has a part more": "touch {0}/etc/forestage/conf.d/a.yaml",
    "source that is written": "echo 'the other' > {0}/shared/img.sqsh",
    "source that is another": "cp {0}/shared/img.sqsh {0}/n; mv {0}/n {0}/shared/img.sqsh",
    "path that leads elsewhere": "mv {0}/shared {0}/moved; ln -s moved {0}/shared",
    "source that is closed to the user": "chmod 0700 {0}/shared",
    "source that is a FIFO": "rm {0}/shared/img.sqsh; mkfifo {0}/shared/img.sqsh",
    "entry that is gone": "rm {0}/cache/entries/{key}/image",
    "entry of another size": "echo >> {0}/cache/entries/{key}/image",
    "entry that others may change": "chmod 0701 {0}/cache/entries/{key}",
    "redirect over the path": "mount --bind {0}/cache/entries/{key}/image {0}/shared/img.sqsh",
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("work", UNUSUAL)
def test_step_starts_the_helper_if_record_lease_source_or_entry_has_changed(
    noted: Step, work: str
) -> None:
    noted.answers("leave\tas the test wants it")
    noted.run(f"before={UNUSUAL[work].format(noted.folder, key=KEY, leases=LEASES, huge=10**15)}")
    assert noted.asked() == 1
    assert not NodePaths(noted.folder).events.exists()


def test_recorded_step_that_saves_a_container_starts_the_helper(noted: Step) -> None:
    noted.run(f"save={noted.folder}/save.sqsh")
    assert noted.asked() == 1


@pytest.mark.parametrize(
    ("said", "asks"),
    [
        (["DATA=/a"], 0),
        (["DATA=/b", "DATA=/a", "DATABASE=/b"], 0),
        (["DATA=/a", "DATA=/b"], 1),
        (["DATA=/ab"], 1),
        (["DATA="], 1),
        ([], 1),
        (["DATA=/a", "XDG_CONFIG_HOME=/b"], 1),
        (["DATA=/a", "XDG_CONFIG_HOME="], 1),
    ],
)
def test_step_starts_the_helper_if_a_recorded_variable_differs(
    noted: Step, said: list[str], asks: int
) -> None:
    file = LeaseDirectory(LEASES).step_record_file(JOB)
    file.write_text(record(noted).replace("variable\tLATER", "variable\tDATA\t/a"))
    noted.run(*(f"env={one}" for one in said))
    assert noted.asked() == asks


def test_step_starts_the_helper_if_its_path_variable_finds_another_enroot(noted: Step) -> None:
    program = noted.folder / "bin/enroot"
    program.parent.mkdir()
    program.write_text("")
    noted.environ["PATH"] = f"relative::{program.parent}/:{os.environ['PATH']}"
    noted.run()
    assert noted.asked() == 0  # which nobody could start
    program.chmod(0o755)
    noted.run()
    assert noted.asked() == 1
    file = LeaseDirectory(LEASES).step_record_file(JOB)
    file.write_text(record(noted).replace("enroot\t", f"enroot\t{program.parent}//enroot"))
    noted.run()
    assert noted.asked() == 1


def test_recorded_files_of_the_user_are_checked_with_the_users_rights(noted: Step) -> None:
    own = noted.folder / "shared/.config"
    own.mkdir(mode=0o700)
    os.utime(own, (1, 1))
    facts = own.stat()
    numbers = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    line = "\t".join(map(str, ("theirs", own, *numbers)))
    before = f"theirs\t{own}\t0\t0\t0\t0"
    LeaseDirectory(LEASES).step_record_file(JOB).write_text(record(noted).replace(before, line))
    noted.run()
    assert noted.asked() == 0
    (noted.folder / "shared/closed").mkdir(mode=0o700)  # root's, as all of it
    inside = noted.folder / "shared/closed/mounts.d"
    text = record(noted).replace(line, f"theirs\t{inside}\t0\t0\t0\t0")
    LeaseDirectory(LEASES).step_record_file(JOB).write_text(text)
    noted.run()
    assert noted.asked() == 1


@pytest.mark.parametrize("flag", ["container-mount-home", "no-container-mount-home"])
def test_step_with_a_mount_home_flag_starts_the_helper(noted: Step, flag: str) -> None:
    noted.run(f"flag={flag}")
    assert noted.asked() == 1


def test_contained_step_starts_the_helper_despite_its_record(noted: Step) -> None:
    noted.run("contained=1")
    assert noted.asked() == 1


def test_step_starts_the_helper_if_the_record_is_for_another_user(noted: Step) -> None:
    note(noted, uid=UID + 1)
    (line,) = [one for one in record(noted).splitlines() if f"\t{UID}\t" in one]
    text = record(noted).replace(line + "\n", "")
    LeaseDirectory(LEASES).step_record_file(JOB).write_text(text)
    noted.run()
    assert noted.asked() == 1


def test_hanging_source_does_not_block_the_step_manager(noted: Step, keeper: Keeper) -> None:
    keeper("hangs")
    noted.answers("leave\tas the test wants it")
    noted.run(f"before={shown_before(noted)}")
    assert noted.asked() == 1
