"""Directories that a container binds: with a redirect below one it would not start."""

from __future__ import annotations

import fcntl
import os
import pwd
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.cache.layout import Entry
from forestage.clock import Clock
from forestage.hooks import container_binds, hook_deadlines
from forestage.hooks.boundary import HookRun
from forestage.slurm.enroot import UNKNOWN
from forestage.slurm.job import HOME_OPTION, NO_HOME_OPTION
from forestage.stage import fstab
from forestage.system import run
from forestage.system.files import open_descriptor
from forestage.system.lock_ranges import NODE_MOUNTS, TASK_MOUNTS, USER_FILES, LockRange
from helper import Helper, ask, environ, noted
from node import ALICE, Node, children_left, held_at, until

Said = dict[str, str]
LEAVE = ["leave", "below-bind"]
YES, NO = {HOME_OPTION: "1"}, {NO_HOME_OPTION: "1"}
# As `make install` leaves it, in part.
SCRIPT = """#! /usr/bin/env bash
config::init "{sysconf}/enroot.conf"
config::export ENROOT_LIBRARY_PATH     "/usr/local/lib/enroot"
config::export ENROOT_SYSCONF_PATH     "{sysconf}"
"""


@pytest.fixture
def home(node: Node) -> Said:
    """That a step's HOME is alice's folder on the shared file system."""
    node.configure(redirect="spank")
    return {"FORESTAGE_HOME": str(node.shared / "alice")}


def set_enroot(
    node: Node, text: str, name: str = "enroot.conf", sysconf: str = "etc/enroot"
) -> None:
    file = node.places.root / sysconf / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def install(node: Node, sysconf: str, program: str = "usr/local/bin/enroot") -> None:
    file = node.places.root / program
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SCRIPT.format(sysconf=sysconf))
    file.chmod(0o755)


def answer_to(
    node: Node, path: Path, said: Said, variables: dict[str, str] | None = None
) -> list[str]:
    return Helper(node, environ(node, 7, path) | said, variables).answer()


def lines(node: Node, kind: str) -> list[list[str]]:
    text = node.leases.step_record_file(7).read_text()
    found = (line.split("\t") for line in text.splitlines())
    return [line[1:] for line in found if line[0] == kind]


@pytest.mark.parametrize("said", [YES, {}], ids=["step", "site"])
def test_image_in_a_home_that_containers_mount_is_not_served(
    node: Node, home: Said, said: Said
) -> None:
    path = node.put("alice/image.sqsh")
    if not said:
        set_enroot(node, "ENROOT_MOUNT_HOME  yes\n")
    assert answer_to(node, path, home | said) == LEAVE
    assert node.entries() == set()
    assert noted(node, 7) == []


@pytest.mark.parametrize("setting", ["ENROOT_MOUNT_HOME no", "#ENROOT_MOUNT_HOME yes", ""])
def test_image_in_a_home_that_containers_do_not_mount_is_served(
    node: Node, home: Said, setting: str
) -> None:
    set_enroot(node, setting)
    assert answer_to(node, node.put("alice/image.sqsh"), home)[0] == "use"


def test_step_without_home_mount_is_served_and_leaves_no_record_for_other_steps(
    node: Node, home: Said
) -> None:
    path = node.put("alice/image.sqsh")
    set_enroot(node, "ENROOT_MOUNT_HOME yes\n", "enroot.conf.d/site.conf")
    assert answer_to(node, path, home | NO)[0] == "use"
    assert noted(node, 7) == []
    assert answer_to(node, path, home) == LEAVE


def test_image_outside_the_mounted_home_is_served(node: Node, home: Said) -> None:
    assert answer_to(node, node.put("images/image.sqsh"), home | YES)[0] == "use"
    assert answer_to(node, node.put("alice2/image.sqsh"), home | YES)[0] == "use"


def test_image_below_a_mounted_home_that_is_a_symlink_is_not_served(node: Node) -> None:
    node.configure(redirect="spank")
    path, link = node.put("alice/image.sqsh"), node.places.root / "home"
    link.symlink_to(path.parent)
    assert answer_to(node, path, {"FORESTAGE_HOME": str(link)} | YES) == LEAVE


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{folder} {folder} none x-create=dir,bind,rw", LEAVE),
        ("{folder}/ /data none bind", LEAVE),
        ("${{HOME}} /home none bind,rw", LEAVE),
        ("{folder} /data none x-create=dir,rbind,rw", ["use"]),
        ("{folder}/image /data none bind", ["use"]),
        ("${{ELSE}} /data none bind", LEAVE),
        ("{folder}${{ELSE}} /data none bind", LEAVE),
        ("/elsewhere/${{ELSE}} /data none bind", ["use"]),
        ("# {folder} /data none bind", ["use"]),
        ("tmpfs /tmp tmpfs bind", ["use"]),
        ("tmpfs bind", ["use"]),
        ("{folder} bind", LEAVE),
        ("{folder} /data bind,ro", LEAVE),
        ("{folder} /data", ["use"]),
        ("{folder} /data none bind,rbind", ["use"]),
        ("{folder} /data none remount,bind,ro", ["use"]),
        ("/mnt/sh\\141red /data none bind", LEAVE),
        ("/mnt//shared/ /data none bind", LEAVE),
    ],
)
def test_image_below_a_directory_in_the_sites_enroot_fstab_is_not_served(
    node: Node, home: Said, line: str, said: list[str]
) -> None:
    path = node.put("alice/image.sqsh")
    set_enroot(node, line.format(folder=path.parent) + "\n", "mounts.d/50-site.fstab")
    set_enroot(node, f"{path.parent} /x none bind\n", "mounts.d/50-site.fstab.rpmsave")
    assert answer_to(node, path, home)[: len(said)] == said


@pytest.mark.parametrize("redirected", ["bind", "spank"])
def test_prolog_finds_the_mounted_home_by_uid_and_declines(
    node: Node, monkeypatch: pytest.MonkeyPatch, redirected: str
) -> None:
    node.configure(redirect=redirected)
    path = node.put("alice/image.sqsh")
    me = pwd.struct_passwd(("alice", "x", ALICE.uid, ALICE.gid, "", str(path.parent), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", {ALICE.uid: me}.__getitem__)
    given = node.environ(7, path) | YES
    HookRun("prolog", given, 0.0).run(node.places, Clock())
    (outcome,) = node.outcomes("prolog", 7)
    assert (outcome.result, outcome.reason) == ("declined", "below-bind")
    assert node.binds() == {}
    assert os.listdir(node.cache.entries) == []


def test_step_without_home_variables_is_served(node: Node, home: Said) -> None:
    path = node.put("alice/image.sqsh")
    assert ask(node, 7, path)[0] == "use"


def test_step_that_mounts_the_home_unmounts_its_prologs_redirect(node: Node, home: Said) -> None:
    node.configure(redirect="bind")
    path = node.put("alice/image.sqsh")
    node.prolog(7, path)
    until(lambda: str(path) in node.binds(), "the redirect")
    assert answer_to(node, path, home | YES) == LEAVE
    assert node.binds() == {}
    assert node.epilog(7).code == 0


def test_step_with_a_false_home_unmounts_no_redirect_of_another_job(
    node: Node,
) -> None:
    path = node.staged(1)
    assert answer_to(node, path, {"FORESTAGE_HOME": str(path.parent)} | YES)[1] == "below-bind"
    assert str(path) in node.binds()


def test_enroot_configuration_is_read_from_the_prefix_of_the_enroot_script(spank: Node) -> None:
    path = spank.put("alice/image.sqsh")
    line = f"{spank.shared} {spank.shared} none x-create=dir,bind,rw,nosuid\n"
    set_enroot(spank, line, "mounts.d/50-site.fstab", "usr/local/etc/enroot")
    assert answer_to(spank, path, {}, {})[0] == "use"  # nobody reads it
    install(spank, "/usr/local/etc/enroot")
    assert answer_to(spank, path, {}, {}) == LEAVE
    (outcome,) = spank.outcomes("step", 7)[1:]
    assert "/usr/local/etc/enroot/mounts.d/50-site.fstab:1" in outcome.detail


def test_enroot_conf_below_the_prefix_of_the_enroot_script_decides(spank: Node) -> None:
    path = spank.put("alice/image.sqsh")
    install(spank, "/usr/local/etc/enroot")
    set_enroot(spank, "ENROOT_MOUNT_HOME=yes\n", sysconf="usr/local/etc/enroot")
    set_enroot(spank, "ENROOT_MOUNT_HOME no\n", "enroot.conf.d/x.conf", "usr/local/etc/enroot")
    set_enroot(spank, "ENROOT_MOUNT_HOME no\n")
    assert answer_to(spank, path, {}, {"HOME": str(path.parent)}) == LEAVE


def test_enroot_is_searched_on_the_path_of_slurmd(spank: Node) -> None:
    path = spank.put("alice/image.sqsh")
    install(spank, "/opt/enroot/etc", "opt/enroot/bin/enroot")
    install(spank, "/usr/local/etc/enroot")
    set_enroot(spank, f"{spank.shared} bind\n", "mounts.d/x.fstab", "opt/enroot/etc")
    assert answer_to(spank, path, {}, {})[0] == "use"
    said = {"FORESTAGE_PATH": "relative:/opt/enroot/bin:/usr/local/bin"}
    assert answer_to(spank, path, said, {}) == LEAVE


def test_enroot_wrapper_without_a_prefix_is_skipped_for_the_next_on_the_path(spank: Node) -> None:
    path = spank.put("alice/image.sqsh")
    install(spank, "/usr/etc/enroot", "usr/bin/enroot")
    install(spank, "$nowhere")
    set_enroot(spank, f"{spank.shared} bind\n", "mounts.d/x.fstab", "usr/etc/enroot")
    assert answer_to(spank, path, {}, {}) == LEAVE


def write_user_file(
    node: Node, text: str, name: str = "alice/.config/enroot/mounts.d/x.fstab"
) -> None:
    node.put(name, text.encode())


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("place", "variables"),
    [
        (".config/enroot", {}),
        ("conf", {"ENROOT_CONFIG_PATH": "{home}/conf"}),
        ("conf", {"ENROOT_CONFIG_PATH": "alice/conf"}),
        ("xdg/enroot", {"XDG_CONFIG_HOME": "{home}/xdg"}),
        ("sys", {"ENROOT_SYSCONF_PATH": "{home}/sys"}),
    ],
)
def test_image_below_a_directory_in_the_users_enroot_fstab_is_not_served(
    spank: Node, place: str, variables: dict[str, str]
) -> None:
    path, home = spank.put("images/image.sqsh"), spank.shared / "alice"
    given = {name: value.format(home=home) for name, value in variables.items()}
    write_user_file(spank, f"{spank.shared} /data none bind\n", f"alice/{place}/mounts.d/x.fstab")
    assert answer_to(spank, path, {}, {"HOME": str(home)} | given) == LEAVE
    assert answer_to(spank, path, {}, {"HOME": "/nowhere"})[0] == "use"


def test_users_enroot_directory_is_taken_from_enroot_conf(spank: Node) -> None:
    path = spank.put("images/image.sqsh")
    write_user_file(spank, f"{spank.shared} bind\n", "alice/own/mounts.d/x.fstab")
    set_enroot(spank, "ENROOT_CONFIG_PATH ${HOME}/own\n")
    assert answer_to(spank, path, {}, {"HOME": str(spank.shared / "alice")}) == LEAVE
    set_enroot(spank, "ENROOT_CONFIG_PATH $(pwd)/own\n")
    assert answer_to(spank, path, {}, {"HOME": "/"}) == LEAVE  # nobody knows
    assert answer_to(spank, path, {}, {"ENROOT_CONFIG_PATH": "/nowhere"})[0] == "use"


def test_enroot_fstab_variables_are_expanded_from_the_steps_environment(spank: Node) -> None:
    path = spank.put("images/image.sqsh")
    set_enroot(spank, "${DATA}/images /data none bind\n", "mounts.d/50-site.fstab")
    assert answer_to(spank, path, {}, {"DATA": "/elsewhere"})[0] == "use"
    assert answer_to(spank, path, {}, {"A": "b"})[0] == "use"  # for enroot the other one is ""
    assert answer_to(spank, path, {}, {"DATA": str(spank.shared)}) == LEAVE


def test_image_below_a_bound_directory_named_by_a_symlink_is_not_served(spank: Node) -> None:
    path, link = spank.put("images/image.sqsh"), spank.places.root / "data"
    link.symlink_to(spank.shared)
    set_enroot(spank, f"{link} /data none bind\n", "mounts.d/50-site.fstab")
    assert answer_to(spank, path, {}, {}) == LEAVE


DOUBTS = {
    "a hook of the user's": ("hooks.d/x.sh", "true\n", 0o755),
    "an fstab that is closed to them": ("mounts.d/x.fstab", "", 0),
    "an fstab that is too long": ("mounts.d/x.fstab", "# " * 33000, 0o644),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_image_is_not_served_if_the_users_enroot_files_cannot_be_evaluated(
    spank: Node, doubt: str
) -> None:
    name, text, mode = DOUBTS[doubt]
    path = spank.put("images/image.sqsh")
    spank.put(f"alice/.config/enroot/{name}", text.encode(), mode=mode)
    assert answer_to(spank, path, {}, {"HOME": str(spank.shared / "alice")}) == LEAVE
    (outcome,) = spank.outcomes("step", 7)
    assert name in outcome.detail or "too large" in outcome.detail
    assert spank.entries() == set()


@pytest.mark.parametrize("folder", ["mounts.d", "hooks.d"])
def test_image_is_not_served_if_the_users_enroot_directory_has_too_many_names(
    spank: Node, folder: str
) -> None:
    """Else root's process that reads them, the last to be killed, takes memory without end."""
    path = spank.put("images/image.sqsh")
    write_user_file(spank, "")
    for number in range(container_binds.MAX_DIRECTORY_NAMES + 1):
        spank.put(f"alice/.config/enroot/{folder}/{number}", b"")
    assert answer_to(spank, path, {}, {"HOME": str(spank.shared / "alice")}) == LEAVE
    assert "too large" in spank.outcomes("step", 7)[-1].detail


def test_image_is_not_served_if_the_users_fstab_expands_without_bound(spank: Node) -> None:
    path = spank.put("images/image.sqsh")
    write_user_file(spank, f"/{'${A}' * 15000} /data none bind\n")
    given = {"HOME": str(spank.shared / "alice"), "A": "a" * 100000}
    assert answer_to(spank, path, {}, given) == LEAVE


def test_fifo_among_the_users_enroot_files_does_not_block_the_step(spank: Node) -> None:
    path = spank.put("images/image.sqsh")
    write_user_file(spank, "")
    fifo = spank.server / "alice/.config/enroot/mounts.d/y.fstab"
    os.mkfifo(fifo, 0o666)
    assert answer_to(spank, path, {}, {"HOME": str(spank.shared / "alice")}) == LEAVE


def test_users_enroot_files_are_read_as_the_user(spank: Node) -> None:
    """Else a user would have root say what is in another's file, or read what hangs."""
    path = spank.put("images/image.sqsh")
    secret = spank.put("bob/.config/enroot/mounts.d/x.fstab", f"{spank.shared} bind\n".encode())
    (spank.server / "bob").chmod(0o700)
    os.chown(spank.server / "bob", 0, 0)
    assert answer_to(spank, path, {}, {"HOME": str(spank.shared / "bob")})[0] == "use"
    assert secret.exists()


def test_hanging_reads_of_a_users_enroot_files_are_limited_in_number(
    spank: Node,
) -> None:
    """Each that hangs in the kernel would be one more for each step, in no cgroup of a job's."""
    path = spank.put("images/image.sqsh")
    places = USER_FILES.width
    spank.places.run.mkdir(mode=0o711, parents=True, exist_ok=True)
    with open_descriptor(spank.places.mounting, os.O_RDWR | os.O_CREAT) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, places, USER_FILES.first_byte(ALICE.uid))
        assert answer_to(spank, path, {"FORESTAGE_TIMEOUT": "8"}, {}) == LEAVE
        (outcome,) = spank.outcomes("step", 7)
        assert "earlier looks at this user's files still hang" in outcome.detail
        until(lambda: not children_left(), "the end of who waits for a place")
        fcntl.lockf(fd, fcntl.LOCK_UN, places, USER_FILES.first_byte(ALICE.uid))
        fcntl.lockf(fd, fcntl.LOCK_EX, places, USER_FILES.first_byte(ALICE.uid + 1))
        assert answer_to(spank, path, {}, {})[0] == "use"


@pytest.mark.parametrize("ranges", [TASK_MOUNTS, NODE_MOUNTS])
def test_locks_of_another_users_mounts_do_not_delay_reading_enroot_files(
    spank: Node, ranges: LockRange
) -> None:
    """Mounts of uid 4096 over chosen paths once locked the bytes that the looks of others need."""
    path = spank.put("images/image.sqsh")
    spank.places.run.mkdir(mode=0o711, parents=True, exist_ok=True)
    with open_descriptor(spank.places.mounting, os.O_RDWR | os.O_CREAT) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, ranges.width, ranges.first_byte(4096))
        assert answer_to(spank, path, {}, {})[0] == "use"


@pytest.fixture
def packed(tmp_path: Path) -> Callable[[str], bytes]:
    """A squashfs image with that fstab; a name with -> in front is where a link leads."""

    def pack(text: str) -> bytes:
        tree, made = tmp_path / "tree", tmp_path / "image"
        (tree / "etc").mkdir(parents=True)
        if text.startswith("->"):
            (tree / "etc/fstab").symlink_to(text.removeprefix("->"))
        else:
            (tree / "etc/fstab").write_text(text)
        argv = ["mksquashfs", tree, made, "-noappend", "-quiet", "-no-progress"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        return made.read_bytes()

    return pack


Packed = Callable[[str], bytes]


def entry_of(node: Node, path: Path) -> Entry:
    found = node.cache.find_entry_by_key(node.identity(path).key)
    assert found is not None
    return found


def test_image_with_an_fstab_that_binds_a_parent_directory_is_not_served(
    spank: Node, packed: Packed
) -> None:
    path = spank.put("images/image.sqsh", packed("${DATA} /data none bind\n"))
    variables = {"DATA": str(spank.shared)}
    assert answer_to(spank, path, {}, variables) == LEAVE
    assert entry_of(spank, path).binds == ("${DATA}",)
    assert answer_to(spank, path, {}, variables) == LEAVE
    assert answer_to(spank, path, {}, {"DATA": "/elsewhere"})[0] == "use"
    assert noted(spank, 7) == []  # each step of the job is looked at


def test_image_with_an_fstab_that_binds_nothing_is_served(spank: Node, packed: Packed) -> None:
    text = f"# UNCONFIGURED FSTAB\n{spank.shared} /data none rbind\n"
    path = spank.put("images/image.sqsh", packed(text))
    assert answer_to(spank, path, {}, {"A": "b"})[0] == "use"
    assert entry_of(spank, path).binds == ()
    assert len(noted(spank, 7)) == 1


def test_image_with_an_fstab_that_is_a_symlink_is_not_served(spank: Node, packed: Packed) -> None:
    path = spank.put("images/image.sqsh", packed("->/etc/passwd"))
    assert answer_to(spank, path, {}, {"A": "b"}) == LEAVE


def test_prolog_declines_an_image_with_an_fstab_that_binds_a_parent_directory(
    node: Node, packed: Packed
) -> None:
    path = node.put("images/image.sqsh", packed(f"{node.shared} bind\n"))
    assert node.prolog(7, path).outcome.reason == "below-bind"
    assert node.binds() == {}


def test_stager_mounts_no_redirect_for_an_image_with_an_fstab_that_may_bind_a_parent_directory(
    node: Node, packed: Packed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hook_deadlines, "SHORT_WAIT", 0.0)
    node.configure(cold="shared")
    path = node.put("images/image.sqsh", packed("${DATA} /data none bind\n"))
    with held_at("checked", tmp_path):
        assert node.prolog(7, path).outcome.redirect == "later"
    key = node.identity(path).key
    until(lambda: node.cache.image_path(key).exists() and node.is_idle(key), "the copy's end")
    until(lambda: not children_left(), "the stager's end")
    assert entry_of(node, path).binds == ("${DATA}",)
    assert node.binds() == {}


def test_entry_has_no_fstab_binds_without_unsquashfs(
    spank: Node, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fstab, "PROGRAM", ("no-such-program",))
    path = spank.put("images/image.sqsh", packed(f"{spank.shared} bind\n"))
    HookRun("step", environ(spank, 7, path), 0.0).run(spank.places, Clock())
    assert entry_of(spank, path).binds == ()


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("id -u > {out}; id -ru >> {out}; grep CapEff /proc/self/status >> {out}", ()),
        ("mkdir -p /tmp/image/etc; ln -s {out} /tmp/image/etc/fstab", (UNKNOWN,)),
        ("mkdir -p /tmp/image/etc; mkfifo /tmp/image/etc/fstab", ()),
        ("mkdir -p /tmp/image/etc; yes | head -c 70000 > /tmp/image/etc/fstab", ()),
        ("mkdir -p /tmp/image/etc; yes '/a bind' | head -65 > /tmp/image/etc/fstab", (UNKNOWN,)),
        ("sleep 1000", ()),
    ],
)
def test_unsquashfs_of_the_fstab_runs_as_the_user_with_bounded_time_and_output(
    packed: Packed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    script: str,
    found: tuple[str, ...],
) -> None:
    """A stand-in for unsquashfs that an image has taken over."""
    folder = tempfile.TemporaryDirectory(dir="/var/tmp")
    request.addfinalizer(folder.cleanup)
    out = Path(folder.name) / "out"
    out.parent.chmod(0o777)
    monkeypatch.setattr(fstab, "PROGRAM", ("sh", "-p", "-c", script.format(out=out)))
    monkeypatch.setattr(fstab, "TIMEOUT", 0.5 if "sleep" in script else 60.0)
    made = tmp_path / "it.sqsh"
    made.write_bytes(packed(""))
    made.chmod(0o644)
    with open_descriptor(made, os.O_RDONLY) as copy:
        assert fstab.read_fstab_binds(copy, ALICE) == found
    assert not Path("/tmp/image").exists()
    if "id" in script:
        ids = [str(ALICE.uid), str(run.NOBODY)]
        assert out.read_text().split() == [*ids, "CapEff:", "0" * 16]


def test_step_record_lists_enroot_files_and_variables_that_decided(spank: Node) -> None:
    path, home = spank.put("images/image.sqsh"), spank.shared / "alice"
    install(spank, "/usr/local/etc/enroot")
    set_enroot(spank, "${DATA} /data none bind\n", "mounts.d/a.fstab", "usr/local/etc/enroot")
    write_user_file(spank, "# mine\n")
    variables = {"HOME": str(home), "DATA": "/elsewhere", "OTHER": "x"}
    assert answer_to(spank, path, {}, variables)[0] == "use"
    assert len(noted(spank, 7)) == 1
    root = spank.places.root
    assert lines(spank, "enroot") == [["/usr/local/bin/enroot"]]
    files = {line[0] for line in lines(spank, "file")}
    assert {
        f"{root}/usr/local/bin/enroot",
        f"{root}/usr/local/etc/enroot/enroot.conf",
        f"{root}/usr/local/etc/enroot/mounts.d",
        f"{root}/usr/local/etc/enroot/mounts.d/a.fstab",
    } <= files
    mine = {line[0]: line[1:] for line in lines(spank, "theirs")}
    assert set(mine) == {f"{home}/.config/enroot"} | {
        f"{home}/.config/enroot/{name}" for name in ("mounts.d", "mounts.d/x.fstab", "hooks.d")
    }
    assert mine[f"{home}/.config/enroot/hooks.d"] == ["0"] * 4
    assert sorted(lines(spank, "variable")) == [
        ["DATA", "/elsewhere"],
        ["ENROOT_CONFIG_PATH"],
        ["ENROOT_SYSCONF_PATH"],
        ["HOME", str(home)],
        ["XDG_CONFIG_HOME"],
    ]


def test_step_record_lists_only_the_missing_enroot_directory_of_a_home(spank: Node) -> None:
    """Each look into a slow home takes seconds, and a job waits for them."""
    path, home = spank.put("images/image.sqsh"), spank.shared / "alice"
    assert answer_to(spank, path, {}, {"HOME": str(home)})[0] == "use"
    assert lines(spank, "theirs") == [[f"{home}/.config/enroot", "0", "0", "0", "0"]]
    write_user_file(spank, f"{spank.shared} bind\n")
    assert answer_to(spank, path, {}, {"HOME": str(home)}) == LEAVE


@pytest.mark.parametrize("value", ["a\tb", "a\nb", "a\udcffb"])
def test_environment_variable_with_a_tab_or_newline_leaves_no_step_record(
    spank: Node, value: str
) -> None:
    path = spank.put("images/image.sqsh")
    assert answer_to(spank, path, {}, {"XDG_CONFIG_HOME": f"/{value}"})[0] == "use"
    assert noted(spank, 7) == []


def test_step_record_of_the_prolog_lists_the_assumed_home_variables(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.configure(redirect="spank")
    path, home = node.put("images/image.sqsh"), str(node.shared / "alice")
    me = pwd.struct_passwd(("alice", "x", ALICE.uid, ALICE.gid, "", home, "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", {ALICE.uid: me}.__getitem__)
    assert answer_to(node, path, {}, {"HOME": "/elsewhere"})[0] == "use"
    HookRun("prolog", node.environ(7, path), 0.0).run(node.places, Clock())
    assert ["HOME", home] in lines(node, "variable")
    assert ["ENROOT_CONFIG_PATH"] in lines(node, "variable")
    write_user_file(node, f"{node.shared} bind\n")
    HookRun("prolog", node.environ(8, path), 0.0).run(node.places, Clock())
    assert node.outcomes("prolog", 8)[0].reason == "below-bind"
