"""Who asked for which key: few names, for a while, and who is asked and tried for them."""

from __future__ import annotations

import pytest

from forestage.features.peers import known_copies
from forestage.features.peers.known_copies import (
    KnownCopiesReply,
    RequesterTable,
    pick_givers,
    pick_nodes_to_query,
    pick_readers,
)

NODES = tuple(f"n{number}" for number in range(100))


def test_requester_table_names_earlier_requesters_of_the_same_key() -> None:
    askers = RequesterTable()
    assert askers.record_and_list("k", "n1", 0.0) == ()
    assert askers.record_and_list("k", "n2", 1.0) == ("n1",)
    assert askers.record_and_list("other", "n2", 2.0) == ()
    assert askers.record_and_list("k", "n1", 3.0) == ("n2",), "nobody is told of themselves"
    assert askers.record_and_list("k", "n3", 4.0) == ("n2", "n1")


@pytest.mark.parametrize("first", [False, True])
def test_requester_table_names_the_last_or_the_first_four_requesters(first: bool) -> None:
    askers = RequesterTable(first=first)
    for number in range(9):
        askers.record_and_list("k", f"n{number}", float(number))
    named = range(4) if first else range(5, 9)
    assert askers.record_and_list("k", "new", 9.0) == tuple(f"n{number}" for number in named)


def test_requester_table_drops_a_requester_after_an_hour() -> None:
    askers = RequesterTable()
    askers.record_and_list("k", "n1", 0.0)
    askers.record_and_list("k", "n2", 100.0)
    assert askers.record_and_list("k", "n3", known_copies.REMEMBERED_SECONDS + 1) == ("n2",)


def test_requester_table_keeps_the_most_recently_requested_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_copies, "KEYS", 3)
    askers = RequesterTable()
    for key in ("a", "b", "c", "a", "d"):
        askers.record_and_list(key, "n1", 0.0)
    named = {key: askers.record_and_list(key, "n2", 1.0) for key in ("d", "a", "c")}
    assert named == dict.fromkeys(named, ("n1",))
    assert askers.record_and_list("b", "n2", 1.0) == ()


def test_all_nodes_ask_the_same_three_nodes_for_a_key() -> None:
    asked = pick_nodes_to_query("k", NODES, "elsewhere")
    assert len(asked) == known_copies.QUERIED_NODES
    assert pick_nodes_to_query("k", NODES[::-1], "another") == asked
    assert pick_nodes_to_query("l", NODES, "elsewhere") != asked
    beside = pick_nodes_to_query("k", NODES, asked[1])
    assert beside[:3] == asked
    assert len(beside) == known_copies.QUERIED_NODES + 1


@pytest.mark.parametrize("nodes", [(), ("n1",)])
def test_node_list_without_other_nodes_gives_no_nodes_to_ask(nodes: tuple[str, ...]) -> None:
    assert pick_nodes_to_query("k", nodes, "n1") == []


def test_nodes_with_a_copy_are_tried_before_named_nodes_with_two_givers_at_most() -> None:
    answers = [
        ("n1", KnownCopiesReply(False, ("n5", "n6"))),
        ("n2", KnownCopiesReply(True, ("n5",))),
    ]
    assert pick_givers(answers, set(NODES)) == ("n2", "n5")
    assert pick_givers(answers[:1], set(NODES)) == ("n5", "n6")
    assert pick_givers([], set(NODES)) == ()


def test_readers_of_a_speculative_copy_are_taken_from_the_first_reply_in_ring_order() -> None:
    """The first in the ring that answers, whichever answer came first."""
    asked = ["n1", "n2", "n3"]
    five = tuple(f"n{number}" for number in range(11, 16))
    answers = [
        ("n3", KnownCopiesReply(True, (), ("n9", "n8"))),
        ("n2", KnownCopiesReply(False, ("n1",), five)),
    ]
    assert pick_readers(asked, answers, set(NODES)) == five[:4]
    assert pick_readers(asked, answers, {"n2", "n12"}) == ("n12",)
    assert pick_readers(asked, answers[:1], set(NODES)) == ("n9", "n8")
    assert pick_readers(asked, [("n1", KnownCopiesReply(True)), *answers], set(NODES)) == ()
    assert pick_readers(asked, [], set(NODES)) == ()


def test_named_giver_outside_of_the_node_list_is_not_tried() -> None:
    answers = [("n1", KnownCopiesReply(True, ("attacker.example.org", "n7", "n6")))]
    assert pick_givers(answers, {"n6"}) == ("n6",), "n1 and n7 are of the job itself"
