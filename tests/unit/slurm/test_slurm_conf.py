"""slurm.conf is read as Slurm reads it; parse_config.c says what it does with each of these."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.slurm.slurm_conf import (
    MAX_DEPTH,
    MAX_FILES,
    ConfSetting,
    join_lines,
    list_node_names,
    list_partitions,
    read_settings,
)

CONF = "/etc/slurm/slurm.conf"


def read(text: str, **others: str) -> list[ConfSetting]:
    """`others`: further files, named as they lie below /etc; `__` is a slash, `_` a dot."""
    files = {f"/etc/{name.replace('__', '/').replace('_', '.')}": it for name, it in others.items()}
    files[CONF] = text

    def get(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    return list(read_settings(CONF, get))


def said(text: str, **others: str) -> dict[str, str]:
    return {one.name: one.value for one in read(text, **others)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=60\n", {"a": "60"}),
        ("A=60\r\n", {"a": "60"}),
        ("  PrologFlags =\tx  # why\n", {"prologflags": "x"}),
        ('A="60"\n', {"a": "60"}),
        ('A="b c=d"\n', {"a": "b c=d"}),
        ("A=socket=/s,expire=6\n", {"a": "socket=/s,expire=6"}),
        ("A+=60\n", {"a": "60"}),
        ("A=600\na=60\n", {"a": "60"}),
        ("\n \n", {}),
        # Comments go first, so that a backslash at the end of one joins nothing.
        ("# Include nothing\nB=1 # A=60\n", {"b": "1"}),
        ("# one day: \\\nA=60\n", {"a": "60"}),
        ("A=x,\\\ny\n", {"a": "x,y"}),
        ("A= \\ # x\n  y\n", {"a": "y"}),
        ("A=x \\\r\n\nB=1", {"a": "x", "b": "1"}),
        # A backslash keeps what comes next, another one included.
        ("A=x\\#y#z\n", {"a": "x#y"}),
        ("A=x\\\\#y\n", {"a": "x\\"}),
        ("A=x\\\\\nB=\\\\\\#\\y\n", {"a": "x\\", "b": "\\#y"}),
        # A node's or a partition's own are not Slurm's.
        ("NodeName=n[1-4] A=2\nPartitionName=a A=3\nB=1\n", {"b": "1"}),
        ("nodename = n1 \\\n A=2\n", {}),
    ],
)
def test_slurm_conf_line_is_parsed_as_slurm_parses_the_line(
    text: str, expected: dict[str, str]
) -> None:
    assert said(text) == expected


@pytest.mark.parametrize(
    "text", ["A=1 B=2", "A=1 b", 'A="b c" D=1', 'A="b" "c"', 'A=b "', 'A="b c']
)
def test_slurm_conf_line_with_two_settings_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"slurm\.conf:2 says more"):
        read(f"C=1\n{text}\n")


def test_slurm_conf_includes_are_read_at_their_position() -> None:
    text = "A=1\ninclude  more.conf  # x\nInclude /etc/opt/b.conf\nInclude\\\n last\nB=2\n"
    others = {"slurm__more_conf": "A=3\nB=1\nC=1\n", "opt__b_conf": "C=2\nD=1\n"}
    assert said(text, **others, slurm__last="E=1") == {
        "a": "3", "b": "2", "c": "2", "d": "1", "e": "1"
    }  # fmt: skip


def test_relative_include_is_searched_beside_slurm_conf_and_then_beside_the_including_file() -> (
    None
):
    """Beside slurm.conf; until 22.05 beside the file that says it."""
    text, sub = "Include sub/a.conf\n", {"slurm__sub__a_conf": "Include b.conf\n"}
    assert said(text, **sub, slurm__sub__b_conf="A=22") == {"a": "22"}
    assert said(text, **sub, slurm__b_conf="A=24") == {"a": "24"}
    assert said(text, **sub, slurm__b_conf="A=24", slurm__sub__b_conf="A=22") == {"a": "24"}


def test_each_file_of_slurm_conf_is_read_once() -> None:
    files = {
        CONF: "Include sub/a.conf\nInclude b.conf\n",
        "/etc/slurm/sub/a.conf": "Include b.conf",
    }
    files |= {"/etc/slurm/b.conf": "A=1"}
    asked: list[str] = []

    def text(path: str) -> str:
        asked.append(path)
        return files[path]

    list(read_settings(CONF, text))
    assert asked == [*files, "/etc/slurm/b.conf"], "once for each Include that names it"


def test_include_of_slurm_conf_may_contain_the_clusters_name() -> None:
    assert said("ClusterName=Big\nInclude %c.conf\n", slurm__big_conf="A=1")["a"] == "1"


def test_setting_after_4000_includes_of_slurm_conf_is_read() -> None:
    """A timeout that stands behind them is not overlooked."""
    others = {f"slurm__{n}": f"PartitionName=p{n}\n" for n in range(MAX_FILES - 1)}
    text = "".join(f"Include {n}\n" for n in range(MAX_FILES - 1))
    assert said(f"{text}PrologEpilogTimeout=60\n", **others) == {"prologepilogtimeout": "60"}
    assert len(others) > 4000
    with pytest.raises(ValueError, match=f"more than {MAX_FILES} files are included"):
        said(f"{text}Include 0\nPrologEpilogTimeout=60\n", **others)


def test_endless_includes_of_slurm_conf_raise_at_the_maximal_depth() -> None:
    """Two in a file: without a limit of the depth, all the files of the other limit are read."""
    asked: list[str] = []

    def text(path: str) -> str:
        asked.append(path)
        return "Include slurm.conf\nInclude slurm.conf\n"

    with pytest.raises(ValueError, match="never end"):
        list(read_settings(CONF, text))
    assert len(asked) == MAX_DEPTH + 1
    files = {f"slurm__{n}": f"Include {n + 1}\n" for n in range(1, MAX_DEPTH - 1)}
    last = {f"slurm__{MAX_DEPTH - 1}": "A=1\n"}
    assert said("Include 1\n", **files, **last) == {"a": "1"}


def test_each_setting_of_slurm_conf_knows_its_file_and_lines() -> None:
    found = read("# x\nA=\\\n\\\n1 # y\nInclude b\nB=2", slurm__b="\nE=1\\")
    places = [(one.name, one.line.where, one.line.last) for one in found]
    assert places == [
        ("a", f"{CONF}:2", 4),
        ("e", "/etc/slurm/b:2", 2),
        ("b", f"{CONF}:6", 6),
    ]


@given(st.text('a=#\\" \r\n\t'))
def test_joined_slurm_conf_lines_have_disjoint_line_numbers(text: str) -> None:
    """`forestage disable` names lines by their numbers."""
    last = 0
    for line in join_lines(CONF, text):
        assert last < line.first <= line.last <= text.count("\n") + 1
        raw = text.split("\n")[line.first - 1 : line.last]
        assert [one.text for one in join_lines(CONF, "\n".join(raw))] == [line.text]
        last = line.last


def test_nodes_and_partitions_are_read_from_slurm_conf_with_an_include_of_the_clusters_name() -> (
    None
):
    files = {
        "/s.conf": "ClusterName=Big\nInclude nodes-%c.conf\nPartitionName=p Nodes=ALL\n",
        "/nodes-big.conf": "NodeName=n[1-4] CPUs=8\n",
    }
    assert list(list_node_names("/s.conf", files.__getitem__)) == ["n[1-4]"]
    assert list(list_partitions("/s.conf", files.__getitem__)) == ["p"]


def test_cloud_and_future_nodes_are_left_out_of_the_node_names() -> None:
    text = (
        "NodeName=DEFAULT State=CLOUD\nNodeName=c[1-9]\nnodename=A Cpus=1 State=UNKNOWN\n"
        "NodeName=DEFAULT State=UNKNOWN\nNodeName=n1 NodeAddr=10.0.0.1\nNodeName=x State=FUTURE\n"
        "PartitionName=p Nodes=ALL State=UP\n"
    )
    assert list(list_node_names("/s.conf", lambda _: text)) == ["A", "n1"]
