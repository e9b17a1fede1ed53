"""The chunk schedule: each chunk comes in the end, whatever fails, and the source is read once."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forestage.features.peers.peer_table import MAX_FIRST_CONNECTIONS
from forestage.features.peers.ring import SOURCE
from forestage.features.peers.schedule import (
    ChunkSchedule,
    ChunkTransfer,
    FailureReason,
    SchedulePolicy,
    limit_fetches,
)

MB = 1_000_000
NODES = [f"n{number}" for number in range(4)]


def schedule(count: int = 12, nodes: list[str] = NODES, place: int = 0) -> ChunkSchedule:
    me = ChunkSchedule("key", nodes, nodes[0], [], MB).ring.nodes[place]
    return greeted("key", nodes, me, range(count), MB)


def greeted(*about: Any, **more: Any) -> ChunkSchedule:
    """A copy whose peers have all answered their first connection."""
    one = ChunkSchedule(*about, **more)
    greet(one)
    return one


def greet(one: ChunkSchedule, now: float = 0.0) -> list[str]:
    """Has all peers answer that are to be connected to now; who these are."""
    found = []
    while (peer := one.next_first_connection(now)) is not None:
        one.mark_connected(peer)
        found.append(peer)
    one._begun = None
    return found


def others(one: ChunkSchedule) -> list[str]:
    return [node for node in one.ring.nodes if node != one.me]


def everything(count: int) -> int:
    return (1 << count) - 1


def all_of(ask: Callable[[float], ChunkTransfer | None], now: float) -> list[ChunkTransfer]:
    found = []
    while (one := ask(now)) is not None:
        found.append(one)
    return found


def settle(one: ChunkSchedule, now: float = 0.0) -> None:
    """Has every peer say that it has begun, and has nothing yet."""
    for ask in all_of(one.next_fetch, now):
        one.record_peer_chunks(ask.peer, 0, now)
        one.mark_failed(ask, "absent", now)


def test_schedule_reads_the_own_share_in_order_with_two_reads_at_once() -> None:
    one = schedule()
    settle(one)
    assert all_of(one.next_read, 0.1) == [ChunkTransfer(0, SOURCE), ChunkTransfer(4, SOURCE)]
    one.mark_received(ChunkTransfer(0, SOURCE), 0.2)
    assert all_of(one.next_read, 0.2) == [ChunkTransfer(8, SOURCE)]


def test_schedule_fetches_a_wanted_chunk_next_from_a_peer_that_has_the_chunk() -> None:
    one = schedule(40)
    settle(one)
    for peer in others(one)[:2]:
        one.record_peer_chunks(peer, everything(40), 0.1)
    one.set_wanted([], [37])
    first = one.next_fetch(0.1)
    assert first is not None
    assert (first.number, first.peer in others(one)[:2]) == (37, True)
    one.set_wanted([22], [37])
    second = one.next_fetch(0.1)
    assert second is not None
    assert (second.number, second.peer != first.peer) == (22, True)


def test_schedule_reads_a_wanted_chunk_of_the_own_share_next() -> None:
    one = schedule(40)
    settle(one)
    one.set_wanted([5], [16])
    assert [ask.number for ask in all_of(one.next_read, 0.1)] == [16, 0]
    one.set_wanted([5], [20])
    assert one.next_read(0.1) is None
    one.set_wanted([5, 24], [20])
    assert all_of(one.next_read, 0.1) == [ChunkTransfer(24, SOURCE)], (
        "one more for what a job waits for"
    )
    one.set_wanted([], [])
    one.mark_received(ChunkTransfer(0, SOURCE), 0.2)
    one.mark_received(ChunkTransfer(24, SOURCE), 0.2)
    assert one.next_read(0.2) == ChunkTransfer(28, SOURCE), (
        "a job that waited for 24 will want this"
    )


def test_schedule_requests_a_wanted_chunk_of_another_share_from_its_reader_next() -> None:
    one = schedule(40)
    settle(one)
    reader = one.ring.find_reader(21)
    for peer in others(one):
        one.record_peer_chunks(peer, 0b1110, 0.3)
    busy = [one.next_fetch(0.3) for _ in range(3)]
    assert reader in {ask.peer for ask in busy if ask}
    one.set_wanted([21, 25], [])
    asked = all_of(one.next_fetch, 0.3)
    assert asked[0] == ChunkTransfer(21, reader)
    assert ChunkTransfer(25, reader) not in asked, "a peer is waited at for one chunk at a time"
    assert {one.ring.find_reader(ask.number) for ask in all_of(one.next_read, 0.3)} == {one.me}


def fetched_once(took: float, nodes: int = 4) -> tuple[ChunkSchedule, int]:
    """A copy to which its peers have given each chunk in so many seconds, and how many at once."""
    one = schedule(40, [f"n{number}" for number in range(nodes)])
    settle(one)
    for peer in others(one):
        one.record_peer_chunks(peer, everything(40), 0.1)
    asked = all_of(one.next_fetch, 0.1)
    for ask in asked:
        one.mark_received(ask, 0.1 + took)
    return one, len(asked)


@pytest.mark.parametrize(
    ("peers", "reading", "took", "most"),
    [
        (3, 4, 0.1, 8),  # they come quickly
        (3, 4, 0.5, 4),
        (3, 4, 2.0, 3),  # the link is slow
        (3, 4, 0.0, 3),  # or may be: none has come yet
        (7, 4, 2.0, 4),  # others share the link of each
        (31, 4, 2.0, 8),
        (3, 2, 2.0, 5),  # what is not read leaves room
        (3, 0, 2.0, 7),
        (7, 0, 2.0, 8),
        (3, 6, 2.0, 3),  # a job waits for more than the own share
    ],
)
def test_limit_of_concurrent_fetches_is_low_over_a_slow_link(
    peers: int, reading: int, took: float, most: int
) -> None:
    """Else each takes so long that it is given up, and what came of it is lost."""
    assert limit_fetches(SchedulePolicy(max_own_reads=4), peers, reading, took) == most


def test_schedule_fetches_more_chunks_at_once_after_quick_transfers() -> None:
    slow, at_first = fetched_once(took=2.0)
    assert len(all_of(slow.next_fetch, 2.1)) == at_first
    quick, _ = fetched_once(took=0.1)
    assert len(all_of(quick.next_fetch, 0.2)) > at_first


def test_schedule_fetches_more_chunks_at_once_while_it_reads_none() -> None:
    """Else its link rests once the own share is read, while those of others are shared."""
    one = schedule(160)
    settle(one)
    reads = all_of(one.next_read, 0.1)
    of_others = sum(1 << n for n in range(160) if one.ring.find_reader(n) != one.me)
    for peer in others(one):
        one.record_peer_chunks(peer, of_others, 0.1)
    beside_reads = len(all_of(one.next_fetch, 0.1))
    for ask in reads:
        one.mark_received(ask, 0.2)
    assert len(all_of(one.next_fetch, 0.2)) == len(reads)
    assert beside_reads == one.policy.min_fetches


@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
def test_schedule_spreads_its_first_fetches_evenly_over_peers(nodes: int) -> None:
    """Else the links of some rest, and the others' are shared by more than they are made for."""
    one = schedule(40 * nodes, [f"n{number}" for number in range(nodes)])
    settle(one)
    of_others = sum(1 << n for n in range(40 * nodes) if one.ring.find_reader(n) != one.me)
    for peer in others(one):
        one.record_peer_chunks(peer, of_others, 0.1)
    asked = [one.next_fetch(0.1) for _ in range(4)]
    loads = Counter(ask.peer for ask in asked if ask)
    assert loads.total() == len(asked)
    assert max(loads.values()) - min(loads[peer] for peer in others(one)) <= 1


def test_schedule_fetches_a_wanted_chunk_beyond_the_limit_of_a_slow_link() -> None:
    one, _ = fetched_once(took=2.0)
    all_of(one.next_fetch, 2.1)
    left = sorted(set(range(40)) - {ask.number for ask in one.transfers})
    missing = [number for number in left if one.missing >> number & 1]
    one.set_wanted([missing[0]], missing[1:3])
    assert [ask.number for ask in all_of(one.next_fetch, 2.1)] == missing[:1]


def test_schedule_reads_head_tail_and_start_map_chunks_first() -> None:
    one = greeted("key", ["a"], "a", range(12), MB, hot=[7, 5])
    read = []
    while (ask := one.next_read(0.0)) is not None:
        one.mark_received(ask, 0.0)
        read.append(ask.number)
    assert read == [0, 11, 5, 7, 1, 2, 3, 4, 6, 8, 9, 10]


def test_schedule_of_a_late_node_drops_its_first_reads_if_peers_have_all_chunks() -> None:
    one = schedule(count=40)
    first = one.next_fetch(0.0)
    assert first is not None
    early = all_of(one.next_read, 0.0)
    assert early == [ChunkTransfer(0, SOURCE), ChunkTransfer(4, SOURCE)], (
        "no read waits for an answer"
    )
    assert all(one.is_early_read(ask) and not one.is_superfluous_read(ask, 0.1) for ask in early)
    for peer in others(one):
        one.record_peer_chunks(peer, everything(40), 0.1)
    assert all(one.is_superfluous_read(ask, 0.1) for ask in early)
    for ask in early:
        one.drop_early_read(ask)
    one.mark_received(first, 0.1)
    assert one.next_read(0.3) is None, "the own share too comes from others"
    asked = {first.number}
    while not one.is_done:
        for ask in all_of(one.next_fetch, 0.4):
            asked.add(ask.number)
            one.mark_received(ask, 0.5)
    assert asked == set(range(40))


def test_schedule_limits_reads_until_peers_had_time_to_answer() -> None:
    one = ChunkSchedule("key", NODES, "n0", range(80), MB, SchedulePolicy(max_own_reads=4))
    assert len(all_of(one.next_read, 0.0)) == one.policy.max_probe_reads
    read = all_of(one.next_read, one.policy.probe)
    assert {one.ring.find_reader(ask.number) for ask in read} == {"n0"}
    assert not any(one.is_early_read(ask) for ask in read)


def test_schedule_requests_no_chunk_from_a_peer_that_has_not_been_greeted() -> None:
    one = ChunkSchedule("key", NODES, "n0", range(40), MB)
    assert one.next_fetch(0.0) is None
    peers = [one.next_first_connection(0.0) for _ in range(3)]
    assert sorted(filter(None, peers)) == ["n1", "n2", "n3"]
    assert one.next_first_connection(0.1) is None, "each once"
    one.set_wanted([3, 1, 2], [])
    assert one.next_fetch(0.1) is None
    one.mark_connected("n1")
    assert {ask.peer for ask in all_of(one.next_fetch, 0.1)} == {"n1"}


def read_of_others(one: ChunkSchedule, now: float) -> set[str]:
    """Reads all that it may, and says of whose shares that was, apart from its own."""
    read: set[str] = set()
    while (ask := one.next_read(now)) is not None:
        one.mark_received(ask, now)
        read.add(one.ring.find_reader(ask.number))
    return read - {one.me}


@pytest.mark.parametrize("silent", [(), ("n1", "n2", "n3")])
def test_schedule_reads_the_shares_of_silent_peers_after_the_answer_time(
    silent: tuple[str, ...],
) -> None:
    one = ChunkSchedule("key", NODES, "n0", range(40), MB, silent=silent)
    assert {one.next_first_connection(0.0) for _ in range(3)} == {"n1", "n2", "n3"}
    for ask in all_of(one.next_read, 0.0):
        one.mark_received(ask, 0.0)
    before, after = 0.3, max(one.policy.first_answer_wait, one.policy.probe) + 0.1
    assert read_of_others(one, before) == set(), "little is read at first, of the own share"
    assert read_of_others(one, after) == {"n1", "n2", "n3"}
    assert one.is_done


def test_schedule_greets_a_peer_recorded_as_silent_without_waiting_for_the_peers_share() -> None:
    one = ChunkSchedule("key", NODES, "n0", range(40), MB, silent=("n1",))
    assert [one.next_first_connection(0.0) for _ in range(3)][-1] == "n1"
    for peer in ("n2", "n3"):
        one.mark_connected(peer)
        one.record_peer_chunks(peer, 0, 0.0)
    one.mark_failed(next(iter(all_of(one.next_fetch, 0.0))), "absent", 0.0)
    one._probe_until = 0.0
    mine = {number for number in range(40) if one.ring.find_reader(number) == "n1"}
    stands_in = {number for number in mine if one.ring.list_reader_and_stand_ins(number)[1] == "n0"}
    assert read_of_others(one, 0.1) == {"n1"}
    assert {number for number in mine if not one.missing >> number & 1} == stands_in
    one.mark_connected("n1")
    assert "n1" in {ask.peer for ask in all_of(one.next_fetch, 0.2)}


def test_schedules_of_four_nodes_read_only_their_shares_while_services_answer_slowly() -> None:
    """Each node reads its share meanwhile, and that of others only then."""
    for place in range(4):
        me = ChunkSchedule("key", NODES, "n0", [], MB).ring.nodes[place]
        one = ChunkSchedule("key", NODES, me, range(80), MB)
        while one.next_first_connection(0.0) is not None:
            pass
        read = []
        for _ in range(20):
            ask = one.next_read(1.0)
            assert ask is not None
            one.mark_received(ask, 1.0)
            read.append(ask.number)
        assert {one.ring.find_reader(number) for number in read} == {me}
        peer = others(one)[0]
        late = one.next_read(1.0)
        assert late is not None, "nobody answers, and nothing of the own share is left"
        one.mark_received(late, 1.0)
        assert late.number >= 80 - len(NODES), "the readers go from the front"
        for peer in others(one):
            one.mark_connected(peer)
        one._begun = 1.0
        assert one.next_read(1.1) is None


def test_schedule_repeats_a_refused_greeting_later_but_not_a_wrong_greeting() -> None:
    one = ChunkSchedule("key", NODES, "n0", range(40), MB)
    for _ in range(3):
        peer = one.next_first_connection(0.0)
        assert peer is not None
        one.mark_connect_failed(peer, "wrong" if peer == "n3" else "refused", 0.1)
    assert one.next_first_connection(1.0) is None
    later = 0.2 + one.policy.refused_backoff
    assert {one.next_first_connection(later) for _ in range(3)} == {"n1", "n2", None}


def test_schedule_greets_further_peers_while_earlier_peers_do_not_answer() -> None:
    one = many(64, answer=False)
    begun: list[str] = []
    for tenth in range(10):
        while (peer := one.next_first_connection(tenth / 10)) is not None:
            begun.append(peer)
        assert len(begun) <= MAX_FIRST_CONNECTIONS * (
            1 + tenth * 0.1 / one.policy.first_answer_wait
        )
    assert len(begun) == len(set(begun)) >= 2 * MAX_FIRST_CONNECTIONS


@pytest.mark.parametrize(("why", "times"), [("wrong", [1.0]), ("silent", [1.0, 30.0])])
def test_schedule_excludes_a_peer_after_wrong_bytes_or_two_silences(
    why: FailureReason, times: list[float]
) -> None:
    one = schedule(nodes=["a", "b"])
    for now in times:
        bad = one.next_fetch(now)
        assert bad is not None
        one.mark_failed(bad, why, now)
    for now in (times[-1], 100.0, 1000.0):
        asked = all_of(one.next_fetch, now)
        assert bad.peer not in {ask.peer for ask in asked}
        for ask in asked:
            one.record_peer_chunks(ask.peer, 0, now)
            one.mark_failed(ask, "absent", now)


def test_schedule_excludes_no_peer_if_all_peers_were_silent_at_once() -> None:
    """Else a busy machine would make each node read the whole image."""
    one = schedule(48)
    for now in (0.0, 20.0):
        asked = all_of(one.next_fetch, now)
        assert {ask.peer for ask in asked} == set(others(one))
        for ask in asked:
            one.mark_failed(ask, "silent", now)
        assert one.next_fetch(now + 1.0) is None
        for peer in others(one):
            one.record_peer_chunks(peer, one.missing, now + 15.0)
        again = all_of(one.next_fetch, now + 15.0)
        assert {ask.peer for ask in again} == set(others(one))
        for ask in again:
            one.mark_received(ask, now + 15.0)
    assert {ask.peer for ask in all_of(one.next_fetch, 40.0)} == set(others(one))


@pytest.mark.parametrize("why", ["refused", "slow", "absent"])
def test_schedule_waits_longer_after_each_failure_of_a_peer(why: FailureReason) -> None:
    one = schedule(nodes=["a", "b"])
    waits, now = [], 0.0
    for _ in range(4):
        begun = now
        while (ask := one.next_fetch(now)) is None:
            now += 0.05
        one.mark_failed(ask, why, now)
        waits.append(now - begun)
    assert 0 == waits[0] < waits[1] < waits[2] < waits[3]


@pytest.mark.parametrize(("has", "asked_again"), [(0, True), (everything(12), False)])
def test_schedule_backs_off_a_peer_after_its_announced_chunk_was_absent(
    has: int, asked_again: bool
) -> None:
    one = schedule(nodes=["a", "b"])
    ask = one.next_fetch(0.0)
    assert ask is not None
    one.record_peer_chunks(ask.peer, has, 0.1)
    one.mark_failed(ask, "absent", 0.1)
    assert (one.next_fetch(0.1) is not None) == asked_again


def test_schedules_read_a_dead_nodes_share_once_by_its_stand_ins() -> None:
    read: dict[str, set[int]] = {}
    for place in range(1, 4):
        one = schedule(48, place=place)
        dead = one.ring.nodes[0]
        now = 0.0
        while now < 1.5:
            for ask in all_of(one.next_fetch, now):
                one.mark_failed(ask, "silent" if ask.peer == dead else "absent", now)
                if ask.peer != dead:
                    one.record_peer_chunks(ask.peer, 0, now)
            for ask in all_of(one.next_read, now):
                read.setdefault(one.me, set()).add(ask.number)
                one.mark_received(ask, now)
            now += 0.1
    ring = one.ring
    for number in range(48):
        readers = [node for node, numbers in read.items() if number in numbers]
        expected = next(node for node in ring.list_reader_and_stand_ins(number) if node != dead)
        assert readers == [expected]


def beside_a_late_node() -> tuple[ChunkSchedule, list[int]]:
    """After the grace; and the late node's chunks for which this node is the first stand-in."""
    one = schedule(96, place=1)
    late = one.ring.nodes[0]
    for tenth in range(12):
        for ask in all_of(one.next_fetch, tenth / 10):
            if ask.peer != late:
                one.record_peer_chunks(ask.peer, 0, tenth / 10)
            one.mark_failed(ask, "absent", tenth / 10)
    return one, [
        number
        for number in range(0, 96, 4)
        if one.ring.list_reader_and_stand_ins(number)[1] == one.me
    ]


def test_schedule_reads_a_late_nodes_share_last_and_from_its_end() -> None:
    """It reads from the front, once it begins: else both would read the same chunks."""
    one, of_late = beside_a_late_node()
    read = []
    while asks := all_of(one.next_read, 1.2):
        assert len(asks) <= one.policy.max_own_reads or read, "no more at once of the own share"
        for ask in asks:
            read.append(ask.number)
            one.mark_received(ask, 1.2)
    assert read == [*range(1, 96, 4), *reversed(of_late)]


def test_schedule_reads_a_wanted_chunk_of_a_late_node_at_once() -> None:
    one, of_late = beside_a_late_node()
    one.set_wanted([of_late[1], 3], [of_late[0]])
    assert of_late[1] in {ask.number for ask in all_of(one.next_read, 1.2)}
    assert not {3, *of_late[2:], of_late[0]} & {ask.number for ask in one.transfers}


def test_schedule_queries_a_late_node_of_the_job_at_least_each_second() -> None:
    one = schedule()
    late, heard = others(one)[0], []
    for tenth in range(100):
        for ask in all_of(one.next_fetch, tenth / 10):
            one.mark_failed(ask, "absent", tenth / 10)
            heard += [tenth / 10] if ask.peer == late else []
    assert max(after - before for before, after in itertools.pairwise(heard)) < 1.0


def test_schedule_does_not_read_a_dead_nodes_chunk_that_another_peer_has() -> None:
    one = schedule(48, place=1)
    dead, alive = one.ring.nodes[0], one.ring.nodes[2]
    now = 0.0
    while now < 2.0:
        one.record_peer_chunks(alive, one.missing, now)
        for ask in all_of(one.next_fetch, now):
            if ask.peer != alive:
                one.mark_failed(ask, "silent" if ask.peer == dead else "absent", now)
        assert all(ask.number % 4 == 1 for ask in all_of(one.next_read, now))
        now += 0.5


def asked_of_second_peer() -> tuple[ChunkSchedule, ChunkTransfer, ChunkTransfer]:
    """A chunk that takes long is on its way from one peer and then from another one as well."""
    one = schedule(2, nodes=["a", "b", "c"], place=2)
    for peer in others(one):
        one.record_peer_chunks(peer, 0b11, 0.0)
    first, second = all_of(one.next_fetch, 0.0)
    assert {first.number, second.number} == {0, 1}
    one.mark_received(first, 0.1)
    assert one.next_fetch(0.1) is None
    again = one.next_fetch(1.0)
    assert again is not None
    assert again.number == second.number
    assert again.peer != second.peer
    assert one.is_transferred_twice(again)
    assert one.is_transferred_twice(second)
    assert one.next_fetch(1.0) is None, "not a third time"
    return one, second, again


def test_schedule_requests_a_slow_chunk_from_a_second_peer_and_takes_the_first_result() -> None:
    one, second, again = asked_of_second_peer()
    one.mark_received(again, 1.1)
    assert one.is_obsolete(second)
    one.mark_failed(second, "slow", 1.1)
    assert one.is_done


def test_schedule_does_not_repeat_one_of_two_requests_for_a_chunk_that_failed() -> None:
    one, second, again = asked_of_second_peer()
    one.mark_failed(second, "silent", 1.0)
    assert one.next_fetch(1.0) is None
    one.mark_failed(again, "silent", 1.0)
    assert one.next_fetch(1.0) is None, "both are out"
    assert one.next_read(1.0) is not None


@pytest.mark.parametrize("reading", [0.1, 0.6])
def test_schedules_read_an_overdue_chunk_only_on_the_first_stand_in(
    reading: float,
) -> None:
    """Unless reading takes as long as that for whoever reads: then it would be read twice."""
    readers = []
    for place in range(1, 4):
        one = schedule(1, place=place)
        one.next_read(0.0)
        one.record_peer_chunks(one.ring.nodes[0], 0b1, 0.0)
        (ask,) = all_of(one.next_fetch, 0.0)
        one._usual.add(0.2)
        one._usual_read.add(reading)
        one._last_came = 1.5
        readers += [one.me] * (one.next_read(1.5) is not None)
        assert ask.peer == one.ring.nodes[0]
    assert readers == ([one.ring.list_reader_and_stand_ins(0)[1]] if reading == 0.1 else [])


def test_schedules_replace_a_hanging_reader_of_the_last_chunk_by_one_node() -> None:
    """Each ask of it is answered in time: "not yet"."""
    begun: dict[str, float] = {}
    for place in range(1, 8):
        one = schedule(8, nodes=[f"n{number}" for number in range(8)], place=place)
        settle(one)
        first = one.ring.nodes[0]
        for ask in all_of(one.next_read, 0.0):
            one.mark_received(ask, 0.5)
        for peer in others(one):
            one.record_peer_chunks(peer, everything(8) & ~1 if peer != first else 0, 0.5)
        while one.missing != 1:
            all_of(one.next_fetch, 0.6)
            for ask in [ask for ask in one.transfers if ask.number]:
                one.mark_received(ask, 0.6)
        for tick in range(7, 45):
            now = tick / 10
            for ask in list(one.transfers):
                if ask.peer and now - one.transfers[ask] >= one.policy.wait:
                    one.record_peer_chunks(
                        ask.peer, 0 if ask.peer == first else everything(8) & ~1, now
                    )
                    one.mark_failed(ask, "absent", now)
            one.next_fetch(now)
            if one.next_read(now):
                begun.setdefault(one.me, now)
    first_of_all, second = sorted(begun.values())[:2]
    assert second > first_of_all + 0.5


def test_schedules_without_answers_read_a_different_chunk_on_each_node() -> None:
    picks = []
    for place in range(4):
        one = schedule(40, place=place)
        settle(one)
        for ask in iter(lambda: one.next_read(0.5), None):  # noqa: B023
            one.mark_received(ask, 0.5)
        for now in (1.0, 2.0, 2.4):
            assert one.next_read(now) is None
        found = all_of(one.next_read, 3.0)
        assert len(found) == 1, "one at first: it may be a short pause"
        picks.append(found[0].number)
        one.mark_received(found[0], 3.1)
        assert len(all_of(one.next_read, 3.1)) == 2
    assert len(set(picks)) == 4


def test_schedule_reads_all_chunks_at_once_if_all_peers_are_unreachable() -> None:
    one = ChunkSchedule("key", NODES, "n0", range(40), MB)
    now = 0.0
    while not one.is_done:
        while (peer := one.next_first_connection(now)) is not None:
            one.mark_connect_failed(peer, "refused", now)
        assert one.next_fetch(now) is None
        for ask in all_of(one.next_read, now):
            one.mark_received(ask, now)
        now += 0.1
    assert now == 0.1, "once round"


def many(count: int, answer: bool = True) -> ChunkSchedule:
    nodes = [f"n{number}" for number in range(count)]
    one = ChunkSchedule("key", nodes, "n0", range(256), MB)
    if answer:
        greet(one)
    return one


def fail_as_far_as(one: ChunkSchedule, count: int, now: float) -> list[str]:
    """So many peers are refused, of those that are connected to; who they are."""
    names: list[str] = []
    while len(names) < count and (peer := one.next_first_connection(now)) is not None:
        one.mark_connect_failed(peer, "refused", now)
        names.append(peer)
    return names


@pytest.mark.parametrize(("refused", "alone"), [(7, False), (8, True)])
def test_schedule_treats_eight_unreachable_peers_of_64_as_all_unreachable(
    refused: int, alone: bool
) -> None:
    one = many(64, answer=False)
    assert len(fail_as_far_as(one, refused, 0.5)) == refused
    read = {ask.number % 64 for ask in all_of(one.next_read, 0.5)}
    assert (len(read) == 64) == alone


@pytest.mark.parametrize("whys", [["absent"], ["refused", "absent"]])
def test_schedule_reads_only_its_share_during_the_grace_of_a_running_service(
    whys: list[FailureReason],
) -> None:
    one = schedule(nodes=["a", "b"])
    now = 0.0
    for why in whys:
        while (ask := one.next_fetch(now)) is None:
            now += 0.05
        one.mark_failed(ask, why, now)
    one._begun = now
    read = all_of(one.next_read, now + one.policy.grace - 0.1)
    assert {ask.number % 2 for ask in read} == {one.ring.index_by_node[one.me]}


def test_schedule_stops_reading_other_shares_at_the_first_answer_of_a_peer() -> None:
    one = many(64, answer=False)
    out = {one.me, *fail_as_far_as(one, 8, 0.5)}
    while True:  # until there is nothing left to read in the stead of these
        ask = one.next_read(0.5)
        assert ask is not None
        if one.ring.nodes[ask.number % 64] not in out:
            break
    one.record_peer_chunks(next(peer for peer in others(one) if peer not in out), 0, 0.6)
    for now in (0.6, 0.5 + one.policy.grace + 0.1):
        assert one.next_read(now) is None


def test_schedule_reads_invalidated_chunks_from_the_source_instead_of_fetching() -> None:
    """Others may have it from the same one."""
    one = schedule()
    settle(one)
    for peer in others(one):
        one.record_peer_chunks(peer, everything(12), 5.0)
    given = all_of(one.next_fetch, 5.0)
    for ask in given:
        one.mark_received(ask, 5.1)
    struck = {ask.number for ask in given[:2]}
    one.mark_missing(struck)
    fetched = {ask.number for ask in all_of(one.next_fetch, 5.2)}
    assert fetched
    assert not fetched & struck
    assert {ask.number for ask in all_of(one.next_read, 5.2)} >= struck
    one.mark_missing(struck)
    assert not one.is_done


def test_schedule_reads_an_invalidated_chunk_at_once_without_answers_of_peers() -> None:
    one = schedule()
    one.record_peer_chunks(others(one)[0], everything(12), 0.0)
    ask = one.next_fetch(0.0)
    assert ask is not None
    one.mark_missing([ask.number])
    one.mark_failed(ask, "wrong", 0.0)
    assert one.next_read(0.0) == ChunkTransfer(ask.number, SOURCE)


def test_schedule_fetches_an_invalidated_chunk_from_peers_if_the_source_failed() -> None:
    one = schedule()
    settle(one)
    one.source_failed = True
    for peer in others(one):
        one.record_peer_chunks(peer, everything(12), 5.0)
    one.mark_missing([5])
    assert 5 in {ask.number for ask in all_of(one.next_fetch, 5.2)}


def test_schedule_reads_the_shares_of_peers_with_a_failed_source_at_once() -> None:
    """All but this one: what they should have read is not waited for, and each gets some of it."""
    one = schedule()
    settle(one)
    for ask in all_of(one.next_read, 0.1):
        one.mark_received(ask, 0.2)
    for ask in all_of(one.next_read, 0.2):
        one.mark_received(ask, 0.3)
    for peer in others(one):
        one.record_peer_chunks(peer, 0b1_0001_0001, 1.1, source_failed=True)
    read = {ask.number for ask in all_of(one.next_read, 1.2)}
    assert read == {1, 2, 3, 5, 6, 7, 9, 10, 11}
    assert not all_of(one.next_fetch, 1.2)


def test_schedule_waits_again_for_a_peer_after_its_source_recovered() -> None:
    one = schedule()
    settle(one)
    for source_failed in (True, False):
        for peer in others(one):
            one.record_peer_chunks(peer, 0, 1.0, source_failed)
    assert {ask.number % 4 for ask in all_of(one.next_read, 1.2)} == {0}


def test_schedule_fetches_its_own_share_from_peers_if_its_source_failed() -> None:
    one = schedule()
    settle(one)
    ask = one.next_read(0.1)
    assert ask is not None
    one.mark_failed(ask, "source", 0.2)
    assert one.next_read(9.0) is None
    for peer in others(one):
        one.record_peer_chunks(peer, everything(12), 9.0)
    while not one.is_done:
        for ask in all_of(one.next_fetch, 9.0):
            one.mark_received(ask, 9.1)


def test_schedule_is_hopeless_after_a_time_without_source_and_peers() -> None:
    one = schedule()
    ask = one.next_read(0.0) or one.next_read(one.policy.probe + 0.1)
    assert ask is not None
    assert not one.is_hopeless(1e6), "the source may be slow"
    one.mark_failed(ask, "source", 0.7)
    assert not one.is_hopeless(5.0)
    assert one.is_hopeless(one.policy.max_transfer_time)


@given(st.integers(1, 5), st.sets(st.integers(0, 40), min_size=1), st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_schedule_completes_all_chunks_despite_random_failures_of_peers(
    count: int, missing: set[int], seed: int
) -> None:
    """Peers do anything at any time; no chunk is lost, none is asked of one that is out."""
    nodes = [f"n{number}" for number in range(count)]
    one = greeted("key", nodes, "n0", missing, MB)
    chance = random.Random(seed)
    out: set[str] = set()
    came: set[int] = set()
    running: list[tuple[float, int, ChunkTransfer]] = []
    now, turn = 0.0, 0
    while not one.is_done:
        for choose, most in ((one.next_fetch, 8), (one.next_read, 4)):
            mine = sum((ask.peer == SOURCE) == (most == 4) for _, _, ask in running)
            while mine < most and (ask := choose(now)) is not None:
                assert ask.peer not in out
                assert ask.number in missing
                assert ask.number not in came
                mine, turn = mine + 1, turn + 1
                heapq.heappush(
                    running, (now + chance.random() * one.transfer_timeout(ask), turn, ask)
                )
        if not running or chance.random() < 0.2:
            now += 0.1
            continue
        now, _, ask = heapq.heappop(running)
        now = max(now, 0.0)
        if ask.peer == SOURCE or chance.random() < 0.5:
            if ask.peer:
                one.record_peer_chunks(ask.peer, chance.getrandbits(41), now)
            came.add(ask.number)
            one.mark_received(ask, now)
        else:
            whys: list[FailureReason] = ["absent", "refused", "silent", "wrong", "slow"]
            why = chance.choice(whys)
            out |= {ask.peer} if why == "wrong" else set()
            one.mark_failed(ask, why, now)
        assert now < 3600
    assert came == missing


def alone(count: int = 12) -> ChunkSchedule:
    """A job of one node; x is of another one."""
    return greeted("key", ["me"], "me", range(count), 16 * MB, givers=("x",))


def test_schedule_of_a_one_node_job_fetches_all_chunks_from_another_jobs_node() -> None:
    one = alone()
    (ask,) = all_of(one.next_fetch, 0.0)
    assert (ask.peer, one.peer_wait(ask)) == ("x", 0.0)
    early = all_of(one.next_read, 0.0)
    assert len(early) == one.policy.max_probe_reads
    one.record_peer_chunks("x", everything(12), 0.1)
    for read in early:
        assert one.is_superfluous_read(read, 0.1)
        one.drop_early_read(read)
    one.mark_received(ask, 0.1)
    assert one.next_read(0.1) is None
    assert {ask.peer for ask in all_of(one.next_fetch, 0.1)} == {"x"}


@pytest.mark.parametrize("why", ["absent", "refused", "wrong"])
def test_schedule_soon_reads_the_source_if_another_jobs_node_has_no_copy(
    why: FailureReason,
) -> None:
    one = alone()
    (ask,) = all_of(one.next_fetch, 0.0)
    one.mark_failed(ask, why, 0.1)
    assert one.next_read(0.6) is not None


def test_schedule_reads_the_source_while_another_jobs_node_stalls() -> None:
    one = alone(40)
    for ask in all_of(one.next_fetch, 0.0):
        one.record_peer_chunks(ask.peer, everything(40), 0.1)
    all_of(one.next_fetch, 0.1)
    assert one.next_read(2.0) is None
    read = one.next_read(2.2)
    assert read is not None
    assert read.peer == SOURCE
    given = next(ask for ask in one.transfers if ask.peer == "x")
    one.mark_received(given, 2.3)
    assert one.next_read(4.2) is None, "it gives again"


def test_schedule_fetches_the_own_share_from_another_jobs_node() -> None:
    one = greeted("key", NODES, NODES[0], range(24), MB, givers=("x",))
    settle(one)
    one.record_peer_chunks("x", everything(24), 1.2)
    asked = [ask.number for ask in all_of(one.next_fetch, 1.2) if ask.peer == "x"]
    share = {number for number in range(24) if one.ring.find_reader(number) == one.me}
    assert len(set(asked) - share) <= 1
    assert set(asked) & share
    assert one.next_read(1.2) is None


def test_schedule_with_an_excluded_node_of_another_job_reads_only_stand_in_chunks() -> None:
    one = greeted("key", NODES, NODES[0], range(24), MB, givers=("x",))
    settle(one)
    for out in ("x", others(one)[0], "of a third job"):
        one.exclude_peer(out)
    numbers = [ask.number for ask in all_of(one.next_read, 5.0)]
    assert all(one.me in one.ring.list_reader_and_stand_ins(number) for number in numbers)


def following(count: int = 12) -> ChunkSchedule:
    """A copy ahead of a job, which x began before."""
    return greeted("key", ["me"], "me", range(count), MB, givers=("x",), leaders=("x",))


def test_speculative_schedule_reads_nothing_while_its_leader_progresses() -> None:
    one = following()
    for has in range(12):
        one.record_peer_chunks("x", everything(has), has)
        assert one.next_read(has + 0.9) is None
    one.record_peer_chunks("x", everything(12), 12.0)
    for _ in range(3):
        for ask in all_of(one.next_fetch, 12.0):
            assert ask.peer == "x"
            one.mark_received(ask, 12.0)
    assert one.is_done


def test_speculative_schedule_reads_after_the_grace_if_its_leader_has_no_copy() -> None:
    one = following()
    now = 0.0
    while now < one.policy.grace:
        for ask in all_of(one.next_fetch, now):
            one.mark_failed(ask, "absent", now)
        assert one.next_read(now) is None
        now += 0.1
    assert one.next_read(now) is not None


def test_speculative_schedule_queries_its_leader_at_least_each_second() -> None:
    one = following()
    heard = []
    for tenth in range(100):
        for ask in all_of(one.next_fetch, tenth / 10):
            one.mark_failed(ask, "absent", tenth / 10)
            heard.append(tenth / 10)
    assert max(after - before for before, after in itertools.pairwise(heard)) < 1.0


@pytest.mark.parametrize("how", ["stands still", "source", "refused", "wrong"])
def test_speculative_schedule_reads_if_its_leader_stalls_or_fails(how: str) -> None:
    one = following()
    one.record_peer_chunks("x", 0b111, 0.0, source_failed=how == "source")
    for ask in all_of(one.next_fetch, 0.0):
        if how in ("refused", "wrong"):
            one.mark_failed(ask, how, 3.5)  # type: ignore[arg-type]
        else:
            one.mark_received(ask, 0.5)
    patience = one.policy.follow_factor * (one.policy.patience + MB / one.policy.min_peer_rate)
    if how == "stands still":
        one.record_peer_chunks("x", 0b111, patience - 0.1)
        assert one.next_read(patience - 0.1) is None
    assert one.next_read(patience + 0.1 if how == "stands still" else 3.6) is not None
    one.record_peer_chunks("x", 0b1111111, patience + 40)
    assert (one.next_read(patience + 40) is None) == (how != "wrong"), "it gets on again"


def test_schedule_of_a_jobs_copy_reads_beside_an_earlier_speculative_copy() -> None:
    one = greeted("key", ["me"], "me", range(12), MB, givers=("x",))
    one.record_peer_chunks("x", 0b11, 0.6)
    assert [ask.number for ask in all_of(one.next_read, 0.6)] == [11, 2]


def sharing(me: str) -> ChunkSchedule:
    """A copy ahead of a job on one of two nodes, which read it together."""
    other = {"a": "b", "b": "a"}[me]
    return greeted("key", ["a", "b"], me, range(12), MB, givers=(other,))


def test_speculative_schedules_of_two_nodes_each_read_a_share_and_fetch_the_rest() -> None:
    both = {me: sharing(me) for me in ("a", "b")}
    read: dict[str, list[int]] = {"a": [], "b": []}
    has = {"a": 0, "b": 0}
    now = 0.0
    while not all(one.is_done for one in both.values()):
        now += 0.1
        for me, one in both.items():
            other = "b" if me == "a" else "a"
            for ask in all_of(one.next_fetch, now):
                one.record_peer_chunks(other, has[other], now)
                if has[other] >> ask.number & 1:
                    one.mark_received(ask, now)
                else:
                    one.mark_failed(ask, "absent", now)
            for ask in all_of(one.next_read, now):
                read[me].append(ask.number)
                has[me] |= 1 << ask.number
                one.mark_received(ask, now)
        assert now < 60
    assert sorted(read["a"] + read["b"]) == list(range(12)), "each chunk is read once"
    assert {len(its) for its in read.values()} == {6}


def test_speculative_schedule_limits_its_requests_to_the_node_that_shares_the_reading() -> None:
    """It says at once that it has not read a chunk yet."""
    one = sharing("a")
    asks = 0
    for tenth in range(100):
        for ask in all_of(one.next_fetch, tenth / 10):
            one.record_peer_chunks("b", 0, tenth / 10)
            one.mark_failed(ask, "absent", tenth / 10)
            asks += 1
    assert asks <= 25


def test_speculative_schedule_reads_the_share_of_a_node_that_is_gone() -> None:
    one = sharing("a")
    now = 0.0
    while not one.is_done:
        now += 0.1
        for ask in all_of(one.next_fetch, now):
            one.mark_failed(ask, "refused", now)
        for ask in all_of(one.next_read, now):
            one.mark_received(ask, now)
        assert now < 60
