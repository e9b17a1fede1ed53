"""The configuration: what is written holds; what is wrong is refused by file and key."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forestage.config import (
    DEFAULT,
    KEYS,
    REMOVED_KEYS,
    Config,
    ConfigRow,
    LoadedConfig,
    ServiceAddress,
    load_config,
    parse_address,
)
from forestage.config.keys import ColdStartMode, RedirectMode
from forestage.errors import ConfigError, ConfigProblem
from forestage.units import SizeOrShare

REPOSITORY = Path(__file__).resolve().parents[3]
MAIN = "forestage.yaml"
MIB = 1 << 20  # bytes; the most that a file may hold
NODE_KEYS = [name for name, key in KEYS.items() if not key.per_partition]


def write(etc: Path, text: str | bytes, name: str = MAIN) -> Path:
    path = etc / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o644)
    return path


def read(etc: Path, text: str | bytes = "", name: str = MAIN) -> LoadedConfig:
    write(etc, text, name)
    return load_config(etc)


def problems(etc: Path, text: str | bytes | None = None) -> list[ConfigProblem]:
    if text is not None:
        write(etc, text)
    with pytest.raises(ConfigError) as caught:
        load_config(etc)
    return list(caught.value.problems)


# --- what is written holds


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}", "partitions:\n", "\ufeff"])
def test_configuration_file_without_values_leaves_the_defaults(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).config == Config()


def test_missing_configuration_directory_gives_the_defaults(tmp_path: Path) -> None:
    found = load_config(tmp_path / "missing")
    assert (found.config, found.partitions) == (Config(), {})
    assert set(found.origins.values()) == {DEFAULT}


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("enabled: no", "enabled", False),
        ("sources: [/lustre, /home/a b]", "sources", ("/lustre", "/home/a b")),
        ("cache: /tmpfs/x", "cache", "/tmpfs/x"),
        ("max_image_size: null", "max_image_size", None),
        ("max_size: 2T", "max_size", SizeOrShare(size=2 << 40)),
        ("min_free: 0", "min_free", SizeOrShare(size=0)),
        ("redirect: spank", "redirect", "spank"),
        ("threads: auto", "threads", None),
        ("threads: 64", "threads", 64),
        ("chunk_size: 3MiB", "chunk_size", 3 << 20),
        ("chunk_size: auto", "chunk_size", None),
        ("deadline: auto", "deadline", None),
        ("cold: wait", "cold", "wait"),
        ("deadline: 20m", "deadline", 1200.0),
        ("max_stage_wait: 1h30m", "max_stage_wait", 5400.0),
    ],
)
def test_configuration_value_of_each_kind_is_read_as_its_type(
    tmp_path: Path, text: str, key: str, expected: object
) -> None:
    found = read(tmp_path, text)
    value = getattr(found.config, key)
    assert (value, type(value)) == (expected, type(expected))
    assert found.origins[key] == str(tmp_path / MAIN)


@pytest.mark.parametrize(
    ("chunk_size", "size", "expected"),
    [
        (None, 0, MIB),
        (None, 256 * MIB, MIB),
        (None, 256 * MIB + 1, 2 * MIB),
        (None, 4096 * MIB, 16 * MIB),
        (None, 1 << 50, 16 * MIB),
        (3 * MIB, 1 << 50, 3 * MIB),
    ],
)
def test_automatic_chunk_size_is_smaller_for_small_images(
    chunk_size: int | None, size: int, expected: int
) -> None:
    assert Config(chunk_size=chunk_size).chunk_bytes_for(size) == expected


@pytest.mark.parametrize(
    ("cold", "redirect", "start"),
    [
        ("auto", "spank", "through"),
        ("through", "spank", "through"),
        # Nobody but the companion can show a step its own file.
        ("auto", "bind", "shared"),
        ("through", "bind", "shared"),
        ("auto", "auto", "shared"),  # before anybody knows of the companion
        ("auto", "none", "shared"),
        ("shared", "spank", "shared"),
        ("wait", "spank", "wait"),
        ("wait", "bind", "wait"),
    ],
)
def test_key_cold_gives_reading_through_only_with_the_companion(
    cold: ColdStartMode, redirect: RedirectMode, start: str
) -> None:
    assert Config(cold=cold, redirect=redirect).cold_start_mode == start


def test_later_configuration_file_wins_key_by_key(tmp_path: Path) -> None:
    common = "deadline: 1\nthreads: 1\ncold: wait\npartitions: {gpu: {deadline: 1}}"
    main = write(tmp_path, common)
    early = write(tmp_path, "deadline: 2\nthreads: 8", "conf.d/10-a.yaml")
    late = write(tmp_path, "deadline: 3\npartitions: {gpu: {enabled: false}}", "conf.d/9-late.yaml")
    found = load_config(tmp_path)
    assert found.config == Config(deadline=3.0, threads=8, cold="wait")
    assert found.partitions == {"gpu": {"deadline": 1.0, "enabled": False}}
    assert {key: origin for key, origin in found.origins.items() if origin != DEFAULT} == {
        "deadline": str(late),
        "threads": str(early),
        "cold": str(main),
        "partitions.gpu.deadline": str(main),
        "partitions.gpu.enabled": str(late),
    }


def test_configuration_file_in_conf_d_may_end_in_yml(tmp_path: Path) -> None:
    """Half of all YAML files do, and one that is not read would say so to nobody."""
    write(tmp_path, "deadline: 1", "conf.d/a.yaml")
    assert read(tmp_path, "deadline: 2", "conf.d/b.yml").config == Config(deadline=2.0)


@pytest.mark.parametrize("name", [".a.yaml", "a.yaml~", "a.yaml.dpkg-old", "README"])
def test_backup_and_hidden_files_in_conf_d_are_not_read(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, "enabled: false", f"conf.d/{name}").config == Config()


def test_configuration_of_a_partition_changes_only_the_keys_that_it_sets(tmp_path: Path) -> None:
    found = read(tmp_path, "deadline: 5\npartitions: {gpu: {sources: [/gpu]}, cpu: }")
    assert found.for_partition("gpu") == Config(deadline=5.0, sources=("/gpu",))
    for name in ("cpu", "unknown", "", None):
        assert found.for_partition(name) == Config(deadline=5.0)


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("", True),
        ("enabled: false", False),
        ("enabled: false\npartitions: {gpu: {deadline: 5}}", False),
        ("enabled: false\npartitions: {gpu: {enabled: true}}", True),
        ("partitions: {gpu: {enabled: false}}", True),
    ],
)
def test_node_counts_as_enabled_if_any_partition_is_enabled(
    tmp_path: Path, text: str, on: bool
) -> None:
    found = read(tmp_path, text)
    assert found.node_config == msgspec.structs.replace(found.config, enabled=on)


def test_row_of_the_configuration_shows_value_and_origin(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "sources: [/a, /b]\nmax_image_size: 1536M\npartitions: {gpu: {deadline: 90.25}}",
    )
    main = str(tmp_path / MAIN)
    rows = found.list_rows()
    assert [row.key for row in rows] == [*KEYS, "partitions.gpu.deadline"]
    assert {row for row in rows if row.origin != DEFAULT} == {
        ConfigRow("sources", "[/a, /b]", main),
        ConfigRow("max_image_size", "1536MiB", main),
        ConfigRow("partitions.gpu.deadline", "90.25s", main),
    }
    assert ConfigRow("deadline", "auto", DEFAULT) in found.list_rows("cpu")
    assert ConfigRow("deadline", "90.25s", main) in found.list_rows("gpu")
    assert len(found.list_rows("gpu")) == len(KEYS)


# --- what is wrong is refused by file and key


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ("redirekt: bind", "redirekt", "unknown key, did you mean redirect?"),
        ("partition: {}", "partition", "unknown key, did you mean partitions?"),
        ("enabled: 'yes'", "enabled", "expected true or false, got 'yes'"),
        ("enabled:", "enabled", "expected true or false, got null"),
        ("max_image_size: 0", "max_image_size", "expected null or a size above 0, got 0"),
        ("max_size: 0", "max_size", "expected more than nothing, got 0"),
        ("min_free: -5G", "min_free", "expected a size such as 23GiB or 500M, or a share"),
        ("low_watermark: 5G", "low_watermark", "expected a share such as 80%, got '5G'"),
        ("redirect: spunk", "redirect", "expected auto or spank or bind or none, got 'spunk'"),
        (
            "deadline: no",
            "deadline",
            "expected auto or a duration such as 90s or 10m, got false",
        ),
        ("cold: on", "cold", "expected auto or through or shared or wait, got true"),
        ("threads: 0", "threads", "expected auto or a whole number from 1 to 64, got 0"),
        ("threads: true", "threads", "expected auto or a whole number from 1 to 64, got true"),
        ("max_copies: auto", "max_copies", "expected a whole number from 1 to 64, got 'auto'"),
        ("chunk_size: 512K", "chunk_size", "expected auto or a multiple of 1MiB up to 1GiB"),
        ("deadline: -1", "deadline", "expected auto or a duration such as 90s or 10m, got -1"),
        ("deadline: 0x" + "f" * 5000, "deadline", "got a huge number"),
        ("max_stage_wait: {a: 1}", "max_stage_wait", "expected a duration such as 90s or 10m"),
        ("partitions: false", "partitions", "expected keys and values, got false"),
        ("partitions: {gpu: 1}", "partitions.gpu", "expected keys and values, got 1"),
        ("partitions: {gpu: {deadline: x}}", "partitions.gpu.deadline", "expected auto or a"),
        ("partitions: {gpu: {dedline: 1}}", "partitions.gpu.dedline", "did you mean deadline?"),
        ("partitions: {1: {}}", "partitions.1", "expected a name in quotes"),
        ("1: 2", "1", "expected a name in quotes"),
        ('"a\\nb": 2', r"'a\nb'", "expected a name in quotes"),
        ("user_mounts: [/a]", "user_mounts", "expected mount points, each with a type and a uid"),
        ("user_mounts: {a: fuse 1}", "user_mounts", "expected an absolute path, got 'a'"),
        ("user_mounts: {/a: fuse 0}", "user_mounts", "such as fuse.juicefs 994, got 'fuse 0'"),
        ("user_mounts: {/a: nfs4 9}", "user_mounts", "such as fuse.juicefs 994, got 'nfs4 9'"),
        ("user_mounts: {/a: 994}", "user_mounts", "such as fuse.juicefs 994, got 994"),
        ("sources: /lustre", "sources", "expected a list of paths such as [/lustre], got"),
        ("sources: [/lustre, 7]", "sources", "expected an absolute path, got 7"),
        ("cache: /tmp", "cache", "expected a directory outside /tmp, got '/tmp'"),
        ("cache: /dev/shm/forestage", "cache", "expected a directory outside /dev/shm"),
    ],
)
def test_wrong_configuration_value_is_refused_naming_file_and_key(
    tmp_path: Path, text: str, key: str, what: str
) -> None:
    (problem,) = problems(tmp_path, text)
    assert (problem.where, problem.key) == (str(tmp_path / MAIN), key)
    assert what in problem.what


# --- keys that were removed

EXCLUDE = {
    *("enabled", "sources", "require_mount", "max_image_size", "user_mounts", "redirect", "cold"),
    *("max_size", "min_free", "data.enabled", "data.max_files", "data.share", "data.job_dir"),
    *("data.mount_roots", "registry.enabled", "registry.max_user_size"),
}
"""The keys by which an admin keeps something from being staged; a feature has tests of its own."""
EXCLUDING = "\n".join(
    (
        "enabled: false",
        "sources: [/lustre/public]",
        "max_image_size: 1G",
        "data: {enabled: false}",
        "registry: {enabled: false}",
        "partitions: {gpu: {enabled: true, sources: [], max_image_size: 1M}}",
        "",
    )
)
VALUES = ["", "false", "drain", "0", "2026-01-01"]


def with_key(key: str, value: str) -> str:
    """The lines of a key in its place."""
    group, dot, within = key.rpartition(".")
    return f"{group}:\n  {within}: {value}\n" if dot else f"{key}: {value}\n"


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_removed_configuration_key_is_ignored_and_the_other_keys_hold(
    tmp_path: Path, key: str, value: str
) -> None:
    before = read(tmp_path, EXCLUDING)
    write(tmp_path, with_key(key, value), "conf.d/a.yaml")
    write(tmp_path, with_key(key, "other"), "conf.d/b.yaml")
    found = load_config(tmp_path)
    assert found.removed == {key: (f"{tmp_path}/conf.d/a.yaml", f"{tmp_path}/conf.d/b.yaml")}
    assert found.unlogged == (), "a command logs nothing"
    assert found.list_configs() == before.list_configs()
    assert found.list_rows() == before.list_rows()


@pytest.mark.parametrize("key", [key for key in REMOVED_KEYS if "." not in key])
def test_removed_key_of_a_partition_changes_nothing_in_the_partition(
    tmp_path: Path, key: str
) -> None:
    before = read(tmp_path, EXCLUDING)
    found = read(tmp_path, EXCLUDING.replace("{gpu: {", f"{{old: {{{key}: 1}}, gpu: {{{key}: x, "))
    assert list(found.removed) == [key]
    assert found.list_configs() == before.list_configs()
    assert found.for_partition("old") == before.config


@pytest.mark.parametrize(
    "below", ["enabled: false", "n1: {sources: 1}", "- sources: 1", "enabeld: false"]
)
@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_keys_indented_below_a_removed_key_are_an_error(
    tmp_path: Path, key: str, below: str
) -> None:
    """They would go with it, and what they exclude would be staged."""
    indented = "\n    ".join(("", below))
    (problem,) = problems(tmp_path, with_key(key, indented))
    assert problem.key == key
    assert "there are keys below it" in problem.what


def test_key_that_excludes_jobs_or_images_is_never_removed() -> None:
    """Whoever takes one of these away has to say what becomes of what it excluded."""
    assert not EXCLUDE - set(KEYS)
    assert not set(REMOVED_KEYS) & set(KEYS)


@pytest.mark.parametrize("text", ["digests: false", "preloaded: 1"])
def test_unknown_configuration_key_is_an_error(tmp_path: Path, text: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert "unknown key" in problem.what


# --- what is refused


@pytest.mark.parametrize("key", NODE_KEYS)
def test_key_of_the_node_cannot_differ_between_partitions(tmp_path: Path, key: str) -> None:
    (problem,) = problems(tmp_path, f"partitions: {{gpu: {{{key}: null}}}}")
    assert problem.key == f"partitions.gpu.{key}"
    assert "cannot differ between partitions" in problem.what


@pytest.mark.parametrize("key", ["sources", "cache"])
@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/", "a path below /, got '/'"),
        ("//", "a path below /"),
        ("lustre", "an absolute path, got 'lustre'"),
        ("", "an absolute path, got ''"),
        ("/lustre/", "'/lustre', got '/lustre/'"),
        ("/a/./b", "'/a/b'"),
        ("/a/../b", "'/b', got '/a/../b'"),
        ("/a\0b", "without control characters"),
        ("/a\nb", "without control characters"),
    ],
)
def test_path_of_a_key_that_is_relative_or_root_is_refused(
    key: str, path: object, what: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        KEYS[key].parse_value(["/ok", path] if key == "sources" else path)


def test_problems_of_all_configuration_files_are_reported_together(tmp_path: Path) -> None:
    write(tmp_path, "deadline: soon\nredirekt: bind\nsources: [x, /ok, y]")
    write(tmp_path, "a: b: c", "conf.d/1.yaml")
    write(tmp_path, "partitions: {gpu: {enabled: 2, cache: /x}}", "conf.d/2.yaml")
    assert [(Path(problem.where).name, problem.key) for problem in problems(tmp_path)] == [
        (MAIN, "deadline"),
        (MAIN, "redirekt"),
        (MAIN, "sources"),
        ("1.yaml", ""),
        ("2.yaml", "partitions.gpu.enabled"),
        ("2.yaml", "partitions.gpu.cache"),
    ]


# --- files that are not what they should be


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"\xff", "is not UTF-8 (at byte 0)"),
        ("enabled: true\na: b: c", "is not YAML: line 2: mapping values are not allowed"),
        ("sources:\n\t- /a", "line 2: found character that nothing begins with, as a tab"),
        ("a\0b", "is not YAML: "),
        ("enabled: true\n---\nenabled: false", "is not YAML: line 2: but found another document"),
        ("? [a]\n: 1", "is not YAML: line 1: found unhashable key"),
        ('"\\ud800": 1', "is not YAML: line 1: "),
        ("- enabled", "expected keys and values, got a list"),
        ("enabled: true\nenabled: false", "line 2: 'enabled' is given again, first in line 1"),
        ("partitions:\n  a: {}\n  b: {}\n  a: {}", "line 4: 'a' is given again, first in line 2"),
        ("#" * (MIB + 1), "is larger than 1MiB"),
        (
            "[" * 500_000,
            "nest",
        ),  # SIGSEGV, if it came to the composer
        ("- " * 40_000, "nest"),
        ("sources: &a [/x]\npartitions: {p: {sources: *a}}", "line 2: an alias (*) cannot be used"),
    ],
    ids=lambda value: str(value[:40]),
)
def test_configuration_file_that_is_no_yaml_is_refused_with_its_line(
    tmp_path: Path, text: str | bytes, what: str
) -> None:
    (problem,) = problems(tmp_path, text)
    assert (problem.where, problem.key) == (str(tmp_path / MAIN), "")
    assert what in problem.what
    assert "\n" not in problem.what


@pytest.mark.parametrize("name", [MAIN, "conf.d/a.yaml"])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.mkdir, "cannot be read: Is a directory"),
        (os.mkfifo, "is not a regular file"),  # and nobody waits for a writer
        (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file or directory"),
        (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels"),
    ],
    ids=["directory", "fifo", "dangling", "loop"],
)
def test_configuration_path_that_is_a_directory_or_fifo_is_refused_without_blocking(
    tmp_path: Path, name: str, make: Callable[[Path], None], what: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    (problem,) = problems(tmp_path)
    assert problem.where == str(path)
    assert what in problem.what


def test_conf_d_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path, "", "conf.d").parent)
    assert problem == ConfigProblem(
        str(tmp_path / "conf.d"), "", "cannot be listed: Not a directory"
    )


def test_unreadable_configuration_file_is_a_problem_and_not_taken_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    write(tmp_path, "")
    monkeypatch.setattr("os.open", refuse)
    (problem,) = problems(tmp_path)
    assert problem.what == "cannot be read: Permission denied"


# --- root reads only what root has written


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("name", [MAIN, "conf.d/a.yaml"])
@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_configuration_file_writable_by_group_or_other_users_is_refused_by_root(
    tmp_path: Path, name: str, mode: int
) -> None:
    target = write(tmp_path, "enabled: false", "target")
    target.chmod(mode)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)  # which does not lend its owner
    (problem,) = problems(tmp_path)
    assert problem.where == str(path)
    assert problem.what == "group or others may write it, expected its owner only (chmod go-w)"


@pytest.mark.usefixtures("as_root")
def test_configuration_file_of_another_user_is_refused_by_root(tmp_path: Path) -> None:
    os.chown(write(tmp_path, "enabled: false"), 1000, 1000)
    (problem,) = problems(tmp_path)
    assert problem.what == "belongs to uid 1000, expected root (chown root)"


def test_user_may_load_a_world_writable_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    write(tmp_path, "enabled: false").chmod(0o666)
    assert not load_config(tmp_path).config.enabled


# --- addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("n1", "n1", 7717),
        ("n1:80", "n1", 80),
        ("n1.cluster:65535", "n1.cluster", 65535),
        ("10.0.0.1", "10.0.0.1", 7717),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("::1", "::1", 7717),
        ("fe80::1%ib0", "fe80::1%ib0", 7717),
        ("[::1]", "::1", 7717),
        ("[::1]:80", "::1", 80),
    ],
)
def test_service_address_is_parsed_with_or_without_a_port(text: str, host: str, port: int) -> None:
    assert parse_address(text, 7717) == ServiceAddress(host, port)


@pytest.mark.parametrize(
    "text", ["", ":80", "n1:", "n1:0", "n1:65536", "n1:x", "n1:-1", "n1:١", "[::1", "[]", "[::1]80"]
)
def test_malformed_service_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_address(text, 7717)


# --- nothing is written twice


def test_sample_configuration_without_comment_signs_sets_the_defaults(tmp_path: Path) -> None:
    sample = (REPOSITORY / "etc" / MAIN).read_text()
    assert read(tmp_path, sample).list_rows() == load_config(tmp_path / "missing").list_rows()
    # "# prose" stays, "#key: value" and "#  nested: value" are switched on.
    found = read(tmp_path, re.sub(r"^#(?=\w|  )", "", sample, flags=re.MULTILINE))
    assert found.config == Config()
    assert {key: found.origins[key] for key in KEYS} == dict.fromkeys(KEYS, str(tmp_path / MAIN))
    assert list(found.partitions) == ["debug", "training"]


def test_sentence_that_describes_each_key_is_short() -> None:
    assert all(key.sentence.endswith(".") and len(key.sentence) < 90 for key in KEYS.values())
