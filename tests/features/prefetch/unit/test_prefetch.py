"""The host's list is short whatever users submit; a node takes what is for its partitions."""

from __future__ import annotations

from forestage.features.prefetch import expected, policy, prefetch_host, prefetch_node, queue
from forestage.features.prefetch.expected import ExpectedImageList
from forestage.features.prefetch.marks import ImageInspection
from forestage.features.prefetch.policy import ExpectedStarts, PendingJob

NODES = {"gpu": 100}


def test_ten_thousand_jobs_of_one_user_leave_room_for_the_others() -> None:
    many = [PendingJob(7, (f"/{number}",), 100, ("gpu",)) for number in range(10_000)]
    rows = prefetch_host.few(policy.likely([*many, PendingJob(8, ("/b",), 100, ("gpu",))], NODES))
    assert sum(row.user == 7 for row in rows) <= prefetch_host.OF_USER
    (theirs,) = [row for row in rows if row.user == 8]
    assert theirs.starts >= policy.RULES.least
    crowd = [ExpectedStarts("gpu", f"/{number}", 7, 9.0) for number in range(10_000)]
    rows = prefetch_host.few([*crowd, ExpectedStarts("gpu", "/b", 8, 0.5)])
    assert len(rows) == prefetch_host.OF_USER + 1
    assert rows[-1].user == 8


def test_list_has_an_end_and_no_start_that_is_not_worth_it() -> None:
    rows = [ExpectedStarts("gpu", "/a", user, 1.0) for user in range(10_000)]
    assert len(prefetch_host.few(rows)) == expected.ROWS
    assert prefetch_host.few([ExpectedStarts("gpu", "/a", 7, prefetch_host.LEAST / 2)]) == ()


def test_only_partitions_with_a_row_are_told() -> None:
    rows = (ExpectedStarts("gpu", "/a", 7, 1.0),)
    assert prefetch_host.named(rows, {"cpu": "c1", "gpu": "n[1-9]"}) == {"gpu": "n[1-9]"}


def test_jobs_that_do_not_count_are_said_with_their_reason() -> None:
    others = queue.PendingJobQueue(others=(("JobHeldUser", 3),)).others
    done = prefetch_host.PrefetchHostPass(0, others, ExpectedImageList(1, 0.0, 1.0), False, 0.1)
    text = repr(list(prefetch_host.pieces(done)))
    assert "3 JobHeldUser" in text
    assert "would be told" in text


def test_node_takes_the_rows_of_its_partitions_users_most_expected_first() -> None:
    rows = (
        ExpectedStarts("gpu", "/a", 7, 0.5),
        ExpectedStarts("all", "/a", 8, 0.7),
        ExpectedStarts("all", "/a", 7, 0.5),
        ExpectedStarts("cpu", "/c", 7, 9.0),
    )
    listed = ExpectedImageList(
        1, 0.0, 1.0, {"gpu": "n[1-2]", "all": "n[1-9]", "cpu": "c[1-9"}, rows
    )
    assert prefetch_node.wanted_here(listed, "n2") == {"/a": [(7, 1.0), (8, 0.7)]}
    assert prefetch_node.wanted_here(listed, "n10") == {}


def test_refusals_are_counted_and_keep_since_when_the_image_is_expected() -> None:
    once = prefetch_node.refused(ImageInspection("/a", 7, 4.0, 4.0, "k", 5), 5.0, "missing\n")
    assert once == ImageInspection("/a", 7, 5.0, 4.0, why="missing\\n", tries=1)
    assert prefetch_node.refused(once, 6.0, "") == ImageInspection(
        "/a", 7, 6.0, 4.0, why="refused", tries=2
    )
