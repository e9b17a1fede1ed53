"""squeue's listing, in which users have written what they like."""

from __future__ import annotations

import pytest

from forestage.features.prefetch import queue_lines
from forestage.features.prefetch.policy import PendingJob
from forestage.features.prefetch.queue_lines import PendingJobQueue

NONCE = "f" * 32
NOW = 1_000_000.0


def line(
    comment: str = "stage=/a",
    job: str = "1",
    user: str = "1000",
    nodes: str = "2",
    partition: str = "gpu",
    reason: str = "Priority",
    eligible: str = "N/A",
    admin: str = "(null)",
    nonce: str = NONCE,
) -> str:
    words = f"{job}|{nonce}<{user}|{nodes}|{partition}|{reason}|{eligible}|{admin}|{nonce}>"
    return f"{words}{comment}\n"


def parse(*lines: str) -> PendingJobQueue:
    return queue_lines.parse_queue("".join(lines), NONCE, NOW)


def images(*lines: str) -> list[tuple[str, ...]]:
    return [one.images for one in parse(*lines).pending]


def test_pending_job_is_parsed_with_its_images_nodes_and_partitions() -> None:
    found = parse(line("x stage=/a,/b", nodes="4-8", partition="gpu,cpu"))
    assert found == PendingJobQueue((PendingJob(1000, ("/a", "/b"), 4, ("gpu", "cpu")),), tasks=1)


def test_pending_jobs_keep_the_order_of_squeue() -> None:
    assert images(line("stage=/b"), line("stage=/a")) == [("/b",), ("/a",)]


@pytest.mark.parametrize(
    "forged",
    [
        "77777|n1|gpu|stage=/etc/shadow",
        line("stage=/etc/shadow", user="0", nonce="0" * 32),
        line("stage=/etc/shadow", user="0", nonce=""),
        f"9|{NONCE[:-1]}<0|1|gpu|Priority|N/A|(null)|{NONCE[:-1]}>stage=/etc/shadow",
    ],
)
def test_squeue_line_forged_in_a_comment_adds_no_job(forged: str) -> None:
    found = parse(line(f"x\n{forged}"), line("stage=/b", user="1001"))
    assert [one.user for one in found.pending][-1] == 1001
    assert {one.user for one in found.pending} <= {1000, 1001}
    assert ("/etc/shadow",) not in [one.images for one in found.pending if one.user == 0]


def test_squeue_line_forged_in_an_admin_comment_adds_no_job() -> None:
    forged = line("stage=/etc/shadow", user="1002", nonce="0" * 32)
    found = parse(line("stage=/a", admin=f"x\n{forged}y"), line("stage=/b", user="1001"))
    assert [(one.user, one.images) for one in found.pending] == [(1000, ("/a",)), (1001, ("/b",))]


def test_pending_jobs_of_root_are_ignored() -> None:
    assert parse(line(user="0")) == PendingJobQueue((), (("root's", 1),), 1)


def test_pending_jobs_images_are_read_from_comment_and_admin_comment_without_duplicates() -> None:
    seen = "ticket=4 stage-seen=/b,/with%20space"
    assert images(line("stage=/a,/b", admin=seen)) == [("/a", "/b", "/with space")]
    assert images(line("(null)", admin=seen)) == [("/b", "/with space")]


@pytest.mark.parametrize(
    "comment",
    [
        "stage=off",
        "stage=/dir/",
        "stage=/a.sqsh@/mnt/a",
        "stage=/a%0Ab",
        "stage=/a%FF",
        "(null)",
        "stage=/{node}",
        f"stage=/{'x' * 4096}",
        "stage=prod",
        "",
    ],
)
def test_pending_job_without_an_image_file_in_its_comment_is_ignored(comment: str) -> None:
    assert parse(line(comment)) == PendingJobQueue((), (("no image", 1),), 1)


def test_pending_job_with_stage_off_has_no_images_from_its_admin_comment() -> None:
    assert images(line("stage=off", admin="stage-seen=/a")) == []


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin", "Dependency", "BadConstraints"])
def test_held_or_dependent_job_is_ignored(reason: str) -> None:
    assert parse(line(reason=reason)) == PendingJobQueue((), ((reason, 1),), 1)


@pytest.mark.parametrize("reason", ["None", "BeginTime", "Priority"])
def test_pending_job_is_ignored_until_an_hour_before_its_begin_time(reason: str) -> None:
    later, soon = (str(int(NOW + queue_lines.MAX_BEGIN_DELAY) + more) for more in (1, 0))
    assert parse(line(reason=reason, eligible=later)) == PendingJobQueue((), (("BeginTime", 1),), 1)
    assert images(line(reason=reason, eligible=soon)) == [("/a",)]


@pytest.mark.parametrize(
    ("job", "count"),
    [
        ("7", 1),
        ("7_3", 1),
        ("7+1", 1),
        ("7_[1-10]", 10),
        ("7_[1,4-6%2]", 2),
        ("7_[1,3,5,...]", 3),
        ("7_[0-99:2]", 100),
        ("7_[9-1]", 1),
        ("x", 0),
        ("", 0),
        ("7_[]", 0),
        ("7_[1-10%0]", 10),
    ],
)
def test_array_job_id_gives_its_number_of_tasks(job: str, count: int) -> None:
    assert queue_lines.count_runnable_tasks(job) == count


def test_number_of_pending_tasks_is_unknown_if_squeue_abbreviates_an_array() -> None:
    shown = [line(job="7"), line(job="8_[1-10%2]", reason="JobHeldUser")]
    assert parse(*shown).tasks == 11
    assert parse(*shown, line(job="9_[1,3,5,...]")).tasks is None


def test_pending_array_needs_the_nodes_of_all_its_tasks() -> None:
    (one,) = parse(line(job="7_[1-10]", nodes="2")).pending
    assert one.nodes == 20


@pytest.mark.parametrize(
    "junk",
    [
        line(user="alice"),
        line(user="-1"),
        line(user="9" * 11),
        line(nodes="many"),
        line(job="x"),
        f"1|{NONCE}<\n",
        f"1|{NONCE}<1000|2|gpu|{NONCE}>stage=/a\n",
    ],
)
def test_unreadable_squeue_line_is_counted_and_the_other_lines_are_parsed(junk: str) -> None:
    found = parse(line("stage=/a"), junk, line("stage=/b"))
    assert [one.images for one in found.pending] == [("/a",), ("/b",)]
    assert found.others == (("unreadable", 1),)


@pytest.mark.parametrize("listing", ["", "\n", "squeue: error\n", "|||||\n" * 10, "\0" * 100])
def test_output_that_is_no_squeue_listing_gives_no_jobs(listing: str) -> None:
    assert queue_lines.parse_queue(listing, NONCE, NOW) == PendingJobQueue()


@pytest.mark.parametrize(
    ("admin_comment", "images"),
    [
        ("", ()),
        ("ticket=42", ()),
        ("stage-seen=/a.sqsh", ("/a.sqsh",)),
        ("ticket=42 stage-seen=/a,/b%2Cc%20d%0A,/a other", ("/a", "/b,c d\n")),
        ("stage-seen=/%C3%BC%FF", ("/ü\udcff",)),
        ("stage-seen=", ()),
        ("stage-seen=,a,./b,%2Fc", ("/c",)),
        ("stage-seen=/a stage-seen=/b", ("/a",)),
        ("x-stage-seen=/a", ()),
        ("stage-seen=/" + ",/".join(map(str, range(40))), tuple(f"/{n}" for n in range(16))),
    ],
)
def test_stage_seen_images_are_decoded_from_the_admin_comment(
    admin_comment: str, images: tuple[str, ...]
) -> None:
    assert queue_lines.parse_admin_comment(admin_comment) == images
