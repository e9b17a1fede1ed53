"""Where enroot binds a directory above the image, a container starts as it does without forestage.

The kernel refuses such a bind, which leaves out what is mounted below, in the container's user
namespace: so nothing may be mounted below. The stand-in for pyxis binds as enroot does.
"""

from __future__ import annotations

import dataclasses

import pytest
from jobs import RELEASE, Site
from spec import ClusterSpec
from steps import accompanied, seen_at, served

SYSCONF, OWN = "/usr/local/etc/enroot", "/home/alice/own"
LINE = "/shared /shared none x-create=dir,bind,rw,nosuid\n"
# Nobody runs it: forestage reads where it is configured.
ENROOT = f'#!/bin/sh\nconfig::export ENROOT_SYSCONF_PATH     "{SYSCONF}"\n'
SAID = {
    "site": f"{SYSCONF}/mounts.d/50-site.fstab",
    "user": "/home/alice/.config/enroot/mounts.d/x.fstab",
    "user-elsewhere": f"{OWN}/mounts.d/x.fstab",
}


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    spec = accompanied(1)
    files = {**spec.files, "/usr/local/bin/enroot": ENROOT}
    plugstack = tuple(f"{line} binds={SYSCONF} own=.config/enroot" for line in spec.plugstack)
    return dataclasses.replace(spec, files=files, plugstack=plugstack)


@pytest.mark.cases(2)
@pytest.mark.parametrize("where", SAID)
@pytest.mark.parametrize("cached", [True, False], ids=["hit", "cold"])
def test_container_that_binds_a_directory_above_its_image_starts_from_the_source(
    site: Site, where: str, cached: bool
) -> None:
    site.configure(redirect="spank", cold="through")
    image = site.image(f"bound-{where}-{cached}")
    if cached:
        site.srun(image)
        site.await_stagers()
        site.srun(image)
        assert seen_at(site, image)[-1].mount_point == image  # nothing is bound above it yet
    site.cluster.write(SAID[where], LINE)
    own = f"--export=ALL,ENROOT_CONFIG_PATH={OWN}"
    try:
        ran = site.srun(image, *RELEASE, options=[own] if where == "user-elsewhere" else [])
    finally:
        site.root(["rm", SAID[where]], "n1")
    assert (ran.code, ran.stderr) == (0, "")
    assert [one.reason for one in served(site, ran.job, "n1")] == ["below-bind"]
    (seen,) = site.seen(ran.job)
    assert (seen.sha256, seen.mount_point) == (site.sha256(image), "/shared")
