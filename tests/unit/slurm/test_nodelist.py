"""Lists of nodes as Slurm writes them: their names, and nothing that a user invents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.slurm.nodelist import MAX_NODES, expand_nodelist


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("a1,b[2-3].example-x", ["a1", "b2.example-x", "b3.example-x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("login", ["login"]),
    ],
)
def test_node_list_of_slurm_expands_to_its_nodes(nodelist: str, names: list[str]) -> None:
    assert sorted(expand_nodelist(nodelist)) == names


@pytest.mark.parametrize(
    "nodelist",
    [
        "",
        "(null)",
        "@all",
        "n[1-",
        "n[3-1]",
        "n1:22",
        "n1/x",
        "n1 n2",
        "n[1-3]!n2",
        "n[1-999999999]",
        "n[1-999]x[1-999]",
        ",".join(["n[1-9999]"] * 7),
        "n[" + "1," * 70000 + "2]",
    ],
)
def test_invalid_or_too_long_node_list_expands_to_nothing(nodelist: str) -> None:
    assert expand_nodelist(nodelist) == ()


@given(st.text(alphabet="n1[]-,.@:!&^% ", max_size=30))
def test_arbitrary_text_as_a_node_list_expands_to_host_names_only(text: str) -> None:
    for name in expand_nodelist(text):
        assert name.replace(".", "").replace("-", "").isalnum()


def test_node_list_of_max_nodes_is_expanded_and_a_longer_list_is_not() -> None:
    assert len(expand_nodelist(f"n[1-{MAX_NODES}]")) == MAX_NODES
    assert expand_nodelist(f"n[0-{MAX_NODES}]") == ()
