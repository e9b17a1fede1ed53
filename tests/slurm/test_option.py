"""`--stage` of srun, sbatch and salloc: whose Prologs and steps get it, and whose do not.

On this machine's Slurm, and on those of the other trees with ./test --all or --suite NAME.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence

import pytest
from host import wait_until
from jobs import CLI, Ran, Site
from spec import ClusterSpec
from steps import accompanied
from suite import on_suite

from forestage import events
from forestage.events import EventRecord, RequestOutcome

PLUGSTACK = "/etc/slurm/plugstack.conf"
HERE = "printenv FORESTAGE_LOCAL"
BOTH = "n1,n2"
OTHERS = [pytest.param(name, marks=pytest.mark.suite(name)) for name in ("trixie", "sid")]
_names = itertools.count(1)


@pytest.fixture(scope="module", params=["", *OTHERS])
def cluster_spec(request: pytest.FixtureRequest, machine: None) -> ClusterSpec:
    spec = accompanied(2, BatchStartTimeout="60")
    return on_suite(spec, request.param) if request.param else spec


@pytest.fixture
def paths(site: Site) -> list[str]:
    """Four images that a node has before a job's first step there."""
    site.configure(redirect="spank", cold="wait")
    return [site.image(name) for name in ("a", "b", "c", "d")]


def prologs(site: Site, job: int, node: str = "n1") -> list[EventRecord]:
    """The events of a job's Prologs on a node."""
    log = site.cluster.host_path("/var/log/forestage/events.jsonl", node)
    return [one for one in events.read_events(log) if (one.job, one.hook) == (job, "prolog")]


def asked(site: Site, job: int, node: str = "n1") -> list[str]:
    """What they were asked for."""
    outcomes = [one.outcome for one in prologs(site, job, node)]
    return [one.request for one in outcomes if isinstance(one, RequestOutcome)]


def local(text: str) -> list[str]:
    """What a step says that is on its node's disk."""
    return text.strip().split(":")


def job_named(site: Site, name: str) -> list[int]:
    """The ids of the jobs of that name, over or not: of each part, and each task of an array."""
    squeue = ["squeue", "--noheader", "--states=all", "--array", f"--name={name}", "--format=%A"]
    return sorted(int(word) for word in site.cluster.run(squeue, user="root").stdout.split())


def batch(
    site: Site, script: str, *options: str, lines: Sequence[str] = (), also: Sequence[str] = ()
) -> list[int]:
    """Submits a script, which has `lines`; returns the ids of its jobs when they are over.

    `also` are names of jobs that the script submits.
    """
    name = f"option{next(_names)}"
    text = "\n".join(["#!/bin/sh", *(f"#SBATCH {line}" for line in lines), script, ""])
    where = [f"--job-name={name}", f"--output={name}-%A_%a.out", "--open-mode=append"]
    site.cluster.run(["sbatch", *where, *options], input=text)
    jobs = job_named(site, name)
    for job in jobs:
        site.wait_over(job)
    for other in also:
        for job in job_named(site, other):
            site.wait_over(job)
    return jobs


def output(site: Site) -> str:
    """Of the last such script."""
    found = sorted(
        site.source("/shared/alice").glob("option*.out"), key=lambda one: one.stat().st_mtime
    )
    return found[-1].read_text()


# Each way to ask


def test_stage_options_of_srun_stage_all_named_images(spank: Site, paths: list[str]) -> None:
    options = [f"--stage={paths[0]}", f"--stage={paths[1]}"]
    ran = spank.srun(None, *HERE.split(), options=options)
    assert local(ran.stdout) == paths[:2], ran
    assert asked(spank, ran.job) == paths[:2]
    assert {one.options for one in prologs(spank, ran.job)} == {("stage",)}


def test_stage_options_of_sbatch_and_of_its_script_add_up(spank: Site, paths: list[str]) -> None:
    lines = [f"--stage={paths[0]}", "--stage-wait=5m", f"--stage={paths[1]}"]
    (job,) = batch(spank, f"srun {HERE}", f"--stage={paths[2]}", lines=lines)
    assert asked(spank, job) == [*paths[:2], paths[2]]
    assert local(output(spank)) == paths[:3]


def test_stage_option_of_salloc_applies_to_all_steps_of_its_job(
    spank: Site, paths: list[str]
) -> None:
    ran = spank.run(["salloc", f"--stage={paths[0]}", "srun", *HERE.split()])
    assert (local(ran.stdout), asked(spank, ran.job)) == ([paths[0]], [paths[0]]), ran


def test_stage_option_applies_to_each_task_of_an_array(spank: Site, paths: list[str]) -> None:
    jobs = batch(spank, "true", "--array=1-2", "--nodelist=n1", lines=[f"--stage={paths[0]}"])
    assert [asked(spank, job) for job in jobs] == [[paths[0]], [paths[0]]]


def test_stage_option_applies_on_each_node_of_a_job(spank: Site, paths: list[str]) -> None:
    ran = spank.srun(None, "true", options=[f"--stage={paths[0]}"], node=BOTH)
    assert [asked(spank, ran.job, node) for node in ("n1", "n2")] == [[paths[0]]] * 2


def test_stage_option_applies_to_a_job_with_export_none(spank: Site, paths: list[str]) -> None:
    """26.05 has such a job wait for its user's login environment, which a small tree lacks."""
    options = ["--export=NONE", "--output=/dev/null", "--nodelist=n1", f"--stage={paths[0]}"]
    job = spank.cluster.submit("#!/bin/sh\ntrue\n", *options)
    wait_until(lambda: asked(spank, job) == [paths[0]], 60, spank.cluster.overview)
    squeue = ["squeue", "--noheader", "--format=%T", f"--job={job}"]
    # Over, or held for want of it: one that is cancelled before is held again.
    wait_until(
        lambda: spank.cluster.run(squeue, user="root", check=False).stdout in ("", "PENDING\n"),
        60,
        spank.cluster.overview,
    )
    spank.cluster.run(["scancel", str(job)], user="root", check=False)
    spank.wait_over(job)


def test_stage_option_applies_again_to_a_requeued_job(spank: Site, paths: list[str]) -> None:
    """On another node: for two minutes, this slurmd would take it for the one that it has ended."""
    script = f"#!/bin/sh\n#SBATCH --stage={paths[0]}\ntouch on-$SLURM_JOB_NODELIST\nsleep 60\n"
    options = ["--requeue", "--output=/dev/null", "--nodelist=n1"]
    job = spank.cluster.submit(script, *options)

    def runs_on(node: str) -> bool:
        # Before its script runs nothing can be told to it, and it is killed after 30 s (KillWait).
        return spank.cluster.host_path(f"/shared/alice/on-{node}").exists()

    wait_until(lambda: runs_on("n1"), 60, spank.cluster.overview)
    assert asked(spank, job) == [paths[0]]
    squeue = ["squeue", "--noheader", "--format=%T %r", f"--job={job}"]
    spank.cluster.run(["scontrol", "requeue", str(job)], user="root")
    wait_until(
        lambda: spank.root(squeue, "n1") == "PENDING BeginTime\n", 60, spank.cluster.overview
    )
    update = ["scontrol", "update", f"JobId={job}", "ReqNodeList=n2", "StartTime=now"]
    spank.root(update, "n1")
    wait_until(lambda: runs_on("n2"), 60, spank.cluster.overview)
    assert asked(spank, job, "n2") == [paths[0]]
    spank.cluster.run(["scancel", str(job)], user="root")
    spank.wait_over(job)


def test_stage_options_are_in_the_help_of_srun_sbatch_and_salloc(spank: Site) -> None:
    for command in ("srun", "sbatch", "salloc"):
        said = spank.cluster.run([command, "--help"]).stdout
        for name in ("--stage=PATH", "--stage-wait=TIME", "--stage-dir=", "--stage-tell"):
            assert name in said, command


def test_stage_option_overrides_the_comment_and_explain_reports_both(
    spank: Site, paths: list[str]
) -> None:
    ran = spank.srun(
        None, "true", comment=f"stage={paths[1]} stage-tell=yes", options=[f"--stage={paths[0]}"]
    )
    assert asked(spank, ran.job) == [paths[0]]
    assert f"forestage: n1: {paths[0]} is read from this node's copy" in ran.stderr
    said = spank.command("explain", str(ran.job))
    assert "asked at submission: --stage\n" in said
    assert "not counted: stage= in the comment, as the option was given" in said
    assert f"{paths[0]} (--stage)" in said


def test_stage_no_option_switches_off_the_images_of_the_comment(
    spank: Site, paths: list[str]
) -> None:
    options = ["--stage=no"]
    ran = spank.srun(None, "true", comment=f"stage={paths[0]}", options=options)
    assert asked(spank, ran.job) == [""]


def test_stage_dir_and_stage_tell_options_give_a_job_directory_and_a_message(
    spank: Site, paths: list[str]
) -> None:
    options = ["--stage-dir=16M,ram", "--stage-tell", f"--stage={paths[0]}"]
    ran = spank.srun(None, "sh", "-c", "touch $FORESTAGE_DIR/x && echo made", options=options)
    assert ran.stdout == "made\n", ran
    assert paths[0] in ran.stderr


# Jobs of several parts


@pytest.mark.parametrize("given", [(0, 1), (0, None), (None, 1)])
def test_each_part_of_a_het_job_has_its_own_stage_option(
    spank: Site, paths: list[str], given: tuple[int | None, int | None]
) -> None:
    options = [[] if one is None else [f"--stage={paths[one]}"] for one in given]
    wanted = [[] if one is None else [paths[one]] for one in given]
    first, second = ["--nodelist=n1", *options[0]], ["--nodelist=n2", *options[1]]
    by_command = batch(spank, "true", *first, ":", *second)
    lines = [" ".join(first), "hetjob", " ".join(second)]
    by_script = batch(spank, "true", lines=lines)
    for jobs in (by_command, by_script):
        found = [asked(spank, job, node) for job, node in zip(jobs, ("n1", "n2"), strict=True)]
        assert found == wanted, jobs


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_each_part_of_a_het_job_of_srun_or_salloc_has_its_own_stage_option(
    spank: Site, paths: list[str], command: str
) -> None:
    name = f"option{next(_names)}"
    parts = [
        [f"--job-name={name}", "--nodelist=n1", f"--stage={paths[0]}"],
        ["--nodelist=n2", f"--stage={paths[1]}"],
    ]
    ends = [["true"], ["true"]] if command == "srun" else [[], ["true"]]
    argv = [command, *parts[0], *ends[0], ":", *parts[1], *ends[1]]
    spank.cluster.run(argv)
    jobs = job_named(spank, name)
    jobs += [jobs[0] + 1] * (len(jobs) == 1)  # the second part has no name of its own
    for job in jobs:
        spank.wait_over(job)
    assert [asked(spank, job, node) for job, node in zip(jobs, ("n1", "n2"), strict=True)] == [
        [paths[0]],
        [paths[1]],
    ]


# What a job does not inherit


ALL = ["--stage-dir=16M,ram", "--stage-wait=1m", "--stage-tell"]


def test_sbatch_in_a_job_inherits_no_stage_option(spank: Site, paths: list[str]) -> None:
    inner = "sbatch --job-name=heir --nodelist=n1 --output=heir.out --wait --wrap=true"
    (job,) = batch(spank, inner, *ALL, f"--stage={paths[0]}", "--nodelist=n1", also=["heir"])
    assert asked(spank, job) == [paths[0]]
    (heir,) = job_named(spank, "heir")
    assert prologs(spank, heir) == []


def test_script_submitted_in_a_job_uses_its_own_stage_options(
    spank: Site, paths: list[str]
) -> None:
    script = f"printf '#!/bin/sh\\n#SBATCH --stage={paths[1]}\\ntrue\\n'"
    inner = f"{script} | sbatch --job-name=own --nodelist=n1 --output=own.out --wait"
    (job,) = batch(spank, inner, f"--stage={paths[0]}", "--nodelist=n1", also=["own"])
    assert asked(spank, job) == [paths[0]]
    (own,) = job_named(spank, "own")
    assert asked(spank, own) == [paths[1]]


@pytest.mark.cases(2)
@pytest.mark.parametrize("maker", ["sbatch", "salloc", "srun"])
def test_srun_that_creates_a_job_within_a_job_inherits_no_stage_option(
    spank: Site, paths: list[str], maker: str
) -> None:
    inner = "env -u SLURM_JOB_ID -u SLURM_JOBID srun --job-name=third --nodelist=n1 -n1 -N1 true"
    option = f"--stage={paths[0]}"
    before = job_named(spank, "third")
    if maker == "sbatch":
        (job,) = batch(spank, inner, option, "--nodelist=n1")
    else:
        job = spank.run([maker, option, *ALL, "sh", "-c", inner]).job
    assert asked(spank, job)[0] == paths[0]
    (third,) = set(job_named(spank, "third")) - set(before)
    spank.wait_over(third)
    assert prologs(spank, third) == []


def test_step_uses_the_jobs_stage_option_and_ignores_its_own(spank: Site, paths: list[str]) -> None:
    step = f"srun --stage={paths[1]} --stage=./wrong {HERE} 2>&1"
    (job,) = batch(spank, step, f"--stage={paths[0]}", "--nodelist=n1")
    assert asked(spank, job) == [paths[0]]
    *said, found = output(spank).splitlines()
    assert local(found) == [paths[0]]
    (line,) = said
    assert "--stage is for jobs, and too late for a step" in line


# What is refused


@pytest.mark.parametrize("command", ["srun", "sbatch", "salloc"])
@pytest.mark.parametrize("word", ["--stage=./a.sqsh", "--stage-dir=many", "--stage-wait=soon"])
def test_job_with_an_invalid_stage_option_is_not_submitted(
    spank: Site, command: str, word: str
) -> None:
    last = ["--wrap=true"] if command == "sbatch" else ["true"]
    done = spank.cluster.run([command, "--job-name=wrong", word, *last], check=False)
    assert done.returncode != 0
    assert f"forestage: {word}: " in done.stderr.splitlines()[0], done.stderr
    assert job_named(spank, "wrong") == []


def test_script_with_invalid_stage_options_is_refused_and_each_option_is_reported(
    spank: Site,
) -> None:
    text = "#!/bin/sh\n#SBATCH --stage=a\n#SBATCH --stage-wait=b\n#SBATCH --stage=/right\n"
    done = spank.cluster.run(["sbatch", "--job-name=wrong"], input=text, check=False)
    assert done.returncode != 0
    said = re.findall(r"forestage: (--[a-z-]+=\w+): ", done.stderr)
    assert said == ["--stage=a", "--stage-wait=b"], done.stderr
    assert job_named(spank, "wrong") == []


@contextlib.contextmanager
def mounted(site: Site, source: str, target: str, node: str | None) -> Iterator[None]:
    site.cluster.run(["mount", "--bind", source, target], user="root", node=node)
    try:
        yield
    finally:
        site.cluster.run(["umount", target], user="root", node=node)


@pytest.mark.parametrize("program", ["/bin/false", "/bin/true", "/dev/null"])
def test_job_is_submitted_though_the_check_of_its_stage_option_does_not_run(
    spank: Site, paths: list[str], program: str
) -> None:
    with mounted(spank, program, CLI, None):
        (job,) = batch(spank, "true", "--stage=wrong", f"--stage={paths[0]}", "--nodelist=n1")
    assert asked(spank, job) == [paths[0]]
    (problem,) = {text for one in prologs(spank, job) for text in one.problems}
    assert problem.startswith("option --stage=wrong: ")


# Where the companion is not everywhere


@pytest.fixture
def plain(site: Site) -> str:
    """A plugstack.conf without the companion, to be mounted on a host."""
    lines = [line for line in site.cluster.read(PLUGSTACK).splitlines() if "pyxis" in line]
    site.cluster.write("/shared/plain.conf", "".join(f"{line}\n" for line in lines))
    return "/shared/plain.conf"


def test_stage_option_is_refused_by_slurm_on_a_login_node_without_the_companion(
    site: Site, paths: list[str], plain: str
) -> None:
    with mounted(site, plain, PLUGSTACK, None):
        for command in ("srun", "sbatch", "salloc"):
            argv = [command, "--job-name=unknown", f"--stage={paths[0]}", "true"]
            done = site.cluster.run(argv, check=False)
            assert done.returncode != 0
            assert "unrecognized option" in done.stderr
        ran = site.srun(None, *HERE.split(), comment=f"stage={paths[0]}")
    assert job_named(site, "unknown") == []
    assert local(ran.stdout) == [paths[0]]


def test_stage_option_applies_though_only_login_nodes_have_the_companion(
    site: Site, paths: list[str], plain: str
) -> None:
    with contextlib.ExitStack() as stack:
        for node in ("n1", "n2"):
            stack.enter_context(mounted(site, plain, PLUGSTACK, node))
        (job,) = batch(site, "srun echo ran", f"--stage={paths[0]}", "--nodelist=n1")
        assert output(site) == "ran\n"
        (inner,) = batch(site, f"srun --stage={paths[0]} true 2>&1; echo $?", "--nodelist=n1")
        assert "unrecognized option" in output(site)
        ran = site.srun(None, "echo", "ran", options=[f"--stage={paths[1]}"])
    assert (ran.code, ran.stdout) == (0, "ran\n"), ran
    assert asked(site, job) == [paths[0]]
    assert asked(site, ran.job) == [paths[1]]
    assert prologs(site, inner) == []


def test_image_in_the_comment_is_staged_on_a_cluster_without_the_companion(
    site: Site, paths: list[str], plain: str
) -> None:
    with contextlib.ExitStack() as stack:
        for node in (None, "n1", "n2"):
            stack.enter_context(mounted(site, plain, PLUGSTACK, node))
        ran: Ran = site.srun(None, "echo", "ran", comment=f"stage={paths[0]}")
    assert (ran.code, ran.stdout) == (0, "ran\n")
    assert asked(site, ran.job) == [paths[0]]
