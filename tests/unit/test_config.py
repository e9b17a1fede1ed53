"""The configuration: what is meant holds, what is wrong is refused by file and key, all at once."""

import contextlib
import os
import pickle
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from forestage import settings as module
from forestage.config import KEYS, PARTITION_KEYS, Config, Peering, sample
from forestage.errors import ConfigError, Problem
from forestage.settings import DEFAULT, MAX_FILE_SIZE, Row, Settings, load
from forestage.units import Amount

REPOSITORY = Path(__file__).resolve().parents[2]
MAIN = "forestage.yaml"


def write(etc: Path, text: str | bytes, name: str = MAIN) -> Path:
    path = etc / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o644)
    return path


def read(etc: Path, text: str | bytes = "", name: str = MAIN) -> Settings:
    write(etc, text, name)
    return load(etc, owner=None)


def problems(etc: Path, text: str | bytes | None = None, owner: int | None = None) -> list[Problem]:
    if text is not None:
        write(etc, text)
    with pytest.raises(ConfigError) as caught:
        load(etc, owner)
    return list(caught.value.problems)


# --- what is meant holds


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}", "partitions:\n", "\ufeff"])
def test_a_file_that_says_nothing_leaves_the_defaults(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).config == Config()


def test_no_file_and_no_directory_are_the_defaults(tmp_path: Path) -> None:
    found = load(tmp_path / "missing")
    assert (found.config, found.partitions) == (Config(), {})
    assert set(found.origins.values()) == {DEFAULT}


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("enabled: false", "enabled", False),
        ("enabled: no", "enabled", False),
        ("sources: [/lustre, /home/a b]", "sources", ("/lustre", "/home/a b")),
        ("sources: []", "sources", ()),
        ("cache: /tmpfs/x", "cache", "/tmpfs/x"),
        ("require_mount: false", "require_mount", False),
        ("max_image_size: 30G", "max_image_size", 30 << 30),
        ("max_image_size: null", "max_image_size", None),
        ("max_size: 100%", "max_size", Amount(share=1.0)),
        ("max_size: 2T", "max_size", Amount(size=2 << 40)),
        ("min_free: 0", "min_free", Amount(size=0)),
        ("low_watermark: 0%", "low_watermark", Amount(share=0.0)),
        ("redirect: none", "redirect", "none"),
        ("redirect: spank", "redirect", "spank"),
        ("engine: rsync", "engine", "rsync"),
        ("engine: chunks", "engine", "chunks"),
        ("threads: auto", "threads", None),
        ("threads: 1", "threads", 1),
        ("threads: 64", "threads", 64),
        ("chunk_size: 1M", "chunk_size", 1 << 20),
        ("chunk_size: 3MiB", "chunk_size", 3 << 20),
        ("chunk_size: 1G", "chunk_size", 1 << 30),
        ("direct: auto", "direct", "auto"),
        ("direct: 'on'", "direct", "on"),
        ("direct: 'off'", "direct", "off"),
        ("digest: false", "digest", False),
        ("bandwidth: 500M", "bandwidth", 500 << 20),
        ("bandwidth: null", "bandwidth", None),
        ("max_copies: 1", "max_copies", 1),
        ("deadline: auto", "deadline", None),
        ("deadline: 0", "deadline", 0.0),
        ("deadline: 2m", "deadline", 120.0),
        ("prolog_wait: auto", "prolog_wait", None),
        ("prolog_wait: 0", "prolog_wait", 0.0),
        ("prolog_wait: 5s", "prolog_wait", 5.0),
        ("step_wait: 0", "step_wait", 0.0),
        ("step_wait: 20m", "step_wait", 1200.0),
        ("on_deadline: abort", "on_deadline", "abort"),
        ("max_stage_wait: 1h30m", "max_stage_wait", 5400.0),
        ("on_error: drain", "on_error", "drain"),
        ("user_messages: none", "user_messages", "none"),
        ("user_messages: all", "user_messages", "all"),
    ],
)
def test_every_key_is_read_as_its_type(
    tmp_path: Path, text: str, key: str, expected: object
) -> None:
    found = read(tmp_path, text)
    value = getattr(found.config, key)
    assert (value, type(value)) == (expected, type(expected))
    assert found.origins[key] == str(tmp_path / MAIN)


def test_a_later_file_wins_key_by_key(tmp_path: Path) -> None:
    main = write(tmp_path, "deadline: 1\non_error: drain\npartitions: {gpu: {deadline: 1}}")
    early = write(tmp_path, "deadline: 2\nredirect: none", "conf.d/10-a.yaml")
    late = write(tmp_path, "deadline: 3\npartitions: {gpu: {enabled: false}}", "conf.d/9-late.yaml")
    found = load(tmp_path, owner=None)
    assert found.config == Config(deadline=3.0, redirect="none", on_error="drain")
    assert found.partitions == {"gpu": {"deadline": 1.0, "enabled": False}}
    assert {key: origin for key, origin in found.origins.items() if origin != DEFAULT} == {
        "deadline": str(late),
        "redirect": str(early),
        "on_error": str(main),
        "partitions.gpu.deadline": str(main),
        "partitions.gpu.enabled": str(late),
    }


@pytest.mark.parametrize("name", [".a.yaml", "a.yaml~", "a.yaml.dpkg-old", "a.yml", "README"])
def test_leftovers_in_conf_d_are_not_configuration(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, "enabled: false", f"conf.d/{name}").config == Config()


def test_a_partition_changes_its_own_keys_only(tmp_path: Path) -> None:
    found = read(tmp_path, "deadline: 5\npartitions: {gpu: {sources: [/gpu]}, cpu: }")
    assert found.for_partition("gpu") == Config(deadline=5.0, sources=("/gpu",))
    for name in ("cpu", "unknown", "", None):
        assert found.for_partition(name) == Config(deadline=5.0)


def test_rows_tell_value_and_origin(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "sources: [/a, /b]\nmax_image_size: 1536M\npartitions: {gpu: {deadline: 90.25}}",
    )
    main = str(tmp_path / MAIN)
    rows = found.rows()
    assert [row.key for row in rows] == [*KEYS, "partitions.gpu.deadline"]
    assert {row for row in rows if row.origin != DEFAULT} == {
        Row("sources", "[/a, /b]", main),
        Row("max_image_size", "1536MiB", main),
        Row("partitions.gpu.deadline", "90.25s", main),
    }
    assert Row("deadline", "auto", DEFAULT) in found.rows("cpu")
    assert Row("deadline", "90.25s", main) in found.rows("gpu")
    assert len(found.rows("gpu")) == len(KEYS)


def test_nobody_changes_the_settings_of_another(tmp_path: Path) -> None:
    found = read(tmp_path, "partitions: {gpu: {deadline: 1}}")
    with pytest.raises(AttributeError):
        found.config.enabled = False  # type: ignore[misc]
    for mapping in (found.partitions, found.partitions["gpu"], found.origins):
        with pytest.raises(TypeError):
            mapping["deadline"] = 2  # type: ignore[index]


# --- what is wrong is refused by file and key


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ("redirekt: bind", "redirekt", "unknown key, did you mean redirect?"),
        ("partition: {}", "partition", "unknown key, did you mean partitions?"),
        ("zzz: 1", "zzz", "unknown key"),
        ("enabled: 'yes'", "enabled", "expected true or false, got 'yes'"),
        ("enabled: 1", "enabled", "expected true or false, got 1"),
        ("enabled:", "enabled", "expected true or false, got null"),
        ("require_mount: [true]", "require_mount", "expected true or false, got a list"),
        ("max_image_size: 0", "max_image_size", "expected a size above 0, or null for no limit"),
        ("max_image_size: big", "max_image_size", "expected a size such as 23GiB or 500M"),
        ("max_image_size: 80%", "max_image_size", "expected a size such as 23GiB or 500M"),
        ("max_size: 0", "max_size", "expected more than nothing, got 0"),
        ("max_size: 0%", "max_size", "expected more than nothing, got '0%'"),
        ("max_size: 101%", "max_size", "expected a size such as 23GiB or 500M, or a share"),
        ("max_size: null", "max_size", "expected a size such as 23GiB or 500M, or a share"),
        ("min_free: -5G", "min_free", "expected a size such as 23GiB or 500M, or a share"),
        ("low_watermark: 5G", "low_watermark", "expected a share such as 80%, got '5G'"),
        ("low_watermark: 0.8", "low_watermark", "expected a share such as 80%, got 0.8"),
        ("low_watermark: 101%", "low_watermark", "expected a share such as 80%, got '101%'"),
        ("redirect: spunk", "redirect", "expected bind or spank or none, got 'spunk'"),
        ("redirect: null", "redirect", "expected bind or spank or none, got null"),
        ("redirect: [bind]", "redirect", "expected bind or spank or none, got a list"),
        ("prolog_wait: no", "prolog_wait", "expected a duration such as 90s or 10m, got false"),
        ("step_wait: auto", "step_wait", "expected a duration such as 90s or 10m, got 'auto'"),
        ("user_messages: some", "user_messages", "expected none or problems or all, got 'some'"),
        ("engine: cp", "engine", "expected chunks or rsync, got 'cp'"),
        ("threads: 0", "threads", "expected a whole number from 1 to 64, got 0"),
        ("threads: 65", "threads", "expected a whole number from 1 to 64, got 65"),
        ("threads: 1.5", "threads", "expected a whole number from 1 to 64, got 1.5"),
        ("threads: true", "threads", "expected a whole number from 1 to 64, got true"),
        ("threads: null", "threads", "expected a whole number from 1 to 64, got null"),
        ("threads: Auto", "threads", "expected a whole number from 1 to 64, got 'Auto'"),
        ("max_copies: 0", "max_copies", "expected a whole number from 1 to 64, got 0"),
        ("max_copies: auto", "max_copies", "expected a whole number from 1 to 64, got 'auto'"),
        ("chunk_size: 0", "chunk_size", "expected a multiple of 1MiB up to 1GiB, got 0"),
        ("chunk_size: 512K", "chunk_size", "expected a multiple of 1MiB up to 1GiB, got '512K'"),
        ("chunk_size: 1.5M", "chunk_size", "expected a multiple of 1MiB up to 1GiB, got '1.5M'"),
        ("chunk_size: 1025M", "chunk_size", "expected a multiple of 1MiB up to 1GiB"),
        ("chunk_size: big", "chunk_size", "expected a size such as 23GiB or 500M"),
        ("direct: maybe", "direct", "expected auto or on or off, got 'maybe'"),
        ("digest: 1", "digest", "expected true or false, got 1"),
        ("bandwidth: 0", "bandwidth", "expected a size above 0, or null for no limit"),
        ("bandwidth: auto", "bandwidth", "expected a size such as 23GiB or 500M"),
        ("on_deadline: drain", "on_deadline", "expected continue or abort, got 'drain'"),
        ("deadline: null", "deadline", "expected a duration such as 90s or 10m, got null"),
        ("on_error: yes", "on_error", "expected continue or drain, got true"),
        ("deadline: soon", "deadline", "expected a duration such as 90s or 10m, got 'soon'"),
        ("deadline: -1", "deadline", "expected a duration such as 90s or 10m, got -1"),
        ("deadline: .nan", "deadline", "expected a duration such as 90s or 10m, got nan"),
        ("deadline: .inf", "deadline", "expected a duration such as 90s or 10m, got inf"),
        ("max_stage_wait: {a: 1}", "max_stage_wait", "expected a duration such as 90s or 10m"),
        ("partitions: [gpu]", "partitions", "expected keys and values, got a list"),
        ("partitions: false", "partitions", "expected keys and values, got false"),
        ("partitions: {gpu: 1}", "partitions.gpu", "expected keys and values, got 1"),
        ("partitions: {gpu: {deadline: x}}", "partitions.gpu.deadline", "expected a duration"),
        ("partitions: {gpu: {dedline: 1}}", "partitions.gpu.dedline", "did you mean deadline?"),
        ("partitions: {gpu: {partitions: {}}}", "partitions.gpu.partitions", "unknown key"),
        ("partitions: {no: {}}", "partitions.false", "expected a name in quotes"),
        ("partitions: {1: {}}", "partitions.1", "expected a name in quotes"),
        ("1: 2", "1", "expected a name in quotes"),
        ('"a\\nb": 2', r"'a\nb'", "expected a name in quotes"),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_key(
    tmp_path: Path, text: str, key: str, what: str
) -> None:
    (problem,) = problems(tmp_path, text)
    assert (problem.where, problem.key) == (str(tmp_path / MAIN), key)
    assert what in problem.what


@pytest.mark.parametrize("key", [key for key in KEYS if key not in PARTITION_KEYS])
def test_a_partition_cannot_have_a_cache_of_its_own(tmp_path: Path, key: str) -> None:
    (problem,) = problems(tmp_path, f"partitions: {{gpu: {{{key}: null}}}}")
    assert problem.key == f"partitions.gpu.{key}"
    assert "cannot differ between partitions" in problem.what


BAD_DIRECTORIES = [
    ("/", "expected a directory below /, got '/'"),
    ("//", "expected a directory below /"),
    ("/lustre/..", "expected a directory below /"),
    ("lustre", "expected an absolute directory, got 'lustre'"),
    ("~/images", "expected an absolute directory"),
    ("''", "expected an absolute directory, got ''"),
    ("7", "expected an absolute directory, got 7"),
    ("null", "expected an absolute directory, got null"),
    ("/lustre/", "expected '/lustre', got '/lustre/'"),
    ("//lustre", "expected '/lustre'"),
    ("/a//b", "expected '/a/b'"),
    ("/a/./b", "expected '/a/b'"),
    ("/a/../b", "expected '/b', got '/a/../b'"),
    (r'"/a\0b"', "without control characters"),
    (r'"/a\nb"', "without control characters"),
]


@pytest.mark.parametrize(("path", "what"), BAD_DIRECTORIES)
def test_a_source_that_could_match_too_much_is_refused(
    tmp_path: Path, path: str, what: str
) -> None:
    (problem,) = problems(tmp_path, f"sources: [/lustre, {path}]")
    assert problem.key == "sources"
    assert problem.what.startswith("entry 2: ")
    assert what in problem.what


@pytest.mark.parametrize(
    ("path", "what"),
    [
        *BAD_DIRECTORIES,
        ("/tmp", "expected a directory outside /tmp"),
        ("/tmp/forestage", "expected a directory outside /tmp"),
        ("/dev/shm/forestage", "expected a directory outside /dev/shm"),
    ],
)
def test_a_cache_that_no_job_could_see_is_refused(tmp_path: Path, path: str, what: str) -> None:
    (problem,) = problems(tmp_path, f"cache: {path}")
    assert problem.key == "cache"
    assert what in problem.what


def test_sources_written_as_one_text_are_not_split_into_letters(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "sources: /lustre")
    assert problem.what == "expected a list of directories such as [/lustre], got '/lustre'"


def test_all_problems_of_all_files_come_at_once(tmp_path: Path) -> None:
    write(tmp_path, "deadline: soon\nredirekt: bind\nsources: [x, /ok, y]")
    write(tmp_path, "a: b: c", "conf.d/1.yaml")
    write(tmp_path, "partitions: {gpu: {enabled: 2, cache: /x}}", "conf.d/2.yaml")
    found = problems(tmp_path)
    assert [(Path(problem.where).name, problem.key) for problem in found] == [
        (MAIN, "deadline"),
        (MAIN, "redirekt"),
        (MAIN, "sources"),
        ("1.yaml", ""),
        ("2.yaml", "partitions.gpu.enabled"),
        ("2.yaml", "partitions.gpu.cache"),
    ]
    assert re.search("entry 1: .*; entry 3: ", found[2].what)


def test_the_error_reads_well_on_many_lines_and_on_one() -> None:
    error = ConfigError((Problem("/etc/f.yaml", "deadline", "too long"), Problem("/g", "", "gone")))
    assert str(error) == "/etc/f.yaml: deadline: too long\n/g: gone"
    assert error.one_line == "/etc/f.yaml: deadline: too long; /g: gone"
    assert error.exit_code == 3
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


# --- files that are not what they should be


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"\xff", "is not UTF-8 (at byte 0)"),
        ("enabled: true\na: b: c", "is not YAML: line 2: mapping values are not allowed"),
        ("\tenabled: true", "is not YAML: line 1: "),
        ("enabled: [", "is not YAML: line "),
        ("a\0b", "is not YAML: "),
        ("enabled: true\n---\nenabled: false", "is not YAML: line 2: but found another document"),
        ("? [a]\n: 1", "is not YAML: line 1: found unhashable key"),
        ("- enabled", "expected keys and values, got a list"),
        ("enabled", "expected keys and values, got 'enabled'"),
        ("enabled: true\nenabled: false", "line 2: 'enabled' is given again, first in line 1"),
        ("{enabled: true, 'enabled': false}", "'enabled' is given again"),
        ("partitions:\n  a: {}\n  b: {}\n  a: {}", "line 4: 'a' is given again, first in line 2"),
        ("partitions: {a: {deadline: 1, deadline: 2}}", "'deadline' is given again"),
        ("sources: &a [/x]\npartitions: {p: {sources: *a}}", "line 2: an alias (*) or tag (!)"),
        ("sources: &a [*a]", "line 1: an alias (*) or tag (!)"),
        ("deadline: !!timestamp x", "line 1: an alias (*) or tag (!)"),
        ("a: !!python/object/apply:os.getpid []", "line 1: an alias (*) or tag (!)"),
        ("deadline: 2026-99-99", "holds a value that YAML cannot read: month"),
        ("max_size: " + "9" * 5000, "holds a value that YAML cannot read: "),
        ("[" * 500_000, "line 1: nested too deeply"),  # SIGSEGV, if it came to the composer
        ("{a: " * 5, "line 1: nested too deeply"),
        ("#" * (MAX_FILE_SIZE + 1), "is larger than 1MiB"),
    ],
    ids=lambda value: str(value[:40]),
)
def test_a_file_that_cannot_be_understood_is_refused_as_a_whole(
    tmp_path: Path, text: str | bytes, what: str
) -> None:
    (problem,) = problems(tmp_path, text)
    assert (problem.where, problem.key) == (str(tmp_path / MAIN), "")
    assert what in problem.what
    assert "\n" not in problem.what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("enabled: 'yes'", "expected true or false"),
        ("a: b: c", "is not YAML: line 1: mapping values are not allowed"),
        ("a\0b", "is not YAML: special characters are not allowed"),
        ("enabled: true\nenabled: true", "line 2: 'enabled' is given again"),
        ("[" * 1000, "line 1: nested too deeply"),
    ],
)
def test_pyyaml_without_its_c_library_refuses_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, what: str
) -> None:
    monkeypatch.delattr("yaml.CSafeLoader", raising=False)
    (problem,) = problems(tmp_path, text)
    assert what in problem.what


def test_a_comment_may_fill_the_file_to_its_limit(tmp_path: Path) -> None:
    assert read(tmp_path, "#" * MAX_FILE_SIZE).config == Config()


@pytest.mark.parametrize("name", [MAIN, "conf.d/a.yaml"])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.mkdir, "cannot be read: Is a directory"),
        (os.mkfifo, "is not a regular file"),  # and load() must not wait for a writer
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file or directory"),
        (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels"),
    ],
    ids=["directory", "fifo", "device", "dangling", "loop"],
)
def test_what_is_no_file_is_refused_and_does_not_block(
    tmp_path: Path, name: str, make: object, what: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    make(path)  # type: ignore[operator]
    (problem,) = problems(tmp_path)
    assert problem.where == str(path)
    assert what in problem.what


def test_a_conf_d_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path, "", "conf.d").parent)
    assert problem == Problem(str(tmp_path / "conf.d"), "", "cannot be listed: Not a directory")


def test_a_file_that_vanishes_after_it_was_listed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "conf.d" / "gone.yaml"
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([gone]))
    (problem,) = problems(tmp_path)
    assert problem == Problem(str(gone), "", "cannot be read: No such file or directory")


@pytest.mark.parametrize("fault", [PermissionError(13, "Permission denied"), OSError(5, "I/O")])
def test_an_unreadable_file_is_not_taken_for_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError
) -> None:
    def refuse(*_: object) -> int:
        raise fault

    write(tmp_path, "")
    monkeypatch.setattr(module.os, "open", refuse)
    (problem,) = problems(tmp_path)
    assert problem.what == f"cannot be read: {fault.strerror}"


# --- a root hook obeys only what root has written


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("name", [MAIN, "conf.d/a.yaml"])
@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o620])
def test_root_refuses_a_file_that_others_may_write(tmp_path: Path, name: str, mode: int) -> None:
    path = write(tmp_path, "enabled: false", name)
    path.chmod(mode)
    (problem,) = problems(tmp_path, owner=os.getuid())
    assert problem.where == str(path)
    assert problem.what == "group or others may write it, expected its owner only"


@pytest.mark.usefixtures("as_root")
def test_root_refuses_a_file_of_somebody_else(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "enabled: false", owner=os.getuid() + 1)
    assert problem.what == f"belongs to uid {os.getuid()}, expected uid {os.getuid() + 1}"


@pytest.mark.usefixtures("as_root")
def test_a_link_does_not_lend_its_owner_to_its_target(tmp_path: Path) -> None:
    target = write(tmp_path, "enabled: false", "target")
    target.chmod(0o666)
    (tmp_path / MAIN).symlink_to(target)
    assert "others may write" in problems(tmp_path, owner=os.getuid())[0].what


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("mode", [0o644, 0o600, 0o444])
def test_root_reads_a_file_that_only_its_owner_may_write(tmp_path: Path, mode: int) -> None:
    write(tmp_path, "enabled: false").chmod(mode)
    assert not load(tmp_path, owner=os.getuid()).config.enabled


def test_a_user_may_look_at_any_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    path = write(tmp_path, "enabled: false")
    path.chmod(0o666)
    assert not load(tmp_path, owner=os.getuid() + 1).config.enabled
    assert stat.S_IMODE(path.stat().st_mode) == 0o666


# --- keys within a key


def test_a_group_of_keys_is_merged_key_by_key(tmp_path: Path) -> None:
    write(tmp_path, "peers: {enabled: true, port: 1}")
    write(
        tmp_path,
        "peers:\n  port: 80\n  addresses: {n1: 10.0.0.1, n2: '[::1]:5'}\n",
        "conf.d/a.yaml",
    )
    found = load(tmp_path, owner=None)
    assert found.config.peers == Peering(
        enabled=True, port=80, addresses={"n1": "10.0.0.1", "n2": "[::1]:5"}
    )
    rows = {row.key: row for row in found.rows()}
    assert rows["peers.enabled"] == ("peers.enabled", "true", str(tmp_path / MAIN))
    assert rows["peers.port"] == ("peers.port", "80", str(tmp_path / "conf.d/a.yaml"))
    assert rows["peers.addresses"].value == '{"n1":"10.0.0.1","n2":"[::1]:5"}'
    assert rows["peers.uploads"].origin == DEFAULT


@pytest.mark.parametrize("text", ["peers:", "peers: {}", "peers:\n  # enabled: true\n"])
def test_a_group_that_says_nothing_leaves_the_defaults(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).config == Config()


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ("peers: true", "peers", "expected keys and values"),
        ("peers: {enabled: 1}", "peers.enabled", "expected true or false"),
        ("peers: {enabeld: true}", "peers.enabeld", "did you mean peers.enabled?"),
        ("peers.enabled: true", "peers.enabled", "expected as two lines"),
        ("peers: {port: 0}", "peers.port", "expected a whole number from 1 to 65535"),
        ("peers: {port: 65536}", "peers.port", "expected a whole number"),
        ("peers: {uploads: 0}", "peers.uploads", "expected a whole number"),
        ("peers: {downloads: 65}", "peers.downloads", "expected a whole number"),
        ("peers: {listen: null}", "peers.listen", "expected an address, a name, an interface"),
        ('peers: {listen: "a\\nb"}', "peers.listen", "expected an address, a name"),
        ("peers: {address: n1}", "peers.address", "expected an address with {node} in it"),
        ("peers: {address: '{node}:x'}", "peers.address", "expected a port"),
        ("peers: {addresses: [n1]}", "peers.addresses", "expected nodes and their addresses"),
        ("peers: {addresses: {n1: 5}}", "peers.addresses", "expected a node's name and its"),
        ("peers: {addresses: {1: a}}", "peers.addresses", "expected a node's name and its"),
        ("peers: {addresses: {n1: 'a:0', n2: ''}}", "peers.addresses", "; "),
        ("peers: {key_file: key}", "peers.key_file", "expected an absolute"),
        ("peers: {bandwidth: 0}", "peers.bandwidth", "expected a size above 0"),
        ("partitions: {gpu: {peers: {enabled: true}}}", "partitions.gpu.peers", "cannot differ"),
        ("peers: {peers: {enabled: true}}", "peers.peers", "unknown key"),
        ("peers: {partitions: {}}", "peers.partitions", "unknown key"),
        ("peers: {sources: [/a]}", "peers.sources", "unknown key"),
    ],
)
def test_a_wrong_key_in_a_group_is_refused_by_its_full_name(
    tmp_path: Path, text: str, key: str, what: str
) -> None:
    (problem,) = problems(tmp_path, text)
    assert problem.key == key
    assert what in problem.what


# --- nothing is written twice


@pytest.mark.parametrize("other", ["digest: false", "engine: rsync"])
def test_peers_without_what_proves_their_bytes_are_refused(tmp_path: Path, other: str) -> None:
    file = tmp_path / "forestage.yaml"
    file.write_text(f"{other}\n")
    load(tmp_path, owner=None)
    file.write_text(f"{other}\npeers:\n  enabled: true\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, owner=None)
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == (str(file), "peers.enabled")


def test_the_shipped_file_is_the_generated_one() -> None:
    assert (REPOSITORY / "etc" / MAIN).read_text() == sample(), (
        "run: .venv/bin/python3 -c 'from forestage.config import sample;"
        ' print(sample(), end="")\' > etc/forestage.yaml'
    )


def test_the_sample_uncommented_is_the_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, sample()).rows() == load(tmp_path / "missing").rows()
    # "# prose" stays, "#key: value" and "#  nested: value" are switched on.
    text = re.sub(r"^#(?=\w|  )", "", sample(), flags=re.MULTILINE)
    found = read(tmp_path, text)
    assert found.config == Config()
    assert {key: found.origins[key] for key in KEYS} == dict.fromkeys(KEYS, str(tmp_path / MAIN))
    assert list(found.partitions) == ["debug", "training"]


def test_every_key_of_the_struct_is_described() -> None:
    groups = {name.partition(".")[0]: None for name in KEYS}
    assert tuple(groups) == Config.__struct_fields__
    within = tuple(name.removeprefix("peers.") for name in KEYS if name.startswith("peers."))
    assert within == Peering.__struct_fields__
    assert all(key.sentence.endswith(".") and len(key.sentence) < 90 for key in KEYS.values())


def test_a_hook_pays_only_for_what_it_uses(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from forestage.settings import load;"
        f"load(pathlib.Path({str(tmp_path)!r}));"
        "print(*{'yaml', 'difflib', 'dataclasses', 'logging', 'click'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# --- whatever is in the file

LINES = st.lists(
    st.builds(
        "{}{}: {}".format,
        st.sampled_from(["", "  ", "    ", "- ", "? ", "&a ", "!!str "]),
        st.sampled_from([*KEYS, "partitions", "gpu", "<<", "1", "no", "~"]),
        st.one_of(
            st.sampled_from(["", "80%", "5G", "10m", "[/a, b]", "{a: 1}", "*a", "|", "'", "0b_"]),
            st.text(max_size=8),
        ),
    ),
    max_size=6,
).map("\n".join)


@given(st.one_of(LINES, st.text(), st.binary()))
@hypothesis_settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=300,
)
def test_any_file_gives_settings_or_a_config_error(tmp_path: Path, text: str | bytes) -> None:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    with contextlib.suppress(ConfigError):
        found = read(tmp_path, raw)
        assert len(found.rows()) >= len(KEYS)
