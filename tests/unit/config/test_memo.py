"""YAML that was read before is not parsed again, and nothing else changes by that."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import pytest

from forestage.config import load, load_config
from forestage.config.memo import YamlCache
from forestage.errors import ConfigError

Patch = pytest.MonkeyPatch


class Site:
    """A configuration and what is kept of it."""

    def __init__(self, folder: Path) -> None:
        self.etc = folder / "etc"
        (self.etc / "conf.d").mkdir(parents=True)
        self.kept = folder / "config.json"

    def write(self, text: str, name: str = "forestage.yaml") -> None:
        (self.etc / name).write_text(text)
        (self.etc / name).chmod(0o644)

    def sources(self) -> tuple[str, ...]:
        return load_config(self.etc, self.kept).config.sources


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def read_without_yaml(site: Site, monkeypatch: Patch) -> tuple[str, ...]:
    """PyYAML cannot be imported."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "yaml", None)
        return site.sources()


def test_configuration_files_read_before_are_loaded_without_yaml(
    site: Site, monkeypatch: Patch
) -> None:
    site.write("sources: [/a]\n")
    site.write("sources: [/b]\n", "conf.d/more.yaml")
    assert site.sources() == read_without_yaml(site, monkeypatch) == ("/b",)
    assert site.kept.stat().st_mode & 0o777 == 0o600


def test_changed_configuration_file_is_read_again_even_with_the_same_mtime(site: Site) -> None:
    site.write("sources: [/a]\n")
    site.sources()
    before = (site.etc / "forestage.yaml").stat()
    site.write("sources: [/b]\n")
    os.utime(site.etc / "forestage.yaml", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert site.sources() == ("/b",)
    site.write("sources: [/a]\n")
    assert site.sources() == ("/a",)


def test_wrong_configuration_file_is_reported_each_time_and_not_cached(site: Site) -> None:
    site.write("sources: [\n")
    for _ in range(2):
        with pytest.raises(ConfigError):
            site.sources()
    site.write("nothing: here\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="nothing"):
            site.sources()
    assert not site.kept.exists()


@pytest.mark.parametrize("junk", [b"", b"[]", b"{", b"\xff", b'{"a": 1}'])
def test_damaged_yaml_cache_is_ignored(site: Site, junk: bytes, monkeypatch: Patch) -> None:
    site.kept.write_bytes(junk)
    site.write("sources: [/a]\n")
    assert site.sources() == read_without_yaml(site, monkeypatch) == ("/a",)


@pytest.mark.parametrize("odd", [{1: "a"}, {"a": datetime.date(2026, 1, 1)}, [float("inf")]])
def test_document_that_json_cannot_represent_is_not_cached(site: Site, odd: object) -> None:
    documents = YamlCache(site.kept)
    assert documents.parse_cached("text", lambda _: odd) == odd
    documents.save_if_changed()
    assert not site.kept.exists()


def test_yaml_cache_that_cannot_be_written_is_no_error(site: Site) -> None:
    site.kept = site.kept / "missing/config.json"
    site.write("sources: [/a]\n")
    assert site.sources() == ("/a",)


def unlogged(site: Site) -> tuple[str, ...]:
    return load_config(site.etc, site.kept).unlogged


def test_removed_key_is_reported_for_logging_once_and_again_after_a_boot(site: Site) -> None:
    site.write("sources: [/a]\npreload: true\n")
    assert [unlogged(site) for _ in range(3)] == [("preload",), (), ()]
    site.write("on_error: drain\npreload: true\n")
    assert [unlogged(site) for _ in range(2)] == [("on_error",), ()]
    site.write("preload: false\n", "conf.d/more.yaml")
    assert unlogged(site) == ()
    site.kept.unlink()
    assert sorted(unlogged(site)) == ["on_error", "preload"]


def test_key_removed_by_an_upgrade_is_reported_for_logging_without_a_file_change(
    site: Site, monkeypatch: Patch
) -> None:
    site.write("preload: true\ndigest: false\n")
    with monkeypatch.context() as patch:
        patch.delitem(load.REMOVED_KEYS, "digest")
        patch.setitem(load.KEYS, "digest", load.KEYS["enabled"])
        patch.setattr(load, "with_values", lambda config, changed: config)
        assert unlogged(site) == ("preload",)
    assert [unlogged(site) for _ in range(2)] == [("digest",), ()]


@pytest.mark.parametrize("noted", ["null", '"preload"', "7", "[7]"])
def test_damaged_record_of_logged_keys_is_rewritten(site: Site, noted: str) -> None:
    site.write("preload: true\n")
    site.kept.write_text(f'{{"removed": {noted}}}')
    assert [unlogged(site) for _ in range(2)] == [("preload",), ()]


def test_removed_key_is_not_reported_if_the_yaml_cache_cannot_be_written(site: Site) -> None:
    site.kept = site.kept / "missing/config.json"
    site.write("preload: true\n")
    assert unlogged(site) == ()
