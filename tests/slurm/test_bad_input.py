"""Whatever a job asks for, and whatever the node is like: never worse off than without forestage.

Each job of `all` has a twin in `plain`, where forestage is switched off, on another node. Both
must end the same way and must have found the same; the log has one line about it, and so has
`forestage explain`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from host import wait_until
from images import MIB
from jobs import CACHE, Ran, Site, hooked
from spec import ClusterSpec

NVME_MIB = 64


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return hooked(nodes=2, nvme_mib=NVME_MIB)


def special(site: Site, kind: int, device: int = 0) -> str:
    path = "/shared/alice/special"
    site.source(path).unlink(missing_ok=True)
    os.mknod(site.source(path), kind | 0o666, device)
    site.source(path).chmod(0o666)
    return path


def linked(site: Site, target: str) -> str:
    link = site.source("/shared/alice/link.sqsh")
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    return "/shared/alice/link.sqsh"


def outside(site: Site) -> str:
    path = "/opt/image.sqsh"
    shutil.copy(site.source(site.image("inside")), site.cluster.host_path(path))
    return path


def below_private_directory(site: Site) -> str:
    image = site.image("private/image")
    site.source("/shared/alice/private").chmod(0o700)
    return image


def of_size(site: Site, size: int) -> str:
    path = "/shared/alice/size.sqsh"
    site.source(path).touch()
    os.truncate(site.source(path), size)
    return path


@dataclass(frozen=True)
class Case:
    """What is asked for, by pyxis' option or by a hint, and the reason why it is not staged."""

    reason: str
    path: Callable[[Site], str]
    user: str = "alice"
    hinted: bool = False
    config: Mapping[str, object] = field(default_factory=dict)


CASES = {
    "missing": Case("missing", lambda site: "/shared/alice/missing.sqsh"),
    "missing-directory": Case("missing", lambda site: "/shared/alice/none/missing.sqsh"),
    "dangling-link": Case("missing", lambda site: linked(site, "/shared/alice/nothing")),
    "link-to-itself": Case("bad-path", lambda site: linked(site, "link.sqsh")),
    "directory": Case("not-a-file", lambda site: "/shared/alice"),
    "device": Case("not-a-file", lambda site: special(site, stat.S_IFCHR, os.makedev(1, 3))),
    # pyxis would wait for a writer for ever, and so it should; only our hook must not.
    "fifo": Case("not-a-file", lambda site: special(site, stat.S_IFIFO), hinted=True),
    "unreadable": Case("no-permission", lambda site: site.image("own", mode=0o600), user="bob"),
    "private-directory": Case("no-permission", below_private_directory, user="bob"),
    "outside": Case("outside-sources", outside),
    "outside-by-link": Case("outside-sources", lambda site: linked(site, outside(site))),
    "outside-by-dots": Case("outside-sources", lambda site: f"/shared/alice/../..{outside(site)}"),
    "no-sources": Case("outside-sources", lambda site: site.image("none"), config={"sources": []}),
    "above-the-limit": Case(
        "too-large", lambda site: site.image("large", mib=2), config={"max_image_size": MIB}
    ),
    "above-the-disk": Case("no-room", lambda site: of_size(site, (NVME_MIB + 1) * MIB)),
    "above-any-disk": Case("no-room", lambda site: of_size(site, 1 << 43), hinted=True),
    "above-the-cache": Case(
        "no-room", lambda site: site.image("large", mib=2), config={"max_size": MIB}
    ),
    "empty": Case("empty", lambda site: of_size(site, 0)),
    "registry": Case("registry", lambda site: "nvcr.io#nvidia/pytorch:24.01-py3"),
    "newline": Case("bad-path", lambda site: "/shared/alice/a\nb.sqsh"),
    "escape": Case("bad-path", lambda site: "/shared/alice/\x1b[31mred.sqsh", hinted=False),
    "nul": Case("bad-path", lambda site: "/shared/alice/a%00b.sqsh", hinted=True),
    "not-utf-8": Case("bad-path", lambda site: "/shared/alice/%ff%fe.sqsh", hinted=True),
    "long-name": Case("bad-path", lambda site: f"/shared/alice/{'x' * 300}"),
    "long-path": Case("bad-path", lambda site: "/shared" + "/x" * 2500),
    "relative-hint": Case("registry", lambda site: "images/a.sqsh", hinted=True),
}


# tests/hooks/test_refused.py has these as well; pyxis meets nothing there that it does not above.
IN_HOOKS_TOO = {"missing-directory", "outside-by-link", "outside-by-dots", "no-sources"}
IN_HOOKS_TOO |= {"above-the-cache", "above-any-disk", "long-name", "relative-hint"}


def some(names: Iterable[str], less: Collection[str]) -> list[object]:
    """The names as parameters, those in `less` with ./test --all only."""
    return [pytest.param(n, marks=[pytest.mark.long] * (n in less)) for n in names]


@pytest.mark.parametrize("name", some(CASES, less=IN_HOOKS_TOO))
def test_a_bad_image_is_left_to_pyxis(site: Site, name: str) -> None:
    case = CASES[name]
    path = case.path(site)
    site.configure(**case.config)
    job = served_as_without(site, path, user=case.user, hinted=case.hinted)
    assert_declined(site, job, case.reason)
    assert site.entries() == {}


def served_as_without(site: Site, path: str, *, user: str = "alice", hinted: bool = False) -> Ran:
    """Runs the job and its twin, who must not differ; gives the job, which was on n1."""
    comment, image = (f"stage={path}", None) if hinted else (None, path)
    command = ["true"] if hinted else []

    def run(node: str, partition: str) -> Ran:
        options = [f"--partition={partition}"]
        return site.srun(image, *command, user=user, comment=comment, node=node, options=options)

    with ThreadPoolExecutor() as pool:
        job, twin = pool.map(run, ("n1", "n2"), ("all", "plain"))
    assert fate(job) == fate(twin)
    assert [(s.path, s.file, s.sha256, s.error) for s in site.seen(job.job)] == [
        (s.path, s.file, s.sha256, s.error) for s in site.seen(twin.job)
    ]
    return job


def fate(job: Ran) -> tuple[int, str, list[str]]:
    """How a job ended, and the words that it said.

    Who of a step's processes writes its line first is chance, and so is where a line that is longer
    than a pipe takes at once is cut by another one.
    """
    told = re.sub(r"\bn[12]\b", "node", job.stderr)
    # Whether a busy slurmctld gave the node at once is chance as well.
    told = re.sub(r"srun: job \d+ (queued and|has been) .*\n", "", told)
    return job.code, job.stdout, sorted(re.sub(r"[/x]{9,}", " ", told).split())


def assert_declined(site: Site, job: Ran, reason: str, result: str = "declined") -> None:
    outcome = site.outcome(job.job)
    assert (outcome.result, outcome.reason) == (result, reason)
    assert reason in told(site, job)


def told(site: Site, job: Ran) -> str:
    """The log's one line about a job, once `forestage explain` tells the same."""
    (line,) = site.words(job.job)
    assert line.isprintable(), "control characters reach the log"
    assert len(line) < 5000
    explained = site.command("explain", str(job.job))
    assert all(row.isprintable() for row in explained.split("\n"))
    for outcome in site.outcomes(job.job):
        assert outcome.result in explained
        assert f"({outcome.reason})" in explained or not outcome.reason
    return line


# The comment

HINTS = {
    "unknown-key": ("stage-fast=yes", "unknown hint stage-fast="),
    "bad-wait": ("stage-wait=soon", "stage-wait: expected a duration"),
    "no-path": ("stage=", "stage= names no image"),
    "control-characters": ("stage-\x1b[31m\x07=1", r"unknown hint stage-\x1b[31m\x07="),
}


@pytest.mark.parametrize("name", HINTS)
def test_a_bad_hint_alone_is_told_and_ignored(site: Site, name: str) -> None:
    hint, problem = HINTS[name]
    job = site.srun(None, "true", comment=f"my work;{hint}")
    assert job.code == 0
    assert_declined(site, job, "bad-hint")
    assert problem in told(site, job)
    assert problem in site.command("explain", str(job.job))


@pytest.mark.parametrize("name", some(HINTS, less=("unknown-key", "no-path")))
def test_a_bad_hint_does_not_keep_the_image_from_being_staged(site: Site, name: str) -> None:
    hint, problem = HINTS[name]
    image = site.image("good")
    job = site.srun(image, comment=f"{hint}\nstage={image}")
    assert (job.code, site.outcome(job.job).result) == (0, "copied")
    assert problem in told(site, job)
    assert problem in site.command("explain", str(job.job))


def test_one_bad_image_does_not_keep_the_other_from_being_staged(site: Site) -> None:
    image = site.image("good")
    job = site.srun(None, "true", comment=f"stage=/shared/alice/missing.sqsh,{image}")
    assert site.results(job.job) == ["declined", "copied"]
    assert "missing" in told(site, job)


@pytest.mark.parametrize("filler", some(["x", " ", ",", "=", "stage=/y;"], less=(" ", ",", "=")))
def test_the_longest_comment_is_read_to_its_end(site: Site, filler: str) -> None:
    """Slurm 22.05 takes 1024 bytes at most, from sbatch as from `scontrol update`."""
    image = site.image("good")
    hint = f" stage={image}"
    comment = (filler * 1024)[: 1024 - len(hint)] + hint
    job = site.srun(image, comment=comment)
    assert job.code == 0
    assert "copied" in site.results(job.job)
    assert "copied" in told(site, job)


def test_a_comment_of_10_kb_never_becomes_a_job(site: Site) -> None:
    submit = ["srun", f"--comment=stage=/shared/alice/a.sqsh {'x' * 10240}", "true"]
    assert "too long" in site.cluster.run(submit, check=False).stderr


# The node


@pytest.mark.parametrize("text", ["sources: [/shared\n", "sauces: [/shared]\ndeadline: never\n"])
def test_a_config_that_cannot_be_used(site: Site, text: str) -> None:
    image = site.image("good")
    site.cluster.write("/etc/forestage/forestage.yaml", text)
    job = site.srun(image)
    assert (job.code, site.shows_source(site.saw(job.job))) == (0, True)
    assert_declined(site, job, "config", "failed")
    assert site.entries() == {}


def test_a_config_that_breaks_while_a_job_runs_leaves_nothing_behind(site: Site) -> None:
    with site.holding(site.image("good")) as job:
        site.cluster.write("/etc/forestage/forestage.yaml", "{")
        job.stop()
        assert site.leftovers() == []
        assert site.leases() == []


def test_a_disk_that_is_not_mounted(site: Site) -> None:
    image = site.image("good")

    def gone() -> bool:
        ran = site.cluster.run(["umount", "/mnt/nvme"], user="root", node="n1", check=False)
        assert ran.returncode == 0 or "busy" in ran.stderr, ran.stderr
        return ran.returncode == 0

    # A stager of the last test may have the disk open for a moment yet.
    wait_until(gone, 60, lambda: "the disk is busy")
    try:
        job = site.srun(image)
        assert (job.code, site.shows_source(site.saw(job.job))) == (0, True)
        assert_declined(site, job, "cache-not-mounted", "failed")
        assert list(site.cluster.host_path("/mnt/nvme", "n1").iterdir()) == []
    finally:
        disk = "/var/lib/cluster/nodes/n1/nvme.img"
        site.root(["mount", "-o", "loop", disk, "/mnt/nvme"], "n1")
    assert site.outcome(site.srun(image).job).result == "copied"


@pytest.mark.parametrize("made", [False, True], ids=["new-cache", "old-cache"])
def test_a_disk_that_is_full(site: Site, made: bool) -> None:
    site.configure(min_free=0, max_size="100%")
    if made:
        site.srun(site.image("other"))
        site.await_stagers()  # what one has open takes room, evicted or not
        site.command("evict", "--all")
    image = site.image("good", mib=4)
    with filled(site):
        job = site.srun(image)
        assert (job.code, site.shows_source(site.saw(job.job))) == (0, True)
        # A cache that is not made yet has no room for its first file.
        assert_declined(site, job, *(("no-room",) if made else ("io", "failed")))
    assert site.outcome(site.srun(image).job).result == "copied"


@contextlib.contextmanager
def filled(site: Site) -> Iterator[None]:
    disk = site.cluster.host_path("/mnt/nvme", "n1")
    facts = os.statvfs(disk)
    fill = ["fallocate", "--length", str(facts.f_bavail * facts.f_frsize)]
    # Its own map takes a block or two; what is left of the last MiB goes block by block.
    subprocess.run([*fill, str(disk / "filler")], check=False, stderr=subprocess.DEVNULL)
    with contextlib.suppress(OSError), open(disk / "rest", "wb", buffering=0) as rest:
        while True:
            rest.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0
    try:
        yield
    finally:
        for name in ("filler", "rest"):
            (disk / name).unlink(missing_ok=True)


def test_a_lock_that_is_held_past_the_deadline(site: Site) -> None:
    image = site.image("good")
    key = site.outcome(site.srun(image).job).key
    site.command("evict", "--all")
    site.configure(deadline="2s")
    hold = f"exec 9>{CACHE}/locks/{key}.lock; flock 9; echo held; cat"
    holder = site.cluster.popen(["sh", "-c", hold], user="root", node="n1", stdin=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    try:
        job = site.srun(image)
    finally:
        holder.communicate("", timeout=240)
    assert (job.code, site.shows_source(site.saw(job.job))) == (0, True)
    assert_declined(site, job, "deadline")
    assert site.outcome(site.srun(image).job).result == "copied"


@contextlib.contextmanager
def damaged_lease(site: Site) -> Iterator[None]:
    """Of a job that is none of those that the test starts."""
    lease = site.cluster.host_path("/run/forestage/leases/99999.json", "n1")
    lease.parent.mkdir(mode=0o700, exist_ok=True)
    lease.write_text("{")
    try:
        yield
    finally:
        lease.unlink()
        site.srun(site.image("after"))  # its Epilog cleans up again


def test_another_jobs_damaged_lease_keeps_nobody_from_an_image(site: Site) -> None:
    image = site.image("good")
    with damaged_lease(site):
        job = site.srun(image)
        assert (job.code, site.saw(job.job).sha256) == (0, site.sha256(image))
        told(site, job)


def test_another_jobs_damaged_lease_keeps_no_redirect_for_ever(site: Site) -> None:
    image = site.image("good")
    site.srun(image)
    with damaged_lease(site):
        job = site.srun(image)
        assert site.outcome(job.job).redirect == "mounted"
        assert site.redirected() == [], "the job is over, and later ones would see an old copy"
