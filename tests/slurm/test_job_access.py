"""Nothing that forestage puts on a node opens a file for somebody who could not read its source."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from jobs import Site

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
def test_private_image_of_a_running_job_is_closed_to_other_users(site: Site, way: str) -> None:
    image = private_image(site, way)
    bob = snoop(site, "bob")
    with site.holding(image) as job:
        key = site.outcome(job.job).key
        assert site.saw(job.job).file == site.copy(key)
        late, root = snoop(site, "bob"), snoop(site, "root")
        asked = site.srun(image, user="bob")
        hinted = site.srun(None, "cat", image, comment=f"stage={image}", user="bob")
        assert site.saw(asked.job).error == "Permission denied"
        assert "Permission denied" in hinted.stderr
        for one in (asked, hinted):
            assert one.code != 0
            assert site.outcome(one.job).reason == "no-permission"
        assert site.redirected() == [image]
        assert findings(late) == []
    assert findings(bob) == []
    assert f"/mnt/nvme/forestage/entries/{key}/image" in findings(root), "it looks in vain"


def test_another_users_log_hinted_as_an_image_stays_writable_for_its_owners_jobs(
    site: Site,
) -> None:
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
