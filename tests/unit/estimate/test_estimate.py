"""forestage-estimate: rows that nobody can trust, caches, and shares of what is known."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from forestage_estimate import accounting, cache_replay, html_report, savings, text_report
from forestage_estimate.accounting import FIELD_SEPARATOR, MAX_JOB_IMAGES, ImageStart, JobRecords
from forestage_estimate.cache_replay import ImageFile, LruCache
from hypothesis import given
from hypothesis import strategies as st

AT = 1_790_000_000
MIB = 1 << 20


def row(
    job: str,
    line: str = "",
    *,
    nodes: str = "n1",
    at: str = str(AT),
    comment: str = "",
    partition: str = "gpu",
    directory: str = "/home/alice",
) -> bytes:
    fields = (job, partition, at, nodes, comment, directory, line)
    return FIELD_SEPARATOR.join(fields).encode("utf-8", "surrogateescape") + b"\n"


def images(found: JobRecords) -> set[tuple[str, str, str]]:
    """(job, node, image) of each start."""
    jobs = found.jobs.values()
    starts = [(job.job_id, start) for job in jobs for start in job.starts]
    found = [(job, node, start.image) for job, start in starts for node in start.nodes]
    assert len(set(found)) == len(found)
    return set(found)


LINES = {
    "srun --container-image=/a.sqsh true": "/a.sqsh",
    "srun -n2 --container-image /a.sqsh true": "/a.sqsh",
    "sbatch --container-image=./a.sqsh job.sh": "/home/alice/a.sqsh",
    "sbatch --container-image=../../x/a.sqsh job.sh": "/x/a.sqsh",
    "srun --container-image=/b//./a.sqsh": "/b/a.sqsh",
    "srun --container-image=nvcr.io#nvidia/pytorch:24.01 true": "nvcr.io#nvidia/pytorch:24.01",
    "sbatch --wrap=srun --container-image=/a.sqsh true": "/a.sqsh",
    "srun --container-image=/a --container-image=/b": "/a",
    "srun x" + FIELD_SEPARATOR + "--container-image=/a": None,
    "srun --container-images=/a": None,
    "srun --container-image=": None,
    "sbatch job.sh": None,
    "": None,
}


@pytest.mark.parametrize("line", LINES)
def test_estimate_reads_the_image_from_a_steps_command_line(line: str) -> None:
    image = LINES[line]
    assert images(accounting.read_job_records([row("7", line)])) == (
        {("7", "n1", image)} if image else set()
    )


def test_estimate_counts_images_of_job_steps_and_submission_comment_once_each() -> None:
    noted = "ticket stage-seen=/a,/b%20c,d"
    found = accounting.read_job_records(
        [
            row("7", "sbatch --container-image=/a job.sh", nodes="n[1-2]", comment=noted),
            row("7.batch"),
            row("7.extern", "srun --container-image=/no"),
            row("7.0", "srun --container-image=/a true", nodes="n2"),
            row("7.1", "srun --container-image=/d true", nodes="n2", at=str(AT + 5)),
            row("7.2", "srun --container-image=/e true", nodes="n3"),  # none of the job's
        ]
    )
    nodes = [("7", node, image) for node in ("n1", "n2") for image in ("/a", "/b c")]
    assert images(found) == {*nodes, ("7", "n2", "/d")}
    assert found.jobs["7"].is_batch
    assert {start.start_time for start in found.jobs["7"].starts} == {AT, AT + 5}


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"\n",
        b"true; rm -rf /\n",
        b"x7" + row("7", "srun --container-image=/a"),
        FIELD_SEPARATOR.encode() * 3 + b"\n",
        row("7;8"),
        row("7.0.0"),
        row("9" * 30),
        row("７"),
        row("7", directory="/a\n").splitlines(keepends=True)[0],
        b"\xff\xfe" + row("7"),
    ],
)
def test_malformed_sacct_line_is_counted_as_dropped(hostile: bytes) -> None:
    found = accounting.read_job_records([hostile, row("1", "srun --container-image=/a")])
    assert (list(found.jobs), found.dropped_lines) == (["1"], 1)


@pytest.mark.parametrize("at", ["Unknown", "None", "", "0", "-1", "1e9", "9999-99-99T00:00:00"])
def test_estimate_leaves_out_a_job_that_has_not_started(at: str) -> None:
    found = accounting.read_job_records([row("7", "srun --container-image=/a", at=at)])
    assert (found.jobs, found.dropped_lines) == ({}, 0)


def test_start_time_is_read_in_the_default_format_of_sacct() -> None:
    (job,) = accounting.read_job_records([row("7", at="2026-11-24T12:00:00")]).jobs.values()
    assert (
        cache_replay._format_month(int(job.start_time // cache_replay.QUARTER_HOUR_S)) == "2026-11"
    )


def test_rest_of_a_sacct_command_line_after_a_newline_is_dropped() -> None:
    broken = row("7", "srun --container-image=/a sh -c 'true\ntrue --container-image=/b'")
    found = accounting.read_job_records(broken.splitlines(keepends=True))
    assert images(found) == {("7", "n1", "/a")}
    assert found.dropped_lines == 1


def test_second_sacct_row_of_the_same_job_is_dropped() -> None:
    found = accounting.read_job_records(
        [row("7", "srun true"), row("7", "srun --container-image=/a")]
    )
    assert (images(found), found.dropped_lines) == (set(), 1)


@pytest.mark.parametrize(
    ("written", "hosts"),
    [
        ("n1", ("n1",)),
        ("n[1-3,7],login", ("n1", "n2", "n3", "n7", "login")),
        ("n[08-10]", ("n08", "n09", "n10")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("None assigned", ()),
        ("", ()),
        ("n[1-", ()),
        ("n[3-1]", ()),
        ("n[1-999999999]", ()),
        ("n[1-9999][1-9999]", ()),
        ("n[1-15000],m[1-15000]", ()),
        ("../n1", ()),
    ],
)
def test_estimate_expands_a_node_list_up_to_a_bound(written: str, hosts: tuple[str, ...]) -> None:
    assert accounting.expand_hosts(written) == hosts


def test_estimate_counts_a_bounded_number_of_images_per_job() -> None:
    steps = [row(f"7.{number}", f"srun --container-image=/{number}") for number in range(999)]
    assert len(images(accounting.read_job_records([row("7"), *steps]))) == MAX_JOB_IMAGES


NAMES = st.sampled_from(["n1", "n[1-3]", "n[2-4]", "n4", "n[1-4]"])
IMAGES = st.sampled_from(["/a", "/b", "/c"])
STEPS = st.lists(st.tuples(st.sampled_from("12"), NAMES, IMAGES), max_size=12)


@given(st.tuples(NAMES, NAMES), STEPS)
def test_image_starts_on_a_node_at_the_time_of_its_first_row(
    jobs: tuple[str, str], steps: list[tuple[str, str, str]]
) -> None:
    """Also where rows of jobs are mixed, as they never are."""
    rows = [row(str(number), nodes=nodes) for number, nodes in enumerate(jobs, 1)]
    expected: dict[tuple[str, str, str], float] = {}
    for at, (job, nodes, image) in enumerate(steps, AT):
        rows.append(row(f"{job}.0", f"srun --container-image={image}", nodes=nodes, at=str(at)))
        for node in accounting.expand_hosts(nodes):
            if node in accounting.expand_hosts(jobs[int(job) - 1]):
                expected.setdefault((job, node, image), at)
    found = accounting.read_job_records(rows)
    assert images(found) == expected.keys()
    for number, counted in found.jobs.items():
        for start in counted.starts:
            assert {expected[number, node, start.image] for node in start.nodes} == {
                start.start_time
            }


@pytest.mark.parametrize("count", [10, 1000])
def test_image_of_a_job_is_one_start_and_its_node_list_is_not_searched(count: int) -> None:
    """However many nodes it has: its rows are read in the time that they are long."""

    class Nodes(tuple[str, ...]):
        __slots__ = ()

        def __contains__(self, node: object) -> bool:
            raise AssertionError("searched")

    names = accounting.expand_hosts(f"n[1-{count}]")
    job = accounting.AccountedJob("7", AT, "gpu", Nodes(names), is_batch=False, starts=[])
    uses = accounting._JobImageUses(job)
    for nodes in (names, names[1:]):
        uses.add_images(accounting._AccountingRow("7", "0", "gpu", AT, Nodes(nodes), ("/a",)))
    assert [len(start.nodes) for start in job.starts] == [count]


@given(st.lists(st.binary(max_size=80)))
def test_estimate_reads_any_bytes_without_an_error(lines: list[bytes]) -> None:
    accounting.read_job_records(lines)


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("#!/bin/sh\n#SBATCH --container-image=/a\ntrue", True),
        ("#!/bin/sh\nexport PYXIS_CONTAINER_IMAGE=/a\nsrun true", True),
        ("#!/bin/sh\n# PYXIS_CONTAINER_IMAGE=/a\n##SBATCH --container-image=/a", False),
        ("#!/bin/sh\nsrun --container-image=/a true", False),  # its step has a row
    ],
)
def test_batch_script_that_names_an_image_is_recognised(script: str, named: bool) -> None:
    assert accounting.has_unrecorded_image(script) == named


def test_simulated_cache_evicts_the_least_recently_used_image() -> None:
    cache = LruCache(10, {})
    hits = [cache.request((name, True), 4) for name in ("/a", "/b", "/a", "/c", "/a", "/b")]
    assert hits == [False, False, True, False, True, False]


ASKED = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=40)


@given(ASKED, st.lists(st.integers(0, 12), min_size=6, max_size=6), st.sets(st.integers(1, 40)))
def test_simulating_several_cache_sizes_together_gives_the_hits_of_each_alone(
    asked: list[tuple[str, bool]], bytes_: list[int], sizes: set[int]
) -> None:
    size_of = dict(zip("abcdef", bytes_, strict=True))
    alone = [LruCache(size, {}) for size in sorted(sizes)]
    together = cache_replay.NodeCaches(sorted(sizes))
    for key in asked:
        hits = [cache.request(key, size_of[key[0]]) for cache in alone]
        found = together.request(key, size_of[key[0]])
        assert [bool(found >> number & 1) for number in range(len(sizes))] == hits


@pytest.mark.parametrize("sizes", [10, 1000])
def test_simulated_caches_that_evict_nothing_share_their_state(
    sizes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = cache_replay.NodeCaches(range(100, 100 + sizes))
    monkeypatch.delattr(LruCache, "request")
    found = [caches.request((name, True), 40) for name in ("/a", "/b", "/a", "/a")]
    assert found == [0, 0, (1 << sizes) - 1, (1 << sizes) - 1]


def test_image_larger_than_the_simulated_cache_is_never_a_hit_and_evicts_none() -> None:
    cache = LruCache(10, {})
    asked = [("/a", 4), ("/big", 11), ("/big", 11), ("/a", 4)]
    assert [cache.request((name, True), size) for name, size in asked] == [
        False,
        False,
        False,
        True,
    ]


def test_new_version_of_an_image_is_a_miss_and_replaces_the_old_version() -> None:
    starts = [ImageStart(at, "gpu", ("n1",), "/a") for at in (10, 20, 30, 40)]
    (by_group,) = cache_replay.replay_starts(starts, {"/a": ImageFile(6, 25)}, [10])
    (sums,) = by_group.values()
    assert (sums.starts, sums.hits, sums.saved_bytes, sums.read_bytes) == (4, 2, 12, 12)


def test_replay_has_a_cache_per_node_and_a_sum_per_partition() -> None:
    where = [("x", "n1"), ("y", "n1"), ("x", "n2")]
    starts = [
        ImageStart(AT + n, partition, (node,), "/a") for n, (partition, node) in enumerate(where)
    ]
    (sums,) = cache_replay.replay_starts(starts, {"/a": ImageFile(6, 0)}, [10])
    assert [(name.split()[1], one.starts, one.hits) for name, one in sums.items()] == [
        ("x", 2, 0),
        ("y", 1, 1),
    ]


def book() -> JobRecords:
    """Six starts with a path, of which the fourth and the last two are repeats; two of unknown."""
    option = "srun --container-image="
    return accounting.read_job_records(
        [
            row("1", option + "/a", nodes="n[1-2]"),
            row("2", option + "/b"),
            row("3", option + "/a", at=str(AT + 1)),
            row("4", option + "/b", at=str(AT + 2), partition="cpu"),
            row("5", option + "/gone", at=str(AT + 3)),
            row("6", option + "ubuntu"),
            row("7", "sbatch job.sh"),
            row("7.batch"),
            row("8", "sbatch job.sh"),
            row("8.batch"),
        ]
    )


FILES = {"/a": ImageFile(MIB, 0), "/b": ImageFile(2 * MIB, 0)}


def test_estimate_reports_how_many_starts_and_sizes_are_known() -> None:
    found = savings.estimate_savings(book(), [FILES], savings.GIB, cold_seconds_per_gib=3600)
    assert (found.known, found.sized, found.registry, found.unknown) == (6, 5, 1, 2)
    assert (found.images, found.images_sized) == (3, 2)
    assert found.chosen.hits == savings.ValueRange(2, 2)
    assert (found.chosen.saved.low, found.chosen.read.low) == (3 * MIB, 4 * MIB)
    assert found.node_hours == savings.ValueRange(3 / 1024, 3 / 1024)
    assert [(one.partition, one.starts, one.hits.low) for one in found.groups] == [
        ("cpu", 1, 1),
        ("gpu", 4, 1),
    ]
    assert (found.unseen, found.most_unseen) == (None, 2 / 9)


def test_unseen_share_of_the_estimate_comes_from_a_sample() -> None:
    sample = savings.ScriptSample(scripts=2, nodes=2, with_image=1)
    found = savings.estimate_savings(book(), [FILES], savings.GIB, sample)
    assert found.unseen == pytest.approx(1 / 8)  # one of two, beside seven that are seen


def test_unseen_share_is_zero_without_unknown_starts() -> None:
    found = accounting.read_job_records([row("1", "srun --container-image=/a")])
    assert savings.estimate_savings(found, [FILES], savings.GIB).unseen == 0


def test_unknown_image_size_makes_the_estimate_a_range(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    here, gone = str(tmp_path / "a"), str(tmp_path / "gone")
    looks = savings.read_image_files([here, gone, "/nul\0"], (5, 50))
    assert [(look[here].size_bytes, look[gone].size_bytes) for look in looks] == [
        (100, 5),
        (100, 50),
    ]
    (look,) = savings.read_image_files([here, gone])
    assert set(look) == {here}
    starts = [row(str(n), f"srun --container-image={gone}") for n in range(3)]
    found = savings.estimate_savings(accounting.read_job_records(starts), looks, 60)
    assert (found.chosen.saved, found.sized) == (savings.ValueRange(10, 100), 3)


def test_estimates_text_and_page_state_the_shares_they_rest_on() -> None:
    found = savings.estimate_savings(book(), [FILES], savings.GIB)
    said = text_report.format_text(found)
    assert "6 (67%) name a path, of 3 images" in said
    assert "The size is known of 2 images. What follows is about 5 (83%)" in said
    assert "at most 22% are not seen" in said
    assert "node hours" not in said
    html = html_report.format_page(found)
    assert html.count("<svg") == 4
    assert text_report.format_savings(found).splitlines()[0] in html
    assert "<script" not in html
    json.dumps(asdict(found))


@pytest.mark.parametrize("partition", ["<b>", "a\x1b[2J", "a b"])
def test_row_with_an_invalid_partition_name_is_dropped(partition: str) -> None:
    assert accounting.read_job_records([row("1", partition=partition)]).jobs == {}
