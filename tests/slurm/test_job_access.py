"""Nothing that forestage puts on a node opens a file for somebody who could not read its source."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from jobs import Site
from spec import ALICE

# Tries to open whatever a user can reach or guess on the node, over and over until its stdin ends,
# and tells under which names it could read a squashfs image.
SNOOP = Path(__file__).with_name("snoop.py").read_text()


def private_image(site: Site, way: str) -> str:
    """An image that only alice can read: by its own mode, or by that of its directory."""
    if way == "mode":
        return site.image("secret", mib=16, mode=0o600)
    image = site.image("private/secret", mib=16)
    site.cluster.run(["chown", "alice:alice", "/shared/alice/private"], user="root")
    site.cluster.run(["chmod", "0700", "/shared/alice/private"], user="root")
    return image


def snoop(site: Site, user: str) -> subprocess.Popen[str]:
    """Returns once it has looked everywhere for the first time."""
    process = site.cluster.popen(
        ["python3", "-c", SNOOP], user=user, node="n1", cwd="/", stdin=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "looking\n"
    return process


def findings(process: subprocess.Popen[str]) -> list[str]:
    stdout, stderr = process.communicate("", timeout=240)
    assert process.returncode == 0, stderr
    found: list[str] = json.loads(stdout)
    return found


@pytest.mark.parametrize("way", ["mode", "directory"])
def test_another_user_finds_no_readable_copy_on_the_node(site: Site, way: str) -> None:
    image = private_image(site, way)
    bob = snoop(site, "bob")
    with site.holding(image) as job:
        key = site.outcome(job.job).key
        assert site.saw(job.job).file == site.copy(key)
        late, root = snoop(site, "bob"), snoop(site, "root")
        assert findings(late) == []
    assert findings(bob) == []
    assert f"/mnt/nvme/forestage/entries/{key}/image" in findings(root), "it looks in vain"


@pytest.mark.parametrize("way", ["mode", "directory"])
@pytest.mark.parametrize("hinted", [False, True], ids=["option", "hint"])
def test_another_user_cannot_have_it_staged(site: Site, way: str, hinted: bool) -> None:
    image = private_image(site, way)
    site.srun(image)
    if hinted:
        job = site.srun(None, "cat", image, comment=f"stage={image}", user="bob")
        assert "Permission denied" in job.stderr
    else:
        job = site.srun(image, user="bob")
        assert site.saw(job.job).error == "Permission denied"
    assert job.code != 0
    outcome = site.outcome(job.job)
    assert (outcome.result, outcome.reason) == ("declined", "no-permission")


@pytest.mark.parametrize("way", ["mode", "directory"])
def test_another_user_cannot_take_a_redirect_away(site: Site, way: str) -> None:
    image = private_image(site, way)
    with site.holding(image):
        assert site.redirected() == [image]
        site.srun(image, user="bob")
        assert site.redirected() == [image]


@pytest.mark.parametrize("way", ["itself", "link", "hint"])
def test_a_file_outside_of_the_sources_is_not_staged(site: Site, way: str) -> None:
    link = site.source("/shared/alice/innocent.sqsh")
    link.unlink(missing_ok=True)
    link.symlink_to("/etc/shadow")
    path = "/shared/alice/innocent.sqsh" if way == "link" else "/etc/shadow"
    if way == "hint":
        job = site.srun(None, "true", comment=f"stage={path}")
    else:
        job = site.srun(path)
        assert site.saw(job.job).error == "Permission denied"
    outcome = site.outcome(job.job)
    assert (outcome.result, outcome.reason) == ("declined", "outside-sources")
    assert site.entries() == {}


def test_the_copy_belongs_to_whom_the_source_belongs(site: Site) -> None:
    image = site.image("secret", mode=0o640)
    job = site.srun(image)
    copy = site.cache().image(site.outcome(job.job).key).stat()
    source = site.source(image).stat()
    assert (copy.st_uid, copy.st_gid, copy.st_mode) == (
        source.st_uid,
        source.st_gid,
        source.st_mode,
    )
    assert (copy.st_uid, copy.st_mode & 0o777) == (ALICE.uid, 0o640)
    assert site.cache().root.stat().st_mode & 0o777 == 0o700


def test_another_users_log_stays_writable_for_his_jobs(site: Site) -> None:
    """A redirect over it would have slurmstepd fail to open StdOut: JobLaunchFailure."""
    log = "/shared/bob/out.txt"
    site.source(log).write_text("begin\n")
    site.cluster.run(["chown", "bob:bob", log], user="root")
    with site.holding(None, comment=f"stage={log}") as alice:
        assert site.outcome(alice.job).reason == "not-squashfs"
        script = "#!/bin/sh\necho end\n"
        options = ("--nodelist=n1", f"--output={log}", "--open-mode=append")
        bob = site.cluster.submit(script, *options, user="bob")
        site.wait_over(bob)
        assert site.source(log).read_text() == "begin\nend\n"
