"""What `redirect: auto` goes by: the companion was loaded, and plugstack.conf still names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.config import CompanionPresence, Config, resolve_auto_redirect
from forestage.slurm import timeouts
from forestage.slurm.companion import CompanionState, find_importer, read_companion_state
from forestage.slurm.slurm_conf import MAX_DEPTH, MAX_FILES, SlurmConf

LINE = "optional /usr/lib/forestage/spank/forestage.so timeout=500\n"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "plugstack.conf").write_text(LINE)
    (tmp_path / "slurm.conf").write_text("ClusterName=c\n")
    (tmp_path / "mark").touch()
    return tmp_path / "slurm.conf"


def state(conf: Path) -> CompanionState:
    return read_companion_state(conf.with_name("mark"), SlurmConf(str(conf)))


def loaded(conf: Path) -> bool:
    found = state(conf)
    assert not found.why
    return found.state == "loaded"


def test_companion_is_loaded_if_its_mark_exists_and_plugstack_names_the_plugin(conf: Path) -> None:
    assert loaded(conf)


def test_companion_without_its_mark_is_not_loaded(conf: Path) -> None:
    conf.with_name("mark").unlink()
    assert not loaded(conf)


def test_companion_commented_out_in_plugstack_is_not_loaded(conf: Path) -> None:
    conf.with_name("plugstack.conf").write_text(f"# {LINE}required pyxis.so\n")
    assert not loaded(conf)


def test_companion_in_an_included_file_of_a_configured_plugstack_is_loaded(conf: Path) -> None:
    other = conf.parent / "other"
    (other / "parts").mkdir(parents=True)
    (other / "p.conf").write_text("include parts/*.conf\n")
    (other / "parts/1.conf").write_text("required forestage.so\n")
    conf.write_text(f"ClusterName=c\nPlugStackConfig={other}/p.conf\n")
    conf.with_name("plugstack.conf").unlink()
    assert loaded(conf)


@pytest.mark.parametrize("name", ["slurm.conf", "plugstack.conf"])
def test_companion_is_found_in_files_with_bytes_that_are_not_utf8(conf: Path, name: str) -> None:
    file = conf.with_name(name)
    file.write_bytes(b"# f\374r M\374ller\n" + file.read_bytes())
    assert loaded(conf)


def test_plugstack_in_a_directory_with_a_name_that_is_not_utf8_is_found(conf: Path) -> None:
    folder = os.fsdecode(b"f\374r")
    conf.with_name(folder).mkdir()
    conf.with_name("plugstack.conf").rename(conf.with_name(folder) / "p.conf")
    conf.write_bytes(os.fsencode(f"PlugStackConfig={conf.parent}/{folder}/p.conf\n"))
    assert loaded(conf)


@pytest.mark.parametrize("name", ["slurm.conf", "included.conf", "plugstack.conf", "part.conf"])
def test_unreadable_slurm_file_makes_the_companion_unknown_and_is_named(
    conf: Path, name: str
) -> None:
    conf.write_text("Include included.conf\n")
    conf.with_name("included.conf").write_text("ClusterName=c\n")
    conf.with_name("plugstack.conf").write_text("include part.conf\n")
    conf.with_name("part.conf").write_text(LINE)
    assert loaded(conf)
    file = conf.with_name(name)
    file.unlink()
    file.symlink_to(file)
    why = f"{file} cannot be read: Too many levels of symbolic links"
    assert state(conf) == CompanionState("unknown", why)
    assert find_importer(SlurmConf(str(conf))) == ""


def test_endless_plugstack_includes_make_the_companion_unknown(conf: Path) -> None:
    stack = conf.with_name("plugstack.conf")
    stack.write_text("include plugstack.conf\n")
    assert state(conf) == CompanionState(
        "unknown", f"{stack}: includes that never end (more than {MAX_DEPTH} levels)"
    )
    stack.write_text(f"{LINE}include plugstack.conf\n")
    assert loaded(conf)


@pytest.mark.parametrize("included", [10, 1000])
def test_companion_is_found_if_slurm_conf_includes_1000_files(conf: Path, included: int) -> None:
    """A site has a file for each of its partitions."""
    for number in range(included):
        conf.with_name(f"p{number}.conf").write_text(f"PartitionName=p{number}\n")
    text = "".join(f"Include p{number}.conf\n" for number in range(included))
    conf.write_text(f"{text}PrologEpilogTimeout=60\n")
    assert loaded(conf)
    assert timeouts.read_limits(SlurmConf(str(conf))).node_drained_after == 45


def test_slurm_conf_with_too_many_includes_makes_companion_and_timeouts_unknown(conf: Path) -> None:
    """Not `absent`: a Prolog would redirect for the whole node what the companion shows."""
    part = conf.with_name("p.conf")
    part.touch()
    conf.write_text("Include p.conf\n" * MAX_FILES)
    why = f"{part}: more than {MAX_FILES} files are included"
    assert state(conf) == CompanionState("unknown", why)
    assert timeouts.read_limits(SlurmConf(str(conf))) == timeouts.UNKNOWN


def test_missing_slurm_conf_makes_the_companion_unknown(conf: Path) -> None:
    conf.unlink()
    assert state(conf).state == "unknown"
    assert state(conf).why == f"{conf} cannot be read: No such file or directory"


def test_missing_plugstack_makes_the_companion_absent(conf: Path) -> None:
    conf.with_name("plugstack.conf").unlink()
    assert state(conf) == CompanionState("absent")


@pytest.mark.parametrize(
    ("companion", "redirect"), [("loaded", "spank"), ("absent", "bind"), ("unknown", "none")]
)
def test_redirect_auto_is_spank_bind_or_none_by_the_companions_state(
    companion: CompanionPresence, redirect: str
) -> None:
    assert resolve_auto_redirect(Config(), companion).redirect == redirect
    assert resolve_auto_redirect(Config(redirect="bind"), companion).redirect == "bind"
