"""plugstack.conf is read as Slurm reads it: order, includes, ignored lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.slurm.plugstack import IncludeLine, PluginLine, read_lines, read_plugins
from forestage.system.tree import RootedTree


def plugins(root: Path, path: str) -> list[PluginLine]:
    return list(read_plugins(path, lambda one: RootedTree(root).host_path(one).read_text(), root))


def test_plugstack_lines_are_yielded_in_slurms_load_order(tmp_path: Path) -> None:
    root = tmp_path / "[root]"
    parts = root / "etc/conf.d"
    parts.mkdir(parents=True)
    (root / "etc/p.conf").write_text(
        "# required no.so\n\nrequired a.so x=1 x=2 # words\ninclude conf.d/*.conf\n"
        "maybe c.so\nrequired\nRequired c.so\nInclude /etc/conf.d/1.bak\ninclude none/*\n"
        "optional /opt/d.so \\\nrequired /opt/e\\#f\ninclude /etc/conf.d/?.so\n"
    )
    (parts / "2.conf").write_text("optional two.so\n")
    (parts / "1.conf").write_text("required one.so\n")
    (parts / "1.bak").write_text("required never.so\n")
    (parts / "3.so").write_text("  optional\tthree.so")
    (parts / "4.conf").symlink_to("gone")
    (parts / "5.conf").mkdir()
    lines = plugins(root, "/etc/p.conf")
    assert [(one.path, one.required) for one in lines] == [
        ("a.so", True),
        ("one.so", True),
        ("two.so", False),
        ("/opt/d.so", False),
        ("/opt/e\\", True),
        ("three.so", False),
    ]
    assert (lines[0].arguments, lines[0].where) == (("x=1", "x=2"), "/etc/p.conf:3")
    assert (lines[0].find_argument("x"), lines[0].find_argument("y")) == ("2", "")
    assert lines[1].file == "/etc/conf.d/1.conf"
    assert lines[3].arguments == ("\\",)


def test_plugin_line_of_an_included_file_refers_to_the_include_line(tmp_path: Path) -> None:
    (tmp_path / "p.conf").write_text("include /x-1*.conf\ninclude x-2*.conf\nrequired own.so\n")
    (tmp_path / "x-2.conf").write_text("optional x.so\n")
    found = list(
        read_lines("/p.conf", lambda one: RootedTree(tmp_path).host_path(one).read_text(), tmp_path)
    )
    first, second, plugin, own = found
    assert isinstance(first, IncludeLine)
    assert isinstance(second, IncludeLine)
    assert isinstance(plugin, PluginLine)
    assert isinstance(own, PluginLine)
    assert [first.pattern, second.pattern] == ["/x-1*.conf", "/x-2*.conf"]
    assert (plugin.included_by, own.included_by) == (second, None)


def test_plugstack_that_includes_itself_raises(tmp_path: Path) -> None:
    (tmp_path / "p.conf").write_text("required a.so\ninclude p.conf\n")
    with pytest.raises(ValueError, match="never end"):
        plugins(tmp_path, "/p.conf")


def test_missing_plugstack_has_no_plugins(tmp_path: Path) -> None:
    assert plugins(tmp_path, "/p.conf") == []
