"""The stack is read as Slurm reads it: order, includes, what it passes over."""

from __future__ import annotations

from pathlib import Path

from forestage.files import Files
from forestage.plugstack import Line, read


def test_lines_come_in_the_order_in_which_slurm_loads_them(tmp_path: Path) -> None:
    parts = tmp_path / "etc/conf.d"
    parts.mkdir(parents=True)
    (tmp_path / "etc/p.conf").write_text(
        "# required no.so\n\nrequired a.so x=1 x=2 # words\ninclude conf.d/*.conf\n"
        "maybe c.so\nrequired\noptional /opt/d.so\n"
    )
    (parts / "2.conf").write_text("optional two.so\n")
    (parts / "1.conf").write_text("required one.so\n")
    (parts / "1.bak").write_text("required never.so\n")
    lines = read(Files(tmp_path), "/etc/p.conf")
    assert lines is not None
    assert [(one.plugin, one.required) for one in lines] == [
        ("a.so", True),
        ("one.so", True),
        ("two.so", False),
        ("/opt/d.so", False),
    ]
    assert lines[0] == Line("a.so", True, ("x=1", "x=2"), "/etc/p.conf", 3)
    assert (lines[0].argument("x"), lines[0].argument("y")) == ("2", "")
    assert lines[1].file == "/etc/conf.d/1.conf"


def test_a_file_that_includes_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "p.conf").write_text("required a.so\ninclude p.conf\n")
    lines = read(Files(tmp_path), "/p.conf")
    assert lines is not None
    assert {one.plugin for one in lines} == {"a.so"}


def test_a_stack_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read(Files(tmp_path), "/p.conf") is None
