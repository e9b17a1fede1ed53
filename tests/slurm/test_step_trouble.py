"""Whatever the companion's helper does: the step has the bytes that it would have had without."""

from __future__ import annotations

import dataclasses

import pytest
from host import wait_until
from jobs import CLI, Site
from spec import ClusterSpec, plugstack_conf
from steps import accompanied

HELPER = "/etc/helper"
REAL = f"#!/bin/sh\nexec {CLI} step\n"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return accompanied(1, companion=f"helper={HELPER}")


@pytest.fixture
def spank(spank: Site) -> Site:
    """With a helper that does what it should; a test may put another one there."""
    put(spank, REAL)
    companion(spank, f"helper={HELPER}")
    return spank


def companion(site: Site, arguments: str) -> None:
    """Its arguments from the next step on."""
    spec = dataclasses.replace(site.cluster.spec, companion=arguments)
    site.cluster.write("/etc/slurm/plugstack.conf", plugstack_conf(spec))


def put(site: Site, text: str) -> None:
    site.cluster.host_path(HELPER).unlink(missing_ok=True)
    site.cluster.write(HELPER, text, mode=0o755)


USE = "use\\t{}\\t{}\\t1\\t1\\t1\\t1\\t1\\n"
BROKEN = {
    "killed": "kill -9 $$",
    "hangs-with-a-child": "sleep 60 & wait",
    "another-file": f"printf '{USE.format('/etc/shadow', '$image')}'",
    "another-place": f"printf '{USE.format('/etc/shadow', '/etc/passwd')}'",
    "no-entry": f"printf '{USE.format('/mnt/nvme/forestage/entries/none', '$image')}'",
}


@pytest.mark.parametrize("way", [*BROKEN, "missing"])
def test_broken_or_missing_helper_leaves_the_step_with_the_source(spank: Site, way: str) -> None:
    image = spank.image("trouble")
    work = f"image=$SPANK__SLURM_SPANK_OPTION_pyxis_container_image\n{BROKEN.get(way, '')}"
    put(spank, f"#!/bin/sh\n{work}\n")
    if way == "hangs-with-a-child":  # one that serves may need longer on a busy machine
        companion(spank, f"helper={HELPER} timeout=3")
    if way == "missing":
        spank.cluster.host_path(HELPER).unlink()
    job = spank.srun(image)
    assert (job.code, job.stdout) == (0, 'NAME="trouble"\nID=trouble\n'), job
    assert spank.shows_source(spank.saw(job.job))
    ps = ["ps", "-e", "-o", "comm="]
    wait_until(lambda: "sleep" not in spank.root(ps, "n1"), 60, lambda: "the helper lives on")


def test_working_helper_at_the_same_path_redirects_the_step(spank: Site) -> None:
    """Else the tests above would pass with a companion that does nothing."""
    job = spank.srun(spank.image("trouble"))
    assert not spank.shows_source(spank.saw(job.job))


def test_step_prints_on_stderr_why_its_image_was_not_copied(spank: Site) -> None:
    served_well = spank.srun(spank.image("good"))
    spank.configure(redirect="spank", max_size="1KiB")
    too_large = spank.srun(spank.image("large", mib=2))
    assert (served_well.code, too_large.code) == (0, 0)
    assert "forestage: " not in served_well.stderr
    assert "forestage: " in too_large.stderr
    assert "original path" in too_large.stderr
