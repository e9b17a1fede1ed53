"""The settings of a user's enroot: the job's environment, and enroot.conf as its shell reads it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from forestage.clock import Clock, Deadline
from forestage.errors import Declined, Failed
from forestage.features.registry import environment
from forestage.features.registry.environment import EnrootSettings
from forestage.system import run


class Site:
    """A node with an enroot and its configuration."""

    def __init__(self, folder: Path) -> None:
        self.conf = folder / "enroot.conf"
        self.parts = folder / "enroot.conf.d"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.enroot("echo 4.1.2")

    def enroot(self, script: str) -> None:
        (self.bin / "enroot").write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / "enroot").chmod(0o755)

    def settings(self, patience: float = 600.0, **environ: str) -> EnrootSettings:
        return environment.read_enroot_settings(
            {"HOME": "/home/alice", **environ}, Deadline.after(patience, Clock()), str(self.conf)
        )

    def value(self, line: str, name: str = "ENROOT_X", **environ: str) -> str | None:
        """What one line of enroot.conf makes of a variable."""
        self.conf.write_text(f"{line}\n")
        return self.settings(**environ).variables.get(name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.setattr(run, "PATH", f"{made.bin}:{run.PATH}")
    return made


# The job's environment


def test_environment_block_is_parsed_without_the_variables_that_pyxis_drops() -> None:
    block = b"A=1\0PATH=/x\0LD_PRELOAD=/x\0LD_AUDIT=/x\0ENROOT_ALLOW_HTTP=y\0B=a=b\nc\0"
    assert environment.parse_environment(block) == {"A": "1", "B": "a=b\nc"}


@pytest.mark.parametrize("name", sorted(environment.DENIED))
def test_variable_that_pyxis_drops_is_recognized_only_by_its_whole_name(name: str) -> None:
    assert environment.parse_environment(f"{name}=1\0{name}S=2\0".encode()) == {f"{name}S": "2"}


def test_environment_block_keeps_the_last_value_and_skips_invalid_variables() -> None:
    block = b"A=1\0A=2\0=x\0none\0\0C=\xff\0" + b"D=" + b"x" * (128 << 10) + b"\0"
    assert environment.parse_environment(block) == {"A": "2", "C": "\udcff"}
    assert environment.parse_environment(b"") == {}


@pytest.mark.parametrize(
    "block", [b"A=" + b"x" * environment.MAX_BYTES, b"A=1\0" * environment.MAX_ENTRIES]
)
def test_environment_block_over_the_size_limits_is_declined(block: bytes) -> None:
    with pytest.raises(Declined) as caught:
        environment.parse_environment(block)
    assert caught.value.reason == "environment"


# enroot.conf: the expectations are what the config::load of enroot 4.1 makes of these lines


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("ENROOT_X /a/b", "/a/b"),
        ("ENROOT_X\t=  /a/b  ", "/a/b"),
        ("ENROOT_X=/a/b", "/a/b"),
        ("   ENROOT_X /a", "/a"),
        ("ENROOT_X ${HOME}/x", "/home/alice/x"),
        ("ENROOT_X $(echo a; echo b)", "a b"),
        ('ENROOT_X "a   b"', "a   b"),
        ("ENROOT_X a   b # c", "a b"),
        ("ENROOT_X '$HOME'", "$HOME"),
        ("ENROOT_X /a/${NO_SUCH}", ""),
        ("ENROOT_X /a/${NO_SUCH:-b}", "/a/b"),
        ("ENROOT_X $(echo kept; false)", "kept"),
        ("ENROOT_X", ""),
        ("#ENROOT_X a", None),
        ("enroot_x a", None),
        ("ENROOT_x a", None),
        ("XENROOT_X a", None),
    ],
)
def test_enroot_conf_values_are_expanded_as_shell_words(
    site: Site, line: str, value: str | None
) -> None:
    assert site.value(line) == value


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        *(("https_proxy", True), ("no_proxy", True), ("SSL_CERT_FILE", True), ("NVIDIA_X", True)),
        *(("HTTPS_PROXY", False), ("LD_PRELOAD", False), ("BASH_ENV", False), ("FOO", False)),
    ],
)
def test_enroot_conf_sets_only_variables_that_enroot_reads(
    site: Site, name: str, taken: bool
) -> None:
    assert site.value(f"{name} x", name) == ("x" if taken else None)


def test_environment_variables_take_precedence_over_enroot_conf(site: Site) -> None:
    assert site.value("ENROOT_X conf", ENROOT_X="mine") == "mine"
    assert site.value("ENROOT_X conf", ENROOT_X="") == "conf"
    site.parts.mkdir()
    (site.parts / "b.conf").write_text("ENROOT_Y part\nENROOT_X part\n")
    (site.parts / "c.txt").write_text("ENROOT_Z part\n")
    found = site.settings().variables
    assert (found["ENROOT_X"], found["ENROOT_Y"], "ENROOT_Z" in found) == ("conf", "part", False)


def test_last_line_of_enroot_conf_without_a_newline_is_ignored(site: Site) -> None:
    site.conf.write_text("ENROOT_X a\nENROOT_Y b")
    assert "ENROOT_Y" not in site.settings().variables


def test_shell_command_in_an_enroot_conf_value_does_not_read_the_files_next_lines(
    site: Site,
) -> None:
    site.conf.write_text("ENROOT_X $(cat)\nENROOT_Y b\n")
    assert site.settings().variables["ENROOT_Y"] == "b"


def test_enroot_conf_with_a_shell_syntax_error_is_declined(site: Site) -> None:
    site.conf.write_text("ENROOT_X $(\n")
    with pytest.raises(Declined, match="is no shell") as caught:
        site.settings()
    assert caught.value.reason == "enroot"


def test_enroot_conf_with_a_hanging_command_is_declined(site: Site) -> None:
    site.conf.write_text("ENROOT_X $(sleep 600)\n")
    with pytest.raises(Declined, match="takes too long"):
        site.settings(patience=1.0)


def test_enroot_settings_without_enroot_conf_are_enroots_defaults(site: Site) -> None:
    found = site.settings()
    assert found.credentials == "/home/alice/.config/enroot/.credentials"
    assert (found.allow_http, found.squash_options) == (False, "-comp lzo -noD -exit-on-error")
    assert (found.arch, found.enroot_version) == (os.uname().machine, (4, 1, 2))


def test_credentials_path_without_home_in_the_environment_is_in_the_users_home(site: Site) -> None:
    found = environment.read_enroot_settings({}, Deadline.after(600.0, Clock()), str(site.conf))
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert found.credentials == f"{home}/.config/enroot/.credentials"


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"XDG_CONFIG_HOME": "/c"}, "/c/enroot/.credentials"),
        ({"ENROOT_CONFIG_PATH": "/e", "XDG_CONFIG_HOME": "/c"}, "/e/.credentials"),
    ],
)
def test_credentials_path_follows_enroot_config_path_and_xdg_config_home(
    site: Site, environ: dict[str, str], path: str
) -> None:
    assert site.settings(**environ).credentials == path


@pytest.mark.parametrize(
    ("value", "allowed"), [("yes", True), ("y", True), ("0", True), ("no", False), ("F", False)]
)
def test_enroot_allow_http_accepts_the_values_that_enroot_takes_as_yes(
    site: Site, value: str, allowed: bool
) -> None:
    site.conf.write_text(f"ENROOT_ALLOW_HTTP {value}\nENROOT_SQUASH_OPTIONS -comp zstd\n")
    found = site.settings()
    assert (found.allow_http, found.squash_options) == (allowed, "-comp zstd")


@pytest.mark.parametrize(
    ("said", "version", "imports_digests"),
    [
        ("4.1.2", (4, 1, 2), True),
        ("3.5", (3, 5, 0), True),
        ("v3.0.1-4", (3, 0, 1), True),
        ("3.0.0", (3, 0, 0), False),
        ("unknown", (0, 0, 0), False),
    ],
)
def test_enroot_version_decides_whether_digests_can_be_imported(
    site: Site, said: str, version: tuple[int, int, int], imports_digests: bool
) -> None:
    site.enroot(f"echo {said}")
    found = site.settings()
    assert (found.enroot_version, found.can_import_digests) == (version, imports_digests)


def test_failing_enroot_is_declined_and_a_missing_enroot_is_a_failure_of_the_node(
    site: Site,
) -> None:
    site.enroot("echo 'Unsupported bash' >&2; exit 1")
    with pytest.raises(Declined, match="Unsupported bash") as caught:
        site.settings()
    assert caught.value.reason == "enroot"
    (site.bin / "enroot").unlink()
    with pytest.raises(Failed, match="enroot is not installed"):
        site.settings()
