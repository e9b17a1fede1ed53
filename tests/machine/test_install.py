"""What docs/install.md tells an admin to do brings a hit, on a node as sites have them."""

from __future__ import annotations

import json

import pytest
from compute import Compute


@pytest.mark.releases
def test_node_installed_by_the_page_has_no_critical_finding_and_no_failed_unit(
    node: Compute,
) -> None:
    found = json.loads(node.run("forestage check --json || true").out)["findings"]
    assert [one["id"] for one in found if one["level"] == "critical"] == [], found
    failed = node.run("systemctl list-units --failed --plain --no-legend").out
    assert failed == ""


@pytest.mark.releases
def test_image_is_read_through_then_a_hit_from_the_raid(node: Compute) -> None:
    image = node.image("first")
    look = f"sha256sum <{image.path}; findmnt -n -o FSTYPE -T {image.path}; echo $SLURM_JOB_ID"
    stage = f"stage={image.path}"
    with node.configured("bandwidth: 400KiB\n"):  # so that it is not over when the step begins
        cold = node.srun(stage, look).out.split()
        assert cold[0] == image.sha256
        node.until('test -n "$(ls /mnt/nvme/forestage/entries)"')
    warm = node.srun(stage, look).out.split()
    assert warm[0] == image.sha256
    assert (cold[2], warm[2]) == ("fuse.forestage", "xfs")
    assert node.results(int(warm[3]), "step") == ["hit"]
