"""A job's own directory on a cluster: in all its steps, filled by the first, gone with the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from host import wait_until
from jobs import Ran, Site
from spec import REPO, ClusterSpec
from steps import Tables, accompanied

from forestage.features.data.job_disk import PROCESS_NAME

AT = "/forestage/job"
SEED = f"{AT}/seed/JIT_CACHE"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    spec = accompanied(2)
    return dataclasses.replace(spec, node_dirs=(*spec.node_dirs, "/forestage"))


@pytest.fixture
def dirs(spank: Site) -> Iterator[Site]:
    """Nodes on which no directory of a job outlives it, nor the process that holds it."""
    spank.cluster.run(
        ["sh", "-c", "mkdir -p /shared/alice/tree/a; echo hello >/shared/alice/tree/a/file"],
        user="alice",
    )
    yield spank
    spank.cluster.wait_idle()
    for node in spank.cluster.nodes:
        wait_until(
            lambda node=node: not spank.named(node, PROCESS_NAME),  # type: ignore[misc]
            60,
            lambda node=node: f"a holder lives on {node}",  # type: ignore[misc]
        )
        for place in ("jobs", "evicted"):
            assert not list((spank.cache(node).root / place).glob("*"))
        assert list(spank.cluster.host_path(AT, node).glob("*")) == []


def step(site: Site, comment: str, script: str, node: str = "n1") -> Ran:
    return site.srun(None, "sh", "-c", script, comment=comment, node=node)


def test_step_has_a_job_directory_of_the_requested_size(dirs: Site) -> None:
    script = (
        "echo $FORESTAGE_DIR; stat -c '%U %a' $FORESTAGE_DIR; echo x >$FORESTAGE_DIR/file"
        f"; df -k --output=size {AT} | tail -1; grep ' {AT} ' /proc/self/mountinfo"
    )
    ran = step(dirs, "stage-dir=64M", script)
    at, owner, size, mount = ran.stdout.splitlines()
    assert (at, owner) == (AT, "alice 700")
    assert 50_000 < int(size) <= 65_536
    assert " rw,nosuid,nodev" in mount
    assert " ext4 /dev/loop" in mount


def test_job_directory_is_shared_by_the_jobs_steps_and_not_mounted_on_the_node(dirs: Site) -> None:
    script = (
        f"echo batch >{AT}/one; srun sh -c 'cat {AT}/one; echo step >{AT}/two'; cat {AT}/two"
        f"; srun --ntasks=3 --overcommit cat {AT}/two"
    )
    step(dirs, "stage-dir=32M", "true")  # the mount point is made
    with Tables(dirs) as tables:
        ran = dirs.sbatch(script, "--comment=stage-dir=32M")
        assert tables.changed() == []
    assert ran.stdout.split() == ["batch", "step", "step", "step", "step"]


def test_job_directory_has_its_tree_and_seed_before_the_task_begins(dirs: Site) -> None:
    comment = "stage-dir=64M stage=/shared/alice/tree@job,/shared/alice/tree@seed:JIT_CACHE"
    script = f"cat {AT}/tree/a/file $JIT_CACHE/a/file; echo $JIT_CACHE; echo more >{AT}/tree/a/file"
    ran = step(dirs, comment, script)
    assert ran.stdout.splitlines() == ["hello", "hello", SEED]
    assert dirs.cluster.read("/shared/alice/tree/a/file") == "hello\n"
    assert [one.result for one in dirs.outcomes(ran.job, hook="step")] == ["copied", "copied"]


def test_job_directory_in_memory_is_shared_by_all_steps_and_tasks(dirs: Site) -> None:
    comment = "stage-dir=64M,ram stage=/shared/alice/tree@job,/shared/alice/tree@seed:JIT_CACHE"
    look = f'cat {AT}/tree/a/file; grep -c " {AT} rw,nosuid,nodev.* tmpfs " /proc/self/mountinfo'
    script = (
        f"stat -c '%U %a' $FORESTAGE_DIR; echo batch >{AT}/one; cat $JIT_CACHE/a/file\n"
        f"srun --ntasks=3 --overcommit sh -c '{look}'\n"
        # It may have to wait for the end of the first, and would say so.
        f"srun --quiet sh -c 'cat {AT}/one; echo step >{AT}/two'; cat {AT}/two"
    )
    with Tables(dirs) as tables:
        ran = dirs.sbatch(script, f"--comment={comment}")
        assert tables.changed() == []
    owner, seed, *seen, batch, last = ran.stdout.splitlines()
    assert (owner, seed, batch, last) == ("alice 700", "hello", "batch", "step")
    assert sorted(seen) == ["1", "1", "1", "hello", "hello", "hello"]


@pytest.mark.parametrize("size", ["64M", "64M,ram"])
def test_container_step_has_the_job_directory_and_its_variables(dirs: Site, size: str) -> None:
    tree = "/shared/alice/tree"
    comment = f"stage-dir={size} stage={tree}@job,{tree}@seed:JIT_CACHE"
    script = (
        f"cat {AT}/tree/a/file $JIT_CACHE/a/file; echo $FORESTAGE_DIR $JIT_CACHE"
        f"; echo x >{AT}/x; cat {AT}/x /etc/os-release"
    )
    options = [f"--container-mounts={AT}"]
    ran = dirs.srun(dirs.image("in"), "sh", "-c", script, comment=comment, options=options)
    assert ran.stdout.splitlines()[:5] == ["hello", "hello", f"{AT} {SEED}", "x", 'NAME="in"'], ran


def test_job_submitted_by_a_job_inherits_no_job_directory_variables(
    dirs: Site,
) -> None:
    look = 'echo "[$FORESTAGE_DIR][$JIT_CACHE][$FORESTAGE_WAS_JIT_CACHE]"'
    inner = f"{look}; srun sh -c '{look}'"
    script = (
        f"cat >inner.sh <<'END'\n#!/bin/sh\n{inner}\nEND\n{inner}\n"
        "sbatch --quiet --wait --nodelist=n2 --output=inner.out inner.sh; cat inner.out"
    )
    comment = "--comment=stage-dir=32M stage=/shared/alice/tree@seed:JIT_CACHE"
    ran = dirs.sbatch(script, comment, "--nodelist=n1", "--export=ALL,JIT_CACHE=/mine")
    assert ran.stdout.split() == 2 * [f"[{AT}][{SEED}][/mine]"] + 2 * ["[][/mine][]"]


def test_cancelled_job_leaves_no_holder_of_its_directory_in_memory(dirs: Site) -> None:
    on = dirs.source("/shared/alice/cancelled")
    on.unlink(missing_ok=True)
    script = f"#!/bin/sh\nhead -c 8M /dev/zero >{AT}/x; touch cancelled; exec sleep 600\n"
    job = dirs.cluster.submit(script, "--nodelist=n1", "--comment=stage-dir=64M,ram")
    wait_until(on.exists, 60, dirs.cluster.overview)
    assert len(dirs.named("n1", PROCESS_NAME)) == 1
    dirs.cluster.run(["scancel", str(job)], user="alice")
    dirs.wait_over(job)
    assert dirs.named("n1", PROCESS_NAME) == []


def test_later_step_reports_that_the_holder_of_its_directory_in_memory_was_killed(
    dirs: Site,
) -> None:
    comment = "--comment=stage-dir=64M,ram"
    on, go = dirs.source("/shared/alice/held"), dirs.source("/shared/alice/go")
    for flag in (on, go):
        flag.unlink(missing_ok=True)
    script = (
        f"echo x >{AT}/x; touch held; until test -e go; do sleep 0.05; done; cat {AT}/x\n"
        f"srun sh -c 'ls {AT}; echo \"[$FORESTAGE_DIR]\"' 2>&1\n"
    )
    job = dirs.cluster.submit(f"#!/bin/sh\n{script}", "--nodelist=n1", "--output=said", comment)
    wait_until(on.exists, 60, dirs.cluster.overview)
    (pid,) = dirs.named("n1", PROCESS_NAME)
    dirs.root(["kill", "-KILL", pid], "n1")
    wait_until(lambda: not dirs.named("n1", PROCESS_NAME), 60, lambda: "it lives")
    go.touch()
    dirs.wait_over(job)
    said = dirs.cluster.read("/shared/alice/said").splitlines()
    assert (said[0], said[-1]) == ("x", "[]")  # who has it mounted keeps it
    assert "who held them was killed" in said[1]


WINDOW = """
import os, signal, sys
from forestage_window import window
paths = [f"/shared/alice/shards/{number}" for number in range(8)]
found = []
for path in window(paths, "3MiB", ahead=2, where=sys.argv[1]):
    with open(path) as file:
        found.append(file.read(1))
print(os.path.commonpath([path, sys.argv[2]]), "".join(found), flush=True)
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{name}/cmdline") as words:
            if "forestage_window.py" in words.read():
                os.kill(int(name), signal.SIGKILL)
    except OSError:
        pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("comment", "where"),
    [
        ("stage-dir=64M", "disk"),
        ("stage-dir=64M,ram", "disk"),
        ("stage-dir=64M,ram", "ram"),
        ("stage-dir=64M", "ram"),
    ],
)
def test_window_with_killed_processes_leaves_nothing_in_dev_shm(
    dirs: Site, comment: str, where: str
) -> None:
    make = "mkdir -p shards; for n in 0 1 2 3 4 5 6 7; do yes $n | head -c 1M >shards/$n; done"
    dirs.cluster.run(["sh", "-c", make], user="alice")
    dirs.cluster.write("/shared/alice/read.py", WINDOW)
    script = f"PYTHONPATH={REPO}/src/window python3 read.py {where} {AT}; ls {AT}"
    ran = dirs.srun(None, "sh", "-c", script, comment=comment)
    assert ran.stdout.split() == [AT, "01234567", f"forestage-window-job-{ran.job}"], ran
    assert ("no directory in memory" in ran.stderr) == (where == "ram" and "ram" not in comment)
    assert list(dirs.cluster.host_path("/dev/shm", "n1").glob("forestage-*")) == []


def test_each_node_of_a_job_has_a_separate_job_directory(dirs: Site) -> None:
    script = f"echo $SLURMD_NODENAME >{AT}/who; cat {AT}/who"
    ran = step(dirs, "stage-dir=32M", script, node="n1,n2")
    assert sorted(ran.stdout.split()) == ["n1", "n2"]


def test_step_prints_why_the_job_has_no_job_directory(dirs: Site) -> None:
    ran = step(dirs, "stage-dir=900M", f'echo "[$FORESTAGE_DIR]"; ls {AT}')
    assert ran.stdout == "[]\n"
    assert "no directory of its own on this node" in ran.stderr
    assert "data: job_dir" in ran.stderr
    comment = "stage-dir=900M stage-tell=yes"
    ran = dirs.srun(dirs.image("told"), "true", comment=comment)
    assert "no directory of its own on this node" in ran.stderr  # and not that the image is here
    ran = step(dirs, "stage-dir=32M stage=/shared/alice/nothing@job", f"ls {AT}")
    assert ran.stdout == ""
    assert "/shared/alice/nothing does not exist" in ran.stderr


def test_job_directory_of_another_users_job_is_empty_and_owned_by_that_user(dirs: Site) -> None:
    step(dirs, "stage-dir=32M", f"echo secret >{AT}/file")
    script = ["sh", "-c", f"ls -A {AT}; stat -c %U {AT}"]
    ran = dirs.srun(None, *script, comment="stage-dir=32M", user="bob")
    assert ran.stdout == "bob\n"


@pytest.mark.long  # Slurm has it wait for two minutes
@pytest.mark.parametrize("size", ["32M", "32M,ram"])
def test_requeued_job_starts_with_an_empty_job_directory(dirs: Site, size: str) -> None:
    found = "/shared/alice/requeued"
    script = (
        "#!/bin/sh\n"
        f"ls -A {AT} >>{found}; echo ${{SLURM_RESTART_COUNT:-0}} >>{found}; echo old >{AT}/old\n"
        'test "${SLURM_RESTART_COUNT:-0}" != 0 || { scontrol requeue $SLURM_JOB_ID; sleep 600; }\n'
    )
    options = [f"--comment=stage-dir={size}", "--requeue", "--nodelist=n1"]
    dirs.source(found).unlink(missing_ok=True)
    dirs.cluster.submit(script, *options, user="alice")
    file = dirs.source(found)
    wait_until(
        lambda: file.exists() and "1" in file.read_text().split(), 400, dirs.cluster.overview
    )
    assert file.read_text().split() == ["0", "1"]
