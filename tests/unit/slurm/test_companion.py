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


def test_companion_that_was_loaded_and_is_named_counts(conf: Path) -> None:
    assert loaded(conf)


def test_companion_that_slurm_never_loaded_does_not_count(conf: Path) -> None:
    conf.with_name("mark").unlink()
    assert not loaded(conf)


def test_companion_whose_line_was_removed_does_not_count_any_more(conf: Path) -> None:
    conf.with_name("plugstack.conf").write_text(f"# {LINE}required pyxis.so\n")
    assert not loaded(conf)


def test_companion_in_a_part_of_another_plugstack_counts(conf: Path) -> None:
    other = conf.parent / "other"
    (other / "parts").mkdir(parents=True)
    (other / "p.conf").write_text("include parts/*.conf\n")
    (other / "parts/1.conf").write_text("required forestage.so\n")
    conf.write_text(f"ClusterName=c\nPlugStackConfig={other}/p.conf\n")
    conf.with_name("plugstack.conf").unlink()
    assert loaded(conf)


@pytest.mark.parametrize("name", ["slurm.conf", "plugstack.conf"])
def test_byte_that_is_no_utf8_hides_no_companion(conf: Path, name: str) -> None:
    file = conf.with_name(name)
    file.write_bytes(b"# f\374r M\374ller\n" + file.read_bytes())
    assert loaded(conf)


def test_plugstack_in_a_folder_whose_name_is_no_utf8_is_found(conf: Path) -> None:
    folder = os.fsdecode(b"f\374r")
    conf.with_name(folder).mkdir()
    conf.with_name("plugstack.conf").rename(conf.with_name(folder) / "p.conf")
    conf.write_bytes(os.fsencode(f"PlugStackConfig={conf.parent}/{folder}/p.conf\n"))
    assert loaded(conf)


@pytest.mark.parametrize("name", ["slurm.conf", "included.conf", "plugstack.conf", "part.conf"])
def test_file_that_cannot_be_read_leaves_it_unknown_and_is_named(conf: Path, name: str) -> None:
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


def test_includes_that_never_end_leave_it_unknown(conf: Path) -> None:
    stack = conf.with_name("plugstack.conf")
    stack.write_text("include plugstack.conf\n")
    assert state(conf) == CompanionState(
        "unknown", f"{stack}: includes that never end (more than {MAX_DEPTH} levels)"
    )
    stack.write_text(f"{LINE}include plugstack.conf\n")
    assert loaded(conf)


@pytest.mark.parametrize("included", [10, 1000])
def test_companion_counts_however_many_files_slurm_conf_includes(conf: Path, included: int) -> None:
    """A site has a file for each of its partitions."""
    for number in range(included):
        conf.with_name(f"p{number}.conf").write_text(f"PartitionName=p{number}\n")
    text = "".join(f"Include p{number}.conf\n" for number in range(included))
    conf.write_text(f"{text}PrologEpilogTimeout=60\n")
    assert loaded(conf)
    assert timeouts.read_limits(SlurmConf(str(conf))).drains == 45


def test_more_files_than_are_read_leave_all_unknown(conf: Path) -> None:
    """Not `absent`: a Prolog would redirect for the whole node what the companion shows."""
    part = conf.with_name("p.conf")
    part.touch()
    conf.write_text("Include p.conf\n" * MAX_FILES)
    why = f"{part}: more than {MAX_FILES} files are included"
    assert state(conf) == CompanionState("unknown", why)
    assert timeouts.read_limits(SlurmConf(str(conf))) == timeouts.UNKNOWN


def test_slurm_conf_that_is_nowhere_leaves_it_unknown(conf: Path) -> None:
    conf.unlink()
    assert state(conf).state == "unknown"
    assert state(conf).why == f"{conf} cannot be read: No such file or directory"


def test_plugstack_that_is_not_there_has_no_companion(conf: Path) -> None:
    conf.with_name("plugstack.conf").unlink()
    assert state(conf) == CompanionState("absent")


@pytest.mark.parametrize(
    ("companion", "redirect"), [("loaded", "spank"), ("absent", "bind"), ("unknown", "none")]
)
def test_automatic_redirect_binds_only_where_no_companion_is_known_of(
    companion: CompanionPresence, redirect: str
) -> None:
    assert resolve_auto_redirect(Config(), companion).redirect == redirect
    assert resolve_auto_redirect(Config(redirect="bind"), companion).redirect == "bind"
