"""The host's list is short whatever users submit; a node takes what is for its partitions."""

from __future__ import annotations

from forestage.features.prefetch import (
    expected_list,
    policy,
    prefetch_host,
    prefetch_node,
    queue_lines,
)
from forestage.features.prefetch.expected_list import ExpectedImageList
from forestage.features.prefetch.policy import ExpectedStarts, PendingJob
from forestage.features.prefetch.prefetch_record import ImageInspection

NODES = {"gpu": 100}


def test_prefetch_list_limits_the_rows_of_a_user_with_10000_jobs() -> None:
    many = [PendingJob(7, (f"/{number}",), 100, ("gpu",)) for number in range(10_000)]
    rows = prefetch_host.limit_rows(
        policy.compute_expected_starts([*many, PendingJob(8, ("/b",), 100, ("gpu",))], NODES)
    )
    assert sum(row.user == 7 for row in rows) <= prefetch_host.MAX_ROWS_OF_USER
    (theirs,) = [row for row in rows if row.user == 8]
    assert theirs.starts >= policy.DEFAULT_RULES.least
    crowd = [ExpectedStarts("gpu", f"/{number}", 7, 9.0) for number in range(10_000)]
    rows = prefetch_host.limit_rows([*crowd, ExpectedStarts("gpu", "/b", 8, 0.5)])
    assert len(rows) == prefetch_host.MAX_ROWS_OF_USER + 1
    assert rows[-1].user == 8


def test_prefetch_list_has_a_row_limit_and_drops_rows_below_the_least() -> None:
    rows = [ExpectedStarts("gpu", "/a", user, 1.0) for user in range(10_000)]
    assert len(prefetch_host.limit_rows(rows)) == expected_list.MAX_ROWS
    assert (
        prefetch_host.limit_rows([ExpectedStarts("gpu", "/a", 7, prefetch_host.MIN_STARTS / 2)])
        == ()
    )


def test_prefetch_list_names_only_partitions_with_a_row() -> None:
    rows = (ExpectedStarts("gpu", "/a", 7, 1.0),)
    assert prefetch_host.select_partitions(rows, {"cpu": "c1", "gpu": "n[1-9]"}) == {
        "gpu": "n[1-9]"
    }


def test_prefetch_host_output_counts_ignored_jobs_by_reason() -> None:
    others = queue_lines.PendingJobQueue(others=(("JobHeldUser", 3),)).others
    done = prefetch_host.PrefetchHostPass(0, others, ExpectedImageList(1, 0.0, 1.0), False, 0.1)
    text = repr(list(prefetch_host.format_output(done)))
    assert "3 JobHeldUser" in text
    assert "would be told" in text


def test_node_selects_the_rows_of_its_partitions_with_the_most_expected_user_first() -> None:
    rows = (
        ExpectedStarts("gpu", "/a", 7, 0.5),
        ExpectedStarts("all", "/a", 8, 0.7),
        ExpectedStarts("all", "/a", 7, 0.5),
        ExpectedStarts("cpu", "/c", 7, 9.0),
    )
    listed = ExpectedImageList(
        1, 0.0, 1.0, {"gpu": "n[1-2]", "all": "n[1-9]", "cpu": "c[1-9"}, rows
    )
    assert prefetch_node.select_wanted_images(listed, "n2") == {"/a": [(7, 1.0), (8, 0.7)]}
    assert prefetch_node.select_wanted_images(listed, "n10") == {}


def test_repeated_refusal_counts_tries_and_keeps_the_expected_since_time() -> None:
    once = prefetch_node.with_refusal(ImageInspection("/a", 7, 4.0, 4.0, "k", 5), 5.0, "missing\n")
    assert once == ImageInspection("/a", 7, 5.0, 4.0, why="missing\\n", tries=1)
    assert prefetch_node.with_refusal(once, 6.0, "") == ImageInspection(
        "/a", 7, 6.0, 4.0, why="refused", tries=2
    )
