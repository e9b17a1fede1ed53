"""A job, read from Slurm's variables."""

from __future__ import annotations

import pytest

from forestage.errors import JobError
from forestage.slurm.hints import JobHints, Request
from forestage.slurm.job import IMAGE_OPTION, SAVE_OPTION, Job
from forestage.system.as_user import User

ENVIRON = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_USER": "alice",
    "SLURM_JOB_UID": "1000",
    "SLURM_JOB_GID": "100",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_WORK_DIR": "/home/alice",
    "SLURMD_NODENAME": "n1",
}


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
        hints=JobHints((Request("/c", "hint"), Request("/a", "hint"))),
    )
    assert Job.from_environ(ENVIRON | {IMAGE_OPTION: ""}).requests == ()


def test_partition_name_of_any_bytes_is_made_printable_and_short() -> None:
    """They are its user's, and get into events."""
    environ = ENVIRON | {"SLURM_JOB_PARTITION": "\udcff\x1b[2J" + 5000 * "x"}
    partition = Job.from_environ(environ).partition
    assert partition.isprintable()
    assert len(partition.encode()) < 2000


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
def test_malformed_job_user_or_step_number_is_refused(name: str, value: str | None) -> None:
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
def test_job_keeps_its_node_list_as_slurm_wrote_the_list(
    given: dict[str, str], nodelist: str
) -> None:
    assert Job.from_environ(ENVIRON | given).nodelist == nodelist


@pytest.mark.parametrize(
    ("node", "nodelist", "paths"),
    [
        ("n1", "n[1-3]", ("/d/0-3/00/",)),
        ("n3", "n[1-3]", ("/d/2-3/02/",)),
        ("n3", "n3", ("/d/0-1/00/",)),
        # Not a node of the job, as far as Slurm says.
        ("n9", "n[1-3]", ()),
    ],
)
def test_node_placeholder_is_the_nodes_index_in_the_job(
    node: str, nodelist: str, paths: tuple[str, ...]
) -> None:
    comment = {"SLURM_JOB_COMMENT": "stage=/d/{node}-{nodes}/{node:02}/"}
    listed = {"SLURMD_NODENAME": node, "SLURM_JOB_NODELIST": nodelist}
    hints = Job.from_environ(ENVIRON | comment | listed).hints
    assert tuple(one.path for one in hints.data) == paths
    assert bool(hints.problems) == (not paths)


STEP = {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("given", "groups"),
    [
        (STEP | {"FORESTAGE_GROUPS": "100,31000"}, (100, 31000)),
        (STEP | {"FORESTAGE_GROUPS": "31000"}, (100, 31000)),  # the primary one is always there
        (STEP | {"FORESTAGE_GROUPS": ""}, None),
        (STEP | {"FORESTAGE_GROUPS": "31000,x"}, None),
        (STEP, None),
        ({"FORESTAGE_GROUPS": "31000"}, None),  # a Prolog has none that Slurm gave it
    ],
)
def test_step_has_the_groups_that_slurm_passed(
    given: dict[str, str], groups: tuple[int, ...] | None
) -> None:
    user = Job.from_environ(ENVIRON | given).user
    assert (user.groups, user.of_step) == (groups, groups is not None)


@pytest.mark.parametrize(("uid", "name"), [("1001", ""), ("65534", "nobody"), ("99", "nobody")])
def test_user_without_an_account_on_the_node_has_an_empty_name(uid: str, name: str) -> None:
    """So Slurm names each uid without an account on the node."""
    given = ENVIRON | {"SLURM_JOB_USER": "nobody", "SLURM_JOB_UID": uid}
    assert Job.from_environ(given).user.name == name
