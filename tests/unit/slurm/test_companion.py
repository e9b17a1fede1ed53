"""What `redirect: auto` goes by: the companion was loaded, and plugstack.conf still names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.slurm.companion import is_loaded

LINE = "optional /usr/lib/forestage/spank/forestage.so timeout=500\n"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "plugstack.conf").write_text(LINE)
    (tmp_path / "slurm.conf").write_text("ClusterName=c\n")
    (tmp_path / "mark").touch()
    return tmp_path / "slurm.conf"


def loaded(conf: Path) -> bool:
    return is_loaded(conf.with_name("mark"), str(conf))


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
def test_files_that_cannot_be_read_leave_the_prolog_to_redirect(conf: Path, name: str) -> None:
    file = conf.with_name(name)
    file.write_bytes(b"\xff")
    assert not loaded(conf)
    file.unlink()
    assert not loaded(conf)
    assert not is_loaded(conf.with_name("mark"), "")
