"""Processes that outlive a job: they leave its cgroups, and those of slurmd."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage import log
from forestage.system import forked_child

SPOTS = ("freezer", "memory", "unified", "")


def fake(root: Path, lines: str) -> Path:
    """A root directory with a /proc/self/cgroup and hierarchies of its own."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for spot in SPOTS:
        (root / "sys/fs/cgroup" / spot).mkdir(parents=True, exist_ok=True)
    return root


def left(root: Path) -> set[str]:
    """The hierarchies whose root was entered."""
    return {spot for spot in SPOTS if (root / "sys/fs/cgroup" / spot / "cgroup.procs").exists()}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("4:freezer:/slurm/uid_1/job_7/step_0\n2:memory:/\n", {"freezer"}),
        (
            "4:freezer:/slurm/uid_1/job_7/step_0\n2:memory:/slurm/uid_1/job_7\n",
            {"freezer", "memory"},
        ),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/slurm\n", {"", "unified"}),
        pytest.param("0::/system.slice/slurmd.service\n", {"", "unified"}, id="of a Prolog"),
        pytest.param("0::/system.slice/n1_slurmstepd.scope/s7/0\n", {"", "unified"}, id="SLUID"),
        pytest.param("1:name=freezer:/slurm_n1/s7/0\n", {"freezer"}, id="SLUID, of version 1"),
        pytest.param("0::/user.slice/my_job_7/slurp\n", set(), id="another user's"),
        ("0::/system.slice/sshd.service\n", set()),
        ("", set()),
    ],
)
def test_process_leaves_only_slurms_cgroups(tmp_path: Path, lines: str, expected: set[str]) -> None:
    root = fake(tmp_path, lines)
    forked_child.leave_job_cgroups(root=root)
    assert left(root) == expected


@pytest.mark.parametrize("score", [0, -1000])
def test_process_that_leaves_a_job_gets_the_given_oom_score(tmp_path: Path, score: int) -> None:
    root = fake(tmp_path, "")
    forked_child.leave_job_cgroups(score, root=root)
    assert (root / "proc/self/oom_score_adj").read_text() == str(score)


@pytest.mark.parametrize("leaf", ["copy", "serve"])
@pytest.mark.parametrize("unit", ["slurmstepd.scope/job_7/step_0", "forestage-hold.service/serve"])
def test_process_that_leaves_a_job_enters_a_leaf_cgroup_of_the_hold_unit(
    tmp_path: Path, unit: str, leaf: forked_child.CgroupName
) -> None:
    """Also from another leaf: a step's helper is there, and starts a stager."""
    root = fake(tmp_path, f"0::/system.slice/{unit}\n")
    (root / "held" / leaf).mkdir(parents=True)
    (root / "run/forestage").mkdir(parents=True)
    (root / forked_child.HOLD_CGROUP).symlink_to(root / "held")
    forked_child.leave_job_cgroups(leaf=leaf, root=root)
    assert (root / "held" / leaf / "cgroup.procs").read_text() == "0"
    assert left(root) == set()


@pytest.mark.parametrize("how", ["refused", "gone"])
def test_process_that_leaves_a_job_enters_the_root_cgroup_if_the_hold_unit_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "write_log_line", lambda line, by_slurm: said.append(line))
    root = fake(tmp_path, "0::/system.slice/slurmstepd.scope/job_7/step_0\n")
    (root / "run/forestage").mkdir(parents=True)
    (root / forked_child.HOLD_CGROUP).symlink_to(root / "held")
    if how == "refused":
        (root / "held/serve/cgroup.procs").mkdir(parents=True)
    forked_child.leave_job_cgroups(root=root)
    assert left(root) == {"", "unified"}
    assert [line.split(" detail=")[0] for line in said] == ["hold result=failed"] * (
        how == "refused"
    )


def test_process_outside_slurms_cgroups_stays_in_its_cgroup(tmp_path: Path) -> None:
    root = fake(tmp_path, "0::/user.slice/session.scope\n")
    (root / forked_child.HOLD_CGROUP / "serve").mkdir(parents=True)
    forked_child.leave_job_cgroups(root=root)
    assert not (root / forked_child.HOLD_CGROUP / "serve/cgroup.procs").exists()


def test_missing_cgroup_hierarchy_does_not_stop_leaving_the_other_hierarchies(
    tmp_path: Path,
) -> None:
    root = fake(tmp_path, "4:gone:/job_7\n2:memory:/job_7\n")
    forked_child.leave_job_cgroups(root=root)
    assert left(root) == {"memory"}


def test_process_joins_the_slurm_cgroups_of_another_process(tmp_path: Path) -> None:
    root = fake(tmp_path, "")
    lines = "4:memory:/slurm_n1/job_7\n3:name=systemd:/user.slice\n2:freezer:/job_7/gone\n"
    (root / "proc/42").mkdir()
    (root / "proc/42/cgroup").write_text(lines)
    (root / "sys/fs/cgroup/memory/slurm_n1/job_7").mkdir(parents=True)
    forked_child.join_slurm_cgroups(4711, 42, root)
    joined = [str(one.parent) for one in root.rglob("cgroup.procs") if one.read_text() == "4711"]
    assert joined == [f"{root}/sys/fs/cgroup/memory/slurm_n1/job_7"]


@pytest.mark.parametrize(
    ("manager", "task", "expected"),
    [
        pytest.param(
            "4:memory:/slurm/job_7/step_0\n2:freezer:/slurm/job_7\n",
            "4:memory:/slurm/job_7/step_0/task_0\n2:freezer:/slurm/job_7/step_0\n",
            ["memory/slurm/job_7/step_0/task_0", "freezer/slurm/job_7/step_0"],
            id="version 1",
        ),
        pytest.param(
            "0::/n1_slurmstepd.scope/job_7/step_0/slurm\n",
            "0::/n1_slurmstepd.scope/job_7/step_0/user/task_0\n",
            ["n1_slurmstepd.scope/job_7/step_0/user/task_0"],
            id="version 2",
        ),
        pytest.param(
            "0::/n1_slurmstepd.scope/s7/step_0/slurm\n",
            "0::/n1_slurmstepd.scope/s7/step_0/user/task_special\n",
            ["n1_slurmstepd.scope/s7/step_0/user/task_special"],
            id="SLUID",
        ),
    ],
)
def test_task_cgroups_are_found_after_slurm_moved_the_task(
    tmp_path: Path, manager: str, task: str, expected: list[str]
) -> None:
    root = fake(tmp_path, "")
    for name in expected:
        (root / "sys/fs/cgroup" / name).mkdir(parents=True)
        (root / "sys/fs/cgroup" / name / "cgroup.procs").touch()
    (root / "proc/41/task/41").mkdir(parents=True)
    (root / "proc/41/task/41/children").write_text("")
    assert forked_child.find_task_cgroups(41, root) is None
    (root / "proc/41/task/41/children").write_text("42 ")
    assert forked_child.find_task_cgroups(41, root) is None  # it has gone
    (root / "proc/42").mkdir()
    (root / "proc/42/cgroup").write_text(manager)
    assert forked_child.find_task_cgroups(41, root) is None
    (root / "proc/42/cgroup").write_text(task)
    found = forked_child.find_task_cgroups(41, root)
    assert found == [root / "sys/fs/cgroup" / name / "cgroup.procs" for name in expected]


def test_entering_a_task_cgroup_that_vanished_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task is on its way: what is entered is where it is by then."""
    gone, there = tmp_path / "gone/cgroup.procs", tmp_path / "cgroup.procs"
    found = iter([None, [gone], [there]])
    monkeypatch.setattr(forked_child, "find_task_cgroups", lambda manager: next(found))
    forked_child.enter_task_cgroups(41)
    assert there.read_text() == "0"


@pytest.mark.parametrize("found", [None, [Path("/none/cgroup.procs")]])
def test_entering_a_task_cgroup_that_stays_missing_raises(
    monkeypatch: pytest.MonkeyPatch, found: list[Path] | None
) -> None:
    monkeypatch.setattr(forked_child, "find_task_cgroups", lambda manager: found)
    with pytest.raises(OSError, match=r"no task into|No such file"):
        forked_child.enter_task_cgroups(41, patience=0.0)


@pytest.mark.parametrize(
    "lines", ["", "0::/user.slice\n", "1:name=systemd:/system.slice/slurmd.service\n3:memory:/\n"]
)
def test_task_outside_slurms_cgroups_has_no_task_cgroups(tmp_path: Path, lines: str) -> None:
    root = fake(tmp_path, "")
    (root / "proc/41/task/41").mkdir(parents=True)
    (root / "proc/41/task/41/children").write_text("42 ")
    (root / "proc/42").mkdir()
    (root / "proc/42/cgroup").write_text(lines)
    assert forked_child.find_task_cgroups(41, root) == []


@pytest.mark.parametrize(
    ("kinds", "left"),
    [(("task_", "step_"), ["job_7"]), (("task_", "step_", "job_"), [])],
)
def test_empty_cgroups_of_a_step_are_removed(
    tmp_path: Path, kinds: tuple[str, ...], left: list[str]
) -> None:
    user = tmp_path / "memory/slurm_n1/uid_1"
    (user / "job_7/step_0/task_0").mkdir(parents=True)
    forked_child.remove_empty_cgroups(
        [user / "job_7/step_0/task_0", tmp_path / "gone/job_7"], kinds
    )
    assert [one.name for one in user.iterdir()] == left


def test_cgroup_of_a_job_with_another_step_is_not_removed(tmp_path: Path) -> None:
    for step in ("step_0/task_0", "step_1/task_0"):
        (tmp_path / "job_7" / step).mkdir(parents=True)
    forked_child.remove_empty_cgroups(
        [tmp_path / "job_7/step_0/task_0"], ("task_", "step_", "job_")
    )
    assert [one.name for one in (tmp_path / "job_7").iterdir()] == ["step_1"]


V1 = {
    "memory/slurm_n1/job_7/memory.limit_in_bytes": "300",
    "memory/slurm_n1/job_7/step_0/memory.limit_in_bytes": "100",
    "memory/slurm_n1/memory.limit_in_bytes": "9223372036854771712",
}
V2 = {
    "system.slice/slurmstepd.scope/job_7/memory.max": "max",
    "system.slice/slurmstepd.scope/memory.max": "200",
    "system.slice/slurmstepd.scope/job_7/step_0/user/memory.max": "100",
}


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("4:memory:/slurm_n1/job_7/step_0/task_0\n", V1, 300),
        ("4:memory:/slurm_n1/job_7\n", V1, 300),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n", V2, 200),
        pytest.param("4:memory:/slurm_n1/job_8/step_0\n", V1, None, id="a word for none"),
        pytest.param("4:memory:/user/job_7\n", V1, None, id="not Slurm's"),
        pytest.param("2:freezer:/slurm_n1/job_7\n", V1, None, id="no memory controller"),
        ("", {}, None),
    ],
)
def test_memory_limit_of_a_job_is_the_smallest_of_its_cgroups(
    tmp_path: Path, lines: str, files: dict[str, str], expected: int | None
) -> None:
    root = fake(tmp_path, "")
    (root / "proc/42").mkdir()
    (root / "proc/42/cgroup").write_text(lines)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(f"{text}\n")
    assert forked_child.read_job_memory_limit(42, root) == expected


def test_joining_cgroups_of_a_process_that_has_ended_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        forked_child.join_slurm_cgroups(4711, 42, fake(tmp_path, ""))


@pytest.mark.parametrize(
    ("first", "users", "of_first", "is_in"),
    [
        pytest.param(
            "systemd", forked_child.FIRST_USERS, forked_child.FIRST_USERS, False, id="node"
        ),
        pytest.param("systemd", forked_child.FIRST_USERS, None, False, id="node, unseen"),
        pytest.param("tini", "user:[5]", "user:[5]", False, id="slurmd in a container"),
        pytest.param(
            "slurmstepd", forked_child.FIRST_USERS, forked_child.FIRST_USERS, True, id="job, pids"
        ),
        pytest.param("slurmstepd", "user:[5]", "user:[5]", True, id="job, pids and users"),
        pytest.param("systemd", "user:[5]", forked_child.FIRST_USERS, True, id="job, users"),
        pytest.param("systemd", "user:[5]", None, True, id="job, users, unseen"),
    ],
)
def test_user_namespace_of_a_job_is_distinguished_from_the_nodes(
    tmp_path: Path, first: str, users: str, of_first: str | None, is_in: bool
) -> None:
    for name, link in (("1", of_first), ("self", users)):
        (tmp_path / "proc" / name / "ns").mkdir(parents=True)
        if link is not None:
            (tmp_path / "proc" / name / "ns/user").symlink_to(link)
    (tmp_path / "proc/1/comm").write_text(f"{first}\n")
    assert forked_child.is_in_job_namespace(tmp_path) is is_in
