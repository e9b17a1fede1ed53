"""The command line against a real cache: what people see, what scripts get, how it ends."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from commands import NOW, Site
from forestage.bind import redirect
from forestage.cache.layout import Cache, StoredEntry
from forestage.cache.lease import EntryUse
from forestage.commands import command_context, evict, inventory
from forestage.commands.command_context import ExitStatus
from forestage.commands.main import main
from forestage.errors import (
    ConfigError,
    ConfigProblem,
    Declined,
    Failed,
    ForestageError,
    JobError,
    NotFoundError,
    PeerError,
)
from forestage.events import EventRecord, RequestOutcome, append_events
from forestage.system import as_user, lock, mounts

MAN = Path(__file__).resolve().parents[3] / "packaging/man/forestage.1"


@pytest.fixture
def no_rights(site: Site, open_path: Path) -> Iterator[None]:
    """Who runs the commands may enter neither the cache nor the leases, as users of a node."""
    site.publish(site.image("a.sqsh"))
    site.lease(7)
    closed = (site.node.cache.root, site.places.run)
    for path in closed:
        path.chmod(0)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    yield
    os.seteuid(was)
    for path in closed:
        path.chmod(0o700)


# --- the command line itself


def test_help_imports_neither_heavy_libraries_nor_command_modules() -> None:
    code = """
import sys
from click.testing import CliRunner
from forestage.commands.main import main
assert CliRunner().invoke(main, ["--help"]).exit_code == 0
print([name for name in ("rich", "yaml", "msgspec", "xxhash") if name in sys.modules])
print([n for n, one in sys.modules.items() if isinstance(getattr(one, "COMMANDS", None), tuple)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


def test_running_a_command_imports_no_other_command_module() -> None:
    code = """
import sys
from click.testing import CliRunner
from forestage.commands.main import main
assert CliRunner().invoke(main, ["unpin", "--help"]).exit_code == 0
print([n for n, one in sys.modules.items() if isinstance(getattr(one, "COMMANDS", None), tuple)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['forestage.commands.pin']"


def of_modules() -> dict[str, click.Command]:
    """Each command as its module has it, by the name that is known before that is imported."""
    context = click.Context(main)
    found = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return {name: command for name, command in found.items() if command}


def test_summary_of_a_command_is_the_first_sentence_of_its_help() -> None:
    """The one is in a table, so that the other need not be imported."""
    known = {name: summary for rows in main.headings.values() for name, summary in rows}
    found = {name: command.get_short_help_str(limit=1000) for name, command in of_modules().items()}
    assert known == found


def test_each_command_of_the_modules_is_registered_in_the_main_group() -> None:
    modules = [load_module() for load_module in main.modules.values()]
    assert {one.name for module in modules for one in module.COMMANDS} == {*main.commands}


def test_help_has_each_command_once_and_its_whole_summary() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    assert "..." not in shown.replace("[ARGS]...", "")
    assert "Commands:" not in shown, "each has a heading"
    for name in main.commands:
        assert len(re.findall(rf"^  {name}  ", shown, re.MULTILINE)) == 1, name
    of_registry = CliRunner().invoke(main, ["registry", "--help"]).output
    assert "..." not in of_registry.replace("[ARGS]...", "")


def test_manual_page_and_help_have_every_exit_status() -> None:
    section = MAN.read_text().split(".SH EXIT STATUS")[1].split(".SH")[0]
    listed = re.findall(r"\.TP\n\.B (\d+)\n(.+)\n", section)
    assert listed == [(str(member.value), member.meaning) for member in ExitStatus]
    shown = CliRunner().invoke(main, ["--help"]).output
    assert all(f"{member.value}  {member.meaning}" in shown for member in ExitStatus)


def test_manual_page_names_every_command_and_option() -> None:
    text = MAN.read_text().replace("\\-", "-")
    for name, command in of_modules().items():
        assert re.search(rf"^(\.B |\\fB){name}\b", text, re.MULTILINE), name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert all(re.search(rf"{option}\b", text) for option in parameter.opts), name


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotFoundError("x"), ExitStatus.NOT_FOUND),
        (Declined("missing", "x"), ExitStatus.NOT_FOUND),
        (JobError("x"), ExitStatus.USAGE),
        (ConfigError((ConfigProblem("f", "k", "w"),)), ExitStatus.CONFIG),
        (PermissionError(13, "Permission denied", "/x"), ExitStatus.PERMISSION),
        (Failed("cache-not-mounted", "x"), ExitStatus.UNMOUNTED),
        (Failed("cache-not-ours", "x"), ExitStatus.CACHE),
        (Failed("lease-damaged", "x"), ExitStatus.FAILED),
        (PeerError("x"), ExitStatus.FAILED),
        (OSError(5, "Input/output error", "/x"), ExitStatus.FAILED),
        (lock.LockTimeout("x"), ExitStatus.FAILED),
        (as_user.ChildTimeout("x"), ExitStatus.FAILED),
    ],
)
def test_each_error_has_its_exit_status(error: Exception, expected: ExitStatus) -> None:
    assert isinstance(error, ForestageError | OSError)
    assert command_context.choose_exit_status(error) is expected


def test_ls_into_a_closed_pipe_exits_with_pipe_status_and_no_traceback(
    site: Site, tmp_path: Path
) -> None:
    for number in range(3):
        site.publish(site.image(f"{number}.sqsh"))
    code = (
        "import sys; from pathlib import Path; from forestage.commands.main import *;"
        "from forestage.paths import NodePaths; from forestage.clock import Clock;"
        f"main(['ls'], obj=CommandContext(NodePaths(Path({str(tmp_path)!r})), Clock()))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (ExitStatus.PIPE, b"")


@pytest.mark.parametrize(
    "args",
    [["show"], ["explain", "4_2"], ["explain", "0x4"], ["pin"], ["no"], ["evict", "--all", "abcd"]],
)
def test_wrong_command_line_exits_with_usage_status(site: Site, args: list[str]) -> None:
    assert site.run(*args).exit_code == ExitStatus.USAGE


# --- a node that is not as it should be

LOOKING = [["status"], ["ls"], ["show", "abcd"], ["path", "/x"], ["evict"], ["pin", "abcd"]]


@pytest.mark.parametrize("args", [*LOOKING, ["config"]])
def test_broken_configuration_is_reported_with_each_problem(site: Site, args: list[str]) -> None:
    site.configure("deadline: soon\nengine: magic\n")
    done = site.run(*args)
    assert (done.exit_code, done.stdout) == (ExitStatus.CONFIG, "")
    lines = done.stderr.splitlines()
    assert [line.split(": ")[:3] for line in lines] == [
        ["forestage", str(site.file), "deadline"],
        ["forestage", str(site.file), "engine"],
    ]


@pytest.mark.parametrize("args", LOOKING)
def test_command_without_permission_exits_and_advises_to_run_as_root(
    site: Site, no_rights: None, args: list[str]
) -> None:
    done = site.run(*args)
    assert (done.exit_code, done.stdout) == (ExitStatus.PERMISSION, "")
    assert re.fullmatch(r"forestage: /.*: Permission denied \(run as root\)\n", done.stderr)


@pytest.mark.parametrize("args", [["status"], ["ls"], ["evict"], ["evict", "--all"]])
def test_missing_cache_is_shown_as_empty_and_is_not_created(site: Site, args: list[str]) -> None:
    assert site.run(*args).exit_code == ExitStatus.OK
    assert not site.node.cache.root.exists()


@pytest.mark.parametrize("args", [["ls"], ["evict"], ["path", "/x"]])
def test_command_exits_with_unmounted_status_if_the_caches_disk_is_not_mounted(
    site: Site, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    site.file.write_text("cache: /nvme/forestage\nrequire_mount: true\n")
    monkeypatch.setattr(mounts, "list_mounts", lambda: [mounts.MountInfo(1, 0, "8:1", "/", "/")])
    done = site.run(*args)
    assert (done.exit_code, done.stdout) == (ExitStatus.UNMOUNTED, "")
    assert "its disk is not mounted" in done.stderr


def test_status_of_an_unmounted_disk_shows_leases(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.lease(7, EntryUse("k" * 32, "/lustre/a.sqsh"))
    site.file.write_text("cache: /nvme/forestage\nrequire_mount: true\n")
    monkeypatch.setattr(mounts, "list_mounts", lambda: [mounts.MountInfo(1, 0, "8:1", "/", "/")])
    done = site.run("status")
    assert done.exit_code == ExitStatus.CACHE
    assert "not in use: " in done.stdout
    assert "/lustre/a.sqsh" in done.stdout
    found = site.json("status", code=ExitStatus.CACHE)
    assert (found["room"], found["leases"][0]["job"]) == (None, 7)


def test_evict_and_status_refuse_a_cache_of_another_format_and_keep_its_entries(site: Site) -> None:
    key = site.publish(site.image("a.sqsh"))
    (site.node.cache.root / "format").write_text("99\n")
    assert site.run("evict", key).exit_code == ExitStatus.CACHE
    assert site.run("status").exit_code == ExitStatus.CACHE
    assert site.keys() == {key}


def test_quiet_evict_prints_only_if_an_entry_was_evicted(site: Site) -> None:
    assert site.run("evict", "-q").stdout == ""
    assert site.run("evict").stdout == "0 entries evicted, 0 B.\n"
    key = site.publish(site.image("a.sqsh"))
    assert "1 entry evicted" in site.run("evict", "-q", key).stdout


def test_damaged_lease_is_shown_by_status_and_evict_evicts_nothing(site: Site) -> None:
    key = site.publish(site.image("a.sqsh"))
    site.lease(7, EntryUse(key))
    site.node.leases.lease_file(8).write_text("{")
    done = site.run("status")
    assert done.exit_code == ExitStatus.OK
    assert "Problem: " in done.stdout
    for args in (["--all"], [key], [], ["--all", "-n"], ["-n"]):
        assert site.run("evict", *args).exit_code == ExitStatus.FAILED
    assert site.keys() == {key}


# --- status and ls


def test_status_counts_leased_pinned_superseded_and_damaged_entries(site: Site) -> None:
    old = site.publish(site.image("a.sqsh"), age=500)
    site.publish(site.image("a.sqsh", b"another version"), age=50)
    used = site.publish(site.image("b.sqsh"))
    site.lease(7, EntryUse(used, str(site.lustre / "b.sqsh")), EntryUse(old))
    site.run("pin", used)
    (site.node.cache.entries / ("f" * 32)).mkdir()
    found = site.json("status")
    assert isinstance(found, dict)
    expected = {"total": 4, "leased": 2, "pinned": 1, "superseded": 1, "damaged": 1, "data": 0}
    assert found["entries"] == expected
    assert found["room"]["max_size"] > found["room"]["low"] > 0
    assert found["disk"]["total"] >= found["disk"]["free"] > 0
    printed = site.run("status").stdout
    assert "4 (2 leased, 1 pinned, 1 superseded, 1 damaged)" in printed


@pytest.mark.parametrize("bound", [True, False])
def test_status_shows_a_leased_path_as_redirected_only_if_its_bind_is_mounted(
    site: Site, monkeypatch: pytest.MonkeyPatch, bound: bool
) -> None:
    """A lease names it before, while the copy goes on."""
    path = str(site.lustre / "b.sqsh")
    site.lease(7, EntryUse(site.publish(site.image("b.sqsh")), path))
    bind = redirect.RedirectBind(mounts.MountInfo(9, 1, "0:1", "", path), "k")
    monkeypatch.setattr(redirect, "list_binds", lambda _: [bind] * bound)
    found = site.json("status")
    assert isinstance(found, dict)
    (image,) = found["leases"][0]["images"]
    assert (image["path"], image["redirected"]) == (path, bound)


def test_ls_lists_the_last_used_entry_first(site: Site) -> None:
    for name, age in (("a", 50), ("b", 5), ("c", 500)):
        site.publish(site.image(name), age)
    assert [Path(item["path"]).name for item in site.json("ls")] == ["b", "a", "c"]
    lines = site.run("ls").stdout.splitlines()
    assert [line.split()[4] for line in lines[1:]] == ["5s", "50s", "8m20s"]


def test_control_characters_in_an_image_name_are_printed_escaped(site: Site) -> None:
    name = "\x1b]0;gotcha\x07[red]\n\u202ename"
    site.publish(site.image(name))
    printed = site.run("ls").stdout
    assert r"\x1b]0;gotcha\x07[red]\n\u202ename" in printed
    assert len(printed.splitlines()) == 2
    for args in (["ls", "--json"], ["show", f"{site.lustre}/{name}"], ["show", f"/no/{name}"]):
        assert "\x1b" not in site.run(*args).output


# --- which entry is meant


def test_show_accepts_a_key_a_key_prefix_a_path_and_a_link(site: Site) -> None:
    path = site.image("a.sqsh")
    key = site.publish(path)
    link = site.lustre / "link"
    link.symlink_to(path)
    for word in (key, key[:4], key[:9].upper(), str(path), f"{site.lustre}/../lustre/a.sqsh", link):
        found = site.json("show", str(word))
        assert [one["item"]["key"] for one in found] == [key]


def test_show_of_a_path_has_its_newest_version_first(site: Site) -> None:
    old = site.publish(site.image("a.sqsh"), age=5)
    new = site.publish(site.image("a.sqsh", b"another version"), age=3)
    found = site.json("show", str(site.lustre / "a.sqsh"))
    assert [one["item"]["key"] for one in found] == [new, old]
    assert [one["source"]["state"] for one in found] == ["unchanged", "changed"]


@pytest.mark.parametrize("word", ["abcd", "/nowhere", "0" * 32, "", "a" * 5000, "."])
def test_commands_exit_1_if_the_named_entry_is_not_found(site: Site, word: str) -> None:
    site.publish(site.image("a.sqsh"))
    for command in ("show", "evict", "pin", "unpin"):
        done = site.run(command, word)
        assert (done.exit_code, done.stdout) == (ExitStatus.NOT_FOUND, ""), command
        assert "Traceback" not in done.stderr


def test_message_for_a_too_short_key_names_the_number_of_digits_needed(site: Site) -> None:
    key = site.publish(site.image("a.sqsh"))
    assert "4 digits or more" in site.run("show", key[:3]).stderr
    assert "see `forestage ls`" in site.run("show", "/nowhere").stderr


def test_evict_and_pin_change_nothing_if_one_of_several_arguments_is_not_found(site: Site) -> None:
    key = site.publish(site.image("a.sqsh"))
    assert site.run("evict", key, "nothing").exit_code == ExitStatus.NOT_FOUND
    assert site.run("pin", key, "nothing").exit_code == ExitStatus.NOT_FOUND
    assert site.keys() == {key}
    assert site.json("ls")[0]["pinned"] is False


# --- show and path: is the source what the entry holds?


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: None, "source      unchanged"),
        (lambda path: path.write_bytes(b"longer than before"), "changed: its size is 18 B"),
        (lambda path: path.chmod(0o600), "changed: its owner, mode or ACL is another"),
        (lambda path: path.unlink(), "source      gone: "),
        (lambda path: (path.unlink(), path.mkdir()), "changed: .* is a directory"),
    ],
)
def test_show_of_a_changed_source_prints_what_has_changed(
    site: Site, change: Callable[[Path], None], expected: str
) -> None:
    path = site.image("a.sqsh")
    key = site.publish(path)
    change(path)
    done = site.run("show", key)
    assert done.exit_code == ExitStatus.OK
    assert re.search(expected, done.stdout)


def test_show_of_a_damaged_entry_prints_damaged(site: Site) -> None:
    key = site.publish(site.image("a.sqsh"))
    (site.node.cache.entry_dir(key) / "entry.json").write_text("{")
    done = site.run("show", key)
    assert "damaged" in done.stdout
    assert "not checked: the entry is damaged" in done.stdout


def test_path_command_prints_the_copy_only_if_the_source_is_unchanged(site: Site) -> None:
    path = site.image("a.sqsh")
    assert "does not hold" in site.run("path", str(path)).stderr
    key = site.publish(path)
    assert site.run("path", str(path)).stdout == f"{site.node.cache.image_path(key)}\n"
    path.write_bytes(b"newer")
    done = site.run("path", str(path))
    assert (done.exit_code, done.stdout) == (ExitStatus.NOT_FOUND, "")
    assert "another version" in done.stderr


@pytest.mark.parametrize("image", ["ubuntu:24.04", "/nowhere.sqsh", "/", "/dev/null", "docker://x"])
def test_path_command_with_an_argument_that_cannot_be_cached_exits_with_not_found(
    site: Site, image: str
) -> None:
    done = site.run("path", image)
    assert (done.exit_code, done.stdout) == (ExitStatus.NOT_FOUND, "")
    assert image in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="lays a bind")
def test_path_command_checks_the_source_beneath_its_redirect(site: Site) -> None:
    path = site.image("a.sqsh")
    key = site.publish(path)
    child = os.fork()
    if child == 0:
        failed = True
        try:
            mounts.enter_private_namespace()
            with path.open("ab") as below:
                mounts.mount(str(site.node.cache.image_path(key)), str(path), mounts.MS_BIND)
                assert site.json("status")["redirects"] == [str(path)]
                assert site.run("path", str(path)).exit_code == ExitStatus.OK
                below.write(b"changed below the bind")
            assert site.run("path", str(path)).exit_code == ExitStatus.NOT_FOUND
            failed = False
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- evict, pin, unpin


def test_evict_evicts_the_named_entries_except_leased_and_pinned_entries(site: Site) -> None:
    keys = {name: site.publish(site.image(name)) for name in "abcd"}
    site.publish(site.image("c", b"another version"))
    site.lease(7, EntryUse(keys["a"]))
    site.lease(8, EntryUse(keys["a"]))
    site.run("pin", keys["b"])
    done = site.run("evict", keys["a"], keys["b"], str(site.lustre / "c"))
    assert done.exit_code == ExitStatus.NOT_FOUND
    assert "stays: leased by jobs 7, 8" in done.stdout
    assert "stays: pinned" in done.stdout
    assert "2 entries evicted, " in done.stdout, "all versions of the path"
    assert site.keys() == {keys["a"], keys["b"], keys["d"]}
    assert site.run("evict", keys["d"]).exit_code == ExitStatus.OK


def test_evict_all_spares_leased_entries_and_exits_0(site: Site) -> None:
    keys = {name: site.publish(site.image(name)) for name in "abc"}
    site.lease(7, EntryUse(keys["a"]))
    assert site.run("evict", "--all").exit_code == ExitStatus.OK
    assert site.keys() == {keys["a"]}
    assert list(site.node.cache.evicted.iterdir()) == []


def test_evict_all_deletes_unfinished_copies_without_a_lease(site: Site) -> None:
    entry = site.publish(site.image("whole"))
    paths = {name: site.image(name, b"x" * (1 << 20)) for name in ("left", "wanted", "live")}
    keys = {name: site.part(path)[0].directory.name for name, path in paths.items()}
    site.lease(7, EntryUse(keys["wanted"]))
    cache = site.node.cache
    with lock.held(cache.key_lock(keys["live"]), 0):
        assert site.run("evict", entry[:9], "-n").output.count("unfinished") == 0
        promised = site.run("evict", "--all", "-n").stdout
        assert re.search(r"\n1 unfinished copy would be deleted, 1(\.\d)? MiB\.\n$", promised)
        assert {one.name for one in cache.parts.iterdir()} == set(keys.values())
        done = site.run("evict", "--all", "--quiet").stdout
        assert re.search(r"1 entry evicted, .*\n1 unfinished copy deleted, 1(\.\d)? MiB\.\n$", done)
        assert {one.name for one in cache.parts.iterdir()} == {keys["wanted"], keys["live"]}
        assert site.run("evict", "--all", "--quiet").stdout == ""


def test_evict_stops_at_the_low_watermark(site: Site) -> None:
    old, new = (
        site.publish(site.image(name, b"x" * (1 << 20)), age)
        for name, age in (("old", 500), ("new", 5))
    )
    assert site.run("evict").exit_code == ExitStatus.OK
    assert site.keys() == {old, new}
    site.configure("max_size: 2M\nlow_watermark: 80%\n")
    found = site.json("evict", "--dry-run")
    assert [one["key"] for one in found["verdicts"]] == [old]
    assert site.keys() == {old, new}
    site.run("evict")
    assert site.keys() == {new}


def test_evict_dry_run_reports_exactly_what_evict_then_does(site: Site) -> None:
    keys = [site.publish(site.image(name)) for name in "abc"]
    site.lease(7, EntryUse(keys[0]))
    promised = site.json("evict", "-n", *keys, code=ExitStatus.NOT_FOUND)
    assert site.keys() == set(keys)
    done = site.json("evict", *keys, code=ExitStatus.NOT_FOUND)
    assert done == {**promised, "dry_run": False}
    assert site.keys() == {keys[0]}


@pytest.mark.ci
@pytest.mark.parametrize("number", [3, 30])
@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("ls",),
        ("evict",),
        ("evict", "--dry-run"),
        ("evict", "--all"),
        ("evict", "--all", "--dry-run"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("limits", ["", "max_size: 8K\nlow_watermark: 50%\n"], ids=["rest", "full"])
def test_command_reads_each_entry_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, limits: str, words: tuple[str, ...], number: int
) -> None:
    """Also where some stay: one is pinned, one is leased."""
    keys = [site.publish(site.image(f"{n}.sqsh")) for n in range(number)]
    site.configure(limits)
    site.run("pin", keys[0])
    site.lease(7, EntryUse(keys[1], str(site.lustre / "1.sqsh")))
    reads = counted_reads(monkeypatch)
    assert site.run(*words).exit_code == ExitStatus.OK
    assert reads == Counter(keys)


def test_path_command_reads_no_entry_if_the_copy_is_found_by_its_key(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [site.image(f"{n}.sqsh") for n in range(3)]
    keys = [site.publish(image) for image in images[:2]]
    reads = counted_reads(monkeypatch)
    assert keys[0] in site.run("path", str(images[0])).stdout
    assert not reads
    assert site.run("path", str(images[2])).exit_code == ExitStatus.NOT_FOUND
    assert reads == Counter(keys), "whether there is another version"


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each entry is read, by its key."""
    reads: Counter[str] = Counter()
    read = Cache._read_entry_directory

    def counted(cache: Cache, directory: Path) -> StoredEntry:
        reads[directory.name] += 1
        return read(cache, directory)

    monkeypatch.setattr(Cache, "_read_entry_directory", counted)
    return reads


def test_evict_reports_why_an_entry_leased_or_pinned_since_the_listing_stays(site: Site) -> None:
    keys = [site.publish(site.image(f"{n}.sqsh")) for n in range(3)]
    items = inventory.read_inventory(site.node).items
    site.run("pin", keys[0])
    site.lease(7, EntryUse(keys[1], str(site.lustre / "1.sqsh")))
    done = evict.evict_named(site.node, items, dry_run=False)
    told = {one.key: (one.evicted, one.why_not) for one in done.verdicts}
    assert told == {
        keys[0]: (False, "pinned"),
        keys[1]: (False, "leased by job 7"),
        keys[2]: (True, ""),
    }


def test_pinned_entry_stays_until_it_is_unpinned(site: Site) -> None:
    key = site.publish(site.image("a"))
    assert "pinned" in site.run("pin", key).stdout
    assert site.run("pin", key).exit_code == ExitStatus.OK
    assert site.json("evict", "--all")["verdicts"][0]["why_not"] == "pinned"
    assert site.keys() == {key}
    assert site.run("unpin", str(site.lustre / "a")).exit_code == ExitStatus.OK
    assert "not pinned" in site.run("unpin", key).stdout
    site.run("evict", "--all")
    assert site.keys() == set()


def test_pin_of_a_path_pins_its_newest_version_and_unpin_unpins_all_versions(site: Site) -> None:
    path = str(site.lustre / "a")
    old = site.publish(site.image("a"), age=50)
    new = site.publish(site.image("a", b"another version"), age=5)
    assert [one["key"] for one in site.json("pin", path)] == [new]
    site.run("pin", old)
    assert [one["key"] for one in site.json("unpin", path)] == [new, old]
    assert not any(one["pinned"] for one in site.json("ls"))


def test_damaged_entry_is_not_pinned(site: Site) -> None:
    key = site.publish(site.image("a"))
    (site.node.cache.entry_dir(key) / "entry.json").unlink()
    assert site.run("pin", key).exit_code == ExitStatus.NOT_FOUND


# --- explain, config


def test_explain_needs_neither_configuration_nor_cache(site: Site) -> None:
    site.configure("nonsense: true\n")
    printed = RequestOutcome("declined", "missing", "/x.sqsh is missing", "/x.sqsh", "option")
    append_events(
        site.places.events,
        [EventRecord(NOW, "prolog", 7, printed, "alice", 1000, "n1", "gpu", 0.1)],
    )
    done = site.run("explain", "7")
    assert done.exit_code == ExitStatus.OK
    assert "declined (missing)" in done.stdout
    assert site.json("explain", "7")["runs"][0]["hook"] == "prolog"


@pytest.mark.parametrize("word", ["7.0", "7.batch", "7.extern"])
def test_explain_of_a_step_explains_its_job(site: Site, word: str) -> None:
    site.lease(7)
    assert site.run("explain", word).stdout.startswith("Job 7")


@pytest.mark.parametrize("word", ["12_1", "12+1"])
def test_explain_of_an_array_task_prints_the_squeue_command_that_finds_its_job_id(
    site: Site, word: str
) -> None:
    done = site.run("explain", word)
    assert done.exit_code == ExitStatus.USAGE
    assert f"squeue -h -j {word} -o %A" in done.stderr


@pytest.mark.parametrize("word", ["7.", "7.0;id", ".0", "12_", "_1", "12_1.0", "7.é", "1" * 11])
def test_explain_of_an_invalid_job_id_is_a_usage_error(site: Site, word: str) -> None:
    assert site.run("explain", word).exit_code == ExitStatus.USAGE


def test_explain_of_a_job_without_events_exits_with_not_found_unless_the_job_has_a_lease(
    site: Site,
) -> None:
    done = site.run("explain", "7")
    assert (done.exit_code, done.stdout) == (ExitStatus.NOT_FOUND, "")
    assert "asked for no image, ran elsewhere, never reached this node" in done.stderr
    site.lease(7)
    site.node.leases.lease_file(7).write_text("{")
    done = site.run("explain", "7")
    assert done.exit_code == ExitStatus.OK
    assert "Problem: " in done.stdout


def test_config_command_prints_each_value_and_its_origin(site: Site) -> None:
    site.configure("partitions:\n  gpu:\n    deadline: 2m\n")
    rows = {row["key"]: row for row in site.json("config")}
    assert rows["cache"] == {"key": "cache", "value": "/nvme/forestage", "origin": str(site.file)}
    assert (rows["deadline"]["value"], rows["deadline"]["origin"]) == ("auto", "default")
    printed = site.run("config", "--partition", "gpu").stdout
    assert re.search(rf"^deadline +2m +{site.file}$", printed, re.MULTILINE)


def test_config_of_a_partition_without_settings_prints_a_warning(site: Site) -> None:
    site.configure("partitions:\n  gpu:\n    deadline: 2m\n")
    assert site.run("config", "--partition", "gpu").stderr == ""
    done = site.run("config", "--partition", "gpuu")
    assert done.exit_code == ExitStatus.OK, "a partition of Slurm's needs none"
    assert "partition 'gpuu' has no settings of its own (these have: gpu)" in done.stderr
