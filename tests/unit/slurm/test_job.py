"""A job's requests and hints, read from Slurm's variables and from the user's comment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.errors import JobError
from forestage.slurm.hints import MAX_HINTED, MAX_PROBLEMS, Hints, Request, read_hints
from forestage.slurm.job import IMAGE_OPTION, SAVE_OPTION, Job
from forestage.system.as_user import User
from forestage.units import MAX_TEXT

ENVIRON = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_USER": "alice",
    "SLURM_JOB_UID": "1000",
    "SLURM_JOB_GID": "100",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_WORK_DIR": "/home/alice",
    "SLURMD_NODENAME": "n1",
}


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("", Hints()),
        # Words that only look like a hint.
        ("my favourite job, on stage", Hints()),
        ("stages=/a upstage=/a Stage=/a stage /a stage:/a stage- xstage-wait=1", Hints()),
        ("stage=/a", Hints(paths=("/a",))),
        ("x;stage=/a;y", Hints(paths=("/a",))),
        ("stage=/a,/b stage=/c\nstage=/a", Hints(paths=("/a", "/b", "/c"))),
        ("stage=,/a,,", Hints(paths=("/a",))),
        ("stage=/a%2Cb%20c", Hints(paths=("/a,b c",))),
        ("stage=/a=b", Hints(paths=("/a=b",))),
        ("stage=off", Hints(off=True)),
        ("stage=off stage=/a", Hints(off=True, paths=("/a",))),
        ("stage=/off,off", Hints(paths=("/off", "off"))),
        ("stage-wait=10m", Hints(wait=600.0)),
        ("stage-wait=10m stage-wait=1m", Hints(wait=60.0)),
    ],
)
def test_hints_are_read_out_of_free_text(comment: str, expected: Hints) -> None:
    assert read_hints(comment) == expected


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("stage=", "names no image"),
        ("stage-wait=", "stage-wait: expected a duration"),
        ("stage-wait=soon", "'soon'"),
        ("stage-wait=1e9", "'1e9'"),
        ("stage-=1", "unknown hint stage-="),
    ],
)
def test_wrong_hint_is_a_problem_and_spoils_no_other(comment: str, problem: str) -> None:
    hints = read_hints(f"{comment} stage=/a")
    assert hints.paths == ("/a",)
    assert hints.wait is None
    (found,) = hints.problems
    assert problem in found


def test_too_many_images_are_cut_and_reported() -> None:
    hints = read_hints("stage=" + ",".join(f"/{n}" for n in range(MAX_HINTED + 1)))
    assert hints.paths == tuple(f"/{n}" for n in range(MAX_HINTED))
    assert f"names {MAX_HINTED + 1} images" in hints.problems[0]


@pytest.mark.parametrize(
    ("comment", "number"),
    [
        (" ".join(f"stage-x{n}=1" for n in range(1000)), MAX_PROBLEMS),
        ("stage-" + "x" * 10_000 + "=1", 1),
        ("stage-\udcff=1", 1),
        ("stage-\x1b[2J=1", 1),
    ],
)
def test_problems_are_few_short_and_printable(comment: str, number: int) -> None:
    problems = read_hints(comment).problems
    assert len(problems) == number
    for problem in problems:
        assert problem.isprintable()
        assert len(problem.encode()) <= MAX_TEXT + len("…".encode())


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_any_path_can_be_written_percent_encoded(paths: list[str]) -> None:
    encoded = ",".join("".join(f"%{byte:02x}" for byte in path.encode()) for path in paths)
    expected = tuple(dict.fromkeys(paths))[:MAX_HINTED]
    assert read_hints(f"stage={encoded}").paths == expected


def test_job_is_read_from_slurmds_variables() -> None:
    environ = ENVIRON | {IMAGE_OPTION: "/a", SAVE_OPTION: "/b", "SLURM_JOB_COMMENT": "stage=/c,/a"}
    assert Job.from_environ(environ) == Job(
        id=42,
        user=User("alice", 1000, 100),
        node="n1",
        partition="gpu",
        work_dir="/home/alice",
        # The same path twice would be staged twice.
        requests=(Request("/a", "option"), Request("/c", "hint")),
        saves="/b",
        hints=Hints(paths=("/c", "/a")),
    )
    assert Job.from_environ(ENVIRON | {IMAGE_OPTION: ""}).requests == ()


@pytest.mark.parametrize("step", [0, 3, 0xFFFFFFFB])
def test_step_is_read_from_the_companions_variables(step: int) -> None:
    environ = ENVIRON | {"SLURM_STEP_ID": str(step)}
    del environ["SLURM_JOB_USER"]
    read = Job.from_environ(environ)
    assert (read.step, read.user) == (step, User("", 1000, 100))


@pytest.mark.parametrize(
    "name", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_GID", "SLURM_STEP_ID"]
)
@pytest.mark.parametrize(
    "value", [None, "", "-1", "0x1", " 1", "1\n", "²", "١", "../1", "4,5", "1" * 5000]
)
def test_number_that_is_none_is_refused(name: str, value: str | None) -> None:
    """The job id becomes a file name, the uid decides whose rights are used."""
    environ = {k: v for k, v in (ENVIRON | {name: value}).items() if v is not None}
    if (name, value) == ("SLURM_STEP_ID", None):
        assert Job.from_environ(environ).step is None  # a Prolog's
        return
    with pytest.raises(JobError, match=name):
        Job.from_environ(environ)


@pytest.mark.parametrize(
    ("given", "nodelist"),
    [
        ({}, ""),
        ({"SLURM_NODELIST": "n[1-2]"}, "n[1-2]"),
        ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NODELIST": "n1"}, "n[1-3]"),
        ({"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": "n1"}, "n1"),
    ],
)
def test_jobs_nodes_are_kept_as_slurm_wrote_them(given: dict[str, str], nodelist: str) -> None:
    assert Job.from_environ(ENVIRON | given).nodelist == nodelist
